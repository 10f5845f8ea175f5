//! `forward = "proxy"`: `lvsd` itself serves such services, by forwarding data between sockets. It
//! needs no dataplane and, for ports from 1024 on, no privileges.
//!
//! ```text
//!             ┌ listener ─ accept ─┐                             ┌▶ tcp: two pumps (pipe) ─▶ server
//! lvs-proxy-N ┤                    ├─ Balancer: chooses server ──┤
//!             └ socket ── datagram ┘  (lvs_core::Director)       └▶ udp: a socket a client ▶ server
//! ```
//!
//! `balancer` is a director of `lvs-core` that receives events of connections instead of packets,
//! so that schedulers, persistence, thresholds, limits, filters, drains and counters are those of
//! the dataplane. [`Proxy`] is configured by the calls of a dataplane. Each worker is a thread with
//! an event loop and listeners of its own.
#![forbid(unsafe_code)]

mod balancer;
mod clients;
mod close_signal;
pub mod header;
mod pipe;
mod proxy;
mod tcp;
#[cfg(test)]
mod tests;
mod udp;
mod workers;

use std::time::Duration;

pub use balancer::Counts;
pub use proxy::Proxy;

/// Settings of a service's proxy: `proxy = { ... }` in the file of `lvsd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Version of the PROXY protocol header that the proxy sends to servers; `None` for no header.
    pub send: Option<header::Version>,
    /// Whether clients must first send a PROXY protocol header with the original client's address.
    pub accept: bool,
    /// Time limit for connecting a client to a server, including attempts with other servers.
    pub connect_timeout: Duration,
    /// Time without data after which a connection, or the session of a client that sends datagrams,
    /// is closed. For a client that has sent no datagram after an answer, at most 30 seconds apply.
    pub idle_timeout: Duration,
}

impl Options {
    /// Default of `connect_timeout`.
    pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
    /// Default of `idle_timeout` for TCP services: the timeout of an idle connection in the
    /// kernel's IPVS.
    pub const IDLE_TCP: Duration = Duration::from_secs(15 * 60);
    /// Default of `idle_timeout` for UDP services.
    pub const IDLE_UDP: Duration = Duration::from_secs(5 * 60);
}

impl Default for Options {
    fn default() -> Self {
        Self {
            send: None,
            accept: false,
            connect_timeout: Self::CONNECT_TIMEOUT,
            idle_timeout: Self::IDLE_TCP,
        }
    }
}

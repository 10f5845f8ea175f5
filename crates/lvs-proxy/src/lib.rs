//! `forward = "proxy"`: services that `lvsd` itself serves, by relaying data between sockets. It
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

/// Proxy settings of a service: `proxy = { ... }`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Version of the header with the client's address that the proxy sends to servers first.
    pub send: Option<header::Version>,
    /// Whether clients first send a header with the original client's address.
    pub accept: bool,
    /// Longest time of a connection attempt to a server.
    pub connect_timeout: Duration,
    /// Time without data after which a connection is closed.
    pub idle_timeout: Duration,
}

impl Options {
    /// Time limit for connecting to a server, unless the file sets it.
    pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
    /// Time without data after which a TCP connection is closed: the timeout of an idle connection
    /// in the kernel's IPVS.
    pub const IDLE_TCP: Duration = Duration::from_secs(15 * 60);
    /// Time without a datagram after which a client's session with its server is closed.
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

//! Linux Virtual Server decisions as a library.
//!
//! A *director* presents a *virtual service*: an address, a port and a protocol, or a firewall
//! mark. It distributes the connections of the service over *real servers*. This crate makes the
//! decisions of a director as IPVS in the Linux kernel makes them: the service of a packet, the
//! server of a new connection, the state and the end of a connection, and all counters.
//!
//! The crate does no I/O, reads no clock, starts no thread and logs nothing. The caller passes the
//! time ([`Instant`]), the seed of random numbers and a summary of each packet ([`PacketMeta`]).
//! The crate returns a [`Verdict`]. The caller parses, rewrites and sends the frames;
//! `lvs-dataplane` is such a caller.
//!
//! # Example
//!
//! ```
//! use std::net::SocketAddr;
//!
//! use lvs_core::{
//!     Director, Family, Forwarding, Hook, Instant, Options, PacketMeta, ServerConfig, ServiceConfig,
//!     ServiceKey, TcpFlags, Verdict,
//! };
//!
//! let vip: SocketAddr = "198.51.100.1:80".parse()?;
//! let server: SocketAddr = "10.0.0.11:80".parse()?;
//! let service = ServiceKey::tcp(vip);
//! let now = Instant::ZERO;
//!
//! let mut director = Director::new(Options::default());
//! let control = &mut director.control;
//! control.add_service(service, ServiceConfig::new(Family::V4, "wlc"), None)?;
//! control.add_server(&service, server, &ServerConfig::new(1, Forwarding::Nat), now)?;
//!
//! let client: SocketAddr = "192.0.2.7:40000".parse()?;
//! let syn = PacketMeta::tcp(Hook::Local, client, vip, TcpFlags::SYN);
//! match director.handle_packet(&syn, now) {
//!     Verdict::Forward(forward) => assert_eq!(forward.target, server),
//!     other => panic!("not forwarded: {other:?}"),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Where to begin
//!
//! | type | use it for |
//! |---|---|
//! | [`Pool`] | choosing a server, without packets |
//! | [`Director`] | all decisions, in a program with one thread |
//! | [`Control`] and [`Shard`] | all decisions, in a program with many threads |
//!
//! The examples of the repository (`examples/src/bin/`) show each: `schedulers` and `embed` use
//! [`Pool`], `geographic` adds a scheduler of its own to a [`Director`], and `embed-dataplane` runs
//! the complete dataplane inside another program.
//!
//! All threads share one [`Control`] behind a lock: services, servers, new connections,
//! persistence, defences and statistics. Each thread has a [`Shard`] of its own, without a lock:
//! the packets, states, timers and counters of known connections.
//!
//! The root has the types that an embedder needs first. The rest is in modules:
//!
//! | modules | contents |
//! |---|---|
//! | [`sched`] | the built-in schedulers |
//! | [`settings`], [`filter`], [`full_nat`], [`ftp`], [`mark`], [`tunnel`] | settings of directors, services and servers |
//! | [`stats`], [`explain`], [`attempts`], [`recent`] | counters, explanations of decisions |
//! | [`sync`] | messages of the synchronisation daemons |
//! | [`edit`], [`fast_path`], [`memory`], [`offload`], [`replication`] | types for a dataplane like `lvs-dataplane` |
//! | [`hash`], [`random`] | hash functions and random numbers of the decisions |
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | `api` | types of the control protocol (serde), atomic lists of changes, text of `/proc/net/ip_vs*` |
//! | `ipvsadm` | the command line of ipvsadm 1.31 and its listings; needs `api` |
//!
//! Both are off by default. The crate is `no_std`; it needs `alloc` and atomic integers of 64 bits.
//!
//! # Stability
//!
//! The crate needs Rust 1.89. Before version 1.0, each new minor version may change the public
//! API. Methods of [`Control`] and [`Shard`] that use types of [`offload`] and [`replication`]
//! serve `lvs-dataplane` and change most often; [`Pool`] and [`Director`] change least.
//!
//! # Differences from the kernel
//!
//! The tests of the workspace replay recordings of the kernel's decisions, as frames. The hash
//! table differs from the kernel's, and with it the order of listings and the connections that
//! `drop_entry` visits. `drop_entry` visits as many connections as in the kernel, chosen at random,
//! and spares the same states.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

#[cfg(feature = "api")]
pub mod api;
pub mod attempts;
mod conn;
mod control;
mod director;
mod error;
pub mod filter;
pub mod hash;
#[cfg(feature = "ipvsadm")]
pub mod ipvsadm;
mod latency;
mod lpm;
pub mod mark;
mod packet;
mod persistence_sip;
mod pool;
mod prefix;
#[cfg(feature = "api")]
pub mod proc;
pub mod random;
pub mod recent;
mod registry;
pub mod sched;
mod scheduler;
mod server;
mod service;
pub mod settings;
mod shard;
pub mod stats;
pub mod sync;
mod time;
pub mod tunnel;
mod verdict;

pub(crate) use conn::State;
pub use control::{Control, Options, Service};
pub use director::Director;
/// Changes that the FTP helper makes to the text of a server's replies, and to the sequence numbers
/// of later segments.
pub mod edit {
    pub use crate::verdict::{Edit, Replacement, Shift};
}
/// Answers of [`Control::explain`].
pub mod explain {
    pub use crate::control::{Candidate, Explanation};
}
/// Decisions about packets of established connections, without the steps of the slow path.
pub mod fast_path {
    pub use crate::packet::Plain;
    pub use crate::shard::{Ahead, Passed};
}
/// Ports of the FTP helper.
pub mod ftp {
    pub use crate::shard::{FTP_PORTS_MAX, helper_ports};
}
/// Local addresses and ports of full NAT.
pub mod full_nat {
    pub use crate::shard::{LocalAddress, worker_of};
}
/// Types for the offload of connections to the kernel fast path.
pub mod offload {
    pub use crate::shard::{LocalChange, LocalEnd, Offer, OffloadState, Unpublished};
}
/// Results of items received from peers, and the position in a walk over the digests of services.
pub mod replication {
    pub use crate::control::{DigestWalk, ItemResults, TakenOver};
}
/// The memory of a connection table.
pub mod memory {
    pub use crate::conn::adopt::Adoption;
    pub use crate::conn::memory::{Layout, LayoutError, Memory, OutOfMemory, Region};
}
pub use error::Error;
pub use packet::{
    Hook, IcmpError, PacketMeta, Protocol, SctpChunk, Segment, TcpFlags, Transport, Tuple,
};
pub use pool::{Pool, Preview};
pub use prefix::Prefix;
pub use registry::Registry;
pub use scheduler::{Request, Scheduler};
pub use server::{OpenConnection, Server};
pub use service::{Family, Forwarding, ServerConfig, ServiceConfig, ServiceFlags, ServiceKey};
pub use shard::{Connection, NeedsControl, Reset, Shard};
pub use time::Instant;
pub use verdict::{AcceptReason, ConnId, DropReason, Forward, Reply, ServerId, Verdict};

//! Linux Virtual Server decisions as a library.
//!
//! A *director* presents a *virtual service* (an address, a port and a protocol, or a firewall
//! mark) and spreads its connections over *real servers*. This crate holds everything that such a
//! director *decides*, the way the Linux kernel's IPVS decides it: which service a packet belongs
//! to, which real server a new connection goes to, which state a connection is in, when it ends,
//! and what is counted.
//!
//! It does no I/O, reads no clock, starts no thread and logs nothing. Time is a parameter
//! ([`Instant`]), randomness is a seed, and packets arrive as a small [`PacketMeta`]; what comes
//! back is a [`Verdict`]. How a frame is parsed and rewritten is the business of whoever embeds
//! this crate (`lvs-dataplane` does it for Ethernet).
//!
//! | layer | what it decides |
//! |---|---|
//! | [`Director`] | everything, for programs with one thread: a [`Control`] and a [`Shard`] |
//! | [`Control`] | services, servers, new connections, persistence, defences, statistics; shared by the workers |
//! | [`Shard`] | packets of known connections: their state, timers, counts; one a worker, without a lock |
//! | [`Pool`], [`sched`] | which server is next, without packets |
//! | [`sync`] | what synchronisation daemons say to each other |
//! | [`proc`] | the text of `/proc/net/ip_vs*` |
//!
//! Decisions are the kernel's, choice by choice, as the recordings under `tests/golden` show. Two
//! things differ, because they follow from the kernel's hash table, which is another one: the order
//! of listings, and which connections `drop_entry` visits (as many, at random, with the same states
//! spared).
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

#[cfg(feature = "api")]
pub mod api;
mod conn;
mod control;
mod director;
mod error;
mod filter;
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
pub mod proc;
mod random;
pub mod sched;
mod server;
mod service;
mod settings;
mod shard;
mod stats;
pub mod sync;
mod time;
mod tunnel;
mod verdict;

pub(crate) use conn::State;
pub use control::{
    Candidate, Control, Explanation, Heard, Options, Service, TablesWalk, TakenOver,
};
pub use director::Director;
/// The memory that a connection table lies in.
pub mod memory {
    pub use crate::conn::memory::{Adoption, Layout, LayoutError, Memory, OutOfMemory, Region};
}
pub use error::Error;
pub use filter::{FILTER_PREFIXES_MAX, FilterLists, SourceFilter, parse_prefixes};
pub use latency::Latency;
pub use packet::{
    Hook, IcmpError, PacketMeta, Plain, Protocol, SctpChunk, Segment, TcpFlags, Transport, Tuple,
};
pub use pool::Pool;
pub use prefix::Prefix;
pub use random::SplitMix64;
pub use sched::{HashSlot, Registry, Request, Scheduler};
pub use server::{OpenConnection, Server};
pub use service::{Family, Forwarding, ServerConfig, ServiceConfig, ServiceFlags, ServiceKey};
pub use settings::{Extras, Limits, OnServerDown, Profile, Sysctls, WhenFull};
pub use shard::{
    Ahead, Connection, Evictions, FTP_PORTS_MAX, LocalAddress, LocalChange, LocalEnd, NeedsControl,
    Offer, Passed, Reset, Ripeness, Shard, Unpublished, helper_ports, worker_of,
};
pub use stats::{Counts, Stats};
pub use time::Instant;
pub use tunnel::{Tunnel, TunnelChecksum, TunnelType};
pub use verdict::{
    AcceptReason, ConnId, DropReason, Edit, Forward, Replacement, Reply, ServerId, Shift, Verdict,
};

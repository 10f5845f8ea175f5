//! Hosts in network namespaces for the tests, the benches and the demo.
//!
//! A [`Testbed`] contains *hosts*, which veth pairs and bridges connect. A host is a network
//! namespace and a mount namespace, which a sleeping process keeps open. A [`Site`] is a complete
//! LVS installation on a testbed: client, router, director and real servers with nginx, in one of
//! three [`Topology`]s.
//!
//! ```text
//!  two-arm   client ── front LAN ── director ── back LAN ── servers
//!  one-arm   client ── router ── LAN (director, servers)
//!  routed    client ── router ─┬─ front LAN (director)
//!                              └─ back LAN (servers)
//! ```
//!
//! A testbed is removed when its process ends, even by a panic, Ctrl-C or `kill -9`: a *janitor*
//! process cleans up when its pipe from that process closes. Without root, testbeds use a user
//! namespace. The crate is for development and is not published.

#![forbid(unsafe_code)]

pub mod attack;
pub mod browser;
pub mod cluster;
pub mod conformance;
pub mod content;
pub mod decap;
pub mod demo;
pub mod differential;
pub mod fuzz;
pub mod hostile;
mod kernel_path;
pub mod listing;
pub mod load;
pub mod netns;
pub mod open_metrics;
pub mod oracle;
pub mod paced;
pub mod packet;
pub mod ping;
pub mod programs;
pub mod servers;
pub mod site;
pub mod suite;
pub mod transcripts;
pub mod waiters;
pub mod without_tcx;

pub use load::{LoadOptions, LoadReport};
pub use netns::{Host, Link, Mode, Proc, Testbed, soon, wait_until};
pub use site::{Forward, Site, SiteOptions, Topology, Vip};

//! Packet engine of a Linux Virtual Server in userspace.
#![deny(unsafe_code)]

#[cfg(feature = "engine")]
pub mod arp;
#[cfg(feature = "engine")]
pub mod drop;
#[cfg(feature = "engine")]
pub mod fragment;
#[cfg(feature = "engine")]
pub mod frame;
#[cfg(feature = "engine")]
pub mod icmp;
#[cfg(feature = "engine")]
pub mod io;
#[cfg(feature = "engine")]
pub mod neighbour;
#[cfg(feature = "engine")]
pub mod net;
#[cfg(feature = "engine")]
pub mod parse;
#[cfg(feature = "engine")]
pub mod pipeline;
#[cfg(feature = "engine")]
pub mod rewrite;
#[cfg(feature = "engine")]
pub mod segment;
#[cfg(feature = "engine")]
pub mod shield_spec;
#[cfg(feature = "engine")]
pub mod tunnel_path;
#[cfg(feature = "engine")]
pub mod wire;

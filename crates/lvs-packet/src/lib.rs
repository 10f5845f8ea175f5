//! The packet path: processes received frames, and returns the frames to send. It does no I/O and
//! reads no clock.
//!
//! A program that embeds this crate creates a [`Pipeline`](pipeline::Pipeline), and calls
//! [`Pipeline::process`](pipeline::Pipeline::process) with received frames. It implements
//! [`Net`](net::Net), the look-ups of ports, routes and neighbours, and passes a director, which
//! implements [`Decide`](pipeline::Decide), for example [`lvs_core::Director`]. After each call, it
//! applies the requests of the [`Output`](pipeline::Output) and sends the frames.
#![forbid(unsafe_code)]

pub mod arp;
pub mod common;
pub mod drop;
pub mod fragment;
pub mod frame;
pub mod held;
pub mod icmp_limit;
pub mod intercept;
pub mod ip_id;
pub mod mld;
pub mod ndp;
pub mod net;
pub mod oversize;
pub mod parse;
pub mod pipeline;
pub mod return_path;
pub mod rewrite;
pub mod segment;
pub mod settings;
pub mod shared_map;
pub mod steer;
pub mod syn_limiter;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tunnel_path;
pub mod ways;
pub mod wire;

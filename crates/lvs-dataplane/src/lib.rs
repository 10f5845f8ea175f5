//! Packet engine of a Linux Virtual Server in userspace.
#![deny(unsafe_code)]
// They wait for whoever reads, and panic where nobody can: `log` does neither.
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

#[cfg(feature = "programs")]
#[path = "sys/attached.rs"]
pub mod attached;
#[cfg(feature = "confine")]
pub mod confine;
pub mod control;
#[cfg(feature = "engine")]
mod deadline;
pub mod directors;
#[cfg(feature = "engine")]
pub mod engine;
pub mod files;
#[cfg(feature = "engine")]
pub mod host;
#[cfg(feature = "engine")]
pub mod in_kernel;
#[cfg(feature = "engine")]
pub mod io;
#[cfg(feature = "log")]
pub mod log;
#[cfg(feature = "engine")]
mod mailbox;
#[cfg(feature = "names")]
pub mod names;
#[cfg(feature = "engine")]
pub mod netlink;
#[cfg(feature = "log")]
pub mod notify;
#[cfg(feature = "engine")]
pub mod outlive;
#[cfg(feature = "engine")]
pub mod packet;
#[cfg(feature = "groups")]
#[path = "sys/peer_groups.rs"]
mod peer_groups;
#[cfg(feature = "engine")]
mod random;
#[cfg(feature = "confine")]
#[path = "sys/seccomp.rs"]
mod seccomp;
#[cfg(feature = "engine")]
mod sync;
#[cfg(feature = "engine")]
pub mod sys;
#[cfg(feature = "engine")]
pub mod watchdog;
pub mod words;

//! Packet engine of a Linux Virtual Server in userspace.
#![deny(unsafe_code)]

pub mod control;
#[cfg(feature = "engine")]
pub mod engine;
#[cfg(feature = "engine")]
pub mod host;
#[cfg(feature = "engine")]
pub mod io;
#[cfg(feature = "engine")]
mod mailbox;
#[cfg(feature = "names")]
pub mod names;
#[cfg(feature = "engine")]
pub mod netlink;
#[cfg(feature = "engine")]
pub mod packet;
#[cfg(feature = "engine")]
pub mod sys;

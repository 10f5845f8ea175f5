//! Packet engine of a Linux Virtual Server in userspace.
#![deny(unsafe_code)]

#[cfg(feature = "engine")]
pub mod frame;
#[cfg(feature = "engine")]
pub mod io;
#[cfg(feature = "engine")]
pub mod netlink;
#[cfg(feature = "engine")]
pub mod shield;
#[cfg(feature = "engine")]
pub mod sys;

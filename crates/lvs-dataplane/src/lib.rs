//! Packet engine of a Linux Virtual Server in userspace.
#![deny(unsafe_code)]

pub mod control;
#[cfg(feature = "engine")]
pub mod frame;
#[cfg(feature = "engine")]
pub mod io;
#[cfg(feature = "names")]
pub mod names;
#[cfg(feature = "engine")]
mod sys;

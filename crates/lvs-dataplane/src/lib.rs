//! Dataplane of a Linux Virtual Server in userspace: interfaces, kernel fast path, packet workers.
#![forbid(unsafe_code)]
// These macros wait for the reader of the stream, and panic if it is closed: `log` does neither.
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

pub mod dataplane;
pub mod host;
pub mod in_kernel;
pub mod io;
mod lock;
mod mailbox;
pub mod netlink;
pub mod outlive;
mod random;
mod sync;

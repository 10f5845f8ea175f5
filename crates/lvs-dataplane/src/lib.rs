//! Dataplane of a Linux Virtual Server in userspace: interfaces, kernel fast path, packet workers.
#![forbid(unsafe_code)]
// These macros block while the reader of the stream is slow, and panic if the stream is closed. The
// functions of `log` do neither.
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

pub mod dataplane;
pub mod fast_path;
pub mod host;
pub mod io;
mod mailbox;
pub mod netlink;
mod sync;
pub mod warm_restart;

//! Parts that lvsd and the dataplane have in common: the server of a control socket, the log, the
//! messages to systemd, the watchdog and the sandbox.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

pub mod admission;
pub mod confine;
mod connection;
pub mod deadline;
mod handler;
mod listen;
pub mod log;
pub mod notify;
pub mod server;
#[cfg(test)]
mod tests;
pub mod watchdog;

pub use listen::await_predecessor;

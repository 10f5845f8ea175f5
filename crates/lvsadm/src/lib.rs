//! Administers a Linux Virtual Server in userspace, with the command line of ipvsadm.
//!
//! Called as `ipvsadm`, `ipvsadm-save` or `ipvsadm-restore`, the program behaves as these, byte for
//! byte. Called by another name, it accepts the same command lines, more options, and additional
//! commands.
#![forbid(unsafe_code)]

mod atomic;
mod invocation;
pub mod launch;
mod operator;
mod own;
mod program;
mod session;
pub mod start;

pub use invocation::Program;
pub use program::{Streams, run};

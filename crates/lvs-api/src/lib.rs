//! The control protocols of `lvs-dataplane` and `lvsd`: messages, addresses of sockets, clients.
//!
//! [`Client`] sends requests to a dataplane; the messages are the types of [`lvs_core::api`].
//! [`daemon`] has the messages and the client of `lvsd`.
#![forbid(unsafe_code)]

mod address;
mod client;
pub mod daemon;
pub mod directors;
pub mod files;
pub mod guidance;
pub mod life;
pub mod names;
pub mod peer;
pub mod place;
pub mod reverse_path;
pub mod starting;
mod state;
pub mod words;

pub use address::{Address, SOCKET_VARIABLE, impostor};
pub use client::{Client, Error};
pub use place::{LockError, Steering, steer};
pub use state::{sweep, tidy};

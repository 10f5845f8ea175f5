//! The control socket: [`Client`] for those who ask an engine, [`server`] for the engine that
//! answers.
//!
//! The messages are the types of [`lvs_core::api`]. [`daemon`] is the same for `lvsd`.

mod address;
#[cfg(feature = "engine")]
mod admission;
mod client;
#[cfg(feature = "engine")]
mod connection;
pub mod daemon;
#[cfg(feature = "engine")]
mod listen;
mod peer;
mod place;
#[cfg(feature = "engine")]
pub mod server;
#[cfg(all(test, feature = "engine"))]
mod tests;

pub use address::{Address, SOCKET_VARIABLE};
pub use client::{Client, Error};
pub use place::{LockError, Steering, steer};

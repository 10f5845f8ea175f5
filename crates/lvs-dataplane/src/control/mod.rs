//! The control socket: [`Client`] for those who ask an engine, [`server`] for the engine that answers.
//!
//! The messages are the types of [`lvs_core::api`].

mod address;
mod client;
#[cfg(feature = "engine")]
pub mod server;

pub use address::{Address, SOCKET_VARIABLE};
pub use client::{Client, Error};

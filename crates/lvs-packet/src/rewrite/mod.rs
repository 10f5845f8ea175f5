//! Applies a verdict to one packet in place: translation, encapsulation, link header.
//!
//! All functions work on frames that begin with their IP header; the link header is added last.

pub mod mac;
pub mod mss;
pub mod nat;
pub mod payload;
pub mod tunnel;

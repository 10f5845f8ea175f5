//! Applies a verdict to one packet in place: translation, encapsulation, link header.
//!
//! The functions expect frames without a link header, which is added last.

pub mod mac;
pub mod mss;
pub mod nat;
pub mod payload;
pub mod tunnel;

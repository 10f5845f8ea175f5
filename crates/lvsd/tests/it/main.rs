//! Integration tests of the crate.

mod convert;
mod log;
mod program;
mod reload;

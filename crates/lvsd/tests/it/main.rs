//! The integration tests of the crate, in one executable.

mod convert;
mod log;
mod program;
mod reload;

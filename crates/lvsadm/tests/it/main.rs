//! The integration tests of the crate, in one executable.

mod atomic;
mod listings;
mod program;

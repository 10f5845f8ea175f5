//! The integration tests of the crate, in one executable.

mod cluster;
mod compare;
mod report;

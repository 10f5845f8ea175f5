//! The integration tests of the crate, in one executable.

mod apply;
mod beyond;
mod common;
mod deviations;
mod documentation;
mod filter;
mod floods;
mod full_nat;
mod misuse;
mod passing;
mod semantics;
mod threads;

//! Benchmarks and their methods: see README.md.

#![forbid(unsafe_code)]

pub mod classic;
pub mod cluster;
pub mod compare;
pub mod endpoint;
pub mod files;
pub mod load;
pub mod machine;
pub mod memory;
pub mod publishing;
pub mod report;
pub mod stats;
pub mod transfers;
mod unpack;
pub mod yardsticks;

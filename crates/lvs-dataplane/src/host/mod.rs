//! Everything that concerns the host.

pub mod shield;
pub mod steering;

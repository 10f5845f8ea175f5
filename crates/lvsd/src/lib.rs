//! x
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
#[cfg(test)]
mod fake;
pub mod reconcile;

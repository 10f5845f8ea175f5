//! The integration tests that make network namespaces: run them as root.

mod af_packet;
mod common;
mod fast_path_aggregates;
mod fast_path_workers;
mod hop;
mod netlink;
mod shield;

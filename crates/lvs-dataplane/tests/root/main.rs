//! The integration tests that make network namespaces: run them as root.

mod af_packet;
mod common;
mod hop;
mod in_kernel_aggregates;
mod netlink;
mod shield;

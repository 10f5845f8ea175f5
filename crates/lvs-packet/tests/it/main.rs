//! The integration tests of the crate, in one executable. They need no privileges.

mod deviations;
mod down;
mod drops;
mod lab;
mod pipeline_borrowed;
mod pipeline_filters;
mod pipeline_floods;
mod pipeline_ftp;
mod pipeline_full_nat;
mod pipeline_hop;
mod pipeline_host;
mod pipeline_ipv6;
mod pipeline_protocols;
mod pipeline_table;
mod pipeline_workers;

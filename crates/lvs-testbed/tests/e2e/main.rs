//! The programs in network namespaces, with real servers and clients. One program of all these
//! tests: that many would be linked one after another, and run so too.

mod common;

mod api;
mod attack;
mod beyond;
mod checks;
mod checksums;
mod cluster;
mod conformance;
mod deviations;
mod discovery;
mod dns;
mod doctor;
mod doors;
mod etcd;
mod evaluation;
mod failure;
mod filters;
mod ftp;
mod fullnat;
mod fuzz;
mod host;
mod hostile;
mod hostile_links;
mod in_kernel;

mod in_kernel_twins;
mod in_kernel_xdp;
mod ipv6;
mod killed;
mod ldirectord;
mod listing;
mod local_node;
mod lvsd;
mod many_directors;
mod marks;
mod methods;
mod model;
mod modern;
mod networks;
mod operator;
mod peers;
mod pmtu;
mod quick_start;
mod silence;
mod sip;
mod sync;
mod sync_with_kernel;
mod testbed;
mod tftp;
mod transcripts;
mod tun_backend;
mod two_ways;
mod workers;

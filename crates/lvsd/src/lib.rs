//! The daemon of a Linux Virtual Server in userspace, as a library for a small main program.
//!
//! ```text
//! config/         TOML ──▶ checked Config, or all errors in it
//! convert/        conversion of other programs' files
//! health/         health checks, a task for each
//! sources/        the answers of DNS, etcd and Kubernetes
//! expand/         Config and the answers of the sources ──▶ all services (pure)
//! admin           the administrative states of servers, which operators set
//! desired         quorum, panic mode, sorry server (pure):
//!                 Config + Discovered + Health + Overrides ──▶ Desired
//! reconcile/      Desired and the state of the dataplane ──▶ ordered changes (pure)
//! dataplane/      the connection to the dataplane: attach or start, apply changes, replace a lost
//!                 one
//! daemon/         the main loop, which uses all of these modules
//! cluster/        keepalived, announcements, maintenance of this director
//! channels        requests of clients to the loop, snapshots of the state, the stream of events
//! control_socket  the daemon's own control socket
//! api/            metrics, JSON over HTTP, the dashboard
//! counters        the daemon's own counters
//! notify_command  the program that receives events
//! notify          messages to the service manager
//! watchdog        the service manager's watchdog
//! last_good       the last valid configuration, for a start with an invalid file
//! verdict         the state of services and director, as a word and a line (pure)
//! token           the tokens for changes over TCP
//! facts           interfaces, groups and addresses of the host
//! clock           deadlines that a step of the wall clock does not move
//! text/           findings with their place in a text, and keys of tables
//! schema          the keys of the configuration file, for editors and manual pages
//! ```
//!
//! The daemon may crash or be killed at any time: the dataplane continues to forward. The next
//! daemon attaches to it, and changes only the settings that differ from the desired ones.
#![forbid(unsafe_code)]
// Printing blocks on a slow reader and panics without one. `lvs_process::log` does neither.
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

pub mod admin;
pub mod api;
#[cfg(test)]
mod cases;
pub mod channels;
pub mod cli;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod control_socket;
pub mod convert;
pub mod counters;
pub mod daemon;
pub mod dataplane;
pub mod desired;
pub mod expand;
pub mod facts;
pub mod health;
pub mod last_good;
pub mod notify_command;
pub mod reconcile;
mod replace;
pub mod schema;
pub mod sources;
pub mod text;
pub mod token;
pub mod verdict;
pub mod watchdog;

pub use lvs_process::notify;

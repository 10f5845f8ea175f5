//! The daemon of a Linux Virtual Server in userspace, as a library with a thin program around it.
//!
//! ```text
//! config/         TOML ──▶ checked Config, or everything that is wrong with it
//! convert/        other programs' files as lvsd's
//! health/         one task for each question that services ask: is the server up?
//! expand          the file's services with what DNS and etcd add (pure)
//! reconcile       services and health against what the engine holds ──▶ ordered changes (pure)
//! engine/         attach to an engine or start one; carry the changes out; start over when it is lost
//! daemon          the loop that joins them
//! host_addresses  which addresses the host has
//! admin           what people want of servers, whatever file and checks say
//! clock           deadlines that a step of the wall clock does not move
//! decide          what becomes of a service when servers are missing (pure)
//! cluster/        one director among several: keepalived, maintenance
//! requests        requests of clients to the daemon's loop
//! snapshot        the state of daemon and engine at one moment
//! control_socket  the daemon's own control socket
//! api/            metrics, JSON over HTTP, the dashboard
//! tally           what the daemon has counted itself
//! events          what has happened, for whoever wants to know
//! notify_command  the program that is told of events
//! last_good       the configuration that a crash over a broken file goes on with
//! watchdog        feeding systemd's, while all of the daemon goes on
//! notify          what systemd is told
//! proxy           services that the daemon serves itself
//! sources/        servers that DNS names, and what was last known of them
//! source          whom an address counts as, where places are shared out
//! text/           findings with their place in a text, and keys of tables
//! schema          the keys of the file, for editors and for reading
//! ```
//!
//! The daemon may crash or be killed at any time: the engine keeps forwarding, and the next daemon
//! attaches to it and finds nothing to change.
#![forbid(unsafe_code)]
// They wait for whoever reads, and panic where nobody can: `lvs_process::log` does neither.
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

pub mod admin;
pub mod api;
pub mod cli;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod control_socket;
pub mod convert;
pub mod daemon;
pub mod decide;
pub mod engine;
pub mod events;
pub mod expand;
pub mod health;
pub mod host_addresses;
pub mod last_good;
pub mod notify_command;
pub mod reconcile;
mod replace;
pub mod requests;
pub mod schema;
pub mod snapshot;
pub mod sources;
pub mod tally;
pub mod text;
pub mod token;
pub mod watchdog;
mod words;

pub use lvs_process::notify;

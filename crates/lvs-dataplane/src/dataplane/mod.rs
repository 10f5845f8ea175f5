//! The dataplane: it forwards the packets of this host's interfaces as the director decides, and
//! answers calls on a control socket.
//!
//! Each file imports files of lower rows only:
//!
//! ```text
//! start             opens tables, attaches to the host, takes over, starts threads
//! calls rules       the control socket
//! handle            the dataplane for the control socket, the keeper and embedding programs
//! peers             replication
//! worker            a packet worker
//! report successor
//! decider           the director for one worker
//! warm_state        the state that a successor takes over
//! context           lock, clock, stop flag, latest snapshot
//! threads           mailboxes and queues
//! kernel_path       the use of the kernel fast path
//! config
//! hook capture inbox local_clients network pages hub priority recent fixes
//! ```

mod calls;
mod capture;
mod config;
mod context;
mod decider;
mod fixes;
mod handle;
mod hook;
mod hub;
mod inbox;
mod kernel_path;
mod local_clients;
mod network;
mod pages;
mod peers;
mod priority;
mod recent;
mod report;
#[cfg(feature = "testing")]
pub mod rig;
mod rules;
mod start;
mod successor;
mod threads;
mod warm_state;
mod worker;

pub use self::config::{
    Config, PEERS_ALARM, PEERS_WAIT, PeersConfig, RulesError, StartError, UseKernel,
};
pub use self::handle::Handle;
pub use self::hook::{HookAction, PacketHook};
pub use self::start::Dataplane;
pub use crate::host::{Backend, HostError};
pub use lvs_core::api::WORKERS_MAX;

//! The interface of a scheduler, and its input.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::net::SocketAddr;
use core::time::Duration;

use crate::settings::Sysctls;
use crate::{Instant, Protocol, Server, ServiceFlags};

/// Input of a scheduler in addition to the servers.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The client's address and port.
    pub client: SocketAddr,
    /// Destination of the client's packet: the virtual address and port.
    pub virt: SocketAddr,
    /// The protocol of the client's packet.
    pub protocol: Protocol,
    /// Flags of the service: `sh` and `mh` use their flags at each choice.
    pub flags: ServiceFlags,
    /// Time at which the packet arrived.
    pub now: Instant,
}

/// An algorithm that chooses among real servers.
///
/// A user-defined implementation can be used like the built-in ones: register it with
/// [`Registry::register`](crate::Registry::register). The methods that report changes of the list
/// of servers are called *after* the change.
pub trait Scheduler: fmt::Debug + Send {
    /// Chooses a server for a new connection: an index into `servers`, or `None` if no server
    /// accepts it.
    fn pick(&mut self, servers: &[Arc<Server>], request: &Request) -> Option<usize>;

    /// A copy in the same state, for a preview; `None` if it cannot be copied.
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        None
    }

    /// The slot of the scheduler's hash table that belongs to a request; `None` without such a
    /// table.
    fn slot(&self, request: &Request) -> Option<HashSlot> {
        let _ = request;
        None
    }

    /// Announces that every later call will pass the same list of servers, that no other scheduler
    /// uses these servers, and that each of their changes will be reported. The scheduler may then
    /// keep results between two choices. A pool calls this before [`start`](Self::start).
    fn follow(&mut self) {}

    /// Sets the list, which may already contain servers (`init_service`).
    fn start(&mut self, servers: &[Arc<Server>]) {
        let _ = servers;
    }

    /// Called after a server was inserted at the start of the list, at index 0 (`add_dest`).
    fn server_added(&mut self, servers: &[Arc<Server>]) {
        let _ = servers;
    }

    /// Called after the server at `index` was removed from the list (`del_dest`).
    fn server_removed(&mut self, servers: &[Arc<Server>], index: usize) {
        let _ = (servers, index);
    }

    /// Called after the settings or the weight of the server at `index` were set, perhaps to the
    /// same values (`upd_dest`).
    fn server_edited(&mut self, servers: &[Arc<Server>], index: usize) {
        let _ = (servers, index);
    }

    /// Sets the seed of the scheduler's random numbers, if it uses any. A
    /// [`Control`](crate::Control) calls this before [`start`](Self::start).
    fn seed(&mut self, seed: u64) {
        let _ = seed;
    }

    /// Sets the sysctls. A [`Control`](crate::Control) calls this before [`start`](Self::start) and
    /// after each change of a sysctl.
    fn sysctls_changed(&mut self, sysctls: &Sysctls) {
        let _ = sysctls;
    }

    /// Interval of the calls of [`tick`](Self::tick); `None`: it is not called.
    fn period(&self) -> Option<Duration> {
        None
    }

    /// Called when a [`period`](Self::period) has passed since the start or since the last tick.
    fn tick(&mut self, now: Instant) {
        let _ = now;
    }

    /// Whether the scheduler uses [`Server::latency`], which is measured from the servers'
    /// replies. Services with such a scheduler accept only servers with NAT or full NAT.
    fn needs_replies(&self) -> bool {
        false
    }

    /// Whether the scheduler uses [`Server::last_weight`]. Then two directors choose the same
    /// servers only if servers with weight 0 have the same last weight at both.
    fn goes_by_last_weight(&self) -> bool {
        false
    }

    /// Whether a weight is a number of connections instead of a share: a slow start then does not
    /// multiply weights.
    fn weight_is_capacity(&self) -> bool {
        false
    }
}

/// A slot in a scheduler's hash table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
pub struct HashSlot {
    /// The slot's number, from 0.
    pub number: u32,
    /// Number of slots in the table.
    pub of: u32,
}

//! Schedulers: which real server takes a new connection.
//!
//! Every list of servers is in the kernel's order: the one added last comes first. Ties go to the first in that order,
//! so to the most recent one.

mod lc;
mod rr;
mod wlc;
mod wrr;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::net::SocketAddr;

pub use self::lc::LeastConnections;
pub use self::rr::RoundRobin;
pub use self::wlc::WeightedLeastConnections;
pub use self::wrr::WeightedRoundRobin;
use crate::{Instant, Protocol, Server, ServiceFlags};

/// What a scheduler may go by besides the servers.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The client's address and port.
    pub client: SocketAddr,
    /// Where the client sent its packet: the virtual address and port.
    pub virt: SocketAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// Flags of the service; `sh` and `mh` read theirs at each decision.
    pub flags: ServiceFlags,
    /// When it came.
    pub now: Instant,
}

/// A way of choosing among real servers.
///
/// An implementation of your own takes part in everything the built-in ones do: register it with
/// [`Registry::register`]. It is told of every change to the list *after* the change.
pub trait Scheduler: fmt::Debug + Send {
    /// Chooses a server for a new connection: an index into `servers`, or `None` if none can take it.
    fn pick(&mut self, servers: &[Arc<Server>], request: &Request) -> Option<usize>;

    /// The scheduler takes over a list that may have servers already (`init_service`).
    fn start(&mut self, servers: &[Arc<Server>]) {
        let _ = servers;
    }

    /// A server was put in front of the list, at index 0 (`add_dest`).
    fn server_added(&mut self, servers: &[Arc<Server>]) {
        let _ = servers;
    }

    /// The server that was at `index` is gone from the list (`del_dest`).
    fn server_removed(&mut self, servers: &[Arc<Server>], index: usize) {
        let _ = (servers, index);
    }

    /// The settings of the server at `index` were set, perhaps to what they were (`upd_dest`).
    fn server_edited(&mut self, servers: &[Arc<Server>], index: usize) {
        let _ = (servers, index);
    }
}

/// Makes a scheduler for one service.
pub type Factory = fn() -> Box<dyn Scheduler>;

/// The schedulers that services can ask for by name.
#[derive(Clone, Debug)]
pub struct Registry {
    factories: alloc::collections::BTreeMap<&'static str, Factory>,
}

impl Registry {
    /// The built-in schedulers, under `ipvsadm`'s names.
    pub fn new() -> Self {
        let mut registry = Self {
            factories: alloc::collections::BTreeMap::new(),
        };
        registry.register("lc", || Box::new(LeastConnections));
        registry.register("none", || Box::new(NoScheduler));
        registry.register("rr", || Box::<RoundRobin>::default());
        registry.register("wlc", || Box::new(WeightedLeastConnections));
        registry.register("wrr", || Box::<WeightedRoundRobin>::default());
        registry
    }

    /// Adds or replaces a scheduler.
    pub fn register(&mut self, name: &'static str, factory: Factory) {
        self.factories.insert(name, factory);
    }

    /// A new scheduler of this name.
    pub fn create(&self, name: &str) -> Option<Box<dyn Scheduler>> {
        self.factories.get(name).map(|factory| factory())
    }

    /// The names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.factories.keys().copied()
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new()
    }
}

/// `none`: no connection is ever taken.
#[derive(Clone, Copy, Debug, Default)]
struct NoScheduler;

impl Scheduler for NoScheduler {
    fn pick(&mut self, _: &[Arc<Server>], _: &Request) -> Option<usize> {
        None
    }
}

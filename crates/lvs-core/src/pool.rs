//! A scheduler and the servers among which it chooses.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::time::Duration;

use crate::sched::HashSlot;
use crate::server::Marks;
use crate::settings::Sysctls;
use crate::{Error, Instant, Request, Scheduler, Server, ServerConfig, ServerId};

/// Answer of [`Pool::preview`].
#[derive(Clone, Copy, Debug)]
pub enum Preview<'a> {
    /// The scheduler cannot predict its choice.
    Unknown,
    /// No server accepts a connection.
    NoServer,
    /// The scheduler would choose this server.
    Server(&'a Arc<Server>),
}

/// Real servers with a scheduler, for programs that only choose servers.
///
/// ```
/// # use lvs_core::{Forwarding, Instant, Pool, Protocol, Registry, Request, ServerConfig, ServiceFlags};
/// let mut pool = Pool::new(Registry::new().create("wlc").unwrap());
/// for server in ["10.0.0.11:80", "10.0.0.12:80"] {
///     pool.insert(server.parse().unwrap(), &ServerConfig::new(1, Forwarding::Nat))?;
/// }
/// let request = Request {
///     client: "192.0.2.1:40000".parse().unwrap(),
///     virt: "198.51.100.1:80".parse().unwrap(),
///     protocol: Protocol::TCP,
///     flags: ServiceFlags::default(),
///     now: Instant::ZERO,
/// };
/// let first = pool.pick(&request).unwrap().open(); // counted until it is dropped
/// let second = pool.pick(&request).unwrap().open();
/// assert_ne!(first.server().addr(), second.server().addr());
/// # Ok::<(), lvs_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Pool {
    servers: Vec<Arc<Server>>,
    addresses: BTreeMap<SocketAddr, Arc<Server>>,
    scheduler: Box<dyn Scheduler>,
    /// Words in which the servers that [`insert`](Self::insert) created set a bit when they change.
    marks: Marks,
    limited: usize,
}

impl Pool {
    /// A pool without servers.
    pub fn new(mut scheduler: Box<dyn Scheduler>) -> Self {
        scheduler.follow();
        scheduler.start(&[]);
        Self {
            servers: Vec::new(),
            addresses: BTreeMap::new(),
            scheduler,
            marks: Marks::default(),
            limited: 0,
        }
    }

    /// The servers in the kernel's order: the most recently added one is first.
    pub fn servers(&self) -> &[Arc<Server>] {
        &self.servers
    }

    /// Chooses a server for a new connection; `None` if no server accepts it.
    pub fn pick(&mut self, request: &Request) -> Option<&Arc<Server>> {
        let index = self.scheduler.pick(&self.servers, request)?;
        self.servers.get(index)
    }

    /// The server that [`pick`](Self::pick) would choose now. Nothing changes.
    pub fn preview(&self, request: &Request) -> Preview<'_> {
        let Some(mut scheduler) = self.scheduler.preview() else {
            return Preview::Unknown;
        };
        let index = scheduler.pick(&self.servers, request);
        let server = index.and_then(|index| self.servers.get(index));
        server.map_or(Preview::NoServer, Preview::Server)
    }

    /// The slot of the scheduler's hash table for a request; `None` without such a table.
    pub fn slot(&self, request: &Request) -> Option<HashSlot> {
        self.scheduler.slot(request)
    }

    /// Creates a server with this address and these settings, and adds it.
    ///
    /// # Errors
    /// [`Error::ServerExists`], and the errors of [`Server::check`].
    pub fn insert(&mut self, addr: SocketAddr, config: &ServerConfig) -> Result<(), Error> {
        Server::check(config)?;
        if self.find(addr).is_some() {
            return Err(Error::ServerExists);
        }
        let next = self
            .servers
            .iter()
            .map(|server| server.id().0)
            .max()
            .map_or(0, |id| id + 1);
        let mut server = Server::new(ServerId(next), addr, config)?;
        server.mark_in(&mut self.marks);
        self.add(Arc::new(server));
        Ok(())
    }

    /// Replaces the settings of a server.
    ///
    /// # Errors
    /// [`Error::NoServer`], and the errors of [`Server::check`].
    pub fn edit(&mut self, addr: SocketAddr, config: &ServerConfig) -> Result<(), Error> {
        self.configure(addr, config).map(drop)
    }

    /// As [`edit`](Self::edit); also returns the server.
    pub(crate) fn configure(
        &mut self,
        addr: SocketAddr,
        config: &ServerConfig,
    ) -> Result<&Arc<Server>, Error> {
        Server::check(config)?;
        let index = self.position(addr).ok_or(Error::NoServer)?;
        self.limited -= usize::from(self.servers[index].config().upper != 0);
        self.servers[index].configure(config);
        self.limited += usize::from(config.upper != 0);
        self.scheduler.server_edited(&self.servers, index);
        Ok(&self.servers[index])
    }

    /// Removes and returns a server, which continues to count its open connections.
    ///
    /// # Errors
    /// [`Error::NoServer`].
    pub fn remove(&mut self, addr: SocketAddr) -> Result<Arc<Server>, Error> {
        let index = self.position(addr).ok_or(Error::NoServer)?;
        let server = self.servers.remove(index);
        self.addresses.remove(&addr);
        self.limited -= usize::from(server.config().upper != 0);
        server.retire();
        self.scheduler.server_removed(&self.servers, index);
        Ok(server)
    }

    /// Replaces the scheduler; the new one starts with the present list of servers.
    pub fn reschedule(&mut self, mut scheduler: Box<dyn Scheduler>) {
        self.servers.iter().for_each(|server| server.unwatch());
        scheduler.follow();
        scheduler.start(&self.servers);
        self.scheduler = scheduler;
    }

    /// Orders the servers; servers that are not in `order` follow the others. Returns `false` if
    /// they already have this order. Otherwise replaces the scheduler by `scheduler`, a new one of
    /// the same kind.
    pub(crate) fn arrange(&mut self, order: &[SocketAddr], scheduler: Box<dyn Scheduler>) -> bool {
        let places: BTreeMap<SocketAddr, usize> = order.iter().copied().zip(0..).collect();
        let place =
            |server: &Arc<Server>| places.get(&server.addr()).copied().unwrap_or(usize::MAX);
        if self.servers.is_sorted_by_key(place) {
            return false;
        }
        self.servers.sort_by_key(place);
        self.reschedule(scheduler);
        true
    }

    /// Runs the periodic work of the scheduler. Call it once in each [`period`](Self::period).
    pub fn tick(&mut self, now: Instant) {
        self.scheduler.tick(now);
    }

    /// Interval at which [`tick`](Self::tick) must be called; `None` for never.
    pub fn period(&self) -> Option<Duration> {
        self.scheduler.period()
    }

    /// Reports changed sysctls to the scheduler.
    pub fn sysctls_changed(&mut self, sysctls: &Sysctls) {
        self.scheduler.sysctls_changed(sysctls);
    }

    /// Whether the scheduler uses the latency of the servers' answers.
    pub fn needs_replies(&self) -> bool {
        self.scheduler.needs_replies()
    }

    /// Whether the scheduler uses the weight that a server had before its weight became 0.
    pub(crate) fn goes_by_last_weight(&self) -> bool {
        self.scheduler.goes_by_last_weight()
    }

    /// Whether the scheduler uses weights as numbers of connections.
    pub(crate) fn weight_is_capacity(&self) -> bool {
        self.scheduler.weight_is_capacity()
    }

    /// Reports to the scheduler that the weights of the servers at these positions have changed.
    pub(crate) fn weights_changed(&mut self, places: &[usize]) {
        for &place in places {
            self.scheduler.server_edited(&self.servers, place);
        }
    }

    /// Inserts a server at the front of the list.
    pub(crate) fn add(&mut self, server: Arc<Server>) {
        self.limited += usize::from(server.config().upper != 0);
        self.addresses.insert(server.addr(), server.clone());
        self.servers.insert(0, server);
        self.scheduler.server_added(&self.servers);
    }

    pub(crate) fn find(&self, addr: SocketAddr) -> Option<&Arc<Server>> {
        self.addresses.get(&addr)
    }

    fn position(&self, addr: SocketAddr) -> Option<usize> {
        let found = self.find(addr)?;
        // No record is read: this takes microseconds for thousands of servers.
        self.servers
            .iter()
            .position(|server| Arc::ptr_eq(server, found))
    }
}

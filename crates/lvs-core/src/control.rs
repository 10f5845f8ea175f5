//! The half of a director that its workers share: services, real servers, and the decision about new connections.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::Ordering;
use core::time::Duration;

use crate::conn::table::flag;
use crate::conn::{ConnTable, Key, Slot};
use crate::sched::{Registry, Request};
use crate::shard::{Pending, ServerLink, Settings, Shard, Shared};
use crate::stats::{ObjectStats, Stats};
use crate::sysctl::Sysctls;
use crate::{
    AcceptReason, DropReason, Error, Family, Forwarding, IcmpError, Instant, PacketMeta, Pool,
    Protocol, Server, ServerConfig, ServerId, ServiceConfig, ServiceFlags, ServiceKey, TcpFlags,
    Transport, Tuple, Verdict,
};

/// Time between two looks into the trash (`IP_VS_DEST_TRASH_PERIOD`).
const TRASH_PERIOD: Duration = Duration::from_secs(60);
/// How long a removed server without connections is kept.
const TRASH_IDLE: Duration = Duration::from_secs(120);
/// Time between two snapshots of the counters.
const STATS_PERIOD: Duration = Duration::from_secs(2);
/// The kernel keeps timeouts in ticks of 4 ms in an `int`.
const TIMEOUT_MAX: u32 = 8_589_934;

/// A service: its settings, its servers and its scheduler.
#[derive(Debug)]
pub struct Service {
    key: ServiceKey,
    config: ServiceConfig,
    owner: Option<String>,
    pool: Pool,
    stats: ObjectStats,
    /// When the scheduler is to be called next; none until the clock has been shown, or if it never is.
    next_tick: Option<Instant>,
}

impl Service {
    /// What identifies it.
    pub const fn key(&self) -> ServiceKey {
        self.key
    }

    /// Its settings.
    pub const fn config(&self) -> &ServiceConfig {
        &self.config
    }

    /// Who answers for it; `None` for one made by hand.
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// Its real servers in the kernel's order: the one added last comes first.
    pub fn servers(&self) -> &[Arc<Server>] {
        self.pool.servers()
    }

    /// Its counters and rates.
    pub fn stats(&self) -> Stats {
        self.stats.stats()
    }
}

/// Everything that is known of a server besides its record: it outlives its place in a service.
#[derive(Debug)]
struct Registered {
    server: Arc<Server>,
    /// Number of the service; of the last one, while the server is in the trash.
    service: u32,
    key: ServiceKey,
    stats: ObjectStats,
    trashed: Option<Trashed>,
}

#[derive(Clone, Copy, Debug)]
struct Trashed {
    /// Since when nothing refers to it, as far as the timer has seen.
    idle_since: Option<Instant>,
}

/// How a director is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Connections that each shard holds at most.
    pub max_connections: usize,
    /// How many shards there will be.
    pub shards: usize,
    /// Keys the hash of the connection table; take it from the system's random numbers.
    pub seed: u64,
    /// The schedulers that services can ask for.
    pub schedulers: Registry,
}

impl Default for Options {
    /// One shard of 2^20 connections, seed 0, the built-in schedulers.
    fn default() -> Self {
        Self {
            max_connections: 1 << 20,
            shards: 1,
            seed: 0,
            schedulers: Registry::new(),
        }
    }
}

/// Services, real servers, scheduler state, settings.
///
/// With several workers, put it behind a lock; a worker takes it for a packet that opens a connection
/// ([`admit`](Self::admit)), never for a packet of a known one.
#[derive(Debug)]
pub struct Control {
    options: Options,
    services: BTreeMap<u32, Service>,
    index: BTreeMap<ServiceKeyOrd, u32>,
    next_service: u32,
    servers: Vec<Option<Registered>>,
    /// Services with port 21: TCP ports without a service of their own fall to them.
    ftp_services: usize,
    /// Services with port 0, marks included.
    any_port_services: usize,
    total: ObjectStats,
    settings: Settings,
    shared: Arc<Shared>,
    /// The latest time shown by [`advance`](Self::advance).
    clock: Option<Instant>,
    /// The earliest of the moments below and of the services' ticks.
    next_event: Option<Instant>,
    next_stats: Option<Instant>,
    next_trash: Option<Instant>,
    flush_removed: bool,
}

/// A service's key in an order: protocol, family and address, port; marks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ServiceKeyOrd {
    Mark(Family, u32),
    Address(Protocol, SocketAddr),
}

impl From<&ServiceKey> for ServiceKeyOrd {
    fn from(key: &ServiceKey) -> Self {
        match *key {
            ServiceKey::Mark { family, mark } => Self::Mark(family, mark),
            ServiceKey::Address { protocol, addr } => {
                // Flow label and scope are no part of the identity.
                Self::Address(protocol, SocketAddr::new(addr.ip(), addr.port()))
            }
        }
    }
}

impl Control {
    /// A director without services.
    pub fn new(options: Options) -> Self {
        let shards = options.shards.max(1);
        Self {
            options: Options { shards, ..options },
            services: BTreeMap::new(),
            index: BTreeMap::new(),
            next_service: 0,
            servers: Vec::new(),
            ftp_services: 0,
            any_port_services: 0,
            total: ObjectStats::new(shards),
            settings: Settings::default(),
            shared: Arc::default(),
            clock: None,
            next_event: None,
            next_stats: None,
            next_trash: None,
            flush_removed: false,
        }
    }

    /// Shard `number`, without connections.
    ///
    /// # Panics
    /// If `number` is not below [`Options::shards`].
    pub fn shard(&self, number: usize) -> Shard {
        let mut shard = Shard {
            number,
            table: ConnTable::new(self.options.max_connections, self.options.seed),
            links: Vec::new(),
            total: self.total.shard(number),
            settings: Settings::default(),
            shared: self.shared.clone(),
            generation: 0,
        };
        self.refresh(&mut shard);
        shard
    }

    // --- services -------------------------------------------------------------------------------------------------

    /// All services, the oldest first.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values()
    }

    /// The service with this key.
    pub fn service(&self, key: &ServiceKey) -> Option<&Service> {
        self.services.get(self.index.get(&key.into())?)
    }

    /// Adds a service (`ip_vs_add_service`).
    ///
    /// # Errors
    /// [`Error::ServiceExists`], [`Error::UnknownScheduler`], [`Error::UnknownEngine`], [`Error::Protocol`],
    /// [`Error::ZeroMark`], [`Error::PrefixLength`], [`Error::Unsupported`].
    pub fn add_service(
        &mut self,
        key: ServiceKey,
        config: ServiceConfig,
        owner: Option<String>,
    ) -> Result<(), Error> {
        check_key(&key)?;
        if self.index.contains_key(&(&key).into()) {
            return Err(Error::ServiceExists);
        }
        let scheduler = self.scheduler_for(&key, &config)?;
        let number = self.next_service;
        self.next_service += 1;
        let service = Service {
            key,
            config,
            owner,
            next_tick: self.first_tick(&*scheduler),
            pool: Pool::new(scheduler),
            stats: ObjectStats::new(self.options.shards),
        };
        self.services.insert(number, service);
        self.index.insert((&key).into(), number);
        self.ftp_services += usize::from(key.port() == 21);
        self.any_port_services += usize::from(key.port() == 0);
        self.plan();
        self.changed();
        Ok(())
    }

    /// Replaces all settings of a service (`ip_vs_edit_service`). A scheduler that stays the same keeps its state.
    ///
    /// # Errors
    /// [`Error::NoService`], and as [`add_service`](Self::add_service).
    pub fn edit_service(
        &mut self,
        key: &ServiceKey,
        config: ServiceConfig,
        owner: Option<String>,
    ) -> Result<(), Error> {
        let number = *self.index.get(&key.into()).ok_or(Error::NoService)?;
        let scheduler = self.scheduler_for(key, &config)?;
        let next_tick = self.first_tick(&*scheduler);
        let service = self.services.get_mut(&number).ok_or(Error::NoService)?;
        if service.config.scheduler != config.scheduler {
            service.pool.reschedule(scheduler);
            service.next_tick = next_tick;
        }
        service.config = config;
        service.owner = owner;
        self.plan();
        Ok(())
    }

    /// Deletes a service (`ip_vs_del_service`). Its connections stay; their packets are dropped until they end, unless
    /// the servers come back.
    ///
    /// # Errors
    /// [`Error::NoService`].
    pub fn delete_service(&mut self, key: &ServiceKey, now: Instant) -> Result<(), Error> {
        let number = self.index.remove(&key.into()).ok_or(Error::NoService)?;
        let service = self.services.remove(&number).ok_or(Error::NoService)?;
        self.ftp_services -= usize::from(service.key.port() == 21);
        self.any_port_services -= usize::from(service.key.port() == 0);
        for server in service.pool.servers() {
            server.retire();
            self.trash(server.id(), now);
        }
        self.changed();
        Ok(())
    }

    /// Deletes every service (`ip_vs_flush`).
    pub fn flush(&mut self, now: Instant) {
        let keys: Vec<ServiceKey> = self.services.values().map(|service| service.key).collect();
        for key in keys {
            let deleted = self.delete_service(&key, now);
            debug_assert!(deleted.is_ok(), "a service that is listed can be deleted");
        }
    }

    // --- real servers ---------------------------------------------------------------------------------------------

    /// Adds a real server to a service (`ip_vs_add_dest`). One that was removed within the last minutes comes back with
    /// its connections.
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::ServerExists`], [`Error::NotUnicast`], [`Error::FamilyMismatch`], and what
    /// [`Server::check`] finds.
    pub fn add_server(
        &mut self,
        key: &ServiceKey,
        addr: SocketAddr,
        config: &ServerConfig,
        _now: Instant,
    ) -> Result<(), Error> {
        let number = *self.index.get(&key.into()).ok_or(Error::NoService)?;
        let service = self.services.get(&number).ok_or(Error::NoService)?;
        check_family(&service.key, addr, config)?;
        Server::check(config)?;
        check_tunnel(config)?;
        if service.pool.find(addr).is_some() {
            return Err(Error::ServerExists);
        }
        let id = match self.find_in_trash(&service.key, addr) {
            Some(id) => id,
            None => {
                check_unicast(addr.ip())?;
                self.register(number, addr, config)?
            }
        };
        let entry = self.servers[id.index()]
            .as_mut()
            .expect("the record was just found or made");
        entry.server.configure(config);
        entry.server.reset_last_weight();
        if entry.trashed.take().is_some() && entry.service != number {
            entry.stats.zero();
            entry.service = number;
        }
        let server = entry.server.clone();
        let service = self
            .services
            .get_mut(&number)
            .expect("the service was found above");
        service.pool.add(server);
        self.changed();
        Ok(())
    }

    /// Replaces all settings of a real server (`ip_vs_edit_dest`). The forwarding method concerns new connections only.
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::NoServer`], [`Error::FamilyMismatch`], and what [`Server::check`] finds.
    pub fn edit_server(
        &mut self,
        key: &ServiceKey,
        addr: SocketAddr,
        config: &ServerConfig,
    ) -> Result<(), Error> {
        let service = self.service_mut(key)?;
        check_family(&service.key, addr, config)?;
        Server::check(config)?;
        check_tunnel(config)?;
        service.pool.edit(addr, config)
    }

    /// Removes a real server from a service (`ip_vs_del_dest`). Packets of clients to it are dropped until it comes
    /// back; with `expire_nodest_conn` its connections end at the next [`sweep`](Self::sweep).
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::NoServer`].
    pub fn delete_server(
        &mut self,
        key: &ServiceKey,
        addr: SocketAddr,
        now: Instant,
    ) -> Result<(), Error> {
        let server = self.service_mut(key)?.pool.remove(addr)?;
        self.trash(server.id(), now);
        self.changed();
        Ok(())
    }

    /// Counters and rates of a real server.
    pub fn server_stats(&self, id: ServerId) -> Option<Stats> {
        Some(self.servers.get(id.index())?.as_ref()?.stats.stats())
    }

    /// Every server that is configured or still has connections, with the service that it belongs or belonged to: what
    /// packets may yet go to and come from.
    pub fn endpoints(&self) -> impl Iterator<Item = (ServiceKey, &Arc<Server>)> {
        self.servers
            .iter()
            .flatten()
            .filter(|entry| entry.trashed.is_none() || entry.server.is_referenced())
            .map(|entry| (entry.key, &entry.server))
    }

    // --- settings and counters --------------------------------------------------------------------------------------

    /// Timeouts of TCP ESTABLISHED, TCP FIN_WAIT and UDP in seconds.
    pub fn timeouts(&self) -> (u32, u32, u32) {
        self.settings.timeouts.settable()
    }

    /// Sets those three; 0 leaves one as it is. Connections take the new value with their next packet.
    ///
    /// # Errors
    /// [`Error::TimeoutRange`].
    pub fn set_timeouts(&mut self, tcp: u32, tcp_fin: u32, udp: u32) -> Result<(), Error> {
        if [tcp, tcp_fin, udp]
            .iter()
            .any(|&timeout| timeout > TIMEOUT_MAX)
        {
            return Err(Error::TimeoutRange);
        }
        self.settings.timeouts.set(tcp, tcp_fin, udp);
        self.changed();
        Ok(())
    }

    /// The sysctls in force.
    pub const fn sysctls(&self) -> &Sysctls {
        &self.settings.sysctls
    }

    /// Sets a sysctl.
    ///
    /// # Errors
    /// As [`Sysctls::set`].
    pub fn set_sysctl(&mut self, name: &str, value: &str) -> Result<(), Error> {
        self.settings.sysctls.set(name, value)?;
        for service in self.services.values_mut() {
            service.pool.sysctls_changed(&self.settings.sysctls);
        }
        self.changed();
        Ok(())
    }

    /// Counters and rates of everything.
    pub fn total_stats(&self) -> Stats {
        self.total.stats()
    }

    /// Zeroes what is shown of one service and its servers, or of everything (`ip_vs_zero_service`, `ip_vs_zero_all`).
    ///
    /// # Errors
    /// [`Error::NoService`].
    pub fn zero(&mut self, key: Option<&ServiceKey>) -> Result<(), Error> {
        let only = match key {
            Some(key) => Some(*self.index.get(&key.into()).ok_or(Error::NoService)?),
            None => None,
        };
        for (&number, service) in &mut self.services {
            if only.is_none_or(|only| only == number) {
                service.stats.zero();
            }
        }
        for entry in self.servers.iter_mut().flatten() {
            if entry.trashed.is_none() && only.is_none_or(|only| only == entry.service) {
                entry.stats.zero();
            }
        }
        if only.is_none() {
            self.total.zero();
        }
        Ok(())
    }

    /// Does what is due by the clock: snapshots of the counters, the trash, schedulers that age what they remember. Call
    /// it at least every two seconds.
    pub fn advance(&mut self, now: Instant) {
        self.show_clock(now);
        while let Some(at) = self.next_event.filter(|&at| at <= now) {
            self.run_events(at);
        }
    }

    /// When to call [`advance`](Self::advance) next.
    pub fn next_wakeup(&self) -> Option<Instant> {
        self.next_event
    }

    /// Starts the periods that run from the first moment that the director is shown.
    pub(crate) fn show_clock(&mut self, now: Instant) {
        if self.clock.is_none() {
            self.next_stats = Some(now + STATS_PERIOD);
            for service in self.services.values_mut() {
                service.next_tick = service.pool.period().map(|period| now + period);
            }
            self.plan();
        }
        self.clock = self.clock.max(Some(now));
    }

    /// Does what is due at `at`, which is the moment of the next event.
    pub(crate) fn run_events(&mut self, at: Instant) {
        let due = |event: Option<Instant>| event.is_some_and(|event| event <= at);
        if due(self.next_stats) {
            self.next_stats = Some(at + STATS_PERIOD);
            self.total.tick();
            self.services
                .values_mut()
                .for_each(|service| service.stats.tick());
            let servers = self.servers.iter_mut().flatten();
            servers
                .filter(|entry| entry.trashed.is_none())
                .for_each(|entry| entry.stats.tick());
        }
        for service in self.services.values_mut() {
            if due(service.next_tick) {
                service.pool.tick(at);
                service.next_tick = service.pool.period().map(|period| at + period);
            }
        }
        if due(self.next_trash) {
            self.empty_trash(at);
        }
        self.plan();
    }

    /// Finds the moment of the next event.
    fn plan(&mut self) {
        let ticks = self.services.values().map(|service| service.next_tick);
        self.next_event = ticks
            .chain([self.next_stats, self.next_trash])
            .flatten()
            .min();
    }

    /// When a scheduler that is made now is to be called first.
    fn first_tick(&self, scheduler: &dyn crate::Scheduler) -> Option<Instant> {
        Some(self.clock? + scheduler.period()?)
    }

    /// Brings a shard up to date, and ends what the settings say must end now. Call it after changes.
    pub fn sweep(&mut self, shard: &mut Shard) {
        self.refresh(shard);
        // With several shards, each has its turn before the last one clears the wish.
        if self.flush_removed {
            shard.flush_removed();
            if shard.number + 1 == self.options.shards {
                self.flush_removed = false;
            }
        }
    }

    // --- packets ----------------------------------------------------------------------------------------------------

    /// Decides on a packet that `shard` could not decide on alone.
    pub fn admit(
        &mut self,
        shard: &mut Shard,
        meta: &PacketMeta<'_>,
        pending: Pending,
        now: Instant,
    ) -> Verdict {
        let mut pending = pending;
        if pending.stale {
            self.sweep(shard);
            match shard.decide(meta, now) {
                Ok(verdict) => return verdict,
                Err(again) => pending = again,
            }
        }
        let verdict = self.schedule(shard, meta, now);
        if let Some(replaced) = pending.replaced {
            shard.end(replaced);
        }
        verdict
    }

    /// Decides on an ICMP error that `shard` could not decide on alone.
    pub fn admit_icmp_error(
        &mut self,
        shard: &mut Shard,
        error: &IcmpError,
        _pending: Pending,
        now: Instant,
    ) -> Verdict {
        self.sweep(shard);
        shard.decide_icmp_error(error, now)
    }

    /// Opens a connection, if the packet may and a server is there (`*_conn_schedule`, `ip_vs_schedule`).
    fn schedule(&mut self, shard: &mut Shard, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        let Tuple { protocol, src, dst } = meta.tuple;
        match meta.transport {
            Transport::Tcp(flags) => {
                let opens = flags.has(TcpFlags::SYN) || self.settings.sysctls.sloppy_tcp;
                if flags.has(TcpFlags::RST) || !opens {
                    return Verdict::Accept(AcceptReason::NotNew);
                }
            }
            Transport::Udp(_) => {}
            _ => return Verdict::Drop(DropReason::ShortHeader),
        }
        let Some(number) = self.find_service(meta.mark, protocol, dst) else {
            return Verdict::Accept(AcceptReason::NoService);
        };
        if src.port() == 20 {
            return Verdict::Accept(AcceptReason::SourcePort20);
        }
        let service = self
            .services
            .get_mut(&number)
            .expect("the index leads to services only");
        let by_mark = matches!(service.key, ServiceKey::Mark { .. });
        let request = Request {
            client: src,
            virt: dst,
            protocol,
            flags: service.config.flags,
            now,
        };
        // Only a persistent service takes other ports than its own: an FTP service, or one of port 0.
        let picked = (by_mark || dst.port() == service.key.port())
            .then(|| service.pool.pick(&request).cloned())
            .flatten();
        let Some(server) = picked else {
            if service.key.port() == 21 && dst.port() != 21 {
                return Verdict::Accept(AcceptReason::FtpData);
            }
            return Verdict::Unreachable(DropReason::NoServer);
        };
        let port = match server.addr().port() {
            0 => dst.port(),
            port => port,
        };
        let method = server.forwarding();
        let mut flags = method as u32 | flag::INACTIVE;
        if method != Forwarding::Nat {
            flags |= flag::NO_OUTPUT;
        }
        let key = Key {
            protocol,
            client: src,
            virt: dst,
        };
        let mut slot = Slot::new(&key, SocketAddr::new(server.addr().ip(), port), flags);
        slot.server = server.id().0;
        slot.mark = meta.mark;
        self.refresh(shard);
        let Some(index) = shard.table.insert(slot, now) else {
            return Verdict::Drop(DropReason::TableFull);
        };
        server.bind(false);
        shard.count(index, crate::stats::Counters::count_connection);
        shard.forward(index, meta, now, true)
    }

    /// The service that takes a packet (`ip_vs_service_find`).
    fn find_service(&self, mark: u32, protocol: Protocol, virt: SocketAddr) -> Option<u32> {
        let exact = |port| {
            let addr = SocketAddr::new(virt.ip(), port);
            self.index
                .get(&ServiceKeyOrd::Address(protocol, addr))
                .copied()
        };
        if mark != 0 {
            let family = Family::of(&virt.ip());
            if let Some(&number) = self.index.get(&ServiceKeyOrd::Mark(family, mark)) {
                return Some(number);
            }
        }
        exact(virt.port())
            .or_else(|| {
                // Active FTP's data port, or the passive range (`net.ipv4.ip_unprivileged_port_start`).
                let data = virt.port() == 20 || virt.port() >= 1024;
                (protocol == Protocol::TCP && self.ftp_services > 0 && data).then(|| exact(21))?
            })
            .or_else(|| (self.any_port_services > 0).then(|| exact(0))?)
    }

    // --- inside -------------------------------------------------------------------------------------------------------

    fn service_mut(&mut self, key: &ServiceKey) -> Result<&mut Service, Error> {
        let number = self.index.get(&key.into()).ok_or(Error::NoService)?;
        self.services.get_mut(number).ok_or(Error::NoService)
    }

    fn scheduler_for(
        &self,
        key: &ServiceKey,
        config: &ServiceConfig,
    ) -> Result<alloc::boxed::Box<dyn crate::Scheduler>, Error> {
        let mut scheduler = self
            .options
            .schedulers
            .create(&config.scheduler)
            .ok_or(Error::UnknownScheduler)?;
        scheduler.seed(self.options.seed ^ u64::from(self.next_service) << 32);
        scheduler.sysctls_changed(&self.settings.sysctls);
        match config.engine.as_deref() {
            None => {}
            Some("sip") => return Err(Error::Unsupported("persistence engine sip")),
            Some(_) => return Err(Error::UnknownEngine),
        }
        if key.family() == Family::V6 && !(1..=128).contains(&config.netmask) {
            return Err(Error::PrefixLength);
        }
        if config.flags.has(ServiceFlags::PERSISTENT) {
            return Err(Error::Unsupported("persistence"));
        }
        if config.flags.has(ServiceFlags::ONE_PACKET) {
            return Err(Error::Unsupported("one-packet scheduling"));
        }
        Ok(scheduler)
    }

    /// A new record.
    fn register(
        &mut self,
        service: u32,
        addr: SocketAddr,
        config: &ServerConfig,
    ) -> Result<ServerId, Error> {
        let index = match self.servers.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.servers.push(None);
                self.servers.len() - 1
            }
        };
        let id = ServerId(u32::try_from(index).map_err(|_| Error::Unsupported("2^32 servers"))?);
        let key = self.services.get(&service).ok_or(Error::NoService)?.key;
        self.servers[index] = Some(Registered {
            server: Arc::new(Server::new(id, addr, config)?),
            service,
            key,
            stats: ObjectStats::new(self.options.shards),
            trashed: None,
        });
        Ok(id)
    }

    /// A removed server that an equal one can take up again (`ip_vs_trash_get_dest`).
    fn find_in_trash(&self, key: &ServiceKey, addr: SocketAddr) -> Option<ServerId> {
        self.servers
            .iter()
            .flatten()
            .find(|entry| {
                entry.trashed.is_some() && entry.server.addr() == addr && entry.key == *key
            })
            .map(|entry| entry.server.id())
    }

    /// Puts a server that has left its service into the trash (`__ip_vs_del_dest`).
    fn trash(&mut self, id: ServerId, now: Instant) {
        if let Some(entry) = self.servers[id.index()].as_mut() {
            entry.trashed = Some(Trashed { idle_since: None });
        }
        self.next_trash.get_or_insert(now + TRASH_PERIOD);
        self.plan();
        if self.settings.sysctls.expire_nodest_conn {
            self.flush_removed = true;
        }
    }

    /// Frees removed servers that nothing has referred to for long enough (`ip_vs_dest_trash_expire`).
    fn empty_trash(&mut self, now: Instant) {
        let mut left = false;
        for place in &mut self.servers {
            let Some(entry) = place else { continue };
            let Some(trashed) = &mut entry.trashed else {
                continue;
            };
            if !entry.server.is_referenced() {
                match trashed.idle_since {
                    None => trashed.idle_since = Some(now),
                    Some(since) if now < since + TRASH_IDLE => {}
                    Some(_) => {
                        *place = None;
                        continue;
                    }
                }
            }
            left = true;
        }
        self.next_trash = left.then_some(now + TRASH_PERIOD);
        self.changed();
    }

    /// Tells the shards that their copies are out of date.
    fn changed(&mut self) {
        let serves = |family| {
            self.services
                .values()
                .any(|service| service.key.family() == family)
        };
        self.settings.ipv4 = serves(Family::V4);
        self.settings.ipv6 = serves(Family::V6);
        self.shared.generation.fetch_add(1, Ordering::Release);
    }

    /// Copies settings and links into a shard whose copies are out of date.
    fn refresh(&self, shard: &mut Shard) {
        let generation = self.shared.generation.load(Ordering::Acquire);
        if shard.generation == generation && !shard.links.is_empty() {
            return;
        }
        shard.links.clear();
        shard.links.extend(self.servers.iter().map(|place| {
            let entry = place.as_ref()?;
            Some(ServerLink {
                server: entry.server.clone(),
                counters: entry.stats.shard(shard.number),
                service: self
                    .services
                    .get(&entry.service)
                    .map(|service| service.stats.shard(shard.number)),
            })
        }));
        shard.settings = self.settings.clone();
        shard.generation = generation;
    }
}

fn check_key(key: &ServiceKey) -> Result<(), Error> {
    match key {
        ServiceKey::Mark { mark: 0, .. } => Err(Error::ZeroMark),
        ServiceKey::Mark { .. } => Ok(()),
        ServiceKey::Address {
            protocol: Protocol::TCP | Protocol::UDP,
            ..
        } => Ok(()),
        ServiceKey::Address {
            protocol: Protocol::SCTP,
            ..
        } => Err(Error::Unsupported("SCTP")),
        ServiceKey::Address { .. } => Err(Error::Protocol),
    }
}

fn check_family(
    service: &ServiceKey,
    addr: SocketAddr,
    config: &ServerConfig,
) -> Result<(), Error> {
    if Family::of(&addr.ip()) != service.family() && config.forwarding != Forwarding::Tunnel {
        return Err(Error::FamilyMismatch);
    }
    Ok(())
}

fn check_tunnel(config: &ServerConfig) -> Result<(), Error> {
    match config.tunnel {
        crate::Tunnel::Ipip => Ok(()),
        crate::Tunnel::Gue { .. } => Err(Error::Unsupported("tunnel type gue")),
        crate::Tunnel::Gre { .. } => Err(Error::Unsupported("tunnel type gre")),
    }
}

/// Whether a host can have this address; local addresses and broadcasts of the host's own networks are known only to
/// whoever embeds the director.
fn check_unicast(addr: IpAddr) -> Result<(), Error> {
    let refused = match addr {
        IpAddr::V4(addr) => addr.is_unspecified() || addr.is_multicast() || addr.is_broadcast(),
        IpAddr::V6(addr) => {
            addr.is_unspecified()
                || addr.is_multicast()
                || addr.is_unicast_link_local()
                || addr.to_ipv4_mapped().is_some()
        }
    };
    if refused {
        Err(Error::NotUnicast)
    } else {
        Ok(())
    }
}

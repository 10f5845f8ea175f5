//! The half of a director that its workers share: services, real servers, and the decision about new connections.

mod agenda;
pub(crate) mod check;
mod records;

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::ops::Range;
use core::sync::atomic::Ordering;
use core::time::Duration;

use self::agenda::Agenda;
use self::check::Census;
use self::records::Records;
use crate::conn::state::Timeouts;
use crate::conn::table::{flag, tick_of};
use crate::conn::{ConnTable, Key, Slot, Templates};
use crate::defense::{self, Defense};
use crate::down::Down;
use crate::evict::{Hand, WhenFull};
use crate::filter::{Filters, SourceFilter};
use crate::full_nat::{self, FullNat};
use crate::limits::Limiter;
use crate::local_ports::LocalPorts;
use crate::mark::MarkRule;
use crate::sched::Registry;
use crate::shard::{Links, ServerLink, Settings, Shard, Shared};
use crate::slow_start::SlowStart;
use crate::stats::{ObjectStats, Stats};
use crate::sync::{Backup, Queue, SyncDaemon, sync_template};
use crate::sysctl::Sysctls;
use crate::{
    ConnId, Connection, Error, Family, Forwarding, Instant, Pool, Prefix, Protocol, Server,
    ServerConfig, ServerId, ServiceConfig, ServiceFlags, ServiceKey,
};

/// Time between two looks into the trash (`IP_VS_DEST_TRASH_PERIOD`).
const TRASH_PERIOD: Duration = Duration::from_secs(60);
/// Templates whose time has come that are looked at in one call: a flooded persistent service has a million, and the
/// lock is held meanwhile. The others come with the next call, which is due at once.
const TEMPLATES_AT_ONCE: usize = 4096;
/// The port of FTP's control connections.
pub(crate) const FTP: u16 = 21;
/// That of its data connections, where the server opens them.
pub(crate) const FTP_DATA: u16 = 20;
/// Time between two snapshots of the counters.
const STATS_PERIOD: Duration = Duration::from_secs(2);

/// A service: its settings, its servers and its scheduler.
#[derive(Debug)]
pub struct Service {
    pub(crate) key: ServiceKey,
    pub(crate) config: ServiceConfig,
    owner: Option<String>,
    pub(crate) pool: Pool,
    stats: ObjectStats,
    /// When the scheduler is to be called next; none until the clock has been shown, or if it never is.
    next_tick: Option<Instant>,
    /// Servers that get their share bit by bit.
    pub(crate) slow: SlowStart,
    /// What it has taken of its limits.
    pub(crate) limiter: Limiter,
    /// Its servers, counted by what checks ask for.
    pub(crate) census: Census,
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

/// Whose timeouts a director has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// The kernel's.
    #[default]
    Kernel,
    /// Long enough for the RFCs on address translation (RFC 5382, RFC 4787): in seconds, TCP ESTABLISHED 7440 instead of
    /// 900; SYN_SENT, SYN_RECV, SYNACK, FIN_WAIT, CLOSE_WAIT and LAST_ACK 240; SCTP ESTABLISHED 7440.
    Modern,
}

/// How a director is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Connections that each shard holds at most. Persistence templates, which all of them share, are an eighth (and
    /// 128) more, so that when every connection has one of its own, some are free to give way.
    pub max_connections: usize,
    /// What a full shard does with a new connection.
    pub when_full: WhenFull,
    /// How many shards there will be.
    pub shards: usize,
    /// Keys the hash of the connection table; take it from the system's random numbers.
    pub seed: u64,
    /// The schedulers that services can ask for.
    pub schedulers: Registry,
    /// The timeouts that it begins with.
    pub profile: Profile,
}

impl Default for Options {
    /// One shard of 2^20 connections, seed 0, the built-in schedulers, the kernel's timeouts.
    fn default() -> Self {
        Self {
            max_connections: 1 << 20,
            when_full: WhenFull::Drop,
            shards: 1,
            seed: 0,
            schedulers: Registry::new(),
            profile: Profile::Kernel,
        }
    }
}

/// Services, real servers, scheduler state, settings.
///
/// With several workers, put it behind a lock; a worker takes it for a packet that opens a connection
/// ([`admit`](Self::admit)), never for a packet of a known one. No call waits for anything.
///
/// | | methods | called |
/// |---|---|---|
/// | configuration | [`add_service`](Self::add_service), [`add_server`](Self::add_server), [`set_sysctl`](Self::set_sysctl) and others; with the feature `api`, `apply` for a list of changes, all or none | from any thread, then [`sweep`](Self::sweep) for each shard, so that its packets follow |
/// | the host | [`set_local_addresses`](Self::set_local_addresses), [`set_networks`](Self::set_networks), [`set_memory`](Self::set_memory) | when it changes |
/// | packets | [`admit`](Self::admit), [`admit_icmp_error`](Self::admit_icmp_error) | with a shard that returned [`Pending`](crate::Pending), at once and with the same time |
/// | time | [`advance`](Self::advance), at [`next_wakeup`](Self::next_wakeup) or every two seconds | once for all shards, after their own [`advance`](Shard::advance); then [`sweep`](Self::sweep) for each |
/// | questions | [`services`](Self::services), [`total_stats`](Self::total_stats), [`explain`](Self::explain) and others | from any thread |
///
/// With one shard, [`advance_with`](Self::advance_with) is `advance` of both and `sweep`, everything in the order of its
/// deadline. Two workers, each with a shard, on one control half:
///
/// ```
/// use std::sync::Mutex;
/// use lvs_core::*;
///
/// let vip = "198.51.100.1:80".parse().unwrap();
/// let service = ServiceKey::tcp(vip);
/// let now = Instant::ZERO;
/// let mut control = Control::new(Options { shards: 2, ..Options::default() });
/// control.add_service(service, ServiceConfig::new(Family::V4, "rr"), None)?;
/// for server in ["10.0.0.11:80", "10.0.0.12:80"] {
///     let config = ServerConfig::new(1, Forwarding::Nat);
///     control.add_server(&service, server.parse().unwrap(), &config, now)?;
/// }
/// let mut shards = [control.shard(0).unwrap(), control.shard(1).unwrap()];
/// let control = Mutex::new(control);
///
/// // What a worker does with a packet: the lock is taken only if the shard cannot decide alone.
/// let decide = |shard: &mut Shard, packet: &PacketMeta<'_>| match shard.handle_packet(packet, now) {
///     Ok(verdict) => verdict,
///     Err(pending) => control.lock().unwrap().admit(shard, packet, pending, now),
/// };
/// let packet = |hook, src, dst, flags| PacketMeta {
///     hook,
///     tuple: Tuple { protocol: Protocol::TCP, src, dst },
///     transport: Transport::Tcp(TcpFlags(flags)),
///     segment: Segment::NONE,
///     mark: 0,
///     len: 60,
/// };
/// for (shard, client) in shards.iter_mut().zip(["192.0.2.7:40000", "192.0.2.8:40001"]) {
///     let client = client.parse().unwrap();
///     let syn = packet(Hook::Local, client, vip, TcpFlags::SYN);
///     let Verdict::Forward(forward) = decide(shard, &syn) else { panic!() };
///     let reply = packet(Hook::Transit, forward.target, client, TcpFlags::SYN | TcpFlags::ACK);
///     assert!(matches!(decide(shard, &reply), Verdict::Reply(_)));
/// }
///
/// // Two minutes later: each worker ends what is due in its shard, 1024 connections at a time.
/// let now = Instant::from_secs(120);
/// for shard in &mut shards {
///     while shard.advance(now, 1024) {}
///     assert!(shard.is_empty());
/// }
/// // One of them does the rest, and each takes what that left for its shard.
/// control.lock().unwrap().advance(now);
/// for shard in &mut shards {
///     control.lock().unwrap().sweep(shard);
/// }
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Control {
    pub(crate) options: Options,
    pub(crate) services: BTreeMap<u32, Box<Service>>,
    pub(crate) index: BTreeMap<ServiceKeyOrd, u32>,
    next_service: u32,
    pub(crate) records: Records,
    /// Services with port 21: TCP ports without a service of their own fall to them.
    pub(crate) ftp_services: usize,
    /// Services with port 0, marks included.
    pub(crate) any_port_services: usize,
    /// Services of IPv4 and of IPv6.
    families: [usize; 2],
    /// Services with a persistence engine.
    engines: usize,
    agenda: Agenda,
    total: ObjectStats,
    pub(crate) settings: Settings,
    shared: Arc<Shared>,
    /// The latest time shown by [`advance`](Self::advance).
    clock: Option<Instant>,
    /// The earliest of the moments below and of the services' ticks.
    next_event: Option<Instant>,
    next_stats: Option<Instant>,
    next_trash: Option<Instant>,
    /// When the defences look at the memory next.
    next_defense: Option<Instant>,
    /// What each shard is to do when it is swept next.
    wishes: Vec<Wish>,
    pub(crate) templates: Templates,
    pub(crate) evicted_templates: u64,
    pub(crate) defense: Defense,
    /// Connections of each shard when it was here last.
    occupancy: Vec<usize>,
    /// The synchronisation backup that runs.
    pub(crate) backup: Option<Backup>,
    pub(crate) sync: Queue,
    /// Addresses of the host itself, as prefixes.
    local: Vec<Prefix>,
    pub(crate) full_nat: FullNat,
    /// Servers of another family than their service's.
    pub(crate) mixed: usize,
    /// Whose connections are taken.
    pub(crate) filters: Filters,
    /// Rules that give packets marks, which whoever embeds the director applies.
    pub(crate) marks: Arc<[MarkRule]>,
    /// Virtual addresses that whoever embeds the director is to answer for.
    pub(crate) own_vips: Vec<IpAddr>,
    /// Synchronisation daemons as they were asked for, in the order in which they were started.
    pub(crate) daemons: Vec<SyncDaemon>,
}

/// What a shard is to do when it is swept next.
#[derive(Clone, Debug, Default)]
struct Wish {
    /// End the connections of removed servers.
    flush_removed: bool,
    /// Rounds of `drop_entry`.
    drop_entry: u32,
    /// End the connections of servers that went down, as their services ask for.
    end_down: bool,
}

/// A service's key in an order: protocol, family and address, port; marks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ServiceKeyOrd {
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

impl From<ServiceKeyOrd> for ServiceKey {
    fn from(key: ServiceKeyOrd) -> Self {
        match key {
            ServiceKeyOrd::Mark(family, mark) => Self::Mark { family, mark },
            ServiceKeyOrd::Address(protocol, addr) => Self::Address { protocol, addr },
        }
    }
}

impl Control {
    /// A director without services.
    pub fn new(options: Options) -> Self {
        let shards = options.shards.max(1);
        let templates = Templates::new(
            options.max_connections + options.max_connections / 8 + 128,
            options.seed.rotate_left(17),
        );
        let defense = Defense::new(options.seed);
        let settings = Settings {
            timeouts: match options.profile {
                Profile::Kernel => Timeouts::default(),
                Profile::Modern => Timeouts::modern(),
            },
            evicts: options.when_full == WhenFull::Evict,
            ..Settings::default()
        };
        Self {
            options: Options { shards, ..options },
            services: BTreeMap::new(),
            index: BTreeMap::new(),
            next_service: 0,
            records: Records::default(),
            ftp_services: 0,
            any_port_services: 0,
            families: [0; 2],
            engines: 0,
            agenda: Agenda::default(),
            total: ObjectStats::new(shards),
            settings,
            shared: Arc::default(),
            clock: None,
            next_event: None,
            next_stats: None,
            next_trash: None,
            next_defense: None,
            wishes: vec![Wish::default(); shards],
            templates,
            evicted_templates: 0,
            defense,
            occupancy: vec![0; shards],
            backup: None,
            sync: Queue::default(),
            local: Vec::new(),
            full_nat: FullNat::default(),
            mixed: 0,
            filters: Filters::default(),
            marks: Arc::from([]),
            own_vips: Vec::new(),
            daemons: Vec::new(),
        }
    }

    /// Shard `number`, without connections; `None` if it is not below [`Options::shards`]. To be asked for once each: two of one
    /// number count the same twice.
    pub fn shard(&self, number: usize) -> Option<Shard> {
        if number >= self.options.shards {
            return None;
        }
        let mut shard = Shard {
            number,
            table: ConnTable::new(self.options.max_connections, self.options.seed),
            links: Links::default(),
            total: self.total.shard(number),
            settings: Settings::default(),
            shared: self.shared.clone(),
            generation: 0,
            templates: Vec::new(),
            local_ports: LocalPorts::new(number, self.options.shards, self.options.seed),
            dying: Vec::new(),
            sync: Queue::default(),
            sequences: BTreeMap::new(),
            down: Down::default(),
            sessions: BTreeMap::new(),
            hand: Hand::default(),
        };
        self.refresh(&mut shard);
        Some(shard)
    }

    /// Whether `shard` is one of this director's.
    pub(crate) fn owns(&self, shard: &Shard) -> bool {
        Arc::ptr_eq(&self.shared, &shard.shared)
    }

    // --- services -------------------------------------------------------------------------------------------------

    /// All services, the oldest first.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values().map(|service| &**service)
    }

    /// The service with this key.
    pub fn service(&self, key: &ServiceKey) -> Option<&Service> {
        Some(self.services.get(self.index.get(&key.into())?)?)
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
        let scheduler = check::add_service(self, self, &key, &config)?;
        let number = self.next_service;
        self.next_service += 1;
        let service = Service {
            key,
            config,
            owner,
            next_tick: self.first_tick(&*scheduler),
            pool: Pool::new(scheduler),
            stats: ObjectStats::new(self.options.shards),
            slow: SlowStart::default(),
            limiter: Limiter::default(),
            census: Census::default(),
        };
        self.ftp_services += usize::from(key.port() == FTP);
        self.any_port_services += usize::from(key.port() == 0);
        self.families[key.family() as usize] += 1;
        self.engines += usize::from(service.config.engine.is_some());
        self.services.insert(number, Box::new(service));
        self.index.insert((&key).into(), number);
        self.plan_service(number);
        self.changed();
        Ok(())
    }

    /// Replaces all settings of a service (`ip_vs_edit_service`). A scheduler that stays the same keeps its state.
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::NeedsReplies`], and as [`add_service`](Self::add_service).
    pub fn edit_service(
        &mut self,
        key: &ServiceKey,
        config: ServiceConfig,
        owner: Option<String>,
    ) -> Result<(), Error> {
        let scheduler = check::edit_service(self, self, key, &config)?;
        let engine = usize::from(config.engine.is_some());
        let next_tick = self.first_tick(&*scheduler);
        let (number, service) = self.service_mut(key)?;
        if service.config.scheduler != config.scheduler {
            service.pool.reschedule(scheduler);
            service.next_tick = next_tick;
        }
        if service.config.extras.slow_start == 0 && config.extras.slow_start != 0 {
            service.slow.take_as_established(service.pool.servers());
        }
        if service.config.extras.limits != config.extras.limits {
            service.limiter = Limiter::default();
        }
        let before = core::mem::replace(&mut service.config, config);
        service.owner = owner;
        let timed = service.pool.needs_replies();
        for server in service.pool.servers() {
            server.follow_extras(&service.config.extras, timed);
        }
        self.engines = self.engines - usize::from(before.engine.is_some()) + engine;
        self.warm_up(number, self.clock.unwrap_or_default());
        self.plan_service(number);
        self.changed();
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
        self.filters.services.remove(&number);
        let family = service.key.family();
        self.ftp_services -= usize::from(service.key.port() == FTP);
        self.any_port_services -= usize::from(service.key.port() == 0);
        self.families[family as usize] -= 1;
        self.engines -= usize::from(service.config.engine.is_some());
        self.agenda.set(number, None);
        self.mixed -= service.census.mixed;
        self.full_nat.count(family, service.census.full_nat, 0);
        self.records.note_trashed(key);
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
    /// [`Error::NoService`], [`Error::ServerExists`], [`Error::NotUnicast`], [`Error::FamilyMismatch`],
    /// [`Error::NeedsReplies`], and what [`Server::check`] finds.
    pub fn add_server(
        &mut self,
        key: &ServiceKey,
        addr: SocketAddr,
        config: &ServerConfig,
        now: Instant,
    ) -> Result<(), Error> {
        check::add_server(self, key, addr, config)?;
        let (number, service) = self.service_mut(key)?;
        let key = service.key;
        let shards = self.options.shards;
        let server = self.records.enter(number, key, addr, config, shards)?;
        server.configure(config);
        server.reset_last_weight();
        let service = self.services.get_mut(&number).ok_or(Error::NoService)?;
        server.follow_extras(&service.config.extras, service.pool.needs_replies());
        service.pool.add(server);
        self.recount(number, addr, None, Some(config.forwarding));
        self.warm_up(number, now);
        self.changed();
        Ok(())
    }

    /// Replaces all settings of a real server (`ip_vs_edit_dest`). The forwarding method concerns new connections only.
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::NoServer`], [`Error::FamilyMismatch`], [`Error::NeedsReplies`], and what
    /// [`Server::check`] finds.
    pub fn edit_server(
        &mut self,
        key: &ServiceKey,
        addr: SocketAddr,
        config: &ServerConfig,
    ) -> Result<(), Error> {
        let before = check::edit_server(self, key, addr, config)?;
        let (number, service) = self.service_mut(key)?;
        let id = service.pool.configure(addr, config)?.id();
        self.records.note(id.0);
        self.recount(number, addr, Some(before), Some(config.forwarding));
        self.warm_up(number, self.clock.unwrap_or_default());
        self.changed();
        Ok(())
    }

    /// Removes a real server from a service (`ip_vs_del_dest`). Packets of clients to it are dropped until it comes
    /// back; with `expire_nodest_conn` its connections end at the next [`sweep`](Self::sweep). What the service's
    /// [`OnServerDown`](crate::OnServerDown) says comes first.
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::NoServer`].
    pub fn delete_server(
        &mut self,
        key: &ServiceKey,
        addr: SocketAddr,
        now: Instant,
    ) -> Result<(), Error> {
        let (number, service) = self.service_mut(key)?;
        let server = service.pool.remove(addr)?;
        self.recount(number, addr, Some(server.forwarding()), None);
        self.trash(server.id(), now);
        self.warm_up(number, now);
        self.changed();
        Ok(())
    }

    /// Counters and rates of a real server.
    pub fn server_stats(&self, id: ServerId) -> Option<Stats> {
        Some(self.records.get(id.index())?.stats.stats())
    }

    /// Whether removed servers are kept, which may yet come back with their connections.
    pub fn has_removed(&self) -> bool {
        self.next_trash.is_some()
    }

    /// Every server that is configured or still has connections, with the service that it belongs or belonged to: what
    /// packets may yet go to and come from.
    pub fn endpoints(&self) -> impl Iterator<Item = (ServiceKey, &Arc<Server>)> {
        self.records
            .iter()
            .filter(|entry| !entry.is_trashed() || entry.server.is_referenced())
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
        check::timeouts([tcp, tcp_fin, udp])?;
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
        let modes =
            |sysctls: &Sysctls| [sysctls.drop_entry, sysctls.drop_packet, sysctls.secure_tcp];
        let before = modes(&self.settings.sysctls);
        self.settings.sysctls.set(name, value)?;
        // At once only if a mode changes: a mode written again waits for the next second (`proc_do_defense_mode`).
        if modes(&self.settings.sysctls) != before {
            self.update_defense();
            let needed = Defense::is_needed(&self.settings.sysctls);
            self.next_defense = match (needed, self.next_defense) {
                (true, None) => self.clock.map(|clock| clock + defense::PERIOD),
                (true, planned) => planned,
                (false, _) => None,
            };
            self.plan();
        }
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

    /// What each shard has counted, of everything, up to now.
    pub fn shard_counts(&self) -> impl Iterator<Item = crate::Counts> + '_ {
        (0..self.options.shards).map(|number| self.total.live_of(number))
    }

    /// Zeroes what is shown of one service and its servers, or of everything (`ip_vs_zero_service`, `ip_vs_zero_all`).
    ///
    /// # Errors
    /// [`Error::NoService`].
    pub fn zero(&mut self, key: Option<&ServiceKey>) -> Result<(), Error> {
        if let Some(key) = key {
            let number = *self.index.get(&key.into()).ok_or(Error::NoService)?;
            if let Some(service) = self.services.get_mut(&number) {
                service.stats.zero();
                for server in service.pool.servers() {
                    if let Some(entry) = self.records.get_mut(server.id()) {
                        entry.stats.zero();
                    }
                }
            }
            return Ok(());
        }
        for service in self.services.values_mut() {
            service.stats.zero();
        }
        for entry in self.records.iter_mut().filter(|entry| !entry.is_trashed()) {
            entry.stats.zero();
        }
        self.total.zero();
        Ok(())
    }

    /// Does what is due by the clock: templates that end, snapshots of the counters, the trash, schedulers that age what
    /// they remember, defences. Call it at least every two seconds, after the shards'
    /// [`advance`](crate::Shard::advance): a template ends after its last connection.
    pub fn advance(&mut self, now: Instant) {
        self.show_clock(now);
        let mut budget = TEMPLATES_AT_ONCE;
        while let Some(at) = self.next_event.filter(|&at| at <= now) {
            self.expire_templates(at, &mut budget);
            self.run_events(at);
        }
        self.expire_templates(now, &mut budget);
    }

    /// As [`advance`](Self::advance), for a director of one shard: connections, templates and everything else end and
    /// happen in the order of their deadlines, however far the clock has moved. A shard of another director stays as it is.
    pub fn advance_with(&mut self, shard: &mut Shard, now: Instant) {
        if !self.owns(shard) {
            return self.advance(now);
        }
        if self.clock.is_some_and(|clock| clock < now) {
            shard.bury();
        }
        self.sweep(shard);
        self.show_clock(now);
        while let Some(at) = self.next_event.filter(|&at| at <= now) {
            self.expire_until(shard, at);
            self.run_events(at);
            self.sweep(shard);
        }
        self.expire_until(shard, now);
    }

    /// Ends connections and templates whose time has come, in the order of their deadlines; within a tick of 4 ms,
    /// connections before templates.
    fn expire_until(&mut self, shard: &mut Shard, limit: Instant) {
        let mut budget = usize::MAX;
        let (mut connections, mut templates) = (true, true);
        loop {
            let conn_tick = if connections {
                shard.table.due_tick(limit, &mut budget)
            } else {
                None
            };
            let template_tick = if templates {
                self.templates.table.due_tick(limit, &mut budget)
            } else {
                None
            };
            let (tick, of_connections) = match (conn_tick, template_tick) {
                (None, None) => return,
                (Some(conn), None) => (conn, true),
                (None, Some(template)) => (template, false),
                (Some(conn), Some(template)) => (conn.min(template), conn <= template),
            };
            let table = if of_connections {
                &mut shard.table
            } else {
                &mut self.templates.table
            };
            let due = table.take_due(limit, &mut budget);
            // In the tick of the limit, what is left is due later.
            if due.is_empty() && tick == tick_of(limit) {
                if of_connections {
                    connections = false;
                } else {
                    templates = false;
                }
            }
            for &index in &due {
                if of_connections {
                    shard.expire(index);
                } else {
                    self.expire_template(index, Some(shard));
                }
            }
            if of_connections {
                shard.table.recycle(due);
            } else {
                self.templates.table.recycle(due);
            }
        }
    }

    fn expire_templates(&mut self, now: Instant, budget: &mut usize) {
        while *budget > 0 {
            let due = self.templates.table.take_due_by(now, budget);
            let done = due.is_empty();
            for &index in &due {
                self.expire_template(index, None);
            }
            self.templates.table.recycle(due);
            if done {
                return;
            }
        }
    }

    /// The timer of a template has fired (`ip_vs_conn_expire`).
    fn expire_template(&mut self, index: u32, shard: Option<&mut Shard>) {
        let template = self.templates.get(index);
        if template.controlled.load(Ordering::Relaxed) == 0 {
            self.remove_template(index);
            return;
        }
        // For good: from now on every new connection gives it 60 s.
        template.timeout.store(60, Ordering::Relaxed);
        let fired = self.templates.table.get(index).expires;
        let queue = match shard {
            Some(shard) => &mut shard.sync,
            None => &mut self.sync,
        };
        let threshold = self.settings.sysctls.sync_threshold.0;
        sync_template(queue, &self.settings, template, threshold, fired);
        self.templates.restart(index, fired);
    }

    pub(crate) fn remove_template(&mut self, index: u32) {
        let template = self.templates.remove(index);
        let server = template.server.load(Ordering::Relaxed) as usize;
        if let Some(entry) = self.records.get(server) {
            entry.server.unbind_template();
        }
    }

    /// Persistence templates from slot `start` on.
    pub fn templates_from(
        &self,
        start: usize,
        now: Instant,
    ) -> impl Iterator<Item = Connection> + '_ {
        self.templates_in(start..self.template_slots(), now)
    }

    /// Slots that hold or held persistence templates.
    pub const fn template_slots(&self) -> usize {
        self.templates.table.slots_len()
    }

    /// Persistence templates in these slots, for listings in pieces.
    pub fn templates_in(
        &self,
        slots: Range<usize>,
        now: Instant,
    ) -> impl Iterator<Item = Connection> + '_ {
        self.templates
            .table
            .indices(slots)
            .map(move |index| self.template_entry(index, now))
    }

    fn template_entry(&self, index: u32, now: Instant) -> Connection {
        let (slot, template) = (self.templates.table.get(index), self.templates.get(index));
        let Key {
            protocol,
            client,
            mut virt,
        } = template.key;
        let mut server = template.server_addr;
        if template.invalid.load(Ordering::Relaxed) {
            virt.set_port(u16::MAX);
            server.set_port(u16::MAX);
        }
        Connection {
            id: ConnId(index),
            protocol,
            client,
            virt,
            server,
            state: template.state_name(),
            expires: slot.expires.saturating_since(now),
            method: slot.method(),
            template: true,
            synced: template.flags.load(Ordering::Relaxed) & flag::SYNC != 0,
        }
    }

    /// Name and data of the persistence engine of a template that [`templates_from`](Self::templates_from) has shown.
    pub fn template_engine(&self, id: ConnId) -> Option<(&'static str, &[u8])> {
        if !self.templates.table.is_used(id.0) {
            return None;
        }
        let (name, data) = self.templates.get(id.0).engine.as_ref()?;
        Some((name, data))
    }

    /// Tells the defences how much memory is free, in pages of 4 KiB (`drop_entry`, `drop_packet`, `secure_tcp` in their
    /// automatic modes). Until told, there is enough.
    pub fn set_memory(&mut self, free_pages: u64) {
        self.defense.set_memory(free_pages);
    }

    /// Tells which addresses, as prefixes, are the host's own: connections to them are never sent past the servers
    /// (`cache_bypass`).
    pub fn set_local_addresses(&mut self, prefixes: Vec<(IpAddr, u8)>) {
        self.local = full_nat::prefixes(prefixes);
    }

    /// Has a helper look at FTP's control connections to these virtual ports, as `ip_vs_ftp` does where it is loaded. None
    /// at first; it concerns connections that are made from now on.
    ///
    /// The helper needs the segments' bytes ([`PacketMeta::segment`](crate::PacketMeta::segment)), and whoever embeds the
    /// director then changes segments as verdicts say ([`Forward::shift`](crate::Forward::shift),
    /// [`Reply::edit`](crate::Reply::edit)).
    ///
    /// # Errors
    /// [`Error::HelperPorts`] if a port is 0 or occurs twice, or if there are more than
    /// [`FTP_PORTS_MAX`](crate::FTP_PORTS_MAX).
    pub fn set_ftp_ports(&mut self, ports: Vec<u16>) -> Result<(), Error> {
        crate::ftp::check_ports(&ports)?;
        self.settings.ftp_ports = ports;
        self.changed();
        Ok(())
    }

    /// The ports set by [`set_ftp_ports`](Self::set_ftp_ports).
    pub fn ftp_ports(&self) -> &[u16] {
        &self.settings.ftp_ports
    }

    /// Whose new connections a service takes; of no service: whose all of them take. What is open already goes on.
    ///
    /// # Errors
    /// [`Error::NoService`].
    pub fn set_filter(
        &mut self,
        service: Option<&ServiceKey>,
        filter: SourceFilter,
    ) -> Result<(), Error> {
        let Some(key) = service else {
            self.filters.director = filter;
            return Ok(());
        };
        let number = *self.index.get(&key.into()).ok_or(Error::NoService)?;
        if filter.is_off() {
            self.filters.services.remove(&number);
        } else {
            self.filters.services.insert(number, filter);
        }
        Ok(())
    }

    /// Filters that are not off: the director's first, then those of services.
    pub fn filters(&self) -> impl Iterator<Item = (Option<ServiceKey>, SourceFilter)> + '_ {
        let director = [(None, self.filters.director.clone())].into_iter();
        let services = self.filters.services.iter().filter_map(|(number, filter)| {
            let service = self.services.get(number)?;
            Some((Some(service.key), filter.clone()))
        });
        director
            .filter(|(_, filter)| !filter.is_off())
            .chain(services)
    }

    /// The rules that give packets marks. A packet's mark is part of its [`PacketMeta`](crate::PacketMeta): whoever embeds
    /// the director applies them.
    pub const fn marks(&self) -> &Arc<[MarkRule]> {
        &self.marks
    }

    /// The virtual addresses that whoever embeds the director was told to answer for.
    pub fn own_vips(&self) -> &[IpAddr] {
        &self.own_vips
    }

    /// The synchronisation daemons as they were asked for, in the order in which they were started.
    pub fn daemons(&self) -> &[SyncDaemon] {
        &self.daemons
    }

    pub(crate) fn is_local(&self, addr: IpAddr) -> bool {
        self.local.iter().any(|prefix| prefix.contains(addr))
    }

    /// When to call [`advance`](Self::advance) next.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let templates = self.templates.table.next_wakeup();
        self.next_event.into_iter().chain(templates).min()
    }

    /// Starts the periods that run from the first moment that the director is shown.
    pub(crate) fn show_clock(&mut self, now: Instant) {
        if self.clock.is_none() {
            self.next_stats = Some(now + STATS_PERIOD);
            if Defense::is_needed(&self.settings.sysctls) {
                self.next_defense = Some(now + defense::PERIOD);
            }
            for (&number, service) in &mut self.services {
                service.next_tick = service.pool.period().map(|period| now + period);
                let moments = [service.next_tick, service.slow.next];
                self.agenda.set(number, moments.into_iter().flatten().min());
            }
            self.plan();
        }
        self.clock = self.clock.max(Some(now));
    }

    /// Does what is due at `at`, which is the moment of the next event.
    pub(crate) fn run_events(&mut self, at: Instant) {
        let due = |event: Option<Instant>| event.is_some_and(|event| event <= at);
        let stats = due(self.next_stats);
        if due(self.next_stats) {
            self.next_stats = Some(at + STATS_PERIOD);
        }
        if due(self.next_defense) {
            self.update_defense();
            self.next_defense =
                Defense::is_needed(&self.settings.sysctls).then_some(at + defense::PERIOD);
            if self.defense.drops_entries {
                self.wishes.iter_mut().for_each(|wish| wish.drop_entry += 1);
                self.drop_templates(at);
                self.changed();
            }
        }
        if stats && self.settings.sysctls.estimates() {
            self.total.tick();
            self.services
                .values_mut()
                .for_each(|service| service.stats.tick());
            let servers = self.records.iter_mut();
            servers
                .filter(|entry| !entry.is_trashed())
                .for_each(|entry| entry.stats.tick());
        }
        for number in self.agenda.due(at) {
            let Some(service) = self.services.get_mut(&number) else {
                continue;
            };
            if due(service.next_tick) {
                service.pool.tick(at);
                service.next_tick = service.pool.period().map(|period| at + period);
            }
            if due(service.slow.next) {
                service.warm_up(at);
            }
            self.plan_service(number);
        }
        if due(self.next_trash) {
            self.empty_trash(at);
        }
        self.plan();
    }

    /// Finds the moment at which a service is to be looked at next.
    pub(crate) fn plan_service(&mut self, number: u32) {
        let service = self.services.get(&number);
        let moments = service.map(|service| [service.next_tick, service.slow.next]);
        let next = moments.into_iter().flatten().flatten().min();
        self.agenda.set(number, next);
        self.plan();
    }

    /// Finds the moment of the next event.
    fn plan(&mut self) {
        let periods = [self.next_stats, self.next_trash, self.next_defense];
        let moments = periods.into_iter().chain([self.agenda.next()]);
        self.next_event = moments.flatten().min();
    }

    /// When a scheduler that is made now is to be called first.
    fn first_tick(&self, scheduler: &dyn crate::Scheduler) -> Option<Instant> {
        Some(self.clock? + scheduler.period()?)
    }

    /// Notes how many connections a shard has, for the defences.
    pub(crate) fn note_occupancy(&mut self, shard: &Shard) {
        if let Some(connections) = self.occupancy.get_mut(shard.number) {
            *connections = shard.len();
        }
    }

    /// Brings a shard up to date, and ends what the settings say must end now. Call it after changes. A shard of another
    /// director stays as it is.
    pub fn sweep(&mut self, shard: &mut Shard) {
        if !self.owns(shard) {
            return;
        }
        self.refresh(shard);
        self.note_occupancy(shard);
        let Some(wish) = self.wishes.get_mut(shard.number) else {
            return;
        };
        if !wish.flush_removed && !wish.end_down && wish.drop_entry == 0 {
            return;
        }
        let wish = core::mem::take(wish);
        if wish.end_down {
            shard.down.begin();
        }
        if wish.flush_removed {
            shard.flush_removed();
            self.flush_removed_templates();
        }
        for _ in 0..wish.drop_entry {
            self.drop_entries(shard);
        }
    }

    /// Ends templates to removed servers that control nothing any more.
    fn flush_removed_templates(&mut self) {
        let removed: Vec<u32> = self
            .templates
            .table
            .indices(0..usize::MAX)
            .filter(|&index| {
                let template = self.templates.get(index);
                let server = template.server.load(Ordering::Relaxed) as usize;
                let entry = self.records.get(server);
                template.controlled.load(Ordering::Relaxed) == 0
                    && entry.is_some_and(|entry| !entry.server.is_available())
            })
            .collect();
        for index in removed {
            self.remove_template(index);
        }
    }

    /// Re-evaluates the defences (`update_defense_level`).
    fn update_defense(&mut self) {
        let slots = self.options.max_connections * self.options.shards;
        let used: usize = self.occupancy.iter().sum();
        self.defense
            .set_occupancy(slots.saturating_sub(used), slots);
        let before = self.settings.sysctls.clone();
        self.defense.update(&mut self.settings.sysctls);
        if self.settings.secure != self.defense.secure || self.settings.sysctls != before {
            self.settings.secure = self.defense.secure;
            self.changed();
        }
    }

    /// A round of `drop_entry` among connections (`ip_vs_random_dropentry`).
    fn drop_entries(&mut self, shard: &mut Shard) {
        let now = self.clock.unwrap_or_default();
        let len = shard.table.slots_len();
        for _ in 0..self.defense.visits(len) {
            let index = self.defense.draw(len);
            if !shard.table.is_used(index) {
                continue;
            }
            let slot = shard.table.get(index);
            if slot.controlled > 0 {
                continue;
            }
            let idle = idle(slot, now);
            let (protocol, state, packets) = (slot.protocol(), slot.state, slot.in_packets);
            if self
                .defense
                .drops_connection(protocol, state, idle, packets)
                && let Some(template) = shard.kill(index)
                && self.templates.table.is_used(template)
            {
                self.remove_template(template);
            }
        }
    }

    /// A round of `drop_entry` among templates.
    fn drop_templates(&mut self, now: Instant) {
        let len = self.templates.table.slots_len();
        for _ in 0..self.defense.visits(len) {
            let index = self.defense.draw(len);
            if !self.templates.table.is_used(index) {
                continue;
            }
            let template = self.templates.get(index);
            if template.controlled.load(Ordering::Relaxed) > 0 {
                continue;
            }
            let server = template.server.load(Ordering::Relaxed) as usize;
            let entry = self.records.get(server);
            let service = entry.and_then(|entry| self.services.get(&entry.service));
            let once =
                service.is_some_and(|service| service.config.flags.has(ServiceFlags::ONE_PACKET));
            let drops = if once {
                let idle = idle(self.templates.table.get(index), now);
                let packets = template.in_packets.load(Ordering::Relaxed);
                self.defense.draws_lot(idle, packets)
            } else {
                !template.assured.load(Ordering::Relaxed)
            };
            if drops {
                self.remove_template(index);
            }
        }
    }

    // --- inside -------------------------------------------------------------------------------------------------------

    /// Counts a server of service `number` whose forwarding method was `before` and is `after`.
    fn recount(
        &mut self,
        number: u32,
        addr: SocketAddr,
        before: Option<Forwarding>,
        after: Option<Forwarding>,
    ) {
        let Some(service) = self.services.get_mut(&number) else {
            return;
        };
        let mixed = check::is_mixed(&service.key, addr);
        let old = service.census;
        if let Some(forwarding) = before {
            service.census.leave(mixed, forwarding);
        }
        if let Some(forwarding) = after {
            service.census.enter(mixed, forwarding);
        }
        let (new, family) = (service.census, service.key.family());
        self.mixed = self.mixed - old.mixed + new.mixed;
        self.full_nat.count(family, old.full_nat, new.full_nat);
    }

    /// The service with this key, and its number.
    fn service_mut(&mut self, key: &ServiceKey) -> Result<(u32, &mut Service), Error> {
        let number = *self.index.get(&key.into()).ok_or(Error::NoService)?;
        let service = self.services.get_mut(&number).ok_or(Error::NoService)?;
        Ok((number, service))
    }

    /// A new scheduler of this name.
    pub(crate) fn scheduler(&self, name: &str) -> Result<Box<dyn crate::Scheduler>, Error> {
        let schedulers = &self.options.schedulers;
        let mut scheduler = schedulers.create(name).ok_or(Error::UnknownScheduler)?;
        scheduler.seed(self.options.seed ^ u64::from(self.next_service) << 32);
        scheduler.sysctls_changed(&self.settings.sysctls);
        Ok(scheduler)
    }

    /// Puts a server that has left its service into the trash (`__ip_vs_del_dest`).
    fn trash(&mut self, id: ServerId, now: Instant) {
        let gone = self.records.trash(id);
        if gone.is_some_and(|entry| entry.server.has_gone()) {
            self.wishes.iter_mut().for_each(|wish| wish.end_down = true);
        }
        self.next_trash.get_or_insert(now + TRASH_PERIOD);
        self.plan();
        if self.settings.sysctls.expire_nodest_conn {
            self.wishes
                .iter_mut()
                .for_each(|wish| wish.flush_removed = true);
        }
    }

    /// Frees removed servers that nothing has referred to for long enough (`ip_vs_dest_trash_expire`).
    fn empty_trash(&mut self, now: Instant) {
        let left = self.records.empty_trash(now);
        self.next_trash = left.then_some(now + TRASH_PERIOD);
        self.changed();
    }

    /// Tells the shards that their copies are out of date.
    pub(crate) fn changed(&mut self) {
        self.settings.ipv4 = self.families[Family::V4 as usize] > 0;
        self.settings.ipv6 = self.families[Family::V6 as usize] > 0;
        self.settings.backup_only = self.backup.is_some() && self.settings.sysctls.backup_only;
        self.settings.outbound = self.engines > 0;
        self.records.index_addresses(self.engines > 0);
        self.shared.generation.fetch_add(1, Ordering::Release);
    }

    /// Copies settings and links into a shard whose copies are out of date.
    pub(crate) fn refresh(&self, shard: &mut Shard) {
        let generation = self.shared.generation.load(Ordering::Acquire);
        if shard.is_at(generation) {
            return;
        }
        shard.take_settings(&self.settings, generation);
        let heeds_servers = self.settings.heeds_servers();
        shard.links.heed(heeds_servers);
        let number = shard.number();
        let link = |place: usize| {
            let entry = self.records.get(place)?;
            let service = self.services.get(&entry.service);
            let link = ServerLink {
                server: entry.server.clone(),
                counters: entry.stats.shard(number),
                service: service.map(|service| service.stats.shard(number)),
            };
            let masqueraded =
                heeds_servers && !entry.is_trashed() && entry.server.forwarding().translates();
            let protocol = entry.key.protocol().map_or(0, |protocol| protocol.0);
            Some((link, masqueraded.then_some((entry.server.addr(), protocol))))
        };
        let seen = shard.links.seen();
        match seen.and_then(|seen| self.records.changed_since(seen)) {
            Some(places) => {
                for &place in places {
                    let link = link(place as usize);
                    shard.links.set(place, link);
                }
            }
            None => {
                let all: Vec<_> = (0..self.records.len()).map(link).collect();
                shard.links.replace(all);
            }
        }
        shard.links.has_seen(self.records.changes());
    }
}

/// Time since the last packet of an entry, or since a template was renewed.
fn idle(slot: &Slot, now: Instant) -> Duration {
    let left = slot.expires.saturating_since(now);
    Duration::from_secs(slot.timeout.into()).saturating_sub(left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    fn service(n: u32) -> ServiceKey {
        let port = u16::try_from(n).unwrap();
        ServiceKey::udp(SocketAddr::from(([198, 51, 100, 1], 1000 + port)))
    }

    fn server(n: u32) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, u8::try_from(n).unwrap()], 80))
    }

    /// A shard that follows changes bit by bit has what one has that is made now.
    #[test]
    fn a_shard_that_follows_every_change_has_what_a_new_one_has() {
        let mut control = Control::new(Options {
            max_connections: 16,
            ..Options::default()
        });
        let mut shard = control.shard(0).unwrap();
        let mut defense = Defense::new(7);
        let mut below = |n: usize| defense.draw(n);
        for round in 0..20_000u32 {
            let now = Instant::ZERO + Duration::from_secs(round.into());
            let (key, addr) = (service(below(6)), server(below(5)));
            let methods = [Forwarding::Nat, Forwarding::Route, Forwarding::Tunnel];
            let config = ServerConfig::new(1, methods[below(3) as usize]);
            // Most of these are refused now and then.
            let _ = match below(40) {
                0..5 => {
                    let mut config = ServiceConfig::new(Family::V4, "rr");
                    if below(2) == 0 {
                        config.engine = Some("sip".into());
                    }
                    control.add_service(key, config, None)
                }
                5..7 => control.delete_service(&key, now),
                7..25 => control.add_server(&key, addr, &config, now),
                25..32 => control.edit_server(&key, addr, &config),
                32..38 => control.delete_server(&key, addr, now),
                38 => control.set_sysctl("nat_icmp_send", if below(2) == 0 { "0" } else { "1" }),
                _ => {
                    control.advance(now);
                    Ok(())
                }
            };
            if below(4) == 0 {
                control.sweep(&mut shard);
                let new = control.shard(0).unwrap();
                assert_eq!(format!("{:?}", shard.links), format!("{:?}", new.links));
                assert_eq!(
                    format!("{:?}", shard.settings),
                    format!("{:?}", new.settings)
                );
            }
        }
    }

    /// What is counted along with changes is what counting anew gives.
    #[test]
    fn counts_that_are_kept_are_right() {
        let mut control = Control::new(Options::default());
        let v6 = ServiceKey::tcp("[2001:db8::1]:21".parse().unwrap());
        let local = vec![crate::LocalAddress::new([192, 0, 2, 1].into())];
        control.set_local_pool(local, false).unwrap();
        for key in [service(0), service(1), v6] {
            let config = ServiceConfig::new(key.family(), "rr");
            control.add_service(key, config, None).unwrap();
        }
        let now = Instant::ZERO;
        let add = |control: &mut Control, key, n, method| {
            let config = ServerConfig::new(1, method);
            control.add_server(&key, server(n), &config, now).unwrap();
        };
        add(&mut control, service(0), 1, Forwarding::FullNat);
        add(&mut control, service(0), 2, Forwarding::FullNat);
        add(&mut control, service(1), 1, Forwarding::Route);
        add(&mut control, v6, 1, Forwarding::Tunnel);
        let counts = |control: &Control| {
            let full_nat = control.full_nat.servers(Family::V4);
            (
                control.families,
                control.ftp_services,
                control.mixed,
                full_nat,
            )
        };
        assert_eq!(counts(&control), ([2, 1], 1, 1, 2));
        let nat = ServerConfig::new(1, Forwarding::Nat);
        control.edit_server(&service(0), server(1), &nat).unwrap();
        control.delete_service(&v6, now).unwrap();
        assert_eq!(counts(&control), ([2, 0], 0, 0, 1));
        control.flush(now);
        assert_eq!(counts(&control), ([0, 0], 0, 0, 0));
    }
}

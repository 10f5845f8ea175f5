//! The half of a director that all workers share: services, real servers, and the decision about
//! new connections.

mod admit;
mod adopt;
mod agenda;
pub(crate) mod check;
mod clock;
mod counters;
mod defend;
mod defense;
mod digests;
mod estimator;
mod explain;
mod full_nat;
mod keys;
mod limiter;
mod pins;
mod records;
mod servers;
mod service;
mod services;
mod settings;
mod slow_start;
mod sweep;
mod sync;
mod take_over;
mod templates;

use self::agenda::Agenda;
use self::defense::Defense;
pub use self::digests::DigestWalk;
use self::estimator::Estimator;
pub use self::explain::{Candidate, Explanation};
use self::full_nat::FullNat;
use self::keys::Keys;
use self::pins::Pins;
use self::records::Records;
#[cfg(feature = "api")]
pub(crate) use self::service::Census;
pub use self::service::Service;
use self::sweep::SweepWork;
pub use self::take_over::{ItemResults, TakenOver};
use crate::conn::memory::{Layout, Memory, OutOfMemory};
use crate::conn::{ConnTable, Templates, Timeouts};
use crate::filter::Filters;
use crate::mark::MarkRule;
use crate::settings::{Profile, WhenFull};
use crate::shard::LocalPorts;
use crate::shard::{Settings, Shard, Shared};
use crate::stats::ObjectStats;
use crate::sync::{Backup, Queue, SyncDaemon};
use crate::{Instant, Prefix, Registry, Server};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::net::IpAddr;

pub(crate) const FTP: u16 = 21;

/// The source port of FTP's data connections that the server opens.
pub(crate) const FTP_DATA: u16 = 20;

/// Settings of a new director.
#[derive(Clone, Debug)]
pub struct Options {
    /// Maximum number of connections in each shard. The table of persistence templates, which all
    /// shards share, has room for the connections of all shards, an eighth more, and another 128.
    /// Some templates are therefore evictable even if every connection has a template of its own.
    pub max_connections: usize,
    /// Action of a full shard for a new connection.
    pub when_full: WhenFull,
    /// Number of shards among which the connections are divided.
    pub shards: usize,
    /// Seed of the connection table's hash function and of random decisions; use a random number of
    /// the system.
    pub seed: u64,
    /// The schedulers that services can use.
    pub schedulers: Registry,
    /// The profile of initial timeouts.
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
/// With several workers, protect it by a lock. A worker locks it for a packet that opens a
/// connection ([`admit`](Self::admit)), and for the first packet after a change of the
/// configuration. Other packets of existing connections need no lock. No call blocks.
///
/// | | methods | called |
/// |---|---|---|
/// | configuration | [`add_service`](Self::add_service), [`add_server`](Self::add_server), [`set_sysctl`](Self::set_sysctl) and others; with the feature `api`, `apply` for a list of changes, all or none | from any thread, then [`sweep`](Self::sweep) for each shard, so that it applies the changes |
/// | the host | [`set_local_addresses`](Self::set_local_addresses), [`set_networks`](Self::set_networks), [`set_memory`](Self::set_memory) | when it changes |
/// | packets | [`admit`](Self::admit), [`admit_icmp_error`](Self::admit_icmp_error) | with a shard that returned [`NeedsControl`](crate::NeedsControl), at once and with the same time |
/// | time | [`advance`](Self::advance), at [`next_wakeup`](Self::next_wakeup) or every two seconds | once for all shards, after their own [`advance`](Shard::advance); then [`sweep`](Self::sweep) for each |
/// | questions | [`services`](Self::services), [`total_stats`](Self::total_stats), [`explain`](Self::explain) and others | from any thread |
///
/// With one shard, [`advance_with`](Self::advance_with) does the work of `advance` of both and of
/// `sweep`, all in the order of the deadlines. This example has two workers, each with a shard, and
/// one `Control`:
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
/// // A worker processes a packet: it locks `control` only if the shard cannot decide alone.
/// let decide = |shard: &mut Shard, packet: &PacketMeta<'_>| match shard.handle_packet(packet, now) {
///     Ok(verdict) => verdict,
///     Err(pending) => control.lock().unwrap().admit(shard, packet, pending, now),
/// };
/// for (shard, client) in shards.iter_mut().zip(["192.0.2.7:40000", "192.0.2.8:40001"]) {
///     let client = client.parse().unwrap();
///     let syn = PacketMeta::tcp(Hook::Local, client, vip, TcpFlags::SYN);
///     let Verdict::Forward(forward) = decide(shard, &syn) else { panic!() };
///     let flags = TcpFlags::SYN | TcpFlags::ACK;
///     let reply = PacketMeta::tcp(Hook::Transit, forward.target, client, flags);
///     assert!(matches!(decide(shard, &reply), Verdict::Reply(_)));
/// }
///
/// // Two minutes later: each worker removes expired connections of its shard, 1024 at a time.
/// let now = Instant::from_secs(120);
/// for shard in &mut shards {
///     while shard.advance(now, 1024) {}
///     assert!(shard.is_empty());
/// }
/// // One worker advances `control`, and each worker applies the resulting changes to its shard.
/// control.lock().unwrap().advance(now);
/// for shard in &mut shards {
///     control.lock().unwrap().sweep(shard);
/// }
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Control {
    options: Options,
    services: BTreeMap<u32, Box<Service>>,
    index: Keys,
    next_service: u32,
    records: Records,
    /// Number of services with port 21: they also receive TCP packets to the ports of data
    /// connections (20, and from 1024 on) that have no service of their own.
    ftp_services: usize,
    /// Number of services with port 0, marks included.
    any_port_services: usize,
    /// Number of services of IPv4 and of IPv6.
    families: [usize; 2],
    /// Number of services with a persistence engine.
    engines: usize,
    agenda: Agenda,
    total: ObjectStats,
    settings: Settings,
    shared: Arc<Shared>,
    /// The latest time that the caller has passed to [`advance`](Self::advance).
    clock: Option<Instant>,
    /// The earliest time at which some periodic work is due.
    next_event: Option<Instant>,
    estimator: Estimator,
    next_trash: Option<Instant>,
    /// Servers of deleted services that are still to be moved to the trash.
    leaving: VecDeque<Arc<Server>>,
    /// Time of the next update of the defences.
    next_defense: Option<Instant>,
    /// Changes that each shard has not applied yet, by shard number.
    sweep_work: Vec<SweepWork>,
    templates: Templates,
    evicted_templates: u64,
    defense: Defense,
    /// Number of connections that each shard reported last.
    occupancy: Vec<usize>,
    /// The running synchronisation backup.
    backup: Option<Backup>,
    sync: Queue,
    /// Number of ports of the running synchronisation daemons.
    sync_ports: u16,
    /// Addresses and networks of the host itself, as prefixes.
    local: Vec<Prefix>,
    full_nat: FullNat,
    /// Number of servers whose address family differs from the family of their service.
    mixed: usize,
    /// Health checks' pins: the server of the next connection of a client.
    pins: Pins,
    filters: Filters,
    /// Rules that set marks on packets. The embedding program applies them.
    marks: Arc<[MarkRule]>,
    /// Virtual addresses that the embedding program answers ARP for.
    own_vips: Vec<IpAddr>,
    /// Running synchronisation daemons that `apply` has started, in the order of their start.
    daemons: Vec<SyncDaemon>,
}

impl Control {
    /// A director without services.
    ///
    /// # Panics
    /// If there is no memory for [`Options::max_connections`]: see [`try_new`](Self::try_new).
    pub fn new(options: Options) -> Self {
        Self::try_new(options).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A director without services. The address space for the persistence templates of
    /// [`Options::max_connections`] is reserved at once; the memory is used when templates are
    /// created.
    ///
    /// # Errors
    /// [`OutOfMemory`]
    pub fn try_new(options: Options) -> Result<Self, OutOfMemory> {
        let shards = options.shards.max(1);
        // All shards share the table of templates.
        let all = options.max_connections.saturating_mul(shards);
        let templates = Templates::new(
            all.saturating_add(all / 8 + 128),
            options.seed.rotate_left(17),
        )?;
        let defense = Defense::new(options.seed);
        let settings = Settings {
            timeouts: match options.profile {
                Profile::Kernel => Timeouts::default(),
                Profile::Modern => Timeouts::modern(),
            },
            evicts: options.when_full == WhenFull::Evict,
            ..Settings::default()
        };
        Ok(Self {
            options: Options { shards, ..options },
            services: BTreeMap::new(),
            index: Keys::default(),
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
            estimator: Estimator::default(),
            next_trash: None,
            leaving: VecDeque::new(),
            next_defense: None,
            sweep_work: vec![SweepWork::default(); shards],
            templates,
            evicted_templates: 0,
            defense,
            occupancy: vec![0; shards],
            backup: None,
            sync: Queue::default(),
            sync_ports: 1,
            local: Vec::new(),
            full_nat: FullNat::default(),
            mixed: 0,
            pins: Pins::default(),
            filters: Filters::default(),
            marks: Arc::from([]),
            own_vips: Vec::new(),
            daemons: Vec::new(),
        })
    }

    /// Shard `number`, without connections; `None` if `number` is not below [`Options::shards`].
    /// Call it once for each number: two shards of one number would count the same events twice.
    ///
    /// # Panics
    /// If its connections cannot be allocated: see [`Memory::try_heap`] and
    /// [`shard_in`](Self::shard_in).
    pub fn shard(&self, number: usize) -> Option<Shard> {
        self.shard_in(number, Memory::heap(self.layout()))
    }

    /// Memory layout of a shard that can contain [`Options::max_connections`].
    pub fn layout(&self) -> Layout {
        Layout::new(self.options.max_connections, self.options.seed)
    }

    /// As [`shard`](Self::shard), with its connections in `memory`, which must contain zeros only.
    pub fn shard_in(&self, number: usize, memory: Memory) -> Option<Shard> {
        let table = ConnTable::with_memory(self.options.max_connections, memory);
        self.shard_with(number, table)
    }

    fn shard_with(&self, number: usize, table: ConnTable) -> Option<Shard> {
        if number >= self.options.shards {
            return None;
        }
        let Options { shards, seed, .. } = self.options;
        let local_ports = LocalPorts::new(number, shards, seed);
        let total = self.total.shard(number);
        let mut shard = Shard::new(number, table, local_ports, total, self.shared.clone());
        self.refresh(&mut shard);
        Some(shard)
    }

    pub(crate) fn owns(&self, shard: &Shard) -> bool {
        shard.is_of(&self.shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use core::net::SocketAddr;
    use core::time::Duration;

    use crate::{Family, Forwarding, ServerConfig, ServiceConfig, ServiceKey};

    fn service(n: u32) -> ServiceKey {
        let port = u16::try_from(n).unwrap();
        ServiceKey::udp(SocketAddr::from(([198, 51, 100, 1], 1000 + port)))
    }

    fn server(n: u32) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, u8::try_from(n).unwrap()], 80))
    }

    /// All shards share the templates, so that the maximum number of templates does not depend on
    /// the number of shards.
    #[test]
    fn template_table_capacity_does_not_depend_on_number_of_shards() {
        let templates = |shards: usize| {
            let options = Options {
                max_connections: 4096 / shards,
                shards,
                ..Options::default()
            };
            Control::new(options).templates.capacity()
        };
        assert!(templates(1) >= 4096);
        assert_eq!(templates(8), templates(1));
    }

    /// A shard that applied changes step by step equals a new shard.
    #[test]
    fn swept_shard_equals_new_shard() {
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
                assert_eq!(shard.copies(), new.copies());
            }
        }
    }

    #[test]
    fn counts_of_services_and_servers_follow_changes() {
        let mut control = Control::new(Options::default());
        let v6 = ServiceKey::tcp("[2001:db8::1]:21".parse().unwrap());
        let local = vec![crate::full_nat::LocalAddress::new([192, 0, 2, 1].into())];
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

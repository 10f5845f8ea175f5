//! Reconciliation: the pure function [`diff`] returns the changes from the actual to the desired
//! state of the dataplane, in an order that breaks no connection needlessly. lvsd uses it at its
//! start, at a reload, when health changes, and every two seconds, because another program may have
//! changed the dataplane.
//!
//! * A server in both states is edited, never deleted and re-added: it keeps its connections,
//!   counters and place in the scheduler's list. Only a failed server is deleted, if
//!   `on_check_failure` requires it.
//! * In a service, servers are added before working servers are removed, so that it always has a
//!   server. Old servers stay until a new one has passed its checks, or all new ones have failed.
//! * A removed server is drained first: it gets no new connections, and is deleted after its last
//!   active connection or at the end of the drain time.
//! * Changes of failed servers, and changes of only a weight to a value above 0, precede all other
//!   changes.
//! * The dataplane takes over a VIP after its services are added, and releases it before they are
//!   deleted. Otherwise it would refuse clients that another director can serve.
//! * Services of another owner are never changed.
//! * Until all sources have answered, services of lvsd that neither the file nor a source contains
//!   stay, with their VIPs and marks.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use lvs_api::guidance::OWNER;
use lvs_core::api::{
    Call, FilterSpec, LocalPool, ServerInfo, ServerSpec, ServiceId, ServiceInfo, ServiceSpec,
    Sysctl,
};
use lvs_core::filter::{FilterLists, SourceFilter};
use lvs_core::sched::About;
use lvs_core::sync::{SyncDaemon, SyncRole};
use lvs_core::{Forwarding, ServerConfig, ServiceConfig, ServiceFlags};

pub use crate::health::Health;

use crate::config::{Files, OnCheckFailure, OnDrift, generated_mark, is_generated};

/// The desired state of a dataplane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    /// Files of the configuration, for messages.
    pub file: Files,
    /// The services, each with its servers.
    pub services: Vec<DesiredService>,
    /// VIPs that the dataplane should own.
    pub vips: BTreeSet<IpAddr>,
    /// Names and values of sysctls.
    pub sysctls: Vec<(String, String)>,
    /// Synchronisation daemons; `None` leaves the dataplane's daemons unchanged.
    pub sync: Option<Vec<SyncDaemon>>,
    /// Rules for marks; `None` leaves the rules of other programs unchanged.
    pub marks: Option<Vec<String>>,
    /// Rules that set the marks of services with many ports, after the other rules.
    pub port_marks: Vec<String>,
    /// The source filter of all services; `None` leaves the dataplane's filter unchanged.
    pub filter: Option<SourceFilter>,
    /// Local addresses of full NAT; `None` leaves the dataplane's addresses unchanged.
    pub local: Option<LocalPool>,
    /// Set while the list of services may be incomplete: services that it lacks stay.
    pub unnamed: Option<Unnamed>,
    /// Whether lvsd adopts services without an owner.
    pub adopt: bool,
    /// The reaction to manual changes.
    pub on_drift: OnDrift,
    /// Number of the loaded configuration, counted since the start of lvsd.
    pub generation: u64,
}

/// How to treat services of lvsd that neither the file nor the sources contain, until etcd and
/// Kubernetes have answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unnamed {
    /// VIPs of services in the file or the sources; the dataplane keeps all other VIPs that it
    /// owns. `None` if the dataplane may own no VIPs.
    pub beside: Option<BTreeSet<IpAddr>>,
}

/// The desired state of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredService {
    /// Identity of the service in the dataplane.
    pub id: ServiceId,
    /// The service's name in the log.
    pub name: String,
    /// The service's line in the file.
    pub line: usize,
    /// Settings of the service.
    pub config: ServiceConfig,
    /// The filter of the service's new connections.
    pub filter: SourceFilter,
    /// Action if a server is down.
    pub on_check_failure: OnCheckFailure,
    /// Maximum time for which connections of a removed server continue.
    pub drain: Duration,
    /// Servers of the service.
    pub servers: Vec<DesiredServer>,
    /// Whether the list of servers may be incomplete: servers in the dataplane then stay until the
    /// source has answered.
    pub incomplete: bool,
    /// The sorry server while lvsd has not decided whether it is needed. It then stays in the
    /// dataplane if it is there.
    pub undecided: Option<SocketAddr>,
    /// A sorry server that is removed at once instead of drained, because its persistent clients
    /// would stay with weight 0.
    pub removed_at_once: Option<SocketAddr>,
}

#[cfg(test)]
impl DesiredService {
    /// A service without a name and a line in the file.
    pub(crate) fn of(id: ServiceId, config: ServiceConfig, servers: Vec<DesiredServer>) -> Self {
        Self {
            id,
            name: String::new(),
            line: 0,
            config,
            filter: SourceFilter::default(),
            on_check_failure: OnCheckFailure::Quiesce,
            drain: Duration::ZERO,
            servers,
            incomplete: false,
            undecided: None,
            removed_at_once: None,
        }
    }
}

/// The desired state of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DesiredServer {
    /// Address and port of the server.
    pub address: SocketAddr,
    /// The server's line in the file.
    pub line: usize,
    /// The server's settings while it is up.
    pub config: ServerConfig,
    /// The server's health.
    pub health: Health,
    /// Whether the table must contain the server even while it is down or unchecked, with weight 0,
    /// because its through-VIP checks need it there.
    pub stays: bool,
    /// Whether the server is removed like one that is no longer configured: it is in maintenance,
    /// or the sorry server replaces it and weight 0 would not stop its new connections.
    pub leaves: bool,
}

#[cfg(test)]
impl DesiredServer {
    /// A server without a line in the file.
    pub(crate) const fn of(address: SocketAddr, config: ServerConfig, health: Health) -> Self {
        Self {
            address,
            line: 0,
            config,
            health,
            stays: false,
            leaves: false,
        }
    }
}

/// The present state of a dataplane.
#[derive(Clone, Debug, Default)]
pub struct Actual {
    /// All services of all owners.
    pub services: Vec<ServiceInfo>,
    /// VIPs that the dataplane owns for lvsd.
    pub vips: BTreeSet<IpAddr>,
    /// The dataplane's sysctls; only read if lvsd sets, or has set, some of them.
    pub sysctls: Vec<(String, String)>,
    /// Running synchronisation daemons of the dataplane; only read if lvsd manages them.
    pub daemons: Vec<SyncDaemon>,
    /// The dataplane's rules for marks.
    pub marks: Vec<String>,
    /// The dataplane's filters that are not off, by service; the key `None` is the filter of all
    /// services.
    pub filters: HashMap<Option<ServiceId>, FilterLists>,
    /// Local addresses of the dataplane; only read if some are desired.
    pub local: LocalPool,
    /// Removed servers whose drain time has passed.
    pub overdue: HashSet<(ServiceId, SocketAddr)>,
}

/// The changes of [`diff`], and services and servers that stay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The changes, in the order in which the dataplane must make them.
    pub changes: Vec<Call>,
    /// Desired services that another owner has in the dataplane. They stay unchanged.
    pub conflicts: Vec<ServiceId>,
    /// Removed servers whose connections continue, with the drain time of their service.
    pub draining: Vec<(ServiceId, SocketAddr, Duration)>,
    /// Servers that are not desired, but stay for now: their replacements are not checked yet,
    /// their source has not answered, or lvsd has not decided whether the sorry server is needed.
    pub held: Vec<(ServiceId, SocketAddr)>,
    /// Services of lvsd that neither the file nor a source contains, and that stay until all
    /// sources have answered.
    pub unnamed: Vec<ServiceId>,
}

/// Computes the changes that turn `actual` into `desired`, and the services and servers that stay
/// for now.
pub fn diff(desired: &Desired, actual: &Actual) -> Plan {
    let mut plan = Plan::default();
    let mut urgent = Vec::new();
    for (name, value) in &desired.sysctls {
        if !actual.sysctls.iter().any(|(n, v)| n == name && v == value) {
            plan.changes.push(Call::SysctlSet(Sysctl {
                name: name.clone(),
                value: value.clone(),
            }));
        }
    }
    // Some sysctls take effect only when a synchronisation daemon starts, so they are set first.
    follow_daemons(desired, actual, &mut plan.changes);
    let wanted: HashSet<ServiceId> = desired.services.iter().map(|s| s.id).collect();
    let unnamed = actual.services.iter();
    let unnamed = unnamed.filter(|there| !wanted.contains(&there.service) && ours(desired, there));
    let unnamed: Vec<ServiceId> = unnamed.map(|there| there.service).collect();
    let (stay, go) = match &desired.unnamed {
        Some(_) => (unnamed, Vec::new()),
        None => (Vec::new(), unnamed),
    };
    let marks = marks(desired, actual, &stay);
    if marks != actual.marks {
        plan.changes.push(Call::MarkSet { rules: marks });
    }
    if let Some(filter) = &desired.filter {
        follow_filter(None, filter, actual, &mut plan.changes);
    }
    // Servers with full NAT need local addresses until they are removed.
    let mut local = actual.local.clone();
    if let Some(wanted) = &desired.local {
        let more = wanted.addresses.iter();
        let more: Vec<IpAddr> = more
            .filter(|addr| !local.addresses.contains(addr))
            .copied()
            .collect();
        if !more.is_empty() || (wanted.hairpin && !local.hairpin) {
            local.addresses.extend(more);
            local.hairpin |= wanted.hairpin;
            plan.changes.push(Call::LocalSet(local.clone()));
        }
    }
    let mut vips = desired.vips.clone();
    if let Some(beside) = desired.unnamed.as_ref().and_then(|one| one.beside.as_ref()) {
        vips.extend(actual.vips.difference(beside));
    }
    let kept: BTreeSet<IpAddr> = actual.vips.intersection(&vips).copied().collect();
    if kept != actual.vips {
        plan.changes.push(own(&kept));
    }
    let there: HashMap<ServiceId, &ServiceInfo> =
        actual.services.iter().map(|s| (s.service, s)).collect();
    for service in &desired.services {
        match there.get(&service.id).copied() {
            Some(there) if !ours(desired, there) => plan.conflicts.push(service.id),
            there => {
                let one = OneService {
                    desired: service,
                    overdue: &actual.overdue,
                    plan: &mut plan,
                    urgent: &mut urgent,
                    failed: Vec::new(),
                    emptied: Vec::new(),
                };
                one.run(there);
                let id = Some(service.id);
                follow_filter(id, &service.filter, actual, &mut plan.changes);
            }
        }
    }
    let deleted = go.into_iter();
    let deleted = deleted.map(|service| Call::ServiceDelete { service });
    plan.changes.extend(deleted);
    plan.unnamed = stay;
    if kept != vips {
        plan.changes.push(own(&vips));
    }
    if let Some(wanted) = &desired.local
        && *wanted != local
        // Draining servers may still need the local addresses.
        && plan.draining.is_empty()
        && plan.held.is_empty()
    {
        plan.changes.push(Call::LocalSet(wanted.clone()));
    }
    urgent.append(&mut plan.changes);
    plan.changes = urgent;
    plan
}

/// Adds the changes that stop synchronisation daemons that the file lacks or that have other
/// settings, and start missing ones.
fn follow_daemons(desired: &Desired, actual: &Actual, changes: &mut Vec<Call>) {
    let Some(wanted) = &desired.sync else {
        return;
    };
    for there in &actual.daemons {
        if !wanted.iter().any(|wanted| is_as_wanted(wanted, there)) {
            changes.push(Call::DaemonStop {
                role: there.role,
                syncid: there.syncid,
            });
        }
    }
    for wanted in wanted {
        let mut there = actual.daemons.iter();
        if !there.any(|there| is_as_wanted(wanted, there)) {
            changes.push(Call::DaemonStart(wanted.clone()));
        }
    }
}

/// Whether a running synchronisation daemon has the desired settings. If the file sets no message
/// length, a backup's depends on its interface, and is at least that of Ethernet.
fn is_as_wanted(wanted: &SyncDaemon, there: &SyncDaemon) -> bool {
    let mut complete = wanted.completed(1500);
    if wanted.maxlen.is_none() && wanted.role == SyncRole::Backup && there.maxlen >= complete.maxlen
    {
        complete.maxlen = there.maxlen;
    }
    complete == *there
}

/// Adds the change that sets the source filter of a service, or of all services, if the dataplane
/// has another one.
fn follow_filter(
    service: Option<ServiceId>,
    wanted: &SourceFilter,
    actual: &Actual,
    changes: &mut Vec<Call>,
) {
    let there = actual.filters.get(&service);
    let same = match there {
        Some(there) => *there == wanted.lists(),
        None => wanted.is_off(),
    };
    if !same {
        changes.push(Call::FilterSet(FilterSpec {
            service,
            filter: wanted.clone(),
        }));
    }
}

fn own(vips: &BTreeSet<IpAddr>) -> Call {
    Call::VipsOwn {
        addresses: vips.iter().copied().collect(),
    }
}

/// The desired mark rules: those of the file or, if it has none, those of other programs. Then the
/// rules for services with many ports, including the services in `stay`.
fn marks(desired: &Desired, actual: &Actual, stay: &[ServiceId]) -> Vec<String> {
    let others = || {
        let rules = actual.marks.iter();
        rules.filter(|rule| !is_generated(rule)).cloned().collect()
    };
    let mut marks = desired.marks.clone().unwrap_or_else(others);
    marks.extend(desired.port_marks.iter().cloned());
    let stays = |rule: &&String| {
        let mark = generated_mark(rule);
        mark.is_some_and(|mark| {
            let mut stay = stay.iter();
            stay.any(|id| matches!(id, ServiceId::Fwmark { mark: one, .. } if *one == mark))
        })
    };
    marks.extend(actual.marks.iter().filter(stays).cloned());
    marks
}

/// Whether lvsd may change a service: lvsd owns it, or it has no owner and lvsd adopts such
/// services.
fn ours(desired: &Desired, service: &ServiceInfo) -> bool {
    match &service.owner {
        Some(owner) => owner == OWNER,
        None => desired.adopt,
    }
}

/// Collects the changes of one service.
struct OneService<'a> {
    desired: &'a DesiredService,
    overdue: &'a HashSet<(ServiceId, SocketAddr)>,
    plan: &'a mut Plan,
    /// Changes of failed servers, and changes of only a weight to a value above 0, of all services.
    /// They precede all other changes.
    urgent: &'a mut Vec<Call>,
    /// Removals of failed servers, or their change to weight 0. They follow the service's other
    /// urgent changes.
    failed: Vec<Call>,
    /// Changes that stop new connections to working servers. They follow the additions of servers.
    emptied: Vec<Call>,
}

impl OneService<'_> {
    fn run(mut self, there: Option<&ServiceInfo>) {
        let service = self.desired;
        let before = (self.urgent.len(), self.plan.changes.len());
        let spec = || ServiceSpec {
            service: service.id,
            config: service.config.clone(),
            owner: Some(OWNER.to_owned()),
        };
        match there {
            None => self.plan.changes.push(Call::ServiceAdd(spec())),
            Some(there) => {
                let adopted = there.owner.as_deref() != Some(OWNER);
                if adopted || !same_service(&there.config, &service.config) {
                    self.plan.changes.push(Call::ServiceEdit(spec()));
                }
            }
        }
        let servers = there.map_or(&[][..], |there| &there.servers);
        let now: HashMap<SocketAddr, &ServerInfo> = servers.iter().map(|s| (s.server, s)).collect();
        let (mut expected, mut arrived) = (false, false);
        let sorry = |there: &&ServerInfo| service.undecided == Some(there.server);
        let sorry_serves = servers
            .iter()
            .find(sorry)
            .is_some_and(|s| s.config.weight > 0);
        for server in service.servers.iter().filter(|server| !server.leaves) {
            let mut server = *server;
            if sorry_serves && server.health == Health::Up {
                // Until the daemon has decided about the quorum, a server that is up does not
                // replace the sorry server.
                server.health = Health::Unknown;
            }
            let now = now.get(&server.address).map(|server| server.config);
            let absent = now.is_none_or(|now| server.stays && now.weight == 0);
            expected |= absent && server.health == Health::Unknown;
            arrived |= absent && server.health == Health::Up;
            self.wanted(&server, now);
        }
        self.urgent.append(&mut self.failed);
        self.plan.changes.append(&mut self.emptied);
        let stays = service.servers.iter().filter(|server| !server.leaves);
        let wanted: HashSet<SocketAddr> = stays.map(|server| server.address).collect();
        let reported = service.servers.iter().filter(|server| server.leaves);
        let reported: HashSet<SocketAddr> = reported.map(|server| server.address).collect();
        for server in servers.iter().filter(|s| !wanted.contains(&s.server)) {
            let awaited = service.incomplete
                || (expected && !arrived)
                || service.undecided == Some(server.server);
            if awaited && !reported.contains(&server.server) {
                self.plan.held.push((service.id, server.server));
            } else {
                self.unwanted(server);
            }
        }
        self.arrange(servers, before);
    }

    /// Sorts the servers as in the file if the scheduler depends on their order. Without sorting,
    /// the order would follow the times at which checks succeed, which differ between directors.
    /// `before` are the numbers of urgent and of other changes that precede those of this service.
    fn arrange(&mut self, there: &[ServerInfo], before: (usize, usize)) {
        let about = About::of(&self.desired.config.scheduler);
        if !about.is_some_and(|about| about.goes_by_order) {
            return;
        }
        let (mut added, mut deleted) = (Vec::new(), HashSet::new());
        let changes = self.urgent[before.0..].iter();
        for change in changes.chain(&self.plan.changes[before.1..]) {
            match change {
                Call::ServerAdd(spec) => added.push(spec.server),
                Call::ServerDelete { server, .. } => drop(deleted.insert(*server)),
                _ => {}
            }
        }
        let there = there.iter().map(|server| server.server);
        let stay = there.filter(|address| !deleted.contains(address));
        let mut after: Vec<SocketAddr> = added.into_iter().rev().chain(stay).collect();
        // New servers are first in the listing.
        let stays = self
            .desired
            .servers
            .iter()
            .rev()
            .filter(|server| !server.leaves);
        let places: HashMap<SocketAddr, usize> =
            stays.map(|server| server.address).zip(0..).collect();
        let place = |address: &SocketAddr| places.get(address).copied().unwrap_or(usize::MAX);
        if !after.is_sorted_by_key(place) {
            after.sort_by_key(place);
            self.plan.changes.push(Call::ServerArrange {
                service: self.desired.id,
                servers: after,
            });
        }
    }

    /// Adds the changes for a desired server. Additions precede changes that stop new connections
    /// to working servers, so that the service always has a server.
    fn wanted(&mut self, server: &DesiredServer, now: Option<ServerConfig>) {
        let spec = |config| ServerSpec {
            service: self.desired.id,
            server: server.address,
            config,
        };
        let target = target_config(server, self.desired.on_check_failure, now);
        match (now, target) {
            (None, None) => {}
            (None, Some(config)) => self.plan.changes.push(Call::ServerAdd(spec(config))),
            // The check of the server has failed.
            (Some(_), None) => self.failed.push(Call::ServerDelete {
                service: self.desired.id,
                server: server.address,
            }),
            (Some(now), Some(config)) if !same_server(&now, &config) => {
                let weight_only = ServerConfig {
                    weight: config.weight,
                    ..now
                };
                let changes = match same_server(&weight_only, &config) {
                    _ if config.weight == 0 && server.health == Health::Down => &mut self.failed,
                    _ if config.weight == 0 && now.weight != 0 => &mut self.emptied,
                    true => &mut *self.urgent,
                    false => &mut self.plan.changes,
                };
                changes.push(Call::ServerEdit(spec(config)));
            }
            (Some(_), Some(_)) => {}
        }
    }

    /// Adds the changes for an undesired server, which is drained first if possible.
    fn unwanted(&mut self, server: &ServerInfo) {
        let key = (self.desired.id, server.server);
        let limit = self.desired.drain;
        let connections = u64::from(server.active) + u64::from(server.inactive);
        let late = limit.is_zero()
            || self.desired.removed_at_once == Some(server.server)
            || self.overdue.contains(&key);
        if late || connections == 0 || (server.config.weight == 0 && server.active == 0) {
            self.plan.changes.push(Call::ServerDelete {
                service: key.0,
                server: key.1,
            });
            return;
        }
        self.plan.draining.push((key.0, key.1, limit));
        if server.config.weight != 0 {
            self.plan.changes.push(Call::ServerEdit(ServerSpec {
                service: key.0,
                server: key.1,
                config: ServerConfig {
                    weight: 0,
                    ..server.config
                },
            }));
        }
    }
}

/// The desired settings of a server; `None` if the service should not contain it.
fn target_config(
    server: &DesiredServer,
    on_check_failure: OnCheckFailure,
    now: Option<ServerConfig>,
) -> Option<ServerConfig> {
    let quiesced = ServerConfig {
        weight: 0,
        ..server.config
    };
    match (server.health, on_check_failure) {
        (Health::Up, _) => Some(server.config),
        (Health::Down, OnCheckFailure::Quiesce) => Some(quiesced),
        // A server in use is removed with its connections. The next plan adds it again with weight
        // 0 for its through-VIP checks.
        (Health::Down, OnCheckFailure::Remove) if server.stays => match now {
            Some(ServerConfig { weight: 1.., .. }) => None,
            _ => Some(quiesced),
        },
        (Health::Down, OnCheckFailure::Remove) => None,
        // A restarted daemon must neither remove a server in use nor re-add one that was down.
        (Health::Unknown, _) => match now {
            None if server.stays => Some(quiesced),
            None => None,
            Some(ServerConfig { weight: 0, .. }) => Some(quiesced),
            Some(_) => Some(server.config),
        },
    }
}

pub(crate) fn same_service(now: &ServiceConfig, wanted: &ServiceConfig) -> bool {
    let flags = |c: &ServiceConfig| c.flags.0 & ServiceFlags::ALL;
    now.scheduler == wanted.scheduler
        && flags(now) == flags(wanted)
        && now.timeout == wanted.timeout
        && now.netmask == wanted.netmask
        && now.engine == wanted.engine
        && now.extras == wanted.extras
}

pub(crate) fn same_server(now: &ServerConfig, wanted: &ServerConfig) -> bool {
    // Like the kernel, the dataplane changes the method of a server with one of its own addresses
    // to `Local`.
    let forwarding = now.forwarding == wanted.forwarding || now.forwarding == Forwarding::Local;
    let tunnel = wanted.forwarding != Forwarding::Tunnel || now.tunnel == wanted.tunnel;
    forwarding
        && tunnel
        && now.weight == wanted.weight
        && now.upper == wanted.upper
        && now.lower == wanted.lower
}

#[cfg(test)]
mod tests;

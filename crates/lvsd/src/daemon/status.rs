//! The state of daemon and dataplane: as `lvsd status` shows it, and as this director writes it to
//! etcd for the other directors of its cluster.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use lvs_api::daemon::{
    AdminState, CheckNotMade, DataplaneStatus, DirectorSeen, ProxyStatus, ServerStatus,
    ServiceStatus, SourceStatus, Status,
};
use lvs_api::directors;
use lvs_core::api::{
    DownInterface, Info, PeerStanding, ReasonCount, ServiceId, ServiceInfo, SilentHop, SyncCounts,
};

use super::Daemon;
use crate::clock::Now;
use crate::config::{Peers, Service};
use crate::dataplane::ObservedServer;
use crate::health::{Code, Prober};
use crate::sources::etcd::Director;
use crate::verdict;

impl<P: Prober> Daemon<P> {
    pub(super) fn status(&self) -> Status {
        let (inputs, dataplane) = (&self.inputs, &self.inputs.dataplane);
        let now = Now::read();
        let found = &dataplane.found;
        let by_service = by_service(&found.servers);
        let seen_of =
            |service: &Service| by_service.get(&service.id).map_or(&[][..], Vec::as_slice);
        let infos = found.seen.services.iter().map(|info| (info.service, info));
        let infos: HashMap<ServiceId, &ServiceInfo> = infos.collect();
        let services = inputs.expanded.services.iter();
        let services = services.map(|service| {
            let info = infos.get(&service.id).copied();
            self.status_of(service, seen_of(service), info)
        });
        let services: Vec<ServiceStatus> = services.collect();
        Status {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config: std::path::absolute(&self.reloader.path)
                .unwrap_or_else(|_| self.reloader.path.clone())
                .display()
                .to_string(),
            uptime: self.reporter.started.elapsed().as_secs(),
            loaded: self.reloader.status(now),
            dataplane: DataplaneStatus {
                connected: dataplane.contact.1,
                idle: !inputs.expanded.needs_dataplane(),
                pid: dataplane.contact.0,
                version: Some(found.seen.version.clone()).filter(|version| !version.is_empty()),
                seen_ms: dataplane.last_answer.get().map(|at| millis(at.elapsed())),
                vips: found.vips.iter().copied().collect(),
                sync: self.sync_counts(),
                peers: peers(&found.seen.info, inputs.config.dataplane.peers.as_ref()),
                tables: found.seen.info.tables.clone(),
                waiting: found.seen.info.waiting.clone(),
                down: found
                    .seen
                    .info
                    .interfaces
                    .iter()
                    .filter(|interface| !interface.up)
                    .map(|interface| DownInterface {
                        interface: interface.name.clone(),
                        since: interface.down_since,
                    })
                    .collect(),
                conflicts: found.seen.info.conflicts.clone(),
                silent_hops: silent_hops(&found.seen.info, &services),
                drops: recent_drops(&found.seen.reasons),
                connections: found.seen.info.connections,
                capacity: found.seen.info.capacity,
                confinement: Some(&found.seen.info)
                    .filter(|info| info.pid != 0)
                    .map(|info| info.confinement.clone()),
            },
            services,
            admin: inputs.admin.shown(now),
            drift: found.drift.clone(),
            refused: found.refused.clone(),
            check_lag_ms: millis(inputs.checks.peek_lag()),
            proxy: dataplane.proxy.map(|counts| ProxyStatus {
                connections: counts.connections as u64,
                most: counts.most as u64,
                full: counts.full,
                evicted: counts.evicted,
                refused: counts.refused,
            }),
            confinement: self.confinement.clone(),
            director: inputs.cluster.status(now),
            sources: self.sources_status(now),
            left_out: inputs
                .expanded
                .left_out
                .iter()
                .chain(&self.reloader.held_back)
                .cloned()
                .chain(inputs.sources.left_out())
                .collect(),
            directors: self.directors(),
        }
    }

    /// The states of all sources, and the number of services that wait for them.
    fn sources_status(&self, now: Now) -> Vec<SourceStatus> {
        let mut all = self.inputs.sources.status(now);
        for source in all.iter_mut().filter(|source| source.kind != "dns") {
            source.held = self.inputs.dataplane.found.unnamed;
        }
        all
    }

    /// The counters of synchronisation daemons, if the file has such daemons or a counter is not 0.
    fn sync_counts(&self) -> Option<SyncCounts> {
        let counts = self.inputs.dataplane.found.seen.info.sync;
        let wanted = self
            .inputs
            .config
            .sync
            .as_ref()
            .is_some_and(|sync| !sync.is_empty());
        (wanted || counts != SyncCounts::default()).then_some(counts)
    }

    /// Writes the state of this director to etcd, if `[cluster]` is configured.
    pub(super) fn publish_director(&mut self) {
        let inputs = &self.inputs;
        if inputs.config.cluster.is_none() {
            return;
        }
        let expanded = &inputs.expanded;
        let director = Director {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            revision: expanded.revision.number,
            digest: expanded.revision.digest,
            services: expanded.services.len(),
            servers: expanded.servers(),
            ready: self.reporter.ready && inputs.dataplane.contact.1 && inputs.cluster.has_peers(),
            maintenance: inputs.cluster.is_in_maintenance(),
            left_out: !expanded.left_out.is_empty() || self.reloader.held_back.is_some(),
        };
        inputs.sources.announce(director);
    }

    /// The states of all directors in etcd; empty without `[cluster]`.
    pub(super) fn directors(&self) -> Vec<DirectorSeen> {
        let Some(cluster) = &self.inputs.config.cluster else {
            return Vec::new();
        };
        let all = self.inputs.sources.directors().into_iter();
        all.map(|(name, director)| DirectorSeen {
            own: name == cluster.director,
            name,
            version: director.version,
            revision: u64::try_from(director.revision).unwrap_or(0),
            digest: format!("{:08x}", director.digest),
            services: director.services,
            servers: director.servers,
            ready: director.ready,
            maintenance: director.maintenance,
            left_out: director.left_out,
        })
        .collect()
    }

    /// The number of servers that accept new connections now. Unless lvsd proxies the service, the
    /// dataplane must have them with a weight above 0.
    fn usable(&self, service: &Service) -> usize {
        let dataplane = &self.inputs.dataplane;
        let is_served = |address| {
            let seen = dataplane.found.servers.get(&(service.id, address));
            service.proxy.is_some()
                || dataplane.contact.1 && seen.is_some_and(|seen| seen.weight > 0)
        };
        let views = self.inputs.views(service);
        let servers = service.servers.iter().zip(views);
        servers
            .filter(|(server, view)| view.is_usable() && is_served(server.address))
            .count()
    }

    /// The state of a service with its servers, and with the servers of the dataplane that are not
    /// in the file. `seen` and `info` are the servers and the service in the dataplane.
    fn status_of(
        &self,
        service: &Service,
        seen: &[(SocketAddr, ObservedServer)],
        info: Option<&ServiceInfo>,
    ) -> ServiceStatus {
        let (inputs, found) = (&self.inputs, &self.inputs.dataplane.found);
        let decision = self.policy.decision(&service.id);
        let mut servers: Vec<ServerStatus> = service
            .servers
            .iter()
            .map(|server| {
                let key = (service.id, server.address);
                let seen = found.servers.get(&key);
                let known = inputs.checks.known(&key);
                let admin = match inputs.admin.state(key.0, key.1) {
                    AdminState::Ready if found.drained.contains(&key) => AdminState::Drain,
                    state => state,
                };
                let health = match known.as_ref().map(|known| known.up) {
                    None => "unchecked",
                    Some(None) => "unknown",
                    Some(Some(true)) => "up",
                    Some(Some(false)) => "down",
                };
                let mut since = known.as_ref().map(|known| known.lasted.as_secs());
                let reason = known.as_ref().map(|known| known.reason.clone());
                let mut reason = reason.unwrap_or_default();
                let suspicion = inputs.suspects.get(&key);
                let suspicion = suspicion.filter(|_| matches!(health, "up" | "unchecked"));
                let health = match suspicion {
                    Some(suspicion) => {
                        since = Some(suspicion.since.elapsed().as_secs());
                        reason = suspicion.reason(&key);
                        "suspicious"
                    }
                    None => health,
                };
                let mut status = ServerStatus {
                    server: server.address,
                    configured: Some(server.config.weight),
                    admin,
                    health: health.to_owned(),
                    since,
                    code: String::new(),
                    reason: reason.text,
                    fix: reason.fix,
                    attempts: seen.map(|seen| seen.attempts).unwrap_or_default(),
                    latency_us: seen.and_then(|seen| seen.latency_us),
                    checks: known.as_ref().and_then(|known| known.record.clone()),
                    check_not_made: known.and_then(|known| known.not_made).map(|not_made| {
                        CheckNotMade {
                            seconds: not_made.since.elapsed().as_secs(),
                            reason: not_made.reason,
                        }
                    }),
                    weight: seen.map(|seen| seen.weight),
                    active: seen.map_or(0, |seen| seen.active),
                    inactive: seen.map_or(0, |seen| seen.inactive),
                };
                let code = match health {
                    "down" | "suspicious" => Some(reason.code),
                    _ => {
                        let code = verdict::code(&status);
                        let fix =
                            code.and_then(|code| verdict::fix(code, service, server.address.ip()));
                        status.fix = fix.unwrap_or_default();
                        code
                    }
                };
                status.code = code.map_or("", Code::name).to_owned();
                status
            })
            .collect();
        let named: HashSet<_> = service.servers.iter().map(|s| s.address).collect();
        let of_others = seen.iter().filter(|(server, _)| !named.contains(server));
        let mut others: Vec<ServerStatus> = of_others
            .map(|(server, seen)| ServerStatus {
                server: *server,
                configured: None,
                admin: AdminState::Ready,
                health: "unchecked".to_owned(),
                since: None,
                code: String::new(),
                reason: String::new(),
                fix: String::new(),
                attempts: seen.attempts,
                latency_us: seen.latency_us,
                checks: None,
                check_not_made: None,
                weight: Some(seen.weight),
                active: seen.active,
                inactive: seen.inactive,
            })
            .collect();
        others.sort_by_key(|server| server.server);
        servers.append(&mut others);
        let sorry = service.sorry.as_ref().filter(|_| decision.sorry);
        ServiceStatus {
            name: service.name.clone(),
            service: service.id,
            proxied: service.proxy.is_some(),
            usable: self.usable(service),
            quorum: decision.quorum,
            panic: decision.panic,
            sorry: sorry.map(|sorry| sorry.address),
            sorry_server: service.sorry.as_ref().map(|sorry| sorry.address),
            withdrawn: decision.withdrawn,
            conflict: found.conflicts.contains(&service.id),
            unheard: service.unheard,
            refusals: info.map_or_else(Vec::new, |info| info.refusals.clone()),
            drops: info.map_or_else(Vec::new, |info| info.drops.clone()),
            servers,
        }
    }
}

/// The silent next hops, without those of servers or interfaces that are down.
fn silent_hops(info: &Info, services: &[ServiceStatus]) -> Vec<SilentHop> {
    let is_reported = |hop: &&SilentHop| {
        let mut servers = services.iter().flat_map(|service| &service.servers);
        let mut interfaces = info.interfaces.iter();
        servers.any(|server| server.health == "down" && server.server.ip() == hop.address)
            || interfaces.any(|interface| !interface.up && interface.name == hop.interface)
    };
    let hops = info.silent_hops.iter();
    hops.filter(|hop| !is_reported(hop)).cloned().collect()
}

/// The peers of the running dataplane, and the peers that are only in the configuration file. The
/// latter were added after the dataplane had started, and it does not replicate with them.
fn peers(info: &Info, wanted: Option<&Peers>) -> Vec<PeerStanding> {
    let mut all = info.peers.clone();
    all.extend(lacking_peers(info, wanted).map(|peer| PeerStanding {
        peer,
        state: PeerStanding::ABSENT.to_owned(),
        seconds: info.uptime,
        missing: 0,
        trouble: "the dataplane was started without this peer".to_owned(),
    }));
    all
}

/// The peers in the configuration file that the running dataplane does not have.
pub(super) fn lacking_peers<'a>(
    info: &'a Info,
    wanted: Option<&'a Peers>,
) -> impl Iterator<Item = SocketAddr> + 'a {
    let wanted = wanted.filter(|_| info.pid != 0);
    let wanted = wanted.map_or(&[][..], |peers| &peers.addresses);
    // A peer without a port in the file has port 0 here, and the default port in the dataplane.
    let is_missing = move |peer: &SocketAddr| {
        let peer = directors::with_port(*peer);
        let mut known = info.peers.iter().map(|known| known.peer);
        known.all(|known| (known.ip(), known.port()) != (peer.ip(), peer.port()))
    };
    wanted.iter().copied().filter(is_missing)
}

/// The reasons why packets were dropped in the last five minutes; most packets first.
fn recent_drops(reasons: &[ReasonCount]) -> Vec<ReasonCount> {
    let is_recent = |reason: &&ReasonCount| reason.action == "drop" && reason.packets.recent > 0;
    let mut drops: Vec<ReasonCount> = reasons.iter().filter(is_recent).cloned().collect();
    drops.sort_by_key(|reason| std::cmp::Reverse(reason.packets.recent));
    drops
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn by_service(
    servers: &HashMap<(ServiceId, SocketAddr), ObservedServer>,
) -> HashMap<ServiceId, Vec<(SocketAddr, ObservedServer)>> {
    let mut all: HashMap<_, Vec<_>> = HashMap::new();
    for ((service, server), seen) in servers {
        all.entry(*service).or_default().push((*server, *seen));
    }
    all
}

#[cfg(test)]
mod tests {
    use lvs_api::guidance;
    use lvs_core::recent::RecentCount;

    use super::*;

    #[test]
    fn peer_unknown_to_running_dataplane_is_alarming_and_requires_restart() {
        let [first, second] = [2, 3].map(|n| SocketAddr::from(([192, 0, 2, n], 8848)));
        let wanted = Peers {
            addresses: vec![first, second],
            options: Vec::new(),
            key_file: String::new(),
        };
        let known = PeerStanding {
            peer: first,
            state: "in step".to_owned(),
            seconds: 0,
            missing: 0,
            trouble: String::new(),
        };
        let mut info = Info {
            pid: 7,
            uptime: 60,
            peers: vec![known.clone()],
            ..Info::default()
        };
        let all = peers(&info, Some(&wanted));
        assert_eq!(all[0], known);
        assert_eq!((all.len(), all[1].peer), (2, second));
        assert!(all[1].is_alarming());
        let fix = guidance::for_peer(&all[1]);
        assert!(fix.contains("restart the dataplane"), "{fix}");
        assert_eq!(peers(&info, None), [known]);
        // The file has no port.
        let wanted = Peers {
            addresses: vec![SocketAddr::new(first.ip(), 0)],
            ..wanted
        };
        assert_eq!(peers(&info, Some(&wanted)), info.peers);
        // No dataplane has answered yet.
        info = Info::default();
        assert_eq!(peers(&info, Some(&wanted)), []);
    }

    #[test]
    fn recent_drops_are_listed_by_number_of_packets_and_old_drops_are_omitted() {
        let reason = |name: &str, action: &str, recent| ReasonCount {
            action: action.to_owned(),
            reason: name.to_owned(),
            packets: RecentCount {
                count: 9,
                recent,
                ..RecentCount::default()
            },
            help: String::new(),
            fix: String::new(),
        };
        let drops = recent_drops(&[
            reason("old", "drop", 0),
            reason("few", "drop", 1),
            reason("host", "host", 5),
            reason("many", "drop", 3),
        ]);
        let names: Vec<_> = drops.iter().map(|one| one.reason.as_str()).collect();
        assert_eq!(names, ["many", "few"]);
    }

    #[test]
    fn observed_servers_are_grouped_by_service() {
        let service = |n: u8| ServiceId::Tcp {
            address: ([192, 0, 2, n], 80).into(),
        };
        let server = |n: u8| SocketAddr::from(([10, 0, 0, n], 80));
        let seen = |weight| ObservedServer {
            weight,
            active: 0,
            inactive: 0,
            unanswered: None,
            attempts: Default::default(),
            latency_us: None,
        };
        let servers = [(1, 1, 5), (2, 1, 6), (2, 2, 7)]
            .map(|(of, n, weight)| ((service(of), server(n)), seen(weight)));
        let mut all = by_service(&servers.into());
        assert_eq!(all.remove(&service(1)), Some(vec![(server(1), seen(5))]));
        let mut second = all.remove(&service(2)).unwrap();
        second.sort_by_key(|(server, _)| *server);
        assert_eq!(second, [(server(1), seen(6)), (server(2), seen(7))]);
        assert!(all.is_empty());
    }
}

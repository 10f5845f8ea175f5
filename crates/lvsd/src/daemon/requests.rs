//! What people ask over the control socket, and what they are told.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use lvs_api::daemon::{
    AdminDone, AdminEntry, AdminSpec, AdminState, CheckNotMade, DirectorStatus, EngineStatus,
    MaintenanceSpec, ProxyStatus, Reloaded, ServerStatus, ServiceStatus, SourceStatus, Status,
};
use lvs_core::api::{ServiceId, SyncCounts};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Daemon;
use crate::admin::Kept;
use crate::clock::Now;
use crate::cluster::{self, Ability};
use crate::config::{BelowQuorum, Service, VipMode};
use crate::decide::{self, Decision, ServerView};
use crate::engine::{Found, Seen};
use crate::events::About;
use crate::health::{Prober, Serving};
use crate::reconcile::Health;
use crate::requests::{ChangeRequest, Request, answer};
use crate::snapshot::Snapshot;
use crate::words::counted;

/// The next request; none ever without a socket.
pub(super) async fn next(requests: &mut Option<mpsc::Receiver<Request>>) -> Option<Request> {
    match requests {
        Some(requests) => requests.recv().await,
        None => std::future::pending().await,
    }
}

impl<P: Prober> Daemon<P> {
    pub(super) fn take_request(&mut self, request: Request) {
        let (change, who, reply) = match request {
            Request::Change { change, who, reply } => (change, who, reply),
            Request::Snapshot(reply) => {
                // Whoever asked may have gone.
                let _ = reply.send(Snapshot {
                    status: self.status_of_all(),
                    found: Arc::clone(&self.found.0),
                });
                return;
            }
        };
        let result = match change {
            ChangeRequest::Admin(spec) => match self.set_admin(spec, who) {
                Ok((mut done, kept)) => {
                    // It holds at once, and is answered when it is on disk.
                    tokio::spawn(async move {
                        if let Some(why) = warn(kept).await {
                            done.warnings.insert(0, why);
                        }
                        let _ = reply.send(answer(&done));
                    });
                    return;
                }
                Err(why) => Err(why),
            },
            ChangeRequest::Maintenance(spec) => match self.set_maintenance(spec, who) {
                Ok(status) => answer(&status),
                Err(why) => Err(why),
            },
            ChangeRequest::Reload { force } => {
                self.reloads.push(reply);
                self.reload(force);
                return;
            }
        };
        // Whoever asked may have gone.
        let _ = reply.send(result);
    }

    /// Takes what keepalived and the engine say.
    pub(super) fn take_cluster(&mut self) {
        let before = self.goal.desired.vips.is_empty();
        for (event, words) in self.cluster.take() {
            tracing::warn!(event, "{words}");
            self.events.tell(event, About::default(), words);
            self.goal_changed();
        }
        // It may have become ready, or have gone.
        if before == self.cluster.may_own() {
            self.goal_changed();
        }
    }

    fn set_maintenance(
        &mut self,
        mut spec: MaintenanceSpec,
        who: String,
    ) -> Result<DirectorStatus, String> {
        let who = spec.who.get_or_insert(who).clone();
        let why = spec.why.as_ref().map(|why| format!(": {why}"));
        let on = spec.on;
        if self.cluster.wish(spec, Now::read())? {
            let words = match on {
                true => format!(
                    "this director is in maintenance by {who}{}",
                    why.unwrap_or_default()
                ),
                false => format!("this director may be active again, says {who}"),
            };
            tracing::warn!(event = "maintenance", "{words}");
            self.events.tell("maintenance", About::default(), words);
        }
        Ok(self.cluster.status())
    }

    /// Tells those who wait that the reload is done, and what came of it.
    pub(super) fn answer_reloads(&mut self) {
        for reply in std::mem::take(&mut self.reloads) {
            let message = self.load_status.message.clone();
            let warnings = self.load_warnings.clone();
            let _ = reply.send(match self.load_status.ok {
                true => answer(&Reloaded { message, warnings }),
                false => Err(message),
            });
        }
    }

    fn set_admin(&mut self, mut spec: AdminSpec, who: String) -> Result<(AdminDone, Kept), String> {
        let (target, state) = (spec.target, spec.state);
        let mut servers: Vec<(ServiceId, SocketAddr)> = Vec::new();
        for service in &self.expanded.services {
            let all = service.servers.iter().map(|server| server.address);
            let matching = all.filter(|server| target.has(service.id, *server));
            servers.extend(matching.map(|server| (service.id, server)));
        }
        if servers.is_empty() && state != AdminState::Ready {
            return Err(format!(
                "{} has no server {target}; `lvsd status` lists them",
                self.config.path
            ));
        }
        spec.who = spec.who.or(Some(who));
        let why = spec.why.clone();
        let who = spec.who.clone().unwrap_or_default();
        self.admin.set(spec, Now::read())?;
        let kept = self.admin.keep();
        let mut warnings: Vec<String> = Vec::new();
        if state == AdminState::Ready {
            // A wish for more than this may still be there.
            let others: HashSet<String> = servers
                .iter()
                .filter_map(|(service, server)| self.admin.of(*service, *server))
                .map(|entry| {
                    let state = entry.spec.state.name();
                    format!(
                        "{state} still holds for {}: {}",
                        entry.spec.target,
                        said(entry)
                    )
                })
                .collect();
            warnings.extend(others);
            servers.retain(|(service, server)| self.admin.of(*service, *server).is_none());
            self.readied.extend(servers.iter().copied());
        }
        let reason = why.map(|why| format!(": {why}")).unwrap_or_default();
        let words = match state {
            AdminState::Ready => format!("{target} may have connections again, says {who}"),
            AdminState::Drain => format!("{target} is drained by {who}{reason}"),
            AdminState::Maintenance => format!("{target} is in maintenance by {who}{reason}"),
        };
        tracing::warn!(event = "admin", "{words}");
        for warning in &warnings {
            tracing::warn!("{warning}");
        }
        let about = match servers.as_slice() {
            [(service, server)] => About {
                service: self.name(service).map(|name| (name, *service)),
                server: Some(*server),
            },
            _ => About::default(),
        };
        let mut events = self.events.clone();
        events.tell("admin", about, words);
        self.events = events;
        self.goal_changed();
        Ok((AdminDone { servers, warnings }, kept))
    }

    fn name(&self, id: &ServiceId) -> Option<&str> {
        let service = self
            .expanded
            .services
            .iter()
            .find(|service| service.id == *id);
        service.map(|service| service.name.as_str())
    }

    /// Forgets the wishes whose time is over.
    pub(super) fn expire(&mut self) {
        let over = self.admin.expire(Now::read());
        if over.is_empty() {
            return;
        }
        for entry in &over {
            let words = format!(
                "the {} of {} is over ({})",
                entry.spec.state.name(),
                entry.spec.target,
                said(entry)
            );
            tracing::warn!(event = "admin", "{words}");
            self.events.tell("admin", About::default(), words);
        }
        tokio::spawn(warn(self.admin.keep()));
        self.goal_changed();
    }

    /// Takes what was found in the engine.
    pub(super) fn take_found(&mut self, found: &Arc<Found>, now: Instant) {
        if !Arc::ptr_eq(&self.found.0, found) || self.found.1.is_none() {
            self.take_seen(found);
        }
        if found.unnamed != self.found.0.unnamed && found.unnamed > 0 {
            tracing::warn!(
                event = "unnamed",
                "{} of the engine not in the file: left as they are until it is known what etcd has",
                counted(found.unnamed, "service")
            );
        }
        let before = self.unheard();
        let drained = found.drained != self.found.0.drained;
        self.found = (Arc::clone(found), Some(now));
        // A server that is drained by hand does not count for the quorum.
        if drained || self.unheard() != before {
            self.goal_changed();
        }
    }

    /// The services with sources of which nothing is known, and what that means for them as far as
    /// the engine is known.
    fn unheard(&self) -> Vec<(ServiceId, bool, bool)> {
        let services = self.expanded.services.iter();
        let unheard = services.filter(|service| service.unheard);
        unheard
            .map(|one| (one.id, self.serves_unheard(one), self.is_veiled(one)))
            .collect()
    }

    /// Has the checks know what the engine sees of the servers.
    fn take_seen(&mut self, found: &Found) {
        let serving = found.servers.iter().filter(|(_, seen)| seen.weight > 0);
        let serving = serving.map(|((_, server), _)| *server).collect();
        self.checks.take_serving(Serving {
            servers: serving,
            vips: (!self.config.dataplane.own_vips).then(|| found.vips.clone()),
        });
        let unanswered = found.servers.iter();
        let unanswered = unanswered.filter_map(|(key, seen)| Some((*key, seen.unanswered?)));
        self.checks.take_unanswered(unanswered);
    }

    /// Takes whether the engine answers.
    pub(super) fn take_contact(&mut self, contact: (Option<u32>, bool)) {
        if self.contact.1 != contact.1 {
            let pid = contact
                .0
                .map(|pid| format!(" (pid {pid})"))
                .unwrap_or_default();
            let (event, words) = match contact.1 {
                true => ("engine_found", format!("the engine{pid} answers")),
                false => ("engine_lost", "the engine is lost".to_owned()),
            };
            self.events.tell(event, About::default(), words);
        }
        self.contact = contact;
    }

    /// Decides about all services, and tells what is new.
    pub(super) fn decide(&mut self) {
        let mut news = Vec::new();
        for service in &self.expanded.services {
            let views = self.views(service);
            let before = self.decisions.get(&service.id).copied();
            let settled = self.is_known(service) || self.begins_down(service);
            let Some(now) = decide::decide(service, &views, settled, before) else {
                continue;
            };
            let before = before.unwrap_or_default();
            if now != before {
                let usable = decide::usable(&views);
                news.push((service.id, service.name.clone(), before, now, usable));
            }
            self.decisions.insert(service.id, now);
        }
        let mut all = self.decisions.values();
        let quorum = all.all(|decision| decision.quorum);
        self.cluster.take_quorum(quorum);
        self.announce();
        for (id, name, before, now, usable) in news {
            self.tell_decision(id, &name, before, now, usable);
        }
    }

    /// Says what routers are to be told of addresses that are announced.
    fn announce(&mut self) {
        let mut abilities: BTreeMap<IpAddr, Vec<Ability>> = BTreeMap::new();
        for service in &self.expanded.services {
            let Some(ip) = service.virtual_ip() else {
                continue;
            };
            if service.vip != VipMode::Announce {
                continue;
            }
            let settled = self.is_settled(service) || self.begins_down(service);
            let decision = self.decisions.get(&service.id);
            let ability = match decision.copied().unwrap_or_default() {
                _ if !settled && self.is_veiled(service) => Ability::Unknown,
                decision if decision.quorum => Ability::Quorum,
                decision if decision.sorry => Ability::Sorry,
                _ => Ability::None,
            };
            abilities.entry(ip).or_default().push(ability);
        }
        let addresses = abilities.into_iter();
        let addresses = addresses.map(|(ip, services)| (ip, cluster::standing(&services)));
        self.cluster
            .announce(addresses.collect(), self.config.announce);
    }

    /// Nothing is known of it, and that is as good as down.
    fn begins_down(&self, service: &Service) -> bool {
        service.alpha && self.generation == 1
    }

    /// Tells that a service ends with the daemon.
    pub(super) fn tell_end(&mut self, service: &Service) {
        let before = self.decisions.get(&service.id).copied();
        let before = before.unwrap_or_default();
        let words = "the service ends with lvsd (remove_on_exit)";
        tracing::warn!(event = "quorum_lost", service = %service.name, "{words}");
        let about = About {
            service: Some((&service.name, service.id)),
            server: None,
        };
        if before.quorum {
            self.events.tell("quorum_lost", about, words);
        }
        if !before.withdrawn && service.below_quorum == BelowQuorum::GiveUp {
            self.events.tell("vip_withdrawn", about, words);
        }
    }

    fn tell_decision(
        &mut self,
        id: ServiceId,
        name: &str,
        before: Decision,
        now: Decision,
        usable: usize,
    ) {
        let servers = counted(usable, "usable server");
        let mut tell = |event: &str, words: String| {
            tracing::warn!(event, service = %name, "{words}");
            let about = About {
                service: Some((name, id)),
                server: None,
            };
            self.events.tell(event, about, words);
        };
        match (before.quorum, now.quorum) {
            (true, false) => tell(
                "quorum_lost",
                format!("{servers}: the service is below its quorum"),
            ),
            (false, true) => tell(
                "quorum_gained",
                format!("{servers}: the service has its quorum"),
            ),
            _ => {}
        }
        match (before.panic, now.panic) {
            (false, true) => tell(
                "panic_on",
                format!("{servers}, less than `panic_below`: all servers are used"),
            ),
            (true, false) => tell(
                "panic_off",
                format!("{servers}: those that are down get no connections again"),
            ),
            _ => {}
        }
        match (before.sorry, now.sorry) {
            (false, true) => tell("sorry_on", "the sorry server serves".to_owned()),
            (true, false) => tell("sorry_off", "the sorry server serves no longer".to_owned()),
            _ => {}
        }
        match (before.withdrawn, now.withdrawn) {
            (false, true) => tell("vip_withdrawn", "the VIP is given up".to_owned()),
            (true, false) => tell("vip_owned", "the VIP is owned again".to_owned()),
            _ => {}
        }
    }

    fn views(&self, service: &Service) -> Vec<ServerView> {
        let by_hand = &self.found.0.drained;
        let view = |server: &crate::config::Server| {
            let key = (service.id, server.address);
            ServerView {
                health: self.health(&key),
                wanted: self.checks.advice(&key).apply(server.config.weight) != 0
                    && self.admin.state(key.0, key.1) == AdminState::Ready
                    && (!by_hand.contains(&key) || self.readied.contains(&key)),
            }
        };
        service.servers.iter().map(view).collect()
    }

    fn status_of_all(&self) -> Status {
        let (found, seen) = &self.found;
        let by_service = by_service(&found.servers);
        let seen_of =
            |service: &Service| by_service.get(&service.id).map_or(&[][..], Vec::as_slice);
        Status {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config: std::path::absolute(&self.options.path)
                .unwrap_or_else(|_| self.options.path.clone())
                .display()
                .to_string(),
            uptime: self.started.elapsed().as_secs(),
            loaded: self.load_status.clone(),
            engine: EngineStatus {
                connected: self.contact.1,
                idle: !self.expanded.needs_engine(),
                pid: self.contact.0,
                seen_ms: seen.map(|at| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX)),
                vips: found.vips.iter().copied().collect(),
                sync: self.sync_counts(),
                peers: found.seen.info.peers.clone(),
                tables: found.seen.info.tables.clone(),
                waiting: found.seen.info.waiting.clone(),
                confinement: Some(&found.seen.info)
                    .filter(|info| info.pid != 0)
                    .map(|info| info.confinement.clone()),
            },
            services: self
                .expanded
                .services
                .iter()
                .map(|service| self.status_of(service, seen_of(service)))
                .collect(),
            admin: self.admin.shown(Now::read()),
            drift: found.drift.clone(),
            refused: found.refused.clone(),
            check_lag_ms: u64::try_from(self.checks.peek_lag().as_millis()).unwrap_or(u64::MAX),
            proxy: self.proxy.map(|counts| ProxyStatus {
                connections: counts.connections as u64,
                most: counts.most as u64,
                full: counts.full,
                evicted: counts.evicted,
                refused: counts.refused,
            }),
            confinement: self.options.confinement.clone(),
            director: self.cluster.status(),
            sources: self.sources_status(),
            left_out: self
                .expanded
                .left_out
                .iter()
                .chain(&self.held_back)
                .cloned()
                .chain(self.sources.left_out())
                .collect(),
            directors: self.directors(),
        }
    }

    /// How sources are, and what waits for them.
    fn sources_status(&self) -> Vec<SourceStatus> {
        let mut all = self.sources.status();
        for source in all.iter_mut().filter(|source| source.kind == "etcd") {
            source.held = self.found.0.unnamed;
        }
        all
    }

    /// What synchronisation daemons have counted, where there are some or have been.
    fn sync_counts(&self) -> Option<SyncCounts> {
        let counts = self.found.0.seen.info.sync;
        let wanted = self
            .config
            .sync
            .as_ref()
            .is_some_and(|sync| !sync.is_empty());
        (wanted || counts != SyncCounts::default()).then_some(counts)
    }

    /// A service with its servers, and those of the engine that are not in the file: `seen` are the
    /// engine's.
    fn status_of(&self, service: &Service, seen: &[(SocketAddr, Seen)]) -> ServiceStatus {
        let found = &self.found.0;
        let decision = self.decisions.get(&service.id).copied().unwrap_or_default();
        let mut servers: Vec<ServerStatus> = service
            .servers
            .iter()
            .map(|server| {
                let key = (service.id, server.address);
                let seen = found.servers.get(&key);
                let known = self.checks.known(&key);
                let admin = match self.admin.state(key.0, key.1) {
                    AdminState::Ready if found.drained.contains(&key) => AdminState::Drain,
                    state => state,
                };
                let health = match known.as_ref().map(|known| known.up) {
                    None => "unchecked",
                    Some(None) => "unknown",
                    Some(Some(true)) => "up",
                    Some(Some(false)) => "down",
                };
                let reason = known
                    .as_ref()
                    .map(|known| known.reason.clone())
                    .unwrap_or_default();
                ServerStatus {
                    server: server.address,
                    configured: Some(server.config.weight),
                    admin,
                    health: health.to_owned(),
                    since: known.as_ref().map(|known| known.lasted.as_secs()),
                    reason,
                    check_not_made: known.and_then(|known| known.not_made).map(|not_made| {
                        CheckNotMade {
                            seconds: not_made.since.elapsed().as_secs(),
                            reason: not_made.reason,
                        }
                    }),
                    weight: seen.map(|seen| seen.weight),
                    active: seen.map_or(0, |seen| seen.active),
                    inactive: seen.map_or(0, |seen| seen.inactive),
                }
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
                reason: String::new(),
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
            usable: decide::usable(&self.views(service)),
            quorum: decision.quorum,
            panic: decision.panic,
            sorry: sorry.map(|sorry| sorry.address),
            sorry_server: service.sorry.as_ref().map(|sorry| sorry.address),
            withdrawn: decision.withdrawn,
            conflict: found.conflicts.contains(&service.id),
            unheard: service.unheard,
            servers,
        }
    }

    /// How many servers are not to have connections, by people.
    pub(super) fn out_of_service(&self) -> usize {
        let mut out = self.found.0.drained.len();
        if self.admin.entries().next().is_some() {
            for service in &self.expanded.services {
                let state =
                    |server: &crate::config::Server| self.admin.state(service.id, server.address);
                out += service
                    .servers
                    .iter()
                    .filter(|s| state(s) != AdminState::Ready)
                    .count();
            }
        }
        out
    }

    /// The health of a server, for a decision.
    pub(super) fn is_up(&self, service: &Service, server: &crate::config::Server) -> bool {
        self.health(&(service.id, server.address)) == Health::Up
    }
}

/// Waits until wishes are on disk; where that is not so, it is said, and why.
async fn warn(kept: Kept) -> Option<String> {
    let why = kept.done().await.err()?;
    tracing::warn!("{why}");
    Some(why)
}

/// The servers of each service.
fn by_service(
    servers: &HashMap<(ServiceId, SocketAddr), Seen>,
) -> HashMap<ServiceId, Vec<(SocketAddr, Seen)>> {
    let mut all: HashMap<_, Vec<_>> = HashMap::new();
    for ((service, server), seen) in servers {
        all.entry(*service).or_default().push((*server, *seen));
    }
    all
}

/// Who has said so, and why.
fn said(entry: &AdminEntry) -> String {
    let who = entry.spec.who.clone().unwrap_or_default();
    match &entry.spec.why {
        Some(why) => format!("{who}: {why}"),
        None => who,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_found_by_their_service() {
        let service = |n: u8| ServiceId::Tcp {
            address: ([192, 0, 2, n], 80).into(),
        };
        let server = |n: u8| SocketAddr::from(([10, 0, 0, n], 80));
        let seen = |weight| Seen {
            weight,
            active: 0,
            inactive: 0,
            unanswered: None,
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

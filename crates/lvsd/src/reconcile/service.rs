//! Compares the desired and the actual state of one service and its servers.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use lvs_api::guidance::OWNER;
use lvs_core::api::{Call, ServerInfo, ServerSpec, ServiceId, ServiceInfo, ServiceSpec};
use lvs_core::sched::About;
use lvs_core::{Forwarding, ServerConfig, ServiceConfig, ServiceFlags};

use super::{DesiredServer, DesiredService, Health, Plan};
use crate::config::OnCheckFailure;

/// Collects the changes of one service.
pub(super) struct OneService<'a> {
    desired: &'a DesiredService,
    overdue: &'a HashSet<(ServiceId, SocketAddr)>,
    plan: &'a mut Plan,
    /// Weight changes, and changes of failed servers, of all services. They precede all other
    /// changes.
    urgent: &'a mut Vec<Call>,
    /// Removals of failed servers, or their change to weight 0. They follow the service's other
    /// urgent changes.
    failed: Vec<Call>,
    /// Changes that stop new connections to working servers. They follow the additions of servers.
    emptied: Vec<Call>,
}

impl<'a> OneService<'a> {
    pub(super) fn new(
        desired: &'a DesiredService,
        overdue: &'a HashSet<(ServiceId, SocketAddr)>,
        plan: &'a mut Plan,
        urgent: &'a mut Vec<Call>,
    ) -> Self {
        Self {
            desired,
            overdue,
            plan,
            urgent,
            failed: Vec::new(),
            emptied: Vec::new(),
        }
    }

    pub(super) fn run(&mut self, there: Option<&ServiceInfo>) {
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
                // After a restart below the quorum, one server that is up does not suffice.
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

    /// Sorts the servers as in the file if the scheduler depends on their order. Otherwise the
    /// order would follow the times at which checks succeed, which differ between directors.
    /// `before` is the number of changes for other services.
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
        // The server was removed with its connections; it is added again for its through-VIP
        // checks.
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

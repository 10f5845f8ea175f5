//! What others have changed in our services, by hand: it is told, and put right or left, as the file
//! wants it.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;

use lvs_core::api::{Call, ServiceId};
use lvs_core::{ServerConfig, ServiceConfig};
use lvs_dataplane::control::daemon::ServiceKey;

use super::describe::Names;
use crate::config::OnDrift;
use crate::engine::control::OWNER;
use crate::reconcile::{Actual, Desired, DesiredServer, Health, same_server, same_service};

/// Our services as we left them in an engine.
#[derive(Clone, Debug, Default)]
pub(super) struct Base(HashMap<ServiceId, Left>);

#[derive(Clone, Debug)]
struct Left {
    config: ServiceConfig,
    servers: HashMap<SocketAddr, ServerConfig>,
}

impl Base {
    /// What an engine shows of ours.
    pub(super) fn of(actual: &Actual) -> Self {
        let ours = actual.services.iter();
        let ours = ours.filter(|service| service.owner.as_deref() == Some(OWNER));
        Self(
            ours.map(|service| {
                let servers = service.servers.iter();
                let left = Left {
                    config: service.config.clone(),
                    servers: servers.map(|s| (s.server, s.config)).collect(),
                };
                (service.service, left)
            })
            .collect(),
        )
    }

    /// Takes note of a change that we have made.
    pub(super) fn note(&mut self, change: &Call) {
        match change {
            Call::ServiceAdd(spec) | Call::ServiceEdit(spec) => {
                let new = || Left {
                    config: spec.config.clone(),
                    servers: HashMap::new(),
                };
                let left = self.0.entry(spec.service).or_insert_with(new);
                left.config = spec.config.clone();
            }
            Call::ServiceDelete { service } => {
                self.0.remove(service);
            }
            Call::ServerAdd(spec) | Call::ServerEdit(spec) => {
                if let Some(left) = self.0.get_mut(&spec.service) {
                    left.servers.insert(spec.server, spec.config);
                }
            }
            Call::ServerDelete { service, server } => {
                if let Some(left) = self.0.get_mut(service) {
                    left.servers.remove(server);
                }
            }
            _ => {}
        }
    }
}

/// What was done by hand.
#[derive(Clone, Debug, PartialEq)]
enum Deed {
    Service(ServiceConfig),
    ServiceGone,
    Server(ServerConfig),
    ServerAdded(ServerConfig),
    ServerGone,
}

/// What was done to: a service, or one of its servers.
type Place = (ServiceKey, Option<SocketAddr>);

/// What others have done since we last looked, and what of it is left as it is.
#[derive(Debug, Default)]
pub(super) struct Drift {
    base: Option<Base>,
    left: BTreeMap<Place, Deed>,
    /// The file that all this was found under.
    file: u64,
}

impl Drift {
    /// Another engine: nothing is known of it.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// What an engine shows, and changes that are made from then on.
    pub(super) fn base(&mut self, base: Base) {
        self.base = Some(base);
    }

    /// Looks for what others have done; says it in words, each once. Where the file has it left
    /// alone, it becomes what is desired.
    pub(super) fn respect(
        &mut self,
        desired: &mut Desired,
        actual: &Actual,
        by_hand: impl Fn(ServiceId, SocketAddr) -> bool,
    ) -> Vec<String> {
        // Another file says anew what there should be.
        if self.file != desired.generation {
            self.file = desired.generation;
            self.left.clear();
        }
        let deeds = self.deeds(actual, by_hand);
        let names = Names::new(desired);
        let words: Vec<String> = deeds
            .iter()
            .map(|((service, server), deed)| tell(&names, &service.0, *server, deed))
            .collect();
        if desired.on_drift == OnDrift::Repair {
            return words
                .into_iter()
                .map(|words| format!("{words} by hand; it is put right"))
                .collect();
        }
        drop(names);
        for (place, deed) in deeds {
            self.left.insert(place, deed);
        }
        self.leave(desired);
        words
            .into_iter()
            .map(|words| {
                format!(
                    "{words} by hand; it is left so until the file is loaded again (`lvsd reload`)"
                )
            })
            .collect()
    }

    /// What is left as others have made it, in words.
    pub(super) fn in_words(&self, desired: &Desired) -> Vec<String> {
        let names = Names::new(desired);
        let left = self.left.iter();
        left.map(|((service, server), deed)| tell(&names, &service.0, *server, deed))
            .collect()
    }

    fn deeds(
        &self,
        actual: &Actual,
        by_hand: impl Fn(ServiceId, SocketAddr) -> bool,
    ) -> Vec<(Place, Deed)> {
        let Some(Base(base)) = &self.base else {
            return Vec::new();
        };
        let mut deeds = Vec::new();
        let mut seen = 0;
        for service in &actual.services {
            let id = service.service;
            let Some(left) = base.get(&id) else {
                continue;
            };
            seen += 1;
            let place = |server| (ServiceKey(id), server);
            if !same_service(&service.config, &left.config) {
                deeds.push((place(None), Deed::Service(service.config.clone())));
            }
            let mut there = 0;
            for server in &service.servers {
                let at = Some(server.server);
                match left.servers.get(&server.server) {
                    None => deeds.push((place(at), Deed::ServerAdded(server.config))),
                    Some(config) => {
                        there += 1;
                        if !same_server(&server.config, config) && !by_hand(id, server.server) {
                            deeds.push((place(at), Deed::Server(server.config)));
                        }
                    }
                }
            }
            if there < left.servers.len() {
                for server in left.servers.keys() {
                    if !service.servers.iter().any(|s| s.server == *server) {
                        deeds.push((place(Some(*server)), Deed::ServerGone));
                    }
                }
            }
        }
        if seen < base.len() {
            for id in base.keys() {
                if !actual.services.iter().any(|s| s.service == *id) {
                    deeds.push(((ServiceKey(*id), None), Deed::ServiceGone));
                }
            }
        }
        deeds.sort_by_key(|(place, _)| *place);
        deeds
    }

    /// Has what is left be what is desired.
    fn leave(&self, desired: &mut Desired) {
        if self.left.is_empty() {
            return;
        }
        for ((ServiceKey(id), server), deed) in &self.left {
            let services = &mut desired.services;
            if *deed == Deed::ServiceGone {
                services.retain(|service| service.id != *id);
                continue;
            }
            let Some(service) = services.iter_mut().find(|service| service.id == *id) else {
                continue;
            };
            match (server, deed) {
                (None, Deed::Service(config)) => service.config = config.clone(),
                (Some(server), Deed::Server(config)) => {
                    let mut servers = service.servers.iter_mut();
                    if let Some(server) = servers.find(|s| s.address == *server) {
                        server.config = *config;
                    }
                }
                (Some(server), Deed::ServerGone) => {
                    service.servers.retain(|s| s.address != *server);
                }
                (Some(server), Deed::ServerAdded(config))
                    if !service.servers.iter().any(|s| s.address == *server) =>
                {
                    service.servers.push(DesiredServer {
                        address: *server,
                        line: service.line,
                        config: *config,
                        health: Health::Up,
                        stays: false,
                        leaves: false,
                    });
                }
                _ => {}
            }
        }
    }
}

fn tell(names: &Names<'_>, service: &ServiceId, server: Option<SocketAddr>, deed: &Deed) -> String {
    let service = names.service_in_words(service);
    let server = server.map(|server| server.to_string()).unwrap_or_default();
    match deed {
        Deed::Service(_) => format!("{service} was changed"),
        Deed::ServiceGone => format!("{service} was deleted"),
        Deed::Server(config) => {
            format!(
                "server {server} of {service} was changed (weight {})",
                config.weight
            )
        }
        Deed::ServerAdded(_) => format!("server {server} was added to {service}"),
        Deed::ServerGone => format!("server {server} of {service} was deleted"),
    }
}

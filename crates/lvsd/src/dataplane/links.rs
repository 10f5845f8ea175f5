//! Connections to the dataplane and to the proxy of this process, which lvsd configures like a
//! dataplane.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use lvs_core::api::{Call, Done, ServiceId, ServiceInfo};
use lvs_core::filter::FilterLists;
use tokio::time::Instant;

use super::control::{ControlError, DataplaneControl};
use super::{ConnectError, Found, Given, Goal, Host, Link, Step, Stopped};
use crate::config::Dataplane;
use crate::facts::Addresses;
use crate::reconcile::Desired;
use lvs_proxy::{self as proxy, Proxy};

/// The desired state of the proxy.
#[derive(Clone, Debug, Default)]
pub struct Proxied {
    /// The desired services of the proxy.
    pub desired: Desired,
    /// Proxy options of each service.
    pub options: HashMap<ServiceId, proxy::Options>,
    /// Number of file descriptors reserved for health checks.
    pub checks: usize,
}

impl Proxied {
    /// Moves the proxied services out of `desired`; `None` if there are none. Reserves `checks`
    /// file descriptors for health checks.
    pub fn part(
        desired: &mut Desired,
        options: HashMap<ServiceId, proxy::Options>,
        checks: usize,
    ) -> Option<Box<Self>> {
        if options.is_empty() {
            return None;
        }
        let services = std::mem::take(&mut desired.services);
        let (proxied, rest) = services
            .into_iter()
            .partition(|service| options.contains_key(&service.id));
        desired.services = rest;
        Some(Box::new(Self {
            desired: Desired {
                file: desired.file.clone(),
                services: proxied,
                filter: desired.filter.clone(),
                on_drift: desired.on_drift,
                generation: desired.generation,
                ..Desired::default()
            },
            options,
            checks,
        }))
    }
}

/// Connection to a dataplane, and to the proxy if a service is proxied.
#[derive(Debug)]
pub struct Links {
    pub(crate) dataplane: Link,
    proxy: Option<(Proxy, Link)>,
    /// Whether the latest desired state requires a dataplane.
    needed: bool,
}

impl Links {
    /// Creates links without a connection. With `attach`, they wait for a running dataplane, and
    /// start none.
    pub fn new(host: Box<dyn Host>, attach: bool, now: Instant) -> Self {
        Self {
            dataplane: Link::new(host, attach, now),
            proxy: None,
            needed: true,
        }
    }

    /// Makes one step towards `goal`; see [`Link::step`].
    pub fn step(&mut self, goal: &Goal, changed: bool, now: Instant) -> Step {
        let mut proxied = None;
        if goal.proxied.is_some() || self.proxy.is_some() {
            match self.step_proxy(goal, changed, now) {
                Step::InStep { found, again } => proxied = Some((found, again)),
                other => return other,
            }
        }
        self.needed = goal.needs_dataplane();
        // A dataplane that is no longer needed still has to release its services and addresses.
        if let (false, Some((found, again))) = (self.needed, &proxied)
            && !self.dataplane.is_there(changed, now)
        {
            return Step::InStep {
                found: Arc::clone(found),
                again: *again,
            };
        }
        match (self.dataplane.step(goal, changed, now), proxied) {
            (Step::InStep { found, again }, Some((proxied, _))) => Step::InStep {
                found: Arc::new(merged(&found, &proxied)),
                again,
            },
            (step, _) => step,
        }
    }

    fn step_proxy(&mut self, goal: &Goal, changed: bool, now: Instant) -> Step {
        if self.proxy.is_none() {
            let proxy = match Proxy::start() {
                Ok(proxy) => proxy,
                // A reload that adds the first proxied service does not end a running lvsd.
                Err(error) => {
                    let why = format!("cannot start the proxy: {error}");
                    return self.dataplane.give_up_or_wait(why, now);
                }
            };
            let mut link = Link::new(Box::new(ProxyHost(proxy.clone())), true, now);
            // New input interrupts both.
            link.news = self.dataplane.news();
            self.proxy = Some((proxy, link));
        }
        let Some((proxy, link)) = &mut self.proxy else {
            return Step::Interrupted;
        };
        // The file may no longer contain a proxied service.
        let nothing = Proxied::default();
        let proxied = goal.proxied.as_deref().unwrap_or(&nothing);
        proxy.set_options(proxied.options.clone());
        proxy.leave_room(proxied.options.len(), proxied.checks);
        let goal = Goal {
            desired: proxied.desired.clone(),
            readied: goal.readied.clone(),
            ..Goal::default()
        };
        link.step(&goal, changed, now)
    }

    /// Number of proxied connections, which end when this process exits.
    pub fn proxied_connections(&self) -> usize {
        self.proxy
            .as_ref()
            .map_or(0, |(proxy, _)| proxy.connections())
    }

    /// Counters of the proxy; `None` before the first proxied service.
    pub fn proxied(&self) -> Option<proxy::Counts> {
        self.proxy.as_ref().map(|(proxy, _)| proxy.counts())
    }

    /// Stops the dataplane, unless it is neither needed nor connected; see [`Link::stop`].
    pub fn stop(&mut self, now: Instant) -> Stopped {
        if !self.needed && !self.dataplane.contact().1 {
            return Stopped::Asked;
        }
        self.dataplane.stop(now)
    }
}

/// Joins the results of dataplane and proxy.
fn merged(one: &Found, other: &Found) -> Found {
    let lists = |a: &[String], b: &[String]| [a, b].concat();
    let sets = |a: &HashSet<ServiceId>, b: &HashSet<ServiceId>| a.union(b).copied().collect();
    let servers = |a: &HashSet<(ServiceId, SocketAddr)>, b: &HashSet<_>| {
        a.union(b).copied().collect::<HashSet<_>>()
    };
    let vips: BTreeSet<IpAddr> = one.vips.union(&other.vips).copied().collect();
    Found {
        refused: lists(&one.refused, &other.refused),
        conflicts: sets(&one.conflicts, &other.conflicts),
        drained: servers(&one.drained, &other.drained),
        drift: lists(&one.drift, &other.drift),
        unnamed: one.unnamed,
        vips,
        servers: one
            .servers
            .iter()
            .chain(&other.servers)
            .map(|(key, seen)| (*key, *seen))
            .collect(),
        seen: Arc::clone(&one.seen),
        proxied: Arc::clone(&other.seen),
    }
}

/// The proxy, which lvsd configures like a dataplane.
#[derive(Clone, Debug)]
struct ProxyHost(Proxy);

impl Host for ProxyHost {
    fn connect(&mut self, _: Duration) -> Result<Box<dyn DataplaneControl>, ConnectError> {
        Ok(Box::new(self.clone()))
    }

    fn is_proxy(&self) -> bool {
        true
    }

    fn start(&mut self, _: &Dataplane) -> Result<(), String> {
        Ok(())
    }

    fn ended(&mut self) -> Option<String> {
        None
    }

    fn kill(&mut self) {}

    fn end(&mut self, _: u32) -> Result<(), String> {
        Ok(())
    }

    fn alive(&mut self, _: u32) -> bool {
        true
    }

    fn started_by_us(&self, _: u32) -> bool {
        false
    }

    fn identity(&self, _: u32) -> String {
        "proxy".to_owned()
    }

    fn remember(&mut self, _: &Given) {}

    fn recall(&self) -> Given {
        Given::default()
    }

    fn addresses(&self) -> Addresses {
        Addresses::default()
    }
}

impl DataplaneControl for ProxyHost {
    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError> {
        Ok(self.0.services())
    }

    fn filters(&mut self) -> Result<HashMap<Option<ServiceId>, FilterLists>, ControlError> {
        Ok(self.0.filters())
    }

    fn apply(&mut self, changes: &[Call]) -> Result<Done, ControlError> {
        self.0
            .apply(changes)
            .map(|()| Done::default())
            .map_err(ControlError::Refused)
    }
}

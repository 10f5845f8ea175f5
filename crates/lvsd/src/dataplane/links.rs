//! Connections to the dataplane and to the proxy of this process.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use lvs_core::api::ServiceId;
use tokio::time::Instant;

use super::control::LastAnswer;
use super::proxy_host::ProxyHost;
use super::{Found, Goal, Host, Link, Step, Stopped};
use crate::host_addresses::Addresses;
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
    dataplane: Link,
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

    /// Reads the host's present addresses.
    pub fn addresses(&self) -> Addresses {
        self.dataplane.addresses()
    }

    /// The flag by which a caller ends a running step early, because new input has arrived.
    pub fn news(&self) -> Arc<AtomicBool> {
        self.dataplane.news()
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
                Err(error) => return Step::Fatal(format!("cannot start the proxy: {error}")),
            };
            let mut link = Link::new(Box::new(ProxyHost(proxy.clone())), true, now);
            link.share_news(self.dataplane.news());
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

    /// Returns the manual changes since the last call, as text.
    pub fn take_manual_changes(&mut self) -> Vec<String> {
        self.dataplane.take_manual_changes()
    }

    /// Time of the dataplane's last answer, which is also updated during a step.
    pub fn last_answer(&self) -> LastAnswer {
        self.dataplane.last_answer()
    }

    /// Process id of the dataplane, if known, and whether it answers.
    pub fn contact(&self) -> (Option<u32>, bool) {
        self.dataplane.contact()
    }

    /// The description of the dataplane for messages.
    pub fn dataplane(&self) -> String {
        self.dataplane.dataplane()
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

    /// Stops the dataplane; see [`Link::stop`].
    pub fn stop(&mut self, now: Instant) -> Stopped {
        if !self.needed && !self.dataplane.contact().1 {
            return Stopped::Asked;
        }
        self.dataplane.stop(now)
    }

    /// Whether the dataplane that this daemon started still runs.
    pub fn still_running(&mut self) -> bool {
        self.dataplane.still_running()
    }

    /// Kills a dataplane that lvsd started; see [`Link::end`].
    pub fn end(&mut self) -> Result<(), String> {
        self.dataplane.end()
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

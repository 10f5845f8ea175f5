//! The state of a dataplane that lvsd keeps between two comparisons.
//!
//! It contains the settings that lvsd has made, which are reverted when they are no longer in the
//! file, also by a later lvsd. It also contains the state of the dataplane after lvsd's last
//! changes. A difference from that state is a manual change, which lvsd reports, and reverts or
//! keeps as the file requires.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use lvs_api::daemon::ServiceKey;
use lvs_api::guidance::OWNER;
use lvs_core::api::{Call, ServiceId};
use lvs_core::filter::SourceFilter;
use lvs_core::{ServerConfig, ServiceConfig};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::describe::Names;
use crate::config::{OnDrift, is_generated};
use crate::health::Key;
use crate::reconcile::{
    Actual, Desired, DesiredServer, DesiredService, Health, same_server, same_service,
};

/// State of the dataplane that is kept between two comparisons.
#[derive(Default)]
pub(super) struct Memory {
    /// The state after lvsd's last changes; `None` before the first comparison.
    pub(super) base: Option<Base>,
    pub(super) drift: Drift,
    /// Manual changes that have not been reported yet, as text.
    pub(super) manual_changes: Vec<String>,
    /// Removed servers with connections, and the ends of their drain times.
    pub(super) leaving: HashMap<Key, Instant>,
    pub(super) given: Given,
}

impl Memory {
    /// Begins with a dataplane to which lvsd has connected, and in which an lvsd has made the
    /// settings `given`.
    pub(super) fn begin(&mut self, given: Given) {
        self.base = None;
        self.drift = Drift::default();
        self.given = given;
    }

    /// Adds manual changes that stay, and original values of removed settings, to the desired
    /// state. Logs and stores new manual changes. `now` is the present state of lvsd's services.
    /// Returns the servers that another program has drained or undrained, and whether
    /// [`given`](Self::given) has changed.
    pub(super) fn respect(
        &mut self,
        desired: &mut Desired,
        actual: &Actual,
        now: &Base,
        readied: &HashSet<Key>,
    ) -> (Vec<DrainChange>, bool) {
        let base = self.base.as_ref();
        let drained = self.given.respect(desired, now, base, readied);
        let by_hand: HashSet<Key> = self.given.drained().iter().copied().collect();
        let is_drain = |service, server| {
            let key = (service, server);
            by_hand.contains(&key) || drained.iter().any(|(drained, _)| *drained == key)
        };
        for change in self.drift.respect(base, desired, actual, is_drain) {
            tracing::warn!(event = "drift", "{change}");
            self.manual_changes.push(change);
        }
        let changed = self.given.withdraw(desired, actual) || !drained.is_empty();
        (drained, changed)
    }
}

/// Settings that lvsd has made in one dataplane, and the servers that another program has drained
/// in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Given {
    /// Identity of the dataplane.
    dataplane: String,
    /// Sysctls that lvsd has set, with their previous values.
    sysctls: BTreeMap<String, String>,
    /// Whether lvsd has set mark rules.
    marks: bool,
    /// Whether lvsd has set the filter of all services.
    filter: bool,
    /// Whether lvsd has started synchronisation daemons.
    daemons: bool,
    /// Servers that another program has drained by setting their weight to 0 (`lvsadm drain`).
    drained: Vec<(ServiceId, SocketAddr)>,
}

impl Given {
    /// The settings of `dataplane`. If `before` belongs to another dataplane, only its drained
    /// servers are kept.
    pub(super) fn of(dataplane: String, before: Self) -> Self {
        if before.dataplane == dataplane {
            return before;
        }
        Self {
            dataplane,
            drained: before.drained,
            ..Self::default()
        }
    }

    pub(super) fn has_sysctls(&self) -> bool {
        !self.sysctls.is_empty()
    }

    pub(super) fn has_daemons(&self) -> bool {
        self.daemons
    }

    /// Servers that another program has drained in the dataplane.
    pub(super) fn drained(&self) -> &[(ServiceId, SocketAddr)] {
        &self.drained
    }

    /// Keeps weights of 0 that operators have set in the dataplane; `last` contains the previous
    /// weights. Such a server is drained until an operator sets another weight or sets the server
    /// ready, or the file no longer contains it. Returns the changes.
    fn respect(
        &mut self,
        desired: &mut Desired,
        now: &Base,
        last: Option<&Base>,
        readied: &HashSet<(ServiceId, SocketAddr)>,
    ) -> Vec<DrainChange> {
        let mut drained: HashSet<_> = std::mem::take(&mut self.drained).into_iter().collect();
        // An operator has set these servers ready.
        drained.retain(|key| !readied.contains(key));
        let mut changes = Vec::new();
        for service in &mut desired.services {
            for server in &mut service.servers {
                let key = (service.id, server.address);
                let now = now.weight(&key);
                let was = drained.remove(&key);
                let before = last.and_then(|last| last.weight(&key));
                let by_hand = now == Some(0)
                    && !server.leaves
                    && before.is_some_and(|before| before != 0)
                    && server.config.weight != 0;
                let is = match (was, now) {
                    (true, Some(weight)) => weight == 0,
                    (true, None) => true,
                    (false, _) => by_hand,
                };
                if is {
                    server.config.weight = 0;
                    self.drained.push(key);
                }
                if is != was {
                    changes.push((key, is));
                }
            }
        }
        changes
    }

    /// Records the present values of settings that the desired state changes. If a setting is no
    /// longer in the file, adds its original value to the desired state. Returns whether the record
    /// has changed.
    fn withdraw(&mut self, desired: &mut Desired, actual: &Actual) -> bool {
        let before = self.clone();
        let now: BTreeMap<&str, &str> = actual
            .sysctls
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        for (name, value) in &desired.sysctls {
            if let Some(now) = now.get(name.as_str()).filter(|now| *now != value)
                && !self.sysctls.contains_key(name)
            {
                self.sysctls.insert(name.clone(), (*now).to_owned());
            }
        }
        self.sysctls.retain(|name, old| {
            if desired.sysctls.iter().any(|(wanted, _)| wanted == name) {
                return true;
            }
            let back = now.get(name.as_str()) == Some(&old.as_str());
            if !back {
                desired.sysctls.push((name.clone(), old.clone()));
            }
            !back
        });
        match &desired.marks {
            Some(_) => self.marks = true,
            None if self.marks => {
                // lvsd removes its rules again and again until the dataplane has none.
                self.marks = actual.marks.iter().any(|rule| !is_generated(rule));
                desired.marks = self.marks.then(Vec::new);
            }
            None => {}
        }
        match &desired.filter {
            Some(filter) => self.filter = !filter.is_off(),
            None if self.filter => {
                // lvsd removes its filter again and again until the dataplane has none.
                self.filter = actual.filters.contains_key(&None);
                desired.filter = self.filter.then(SourceFilter::default);
            }
            None => {}
        }
        match &desired.sync {
            Some(daemons) => self.daemons = !daemons.is_empty(),
            None if self.daemons => {
                // lvsd stops its daemons again and again until the dataplane has none.
                self.daemons = !actual.daemons.is_empty();
                desired.sync = self.daemons.then(Vec::new);
            }
            None => {}
        }
        *self != before
    }
}

/// A server, and whether it is now drained in the dataplane.
pub(super) type DrainChange = ((ServiceId, SocketAddr), bool);

/// lvsd's services and settings in a dataplane after lvsd's last changes.
#[derive(Clone, Debug, Default)]
pub(super) struct Base {
    services: HashMap<ServiceId, BaseService>,
    pub(super) vips: BTreeSet<IpAddr>,
    sysctls: HashMap<String, String>,
    marks: Vec<String>,
}

#[derive(Clone, Debug)]
struct BaseService {
    config: ServiceConfig,
    servers: HashMap<SocketAddr, ServerConfig>,
}

impl Base {
    /// lvsd's services and settings in the state `actual`.
    pub(super) fn of(actual: &Actual) -> Self {
        let ours = actual.services.iter();
        let ours = ours.filter(|service| service.owner.as_deref() == Some(OWNER));
        let services = ours.map(|service| {
            let servers = service.servers.iter();
            let base = BaseService {
                config: service.config.clone(),
                servers: servers.map(|s| (s.server, s.config)).collect(),
            };
            (service.service, base)
        });
        Self {
            services: services.collect(),
            vips: actual.vips.clone(),
            sysctls: actual.sysctls.iter().cloned().collect(),
            marks: actual.marks.clone(),
        }
    }

    /// The servers of lvsd's services, with their settings.
    pub(super) fn servers(&self) -> impl Iterator<Item = (Key, &ServerConfig)> {
        self.services.iter().flat_map(|(id, service)| {
            let servers = service.servers.iter();
            servers.map(|(server, config)| ((*id, *server), config))
        })
    }

    fn weight(&self, (service, server): &Key) -> Option<i32> {
        Some(self.services.get(service)?.servers.get(server)?.weight)
    }

    /// Applies a change that lvsd has made in the dataplane.
    pub(super) fn note(&mut self, change: &Call) {
        match change {
            Call::ServiceAdd(spec) | Call::ServiceEdit(spec) => {
                let new = || BaseService {
                    config: spec.config.clone(),
                    servers: HashMap::new(),
                };
                let service = self.services.entry(spec.service).or_insert_with(new);
                service.config = spec.config.clone();
            }
            Call::ServiceDelete { service } => {
                self.services.remove(service);
            }
            Call::ServerAdd(spec) | Call::ServerEdit(spec) => {
                if let Some(service) = self.services.get_mut(&spec.service) {
                    service.servers.insert(spec.server, spec.config);
                }
            }
            Call::ServerDelete { service, server } => {
                if let Some(service) = self.services.get_mut(service) {
                    service.servers.remove(server);
                }
            }
            Call::VipsOwn { addresses } => self.vips = addresses.iter().copied().collect(),
            Call::SysctlSet(set) => {
                self.sysctls.insert(set.name.clone(), set.value.clone());
            }
            Call::MarkSet { rules } => self.marks.clone_from(rules),
            _ => {}
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum ManualChange {
    Service(ServiceConfig),
    ServiceGone,
    Server(ServerConfig),
    ServerAdded(ServerConfig),
    ServerGone,
    VipGone,
    Sysctl(String),
    Marks(Vec<String>),
}

/// The item that was changed manually.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ChangedItem {
    Vip(IpAddr),
    Sysctl(String),
    Marks,
    Service(ServiceKey),
    Server(ServiceKey, SocketAddr),
}

/// Manual changes that lvsd keeps.
#[derive(Debug, Default)]
pub(super) struct Drift {
    kept: BTreeMap<ChangedItem, ManualChange>,
    /// Number of the configuration that was in use when the kept manual changes were made.
    file: u64,
}

impl Drift {
    /// Finds new manual changes since the state `base`, and returns their texts. With
    /// `manual_changes = "report"`, they become part of the desired state until the next
    /// configuration is loaded.
    fn respect(
        &mut self,
        base: Option<&Base>,
        desired: &mut Desired,
        actual: &Actual,
        by_hand: impl Fn(ServiceId, SocketAddr) -> bool,
    ) -> Vec<String> {
        // Loading a file reverts manual changes.
        if self.file != desired.generation {
            self.file = desired.generation;
            self.kept.clear();
        }
        let changes = base.map_or_else(Vec::new, |base| {
            manual_changes(base, desired, actual, by_hand)
        });
        let names = Names::new(desired);
        let texts: Vec<String> = changes
            .iter()
            .map(|(item, change)| describe(&names, item, change))
            .collect();
        if desired.on_drift == OnDrift::Repair {
            return texts
                .into_iter()
                .map(|text| format!("{text} by hand; lvsd reverts this"))
                .collect();
        }
        drop(names);
        for (item, change) in changes {
            self.kept.insert(item, change);
        }
        self.apply(desired);
        texts
            .into_iter()
            .map(|text| {
                format!(
                    "{text} by hand; lvsd does not revert it until the file is loaded again (`lvsd reload`)"
                )
            })
            .collect()
    }

    /// Texts about the manual changes that lvsd keeps.
    pub(super) fn in_words(&self, desired: &Desired) -> Vec<String> {
        let names = Names::new(desired);
        let kept = self.kept.iter();
        kept.map(|(item, change)| describe(&names, item, change))
            .collect()
    }

    /// Adds the kept manual changes to the desired state.
    fn apply(&self, desired: &mut Desired) {
        if self.kept.is_empty() {
            return;
        }
        for (item, change) in &self.kept {
            match (item, change) {
                (ChangedItem::Vip(ip), _) => {
                    desired.vips.remove(ip);
                }
                (ChangedItem::Sysctl(name), ManualChange::Sysctl(value)) => {
                    let wanted = desired.sysctls.iter_mut().filter(|(n, _)| n == name);
                    wanted.for_each(|(_, wanted)| wanted.clone_from(value));
                }
                (ChangedItem::Marks, ManualChange::Marks(rules)) => {
                    desired.marks = Some(rules.clone());
                    desired.port_marks.clear();
                }
                (ChangedItem::Service(ServiceKey(id)), ManualChange::ServiceGone) => {
                    desired.services.retain(|service| service.id != *id);
                }
                (
                    ChangedItem::Service(ServiceKey(id)) | ChangedItem::Server(ServiceKey(id), _),
                    change,
                ) => {
                    let mut services = desired.services.iter_mut();
                    if let Some(service) = services.find(|service| service.id == *id) {
                        apply_to_service(service, item, change);
                    }
                }
                _ => {}
            }
        }
    }
}

/// The manual changes since the state `base`.
fn manual_changes(
    base: &Base,
    desired: &Desired,
    actual: &Actual,
    by_hand: impl Fn(ServiceId, SocketAddr) -> bool,
) -> Vec<(ChangedItem, ManualChange)> {
    let mut changes = changed_settings(base, desired, actual);
    let mut seen = 0;
    for service in &actual.services {
        let id = service.service;
        let Some(known) = base.services.get(&id) else {
            continue;
        };
        seen += 1;
        let item = |server| ChangedItem::Server(ServiceKey(id), server);
        if !same_service(&service.config, &known.config) {
            let change = ManualChange::Service(service.config.clone());
            changes.push((ChangedItem::Service(ServiceKey(id)), change));
        }
        let mut there = 0;
        for server in &service.servers {
            let at = server.server;
            match known.servers.get(&server.server) {
                None => changes.push((item(at), ManualChange::ServerAdded(server.config))),
                Some(config) => {
                    there += 1;
                    if !same_server(&server.config, config) && !by_hand(id, server.server) {
                        changes.push((item(at), ManualChange::Server(server.config)));
                    }
                }
            }
        }
        if there < known.servers.len() {
            for server in known.servers.keys() {
                if !service.servers.iter().any(|s| s.server == *server) {
                    changes.push((item(*server), ManualChange::ServerGone));
                }
            }
        }
    }
    if seen < base.services.len() {
        for id in base.services.keys() {
            if !actual.services.iter().any(|s| s.service == *id) {
                changes.push((
                    ChangedItem::Service(ServiceKey(*id)),
                    ManualChange::ServiceGone,
                ));
            }
        }
    }
    // Items whose source has not answered stay as they are, so that they have no manual
    // changes.
    changes.retain(|(item, _)| !is_awaited(desired, item));
    changes.sort_by(|(one, _), (other, _)| one.cmp(other));
    changes
}

/// Whether lvsd does not know the desired state of an item because its source has not answered.
fn is_awaited(desired: &Desired, item: &ChangedItem) -> bool {
    let (ChangedItem::Service(ServiceKey(id)) | ChangedItem::Server(ServiceKey(id), _)) = item
    else {
        return false;
    };
    let mut services = desired.services.iter();
    let Some(service) = services.find(|service| service.id == *id) else {
        return desired.unnamed.is_some();
    };
    match item {
        ChangedItem::Server(_, server) => {
            let mut named = service.servers.iter();
            service.incomplete && named.all(|named| named.address != *server)
        }
        _ => false,
    }
}

/// Adds a kept manual change to the desired state of a service.
fn apply_to_service(service: &mut DesiredService, item: &ChangedItem, change: &ManualChange) {
    match (item, change) {
        (ChangedItem::Service(_), ManualChange::Service(config)) => service.config = config.clone(),
        (ChangedItem::Server(_, server), ManualChange::Server(config)) => {
            let mut servers = service.servers.iter_mut();
            if let Some(server) = servers.find(|s| s.address == *server) {
                server.config = *config;
            }
        }
        (ChangedItem::Server(_, server), ManualChange::ServerGone) => {
            service.servers.retain(|s| s.address != *server);
        }
        (ChangedItem::Server(_, server), ManualChange::ServerAdded(config))
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

/// Manual changes of VIPs, sysctls and marks.
fn changed_settings(
    base: &Base,
    desired: &Desired,
    actual: &Actual,
) -> Vec<(ChangedItem, ManualChange)> {
    let mut changes = Vec::new();
    for ip in base.vips.difference(&actual.vips) {
        changes.push((ChangedItem::Vip(*ip), ManualChange::VipGone));
    }
    for (name, value) in &actual.sysctls {
        let ours = desired.sysctls.iter().any(|(wanted, _)| wanted == name);
        if ours && base.sysctls.get(name).is_some_and(|old| old != value) {
            changes.push((
                ChangedItem::Sysctl(name.clone()),
                ManualChange::Sysctl(value.clone()),
            ));
        }
    }
    // Without mark rules in the file, lvsd keeps manual rules.
    let ours = |rules: &[String]| -> Vec<String> {
        let rules = rules.iter();
        let ours = rules.filter(|rule| desired.marks.is_some() || is_generated(rule));
        ours.cloned().collect()
    };
    if ours(&base.marks) != ours(&actual.marks) {
        changes.push((
            ChangedItem::Marks,
            ManualChange::Marks(actual.marks.clone()),
        ));
    }
    changes
}

fn describe(names: &Names<'_>, item: &ChangedItem, change: &ManualChange) -> String {
    let (service, server) = match item {
        ChangedItem::Vip(ip) => return format!("VIP {ip} was released"),
        ChangedItem::Sysctl(name) => {
            let value = match change {
                ManualChange::Sysctl(value) => value.as_str(),
                _ => "another value",
            };
            return format!("sysctl {name} was set to {value}");
        }
        ChangedItem::Marks => return "the rules for marks were changed".to_owned(),
        ChangedItem::Service(ServiceKey(id)) => (names.service_in_words(id), String::new()),
        ChangedItem::Server(ServiceKey(id), server) => {
            (names.service_in_words(id), server.to_string())
        }
    };
    match change {
        ManualChange::ServiceGone => format!("{service} was deleted"),
        ManualChange::Server(config) => {
            format!(
                "server {server} of {service} was changed (weight {})",
                config.weight
            )
        }
        ManualChange::ServerAdded(_) => format!("server {server} was added to {service}"),
        ManualChange::ServerGone => format!("server {server} of {service} was deleted"),
        _ => format!("{service} was changed"),
    }
}

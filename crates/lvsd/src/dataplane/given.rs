//! Settings apart from services that lvsd has made in a dataplane. They are reverted when they are
//! no longer in the file, also by a later lvsd.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;

use lvs_api::guidance::OWNER;
use lvs_core::api::ServiceId;
use lvs_core::filter::SourceFilter;
use serde::{Deserialize, Serialize};

use crate::config::is_generated;
use crate::reconcile::{Actual, Desired};

/// Settings that lvsd has made in one dataplane.
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

    /// Servers that were drained in the dataplane.
    pub(super) fn drained(&self) -> &[(ServiceId, SocketAddr)] {
        &self.drained
    }

    /// Keeps weights of 0 that operators have set in the dataplane; `last` contains the previous
    /// weights. Such a server is drained until an operator sets another weight, or the file no
    /// longer contains it. Returns the changes.
    pub(super) fn respect(
        &mut self,
        desired: &mut Desired,
        actual: &Actual,
        last: &Weights,
        readied: &HashSet<(ServiceId, SocketAddr)>,
    ) -> Vec<DrainChange> {
        let now = weights(actual);
        let mut drained: HashSet<_> = std::mem::take(&mut self.drained).into_iter().collect();
        // An operator has set these servers ready.
        drained.retain(|key| !readied.contains(key));
        let mut changes = Vec::new();
        for service in &mut desired.services {
            for server in &mut service.servers {
                let key = (service.id, server.address);
                let now = now.get(&key).copied();
                let was = drained.remove(&key);
                let before = last.get(&key).copied();
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

    /// Adds the original values of settings that were removed from the file to the desired state,
    /// and records values that will be set. Returns whether the record has changed.
    pub(super) fn withdraw(&mut self, desired: &mut Desired, actual: &Actual) -> bool {
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

/// Weights of servers in a dataplane.
pub(super) type Weights = HashMap<(ServiceId, SocketAddr), i32>;

/// Weights in a listing, for services that lvsd manages.
pub(super) fn weights(actual: &Actual) -> Weights {
    let services = actual.services.iter();
    let services = services.filter(|service| service.owner.as_deref() == Some(OWNER));
    services
        .flat_map(|service| {
            let servers = service.servers.iter();
            servers.map(|server| ((service.service, server.server), server.config.weight))
        })
        .collect()
}

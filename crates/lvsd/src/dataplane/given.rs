//! Settings, other than services, that lvsd has made in a dataplane. This or a later lvsd reverts
//! them when they are no longer in the file.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;

use lvs_api::guidance::OWNER;
use lvs_core::api::ServiceId;
use lvs_core::filter::SourceFilter;
use serde::{Deserialize, Serialize};

use crate::config::is_generated;
use crate::reconcile::{Actual, Desired};

/// The settings that lvsd has made in one dataplane.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Given {
    /// The identity of the dataplane.
    dataplane: String,
    /// The sysctls that were set, and their values before.
    sysctls: BTreeMap<String, String>,
    /// Whether rules for marks were set.
    marks: bool,
    /// Whether a filter for all services was set.
    filter: bool,
    /// Whether synchronisation daemons were started.
    daemons: bool,
    /// Servers whose weight another program has set to 0, as `lvsadm drain` does.
    drained: Vec<(ServiceId, SocketAddr)>,
}

impl Given {
    /// The settings of `dataplane`. If `before` belongs to another dataplane, only the servers that
    /// operators have drained remain.
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

    /// The servers that are drained by hand.
    pub(super) fn drained(&self) -> &[(ServiceId, SocketAddr)] {
        &self.drained
    }

    /// Keeps the weight 0 that an operator has set in the dataplane; `last` contains the earlier
    /// weights. Such a server is drained until an operator sets another weight, or the server is
    /// removed from the file. Returns the servers whose state has changed, and whether they are
    /// drained now.
    pub(super) fn respect(
        &mut self,
        desired: &mut Desired,
        actual: &Actual,
        last: &Weights,
        readied: &HashSet<(ServiceId, SocketAddr)>,
    ) -> Vec<DrainChange> {
        let now = weights(actual);
        let mut drained: HashSet<_> = std::mem::take(&mut self.drained).into_iter().collect();
        // The operator has ended the drain of these servers.
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

    /// Adds to the desired state the original values of settings that were removed from the file,
    /// and records the values that are about to be set. True if the record has changed and should
    /// be stored.
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
                // lvsd removes its rules, and repeats that until the dataplane has none of them.
                self.marks = actual.marks.iter().any(|rule| !is_generated(rule));
                desired.marks = self.marks.then(Vec::new);
            }
            None => {}
        }
        match &desired.filter {
            Some(filter) => self.filter = !filter.is_off(),
            None if self.filter => {
                // lvsd turns off its filter, and repeats that until the dataplane has no filter.
                self.filter = actual.filters.contains_key(&None);
                desired.filter = self.filter.then(SourceFilter::default);
            }
            None => {}
        }
        match &desired.sync {
            Some(daemons) => self.daemons = !daemons.is_empty(),
            None if self.daemons => {
                // lvsd stops the daemons, and repeats that until the dataplane has none of them.
                self.daemons = !actual.daemons.is_empty();
                desired.sync = self.daemons.then(Vec::new);
            }
            None => {}
        }
        *self != before
    }
}

/// A server, and whether it is drained by hand.
pub(super) type DrainChange = ((ServiceId, SocketAddr), bool);

/// The weights that a dataplane has.
pub(super) type Weights = HashMap<(ServiceId, SocketAddr), i32>;

/// The weights in a listing, only of services that lvsd manages.
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

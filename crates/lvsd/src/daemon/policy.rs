//! The decisions about services: whether they are settled, have their quorum, use all servers
//! because too few are up, or are served by their sorry server.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use lvs_core::api::{ServiceId, Standing};

use super::inputs::Inputs;
use crate::cluster::{self, Ability};
use crate::config::{Service, VipMode};
use crate::desired::{self, Decision};
use crate::health::Prober;

/// The decisions about services, and the VIPs that may be announced.
#[derive(Debug, Default)]
pub(super) struct Policy {
    /// The last decision about each service; quorum has hysteresis.
    pub(super) decisions: HashMap<ServiceId, Decision>,
    /// The VIPs that may be owned: the states of their services are known, or their unchecked
    /// servers can be checked only through the VIP.
    pub(super) announced: BTreeSet<IpAddr>,
    /// Whether the state of every service is known well enough to announce its VIP.
    pub(super) settled: bool,
    /// The number of services whose first checks have not all ended or timed out.
    unknown: usize,
}

/// A decision about a service that differs from the previous one.
#[derive(Debug)]
pub(super) struct Transition {
    pub(super) id: ServiceId,
    pub(super) name: String,
    pub(super) before: Decision,
    pub(super) now: Decision,
    /// The number of servers that accept new connections.
    pub(super) usable: usize,
}

impl Policy {
    /// Discards the decisions about services that `services` lacks. The state of every service must
    /// then be determined again.
    pub(super) fn load(&mut self, services: &[Service]) {
        let wanted: HashSet<ServiceId> = services.iter().map(|service| service.id).collect();
        self.decisions.retain(|id, _| wanted.contains(id));
        self.settled = false;
    }

    /// Determines which VIPs may be announced, because the states of their services are known.
    /// Returns whether the VIPs differ, or the first checks of further services have ended.
    /// `changed`: inputs have changed since the last call.
    pub(super) fn settle<P: Prober>(&mut self, inputs: &Inputs<P>, changed: bool) -> bool {
        if self.settled && self.unknown == 0 && !changed {
            return false;
        }
        let mut unsettled = BTreeSet::new();
        self.settled = true;
        let before = std::mem::take(&mut self.unknown);
        for service in &inputs.expanded.services {
            self.unknown += usize::from(!inputs.is_known(service));
            if !inputs.is_settled(service) {
                self.settled = false;
                if inputs.is_veiled(service) {
                    unsettled.extend(service.virtual_ip());
                }
            }
        }
        let announced = inputs.vips.difference(&unsettled).copied().collect();
        let changed = announced != self.announced || self.unknown < before;
        self.announced = announced;
        changed
    }

    /// Decides about all services, and returns the changed decisions.
    pub(super) fn decide<P: Prober>(&mut self, inputs: &Inputs<P>) -> Vec<Transition> {
        let mut transitions = Vec::new();
        for service in &inputs.expanded.services {
            let views = inputs.views(service);
            let before = self.decisions.get(&service.id).copied();
            let settled = inputs.is_known(service) || inputs.begins_down(service);
            let Some(now) = desired::decide(service, &views, settled, before) else {
                continue;
            };
            let before = before.unwrap_or_default();
            if now != before {
                transitions.push(Transition {
                    id: service.id,
                    name: service.name.clone(),
                    before,
                    now,
                    usable: desired::usable(&views),
                });
            }
            self.decisions.insert(service.id, now);
        }
        transitions
    }

    /// The last decision about a service; the default before the first one.
    pub(super) fn decision(&self, id: &ServiceId) -> Decision {
        self.decisions.get(id).copied().unwrap_or_default()
    }

    /// Whether all services that lvsd has decided about have their quorum.
    pub(super) fn has_quorum(&self) -> bool {
        self.decisions.values().all(|decision| decision.quorum)
    }

    /// The VIPs to announce to routers, each with the announcement that the states of its services
    /// require; `None` while a state is unknown.
    pub(super) fn announcements<P: Prober>(
        &self,
        inputs: &Inputs<P>,
    ) -> BTreeMap<IpAddr, Option<Standing>> {
        let mut abilities: BTreeMap<IpAddr, Vec<Ability>> = BTreeMap::new();
        for service in &inputs.expanded.services {
            let Some(ip) = service.virtual_ip() else {
                continue;
            };
            if service.vip != VipMode::Announce {
                continue;
            }
            let settled = inputs.is_settled(service) || inputs.begins_down(service);
            let ability = match self.decision(&service.id) {
                _ if !settled && inputs.is_veiled(service) => Ability::Unknown,
                decision if decision.quorum => Ability::Quorum,
                decision if decision.sorry => Ability::Sorry,
                _ => Ability::None,
            };
            abilities.entry(ip).or_default().push(ability);
        }
        let addresses = abilities.into_iter();
        addresses
            .map(|(ip, services)| (ip, cluster::standing(&services)))
            .collect()
    }
}

//! What others want to know.

use std::collections::HashSet;
use std::net::IpAddr;

use lvs_core::api::{Conflict, Info, InterfaceInfo, ReasonCount};

use super::Worker;
use crate::engine::decider::reason;
use crate::engine::remedies;
use crate::io::PacketIo;
use crate::packet::drop::FrameDrop;
use crate::packet::net::{Net, PortId};

impl Worker {
    /// What the engine answers for as virtual addresses; those that stand for clients are not.
    fn own_vips(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let local: HashSet<IpAddr> = self.local_addresses().collect();
        let own = self.hidden.own_vips.iter().copied();
        own.filter(move |addr| self.network.is_vip(*addr) || !local.contains(addr))
    }

    pub(super) fn info(&mut self) -> Info {
        let routed = self.access.is_routed().then(|| InterfaceInfo {
            name: self.access.name().to_owned(),
            backend: "tun".to_owned(),
            mtu: u16::MAX.into(),
            up: self
                .network
                .state
                .link(self.access.ifindex())
                .is_some_and(|link| link.up),
            lost: self.access.drops(),
        });
        let attached = self.ports.iter_mut().zip((0..).map(PortId));
        Info {
            connections: self.decider.shard.len() as u64,
            capacity: self.decider.shard.capacity() as u64,
            interfaces: attached
                .filter_map(|(attached, port)| {
                    let attached = attached.as_mut()?;
                    Some(InterfaceInfo {
                        lost: attached.io.drops(),
                        name: attached.name.to_string(),
                        backend: attached.io.capabilities().name.to_owned(),
                        mtu: self.network.port(port)?.mtu,
                        up: !attached.down,
                    })
                })
                .chain(routed)
                .collect(),
            too_big: self.pipeline.common().oversize.all(),
            own_vips: self.own_vips().collect(),
            conflicts: self
                .conflicts
                .iter()
                .map(|(&address, (mac, _))| Conflict {
                    address,
                    mac: mac.to_string(),
                })
                .collect(),
            ..Info::default()
        }
    }

    pub(super) fn reasons(&mut self) -> Vec<ReasonCount> {
        let counters = &self.pipeline.counters;
        let frames = FrameDrop::ALL
            .iter()
            // What these two stand for is counted by the director's own reasons.
            .filter(|drop| !matches!(drop, FrameDrop::Verdict | FrameDrop::Rejected))
            .map(|&drop| {
                let told = [drop.name(), drop.describe(), remedies::of_frame(drop)];
                reason("drop", counters.dropped_for(drop), told)
            });
        let mut all: Vec<ReasonCount> = frames.chain(self.decider.reasons()).collect();
        let unsent = self.refused + self.trunks.refused();
        all.push(reason("drop", unsent, remedies::NOT_SENT));
        let missed: u64 = self
            .ports
            .iter_mut()
            .flatten()
            .map(|port| port.io.drops())
            .sum();
        let missed = missed + self.access.drops();
        all.push(reason("drop", missed, remedies::NOT_RECEIVED));
        let limited = self.pipeline.common().rate_limit.suppressed();
        all.push(reason("drop", limited, remedies::ICMP_LIMITED));
        let incomplete = self.pipeline.common().reassembler.expired();
        all.push(reason("drop", incomplete, remedies::INCOMPLETE));
        let tagged = self.pipeline.counters.tagged + self.trunks.strangers();
        all.push(reason("host", tagged, remedies::VLAN));
        let waited = self.pipeline.held.dropped;
        all.push(reason("drop", waited, remedies::NO_NEIGHBOUR));
        all
    }
}

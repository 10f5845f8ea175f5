//! What the kernel tells: interfaces, routes, neighbours.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use tracing::{debug, info, warn};

use super::Worker;
use crate::engine::StartError;
use crate::engine::network::is_usable;
use crate::io::PacketIo;
use crate::io::af_packet::AfPacket;
use crate::packet::ndp;
use crate::packet::net::{PortId, PortInfo};
use crate::packet::pipeline::Env;
use crate::packet::wire::Mac;

/// An interface in use.
pub(super) struct Attached {
    pub(super) io: AfPacket,
    pub(super) name: Arc<str>,
    pub(super) down: bool,
    /// What comes in there was inside of packets that IPVS does not balance.
    pub(super) decapsulates: bool,
}

impl Attached {
    pub(super) fn listen(&self, addr: IpAddr, member: bool) {
        let IpAddr::V6(addr) = addr else { return };
        let group = ndp::group_mac(ndp::solicited_node(addr));
        if let Err(error) = self.io.set_group(group, member)
            && member
        {
            warn!("{}: {addr} may not be found there: {error}", self.name);
        }
    }
}

/// Whether a device of this kind takes Ethernet frames out of GRE. Other tunnels of Ethernet go over UDP, which IPVS
/// balances, so that `ignore_tunneled` is not about them.
pub(super) fn decapsulates(kind: Option<&str>) -> bool {
    matches!(kind, Some("gretap" | "ip6gretap" | "erspan" | "ip6erspan"))
}

impl Worker {
    pub(super) fn follow_kernel(&mut self) {
        let changes = match self.netlink.poll_events(&mut self.network.state) {
            Ok(changes) => changes,
            Err(error) => return warn!("{error}"),
        };
        if !changes.is_empty() {
            self.network.forget();
        }
        if changes.links {
            self.trunks.follow(&self.network.state);
            if let Err(error) = self.attach_links(false) {
                warn!("{error}");
            }
        }
        if changes.steering && self.access.is_routed() {
            self.access.distrust();
            self.changed.get_or_insert(self.shared.now());
        }
        if changes.links || changes.addresses {
            self.network.follow_addresses();
            self.decider.follow_addresses(&self.network.state);
            if let Err(failure) = self.follow_local_pool() {
                warn!("{}", failure.message);
                self.follow_or_warn();
            }
        } else if changes.routes {
            // The packet path follows at once; the servers' next hops can wait for the end of a storm.
            self.changed.get_or_insert(self.shared.now());
        }
        let env = Env {
            net: &self.network,
            intercept: &self.hidden,
            pmtu_disc: self.pmtu_disc,
        };
        let mut ask_again = Vec::new();
        for (ifindex, addr) in changes.neighbours {
            let Some(port) = self.network.port_of(ifindex) else {
                continue;
            };
            let Some(neighbour) = self.network.state.neighbour(ifindex, addr) else {
                continue;
            };
            if let Some(mac) = neighbour.usable() {
                self.given_up.remove(&(ifindex, addr));
                let out = &mut self.output;
                self.pipeline
                    .neighbour_resolved(port, addr, Mac(mac), &env, out);
            } else if neighbour.is_failed() {
                let now = self.shared.now();
                let (decider, out) = (&mut self.decider, &mut self.output);
                self.pipeline
                    .neighbour_failed(port, addr, &env, decider, now, out);
                // A server that has got another link-layer address answers when everybody is asked.
                let server = self.next_hops.contains(&(ifindex, addr));
                if server && self.given_up.insert((ifindex, addr)) {
                    ask_again.push((ifindex, addr));
                }
            }
        }
        self.refresh_neighbours(&ask_again.into_iter().collect());
        self.flush();
    }

    /// Opens interfaces that are new or up again, lets go of those that are gone, and takes over MTU and MAC changes.
    pub(super) fn attach_links(&mut self, starting: bool) -> Result<(), StartError> {
        if self.access.is_routed() {
            return self.answer_on_links();
        }
        let mut gone = Vec::new();
        let mut renamed = Vec::new();
        for (port, attached) in (0..).map(PortId).zip(&self.ports) {
            let Some(attached) = attached else { continue };
            // A port of a bridge or a bond is its master's, unless it was asked for by name.
            let automatic = self.setup.interfaces.is_empty();
            match self.network.state.link(attached.io.ifindex()) {
                None => gone.push(port),
                Some(link) if automatic && link.master.is_some() => gone.push(port),
                Some(link) if *link.name != *attached.name => {
                    renamed.push((port, link.name.clone()));
                }
                Some(_) => {}
            }
        }
        for port in gone {
            self.detach(port);
        }
        for (port, name) in renamed {
            self.rename(port, &name);
        }
        let links: Vec<_> = self
            .network
            .state
            .links()
            .filter(|link| {
                if self.network.port_of(link.index).is_some() {
                    link.is_arp_capable()
                } else if self.setup.interfaces.is_empty() {
                    is_usable(link)
                } else {
                    link.is_arp_capable() && self.setup.names(&link.name)
                }
            })
            .cloned()
            .collect();
        for link in links {
            let Some(mac) = link.mac else { continue };
            let info = PortInfo {
                mac: Mac(mac),
                mtu: link.mtu,
                ethernet: true,
                offload: true,
            };
            if let Some(port) = self.network.port_of(link.index) {
                self.network.set_port(port, link.index, info, false);
                if let Some(attached) = &mut self.ports[port.index()]
                    && std::mem::replace(&mut attached.down, !link.running) == link.running
                {
                    let state = if link.running { "up" } else { "down" };
                    info!("{} is {state}", link.name);
                }
                continue;
            }
            let opened = AfPacket::open(link.index, &link.name)
                .map_err(StartError::from)
                .and_then(|io| {
                    self.access.add_interface(&link.name)?;
                    Ok(io)
                });
            match opened {
                Ok(io) => {
                    let place = self.ports.iter().skip(1).position(Option::is_none);
                    let index = place.map_or(self.ports.len(), |place| place + 1);
                    if index == self.ports.len() {
                        self.ports.push(None);
                    }
                    let port = PortId(u16::try_from(index).unwrap_or(u16::MAX));
                    info!(
                        "using {} ({}, MTU {})",
                        link.name,
                        io.capabilities().name,
                        link.mtu
                    );
                    let down = !link.running;
                    let attached = Attached {
                        io,
                        name: Arc::from(link.name.as_str()),
                        down,
                        decapsulates: decapsulates(link.kind.as_deref()),
                    };
                    for &addr in self.announcing.keys() {
                        attached.listen(addr, true);
                    }
                    self.ports[index] = Some(attached);
                    self.network.set_port(port, link.index, info, false);
                }
                Err(error) if starting => return Err(error),
                Err(error) => warn!("cannot use {}: {error}", link.name),
            }
        }
        if self.setup.interfaces.is_empty() && starting && self.ports.iter().flatten().count() == 0
        {
            warn!("no Ethernet interface is up: waiting for one");
        }
        Ok(())
    }

    /// Where the host routes the packets: tells on which interfaces own addresses are to be answered for.
    fn answer_on_links(&mut self) -> Result<(), StartError> {
        let automatic = self.setup.interfaces.is_empty();
        let links = self.network.state.links().filter(|link| {
            if automatic {
                is_usable(link)
            } else {
                link.up && self.setup.names(&link.name)
            }
        });
        let links: BTreeMap<u32, String> =
            links.map(|link| (link.index, link.name.clone())).collect();
        Ok(self.access.set_interfaces(links)?)
    }

    fn detach(&mut self, port: PortId) {
        let Some(attached) = self.ports[port.index()].take() else {
            return;
        };
        self.network.remove_port(port);
        if let Err(error) = self.access.remove_interface(&attached.name) {
            debug!("{error}");
        }
        warn!(
            "{} is gone: its packets are lost until it comes back",
            attached.name
        );
    }

    /// An interface has got another name; everything else goes on.
    fn rename(&mut self, port: PortId, name: &str) {
        let Some(attached) = &mut self.ports[port.index()] else {
            return;
        };
        let old = std::mem::replace(&mut attached.name, Arc::from(name));
        info!("{old} is called {name} now");
        // The new one first: at no moment does the host see what is handled.
        let mut shielded = self.access.add_interface(name);
        let taken = self.ports.iter().flatten().any(|other| other.name == old);
        if !taken && shielded.is_ok() {
            shielded = self.access.remove_interface(&old);
        }
        if let Err(error) = shielded {
            warn!("{name}: {error}");
        }
    }

    pub(super) fn port_failed(&mut self, port: PortId, error: &io::Error) {
        // Whether the interface is down or gone is told by the kernel's events; here it is only logged.
        debug!("{}: {error}", self.name_of(port));
    }

    pub(super) fn interface_of(&self, port: PortId) -> Arc<str> {
        match self.ports.get(port.index()) {
            Some(Some(attached)) => attached.name.clone(),
            _ => self.host_name.clone(),
        }
    }

    pub(super) fn decapsulates(&self, port: PortId) -> bool {
        let attached = self.ports.get(port.index()).and_then(Option::as_ref);
        attached.is_some_and(|attached| attached.decapsulates)
    }

    pub(super) fn name_of(&self, port: PortId) -> &str {
        match self.ports.get(port.index()) {
            Some(Some(attached)) => &attached.name,
            _ => self.access.name(),
        }
    }

    /// Leaves the host as it was before. What is not done here goes with the process's file descriptors.
    pub(super) fn withdraw(&mut self) {
        self.route_own(&HashSet::new());
        self.local_nodes = None;
        let counters = &self.pipeline.counters;
        info!(
            received = counters.received,
            reassembled = counters.reassembled,
            sent = counters.sent,
            held = counters.held,
            left = counters.left,
            given_back = counters.given_back,
            answered = counters.answered,
            fragments = counters.fragments,
            dropped = counters.dropped_total(),
            "what became of the packets"
        );
    }
}

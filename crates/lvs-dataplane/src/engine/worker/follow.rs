//! What the control half wants: commands, services, virtual addresses.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use lvs_core::api::{Call, Done, Failure, Host, LocalPool, Need, Refused};
use lvs_core::mark::MarkAction;
use lvs_core::{Error, LocalAddress, ServiceKey};
use tracing::{debug, info, warn};

use super::{Worker, groups_of};
use crate::engine::access::Access;
use crate::engine::capture::Capture;
use crate::engine::local;
use crate::engine::shared::Command;
use crate::netlink::{NetState, RouteKind};
use crate::packet::intercept::Intercept;
use crate::packet::mld::Change;
use crate::packet::net::{Net, PortId};

/// Below so many services and servers, everything is gone through at every change: it takes less than a millisecond.
const FEW: usize = 100;
/// How often an own address is announced, one second apart: the first announcement may be lost.
const ANNOUNCEMENTS: u8 = 3;
/// How often it is asked who else has a service's address.
const PROBES: u8 = 2;

/// Changes to so few services are followed one by one.
const FEW_SERVICES: usize = 16;

/// What changes depend on besides the director.
struct WorkerHost<'a> {
    access: &'a Access,
    state: &'a NetState,
}

impl Host for WorkerHost<'_> {
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        if let Need::Daemon(_) = need {
            return Err(Error::Unsupported("synchronisation daemon").into());
        }
        self.access.permits(need, self.state)
    }

    fn is_broadcast(&self, addr: IpAddr) -> bool {
        let route = self.state.lookup(addr);
        route.is_some_and(|hit| hit.kind == RouteKind::Broadcast)
    }

    fn mtu(&self, interface: &str) -> Option<u32> {
        Some(self.state.link_by_name(interface)?.mtu)
    }

    fn local_ports(&self, addr: IpAddr) -> LocalAddress {
        local::ports(addr, self.state.is_local(addr))
    }
}

impl Worker {
    pub(super) fn obey(&mut self, command: Command) {
        // Whoever asked may have given up waiting; then nobody needs the answer.
        match command {
            Command::Apply(changes, reply) => {
                let _ = reply.send(self.apply(&changes));
            }
            Command::LocalInfo(reply) => {
                let control = self.shared.control();
                let _ = reply.send(local::info(&control, &self.decider.shard));
            }
            Command::Connections(slots, reply) => {
                let _ = reply.send(self.decider.connections(slots));
            }
            Command::Explain(question, reply) => {
                let _ = reply.send(self.decider.explain(&question));
            }
            Command::Capture(filter, out) => self.captures.push(Capture::new(filter, out)),
            Command::Marked(reply) => {
                let _ = reply.send(self.decider.marked.clone());
            }
            // Whoever asks is told by the closed channel; only an engine without interfaces gets these.
            Command::Test(..) => {}
            Command::Info(reply) => {
                let _ = reply.send(self.info());
            }
            Command::Reasons(reply) => {
                let _ = reply.send(self.reasons());
            }
        }
    }

    /// Makes changes, or none, and follows them.
    fn apply(&mut self, changes: &[Call]) -> Result<Done, Refused> {
        let host = WorkerHost {
            access: &self.access,
            state: &self.network.state,
        };
        let now = self.shared.now();
        let applied = {
            let mut control = self.shared.control();
            let applied = control.apply(changes, &host, now)?;
            self.wanted_vips = control.own_vips().iter().copied().collect();
            let (pool, hairpin) = control.local_pool();
            self.wanted_pool = LocalPool {
                addresses: pool.iter().map(|local| local.addr).collect(),
                hairpin,
            };
            applied
        };
        let followed = if applied.is_empty() {
            Ok(())
        } else if applied.is_services_only() && applied.services().len() <= FEW_SERVICES {
            let services: Vec<ServiceKey> = applied.services().collect();
            services.iter().try_for_each(|key| self.follow_service(key))
        } else {
            self.follow_control()
        };
        let warnings = followed.err().map(|failure| failure.message);
        Ok(Done {
            warnings: warnings.into_iter().collect(),
        })
    }

    /// An address that comes to the host, or leaves it, has other ports than before.
    pub(super) fn follow_local_pool(&mut self) -> Result<(), Failure> {
        let host = WorkerHost {
            access: &self.access,
            state: &self.network.state,
        };
        let call = Call::LocalSet(self.wanted_pool.clone());
        let now = self.shared.now();
        let applied = self.shared.control().apply(&[call], &host, now);
        applied.map_err(|refused| refused.failure)?;
        self.follow_control()
    }

    /// The local addresses of full NAT: those asked for, and those that connections still use.
    pub(super) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let wanted = self.wanted_pool.addresses.iter().copied();
        wanted.chain(self.decider.shard.local_addresses())
    }

    /// Brings shard, shield, own addresses and neighbours in line with the control half.
    fn follow_control(&mut self) -> Result<(), Failure> {
        let (mut hidden, next_hops, by_hand);
        {
            let mut control = self.shared.control();
            control.sweep(&mut self.decider.shard);
            self.pmtu_disc = control.sysctls().pmtu_disc;
            self.ignore_tunneled = control.sysctls().ignore_tunneled;
            hidden = Intercept::of(&control, &self.hidden);
            let is_local = |addr| self.network.state.is_local(addr);
            hidden.local_nodes = Intercept::local_nodes_of(&control, is_local);
            hidden.local_addresses = self
                .local_addresses()
                .filter(|&addr| is_local(addr))
                .collect();
            // A program that owns services, as lvsd does, says itself which addresses the engine shall have.
            let unowned = control
                .services()
                .filter(|service| service.owner().is_none());
            by_hand = unowned
                .filter_map(|service| match service.key() {
                    ServiceKey::Address { addr, .. } => Some(addr.ip()),
                    ServiceKey::Mark { .. } => None,
                })
                .collect::<HashSet<IpAddr>>();
            let any = control.services().next().is_some();
            let servers = control.endpoints().filter(|_| any);
            next_hops = servers
                .map(|(_, server)| server.addr().ip())
                .collect::<Vec<_>>();
        }
        hidden.local_clients = std::mem::take(&mut self.hidden.local_clients);
        // Addresses of services, and single ones of rules for marks, are looked after as the director's; networks that
        // are marked as a whole are only routed here.
        let mut vips = hidden.vips();
        let mut reached = HashSet::new();
        for rule in self.decider.follow_marks() {
            if rule.action == MarkAction::Host {
                continue;
            }
            hidden.add_marked(rule);
            let addresses: Vec<IpAddr> =
                rule.destination.addresses().into_iter().flatten().collect();
            if let [single] = addresses[..] {
                vips.insert(single);
            }
            reached.extend(addresses);
        }
        let state = &self.network.state;
        self.access.complain_of(vips.iter().copied(), state);
        let own = self.choose_own(&vips);
        self.tell_unclaimed(by_hand, &own);
        reached.extend(&vips);
        hidden.own_vips.clone_from(&own);
        hidden.everything = self.hidden.everything;
        self.changed = None;
        self.followed = self.shared.now();
        let taken = self.access.update(&hidden);
        if taken.is_err() {
            // What is hidden is what was hidden before, and the packet path has to know that.
            hidden.services.clone_from(&self.hidden.services);
            hidden.nat_servers.clone_from(&self.hidden.nat_servers);
            hidden.own_vips.clone_from(&self.hidden.own_vips);
            hidden
                .local_addresses
                .clone_from(&self.hidden.local_addresses);
            self.changed = Some(self.followed);
        }
        // The host has none of the addresses that it routes through a device: whatever nobody takes there, the engine answers.
        let answered = if self.access.is_routed() {
            let mut all = vips.clone();
            all.extend(&own);
            all
        } else {
            own.clone()
        };
        self.network.set_vips(reached, answered);
        self.hidden = hidden;
        self.route_own(&own);
        if let Some(nodes) = &mut self.local_nodes {
            nodes.follow(&self.hidden.local_nodes, self.access.ifindex());
        }
        self.probing.retain(|addr, _| vips.contains(addr));
        self.conflicts.retain(|addr, _| vips.contains(addr));
        for addr in vips {
            self.probing.entry(addr).or_insert(PROBES);
        }
        self.announce();
        let next_hops = self.next_hops_of(&next_hops);
        let new: HashSet<_> = next_hops.difference(&self.next_hops).copied().collect();
        self.refresh_neighbours(&new);
        self.next_hops = next_hops;
        taken
    }

    pub(super) fn follow_or_warn(&mut self) {
        if let Err(failure) = self.follow_control() {
            warn!("{}", failure.message);
        }
    }

    /// Takes in what one service has more than before. What it has less stays hidden until everything is gone through,
    /// which does no harm: what the host should have seen is given back to it.
    fn follow_service(&mut self, key: &ServiceKey) -> Result<(), Failure> {
        self.changed = Some(self.shared.now());
        let (more, servers);
        {
            let mut control = self.shared.control();
            control.sweep(&mut self.decider.shard);
            let few = control.services().take(FEW).count() < FEW
                && control.endpoints().take(FEW).count() < FEW;
            if few {
                drop(control);
                return self.follow_control();
            }
            let Some(service) = control.service(key) else {
                return Ok(());
            };
            more = Intercept::of_service(service, control.ftp_ports());
            servers = service
                .servers()
                .iter()
                .map(|server| server.addr().ip())
                .collect::<Vec<_>>();
        }
        if more
            .services
            .iter()
            .any(|service| !self.network.is_vip(service.address))
        {
            return self.follow_control();
        }
        self.access.extend(&more)?;
        self.hidden.services.extend(more.services);
        self.hidden.nat_servers.extend(more.nat_servers);
        if servers.iter().any(|&server| self.network.is_local(server)) {
            return self.follow_control();
        }
        let next_hops = self.next_hops_of(&servers);
        let new: HashSet<_> = next_hops.difference(&self.next_hops).copied().collect();
        self.refresh_neighbours(&new);
        self.next_hops.extend(new);
        Ok(())
    }

    /// The addresses that the engine shall answer for: those asked for, or with `--own-vips` all of services, without
    /// those that the host has.
    fn choose_own(&self, vips: &HashSet<IpAddr>) -> HashSet<IpAddr> {
        let all = self.setup.own_all_vips.then_some(vips);
        self.wanted_vips
            .iter()
            .chain(all.into_iter().flatten())
            .copied()
            .chain(self.local_addresses())
            .filter(|&addr| !self.network.state.is_local(addr))
            .collect()
    }

    /// Says once which addresses of services nobody here answers ARP for.
    fn tell_unclaimed(&mut self, mut vips: HashSet<IpAddr>, own: &HashSet<IpAddr>) {
        let state = &self.network.state;
        vips.retain(|addr| !state.is_local(*addr) && !own.contains(addr));
        for addr in vips.difference(&self.unclaimed) {
            info!(
                "{addr} is neither on this host nor the engine's own: packets for it have to be routed here \
                 (--own-vips answers ARP for it)"
            );
        }
        self.unclaimed = vips;
    }

    /// Leads this host's own packets for own addresses into the engine, and has new ones announced.
    pub(super) fn route_own(&mut self, own: &HashSet<IpAddr>) {
        let ifindex = self.access.ifindex();
        let main = !self.access.is_routed();
        let routed: HashSet<IpAddr> = self.announcing.keys().copied().collect();
        for &addr in own.difference(&routed) {
            if main && let Err(error) = self.netlink.add_host_route(addr, ifindex) {
                warn!("this host itself cannot reach {addr}: {error}");
            }
            self.listen(addr, true);
            info!("answering for {addr}");
            self.announcing.insert(addr, ANNOUNCEMENTS);
        }
        let left: Vec<IpAddr> = routed.difference(own).copied().collect();
        let still = groups_of(own.iter());
        let mut groups = groups_of(left.iter());
        groups.retain(|group| !still.contains(group));
        for port in self.attached() {
            self.report_groups(port, &groups, Change::Left, false);
        }
        self.flush();
        for addr in left {
            if main && let Err(error) = self.netlink.delete_host_route(addr, ifindex) {
                warn!("{error}");
            }
            self.listen(addr, false);
            info!("no longer answering for {addr}");
            self.announcing.remove(&addr);
        }
    }

    /// Has all interfaces take in the questions who has an own address, or no longer. Those of IPv4 are broadcast.
    pub(super) fn listen(&self, addr: IpAddr, member: bool) {
        for attached in self.ports.iter().flatten() {
            attached.listen(addr, member);
        }
    }

    /// Asks who else has the services' addresses, and announces own ones, as often as is still to be done.
    pub(super) fn announce(&mut self) {
        let take = |left: &mut HashMap<IpAddr, u8>| -> Vec<IpAddr> {
            left.iter_mut()
                .filter(|(_, left)| **left > 0)
                .map(|(addr, left)| {
                    *left -= 1;
                    *addr
                })
                .collect()
        };
        let (probes, announcements) = (take(&mut self.probing), take(&mut self.announcing));
        if probes.is_empty() && announcements.is_empty() {
            return;
        }
        let groups = groups_of(announcements.iter());
        for port in self.attached() {
            // First, so that a switch lets the answers of others through.
            self.report_groups(port, &groups, Change::Joined, false);
            for &addr in &probes {
                self.pipeline
                    .probe(port, addr, &self.network, &mut self.output);
            }
            for &addr in &announcements {
                self.pipeline
                    .announce(port, addr, &self.network, &mut self.output);
            }
        }
        self.flush();
    }

    /// The interfaces in use.
    fn attached(&self) -> Vec<PortId> {
        let ports = (0..).map(PortId).zip(&self.ports);
        ports
            .filter_map(|(port, attached)| attached.as_ref().map(|_| port))
            .collect()
    }

    /// None where the host routes the packets: it keeps its neighbours fresh itself.
    fn next_hops_of(&self, servers: &[IpAddr]) -> HashSet<(u32, IpAddr)> {
        if self.access.is_routed() {
            return HashSet::new();
        }
        let next_hop = |&server: &IpAddr| {
            let hop = self.network.route(server)?;
            Some((self.network.ifindex(hop.port)?, hop.addr))
        };
        servers.iter().filter_map(next_hop).collect()
    }

    /// Has the kernel find out, or confirm, the link-layer addresses of next hops.
    pub(super) fn refresh_neighbours(&mut self, next_hops: &HashSet<(u32, IpAddr)>) {
        for &(ifindex, addr) in next_hops {
            if let Err(error) = self.netlink.resolve(&self.network.state, ifindex, addr) {
                debug!("{error}");
            }
        }
    }
}

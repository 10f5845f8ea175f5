//! Applies services, servers, virtual addresses and settings of the control half to the host.
//!
//! With many services and servers, the cost of an update is in proportion to the change: added
//! services and servers are intercepted at once. Removed ones stay intercepted until the keeper
//! compares the whole configuration, after a second without changes. Until then, the dataplane
//! reinjects packets of removed services into the host.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use lvs_core::api::{Applied, Call, LocalPool};
use lvs_core::mark::MarkAction;
use lvs_core::{Control, Forwarding, Server, Service, ServiceFlags, ServiceKey};
use tracing::warn;

use super::keeper::Keeper;
use super::view::View;
use lvs_packet::intercept::Intercept;
use lvs_packet::net::PortId;

/// With fewer services and servers than this, the keeper compares the whole configuration after
/// each change, in less than a millisecond.
const FEW: usize = 100;
/// Number of services and servers after which a read of the configuration unlocks the control half
/// for a moment; reading them takes some ten microseconds. A service is read with all its servers
/// at once.
const PIECE: usize = 256;

/// A change in the control half.
#[derive(Clone, Debug)]
pub(crate) enum Update {
    /// Services or servers were added, edited or removed. Contains the added and edited ones.
    Services(Vec<Touched>),
    /// Sysctls, timeouts or synchronisation daemons have changed.
    Settings,
    /// The whole configuration must be read.
    All,
}

/// A service or server that was added or edited.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Touched {
    /// A service; whether it is persistent; whether a program owns it.
    Service(ServiceKey, bool, bool),
    Server(ServiceKey, SocketAddr, Forwarding),
}

impl Update {
    /// Returns the change that the keeper must apply to the host after these calls; `None` if they
    /// change nothing that concerns packets.
    pub(crate) fn of(applied: &Applied, calls: &[Call]) -> Option<Self> {
        if applied.is_empty() {
            return None;
        }
        if applied.flushed || applied.marks || applied.vips || applied.local {
            return Some(Self::All);
        }
        if applied.settings {
            return Some(match applied.services().len() {
                0 => Self::Settings,
                _ => Self::All,
            });
        }
        let touched = calls.iter().filter_map(|call| match call {
            Call::ServiceAdd(spec) | Call::ServiceEdit(spec) => {
                let persistent = spec.config.flags.has(ServiceFlags::PERSISTENT);
                let owned = spec.owner.is_some();
                Some(Touched::Service(spec.service.into(), persistent, owned))
            }
            Call::ServerAdd(spec) | Call::ServerEdit(spec) => {
                let method = spec.config.forwarding;
                Some(Touched::Server(spec.service.into(), spec.server, method))
            }
            _ => None,
        });
        Some(Self::Services(touched.collect()))
    }
}

/// Whether there are so few services and servers that the keeper compares the whole configuration
/// after each change. Removed servers with connections count, too.
fn is_small(control: &Control) -> bool {
    control.endpoint_places() < FEW && control.services().take(FEW).count() < FEW
}

/// The part of the control half's configuration that concerns the host.
struct Wanted {
    spec: Intercept,
    /// Addresses of services without an owner. A program that owns services, such as lvsd, chooses
    /// the dataplane's own addresses itself.
    by_hand: HashSet<IpAddr>,
    servers: HashSet<IpAddr>,
}

impl Keeper {
    /// Applies a change to the host. Returns the errors; failed parts are tried again later.
    pub(crate) fn update(&mut self, update: Update) -> Vec<String> {
        self.next.differs = true;
        self.next.config += 1;
        let done = match update {
            Update::All => self.update_all(),
            Update::Settings => self.update_settings(),
            Update::Services(touched) => {
                if is_small(&self.dataplane.control()) {
                    self.update_all()
                } else {
                    self.update_some(&touched)
                }
            }
        };
        done.err().into_iter().collect()
    }

    pub(super) fn update_or_warn(&mut self) {
        self.next.config += 1;
        if let Err(failure) = self.update_all() {
            warn!("{failure}");
        }
    }

    /// The local addresses of full NAT: the configured ones, and removed ones that connections
    /// still use.
    pub(super) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let wanted = self.pool.addresses.iter().copied();
        wanted.chain(self.pool_in_use.iter().copied())
    }

    /// The snapshot against which changes are checked.
    pub(super) fn view_of_tables(&self) -> View {
        View {
            tables: Arc::new(self.tables.clone()),
            ..View::default()
        }
    }

    /// Applies the settings to the packet path. Returns true if the whole configuration must be
    /// applied, because the intercepted packets may differ: a sync backup runs, or `schedule_icmp`
    /// has changed.
    fn take_settings(&mut self) -> bool {
        let control = self.dataplane.control();
        self.next.pmtu_disc = control.sysctls().pmtu_disc;
        self.next.ignore_tunneled = control.sysctls().ignore_tunneled;
        control.backup().is_some() || control.sysctls().schedule_icmp != self.intercept.every_icmp
    }

    fn update_settings(&mut self) -> Result<(), String> {
        if self.take_settings() {
            return self.update_all();
        }
        // A stopped sync backup may have left connections: the keeper compares the whole
        // configuration later.
        self.changed = Some(self.dataplane.now());
        Ok(())
    }

    /// Applies the whole configuration to the host, such as interception, own addresses and
    /// neighbours.
    fn update_all(&mut self) -> Result<(), String> {
        self.take_settings();
        let Wanted {
            mut spec,
            by_hand,
            servers,
        } = self.read_control();
        spec.local_clients = self.intercept.local_clients.clone();
        spec.everything = self.intercept.everything;
        // Addresses of services and single addresses of mark rules are virtual addresses of the
        // director; networks of mark rules are only routed here.
        let mut vips = spec.vips();
        let mut reached = self.add_marks(&mut spec, &mut vips);
        let state = &self.tables.state;
        self.interception.complain_of(vips.iter().copied(), state);
        let own = self.choose_own(&vips);
        self.vips
            .report_unclaimed(by_hand, |addr| state.is_local(addr) || own.contains(&addr));
        reached.extend(&vips);
        spec.own_vips.clone_from(&own);
        spec.quiet_vips = self
            .announced
            .addresses()
            .filter(|addr| own.contains(addr))
            .collect();
        self.next.plan_differs = true;
        self.changed = None;
        self.updated = self.dataplane.now();
        let taken = self.interception.update(&spec);
        if taken.is_err() {
            // The shield is unchanged after a failure, and workers must use the same specification.
            let before = &self.intercept;
            spec.services.clone_from(&before.services);
            spec.nat_servers.clone_from(&before.nat_servers);
            spec.own_vips.clone_from(&before.own_vips);
            spec.quiet_vips.clone_from(&before.quiet_vips);
            spec.local_addresses.clone_from(&before.local_addresses);
            spec.every_icmp = before.every_icmp;
            self.changed = Some(self.updated);
        }
        self.intercept = Arc::new(spec);
        self.set_reached(reached, &vips, &own);
        self.set_quiet();
        self.set_own(
            &own.into_iter()
                .filter(|&addr| !self.announced.has(addr))
                .collect(),
        );
        if let Some(nodes) = &mut self.local_nodes {
            let device = self.tables.ifindex(PortId::HOST).unwrap_or(0);
            nodes.follow(&self.intercept.local_nodes, device);
        }
        self.follow_loopback(None);
        vips.retain(|&addr| !self.announced.has(addr));
        self.vips.set_services(&vips, &self.tables);
        self.neighbours
            .set_servers(servers, &self.tables, &mut self.netlink);
        self.next.differs = true;
        taken
    }

    /// Reads the control half in pieces, between which workers can lock it for packets of new
    /// connections.
    fn read_control(&mut self) -> Wanted {
        let (keys, helped) = {
            let control = self.dataplane.control();
            self.next.marks = Some(control.marks().clone());
            self.own_vips = control.own_vips().iter().copied().collect();
            let (pool, hairpin) = control.local_pool();
            let addresses: Vec<IpAddr> = pool.iter().map(|local| local.addr).collect();
            // Removed addresses count as used until the workers report that no connection uses
            // them.
            self.pool_in_use.append(&mut self.pool.addresses);
            self.pool = LocalPool { addresses, hairpin };
            let keys: Vec<ServiceKey> = control.services().map(Service::key).collect();
            (keys, control.ftp_ports().to_vec())
        };
        self.ask_for_pool();
        let mut wanted = Wanted {
            spec: Intercept::default(),
            by_hand: HashSet::new(),
            servers: HashSet::new(),
        };
        let mut rest = &keys[..];
        while !rest.is_empty() {
            let control = self.dataplane.control();
            let mut seen = 0;
            while seen < PIECE
                && let Some((key, others)) = rest.split_first()
            {
                rest = others;
                seen += 1 + self.read_service(&control, key, &helped, &mut wanted);
            }
        }
        let (has_backup, every_icmp) = {
            let control = self.dataplane.control();
            (control.backup().is_some(), control.sysctls().schedule_icmp)
        };
        wanted.spec.every_icmp = every_icmp;
        if has_backup {
            wanted.spec.add_every_port();
        }
        // Without services, packets of old connections are not forwarded either (the kernel removes
        // its hooks).
        if !keys.is_empty() {
            self.read_removed(&helped, &mut wanted);
        }
        let local = self.local_addresses();
        let local = local.filter(|&addr| self.tables.state.is_local(addr));
        wanted.spec.local_addresses = local.collect();
        wanted
    }

    /// Reads one service. Returns the number of its servers.
    fn read_service(
        &self,
        control: &Control,
        key: &ServiceKey,
        helped: &[u16],
        wanted: &mut Wanted,
    ) -> usize {
        let Some(service) = control.service(key) else {
            return 0;
        };
        wanted.spec.add_service(service, helped);
        if let (None, ServiceKey::Address { addr, .. }) = (service.owner(), key) {
            wanted.by_hand.insert(addr.ip());
        }
        for server in service.servers() {
            self.read_server(*key, server, helped, wanted);
        }
        service.servers().len()
    }

    fn read_server(&self, key: ServiceKey, server: &Server, helped: &[u16], wanted: &mut Wanted) {
        let addr = server.addr();
        wanted
            .spec
            .add_endpoint(key, server, helped, &self.intercept);
        wanted.servers.insert(addr.ip());
        if server.forwarding().translates() && self.tables.state.is_local(addr.ip()) {
            wanted.spec.add_local_node(key, addr, helped);
        }
    }

    /// Reads removed servers that have connections.
    fn read_removed(&self, helped: &[u16], wanted: &mut Wanted) {
        let mut start = 0;
        loop {
            let control = self.dataplane.control();
            if !control.has_removed() || start >= control.endpoint_places() {
                return;
            }
            for (key, server) in control.endpoints_in(start..start + PIECE) {
                if !server.is_available() {
                    self.read_server(key, server, helped, wanted);
                }
            }
            start += PIECE;
        }
    }

    /// Adds the packets of rules for marks to `spec`, and the single destination addresses of these
    /// rules to `vips`. Returns all their destination addresses. Rules that pass packets to the
    /// host do not count.
    fn add_marks(&self, spec: &mut Intercept, vips: &mut HashSet<IpAddr>) -> HashSet<IpAddr> {
        let mut reached = HashSet::new();
        let rules = self.next.marks.iter().flat_map(|marks| marks.iter());
        let rules = rules.filter(|rule| rule.action != MarkAction::Host);
        let helped = self.dataplane.control().ftp_ports().to_vec();
        spec.add_marked(rules.clone(), &helped);
        for rule in rules {
            let addresses: Vec<IpAddr> = rule.addresses().collect();
            if let [single] = addresses[..] {
                vips.insert(single);
            }
            reached.extend(addresses);
        }
        reached
    }

    /// Returns the dataplane's own addresses: the configured addresses, addresses that are
    /// announced by routes, the local addresses of full NAT, and with `--own-vips` all virtual
    /// addresses. Excludes addresses of the host.
    fn choose_own(&self, vips: &HashSet<IpAddr>) -> HashSet<IpAddr> {
        let all = self.setup.own_all_vips.then_some(vips);
        self.own_vips
            .iter()
            .chain(all.into_iter().flatten())
            .copied()
            .chain(self.announced.addresses())
            .chain(self.local_addresses())
            .filter(|&addr| !self.tables.state.is_local(addr))
            .collect()
    }

    /// Sets the virtual addresses of the next snapshot. With the TUN backend, all of them count as
    /// own: the host routes them into the device, so the dataplane answers packets to their unused
    /// ports.
    fn set_reached(
        &mut self,
        reached: HashSet<IpAddr>,
        vips: &HashSet<IpAddr>,
        own: &HashSet<IpAddr>,
    ) {
        let routed = self.interception.is_routed();
        let answered = vips.iter().filter(|_| routed).chain(own).copied().collect();
        let reached = reached.into_iter().collect();
        let tables = &mut self.tables;
        if tables.vips != reached || tables.own != answered {
            tables.vips = reached;
            tables.own = answered;
            tables.follow_vips();
            tables.follow_own();
            self.next.tables_differ = true;
        }
    }

    /// Sets the addresses of the next snapshot for which the dataplane does not answer ARP and
    /// neighbour discovery, because they are announced by routes.
    fn set_quiet(&mut self) {
        let quiet = self.announced.addresses().collect();
        if self.tables.quiet != quiet {
            self.tables.quiet = quiet;
            self.next.tables_differ = true;
        }
    }

    /// Routes this host's packets to new own addresses into the dataplane, and announces these
    /// addresses. Removes the routes of addresses that are no longer own ones, and no longer
    /// answers ARP or neighbour discovery for them.
    pub(super) fn set_own(&mut self, own: &HashSet<IpAddr>) {
        let before: HashSet<IpAddr> = self.vips.own().collect();
        let new: Vec<IpAddr> = own.difference(&before).copied().collect();
        for &addr in &new {
            self.add_own(addr);
        }
        let gone: Vec<IpAddr> = before.difference(own).copied().collect();
        if gone.is_empty() {
            return;
        }
        if !self.interception.is_routed() {
            let device = self.device();
            for &addr in &gone {
                if let Err(error) = self.netlink.delete_host_route(addr, device) {
                    warn!("{error}");
                }
            }
        }
        self.vips.remove(&gone, &self.tables);
    }

    fn add_own(&mut self, addr: IpAddr) {
        let device = self.device();
        if !self.interception.is_routed()
            && let Err(error) = self.netlink.add_host_route(addr, device)
        {
            warn!("this host itself cannot reach {addr}: {error}");
        }
        self.vips.add(addr, &self.tables);
    }

    /// Applies added and edited services and servers, and removes nothing. While a synchronisation
    /// backup runs, applies the whole configuration instead.
    fn update_some(&mut self, touched: &[Touched]) -> Result<(), String> {
        self.changed = Some(self.dataplane.now());
        let (helped, has_backup) = {
            let control = self.dataplane.control();
            (control.ftp_ports().to_vec(), control.backup().is_some())
        };
        if has_backup {
            return self.update_all();
        }
        let mut more = Intercept::default();
        let mut servers = HashSet::new();
        for touched in touched {
            match *touched {
                Touched::Service(key, persistent, _) => more.add_key(key, &helped, persistent),
                Touched::Server(key, addr, method) => {
                    servers.insert(addr.ip());
                    if method.translates() {
                        more.add_server(key, addr, &helped);
                        if self.tables.state.is_local(addr.ip()) {
                            more.add_local_node(key, addr, &helped);
                        }
                    }
                }
            }
        }
        self.add_vips(&mut more, touched);
        let taken = self.interception.extend(&more);
        if taken.is_ok() {
            self.follow_loopback(Some(&more));
            let spec = Arc::make_mut(&mut self.intercept);
            spec.services.extend(more.services);
            spec.nat_servers.extend(more.nat_servers);
            spec.own_vips.extend(more.own_vips);
        }
        if !more.local_nodes.is_empty() {
            let device = self.device();
            let spec = Arc::make_mut(&mut self.intercept);
            spec.local_nodes.extend(more.local_nodes);
            if let Some(nodes) = &mut self.local_nodes {
                nodes.follow(&self.intercept.local_nodes, device);
            }
        }
        self.neighbours
            .add_servers(servers, &self.tables, &mut self.netlink);
        taken
    }

    /// Adds the addresses of new services to the next snapshot. With `--own-vips`, also makes them
    /// own addresses of the dataplane.
    fn add_vips(&mut self, more: &mut Intercept, touched: &[Touched]) {
        let new: Vec<IpAddr> = more
            .services
            .addresses()
            .filter(|addr| !self.tables.vips.contains(addr))
            .collect();
        if new.is_empty() {
            return;
        }
        let routed = self.interception.is_routed();
        let by_hand: HashSet<IpAddr> = touched
            .iter()
            .filter_map(|touched| match touched {
                Touched::Service(ServiceKey::Address { addr, .. }, _, false) => Some(addr.ip()),
                _ => None,
            })
            .collect();
        let state = &self.tables.state;
        self.interception.complain_also_of(&new, state);
        self.next.tables_differ = true;
        self.next.plan_differs = true;
        for addr in new {
            let quiet = self.announced.has(addr);
            let own = self.setup.own_all_vips && !quiet && !self.tables.state.is_local(addr);
            self.tables.add_vip(addr);
            if own || routed {
                self.tables.own.insert(addr);
                self.tables.follow_own();
            }
            if own {
                more.own_vips.insert(addr);
                if !self.vips.answers_for(addr) {
                    self.add_own(addr);
                }
            }
            if by_hand.contains(&addr) {
                let tables = &self.tables;
                self.vips.report_also_unclaimed(addr, |addr| {
                    tables.state.is_local(addr) || tables.own.contains(&addr)
                });
            }
            if quiet {
                continue;
            }
            self.vips.add_service(addr);
        }
    }
}

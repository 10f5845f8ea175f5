//! The packet worker: one thread that owns the ports, the shard and everything that follows the kernel.
//!
//! ```text
//! wait ─▶ each port: receive a batch ─▶ pipeline ─▶ requests, send ─▶ kernel's events ─▶ commands ─▶ timers ─▶ wait
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lvs_core::api::{Conflict, Failure, Info, InterfaceInfo, LocalPool, ReasonCount};
use lvs_core::mark::MarkAction;
use lvs_core::{Instant, ServiceKey, Shard};
use tracing::{debug, error, info, warn};

use super::access::{Access, HOP_PORT, HOST_PORT, Wish};
use super::capture::{self, Capture, Shown};
use super::decider::{Decider, reason};
use super::local::{self, LocalNodes};
use super::network::{Network, is_usable};
use super::remedies;
use super::shared::{self, Command, Shared};
use super::trunks::Trunks;
use super::{Backend, PacketHook, StartError};
use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::io::af_packet::AfPacket;
use crate::io::vlan::Wanted;
use crate::io::{BATCH, PacketIo};
use crate::mld::{self, Change};
use crate::ndp;
use crate::net::{Net, PortId, PortInfo};
use crate::netlink::{Netlink, RouteKind};
use crate::pipeline::{Env, Output, Pipeline, Request, Settings};
use crate::shield_spec::{LocalClient, ShieldSpec};
use crate::sys::Poller;
use crate::wire::Mac;

/// Batches of one port before the others have their turn.
const BATCHES_PER_TURN: usize = 4;
/// Connections whose end is looked at between two batches.
const EXPIRY_BUDGET: usize = 1024;
/// Connections that are looked at between two batches after a server went down; a sixteenth of them may be reset.
const DOWN_BUDGET: usize = 4096;
/// How long packets have their turn between two such rounds.
const DOWN_PERIOD: Duration = Duration::from_millis(1);
/// Between two rounds of housekeeping.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// Between two questions after the link-layer address of a server's next hop. The kernel never sees our frames, and would
/// let what it knows grow stale.
const NEIGHBOUR_PERIOD: Duration = Duration::from_secs(20);
/// Between two doubts about one neighbour.
const CONFIRM_PERIOD: Duration = Duration::from_secs(1);
/// Below so many services and servers, everything is gone through at every change: it takes less than a millisecond.
const FEW: usize = 100;
/// How long nothing has changed before everything is gone through again.
const QUIET: Duration = Duration::from_secs(1);
/// How often everything is gone through while removed servers may still have connections.
const REMOVED_PERIOD: Duration = Duration::from_secs(10);
/// Between two lines in the log about the same trouble.
const COMPLAINT_PERIOD: Duration = Duration::from_secs(60);
/// How often an own address is announced, one second apart: the first announcement may be lost.
const ANNOUNCEMENTS: u8 = 3;
/// How often it is asked who else has a service's address.
const PROBES: u8 = 2;

/// How the worker is to run.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) backend: Backend,
    /// The interfaces to use; empty for all that are fit.
    pub(super) interfaces: Vec<Wanted>,
    /// Own every virtual address that the host does not have.
    pub(super) own_all_vips: bool,
    /// How the packet path is to behave.
    pub(super) settings: Settings,
    pub(super) hook: Option<Box<dyn PacketHook>>,
}

impl Setup {
    /// Whether an interface was asked for by its name.
    fn names(&self, interface: &str) -> bool {
        self.interfaces
            .iter()
            .any(|wanted| wanted.name == interface)
    }
}

/// An interface in use.
struct Attached {
    io: AfPacket,
    name: Arc<str>,
    down: bool,
    /// What comes in there was inside of packets that IPVS does not balance.
    decapsulates: bool,
}

impl Attached {
    fn listen(&self, addr: IpAddr, member: bool) {
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
fn decapsulates(kind: Option<&str>) -> bool {
    matches!(kind, Some("gretap" | "ip6gretap" | "erspan" | "ip6erspan"))
}

/// Everything that one thread of packet processing owns.
pub(super) struct Worker {
    shared: Arc<Shared>,
    commands: mpsc::Receiver<Command>,
    setup: Setup,
    decider: Decider,
    pipeline: Pipeline,
    output: Output,
    frames: Vec<Frame>,
    access: Access,
    host_name: Arc<str>,
    /// By port; the host's place stays empty.
    ports: Vec<Option<Attached>>,
    network: Network,
    netlink: Netlink,
    trunks: Trunks,
    hidden: ShieldSpec,
    pmtu_disc: bool,
    ignore_tunneled: bool,
    /// Asked for by `vips.own`.
    wanted_vips: HashSet<IpAddr>,
    /// Addresses of services that were said to be nobody's.
    unclaimed: HashSet<IpAddr>,
    /// The local addresses of full NAT that were asked for.
    wanted_pool: LocalPool,
    /// Where packets come as copies; a host that routes them knows the way.
    local_nodes: Option<LocalNodes>,
    /// Announcements that own addresses still get.
    announcing: HashMap<IpAddr, u8>,
    /// Questions who else has the services' addresses, still to be asked.
    probing: HashMap<IpAddr, u8>,
    /// The servers' next hops, whose link-layer addresses are kept fresh.
    next_hops: HashSet<(u32, IpAddr)>,
    next_refresh: Instant,
    /// When the kernel was last told to ask neighbours whether they are still there, and those that it has given up and was
    /// asked after once more.
    confirmed: HashMap<(u32, IpAddr), Instant>,
    given_up: HashSet<(u32, IpAddr)>,
    /// Addresses of services that another host claims, who, and when that was last said.
    conflicts: HashMap<IpAddr, (Mac, Instant)>,
    refused: u64,
    /// Since when something has changed that only [`follow_control`](Self::follow_control) takes in fully.
    changed: Option<Instant>,
    /// When everything was last gone through.
    followed: Instant,
    /// Resets sent since the first of the servers went down whose connections are being ended.
    resets: usize,
    /// Connections refused for a full table when that was last said, and when it may be said again.
    full: (u64, Instant),
    captures: Vec<Capture>,
    next_housekeeping: Instant,
}

impl Worker {
    /// Attaches to the network. Nothing is hidden from the host yet.
    pub(super) fn new(
        shared: Arc<Shared>,
        commands: mpsc::Receiver<Command>,
        shard: Shard,
        mut setup: Setup,
    ) -> Result<Self, StartError> {
        let access = Access::open(setup.backend)?;
        let local_nodes = match access {
            Access::Copies { .. } => Some(LocalNodes::open().map_err(StartError::Requests)?),
            Access::Routed { .. } => None,
        };
        let (mut netlink, mut state) = Netlink::open()?;
        let trunks = Trunks::make(&setup.interfaces, &mut netlink, &mut state)?;
        for Wanted { name, .. } in &setup.interfaces {
            match state.link_by_name(name) {
                None => return Err(StartError::NoInterface(name.clone())),
                Some(link) if !access.is_routed() && !link.is_arp_capable() => {
                    return Err(StartError::NotEthernet(name.clone()));
                }
                Some(_) => {}
            }
        }
        let hook = setup.hook.take();
        let midnight = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .saturating_sub(shared.now().saturating_since(Instant::ZERO));
        let mut worker = Self {
            decider: Decider::new(shared.clone(), shard, hook),
            shared,
            commands,
            pipeline: Pipeline::new(setup.settings),
            setup,
            output: Output::new(),
            frames: (0..BATCH).map(|_| Frame::new()).collect(),
            network: Network::new(state),
            ports: vec![None],
            host_name: Arc::from(access.name()),
            access,
            netlink,
            trunks,
            hidden: ShieldSpec::default(),
            pmtu_disc: true,
            ignore_tunneled: false,
            wanted_vips: HashSet::new(),
            unclaimed: HashSet::new(),
            wanted_pool: LocalPool::default(),
            local_nodes,
            announcing: HashMap::new(),
            probing: HashMap::new(),
            next_hops: HashSet::new(),
            next_refresh: Instant::ZERO,
            confirmed: HashMap::new(),
            given_up: HashSet::new(),
            conflicts: HashMap::new(),
            refused: 0,
            changed: None,
            followed: Instant::ZERO,
            resets: 0,
            full: (0, Instant::ZERO),
            captures: Vec::new(),
            next_housekeeping: Instant::ZERO,
        };
        let info = PortInfo {
            mac: Mac([0; 6]),
            mtu: 65_535,
            ethernet: false,
            offload: true,
        };
        worker
            .network
            .set_port(HOST_PORT, worker.access.ifindex(), info, true);
        if worker.access.is_routed() {
            let ifindex = worker.access.ifindex();
            worker.network.set_port(HOP_PORT, ifindex, info, false);
            worker.network.route_over(HOP_PORT);
            worker.hidden.everything = true;
        }
        worker.pipeline.midnight = midnight;
        worker.attach_links(true)?;
        worker.access.check_host()?;
        worker.decider.follow_addresses(&worker.network.state);
        Ok(worker)
    }

    /// Processes packets until the engine is told to stop.
    pub(super) fn run(mut self) {
        let mut poller = Poller::new();
        let mut ports = Vec::new();
        let mut trunks = Vec::new();
        while !self.shared.is_stopping() {
            poller.clear();
            trunks.clear();
            trunks.extend(self.trunks.fds().map(|fd| poller.add(fd)));
            let wake = poller.add(self.shared.wake().as_fd());
            let netlink = poller.add(self.netlink.fd());
            let host = self.access.fd().map(|fd| poller.add(fd));
            ports.clear();
            ports.extend(self.ports.iter().zip((0..).map(PortId)).filter_map(
                |(attached, port)| Some((poller.add(attached.as_ref()?.io.fd()?), port)),
            ));
            if let Err(error) = poller.wait(Some(self.until_next_timer())) {
                error!("cannot wait for packets: {error}");
                break;
            }
            if trunks.iter().any(|&place| poller.is_ready(place)) {
                self.trunks.relay(&mut self.frames);
            }
            for &(place, port) in &ports {
                if poller.is_ready(place) {
                    self.receive(port);
                }
            }
            if host.is_some_and(|place| poller.is_ready(place)) {
                self.receive(HOST_PORT);
            }
            if poller.is_ready(netlink) {
                self.follow_kernel();
            }
            if poller.is_ready(wake) && self.shared.wake().take() {
                while let Ok(command) = self.commands.try_recv() {
                    self.obey(command);
                }
            }
            self.timers();
        }
        self.withdraw();
    }

    fn until_next_timer(&self) -> Duration {
        let now = self.shared.now();
        if self.decider.shard.has_down() {
            return DOWN_PERIOD;
        }
        let next = self
            .decider
            .shard
            .next_wakeup()
            .map_or(self.next_housekeeping, |at| at.min(self.next_housekeeping));
        // Rounded up: a wake-up a moment too early would find nothing due.
        next.saturating_since(now) + Duration::from_millis(1)
    }

    // --- packets ----------------------------------------------------------------------------------------------------

    fn receive(&mut self, port: PortId) {
        for _ in 0..BATCHES_PER_TURN {
            let (port, received) = match self.ports.get_mut(port.index()) {
                _ if port == HOST_PORT => self.access.recv(&mut self.frames),
                Some(Some(attached)) => (port, attached.io.recv(&mut self.frames)),
                _ => return,
            };
            let count = match received {
                Ok(count) => count,
                Err(error) => return self.port_failed(port, &error),
            };
            if count == 0 {
                return;
            }
            let now = self.shared.now();
            self.decider.interface = self.interface_of(port);
            self.decider.ignores = self.ignore_tunneled && self.decapsulates(port);
            if !self.captures.is_empty() {
                self.process_shown(port, count, now);
                if count < BATCH {
                    return;
                }
                continue;
            }
            let env = Env {
                net: &self.network,
                shield: &self.hidden,
                pmtu_disc: self.pmtu_disc,
            };
            self.pipeline.process(
                port,
                &mut self.frames[..count],
                &env,
                &mut self.decider,
                now,
                &mut self.output,
            );
            self.flush();
            if count < BATCH {
                return;
            }
        }
    }

    /// Processes a batch frame by frame, and shows each to those who want to see it.
    fn process_shown(&mut self, port: PortId, count: usize, now: Instant) {
        let mut captures = std::mem::take(&mut self.captures);
        self.decider.tells = true;
        for at in 0..count {
            let bytes = self.frames[at].bytes().to_vec();
            let dropped = self.pipeline.counters.dropped;
            let env = Env {
                net: &self.network,
                shield: &self.hidden,
                pmtu_disc: self.pmtu_disc,
            };
            self.pipeline.process(
                port,
                &mut self.frames[at..=at],
                &env,
                &mut self.decider,
                now,
                &mut self.output,
            );
            self.flush();
            let told = self.decider.take_told();
            let lost = FrameDrop::ALL
                .iter()
                .find(|drop| self.pipeline.counters.dropped_for(**drop) != dropped[drop.index()]);
            let (verdict, dropped) = match (&told, lost) {
                (Some((_, verdict)), None | Some(FrameDrop::Verdict | FrameDrop::Rejected)) => {
                    capture::describe(verdict)
                }
                (_, Some(drop)) => (
                    format!("dropped ({}): {}", drop.name(), drop.describe().trim()),
                    true,
                ),
                (None, None) => ("not for the director".to_owned(), false),
            };
            let shown = Shown {
                interface: self.name_of(port),
                ethernet: self.network.port(port).is_some_and(|port| port.ethernet),
                frame: &bytes,
                verdict: &verdict,
                dropped,
            };
            let tuple = told.map(|(tuple, _)| tuple);
            captures.retain_mut(|capture| capture.show(tuple, &shown));
        }
        self.decider.tells = !captures.is_empty();
        self.captures = captures;
    }

    /// Does what the packet path asks for, and sends what it has made.
    fn flush(&mut self) {
        let mut clients = Vec::new();
        for request in std::mem::take(&mut self.output.requests) {
            self.serve(request, &mut clients);
        }
        if !clients.is_empty() {
            self.hide_local_clients(clients);
        }
        for (port, frames) in self.output.queues() {
            self.refused += match self.ports.get_mut(port.index()) {
                Some(Some(attached)) => attached.io.send(frames),
                _ => self.access.send(port, frames),
            } as u64;
        }
        self.output.recycle();
    }

    /// Serves a request; those to hide local clients are gathered, to be one change of the shield.
    fn serve(&mut self, request: Request, clients: &mut Vec<LocalClient>) {
        match request {
            Request::Resolve(port, addr) => {
                let Some(ifindex) = self.network.ifindex(port) else {
                    return;
                };
                if let Err(error) = self.netlink.resolve(&self.network.state, ifindex, addr) {
                    debug!(%addr, "{error}");
                    self.pipeline.waiting.give_up(port, addr);
                }
            }
            Request::Confirm(port, addr) => self.confirm(port, addr),
            Request::ListenerQuery(port, query) => self.answer_query(port, query),
            Request::ShieldLocalClient(client) => clients.push(client),
            Request::AddressConflict { port, addr, mac } => {
                self.report_conflict(port, addr, mac);
            }
        }
    }

    /// Has the kernel ask a neighbour whether it is still there, at most once in [`CONFIRM_PERIOD`].
    fn confirm(&mut self, port: PortId, addr: IpAddr) {
        let now = self.shared.now();
        let Some(ifindex) = self.network.ifindex(port) else {
            return;
        };
        self.confirmed
            .retain(|_, then| now < *then + CONFIRM_PERIOD);
        if self.access.is_routed() || self.confirmed.contains_key(&(ifindex, addr)) {
            return;
        }
        self.confirmed.insert((ifindex, addr), now);
        if let Err(error) = self.netlink.confirm(&self.network.state, ifindex, addr) {
            debug!("{error}");
        }
    }

    /// Tells a router, or a switch, that the groups of own addresses are listened to.
    fn answer_query(&mut self, port: PortId, query: mld::Query) {
        let mut groups = groups_of(self.announcing.keys());
        if let Some(group) = query.group {
            groups.retain(|&own| own == group);
        }
        self.report_groups(port, &groups, Change::Listening, query.v1);
    }

    fn report_groups(&mut self, port: PortId, groups: &[Ipv6Addr], change: Change, v1: bool) {
        let Some(ifindex) = self.network.ifindex(port).filter(|_| !groups.is_empty()) else {
            return;
        };
        let source = self.network.state.addresses(ifindex);
        let source = source.filter(|address| address.is_preferred());
        let source = source.filter_map(|address| match address.ip {
            IpAddr::V6(addr) => addr.is_unicast_link_local().then_some(addr),
            IpAddr::V4(_) => None,
        });
        let source = source.last().unwrap_or(Ipv6Addr::UNSPECIFIED);
        let (net, out) = (&self.network, &mut self.output);
        self.pipeline
            .report_listening(port, source, groups, change, v1, net, out);
    }

    /// Another host answers for an address of a service: said once a minute for each address.
    fn report_conflict(&mut self, port: PortId, addr: IpAddr, mac: Mac) {
        // An address that neither the host nor the engine has at the moment may well be another director's.
        if !self.network.is_local(addr) && !self.network.is_own_vip(addr) {
            return;
        }
        let ours = self
            .network
            .state
            .links()
            .any(|link| link.mac == Some(mac.0));
        let now = self.shared.now();
        let said = self.conflicts.get(&addr);
        if ours || said.is_some_and(|&(_, said)| now < said + COMPLAINT_PERIOD) {
            return;
        }
        self.conflicts.insert(addr, (mac, now));
        error!(
            "{mac} on {} answers for {addr} too, an address of this director's services: clients reach one or the other. \
             Take the address from that host; if it is a real server that needs it (direct routing, tunnels), put it on \
             lo there{}",
            self.name_of(port),
            // A host never answers neighbour discovery for what is on its lo.
            if addr.is_ipv4() {
                " and set net.ipv4.conf.all.arp_ignore=1 and arp_announce=2"
            } else {
                ""
            }
        );
    }

    fn hide_local_clients(&mut self, mut clients: Vec<LocalClient>) {
        clients.retain(|client| !self.hidden.local_clients.contains(client));
        match self.access.add_local_clients(&clients) {
            Ok(()) => self.hidden.local_clients.extend(clients),
            Err(error) => {
                warn!("connections of this host's own to virtual addresses will fail: {error}");
            }
        }
    }

    fn timers(&mut self) {
        let now = self.shared.now();
        self.decider.shard.advance(now, EXPIRY_BUDGET);
        if self.decider.shard.has_down() {
            self.end_down(now);
        }
        if now < self.next_housekeeping {
            return;
        }
        self.next_housekeeping = now + HOUSEKEEPING;
        self.decider.housekeep(now, &mut self.next_housekeeping);
        self.pipeline.expire(now);
        self.forget_local_clients();
        let quiet = self.changed.is_some_and(|since| since + QUIET <= now);
        // Connections of removed servers may have ended: what they needed hidden need not be hidden any more.
        let retired = |addr| !self.wanted_pool.addresses.contains(&addr);
        let removed = || {
            self.decider.shard.local_addresses().any(retired) || self.shared.control().has_removed()
        };
        if quiet || (self.followed + REMOVED_PERIOD <= now && removed()) {
            self.follow_or_warn();
        }
        if self.next_refresh <= now {
            self.next_refresh = now + NEIGHBOUR_PERIOD;
            self.refresh_neighbours(&self.next_hops.clone());
        }
        self.announce();
        self.complain_of_full_table(now);
    }

    /// Goes on ending the connections of servers that went down.
    fn end_down(&mut self, now: Instant) {
        let resets = self.decider.shard.end_down(now, DOWN_BUDGET);
        let env = Env {
            net: &self.network,
            shield: &self.hidden,
            pmtu_disc: self.pmtu_disc,
        };
        for reset in &resets {
            self.pipeline.send_reset(reset, &env, now, &mut self.output);
        }
        self.flush();
        self.resets += resets.len();
        if !self.decider.shard.has_down() {
            let sent = std::mem::take(&mut self.resets);
            info!("ended the connections of servers that went down; {sent} TCP resets sent");
        }
    }

    fn complain_of_full_table(&mut self, now: Instant) {
        let (said, again) = self.full;
        let refused = self.decider.refused_for_room();
        if refused > said && again <= now {
            warn!(
                "the table of connections is full: {} packets that would have opened one were dropped. It holds {}; \
                 --max-connections raises that",
                refused - said,
                self.decider.shard.capacity(),
            );
            self.full = (refused, now + COMPLAINT_PERIOD);
        }
    }

    /// Shows the host again what clients on it no longer use.
    fn forget_local_clients(&mut self) {
        let shard = &self.decider.shard;
        let ended: Vec<LocalClient> = self
            .hidden
            .local_clients
            .iter()
            .filter(|client| !shard.contains_reply(client.protocol, client.server, client.local))
            .copied()
            .collect();
        if ended.is_empty() {
            return;
        }
        if let Err(error) = self.access.remove_local_clients(&ended) {
            warn!("{error}");
        }
        for client in &ended {
            self.hidden.local_clients.remove(client);
        }
    }

    // --- what the control half wants ----------------------------------------------------------------------------------

    fn obey(&mut self, command: Command) {
        // Whoever asked may have given up waiting; then nobody needs the answer.
        match command {
            Command::Follow(change, reply) => {
                let done = match change {
                    shared::Change::Service(key) => self.follow_service(&key),
                    shared::Change::Any => self.follow_control(),
                };
                let _ = reply.send(done);
            }
            Command::OwnVips(addresses, reply) => {
                self.wanted_vips = addresses.into_iter().collect();
                let done = self.follow_control();
                let _ = reply.send(done);
            }
            Command::LocalPool(pool, reply) => {
                let _ = reply.send(self.set_local_pool(pool));
            }
            Command::LocalInfo(reply) => {
                let control = self.shared.control();
                let _ = reply.send(local::info(&control, &self.decider.shard));
            }
            Command::Connections(slots, reply) => {
                let _ = reply.send(self.decider.connections(slots));
            }
            Command::IsBroadcast(addr, reply) => {
                let route = self.network.state.lookup(addr);
                let _ = reply.send(route.is_some_and(|hit| hit.kind == RouteKind::Broadcast));
            }
            Command::Explain(question, reply) => {
                let _ = reply.send(self.decider.explain(&question));
            }
            Command::Capture(filter, out) => self.captures.push(Capture::new(filter, out)),
            Command::Marked(reply) => {
                let _ = reply.send(self.decider.marked.clone());
            }
            Command::Interface(name, reply) => {
                let link = self.network.state.link_by_name(&name);
                let _ = reply.send(link.map(|link| link.mtu));
            }
            // Whoever asks is told by the closed channel; only an engine without interfaces gets these.
            Command::Test(..) => {}
            Command::Permits(wish, reply) => {
                let _ = reply.send(self.access.permits(&wish, &self.network.state));
            }
            Command::Info(reply) => {
                let _ = reply.send(self.info());
            }
            Command::Reasons(reply) => {
                let _ = reply.send(self.reasons());
            }
        }
    }

    /// Lets other addresses stand for clients.
    fn set_local_pool(&mut self, wanted: LocalPool) -> Result<(), Failure> {
        for &addr in &wanted.addresses {
            self.access
                .permits(&Wish::Local(addr), &self.network.state)?;
        }
        let pool = local::pool(&wanted.addresses, |addr| self.network.state.is_local(addr));
        self.shared
            .control()
            .set_local_pool(pool, wanted.hairpin)
            .map_err(Failure::from)?;
        self.wanted_pool = wanted;
        self.follow_control()
    }

    /// The local addresses of full NAT: those asked for, and those that connections still use.
    fn local_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
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
            hidden = ShieldSpec::of(&control, &self.hidden);
            let is_local = |addr| self.network.state.is_local(addr);
            hidden.local_nodes = ShieldSpec::local_nodes_of(&control, is_local);
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
            hidden.hide_marked(rule);
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

    fn follow_or_warn(&mut self) {
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
            more = ShieldSpec::of_service(service, control.ftp_ports());
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
    fn route_own(&mut self, own: &HashSet<IpAddr>) {
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
    fn listen(&self, addr: IpAddr, member: bool) {
        for attached in self.ports.iter().flatten() {
            attached.listen(addr, member);
        }
    }

    /// Asks who else has the services' addresses, and announces own ones, as often as is still to be done.
    fn announce(&mut self) {
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
    fn refresh_neighbours(&mut self, next_hops: &HashSet<(u32, IpAddr)>) {
        for &(ifindex, addr) in next_hops {
            if let Err(error) = self.netlink.resolve(&self.network.state, ifindex, addr) {
                debug!("{error}");
            }
        }
    }

    // --- what the kernel tells ----------------------------------------------------------------------------------------

    fn follow_kernel(&mut self) {
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
            // An address that comes to the host, or leaves it, has other ports than before.
            if let Err(failure) = self.set_local_pool(self.wanted_pool.clone()) {
                warn!("{}", failure.message);
                self.follow_or_warn();
            }
        } else if changes.routes {
            // The packet path follows at once; the servers' next hops can wait for the end of a storm.
            self.changed.get_or_insert(self.shared.now());
        }
        let env = Env {
            net: &self.network,
            shield: &self.hidden,
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
    fn attach_links(&mut self, starting: bool) -> Result<(), StartError> {
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

    fn port_failed(&mut self, port: PortId, error: &io::Error) {
        // Whether the interface is down or gone is told by the kernel's events; here it is only logged.
        debug!("{}: {error}", self.name_of(port));
    }

    fn interface_of(&self, port: PortId) -> Arc<str> {
        match self.ports.get(port.index()) {
            Some(Some(attached)) => attached.name.clone(),
            _ => self.host_name.clone(),
        }
    }

    fn decapsulates(&self, port: PortId) -> bool {
        let attached = self.ports.get(port.index()).and_then(Option::as_ref);
        attached.is_some_and(|attached| attached.decapsulates)
    }

    fn name_of(&self, port: PortId) -> &str {
        match self.ports.get(port.index()) {
            Some(Some(attached)) => &attached.name,
            _ => self.access.name(),
        }
    }

    /// Leaves the host as it was before. What is not done here goes with the process's file descriptors.
    fn withdraw(&mut self) {
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

    // --- what others want to know -------------------------------------------------------------------------------------

    /// What the engine answers for as virtual addresses; those that stand for clients are not.
    fn own_vips(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let local: HashSet<IpAddr> = self.local_addresses().collect();
        let own = self.hidden.own_vips.iter().copied();
        own.filter(move |addr| self.network.is_vip(*addr) || !local.contains(addr))
    }

    fn info(&mut self) -> Info {
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
            too_big: self.pipeline.misfits.all(),
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

    fn reasons(&mut self) -> Vec<ReasonCount> {
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
        let limited = self.pipeline.rate_limit.suppressed;
        all.push(reason("drop", limited, remedies::ICMP_LIMITED));
        let incomplete = self.pipeline.reassembler.expired;
        all.push(reason("drop", incomplete, remedies::INCOMPLETE));
        let tagged = self.pipeline.counters.tagged + self.trunks.strangers();
        all.push(reason("host", tagged, remedies::VLAN));
        let waited = self.pipeline.waiting.dropped;
        all.push(reason("drop", waited, remedies::NO_NEIGHBOUR));
        all
    }
}

/// The groups in which whoever has these addresses is asked for, each once.
fn groups_of<'a>(addresses: impl Iterator<Item = &'a IpAddr>) -> Vec<Ipv6Addr> {
    let groups: BTreeSet<Ipv6Addr> = addresses
        .filter_map(|addr| match addr {
            IpAddr::V6(addr) => Some(ndp::solicited_node(*addr)),
            IpAddr::V4(_) => None,
        })
        .collect();
    groups.into_iter().collect()
}

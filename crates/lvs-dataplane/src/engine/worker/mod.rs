//! The packet worker: one thread that owns the ports, the shard and everything that follows the kernel.
//!
//! ```text
//! wait ─▶ each port: receive a batch ─▶ pipeline ─▶ requests, send ─▶ kernel's events ─▶ commands ─▶ timers ─▶ wait
//! ```

mod follow;
mod links;
mod report;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lvs_core::api::LocalPool;
use lvs_core::{Instant, Shard};
use tracing::{debug, error, info, warn};

use crate::engine::access::{Access, HOP_PORT, HOST_PORT};
use crate::engine::capture::{self, Capture, Shown};
use crate::engine::decider::Decider;
use crate::engine::local::LocalNodes;
use crate::engine::network::Network;
use crate::engine::shared::{Command, Shared};
use crate::engine::trunks::Trunks;
use crate::engine::{Backend, PacketHook, StartError};
use crate::io::vlan::Wanted;
use crate::io::{BATCH, PacketIo};
use crate::netlink::Netlink;
use crate::packet::common::Common;
use crate::packet::drop::FrameDrop;
use crate::packet::frame::Frame;
use crate::packet::intercept::{Intercept, LocalClient};
use crate::packet::mld::{self, Change};
use crate::packet::ndp;
use crate::packet::net::{Net, PortId, PortInfo};
use crate::packet::pipeline::{Env, Output, Pipeline, Request, Settings};
use crate::packet::wire::Mac;
use crate::sys::Poller;

use self::links::Attached;

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
/// How long nothing has changed before everything is gone through again.
const QUIET: Duration = Duration::from_secs(1);
/// How often everything is gone through while removed servers may still have connections.
const REMOVED_PERIOD: Duration = Duration::from_secs(10);
/// Between two lines in the log about the same trouble.
const COMPLAINT_PERIOD: Duration = Duration::from_secs(60);

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
    hidden: Intercept,
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
            pipeline: Pipeline::new(Arc::new(
                Common::new(setup.settings).with_midnight(midnight),
            )),
            setup,
            output: Output::new(),
            frames: (0..BATCH).map(|_| Frame::new()).collect(),
            network: Network::new(state),
            ports: vec![None],
            host_name: Arc::from(access.name()),
            access,
            netlink,
            trunks,
            hidden: Intercept::default(),
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
                intercept: &self.hidden,
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
                intercept: &self.hidden,
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
                    self.pipeline.held.give_up(port, addr);
                }
            }
            Request::Confirm(port, addr) => self.confirm(port, addr),
            Request::ListenerQuery(port, query) => self.answer_query(port, query),
            Request::InterceptLocalClient(client) => clients.push(client),
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
            intercept: &self.hidden,
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

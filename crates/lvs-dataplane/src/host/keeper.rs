//! The keeper: a thread that makes all changes of the host, so that no packet waits for netlink,
//! nf_tables or a log.
//!
//! ```text
//! wait ─▶ kernel's events ─▶ jobs (control calls) ─▶ requests of the packet path ─▶ timers ─▶ publish one snapshot ─▶ wait
//! ```
//!
//! After each round, the packet workers get one snapshot ([`View`]) with all changes of the round.
//! A caller that waits for a change gets its answer when that snapshot is published.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use lvs_core::api::{AnnounceSpec, AnnouncedVip, Conflict, LocalPool, SilentHop, Waiting};
use lvs_core::mark::MarkRule;
use lvs_core::{Family, Instant};
use tracing::{error, info, warn};

use super::announce::{Announced, Routes};
use super::interception::Interception;
use super::local_nodes::LocalNodes;
use super::loopback::Loopback;
use super::neighbours::Neighbours;
use super::setup::Setup;
use super::view::{KnownPort, Tables, View};
use super::vips::{self, Vips};
use super::waiting::Waits;
use super::{DataplaneSide, HostError, is_interface_name};
use crate::fast_path::{AttachedXdp, Held};
use crate::io::af_packet::Group;
use crate::io::port::Port;
use crate::io::tun::TunError;
use crate::mailbox::{Closing, Mailbox};
use crate::netlink::{Netlink, XdpFeatures};
use lvs_packet::intercept::{Intercept, LocalClient};
use lvs_packet::net::{PortId, PortInfo};
use lvs_packet::pipeline::Request;
use lvs_packet::steer::Plan;
use lvs_packet::wire::Mac;
use lvs_sys::Poller;

/// Interval between two rounds of housekeeping.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// Time without a change after which the keeper compares the whole configuration with the host.
const QUIET: Duration = Duration::from_secs(1);
/// Interval between comparisons of the whole configuration while removed servers may have
/// connections.
const REMOVED_PERIOD: Duration = Duration::from_secs(10);
/// Shortest interval between two log lines about the same fault.
const COMPLAINT_PERIOD: Duration = Duration::from_secs(60);
/// Maximum number of requests of one packet worker that are handled in one round; also the length
/// of the queue.
pub(crate) const REQUESTS_MAX: usize = 1024;

pub(crate) struct Keeper {
    pub(super) dataplane: Arc<dyn DataplaneSide>,
    pub(super) setup: Setup,
    pub(super) interception: Interception,
    pub(super) netlink: Netlink,
    pub(super) tables: Tables,
    pub(super) groups: HashMap<PortId, Group>,
    /// Configured interfaces that are not in use.
    pub(super) waits: Waits,
    /// Routes the answers of servers on this host into the dataplane. `None` with the TUN backend,
    /// where the host does this for all servers.
    pub(super) local_nodes: Option<LocalNodes>,
    /// Redirects this host's own packets into the dataplane. `None` with the TUN backend.
    pub(super) loopback: Option<Loopback>,
    pub(super) vips: Vips,
    pub(super) announced: Announced,
    pub(super) neighbours: Neighbours,
    requests: Vec<mpsc::Receiver<Request>>,
    pub(super) intercept: Arc<Intercept>,
    /// Closed connections of the host's own clients. The shield hides their answers until all
    /// workers use the snapshot of the given generation.
    ended: Vec<(u64, LocalClient)>,
    pub(super) next: Next,
    /// The socket that reads the XDP features of interfaces, or the reason why there is none.
    pub(super) xdp: Result<XdpFeatures, String>,
    /// The last logged reason why the XDP features of interfaces are unknown.
    pub(super) unreported: Option<String>,
    pub(super) attached_xdp: HashMap<u32, AttachedXdp>,
    /// Virtual addresses that the configuration gives to the dataplane.
    pub(super) own_vips: HashSet<IpAddr>,
    /// The configured local addresses of full NAT.
    pub(super) pool: LocalPool,
    pub(super) pool_in_use: Vec<IpAddr>,
    /// Time of the first change that [`update_all`](Self::update_all) has not handled yet.
    pub(super) changed: Option<Instant>,
    /// Time of the last [`update_all`](Self::update_all).
    pub(super) updated: Instant,
    next_housekeeping: Instant,
    /// Number of times that frames bypassed the programs of the kernel fast path.
    pub(super) missed: u32,
    /// Suspends the kernel fast path while it is set.
    pub(super) aside: Option<Held>,
    /// The earliest time of the next log line about a full connection table, and the number of
    /// packets that were dropped since the last line.
    full: (Instant, u64),
}

/// The next snapshot, and the callers that wait for it.
#[derive(Default)]
pub(super) struct Next {
    generation: u64,
    /// Whether the next snapshot differs from the last one in anything but its tables.
    pub(super) differs: bool,
    pub(super) tables_differ: bool,
    /// Whether neighbours have changed, perhaps only in their state.
    pub(super) neighbours_differ: bool,
    /// Incremented at each change that may affect a next hop.
    ways: u64,
    tables: Arc<Tables>,
    pub(super) marks: Option<Arc<[MarkRule]>>,
    pub(super) pmtu_disc: bool,
    pub(super) ignore_tunneled: bool,
    pub(super) config: u64,
    /// New ports, one for each worker, which the workers receive with the snapshot.
    pub(super) attach: Vec<(PortId, Vec<Port>)>,
    /// Whether the virtual or local addresses have changed.
    pub(super) plan_differs: bool,
    pub(super) detach: Vec<PortId>,
    /// Neighbours that the kernel could not resolve.
    pub(super) silent: Vec<(PortId, IpAddr)>,
    answers: Vec<Box<dyn FnOnce(u64) + Send>>,
    /// Snapshots that a worker may still use. The keeper frees them, because this may take long.
    published: VecDeque<Arc<View>>,
}

impl Keeper {
    /// The socket of the shield; the kernel removes the shield when the socket is closed. `None`
    /// with the TUN backend.
    pub(crate) fn shield(&self) -> Option<BorrowedFd<'_>> {
        self.interception.shield()
    }

    /// The descriptor of the TUN device, if the host routes packets through it and a state keeper
    /// keeps it. The kernel removes the device when the descriptor is closed.
    pub(crate) fn routed_device(&self) -> Option<BorrowedFd<'_>> {
        self.interception.device()
    }

    /// Configures the host in this thread's network namespace. No packets are hidden from the host
    /// yet.
    pub(crate) fn new(
        dataplane: Arc<dyn DataplaneSide>,
        mut setup: Setup,
        requests: Vec<mpsc::Receiver<Request>>,
    ) -> Result<Self, HostError> {
        let (interception, device) =
            Interception::open(setup.backend, std::mem::take(&mut setup.warm_restart))?;
        let routed = interception.is_routed();
        if let (Some(fast_path), Some(turn)) = (&setup.fast_path, interception.turn_back()) {
            fast_path.set_mark(turn.mark());
        }
        let local_nodes = match routed {
            false => Some(LocalNodes::open().map_err(HostError::Requests)?),
            true => None,
        };
        let vips = Vips::open(routed).map_err(HostError::Requests)?;
        let (netlink, state) = Netlink::open()?;
        for name in &setup.interfaces {
            let link = state.link_by_name(name);
            if !routed && link.is_some_and(|link| !link.is_arp_capable()) {
                return Err(HostError::NotEthernet(name.clone()));
            }
        }
        if let Some(name) = setup.xdp.iter().find(|name| {
            !is_interface_name(name) || !setup.interfaces.is_empty() && !setup.names(name)
        }) {
            return Err(HostError::NoXdpInterface(name.clone()));
        }
        let xdp = match &setup.fast_path {
            Some(_) if !setup.xdp.is_empty() => Ok(XdpFeatures::open().map_err(HostError::Xdp)?),
            Some(_) if setup.xdp_auto => XdpFeatures::open().map_err(|error| error.to_string()),
            _ => Err("XDP is off".to_owned()),
        };
        let loopback = (!routed).then(|| Loopback::new(setup.fast_path.clone()));
        let mut keeper = Self {
            dataplane,
            xdp,
            unreported: None,
            attached_xdp: HashMap::new(),
            setup,
            interception,
            netlink,
            tables: Tables::new(state),
            groups: HashMap::new(),
            waits: Waits::default(),
            local_nodes,
            loopback,
            vips,
            announced: Announced::default(),
            neighbours: Neighbours::default(),
            requests,
            intercept: Arc::default(),
            ended: Vec::new(),
            next: Next {
                pmtu_disc: true,
                ..Next::default()
            },
            own_vips: HashSet::new(),
            pool: LocalPool::default(),
            pool_in_use: Vec::new(),
            changed: None,
            updated: Instant::ZERO,
            next_housekeeping: Instant::ZERO,
            missed: 0,
            aside: None,
            full: (Instant::ZERO, 0),
        };
        keeper.add_device(device)?;
        keeper.attach_links(true)?;
        keeper.interception.check_host()?;
        keeper.report_addresses();
        keeper.next.tables_differ = true;
        keeper.publish();
        Ok(keeper)
    }

    /// Adds the device through which packets reach the host to the first snapshot.
    fn add_device(&mut self, device: Port) -> Result<(), HostError> {
        let known = known_device(&device);
        self.tables.set_port(PortId::HOST, known.clone());
        let port = if self.interception.is_routed() {
            self.tables.set_port(PortId::HOP, known);
            self.tables.route_over(PortId::HOP);
            Arc::make_mut(&mut self.intercept).everything = true;
            PortId::HOP
        } else {
            PortId::HOST
        };
        self.attach_device(port, device)?;
        if self.interception.is_routed() && self.dataplane.workers() > 1 {
            info!(
                "packets arrive on one queue (--backend tun): the first packet worker reads it, and passes packets to the other workers"
            );
        }
        Ok(())
    }

    /// Attaches a device to the workers. The first worker reads the only queue of the device, and
    /// passes packets to the other workers.
    fn attach_device(&mut self, port: PortId, device: Port) -> Result<(), TunError> {
        let senders = (1..self.dataplane.workers()).filter_map(|_| device.sender());
        let senders = senders.collect::<Result<Vec<Port>, _>>()?;
        let ports = std::iter::once(device).chain(senders);
        self.next.attach.push((port, ports.collect()));
        Ok(())
    }

    /// Redirects this host's packets to services on its own addresses into the dataplane. With
    /// `more`, only adds the packets that it describes; otherwise replaces the redirected packets.
    pub(super) fn follow_loopback(&mut self, more: Option<&Intercept>) {
        let Some(loopback) = &mut self.loopback else {
            return;
        };
        let (state, now) = (&self.tables.state, self.dataplane.now());
        let made = match more {
            Some(more) => loopback.extend(more, state, now),
            None => loopback.follow(&self.intercept, state, now),
        };
        let Some(device) = made else { return };
        self.tables.set_port(PortId::LOCAL, known_device(&device));
        self.next.tables_differ = true;
        if let Err(error) = self.attach_device(PortId::LOCAL, device) {
            self.tables.remove_port(PortId::LOCAL);
            if let Some(loopback) = &mut self.loopback {
                loopback.refuse(&error, now);
            }
        }
    }

    /// Returns the plan by which the kernel divides packets among several workers; `None` for one
    /// worker.
    pub(super) fn plan(&self) -> Option<Plan> {
        let steering = self.setup.steering.as_ref()?;
        Some(steering.plan(self.tables.vips.iter().copied()))
    }

    /// Divides packets among workers again, if the virtual addresses or the local addresses of full
    /// NAT have changed.
    fn divide(&mut self) {
        if !std::mem::take(&mut self.next.plan_differs) {
            return;
        }
        let Some(steering) = &self.setup.steering else {
            return;
        };
        let local: HashSet<IpAddr> = self.local_addresses().collect();
        if !steering.has_local(&local) {
            self.setup.steering = Some(Arc::new(steering.with_local(local)));
            self.next.differs = true;
        }
        let Some(plan) = self.plan() else {
            return;
        };
        for (port, group) in &self.groups {
            if let Err(error) = group.divide(&plan) {
                warn!(
                    "the kernel divides the frames of {} among packet workers as before the last change, and workers pass on frames of other workers: {error}",
                    self.tables.name(*port)
                );
            }
        }
    }

    /// Index of the device through which packets reach the host.
    pub(super) fn device(&self) -> u32 {
        self.tables.ifindex(PortId::HOST).unwrap_or(0)
    }

    /// Handles events and jobs until the dataplane has ended, and then restores the host's
    /// configuration.
    pub(crate) fn run(mut self, mailbox: &Mailbox<Self>) {
        let _closing = Closing(mailbox);
        let mut poller = Poller::new();
        while !self.dataplane.has_ended() {
            poller.clear();
            let wake = poller.add(mailbox.wake().as_fd());
            let netlink = poller.add(self.netlink.fd());
            let now = self.dataplane.now();
            // Rounded up: after an early wake-up, nothing would be due.
            let next = self.vips.next_due().into_iter();
            let next = next.fold(self.next_housekeeping, Ord::min);
            let wait = next.saturating_since(now) + Duration::from_millis(1);
            if let Err(error) = poller.wait(Some(wait)) {
                error!("the keeper stops: it cannot wait for the kernel's events: {error}");
                break;
            }
            if poller.is_ready(netlink) {
                self.follow_kernel();
            }
            if poller.is_ready(wake) {
                mailbox.wake().take();
                for job in mailbox.take() {
                    job(&mut self);
                }
                self.serve_requests();
            }
            self.timers();
            self.publish();
        }
        self.loopback = None;
        let (announced, mut routes) = self.routes();
        announced.withdraw_all(&mut routes);
        self.set_own(&HashSet::new());
        self.vips.log_changes();
    }

    /// Publishes a snapshot, if it differs from the last one. Then removes and adds the ports of
    /// workers, reports silent next hops, and answers the callers that wait for the snapshot.
    pub(crate) fn publish(&mut self) {
        self.divide();
        let next = &mut self.next;
        if next.differs || next.tables_differ || next.neighbours_differ {
            next.ways += u64::from(next.differs || next.tables_differ);
            if next.tables_differ || next.neighbours_differ {
                next.tables = Arc::new(self.tables.clone());
            }
            (next.differs, next.tables_differ) = (false, false);
            next.neighbours_differ = false;
            next.generation += 1;
            let view = Arc::new(View {
                generation: next.generation,
                ways: next.ways,
                tables: next.tables.clone(),
                intercept: self.intercept.clone(),
                marks: next.marks.clone(),
                pmtu_disc: next.pmtu_disc,
                ignore_tunneled: next.ignore_tunneled,
                config: next.config,
                steering: self.setup.steering.clone(),
                ephemeral: OnceLock::new(),
            });
            next.published.push_back(view.clone());
            self.dataplane.publish(view);
        }
        for port in next.detach.drain(..) {
            self.dataplane.detach(port);
        }
        for (port, ports) in next.attach.drain(..) {
            self.dataplane.attach(port, ports);
        }
        if !next.silent.is_empty() {
            let silent = std::mem::take(&mut next.silent);
            self.dataplane.report_silent(silent);
        }
        for answer in next.answers.drain(..) {
            answer(next.generation);
        }
        let taken = self.dataplane.taken();
        while next
            .published
            .front()
            .is_some_and(|view| view.generation < taken)
        {
            next.published.pop_front();
        }
    }

    /// Calls `answer` with the generation of the snapshot that contains all changes so far, as soon
    /// as it is published.
    pub(crate) fn when_published(&mut self, answer: impl FnOnce(u64) + Send + 'static) {
        self.next.answers.push(Box::new(answer));
    }

    fn serve_requests(&mut self) {
        let mut requests = Vec::new();
        for from in &self.requests {
            requests.extend(from.try_iter().take(REQUESTS_MAX));
        }
        // Hide the answers before the neighbours are resolved: the packet that waits for a
        // neighbour may belong to such a connection.
        self.hide_local_clients(&requests);
        let now = self.dataplane.now();
        for request in requests {
            match request {
                Request::Resolve(port, addr) => {
                    let (tables, netlink) = (&self.tables, &mut self.netlink);
                    if !Neighbours::resolve(port, addr, tables, netlink) {
                        self.next.silent.push((port, addr));
                    }
                }
                Request::Confirm(port, addr) => {
                    let (tables, netlink) = (&self.tables, &mut self.netlink);
                    self.neighbours.confirm(port, addr, tables, netlink, now);
                }
                Request::ListenerQuery(port, query) => {
                    self.vips.hear_query(port, query, now);
                }
                Request::AddressConflict { port, addr, mac } => {
                    self.vips
                        .report_conflict(port, addr, mac, &self.tables, now);
                }
                Request::InterceptLocalClient(_) => {}
            }
        }
    }

    /// Hides the answers to connections of the host's own clients from the host, in one transaction
    /// for all connections of a round.
    fn hide_local_clients(&mut self, requests: &[Request]) {
        let mut new: Vec<LocalClient> = Vec::new();
        for request in requests {
            let Request::InterceptLocalClient(client) = *request else {
                continue;
            };
            if self.intercept.local_clients.contains(&client) || new.contains(&client) {
                continue;
            }
            new.push(client);
        }
        if new.is_empty() {
            return;
        }
        // A connection that was closed and opened again is still hidden.
        let (again, new): (Vec<_>, Vec<_>) = new
            .into_iter()
            .partition(|client| self.ended.iter().any(|(_, ended)| ended == client));
        self.ended.retain(|(_, ended)| !again.contains(ended));
        let added = self.interception.add_local_clients(&new);
        let hidden = &mut Arc::make_mut(&mut self.intercept).local_clients;
        hidden.extend(again);
        match added {
            Ok(()) => {
                if let Some(loopback) = &self.loopback {
                    loopback.add_clients(&new);
                }
                hidden.extend(new);
            }
            Err(error) => {
                warn!("some connections from this host to virtual addresses will fail: {error}");
            }
        }
        self.next.differs = true;
    }

    /// Records closed connections of the host. The shield hides their answers until every worker
    /// uses a snapshot that includes the end: until then, a worker treats a new connection with the
    /// same ports as hidden.
    pub(crate) fn local_clients_ended(&mut self, ended: Vec<LocalClient>) {
        let hidden = &mut Arc::make_mut(&mut self.intercept).local_clients;
        for client in ended {
            if hidden.remove(&client) {
                self.ended.push((self.next.generation + 1, client));
                self.next.differs = true;
            }
        }
    }

    fn show_local_clients(&mut self) {
        let taken = self.dataplane.taken();
        let is_shown = |(generation, _): &(u64, LocalClient)| *generation <= taken;
        let shown: Vec<LocalClient> = self
            .ended
            .extract_if(.., |client| is_shown(client))
            .map(|(_, client)| client)
            .collect();
        let has_room = self
            .loopback
            .as_ref()
            .is_some_and(|loopback| loopback.remove_clients(&shown));
        if has_room {
            self.follow_loopback(None);
        }
        if !shown.is_empty()
            && let Err(error) = self.interception.remove_local_clients(&shown)
        {
            warn!("{error}");
        }
    }

    fn timers(&mut self) {
        let now = self.dataplane.now();
        self.vips.answer_queries(&self.tables, now);
        self.vips.announce_due(&self.tables, now);
        self.vips.report_due(&self.tables, now);
        if now < self.next_housekeeping {
            return;
        }
        let next = now + HOUSEKEEPING;
        self.next_housekeeping = self.advance_control(now).map_or(next, |at| at.min(next));
        self.show_local_clients();
        self.follow_announced();
        self.check_way_back();
        self.check_programs();
        if !self.waits.is_empty() {
            self.follow_missing();
        }
        self.dataplane.keep();
        let settled = self.changed.is_none_or(|since| since + QUIET <= now);
        let quiet = settled && self.changed.is_some();
        // A change of many services takes several steps.
        if settled {
            self.vips.log_changes();
        }
        // Connections of removed servers may have ended, so that their answers need not be hidden
        // any more.
        if quiet || (self.updated + REMOVED_PERIOD <= now && self.has_remains()) {
            self.update_or_warn();
        }
        self.neighbours
            .refresh(&self.tables, &mut self.netlink, now);
        if self.workers_have_view() {
            self.vips.probe(&self.tables, now);
        }
    }

    /// Whether all packet workers use the keeper's present state.
    fn workers_have_view(&self) -> bool {
        let next = &self.next;
        let is_published = !(next.differs || next.tables_differ || next.neighbours_differ);
        is_published && self.dataplane.taken() >= next.generation
    }

    /// Whether the shield may still hide answers of removed servers, or answers to removed local
    /// addresses of full NAT.
    fn has_remains(&mut self) -> bool {
        self.dataplane.control().has_removed() || {
            self.ask_for_pool();
            let retired = |addr: &IpAddr| !self.pool.addresses.contains(addr);
            self.pool_in_use.iter().any(retired)
        }
    }

    /// Asks the packet workers for the local addresses that connections use.
    pub(super) fn ask_for_pool(&mut self) {
        // Without full NAT, there is nothing to ask for.
        if (!self.pool.addresses.is_empty() || !self.pool_in_use.is_empty())
            && let Some(in_use) = self.dataplane.local_addresses()
        {
            self.pool_in_use = in_use;
        }
    }

    /// Runs the due timers of the control half, after it has received the counts of the kernel fast
    /// path and the amount of free memory. If the timers change the configuration, begins a new
    /// epoch of the kernel fast path. Returns the time of the next timer.
    fn advance_control(&self, now: Instant) -> Option<Instant> {
        let memory = free_memory();
        if let Some(fast_path) = &self.setup.fast_path {
            fast_path.fold(|| self.dataplane.control());
        }
        let mut control = self.dataplane.control();
        if let Some(pages) = memory {
            control.set_memory(pages);
        }
        let before = control.generation();
        control.advance(now);
        if let Some(fast_path) = &self.setup.fast_path
            && control.generation() != before
        {
            fast_path.changed();
        }
        control.next_wakeup()
    }

    /// Passes this host's addresses to the control half.
    pub(super) fn report_addresses(&self) {
        let state = &self.tables.state;
        let local = state.links().flat_map(|link| state.addresses(link.index));
        let prefixes = local.map(|address| {
            // All of 127.0.0.0/8 is this host.
            let loopback = address.ip.is_loopback() && address.ip.is_ipv4();
            let all = Family::of(&address.ip).bits();
            (address.ip, if loopback { 8 } else { all })
        });
        let prefixes = prefixes.collect();
        let on_link = state.links().flat_map(|link| state.addresses(link.index));
        let networks = on_link
            .filter(|address| {
                !address.ip.is_loopback() && address.prefix_len < Family::of(&address.ip).bits()
            })
            .map(|address| (address.ip, address.prefix_len))
            .collect();
        let mut control = self.dataplane.control();
        control.set_local_addresses(prefixes);
        control.set_networks(networks);
    }

    /// Counts packets that were dropped because the table of `capacity` connections was full, and
    /// logs the count at most once in [`COMPLAINT_PERIOD`].
    pub(crate) fn table_was_full(&mut self, packets: u64, capacity: usize) {
        self.full.1 += packets;
        let (now, (again, refused)) = (self.dataplane.now(), self.full);
        if again <= now {
            warn!(
                code = "table_full",
                "the table of connections or persistence templates is full: {refused} packets that would have opened a connection were dropped. Each packet worker has room for {capacity} connections: raise --max-connections",
            );
            self.full = (now + COMPLAINT_PERIOD, 0);
        }
    }

    /// Logs that all connections of servers that went down are removed.
    pub(crate) fn down_has_ended(&mut self, resets: usize) {
        info!(
            "the connections of servers that went down are closed; {resets} TCP resets were sent"
        );
    }

    /// The addresses that are announced by routes, and access to these routes.
    fn routes(&mut self) -> (&mut Announced, Routes<'_>) {
        let routes = Routes {
            device: self.device(),
            now: self.dataplane.now(),
            state: &self.tables.state,
            netlink: &mut self.netlink,
        };
        (&mut self.announced, routes)
    }

    /// Sets the addresses to announce by routes.
    pub(crate) fn announce(&mut self, spec: &AnnounceSpec) {
        let (announced, mut routes) = self.routes();
        if announced.set(spec, &mut routes) {
            // Intercept the packets of an address before it is announced.
            self.update_or_warn();
        }
        self.follow_announced();
    }

    /// Sets the routes of the announced addresses.
    fn follow_announced(&mut self) {
        let (announced, mut routes) = self.routes();
        announced.follow(&mut routes);
    }

    /// The announced addresses, and the seconds since the last update.
    pub(crate) fn announcements(&self) -> (Vec<AnnouncedVip>, Option<u64>) {
        self.announced.report(self.dataplane.now())
    }

    /// The virtual addresses that the dataplane owns. A local address of full NAT counts only if it
    /// is a virtual address, too.
    pub(crate) fn answered_vips(&self) -> Vec<IpAddr> {
        let local: HashSet<IpAddr> = self.local_addresses().collect();
        let own = self.intercept.own_vips.iter().copied();
        own.filter(|addr| self.tables.vips.contains(addr) || !local.contains(addr))
            .collect()
    }

    /// Addresses of services and of this host that other hosts claim.
    pub(crate) fn conflicts(&self) -> Vec<Conflict> {
        let conflicts = self.vips.conflicts(self.dataplane.now());
        conflicts
            .map(|(address, conflict, answers)| {
                let port = self.tables.port(conflict.port);
                let ifindex = port.map(|port| port.ifindex);
                // The kernel also learns virtual addresses as neighbours: from ARP requests with
                // these source addresses.
                let is_vip = |host: &IpAddr| *host == address || self.tables.vips.contains(host);
                let host = |ifindex| {
                    self.tables
                        .state
                        .address_of(ifindex, conflict.mac.0, is_vip)
                };
                let code = match vips::is_vip(address, &self.tables) {
                    true => Conflict::VIP,
                    false => Conflict::ADDRESS,
                };
                Conflict {
                    code: code.to_owned(),
                    address,
                    mac: conflict.mac.to_string(),
                    interface: port.map_or_else(String::new, |port| port.name.to_string()),
                    own_mac: port.map_or_else(String::new, |port| port.info.mac.to_string()),
                    host: ifindex.and_then(host),
                    answers,
                }
            })
            .collect()
    }

    /// Next hops that do not answer, on the routes to servers and clients.
    pub(crate) fn silent_hops(&self) -> Vec<SilentHop> {
        self.neighbours.silent(&self.tables, self.dataplane.now())
    }

    /// Configured interfaces that do not exist yet, or cannot be used.
    pub(crate) fn waiting(&self) -> Vec<Waiting> {
        self.waits.all(self.dataplane.now()).collect()
    }

    /// Why clients on this host cannot reach some or all services on its own addresses; `None` if
    /// they can reach all, if there are no such services, or with the TUN backend.
    pub(crate) fn local_clients(&self) -> Option<Waiting> {
        self.loopback.as_ref()?.trouble(self.dataplane.now())
    }
}

/// A device through which packets reach the host, as a port.
fn known_device(device: &Port) -> KnownPort {
    KnownPort {
        ifindex: device.ifindex().unwrap_or(0),
        name: Arc::from(device.name()),
        info: PortInfo {
            mac: Mac([0; 6]),
            mtu: 65_535,
            ethernet: false,
            offload: true,
            gives_back: false,
        },
        down: None,
        decapsulates: false,
    }
}

/// Free memory and buffers in pages of 4 KiB, as the kernel's `update_defense_level` counts them;
/// `None` if `/proc/meminfo` cannot be read.
fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next()?.parse().ok()
    };
    Some((kib("MemFree:")? + kib("Buffers:")?) / 4)
}

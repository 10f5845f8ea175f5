//! Virtual addresses: answers to ARP and neighbour discovery, conflicts with other hosts,
//! announcements and probes.
//!
//! The keeper has its own socket for announcements, probes and multicast listener reports, so that
//! even a thousand of them do not delay a packet worker. Packet workers answer ARP requests and
//! neighbour solicitations by the published snapshot.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

use lvs_core::Instant;
use lvs_core::api::Conflict;
use lvs_core::recent::{RecentCount, RecentCounter};
use tracing::{debug, error, info, warn};

use super::listener::Answers;
use super::view::{KnownPort, Tables};
use lvs_packet::mld::{self, MembershipChange};
use lvs_packet::net::PortId;
use lvs_packet::wire::Mac;
use lvs_packet::{arp, ndp};
use lvs_sys::PacketSocket;

/// The times between the announcements of an own address, the last one first. Announcements are
/// repeated because they can be lost, or be followed by another director's late answer to a
/// neighbour.
const GAPS: [Duration; 3] = [
    Duration::from_secs(1),
    Duration::from_millis(800),
    Duration::from_millis(200),
];
/// Number of probes for other hosts that have a service's address.
const PROBES: u8 = 2;
/// Interval between two rounds of probes for other hosts that have begun to use an address of this
/// director.
const WATCH_PERIOD: Duration = Duration::from_secs(10);
/// Maximum number of addresses in a round of probes.
const WATCHED: usize = 64;
/// Number of announcements that defend an own address against another host.
const DEFENCES: usize = 2;
/// Shortest time between two defences of an address. It keeps two hosts with the same address from
/// flooding the network (RFC 5227 section 2.4, DEFEND_INTERVAL).
const DEFEND_PERIOD: Duration = Duration::from_secs(10);
/// Maximum number of addresses in a log line.
const LOGGED_MAX: usize = 3;
/// Shortest interval between two log lines about the same conflict.
const COMPLAINT_PERIOD: Duration = Duration::from_secs(60);

/// Interval between two probes for the other host of a conflict.
const CONFLICT_PROBE_PERIOD: Duration = Duration::from_secs(15);
/// Number of probes without an answer after which a conflict is over.
const CONFLICT_PROBES: u8 = 2;

/// Time in which this director may release an address after another director has announced it: in a
/// planned handover, the new director announces first.
const HANDOVER: Duration = Duration::from_secs(3);

/// Another host's announcement of an address of this director, perhaps in a handover.
#[derive(Clone, Debug)]
struct Claim {
    mac: Mac,
    port: PortId,
    /// Time at which the announcement counts as a conflict.
    due: Instant,
    /// ARP and neighbour discovery answers of the other host so far.
    answers: RecentCounter,
}

/// Another host with an address of a service or of this host.
#[derive(Clone, Debug)]
pub(super) struct KnownConflict {
    pub(super) mac: Mac,
    pub(super) port: PortId,
    /// ARP and neighbour discovery answers of the other host.
    answers: RecentCounter,
    /// The time of the last log line.
    logged: Instant,
    /// The time of the last probe.
    probed: Instant,
    /// Number of probes since the last answer of the other host.
    probes: u8,
}

/// The remaining announcements of an own address, or of all own addresses on an interface.
#[derive(Clone, Copy, Debug)]
struct Burst {
    left: usize,
    next: Instant,
}

/// Shortest time between two announcements on a flapping interface.
const AGAIN_PERIOD: Duration = GAPS[GAPS.len() - 1];

impl Burst {
    /// Schedules `left` announcements, the first of them at once.
    const fn of(left: usize) -> Self {
        Self {
            left,
            next: Instant::ZERO,
        }
    }

    /// Schedules all announcements again, after the previous one at `last`.
    fn renew(&mut self, last: Instant) {
        *self = Self {
            left: GAPS.len() + 1,
            next: last + AGAIN_PERIOD,
        };
    }

    /// Whether an announcement is due; counts it as sent.
    fn take(&mut self, now: Instant) -> bool {
        if self.left == 0 || now < self.next {
            return false;
        }
        self.left -= 1;
        let gap = self.left.checked_sub(1).and_then(|at| GAPS.get(at));
        self.next = now + gap.copied().unwrap_or_default();
        true
    }
}

#[derive(Debug)]
pub(super) struct Vips {
    /// For announcements and probes. `None` with the TUN backend, where the host answers for the
    /// addresses.
    socket: Option<PacketSocket>,
    /// The dataplane's own addresses, each with its remaining announcements.
    own: HashMap<IpAddr, Burst>,
    /// Interfaces on which all own addresses are announced again, and the time of the last
    /// announcement there.
    again: HashMap<PortId, (Burst, Instant)>,
    /// Earliest time at which an announcement can be due.
    next_announcement: Option<Instant>,
    /// The number of remaining probes for each address.
    probing: BTreeMap<IpAddr, u8>,
    /// The last address of the previous round of probes.
    watched: Option<IpAddr>,
    /// The time of the next round of probes.
    next_watch: Instant,
    /// Addresses of services and of this host that another host has, too.
    conflicts: HashMap<IpAddr, KnownConflict>,
    /// Announcements by other hosts that do not count as conflicts yet.
    claims: HashMap<IpAddr, Claim>,
    /// The time of the last defence of each own address.
    defended: HashMap<IpAddr, Instant>,
    /// Addresses of services for which neither the host nor the dataplane answers, and which were
    /// logged.
    unclaimed: HashSet<IpAddr>,
    answers: Answers,
    /// The own addresses that were logged.
    logged: BTreeSet<IpAddr>,
    /// Whether own addresses have changed since they were logged.
    unlogged: bool,
}

impl Vips {
    /// Opens the socket. The dataplane has no own addresses yet.
    pub(super) fn open(is_routed: bool) -> io::Result<Self> {
        Ok(Self {
            socket: (!is_routed).then(PacketSocket::new).transpose()?,
            own: HashMap::new(),
            again: HashMap::new(),
            next_announcement: None,
            probing: BTreeMap::new(),
            watched: None,
            next_watch: Instant::ZERO + WATCH_PERIOD,
            conflicts: HashMap::new(),
            claims: HashMap::new(),
            defended: HashMap::new(),
            unclaimed: HashSet::new(),
            answers: Answers::default(),
            logged: BTreeSet::new(),
            unlogged: false,
        })
    }

    pub(super) fn own(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.own.keys().copied()
    }

    pub(super) fn answers_for(&self, addr: IpAddr) -> bool {
        self.own.contains_key(&addr)
    }

    /// Addresses that another host has, too, and the answers of that host up to `now`.
    pub(super) fn conflicts(
        &self,
        now: Instant,
    ) -> impl Iterator<Item = (IpAddr, &KnownConflict, RecentCount)> + '_ {
        let conflicts = self.conflicts.iter();
        conflicts.map(move |(&addr, conflict)| (addr, conflict, conflict.answers.at(now)))
    }

    /// Adds an own address of the dataplane, joins its multicast groups, and schedules its
    /// announcements.
    pub(super) fn add(&mut self, addr: IpAddr, tables: &Tables) {
        for (_, port) in tables.interfaces() {
            self.listen(port, addr, true);
        }
        self.own.insert(addr, Burst::of(GAPS.len() + 1));
        self.unlogged = true;
        self.next_announcement = Some(Instant::ZERO);
    }

    /// Removes own addresses of the dataplane, and leaves their multicast groups.
    pub(super) fn remove(&mut self, gone: &[IpAddr], tables: &Tables) {
        self.unlogged = true;
        for addr in gone {
            self.own.remove(addr);
            self.defended.remove(addr);
            // Another host may use the address now.
            self.conflicts.remove(addr);
            self.claims.remove(addr);
        }
        let still = groups_of(self.own.keys());
        let mut groups = groups_of(gone.iter());
        groups.retain(|group| !still.contains(group));
        for (id, port) in tables.interfaces() {
            self.report(id, port, &groups, MembershipChange::Left, false, tables);
            for &addr in gone {
                self.listen(port, addr, false);
            }
        }
    }

    /// Logs for which own addresses the dataplane has begun or ceased to answer since the last call.
    pub(super) fn log_changes(&mut self) {
        if !std::mem::take(&mut self.unlogged) {
            return;
        }
        let own: BTreeSet<IpAddr> = self.own.keys().copied().collect();
        let new: Vec<IpAddr> = own.difference(&self.logged).copied().collect();
        let gone: Vec<IpAddr> = self.logged.difference(&own).copied().collect();
        log_answers("answers", &new);
        log_answers("no longer answers", &gone);
        self.logged = own;
    }

    /// Joins the multicast groups of own addresses on a new interface.
    pub(super) fn interface_added(&self, port: &KnownPort) {
        for &addr in self.own.keys() {
            self.listen(port, addr, true);
        }
    }

    /// Joins or leaves the multicast group for neighbour solicitations of an own IPv6 address. (ARP
    /// requests of IPv4 are broadcast.)
    fn listen(&self, port: &KnownPort, addr: IpAddr, member: bool) {
        let (Some(socket), IpAddr::V6(addr)) = (&self.socket, addr) else {
            return;
        };
        let group = ndp::group_mac(ndp::solicited_node(addr));
        if let Err(error) = socket.set_group(port.ifindex, group.0, member)
            && member
        {
            warn!(
                "{}: hosts on this interface may be unable to resolve {addr}: cannot join the multicast group of this address: {error}",
                port.name
            );
        }
    }

    /// Replaces the services' addresses by `vips`, which `tables` already contains, and schedules
    /// probes for the new ones.
    pub(super) fn set_services(&mut self, vips: &HashSet<IpAddr>, tables: &Tables) {
        self.probing.retain(|addr, _| vips.contains(addr));
        self.conflicts
            .retain(|&addr, conflict| can_conflict(conflict.port, addr, tables));
        for &addr in vips {
            self.add_service(addr);
        }
    }

    /// Schedules probes for the address of a new service.
    pub(super) fn add_service(&mut self, addr: IpAddr) {
        self.probing.entry(addr).or_insert(PROBES);
    }

    /// Logs once each address of a service for which neither the host nor the dataplane answers
    /// ARP. `vips` are the addresses of services without an owner.
    pub(super) fn report_unclaimed(
        &mut self,
        vips: HashSet<IpAddr>,
        is_claimed: impl Fn(IpAddr) -> bool,
    ) {
        let before = std::mem::take(&mut self.unclaimed);
        for addr in vips {
            self.report_one_unclaimed(addr, &before, &is_claimed);
        }
    }

    /// As [`report_unclaimed`](Self::report_unclaimed), for an additional address.
    pub(super) fn report_also_unclaimed(
        &mut self,
        addr: IpAddr,
        is_claimed: impl Fn(IpAddr) -> bool,
    ) {
        if !self.unclaimed.contains(&addr) {
            self.report_one_unclaimed(addr, &HashSet::new(), &is_claimed);
        }
    }

    fn report_one_unclaimed(
        &mut self,
        addr: IpAddr,
        before: &HashSet<IpAddr>,
        is_claimed: &impl Fn(IpAddr) -> bool,
    ) {
        if is_claimed(addr) {
            return;
        }
        if !before.contains(&addr) {
            info!(
                code = "vip_unowned",
                "{addr} is neither on this host nor owned by the dataplane: packets to it must be routed to this host (--own-vips answers ARP for it)"
            );
        }
        self.unclaimed.insert(addr);
    }

    /// Schedules probes for the hosts of known conflicts and, once in each [`WATCH_PERIOD`], for up
    /// to [`WATCHED`] addresses of this director in turn, and sends one probe for each address with
    /// scheduled probes. Packet workers report only answers for addresses in their snapshot.
    pub(super) fn probe(&mut self, tables: &Tables, now: Instant) {
        self.probe_conflicts(tables, now);
        self.watch(tables, now);
        let probing = self.probing.iter_mut().filter(|(_, left)| **left > 0);
        let probes: Vec<IpAddr> = probing
            .map(|(addr, left)| {
                *left -= 1;
                *addr
            })
            .collect();
        self.send_on_all(&probes, &[], tables);
    }

    /// Once in each [`WATCH_PERIOD`], schedules one probe for each of up to [`WATCHED`] addresses,
    /// in turn, if this director has the address and no conflict is known. This finds hosts that
    /// use such an address without having announced it.
    fn watch(&mut self, tables: &Tables, now: Instant) {
        if now < self.next_watch {
            return;
        }
        self.next_watch = now + WATCH_PERIOD;
        let mut after = self.watched.map_or(Unbounded, Excluded);
        if self.probing.range((after, Unbounded)).next().is_none() {
            after = Unbounded;
        }
        for (addr, left) in self.probing.range_mut((after, Unbounded)).take(WATCHED) {
            self.watched = Some(*addr);
            if has(*addr, tables) && !self.conflicts.contains_key(addr) {
                *left = (*left).max(1);
            }
        }
    }

    /// Schedules probes for the other hosts of conflicts, and removes conflicts whose hosts have
    /// not answered.
    fn probe_conflicts(&mut self, tables: &Tables, now: Instant) {
        self.conflicts.retain(|addr, conflict| {
            if now < conflict.probed + CONFLICT_PROBE_PERIOD {
                return true;
            }
            if conflict.probes >= CONFLICT_PROBES {
                info!(
                    "{} no longer answers ARP or neighbour discovery for {addr}",
                    conflict.mac
                );
                if !is_vip(*addr, tables) {
                    self.probing.remove(addr);
                }
                return false;
            }
            conflict.probed = now;
            conflict.probes += 1;
            self.probing.insert(*addr, 1);
            // The dataplane does not defend the address against the answer to its own probe.
            self.defended.insert(*addr, now);
            true
        });
    }

    /// Sends the due announcements of own addresses.
    pub(super) fn announce_due(&mut self, tables: &Tables, now: Instant) {
        if self.next_announcement.is_none_or(|next| now < next) {
            return;
        }
        let own = self.own.iter_mut();
        let due = own.filter_map(|(addr, burst)| burst.take(now).then_some(*addr));
        let due: Vec<IpAddr> = due.collect();
        self.again.retain(|id, _| tables.port(*id).is_some());
        let again = self.again.iter_mut();
        let again = again.filter_map(|(id, (burst, last))| {
            let due = burst.take(now);
            if due {
                *last = now;
            }
            due.then_some(*id)
        });
        let again: Vec<PortId> = again.collect();
        let waiting = self
            .own
            .values()
            .chain(self.again.values().map(|(burst, _)| burst));
        let waiting = waiting.filter(|burst| burst.left > 0);
        self.next_announcement = waiting.map(|burst| burst.next).min();
        self.send_on_all(&[], &due, tables);
        if again.is_empty() {
            return;
        }
        let own: Vec<IpAddr> = self.own.keys().copied().collect();
        for id in again {
            if let Some(port) = tables.port(id) {
                self.send_on(id, port, &[], &own, tables);
            }
        }
    }

    /// Schedules announcements of own addresses on an interface that is new, has come up, or has
    /// another MAC address.
    pub(super) fn announce_again(&mut self, id: PortId) {
        if self.socket.is_none() || self.own.is_empty() {
            return;
        }
        let never = (Burst::of(0), Instant::ZERO);
        let (burst, last) = self.again.entry(id).or_insert(never);
        burst.renew(*last);
        let next = self.next_announcement.unwrap_or(burst.next);
        self.next_announcement = Some(next.min(burst.next));
    }

    fn send_on_all(&self, probes: &[IpAddr], announcements: &[IpAddr], tables: &Tables) {
        if self.socket.is_none() || (probes.is_empty() && announcements.is_empty()) {
            return;
        }
        for (id, port) in tables.interfaces() {
            self.send_on(id, port, probes, announcements, tables);
        }
    }

    fn send_on(
        &self,
        id: PortId,
        port: &KnownPort,
        probes: &[IpAddr],
        announcements: &[IpAddr],
        tables: &Tables,
    ) {
        let groups = groups_of(announcements.iter());
        // Report the group first, so that a switch forwards the answers of other hosts.
        self.report(id, port, &groups, MembershipChange::Joined, false, tables);
        let mac = port.info.mac;
        for addr in probes {
            match *addr {
                IpAddr::V4(addr) => self.send(port, &arp::probe(mac, addr)),
                IpAddr::V6(addr) => self.send(port, &ndp::probe(mac, addr)),
            }
        }
        for addr in announcements {
            match *addr {
                IpAddr::V4(addr) => self.send(port, &arp::gratuitous(mac, addr)),
                IpAddr::V6(addr) => self.send(port, &ndp::unsolicited(mac, addr)),
            }
        }
    }

    /// Records a multicast listener query, if it is for the group of an own address, or for all
    /// groups while own addresses have groups.
    pub(super) fn hear_query(&mut self, port: PortId, query: mld::Query, now: Instant) {
        let groups = groups_of(self.own.keys());
        let ours = match query.group {
            Some(group) => groups.contains(&group),
            None => !groups.is_empty(),
        };
        if ours {
            let random = RandomState::new().hash_one(now.as_nanos());
            self.answers.ask(port, query, now, random);
        }
    }

    /// Sends the due answers to queries for multicast listeners.
    pub(super) fn answer_queries(&mut self, tables: &Tables, now: Instant) {
        for (port, query) in self.answers.take(now) {
            self.answer_query(port, query, tables);
        }
    }

    /// The earliest time at which an answer or an announcement is due, or another host's
    /// announcement counts as a conflict; `None` if there is none of these.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let claims = self.claims.values().map(|claim| claim.due);
        let next = [self.answers.next(), self.next_announcement, claims.min()];
        next.into_iter().flatten().min()
    }

    /// Reports the groups of own addresses to a router or a switch.
    fn answer_query(&self, id: PortId, query: mld::Query, tables: &Tables) {
        let mut groups = groups_of(self.own.keys());
        if let Some(group) = query.group {
            groups.retain(|&own| own == group);
        }
        if let Some(port) = tables.port(id) {
            self.report(
                id,
                port,
                &groups,
                MembershipChange::Listening,
                query.v1,
                tables,
            );
        }
    }

    fn report(
        &self,
        id: PortId,
        port: &KnownPort,
        groups: &[Ipv6Addr],
        change: MembershipChange,
        v1: bool,
        tables: &Tables,
    ) {
        if groups.is_empty() || self.socket.is_none() {
            return;
        }
        debug_assert_eq!(tables.ifindex(id), Some(port.ifindex));
        let source = tables.state.addresses(port.ifindex);
        let source = source.filter(|address| address.is_preferred());
        let source = source.filter_map(|address| match address.ip {
            IpAddr::V6(addr) => addr.is_unicast_link_local().then_some(addr),
            IpAddr::V4(_) => None,
        });
        let source = source.last().unwrap_or(Ipv6Addr::UNSPECIFIED);
        for report in mld::reports(port.info.mac, source, groups, change, v1) {
            self.send(port, &report);
        }
    }

    fn send(&self, port: &KnownPort, frame: &[u8]) {
        let Some(socket) = &self.socket else { return };
        if port.info.ethernet
            && let Err(error) = socket.send_to(port.ifindex, frame)
        {
            debug!("{}: {error}", port.name);
        }
    }

    /// Records that another host answers for an address of a service or of this host, if the
    /// address can conflict and the MAC address is not this host's. If the address is the
    /// dataplane's own, the dataplane announces it again at once, but at most once in
    /// [`DEFEND_PERIOD`]. The answer counts as a conflict if this director still has the address
    /// after [`HANDOVER`].
    pub(super) fn report_conflict(
        &mut self,
        port: PortId,
        addr: IpAddr,
        mac: Mac,
        tables: &Tables,
        now: Instant,
    ) {
        if !can_conflict(port, addr, tables) {
            return;
        }
        let ours = tables.state.links().any(|link| link.mac == Some(mac.0));
        if ours {
            return;
        }
        self.defend(addr, now);
        if let Some(known) = self.conflicts.get_mut(&addr) {
            known.probes = 0;
            known.answers.add(1, now);
            if now >= known.logged + COMPLAINT_PERIOD {
                (known.mac, known.port, known.logged) = (mac, port, now);
                log_conflict(addr, known, tables);
            }
            return;
        }
        let claim = self.claims.entry(addr).or_insert_with(|| {
            info!(
                "{mac} on {} answers for {addr}, which this director has: a handover, or a conflict",
                tables.name(port)
            );
            Claim {
                mac,
                port,
                due: now + HANDOVER,
                answers: RecentCounter::default(),
            }
        });
        claim.answers.add(1, now);
    }

    /// Reports a conflict for each address that this director has not released in time.
    pub(super) fn report_due(&mut self, tables: &Tables, now: Instant) {
        let due = |_: &IpAddr, claim: &mut Claim| claim.due <= now;
        for (addr, claim) in self.claims.extract_if(due) {
            if !can_conflict(claim.port, addr, tables) {
                continue;
            }
            let conflict = KnownConflict {
                mac: claim.mac,
                port: claim.port,
                answers: claim.answers,
                logged: now,
                probed: now,
                probes: 0,
            };
            log_conflict(addr, &conflict, tables);
            self.conflicts.insert(addr, conflict);
        }
    }

    /// Schedules announcements that defend an own address, at most once in [`DEFEND_PERIOD`].
    fn defend(&mut self, addr: IpAddr, now: Instant) {
        let Some(burst) = self.own.get_mut(&addr) else {
            return;
        };
        let last = self.defended.get(&addr);
        if last.is_none_or(|&last| last + DEFEND_PERIOD <= now) {
            self.defended.insert(addr, now);
            *burst = Burst::of(burst.left.max(DEFENCES));
            self.next_announcement = Some(Instant::ZERO);
        }
    }
}

fn log_conflict(addr: IpAddr, conflict: &KnownConflict, tables: &Tables) {
    let (mac, name) = (conflict.mac, tables.name(conflict.port));
    if !is_vip(addr, tables) {
        error!(
            code = Conflict::ADDRESS,
            "{mac} on {name} answers for {addr} too, an address of this host: packets to it go to one of the two. Give one of them another address",
        );
        return;
    }
    error!(
        code = Conflict::VIP,
        "{mac} on {name} answers for {addr} too, an address of this director's services: each client reaches one of the two. Remove the address from that host; if it is a real server that needs it (direct routing, tunnels), add it to its lo{}",
        // A host does not answer neighbour discovery for addresses on its loopback interface.
        if addr.is_ipv4() {
            " and set net.ipv4.conf.all.arp_ignore=1 and arp_announce=2"
        } else {
            ""
        }
    );
}

/// Whether another host with this address on the interface is a conflict. This host or the
/// dataplane must have the address: otherwise, another director may have it now. The address must
/// also be a service's, the dataplane's own, or on this interface itself. The addresses in `quiet`
/// never conflict: peers also announce them (ECMP).
fn can_conflict(port: PortId, addr: IpAddr, tables: &Tables) -> bool {
    has(addr, tables)
        && !tables.quiet.contains(&addr)
        && (is_vip(addr, tables) || is_on(port, addr, tables))
}

pub(super) fn is_vip(addr: IpAddr, tables: &Tables) -> bool {
    tables.own.contains(&addr) || tables.vips.contains(&addr)
}

/// Whether the interface itself has the address. Several hosts may have an address that is on
/// another interface and announced by routes.
fn is_on(port: PortId, addr: IpAddr, tables: &Tables) -> bool {
    tables.ifindex(port).is_some_and(|ifindex| {
        let mut addresses = tables.state.addresses(ifindex);
        addresses.any(|address| address.ip == addr)
    })
}

/// Logs the addresses for which the dataplane has begun or ceased to answer: one line with the
/// first of them, and, if there are more, a line for each at the level `debug`. `answers`: the
/// verb.
fn log_answers(answers: &str, addresses: &[IpAddr]) {
    let shown = addresses.len().min(LOGGED_MAX);
    let first: Vec<String> = addresses[..shown].iter().map(ToString::to_string).collect();
    let first = first.join(", ");
    let answers = format!("the dataplane {answers} ARP or neighbour discovery for");
    match addresses.len() - shown {
        0 if shown == 0 => {}
        0 => info!("{answers} {first}"),
        more => {
            info!("{answers} {first} and {more} more");
            for addr in addresses {
                debug!("{answers} {addr}");
            }
        }
    }
}

/// Whether the host or the dataplane has the address.
fn has(addr: IpAddr, tables: &Tables) -> bool {
    tables.state.is_local(addr) || tables.own.contains(&addr)
}

/// The solicited-node multicast groups of these addresses, without duplicates.
fn groups_of<'a>(addresses: impl Iterator<Item = &'a IpAddr>) -> Vec<Ipv6Addr> {
    let groups: BTreeSet<Ipv6Addr> = addresses
        .filter_map(|addr| match addr {
            IpAddr::V6(addr) => Some(ndp::solicited_node(*addr)),
            IpAddr::V4(_) => None,
        })
        .collect();
    groups.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(addr: IpAddr) -> Tables {
        let mut tables = Tables::default();
        tables.own.insert(addr);
        tables
    }

    #[test]
    fn announcement_of_own_address_by_other_host_is_conflict_unless_address_is_released() {
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        let addr = IpAddr::from([192, 0, 2, 10]);
        let mac = Mac([2, 0, 0, 0, 0, 9]);
        let port = PortId::HOST;
        let mut vips = Vips::open(true).expect("no socket is needed");
        vips.report_conflict(port, addr, mac, &own(addr), at(1000));
        vips.report_conflict(port, addr, mac, &own(addr), at(2000));
        assert_eq!(vips.conflicts(Instant::ZERO).count(), 0);
        assert_eq!(vips.next_due(), Some(at(4000)));
        vips.report_due(&own(addr), at(3999));
        assert_eq!(vips.conflicts(Instant::ZERO).count(), 0);
        // The address has been handed over.
        vips.report_due(&Tables::default(), at(4000));
        assert_eq!(
            (vips.conflicts(Instant::ZERO).count(), vips.next_due()),
            (0, None)
        );
        // The address has not been handed over.
        vips.report_conflict(port, addr, mac, &own(addr), at(5000));
        vips.report_due(&own(addr), at(8000));
        let answers = vips
            .conflicts(at(8500))
            .next()
            .expect("one conflict exists")
            .2;
        assert_eq!((answers.since, answers.ago), (Some(3), Some(3)));
        vips.report_conflict(port, addr, mac, &own(addr), at(9000));
        vips.report_conflict(port, addr, mac, &own(addr), at(70_000));
        let (of, conflict, answers) = vips
            .conflicts(at(80_000))
            .next()
            .expect("one conflict exists");
        assert_eq!((of, conflict.port, conflict.mac), (addr, port, mac));
        assert_eq!((answers.since, answers.ago), (Some(75), Some(10)));
        assert_eq!(answers.recent, 3);
        assert_eq!(
            (vips.conflicts(Instant::ZERO).count(), vips.next_due()),
            (1, None)
        );
        // The address was released and taken over again.
        vips.remove(&[addr], &Tables::default());
        assert_eq!(vips.conflicts(Instant::ZERO).count(), 0);
    }

    #[test]
    fn own_addresses_are_probed_in_rounds_of_bounded_size() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let addr =
            |n: usize| IpAddr::from([192, 0, 2, u8::try_from(n).expect("the number is small")]);
        let mut vips = Vips::open(true).expect("no socket is needed");
        let mut tables = Tables::default();
        for n in 0..=WATCHED {
            tables.own.insert(addr(n));
        }
        vips.set_services(&(0..=WATCHED + 1).map(addr).collect(), &tables);
        vips.probing.values_mut().for_each(|left| *left = 0);
        let mut probed = |second| {
            vips.watch(&tables, at(second));
            let probing = vips.probing.iter_mut();
            let due =
                probing.filter_map(|(addr, left)| (std::mem::take(left) > 0).then_some(*addr));
            due.collect::<Vec<_>>()
        };
        assert!(probed(9).is_empty());
        assert_eq!(probed(10).len(), WATCHED);
        assert!(probed(19).is_empty());
        assert_eq!(
            probed(20),
            [addr(WATCHED)],
            "probes were sent for other addresses than the last one on this interface"
        );
        assert_eq!(probed(30).first(), Some(&addr(0)));
    }

    #[test]
    fn address_conflict_ends_after_two_unanswered_probes() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let addr = IpAddr::from([192, 0, 2, 10]);
        let mac = Mac([2, 0, 0, 0, 0, 9]);
        let mut vips = Vips::open(true).expect("no socket is needed");
        vips.report_conflict(PortId::HOST, addr, mac, &own(addr), at(1));
        vips.report_due(&own(addr), at(10));
        let mut left = |from: u64, to: u64| {
            for second in from..to {
                vips.probe(&own(addr), at(second));
            }
            vips.conflicts(Instant::ZERO).count()
        };
        assert_eq!(left(11, 54), 1);
        assert_eq!(left(54, 56), 0);
        // An answer to a probe keeps the conflict.
        vips.report_conflict(PortId::HOST, addr, mac, &own(addr), at(60));
        vips.report_due(&own(addr), at(70));
        for second in 71..200 {
            vips.probe(&own(addr), at(second));
            if second % 20 == 0 {
                vips.report_conflict(PortId::HOST, addr, mac, &own(addr), at(second));
            }
        }
        assert_eq!(vips.conflicts(Instant::ZERO).count(), 1);
    }

    #[test]
    fn address_is_no_conflict_after_release_or_while_peers_announce_it_by_routes() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let addr = IpAddr::from([192, 0, 2, 2]);
        let mac = Mac([2, 0, 0, 0, 0, 9]);
        let none = HashSet::new();
        let mut vips = Vips::open(true).expect("no socket is needed");
        vips.report_conflict(PortId::HOST, addr, mac, &own(addr), at(1));
        vips.set_services(&none, &own(addr));
        vips.report_due(&own(addr), at(4));
        vips.set_services(&none, &own(addr));
        assert_eq!(
            vips.conflicts(at(5)).count(),
            1,
            "the conflict has ended, although the dataplane has the address"
        );
        vips.set_services(&none, &Tables::default());
        assert_eq!(vips.conflicts(at(5)).count(), 0);
        // Peers begin to announce the address, too.
        let mut quiet = own(addr);
        quiet.quiet.insert(addr);
        vips.report_conflict(PortId::HOST, addr, mac, &own(addr), at(6));
        vips.report_due(&quiet, at(9));
        assert_eq!(vips.conflicts(at(9)).count(), 0);
    }

    #[test]
    fn own_address_is_announced_in_bursts_of_bounded_length() {
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        let mut burst = Burst::of(GAPS.len() + 1);
        let taken = (1000..5000).filter(|&ms| burst.take(at(ms)));
        assert_eq!(taken.collect::<Vec<_>>(), [1000, 1200, 2000, 3000]);
        // An interface that flaps all the time.
        let (mut again, mut last, mut taken) = (Burst::of(0), Instant::ZERO, Vec::new());
        for ms in 1000..5000 {
            if (1000..1500).contains(&ms) {
                again.renew(last);
            }
            if again.take(at(ms)) {
                last = at(ms);
                taken.push(ms);
            }
        }
        assert_eq!(taken, [1000, 1200, 1400, 1600, 1800, 2600, 3600]);
        let mut defence = Burst::of(DEFENCES);
        let taken = (1000..5000).filter(|&ms| defence.take(at(ms)));
        assert_eq!(taken.collect::<Vec<_>>(), [1000, 2000]);
    }
}

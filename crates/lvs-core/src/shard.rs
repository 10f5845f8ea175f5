//! The half of a director that belongs to one worker: its connections, their timers, its counters.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use crate::conn::state::{Direction, Timeouts, sctp_next, tcp_next};
use crate::conn::table::flag;
use crate::conn::{ConnTable, Key, NO_SLOT, Slot, State, TEMPLATE_BIT, Template};
use crate::down::Down;
use crate::evict::Hand;
use crate::ftp;
use crate::local_ports::LocalPorts;
use crate::packet::{SCTP_ABORT, is_ipsec, opens};
use crate::stats::Counters;
use crate::sync::Queue;
use crate::sync::wire::Sequences;
use crate::sysctl::Sysctls;
use crate::{
    AcceptReason, ConnId, DropReason, Forward, Forwarding, Hook, IcmpError, Instant, PacketMeta,
    Protocol, Reply, Server, ServerId, TcpFlags, Transport, Tunnel, Tuple, Verdict,
};

/// What control and shards share besides the servers' records.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Raised when a shard's copies of the settings or of the list of servers are out of date.
    pub(crate) generation: AtomicU32,
}

/// Settings of which each shard keeps a copy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// There is an IPv4 service. Without one the kernel looks at no IPv4 packet, whatever connections there are.
    pub(crate) ipv4: bool,
    /// There is an IPv6 service.
    pub(crate) ipv6: bool,
    pub(crate) timeouts: Timeouts,
    pub(crate) sysctls: Sysctls,
    /// The TCP tables that trust only the server are in force.
    pub(crate) secure: bool,
    /// A backup daemon runs and `backup_only` is set: nothing is forwarded.
    pub(crate) backup_only: bool,
    /// The synchronisation master that runs.
    pub(crate) master: Option<crate::sync::Master>,
    /// A full table ends connections for new ones.
    pub(crate) evicts: bool,
    /// A service's engine opens connections for datagrams from its servers.
    pub(crate) outbound: bool,
    /// Virtual ports whose connections the helper for FTP looks at.
    pub(crate) ftp_ports: Vec<u16>,
}

impl Settings {
    /// Whether a packet of no connection has consequences if it comes from a server behind NAT.
    pub(crate) const fn heeds_servers(&self) -> bool {
        self.outbound || self.sysctls.nat_icmp_send
    }

    fn serves(&self, addr: IpAddr) -> bool {
        match addr {
            IpAddr::V4(_) => self.ipv4,
            IpAddr::V6(_) => self.ipv6,
        }
    }
}

/// A server's record and the counters that this shard keeps of it.
#[derive(Clone, Debug)]
pub(crate) struct ServerLink {
    pub(crate) server: Arc<Server>,
    pub(crate) counters: Arc<Counters>,
    /// Of its service; none while it is in the trash.
    pub(crate) service: Option<Arc<Counters>>,
}

/// The links to all servers, by the numbers of their records.
#[derive(Debug, Default)]
pub(crate) struct Links {
    links: Vec<Option<ServerLink>>,
    /// Changes of records that are followed.
    seen: Option<u64>,
    /// Whether it matters where servers behind NAT are.
    heeded: bool,
    /// Where these are, by record, with the protocol of their service or 0 for any.
    translated: BTreeMap<u32, (SocketAddr, u8)>,
    /// The same, by address, with the number of records.
    masqueraded: BTreeMap<(SocketAddr, u8), u32>,
}

/// A link, and its server's address and its service's protocol (0 for any) if it is behind NAT.
type NewLink = Option<(ServerLink, Option<(SocketAddr, u8)>)>;

impl Links {
    #[inline]
    fn get(&self, place: u32) -> Option<&ServerLink> {
        self.links.get(place as usize)?.as_ref()
    }

    /// How many changes of records are followed; `None` before the first.
    pub(crate) const fn seen(&self) -> Option<u64> {
        self.seen
    }

    /// So many changes of records are followed now.
    pub(crate) const fn has_seen(&mut self, changes: u64) {
        self.seen = Some(changes);
    }

    /// Whether it matters where servers behind NAT are. If that changes, everything is to be seen again.
    pub(crate) fn heed(&mut self, heeded: bool) {
        if self.heeded != heeded {
            self.heeded = heeded;
            self.seen = None;
        }
    }

    /// Replaces the link to one record.
    pub(crate) fn set(&mut self, place: u32, link: NewLink) {
        let index = place as usize;
        if self.links.len() <= index {
            self.links.resize_with(index + 1, || None);
        }
        let (link, addr) = link.unzip();
        self.links[index] = link;
        if self.heeded {
            self.masquerade(place, addr.flatten());
        }
    }

    /// Replaces all links.
    pub(crate) fn replace(&mut self, links: Vec<NewLink>) {
        self.links.clear();
        self.translated.clear();
        self.masqueraded.clear();
        for (place, link) in (0..).zip(links) {
            self.set(place, link);
        }
    }

    fn masquerade(&mut self, place: u32, addr: Option<(SocketAddr, u8)>) {
        let before = match addr {
            Some(addr) => self.translated.insert(place, addr),
            None => self.translated.remove(&place),
        };
        if before == addr {
            return;
        }
        if let Some(before) = before
            && let Some(count) = self.masqueraded.get_mut(&before)
        {
            *count -= 1;
            if *count == 0 {
                self.masqueraded.remove(&before);
            }
        }
        if let Some(addr) = addr {
            *self.masqueraded.entry(addr).or_default() += 1;
        }
    }

    /// Whether `addr` is a server behind NAT of a service for `protocol` or for every protocol (`ip_vs_has_real_service`).
    fn is_masqueraded(&self, protocol: Protocol, addr: SocketAddr) -> bool {
        [protocol.0, 0]
            .iter()
            .any(|&of| self.masqueraded.contains_key(&(addr, of)))
    }
}

/// The connections of one worker.
///
/// A packet of a known connection touches nothing else: no lock, no allocation. A packet that needs a decision comes
/// back as [`Pending`] and goes to [`Control::admit`](crate::Control::admit). A shard belongs to one thread at a time, and
/// all packets of a connection, of both directions, go to the same shard; how they get there is the embedder's business.
///
/// | | methods | called |
/// |---|---|---|
/// | packets | [`handle_packet`](Self::handle_packet), [`handle_icmp_error`](Self::handle_icmp_error) | for each; then, on [`Pending`], [`Control`](crate::Control)'s method, with the same time |
/// | time | [`advance`](Self::advance) until it returns false, with packets in between | at [`next_wakeup`](Self::next_wakeup), before [`Control::advance`](crate::Control::advance) |
/// | changes | [`Control::sweep`](crate::Control::sweep) | after each; a shard that was not swept asks at its next packet |
/// | servers that went down | [`end_down`](Self::end_down), whose resets are to be sent | while [`has_down`](Self::has_down), which a sweep may begin |
/// | synchronisation | [`take_sync_message`](Self::take_sync_message) until there is none | at [`next_sync_message`](Self::next_sync_message) |
/// | questions | [`connections_from`](Self::connections_from), [`len`](Self::len) and others | at any time |
///
/// [`Control`](crate::Control) has an example with two shards.
#[derive(Debug)]
pub struct Shard {
    pub(crate) number: usize,
    pub(crate) table: ConnTable,
    pub(crate) links: Links,
    pub(crate) total: Arc<Counters>,
    pub(crate) settings: Settings,
    pub(crate) shared: Arc<Shared>,
    pub(crate) generation: u32,
    /// The templates that connections were made from, by the connections' indices.
    pub(crate) templates: Vec<Option<Arc<Template>>>,
    /// Local addresses and ports of connections that are translated at both ends.
    pub(crate) local_ports: LocalPorts,
    /// Connections that have ended and are still found by the host's own answer to the packet that ended them.
    pub(crate) dying: Vec<u32>,
    /// Synchronisation messages to send.
    pub(crate) sync: Queue,
    /// Adjustments of sequence numbers that came by synchronisation, by the connections' indices.
    pub(crate) sequences: BTreeMap<u32, Sequences>,
    /// What is known of connections whose servers may go down, and what is to be done about those that did.
    pub(crate) down: Down,
    /// What the helper knows of FTP's control connections, by the connections' indices.
    pub(crate) sessions: BTreeMap<u32, ftp::Session>,
    /// Which connections give way when the table is full.
    pub(crate) hand: Hand,
}

/// A packet that the shard alone cannot decide on.
#[derive(Clone, Copy, Debug)]
#[must_use = "the packet is lost if `Control::admit` does not decide on it"]
pub struct Pending {
    /// The connection that the packet replaces. It ends after the decision, not before: while the scheduler runs, it
    /// still counts.
    pub(crate) replaced: Option<u32>,
    /// The shard's copies are out of date: look again.
    pub(crate) stale: bool,
    /// From a server, of no connection; a persistence engine may open one.
    pub(crate) outbound: bool,
}

impl Pending {
    const NEW: Self = Self {
        replaced: None,
        stale: false,
        outbound: false,
    };
    const STALE: Self = Self {
        stale: true,
        ..Self::NEW
    };

    /// A packet that takes the place of connection `index`.
    pub(crate) const fn replacing(index: u32) -> Self {
        Self {
            replaced: Some(index),
            ..Self::NEW
        }
    }
}

/// A connection in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Its identity.
    pub id: ConnId,
    /// TCP, UDP or SCTP; 0 for a template of a firewall mark.
    pub protocol: Protocol,
    /// Client; port 0 for a template.
    pub client: SocketAddr,
    /// Virtual address and port.
    pub virt: SocketAddr,
    /// Real server's address and port.
    pub server: SocketAddr,
    /// State, as the kernel names it.
    pub state: &'static str,
    /// Time until it expires.
    pub expires: Duration,
    /// Forwarding method.
    pub method: Forwarding,
    /// It is a persistence template.
    pub template: bool,
    /// It came by a synchronisation message.
    pub synced: bool,
}

impl Shard {
    /// Decides on a packet of a known connection.
    ///
    /// # Errors
    /// [`Pending`] if the packet needs [`Control::admit`](crate::Control::admit), which then gives the verdict.
    #[inline]
    pub fn handle_packet(
        &mut self,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Result<Verdict, Pending> {
        if self.is_stale() {
            return Err(Pending::STALE);
        }
        self.decide(meta, now)
    }

    /// Decides on an ICMP error.
    ///
    /// # Errors
    /// [`Pending`] if the shard's copies are out of date; then
    /// [`Control::admit_icmp_error`](crate::Control::admit_icmp_error) decides.
    pub fn handle_icmp_error(
        &mut self,
        error: &IcmpError,
        now: Instant,
    ) -> Result<Verdict, Pending> {
        if self.is_stale() {
            return Err(Pending::STALE);
        }
        self.decide_icmp_error(error, now)
    }

    /// Ends connections whose time has come, looking at no more than `budget` of them. `true` if there may be more.
    pub fn advance(&mut self, now: Instant, budget: usize) -> bool {
        self.bury();
        let mut left = budget;
        while left > 0 {
            let due = self.table.take_due_by(now, &mut left);
            let done = due.is_empty();
            for &index in &due {
                self.expire(index);
            }
            self.table.recycle(due);
            if done {
                return left == 0;
            }
        }
        true
    }

    /// When to call [`advance`](Self::advance) next; `None` while there are no connections.
    pub fn next_wakeup(&self) -> Option<Instant> {
        self.table.next_wakeup()
    }

    /// Connections now.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Connections at most.
    pub fn capacity(&self) -> usize {
        self.table.capacity()
    }

    /// Connections from slot `start` on.
    pub fn connections_from(
        &self,
        start: usize,
        now: Instant,
    ) -> impl Iterator<Item = Connection> + '_ {
        self.connections_in(start..self.slots(), now)
    }

    /// Slots that hold or held connections.
    pub const fn slots(&self) -> usize {
        self.table.slots_len()
    }

    /// Connections in these slots: a listing in pieces of so many [`slots`](Self::slots) takes the same short time for
    /// each, be the table full or not.
    pub fn connections_in(
        &self,
        slots: Range<usize>,
        now: Instant,
    ) -> impl Iterator<Item = Connection> + '_ {
        self.table.indices(slots).map(move |index| {
            let slot = self.table.get(index);
            Connection {
                id: ConnId(index),
                protocol: slot.protocol(),
                client: slot.client(),
                virt: slot.virt(),
                server: slot.server_addr(),
                state: slot.state.name(slot.protocol()),
                expires: slot.expires.saturating_since(now),
                method: slot.method(),
                template: false,
                synced: slot.has(flag::SYNC),
            }
        })
    }

    /// Whether packets from `source` to `client` belong to a connection.
    pub fn contains_reply(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
    ) -> bool {
        self.find_reply(protocol, source, client).is_some()
    }

    /// Its number among the director's.
    pub(crate) const fn number(&self) -> usize {
        self.number
    }

    /// Whether its copies are those of this generation.
    pub(crate) fn is_at(&self, generation: u32) -> bool {
        self.generation == generation && self.links.seen().is_some()
    }

    /// Takes a copy of the settings of this generation.
    pub(crate) fn take_settings(&mut self, settings: &Settings, generation: u32) {
        self.settings.clone_from(settings);
        self.generation = generation;
    }

    #[inline]
    fn is_stale(&self) -> bool {
        // Pairs with the release in `Control::changed`: whoever sees the number sees the change.
        self.generation != self.shared.generation.load(Ordering::Acquire)
    }

    /// The packet's way through the hooks (`ip_vs_out_hook`, `ip_vs_in_hook`).
    pub(crate) fn decide(
        &mut self,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Result<Verdict, Pending> {
        if !self.dying.is_empty() && meta.hook != Hook::Output {
            self.bury();
        }
        let Tuple { protocol, src, dst } = meta.tuple;
        if !self.settings.serves(dst.ip()) {
            return Ok(Verdict::Accept(AcceptReason::NoService));
        }
        if !is_balanced(protocol) {
            return Ok(Verdict::Accept(AcceptReason::Protocol));
        }
        if matches!(
            meta.transport,
            Transport::Short { ports: false, .. } | Transport::Other
        ) && !is_ipsec(protocol)
        {
            return Ok(if meta.hook == Hook::Transit {
                Verdict::Accept(AcceptReason::NoConnection)
            } else {
                Verdict::Drop(DropReason::ShortHeader)
            });
        }
        let Tuple { protocol, src, dst } = connection_tuple(Tuple { protocol, src, dst });
        if let Some(index) = self.find_reply(protocol, src, dst) {
            return Ok(self.reply(index, meta, now));
        }
        if self.settings.heeds_servers() && self.links.is_masqueraded(protocol, src) {
            if self.settings.outbound && protocol == Protocol::UDP && meta.hook != Hook::Local {
                return Err(Pending {
                    outbound: true,
                    ..Pending::NEW
                });
            }
            if self.tells_server(meta) {
                return Ok(Verdict::Unreachable(DropReason::StrayReply));
            }
        }
        self.decide_in(meta, now)
    }

    /// What is left when the packet is no reply (`ip_vs_in_hook`).
    pub(crate) fn decide_in(
        &mut self,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Result<Verdict, Pending> {
        if meta.hook == Hook::Transit {
            return Ok(Verdict::Accept(AcceptReason::NoConnection));
        }
        if self.settings.backup_only {
            return Ok(Verdict::Accept(AcceptReason::BackupOnly));
        }
        let Tuple { protocol, src, dst } = connection_tuple(meta.tuple);
        let Some(index) = self.table.find_in(&Key {
            protocol,
            client: src,
            virt: dst,
        }) else {
            if is_ipsec(meta.tuple.protocol) {
                return Ok(Verdict::Accept(AcceptReason::NoConnection));
            }
            return Err(Pending::NEW);
        };
        if self.table.get(index).has(flag::GONE) {
            return self.decide_gone(index, meta, now);
        }
        let replaced = Pending::replacing(index);
        if self.is_replaced_by(index, meta) {
            return Err(replaced);
        }
        match self.link(index) {
            Some(link) if !link.server.is_available() => {
                if link.server.has_gone() {
                    self.end_orphan(index, now);
                    if !self.table.is_used(index) {
                        return Err(Pending::NEW);
                    }
                    return self.decide_gone(index, meta, now);
                }
                if !self.settings.sysctls.expire_nodest_conn {
                    return Ok(Verdict::Drop(DropReason::ServerRemoved));
                }
                if is_ipsec(meta.tuple.protocol) {
                    self.end(index);
                    return Ok(Verdict::Accept(AcceptReason::NoConnection));
                }
                Err(replaced)
            }
            _ => Ok(self.forward(index, meta, now, false)),
        }
    }

    /// Whether a server that speaks without a connection is told so.
    fn tells_server(&self, meta: &PacketMeta<'_>) -> bool {
        self.settings.sysctls.nat_icmp_send
            && match meta.transport {
                Transport::Tcp(flags) => !flags.has(TcpFlags::RST),
                Transport::Sctp(chunk) => chunk.first != SCTP_ABORT,
                Transport::Udp(_) | Transport::Short { .. } => true,
                Transport::Other => false,
            }
    }

    /// Whether a packet that opens a connection takes the place of the one that has its addresses and ports
    /// (`is_new_conn`, `is_new_conn_expected`).
    fn is_replaced_by(&self, index: u32, meta: &PacketMeta<'_>) -> bool {
        if !opens(meta) {
            return false;
        }
        let sysctls = &self.settings.sysctls;
        let slot = self.table.get(index);
        if sysctls.expire_nodest_conn
            && self
                .link(index)
                .is_some_and(|link| link.server.weight() == 0)
        {
            return true;
        }
        if sysctls.conn_reuse_mode == 0 || slot.control != NO_SLOT {
            return false;
        }
        if slot.protocol() == Protocol::SCTP {
            return slot.state == State::SCTP_CLOSED;
        }
        matches!(slot.state, State::TCP_TIME_WAIT | State::TCP_CLOSE)
            || (sysctls.conn_reuse_mode & 2 != 0
                && slot.state == State::TCP_FIN_WAIT
                && slot.has(flag::NO_OUTPUT))
    }

    /// A packet from the client of connection `index`.
    pub(crate) fn forward(
        &mut self,
        index: u32,
        meta: &PacketMeta<'_>,
        now: Instant,
        new: bool,
    ) -> Verdict {
        if self.table.get(index).has(flag::WATCHED) {
            self.watch_request(index, meta, now);
        }
        self.count(index, |counters| counters.count_in(meta.len));
        self.transition(index, meta, true);
        let verdict = self.transmit(index, meta, new, now);
        let slot = self.table.get_mut(index);
        slot.in_packets = slot.in_packets.wrapping_add(1);
        if self.settings.master.is_some() {
            let packets = slot.in_packets;
            self.sync_connection(index, packets, now);
        }
        self.table.restart(index, now);
        verdict
    }

    /// How a client's packet leaves.
    fn transmit(&mut self, index: u32, meta: &PacketMeta<'_>, new: bool, now: Instant) -> Verdict {
        let slot = self.table.get(index);
        let helped = slot.has(flag::HELPED);
        match slot.method() {
            Forwarding::FullNat if self.local_ports.of(index).is_none() => {
                return Verdict::Drop(DropReason::NoLocalPort);
            }
            // Whoever translates finds out that a header is too short, but not before its packet has hops left.
            Forwarding::Nat | Forwarding::FullNat => {
                if slot.has(flag::NO_CPORT) {
                    self.table.set_client_port(index, meta.tuple.src.port());
                }
                if helped {
                    return match self.help_request(index, meta, now) {
                        Ok(shift) => Verdict::Forward(Forward {
                            shift,
                            ..self.forward_of(index, new)
                        }),
                        Err(reason) => Verdict::Drop(reason),
                    };
                }
            }
            Forwarding::Tunnel if slot.server == NO_SLOT => {
                return Verdict::Drop(DropReason::Unbound);
            }
            _ => {}
        }
        Verdict::Forward(self.forward_of(index, new))
    }

    /// The one packet of a connection that is never in the table: counted, sent, forgotten.
    pub(crate) fn forward_once(&mut self, slot: &Slot, meta: &PacketMeta<'_>) -> Verdict {
        if let Some(link) = self.link_of(slot.server) {
            self.count_for(link, Counters::count_connection);
            self.count_for(link, |counters| counters.count_in(meta.len));
        }
        Verdict::Forward(Forward {
            conn: None,
            ..self.forward_of_slot(slot, 0, true)
        })
    }

    /// A packet from the server of connection `index` (`handle_response`).
    pub(crate) fn reply(&mut self, index: u32, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        let nat = self.table.get(index).method().translates();
        if nat && matches!(meta.transport, Transport::Short { header: false, .. }) {
            return Verdict::Drop(DropReason::ShortHeader);
        }
        if self.table.get(index).has(flag::WATCHED)
            && let Some(verdict) = self.watch_reply(index, meta, now)
        {
            return verdict;
        }
        let mut edit = None;
        if self.table.get(index).has(flag::HELPED) {
            match self.help_reply(index, meta, now) {
                Ok(changes) => edit = changes,
                Err(reason) => {
                    self.table.restart(index, now);
                    return Verdict::Drop(reason);
                }
            }
        }
        self.count(index, |counters| counters.count_out(meta.len));
        self.transition(index, meta, false);
        if self.table.get(index).has(flag::DYING) {
            // A packet of a connection that is about to end gives it time again.
            self.table.get_mut(index).flags &= !flag::DYING;
            self.dying.retain(|&dying| dying != index);
        }
        self.table.restart(index, now);
        Verdict::Reply(Reply {
            edit,
            ..self.reply_of(index)
        })
    }

    /// An ICMP error's way through the hooks (`ip_vs_out_icmp`, `ip_vs_in_icmp`). It changes no state and no timer.
    pub(crate) fn decide_icmp_error(
        &mut self,
        error: &IcmpError,
        _now: Instant,
    ) -> Result<Verdict, Pending> {
        const UNRELATED: Verdict = Verdict::Accept(AcceptReason::UnrelatedIcmp);
        if !self.dying.is_empty() && error.hook != Hook::Output {
            self.bury();
        }
        let protocol = error.inner.protocol;
        if !self.settings.serves(error.dst) || !is_balanced(protocol) {
            return Ok(UNRELATED);
        }
        let readable = error.inner_ports || is_ipsec(protocol);
        let Tuple { protocol, src, dst } = connection_tuple(error.inner);
        // About a packet from a client to a server, which is translated already.
        let about_request = || {
            readable
                .then(|| self.find_reply(protocol, dst, src))
                .flatten()
        };
        // About a packet to a client, as the client saw it.
        let about_reply = || {
            (readable && !self.settings.backup_only)
                .then(|| {
                    self.table.find_in(&Key {
                        protocol,
                        client: dst,
                        virt: src,
                    })
                })
                .flatten()
        };
        // The order of the hooks: OUT then IN for local delivery, IN then OUT for packets in transit.
        let out_first = error.hook != Hook::Transit;
        let (request, reply) = if out_first {
            let request = about_request();
            (
                request,
                if request.is_some() {
                    None
                } else {
                    about_reply()
                },
            )
        } else {
            let reply = about_reply();
            (
                if reply.is_some() {
                    None
                } else {
                    about_request()
                },
                reply,
            )
        };
        if let Some(index) = reply {
            return Ok(self.forward_icmp_error(index, error, false));
        }
        let schedules = self.settings.sysctls.schedule_icmp
            && !self.settings.backup_only
            && !is_ipsec(error.inner.protocol);
        if schedules && (request.is_none() || !out_first) {
            return Err(Pending::NEW);
        }
        Ok(request.map_or(UNRELATED, |index| self.reply_icmp_error(index, error)))
    }

    /// An ICMP error about a packet from the client of connection `index`.
    pub(crate) fn reply_icmp_error(&mut self, index: u32, error: &IcmpError) -> Verdict {
        if self.table.get(index).method().translates() && !error.checksum_ok {
            return Verdict::Drop(DropReason::IcmpChecksum);
        }
        self.count(index, |counters| counters.count_out(error.len));
        Verdict::Reply(self.reply_of(index))
    }

    /// An ICMP error about a packet to the client of connection `index`.
    pub(crate) fn forward_icmp_error(
        &mut self,
        index: u32,
        error: &IcmpError,
        new: bool,
    ) -> Verdict {
        let slot = self.table.get(index);
        let nat = slot.method().translates();
        let unbound = slot.method() == Forwarding::Tunnel && slot.server == NO_SLOT;
        if nat && !error.checksum_ok {
            return Verdict::Drop(DropReason::IcmpChecksum);
        }
        self.count(index, |counters| counters.count_in(error.len));
        if !nat {
            let slot = self.table.get_mut(index);
            slot.in_packets = slot.in_packets.wrapping_add(1);
        }
        if unbound {
            return Verdict::Drop(DropReason::Unbound);
        }
        Verdict::Forward(self.forward_of(index, new))
    }

    /// Puts a new connection into the table, made from a template or not; `None` if the table is full.
    pub(crate) fn open(
        &mut self,
        mut slot: Slot,
        template: Option<(u32, Arc<Template>)>,
        now: Instant,
    ) -> Option<u32> {
        if let Some((number, _)) = template {
            slot.control = TEMPLATE_BIT | number;
        }
        let tracked = slot.has(flag::TRACKED);
        self.make_room(now);
        let index = self.table.insert(slot, now)?;
        if tracked {
            self.down.track(index);
        }
        if let Some((_, template)) = template {
            template.controlled.fetch_add(1, Ordering::Relaxed);
            let place = index as usize;
            if self.templates.len() <= place {
                self.templates.resize(place + 1, None);
            }
            self.templates[place] = Some(template);
        }
        Some(index)
    }

    /// Ends a connection after a packet that replaced it (`ip_vs_conn_expire_now`). The host's own answer to that packet
    /// may still find it.
    pub(crate) fn end(&mut self, index: u32) {
        let slot = self.table.get_mut(index);
        if slot.controlled == 0 && !slot.has(flag::DYING) {
            slot.flags |= flag::DYING;
            self.dying.push(index);
        }
    }

    /// Takes out what has ended.
    pub(crate) fn bury(&mut self) {
        while let Some(index) = self.dying.pop() {
            if self.table.is_used(index) && self.table.get(index).has(flag::DYING) {
                self.destroy(index);
            }
        }
    }

    /// Ends a connection by force, and with it a connection that controlled only this one (`ip_vs_conn_del`). Returns
    /// the number of a template that has nothing to control any more and does not outlive that.
    pub(crate) fn kill(&mut self, index: u32) -> Option<u32> {
        let slot = self.table.get(index);
        let (template, controller) = (slot.template(), slot.controller());
        let orphaned = self.destroy(index);
        if let Some(controller) = controller
            && self.table.is_used(controller)
            && self.table.get(controller).controlled == 0
        {
            return self.kill(controller);
        }
        template.filter(|_| orphaned)
    }

    /// Ends every connection whose server has been removed (`ip_vs_expire_nodest_conn_flush`).
    pub(crate) fn flush_removed(&mut self) {
        let removed: Vec<u32> = self
            .table
            .indices(0..usize::MAX)
            .filter(|&index| {
                self.link(index)
                    .is_some_and(|link| !link.server.is_available() && !link.server.has_gone())
            })
            .collect();
        for index in removed {
            if self.table.is_used(index) && self.table.get(index).controlled == 0 {
                // Templates to removed servers are flushed by the control half, orphaned or not.
                let _ = self.kill(index);
            }
        }
    }

    /// The link to the server of connection `index`.
    #[inline]
    pub(crate) fn link(&self, index: u32) -> Option<&ServerLink> {
        self.link_of(self.table.get(index).server)
    }

    #[inline]
    fn link_of(&self, server: u32) -> Option<&ServerLink> {
        self.links.get(server)
    }

    pub(crate) fn forward_of(&self, index: u32, new: bool) -> Forward {
        Forward {
            source: self.local_of(index),
            ..self.forward_of_slot(self.table.get(index), index, new)
        }
    }

    /// What stands for the client of connection `index` towards its server, where both ends are translated.
    #[inline]
    fn local_of(&self, index: u32) -> Option<SocketAddr> {
        match self.table.get(index).method() {
            Forwarding::FullNat => self.local_ports.of(index),
            _ => None,
        }
    }

    /// The connection of a packet from a server, or from a virtual address, to `dst`.
    #[inline]
    fn find_reply(&self, protocol: Protocol, src: SocketAddr, dst: SocketAddr) -> Option<u32> {
        if self.local_ports.is_used(dst.ip()) {
            let found = self.local_ports.find(protocol, src, dst, &self.table);
            if found.is_some() {
                return found;
            }
        }
        self.table.find_out(protocol, src, dst)
    }

    fn forward_of_slot(&self, slot: &Slot, index: u32, new: bool) -> Forward {
        let method = slot.method();
        Forward {
            conn: Some(ConnId(index)),
            server: (slot.server != NO_SLOT).then_some(ServerId(slot.server)),
            method,
            target: if method == Forwarding::Bypass {
                slot.virt()
            } else {
                slot.server_addr()
            },
            source: None,
            virt: slot.virt(),
            tunnel: self
                .link_of(slot.server)
                .map_or(Tunnel::Ipip, |link| link.server.tunnel()),
            new,
            shift: None,
        }
    }

    fn reply_of(&self, index: u32) -> Reply {
        let slot = self.table.get(index);
        Reply {
            conn: ConnId(index),
            server: (slot.server != NO_SLOT).then_some(ServerId(slot.server)),
            source: slot.method().translates().then(|| slot.virt()),
            destination: (slot.method() == Forwarding::FullNat).then(|| slot.client()),
            edit: None,
        }
    }

    /// Counts for the server, its service and the total, while the server is configured (`ip_vs_in_stats`).
    #[inline]
    pub(crate) fn count(&self, index: u32, count: impl Fn(&Counters)) {
        if let Some(link) = self.link(index) {
            self.count_for(link, count);
        }
    }

    fn count_for(&self, link: &ServerLink, count: impl Fn(&Counters)) {
        if !link.server.is_available() {
            return;
        }
        count(&link.counters);
        if let Some(service) = &link.service {
            count(service);
        }
        count(&self.total);
    }

    /// The state machine, the timeout that goes with the new state, and the active and inactive counts.
    #[inline]
    fn transition(&mut self, index: u32, meta: &PacketMeta<'_>, input: bool) {
        let slot = self.table.get_mut(index);
        let protocol = slot.protocol();
        let direction = match (input, slot.has(flag::NO_OUTPUT)) {
            (true, false) => Direction::Input,
            (true, true) => Direction::InputOnly,
            (false, _) => Direction::Output,
        };
        let next = match meta.transport {
            // A connection of another protocol that IPsec packets follow.
            _ if protocol != meta.tuple.protocol => return,
            Transport::Tcp(flags) => {
                if !input {
                    slot.flags &= !flag::NO_OUTPUT;
                }
                tcp_next(self.settings.secure, direction, flags, slot.state)
            }
            Transport::Sctp(chunk) => {
                if !input {
                    slot.flags &= !flag::NO_OUTPUT;
                }
                sctp_next(direction, chunk, slot.state)
            }
            Transport::Udp(_) => State::NONE,
            Transport::Short { .. } | Transport::Other => return,
        };
        slot.timeout = self.settings.timeouts.of(protocol, next);
        let changed = next != slot.state;
        slot.state = next;
        let assures = match protocol {
            Protocol::UDP => !input,
            _ => changed && next.assures(protocol),
        };
        let controlled = slot.control != NO_SLOT;
        let active = next.is_active(protocol);
        if changed && active == slot.has(flag::INACTIVE) && slot.server != NO_SLOT {
            slot.flags ^= flag::INACTIVE;
            if let Some(link) = self.link(index) {
                link.server.set_active(active);
            }
        }
        if assures && controlled {
            self.assure(index);
        }
    }

    /// Lets the template of a connection survive the end of its connections by force.
    fn assure(&mut self, index: u32) {
        if let Some(Some(template)) = self.templates.get(index as usize) {
            template.assured.store(true, Ordering::Relaxed);
        }
    }

    /// The timer of entry `index` has fired; it is out of the wheel (`ip_vs_conn_expire`).
    pub(crate) fn expire(&mut self, index: u32) {
        let slot = self.table.get_mut(index);
        if slot.controlled > 0 {
            // For good: from now on every restart gives it 60 s.
            slot.timeout = 60;
            let fired = slot.expires;
            let threshold = self.settings.sysctls.sync_threshold.0;
            self.sync_connection(index, threshold, fired);
            self.table.restart(index, fired);
            return;
        }
        self.destroy(index);
    }

    /// Frees an entry. `true` if it was the last one that its template controlled, and the template is not assured.
    pub(crate) fn destroy(&mut self, index: u32) -> bool {
        let slot: &Slot = self.table.get(index);
        let full_nat = slot.method() == Forwarding::FullNat;
        let helped = slot.has(flag::HELPED);
        let (controller, active) = (slot.controller(), !slot.has(flag::INACTIVE));
        if let Some(link) = self.link(index) {
            link.server.unbind(active);
        }
        if let Some(controller) = controller {
            let controller = self.table.get_mut(controller);
            controller.controlled = controller.controlled.saturating_sub(1);
        }
        if !self.sequences.is_empty() {
            self.sequences.remove(&index);
        }
        if full_nat {
            self.local_ports.release(index, &self.table);
        }
        if helped {
            self.sessions.remove(&index);
        }
        let template = self
            .templates
            .get_mut(index as usize)
            .and_then(Option::take);
        self.table.remove(index);
        template.is_some_and(|template| template.release())
    }
}

/// ISAKMP, which IPsec packets follow (RFC 2408).
const ISAKMP: u16 = 500;

/// Protocols that connections are kept of.
pub(crate) fn is_balanced(protocol: Protocol) -> bool {
    matches!(
        protocol,
        Protocol::TCP | Protocol::UDP | Protocol::SCTP | Protocol::AH | Protocol::ESP
    )
}

/// What a packet's connection is looked up by: IPsec follows the ISAKMP connection of the same two hosts.
#[inline]
fn connection_tuple(tuple: Tuple) -> Tuple {
    if is_ipsec(tuple.protocol) {
        return Tuple {
            protocol: Protocol::UDP,
            src: SocketAddr::new(tuple.src.ip(), ISAKMP),
            dst: SocketAddr::new(tuple.dst.ip(), ISAKMP),
        };
    }
    tuple
}

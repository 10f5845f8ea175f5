//! Decisions that need only the shard: about packets of existing connections, and about packets
//! that cannot open one.

use core::net::SocketAddr;
use core::sync::atomic::Ordering;

use super::{NeedsControl, ServerLink, Shard};
use crate::conn::{Ahead, Direction, Draft, Key, NO_SLOT, State, flag, sctp_next, tcp_next};
use crate::packet::{SCTP_ABORT, is_ipsec, opens};
use crate::stats::Counters;
use crate::tunnel::Tunnel;
use crate::verdict::Replacement;
use crate::{
    AcceptReason, ConnId, DropReason, Forward, Forwarding, Hook, Instant, PacketMeta, Protocol,
    Reply, ServerId, TcpFlags, Transport, Tuple, Verdict,
};

/// Whether the packet has just opened its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Age {
    New,
    Known,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sender {
    Client,
    Server,
}

/// A health check's TCP or SCTP connection that is no longer active is removed at most this number
/// of seconds after its last packet. Until then, the record of its server cannot be freed.
const PROBE_CLOSED: u32 = 1;
/// A health check's UDP connection is removed at most this number of seconds after its last packet.
/// Until then, a check with the same source port would reach the same server.
const PROBE_UDP: u32 = 30;

impl Shard {
    /// Decides on a packet, in the order of netfilter's hooks (`ip_vs_out_hook`, `ip_vs_in_hook`).
    pub(crate) fn decide(
        &mut self,
        meta: &PacketMeta<'_>,
        ahead: &Ahead,
        now: Instant,
    ) -> Result<Verdict, NeedsControl> {
        if !self.dying.is_empty() && meta.hook != Hook::Output {
            self.reap();
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
        if let Some(index) = self.find_reply_ahead(protocol, src, dst, ahead) {
            self.table.note_source(protocol, src, ahead);
            return Ok(self.reply(index, meta, now));
        }
        if self.settings.heeds_servers() && self.links.is_masqueraded(protocol, src) {
            if self.settings.outbound && protocol == Protocol::UDP && meta.hook != Hook::Local {
                return Err(NeedsControl {
                    outbound: true,
                    ..NeedsControl::NEW
                });
            }
            if self.sends_error_to_server(meta) {
                return Ok(Verdict::Unreachable(DropReason::StrayReply));
            }
        }
        self.decide_in(meta, ahead, now)
    }

    /// Decides on a packet that is not a reply (`ip_vs_in_hook`).
    pub(crate) fn decide_in(
        &mut self,
        meta: &PacketMeta<'_>,
        ahead: &Ahead,
        now: Instant,
    ) -> Result<Verdict, NeedsControl> {
        if meta.hook == Hook::Transit {
            return Ok(Verdict::Accept(AcceptReason::NoConnection));
        }
        if self.settings.backup_only {
            return Ok(Verdict::Accept(AcceptReason::BackupOnly));
        }
        let Tuple { protocol, src, dst } = connection_tuple(meta.tuple);
        let key = Key {
            protocol,
            client: src,
            virt: dst,
        };
        let Some(index) = self.table.find_in_ahead(&key, ahead) else {
            if is_ipsec(meta.tuple.protocol) {
                return Ok(Verdict::Accept(AcceptReason::NoConnection));
            }
            return Err(NeedsControl::NEW);
        };
        if self.table.get(index).has(flag::GONE) {
            return self.decide_gone(index, meta, now);
        }
        let replaced = NeedsControl::replacing(index);
        if self.is_replaced_by(index, meta) {
            return Err(replaced);
        }
        match self.link(index) {
            Some(link) if !link.server.is_available() => {
                if link.server.has_gone() {
                    self.end_orphan(index, now);
                    if !self.table.is_used(index) {
                        return Err(NeedsControl::NEW);
                    }
                    return self.decide_gone(index, meta, now);
                }
                if !self.settings.sysctls.expire_nodest_conn {
                    return Ok(self.drop_of(index, DropReason::ServerRemoved));
                }
                if is_ipsec(meta.tuple.protocol) {
                    self.end(index);
                    return Ok(Verdict::Accept(AcceptReason::NoConnection));
                }
                Err(replaced)
            }
            _ => Ok(self.forward(index, meta, now, Age::Known)),
        }
    }

    /// Whether to answer a server's packet that belongs to no connection with an ICMP error
    /// (`nat_icmp_send`).
    fn sends_error_to_server(&self, meta: &PacketMeta<'_>) -> bool {
        self.settings.sysctls.nat_icmp_send
            && match meta.transport {
                Transport::Tcp(flags) => !flags.has(TcpFlags::RST),
                Transport::Sctp(chunk) => chunk.first != SCTP_ABORT,
                Transport::Udp(_) | Transport::Short { .. } => true,
                Transport::Other => false,
            }
    }

    /// Whether a packet opens a new connection in place of the existing one with its addresses and
    /// ports (`is_new_conn`, `is_new_conn_expected`).
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
        if sysctls.conn_reuse_mode == 0 || slot.control() != NO_SLOT {
            return false;
        }
        // An FTP control connection with data connections is not replaced by a SYN that still
        // belongs to it.
        if slot.has(flag::HELPED)
            && self.table.controlled(index) > 0
            && self.is_same_control(index, meta)
        {
            return false;
        }
        if slot.protocol() == Protocol::SCTP {
            return slot.state() == State::SCTP_CLOSED;
        }
        matches!(slot.state(), State::TCP_TIME_WAIT | State::TCP_CLOSE)
            || (sysctls.conn_reuse_mode & 2 != 0
                && slot.state() == State::TCP_FIN_WAIT
                && slot.has(flag::NO_OUTPUT))
    }

    /// The connection to which a packet to `dst` from a server, or from a virtual address, is a
    /// reply.
    pub(super) fn find_reply(
        &self,
        protocol: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
    ) -> Option<u32> {
        self.find_reply_ahead(protocol, src, dst, &Ahead::NONE)
    }

    #[inline]
    fn find_reply_ahead(
        &self,
        protocol: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
        ahead: &Ahead,
    ) -> Option<u32> {
        if self.local_ports.is_used(dst.ip()) {
            let found = self.local_ports.find(protocol, src, dst, &self.table);
            if found.is_some() {
                return found;
            }
        }
        self.table.find_out_ahead(protocol, src, dst, ahead)
    }
}

/// Packets from clients to servers.
impl Shard {
    /// Decides on a packet from the client of connection `index`. Counts the packet, updates the
    /// connection's state, restarts its timer, and queues the updates for other directors.
    pub(crate) fn forward(
        &mut self,
        index: u32,
        meta: &PacketMeta<'_>,
        now: Instant,
        age: Age,
    ) -> Verdict {
        let slot = self.table.get(index);
        let (before, server) = (slot.state(), slot.server());
        if slot.has(flag::WATCHED) {
            self.watch_request(index, meta, now);
        }
        self.count(server, |counters| counters.count_in(meta.len));
        self.transition(index, meta, Sender::Client);
        let verdict = self.transmit(index, meta, age, now);
        let slot = self.table.get(index);
        slot.count_packet();
        if self.settings.master.is_some() {
            self.sync_packets(index, now);
        }
        self.table.restart(index, now);
        if self.replicas.is_some() {
            self.enter(index, before, now);
        }
        verdict
    }

    /// Returns the verdict about a packet from the client of connection `index`. With NAT, this
    /// sets a client port that was not known, and inspects FTP commands.
    fn transmit(&mut self, index: u32, meta: &PacketMeta<'_>, age: Age, now: Instant) -> Verdict {
        let slot = self.table.get(index);
        let helped = slot.has(flag::HELPED);
        match slot.method() {
            Forwarding::FullNat if self.local_ports.of(index).is_none() => {
                return self.drop_of(index, DropReason::NoLocalPort);
            }
            // NAT detects a truncated header, but only after the check of the TTL.
            Forwarding::Nat | Forwarding::FullNat => {
                if slot.has(flag::NO_CPORT) {
                    self.table.set_client_port(index, meta.tuple.src.port());
                }
                if helped {
                    return match self.help_request(index, meta, now) {
                        Ok(shift) => Verdict::Forward(Forward {
                            shift,
                            ..self.forward_of(index, age)
                        }),
                        Err(reason) => self.drop_of(index, reason),
                    };
                }
            }
            Forwarding::Tunnel if slot.server() == NO_SLOT => {
                return Verdict::Drop(DropReason::Unbound);
            }
            _ => {}
        }
        Verdict::Forward(self.forward_of(index, age))
    }

    /// Forwards the packet of a one-packet connection, which is not in the table. Counts the
    /// connection and the packet.
    pub(crate) fn forward_once(&mut self, slot: &Draft, meta: &PacketMeta<'_>) -> Verdict {
        self.count(slot.server, Counters::count_connection);
        self.count(slot.server, |counters| counters.count_in(meta.len));
        Verdict::Forward(self.forward_without(slot))
    }

    fn forward_without(&self, slot: &Draft) -> Forward {
        let (virt, addr) = (slot.key.virt, slot.server_addr);
        Forward {
            conn: None,
            ..self.forward_to(0, slot.method(), slot.server, virt, addr, true)
        }
    }

    pub(crate) fn forward_of(&self, index: u32, age: Age) -> Forward {
        let new = age == Age::New;
        let entry = self.table.get(index);
        let (virt, server) = (entry.virt(), entry.server_addr());
        Forward {
            source: self.local_of(index),
            ..self.forward_to(index, entry.method(), entry.server(), virt, server, new)
        }
    }

    /// The director's address and port towards the server of connection `index`, if it uses full
    /// NAT.
    #[inline]
    pub(super) fn local_of(&self, index: u32) -> Option<SocketAddr> {
        match self.table.get(index).method() {
            Forwarding::FullNat => self.local_ports.of(index),
            _ => None,
        }
    }

    /// How to forward a packet to `server`, or with [`Forwarding::Bypass`] to `virt` itself. The
    /// caller sets `source` and `shift`.
    #[inline]
    fn forward_to(
        &self,
        index: u32,
        method: Forwarding,
        record: u32,
        virt: SocketAddr,
        server: SocketAddr,
        new: bool,
    ) -> Forward {
        Forward {
            conn: Some(ConnId(index)),
            server: (record != NO_SLOT).then_some(ServerId(record)),
            method,
            target: if method == Forwarding::Bypass {
                virt
            } else {
                server
            },
            source: None,
            virt,
            tunnel: self
                .link_of(record)
                .map_or(Tunnel::Ipip, |link| link.server.tunnel()),
            new,
            shift: None,
        }
    }
}

/// Packets from servers to clients.
impl Shard {
    /// Decides on a packet from the server of connection `index` (`handle_response`). If the packet
    /// is forwarded, counts it, updates the connection's state, and restarts its timer. The timer
    /// is also restarted if the FTP helper drops the packet.
    pub(crate) fn reply(&mut self, index: u32, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        let nat = self.table.get(index).method().translates();
        if nat && matches!(meta.transport, Transport::Short { header: false, .. }) {
            return self.drop_of(index, DropReason::ShortHeader);
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
                    return self.drop_of(index, reason);
                }
            }
        }
        let replacement = edit.as_ref().and_then(|edit| edit.replacement.as_ref());
        let growth = replacement.map_or(0, Replacement::growth);
        let len = meta.len.saturating_add_signed(growth);
        let slot = self.table.get(index);
        let (before, server) = (slot.state(), slot.server());
        self.count(server, |counters| counters.count_out(len));
        self.transition(index, meta, Sender::Server);
        if self.table.get(index).has(flag::DYING) {
            // A packet of a connection that is about to be removed restarts its timer.
            self.table.get(index).clear(flag::DYING);
            self.dying.retain(|&dying| dying != index);
        }
        self.table.restart(index, now);
        if self.replicas.is_some() {
            self.enter(index, before, now);
        }
        Verdict::Reply(Reply {
            edit,
            ..self.reply_of(index)
        })
    }

    pub(super) fn reply_of(&self, index: u32) -> Reply {
        let slot = self.table.get(index);
        Reply {
            conn: ConnId(index),
            server: self.server_of(index),
            source: slot.method().translates().then(|| slot.virt()),
            destination: (slot.method() == Forwarding::FullNat).then(|| slot.client()),
            edit: None,
            probe: slot.has(flag::PROBE),
        }
    }
}

/// Effects of a packet on its connection: state, timeout and counters.
impl Shard {
    /// Updates the connection's state, timeout and flags, its server's counts of active and
    /// inactive connections, and its template.
    #[inline]
    pub(super) fn transition(&mut self, index: u32, meta: &PacketMeta<'_>, sender: Sender) {
        let slot = self.table.get(index);
        let protocol = slot.protocol();
        let direction = match (sender, slot.has(flag::NO_OUTPUT)) {
            (Sender::Client, false) => Direction::Input,
            (Sender::Client, true) => Direction::InputOnly,
            (Sender::Server, _) => Direction::Output,
        };
        let next = match meta.transport {
            // IPsec packets do not change the state of the ISAKMP connection that they use.
            _ if protocol != meta.tuple.protocol => return,
            Transport::Tcp(flags) => {
                if sender == Sender::Server {
                    slot.clear(flag::NO_OUTPUT);
                }
                tcp_next(self.settings.secure, direction, flags, slot.state())
            }
            Transport::Sctp(chunk) => {
                if sender == Sender::Server {
                    slot.clear(flag::NO_OUTPUT);
                }
                sctp_next(direction, chunk, slot.state())
            }
            // The kernel does not read the UDP header here, and so accepts a truncated one.
            Transport::Udp(_) => State::NONE,
            Transport::Short { .. } if protocol == Protocol::UDP => State::NONE,
            Transport::Short { .. } | Transport::Other => return,
        };
        let mut timeout = self.settings.timeouts.of(protocol, next);
        if slot.has(flag::PROBE) && !next.is_active(protocol) {
            timeout = timeout.min(match protocol {
                Protocol::UDP => PROBE_UDP,
                _ => PROBE_CLOSED,
            });
        }
        slot.set_timeout(timeout);
        let changed = next != slot.state();
        if changed {
            slot.set_state(next);
        }
        let assures = match protocol {
            Protocol::UDP => sender == Sender::Server,
            _ => changed && next.assures(protocol),
        };
        let controlled = slot.control() != NO_SLOT;
        let active = next.is_active(protocol);
        if changed && active == slot.has(flag::INACTIVE) && slot.server() != NO_SLOT {
            if active {
                slot.clear(flag::INACTIVE);
            } else {
                slot.set(flag::INACTIVE);
            }
            if let Some(link) = self.link_of(slot.server()) {
                link.server.set_active(active, slot.flags());
            }
        }
        if assures && controlled {
            self.assure(index);
        }
    }

    /// Marks the template of a connection as assured: it is not removed together with its
    /// connections, and it is evicted after templates that are not assured.
    fn assure(&mut self, index: u32) {
        if let Some(Some(template)) = self.templates.get(index) {
            template.assured.store(true, Ordering::Relaxed);
        }
    }

    /// Adds to the counters of a connection's server, of its service and of the director
    /// (`ip_vs_in_stats`). Does nothing if the server is removed, or is [`NO_SLOT`].
    #[inline]
    pub(crate) fn count(&self, server: u32, count: impl Fn(&Counters)) {
        if let Some(link) = self.link_of(server) {
            self.count_for(link, count);
        }
    }

    /// Counts a dropped packet of connection `index` for its server, by reason.
    pub(super) fn count_drop(&mut self, index: u32, reason: DropReason) {
        let server = self.server_of(index);
        self.drops.count(server, reason.name());
    }

    /// Counts a packet of connection `index` as dropped, and returns the verdict.
    pub(super) fn drop_of(&mut self, index: u32, reason: DropReason) -> Verdict {
        self.count_drop(index, reason);
        Verdict::Drop(reason)
    }

    fn server_of(&self, index: u32) -> Option<ServerId> {
        let server = self.table.get(index).server();
        (server != NO_SLOT).then_some(ServerId(server))
    }

    pub(super) fn count_for(&self, link: &ServerLink, count: impl Fn(&Counters)) {
        if !link.server.is_available() {
            return;
        }
        count(&link.counters);
        if let Some(service) = &link.service {
            count(service);
        }
        count(&self.total);
    }
}

/// The UDP port of ISAKMP (RFC 2408). IPsec packets use the server of the ISAKMP connection between
/// the same hosts.
const ISAKMP: u16 = 500;

pub(crate) fn is_balanced(protocol: Protocol) -> bool {
    matches!(
        protocol,
        Protocol::TCP | Protocol::UDP | Protocol::SCTP | Protocol::AH | Protocol::ESP
    )
}

/// The tuple by which the packet's connection is found: for IPsec, the tuple of the ISAKMP
/// connection between the two hosts.
#[inline]
pub(super) fn connection_tuple(tuple: Tuple) -> Tuple {
    if is_ipsec(tuple.protocol) {
        return Tuple {
            protocol: Protocol::UDP,
            src: SocketAddr::new(tuple.src.ip(), ISAKMP),
            dst: SocketAddr::new(tuple.dst.ip(), ISAKMP),
        };
    }
    tuple
}

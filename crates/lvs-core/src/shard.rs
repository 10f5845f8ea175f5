//! The half of a director that belongs to one worker: its connections, their timers, its counters.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use crate::conn::state::{Direction, Timeouts, tcp_next};
use crate::conn::table::flag;
use crate::conn::{ConnTable, Key, NO_SLOT, Slot, State};
use crate::stats::Counters;
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
}

impl Settings {
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

/// The connections of one worker.
///
/// A packet of a known connection touches nothing else: no lock, no allocation. A packet that needs a decision comes
/// back as [`Pending`] and goes to [`Control::admit`](crate::Control::admit).
#[derive(Debug)]
pub struct Shard {
    pub(crate) number: usize,
    pub(crate) table: ConnTable,
    pub(crate) links: Vec<Option<ServerLink>>,
    pub(crate) total: Arc<Counters>,
    pub(crate) settings: Settings,
    pub(crate) shared: Arc<Shared>,
    pub(crate) generation: u32,
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
}

impl Pending {
    const NEW: Self = Self {
        replaced: None,
        stale: false,
    };
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
            return Err(Pending {
                stale: true,
                ..Pending::NEW
            });
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
            return Err(Pending {
                stale: true,
                ..Pending::NEW
            });
        }
        Ok(self.decide_icmp_error(error, now))
    }

    /// Ends connections whose time has come, looking at no more than `budget` of them. `true` if there may be more.
    pub fn advance(&mut self, now: Instant, budget: usize) -> bool {
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

    /// Connections from slot `start` on, for listings in pieces: go on at the last one's index + 1.
    pub fn connections_from(
        &self,
        start: usize,
        now: Instant,
    ) -> impl Iterator<Item = Connection> + '_ {
        let start = u32::try_from(start).unwrap_or(NO_SLOT);
        self.table.indices_from(start).map(move |index| {
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
                template: slot.has(flag::TEMPLATE),
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
        self.table.find_out(protocol, source, client).is_some()
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
        let Tuple { protocol, src, dst } = meta.tuple;
        if !self.settings.serves(dst.ip()) {
            return Ok(Verdict::Accept(AcceptReason::NoService));
        }
        if !matches!(protocol, Protocol::TCP | Protocol::UDP) {
            return Ok(Verdict::Accept(AcceptReason::Protocol));
        }
        if matches!(
            meta.transport,
            Transport::Short { ports: false } | Transport::Other
        ) {
            return Ok(Verdict::Drop(DropReason::ShortHeader));
        }
        if let Some(index) = self.table.find_out(protocol, src, dst) {
            return Ok(self.reply(index, meta, now));
        }
        if meta.hook == Hook::Transit {
            return Ok(Verdict::Accept(AcceptReason::NoConnection));
        }
        let Some(index) = self.table.find_in(&Key {
            protocol,
            client: src,
            virt: dst,
        }) else {
            return Err(Pending::NEW);
        };
        if self.is_replaced_by(index, meta) {
            return Err(Pending {
                replaced: Some(index),
                ..Pending::NEW
            });
        }
        match self.link(index) {
            Some(link) if !link.server.is_available() => {
                if !self.settings.sysctls.expire_nodest_conn {
                    return Ok(Verdict::Drop(DropReason::ServerRemoved));
                }
                Err(Pending {
                    replaced: Some(index),
                    ..Pending::NEW
                })
            }
            _ => Ok(self.forward(index, meta, now, false)),
        }
    }

    /// Whether a packet that opens a connection takes the place of the one that has its addresses and ports
    /// (`is_new_conn`, `is_new_conn_expected`).
    fn is_replaced_by(&self, index: u32, meta: &PacketMeta<'_>) -> bool {
        let Transport::Tcp(flags) = meta.transport else {
            return false;
        };
        if !flags.has(TcpFlags::SYN) {
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
        self.count(index, |counters| counters.count_in(meta.len));
        self.transition(index, meta, true);
        let slot = self.table.get_mut(index);
        slot.in_packets = slot.in_packets.wrapping_add(1);
        self.table.restart(index, now);
        Verdict::Forward(self.forward_of(index, new))
    }

    /// A packet from the server of connection `index` (`handle_response`).
    fn reply(&mut self, index: u32, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        let nat = self.table.get(index).method() == Forwarding::Nat;
        if nat && matches!(meta.transport, Transport::Short { .. }) {
            return Verdict::Drop(DropReason::ShortHeader);
        }
        self.count(index, |counters| counters.count_out(meta.len));
        self.transition(index, meta, false);
        self.table.restart(index, now);
        Verdict::Reply(self.reply_of(index))
    }

    /// An ICMP error's way through the hooks (`ip_vs_out_icmp`, `ip_vs_in_icmp`). It changes no state and no timer.
    pub(crate) fn decide_icmp_error(&mut self, error: &IcmpError, _now: Instant) -> Verdict {
        let Tuple { protocol, src, dst } = error.inner;
        if !self.settings.serves(error.dst)
            || !error.inner_ports
            || !matches!(protocol, Protocol::TCP | Protocol::UDP)
        {
            return Verdict::Accept(AcceptReason::UnrelatedIcmp);
        }
        // About a packet from a client to a server, which is translated already.
        let about_request = self.table.find_out(protocol, dst, src);
        // About a packet to a client, as the client saw it.
        let about_reply = || {
            self.table.find_in(&Key {
                protocol,
                client: dst,
                virt: src,
            })
        };
        // The order of the hooks: OUT then IN for local delivery, IN then OUT for packets in transit.
        let (index, from_server) = match error.hook {
            Hook::Transit => match about_reply() {
                Some(index) => (index, false),
                None => match about_request {
                    Some(index) => (index, true),
                    None => return Verdict::Accept(AcceptReason::UnrelatedIcmp),
                },
            },
            Hook::Local | Hook::Output => match about_request {
                Some(index) => (index, true),
                None => match about_reply() {
                    Some(index) => (index, false),
                    None => return Verdict::Accept(AcceptReason::UnrelatedIcmp),
                },
            },
        };
        let nat = self.table.get(index).method() == Forwarding::Nat;
        if nat && !error.checksum_ok {
            return Verdict::Drop(DropReason::IcmpChecksum);
        }
        if from_server {
            self.count(index, |counters| counters.count_out(error.len));
            return Verdict::Reply(self.reply_of(index));
        }
        self.count(index, |counters| counters.count_in(error.len));
        if !nat {
            let slot = self.table.get_mut(index);
            slot.in_packets = slot.in_packets.wrapping_add(1);
        }
        Verdict::Forward(self.forward_of(index, false))
    }

    /// Ends a connection at once, after a packet that replaced it.
    pub(crate) fn end(&mut self, index: u32) {
        if self.table.get(index).controlled == 0 {
            self.destroy(index);
        }
    }

    /// Ends every connection whose server has been removed (`ip_vs_expire_nodest_conn_flush`).
    pub(crate) fn flush_removed(&mut self) {
        let removed: Vec<u32> = self
            .table
            .indices_from(0)
            .filter(|&index| {
                self.link(index)
                    .is_some_and(|link| !link.server.is_available())
            })
            .collect();
        for index in removed {
            self.end(index);
        }
    }

    /// The link to the server of connection `index`.
    fn link(&self, index: u32) -> Option<&ServerLink> {
        self.links
            .get(self.table.get(index).server as usize)?
            .as_ref()
    }

    fn forward_of(&self, index: u32, new: bool) -> Forward {
        let slot = self.table.get(index);
        Forward {
            conn: Some(ConnId(index)),
            server: (slot.server != NO_SLOT).then_some(ServerId(slot.server)),
            method: slot.method(),
            target: slot.server_addr(),
            virt: slot.virt(),
            tunnel: self
                .link(index)
                .map_or(Tunnel::Ipip, |link| link.server.tunnel()),
            new,
        }
    }

    fn reply_of(&self, index: u32) -> Reply {
        let slot = self.table.get(index);
        Reply {
            conn: ConnId(index),
            server: (slot.server != NO_SLOT).then_some(ServerId(slot.server)),
            source: (slot.method() == Forwarding::Nat).then(|| slot.virt()),
        }
    }

    /// Counts for the server, its service and the total, while the server is configured (`ip_vs_in_stats`).
    #[inline]
    pub(crate) fn count(&self, index: u32, count: impl Fn(&Counters)) {
        let Some(link) = self.link(index) else { return };
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
        let next = match meta.transport {
            Transport::Tcp(flags) => {
                let direction = match (input, slot.has(flag::NO_OUTPUT)) {
                    (true, false) => Direction::Input,
                    (true, true) => Direction::InputOnly,
                    (false, _) => {
                        slot.flags &= !flag::NO_OUTPUT;
                        Direction::Output
                    }
                };
                tcp_next(
                    self.settings.sysctls.secure_tcp >= 2,
                    direction,
                    flags,
                    slot.state,
                )
            }
            Transport::Udp(_) => State::NONE,
            _ => return,
        };
        slot.timeout = self.settings.timeouts.of(protocol, next);
        if next == slot.state {
            return;
        }
        slot.state = next;
        let active = next.is_active(protocol);
        if active == slot.has(flag::INACTIVE) {
            slot.flags ^= flag::INACTIVE;
            if let Some(link) = self.link(index) {
                link.server.set_active(active);
            }
        }
    }

    /// The timer of entry `index` has fired; it is out of the wheel (`ip_vs_conn_expire`).
    fn expire(&mut self, index: u32) {
        let slot = self.table.get_mut(index);
        if slot.controlled > 0 {
            // For good: from now on every restart gives it 60 s.
            slot.timeout = 60;
            let fired = slot.expires;
            self.table.restart(index, fired);
            return;
        }
        self.destroy(index);
    }

    fn destroy(&mut self, index: u32) {
        let slot: &Slot = self.table.get(index);
        let (control, active) = (slot.control, !slot.has(flag::INACTIVE));
        if let Some(link) = self.link(index) {
            link.server.unbind(active);
        }
        if control != NO_SLOT {
            let controller = self.table.get_mut(control);
            controller.controlled = controller.controlled.saturating_sub(1);
        }
        self.table.remove(index);
    }
}

//! Closes the connections of a removed server, if the settings of its service require this
//! ([`OnServerDown`]). The kernel only drops their packets.
//!
//! When a server of such a service is removed, the shard walks over its table once, a bounded
//! number of slots at a time, and closes the server's connections. Unless the service drops their
//! packets silently, it closes a TCP connection by a reset to both ends. RFC 5961 requires that a
//! reset has exactly the sequence number that the receiver expects next. The shard therefore stores
//! two numbers for each TCP connection of such a service. With NAT, it reads them from the segments
//! of both directions; otherwise from the client's segments, whose acknowledgements contain the
//! server's number. The numbers may be inexact, for example because of segments in flight, a lost
//! segment, or a connection that is older than the setting. The receiver then answers with an
//! acknowledgement that contains the expected number, and the shard sends a reset with this number:
//! the entry of a closed connection stays for a while and resets late packets.
//!
//! The kernel fast path stores no numbers, because a slot has no room for them. The shard therefore
//! first sends a probe to the client of an offloaded connection: a copy of the server's SYN+ACK,
//! which any receiver answers with such an acknowledgement (RFC 5961 section 4.2). With this
//! answer, the shard resets both ends.

use super::decide::Age;
use super::{NeedsControl, Shard, tcp};
use crate::conn::{NO_SLOT, Sparse, State, flag};
use crate::packet::{is_ipsec, opens};
use crate::settings::OnServerDown;
use crate::{
    AcceptReason, DropReason, Forward, Instant, PacketMeta, Protocol, TcpFlags, Transport, Tuple,
    Verdict,
};
use alloc::vec::Vec;
use core::time::Duration;

/// Number of packets that a client has sent if it has repeated its SYN once, and nothing else.
const SYN_AND_REPEAT: u32 = 2;

/// A UDP client that sends again after this time without an answer has waited for one.
const PAUSE: Duration = Duration::from_secs(2);

/// A UDP client that sends this number of packets without a pause and without an answer does not
/// wait for one. The connection is then not counted as an attempt, and can be offloaded.
const BURST: u32 = 16;

/// Longest time in seconds for which packets of a connection that was closed without a reset are
/// dropped.
const SILENCE: u32 = 120;

/// Sequence numbers of a TCP segment (RFC 9293 section 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Numbers {
    /// The sequence number after this segment: the number of the segment, plus its payload in
    /// bytes, plus one for a SYN and one for a FIN.
    next: u32,
    /// The acknowledgement number, if the segment has one.
    ack: Option<u32>,
    /// Whether the segment is a SYN, whose number replaces the stored number of its sender even if
    /// it is lower.
    syn: bool,
}

impl Numbers {
    /// Reads a segment, a TCP header with all of its payload (also of a super-packet); `None` if
    /// the header is truncated.
    fn read(tcp: &[u8]) -> Option<Self> {
        let header = tcp::data_offset(tcp)?.max(tcp::HEADER_LEN);
        let payload = tcp.len().checked_sub(header)?;
        let flags = TcpFlags(tcp[tcp::FLAGS]);
        let syn = flags.has(TcpFlags::SYN);
        let len =
            u32::try_from(payload).ok()? + u32::from(syn) + u32::from(flags.has(TcpFlags::FIN));
        Some(Self {
            next: tcp::number(tcp, tcp::SEQUENCE)?.wrapping_add(len),
            ack: if flags.has(TcpFlags::ACK) {
                tcp::number(tcp, tcp::ACKNOWLEDGEMENT)
            } else {
                None
            },
            syn,
        })
    }
}

/// A TCP reset, or a probe for its sequence numbers: a segment without payload from `tuple.src` to
/// `tuple.dst`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reset {
    /// Source and destination: from the virtual address to the client, or from the client to the
    /// virtual address.
    pub tuple: Tuple,
    /// Whether this is a probe: a SYN+ACK, which the receiver answers with an acknowledgement that
    /// contains the number for the reset.
    pub asks: bool,
    /// The sequence number that the receiver expects next; in a probe, it may be an earlier one. 0
    /// in a reset to a client if the number is unknown.
    pub seq: u32,
    /// The acknowledgement number, if known; without it, the segment has no ACK bit.
    pub ack: Option<u32>,
    /// How to forward the reset to the server, as a packet of the client; `None` for a reset to the
    /// client, which is routed.
    pub forward: Option<Forward>,
}

/// The sequence numbers that the two ends of a TCP connection expect next.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Expected {
    /// The next sequence number that the server expects from the client.
    of_client: Option<u32>,
    /// The next sequence number that the client expects from the server.
    of_server: Option<u32>,
    /// Whether the kernel fast path may have forwarded packets since the numbers were recorded.
    missed: bool,
}

/// A shard's walk over the connections of removed servers, and the resets to send.
#[derive(Debug, Default)]
pub(crate) struct Down {
    /// Expected sequence numbers of connections, by connection index.
    expected: Sparse<Expected>,
    /// The slot at which the walk continues; `None` if no walk is necessary.
    at: Option<usize>,
    /// Whether another server was removed since the walk began, so that a second walk is necessary.
    again: bool,
    resets: Vec<Reset>,
    /// Resets to send to servers after clients have answered probes. Their sequence numbers are
    /// from these answers.
    late: Vec<Reset>,
}

impl Down {
    /// Discards the numbers of a previous connection in the slot of connection `index`.
    pub(crate) fn track(&mut self, index: u32) {
        *self.expected.entry(index) = Expected::default();
    }

    /// Records that the kernel fast path forwards packets of connection `index` from now on.
    pub(crate) fn miss(&mut self, index: u32) {
        if let Some(expected) = self.expected.get_mut(index) {
            expected.missed = true;
        }
    }

    /// Starts a walk over the table, because a server was removed. During a walk, requests a second
    /// one.
    pub(crate) fn begin(&mut self) {
        match self.at {
            None => self.at = Some(0),
            Some(_) => self.again = true,
        }
    }
}

impl Expected {
    /// Stores the sequence numbers of a segment. `misses` means that the kernel fast path forwards
    /// the connection's packets.
    fn note(&mut self, numbers: Numbers, from_client: bool, misses: bool) {
        if self.missed && numbers.ack.is_some() {
            // The previous numbers may be so old that a comparison modulo 2^32 would be wrong.
            *self = Self::default();
        }
        self.missed |= misses;
        let (sender, receiver) = if from_client {
            (&mut self.of_client, &mut self.of_server)
        } else {
            (&mut self.of_server, &mut self.of_client)
        };
        if numbers.syn {
            *sender = Some(numbers.next);
        } else {
            raise(sender, numbers.next);
        }
        if let Some(ack) = numbers.ack {
            raise(receiver, ack);
        }
    }
}

/// Sets `number` to `to` if `to` is later in the sequence: retransmitted and reordered segments do
/// not lower it.
fn raise(number: &mut Option<u32>, to: u32) {
    let later = number.is_none_or(|now| to.wrapping_sub(now).cast_signed() > 0);
    if later {
        *number = Some(to);
    }
}

impl Shard {
    /// Stores the sequence numbers of a segment of connection `index`.
    fn track(&mut self, index: u32, meta: &PacketMeta<'_>, from_client: bool) {
        if meta.tuple.protocol == Protocol::TCP
            && let Some(mut numbers) = Numbers::read(meta.segment.bytes)
        {
            if from_client && self.table.get(index).has(flag::HELPED) {
                // The numbers of the server's stream are stored as the server uses them.
                let shift = self.shift(index);
                numbers.ack = numbers.ack.map(|ack| shift.acknowledgement(ack));
            }
            let misses = self.table.get(index).is_live();
            if let Some(expected) = self.down.expected.get_mut(index) {
                expected.note(numbers, from_client, misses);
            }
        }
    }

    /// Whether [`end_down`](Self::end_down) must be called: connections of removed servers may
    /// remain to be closed, or it has resets to return.
    pub fn has_down(&self) -> bool {
        self.down.at.is_some() || !self.down.resets.is_empty()
    }

    /// Closes more connections of removed servers, as their services require. Visits at most
    /// `budget` slots, and closes at most one connection for every 16 slots of the budget, but at
    /// least one. Returns the resets to send. Call it until [`has_down`](Self::has_down) is false,
    /// and handle packets in between.
    pub fn end_down(&mut self, now: Instant, budget: usize) -> Vec<Reset> {
        let mut ends = (budget / 16).max(1);
        let mut left = budget.max(1);
        while let Some(index) = self.down.at {
            if index >= self.table.slots_len() {
                self.down.at = core::mem::take(&mut self.down.again).then_some(0);
                continue;
            }
            if left == 0 || ends == 0 {
                break;
            }
            let mut at = index;
            let found = self.table.walk(&mut at, &mut left);
            self.down.at = Some(at);
            if let Some(index) = found.filter(|&index| self.is_orphan(index)) {
                ends -= 1;
                self.end_orphan(index, now);
            }
        }
        core::mem::take(&mut self.down.resets)
    }

    /// Returns the resets to servers whose clients have answered a probe of
    /// [`end_down`](Self::end_down).
    pub fn take_late_resets(&mut self) -> Vec<Reset> {
        core::mem::take(&mut self.down.late)
    }

    /// Whether the server of entry `index` is removed, and the entry must still be closed for this
    /// reason.
    pub(crate) fn is_orphan(&self, index: u32) -> bool {
        !self.table.get(index).has(flag::GONE)
            && self.link(index).is_some_and(|link| link.server.has_gone())
    }

    /// Closes a connection whose server is removed, as the service requires.
    pub(crate) fn end_orphan(&mut self, index: u32, now: Instant) {
        let on_down = self.on_down(index);
        let slot = self.table.get(index);
        slot.set(flag::GONE);
        match (on_down, slot.protocol()) {
            (OnServerDown::Drop, protocol) => {
                if protocol == Protocol::TCP {
                    self.close(index);
                }
                if self.table.get(index).expires() > now + Duration::from_secs(SILENCE.into()) {
                    self.table.get(index).set_timeout(SILENCE);
                    self.table.restart(index, now);
                }
            }
            (_, Protocol::TCP) => self.reset_both(index, now),
            // The connection is removed, so that the next packet opens a new one.
            (OnServerDown::Reschedule, _) if self.table.controlled(index) == 0 => {
                // The template that controlled the connection has no server any more; it ends with
                // its timer.
                let _ = self.kill(index);
            }
            _ => {}
        }
    }

    /// Closes a TCP connection, and queues resets to both ends if their expected sequence numbers
    /// are known. If the kernel fast path may have forwarded packets since the numbers were
    /// recorded, the segment to the client is a probe. A connection that both ends have closed, or
    /// whose numbers are not tracked, is not changed.
    fn reset_both(&mut self, index: u32, now: Instant) {
        let slot = self.table.get(index);
        if matches!(slot.state(), State::TCP_TIME_WAIT | State::TCP_CLOSE) {
            // Both ends have closed the connection, so neither needs a reset.
            return;
        }
        let tracked = slot.has(flag::TRACKED);
        let expected = self.down.expected.get(index).copied();
        let Some(expected) = expected.filter(|_| tracked) else {
            return;
        };
        let tuple = Tuple {
            protocol: Protocol::TCP,
            src: slot.virt(),
            dst: slot.client(),
        };
        let (of_client, of_server) = (expected.of_client, expected.of_server);
        if of_server.is_some() || of_client.is_some() {
            self.down.resets.push(Reset {
                tuple,
                asks: expected.missed,
                // A client that waits for the answer to its SYN checks the acknowledgement number.
                seq: of_server.map_or(0, |seq| self.shift(index).sequence(seq)),
                ack: of_client,
                forward: None,
            });
        }
        let of_server = self.server_reset(index, expected);
        self.down.resets.extend(of_server);
        self.close(index);
        self.table.restart(index, now);
    }

    /// The reset to the server of a TCP connection, if the sequence number that the server expects
    /// is known.
    fn server_reset(&self, index: u32, expected: Expected) -> Option<Reset> {
        let seq = expected.of_client?;
        let slot = self.table.get(index);
        let tuple = Tuple {
            protocol: Protocol::TCP,
            src: slot.client(),
            dst: slot.virt(),
        };
        Some(Reset {
            tuple,
            asks: false,
            seq,
            ack: expected.of_server,
            forward: Some(self.forward_of(index, Age::Known)),
        })
    }

    fn close(&mut self, index: u32) {
        let timeout = self.settings.timeouts.of(Protocol::TCP, State::TCP_CLOSE);
        let slot = self.table.get(index);
        slot.set_state(State::TCP_CLOSE);
        slot.set_timeout(timeout);
        if !slot.has(flag::INACTIVE) && slot.server() != NO_SLOT {
            slot.set(flag::INACTIVE);
            if let Some(link) = self.link(index) {
                link.server.set_active(false, slot.flags());
            }
        }
    }

    /// The treatment of a client's next packet, as text, if connection `index` has lost its server;
    /// otherwise `None`.
    pub(crate) fn lost(&self, index: u32) -> Option<&'static str> {
        let gone = self.table.get(index).has(flag::GONE);
        let removed = self
            .link(index)
            .is_some_and(|link| !link.server.is_available());
        if !gone && !removed {
            return None;
        }
        let tcp = self.table.get(index).protocol() == Protocol::TCP;
        Some(match self.on_down(index) {
            OnServerDown::Reset | OnServerDown::Reschedule if tcp => {
                "answered with a reset, unless the packet is a SYN: the server of its connection went down"
            }
            OnServerDown::Reset => {
                "refused (port unreachable): the server of its connection went down"
            }
            OnServerDown::Reschedule => "scheduled again: the server of its connection went down",
            OnServerDown::Drop if tcp => {
                "dropped, unless the packet is a SYN: the server of its connection went down"
            }
            OnServerDown::Drop => "dropped: the server of its connection went down",
            OnServerDown::Kernel if self.settings.sysctls.expire_nodest_conn => {
                "scheduled again if the packet may open a connection: the server of its connection was removed"
            }
            OnServerDown::Kernel => "dropped: the server of its connection was removed",
        })
    }

    fn on_down(&self, index: u32) -> OnServerDown {
        self.link(index)
            .map_or(OnServerDown::Kernel, |link| link.server.on_down())
    }

    /// Decides on a client's packet of a connection that was closed because its server was removed.
    ///
    /// # Errors
    /// [`NeedsControl`] if the packet opens a new connection, or belongs to a connection of another
    /// protocol than TCP that the service schedules again ([`OnServerDown::Reschedule`]).
    pub(crate) fn decide_gone(
        &mut self,
        index: u32,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Result<Verdict, NeedsControl> {
        let replaced = NeedsControl::replacing(index);
        if opens(meta) {
            return Err(replaced);
        }
        let protocol = meta.tuple.protocol;
        match self.on_down(index) {
            OnServerDown::Kernel | OnServerDown::Drop => {
                Ok(self.drop_of(index, DropReason::ServerDown))
            }
            _ if is_ipsec(protocol) => {
                self.end(index);
                Ok(Verdict::Accept(AcceptReason::NoConnection))
            }
            OnServerDown::Reset | OnServerDown::Reschedule if protocol == Protocol::TCP => {
                let Transport::Tcp(flags) = meta.transport else {
                    return Ok(self.drop_of(index, DropReason::ShortHeader));
                };
                if flags.has(TcpFlags::RST) {
                    // The client has reset the connection itself, and the server must receive this.
                    return Ok(Verdict::Forward(self.forward_of(index, Age::Known)));
                }
                if self.table.get(index).has(flag::TRACKED)
                    && let Some(expected) = self.down.expected.get_mut(index)
                    && expected.missed
                    && meta.segment.is_intact(&meta.tuple)
                    && let Some(numbers) = Numbers::read(meta.segment.bytes)
                    && numbers.ack.is_some()
                {
                    // The segment also contains the sequence numbers for the reset to the server.
                    expected.note(numbers, true, false);
                    let expected = *expected;
                    let of_server = self.server_reset(index, expected);
                    self.down.late.extend(of_server);
                }
                self.close(index);
                self.table.restart(index, now);
                self.count_drop(index, DropReason::ServerDown);
                Ok(Verdict::Reset(DropReason::ServerDown))
            }
            OnServerDown::Reschedule => Err(replaced),
            OnServerDown::Reset => {
                self.count_drop(index, DropReason::ServerDown);
                self.end(index);
                Ok(Verdict::Unreachable(DropReason::ServerDown))
            }
        }
    }

    /// Decides on a server's packet of a connection that was closed because the server was removed;
    /// `None` if the packet is forwarded to the client.
    fn reply_gone(&mut self, index: u32, meta: &PacketMeta<'_>) -> Option<Verdict> {
        const REASON: DropReason = DropReason::ServerDown;
        let verdict = match (self.on_down(index), meta.transport) {
            (OnServerDown::Drop, _) => Verdict::Drop(REASON),
            (OnServerDown::Reset | OnServerDown::Reschedule, Transport::Tcp(flags))
                if !flags.has(TcpFlags::RST) =>
            {
                Verdict::Reset(REASON)
            }
            _ => return None,
        };
        self.count_drop(index, REASON);
        Some(verdict)
    }

    /// Work before the decision about a packet from the server of connection `index`, if the
    /// connection has one of the flags [`flag::WATCHED`]. Returns the verdict if the server was
    /// removed and the packet is not forwarded for this reason; otherwise `None`.
    pub(crate) fn watch_reply(
        &mut self,
        index: u32,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Option<Verdict> {
        let slot = self.table.get(index);
        if slot.has(flag::TIMED) {
            slot.clear(flag::TIMED);
            let took = now.saturating_since(slot.last_restart());
            if let Some(link) = self.link_of(slot.server()) {
                link.server.latency().observe(took, now);
                let refused =
                    matches!(meta.transport, Transport::Tcp(flags) if flags.has(TcpFlags::RST));
                link.server.note_answer(!refused);
            }
        }
        if slot.has(flag::AWAITED) {
            slot.clear(flag::AWAITED);
            if let Some(link) = self.link_of(slot.server()) {
                link.server.attempts().count_opened();
            }
        }
        if slot.has(flag::GONE) {
            return self.reply_gone(index, meta);
        }
        if slot.has(flag::TRACKED) {
            self.track(index, meta, false);
        }
        None
    }

    /// Work before the decision about a packet from the client of connection `index`, if the
    /// connection has one of the flags [`flag::WATCHED`]. While the server's first answer is
    /// awaited, a repeated SYN, or a UDP packet after a pause, shows that the server did not answer
    /// the previous packet. A TCP segment that is no SYN shows that the server answered; with
    /// direct routing and tunnels, the director does not see the answer itself.
    pub(crate) fn watch_request(&mut self, index: u32, meta: &PacketMeta<'_>, now: Instant) {
        if self.table.get(index).has(flag::TRACKED) {
            self.track(index, meta, true);
        }
        let slot = self.table.get(index);
        if !slot.has(flag::TIMED | flag::AWAITED) {
            return;
        }
        let Some(link) = self.link_of(slot.server()) else {
            return;
        };
        let (server, before) = (&link.server, slot.in_packets());
        let waited = now.saturating_since(slot.last_restart());
        if slot.has(flag::AWAITED) && before > 0 {
            if waited >= PAUSE {
                server.attempts().count_unanswered_datagram();
                slot.clear(flag::AWAITED);
            } else if before + 1 >= BURST {
                slot.clear(flag::AWAITED);
            }
        }
        if !slot.has(flag::TIMED) {
            return;
        }
        let is_tcp = slot.protocol() == Protocol::TCP;
        if opens(meta) {
            if before > 0 && slot.method().translates() {
                server.latency().observe_at_least(waited, now);
                server.note_answer(false);
            }
            match before {
                0 if is_tcp => server.attempts().count_opened(),
                SYN_AND_REPEAT if is_tcp => server.attempts().count_unanswered(),
                _ => {}
            }
        } else if is_tcp && before > 0 {
            slot.clear(flag::TIMED);
        }
    }

    /// Called when connection `index` expires before its server's first answer: counts an
    /// unanswered attempt, if the client's packets prove that there was no answer.
    pub(crate) fn note_expired_attempt(&self, index: u32) {
        let slot = self.table.get(index);
        // A second repetition was counted when it arrived. Without any repetition, the SYN may
        // belong to a flood; with direct routing and tunnels, the client may also have received an
        // answer and sent nothing more.
        let repeated = slot.in_packets() == SYN_AND_REPEAT;
        let unanswered = repeated || slot.in_packets() == 1 && slot.method().translates();
        if slot.state() == State::TCP_SYN_RECV
            && unanswered
            && let Some(link) = self.link(index)
        {
            link.server.attempts().count_unanswered();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_sequence_number_includes_payload_syn_and_fin() {
        let read = |flags: u8, payload: usize| {
            let mut tcp = std::vec![0; 20 + payload];
            tcp[tcp::SEQUENCE].copy_from_slice(&u32::MAX.to_be_bytes());
            tcp[12] = 0x50;
            tcp[tcp::FLAGS] = flags;
            let numbers = Numbers::read(&tcp).unwrap();
            (numbers.next, numbers.ack, numbers.syn)
        };
        assert_eq!(read(0x02, 0), (0, None, true));
        assert_eq!(read(0x12, 0), (0, Some(0), true));
        assert_eq!(read(0x11, 10), (10, Some(0), false));
        assert_eq!(read(0x10, 64_000), (63_999, Some(0), false));
        assert_eq!(Numbers::read(&[0; 12]), None);
        assert_eq!(
            Numbers::read(&[0xf0; 30]),
            None,
            "truncated options were read"
        );
    }
}

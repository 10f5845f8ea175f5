//! Layout of a slot: words that the kernel fast path reads, and some that it may write.
//!
//! ```text
//!            63     56 55     48 47          32 31                              0
//! narrow w0  | kind   |protocol |  port        |  address          | client
//!        w1  | way              |  port        |  address          | virtual address
//!        w2  | next hop         |  port        |  address          | real server
//!        w3  | deadline, nanoseconds                               |
//!        w4  | server's record             |  timeout, seconds     |
//!        w5  | flags                       |  packets from client  |
//!        w6  | armed                       |  control              |
//!        w7  | mark                        | epoch  |old st.|state |
//!
//! wide   w0  | kind   |protocol |  port        |  fold of address  | client
//!     w1 w2  client's address, 16 bytes
//!     w3 w4  virtual address
//!     w5 w6  real server's address
//!        w7  | way              | next hop     | server's port | virtual port |
//!        w8  | sequence number, in the overflow                    |
//!    w9 w10  spare
//!   w11-w15  as w3-w7 of a narrow slot
//! ```
//!
//! Addresses and ports are in network byte order, so that a look-up compares whole words of a
//! packet.

use core::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV4};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Relaxed, Release};
use core::time::Duration;

use super::hash::sip13;
use super::memory::Layout;
use crate::conn::{Draft, Key, NO_SLOT, TEMPLATE_BIT, flag};
use crate::{Forwarding, Instant, Protocol, State};

/// Eight words: a narrow slot, or half of a wide slot.
pub(super) type Line = [AtomicU64; 8];

/// The hashed bits of w0: all bits except the kind bits.
pub(super) const IDENTITY: u64 = (1 << 56) - 1;
/// In w1 and w2 of a narrow slot: address and port.
pub(super) const PEER: u64 = (1 << 48) - 1;

// Words of a narrow slot, and of the first line of a wide one.
const NARROW_VIRT: usize = 1;
const NARROW_SERVER: usize = 2;
const WIDE_CLIENT: usize = 1;
const WIDE_VIRT: usize = 3;
const WIDE_SERVER: usize = 5;
const WIDE_ENDS: usize = 7;
// Words of both kinds of slots, in the line that packets change.
const HOT_DEADLINE: usize = 3;
const HOT_SERVER: usize = 4;
const HOT_FLAGS: usize = 5;
const HOT_CONTROL: usize = 6;
const HOT_STATE: usize = 7;

/// Bits of w0's uppermost byte.
pub(crate) mod kind {
    const fn bit(n: u32) -> u64 {
        1 << (56 + n)
    }

    /// The kernel fast path may forward the packets of the entry.
    pub(crate) const LIVE: u64 = bit(0);
    pub(crate) const TEMPLATE: u64 = bit(1);
    /// The client's port is unknown.
    pub(crate) const NO_CPORT: u64 = bit(2);
    /// A template that look-ups skip.
    pub(crate) const HIDDEN: u64 = bit(3);
    /// Other entries have the same client and virtual address; the overflow's index refers to the
    /// newest.
    pub(crate) const SHADOWED_IN: u64 = bit(4);
    /// Other entries have the same client and server; the overflow's index refers to the newest.
    pub(crate) const SHADOWED_OUT: u64 = bit(5);

    /// The bits that a look-up compares.
    pub(crate) const DISTINCT: u64 = TEMPLATE | NO_CPORT | HIDDEN;
}

/// Bits of w1 (narrow slots) or w7 (wide slots) above the three bits of the forwarding method.
mod way {
    pub(super) const CLIENT_IS_V6: u64 = 8;
    pub(super) const SERVER_IS_V6: u64 = 16;
}

impl Layout {
    /// The constants that a BPF program needs in order to read a table's memory, with their names:
    /// sizes, bits and word numbers. They are valid for this [`VERSION`](Self::VERSION).
    pub const NUMBERS: &[(&str, u64)] = &[
        ("WAYS", Self::WAYS as u64),
        ("NARROW_BYTES", Self::NARROW_WORDS as u64 * 8),
        ("WIDE_BYTES", Self::WIDE_WORDS as u64 * 8),
        ("IDENTITY", IDENTITY),
        ("KIND_LIVE", kind::LIVE),
        ("KIND_TEMPLATE", kind::TEMPLATE),
        ("KIND_NO_CPORT", kind::NO_CPORT),
        ("KIND_HIDDEN", kind::HIDDEN),
        ("KIND_SHADOWED_IN", kind::SHADOWED_IN),
        ("KIND_SHADOWED_OUT", kind::SHADOWED_OUT),
        ("KIND_DISTINCT", kind::DISTINCT),
        ("PEER", PEER),
        ("NARROW_VIRT", NARROW_VIRT as u64),
        ("NARROW_SERVER", NARROW_SERVER as u64),
        ("WIDE_CLIENT", WIDE_CLIENT as u64),
        ("WIDE_VIRT", WIDE_VIRT as u64),
        ("WIDE_SERVER", WIDE_SERVER as u64),
        ("WIDE_ENDS", WIDE_ENDS as u64),
        ("WIDE_HOT", 8),
        ("HOT_DEADLINE", HOT_DEADLINE as u64),
        ("HOT_SERVER", HOT_SERVER as u64),
        ("HOT_FLAGS", HOT_FLAGS as u64),
        ("HOT_STATE", HOT_STATE as u64),
        ("WAY_METHOD", flag::METHOD as u64),
        ("WAY_CLIENT_V6", way::CLIENT_IS_V6),
        ("WAY_SERVER_V6", way::SERVER_IS_V6),
        ("METHOD_NAT", Forwarding::Nat as u64),
        ("METHOD_TUNNEL", Forwarding::Tunnel as u64),
        ("METHOD_ROUTE", Forwarding::Route as u64),
        ("METHOD_FULL_NAT", Forwarding::FullNat as u64),
        ("FLAGS_UP", flag::USERSPACE as u64),
        ("FLAG_NO_OUTPUT", flag::NO_OUTPUT as u64),
        ("STATE_TCP_ESTABLISHED", State::TCP_ESTABLISHED.0 as u64),
        ("STATE_NONE", State::NONE.0 as u64),
        ("TAG_OVERFLOWED", super::buckets::OVERFLOWED),
        ("HOME", super::buckets::HOME as u64),
    ];
}

/// Value of w6's upper half if the entry is not in the wheel.
pub(super) const UNARMED: u32 = u32::MAX;

const HALF: u64 = 0xffff_ffff;

#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
const fn low(word: u64) -> u32 {
    word as u32
}

const fn high(word: u64) -> u32 {
    low(word >> 32)
}

const fn both(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

#[inline]
pub(super) const fn wire(port: u16) -> u64 {
    port.to_be() as u64
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "only the lower 16 bits are used"
)]
const fn unwire(word: u64) -> u16 {
    u16::from_be(word as u16)
}

/// Encodes an address and port as in the lower 48 bits of w0, w1 and w2 of a narrow slot.
#[inline]
pub(super) const fn narrow(addr: [u8; 4], port: u16) -> u64 {
    u32::from_ne_bytes(addr) as u64 | wire(port) << 32
}

#[inline]
fn unnarrow(word: u64) -> SocketAddrV4 {
    SocketAddrV4::new(low(word).to_ne_bytes().into(), unwire(word >> 32))
}

/// The protocol's bits in w0.
#[inline]
pub(super) const fn protocol_part(protocol: Protocol) -> u64 {
    (protocol.0 as u64) << 48
}

/// Encodes an address as in a wide slot.
#[inline]
pub(super) fn wide(addr: IpAddr) -> [u64; 2] {
    let bytes = match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
        IpAddr::V6(addr) => addr.octets(),
    };
    let [one, other] = [0, 8].map(|at| {
        let mut half = [0; 8];
        half.copy_from_slice(&bytes[at..at + 8]);
        u64::from_ne_bytes(half)
    });
    [one, other]
}

fn unwide(words: [u64; 2], v6: bool) -> IpAddr {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&words[0].to_ne_bytes());
    bytes[8..].copy_from_slice(&words[1].to_ne_bytes());
    let addr = Ipv6Addr::from(bytes);
    match addr.to_ipv4_mapped() {
        Some(addr) if !v6 => addr.into(),
        _ => addr.into(),
    }
}

/// Whether w7 of a wide slot marks the client's address as IPv6.
#[inline]
pub(super) const fn is_client_v6(ends: u64) -> bool {
    ends >> 48 & way::CLIENT_IS_V6 != 0
}

/// w0 of a wide slot, with the kind bits 0.
#[inline]
pub(super) const fn wide_identity(client: [u64; 2], port: u16, protocol: Protocol) -> u64 {
    let fold = client[0] ^ client[1];
    (fold ^ fold >> 32) & HALF | wire(port) << 32 | protocol_part(protocol)
}

#[inline]
pub(super) fn narrow_hash(keys: [u64; 2], identity: u64) -> u64 {
    sip13(keys, [identity])
}

#[inline]
pub(super) fn wide_hash(keys: [u64; 2], client: [u64; 2], identity: u64) -> u64 {
    sip13(keys, [client[0], client[1], identity >> 32])
}

impl Draft {
    pub(super) fn kinds(&self) -> u64 {
        let mut kinds = 0;
        if self.has(flag::TEMPLATE) {
            kinds |= kind::TEMPLATE;
            if self.has(flag::DYING) {
                kinds |= kind::HIDDEN;
            }
        }
        if self.has(flag::NO_CPORT) {
            kinds |= kind::NO_CPORT;
        }
        kinds
    }

    fn way(&self) -> u64 {
        let mut way = u64::from(self.flags & flag::METHOD);
        if self.key.client.is_ipv6() {
            way |= way::CLIENT_IS_V6;
        }
        if self.server_addr.is_ipv6() {
            way |= way::SERVER_IS_V6;
        }
        way
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Entry<'a> {
    /// The line with the words that look-ups compare.
    front: &'a Line,
    /// The words 3 to 7, which packets change. A narrow slot has them in the same line, a wide slot
    /// in the second line.
    hot: &'a Line,
    narrow: bool,
}

impl<'a> Entry<'a> {
    pub(super) const fn narrow(line: &'a Line) -> Self {
        Self {
            front: line,
            hot: line,
            narrow: true,
        }
    }

    pub(super) const fn wide(front: &'a Line, hot: &'a Line) -> Self {
        Self {
            front,
            hot,
            narrow: false,
        }
    }

    #[inline]
    fn front(self, n: usize) -> u64 {
        self.front[n].load(Relaxed)
    }

    #[inline]
    fn hot(self, n: usize) -> u64 {
        self.hot[n].load(Relaxed)
    }

    #[inline]
    fn set_hot(self, n: usize, word: u64) {
        self.hot[n].store(word, Relaxed);
    }

    #[inline]
    pub(super) fn word0(self) -> u64 {
        self.front(0)
    }

    #[inline]
    pub(crate) fn protocol(self) -> Protocol {
        Protocol((self.front(0) >> 48 & 0xff) as u8)
    }

    pub(crate) fn client(self) -> SocketAddr {
        let word = self.front(0);
        if self.narrow {
            return unnarrow(word).into();
        }
        let port = unwire(word >> 32);
        let v6 = self.way() & way::CLIENT_IS_V6 != 0;
        SocketAddr::new(
            unwide([self.front(WIDE_CLIENT), self.front(WIDE_CLIENT + 1)], v6),
            port,
        )
    }

    pub(crate) fn virt(self) -> SocketAddr {
        if self.narrow {
            return self.narrow_virt().into();
        }
        let v6 = self.way() & way::CLIENT_IS_V6 != 0;
        let addr = unwide([self.front(WIDE_VIRT), self.front(WIDE_VIRT + 1)], v6);
        SocketAddr::new(addr, unwire(self.front(WIDE_ENDS)))
    }

    pub(crate) fn server_addr(self) -> SocketAddr {
        if self.narrow {
            return self.narrow_server().into();
        }
        let v6 = self.way() & way::SERVER_IS_V6 != 0;
        let addr = unwide([self.front(WIDE_SERVER), self.front(WIDE_SERVER + 1)], v6);
        SocketAddr::new(addr, unwire(self.front(WIDE_ENDS) >> 16))
    }

    /// As [`virt`](Self::virt), for a narrow slot.
    #[inline]
    pub(crate) fn narrow_virt(self) -> SocketAddrV4 {
        unnarrow(self.front(NARROW_VIRT))
    }

    /// As [`server_addr`](Self::server_addr), for a narrow slot.
    #[inline]
    pub(crate) fn narrow_server(self) -> SocketAddrV4 {
        unnarrow(self.front(NARROW_SERVER))
    }

    #[inline]
    fn way(self) -> u64 {
        self.front(if self.narrow { NARROW_VIRT } else { WIDE_ENDS }) >> 48
    }

    pub(super) fn is_of_v4_client(self) -> bool {
        self.narrow || self.way() & way::CLIENT_IS_V6 == 0
    }

    pub(crate) fn set_next_hop(self, hop: Option<u16>) {
        let (n, shift) = if self.narrow {
            (NARROW_SERVER, 48)
        } else {
            (WIDE_ENDS, 32)
        };
        let others = self.front(n) & !(0xffff << shift);
        let hop = u64::from(hop.unwrap_or(0)) << shift;
        self.front[n].store(others | hop, Relaxed);
    }

    #[inline]
    pub(crate) fn expires(self) -> Instant {
        Instant::from_nanos(self.hot(HOT_DEADLINE))
    }

    #[inline]
    pub(super) fn set_expires(self, at: Instant) {
        // Written after the timeout: a BPF program that computes the deadline from the previous
        // timeout reads the timeout again afterwards.
        self.hot[HOT_DEADLINE].store(at.as_nanos(), Release);
    }

    /// The deadline minus the timeout: the time of the connection's last packet, at this director
    /// or at a peer, unless the timer has fired since then and was restarted.
    pub(crate) fn last_restart(self) -> Instant {
        let timeout = u64::from(self.timeout()) * 1_000_000_000;
        Instant::from_nanos(self.expires().as_nanos().saturating_sub(timeout))
    }

    pub(crate) fn idle(self, now: Instant) -> Duration {
        let left = self.expires().saturating_since(now);
        Duration::from_secs(self.timeout().into()).saturating_sub(left)
    }

    /// Seconds from the latest packet until the connection expires.
    #[inline]
    pub(crate) fn timeout(self) -> u32 {
        low(self.hot(HOT_SERVER))
    }

    #[inline]
    pub(crate) fn set_timeout(self, seconds: u32) {
        self.set_hot(HOT_SERVER, both(seconds, high(self.hot(HOT_SERVER))));
    }

    #[inline]
    pub(crate) fn server(self) -> u32 {
        high(self.hot(HOT_SERVER))
    }

    pub(crate) fn set_server(self, record: u32) {
        self.set_hot(HOT_SERVER, both(self.timeout(), record));
    }

    #[inline]
    pub(crate) fn in_packets(self) -> u32 {
        low(self.hot(HOT_FLAGS))
    }

    pub(crate) fn set_in_packets(self, packets: u32) {
        self.update_counted(|word| both(packets, high(word)));
    }

    #[inline]
    pub(crate) fn count_packet(self) {
        self.update_counted(|word| both(low(word).wrapping_add(1), high(word)));
    }

    #[inline]
    pub(crate) fn flags(self) -> u32 {
        high(self.hot(HOT_FLAGS))
    }

    #[inline]
    pub(crate) fn has(self, flag: u32) -> bool {
        self.flags() & flag != 0
    }

    #[inline]
    pub(crate) fn set(self, flags: u32) {
        self.update_counted(|word| word | both(0, flags));
    }

    #[inline]
    pub(crate) fn clear(self, flags: u32) {
        self.update_counted(|word| word & !both(0, flags));
    }

    /// Changes w5, in which the kernel fast path counts packets at the same time.
    #[inline]
    fn update_counted(self, change: impl Fn(u64) -> u64) {
        if self.is_live() {
            let _ = self.hot[HOT_FLAGS].fetch_update(Relaxed, Relaxed, |word| Some(change(word)));
        } else {
            self.set_hot(HOT_FLAGS, change(self.hot(HOT_FLAGS)));
        }
    }

    #[inline]
    pub(crate) fn method(self) -> Forwarding {
        Forwarding::from_bits(self.flags() & flag::METHOD)
    }

    /// Index of the controlling entry, or [`NO_SLOT`]; with [`TEMPLATE_BIT`], index of a template.
    #[inline]
    pub(crate) fn control(self) -> u32 {
        low(self.hot(HOT_CONTROL))
    }

    pub(crate) fn clear_control(self) {
        self.set_hot(HOT_CONTROL, both(NO_SLOT, self.armed()));
    }

    /// Index of the template that controls the connection; `None` if no template does.
    pub(crate) fn template(self) -> Option<u32> {
        let control = self.control();
        (control != NO_SLOT && control & TEMPLATE_BIT != 0).then_some(control & !TEMPLATE_BIT)
    }

    /// Handle of the connection that controls this one; `None` if no connection does.
    pub(crate) fn controller(self) -> Option<u32> {
        Some(self.control()).filter(|control| control & TEMPLATE_BIT == 0)
    }

    /// Tick at which the wheel visits the entry; [`UNARMED`] if the entry is not in the wheel.
    #[inline]
    pub(super) fn armed(self) -> u32 {
        high(self.hot(HOT_CONTROL))
    }

    #[inline]
    pub(super) fn set_armed(self, armed: u32) {
        self.set_hot(HOT_CONTROL, both(self.control(), armed));
    }

    #[inline]
    pub(crate) fn state(self) -> State {
        State((self.hot(HOT_STATE) & 0xff) as u8)
    }

    #[inline]
    pub(crate) fn set_state(self, state: State) {
        self.set_hot(HOT_STATE, self.hot(HOT_STATE) & !0xff | u64::from(state.0));
    }

    /// The state that was synchronised last.
    pub(crate) fn old_state(self) -> State {
        State((self.hot(HOT_STATE) >> 8 & 0xff) as u8)
    }

    pub(crate) fn set_old_state(self, state: State) {
        self.set_hot(
            HOT_STATE,
            self.hot(HOT_STATE) & !0xff00 | u64::from(state.0) << 8,
        );
    }

    pub(crate) fn mark(self) -> u32 {
        high(self.hot(HOT_STATE))
    }

    /// Whether a BPF program may forward the entry's packets.
    #[inline]
    pub(crate) fn is_live(self) -> bool {
        self.front(0) & kind::LIVE != 0
    }

    /// The epoch in which the connection was last offloaded; 0 if it was never offloaded.
    #[inline]
    pub(crate) fn epoch(self) -> u16 {
        (self.hot(HOT_STATE) >> 16 & 0xffff) as u16
    }

    /// Offloads the connection: the kernel fast path may forward its packets as long as `epoch` is
    /// the current one. If other entries match the same packets, only stores `epoch`.
    pub(crate) fn publish(self, epoch: u16) {
        // Written after the next hop, which is valid only in this epoch.
        let word = self.hot(HOT_STATE) & !0xffff_0000 | u64::from(epoch) << 16;
        self.hot[HOT_STATE].store(word, Release);
        if self.word0() & (kind::SHADOWED_IN | kind::SHADOWED_OUT) == 0 {
            self.front[0].store(self.word0() | kind::LIVE, Release);
        }
    }

    /// Evicts the connection from the kernel fast path: its next packets are handled in userspace.
    pub(crate) fn withdraw(self) {
        self.set_kind(kind::LIVE, false);
    }

    pub(super) fn set_kind(self, kinds: u64, on: bool) {
        let word = self.word0();
        let word = if on { word | kinds } else { word & !kinds };
        self.front[0].store(word, Release);
    }

    /// The number that orders the entries of the overflow by age.
    pub(super) fn sequence(self) -> u64 {
        if self.narrow { 0 } else { self.hot(0) }
    }

    pub(super) fn set_sequence(self, number: u64) {
        if !self.narrow {
            self.set_hot(0, number);
        }
    }

    /// Whether replies are looked up by the server's address.
    #[inline]
    pub(super) fn has_out_side(self) -> bool {
        self.method() == Forwarding::Nat && self.word0() & kind::TEMPLATE == 0
    }

    pub(crate) fn draft(self) -> Draft {
        Draft {
            key: Key {
                protocol: self.protocol(),
                client: self.client(),
                virt: self.virt(),
            },
            server_addr: self.server_addr(),
            flags: self.flags(),
            timeout: self.timeout(),
            server: self.server(),
            control: self.control(),
            in_packets: self.in_packets(),
            mark: self.mark(),
            state: self.state(),
            old_state: self.old_state(),
        }
    }

    /// Writes the fields of `draft`, and resets the next hop and the other kind bits; the first
    /// word is written last. The deadline, the tick in the wheel and the epoch stay.
    pub(super) fn write(self, draft: &Draft) {
        self.write_armed(draft, self.armed(), self.epoch());
    }

    /// Writes a free slot without reading it, so that the processor does not wait for the cache
    /// line.
    pub(super) fn fill(self, draft: &Draft, expires: Instant, armed: u32) {
        self.set_expires(expires);
        self.write_armed(draft, armed, 0);
    }

    fn write_armed(self, draft: &Draft, armed: u32, epoch: u16) {
        let (key, server) = (&draft.key, draft.server_addr);
        let front = |n: usize, word: u64| self.front[n].store(word, Relaxed);
        let identity =
            if let (true, SocketAddr::V4(client), SocketAddr::V4(virt), SocketAddr::V4(server)) =
                (self.narrow, key.client, key.virt, server)
            {
                front(
                    NARROW_VIRT,
                    narrow(virt.ip().octets(), virt.port()) | draft.way() << 48,
                );
                front(NARROW_SERVER, narrow(server.ip().octets(), server.port()));
                narrow(client.ip().octets(), client.port()) | protocol_part(key.protocol)
            } else {
                let client = wide(key.client.ip());
                let words = [client, wide(key.virt.ip()), wide(server.ip())];
                for (n, &word) in words.as_flattened().iter().enumerate() {
                    front(WIDE_CLIENT + n, word);
                }
                front(
                    WIDE_ENDS,
                    wire(key.virt.port()) | wire(server.port()) << 16 | draft.way() << 48,
                );
                wide_identity(client, key.client.port(), key.protocol)
            };
        self.set_hot(HOT_SERVER, both(draft.timeout, draft.server));
        self.set_hot(HOT_FLAGS, both(draft.in_packets, draft.flags));
        self.set_hot(HOT_CONTROL, both(draft.control, armed));
        let states = u64::from(draft.state.0) | u64::from(draft.old_state.0) << 8;
        self.set_hot(
            HOT_STATE,
            states | u64::from(epoch) << 16 | both(0, draft.mark),
        );
        self.front[0].store(identity | draft.kinds(), Release);
    }

    pub(super) fn free(self) {
        self.front[0].store(0, Release);
        self.set_armed(UNARMED);
    }
}

impl core::fmt::Debug for Entry<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.draft().fmt(f)
    }
}

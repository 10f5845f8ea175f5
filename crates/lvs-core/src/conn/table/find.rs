//! Look-up of the connection to which a packet belongs.

use core::net::{IpAddr, SocketAddr, SocketAddrV4};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::buckets::{Buckets, Tags, lanes};
use super::memory::Layout;
use super::overflow::Side;
use super::slot::{
    IDENTITY, Line, PEER, is_client_v6, kind, narrow, narrow_hash, protocol_part, wide, wide_hash,
    wide_identity, wire,
};
use super::{ConnTable, is_same};
use crate::conn::{Key, NO_SLOT};
use crate::fast_path::Plain;
use crate::{Forwarding, Protocol};

impl ConnTable {
    /// The connection of a packet from a client (`ip_vs_conn_in_get`); the newest, if several
    /// match. A connection whose client port is unknown matches only if no other one does.
    #[inline]
    pub(crate) fn find_in(&self, key: &Key) -> Option<u32> {
        self.find_in_ahead(key, &Ahead::NONE)
    }

    /// As [`find_in`](Self::find_in), for a packet with an optional look-up hint.
    #[inline]
    pub(crate) fn find_in_ahead(&self, key: &Key, ahead: &Ahead) -> Option<u32> {
        let port = key.client.port();
        // Entries with port 0 (templates, unknown ports) do not match packets from port 0.
        let exact = if port == 0 {
            None
        } else {
            self.find_client(key, port, 0, ahead)
        };
        if exact.is_some() || self.portless == 0 {
            return exact;
        }
        self.find_overflow_in(key, 0, kind::NO_CPORT)
    }

    /// The template with this client network, virtual address and protocol (`ip_vs_ct_in_get`).
    pub(crate) fn find_template(&self, key: &Key) -> Option<u32> {
        self.find_client(key, 0, kind::TEMPLATE, &Ahead::NONE)
    }

    /// The newest entry with this client address, `port`, virtual address and protocol, and with
    /// exactly these [kind bits](super::slot::kind).
    #[inline]
    fn find_client(&self, key: &Key, port: u16, kinds: u64, ahead: &Ahead) -> Option<u32> {
        let (IpAddr::V4(client), IpAddr::V4(virt)) = (key.client.ip(), key.virt.ip()) else {
            return self.find_wide_in(key, port, kinds, ahead);
        };
        let identity = narrow(client.octets(), port) | protocol_part(key.protocol);
        let virt = narrow(virt.octets(), key.virt.port());
        let found = self.find_narrow_in(identity, kinds, virt, ahead);
        match found {
            Found::Entry(handle) => return Some(handle),
            Found::Perhaps => {
                let found = self.find_overflow_in(key, port, kinds);
                if found.is_some() {
                    return found;
                }
            }
            Found::Nothing => {}
        }
        if self.mixed == 0 {
            return None;
        }
        self.find_wide_in(key, port, kinds, ahead)
    }

    fn find_wide_in(&self, key: &Key, port: u16, kinds: u64, ahead: &Ahead) -> Option<u32> {
        let (client, virt) = (wide(key.client.ip()), wide(key.virt.ip()));
        let identity = wide_identity(client, port, key.protocol);
        let aim = ahead.side(false, 0);
        let found = self.find_wide(client, identity, aim, |word, line| {
            let load = |n: usize| line[n].load(Relaxed);
            let alike = word & (IDENTITY | kind::DISTINCT) == identity | kinds
                && [load(1), load(2)] == client
                && [load(3), load(4)] == virt
                && load(7) & 0xffff == wire(key.virt.port())
                && is_client_v6(load(7)) == key.client.is_ipv6();
            alike.then_some(kind::SHADOWED_IN)
        });
        match found {
            Found::Entry(handle) => Some(handle),
            Found::Perhaps => self.find_overflow_in(key, port, kinds),
            Found::Nothing => None,
        }
    }

    #[cold]
    fn find_overflow_in(&self, key: &Key, port: u16, kinds: u64) -> Option<u32> {
        let client = SocketAddr::new(key.client.ip(), port);
        let hash = self.overflow.hash(key.protocol, client, key.virt);
        self.overflow.find(hash, |handle, side| {
            let entry = self.get(handle);
            side == Side::In
                && entry.word0() & kind::DISTINCT == kinds
                && entry.protocol() == key.protocol
                && is_same(entry.client(), client)
                && is_same(entry.virt(), key.virt)
        })
    }

    /// The connection of a packet from `source` to `client` (`ip_vs_conn_out_get`): `source` is the
    /// real server if the connection uses NAT, otherwise the virtual address. Connections with full
    /// NAT are not found.
    #[inline]
    pub(crate) fn find_out(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
    ) -> Option<u32> {
        self.find_out_ahead(protocol, source, client, &Ahead::NONE)
    }

    /// As [`find_out`](Self::find_out), for a packet with an optional look-up hint.
    #[inline]
    pub(crate) fn find_out_ahead(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
        ahead: &Ahead,
    ) -> Option<u32> {
        let (IpAddr::V4(to), IpAddr::V4(from)) = (client.ip(), source.ip()) else {
            return self.find_wide_out(protocol, source, client, ahead);
        };
        let identity = narrow(to.octets(), client.port()) | protocol_part(protocol);
        if self.strangers.has(identity) {
            return None;
        }
        let found = self.find_narrow_out(identity, narrow(from.octets(), source.port()), ahead);
        match found {
            Found::Entry(handle) => return Some(handle),
            Found::Perhaps => {
                let found = self.find_overflow_out(protocol, source, client);
                if found.is_some() {
                    return found;
                }
            }
            Found::Nothing => {}
        }
        if self.mixed == 0 {
            self.learn_stranger(identity);
            return None;
        }
        self.find_wide_out(protocol, source, client, ahead)
    }

    fn find_wide_out(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
        ahead: &Ahead,
    ) -> Option<u32> {
        let (to, from) = (wide(client.ip()), wide(source.ip()));
        let identity = wide_identity(to, client.port(), protocol);
        let port = wire(source.port());
        let aim = ahead.side(false, 1);
        let found = self.find_wide(to, identity, aim, |word, line| {
            let load = |n: usize| line[n].load(Relaxed);
            if word & (IDENTITY | kind::TEMPLATE) != identity || [load(1), load(2)] != to {
                return None;
            }
            let ends = load(7);
            if is_client_v6(ends) != client.is_ipv6() {
                return None;
            }
            let virt = ends & 0xffff == port && [load(3), load(4)] == from;
            let server = ends >> 16 & 0xffff == port && [load(5), load(6)] == from;
            answers(ends >> 48, virt, server)
        });
        match found {
            Found::Entry(handle) => Some(handle),
            Found::Perhaps => self.find_overflow_out(protocol, source, client),
            Found::Nothing => None,
        }
    }

    #[cold]
    fn find_overflow_out(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
    ) -> Option<u32> {
        let hash = self.overflow.hash(protocol, client, source);
        self.overflow.find(hash, |handle, side| {
            let entry = self.get(handle);
            entry.word0() & kind::TEMPLATE == 0
                && (side == Side::Out || !entry.method().translates())
                && entry.protocol() == protocol
                && is_same(entry.client(), client)
                && is_same(side.peer(entry), source)
        })
    }

    /// Searches the narrow slots (IPv4) for the connection of a packet. Returns its handle, and
    /// whether the packet is a reply. After `None`, the connection may still be in another slot.
    #[inline]
    pub(crate) fn find_plain(&self, packet: &Plain, ahead: &Ahead) -> Option<(u32, bool)> {
        let part = protocol_part(packet.protocol);
        let [from, to] = [packet.src, packet.dst].map(|end| narrow(end.ip().octets(), end.port()));
        let identity = to | part;
        if !self.strangers.has(identity) {
            match self.find_narrow_out(identity, from, ahead) {
                Found::Entry(handle) => return Some((handle, true)),
                Found::Nothing if self.mixed == 0 => self.learn_stranger(identity),
                Found::Nothing | Found::Perhaps => return None,
            }
        }
        // Entries with port 0 do not match packets from port 0.
        if packet.transit || packet.src.port() == 0 {
            return None;
        }
        match self.find_narrow_in(from | part, 0, to, ahead) {
            Found::Entry(handle) => Some((handle, false)),
            Found::Nothing | Found::Perhaps => None,
        }
    }

    /// Finds the narrow slot of a client's entry for a virtual address, with exactly these [kind
    /// bits](super::slot::kind).
    #[inline]
    fn find_narrow_in(&self, identity: u64, kinds: u64, virt: u64, ahead: &Ahead) -> Found {
        self.find_narrow(identity, ahead.side(true, 0), |word, line| {
            let alike = word & (IDENTITY | kind::DISTINCT) == identity | kinds
                && line[1].load(Relaxed) & PEER == virt;
            alike.then_some(kind::SHADOWED_IN)
        })
    }

    /// Finds the narrow slot of a client's entry to which a packet from `source` to the client is a
    /// reply.
    #[inline]
    fn find_narrow_out(&self, identity: u64, source: u64, ahead: &Ahead) -> Found {
        self.find_narrow(identity, ahead.side(true, 1), |word, line| {
            if word & (IDENTITY | kind::TEMPLATE) != identity {
                return None;
            }
            let (virt, server) = (line[1].load(Relaxed), line[2].load(Relaxed));
            answers(virt >> 48, virt & PEER == source, server & PEER == source)
        })
    }

    /// Finds a narrow slot of a client. For a matching slot, `is` returns the bit that is set if a
    /// newer equal entry hides the slot.
    #[inline]
    fn find_narrow(
        &self,
        identity: u64,
        aim: Aim,
        is: impl Fn(u64, &Line) -> Option<u64>,
    ) -> Found {
        let mut hash = aim.hash;
        if aim.identity != identity {
            hash = narrow_hash(self.slots.memory.layout.keys, identity);
        } else if aim.slot != NO_SLOT {
            // The identity of a packet never equals the content of a free slot.
            let line = self.slots.narrow_line(aim.slot as usize);
            let word = line[0].load(Relaxed);
            if let Some(shadow) = is(word, line)
                && word & shadow == 0
            {
                return Found::Entry(aim.slot);
            }
        }
        self.find_narrow_by(hash, is)
    }

    fn find_narrow_by(&self, hash: u64, is: impl Fn(u64, &Line) -> Option<u64>) -> Found {
        let buckets = Buckets::of(hash, self.slots.memory.layout.narrow_buckets);
        if self.at_home[0] {
            let line = self.slots.narrow_line(buckets.home());
            let word = line[0].load(Relaxed);
            if let Some(shadow) = is(word, line) {
                return Found::entry(buckets.home(), word & shadow != 0);
            }
        }
        let tags = self.slots.tags(true);
        let first = tags.word(buckets.first);
        let words = [
            (buckets.first, first),
            (buckets.second, tags.word(buckets.second)),
        ];
        for (bucket, word) in words {
            for lane in lanes(word, buckets.tag) {
                let slot = bucket * Layout::WAYS + lane;
                let line = self.slots.narrow_line(slot);
                let word = line[0].load(Relaxed);
                if let Some(shadow) = is(word, line) {
                    return Found::entry(slot, word & shadow != 0);
                }
            }
        }
        Found::none(first)
    }

    /// As [`find_narrow`](Self::find_narrow), for the wide slots.
    fn find_wide(
        &self,
        client: [u64; 2],
        identity: u64,
        aim: Aim,
        is: impl Fn(u64, &Line) -> Option<u64>,
    ) -> Found {
        let layout = &self.slots.memory.layout;
        if layout.wide_buckets == 0 {
            return Found::Perhaps;
        }
        if aim.identity == identity && aim.slot != NO_SLOT {
            let line = self.slots.memory.wide.line(2 * aim.slot as usize);
            let word = line[0].load(Relaxed);
            if let Some(shadow) = is(word, line)
                && word & shadow == 0
            {
                return Found::entry((self.slots.wide + aim.slot) as usize, false);
            }
        }
        let hash = wide_hash(layout.keys, client, identity);
        let buckets = Buckets::of(hash, layout.wide_buckets);
        if self.at_home[1] {
            let line = self.slots.memory.wide.line(2 * buckets.home());
            let word = line[0].load(Relaxed);
            if let Some(shadow) = is(word, line) {
                let handle = self.slots.wide as usize + buckets.home();
                return Found::entry(handle, word & shadow != 0);
            }
        }
        let tags = self.slots.tags(false);
        for bucket in [buckets.first, buckets.second] {
            for lane in lanes(tags.word(bucket), buckets.tag) {
                let slot = bucket * Layout::WAYS + lane;
                let line = self.slots.memory.wide.line(2 * slot);
                let word = line[0].load(Relaxed);
                if let Some(shadow) = is(word, line) {
                    return Found::entry(self.slots.wide as usize + slot, word & shadow != 0);
                }
            }
        }
        Found::none(tags.word(buckets.first))
    }

    /// If it is certain that no entry has this client, records that the address and port do not
    /// belong to a client.
    #[cold]
    fn learn_stranger(&self, identity: u64) {
        let hash = narrow_hash(self.slots.memory.layout.keys, identity);
        let found = self.find_narrow_by(hash, |word, _| (word & IDENTITY == identity).then_some(0));
        if self.mixed == 0 && matches!(found, Found::Nothing) {
            self.strangers.add(identity);
        }
    }

    /// Records that `source` is not a client. Does nothing if an entry may have `source` as its
    /// client, if `ahead` was not prepared for `source`, or for IPv6.
    #[inline]
    pub(crate) fn note_source(&self, protocol: Protocol, source: SocketAddr, ahead: &Ahead) {
        let aim = ahead.side(true, 0);
        if aim.slot == NO_SLOT
            && let IpAddr::V4(addr) = source.ip()
            && aim.identity == narrow(addr.octets(), source.port()) | protocol_part(protocol)
        {
            self.learn_stranger(aim.identity);
        }
    }

    /// As [`note_source`](Self::note_source), for the source for which `ahead` was prepared.
    #[inline]
    pub(crate) fn note_stranger(&self, ahead: &Ahead) {
        let aim = ahead.side(true, 0);
        if aim.slot == NO_SLOT && aim.identity != NOBODY {
            self.learn_stranger(aim.identity);
        }
    }

    /// Prefetches: calls `load` with the first words that a look-up of a packet between these two
    /// addresses reads. Either address may be the client, unless it is known not to be one.
    /// [`aim`](Self::aim) is the next step.
    #[inline]
    pub(crate) fn ahead(
        &self,
        protocol: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
        load: impl Fn(&AtomicU64),
    ) -> Ahead {
        match (src, dst) {
            (SocketAddr::V4(src), SocketAddr::V4(dst)) => {
                self.ahead_narrow(protocol, src, dst, load)
            }
            _ => self.ahead_wide(protocol, src, dst, load),
        }
    }

    /// As [`ahead`](Self::ahead), over IPv4.
    #[inline(always)]
    pub(crate) fn ahead_narrow(
        &self,
        protocol: Protocol,
        src: SocketAddrV4,
        dst: SocketAddrV4,
        load: impl Fn(&AtomicU64),
    ) -> Ahead {
        let keys = self.slots.memory.layout.keys;
        let reach = |identity| {
            let hash = narrow_hash(keys, identity);
            self.reach(true, identity, hash, &load)
        };
        let part = protocol_part(protocol);
        let [from, to] = [src, dst].map(|end| narrow(end.ip().octets(), end.port()) | part);
        let sides = if self.strangers.has(to) {
            [reach(from), Aim::NONE]
        } else if self.strangers.has(from) {
            [Aim::NONE, reach(to)]
        } else {
            [from, to].map(reach)
        };
        Ahead {
            narrow: true,
            sides,
        }
    }

    fn ahead_wide(
        &self,
        protocol: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
        load: impl Fn(&AtomicU64),
    ) -> Ahead {
        let layout = &self.slots.memory.layout;
        if layout.wide_buckets == 0 {
            return Ahead::NONE;
        }
        let reach = |addr: SocketAddr| {
            let client = wide(addr.ip());
            let identity = wide_identity(client, addr.port(), protocol);
            let hash = wide_hash(layout.keys, client, identity);
            self.reach(false, identity, hash, &load)
        };
        Ahead {
            narrow: false,
            sides: [src, dst].map(reach),
        }
    }

    /// Calls `load` with the first words that a look-up of an address and port with this hash will
    /// read.
    #[inline(always)]
    fn reach(&self, narrow: bool, identity: u64, hash: u64, load: &impl Fn(&AtomicU64)) -> Aim {
        let buckets = Buckets::of(hash, self.slots.buckets(narrow));
        let home = buckets.home();
        match (self.at_home[usize::from(!narrow)], narrow) {
            (false, _) => {
                let tags = self.slots.tags(narrow);
                load(tags.place(buckets.first));
                load(tags.place(buckets.second));
            }
            (true, true) => load(&self.slots.narrow_line(home)[0]),
            (true, false) => load(&self.slots.memory.wide.line(2 * home)[0]),
        }
        Aim {
            identity,
            hash,
            slot: NO_SLOT,
        }
    }

    /// Reads the words that [`ahead`](Self::ahead) has prefetched, and prefetches the slot to which
    /// they refer.
    #[inline]
    pub(crate) fn aim(&self, ahead: &mut Ahead, load: impl Fn(&AtomicU64)) {
        let narrow = ahead.narrow;
        for aim in &mut ahead.sides {
            if aim.identity != NOBODY {
                self.aim_at(narrow, aim, &load);
            }
        }
    }

    #[inline]
    fn aim_at(&self, narrow: bool, aim: &mut Aim, load: &impl Fn(&AtomicU64)) {
        let line = |slot: usize| {
            if narrow {
                self.slots.narrow_line(slot)
            } else {
                self.slots.memory.wide.line(2 * slot)
            }
        };
        let load_rest = |slot: usize| {
            if !narrow {
                load(&self.slots.memory.wide.line(2 * slot + 1)[0]);
            }
        };
        let buckets = Buckets::of(aim.hash, self.slots.buckets(narrow));
        if self.at_home[usize::from(!narrow)] {
            let home = buckets.home();
            if line(home)[0].load(Relaxed) & IDENTITY == aim.identity {
                aim.slot = u32::try_from(home).unwrap_or(NO_SLOT);
                load_rest(home);
                return;
            }
        }
        let tags = self.slots.tags(narrow);
        for bucket in [buckets.first, buckets.second] {
            // If another entry in the bucket has the same tag (1 in 16), the prefetch is useless.
            if let Some(lane) = lanes(tags.word(bucket), buckets.tag).next() {
                let slot = bucket * Layout::WAYS + lane;
                load(&line(slot)[0]);
                load_rest(slot);
                if aim.slot == NO_SLOT {
                    aim.slot = u32::try_from(slot).unwrap_or(NO_SLOT);
                }
            }
        }
    }
}

/// The slot that probably contains the entry of a packet. It affects only the speed, and is valid
/// only for the shard that returned it.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    narrow: bool,
    /// Index 0: with the packet's source as the client; index 1: with its destination as the
    /// client.
    sides: [Aim; 2],
}

impl Ahead {
    pub(crate) const NONE: Self = Self {
        narrow: true,
        sides: [Aim::NONE; 2],
    };

    /// The hint for one side; an empty hint if `narrow` differs from the kind of slot that this
    /// value was prepared for.
    #[inline]
    const fn side(&self, narrow: bool, side: usize) -> Aim {
        if self.narrow == narrow {
            self.sides[side]
        } else {
            Aim::NONE
        }
    }
}

/// An identity that no entry has: all valid ones are within [`IDENTITY`]. 0 is valid: the template
/// of a mark uses it.
const NOBODY: u64 = u64::MAX;
const _: () = assert!(IDENTITY != NOBODY);

#[derive(Clone, Copy, Debug)]
struct Aim {
    /// The identity that the entry must have; [`NOBODY`] without a hint.
    identity: u64,
    hash: u64,
    /// The slot in which the entry is probably stored, or [`NO_SLOT`].
    slot: u32,
}

impl Aim {
    const NONE: Self = Self {
        identity: NOBODY,
        hash: 0,
        slot: NO_SLOT,
    };
}

/// Recent source and destination addresses with ports that do not belong to clients: mostly virtual
/// addresses and servers. Of the addresses with the same hash, only the latest is stored.
pub(super) struct Strangers([AtomicU64; Self::PLACES]);

impl Strangers {
    const PLACES: usize = 256;

    #[inline]
    const fn place(&self, identity: u64) -> &AtomicU64 {
        let hash = identity.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.0[(hash >> 56) as usize % Self::PLACES]
    }

    #[inline]
    fn has(&self, identity: u64) -> bool {
        self.place(identity).load(Relaxed) == identity
    }

    fn add(&self, identity: u64) {
        self.place(identity).store(identity, Relaxed);
    }

    /// Removes an address and port that became the client of an entry.
    #[inline]
    pub(super) fn forget(&self, client: SocketAddr, protocol: Protocol) {
        if let IpAddr::V4(addr) = client.ip() {
            let identity = narrow(addr.octets(), client.port()) | protocol_part(protocol);
            if self.has(identity) {
                self.place(identity).store(NOBODY, Relaxed);
            }
        }
    }
}

impl Default for Strangers {
    fn default() -> Self {
        Self([const { AtomicU64::new(NOBODY) }; Self::PLACES])
    }
}

enum Found {
    Entry(u32),
    /// The newest matching entry may be in the overflow.
    Perhaps,
    Nothing,
}

impl Found {
    #[inline]
    fn entry(slot: usize, shadowed: bool) -> Self {
        match u32::try_from(slot) {
            Ok(handle) if !shadowed => Self::Entry(handle),
            _ => Self::Perhaps,
        }
    }

    #[inline]
    const fn none(first: u64) -> Self {
        if Tags::is_overflowed(first) {
            Self::Perhaps
        } else {
            Self::Nothing
        }
    }
}

/// Whether a packet to the client of an entry belongs to this entry: with NAT, if the server has
/// sent the packet (`is_server`); with full NAT, never; with other methods, if the packet comes
/// from the virtual address (`is_virt`). Returns the bit that is set if a newer equal entry hides
/// the entry for these packets; `None` if the packet does not belong to the entry.
#[inline]
fn answers(way: u64, is_virt: bool, is_server: bool) -> Option<u64> {
    match Forwarding::from_bits((way & 7) as u32) {
        Forwarding::Nat => is_server.then_some(kind::SHADOWED_OUT),
        Forwarding::FullNat => None,
        _ => is_virt.then_some(kind::SHADOWED_IN),
    }
}

//! The connection table: slots of fixed size in memory that the caller supplies, found by the tuples of their packets.
//!
//! ```text
//!              hash of the client's side
//!               ┌───────┴────────┐
//!          first bucket    second bucket
//!  tags    [········]       [········]       a byte a slot; one word a bucket
//!           │                    │
//!  slots   [64 B] x 8       [64 B] x 8       IPv4; 128 bytes in a region of its own for IPv6
//!
//!  overflow   index by the whole tuple ─▶ [128 B] ...     equals, and what finds both buckets full
//!  wheel      buckets of handles by deadline, and where each handle's record lies
//! ```
//!
//! The hash is over the client's side alone, so that packets of both directions find the same slot: by the virtual
//! address on the way in, by the server's on the way back. A handle is the slot's number, and stays the same as long as
//! the entry lives. What is told apart by nothing a packet says ([`Overflow`]) lies elsewhere, so that an entry in its
//! bucket is the only one that its packets find, or says that there are others.
//!
//! | | bytes a connection (IPv4, full table) |
//! |---|---|
//! | slot, at 85 of 100 used | 75.3 |
//! | tag | 1.2 |
//! | place in the wheel, record | 4.7, 4.1 |
//! | overflow: none to 5 of 100, which come and go | 0 to 9.4 |
//!
//! What few connections have (who controls others, when one was synchronised) is kept beside the table
//! ([`Sparse`](sparse::Sparse)).

mod adopt;
mod buckets;
mod hash;
mod index;
pub(crate) mod memory;
mod overflow;
pub(crate) mod slot;
pub(crate) mod sparse;
#[cfg(test)]
mod tests;
mod wheel;

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

use self::buckets::{Buckets, Tags, lanes};
use self::memory::{Layout, Memory};
use self::overflow::{Overflow, Side};
pub(crate) use self::slot::Entry;
use self::slot::{
    IDENTITY, Line, PEER, UNARMED, is_client_v6, kind, narrow, narrow_hash, protocol_part, wide,
    wide_hash, wide_identity, wire,
};
use self::sparse::Sparse;
pub(crate) use self::wheel::tick_of;
use self::wheel::{Entries, Wheel};
use super::{Draft, Key, flag};
use crate::{Forwarding, Instant, Protocol};

/// Buckets of a part of the table whose used slots are counted together, so that a listing skips what is empty.
const PART_BUCKETS: usize = 64;
const PART: usize = PART_BUCKETS * Layout::WAYS;
/// Free slots that take as long to look at as an entry to list.
const ENTRY_COST: usize = 16;

/// Slots in memory, by handle: the narrow ones first, then the wide ones, then those of the overflow.
#[derive(Debug)]
struct Slots {
    memory: Memory,
    /// Handles of wide slots begin here.
    wide: u32,
    /// Handles of the overflow begin here.
    overflow: u32,
}

impl Slots {
    fn new(memory: Memory) -> Self {
        let ways = u32::try_from(Layout::WAYS).unwrap_or(0);
        let wide = memory.layout.narrow_buckets * ways;
        Self {
            wide,
            overflow: wide + memory.layout.wide_buckets * ways,
            memory,
        }
    }

    #[inline]
    fn narrow_line(&self, slot: usize) -> &Line {
        self.memory.narrow.line(slot)
    }

    #[inline]
    fn is_narrow(&self, handle: u32) -> bool {
        handle < self.wide
    }

    #[inline]
    fn in_place(&self, handle: u32) -> bool {
        handle < self.overflow
    }

    fn tags(&self, narrow: bool) -> Tags<'_> {
        Tags(if narrow {
            &self.memory.narrow_tags
        } else {
            &self.memory.wide_tags
        })
    }

    /// The region of tags that a slot in place belongs to, and its number there.
    #[inline]
    fn tag_of(&self, handle: u32) -> (Tags<'_>, usize) {
        let narrow = self.is_narrow(handle);
        let base = if narrow { 0 } else { self.wide };
        (self.tags(narrow), (handle - base) as usize)
    }

    fn buckets(&self, narrow: bool) -> u32 {
        if narrow {
            self.memory.layout.narrow_buckets
        } else {
            self.memory.layout.wide_buckets
        }
    }

    fn hash(&self, narrow_client: bool, client: SocketAddr, protocol: Protocol) -> u64 {
        let keys = self.memory.layout.keys;
        match client.ip() {
            IpAddr::V4(addr) if narrow_client => {
                let identity = narrow(addr.octets(), client.port()) | protocol_part(protocol);
                narrow_hash(keys, identity)
            }
            addr => {
                let addr = wide(addr);
                wide_hash(keys, addr, wide_identity(addr, client.port(), protocol))
            }
        }
    }

    /// The buckets where an entry with these addresses lies, if its region has any.
    fn buckets_of(&self, narrow: bool, client: SocketAddr, protocol: Protocol) -> Option<Buckets> {
        let buckets = self.buckets(narrow);
        (buckets > 0).then(|| Buckets::of(self.hash(narrow, client, protocol), buckets))
    }
}

impl Entries for Slots {
    #[inline]
    fn entry(&self, handle: u32) -> Entry<'_> {
        if handle < self.wide {
            return Entry::narrow(self.narrow_line(handle as usize));
        }
        let (region, slot) = if handle < self.overflow {
            (&self.memory.wide, handle - self.wide)
        } else {
            (&self.memory.overflow, handle - self.overflow)
        };
        let line = slot as usize * 2;
        Entry::wide(region.line(line), region.line(line + 1))
    }

    #[inline]
    fn warm(&self, handle: u32) -> u64 {
        if !self.in_place(handle) {
            return 0;
        }
        let (tags, slot) = self.tag_of(handle);
        tags.word(slot / Layout::WAYS)
    }
}

/// Entries of connections or templates, what they are found by, and their timers. Holds at most `capacity` of them.
#[derive(Debug)]
pub(crate) struct ConnTable {
    slots: Slots,
    overflow: Overflow,
    wheel: Wheel,
    capacity: usize,
    len: usize,
    /// Used slots of each part of the table.
    parts: Vec<u32>,
    /// Used slots in place: narrow ones, wide ones.
    used: [usize; 2],
    due: Vec<u32>,
    /// Entries whose client's port is not known.
    portless: usize,
    /// Entries of IPv4 clients in wide slots.
    mixed: usize,
    /// How many entries each one controls that has [`flag::CONTROLS`].
    controlled: Sparse<u32>,
    /// When the timer that was last synchronised ends, in ticks of 4 ms; the lower two bits count retries.
    sync_ends: Sparse<u32>,
    /// Slots that were published and are free, with the time until which they are not used again.
    quarantined: VecDeque<(Instant, u32)>,
    /// The latest time that was seen.
    clock: Instant,
}

impl ConnTable {
    /// An empty table for at most `capacity` entries, on the heap. `seed` keys the hash function, so that a client
    /// cannot choose addresses that fall into the same buckets.
    pub(crate) fn new(capacity: usize, seed: u64) -> Self {
        Self::with_memory(capacity, Memory::heap(Layout::new(capacity, seed)))
    }

    /// An empty table in memory that is all zeros.
    pub(crate) fn with_memory(capacity: usize, memory: Memory) -> Self {
        let slots = Slots::new(memory);
        let layout = slots.memory.layout;
        let handles = slots.overflow as usize + layout.overflow_slots as usize;
        let capacity = capacity.clamp(1, handles);
        Self {
            overflow: Overflow::new(layout.overflow_slots, layout.keys),
            wheel: Wheel::new(handles, capacity),
            capacity,
            len: 0,
            parts: alloc::vec![0; (slots.overflow as usize).div_ceil(PART)],
            used: [0; 2],
            due: Vec::new(),
            portless: 0,
            mixed: 0,
            controlled: Sparse::default(),
            sync_ends: Sparse::default(),
            quarantined: VecDeque::new(),
            clock: Instant::ZERO,
            slots,
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Entry `handle`, which is in use.
    #[inline]
    pub(crate) fn get(&self, handle: u32) -> Entry<'_> {
        self.slots.entry(handle)
    }

    // --- finding ------------------------------------------------------------------------------------------------------

    /// The connection of a packet from a client (`ip_vs_conn_in_get`); the newest one of equals.
    #[inline]
    pub(crate) fn find_in(&self, key: &Key) -> Option<u32> {
        let port = key.client.port();
        // Entries of port 0 (templates, unknown ports) are not for packets from port 0.
        let exact = if port == 0 {
            None
        } else {
            self.find_client(key, port, 0)
        };
        if exact.is_some() || self.portless == 0 {
            return exact;
        }
        self.find_overflow_in(key, 0, kind::NO_CPORT)
    }

    /// The template with this key (`ip_vs_ct_in_get`).
    pub(crate) fn find_template(&self, key: &Key) -> Option<u32> {
        self.find_client(key, 0, kind::TEMPLATE)
    }

    /// The newest entry of a client's address and `port` with just `kinds` of what tells kinds of entries apart.
    #[inline]
    fn find_client(&self, key: &Key, port: u16, kinds: u64) -> Option<u32> {
        let (IpAddr::V4(client), IpAddr::V4(virt)) = (key.client.ip(), key.virt.ip()) else {
            return self.find_wide_in(key, port, kinds);
        };
        let identity = narrow(client.octets(), port) | protocol_part(key.protocol);
        let virt = narrow(virt.octets(), key.virt.port());
        let hash = narrow_hash(self.slots.memory.layout.keys, identity);
        let found = self.find_narrow(hash, |word, line| {
            let alike = word & (IDENTITY | kind::TOLD_APART) == identity | kinds
                && line[1].load(Relaxed) & PEER == virt;
            alike.then_some(kind::SHADOWED_IN)
        });
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
        self.find_wide_in(key, port, kinds)
    }

    fn find_wide_in(&self, key: &Key, port: u16, kinds: u64) -> Option<u32> {
        let (client, virt) = (wide(key.client.ip()), wide(key.virt.ip()));
        let identity = wide_identity(client, port, key.protocol);
        let found = self.find_wide(client, identity, |word, line| {
            let load = |n: usize| line[n].load(Relaxed);
            let alike = word & (IDENTITY | kind::TOLD_APART) == identity | kinds
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
                && entry.word0() & kind::TOLD_APART == kinds
                && entry.protocol() == key.protocol
                && is_same(entry.client(), client)
                && is_same(entry.virt(), key.virt)
        })
    }

    /// The connection of a packet from `source` to `client` (`ip_vs_conn_out_get`): `source` is the real server where
    /// the connection is translated, the virtual address elsewhere.
    #[inline]
    pub(crate) fn find_out(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
    ) -> Option<u32> {
        let (IpAddr::V4(to), IpAddr::V4(from)) = (client.ip(), source.ip()) else {
            return self.find_wide_out(protocol, source, client);
        };
        let identity = narrow(to.octets(), client.port()) | protocol_part(protocol);
        let peer = narrow(from.octets(), source.port());
        let hash = narrow_hash(self.slots.memory.layout.keys, identity);
        let found = self.find_narrow(hash, |word, line| {
            if word & (IDENTITY | kind::TEMPLATE) != identity {
                return None;
            }
            let (virt, server) = (line[1].load(Relaxed), line[2].load(Relaxed));
            answers(virt >> 48, virt & PEER == peer, server & PEER == peer)
        });
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
            return None;
        }
        self.find_wide_out(protocol, source, client)
    }

    fn find_wide_out(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
    ) -> Option<u32> {
        let (to, from) = (wide(client.ip()), wide(source.ip()));
        let identity = wide_identity(to, client.port(), protocol);
        let port = wire(source.port());
        let found = self.find_wide(to, identity, |word, line| {
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

    /// The narrow slot of a client with this hash for which `is` says which shadow would cover it.
    #[inline]
    fn find_narrow(&self, hash: u64, is: impl Fn(u64, &Line) -> Option<u64>) -> Found {
        let buckets = Buckets::of(hash, self.slots.memory.layout.narrow_buckets);
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

    /// As [`find_narrow`](Self::find_narrow), of the wide slots.
    fn find_wide(
        &self,
        client: [u64; 2],
        identity: u64,
        is: impl Fn(u64, &Line) -> Option<u64>,
    ) -> Found {
        let layout = &self.slots.memory.layout;
        if layout.wide_buckets == 0 {
            return Found::Perhaps;
        }
        let hash = wide_hash(layout.keys, client, identity);
        let buckets = Buckets::of(hash, layout.wide_buckets);
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

    /// Reads what a look-up of a packet between these two will read, whichever of them is the client, and changes
    /// nothing: a batch of packets of which all are read first waits for memory once. The result says nothing; it is
    /// there to be used.
    #[inline]
    pub(crate) fn warm(&self, protocol: Protocol, src: SocketAddr, dst: SocketAddr) -> u64 {
        self.warm_client(protocol, src) ^ self.warm_client(protocol, dst)
    }

    #[inline]
    fn warm_client(&self, protocol: Protocol, client: SocketAddr) -> u64 {
        let IpAddr::V4(addr) = client.ip() else {
            return self.warm_wide_client(protocol, client);
        };
        let layout = &self.slots.memory.layout;
        let identity = narrow(addr.octets(), client.port()) | protocol_part(protocol);
        let buckets = Buckets::of(narrow_hash(layout.keys, identity), layout.narrow_buckets);
        let tags = self.slots.tags(true);
        [buckets.first, buckets.second]
            .into_iter()
            .fold(0, |read, bucket| {
                let lane = lanes(tags.word(bucket), buckets.tag).next();
                let line = lane.map(|lane| self.slots.narrow_line(bucket * Layout::WAYS + lane));
                read ^ line.map_or(0, |line| line[0].load(Relaxed))
            })
    }

    fn warm_wide_client(&self, protocol: Protocol, client: SocketAddr) -> u64 {
        let Some(buckets) = self.slots.buckets_of(false, client, protocol) else {
            return 0;
        };
        let tags = self.slots.tags(false);
        [buckets.first, buckets.second]
            .into_iter()
            .fold(0, |read, bucket| {
                let lane = lanes(tags.word(bucket), buckets.tag).next();
                let slot = lane.map(|lane| bucket * Layout::WAYS + lane);
                let lines = slot.map(|slot| [2 * slot, 2 * slot + 1]);
                lines.into_iter().flatten().fold(read, |read, line| {
                    read ^ self.slots.memory.wide.line(line)[0].load(Relaxed)
                })
            })
    }

    // --- coming and going ---------------------------------------------------------------------------------------------

    /// Takes an entry in, as the newest of its equals, and starts its timer; `None`, and nothing changed, if the table
    /// is full.
    pub(crate) fn insert(&mut self, draft: &Draft, now: Instant) -> Option<u32> {
        if self.len >= self.capacity {
            return None;
        }
        self.see(now);
        let narrow = draft.is_narrow();
        let (client, protocol) = (draft.key.client, draft.key.protocol);
        let buckets = self.slots.buckets_of(narrow, client, protocol);
        let handle = if draft.has(flag::NO_CPORT) || self.has_equals(draft) {
            None
        } else {
            let slot = buckets.and_then(|buckets| self.slots.tags(narrow).choose(&buckets));
            slot.map(|slot| slot + if narrow { 0 } else { self.slots.wide as usize })
        };
        let handle = match (handle, buckets) {
            (Some(slot), Some(buckets)) => {
                let handle = u32::try_from(slot).ok()?;
                let entry = self.slots.entry(handle);
                entry.set_armed(UNARMED);
                entry.write(draft);
                self.occupy(handle, buckets.tag);
                handle
            }
            _ => self.insert_overflow(draft)?,
        };
        self.count(handle, 1);
        self.restart(handle, now);
        Some(handle)
    }

    fn insert_overflow(&mut self, draft: &Draft) -> Option<u32> {
        let slot = self.overflow.take()?;
        let handle = self.slots.overflow + slot;
        let entry = self.slots.entry(handle);
        entry.set_armed(UNARMED);
        self.overflow.sequence += 1;
        entry.set_sequence(self.overflow.sequence);
        entry.write(draft);
        if self.enter(handle, Side::BOTH) {
            self.move_home(handle, true);
            return Some(handle);
        }
        self.slots.entry(handle).free();
        self.overflow.give_back(slot);
        None
    }

    /// Takes an entry out and frees its slot.
    pub(crate) fn remove(&mut self, handle: u32) {
        let entry = self.slots.entry(handle);
        self.wheel.disarm(handle, entry);
        let (word, controls) = (entry.word0(), entry.has(flag::CONTROLS));
        self.count(handle, usize::MAX);
        if controls && let Some(controlled) = self.controlled.get_mut(handle) {
            *controlled = 0;
        }
        if let Some(end) = self.sync_ends.get_mut(handle) {
            *end = 0;
        }
        if self.slots.in_place(handle) {
            if word & (kind::SHADOWED_IN | kind::SHADOWED_OUT) != 0 {
                self.leave(handle);
            }
            let entry = self.slots.entry(handle);
            entry.free();
            if word & kind::LIVE == 0 || self.slots.memory.quarantine.is_zero() {
                self.vacate(handle);
            } else {
                let until = self.clock + self.slots.memory.quarantine;
                self.quarantined.push_back((until, handle));
            }
        } else {
            self.leave(handle);
            self.move_home(handle, false);
            self.slots.entry(handle).free();
            self.overflow.give_back(handle - self.slots.overflow);
        }
    }

    /// Marks a slot in place as used.
    fn occupy(&mut self, handle: u32, tag: u64) {
        let (tags, slot) = self.slots.tag_of(handle);
        tags.set(slot, tag);
        self.parts[handle as usize / PART] += 1;
        self.used[usize::from(!self.slots.is_narrow(handle))] += 1;
    }

    /// Marks it as free.
    fn vacate(&mut self, handle: u32) {
        let (tags, slot) = self.slots.tag_of(handle);
        tags.set(slot, 0);
        self.parts[handle as usize / PART] -= 1;
        self.used[usize::from(!self.slots.is_narrow(handle))] -= 1;
    }

    /// Follows the clock: slots whose quarantine is over are free.
    fn see(&mut self, now: Instant) {
        self.clock = self.clock.max(now);
        while let Some(&(until, handle)) = self.quarantined.front()
            && until <= self.clock
        {
            self.quarantined.pop_front();
            self.vacate(handle);
        }
    }

    /// Adds an entry to the counts, or with `usize::MAX` takes it away.
    fn count(&mut self, handle: u32, by: usize) {
        let entry = self.slots.entry(handle);
        self.len = self.len.wrapping_add(by);
        if entry.word0() & kind::NO_CPORT != 0 {
            self.portless = self.portless.wrapping_add(by);
        }
        let wide = !self.slots.is_narrow(handle) && self.slots.in_place(handle);
        if wide && entry.is_of_v4_client() {
            self.mixed = self.mixed.wrapping_add(by);
        }
    }

    // --- equals -------------------------------------------------------------------------------------------------------

    /// Whether an entry like this would be found by packets that find another one.
    fn has_equals(&self, draft: &Draft) -> bool {
        let mut found = false;
        self.each_equal(draft, None, |_, _| found = true);
        if found {
            return true;
        }
        let narrow = draft.key.client.is_ipv4();
        let buckets = self.buckets_if_used(draft, narrow);
        let overflowed = buckets
            .is_none_or(|buckets| Tags::is_overflowed(self.slots.tags(narrow).word(buckets.first)));
        overflowed
            && Side::BOTH
                .into_iter()
                .any(|side| self.newest_like(draft, side).is_some())
    }

    /// The buckets of a draft's client in a region that may have entries of it.
    fn buckets_if_used(&self, draft: &Draft, narrow: bool) -> Option<Buckets> {
        let client = draft.key.client;
        let usable = if narrow {
            client.is_ipv4()
        } else {
            !client.is_ipv4() || self.mixed > 0 || !draft.is_narrow()
        };
        if !usable {
            return None;
        }
        self.slots.buckets_of(narrow, client, draft.key.protocol)
    }

    /// Entries in place, but for `other_than`, that the same packets find as one like this, with the side by which they
    /// do.
    fn each_equal(&self, draft: &Draft, other_than: Option<u32>, mut each: impl FnMut(u32, Side)) {
        for narrow in [true, false] {
            let Some(buckets) = self.buckets_if_used(draft, narrow) else {
                continue;
            };
            let tags = self.slots.tags(narrow);
            let base = if narrow { 0 } else { self.slots.wide as usize };
            for (n, bucket) in [buckets.first, buckets.second].into_iter().enumerate() {
                if n == 1 && bucket == buckets.first {
                    break;
                }
                for lane in lanes(tags.word(bucket), buckets.tag) {
                    let Ok(handle) = u32::try_from(base + bucket * Layout::WAYS + lane) else {
                        continue;
                    };
                    if Some(handle) == other_than {
                        continue;
                    }
                    let entry = self.slots.entry(handle);
                    for side in Side::BOTH {
                        if is_like(entry, draft, side) {
                            each(handle, side);
                        }
                    }
                }
            }
        }
    }

    /// The newest entry of those that the overflow's index knows, which the packets of a side find as one like this.
    fn newest_like(&self, draft: &Draft, side: Side) -> Option<u32> {
        if side == Side::Out && !draft.has_out_side() {
            return None;
        }
        let peer = match side {
            Side::In => draft.key.virt,
            Side::Out => draft.server_addr,
        };
        let hash = self
            .overflow
            .hash(draft.key.protocol, draft.key.client, peer);
        self.overflow.find(hash, |handle, of| {
            of == side && is_like(self.slots.entry(handle), draft, side)
        })
    }

    /// Makes an entry the newest of its equals on some sides: it is found by the overflow's index from now on, as they
    /// are. `false`, and nothing changed, if that has no room where the entry belongs.
    fn enter(&mut self, handle: u32, sides: impl IntoIterator<Item = Side>) -> bool {
        let draft = self.slots.entry(handle).draft();
        let mut equals = Vec::new();
        self.each_equal(&draft, Some(handle), |equal, side| {
            equals.push((equal, side))
        });
        for &(equal, side) in &equals {
            let entry = self.slots.entry(equal);
            if entry.word0() & shadow(side) != 0 {
                continue;
            }
            let known = self.newest_like(&draft, side);
            if !self.overflow.enter(equal, side, entry, known) {
                equals
                    .iter()
                    .for_each(|&(equal, side)| self.settle(equal, side));
                return false;
            }
            entry.withdraw();
            entry.set_kind(shadow(side), true);
        }
        let mut entered = Vec::new();
        for side in sides {
            if side == Side::Out && !draft.has_out_side() {
                continue;
            }
            let known = self.newest_like(&draft, side);
            let entry = self.slots.entry(handle);
            if !self.overflow.enter(handle, side, entry, known) {
                for side in entered {
                    self.leave_side(handle, side);
                }
                equals
                    .iter()
                    .for_each(|&(equal, side)| self.settle(equal, side));
                return false;
            }
            entered.push(side);
        }
        true
    }

    /// Takes an entry out of the overflow's index.
    fn leave(&mut self, handle: u32) {
        let entry = self.slots.entry(handle);
        let (word, has_out_side) = (entry.word0(), entry.has_out_side());
        for side in Side::BOTH {
            let is_in = if self.slots.in_place(handle) {
                word & shadow(side) != 0
            } else {
                side == Side::In || has_out_side
            };
            if is_in {
                self.leave_side(handle, side);
            }
        }
    }

    fn leave_side(&mut self, handle: u32, side: Side) {
        let entry = self.slots.entry(handle);
        let alone = self.overflow.leave(handle, side, entry);
        if let Some(alone) = alone {
            self.settle(alone, side);
        }
    }

    /// An entry in place that has no equals any more on a side need not be in the overflow's index.
    fn settle(&mut self, handle: u32, side: Side) {
        let entry = self.slots.entry(handle);
        if self.slots.in_place(handle)
            && entry.word0() & shadow(side) != 0
            && self.overflow.is_alone(handle, side)
        {
            self.overflow.leave(handle, side, entry);
            entry.set_kind(shadow(side), false);
        }
    }

    /// An entry of the overflow has come, or goes: the words of tags say so.
    fn move_home(&mut self, handle: u32, comes: bool) {
        let entry = self.slots.entry(handle);
        let narrow = entry.is_of_v4_client();
        // What looks for IPv4 clients asks the words of the narrow slots.
        let Some(buckets) = self
            .slots
            .buckets_of(narrow, entry.client(), entry.protocol())
        else {
            return;
        };
        let home = (narrow, buckets.first);
        let tags = self.slots.tags(narrow);
        let count = self.overflow.homes.entry(home).or_insert(0);
        if comes {
            *count += 1;
            tags.set_overflowed(buckets.first, true);
            return;
        }
        *count -= 1;
        if *count == 0 {
            self.overflow.homes.remove(&home);
            tags.set_overflowed(buckets.first, false);
        }
    }

    /// Gives an entry of unknown client port the port of its first packet (`ip_vs_conn_fill_cport`).
    pub(crate) fn set_client_port(&mut self, handle: u32, port: u16) {
        self.change(handle, |draft| {
            draft.key.client.set_port(port);
            draft.flags &= !flag::NO_CPORT;
        });
    }

    /// Gives a template ports that no lookup asks for (`ip_vs_check_template`).
    pub(crate) fn hide_template(&mut self, handle: u32) {
        self.change(handle, |draft| {
            draft.key.virt.set_port(u16::MAX);
            draft.server_addr.set_port(u16::MAX);
            draft.flags |= flag::DYING;
        });
    }

    /// Changes what an entry is found by, but for addresses and the client of one whose port is known. Among equals, it
    /// is the newest from now on.
    pub(crate) fn change(&mut self, handle: u32, change: impl FnOnce(&mut Draft)) {
        let mut draft = self.slots.entry(handle).draft();
        let in_place = self.slots.in_place(handle);
        self.leave(handle);
        if !in_place {
            self.move_home(handle, false);
        }
        self.count(handle, usize::MAX);
        change(&mut draft);
        self.slots.entry(handle).write(&draft);
        self.count(handle, 1);
        if !in_place {
            self.move_home(handle, true);
            self.enter(handle, Side::BOTH);
            return;
        }
        // One that lies in its bucket is in the overflow's index on those sides where it has equals.
        let mut sides = Vec::new();
        self.each_equal(&draft, Some(handle), |_, side| sides.push(side));
        sides.extend(
            Side::BOTH
                .into_iter()
                .filter(|&side| self.newest_like(&draft, side).is_some()),
        );
        let sides = Side::BOTH.into_iter().filter(|side| sides.contains(side));
        let sides: Vec<Side> = sides.collect();
        if !sides.is_empty() && self.enter(handle, sides.iter().copied()) {
            for side in sides {
                self.slots.entry(handle).set_kind(shadow(side), true);
            }
        }
    }

    // --- time ---------------------------------------------------------------------------------------------------------

    /// Lets the entry's timer run for its timeout from `now` (`ip_vs_conn_put`).
    #[inline]
    pub(crate) fn restart(&mut self, handle: u32, now: Instant) {
        let entry = self.slots.entry(handle);
        entry.set_expires(now + Duration::from_secs(u64::from(entry.timeout())));
        self.wheel.arm(handle, entry);
    }

    /// Entries due at `now`, out of the wheel: those of the earliest tick that has any. Empty if there are none, or if
    /// the budget ran out on the way. Give the vector back with [`recycle`](Self::recycle).
    pub(crate) fn take_due_by(&mut self, now: Instant, budget: &mut usize) -> Vec<u32> {
        loop {
            let Some(tick) = self.due_tick(now, budget) else {
                let mut due = core::mem::take(&mut self.due);
                due.clear();
                return due;
            };
            let due = self.take_due(now, budget);
            // In the present tick, what is left is due within milliseconds.
            if !due.is_empty() || tick == tick_of(now) || *budget == 0 {
                return due;
            }
            self.recycle(due);
        }
    }

    /// The next tick up to `now` in which entries may be due.
    pub(crate) fn due_tick(&mut self, now: Instant, budget: &mut usize) -> Option<u64> {
        self.see(now);
        self.wheel.next_tick(&self.slots, tick_of(now), budget)
    }

    /// Entries of the tick that [`due_tick`](Self::due_tick) has found, out of the wheel, as far as they are due.
    pub(crate) fn take_due(&mut self, now: Instant, budget: &mut usize) -> Vec<u32> {
        let mut due = core::mem::take(&mut self.due);
        due.clear();
        self.wheel.take_due(&self.slots, now, budget, &mut due);
        // A controlled entry ends before the one that controls it.
        if due
            .iter()
            .any(|&handle| self.get(handle).has(flag::CONTROLS))
        {
            due.sort_by_key(|&handle| self.controlled(handle) > 0);
        }
        due
    }

    /// Takes back the vector of [`take_due_by`](Self::take_due_by), for its memory.
    pub(crate) fn recycle(&mut self, due: Vec<u32>) {
        self.due = due;
    }

    /// When to look for due entries again.
    pub(crate) fn next_wakeup(&self) -> Option<Instant> {
        self.wheel.next_wakeup()
    }

    // --- what few entries have ----------------------------------------------------------------------------------------

    /// Entries that this one controls.
    #[inline]
    pub(crate) fn controlled(&self, handle: u32) -> u32 {
        if self.get(handle).has(flag::CONTROLS) {
            self.controlled.get(handle).copied().unwrap_or(0)
        } else {
            0
        }
    }

    /// One more is controlled by this one.
    pub(crate) fn add_controlled(&mut self, handle: u32) {
        let entry = self.slots.entry(handle);
        let controlled = self.controlled.entry(handle);
        if !entry.has(flag::CONTROLS) {
            *controlled = 0;
            entry.set(flag::CONTROLS);
        }
        *controlled += 1;
    }

    /// One less is.
    pub(crate) fn drop_controlled(&mut self, handle: u32) {
        if self.get(handle).has(flag::CONTROLS)
            && let Some(controlled) = self.controlled.get_mut(handle)
        {
            *controlled = controlled.saturating_sub(1);
        }
    }

    /// When the timer that was last synchronised ends, in ticks of 4 ms; the lower two bits count retries.
    pub(crate) fn sync_end(&self, handle: u32) -> Option<u32> {
        let end = self.sync_ends.get(handle).copied();
        end.filter(|&end| end != 0)
    }

    pub(crate) fn set_sync_end(&mut self, handle: u32, end: u32) {
        *self.sync_ends.entry(handle) = end;
    }

    // --- all of them --------------------------------------------------------------------------------------------------

    /// Slots that are or may be in use: handles are below this.
    pub(crate) const fn slots_len(&self) -> usize {
        (self.slots.overflow + self.overflow.used()) as usize
    }

    /// Whether a slot is in use.
    pub(crate) fn is_used(&self, handle: u32) -> bool {
        if self.slots.in_place(handle) {
            let (tags, slot) = self.slots.tag_of(handle);
            // The slot of a freed entry may still be in quarantine.
            return tags.is_used(slot) && self.get(handle).word0() != 0;
        }
        (handle as usize) < self.slots_len() && self.get(handle).word0() != 0
    }

    /// Handles of entries in use among `slots`.
    pub(crate) fn indices(&self, slots: Range<usize>) -> impl Iterator<Item = u32> + '_ {
        let end = slots.end.min(self.slots_len());
        let mut at = slots.start;
        core::iter::from_fn(move || {
            let mut budget = usize::MAX;
            if at >= end {
                return None;
            }
            self.walk(&mut at, &mut budget)
                .filter(|&handle| (handle as usize) < end)
        })
    }

    /// The next entry in use from slot `at` on, which moves behind it; `None` if there is none before the budget of slots
    /// to look at is spent, or the end ([`slots_len`](Self::slots_len)) is reached.
    pub(crate) fn walk(&self, at: &mut usize, budget: &mut usize) -> Option<u32> {
        while *at < self.slots_len() && *budget > 0 {
            *budget -= 1;
            // Parts without entries are passed over at once.
            if at.is_multiple_of(PART) && self.parts.get(*at / PART) == Some(&0) {
                *at = (*at + PART).min(self.slots.overflow as usize);
                continue;
            }
            let handle = u32::try_from(*at).ok()?;
            *at += 1;
            if self.is_used(handle) {
                return Some(handle);
            }
        }
        None
    }

    /// Entries from slot `from` on, and the slot from which to go on, for listings in pieces that take a short time each,
    /// be the table full or empty: a free slot takes one of `budget`, an entry, of which more is read, [`ENTRY_COST`].
    pub(crate) fn piece(&self, from: usize, budget: usize) -> (Vec<u32>, Option<usize>) {
        let (mut at, mut left) = (from, budget);
        let mut piece = Vec::new();
        while let Some(handle) = self.walk(&mut at, &mut left) {
            piece.push(handle);
            left = left.saturating_sub(ENTRY_COST - 1);
        }
        (piece, (at < self.slots_len()).then_some(at))
    }

    /// How many slots there are in those regions that have entries.
    pub(crate) fn populated_len(&self) -> usize {
        self.populated().map(|region| region.len()).sum()
    }

    /// Slot `n` of those.
    pub(crate) fn populated_slot(&self, n: usize) -> Option<u32> {
        let mut left = n;
        for region in self.populated() {
            if left < region.len() {
                return u32::try_from(region.start + left).ok();
            }
            left -= region.len();
        }
        None
    }

    /// Entries in use in a window of those.
    pub(crate) fn populated_in(&self, window: Range<usize>) -> impl Iterator<Item = u32> + '_ {
        window
            .filter_map(|n| self.populated_slot(n))
            .filter(|&handle| self.is_used(handle))
    }

    fn populated(&self) -> impl Iterator<Item = Range<usize>> {
        let (wide, overflow) = (self.slots.wide as usize, self.slots.overflow as usize);
        [
            (self.used[0] > 0, 0..wide),
            (self.used[1] > 0, wide..overflow),
            (true, overflow..self.slots_len()),
        ]
        .into_iter()
        .filter_map(|(has_entries, region)| has_entries.then_some(region))
    }
}

/// Where a look-up ends.
enum Found {
    /// In a slot in place.
    Entry(u32),
    /// Nothing there is the newest: the overflow knows, if anybody does.
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

const fn shadow(side: Side) -> u64 {
    match side {
        Side::In => kind::SHADOWED_IN,
        Side::Out => kind::SHADOWED_OUT,
    }
}

/// Whether packets to the client from that virtual address, or that server, belong to an entry of this way; if so, which
/// shadow covers it from them.
#[inline]
fn answers(way: u64, is_virt: bool, is_server: bool) -> Option<u64> {
    match Forwarding::from_bits((way & 7) as u32) {
        Forwarding::Nat => is_server.then_some(kind::SHADOWED_OUT),
        Forwarding::FullNat => None,
        _ => is_virt.then_some(kind::SHADOWED_IN),
    }
}

/// Whether the packets of a side find an entry as they would find one like this.
fn is_like(entry: Entry<'_>, draft: &Draft, side: Side) -> bool {
    let same_peer = match side {
        Side::In => {
            entry.word0() & kind::TOLD_APART == draft.kinds()
                && is_same(entry.virt(), draft.key.virt)
        }
        Side::Out => {
            entry.has_out_side()
                && draft.has_out_side()
                && is_same(entry.server_addr(), draft.server_addr)
        }
    };
    same_peer && entry.protocol() == draft.key.protocol && is_same(entry.client(), draft.key.client)
}

/// Whether two are the same address and port; the rest of an IPv6 socket's address is nothing that a packet has.
#[inline]
fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    one.port() == other.port() && one.ip() == other.ip()
}

//! The connection table: slots of fixed size in memory that the caller supplies, found by the
//! tuples of their packets.
//!
//! ```text
//!              hash of the client's side
//!               ┌───────┴────────┐
//!          first bucket    second bucket
//!  tags    [········]       [········]       a byte a slot; one word a bucket
//!           │                    │
//!  slots   [64 B] x 8       [64 B] x 8       IPv4; 128 bytes in a region of its own for IPv6
//!
//!  overflow   index by the whole tuple ─▶ [128 B] ...     equal entries, entries with two full buckets
//!  wheel      buckets of handles by deadline, and the position of each handle's record
//! ```
//!
//! The hash covers the client's side only, so that packets of both directions find the same slot:
//! packets of the client by the virtual address, replies by the server's address. A handle is the
//! slot's number, and stays the same as long as the entry exists. A new entry that matches the same
//! packets as an existing one is stored in the [`Overflow`]. An entry in its bucket is therefore
//! the only match of its packets, or is marked as one of several.
//!
//! | | bytes a connection (IPv4, full table) |
//! |---|---|
//! | slot, at 85 of 100 used | 75.3 |
//! | tag | 1.2 |
//! | place in the wheel, record | 4.7, 4.1 |
//! | overflow: 0% to 5% of the entries | 0 to 9.4 |
//!
//! State that few connections have (controlled entries, time of the last synchronisation) is stored
//! in [`Sparse`](sparse::Sparse) tables next to the connection table.

pub(crate) mod adopt;
mod buckets;
mod equals;
mod find;
pub(crate) mod hash;
mod index;
pub(crate) mod memory;
mod overflow;
pub(crate) mod slot;
pub(crate) mod sparse;
#[cfg(test)]
mod tests;
mod walk;
mod wheel;

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, SocketAddr};

use self::buckets::{Buckets, Tags};
pub use self::find::Ahead;
use self::memory::{Layout, Memory};
use self::overflow::{Overflow, Side};
pub(crate) use self::slot::Entry;
use self::slot::{
    Line, UNARMED, kind, narrow, narrow_hash, protocol_part, wide, wide_hash, wide_identity,
};
use self::sparse::Sparse;
use self::wheel::Wheel;
pub(crate) use self::wheel::tick_of;
use super::{Draft, flag};
use crate::{Instant, Protocol};

/// A look-up reads the home slot of an entry first if the used slots of the region are fewer than
/// all its slots divided by this number: at least 70 of 100 entries are then in their home slots.
const HOMELY: usize = 4;

/// Number of buckets whose used slots are counted together, so that a listing skips empty parts of
/// the table.
const PART_BUCKETS: usize = 64;
const PART: usize = PART_BUCKETS * Layout::WAYS;

/// Maximum number of entries that the wheel examines at a time for due entries, if the order of
/// their removal does not matter.
const PORTION: usize = 128;

/// The slots in memory, by handle: narrow slots first, then wide slots, then the overflow.
#[derive(Debug)]
struct Slots {
    memory: Memory,
    /// The lowest handle of a wide slot.
    wide: u32,
    /// The lowest handle of the overflow.
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

    /// The tags of the slot's region, and the index of this slot's tag in them.
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

    /// The buckets of an entry of this client; `None` if the table has no slots of this width.
    fn buckets_of(&self, narrow: bool, client: SocketAddr, protocol: Protocol) -> Option<Buckets> {
        let buckets = self.buckets(narrow);
        (buckets > 0).then(|| Buckets::of(self.hash(narrow, client, protocol), buckets))
    }

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

    /// Loads the tag word of an entry, which the removal of the entry will need, into the CPU
    /// cache. Returns the word, so that the compiler keeps the access; 0 for an entry of the
    /// overflow, whose removal needs no tag word of its slot.
    #[inline]
    fn warm(&self, handle: u32) -> u64 {
        if !self.in_place(handle) {
            return 0;
        }
        let (tags, slot) = self.tag_of(handle);
        tags.word(slot / Layout::WAYS)
    }
}

/// Entries of connections or templates, their search structures, and their timers. Contains at most
/// `capacity` entries.
pub(crate) struct ConnTable {
    slots: Slots,
    overflow: Overflow,
    wheel: Wheel,
    capacity: usize,
    len: usize,
    /// Number of used slots in each part of the table.
    parts: Vec<u32>,
    /// Number of used slots in buckets: narrow ones, wide ones.
    used: [usize; 2],
    /// For narrow and for wide slots: whether look-ups try an entry's [home slot](buckets) before
    /// the tags.
    at_home: [bool; 2],
    due: Vec<u32>,
    /// Number of entries whose client port is unknown.
    portless: usize,
    /// Number of entries of IPv4 clients in wide slots.
    mixed: usize,
    /// Number of entries that each entry with [`flag::CONTROLS`] controls.
    controlled: Sparse<u32>,
    /// For a synchronised entry: the end of the timer that was last sent, in ticks of 4 ms; the
    /// lower two bits count retries.
    sync_ends: Sparse<u32>,
    /// For an offloaded entry: the number of client packets up to which the decision whether to
    /// synchronise has been made; 0 for none.
    sync_packets: Sparse<u32>,
    /// Free slots that the kernel fast path may still read, each with the time until which it is
    /// not reused.
    quarantined: VecDeque<(Instant, u32)>,
    clock: Instant,
    /// A cache of addresses and ports that are the client of no entry.
    strangers: find::Strangers,
}

impl fmt::Debug for ConnTable {
    /// Shows the content by slot.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}: ", self.len, self.capacity)?;
        let handles = self.indices(0..usize::MAX);
        let entries =
            handles.map(|handle| (handle, (self.get(handle).expires(), self.get(handle))));
        f.debug_map().entries(entries).finish()
    }
}

impl ConnTable {
    /// An empty table for at most `capacity` entries, on the heap. `seed` keys the hash function,
    /// so that a client cannot choose addresses that fall into the same buckets.
    #[cfg(test)]
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
            parts: vec![0; (slots.overflow as usize).div_ceil(PART)],
            used: [0; 2],
            at_home: [true; 2],
            due: Vec::new(),
            portless: 0,
            mixed: 0,
            controlled: Sparse::default(),
            sync_ends: Sparse::default(),
            sync_packets: Sparse::default(),
            quarantined: VecDeque::new(),
            clock: Instant::ZERO,
            strangers: find::Strangers::default(),
            slots,
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn capacity(&self) -> usize {
        self.capacity
    }

    #[inline]
    pub(crate) fn get(&self, handle: u32) -> Entry<'_> {
        self.slots.entry(handle)
    }

    /// As [`get`](Self::get), for an entry in a narrow slot.
    #[inline]
    pub(crate) fn narrow(&self, handle: u32) -> Entry<'_> {
        Entry::narrow(self.slots.narrow_line(handle as usize))
    }

    /// Whether the entry is in one of its buckets, and not in the overflow.
    pub(crate) fn is_in_place(&self, handle: u32) -> bool {
        self.slots.in_place(handle)
    }

    /// One more than the highest handle of a slot in a bucket.
    pub(crate) const fn places_len(&self) -> u32 {
        self.slots.overflow
    }

    /// Inserts an entry, as the newest of its equal entries, and starts its timer; `None` if the
    /// table is full, or has no free slot or no room in the overflow's index for the entry.
    pub(crate) fn insert(&mut self, draft: &Draft, now: Instant) -> Option<u32> {
        if self.len >= self.capacity {
            return None;
        }
        self.see(now);
        let narrow = draft.is_narrow();
        let (client, protocol) = (draft.key.client, draft.key.protocol);
        self.strangers.forget(client, protocol);
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
                let expires = after(now, draft.timeout);
                let armed = self.wheel.link(handle, tick_of(expires));
                self.slots.entry(handle).fill(draft, expires, armed);
                self.occupy(handle, buckets.tag);
                handle
            }
            _ => {
                let handle = self.insert_overflow(draft)?;
                self.restart(handle, now);
                handle
            }
        };
        self.count_as(handle, draft.kinds(), draft.key.client.is_ipv4(), 1);
        Some(handle)
    }

    fn insert_overflow(&mut self, draft: &Draft) -> Option<u32> {
        let slot = self.overflow.take()?;
        let handle = self.slots.overflow + slot;
        let entry = self.slots.entry(handle);
        self.overflow.sequence += 1;
        entry.set_sequence(self.overflow.sequence);
        entry.fill(draft, Instant::ZERO, UNARMED);
        if self.enter(handle, Side::BOTH) {
            self.move_home(handle, true);
            return Some(handle);
        }
        self.slots.entry(handle).free();
        self.overflow.give_back(slot);
        None
    }

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
        self.set_sync_packets(handle, None);
        if self.slots.in_place(handle) {
            if word & (kind::SHADOWED_IN | kind::SHADOWED_OUT) != 0 {
                self.leave(handle);
            }
            let entry = self.slots.entry(handle);
            // BPF programs may still read an entry that was evicted from the kernel fast path a
            // moment ago.
            let published = entry.epoch() != 0;
            entry.free();
            if !published || self.slots.memory.quarantine.is_zero() {
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

    fn occupy(&mut self, handle: u32, tag: u64) {
        let (tags, slot) = self.slots.tag_of(handle);
        tags.set(slot, tag);
        self.parts[handle as usize / PART] += 1;
        self.used(self.slots.is_narrow(handle), 1);
    }

    fn vacate(&mut self, handle: u32) {
        let (tags, slot) = self.slots.tag_of(handle);
        tags.set(slot, 0);
        self.parts[handle as usize / PART] -= 1;
        self.used(self.slots.is_narrow(handle), usize::MAX);
    }

    /// Adds `by` to the number of used slots; `usize::MAX` subtracts one.
    #[inline]
    fn used(&mut self, narrow: bool, by: usize) {
        let region = usize::from(!narrow);
        self.used[region] = self.used[region].wrapping_add(by);
        let slots = self.slots.buckets(narrow) as usize * Layout::WAYS;
        self.at_home[region] = self.used[region] < slots / HOMELY;
    }

    /// For IPv4 and for other entries: whether look-ups try an entry's home slot before the tags.
    /// It affects only the speed.
    pub(crate) const fn at_home(&self) -> [bool; 2] {
        self.at_home
    }

    /// Advances the table's clock, and frees the slots whose quarantine has ended.
    fn see(&mut self, now: Instant) {
        self.clock = self.clock.max(now);
        while let Some(&(until, handle)) = self.quarantined.front()
            && until <= self.clock
        {
            self.quarantined.pop_front();
            self.vacate(handle);
        }
    }

    /// Adds `by` to the counts that include this entry; `usize::MAX` subtracts one.
    fn count(&mut self, handle: u32, by: usize) {
        let entry = self.slots.entry(handle);
        self.count_as(handle, entry.word0(), entry.is_of_v4_client(), by);
    }

    /// As [`count`](Self::count), for an entry with these [kind bits](slot::kind).
    fn count_as(&mut self, handle: u32, kinds: u64, of_v4_client: bool, by: usize) {
        self.len = self.len.wrapping_add(by);
        if kinds & kind::NO_CPORT != 0 {
            self.portless = self.portless.wrapping_add(by);
        }
        let wide = !self.slots.is_narrow(handle) && self.slots.in_place(handle);
        if wide && of_v4_client {
            self.mixed = self.mixed.wrapping_add(by);
        }
    }

    /// Starts the entry's timer with its timeout from `now` (`ip_vs_conn_put`).
    #[inline]
    pub(crate) fn restart(&mut self, handle: u32, now: Instant) {
        let entry = self.slots.entry(handle);
        entry.set_expires(after(now, entry.timeout()));
        self.wheel.arm(handle, entry);
    }

    /// As [`restart`](Self::restart), for an entry in a narrow slot.
    #[inline]
    pub(crate) fn restart_narrow(&mut self, handle: u32, now: Instant) {
        let entry = Entry::narrow(self.slots.narrow_line(handle as usize));
        entry.set_expires(after(now, entry.timeout()));
        self.wheel.arm(handle, entry);
    }

    pub(crate) fn restart_until(&mut self, handle: u32, at: Instant) {
        let entry = self.slots.entry(handle);
        entry.set_expires(at);
        self.wheel.arm(handle, entry);
    }

    /// Removes due entries from the wheel, all of one tick or a portion of them, and returns them.
    /// The result is empty if no entry is due, or if the budget is used up. Return the vector with
    /// [`recycle`](Self::recycle).
    pub(crate) fn take_due_by(&mut self, now: Instant, budget: &mut usize) -> Vec<u32> {
        loop {
            let Some(tick) = self.due_tick(now, budget) else {
                let mut due = core::mem::take(&mut self.due);
                due.clear();
                return due;
            };
            let due = self.take_due(now, budget);
            // The remaining entries of the present tick are due within milliseconds.
            if !due.is_empty() || tick == tick_of(now) || *budget == 0 {
                return due;
            }
            self.recycle(due);
        }
    }

    /// Returns the next tick up to `now` in which entries may be due; `None` if there is none, or
    /// if `budget` is used up.
    pub(crate) fn due_tick(&mut self, now: Instant, budget: &mut usize) -> Option<u64> {
        self.see(now);
        self.wheel.next_tick(&self.slots, tick_of(now), budget)
    }

    /// Removes due entries of the tick that [`due_tick`](Self::due_tick) has found from the wheel,
    /// all or a portion of them, and returns them. Controlled entries come before the entries that
    /// control them.
    pub(crate) fn take_due(&mut self, now: Instant, budget: &mut usize) -> Vec<u32> {
        let mut due = core::mem::take(&mut self.due);
        due.clear();
        // Take few entries at a time, so that their slots are still in the caches when the caller
        // removes them. Take all at once if the order of removal matters, or if entries that are
        // not due would be visited again and again.
        let mut looked_at = 1;
        while due.is_empty() && looked_at > 0 {
            let few = self.controlled.is_empty() && !self.wheel.stays();
            let portion = if few { PORTION.min(*budget) } else { *budget };
            let mut left = portion;
            self.wheel.take_due(&self.slots, now, &mut left, &mut due);
            looked_at = if few { portion - left } else { 0 };
            *budget -= portion - left;
        }
        // A controlled entry is removed before the entry that controls it.
        if due
            .iter()
            .any(|&handle| self.get(handle).has(flag::CONTROLS))
        {
            due.sort_by_key(|&handle| self.controlled(handle) > 0);
        }
        due
    }

    /// Takes back a vector of due entries, in order to reuse its memory.
    pub(crate) fn recycle(&mut self, due: Vec<u32>) {
        self.due = due;
    }

    /// The time at which the caller must next look for due entries; `None` if no timer is running.
    pub(crate) fn next_wakeup(&self) -> Option<Instant> {
        self.wheel.next_wakeup()
    }

    #[inline]
    pub(crate) fn controlled(&self, handle: u32) -> u32 {
        if self.get(handle).has(flag::CONTROLS) {
            self.controlled.get(handle).copied().unwrap_or(0)
        } else {
            0
        }
    }

    pub(crate) fn add_controlled(&mut self, handle: u32) {
        let entry = self.slots.entry(handle);
        let controlled = self.controlled.entry(handle);
        if !entry.has(flag::CONTROLS) {
            *controlled = 0;
            entry.set(flag::CONTROLS);
        }
        *controlled += 1;
    }

    pub(crate) fn drop_controlled(&mut self, handle: u32) {
        if self.get(handle).has(flag::CONTROLS)
            && let Some(controlled) = self.controlled.get_mut(handle)
        {
            *controlled = controlled.saturating_sub(1);
        }
    }

    /// For a synchronised entry: the end of the timer that was last sent, in ticks of 4 ms; the
    /// lower two bits count retries.
    pub(crate) fn sync_end(&self, handle: u32) -> Option<u32> {
        let end = self.sync_ends.get(handle).copied();
        end.filter(|&end| end != 0)
    }

    pub(crate) fn set_sync_end(&mut self, handle: u32, end: u32) {
        *self.sync_ends.entry(handle) = end;
    }

    /// For an offloaded entry: the number of client packets up to which the decision whether to
    /// synchronise has been made.
    pub(crate) fn sync_packets(&self, handle: u32) -> Option<u32> {
        let packets = self.sync_packets.get(handle).copied();
        packets.filter(|&packets| packets != 0)
    }

    pub(crate) fn set_sync_packets(&mut self, handle: u32, packets: Option<u32>) {
        match packets {
            Some(packets) => *self.sync_packets.entry(handle) = packets,
            None => {
                if let Some(packets) = self.sync_packets.get_mut(handle) {
                    *packets = 0;
                }
            }
        }
    }
}

#[inline]
fn after(now: Instant, seconds: u32) -> Instant {
    let span = u64::from(seconds) * 1_000_000_000;
    Instant::from_nanos(now.as_nanos().saturating_add(span))
}

/// Compares address and port only: packets do not contain the other fields of an IPv6 socket
/// address.
#[inline]
fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    one.port() == other.port() && one.ip() == other.ip()
}

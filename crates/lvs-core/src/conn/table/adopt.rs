//! Adoption of a connection table that a previous process has left in shared memory.

use alloc::vec::Vec;
use core::time::Duration;

use super::buckets::{Buckets, Tags};
use super::memory::Layout;
use super::overflow::Side;
use super::slot::{Entry, UNARMED, kind};
use super::{ConnTable, Memory, Slots};
use crate::Instant;
use crate::conn::Draft;

/// Progress of the adoption of a table that a previous process has left in shared memory.
///
/// Look-ups find inherited entries in their buckets from the start, before the entries are visited.
/// Timers and counters include only the entries visited so far. Entries of the overflow are added
/// only after all other entries were visited: until then, look-ups do not find them.
#[derive(Debug)]
pub struct Adoption {
    /// Handles of slots that appear to be in use.
    handles: Vec<u32>,
    /// Index in `handles` of the next slot to examine.
    next: usize,
    /// Sequence number and handle of each adopted entry of the overflow region.
    overflow: Vec<(u64, u32)>,
    /// Clock of the previous process minus the clock of this process.
    ahead: Duration,
}

impl Adoption {
    /// Sets the difference: clock of the previous process minus clock of this process. Deadlines in
    /// the table refer to the clock of the previous process.
    #[must_use]
    pub const fn of_a_clock_ahead(mut self, by: Duration) -> Self {
        self.ahead = by;
        self
    }
}

impl ConnTable {
    /// Returns the inherited table in `memory`, and its adoption: call [`adopt`](Self::adopt) until
    /// it returns `false`. This function reads all slots and writes none: BPF programs, which may
    /// still write counters, can continue until the first call of `adopt`.
    pub(crate) fn found(capacity: usize, memory: Memory) -> (Self, Adoption) {
        let mut table = Self::with_memory(capacity, memory);
        let slots = table.slots.memory.layout.overflow_slots;
        table.overflow.set_used(slots);
        let end = table.slots.overflow + slots;
        let handles = (0..end).filter(|&handle| table.looks_used(handle));
        let adoption = Adoption {
            handles: handles.collect(),
            next: 0,
            overflow: Vec::new(),
            ahead: Duration::ZERO,
        };
        (table, adoption)
    }

    /// Visits at most `budget` entries, and adopts them. `keep` translates the values of an entry
    /// that have another meaning in this process, or rejects the entry. A rejected entry is
    /// removed, and so is an entry in a wrong bucket. Returns `true` if entries remain. The last
    /// call also adds all adopted entries of the overflow to its index.
    pub(crate) fn adopt(
        &mut self,
        adoption: &mut Adoption,
        now: Instant,
        budget: usize,
        mut keep: impl FnMut(u32, Entry<'_>) -> bool,
    ) -> bool {
        self.see(now);
        let handles = core::mem::take(&mut adoption.handles);
        let until = adoption.next.saturating_add(budget).min(handles.len());
        for &handle in &handles[adoption.next..until] {
            let entry = self.slots.entry(handle);
            entry.set_armed(UNARMED);
            let used = entry.word0() != 0;
            if used && self.lies_where_it_should(handle) && keep(handle, entry) {
                let expires = entry.expires().as_nanos();
                let ahead = u64::try_from(adoption.ahead.as_nanos()).unwrap_or(u64::MAX);
                entry.set_expires(Instant::from_nanos(expires.saturating_sub(ahead)));
                self.adopt_entry(handle, adoption);
            } else {
                self.discard(handle);
            }
        }
        adoption.next = until;
        if until < handles.len() {
            adoption.handles = handles;
            return true;
        }
        self.adopt_overflow(adoption);
        false
    }

    /// Adds an entry of another table, as the newest of its equal entries, with its deadline;
    /// `None` if the table has no room for the entry.
    pub(crate) fn move_in(&mut self, draft: &Draft, expires: Instant, now: Instant) -> Option<u32> {
        let handle = self.insert(draft, now)?;
        self.restart_until(handle, expires);
        Some(handle)
    }

    fn looks_used(&self, handle: u32) -> bool {
        let in_place = self.slots.in_place(handle);
        self.slots.entry(handle).word0() != 0
            || in_place && {
                let (tags, slot) = self.slots.tag_of(handle);
                tags.is_used(slot)
            }
    }

    /// Whether the entry is in one of its own buckets, or in the overflow. Other damage to an entry
    /// is not detected.
    fn lies_where_it_should(&self, handle: u32) -> bool {
        if !self.slots.in_place(handle) {
            return true;
        }
        let buckets = self.buckets_in_place(handle);
        let (_, slot) = self.slots.tag_of(handle);
        buckets.contains(slot / Layout::WAYS)
    }

    fn buckets_in_place(&self, handle: u32) -> Buckets {
        let entry = self.slots.entry(handle);
        let narrow = self.slots.is_narrow(handle);
        let hash = self.slots.hash(narrow, entry.client(), entry.protocol());
        Buckets::of(hash, self.slots.buckets(narrow))
    }

    fn adopt_entry(&mut self, handle: u32, adoption: &mut Adoption) {
        let entry = self.slots.entry(handle);
        if !self.slots.in_place(handle) {
            adoption.overflow.push((entry.sequence(), handle));
            return;
        }
        // The entries of the overflow set these bits again.
        let shadows = kind::SHADOWED_IN | kind::SHADOWED_OUT;
        if entry.word0() & shadows != 0 {
            entry.set_kind(shadows, false);
        }
        let tag = self.buckets_in_place(handle).tag;
        self.occupy(handle, tag);
        self.start(handle);
    }

    fn start(&mut self, handle: u32) {
        let entry = self.slots.entry(handle);
        self.strangers.forget(entry.client(), entry.protocol());
        self.count(handle, 1);
        self.wheel.arm(handle, self.slots.entry(handle));
    }

    fn discard(&mut self, handle: u32) {
        let entry = self.slots.entry(handle);
        if entry.word0() != 0 {
            entry.free();
        }
        if self.slots.in_place(handle) {
            let (tags, slot) = self.slots.tag_of(handle);
            if tags.is_used(slot) {
                tags.set(slot, 0);
            }
        }
    }

    /// Adds the adopted entries of the overflow to its index, in the order of their sequence
    /// numbers, and frees the other slots. Removes an entry if the index is full.
    fn adopt_overflow(&mut self, adoption: &mut Adoption) {
        self.forget_homes();
        let mut entries = core::mem::take(&mut adoption.overflow);
        entries.sort_unstable();
        let last = entries.iter().map(|&(_, handle)| handle).max();
        let used = last.map_or(0, |last| last - self.slots.overflow + 1);
        self.overflow.set_used(used);
        self.overflow.sequence = entries.last().map_or(0, |&(number, _)| number);
        let mut free: Vec<bool> = alloc::vec![true; used as usize];
        for (_, handle) in entries {
            if self.enter(handle, Side::BOTH) {
                self.move_home(handle, true);
                self.start(handle);
                free[(handle - self.slots.overflow) as usize] = false;
            } else {
                self.slots.entry(handle).free();
            }
        }
        for (slot, free) in (0..).zip(free) {
            if free {
                self.overflow.give_back(slot);
            }
        }
    }

    fn forget_homes(&self) {
        for narrow in [true, false] {
            let tags = self.slots.tags(narrow);
            for bucket in 0..self.slots.buckets(narrow) as usize {
                if Tags::is_overflowed(tags.word(bucket)) {
                    tags.set_overflowed(bucket, false);
                }
            }
        }
    }
}

/// Calls `entry` with each entry of the table in `memory`, and with the deadline of the entry. Of
/// entries with equal keys, the oldest comes first.
pub(crate) fn read(memory: Memory, mut entry: impl FnMut(Draft, Instant)) {
    let slots = Slots::new(memory);
    let mut give = |handle: u32| {
        let found = slots.entry(handle);
        if found.word0() != 0 {
            entry(found.draft(), found.expires());
        }
    };
    // A slot without a tag may never have been written: reading it would allocate its memory.
    let is_tagged = |&handle: &u32| {
        let (tags, slot) = slots.tag_of(handle);
        tags.is_used(slot)
    };
    (0..slots.overflow).filter(is_tagged).for_each(&mut give);
    let end = slots.overflow + slots.memory.layout.overflow_slots;
    let overflow = slots.overflow..end;
    let mut later: Vec<(u64, u32)> = overflow
        .filter(|&handle| slots.entry(handle).word0() != 0)
        .map(|handle| (slots.entry(handle).sequence(), handle))
        .collect();
    later.sort_unstable();
    later.into_iter().for_each(|(_, handle)| give(handle));
}

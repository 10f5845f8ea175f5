//! A hierarchical timing wheel next to the slots.
//!
//! A packet only writes its slot's deadline. The slot's record stays in its bucket as long as the
//! bucket is not later than the deadline. When the bucket is due, a slot whose deadline is later is
//! recorded again at its deadline. A busy connection is therefore moved about once per timeout, not
//! once per packet.
//!
//! | level | buckets | each | together |
//! |---|---|---|---|
//! | ticks | 8,192 | 2^22 ns, about 4.2 ms | two pages, 34 s |
//! | pages | 8,192 | 4,096 ticks, 17 s | two books, 39 hours |
//! | books | 64 | 4,096 pages, 19.5 hours | 51 days; later deadlines are recorded at the end, and moved later |
//!
//! The ticks of the present page and of the next one have a bucket each. While one page passes, the
//! records of the next are distributed to its ticks in portions, so that a page with a million
//! records causes no delay, and none of its timers is late. The usual timeouts cost one such move
//! at most.
//!
//! A bucket is a list of chunks of records, and a record is a handle: the records of a bucket are
//! adjacent and visited in order, so that many of their slots can be prefetched at a time.

use alloc::vec;
use alloc::vec::Vec;

use super::Slots;
use super::slot::{Entry, UNARMED};
use crate::Instant;

/// Binary logarithm of a tick in nanoseconds: 2^22 ns are about 4.2 ms; the kernel's tick at HZ=250
/// is 4 ms.
const TICK_SHIFT: u32 = 22;
/// Binary logarithm of the number of ticks in a page, and of the number of pages in a book.
const PAGE_BITS: u32 = 12;
const PAGE: u64 = 1 << PAGE_BITS;
const BOOK: u64 = 1 << PAGE_BITS;
/// Number of ticks: two pages, so that one can be filled while the other is processed.
const TICKS: usize = 2 << PAGE_BITS;
const PAGES: usize = 2 << PAGE_BITS;
const BOOKS: usize = 64;
const BUCKETS: usize = TICKS + PAGES + BOOKS;
/// Maximum number of ticks between the present and the bucket of a record; later deadlines are
/// recorded at this distance.
const SPAN: u64 = (BOOKS as u64 - 1) << (2 * PAGE_BITS);
/// Mask of the bits of a tick that are stored in a slot.
const ARMED_MASK: u64 = (1 << 31) - 1;

/// Number of words in a chunk: the next chunk of its bucket, its bucket, and records.
const CHUNK: usize = 64;
const CHUNK_SHIFT: u32 = 6;
const HEADER: usize = 2;
const RECORDS: usize = CHUNK - HEADER;

/// Number of ticks between two portions of a page whose records are distributed.
const PORTION_TICKS: u64 = 64;
/// Number of portions in which a page is distributed: they take three quarters of the time of the
/// page before it, and the last quarter is a reserve.
const PORTIONS: u64 = PAGE / PORTION_TICKS * 3 / 4;

pub(crate) const fn tick_of(when: Instant) -> u64 {
    when.as_nanos() >> TICK_SHIFT
}

pub(crate) const fn start_of(tick: u64) -> Instant {
    Instant::from_nanos(tick << TICK_SHIFT)
}

#[derive(Debug)]
pub(crate) struct Wheel {
    /// The first chunk of each bucket, which is the only one with free space; 0 for none.
    heads: Vec<u32>,
    /// Number of records in the first chunk of each bucket.
    fills: Vec<u32>,
    /// A bit for each bucket, set if the bucket contains records.
    occupied: Vec<u64>,
    /// All chunks. Number 0 is never used: it means "none".
    chunks: Vec<u32>,
    /// The first chunk of the list of free chunks; 0 for none.
    free: u32,
    /// Number of the first chunk that was never used.
    used: u32,
    /// Position of the record of each handle in the wheel.
    places: Vec<u32>,
    /// The present tick; no entry of an earlier tick remains.
    tick: u64,
    /// Number of records in one portion of the page that is being distributed.
    portion: usize,
    /// Number of records to distribute now.
    owed: usize,
    /// Number of portions of the next page that are included in `owed` or already distributed.
    portioned: u64,
    linked: usize,
    /// Whether the bucket of the present tick contains entries that are not due yet.
    stays: bool,
    /// Number of records in the bucket of each page.
    counts: Vec<u32>,
}

impl Wheel {
    /// A wheel for handles below `handles`, of which at most `capacity` are in the wheel at the
    /// same time.
    pub(super) fn new(handles: usize, capacity: usize) -> Self {
        let chunks = capacity.div_ceil(RECORDS) + BUCKETS + 1;
        Self {
            heads: vec![0; BUCKETS],
            fills: vec![0; BUCKETS],
            occupied: vec![0; BUCKETS / 64],
            // Memory from the kernel is zero, and need not be written.
            chunks: vec![0; chunks * CHUNK],
            free: 0,
            used: 1,
            places: vec![0; handles],
            tick: 0,
            portion: 0,
            owed: 0,
            portioned: 0,
            linked: 0,
            stays: false,
            counts: vec![0; PAGES],
        }
    }

    /// Inserts a slot into the wheel, at its deadline. Does nothing if the wheel already visits the
    /// slot at its deadline or earlier.
    #[inline]
    pub(super) fn arm(&mut self, handle: u32, entry: Entry<'_>) {
        let deadline = tick_of(entry.expires());
        let armed = entry.armed();
        if armed != UNARMED {
            if self.ahead(armed) <= deadline.saturating_sub(self.tick) {
                return;
            }
            self.unlink(handle);
        }
        entry.set_armed(self.link(handle, deadline));
    }

    pub(super) fn disarm(&mut self, handle: u32, entry: Entry<'_>) {
        if entry.armed() != UNARMED {
            self.unlink(handle);
            entry.set_armed(UNARMED);
        }
    }

    /// Whether the bucket of the present tick contains entries that are not due yet.
    pub(super) const fn stays(&self) -> bool {
        self.stays
    }

    /// Advances to the next tick up to `limit` in which entries may be due. Distributes at most
    /// `budget` records of pages and books to lower levels. `None` if no entry is due up to `limit`
    /// or the budget is used up.
    pub(super) fn next_tick(
        &mut self,
        slots: &Slots,
        limit: u64,
        budget: &mut usize,
    ) -> Option<u64> {
        loop {
            if self.linked == 0 {
                if self.tick < limit {
                    (self.tick, self.stays) = (limit, false);
                    (self.owed, self.portion) = (0, 0);
                }
                return None;
            }
            if !self.spread(slots, budget) {
                return None;
            }
            if self.heads[tick_bucket(self.tick)] != 0 {
                return (self.tick <= limit).then_some(self.tick);
            }
            if self.tick >= limit {
                return None;
            }
            self.move_to(self.next_stop().min(limit));
        }
    }

    /// Examines at most `budget` slots in the bucket of the present tick. Removes the slots that
    /// are due at `now`, and appends them to `due`. Moves the slots of later ticks to their
    /// buckets.
    pub(super) fn take_due(
        &mut self,
        slots: &Slots,
        now: Instant,
        budget: &mut usize,
        due: &mut Vec<u32>,
    ) {
        let bucket = tick_bucket(self.tick);
        let mut chunk = self.heads[bucket];
        let mut fill = self.fills[bucket] as usize;
        while chunk != 0 && *budget > 0 {
            let next = self.chunks[at(chunk)];
            let looked_at = fill.min(*budget);
            *budget -= looked_at;
            let from = at(chunk) + HEADER;
            let end = from + fill;
            let deadlines = self.load(slots, end - looked_at..end);
            // Visit the entries from the end: a removal moves only entries that were visited
            // already.
            for place in (end - looked_at..end).rev() {
                let handle = self.chunks[place];
                let entry = slots.entry(handle);
                let deadline = Instant::from_nanos(deadlines[place - from]);
                if deadline <= now {
                    self.unlink_at(place);
                    entry.set_armed(UNARMED);
                    due.push(handle);
                } else if tick_of(deadline) > self.tick {
                    self.unlink_at(place);
                    entry.set_armed(self.link(handle, tick_of(deadline)));
                } else {
                    self.stays = true;
                }
            }
            chunk = next;
            fill = RECORDS;
        }
    }

    /// The deadlines of some records of one chunk, by position among the records of the chunk. Also
    /// loads the cache lines that the removal of their entries will need.
    fn load(&self, slots: &Slots, places: core::ops::Range<usize>) -> [u64; RECORDS] {
        let mut deadlines = [0; RECORDS];
        let from = places.start & !(CHUNK - 1) | HEADER;
        let mut warmed = 0;
        for place in places {
            let handle = self.chunks[place];
            deadlines[place - from] = slots.entry(handle).expires().as_nanos();
            warmed ^= slots.warm(handle);
        }
        core::hint::black_box(warmed);
        deadlines
    }

    /// Latest time at which the caller must advance the wheel; `None` if the wheel is empty.
    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        if self.linked == 0 {
            return None;
        }
        let now = self.owed > 0 || self.heads[tick_bucket(self.tick)] != 0;
        let tick = if now { self.tick } else { self.next_stop() };
        Some(start_of(tick + 1))
    }

    /// The next tick at which the wheel has work: it reaches a bucket with records, or must
    /// distribute a portion, a page or a book. Without work, the start of the next page.
    fn next_stop(&self) -> u64 {
        let page = self.tick >> PAGE_BITS;
        let tick = self.next_occupied(0, TICKS, self.tick, (page + 2) << PAGE_BITS);
        let spreading = self.page_is_spread().then(|| {
            let next = (self.tick / PORTION_TICKS + 1) * PORTION_TICKS;
            next.min((page + 1) << PAGE_BITS)
        });
        // A page is distributed during the page before it, and a book before its first page.
        let next_page = self
            .next_occupied(TICKS, PAGES, page + 1, page + 2 + BOOK)
            .map(|page| (page - 1) << PAGE_BITS);
        let book = page_to_book(page + 2);
        let next_book = self
            .next_occupied(TICKS + PAGES, BOOKS, book, book + BOOKS as u64)
            .map(|book| ((book << PAGE_BITS) - 2) << PAGE_BITS);
        [tick, spreading, next_page, next_book]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or((page + 1) << PAGE_BITS)
            .max(self.tick + 1)
    }

    /// The first number above `after` and below `end` whose bucket, in a ring of `size` buckets
    /// that begins at `base`, has records.
    fn next_occupied(&self, base: usize, size: usize, after: u64, end: u64) -> Option<u64> {
        let mut number = after + 1;
        while number < end {
            let bucket = base + ring(number, size);
            let bits = self.occupied[bucket / 64] >> (bucket % 64);
            if bits != 0 {
                let found = number + u64::from(bits.trailing_zeros());
                return (found < end).then_some(found);
            }
            number += 64 - (bucket % 64) as u64;
        }
        None
    }

    /// Whether the next page has records that are not distributed to its ticks yet.
    fn page_is_spread(&self) -> bool {
        self.heads[page_bucket((self.tick >> PAGE_BITS) + 1)] != 0
    }

    /// Advances the wheel to `tick`, which must not be after [`next_stop`](Self::next_stop).
    fn move_to(&mut self, tick: u64) {
        let before = self.tick >> PAGE_BITS;
        (self.tick, self.stays) = (tick, false);
        let page = tick >> PAGE_BITS;
        if page != before {
            let count = self.counts[ring(page + 1, PAGES)] as usize;
            self.portion = count.div_ceil(portions());
            self.portioned = 0;
        }
        // The number of portions so far, including the present one.
        let portions = (tick % PAGE) / PORTION_TICKS + 1;
        if self.page_is_spread() && portions > self.portioned {
            let more = usize::try_from(portions - self.portioned).unwrap_or(0);
            self.owed += more * self.portion.max(1);
            self.portioned = portions;
        }
    }

    /// Distributes the records of the book and the page that are reached, and the due portions of
    /// the next page. `false` if the budget is used up first.
    fn spread(&mut self, slots: &Slots, budget: &mut usize) -> bool {
        let page = self.tick >> PAGE_BITS;
        // A book is distributed to its pages before the first of these pages is distributed.
        let book = TICKS + PAGES + ring(page_to_book(page + 2), BOOKS);
        if self.heads[book] != 0 && !self.empty(slots, book, usize::MAX, budget) {
            return false;
        }
        let present = page_bucket(page);
        if self.heads[present] != 0 && !self.empty(slots, present, usize::MAX, budget) {
            return false;
        }
        if self.owed > 0 {
            let before = *budget;
            let owed = self.owed;
            let done = self.empty(slots, page_bucket(page + 1), owed, budget);
            let left = owed.saturating_sub(before - *budget);
            self.owed = if done { 0 } else { left };
            return done;
        }
        true
    }

    /// Moves up to `most` records of a bucket to the buckets of their slots' deadlines. `false` if
    /// the budget is used up first.
    fn empty(&mut self, slots: &Slots, bucket: usize, most: usize, budget: &mut usize) -> bool {
        let mut left = most;
        while left > 0 && self.heads[bucket] != 0 {
            if *budget == 0 {
                return false;
            }
            let chunk = self.heads[bucket];
            let end = at(chunk) + HEADER + self.fills[bucket] as usize;
            let many = (self.fills[bucket] as usize).min(left).min(*budget);
            let deadlines = self.load(slots, end - many..end);
            for place in (end - many..end).rev() {
                let handle = self.chunks[place];
                self.unlink_at(place);
                let deadline = deadlines[place % CHUNK - HEADER];
                let armed = self.link(handle, tick_of(Instant::from_nanos(deadline)));
                slots.entry(handle).set_armed(armed);
            }
            left -= many;
            *budget -= many;
        }
        true
    }

    /// Number of ticks from the present tick until `armed`.
    #[inline]
    fn ahead(&self, armed: u32) -> u64 {
        u64::from(armed).wrapping_sub(self.tick) & ARMED_MASK
    }

    /// Adds a handle that has no record; returns the value for its slot ([`Entry::armed`]).
    pub(super) fn link(&mut self, handle: u32, deadline: u64) -> u32 {
        let tick = deadline.clamp(self.tick, self.tick + SPAN);
        let present = self.tick >> PAGE_BITS;
        let page = tick >> PAGE_BITS;
        let bucket = if page <= present + 1 {
            tick_bucket(tick)
        } else if page < present + 2 + BOOK {
            self.counts[ring(page, PAGES)] += 1;
            page_bucket(page)
        } else {
            TICKS + PAGES + ring(page_to_book(page), BOOKS)
        };
        let mut chunk = self.heads[bucket];
        let mut fill = self.fills[bucket] as usize;
        if chunk == 0 || fill == RECORDS {
            let next = chunk;
            chunk = self.take_chunk();
            self.chunks[at(chunk)] = next;
            self.chunks[at(chunk) + 1] = index(bucket);
            self.heads[bucket] = chunk;
            self.occupied[bucket / 64] |= 1 << (bucket % 64);
            fill = 0;
        }
        let place = at(chunk) + HEADER + fill;
        self.chunks[place] = handle;
        self.places[handle as usize] = index(place);
        self.fills[bucket] = index(fill + 1);
        self.linked += 1;
        armed_at(tick)
    }

    fn unlink(&mut self, handle: u32) {
        self.unlink_at(self.places[handle as usize] as usize);
    }

    /// Removes the record at an index of `chunks`; the last record of its bucket moves to this
    /// index.
    fn unlink_at(&mut self, place: usize) {
        let bucket = self.chunks[(place & !(CHUNK - 1)) + 1] as usize;
        let head = self.heads[bucket];
        let fill = self.fills[bucket] as usize - 1;
        let last = at(head) + HEADER + fill;
        if last != place {
            let moved = self.chunks[last];
            self.chunks[place] = moved;
            self.places[moved as usize] = index(place);
        }
        self.fills[bucket] = index(fill);
        if fill == 0 {
            let next = self.chunks[at(head)];
            self.heads[bucket] = next;
            self.chunks[at(head)] = self.free;
            self.free = head;
            if next == 0 {
                self.occupied[bucket / 64] &= !(1 << (bucket % 64));
            } else {
                self.fills[bucket] = index(RECORDS);
            }
        }
        if let Some(count) = bucket
            .checked_sub(TICKS)
            .and_then(|page| self.counts.get_mut(page))
        {
            *count -= 1;
        }
        self.linked -= 1;
    }

    /// Takes a free chunk. There are enough chunks for all records and one incomplete chunk for
    /// each bucket.
    fn take_chunk(&mut self) -> u32 {
        if self.free == 0 {
            self.used += 1;
            return self.used - 1;
        }
        let chunk = self.free;
        self.free = self.chunks[at(chunk)];
        chunk
    }
}

/// Index of the first word of a chunk in `chunks`.
const fn at(chunk: u32) -> usize {
    (chunk as usize) << CHUNK_SHIFT
}

#[expect(clippy::cast_possible_truncation, reason = "below the ring's size")]
const fn ring(number: u64, size: usize) -> usize {
    number as usize & (size - 1)
}

/// The number as a `u32`: buckets, records of a chunk and places of records are fewer than 2^32.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the count stays below the limit"
)]
const fn index(n: usize) -> u32 {
    n as u32
}

#[expect(clippy::cast_possible_truncation, reason = "a few")]
const fn portions() -> usize {
    PORTIONS as usize
}

const fn armed_at(tick: u64) -> u32 {
    (tick & ARMED_MASK) as u32
}

const fn tick_bucket(tick: u64) -> usize {
    ring(tick, TICKS)
}

const fn page_bucket(page: u64) -> usize {
    TICKS + ring(page, PAGES)
}

const fn page_to_book(page: u64) -> u64 {
    page >> PAGE_BITS
}

//! A hierarchical timing wheel whose links live in the slots.
//!
//! A packet only writes its slot's deadline. The slot stays where it is linked as long as that is not later than the
//! deadline; when its bucket comes up, a slot that is not due yet is linked again at its deadline. So a busy connection
//! is moved about once per timeout, not once per packet.

use super::link::Link;
use super::slot::{NO_SLOT, Slot};
use crate::Instant;

/// 2^22 ns, about 4.2 ms: the kernel's tick at HZ=250 is 4 ms.
const TICK_SHIFT: u32 = 22;

/// Width of the first level in bits: 256 ticks, about 1.07 s.
const FIRST_BITS: u32 = 8;

/// Width of each further level in bits.
const LEVEL_BITS: u32 = 6;

/// Levels behind the first; together they span 2^32 ticks, 208 days. What lies beyond is linked at the end and moved on.
const LEVELS: u32 = 4;

const FIRST_BUCKETS: usize = 1 << FIRST_BITS;

const BUCKETS: usize = FIRST_BUCKETS + (LEVELS as usize) * (1 << LEVEL_BITS);

const SPAN: u64 = 1 << (FIRST_BITS + LEVELS * LEVEL_BITS);

/// The tick that `when` falls into.
pub(crate) const fn tick_of(when: Instant) -> u64 {
    when.as_nanos() >> TICK_SHIFT
}

/// The first moment of `tick`.
pub(crate) const fn start_of(tick: u64) -> Instant {
    Instant::from_nanos(tick << TICK_SHIFT)
}

#[derive(Debug)]
pub(crate) struct Wheel {
    heads: [u32; BUCKETS],
    /// One bit a bucket: it has slots.
    occupied: [u64; BUCKETS / 64],
    /// The tick being worked on: every earlier one is done.
    tick: u64,
    /// The buckets of higher levels that begin at `tick` are still to be spread over the lower ones.
    cascade: bool,
    linked: usize,
}

impl Wheel {
    pub(crate) fn new() -> Self {
        Self {
            heads: [NO_SLOT; BUCKETS],
            occupied: [0; BUCKETS / 64],
            tick: 0,
            cascade: false,
            linked: 0,
        }
    }

    /// Makes sure that slot `index` comes up when its deadline is reached.
    pub(crate) fn arm(&mut self, slots: &mut [Slot], index: u32) {
        let slot = &slots[index as usize];
        let deadline = tick_of(slot.expires);
        if slot.link.armed <= deadline {
            return;
        }
        if slot.link.armed != u64::MAX {
            self.unlink(slots, index);
        }
        self.link(slots, index, deadline);
    }

    /// Takes slot `index` out, if it is in.
    pub(crate) fn disarm(&mut self, slots: &mut [Slot], index: u32) {
        if slots[index as usize].link.armed != u64::MAX {
            self.unlink(slots, index);
        }
    }

    /// The next tick up to `limit` in which something may be due. Moves on over empty ticks, spreading at most `budget`
    /// slots on the way; `None` if nothing is due up to `limit` or the budget is spent.
    pub(crate) fn next_tick(
        &mut self,
        slots: &mut [Slot],
        limit: u64,
        budget: &mut usize,
    ) -> Option<u64> {
        loop {
            if self.cascade && !self.spread(slots, budget) {
                return None;
            }
            if self.linked == 0 {
                if self.tick < limit {
                    self.tick = limit;
                }
                return None;
            }
            if self.heads[first_bucket(self.tick)] != NO_SLOT {
                return (self.tick <= limit).then_some(self.tick);
            }
            if self.tick >= limit {
                return None;
            }
            self.tick = self.next_stop().min(limit);
            self.cascade = self.tick.is_multiple_of(FIRST_BUCKETS as u64);
        }
    }

    /// Takes the slots out whose deadline `now` has reached from the bucket of the present tick, at most `budget` of
    /// them, and appends them to `due`.
    pub(crate) fn take_due(
        &mut self,
        slots: &mut [Slot],
        now: Instant,
        budget: &mut usize,
        due: &mut alloc::vec::Vec<u32>,
    ) {
        let mut index = self.heads[first_bucket(self.tick)];
        while index != NO_SLOT && *budget > 0 {
            let Link { next, .. } = slots[index as usize].link;
            let deadline = slots[index as usize].expires;
            if deadline <= now {
                self.unlink(slots, index);
                due.push(index);
            } else if tick_of(deadline) > self.tick {
                self.unlink(slots, index);
                self.link(slots, index, tick_of(deadline));
            }
            *budget -= 1;
            index = next;
        }
    }

    /// When to call again at the latest; `None` if nothing is linked.
    pub(crate) fn next_wakeup(&self) -> Option<Instant> {
        if self.linked == 0 {
            return None;
        }
        let tick = if self.cascade || self.heads[first_bucket(self.tick)] != NO_SLOT {
            self.tick
        } else {
            self.next_stop()
        };
        Some(start_of(tick + 1))
    }

    /// The next tick after the present one that has slots in the first level, or at which a higher level is to be looked
    /// at. A level whose remaining slots lie behind its next turn ends the search at that turn.
    fn next_stop(&self) -> u64 {
        let (words, rest) = self.occupied.split_at(FIRST_BUCKETS / 64);
        let position = first_bucket(self.tick);
        for (word, &bits) in words.iter().enumerate().skip(position / 64) {
            let mut bits = bits;
            if word == position / 64 {
                bits &= above(position % 64);
            }
            if bits != 0 {
                let bucket = word as u64 * 64 + u64::from(bits.trailing_zeros());
                return (self.tick & !(FIRST_BUCKETS as u64 - 1)) + bucket;
            }
        }
        let mut lower = words.iter().any(|&word| word != 0);
        for (level, &bits) in (0..LEVELS).zip(rest) {
            let shift = FIRST_BITS + level * LEVEL_BITS;
            let turn = (self.tick >> shift) + 1;
            if lower {
                return turn << shift;
            }
            let position = (self.tick >> shift) & ((1 << LEVEL_BITS) - 1);
            let later = bits & above(position as usize);
            if later != 0 {
                return (turn - 1 - position + u64::from(later.trailing_zeros())) << shift;
            }
            lower = bits != 0;
        }
        ((self.tick / SPAN) + 1) * SPAN
    }

    /// Spreads the buckets of higher levels that begin at the present tick. `false` if the budget ran out first.
    fn spread(&mut self, slots: &mut [Slot], budget: &mut usize) -> bool {
        for level in 0..LEVELS {
            let shift = FIRST_BITS + level * LEVEL_BITS;
            let position = (self.tick >> shift) & ((1 << LEVEL_BITS) - 1);
            let bucket = level_bucket(level, position);
            while self.heads[bucket] != NO_SLOT {
                if *budget == 0 {
                    return false;
                }
                *budget -= 1;
                let index = self.heads[bucket];
                self.unlink(slots, index);
                let deadline = tick_of(slots[index as usize].expires);
                self.link(slots, index, deadline);
            }
            if position != 0 {
                break;
            }
        }
        self.cascade = false;
        true
    }

    fn link(&mut self, slots: &mut [Slot], index: u32, deadline: u64) {
        let tick = deadline.clamp(self.tick, self.tick + SPAN - 1);
        let mut bucket = first_bucket(tick);
        let distance = tick - self.tick;
        if distance >= FIRST_BUCKETS as u64 {
            let mut level = 0;
            while distance >> (FIRST_BITS + (level + 1) * LEVEL_BITS) != 0 {
                level += 1;
            }
            let shift = FIRST_BITS + level * LEVEL_BITS;
            bucket = level_bucket(level, (tick >> shift) & ((1 << LEVEL_BITS) - 1));
        }
        let head = self.heads[bucket];
        slots[index as usize].link = Link {
            prev: NO_SLOT,
            next: head,
            bucket: u16::try_from(bucket).expect("there are 512 buckets"),
            armed: tick,
        };
        if head != NO_SLOT {
            slots[head as usize].link.prev = index;
        }
        self.heads[bucket] = index;
        self.occupied[bucket / 64] |= 1 << (bucket % 64);
        self.linked += 1;
    }

    fn unlink(&mut self, slots: &mut [Slot], index: u32) {
        let Link {
            prev, next, bucket, ..
        } = slots[index as usize].link;
        if prev == NO_SLOT {
            let bucket = usize::from(bucket);
            self.heads[bucket] = next;
            if next == NO_SLOT {
                self.occupied[bucket / 64] &= !(1 << (bucket % 64));
            }
        } else {
            slots[prev as usize].link.next = next;
        }
        if next != NO_SLOT {
            slots[next as usize].link.prev = prev;
        }
        slots[index as usize].link = Link::UNLINKED;
        self.linked -= 1;
    }
}

#[expect(clippy::cast_possible_truncation, reason = "masked to 8 bits")]
const fn first_bucket(tick: u64) -> usize {
    (tick & (FIRST_BUCKETS as u64 - 1)) as usize
}

#[expect(clippy::cast_possible_truncation, reason = "both are below 64")]
const fn level_bucket(level: u32, position: u64) -> usize {
    FIRST_BUCKETS + ((level as usize) << LEVEL_BITS) + position as usize
}

/// The bits above bit `position` of a word.
const fn above(position: usize) -> u64 {
    (!1u64) << position
}

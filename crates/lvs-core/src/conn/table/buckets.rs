//! The slots in which an entry may be stored, and the tags by which a look-up selects a slot.
//!
//! An entry has two buckets of eight slots, which the hash of its protocol and its client's address
//! and port selects. Each bucket has a word of tags, one byte a slot: seven bits of the hash if the
//! slot is used, 0 if it is free. The words are stored next to each other, one byte for each slot,
//! so that they stay in the CPU caches when the slots do not. A look-up reads two words, and then
//! almost always only the slot of its entry.
//!
//! Three more bits of the hash select a slot of the first bucket: the *home* of the entry. A new
//! entry in the first bucket uses this slot if it is free. A look-up reads the home slot first. It
//! then waits for memory once, instead of once for the tags and once for the slot. With steady
//! turnover, 90% of the entries are at home if a tenth of the table is used, and 70% if a quarter
//! is used. In a fuller table, look-ups skip this step.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use super::memory::{Layout, Region};

/// Bit in the tag word of a bucket: at least one entry, of which this is the first bucket, is in
/// the overflow.
pub(super) const OVERFLOWED: u64 = 0x80;
const TAGS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
const ONES: u64 = 0x0101_0101_0101_0101;
const TOPS: u64 = 0x8080_8080_8080_8080;

/// Number of the lowest hash bit that selects the home slot; the bits below it are the tag.
pub(super) const HOME: u32 = 7;
/// If the first bucket has at least this many free slots, a new entry uses it without a check of
/// the second one. A smaller value puts more entries into their first bucket. A larger value
/// balances the buckets better, so that fewer entries find both full: 1 in 500 with this value, 1
/// in 650 if the emptier bucket is always used.
const AMPLE: u32 = 5;

/// The two buckets of a hash, its tag, and its home slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buckets {
    pub(super) first: usize,
    pub(super) second: usize,
    pub(super) tag: u64,
    /// Number of the home slot in the first bucket.
    pub(super) home: usize,
}

impl Buckets {
    #[inline]
    pub(super) fn of(hash: u64, buckets: u32) -> Self {
        let scaled = |half: u64| ((half * u64::from(buckets)) >> 32) as usize;
        Self {
            first: scaled(hash & 0xffff_ffff),
            second: scaled(hash >> 32),
            tag: (hash & 0x7f).max(1),
            home: (hash >> HOME) as usize % Layout::WAYS,
        }
    }

    /// The index of the home slot in its region.
    #[inline]
    pub(super) const fn home(&self) -> usize {
        self.first * Layout::WAYS + self.home
    }

    pub(super) const fn contains(&self, bucket: usize) -> bool {
        self.first == bucket || self.second == bucket
    }
}

/// A mask for the tag word of a bucket: the top bit of a byte is set if its slot has the tag `tag`.
#[inline]
const fn matching(word: u64, tag: u64) -> u64 {
    // A byte that differs carries into its highest bit, and not into the next byte.
    !(((word & TAGS) ^ (tag * ONES)) + TAGS) & TOPS
}

/// The numbers, within the bucket, of the slots with the tag `tag`.
#[inline]
pub(super) fn lanes(word: u64, tag: u64) -> impl Iterator<Item = usize> + Clone {
    let mut left = matching(word, tag);
    core::iter::from_fn(move || {
        (left != 0).then(|| {
            let lane = left.trailing_zeros() as usize / 8;
            left &= left - 1;
            lane
        })
    })
}

#[derive(Clone, Copy)]
pub(super) struct Tags<'a>(pub(super) &'a Region);

impl<'a> Tags<'a> {
    #[inline]
    pub(super) fn place(self, bucket: usize) -> &'a AtomicU64 {
        self.0.word(bucket)
    }

    #[inline]
    pub(super) fn word(self, bucket: usize) -> u64 {
        self.0.word(bucket).load(Relaxed)
    }

    fn change(self, bucket: usize, change: impl FnOnce(u64) -> u64) {
        let word = self.0.word(bucket);
        word.store(change(word.load(Relaxed)), Relaxed);
    }

    #[inline]
    fn room(self, bucket: usize) -> u32 {
        matching(self.word(bucket), 0).count_ones()
    }

    /// The slot for a new entry; `None` if both buckets are full. The first bucket is used if it
    /// has at least [`AMPLE`] free slots, or at least as many as the second one. In the bucket, the
    /// home slot is preferred.
    #[inline]
    pub(super) fn choose(self, buckets: &Buckets) -> Option<usize> {
        let first = self.room(buckets.first);
        let bucket = if first < AMPLE && self.room(buckets.second) > first {
            buckets.second
        } else {
            buckets.first
        };
        let mut free = lanes(self.word(bucket), 0);
        let lane = free.clone().find(|&lane| lane == buckets.home);
        Some(bucket * Layout::WAYS + lane.or_else(|| free.next())?)
    }

    #[inline]
    pub(super) fn is_used(self, slot: usize) -> bool {
        self.word(slot / Layout::WAYS) >> (slot % Layout::WAYS * 8) & 0x7f != 0
    }

    /// Writes the tag of a slot; 0 makes it free.
    pub(super) fn set(self, slot: usize, tag: u64) {
        let shift = slot % Layout::WAYS * 8;
        self.change(slot / Layout::WAYS, |word| {
            word & !(0x7f << shift) | tag << shift
        });
    }

    pub(super) const fn is_overflowed(word: u64) -> bool {
        word & OVERFLOWED != 0
    }

    pub(super) fn set_overflowed(self, bucket: usize, on: bool) {
        self.change(bucket, |word| {
            if on {
                word | OVERFLOWED
            } else {
                word & !OVERFLOWED
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    proptest::proptest! {
        #[test]
        fn tag_match_finds_exactly_the_slots_with_equal_seven_bit_tag(word: u64, tag in 0_u64..128) {
            let expected: Vec<usize> = (0..8).filter(|lane| word >> (lane * 8) & 0x7f == tag).collect();
            proptest::prop_assert_eq!(lanes(word, tag).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn bucket_fills_in_order_of_preference_and_empties() {
        let region = Region::heap(2).unwrap();
        let tags = Tags(&region);
        let buckets = Buckets {
            first: 0,
            second: 1,
            tag: 5,
            home: 3,
        };
        let mut taken = Vec::new();
        while let Some(slot) = tags.choose(&buckets) {
            assert!(!tags.is_used(slot));
            tags.set(slot, buckets.tag);
            assert!(tags.is_used(slot));
            taken.push(slot);
        }
        // The home slot; then the first bucket while it has ample room; then the bucket with more
        // free slots, the first if both have equally many.
        let expected = [3, 0, 1, 2, 11, 8, 9, 10, 4, 12, 5, 13, 6, 14, 7, 15];
        assert_eq!(taken, expected);
        tags.set_overflowed(0, true);
        for slot in taken {
            tags.set(slot, 0);
        }
        assert!(Tags::is_overflowed(tags.word(0)) && !Tags::is_overflowed(tags.word(1)));
        tags.set_overflowed(0, false);
        assert_eq!([tags.word(0), tags.word(1)], [0, 0]);
    }
}

//! Where an entry may lie, and the words of tags that lead to it.
//!
//! The hash of its client's side gives an entry two buckets of eight slots. Each bucket has a word of tags, one byte a
//! slot: seven bits of the hash if the slot is used, 0 if it is free. The words lie together, a byte a slot, so that
//! they stay in the caches when the slots do not: a look-up reads two of them, and then hardly ever another slot than
//! the one it wants.

use core::sync::atomic::Ordering::Relaxed;

use super::memory::{Layout, Region};

/// In the word of a bucket: an entry for which it is the first bucket lies in the overflow.
pub(super) const OVERFLOWED: u64 = 0x80;
/// Seven bits of each byte.
const TAGS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
/// One bit of each byte.
const ONES: u64 = 0x0101_0101_0101_0101;
/// The uppermost bit of each byte.
const TOPS: u64 = 0x8080_8080_8080_8080;

/// The two buckets of a hash, and its tag.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buckets {
    pub(super) first: usize,
    pub(super) second: usize,
    pub(super) tag: u64,
}

impl Buckets {
    /// Of `buckets` in all.
    #[inline]
    pub(super) fn of(hash: u64, buckets: u32) -> Self {
        let scaled = |half: u64| ((half * u64::from(buckets)) >> 32) as usize;
        Self {
            first: scaled(hash & 0xffff_ffff),
            second: scaled(hash >> 32),
            tag: (hash & 0x7f).max(1),
        }
    }

    /// Whether an entry may lie in this bucket.
    pub(super) const fn contains(&self, bucket: usize) -> bool {
        self.first == bucket || self.second == bucket
    }
}

/// The slots of a bucket whose tags are `tag`: the uppermost bit of each one's byte.
#[inline]
const fn matching(word: u64, tag: u64) -> u64 {
    // A byte that differs carries into its uppermost bit, and no further.
    !(((word & TAGS) ^ (tag * ONES)) + TAGS) & TOPS
}

/// The numbers of the slots of a bucket whose tag is `tag`.
#[inline]
pub(super) fn lanes(word: u64, tag: u64) -> impl Iterator<Item = usize> {
    let mut left = matching(word, tag);
    core::iter::from_fn(move || {
        (left != 0).then(|| {
            let lane = left.trailing_zeros() as usize / 8;
            left &= left - 1;
            lane
        })
    })
}

/// A region of tags.
#[derive(Clone, Copy)]
pub(super) struct Tags<'a>(pub(super) &'a Region);

impl Tags<'_> {
    #[inline]
    pub(super) fn word(self, bucket: usize) -> u64 {
        self.0.word(bucket).load(Relaxed)
    }

    fn change(self, bucket: usize, change: impl FnOnce(u64) -> u64) {
        let word = self.0.word(bucket);
        word.store(change(word.load(Relaxed)), Relaxed);
    }

    /// Free slots of a bucket.
    #[inline]
    fn room(self, bucket: usize) -> u32 {
        matching(self.word(bucket), 0).count_ones()
    }

    /// The slot that a new entry takes: in the bucket that has more room.
    #[inline]
    pub(super) fn choose(self, buckets: &Buckets) -> Option<usize> {
        let (first, second) = (self.room(buckets.first), self.room(buckets.second));
        let bucket = if second > first {
            buckets.second
        } else {
            buckets.first
        };
        let lane = lanes(self.word(bucket), 0).next()?;
        Some(bucket * Layout::WAYS + lane)
    }

    /// Whether a slot is used.
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
        fn just_the_bytes_with_the_tag_match(word: u64, tag in 0_u64..128) {
            let expected: Vec<usize> = (0..8).filter(|lane| word >> (lane * 8) & 0x7f == tag).collect();
            proptest::prop_assert_eq!(lanes(word, tag).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_bucket_fills_and_empties() {
        let region = Region::heap(2);
        let tags = Tags(&region);
        let buckets = Buckets {
            first: 0,
            second: 1,
            tag: 5,
        };
        let mut taken = Vec::new();
        while let Some(slot) = tags.choose(&buckets) {
            assert!(!tags.is_used(slot));
            tags.set(slot, buckets.tag);
            assert!(tags.is_used(slot));
            taken.push(slot);
        }
        // Where there is more room, ties to the first.
        let expected: Vec<usize> = (0..8).flat_map(|lane| [lane, 8 + lane]).collect();
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

//! The index of the overflow region of the connection table. It finds the entries of a tuple by the
//! hash of the tuple, in a bounded number of steps for any tuples.
//!
//! A line is a cache line with room for eight references. A hash selects two lines, and a reference
//! is stored in the emptier one. The index is dimensioned for four references a line, with which
//! two choices leave no line with more than about seven. A reference fits nowhere only if both of
//! its lines contain eight references; the index is then full for this hash. The hash is keyed, so
//! a sender cannot choose the lines of its tuples.

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

/// Number of references in a line, which is 64 bytes long.
const WIDTH: usize = 8;
/// Average number of references in a line when the index contains its planned number of entries.
const LOAD: usize = 4;
/// Maximum number of references that a look-up examines.
#[cfg(test)]
pub(crate) const PROBES: usize = 2 * WIDTH;

/// References to entries, by hash.
///
/// A used place contains the upper half of the hash, and below it the reference plus one. The hash
/// distinguishes most entries, so that they need not be read. 0 is a free place.
pub(crate) struct Index {
    places: Vec<u64>,
    /// Index in `places` at which the first line begins: a boundary of a cache line.
    first: usize,
    /// Number of lines minus one; the number of lines is a power of two.
    mask: usize,
}

impl Index {
    /// An empty index with room for `references` references.
    pub(crate) fn new(references: usize) -> Self {
        let lines = references.div_ceil(LOAD).max(1).next_power_of_two();
        // The kernel provides memory that is zero and need not be written; with an aligned type,
        // all of it would be written.
        let places = vec![0; (lines + 1) * WIDTH];
        let first = places.as_ptr().align_offset(64).min(WIDTH);
        Self {
            places,
            first,
            mask: lines - 1,
        }
    }

    /// The reference with this hash for which `is` returns true.
    #[inline]
    pub(crate) fn find(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        let (one, other) = self.lines(hash);
        self.find_at(one, hash, &is)
            .or_else(|| self.find_at(other, hash, &is))
            .map(|place| reference(self.places[place]))
    }

    /// Adds a reference; `false`, without a change, if both lines are full.
    pub(crate) fn insert(&mut self, hash: u64, new: u32) -> bool {
        let (one, other) = self.lines(hash);
        let room = |line: usize| (line..line + WIDTH).filter(|&place| self.places[place] == 0);
        let line = if room(other).count() > room(one).count() {
            other
        } else {
            one
        };
        let Some(place) = room(line).next() else {
            return false;
        };
        self.places[place] = tagged(hash, new);
        true
    }

    /// Replaces `old` by `new`, which has the same hash.
    pub(crate) fn replace(&mut self, hash: u64, old: u32, new: u32) {
        if let Some(place) = self.place_of(hash, old) {
            self.places[place] = tagged(hash, new);
        }
    }

    pub(crate) fn remove(&mut self, hash: u64, old: u32) {
        if let Some(place) = self.place_of(hash, old) {
            self.places[place] = 0;
        }
    }

    /// Whether the index is empty. Every line is read.
    #[cfg(test)]
    pub(crate) fn is_clear(&self) -> bool {
        self.places.iter().all(|&place| place == 0)
    }

    #[cfg(test)]
    fn contains(&self, hash: u64, reference: u32) -> bool {
        self.place_of(hash, reference).is_some()
    }

    fn place_of(&self, hash: u64, wanted: u32) -> Option<usize> {
        let (one, other) = self.lines(hash);
        self.find_at(one, hash, &|found| found == wanted)
            .or_else(|| self.find_at(other, hash, &|found| found == wanted))
    }

    #[inline]
    fn find_at(&self, line: usize, hash: u64, is: &impl Fn(u32) -> bool) -> Option<usize> {
        let places = self.places.get(line..line + WIDTH)?;
        let found = places.iter().position(|&place| {
            place >> 32 == hash >> 32 && place & LOWER != 0 && is(reference(place))
        })?;
        Some(line + found)
    }

    /// The indices in `places` of the two lines of a hash.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "masked to the number of lines"
    )]
    fn lines(&self, hash: u64) -> (usize, usize) {
        let one = hash as usize & self.mask;
        // The second line is independent of the first, and differs from it if there are several.
        let other = one ^ ((hash >> 29) as usize | 1) & self.mask;
        (self.first + one * WIDTH, self.first + other * WIDTH)
    }
}

impl fmt::Debug for Index {
    /// Formats the content, independent of its position in memory.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = self.places[self.first..].iter().enumerate();
        let used = places.filter(|&(_, &place)| place != 0);
        f.debug_map().entries(used).finish()
    }
}

const LOWER: u64 = 0xffff_ffff;

fn tagged(hash: u64, reference: u32) -> u64 {
    hash & !LOWER | u64::from(reference + 1)
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
const fn reference(place: u64) -> u32 {
    (place as u32).wrapping_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u32) -> u64 {
        let mut z = u64::from(n)
            .wrapping_add(1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    #[test]
    fn index_finds_inserted_references_up_to_capacity() {
        for size in [1, 2, 3, 8, 100, 1 << 16, 1 << 20] {
            let mut index = Index::new(size as usize);
            for n in 0..size {
                assert!(
                    index.insert(hash(n), n),
                    "the index refused entry {n} of {size}"
                );
            }
            for n in 0..size {
                assert_eq!(index.find(hash(n), |found| found == n), Some(n));
            }
            assert_eq!(index.find(hash(size), |_| true), None);
            for n in 0..size {
                index.remove(hash(n), n);
                assert!(!index.contains(hash(n), n));
            }
            assert!(index.places.iter().all(|&place| place == 0));
        }
    }

    #[test]
    fn index_at_capacity_accepts_insertions_after_removals() {
        let size = 1 << 14;
        let mut index = Index::new(size as usize);
        for n in 0..20 * size {
            if n >= size {
                index.remove(hash(n - size), n - size);
            }
            assert!(index.insert(hash(n), n), "the index refused entry {n}");
        }
    }

    #[test]
    fn index_of_equal_hashes_is_limited_to_two_lines_and_replaces_reference() {
        let mut index = Index::new(1000);
        let taken = (0..100).filter(|&n| index.insert(7, n)).count();
        assert_eq!(taken, PROBES);
        index.replace(7, 3, 1000);
        assert!(index.contains(7, 1000) && !index.contains(7, 3));
    }
}

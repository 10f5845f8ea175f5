//! Listing of all entries, in the order of their slots.

use alloc::vec::Vec;
use core::ops::Range;

use super::{ConnTable, PART};

/// Number of free slots whose visit takes as long as one listed entry.
const ENTRY_COST: usize = 16;

impl ConnTable {
    /// One more than the highest handle that may be in use.
    pub(crate) const fn slots_len(&self) -> usize {
        (self.slots.overflow + self.overflow.used()) as usize
    }

    pub(crate) fn is_used(&self, handle: u32) -> bool {
        if self.slots.in_place(handle) {
            let (tags, slot) = self.slots.tag_of(handle);
            // The slot of a freed entry may still be in quarantine.
            return tags.is_used(slot) && self.get(handle).word0() != 0;
        }
        (handle as usize) < self.slots_len() && self.get(handle).word0() != 0
    }

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

    /// The next entry from slot `at` on; `at` advances past it. `None` at the end
    /// ([`slots_len`](Self::slots_len)), or if the budget of slots is used up first.
    pub(crate) fn walk(&self, at: &mut usize, budget: &mut usize) -> Option<u32> {
        while *at < self.slots_len() && *budget > 0 {
            *budget -= 1;
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

    /// Entries from slot `from` on, and the slot at which the next call must continue (`None` at
    /// the end). A free slot costs one of `budget`, and an entry [`ENTRY_COST`], so that each call
    /// takes a bounded time.
    pub(crate) fn piece(&self, from: usize, budget: usize) -> (Vec<u32>, Option<usize>) {
        let (mut at, mut left) = (from, budget);
        let mut piece = Vec::new();
        while let Some(handle) = self.walk(&mut at, &mut left) {
            piece.push(handle);
            left = left.saturating_sub(ENTRY_COST - 1);
        }
        (piece, (at < self.slots_len()).then_some(at))
    }

    /// Number of slots in the regions that have entries.
    pub(crate) fn populated_len(&self) -> usize {
        self.populated().map(|region| region.len()).sum()
    }

    /// Handle of the slot number `n` among the slots of regions that have entries.
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

    /// Handles of the entries in a window of slots, numbered as for
    /// [`populated_slot`](Self::populated_slot).
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

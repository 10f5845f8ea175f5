//! Windows of slots: a search for an evictable connection visits only a few of them.

use core::ops::Range;

const WINDOW: usize = 32;

/// Number of windows into which this number of slots is divided.
pub(crate) fn windows(slots: usize) -> usize {
    slots.div_ceil(WINDOW).max(1)
}

/// At most `most` windows of slots, at equal distances from each other. The first one is window
/// number `here`.
pub(crate) fn scattered(
    here: usize,
    slots: usize,
    most: usize,
) -> impl Iterator<Item = Range<usize>> {
    let windows = windows(slots);
    let count = most.min(windows);
    (0..count).map(move |n| {
        // The windows are at equal distances, so that none is visited twice.
        let from = (here + n * windows / count) % windows * WINDOW;
        from..from + WINDOW
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visited_slot_windows_are_disjoint_and_have_at_most_128_slots() {
        for slots in [0, 1, 31, 32, 33, 127, 129, 1000, 1 << 20] {
            for here in [0, 1, windows(slots) / 2, windows(slots) - 1] {
                let mut seen: std::vec::Vec<_> = scattered(here, slots, 4).collect();
                let all: usize = seen.iter().map(Range::len).sum();
                assert!(
                    all <= 128,
                    "more than 128 of {slots} slots are visited from window {here}: {all}"
                );
                seen.sort_by_key(|window| window.start);
                let apart = seen.windows(2).all(|of| of[0].end <= of[1].start);
                assert!(
                    apart,
                    "windows overlap, from window {here} of {slots} slots: {seen:?}"
                );
                assert_eq!(seen.len(), windows(slots).min(4));
            }
        }
    }
}

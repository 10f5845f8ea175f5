//! Windows of slots, for whoever looks at a few entries of a table only.

use core::ops::Range;

/// Slots of a window.
const WINDOW: usize = 32;

/// How many windows so many slots have.
pub(crate) fn windows(slots: usize) -> usize {
    slots.div_ceil(WINDOW).max(1)
}

/// At most so many windows: `here`, and others far from it and from each other.
pub(crate) fn scattered(
    here: usize,
    slots: usize,
    most: usize,
) -> impl Iterator<Item = Range<usize>> {
    let windows = windows(slots);
    // The golden section keeps them apart.
    let step = (windows * 618 / 1000).max(1);
    (0..most.min(windows)).map(move |n| {
        let from = (here + n * step) % windows * WINDOW;
        from..from + WINDOW
    })
}

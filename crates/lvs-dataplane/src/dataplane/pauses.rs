//! Gauges of the longest time that packet workers were busy.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The longest times that packet workers were busy since the last call of
/// [`take_pauses`](super::Handle::take_pauses).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pauses {
    /// One batch of frames: received, decided on, sent.
    pub batch: Duration,
    /// Everything else between two batches, except waiting for packets: jobs of other threads,
    /// views, timers.
    pub gap: Duration,
    /// Within one of them: the wait for the lock of the control half.
    pub wait: Duration,
}

/// The maximum of some times since it was last taken.
#[derive(Debug, Default)]
pub(super) struct Longest(AtomicU64);

impl Longest {
    pub(super) fn note(&self, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        // Read first: the maximum rarely rises, and a packet worker reports many times.
        if took > self.0.load(Ordering::Relaxed) {
            self.0.fetch_max(took, Ordering::Relaxed);
        }
    }

    pub(super) fn take(&self) -> Duration {
        Duration::from_nanos(self.0.swap(0, Ordering::Relaxed))
    }
}

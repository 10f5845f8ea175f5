//! The delays and durations of checks: counted in steps of an eighth, without a lock.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Number of steps for each doubling.
const STEPS: usize = 8;
/// Number of buckets: for durations from 1 µs to more than 4 hours.
const BUCKETS: usize = 32 * STEPS;

/// Samples of times, for quantiles.
#[derive(Debug)]
pub struct Quantiles {
    buckets: Box<[AtomicU64]>,
    total_us: AtomicU64,
    longest_us: AtomicU64,
}

impl Default for Quantiles {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            total_us: AtomicU64::new(0),
            longest_us: AtomicU64::new(0),
        }
    }
}

impl Quantiles {
    /// Counts a duration.
    pub fn count(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket(us)].fetch_add(1, Relaxed);
        self.total_us.fetch_add(us, Relaxed);
        self.longest_us.fetch_max(us, Relaxed);
    }

    /// Number of samples.
    pub fn len(&self) -> u64 {
        self.buckets.iter().map(|n| n.load(Relaxed)).sum()
    }

    /// Whether no duration was counted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sum of all durations.
    pub fn total(&self) -> Duration {
        Duration::from_micros(self.total_us.load(Relaxed))
    }

    /// The longest duration.
    pub fn longest(&self) -> Duration {
        Duration::from_micros(self.longest_us.load(Relaxed))
    }

    /// The longest duration since the last call.
    pub fn take_longest(&self) -> Duration {
        Duration::from_micros(self.longest_us.swap(0, Relaxed))
    }

    /// The duration that a fraction `share` (0 to 1) of all durations did not exceed, rounded up by
    /// at most an eighth; zero if no duration was counted.
    pub fn quantile(&self, share: f64) -> Duration {
        let all = self.len();
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the count and a fraction of it"
        )]
        let wanted = ((all as f64) * share.clamp(0.0, 1.0)).ceil() as u64;
        let mut seen = 0;
        for (n, bucket) in self.buckets.iter().enumerate() {
            seen += bucket.load(Relaxed);
            if seen >= wanted.max(1) {
                return Duration::from_micros(end(n));
            }
        }
        Duration::ZERO
    }

    /// Number of samples up to `time`, an eighth more or less.
    pub fn within(&self, time: Duration) -> u64 {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let upto = self.buckets.iter().take(bucket(us) + 1);
        upto.map(|n| n.load(Relaxed)).sum()
    }
}

/// The bucket of a time.
fn bucket(us: u64) -> usize {
    if us < STEPS as u64 {
        return usize::try_from(us).unwrap_or(0);
    }
    let octave = us.ilog2() as usize;
    let step = usize::try_from(us >> (octave - 3)).unwrap_or(0) - STEPS;
    ((octave - 2) * STEPS + step).min(BUCKETS - 1)
}

/// The longest time of a bucket.
const fn end(bucket: usize) -> u64 {
    if bucket < STEPS {
        return bucket as u64;
    }
    let octave = bucket / STEPS + 2;
    ((STEPS + bucket % STEPS + 1) as u64) << (octave - 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_at_most_an_eighth_too_long() {
        let times = Quantiles::default();
        assert_eq!(times.quantile(0.99), Duration::ZERO);
        for us in 1..=10_000 {
            times.count(Duration::from_micros(us));
        }
        for (share, exact) in [(0.5, 5_000.0), (0.99, 9_900.0), (1.0, 10_000.0)] {
            let us = times.quantile(share).as_secs_f64() * 1e6;
            assert!((exact..=exact * 1.125 + 1.0).contains(&us), "{share}: {us}");
        }
        assert_eq!(times.len(), 10_000);
        assert_eq!(times.longest(), Duration::from_millis(10));
        let half = times.within(Duration::from_millis(5));
        assert!((5_000..5_700).contains(&half), "{half}");
    }

    #[test]
    fn histogram_buckets_are_contiguous() {
        for us in (0..70_000).chain([u64::MAX / 2, u64::MAX]) {
            let n = bucket(us);
            assert!(n == BUCKETS - 1 || us <= end(n), "{us}");
            assert!(n == 0 || us >= end(n - 1), "{us}");
        }
    }
}

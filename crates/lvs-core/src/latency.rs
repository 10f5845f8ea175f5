//! The response time of a server, as a peak-sensitive moving average.
//!
//! The rule is that of Finagle's `PeakEwma` load metric: a sample above the average replaces the
//! average at once, smaller samples lower it slowly, and without samples it decreases, so that a
//! server that was slow for some time is tried again.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::time::Duration;

use crate::Instant;

/// Time in nanoseconds after which an average has fallen to a half: 10 s × ln 2, because Finagle's
/// decay time is 10 s, after which it has fallen to 1/e.
const HALF_LIFE: u64 = 6_931_471_806;

/// The average time until a server's first answer to a new connection.
///
/// The fields are atomics, because every shard adds samples. One of two simultaneous samples may be
/// lost, which is harmless.
#[derive(Debug, Default)]
pub struct Latency {
    average: AtomicU64,
    stamp: AtomicU64,
}

impl Latency {
    /// The average at `now`; `None` before the first sample.
    pub fn average(&self, now: Instant) -> Option<Duration> {
        let average = self.average.load(Relaxed);
        let faded = fade(average, self.age(now));
        (average != 0).then(|| Duration::from_nanos(faded.max(1)))
    }

    /// Records an answer that arrived at `now`, after the time `took`.
    pub(crate) fn observe(&self, took: Duration, now: Instant) {
        let sample = nanos(took);
        let average = self.average.load(Relaxed);
        let kept = fade(average, self.age(now));
        let new = if sample >= average {
            sample
        } else {
            // `kept` is average × w; the sample has the weight 1 − w.
            let weight = u128::from(average - kept) * u128::from(sample) / u128::from(average);
            kept + u64::try_from(weight).unwrap_or(0)
        };
        self.store(new, now);
    }

    /// Records that an answer has not arrived within `waited`: raises the average to `waited` if it
    /// is lower.
    pub(crate) fn observe_at_least(&self, waited: Duration, now: Instant) {
        if nanos(waited) > fade(self.average.load(Relaxed), self.age(now)) {
            self.store(nanos(waited), now);
        }
    }

    fn store(&self, average: u64, now: Instant) {
        self.average.store(average.max(1), Relaxed);
        self.stamp.store(now.as_nanos(), Relaxed);
    }

    fn age(&self, now: Instant) -> u64 {
        now.as_nanos().saturating_sub(self.stamp.load(Relaxed))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// `value` × 2^(−age / half-life), within 1/1000, in integer arithmetic: the same on every machine.
fn fade(value: u64, age: u64) -> u64 {
    let halves = age / HALF_LIFE;
    if halves >= 64 {
        return 0;
    }
    // 2^−f for f in 0..1 is approximately 1 − 0.67157 f + 0.17157 f², which is exact at 0, 1/2 and
    // 1.
    let f = u128::from(age % HALF_LIFE) * 65_536 / u128::from(HALF_LIFE);
    let factor = 65_536 - ((44_012 * f) >> 16) + ((11_244 * f * f) >> 32);
    u64::try_from((u128::from(value >> halves) * factor) >> 16).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(seconds: u64) -> Instant {
        Instant::from_secs(seconds)
    }

    #[test]
    fn latency_average_halves_in_each_half_life() {
        for (age, expected) in [
            (0, 1_000_000),
            (HALF_LIFE / 2, 707_107),
            (HALF_LIFE, 500_000),
            (HALF_LIFE * 3, 125_000),
            (HALF_LIFE * 70, 0),
        ] {
            let faded = fade(1_000_000, age);
            assert!(
                faded.abs_diff(expected) <= 500,
                "the average is {faded} instead of {expected} after {age} ns"
            );
        }
        let values: std::vec::Vec<u64> = (0..200)
            .map(|n| fade(u64::MAX / 3, n * HALF_LIFE / 50))
            .collect();
        assert!(
            values.is_sorted_by(|a, b| a > b),
            "the average does not fall with its age"
        );
    }

    #[test]
    fn latency_peak_counts_at_once_and_fades_slowly() {
        let latency = Latency::default();
        assert_eq!(latency.average(at(0)), None);
        latency.observe(MS, at(0));
        latency.observe(MS * 50, at(1));
        assert_eq!(latency.average(at(1)), Some(MS * 50));
        latency.observe(MS, at(2));
        let after = latency.average(at(2)).unwrap();
        assert!((MS * 44..MS * 47).contains(&after), "{after:?}");
        for second in 3..60 {
            latency.observe(MS, at(second));
        }
        let settled = latency.average(at(60)).unwrap();
        assert!(settled < MS * 2, "{settled:?}");
        assert!(
            latency.average(at(600)).unwrap() < MS / 1000,
            "the average has not faded after ten minutes"
        );
    }

    #[test]
    fn latency_lower_bound_only_raises_average() {
        let latency = Latency::default();
        latency.observe(MS * 10, at(0));
        latency.observe_at_least(MS, at(0));
        assert_eq!(latency.average(at(0)), Some(MS * 10));
        latency.observe_at_least(MS * 1000, at(1));
        assert_eq!(latency.average(at(1)), Some(MS * 1000));
    }
}

//! The daemon's own counters since its start.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use lvs_sys::lock;

/// Upper bounds of the histogram's buckets in seconds; a further bucket has no bound.
pub const BOUNDS: [f64; 13] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// Histogram of durations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Number of durations in each bucket of [`BOUNDS`], and above the last bound.
    pub classes: [u64; BOUNDS.len() + 1],
    /// The sum of all durations, in microseconds.
    pub sum_us: u64,
}

impl Times {
    pub(crate) fn count(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let class = BOUNDS.iter().position(|bound| seconds <= *bound);
        self.classes[class.unwrap_or(BOUNDS.len())] += 1;
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.sum_us = self.sum_us.saturating_add(us);
    }
}

/// Counts of the checks of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckCounts {
    /// Durations of the checks.
    pub times: Times,
    /// The number of successful checks.
    pub good: u64,
    /// The number of failed checks.
    pub failed: u64,
    /// The number of checks that this host could not make.
    pub not_made: u64,
}

/// All counters of the daemon since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of reloads in which lvsd has loaded the configuration, without the load at its start.
    pub reloads: u64,
    /// Number of reloads in which lvsd has refused the configuration.
    pub reloads_refused: u64,
    /// Number of times that a server came up.
    pub ups: u64,
    /// Number of times that a server went down.
    pub downs: u64,
    /// Number of manual changes in the dataplane that lvsd has detected.
    pub drift: u64,
    /// Number of times that another dataplane replaced the previous one.
    pub dataplane_restarts: u64,
    /// Counters of the checks, by kind.
    pub checks: BTreeMap<String, CheckCounts>,
    /// Delays of checks after the time at which they were due.
    pub lag: Times,
    /// Number of checks that lvsd made at once because clients received no answer (`passive`).
    pub prompted: u64,
    /// Numbers of HTTP responses by their status code.
    pub http: BTreeMap<u16, u64>,
    /// Number of HTTP connections and event streams that were refused because a limit was reached.
    pub http_no_place: u64,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckOutcome {
    /// The check succeeded.
    Good,
    /// The check failed.
    Failed,
    /// The host could not make the check.
    NotMade,
}

/// The counters, which several threads increase.
#[derive(Debug, Default)]
pub struct Counters(Mutex<Counts>);

impl Counters {
    /// The present values of all counters.
    pub fn get(&self) -> Counts {
        self.counts().clone()
    }

    /// Counts a check of this kind, with its duration and its outcome.
    pub fn check(&self, kind: &str, time: Duration, outcome: CheckOutcome) {
        let mut counts = self.counts();
        let check = match counts.checks.get_mut(kind) {
            Some(check) => check,
            None => counts.checks.entry(kind.to_owned()).or_default(),
        };
        check.times.count(time);
        match outcome {
            CheckOutcome::Good => check.good += 1,
            CheckOutcome::Failed => check.failed += 1,
            CheckOutcome::NotMade => check.not_made += 1,
        }
    }

    /// Counts the delay from a check's due time to its start.
    pub fn waited(&self, time: Duration) {
        self.counts().lag.count(time);
    }

    /// Counts a check that lvsd made at once because clients received no answer.
    pub fn prompted(&self) {
        self.counts().prompted += 1;
    }

    /// Counts a reload in which lvsd has loaded (`taken`) or refused the configuration.
    pub fn reload(&self, taken: bool) {
        let mut counts = self.counts();
        match taken {
            true => counts.reloads += 1,
            false => counts.reloads_refused += 1,
        }
    }

    /// Counts a server that went up or down.
    pub fn change(&self, up: bool) {
        let mut counts = self.counts();
        match up {
            true => counts.ups += 1,
            false => counts.downs += 1,
        }
    }

    /// Counts a manual change.
    pub fn drift(&self) {
        self.counts().drift += 1;
    }

    /// Counts a dataplane that replaces the previous one.
    pub fn dataplane_restart(&self) {
        self.counts().dataplane_restarts += 1;
    }

    /// Counts an HTTP response.
    pub fn http(&self, code: u16) {
        *self.counts().http.entry(code).or_default() += 1;
    }

    /// Counts an HTTP connection or an event stream that was refused because a limit was reached.
    pub fn no_place(&self) {
        self.counts().http_no_place += 1;
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_counted_by_outcome_and_duration() {
        let counters = Counters::default();
        counters.check("tcp", Duration::from_millis(3), CheckOutcome::Good);
        counters.check("tcp", Duration::from_secs(60), CheckOutcome::Failed);
        let tcp = &counters.get().checks["tcp"];
        assert_eq!((tcp.good, tcp.failed, tcp.not_made), (1, 1, 0));
        assert_eq!(tcp.times.classes[2], 1);
        assert_eq!(tcp.times.classes[BOUNDS.len()], 1);
        assert_eq!(tcp.times.sum_us, 60_003_000);
    }
}

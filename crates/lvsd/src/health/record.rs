//! The statistics of a check: its durations, and the failures and downtime of its server. Their
//! size does not grow with time.

use std::time::Duration;

use lvs_api::daemon::CheckStatus;
use tokio::time::Instant;

use super::Reason;
use crate::counters::Times;

/// Number of classes of durations: four for each doubling, from 64 µs to 67 s.
const CLASSES: usize = 80;
/// Binary logarithm of the shortest class in microseconds.
const SHORTEST: u32 = 6;
/// A check that takes at least this time is slow.
const SLOW: Duration = Duration::from_millis(500);
const MINUTE: u64 = 60;
/// Length of `Record::minutes`.
const MINUTES: u64 = 5;
const HOUR: u64 = 3600;
/// Length of `Record::hours`.
const DAY: u64 = 24;

/// The statistics of a check and its server.
#[derive(Debug)]
pub(super) struct Record {
    /// The reason why the check uses the server's own address instead of the path of clients; empty
    /// if it does not.
    own_address: String,
    /// The reason why the last checks on the path of clients failed, although the server's own
    /// address answers.
    client_path: Option<Reason>,
    begun: Instant,
    last: Duration,
    /// Number of the most recent checks that all took [`SLOW`] or longer; 0 if the last check was
    /// faster.
    slow: u64,
    all: Times,
    /// The last minutes. The index of each is its number modulo 5.
    minutes: [Minute; 5],
    /// The last hours. The index of each is its number modulo 24.
    hours: [Hour; 24],
    /// Time until which downtime has been counted, in seconds after `begun`.
    counted: u64,
    is_down: bool,
    /// Time at which the server last went down, in seconds after `begun`; `None` if it never did.
    last_fall: Option<u64>,
    /// The reason why the server last went down.
    fall_reason: String,
    falls: u64,
    down: u64,
}

/// Durations of the checks that ended in a minute.
#[derive(Clone, Copy, Debug)]
struct Minute {
    number: u64,
    classes: [u16; CLASSES],
}

/// Number of times that the server went down in an hour, and its downtime in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Hour {
    number: u64,
    falls: u64,
    down: u64,
}

impl Record {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            own_address: String::new(),
            client_path: None,
            begun: now,
            last: Duration::ZERO,
            slow: 0,
            all: Times::default(),
            minutes: [Minute {
                number: 0,
                classes: [0; CLASSES],
            }; 5],
            hours: [Hour::default(); 24],
            counted: 0,
            is_down: false,
            last_fall: None,
            fall_reason: String::new(),
            falls: 0,
            down: 0,
        }
    }

    /// Counts a check and its duration.
    pub(super) fn count_check(&mut self, time: Duration, now: Instant) {
        self.last = time;
        self.slow = if time < SLOW { 0 } else { self.slow + 1 };
        self.all.count(time);
        let number = self.second(now) / MINUTE;
        let minute = &mut self.minutes[place(number, MINUTES)];
        if minute.number != number {
            *minute = Minute {
                number,
                classes: [0; CLASSES],
            };
        }
        let class = &mut minute.classes[class(time)];
        *class = class.saturating_add(1);
    }

    /// Counts that the server went up or down. `fall`: the reason, if the server was up before.
    pub(super) fn transition(&mut self, up: bool, fall: Option<&str>, now: Instant) {
        self.count_downtime(now);
        self.is_down = !up;
        if let Some(reason) = fall {
            reason.clone_into(&mut self.fall_reason);
            self.falls += 1;
            self.last_fall = Some(self.counted);
            self.hour(self.counted / HOUR).falls += 1;
        }
    }

    /// The histogram of the durations of all checks.
    pub(super) fn times(&self) -> Times {
        self.all.clone()
    }

    /// Sets the reason why the check uses the server's own address, or an empty text. Returns
    /// whether it differs from the previous reason.
    pub(super) fn set_own_address(&mut self, reason: &str) -> bool {
        let differs = self.own_address != reason;
        if differs {
            reason.clone_into(&mut self.own_address);
        }
        differs
    }

    pub(super) fn set_client_path(&mut self, reason: Option<Reason>) {
        self.client_path = reason;
    }

    pub(super) fn client_path(&self) -> Option<Reason> {
        self.client_path.clone()
    }

    /// Summarises the statistics for the status; `None` before the first check.
    pub(super) fn status(&mut self, now: Instant) -> Option<CheckStatus> {
        if self.all == Times::default() {
            return None;
        }
        self.count_downtime(now);
        let second = self.second(now);
        let minutes = self.minutes.iter();
        let recent: Vec<_> = minutes
            .filter(|minute| minute.number + MINUTES > second / MINUTE)
            .collect();
        let hours = self.hours.iter();
        let (falls, down) = hours
            .filter(|hour| hour.number + DAY > second / HOUR)
            .fold((0, 0), |(falls, down), hour| {
                (falls + hour.falls, down + hour.down)
            });
        Some(CheckStatus {
            own_address: self.own_address.clone(),
            last_us: micros(self.last),
            p50_us: quantile(&recent, 50),
            p99_us: quantile(&recent, 99),
            slow_in_a_row: self.slow,
            falls_in_day: falls,
            down_seconds_in_day: down,
            since_fall: self.last_fall.map(|fall| second.saturating_sub(fall)),
            fall_reason: self.fall_reason.clone(),
            falls: self.falls,
            down_seconds: self.down,
        })
    }

    fn second(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.begun).as_secs()
    }

    fn hour(&mut self, number: u64) -> &mut Hour {
        let hour = &mut self.hours[place(number, DAY)];
        if hour.number != number {
            *hour = Hour {
                number,
                ..Hour::default()
            };
        }
        hour
    }

    /// Adds the downtime until `now` to the total, and its part in the last 24 hours to these
    /// hours.
    fn count_downtime(&mut self, now: Instant) {
        let now = self.second(now);
        if !self.is_down {
            self.counted = self.counted.max(now);
            return;
        }
        self.down += now.saturating_sub(self.counted);
        // No hour contains older downtime.
        self.counted = self.counted.max(now.saturating_sub(DAY * HOUR));
        while self.counted < now {
            let number = self.counted / HOUR;
            let end = ((number + 1) * HOUR).min(now);
            self.hour(number).down += end - self.counted;
            self.counted = end;
        }
    }
}

/// The index of a number in a ring.
fn place(number: u64, count: u64) -> usize {
    usize::try_from(number % count).unwrap_or(0)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The index of the histogram class of a duration.
fn class(time: Duration) -> usize {
    let us = micros(time).max(1 << SHORTEST);
    let octave = us.ilog2();
    let quarter = (us >> (octave - 2)) & 3;
    let class = u64::from(octave - SHORTEST) * 4 + quarter;
    usize::try_from(class).map_or(CLASSES - 1, |class| class.min(CLASSES - 1))
}

/// The upper limit of a class in microseconds.
fn end(class: usize) -> u64 {
    let class = class as u64;
    let octave = class / 4 + u64::from(SHORTEST);
    (5 + class % 4) << (octave - 2)
}

/// A percentile of the durations: the upper limit of its class in microseconds; 0 without checks.
fn quantile(minutes: &[&Minute], percent: u64) -> u64 {
    let count = |class: usize| -> u64 {
        let minutes = minutes.iter();
        minutes.map(|minute| u64::from(minute.classes[class])).sum()
    };
    let all: u64 = (0..CLASSES).map(count).sum();
    let wanted = (all * percent).div_ceil(100);
    let mut seen = 0;
    for class in 0..CLASSES {
        seen += count(class);
        if seen > 0 && seen >= wanted {
            return end(class);
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_class_end_exceeds_the_duration_by_at_most_a_quarter() {
        for us in [64, 65, 79, 80, 100, 1_000, 12_345, 999_999, 60_000_000] {
            let end = end(class(Duration::from_micros(us)));
            assert!(us < end && end <= us + us / 4 + 1, "{us}: {end}");
        }
        assert_eq!(class(Duration::ZERO), 0);
        assert_eq!(class(Duration::MAX), CLASSES - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn check_durations_older_than_five_minutes_do_not_count_in_percentiles() {
        let begun = Instant::now();
        let mut record = Record::new(begun);
        assert_eq!(record.status(begun), None);
        for second in 0..100 {
            let ms = if second < 95 { 1 } else { 700 };
            let now = begun + Duration::from_secs(second);
            record.count_check(Duration::from_millis(ms), now);
        }
        let now = begun + Duration::from_secs(100);
        let status = record.status(now).expect("checks were counted");
        assert_eq!(status.last_us, 700_000);
        assert!((1_000..1_300).contains(&status.p50_us), "{status:?}");
        assert!((700_000..900_000).contains(&status.p99_us), "{status:?}");
        let later = record.status(begun + Duration::from_secs(500));
        let later = later.expect("checks were counted");
        assert_eq!((later.p50_us, later.p99_us), (0, 0));
        assert_eq!(record.times().classes.iter().sum::<u64>(), 100);
    }

    #[tokio::test(start_paused = true)]
    async fn falls_and_downtime_older_than_a_day_count_in_totals_only() {
        let begun = Instant::now();
        let mut record = Record::new(begun);
        record.count_check(Duration::from_millis(1), begun);
        let at = |seconds| begun + Duration::from_secs(seconds);
        record.transition(true, None, at(1));
        for fall in 0..3 {
            record.transition(false, Some("refused"), at(100 + 1000 * fall));
            record.transition(true, None, at(114 + 1000 * fall));
        }
        record.transition(false, Some("refused"), at(HOUR - 10));
        let status = record
            .status(at(HOUR + 20))
            .expect("the server was checked");
        assert_eq!((status.falls_in_day, status.down_seconds_in_day), (4, 72));
        assert_eq!(status.since_fall, Some(30));
        assert_eq!(status.fall_reason, "refused");
        // The first hour is over.
        let status = record
            .status(at(24 * HOUR + 20))
            .expect("the server was checked");
        assert_eq!(status.falls_in_day, 0);
        assert_eq!(status.down_seconds_in_day, 23 * HOUR + 20);
        assert_eq!(
            (status.falls, status.down_seconds),
            (4, 42 + 23 * HOUR + 30)
        );
        // The status was not requested for two years.
        let status = record
            .status(at(20_000 * HOUR))
            .expect("the server was checked");
        assert_eq!(status.down_seconds_in_day, 23 * HOUR);
    }
}

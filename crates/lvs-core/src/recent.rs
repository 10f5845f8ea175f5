//! Counts of packets over the last minutes, and the times of the first and the last packet.

use alloc::vec::Vec;
use core::time::Duration;

use crate::Instant;

const SLOT: u64 = 10_000_000_000;
const MINUTE: usize = 6;
const SLOTS: usize = 30;
/// After this time without a packet, the next packet is the first of a new series.
const PAUSE: Duration = Duration::from_secs(300);

/// A counter of packets: of all packets, and of the packets in each ten-second slot of the last
/// five minutes.
#[derive(Clone, Debug, Default)]
pub struct RecentCounter {
    count: u64,
    /// The number of the latest slot with a packet; slot 0 begins at time 0 of the clock.
    latest: u64,
    /// Numbers of packets in the slots up to the latest one, each at the slot's number modulo the
    /// number of slots.
    slots: [u32; SLOTS],
    first: Instant,
    last: Instant,
}

/// The content of a [`RecentCounter`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default))]
pub struct RecentCount {
    /// Number of packets since the counter was created.
    pub count: u64,
    /// Number of packets in the last five minutes, or up to ten seconds less.
    pub recent: u64,
    /// Number of packets in the last minute, or up to ten seconds less.
    pub last_minute: u64,
    /// Seconds since the first packet of the present series; `None` if `recent` is 0. A series ends
    /// after five minutes without a packet.
    #[cfg_attr(feature = "api", serde(skip_serializing_if = "Option::is_none"))]
    pub since: Option<u64>,
    /// Seconds since the last packet; `None` before the first one.
    #[cfg_attr(feature = "api", serde(skip_serializing_if = "Option::is_none"))]
    pub ago: Option<u64>,
}

impl RecentCounter {
    /// Counts `packets` at `now`.
    pub fn add(&mut self, packets: u64, now: Instant) {
        if packets == 0 {
            return;
        }
        if self.count == 0 || now - self.last >= PAUSE {
            self.first = now;
        }
        let slot = number(now);
        for passed in (self.latest + 1..=slot).take(SLOTS) {
            self.slots[place(passed)] = 0;
        }
        self.latest = self.latest.max(slot);
        let latest = &mut self.slots[place(self.latest)];
        *latest = latest.saturating_add(u32::try_from(packets).unwrap_or(u32::MAX));
        self.count += packets;
        self.last = self.last.max(now);
    }

    /// Number of all packets so far.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The counts and times at `now`.
    pub fn at(&self, now: Instant) -> RecentCount {
        let slot = number(now).max(self.latest);
        let sum = |slots: usize| -> u64 {
            let numbers = (0..slots as u64).filter_map(|back| slot.checked_sub(back));
            numbers
                .filter(|&number| number <= self.latest && number + SLOTS as u64 > self.latest)
                .map(|number| u64::from(self.slots[place(number)]))
                .sum()
        };
        let recent = sum(SLOTS);
        RecentCount {
            count: self.count,
            recent,
            last_minute: sum(MINUTE),
            since: (recent > 0).then(|| (now - self.first).as_secs()),
            ago: (self.count > 0).then(|| (now - self.last).as_secs()),
        }
    }
}

/// Counters of packets by reason.
#[derive(Clone, Debug, Default)]
pub struct ReasonCounters(Vec<(&'static str, RecentCounter)>);

impl ReasonCounters {
    /// Counts `packets` for a reason at `now`.
    pub fn add(&mut self, reason: &'static str, packets: u64, now: Instant) {
        let known = self.0.iter().position(|(known, _)| *known == reason);
        let place = known.unwrap_or_else(|| {
            self.0.push((reason, RecentCounter::default()));
            self.0.len() - 1
        });
        self.0[place].1.add(packets, now);
    }

    /// Number of all packets, of all reasons.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|(_, one)| one.count()).sum()
    }

    /// The counts and times at `now`, by reason.
    pub fn at(&self, now: Instant) -> impl Iterator<Item = (&'static str, RecentCount)> + '_ {
        let counters = self.0.iter();
        counters.map(move |(reason, counter)| (*reason, counter.at(now)))
    }
}

const fn number(now: Instant) -> u64 {
    now.as_nanos() / SLOT
}

#[expect(clippy::cast_possible_truncation, reason = "less than the slots")]
const fn place(slot: u64) -> usize {
    (slot % SLOTS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Instant {
        Instant::from_secs(seconds)
    }

    #[test]
    fn recent_counter_excludes_packets_older_than_one_and_five_minutes() {
        let mut counter = RecentCounter::default();
        assert_eq!(counter.at(at(7)), RecentCount::default());
        counter.add(7, at(1000));
        counter.add(0, at(1070));
        let shown = |seconds| {
            let shown = counter.at(at(seconds));
            (shown.recent, shown.last_minute, shown.since, shown.ago)
        };
        assert_eq!(shown(1009), (7, 7, Some(9), Some(9)));
        assert_eq!(shown(1059), (7, 7, Some(59), Some(59)));
        assert_eq!(shown(1060), (7, 0, Some(60), Some(60)));
        assert_eq!(shown(1299), (7, 0, Some(299), Some(299)));
        assert_eq!(shown(1300), (0, 0, None, Some(300)));
        assert_eq!(counter.at(at(9000)).count, 7);
    }

    #[test]
    fn recent_counter_reports_first_time_and_counts_of_steady_packets() {
        let mut counter = RecentCounter::default();
        for second in 5..=1000 {
            counter.add(2, at(second));
        }
        let shown = counter.at(at(1003));
        assert_eq!((shown.since, shown.ago), (Some(998), Some(3)));
        assert_eq!((shown.last_minute, shown.recent), (102, 582));
    }

    #[test]
    fn packet_after_five_minutes_without_packets_begins_new_series() {
        let mut counter = RecentCounter::default();
        counter.add(1, at(10));
        counter.add(1, at(309));
        assert_eq!(counter.at(at(310)).since, Some(300));
        for pause in [300, 10_000, 1 << 30] {
            let begin = at(309 + pause);
            counter.add(1, begin);
            let shown = counter.at(begin + Duration::from_secs(5));
            assert_eq!((shown.since, shown.recent), (Some(5), 1), "{pause}");
            counter = RecentCounter::default();
            counter.add(1, at(309));
        }
    }

    #[test]
    fn recent_counter_counts_earlier_time_as_time_of_latest_packet() {
        let mut counter = RecentCounter::default();
        counter.add(1, at(100));
        counter.add(1, at(89));
        let shown = counter.at(at(50));
        assert_eq!((shown.recent, shown.last_minute), (2, 2));
        assert_eq!((shown.since, shown.ago), (Some(0), Some(0)));
    }
}

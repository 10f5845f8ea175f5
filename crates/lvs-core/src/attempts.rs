//! Counts of the connections that clients opened to a server, and of the connections that the
//! server never answered.
//!
//! A server can pass its health check while its clients get no answer: because the virtual address
//! is missing on its loopback interface, because its default gateway is another host, or because a
//! filter drops the packets. These counts reveal such a server.

use core::ops::{Add, Sub};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Connections that clients opened to a server: over TCP, and over UDP to a UDP service with NAT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default))]
pub struct Attempts {
    /// Number of TCP connections that began with a SYN, and of UDP connections. A UDP connection is
    /// counted as soon as it is answered or unanswered. If the client has sent 16 packets before,
    /// it is not counted: such a client does not wait for answers.
    pub opened: u64,
    /// Number of connections without an answer. TCP with NAT: the client has repeated its SYN
    /// twice, or the connection has expired, and the server has sent nothing. TCP with direct
    /// routing and tunnels, where answers do not pass the director: the client has repeated its SYN
    /// twice, or once until the connection expired. UDP: the client has sent again after a pause of
    /// two seconds or more, and the server has sent nothing.
    pub unanswered: u64,
}

impl Add for Attempts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            opened: self.opened.wrapping_add(other.opened),
            unanswered: self.unanswered.wrapping_add(other.unanswered),
        }
    }
}

impl Sub for Attempts {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            opened: self.opened.wrapping_sub(other.opened),
            unanswered: self.unanswered.wrapping_sub(other.unanswered),
        }
    }
}

impl Attempts {
    /// Minimum number of unanswered connections for which a server is suspicious; fewer may be
    /// chance.
    const FEW: u64 = 3;

    /// Whether three or more connections are unanswered, and these are at least half of all.
    fn are_mostly_unanswered(self) -> bool {
        self.unanswered >= Self::FEW && u128::from(self.unanswered) * 2 >= self.opened.into()
    }

    /// Whether three or more connections are unanswered, and their share of all connections is at
    /// least a tenth and at least four times the share in `usual`.
    fn exceed(self, usual: Self) -> bool {
        let Self { opened, unanswered } = self;
        // A connection may have been opened before the counted interval.
        let opened = opened.max(unanswered);
        let [opened, unanswered] = [opened, unanswered].map(u128::from);
        unanswered >= Self::FEW.into()
            && unanswered * 10 >= opened
            && unanswered.saturating_mul(usual.opened.into())
                >= opened.saturating_mul(4 * u128::from(usual.unanswered))
    }

    /// Whether more than half of the connections, and at least one, were answered.
    fn are_mostly_answered(self) -> bool {
        self.unanswered < self.opened.div_ceil(2)
    }
}

/// [`Attempts`] in total, and over recent periods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default))]
pub struct RecentAttempts {
    /// Attempts since the server was first added to its service. A removed server that is added
    /// again continues its counters while its record exists, as in the kernel.
    pub total: Attempts,
    /// Attempts in the last 10 s, as of the latest two-second tick.
    pub last_10_seconds: Attempts,
    /// Attempts in the last minute, or up to 10 s less.
    pub last_minute: Attempts,
    /// Attempts in the last 5 to 6 minutes.
    pub last_5_minutes: Attempts,
    /// Attempts until five minutes ago, without the minutes in which the server was broken: most
    /// attempts were unanswered, or more than usual.
    pub usual: Attempts,
}

impl RecentAttempts {
    /// Whether no attempt was counted.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the server itself is the cause of its unanswered attempts in the last minute.
    /// `others` are the attempts to all other servers of its service in the last minute.
    ///
    /// A flood of SYNs or a scan reaches all servers of a service alike. So a server is suspicious
    /// only if at least three of its connections are unanswered, and these are half of all or more,
    /// or a tenth or more and four times the usual share. This is the share of the other servers
    /// or, if these have few clients or do not answer either, the server's own
    /// [usual](Self::usual) share.
    ///
    /// `one_way` means that the service's protocol may have no answers (UDP). Then the server is
    /// suspicious only if its share exceeds the usual one, and most of the usual attempts were
    /// answered.
    pub fn is_suspicious(&self, others: Attempts, one_way: bool) -> bool {
        let minute = self.last_minute;
        let is_enough = others.opened.saturating_mul(10) >= minute.opened;
        let usual = match is_enough && others.are_mostly_answered() {
            true => others,
            false => self.usual,
        };
        if one_way {
            usual.are_mostly_answered() && minute.exceed(usual)
        } else {
            minute.are_mostly_unanswered() || minute.exceed(usual)
        }
    }
}

/// Counters of one server. Several shards increase them at the same time.
#[derive(Debug, Default)]
pub(crate) struct AttemptCounters {
    opened: AtomicU64,
    unanswered: AtomicU64,
}

impl AttemptCounters {
    pub(crate) fn count_opened(&self) {
        self.opened.fetch_add(1, Relaxed);
    }

    /// Counts a UDP connection without an answer, both as opened and as unanswered: it was not
    /// counted as opened before.
    pub(crate) fn count_unanswered_datagram(&self) {
        self.count_opened();
        self.count_unanswered();
    }

    pub(crate) fn count_unanswered(&self) {
        self.unanswered.fetch_add(1, Relaxed);
    }

    pub(crate) fn total(&self) -> Attempts {
        Attempts {
            opened: self.opened.load(Relaxed),
            unanswered: self.unanswered.load(Relaxed),
        }
    }
}

/// Number of estimator ticks, of two seconds each, in ten seconds.
const TICKS: usize = 5;
/// Number of ten-second periods in a minute.
const TENS: usize = 6;
const MINUTES: usize = 5;

/// For the last five minutes: the attempts in each tick of the last ten seconds, in each ten
/// seconds of the last minute, and in each minute.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    /// The counters at the time when the server was added to its service.
    first: Attempts,
    /// The counters at the last tick.
    last: Attempts,
    /// Number of ticks so far, modulo the number of ticks in five minutes.
    ticks: usize,
    by_tick: [Attempts; TICKS],
    by_ten: [Attempts; TENS],
    by_minute: [Attempts; MINUTES],
    /// [`RecentAttempts::usual`].
    usual: Attempts,
}

impl Windows {
    pub(crate) fn new(first: Attempts) -> Self {
        Self {
            first,
            last: first,
            ..Self::default()
        }
    }

    /// Stores the attempts since the previous tick, two seconds ago, and, when ten seconds or a
    /// minute are complete, the sum of their ticks. A minute that is then older than five minutes
    /// is added to the usual attempts, unless the server was broken in it.
    pub(crate) fn tick(&mut self, total: Attempts) {
        let tick = self.ticks;
        self.by_tick[tick % TICKS] = total - self.last;
        self.last = total;
        self.ticks = (tick + 1) % (TICKS * TENS * MINUTES);
        if self.ticks.is_multiple_of(TICKS) {
            self.by_ten[tick / TICKS % TENS] = sum(&self.by_tick);
        }
        if self.ticks.is_multiple_of(TICKS * TENS) {
            let minute = &mut self.by_minute[tick / TICKS / TENS];
            let oldest = core::mem::replace(minute, sum(&self.by_ten));
            let is_first = self.usual.opened == 0;
            if oldest.are_mostly_answered() && (is_first || !oldest.exceed(self.usual)) {
                self.usual = self.usual + oldest;
            }
        }
    }

    pub(crate) fn recent(&self, total: Attempts) -> RecentAttempts {
        let current_ten = sum(&self.by_tick[..self.ticks % TICKS]);
        let oldest_ten = self.by_ten[self.ticks / TICKS % TENS];
        let current_minute = sum(&self.by_ten[..self.ticks / TICKS % TENS]) + current_ten;
        RecentAttempts {
            total: total - self.first,
            last_10_seconds: sum(&self.by_tick),
            last_minute: sum(&self.by_ten) - oldest_ten + current_ten,
            last_5_minutes: sum(&self.by_minute) + current_minute,
            usual: self.usual,
        }
    }
}

fn sum(attempts: &[Attempts]) -> Attempts {
    attempts
        .iter()
        .fold(Attempts::default(), |all, &one| all + one)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempts(opened: u64, unanswered: u64) -> Attempts {
        Attempts { opened, unanswered }
    }

    #[test]
    fn recent_attempts_of_burst_become_zero_after_each_period() {
        let mut windows = Windows::default();
        let total = attempts(20, 7);
        let mut seen = [0; 3];
        for tick in 1..=400 {
            windows.tick(total);
            let recent = windows.recent(total);
            assert_eq!(recent.total, total);
            let spans = [
                recent.last_10_seconds,
                recent.last_minute,
                recent.last_5_minutes,
            ];
            for (seen, span) in seen.iter_mut().zip(spans) {
                if span == total {
                    *seen = tick;
                } else {
                    assert_eq!(
                        span,
                        Attempts::default(),
                        "a recent period contains only a part of the attempts of one moment"
                    );
                }
            }
        }
        assert_eq!(seen[0] * 2, 10);
        assert!((50..=60).contains(&(seen[1] * 2)), "{seen:?}");
        assert!((300..=360).contains(&(seen[2] * 2)), "{seen:?}");
    }

    #[test]
    fn recent_attempts_cover_last_10_seconds_1_minute_and_5_minutes() {
        let mut windows = Windows::default();
        for tick in 1..=1_000 {
            windows.tick(attempts(10 * tick, tick));
        }
        let recent = windows.recent(attempts(10_000, 1_000));
        assert_eq!(recent.last_10_seconds, attempts(50, 5));
        assert!((250..=300).contains(&recent.last_minute.opened));
        assert!((1_500..=1_800).contains(&recent.last_5_minutes.opened));
    }

    /// The attempts of a server with these usual attempts, and `minute` in the last minute.
    fn recent(usual: Attempts, minute: Attempts) -> RecentAttempts {
        RecentAttempts {
            last_minute: minute,
            usual,
            ..RecentAttempts::default()
        }
    }

    #[test]
    fn usual_attempts_exclude_minutes_of_outage() {
        let mut windows = Windows::default();
        let mut total = Attempts::default();
        let mut minute = |unanswered| {
            for _ in 0..TICKS * TENS {
                total = total + attempts(10, unanswered);
                windows.tick(total);
            }
            windows.recent(total)
        };
        let before = (0..20).map(|_| minute(0)).last().unwrap();
        assert_eq!(before.usual, attempts(15 * 300, 0));
        // Far longer than the good time before it.
        for unanswered in [10, 2] {
            let after = (0..200).map(|_| minute(unanswered)).last().unwrap();
            assert_eq!(after.usual, attempts(20 * 300, 0));
            assert!(after.is_suspicious(Attempts::default(), true));
        }
        let healed = minute(0);
        assert!(!healed.is_suspicious(Attempts::default(), true));
    }

    #[test]
    fn server_is_suspicious_if_half_or_four_times_share_of_others_is_unanswered() {
        let is_suspicious =
            |own, others| recent(Attempts::default(), own).is_suspicious(others, false);
        let good = attempts(1_000, 0);
        assert!(is_suspicious(attempts(3, 3), good));
        assert!(is_suspicious(attempts(100, 12), good));
        assert!(
            is_suspicious(attempts(0, 5), good),
            "a server with 5 unanswered attempts is not suspicious"
        );
        assert!(
            !is_suspicious(attempts(2, 2), good),
            "two unanswered attempts make a server suspicious"
        );
        assert!(
            !is_suspicious(attempts(1_000, 30), good),
            "30 unanswered attempts of 1,000 make a server suspicious"
        );
        // A flood affects all servers alike.
        assert!(!is_suspicious(attempts(1_000, 300), attempts(3_000, 900)));
        let quarter = attempts(u64::MAX, u64::MAX / 4);
        assert!(!is_suspicious(quarter, quarter));
        // All servers are broken, or there is no other server.
        assert!(is_suspicious(attempts(10, 10), attempts(30, 30)));
        assert!(is_suspicious(attempts(10, 10), Attempts::default()));
        assert!(!is_suspicious(attempts(0, 0), Attempts::default()));
    }

    #[test]
    fn only_server_is_suspicious_if_its_unanswered_share_exceeds_its_past_share() {
        let is_suspicious =
            |past, minute| recent(past, minute).is_suspicious(Attempts::default(), false);
        let minute = attempts(100, 15);
        assert!(is_suspicious(attempts(10_000, 20), minute));
        assert!(
            !is_suspicious(attempts(10_000, 1_200), minute),
            "a server that always had clients behind a lossy network is suspicious"
        );
        assert!(is_suspicious(attempts(10_000, 1_200), attempts(100, 50)));
    }

    #[test]
    fn server_of_one_way_protocol_is_suspicious_only_if_clients_mostly_got_answers() {
        let none = Attempts::default();
        let silent = attempts(100, 100);
        for others in [none, silent] {
            assert!(!recent(silent, silent).is_suspicious(others, true));
            assert!(!recent(none, silent).is_suspicious(others, true));
        }
        // Clients get answers from the other servers, or got answers from this one.
        assert!(recent(none, silent).is_suspicious(attempts(100, 1), true));
        assert!(recent(attempts(100, 1), silent).is_suspicious(none, true));
        assert!(recent(attempts(100, 1), silent).is_suspicious(silent, true));
    }
}

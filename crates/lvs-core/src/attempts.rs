//! Counts of the connections that clients opened to a server, and of those that the server never
//! answered.
//!
//! A server can pass its health check while its clients get no answer: because the virtual address
//! is missing on its loopback interface, because its default gateway is another host, or because a
//! filter drops the packets. These counts reveal such a server.

use core::ops::{Add, Sub};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// TCP connections that clients opened to a server, and UDP connections with NAT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default))]
pub struct Attempts {
    /// Number of TCP connections that began with a SYN, and of UDP connections with NAT, which are
    /// counted as soon as they are answered or unanswered.
    pub opened: u64,
    /// Number of connections without an answer. TCP with NAT: the client has repeated its SYN
    /// twice, or the connection has expired, and the server has sent nothing. TCP with direct
    /// routing and tunnels, where answers do not pass the director: the client has repeated its SYN
    /// twice, or once until the connection expired. UDP with NAT: the client has sent again after a
    /// pause of a second or more, or the connection has expired, and the server has sent nothing.
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

    /// Whether three or more connections are unanswered, and these are at least half of all, or at
    /// least a tenth of all and at least four times the share in `usual`.
    fn exceeds(self, usual: Self) -> bool {
        let Self { opened, unanswered } = self;
        // A connection may have been opened before the counted interval.
        let opened = opened.max(unanswered);
        let [opened, unanswered] = [opened, unanswered].map(u128::from);
        let exceeds_usual = unanswered.saturating_mul(usual.opened.into())
            >= opened.saturating_mul(4 * u128::from(usual.unanswered));
        unanswered >= Self::FEW.into()
            && (unanswered * 2 >= opened || unanswered * 10 >= opened && exceeds_usual)
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
}

impl RecentAttempts {
    /// Whether no client has ever opened a connection.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the server itself is the cause of its unanswered attempts in the last minute.
    /// `others` are the attempts to all other servers of its service in the last minute.
    ///
    /// A flood of SYNs or a scan reaches all servers of a service alike. So a server is suspicious
    /// only if half of its connections or more are unanswered, or a tenth or more and four times
    /// the usual share. This is the share of the other servers or, if these have no clients, the
    /// server's own share until five minutes ago.
    ///
    /// `one_way` means that the service's protocol may have no answers (UDP). Then the server is
    /// suspicious only if, in addition, most connections to the other servers were answered, or
    /// most connections to this server until five minutes ago.
    pub fn is_suspicious(&self, others: Attempts, one_way: bool) -> bool {
        let past = self.total - self.last_5_minutes;
        let usual = if others.opened > 0 { others } else { past };
        self.last_minute.exceeds(usual)
            && (!one_way || others.are_mostly_answered() || past.are_mostly_answered())
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
    /// minute are complete, the sum of their ticks.
    pub(crate) fn tick(&mut self, total: Attempts) {
        let tick = self.ticks;
        self.by_tick[tick % TICKS] = total - self.last;
        self.last = total;
        self.ticks = (tick + 1) % (TICKS * TENS * MINUTES);
        if self.ticks.is_multiple_of(TICKS) {
            self.by_ten[tick / TICKS % TENS] = sum(&self.by_tick);
        }
        if self.ticks.is_multiple_of(TICKS * TENS) {
            self.by_minute[tick / TICKS / TENS] = sum(&self.by_ten);
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

    /// The attempts of a server that existed for more than five minutes: `past` until five minutes
    /// ago, and `minute` in the last minute.
    fn recent(past: Attempts, minute: Attempts) -> RecentAttempts {
        RecentAttempts {
            total: past + minute,
            last_10_seconds: Attempts::default(),
            last_minute: minute,
            last_5_minutes: minute,
        }
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

//! Takes snapshots of all counters every two seconds, and computes rates from them. The snapshots
//! are taken in portions, so that thousands of servers cause no delay. The kernel distributes its
//! estimators over the two seconds for the same reason (`IPVS_EST_NTICKS`).

use core::ops::Bound;
use core::time::Duration;

use super::Control;
use crate::Instant;

/// Interval between two snapshots of a counter.
const PERIOD: Duration = Duration::from_secs(2);
/// Interval between two portions (`IPVS_EST_TICK`).
const STEP: Duration = Duration::from_millis(40);
/// Maximum number of portions in a round, so that a round ends before the next one begins.
const PORTIONS: usize = 40;
/// Minimum number of services and servers in a portion, except the last of a round. The snapshots
/// of a portion are taken at the same time.
const PORTION_MIN: usize = 512;

#[derive(Debug, Default)]
pub(super) struct Estimator {
    /// Start of the next round; `None` until the caller has set the clock.
    next: Option<Instant>,
    round: Option<Round>,
}

#[derive(Debug)]
struct Round {
    next: Instant,
    /// The number of the next service; `None` when all services are done, and servers follow.
    service: Option<u32>,
    /// The record index of the server with which the next portion begins.
    place: usize,
    /// Number of services and servers in a portion.
    portion: usize,
}

impl Estimator {
    /// Plans the first round; `now` is the first time that the caller has set.
    pub(super) fn start(&mut self, now: Instant) {
        self.next = Some(now + PERIOD);
    }

    /// The time at which the next snapshots are due.
    pub(super) fn wakeup(&self) -> Option<Instant> {
        match &self.round {
            Some(round) => Some(round.next),
            None => self.next,
        }
    }

    pub(super) fn is_in_a_round(&self) -> bool {
        self.round.is_some()
    }
}

impl Control {
    /// Takes the snapshots of counters that are due at `at` (`ip_vs_estimation_kthread`): at most
    /// one portion of a round. The next round begins [`PERIOD`] after this one. If estimation is
    /// off, no new round begins.
    pub(super) fn estimate(&mut self, at: Instant) {
        if self.estimator.wakeup().is_none_or(|next| next > at) {
            return;
        }
        let mut round = match self.estimator.round.take() {
            Some(round) => round,
            None => {
                self.estimator.next = Some(at + PERIOD);
                if !self.settings.sysctls.estimates() {
                    return;
                }
                self.total.tick();
                let all = self.services.len() + self.records.len();
                Round {
                    next: at,
                    service: Some(0),
                    place: 0,
                    portion: all.div_ceil(PORTIONS).max(PORTION_MIN),
                }
            }
        };
        let mut left = round.portion;
        if let Some(first) = round.service {
            let from = (Bound::Included(first), Bound::Unbounded);
            round.service = None;
            for (&number, service) in self.services.range_mut(from) {
                if left == 0 {
                    round.service = Some(number);
                    break;
                }
                left -= 1;
                service.stats.tick();
            }
        }
        let places = round.place..self.records.len().min(round.place + left);
        round.place = places.end;
        self.records.tick(places);
        if round.service.is_some() || round.place < self.records.len() {
            round.next = round.next + STEP;
            self.estimator.round = Some(round);
        }
    }
}

#[cfg(test)]
mod tests {
    use core::net::SocketAddr;

    use super::*;
    use crate::{Family, Forwarding, Options, ServerConfig, ServiceConfig, ServiceKey};

    /// A `Control` with one service and this number of servers, each of which has had a connection.
    fn control(servers: u16) -> Control {
        let mut control = Control::new(Options::default());
        let key = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
        let config = ServiceConfig::new(Family::V4, "rr");
        control.add_service(key, config, None).unwrap();
        for port in 1..=servers {
            let addr = SocketAddr::from(([10, 0, 0, 1], port));
            let config = ServerConfig::new(1, Forwarding::Nat);
            control
                .add_server(&key, addr, &config, Instant::ZERO)
                .unwrap();
        }
        for entry in control.records.iter() {
            entry.stats.shard(0).count_connection();
        }
        control.advance(Instant::ZERO);
        control
    }

    fn shown(control: &Control) -> usize {
        let stats = control.records.iter().map(|entry| entry.stats.stats());
        stats.filter(|stats| stats.shown.conns == 1).count()
    }

    #[test]
    fn estimator_samples_500_servers_in_one_call() {
        let mut control = control(500);
        control.advance(Instant::ZERO + PERIOD);
        assert_eq!(shown(&control), 500);
        assert_eq!(control.next_wakeup(), Some(Instant::ZERO + 2 * PERIOD));
    }

    #[test]
    fn estimator_samples_2000_servers_in_four_portions_within_period() {
        let mut control = control(2000);
        let mut seen = std::vec::Vec::new();
        while shown(&control) < 2000 {
            // A late call also processes only one portion.
            control.advance(Instant::ZERO + PERIOD + Duration::from_millis(500));
            seen.push(shown(&control));
        }
        assert_eq!(seen, [511, 1023, 1535, 2000]);
        assert_eq!(control.next_wakeup(), Some(Instant::ZERO + 2 * PERIOD));
    }
}

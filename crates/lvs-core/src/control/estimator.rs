//! Snapshots and rates of all counters every two seconds, in portions: the kernel spreads its estimators over the two
//! seconds for the same reason (`IPVS_EST_NTICKS`), so that thousands of servers hold nobody up.

use core::ops::Bound;
use core::time::Duration;

use super::Control;
use crate::Instant;

/// Time between two snapshots of the same counters.
const PERIOD: Duration = Duration::from_secs(2);
/// Time between two portions (`IPVS_EST_TICK`).
const STEP: Duration = Duration::from_millis(40);
/// Portions that a round is cut into at most: all of them are done before the next round.
const PORTIONS: usize = 40;
/// Services and servers of a portion at least. As many have their snapshots at the same moment.
const PORTION_MIN: usize = 512;

/// When the estimator goes to work, and how far it has come.
#[derive(Debug, Default)]
pub(super) struct Estimator {
    /// When the next round begins; none until the clock has been shown.
    next: Option<Instant>,
    round: Option<Round>,
}

#[derive(Debug)]
struct Round {
    /// When the next portion is due.
    next: Instant,
    /// The next service, by its number. Servers follow when all services are done.
    service: Option<u32>,
    /// The next server, by the place of its record.
    place: usize,
    /// Services and servers of a portion.
    portion: usize,
}

impl Estimator {
    /// Begins with the first moment of the clock.
    pub(super) fn start(&mut self, now: Instant) {
        self.next = Some(now + PERIOD);
    }

    /// When there is something to do next.
    pub(super) fn wakeup(&self) -> Option<Instant> {
        match &self.round {
            Some(round) => Some(round.next),
            None => self.next,
        }
    }

    /// Whether portions of a round are yet to come.
    pub(super) fn is_in_a_round(&self) -> bool {
        self.round.is_some()
    }
}

impl Control {
    /// Takes the snapshots that are due at `at` (`ip_vs_estimation_kthread`).
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

//! Times of the periodic work for services: the ticks of their schedulers, and the steps of slow
//! starts.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::Instant;

/// For each service number, the time of the next work for this service.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    moments: BTreeSet<(Instant, u32)>,
    of: BTreeMap<u32, Instant>,
}

impl Agenda {
    pub(super) fn set(&mut self, number: u32, at: Option<Instant>) {
        let before = match at {
            Some(at) => self.of.insert(number, at),
            None => self.of.remove(&number),
        };
        if before == at {
            return;
        }
        if let Some(before) = before {
            self.moments.remove(&(before, number));
        }
        if let Some(at) = at {
            self.moments.insert((at, number));
        }
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.moments.first().map(|&(at, _)| at)
    }

    /// The numbers of the services whose time has come, in ascending order.
    pub(super) fn due(&self, now: Instant) -> Vec<u32> {
        let due = self.moments.range(..=(now, u32::MAX));
        let mut due: Vec<u32> = due.map(|&(_, number)| number).collect();
        due.sort_unstable();
        due
    }
}

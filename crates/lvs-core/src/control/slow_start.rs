//! Slow start: a server that joins a running service gets its share in steps.
//!
//! The starting server has one tenth of its weight at first, and one tenth more after each ninth of
//! the period. Weights are whole numbers and mostly small, so that a tenth of one is rarely exact.
//! Therefore all weights of the service are multiplied by ten during the slow start. They are not
//! multiplied if they are numbers of connections, or if one of them is large.
//!
//! A server starts slowly when it begins to accept connections (it is added, or its weight rises
//! from 0) and another server has accepted them for the whole period. Without such a server, a slow
//! start would only reduce the capacity.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;

use crate::{Control, Instant, Pool, Server, ServerId};

/// Factor by which the weights of a service are multiplied during a slow start, if they are
/// multiplied.
const FINER: i32 = 10;
/// If a weight is above this value, the weights of its service are not multiplied: a tenth of it is
/// precise enough even if it is rounded down to a whole number.
const FINE: i32 = 100_000;

/// The servers of a service that accept connections, each with the time at which it began to accept
/// them.
#[derive(Debug)]
pub(crate) struct SlowStart {
    since: BTreeMap<ServerId, Since>,
    pub(crate) next: Option<Instant>,
    factor: i32,
}

#[derive(Clone, Copy, Debug)]
struct Since {
    /// Time at which the server began to accept connections; `None` if it accepted them before the
    /// slow start was configured.
    when: Option<Instant>,
    /// Whether the server gets its share in steps from the time `when` on.
    slow: bool,
}

impl Default for SlowStart {
    fn default() -> Self {
        Self {
            since: BTreeMap::new(),
            next: None,
            factor: 1,
        }
    }
}

impl SlowStart {
    /// Factor by which the slow start multiplies the weights at present.
    pub(crate) const fn factor(&self) -> i32 {
        self.factor
    }

    /// Records that these servers are not in a slow start: they accepted connections before the
    /// slow start was configured.
    pub(crate) fn take_as_established(&mut self, servers: &[Arc<Server>]) {
        let taking = servers.iter().filter(|server| server.config().weight > 0);
        self.since = taking
            .map(|server| {
                let since = Since {
                    when: None,
                    slow: false,
                };
                (server.id(), since)
            })
            .collect();
    }

    /// Updates the list of servers that accept connections, each with the time at which it began to
    /// accept them, and whether it starts slowly.
    fn note(&mut self, servers: &[Arc<Server>], takes: Duration, now: Instant) {
        let taking = servers.iter().filter(|server| server.config().weight > 0);
        let taking: BTreeSet<ServerId> = taking.map(|server| server.id()).collect();
        self.since.retain(|id, _| taking.contains(id));
        let established = self
            .since
            .values()
            .any(|since| since.when.is_none_or(|when| when + takes <= now));
        for id in taking {
            self.since.entry(id).or_insert(Since {
                when: Some(now),
                slow: established,
            });
        }
    }

    /// The tenths of its weight that a server gets at `now` (1 to 10), and the time of its next
    /// step.
    fn earned(&self, id: ServerId, takes: Duration, now: Instant) -> (u8, Option<Instant>) {
        let since = self.since.get(&id).filter(|since| since.slow);
        let Some(when) = since.and_then(|since| since.when) else {
            return (10, None);
        };
        let at = |ninths: u32| when + takes * ninths / 9;
        match (1..=9u8).find(|&ninths| now < at(ninths.into())) {
            Some(ninths) => (ninths, Some(at(ninths.into()))),
            None => (10, None),
        }
    }

    /// Sets the weight of each server of `pool` at `now`, in a service with a slow start of the
    /// duration `takes`, and reports changed weights to the scheduler. Returns `false`, without a
    /// change, if `takes` is zero and the effects of earlier slow starts have been undone already.
    pub(super) fn apply(&mut self, pool: &mut Pool, takes: Duration, now: Instant) -> bool {
        if takes.is_zero() && self.factor == 1 && self.since.is_empty() {
            return false;
        }
        let servers = pool.servers();
        if takes.is_zero() {
            self.since.clear();
        } else {
            self.note(servers, takes, now);
        }
        let earned: Vec<(u8, Option<Instant>)> = servers
            .iter()
            .map(|server| self.earned(server.id(), takes, now))
            .collect();
        self.next = earned.iter().filter_map(|(_, next)| *next).min();
        let heaviest = servers.iter().map(|server| server.config().weight).max();
        let slow = earned.iter().any(|&(tenths, _)| tenths < 10);
        let finer =
            slow && !pool.weight_is_capacity() && heaviest.is_none_or(|weight| weight <= FINE);
        let factor = if finer { FINER } else { 1 };
        let mut changed = Vec::new();
        for (place, (server, &(tenths, _))) in servers.iter().zip(&earned).enumerate() {
            let own = server.config().weight;
            if own == 0 {
                server.scale_last_weight(self.factor, factor);
                continue;
            }
            let weight = i64::from(own) * i64::from(tenths) * i64::from(factor) / 10;
            let weight = i32::try_from(weight.max(1)).unwrap_or(own);
            if weight != server.weight() || server.slow_start().is_some() != (tenths < 10) {
                changed.push(place);
            }
            server.set_share(weight, tenths);
        }
        let rescaled = factor != self.factor;
        self.factor = factor;
        if rescaled {
            // A scheduler that stores the last weights of servers with weight 0 has to read those
            // servers, too.
            changed = (0..servers.len()).collect();
        }
        pool.weights_changed(&changed);
        true
    }
}

impl Control {
    /// Sets the servers' weights after service `number` was changed.
    pub(crate) fn apply_slow_start(&mut self, number: u32, now: Instant) {
        let service = self.services.get_mut(&number);
        if service.is_some_and(|service| service.apply_slow_start(now)) {
            self.plan_service(number);
        }
    }
}

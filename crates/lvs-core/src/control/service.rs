//! A service: its settings, its servers and its scheduler.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::SocketAddr;

use super::check::Census;
use super::limiter::Limiter;
use super::slow_start::SlowStart;
use crate::recent::{RecentCount, RecentCounter};
use crate::stats::{ObjectStats, Stats};
use crate::{DropReason, Family, Instant, Pool, Protocol, Server, ServiceConfig, ServiceKey};

/// A service: its settings, its servers and its scheduler.
#[derive(Debug)]
pub struct Service {
    pub(crate) key: ServiceKey,
    pub(crate) config: ServiceConfig,
    pub(super) owner: Option<String>,
    pub(crate) pool: Pool,
    pub(super) stats: ObjectStats,
    /// Time of the scheduler's next call; none until the clock was set, or if the scheduler needs
    /// none.
    pub(super) next_tick: Option<Instant>,
    /// Servers in a slow start.
    pub(crate) slow: SlowStart,
    /// Present usage of the service's limits.
    pub(crate) limiter: Limiter,
    /// Numbers of its servers, by the properties that checks use.
    pub(crate) census: Census,
    /// Packets of clients that would have opened a connection, and were dropped or refused, by
    /// reason.
    pub(super) refusals: Vec<(DropReason, RecentCounter)>,
}

impl Service {
    /// Its key.
    pub const fn key(&self) -> ServiceKey {
        self.key
    }

    /// Its settings.
    pub const fn config(&self) -> &ServiceConfig {
        &self.config
    }

    /// The service's owner; `None` for a manually added service.
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// Its real servers in the kernel's order: the most recently added one is first.
    pub fn servers(&self) -> &[Arc<Server>] {
        self.pool.servers()
    }

    /// Packets of clients that opened no connection because they were dropped or refused, since the
    /// service was added.
    pub fn refused(&self) -> u64 {
        self.refusals.iter().map(|(_, one)| one.count()).sum()
    }

    /// These packets by reason.
    pub fn refusals(&self, now: Instant) -> impl Iterator<Item = (DropReason, RecentCount)> + '_ {
        let refusals = self.refusals.iter();
        refusals.map(move |(reason, counter)| (*reason, counter.at(now)))
    }

    /// Counts a packet of a client that opened no connection for this reason.
    pub(super) fn count_refusal(&mut self, reason: DropReason, now: Instant) {
        let mut refusals = self.refusals.iter_mut();
        match refusals.find(|(known, _)| *known == reason) {
            Some((_, counter)) => counter.add(1, now),
            None => {
                let mut counter = RecentCounter::default();
                counter.add(1, now);
                self.refusals.push((reason, counter));
            }
        }
    }

    /// The service's counters and rates.
    pub fn stats(&self) -> Stats {
        self.stats.stats()
    }
}

/// A service's key in an order: protocol, family and address, port; marks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum ServiceKeyOrd {
    Mark(Family, u32),
    Address(Protocol, SocketAddr),
}

impl From<&ServiceKey> for ServiceKeyOrd {
    fn from(key: &ServiceKey) -> Self {
        match *key {
            ServiceKey::Mark { family, mark } => Self::Mark(family, mark),
            ServiceKey::Address { protocol, addr } => {
                // Flow label and scope are no part of the identity.
                Self::Address(protocol, SocketAddr::new(addr.ip(), addr.port()))
            }
        }
    }
}

impl From<ServiceKeyOrd> for ServiceKey {
    fn from(key: ServiceKeyOrd) -> Self {
        match key {
            ServiceKeyOrd::Mark(family, mark) => Self::Mark { family, mark },
            ServiceKeyOrd::Address(protocol, addr) => Self::Address { protocol, addr },
        }
    }
}

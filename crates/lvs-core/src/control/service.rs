//! A service: its settings, its servers and its scheduler.

use alloc::string::String;
use alloc::sync::Arc;
use core::time::Duration;

use super::limiter::Limiter;
use super::slow_start::SlowStart;
use crate::recent::ReasonCounters;
use crate::stats::{ObjectStats, Stats};
use crate::{Forwarding, Instant, Pool, Protocol, Server, ServiceConfig, ServiceKey};

/// A service: its settings, its servers and its scheduler.
#[derive(Debug)]
pub struct Service {
    pub(crate) key: ServiceKey,
    pub(crate) config: ServiceConfig,
    pub(super) owner: Option<String>,
    pub(crate) pool: Pool,
    pub(super) stats: ObjectStats,
    /// Time of the scheduler's next call; `None` until the caller has set the clock, or if the
    /// scheduler needs no calls.
    pub(super) next_tick: Option<Instant>,
    pub(crate) slow: SlowStart,
    pub(crate) limiter: Limiter,
    pub(crate) census: Census,
    /// Packets of clients that would have opened a connection, and were dropped or refused.
    pub(super) refusals: ReasonCounters,
    /// Packets of the service's connections that were dropped or refused.
    pub(super) drops: ReasonCounters,
}

impl Service {
    /// Applies the settings that the kernel's IPVS does not have to a server of this service.
    pub(super) fn set_watches(&self, server: &Server) {
        let is_udp = self.key.protocol() == Some(Protocol::UDP);
        server.follow_extras(&self.config.extras, self.pool.needs_replies(), is_udp);
    }

    /// Returns the key of the service.
    pub const fn key(&self) -> ServiceKey {
        self.key
    }

    /// Returns the settings of the service.
    pub const fn config(&self) -> &ServiceConfig {
        &self.config
    }

    /// The service's owner; `None` for a manually added service.
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// The real servers in the kernel's order: the most recently added one is first, unless
    /// [`Control::arrange_servers`](crate::Control::arrange_servers) has changed the order.
    pub fn servers(&self) -> &[Arc<Server>] {
        self.pool.servers()
    }

    /// Packets of clients that opened no connection because they were dropped or refused, since the
    /// service was added.
    pub const fn refusals(&self) -> &ReasonCounters {
        &self.refusals
    }

    /// Packets of the service's connections that were dropped or refused, since the service was
    /// added.
    pub const fn drops(&self) -> &ReasonCounters {
        &self.drops
    }

    /// The service's counters and rates.
    pub fn stats(&self) -> Stats {
        self.stats.stats()
    }

    /// Sets each server's weight at `now`, and reports changed weights to the scheduler. Returns
    /// `false`, without a change, if slow starts are off, and the effects of earlier ones have been
    /// undone already.
    pub(super) fn apply_slow_start(&mut self, now: Instant) -> bool {
        let takes = Duration::from_secs(self.config.extras.slow_start.into());
        self.slow.apply(&mut self.pool, takes, now)
    }
}

/// Numbers of a service's servers with properties on which checks of changes depend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census {
    /// Number of servers whose address family differs from the service's.
    pub(crate) mixed: usize,
    /// Number of servers whose replies do not pass through the director.
    pub(crate) one_way: usize,
    /// Number of servers with full NAT.
    pub(crate) full_nat: usize,
}

impl Census {
    pub(crate) fn enter(&mut self, mixed: bool, forwarding: Forwarding) {
        let one = Self::of(mixed, forwarding);
        self.mixed += one.mixed;
        self.one_way += one.one_way;
        self.full_nat += one.full_nat;
    }

    pub(crate) fn leave(&mut self, mixed: bool, forwarding: Forwarding) {
        let one = Self::of(mixed, forwarding);
        self.mixed -= one.mixed;
        self.one_way -= one.one_way;
        self.full_nat -= one.full_nat;
    }

    fn of(mixed: bool, forwarding: Forwarding) -> Self {
        Self {
            mixed: usize::from(mixed),
            one_way: usize::from(!forwarding.translates()),
            full_nat: usize::from(forwarding == Forwarding::FullNat),
        }
    }
}

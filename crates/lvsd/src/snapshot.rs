//! The state of daemon and dataplane at one time.

use std::collections::HashMap;
use std::sync::Arc;

use lvs_api::daemon::Status;
use lvs_core::api::{Info, ServiceInfo};
use lvs_core::stats::Stats;

use crate::counters::Times;
use crate::dataplane::Found;
use crate::health::Key;

/// The state of daemon and dataplane at one time.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The state as `lvsd status` shows it.
    pub status: Status,
    /// The result of the last comparison with the dataplane.
    pub found: Arc<Found>,
    /// The durations of the checks of each server, unless there are too many.
    pub check_times: HashMap<Key, Times>,
}

impl Snapshot {
    /// All services of the dataplane and of the proxy.
    pub fn services(&self) -> impl Iterator<Item = &ServiceInfo> {
        let found = &self.found;
        found.seen.services.iter().chain(&found.proxied.services)
    }

    /// The state of the dataplane, if the daemon has read it.
    pub fn dataplane(&self) -> Option<&Info> {
        Some(&self.found.seen.info).filter(|info| info.pid != 0)
    }

    /// Counters and rates, summed over all services.
    pub fn total(&self) -> Stats {
        let mut total = self.dataplane().map(|info| info.total).unwrap_or_default();
        // The dataplane's total includes its own services, but not those of the proxy.
        let proxied = match self.dataplane() {
            Some(_) => &self.found.proxied.services,
            None => &self.found.seen.services,
        };
        for service in proxied {
            total = Stats {
                shown: total.shown + service.stats.shown,
                rates: total.rates + service.stats.rates,
                live: total.live + service.stats.live,
            };
        }
        total
    }
}

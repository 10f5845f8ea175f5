//! Reads, adds to and zeroes the counters of the director, of services and of servers.

use super::Control;
use crate::stats::{Counts, Stats};
use crate::{Error, ServiceKey};

impl Control {
    /// Counters and rates of the whole director, removed services included.
    pub fn total_stats(&self) -> Stats {
        self.total.stats()
    }

    /// Totals of each shard's counters.
    pub fn shard_counts(&self) -> impl Iterator<Item = Counts> + '_ {
        (0..self.options.shards).map(|number| self.total.live_of(number))
    }

    /// Counts packets that a BPF program has forwarded: for the server with the record number
    /// `record`, for its service and in total. Counts nothing if the server was removed.
    pub fn count_forwarded(&mut self, record: u32, counts: &Counts) {
        let Some(entry) = self.records.get(record as usize) else {
            return;
        };
        if !entry.server.is_available() {
            return;
        }
        entry.stats.add(counts);
        if let Some(service) = self.services.get(&entry.service) {
            service.stats.add(counts);
        }
        self.total.add(counts);
    }

    /// Zeroes the counters that listings show: the counters of one service and its servers, or all
    /// counters (`ip_vs_zero_service`, `ip_vs_zero_all`).
    ///
    /// # Errors
    /// [`Error::NoService`].
    pub fn zero(&mut self, key: Option<&ServiceKey>) -> Result<(), Error> {
        if let Some(key) = key {
            let number = self.number_of(key)?;
            if let Some(service) = self.services.get_mut(&number) {
                service.stats.zero();
                for server in service.pool.servers() {
                    if let Some(entry) = self.records.get_mut(server.id()) {
                        entry.stats.zero();
                    }
                }
            }
            return Ok(());
        }
        for service in self.services.values_mut() {
            service.stats.zero();
        }
        for entry in self.records.iter_mut().filter(|entry| !entry.is_trashed()) {
            entry.stats.zero();
        }
        self.total.zero();
        Ok(())
    }
}

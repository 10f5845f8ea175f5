//! Copies changes of the configuration into the shards, and removes connections because of them.

use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use super::Control;
use crate::Family;
use crate::shard::{ServerLink, Shard};

/// Work of a shard's next [`sweep`](Control::sweep).
#[derive(Clone, Debug, Default)]
pub(super) struct SweepWork {
    pub(super) flush_removed: bool,
    /// Number of rounds of the defence `drop_entry`.
    pub(super) drop_entry: u32,
    /// Whether to close connections of removed servers, as the settings of their services require.
    pub(super) end_down: bool,
}

impl Control {
    /// Copies changes of the configuration into a shard, and removes connections if the sysctls
    /// `expire_nodest_conn` or `drop_entry` require this. Connections that a service's
    /// [`OnServerDown`](crate::settings::OnServerDown) closes are left to [`Shard::end_down`]. Call
    /// it after each change. A shard of another director is unchanged.
    pub fn sweep(&mut self, shard: &mut Shard) {
        if !self.owns(shard) {
            return;
        }
        self.refresh(shard);
        self.note_occupancy(shard);
        let Some(work) = self.sweep_work.get_mut(shard.number()) else {
            return;
        };
        if !work.flush_removed && !work.end_down && work.drop_entry == 0 {
            return;
        }
        let work = core::mem::take(work);
        if work.end_down {
            shard.begin_down();
        }
        if work.flush_removed {
            shard.flush_removed();
            self.flush_removed_templates();
        }
        for _ in 0..work.drop_entry {
            self.drop_entries(shard);
        }
    }

    /// A number that changes whenever the shards' copies become out of date.
    pub fn generation(&self) -> u32 {
        self.shared.generation.load(Ordering::Acquire)
    }

    /// Records that the shards' copies are out of date.
    pub(crate) fn changed(&mut self) {
        self.settings.ipv4 = self.families[Family::V4 as usize] > 0;
        self.settings.ipv6 = self.families[Family::V6 as usize] > 0;
        self.settings.backup_only = self.backup.is_some() && self.settings.sysctls.backup_only;
        self.settings.outbound = self.engines > 0;
        self.records.index_addresses(self.engines > 0);
        self.shared.generation.fetch_add(1, Ordering::Release);
    }

    /// Updates the copies of settings and servers in a shard.
    pub(crate) fn refresh(&self, shard: &mut Shard) {
        let generation = self.shared.generation.load(Ordering::Acquire);
        if shard.is_at(generation) {
            return;
        }
        shard.take_settings(&self.settings, generation);
        let heeds_servers = self.settings.heeds_servers();
        shard.links().heed(heeds_servers);
        let number = shard.number();
        let link = |place: usize| {
            let entry = self.records.get(place)?;
            let service = self.services.get(&entry.service);
            let link = ServerLink {
                server: entry.server.clone(),
                counters: entry.stats.shard(number),
                service: service.map(|service| service.stats.shard(number)),
            };
            let masqueraded =
                heeds_servers && !entry.is_trashed() && entry.server.forwarding().translates();
            let protocol = entry.key.protocol().map_or(0, |protocol| protocol.0);
            Some((link, masqueraded.then_some((entry.server.addr(), protocol))))
        };
        let seen = shard.links().seen();
        match seen.and_then(|seen| self.records.changed_since(seen)) {
            Some(places) => {
                for &place in places {
                    let link = link(place as usize);
                    shard.links().set(place, link);
                }
            }
            None => {
                let all: Vec<_> = (0..self.records.len()).map(link).collect();
                shard.links().replace(all);
            }
        }
        shard.links().has_seen(self.records.changes());
    }
}

//! Switches `drop_packet`, `drop_entry` and `secure_tcp` on and off by the number of free slots and
//! the amount of free memory, and removes connections and templates for `drop_entry`.

use super::Control;
use crate::shard::Shard;

impl Control {
    /// Decides again which defences are on (`update_defense_level`).
    pub(super) fn update_defense(&mut self) {
        let slots = self.options.max_connections * self.options.shards;
        let used: usize = self.occupancy.iter().sum();
        self.defense
            .set_occupancy(slots.saturating_sub(used), slots);
        let before = self.settings.sysctls.clone();
        self.defense.update(&mut self.settings.sysctls);
        if self.settings.secure != self.defense.secure || self.settings.sysctls != before {
            self.settings.secure = self.defense.secure;
            self.changed();
        }
    }

    /// Runs one round of `drop_entry` over the connections (`ip_vs_random_dropentry`).
    pub(super) fn drop_entries(&mut self, shard: &mut Shard) {
        let now = self.clock.unwrap_or_default();
        let len = shard.places();
        for _ in 0..self.defense.visits(len) {
            let drawn = self.defense.draw(len) as usize;
            let Some(index) = shard.drawn(drawn) else {
                continue;
            };
            if shard.has_controlled(index) {
                continue;
            }
            let slot = shard.conn(index);
            let idle = slot.idle(now);
            let (protocol, state, packets) = (slot.protocol(), slot.state(), slot.in_packets());
            if self
                .defense
                .drops_connection(protocol, state, idle, packets)
                && let Some(template) = shard.kill(index)
                && self.templates.table.is_used(template)
            {
                self.remove_template(template);
            }
        }
    }

    /// Records the number of connections of a shard, for the defences.
    pub(crate) fn note_occupancy(&mut self, shard: &Shard) {
        if let Some(connections) = self.occupancy.get_mut(shard.number()) {
            *connections = shard.len();
        }
    }
}

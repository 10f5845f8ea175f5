//! Persistence templates: their removal and their listing, and the eviction of templates to make
//! room for new ones.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::Relaxed;

use super::Control;
use crate::conn::{Key, Template, flag, scattered, windows};
use crate::shard::{Connection, Shard, write_template};
use crate::sync::sync_template;
use crate::{ConnId, Instant, ServiceFlags};

/// Maximum number of due templates that one call visits: a flooded persistent service has a
/// million, and the caller holds the lock during the call. The caller must call again at once for
/// the remaining templates.
pub(super) const TEMPLATES_AT_ONCE: usize = 4096;

impl Control {
    pub(super) fn expire_templates(&mut self, now: Instant, budget: &mut usize) {
        while *budget > 0 {
            let due = self.templates.table.take_due_by(now, budget);
            let done = due.is_empty();
            for &index in &due {
                self.expire_template(index, None);
            }
            self.templates.table.recycle(due);
            if done {
                return;
            }
        }
    }

    /// Handles due templates of the present tick of their table, all or a portion of them; returns
    /// whether there were any.
    pub(super) fn expire_due_templates(
        &mut self,
        shard: &mut Shard,
        limit: Instant,
        budget: &mut usize,
    ) -> bool {
        let due = self.templates.table.take_due(limit, budget);
        let any = !due.is_empty();
        for &index in &due {
            self.expire_template(index, Some(shard));
        }
        self.templates.table.recycle(due);
        any
    }

    /// Removes a template whose timer has expired (`ip_vs_conn_expire`). A template that still has
    /// connections stays, with a timeout of 60 s from now on, and a synchronisation message about
    /// it is queued if one is due.
    pub(super) fn expire_template(&mut self, index: u32, shard: Option<&mut Shard>) {
        let template = self.templates.get(index);
        if template.controlled.load(Relaxed) == 0 {
            self.remove_template(index);
            return;
        }
        // This is permanent: from now on, each new connection restarts the timer with 60 s.
        template.timeout.store(60, Relaxed);
        let fired = self.templates.table.get(index).expires();
        let queue = match shard {
            Some(shard) => shard.sync_queue(),
            None => &mut self.sync,
        };
        let threshold = self.settings.sysctls.sync_threshold.0;
        sync_template(
            queue,
            self.settings.master,
            &self.settings.sysctls,
            template,
            threshold,
            fired,
        );
        self.templates.restart(index, fired);
    }

    pub(crate) fn remove_template(&mut self, index: u32) {
        let template = self.templates.remove(index);
        let server = template.server.load(Relaxed) as usize;
        if let Some(entry) = self.records.get(server) {
            entry.server.unbind_template();
        }
    }

    /// Lists persistence templates from slot `start` on.
    pub fn templates_from(
        &self,
        start: usize,
        now: Instant,
    ) -> impl Iterator<Item = Connection> + '_ {
        let indices = self.templates.table.indices(start..usize::MAX);
        indices.map(move |index| self.template_entry(index, now))
    }

    fn template_entry(&self, index: u32, now: Instant) -> Connection {
        let (slot, template) = (self.templates.table.get(index), self.templates.get(index));
        let Key {
            protocol,
            client,
            mut virt,
        } = template.key;
        let mut server = template.server_addr;
        if template.invalid.load(Relaxed) {
            virt.set_port(u16::MAX);
            server.set_port(u16::MAX);
        }
        Connection {
            id: ConnId(index),
            protocol,
            client,
            virt,
            server,
            state: template.state_name(),
            expires: slot.expires().saturating_since(now),
            method: slot.method(),
            template: true,
            synced: template.flags.load(Relaxed) & flag::SYNC != 0,
        }
    }

    /// Lists persistence templates from slot `from` on, and returns the slot at which the next call
    /// continues, as [`Shard::connections_piece`].
    pub fn templates_piece(
        &self,
        from: usize,
        budget: usize,
        now: Instant,
    ) -> (Vec<Connection>, Option<usize>) {
        let (indices, next) = self.templates.table.piece(from, budget);
        let templates = indices.into_iter();
        let piece = templates.map(|index| self.template_entry(index, now));
        (piece.collect(), next)
    }

    /// Replication items of the persistence templates from slot `from` on that were used at `since`
    /// or later (`None`: of all), and the slot at which the next call continues, as
    /// [`Shard::replicated_piece`].
    pub fn replicated_templates_piece(
        &self,
        from: usize,
        budget: usize,
        since: Option<Instant>,
        now: Instant,
    ) -> (Vec<u8>, Option<usize>) {
        let (indices, next) = self.templates.table.piece(from, budget);
        let mut out = Vec::new();
        for index in indices {
            let slot = self.templates.table.get(index);
            if since.is_none_or(|since| slot.last_restart() >= since) {
                let left = slot.expires().saturating_since(now);
                write_template(self.templates.get(index), left, &mut out);
            }
        }
        (out, next)
    }

    /// Name and data of the persistence engine of a template that
    /// [`templates_from`](Self::templates_from) has listed; `None` without an engine.
    pub fn template_engine(&self, id: ConnId) -> Option<(&'static str, &[u8])> {
        if !self.templates.table.is_used(id.0) {
            return None;
        }
        let (name, data) = self.templates.get(id.0).engine.as_ref()?;
        Some((name, data))
    }

    /// Removes the templates that refer to removed servers and that have no connections.
    pub(super) fn flush_removed_templates(&mut self) {
        let removed: Vec<u32> = self
            .templates
            .table
            .indices(0..usize::MAX)
            .filter(|&index| {
                let template = self.templates.get(index);
                let server = template.server.load(Relaxed) as usize;
                let entry = self.records.get(server);
                template.controlled.load(Relaxed) == 0
                    && entry.is_some_and(|entry| !entry.server.is_available())
            })
            .collect();
        for index in removed {
            self.remove_template(index);
        }
    }

    /// Runs one round of `drop_entry` over the templates.
    pub(super) fn drop_templates(&mut self, now: Instant) {
        let len = self.templates.table.populated_len();
        for _ in 0..self.defense.visits(len) {
            let drawn = self.defense.draw(len) as usize;
            let Some(index) = self.templates.table.populated_slot(drawn) else {
                continue;
            };
            if !self.templates.table.is_used(index) {
                continue;
            }
            let template = self.templates.get(index);
            if template.controlled.load(Relaxed) > 0 {
                continue;
            }
            let server = template.server.load(Relaxed) as usize;
            let entry = self.records.get(server);
            let service = entry.and_then(|entry| self.services.get(&entry.service));
            let once =
                service.is_some_and(|service| service.config.flags.has(ServiceFlags::ONE_PACKET));
            let drops = if once {
                let idle = self.templates.table.get(index).idle(now);
                let packets = template.in_packets.load(Relaxed);
                self.defense.draws_lot(idle, packets)
            } else {
                !template.assured.load(Relaxed)
            };
            if drops {
                self.remove_template(index);
            }
        }
    }
}

/// Maximum number of windows of slots in which one search looks for a template to evict.
const TEMPLATE_WINDOWS: usize = 16;

impl Control {
    /// Inserts a template and starts its timer. If the table is full, evicts another template if
    /// possible; `None` if there is no room.
    pub(super) fn insert_template(
        &mut self,
        template: Template,
        now: Instant,
    ) -> Option<(u32, Arc<Template>)> {
        self.make_template_room();
        self.templates.insert(template, now)
    }

    /// Evicts a persistence template if the table is full, eviction is enabled, and a template
    /// without connections is found. Of the candidates found, a template whose clients never
    /// established a connection is preferred, then the template that would expire first.
    fn make_template_room(&mut self) {
        let table = &self.templates.table;
        if !self.settings.evicts || table.len() < table.capacity() {
            return;
        }
        let first = self.evictable_template();
        self.templates.hand = (self.templates.hand + 1) % windows(table.populated_len());
        if let Some(index) = first {
            self.remove_template(index);
            self.evicted_templates += 1;
        }
    }

    pub(super) fn has_template_room(&self) -> bool {
        let table = &self.templates.table;
        table.len() < table.capacity()
            || self.settings.evicts && self.evictable_template().is_some()
    }

    fn evictable_template(&self) -> Option<u32> {
        let table = &self.templates.table;
        let (hand, slots) = (self.templates.hand, table.populated_len());
        let first = scattered(hand, slots, TEMPLATE_WINDOWS).find_map(|window| {
            let slots = table.populated_in(window).filter_map(|index| {
                let template = self.templates.get(index);
                let assured = template.assured.load(Relaxed);
                let free = template.controlled.load(Relaxed) == 0;
                free.then(|| (assured, table.get(index).expires(), index))
            });
            slots.min()
        });
        first.map(|(.., index)| index)
    }

    /// Number of persistence templates that were evicted to make room for new ones.
    pub const fn evicted_templates(&self) -> u64 {
        self.evicted_templates
    }
}

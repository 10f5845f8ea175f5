//! Creates and removes connections.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use super::{LocalChange, Shard};
use crate::conn::{Draft, Key, TEMPLATE_BIT, Template, flag};
use crate::{Forwarding, Instant, Tuple};

impl Shard {
    /// Inserts a new connection into the table, and counts it in its template if it has one. If the
    /// table is full and eviction is enabled, first evicts another connection. `None` if the table
    /// has no free slot.
    pub(crate) fn open(
        &mut self,
        mut slot: Draft,
        template: Option<(u32, Arc<Template>)>,
        now: Instant,
    ) -> Option<u32> {
        if let Some((number, _)) = template {
            slot.control = TEMPLATE_BIT | number;
        }
        let tracked = slot.has(flag::TRACKED);
        self.make_room(now);
        let index = self.table.insert(&slot, now)?;
        if tracked {
            self.down.track(index);
        }
        if self.settings.master.is_some() {
            self.table.set_sync_end(index, now.ticks() & !3);
        }
        if let Some((_, template)) = template {
            template.controlled.fetch_add(1, Ordering::Relaxed);
            *self.templates.entry(index) = Some(template);
        }
        Some(index)
    }

    /// Ends a connection that controls no others (`ip_vs_conn_expire_now`). The connection stays in
    /// the table until the next packet, because the host's own answer may still belong to it. A
    /// connection that controls others continues.
    pub(crate) fn end(&mut self, index: u32) {
        let slot = self.table.get(index);
        if self.table.controlled(index) == 0 && !slot.has(flag::DYING) {
            slot.set(flag::DYING);
            self.dying.push(index);
        }
    }

    /// Removes the connection of the client's packets with this tuple, in any state. Returns
    /// `false`, without a change, if there is no such connection, or if it controls other
    /// connections.
    pub(crate) fn end_at_once(&mut self, tuple: &Tuple) -> bool {
        let key = Key {
            protocol: tuple.protocol,
            client: tuple.src,
            virt: tuple.dst,
        };
        let found = self.table.find_in(&key);
        let Some(index) = found.filter(|&index| self.table.controlled(index) == 0) else {
            return false;
        };
        // The template of the connection expires as usual.
        let _ = self.destroy(index);
        true
    }

    /// Removes ended connections from the table.
    pub(crate) fn reap(&mut self) {
        while let Some(index) = self.dying.pop() {
            if self.table.is_used(index) && self.table.get(index).has(flag::DYING) {
                self.destroy(index);
            }
        }
    }

    /// Removes a connection by force. If it was the only one that another connection controlled,
    /// removes that connection, too (`ip_vs_conn_del`). Returns the number of a template that the
    /// caller must remove, because it has no connections any more and is not assured.
    pub(crate) fn kill(&mut self, index: u32) -> Option<u32> {
        let slot = self.table.get(index);
        let (template, controller) = (slot.template(), slot.controller());
        let orphaned = self.destroy(index);
        if let Some(controller) = controller
            && self.table.is_used(controller)
            && self.table.controlled(controller) == 0
        {
            return self.kill(controller);
        }
        template.filter(|_| orphaned)
    }

    /// Removes the connections whose server has been removed (`ip_vs_expire_nodest_conn_flush`),
    /// except connections that control others, and connections to which the service's
    /// [`OnServerDown`](crate::settings::OnServerDown) applies.
    pub(crate) fn flush_removed(&mut self) {
        let removed: Vec<u32> = self
            .table
            .indices(0..usize::MAX)
            .filter(|&index| {
                self.link(index)
                    .is_some_and(|link| !link.server.is_available() && !link.server.has_gone())
            })
            .collect();
        for index in removed {
            if self.table.is_used(index) && self.table.controlled(index) == 0 {
                // `Control` removes the templates of removed servers afterwards.
                let _ = self.kill(index);
            }
        }
    }

    /// Removes entry `index`, whose timer has expired and which is no longer in the wheel
    /// (`ip_vs_conn_expire`). An entry that controls others stays for another 60 s, and a
    /// synchronisation message about it is queued if one is due.
    pub(crate) fn expire(&mut self, index: u32) {
        let slot = self.table.get(index);
        if self.table.controlled(index) > 0 {
            // This is permanent: from now on, each packet restarts the timer with 60 s.
            slot.set_timeout(60);
            let fired = slot.expires();
            let threshold = self.settings.sysctls.sync_threshold.0;
            self.sync_connection(index, threshold, fired);
            self.table.restart(index, fired);
            return;
        }
        if slot.has(flag::TIMED) {
            self.note_expired_attempt(index);
        }
        self.destroy(index);
    }

    /// Frees an entry. Returns `true` if it was the last one of its template, and the template is
    /// not assured.
    pub(crate) fn destroy(&mut self, index: u32) -> bool {
        if self.replicas.is_some() {
            self.strike(index);
        }
        let slot = self.table.get(index);
        let (controller, flags) = (slot.controller(), slot.flags());
        if let Some(link) = self.link(index) {
            link.server.unbind(flags);
        }
        if let Some(controller) = controller {
            self.table.drop_controlled(controller);
        }
        let template = self.forget(index);
        self.table.remove(index);
        template.is_some_and(|template| template.release())
    }

    /// Removes the state of entry `index` that is stored outside of its slot, and returns its
    /// template. The entry must still be in the table. State in [`down`](super::down) is
    /// overwritten when the slot is used again, and [`reap`](Self::reap) checks whether the removed
    /// entry is still dying.
    fn forget(&mut self, index: u32) -> Option<Arc<Template>> {
        let slot = self.table.get(index);
        let (full_nat, helped) = (slot.method() == Forwarding::FullNat, slot.has(flag::HELPED));
        if !self.sequences.is_empty() {
            self.sequences.remove(&index);
        }
        if full_nat {
            self.record_local_change(index, LocalChange::Released);
            self.local_ports.release(index, &self.table);
        }
        if helped {
            self.sessions.remove(&index);
        }
        let template = self.templates.get_mut(index);
        template.and_then(Option::take)
    }
}

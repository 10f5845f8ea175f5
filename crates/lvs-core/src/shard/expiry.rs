//! How connections begin and end.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use super::Shard;
use crate::conn::{Slot, TEMPLATE_BIT, Template, flag};
use crate::{Forwarding, Instant};

impl Shard {
    /// Puts a new connection into the table, made from a template or not; `None` if the table is full.
    pub(crate) fn open(
        &mut self,
        mut slot: Slot,
        template: Option<(u32, Arc<Template>)>,
        now: Instant,
    ) -> Option<u32> {
        if let Some((number, _)) = template {
            slot.control = TEMPLATE_BIT | number;
        }
        let tracked = slot.has(flag::TRACKED);
        self.make_room(now);
        let index = self.table.insert(slot, now)?;
        if tracked {
            self.down.track(index);
        }
        if let Some((_, template)) = template {
            template.controlled.fetch_add(1, Ordering::Relaxed);
            let place = index as usize;
            if self.templates.len() <= place {
                self.templates.resize(place + 1, None);
            }
            self.templates[place] = Some(template);
        }
        Some(index)
    }

    /// Ends a connection after a packet that replaced it (`ip_vs_conn_expire_now`). The host's own answer to that packet
    /// may still find it.
    pub(crate) fn end(&mut self, index: u32) {
        let slot = self.table.get_mut(index);
        if slot.controlled == 0 && !slot.has(flag::DYING) {
            slot.flags |= flag::DYING;
            self.dying.push(index);
        }
    }

    /// Takes out what has ended.
    pub(crate) fn reap(&mut self) {
        while let Some(index) = self.dying.pop() {
            if self.table.is_used(index) && self.table.get(index).has(flag::DYING) {
                self.destroy(index);
            }
        }
    }

    /// Ends a connection by force, and with it a connection that controlled only this one (`ip_vs_conn_del`). Returns
    /// the number of a template that has nothing to control any more and does not outlive that.
    pub(crate) fn kill(&mut self, index: u32) -> Option<u32> {
        let slot = self.table.get(index);
        let (template, controller) = (slot.template(), slot.controller());
        let orphaned = self.destroy(index);
        if let Some(controller) = controller
            && self.table.is_used(controller)
            && self.table.get(controller).controlled == 0
        {
            return self.kill(controller);
        }
        template.filter(|_| orphaned)
    }

    /// Ends every connection whose server has been removed (`ip_vs_expire_nodest_conn_flush`).
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
            if self.table.is_used(index) && self.table.get(index).controlled == 0 {
                // Templates to removed servers are flushed by the control half, orphaned or not.
                let _ = self.kill(index);
            }
        }
    }

    /// The timer of entry `index` has fired; it is out of the wheel (`ip_vs_conn_expire`).
    pub(crate) fn expire(&mut self, index: u32) {
        let slot = self.table.get_mut(index);
        if slot.controlled > 0 {
            // For good: from now on every restart gives it 60 s.
            slot.timeout = 60;
            let fired = slot.expires;
            let threshold = self.settings.sysctls.sync_threshold.0;
            self.sync_connection(index, threshold, fired);
            self.table.restart(index, fired);
            return;
        }
        self.destroy(index);
    }

    /// Frees an entry. `true` if it was the last one that its template controlled, and the template is not assured.
    pub(crate) fn destroy(&mut self, index: u32) -> bool {
        let slot: &Slot = self.table.get(index);
        let (controller, active) = (slot.controller(), !slot.has(flag::INACTIVE));
        if let Some(link) = self.link(index) {
            link.server.unbind(active);
        }
        if let Some(controller) = controller {
            let controller = self.table.get_mut(controller);
            controller.controlled = controller.controlled.saturating_sub(1);
        }
        let template = self.forget(index);
        self.table.remove(index);
        template.is_some_and(|template| template.release())
    }

    /// Takes what is kept beside the slot of entry `index`, which is still in the table, out of every table that may have
    /// something; gives the template that it was made from. What [`down`](super::down) knows is written over when the
    /// slot is taken again, and [`reap`](Self::reap) looks whether what it takes out is still dying.
    fn forget(&mut self, index: u32) -> Option<Arc<Template>> {
        let slot = self.table.get(index);
        let (full_nat, helped) = (slot.method() == Forwarding::FullNat, slot.has(flag::HELPED));
        if !self.sequences.is_empty() {
            self.sequences.remove(&index);
        }
        if full_nat {
            self.local_ports.release(index, &self.table);
        }
        if helped {
            self.sessions.remove(&index);
        }
        let template = self.templates.get_mut(index as usize);
        template.and_then(Option::take)
    }
}

//! Sync messages about a shard's connections.

use super::Shard;
use crate::Instant;
use crate::conn::{self, Template, flag};
use crate::sync::wire::{Entry, Sequences};
use crate::sync::{HZ, Message, Subject, needed, sync_counted_template};

impl Shard {
    /// The next synchronisation message to send, if one is full or old enough.
    pub fn take_sync_message(&mut self, now: Instant) -> Option<Message> {
        self.sync.take(now, &self.settings.sysctls)
    }

    /// Messages lost because `sync_qlen_max` others were queued.
    pub fn lost_sync_messages(&self) -> u64 {
        self.sync.lost()
    }

    /// Greatest number of messages that may wait to be sent (`sync_qlen_max` for each port).
    pub fn sync_messages_max(&self) -> usize {
        let ports = self.settings.master.map_or(1, |master| master.ports);
        let max = usize::try_from(self.settings.sysctls.sync_qlen_max).unwrap_or(0);
        max.saturating_mul(ports.into())
    }

    /// Time at which the caller requests the next message; `None` if there is nothing to send.
    pub fn next_sync_message(&self) -> Option<Instant> {
        self.sync.next_message()
    }

    /// Sends a connection and its controlling entries, if they are due (`ip_vs_sync_conn`).
    pub(crate) fn sync_connection(&mut self, index: u32, packets: u32, now: Instant) {
        let Some(master) = self.settings.master else {
            return;
        };
        let slot = self.table.get(index);
        if slot.method() == crate::Forwarding::FullNat {
            // Its local port belongs to this director: another one could do nothing with it.
            return;
        }
        let subject = Subject {
            template: false,
            protocol: slot.protocol(),
            state: slot.state(),
            old_state: slot.old_state(),
            timeout: slot.timeout().saturating_mul(HZ),
            // Without one, it was long ago.
            sync_end: (self.table.sync_end(index))
                .unwrap_or(now.ticks().wrapping_sub(1 << 30) & !3),
            persistent: self.is_persistent(index),
        };
        let version0 = self.settings.sysctls.sync_version == 0;
        if version0 && !slot.client().is_ipv4() {
            return;
        }
        if let Some(end) = needed(&subject, packets, &self.settings.sysctls, now) {
            let entry = self.entry(slot, self.sequences.get(&index).copied());
            self.sync.push(&entry, master, &self.settings.sysctls, now);
            let slot = self.table.get(index);
            slot.set_old_state(slot.state());
            self.table.set_sync_end(index, end);
        } else if version0 {
            return;
        }
        if let Some(Some(template)) = self.templates.get(index) {
            let template = template.clone();
            sync_counted_template(
                &mut self.sync,
                self.settings.master,
                &self.settings.sysctls,
                &template,
                now,
            );
        } else if let Some(controller) = self.table.get(index).controller() {
            self.sync_connection(controller, self.settings.sysctls.sync_threshold.0, now);
        }
    }

    /// A connection of one packet is not sent itself.
    pub(crate) fn sync_once(&mut self, template: Option<&Template>, now: Instant) {
        if self.settings.master.is_some()
            && self.settings.sysctls.sync_version != 0
            && let Some(template) = template
        {
            sync_counted_template(
                &mut self.sync,
                self.settings.master,
                &self.settings.sysctls,
                template,
                now,
            );
        }
    }

    /// Whether one of the controlling entries of a connection is a template.
    fn is_persistent(&self, index: u32) -> bool {
        let mut slot = self.table.get(index);
        loop {
            if slot.template().is_some() {
                return true;
            }
            match slot.controller() {
                Some(controller) => slot = self.table.get(controller),
                None => return false,
            }
        }
    }

    pub(super) fn entry(&self, slot: conn::Entry<'_>, sequences: Option<Sequences>) -> Entry {
        Entry {
            protocol: slot.protocol(),
            client: slot.client(),
            virt: slot.virt(),
            server: slot.server_addr(),
            flags: slot.flags() & !flag::OWN,
            state: slot.state().0.into(),
            mark: slot.mark(),
            timeout: slot.timeout(),
            sequences,
            engine: None,
            data: None,
        }
    }
}

//! What a master sends, and when (`ip_vs_sync_conn`, `ip_vs_sync_conn_needed`).

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

use super::wire::{self, Entry, Sequences};
use super::{Master, ticks};
use crate::conn::table::flag;
use crate::conn::{NO_SLOT, Slot, State, Template};
use crate::shard::{Settings, Shard};
use crate::{Control, Instant, Protocol, Sysctls};

/// A message that is not full is sent when it is this old.
const SEND_AFTER: Duration = Duration::from_secs(2);
const HZ: u32 = 250;

/// Messages that wait to be sent, the last one still being filled.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    buffer: Vec<u8>,
    count: u32,
    version: u32,
    /// Length at which the buffer is full.
    room: usize,
    begun: Instant,
    full: VecDeque<Vec<u8>>,
}

impl Queue {
    fn push(&mut self, entry: &Entry, master: Master, sysctls: &Sysctls, now: Instant) {
        let version = sysctls.sync_version;
        let Some(len) = entry.len(version) else {
            return;
        };
        if !self.buffer.is_empty() {
            let pad = self.padding(version);
            // Version 0 has no room for a count of 256.
            let wrapped = version == 0 && self.count == 256;
            if self.version != version || wrapped || self.buffer.len() + pad + len > self.room {
                self.close(sysctls);
            }
        }
        if self.buffer.is_empty() {
            let header = if version == 0 { 4 } else { 8 };
            self.room = usize::from(master.maxlen).max(header + len);
            self.begun = now;
            self.version = version;
            self.count = 0;
            wire::start(version, master.syncid, &mut self.buffer);
        }
        let pad = self.padding(version);
        self.buffer.extend(core::iter::repeat_n(0, pad));
        entry.write(version, &mut self.buffer);
        self.count += 1;
    }

    fn padding(&self, version: u32) -> usize {
        if version == 0 {
            0
        } else {
            self.buffer.len().wrapping_neg() & 3
        }
    }

    fn close(&mut self, sysctls: &Sysctls) {
        let mut message = core::mem::take(&mut self.buffer);
        wire::finish(self.version, self.count, &mut message);
        // The buffer that finds the queue full is the one that is lost.
        if self.full.len() < usize::try_from(sysctls.sync_qlen_max).unwrap_or(0) {
            self.full.push_back(message);
        }
    }

    fn take(&mut self, now: Instant, sysctls: &Sysctls) -> Option<Vec<u8>> {
        if !self.buffer.is_empty() && now.saturating_since(self.begun) >= SEND_AFTER {
            self.close(sysctls);
        }
        self.full.pop_front()
    }

    fn next_message(&self) -> Option<Instant> {
        if !self.full.is_empty() {
            return Some(Instant::ZERO);
        }
        (!self.buffer.is_empty()).then(|| self.begun + SEND_AFTER)
    }
}

/// What the decision about an entry looks at.
struct Subject {
    template: bool,
    protocol: Protocol,
    state: State,
    old_state: State,
    /// In ticks.
    timeout: u32,
    sync_end: u32,
    persistent: bool,
}

/// Whether an entry is to be sent; then with its new `sync_end` (`ip_vs_sync_conn_needed`).
fn needed(subject: &Subject, packets: u32, sysctls: &Sysctls, now: Instant) -> Option<u32> {
    let now = ticks(now);
    let (threshold, period) = sysctls.sync_threshold;
    let mut end = now.wrapping_add(subject.timeout) & !3;
    if !subject.template {
        if sysctls.sync_persist_mode && subject.persistent {
            return None;
        }
        // States that are sent at all, and ESTABLISHED among them.
        let states: Option<(&[u8], u8)> = match subject.protocol {
            Protocol::TCP => Some((&[1, 4, 5, 6, 7], 1)),
            Protocol::SCTP => Some((&[8, 9, 10, 11, 13], 8)),
            _ => None,
        };
        if let Some((sent, established)) = states {
            if !sent.contains(&subject.state.0) {
                return None;
            }
            if subject.state != subject.old_state && subject.state.0 != established {
                return Some(end);
            }
        }
    }
    let refresh = sysctls.sync_refresh_period.saturating_mul(HZ);
    if refresh > 0 {
        let before = subject.sync_end;
        let distance = end.wrapping_sub(before).cast_signed().unsigned_abs();
        if distance < refresh.min((subject.timeout / 2).max(10 * HZ)) {
            let retries = before & 3;
            let from = before
                .wrapping_sub(subject.timeout)
                .wrapping_add(refresh / 8);
            if retries >= sysctls.sync_retries || now.wrapping_sub(from).cast_signed() < 0 {
                return None;
            }
            end |= retries + 1;
        }
    }
    if period > 0 {
        if !subject.template && packets % period != threshold {
            return None;
        }
    } else if refresh == 0 && packets != threshold {
        return None;
    }
    Some(end)
}

impl Shard {
    /// The next synchronisation message to send, if one is full or old enough.
    pub fn take_sync_message(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.sync.take(now, &self.settings.sysctls)
    }

    /// When to ask for a message next; `None` while there is nothing to send.
    pub fn next_sync_message(&self) -> Option<Instant> {
        self.sync.next_message()
    }

    /// Sends a connection and what controls it, as far as needed (`ip_vs_sync_conn`).
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
            state: slot.state,
            old_state: slot.old_state,
            timeout: slot.timeout.saturating_mul(HZ),
            sync_end: slot.sync_end,
            persistent: self.is_persistent(index),
        };
        let version0 = self.settings.sysctls.sync_version == 0;
        if version0 && !slot.client().is_ipv4() {
            return;
        }
        if let Some(end) = needed(&subject, packets, &self.settings.sysctls, now) {
            let entry = self.entry(slot, self.sequences.get(&index).copied());
            self.sync.push(&entry, master, &self.settings.sysctls, now);
            let slot = self.table.get_mut(index);
            slot.old_state = slot.state;
            slot.sync_end = end;
        } else if version0 {
            return;
        }
        if let Some(Some(template)) = self.templates.get(index as usize) {
            let template = template.clone();
            sync_counted_template(&mut self.sync, &self.settings, &template, now);
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
            sync_counted_template(&mut self.sync, &self.settings, template, now);
        }
    }

    /// Whether a template is up the chain of what controls a connection.
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

    fn entry(&self, slot: &Slot, sequences: Option<Sequences>) -> Entry {
        Entry {
            protocol: slot.protocol(),
            client: slot.client(),
            virt: slot.virt(),
            server: slot.server_addr(),
            flags: slot.flags & !flag::OWN,
            state: slot.state.0.into(),
            mark: slot.mark,
            timeout: slot.timeout,
            sequences,
            engine: None,
            data: None,
        }
    }
}

impl Control {
    /// The next synchronisation message about templates that ended their time outside of any shard, if one is full or
    /// old enough. A director of one shard has them all in [`Shard::take_sync_message`].
    pub fn take_sync_message(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.sync.take(now, &self.settings.sysctls)
    }
}

fn sync_counted_template(
    queue: &mut Queue,
    settings: &Settings,
    template: &Template,
    now: Instant,
) {
    let packets = template.in_packets.fetch_add(1, Relaxed).wrapping_add(1);
    sync_template(queue, settings, template, packets, now);
}

/// Sends a template, if needed.
pub(crate) fn sync_template(
    queue: &mut Queue,
    settings: &Settings,
    template: &Template,
    packets: u32,
    now: Instant,
) {
    let Some(master) = settings.master else {
        return;
    };
    if settings.sysctls.sync_version == 0 && !template.key.client.is_ipv4() {
        return;
    }
    let timeout = template.timeout.load(Relaxed);
    let subject = Subject {
        template: true,
        protocol: template.key.protocol,
        state: State::NONE,
        old_state: State::NONE,
        timeout: timeout.saturating_mul(HZ),
        sync_end: template.sync_end.load(Relaxed),
        persistent: false,
    };
    let Some(end) = needed(&subject, packets, &settings.sysctls, now) else {
        return;
    };
    template.sync_end.store(end, Relaxed);
    // Engine data is only sent of a template that has a server.
    if template.engine.is_some() && template.server.load(Relaxed) == NO_SLOT {
        return;
    }
    let hidden = |addr: SocketAddr| {
        if template.invalid.load(Relaxed) {
            SocketAddr::new(addr.ip(), u16::MAX)
        } else {
            addr
        }
    };
    let entry = Entry {
        protocol: template.key.protocol,
        client: template.key.client,
        virt: hidden(template.key.virt),
        server: hidden(template.server_addr),
        flags: template.flags.load(Relaxed),
        state: template.assured.load(Relaxed).into(),
        mark: template.mark,
        timeout,
        sequences: Some(template.sequences()),
        engine: template
            .engine
            .as_ref()
            .map(|(name, _)| name.as_bytes().into()),
        data: template.engine.as_ref().map(|(_, data)| data.to_vec()),
    };
    queue.push(&entry, master, &settings.sysctls, now);
}

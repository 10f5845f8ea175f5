//! The outgoing messages of a master, and the decision whether an entry is sent (`ip_vs_sync_conn`,
//! `ip_vs_sync_conn_needed`).

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

use super::wire::{self, Entry};
use super::{Master, Message};
use crate::conn::{NO_SLOT, State, Template};
use crate::settings::Sysctls;
use crate::{Instant, Protocol};

/// A message that is not full is sent when its first entry is this old.
const SEND_AFTER: Duration = Duration::from_secs(2);

pub(crate) const HZ: u32 = 250;

/// The messages to send, for each port.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    ports: Vec<PortQueue>,
}

/// The messages for one port: the complete ones, and the one that is being filled.
#[derive(Debug, Default)]
struct PortQueue {
    buffer: Vec<u8>,
    count: u32,
    version: u32,
    /// Maximum length of the message that is being filled, in bytes.
    room: usize,
    begun: Instant,
    full: VecDeque<Vec<u8>>,
    /// Number of messages that were dropped because the queue was full.
    lost: u64,
}

impl Queue {
    pub(crate) fn push(&mut self, entry: &Entry, master: Master, sysctls: &Sysctls, now: Instant) {
        let ports = usize::from(master.ports.max(1));
        if self.ports.len() < ports {
            self.ports.resize_with(ports, PortQueue::default);
        }
        let port = match ports {
            1 => 0,
            ports => usize::from(spread(entry)) & (ports - 1),
        };
        self.ports[port].push(entry, master, sysctls, now);
    }

    pub(crate) fn take(&mut self, now: Instant, sysctls: &Sysctls) -> Option<Message> {
        let mut ports = (0..).zip(&mut self.ports);
        ports.find_map(|(port, queue)| {
            let bytes = queue.take(now, sysctls)?;
            Some(Message { port, bytes })
        })
    }

    pub(crate) fn next_message(&self) -> Option<Instant> {
        let ports = self.ports.iter();
        ports.filter_map(PortQueue::next_message).min()
    }

    /// Completes, for each port, the message that is being filled, because the master has stopped
    /// and no further entry will fill it.
    pub(crate) fn finish(&mut self, sysctls: &Sysctls) {
        for queue in &mut self.ports {
            if !queue.buffer.is_empty() {
                queue.close(sysctls);
            }
        }
    }

    pub(crate) fn lost(&self) -> u64 {
        self.ports.iter().map(|queue| queue.lost).sum()
    }
}

/// A hash of the client's address and port and of the virtual port, from which the port for all
/// messages about a connection follows.
fn spread(entry: &Entry) -> u16 {
    let last = match entry.client.ip() {
        IpAddr::V4(addr) => u32::from(addr),
        IpAddr::V6(addr) => {
            let [.., a, b, c, d] = addr.octets();
            u32::from_be_bytes([a, b, c, d])
        }
    };
    let ports = u32::from(entry.client.port()) << 16 | u32::from(entry.virt.port());
    let mixed = (last ^ ports).wrapping_mul(0x9e37_79b1);
    (mixed >> 16) as u16
}

impl PortQueue {
    fn push(&mut self, entry: &Entry, master: Master, sysctls: &Sysctls, now: Instant) {
        let version = sysctls.sync_version;
        let Some(len) = entry.len(version) else {
            return;
        };
        if !self.buffer.is_empty() {
            let pad = self.padding(version);
            // Version 0 cannot represent a count of 256.
            let wrapped = version == 0 && self.count == 256 || self.count == master.count_max;
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
        // If the queue is full, the newest buffer is lost.
        if self.full.len() < usize::try_from(sysctls.sync_qlen_max).unwrap_or(0) {
            self.full.push_back(message);
        } else {
            self.lost += 1;
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

/// The fields of a connection or template on which the decision depends.
pub(crate) struct Subject {
    pub(crate) template: bool,
    pub(crate) protocol: Protocol,
    pub(crate) state: State,
    pub(crate) old_state: State,
    /// The timeout of the connection, in ticks of 4 ms.
    pub(crate) timeout: u32,
    pub(crate) sync_end: u32,
    pub(crate) persistent: bool,
}

/// Whether an entry must be sent; if so, returns its new `sync_end` (`ip_vs_sync_conn_needed`).
pub(crate) fn needed(
    subject: &Subject,
    packets: u32,
    sysctls: &Sysctls,
    now: Instant,
) -> Option<u32> {
    let now = now.ticks();
    let (threshold, period) = sysctls.sync_threshold;
    let mut end = now.wrapping_add(subject.timeout) & !3;
    if !subject.template {
        if sysctls.sync_persist_mode && subject.persistent {
            return None;
        }
        // The states in which a connection is sent, and the number of the state ESTABLISHED.
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

/// The highest packet number above `before` and up to `packets` at which [`needed`] would send the
/// connection by its number of packets; `None` if there is no such number.
pub(crate) fn latest_due(before: u32, packets: u32, sysctls: &Sysctls) -> Option<u32> {
    let (threshold, period) = sysctls.sync_threshold;
    let passed = packets.wrapping_sub(before);
    let back = if period > threshold {
        let since = u64::from(packets % period) + u64::from(period - threshold);
        u32::try_from(since % u64::from(period)).unwrap_or(0)
    } else if period > 0 {
        return None;
    } else if sysctls.sync_refresh_period == 0 {
        packets.wrapping_sub(threshold)
    } else {
        0
    };
    (back < passed).then(|| packets.wrapping_sub(back))
}

pub(crate) fn sync_counted_template(
    queue: &mut Queue,
    master: Option<Master>,
    sysctls: &Sysctls,
    template: &Template,
    now: Instant,
) {
    let packets = template.in_packets.fetch_add(1, Relaxed).wrapping_add(1);
    sync_template(queue, master, sysctls, template, packets, now);
}

/// Queues a message about a template, if it is due.
pub(crate) fn sync_template(
    queue: &mut Queue,
    master: Option<Master>,
    sysctls: &Sysctls,
    template: &Template,
    packets: u32,
    now: Instant,
) {
    let Some(master) = master else {
        return;
    };
    if sysctls.sync_version == 0 && !template.key.client.is_ipv4() {
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
    let Some(end) = needed(&subject, packets, sysctls, now) else {
        return;
    };
    template.sync_end.store(end, Relaxed);
    // Engine data are sent only for a template with a server.
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
    queue.push(&entry, master, sysctls, now);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latest_due_sync_packet_agrees_with_rule_of_kernel() {
        let with = |threshold, period, refresh| Sysctls {
            sync_threshold: (threshold, period),
            sync_refresh_period: refresh,
            ..Sysctls::default()
        };
        let usual = with(3, 50, 0);
        for (before, packets, due) in [
            (2, 3, Some(3)),
            (3, 52, None),
            (52, 53, Some(53)),
            (16, 260, Some(253)),
            (53, 53, None),
        ] {
            assert_eq!(latest_due(before, packets, &usual), due, "{packets}");
        }
        // Due at one packet only, at any packet, and never.
        assert_eq!(latest_due(2, 90, &with(5, 0, 0)), Some(5));
        assert_eq!(latest_due(5, 90, &with(5, 0, 0)), None);
        assert_eq!(latest_due(5, 90, &with(5, 0, 10)), Some(90));
        assert_eq!(latest_due(5, 900, &with(60, 50, 0)), None);
        // For single packets, the function agrees with the kernel's rule.
        for sysctls in [usual, with(0, 7, 0), with(6, 7, 0), with(5, 0, 0)] {
            let (threshold, period) = sysctls.sync_threshold;
            for packets in 1..200u32 {
                let alone = match period {
                    0 => packets == threshold,
                    _ => packets % period == threshold,
                };
                let due = latest_due(packets - 1, packets, &sysctls);
                assert_eq!(due.is_some(), alone, "{packets}, {threshold}, {period}");
            }
        }
    }

    #[test]
    fn sync_queue_is_bounded_per_port_and_drops_excess() {
        let master = Master {
            // Each connection fills a message.
            count_max: 1,
            ports: 2,
            ..Master::new(0, None, false)
        };
        let sysctls = Sysctls {
            sync_qlen_max: 4,
            ..Sysctls::default()
        };
        let mut queue = Queue::default();
        let mut each = [0_u64; 2];
        for n in 0..100 {
            let entry = Entry {
                protocol: Protocol::TCP,
                client: ([192, 0, 2, 1], n).into(),
                virt: ([198, 51, 100, 1], 80).into(),
                server: ([10, 0, 0, 1], 80).into(),
                flags: 0,
                state: 1,
                mark: 0,
                timeout: 60,
                sequences: None,
                engine: None,
                data: None,
            };
            each[usize::from(spread(&entry) & 1)] += 1;
            queue.push(&entry, master, &sysctls, Instant::ZERO);
        }
        assert!(each.iter().all(|&count| count > 5), "{each:?}");
        // Each port keeps four complete messages and one that is being filled.
        assert_eq!(queue.lost(), 100 - 2 * (4 + 1));
        let later = Instant::ZERO + SEND_AFTER;
        let taken = core::iter::from_fn(|| queue.take(later, &sysctls));
        assert_eq!(taken.count(), 8);
        assert_eq!((queue.lost(), queue.next_message()), (92, None));
    }
}

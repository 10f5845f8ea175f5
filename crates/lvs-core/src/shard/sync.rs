//! Synchronisation messages about the connections of a shard.

use super::Shard;
use crate::Instant;
use crate::conn::{self, Template, flag};
use crate::sync::wire::{Entry, Sequences};
use crate::sync::{HZ, Message, Subject, latest_due, needed, sync_counted_template};

impl Shard {
    /// The next synchronisation message to send, if a message is full or old enough.
    pub fn take_sync_message(&mut self, now: Instant) -> Option<Message> {
        self.sync.take(now, &self.settings.sysctls)
    }

    /// Number of messages lost because the queue of their port was full (`sync_qlen_max` messages).
    pub fn lost_sync_messages(&self) -> u64 {
        self.sync.lost()
    }

    /// Maximum number of messages in the queues of all ports (`sync_qlen_max` for each port).
    pub fn sync_messages_max(&self) -> usize {
        let ports = self.settings.master.map_or(1, |master| master.ports);
        let max = usize::try_from(self.settings.sysctls.sync_qlen_max).unwrap_or(0);
        max.saturating_mul(ports.into())
    }

    /// Time at which the caller must call [`take_sync_message`](Self::take_sync_message) again;
    /// `None` if there is nothing to send.
    pub fn next_sync_message(&self) -> Option<Instant> {
        self.sync.next_message()
    }

    /// Whether a synchronisation master is running.
    pub const fn has_master(&self) -> bool {
        self.settings.master.is_some()
    }

    /// Queues synchronisation messages about offloaded connections, if the packets that their
    /// clients have sent since the last visit require it. Visits at most `budget` slots, from slot
    /// `from` on. Returns the slot at which the next call continues; `None` at the end.
    pub fn sync_offloaded_piece(
        &mut self,
        from: usize,
        budget: usize,
        now: Instant,
    ) -> Option<usize> {
        let (handles, next) = self.table.piece(from, budget);
        for handle in handles {
            let entry = self.table.get(handle);
            let seen = entry.is_live().then(|| entry.in_packets());
            match self.table.sync_packets(handle) {
                Some(before) if before != entry.in_packets() => self.sync_packets(handle, now),
                _ => self.table.set_sync_packets(handle, seen),
            }
        }
        next
    }

    /// Queues a message about a connection, if its client's latest packet requires it
    /// (`ip_vs_sync_conn`). If the connection is offloaded, all packets since the last call count.
    /// Several such packets cause only one message.
    pub(super) fn sync_packets(&mut self, index: u32, now: Instant) {
        let entry = self.table.get(index);
        let (live, packets) = (entry.is_live(), entry.in_packets());
        let before = self.table.sync_packets(index);
        self.table.set_sync_packets(index, live.then_some(packets));
        let before = before.unwrap_or(packets.wrapping_sub(1));
        let due = latest_due(before, packets, &self.settings.sysctls);
        self.sync_connection(index, due.unwrap_or(packets), now);
    }

    /// Queues messages about a connection and the entries that control it, if they are due
    /// (`ip_vs_sync_conn`). Ignores connections that no other director can use.
    pub(crate) fn sync_connection(&mut self, index: u32, packets: u32, now: Instant) {
        let Some(master) = self.settings.master else {
            return;
        };
        let slot = self.table.get(index);
        if slot.method() == crate::Forwarding::FullNat || slot.has(flag::PROBE) {
            // No other director could use the connection: its local port, or its health check,
            // belongs to this one.
            return;
        }
        let subject = Subject {
            template: false,
            protocol: slot.protocol(),
            state: slot.state(),
            old_state: slot.old_state(),
            timeout: slot.timeout().saturating_mul(HZ),
            // If no time is stored, the connection was last sent long ago.
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

    /// Queues a message about the template of a one-packet connection, if it is due. The connection
    /// itself is never sent.
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

    /// Whether a persistence template controls the connection, directly or through another
    /// connection.
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

#[cfg(test)]
mod tests {
    use crate::*;

    const VIRT: &str = "198.51.100.1:80";

    /// A director with a synchronisation master, and a service with one server (direct routing).
    fn master(protocol: Protocol) -> Director {
        let mut director = Director::new(Options {
            max_connections: 100,
            ..Options::default()
        });
        let virt = VIRT.parse().unwrap();
        let service = match protocol {
            Protocol::TCP => ServiceKey::tcp(virt),
            _ => ServiceKey::udp(virt),
        };
        let control = &mut director.control;
        let config = ServiceConfig::new(Family::V4, "rr");
        control.add_service(service, config, None).unwrap();
        let server = ServerConfig::new(1, Forwarding::Route);
        let addr = "10.0.0.1:80".parse().unwrap();
        control
            .add_server(&service, addr, &server, Instant::ZERO)
            .unwrap();
        let master = sync::Master::new(1, None, false);
        control.start_master(master).unwrap();
        director
    }

    fn send(director: &mut Director, protocol: Protocol, flags: u8) -> ConnId {
        let transport = match protocol {
            Protocol::TCP => Transport::Tcp(TcpFlags(flags)),
            _ => Transport::Udp(&[]),
        };
        let tuple = Tuple {
            protocol,
            src: "192.0.2.7:1000".parse().unwrap(),
            dst: VIRT.parse().unwrap(),
        };
        let meta = PacketMeta::new(Hook::Local, tuple, transport, 100);
        match director.handle_packet(&meta, Instant::ZERO) {
            Verdict::Forward(forward) => forward.conn.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// Adds packets to the connection's count in its slot, as the kernel fast path does.
    fn pass(director: &Director, conn: ConnId, packets: u32) {
        for _ in 0..packets {
            director.shard.table.get(conn.0).count_packet();
        }
    }

    fn walk(director: &mut Director) {
        let mut from = Some(0);
        while let Some(at) = from {
            from = director.shard.sync_offloaded_piece(at, 1000, Instant::ZERO);
        }
    }

    /// Number of entries in the queued messages: an entry has 36 bytes, and the header of a message
    /// 8.
    fn entries(director: &mut Director) -> usize {
        let later = Instant::from_secs(60);
        core::iter::from_fn(|| director.shard.take_sync_message(later))
            .map(|message| (message.bytes.len() - 8) / 36)
            .sum()
    }

    #[test]
    fn offloaded_connection_is_sent_once_for_all_packets_between_two_walks() {
        let mut director = master(Protocol::UDP);
        let mut conn = send(&mut director, Protocol::UDP, 0);
        for _ in 1..16 {
            conn = send(&mut director, Protocol::UDP, 0);
        }
        assert_eq!(
            entries(&mut director),
            1,
            "no message was sent at the third packet"
        );
        assert!(director.shard.offer(conn).is_ok());
        assert!(director.shard.publish(conn, 1, None));
        pass(&director, conn, 36);
        walk(&mut director);
        assert_eq!(entries(&mut director), 0, "a message was sent at packet 52");
        pass(&director, conn, 1);
        walk(&mut director);
        assert_eq!(
            entries(&mut director),
            1,
            "no message was sent at the 53rd packet"
        );
        walk(&mut director);
        assert_eq!(
            entries(&mut director),
            0,
            "a message was sent, although no packet has arrived"
        );
        pass(&director, conn, 200);
        walk(&mut director);
        assert_eq!(
            entries(&mut director),
            1,
            "not exactly one message was sent for packets 103 to 253"
        );
        // The connection returns to userspace. Its next packet is counted together with the earlier
        // ones.
        pass(&director, conn, 60);
        director.shard.withdraw(conn);
        send(&mut director, Protocol::UDP, 0);
        assert_eq!(
            entries(&mut director),
            1,
            "no message was sent at packet 303"
        );
        walk(&mut director);
        assert_eq!(entries(&mut director), 0);
    }

    #[test]
    fn offloaded_connection_that_was_not_walked_is_sent_when_it_closes() {
        let mut director = master(Protocol::TCP);
        send(&mut director, Protocol::TCP, TcpFlags::SYN);
        let conn = send(&mut director, Protocol::TCP, TcpFlags::ACK);
        assert!(director.shard.publish(conn, 1, None));
        pass(&director, conn, 20);
        let _ = entries(&mut director);
        send(&mut director, Protocol::TCP, TcpFlags::ACK | TcpFlags::FIN);
        assert_eq!(entries(&mut director), 1);
    }
}

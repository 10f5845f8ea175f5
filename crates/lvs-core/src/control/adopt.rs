//! Adoption of connections that a previous process has left in shared memory.

use alloc::sync::Arc;
use core::net::SocketAddr;
use core::time::Duration;

use super::Control;
use crate::conn::adopt::Adoption;
use crate::conn::memory::Memory;
use crate::conn::{ConnTable, Draft, Entry, NO_SLOT, adopt, flag};
use crate::shard::Shard;
use crate::{Forwarding, Instant, Protocol, Server};

/// Flags whose state was outside of the slot, and was lost with the previous process.
const LOST: u32 = flag::CONTROLS
    | flag::TIMED
    | flag::AWAITED
    | flag::TRACKED
    | flag::HELPED
    | flag::REPLICATED
    | flag::BORROWED
    | flag::PEER;

impl Control {
    /// As [`shard_in`](Self::shard_in), with the connections that a previous process has left in
    /// `memory`. The caller must have decoded the layout of this memory
    /// ([`Layout::from_words`](crate::memory::Layout::from_words)). The caller adds services and
    /// servers, and then calls [`adopt`](Self::adopt); from then on, the connections belong to the
    /// shard.
    pub fn shard_found(&self, number: usize, memory: Memory) -> Option<(Shard, Adoption)> {
        let (table, adoption) = ConnTable::found(self.options.max_connections, memory);
        Some((self.shard_with(number, table)?, adoption))
    }

    /// Takes over the connections of a previous process from at most `budget` slots; call it until
    /// it returns false. State, timeout and deadline are unchanged. A connection is bound to its
    /// server if its service still has this server, with the same forwarding method (NAT and full
    /// NAT count as one method). Otherwise the connection stays unbound, like a connection that was
    /// received by synchronisation before its server was added. Templates and connections that have
    /// ended are not inherited. A connection of full NAT is kept if `local` returns its local
    /// address and port, and otherwise removed, because other uses of its local port are unknown.
    /// The arguments of `local` are the number of the slot, the protocol and the server.
    pub fn adopt(
        &self,
        shard: &mut Shard,
        adoption: &mut Adoption,
        now: Instant,
        budget: usize,
        local: impl FnMut(u32, Protocol, SocketAddr) -> Option<SocketAddr>,
    ) -> bool {
        let keep = |entry: Entry<'_>| self.keeps(entry);
        let (pool, _) = self.local_pool();
        shard.adopt(adoption, now, budget, pool, local, keep)
    }

    /// Copies the connections that a previous process has left in `memory` into these shards, for
    /// tables of another number or size. `home` returns the number of the shard of a client.
    /// `ahead` is the clock of the other process minus the clock of this one. Otherwise as
    /// [`adopt`](Self::adopt), in one step, but without connections of full NAT. Returns the number
    /// of connections for which no slot was free.
    pub fn move_in(
        &self,
        shards: &mut [Shard],
        memory: Memory,
        home: impl Fn(SocketAddr) -> usize,
        ahead: Duration,
        now: Instant,
    ) -> usize {
        let ahead = u64::try_from(ahead.as_nanos()).unwrap_or(u64::MAX);
        let mut no_room = 0;
        adopt::read(memory, |mut draft, expires| {
            if !is_kept(draft.flags) || draft.method() == Forwarding::FullNat {
                return;
            }
            let server = self.server_left(&draft);
            draft.control = NO_SLOT;
            draft.flags &= !LOST;
            draft.server = record_of(server.as_deref());
            let expires = Instant::from_nanos(expires.as_nanos().saturating_sub(ahead));
            let shard = shards.get_mut(home(draft.key.client));
            match shard.and_then(|shard| shard.move_in(&draft, expires, now)) {
                Some(_) => bind(server, draft.flags),
                None => no_room += 1,
            }
        });
        no_room
    }

    /// Binds an adopted connection to its [server](Self::server_left), if any. Returns `false`,
    /// without a change, for a template and for a connection that has ended: the caller must then
    /// remove the entry.
    fn keeps(&self, entry: Entry<'_>) -> bool {
        if !is_kept(entry.flags()) {
            return false;
        }
        let server = self.server_left(&entry.draft());
        entry.clear_control();
        entry.clear(LOST);
        entry.set_server(record_of(server.as_deref()));
        bind(server, entry.flags());
        true
    }

    /// The server of an adopted connection; `None` if the service no longer has this server, or has
    /// it with another forwarding method.
    fn server_left(&self, draft: &Draft) -> Option<Arc<Server>> {
        let server = self.find_server(&draft.key, draft.server_addr, draft.mark, draft.flags);
        // With another forwarding method, the connection's packets would be sent in another form
        // than before. NAT and full NAT count as the same method, because the connection stores
        // which of them it uses.
        let alike = |server: &Arc<Server>| {
            let (one, other) = (server.forwarding(), draft.method());
            one == other || one.translates() && other.translates()
        };
        server.filter(alike)
    }
}

/// Whether a connection with these flags can continue in another process.
const fn is_kept(flags: u32) -> bool {
    flags & (flag::TEMPLATE | flag::DYING) == 0
}

fn record_of(server: Option<&Server>) -> u32 {
    server.map_or(NO_SLOT, |server| server.id().0)
}

fn bind(server: Option<Arc<Server>>, flags: u32) {
    if let Some(server) = server {
        server.bind(flags);
    }
}

#[cfg(test)]
mod tests {
    use alloc::boxed::Box;
    use alloc::sync::Arc;
    use alloc::vec::Vec;
    use core::net::SocketAddr;
    use core::sync::atomic::AtomicU64;
    use core::time::Duration;

    use crate::full_nat::LocalAddress;
    use crate::memory::{Layout, Memory, Region};
    use crate::offload::{LocalChange, LocalEnd};
    use crate::*;

    /// A director with two servers, one of which is `server`. Each of its shards has room for
    /// `max_connections`.
    fn control(server: &str, shards: usize, max_connections: usize) -> Control {
        let mut control = Control::new(Options {
            max_connections,
            shards,
            ..Options::default()
        });
        let service = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
        let config = ServiceConfig::new(Family::V4, "rr");
        control.add_service(service, config, None).unwrap();
        for addr in ["10.0.0.9:80", server] {
            let config = ServerConfig::new(1, Forwarding::Nat);
            let addr = addr.parse().unwrap();
            control
                .add_server(&service, addr, &config, Instant::ZERO)
                .unwrap();
        }
        control
    }

    fn segment(port: u16, flags: u8) -> PacketMeta<'static> {
        PacketMeta::tcp(
            Hook::Local,
            SocketAddr::from(([192, 0, 2, 1], port)),
            "198.51.100.1:80".parse().unwrap(),
            flags,
        )
    }

    /// Memory that remains after the table in it was dropped.
    fn memory(layout: Layout) -> impl Fn() -> Memory {
        let sizes = layout.region_words();
        let words: [&'static [AtomicU64]; 5] =
            sizes.map(|size| &*Box::leak(bytemuck::zeroed_slice_box(size)));
        let region = |words| Region::shared(words, Arc::new(()));
        move || Memory::new(layout, words.map(region)).unwrap()
    }

    /// Opens a connection from each of these ports, and returns their servers.
    fn open(before: &mut Control, shard: &mut Shard, ports: &[u16]) -> Vec<SocketAddr> {
        before.sweep(shard);
        let mut targets = Vec::new();
        for &port in ports {
            for flags in [TcpFlags::SYN, TcpFlags::ACK] {
                let meta = segment(port, flags);
                let verdict = match shard.handle_packet(&meta, Instant::ZERO) {
                    Ok(verdict) => verdict,
                    Err(pending) => before.admit(shard, &meta, pending, Instant::ZERO),
                };
                let Verdict::Forward(forward) = verdict else {
                    panic!("client port {port}, flags {flags:#x}: {verdict:?}")
                };
                if flags == TcpFlags::SYN {
                    targets.push(forward.target);
                }
            }
        }
        targets
    }

    /// Sends a packet of an existing connection, and returns the server to which it is forwarded.
    fn goes_on(shard: &mut Shard, port: u16, now: Instant) -> SocketAddr {
        let verdict = shard.handle_packet(&segment(port, TcpFlags::ACK), now);
        let Ok(Verdict::Forward(forward)) = verdict else {
            panic!("client port {port}: {verdict:?}")
        };
        assert!(forward.server.is_some());
        forward.target
    }

    #[test]
    fn successor_continues_adopted_connections() {
        let mut before = control("10.0.0.1:80", 1, 100);
        let memory = memory(before.layout());
        let mut shard = before.shard_in(0, memory()).unwrap();
        let ports: Vec<u16> = (1001..=1050).collect();
        let targets = open(&mut before, &mut shard, &ports);
        drop((before, shard));

        let mut after = control("10.0.0.1:80", 1, 100);
        let (mut shard, mut adoption) = after.shard_found(0, memory()).unwrap();
        let now = Instant::from_secs(10);
        while after.adopt(&mut shard, &mut adoption, now, 16, |_, _, _| None) {}
        after.sweep(&mut shard);
        assert_eq!(shard.len(), 50);
        for (port, target) in ports.into_iter().zip(targets) {
            assert_eq!(goes_on(&mut shard, port, now), target);
        }
    }

    #[test]
    fn removed_server_is_freed_after_connections_of_health_checks_expire() {
        let key = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
        let server: SocketAddr = "10.0.0.1:80".parse().unwrap();
        for adopted in [false, true] {
            let mut before = control("10.0.0.1:80", 1, 100);
            let memory = memory(before.layout());
            let mut shard = before.shard_in(0, memory()).unwrap();
            let ports: Vec<u16> = (1001..=1050).collect();
            for port in &ports {
                let client = SocketAddr::from(([192, 0, 2, 1], *port));
                before.pin(&key, server, client, Instant::ZERO).unwrap();
            }
            let targets = open(&mut before, &mut shard, &ports);
            assert!(targets.iter().all(|target| *target == server));
            let (mut control, mut shard) = if adopted {
                drop((before, shard));
                let after = control("10.0.0.1:80", 1, 100);
                let (mut shard, mut adoption) = after.shard_found(0, memory()).unwrap();
                let now = Instant::from_secs(10);
                while after.adopt(&mut shard, &mut adoption, now, 16, |_, _, _| None) {}
                (after, shard)
            } else {
                (before, shard)
            };
            control.sweep(&mut shard);
            let counted = &control.service(&key).unwrap().servers()[1];
            assert_eq!((counted.active(), counted.total()), (0, 0));
            let now = Instant::from_secs(11);
            control.delete_server(&key, server, now).unwrap();
            for second in 11..400 {
                control.advance_with(&mut shard, Instant::from_secs(second));
            }
            assert!(
                control.has_removed(),
                "the removed server is released before its {} connections end (adopted: {adopted})",
                shard.len()
            );
            for second in 400..3000 {
                control.advance_with(&mut shard, Instant::from_secs(second));
            }
            assert_eq!(shard.len(), 0);
            assert!(
                !control.has_removed(),
                "the removed server is kept without connections (adopted: {adopted})"
            );
        }
    }

    #[test]
    fn adopted_full_nat_connection_keeps_local_port_and_is_dropped_if_none_is_stored() {
        let control = || {
            let mut control = control("10.0.0.1:80", 1, 100);
            let service = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
            let pool = [LocalAddress::new("10.0.0.2".parse().unwrap())];
            control.set_local_pool(pool.into(), false).unwrap();
            for addr in ["10.0.0.9:80", "10.0.0.1:80"] {
                let config = ServerConfig::new(1, Forwarding::FullNat);
                let addr = addr.parse().unwrap();
                control.edit_server(&service, addr, &config).unwrap();
            }
            control
        };
        let mut before = control();
        let memory = memory(before.layout());
        let mut shard = before.shard_in(0, memory()).unwrap();
        shard.follow_local_ends();
        let targets = open(&mut before, &mut shard, &[1001, 1002, 1003]);
        let mut ends = Vec::new();
        for port in [1001, 1002, 1003] {
            let verdict = shard.handle_packet(&segment(port, TcpFlags::ACK), Instant::ZERO);
            let Ok(Verdict::Forward(Forward { conn, source, .. })) = verdict else {
                panic!("client port {port}: {verdict:?}")
            };
            let conn = conn.unwrap();
            let local = shard
                .offer(conn)
                .unwrap()
                .local
                .expect("a connection that was never offloaded has its local port in the plan");
            assert_eq!(Some(local.local), source);
            if port == 1001 {
                assert!(shard.publish(conn, 1, None));
                assert_eq!(
                    shard.offer(conn).unwrap().local,
                    None,
                    "the plan of an offloaded connection repeats its local port"
                );
            }
            ends.push(local);
        }
        let changes: Vec<LocalChange> = shard.local_changes().collect();
        assert_eq!(
            changes,
            ends.iter()
                .copied()
                .map(LocalChange::Bound)
                .collect::<Vec<_>>()
        );
        // The previous process has not stored the local port of the third connection.
        let seen = ends[..2].to_vec();
        drop((before, shard));

        let mut after = control();
        let (mut shard, mut adoption) = after.shard_found(0, memory()).unwrap();
        let now = Instant::from_secs(10);
        let local = |slot, protocol, server| {
            let alike =
                |end: &&LocalEnd| (end.slot, end.protocol, end.server) == (slot, protocol, server);
            seen.iter().find(alike).map(|end| end.local)
        };
        shard.follow_local_ends();
        while after.adopt(&mut shard, &mut adoption, now, 16, local) {}
        after.sweep(&mut shard);
        assert_eq!(shard.len(), 2);
        for (n, end) in seen.iter().enumerate() {
            let port = 1001 + u16::try_from(n).unwrap();
            assert_eq!(goes_on(&mut shard, port, now), targets[n]);
            let reply = PacketMeta {
                tuple: Tuple::tcp(end.server, end.local),
                ..segment(port, TcpFlags::ACK)
            };
            let verdict = shard.handle_packet(&reply, now);
            let Ok(Verdict::Reply(reply)) = verdict else {
                panic!("client port {port}: {verdict:?}")
            };
            let client = SocketAddr::from(([192, 0, 2, 1], port));
            assert_eq!(reply.destination, Some(client));
        }
        // The release of the local ports is reported.
        shard.advance(Instant::from_secs(100_000), usize::MAX);
        let released: Vec<LocalChange> = shard.local_changes().collect();
        assert_eq!(released.len(), 2);
        assert!(
            seen.iter()
                .all(|end| released.contains(&LocalChange::Released(*end)))
        );
    }

    /// The connections of a previous process continue in another number of tables, as many as fit.
    #[test]
    fn adoption_into_other_number_of_shards_keeps_connections_up_to_capacity() {
        let (even, odd): (Vec<u16>, Vec<u16>) = (1001..=1300).partition(|port| port % 2 == 0);
        let mut before = control("10.0.0.1:80", 2, 150);
        let memories = [(); 2].map(|()| memory(before.layout()));
        let mut targets = Vec::new();
        for (number, ports) in [&even, &odd].into_iter().enumerate() {
            let mut shard = before.shard_in(number, memories[number]()).unwrap();
            let opened = open(&mut before, &mut shard, ports);
            targets.extend(ports.iter().copied().zip(opened));
        }
        drop(before);

        let now = Instant::from_secs(10);
        for (shards, room) in [(1, 1000), (3, 400), (1, 290)] {
            let mut after = control("10.0.0.1:80", shards, room);
            let mut tables: Vec<Shard> = (0..shards).filter_map(|n| after.shard(n)).collect();
            let home = |client: SocketAddr| usize::from(client.port()) % shards;
            let mut no_room = 0;
            for memory in &memories {
                let ahead = Duration::from_secs(5);
                no_room += after.move_in(&mut tables, memory(), home, ahead, now);
            }
            assert_eq!(no_room, 300_usize.saturating_sub(room));
            let active: u32 = after
                .services()
                .flat_map(Service::servers)
                .map(|server| server.active())
                .sum();
            assert_eq!(active as usize, room.min(300));
            for shard in &mut tables {
                after.sweep(shard);
            }
            if no_room > 0 {
                continue;
            }
            for &(port, target) in &targets {
                let shard = &mut tables[usize::from(port) % shards];
                assert_eq!(goes_on(shard, port, now), target);
            }
        }
    }
}

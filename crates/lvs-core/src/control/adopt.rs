//! Connections that another process has left in memory.

use super::Control;
use crate::conn::memory::{Adoption, Memory};
use crate::conn::{ConnTable, Entry, NO_SLOT, flag};
use crate::shard::Shard;
use crate::sync::wire;
use crate::{Forwarding, Instant};

/// What was kept of a connection beside its slot is gone with the process that kept it.
const LOST: u32 = flag::CONTROLS
    | flag::TIMED
    | flag::TRACKED
    | flag::HELPED
    | flag::TOLD
    | flag::LENT
    | flag::PEER;

impl Control {
    /// As [`shard_in`](Self::shard_in), with the connections that another process has left in
    /// `memory`, whose description was read from beside it
    /// ([`Layout::from_words`](crate::memory::Layout::from_words)). They are the shard's once
    /// [`adopt`](Self::adopt) is done; services and servers are to be there before.
    pub fn shard_found(&self, number: usize, memory: Memory) -> Option<(Shard, Adoption)> {
        let (table, adoption) = ConnTable::found(self.options.max_connections, memory);
        Some((self.shard_with(number, table)?, adoption))
    }

    /// Takes over connections that were found, looking at no more than `budget` slots; call it
    /// until it returns false. They keep state, timeout and deadline. A connection goes on with
    /// the server that has its address in its service, or with none, as one that came by
    /// synchronisation; templates are made anew by the clients that come. What had a local port
    /// of the director's ends: who else has that port is not known.
    pub fn adopt(
        &self,
        shard: &mut Shard,
        adoption: &mut Adoption,
        now: Instant,
        budget: usize,
    ) -> bool {
        let keep = |entry: Entry<'_>| self.keeps(entry);
        let more = shard.adopt(adoption, now, budget, keep);
        if !more && self.settings.decides {
            // Services may be others than those of the process that kept them.
            shard.begin_review();
        }
        more
    }

    /// Gives a connection that was found its server; `false` if it is not kept.
    fn keeps(&self, entry: Entry<'_>) -> bool {
        if entry.has(flag::TEMPLATE | flag::DYING) || entry.method() == Forwarding::FullNat {
            return false;
        }
        entry.set_control(NO_SLOT);
        entry.clear(LOST);
        let found = wire::Entry {
            protocol: entry.protocol(),
            client: entry.client(),
            virt: entry.virt(),
            server: entry.server_addr(),
            flags: entry.flags(),
            state: 0,
            mark: entry.mark(),
            timeout: 0,
            sequences: None,
            engine: None,
            data: None,
        };
        let server = self.find_server(&found, found.flags);
        // With another method, its packets would leave in another way than they came.
        let server = server.filter(|server| server.forwarding() == entry.method());
        entry.set_server(server.as_ref().map_or(NO_SLOT, |server| server.id().0));
        if let Some(server) = server {
            server.bind(!entry.has(flag::INACTIVE));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use alloc::boxed::Box;
    use core::net::SocketAddr;
    use core::sync::atomic::AtomicU64;

    use crate::memory::{Memory, Region};
    use crate::*;

    fn control(server: &str) -> Control {
        let mut control = Control::new(Options {
            max_connections: 100,
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
        PacketMeta {
            hook: Hook::Local,
            tuple: Tuple {
                protocol: Protocol::TCP,
                src: SocketAddr::from(([192, 0, 2, 1], port)),
                dst: "198.51.100.1:80".parse().unwrap(),
            },
            transport: Transport::Tcp(TcpFlags(flags)),
            segment: Segment::NONE,
            mark: 0,
            len: 40,
        }
    }

    #[test]
    fn a_successor_goes_on_where_another_ended() {
        let mut before = control("10.0.0.1:80");
        let layout = before.layout();
        let sizes = [
            layout.narrow_words(),
            layout.narrow_buckets as usize,
            layout.wide_words(),
            layout.wide_buckets as usize,
            layout.overflow_words(),
        ];
        let words: [&'static [AtomicU64]; 5] =
            sizes.map(|size| &*Box::leak(bytemuck::zeroed_slice_box(size)));
        let memory = || Memory::new(layout, words.map(Region::lent)).unwrap();
        let mut shard = before.shard_in(0, memory()).unwrap();
        before.sweep(&mut shard);
        let mut targets = alloc::vec::Vec::new();
        for port in 1001..=1050 {
            for flags in [TcpFlags::SYN, TcpFlags::ACK] {
                let meta = segment(port, flags);
                let verdict = match shard.handle_packet(&meta, Instant::ZERO) {
                    Ok(verdict) => verdict,
                    Err(pending) => before.admit(&mut shard, &meta, pending, Instant::ZERO),
                };
                let Verdict::Forward(forward) = verdict else {
                    panic!("{verdict:?}")
                };
                if flags == TcpFlags::SYN {
                    targets.push(forward.target);
                }
            }
        }
        drop((before, shard));

        let mut after = control("10.0.0.1:80");
        let (mut shard, mut adoption) = after.shard_found(0, memory()).unwrap();
        let now = Instant::from_secs(10);
        while after.adopt(&mut shard, &mut adoption, now, 16) {}
        after.sweep(&mut shard);
        assert_eq!(shard.len(), 50);
        for (port, target) in (1001..=1050).zip(targets) {
            let verdict = shard.handle_packet(&segment(port, TcpFlags::ACK), now);
            let Ok(Verdict::Forward(forward)) = verdict else {
                panic!("{verdict:?}")
            };
            assert_eq!(forward.target, target);
            assert!(forward.server.is_some());
        }
    }
}

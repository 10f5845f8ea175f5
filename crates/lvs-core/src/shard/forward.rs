//! Packets from clients to servers.

use core::net::SocketAddr;

use super::Shard;
use crate::conn::{Draft, NO_SLOT, flag};
use crate::stats::Counters;
use crate::{
    ConnId, DropReason, Forward, Forwarding, Instant, PacketMeta, ServerId, Tunnel, Verdict,
};

impl Shard {
    /// A packet from the client of connection `index`.
    pub(crate) fn forward(
        &mut self,
        index: u32,
        meta: &PacketMeta<'_>,
        now: Instant,
        new: bool,
    ) -> Verdict {
        if self.table.get(index).has(flag::WATCHED) {
            self.watch_request(index, meta, now);
        }
        self.count(index, |counters| counters.count_in(meta.len));
        self.transition(index, meta, true);
        let verdict = self.transmit(index, meta, new, now);
        let slot = self.table.get(index);
        slot.count_packet();
        if self.settings.master.is_some() {
            let packets = slot.in_packets();
            self.sync_connection(index, packets, now);
        }
        self.table.restart(index, now);
        verdict
    }

    /// How a client's packet leaves.
    fn transmit(&mut self, index: u32, meta: &PacketMeta<'_>, new: bool, now: Instant) -> Verdict {
        let slot = self.table.get(index);
        let helped = slot.has(flag::HELPED);
        match slot.method() {
            Forwarding::FullNat if self.local_ports.of(index).is_none() => {
                return Verdict::Drop(DropReason::NoLocalPort);
            }
            // Whoever translates finds out that a header is too short, but not before its packet has hops left.
            Forwarding::Nat | Forwarding::FullNat => {
                if slot.has(flag::NO_CPORT) {
                    self.table.set_client_port(index, meta.tuple.src.port());
                }
                if helped {
                    return match self.help_request(index, meta, now) {
                        Ok(shift) => Verdict::Forward(Forward {
                            shift,
                            ..self.forward_of(index, new)
                        }),
                        Err(reason) => Verdict::Drop(reason),
                    };
                }
            }
            Forwarding::Tunnel if slot.server() == NO_SLOT => {
                return Verdict::Drop(DropReason::Unbound);
            }
            _ => {}
        }
        Verdict::Forward(self.forward_of(index, new))
    }

    /// The one packet of a connection that is never in the table: counted, sent, forgotten.
    pub(crate) fn forward_once(&mut self, slot: &Draft, meta: &PacketMeta<'_>) -> Verdict {
        if let Some(link) = self.link_of(slot.server) {
            self.count_for(link, Counters::count_connection);
            self.count_for(link, |counters| counters.count_in(meta.len));
        }
        Verdict::Forward(Forward {
            conn: None,
            ..self.forward_to(
                0,
                slot.method(),
                slot.server,
                slot.key.virt,
                slot.server_addr,
                true,
            )
        })
    }

    pub(crate) fn forward_of(&self, index: u32, new: bool) -> Forward {
        let entry = self.table.get(index);
        let (virt, server) = (entry.virt(), entry.server_addr());
        Forward {
            source: self.local_of(index),
            ..self.forward_to(index, entry.method(), entry.server(), virt, server, new)
        }
    }

    /// What stands for the client of connection `index` towards its server, where both ends are translated.
    #[inline]
    fn local_of(&self, index: u32) -> Option<SocketAddr> {
        match self.table.get(index).method() {
            Forwarding::FullNat => self.local_ports.of(index),
            _ => None,
        }
    }

    /// How packets to a virtual address leave for a server of this record and address.
    #[inline]
    fn forward_to(
        &self,
        index: u32,
        method: Forwarding,
        record: u32,
        virt: SocketAddr,
        server: SocketAddr,
        new: bool,
    ) -> Forward {
        Forward {
            conn: Some(ConnId(index)),
            server: (record != NO_SLOT).then_some(ServerId(record)),
            method,
            target: if method == Forwarding::Bypass {
                virt
            } else {
                server
            },
            source: None,
            virt,
            tunnel: self
                .link_of(record)
                .map_or(Tunnel::Ipip, |link| link.server.tunnel()),
            new,
            shift: None,
        }
    }
}

//! Packets from clients to servers.

use core::net::SocketAddr;

use super::Shard;
use crate::conn::{NO_SLOT, Slot, flag};
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
        let slot = self.table.get_mut(index);
        slot.in_packets = slot.in_packets.wrapping_add(1);
        if self.settings.master.is_some() {
            let packets = slot.in_packets;
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
            Forwarding::Tunnel if slot.server == NO_SLOT => {
                return Verdict::Drop(DropReason::Unbound);
            }
            _ => {}
        }
        Verdict::Forward(self.forward_of(index, new))
    }

    /// The one packet of a connection that is never in the table: counted, sent, forgotten.
    pub(crate) fn forward_once(&mut self, slot: &Slot, meta: &PacketMeta<'_>) -> Verdict {
        if let Some(link) = self.link_of(slot.server) {
            self.count_for(link, Counters::count_connection);
            self.count_for(link, |counters| counters.count_in(meta.len));
        }
        Verdict::Forward(Forward {
            conn: None,
            ..self.forward_of_slot(slot, 0, true)
        })
    }

    pub(crate) fn forward_of(&self, index: u32, new: bool) -> Forward {
        Forward {
            source: self.local_of(index),
            ..self.forward_of_slot(self.table.get(index), index, new)
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

    fn forward_of_slot(&self, slot: &Slot, index: u32, new: bool) -> Forward {
        let method = slot.method();
        Forward {
            conn: Some(ConnId(index)),
            server: (slot.server != NO_SLOT).then_some(ServerId(slot.server)),
            method,
            target: if method == Forwarding::Bypass {
                slot.virt()
            } else {
                slot.server_addr()
            },
            source: None,
            virt: slot.virt(),
            tunnel: self
                .link_of(slot.server)
                .map_or(Tunnel::Ipip, |link| link.server.tunnel()),
            new,
            shift: None,
        }
    }
}

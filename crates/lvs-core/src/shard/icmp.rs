//! ICMP errors about packets of existing connections.

use super::decide::Age;
use super::decide::{connection_tuple, is_balanced};
use super::{NeedsControl, Shard};
use crate::conn::{Key, NO_SLOT};
use crate::packet::is_ipsec;
use crate::{AcceptReason, DropReason, Forwarding, Hook, IcmpError, Instant, Tuple, Verdict};

impl Shard {
    /// The decision about an ICMP error, in the order of the hooks (`ip_vs_out_icmp`,
    /// `ip_vs_in_icmp`). The error does not change the state of its connection, and restarts no
    /// timer.
    pub(crate) fn decide_icmp_error(
        &mut self,
        error: &IcmpError,
        _now: Instant,
    ) -> Result<Verdict, NeedsControl> {
        const UNRELATED: Verdict = Verdict::Accept(AcceptReason::UnrelatedIcmp);
        if !self.dying.is_empty() && error.hook != Hook::Output {
            self.reap();
        }
        let protocol = error.inner.protocol;
        if !self.settings.serves(error.dst) || !is_balanced(protocol) {
            return Ok(UNRELATED);
        }
        let readable = error.inner_ports || is_ipsec(protocol);
        let Tuple { protocol, src, dst } = connection_tuple(error.inner);
        // The error is about a packet from a client to a server, as the server received it.
        let about_request = || {
            readable
                .then(|| self.find_reply(protocol, dst, src))
                .flatten()
        };
        // The error is about a packet to a client, as the client received it.
        let about_reply = || {
            (readable && !self.settings.backup_only)
                .then(|| {
                    self.table.find_in(&Key {
                        protocol,
                        client: dst,
                        virt: src,
                    })
                })
                .flatten()
        };
        // The order of netfilter's hooks: OUT, then IN for local delivery; IN, then OUT for packets
        // in transit.
        let out_first = error.hook != Hook::Transit;
        let (request, reply) = if out_first {
            let request = about_request();
            (
                request,
                if request.is_some() {
                    None
                } else {
                    about_reply()
                },
            )
        } else {
            let reply = about_reply();
            (
                if reply.is_some() {
                    None
                } else {
                    about_request()
                },
                reply,
            )
        };
        if let Some(index) = reply {
            return Ok(self.forward_icmp_error(index, error, Age::Known));
        }
        let may = !self.settings.backup_only && !is_ipsec(error.inner.protocol);
        let schedules = self.settings.sysctls.schedule_icmp && (request.is_none() || !out_first);
        if may && schedules {
            return Err(NeedsControl::NEW);
        }
        Ok(request.map_or(UNRELATED, |index| self.reply_icmp_error(index, error)))
    }

    /// Handles an ICMP error about a packet that the director sent to the server of connection
    /// `index`.
    pub(crate) fn reply_icmp_error(&mut self, index: u32, error: &IcmpError) -> Verdict {
        if self.table.get(index).method().translates() && !error.checksum_ok {
            return self.drop_of(index, DropReason::IcmpChecksum);
        }
        let server = self.table.get(index).server();
        self.count(server, |counters| counters.count_out(error.len));
        Verdict::Reply(self.reply_of(index))
    }

    /// Handles an ICMP error about a packet that the director sent to the client of connection
    /// `index`.
    pub(crate) fn forward_icmp_error(
        &mut self,
        index: u32,
        error: &IcmpError,
        age: Age,
    ) -> Verdict {
        let slot = self.table.get(index);
        let nat = slot.method().translates();
        let unbound = slot.method() == Forwarding::Tunnel && slot.server() == NO_SLOT;
        if nat && !error.checksum_ok {
            return self.drop_of(index, DropReason::IcmpChecksum);
        }
        self.count(slot.server(), |counters| counters.count_in(error.len));
        if !nat {
            slot.count_packet();
        }
        if unbound {
            return Verdict::Drop(DropReason::Unbound);
        }
        Verdict::Forward(self.forward_of(index, age))
    }
}

//! What other directors decide alike: connections whose server is a function of what they know, too.

use super::Control;
use crate::conn::Entry;
use crate::sched::Request;
use crate::shard::Shard;
use crate::{Forwarding, Instant};

impl Control {
    /// Whether packets that open nothing, and are of no connection that is known here, are decided
    /// by schedulers that are functions ([`Service::is_function`](crate::Service::is_function)),
    /// because another director may have had their connection: TCP segments as with the sysctl
    /// `sloppy_tcp`, SCTP as with `sloppy_sctp`, ICMP errors as with `schedule_icmp`, resets are passed
    /// on. Servers behind NAT are left out: their answers need the connection.
    pub fn set_decides(&mut self, decides: bool) {
        self.settings.decides = decides;
        self.choices_changed();
        self.changed();
    }

    /// Packets that opened nothing, of no connection that was known here, and that were put where the
    /// scheduler says ([`set_decides`](Self::set_decides)).
    pub const fn decided(&self) -> u64 {
        self.decided
    }

    /// What schedulers that are functions go by has changed.
    pub(super) fn choices_changed(&mut self) {
        if self.settings.decides {
            self.sweep_work
                .iter_mut()
                .for_each(|work| work.review = true);
        }
    }

    /// As [`choices_changed`](Self::choices_changed), of service `number`, if its scheduler is one.
    pub(super) fn choice_changed(&mut self, number: u32) {
        let service = self.services.get(&number);
        if service.is_some_and(|service| service.pool.goes_by_function()) {
            self.choices_changed();
        }
    }

    /// Goes on looking which connections are where their services' schedulers would not put them
    /// now, at no more than `budget` slots as
    /// [`Shard::connections_piece`](crate::Shard::connections_piece): they are told to other
    /// directors from now on. Call it while [`Shard::has_review`], and give packets their turn in
    /// between. A shard of another director stays as it is.
    pub fn review(&mut self, shard: &mut Shard, budget: usize, now: Instant) {
        if !self.owns(shard) {
            return;
        }
        self.sweep(shard);
        for index in shard.next_reviewed(budget) {
            if !self.is_regular(shard.conn(index), now) {
                shard.except(index, now);
            }
        }
    }

    /// Whether a connection is where a packet of it would be put now that came to a director which
    /// does not know it.
    fn is_regular(&mut self, slot: Entry<'_>, now: Instant) -> bool {
        let (protocol, client, virt) = (slot.protocol(), slot.client(), slot.virt());
        let Some(number) = self.find_service(slot.mark(), protocol, virt) else {
            return false;
        };
        let decided = self.filters.decide(number, client.ip());
        if decided.is_some_and(|decided| !decided.taken()) {
            return false;
        }
        let Some(service) = self.services.get_mut(&number) else {
            return false;
        };
        if !service.is_function() || virt.port() != service.key.port() {
            return false;
        }
        let request = Request {
            client,
            virt,
            protocol,
            flags: service.config.flags,
            now,
        };
        let chosen = service.pool.pick(&request);
        chosen.is_some_and(|server| {
            let (addr, is) = (server.addr(), slot.server_addr());
            is_found_again(server.forwarding())
                && server.forwarding() == slot.method()
                && addr.ip() == is.ip()
                && [0, is.port()].contains(&addr.port())
        })
    }
}

/// Whether a director that has no connection can do something with its packets.
pub(super) const fn is_found_again(method: Forwarding) -> bool {
    matches!(method, Forwarding::Route | Forwarding::Tunnel)
}

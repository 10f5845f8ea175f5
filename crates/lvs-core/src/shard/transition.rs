//! What a packet does to its connection: state, timeout, counts.

use core::sync::atomic::Ordering;

use super::{ServerLink, Shard};
use crate::conn::{Direction, NO_SLOT, State, flag, sctp_next, tcp_next};
use crate::stats::Counters;
use crate::{PacketMeta, Protocol, Transport};

impl Shard {
    /// The state machine, the timeout that goes with the new state, and the active and inactive counts.
    #[inline]
    pub(super) fn transition(&mut self, index: u32, meta: &PacketMeta<'_>, input: bool) {
        let slot = self.table.get(index);
        let protocol = slot.protocol();
        let direction = match (input, slot.has(flag::NO_OUTPUT)) {
            (true, false) => Direction::Input,
            (true, true) => Direction::InputOnly,
            (false, _) => Direction::Output,
        };
        let next = match meta.transport {
            // A connection of another protocol that IPsec packets follow.
            _ if protocol != meta.tuple.protocol => return,
            Transport::Tcp(flags) => {
                if !input {
                    slot.clear(flag::NO_OUTPUT);
                }
                tcp_next(self.settings.secure, direction, flags, slot.state())
            }
            Transport::Sctp(chunk) => {
                if !input {
                    slot.clear(flag::NO_OUTPUT);
                }
                sctp_next(direction, chunk, slot.state())
            }
            // The kernel does not read it here: a short one is as good.
            Transport::Udp(_) => State::NONE,
            Transport::Short { .. } if protocol == Protocol::UDP => State::NONE,
            Transport::Short { .. } | Transport::Other => return,
        };
        slot.set_timeout(self.settings.timeouts.of(protocol, next));
        let changed = next != slot.state();
        if changed {
            slot.set_state(next);
        }
        let assures = match protocol {
            Protocol::UDP => !input,
            _ => changed && next.assures(protocol),
        };
        let controlled = slot.control() != NO_SLOT;
        let active = next.is_active(protocol);
        if changed && active == slot.has(flag::INACTIVE) && slot.server() != NO_SLOT {
            if active {
                slot.clear(flag::INACTIVE);
            } else {
                slot.set(flag::INACTIVE);
            }
            if let Some(link) = self.link(index) {
                link.server.set_active(active);
            }
        }
        if assures && controlled {
            self.assure(index);
        }
    }

    /// Lets the template of a connection survive the end of its connections by force.
    fn assure(&mut self, index: u32) {
        if let Some(Some(template)) = self.templates.get(index) {
            template.assured.store(true, Ordering::Relaxed);
        }
    }

    /// Counts for the server, its service and the total, while the server is configured (`ip_vs_in_stats`).
    #[inline]
    pub(crate) fn count(&self, index: u32, count: impl Fn(&Counters)) {
        if let Some(link) = self.link(index) {
            self.count_for(link, count);
        }
    }

    pub(super) fn count_for(&self, link: &ServerLink, count: impl Fn(&Counters)) {
        if !link.server.is_available() {
            return;
        }
        count(&link.counters);
        if let Some(service) = &link.service {
            count(service);
        }
        count(&self.total);
    }
}

//! Source hashing (`ip_vs_sh`).

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{About, AtZero, HashSlot};
use crate::hash::{fold, hash_32};
use crate::{Protocol, Request, Scheduler, Server, ServiceFlags};

const BITS: u32 = 8;
const SLOTS: u32 = 1 << BITS;

pub(super) const ABOUT: About = About {
    name: "sh",
    summary: "hash of the source address",
    at_zero: AtZero::RefusesWithoutFallback,
    flags: &[
        ("sh-fallback", ServiceFlags::SCHED1),
        ("sh-port", ServiceFlags::SCHED2),
    ],
    goes_by_order: true,
    make: || Box::<SourceHashing>::default(),
    ..About::USUAL
};

/// Chooses the server by a hash of the client's address; with `sh-port`, of its address and port.
///
/// If the chosen server cannot accept connections, the connection is refused, or with `sh-fallback`
/// assigned to another server.
#[derive(Clone, Debug, Default)]
pub struct SourceHashing {
    /// The server of each slot, as an index into the list of servers; empty without servers.
    table: Vec<u32>,
}

impl SourceHashing {
    /// Assigns the slots to the servers in turn; each server gets as many consecutive slots as its
    /// weight. A server with weight 0 gets one slot.
    fn assign(&mut self, servers: &[Arc<Server>]) {
        self.table.clear();
        let mut turn = (0u32..).zip(servers).cycle();
        while self.table.len() < SLOTS as usize {
            let Some((index, server)) = turn.next() else {
                return;
            };
            let row = usize::try_from(server.weight().max(1)).unwrap_or(1);
            let left = SLOTS as usize - self.table.len();
            self.table
                .extend(core::iter::repeat_n(index, row.min(left)));
        }
    }
}

impl Scheduler for SourceHashing {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(self.clone()))
    }

    fn pick(&mut self, servers: &[Arc<Server>], request: &Request) -> Option<usize> {
        let key = client_key(request);
        let slot = |offset: u32| {
            let slot = offset.wrapping_add(hash_32(key, BITS)) % SLOTS;
            self.table.get(slot as usize).map(|&index| index as usize)
        };
        probe(servers, request, SLOTS, hash_32(key, BITS), slot)
    }

    fn slot(&self, request: &Request) -> Option<HashSlot> {
        Some(HashSlot {
            number: hash_32(client_key(request), BITS),
            of: SLOTS,
        })
    }

    fn start(&mut self, servers: &[Arc<Server>]) {
        self.assign(servers);
    }

    fn server_added(&mut self, servers: &[Arc<Server>]) {
        self.assign(servers);
    }

    fn server_removed(&mut self, servers: &[Arc<Server>], _: usize) {
        self.assign(servers);
    }

    fn server_edited(&mut self, servers: &[Arc<Server>], _: usize) {
        self.assign(servers);
    }
}

/// Returns the client's address as a number. For TCP, UDP and SCTP, the port is added if the
/// service's second flag is set (`sh-port`, `mh-port`).
pub(super) fn client_key(request: &Request) -> u32 {
    let ported = matches!(
        request.protocol,
        Protocol::TCP | Protocol::UDP | Protocol::SCTP
    );
    let port = if ported && request.flags.has(ServiceFlags::SCHED2) {
        request.client.port()
    } else {
        0
    };
    fold(request.client.ip()).wrapping_add(u32::from(port))
}

/// Tries the slot at offset 0. If the server of this slot cannot accept a connection, and the
/// service has the fallback flag (`SCHED1`), tries all `slots` offsets once, beginning with `first`
/// (`ip_vs_sh_get_fallback`, `ip_vs_mh_get_fallback`).
pub(super) fn probe(
    servers: &[Arc<Server>],
    request: &Request,
    slots: u32,
    first: u32,
    slot: impl Fn(u32) -> Option<usize>,
) -> Option<usize> {
    let index = slot(0)?;
    if servers.get(index)?.is_usable() {
        return Some(index);
    }
    // Without this check, a service without usable servers would cost a walk over the table for
    // each packet.
    if !request.flags.has(ServiceFlags::SCHED1) || !servers.iter().any(|server| server.is_usable())
    {
        return None;
    }
    for offset in 0..slots {
        let index = slot((offset + first) % slots)?;
        if servers.get(index)?.is_usable() {
            return Some(index);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::tests::{clients, letters, pool};

    #[test]
    fn sh_assigns_as_many_consecutive_slots_as_the_weight() {
        let pool = pool("sh", &[1, 2, 0]);
        let mut scheduler = SourceHashing::default();
        scheduler.assign(pool.servers());
        let letters: std::string::String = scheduler.table[..16]
            .iter()
            .map(|&index| ['C', 'B', 'A'][index as usize])
            .collect();
        assert_eq!(letters, "CBBACBBACBBACBBA");
    }

    #[test]
    fn sh_maps_clients_as_the_kernel_does() {
        let mut pool = pool("sh", &[1, 2, 1]);
        let flags = ServiceFlags::default;
        let (ports, fallback) = (ServiceFlags::SCHED2, ServiceFlags::SCHED1);
        assert_eq!(
            letters(&mut pool, clients(flags())),
            "BCBCBABABBCBCBABABBCBCBA"
        );
        assert_eq!(
            letters(&mut pool, clients(ServiceFlags(ports))),
            "AAABBBBCCCAABBBBCCCAABBB"
        );
        pool.servers()[1].overload_for_test();
        assert_eq!(
            letters(&mut pool, clients(flags())),
            "-C-C-A-A--C-C-A-A--C-C-A"
        );
        assert_eq!(
            letters(&mut pool, clients(ServiceFlags(fallback))),
            "CCCCAAAAACCCCCAAAACCCCCA"
        );
    }
}

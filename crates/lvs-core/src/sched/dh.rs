//! Destination hashing (`ip_vs_dh`).

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{About, AtZero, HashSlot, Weights};
use crate::hash::{fold, hash_32};
use crate::{Request, Scheduler, Server};

const BITS: u32 = 8;

pub(super) const ABOUT: About = About {
    name: "dh",
    summary: "hash of the destination address",
    weights: Weights::Ignored,
    at_zero: AtZero::Refuses,
    goes_by_order: true,
    make: || Box::<DestinationHashing>::default(),
    ..About::USUAL
};

/// Chooses the server by a hash of the destination address, for services with many destination
/// addresses (such as a firewall-mark service in front of web caches).
///
/// A weight of 0 excludes a server; other weights have no effect. If the chosen server cannot
/// accept the connection, the connection is refused.
#[derive(Clone, Debug, Default)]
pub struct DestinationHashing {
    /// The server of each slot, as an index into the list of servers; empty without servers.
    table: Vec<u32>,
}

impl DestinationHashing {
    fn assign(&mut self, servers: &[Arc<Server>]) {
        self.table.clear();
        let indices = 0..u32::try_from(servers.len()).unwrap_or(u32::MAX);
        self.table.extend(indices.cycle().take(1 << BITS));
    }
}

impl Scheduler for DestinationHashing {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(self.clone()))
    }

    fn pick(&mut self, servers: &[Arc<Server>], request: &Request) -> Option<usize> {
        let slot = hash_32(fold(request.virt.ip()), BITS);
        let index = *self.table.get(slot as usize)? as usize;
        servers.get(index)?.is_usable().then_some(index)
    }

    fn slot(&self, request: &Request) -> Option<HashSlot> {
        Some(HashSlot {
            number: hash_32(fold(request.virt.ip()), BITS),
            of: 1 << BITS,
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
}

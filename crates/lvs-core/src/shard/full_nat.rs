//! Connections of full NAT: with an address and a port of the director's towards the server.

use alloc::sync::Arc;
use core::net::IpAddr;

use super::Shard;
use crate::conn::{Draft, Template};
use crate::{DropReason, Instant, LocalAddress};

impl Shard {
    /// Puts a connection that is translated at both ends into the table, with a port of the
    /// director's.
    pub(crate) fn open_full_nat(
        &mut self,
        slot: Draft,
        template: Option<(u32, Arc<Template>)>,
        pool: &Arc<[LocalAddress]>,
        now: Instant,
    ) -> Result<u32, DropReason> {
        let (protocol, server) = (slot.key.protocol, slot.server_addr);
        let taken = self
            .local_ports
            .take(protocol, server, pool, &self.table, now)
            .ok_or(DropReason::NoLocalPort)?;
        let Some(index) = self.open(slot, template, now) else {
            self.local_ports.give_back(protocol, server, taken, now);
            return Err(DropReason::TableFull);
        };
        self.local_ports.bind(index, taken, &self.table);
        Ok(index)
    }

    /// Connections that a local address stands for the clients of.
    pub fn local_connections(&self, addr: IpAddr) -> u64 {
        self.local_ports.connections(addr)
    }

    /// Local addresses that connections use, in the pool or not any more.
    pub fn local_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.local_ports.in_use()
    }
}

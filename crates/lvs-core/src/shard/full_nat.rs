//! Connections with full NAT: towards the server, they have an address and a port of the director
//! (local address, local port).

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use core::iter;
use core::net::IpAddr;

use super::{LocalChange, LocalEnd, Shard};
use crate::conn::{Draft, Template};
use crate::full_nat::LocalAddress;
use crate::{DropReason, Instant};

impl Shard {
    /// Adds a connection with full NAT to the table, and reserves a local port for it.
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
        self.record_local_change(index, LocalChange::Bound);
        Ok(index)
    }

    /// Whether a local port is available for a connection with full NAT.
    pub(crate) fn has_local_port(&self, slot: &Draft, pool: &[LocalAddress], now: Instant) -> bool {
        let (protocol, server) = (slot.key.protocol, slot.server_addr);
        let ports = &self.local_ports;
        ports.has_free(protocol, server, pool, &self.table, now)
    }

    /// Starts to record changes of local addresses and ports. The caller must then call
    /// [`local_changes`](Self::local_changes) regularly.
    pub fn follow_local_ends(&mut self) {
        self.local_changes.get_or_insert_default();
    }

    /// Number of recorded changes that the caller has not read yet.
    pub fn local_changes_len(&self) -> usize {
        self.local_changes.as_ref().map_or(0, VecDeque::len)
    }

    /// Returns the changes of connections' local addresses and ports in their order: a later
    /// connection may use the slot of an earlier one. Connections in the table's overflow cannot be
    /// offloaded, and are omitted. Changes that the caller does not consume remain stored.
    pub fn local_changes(&mut self) -> impl Iterator<Item = LocalChange> + '_ {
        iter::from_fn(|| self.local_changes.as_mut()?.pop_front())
    }

    /// Records a change of the local address and port of connection `index` for
    /// [`local_changes`](Self::local_changes). Has no effect if the caller does not read changes,
    /// or if the connection is in the overflow.
    pub(super) fn record_local_change(
        &mut self,
        index: u32,
        change: impl FnOnce(LocalEnd) -> LocalChange,
    ) {
        // The kernel fast path, for which changes are recorded, does not read the overflow.
        if self.local_changes.is_none() || !self.table.is_in_place(index) {
            return;
        }
        let end = self.local_end(index);
        if let (Some(all), Some(end)) = (&mut self.local_changes, end) {
            all.push_back(change(end));
        }
    }

    /// Number of connections that use a local address.
    pub fn local_connections(&self, addr: IpAddr) -> u64 {
        self.local_ports.connections(addr)
    }

    /// Local addresses that connections use, including addresses that are no longer in the pool.
    pub fn local_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.local_ports.in_use()
    }
}

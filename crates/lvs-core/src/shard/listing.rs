//! Lists the connections of a shard.

use alloc::vec::Vec;
use core::net::SocketAddr;
use core::ops::Range;
use core::time::Duration;

use super::Shard;
use crate::conn::{Key, flag};
use crate::{ConnId, Forwarding, Instant, Protocol};

/// A connection in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Identity of the connection in its shard.
    pub id: ConnId,
    /// TCP, UDP or SCTP; 0 for a template of a firewall mark.
    pub protocol: Protocol,
    /// The client's address and port; port 0 if the port is not known, and for a template.
    pub client: SocketAddr,
    /// Virtual address and port of the connection.
    pub virt: SocketAddr,
    /// Real server's address and port.
    pub server: SocketAddr,
    /// State, with the kernel's name.
    pub state: &'static str,
    /// Time until the entry expires.
    pub expires: Duration,
    /// Forwarding method of the connection.
    pub method: Forwarding,
    /// Whether the entry is a persistence template.
    pub template: bool,
    /// Whether the entry arrived in a synchronisation message or in an update of a peer.
    pub synced: bool,
}

impl Shard {
    /// Lists connections from slot `start` on.
    pub fn connections_from(
        &self,
        start: usize,
        now: Instant,
    ) -> impl Iterator<Item = Connection> + '_ {
        self.connections_in(start..self.slots(), now)
    }

    /// Number of slots that may contain connections.
    pub const fn slots(&self) -> usize {
        self.table.slots_len()
    }

    /// Lists connections from slot `from` on, and returns the slot at which the next call
    /// continues; `None` at the end. `budget` bounds the number of visited slots, so that each call
    /// takes a short time, whether the table is full or empty: a connection counts as 16 free
    /// slots.
    pub fn connections_piece(
        &self,
        from: usize,
        budget: usize,
        now: Instant,
    ) -> (Vec<Connection>, Option<usize>) {
        let (indices, next) = self.table.piece(from, budget);
        let connections = indices.into_iter();
        let piece = connections.map(|index| self.connection(index, now));
        (piece.collect(), next)
    }

    /// Lists the connections in these slots of the table. The slots have the numbers from 0 to
    /// [`slots`](Self::slots), exclusive; higher numbers are ignored.
    pub fn connections_in(
        &self,
        slots: Range<usize>,
        now: Instant,
    ) -> impl Iterator<Item = Connection> + '_ {
        let indices = self.table.indices(slots);
        indices.map(move |index| self.connection(index, now))
    }

    fn connection(&self, index: u32, now: Instant) -> Connection {
        let slot = self.table.get(index);
        Connection {
            id: ConnId(index),
            protocol: slot.protocol(),
            client: slot.client(),
            virt: slot.virt(),
            server: slot.server_addr(),
            state: slot.state().name(slot.protocol()),
            expires: slot.expires().saturating_since(now),
            method: slot.method(),
            template: false,
            synced: slot.has(flag::SYNC),
        }
    }

    /// Whether a packet from `source` to `client` would be a reply of an existing connection.
    pub fn contains_reply(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
    ) -> bool {
        self.find_reply(protocol, source, client).is_some()
    }

    /// The connection to which packets from `client` to `virt` belong; `None` if there is none.
    pub fn lookup(
        &self,
        protocol: Protocol,
        client: SocketAddr,
        virt: SocketAddr,
        now: Instant,
    ) -> Option<Connection> {
        let index = self.table.find_in(&Key {
            protocol,
            client,
            virt,
        })?;
        let index = usize::try_from(index).ok()?;
        self.connections_from(index, now).next()
    }
}

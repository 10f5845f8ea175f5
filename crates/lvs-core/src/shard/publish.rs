//! Connections whose packets a program in the kernel may forward, out of the same memory.

use core::net::SocketAddr;

use super::Shard;
use crate::conn::{NO_SLOT, State, flag};
use crate::{ConnId, Forwarding, Protocol};

/// With these, a packet may change more of its connection than counters and the deadline, or be changed itself.
const INVOLVED: u32 = flag::OUT_SEQ
    | flag::IN_SEQ
    | flag::NO_CPORT
    | flag::TEMPLATE
    | flag::ONE_PACKET
    | flag::CONTROLS
    | flag::WATCHED
    | flag::HELPED
    | flag::DYING;

/// A connection that could be published: what somebody else has to find ways out for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Client.
    pub client: SocketAddr,
    /// Virtual address and port.
    pub virt: SocketAddr,
    /// Real server.
    pub server: SocketAddr,
    /// Forwarding method.
    pub method: Forwarding,
    /// The number of the server's record.
    pub record: u32,
}

impl Shard {
    /// Whether a connection has had so many packets from its client that it is worth to be published, and is not in
    /// this epoch. 0 is no epoch.
    #[inline]
    pub fn is_ripe(&self, conn: ConnId, packets: u32, epoch: u16) -> bool {
        let entry = self.table.get(conn.0);
        epoch != 0
            && entry.in_packets() >= packets
            && !(entry.is_live() && entry.epoch() == epoch)
            && entry.flags() & INVOLVED == 0
    }

    /// How many packets of a client's a connection has had.
    #[inline]
    pub fn packets_of(&self, conn: ConnId) -> u32 {
        self.table.get(conn.0).in_packets()
    }

    /// What there is to know of a connection that could be published; `None` if its next packets may be more than
    /// counted: it is not established, has no server, others have the same addresses and ports, a helper or a master's
    /// backup wants to see it, or the settings make it something else. Of a shard that is swept.
    pub fn offer(&self, conn: ConnId) -> Option<Offer> {
        if !self.table.is_used(conn.0) {
            return None;
        }
        let entry = self.table.get(conn.0);
        let (protocol, method) = (entry.protocol(), entry.method());
        let (client, virt) = (entry.client(), entry.virt());
        let still = match protocol {
            Protocol::TCP => entry.state() == State::TCP_ESTABLISHED,
            // An answer to a persistent client assures its template.
            Protocol::UDP => entry.state() == State::NONE && entry.control() == NO_SLOT,
            _ => false,
        };
        let plain = match method {
            Forwarding::Nat => !entry.has(flag::NO_OUTPUT),
            Forwarding::Route => true,
            _ => false,
        };
        let ours = [client, virt]
            .iter()
            .any(|end| self.local_ports.is_used(end.ip()));
        let settings = &self.settings;
        let elsewhere = settings.master.is_some()
            || settings.backup_only
            || settings.heeds_servers() && self.links.is_masqueraded(protocol, client);
        let link = self.link(conn.0)?;
        let served = settings.serves(client.ip()) && link.server.is_available();
        let offered = still
            && plain
            && self.table.is_in_place(conn.0)
            && served
            && !ours
            && !elsewhere
            && client.port() != 0
            && entry.flags() & INVOLVED == 0;
        offered.then(|| Offer {
            protocol,
            client,
            virt,
            server: entry.server_addr(),
            method,
            record: entry.server(),
        })
    }

    /// Lets a program that reads the table's memory forward the packets of a connection, as long as `epoch` is in force.
    /// `client_hop` is the program's index of the way to the client; without one it asks for each reply. `false` if the
    /// connection is not one for it: it has ended, or others have the same addresses and ports.
    ///
    /// Whatever changes the connection's state is decided here all the same: the program hands such packets up.
    pub fn publish(&mut self, conn: ConnId, epoch: u16, client_hop: Option<u16>) -> bool {
        if !self.table.is_used(conn.0) {
            return false;
        }
        let entry = self.table.get(conn.0);
        entry.set_next_hop(client_hop);
        entry.publish(epoch);
        entry.is_live()
    }

    /// From now on the packets of a connection come to userspace.
    pub fn withdraw(&mut self, conn: ConnId) {
        if self.table.is_used(conn.0) {
            self.table.get(conn.0).withdraw();
        }
    }

    /// Withdraws all connections from slot `from` on, looking at no more than `budget` slots; gives the slot from which to
    /// go on.
    pub fn withdraw_piece(&mut self, from: usize, budget: usize) -> Option<usize> {
        let (handles, next) = self.table.piece(from, budget);
        for handle in handles {
            let entry = self.table.get(handle);
            if entry.is_live() {
                entry.withdraw();
            }
        }
        next
    }

    /// Whether a program in the kernel may forward the packets of a connection.
    pub fn is_published(&self, conn: ConnId) -> bool {
        self.table.is_used(conn.0) && self.table.get(conn.0).is_live()
    }

    /// Whether the shard's copies are out of date, and a sweep is due.
    pub fn is_behind(&self) -> bool {
        self.is_stale()
    }
}

//! Settings of full NAT, and the choice of connections that use it. With full NAT, the director
//! also translates the client's address, so that replies return to the director whatever routes the
//! servers have. IPVS has no such method.

use super::Control;
use super::admit::Packets;
use super::check;
use crate::conn::flag;
use crate::full_nat::LocalAddress;
pub(super) use crate::prefix::prefixes;
use crate::{Error, Family, Forwarding, Prefix, Server};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::IpAddr;

/// Settings of full NAT, and the director's networks.
#[derive(Debug, Default)]
pub(crate) struct FullNat {
    /// The local addresses: the addresses of the director that replace clients' addresses.
    pub(crate) pool: Arc<[LocalAddress]>,
    /// Whether the director also translates the client's address of NAT connections whose replies
    /// would bypass it.
    hairpin: bool,
    /// Networks on the director's links: hosts in one of them reach each other directly.
    networks: Vec<Prefix>,
    /// Number of full NAT servers in services of IPv4 and of IPv6.
    servers: [usize; 2],
}

impl FullNat {
    pub(crate) const fn servers(&self, family: Family) -> usize {
        self.servers[family as usize]
    }

    /// Updates the count after a change of a service of this family from `before` to `after`
    /// servers of full NAT.
    pub(crate) const fn count(&mut self, family: Family, before: usize, after: usize) {
        let all = &mut self.servers[family as usize];
        *all = *all - before + after;
    }

    pub(crate) fn serves(&self, family: Family) -> bool {
        self.pool
            .iter()
            .any(|local| Family::of(&local.addr) == family)
    }
}

impl Control {
    /// The local addresses of full NAT, and whether NAT also translates the client's address if
    /// replies would bypass the director (hairpin).
    pub fn local_pool(&self) -> (&[LocalAddress], bool) {
        (&self.full_nat.pool, self.full_nat.hairpin)
    }

    /// Replaces the local addresses, and the setting whether NAT also translates the client's
    /// address if replies would bypass the director (hairpin). Existing connections keep their
    /// local ports.
    ///
    /// # Errors
    /// [`Error::LocalAddressNeeded`] if no address remains for a family in which servers use full
    /// NAT, or for hairpin connections.
    pub fn set_local_pool(&mut self, pool: Vec<LocalAddress>, hairpin: bool) -> Result<(), Error> {
        let serves = |family| pool.iter().any(|local| Family::of(&local.addr) == family);
        check::local_pool(self, serves, hairpin)?;
        self.full_nat.pool = pool.into();
        self.full_nat.hairpin = hairpin;
        Ok(())
    }

    /// Sets the networks of the host, as prefixes: a client and a server in the same network reach
    /// each other without the director.
    pub fn set_networks(&mut self, networks: Vec<(IpAddr, u8)>) {
        self.full_nat.networks = prefixes(networks);
    }

    /// The flags of a connection to `server`. NAT replaces full NAT if the server is the director
    /// itself. Full NAT replaces NAT if hairpin is enabled and replies would bypass the director,
    /// except for a one-packet connection.
    pub(super) fn translated_flags(
        &self,
        server: &Server,
        client: IpAddr,
        packets: Packets,
        flags: u32,
    ) -> u32 {
        let method = |method: Forwarding| flags & !flag::METHOD | method as u32;
        let local = || self.is_local(server.addr().ip());
        match server.forwarding() {
            // The server is this host. With full NAT, the client's address would also be an address
            // of this host, and the replies would never leave the loopback interface.
            Forwarding::FullNat if local() => method(Forwarding::Nat),
            Forwarding::Nat
                if self.full_nat.hairpin
                    && packets == Packets::Any
                    && !local()
                    && self.bypasses(server, client) =>
            {
                method(Forwarding::FullNat)
            }
            _ => flags,
        }
    }

    /// Whether packets from `server` to `client` would bypass the director: both are in one
    /// network, or the client is itself a server of the service.
    fn bypasses(&self, server: &Server, client: IpAddr) -> bool {
        let entry = self.records.get(server.id().index());
        let service = entry.and_then(|entry| self.services.get(&entry.service));
        let mut peers = service.into_iter().flat_map(|service| service.servers());
        let mut networks = self.full_nat.networks.iter();
        let server = server.addr().ip();
        peers.any(|peer| peer.addr().ip() == client)
            || networks.any(|network| network.contains(server) && network.contains(client))
    }
}

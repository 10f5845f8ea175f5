//! The links of a shard to all servers.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::SocketAddr;

use crate::stats::Counters;
use crate::{Protocol, Server};

/// A server's record, and this shard's counters of the server.
#[derive(Clone, Debug)]
pub(crate) struct ServerLink {
    pub(crate) server: Arc<Server>,
    pub(crate) counters: Arc<Counters>,
    /// Counters of the server's service; `None` for a removed server.
    pub(crate) service: Option<Arc<Counters>>,
}

/// The links to all servers, by the numbers of their records.
#[derive(Debug, Default)]
pub(crate) struct Links {
    links: Vec<Option<ServerLink>>,
    /// Number of changes of records that were applied.
    seen: Option<u64>,
    /// Whether decisions depend on which addresses are servers behind NAT.
    heeded: bool,
    /// Translated addresses by record, with the protocol of their service or 0 for any.
    translated: BTreeMap<u32, (SocketAddr, u8)>,
    /// Masqueraded servers by address, with the number of records.
    masqueraded: BTreeMap<(SocketAddr, u8), u32>,
}

/// A link, with its server's address and its service's protocol (0 for any) if the server is behind
/// NAT.
type NewLink = Option<(ServerLink, Option<(SocketAddr, u8)>)>;

impl Links {
    #[inline]
    pub(super) fn get(&self, place: u32) -> Option<&ServerLink> {
        self.links.get(place as usize)?.as_ref()
    }

    /// Number of changes of records that are applied; `None` before the first.
    pub(crate) const fn seen(&self) -> Option<u64> {
        self.seen
    }

    /// Records that this number of changes is applied.
    pub(crate) const fn has_seen(&mut self, changes: u64) {
        self.seen = Some(changes);
    }

    /// Sets whether decisions depend on which addresses are servers behind NAT. After a change, all
    /// servers must be read again.
    pub(crate) fn heed(&mut self, heeded: bool) {
        if self.heeded != heeded {
            self.heeded = heeded;
            self.seen = None;
        }
    }

    /// Replaces the link to the record with the index `place`.
    pub(crate) fn set(&mut self, place: u32, link: NewLink) {
        let index = place as usize;
        if self.links.len() <= index {
            self.links.resize_with(index + 1, || None);
        }
        let (link, addr) = link.unzip();
        self.links[index] = link;
        if self.heeded {
            self.masquerade(place, addr.flatten());
        }
    }

    /// Replaces all links.
    pub(crate) fn replace(&mut self, links: Vec<NewLink>) {
        self.links.clear();
        self.translated.clear();
        self.masqueraded.clear();
        for (place, link) in (0..).zip(links) {
            self.set(place, link);
        }
    }

    fn masquerade(&mut self, place: u32, addr: Option<(SocketAddr, u8)>) {
        let before = match addr {
            Some(addr) => self.translated.insert(place, addr),
            None => self.translated.remove(&place),
        };
        if before == addr {
            return;
        }
        if let Some(before) = before
            && let Some(count) = self.masqueraded.get_mut(&before)
        {
            *count -= 1;
            if *count == 0 {
                self.masqueraded.remove(&before);
            }
        }
        if let Some(addr) = addr {
            *self.masqueraded.entry(addr).or_default() += 1;
        }
    }

    /// Whether `addr` is a server behind NAT of a service for `protocol` or for every protocol
    /// (`ip_vs_has_real_service`).
    pub(super) fn is_masqueraded(&self, protocol: Protocol, addr: SocketAddr) -> bool {
        [protocol.0, 0]
            .iter()
            .any(|&of| self.masqueraded.contains_key(&(addr, of)))
    }
}

//! A shard's references to the records of all servers.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::SocketAddr;

use crate::stats::Counters;
use crate::{Protocol, Server};

/// A shard's references to the record of a server, and to counters that the server's packets
/// change.
#[derive(Clone, Debug)]
pub(crate) struct ServerLink {
    pub(crate) server: Arc<Server>,
    pub(crate) counters: Arc<Counters>,
    /// Counters of the server's service; `None` if the service was deleted.
    pub(crate) service: Option<Arc<Counters>>,
}

/// The references of a shard to all servers, by the numbers of their records.
#[derive(Debug, Default)]
pub(crate) struct Links {
    links: Vec<Option<ServerLink>>,
    /// Number of logged changes of records that this shard has applied.
    seen: Option<u64>,
    /// Whether any decision depends on which addresses belong to servers with NAT.
    heeded: bool,
    /// For each record of a server with NAT: the address of the server, and the protocol of its
    /// service or 0 for any.
    translated: BTreeMap<u32, (SocketAddr, u8)>,
    /// Number of records for each address and protocol of servers with NAT.
    masqueraded: BTreeMap<(SocketAddr, u8), u32>,
}

/// A link. If the server uses NAT, also its address and the protocol of its service (0 for any).
type NewLink = Option<(ServerLink, Option<(SocketAddr, u8)>)>;

impl Links {
    #[inline]
    pub(super) fn get(&self, place: u32) -> Option<&ServerLink> {
        self.links.get(place as usize)?.as_ref()
    }

    /// Number of applied changes of records; `None` if all links must be set.
    pub(crate) const fn seen(&self) -> Option<u64> {
        self.seen
    }

    /// Sets the number of applied changes of records.
    pub(crate) const fn has_seen(&mut self, changes: u64) {
        self.seen = Some(changes);
    }

    /// Sets whether any decision depends on which addresses belong to servers with NAT. After a
    /// change of this value, the caller must set all links again.
    pub(crate) fn heed(&mut self, heeded: bool) {
        if self.heeded != heeded {
            self.heeded = heeded;
            self.seen = None;
        }
    }

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

    /// Whether `addr` is a server with NAT in a service for `protocol` or for all protocols
    /// (`ip_vs_has_real_service`).
    pub(super) fn is_masqueraded(&self, protocol: Protocol, addr: SocketAddr) -> bool {
        [protocol.0, 0]
            .iter()
            .any(|&of| self.masqueraded.contains_key(&(addr, of)))
    }
}

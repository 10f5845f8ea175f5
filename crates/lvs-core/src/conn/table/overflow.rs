//! Entries without a free slot in their buckets, and entries that match the same packets as other
//! entries.
//!
//! The buckets of an entry depend only on its client. If one client port has connections to many
//! virtual addresses, or through many virtual addresses to one server, their entries would fill the
//! buckets. The overflow finds such entries by the hash of the whole tuple, in a bounded number of
//! steps ([`Index`]). Among equal entries, the index refers to the newest, and each has links to
//! the next older and newer one. A client can make thousands of equal entries, and they do not slow
//! down a look-up. An entry in a bucket is in this index, too, while there are equal entries.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use super::hash::sip13;
use super::index::Index;
use super::slot::{Entry, narrow, protocol_part, wide, wide_identity, wire};
use crate::Protocol;
use crate::conn::NO_SLOT;

/// The direction of the packets by which an entry is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Packets from the client to the virtual address, and replies of connections that are not
    /// translated.
    In,
    /// Packets from a server behind NAT to the client. Replies of full NAT are sent to a local
    /// address, never to a client.
    Out,
}

impl Side {
    pub(super) const BOTH: [Self; 2] = [Self::In, Self::Out];

    /// The value that the index contains for this side of the entry `handle`.
    const fn reference(self, handle: u32) -> u32 {
        handle << 1 | self as u32
    }

    const fn of(reference: u32) -> (u32, Self) {
        let side = if reference & 1 == 0 {
            Self::In
        } else {
            Self::Out
        };
        (reference >> 1, side)
    }

    /// The address and port that identify the entry for the packets of this side, in addition to
    /// the client: the virtual address or the real server.
    pub(super) fn peer(self, entry: Entry<'_>) -> SocketAddr {
        match self {
            Self::In => entry.virt(),
            Self::Out => entry.server_addr(),
        }
    }
}

/// For an entry with equal entries: the next older and the next newer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tie {
    older: u32,
    newer: u32,
}

impl Tie {
    const NONE: Self = Self {
        older: NO_SLOT,
        newer: NO_SLOT,
    };
}

/// Index, ties and free slots of the overflow. The entries themselves are in the table's memory.
#[derive(Debug)]
pub(super) struct Overflow {
    index: Index,
    /// For each entry that has equal entries: the next older and the next newer one. The keys are
    /// [references](Side::reference).
    ties: BTreeMap<u32, Tie>,
    keys: [u64; 2],
    free: Vec<u32>,
    /// Number of slots that are in use, or were used before.
    used: u32,
    slots: u32,
    /// Number of entries in the overflow for each first bucket. The key is whether the bucket has
    /// narrow slots, and the number of the bucket.
    pub(super) homes: BTreeMap<(bool, usize), u32>,
    /// Incremented for each entry that is inserted into the overflow or changed in it.
    pub(super) sequence: u64,
}

impl Overflow {
    pub(super) fn new(slots: u32, keys: [u64; 2]) -> Self {
        Self {
            // An entry has two sides, and an entry outside the overflow may be in the index as
            // well.
            index: Index::new(2 * slots as usize),
            ties: BTreeMap::new(),
            keys: [keys[0] ^ 0x6f76_6572_666c_6f77, keys[1]],
            free: Vec::new(),
            used: 0,
            slots,
            homes: BTreeMap::new(),
            sequence: 0,
        }
    }

    pub(super) const fn used(&self) -> u32 {
        self.used
    }

    /// Marks the first `used` slots as possibly in use.
    pub(super) const fn set_used(&mut self, used: u32) {
        self.used = used;
    }

    /// Allocates a slot; `None` if no slot is free.
    pub(super) fn take(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if self.used == self.slots {
            return None;
        }
        self.used += 1;
        Some(self.used - 1)
    }

    pub(super) fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// Hash of the protocol, of the client's address and port, and of `peer`.
    pub(super) fn hash(&self, protocol: Protocol, client: SocketAddr, peer: SocketAddr) -> u64 {
        if let (IpAddr::V4(from), IpAddr::V4(to)) = (client.ip(), peer.ip()) {
            let from = narrow(from.octets(), client.port()) | protocol_part(protocol);
            return sip13(self.keys, [from, narrow(to.octets(), peer.port())]);
        }
        let (from, to) = (wide(client.ip()), wide(peer.ip()));
        let identity = wide_identity(from, client.port(), protocol);
        let port = wire(peer.port());
        sip13(self.keys, [identity, from[0], from[1], to[0], to[1], port])
    }

    fn hash_of(&self, entry: Entry<'_>, side: Side) -> u64 {
        self.hash(entry.protocol(), entry.client(), side.peer(entry))
    }

    /// The newest entry for which `is` returns true.
    pub(super) fn find(&self, hash: u64, is: impl Fn(u32, Side) -> bool) -> Option<u32> {
        let found = self.index.find(hash, |reference| {
            let (handle, side) = Side::of(reference);
            is(handle, side)
        });
        found.map(|reference| Side::of(reference).0)
    }

    /// Adds an entry to the index for the packets of `side`. The entry replaces `equal`, if any,
    /// which was the newest entry for these packets. Returns `false`, without a change, if the
    /// index is full.
    pub(super) fn enter(
        &mut self,
        handle: u32,
        side: Side,
        entry: Entry<'_>,
        equal: Option<u32>,
    ) -> bool {
        let hash = self.hash_of(entry, side);
        let new = side.reference(handle);
        let Some(equal) = equal else {
            return self.index.insert(hash, new);
        };
        let old = side.reference(equal);
        self.index.replace(hash, old, new);
        self.tie(old).newer = handle;
        self.tie(new).older = equal;
        true
    }

    /// Removes an entry from one side of the index. If the entry was the newest, the next older
    /// equal entry replaces it. If only one of the equal entries remains, returns its handle.
    pub(super) fn leave(&mut self, handle: u32, side: Side, entry: Entry<'_>) -> Option<u32> {
        let hash = self.hash_of(entry, side);
        let old = side.reference(handle);
        let Tie { older, newer } = self.ties.remove(&old).unwrap_or(Tie::NONE);
        if older != NO_SLOT {
            self.retie(side.reference(older), |tie| tie.newer = newer);
        }
        if newer != NO_SLOT {
            self.retie(side.reference(newer), |tie| tie.older = older);
        } else if older == NO_SLOT {
            self.index.remove(hash, old);
        } else {
            self.index.replace(hash, old, side.reference(older));
        }
        [older, newer]
            .into_iter()
            .find(|&left| left != NO_SLOT && !self.ties.contains_key(&side.reference(left)))
    }

    /// Whether no other entry is equal to this one on a side.
    pub(super) fn is_alone(&self, handle: u32, side: Side) -> bool {
        !self.ties.contains_key(&side.reference(handle))
    }

    fn tie(&mut self, reference: u32) -> &mut Tie {
        self.ties.entry(reference).or_insert(Tie::NONE)
    }

    fn retie(&mut self, reference: u32, change: impl FnOnce(&mut Tie)) {
        let tie = self.tie(reference);
        change(tie);
        if *tie == Tie::NONE {
            self.ties.remove(&reference);
        }
    }

    #[cfg(test)]
    pub(super) fn is_clear(&self) -> bool {
        self.ties.is_empty()
            && self.homes.is_empty()
            && self.index.is_clear()
            && self.free.len() == self.used as usize
    }
}

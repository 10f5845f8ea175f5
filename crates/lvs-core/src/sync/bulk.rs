//! Messages of the replication between peers, which IPVS does not have: each connection with its
//! remaining time, the removal of connections, and digests of the sender's connections, which
//! reveal a lost update.
//!
//! ```text
//! item     kind 1 | 0 | length 2 | milliseconds left 4 | a connection as in a message of version 1
//! digest   1024 times: sum 8 | connections 4
//! ```
//!
//! The owner of a connection is the director that receives its packets; it replicates the
//! connection, and the peers store a *borrowed* replica. A director that receives a packet of a
//! borrowed connection becomes its owner. The sender maintains a digest of the connections that it
//! owns, and the receiver a digest of the connections that it has borrowed. When a connection is
//! added or removed, the digest changes at once: the hash of the connection is combined with the
//! sum of its range by exclusive or.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use super::wire::{self, Entry};
use crate::Protocol;
use crate::conn::sip13;

/// Maximum number of peers from which a director receives connections.
pub const PEERS_MAX: usize = 8;

/// Number of ranges in a digest; the first bits of a connection's hash are the number of its range.
pub const RANGES: usize = 1 << RANGE_BITS;
const RANGE_BITS: u32 = 10;

/// Length of an encoded digest in bytes.
pub const DIGEST_LEN: usize = RANGES * 12;

/// Length in bytes of the header of an item; the connection follows it.
const HEADER: usize = 8;

/// While the outgoing buffer has this number of bytes or more, further updates are lost.
const OUT_MAX: usize = 1 << 20;

/// Initial capacity of the outgoing buffer in bytes.
const OUT_FIRST: usize = 4 << 10;

/// Kind of an update about a connection or a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The connection or template exists at the sender.
    Lives,
    /// The sender has removed the connection.
    Ended,
    /// The connection exists, and the sender has just received a packet of it.
    Comes,
}

/// A connection or a template, and the kind of update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The kind of update.
    pub kind: Kind,
    /// Time until the timer of the connection or template fires.
    pub left: Duration,
    /// The content of the connection or template.
    pub entry: Entry,
}

impl Item {
    /// Appends the item; appends nothing if the connection does not fit into an item.
    pub fn write(&self, out: &mut Vec<u8>) {
        let Some(len) = self.entry.len(1).and_then(|len| u16::try_from(len).ok()) else {
            return;
        };
        if !has_place(self.entry.client, self.entry.virt, self.entry.server) {
            return;
        }
        let left = u32::try_from(self.left.as_millis()).unwrap_or(u32::MAX);
        out.push(match self.kind {
            Kind::Lives => 1,
            Kind::Ended => 2,
            Kind::Comes => 3,
        });
        out.push(0);
        out.extend(len.to_be_bytes());
        out.extend(left.to_be_bytes());
        self.entry.write(1, out);
    }
}

/// Whether a connection between these addresses fits into an item: all of its addresses must be of
/// one family.
pub(crate) fn has_place(client: SocketAddr, virt: SocketAddr, server: SocketAddr) -> bool {
    [virt, server]
        .iter()
        .all(|addr| addr.is_ipv4() == client.is_ipv4())
}

/// The received bytes are not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Parses consecutive items.
///
/// # Errors
/// If the bytes contain anything else.
pub fn parse(mut bytes: &[u8]) -> Result<Vec<Item>, Malformed> {
    let mut items = Vec::with_capacity(bytes.len() / 44);
    while !bytes.is_empty() {
        let (header, rest) = bytes.split_first_chunk::<HEADER>().ok_or(Malformed)?;
        let [kind, 0, high, low, left @ ..] = *header else {
            return Err(Malformed);
        };
        let kind = match kind {
            1 => Kind::Lives,
            2 => Kind::Ended,
            3 => Kind::Comes,
            _ => return Err(Malformed),
        };
        let len = usize::from(u16::from_be_bytes([high, low]));
        let (connection, rest) = rest.split_at_checked(len).ok_or(Malformed)?;
        let replicated = connection.get(2..4).ok_or(Malformed)?;
        if replicated != [high, low] {
            return Err(Malformed);
        }
        let entry = wire::parse_entry(connection, len).map_err(|()| Malformed)?;
        items.push(Item {
            kind,
            left: Duration::from_millis(u32::from_be_bytes(left).into()),
            entry: entry.ok_or(Malformed)?,
        });
        bytes = rest;
    }
    Ok(items)
}

/// Length in bytes of the first item.
fn first_len(items: &[u8]) -> Option<usize> {
    let len = items.get(2..4)?;
    Some(HEADER + usize::from(u16::from_be_bytes([len[0], len[1]])))
}

/// Number of items in valid bytes.
pub fn count(mut bytes: &[u8]) -> u64 {
    let mut count = 0;
    while let Some(len) = first_len(bytes) {
        bytes = bytes.get(len..).unwrap_or_default();
        count += 1;
    }
    count
}

/// Splits items into portions of at most `most` bytes, with at least one item each.
pub fn portions(mut items: &[u8], most: usize) -> impl Iterator<Item = &[u8]> {
    core::iter::from_fn(move || {
        let mut end = 0;
        while let Some(len) = items.get(end..).and_then(first_len) {
            if end + len > most && end > 0 {
                break;
            }
            end += len;
        }
        let (portion, rest) = items.split_at_checked(end).filter(|_| end > 0)?;
        items = rest;
        Some(portion)
    })
}

/// For the connections in one range: the exclusive or of their hashes, and their number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Range {
    sum: u64,
    count: u32,
}

/// Hash sums and numbers of connections, by the first bits of their hashes (ranges).
#[derive(Clone, PartialEq, Eq)]
pub struct Digest(Box<[Range]>);

impl Default for Digest {
    fn default() -> Self {
        Self(vec![Range::default(); RANGES].into())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "digest of {}", self.count())
    }
}

impl Digest {
    fn add(&mut self, hash: u64) {
        let range = &mut self.0[range_of(hash)];
        range.sum ^= hash;
        range.count = range.count.wrapping_add(1);
    }

    fn take(&mut self, hash: u64) {
        let range = &mut self.0[range_of(hash)];
        range.sum ^= hash;
        range.count = range.count.wrapping_sub(1);
    }

    /// Number of connections in all ranges of the digest.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|range| u64::from(range.count)).sum()
    }

    /// Adds the connections of another digest with the same keys. The two digests must have no
    /// connection in common.
    pub fn merge(&mut self, other: &Self) {
        for (range, more) in self.0.iter_mut().zip(&other.0) {
            range.sum ^= more.sum;
            range.count = range.count.wrapping_add(more.count);
        }
    }

    /// Appends the encoded digest.
    pub fn write(&self, out: &mut Vec<u8>) {
        for range in &self.0 {
            out.extend(range.sum.to_be_bytes());
            out.extend(range.count.to_be_bytes());
        }
    }

    /// Parses the output of [`write`](Self::write).
    ///
    /// # Errors
    /// If it is not [`DIGEST_LEN`] bytes long.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() != DIGEST_LEN {
            return Err(Malformed);
        }
        let mut digest = Self::default();
        for (range, bytes) in digest.0.iter_mut().zip(bytes.chunks_exact(12)) {
            let (sum, count) = bytes.split_first_chunk().ok_or(Malformed)?;
            range.sum = u64::from_be_bytes(*sum);
            range.count = u32::from_be_bytes(count.try_into().map_err(|_| Malformed)?);
        }
        Ok(digest)
    }

    /// Compares the digest of borrowed connections with the digest that their owner sent.
    pub fn compare(&self, sender: &Self) -> Differences {
        let mut all = Differences {
            replicated: sender.count(),
            ..Differences::default()
        };
        for (place, (ours, theirs)) in (0..).zip(self.0.iter().zip(&sender.0)) {
            if ours != theirs {
                all.ranges.push(place);
                // If the counts are equal but the sums differ, at least one connection is missing.
                let missing = theirs.count.saturating_sub(ours.count);
                let other = u32::from(theirs.count == ours.count);
                all.missing += u64::from(missing.max(other));
            }
        }
        all
    }
}

/// Result of the comparison of a peer's digest with the connections borrowed from it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// Number of connections that the sender owns.
    pub replicated: u64,
    /// Lower bound for the number of missing connections.
    pub missing: u64,
    /// Numbers of the ranges that differ.
    pub ranges: Vec<u16>,
}

const fn range_of(hash: u64) -> usize {
    (hash >> (u64::BITS - RANGE_BITS)) as usize
}

/// The selection of connections that a full sync or a repair sends.
#[derive(Clone, Debug)]
pub enum Pass {
    /// All connections that the director owns.
    All,
    /// Connections that received a packet at or after this time.
    Since(crate::Instant),
    /// Connections in these ranges, which the receiver has requested.
    Ranges(Ranges),
}

/// A set of ranges of the digest.
#[derive(Clone)]
pub struct Ranges(Box<[bool; RANGES]>);

impl fmt::Debug for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.0.iter().filter(|&&is| is);
        write!(f, "{} ranges", all.count())
    }
}

impl Ranges {
    /// A set of these range numbers; invalid numbers are ignored.
    pub fn new(numbers: impl IntoIterator<Item = u16>) -> Self {
        let mut all = Box::new([false; RANGES]);
        for number in numbers {
            if let Some(range) = all.get_mut(usize::from(number)) {
                *range = true;
            }
        }
        Self(all)
    }

    fn has(&self, hash: u64) -> bool {
        self.0[range_of(hash)]
    }
}

/// The fields of a connection that its hash covers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) protocol: Protocol,
    pub(crate) client: SocketAddr,
    pub(crate) virt: SocketAddr,
    pub(crate) server: SocketAddr,
}

impl Identity {
    fn hash(&self, keys: [u64; 2]) -> u64 {
        let halves = |addr: SocketAddr| {
            let addr = match addr.ip() {
                IpAddr::V4(addr) => addr.to_ipv6_mapped(),
                IpAddr::V6(addr) => addr,
            };
            let [a, b, c, d, e, f, g, h] = addr.segments().map(u64::from);
            [
                a << 48 | b << 32 | c << 16 | d,
                e << 48 | f << 32 | g << 16 | h,
            ]
        };
        let port = |addr: SocketAddr| u64::from(addr.port());
        let ports = port(self.client) << 32 | port(self.virt) << 16 | port(self.server);
        let ([a, b], [c, d]) = (halves(self.client), halves(self.virt));
        let [e, f] = halves(self.server);
        let first = u64::from(self.protocol.0) << 48 | ports;
        sip13(keys, [first, a, b, c, d, e, f])
    }
}

/// Digests of the connections that a shard owns or has borrowed, and the outgoing updates of the
/// shard.
#[derive(Debug)]
pub(crate) struct Replicas {
    keys: [u64; 2],
    replicated: Digest,
    borrowed: [Option<Borrowed>; PEERS_MAX],
    /// Whether any peer is subscribed to updates.
    pub(crate) has_receiver: bool,
    out: Vec<u8>,
    lost: bool,
}

#[derive(Debug)]
struct Borrowed {
    keys: [u64; 2],
    digest: Digest,
}

impl Replicas {
    pub(crate) fn new(keys: [u64; 2]) -> Self {
        Self {
            keys,
            replicated: Digest::default(),
            borrowed: [const { None }; PEERS_MAX],
            has_receiver: false,
            out: Vec::new(),
            lost: false,
        }
    }

    /// Adds a connection to the digest of owned connections; with `is` false, removes it.
    pub(crate) fn tell(&mut self, identity: &Identity, is: bool) {
        let hash = identity.hash(self.keys);
        if is {
            self.replicated.add(hash);
        } else {
            self.replicated.take(hash);
        }
    }

    /// Whether a connection that this director owns is in one of these ranges.
    pub(crate) fn is_replicated_in(&self, ranges: &Ranges, identity: &Identity) -> bool {
        ranges.has(identity.hash(self.keys))
    }

    pub(crate) fn is_borrowed_in(&self, peer: usize, ranges: &Ranges, identity: &Identity) -> bool {
        let borrowed = self.borrowed.get(peer).and_then(Option::as_ref);
        borrowed.is_some_and(|borrowed| ranges.has(identity.hash(borrowed.keys)))
    }

    /// Adds a connection to the digest of the connections borrowed from a peer; with `is` false,
    /// removes the connection.
    pub(crate) fn lend(&mut self, peer: usize, identity: &Identity, is: bool) {
        if let Some(Some(borrowed)) = self.borrowed.get_mut(peer) {
            let hash = identity.hash(borrowed.keys);
            if is {
                borrowed.digest.add(hash);
            } else {
                borrowed.digest.take(hash);
            }
        }
    }

    /// Sets the hash keys that a peer uses. No connection may be borrowed from the peer yet.
    pub(crate) fn listen_to(&mut self, peer: usize, keys: [u64; 2]) {
        if let Some(borrowed) = self.borrowed.get_mut(peer) {
            let digest = Digest::default();
            *borrowed = Some(Borrowed { keys, digest });
        }
    }

    /// Takes the outgoing buffer, so that the caller can append to it and [return](Self::put_back)
    /// it; `None` if no peer is subscribed, or if the buffer is full. A full buffer means that an
    /// update is lost, which is recorded.
    pub(crate) fn take_buffer(&mut self) -> Option<Vec<u8>> {
        if !self.has_receiver {
            return None;
        }
        if self.out.len() >= OUT_MAX {
            self.lost = true;
            return None;
        }
        Some(core::mem::take(&mut self.out))
    }

    pub(crate) fn put_back(&mut self, out: Vec<u8>) {
        self.out = out;
    }

    pub(crate) fn has_queued(&self) -> bool {
        !self.out.is_empty()
    }

    pub(crate) fn queued_len(&self) -> usize {
        self.out.len()
    }

    /// Returns the outgoing updates, and whether some were lost.
    pub(crate) fn take(&mut self) -> (Vec<u8>, bool) {
        // The next buffer will contain about as much.
        let next = Vec::with_capacity(self.out.len().min(OUT_FIRST));
        let out = core::mem::replace(&mut self.out, next);
        (out, core::mem::take(&mut self.lost))
    }

    pub(crate) const fn replicated(&self) -> &Digest {
        &self.replicated
    }

    pub(crate) fn borrowed(&self, peer: usize) -> Option<&Digest> {
        let borrowed = self.borrowed.get(peer).and_then(Option::as_ref);
        borrowed.map(|borrowed| &borrowed.digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(port: u16) -> Identity {
        Identity {
            protocol: Protocol::TCP,
            client: ([192, 0, 2, 1], port).into(),
            virt: ([198, 51, 100, 1], 80).into(),
            server: ([10, 0, 0, 1], 80).into(),
        }
    }

    #[test]
    fn full_sync_is_split_only_between_items() {
        const MOST: usize = 16 << 10;
        let item = |len: u16| {
            let [high, low] = len.to_be_bytes();
            let mut item = vec![1, 0, high, low, 0, 0, 0, 0];
            item.resize(8 + usize::from(len), 7);
            item
        };
        let all: Vec<u8> = (0..3000).flat_map(|n| item(36 + n % 100)).collect();
        let cut: Vec<&[u8]> = portions(&all, MOST).collect();
        assert!(cut.len() > 10 && cut.iter().all(|part| part.len() <= MOST));
        assert_eq!(cut.iter().map(|part| count(part)).sum::<u64>(), 3000);
        assert_eq!(cut.concat(), all);
        assert_eq!(portions(&[], MOST).count(), 0);
    }

    #[test]
    fn connection_digest_reveals_number_and_range_of_missing_connections() {
        let (mut sender, mut receiver) = (Replicas::new([1, 2]), Replicas::new([3, 4]));
        receiver.listen_to(5, [1, 2]);
        for port in 0..10_000 {
            sender.tell(&identity(port), true);
            receiver.lend(5, &identity(port), true);
        }
        let mut bytes = Vec::new();
        sender.replicated().write(&mut bytes);
        assert_eq!(bytes.len(), DIGEST_LEN);
        let replicated = Digest::parse(&bytes).unwrap();
        assert_eq!(
            (&replicated, replicated.count()),
            (sender.replicated(), 10_000)
        );
        let compare = |receiver: &Replicas| {
            let borrowed = receiver.borrowed(5);
            borrowed
                .map(|borrowed| borrowed.compare(&replicated))
                .unwrap()
        };
        let all = compare(&receiver);
        assert_eq!(
            (all.replicated, all.missing, all.ranges.len()),
            (10_000, 0, 0)
        );

        receiver.lend(5, &identity(77), false);
        let all = compare(&receiver);
        assert_eq!((all.missing, all.ranges.len()), (1, 1));
        let ranges = Ranges::new(all.ranges);
        assert!(sender.is_replicated_in(&ranges, &identity(77)));
        // The range has as many connections as at the sender, and one of them differs.
        let other = (0..).find(|port| {
            let other = identity(20_000 + port);
            sender.is_replicated_in(&ranges, &other)
        });
        receiver.lend(5, &identity(20_000 + other.unwrap()), true);
        assert_eq!(compare(&receiver).missing, 1);
        assert_eq!(Digest::parse(&bytes[1..]), Err(Malformed));
    }

    /// A director's digest does not depend on the distribution of its connections over shards.
    #[test]
    fn merged_digests_of_shards_equal_digest_of_director() {
        let mut whole = Replicas::new([1, 2]);
        let mut shards = [(); 3].map(|()| Replicas::new([1, 2]));
        let mut others = [(); 2].map(|()| Replicas::new([3, 4]));
        for other in &mut others {
            other.listen_to(5, [1, 2]);
        }
        for port in 0..1000 {
            whole.tell(&identity(port), true);
            shards[usize::from(port % 3)].tell(&identity(port), true);
            others[usize::from(port % 2)].lend(5, &identity(port), true);
        }
        let mut sent = Digest::default();
        for shard in &shards {
            sent.merge(shard.replicated());
        }
        assert_eq!(&sent, whole.replicated());
        let borrowed = |others: &[Replicas]| {
            let mut all = Digest::default();
            for other in others {
                all.merge(other.borrowed(5).unwrap());
            }
            all
        };
        assert_eq!(borrowed(&others), sent);
        others[1].lend(5, &identity(77), false);
        let differ = borrowed(&others).compare(&sent);
        assert_eq!((differ.replicated, differ.missing), (1000, 1));
    }

    #[test]
    fn outgoing_replication_updates_are_bounded_and_loss_is_reported() {
        let mut replicas = Replicas::new([0, 0]);
        assert!(replicas.take_buffer().is_none());
        replicas.has_receiver = true;
        for _ in 0..(2 * OUT_MAX / 40) {
            if let Some(mut out) = replicas.take_buffer() {
                out.extend([0; 40]);
                replicas.put_back(out);
            }
        }
        let (out, lost) = replicas.take();
        assert!(lost && out.len() < OUT_MAX + 40);
        assert_eq!(replicas.take(), (Vec::new(), false));
    }

    proptest::proptest! {
        #[test]
        fn peer_message_of_any_bytes_does_not_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300), fix: bool) {
            let mut bytes = bytes;
            if fix && bytes.len() > 44 {
                let len = u16::try_from(bytes.len() - 8).unwrap().to_be_bytes();
                bytes[..4].copy_from_slice(&[1, 0, len[0], len[1]]);
                bytes[8] &= 1;
                bytes[10..12].copy_from_slice(&len);
            }
            if let Ok(items) = parse(&bytes) {
                proptest::prop_assert_eq!(count(&bytes), items.len() as u64);
                let mut again = Vec::new();
                for item in &items {
                    item.write(&mut again);
                }
                let read = parse(&again);
                proptest::prop_assert_eq!(read.map(|read| read.len()), Ok(items.len()));
            }
        }
    }
}

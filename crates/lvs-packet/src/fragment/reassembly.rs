//! Reassembly of datagrams from their fragments.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use lvs_core::{Instant, Protocol};
use lvs_sys::lock;

use super::History;
use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::parse::{Fragment, Packet};
use crate::wire::{ipv4, ipv6, put16};

/// Time after which an incomplete datagram is discarded (`net.ipv4.ipfrag_time`).
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum memory for incomplete datagrams in bytes, for all workers together
/// (`net.ipv4.ipfrag_high_thresh`).
pub const MEMORY_MAX: usize = 4 << 20;
/// Maximum number of fragments of a datagram: 64 KiB with 64 bytes of payload in each.
const PIECES_MAX: usize = 1024;
/// Memory of a stored fragment in bytes, besides its content: its allocation, its entry in the
/// list, and the headers of the frame in which it is sent later (with IPv6, also a fragment
/// header). 4 MiB are 15,887 fragments of 8 bytes.
const PIECE_COST: usize = 256;
/// Memory of a datagram in bytes, besides its fragments: its entry in the table, and its list of
/// fragments.
const QUEUE_COST: usize = 320;
/// Number of parts of the table. Each has its own lock, so that workers seldom wait for each other.
const SHARDS: usize = 16;

/// A reassembled datagram.
#[derive(Debug)]
pub struct Assembled {
    /// The datagram: an IP packet without link header.
    pub frame: Frame,
    /// The fragments in which the datagram arrived.
    pub history: History,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    src: IpAddr,
    dst: IpAddr,
    id: u32,
    /// The IP protocol for IPv4, 0 for IPv6.
    protocol: u8,
    /// Whether the datagram is an IPv4 datagram to this host. Such datagrams are reassembled
    /// separately from forwarded ones.
    local: bool,
}

impl Key {
    fn new(packet: &Packet, fragment: &Fragment, local: bool) -> Self {
        let six = packet.is_ipv6();
        Self {
            src: packet.src,
            dst: packet.dst,
            id: fragment.id,
            protocol: if six { 0 } else { packet.protocol.0 },
            local: local && !six,
        }
    }
}

struct Part<'a> {
    headers: &'a [u8],
    data: &'a [u8],
    offset: usize,
    more: bool,
}

impl<'a> Part<'a> {
    fn of(ip: &'a [u8], packet: &Packet, fragment: &Fragment) -> Result<Self, FrameDrop> {
        let six = packet.is_ipv6();
        let payload = ip.get(packet.l4..packet.len).ok_or(FrameDrop::Truncated)?;
        if six && fragment.offset == 0 && !ipv6::has_upper_header(&ip[..packet.len]) {
            return Err(FrameDrop::TinyFragment);
        }
        // The payload of each fragment but the last must be a multiple of 8 bytes. The excess is
        // cut off in IPv4, and an error in IPv6.
        let size = if fragment.more && six && payload.len() % 8 != 0 {
            0
        } else if fragment.more {
            payload.len() & !7
        } else {
            payload.len()
        };
        // The total length of IPv4 counts all headers, the payload length of IPv6 counts only the
        // headers after the fixed header.
        let (headers, counted) = if six {
            let headers = packet.l4 - ipv6::FRAGMENT_LEN;
            (headers, headers - ipv6::HEADER_LEN)
        } else {
            (packet.l4, packet.l4)
        };
        if size == 0 || fragment.offset + size + counted > usize::from(u16::MAX) {
            return Err(FrameDrop::BadFragment);
        }
        Ok(Self {
            headers: &ip[..headers],
            data: &payload[..size],
            offset: fragment.offset,
            more: fragment.more,
        })
    }

    const fn end(&self) -> usize {
        self.offset + self.data.len()
    }
}

#[derive(Debug)]
struct Piece {
    offset: usize,
    data: Vec<u8>,
}

impl Piece {
    const fn end(&self) -> usize {
        self.offset + self.data.len()
    }
}

/// An incomplete datagram.
#[derive(Debug)]
struct Queue {
    since: Instant,
    /// The received fragments, in order; no two overlap.
    pieces: Vec<Piece>,
    /// The IP header of the first fragment, without the fragment header, and the protocol of the
    /// payload.
    header: Option<(Vec<u8>, Protocol)>,
    /// End of the datagram's payload, once the last fragment has arrived.
    end: Option<usize>,
    /// Number of payload bytes that have arrived.
    have: usize,
    cost: usize,
    longest: usize,
    longest_df: usize,
    /// One bit for each ECN codepoint that occurs in the fragments.
    ecn: u8,
}

/// Effect of a fragment that does not fit into its datagram.
enum Misfit {
    /// Only this fragment is discarded.
    Fragment,
    /// The whole datagram is discarded.
    Datagram,
}

impl Queue {
    const fn new(now: Instant) -> Self {
        Self {
            since: now,
            pieces: Vec::new(),
            header: None,
            end: None,
            have: 0,
            cost: QUEUE_COST,
            longest: 0,
            longest_df: 0,
            ecn: 0,
        }
    }

    /// The position of a fragment in the list. A fragment that an earlier one contains, or that
    /// contradicts the end of the datagram, is discarded alone. A fragment that overlaps another
    /// one in part, or would exceed [`PIECES_MAX`], causes the whole datagram to be discarded
    /// (`inet_frag_queue_insert`; RFC 5722 for IPv6, which the kernel applies to IPv4 as well).
    fn place(&self, part: &Part<'_>) -> Result<usize, Misfit> {
        let reach = self.pieces.last().map_or(0, Piece::end);
        let contradicts = match self.end {
            Some(known) => part.end() > known || (!part.more && part.end() != known),
            None => !part.more && part.end() < reach,
        };
        if contradicts {
            return Err(Misfit::Fragment);
        }
        let place = self
            .pieces
            .partition_point(|piece| piece.end() <= part.offset);
        match self.pieces.get(place) {
            Some(next) if next.offset < part.end() => {
                let repeated = next.offset <= part.offset && part.end() <= next.end();
                Err(if repeated {
                    Misfit::Fragment
                } else {
                    Misfit::Datagram
                })
            }
            _ if self.pieces.len() >= PIECES_MAX => Err(Misfit::Datagram),
            _ => Ok(place),
        }
    }

    fn insert(&mut self, place: usize, part: &Part<'_>, packet: &Packet, fragment: &Fragment) {
        if !part.more {
            self.end = Some(part.end());
        }
        if part.offset == 0 {
            let mut header = part.headers.to_vec();
            if packet.is_ipv6() {
                // The reassembled datagram has no fragment header.
                header[fragment.named_at] = packet.protocol.0;
            }
            self.header = Some((header, packet.protocol));
        }
        self.ecn |= 1 << (packet.tos & 3);
        self.longest = self.longest.max(packet.len);
        if packet.df {
            self.longest_df = self.longest_df.max(packet.len);
        }
        self.have += part.data.len();
        self.cost += part.data.len() + PIECE_COST;
        let piece = Piece {
            offset: part.offset,
            data: part.data.to_vec(),
        };
        self.pieces.insert(place, piece);
    }

    fn is_complete(&self) -> bool {
        self.end == Some(self.have) && self.header.is_some()
    }

    fn assemble(self, six: bool) -> Result<Assembled, FrameDrop> {
        // If one fragment reports congestion, the datagram does, too; a mix with Not-ECT is invalid
        // (RFC 3168 section 5.3).
        const NOT_ECT: u8 = 1;
        const CE: u8 = 1 << 3;
        if self.ecn & NOT_ECT != 0 && self.ecn != NOT_ECT {
            return Err(FrameDrop::BadFragment);
        }
        let (header, protocol) = self.header.ok_or(FrameDrop::BadFragment)?;
        let mut frame = Frame::with_capacity(header.len() + self.have);
        let mut fits = frame.extend(&header);
        for piece in &self.pieces {
            fits &= frame.extend(&piece.data);
        }
        let len = u16::try_from(frame.len());
        if !fits {
            return Err(FrameDrop::BadFragment);
        }
        let congested = self.ecn & CE != 0;
        // The datagram keeps "don't fragment" if its longest fragment has this flag
        // (`ip_frag_reasm`).
        let df = self.longest_df == self.longest;
        let ip = frame.bytes_mut();
        if six {
            ipv6::finish_len(ip);
            if congested {
                ipv6::set_congestion(ip);
            }
        } else {
            ipv4::set_total_len(ip, len.map_err(|_| FrameDrop::BadFragment)?);
            put16(ip, ipv4::field::FLAGS, if df { ipv4::DF } else { 0 });
            if congested {
                ipv4::set_congestion(ip);
            }
            ipv4::finish_header(ip);
        }
        let history = History {
            headers: header.len(),
            sizes: self.pieces.iter().map(|piece| piece.data.len()).collect(),
            longest: self.longest,
            df,
            protocol,
        };
        Ok(Assembled { frame, history })
    }
}

/// Datagrams with missing fragments, of all workers of a director. Fragments have no ports, so the
/// fragments of one datagram may arrive at several workers. The worker that receives the last
/// missing fragment gets the datagram. The memory is bounded.
#[derive(Debug)]
pub struct Reassembler {
    shards: [Mutex<HashMap<Key, Queue>>; SHARDS],
    hasher: RandomState,
    memory: AtomicUsize,
    expired: AtomicU64,
}

impl Default for Reassembler {
    fn default() -> Self {
        Self {
            shards: Default::default(),
            hasher: RandomState::new(),
            memory: AtomicUsize::new(0),
            expired: AtomicU64::new(0),
        }
    }
}

impl Reassembler {
    /// Stores the fragment `ip`, whose header fields are `packet`. `local` is whether it is
    /// addressed to this host. Returns the datagram when it is complete.
    ///
    /// # Errors
    /// [`FrameDrop::BadFragment`]: the fragment is discarded, because its length is not possible,
    /// or it repeats or contradicts another one. The whole datagram is discarded, too, if the
    /// fragment overlaps another one in part, if there are too many fragments, if their ECN fields
    /// contradict each other, or if the datagram would be too long. [`FrameDrop::FragmentMemory`]:
    /// the memory for incomplete datagrams is used up. [`FrameDrop::TinyFragment`]: the first
    /// fragment of an IPv6 datagram does not contain all headers. [`FrameDrop::Truncated`]: `ip` is
    /// shorter than its headers specify.
    pub fn push(
        &self,
        ip: &[u8],
        packet: &Packet,
        fragment: Fragment,
        local: bool,
        now: Instant,
    ) -> Result<Option<Assembled>, FrameDrop> {
        let part = Part::of(ip, packet, &fragment)?;
        let reserved = part.data.len() + PIECE_COST + QUEUE_COST;
        self.reserve(reserved)?;
        let key = Key::new(packet, &fragment, local);
        let mut queues = self.shard(&key);
        let mut unused = 0;
        let mut entry = match queues.entry(key) {
            Entry::Vacant(entry) => entry.insert_entry(Queue::new(now)),
            Entry::Occupied(entry) => {
                unused = QUEUE_COST;
                entry
            }
        };
        let complete = match entry.get().place(&part) {
            Ok(place) => {
                let queue = entry.get_mut();
                queue.insert(place, &part, packet, &fragment);
                let complete = queue.is_complete();
                complete.then(|| entry.remove())
            }
            Err(misfit) => {
                // The fragment contradicts earlier ones, so the datagram is not new.
                self.release(reserved);
                if matches!(misfit, Misfit::Datagram) {
                    self.give_up(&entry.remove());
                }
                return Err(FrameDrop::BadFragment);
            }
        };
        drop(queues);
        self.release(unused);
        let Some(queue) = complete else {
            return Ok(None);
        };
        self.release(queue.cost);
        let pieces = queue.pieces.len() as u64;
        let assembled = queue.assemble(packet.is_ipv6());
        if assembled.is_err() {
            self.expired.fetch_add(pieces, Ordering::Relaxed);
        }
        assembled.map(Some)
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, HashMap<Key, Queue>> {
        let hash = self.hasher.hash_one(key);
        let shard = &self.shards[usize::try_from(hash % SHARDS as u64).unwrap_or(0)];
        lock(shard)
    }

    /// Reserves memory for a fragment, or refuses the fragment if too little is left. (The kernel
    /// then refuses a new datagram, `inet_frag_create`.) To evict an older datagram instead would
    /// be expensive for the director, and an attacker could cause it at no cost.
    fn reserve(&self, bytes: usize) -> Result<(), FrameDrop> {
        let grown = |memory: usize| Some(memory + bytes).filter(|&memory| memory <= MEMORY_MAX);
        match self
            .memory
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown)
        {
            Ok(_) => Ok(()),
            Err(_) => Err(FrameDrop::FragmentMemory),
        }
    }

    fn release(&self, bytes: usize) {
        self.memory.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn give_up(&self, queue: &Queue) {
        self.release(queue.cost);
        self.expired
            .fetch_add(queue.pieces.len() as u64, Ordering::Relaxed);
    }

    /// Discards the datagrams that have waited for [`TIMEOUT`], for all workers.
    pub fn expire(&self, now: Instant) {
        if self.memory() == 0 {
            return;
        }
        for shard in &self.shards {
            let mut queues = lock(shard);
            queues.retain(|_, queue| {
                let keep = now.saturating_since(queue.since) < TIMEOUT;
                if !keep {
                    self.give_up(queue);
                }
                keep
            });
        }
    }

    /// Number of fragments that wait for the rest of their datagrams.
    pub fn waiting(&self) -> usize {
        let of_shard = |shard: &Mutex<HashMap<Key, Queue>>| {
            let queues = lock(shard);
            queues
                .values()
                .map(|queue| queue.pieces.len())
                .sum::<usize>()
        };
        self.shards.iter().map(of_shard).sum()
    }

    /// Memory that the stored fragments use, as far as the limit counts it, in bytes.
    pub fn memory(&self) -> usize {
        self.memory.load(Ordering::Relaxed)
    }

    /// Number of stored fragments that were discarded together with their datagram, because it
    /// timed out, had too many fragments, or its fragments contradicted each other.
    pub fn expired(&self) -> u64 {
        self.expired.load(Ordering::Relaxed)
    }
}

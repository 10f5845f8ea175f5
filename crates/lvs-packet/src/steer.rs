//! Selects the packet worker that processes a packet.
//!
//! One worker processes both directions of a connection: the address and port of the client, which
//! packets of both directions contain, select the worker. In packets to a virtual address, the
//! client is the source; in other packets, it is the destination. In packets of servers with full
//! NAT, a local port takes the place of the client, and its number selects the worker
//! ([`worker_of`]).
//!
//! ```text
//!  kernel: program of the fan-out group ([`Plan`], approximate) ─▶ worker's ring ─▶ [`Steering::home`] (exact)
//!                                                                                      ├─ its own: decide
//!                                                                                      └─ another's: bounded queue
//! ```
//!
//! Because of the BPF program, almost no packet needs the queue of the second step. [`Steering`],
//! which is the same for all workers, decides which worker processes a packet.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;

use lvs_core::full_nat::worker_of;
use lvs_core::random::SplitMix64;
use lvs_core::{Hook, Protocol, Tuple};

use crate::intercept::{Intercept, LocalClient};
use crate::net::Net;
use crate::parse::{Icmp, Packet};

/// Maximum number of address ranges of each family that the BPF program searches.
pub const RANGES_MAX: usize = 256;

/// The port of ISAKMP: AH and ESP packets belong to its connection.
const ISAKMP: u16 = 500;

/// Secret factors of the hash that selects the worker, so that a sender of packets cannot choose
/// the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    /// Factors of the four 32-bit words of an IPv6 address.
    pub words: [u32; 4],
    /// The number that is added to the folded address.
    pub seed: u32,
    /// Factors of the hash: the first is applied before the port is added, the others after it.
    pub factors: [u32; 3],
}

impl Keys {
    /// The keys that follow from a random number.
    pub fn new(seed: u64) -> Self {
        let mut numbers = SplitMix64::new(seed);
        let mut next = || u32::try_from(numbers.draw() >> 32).unwrap_or(0);
        // Multiplication by an odd factor loses no bits.
        Self {
            words: std::array::from_fn(|_| next() | 1),
            seed: next(),
            factors: std::array::from_fn(|_| next() | 1),
        }
    }

    /// Folds an address into 32 bits. An IPv4 address stays unchanged; of an IPv6 address, only the
    /// first `words` 32-bit words count.
    pub fn fold(&self, addr: IpAddr, words: usize) -> u32 {
        match addr {
            IpAddr::V4(addr) => addr.to_bits(),
            IpAddr::V6(addr) => {
                let octets = addr.octets();
                let parts = octets.chunks_exact(4).zip(self.words).take(words);
                parts.fold(0, |sum, (part, factor)| {
                    let word = u32::from_be_bytes([part[0], part[1], part[2], part[3]]);
                    sum.wrapping_add(word.wrapping_mul(factor))
                })
            }
        }
    }

    /// Hash of a client's folded address and its port.
    pub fn hash(&self, fold: u32, port: u16) -> u32 {
        let [first, second, third] = self.factors;
        let mut hash = fold.wrapping_add(self.seed).wrapping_mul(first);
        hash ^= hash >> 16;
        hash = hash.wrapping_add(u32::from(port)).wrapping_mul(second);
        hash ^= hash >> 15;
        hash = hash.wrapping_mul(third);
        hash ^ (hash >> 16)
    }
}

/// The rule that divides packets among workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steering {
    workers: NonZeroUsize,
    keys: Keys,
    /// Whether one worker has all connections of a client. The FTP helper requires this, because a
    /// control connection and its data connections must be at one worker.
    by_address: bool,
    local: HashSet<IpAddr>,
}

impl Steering {
    /// Divides packets among `workers` workers, by the client's address and port, or by its address
    /// alone.
    pub fn new(workers: NonZeroUsize, seed: u64, by_address: bool) -> Self {
        Self::with_keys(workers, Keys::new(seed), by_address)
    }

    /// As [`new`](Self::new), with the keys of a previous dataplane, whose connections this one
    /// continues.
    pub fn with_keys(workers: NonZeroUsize, keys: Keys, by_address: bool) -> Self {
        Self {
            workers,
            keys,
            by_address,
            local: HashSet::new(),
        }
    }

    /// Returns the same rule with these local addresses of full NAT.
    #[must_use]
    pub fn with_local(&self, local: HashSet<IpAddr>) -> Self {
        Self {
            local,
            ..self.clone()
        }
    }

    /// Whether the local addresses of full NAT are exactly these.
    pub fn has_local(&self, local: &HashSet<IpAddr>) -> bool {
        self.local == *local
    }

    /// Number of workers among which packets are divided.
    pub const fn workers(&self) -> NonZeroUsize {
        self.workers
    }

    /// The keys of the hash that selects a worker.
    pub const fn keys(&self) -> Keys {
        self.keys
    }

    /// Whether the client's address alone selects the worker.
    pub const fn by_address(&self) -> bool {
        self.by_address
    }

    /// The worker of all connections of a client with this address and port.
    pub fn of_client(&self, addr: IpAddr, port: u16) -> usize {
        let port = if self.by_address { 0 } else { port };
        let fold = self.keys.fold(addr, 4);
        self.keys.hash(fold, port) as usize % self.workers
    }

    /// The number of the worker for the packet `ip`.
    pub fn home<N: Net>(
        &self,
        packet: &Packet,
        ip: &[u8],
        net: &N,
        intercept: &Intercept,
    ) -> usize {
        let (src, dst) = (packet.src, packet.dst);
        let ports = match packet.protocol {
            // All fragments of a datagram arrive at the same worker, which may be any worker; it
            // passes the reassembled datagram to the owner.
            _ if packet.fragment.is_some() => None,
            Protocol::AH | Protocol::ESP => Some((ISAKMP, ISAKMP)),
            _ if packet.is_icmp() => {
                if let Icmp::Error(error) = packet.icmp(ip, Hook::Local) {
                    return self.of_offending(&error.inner, net);
                }
                None
            }
            _ => packet.ports,
        };
        let (from, to) = ports.unwrap_or_default();
        let is_vip = net.is_vip(dst);
        let tuple = Tuple {
            protocol: packet.protocol,
            src: SocketAddr::new(src, from),
            dst: SocketAddr::new(dst, to),
        };
        if self.local.contains(&dst) && !(is_vip && intercept.is_to_service(&tuple)) {
            return worker_of(to, self.workers.get());
        }
        // The destination may be a VIP on this host that a client on this host uses as its own
        // address.
        let answers = || {
            let clients = &intercept.local_clients;
            let client = LocalClient {
                protocol: tuple.protocol,
                server: tuple.src,
                local: tuple.dst,
            };
            !clients.is_empty() && clients.contains(&client)
        };
        if is_vip && !answers() {
            self.of_client(src, from)
        } else {
            self.of_client(dst, to)
        }
    }

    /// The worker for the connection to which the packet quoted by an ICMP error belongs.
    fn of_offending<N: Net>(&self, packet: &Tuple, net: &N) -> usize {
        let Tuple { protocol, src, dst } = *packet;
        if self.local.contains(&src.ip()) {
            return worker_of(src.port(), self.workers.get());
        }
        let client = if !net.is_vip(dst.ip()) && net.is_vip(src.ip()) {
            dst
        } else {
            src
        };
        let port = match protocol {
            Protocol::AH | Protocol::ESP => ISAKMP,
            _ => client.port(),
        };
        self.of_client(client.ip(), port)
    }

    /// The data by which the kernel's program chooses the same worker for most packets. `virt` are
    /// the virtual addresses.
    pub fn plan(&self, virt: impl IntoIterator<Item = IpAddr>) -> Plan {
        let (mut four, mut six) = (Vec::new(), Vec::new());
        for addr in virt {
            match addr {
                IpAddr::V4(addr) => four.push(addr.to_bits()),
                IpAddr::V6(_) => six.push(addr),
            }
        }
        let (mut local4, mut local6) = (Vec::new(), Vec::new());
        for addr in &self.local {
            match addr {
                IpAddr::V4(addr) => local4.push(addr.to_bits()),
                IpAddr::V6(_) => local6.push(*addr),
            }
        }
        four.sort_unstable();
        four.dedup();
        let (words, six) = self.prefixes(&six);
        let local6: Vec<u32> = local6
            .iter()
            .map(|addr| self.keys.fold(*addr, words))
            .collect();
        Plan {
            workers: u32::try_from(self.workers.get()).unwrap_or(u32::MAX),
            keys: self.keys,
            by_address: self.by_address,
            four: ranges(&four, &local4, true),
            six: ranges(&six, &local6, false),
            words,
        }
    }

    /// Finds the greatest number of 32-bit words for which the addresses have at most
    /// [`RANGES_MAX`] different prefixes. Returns this number, and the prefixes, folded and sorted.
    /// If even prefixes of one word are too many, the list is empty.
    fn prefixes(&self, addresses: &[IpAddr]) -> (usize, Vec<u32>) {
        for words in (1..=4).rev() {
            let folds = addresses.iter().map(|addr| self.keys.fold(*addr, words));
            let mut folds: Vec<u32> = folds.collect();
            folds.sort_unstable();
            folds.dedup();
            if folds.len() <= RANGES_MAX {
                return (words, folds);
            }
        }
        (4, Vec::new())
    }
}

/// Kind of the addresses of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Virtual addresses; the range may also contain addresses between them.
    Virtual,
    /// Local addresses of full NAT, whose ports take the place of clients.
    Local,
}

/// A range of addresses, each folded into 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first folded address of the range.
    pub first: u32,
    /// The last folded address of the range.
    pub last: u32,
    /// The kind of all addresses in the range.
    pub kind: Kind,
}

/// An approximation of [`Steering`] for a BPF program in the kernel. It can choose another worker,
/// for example for ICMP errors, fragments and extension headers, and if there are many virtual
/// addresses, for the addresses between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Number of workers among which packets are divided.
    pub workers: u32,
    /// The keys of the hash that selects a worker.
    pub keys: Keys,
    /// Whether packets are divided by the client's address alone.
    pub by_address: bool,
    /// Ranges of IPv4 addresses, in order.
    pub four: Vec<Range>,
    /// Ranges of folded IPv6 addresses, in order.
    pub six: Vec<Range>,
    /// Number of words of an IPv6 address that are folded for the look-up.
    pub words: usize,
}

/// Ranges of sorted addresses, at most [`RANGES_MAX`]. If there are more, and `close` is set, the
/// ranges with the smallest gaps are joined; the addresses in these gaps then count like the
/// addresses around them. Otherwise, the last ranges are omitted.
fn ranges(virt: &[u32], local: &[u32], close: bool) -> Vec<Range> {
    let mut all: Vec<(u32, Kind)> = virt.iter().map(|&addr| (addr, Kind::Virtual)).collect();
    let others = local
        .iter()
        .filter(|addr| virt.binary_search(addr).is_err());
    all.extend(others.map(|&addr| (addr, Kind::Local)));
    all.sort_unstable_by_key(|(addr, _)| *addr);
    all.dedup();
    let joined = |gap: u32| {
        let mut ranges: Vec<Range> = Vec::new();
        for &(addr, kind) in &all {
            match ranges.last_mut() {
                Some(range) if range.kind == kind && addr - range.last <= gap => range.last = addr,
                _ => ranges.push(Range {
                    first: addr,
                    last: addr,
                    kind,
                }),
            }
        }
        ranges
    };
    let mut ranges = joined(1);
    if close && ranges.len() > RANGES_MAX {
        let mut gaps: Vec<u32> = ranges
            .windows(2)
            .map(|two| two[1].first - two[0].last)
            .collect();
        gaps.sort_unstable_by(|a, b| b.cmp(a));
        // The largest gaps separate up to `RANGES_MAX` ranges; ranges with smaller gaps are joined.
        ranges = joined(gaps[RANGES_MAX - 1]);
    }
    ranges.truncate(RANGES_MAX);
    ranges
}

impl Default for Steering {
    fn default() -> Self {
        Self::new(NonZeroUsize::MIN, 0, false)
    }
}

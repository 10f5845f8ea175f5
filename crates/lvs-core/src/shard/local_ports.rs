//! Local ports of full NAT: the addresses and ports of the director that represent clients towards
//! servers.
//!
//! A port is reserved for one server: protocol, server, local address and local port together
//! identify the connection. So each further server and each further local address allows the same
//! number of additional connections. The port alone determines the worker of a reply
//! ([`worker_of`]).
//!
//! ```text
//! entries   by the connection's index: its local address and port      16 + 2 bytes, next to the table's slots
//! chains    a hash of (protocol, server, local address and port)       replies
//! tuples    (protocol, server, local address): which ports are free    connections that open and end
//! ```

use alloc::collections::{BTreeMap, BTreeSet, BinaryHeap};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::hash::Hasher;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use siphasher::sip::SipHasher13;

use crate::conn::{ConnTable, Sparse};
use crate::{Instant, Protocol};

/// Time after the last packet of a connection for which its port is not reused towards the same
/// server: the time for which a Linux server keeps TIME_WAIT (`TCP_TIMEWAIT_LEN`).
const QUIET: Duration = Duration::from_secs(60);
/// Maximum number of ports of one local address that are tried for one connection. A port can be in
/// use already, as long as connections use ports of an earlier range.
const TRIES: usize = 32;
/// Minimum number of entries at which unused entries of `tuples` are searched for and removed.
const TUPLES_MIN: usize = 1024;

/// A local address of the director, and its ports that full NAT may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocalAddress {
    /// The address of the director.
    pub addr: IpAddr,
    /// The first port that full NAT may use.
    pub first: u16,
    /// The last port that full NAT may use.
    pub last: u16,
}

impl LocalAddress {
    /// A local address with all unprivileged ports.
    pub const fn new(addr: IpAddr) -> Self {
        Self {
            addr,
            first: 1024,
            last: u16::MAX,
        }
    }
}

/// The number of the worker, from 0, to which connections with this local port belong.
pub const fn worker_of(port: u16, workers: usize) -> usize {
    port as usize % workers
}

/// A protocol, a server and a local address, for which local ports are reserved separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Tuple {
    protocol: Protocol,
    server: SocketAddr,
    local: LocalAddress,
}

#[derive(Debug)]
struct Free {
    /// Position of the first port that was never used, among the ports of this worker. `fresh` such
    /// ports follow each other; after the last port, the first one follows.
    from: u16,
    fresh: u16,
    /// Ports among the fresh ones that cannot be reserved again from there, because connections
    /// that existed before this process use or used them. After their release, they are in
    /// `released`.
    apart: BTreeSet<u16>,
    /// Released ports with the times of their last packets, as a heap: the port that has been
    /// unused for the longest time is first.
    released: BinaryHeap<Reverse<(Instant, u16)>>,
    /// Time from which on all released ports can be reused.
    quiet_at: Instant,
    used: u32,
}

impl Free {
    /// The port at position `number` of the `fresh` ones: position 0 is `from`, and after the last
    /// port, the first one follows. The worker has `count` ports, of which `base` is the first.
    fn port(&self, number: u16, count: u16, base: u32, workers: u16) -> Option<u16> {
        let number = (u32::from(self.from) + u32::from(number)) % u32::from(count.max(1));
        u16::try_from(base + number * u32::from(workers)).ok()
    }
}

/// A reserved port, and the local address with the range to which it belongs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    local: LocalAddress,
    port: u16,
}

impl Taken {
    const fn addr(&self) -> SocketAddr {
        SocketAddr::new(self.local.addr, self.port)
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    taken: Taken,
    next: u32,
}

#[derive(Debug)]
pub(crate) struct LocalPorts {
    worker: u16,
    workers: u16,
    hash_keys: (u64, u64),
    tuples: BTreeMap<Tuple, Free>,
    /// Number of tuples at which unused tuples are searched for and removed.
    tuples_max: usize,
    entries: Sparse<Option<Entry>>,
    buckets: Vec<u32>,
    /// Local addresses in use with their numbers of connections, sorted by address.
    in_use: Vec<(IpAddr, u32)>,
    /// Number, modulo the size of the pool, of the local address that was tried first for the
    /// latest connection. The next connection begins with the next address.
    turn: usize,
}

impl LocalPorts {
    /// The local ports of a worker, none of which is in use. `seed` keys the hash function.
    pub(crate) fn new(worker: usize, workers: usize, seed: u64) -> Self {
        let workers = u16::try_from(workers.max(1)).unwrap_or(u16::MAX);
        Self {
            worker: u16::try_from(worker).unwrap_or(0) % workers,
            workers,
            hash_keys: (seed ^ 0x6c61_6464_725f_706f, seed.rotate_left(23)),
            tuples: BTreeMap::new(),
            tuples_max: TUPLES_MIN,
            entries: Sparse::default(),
            buckets: Vec::new(),
            in_use: Vec::new(),
            turn: 0,
        }
    }

    pub(crate) fn in_use(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.in_use.iter().map(|&(addr, _)| addr)
    }

    /// Whether no connection uses a local address.
    #[inline]
    pub(crate) const fn is_empty(&self) -> bool {
        self.in_use.is_empty()
    }

    /// Whether a connection uses `addr`, so that a packet to it may be a reply.
    #[inline]
    pub(crate) fn is_used(&self, addr: IpAddr) -> bool {
        !self.in_use.is_empty() && self.position(addr).is_ok()
    }

    pub(crate) fn connections(&self, addr: IpAddr) -> u64 {
        let at = self.position(addr);
        at.map_or(0, |at| self.in_use[at].1.into())
    }

    fn position(&self, addr: IpAddr) -> Result<usize, usize> {
        self.in_use.binary_search_by_key(&addr, |&(addr, _)| addr)
    }

    /// Reserves a local port towards `server`, using the addresses in `pool` in turn; `None` if no
    /// free port was found.
    pub(crate) fn take(
        &mut self,
        protocol: Protocol,
        server: SocketAddr,
        pool: &Arc<[LocalAddress]>,
        table: &ConnTable,
        now: Instant,
    ) -> Option<Taken> {
        self.turn = self.turn.wrapping_add(1);
        for step in 0..pool.len() {
            let local = pool[(self.turn % pool.len() + step) % pool.len()];
            if local.addr.is_ipv4() != server.is_ipv4() {
                continue;
            }
            let tuple = Tuple {
                protocol,
                server,
                local,
            };
            for _ in 0..TRIES {
                let Some(port) = self.take_of(&tuple, now) else {
                    break;
                };
                let taken = Taken { local, port };
                if self.find(protocol, server, taken.addr(), table).is_none() {
                    return Some(taken);
                }
                self.give_back(protocol, server, taken, now);
            }
        }
        None
    }

    pub(crate) fn has_free(
        &self,
        protocol: Protocol,
        server: SocketAddr,
        pool: &[LocalAddress],
        table: &ConnTable,
        now: Instant,
    ) -> bool {
        let family = |local: &&LocalAddress| local.addr.is_ipv4() == server.is_ipv4();
        pool.iter().filter(family).any(|&local| {
            let tuple = Tuple {
                protocol,
                server,
                local,
            };
            let is_free = |port: u16| {
                let taken = Taken { local, port };
                self.find(protocol, server, taken.addr(), table).is_none()
            };
            let Some(free) = self.tuples.get(&tuple) else {
                return self.count(local) > 0;
            };
            let (count, base) = (self.count(local), self.base(local));
            let released = free.released.iter();
            let quiet = released.filter(|Reverse((since, _))| *since + QUIET <= now);
            let fresh = (0..free.fresh).rev().filter_map(|fresh| {
                let port = free.port(fresh, count, base, self.workers)?;
                (!free.apart.contains(&port)).then_some(port)
            });
            let ports = quiet.map(|Reverse((_, port))| *port).chain(fresh);
            ports.take(TRIES).any(is_free)
        })
    }

    fn take_of(&mut self, tuple: &Tuple, now: Instant) -> Option<u16> {
        self.remember(tuple, now);
        let (count, base) = (self.count(tuple.local), self.base(tuple.local));
        let free = self.tuples.get_mut(tuple)?;
        let quiet = free
            .released
            .peek()
            .filter(|Reverse((since, _))| *since + QUIET <= now);
        let port = if let Some(&Reverse((_, port))) = quiet {
            free.released.pop();
            port
        } else {
            loop {
                free.fresh = free.fresh.checked_sub(1)?;
                let port = free.port(free.fresh, count, base, self.workers)?;
                if !free.apart.remove(&port) {
                    break port;
                }
            }
        };
        free.used += 1;
        Some(port)
    }

    /// Creates the state of a tuple without reserved ports, if there is none.
    fn remember(&mut self, tuple: &Tuple, now: Instant) {
        if !self.tuples.contains_key(tuple) {
            self.forget_unused(now);
            let fresh = self.count(tuple.local);
            // RFC 6056, 3.3.3: an attacker must not be able to guess where the ports begin.
            let from = (self.hash(tuple.protocol, tuple.server, tuple.local.addr, 0) >> 16)
                % u64::from(fresh.max(1));
            let free = Free {
                from: u16::try_from(from).unwrap_or(0),
                fresh,
                apart: BTreeSet::new(),
                released: BinaryHeap::new(),
                quiet_at: Instant::ZERO,
                used: 0,
            };
            self.tuples.insert(*tuple, free);
        }
    }

    /// Reserves the port of a connection of a previous process. `false` if another connection uses
    /// the port, if the port belongs to another worker or is privileged, or if the local address
    /// and the server are of different families.
    pub(crate) fn adopt(
        &mut self,
        index: u32,
        local: SocketAddr,
        pool: &[LocalAddress],
        table: &ConnTable,
        now: Instant,
    ) -> bool {
        let slot = table.get(index);
        let (protocol, server, port) = (slot.protocol(), slot.server_addr(), local.port());
        let (worker, workers) = (usize::from(self.worker), usize::from(self.workers));
        let usual = LocalAddress::new(local.ip());
        if local.is_ipv4() != server.is_ipv4()
            || port < usual.first
            || worker_of(port, workers) != worker
            || self.find(protocol, server, local, table).is_some()
        {
            return false;
        }
        let has_it = |range: &&LocalAddress| {
            range.addr == local.ip() && (range.first..=range.last).contains(&port)
        };
        // If no range contains the port, the address was removed from the pool, or has other ports
        // now.
        let range = pool.iter().find(has_it).copied().unwrap_or(usual);
        let tuple = Tuple {
            protocol,
            server,
            local: range,
        };
        self.remember(&tuple, now);
        if let Some(free) = self.tuples.get_mut(&tuple) {
            free.apart.insert(port);
            free.used += 1;
        }
        let taken = Taken { local: range, port };
        self.bind(index, taken, table);
        true
    }

    /// Number of ports in a range that belong to this worker.
    fn count(&self, local: LocalAddress) -> u16 {
        let (base, last) = (self.base(local), u32::from(local.last));
        let count = (last + 1)
            .saturating_sub(base)
            .div_ceil(u32::from(self.workers));
        u16::try_from(count).unwrap_or(u16::MAX)
    }

    /// The first port of a local address that belongs to this worker.
    fn base(&self, local: LocalAddress) -> u32 {
        let (first, workers) = (u32::from(local.first), u32::from(self.workers));
        first + (u32::from(self.worker) + workers - first % workers) % workers
    }

    /// Releases a port. `quiet_since` is the time of the last packet of its connection.
    pub(crate) fn give_back(
        &mut self,
        protocol: Protocol,
        server: SocketAddr,
        taken: Taken,
        quiet_since: Instant,
    ) {
        let tuple = Tuple {
            protocol,
            server,
            local: taken.local,
        };
        if let Some(free) = self.tuples.get_mut(&tuple) {
            free.used = free.used.saturating_sub(1);
            free.quiet_at = free.quiet_at.max(quiet_since + QUIET);
            free.released.push(Reverse((quiet_since, taken.port)));
        }
    }

    /// Removes tuples without connections whose ports can all be reused, once the number of tuples
    /// has doubled since the last removal.
    fn forget_unused(&mut self, now: Instant) {
        if self.tuples.len() < self.tuples_max {
            return;
        }
        self.tuples
            .retain(|_, free| free.used > 0 || free.quiet_at > now);
        self.tuples_max = (self.tuples.len() * 2).max(TUPLES_MIN);
    }

    /// Assigns a reserved port to connection `index`.
    pub(crate) fn bind(&mut self, index: u32, taken: Taken, table: &ConnTable) {
        if self.buckets.is_empty() {
            // 0 means "none", so that memory from the kernel, which is zero, need not be written.
            self.buckets = vec![0; table.capacity().next_power_of_two()];
        }
        let bucket = self.bucket_of(index, taken, table);
        *self.entries.entry(index) = Some(Entry {
            taken,
            next: self.buckets[bucket].wrapping_sub(1),
        });
        self.buckets[bucket] = index + 1;
        match self.position(taken.local.addr) {
            Ok(at) => self.in_use[at].1 += 1,
            Err(at) => self.in_use.insert(at, (taken.local.addr, 1)),
        }
    }

    /// Releases the port of connection `index`, which must still be in the table.
    pub(crate) fn release(&mut self, index: u32, table: &ConnTable) {
        let entry = self.entries.get_mut(index).and_then(Option::take);
        let Some(Entry { taken, next }) = entry else {
            return;
        };
        let bucket = self.bucket_of(index, taken, table);
        let mut at = self.buckets[bucket].wrapping_sub(1);
        if at == index {
            self.buckets[bucket] = next.wrapping_add(1);
        }
        while let Some(Some(entry)) = self.entries.get_mut(at) {
            if entry.next == index {
                entry.next = next;
                break;
            }
            at = entry.next;
        }
        if let Ok(at) = self.position(taken.local.addr) {
            self.in_use[at].1 -= 1;
            if self.in_use[at].1 == 0 {
                self.in_use.remove(at);
            }
        }
        let slot = table.get(index);
        let quiet_since = slot.last_restart();
        self.give_back(slot.protocol(), slot.server_addr(), taken, quiet_since);
    }

    /// The director's address and port towards the server of connection `index`, if it uses full
    /// NAT.
    #[inline]
    pub(crate) fn of(&self, index: u32) -> Option<SocketAddr> {
        Some(self.entries.get(index)?.as_ref()?.taken.addr())
    }

    /// The connection to which a packet from `server` to `local` belongs.
    #[inline]
    pub(crate) fn find(
        &self,
        protocol: Protocol,
        server: SocketAddr,
        local: SocketAddr,
        table: &ConnTable,
    ) -> Option<u32> {
        if self.buckets.is_empty() {
            return None;
        }
        let bucket = self.bucket(protocol, server, local);
        let mut index = self.buckets[bucket].wrapping_sub(1);
        while let Some(Some(entry)) = self.entries.get(index) {
            let slot = table.get(index);
            if entry.taken.addr() == local
                && slot.server_addr() == server
                && slot.protocol() == protocol
            {
                return Some(index);
            }
            index = entry.next;
        }
        None
    }

    fn bucket_of(&self, index: u32, taken: Taken, table: &ConnTable) -> usize {
        let slot = table.get(index);
        self.bucket(slot.protocol(), slot.server_addr(), taken.addr())
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "masked to the number of buckets"
    )]
    fn bucket(&self, protocol: Protocol, server: SocketAddr, local: SocketAddr) -> usize {
        let hash = self.hash(protocol, server, local.ip(), local.port());
        hash as usize & (self.buckets.len() - 1)
    }

    fn hash(&self, protocol: Protocol, server: SocketAddr, local: IpAddr, port: u16) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.hash_keys.0, self.hash_keys.1);
        for addr in [server.ip(), local] {
            match addr {
                IpAddr::V4(addr) => hasher.write_u32(addr.to_bits()),
                IpAddr::V6(addr) => hasher.write_u128(addr.to_bits()),
            }
        }
        let ports = u64::from(server.port()) << 24 | u64::from(port) << 8;
        hasher.write_u64(ports | u64::from(protocol.0));
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::Ipv4Addr;

    use crate::conn::{Draft, Key};
    use std::collections::HashSet;

    fn addr(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn pool(last: u16) -> Arc<[LocalAddress]> {
        let local = |addr: &str| LocalAddress {
            addr: addr.parse().unwrap(),
            first: 1024,
            last,
        };
        Arc::from([local("10.0.0.2"), local("fd00::2")])
    }

    /// A connection table, and its local ports.
    struct Bed {
        table: ConnTable,
        ports: LocalPorts,
        pool: Arc<[LocalAddress]>,
    }

    impl Bed {
        fn new(last: u16, worker: usize, workers: usize) -> Self {
            Self {
                table: ConnTable::new(1 << 17, 1),
                ports: LocalPorts::new(worker, workers, 7),
                pool: pool(last),
            }
        }

        /// A test bed for a few hundred connections: the page faults of a large table take 60 ms,
        /// and a property test has 256 cases.
        fn small(last: u16) -> Self {
            Self {
                table: ConnTable::new(1 << 9, 1),
                ports: LocalPorts::new(0, 1, 7),
                pool: pool(last),
            }
        }

        fn open(&mut self, client: u16, server: SocketAddr, now: Instant) -> Option<u32> {
            let Self { table, ports, pool } = self;
            let taken = ports.take(Protocol::TCP, server, pool, table, now)?;
            let key = Key {
                protocol: Protocol::TCP,
                client: SocketAddr::from(([192, 0, 2, 1], client)),
                virt: addr("198.51.100.1:80"),
            };
            let index = table.insert(&Draft::new(&key, server, 5), now)?;
            ports.bind(index, taken, table);
            Some(index)
        }

        fn close(&mut self, index: u32) {
            self.ports.release(index, &self.table);
            self.table.remove(index);
        }
    }

    #[test]
    fn local_port_is_unique_per_server_and_finds_its_connection() {
        let mut bed = Bed::new(u16::MAX, 0, 1);
        let mut seen = HashSet::new();
        for server in ["10.1.0.1:80", "10.1.0.2:80"] {
            let server = addr(server);
            for n in 0..64_512u16 {
                let index = bed.open(n, server, Instant::ZERO).expect("a port is free");
                let local = bed.ports.of(index).unwrap();
                assert!(
                    local.port() >= 1024 && seen.insert((server, local)),
                    "{local} is below port 1024, or used twice for {server}"
                );
                let found = bed.ports.find(Protocol::TCP, server, local, &bed.table);
                assert_eq!(found, Some(index));
                assert_eq!(
                    bed.ports.find(Protocol::UDP, server, local, &bed.table),
                    None
                );
            }
            assert_eq!(
                bed.open(1, server, Instant::ZERO),
                None,
                "a port is used twice"
            );
        }
        assert!(bed.open(1, addr("10.1.0.1:81"), Instant::ZERO).is_some());
    }

    #[test]
    fn local_port_is_reused_for_same_server_60_seconds_after_last_packet() {
        let mut bed = Bed::new(1024, 0, 1);
        let server = addr("10.1.0.1:80");
        let at = Instant::from_secs;
        let index = bed.open(1, server, at(100)).unwrap();
        bed.close(index);
        assert_eq!(bed.open(2, server, at(159)), None);
        assert!(
            bed.open(2, addr("10.1.0.2:80"), at(159)).is_some(),
            "the port is not free for another server"
        );
        let index = bed
            .open(3, server, at(160))
            .expect("the port is free after 60 s");
        // The time in TIME_WAIT counts: the last packet arrived 120 s ago.
        bed.table.get(index).set_timeout(120);
        bed.table.restart(index, at(200));
        bed.close(index);
        assert!(bed.open(4, server, at(320)).is_some());
        assert!(bed.ports.is_used("10.0.0.2".parse().unwrap()));
    }

    #[test]
    fn adopted_connection_keeps_local_port_of_predecessor_if_valid_and_unused() {
        let mut bed = Bed::new(1027, 0, 1);
        let server = addr("10.1.0.1:80");
        let at = Instant::from_secs;
        let adopt = |bed: &mut Bed, local: &str| {
            let key = Key {
                protocol: Protocol::TCP,
                client: SocketAddr::from(([192, 0, 2, 7], 1)),
                virt: addr("198.51.100.1:80"),
            };
            let index = bed.table.insert(&Draft::new(&key, server, 5), at(0));
            let index = index.unwrap();
            let Bed { table, ports, pool } = bed;
            (index, ports.adopt(index, addr(local), pool, table, at(0)))
        };
        // Ports 1024 to 1027 of one address, and a port of an address that is no longer in the
        // pool.
        let (first, done) = adopt(&mut bed, "10.0.0.2:1025");
        assert!(done);
        for (local, done) in [
            ("10.0.0.2:1026", true),
            ("10.0.0.9:7000", true),
            ("10.0.0.2:1026", false),
            ("10.0.0.2:80", false),
            ("[fd00::2]:1026", false),
        ] {
            assert_eq!(adopt(&mut bed, local).1, done, "{local}");
        }
        let found = bed
            .ports
            .find(Protocol::TCP, server, addr("10.0.0.2:1025"), &bed.table);
        assert_eq!(found, Some(first));
        let ports = |bed: &Bed, index: u32| bed.ports.of(index).unwrap().port();
        let mut new = Vec::new();
        while let Some(index) = bed.open(1, server, at(1)) {
            new.push(ports(&bed, index));
        }
        new.sort_unstable();
        assert_eq!(new, [1024, 1027]);
        // After its release, the port is not reused for 60 s, like any other port.
        bed.table.restart(first, at(10));
        bed.close(first);
        assert_eq!(bed.open(2, server, at(69)), None);
        let again = bed
            .open(2, server, at(70))
            .expect("the port is free after 60 s");
        assert_eq!(ports(&bed, again), 1025);
        assert_eq!(bed.open(3, server, at(1000)), None);
    }

    #[test]
    fn local_port_identifies_worker() {
        for workers in [1, 2, 3, 4, 7] {
            let mut seen = HashSet::new();
            for worker in 0..workers {
                let mut bed = Bed::new(2047, worker, workers);
                while let Some(index) = bed.open(1, addr("10.1.0.1:80"), Instant::ZERO) {
                    let port = bed.ports.of(index).unwrap().port();
                    assert_eq!(worker_of(port, workers), worker);
                    assert!((1024..=2047).contains(&port) && seen.insert(port));
                }
            }
            assert_eq!(seen.len(), 1024, "{workers} workers");
        }
    }

    #[test]
    fn local_ports_of_unused_servers_are_removed() {
        let mut bed = Bed::new(u16::MAX, 0, 1);
        for n in 0..100_000u32 {
            let server = Ipv4Addr::from_bits(0x0a00_0000 + n);
            let server = SocketAddr::from((server, 80));
            let now = Instant::from_secs(u64::from(n));
            let index = bed.open(1, server, now).unwrap();
            bed.close(index);
        }
        assert!(
            bed.ports.tuples.len() <= TUPLES_MIN,
            "{}",
            bed.ports.tuples.len()
        );
        assert_eq!(bed.ports.in_use().count(), 0);
    }

    proptest::proptest! {
        #[test]
        fn local_port_is_never_shared_by_connections_to_one_server(
            steps in proptest::collection::vec((0u8..4, 0u8..3, proptest::prelude::any::<bool>(), 0u64..40), 1..300)
        ) {
            let mut bed = Bed::small(1031);
            let (mut now, mut open) = (Instant::ZERO, Vec::new());
            for (what, server, wide, wait) in steps {
                now = now + Duration::from_secs(wait);
                // The range of ports changes during the test.
                bed.pool = pool(if wide { 1039 } else { 1031 });
                if what == 0 && !open.is_empty() {
                    bed.close(open.remove(usize::from(server) % open.len()));
                } else if let Some(index) = bed.open(1, SocketAddr::from(([10, 1, 0, server], 80)), now) {
                    open.push(index);
                }
                let all: HashSet<_> = open
                    .iter()
                    .map(|&index| (bed.table.get(index).server_addr(), bed.ports.of(index)))
                    .collect();
                proptest::prop_assert_eq!(all.len(), open.len());
                for &index in &open {
                    let (server, local) = (bed.table.get(index).server_addr(), bed.ports.of(index).unwrap());
                    proptest::prop_assert_eq!(bed.ports.find(Protocol::TCP, server, local, &bed.table), Some(index));
                }
            }
        }
    }
}

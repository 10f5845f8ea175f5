//! Limits SYNs during a flood, and decides which clients may open TCP connections.
//!
//! A SYN is the most expensive packet for the director, and can be sent with a forged source. While
//! SYNs use less than half of a worker's time, all of them pass: without a flood, other packets use
//! more time. If SYNs need more than half of the time, each of three kinds of SYNs has a separate
//! share of the time:
//!
//! * SYNs of known clients, which have sent more than a handshake in a connection within the last
//!   5 to 10 minutes (a forged source has not);
//! * repeated SYNs, which every honest client sends after a second;
//! * all other SYNs.
//!
//! Within a kind, the share is divided among networks of sources (/24 of IPv4, /48 of IPv6), so
//! that the flood of one network leaves the shares of the others. The memory has a fixed size for
//! any number of sources.

use std::hash::BuildHasher;
#[cfg(not(test))]
use std::hash::RandomState as Hasher;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use lvs_core::Instant;

/// If SYNs need more than 1/`CALM` of the time, they are classified.
const CALM: u32 = 2;
/// Each kind of SYN gets 1/n of the time, with its number n in this array: SYNs of known clients,
/// repeated SYNs, and others.
const SHARES: [u32; KINDS] = [3, 16, 16];
const KINDS: usize = 3;
/// Maximum time in nanoseconds that a budget of the whole time could save for later. The budget of
/// a part of the time can save this part of the maximum.
const SAVED: i64 = 50_000_000;
/// SYNs are classified until this time after the last dropped SYN.
const CAUTIOUS: Duration = Duration::from_secs(1);
/// Length of an epoch in nanoseconds; for each epoch, the shares are divided among networks again.
const EPOCH: u64 = 50_000_000;
/// Number of buckets for networks.
const NETWORKS: u16 = 1024;

/// Number of the client's packets in one connection after which the SYN limiter counts the client
/// as known. A handshake contains two of them.
pub(super) const KNOWN_AFTER: u32 = 3;

/// A client stays known for this time, and at most for twice this time.
const KNOWN_FOR: Duration = Duration::from_secs(300);
/// Number of bits of the filter for known clients, in each of two generations: with a million known
/// clients, one in 16 other clients also counts as known.
const KNOWN_BITS: usize = 1 << 23;
/// A SYN is remembered for this time, and at most for twice this time. Clients repeat a SYN after
/// one, three and seven seconds.
const SEEN_FOR: Duration = Duration::from_secs(4);
/// Number of bits of the filter for repeated SYNs: in a flood of 200,000 SYNs per second, one in
/// 300 is mistaken for a repeated one.
const SEEN_BITS: usize = 1 << 24;

/// A budget of time: a part of each second, and the unused time of earlier seconds.
#[derive(Debug)]
struct Purse {
    /// The remaining time in nanoseconds; negative if the last batch used more.
    left: i64,
}

impl Purse {
    /// Maximum time in nanoseconds that a budget of 1/`part` of the time can save.
    const fn most(part: u32) -> i64 {
        SAVED / part as i64
    }

    fn full(part: u32) -> Self {
        Self {
            left: Self::most(part),
        }
    }

    fn earn(&mut self, passed: Duration, part: u32) {
        let earned = i64::try_from(passed.as_nanos()).unwrap_or(i64::MAX) / i64::from(part);
        self.left = self.left.saturating_add(earned).min(Self::most(part));
    }

    /// Subtracts the time that SYNs have used. The debt is limited, so that the effect of one long
    /// batch ends soon.
    fn spend(&mut self, nanoseconds: u64, part: u32) {
        let spent = i64::try_from(nanoseconds).unwrap_or(i64::MAX);
        self.left = self.left.saturating_sub(spent).max(-Self::most(part));
    }

    const fn has_any(&self) -> bool {
        self.left > 0
    }
}

/// One kind of SYNs: its part of the time, and the use of this part in the present epoch.
#[derive(Debug)]
struct Kind {
    part: u32,
    purse: Purse,
    /// Number of SYNs that were counted for the quota of each network in this epoch.
    taken: Box<[u16; NETWORKS as usize]>,
    /// Number of networks that have sent SYNs of this kind in this epoch.
    asking: u32,
    /// Number of SYNs that each network may send in this epoch.
    quota: u16,
    /// Number of SYNs that remain after all quotas: this many networks may send one more SYN.
    rest: u64,
    passed: u32,
}

impl Kind {
    fn new(part: u32) -> Self {
        Self {
            part,
            purse: Purse::full(part),
            taken: Box::new([0; NETWORKS as usize]),
            asking: 0,
            quota: u16::MAX,
            rest: 0,
            passed: 0,
        }
    }

    /// Divides the kind's time among the networks that sent SYNs in the last epoch. `cost` is the
    /// time for one SYN in nanoseconds.
    fn share_out(&mut self, cost: u64) {
        let all = EPOCH / u64::from(self.part) / cost.max(1);
        let asking = u64::from(self.asking.max(1));
        self.quota = u16::try_from(all / asking).unwrap_or(u16::MAX).max(1);
        self.rest = all.saturating_sub(u64::from(self.quota) * asking);
        self.taken.fill(0);
        self.asking = 0;
    }

    /// Counts a SYN of `network`, and returns whether it passes: within the network's quota, while
    /// the budget is not used up. A network that has used up its quota may send one more SYN if
    /// SYNs remain after all quotas, and more than half of the maximum budget is left.
    fn pass(&mut self, network: u16) -> bool {
        let taken = &mut self.taken[usize::from(network)];
        self.asking += u32::from(*taken == 0);
        let passes = if *taken < self.quota {
            *taken += 1;
            self.purse.has_any()
        } else if *taken == self.quota
            && self.rest > 0
            && self.purse.left > Purse::most(self.part) / 2
        {
            *taken = taken.saturating_add(1);
            self.rest -= 1;
            true
        } else {
            false
        };
        self.passed += u32::from(passes);
        passes
    }
}

/// A Bloom filter of hashes, in two generations: new hashes enter the first, and the older
/// generation is discarded after some time.
#[derive(Debug)]
struct Memory {
    generations: [Box<[u64]>; 2],
    /// Whether each generation contains any hash.
    used: [bool; 2],
    since: Instant,
    lasts: Duration,
}

impl Memory {
    fn new(bits: usize, lasts: Duration) -> Self {
        let generation = || vec![0; bits / 64].into_boxed_slice();
        Self {
            generations: [generation(), generation()],
            used: [false; 2],
            since: Instant::ZERO,
            lasts,
        }
    }

    /// Discards the older generation if its time is over.
    fn age(&mut self, now: Instant) {
        let passed = now.saturating_since(self.since);
        if passed < self.lasts {
            return;
        }
        // After two periods, both generations are replaced.
        let turns = if passed >= 2 * self.lasts { 2 } else { 1 };
        for _ in 0..turns {
            self.generations.swap(0, 1);
            self.used.swap(0, 1);
            if std::mem::take(&mut self.used[0]) {
                self.generations[0].fill(0);
            }
        }
        self.since = now;
    }

    /// The bits of a hash in the filter, each as the index of a word and a bit.
    fn places(&self, hash: u64) -> [(usize, u64); 3] {
        let bits = self.generations[0].len() as u64 * 64;
        // The number of bits is a power of two, and the step is odd, so the three places differ.
        let (start, step) = (hash, (hash >> 32) | 1);
        [0, 1, 2].map(|n| {
            let bit = start.wrapping_add(step.wrapping_mul(n)) & (bits - 1);
            ((bit / 64) as usize, 1 << (bit % 64))
        })
    }

    fn insert(&mut self, hash: u64) {
        for (word, bit) in self.places(hash) {
            self.generations[0][word] |= bit;
        }
        self.used[0] = true;
    }

    fn contains(&self, hash: u64) -> bool {
        let places = self.places(hash);
        self.generations.iter().any(|generation| {
            places
                .iter()
                .all(|&(word, bit)| generation[word] & bit != 0)
        })
    }
}

/// Tests use one hash: with a random one, two networks of a test may have the same share.
#[cfg(test)]
type Hasher = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;

/// A worker's limiter of SYNs in a flood.
#[derive(Debug)]
pub struct SynLimiter {
    hasher: Hasher,
    known: Memory,
    seen: Memory,
    kinds: [Kind; KINDS],
    all: Purse,
    /// The time until which SYNs are classified.
    until: Option<Instant>,
    /// Cost of a SYN in nanoseconds, as a moving average.
    cost: u64,
    /// Time at which the budgets last received their parts of the time.
    earned: Instant,
    epoch: Instant,
    /// Number of SYNs in the current batch that have passed without being classified.
    passed: u32,
    /// Number of SYNs in the current batch that were refused.
    refused: u32,
}

impl Default for SynLimiter {
    fn default() -> Self {
        Self {
            hasher: Hasher::default(),
            known: Memory::new(KNOWN_BITS, KNOWN_FOR),
            seen: Memory::new(SEEN_BITS, SEEN_FOR),
            kinds: SHARES.map(Kind::new),
            all: Purse::full(CALM),
            until: None,
            cost: 4000,
            earned: Instant::ZERO,
            epoch: Instant::ZERO,
            passed: 0,
            refused: 0,
        }
    }
}

impl SynLimiter {
    /// Whether there are so many SYNs that they are classified.
    pub const fn sorts(&self) -> bool {
        self.until.is_some()
    }

    /// Simulates a flood that continues for an hour, in which almost no SYN passes. For tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn is_flooded(&mut self, now: Instant) {
        self.until = Some(now + Duration::from_secs(3600));
        self.cost = 1_000_000_000;
        self.epoch = now;
        for kind in &mut self.kinds {
            kind.share_out(self.cost);
        }
    }

    /// Records that `client` has a connection, so that it counts as a known client for 5 to 10
    /// minutes.
    pub(super) fn meets(&mut self, client: IpAddr, now: Instant) {
        self.known.age(now);
        let hash = self.hasher.hash_one(host_of(client));
        self.known.insert(hash);
    }

    /// Counts a SYN with this sequence number, and returns whether it passes; otherwise it must be
    /// dropped. While SYNs are not classified, all pass.
    pub(super) fn passes(
        &mut self,
        client: SocketAddr,
        to: SocketAddr,
        number: u32,
        now: Instant,
    ) -> bool {
        if self.until.is_none() {
            self.passed += 1;
            return true;
        }
        self.next_epoch(now);
        self.seen.age(now);
        let flow = (host_of(client.ip()), client.port(), to.port(), number);
        let flow = self.hasher.hash_one(flow);
        let kind = if self
            .known
            .contains(self.hasher.hash_one(host_of(client.ip())))
        {
            0
        } else if self.seen.contains(flow) {
            1
        } else {
            2
        };
        self.seen.insert(flow);
        let [a, b, ..] = self.hasher.hash_one(network_of(client.ip())).to_be_bytes();
        let network = u16::from_be_bytes([a, b]) % NETWORKS;
        let passes = self.kinds[kind].pass(network);
        if !passes {
            self.refused += 1;
            self.until = Some(now + CAUTIOUS);
        }
        passes
    }

    fn next_epoch(&mut self, now: Instant) {
        if now.saturating_since(self.epoch) >= Duration::from_nanos(EPOCH) {
            self.epoch = now;
            for kind in &mut self.kinds {
                kind.share_out(self.cost);
            }
        }
    }

    /// Records that a batch of `frames` frames took the time `took`; `now` is the present time.
    /// Begins to classify SYNs when the time for them is used up, and ends this when no SYN was
    /// dropped for a second.
    pub fn spent(&mut self, frames: usize, took: Duration, now: Instant) {
        let passed = now.saturating_since(self.earned);
        self.earned = now;
        self.all.earn(passed, CALM);
        for kind in &mut self.kinds {
            kind.purse.earn(passed, kind.part);
        }
        let unsorted = std::mem::take(&mut self.passed);
        let refused = std::mem::take(&mut self.refused) as usize;
        let sorted: u32 = self.kinds.iter().map(|kind| kind.passed).sum();
        if unsorted + sorted > 0 {
            // Refused SYNs used almost no processor time.
            let others = frames.saturating_sub(refused).max(1) as u64;
            let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            let each = took / others;
            self.cost = (self.cost * 63 + each) / 64;
            self.all.spend(each * u64::from(unsorted + sorted), CALM);
            for kind in &mut self.kinds {
                let passed = u64::from(std::mem::take(&mut kind.passed));
                kind.purse.spend(each * passed, kind.part);
            }
        }
        match self.until {
            None if !self.all.has_any() => self.until = Some(now + CAUTIOUS),
            Some(until) if until <= now => self.until = None,
            _ => {}
        }
    }
}

/// The source that counts as one client: an IPv4 address, or the /64 of an IPv6 address, in which a
/// host can choose any address.
fn host_of(addr: IpAddr) -> u64 {
    match addr {
        IpAddr::V4(addr) => addr.to_bits().into(),
        IpAddr::V6(addr) => (addr.to_bits() >> 64) as u64,
    }
}

/// The network of a client: the first 24 bits of an IPv4 address, or 48 of an IPv6 address.
fn network_of(addr: IpAddr) -> u64 {
    match addr {
        IpAddr::V4(addr) => u64::from(addr.to_bits() >> 8),
        IpAddr::V6(addr) => (addr.to_bits() >> 80) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 10)), 80);
    /// Time for a SYN that passes.
    const COST: Duration = Duration::from_micros(8);
    const STEP: Duration = Duration::from_micros(5);

    fn client(n: u32) -> SocketAddr {
        // SYNs from 2^16 addresses and many ports.
        let mixed = n.wrapping_mul(0x9e37_79b1);
        let [a, b, c, d] = mixed.to_be_bytes();
        SocketAddr::from(([198, 18, a, b], u16::from_be_bytes([c, d])))
    }

    /// A limiter during a flood of 200,000 SYNs per second, and the number of SYNs that have
    /// passed.
    struct Flood {
        syn_limiter: SynLimiter,
        now: Instant,
        sent: u32,
        passed: u32,
        source: fn(u32) -> SocketAddr,
    }

    impl Flood {
        fn new(source: fn(u32) -> SocketAddr) -> Self {
            Self {
                syn_limiter: SynLimiter::default(),
                now: Instant::ZERO,
                sent: 0,
                passed: 0,
                source,
            }
        }

        /// Sends a batch of 32 SYNs of the flood, followed by the SYNs `others`. Returns for each
        /// of `others` whether it has passed.
        fn batch(&mut self, others: &[(SocketAddr, u32)]) -> Vec<bool> {
            let mut passed = 0;
            for _ in 0..32 {
                let source = (self.source)(self.sent);
                passed += u32::from(self.syn_limiter.passes(source, TO, self.sent, self.now));
                self.sent += 1;
            }
            self.passed += passed;
            let others = others
                .iter()
                .map(|&(client, number)| self.syn_limiter.passes(client, TO, number, self.now));
            let others: Vec<bool> = others.collect();
            let took = COST * (passed + u32::try_from(others.len()).unwrap());
            self.now = self.now + took.max(STEP * 32);
            self.syn_limiter.spent(32 + others.len(), took, self.now);
            others
        }

        fn run(&mut self, time: Duration) {
            let end = self.now + time;
            while self.now < end {
                self.batch(&[]);
            }
        }
    }

    #[test]
    fn syn_flood_gets_about_a_sixteenth_of_time_and_known_clients_pass() {
        let mut flood = Flood::new(client);
        let honest = |n: u16| SocketAddr::from(([192, 0, 2, 100], n));
        flood.syn_limiter.meets(honest(1).ip(), flood.now);
        flood.run(Duration::from_secs(1));
        let (begun, already) = (flood.now, flood.passed);
        for n in 0..1000 {
            assert_eq!(flood.batch(&[(honest(n), n.into())]), [true], "{n}");
            flood.run(Duration::from_millis(1));
        }
        let passed = f64::from(flood.passed - already);
        let share = passed * COST.as_secs_f64() / flood.now.saturating_since(begun).as_secs_f64();
        // At most a sixteenth passes, plus SYNs that the filter mistakes for repeated ones.
        assert!((0.05..0.08).contains(&share), "{share}");
    }

    #[test]
    fn repeated_syn_passes_during_flood() {
        let mut flood = Flood::new(client);
        flood.run(Duration::from_secs(2));
        let mut at_once = 0;
        for n in 0..100_u16 {
            let stranger = SocketAddr::from(([198, 18, 7, 7], n));
            at_once += u32::from(flood.batch(&[(stranger, 7)])[0]);
        }
        assert!(
            at_once < 50,
            "half of the clients in the flood's networks passed at once: {at_once}"
        );
        flood.run(Duration::from_secs(1));
        let mut again = 0;
        for n in 0..100_u16 {
            let stranger = SocketAddr::from(([198, 18, 7, 7], n));
            again += u32::from(flood.batch(&[(stranger, 7)])[0]);
            flood.run(Duration::from_millis(10));
        }
        assert!(again >= 95, "{again}");
    }

    #[test]
    fn flood_from_one_network_leaves_shares_of_other_networks() {
        let one = |n: u32| {
            let [_, b, c, d] = n.wrapping_mul(0x9e37_79b1).to_be_bytes();
            SocketAddr::from(([203, 0, 113, b], u16::from_be_bytes([c, d])))
        };
        let mut flood = Flood::new(one);
        flood.run(Duration::from_secs(2));
        let mut passed = 0;
        for n in 0..100 {
            let other = SocketAddr::from(([192, 0, 2, n], 4000));
            passed += u32::from(flood.batch(&[(other, 1)])[0]);
            flood.run(Duration::from_millis(5));
        }
        assert!(passed >= 95, "{passed}");
    }

    #[test]
    fn most_other_networks_pass_during_flood_from_many_networks() {
        let mut flood = Flood::new(client);
        flood.run(Duration::from_secs(2));
        let mut passed = 0;
        for n in 0..1000_u16 {
            let [high, low] = n.to_be_bytes();
            let other = SocketAddr::from(([100, 64 + high, low, 7], 4000));
            passed += u32::from(flood.batch(&[(other, 1)])[0]);
            flood.run(Duration::from_millis(5));
        }
        // Three of ten SYNs are counted in one of the 1,024 buckets that also count a network of
        // the flood.
        assert!(passed >= 650, "{passed}");
    }

    #[test]
    fn syns_below_half_of_processor_time_pass_and_limiter_relaxes() {
        let mut syn_limiter = SynLimiter::default();
        let mut now = Instant::ZERO;
        for n in 0..200_000_u32 {
            // In normal use, packets of existing connections need the rest of the time.
            assert!(syn_limiter.passes(client(n), TO, n, now));
            now = now + COST * 3;
            syn_limiter.spent(1, COST, now);
        }
        let mut flood = Flood::new(client);
        flood.run(Duration::from_secs(1));
        assert!(flood.syn_limiter.until.is_some());
        flood.now = flood.now + Duration::from_secs(2);
        flood.syn_limiter.spent(1, COST, flood.now);
        assert!(flood.syn_limiter.until.is_none());
    }

    #[test]
    fn syn_limiter_filter_discards_hash_after_two_periods() {
        let mut memory = Memory::new(1 << 12, Duration::from_secs(10));
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        memory.insert(7);
        memory.age(at(10));
        memory.insert(8);
        assert!(memory.contains(7) && memory.contains(8) && !memory.contains(9));
        memory.age(at(20));
        assert!(!memory.contains(7) && memory.contains(8));
        memory.age(at(99));
        assert!(!memory.contains(8));
    }

    /// With a million known clients, one in 16 other clients counts as known; with a flood of
    /// 200,000 a second, one in 300 other SYNs counts as repeated.
    #[test]
    fn syn_limiter_filters_limit_false_positives_and_memory() {
        let syn_limiter = SynLimiter::default();
        let hash = |n: u64| syn_limiter.hasher.hash_one(n);
        for (mut memory, count, part) in [
            (syn_limiter.known, 1_000_000, 16),
            (syn_limiter.seen, 800_000, 300),
        ] {
            let size = memory.generations.each_ref().map(|bits| bits.len());
            (0..count).for_each(|n| memory.insert(hash(n)));
            assert!((0..1000).all(|n| memory.contains(hash(n))));
            let others = (count..count + 100_000).filter(|&n| memory.contains(hash(n)));
            let others = others.count();
            assert!(
                (1..100_000 / part).contains(&others),
                "{others} of 100,000 instead of less than one in {part}"
            );
            assert_eq!(memory.generations.each_ref().map(|bits| bits.len()), size);
        }
    }
}

//! Counters, and the snapshots and rates that listings show.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::{Add, AddAssign, Sub};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::ServerId;
pub use crate::latency::Latency;

/// Counters or rates of a service, of a server, or of the whole director.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default))]
pub struct Counts {
    /// Number of new connections (in rates: connections per second).
    pub conns: u64,
    /// Number of packets from clients; a GSO/GRO super-packet counts as one.
    pub in_packets: u64,
    /// Number of packets from servers.
    pub out_packets: u64,
    /// Number of bytes from clients, IP headers included.
    pub in_bytes: u64,
    /// Number of bytes from servers, IP headers included.
    pub out_bytes: u64,
}

impl Counts {
    fn zip(self, other: Self, mut f: impl FnMut(u64, u64) -> u64) -> Self {
        Self {
            conns: f(self.conns, other.conns),
            in_packets: f(self.in_packets, other.in_packets),
            out_packets: f(self.out_packets, other.out_packets),
            in_bytes: f(self.in_bytes, other.in_bytes),
            out_bytes: f(self.out_bytes, other.out_bytes),
        }
    }
}

impl Add for Counts {
    type Output = Self;

    /// Adds field by field, modulo 2^64.
    fn add(self, other: Self) -> Self {
        self.zip(other, u64::wrapping_add)
    }
}

impl Sub for Counts {
    type Output = Self;

    /// Subtracts field by field, modulo 2^64.
    fn sub(self, other: Self) -> Self {
        self.zip(other, u64::wrapping_sub)
    }
}

/// Counters as listings show them (snapshots of every two seconds), their rates, and their present
/// values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default))]
pub struct Stats {
    /// The snapshot of the last two-second tick, minus the counts at the last `ipvsadm -Z`.
    pub shown: Counts,
    /// Rates per second, as the kernel's estimator computes them.
    pub rates: Counts,
    /// The counters at present, which are never zeroed.
    pub live: Counts,
}

/// The counters of one object in one shard. Only this shard writes them, so a plain load and store
/// suffices for an addition.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    conns: AtomicU64,
    in_packets: AtomicU64,
    out_packets: AtomicU64,
    in_bytes: AtomicU64,
    out_bytes: AtomicU64,
}

impl Counters {
    #[inline]
    pub(crate) fn count_in(&self, bytes: u32) {
        add(&self.in_packets, 1);
        add(&self.in_bytes, u64::from(bytes));
    }

    #[inline]
    pub(crate) fn count_out(&self, bytes: u32) {
        add(&self.out_packets, 1);
        add(&self.out_bytes, u64::from(bytes));
    }

    #[inline]
    pub(crate) fn count_connection(&self) {
        add(&self.conns, 1);
    }

    pub(crate) fn add(&self, counts: &Counts) {
        add(&self.conns, counts.conns);
        add(&self.in_packets, counts.in_packets);
        add(&self.out_packets, counts.out_packets);
        add(&self.in_bytes, counts.in_bytes);
        add(&self.out_bytes, counts.out_bytes);
    }

    fn read(&self) -> Counts {
        Counts {
            conns: self.conns.load(Relaxed),
            in_packets: self.in_packets.load(Relaxed),
            out_packets: self.out_packets.load(Relaxed),
            in_bytes: self.in_bytes.load(Relaxed),
            out_bytes: self.out_bytes.load(Relaxed),
        }
    }
}

#[inline]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

/// The counters of a service, a server or the director in each shard, and the rates.
#[derive(Debug)]
pub(crate) struct ObjectStats {
    shards: Vec<Arc<Counters>>,
    /// Counts that belong to no shard.
    beside: Counters,
    snapshot: Counts,
    zero: Counts,
    last: Counts,
    /// Averages, scaled as [`Self::tick`] describes.
    average: Counts,
}

impl ObjectStats {
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            shards: (0..shards).map(|_| Arc::default()).collect(),
            beside: Counters::default(),
            snapshot: Counts::default(),
            zero: Counts::default(),
            last: Counts::default(),
            average: Counts::default(),
        }
    }

    pub(crate) fn shard(&self, number: usize) -> Arc<Counters> {
        self.shards[number].clone()
    }

    /// Counters of one shard. The counters of the first shard include counts that belong to no
    /// shard, so that the sum is complete.
    pub(crate) fn live_of(&self, number: usize) -> Counts {
        let own = self.shards[number].read();
        match number {
            0 => own.zip(self.beside.read(), u64::wrapping_add),
            _ => own,
        }
    }

    pub(crate) fn live(&self) -> Counts {
        self.shards.iter().fold(self.beside.read(), |sum, shard| {
            sum.zip(shard.read(), u64::wrapping_add)
        })
    }

    /// Adds counts that belong to no shard.
    pub(crate) fn add(&self, counts: &Counts) {
        self.beside.add(counts);
    }

    /// The kernel's estimator, every two seconds (`ip_vs_estimation_kthread`,
    /// `ip_vs_chain_estimation`): an exponential average with weight 1/4. Connections and packets
    /// are scaled by 2^10 a second, bytes by 2^5.
    pub(crate) fn tick(&mut self) {
        self.snapshot = self.live();
        let delta = self.snapshot - self.last;
        self.last = self.snapshot;
        let step = |shift: u32| {
            move |average: u64, delta: u64| {
                let error = (delta << shift).wrapping_sub(average).cast_signed() >> 2;
                average.wrapping_add_signed(error)
            }
        };
        let (packets, bytes) = (step(9), step(4));
        let average = self.average;
        self.average = Counts {
            conns: packets(average.conns, delta.conns),
            in_packets: packets(average.in_packets, delta.in_packets),
            out_packets: packets(average.out_packets, delta.out_packets),
            in_bytes: bytes(average.in_bytes, delta.in_bytes),
            out_bytes: bytes(average.out_bytes, delta.out_bytes),
        };
    }

    /// Zeroes the counters and rates that listings show (`ipvsadm -Z`): the last snapshot counts as
    /// zero from now on.
    pub(crate) fn zero(&mut self) {
        self.zero = self.snapshot;
        self.last = self.snapshot;
        self.average = Counts::default();
    }

    pub(crate) fn stats(&self) -> Stats {
        let average = self.average;
        Stats {
            shown: self.snapshot - self.zero,
            rates: Counts {
                conns: (average.conns + 511) >> 10,
                in_packets: (average.in_packets + 511) >> 10,
                out_packets: (average.out_packets + 511) >> 10,
                in_bytes: (average.in_bytes + 15) >> 5,
                out_bytes: (average.out_bytes + 15) >> 5,
            },
            live: self.live(),
        }
    }
}

/// Dropped packets of one worker's connections, by server and reason.
/// [`Control::count_drops`](crate::Control::count_drops) moves the counts to the servers' services.
/// There are at most as many counts as servers times reasons.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerDrops(BTreeMap<(ServerId, &'static str), u64>);

impl ServerDrops {
    /// Counts a dropped packet of a connection to `server`; `None`: the packet is not counted for a
    /// service.
    pub fn count(&mut self, server: Option<ServerId>, reason: &'static str) {
        if let Some(server) = server {
            *self.0.entry((server, reason)).or_default() += 1;
        }
    }

    /// Whether no packet was counted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn pop(&mut self) -> Option<((ServerId, &'static str), u64)> {
        self.0.pop_first()
    }
}

/// Numbers of connections that were evicted to make room for new ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Evictions {
    /// Half-open connections, and connections with a single datagram.
    pub half_open: u64,
    /// Closed connections that stayed in the table for late packets (TCP: TIME_WAIT and CLOSE;
    /// SCTP: CLOSED).
    pub ended: u64,
    /// Connections whose client has sent at most two packets, as in a handshake, and then nothing
    /// for three seconds or longer.
    pub unused: u64,
    /// Connections without a packet for a minute.
    pub idle: u64,
}

impl AddAssign for Evictions {
    fn add_assign(&mut self, other: Self) {
        self.half_open += other.half_open;
        self.ended += other.ended;
        self.unused += other.unused;
        self.idle += other.idle;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conns_per_tick(conns: &[u64]) -> Vec<u64> {
        let mut stats = ObjectStats::new(2);
        conns
            .iter()
            .map(|&n| {
                (0..n).for_each(|i| stats.shards[usize::from(i % 3 == 0)].count_connection());
                stats.tick();
                stats.stats().rates.conns
            })
            .collect()
    }

    #[test]
    fn rates_equal_kernel_rates() {
        let burst = [100, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(
            conns_per_tick(&burst),
            [12, 9, 7, 5, 4, 3, 2, 2, 1, 1, 1, 1]
        );
        let steady = [100; 13];
        assert_eq!(
            conns_per_tick(&steady),
            [12, 22, 29, 34, 38, 41, 43, 45, 46, 47, 48, 48, 49]
        );
        assert_eq!(conns_per_tick(&[1, 0, 0]), [0, 0, 0]);

        let mut stats = ObjectStats::new(1);
        let bytes: Vec<u64> = (0..5)
            .map(|_| {
                stats.shards[0].count_in(2_000_000);
                stats.tick();
                stats.stats().rates.in_bytes
            })
            .collect();
        assert_eq!(bytes, [250_000, 437_500, 578_125, 683_594, 762_695]);
    }

    #[test]
    fn dropped_packets_of_server_and_reason_share_a_count() {
        let mut drops = ServerDrops::default();
        drops.count(None, "no_route");
        assert!(drops.is_empty());
        for server in [7, 8] {
            for _ in 0..1000 {
                drops.count(Some(ServerId(server)), "no_route");
                drops.count(Some(ServerId(server)), "too_big");
            }
        }
        assert_eq!(drops.0.len(), 4);
        assert_eq!(drops.pop(), Some(((ServerId(7), "no_route"), 1000)));
    }

    #[test]
    fn zeroed_counters_show_only_later_counts() {
        let mut stats = ObjectStats::new(1);
        stats.shards[0].count_in(100);
        stats.tick();
        stats.shards[0].count_in(100);
        stats.zero();
        assert_eq!(stats.stats().shown, Counts::default());
        stats.tick();
        assert_eq!(stats.stats().shown.in_packets, 1);
        assert_eq!(stats.stats().live.in_packets, 2);
    }
}

//! Rate limits of the ICMP errors that the dataplane sends.

use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use lvs_core::{Instant, Protocol};
use lvs_sys::lock;

use crate::parse::Packet;
use crate::wire::icmp::ErrorKind;

/// Number of buckets for receivers. Receivers with the same bucket share its tokens.
const PEERS: usize = 1024;
/// Number of buckets for which there is one lock.
const STRIPE: usize = 64;
/// Number of errors that a receiver may get at once (`XRLIM_BURST_FACTOR`).
const PEER_BURST: i64 = 6;

/// Limits of ICMP errors, as in the kernel's sysctls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Interval between two errors to one receiver, after a burst of six (`icmp_ratelimit`); zero
    /// disables all limits.
    pub per_receiver: Duration,
    /// Maximum number of errors per second to all receivers together (`icmp_msgs_per_sec`); 0 means
    /// no common limit.
    pub per_second: u32,
    /// Maximum number of errors to all receivers at once (`icmp_msgs_burst`).
    pub burst: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self::new(1000)
    }
}

impl Limits {
    /// Limits of `per_second` errors to all receivers together, at most a twentieth of them at
    /// once, and of one error per second to one receiver after a burst. 0 disables all limits.
    pub const fn new(per_second: u32) -> Self {
        if per_second == 0 {
            return Self::NONE;
        }
        Self {
            per_receiver: Duration::from_secs(1),
            per_second,
            burst: per_second.div_ceil(20),
        }
    }

    /// Limits that permit every ICMP error.
    pub const NONE: Self = Self {
        per_receiver: Duration::ZERO,
        per_second: 0,
        burst: 0,
    };
}

/// A token bucket that workers share. It is full when it is created.
#[derive(Debug)]
pub struct Bucket {
    /// Cost of one token in nanoseconds; 0 means no limit.
    cost: i64,
    /// Maximum of the saved credit in nanoseconds.
    full: i64,
    since: AtomicI64,
}

impl Bucket {
    /// A bucket that gets `per_second` tokens per second (0 means no limit), and contains at most
    /// `burst`.
    pub fn new(per_second: u32, burst: u32) -> Self {
        let cost = 1_000_000_000_i64
            .checked_div(per_second.into())
            .unwrap_or(0);
        Self {
            cost,
            full: cost.saturating_mul(burst.max(1).into()),
            since: AtomicI64::new(i64::MIN),
        }
    }

    /// Uses a token; `false` if none is available.
    pub fn take(&self, now: Instant) -> bool {
        if self.cost == 0 {
            return true;
        }
        let now = nanos(now);
        let taken = |since| take(since, now, self.cost, self.full);
        self.since
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken)
            .is_ok()
    }

    fn has_some(&self, now: Instant) -> bool {
        let since = self.since.load(Ordering::Relaxed);
        self.cost == 0 || take(since, nanos(now), self.cost, self.full).is_some()
    }
}

/// The value of [`Bucket::since`] after one token was used at `now`; `None` if the bucket is empty.
fn take(since: i64, now: i64, cost: i64, full: i64) -> Option<i64> {
    let since = since.max(now.saturating_sub(full));
    (now.saturating_sub(since) >= cost).then(|| since.saturating_add(cost))
}

fn nanos(now: Instant) -> i64 {
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

#[derive(Clone, Copy, Debug)]
struct Peer {
    addr: IpAddr,
    since: i64,
    last: i64,
}

/// Token buckets of a director, which its workers share: one for all errors, and one for each
/// receiver (`icmp_global_allow`, `inet_peer_xrlim_allow`).
#[derive(Debug)]
pub struct RateLimit {
    limits: Limits,
    all: Bucket,
    /// The buckets of receivers, in stripes with one lock each, so that workers seldom wait for
    /// each other.
    peers: [Mutex<[Option<Peer>; STRIPE]>; PEERS / STRIPE],
    suppressed: AtomicU64,
}

impl RateLimit {
    /// Creates the buckets, all of them full.
    pub fn new(limits: Limits) -> Self {
        Self {
            all: Bucket::new(limits.per_second, limits.burst),
            limits,
            peers: std::array::from_fn(|_| Mutex::new([None; STRIPE])),
            suppressed: AtomicU64::new(0),
        }
    }

    /// Whether an error may be sent to `receiver` now. If so, uses a token of the bucket of the
    /// receiver and one of the bucket for all errors; otherwise counts the error as suppressed.
    /// Errors of path MTU discovery, and all errors without limits ([`Limits::NONE`]), are allowed
    /// and use no token.
    pub fn allow(&self, kind: ErrorKind, receiver: IpAddr, now: Instant) -> bool {
        // The kernel never limits path MTU discovery (`icmpv4_mask_allow`).
        if matches!(
            kind,
            ErrorKind::FragmentationNeeded(_)
                | ErrorKind::Relayed {
                    kind: 3,
                    code: 4,
                    ..
                }
        ) || self.limits.per_receiver.is_zero()
        {
            return true;
        }
        // Errors that are refused for one receiver do not use tokens of the common limit
        // (CVE-2024-47678).
        let allowed = self.all.has_some(now) && self.peer(receiver, now) && self.all.take(now);
        if !allowed {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
        }
        allowed
    }

    /// Number of errors that were not sent because of the limits.
    pub fn suppressed(&self) -> u64 {
        self.suppressed.load(Ordering::Relaxed)
    }

    fn peer(&self, receiver: IpAddr, now: Instant) -> bool {
        let cost = i64::try_from(self.limits.per_receiver.as_nanos()).unwrap_or(i64::MAX);
        let full = cost.saturating_mul(PEER_BURST);
        let now = nanos(now);
        let slot = slot(receiver);
        let mut stripe = lock(&self.peers[slot / STRIPE]);
        let peer = &mut stripe[slot % STRIPE];
        let since = match *peer {
            // If another receiver gets a recently used bucket, the used tokens stay used, so that a
            // sender with many addresses cannot refill the bucket.
            Some(old) if old.addr == receiver || now.saturating_sub(old.last) < cost => old.since,
            _ => i64::MIN,
        };
        let taken = take(since, now, cost, full);
        *peer = Some(Peer {
            addr: receiver,
            since: taken.unwrap_or(since),
            last: now,
        });
        taken.is_some()
    }
}

fn slot(receiver: IpAddr) -> usize {
    // Fibonacci hashing spreads neighbouring addresses.
    let bits = match receiver {
        IpAddr::V4(addr) => addr.to_bits(),
        IpAddr::V6(addr) => addr.segments().chunks(2).fold(0, |bits: u32, pair| {
            (bits.rotate_left(5) ^ (u32::from(pair[0]) << 16 | u32::from(pair[1])))
                .wrapping_mul(0x85eb_ca6b)
        }),
    };
    (bits.wrapping_mul(0x9e37_79b9) >> 22) as usize % PEERS
}

/// Whether the director may send an ICMP error about `packet` at all (RFC 1122 section 3.2.2).
pub fn may_be_answered(packet: &Packet, ip: &[u8]) -> bool {
    let broadcast = |addr| matches!(addr, IpAddr::V4(addr) if addr.is_broadcast());
    let group = packet.dst.is_multicast() || broadcast(packet.dst);
    let nobody = packet.src.is_unspecified()
        || packet.src.is_multicast()
        || broadcast(packet.src)
        || packet.src.is_loopback();
    let later_fragment = packet.fragment.is_some_and(|f| f.offset > 0);
    // An error must never be answered with an error; a query (such as echo) may be.
    let kind = ip.get(packet.l4).copied();
    let error = if packet.is_ipv6() {
        packet.protocol == Protocol::ICMPV6 && !matches!(kind, Some(128..=136 | 138..))
    } else {
        packet.protocol == Protocol::ICMP && !matches!(kind, Some(0 | 8 | 9 | 10 | 13..=18))
    };
    !(group || nobody || later_fragment || error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn icmp_errors_to_one_receiver_except_too_big_are_limited_to_six_then_one_a_second() {
        let limit = RateLimit::new(Limits::default());
        let a = IpAddr::from([192, 0, 2, 1]);
        let kind = ErrorKind::PortUnreachable;
        let now = Instant::from_secs(100);
        assert_eq!((0..20).filter(|_| limit.allow(kind, a, now)).count(), 6);
        assert!(limit.allow(ErrorKind::FragmentationNeeded(1480), a, now));
        let later = now + Duration::from_secs(1);
        assert_eq!((0..20).filter(|_| limit.allow(kind, a, later)).count(), 1);
        assert_eq!(limit.suppressed(), 33);
    }

    #[test]
    fn icmp_errors_to_all_receivers_share_burst_of_50_and_1000_a_second() {
        let limit = RateLimit::new(Limits::default());
        let now = Instant::from_secs(100);
        let sent = (0..200u32)
            .filter(|i| {
                limit.allow(
                    ErrorKind::TtlExceeded,
                    IpAddr::from((i * 7919).to_be_bytes()),
                    now,
                )
            })
            .count();
        assert!(sent <= 50, "{sent}");
        assert_eq!(limit.suppressed(), 200 - sent as u64);
        // A thousand errors in each following second, even if ten times as many are requested.
        let tries = (1..=10_000_u32).filter(|&n| {
            let at = now + Duration::from_micros(100) * n;
            let receiver = IpAddr::from((0x0a00_0000 + n * 7919).to_be_bytes());
            limit.allow(ErrorKind::TtlExceeded, receiver, at)
        });
        let tries = tries.count();
        assert!((900..=1000).contains(&tries), "{tries}");
        assert_eq!(limit.suppressed(), 10_200 - (sent + tries) as u64);
    }

    /// The error of CVE-2024-47678: a receiver above its own limit used up the common limit.
    #[test]
    fn icmp_receiver_over_its_limit_does_not_use_up_common_limit() {
        let limit = RateLimit::new(Limits::default());
        let now = Instant::from_secs(100);
        let flooded = IpAddr::from([192, 0, 2, 1]);
        let flood = (0..1000)
            .filter(|_| limit.allow(ErrorKind::PortUnreachable, flooded, now))
            .count();
        assert_eq!(flood, 6);
        let others = (0..30u8)
            .filter(|&n| limit.allow(ErrorKind::PortUnreachable, [198, 51, 100, n].into(), now))
            .count();
        assert_eq!(others, 30);
    }

    #[test]
    fn icmp_limit_is_shared_by_workers() {
        let limit = RateLimit::new(Limits::default());
        let now = Instant::from_secs(100);
        let send = |worker: u32| {
            let receiver = |n: u32| IpAddr::from(((worker << 24) | (n * 7919)).to_be_bytes());
            (0..500)
                .filter(|&n| limit.allow(ErrorKind::TtlExceeded, receiver(n), now))
                .count()
        };
        let sent: usize = std::thread::scope(|scope| {
            let workers: Vec<_> = (1..5)
                .map(|worker| scope.spawn(move || send(worker)))
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().expect("the thread does not panic"))
                .sum()
        });
        assert_eq!(sent, 50);
    }
}

//! When the director may send an ICMP error, and how many.

use std::net::IpAddr;
use std::time::Duration;

use lvs_core::{Instant, Protocol};

use crate::packet::parse::Packet;
use crate::packet::wire::icmp::ErrorKind;

/// Buckets for single receivers. Two that share one share its tokens.
const PEERS: usize = 1024;
/// Errors that a receiver may get at once (`XRLIM_BURST_FACTOR`).
const PEER_BURST: u64 = 6;

/// How many errors may be sent, after the kernel's sysctls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Time between two errors to one receiver, after a burst of six (`icmp_ratelimit`); zero is no limit.
    pub per_receiver: Duration,
    /// Errors a second to all (`icmp_msgs_per_sec`).
    pub per_second: u32,
    /// Errors at once (`icmp_msgs_burst`).
    pub burst: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            per_receiver: Duration::from_secs(1),
            per_second: 1000,
            burst: 50,
        }
    }
}

impl Limits {
    /// No limit at all.
    pub const NONE: Self = Self {
        per_receiver: Duration::ZERO,
        per_second: 0,
        burst: 0,
    };
}

#[derive(Clone, Copy, Debug)]
struct Peer {
    addr: IpAddr,
    /// Saved time in nanoseconds.
    saved: u64,
    last: Instant,
}

/// A token bucket, full at first.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Nanoseconds that one costs; 0 is no limit.
    cost: u64,
    full: u64,
    saved: u64,
    last: Instant,
}

impl Bucket {
    /// `per_second` in the long run (0 is no limit), and `burst` at once.
    pub fn new(per_second: u32, burst: u32) -> Self {
        let cost = 1_000_000_000_u64
            .checked_div(per_second.into())
            .unwrap_or(0);
        Self {
            cost,
            full: cost.saturating_mul(burst.max(1).into()),
            saved: u64::MAX,
            last: Instant::ZERO,
        }
    }

    /// Takes one out, if there is one.
    pub fn take(&mut self, now: Instant) -> bool {
        self.saved = self
            .saved
            .saturating_add(nanos(now, self.last))
            .min(self.full);
        self.last = now;
        take(&mut self.saved, self.cost)
    }
}

/// Token buckets: one for all errors, one for each receiver (`icmp_global_allow`, `inet_peer_xrlim_allow`).
#[derive(Debug)]
pub struct RateLimit {
    limits: Limits,
    all: Bucket,
    peers: Box<[Option<Peer>]>,
    /// Errors that were not sent.
    pub suppressed: u64,
}

impl RateLimit {
    /// Full buckets.
    pub fn new(limits: Limits) -> Self {
        Self {
            all: Bucket::new(limits.per_second, limits.burst),
            limits,
            peers: vec![None; PEERS].into_boxed_slice(),
            suppressed: 0,
        }
    }

    /// Whether an error may go to `receiver` now.
    pub fn allow(&mut self, kind: ErrorKind, receiver: IpAddr, now: Instant) -> bool {
        // Path MTU discovery is never limited (`icmpv4_mask_allow`), and no limit is none.
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
        let allowed = self.all.take(now) && self.peer(receiver, now);
        self.suppressed += u64::from(!allowed);
        allowed
    }

    fn peer(&mut self, receiver: IpAddr, now: Instant) -> bool {
        let cost = u64::try_from(self.limits.per_receiver.as_nanos()).unwrap_or(u64::MAX);
        let full = cost.saturating_mul(PEER_BURST);
        // Fibonacci hashing spreads neighbouring addresses.
        let bits = match receiver {
            IpAddr::V4(addr) => addr.to_bits(),
            IpAddr::V6(addr) => addr.segments().chunks(2).fold(0, |bits: u32, pair| {
                (bits.rotate_left(5) ^ (u32::from(pair[0]) << 16 | u32::from(pair[1])))
                    .wrapping_mul(0x85eb_ca6b)
            }),
        };
        let slot = (bits.wrapping_mul(0x9e37_79b9) >> 22) as usize % PEERS;
        let peer = &mut self.peers[slot];
        let mut current = match *peer {
            // A slot taken over keeps its debt while it is fresh, so that many addresses cannot refill it.
            Some(old) if old.addr == receiver || nanos(now, old.last) < cost => old,
            _ => Peer {
                addr: receiver,
                saved: full,
                last: now,
            },
        };
        current.saved = current
            .saved
            .saturating_add(nanos(now, current.last))
            .min(full);
        current.last = now;
        current.addr = receiver;
        let allowed = take(&mut current.saved, cost);
        *peer = Some(current);
        allowed
    }
}

fn nanos(now: Instant, then: Instant) -> u64 {
    u64::try_from(now.saturating_since(then).as_nanos()).unwrap_or(u64::MAX)
}

fn take(saved: &mut u64, cost: u64) -> bool {
    let enough = *saved >= cost;
    if enough {
        *saved -= cost;
    }
    enough
}

/// Whether an error about `packet` may be sent at all (RFC 1122 section 3.2.2).
pub fn may_be_answered(packet: &Packet, ip: &[u8]) -> bool {
    let broadcast = |addr| matches!(addr, IpAddr::V4(addr) if addr.is_broadcast());
    let group = packet.dst.is_multicast() || broadcast(packet.dst);
    let nobody = packet.src.is_unspecified()
        || packet.src.is_multicast()
        || broadcast(packet.src)
        || packet.src.is_loopback();
    let later_fragment = packet.fragment.is_some_and(|f| f.offset > 0);
    // Never an error about an error; queries (echo and the like) may be answered.
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
    fn a_receiver_gets_six_and_then_one_a_second() {
        let mut limit = RateLimit::new(Limits::default());
        let a = IpAddr::from([192, 0, 2, 1]);
        let kind = ErrorKind::PortUnreachable;
        let now = Instant::from_secs(100);
        assert_eq!((0..20).filter(|_| limit.allow(kind, a, now)).count(), 6);
        assert!(limit.allow(ErrorKind::FragmentationNeeded(1480), a, now));
        let later = now + Duration::from_secs(1);
        assert_eq!((0..20).filter(|_| limit.allow(kind, a, later)).count(), 1);
        assert_eq!(limit.suppressed, 33);
    }

    #[test]
    fn all_receivers_share_a_burst() {
        let mut limit = RateLimit::new(Limits::default());
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
    }
}

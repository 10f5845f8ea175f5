//! Identification numbers of IP packets that the dataplane creates.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

/// Generates IP identifications. For IPv4, a hash of the addresses and the protocol selects one of
/// 256 counters (Linux uses the same method). Workers share the counters, so that two packets to
/// one receiver do not get the same number within a short time.
#[derive(Debug)]
pub struct IpIds {
    by_receiver: [AtomicU16; 256],
    /// Counter from which the identifications of IPv6 fragments are computed.
    fragments: AtomicU32,
}

impl Default for IpIds {
    fn default() -> Self {
        let random = RandomState::new().hash_one(0);
        Self {
            by_receiver: [const { AtomicU16::new(0) }; 256],
            fragments: AtomicU32::new(u32::try_from(random >> 32).unwrap_or(0)),
        }
    }
}

impl IpIds {
    /// Returns the first of `count` consecutive IPv4 identifications; 0 for IPv6, which has none.
    pub fn next(&self, src: IpAddr, dst: IpAddr, protocol: u8, count: usize) -> u16 {
        let (IpAddr::V4(src), IpAddr::V4(dst)) = (src, dst) else {
            return 0;
        };
        let mixed = (src.to_bits() ^ dst.to_bits().rotate_left(7) ^ u32::from(protocol))
            .wrapping_mul(0x9e37_79b9);
        let count = u16::try_from(count).unwrap_or(1);
        let counter = &self.by_receiver[(mixed >> 24) as usize];
        counter.fetch_add(count, Ordering::Relaxed).wrapping_add(1)
    }

    /// Returns an identification for the fragments of an IPv6 datagram. It repeats only after 2^32
    /// datagrams. Consecutive identifications look unrelated; only an observer that inverts this
    /// function can predict the next one (compare RFC 7739).
    pub fn next_fragments(&self) -> u32 {
        let before = self.fragments.fetch_add(1, Ordering::Relaxed);
        let mut id = before.wrapping_add(1);
        for factor in [0x7feb_352d_u32, 0x846c_a68b] {
            id = (id ^ id >> 16).wrapping_mul(factor);
        }
        id ^ id >> 15
    }
}

//! Identification numbers of the packets that the director makes.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;

/// Numbers for the packets that the director makes, counted by receiver as a host does.
#[derive(Debug)]
pub(super) struct IpIds {
    by_receiver: [u16; 256],
    /// Of the next IPv6 fragments, before they are scrambled.
    fragments: u32,
}

impl IpIds {
    pub(super) fn new() -> Self {
        let random = RandomState::new().hash_one(0);
        Self {
            by_receiver: [0; 256],
            fragments: u32::try_from(random >> 32).unwrap_or(0),
        }
    }

    /// The first of `count` numbers of IPv4; IPv6 has none.
    pub(super) fn next(&mut self, src: IpAddr, dst: IpAddr, protocol: u8, count: usize) -> u16 {
        let (IpAddr::V4(src), IpAddr::V4(dst)) = (src, dst) else {
            return 0;
        };
        let mixed = (src.to_bits() ^ dst.to_bits().rotate_left(7) ^ u32::from(protocol))
            .wrapping_mul(0x9e37_79b9);
        let counter = &mut self.by_receiver[(mixed >> 24) as usize];
        let id = counter.wrapping_add(1);
        *counter = counter.wrapping_add(u16::try_from(count).unwrap_or(1));
        id
    }

    /// A number for the fragments of an IPv6 datagram: none comes twice in 2^32, and the next is not the next higher (RFC
    /// 7739).
    pub(super) fn next_fragments(&mut self) -> u32 {
        self.fragments = self.fragments.wrapping_add(1);
        let mut id = self.fragments;
        for factor in [0x7feb_352d_u32, 0x846c_a68b] {
            id = (id ^ id >> 16).wrapping_mul(factor);
        }
        id ^ id >> 15
    }
}

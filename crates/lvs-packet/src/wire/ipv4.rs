//! Reads and changes IPv4 headers in place. The argument begins with an IP header that the parser
//! has checked.

use std::net::Ipv4Addr;

use super::checksum::{Delta, Sum};
use super::{be16, be32, put16, put32};

/// Fields of the header (RFC 791 section 3.1).
pub mod field {
    use crate::wire::Field;

    /// Version and header length.
    pub const VERSION: usize = 0;
    /// Type of service: DSCP and ECN.
    pub const TOS: usize = 1;
    /// Length of the packet in bytes.
    pub const TOTAL_LEN: Field = 2..4;
    /// Identification of the datagram.
    pub const ID: Field = 4..6;
    /// Flags and fragment offset.
    pub const FLAGS: Field = 6..8;
    /// Time to live.
    pub const TTL: usize = 8;
    /// The protocol of the payload.
    pub const PROTOCOL: usize = 9;
    /// Checksum of the header.
    pub const CHECKSUM: Field = 10..12;
    /// Source address.
    pub const SOURCE: Field = 12..16;
    /// Destination address.
    pub const DESTINATION: Field = 16..20;
}

/// Length in bytes of a header without options.
pub const HEADER_LEN: usize = field::DESTINATION.end;
/// "Don't fragment" in the flags word.
pub const DF: u16 = 0x4000;
/// "More fragments" in the flags word.
pub const MF: u16 = 0x2000;
/// The offset in the flags word, in units of 8 bytes.
pub const OFFSET: u16 = 0x1fff;

/// Length of the header in bytes, options included.
#[inline]
pub fn header_len(ip: &[u8]) -> usize {
    usize::from(ip.first().map_or(0, |b| b & 0x0f)) * 4
}

/// The source address of the IPv4 packet `ip`.
#[inline]
pub fn src(ip: &[u8]) -> Ipv4Addr {
    Ipv4Addr::from_bits(be32(ip, field::SOURCE))
}

/// The destination address of the IPv4 packet `ip`.
#[inline]
pub fn dst(ip: &[u8]) -> Ipv4Addr {
    Ipv4Addr::from_bits(be32(ip, field::DESTINATION))
}

/// Stores a new source address and adjusts the header checksum.
#[inline]
pub fn set_src(ip: &mut [u8], to: Ipv4Addr) {
    let delta = Delta::NONE.addr(src(ip), to);
    put32(ip, field::SOURCE, to.to_bits());
    adjust(ip, delta);
}

/// Stores a new destination address and adjusts the header checksum.
#[inline]
pub fn set_dst(ip: &mut [u8], to: Ipv4Addr) {
    let delta = Delta::NONE.addr(dst(ip), to);
    put32(ip, field::DESTINATION, to.to_bits());
    adjust(ip, delta);
}

/// Decrements the TTL, which must be above 0, and adjusts the header checksum.
#[inline]
pub fn decrement_ttl(ip: &mut [u8]) {
    let old = be16(ip, field::TTL);
    let new = old.saturating_sub(0x0100);
    put16(ip, field::TTL, new);
    adjust(ip, Delta::NONE.word(old, new));
}

/// Increments the TTL, to undo the decrement of one hop, and adjusts the header checksum; a TTL of
/// 255 remains.
#[inline]
pub fn increment_ttl(ip: &mut [u8]) {
    let old = be16(ip, field::TTL);
    let new = old.checked_add(0x0100).unwrap_or(old);
    put16(ip, field::TTL, new);
    adjust(ip, Delta::NONE.word(old, new));
}

/// Stores a new total length and adjusts the header checksum.
#[inline]
pub fn set_total_len(ip: &mut [u8], to: u16) {
    let delta = Delta::NONE.word(be16(ip, field::TOTAL_LEN), to);
    put16(ip, field::TOTAL_LEN, to);
    adjust(ip, delta);
}

/// Stores a new identification and adjusts the header checksum.
#[inline]
pub fn set_id(ip: &mut [u8], to: u16) {
    let delta = Delta::NONE.word(be16(ip, field::ID), to);
    put16(ip, field::ID, to);
    adjust(ip, delta);
}

/// Sets the ECN codepoint "congestion experienced" (RFC 3168). The caller updates the header
/// checksum ([`finish_header`]).
pub fn set_congestion(ip: &mut [u8]) {
    if let Some(tos) = ip.get_mut(field::TOS) {
        *tos |= 3;
    }
}

/// Computes the checksum of the IPv4 header of `ip`, and writes it into the header.
pub fn finish_header(ip: &mut [u8]) {
    put16(ip, field::CHECKSUM, 0);
    let len = header_len(ip).min(ip.len());
    let sum = Sum::ZERO.bytes(&ip[..len]).finish();
    put16(ip, field::CHECKSUM, sum);
}

#[inline]
fn adjust(ip: &mut [u8], delta: Delta) {
    let sum = delta.apply(be16(ip, field::CHECKSUM));
    put16(ip, field::CHECKSUM, sum);
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::Ipv4Header;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_ipv4_header_change_keeps_checksum_correct(a: [u8; 4], b: [u8; 4], c: [u8; 4], d: [u8; 4], ttl in 1u8.., id: u16, len in 0u16..60_000) {
            let mut header = Ipv4Header::new(len, ttl, etherparse::IpNumber::UDP, a, b).expect("the length fits");
            header.header_checksum = header.calc_header_checksum();
            let mut ip = header.to_bytes().to_vec();
            set_src(&mut ip, c.into());
            set_dst(&mut ip, d.into());
            decrement_ttl(&mut ip);
            increment_ttl(&mut ip);
            decrement_ttl(&mut ip);
            set_id(&mut ip, id);
            set_total_len(&mut ip, len);
            let (after, _) = Ipv4Header::from_slice(&ip).expect("the bytes are a valid header");
            prop_assert_eq!(after.calc_header_checksum(), after.header_checksum);
            prop_assert_eq!((after.source, after.destination, after.time_to_live), (c, d, ttl - 1));
        }
    }
}

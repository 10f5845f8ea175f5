//! Reads and edits packets in place, and builds the few packets that the dataplane sends itself.
//!
//! The functions expect bytes that [`crate::parse`] has checked: an IP packet without link header,
//! and offsets in it. The crate `etherparse` builds headers where speed does not matter.

pub mod checksum;
pub mod icmp;
mod icmp_message;
pub mod icmpv6;
pub mod ip_options;
pub mod ipv4;
pub mod ipv6;
pub mod sctp;
pub mod tcp;
pub mod udp;
pub mod vlan;

use std::net::IpAddr;
use std::ops::Range;

/// A link-layer address.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The broadcast address.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// Whether the address is a group address (broadcast included).
    #[inline]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 == 1
    }
}

impl std::fmt::Display for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl std::fmt::Debug for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Fields of an Ethernet header without tags.
pub mod ethernet {
    use super::Field;

    /// Link-layer address of the receiver.
    pub const DESTINATION: Field = 0..6;
    /// Link-layer address of the sender.
    pub const SOURCE: Field = 6..12;
    /// The EtherType of the payload.
    pub const ETHERTYPE: Field = 12..14;
}

/// Length in bytes of an Ethernet header without tags.
pub const ETHERNET_LEN: usize = ethernet::ETHERTYPE.end;
/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;

/// The position of a number in a header: the offset of its first byte, or the range of a field.
pub trait Place {
    /// Returns the offset of the first byte.
    fn offset(self) -> usize;
}

impl Place for usize {
    #[inline]
    fn offset(self) -> usize {
        self
    }
}

impl Place for Field {
    #[inline]
    fn offset(self) -> usize {
        self.start
    }
}

/// The range of a field's bytes in a header.
pub type Field = Range<usize>;

/// Reads the big-endian number of 16 bits at `place`; 0 if it is outside of `bytes`.
#[inline]
pub fn be16(bytes: &[u8], place: impl Place) -> u16 {
    let at = place.offset();
    match bytes.get(at..at + 2) {
        Some(b) => u16::from_be_bytes([b[0], b[1]]),
        None => 0,
    }
}

/// Reads the big-endian number of 32 bits at `place`; 0 if it is outside of `bytes`.
#[inline]
pub fn be32(bytes: &[u8], place: impl Place) -> u32 {
    let at = place.offset();
    match bytes.get(at..at + 4) {
        Some(b) => u32::from_be_bytes([b[0], b[1], b[2], b[3]]),
        None => 0,
    }
}

/// Writes a number in network byte order at `place`; does nothing if `place` is outside of `bytes`.
#[inline]
pub fn put16(bytes: &mut [u8], place: impl Place, value: u16) {
    let at = place.offset();
    if let Some(b) = bytes.get_mut(at..at + 2) {
        b.copy_from_slice(&value.to_be_bytes());
    }
}

/// Writes a number in network byte order at `place`; does nothing if `place` is outside of `bytes`.
#[inline]
pub fn put32(bytes: &mut [u8], place: impl Place, value: u32) {
    let at = place.offset();
    if let Some(b) = bytes.get_mut(at..at + 4) {
        b.copy_from_slice(&value.to_be_bytes());
    }
}

/// Whether an IP packet is an IPv6 packet.
#[inline]
pub fn is_ipv6(ip: &[u8]) -> bool {
    ip.first().is_some_and(|b| b >> 4 == 6)
}

/// The source address of an IP packet.
#[inline]
pub fn ip_src(ip: &[u8]) -> IpAddr {
    if is_ipv6(ip) {
        IpAddr::V6(ipv6::src(ip))
    } else {
        IpAddr::V4(ipv4::src(ip))
    }
}

/// The destination address of an IP packet.
#[inline]
pub fn ip_dst(ip: &[u8]) -> IpAddr {
    if is_ipv6(ip) {
        IpAddr::V6(ipv6::dst(ip))
    } else {
        IpAddr::V4(ipv4::dst(ip))
    }
}

/// Decrements the TTL or hop limit of an IP packet.
#[inline]
pub fn decrement_ttl(ip: &mut [u8]) {
    if is_ipv6(ip) {
        ipv6::decrement_hop_limit(ip);
    } else {
        ipv4::decrement_ttl(ip);
    }
}

/// Increments the TTL or hop limit of an IP packet, to undo the decrement of one hop; 255 remains.
#[inline]
pub fn increment_ttl(ip: &mut [u8]) {
    if is_ipv6(ip) {
        ipv6::increment_hop_limit(ip);
    } else {
        ipv4::increment_ttl(ip);
    }
}

/// Writes an Ethernet header into the first 14 bytes of `bytes`.
#[inline]
pub fn ethernet_header(bytes: &mut [u8], dst: Mac, src: Mac, ethertype: u16) {
    if let Some(b) = bytes.get_mut(..ETHERNET_LEN) {
        b[ethernet::DESTINATION].copy_from_slice(&dst.0);
        b[ethernet::SOURCE].copy_from_slice(&src.0);
        b[ethernet::ETHERTYPE].copy_from_slice(&ethertype.to_be_bytes());
    }
}

//! Independent checksums: other crates than the packet path's compute them from scratch.

use std::net::IpAddr;
use std::sync::LazyLock;

use crc::{CRC_32_ISCSI, Crc, Table};
use etherparse::checksum::Sum16BitWords;
use lvs_core::Protocol;
use lvs_packet::frame::{Offload, SegmentKind};

static CRC32C: LazyLock<Crc<u32, Table<16>>> =
    LazyLock::new(|| Crc::<u32, Table<16>>::new(&CRC_32_ISCSI));

/// Whether a checksum is correct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// The checksum is present and correct.
    Right,
    /// The checksum is wrong or absent, or a length field contradicts the packet.
    Wrong,
    /// A UDP datagram over IPv4 without a checksum, with a correct length field.
    Absent,
    /// The protocol has no checksum, or the packet is too short or a fragment.
    Unknown,
}

/// Returns the Internet checksum of `bytes` (RFC 1071); 0 if `bytes` include their correct
/// checksum.
pub fn internet(bytes: &[u8]) -> u16 {
    Sum16BitWords::new()
        .add_slice(bytes)
        .ones_complement()
        .to_be()
}

/// Returns the Internet checksum of `bytes` with the pseudo-header.
pub fn transport(src: IpAddr, dst: IpAddr, protocol: u8, bytes: &[u8]) -> u16 {
    pseudo(src, dst, protocol, bytes.len())
        .add_slice(bytes)
        .ones_complement()
        .to_be()
}

/// Returns the sum of a pseudo-header, which is the checksum field of a packet with a partial
/// checksum.
pub fn unfinished(src: IpAddr, dst: IpAddr, protocol: u8, len: usize) -> u16 {
    !pseudo(src, dst, protocol, len).ones_complement().to_be()
}

fn pseudo(src: IpAddr, dst: IpAddr, protocol: u8, len: usize) -> Sum16BitWords {
    let mut sum = Sum16BitWords::new();
    for addr in [src, dst] {
        sum = match addr {
            IpAddr::V4(addr) => sum.add_4bytes(addr.octets()),
            IpAddr::V6(addr) => sum.add_16bytes(addr.octets()),
        };
    }
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    sum.add_2bytes([0, protocol]).add_4bytes(len.to_be_bytes())
}

/// The checksum of an SCTP packet (RFC 9260 appendix A), in the byte order of its field.
pub fn sctp(bytes: &[u8]) -> [u8; 4] {
    let mut digest = CRC32C.digest();
    digest.update(&bytes[..8]);
    digest.update(&[0; 4]);
    digest.update(&bytes[12..]);
    digest.finalize().to_le_bytes()
}

/// The fields of an IP header that this oracle needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Offset of the payload in the packet, in bytes.
    pub l4: usize,
    /// Length of the packet in bytes.
    pub len: usize,
    /// Whether the packet is a fragment.
    pub fragment: bool,
}

/// Parses the IP header at the start of `ip`. `None` if there is none, if its checksum is wrong, or
/// if its lengths contradict the data.
pub fn parts(ip: &[u8]) -> Option<Parts> {
    if ip.first()? >> 4 == 6 {
        return parts6(ip);
    }
    let l4 = usize::from(ip[0] & 15) * 4;
    let len = usize::from(word(ip, 2)?);
    let whole = ip[0] >> 4 == 4 && l4 >= 20 && len >= l4 && ip.len() >= len;
    if !whole || internet(&ip[..l4]) != 0 {
        return None;
    }
    let four = |at: usize| -> Option<IpAddr> {
        Some(<[u8; 4]>::try_from(ip.get(at..at + 4)?).ok()?.into())
    };
    Some(Parts {
        src: four(12)?,
        dst: four(16)?,
        protocol: ip[9],
        l4,
        len,
        fragment: word(ip, 6)? & 0x3fff != 0,
    })
}

/// Whether the checksum of an IPv4 header is correct, regardless of the total length field; true
/// for IPv6.
pub fn header_is_right(ip: &[u8]) -> bool {
    let len = usize::from(ip.first().map_or(0, |byte| byte & 15)) * 4;
    ip.first().is_some_and(|byte| byte >> 4 == 6)
        || ip.get(..len).is_some_and(|header| internet(header) == 0)
}

/// [`parts`] for IPv6, with any number of extension headers (RFC 8200 section 4).
fn parts6(ip: &[u8]) -> Option<Parts> {
    let len = 40 + usize::from(word(ip, 4)?);
    let ip = ip.get(..len)?;
    let (mut protocol, mut at, mut fragment) = (ip[6], 40, false);
    loop {
        let size = match protocol {
            0 | 43 | 60 => 8 * (usize::from(*ip.get(at + 1)?) + 1),
            51 => 4 * (usize::from(*ip.get(at + 1)?) + 2),
            44 => {
                fragment |= word(ip, at + 2)? & 0xfff9 != 0;
                8
            }
            _ => break,
        };
        protocol = *ip.get(at)?;
        at += size;
        if at > len {
            return None;
        }
        if fragment {
            break;
        }
    }
    let sixteen = |at: usize| -> Option<IpAddr> {
        Some(<[u8; 16]>::try_from(ip.get(at..at + 16)?).ok()?.into())
    };
    Some(Parts {
        src: sixteen(8)?,
        dst: sixteen(24)?,
        protocol,
        l4: at,
        len,
        fragment,
    })
}

pub(super) fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Returns the state of the checksum in `l4`, the complete payload of an IP packet.
pub fn judge(src: IpAddr, dst: IpAddr, protocol: u8, l4: &[u8]) -> Health {
    let right = |right: bool| {
        if right { Health::Right } else { Health::Wrong }
    };
    match Protocol(protocol) {
        Protocol::TCP if l4.len() >= 20 => right(transport(src, dst, protocol, l4) == 0),
        Protocol::UDP if l4.len() >= 8 => {
            let len = usize::from(u16::from_be_bytes([l4[4], l4[5]]));
            match (len, [l4[6], l4[7]]) {
                (len, [0, 0]) if len == l4.len() && src.is_ipv4() => Health::Absent,
                (_, [0, 0]) => Health::Wrong,
                (8.., _) if len <= l4.len() => {
                    right(transport(src, dst, protocol, &l4[..len]) == 0)
                }
                _ => Health::Wrong,
            }
        }
        Protocol::SCTP if l4.len() >= 12 => right(sctp(l4) == l4[8..12]),
        Protocol::ICMP if src.is_ipv4() && l4.len() >= 8 => right(internet(l4) == 0),
        Protocol::ICMPV6 if src.is_ipv6() && l4.len() >= 8 => {
            right(transport(src, dst, protocol, l4) == 0)
        }
        _ => Health::Unknown,
    }
}

/// Returns the state of the transport checksum in `ip`, whose header is `parts`.
pub fn health(ip: &[u8], parts: &Parts) -> Health {
    if parts.fragment {
        return Health::Unknown;
    }
    judge(
        parts.src,
        parts.dst,
        parts.protocol,
        &ip[parts.l4..parts.len],
    )
}

/// Completes a partial checksum as a device does, also of a super-packet, and checks the offload
/// request.
///
/// # Errors
/// The invalid part of the offload request.
pub fn finish(ip: &mut [u8], parts: &Parts, offload: &Offload) -> Result<(), String> {
    if let Some(segments) = offload.segments {
        let fits = match segments.kind {
            SegmentKind::Tcp4 => parts.protocol == 6 && parts.src.is_ipv4(),
            SegmentKind::Tcp6 => parts.protocol == 6 && parts.src.is_ipv6(),
            SegmentKind::Udp | SegmentKind::UdpFragments => parts.protocol == 17,
        };
        if !fits || segments.size == 0 {
            return Err(format!(
                "the super-packet is invalid: {segments:?}, {parts:?}"
            ));
        }
    }
    let Some(partial) = offload.checksum else {
        return Ok(());
    };
    let start = usize::from(partial.start);
    let field = start + usize::from(partial.offset);
    if start < parts.l4 || field + 2 > parts.len {
        return Err(format!(
            "the partial checksum is outside of the payload: {partial:?}, {parts:?}"
        ));
    }
    let sum = internet(&ip[start..parts.len]);
    let stored = if sum == 0 { 0xffff } else { sum };
    ip[field..field + 2].copy_from_slice(&stored.to_be_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_checksums_equal_published_values_and_detect_changed_datagram() {
        // An IPv4 header that is Wikipedia's example for RFC 1071.
        let header = [
            0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0xb8, 0x61, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8,
            0, 0xc7,
        ];
        assert_eq!(internet(&header), 0);
        assert_eq!(CRC32C.checksum(b"123456789"), 0xe306_9283);
        let (src, dst): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let mut datagram = [0x12, 0x34, 0, 53, 0, 9, 0, 0, 7];
        assert_eq!(judge(src, dst, 17, &datagram), Health::Absent);
        let sum = transport(src, dst, 17, &datagram);
        datagram[6..8].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(judge(src, dst, 17, &datagram), Health::Right);
        datagram[8] = 8;
        assert_eq!(judge(src, dst, 17, &datagram), Health::Wrong);
    }
}

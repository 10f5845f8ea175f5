//! Reads and changes IPv6 headers in place, and walks over extension headers. The argument begins
//! with an IP header.

use std::net::Ipv6Addr;

use super::{Field, be16, be32, put16};

/// Fields of the fixed header (RFC 8200 section 3).
pub mod field {
    use crate::wire::Field;

    /// Version, traffic class and the upper bits of the flow label.
    pub const CLASS: Field = 0..2;
    /// Length in bytes of the packet after the fixed header.
    pub const PAYLOAD_LEN: Field = 4..6;
    /// Protocol number of the header that follows.
    pub const NEXT_HEADER: usize = 6;
    /// Hop limit.
    pub const HOP_LIMIT: usize = 7;
    /// Source address.
    pub const SOURCE: Field = 8..24;
    /// Destination address.
    pub const DESTINATION: Field = 24..40;
}

/// Fields of a fragment header (RFC 8200 section 4.5).
pub mod fragment_field {
    use crate::wire::Field;

    /// The type of the header after this one.
    pub const NEXT_HEADER: usize = 0;
    /// Offset of the fragment, and the flag "more fragments".
    pub const OFFSET: Field = 2..4;
    /// Identification of the datagram.
    pub const ID: Field = 4..8;
}

/// Length in bytes of the fixed header.
pub const HEADER_LEN: usize = field::DESTINATION.end;
/// Length in bytes of a fragment header.
pub const FRAGMENT_LEN: usize = fragment_field::ID.end;
/// The bits of the offset in the offset field of a fragment header; their value is in bytes.
pub const OFFSET: u16 = 0xfff8;
/// Length in bytes of the longest packet that every link accepts (RFC 8200 section 5).
pub const MTU_MIN: usize = 1280;
/// The next header is a fragment header.
pub const FRAGMENT: u8 = 44;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const AUTHENTICATION: u8 = 51;
const NO_NEXT: u8 = 59;
const DESTINATION: u8 = 60;
/// Headers that may precede the protocol of a datagram, apart from the fragment header.
pub const EXTENSIONS: [u8; 4] = [HOP_BY_HOP, ROUTING, DESTINATION, AUTHENTICATION];
/// Maximum number of extension headers that are read. Each has at least 8 bytes, and senders use
/// only a few.
const HEADERS_MAX: usize = 32;

fn addr(ip: &[u8], field: Field) -> Ipv6Addr {
    let mut octets = [0; 16];
    if let Some(bytes) = ip.get(field) {
        octets.copy_from_slice(bytes);
    }
    Ipv6Addr::from(octets)
}

/// The source address of the IPv6 packet `ip`.
#[inline]
pub fn src(ip: &[u8]) -> Ipv6Addr {
    addr(ip, field::SOURCE)
}

/// The destination address of the IPv6 packet `ip`.
#[inline]
pub fn dst(ip: &[u8]) -> Ipv6Addr {
    addr(ip, field::DESTINATION)
}

/// Stores a new source address.
#[inline]
pub fn set_src(ip: &mut [u8], to: Ipv6Addr) {
    if let Some(bytes) = ip.get_mut(field::SOURCE) {
        bytes.copy_from_slice(&to.octets());
    }
}

/// Stores a new destination address.
#[inline]
pub fn set_dst(ip: &mut [u8], to: Ipv6Addr) {
    if let Some(bytes) = ip.get_mut(field::DESTINATION) {
        bytes.copy_from_slice(&to.octets());
    }
}

/// The traffic class: DSCP and ECN.
#[inline]
pub fn traffic_class(ip: &[u8]) -> u8 {
    (be16(ip, field::CLASS) >> 4).to_be_bytes()[1]
}

/// Writes the traffic class; the flow label must be 0.
#[inline]
pub fn set_traffic_class(ip: &mut [u8], class: u8) {
    put16(ip, field::CLASS, 0x6000 | u16::from(class) << 4);
}

/// Sets the ECN codepoint "congestion experienced" (RFC 3168).
pub fn set_congestion(ip: &mut [u8]) {
    let word = be16(ip, field::CLASS) | 3 << 4;
    put16(ip, field::CLASS, word);
}

/// Decrements the hop limit of the IPv6 packet `ip`.
#[inline]
pub fn decrement_hop_limit(ip: &mut [u8]) {
    if let Some(hops) = ip.get_mut(field::HOP_LIMIT) {
        *hops = hops.saturating_sub(1);
    }
}

/// Increments the hop limit, to undo the decrement of one hop; a hop limit of 255 remains.
#[inline]
pub fn increment_hop_limit(ip: &mut [u8]) {
    if let Some(hops) = ip.get_mut(field::HOP_LIMIT) {
        *hops = hops.saturating_add(1);
    }
}

/// Writes the payload length: the length of `ip` without the fixed header, or 0 if this needs more
/// than 16 bits.
#[inline]
pub fn finish_len(ip: &mut [u8]) {
    let len = ip.len().saturating_sub(HEADER_LEN);
    put16(ip, field::PAYLOAD_LEN, u16::try_from(len).unwrap_or(0));
}

/// Writes a fixed header without traffic class and flow label into the first 40 bytes of `bytes`;
/// does nothing if `bytes` is shorter.
pub fn write_header(
    bytes: &mut [u8],
    next: u8,
    hop_limit: u8,
    src: Ipv6Addr,
    dst: Ipv6Addr,
    payload: u16,
) {
    let Some(header) = bytes.get_mut(..HEADER_LEN) else {
        return;
    };
    header.fill(0);
    header[0] = 0x60;
    put16(header, field::PAYLOAD_LEN, payload);
    header[field::NEXT_HEADER] = next;
    header[field::HOP_LIMIT] = hop_limit;
    set_src(header, src);
    set_dst(header, dst);
}

/// A fragment header in a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentHeader {
    /// Position of the header in the packet.
    pub at: usize,
    /// Identification of the datagram.
    pub id: u32,
    /// Offset of the payload of this fragment, in bytes.
    pub offset: usize,
    /// Whether the datagram has fragments after this one.
    pub more: bool,
}

/// The result of a walk over a chain of extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The protocol after the extension headers. In a later fragment, the protocol that its
    /// fragment header names.
    pub protocol: u8,
    /// Start of the payload of that protocol.
    pub l4: usize,
    /// Position of the byte that names this protocol.
    pub named_at: usize,
    /// The first fragment header, and the offset of the byte that names it as the next header.
    pub fragment: Option<(FragmentHeader, usize)>,
    /// Whether one of the headers is an AH header.
    pub authenticated: bool,
}

/// Walks over the extension headers of `ip` (`ipv6_find_hdr`); `None` if they are truncated or too
/// many.
pub fn walk(ip: &[u8]) -> Option<Chain> {
    let mut named_at = 6;
    let mut at = HEADER_LEN;
    let mut fragment = None;
    let mut authenticated = false;
    for _ in 0..HEADERS_MAX {
        let protocol = *ip.get(named_at)?;
        let len = match protocol {
            HOP_BY_HOP | ROUTING | DESTINATION => (usize::from(*ip.get(at + 1)?) + 1) * 8,
            AUTHENTICATION => {
                authenticated = true;
                (usize::from(*ip.get(at + 1)?) + 2) * 4
            }
            FRAGMENT => {
                let word = be16(ip.get(at..at + FRAGMENT_LEN)?, 2);
                let header = FragmentHeader {
                    at,
                    id: be32(ip, at + 4),
                    offset: usize::from(word & 0xfff8),
                    more: word & 1 != 0,
                };
                if fragment.is_none() {
                    fragment = Some((header, named_at));
                }
                if header.offset > 0 {
                    return Some(Chain {
                        protocol: ip[at],
                        l4: at + FRAGMENT_LEN,
                        named_at: at,
                        fragment,
                        authenticated,
                    });
                }
                FRAGMENT_LEN
            }
            _ => {
                return Some(Chain {
                    protocol,
                    l4: at,
                    named_at,
                    fragment,
                    authenticated,
                });
            }
        };
        named_at = at;
        at += len;
        if at > ip.len() {
            return None;
        }
    }
    None
}

/// Position of the byte that names the first header other than a routing header, destination
/// options, or hop-by-hop options directly after the fixed header. A host without IPsec that does
/// not support this header reports the position.
pub fn unknown_at(ip: &[u8]) -> usize {
    let mut named_at = field::NEXT_HEADER;
    let mut at = HEADER_LEN;
    while let (Some(&next), Some(&len)) = (ip.get(named_at), ip.get(at + 1)) {
        // Hop-by-hop options can only be the first extension header.
        if !matches!(next, ROUTING | DESTINATION)
            && (next, named_at) != (HOP_BY_HOP, field::NEXT_HEADER)
        {
            break;
        }
        named_at = at;
        at += (usize::from(len) + 1) * 8;
    }
    named_at
}

/// Whether a packet, or a first fragment, contains as much of the protocol header as a first
/// fragment must contain (RFC 8200 section 4.5, `ipv6frag_thdr_truncated`). Also `true` if the
/// extension headers cannot be read.
pub fn has_upper_header(ip: &[u8]) -> bool {
    const TCP: u8 = 6;
    const UDP: u8 = 17;
    const ICMP: u8 = 58;
    walk(ip).is_none_or(|chain| {
        let header = match chain.protocol {
            TCP => 20,
            UDP | ICMP => 8,
            NO_NEXT => 0,
            _ => 1,
        };
        chain.l4 + header <= ip.len()
    })
}

/// Length of the headers that each fragment must repeat, and the position of the byte that names
/// the next header (`ip6_find_1stfragopt`).
pub fn unfragmentable(ip: &[u8]) -> (usize, usize) {
    let (mut at, mut named_at) = (HEADER_LEN, 6);
    let mut routed = false;
    for _ in 0..HEADERS_MAX {
        match ip.get(named_at) {
            Some(&HOP_BY_HOP) => {}
            Some(&ROUTING) => routed = true,
            // Destination options after a routing header are for the final destination only, and do
            // not belong to the unfragmentable part.
            Some(&DESTINATION) if !routed => {}
            _ => break,
        }
        let next = match ip.get(at + 1) {
            Some(&len) => at + (usize::from(len) + 1) * 8,
            None => break,
        };
        if next > ip.len() {
            break;
        }
        (named_at, at) = (at, next);
    }
    (at, named_at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{IpHeaders, PacketBuilder};
    use proptest::prelude::*;

    fn header(next: u8, data: &[u8]) -> Vec<u8> {
        let mut ip = vec![0; HEADER_LEN];
        write_header(
            &mut ip,
            next,
            64,
            Ipv6Addr::LOCALHOST,
            Ipv6Addr::LOCALHOST,
            0,
        );
        ip.extend_from_slice(data);
        finish_len(&mut ip);
        ip
    }

    #[test]
    fn ipv6_extension_headers_are_parsed_to_the_end() {
        let mut chain = vec![DESTINATION, 0, 1, 4, 0, 0, 0, 0];
        chain.extend([FRAGMENT, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        chain.extend([6, 0, 0, 1, 0, 0, 0, 9]);
        chain.extend([0; 20]);
        let ip = header(HOP_BY_HOP, &chain);
        let found = walk(&ip).expect("the headers are complete");
        assert_eq!((found.protocol, found.l4, found.named_at), (6, 72, 64));
        let (fragment, announced) = found.fragment.expect("the packet has a fragment header");
        assert_eq!((fragment.at, fragment.id, announced), (64, 9, 48));
        assert!(fragment.more && fragment.offset == 0);
        assert_eq!(unfragmentable(&ip), (64, 48));
        for cut in 0..72 {
            assert_eq!(walk(&ip[..cut]), None, "{cut}");
        }
    }

    #[test]
    fn ipv6_first_fragment_without_upper_header_is_detected() {
        let options = [6, 0, 1, 4, 0, 0, 0, 0];
        for (protocol, front, least) in [
            (6, &[][..], 20),
            (17, &[], 8),
            (58, &[], 8),
            (132, &[], 1),
            (DESTINATION, &options, 28),
        ] {
            for len in front.len()..40 {
                let mut fragment = vec![protocol, 0, 0, 1, 0, 0, 0, 9];
                fragment.extend(front);
                fragment.resize(8 + len, 0);
                let ip = header(FRAGMENT, &fragment);
                assert_eq!(has_upper_header(&ip), len >= least, "{protocol} {len}");
            }
        }
        let nothing = header(FRAGMENT, &[NO_NEXT, 0, 0, 1, 0, 0, 0, 9]);
        assert!(has_upper_header(&nothing));
    }

    #[test]
    fn endless_ipv6_extension_headers_are_refused() {
        let chain = [DESTINATION, 0, 1, 4, 0, 0, 0, 0].repeat(200);
        assert_eq!(walk(&header(DESTINATION, &chain)), None);
    }

    proptest! {
        #[test]
        fn ipv6_parser_of_any_bytes_does_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), next in prop::sample::select(vec![0u8, 43, 44, 51, 60, 6])) {
            let ip = header(next, &bytes);
            if let Some(chain) = walk(&ip) {
                prop_assert!(chain.l4 <= ip.len() && chain.named_at < ip.len());
            }
            let (len, named_at) = unfragmentable(&ip);
            prop_assert!(len <= ip.len() && named_at < len);
        }

        #[test]
        fn ipv6_header_changes_agree_with_etherparse(a: [u8; 16], b: [u8; 16], c: [u8; 16], d: [u8; 16], hops in 1u8..) {
            let mut ip = Vec::new();
            PacketBuilder::ipv6(a, b, hops).udp(1, 2).write(&mut ip, &[1, 2, 3]).expect("writing to a vector succeeds");
            set_src(&mut ip, c.into());
            set_dst(&mut ip, d.into());
            decrement_hop_limit(&mut ip);
            finish_len(&mut ip);
            let (headers, _) = IpHeaders::from_slice(&ip).expect("the bytes are a valid header");
            let (after, _) = headers.ipv6().expect("the header is an IPv6 header");
            prop_assert_eq!((after.source, after.destination, after.hop_limit, after.payload_length), (c, d, hops - 1, 11));
        }
    }
}

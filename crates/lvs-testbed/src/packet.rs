//! Creates valid packets with checksums from the [`oracle`]. Other modules damage them.

use std::net::{IpAddr, SocketAddr};

use lvs_core::Protocol;

use crate::oracle;

/// Time to live of the generated packets.
pub const TTL: u8 = 64;

fn be(value: usize) -> [u8; 2] {
    u16::try_from(value).unwrap_or(u16::MAX).to_be_bytes()
}

/// Creates an IP packet without options. If the addresses have different versions, it is an IPv6
/// packet.
pub fn ip(src: IpAddr, dst: IpAddr, protocol: u8, ttl: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = Vec::with_capacity(40 + payload.len());
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            packet.extend([0x45, 0]);
            packet.extend(be(20 + payload.len()));
            packet.extend([0, 0, 0, 0, ttl, protocol, 0, 0]);
            packet.extend(src.octets());
            packet.extend(dst.octets());
            repair(&mut packet);
        }
        (src, dst) => {
            let octets = |addr: IpAddr| match addr {
                IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
                IpAddr::V6(addr) => addr.octets(),
            };
            packet.extend([0x60, 0, 0, 0]);
            packet.extend(be(payload.len()));
            packet.extend([protocol, ttl]);
            packet.extend(octets(src));
            packet.extend(octets(dst));
        }
    }
    packet.extend(payload);
    packet
}

/// Corrects the checksum of an IPv4 header, if the header is complete.
pub fn repair(ip: &mut [u8]) {
    let len = usize::from(ip.first().map_or(0, |byte| byte & 15)) * 4;
    if ip.first().is_some_and(|byte| byte >> 4 == 4) && (20..=ip.len()).contains(&len) {
        ip[10..12].fill(0);
        let sum = oracle::internet(&ip[..len]);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Sets the length field of an IP header to the packet's length, and corrects the checksum of an
/// IPv4 header. A packet of less than 20 bytes stays unchanged.
pub fn relength(ip: &mut [u8]) {
    let len = ip.len();
    if len < 20 {
        return;
    }
    if ip[0] >> 4 == 6 {
        ip[4..6].copy_from_slice(&be(len.saturating_sub(40)));
    } else {
        ip[2..4].copy_from_slice(&be(len));
        repair(ip);
    }
}

/// Inserts `options` (a multiple of 4 bytes, at most 40) into an IPv4 packet without options. A
/// packet shorter than its header is unchanged.
pub fn with_options(ip: &mut Vec<u8>, options: &[u8]) {
    if ip.len() < 20 {
        return;
    }
    ip.splice(20..20, options.iter().copied());
    ip[0] = 0x40 | ((ip[0] & 15) + u8::try_from(options.len() / 4).unwrap_or(0));
    relength(ip);
}

/// Inserts an extension header of type `kind` with `body` after the IPv6 header. A packet shorter
/// than the IPv6 header is unchanged.
pub fn with_extension(ip: &mut Vec<u8>, kind: u8, body: &[u8]) {
    const AUTHENTICATION: u8 = 51;
    if ip.len() < 40 {
        return;
    }
    let mut header = vec![ip[6], 0];
    header.extend(body);
    header.resize(header.len().next_multiple_of(8), 0);
    header[1] = match kind {
        // The length field counts words of 4 bytes, minus 2.
        AUTHENTICATION => u8::try_from(header.len() / 4 - 2).unwrap_or(0),
        // The fragment header has no length field.
        44 => header[1],
        _ => u8::try_from(header.len() / 8 - 1).unwrap_or(0),
    };
    ip.splice(40..40, header);
    ip[6] = kind;
    relength(ip);
}

fn ports(src: SocketAddr, dst: SocketAddr) -> Vec<u8> {
    [src.port().to_be_bytes(), dst.port().to_be_bytes()].concat()
}

fn finish(src: SocketAddr, dst: SocketAddr, protocol: Protocol, at: usize, l4: &mut [u8]) {
    let sum = oracle::transport(src.ip(), dst.ip(), protocol.0, l4);
    // Not zero: for UDP, zero means "no checksum"; for TCP, both zeros are equal.
    let sum = if sum == 0 { 0xffff } else { sum };
    l4[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// Fields of a TCP header.
#[derive(Clone, Copy, Debug)]
pub struct TcpHeader<'a> {
    /// The flags; FIN is the lowest bit.
    pub flags: u8,
    /// Sequence number of the first byte.
    pub sequence: u32,
    /// The acknowledgement number.
    pub acknowledgement: u32,
    /// Window size, without scaling.
    pub window: u16,
    /// Options, a multiple of 4 bytes.
    pub options: &'a [u8],
}

/// Creates an IP packet with a TCP segment without options.
pub fn tcp(src: SocketAddr, dst: SocketAddr, flags: u8, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let header = TcpHeader {
        flags,
        sequence,
        acknowledgement: 9,
        window: 0x2000,
        options: &[],
    };
    segment(src, dst, &header, payload)
}

/// Creates an IP packet with a TCP segment that has this header.
pub fn segment(
    src: SocketAddr,
    dst: SocketAddr,
    header: &TcpHeader<'_>,
    payload: &[u8],
) -> Vec<u8> {
    let mut l4 = ports(src, dst);
    l4.extend(header.sequence.to_be_bytes());
    l4.extend(header.acknowledgement.to_be_bytes());
    let words = u8::try_from(5 + header.options.len() / 4).unwrap_or(15);
    l4.extend([words << 4, header.flags]);
    l4.extend(header.window.to_be_bytes());
    l4.extend([0; 4]);
    l4.extend(header.options);
    l4.extend(payload);
    finish(src, dst, Protocol::TCP, 16, &mut l4);
    ip(src.ip(), dst.ip(), Protocol::TCP.0, TTL, &l4)
}

/// Creates an IP packet with a UDP datagram.
pub fn udp(src: SocketAddr, dst: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let mut l4 = ports(src, dst);
    l4.extend(be(8 + payload.len()));
    l4.extend([0, 0]);
    l4.extend(payload);
    finish(src, dst, Protocol::UDP, 6, &mut l4);
    ip(src.ip(), dst.ip(), Protocol::UDP.0, TTL, &l4)
}

/// Creates an IP packet with these SCTP chunks.
pub fn sctp(src: SocketAddr, dst: SocketAddr, chunks: &[u8]) -> Vec<u8> {
    let mut l4 = ports(src, dst);
    l4.extend([0, 0, 0, 1, 0, 0, 0, 0]);
    l4.extend(chunks);
    let sum = oracle::sctp(&l4);
    l4[8..12].copy_from_slice(&sum);
    ip(src.ip(), dst.ip(), Protocol::SCTP.0, TTL, &l4)
}

/// Creates an IP packet with an ICMP or ICMPv6 message: type, code, second 32-bit word, and the
/// rest.
pub fn icmp(src: IpAddr, dst: IpAddr, kind: u8, code: u8, second: [u8; 4], rest: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, code, 0, 0];
    message.extend(second);
    message.extend(rest);
    let (protocol, sum) = if src.is_ipv4() {
        (Protocol::ICMP, oracle::internet(&message))
    } else {
        let protocol = Protocol::ICMPV6;
        (protocol, oracle::transport(src, dst, protocol.0, &message))
    };
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    ip(src, dst, protocol.0, TTL, &message)
}

/// Splits a packet without options into fragments with the identification `id` and with payloads of
/// these sizes, which are multiples of 8. A last fragment contains the rest, if any.
pub fn fragments(packet: &[u8], sizes: &[usize], id: u16) -> Vec<Vec<u8>> {
    let six = packet[0] >> 4 == 6;
    let header = if six { 40 } else { 20 };
    let data = &packet[header..];
    let mut out = Vec::new();
    let mut at = 0;
    for index in 0..=sizes.len() {
        let left = data.len() - at;
        let size = sizes.get(index).map_or(left, |size| left.min(*size));
        if size == 0 {
            break;
        }
        let more = at + size < data.len();
        let mut piece = packet[..header].to_vec();
        let units = u16::try_from(at / 8).unwrap_or(0);
        if six {
            let word = units << 3 | u16::from(more);
            piece.extend([packet[6], 0]);
            piece.extend(word.to_be_bytes());
            piece.extend(u32::from(id).to_be_bytes());
            piece[6] = 44;
        } else {
            piece[4..6].copy_from_slice(&id.to_be_bytes());
            let word = units | if more { 0x2000 } else { 0 };
            piece[6..8].copy_from_slice(&word.to_be_bytes());
        }
        piece.extend(&data[at..at + size]);
        relength(&mut piece);
        out.push(piece);
        at += size;
    }
    out
}

/// Joins all fragments of a datagram. The fragments must not overlap, and must have equal headers.
///
/// # Errors
/// A header is invalid, or the fragments overlap or leave a hole.
pub fn join(fragments: &[Vec<u8>]) -> Result<Vec<u8>, String> {
    let mut pieces = Vec::new();
    for ip in fragments {
        let oracle::Parts { l4, len, .. } =
            oracle::parts(ip).ok_or("a fragment has an invalid header")?;
        let six = ip[0] >> 4 == 6;
        let flags =
            oracle::word(ip, if six { l4 - 6 } else { 6 }).ok_or("a fragment is too short")?;
        let (offset, more) = if six {
            (usize::from(flags & 0xfff8), flags & 1 != 0)
        } else {
            (usize::from(flags & 0x1fff) * 8, flags & 0x2000 != 0)
        };
        pieces.push((offset, more, &ip[l4..len], ip, l4));
    }
    pieces.sort_by_key(|piece| piece.0);
    let mut whole = Vec::new();
    let mut end = 0;
    for (index, &(offset, more, data, ip, l4)) in pieces.iter().enumerate() {
        if offset != end || more == (index + 1 == pieces.len()) {
            return Err(format!(
                "a hole or an overlap: a fragment has the offset {offset} instead of {end}"
            ));
        }
        if index == 0 {
            whole.extend(&ip[..l4]);
            if ip[0] >> 4 == 6 {
                // The field that announces the fragment header: the last "next header" before it.
                let (mut named, mut at) = (6, 40);
                while at + 8 < l4 {
                    named = at;
                    at += 8 * (usize::from(ip[at + 1]) + 1);
                }
                whole[named] = ip[l4 - 8];
                whole.truncate(l4 - 8);
            } else {
                whole[6..8].fill(0);
            }
        }
        whole.extend(data);
        end += data.len();
    }
    relength(&mut whole);
    Ok(whole)
}

/// Creates an Ethernet frame with the EtherType `kind`.
pub fn ethernet(dst: [u8; 6], src: [u8; 6], kind: u16, payload: &[u8]) -> Vec<u8> {
    [&dst[..], &src, &kind.to_be_bytes(), payload].concat()
}

/// Creates the Ethernet frame of an IP packet.
pub fn ethernet_ip(dst: [u8; 6], src: [u8; 6], packet: &[u8]) -> Vec<u8> {
    let six = packet.first().is_some_and(|byte| byte >> 4 == 6);
    ethernet(dst, src, if six { 0x86dd } else { 0x0800 }, packet)
}

/// Parses a MAC address.
///
/// # Errors
/// The text is not a MAC address.
pub fn mac(text: &str) -> Result<[u8; 6], String> {
    let bytes = text
        .trim()
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect::<Result<Vec<u8>, _>>();
    bytes
        .ok()
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(|| format!("{text} is not a link-layer address"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::SlicedPacket;
    use oracle::Health;

    #[test]
    fn generated_packets_are_valid() {
        for (a, b) in [
            ("10.0.0.1:1000", "10.0.0.2:80"),
            ("[fd00::1]:1000", "[fd00::2]:80"),
        ] {
            let (a, b): (SocketAddr, SocketAddr) = (a.parse().unwrap(), b.parse().unwrap());
            let mut all = vec![
                tcp(a, b, 2, 7, b"abc"),
                udp(a, b, b"abc"),
                sctp(a, b, &[1, 0, 0, 4]),
                icmp(a.ip(), b.ip(), 3, 1, [0; 4], b"abc"),
            ];
            let mut more = udp(a, b, b"abcd");
            if a.is_ipv4() {
                with_options(&mut more, &[7, 7, 4, 0, 0, 0, 0, 0]);
            } else {
                with_extension(&mut more, 60, &[1, 4, 0, 0, 0, 0]);
                with_extension(&mut more, 51, &[0; 22]);
                with_extension(&mut more, 0, &[1, 4, 0, 0, 0, 0]);
            }
            all.push(more);
            for packet in all {
                SlicedPacket::from_ip(&packet).expect("the packet is parsed");
                let parts = oracle::parts(&packet).expect("the header is parsed");
                assert_eq!(oracle::health(&packet, &parts), Health::Right);
                assert_eq!((parts.src, parts.dst), (a.ip(), b.ip()));
            }
            let whole = udp(a, b, &[9; 100]);
            let pieces = fragments(&whole, &[16, 48], 7);
            assert_eq!(pieces.len(), 3);
            for piece in pieces {
                assert!(
                    oracle::parts(&piece)
                        .expect("the header is parsed")
                        .fragment
                );
            }
        }
    }
}

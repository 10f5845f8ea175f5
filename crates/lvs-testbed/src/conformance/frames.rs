//! Builds frames from addresses and flags, for recordings without the bytes of frames; parses sent
//! frames.

use std::net::{IpAddr, SocketAddr};

use anyhow::bail;
use lvs_core::Protocol;
use lvs_packet::wire::checksum::{self, Sum};
use lvs_packet::wire::{Mac, be16, ipv6, put16};

/// TTL or hop limit of the built packets.
const TTL: u8 = 64;

pub(super) fn ethernet(dst: Mac, src: Mac, packet: &[u8]) -> Vec<u8> {
    let kind: u16 = if packet.first().is_some_and(|b| b >> 4 == 6) {
        0x86dd
    } else {
        0x0800
    };
    [&dst.0[..], &src.0, &kind.to_be_bytes(), packet].concat()
}

pub(super) fn ip(src: IpAddr, dst: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = Vec::with_capacity(40 + payload.len());
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let len = u16::try_from(20 + payload.len()).unwrap_or(u16::MAX);
            packet.extend([0x45, 0]);
            packet.extend(len.to_be_bytes());
            packet.extend([0, 0, 0, 0, TTL, protocol, 0, 0]);
            packet.extend(src.octets());
            packet.extend(dst.octets());
            let sum = Sum::ZERO.bytes(&packet).finish();
            put16(&mut packet, 10, sum);
        }
        (src, dst) => {
            let octets = |addr: IpAddr| match addr {
                IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
                IpAddr::V6(addr) => addr.octets(),
            };
            packet.extend([0x60, 0, 0, 0]);
            packet.extend(
                u16::try_from(payload.len())
                    .unwrap_or(u16::MAX)
                    .to_be_bytes(),
            );
            packet.extend([protocol, TTL]);
            packet.extend(octets(src));
            packet.extend(octets(dst));
        }
    }
    packet.extend(payload);
    packet
}

fn ports(src: SocketAddr, dst: SocketAddr) -> [u8; 4] {
    let ([a, b], [c, d]) = (src.port().to_be_bytes(), dst.port().to_be_bytes());
    [a, b, c, d]
}

fn finish(l4: &mut [u8], at: usize, protocol: Protocol, src: SocketAddr, dst: SocketAddr) {
    let sum = Sum::ZERO
        .pseudo(src.ip(), dst.ip(), protocol.0, l4.len())
        .bytes(l4)
        .finish();
    put16(l4, at, if sum == 0 { 0xffff } else { sum });
}

/// Parses TCP flags from their letters.
pub(super) fn tcp_flags(letters: &str) -> anyhow::Result<u8> {
    letters.chars().try_fold(0, |flags, letter| {
        Ok(flags
            | match letter {
                'F' => 0x01,
                'S' => 0x02,
                'R' => 0x04,
                'P' => 0x08,
                'A' => 0x10,
                'U' => 0x20,
                'E' => 0x40,
                'C' => 0x80,
                other => bail!("unknown TCP flag {other:?}"),
            })
    })
}

/// An IP packet with a TCP segment of `len` bytes of payload.
pub(super) fn tcp(src: SocketAddr, dst: SocketAddr, flags: u8, len: usize) -> Vec<u8> {
    let mut l4 = ports(src, dst).to_vec();
    l4.extend([0, 0, 0, 100, 0, 0, 0, 200, 0x50, flags, 0x20, 0, 0, 0, 0, 0]);
    l4.resize(l4.len() + len, b'x');
    finish(&mut l4, 16, Protocol::TCP, src, dst);
    ip(src.ip(), dst.ip(), Protocol::TCP.0, &l4)
}

pub(super) fn udp(src: SocketAddr, dst: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let mut l4 = ports(src, dst).to_vec();
    let len = u16::try_from(8 + payload.len()).unwrap_or(u16::MAX);
    l4.extend(len.to_be_bytes());
    l4.extend([0, 0]);
    l4.extend(payload);
    finish(&mut l4, 6, Protocol::UDP, src, dst);
    ip(src.ip(), dst.ip(), Protocol::UDP.0, &l4)
}

/// An SCTP packet with the named chunks, separated by `+`.
pub(super) fn sctp(src: SocketAddr, dst: SocketAddr, chunks: &str) -> anyhow::Result<Vec<u8>> {
    let mut l4 = ports(src, dst).to_vec();
    l4.extend([0, 0, 0, 1, 0, 0, 0, 0]);
    for chunk in chunks.split('+') {
        let (kind, body) = sctp_chunk(chunk)?;
        l4.extend([kind, 0, 0, 4 + body]);
        l4.resize(l4.len() + usize::from(body), 0);
    }
    let sum = checksum::sctp(&l4);
    l4[8..12].copy_from_slice(&sum);
    Ok(ip(src.ip(), dst.ip(), Protocol::SCTP.0, &l4))
}

/// Type of a chunk, and number of bytes after its header.
fn sctp_chunk(name: &str) -> anyhow::Result<(u8, u8)> {
    Ok(match name {
        "DATA" => (0, 16),
        "INIT" => (1, 16),
        "INIT_ACK" => (2, 16),
        "SACK" => (3, 12),
        "HEARTBEAT" => (4, 4),
        "HEARTBEAT_ACK" => (5, 4),
        "ABORT" => (6, 0),
        "SHUTDOWN" => (7, 4),
        "SHUTDOWN_ACK" => (8, 0),
        "ERROR" => (9, 4),
        "COOKIE_ECHO" => (10, 4),
        "COOKIE_ACK" => (11, 0),
        "ECNE" => (12, 4),
        "CWR" => (13, 4),
        "SHUTDOWN_COMPLETE" => (14, 0),
        other => bail!("unknown SCTP chunk {other:?}"),
    })
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Read<'a> {
    pub(super) protocol: u8,
    pub(super) src: SocketAddr,
    pub(super) dst: SocketAddr,
    pub(super) l4: &'a [u8],
}

/// Reads an IP packet without extension headers, except an IPv6 fragment header. `None` if the
/// packet is too short, or is no IP packet.
pub(super) fn read(packet: &[u8]) -> Option<Read<'_>> {
    let addr6 = |at: usize| {
        let octets: [u8; 16] = packet.get(at..at + 16)?.try_into().ok()?;
        Some(IpAddr::from(octets))
    };
    let addr4 = |at: usize| {
        let octets: [u8; 4] = packet.get(at..at + 4)?.try_into().ok()?;
        Some(IpAddr::from(octets))
    };
    let (protocol, src, dst, header) = match packet.first()? >> 4 {
        4 => (
            *packet.get(9)?,
            addr4(12)?,
            addr4(16)?,
            usize::from(packet[0] & 15) * 4,
        ),
        6 => {
            // IPv6 tunnel packets in the recordings have at most a fragment header.
            let (protocol, header) = match *packet.get(6)? {
                ipv6::FRAGMENT => (*packet.get(40)?, 48),
                protocol => (protocol, 40),
            };
            (protocol, addr6(8)?, addr6(24)?, header)
        }
        _ => return None,
    };
    let l4 = packet.get(header..)?;
    let (sport, dport) = match Protocol(protocol) {
        Protocol::TCP | Protocol::UDP | Protocol::SCTP => (be16(l4, 0), be16(l4, 2)),
        _ => (0, 0),
    };
    Some(Read {
        protocol,
        src: SocketAddr::new(src, sport),
        dst: SocketAddr::new(dst, dport),
        l4,
    })
}

/// Name in the recordings for a packet that the host itself sends.
pub(super) fn reply_name(packet: &[u8]) -> String {
    let Some(read) = read(packet) else {
        return "unreadable".to_owned();
    };
    match (Protocol(read.protocol), read.l4) {
        (Protocol::TCP, l4) if l4.len() >= 20 && l4[13] & 4 != 0 => "tcp-rst".to_owned(),
        (Protocol::ICMP, [3, 3, ..]) => "icmp-port-unreachable".to_owned(),
        (Protocol::ICMPV6, [1, 4, ..]) => "icmp6-port-unreachable".to_owned(),
        (Protocol::ICMP, [kind, code, ..]) => format!("icmp-{kind}-{code}"),
        (Protocol::ICMPV6, [kind, code, ..]) => format!("icmp6-{kind}-{code}"),
        (protocol, _) => format!("{protocol} from {}", read.src),
    }
}

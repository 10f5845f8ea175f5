//! Just enough of a parser to tell the director of a recorded frame.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use lvs_core::{IcmpError, Protocol, SctpChunk, Segment, TcpFlags, Transport, Tuple};
use serde_json::Value;

/// Content of a frame.
pub enum Frame {
    /// A datagram: its tuple, transport header, payload and length.
    Packet(Tuple, Header, u32),
    /// An ICMP error: about a packet that it embeds.
    Icmp(IcmpError),
    /// Nothing that concerns the director.
    Other(IpAddr),
}

/// A transport header that owns its payload; of TCP, the whole segment.
pub enum Header {
    Tcp(Vec<u8>),
    Udp(Vec<u8>),
    Sctp(SctpChunk),
    Short,
    Other,
}

impl Header {
    pub fn transport(&self) -> Transport<'_> {
        match self {
            Self::Tcp(segment) => Transport::Tcp(TcpFlags(segment[13])),
            Self::Udp(payload) => Transport::Udp(payload),
            Self::Sctp(chunk) => Transport::Sctp(*chunk),
            Self::Short => Transport::Short {
                ports: false,
                header: false,
            },
            Self::Other => Transport::Other,
        }
    }

    pub fn segment(&self) -> Segment<'_> {
        match self {
            Self::Tcp(bytes) => Segment {
                bytes,
                trusted: false,
            },
            _ => Segment::NONE,
        }
    }
}

pub fn hex(value: &Value) -> Vec<u8> {
    let text = value.as_str().expect("hexadecimal digits").as_bytes();
    text.chunks(2)
        .map(|pair| {
            let pair = std::str::from_utf8(pair).expect("digits");
            u8::from_str_radix(pair, 16).expect("digits")
        })
        .collect()
}

struct Ip<'a> {
    src: IpAddr,
    dst: IpAddr,
    protocol: u8,
    payload: &'a [u8],
    len: u32,
}

fn ip(bytes: &[u8]) -> Ip<'_> {
    let word = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    if bytes[0] >> 4 == 4 {
        let addr = |at: usize| {
            let octets: [u8; 4] = bytes[at..at + 4].try_into().expect("four bytes");
            IpAddr::V4(Ipv4Addr::from(octets))
        };
        return Ip {
            src: addr(12),
            dst: addr(16),
            protocol: bytes[9],
            payload: &bytes[usize::from(bytes[0] & 15) * 4..],
            len: word(2).into(),
        };
    }
    let addr = |at: usize| {
        let octets: [u8; 16] = bytes[at..at + 16].try_into().expect("sixteen bytes");
        IpAddr::V6(Ipv6Addr::from(octets))
    };
    Ip {
        src: addr(8),
        dst: addr(24),
        protocol: bytes[6],
        payload: &bytes[40..],
        len: u32::from(word(4)) + 40,
    }
}

fn tuple(ip: &Ip<'_>) -> Option<Tuple> {
    let port = |at: usize| {
        let bytes = ip.payload.get(at..at + 2)?;
        Some(u16::from_be_bytes([bytes[0], bytes[1]]))
    };
    let ported = matches!(ip.protocol, 6 | 17 | 132);
    let (src, dst) = if ported { (port(0)?, port(2)?) } else { (0, 0) };
    Some(Tuple {
        protocol: Protocol(ip.protocol),
        src: SocketAddr::new(ip.src, src),
        dst: SocketAddr::new(ip.dst, dst),
    })
}

/// Parses an Ethernet frame; `hook` tells where a destination is met.
pub fn parse(frame: &[u8], hook: impl Fn(IpAddr) -> lvs_core::Hook, mark: u32) -> Frame {
    let outer = ip(&frame[14..]);
    let error = match outer.protocol {
        1 => matches!(outer.payload.first(), Some(3 | 4 | 11)),
        58 => matches!(outer.payload.first(), Some(0..128)),
        _ => false,
    };
    if error {
        let inner = ip(&outer.payload[8..]);
        let Some(tuple) = tuple(&inner) else {
            return Frame::Other(outer.dst);
        };
        return Frame::Icmp(IcmpError {
            hook: hook(outer.dst),
            src: outer.src,
            dst: outer.dst,
            inner: tuple,
            inner_ports: true,
            checksum_ok: true,
            mark,
            len: outer.len,
        });
    }
    let Some(tuple) = tuple(&outer) else {
        return Frame::Other(outer.dst);
    };
    let header = match (outer.protocol, outer.payload) {
        (6, tcp) if tcp.len() >= 20 => Header::Tcp(tcp.to_vec()),
        (17, udp) if udp.len() >= 8 => Header::Udp(udp[8..].to_vec()),
        (132, sctp) if sctp.len() >= 16 => Header::Sctp(SctpChunk {
            first: sctp[12],
            abort_follows: false,
        }),
        (6 | 17 | 132, _) => Header::Short,
        (1 | 58, _) => return Frame::Other(outer.dst),
        _ => Header::Other,
    };
    Frame::Packet(tuple, header, outer.len)
}

//! From bytes to what the director decides by. The one place that checks the bounds of what came from the network.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use lvs_core::{Hook, IcmpError, PacketMeta, Protocol, SctpChunk, TcpFlags, Transport, Tuple};

use crate::drop::FrameDrop;
use crate::wire::checksum::Sum;
use crate::wire::{be16, ipv4};

/// What an IPv4 header says, and where the transport header is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
    /// The protocol of the payload.
    pub protocol: Protocol,
    /// Length of the IP header: where the payload begins.
    pub l4: usize,
    /// Length of the datagram, header included.
    pub len: usize,
    /// Time to live.
    pub ttl: u8,
    /// Type of service.
    pub tos: u8,
    /// "Don't fragment".
    pub df: bool,
    /// It is a fragment of a datagram.
    pub fragment: Option<Fragment>,
    /// Source and destination port of TCP, UDP and SCTP, where they could be read.
    pub ports: Option<(u16, u16)>,
}

/// Which part of a datagram a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Identification of the datagram.
    pub id: u16,
    /// Where its payload belongs, in bytes.
    pub offset: usize,
    /// More follow.
    pub more: bool,
}

/// What an ICMP message is to the director.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icmp {
    /// An error about a packet that can be read.
    Error(IcmpError),
    /// Not an error, or one about a packet that cannot be read: the host's.
    Host,
    /// Cut short.
    Short,
}

/// Reads the IPv4 header at the start of `bytes`, which may end in padding. `aggregate`: it is an aggregate of segments,
/// whose total length may be missing.
///
/// # Errors
/// The checks of a host (RFC 1122 section 3.2.1), in the kernel's order (`ip_rcv_core`).
#[inline]
pub fn ipv4(bytes: &[u8], aggregate: bool) -> Result<Packet, FrameDrop> {
    if bytes.len() < ipv4::HEADER_LEN {
        return Err(FrameDrop::Truncated);
    }
    if bytes[0] >> 4 != 4 {
        return Err(FrameDrop::IpVersion);
    }
    let l4 = ipv4::header_len(bytes);
    if l4 < ipv4::HEADER_LEN {
        return Err(FrameDrop::IpHeaderLength);
    }
    if bytes.len() < l4 {
        return Err(FrameDrop::Truncated);
    }
    if Sum::ZERO.bytes(&bytes[..l4]).finish() != 0 {
        return Err(FrameDrop::IpChecksum);
    }
    let mut len = usize::from(be16(bytes, 2));
    if len == 0 && aggregate {
        len = bytes.len();
    }
    if len > bytes.len() {
        return Err(FrameDrop::Truncated);
    }
    if len < l4 {
        return Err(FrameDrop::IpLength);
    }
    let flags = be16(bytes, 6);
    let fragment = (flags & (ipv4::MF | ipv4::OFFSET) != 0).then(|| Fragment {
        id: be16(bytes, 4),
        offset: usize::from(flags & ipv4::OFFSET) * 8,
        more: flags & ipv4::MF != 0,
    });
    let protocol = Protocol(bytes[9]);
    let readable = fragment.is_none_or(|f| f.offset == 0);
    Ok(Packet {
        src: ipv4::src(bytes),
        dst: ipv4::dst(bytes),
        protocol,
        l4,
        len,
        ttl: bytes[8],
        tos: bytes[1],
        df: flags & ipv4::DF != 0,
        fragment,
        ports: if readable {
            ports(protocol, &bytes[l4..len])
        } else {
            None
        },
    })
}

#[inline]
fn ports(protocol: Protocol, l4: &[u8]) -> Option<(u16, u16)> {
    let has_ports = matches!(protocol, Protocol::TCP | Protocol::UDP | Protocol::SCTP);
    (has_ports && l4.len() >= 4).then(|| (be16(l4, 0), be16(l4, 2)))
}

impl Packet {
    /// What the core is to see of this packet, whose bytes are `ip`.
    #[inline]
    pub fn meta<'a>(&self, ip: &'a [u8], hook: Hook, mark: u32) -> PacketMeta<'a> {
        let (sport, dport) = self.ports.unwrap_or_default();
        PacketMeta {
            hook,
            tuple: Tuple {
                protocol: self.protocol,
                src: SocketAddr::new(IpAddr::V4(self.src), sport),
                dst: SocketAddr::new(IpAddr::V4(self.dst), dport),
            },
            transport: self.transport(ip),
            mark,
            len: u32::try_from(self.len).unwrap_or(u32::MAX),
        }
    }

    #[inline]
    fn transport<'a>(&self, ip: &'a [u8]) -> Transport<'a> {
        let l4 = ip.get(self.l4..self.len).unwrap_or_default();
        let short = Transport::Short {
            ports: self.ports.is_some(),
        };
        match self.protocol {
            Protocol::TCP if l4.len() >= 20 => Transport::Tcp(TcpFlags(l4[13])),
            Protocol::UDP if l4.len() >= 8 => Transport::Udp(&l4[8..]),
            Protocol::SCTP if l4.len() >= 16 => Transport::Sctp(sctp_chunk(&l4[12..])),
            Protocol::TCP | Protocol::UDP | Protocol::SCTP => short,
            _ => Transport::Other,
        }
    }

    /// Reads this packet, whose bytes are `ip`, as an ICMP message.
    pub fn icmp(&self, ip: &[u8], hook: Hook, mark: u32) -> Icmp {
        let message = ip.get(self.l4..self.len).unwrap_or_default();
        let Some(kind) = message.get(..8).map(|header| header[0]) else {
            return Icmp::Short;
        };
        // Destination unreachable, source quench, time exceeded: what IPVS relates to a connection.
        if !matches!(kind, 3 | 4 | 11) {
            return Icmp::Host;
        }
        match inner(&message[8..]) {
            Some((inner, inner_ports)) => Icmp::Error(IcmpError {
                hook,
                src: IpAddr::V4(self.src),
                dst: IpAddr::V4(self.dst),
                inner,
                inner_ports,
                checksum_ok: Sum::ZERO.bytes(message).finish() == 0,
                mark,
                len: u32::try_from(self.len).unwrap_or(u32::MAX),
            }),
            None => Icmp::Host,
        }
    }
}

/// The packet inside an ICMP error: its header must be whole, and it must not be a later fragment.
fn inner(bytes: &[u8]) -> Option<(Tuple, bool)> {
    let l4 = ipv4::header_len(bytes);
    if bytes.len() < ipv4::HEADER_LEN
        || bytes[0] >> 4 != 4
        || l4 < ipv4::HEADER_LEN
        || bytes.len() < l4
    {
        return None;
    }
    if be16(bytes, 6) & ipv4::OFFSET != 0 {
        return None;
    }
    let protocol = Protocol(bytes[9]);
    let ports = ports(protocol, &bytes[l4..]);
    let (sport, dport) = ports.unwrap_or_default();
    let tuple = Tuple {
        protocol,
        src: SocketAddr::new(IpAddr::V4(ipv4::src(bytes)), sport),
        dst: SocketAddr::new(IpAddr::V4(ipv4::dst(bytes)), dport),
    };
    Some((tuple, ports.is_some()))
}

/// The first chunk, and whether the one behind a cookie is an ABORT (`set_sctp_state` looks at both).
fn sctp_chunk(chunks: &[u8]) -> SctpChunk {
    const COOKIE_ECHO: u8 = 10;
    const COOKIE_ACK: u8 = 11;
    const ABORT: u8 = 6;
    let first = chunks[0];
    let len = usize::from(be16(chunks, 2));
    let cookie = matches!(first, COOKIE_ECHO | COOKIE_ACK) && len >= 4;
    let next = len.next_multiple_of(4);
    let whole = chunks.len() >= next + 4;
    SctpChunk {
        first,
        abort_follows: cookie && whole && chunks[next] == ABORT,
    }
}

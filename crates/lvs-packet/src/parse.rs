//! Parses packets into the fields that the director uses, and checks all lengths in received data.

use std::net::{IpAddr, SocketAddr, SocketAddrV4};

use lvs_core::fast_path::Plain;
use lvs_core::{
    Hook, IcmpError, PacketMeta, Protocol, SctpChunk, Segment, TcpFlags, Transport, Tuple,
};

use crate::drop::FrameDrop;
use crate::wire::checksum::Sum;
use crate::wire::{be16, icmp, ipv4, ipv6, sctp, tcp, udp};

/// For each protocol, the number of bytes after the IP header that a packet must have at least to
/// open a connection.
pub const HEADERS: [(Protocol, usize); 3] = [
    (Protocol::TCP, tcp::HEADER_LEN),
    (Protocol::UDP, udp::HEADER_LEN),
    (Protocol::SCTP, sctp::HEADER_LEN + sctp::CHUNK_LEN),
];

/// First byte of an IPv4 header without options.
pub(crate) const PLAIN: u8 = 0x45;

/// Fields of an IP header, and the position of the transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Source address of the packet.
    pub src: IpAddr,
    /// Destination address of the packet.
    pub dst: IpAddr,
    /// The protocol of the payload.
    pub protocol: Protocol,
    /// Length of the IP header in bytes, options or extension headers included: the payload begins
    /// there.
    pub l4: usize,
    /// Length of the datagram in bytes, header included.
    pub len: usize,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// Type of service, or traffic class.
    pub tos: u8,
    /// The flag "don't fragment"; true for IPv6, which routers never fragment.
    pub df: bool,
    /// Position in the datagram, if the packet is a fragment.
    pub fragment: Option<Fragment>,
    /// Whether the IPv6 extension headers include AH. IPVS reads the headers after AH, but
    /// nf_tables does not.
    pub authenticated: bool,
    /// Source and destination port, if the protocol is TCP, UDP or SCTP and the packet contains
    /// them.
    pub ports: Option<(u16, u16)>,
}

/// Position of a fragment in its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Identification of the datagram.
    pub id: u32,
    /// Offset of the fragment's payload in the payload of the datagram, in bytes.
    pub offset: usize,
    /// Whether the datagram has fragments after this one.
    pub more: bool,
    /// For IPv6, the offset of the byte that announces the fragment header; the reassembled
    /// datagram has no fragment header.
    pub named_at: usize,
}

/// Meaning of an ICMP message for the director.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icmp {
    /// An ICMP error that quotes a readable packet.
    Error(IcmpError),
    /// IPVS does not use the message: it is not an error of a type that IPVS relates to
    /// connections, or the packet that it quotes cannot be parsed. The host receives the message.
    Host,
    /// The ICMP message is truncated.
    Short,
}

/// Reads the IPv4 header at the start of `bytes`, which may end with padding. `aggregate` means
/// that the packet is a super-packet, whose length field may be 0.
///
/// # Errors
/// The packet fails one of the checks of a host (RFC 1122 section 3.2.1), which are made in the
/// kernel's order (`ip_rcv_core`).
#[inline]
pub fn ipv4(bytes: &[u8], aggregate: bool) -> Result<Packet, FrameDrop> {
    if bytes.len() < ipv4::HEADER_LEN {
        return Err(FrameDrop::Truncated);
    }
    if bytes[ipv4::field::VERSION] >> 4 != 4 {
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
    let mut len = usize::from(be16(bytes, ipv4::field::TOTAL_LEN));
    if len == 0 && aggregate {
        len = bytes.len();
    }
    if len > bytes.len() {
        return Err(FrameDrop::Truncated);
    }
    if len < l4 {
        return Err(FrameDrop::IpLength);
    }
    let flags = be16(bytes, ipv4::field::FLAGS);
    let fragment = (flags & (ipv4::MF | ipv4::OFFSET) != 0).then(|| Fragment {
        id: be16(bytes, ipv4::field::ID).into(),
        offset: usize::from(flags & ipv4::OFFSET) * 8,
        more: flags & ipv4::MF != 0,
        named_at: 0,
    });
    let protocol = Protocol(bytes[ipv4::field::PROTOCOL]);
    let readable = fragment.is_none_or(|f| f.offset == 0);
    Ok(Packet {
        src: IpAddr::V4(ipv4::src(bytes)),
        dst: IpAddr::V4(ipv4::dst(bytes)),
        protocol,
        l4,
        len,
        ttl: bytes[ipv4::field::TTL],
        tos: bytes[ipv4::field::TOS],
        df: flags & ipv4::DF != 0,
        fragment,
        authenticated: false,
        ports: if readable {
            ports(protocol, &bytes[l4..len])
        } else {
            None
        },
    })
}

/// Reads the IPv4 packet at the start of `bytes` if it is ordinary: no options, no fragment, a TTL
/// above 1, a correct header checksum, and a complete header of UDP, or of a TCP segment that
/// continues a connection. The userspace fast path decides on such a packet, and may still leave it
/// to the slow path.
#[inline]
pub fn plain(bytes: &[u8]) -> Option<Plain> {
    let header: &[u8; ipv4::HEADER_LEN] = bytes.first_chunk()?;
    let protocol = Protocol(header[ipv4::field::PROTOCOL]);
    let flags = be16(header, ipv4::field::FLAGS);
    let len = usize::from(be16(header, ipv4::field::TOTAL_LEN));
    if header[ipv4::field::VERSION] != PLAIN
        || flags & (ipv4::MF | ipv4::OFFSET) != 0
        || header[ipv4::field::TTL] <= 1
        || Sum::ZERO.bytes(header).finish() != 0
    {
        return None;
    }
    let l4 = bytes.get(ipv4::HEADER_LEN..len)?;
    let goes_on = match protocol {
        Protocol::TCP => l4.len() >= tcp::HEADER_LEN && TcpFlags(l4[tcp::field::FLAGS]).go_on(),
        Protocol::UDP => l4.len() >= udp::HEADER_LEN,
        _ => false,
    };
    goes_on.then(|| Plain {
        protocol,
        src: SocketAddrV4::new(ipv4::src(header), be16(l4, 0)),
        dst: SocketAddrV4::new(ipv4::dst(header), be16(l4, 2)),
        transit: false,
        len: u32::try_from(len).unwrap_or(u32::MAX),
    })
}

/// Reads the IPv6 header and all extension headers at the start of `bytes`; otherwise as
/// [`ipv4()`].
///
/// # Errors
/// The packet fails one of the checks of a host (`ip6_rcv_core`). If the chain of extension headers
/// is truncated or too long: [`FrameDrop::IpHeaderLength`]. If the source is a multicast address:
/// [`FrameDrop::Martian`].
pub fn ipv6(bytes: &[u8], aggregate: bool) -> Result<Packet, FrameDrop> {
    if bytes.len() < ipv6::HEADER_LEN {
        return Err(FrameDrop::Truncated);
    }
    if bytes[ipv4::field::VERSION] >> 4 != 6 {
        return Err(FrameDrop::IpVersion);
    }
    let mut len = ipv6::HEADER_LEN + usize::from(be16(bytes, ipv6::field::PAYLOAD_LEN));
    if len == ipv6::HEADER_LEN && aggregate {
        len = bytes.len();
    }
    if len > bytes.len() {
        return Err(FrameDrop::Truncated);
    }
    let (src, dst) = (ipv6::src(bytes), ipv6::dst(bytes));
    if src.is_multicast() {
        return Err(FrameDrop::Martian);
    }
    let bytes = &bytes[..len];
    let chain = ipv6::walk(bytes).ok_or(FrameDrop::IpHeaderLength)?;
    let (mut protocol, mut l4) = (Protocol(chain.protocol), chain.l4);
    let fragment = chain.fragment.map(|(header, named_at)| {
        // The payload of a fragment begins after its fragment header, whatever its protocol is.
        protocol = Protocol(bytes[header.at]);
        l4 = header.at + ipv6::FRAGMENT_LEN;
        Fragment {
            id: header.id,
            offset: header.offset,
            more: header.more,
            named_at,
        }
    });
    Ok(Packet {
        src: IpAddr::V6(src),
        dst: IpAddr::V6(dst),
        protocol,
        l4,
        len,
        ttl: bytes[ipv6::field::HOP_LIMIT],
        tos: ipv6::traffic_class(bytes),
        df: true,
        fragment,
        authenticated: chain.authenticated,
        ports: if fragment.is_none() {
            ports(protocol, &bytes[l4..])
        } else {
            None
        },
    })
}

/// Reads the IP header at the start of `bytes`, of either version.
///
/// # Errors
/// As [`ipv4()`] and [`ipv6()`].
#[inline]
pub fn ip(bytes: &[u8], aggregate: bool) -> Result<Packet, FrameDrop> {
    if crate::wire::is_ipv6(bytes) {
        ipv6(bytes, aggregate)
    } else {
        ipv4(bytes, aggregate)
    }
}

#[inline]
fn ports(protocol: Protocol, l4: &[u8]) -> Option<(u16, u16)> {
    let has_ports = matches!(protocol, Protocol::TCP | Protocol::UDP | Protocol::SCTP);
    (has_ports && l4.len() >= 4).then(|| (be16(l4, 0), be16(l4, 2)))
}

impl Packet {
    /// Whether the packet is IPv6.
    #[inline]
    pub const fn is_ipv6(&self) -> bool {
        self.dst.is_ipv6()
    }

    /// Whether the packet is an ICMP message of its IP version.
    #[inline]
    pub fn is_icmp(&self) -> bool {
        self.protocol
            == if self.is_ipv6() {
                Protocol::ICMPV6
            } else {
                Protocol::ICMP
            }
    }

    /// Returns this first fragment of an IPv6 datagram, whose bytes are `ip`, as if it were a
    /// complete packet: with the protocol and ports after all of its extension headers.
    #[must_use]
    pub fn alone(mut self, ip: &[u8]) -> Self {
        if let Some(bytes) = ip.get(..self.len)
            && let Some(chain) = ipv6::walk(bytes)
        {
            self.protocol = Protocol(chain.protocol);
            self.l4 = chain.l4;
            self.ports = ports(self.protocol, &bytes[chain.l4..]);
        }
        self
    }

    /// Describes this packet, whose bytes are `ip`, to `lvs_core`.
    #[inline]
    pub fn meta<'a>(&self, ip: &'a [u8], hook: Hook, mark: u32) -> PacketMeta<'a> {
        let (sport, dport) = self.ports.unwrap_or_default();
        PacketMeta {
            hook,
            tuple: Tuple {
                protocol: self.protocol,
                src: SocketAddr::new(self.src, sport),
                dst: SocketAddr::new(self.dst, dport),
            },
            transport: self.transport(ip),
            segment: Segment {
                bytes: ip.get(self.l4..self.len).unwrap_or_default(),
                trusted: false,
            },
            mark,
            len: u32::try_from(self.len).unwrap_or(u32::MAX),
        }
    }

    /// Whether the packet ends before the end of the transport header, as far as IPVS reads it
    /// before it opens a connection.
    pub fn is_short(&self) -> bool {
        let len = self.len.saturating_sub(self.l4);
        let least = HEADERS.iter().find(|(of, _)| *of == self.protocol);
        least.is_some_and(|&(_, least)| len < least)
    }

    #[inline]
    fn transport<'a>(&self, ip: &'a [u8]) -> Transport<'a> {
        let l4 = ip.get(self.l4..self.len).unwrap_or_default();
        let short = Transport::Short {
            ports: self.ports.is_some(),
            header: self.protocol == Protocol::SCTP && l4.len() >= 12,
        };
        match self.protocol {
            Protocol::TCP if l4.len() >= tcp::HEADER_LEN => {
                Transport::Tcp(TcpFlags(l4[tcp::field::FLAGS]))
            }
            Protocol::UDP if l4.len() >= udp::HEADER_LEN => Transport::Udp(&l4[udp::HEADER_LEN..]),
            Protocol::SCTP if l4.len() >= sctp::HEADER_LEN + sctp::CHUNK_LEN => {
                Transport::Sctp(sctp_chunk(&l4[sctp::HEADER_LEN..]))
            }
            Protocol::TCP | Protocol::UDP | Protocol::SCTP => short,
            _ => Transport::Other,
        }
    }

    /// Parses this packet, whose bytes are `ip`, as an ICMP message.
    pub fn icmp(&self, ip: &[u8], hook: Hook) -> Icmp {
        let message = ip.get(self.l4..self.len).unwrap_or_default();
        let Some((header, quoted)) = message.split_at_checked(icmp::HEADER_LEN) else {
            return Icmp::Short;
        };
        let kind = header[icmp::field::TYPE];
        // IPVS uses these errors: destination unreachable, source quench, time exceeded; of ICMPv6,
        // all errors.
        let (related, pseudo) = if self.is_ipv6() {
            let pseudo = Sum::ZERO.pseudo(self.src, self.dst, Protocol::ICMPV6.0, message.len());
            (kind < 128, pseudo)
        } else {
            (matches!(kind, 3 | 4 | 11), Sum::ZERO)
        };
        if !related {
            return Icmp::Host;
        }
        match inner(quoted, self.is_ipv6()) {
            Some((inner, inner_ports)) => Icmp::Error(IcmpError {
                hook,
                src: self.src,
                dst: self.dst,
                inner,
                inner_ports,
                checksum_ok: pseudo.bytes(message).finish() == 0,
                mark: 0,
                len: u32::try_from(self.len).unwrap_or(u32::MAX),
            }),
            None => Icmp::Host,
        }
    }
}

/// Parses the packet inside an ICMP error. Its fixed header must be complete, and it must not be a
/// later fragment. The second value is `false` if the ports are unknown: its protocol has no ports,
/// or the packet is truncated before them.
fn inner(bytes: &[u8], six: bool) -> Option<(Tuple, bool)> {
    if six {
        return inner6(bytes);
    }
    let l4 = ipv4::header_len(bytes);
    if bytes.len() < ipv4::HEADER_LEN
        || bytes[ipv4::field::VERSION] >> 4 != 4
        || l4 < ipv4::HEADER_LEN
    {
        return None;
    }
    if be16(bytes, ipv4::field::FLAGS) & ipv4::OFFSET != 0 {
        return None;
    }
    let protocol = Protocol(bytes[ipv4::field::PROTOCOL]);
    let ports = ports(protocol, bytes.get(l4..).unwrap_or_default());
    let (sport, dport) = ports.unwrap_or_default();
    let tuple = Tuple {
        protocol,
        src: SocketAddr::new(IpAddr::V4(ipv4::src(bytes)), sport),
        dst: SocketAddr::new(IpAddr::V4(ipv4::dst(bytes)), dport),
    };
    Some((tuple, ports.is_some()))
}

fn inner6(bytes: &[u8]) -> Option<(Tuple, bool)> {
    if !crate::wire::is_ipv6(bytes) || bytes.len() < ipv6::HEADER_LEN {
        return None;
    }
    let chain = ipv6::walk(bytes)?;
    if chain.fragment.is_some_and(|(header, _)| header.offset > 0) {
        return None;
    }
    let protocol = Protocol(chain.protocol);
    let ports = ports(protocol, &bytes[chain.l4..]);
    let (sport, dport) = ports.unwrap_or_default();
    let tuple = Tuple {
        protocol,
        src: SocketAddr::new(IpAddr::V6(ipv6::src(bytes)), sport),
        dst: SocketAddr::new(IpAddr::V6(ipv6::dst(bytes)), dport),
    };
    Some((tuple, ports.is_some()))
}

/// Reads the type of the first chunk of an SCTP packet, and whether the chunk after a COOKIE ECHO
/// or COOKIE ACK is an ABORT (`set_sctp_state` checks both).
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

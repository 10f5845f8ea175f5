//! The parts of a packet that the core uses.

use core::fmt;
use core::net::{IpAddr, SocketAddr, SocketAddrV4};

/// An IP protocol number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Protocol(pub u8);

impl Protocol {
    /// ICMP for IPv4 (RFC 792).
    pub const ICMP: Self = Self(1);
    /// TCP (RFC 9293).
    pub const TCP: Self = Self(6);
    /// UDP (RFC 768).
    pub const UDP: Self = Self(17);
    /// IPsec encapsulating security payload (RFC 4303).
    pub const ESP: Self = Self(50);
    /// IPsec authentication header (RFC 4302).
    pub const AH: Self = Self(51);
    /// ICMP for IPv6 (RFC 4443).
    pub const ICMPV6: Self = Self(58);
    /// SCTP (RFC 9260).
    pub const SCTP: Self = Self(132);
}

impl fmt::Debug for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ICMP => f.write_str("ICMP"),
            Self::TCP => f.write_str("TCP"),
            Self::UDP => f.write_str("UDP"),
            Self::ESP => f.write_str("ESP"),
            Self::AH => f.write_str("AH"),
            Self::ICMPV6 => f.write_str("ICMPv6"),
            Self::SCTP => f.write_str("SCTP"),
            Self(n) => write!(f, "IP_{n}"),
        }
    }
}

/// The hook of netfilter at which the host's network stack would receive the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// `LOCAL_IN`: the destination is a virtual or local address, or the packet is routed to this
    /// host because of its mark.
    Local,
    /// `FORWARD`: the packet passes through the host.
    Transit,
    /// `LOCAL_OUT`: this host has sent the packet.
    Output,
}

/// Source and destination of a packet or of the packet inside an ICMP error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// The IP protocol of the packet.
    pub protocol: Protocol,
    /// Source address and port; port 0 if the protocol has none.
    pub src: SocketAddr,
    /// Destination address and port; port 0 if the protocol has none.
    pub dst: SocketAddr,
}

impl Tuple {
    /// Source and destination of a packet of `protocol`.
    #[inline]
    pub const fn new(protocol: Protocol, src: SocketAddr, dst: SocketAddr) -> Self {
        Self { protocol, src, dst }
    }

    /// Source and destination of a TCP segment.
    #[inline]
    pub const fn tcp(src: SocketAddr, dst: SocketAddr) -> Self {
        Self::new(Protocol::TCP, src, dst)
    }

    /// Source and destination of a UDP datagram.
    #[inline]
    pub const fn udp(src: SocketAddr, dst: SocketAddr) -> Self {
        Self::new(Protocol::UDP, src, dst)
    }
}

/// The control bits of a TCP header (RFC 9293 section 3.1), in the layout of its byte 13.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    /// FIN: the sender has no more data.
    pub const FIN: u8 = 0x01;
    /// SYN: the sender announces its first sequence number.
    pub const SYN: u8 = 0x02;
    /// RST: the sender ends or refuses the connection at once.
    pub const RST: u8 = 0x04;
    /// The acknowledgement field is significant.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer field is significant.
    pub const URG: u8 = 0x20;

    /// Whether all bits of `mask` are set.
    pub const fn has(self, mask: u8) -> bool {
        self.0 & mask == mask
    }

    /// Whether ACK is set, and SYN, FIN and RST are not.
    #[inline]
    pub const fn go_on(self) -> bool {
        const TURNS: u8 = TcpFlags::FIN | TcpFlags::SYN | TcpFlags::RST;
        self.0 & (TURNS | Self::ACK) == Self::ACK
    }
}

/// The part of an SCTP packet that IPVS reads: the type of the first chunk, and whether an ABORT
/// follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SctpChunk {
    /// Type of the first chunk (RFC 9260 section 3.2).
    pub first: u8,
    /// Whether the first chunk is COOKIE ECHO or COOKIE ACK with a length of at least 4, and the
    /// next one is ABORT.
    pub abort_follows: bool,
}

/// Content of the transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport<'a> {
    /// A TCP header of at least 20 bytes.
    Tcp(TcpFlags),
    /// A complete UDP header; the slice is the payload after it.
    Udp(&'a [u8]),
    /// An SCTP header and the header of its first chunk.
    Sctp(SctpChunk),
    /// The TCP, UDP or SCTP header is truncated.
    Short {
        /// Whether the ports in [`Tuple`] are valid, because the packet contains the first four
        /// bytes of the header.
        ports: bool,
        /// Whether the SCTP header is complete, and only the header of the first chunk is
        /// truncated. Addresses and ports can be translated then.
        header: bool,
    },
    /// The transport protocol has no ports.
    Other,
}

/// A transport header and its payload, for helpers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment<'a> {
    /// The packet from its transport header on; empty if no helper needs the bytes.
    pub bytes: &'a [u8],
    /// Whether the checksum need not be verified: a device has verified it, or will complete it.
    pub trusted: bool,
}

impl Segment<'_> {
    /// A segment without bytes, for a packet whose segment no helper needs.
    pub const NONE: Self = Self {
        bytes: &[],
        trusted: false,
    };

    /// Whether the checksum of this segment is correct for these addresses (RFC 9293 section 3.1),
    /// or need not be verified.
    pub(crate) fn is_intact(&self, tuple: &Tuple) -> bool {
        let sum = |bytes: &[u8]| -> u64 {
            let words = bytes.chunks(2);
            words
                .map(|word| u64::from(word[0]) << 8 | u64::from(*word.get(1).unwrap_or(&0)))
                .sum()
        };
        let address = |addr: IpAddr| match addr {
            IpAddr::V4(addr) => sum(&addr.octets()),
            IpAddr::V6(addr) => sum(&addr.octets()),
        };
        let mut all = sum(self.bytes)
            + address(tuple.src.ip())
            + address(tuple.dst.ip())
            + u64::from(tuple.protocol.0)
            + self.bytes.len() as u64;
        while all > 0xffff {
            all = (all & 0xffff) + (all >> 16);
        }
        self.trusted || all == 0xffff
    }
}

/// The properties of a whole IP datagram that IPVS uses. ICMP errors are [`IcmpError`]s instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketMeta<'a> {
    /// The netfilter hook at which the host would receive the packet.
    pub hook: Hook,
    /// Protocol, addresses and ports.
    pub tuple: Tuple,
    /// Content of the transport header.
    pub transport: Transport<'a>,
    /// The bytes of a TCP segment.
    pub segment: Segment<'a>,
    /// Firewall mark; 0 is none.
    pub mark: u32,
    /// Length of the IP datagram in bytes, IP header included.
    pub len: u32,
}

impl<'a> PacketMeta<'a> {
    /// A datagram of `len` bytes without a firewall mark and without the bytes of a TCP segment.
    #[inline]
    pub const fn new(hook: Hook, tuple: Tuple, transport: Transport<'a>, len: u32) -> Self {
        Self {
            hook,
            tuple,
            transport,
            segment: Segment::NONE,
            mark: 0,
            len,
        }
    }

    /// A TCP segment with these [`TcpFlags`] and without options and payload, over IPv4.
    #[inline]
    pub const fn tcp(hook: Hook, src: SocketAddr, dst: SocketAddr, flags: u8) -> Self {
        Self::new(
            hook,
            Tuple::tcp(src, dst),
            Transport::Tcp(TcpFlags(flags)),
            40,
        )
    }
}

/// A complete IPv4 datagram that the userspace fast path may forward: a TCP segment with ACK and
/// without SYN, FIN and RST, or a UDP datagram, with a complete header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plain {
    /// The protocol of the datagram: TCP or UDP.
    pub protocol: Protocol,
    /// Source address and port of the datagram.
    pub src: SocketAddrV4,
    /// Destination address and port of the datagram.
    pub dst: SocketAddrV4,
    /// Whether the packet passes through the host: [`Hook::Transit`].
    pub transit: bool,
    /// Length of the IP datagram in bytes, IP header included.
    pub len: u32,
}

impl Plain {
    /// Returns the packet if the userspace fast path may forward it.
    pub fn of(meta: &PacketMeta<'_>) -> Option<Self> {
        let Tuple { protocol, src, dst } = meta.tuple;
        let (SocketAddr::V4(src), SocketAddr::V4(dst)) = (src, dst) else {
            return None;
        };
        let plain = match meta.transport {
            Transport::Tcp(flags) => protocol == Protocol::TCP && flags.go_on(),
            Transport::Udp(_) => protocol == Protocol::UDP,
            Transport::Sctp(_) | Transport::Short { .. } | Transport::Other => false,
        };
        plain.then_some(Self {
            protocol,
            src,
            dst,
            transit: meta.hook == Hook::Transit,
            len: meta.len,
        })
    }
}

/// An ICMP error (types 3, 4, 11; ICMPv6 types below 128) that contains a packet which this
/// director may have forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpError {
    /// The netfilter hook at which the host would receive the error.
    pub hook: Hook,
    /// Source address of the ICMP packet.
    pub src: IpAddr,
    /// Destination address of the ICMP packet.
    pub dst: IpAddr,
    /// Protocol, addresses and ports of the packet that the error contains, as in its header.
    pub inner: Tuple,
    /// Whether the embedded packet contains its ports.
    pub inner_ports: bool,
    /// Whether the checksum of the ICMP message is correct.
    pub checksum_ok: bool,
    /// Firewall mark; 0 is none.
    pub mark: u32,
    /// Length of the IP datagram that carries the error, in bytes.
    pub len: u32,
}

/// The type of an INIT chunk, which opens an association (RFC 9260 section 3.3.2).
pub(crate) const SCTP_INIT: u8 = 1;
/// The type of an ABORT chunk (RFC 9260 section 3.3.7).
pub(crate) const SCTP_ABORT: u8 = 6;

/// Whether the packet has the SYN flag, or an INIT as its first chunk.
pub(crate) fn opens(meta: &PacketMeta<'_>) -> bool {
    match meta.transport {
        Transport::Tcp(flags) => flags.has(TcpFlags::SYN),
        Transport::Sctp(chunk) => chunk.first == SCTP_INIT,
        _ => false,
    }
}

pub(crate) fn is_ipsec(protocol: Protocol) -> bool {
    matches!(protocol, Protocol::AH | Protocol::ESP)
}

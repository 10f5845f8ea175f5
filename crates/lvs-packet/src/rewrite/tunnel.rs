//! Encapsulation: IP in IP (RFC 2003, RFC 2473), GRE (RFC 2784) and GUE (draft-ietf-intarea-gue),
//! by the rules of `ip_vs_tunnel_xmit`.
//!
//! ```text
//!  IPIP  outer IP │ inner packet
//!  GRE   outer IP │ flags, type (│ checksum, 0) │ inner packet
//!  GUE   outer IP │ UDP │ version, length, protocol, flags │ inner packet
//! ```

use std::net::{IpAddr, Ipv4Addr};

use lvs_core::Protocol;
use lvs_core::tunnel::{Tunnel, TunnelChecksum};

use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::parse::Packet;
use crate::wire::checksum::Sum;
use crate::wire::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, ipv4, ipv6, is_ipv6, put16, udp};

/// The protocol number of IPv4 in IP.
pub const IPV4: u8 = 4;
/// The protocol number of IPv6 in IP.
pub const IPV6: u8 = 41;
/// The protocol number of GRE.
pub const GRE: u8 = 47;
/// The protocol number of UDP, the transport of GUE.
pub const UDP: u8 = 17;

const UDP_LEN: usize = udp::HEADER_LEN;
const GUE_LEN: usize = 4;
const GRE_LEN: usize = gre::PROTOCOL.end;
const GRE_CHECKSUM_LEN: usize = 4;
/// GUE: offset of the field with the protocol of the inner packet.
const GUE_PROTOCOL: usize = UDP_LEN + 1;

/// Fields of a GRE header (RFC 2784 section 2.1).
pub mod gre {
    use crate::wire::Field;

    /// Flags and version of GRE.
    pub const FLAGS: Field = 0..2;
    /// EtherType of the inner packet.
    pub const PROTOCOL: Field = 2..4;
    /// Checksum, if the flags indicate one.
    pub const CHECKSUM: Field = 4..6;
}

/// The flag of a GRE header with a checksum.
const GRE_CHECKSUM: u16 = 0x8000;

/// First and last source port of GUE, as in the default of `net.ipv4.ip_local_port_range`.
const SOURCE_PORTS: (u16, u16) = (32768, 60999);

/// The fields of outer headers that the caller chooses; the others follow from the inner packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outer {
    /// The director's source address on the route to the server.
    pub src: IpAddr,
    /// The address of the server.
    pub dst: IpAddr,
    /// The encapsulation between the two IP headers.
    pub tunnel: Tunnel,
    /// GUE: the source port, which distinguishes flows.
    pub source_port: u16,
    /// IPv4: identification, if `df` is clear.
    pub id: u16,
    /// IPv4: "don't fragment"; a copy of the inner packet's flag if path MTU discovery is on.
    pub df: bool,
}

/// Length in bytes of the longest outer headers: IPv6, UDP, GUE.
const TEMPLATE_LEN: usize = ipv6::HEADER_LEN + UDP_LEN + GUE_LEN;

/// Outer headers for all packets to a server. The caller sets the fields that depend on the packet,
/// for example lengths, class, identification and checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Template {
    bytes: [u8; TEMPLATE_LEN],
    len: usize,
    tunnel: Tunnel,
    v6: bool,
    df: bool,
}

impl Template {
    /// Builds the outer headers for inner packets of IPv6 or of IPv4. With `keeps_df`, "don't
    /// fragment" is copied from the inner packet (`pmtu_disc`). `None` if the outer headers contain
    /// a checksum over the packet, or if the addresses have different IP versions.
    pub fn new(
        src: IpAddr,
        dst: IpAddr,
        tunnel: Tunnel,
        v6_inside: bool,
        keeps_df: bool,
    ) -> Option<Self> {
        if tunnel.checksum() != TunnelChecksum::None {
            return None;
        }
        let mut inner = [0; ipv6::HEADER_LEN];
        inner[0] = if v6_inside { 0x60 } else { 0x45 };
        let mut frame = Frame::from_bytes(&inner);
        let outer = Outer {
            src,
            dst,
            tunnel,
            source_port: 0,
            id: 0,
            df: false,
        };
        encapsulate(&mut frame, &outer).ok()?;
        let len = overhead(tunnel, dst);
        let mut bytes = [0; TEMPLATE_LEN];
        bytes[..len].copy_from_slice(&frame.bytes()[..len]);
        Some(Self {
            bytes,
            len,
            tunnel,
            v6: dst.is_ipv6(),
            df: keeps_df && !dst.is_ipv6() && !v6_inside,
        })
    }

    /// The bytes of the outer headers.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// The encapsulation between the two IP headers.
    pub const fn tunnel(&self) -> Tunnel {
        self.tunnel
    }

    /// Whether the outer IP header is an IPv6 header.
    pub const fn is_v6(&self) -> bool {
        self.v6
    }

    /// Whether the outer header has "don't fragment" if the inner header has it.
    pub const fn keeps_df(&self) -> bool {
        self.df
    }
}

/// Whether a packet of this protocol may be a tunnel packet of the director.
pub const fn is_outer(protocol: Protocol) -> bool {
    matches!(protocol.0, IPV4 | IPV6 | GRE | UDP)
}

/// Bytes that the encapsulation adds, with an outer header of the version of `server`.
pub fn overhead(tunnel: Tunnel, server: IpAddr) -> usize {
    tunnel.header_len()
        + match server {
            IpAddr::V4(_) => ipv4::HEADER_LEN,
            IpAddr::V6(_) => ipv6::HEADER_LEN,
        }
}

/// Returns the length of the longest packet that fits into a tunnel. `route` is the MTU of the
/// route to `server`, and `learned` the path MTU that ICMP errors have reported. `None` if the
/// tunnel would leave less than the minimum MTU of the outer IP version (68 bytes for IPv4, 1280
/// for IPv6).
///
/// A reported MTU that would leave less is ignored, so that a router cannot make a tunnel unusable.
pub fn inner_mtu(tunnel: Tunnel, server: IpAddr, route: usize, learned: usize) -> Option<usize> {
    let least = if server.is_ipv6() { ipv6::MTU_MIN } else { 68 };
    let overhead = overhead(tunnel, server);
    let path = if learned < least + overhead {
        route
    } else {
        learned
    };
    let mtu = path.saturating_sub(overhead);
    (mtu >= least).then_some(mtu)
}

/// The source port of GUE for the connection of a packet (`udp_flow_src_port`): the same port for
/// all packets of the connection.
pub fn source_port(packet: &Packet) -> u16 {
    let (sport, dport) = packet.ports.unwrap_or_default();
    let mut hash = u32::from(packet.protocol.0) ^ (u32::from(sport) << 16 | u32::from(dport));
    let mut mix = |word: u32| {
        hash = (hash ^ word).wrapping_mul(0x9e37_79b1);
        hash ^= hash >> 15;
    };
    for addr in [packet.src, packet.dst] {
        match addr {
            IpAddr::V4(addr) => mix(addr.to_bits()),
            IpAddr::V6(addr) => {
                for pair in addr.segments().chunks(2) {
                    mix(u32::from(pair[0]) << 16 | u32::from(pair[1]));
                }
            }
        }
    }
    let (min, max) = (u64::from(SOURCE_PORTS.0), u64::from(SOURCE_PORTS.1));
    let scaled = ((u64::from(hash) * (max - min)) >> 32) + min;
    u16::try_from(scaled).unwrap_or(SOURCE_PORTS.0)
}

/// Encapsulates the IP packet in `frame`. The caller must have decremented its TTL and completed
/// its checksums.
///
/// # Errors
/// [`FrameDrop::Truncated`] if the packet is shorter than an IPv4 header; [`FrameDrop::NoRoom`] if
/// there is no headroom, or the packet would exceed 64 KiB; [`FrameDrop::Unsupported`] if the outer
/// addresses are of different IP versions.
pub fn encapsulate(frame: &mut Frame, outer: &Outer) -> Result<(), FrameDrop> {
    let inner = frame.bytes();
    if inner.len() < ipv4::HEADER_LEN {
        return Err(FrameDrop::Truncated);
    }
    let six = is_ipv6(inner);
    let (class, ttl) = if six {
        (ipv6::traffic_class(inner), inner[ipv6::field::HOP_LIMIT])
    } else {
        (inner[ipv4::field::TOS], inner[ipv4::field::TTL])
    };
    // ECN is copied, but CE becomes ECT(0) (RFC 3168 section 9.1.1, as in INET_ECN_encapsulate).
    let class = if class & 3 == 3 {
        class & 0xfc | 2
    } else {
        class
    };
    let inner_protocol = if six { IPV6 } else { IPV4 };
    let protocol = match outer.tunnel {
        Tunnel::Ipip => inner_protocol,
        Tunnel::Gre { checksum } => {
            let ethertype = if six { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 };
            push_gre(frame, ethertype, checksum == TunnelChecksum::Full)?;
            GRE
        }
        Tunnel::Gue { port, checksum } => {
            let with = checksum != TunnelChecksum::None;
            push_gue(frame, inner_protocol, outer, port, with)?;
            UDP
        }
    };
    match (outer.src, outer.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let header = OuterIpv4 {
                class,
                ttl,
                protocol,
                src,
                dst,
            };
            header.push(frame, (!outer.df).then_some(outer.id))
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let len = u16::try_from(frame.len()).map_err(|_| FrameDrop::NoRoom)?;
            let header = frame
                .push_front(ipv6::HEADER_LEN)
                .ok_or(FrameDrop::NoRoom)?;
            ipv6::write_header(header, protocol, ttl, src, dst, len);
            ipv6::set_traffic_class(header, class);
            Ok(())
        }
        _ => Err(FrameDrop::Unsupported),
    }
}

struct OuterIpv4 {
    class: u8,
    ttl: u8,
    protocol: u8,
    src: Ipv4Addr,
    dst: Ipv4Addr,
}

impl OuterIpv4 {
    /// Inserts the header in front of the packet, with this identification; `None` for "don't
    /// fragment".
    fn push(&self, frame: &mut Frame, id: Option<u16>) -> Result<(), FrameDrop> {
        use ipv4::field;
        let len = u16::try_from(frame.len() + ipv4::HEADER_LEN);
        let len = len.map_err(|_| FrameDrop::NoRoom)?;
        let header = frame
            .push_front(ipv4::HEADER_LEN)
            .ok_or(FrameDrop::NoRoom)?;
        header.fill(0);
        header[field::VERSION] = 0x45;
        header[field::TOS] = self.class;
        put16(header, field::TOTAL_LEN, len);
        put16(header, field::ID, id.unwrap_or(0));
        put16(
            header,
            field::FLAGS,
            if id.is_none() { ipv4::DF } else { 0 },
        );
        header[field::TTL] = self.ttl;
        header[field::PROTOCOL] = self.protocol;
        header[field::SOURCE].copy_from_slice(&self.src.octets());
        header[field::DESTINATION].copy_from_slice(&self.dst.octets());
        ipv4::finish_header(header);
        Ok(())
    }
}

fn push_gre(frame: &mut Frame, ethertype: u16, checksum: bool) -> Result<(), FrameDrop> {
    let len = GRE_LEN + if checksum { GRE_CHECKSUM_LEN } else { 0 };
    let header = frame.push_front(len).ok_or(FrameDrop::NoRoom)?;
    header.fill(0);
    put16(header, gre::FLAGS, if checksum { GRE_CHECKSUM } else { 0 });
    put16(header, gre::PROTOCOL, ethertype);
    if checksum {
        let sum = Sum::ZERO.bytes(frame.bytes()).finish();
        put16(frame.bytes_mut(), gre::CHECKSUM, sum);
    }
    Ok(())
}

fn push_gue(
    frame: &mut Frame,
    inner_protocol: u8,
    outer: &Outer,
    port: u16,
    checksum: bool,
) -> Result<(), FrameDrop> {
    let len = u16::try_from(frame.len() + UDP_LEN + GUE_LEN).map_err(|_| FrameDrop::NoRoom)?;
    let header = frame
        .push_front(UDP_LEN + GUE_LEN)
        .ok_or(FrameDrop::NoRoom)?;
    header.fill(0);
    put16(header, udp::field::SOURCE, outer.source_port);
    put16(header, udp::field::DESTINATION, port);
    put16(header, udp::field::LENGTH, len);
    // Version 0, no control message, no options; the inner checksums are complete, so the receiver
    // does not compute any.
    header[GUE_PROTOCOL] = inner_protocol;
    if checksum {
        let sum = Sum::ZERO
            .pseudo(outer.src, outer.dst, UDP, usize::from(len))
            .bytes(frame.bytes())
            .finish();
        let ip = frame.bytes_mut();
        put16(
            ip,
            udp::field::CHECKSUM,
            if sum == 0 { 0xffff } else { sum },
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;
    use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    fn tunnels() -> impl Strategy<Value = Tunnel> {
        prop::sample::select(vec![
            Tunnel::Ipip,
            Tunnel::Gre {
                checksum: TunnelChecksum::None,
            },
            Tunnel::Gre {
                checksum: TunnelChecksum::Full,
            },
            Tunnel::Gue {
                port: 6080,
                checksum: TunnelChecksum::None,
            },
            Tunnel::Gue {
                port: 6080,
                checksum: TunnelChecksum::Full,
            },
            Tunnel::Gue {
                port: 6080,
                checksum: TunnelChecksum::Remote,
            },
        ])
    }

    proptest! {
        #[test]
        fn outer_tunnel_headers_agree_with_etherparse(tunnel in tunnels(), six: bool, over6: bool, class: u8, ttl in 1u8.., df: bool, len in 0usize..3000) {
            let mut ip = Vec::new();
            let builder = if six {
                PacketBuilder::ipv6([1; 16], [2; 16], ttl)
            } else {
                PacketBuilder::ipv4([1; 4], [2; 4], ttl)
            };
            builder.udp(1, 2).write(&mut ip, &vec![9; len]).expect("writing to a vector succeeds");
            if six {
                put16(&mut ip, 0, 0x6000 | u16::from(class) << 4);
            } else {
                ip[1] = class;
                ipv4::finish_header(&mut ip);
            }
            let (src, dst): (IpAddr, IpAddr) = if over6 {
                ([3; 16].into(), [4; 16].into())
            } else {
                ([3; 4].into(), [4; 4].into())
            };
            let packet = parse::ip(&ip, false).expect("the packet is valid");
            let outer = Outer { src, dst, tunnel, source_port: source_port(&packet), id: 7, df };
            let mut frame = Frame::from_bytes(&ip);
            encapsulate(&mut frame, &outer).expect("the space suffices");
            let bytes = frame.bytes();
            prop_assert_eq!(bytes.len(), ip.len() + overhead(tunnel, dst));
            let headers = bytes.len() - ip.len();
            prop_assert_eq!(&bytes[headers..], &ip[..]);

            let want_class = if class & 3 == 3 { class & !1 } else { class };
            let sliced = SlicedPacket::from_ip(bytes).expect("the bytes are a valid packet");
            let protocol = match sliced.net.as_ref().expect("the packet has an IP header") {
                NetSlice::Ipv4(net) => {
                    let header = net.header().to_header();
                    prop_assert_eq!(header.calc_header_checksum(), header.header_checksum);
                    prop_assert_eq!((header.dont_fragment, header.identification), (df, if df { 0 } else { 7 }));
                    prop_assert_eq!(header.time_to_live, ttl);
                    prop_assert_eq!(header.dscp.value() << 2 | header.ecn.value(), want_class);
                    header.protocol.0
                }
                NetSlice::Ipv6(net) => {
                    let header = net.header().to_header();
                    prop_assert_eq!((header.hop_limit, header.traffic_class, header.flow_label.value()), (ttl, want_class, 0));
                    header.next_header.0
                }
                NetSlice::Arp(_) => panic!("ARP"),
            };
            let outer_ip = if over6 { 40 } else { 20 };
            let inner = if six { IPV6 } else { IPV4 };
            match tunnel {
                Tunnel::Ipip => prop_assert_eq!(protocol, inner),
                Tunnel::Gre { checksum } => {
                    prop_assert_eq!(protocol, GRE);
                    if checksum == TunnelChecksum::Full {
                        prop_assert_eq!(pnet_packet::util::checksum(&bytes[outer_ip..], usize::MAX / 2), 0);
                    }
                }
                Tunnel::Gue { checksum, .. } => {
                    let Some(TransportSlice::Udp(udp)) = sliced.transport else { panic!("the packet is not UDP") };
                    prop_assert_eq!(udp.destination_port(), 6080);
                    prop_assert!((32768..=60999).contains(&udp.source_port()));
                    prop_assert_eq!(&udp.payload()[..4], &[0, inner, 0, 0][..]);
                    if checksum == TunnelChecksum::None {
                        prop_assert_eq!(udp.checksum(), 0);
                    } else {
                        prop_assert!(udp.checksum() != 0 && crate::wire::tcp::checksum_ok(bytes, outer_ip, UDP));
                    }
                }
            }
        }
    }
}

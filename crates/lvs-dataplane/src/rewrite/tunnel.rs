//! IP in IP (RFC 2003), generic UDP encapsulation (draft-ietf-intarea-gue, variant 0) and GRE (RFC 2784) by the rules of
//! `ip_vs_tunnel_xmit`.

use std::net::{IpAddr, Ipv4Addr};

use lvs_core::{Protocol, Tunnel, TunnelChecksum};

use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::parse::Packet;
use crate::wire::checksum::Sum;
use crate::wire::{ipv4, put16};

/// The protocol number of IPv4 in IP, and of an IPv4 packet in GUE.
pub const IPIP: Protocol = Protocol(4);
/// The protocol number of GRE.
pub const GRE: Protocol = Protocol(47);
/// The EtherType by which GRE names an IPv4 packet.
pub const GRE_IPV4: u16 = 0x0800;
/// The bit of GRE's first word that announces a checksum.
pub const GRE_CHECKSUM: u16 = 0x8000;

const UDP_LEN: usize = 8;
const GUE_LEN: usize = 4;
/// Source ports of GUE (`net.ipv4.ip_local_port_range`).
const PORTS: (u16, u16) = (32_768, 60_999);

/// The fields of an outer header that do not follow from the inner packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outer {
    /// The encapsulation.
    pub tunnel: Tunnel,
    /// The director's address on the way to the server.
    pub src: Ipv4Addr,
    /// The server.
    pub dst: Ipv4Addr,
    /// Identification, where `df` is clear.
    pub id: u16,
    /// "Don't fragment": the inner one, if path MTU discovery is on.
    pub df: bool,
}

/// The IP protocol of the outer packet.
pub const fn protocol(tunnel: Tunnel) -> Protocol {
    match tunnel {
        Tunnel::Ipip => IPIP,
        Tunnel::Gue { .. } => Protocol::UDP,
        Tunnel::Gre { .. } => GRE,
    }
}

/// Bytes between the outer IP header and the inner packet. Remote checksum offload is for packets whose checksum is not
/// computed yet; here all are, and it does what a full checksum does.
pub const fn header_len(tunnel: Tunnel) -> usize {
    match tunnel {
        Tunnel::Ipip => 0,
        Tunnel::Gue { .. } => UDP_LEN + GUE_LEN,
        Tunnel::Gre {
            checksum: TunnelChecksum::None,
        } => 4,
        Tunnel::Gre { .. } => 8,
    }
}

/// Bytes that the encapsulation adds.
pub const fn overhead(tunnel: Tunnel) -> usize {
    ipv4::HEADER_LEN + header_len(tunnel)
}

/// A source port for a flow, the same for all its packets: what is random in it lets routers spread flows
/// (`udp_flow_src_port`).
fn flow_port(inner: &Packet) -> u16 {
    let (sport, dport) = inner.ports.unwrap_or_default();
    let ports = u32::from(sport) << 16 | u32::from(dport);
    let mixed = [
        inner.src.to_bits(),
        inner.dst.to_bits(),
        ports,
        u32::from(inner.protocol.0),
    ]
    .into_iter()
    .fold(0x9e37_79b9_u32, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(0x85eb_ca6b);
        hash ^ (hash >> 15)
    });
    let range = u64::from(PORTS.1 - PORTS.0);
    let offset = (u64::from(mixed ^ mixed << 16) * range) >> 32;
    PORTS.0 + u16::try_from(offset).unwrap_or(0)
}

/// Encapsulates the IPv4 packet in `frame`, which `inner` describes; its TTL has been decremented, its checksums are
/// finished.
///
/// # Errors
/// [`FrameDrop::NoRoom`] without headroom or beyond 64 KiB.
pub fn encapsulate(frame: &mut Frame, inner: &Packet, outer: &Outer) -> Result<(), FrameDrop> {
    let total = frame.len() + overhead(outer.tunnel);
    let len = u16::try_from(total).map_err(|_| FrameDrop::NoRoom)?;
    let (tos, ttl) = match frame.bytes() {
        [_, tos, _, _, _, _, _, _, ttl, ..] => (*tos, *ttl),
        _ => return Err(FrameDrop::Truncated),
    };
    let between = header_len(outer.tunnel);
    if between > 0 {
        let header = frame.push_front(between).ok_or(FrameDrop::NoRoom)?;
        header.fill(0);
        match outer.tunnel {
            Tunnel::Ipip => {}
            Tunnel::Gue { port, .. } => {
                put16(header, 0, flow_port(inner));
                put16(header, 2, port);
                let ip_header = u16::try_from(ipv4::HEADER_LEN).unwrap_or(0);
                put16(header, 4, len - ip_header);
                // Version 0, data, no options; then what is inside.
                header[UDP_LEN + 1] = IPIP.0;
            }
            Tunnel::Gre { checksum } => {
                if checksum != TunnelChecksum::None {
                    put16(header, 0, GRE_CHECKSUM);
                }
                put16(header, 2, GRE_IPV4);
            }
        }
        finish(frame.bytes_mut(), outer);
    }
    let header = frame
        .push_front(ipv4::HEADER_LEN)
        .ok_or(FrameDrop::NoRoom)?;
    header.fill(0);
    header[0] = 0x45;
    // ECN is copied, but CE leaves as ECT(0) (RFC 3168 section 9.1.1, as INET_ECN_encapsulate does).
    header[1] = if tos & 3 == 3 { tos & 0xfc | 2 } else { tos };
    put16(header, 2, len);
    put16(header, 4, if outer.df { 0 } else { outer.id });
    put16(header, 6, if outer.df { ipv4::DF } else { 0 });
    header[8] = ttl;
    header[9] = protocol(outer.tunnel).0;
    header[12..16].copy_from_slice(&outer.src.octets());
    header[16..20].copy_from_slice(&outer.dst.octets());
    ipv4::finish_header(header);
    Ok(())
}

/// Computes the checksum of a tunnel header and what is behind it, where the tunnel has one.
fn finish(payload: &mut [u8], outer: &Outer) {
    match outer.tunnel {
        Tunnel::Gue {
            checksum: TunnelChecksum::Full | TunnelChecksum::Remote,
            ..
        } => {
            let (src, dst) = (IpAddr::V4(outer.src), IpAddr::V4(outer.dst));
            let sum = Sum::ZERO
                .pseudo(src, dst, Protocol::UDP.0, payload.len())
                .bytes(payload)
                .finish();
            put16(payload, 6, if sum == 0 { 0xffff } else { sum });
        }
        Tunnel::Gre {
            checksum: TunnelChecksum::Full | TunnelChecksum::Remote,
        } => {
            let sum = Sum::ZERO.bytes(payload).finish();
            put16(payload, 4, sum);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;
    use etherparse::{Ipv4Slice, PacketBuilder, UdpSlice};
    use proptest::prelude::*;

    fn kinds() -> impl Strategy<Value = Tunnel> {
        let checksum = prop_oneof![
            Just(TunnelChecksum::None),
            Just(TunnelChecksum::Full),
            Just(TunnelChecksum::Remote)
        ];
        let gue = (any::<u16>(), checksum.clone());
        prop_oneof![
            Just(Tunnel::Ipip),
            gue.prop_map(|(port, checksum)| Tunnel::Gue { port, checksum }),
            checksum.prop_map(|checksum| Tunnel::Gre { checksum }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_inside_comes_out_as_it_was(kind in kinds(), src: [u8; 4], dst: [u8; 4], sport: u16, tos: u8, ttl in 1u8..,
                                              df: bool, payload in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut inner = Vec::new();
            let builder = PacketBuilder::ipv4(src, dst, ttl).udp(sport, 53);
            builder.write(&mut inner, &payload).expect("a vector takes all");
            inner[1] = tos;
            ipv4::finish_header(&mut inner);
            let mut frame = Frame::from_bytes(&inner);
            let packet = parse::ipv4(frame.bytes(), false).expect("valid");
            let outer = Outer {
                tunnel: kind,
                src: Ipv4Addr::new(10, 1, 255, 254),
                dst: Ipv4Addr::new(10, 1, 0, 11),
                id: 7,
                df,
            };
            encapsulate(&mut frame, &packet, &outer).expect("there is room");
            prop_assert_eq!(frame.len(), inner.len() + overhead(kind));
            let ip = Ipv4Slice::from_slice(frame.bytes()).expect("a packet");
            let header = ip.header().to_header();
            prop_assert_eq!(header.calc_header_checksum(), header.header_checksum);
            prop_assert_eq!(header.protocol.0, protocol(kind).0);
            prop_assert_eq!((header.dont_fragment, header.time_to_live), (df, ttl));
            prop_assert_eq!(header.identification, if df { 0 } else { 7 });
            let body = ip.payload().payload;
            let inside = match kind {
                Tunnel::Ipip => body,
                Tunnel::Gue { port, checksum } => {
                    let udp = UdpSlice::from_slice(body).expect("a datagram");
                    prop_assert_eq!(udp.destination_port(), port);
                    prop_assert!((32_768..=60_999).contains(&udp.source_port()));
                    if checksum == TunnelChecksum::None {
                        prop_assert_eq!(udp.checksum(), 0);
                    } else {
                        let right = udp.to_header().calc_checksum_ipv4_raw(header.source, header.destination, udp.payload());
                        prop_assert_eq!(right.expect("short"), udp.checksum());
                    }
                    prop_assert_eq!(&udp.payload()[..4], &[0, 4, 0, 0]);
                    &udp.payload()[4..]
                }
                Tunnel::Gre { checksum: TunnelChecksum::None } => {
                    prop_assert_eq!(&body[..4], &[0, 0, 8, 0]);
                    &body[4..]
                }
                Tunnel::Gre { .. } => {
                    prop_assert_eq!(&body[..4], &[0x80, 0, 8, 0]);
                    prop_assert_eq!(Sum::ZERO.bytes(body).finish(), 0);
                    &body[8..]
                }
            };
            prop_assert_eq!(inside, &inner[..]);
        }
    }
}

//! Network address translation of IPv4 packets and of the packets inside ICMP errors (`ip_vs_nat_xmit`,
//! `handle_response`, `ip_vs_nat_icmp`).

use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};

use lvs_core::Protocol;

use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::parse::Packet;
use crate::wire::checksum::{self, Delta, Sum};
use crate::wire::{be16, ipv4, put16};

/// Which end of a packet is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Source: replies.
    Source,
    /// Destination: requests.
    Destination,
}

/// Translates one end of the IPv4 packet in `frame`, which `packet` describes, to `to`. Changes nothing if it fails.
///
/// # Errors
/// [`FrameDrop::ShortHeader`] if the transport header is cut short.
#[inline]
pub fn translate(
    frame: &mut Frame,
    packet: &Packet,
    end: End,
    to: SocketAddrV4,
) -> Result<(), FrameDrop> {
    let l4 = packet.l4;
    let (header, field) = match packet.protocol {
        Protocol::TCP => (20, 16),
        Protocol::UDP => (8, 6),
        Protocol::SCTP => (12, 8),
        // AH, ESP and the like: the IP header is all there is to change.
        _ => (0, 0),
    };
    // The device sums from the transport header on: then the field holds the sum of the pseudo-header alone.
    let unfinished = frame.offload.checksum.is_some_and(|partial| {
        usize::from(partial.start) == l4 && usize::from(partial.offset) == field
    });
    let ip = frame.bytes_mut();
    if ip.len() < l4 + header {
        return Err(FrameDrop::ShortHeader);
    }
    let old = match end {
        End::Source => ipv4::src(ip),
        End::Destination => ipv4::dst(ip),
    };
    let new = *to.ip();
    match end {
        End::Source => ipv4::set_src(ip, new),
        End::Destination => ipv4::set_dst(ip, new),
    }
    if header == 0 {
        return Ok(());
    }
    let port_at = l4 + if end == End::Source { 0 } else { 2 };
    let old_port = be16(ip, port_at);
    put16(ip, port_at, to.port());
    let addresses = Delta::NONE.addr(old, new);
    let all = addresses.word(old_port, to.port());
    let at = l4 + field;
    let stored = be16(ip, at);
    match packet.protocol {
        Protocol::SCTP => {
            if old_port != to.port() && !unfinished {
                let sum = checksum::sctp(&ip[l4..]);
                ip[at..at + 4].copy_from_slice(&sum);
            }
        }
        _ if unfinished => put16(ip, at, addresses.apply_unfinished(stored)),
        // An absent checksum is computed, as the kernel does; and 0 would mean absent (RFC 768).
        Protocol::UDP if stored == 0 => finish_udp(ip, l4),
        Protocol::UDP => put16(ip, at, nonzero(all.apply(stored))),
        _ => put16(ip, at, all.apply(stored)),
    }
    Ok(())
}

const fn nonzero(sum: u16) -> u16 {
    if sum == 0 { 0xffff } else { sum }
}

/// Computes the checksum of a whole UDP datagram.
fn finish_udp(ip: &mut [u8], l4: usize) {
    put16(ip, l4 + 6, 0);
    let datagram = &ip[l4..];
    let sum = Sum::ZERO
        .pseudo(
            IpAddr::V4(ipv4::src(ip)),
            IpAddr::V4(ipv4::dst(ip)),
            Protocol::UDP.0,
            datagram.len(),
        )
        .bytes(datagram)
        .finish();
    put16(ip, l4 + 6, nonzero(sum));
}

/// Translates an ICMP error: `outer` end of the message itself to the address of `to`, and the other end of the packet
/// inside to `to`, so that its sender recognises it. The checksum inside the inner transport header is left as it is.
///
/// # Errors
/// [`FrameDrop::ShortHeader`] if the inner header is cut short (which the parser has ruled out).
pub fn translate_icmp(
    ip: &mut [u8],
    l4: usize,
    outer: End,
    to: SocketAddrV4,
    ports: bool,
) -> Result<(), FrameDrop> {
    let addr: Ipv4Addr = *to.ip();
    let at = l4 + 8;
    let inner = ip.get_mut(at..).ok_or(FrameDrop::ShortHeader)?;
    let header = ipv4::header_len(inner);
    if header < ipv4::HEADER_LEN || inner.len() < header {
        return Err(FrameDrop::ShortHeader);
    }
    let has_ports = matches!(
        Protocol(inner[9]),
        Protocol::TCP | Protocol::UDP | Protocol::SCTP
    );
    // The message comes from (or goes to) one end; the packet inside went the other way.
    let port_at = match outer {
        End::Source => {
            inner[16..20].copy_from_slice(&addr.octets());
            header + 2
        }
        End::Destination => {
            inner[12..16].copy_from_slice(&addr.octets());
            header
        }
    };
    if ports && has_ports {
        put16(inner, port_at, to.port());
    }
    ipv4::finish_header(inner);
    match outer {
        End::Source => ipv4::set_src(ip, addr),
        End::Destination => ipv4::set_dst(ip, addr),
    }
    put16(ip, l4 + 2, 0);
    let sum = Sum::ZERO.bytes(&ip[l4..]).finish();
    put16(ip, l4 + 2, sum);
    Ok(())
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use crate::frame::PartialChecksum;
    use crate::parse;
    use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    fn check(ip: &[u8]) {
        let sliced = SlicedPacket::from_ip(ip).expect("it is a packet");
        let Some(etherparse::NetSlice::Ipv4(net)) = &sliced.net else {
            panic!("not IPv4")
        };
        let header = net.header().to_header();
        assert_eq!(header.calc_header_checksum(), header.header_checksum);
        match sliced.transport.expect("a transport header") {
            TransportSlice::Tcp(tcp) => {
                let sum = tcp.to_header().calc_checksum_ipv4_raw(
                    header.source,
                    header.destination,
                    tcp.payload(),
                );
                assert_eq!(sum.expect("short"), tcp.checksum());
            }
            TransportSlice::Udp(udp) => {
                let sum = udp.to_header().calc_checksum_ipv4_raw(
                    header.source,
                    header.destination,
                    udp.payload(),
                );
                assert_eq!(sum.expect("short"), udp.checksum());
            }
            other => panic!("unexpected {other:?}"),
        }
    }

    proptest! {
        #[test]
        fn checksums_stay_right(src: [u8; 4], dst: [u8; 4], sport: u16, dport: u16, to: [u8; 4], port: u16, source: bool, udp: bool,
                                absent: bool, partial: bool, payload in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut ip = Vec::new();
            let builder = PacketBuilder::ipv4(src, dst, 64);
            if udp {
                builder.udp(sport, dport).write(&mut ip, &payload).expect("a vector takes all");
            } else {
                builder.tcp(sport, dport, 7, 9).ack(3).write(&mut ip, &payload).expect("a vector takes all");
            }
            let field = if udp { 26 } else { 36 };
            let partial = partial && !(udp && absent);
            if partial {
                let sum = Sum::ZERO.pseudo(src.into(), dst.into(), ip[9], ip.len() - 20).fold();
                put16(&mut ip, field, sum);
            } else if udp && absent {
                put16(&mut ip, field, 0);
            }
            let mut frame = Frame::from_bytes(&ip);
            if partial {
                frame.offload.checksum = Some(PartialChecksum { start: 20, offset: field as u16 - 20 });
            }
            let packet = parse::ipv4(frame.bytes(), false).expect("valid");
            let end = if source { End::Source } else { End::Destination };
            translate(&mut frame, &packet, end, SocketAddrV4::new(to.into(), port)).expect("long enough");
            crate::segment::finish_checksum(&mut frame).expect("in bounds");
            check(frame.bytes());
            let after = parse::ipv4(frame.bytes(), false).expect("valid");
            if source {
                prop_assert_eq!((after.src, after.ports), (to.into(), Some((port, dport))));
            } else {
                prop_assert_eq!((after.dst, after.ports), (to.into(), Some((sport, port))));
            }
        }
    }
}

//! Network address translation of packets and of the packets inside ICMP errors (`ip_vs_nat_xmit`,
//! `handle_response`, `ip_vs_nat_icmp`).

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};

use lvs_core::Protocol;

use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::parse::Packet;
use crate::segment::{self, Cut};
use crate::wire::checksum::{self, Delta, Sum};
use crate::wire::{be16, icmp, icmpv6, ip_dst, ip_src, ipv4, ipv6, is_ipv6, put16, sctp, tcp, udp};

/// The side of a packet whose address and port are translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Translate the source, as in replies.
    Source,
    /// Translate the destination, as in requests.
    Destination,
}

/// Returns the length in bytes of the transport header that translation changes, and the offset of
/// its checksum; `None` for a protocol whose packets have no such header.
#[inline]
pub const fn header(protocol: Protocol) -> Option<(usize, usize)> {
    match protocol {
        Protocol::TCP => Some((tcp::HEADER_LEN, tcp::field::CHECKSUM.start)),
        Protocol::UDP => Some((udp::HEADER_LEN, udp::field::CHECKSUM.start)),
        Protocol::SCTP => Some((sctp::HEADER_LEN, sctp::field::CHECKSUM.start)),
        _ => None,
    }
}

/// Translates the source or destination of the packet in `frame`, whose header fields are `packet`,
/// to `to`. If it fails, nothing has changed.
///
/// # Errors
/// [`FrameDrop::ShortHeader`] if the transport header is truncated, [`FrameDrop::Unsupported`] if
/// `to` has another IP version, [`FrameDrop::BadOffload`] if a partial checksum is outside of
/// the frame.
#[inline]
pub fn translate(
    frame: &mut Frame,
    packet: &Packet,
    end: End,
    to: SocketAddr,
) -> Result<(), FrameDrop> {
    let l4 = packet.l4;
    // For AH, ESP and similar protocols, only the IP header changes.
    let (header, field) = header(packet.protocol).unwrap_or_default();
    // The field contains only the sum of the pseudo-header, because a device will complete the
    // checksum from the transport header on.
    let unfinished = frame.offload.checksum.is_some_and(|partial| {
        usize::from(partial.start) == l4 && usize::from(partial.offset) == field
    });
    if frame.len() < l4 + header {
        return Err(FrameDrop::ShortHeader);
    }
    if packet.src.is_ipv4() != to.is_ipv4() {
        return Err(FrameDrop::Unsupported);
    }
    if !unfinished && !Cut::is_for_software(frame, packet) {
        // The partial checksum belongs to an inner packet, as in VXLAN: the checksum of the outer
        // packet must cover its final value. Segments of a super-packet get their checksums during
        // segmentation.
        segment::finish_checksum(frame)?;
    }
    let ip = frame.bytes_mut();
    let addresses = match (packet.src, to.ip()) {
        (IpAddr::V4(_), IpAddr::V4(new)) => address(ip, end, new),
        (IpAddr::V6(_), IpAddr::V6(new)) => {
            let old = match end {
                End::Source => ipv6::src(ip),
                End::Destination => ipv6::dst(ip),
            };
            match end {
                End::Source => ipv6::set_src(ip, new),
                End::Destination => ipv6::set_dst(ip, new),
            }
            Delta::NONE.addr6(old, new)
        }
        _ => return Err(FrameDrop::Unsupported),
    };
    if header > 0 {
        let change = Change {
            end,
            port: to.port(),
            addresses,
            unfinished,
        };
        change.apply(ip, l4, packet.protocol, field);
    }
    Ok(())
}

/// As [`translate`], for an IPv4 packet `ip` without options and with a complete TCP or UDP header.
/// `unfinished` means that the transport checksum covers only the pseudo-header so far.
///
/// # Errors
/// [`FrameDrop::ShortHeader`] if the transport header is incomplete.
#[inline]
pub fn translate_plain(
    ip: &mut [u8],
    protocol: Protocol,
    end: End,
    to: SocketAddrV4,
    unfinished: bool,
) -> Result<(), FrameDrop> {
    let (header, field) = header(protocol).unwrap_or_default();
    if header == 0 || ip.len() < ipv4::HEADER_LEN + header {
        return Err(FrameDrop::ShortHeader);
    }
    let change = Change {
        end,
        port: to.port(),
        addresses: address(ip, end, *to.ip()),
        unfinished,
    };
    change.apply(ip, ipv4::HEADER_LEN, protocol, field);
    Ok(())
}

#[inline]
fn address(ip: &mut [u8], end: End, new: Ipv4Addr) -> Delta {
    let old = match end {
        End::Source => ipv4::src(ip),
        End::Destination => ipv4::dst(ip),
    };
    match end {
        End::Source => ipv4::set_src(ip, new),
        End::Destination => ipv4::set_dst(ip, new),
    }
    Delta::NONE.addr(old, new)
}

/// The changes that a translation makes behind the IP header.
struct Change {
    end: End,
    port: u16,
    addresses: Delta,
    unfinished: bool,
}

impl Change {
    /// Writes the port into the header at `l4`, and updates the checksum at offset `field` of this
    /// header.
    #[inline]
    fn apply(&self, ip: &mut [u8], l4: usize, protocol: Protocol, field: usize) {
        let port_at = l4 + port(self.end);
        let old_port = be16(ip, port_at);
        put16(ip, port_at, self.port);
        let all = self.addresses.word(old_port, self.port);
        let at = l4 + field;
        let stored = be16(ip, at);
        match protocol {
            Protocol::SCTP => {
                if old_port != self.port && !self.unfinished {
                    let sum = checksum::sctp(&ip[l4..]);
                    ip[at..at + 4].copy_from_slice(&sum);
                }
            }
            _ if self.unfinished => put16(ip, at, self.addresses.apply_unfinished(stored)),
            // A missing UDP checksum is computed, as in the kernel; a stored 0 would mean "missing"
            // (RFC 768).
            Protocol::UDP if stored == 0 => finish_udp(ip, l4),
            Protocol::UDP => put16(ip, at, nonzero(all.apply(stored))),
            _ => put16(ip, at, all.apply(stored)),
        }
    }
}

/// Offset of the port in a transport header: the same for TCP, UDP and SCTP.
const fn port(end: End) -> usize {
    match end {
        End::Source => udp::field::SOURCE.start,
        End::Destination => udp::field::DESTINATION.start,
    }
}

const fn nonzero(sum: u16) -> u16 {
    if sum == 0 { 0xffff } else { sum }
}

/// Computes the checksum of a complete UDP datagram.
fn finish_udp(ip: &mut [u8], l4: usize) {
    put16(ip, l4 + udp::field::CHECKSUM.start, 0);
    let datagram = &ip[l4..];
    let sum = Sum::ZERO
        .pseudo(ip_src(ip), ip_dst(ip), Protocol::UDP.0, datagram.len())
        .bytes(datagram)
        .finish();
    put16(ip, l4 + udp::field::CHECKSUM.start, nonzero(sum));
}

/// Translates an ICMP error, and the packet that it quotes. The address `outer` of the error
/// becomes the address of `to`. In the quoted packet, the opposite address and port become `to`, so
/// that the sender of this packet recognises it. `ports` means that the quoted packet contains its
/// ports; otherwise only addresses are translated. The checksum in the quoted transport header
/// stays unchanged.
///
/// # Errors
/// [`FrameDrop::ShortHeader`] if the quoted header is truncated (the parser excludes this),
/// [`FrameDrop::Unsupported`] if `to` has another IP version.
pub fn translate_icmp(
    ip: &mut [u8],
    l4: usize,
    outer: End,
    to: SocketAddr,
    ports: bool,
) -> Result<(), FrameDrop> {
    match to.ip() {
        IpAddr::V4(addr) if !is_ipv6(ip) => {
            let inner = ip
                .get_mut(l4 + icmp::HEADER_LEN..)
                .ok_or(FrameDrop::ShortHeader)?;
            let header = ipv4::header_len(inner);
            if header < ipv4::HEADER_LEN || inner.len() < header {
                return Err(FrameDrop::ShortHeader);
            }
            // The source of the quoted packet is the destination of the error, or the other way
            // round.
            let other = match outer {
                End::Source => ipv4::field::DESTINATION,
                End::Destination => ipv4::field::SOURCE,
            };
            inner[other].copy_from_slice(&addr.octets());
            if ports && has_ports(inner[ipv4::field::PROTOCOL]) {
                set_port(inner, header, outer, to.port());
            }
            ipv4::finish_header(inner);
            match outer {
                End::Source => ipv4::set_src(ip, addr),
                End::Destination => ipv4::set_dst(ip, addr),
            }
        }
        IpAddr::V6(addr) if is_ipv6(ip) => {
            let inner = ip
                .get_mut(l4 + icmp::HEADER_LEN..)
                .ok_or(FrameDrop::ShortHeader)?;
            let chain = ipv6::walk(inner).ok_or(FrameDrop::ShortHeader)?;
            match outer {
                End::Source => ipv6::set_dst(inner, addr),
                End::Destination => ipv6::set_src(inner, addr),
            }
            if ports && has_ports(chain.protocol) {
                set_port(inner, chain.l4, outer, to.port());
            }
            match outer {
                End::Source => ipv6::set_src(ip, addr),
                End::Destination => ipv6::set_dst(ip, addr),
            }
            icmpv6::finish_checksum(ip, l4);
            return Ok(());
        }
        _ => return Err(FrameDrop::Unsupported),
    }
    put16(ip, l4 + icmp::field::CHECKSUM.start, 0);
    let sum = Sum::ZERO.bytes(&ip[l4..]).finish();
    put16(ip, l4 + icmp::field::CHECKSUM.start, sum);
    Ok(())
}

const fn has_ports(protocol: u8) -> bool {
    matches!(
        Protocol(protocol),
        Protocol::TCP | Protocol::UDP | Protocol::SCTP
    )
}

/// Writes the port of the quoted packet on the side opposite to `outer`.
fn set_port(inner: &mut [u8], l4: usize, outer: End, to: u16) {
    let other = match outer {
        End::Source => End::Destination,
        End::Destination => End::Source,
    };
    put16(inner, l4 + port(other), to);
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use crate::frame::{PartialChecksum, SegmentKind, Segments};
    use crate::parse;
    use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    fn check(ip: &[u8]) {
        let sliced = SlicedPacket::from_ip(ip).expect("the bytes are a valid packet");
        if let Some(etherparse::NetSlice::Ipv4(net)) = &sliced.net {
            let header = net.header().to_header();
            assert_eq!(header.calc_header_checksum(), header.header_checksum);
        }
        let (src, dst) = (ip_src(ip), ip_dst(ip));
        match sliced.transport.expect("the packet has a transport header") {
            TransportSlice::Tcp(tcp) => {
                let header = tcp.to_header();
                let sum = match (src, dst) {
                    (IpAddr::V4(src), IpAddr::V4(dst)) => {
                        header.calc_checksum_ipv4_raw(src.octets(), dst.octets(), tcp.payload())
                    }
                    (IpAddr::V6(src), IpAddr::V6(dst)) => {
                        header.calc_checksum_ipv6_raw(src.octets(), dst.octets(), tcp.payload())
                    }
                    _ => panic!("the addresses have different IP versions"),
                };
                assert_eq!(sum.expect("the packet is short"), tcp.checksum());
            }
            TransportSlice::Udp(udp) => {
                let header = udp.to_header();
                let sum = match (src, dst) {
                    (IpAddr::V4(src), IpAddr::V4(dst)) => {
                        header.calc_checksum_ipv4_raw(src.octets(), dst.octets(), udp.payload())
                    }
                    (IpAddr::V6(src), IpAddr::V6(dst)) => {
                        header.calc_checksum_ipv6_raw(src.octets(), dst.octets(), udp.payload())
                    }
                    _ => panic!("the addresses have different IP versions"),
                };
                assert_eq!(sum.expect("the packet is short"), udp.checksum());
            }
            other => panic!("the packet is neither TCP nor UDP: {other:?}"),
        }
    }

    fn shorten(addr: [u8; 16]) -> [u8; 4] {
        [addr[0], addr[1], addr[2], addr[3]]
    }

    /// The sender of a tunnel packet has left the inner checksum to the device. It omits the outer
    /// checksum, or computes it for the finished packet (the kernel's local checksum offload).
    #[test]
    fn nat_of_tunnel_datagram_keeps_inner_and_outer_checksums_correct() {
        for (absent, six, end) in [
            (true, false, End::Destination),
            (true, true, End::Source),
            (false, false, End::Source),
            (false, true, End::Destination),
        ] {
            // VXLAN: a header of eight bytes, and an Ethernet frame.
            const INNER: usize = 8 + 14;
            let mut inside = vec![0; INNER];
            PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
                .tcp(1000, 80, 7, 9)
                .write(&mut inside, b"odd")
                .expect("writing to a vector succeeds");
            let mut ip = Vec::new();
            let builder = match six {
                true => PacketBuilder::ipv6([1; 16], [2; 16], 64),
                false => PacketBuilder::ipv4([192, 0, 2, 1], [192, 0, 2, 2], 64),
            };
            builder
                .udp(40_000, 4789)
                .write(&mut ip, &inside)
                .expect("writing to a vector succeeds");
            let l4 = if six { 40 } else { 20 };
            let inner = l4 + 8 + INNER;
            let tcp = inner + 20;
            let pseudo = Sum::ZERO
                .pseudo(
                    ip_src(&ip[inner..]),
                    ip_dst(&ip[inner..]),
                    6,
                    ip.len() - tcp,
                )
                .fold();
            put16(&mut ip, tcp + 16, pseudo);
            if absent {
                put16(&mut ip, l4 + 6, 0);
            }
            let mut frame = Frame::from_bytes(&ip);
            frame.offload.checksum = Some(PartialChecksum {
                start: tcp as u16,
                offset: 16,
            });
            let packet = parse::ip(frame.bytes(), false).expect("the packet is valid");
            let to: IpAddr = if six { [9; 16].into() } else { [9; 4].into() };
            translate(&mut frame, &packet, end, SocketAddr::new(to, 4790))
                .expect("the packet is long enough");
            segment::finish_checksum(&mut frame).expect("the checksum field is inside the packet");
            check(frame.bytes());
            check(&frame.bytes()[inner..]);
        }
    }

    /// The dataplane changes the addresses of a super-packet before it divides it into segments.
    /// Each segment must have correct outer and inner checksums.
    #[test]
    fn translated_super_packet_inside_tunnel_has_correct_checksums_after_segmentation() {
        for (absent, end) in [(true, End::Destination), (false, End::Source)] {
            const INNER: usize = 20 + 8 + 8 + 14;
            let mut inside = vec![0; 8 + 14];
            PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
                .tcp(1000, 80, 7, 9)
                .write(&mut inside, &[7; 3500])
                .expect("writing to a vector succeeds");
            let mut ip = Vec::new();
            PacketBuilder::ipv4([192, 0, 2, 1], [192, 0, 2, 2], 64)
                .udp(40_000, 4789)
                .write(&mut ip, &inside)
                .expect("writing to a vector succeeds");
            if absent {
                put16(&mut ip, 20 + 6, 0);
            }
            let mut frame = Frame::from_bytes(&ip);
            frame.offload.checksum = Some(PartialChecksum {
                start: INNER as u16 + 20,
                offset: 16,
            });
            frame.offload.segments = Some(Segments {
                kind: SegmentKind::Tcp4,
                size: 1000,
                header_len: 0,
                ecn: false,
            });
            let packet = parse::ip(frame.bytes(), true).expect("the packet is valid");
            let to = SocketAddr::from(([9; 4], 4790));
            translate(&mut frame, &packet, end, to).expect("the packet is long enough");
            let packet = parse::ip(frame.bytes(), true).expect("the packet is valid");
            let cut = Cut::new(&frame, &packet).expect("the offload request fits the packet");
            let cut = cut.expect("the packet is a super-packet");
            let segments = cut
                .segments(&frame, &packet)
                .expect("the number is within the limit");
            for (index, segment) in segments.enumerate() {
                let mut out = Frame::with_capacity(segment.len());
                assert!(segment.write(&mut out), "{index}");
                check(out.bytes());
                check(&out.bytes()[INNER..]);
            }
            assert_eq!(cut.count(frame.len()), 4);
        }
    }

    proptest! {
        #[test]
        fn nat_rewrite_keeps_checksums_correct(mut src: [u8; 16], dst: [u8; 16], sport: u16, dport: u16, to: [u8; 16], port: u16, source: bool, udp: bool,
                                absent: bool, partial: bool, six: bool, payload in proptest::collection::vec(any::<u8>(), 0..200)) {
            src[0] &= 0x7f; // Not a group.
            let mut ip = Vec::new();
            let builder = if six {
                PacketBuilder::ipv6(src, dst, 64)
            } else {
                PacketBuilder::ipv4(shorten(src), shorten(dst), 64)
            };
            let to: IpAddr = if six { to.into() } else { shorten(to).into() };
            if udp {
                builder.udp(sport, dport).write(&mut ip, &payload).expect("writing to a vector succeeds");
            } else {
                builder.tcp(sport, dport, 7, 9).ack(3).write(&mut ip, &payload).expect("writing to a vector succeeds");
            }
            let l4 = if six { 40 } else { 20 };
            let field = l4 + if udp { 6 } else { 16 };
            let partial = partial && !(udp && absent);
            if partial {
                let protocol = if udp { 17 } else { 6 };
                let sum = Sum::ZERO.pseudo(ip_src(&ip), ip_dst(&ip), protocol, ip.len() - l4).fold();
                put16(&mut ip, field, sum);
            } else if udp && absent {
                put16(&mut ip, field, 0);
            }
            let mut frame = Frame::from_bytes(&ip);
            if partial {
                frame.offload.checksum = Some(PartialChecksum { start: l4 as u16, offset: (field - l4) as u16 });
            }
            let packet = parse::ip(frame.bytes(), false).expect("the packet is valid");
            let end = if source { End::Source } else { End::Destination };
            translate(&mut frame, &packet, end, SocketAddr::new(to, port)).expect("the packet is long enough");
            segment::finish_checksum(&mut frame).expect("the checksum field is inside the packet");
            check(frame.bytes());
            // Read the fields directly, because the parser refuses a multicast source.
            let bytes = frame.bytes();
            let ports = (be16(bytes, l4), be16(bytes, l4 + 2));
            if source {
                prop_assert_eq!((ip_src(bytes), ports), (to, (port, dport)));
            } else {
                prop_assert_eq!((ip_dst(bytes), ports), (to, (sport, port)));
            }
        }

        #[test]
        fn translated_icmp_error_has_correct_checksum_and_addresses(vip: [u8; 16], client: [u8; 16], server: [u8; 16], port: u16, len in 0usize..200, cut in 0usize..200) {
            // The server sends an error about a translated packet of the client.
            let mut inner = Vec::new();
            PacketBuilder::ipv6(client, server, 63).udp(1000, 8053).write(&mut inner, &vec![9; len]).expect("writing to a vector succeeds");
            inner.truncate(inner.len() - cut.min(len));
            let mut ip = Vec::new();
            let kind = etherparse::Icmpv6Type::DestinationUnreachable(etherparse::icmpv6::DestUnreachableCode::Port);
            PacketBuilder::ipv6(server, client, 64).icmpv6(kind).write(&mut ip, &inner).expect("writing to a vector succeeds");
            translate_icmp(&mut ip, 40, End::Source, SocketAddr::new(vip.into(), port), true).expect("the headers are complete");
            let sliced = SlicedPacket::from_ip(&ip).expect("the bytes are a valid packet");
            let Some(TransportSlice::Icmpv6(message)) = sliced.transport else { panic!("the packet is not ICMPv6") };
            prop_assert!(message.is_checksum_valid(vip, client));
            prop_assert_eq!(ip_dst(message.payload()), IpAddr::from(vip));
            prop_assert_eq!(be16(message.payload(), 42), port);
        }
    }
}

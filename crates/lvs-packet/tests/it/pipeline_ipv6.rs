//! IPv6 frames with fixed verdicts, for cases that no recording of the kernel's packets contains:
//! addresses that the dataplane owns, super-packets, tunnels with different IP versions inside and
//! outside, and invalid input.

use std::net::{IpAddr, Ipv6Addr};

use crate::lab::{
    CL_MAC, CLIENTS, GW_ADDR6, GW_MAC, HOST, Lab, SERVERS, SV_MAC, Service, tcp, udp,
};
use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use lvs_core::tunnel::{Tunnel, TunnelChecksum};
use lvs_core::{Forwarding, Protocol};
use lvs_packet::drop::FrameDrop;
use lvs_packet::fragment::Cutter;
use lvs_packet::frame::{Frame, Offload, PartialChecksum, SegmentKind, Segments};
use lvs_packet::ndp;
use lvs_packet::net::PortId;
use lvs_packet::parse;
use lvs_packet::pipeline::Request;
use lvs_packet::wire::checksum::Sum;
use lvs_packet::wire::icmp::{self, ErrorKind};
use lvs_packet::wire::{Mac, be16, ipv6, put16, tcp::checksum_ok};
use proptest::prelude::*;

const CLIENT: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7);
const VIP: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x50, 0, 0, 0, 0, 0, 0x80);
const SERVER: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 0x11);

fn web_to(method: Forwarding, tunnel: Tunnel, server: IpAddr) -> Lab {
    let service = |protocol, port, server_port| Service {
        protocol,
        virt: (VIP, port).into(),
        server: Some((server, server_port).into()),
        method,
        tunnel,
    };
    Lab::new(&[
        service(Protocol::TCP, 80, 8080),
        service(Protocol::UDP, 53, 5353),
    ])
}

fn web(method: Forwarding) -> Lab {
    web_to(method, Tunnel::Ipip, SERVER.into())
}

/// An Ethernet frame with the EtherType of IPv6, whatever the version of the packet.
fn ethernet(dst: Mac, src: Mac, ip: &[u8]) -> Vec<u8> {
    [&dst.0[..], &src.0, &[0x86, 0xdd], ip].concat()
}

fn from_client(ip: &[u8]) -> Vec<u8> {
    ethernet(CL_MAC, GW_MAC, ip)
}

fn echo(size: usize) -> Vec<u8> {
    let mut ip = Vec::new();
    PacketBuilder::ipv6(CLIENT.octets(), VIP.octets(), 64)
        .icmpv6_echo_request(1, 2)
        .write(&mut ip, &vec![0x70; size])
        .expect("writing to a vector succeeds");
    ip
}

/// Makes a TCP packet a super-packet with a partial checksum, as a veth device delivers it.
fn aggregate(ip: &mut [u8], size: u16) -> Offload {
    let sum = Sum::ZERO
        .pseudo(CLIENT.into(), VIP.into(), 6, ip.len() - 40)
        .fold();
    put16(ip, 56, sum);
    Offload {
        checksum: Some(PartialChecksum {
            start: 54,
            offset: 16,
        }),
        segments: Some(Segments {
            kind: SegmentKind::Tcp6,
            size,
            header_len: 74,
            ecn: false,
        }),
        verified: false,
    }
}

#[test]
fn neighbour_solicitation_for_own_address_is_answered_and_conflict_is_reported() {
    let mut lab = web(Forwarding::Nat);
    let ask = |src, to: Mac| {
        let mut ip = Vec::new();
        // A solicitation with the sender's address: type, code, checksum, reserved, target, option.
        let mut message = vec![135, 0, 0, 0, 0, 0, 0, 0];
        message.extend(VIP.octets());
        message.extend([1, 1]);
        message.extend(GW_MAC.0);
        let group = ndp::solicited_node(VIP);
        let mut header = [0; 40];
        ipv6::write_header(&mut header, 58, 255, src, group, 32);
        ip.extend(header);
        ip.extend(message);
        lvs_packet::wire::icmpv6::finish_checksum(&mut ip, 40);
        ethernet(to, GW_MAC, &ip)
    };
    let group = ndp::group_mac(ndp::solicited_node(VIP));
    assert!(
        lab.send(CLIENTS, &ask(GW_ADDR6, group)).is_empty(),
        "the dataplane has answered for an address of the host"
    );
    lab.own_vips();
    for to in [group, CL_MAC] {
        let got = lab.send(CLIENTS, &ask(GW_ADDR6, to));
        assert_eq!(got.len(), 1);
        let answer = ndp::parse(&got[0].1).expect("the frame is a neighbour advertisement");
        assert_eq!(
            (answer.solicitation, answer.target, answer.mac),
            (false, VIP, CL_MAC)
        );
        assert_eq!((got[0].0, &got[0].1[..6]), (CLIENTS, &GW_MAC.0[..]));
    }
    // The answer to a probe is sent to all nodes.
    let got = lab.send(CLIENTS, &ndp::probe(GW_MAC, VIP));
    assert_eq!(got[0].1[..6], [0x33, 0x33, 0, 0, 0, 1]);
    // Another host announces the VIP.
    lab.send(CLIENTS, &ndp::unsolicited(GW_MAC, VIP));
    let conflict = Request::AddressConflict {
        port: CLIENTS,
        addr: VIP.into(),
        mac: GW_MAC,
    };
    assert_eq!(lab.requests, [conflict]);
}

#[test]
fn dataplane_answers_for_own_ipv6_address_like_a_host() {
    let mut lab = web(Forwarding::Nat);
    lab.own_vips();
    let one = |lab: &mut Lab, ip: &[u8]| {
        let got = lab.send(CLIENTS, &from_client(ip));
        assert_eq!(got.len(), 1);
        let ip = got[0].1[14..].to_vec();
        let packet = parse::ipv6(&ip, false).expect("the packet is valid");
        assert_eq!((packet.src, packet.dst), (VIP.into(), CLIENT.into()));
        assert!(checksum_ok(&ip, packet.l4, packet.protocol.0));
        (packet, ip)
    };
    let (_, ip) = one(&mut lab, &echo(20));
    assert_eq!((ip[40], ip.len()), (129, 68));
    let (packet, ip) = one(&mut lab, &tcp((CLIENT, 4000), (VIP, 81), b"abc"));
    assert_eq!(
        (packet.protocol, ip[53]),
        (Protocol::TCP, 4),
        "the answer is not a reset"
    );
    let (_, ip) = one(&mut lab, &udp((CLIENT, 4000), (VIP, 54), b"abc"));
    assert_eq!(ip[40..42], [1, 4], "the answer is not \"port unreachable\"");
    let mut other = udp((CLIENT, 4000), (VIP, 54), b"abc");
    other[6] = 99;
    let (_, ip) = one(&mut lab, &other);
    assert_eq!(
        ip[40..48],
        [4, 1, ip[42], ip[43], 0, 0, 0, 6],
        "the answer does not name the next header field"
    );
    // A long echo request arrives in fragments, and the reply is sent in fragments.
    let long = echo(4000);
    let cutter = Cutter::v6(&long, 1500, None, 9).expect("the datagram can be fragmented");
    let pieces: Vec<_> = cutter
        .frames()
        .map(|piece| piece.bytes().to_vec())
        .collect();
    let got: Vec<_> = pieces
        .iter()
        .flat_map(|piece| lab.send(CLIENTS, &from_client(piece)))
        .collect();
    assert_eq!((pieces.len(), got.len()), (3, 3));
    for (_, frame) in got {
        assert!(frame.len() <= 1514 && frame[20] == ipv6::FRAGMENT);
    }
}

#[test]
fn ipv6_super_packets_are_forwarded_whole_and_segmented_for_tunnels() {
    let data: Vec<u8> = (0..60_000u32).map(|i| i.to_be_bytes()[3]).collect();
    let mut ip = tcp((CLIENT, 4000), (VIP, 80), &data);
    let offload = aggregate(&mut ip, 1380);
    let mut lab = web(Forwarding::Nat);
    let got = lab.send_offloaded(CLIENTS, &from_client(&ip), offload);
    assert_eq!((got.len(), got[0].0), (1, SERVERS));
    let mut frame = got[0].1.clone();
    assert_eq!(frame.offload.segments, offload.segments);
    lvs_packet::segment::finish_checksum(&mut frame)
        .expect("the checksum field is inside the packet");
    assert!(checksum_ok(&frame.bytes()[14..], 40, 6));

    let gue = Tunnel::Gue {
        port: 6080,
        checksum: TunnelChecksum::Full,
    };
    for (server, outer) in [
        (IpAddr::from(SERVER), 40),
        (IpAddr::from([10, 1, 0, 11]), 20),
    ] {
        let mut lab = web_to(Forwarding::Tunnel, gue, server);
        let got = lab.send_offloaded(CLIENTS, &from_client(&ip), offload);
        assert_eq!(got.len(), data.len().div_ceil(1380));
        let mut joined = Vec::new();
        for (port, frame) in got {
            let outer_ip = &frame.bytes()[14..];
            let packet = parse::ip(outer_ip, false).expect("the packet is valid");
            assert_eq!((port, packet.dst, packet.l4), (SERVERS, server, outer));
            assert!(packet.len <= 1500 && checksum_ok(outer_ip, outer, 17));
            let inner = &outer_ip[outer + 12..];
            assert!(checksum_ok(inner, 40, 6));
            joined.extend_from_slice(&inner[60..]);
        }
        assert_eq!(joined, data);
    }
}

#[test]
fn packet_longer_than_learned_ipv6_tunnel_mtu_causes_icmp_error_with_mtu() {
    let mut lab = web(Forwarding::Tunnel);
    let big = udp((CLIENT, 4000), (VIP, 53), &[1; 1400]);
    let stated = |lab: &mut Lab| {
        let got = lab.send(CLIENTS, &from_client(&big));
        assert_eq!(got.len(), 1);
        let ip = &got[0].1[14..];
        let sliced = SlicedPacket::from_ip(ip).expect("the bytes are a valid packet");
        match sliced.transport {
            Some(TransportSlice::Icmpv6(message)) => {
                assert!(message.is_checksum_valid(VIP.octets(), CLIENT.octets()));
                Some(u32::from_be_bytes(message.bytes5to8()))
            }
            _ => None,
        }
    };
    assert_eq!(stated(&mut lab), None, "a packet that fits was refused");
    // A router on the path to the server reports a smaller MTU.
    let got = lab.send(CLIENTS, &from_client(&big));
    let mut complaint = Frame::new();
    let router: Ipv6Addr = "fd00:1::99".parse().expect("the address is valid");
    let kind = ErrorKind::FragmentationNeeded(1400);
    assert!(icmp::error(
        &mut complaint,
        kind,
        &got[0].1[14..],
        router.into(),
        0
    ));
    lab.send(SERVERS, &ethernet(SV_MAC, GW_MAC, complaint.bytes()));
    assert_eq!(stated(&mut lab), Some(1360));
    assert_eq!(
        lab.pipeline.counters.dropped_for(FrameDrop::TooBig),
        1,
        "the dropped packet was not counted"
    );
}

/// The kernel then uses 1280 bytes as the path MTU of a GUE tunnel, and drops all packets.
#[test]
fn packet_too_big_below_a_tunnels_minimum_is_ignored() {
    let mut lab = web(Forwarding::Tunnel);
    let big = udp((CLIENT, 4000), (VIP, 53), &[1; 1400]);
    let outer = lab.send(CLIENTS, &from_client(&big))[0].1[14..].to_vec();
    let router: Ipv6Addr = "fd00:1::99".parse().expect("the address is valid");
    let mut mtu_after = |reported| {
        let mut complaint = Frame::new();
        let kind = ErrorKind::FragmentationNeeded(reported);
        assert!(icmp::error(&mut complaint, kind, &outer, router.into(), 0));
        lab.send(SERVERS, &ethernet(SV_MAC, GW_MAC, complaint.bytes()));
        let got = lab.send(CLIENTS, &from_client(&big));
        let sliced = SlicedPacket::from_ip(&got[0].1[14..]).expect("the bytes are a valid packet");
        match sliced.transport {
            Some(TransportSlice::Icmpv6(message)) => Some(u32::from_be_bytes(message.bytes5to8())),
            _ => None,
        }
    };
    for reported in [68, 1000, 1279, 1280, 1319] {
        assert_eq!(mtu_after(reported), None, "{reported}");
    }
    assert_eq!(mtu_after(1400), Some(1360));
    for reported in [1000, 1280, 1319] {
        assert_eq!(mtu_after(reported), Some(1360), "{reported}");
    }
    assert_eq!(mtu_after(1320), Some(1280));
}

#[test]
fn ipv6_extension_headers_are_parsed_up_to_a_limit() {
    let mut lab = web(Forwarding::Nat);
    let packet = tcp((CLIENT, 4000), (VIP, 80), b"abc");
    let with = |count: usize| {
        let mut ip = packet.clone();
        let options: Vec<u8> = (0..count)
            .flat_map(|i| [if i + 1 == count { 6 } else { 60 }, 0, 1, 4, 0, 0, 0, 0])
            .collect();
        ip.splice(40..40, options);
        ip[6] = 60;
        ipv6::finish_len(&mut ip);
        from_client(&ip)
    };
    let got = lab.send(CLIENTS, &with(3));
    let ip = &got[0].1[14..];
    let after = parse::ipv6(ip, false).expect("the packet is valid");
    assert_eq!(
        (after.dst, after.l4, after.ports),
        (SERVER.into(), 64, Some((4000, 8080)))
    );
    assert!(checksum_ok(ip, 64, 6));
    assert!(lab.send(CLIENTS, &with(100)).is_empty());
    assert_eq!(
        lab.pipeline.counters.dropped_for(FrameDrop::IpHeaderLength),
        1
    );
}

#[test]
fn overlapping_ipv6_fragments_are_dropped() {
    let mut lab = web(Forwarding::Nat);
    let ip = udp((CLIENT, 4000), (VIP, 53), &[1; 3000]);
    let cut = |mtu| {
        let cutter = Cutter::v6(&ip, mtu, None, 5).expect("the datagram can be fragmented");
        let pieces = cutter.frames().map(|piece| from_client(piece.bytes()));
        pieces.collect::<Vec<_>>()
    };
    let (pieces, others) = (cut(1500), cut(1400));
    assert!(lab.send(CLIENTS, &pieces[0]).is_empty());
    assert!(lab.send(CLIENTS, &others[1]).is_empty());
    // The datagram was discarded: its other fragments do not complete it.
    assert!(lab.send(CLIENTS, &pieces[1]).is_empty());
    assert!(lab.send(CLIENTS, &pieces[2]).is_empty());
    assert_eq!(lab.pipeline.counters.dropped_for(FrameDrop::BadFragment), 1);
}

proptest! {
    /// Arbitrary changes of a valid frame: the dataplane does not panic, and the lab checks that it
    /// counts each frame once.
    #[test]
    fn mutated_ipv6_frames_do_not_panic(method in 0u8..3, tunnel in 0u8..3, kind in 0u8..5, edits in proptest::collection::vec((0usize..200, any::<u8>()), 0..6),
                 next in proptest::option::of(prop::sample::select(vec![0u8, 43, 44, 50, 51, 59, 60, 4, 41])),
                 cut in proptest::option::of(0usize..200), own: bool, mixed: bool, port in 0u16..3,
                 offload in proptest::option::of((0u16..200, 0u16..40, 0u16..2000, any::<bool>()))) {
        let method = [Forwarding::Nat, Forwarding::Route, Forwarding::Tunnel][usize::from(method)];
        let checksum = TunnelChecksum::Full;
        let tunnel = [Tunnel::Ipip, Tunnel::Gre { checksum }, Tunnel::Gue { port: 1, checksum }][usize::from(tunnel)];
        let server: IpAddr = if mixed { [10, 1, 0, 11].into() } else { SERVER.into() };
        let mut lab = web_to(method, tunnel, server);
        if own {
            lab.own_vips();
        }
        let mut ip = match kind {
            0 => tcp((CLIENT, 4000), (VIP, 80), &[1; 100]),
            1 => udp((CLIENT, 4000), (VIP, 53), &[2; 100]),
            2 => tcp((SERVER, 8080), (CLIENT, 4000), &[3; 60]),
            3 => {
                let inner = udp((VIP, 53), (CLIENT, 4000), &[4; 60]);
                let mut ip = Vec::new();
                PacketBuilder::ipv6(CLIENT.octets(), VIP.octets(), 64)
                    .icmpv6(etherparse::Icmpv6Type::PacketTooBig { mtu: 1280 })
                    .write(&mut ip, &inner)
                    .expect("writing to a vector succeeds");
                ip
            }
            _ => echo(30),
        };
        if let Some(next) = next {
            ip.splice(40..40, [ip[6], 0, 0, 1, 0, 0, 0, 0]);
            ip[6] = next;
            ipv6::finish_len(&mut ip);
        }
        for (at, value) in edits {
            if let Some(byte) = ip.get_mut(at) {
                *byte = value;
            }
        }
        if let Some(cut) = cut {
            ip.truncate(cut);
        }
        let bytes = match port {
            0 => from_client(&ip),
            1 => ethernet(SV_MAC, GW_MAC, &ip),
            _ => ip,
        };
        let mut frame = Frame::from_bytes(&bytes);
        if let Some((start, offset, size, udp)) = offload {
            let kind = if udp { SegmentKind::Udp } else { SegmentKind::Tcp6 };
            frame.offload.checksum = Some(PartialChecksum { start, offset });
            frame.offload.segments = Some(Segments { kind, size, header_len: 0, ecn: false });
        }
        for _ in 0..2 {
            for (port, frame) in lab.send_frame(PortId(port), frame.clone()) {
                let skip = if port == HOST { 0 } else { 14 };
                let ip = &frame.bytes()[skip..];
                prop_assert!(parse::ip(ip, true).is_ok(), "{:02x?}", ip);
                if skip > 0 {
                    let ethertype = if ip[0] >> 4 == 6 { 0x86dd } else { 0x0800 };
                    prop_assert_eq!(be16(frame.bytes(), 12), ethertype);
                }
            }
        }
    }
}

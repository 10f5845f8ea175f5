//! Tasks of a host in addition to IPVS, for example IP options, impossible sources, neighbours that
//! do not answer, echo requests, segment sizes and VLAN tags. The expected numbers and addresses
//! were recorded from the kernel.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crate::lab::{
    CL_ADDR, CL_MAC, CLIENTS, GW_MAC, HOST, Lab, SERVERS, SV_ADDR, SV_MAC, Service, bytes,
    ethernet, from_client, sent,
};
use etherparse::{Icmpv4Type, PacketBuilder, SlicedPacket, TransportSlice};
use lvs_core::{Forwarding, Instant, Protocol};
use lvs_packet::common::Common;
use lvs_packet::drop::FrameDrop;
use lvs_packet::mld;
use lvs_packet::net::PortId;
use lvs_packet::pipeline::{Env, Output, Pipeline, Request};
use lvs_packet::settings::{ClampMss, Echo, Settings};
use lvs_packet::wire::{Mac, be16, ip_dst, ip_src, ipv4, ipv6, tcp};

const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
const VIP: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 80);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 11);
const CLIENT6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7);

fn web(method: Forwarding) -> Lab {
    Lab::new(&[
        Service::new(method, Protocol::TCP, "10.0.0.80:80", "10.1.0.11:8080"),
        Service::new(method, Protocol::TCP, "[fd00::80]:80", "[fd00:1::11]:8080"),
    ])
}

/// A TCP segment of IPv4 with IP options.
fn segment(src: (Ipv4Addr, u16), dst: (Ipv4Addr, u16), options: &[u8], syn: bool) -> Vec<u8> {
    let mut padded = options.to_vec();
    padded.resize(options.len().next_multiple_of(4), 0);
    let mut header = etherparse::Ipv4Header::new(
        0,
        64,
        etherparse::IpNumber::TCP,
        src.0.octets(),
        dst.0.octets(),
    )
    .expect("the packet is short");
    header.options = padded[..]
        .try_into()
        .expect("the options have at most 40 bytes");
    let builder = PacketBuilder::ip(etherparse::IpHeaders::Ipv4(
        header,
        etherparse::Ipv4Extensions::default(),
    ));
    let builder = builder.tcp(src.1, dst.1, 1000, 500);
    let builder = if syn {
        builder
            .syn()
            .options(&[etherparse::TcpOptionElement::MaximumSegmentSize(8960)])
            .expect("the space suffices")
    } else {
        builder.ack(77)
    };
    let mut ip = Vec::new();
    builder
        .write(&mut ip, b"")
        .expect("writing to a vector succeeds");
    ip
}

fn segment6(src: (Ipv6Addr, u16), dst: (Ipv6Addr, u16)) -> Vec<u8> {
    let mut ip = Vec::new();
    PacketBuilder::ipv6(src.0.octets(), dst.0.octets(), 64)
        .tcp(src.1, dst.1, 1000, 500)
        .syn()
        .options(&[etherparse::TcpOptionElement::MaximumSegmentSize(8940)])
        .expect("the space suffices")
        .write(&mut ip, b"")
        .expect("writing to a vector succeeds");
    ip
}

/// Parses an ICMP error, and checks its checksum. Returns source, destination, type, code, and the
/// quoted packet.
fn error(frame: &[u8]) -> (IpAddr, IpAddr, u8, u8, Vec<u8>) {
    let ip = &frame[14..];
    let sliced = SlicedPacket::from_ip(ip).expect("the bytes are a valid packet");
    let message = match sliced.transport.expect("the packet has a transport header") {
        TransportSlice::Icmpv4(message) => {
            let header = message.header();
            let sum = header.icmp_type.calc_checksum(message.payload());
            assert_eq!(sum, header.checksum);
            message.slice().to_vec()
        }
        TransportSlice::Icmpv6(message) => {
            let ends = (ipv6::src(ip).octets(), ipv6::dst(ip).octets());
            assert!(message.is_checksum_valid(ends.0, ends.1));
            message.slice().to_vec()
        }
        other => panic!("{other:?}"),
    };
    let quoted = message[8..].to_vec();
    (ip_src(ip), ip_dst(ip), message[0], message[1], quoted)
}

#[test]
fn ip_options_are_filled_in_as_by_kernel() {
    let route = [7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0];
    let stamps = [68, 12, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    for method in [Forwarding::Nat, Forwarding::Route] {
        let mut lab = web(method);
        let common = Common::new(Settings::UNLIMITED).with_midnight(Duration::from_millis(1));
        lab.pipeline = Pipeline::new(Arc::new(common));
        let ip = segment((CLIENT, 4000), (VIP, 80), &route, true);
        let sent = lab.send(CLIENTS, &from_client(&ip));
        let ip = &sent[0].1[14..];
        assert!(
            lvs_packet::parse::ip(ip, false).is_ok(),
            "the sent packet is invalid"
        );
        assert_eq!(ip[20..31], [7, 11, 8, 10, 0, 0, 80, 0, 0, 0, 0]);
        let ip = segment((CLIENT, 4000), (VIP, 80), &stamps, true);
        let sent = lab.send(CLIENTS, &from_client(&ip));
        // The time stamp is ten seconds and a millisecond after midnight.
        assert_eq!(
            sent[0].1[34..46],
            [68, 12, 13, 1, 10, 0, 0, 80, 0, 0, 0x27, 0x11]
        );
    }
    // In replies, the recorded route gets the address of the outgoing interface, and the time stamp
    // gets the address of the interface on the servers' side.
    let mut lab = web(Forwarding::Nat);
    let ip = segment((SERVER, 8080), (CLIENT, 4000), &route, false);
    let sent = lab.send(SERVERS, &ethernet(SV_MAC, GW_MAC, &ip));
    assert_eq!(sent[0].1[34..41], [7, 11, 8, 10, 0, 0, 80]);
    let ip = segment((SERVER, 8080), (CLIENT, 4000), &stamps, false);
    let sent = lab.send(SERVERS, &ethernet(SV_MAC, GW_MAC, &ip));
    let near = SV_ADDR.octets();
    assert_eq!(sent[0].1[38..42], near);
}

#[test]
fn invalid_ip_options_are_answered_with_icmp_error_and_source_routes_dropped() {
    let mut lab = web(Forwarding::Nat);
    let ip = segment((CLIENT, 4000), (VIP, 80), &[7, 7, 3, 0, 0, 0, 0], true);
    let sent = lab.send(CLIENTS, &from_client(&ip));
    let (src, dst, kind, code, quoted) = error(&sent[0].1);
    assert_eq!((src, dst, kind, code), (VIP.into(), CLIENT.into(), 12, 0));
    assert_eq!(sent[0].1[14 + 20 + 4], 22, "the error names another byte");
    assert_eq!(quoted, ip, "the error quotes a changed packet");
    let ip = segment((CLIENT, 4000), (VIP, 80), &[131, 7, 4, 10, 1, 0, 11], true);
    assert!(lab.send(CLIENTS, &from_client(&ip)).is_empty());
    let counters = &lab.pipeline.counters;
    assert_eq!(counters.dropped_for(FrameDrop::IpOptions), 1);
    assert_eq!(counters.dropped_for(FrameDrop::SourceRoute), 1);
    assert_eq!(
        lab.decide.seen, 0,
        "a packet with invalid options has reached the director"
    );
    // Packets to ports without a service are passed to the host.
    let ip = segment((CLIENT, 4000), (VIP, 81), &[131, 7, 4, 10, 1, 0, 11], true);
    assert!(lab.send(CLIENTS, &from_client(&ip)).is_empty());
    assert_eq!(lab.pipeline.counters.left, 1);
}

#[test]
fn packets_from_impossible_sources_are_dropped() {
    let mut lab = web(Forwarding::Nat);
    let bad: [Ipv4Addr; 7] = [
        CL_ADDR,
        SV_ADDR,
        VIP,
        Ipv4Addr::LOCALHOST,
        Ipv4Addr::BROADCAST,
        Ipv4Addr::UNSPECIFIED,
        Ipv4Addr::new(224, 0, 0, 1),
    ];
    for src in bad {
        let ip = segment((src, 4000), (VIP, 80), &[], true);
        assert!(lab.send(CLIENTS, &from_client(&ip)).is_empty(), "{src}");
    }
    let virt6: Ipv6Addr = "fd00::80".parse().expect("the address is valid");
    for src in [Ipv6Addr::LOCALHOST, CLIENT.to_ipv6_mapped()] {
        let ip = segment6((src, 4000), (virt6, 80));
        assert!(lab.send(CLIENTS, &from_client(&ip)).is_empty(), "{src}");
    }
    assert_eq!(lab.decide.seen, 0);
    // A server that has the VIP itself may use the director as its gateway; its packet belongs to
    // no connection and is reinjected.
    let ip = segment((VIP, 80), (CLIENT, 4000), &[], false);
    let sent = lab.send(SERVERS, &ethernet(SV_MAC, GW_MAC, &ip));
    assert_eq!((sent.len(), sent[0].0), (1, HOST));
    assert_eq!(ip_src(&sent[0].1), IpAddr::V4(VIP));
    let counters = &lab.pipeline.counters;
    assert_eq!(counters.dropped_for(FrameDrop::Martian), 9);
}

/// Reports that a neighbour does not answer, and returns the packets that are sent then.
fn fail(lab: &mut Lab, port: PortId, addr: IpAddr) -> Vec<(PortId, Vec<u8>)> {
    let env = Env::new(&lab.net, &lab.intercept);
    bytes(sent(
        &mut lab.pipeline,
        &mut Output::new(),
        |pipeline, out| {
            pipeline.neighbour_failed(port, addr, &env, &mut lab.decide, lab.now, out);
        },
    ))
}

#[test]
fn unreachable_server_is_reported_to_client() {
    for (method, from) in [
        (Forwarding::Nat, VIP),
        (Forwarding::Route, CL_ADDR),
        (Forwarding::Tunnel, VIP),
    ] {
        let mut lab = web(method);
        lab.net.all_neighbours = None;
        let ip = segment((CLIENT, 4000), (VIP, 80), &[], true);
        assert!(lab.send(CLIENTS, &from_client(&ip)).is_empty());
        let sent = fail(&mut lab, SERVERS, SERVER.into());
        assert_eq!(sent.len(), 1, "{method:?}");
        let (src, dst, kind, code, quoted) = error(&sent[0].1);
        let expected = (from.into(), CLIENT.into(), 3, 1);
        assert_eq!((src, dst, kind, code), expected, "{method:?}");
        // The error quotes the client's packet with a TTL that is lower by one; the inner checksum
        // is not compared.
        let mut expected = ip.clone();
        ipv4::decrement_ttl(&mut expected);
        assert_eq!(quoted[..36], expected[..36], "{method:?}");
        assert_eq!(lab.pipeline.held.dropped, 1);
        assert_eq!(lab.pipeline.counters.icmp_sent, 1);
    }
}

#[test]
fn unreachable_server_is_reported_to_ipv6_client() {
    for method in [Forwarding::Nat, Forwarding::Route] {
        let mut lab = web(method);
        lab.net.all_neighbours = None;
        let virt: Ipv6Addr = "fd00::80".parse().expect("the address is valid");
        let ip = segment6((CLIENT6, 4000), (virt, 80));
        assert!(lab.send(CLIENTS, &from_client(&ip)).is_empty());
        let server: IpAddr = "fd00:1::11".parse().expect("the address is valid");
        let sent = fail(&mut lab, SERVERS, server);
        let (_, dst, kind, code, quoted) = error(&sent[0].1);
        assert_eq!((dst, kind, code), (CLIENT6.into(), 1, 3), "{method:?}");
        assert_eq!(ip_dst(&quoted), IpAddr::V6(virt));
        assert_eq!(
            be16(&quoted, 42),
            80,
            "the error quotes another port than the client used"
        );
    }
}

#[test]
fn unreachable_client_is_reported_to_server() {
    let mut lab = web(Forwarding::Nat);
    lab.net.neighbours.clear();
    let ip = segment((SERVER, 8080), (CLIENT, 4000), &[], false);
    assert!(lab.send(SERVERS, &ethernet(SV_MAC, GW_MAC, &ip)).is_empty());
    let sent = fail(&mut lab, CLIENTS, crate::lab::GW_ADDR.into());
    let (src, dst, kind, code, quoted) = error(&sent[0].1);
    assert_eq!((src, dst), (VIP.into(), SERVER.into()));
    assert_eq!((kind, code), (3, 1));
    assert_eq!(ip_src(&quoted), IpAddr::V4(SERVER));
    assert_eq!(
        be16(&quoted, 20),
        8080,
        "the error quotes another port than the server used"
    );
    assert!(lab.net.neighbours.is_empty());
}

#[test]
fn echo_requests_above_limit_or_with_echo_off_are_dropped() {
    let ping = |to: Ipv4Addr| {
        let mut ip = Vec::new();
        PacketBuilder::ipv4(CLIENT.octets(), to.octets(), 64)
            .icmpv4(Icmpv4Type::EchoRequest(etherparse::IcmpEchoHeader {
                id: 1,
                seq: 2,
            }))
            .write(&mut ip, b"hello")
            .expect("writing to a vector succeeds");
        from_client(&ip)
    };
    for (settings, answered, dropped) in [
        (Settings::UNLIMITED, 10, None),
        (
            Settings {
                echo: Echo::Answer(3),
                ..Settings::UNLIMITED
            },
            3,
            Some(FrameDrop::EchoLimit),
        ),
        (
            Settings {
                echo: Echo::Drop,
                ..Settings::UNLIMITED
            },
            0,
            Some(FrameDrop::EchoOff),
        ),
    ] {
        let mut lab = web(Forwarding::Nat);
        lab.pipeline = Pipeline::alone(settings);
        lab.own_vips();
        let sent: usize = (0..10).map(|_| lab.send(CLIENTS, &ping(VIP)).len()).sum();
        assert_eq!(sent, answered, "{settings:?}");
        if let Some(reason) = dropped {
            let lost = lab.pipeline.counters.dropped_for(reason);
            assert_eq!(lost, 10 - answered as u64, "{settings:?}");
        }
        lab.now = lab.now + Duration::from_secs(1);
        let again = lab.send(CLIENTS, &ping(VIP)).len();
        assert_eq!(
            again,
            usize::from(answered > 0),
            "{settings:?}: the number of replies a second later is wrong"
        );
    }
}

/// The maximum segment size in a SYN, whose checksum must be correct.
fn asked(frame: &[u8], l4: usize) -> u16 {
    let ip = &frame[14..];
    assert!(tcp::checksum_ok(ip, l4, 6));
    let (header, _) =
        etherparse::TcpHeader::from_slice(&ip[l4..]).expect("the bytes are a TCP header");
    let size = header.options_iterator().find_map(|option| match option {
        Ok(etherparse::TcpOptionElement::MaximumSegmentSize(size)) => Some(size),
        _ => None,
    });
    size.expect("the SYN has the option")
}

#[test]
fn mss_is_lowered_to_fit_path_or_to_configured_size() {
    let virt6: Ipv6Addr = "fd00::80".parse().expect("the address is valid");
    // With NAT and direct routing, the smaller MTU of the two links decides. A tunnel needs 20 more
    // bytes for an outer IPv4 header, and 40 for IPv6.
    for (clamp, method, four, six) in [
        (None, Forwarding::Nat, 8960, 8940),
        (Some(ClampMss::Auto), Forwarding::Nat, 1460, 1440),
        (Some(ClampMss::Auto), Forwarding::Route, 1460, 1440),
        (Some(ClampMss::Auto), Forwarding::Tunnel, 1440, 1400),
        (Some(ClampMss::To(1000)), Forwarding::Nat, 1000, 1000),
    ] {
        let mut lab = web(method);
        lab.pipeline = Pipeline::alone(Settings {
            clamp_mss: clamp,
            ..Settings::UNLIMITED
        });
        if method != Forwarding::Tunnel {
            crate::lab::set_mtu(&mut lab.net, [1500, 9000]);
        }
        let ip = segment((CLIENT, 4000), (VIP, 80), &[], true);
        let sent = lab.send(CLIENTS, &from_client(&ip));
        let tunnelled = method == Forwarding::Tunnel;
        let skip = |outer: usize| if tunnelled { outer } else { 0 };
        assert_eq!(
            asked(&sent[0].1[skip(20)..], 20),
            four,
            "{clamp:?} {method:?}"
        );
        let ip = segment6((CLIENT6, 4000), (virt6, 80));
        let sent = lab.send(CLIENTS, &from_client(&ip));
        assert_eq!(
            asked(&sent[0].1[skip(40)..], 40),
            six,
            "{clamp:?} {method:?}"
        );
    }
    // The segment size in the server's SYN ACK is lowered as well.
    let mut lab = web(Forwarding::Nat);
    lab.pipeline = Pipeline::alone(Settings {
        clamp_mss: Some(ClampMss::Auto),
        ..Settings::UNLIMITED
    });
    let ip = segment((SERVER, 8080), (CLIENT, 4000), &[], true);
    let sent = lab.send(SERVERS, &ethernet(SV_MAC, GW_MAC, &ip));
    assert_eq!(asked(&sent[0].1, 20), 1460);
}

#[test]
fn vlan_frames_are_passed_to_host() {
    let mut lab = web(Forwarding::Nat);
    let plain = from_client(&segment((CLIENT, 4000), (VIP, 80), &[], true));
    let tagged = |tags: &[u8]| [&plain[..12], tags, &plain[12..]].concat();
    for tags in [
        &[0x81, 0, 0, 100][..],
        &[0x88, 0xa8, 0, 7],
        &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 100],
        &[0x81, 0, 0, 0, 0x81, 0, 0, 100],
    ] {
        assert!(lab.send(CLIENTS, &tagged(tags)).is_empty(), "{tags:?}");
    }
    assert_eq!(lab.pipeline.counters.tagged, 4);
    assert_eq!((lab.pipeline.counters.left, lab.decide.seen), (4, 0));
    // A priority tag does not make the frame a VLAN frame.
    assert_eq!(lab.send(CLIENTS, &tagged(&[0x81, 0, 0xe0, 0])).len(), 1);
    assert_eq!(lab.send(CLIENTS, &plain).len(), 1);
}

#[test]
fn ipv6_first_fragment_with_incomplete_tcp_header_is_dropped() {
    let mut lab = web(Forwarding::Nat);
    let virt: Ipv6Addr = "fd00::80".parse().expect("the address is valid");
    let whole = segment6((CLIENT6, 4000), (virt, 80));
    // The fragment has only 16 bytes of the TCP header, which has at least 20.
    let mut tiny = whole[..56].to_vec();
    tiny.splice(40..40, [6, 0, 0, 1, 0, 0, 0, 9]);
    tiny[6] = ipv6::FRAGMENT;
    ipv6::finish_len(&mut tiny);
    assert!(lab.send(CLIENTS, &from_client(&tiny)).is_empty());
    let counters = &lab.pipeline.counters;
    assert_eq!(counters.dropped_for(FrameDrop::TinyFragment), 1);
    assert_eq!(lab.pipeline.common().reassembler.waiting(), 0);
}

#[test]
fn repeated_syn_requests_confirmation_of_neighbour() {
    // The lab's verdict never reports a new connection, so the SYN counts as repeated.
    let mut lab = web(Forwarding::Nat);
    for _ in 0..3 {
        let ip = segment((CLIENT, 4000), (VIP, 80), &[], true);
        lab.send(CLIENTS, &from_client(&ip));
    }
    assert!(
        lab.requests
            .contains(&Request::Confirm(SERVERS, SERVER.into()))
    );
    lab.requests.clear();
    let ip = segment((CLIENT, 4000), (VIP, 80), &[], false);
    lab.send(CLIENTS, &from_client(&ip));
    assert!(
        lab.requests.is_empty(),
        "a confirmation was requested for an established connection"
    );
}

#[test]
fn mld_query_is_reported_to_caller_and_not_answered_by_pipeline() {
    let mut lab = web(Forwarding::Nat);
    lab.own_vips();
    let group: Ipv6Addr = "ff02::1:ff00:80".parse().expect("the address is valid");
    let mut query = mld::report_v1(
        GW_MAC,
        "fe80::2".parse().expect("the address is valid"),
        group,
        mld::MembershipChange::Listening,
    );
    query[14 + 48] = 130;
    lvs_packet::wire::icmpv6::finish_checksum(&mut query[14..], 48);
    assert!(
        lab.send(CLIENTS, &query).is_empty(),
        "the pipeline itself has answered the query"
    );
    let wanted = mld::Query {
        group: Some(group),
        v1: true,
        within_ms: 0,
    };
    assert_eq!(lab.requests, [Request::ListenerQuery(CLIENTS, wanted)]);
    let change = mld::MembershipChange::Listening;
    let sent = mld::reports(CL_MAC, Ipv6Addr::UNSPECIFIED, &[group], change, true);
    assert_eq!(sent[0][..6], [0x33, 0x33, 0xff, 0, 0, 0x80]);
    assert_eq!(
        Mac(sent[0][6..12]
            .try_into()
            .expect("the address has six bytes")),
        CL_MAC
    );
}

#[test]
fn reply_without_route_is_reported_to_server() {
    let mut lab = web(Forwarding::Nat);
    let nowhere: Ipv6Addr = "fdff::1".parse().expect("the address is valid");
    let server: SocketAddr = "[fd00:1::11]:8080".parse().expect("the address is valid");
    let IpAddr::V6(from) = server.ip() else {
        panic!()
    };
    let ip = segment6((from, 8080), (nowhere, 4000));
    let sent = lab.send(SERVERS, &ethernet(SV_MAC, GW_MAC, &ip));
    let (_, dst, kind, code, _) = error(&sent[0].1);
    assert_eq!((dst, kind, code), (server.ip(), 1, 0));
    assert_eq!(lab.now, Instant::from_secs(10));
}

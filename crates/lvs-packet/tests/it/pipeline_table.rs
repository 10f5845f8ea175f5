//! The frames that the pipeline sends for verdicts that the tests choose. The hexadecimal frames of
//! requests and their expected results were recorded from a kernel with IPVS; fields that vary
//! between runs (the identification of packets that the director creates, and the header checksum)
//! are compared as zero.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use crate::lab::{
    CL_MAC, CLIENTS, GW_MAC, HOST, Lab, SERVERS, SV_MAC, Service, hex, reply, server_mac, tcp, udp,
};
use lvs_core::tunnel::Tunnel;
use lvs_core::{AcceptReason, Forward, Forwarding, Protocol, Verdict};
use lvs_packet::drop::FrameDrop;
use lvs_packet::fragment::Cutter;
use lvs_packet::frame::{Frame, Offload, PartialChecksum, SegmentKind, Segments};
use lvs_packet::intercept::LocalClient;
use lvs_packet::net::PortId;
use lvs_packet::parse;
use lvs_packet::pipeline::{Env, Output, Request};
use lvs_packet::wire::checksum::Sum;
use lvs_packet::wire::{Mac, be16, ipv4, put16};
use proptest::prelude::*;

const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
const VIP: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 80);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 11);

fn web(method: Forwarding) -> Lab {
    Lab::new(&[
        Service::new(method, Protocol::TCP, "10.0.0.80:80", "10.1.0.11:8080"),
        Service::new(method, Protocol::UDP, "10.0.0.80:53", "10.1.0.11:5353"),
    ])
}

/// An Ethernet frame with the EtherType of IPv4, whatever the version of the packet.
fn ethernet(dst: Mac, src: Mac, ip: &[u8]) -> Vec<u8> {
    [&dst.0[..], &src.0, &[8, 0], ip].concat()
}

fn from_client(ip: &[u8]) -> Vec<u8> {
    ethernet(CL_MAC, GW_MAC, ip)
}

/// A verdict that forwards a packet without a connection to this server.
fn forward_to(addr: Ipv4Addr, port: u16) -> Forward {
    Forward {
        conn: None,
        server: None,
        method: Forwarding::Nat,
        target: (addr, port).into(),
        source: None,
        virt: (VIP, 80).into(),
        tunnel: Tunnel::Ipip,
        new: false,
        shift: None,
    }
}

fn dropped(lab: &Lab, reason: FrameDrop) -> u64 {
    lab.pipeline.counters.dropped_for(reason)
}

struct Case {
    name: &'static str,
    service: Service,
    port: PortId,
    frame: &'static str,
    want: &'static [(PortId, &'static str)],
    /// Positions of the bytes that are compared as zero.
    mask: &'static [usize],
}

/// Positions of the identification and the header checksum of packets that the dataplane creates.
const MADE: &[usize] = &[18, 19, 24, 25];

#[test]
fn recorded_frames_are_handled_as_by_kernel() {
    use Forwarding::{Nat, Route, Tunnel};
    use Protocol as P;
    let nat_udp = Service::new(Nat, P::UDP, "10.0.49.237:53", "10.1.0.67:5353");
    let nat_ttl = Service::new(Nat, P::UDP, "10.0.49.237:53", "10.1.0.67:53");
    let nat_tcp = Service::new(Nat, P::TCP, "10.0.49.237:443", "10.1.0.67:443");
    let none = Service::new(Nat, P::TCP, "10.0.49.237:443", "");
    let dr = Service::new(Route, P::TCP, "10.0.4.67:8080", "10.1.2.20:8080");
    let tun = Service::new(Tunnel, P::TCP, "10.0.18.101:8080", "10.1.24.237:8080");
    let tun_udp = Service::new(Tunnel, P::UDP, "10.0.18.101:53", "10.1.24.237:53");
    let cases = [
        Case {
            name: "NAT, request",
            service: nat_udp,
            port: CLIENTS,
            frame: "0200000000c10200000000c208004500001c000940004011ee9186278a220a0031ed4886003500086aec",
            want: &[(
                SERVERS,
                "02520a01004302000000005108004500001c000940003f11213b86278a220a010043488614e9000887e1",
            )],
            mask: &[],
        },
        Case {
            name: "NAT, reply",
            service: nat_udp,
            port: SERVERS,
            frame: "02000000005102520a01004308004500001c000a40004011203a0a01004386278a2214e94886000887e1",
            want: &[(
                CLIENTS,
                "0200000000c20200000000c108004500001c000a40003f11ef900a0031ed86278a220035488600086aec",
            )],
            mask: &[],
        },
        Case {
            name: "NAT, TTL runs out at the VIP",
            service: nat_ttl,
            port: CLIENTS,
            frame: "0200000000c10200000000c2080045000020001e400001112d7986278a220a0031ed48860035000c8a3e74746c31",
            want: &[(
                CLIENTS,
                "0200000000c20200000000c1080045c0003c9c270000400191a30a0031ed86278a220b0041540000000045000020001e400001112d7986278a220a0031ed48860035000c8a3e74746c31",
            )],
            mask: MADE,
        },
        Case {
            name: "NAT, TTL of a reply runs out",
            service: nat_ttl,
            port: SERVERS,
            frame: "02000000005102520a010043080045000020001f400001115f210a01004386278a2200354886000cbbe774746c31",
            want: &[(
                SERVERS,
                "02520a010043020000000051080045c0003c4d3400004001188a0a01fffe0a0100430b000fab0000000045000020001f400001115f210a01004386278a2200354886000cbbe774746c31",
            )],
            mask: MADE,
        },
        Case {
            name: "NAT, no server",
            service: none,
            port: CLIENTS,
            frame: "0200000000c10200000000c2080045000028002240004006ee7786278a220a0031ed488601bb83567f170000000050022000f6fc0000",
            want: &[(
                CLIENTS,
                "0200000000c20200000000c1080045c00044975a0000400196680a0031ed86278a220303494e0000000045000028002240004006ee7786278a220a0031ed488601bb83567f170000000050022000f6fc0000",
            )],
            mask: MADE,
        },
        Case {
            name: "NAT, ICMP error of the server",
            service: nat_tcp,
            port: SERVERS,
            frame: "02000000005102520a010043080045000038002d40004001200b0a01004386278a220303b04d0000000045000028002940003f06211a86278a220a010043488601bb83567f17",
            want: &[(
                CLIENTS,
                "0200000000c20200000000c1080045000038002d40003f01ef610a0031ed86278a220303b04d0000000045000028002940003f06ef7086278a220a0031ed488601bb83567f17",
            )],
            mask: &[],
        },
        Case {
            name: "DR",
            service: dr,
            port: CLIENTS,
            frame: "0200000000c10200000000c2080045000028007740004006b17fcf00ab960a0004436cea1f90ffd8187b0000000050022000623a0000",
            want: &[(
                SERVERS,
                "02520a010214020000000051080045000028007740003f06b27fcf00ab960a0004436cea1f90ffd8187b0000000050022000623a0000",
            )],
            mask: &[],
        },
        Case {
            name: "tunnel, TOS and DF copied",
            service: tun,
            port: CLIENTS,
            frame: "0200000000c10200000000c208004510003c009140004006c16a1ab841940a0012659c0f1f90016b10f500000000a0022000f60a0000020405b40402080af5eaf5590000000001030307",
            want: &[(
                SERVERS,
                "02520a0118ed020000000051080045100050000040003f040ead0a01fffe0a0118ed4510003c009140003f06c26a1ab841940a0012659c0f1f90016b10f500000000a0022000f60a0000020405b40402080af5eaf5590000000001030307",
            )],
            mask: &[],
        },
        Case {
            name: "tunnel, TTL",
            service: tun_udp,
            port: CLIENTS,
            frame: "0200000000c10200000000c208004500002000a040000311fe7c1ab841940a0012659c0f0035000c0a3974746c33",
            want: &[(
                SERVERS,
                "02520a0118ed0200000000510800450000340000400002044bd90a01fffe0a0118ed4500002000a040000211ff7c1ab841940a0012659c0f0035000c0a3974746c33",
            )],
            mask: &[],
        },
    ];
    for case in cases {
        let mut lab = Lab::new(&[case.service]);
        let zero = |mut bytes: Vec<u8>| {
            case.mask.iter().for_each(|at| bytes[*at] = 0);
            bytes
        };
        let got: Vec<_> = lab
            .send(case.port, &hex(case.frame))
            .into_iter()
            .map(|(port, bytes)| (port, zero(bytes)))
            .collect();
        let want: Vec<_> = case
            .want
            .iter()
            .map(|(port, text)| (*port, zero(hex(text))))
            .collect();
        assert_eq!(got, want, "{}", case.name);
        for (_, bytes) in lab.send(case.port, &hex(case.frame)) {
            parse::ipv4(&bytes[14..], false).expect("the sent header is valid");
        }
    }
}

#[test]
fn dataplane_answers_for_own_vip_like_a_host() {
    let mut lab = Lab::new(&[Service::new(
        Forwarding::Nat,
        Protocol::UDP,
        "10.0.49.237:443",
        "",
    )]);
    lab.own_vips();
    for (name, frame, want) in [
        (
            "SYN to an unserved port",
            "0200000000c10200000000c2080045000028002740004006ee7286278a220a0031ed4886000983567f170000000050022000f8ae0000",
            "0200000000c20200000000c1080045000028000040004006ee990a0031ed86278a22000948860000000083567f1850140000189c0000",
        ),
        (
            "stray ACK",
            "0200000000c10200000000c2080045000028002440004006ee7586278a220a0031ed488601bc83567f1720d5875d501020004ebb0000",
            "0200000000c20200000000c1080045000028000040004006ee990a0031ed86278a2201bc488620d5875d000000005004000071350000",
        ),
        (
            "echo request",
            "0200000000c10200000000c2080045000020002840004001ee7e86278a220a0031ed0800192d0001000170696e67",
            "0200000000c20200000000c108004500002000000000400100000a0031ed86278a220000212d0001000170696e67",
        ),
    ] {
        let mut got = lab.send(CLIENTS, &hex(frame));
        let mut want = hex(want);
        let (port, bytes) = got.pop().expect(name);
        parse::ipv4(&bytes[14..], false).expect("the sent header is valid");
        let mut bytes = bytes;
        for at in [18, 19, 24, 25] {
            bytes[at] = 0;
            want[at] = 0;
        }
        assert_eq!((port, bytes, got.len()), (CLIENTS, want, 0), "{name}");
    }
    // A reset is not answered; a datagram to a port without a service is answered with "port
    // unreachable".
    let mut rst = tcp((CLIENT, 4000), (Ipv4Addr::new(10, 0, 49, 237), 9), b"");
    rst[33] = 0x04;
    assert!(lab.send(CLIENTS, &from_client(&rst)).is_empty());
    let got = lab.send(
        CLIENTS,
        &from_client(&udp(
            (CLIENT, 4000),
            (Ipv4Addr::new(10, 0, 49, 237), 9),
            b"x",
        )),
    );
    assert_eq!(got[0].1[34..36], [3, 3]);
}

#[test]
fn packet_without_connection_is_reinjected_only_if_intercepted() {
    let stray = from_client(&tcp((CLIENT, 4000), (VIP, 80), b""));
    let other = from_client(&tcp((CLIENT, 4000), (VIP, 22), b""));
    let direct = ethernet(
        SV_MAC,
        server_mac(SERVER),
        &tcp((SERVER, 8080), (CLIENT, 4000), b"direct"),
    );
    let download = ethernet(
        SV_MAC,
        server_mac(SERVER),
        &tcp((SERVER, 45_000), (CLIENT, 80), b"GET"),
    );
    let mut lab = web(Forwarding::Nat);
    lab.decide.verdict = Some(Verdict::Accept(AcceptReason::NoConnection));
    // Intercepted packets are reinjected through the TUN device, without the link header.
    assert_eq!(lab.send(CLIENTS, &stray), [(HOST, stray[14..].to_vec())]);
    assert_eq!(lab.send(SERVERS, &direct), [(HOST, direct[14..].to_vec())]);
    // The host has its own copy of packets that are not intercepted.
    assert!(lab.send(CLIENTS, &other).is_empty());
    assert!(lab.send(SERVERS, &download).is_empty());
    assert_eq!(
        (lab.pipeline.counters.given_back, lab.pipeline.counters.left),
        (2, 2)
    );
    // The host also forwards a reply that is not translated.
    lab.decide.verdict = Some(reply(None));
    assert!(lab.send(SERVERS, &download).is_empty());
    // A frame to another link-layer address is not for the director.
    lab.decide.verdict = None;
    let mut foreign = stray.clone();
    foreign[5] ^= 1;
    assert!(lab.send(CLIENTS, &foreign).is_empty());
    assert_eq!(lab.pipeline.counters.left, 4);
}

#[test]
fn packet_of_local_client_waits_for_interception() {
    let mut lab = web(Forwarding::Nat);
    lab.own_vips();
    let local = (crate::lab::CL_ADDR, 40_000);
    // The packet waits until the server's reply is intercepted.
    assert!(lab.send(HOST, &tcp(local, (VIP, 80), b"hello")).is_empty());
    let client = LocalClient {
        protocol: Protocol::TCP,
        server: SocketAddr::from((SERVER, 8080)),
        local: SocketAddr::from(local),
    };
    assert_eq!(lab.requests, [Request::InterceptLocalClient(client)]);
    let other = LocalClient {
        local: SocketAddr::from((crate::lab::CL_ADDR, 40_001)),
        ..client
    };
    assert!(lab.intercept_client(other).is_empty());
    let got = lab.intercept_client(client);
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].0, SERVERS);
    lab.requests.clear();
    lab.send(HOST, &tcp(local, (VIP, 80), b"again"));
    assert!(lab.requests.is_empty());
    assert_answer_returns(&mut lab, local, HOST);
    // A packet of the host to another host that was routed into the dataplane is dropped.
    assert!(lab.send(HOST, &tcp(local, (CLIENT, 80), b"")).is_empty());
    assert_eq!(dropped(&lab, FrameDrop::HostStray), 1);
}

#[test]
fn waiting_packet_of_local_client_without_route_counts_as_no_route() {
    let mut lab = web(Forwarding::Nat);
    lab.own_vips();
    let local = (crate::lab::CL_ADDR, 40_000);
    lab.send(HOST, &tcp(local, (VIP, 80), b"hello"));
    let [Request::InterceptLocalClient(client)] = lab.requests[..] else {
        panic!("{:?}", lab.requests)
    };
    lab.net.routes.clear();
    assert!(lab.intercept_client(client).is_empty());
    assert_eq!(dropped(&lab, FrameDrop::NoRoute), 1);
    assert_eq!(lab.pipeline.held.dropped, 0);
    assert_eq!(lab.pipeline.counters.held, 0);
}

/// Checks that the server's answer to a client on this host has the VIP as its source and is sent
/// on `port`.
#[track_caller]
fn assert_answer_returns(lab: &mut Lab, local: (Ipv4Addr, u16), port: PortId) {
    let back = ethernet(
        SV_MAC,
        server_mac(SERVER),
        &tcp((SERVER, 8080), local, b"there"),
    );
    let got = lab.send(SERVERS, &back);
    assert_eq!(got.len(), 1);
    let packet = parse::ipv4(&got[0].1, false).expect("the bytes are a valid packet");
    assert_eq!(
        (got[0].0, packet.src, packet.ports),
        (port, VIP.into(), Some((80, local.1)))
    );
}

/// The port on which the host's own packets to its addresses arrive.
const LOCAL: PortId = PortId(3);

/// A lab whose host has the VIP; the host's own packets to the VIP arrive on [`LOCAL`].
fn with_local_port(method: Forwarding) -> Lab {
    let mut lab = web(method);
    lab.net.ports.push(lab.net.ports[HOST.index()]);
    lab.net.local_port = Some(LOCAL);
    lab
}

#[test]
fn reply_to_client_on_host_uses_local_port() {
    let mut lab = with_local_port(Forwarding::Nat);
    let local = (VIP, 40_000);
    lab.send(LOCAL, &tcp(local, (VIP, 80), b"hello"));
    let [Request::InterceptLocalClient(client)] = lab.requests[..] else {
        panic!("{:?}", lab.requests)
    };
    let got = lab.intercept_client(client);
    let [(SERVERS, frame)] = &got[..] else {
        panic!("{got:?}")
    };
    let packet = parse::ipv4(&frame.bytes()[14..], false).expect("the bytes are a valid packet");
    assert_eq!(
        (packet.src, packet.dst, packet.ports),
        (VIP.into(), SERVER.into(), Some((40_000, 8080)))
    );
    assert_answer_returns(&mut lab, local, LOCAL);
}

#[test]
fn packet_of_host_to_itself_is_returned_unchanged() {
    // The packet belongs to no service, or is for a server on the host without translation.
    for verdict in [
        Verdict::Accept(AcceptReason::NoService),
        Verdict::Forward(Forward {
            method: Forwarding::Local,
            ..forward_to(VIP, 80)
        }),
    ] {
        let mut lab = with_local_port(Forwarding::Nat);
        lab.decide.verdict = Some(verdict);
        let packet = tcp((VIP, 40_000), (VIP, 81), b"hello");
        assert_eq!(lab.send(LOCAL, &packet), [(LOCAL, packet)]);
    }
}

#[test]
fn request_of_host_to_server_on_host_keeps_client_address() {
    let mut lab = with_local_port(Forwarding::Nat);
    lab.net.local.insert(SERVER.into());
    let got = lab.send(LOCAL, &tcp((VIP, 40_000), (VIP, 80), b"hello"));
    let [(LOCAL, bytes)] = &got[..] else {
        panic!("{got:?}")
    };
    let packet = parse::ipv4(bytes, false).expect("the bytes are a valid packet");
    assert_eq!(
        (packet.src, packet.dst, packet.ports),
        (VIP.into(), SERVER.into(), Some((40_000, 8080)))
    );
    // The reply is sent on the same port.
    let got = lab.send(LOCAL, &tcp((SERVER, 8080), (VIP, 40_000), b"there"));
    let [(LOCAL, bytes)] = &got[..] else {
        panic!("{got:?}")
    };
    let packet = parse::ipv4(bytes, false).expect("the bytes are a valid packet");
    assert_eq!((packet.src, packet.ports), (VIP.into(), Some((80, 40_000))));
}

/// The host drops a packet whose source is one of the host's addresses, unless it arrives on the
/// port for the host's own packets. The dataplane must therefore not send a packet of another host
/// on that port.
#[test]
fn spoofed_packet_with_host_address_is_never_sent_to_lvs_local0() {
    let mut lab = with_local_port(Forwarding::Nat);
    lab.intercept.everything = true;
    for from in [VIP, crate::lab::CL_ADDR, crate::lab::SV_ADDR] {
        for to in [VIP, crate::lab::CL_ADDR] {
            for verdict in [
                None,
                Some(reply(None)),
                Some(Verdict::Accept(AcceptReason::NoService)),
            ] {
                lab.decide.verdict = verdict;
                let packet = ethernet(CL_MAC, GW_MAC, &tcp((from, 80), (to, 7000), b"forged"));
                let got = lab.send(CLIENTS, &packet);
                assert!(
                    got.iter().all(|(port, _)| *port != LOCAL),
                    "a forged packet from {from} to {to} was sent to this host"
                );
            }
        }
    }
}

#[test]
fn icmp_error_to_client_on_host_uses_local_port() {
    let mut lab = with_local_port(Forwarding::Nat);
    lab.decide.services.iter_mut().for_each(|s| s.server = None);
    let got = lab.send(LOCAL, &tcp((VIP, 40_000), (VIP, 80), b"hello"));
    let [(LOCAL, bytes)] = &got[..] else {
        panic!("{got:?}")
    };
    assert_eq!(
        (bytes[9], bytes[20], bytes[21]),
        (1, 3, 3),
        "the answer is not \"port unreachable\""
    );
    assert_eq!((ipv4::src(bytes), ipv4::dst(bytes)), (VIP, VIP));
}

#[test]
fn multicast_packet_of_the_host_is_not_counted_as_drop() {
    let mut lab = web(Forwarding::Nat);
    // A multicast listener report, as every host with IPv6 sends on each device.
    let mut report = vec![0x60, 0, 0, 0, 0, 36, 0, 1];
    report.extend([0; 16]);
    report.extend(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16).octets());
    report.extend([58, 0, 5, 2, 0, 0, 1, 0]);
    report.extend([0; 28]);
    assert!(lab.send(HOST, &report).is_empty());
    let local = (crate::lab::CL_ADDR, 5353);
    for group in [Ipv4Addr::new(224, 0, 0, 5), Ipv4Addr::BROADCAST] {
        assert!(lab.send(HOST, &tcp(local, (group, 5353), b"")).is_empty());
    }
    assert_eq!(lab.pipeline.counters.left, 3);
    for &reason in FrameDrop::ALL {
        assert_eq!(dropped(&lab, reason), 0, "{reason}");
    }
}

fn aggregate(ip: &mut [u8], size: u16) -> Offload {
    let sum = Sum::ZERO
        .pseudo(
            IpAddr::V4(ipv4::src(ip)),
            IpAddr::V4(ipv4::dst(ip)),
            6,
            ip.len() - 20,
        )
        .fold();
    put16(ip, 36, sum);
    Offload {
        checksum: Some(PartialChecksum {
            start: 34,
            offset: 16,
        }),
        segments: Some(Segments {
            kind: SegmentKind::Tcp4,
            size,
            header_len: 54,
            ecn: false,
        }),
        verified: false,
    }
}

fn transport_right(ip: &[u8]) -> bool {
    let p = parse::ipv4(ip, false).expect("the bytes are a valid packet");
    Sum::ZERO
        .pseudo(p.src, p.dst, p.protocol.0, p.len - p.l4)
        .bytes(&ip[p.l4..p.len])
        .finish()
        == 0
}

#[test]
fn super_packets_are_forwarded_whole_and_segmented_for_tunnels() {
    let data: Vec<u8> = (0..60_000u32).map(|i| i.to_le_bytes()[0]).collect();
    let mut ip = tcp((CLIENT, 4000), (VIP, 80), &data);
    let offload = aggregate(&mut ip, 1440);

    let mut lab = web(Forwarding::Nat);
    let got = lab.send_offloaded(CLIENTS, &from_client(&ip), offload);
    assert_eq!(got.len(), 1);
    let mut whole = got.into_iter().next().expect("a frame was sent").1;
    assert_eq!(whole.offload, offload);
    assert!(whole.pull_front(14));
    lvs_packet::segment::finish_checksum(&mut whole)
        .expect("the checksum field is inside the packet");
    assert!(transport_right(whole.bytes()));

    // A port without offload gets segments.
    crate::lab::set_offload(&mut lab.net, false);
    let got = lab.send_offloaded(CLIENTS, &from_client(&ip), offload);
    assert_eq!(got.len(), 60_000usize.div_ceil(1440));
    assert!(
        got.iter()
            .all(|(_, f)| transport_right(&f.bytes()[14..]) && f.offload == Offload::default())
    );

    // Segments of 1480 bytes are longer than the MTU with an outer header, and have "don't
    // fragment": the client receives an error.
    let mut lab = web(Forwarding::Tunnel);
    lab.net.port_mut(SERVERS).mtu = 1490;
    let got = lab.send_offloaded(CLIENTS, &from_client(&ip), offload);
    assert_eq!(got.len(), 1);
    assert_eq!(
        (
            got[0].0,
            &got[0].1.bytes()[34..36],
            be16(got[0].1.bytes(), 40)
        ),
        (CLIENTS, &[3, 4][..], 1470)
    );
    assert_eq!(dropped(&lab, FrameDrop::TooBig), 1);

    let mut lab = web(Forwarding::Tunnel);
    let got = lab.send_offloaded(CLIENTS, &from_client(&ip), offload);
    assert_eq!(got.len(), 60_000usize.div_ceil(1440));
    let mut joined = Vec::new();
    for (port, frame) in &got {
        let outer =
            parse::ipv4(&frame.bytes()[14..], false).expect("the bytes are a valid outer header");
        assert_eq!(
            (*port, outer.protocol, outer.dst),
            (SERVERS, Protocol(4), SERVER.into())
        );
        assert!(outer.len <= 1500 && frame.len() == outer.len + 14);
        let inner = &frame.bytes()[34..];
        assert!(transport_right(inner));
        joined.extend_from_slice(&inner[40..]);
    }
    assert_eq!(joined, data);
}

#[test]
fn icmp_error_about_tunnel_packet_reaches_client() {
    let mut lab = web(Forwarding::Tunnel);
    let request = udp((CLIENT, 4000), (VIP, 53), &[7; 1300]);
    let tunnelled = lab.send(CLIENTS, &from_client(&request));
    let router = Ipv4Addr::new(10, 1, 200, 9);
    let complaint = |mtu: u16| {
        let mut frame = Frame::new();
        let kind = lvs_packet::wire::icmp::ErrorKind::FragmentationNeeded(mtu);
        assert!(lvs_packet::wire::icmp::error(
            &mut frame,
            kind,
            &tunnelled[0].1[14..],
            router.into(),
            1
        ));
        ethernet(SV_MAC, server_mac(router), frame.bytes())
    };
    // The first error reports the MTU of the route, which the packet used. When a packet has used
    // the path MTU, errors report the path MTU.
    let got = lab.send(SERVERS, &complaint(1300));
    assert_eq!(got.len(), 1);
    let reported = &got[0].1[14..];
    assert_eq!(
        (got[0].0, ipv4::src(reported), ipv4::dst(reported)),
        (CLIENTS, VIP, CLIENT)
    );
    assert_eq!((&reported[20..22], be16(reported, 26)), (&[3, 4][..], 1480));
    assert_eq!(reported[28 + 12..28 + 28], request[12..28]);
    let got = lab.send(CLIENTS, &from_client(&request));
    assert_eq!((got[0].0, be16(&got[0].1, 40)), (CLIENTS, 1280));
    let got = lab.send(SERVERS, &complaint(1300));
    assert_eq!(be16(&got[0].1, 40), 1280);
    // This director has sent no packet through a tunnel to the server.
    let mut other = web(Forwarding::Tunnel);
    assert!(other.send(SERVERS, &complaint(1300)).is_empty());
}

/// The kernel answers such a reply of any length with "fragmentation needed", because its
/// reassembly at FORWARD does not record that the sender had fragmented it.
#[test]
fn reply_in_fragments_with_dont_fragment_passes() {
    let data = [7; 1200];
    let mut ip = udp((SERVER, 5353), (CLIENT, 4000), &data);
    put16(&mut ip, 6, 0);
    ipv4::finish_header(&mut ip);
    let mut lab = web(Forwarding::Nat);
    let cutter = Cutter::v4(&ip, 900, None, true).expect("the packet can be fragmented");
    let pieces: Vec<_> = cutter.frames().collect();
    let mut got = Vec::new();
    for piece in &pieces {
        let frame = ethernet(SV_MAC, server_mac(SERVER), piece.bytes());
        got.extend(lab.send(SERVERS, &frame));
    }
    assert_eq!(got.len(), 2);
    for (port, frame) in &got {
        assert_eq!((*port, ipv4::src(&frame[14..])), (CLIENTS, VIP));
        assert_eq!(be16(frame, 20) & ipv4::DF, ipv4::DF);
    }
}

#[test]
fn fragmented_packet_is_forwarded_in_fragments() {
    let data: Vec<u8> = (0..4000u32).map(|i| i.to_le_bytes()[0]).collect();
    let mut ip = udp((CLIENT, 4000), (VIP, 53), &data);
    put16(&mut ip, 6, 0);
    ipv4::finish_header(&mut ip);
    let cutter = Cutter::v4(&ip, 1000, None, false).expect("the packet can be fragmented");
    let mut pieces: Vec<_> = cutter.frames().collect();
    let mut lab = web(Forwarding::Nat);
    let last = pieces.pop().expect("several fragments exist");
    for piece in &pieces {
        assert!(lab.send(CLIENTS, &from_client(piece.bytes())).is_empty());
    }
    let got = lab.send(CLIENTS, &from_client(last.bytes()));
    assert_eq!(got.len(), pieces.len() + 1);
    assert!(
        got.iter()
            .all(|(port, f)| *port == SERVERS && f.len() <= 1014)
    );
    let c = &lab.pipeline.counters;
    assert_eq!(
        (c.received, c.reassembled, c.fragments, c.sent),
        (5, 1, 5, 1)
    );
    // Fragments that do not concern a service are passed to the host.
    let mut other = udp((CLIENT, 1), (Ipv4Addr::new(10, 1, 7, 7), 9), b"12345678");
    put16(&mut other, 6, ipv4::MF);
    ipv4::finish_header(&mut other);
    assert!(lab.send(CLIENTS, &from_client(&other)).is_empty());
    assert_eq!(lab.pipeline.counters.left, 1);
}

#[test]
fn packet_to_unknown_neighbour_waits_for_address_and_is_dropped_without_answer() {
    let mut lab = web(Forwarding::Nat);
    lab.net.all_neighbours = None;
    let request = from_client(&tcp((CLIENT, 4000), (VIP, 80), b"x"));
    for _ in 0..3 {
        assert!(lab.send(CLIENTS, &request).is_empty());
    }
    assert_eq!(lab.requests, [Request::Resolve(SERVERS, SERVER.into())]);
    let mut out = Output::new();
    let known = (SERVERS, SERVER.into());
    lab.net.neighbours.insert(known, server_mac(SERVER));
    let env = Env::new(&lab.net, &lab.intercept);
    lab.pipeline.neighbours_resolved(&env, &mut out);
    let sent = out.frames(SERVERS);
    assert_eq!(sent.len(), 3);
    assert_eq!(sent[0].bytes()[..6], server_mac(SERVER).0);
    assert_eq!(
        (lab.pipeline.counters.held, lab.pipeline.counters.released),
        (3, 3)
    );
    // If no host answers, the waiting packet is dropped.
    lab.net.neighbours.clear();
    lab.send(CLIENTS, &request);
    lab.pipeline.expire(lab.now + Duration::from_secs(4));
    assert_eq!((lab.pipeline.held.len(), lab.pipeline.held.dropped), (0, 1));
}

#[test]
fn arp_request_for_own_address_is_answered_and_conflict_is_reported() {
    let mut lab = web(Forwarding::Nat);
    let mut ask = lvs_packet::arp::gratuitous(GW_MAC, crate::lab::GW_ADDR).to_vec();
    ask[38..42].copy_from_slice(&VIP.octets());
    assert!(
        lab.send(CLIENTS, &ask).is_empty(),
        "the dataplane has answered for an address of the host"
    );
    lab.own_vips();
    let got = lab.send(CLIENTS, &ask);
    assert_eq!(got.len(), 1);
    let answer = lvs_packet::arp::parse(&got[0].1).expect("the frame is an ARP message");
    assert_eq!(
        (answer.request, answer.sender, answer.sender_mac),
        (false, VIP, CL_MAC)
    );
    // Another host announces the VIP.
    lab.send(CLIENTS, &lvs_packet::arp::gratuitous(GW_MAC, VIP));
    assert_eq!(
        lab.requests,
        [Request::AddressConflict {
            port: CLIENTS,
            addr: VIP.into(),
            mac: GW_MAC
        }]
    );
    // Another host announces an address of this host.
    let own = Ipv4Addr::new(192, 0, 2, 77);
    lab.net.local.insert(own.into());
    lab.requests.clear();
    lab.send(CLIENTS, &lvs_packet::arp::gratuitous(GW_MAC, own));
    assert_eq!(
        lab.requests,
        [Request::AddressConflict {
            port: CLIENTS,
            addr: own.into(),
            mac: GW_MAC
        }]
    );
}

#[test]
fn padding_of_frame_is_removed_and_invalid_ip_headers_are_dropped() {
    let mut lab = web(Forwarding::Nat);
    let ip = tcp((CLIENT, 4000), (VIP, 80), b"");
    let mut padded = from_client(&ip);
    padded.resize(60, 0xa5);
    assert_eq!(lab.send(CLIENTS, &padded)[0].1.len(), 54);
    for (at, value, reason) in [
        (10, 0xff, FrameDrop::IpChecksum),
        (0, 0x43, FrameDrop::IpHeaderLength),
        (0, 0x65, FrameDrop::IpVersion),
    ] {
        let mut bad = from_client(&ip);
        bad[14 + at] = value;
        assert!(lab.send(CLIENTS, &bad).is_empty());
        assert_eq!(dropped(&lab, reason), 1, "{reason}");
    }
    assert!(lab.send(CLIENTS, &from_client(&ip)[..44]).is_empty());
    assert_eq!(dropped(&lab, FrameDrop::Truncated), 1);
}

proptest! {
    /// Arbitrary changes of a valid frame: the dataplane does not panic, and the lab checks that it
    /// counts each frame once.
    #[test]
    fn pipeline_does_not_panic_on_mutated_frames(method in 0u8..3, kind in 0u8..5, edits in proptest::collection::vec((0usize..200, any::<u8>()), 0..6),
                 cut in proptest::option::of(0usize..200), repair: bool, own: bool, port in 0u16..3,
                 offload in proptest::option::of((0u16..200, 0u16..40, 0u16..2000, any::<bool>()))) {
        let method = [Forwarding::Nat, Forwarding::Route, Forwarding::Tunnel][usize::from(method)];
        let mut lab = web(method);
        if own {
            lab.own_vips();
        }
        let mut ip = match kind {
            0 => tcp((CLIENT, 4000), (VIP, 80), &[1; 100]),
            1 => udp((CLIENT, 4000), (VIP, 53), &[2; 100]),
            2 => tcp((SERVER, 8080), (CLIENT, 4000), &[3; 60]),
            3 => hex("450000380040400040010000c00002070a0000500303000000000000450000281234400040060000c00002070a01000b1f90aabb00000001"),
            _ => udp((CLIENT, 4000), (VIP, 999), b""),
        };
        for (at, value) in edits {
            if let Some(byte) = ip.get_mut(at) {
                *byte = value;
            }
        }
        if let Some(cut) = cut {
            ip.truncate(cut);
        }
        if repair && ip.len() >= 20 && ipv4::header_len(&ip) <= ip.len() {
            ipv4::finish_header(&mut ip);
        }
        let bytes = match port {
            0 => from_client(&ip),
            1 => ethernet(SV_MAC, GW_MAC, &ip),
            _ => ip,
        };
        let mut frame = Frame::from_bytes(&bytes);
        if let Some((start, offset, size, udp)) = offload {
            let kind = if udp { SegmentKind::Udp } else { SegmentKind::Tcp4 };
            frame.offload.checksum = Some(PartialChecksum { start, offset });
            frame.offload.segments = Some(Segments { kind, size, header_len: 0, ecn: false });
        }
        for _ in 0..2 {
            for (port, frame) in lab.send_frame(PortId(port), frame.clone()) {
                let skip = if port == HOST { 0 } else { 14 };
                if frame.bytes().get(12..14) != Some(&[8, 6]) || skip == 0 {
                    prop_assert!(parse::ipv4(&frame.bytes()[skip..], true).is_ok());
                }
            }
        }
    }
}

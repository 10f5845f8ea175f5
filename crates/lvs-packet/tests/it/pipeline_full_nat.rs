//! Full NAT with a real director: addresses, ports, checksums and payload of the sent packets.

use std::net::{IpAddr, SocketAddr};

use crate::lab::{
    CL_MAC, CLIENTS, SERVERS, SV_MAC, Table, ethernet, header, sent, table, tcp, udp,
};
use lvs_core::full_nat::LocalAddress;
use lvs_core::{
    Control, Director, Family, Forwarding, Instant, Options, Protocol, ServerConfig, ServiceConfig,
    ServiceKey,
};
use lvs_packet::frame::{Frame, Offload, PartialChecksum, SegmentKind, Segments};
use lvs_packet::intercept::Intercept;
use lvs_packet::net::PortId;
use lvs_packet::pipeline::{Env, Output, Pipeline};
use lvs_packet::segment::finish_checksum;
use lvs_packet::settings::Settings;
use lvs_packet::wire::{Mac, ip_dst, ip_src, tcp};
use proptest::prelude::*;

const CLIENT: [&str; 2] = ["192.0.2.7:40000", "[2001:db8::7]:40000"];
const VIP: [&str; 2] = ["10.0.0.80", "fd00:50::80"];
const SERVER: [&str; 2] = ["10.1.0.11", "fd00:1::11"];
const LOCAL: [&str; 2] = ["10.1.0.2", "fd00:1::2"];

struct Bed {
    net: Table,
    intercept: Intercept,
    decide: Director,
    pipeline: Pipeline,
    now: Instant,
}

fn addr(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().expect("the address is valid"), port)
}

fn services(control: &mut Control, six: usize) {
    for (protocol, port) in [(Protocol::TCP, 80), (Protocol::UDP, 53)] {
        let key = ServiceKey::Address {
            protocol,
            addr: addr(VIP[six], port),
        };
        let family = if six == 0 { Family::V4 } else { Family::V6 };
        control
            .add_service(key, ServiceConfig::new(family, "rr"), None)
            .expect("the service can be added");
        let server = ServerConfig::new(1, Forwarding::FullNat);
        control
            .add_server(&key, addr(SERVER[six], 8000 + port), &server, Instant::ZERO)
            .expect("the server can be added");
    }
}

impl Bed {
    /// A lab whose local addresses are addresses of the host, or with `own` addresses that the
    /// dataplane owns.
    fn new(own: bool) -> Self {
        let mut director = Director::new(Options {
            max_connections: 1 << 12,
            ..Options::default()
        });
        let pool =
            LOCAL.map(|local| LocalAddress::new(local.parse().expect("the address is valid")));
        director
            .control
            .set_local_pool(pool.to_vec(), false)
            .expect("the local addresses are valid");
        services(&mut director.control, 0);
        services(&mut director.control, 1);
        let mut intercept = Intercept::of(&director.control, &Intercept::default());
        let mut net = table();
        for ip in VIP {
            let ip: IpAddr = ip.parse().expect("the address is valid");
            net.vips.insert(ip);
            net.local.insert(ip);
        }
        for local in pool {
            if own {
                net.own.insert(local.addr);
                intercept.own_vips.insert(local.addr);
            } else {
                net.local.insert(local.addr);
                intercept.local_addresses.insert(local.addr);
            }
        }
        Self {
            net,
            intercept,
            decide: director,
            pipeline: Pipeline::alone(Settings::UNLIMITED),
            now: Instant::from_secs(1),
        }
    }

    fn send(&mut self, port: PortId, ip: &[u8], offload: Offload) -> Vec<(PortId, Frame)> {
        let mac = if port == CLIENTS { CL_MAC } else { SV_MAC };
        let mut frames = [Frame::from_bytes(&ethernet(mac, Mac([2; 6]), ip))];
        frames[0].offload = offload;
        let env = Env::new(&self.net, &self.intercept);
        let mut out = Output::new();
        let sent = sent(&mut self.pipeline, &mut out, |pipeline, out| {
            pipeline.process(port, &mut frames, &env, &mut self.decide, self.now, out);
        });
        assert!(out.requests.is_empty(), "{:?}", out.requests);
        sent
    }

    /// Passes a packet to the pipeline, and returns the only packet that is sent, without its link
    /// header.
    fn through(&mut self, port: PortId, ip: &[u8], offload: Offload) -> (PortId, Frame) {
        let mut sent = self.send(port, ip, offload);
        assert_eq!(sent.len(), 1, "not exactly one packet was sent");
        let (to, mut frame) = sent.remove(0);
        assert!(frame.pull_front(14));
        (to, frame)
    }
}

fn packet(is_udp: bool, src: SocketAddr, dst: SocketAddr, flags: &str, payload: &[u8]) -> Vec<u8> {
    match (is_udp, flags) {
        (true, _) => udp(src, dst, payload),
        (false, "syn") => {
            let mut ip = Vec::new();
            let packet = header(src.ip(), dst.ip()).tcp(src.port(), dst.port(), 1000, 500);
            let written = packet.syn().write(&mut ip, payload);
            written.expect("writing to a vector succeeds");
            ip
        }
        _ => tcp(src, dst, payload),
    }
}

fn ends(ip: &[u8]) -> (SocketAddr, SocketAddr) {
    let l4 = if ip[0] >> 4 == 4 { 20 } else { 40 };
    let port = |at: usize| u16::from_be_bytes([ip[at], ip[at + 1]]);
    (
        SocketAddr::new(ip_src(ip), port(l4)),
        SocketAddr::new(ip_dst(ip), port(l4 + 2)),
    )
}

fn assert_right(ip: &[u8], udp: bool) {
    let l4 = if ip[0] >> 4 == 4 { 20 } else { 40 };
    let protocol = if udp { 17 } else { 6 };
    assert!(
        tcp::checksum_ok(ip, l4, protocol),
        "the transport checksum is wrong"
    );
    if ip[0] >> 4 == 4 {
        let sum = ip[..20].chunks(2).fold(0u32, |sum, word| {
            sum + u32::from(u16::from_be_bytes([word[0], word[1]]))
        });
        assert_eq!(
            (sum & 0xffff) + (sum >> 16),
            0xffff,
            "the checksum of the IP header is wrong"
        );
    }
}

#[test]
fn full_nat_translates_requests_and_replies_of_both_families_and_protocols() {
    for own in [false, true] {
        for six in [0, 1] {
            for udp in [false, true] {
                let mut bed = Bed::new(own);
                let (virt, server) = if udp { (53, 8053) } else { (80, 8080) };
                let (client, vip, server) = (
                    CLIENT[six].parse().expect("the address is valid"),
                    addr(VIP[six], virt),
                    addr(SERVER[six], server),
                );
                let request = packet(udp, client, vip, "syn", b"question");
                let (to, frame) = bed.through(CLIENTS, &request, Offload::default());
                let (local, dst) = ends(frame.bytes());
                assert_eq!((to, dst), (SERVERS, server));
                assert_eq!(local.ip(), addr(LOCAL[six], 0).ip());
                assert_right(frame.bytes(), udp);
                assert!(frame.bytes().ends_with(b"question"));

                let reply = packet(udp, server, local, "ack", b"answer");
                let (to, frame) = bed.through(SERVERS, &reply, Offload::default());
                assert_eq!((to, ends(frame.bytes())), (CLIENTS, (vip, client)));
                assert_right(frame.bytes(), udp);
                assert!(frame.bytes().ends_with(b"answer"));

                // A packet from another port of the server is not a reply: it is passed to the
                // host, or answered by the dataplane if the dataplane owns the local address.
                let stray = packet(udp, addr(SERVER[six], 9), local, "ack", b"x");
                let sent = bed.send(SERVERS, &stray, Offload::default());
                assert!(sent.iter().all(|(to, _)| *to == SERVERS), "{sent:?}");
                assert_eq!(
                    sent.len(),
                    usize::from(own),
                    "an own address was not answered, or an address of the host was"
                );
            }
        }
    }
}

#[test]
fn full_nat_translates_icmp_errors_of_server_and_client_and_their_quoted_packets() {
    for six in [0, 1] {
        let mut bed = Bed::new(true);
        let (client, vip, server) = (
            CLIENT[six].parse().expect("the address is valid"),
            addr(VIP[six], 53),
            addr(SERVER[six], 8053),
        );
        let request = packet(true, client, vip, "", b"question");
        let (_, forwarded) = bed.through(CLIENTS, &request, Offload::default());
        let (local, _) = ends(forwarded.bytes());
        let error = |src: SocketAddr, dst: SocketAddr, about: &[u8]| {
            let mut ip = Vec::new();
            let start = header(src.ip(), dst.ip());
            if six == 0 {
                let header = etherparse::icmpv4::DestUnreachableHeader::Port;
                let message = etherparse::Icmpv4Type::DestinationUnreachable(header);
                start.icmpv4(message).write(&mut ip, about)
            } else {
                let code = etherparse::icmpv6::DestUnreachableCode::Port;
                let message = etherparse::Icmpv6Type::DestinationUnreachable(code);
                start.icmpv6(message).write(&mut ip, about)
            }
            .expect("writing to a vector succeeds");
            ip
        };
        let l4 = if six == 0 { 20 } else { 40 };
        let check = |ip: &[u8]| {
            let sliced =
                etherparse::SlicedPacket::from_ip(ip).expect("the bytes are a valid packet");
            match sliced.transport.expect("the packet has a transport header") {
                etherparse::TransportSlice::Icmpv4(message) => assert!(message.checksum() != 0),
                etherparse::TransportSlice::Icmpv6(message) => {
                    let octets = |addr: IpAddr| match addr {
                        IpAddr::V6(addr) => addr.octets(),
                        IpAddr::V4(_) => panic!("the address is not IPv6"),
                    };
                    assert!(message.is_checksum_valid(octets(ip_src(ip)), octets(ip_dst(ip))));
                }
                other => panic!("{other:?}"),
            }
        };
        // The server reports that the port is closed.
        let complaint = error(
            addr(SERVER[six], 0),
            SocketAddr::new(local.ip(), 0),
            forwarded.bytes(),
        );
        let (to, reported) = bed.through(SERVERS, &complaint, Offload::default());
        let ip = reported.bytes();
        check(ip);
        assert_eq!(
            (to, ip_src(ip), ip_dst(ip)),
            (CLIENTS, vip.ip(), client.ip())
        );
        assert_eq!(
            ends(&ip[l4 + 8..]),
            (client, vip),
            "the error does not quote the packet that the client sent"
        );

        // The client reports that it has closed its port.
        let reply = packet(true, server, local, "", b"answer");
        let (_, answered) = bed.through(SERVERS, &reply, Offload::default());
        let complaint = error(client, vip, answered.bytes());
        let (to, reported) = bed.through(CLIENTS, &complaint, Offload::default());
        let ip = reported.bytes();
        check(ip);
        assert_eq!(
            (to, ip_src(ip), ip_dst(ip)),
            (SERVERS, local.ip(), server.ip())
        );
        assert_eq!(
            ends(&ip[l4 + 8..]),
            (server, local),
            "the error does not quote the packet that the server sent"
        );
    }
}

#[test]
fn full_nat_super_packet_passes_whole() {
    let mut bed = Bed::new(true);
    let (client, vip) = (
        CLIENT[0].parse().expect("the address is valid"),
        addr(VIP[0], 80),
    );
    let syn = packet(false, client, vip, "syn", b"");
    bed.through(CLIENTS, &syn, Offload::default());
    let large = packet(false, client, vip, "ack", &[7; 20_000]);
    let offload = Offload {
        checksum: Some(PartialChecksum {
            start: 34,
            offset: 16,
        }),
        segments: Some(Segments {
            kind: SegmentKind::Tcp4,
            size: 1448,
            header_len: 54,
            ecn: false,
        }),
        ..Offload::default()
    };
    let sent = bed.send(CLIENTS, &large, offload);
    assert_eq!(sent.len(), 1);
    let frame = &sent[0].1;
    assert!(frame.offload.segments.is_some() && frame.offload.checksum.is_some());
    assert_eq!(frame.len(), large.len() + 14);
}

proptest! {
    #[test]
    fn full_nat_keeps_checksums_correct(
        payload in proptest::collection::vec(any::<u8>(), 0..600), six in 0usize..2, udp: bool, own: bool, unfinished: bool
    ) {
        let mut bed = Bed::new(own);
        let (virt, port) = if udp { (53, 8053) } else { (80, 8080) };
        let (client, vip, server) =
            (CLIENT[six].parse().expect("the address is valid"), addr(VIP[six], virt), addr(SERVER[six], port));
        let l4 = if six == 0 { 20 } else { 40 };
        let field = if udp { 6 } else { 16 };
        let mut local = None;
        for request in [true, false] {
            let (src, dst) = if request { (client, vip) } else { (server, local.expect("a request was forwarded before the reply")) };
            let mut ip = packet(udp, src, dst, if request { "syn" } else { "ack" }, &payload);
            let mut offload = Offload::default();
            if unfinished {
                use lvs_packet::wire::checksum::Sum;
                let protocol = if udp { 17 } else { 6 };
                let sum = Sum::ZERO.pseudo(src.ip(), dst.ip(), protocol, ip.len() - l4).fold();
                ip[l4 + field..l4 + field + 2].copy_from_slice(&sum.to_be_bytes());
                let start = u16::try_from(l4 + 14).expect("the number is small");
                offload.checksum = Some(PartialChecksum { start, offset: u16::try_from(field).expect("the number is small") });
            }
            let port = if request { CLIENTS } else { SERVERS };
            let (_, mut frame) = bed.through(port, &ip, offload);
            prop_assert_eq!(frame.offload.checksum.is_some(), unfinished);
            finish_checksum(&mut frame).expect("the checksum field is inside the packet");
            assert_right(frame.bytes(), udp);
            let (from, to) = ends(frame.bytes());
            if request {
                prop_assert_eq!(to, server);
                local = Some(from);
            } else {
                prop_assert_eq!((from, to), (vip, client));
            }
        }
    }
}

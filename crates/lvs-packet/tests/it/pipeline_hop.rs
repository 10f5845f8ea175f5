//! The pipeline with the TUN backend, to which the host routes packets: they have no link headers,
//! and the host has no copy of them.

use std::net::Ipv4Addr;

use crate::lab::{CL_ADDR, CLIENTS, HOST, Lab, SERVERS, Service};
use etherparse::{PacketBuilder, PacketHeaders, TransportHeader};
use lvs_core::tunnel::Tunnel;
use lvs_core::{AcceptReason, Forwarding, Protocol, Verdict};
use lvs_packet::drop::FrameDrop;

const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
const VIP: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 80);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 11);

fn hop(method: Forwarding) -> Lab {
    let mut lab = Lab::new(&[Service {
        protocol: Protocol::TCP,
        virt: (VIP, 80).into(),
        server: Some((SERVER, 8080).into()),
        method,
        tunnel: Tunnel::Ipip,
    }]);
    lab.own_vips();
    // No port is an Ethernet interface: the host routes the packets that the dataplane sends.
    lab.net
        .ports
        .iter_mut()
        .for_each(|port| port.ethernet = false);
    lab.net.accept_local = true;
    lab.intercept.everything = true;
    lab
}

fn tcp(src: (Ipv4Addr, u16), dst: (Ipv4Addr, u16)) -> Vec<u8> {
    let mut ip = Vec::new();
    PacketBuilder::ipv4(src.0.octets(), dst.0.octets(), 64)
        .tcp(src.1, dst.1, 1000, 500)
        .syn()
        .write(&mut ip, &[])
        .expect("writing to a vector succeeds");
    ip
}

/// Source, destination, TTL and protocol of a packet's outer header.
fn outer(ip: &[u8]) -> (Ipv4Addr, Ipv4Addr, u8, u8) {
    let headers = PacketHeaders::from_ip_slice(ip).expect("the bytes are a valid packet");
    let Some(etherparse::NetHeaders::Ipv4(header, _)) = headers.net else {
        panic!("the packet is not IPv4: {headers:?}");
    };
    assert_eq!(header.header_checksum, header.calc_header_checksum());
    (
        header.source.into(),
        header.destination.into(),
        header.time_to_live,
        header.protocol.0,
    )
}

fn whole(lab: &Lab) {
    let counters = &lab.pipeline.counters;
    assert_eq!(
        counters.accounted(),
        counters.received + counters.reassembled
    );
    assert_eq!(
        counters.left, 0,
        "a packet was left to the host, which has no copy"
    );
}

#[test]
fn nat_and_tunnel_packets_through_tun_device_have_no_link_header() {
    let mut lab = hop(Forwarding::Nat);
    let sent = lab.send(CLIENTS, &tcp((CLIENT, 999), (VIP, 80)));
    assert_eq!(sent[0].0, SERVERS);
    assert_eq!(outer(&sent[0].1), (CLIENT, SERVER, 63, 6));
    let sent = lab.send(SERVERS, &tcp((SERVER, 8080), (CLIENT, 999)));
    assert_eq!(sent[0].0, CLIENTS);
    assert_eq!(outer(&sent[0].1), (VIP, CLIENT, 63, 6));
    whole(&lab);
    let mut lab = hop(Forwarding::Tunnel);
    let sent = lab.send(CLIENTS, &tcp((CLIENT, 999), (VIP, 80)));
    let (_, to, _, protocol) = outer(&sent[0].1);
    assert_eq!((to, protocol), (SERVER, 4));
    assert_eq!(outer(&sent[0].1[20..]), (CLIENT, VIP, 63, 6));
    whole(&lab);
}

#[test]
fn direct_routing_packet_through_tun_device_is_dropped() {
    let mut lab = hop(Forwarding::Route);
    assert!(lab.send(CLIENTS, &tcp((CLIENT, 999), (VIP, 80))).is_empty());
    let counters = &lab.pipeline.counters;
    assert_eq!(counters.dropped_for(FrameDrop::Unsupported), 1);
    whole(&lab);
}

/// With NAT, the server would send its reply directly to the host, and the host has no connection
/// with the server's address.
#[test]
fn client_on_host_with_nat_through_tun_device_receives_host_unreachable() {
    let mut lab = hop(Forwarding::Nat);
    let sent = lab.send(CLIENTS, &tcp((CL_ADDR, 999), (VIP, 80)));
    let [(HOST, answer)] = &sent[..] else {
        panic!("{sent:?} {:?}", lab.pipeline.counters);
    };
    assert_eq!(outer(answer).0, VIP);
    assert_eq!(
        answer[20..22],
        [3, 1],
        "the answer is not \"host unreachable\""
    );
    assert_eq!(lab.pipeline.counters.dropped_for(FrameDrop::Unsupported), 1);
    whole(&lab);
    let mut lab = hop(Forwarding::Tunnel);
    assert_eq!(lab.send(CLIENTS, &tcp((CL_ADDR, 999), (VIP, 80))).len(), 1);
}

#[test]
fn tun_device_packet_without_service_is_reinjected_or_answered_at_own_vip() {
    let mut lab = hop(Forwarding::Nat);
    lab.decide.verdict = Some(Verdict::Accept(AcceptReason::NoService));
    let packet = tcp((SERVER, 8080), (CLIENT, 999));
    assert_eq!(lab.send(SERVERS, &packet), [(HOST, packet.clone())]);
    // The VIP has no service on port 81, and the host does not have the VIP: the dataplane answers.
    let sent = lab.send(CLIENTS, &tcp((CLIENT, 999), (VIP, 81)));
    let headers = PacketHeaders::from_ip_slice(&sent[0].1).expect("the bytes are a valid packet");
    assert!(matches!(headers.transport, Some(TransportHeader::Tcp(tcp)) if tcp.rst));
    // A packet with an invalid header is counted as dropped, and not passed to the host.
    let mut short = packet;
    short[0] = 0x44;
    assert!(lab.send(SERVERS, &short).is_empty());
    assert_eq!(lab.pipeline.counters.dropped_total(), 1);
    whole(&lab);
}

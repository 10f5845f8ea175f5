//! Deliberate differences between the dataplane and the kernel; docs/decisions.md lists them.

use std::net::{IpAddr, SocketAddr};

use crate::lab::director::{DirectorLab, addr, only};
use crate::lab::{CLIENTS, SERVERS, SV_ADDR, header, set_mtu};
use etherparse::{IpNumber, PacketBuilder};
use lvs_core::tunnel::{Tunnel, TunnelChecksum};
use lvs_core::{
    Family, Forwarding, Instant, Protocol, ServerConfig, ServiceConfig, ServiceFlags, ServiceKey,
};
use lvs_packet::drop::FrameDrop;
use lvs_packet::fragment::{Cutter, MEMORY_MAX};
use lvs_packet::frame::{Frame, Offload};
use lvs_packet::net::PortId;
use lvs_packet::wire::{ip_dst, ipv4, ipv6};

#[test]
fn reassembly_memory_limit_is_4_mib() {
    assert_eq!(MEMORY_MAX, 4 << 20);
}

/// The kernel refuses a reply that is longer than the MTU before IPVS receives it, and therefore
/// does not count it.
#[test]
fn too_long_reply_is_refused_and_not_counted() {
    let key = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
    let server = "10.1.0.11:80".parse().unwrap();
    let mut lab = DirectorLab::new(|control| {
        let config = ServiceConfig::new(Family::V4, "rr");
        control.add_service(key, config, None).unwrap();
        let config = ServerConfig::new(1, Forwarding::Nat);
        let added = control.add_server(&key, server, &config, Instant::ZERO);
        added.unwrap();
    });
    set_mtu(&mut lab.net, [1200, 1500]);
    let mut syn = Vec::new();
    PacketBuilder::ipv4([203, 0, 113, 9], [198, 51, 100, 1], 64)
        .tcp(40_000, 80, 1, 500)
        .syn()
        .write(&mut syn, b"")
        .unwrap();
    assert_eq!(lab.request(&syn, Offload::default()).len(), 1);
    let mut answer = Vec::new();
    PacketBuilder::ipv4([10, 1, 0, 11], [203, 0, 113, 9], 64)
        .tcp(80, 40_000, 1, 500)
        .ack(2)
        .write(&mut answer, &[b'x'; 1400])
        .unwrap();
    // The answer gets "don't fragment", and the header checksum changes with it.
    answer[6] = 0x40;
    let sum = etherparse::Ipv4HeaderSlice::from_slice(&answer)
        .unwrap()
        .to_header()
        .calc_header_checksum();
    answer[10..12].copy_from_slice(&sum.to_be_bytes());
    let sent = lab.answer(&answer, Offload::default());
    assert_eq!(
        sent.len(),
        1,
        "not exactly one packet, the ICMP error, was sent"
    );
    assert_eq!(lab.pipeline.counters.dropped_for(FrameDrop::TooBig), 1);
    assert_eq!(lab.pipeline.counters.icmp_sent, 1);
    let counted = lab.director.control.total_stats().live;
    assert_eq!(counted.out_packets, 0, "the refused reply was counted");
}

const VIP: &str = "198.51.100.1";
const VIP6: &str = "fd00:50::1";
const SERVER: &str = "10.1.0.11";
const SERVER6: &str = "fd00:1::11";
const CLIENT: &str = "203.0.113.9";
const CLIENT6: &str = "2001:db8::9";
/// A host on the servers' network that is not a server.
const OTHER: &str = "10.1.0.99";
const OTHER6: &str = "fd00:1::99";

/// A director with a UDP service on port 53 of each of two addresses, and one server for each.
fn udp_services(config: &ServerConfig, flags: ServiceFlags) -> DirectorLab {
    DirectorLab::new(|control| {
        for (vip, server, family) in [(VIP, SERVER, Family::V4), (VIP6, SERVER6, Family::V6)] {
            let key = ServiceKey::Address {
                protocol: Protocol::UDP,
                addr: SocketAddr::new(addr(vip), 53),
            };
            let mut service = ServiceConfig::new(family, "rr");
            service.flags = flags;
            control.add_service(key, service, None).unwrap();
            let server = SocketAddr::new(addr(server), 53);
            control
                .add_server(&key, server, config, Instant::ZERO)
                .unwrap();
        }
    })
}

/// The error is sent to the server of the connection, whether the VIP is on the dataplane or on the
/// host. An error without a connection is passed to the host, if the host has the VIP.
#[test]
fn icmp_error_about_direct_reply_is_sent_to_server_of_its_connection() {
    let direct = ServerConfig::new(1, Forwarding::Route);
    for own in [false, true] {
        let mut lab = udp_services(&direct, ServiceFlags::default());
        set_mtu(&mut lab.net, [1400, 1500]);
        if own {
            for vip in lab.net.vips.clone() {
                lab.net.local.remove(&vip);
                lab.net.own.insert(vip);
                lab.intercept.own_vips.insert(vip);
            }
        }
        for (vip, client) in [(VIP, CLIENT), (VIP6, CLIENT6)] {
            let request = udp((client, 4000), (vip, 53), b"question");
            only(lab.request(&request, Offload::default()), SERVERS);
            for client_port in [4000, 4001] {
                let mut big = udp((vip, 53), (client, client_port), &[7; 1400]);
                allow_fragments(&mut big, false);
                let mut late = udp((vip, 53), (client, client_port), b"answer");
                let ttl = if vip.contains(':') { 7 } else { 8 };
                late[ttl] = 1;
                allow_fragments(&mut late, true);
                for reply in [&big, &late] {
                    let sent = lab.answer(reply, Offload::default());
                    if client_port == 4000 {
                        let error = only(sent, SERVERS);
                        assert_eq!(ip_dst(error.bytes()), addr(vip), "{own}");
                    } else if own {
                        assert!(sent.is_empty(), "{sent:?}");
                    } else {
                        only(sent, PortId(2));
                    }
                }
            }
        }
        assert_eq!(lab.pipeline.counters.dropped_for(FrameDrop::TooBig), 4);
    }
}

fn nat() -> DirectorLab {
    let config = ServerConfig::new(1, Forwarding::Nat);
    udp_services(&config, ServiceFlags::default())
}

fn udp(src: (&str, u16), dst: (&str, u16), payload: &[u8]) -> Vec<u8> {
    let mut ip = Vec::new();
    let packet = header(addr(src.0), addr(dst.0)).udp(src.1, dst.1);
    packet.write(&mut ip, payload).unwrap();
    // The packet may be fragmented.
    allow_fragments(&mut ip, true);
    ip
}

/// An ICMP error of type `kind` and code `code` about the packet `about`.
fn error(src: &str, dst: &str, (kind, code): (u8, u8), word: [u8; 4], about: &[u8]) -> Vec<u8> {
    let mut ip = Vec::new();
    let start = header(addr(src), addr(dst));
    if src.contains(':') {
        let packet = start.icmpv6_raw(kind, code, word);
        packet.write(&mut ip, about).unwrap();
    } else {
        let packet = start.icmpv4_raw(kind, code, word);
        packet.write(&mut ip, about).unwrap();
    }
    allow_fragments(&mut ip, true);
    ip
}

/// Corrects the length in an IP header, and the checksum of an IPv4 header.
fn repair(ip: &mut [u8]) {
    if ip[0] >> 4 == 6 {
        ipv6::finish_len(ip);
    } else {
        ipv4::set_total_len(ip, u16::try_from(ip.len()).unwrap());
        ipv4::finish_header(ip);
    }
}

fn allow_fragments(ip: &mut [u8], allowed: bool) {
    if ip[0] >> 4 == 4 {
        ip[6] = if allowed { 0 } else { 0x40 };
        repair(ip);
    }
}

/// Inserts an extension header of type `kind` behind the IPv6 header. `body` is the extension
/// header without its first byte.
fn extend(ip: &mut Vec<u8>, kind: u8, body: &[u8]) {
    let next = std::mem::replace(&mut ip[6], kind);
    ip.splice(40..40, [&[next], body].concat());
    repair(ip);
}

/// The fragments of an IPv4 packet, each at most `mtu` bytes long.
fn fragments(ip: &[u8], mtu: usize) -> Vec<Vec<u8>> {
    let cutter = Cutter::v4(ip, mtu, None, false).unwrap();
    cutter
        .frames()
        .map(|piece| piece.bytes().to_vec())
        .collect()
}

fn unreachable(src: &str, dst: &str, about: &[u8]) -> Vec<u8> {
    let kind = if src.contains(':') { (1, 4) } else { (3, 3) };
    error(src, dst, kind, [0; 4], about)
}

/// The kernel's IPVS inspects all forwarded ICMP, and drops messages that are too short. The
/// dataplane passes them to the host unless it intercepts them.
#[test]
fn short_icmp_packet_in_transit_is_passed_to_host() {
    let mut lab = nat();
    for (other, client) in [(OTHER, CLIENT), (OTHER6, CLIENT6)] {
        let whole = unreachable(other, client, &[]);
        for cut in 1..=8 {
            let mut short = whole[..whole.len() - cut].to_vec();
            repair(&mut short);
            assert!(lab.answer(&short, Offload::default()).is_empty());
        }
    }
    assert_eq!(lab.pipeline.counters.left, 16);
    // If all ICMP is intercepted, the dataplane drops the message, as the kernel does.
    lab.intercept.every_icmp = true;
    let mut short = unreachable(OTHER, CLIENT, &[]);
    short.truncate(27);
    repair(&mut short);
    assert!(lab.answer(&short, Offload::default()).is_empty());
    assert_eq!(lab.pipeline.counters.dropped_for(FrameDrop::IcmpShort), 1);
}

/// The kernel's IPVS drops packets with a truncated transport header at every address of the host,
/// if there is any service. The dataplane drops them only at addresses with services.
#[test]
fn truncated_tcp_packet_to_address_without_service_is_passed_to_host() {
    const HOST6: &str = "fd00:50::2";
    let mut lab = nat();
    lab.net.local.insert(addr(HOST6));
    for (dst, port, covered) in [
        (VIP, 53, true),
        (VIP6, 53, true),
        (VIP6, 9, true),
        (HOST6, 53, false),
    ] {
        let src = if dst == VIP { CLIENT } else { CLIENT6 };
        let mut segment = Vec::new();
        // The services are UDP services, so that the packet belongs to none of them.
        let packet = header(addr(src), addr(dst)).tcp(4000, port, 1, 500).syn();
        packet.write(&mut segment, b"").unwrap();
        segment.truncate(segment.len() - 1);
        repair(&mut segment);
        if dst != VIP {
            // Add AH: without interception, the host would answer with "unknown protocol".
            extend(&mut segment, 51, &[&[4][..], &[0; 22]].concat());
        }
        assert!(lab.request(&segment, Offload::default()).is_empty());
        assert_eq!(lab.covers(&segment), covered, "{dst} {port}");
    }
}

/// The kernel's host writes into the options of a forwarded error. Its IPVS then drops the error as
/// damaged.
#[test]
fn icmp_error_with_ip_options_is_translated_and_options_are_filled_in() {
    let mut lab = nat();
    let request = udp((CLIENT, 4000), (VIP, 53), b"question");
    let forwarded = only(lab.request(&request, Offload::default()), SERVERS);
    let mut error = unreachable(SERVER, CLIENT, forwarded.bytes());
    // The option "record route", with room for one address.
    error.splice(20..20, [7, 7, 4, 0, 0, 0, 0, 0]);
    error[0] = 0x47;
    repair(&mut error);
    let sent = only(lab.answer(&error, Offload::default()), CLIENTS);
    let bytes = sent.bytes();
    assert_eq!(IpAddr::from(ipv4::src(bytes)), addr(VIP));
    assert_eq!(bytes[20..23], [7, 7, 8], "the option is not filled in");
    // The packet inside again has the addresses of the client's packet.
    assert_eq!(IpAddr::from(ipv4::dst(&bytes[36..])), addr(VIP));
}

/// The kernel handles an unknown option by the first two bits of its type before IPVS receives the
/// packet (RFC 8200 section 4.2). The dataplane forwards the packet, and the server handles the
/// option.
#[test]
fn packet_with_unknown_hop_by_hop_options_is_forwarded_to_server() {
    for option in [0x1e, 0x5e, 0x9e, 0xde] {
        let mut lab = nat();
        let mut request = udp((CLIENT6, 4000), (VIP6, 53), b"question");
        extend(&mut request, 0, &[0, option, 4, 0, 0, 0, 0]);
        let sent = only(lab.request(&request, Offload::default()), SERVERS);
        assert_eq!(sent.bytes()[42], option);
        assert_eq!(IpAddr::from(ipv6::dst(sent.bytes())), addr(SERVER6));
    }
}

/// The kernel reassembles the outer datagram and forwards its content. No sender makes such
/// packets.
#[test]
fn fragment_in_fragment_is_dropped() {
    let mut lab = nat();
    let mut request = udp((CLIENT6, 4000), (VIP6, 53), b"question");
    // Put the whole datagram into a fragment, and this fragment into another one.
    extend(&mut request, 44, &[0, 0, 0, 0, 0, 0, 1]);
    extend(&mut request, 44, &[0, 0, 0, 0, 0, 0, 2]);
    assert!(lab.request(&request, Offload::default()).is_empty());
    let counters = &lab.pipeline.counters;
    assert_eq!(counters.dropped_for(FrameDrop::BadFragment), 1);
    assert_eq!(lab.director.shard.len(), 0);
}

/// The kernel passes the packet to the host, which sends an ICMP error with the position at which
/// the packet ends.
#[test]
fn packet_with_truncated_headers_to_vip_is_dropped() {
    let mut lab = nat();
    let mut request = udp((CLIENT6, 4000), (VIP6, 53), b"");
    extend(&mut request, 51, &[&[4][..], &[0; 22]].concat());
    request.truncate(56);
    repair(&mut request);
    assert!(lab.request(&request, Offload::default()).is_empty());
    let counters = &lab.pipeline.counters;
    assert_eq!(counters.dropped_for(FrameDrop::IpHeaderLength), 1);
}

/// Without NAT, the dataplane does not intercept ICMP errors in fragments: it would have to
/// reassemble them only to count them.
#[test]
fn untranslated_fragmented_icmp_errors_are_not_counted() {
    let direct = ServerConfig::new(1, Forwarding::Route);
    let mut lab = udp_services(&direct, ServiceFlags::default());
    let request = udp((CLIENT, 4000), (VIP, 53), &[7; 600]);
    let forwarded = only(lab.request(&request, Offload::default()), SERVERS);
    let error = unreachable(SERVER, CLIENT, forwarded.bytes());
    let counted = |lab: &DirectorLab| {
        lab.director
            .control
            .shard_counts()
            .next()
            .unwrap()
            .out_packets
    };
    for fragment in fragments(&error, 420) {
        assert!(lab.answer(&fragment, Offload::default()).is_empty());
    }
    assert_eq!((lab.pipeline.counters.left, counted(&lab)), (2, 0));
    // The same error in one packet is counted, as by the kernel.
    let _ = only(lab.answer(&error, Offload::default()), CLIENTS);
    assert_eq!((lab.pipeline.counters.left, counted(&lab)), (2, 1));
}

/// The kernel's host uses an error without a connection as the path MTU of a client, and its IPVS
/// then refuses longer replies. With the dataplane, the next router refuses them, and the server
/// receives an error about its own packet.
#[test]
fn path_mtu_of_host_does_not_limit_replies() {
    let mut lab = nat();
    let answer = udp((VIP, 53), (CLIENT, 4001), &[7; 1000]);
    let too_long = error(CLIENT, VIP, (3, 4), [0, 0, 2, 88], &answer);
    assert!(
        lab.request(&too_long, Offload::default()).len() <= 1,
        "the dataplane sends more than one packet"
    );
    let request = udp((CLIENT, 4000), (VIP, 53), b"question");
    let _ = only(lab.request(&request, Offload::default()), SERVERS);
    let mut answer = udp((SERVER, 53), (CLIENT, 4000), &[7; 1000]);
    allow_fragments(&mut answer, false);
    let sent = only(lab.answer(&answer, Offload::default()), CLIENTS);
    assert_eq!(sent.bytes().len(), 1028);
}

const GUE: u16 = 6080;

/// Sends the director an ICMP error of a router on the path to the server, about a tunnel packet of
/// this kind that contains `inner`, and returns the packets that the director sends then. The
/// reported path MTU is 1,200 bytes.
fn complaint(lab: &mut DirectorLab, tunnel: Tunnel, inner: &[u8]) -> Vec<(PortId, Frame)> {
    let mut inner = inner.to_vec();
    allow_fragments(&mut inner, false);
    let start = header(SV_ADDR.into(), addr(SERVER));
    let mut outer = Vec::new();
    match tunnel {
        Tunnel::Ipip => start.write(&mut outer, IpNumber::IPV4, &inner).unwrap(),
        Tunnel::Gre { .. } => {
            let inner = [&[0, 0, 8, 0], &inner[..]].concat();
            start.write(&mut outer, IpNumber::GRE, &inner).unwrap();
        }
        Tunnel::Gue { port, .. } => {
            let inner = [&[0, 4, 0, 0], &inner[..]].concat();
            start.udp(40_000, port).write(&mut outer, &inner).unwrap();
        }
    }
    allow_fragments(&mut outer, false);
    let error_message = error(OTHER, &SV_ADDR.to_string(), (3, 4), [0, 0, 4, 176], &outer);
    lab.answer(&error_message, Offload::default())
}

fn by_tunnel(tunnel: Tunnel) -> ServerConfig {
    let mut config = ServerConfig::new(1, Forwarding::Tunnel);
    config.tunnel = tunnel;
    config
}

/// A packet of a client that is longer than the path MTU of a [`complaint`], and must not be
/// fragmented.
fn long(port: u16) -> Vec<u8> {
    let mut whole = udp((CLIENT, 4000), (VIP, port), &[7; 1300]);
    allow_fragments(&mut whole, false);
    whole
}

/// With GRE and GUE, the kernel's host uses the path MTU of any error. The dataplane ignores errors
/// about a path by which it has sent no packet, so that a forger cannot set its MTU. With IP in IP,
/// the kernel ignores such errors, too.
#[test]
fn tunnel_path_mtu_of_unused_path_is_ignored() {
    let gue = Tunnel::Gue {
        port: GUE,
        checksum: TunnelChecksum::None,
    };
    for tunnel in [
        Tunnel::Ipip,
        Tunnel::Gre {
            checksum: TunnelChecksum::None,
        },
        gue,
    ] {
        let mut lab = udp_services(&by_tunnel(tunnel), ServiceFlags::default());
        assert!(complaint(&mut lab, tunnel, &long(53)).is_empty());
        let _ = only(lab.request(&long(53), Offload::default()), SERVERS);
        // The rest is as with the kernel: the client receives the error, and the next packet is too
        // long.
        let reported = only(complaint(&mut lab, tunnel, &long(53)), CLIENTS);
        assert_eq!(reported.bytes()[20..22], [3, 4]);
        let reported = only(lab.request(&long(53), Offload::default()), CLIENTS);
        assert_eq!(reported.bytes()[20..22], [3, 4], "{tunnel:?}");
    }
}

/// With IP in IP, the kernel uses a path MTU only from errors about packets of existing
/// connections; with GRE and GUE, from any error. One-packet services, and clients whose
/// connections have ended, have no connection. The dataplane compares the path instead, because the
/// error may arrive at another worker than the connection's.
#[test]
fn tunnel_path_mtu_is_learned_without_connection() {
    let tunnel = Tunnel::Ipip;
    let one_packet = ServiceFlags(ServiceFlags::ONE_PACKET);
    let mut lab = udp_services(&by_tunnel(tunnel), one_packet);
    let _ = only(lab.request(&long(53), Offload::default()), SERVERS);
    assert!(lab.connections().is_empty());
    // There is no connection, so no client receives the error.
    assert!(complaint(&mut lab, tunnel, &long(53)).is_empty());
    let reported = only(lab.request(&long(53), Offload::default()), CLIENTS);
    assert_eq!(reported.bytes()[20..22], [3, 4]);
    assert_eq!(reported.bytes()[26..28], 1180_u16.to_be_bytes());
}

/// The MTU in the ICMP error that the client receives after a [`complaint`] about its packet to
/// `port`.
fn reported(lab: &mut DirectorLab, port: u16) -> u16 {
    let reported = only(complaint(lab, Tunnel::Ipip, &long(port)), CLIENTS);
    u16::from_be_bytes([reported.bytes()[26], reported.bytes()[27]])
}

/// The kernel's first error reports the MTU of the route, for each server of each service. The
/// dataplane sends such an error once for each path, and then reports the path MTU to the clients
/// of all services.
#[test]
fn tunnel_icmp_errors_report_route_mtu_until_packet_of_any_service_uses_path_mtu() {
    let mut lab = udp_services(&by_tunnel(Tunnel::Ipip), ServiceFlags::default());
    let key = ServiceKey::Address {
        protocol: Protocol::UDP,
        addr: SocketAddr::new(addr(VIP), 54),
    };
    let control = &mut lab.director.control;
    let config = ServiceConfig::new(Family::V4, "rr");
    control.add_service(key, config, None).unwrap();
    let server = SocketAddr::new(addr(SERVER), 54);
    control
        .add_server(&key, server, &by_tunnel(Tunnel::Ipip), Instant::ZERO)
        .unwrap();
    for port in [53, 54] {
        let _ = only(lab.request(&long(port), Offload::default()), SERVERS);
    }
    // The MTU of the route is reported, as by the kernel, until a packet has used the path MTU.
    assert_eq!([reported(&mut lab, 53), reported(&mut lab, 53)], [1480; 2]);
    assert_eq!(reported(&mut lab, 54), 1480);
    let _ = only(lab.request(&long(53), Offload::default()), CLIENTS);
    assert_eq!(reported(&mut lab, 53), 1180);
    // The kernel would report 1480 until a packet of this service has used the path MTU.
    assert_eq!(reported(&mut lab, 54), 1180);
}

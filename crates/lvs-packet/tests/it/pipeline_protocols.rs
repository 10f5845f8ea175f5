//! SCTP and IPsec with a real director. The tests build the packets, because the test host's kernel
//! has no such sockets.

use std::net::SocketAddr;

use crate::lab::director::{DirectorLab, only};
use crate::lab::{CLIENTS, SERVERS};
use etherparse::{IpNumber, PacketBuilder};
use lvs_core::tunnel::{Tunnel, TunnelChecksum};
use lvs_core::{Family, Forwarding, Protocol, ServerConfig, ServiceConfig, ServiceKey};
use lvs_packet::frame::Offload;
use lvs_packet::wire::{be16, ip_dst, ip_src, is_ipv6, put16};

const CLIENT: &str = "192.0.2.7:36000";
const VIP: &str = "10.0.0.80:36412";
const SERVER: &str = "10.1.0.11:36413";

const DATA: u8 = 0;
const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
const SACK: u8 = 3;
const HEARTBEAT: u8 = 4;
const HEARTBEAT_ACK: u8 = 5;
const ABORT: u8 = 6;
const SHUTDOWN: u8 = 7;
const SHUTDOWN_ACK: u8 = 8;
const COOKIE_ECHO: u8 = 10;
const COOKIE_ACK: u8 = 11;
const SHUTDOWN_COMPLETE: u8 = 14;

/// CRC32c by polynomial division, most significant bit first, so that it has nothing in common with
/// the table that is tested.
fn crc32c(bytes: impl Iterator<Item = u8>) -> u32 {
    let mut rest = u32::MAX;
    for byte in bytes {
        rest ^= u32::from(byte.reverse_bits()) << 24;
        for _ in 0..8 {
            let top = rest >> 31 == 1;
            rest <<= 1;
            if top {
                rest ^= 0x1edc_6f41;
            }
        }
    }
    !rest.reverse_bits()
}

/// Returns the correct checksum of the SCTP packet `sctp`.
fn sctp_checksum(sctp: &[u8]) -> [u8; 4] {
    let bytes = sctp.iter().enumerate();
    crc32c(bytes.map(|(at, &byte)| if (8..12).contains(&at) { 0 } else { byte })).to_le_bytes()
}

#[test]
fn crc32c_oracle_equals_published_values() {
    // The examples of RFC 3720 appendix B.4, and the usual check value.
    assert_eq!(
        crc32c([0u8; 32].into_iter()).to_le_bytes(),
        [0xaa, 0x36, 0x91, 0x8a]
    );
    assert_eq!(crc32c(b"123456789".iter().copied()), 0xe306_9283);
}

fn ip(src: SocketAddr, dst: SocketAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = Vec::new();
    let builder = match (src, dst) {
        (SocketAddr::V4(src), SocketAddr::V4(dst)) => {
            PacketBuilder::ipv4(src.ip().octets(), dst.ip().octets(), 64)
        }
        (SocketAddr::V6(src), SocketAddr::V6(dst)) => {
            PacketBuilder::ipv6(src.ip().octets(), dst.ip().octets(), 64)
        }
        _ => panic!("the addresses have different IP versions"),
    };
    builder
        .write(&mut packet, IpNumber(protocol), payload)
        .expect("writing to a vector succeeds");
    packet
}

/// An SCTP packet with these chunks. The second number of a chunk is the length of its value, which
/// is padded to four bytes.
fn sctp(src: &str, dst: &str, chunks: &[(u8, u16)]) -> Vec<u8> {
    let (src, dst): (SocketAddr, SocketAddr) = (src.parse().unwrap(), dst.parse().unwrap());
    let mut packet = vec![0; 12];
    put16(&mut packet, 0, src.port());
    put16(&mut packet, 2, dst.port());
    packet[4..8].copy_from_slice(&0x1234_5678u32.to_be_bytes());
    for &(kind, len) in chunks {
        packet.extend([kind, 3]);
        packet.extend((len + 4).to_be_bytes());
        packet.extend((0..len).map(|n| n.to_le_bytes()[0]));
        packet.resize(packet.len().next_multiple_of(4), 0);
    }
    let sum = sctp_checksum(&packet);
    packet[8..12].copy_from_slice(&sum);
    ip(src, dst, 132, &packet)
}

/// Checks addresses, ports and checksum of a sent packet.
fn is_sctp(packet: &[u8], src: &str, dst: &str) {
    let header = if is_ipv6(packet) { 40 } else { 20 };
    let sctp = &packet[header..];
    let found = (
        SocketAddr::new(ip_src(packet), be16(sctp, 0)),
        SocketAddr::new(ip_dst(packet), be16(sctp, 2)),
    );
    assert_eq!(found, (src.parse().unwrap(), dst.parse().unwrap()));
    assert_eq!(sctp[8..12], sctp_checksum(sctp));
}

fn lab(
    protocol: Protocol,
    virt: &str,
    server: &str,
    method: Forwarding,
    tunnel: Tunnel,
) -> DirectorLab {
    DirectorLab::new(|control| {
        let addr: SocketAddr = virt.parse().unwrap();
        let key = ServiceKey::Address { protocol, addr };
        let family = Family::of(&addr.ip());
        let config = ServiceConfig::new(family, "rr");
        control
            .add_service(key, config, None)
            .expect("the service is new");
        let mut config = ServerConfig::new(1, method);
        config.tunnel = tunnel;
        let now = lvs_core::Instant::from_secs(10);
        let server = server.parse().unwrap();
        control
            .add_server(&key, server, &config, now)
            .expect("the server is new");
    })
}

/// A message: whether the client is the sender, the chunks with the lengths of their values, and
/// the state of the connection afterwards.
type Word = (bool, &'static [(u8, u16)], &'static str);

/// All messages of an association, from the first to the last.
const LIFE: &[Word] = &[
    (true, &[(INIT, 16)], "INIT1"),
    (false, &[(INIT_ACK, 240)], "C-SENT"),
    // Bundles: a cookie followed by data, and an acknowledgement with data.
    (true, &[(COOKIE_ECHO, 220), (DATA, 101)], "C-REPLIED"),
    (
        false,
        &[(COOKIE_ACK, 0), (SACK, 12), (DATA, 7)],
        "ESTABLISHED",
    ),
    (true, &[(SACK, 12)], "ESTABLISHED"),
    (true, &[(DATA, 1399)], "ESTABLISHED"),
    (false, &[(SACK, 12), (DATA, 13), (DATA, 14)], "ESTABLISHED"),
    (true, &[(HEARTBEAT, 40)], "ESTABLISHED"),
    (false, &[(HEARTBEAT_ACK, 40)], "ESTABLISHED"),
    (true, &[(SHUTDOWN, 4)], "S-RECEIVED"),
    (false, &[(SHUTDOWN_ACK, 0)], "S-ACK-SENT"),
    (true, &[(SHUTDOWN_COMPLETE, 0)], "CLOSED"),
];

fn nat_life(client: &str, vip: &str, server: &str) {
    let mut lab = lab(Protocol::SCTP, vip, server, Forwarding::Nat, Tunnel::Ipip);
    for (number, &(request, chunks, state)) in LIFE.iter().enumerate() {
        if request {
            let packet = sctp(client, vip, chunks);
            assert!(lab.covers(&packet));
            let sent = lab.request(&packet, Offload::default());
            is_sctp(only(sent, SERVERS).bytes(), client, server);
        } else {
            let packet = sctp(server, client, chunks);
            assert!(lab.covers(&packet));
            let sent = lab.answer(&packet, Offload::default());
            is_sctp(only(sent, CLIENTS).bytes(), vip, client);
        }
        assert_eq!(lab.states(), [state], "after packet {number}");
    }
}

#[test]
fn sctp_association_is_translated_through_nat() {
    nat_life(CLIENT, VIP, SERVER);
    nat_life(
        "[2001:db8::7]:36000",
        "[fd00::80]:36412",
        "[fd00:1::11]:36413",
    );
    // The port and the checksum are unchanged: the checksum of SCTP does not cover addresses.
    nat_life(CLIENT, VIP, "10.1.0.11:36412");
}

#[test]
fn sctp_abort_of_either_end_closes_association() {
    let mut lab = lab(Protocol::SCTP, VIP, SERVER, Forwarding::Nat, Tunnel::Ipip);
    let init = sctp(CLIENT, VIP, &[(INIT, 16)]);
    let stray = sctp(CLIENT, VIP, &[(ABORT, 0)]);
    // The ABORT belongs to no association, and is reinjected into the host.
    let given = lab.request(&stray, Offload::default());
    assert_eq!(only(given, crate::lab::HOST).bytes(), stray);
    only(lab.request(&init, Offload::default()), SERVERS);
    let abort = sctp(SERVER, CLIENT, &[(ABORT, 4)]);
    let sent = lab.answer(&abort, Offload::default());
    is_sctp(only(sent, CLIENTS).bytes(), VIP, CLIENT);
    assert_eq!(lab.states(), ["REJECTED"]);
    // A new association with the same addresses and ports.
    only(lab.request(&init, Offload::default()), SERVERS);
    assert_eq!(lab.states(), ["INIT"]);
    // The client aborts the association in a bundle, after a cookie.
    let bundle = sctp(CLIENT, VIP, &[(COOKIE_ECHO, 9), (ABORT, 0)]);
    is_sctp(
        only(lab.request(&bundle, Offload::default()), SERVERS).bytes(),
        CLIENT,
        SERVER,
    );
    assert_eq!(lab.states(), ["CLOSED"]);
}

/// If the port changes, the checksum is computed again, even if the old one was wrong: the kernel
/// does not verify the old one.
#[test]
fn sctp_port_change_recomputes_wrong_checksum() {
    let mut lab = lab(Protocol::SCTP, VIP, SERVER, Forwarding::Nat, Tunnel::Ipip);
    let mut init = sctp(CLIENT, VIP, &[(INIT, 16)]);
    init[29] ^= 0x40;
    is_sctp(
        only(lab.request(&init, Offload::default()), SERVERS).bytes(),
        CLIENT,
        SERVER,
    );
}

#[test]
fn sctp_packets_are_forwarded_by_direct_routing_and_tunnels() {
    let gue = Tunnel::Gue {
        port: 6080,
        checksum: TunnelChecksum::None,
    };
    // Method, tunnel, and number of bytes before the client's packet.
    let ways = [
        (Forwarding::Route, Tunnel::Ipip, 0),
        (Forwarding::Tunnel, Tunnel::Ipip, 20),
        (
            Forwarding::Tunnel,
            Tunnel::Gre {
                checksum: TunnelChecksum::None,
            },
            24,
        ),
        (Forwarding::Tunnel, gue, 32),
    ];
    for (method, tunnel, outer) in ways {
        // Without translation, service and server have the same port.
        let mut lab = lab(Protocol::SCTP, VIP, "10.1.0.11:36412", method, tunnel);
        let requests = LIFE.iter().filter(|(request, ..)| *request);
        for (_, chunks, _) in requests {
            let packet = sctp(CLIENT, VIP, chunks);
            assert!(lab.covers(&packet));
            let sent = only(lab.request(&packet, Offload::default()), SERVERS);
            let inner = &sent.bytes()[outer..];
            is_sctp(inner, CLIENT, VIP);
            // Only the TTL and the header checksum have changed.
            let (mut expected, mut found) = (packet.clone(), inner.to_vec());
            assert_eq!((expected[8], found[8]), (64, 63));
            for packet in [&mut expected, &mut found] {
                packet[8] = 0;
                packet[10..12].fill(0);
            }
            assert_eq!(expected, found);
            if outer > 0 {
                assert_eq!(ip_dst(sent.bytes()).to_string(), "10.1.0.11");
            }
        }
        // The server's packets do not pass through the director.
        assert_eq!(lab.states(), ["CLOSED"], "{method:?} {tunnel:?}");
    }
}

const ISAKMP_CLIENT: &str = "192.0.2.7:500";
const ISAKMP_VIP: &str = "10.0.0.80:500";
const ISAKMP_SERVER: &str = "10.1.0.11:500";

fn isakmp(src: &str, dst: &str) -> Vec<u8> {
    let (src, dst): (SocketAddr, SocketAddr) = (src.parse().unwrap(), dst.parse().unwrap());
    let mut udp = vec![0; 8];
    put16(&mut udp, 0, src.port());
    put16(&mut udp, 2, dst.port());
    put16(&mut udp, 4, 8);
    ip(src, dst, 17, &udp)
}

fn ipsec(src: &str, dst: &str, protocol: u8) -> Vec<u8> {
    let payload: Vec<u8> = (0..100).collect();
    ip(
        src.parse().unwrap(),
        dst.parse().unwrap(),
        protocol,
        &payload,
    )
}

#[test]
fn ipsec_packets_use_the_server_of_isakmp() {
    for method in [Forwarding::Nat, Forwarding::Route, Forwarding::Tunnel] {
        let mut lab = lab(
            Protocol::UDP,
            ISAKMP_VIP,
            ISAKMP_SERVER,
            method,
            Tunnel::Ipip,
        );
        for protocol in [50, 51] {
            // Before the ISAKMP exchange, the packet belongs to no connection, and is reinjected
            // into the host, which has not received it.
            let packet = ipsec(ISAKMP_CLIENT, ISAKMP_VIP, protocol);
            assert!(lab.covers(&packet));
            let given = lab.request(&packet, Offload::default());
            assert_eq!(only(given, crate::lab::HOST).bytes(), packet);
        }
        let opens = isakmp(ISAKMP_CLIENT, ISAKMP_VIP);
        only(lab.request(&opens, Offload::default()), SERVERS);
        for protocol in [50, 51] {
            let packet = ipsec(ISAKMP_CLIENT, ISAKMP_VIP, protocol);
            let sent = only(lab.request(&packet, Offload::default()), SERVERS);
            let outer = if method == Forwarding::Tunnel { 20 } else { 0 };
            let inner = &sent.bytes()[outer..];
            let dst = if method == Forwarding::Nat {
                "10.1.0.11"
            } else {
                "10.0.0.80"
            };
            assert_eq!(ip_dst(inner).to_string(), dst);
            assert_eq!((inner[8], inner[9]), (63, protocol));
            assert_eq!(
                inner[20..],
                packet[20..],
                "the content of the packet was changed"
            );
            assert!(
                lvs_packet::parse::ip(inner, false).is_ok(),
                "the inner packet is invalid"
            );

            // The server's reply through the director.
            let from = if method == Forwarding::Nat {
                ISAKMP_SERVER
            } else {
                ISAKMP_VIP
            };
            let answer = ipsec(from, ISAKMP_CLIENT, protocol);
            assert!(lab.covers(&answer) || method != Forwarding::Nat);
            let sent = only(lab.answer(&answer, Offload::default()), CLIENTS);
            assert_eq!(ip_src(sent.bytes()).to_string(), "10.0.0.80");
            assert_eq!(sent.bytes()[20..], answer[20..]);
        }
        // A host that has exchanged no keys has no connection.
        let other = ipsec("192.0.2.8:0", ISAKMP_VIP, 50);
        let given = lab.request(&other, Offload::default());
        assert_eq!(only(given, crate::lab::HOST).bytes(), other);
        assert_eq!(lab.connections().len(), 1);
    }
}

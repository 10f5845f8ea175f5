//! Random rewrites of packets (ten million in `make test-rest`): each checksum that the dataplane
//! adjusts must equal a full recomputation by another crate.

use std::net::{IpAddr, SocketAddr};

use lvs_core::Protocol;
use lvs_core::tunnel::{Tunnel, TunnelChecksum};
use lvs_packet::frame::{Frame, PartialChecksum};
use lvs_packet::parse;
use lvs_packet::rewrite::nat::{self, End};
use lvs_packet::rewrite::tunnel::{self, Outer};
use lvs_packet::wire;
use lvs_testbed::hostile::Entropy;
use lvs_testbed::oracle::{self, Health, Parts};
use lvs_testbed::packet;
use lvs_testbed::suite::size;

/// Number of rewrites in `make test-rest`, divided by the number in `make test`.
const QUICK_SHARE: u64 = 50;

/// Number of rewrites in this run; `full` is the number in `make test-rest`.
fn amount(full: u64) -> u64 {
    size(full / QUICK_SHARE, full)
}

/// Number of successive translations of one packet, each at a random end and to a random address.
const CHAIN: u64 = 8;

fn address(entropy: &mut Entropy<'_>, six: bool) -> IpAddr {
    // Prefers values that cause a carry in the checksum.
    let mut octets = [0; 16];
    match entropy.below(4) {
        0 => octets.fill(0xff),
        1 => {}
        _ => entropy.fill(&mut octets),
    }
    entropy.fill(&mut octets[12..16]);
    // Not a multicast address.
    if six {
        octets[0] &= 0x7f;
        octets.into()
    } else {
        let [.., a, b, c, d] = octets;
        [a & 0x7f, b, c, d].into()
    }
}

fn socket(entropy: &mut Entropy<'_>, six: bool) -> SocketAddr {
    let port = entropy.u16();
    SocketAddr::new(
        address(entropy, six),
        entropy.pick(&[port, port, 0, 0xffff]),
    )
}

fn payload(entropy: &mut Entropy<'_>) -> Vec<u8> {
    let len = match entropy.below(64) {
        0 => entropy.below(1500),
        _ => entropy.below(40),
    };
    entropy.bytes(len)
}

/// A random TCP, UDP, SCTP or ESP packet, sometimes with IP options or an extension header.
fn random(entropy: &mut Entropy<'_>, six: bool) -> Vec<u8> {
    let (src, dst) = (socket(entropy, six), socket(entropy, six));
    let payload = payload(entropy);
    let mut ip = match entropy.below(8) {
        0..=2 => packet::tcp(src, dst, entropy.u8(), entropy.u32(), &payload),
        3..=5 => packet::udp(src, dst, &payload),
        6 => packet::sctp(src, dst, &payload),
        _ => packet::ip(src.ip(), dst.ip(), 50, 64, &payload),
    };
    if entropy.one_in(8) {
        if six {
            packet::with_extension(&mut ip, 60, &[1, 4, 0, 0, 0, 0]);
        } else {
            packet::with_options(&mut ip, &[7, 7, 4, 0, 0, 0, 0, 0]);
        }
    }
    ip
}

/// Checks that a packet has a valid IP header and, except for ESP, a correct transport checksum.
fn right(ip: &[u8]) -> (Parts, Health) {
    let parts = oracle::parts(ip).unwrap_or_else(|| panic!("the header is wrong: {ip:02x?}"));
    assert_eq!(parts.len, ip.len());
    let health = oracle::health(ip, &parts);
    assert!(
        matches!(health, Health::Right) || parts.protocol == 50 && health == Health::Unknown,
        "the transport checksum is {health:?}: {ip:02x?}"
    );
    (parts, health)
}

fn translations(seed: u64, count: u64, six: bool) {
    let mut entropy = Entropy::seeded(seed);
    let entropy = &mut entropy;
    let mut done = 0;
    let mut unfinished = 0;
    while done < amount(count) {
        let mut ip = random(entropy, six);
        let (parts, _) = right(&ip);
        let field = match Protocol(parts.protocol) {
            Protocol::TCP => Some(16),
            Protocol::UDP => Some(6),
            _ => None,
        };
        let mut partial = None;
        if let Some(field) = field {
            let at = parts.l4 + field;
            match entropy.below(8) {
                0 => {
                    let len = parts.len - parts.l4;
                    let sum = oracle::unfinished(parts.src, parts.dst, parts.protocol, len);
                    ip[at..at + 2].copy_from_slice(&sum.to_be_bytes());
                    partial = Some(PartialChecksum {
                        start: u16::try_from(parts.l4).expect("the number fits into 16 bits"),
                        offset: u16::try_from(field).expect("the number fits into 16 bits"),
                    });
                    unfinished += 1;
                }
                // A UDP packet over IPv4 may have no checksum; the director then computes one.
                1 if parts.protocol == 17 && !six => ip[at..at + 2].fill(0),
                _ => {}
            }
        }
        let mut frame = Frame::from_bytes(&ip);
        frame.offload.checksum = partial;
        for _ in 0..CHAIN {
            let packet = parse::ip(frame.bytes(), false).expect("a valid checksum stays valid");
            let end = entropy.pick(&[End::Source, End::Destination]);
            let to = socket(entropy, six);
            nat::translate(&mut frame, &packet, end, to).expect("the headers are complete");
            wire::decrement_ttl(frame.bytes_mut());
            done += 1;
            let mut bytes = frame.bytes().to_vec();
            let parts = oracle::parts(&bytes).expect("the header is valid");
            oracle::finish(&mut bytes, &parts, &frame.offload)
                .expect("the checksum field is at the same position");
            let (parts, _) = right(&bytes);
            let ports = (
                wire::be16(&bytes, parts.l4),
                wire::be16(&bytes, parts.l4 + 2),
            );
            let (addr, port) = match end {
                End::Source => (parts.src, ports.0),
                End::Destination => (parts.dst, ports.1),
            };
            assert_eq!(addr, to.ip());
            assert!(port == to.port() || parts.protocol == 50);
        }
    }
    println!("{done} translations; {unfinished} packets had a partial checksum");
}

#[test]
fn checksums_of_translated_ipv4_packets_are_correct() {
    translations(1, 3_500_000, false);
}

#[test]
fn checksums_of_translated_ipv6_packets_are_correct() {
    translations(2, 3_500_000, true);
}

#[test]
fn checksums_of_translated_icmp_errors_are_correct() {
    let mut entropy = Entropy::seeded(3);
    let entropy = &mut entropy;
    let mut done = 0;
    while done < amount(1_500_000) {
        let six = entropy.one_in(2);
        let mut inner = random(entropy, six);
        let parts = oracle::parts(&inner).expect("the packet is valid by construction");
        // Routers may quote different amounts of the packet, but at least eight bytes of the
        // transport header.
        if entropy.one_in(2) {
            inner.truncate(parts.l4 + 8 + entropy.below(20));
        }
        let (src, dst) = (address(entropy, six), address(entropy, six));
        let kind = if six { 1 } else { 3 };
        let mut ip = packet::icmp(src, dst, kind, entropy.u8(), [0; 4], &inner);
        let l4 = oracle::parts(&ip)
            .expect("the packet is valid by construction")
            .l4;
        for _ in 0..CHAIN {
            let end = entropy.pick(&[End::Source, End::Destination]);
            let to = socket(entropy, six);
            nat::translate_icmp(&mut ip, l4, end, to, true).expect("the headers are complete");
            done += 1;
            let (outer, _) = right(&ip);
            let quoted = &ip[l4 + 8..];
            if !six {
                let header = usize::from(quoted[0] & 15) * 4;
                assert_eq!(oracle::internet(&quoted[..header]), 0, "{ip:02x?}");
            }
            let (own, inside) = match end {
                End::Source => (outer.src, wire::ip_dst(quoted)),
                End::Destination => (outer.dst, wire::ip_src(quoted)),
            };
            assert_eq!((own, inside), (to.ip(), to.ip()));
        }
    }
    println!("{done} translations of ICMP errors");
}

#[test]
fn checksums_of_outer_tunnel_headers_are_correct() {
    let checksums = [
        TunnelChecksum::None,
        TunnelChecksum::Full,
        TunnelChecksum::Remote,
    ];
    let mut entropy = Entropy::seeded(4);
    let entropy = &mut entropy;
    let count = amount(1_500_000);
    for _ in 0..count {
        let (six, over6) = (entropy.one_in(2), entropy.one_in(2));
        let inner = random(entropy, six);
        let packet = parse::ip(&inner, false).expect("the packet is valid by construction");
        let checksum = entropy.pick(&checksums);
        let port = entropy.u16().max(1);
        let tunnel = entropy.pick(&[
            Tunnel::Ipip,
            Tunnel::Gre { checksum },
            Tunnel::Gue { port, checksum },
        ]);
        let outer = Outer {
            src: address(entropy, over6),
            dst: address(entropy, over6),
            tunnel,
            source_port: tunnel::source_port(&packet),
            id: entropy.u16(),
            df: entropy.one_in(2),
        };
        let mut frame = Frame::from_bytes(&inner);
        tunnel::encapsulate(&mut frame, &outer).expect("the space suffices");
        let ip = frame.bytes();
        let parts = oracle::parts(ip).expect("the outer header is valid");
        assert_eq!(
            (parts.src, parts.dst, parts.len),
            (outer.src, outer.dst, ip.len())
        );
        let l4 = &ip[parts.l4..];
        let between = match tunnel {
            Tunnel::Ipip => 0,
            Tunnel::Gre {
                checksum: TunnelChecksum::Full,
            } => {
                assert_eq!(oracle::internet(l4), 0);
                8
            }
            Tunnel::Gre { .. } => 4,
            Tunnel::Gue { checksum, .. } => {
                if checksum == TunnelChecksum::None {
                    assert_eq!(l4[6..8], [0, 0]);
                } else {
                    assert_eq!(oracle::health(ip, &parts), Health::Right);
                }
                12
            }
        };
        assert_eq!(l4[between..], inner);
    }
    println!("{count} outer headers");
}

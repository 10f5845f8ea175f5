//! Packets that are reinjected into the host unchanged, and packets that are dropped because of
//! their tags, their source or their path.

use std::net::IpAddr;

use crate::lab::{
    CL_ADDR, CLIENTS, GW_MAC, HOST, Lab, SERVERS, SV_MAC, Service, addr, ethernet, from_client,
    reply, server_mac, udp,
};
use lvs_core::{Forwarding, Protocol, Reply, Verdict};
use lvs_packet::drop::FrameDrop;
use lvs_packet::fragment::Cutter;
use lvs_packet::frame::Frame;
use lvs_packet::net::PortId;
use lvs_packet::pipeline::Pipeline;
use lvs_packet::settings::{ReversePath, Settings};
use lvs_packet::wire::decrement_ttl;

const CLIENT: &str = "10.255.0.7:4000";
const CLIENT6: &str = "[fd00:ff::7]:4000";

fn dns() -> Lab {
    let service = |virt, server| Service::new(Forwarding::Nat, Protocol::UDP, virt, server);
    Lab::new(&[
        service("10.0.0.80:53", "10.1.0.11:53"),
        service("[fd00::80]:53", "[fd00:1::11]:53"),
    ])
}

fn datagram(src: &str, dst: &str, len: usize) -> Vec<u8> {
    let mut ip = udp(addr(src), addr(dst), &vec![0x5a; len]);
    ip[6] &= if ip[0] >> 4 == 4 { 0x1f } else { 0xff };
    if ip[0] >> 4 == 4 {
        ip[10..12].fill(0);
        let sum: u32 = ip[..20]
            .chunks_exact(2)
            .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]))
            .sum();
        let sum = (sum & 0xffff) + (sum >> 16);
        ip[10..12].copy_from_slice(
            &(!u16::try_from(sum).expect("the sum fits into 16 bits")).to_be_bytes(),
        );
    }
    ip
}

/// The frames of a datagram in fragments of at most `limit` bytes.
fn pieces(ip: &[u8], limit: usize) -> Vec<Vec<u8>> {
    let cutter = if ip[0] >> 4 == 6 {
        Cutter::v6(ip, limit, None, 0x1234)
    } else {
        Cutter::v4(ip, limit, None, false)
    };
    let cutter = cutter.expect("the datagram can be fragmented");
    cutter
        .map(|piece| {
            let mut frame = Frame::with_capacity(piece.len());
            assert!(piece.write(&mut frame));
            from_client(frame.bytes())
        })
        .collect()
}

/// Sets the identification of IPv6 fragments to 0, because it differs after reassembly and
/// fragmentation.
fn without_ids(frames: &[(PortId, Vec<u8>)]) -> Vec<(PortId, Vec<u8>)> {
    let mut frames = frames.to_vec();
    for (_, frame) in &mut frames {
        if frame[14] >> 4 == 6 {
            frame[14 + 44..14 + 48].fill(0);
        }
    }
    frames
}

#[test]
fn fragments_to_host_are_reinjected_unchanged_except_ipv6_identification() {
    for (client, vip, limits) in [
        (CLIENT, "10.0.0.80:9999", [28, 576, 1500]),
        (CLIENT6, "[fd00::80]:9999", [1280, 1280, 1500]),
    ] {
        for limit in limits {
            let frames = pieces(&datagram(client, vip, 3000), limit);
            assert!(frames.len() > 2);
            // A packet is reinjected on the interface on which it arrived if this is possible,
            // otherwise through the TUN device.
            for gives_back in [true, false] {
                let mut lab = dns();
                lab.net.port_mut(CLIENTS).gives_back = gives_back;
                let mut sent: Vec<(PortId, Vec<u8>)> = Vec::new();
                for frame in &frames {
                    sent.extend(lab.send(CLIENTS, frame));
                }
                let came: Vec<_> = frames.iter().map(|f| (CLIENTS, f.clone())).collect();
                if gives_back {
                    assert_eq!(lab.returned.len(), came.len(), "{vip} {limit}");
                    assert!(sent.is_empty());
                    let (back, came) = (without_ids(&lab.returned), without_ids(&came));
                    assert_eq!(back, came, "{vip} {limit}");
                } else {
                    assert!(lab.returned.is_empty());
                    assert!(sent.iter().all(|(port, _)| *port == HOST));
                    assert_eq!(sent.len(), came.len(), "{vip} {limit}");
                }
                assert_eq!(lab.pipeline.counters.given_back, 1);
            }
        }
    }
}

#[test]
fn nested_priority_tags_are_dropped() {
    let mut lab = dns();
    let ip = datagram(CLIENT, "10.0.0.80:53", 10);
    let plain = from_client(&ip);
    let tagged = |tags: &[u8]| [&plain[..12], tags, &plain[12..]].concat();
    assert_eq!(lab.send(CLIENTS, &plain).len(), 1);
    assert_eq!(lab.send(CLIENTS, &tagged(&[0x81, 0, 0xe0, 0])).len(), 1);
    for tags in [
        [0x81, 0, 0xe0, 0, 0x81, 0, 0, 0],
        [0x88, 0xa8, 0, 0, 0x81, 0, 0, 0],
    ] {
        assert!(lab.send(CLIENTS, &tagged(&tags)).is_empty());
    }
    assert_eq!(lab.pipeline.counters.dropped_for(FrameDrop::NestedTags), 2);
}

#[test]
fn reverse_path_check_of_requests_follows_mode_and_route_to_source() {
    // Sources in the servers' network, without a route, and in the clients' network.
    let sources = [
        ("10.1.0.9:4000", "[fd00:1::9]:4000"),
        ("240.1.2.3:4000", "[fdff::1]:4000"),
        (CLIENT, CLIENT6),
    ];
    for (wanted, taken) in [
        (ReversePath::Off, [true, true, true]),
        (ReversePath::Loose, [true, false, true]),
        (ReversePath::Strict, [false, false, true]),
    ] {
        let mut lab = dns();
        lab.pipeline = Pipeline::alone(Settings {
            reverse_path: wanted,
            ..Settings::UNLIMITED
        });
        for ((four, six), taken) in sources.iter().zip(taken) {
            for (source, vip) in [(four, "10.0.0.80:53"), (six, "[fd00::80]:53")] {
                let ip = datagram(source, vip, 10);
                let sent = lab.send(CLIENTS, &from_client(&ip));
                assert_eq!(!sent.is_empty(), taken, "{wanted:?} {source}");
            }
        }
        let missing = taken.iter().filter(|taken| !**taken).count() as u64 * 2;
        let counters = &lab.pipeline.counters;
        let dropped = counters.dropped_for(FrameDrop::ReversePath);
        assert_eq!(dropped, missing, "{wanted:?}");
        // The check applies only to requests, not to replies of servers.
        let ip = datagram("10.1.0.11:53", CLIENT, 10);
        assert_eq!(lab.send(SERVERS, &ethernet(SV_MAC, GW_MAC, &ip)).len(), 1);
    }
}

/// Each row: the sender of the frame, whether a router forwarded the reply (so that its TTL is
/// lower), whether the reply belongs to a health check, and whether it must be dropped.
#[test]
fn reply_to_health_check_is_dropped_if_another_router_forwarded_it() {
    let server: IpAddr = "10.1.0.11".parse().expect("the address is valid");
    let own = server_mac("10.1.0.11".parse().expect("the address is valid"));
    let source = Some(addr("10.0.0.80:53"));
    let Verdict::Reply(answer) = reply(source) else {
        unreachable!("reply() has returned another verdict")
    };
    for (sender, routed, probe, dropped) in [
        (own, false, true, false),
        // The server has a bond, which sends with several link-layer addresses.
        (GW_MAC, false, true, false),
        // The server's packets pass a hop on the server itself, such as a tunnel, which lowers the
        // TTL.
        (own, true, true, false),
        (GW_MAC, true, true, true),
        // The reply belongs to a client's connection, not to a health check.
        (GW_MAC, true, false, false),
    ] {
        let mut lab = dns();
        lab.decide.verdict = Some(Verdict::Reply(Reply { probe, ..answer }));
        let mut ip = datagram("10.1.0.11:53", &format!("{CL_ADDR}:4000"), 10);
        if routed {
            decrement_ttl(&mut ip);
        }
        let mut frame = from_client(&ip);
        frame[6..12].copy_from_slice(&sender.0);
        lab.send(CLIENTS, &frame);
        let row = format!("{sender} routed {routed} probe {probe}");
        let counters = &lab.pipeline.counters;
        let drops = counters.dropped_for(FrameDrop::CheckPath);
        assert_eq!(drops, u64::from(dropped), "{row}");
        let last = lab.pipeline.common().return_paths.find(server);
        let sender = last.map(|last| (last.port, last.sender));
        assert_eq!(sender, dropped.then_some((CLIENTS, GW_MAC)), "{row}");
    }
}

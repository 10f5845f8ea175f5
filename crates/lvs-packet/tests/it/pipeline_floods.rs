//! The cost of a frame is bounded: packets that would return to their sender, datagrams in many
//! fragments, and super-packets of many segments. The tests check the sent frames, and the number
//! of frames that are in memory at the same time.

use std::net::{IpAddr, SocketAddr};

use crate::lab::{CL_ADDR, CL_ADDR6, CLIENTS, Lab, Service, addr, from_client, header, udp};
use etherparse::PacketBuilder;
use lvs_core::{Forwarding, Protocol};
use lvs_packet::drop::FrameDrop;
use lvs_packet::fragment::{Cutter, MEMORY_MAX};
use lvs_packet::frame::{Frame, Offload, SegmentKind, Segments};
use lvs_packet::pipeline::{Env, Output};
use lvs_packet::wire::ipv4;

const VIP: &str = "10.0.0.80:7";
const VIP6: &str = "[fd00::80]:7";

fn echo(method: Forwarding) -> Lab {
    let service = |protocol, virt, server| Service::new(method, protocol, virt, server);
    let mut services = Vec::new();
    for protocol in [Protocol::UDP, Protocol::TCP] {
        services.push(service(protocol, VIP, "10.1.0.11:7"));
        services.push(service(protocol, VIP6, "[fd00:1::11]:7"));
    }
    Lab::new(&services)
}

fn packet(src: SocketAddr, dst: SocketAddr, protocol: Protocol, data: &[u8]) -> Vec<u8> {
    if protocol == Protocol::UDP {
        return udp(src, dst, data);
    }
    let mut ip = Vec::new();
    let packet = header(src.ip(), dst.ip()).tcp(src.port(), dst.port(), 1, 100);
    let written = packet.syn().write(&mut ip, data);
    written.expect("writing to a vector succeeds");
    ip
}

/// Packets to an echo service whose source is the service itself or the director, so that the
/// answers would return to the director.
#[test]
fn packets_to_service_from_its_own_or_director_address_are_dropped() {
    for own in [false, true] {
        let mut lab = echo(Forwarding::Nat);
        if own {
            lab.own_vips();
        }
        let mut sent = 0;
        for protocol in [Protocol::UDP, Protocol::TCP] {
            for (vip, director) in [(VIP, CL_ADDR.into()), (VIP6, CL_ADDR6.into())] {
                for src in [addr(vip), SocketAddr::new(director, 7)] {
                    let frame = from_client(&packet(src, addr(vip), protocol, b"again"));
                    assert!(
                        lab.send(CLIENTS, &frame).is_empty(),
                        "a packet from {src} to {vip} was forwarded"
                    );
                    sent += 1;
                }
            }
        }
        assert_eq!(lab.decide.seen, 0);
        assert_eq!(lab.pipeline.counters.dropped_for(FrameDrop::Martian), sent);
    }
}

/// Packets whose source is the director's own IPv6 address are dropped: they are not forwarded to
/// servers, and not reinjected into the host on another interface, for which its filter rules would
/// not match.
#[test]
fn ipv6_packet_with_source_of_director_is_dropped() {
    let own = CL_ADDR6;
    let vip = addr(VIP6).ip();
    let IpAddr::V6(to) = vip else {
        unreachable!("the VIP is an IPv6 address")
    };
    let mut packets: Vec<Vec<u8>> = [Protocol::UDP, Protocol::TCP]
        .iter()
        .flat_map(|&protocol| {
            // Packets to a service, and to a port without a service.
            [7, 9999].map(|port| {
                packet(
                    SocketAddr::new(own.into(), 7),
                    SocketAddr::new(vip, port),
                    protocol,
                    b"again",
                )
            })
        })
        .collect();
    let mut echo_request = Vec::new();
    PacketBuilder::ipv6(own.octets(), to.octets(), 64)
        .icmpv6_echo_request(1, 1)
        .write(&mut echo_request, b"again")
        .expect("writing to a vector succeeds");
    packets.push(echo_request);
    // A first fragment: insert the fragment header before the UDP header.
    let mut fragment = packets[0].clone();
    let len = u16::try_from(fragment.len() - 40 + 8).expect("the packet is short");
    fragment[4..6].copy_from_slice(&len.to_be_bytes());
    fragment[6] = 44;
    fragment.splice(40..40, [17, 0, 0, 1, 0, 0, 0, 9]);
    packets.push(fragment);
    for own_vips in [false, true] {
        let mut lab = echo(Forwarding::Nat);
        if own_vips {
            lab.own_vips();
        }
        for packet in &packets {
            assert!(lab.send(CLIENTS, &from_client(packet)).is_empty());
        }
        assert_eq!(lab.decide.seen, 0);
        let counters = &lab.pipeline.counters;
        assert_eq!(
            counters.dropped_for(FrameDrop::Martian),
            packets.len() as u64
        );
        assert_eq!((counters.given_back, counters.answered), (0, 0));
    }
}

/// In a flood, SYNs get a limited part of the worker's time. Other packets, and SYNs to ports of
/// the host, are not limited.
#[test]
fn only_syns_above_their_share_are_dropped_in_flood() {
    let mut lab = echo(Forwarding::Nat);
    let from = |n: u16| SocketAddr::from(([198, 18, 0, 7], n));
    let syn = |n: u16, to: &str| from_client(&packet(from(n), addr(to), Protocol::TCP, &[]));
    assert_eq!(lab.send(CLIENTS, &syn(1, VIP)).len(), 1);
    // Report to the limiter that the SYN used a second of processor time.
    let second = std::time::Duration::from_secs(1);
    lab.pipeline.syn_limiter.spent(1, second, lab.now);
    assert!(lab.pipeline.syn_limiter.sorts());
    let mut passed = 0;
    for n in 2..1000 {
        passed += lab.send(CLIENTS, &syn(n, VIP)).len();
        lab.pipeline.syn_limiter.spent(1, second, lab.now);
    }
    let dropped = lab.pipeline.counters.dropped_for(FrameDrop::SynFlood);
    assert_eq!(
        (passed, dropped),
        (1, 997),
        "the numbers of SYNs that passed and were dropped are wrong"
    );
    // A datagram of a service passes, and a SYN to a port of the host is passed to the host.
    let datagram = packet(from(7), addr(VIP), Protocol::UDP, b"hello");
    assert_eq!(lab.send(CLIENTS, &from_client(&datagram)).len(), 1);
    let left = lab.pipeline.counters.left;
    assert!(lab.send(CLIENTS, &syn(8, "10.0.0.80:22")).is_empty());
    assert_eq!(lab.pipeline.counters.left, left + 1);
    assert_eq!(
        lab.pipeline.counters.dropped_for(FrameDrop::SynFlood),
        dropped
    );
}

/// Processes frames as one batch, in the same portions as a worker. Returns the largest number of
/// frames that waited to be sent at the same time, the number of all sent frames, and the largest
/// memory of waiting frames in bytes.
fn in_portions(lab: &mut Lab, frames: &mut [Frame]) -> (usize, usize, usize) {
    let env = Env::new(&lab.net, &lab.intercept);
    let mut out = Output::new();
    let (mut done, mut most, mut all, mut bytes) = (0, 0, 0, 0);
    while done < frames.len() {
        let rest = &mut frames[done..];
        done += lab
            .pipeline
            .process_some(CLIENTS, rest, &env, &mut lab.decide, lab.now, &mut out);
        let now: usize = out.queues().map(|(_, frames)| frames.len()).sum();
        let size = out.queues().flat_map(|(_, frames)| frames.iter());
        bytes = bytes.max(size.map(Frame::capacity).sum());
        (most, all) = (most.max(now), all + now);
        out.recycle();
    }
    (most, all, bytes)
}

/// Sends `datagrams` datagrams, each in 1,024 fragments of 8 bytes, except their last fragments,
/// which are returned.
fn all_but_the_last(lab: &mut Lab, datagrams: u16) -> Vec<Frame> {
    let datagram = |id| {
        let data = vec![0; 8 * 1024 - 8];
        let mut ip = packet(addr("192.0.2.7:7"), addr(VIP), Protocol::UDP, &data);
        ip[6] = 0; // may be fragmented
        ipv4::set_id(&mut ip, id);
        ipv4::finish_header(&mut ip);
        let cut = Cutter::v4(&ip, 28, None, false).expect("a fragment has room for 8 bytes");
        let mut pieces: Vec<Frame> = cut.frames().collect();
        assert_eq!(pieces.len(), 1024);
        let last = pieces.pop().expect("many fragments exist");
        for piece in &pieces {
            assert!(lab.send(CLIENTS, &from_client(piece.bytes())).is_empty());
        }
        assert!(lab.pipeline.common().reassembler.memory() <= MEMORY_MAX);
        Frame::from_bytes(&from_client(last.bytes()))
    };
    (1..=datagrams).map(datagram).collect()
}

/// The reassembler accepts 15 datagrams of 1,024 tiny fragments. The fragments that are sent are
/// never all in memory at the same time, and not in frames of 64 KiB.
#[test]
fn tiny_fragments_are_sent_in_portions_without_large_buffers() {
    for method in [Forwarding::Nat, Forwarding::Route] {
        let mut lab = echo(method);
        let mut last = all_but_the_last(&mut lab, 15);
        let (most, all, bytes) = in_portions(&mut lab, &mut last);
        assert_eq!(all, 15 * 1024, "{method:?}");
        assert!(
            most <= 2 * 1024,
            "{method:?}: {most} of {all} fragments are in memory at the same time"
        );
        assert!(
            bytes < 1 << 20,
            "{method:?}: {bytes} bytes are in memory at the same time"
        );
        assert_eq!(lab.pipeline.common().reassembler.memory(), 0);
    }
}

#[test]
fn tiny_fragments_count_towards_memory_limit_with_overhead() {
    let mut lab = echo(Forwarding::Nat);
    let _ = all_but_the_last(&mut lab, 50);
    let refused = lab.pipeline.counters.dropped_for(FrameDrop::FragmentMemory);
    let waiting = lab.pipeline.common().reassembler.waiting() as u64;
    assert_eq!(refused + waiting, 50 * 1023);
    assert!(
        waiting < 16_000,
        "too many fragments of 8 bytes wait: {waiting}"
    );
}

/// A batch of super-packets, with the smallest segments that are accepted, is sent into a tunnel,
/// so that each must be cut. Super-packets with smaller segments are dropped.
#[test]
fn super_packets_are_segmented_in_portions_and_dropped_if_segments_are_tiny() {
    let mut lab = echo(Forwarding::Tunnel);
    let aggregate = |size: u16| {
        let ip = packet(
            addr("192.0.2.7:7"),
            addr(VIP),
            Protocol::TCP,
            &vec![0; 65_000],
        );
        let mut frame = Frame::from_bytes(&from_client(&ip));
        frame.offload = Offload {
            segments: Some(Segments {
                kind: SegmentKind::Tcp4,
                size,
                header_len: 0,
                ecn: false,
            }),
            ..Offload::default()
        };
        frame
    };
    let mut tiny: Vec<Frame> = (1..127).map(aggregate).collect();
    let (_, all, _) = in_portions(&mut lab, &mut tiny);
    assert_eq!(all, 0);
    let counters = &lab.pipeline.counters;
    assert_eq!(counters.dropped_for(FrameDrop::TinySegments), 126);
    let mut fine: Vec<Frame> = (0..64).map(|_| aggregate(127)).collect();
    let (most, all, bytes) = in_portions(&mut lab, &mut fine);
    assert_eq!(all, 64 * 512);
    assert!(
        most <= 1024 + 512,
        "{most} segments are in memory at the same time"
    );
    assert!(
        bytes < 2 << 20,
        "{bytes} bytes are in memory at the same time"
    );
}

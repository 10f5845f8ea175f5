//! Where the packet path differs from the kernel's on purpose: see ARCHITECTURE.md.

mod lab;

use std::net::SocketAddr;

use etherparse::PacketBuilder;
use lab::{CL_MAC, CLIENTS, GW_MAC, SERVERS, SV_MAC, set_mtu, table};
use lvs_core::{
    Director, Family, Forwarding, Instant, Options, ServerConfig, ServiceConfig, ServiceKey,
};
use lvs_dataplane::packet::drop::FrameDrop;
use lvs_dataplane::packet::fragment::MEMORY_MAX;
use lvs_dataplane::packet::frame::Frame;
use lvs_dataplane::packet::intercept::Intercept;
use lvs_dataplane::packet::net::PortId;
use lvs_dataplane::packet::pipeline::{Env, Output, Pipeline, Settings};
use lvs_dataplane::packet::wire::Mac;

#[test]
fn fragments_of_both_directions_share_4_mib() {
    assert_eq!(MEMORY_MAX, 4 << 20);
}

/// The kernel's host refuses it on its way to the hook, so nobody counts it.
#[test]
fn a_reply_that_does_not_fit_is_refused_before_it_is_counted() {
    let (vip, server): (SocketAddr, SocketAddr) = (
        "198.51.100.1:80".parse().unwrap(),
        "10.1.0.11:80".parse().unwrap(),
    );
    let key = ServiceKey::tcp(vip);
    let mut director = Director::new(Options::default());
    let config = ServiceConfig::new(Family::V4, "rr");
    director.control.add_service(key, config, None).unwrap();
    director
        .control
        .add_server(
            &key,
            server,
            &ServerConfig::new(1, Forwarding::Nat),
            Instant::ZERO,
        )
        .unwrap();
    let intercept = Intercept::of(&director.control, &Intercept::default());
    let mut net = table();
    net.vips.insert(vip.ip());
    net.local.insert(vip.ip());
    set_mtu(&mut net, [1200, 1500]);
    let (mut decide, mut pipeline) = (director, Pipeline::alone(Settings::UNLIMITED));
    let mut send = |port: PortId, to: Mac, ip: &[u8]| -> usize {
        let frame = [&to.0[..], &GW_MAC.0, &[8, 0], ip].concat();
        let env = Env {
            net: &net,
            intercept: &intercept,
            pmtu_disc: true,
        };
        let (mut out, mut frames) = (Output::new(), [Frame::from_bytes(&frame)]);
        let now = Instant::from_secs(1);
        pipeline.process(port, &mut frames, &env, &mut decide, now, &mut out);
        out.queues().map(|(_, frames)| frames.len()).sum()
    };
    let mut syn = Vec::new();
    PacketBuilder::ipv4([203, 0, 113, 9], [198, 51, 100, 1], 64)
        .tcp(40_000, 80, 1, 500)
        .syn()
        .write(&mut syn, b"")
        .unwrap();
    assert_eq!(send(CLIENTS, CL_MAC, &syn), 1);
    let mut answer = Vec::new();
    PacketBuilder::ipv4([10, 1, 0, 11], [203, 0, 113, 9], 64)
        .tcp(80, 40_000, 1, 500)
        .ack(2)
        .write(&mut answer, &[b'x'; 1400])
        .unwrap();
    // "Don't fragment" and a header that says so.
    answer[6] = 0x40;
    let sum = etherparse::Ipv4HeaderSlice::from_slice(&answer)
        .unwrap()
        .to_header()
        .calc_header_checksum();
    answer[10..12].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(send(SERVERS, SV_MAC, &answer), 1, "an ICMP error");
    assert_eq!(pipeline.counters.dropped_for(FrameDrop::TooBig), 1);
    assert_eq!(pipeline.counters.icmp_sent, 1);
    let counted = decide.control.total_stats().live;
    assert_eq!(counted.out_packets, 0, "it was not counted");
}

//! Dropped packets of connections are counted for their services.

use std::net::SocketAddr;
use std::time::Duration;

use crate::lab::director::DirectorLab;
use etherparse::PacketBuilder;
use lvs_core::{Family, Forwarding, ServerConfig, ServiceConfig, ServiceKey};
use lvs_packet::drop::FrameDrop;
use lvs_packet::frame::Offload;

/// Two packets wait for a neighbour that does not answer, and one has no route.
#[test]
fn undeliverable_packets_of_connection_count_for_their_service() {
    let vip: SocketAddr = "10.0.0.80:80".parse().expect("the address is valid");
    let key = ServiceKey::tcp(vip);
    let mut lab = DirectorLab::new(|control| {
        let config = ServiceConfig::new(Family::V4, "rr");
        control
            .add_service(key, config, None)
            .expect("the service can be added");
        let server = "10.1.0.11:80".parse().expect("the address is valid");
        let config = ServerConfig::new(1, Forwarding::Nat);
        let now = lvs_core::Instant::ZERO;
        control
            .add_server(&key, server, &config, now)
            .expect("the server can be added");
    });
    lab.net.all_neighbours = None;
    let packet = |to: [u8; 4], len: usize| {
        let mut ip = Vec::new();
        PacketBuilder::ipv4([192, 0, 2, 7], to, 64)
            .tcp(4000, 80, 1, 500)
            .syn()
            .write(&mut ip, &vec![b'x'; len])
            .expect("writing to a vector succeeds");
        ip
    };
    let request = packet([10, 0, 0, 80], 0);
    for _ in 0..2 {
        assert!(lab.request(&request, Offload::default()).is_empty());
    }
    lab.pipeline.expire(lab.now + Duration::from_secs(4));
    lab.net.routes.clear();
    lab.request(&request, Offload::default());
    assert_eq!(lab.pipeline.counters.dropped_for(FrameDrop::NoRoute), 1);
    // A packet that belongs to no connection.
    lab.request(&packet([10, 9, 9, 9], 0), Offload::default());
    let control = &mut lab.director.control;
    for drops in [&mut lab.pipeline.drops, &mut lab.pipeline.held.drops] {
        control.count_drops(drops, lab.now);
        assert!(drops.is_empty());
    }
    let service = control.service(&key).expect("the service exists");
    let counted = service.drops().at(lab.now);
    let counted: Vec<_> = counted
        .map(|(reason, packets)| (reason, packets.count))
        .collect();
    assert_eq!(counted, [("no_route", 1), ("no_neighbour", 2)]);
}

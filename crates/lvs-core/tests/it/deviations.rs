//! Tests of differences from the kernel in this crate. docs/decisions.md lists all differences; the
//! tests of other differences are in other crates.

use std::net::SocketAddr;

use lvs_core::{
    ConnId, Director, Family, Forwarding, Instant, Options, ServerConfig, ServiceConfig,
    ServiceKey, TcpFlags, Verdict,
};

use crate::common::{VIP, forwarded, tcp as segment};

fn director() -> Director {
    let mut director = Director::new(Options::default());
    let key = ServiceKey::tcp(VIP.parse().unwrap());
    director.advance(Instant::ZERO);
    let config = ServiceConfig::new(Family::V4, "rr");
    director.control.add_service(key, config, None).unwrap();
    for server in ["10.0.0.1:80", "10.0.0.2:80"] {
        let config = ServerConfig::new(1, Forwarding::Nat);
        let server = server.parse().unwrap();
        director
            .control
            .add_server(&key, server, &config, Instant::ZERO)
            .unwrap();
    }
    director
}

fn from_client(director: &mut Director, port: u16, flags: u8, now: Instant) -> Verdict {
    let client = SocketAddr::from(([192, 0, 2, 7], port));
    director.handle_packet(&segment(client, VIP.parse().unwrap(), flags), now)
}

#[test]
fn connection_listing_is_ordered_by_slot() {
    let mut director = director();
    let now = Instant::from_secs(1);
    let ports: Vec<u16> = (1001..1200).collect();
    for &port in &ports {
        let _ = from_client(&mut director, port, TcpFlags::SYN, now);
    }
    let listed = |director: &Director, now| -> Vec<(ConnId, u16)> {
        let all = director.shard.connections_from(0, now);
        all.map(|connection| (connection.id, connection.client.port()))
            .collect()
    };
    let before = listed(&director, now);
    // Connections are not listed in the order of their arrival, but always in the same order.
    assert!(before.is_sorted_by_key(|(slot, _)| *slot));
    let in_order = |listed: &[(ConnId, u16)]| listed.iter().map(|&(_, port)| port).collect();
    let mut all: Vec<u16> = in_order(&before);
    assert_ne!(all, ports);
    all.sort_unstable();
    assert_eq!(all, ports);
    // A new connection does not change the order of the others.
    let _ = from_client(&mut director, 5000, TcpFlags::SYN, now);
    let mut after = listed(&director, now);
    after.retain(|&(_, port)| port != 5000);
    assert_eq!(after, before);
    // A listing in pieces is the same as a complete listing, whatever the size of the pieces.
    let (mut start, mut pieces) = (Some(0), Vec::new());
    while let Some(from) = start {
        let (piece, next) = director.shard.connections_piece(from, 20, now);
        pieces.extend(piece.iter().map(|connection| connection.id));
        start = next;
    }
    let whole: Vec<ConnId> = listed(&director, now).iter().map(|(id, _)| *id).collect();
    assert_eq!(pieces, whole);
}

#[test]
fn connection_timer_fires_at_deadline_and_not_before() {
    let mut director = director();
    let _ = from_client(&mut director, 10, TcpFlags::SYN, Instant::ZERO);
    let deadline = Instant::from_secs(60);
    director.advance(Instant::from_nanos(deadline.as_nanos() - 1));
    assert_eq!(director.shard.len(), 1);
    director.advance(deadline);
    assert_eq!(director.shard.len(), 0);
}

/// A SYN with the addresses and ports of an old connection opens a new one at once. The kernel
/// drops this SYN if netfilter tracks the old connection, and schedules the repeated SYN.
#[test]
fn port_reuse_with_conntrack_needs_no_second_syn() {
    const FIN: u8 = TcpFlags::FIN | TcpFlags::ACK;
    let mut director = director();
    director.control.set_sysctl("conntrack", "1").unwrap();
    let now = Instant::from_secs(1);
    let first = forwarded(from_client(&mut director, 10, TcpFlags::SYN, now));
    let client = SocketAddr::from(([192, 0, 2, 7], 10));
    for flags in [TcpFlags::SYN | TcpFlags::ACK, FIN] {
        let _ = director.handle_packet(&segment(first.target, client, flags), now);
        let _ = from_client(&mut director, 10, flags & !TcpFlags::SYN, now);
    }
    let state = director
        .shard
        .connections_from(0, now)
        .next()
        .unwrap()
        .state;
    assert_eq!(state, "TIME_WAIT");
    let again = forwarded(from_client(&mut director, 10, TcpFlags::SYN, now));
    assert!(again.new && again.target != first.target);
}

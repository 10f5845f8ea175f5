//! Where this director differs from the kernel's on purpose. ARCHITECTURE.md lists all of it; what is not here is pinned
//! where it belongs.

use std::net::SocketAddr;

use lvs_core::{
    Director, Family, Forwarding, Hook, Instant, Options, PacketMeta, Protocol, Segment,
    ServerConfig, ServiceConfig, ServiceKey, TcpFlags, Transport, Tuple, Verdict,
};

const VIP: &str = "198.51.100.1:80";

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

fn segment(src: SocketAddr, dst: SocketAddr, flags: u8) -> PacketMeta<'static> {
    PacketMeta {
        hook: if dst.to_string() == VIP {
            Hook::Local
        } else {
            Hook::Transit
        },
        tuple: Tuple {
            protocol: Protocol::TCP,
            src,
            dst,
        },
        transport: Transport::Tcp(TcpFlags(flags)),
        segment: Segment::NONE,
        mark: 0,
        len: 40,
    }
}

fn from_client(director: &mut Director, port: u16, flags: u8, now: Instant) -> Verdict {
    let client = SocketAddr::from(([192, 0, 2, 7], port));
    director.handle_packet(&segment(client, VIP.parse().unwrap(), flags), now)
}

#[test]
fn listings_are_in_the_order_of_slots() {
    let mut director = director();
    let now = Instant::from_secs(1);
    for port in [30, 10, 25] {
        let _ = from_client(&mut director, port, TcpFlags::SYN, now);
    }
    let listed = |director: &Director, now| -> Vec<u16> {
        let all = director.shard.connections_from(0, now);
        all.map(|connection| connection.client.port()).collect()
    };
    assert_eq!(listed(&director, now), [30, 10, 25]);
    // The first to end makes room for the next to come.
    let later = Instant::from_secs(50);
    for port in [30, 25] {
        let _ = from_client(&mut director, port, TcpFlags::SYN, later);
    }
    let later = Instant::from_secs(70);
    let _ = from_client(&mut director, 5, TcpFlags::SYN, later);
    assert_eq!(listed(&director, later), [30, 5, 25]);
}

#[test]
fn timers_fire_on_time() {
    let mut director = director();
    let _ = from_client(&mut director, 10, TcpFlags::SYN, Instant::ZERO);
    let deadline = Instant::from_secs(60);
    director.advance(Instant::from_nanos(deadline.as_nanos() - 1));
    assert_eq!(director.shard.len(), 1);
    director.advance(deadline);
    assert_eq!(director.shard.len(), 0);
}

/// The kernel drops a SYN that takes over a connection which netfilter tracks, and balances its repetition.
#[test]
fn port_reuse_needs_no_second_syn_though_conntrack_is_on() {
    const FIN: u8 = TcpFlags::FIN | TcpFlags::ACK;
    let mut director = director();
    director.control.set_sysctl("conntrack", "1").unwrap();
    let now = Instant::from_secs(1);
    let Verdict::Forward(first) = from_client(&mut director, 10, TcpFlags::SYN, now) else {
        panic!("a server is there");
    };
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
    let said = from_client(&mut director, 10, TcpFlags::SYN, now);
    let Verdict::Forward(again) = said else {
        panic!("the SYN itself opens the connection: {said:?}");
    };
    assert!(again.new && again.target != first.target);
}

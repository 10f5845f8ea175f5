//! What the benchmarks share: directors with services, servers and connections in them.

use std::net::SocketAddr;

use lvs_core::{
    Director, Family, Forwarding, Hook, Instant, Options, PacketMeta, Protocol, Segment,
    ServerConfig, ServiceConfig, ServiceKey, TcpFlags, Transport, Tuple, Verdict,
};

/// The virtual service of every benchmark.
pub fn vip() -> SocketAddr {
    SocketAddr::from(([198, 51, 100, 1], 80))
}

/// Client number `n`: 50,000 ports of each address.
pub fn client(n: u32) -> SocketAddr {
    let port = u16::try_from(10_000 + n % 50_000).expect("below 60,000");
    SocketAddr::from(((0x0a00_0000 + n / 50_000).to_be_bytes(), port))
}

/// A segment from `client` to the service.
pub fn segment(client: SocketAddr, flags: u8) -> PacketMeta<'static> {
    PacketMeta {
        hook: Hook::Local,
        tuple: Tuple {
            protocol: Protocol::TCP,
            src: client,
            dst: vip(),
        },
        transport: Transport::Tcp(TcpFlags(flags)),
        segment: Segment::NONE,
        mark: 0,
        len: 40,
    }
}

/// A director with `servers` servers behind `scheduler` and `connections` established connections.
///
/// # Panics
/// If a connection is refused: the benchmark would measure nothing.
pub fn director(scheduler: &str, servers: u8, connections: u32) -> Director {
    let options = Options {
        max_connections: 1 << 21,
        ..Options::default()
    };
    let mut director = Director::new(options);
    let service = ServiceKey::tcp(vip());
    let config = ServiceConfig::new(Family::V4, scheduler);
    director
        .control
        .add_service(service, config, None)
        .expect("a new service");
    for n in 1..=servers {
        let addr = SocketAddr::from(([10, 1, 0, n], 80));
        let config = ServerConfig::new(i32::from(n % 4) + 1, Forwarding::Nat);
        director
            .control
            .add_server(&service, addr, &config, Instant::ZERO)
            .expect("a new server");
    }
    for n in 0..connections {
        for flags in [TcpFlags::SYN, TcpFlags::ACK] {
            let verdict = director.handle_packet(&segment(client(n), flags), Instant::ZERO);
            assert!(matches!(verdict, Verdict::Forward(_)), "{verdict:?}");
        }
    }
    director
}

//! Addresses and packets that several tests use.

use std::net::SocketAddr;

use lvs_core::{
    Director, Forward, Forwarding, Hook, Instant, Options, PacketMeta, Protocol, ServerConfig,
    ServiceConfig, ServiceKey, TcpFlags, Transport, Tuple, Verdict,
};

pub(crate) const VIP: &str = "198.51.100.1:80";
pub(crate) const CLIENT: &str = "192.0.2.7:40000";

pub(crate) fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

pub(crate) fn server(n: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, n], 80))
}

/// Creates a director with one service and servers 10.0.0.1, 10.0.0.2, ... with the port of the
/// service.
pub(crate) fn director(
    key: ServiceKey,
    config: ServiceConfig,
    method: Forwarding,
    servers: u8,
) -> Director {
    let mut director = Director::new(Options {
        max_connections: 1 << 17,
        ..Options::default()
    });
    director.advance(Instant::ZERO);
    director.control.add_service(key, config, None).unwrap();
    for n in 1..=servers {
        let server = SocketAddr::from(([10, 0, 0, n], key.port()));
        director
            .control
            .add_server(&key, server, &ServerConfig::new(1, method), Instant::ZERO)
            .unwrap();
    }
    director
}

/// A packet of 40 bytes; it is in transit unless its destination is the [`VIP`].
pub(crate) fn packet(src: SocketAddr, dst: SocketAddr, transport: Transport<'_>) -> PacketMeta<'_> {
    let local = dst == addr(VIP);
    let hook = if local { Hook::Local } else { Hook::Transit };
    let protocol = match transport {
        Transport::Udp(_) => Protocol::UDP,
        _ => Protocol::TCP,
    };
    PacketMeta::new(hook, Tuple::new(protocol, src, dst), transport, 40)
}

pub(crate) fn tcp(src: SocketAddr, dst: SocketAddr, flags: u8) -> PacketMeta<'static> {
    packet(src, dst, Transport::Tcp(TcpFlags(flags)))
}

/// Returns how the packet is forwarded. Panics if the verdict is another one.
#[track_caller]
pub(crate) fn forwarded(verdict: Verdict) -> Forward {
    let Verdict::Forward(forward) = verdict else {
        panic!("the packet is not forwarded: {verdict:?}");
    };
    forward
}

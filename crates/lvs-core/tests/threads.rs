//! Several workers at once: shards on threads of their own, the control half behind a lock.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Barrier, Mutex};
use std::thread;

use lvs_core::{
    Control, Counts, Family, Forwarding, Hook, Instant, Options, PacketMeta, Protocol, Segment,
    ServerConfig, ServiceConfig, ServiceKey, Shard, TcpFlags, Transport, Tuple, Verdict,
};

const WORKERS: usize = 4;
const SERVERS: u8 = 3;
/// Connections that each worker opens.
const CONNECTIONS: u32 = 20_000;
const REQUEST: u32 = 100;
const RESPONSE: u32 = 1000;

fn vip() -> SocketAddr {
    SocketAddr::from(([198, 51, 100, 1], 80))
}

fn client(worker: usize, n: u32) -> SocketAddr {
    let host = Ipv4Addr::from_bits(0x0a80_0000 + n / 1000);
    let port = 1024 + u16::try_from(n % 1000).unwrap() * 4 + u16::try_from(worker).unwrap();
    SocketAddr::new(IpAddr::V4(host), port)
}

fn segment(src: SocketAddr, dst: SocketAddr, flags: u8, len: u32) -> PacketMeta<'static> {
    PacketMeta {
        hook: if dst == vip() {
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
        len,
    }
}

fn decide(
    control: &Mutex<Control>,
    shard: &mut Shard,
    packet: &PacketMeta<'_>,
    now: Instant,
) -> Verdict {
    match shard.handle_packet(packet, now) {
        Ok(verdict) => verdict,
        Err(pending) => control.lock().unwrap().admit(shard, packet, pending, now),
    }
}

/// Every connection is opened, answered, and left established.
fn work(control: &Mutex<Control>, shard: &mut Shard, worker: usize, now: Instant) {
    for n in 0..CONNECTIONS {
        let client = client(worker, n);
        let syn = segment(client, vip(), TcpFlags::SYN, REQUEST);
        let Verdict::Forward(forward) = decide(control, shard, &syn, now) else {
            panic!("worker {worker}: connection {n} was not opened");
        };
        let server = forward.target;
        let answer = segment(server, client, TcpFlags::SYN | TcpFlags::ACK, RESPONSE);
        assert!(matches!(
            decide(control, shard, &answer, now),
            Verdict::Reply(_)
        ));
        let ack = segment(client, vip(), TcpFlags::ACK, REQUEST);
        assert!(
            matches!(decide(control, shard, &ack, now), Verdict::Forward(again) if again.target == server)
        );
    }
}

/// Workers that open connections at the same moment, while the weights change, lose and invent
/// nothing.
#[test]
fn counters_and_counts_are_exact_across_workers() {
    let mut control = Control::new(Options {
        max_connections: CONNECTIONS as usize,
        shards: WORKERS,
        ..Options::default()
    });
    let now = Instant::ZERO;
    control.advance(now);
    let key = ServiceKey::tcp(vip());
    let config = ServiceConfig::new(Family::V4, "wlc");
    control.add_service(key, config, None).unwrap();
    for n in 1..=SERVERS {
        let config = ServerConfig::new(1, Forwarding::Nat);
        let server = SocketAddr::from(([10, 0, 0, n], 8080));
        control.add_server(&key, server, &config, now).unwrap();
    }
    let mut shards: Vec<Shard> = (0..WORKERS)
        .map(|number| control.shard(number).unwrap())
        .collect();
    let control = Mutex::new(control);
    let start = Barrier::new(WORKERS + 1);
    thread::scope(|scope| {
        for (worker, shard) in shards.iter_mut().enumerate() {
            let (control, start) = (&control, &start);
            scope.spawn(move || {
                start.wait();
                work(control, shard, worker, now);
            });
        }
        start.wait();
        for round in 0..200 {
            let server = SocketAddr::from(([10, 0, 0, 1 + round % SERVERS], 8080));
            let config = ServerConfig::new(1 + i32::from(round % 2), Forwarding::Nat);
            let mut control = control.lock().unwrap();
            control.edit_server(&key, server, &config).unwrap();
        }
    });

    let mut control = control.into_inner().unwrap();
    let opened = u64::from(CONNECTIONS) * WORKERS as u64;
    let expected = Counts {
        conns: opened,
        in_packets: 2 * opened,
        out_packets: opened,
        in_bytes: 2 * opened * u64::from(REQUEST),
        out_bytes: opened * u64::from(RESPONSE),
    };
    let service = control.service(&key).unwrap();
    assert_eq!(service.stats().live, expected);
    assert_eq!(control.total_stats().live, expected);
    let of_servers = service
        .servers()
        .iter()
        .map(|server| control.server_stats(server.id()).unwrap().live);
    assert_eq!(of_servers.map(|counts| counts.conns).sum::<u64>(), opened);
    let active: u64 = service
        .servers()
        .iter()
        .map(|server| u64::from(server.active()))
        .sum();
    assert_eq!(active, opened, "all are established");

    let end = Instant::from_secs(901);
    for shard in &mut shards {
        shard.advance(end, usize::MAX);
        assert!(shard.is_empty());
    }
    control.advance(end);
    for server in control.service(&key).unwrap().servers() {
        assert_eq!((server.total(), server.active()), (0, 0));
    }
}

//! Several threads at once: each has a shard, and they share a `Control` behind a lock.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

use lvs_core::settings::{Extras, Limits};
use lvs_core::stats::Counts;
use lvs_core::{
    Control, DropReason, Family, Forwarding, Instant, Options, PacketMeta, ServerConfig,
    ServiceConfig, ServiceKey, Shard, TcpFlags, Verdict,
};

use crate::common::tcp;

const WORKERS: usize = 4;
const SERVERS: u8 = 3;
/// Number of connections that each worker opens.
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
        len,
        ..tcp(src, dst, flags)
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

/// Opens connections, and lets the server answer each of them.
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

/// Workers open connections at the same time, while weights change. Each connection is counted
/// exactly once.
#[test]
fn traffic_and_connection_counters_are_exact_across_workers() {
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
    assert_eq!(
        active, opened,
        "some of the opened connections do not count as active"
    );

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

/// Each worker sends the SYNs of 1,000 clients, all workers at the same time. `clients` returns the
/// client of a worker's packet with a given number. Returns the number of connections that all
/// workers opened together, and the reasons of the refusals, without consecutive duplicates.
fn rush(
    control: &Mutex<Control>,
    shards: &mut [Shard],
    clients: impl Fn(u16, u16) -> SocketAddr + Sync,
    now: Instant,
) -> (usize, Vec<DropReason>) {
    const EACH: u16 = 1000;
    let start = Barrier::new(shards.len());
    let workers = thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(shards)
            .map(|(worker, shard)| {
                let (start, clients) = (&start, &clients);
                scope.spawn(move || {
                    start.wait();
                    let (mut opened, mut refused) = (0, Vec::new());
                    for n in 0..EACH {
                        let syn = segment(clients(worker, n), vip(), TcpFlags::SYN, REQUEST);
                        match decide(control, shard, &syn, now) {
                            Verdict::Forward(_) => opened += 1,
                            Verdict::Drop(reason) => refused.push(reason),
                            other => panic!("worker {worker}: a SYN was neither forwarded nor dropped: {other:?}"),
                        }
                    }
                    assert_eq!(opened + refused.len(), usize::from(EACH));
                    (opened, refused)
                })
            })
            .collect();
        let done = threads.into_iter().map(|thread| thread.join().unwrap());
        done.collect::<Vec<_>>()
    });
    let (opened, mut refused): (Vec<usize>, Vec<_>) = workers.into_iter().unzip();
    let mut refused: Vec<_> = refused.drain(..).flatten().collect();
    refused.dedup();
    (opened.into_iter().sum(), refused)
}

/// The limits of a service do not depend on the number of workers that open its connections.
#[test]
fn service_limits_hold_across_workers() {
    let of_many = |worker: u16, n: u16| {
        let [[_, c], [a, b]] = [worker, n].map(u16::to_be_bytes);
        SocketAddr::from(([10, 1 + c, a, b], 9))
    };
    let of_one = |worker, n| SocketAddr::from(([10, 9, 9, 9], 1024 + 2000 * worker + n));
    let none = Limits::default();
    let connections = Limits {
        connections: 150,
        ..none
    };
    let rate = Limits { rate: 200, ..none };
    let source_rate = Limits {
        source_rate: 50,
        ..none
    };
    // The numbers of open connections: immediately, half a second later, and after all of them have
    // ended.
    for (limits, spread, reason, expected) in [
        (connections, true, DropReason::ServiceFull, [150, 0, 150]),
        (rate, true, DropReason::ServiceRate, [200, 100, 200]),
        (source_rate, false, DropReason::SourceRate, [50, 25, 50]),
    ] {
        let mut control = Control::new(Options {
            max_connections: 1 << 14,
            shards: 2,
            ..Options::default()
        });
        let begin = Instant::from_secs(1);
        control.advance(begin);
        let key = ServiceKey::tcp(vip());
        let config = ServiceConfig {
            extras: Extras {
                limits,
                ..Extras::default()
            },
            ..ServiceConfig::new(Family::V4, "rr")
        };
        control.add_service(key, config, None).unwrap();
        let server = ServerConfig::new(1, Forwarding::Nat);
        let addr = SocketAddr::from(([10, 0, 0, 1], 8080));
        control.add_server(&key, addr, &server, begin).unwrap();
        let mut shards: Vec<Shard> = (0..2).map(|n| control.shard(n).unwrap()).collect();
        let control = Mutex::new(control);
        // Each round uses new clients.
        let moments = [
            begin,
            begin + Duration::from_millis(500),
            Instant::from_secs(100),
        ];
        for (round, (now, expected)) in (0_u16..).zip(moments.into_iter().zip(expected)) {
            for shard in &mut shards {
                shard.advance(now, usize::MAX);
            }
            control.lock().unwrap().advance(now);
            let clients = |worker, n| match spread {
                true => of_many(worker, 1000 * round + n),
                false => of_one(worker, 5000 * round + n),
            };
            let (opened, refused) = rush(&control, &mut shards, clients, now);
            assert_eq!(opened, expected, "{limits:?}, round {round}");
            assert_eq!(refused, [reason], "{limits:?}, round {round}");
        }
    }
}

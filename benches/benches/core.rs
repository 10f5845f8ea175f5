//! Measures the CPU time of scheduling decisions and of the packet path in memory, for several
//! numbers of connections, clients, services and servers.
//!
//! The benchmark `line table`, which parses, looks up and rewrites packets with a minimal table, is
//! the baseline of the benchmark `pipeline` in the same run. `LVS_BENCH_LARGE=1` adds a case with
//! 10,000,000 connections, which needs 4 GB and a minute.

use std::cell::RefCell;
use std::env;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use lvs_bench::memory::{self, Clients, Pipeline, Setup, segment, vip};
use lvs_bench::yardsticks::{LineTable, Yardsticks};
use lvs_core::filter::{FilterLists, SourceFilter};
use lvs_core::{
    DropReason, Family, Hook, Instant, Prefix, ServiceConfig, ServiceKey, TcpFlags, Verdict,
};
use lvs_packet::frame::Frame;
use lvs_packet::parse;
use lvs_packet::rewrite::nat::{self, End};

/// Distance between the connections of consecutive packets. A prime, so that all connections have
/// packets; large, so that consecutive packets use distant memory.
const STEP: u32 = 7_919;
const FEW_CLIENTS: Clients = Clients { bits: 10 };
const MANY_CLIENTS: Clients = Clients { bits: 24 };

fn steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step");
    group.throughput(Throughput::Elements(1));
    let bytes = memory::example();
    group.bench_function("parse", |bencher| {
        bencher.iter(|| {
            let ip = &black_box(&bytes)[14..];
            let packet = parse::ipv4(ip, false).expect("the packet is parsed");
            black_box(packet.meta(ip, Hook::Local, 0).tuple)
        });
    });
    let mut frame = Frame::from_bytes(&bytes[14..]);
    let packet = parse::ipv4(frame.bytes(), false).expect("the packet is parsed");
    let targets = [([10, 1, 0, 1], 80), ([10, 1, 0, 2], 8080)];
    let mut at = 0;
    group.bench_function("rewrite", |bencher| {
        bencher.iter(|| {
            at = (at + 1) % targets.len();
            let done = nat::translate(&mut frame, &packet, End::Destination, targets[at].into());
            black_box(done).expect("the packet is translated");
        });
    });
    let connections = 100_000;
    let mut director = Setup::default().director_with(connections, FEW_CLIENTS);
    let mut at = 0;
    group.bench_function("look up, of 100,000", |bencher| {
        bencher.iter(|| {
            at = (at + STEP) % connections;
            let meta = segment(FEW_CLIENTS.of(at), vip(), TcpFlags::ACK);
            black_box(director.handle_packet(&meta, Instant::from_secs(1)))
        });
    });
    group.finish();
}

fn pipeline(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pipeline");
    group.throughput(Throughput::Elements(1));
    group.sample_size(10);
    let yardsticks = Yardsticks::build().expect("the yardsticks can be compiled");
    let mut sizes = vec![1_000, 100_000, 1_000_000];
    if env::var_os("LVS_BENCH_LARGE").is_some() {
        sizes.push(10_000_000);
    }
    for connections in sizes {
        for (name, clients) in [
            ("1,000 clients", FEW_CLIENTS),
            ("own clients", MANY_CLIENTS),
        ] {
            let pipeline = RefCell::new(None);
            let open = || Pipeline::new(connections, clients).expect("all packets are forwarded");
            for (direction, replies) in [("requests", false), ("replies", true)] {
                let id = BenchmarkId::new(format!("{direction}, {name}"), connections);
                group.bench_function(id, |bencher| {
                    let mut pipeline = pipeline.borrow_mut();
                    let pipeline = pipeline.get_or_insert_with(open);
                    pipeline.replies = replies;
                    bencher.iter_custom(|times| {
                        scaled(times, || {
                            pipeline.measure().expect("all packets are forwarded")
                        })
                    });
                });
            }
        }
        let mut table = None;
        group.bench_function(BenchmarkId::new("line table", connections), |bencher| {
            let table = table.get_or_insert_with(|| {
                LineTable::new(&yardsticks, connections, FEW_CLIENTS.bits, 1)
                    .expect("the table has memory")
            });
            bencher.iter_custom(|times| {
                scaled(times, || {
                    table.measure().expect("the line table is measured")
                })
            });
        });
    }
    group.finish();
}

/// Returns the time of `times` packets. `nanoseconds` returns the mean time of a packet.
fn scaled(times: u64, mut nanoseconds: impl FnMut() -> f64) -> Duration {
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    Duration::from_secs_f64(nanoseconds() * times as f64 / 1e9)
}

fn new_connection(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("new connection");
    group.throughput(Throughput::Elements(1));
    group.sample_size(10);
    for (services, servers) in [(1, 4), (1, 1000), (10_000, 4)] {
        for scheduler in ["rr", "wrr", "lc", "wlc", "sh", "mh"] {
            let setup = Setup {
                scheduler,
                services,
                servers,
                ..Setup::default()
            };
            let id = BenchmarkId::new(scheduler, format!("{services} services, {servers} servers"));
            group.bench_function(id, |bencher| {
                bencher
                    .iter_custom(|times| scaled(times, || memory::new_connection(&setup, vip())));
            });
        }
    }
    let mut churn = memory::Churn::new();
    group.bench_function("while the same number of connections end", |bencher| {
        let mut nanoseconds = || {
            1e9 / churn
                .measure()
                .expect("as many connections end as are opened")
        };
        bencher.iter_custom(|times| scaled(times, &mut nanoseconds));
    });
    group.finish();
}

fn expiry(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("expiry");
    group.sample_size(10);
    let connections = 100_000;
    group.throughput(Throughput::Elements(u64::from(connections)));
    group.bench_function("all at once", |bencher| {
        bencher.iter_batched(
            || Setup::default().director_with(connections, FEW_CLIENTS),
            |mut director| {
                director.advance(Instant::from_secs(900));
                assert!(director.shard.is_empty());
                director
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

fn first_packet(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("packet that opens a connection");
    group.throughput(Throughput::Elements(1));
    let mut director = Setup::default().director();
    let mut at = 0_u32;
    group.bench_function("wlc, 8 servers", |bencher| {
        bencher.iter(|| {
            // A connection in SYN_RECV expires after 60 s: the clock advances so that as many
            // connections end as begin.
            at = at.wrapping_add(1);
            let now = Instant::from_nanos(u64::from(at) * 100_000);
            let meta = segment(FEW_CLIENTS.of(at % 40_000_000), vip(), TcpFlags::SYN);
            let verdict = director.handle_packet(&meta, now);
            assert!(matches!(verdict, Verdict::Forward(_)));
        });
    });
    group.bench_function("Maglev table of 65,521 slots, 1,000 servers", |bencher| {
        bencher.iter_custom(|times| scaled(times, || memory::maglev(1000) * 1e6));
    });
    group.finish();
}

/// Cost of a source filter, by its number of prefixes, for a packet that would open a connection.
/// One prefix refuses the packet.
fn filter(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("filter");
    group.throughput(Throughput::Elements(1));
    let six: SocketAddr = "[2001:db8::1]:80".parse().expect("the address is valid");
    for prefixes in [1_u32, 10, 1_000, 10_000, 65_536] {
        for dst in [vip(), six] {
            // The multiplication by an odd number scatters the prefixes over all addresses.
            let source = |n: u32| {
                let n = (n % prefixes).wrapping_mul(0x9e37_79b1);
                match dst {
                    SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::from_bits(n)),
                    SocketAddr::V6(_) => {
                        IpAddr::from(Ipv6Addr::from_bits(u128::from(n) << 72 | 0x2a << 120))
                    }
                }
            };
            let bits = if dst.is_ipv4() { 32 } else { 56 };
            let deny = (0..prefixes)
                .map(|n| Prefix::new(source(n), bits).expect("the prefix length is valid"));
            let lists = FilterLists {
                deny: deny.collect(),
                ..FilterLists::default()
            };
            let filter = SourceFilter::new(lists).expect("the number is within the limit");
            let mut director = Setup::default().director();
            if dst == six {
                let config = ServiceConfig::new(Family::V6, "rr");
                let key = ServiceKey::tcp(six);
                let added = director.control.add_service(key, config, None);
                added.expect("the address is not in use");
            }
            let set = director.control.set_filter(None, filter);
            set.expect("a filter for all");
            let mut at = 0_u32;
            let family = if dst.is_ipv4() { "IPv4" } else { "IPv6" };
            group.bench_function(BenchmarkId::new(family, prefixes), |bencher| {
                bencher.iter(|| {
                    at = at.wrapping_add(STEP);
                    let meta = segment((source(at), 40_000), dst, TcpFlags::SYN);
                    let verdict = director.handle_packet(&meta, Instant::ZERO);
                    assert_eq!(verdict, Verdict::Drop(DropReason::Filtered));
                });
            });
        }
    }
    group.finish();
}

criterion_group!(
    core,
    steps,
    pipeline,
    new_connection,
    first_packet,
    expiry,
    filter
);
criterion_main!(core);

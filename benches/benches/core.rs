//! What the core's decisions cost: a packet of a known connection, a new connection per scheduler, and expiry.
//!
//! The baseline of each group is a look-up in a standard hash map of the same size, in the same run.

use std::collections::HashMap;
use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use lvs_bench::{client, director, segment};
use lvs_core::{Instant, TcpFlags, Verdict};

/// A prime step through the connections, so that neighbours in time are not neighbours in memory.
const STEP: u32 = 7_919;

fn known_connection(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("known connection");
    group.throughput(Throughput::Elements(1));
    for connections in [1_000, 100_000, 1_000_000] {
        let mut director = director("wlc", 8, connections);
        let mut at = 0;
        group.bench_function(BenchmarkId::new("director", connections), |bencher| {
            bencher.iter(|| {
                at = (at + STEP) % connections;
                let meta = segment(client(at), TcpFlags::ACK);
                black_box(director.handle_packet(&meta, Instant::from_secs(1)))
            });
        });
        let map: HashMap<_, _> = (0..connections).map(|n| (client(n), n)).collect();
        group.bench_function(
            BenchmarkId::new("std HashMap get", connections),
            |bencher| {
                bencher.iter(|| {
                    at = (at + STEP) % connections;
                    black_box(map.get(&client(at)))
                });
            },
        );
    }
    group.finish();
}

fn new_connection(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("new connection");
    group.throughput(Throughput::Elements(1));
    for scheduler in ["rr", "wrr", "lc", "wlc"] {
        for servers in [8, 128] {
            let mut director = director(scheduler, servers, 0);
            let mut at = 0_u32;
            group.bench_function(BenchmarkId::new(scheduler, servers), |bencher| {
                bencher.iter(|| {
                    // A connection lives for 60 s in SYN_RECV; the clock moves on so that as many end as begin.
                    at = at.wrapping_add(1);
                    let now = Instant::from_nanos(u64::from(at) * 100_000);
                    let meta = segment(client(at % 40_000_000), TcpFlags::SYN);
                    let verdict = director.handle_packet(&meta, now);
                    assert!(matches!(verdict, Verdict::Forward(_)));
                });
            });
        }
    }
    group.finish();
}

fn expiry(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("expiry");
    group.sample_size(10);
    let connections = 100_000;
    group.throughput(Throughput::Elements(u64::from(connections)));
    group.bench_function("all at once", |bencher| {
        bencher.iter_batched(
            || director("rr", 8, connections),
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

criterion_group!(core, known_connection, new_connection, expiry);
criterion_main!(core);

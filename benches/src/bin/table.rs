//! The connection table in memory: known connections in random order, new ones with as many that
//! end, bytes a connection, and what it costs to do nothing.
//!
//! The yardstick of known connections is a table of two entries a cache line that only ever is read
//! (`line`), looked up in the same order with the same batches, in the same run.

use std::fs;
use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant as Clock};

use anyhow::{Context, Result, anyhow};
use lvs_bench::memory::{self, vip};
use lvs_core::{
    Control, Family, Forwarding, Instant, Options, PacketMeta, ServerConfig, ServiceConfig,
    ServiceKey, Shard, TcpFlags, Tuple, Verdict,
};
use lvs_sys::table_memory;

/// Packets of a batch.
const BATCH: usize = 64;
/// Look-ups of a round.
const LOOKUPS: usize = 1 << 21;
const ROUNDS: usize = 5;

fn main() -> Result<()> {
    println!(
        "{:>10} {:>9} {:>9} {:>9} {:>9} {:>8} {:>9}",
        "known", "line ns", "core ns", "warm ns", "reply ns", "ratio", "bytes"
    );
    for connections in [1_000, 100_000, 1_000_000, 10_000_000] {
        known(connections)?;
    }
    println!();
    for living in [60_000, 1_000_000] {
        new(living)?;
    }
    idle(10_000_000)
}

/// Client number `n`: 50,000 ports of each address.
fn client(n: u32) -> SocketAddrV4 {
    let port = u16::try_from(10_000 + n % 50_000).expect("below 60,000");
    SocketAddrV4::new(Ipv4Addr::from(0x0a00_0000 + n / 50_000), port)
}

/// A segment from `client` to the service.
fn segment(client: SocketAddrV4, flags: u8) -> PacketMeta<'static> {
    memory::segment((*client.ip(), client.port()), vip(), flags)
}

/// A director for that many connections, in large pages.
fn bed(connections: u32) -> Result<(Control, Shard)> {
    let mut control = Control::new(Options {
        max_connections: connections as usize,
        ..Options::default()
    });
    let service = ServiceKey::tcp(vip());
    control.add_service(service, ServiceConfig::new(Family::V4, "rr"), None)?;
    for n in 1..=8 {
        let config = ServerConfig::new(1, Forwarding::Nat);
        control.add_server(&service, server(n), &config, Instant::ZERO)?;
    }
    let (memory, _) = table_memory(control.layout(), true)?;
    let mut shard = control
        .shard_in(0, memory)
        .ok_or_else(|| anyhow!("no shard"))?;
    control.sweep(&mut shard);
    Ok((control, shard))
}

fn server(n: u8) -> SocketAddr {
    SocketAddr::from(([10, 1, 0, n], 80))
}

/// One packet, decided on.
fn decide(
    control: &mut Control,
    shard: &mut Shard,
    meta: &PacketMeta<'_>,
    now: Instant,
) -> Verdict {
    match shard.handle_packet(meta, now) {
        Ok(verdict) => verdict,
        Err(pending) => control.admit(shard, meta, pending, now),
    }
}

fn fill(control: &mut Control, shard: &mut Shard, connections: u32) -> Result<Vec<SocketAddr>> {
    let mut servers = Vec::with_capacity(connections as usize);
    for n in 0..connections {
        for flags in [TcpFlags::SYN, TcpFlags::ACK] {
            match decide(control, shard, &segment(client(n), flags), Instant::ZERO) {
                Verdict::Forward(forward) => servers.push(forward.target),
                verdict => return Err(anyhow!("connection {n}: {verdict:?}")),
            }
        }
        servers.pop();
    }
    Ok(servers)
}

/// The order of look-ups: random, the same in every run.
fn order(connections: u32) -> Vec<u32> {
    let mut x = 88_172_645_463_325_252_u64;
    (0..LOOKUPS)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            u32::try_from(x % u64::from(connections)).unwrap_or(0)
        })
        .collect()
}

/// Nanoseconds an item of the median round.
fn median(items: usize, mut round: impl FnMut()) -> f64 {
    let mut took: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Clock::now();
            round();
            start.elapsed().as_secs_f64() * 1e9 / items as f64
        })
        .collect();
    took.sort_by(f64::total_cmp);
    took[ROUNDS / 2]
}

fn known(connections: u32) -> Result<()> {
    let order = order(connections);
    let line = line_table(connections, &order);
    let before = resident()?;
    let (mut control, mut shard) = bed(connections)?;
    let servers = fill(&mut control, &mut shard, connections)?;
    let held = resident()? - before - (servers.capacity() * size_of::<SocketAddr>()) as f64;
    let now = Instant::from_secs(1);
    let mut run = |warm: bool, replies: bool| {
        median(LOOKUPS, || {
            for batch in order.chunks(BATCH) {
                let metas = batch.iter().map(|&n| {
                    let mut meta = segment(client(n), TcpFlags::ACK);
                    if replies {
                        meta.tuple = Tuple {
                            src: servers[n as usize],
                            dst: meta.tuple.src,
                            ..meta.tuple
                        };
                    }
                    meta
                });
                let metas: Vec<_> = metas.collect();
                if !warm {
                    for meta in &metas {
                        let _ = black_box(shard.handle_packet(meta, now));
                    }
                    continue;
                }
                let load = |word: &AtomicU64| {
                    black_box(word.load(Relaxed));
                };
                let ahead = metas.iter().map(|meta| shard.ahead(&meta.tuple, load));
                let mut ahead: Vec<_> = ahead.collect();
                for ahead in &mut ahead {
                    shard.aim(ahead, load);
                }
                for (meta, ahead) in metas.iter().zip(&ahead) {
                    let _ = black_box(shard.handle_packet_ahead(meta, ahead, now));
                }
            }
        })
    };
    let (cold, warm, reply) = (run(false, false), run(true, false), run(true, true));
    println!(
        "{connections:>10} {line:>9.1} {cold:>9.1} {warm:>9.1} {reply:>9.1} {:>8.2} {:>9.1}",
        cold.min(warm) / line,
        held / f64::from(connections),
    );
    Ok(())
}

/// Looks connections up in lines of two entries of 32 bytes, with a multiplicative hash.
fn line_table(connections: u32, order: &[u32]) -> f64 {
    let lines = (connections as usize).next_power_of_two().max(64);
    let mut table = vec![[[0_u64; 4]; 2]; lines];
    let key = |n: u32| {
        let from = client(n);
        u64::from(from.ip().to_bits()) << 32 | u64::from(from.port()) << 16 | 80
    };
    #[expect(
        clippy::cast_possible_truncation,
        reason = "masked to the number of lines"
    )]
    let hash = |key: u64| {
        let product = u128::from(key ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        (product ^ (product >> 64)) as u64 as usize & (lines - 1)
    };
    for n in 0..connections {
        let (key, mut at) = (key(n), hash(key(n)));
        'place: loop {
            for entry in &mut table[at] {
                if entry[0] == 0 {
                    *entry = [key, u64::from(n), 0, 0];
                    break 'place;
                }
            }
            at = (at + 1) & (lines - 1);
        }
    }
    median(order.len(), || {
        let mut keys = [(0, 0); BATCH];
        for batch in order.chunks(BATCH) {
            let mut read = 0;
            for (place, &n) in keys.iter_mut().zip(batch) {
                *place = (key(n), hash(key(n)));
                read ^= table[place.1][0][0];
            }
            black_box(read);
            for &(key, mut at) in &keys[..batch.len()] {
                'found: loop {
                    for entry in &mut table[at] {
                        if entry[0] == key {
                            entry[2] += 1;
                            black_box(entry[1]);
                            break 'found;
                        }
                    }
                    at = (at + 1) & (lines - 1);
                }
            }
        }
    })
}

/// New connections while as many end: each lives for the 60 seconds of SYN_RECV.
fn new(living: u32) -> Result<()> {
    let (mut control, mut shard) = bed(living + living / 8)?;
    let step = 60_000_000_000 / u64::from(living);
    let mut n = 0_u32;
    let mut run = |many: u32| -> Result<Duration> {
        let start = Clock::now();
        for _ in 0..many / 64 {
            let now = Instant::from_nanos(u64::from(n) * step);
            shard.advance(now, 1024);
            for _ in 0..64 {
                n += 1;
                let meta = segment(client(n % 200_000_000), TcpFlags::SYN);
                let verdict = decide(&mut control, &mut shard, &meta, now);
                if !matches!(verdict, Verdict::Forward(_)) {
                    return Err(anyhow!("refused: {verdict:?}"));
                }
            }
        }
        Ok(start.elapsed())
    };
    run(living * 2)?;
    let many = 4_000_000;
    let mut rates = Vec::new();
    for _ in 0..ROUNDS {
        rates.push(f64::from(many) / run(many)?.as_secs_f64() / 1e6);
    }
    rates.sort_by(f64::total_cmp);
    let left = shard.len();
    println!(
        "new connections, {living} at a time: {:.2} M/s ({:.2}-{:.2}); {left} left",
        rates[ROUNDS / 2],
        rates[0],
        rates[ROUNDS - 1]
    );
    Ok(())
}

/// CPU of a table whose connections are idle, by its wakeups over a minute of its own time.
fn idle(connections: u32) -> Result<()> {
    let (mut control, mut shard) = bed(connections)?;
    // Spread over the 900 seconds of an established connection, as if they had come one by one.
    let step = 900_000_000_000 / u64::from(connections);
    for n in 0..connections {
        let now = Instant::from_nanos(u64::from(n) * step);
        for flags in [TcpFlags::SYN, TcpFlags::ACK] {
            let _ = decide(&mut control, &mut shard, &segment(client(n), flags), now);
        }
        if n % 64 == 0 {
            shard.advance(now, 1024);
        }
    }
    let mut now = Instant::from_secs(900);
    let before = shard.len();
    let end = now + Duration::from_secs(60);
    let (mut wakeups, start) = (0, Clock::now());
    while now < end {
        now = shard.next_wakeup().context("nothing is due")?.max(now);
        while shard.advance(now, 1024) {}
        wakeups += 1;
    }
    let took = start.elapsed();
    println!(
        "idle: {:.2} % of a core, {} wakeups a second; {} of {before} ended",
        took.as_secs_f64() / 60.0 * 100.0,
        wakeups / 60,
        before - shard.len()
    );
    Ok(())
}

/// Bytes of this process in memory.
fn resident() -> Result<f64> {
    let status = fs::read_to_string("/proc/self/statm")?;
    let pages = status
        .split(' ')
        .nth(1)
        .context("no second word in statm")?;
    Ok(pages.parse::<f64>()? * 4096.0)
}

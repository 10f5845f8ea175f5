//! Costs of a change in a small director and in a large one.
//!
//! ```text
//! cargo run --release -p lvs-bench --bin scaling
//! ```
//!
//! Adds, edits and removes one server, and updates a shard after each change: with 10 servers, and
//! with 37,205 servers of 2,277 services. Then the same in one service of 5,000 servers, and the
//! large table filled by one list. Prints medians of [`ROUNDS`] interleaved rounds, with the
//! smallest and the largest.

use std::net::SocketAddr;
use std::time::Instant as Clock;

use anyhow::{Result, anyhow};
use lvs_core::api::{Call, Permissive, ServerSpec, ServiceId, ServiceSpec};
use lvs_core::{Control, Family, Forwarding, Instant, Options, ServerConfig, ServiceConfig, Shard};

const ROUNDS: usize = 9;
/// Changes that are timed together.
const TIMES: u32 = 2000;
const SERVICES: u32 = 2277;
const SERVERS: u32 = 37_205;

fn service(n: u32) -> ServiceId {
    ServiceId::Tcp {
        address: SocketAddr::from(((0xc633_0000 + n).to_be_bytes(), 80)),
    }
}

fn server(n: u32) -> SocketAddr {
    SocketAddr::from(((0x0a00_0000 + n).to_be_bytes(), 8080))
}

fn add_service(n: u32) -> Call {
    Call::ServiceAdd(ServiceSpec {
        service: service(n),
        config: ServiceConfig::new(Family::V4, "wlc"),
        owner: None,
    })
}

fn spec(of: u32, n: u32, weight: i32) -> ServerSpec {
    ServerSpec {
        service: service(of),
        server: server(n),
        config: ServerConfig::new(weight, Forwarding::Nat),
    }
}

/// `servers` servers, dealt out to `services` services.
fn table(services: u32, servers: u32) -> Vec<Call> {
    let all = (0..services).map(add_service);
    let all = all.chain((0..servers).map(|n| Call::ServerAdd(spec(n % services, n, 1))));
    all.collect()
}

struct Bed {
    control: Control,
    shard: Shard,
    /// The service that is changed.
    of: u32,
    /// The next new server.
    next: u32,
}

impl Bed {
    fn new(services: u32, servers: u32) -> Result<Self> {
        let mut control = Control::new(Options {
            max_connections: 1024,
            ..Options::default()
        });
        let shard = control.shard(0).ok_or_else(|| anyhow!("no shard"))?;
        control
            .apply(&table(services, servers), &Permissive, Instant::ZERO)
            .map_err(|refused| anyhow!("{}", refused.failure.message))?;
        Ok(Self {
            control,
            shard,
            of: services / 2,
            next: servers,
        })
    }

    fn change(&mut self, call: Call) {
        let done = self.control.apply(&[call], &Permissive, Instant::ZERO);
        assert!(done.is_ok(), "{done:?}");
        self.control.sweep(&mut self.shard);
    }

    /// Nanoseconds that adding, editing and removing a server take.
    fn round(&mut self) -> [f64; 3] {
        let (of, first) = (self.of, self.next);
        let mut spent = [0.0; 3];
        for n in first..first + TIMES {
            let calls = [
                Call::ServerAdd(spec(of, n, 1)),
                Call::ServerEdit(spec(of, n, 2)),
                Call::ServerDelete {
                    service: service(of),
                    server: server(n),
                },
            ];
            for (spent, call) in spent.iter_mut().zip(calls) {
                let start = Clock::now();
                self.change(call);
                *spent += start.elapsed().as_secs_f64() * 1e9 / f64::from(TIMES);
            }
        }
        // The trash is emptied, so that it is as full in every round.
        for minutes in 1..=4 {
            let now = Instant::ZERO + std::time::Duration::from_secs(60 * minutes);
            self.control.advance(now);
        }
        self.next = first;
        spent
    }
}

fn median(values: &mut [f64]) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (
        values[values.len() / 2],
        values[0],
        values[values.len() - 1],
    )
}

fn compare(name: &str, small: &mut Bed, large: &mut Bed) {
    let mut times = [(); 6].map(|()| Vec::new());
    for _ in 0..ROUNDS {
        let rounds = small.round().into_iter().chain(large.round());
        for (times, time) in times.iter_mut().zip(rounds) {
            times.push(time);
        }
    }
    println!("{name}");
    for (n, change) in ["add", "edit", "remove"].iter().enumerate() {
        let (few, few_min, few_max) = median(&mut times[n]);
        let (many, many_min, many_max) = median(&mut times[n + 3]);
        println!(
            "  {change:6}  {few:6.0} ns ({few_min:.0} to {few_max:.0})   {many:6.0} ns ({many_min:.0} to {many_max:.0})   growth {:.2}",
            many / few
        );
    }
}

fn main() -> Result<()> {
    let mut small = Bed::new(1, 10)?;
    let mut large = Bed::new(SERVICES, SERVERS)?;
    compare(
        &format!("one server of 10, and of {SERVERS} in {SERVICES} services"),
        &mut small,
        &mut large,
    );
    drop(large);
    let mut long = Bed::new(1, 5000)?;
    compare(
        "one server of 10, and of 5000 in one service",
        &mut small,
        &mut long,
    );
    let list = table(SERVICES, SERVERS);
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let mut control = Control::new(Options::default());
        let mut shard = control.shard(0).ok_or_else(|| anyhow!("no shard"))?;
        let start = Clock::now();
        let applied = control.apply(&list, &Permissive, Instant::ZERO);
        control.sweep(&mut shard);
        times.push(start.elapsed().as_secs_f64() * 1e3);
        assert!(applied.is_ok());
    }
    let (middle, min, max) = median(&mut times);
    println!(
        "{} changes in one list: {middle:.1} ms ({min:.1} to {max:.1})",
        list.len()
    );
    Ok(())
}

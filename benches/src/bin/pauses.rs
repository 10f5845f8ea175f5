//! How long a packet worker is held up while a large table is filled: the longest batch, the
//! longest time between two, and the longest wait for the control half within a batch.
//!
//! ```text
//! cargo run --release -p lvs-bench --bin pauses -p lvsadm --bin lvsadm
//! ```
//!
//! Needs root, `chrt`, and `lvsadm` next to it. A dataplane in a network namespace of its own
//! forwards a flood of datagrams. Meanwhile 2,277 services with 37,205 servers are added over its
//! control socket, by one `apply` and by `lvsadm -R` line by line, and flushed. For comparison,
//! some time passes without that, and the services are added without the flood. Both contain the
//! delays of this host's scheduler; the rounds in which the packet worker has a real-time priority
//! show the rest.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lvs_api::{Address, Client};
use lvs_core::api::{Call, Done, ServerSpec, ServiceId, ServiceSpec};
use lvs_core::{Family, Forwarding, ServerConfig, ServiceConfig};
use lvs_dataplane::dataplane::{Config, Dataplane, Pauses};
use lvs_dataplane::io::{BATCH, PacketIo, af_packet::AfPacket};
use lvs_packet::frame::Frame;
use lvs_packet::wire::ipv4;

const SERVICES: u32 = 2_277;
const SERVERS: u32 = 37_205;
/// Connections of the flood.
const FLOWS: u16 = 1000;
/// One frame in so many is from a new client, if there are any.
const NEW: u64 = 100;
const ROUNDS: usize = 3;

fn main() -> Result<()> {
    lvs_sys::unshare_network().context("cannot make a network namespace (run as root)")?;
    for command in [
        "link set lo up",
        "link add v0 address 02:00:00:00:00:01 type veth peer name v1",
        "address add 10.0.0.1/24 dev v0",
        "link set v0 up",
        "link set v1 up",
        "neighbour add 10.0.0.2 lladdr 02:00:00:00:00:02 dev v0 nud permanent",
        "neighbour add 10.0.0.3 lladdr 02:00:00:00:00:03 dev v0 nud permanent",
        "route add default via 10.0.0.3",
    ] {
        let done = Command::new("ip").args(command.split(' ')).status()?;
        ensure!(done.success(), "ip {command}");
    }
    let address = Address::new(format!("@lvs-pauses-{}", std::process::id()));
    let dataplane = Dataplane::start(Config {
        interfaces: vec!["v0".to_owned()],
        address: Some(address.clone()),
        ..Config::default()
    })?;
    let flood = Flood::start()?;
    let bench = Bench {
        dataplane: &dataplane,
        flood: &flood,
        address,
    };
    for (name, real_time) in [("as it is", false), ("real-time worker", true)] {
        if real_time {
            make_real_time("lvs-worker-0")?;
        }
        for (clients, new) in [("established only", false), ("1 in 100 new", true)] {
            flood.new.store(new, Ordering::Relaxed);
            println!("{name}, {clients}");
            let all = (0..ROUNDS)
                .map(|_| bench.apply())
                .collect::<Result<Vec<_>>>()?;
            report("apply", &["alone", "while filling", "at a flush"], &all);
            report(
                "lvsadm -R",
                &["alone", "while filling"],
                &[bench.restore()?],
            );
        }
        flood.rests.store(true, Ordering::Relaxed);
        let all = (0..ROUNDS)
            .map(|_| bench.apply())
            .collect::<Result<Vec<_>>>()?;
        println!("{name}, no load");
        report("apply", &["alone", "while filling", "at a flush"], &all);
        flood.rests.store(false, Ordering::Relaxed);
    }
    flood.stop.store(true, Ordering::Relaxed);
    Ok(())
}

/// Gives a thread of this process a real-time priority, so that no other keeps it from running.
fn make_real_time(thread: &str) -> Result<()> {
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?;
        if fs::read_to_string(task.path().join("comm"))?.trim_end() == thread {
            let done = Command::new("chrt")
                .args(["--fifo", "--pid", "1"])
                .arg(task.file_name())
                .status()?;
            ensure!(done.success(), "chrt");
            return Ok(());
        }
    }
    bail!("no thread is called {thread}")
}

/// A stretch of time under load.
struct Stretch {
    pauses: Pauses,
    took: Duration,
    sent: u64,
}

impl Stretch {
    fn print(&self, what: &str) {
        let Pauses { batch, gap, wait } = self.pauses;
        let rate = self.sent as f64 / self.took.as_secs_f64() / 1000.0;
        println!(
            "    {what:<14} batch {batch:>7.0?}  gap {gap:>7.0?}  wait {wait:>7.0?}  at {rate:.0} kpps over {:.2?}",
            self.took
        );
    }
}

/// Prints, for each part of the rounds, the one with the median of the longest pauses.
fn report<const PARTS: usize>(what: &str, parts: &[&str; PARTS], rounds: &[[Stretch; PARTS]]) {
    println!("  {what}");
    for (number, part) in parts.iter().enumerate() {
        let mut all: Vec<&Stretch> = rounds.iter().map(|round| &round[number]).collect();
        all.sort_by_key(|stretch| stretch.pauses.batch.max(stretch.pauses.gap));
        all[all.len() / 2].print(part);
    }
}

struct Bench<'a> {
    dataplane: &'a Dataplane,
    flood: &'a Flood,
    address: Address,
}

impl Bench<'_> {
    /// The table by one call, and gone by another.
    fn apply(&self) -> Result<[Stretch; 3]> {
        let mut client = self.begin()?;
        let alone = self.measure(|| {
            thread::sleep(Duration::from_millis(600));
            Ok(())
        })?;
        let changes = fill(false);
        let filling = self.measure(|| apply(&mut client, changes))?;
        let emptying = self.measure(|| apply(&mut client, vec![Call::ServiceFlush {}]))?;
        Ok([alone, filling, emptying])
    }

    /// The table line by line.
    fn restore(&self) -> Result<[Stretch; 2]> {
        drop(self.begin()?);
        let alone = self.measure(|| {
            thread::sleep(Duration::from_secs(5));
            Ok(())
        })?;
        let lines: String = fill(false).iter().map(line).collect();
        let program = std::env::current_exe()?.with_file_name("lvsadm");
        let filling = self.measure(|| {
            let mut child = Command::new(&program)
                .env("LVS_SOCKET", self.address.to_string())
                .arg("-R")
                .stdin(Stdio::piped())
                .spawn()
                .with_context(|| format!("{}: build it first", program.display()))?;
            let mut input = child.stdin.take().context("it has an input")?;
            input.write_all(lines.as_bytes())?;
            drop(input);
            ensure!(child.wait()?.success(), "lvsadm -R");
            Ok(())
        })?;
        Ok([alone, filling])
    }

    /// Nothing is there but the service of the flood.
    fn begin(&self) -> Result<Client> {
        let mut client = Client::connect(&self.address)?;
        apply(&mut client, vec![Call::ServiceFlush {}])?;
        apply(&mut client, fill(true))?;
        thread::sleep(Duration::from_millis(500));
        Ok(client)
    }

    fn measure(&self, run: impl FnOnce() -> Result<()>) -> Result<Stretch> {
        let dataplane = self.dataplane.handle();
        dataplane.take_pauses();
        let (sent, started) = (self.flood.sent.load(Ordering::Relaxed), Instant::now());
        run()?;
        Ok(Stretch {
            took: started.elapsed(),
            sent: self.flood.sent.load(Ordering::Relaxed) - sent,
            pauses: dataplane.take_pauses(),
        })
    }
}

fn apply(client: &mut Client, changes: Vec<Call>) -> Result<()> {
    let done: Done = client.call(&Call::Apply { changes })?;
    ensure!(done.warnings.is_empty(), "{done:?}");
    Ok(())
}

/// A change as `lvsadm -S -n` writes it.
fn line(change: &Call) -> String {
    match change {
        Call::ServiceAdd(spec) => {
            format!(
                "-A -u {} -s {}\n",
                target(spec.service),
                spec.config.scheduler
            )
        }
        Call::ServerAdd(spec) => format!(
            "-a -u {} -r {} -m -w 1\n",
            target(spec.service),
            spec.server
        ),
        other => unreachable!("{other:?}"),
    }
}

fn target(service: ServiceId) -> String {
    match service {
        ServiceId::Udp { address } => address.to_string(),
        other => unreachable!("{other:?}"),
    }
}

/// The service of the flood (`first`), or all other services.
fn fill(first: bool) -> Vec<Call> {
    let service = |number: u32| ServiceId::Udp {
        address: ([10, 200, byte(number / 250), byte(number % 250 + 1)], 53).into(),
    };
    let config = ServiceConfig::new(Family::V4, "wlc");
    let add_service = |number| {
        Call::ServiceAdd(ServiceSpec {
            service: service(number),
            config: config.clone(),
            owner: None,
        })
    };
    let add_server = |number, server| {
        Call::ServerAdd(ServerSpec {
            service: service(number),
            server,
            config: ServerConfig::new(1, Forwarding::Nat),
        })
    };
    if first {
        let server = ([10, 0, 0, 2], 53).into();
        return vec![add_service(0), add_server(0, server)];
    }
    let mut changes: Vec<Call> = (1..=SERVICES).map(add_service).collect();
    changes.extend((0..SERVERS).map(|n| {
        let addr = [
            10,
            100 + byte(n / 62_500),
            byte(n / 250 % 250),
            byte(n % 250 + 1),
        ];
        add_server(n % SERVICES + 1, (addr, 53).into())
    }));
    changes
}

fn byte(n: u32) -> u8 {
    u8::try_from(n).unwrap_or(u8::MAX)
}

/// Datagrams to the first service, as fast as they go.
struct Flood {
    new: Arc<AtomicBool>,
    rests: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
}

impl Flood {
    fn start() -> Result<Self> {
        let ifindex = lvs_sys::if_index("v1")?;
        let mut io = AfPacket::open(ifindex, "v1")?;
        let this = Self {
            new: Arc::default(),
            rests: Arc::default(),
            stop: Arc::default(),
            sent: Arc::default(),
        };
        let (new, stop, sent) = (this.new.clone(), this.stop.clone(), this.sent.clone());
        let rests = this.rests.clone();
        thread::spawn(move || {
            let mut number = 0_u64;
            let mut room: Vec<Frame> = (0..BATCH).map(|_| Frame::new()).collect();
            while !stop.load(Ordering::Relaxed) {
                if rests.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
                let new = new.load(Ordering::Relaxed);
                let mut batch: Vec<Frame> = (0..BATCH)
                    .map(|_| {
                        number += 1;
                        datagram(number, new)
                    })
                    .collect();
                io.send(&mut batch);
                sent.fetch_add(BATCH as u64, Ordering::Relaxed);
                // The answers are discarded.
                while io.recv(&mut room).is_ok_and(|count| count == BATCH) {}
                // A rate that leaves the other threads of a small machine their share.
                thread::sleep(Duration::from_micros(200));
            }
        });
        Ok(this)
    }
}

fn datagram(number: u64, new: bool) -> Frame {
    let flow = u16::try_from(number % u64::from(FLOWS)).unwrap_or(0);
    let fresh = new && number.is_multiple_of(NEW);
    let client = if fresh {
        let [.., a, b, c] = (number / NEW).to_be_bytes();
        [198, 18 + (a & 1), b, c]
    } else {
        [192, 0, 2, 7]
    };
    let mut bytes = vec![0; 14 + 28 + 18];
    bytes[..6].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    bytes[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 3]);
    bytes[12] = 8;
    let ip = &mut bytes[14..];
    ip[0] = 0x45;
    ip[3] = 46;
    ip[8] = 64;
    ip[9] = 17;
    ip[12..16].copy_from_slice(&client);
    ip[16..20].copy_from_slice(&[10, 200, 0, 1]);
    ip[20..22].copy_from_slice(&(1024 + flow).to_be_bytes());
    ip[23] = 53;
    ip[25] = 26;
    ipv4::finish_header(ip);
    Frame::from_bytes(&bytes)
}

//! Round-trip times of single packets during an attack: datagrams to an echo service at a steady
//! rate, over one connection.
//!
//! Client and server have a real-time priority, so that they do not wait for a processor: the
//! result is the delay of the director and the links.

use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::netns::Host;
use crate::programs;

/// Command that runs a program with a real-time priority, so that its own delays are not measured.
pub(super) const REAL_TIME: [&str; 3] = ["chrt", "--fifo", "10"];
/// Time after the last datagram after which missing answers count as lost. On a busy machine, a
/// process may wait for a processor for seconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// Length in bytes of a datagram, which contains its number.
const LEN: usize = 8;

/// Options of the probe.
#[derive(Clone, Debug, clap::Args)]
pub struct ProbeOptions {
    /// Address of an echo service
    pub target: SocketAddr,
    /// Microseconds between two datagrams
    #[arg(long, default_value_t = 1000)]
    pub every_us: u64,
    /// Duration in milliseconds
    #[arg(long = "for", value_name = "MS")]
    pub for_ms: u64,
}

/// Round-trip times of datagrams to an echo service. They begin when the datagram is due.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Delays {
    /// Number of sent datagrams.
    pub sent: u64,
    /// Number of datagrams without an answer.
    pub lost: u64,
    /// Median delay in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of the delays in milliseconds.
    pub p99_ms: f64,
    /// 99.9th percentile of the delays in milliseconds.
    pub p999_ms: f64,
    /// Longest delay in milliseconds.
    pub longest_ms: f64,
    /// Number of datagrams that took longer than 5 ms.
    pub over_5_ms: u64,
    /// Milliseconds in which the hypervisor ran other guests on the processors of this virtual
    /// machine (`steal` in `/proc/stat`, the sum of all processors).
    pub stolen_ms: u64,
}

impl Delays {
    /// Runs the probe on a host.
    ///
    /// # Errors
    ///
    /// The program cannot run, or prints no valid report.
    pub fn run_on(host: &Host, target: SocketAddr, time: Duration) -> Result<Self> {
        let own = programs::own()?.display().to_string();
        let (target, time) = (target.to_string(), format!("--for={}", time.as_millis()));
        let words = [&REAL_TIME[1..], &[&own, "probe", &target, &time]].concat();
        let printed = host.run(REAL_TIME[0], &words)?;
        serde_json::from_str(&printed)
            .with_context(|| format!("the probe printed no valid report: {printed}"))
    }
}

/// Runs `lvs-testbed probe`, and prints the report as one line of JSON.
///
/// # Errors
///
/// No route leads to the service, the socket cannot be opened, or there are too many datagrams.
pub fn probe(options: &ProbeOptions) -> Result<()> {
    println!("{}", serde_json::to_string(&measure(options)?)?);
    Ok(())
}

fn measure(options: &ProbeOptions) -> Result<Delays> {
    let socket = UdpSocket::bind(if options.target.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    })?;
    socket.connect(options.target)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let every = Duration::from_micros(options.every_us.max(1));
    let count = Duration::from_millis(options.for_ms).as_micros() / every.as_micros();
    let count = u64::try_from(count)
        .context("too many datagrams: shorten the duration, or lengthen --every-us")?;
    let stolen = stolen_ms();
    let start = Instant::now();
    // The number of a datagram determines when it is due, so that a late start counts as delay.
    let due = |number: u64| start + every * u32::try_from(number).unwrap_or(u32::MAX);
    let mut took: Vec<Duration> = thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..count {
                thread::sleep(due(number).saturating_duration_since(Instant::now()));
                let _ = socket.send(&number.to_be_bytes());
            }
        });
        let mut took = Vec::new();
        let mut answer = [0; LEN + 1];
        // The measurement ends at this time even if answers are missing.
        let end = due(count) + PATIENCE;
        while (took.len() as u64) < count && Instant::now() < end {
            if let Ok(LEN) = socket.recv(&mut answer)
                && let Some((number, _)) = answer.split_first_chunk()
            {
                let number = u64::from_be_bytes(*number);
                took.push(due(number).elapsed());
            }
        }
        took
    });
    took.sort_unstable();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let nth = |thousandths: usize| {
        let at = (took.len() * thousandths / 1000).min(took.len().saturating_sub(1));
        took.get(at).copied().map_or(0.0, ms)
    };
    let answered = took.len() as u64;
    let long = Duration::from_millis(5);
    Ok(Delays {
        sent: count,
        lost: count.saturating_sub(answered),
        p50_ms: nth(500),
        p99_ms: nth(990),
        p999_ms: nth(999),
        longest_ms: took.last().copied().map_or(0.0, ms),
        over_5_ms: took.iter().filter(|time| **time > long).count() as u64,
        stolen_ms: stolen_ms().saturating_sub(stolen),
    })
}

/// Processor time that the hypervisor gave to other guests since the machine started, in
/// milliseconds.
fn stolen_ms() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = stat.split_ascii_whitespace().nth(8);
    let ticks: u64 = ticks.and_then(|word| word.parse().ok()).unwrap_or(0);
    // Ticks are hundredths of a second on every architecture.
    ticks * 10
}

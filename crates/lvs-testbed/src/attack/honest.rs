//! Honest clients during an attack: new connections at a steady rate, and downloads whose bytes are
//! compared.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::content;
use crate::load::{LoadOptions, WrongByte, fetch};
use crate::netns::Host;

/// Size in bytes of the answer to a new connection.
pub(super) const SMALL: usize = 1024;
/// Size in bytes of a download.
pub(super) const LARGE: usize = 1 << 20;
/// Number of threads that open connections: the maximum number of simultaneous connections. Without
/// an attack, fewer are open.
const OPENERS: usize = 24;
/// Number of simultaneous downloads.
const DOWNLOADERS: usize = 4;
/// Time limit of a request in milliseconds.
const TIMEOUT_MS: u64 = 3000;

/// Options of the honest clients.
#[derive(Clone, Debug, clap::Args)]
pub struct HonestOptions {
    /// Address and port of the service
    pub target: SocketAddr,
    /// New connections a second
    #[arg(long, default_value_t = 200)]
    pub rate: u64,
    /// Pause between two downloads of a client, in milliseconds
    #[arg(long, default_value_t = 100)]
    pub pause_ms: u64,
    /// Duration in milliseconds
    #[arg(long = "for", value_name = "MS")]
    pub for_ms: u64,
}

/// Results of the honest clients.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Honest {
    /// Number of new connections that were answered with the correct bytes.
    pub served: u64,
    /// Number of new connections that failed, or whose answer was wrong.
    pub failed: u64,
    /// Number of complete and correct downloads of 1 MiB.
    pub downloads: u64,
    /// Number of downloads that failed or had wrong content.
    pub broken: u64,
    /// Median time of the served connections, from the SYN to the last byte, in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of the times of the served connections, from the SYN to the last byte, in
    /// milliseconds.
    pub p99_ms: f64,
    /// The longest time between the ends of two consecutive correct answers or downloads, in
    /// milliseconds.
    pub silence_ms: f64,
    /// Number of answers and downloads that contained a wrong byte.
    pub wrong: u64,
    /// The first error, with its time after the start.
    pub error: Option<String>,
}

impl Honest {
    /// Percentage of new connections that were answered correctly.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "a rate for display needs no exact value"
    )]
    pub fn success(&self) -> f64 {
        100.0 * self.served as f64 / (self.served + self.failed).max(1) as f64
    }

    /// Runs the honest clients on a host.
    ///
    /// # Errors
    ///
    /// The program cannot run, or prints no valid report. Errors of connections are in the report.
    pub fn run_on(host: &Host, options: &HonestOptions) -> Result<Self> {
        let words = [
            "honest".to_owned(),
            options.target.to_string(),
            format!("--rate={}", options.rate),
            format!("--pause-ms={}", options.pause_ms),
            format!("--for={}", options.for_ms),
        ];
        let printed = host.run(crate::programs::own()?, &words)?;
        serde_json::from_str(&printed)
            .with_context(|| format!("the honest clients printed no valid report: {printed}"))
    }
}

/// Runs `lvs-testbed honest`, and prints the report as one line of JSON.
///
/// # Errors
///
/// The report cannot be printed.
pub fn honest(options: &HonestOptions) -> Result<()> {
    println!("{}", serde_json::to_string(&run(options))?);
    Ok(())
}

#[derive(Default)]
struct Log {
    report: Honest,
    /// End times of correct answers and downloads, since the start.
    ends: Vec<Duration>,
    took: Vec<Duration>,
}

fn run(options: &HonestOptions) -> Honest {
    let mut expected = vec![0; LARGE];
    content::fill(0, &mut expected);
    let (start, limit) = (Instant::now(), Duration::from_millis(options.for_ms));
    let (next, log) = (AtomicU64::new(0), Mutex::new(Log::default()));
    let mut request = LoadOptions::new(options.target);
    request.timeout_ms = TIMEOUT_MS;
    std::thread::scope(|scope| {
        for _ in 0..OPENERS {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    let at = Duration::from_micros(n * 1_000_000 / options.rate.max(1));
                    if at >= limit {
                        return;
                    }
                    std::thread::sleep(at.saturating_sub(start.elapsed()));
                    let began = Instant::now();
                    let done = fetch(&request, &expected[..SMALL]);
                    note(&log, start, began, done, false);
                }
            });
        }
        for _ in 0..DOWNLOADERS {
            scope.spawn(|| {
                while start.elapsed() < limit {
                    let done = fetch(&request, &expected);
                    note(&log, start, Instant::now(), done, true);
                    std::thread::sleep(Duration::from_millis(options.pause_ms));
                }
            });
        }
    });
    finish(log.into_inner().unwrap_or_default())
}

fn note(log: &Mutex<Log>, start: Instant, began: Instant, done: Result<String>, download: bool) {
    let Ok(mut log) = log.lock() else { return };
    let counter = match (done.is_ok(), download) {
        (true, false) => &mut log.report.served,
        (false, false) => &mut log.report.failed,
        (true, true) => &mut log.report.downloads,
        (false, true) => &mut log.report.broken,
    };
    *counter += 1;
    match done {
        Ok(_) => {
            log.ends.push(start.elapsed());
            if !download {
                log.took.push(began.elapsed());
            }
        }
        Err(error) => {
            let at = start.elapsed().as_secs_f64();
            log.report.wrong += u64::from(error.is::<WrongByte>());
            log.report
                .error
                .get_or_insert(format!("after {at:.3} s: {error:#}"));
        }
    }
}

fn finish(mut log: Log) -> Honest {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    log.took.sort_unstable();
    log.ends.sort_unstable();
    let nth = |hundredths: usize| {
        let at = (log.took.len() * hundredths / 100).min(log.took.len().saturating_sub(1));
        log.took.get(at).copied().map_or(0.0, ms)
    };
    let gaps = log.ends.windows(2).map(|pair| pair[1] - pair[0]);
    Honest {
        p50_ms: nth(50),
        p99_ms: nth(99),
        silence_ms: gaps.max().map_or(0.0, ms),
        ..log.report
    }
}

//! TCP through the director: bulk, requests, connections, and round trips of one byte.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::bed::{self, Bed, Purpose};
use super::flood::Flood;
use super::programs::{BULK_PORT, PING_PORT};
use super::sample::{Cpu, Sample};
use crate::machine::Snapshot;
use crate::yardsticks::Yardsticks;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Tcp {
    /// One TCP stream, in Gbit/s.
    Bulk,
    /// Requests per second over 64 persistent connections.
    Requests,
    /// Connections a second, with one request each.
    Connections,
}

/// Length in bytes of the download that is compared byte by byte.
const CHECKED: &str = "33554432";
/// Number of round trips in one measurement; a round has several measurements.
const TRIPS: &str = "1000";

/// Downloads through the contender, and compares each byte.
pub(super) fn check(bed: &mut Bed) -> Result<()> {
    bed.resume()?;
    let target = format!("{}:{PING_PORT}", bed.target(false));
    let program = std::env::current_exe()?;
    let words = ["endpoint", "fetch", &target, CHECKED];
    let checked = bed.client.run(&program, &words);
    bed.pause()?;
    checked
        .with_context(|| format!("{} does not forward correctly", bed.who.name()))
        .map(drop)
}

impl Tcp {
    pub(super) fn measure(self, bed: &mut Bed, seconds: u32) -> Result<Sample> {
        bed.resume()?;
        let target = bed.target(false).to_owned();
        let (seconds, port) = (seconds.to_string(), BULK_PORT.to_string());
        let url = format!("http://{target}/");
        let duration = format!("-d{seconds}s");
        let words: Vec<&str> = match self {
            Self::Bulk => vec![
                "-c", "0", "iperf3", "-c", &target, "-p", &port, "-t", &seconds, "-J",
            ],
            Self::Requests => vec!["-c", "0", "wrk", "-t1", "-c64", &duration, &url],
            Self::Connections => {
                let header = "Connection: close";
                vec![
                    "-c", "0", "wrk", "-t1", "-c64", &duration, "-H", header, &url,
                ]
            }
        };
        let first = Snapshot::take();
        let printed = bed.client.run("taskset", &words)?;
        let devices = [bed.devices[1].as_str(), &bed.devices[2]];
        let used = Snapshot::take().since(&first, bed.pid(), &devices);
        bed.check_alive()?;
        bed.pause()?;
        let value = match self {
            Self::Bulk => {
                let report: Value =
                    serde_json::from_str(&printed).context("cannot parse the output of iperf3")?;
                let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
                bits.context("iperf3 reports no rate")? / 1e9
            }
            Self::Requests | Self::Connections => requests(&printed)?,
        };
        let per_second = match self {
            // Iperf3's result, converted to KiB per second.
            Self::Bulk => value * 1e9 / 8.0 / 1024.0,
            Self::Requests | Self::Connections => value,
        };
        Ok(Sample {
            value,
            cpu: Some(Cpu::per(&used, per_second * used.seconds)),
            disturbed: used.disturbed(),
        })
    }
}

/// Parses the requests per second in wrk's output.
pub(crate) fn requests(printed: &str) -> Result<f64> {
    let line = |start: &str| {
        printed
            .lines()
            .find_map(|line| line.trim().strip_prefix(start))
    };
    let errors = line("Socket errors:").or_else(|| line("Non-2xx"));
    ensure!(errors.is_none(), "wrk had errors:\n{printed}");
    let rate = line("Requests/sec:").and_then(|rate| rate.trim().parse().ok());
    rate.with_context(|| format!("wrk reports no rate:\n{printed}"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Percentile {
    P50,
    P99,
}

impl Percentile {
    /// Returns this percentile of the numbers; 0 if there are none.
    pub(super) fn of(self, numbers: &mut [f64]) -> f64 {
        numbers.sort_by(f64::total_cmp);
        let percent = match self {
            Self::P50 => 50,
            Self::P99 => 99,
        };
        let at = numbers.len() * percent / 100;
        numbers.get(at).copied().unwrap_or(0.0)
    }
}

/// The flood during round trips. Its packets are dropped before any program receives them.
const BESIDE: Flood = Flood {
    flows: 1000,
    client_bits: 10,
    replies: false,
    v6: false,
};

/// Measures TCP round trips of one byte, each in microseconds; if `rate` is given, during a flood
/// of `rate` packets per second. Also returns the reason, if any, why the measurement does not
/// count.
pub(super) fn round_trips(
    bed: &mut Bed,
    yardsticks: &Yardsticks,
    rate: Option<f64>,
) -> Result<(Vec<f64>, Option<String>)> {
    debug_assert!(
        bed.purpose() == Purpose::Ping,
        "the server of the bed does not accept these TCP connections"
    );
    let mut flood = match rate {
        Some(rate) => Some(BESIDE.beside(bed, yardsticks, rate)?),
        None => None,
    };
    bed::settle(Duration::from_millis(100));
    let target = format!("{}:{PING_PORT}", bed.target(false));
    let program = std::env::current_exe()?.display().to_string();
    let words = ["-c", "0", &program, "endpoint", "ping", &target, TRIPS];
    let first = Snapshot::take();
    let printed = bed.client.run("taskset", &words)?;
    let used = Snapshot::take().since(&first, bed.pid(), &[]);
    if let Some(flood) = &mut flood {
        flood.stop(Signal::SIGTERM)?;
    }
    bed.check_alive()?;
    let trips =
        serde_json::from_str(printed.trim()).context("cannot parse the output of the client")?;
    Ok((trips, used.disturbed()))
}

#[cfg(test)]
mod tests {
    use super::Percentile::{P50, P99};

    #[test]
    fn p50_and_p99_of_unsorted_values_are_correct_and_0_without_values() {
        let mut numbers: Vec<f64> = (0..1000).rev().map(f64::from).collect();
        assert!((P50.of(&mut numbers) - 500.0).abs() < f64::EPSILON);
        assert!((P99.of(&mut numbers) - 990.0).abs() < f64::EPSILON);
        assert!(P99.of(&mut []).abs() < f64::EPSILON);
    }
}

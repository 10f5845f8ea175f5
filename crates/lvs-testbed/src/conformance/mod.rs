//! Replays recordings of the real kernel through the complete dataplane, and compares the results.
//!
//! A recording is a file of JSON objects, one case a line, plain or gzipped.
//! [`lvs_packet::pipeline`] and an [`lvs_core::Director`] process the frames, with ports in memory
//! and a fake clock. For cases that contain only connections and flags, frames are built first. A
//! small simulation replaces the host's network stack.

mod bed;
pub(crate) mod case;
mod dataplane;
mod frames;
mod host;
mod packets;
mod report;
mod states;
mod steps;
mod sync;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context;
use lvs_api::Address;
use lvs_core::Options;
use lvs_core::memory::Layout;
use serde_json::Value;

use self::case::{Halt, Json, Replayed};
pub use self::dataplane::MemoryDataplane;
pub use self::report::Through;
use self::report::{Log, Mismatch, Seen};
use crate::kernel_path::{Forwarded, Programs};

/// Options of `lvs-testbed conformance`.
#[derive(Clone, Debug, clap::Args)]
pub struct ConformanceOptions {
    /// Recordings: one JSON object on each line, plain or gzipped
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Cases that need unsupported features do not fail the run
    #[arg(long)]
    allow_unsupported: bool,
    /// Only cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Let the programs of the kernel fast path forward the packets that they can, and compare with
    /// the same case without them
    #[arg(long)]
    fast_path: bool,
    /// Maximum number of mismatches that are shown for each case
    #[arg(long, value_name = "N", default_value_t = 3)]
    show: usize,
}

/// Numbers of cases of one kind, by result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of cases with the kernel's result.
    pub passed: usize,
    /// Number of cases with a result that differs from the kernel's.
    pub failed: usize,
    /// Number of cases that were not replayed, by the missing feature.
    pub skipped: BTreeMap<String, usize>,
    /// Frames that the kernel fast path has forwarded.
    pub forwarded: Forwarded,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let skipped: usize = self.skipped.values().sum();
        write!(
            f,
            "{} passed, {} failed, {skipped} skipped",
            self.passed, self.failed
        )?;
        match self.forwarded {
            Forwarded { all: 0, .. } => Ok(()),
            Forwarded { all, early } => write!(
                f,
                "; {all} frames forwarded by the kernel fast path, {early} of them by XDP"
            ),
        }
    }
}

/// Results of all cases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConformanceReport {
    /// Results by kind: `schedulers`, `persistence`, `tcpstates`, `packets`, `ftp`, `stats`, `proc`
    /// or `sync`.
    pub kinds: BTreeMap<&'static str, Counts>,
    /// The texts of the first mismatches of each case, and the number of the others.
    pub mismatches: Vec<String>,
}

enum Outcome {
    Passed,
    Failed(Vec<Mismatch>),
    Skipped(String),
}

/// The kind of a case, derived from its steps.
fn kind(case: &Value) -> &'static str {
    let steps = case.items("steps");
    let has = |op: &str| steps.iter().any(|step| step.maybe_text("op") == Some(op));
    if case.get("sync_version").is_some()
        || case.get("decoded").is_some()
        || steps.iter().any(|step| step.get("decoded").is_some())
    {
        "sync"
    } else if case.get("config").is_some() {
        if has("proc") {
            "proc"
        } else if has("stats") || has("rates") {
            "stats"
        } else if case
            .maybe_text("name")
            .is_some_and(|name| name.contains("ftp"))
        {
            "ftp"
        } else {
            "packets"
        }
    } else if case.get("services").is_some() {
        "persistence"
    } else if case.get("client").is_some() {
        "tcpstates"
    } else {
        "schedulers"
    }
}

fn replay(case: &Value, log: &mut Log) -> Replayed<()> {
    let kind = kind(case);
    // A datagram for a synchronisation backup is not a frame.
    if kind == "sync" && case.get("datagrams").is_none() {
        return sync::replay_backup(case, log);
    }
    match kind {
        "sync" => sync::replay_master(case, log),
        "packets" | "ftp" | "stats" | "proc" => packets::replay(case, log),
        "tcpstates" => states::replay(case, log),
        _ => steps::replay(case, log),
    }
}

fn run_case(case: &Value, through: Through) -> (Outcome, Forwarded) {
    let traced = through == Through::FastPath;
    let mut log = Log::new(through, traced);
    if let Err(skipped) = replay_all(case, &mut log) {
        return (Outcome::Skipped(skipped), Forwarded::default());
    }
    if traced {
        let mut plain = Log::new(Through::Userspace, traced);
        // An unsupported case was already reported by the first replay.
        let _ = replay_all(case, &mut plain);
        compare_traces(&plain.seen.lock(), &mut log);
    }
    let outcome = if log.mismatches.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Failed(log.mismatches)
    };
    let forwarded = log.seen.lock().forwarded;
    (outcome, forwarded)
}

/// Replays a case completely. The error is the name of a missing feature.
fn replay_all(case: &Value, log: &mut Log) -> Result<(), String> {
    match replay(case, log) {
        Err(Halt::Unsupported(what)) => Err(what),
        Err(Halt::Broken(error)) => {
            log.mismatch("replay", "replayed to the end", &format!("{error:#}"));
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Compares the trace of `log` (with the kernel fast path) with the trace of `plain` (the same case
/// without the kernel fast path).
fn compare_traces(plain: &Seen, log: &mut Log) {
    let seen = log.seen.clone();
    let (expected, got) = (&plain.trace, &seen.lock().trace);
    let same = |(number, (expected, got)): (usize, (&Vec<String>, &Vec<String>))| {
        (expected != got).then(|| {
            let only = |of: &[String], other: &[String]| {
                let only = of.iter().filter(|line| !other.contains(line)).cloned();
                only.collect::<Vec<_>>().join("\n  ")
            };
            (number, only(expected, got), only(got, expected))
        })
    };
    let mut differences = expected.iter().zip(got).enumerate().filter_map(same);
    if let Some((number, expected, got)) = differences.next() {
        let what = format!("frame or wait {number}, with and without the BPF programs");
        log.mismatch(&what, &expected, &got);
    }
    log.compare("frames and waits", &expected.len(), &got.len());
}

/// Reads a recording, plain or gzipped.
pub(crate) fn recorded(path: &Path) -> anyhow::Result<Vec<u8>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(bytes);
    }
    let mut plain = Vec::new();
    flate2::read::MultiGzDecoder::new(&bytes[..])
        .read_to_end(&mut plain)
        .with_context(|| format!("cannot decompress {}", path.display()))?;
    Ok(plain)
}

/// Reads the cases of a file.
fn cases(path: &Path) -> anyhow::Result<Vec<Value>> {
    recorded(path)?
        .split(|&byte| byte == b'\n')
        .filter(|line| !line.trim_ascii().is_empty())
        .enumerate()
        .map(|(number, line)| {
            serde_json::from_slice(line).with_context(|| {
                format!(
                    "{}, line {}: the line is not JSON",
                    path.display(),
                    number + 1
                )
            })
        })
        .collect()
}

/// Replays the cases in `files` whose name contains `only`. Keeps at most `show` mismatches of each
/// case.
///
/// # Errors
/// A file cannot be read or is not a recording; a
/// [`FastPathError`](lvs_dataplane::fast_path::FastPathError) if the kernel refuses the BPF
/// programs.
pub fn conformance(
    files: &[PathBuf],
    only: Option<&str>,
    show: usize,
    through: Through,
) -> anyhow::Result<ConformanceReport> {
    if through == Through::FastPath {
        Programs::new(Layout::new(64, 0), Default::default())?;
    }
    let mut all = Vec::new();
    for file in files {
        all.extend(cases(file)?);
    }
    if let Some(only) = only {
        all.retain(|case| {
            case.maybe_text("name")
                .is_some_and(|name| name.contains(only))
        });
    }
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::with_capacity(all.len()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((number, case)) = {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    all.get(number).map(|case| (number, case))
                } {
                    let outcome = run_case(case, through);
                    if let Ok(mut outcomes) = outcomes.lock() {
                        outcomes.push((number, outcome));
                    }
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap_or_default();
    outcomes.sort_by_key(|(number, _)| *number);
    let mut report = ConformanceReport::default();
    for (number, (outcome, forwarded)) in outcomes {
        let case = &all[number];
        let counts = report.kinds.entry(kind(case)).or_default();
        counts.forwarded += forwarded;
        let name = case.maybe_text("name").unwrap_or("(no name)");
        match outcome {
            Outcome::Passed => counts.passed += 1,
            Outcome::Skipped(what) => *counts.skipped.entry(what).or_default() += 1,
            Outcome::Failed(mismatches) => {
                counts.failed += 1;
                let more = mismatches.len().saturating_sub(show);
                for m in mismatches.iter().take(show) {
                    report.mismatches.push(format!(
                        "{name} step {} {}\n  expected {}\n  got      {}",
                        m.step, m.what, m.expected, m.got
                    ));
                }
                if more > 0 {
                    report
                        .mismatches
                        .push(format!("{name}: {more} more mismatches"));
                }
            }
        }
    }
    Ok(report)
}

impl ConformanceReport {
    /// Number of cases that passed.
    pub fn passed(&self) -> usize {
        self.kinds.values().map(|counts| counts.passed).sum()
    }

    /// Number of cases that failed.
    pub fn failed(&self) -> usize {
        self.kinds.values().map(|counts| counts.failed).sum()
    }

    /// Number of cases that were not replayed.
    pub fn skipped(&self) -> usize {
        let skipped = self
            .kinds
            .values()
            .flat_map(|counts| counts.skipped.values());
        skipped.sum()
    }
}

/// Runs `lvs-testbed dataplane`: a dataplane in memory at the control socket `socket`.
///
/// # Errors
/// The socket cannot be bound, or no thread can be started.
pub fn serve(socket: &str) -> anyhow::Result<()> {
    let dataplane = MemoryDataplane::new(Options::default())?;
    let address = Address::new(socket);
    let _serving = dataplane.serve(&address)?;
    println!("ready at {address}");
    loop {
        std::thread::park();
    }
}

/// Runs `lvs-testbed conformance`, and prints mismatches and counts.
/// If a case failed, or was skipped without `--allow-unsupported`, ends the process with exit
/// status 1.
///
/// # Errors
/// As [`conformance`].
pub fn run(options: &ConformanceOptions) -> anyhow::Result<()> {
    let through = if options.fast_path {
        Through::FastPath
    } else {
        Through::Userspace
    };
    let report = conformance(
        &options.files,
        options.only.as_deref(),
        options.show,
        through,
    )?;
    for mismatch in &report.mismatches {
        println!("{mismatch}");
    }
    for (kind, counts) in &report.kinds {
        println!("{kind}: {counts}");
        for (what, count) in &counts.skipped {
            println!("  {count} skipped ({what})");
        }
    }
    println!("{} passed, {} failed", report.passed(), report.failed());
    let incomplete = report.skipped() > 0 && !options.allow_unsupported;
    if report.failed() > 0 || incomplete {
        // A returned error would be printed after the counts, which must be the last line.
        std::process::exit(1);
    }
    Ok(())
}

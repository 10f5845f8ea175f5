//! `lvs-bench compare`: measures the dataplane, forwarders without decisions, the kernel and other
//! programs in the same run.

pub(crate) mod bed;
pub(crate) mod contender;
mod flood;
pub(crate) mod programs;
pub(crate) mod progress;
mod report;
mod rows;
mod run;
mod sample;
mod table;
pub(crate) mod tcp;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::json;

use self::progress::Progress;
use self::report::Line;
use self::rows::{Group, Row};
use self::run::{Manner, Runner};
use crate::machine::{self, Calibration};
use crate::yardsticks::Yardsticks;

/// Options of the comparison.
#[derive(Debug, Args)]
pub struct Options {
    /// Rows to measure, or beginnings of their names; if none is given, all rows except those that
    /// begin with `fast-path`, `proxy` or `other`
    names: Vec<String>,
    /// Measure fewer rows, in fewer and shorter rounds; below two minutes
    #[arg(long)]
    quick: bool,
    /// Print JSON (see benches/README.md)
    #[arg(long)]
    json: bool,
    /// Number of rounds; each measures every row once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Length of one measurement, in milliseconds
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(20..=5000))]
    window: Option<u64>,
    /// Compare with another build of the dataplane in this directory, with its `lvsadm`
    #[arg(long, value_name = "DIR")]
    other: Option<PathBuf>,
    /// List the rows with their bounds
    #[arg(long)]
    list: bool,
    /// Measure on a busy machine, too; the results are then unreliable
    #[arg(long)]
    busy: bool,
}

/// Default number of rounds, and milliseconds of a measurement.
const USUALLY: (usize, u64) = (5, 1000);
/// Default number of rounds with `--quick`, and milliseconds of a measurement.
const QUICKLY: (usize, u64) = (3, 400);

/// Rows that `--quick` measures if none is named.
const QUICK: [&str; 10] = [
    "nat-1k",
    "tunnel-1k",
    "nat-100k-1c",
    "tun-1k",
    "bulk",
    "connections",
    "latency-idle-p50",
    "pipeline-1m",
    "new",
    "maglev",
];

/// Whether a row is measured only if the user names it, or (`other`) uses `--other`.
fn is_only_by_name(row: &Row) -> bool {
    ["fast-path", "proxy", "other"]
        .iter()
        .any(|name| row.name.starts_with(name))
}

impl Options {
    /// Measures the rows, and prints the results.
    ///
    /// # Errors
    ///
    /// A row does not exist, a program for `--other` is missing, this process does not run as root,
    /// the machine is busy, or a measurement fails.
    pub fn run(&self) -> Result<()> {
        let groups = self.select(table::all())?;
        if self.list {
            print!("{}", report::list(&groups));
            return Ok(());
        }
        ensure!(
            nix::unistd::geteuid().is_root(),
            "compare needs root: its generator makes packets inside of the kernel, and its hosts are network namespaces"
        );
        if groups.iter().any(|group| group.name == "other") {
            let dir = self.other.as_deref();
            let dir =
                dir.context("rows that begin with `other` need another build: --other DIR")?;
            for name in ["lvs-dataplane", "lvsadm"] {
                let program = dir.join(name);
                ensure!(
                    program.is_file(),
                    "--other: {} does not exist",
                    program.display()
                );
            }
        }
        let (rounds, window) = if self.quick { QUICKLY } else { USUALLY };
        let manner = Manner {
            rounds: self.rounds.map_or(rounds, usize::from),
            window: Duration::from_millis(self.window.unwrap_or(window)),
            busy: self.busy,
            stop: Arc::new(AtomicBool::new(false)),
        };
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, manner.stop.clone())?;
        }
        self.measure(&groups, &manner)
    }

    fn measure(&self, groups: &[Group], manner: &Manner) -> Result<()> {
        let mut yardsticks = Yardsticks::build()?;
        yardsticks.other.clone_from(&self.other);
        if !manner.busy {
            machine::wait_until_quiet(Duration::from_secs(30))?;
        }
        let before = Calibration::measure()?;
        let _conntrack = Conntrack::raise();
        let mut progress = Progress::new(expected(groups, manner.rounds, manner.window));
        let mut runner = Runner::new(&yardsticks, manner);
        let (mut lines, mut outcomes) = (Vec::new(), Vec::new());
        for group in groups {
            let measured = runner.run(group, &mut progress);
            let measured = measured.inspect_err(|_| progress.end())?;
            lines.extend(group.rows.iter().map(|row| Line::of(row, &measured)));
            outcomes.extend(measured);
        }
        progress.end();
        let after = Calibration::measure()?;
        let rejected: usize = outcomes.iter().map(|outcome| outcome.rejected).sum();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let (kernel, processor) = (kernel.trim(), machine::processor());
        if self.json {
            let machine = json!({
                "kernel": kernel,
                "processor": processor,
                "cpus": std::thread::available_parallelism().map_or(0, usize::from),
                "calibration": { "before": before, "after": after },
                "rounds": manner.rounds,
                "window_ms": u64::try_from(manner.window.as_millis()).unwrap_or(u64::MAX),
                "rejected": rejected,
                "busy": manner.busy,
            });
            let json = report::json(machine, &lines, &outcomes);
            println!("{}", serde_json::to_string_pretty(&json)?);
            return Ok(());
        }
        println!(
            "Linux {kernel}, {processor}; {} rounds of {} ms, {rejected} measurements rejected as disturbed; medians, (least-greatest)\n\
             calibration {:.2} {:.2} {:.2} ns before, {:.2} {:.2} {:.2} after (CPU 0, CPU 1, both at once)\n",
            manner.rounds,
            manner.window.as_millis(),
            before.cpu0,
            before.cpu1,
            before.both,
            after.cpu0,
            after.cpu1,
            after.both,
        );
        print!("{}", report::table(&lines, &outcomes));
        Ok(())
    }

    /// Returns the groups with only the requested rows, or with the default rows if none is
    /// requested, and only the jobs that these rows need.
    ///
    /// # Errors
    ///
    /// A requested name is not the beginning of any row's name.
    fn select(&self, groups: Vec<Group>) -> Result<Vec<Group>> {
        let names: Vec<&str> = match (self.names.is_empty(), self.quick && !self.list) {
            (true, _) if self.other.is_some() => vec!["other"],
            (true, true) => QUICK.to_vec(),
            (true, false) => {
                let all = self.list;
                let asked = |group: &Group| all || !group.rows.iter().any(is_only_by_name);
                return Ok(groups.into_iter().filter(asked).collect());
            }
            (false, _) => self.names.iter().map(String::as_str).collect(),
        };
        let known: Vec<&str> = groups
            .iter()
            .flat_map(|group| &group.rows)
            .map(|row| row.name.as_str())
            .collect();
        // A complete name selects only that row; any other text selects all rows that begin with
        // it.
        let is_asked = |row: &str| {
            names
                .iter()
                .any(|name| row == *name || (!known.contains(name) && row.starts_with(name)))
        };
        if let Some(unknown) = names
            .iter()
            .find(|name| !known.iter().any(|row| row.starts_with(**name)))
        {
            bail!("there is no row {unknown}; `lvs-bench compare --list` shows them");
        }
        let kept: Vec<String> = known
            .iter()
            .filter(|row| is_asked(row))
            .map(ToString::to_string)
            .collect();
        let groups = groups.into_iter().filter_map(|mut group| {
            group.rows.retain(|row| kept.contains(&row.name));
            let rows = &group.rows;
            let needed = |job: &str| {
                rows.iter()
                    .any(|row| row.subject == job || row.against.jobs().contains(&job))
            };
            group.jobs.retain(|job| needed(&job.name));
            (!group.rows.is_empty()).then_some(group)
        });
        Ok(groups.collect())
    }
}

/// Returns the approximate duration of all measurements in seconds.
fn expected(groups: &[Group], rounds: usize, window: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a few rounds")]
    let rounds = rounds as f64;
    let jobs = groups.iter().flat_map(|group| &group.jobs);
    jobs.map(|job| job.work.set_up() + rounds * job.work.seconds(window.as_secs_f64()))
        .sum()
}

/// Raises the kernel's limits of tracked connections, which apply to the machine, not to a
/// namespace. Contains the files and old values of the raised limits, and restores them when it is
/// dropped.
#[derive(Debug)]
struct Conntrack(Vec<(&'static str, String)>);

impl Conntrack {
    const LIMITS: [(&str, u32); 2] = [
        ("/sys/module/nf_conntrack/parameters/hashsize", 1 << 20),
        ("/proc/sys/net/netfilter/nf_conntrack_max", 4_000_000),
    ];

    fn raise() -> Self {
        let raised = Self::LIMITS.into_iter().filter_map(|(file, wanted)| {
            let old = fs::read_to_string(file).ok()?.trim().to_owned();
            let is_less = old.parse::<u32>().is_ok_and(|old| old < wanted);
            (is_less && fs::write(file, wanted.to_string()).is_ok()).then_some((file, old))
        });
        Self(raised.collect())
    }
}

impl Drop for Conntrack {
    fn drop(&mut self) {
        for (file, old) in &self.0 {
            let restored =
                fs::write(file, old).with_context(|| format!("cannot restore {file} to {old}"));
            if let Err(error) = restored {
                eprintln!("{error:#}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn selected(arguments: &[&str]) -> Result<Vec<Group>> {
        let words = ["compare"].iter().chain(arguments);
        Cli::parse_from(words).options.select(table::all())
    }

    fn names(groups: &[Group]) -> Vec<&str> {
        let rows = groups.iter().flat_map(|group| &group.rows);
        rows.map(|row| row.name.as_str()).collect()
    }

    #[test]
    fn compare_rows_are_selected_by_name_prefix_or_quick_option() {
        let groups = selected(&["nat-1k", "replies-1m"]).expect("both rows exist");
        assert_eq!(names(&groups), ["nat-1k", "replies-1m"]);
        let jobs: Vec<_> = groups[1].jobs.iter().map(|job| job.name.as_str()).collect();
        assert_eq!(jobs, ["replies/1k/ours", "replies/1m/ours"]);
        let groups = selected(&["latency-h"]).expect("latency-h is a row");
        assert_eq!(names(&groups), ["latency-half-p50", "latency-half-p99"]);
        assert!(selected(&["no-such-row"]).is_err());
        assert_eq!(
            names(&selected(&["--quick"]).expect("--quick selects rows")),
            QUICK
        );
    }

    /// This checks the planned time, not the time of a run.
    #[test]
    fn compare_plan_takes_at_most_documented_time() {
        let seconds = |arguments: &[&str], (rounds, window)| {
            let groups = selected(arguments).expect("the arguments select rows");
            expected(&groups, rounds, Duration::from_millis(window))
        };
        let full = seconds(&[], USUALLY);
        assert!(full < 15.0 * 60.0, "{full} s");
        let quick = seconds(&["--quick"], QUICKLY);
        assert!(quick < 2.0 * 60.0, "{quick} s");
    }
}

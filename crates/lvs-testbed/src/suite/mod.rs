//! `make test` and `make test-all`: runs the tests of all crates, each in a process of its own.
//!
//! `cargo test` runs the executables of the workspace one after another, and prints neither the
//! duration of a test nor the omitted tests. Most end-to-end tests wait for a clock, and most other
//! tests compute, so that both kinds together use the processors well.
//!
//! | attribute of a test | `make test` | `make test-rest` |
//! |---|---|---|
//! | none | runs it, except in `benches` | runs it if it computes, with full sizes, or is in `benches` |
//! | `#[ignore = "needs NAME"]`, `#[ignore = "long"]` | lists it | runs it |
//! | `#[ignore = "by hand: REASON"]` | lists it | lists it |
//!
//! `make test-all` is both. A test that the host does not permit calls `lvs_sys::testing::not_run`:
//! `make test` lists it, and `make test-rest` counts it as failed.

mod run;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Deserialize;

/// Environment variable that selects the full sizes of computing tests.
const FULL: &str = "LVS_TEST_FULL";

/// Environment variable that makes a test print the last lines of each program that it started.
/// This runner sets it, and shows only the output of failed tests.
pub(crate) const LOGS: &str = "LVS_TEST_LOGS";

/// Exit status of a test that the host does not permit.
const NOT_RUN: i32 = 77;
/// [`NOT_RUN`] as text.
const NOT_RUN_TEXT: &str = "77";

/// Beginning of the reason of a test that neither `make test` nor `make test-all` runs.
const BY_HAND: &str = "by hand";

/// The crate that only `make test-rest` builds.
const BENCHES: &str = "benches";

/// Name of the executable with the end-to-end tests.
const END_TO_END: &str = "e2e";

/// Modules of end-to-end tests that compute, in the order of their start: the longest first.
const COMPUTING: [&str; 8] = [
    "transcripts",
    "fuzz",
    "two_ways",
    "hostile",
    "conformance",
    "fast_path_twins",
    "checksums",
    "model",
];

/// Computing modules that load BPF programs all the time. Meanwhile, every start of a dataplane
/// takes longer, so these modules start after the waiting tests.
const LOADING: [&str; 2] = ["conformance", "fast_path_twins"];

/// Modules whose tests wait for almost a minute. They start before the other waiting tests, so that
/// the run does not end with one of them.
const LONG_WAITS: [&str; 5] = ["unanswered", "peers", "fast_path", "killed", "cluster"];

/// Modules of property tests outside of the end-to-end tests, which try more cases in
/// `make test-rest`.
const PROPERTIES: [&str; 4] = ["misuse", "passing", "pipeline_ipv6", "pipeline_table"];

/// Number of cases of each property in `make test-rest`; `make test` uses proptest's default of
/// 256.
const CASES: &str = "2000";

/// Whether tests run with their full sizes, as in `make test-rest`.
#[must_use]
pub fn is_full() -> bool {
    std::env::var_os(FULL).is_some()
}

/// Returns `quick` in `make test`, and `full` in `make test-rest`.
#[must_use]
pub fn size(quick: u64, full: u64) -> u64 {
    if is_full() { full } else { quick }
}

/// Options of `lvs-testbed tests`.
#[derive(Args, Debug)]
pub struct TestsOptions {
    /// Run the tests that `make test` leaves out: those that need third-party programs, and
    /// computing tests with full sizes
    #[arg(long)]
    rest: bool,
    /// End-to-end tests that run at the same time [default: three for each processor, with --rest
    /// four]
    #[arg(long)]
    jobs: Option<usize>,
    /// Run only tests with one of these words in `package executable::name`, separated by commas
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Messages of `cargo test --no-run --message-format=json`, in a file
    artifacts: PathBuf,
}

#[derive(Clone, Debug)]
struct Test {
    executable: PathBuf,
    /// Directory of the package, in which the test runs, as with `cargo test`.
    package: PathBuf,
    /// Name of the test in libtest's list.
    name: String,
    /// `package executable::name`; `package name` for a unit test.
    title: String,
    /// Whether the test mostly waits, for a clock or for other processes.
    waits: bool,
    /// Whether the test starts after the waiting tests; see [`LOADING`].
    late: bool,
    /// Position in the order of starts.
    turn: usize,
}

/// A test that this run omits, or that the host does not permit.
#[derive(Debug)]
struct Omitted {
    title: String,
    reason: String,
}

/// One line of cargo's JSON messages.
#[derive(Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    manifest_path: PathBuf,
    #[serde(default)]
    target: Target,
    #[serde(default)]
    profile: Profile,
    #[serde(default)]
    executable: Option<PathBuf>,
}

#[derive(Default, Deserialize)]
struct Target {
    #[serde(default)]
    name: String,
    /// Kind of the target: `bench` for a benchmark, which lists no tests.
    #[serde(default)]
    kind: Vec<String>,
}

#[derive(Default, Deserialize)]
struct Profile {
    #[serde(default)]
    test: bool,
}

/// Runs the tests. Prints failures as they happen, then the slowest tests, the omitted ones and the
/// counts. Writes the times of all tests to a file next to `artifacts`. Exits with status 1 if a
/// test fails.
///
/// # Errors
///
/// The tests cannot be listed, none is selected, or the times cannot be written.
pub fn main(options: &TestsOptions) -> Result<()> {
    // The testbed stops programs with these signals, which must not be ignored.
    lvs_sys::signals::restore_signals();
    let (mut tests, mut omitted) = tests(options)?;
    tests.sort_by_key(|test| test.turn);
    ensure!(
        !tests.is_empty(),
        "this run has no tests: none has one of the words {:?} in its name, or those that do are left out",
        options.only
    );
    let processors = std::thread::available_parallelism().map_or(2, usize::from);
    let limits = run::Limits {
        // Tests of third-party programs wait more than they compute.
        waiting: options
            .jobs
            .unwrap_or(if options.rest { 4 } else { 3 } * processors)
            .max(1),
        // One more than processors, because some unit tests wait.
        computing: processors + 1,
        each: Duration::from_secs(if options.rest { 1800 } else { 900 }),
    };
    println!(
        "{} tests, {} end-to-end tests at a time",
        tests.len(),
        limits.waiting
    );
    let began = Instant::now();
    let mut results = run::all(tests, &limits, &environment(options));
    results.sort_by_key(|result| std::cmp::Reverse(result.took));
    let times: String = results
        .iter()
        .map(|result| format!("{:.3} {}\n", result.took.as_secs_f64(), result.title))
        .collect();
    std::fs::write(options.artifacts.with_extension("times"), times)?;
    println!("\nslowest tests:");
    for result in results.iter().take(10) {
        println!("  {:6.1} s  {}", result.took.as_secs_f64(), result.title);
    }
    let (mut passed, mut failed) = (0, Vec::new());
    for result in results {
        match result.outcome {
            run::Outcome::Passed => passed += 1,
            run::Outcome::NotRun(reason) if !options.rest => omitted.push(Omitted {
                title: result.title,
                reason,
            }),
            run::Outcome::Failed | run::Outcome::NotRun(_) => failed.push(result.title),
        }
    }
    report(&omitted);
    if !failed.is_empty() {
        println!("\nfailed tests:");
        for title in &failed {
            println!("  {title}");
        }
    }
    let seconds = began.elapsed().as_secs();
    println!("\nin {} min {} s:", seconds / 60, seconds % 60);
    println!(
        "{passed} passed, {} failed, {} skipped",
        failed.len(),
        omitted.len()
    );
    if !failed.is_empty() {
        std::process::exit(1);
    }
    Ok(())
}

/// Environment variables that this runner sets for tests.
fn environment(options: &TestsOptions) -> Vec<(&'static str, &'static str)> {
    let mut environment = vec![
        ("RUST_BACKTRACE", "0"),
        ("LVS_NOT_RUN", NOT_RUN_TEXT),
        (LOGS, "1"),
    ];
    if options.rest {
        environment.extend([(FULL, "1"), ("PROPTEST_CASES", CASES)]);
    }
    environment
}

fn tests(options: &TestsOptions) -> Result<(Vec<Test>, Vec<Omitted>)> {
    let path = &options.artifacts;
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    let (mut tests, mut omitted) = (Vec::new(), Vec::new());
    for line in BufReader::new(file).lines() {
        let line = line?;
        if !line.starts_with('{') {
            continue;
        }
        let message: Message = serde_json::from_str(&line).with_context(|| {
            format!("{}: cannot parse the line of cargo: {line}", path.display())
        })?;
        if message.reason != "compiler-artifact"
            || !message.profile.test
            || message.target.kind.iter().any(|kind| kind == "bench")
        {
            continue;
        }
        if let Some(executable) = message.executable {
            let package = message
                .manifest_path
                .parent()
                .context("the manifest has no directory")?;
            executable_tests(
                &executable,
                package,
                &message.target.name,
                options,
                &mut tests,
                &mut omitted,
            )?;
        }
    }
    Ok((tests, omitted))
}

fn executable_tests(
    executable: &Path,
    package: &Path,
    target: &str,
    options: &TestsOptions,
    tests: &mut Vec<Test>,
    omitted: &mut Vec<Omitted>,
) -> Result<()> {
    let crate_name = package.file_name().unwrap_or_default().to_string_lossy();
    let title = |name: &str| {
        // Unit tests have the name of the crate.
        if target.replace('_', "-") == *crate_name {
            format!("{crate_name} {name}")
        } else {
            format!("{crate_name} {target}::{name}")
        }
    };
    let selected = |name: &str| {
        let title = title(name);
        options.only.is_empty() || options.only.iter().any(|word| title.contains(word))
    };
    let reasons = ignored(executable)?;
    for name in list(executable, &[])? {
        let title = title(&name);
        if !selected(&name) {
            continue;
        }
        let module = name.split("::").next().unwrap_or_default();
        let position = |modules: &[&str]| modules.iter().position(|name| *name == module);
        let computes = target == END_TO_END && position(&COMPUTING).is_some();
        let sized = computes || target != END_TO_END && PROPERTIES.contains(&module);
        match reasons.get(&name) {
            Some(reason) if !options.rest || reason.starts_with(BY_HAND) => omitted.push(Omitted {
                title,
                reason: reason.clone(),
            }),
            None if options.rest && options.only.is_empty() && !sized && crate_name != BENCHES => {}
            _ => tests.push(Test {
                executable: executable.to_owned(),
                package: package.to_owned(),
                waits: target == END_TO_END && !computes,
                late: computes && LOADING.contains(&module),
                turn: position(&COMPUTING)
                    .or_else(|| position(&LONG_WAITS))
                    .unwrap_or(usize::MAX),
                name,
                title,
            }),
        }
    }
    Ok(())
}

fn list(executable: &Path, options: &[&str]) -> Result<Vec<String>> {
    let mut command = Command::new(executable);
    command.args(["--list", "--format", "terse"]).args(options);
    let output = command
        .output()
        .with_context(|| executable.display().to_string())?;
    ensure!(
        output.status.success(),
        "{} --list failed: {}",
        executable.display(),
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(str::to_owned)
        .collect())
}

/// The ignored tests of an executable with their reasons, which only a run prints.
fn ignored(executable: &Path) -> Result<BTreeMap<String, String>> {
    let names = list(executable, &["--ignored"])?;
    if names.is_empty() {
        return Ok(BTreeMap::new());
    }
    let output = Command::new(executable)
        .args(["--exact", "--color", "never"])
        .args(&names)
        .output()?;
    let reasons = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| {
            let (name, reason) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
            let reason = reason.trim_start_matches(", ");
            Some((name.to_owned(), reason.to_owned()))
        })
        .collect::<BTreeMap<_, _>>();
    for name in names {
        ensure!(
            reasons.get(&name).is_some_and(|reason| !reason.is_empty()),
            "{name} is ignored without a reason"
        );
    }
    Ok(reasons)
}

/// Prints the number and the modules of omitted tests by reason, and the command that runs them.
fn report(omitted: &[Omitted]) {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for test in omitted {
        reasons.entry(&test.reason).or_default().push(&test.title);
    }
    if reasons.is_empty() {
        return;
    }
    println!("\nnot run (make test-rest runs all but those by hand):");
    for (reason, titles) in reasons {
        let modules: BTreeSet<&str> = titles.iter().map(|title| module(title)).collect();
        let modules: Vec<&str> = modules.into_iter().collect();
        println!("  {reason}: {} in {}", titles.len(), modules.join(", "));
    }
}

/// The module of a test: `ftp` for the end-to-end test `lvs-testbed e2e::ftp::name`.
fn module(title: &str) -> &str {
    let title = title.split_once("e2e::").map_or(title, |(_, title)| title);
    title.split("::").next().unwrap_or(title)
}

/// Whether standard output is a terminal, on which progress overwrites its own line.
fn on_terminal() -> bool {
    std::io::stdout().is_terminal()
}

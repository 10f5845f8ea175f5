//! Runs tests, each in a separate process, and prints progress and failures.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::{NOT_RUN, Test, on_terminal};

/// Limits of parallel tests, and of time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Number of parallel tests that wait.
    pub(super) waiting: usize,
    /// Number of parallel tests that compute.
    pub(super) computing: usize,
    /// Time limit of one test.
    pub(super) each: Duration,
}

#[derive(Debug)]
pub(super) struct Finished {
    pub(super) title: String,
    pub(super) took: Duration,
    pub(super) outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    Failed,
    /// The host does not permit the test, for this reason.
    NotRun(String),
}

/// Progress of a run, shared by its threads.
struct Progress {
    total: usize,
    began: Instant,
    results: Vec<Finished>,
    failed: usize,
    /// Time at which progress was printed last.
    printed: Instant,
}

/// Minimum interval between two lines of progress if the output is not a terminal.
const INTERVAL: Duration = Duration::from_secs(15);

pub(super) fn all(
    tests: Vec<Test>,
    limits: &Limits,
    environment: &[(&str, &str)],
) -> Vec<Finished> {
    let now = Instant::now();
    let progress = Mutex::new(Progress {
        total: tests.len(),
        began: now,
        results: Vec::new(),
        failed: 0,
        printed: now,
    });
    let (waiting, computing): (VecDeque<_>, VecDeque<_>) =
        tests.into_iter().partition(|test| test.waits);
    let (late, computing) = computing.into_iter().partition(|test| test.late);
    let [waiting, computing, late] = [waiting, computing, late].map(Mutex::new);
    std::thread::scope(|scope| {
        for _ in 0..limits.waiting {
            scope.spawn(|| work(&waiting, limits, environment, &progress));
        }
        for _ in 0..limits.computing {
            scope.spawn(|| work(&computing, limits, environment, &progress));
        }
    });
    std::thread::scope(|scope| {
        for _ in 0..limits.computing {
            scope.spawn(|| work(&late, limits, environment, &progress));
        }
    });
    progress.into_inner().expect("no thread panicked").results
}

/// Runs tests until the queue is empty.
fn work(
    tests: &Mutex<VecDeque<Test>>,
    limits: &Limits,
    environment: &[(&str, &str)],
    progress: &Mutex<Progress>,
) {
    loop {
        let next = tests.lock().expect("no thread panicked").pop_front();
        let Some(test) = next else { return };
        let began = Instant::now();
        let (outcome, output) = match run(&test, limits, environment) {
            Ok(ran) => ran,
            Err(error) => (Outcome::Failed, format!("cannot run the test: {error}")),
        };
        let mut progress = progress.lock().expect("no thread panicked");
        progress.add(
            Finished {
                title: test.title,
                took: began.elapsed(),
                outcome,
            },
            &output,
        );
    }
}

impl Progress {
    fn add(&mut self, finished: Finished, output: &str) {
        if finished.outcome == Outcome::Failed {
            self.failed += 1;
            println!(
                "\n==== FAILED after {:.1} s: {}\n{}\n====",
                finished.took.as_secs_f64(),
                finished.title,
                output.trim_end()
            );
        }
        self.results.push(finished);
        let done = self.results.len();
        let terminal = on_terminal();
        if terminal || done == self.total || self.printed.elapsed() >= INTERVAL {
            self.printed = Instant::now();
            print!(
                "{}{done} of {} tests, {} failed, {} s{}",
                if terminal { "\r" } else { "" },
                self.total,
                self.failed,
                self.began.elapsed().as_secs(),
                if terminal { " " } else { "\n" },
            );
            // A closed output pipe must not stop the tests.
            let _ = std::io::stdout().flush();
        }
    }
}

/// Runs one test; returns its outcome and output.
fn run(
    test: &Test,
    limits: &Limits,
    environment: &[(&str, &str)],
) -> std::io::Result<(Outcome, String)> {
    let mut output = tempfile::tempfile()?;
    let mut command = if test.waits {
        Command::new(&test.executable)
    } else {
        // Computing tests use the processor time that waiting tests leave.
        let mut nice = Command::new("nice");
        nice.args(["-n", "10"]).arg(&test.executable);
        // Many tests allocate a connection table for each recording. The C library clears a table
        // of megabytes unless the kernel has just provided the memory.
        nice.env("MALLOC_MMAP_THRESHOLD_", "1048576");
        nice
    };
    let mut child = command
        .args(["--exact", &test.name, "--include-ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .current_dir(&test.package)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?)
        .process_group(0)
        .spawn()?;
    let status = wait(&mut child, limits.each)?;
    let mut text = read(&mut output)?;
    let outcome = match status {
        Some(status) if status.success() => Outcome::Passed,
        Some(status) if status.code() == Some(NOT_RUN) => {
            let reason = text.lines().find_map(|line| line.split_once("not run: "));
            Outcome::NotRun(
                reason
                    .map_or("not permitted", |(_, reason)| reason)
                    .to_owned(),
            )
        }
        Some(_) => Outcome::Failed,
        None => {
            text.push_str(&format!(
                "\nthe test did not end within {:?}, and was killed",
                limits.each
            ));
            Outcome::Failed
        }
    };
    Ok((outcome, text))
}

/// Waits until a test exits. After `limit`, kills the test's process group, and returns `None`.
fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if began.elapsed() >= limit {
            if let Ok(pid) = i32::try_from(child.id()) {
                let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
            }
            child.wait()?;
            return Ok(None);
        }
        // Polls at intervals of a fiftieth of the elapsed time.
        let pause = began.elapsed() / 50;
        std::thread::sleep(pause.clamp(Duration::from_millis(1), Duration::from_millis(50)));
    }
}

fn read(output: &mut File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    output.seek(SeekFrom::Start(0))?;
    output.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

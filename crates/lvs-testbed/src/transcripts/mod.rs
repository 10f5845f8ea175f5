//! Plays recorded sessions of ipvsadm with the real programs, and compares the output byte by byte.
//!
//! A recording is a file of JSON objects, one session each, plain or gzipped. Each session has its
//! own dataplane in memory (`MemoryDataplane`), and its own user, mount and network namespaces with
//! the recorded `/etc/hosts`. Before each step, the clock is set to the recorded time. Recorded
//! packets pass the packet path as frames.

mod compare;
pub(crate) mod etc;
mod play;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::play::main as play;
use crate::conformance::recorded;
use crate::programs;

/// Options of `lvs-testbed transcripts`.
#[derive(Clone, Debug, clap::Args)]
pub struct TranscriptOptions {
    /// Recordings: sessions as JSON objects, plain or gzipped
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Only sessions whose name contains this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Maximum number of differences that are shown
    #[arg(long, value_name = "N", default_value_t = 20)]
    show: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Session {
    name: String,
    #[serde(default)]
    kernel: String,
    #[serde(default)]
    vips: Vec<String>,
    #[serde(default)]
    local: Vec<String>,
    #[serde(default)]
    servers: Vec<std::net::IpAddr>,
    #[serde(default)]
    marks: Vec<Value>,
    #[serde(default)]
    hosts: String,
    /// Names that `/etc/services` of the recording host did not contain.
    #[serde(default)]
    unknown_services: Vec<String>,
    /// The program that plays the session; the recording does not contain it.
    #[serde(default)]
    program: Program,
    steps: Vec<Step>,
}

/// The program that plays a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Program {
    /// `lvsadm` under the name `ipvsadm`.
    #[default]
    Lvsadm,
    /// The `ipvsadm` of this machine, under `lvs-run`.
    Ipvsadm,
}

impl Program {
    /// Program of this project that the player starts.
    const fn own(self) -> &'static str {
        match self {
            Self::Lvsadm => "lvsadm",
            Self::Ipvsadm => "lvs-run",
        }
    }
}

/// A step: a command, packets, a sysctl, commands whose output is not compared, or a wait.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Step {
    /// Seconds since the start of the session.
    t: Option<f64>,
    wait: Option<f64>,
    argv: Option<Vec<String>>,
    stdin: String,
    uid: Option<u32>,
    stdout: String,
    stderr: String,
    exit: i32,
    unordered: Option<Value>,
    approximate: Option<Value>,
    packets: Vec<Packet>,
    repeat: Option<u64>,
    reset: Vec<String>,
    sysctl: Option<String>,
    value: Option<Value>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Packet {
    dev: String,
    frame: String,
}

/// Results of comparing the commands of sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TranscriptReport {
    /// Number of commands with the recorded result.
    pub passed: usize,
    /// Number of commands with another result.
    pub failed: usize,
    /// Text of every difference.
    pub differences: Vec<String>,
}

impl TranscriptReport {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.differences.extend(other.differences);
    }

    fn broken(session: &Session, error: &anyhow::Error) -> Self {
        let commands = session.steps.iter().filter(|step| step.argv.is_some());
        Self {
            passed: 0,
            failed: commands.count().max(1),
            differences: vec![format!("{}: {error:#}", session.name)],
        }
    }
}

fn sessions(path: &Path) -> anyhow::Result<Vec<Session>> {
    serde_json::Deserializer::from_slice(&recorded(path)?)
        .into_iter()
        .collect::<Result<_, _>>()
        .with_context(|| format!("{} is not a recorded session", path.display()))
}

/// Plays every `every`th session in `files` whose name contains `only`, with `program`.
///
/// # Errors
/// A file cannot be read or is not a recording; a program is not built.
pub fn transcripts(
    files: &[PathBuf],
    only: Option<&str>,
    every: usize,
    program: Program,
) -> anyhow::Result<TranscriptReport> {
    let mut all = Vec::new();
    for path in files {
        all.extend(sessions(path)?);
    }
    if let Some(only) = only {
        all.retain(|session| session.name.contains(only));
    }
    let mut all: Vec<_> = all.into_iter().step_by(every).collect();
    for session in &mut all {
        session.program = program;
    }
    // A missing program is reported once, not by every session.
    programs::find(program.own())?;
    let own = programs::own()?;
    let next = AtomicUsize::new(0);
    let reports = Mutex::new(Vec::with_capacity(all.len()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(session) = all.get(number) else {
                        return;
                    };
                    let report = run_session(&own, session)
                        .unwrap_or_else(|error| TranscriptReport::broken(session, &error));
                    if let Ok(mut reports) = reports.lock() {
                        reports.push((number, report));
                    }
                }
            });
        }
    });
    let mut reports = reports.into_inner().unwrap_or_default();
    reports.sort_by_key(|(number, _)| *number);
    let mut sum = TranscriptReport::default();
    for (_, report) in reports {
        sum.add(report);
    }
    Ok(sum)
}

/// The process that plays a session. Dropping the value kills the process.
struct Player(Child);

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Plays a session in a separate process with its own namespaces.
fn run_session(own: &Path, session: &Session) -> anyhow::Result<TranscriptReport> {
    let mut player = Player(
        Command::new(own)
            .arg("play-transcript")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the player")?,
    );
    let mut output = BufReader::new(
        player
            .0
            .stdout
            .take()
            .context("the player has no output pipe")?,
    );
    let mut line = String::new();
    output.read_line(&mut line)?;
    ensure!(
        line == play::READY,
        "the player could not create its namespaces"
    );
    map_users(player.0.id())?;
    let mut input = player
        .0
        .stdin
        .take()
        .context("the player has no input pipe")?;
    serde_json::to_writer(&mut input, session)?;
    input.flush()?;
    drop(input);
    let mut text = String::new();
    output.read_to_string(&mut text)?;
    let status = player.0.wait()?;
    if !status.success() {
        bail!("the player has failed: {status}");
    }
    serde_json::from_str(&text).context("cannot read the player's report")
}

/// Maps the users of the new user namespace of process `pid`: all users if the caller is root,
/// otherwise only the caller's user, who is root in the namespace.
fn map_users(pid: u32) -> anyhow::Result<()> {
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    let (users, groups) = if uid.is_root() {
        ("0 0 65536".to_owned(), "0 0 65536".to_owned())
    } else {
        std::fs::write(format!("/proc/{pid}/setgroups"), "deny")?;
        (format!("0 {uid} 1"), format!("0 {gid} 1"))
    };
    for (file, map) in [("uid_map", users), ("gid_map", groups)] {
        let path = format!("/proc/{pid}/{file}");
        std::fs::write(&path, map).with_context(|| format!("cannot write {path}"))?;
    }
    Ok(())
}

/// Runs `lvs-testbed transcripts`, and prints differences and counts. If there are differences,
/// ends the process with exit status 1.
///
/// # Errors
/// As [`transcripts`].
pub fn run(options: &TranscriptOptions) -> anyhow::Result<()> {
    let report = transcripts(
        &options.files,
        options.only.as_deref(),
        1,
        Program::default(),
    )?;
    for difference in report.differences.iter().take(options.show) {
        println!("{difference}");
    }
    let more = report.differences.len().saturating_sub(options.show);
    if more > 0 {
        println!("{more} more differences");
    }
    println!("{} passed, {} failed", report.passed, report.failed);
    if report.failed > 0 {
        // The counts must be the last line: returning an error would print another line after them.
        std::process::exit(1);
    }
    Ok(())
}

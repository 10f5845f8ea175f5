//! A program on a host, and functions that wait for its output.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

/// Time limit for a program to exit after a signal, to be multiplied by [`BUSY`]: three times the
/// limit of `lvsd` for its dataplane.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// A program that runs on a host. Dropping it kills its process group.
#[derive(Debug)]
pub struct Proc {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Proc {
    pub(super) fn new(name: String, child: Child, log: PathBuf) -> Self {
        Self { name, child, log }
    }

    /// Process id of the program, which is the same inside and outside of the host.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The output of the program so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends a signal to the program, but not to its children.
    ///
    /// # Errors
    ///
    /// The program has exited.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.nix_pid(), signal).with_context(|| format!("{}: cannot send {signal}", self.name))
    }

    /// Writes to the process's input.
    ///
    /// # Errors
    /// If the process no longer reads its input.
    pub fn send(&mut self, text: &str) -> Result<()> {
        let input = self.child.stdin.as_mut();
        let input = input.with_context(|| format!("{}: its input is closed", self.name))?;
        input
            .write_all(text.as_bytes())
            .with_context(|| format!("{}: cannot send {text:?}", self.name))
    }

    /// Closes the program's standard input, and waits until the program exits.
    ///
    /// # Errors
    ///
    /// The program still runs after four times `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        drop(self.child.stdin.take());
        let limit = limit * BUSY;
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!(
                    "{} still runs after {limit:?}; it printed:\n{}",
                    self.name,
                    self.log()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal, and waits until the program exits.
    ///
    /// # Errors
    /// The program has already exited, or does not exit within the time limit.
    pub fn stop(&mut self, signal: Signal) -> Result<ExitStatus> {
        self.signal(signal)?;
        self.wait(STOP_LIMIT)
    }

    /// As [`stop`](Self::stop); the program must report success.
    ///
    /// # Errors
    /// As `stop`, and if the exit status is not 0.
    pub fn stop_ok(&mut self, signal: Signal) -> Result<()> {
        let status = self.stop(signal)?;
        ensure!(
            status.success(),
            "{} ended with {status}; it printed:\n{}",
            self.name,
            self.log()
        );
        Ok(())
    }

    /// Kills the program and its process group with SIGKILL, and waits until the program exits.
    pub fn kill(&mut self) {
        let _ = killpg(self.nix_pid(), Signal::SIGKILL);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn nix_pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("Linux process ids fit in i32"))
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        let log = if std::thread::panicking() || std::env::var_os(crate::suite::LOGS).is_some() {
            self.log()
        } else {
            String::new()
        };
        if !log.is_empty() {
            let tail: Vec<&str> = log.lines().rev().take(40).collect();
            let running = if self.is_running() {
                "still running"
            } else {
                "ended"
            };
            eprintln!("--- {} ({running}) printed:", self.name);
            for line in tail.iter().rev() {
                eprintln!("    {line}");
            }
        }
        self.kill();
    }
}

/// Factor for all time limits, for a busy machine. The limits only detect hangs.
const BUSY: u32 = 4;

const SHORTEST_POLL: Duration = Duration::from_millis(5);
const LONGEST_POLL: Duration = Duration::from_millis(200);

/// Polls until the condition is true: at first every 5 ms, later at intervals of 1/16 of the
/// elapsed time, but at most 200 ms.
///
/// # Errors
///
/// The condition is false after four times `limit`.
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    let limit = limit * BUSY;
    let began = Instant::now();
    let deadline = began + limit;
    while !condition() {
        ensure!(
            Instant::now() < deadline,
            "timed out after {limit:?} waiting for {what}"
        );
        std::thread::sleep((began.elapsed() / 16).clamp(SHORTEST_POLL, LONGEST_POLL));
    }
    Ok(())
}

/// As [`wait_until`], with a limit of 20 seconds.
///
/// # Errors
///
/// As [`wait_until`].
pub fn soon(what: &str, condition: impl FnMut() -> bool) -> Result<()> {
    wait_until(what, Duration::from_secs(20), condition)
}

/// Runs a command with the given input until it exits; returns its standard output.
///
/// # Errors
///
/// When it cannot be started or its exit status is not 0; the error contains all of its output.
pub fn run_with_input(command: &mut Command, input: &str) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that ends without reading all of its input reports the reason by its exit code.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output()?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!(
            "{}\n{stdout}{}{input}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(stdout)
}

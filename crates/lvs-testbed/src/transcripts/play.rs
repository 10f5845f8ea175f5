//! Plays one session in separate namespaces, with its own dataplane in memory.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use lvs_api::Address;
use lvs_core::Options;
use lvs_core::api::{Call, Sysctl};
use lvs_process::server::Handle;
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};

use super::compare::{Ran, same};
use super::{Program, Session, Step, TranscriptReport, etc};
use crate::conformance::MemoryDataplane;
use crate::conformance::case::{sysctl_text, unhex};
use crate::programs;

/// Line by which the player asks its parent to map the player's users and to send the session.
pub(super) const READY: &str = "ready\n";

/// Runs `lvs-testbed play-transcript`: reads a session from stdin after the parent has mapped the
/// users, and writes a report to stdout.
///
/// # Errors
/// No namespaces can be created, or standard input contains no session.
pub fn main() -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET)
        .context("cannot create namespaces: run this as root, or permit user namespaces")?;
    print!("{READY}");
    std::io::stdout().flush()?;
    // The parent writes the session after it has mapped the users.
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let session: Session = serde_json::from_str(&text).context("cannot read the session")?;
    let report = play(&session).unwrap_or_else(|error| TranscriptReport::broken(&session, &error));
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// The dataplane, the program and the files of a session.
struct Stage {
    program: Program,
    /// Path of `lvsadm` or `lvs-run`.
    executable: PathBuf,
    dataplane: Arc<MemoryDataplane>,
    /// Serves the control socket until it is dropped.
    _serving: Handle,
    /// Directory of the session's files, which is removed last.
    _dir: tempfile::TempDir,
}

impl Stage {
    fn set(session: &Session) -> anyhow::Result<Self> {
        etc::private_mounts()?;
        let dir = tempfile::tempdir()?;
        etc::open_to_all(dir.path(), 0o755)?;
        // The program may be in a directory that the recorded user cannot enter.
        let name = session.program.own();
        let executable = dir.path().join(name);
        fs::write(&executable, "")?;
        etc::bind(&programs::find(name)?, &executable)?;
        etc::replace(dir.path(), &session.hosts, &session.unknown_services)?;
        let mut options = Options::default();
        if session.kernel.starts_with("6.1.") {
            // The kernel of Debian 12 does not have this scheduler.
            options.schedulers.remove("twos");
        }
        let dataplane = MemoryDataplane::new(options)?;
        dataplane.set_up(&machine(session))?;
        let serving = dataplane.serve(&Address::default())?;
        Ok(Self {
            program: session.program,
            executable,
            dataplane,
            _serving: serving,
            _dir: dir,
        })
    }

    fn run(&self, argv: &[String], stdin: &str, uid: Option<u32>) -> anyhow::Result<Ran> {
        let (argv0, arguments) = argv
            .split_first()
            .context("the command of a step is empty")?;
        let mut command = Command::new(&self.executable);
        match self.program {
            Program::Lvsadm => {
                command.arg0(argv0).args(arguments);
                if let Some(uid) = uid {
                    command.uid(uid).gid(uid);
                }
            }
            // The launcher needs root; the program does not.
            Program::Ipvsadm => {
                command.arg("--");
                if let Some(uid) = uid {
                    let users = [format!("--reuid={uid}"), format!("--regid={uid}")];
                    command.arg("setpriv").args(users).arg("--clear-groups");
                }
                command.args(argv);
            }
        }
        command
            .current_dir("/")
            .env_clear()
            .env("LANG", "C")
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| match uid {
            Some(uid) => format!("cannot run {argv0} as user {uid}: run this as root"),
            None => format!("cannot run {argv0}"),
        })?;
        let mut input = child
            .stdin
            .take()
            .context("the command has no input pipe")?;
        let output = std::thread::scope(|scope| {
            // The program may ignore its input.
            scope.spawn(move || input.write_all(stdin.as_bytes()));
            child.wait_with_output()
        })?;
        let signal = output.status.signal().unwrap_or(0);
        Ok(Ran {
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            exit: output.status.code().unwrap_or(-signal),
        })
    }
}

/// Network and host of the machine that recorded the session, for [`MemoryDataplane`].
fn machine(session: &Session) -> Value {
    let local: Vec<&String> = session.vips.iter().chain(&session.local).collect();
    json!({"local": local, "neigh": session.servers, "marks": session.marks})
}

fn play(session: &Session) -> anyhow::Result<TranscriptReport> {
    let stage = Stage::set(session)?;
    let mut report = TranscriptReport::default();
    for (number, step) in session.steps.iter().enumerate() {
        if let Some(t) = step.t {
            stage.dataplane.advance_to(Duration::try_from_secs_f64(t)?);
        }
        for line in &step.reset {
            let words = line.split_whitespace().map(str::to_owned);
            let argv: Vec<String> = ["ipvsadm".to_owned()].into_iter().chain(words).collect();
            stage.run(&argv, "", None)?;
        }
        if let Some(name) = &step.sysctl {
            let value = step.value.as_ref().map(sysctl_text).unwrap_or_default();
            let name = name.rsplit(['.', '/']).next().unwrap_or(name).to_owned();
            let set = Call::SysctlSet(Sysctl { name, value });
            stage
                .dataplane
                .ask(set)
                .map_err(|failure| anyhow::anyhow!(failure.message))?;
        }
        let frames = step.packets.iter();
        let frames = frames.map(|packet| Ok((&packet.dev, unhex(&packet.frame)?)));
        let frames: Vec<_> = frames.collect::<anyhow::Result<_>>()?;
        for _ in 0..step.repeat.unwrap_or(1) {
            for (link, frame) in &frames {
                stage.dataplane.inject(link, frame)?;
            }
        }
        let Some(argv) = &step.argv else { continue };
        let by_ipvsadm = stage.program == Program::Ipvsadm;
        let ran = stage.run(argv, &step.stdin, step.uid)?;
        let is_same = match step.exit {
            // The recorded program crashed, and so does the same program here.
            exit if exit < 0 && by_ipvsadm => ran.exit == exit,
            _ => same(step, &ran, took(&session.steps, number)),
        };
        if is_same {
            report.passed += 1;
        } else {
            report.failed += 1;
            report.differences.push(format!(
                "{} step {number}: {argv:?}{}\n  expected {} {:?} {:?}\n  got      {} {:?} {:?}",
                session.name,
                if step.stdin.is_empty() {
                    String::new()
                } else {
                    format!(" stdin {:?}", step.stdin)
                },
                step.exit,
                step.stdout,
                step.stderr,
                ran.exit,
                ran.stdout,
                ran.stderr
            ));
        }
    }
    Ok(report)
}

/// Maximum duration of a recorded command in seconds: until the next step, without the waits in
/// between.
fn took(steps: &[Step], number: usize) -> f64 {
    let Some(start) = steps[number].t else {
        return 0.0;
    };
    let mut waited = 0.0;
    for step in &steps[number + 1..] {
        match step.t {
            Some(next) => return next - start - waited,
            None => waited += step.wait.unwrap_or(0.0),
        }
    }
    0.0
}

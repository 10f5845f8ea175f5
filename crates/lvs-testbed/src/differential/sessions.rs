//! Records sessions of the real ipvsadm with the running kernel.

use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use anyhow::Context;
use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, unshare};
use serde_json::Value;

use super::kernel;
use super::record::release;
use crate::conformance::case::{Json, sysctl_text};
use crate::transcripts::etc;

/// Seconds between two commands of a recording.
const PACE: f64 = 0.02;

/// A replaced `/etc`. Dropping this value restores the original one. The directory with the
/// replacing files must be removed after that.
struct Replaced;

impl Drop for Replaced {
    fn drop(&mut self) {
        let _ = umount2("/etc", MntFlags::MNT_DETACH);
    }
}

/// Runs a session's commands and records their results.
pub(super) fn record(session: &Value) -> anyhow::Result<Value> {
    unshare(CloneFlags::CLONE_NEWNS).context("cannot create a mount namespace")?;
    etc::private_mounts()?;
    let dir = tempfile::tempdir()?;
    etc::replace(dir.path(), session.text("hosts")?, &[])?;
    let _restored = Replaced;
    let _links = kernel::links([1500; 2])?;
    let mut recorded = session.clone();
    let steps = recorded
        .get_mut("steps")
        .and_then(Value::as_array_mut)
        .context("the session has no `steps`")?;
    let mut t = 0.5;
    for step in steps {
        t += PACE;
        if let Some(name) = step.maybe_text("sysctl") {
            let value = step.get("value").map(sysctl_text).unwrap_or_default();
            kernel::set_ipvs(name, &value)?;
            continue;
        }
        step["t"] = t.into();
        let words: Vec<&str> = step
            .items("argv")
            .iter()
            .filter_map(Value::as_str)
            .collect();
        let (argv0, arguments) = words.split_first().context("the step has no command")?;
        let mut child = Command::new("ipvsadm")
            .arg0(argv0)
            .args(arguments)
            .current_dir("/")
            .env_clear()
            .env("LANG", "C")
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run ipvsadm: install it on the machine with the kernel")?;
        let mut input = child
            .stdin
            .take()
            .context("ipvsadm has no pipe to its standard input")?;
        // The input fits into a pipe, even if the program does not read it.
        let _ = input.write_all(step.maybe_text("stdin").unwrap_or_default().as_bytes());
        drop(input);
        let output = child.wait_with_output()?;
        let signal = output.status.signal().unwrap_or(0);
        step["stdout"] = String::from_utf8_lossy(&output.stdout).into();
        step["stderr"] = String::from_utf8_lossy(&output.stderr).into();
        step["exit"] = output.status.code().unwrap_or(-signal).into();
    }
    recorded["kernel"] = release().into();
    Ok(recorded)
}

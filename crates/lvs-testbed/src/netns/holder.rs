//! The processes that keep namespaces open. A mark in their environment lets a later run kill the
//! processes that a killed run has left.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Environment variable of a holder process with the [`owner_mark`] of the run that started it.
const HOLDER_MARK: &str = "LVS_TESTBED_HOLDER";

/// Script that mounts a separate `/run` (for locks and sockets), and a `/sys` with the host's own
/// interfaces. It also activates `lo`, and disables `rp_filter`, duplicate address detection and
/// router advertisements.
const HOLDER_SCRIPT: &str = r"
mount -t tmpfs -o mode=755 tmpfs /run || exit 1
mkdir -p /run/lock /run/netns
mount -t sysfs sysfs /sys 2>/dev/null
ip link set lo up || exit 1
cd /proc/sys/net
echo 0 > ipv4/conf/all/rp_filter; echo 0 > ipv4/conf/default/rp_filter
if [ -d ipv6 ]; then
    echo 0 > ipv6/conf/all/accept_dad; echo 0 > ipv6/conf/default/accept_dad; echo 0 > ipv6/conf/default/accept_ra
fi
cd /
echo ready
exec sleep infinity
";

pub(super) fn enter(pid: u32, user: Option<u32>, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("nsenter");
    if let Some(user) = user {
        command
            .arg(format!("--user=/proc/{user}/ns/user"))
            .arg("--preserve-credentials");
    }
    command
        .arg(format!("--net=/proc/{pid}/ns/net"))
        .arg(format!("--mount=/proc/{pid}/ns/mnt"))
        .arg("--")
        .arg(program);
    command
}

pub(super) fn holder_command(
    dir: &Path,
    name: &str,
    unshare: &[&str],
    base: Option<u32>,
) -> Result<Child> {
    let mut command = match base {
        Some(base) => enter(base, Some(base), unshare[0]),
        None => Command::new(unshare[0]),
    };
    let log = File::create(dir.join(format!("{name}-holder.log")))?;
    command
        .args(&unshare[1..])
        .args(["--propagation", "private", "--", "sh", "-c", HOLDER_SCRIPT])
        .env(HOLDER_MARK, owner_mark(std::process::id()))
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .context("cannot start unshare (package util-linux)")
}

pub(super) fn wait_ready(holder: &mut Child, name: &str) -> Result<()> {
    let mut line = String::new();
    let stdout = holder
        .stdout
        .take()
        .context("the process that keeps the namespaces has no output pipe")?;
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(
        line == "ready\n",
        "host {name}: its namespaces could not be made (see {name}-holder.log; in a container without privileges, /proc/sys is read-only)"
    );
    Ok(())
}

/// Returns a text that identifies the run of process `pid`: pid namespace, pid and start time. A
/// later process with the same pid has another start time.
pub(super) fn owner_mark(pid: u32) -> String {
    let namespace = fs::read_link("/proc/self/ns/pid")
        .map(|link| link.display().to_string())
        .unwrap_or_default();
    let digits: String = namespace.chars().filter(char::is_ascii_digit).collect();
    format!("{digits}-{pid}-{}", start_time(pid).unwrap_or_default())
}

/// The start time of a process: field 22 of `/proc/PID/stat`. The second field is in parentheses
/// and may contain any text.
fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after = stat.rsplit_once(')')?.1;
    after.split_ascii_whitespace().nth(19).map(str::to_owned)
}

/// Whether the process that `mark` identifies belonged to this pid namespace and has exited.
fn is_dead(mark: &str) -> bool {
    let mut parts = mark.split('-');
    let (Some(namespace), Some(pid), Some(start)) = (
        parts.next(),
        parts.next().and_then(|pid| pid.parse::<u32>().ok()),
        parts.next(),
    ) else {
        return false;
    };
    owner_mark(std::process::id()).split('-').next() == Some(namespace)
        && start_time(pid).as_deref() != Some(start)
}

/// Kills the processes and removes the files and named namespaces of runs that were killed together
/// with their janitor.
pub(super) fn sweep_leftovers() {
    let own_network = fs::read_link("/proc/self/ns/net").ok();
    let mut networks = Vec::new();
    // The namespace files stay open until the processes are killed, because the kernel may reuse
    // the inode number of a removed namespace.
    let mut open = Vec::new();
    for pid in processes() {
        let Ok(network_file) = File::open(format!("/proc/{pid}/ns/net")) else {
            continue;
        };
        let mut environment = Vec::new();
        if File::open(format!("/proc/{pid}/environ"))
            .and_then(|mut file| file.read_to_end(&mut environment))
            .is_err()
        {
            continue;
        }
        let mark = environment
            .split(|byte| *byte == 0)
            .filter_map(|entry| std::str::from_utf8(entry).ok())
            .find_map(|entry| entry.strip_prefix(HOLDER_MARK)?.strip_prefix('='));
        if mark.is_some_and(is_dead)
            && let Ok(network) = fs::read_link(format!("/proc/{pid}/ns/net"))
            && Some(&network) != own_network.as_ref()
        {
            networks.push(network);
            open.push(network_file);
        }
    }
    if !networks.is_empty() {
        for pid in processes() {
            if fs::read_link(format!("/proc/{pid}/ns/net"))
                .is_ok_and(|network| networks.contains(&network))
            {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let dead = name
            .to_str()
            .and_then(|name| name.strip_prefix("lvs-testbed-"))
            .is_some_and(is_dead);
        if dead {
            for name in fs::read_to_string(entry.path().join("names"))
                .unwrap_or_default()
                .lines()
            {
                let _ = Command::new("ip")
                    .args(["netns", "del", name])
                    .stderr(Stdio::null())
                    .status();
            }
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_mark_counts_as_dead_only_if_its_process_has_exited() {
        let own = owner_mark(std::process::id());
        assert!(
            !is_dead(&own),
            "the mark of this process counts as dead: {own}"
        );
        assert!(
            !is_dead(&format!("{own}-3")),
            "the mark {own}-3 of this process counts as dead"
        );
        let mut parts: Vec<&str> = own.split('-').collect();
        parts[2] = "1";
        assert!(
            is_dead(&parts.join("-")),
            "a reused process id counts as running"
        );
        parts[0] = "7";
        assert!(
            !is_dead(&parts.join("-")),
            "a mark of another pid namespace counts as dead"
        );
        assert!(!is_dead("nonsense"));
        let mut child = Command::new("true").spawn().expect("true starts");
        let mark = owner_mark(child.id());
        child.wait().expect("true ends");
        assert!(
            is_dead(&mark),
            "the mark of an exited process counts as running: {mark}"
        );
    }
}

//! A host of the testbed, and commands on it.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

use super::holder::enter;
use super::process::{Proc, run_with_input, wait_until};

/// A network namespace and a mount namespace. A clone refers to the same host.
#[derive(Clone, Debug)]
pub struct Host(Arc<HostInner>);

#[derive(Debug)]
struct HostInner {
    name: String,
    pid: u32,
    user: Option<u32>,
    dir: PathBuf,
    spawned: AtomicU32,
    ports: AtomicU32,
}

impl Host {
    pub(super) fn new(name: &str, pid: u32, user: Option<u32>, dir: &Path) -> Self {
        Self(Arc::new(HostInner {
            name: name.to_owned(),
            pid,
            user,
            dir: dir.to_owned(),
            spawned: AtomicU32::new(0),
            ports: AtomicU32::new(0),
        }))
    }

    /// Returns the host's name within its testbed.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the id of the process that keeps the namespaces open: `nsenter -t PID -n -m` enters
    /// them.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.pid
    }

    /// Returns the testbed's directory, which every host can access.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    /// Reserves `number` consecutive local ports below the kernel's ephemeral range, and returns
    /// the first. The ports of successive calls ascend; after the last one they begin at 1024
    /// again, even if those ports are still in use.
    pub(crate) fn take_ports(&self, number: u64) -> u16 {
        const FIRST: u32 = 1024;
        const LAST: u32 = 32_767;
        let number = u32::try_from(number).unwrap_or(LAST).min(LAST - FIRST);
        let taken = self
            .0
            .ports
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                Some(if FIRST + next + number > LAST {
                    number
                } else {
                    next + number
                })
            })
            .unwrap_or(0);
        let first = if FIRST + taken + number > LAST {
            FIRST
        } else {
            FIRST + taken
        };
        u16::try_from(first).unwrap_or(0)
    }

    /// Returns a command that runs on this host, in the working directory `/`.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        enter(self.0.pid, self.0.user, program)
    }

    /// Runs a shell script until it exits, and returns its output.
    ///
    /// # Errors
    ///
    /// When its exit status is not 0; the error contains all of its output.
    pub fn sh(&self, script: &str) -> Result<String> {
        run_with_input(self.command("sh").args(["-e", "-c", script]), "")
            .with_context(|| format!("on host {}: {script}", self.name()))
    }

    /// Runs a program until it exits, and returns its output.
    ///
    /// # Errors
    ///
    /// When its exit status is not 0; the error contains all of its output.
    pub fn run<A: AsRef<OsStr>>(
        &self,
        program: impl AsRef<OsStr>,
        arguments: &[A],
    ) -> Result<String> {
        let program = program.as_ref();
        run_with_input(self.command(program).args(arguments), "")
            .with_context(|| format!("on host {}: {}", self.name(), program.display()))
    }

    /// Starts a program in the background. If the test fails, the last lines of the program's
    /// output are shown.
    ///
    /// # Errors
    ///
    /// The program cannot be started.
    pub fn spawn<A: AsRef<OsStr>>(
        &self,
        program: impl AsRef<OsStr>,
        arguments: &[A],
    ) -> Result<Proc> {
        let mut command = self.command(program.as_ref());
        command.args(arguments);
        self.spawn_command(&program.as_ref().to_string_lossy(), command)
    }

    /// Starts a command of [`Host::command`] in the background. `name` appears in messages and in
    /// the name of its log.
    ///
    /// # Errors
    ///
    /// The program cannot be started.
    pub fn spawn_command(&self, name: &str, mut command: Command) -> Result<Proc> {
        let short = name.rsplit('/').next().unwrap_or(name);
        let number = self.0.spawned.fetch_add(1, Ordering::Relaxed);
        let log = self
            .0
            .dir
            .join(format!("{}-{number}-{short}.log", self.name()));
        let output =
            File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("on host {}: cannot start {name}", self.name()))?;
        Ok(Proc::new(format!("{}/{short}", self.name()), child, log))
    }

    /// Waits until a program on this host listens on the port; `protocol` is `tcp` or `udp`.
    ///
    /// # Errors
    ///
    /// No program listens within 40 seconds.
    pub fn wait_for_port(&self, protocol: &str, port: u16) -> Result<()> {
        wait_until(
            &format!("host {} to listen on {protocol} port {port}", self.name()),
            Duration::from_secs(10),
            || self.listens(protocol, port),
        )
    }

    /// Whether a program on this host listens on the port, according to `/proc`.
    #[must_use]
    pub fn listens(&self, protocol: &str, port: u16) -> bool {
        // A listening TCP socket is in state 0A, an unconnected UDP socket in 07.
        let state = if protocol == "tcp" { "0A" } else { "07" };
        let wanted = format!(":{port:04X}");
        ["", "6"].iter().any(|family| {
            let table = fs::read_to_string(format!("/proc/{}/net/{protocol}{family}", self.pid()))
                .unwrap_or_default();
            table.lines().any(|line| {
                let mut words = line.split_ascii_whitespace().skip(1);
                let local = words.next().unwrap_or_default();
                local.ends_with(&wanted) && words.nth(1) == Some(state)
            })
        })
    }

    /// Whether a dataplane listens at its default control socket on this host, by path or by
    /// abstract name.
    #[must_use]
    pub fn has_dataplane(&self) -> bool {
        let is_dataplanes = |name: &str| {
            name == "@lvs-dataplane"
                || (name.starts_with("/run/lvs/netns-") && name.ends_with(".sock"))
        };
        fs::read_to_string(format!("/proc/{}/net/unix", self.pid()))
            .unwrap_or_default()
            .lines()
            .any(|line| {
                line.split_ascii_whitespace()
                    .nth(7)
                    .is_some_and(is_dataplanes)
            })
    }

    /// Writes a sysctl; `path` is relative to `/proc/sys/net`.
    ///
    /// # Errors
    /// The kernel refuses the value.
    pub fn sysctl(&self, path: &str, value: &str) -> Result<()> {
        self.sh(&format!("echo {value} > /proc/sys/net/{path}"))
            .map(drop)
    }

    /// Returns a counter such as `Udp` `NoPorts`, as `nstat -az` shows it; 0 if it does not exist.
    ///
    /// # Errors
    /// `/proc/net` cannot be read.
    pub fn counter(&self, group: &str, name: &str) -> Result<u64> {
        for file in ["snmp", "netstat"] {
            let text = fs::read_to_string(format!("/proc/{}/net/{file}", self.pid()))?;
            let lines: Vec<&str> = text.lines().collect();
            for pair in lines.chunks_exact(2) {
                let (names, values) = (pair[0], pair[1]);
                if names.split(':').next() != Some(group) {
                    continue;
                }
                let found = names
                    .split_ascii_whitespace()
                    .zip(values.split_ascii_whitespace())
                    .find(|(n, _)| *n == name);
                if let Some((_, value)) = found {
                    return Ok(value.parse().unwrap_or(0));
                }
            }
        }
        Ok(0)
    }

    /// Installs an executable as `/usr/sbin/NAME` on this host only: a directory with this link,
    /// and with links to the files of `/usr/sbin`, is mounted over `/usr/sbin`.
    ///
    /// # Errors
    ///
    /// A mount fails.
    pub fn install(&self, executable: &Path, names: &[&str]) -> Result<()> {
        let farm = self.0.dir.join(format!("{}-sbin", self.name()));
        let mut script = format!("D={}\n", farm.display());
        script.push_str(
            "mkdir -p $D/orig $D/new\nmount --bind /usr/sbin $D/orig\n\
             for f in $D/orig/* ; do ln -s \"$f\" $D/new/; done\n",
        );
        for name in names {
            writeln!(script, "ln -sf {} $D/new/{name}", executable.display())?;
        }
        script
            .push_str("mount --bind $D/new /usr/sbin\n[ -L /sbin ] || mount --bind $D/new /sbin\n");
        self.sh(&script).map(drop)
    }

    /// Writes `/etc/hosts` for this host only.
    ///
    /// # Errors
    ///
    /// When the mount fails.
    pub fn etc_hosts(&self, entries: &[(IpAddr, &str)]) -> Result<()> {
        let file = self.0.dir.join(format!("{}-hosts", self.name()));
        let mut text = String::from("127.0.0.1 localhost\n");
        for (address, name) in entries {
            writeln!(text, "{address} {name}")?;
        }
        fs::write(&file, text)?;
        self.sh(&format!("mount --bind {} /etc/hosts", file.display()))
            .map(drop)
    }
}

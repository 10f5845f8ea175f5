//! The implementation of [`Host`] outside of tests: socket and process of the dataplane, and the
//! lock against a second daemon.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lvs_api::life::name_and_fields;
use lvs_api::{Address, LockError, SOCKET_VARIABLE, Steering, steer};

use lvs_process::log;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::config::Dataplane;
use crate::dataplane::control;
use crate::dataplane::control::DataplaneControl;
use crate::dataplane::{ConnectError, Given, Host};
use crate::facts::Addresses;
use crate::replace::replace;

/// Environment variable that marks dataplanes that lvsd started.
const MARK: (&str, &str) = ("LVS_STARTED_BY", "lvsd");

/// Suffix, after the socket's name, of the file in which lvsd stores the settings that it has made
/// in the dataplane.
pub const GIVEN: &str = ".lvsd.json";

/// Time limit for a killed process to exit.
const END_LIMIT: Duration = Duration::from_secs(5);

/// This machine, with the dataplane at a socket.
#[derive(Debug)]
pub struct Machine {
    address: Address,
    child: Option<Child>,
}

impl Machine {
    /// Creates the host of the dataplane at `address`.
    pub fn new(address: &Address) -> Self {
        Self {
            address: address.clone(),
            child: None,
        }
    }
}

/// Locks the dataplane at `address` for this daemon until the returned value is dropped.
///
/// # Errors
/// Another daemon has the lock, or the lock file cannot be used; the text is the reason.
pub fn lock(address: &Address) -> Result<Steering, String> {
    // A command such as `lvsd reload` locks the file for a moment to check whether a daemon runs.
    let mut tries = 0..10;
    let steering = loop {
        match steer(address) {
            Err(LockError::Held(_)) if tries.next().is_some() => {
                std::thread::sleep(Duration::from_millis(20));
            }
            done => break done,
        }
    };
    steering.map_err(|error| match error {
        LockError::Held(pid) => {
            let pid = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            format!(
                "another lvsd{pid} manages the dataplane at {address} in this network namespace; \
                 send SIGHUP to that lvsd to reload its file, or stop it first"
            )
        }
        LockError::Io(error) => {
            format!("cannot determine whether another lvsd manages {address}: {error}")
        }
    })
}

impl Host for Machine {
    fn connect(&mut self, patience: Duration) -> Result<Box<dyn DataplaneControl>, ConnectError> {
        let child = self.child.as_ref().map(Child::id);
        control::connect(&self.address, patience).map_err(|error| match error {
            ConnectError::Silent { why, pid } => ConnectError::Silent {
                why,
                pid: pid.or(child),
            },
            other => other,
        })
    }

    fn start(&mut self, options: &Dataplane) -> Result<(), String> {
        let mut command = command(&self.address, options);
        command
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::null())
            // Signals of lvsd's terminal do not reach another process group, so the dataplane
            // continues after lvsd.
            .process_group(0);
        match command.spawn() {
            Ok(child) => {
                let program = command.get_program().display();
                tracing::info!(pid = child.id(), "starting {program}");
                self.child = Some(child);
                Ok(())
            }
            Err(error) => Err(cannot_start(&command, &error)),
        }
    }

    fn ended(&mut self) -> Option<String> {
        let child = self.child.as_mut()?;
        let how = match child.try_wait() {
            Ok(None) => return None,
            Ok(Some(status)) => format!("it ended with {status}"),
            Err(error) => format!("lvsd cannot wait for it: {error}"),
        };
        self.child = None;
        Some(how)
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn end(&mut self, pid: u32) -> Result<(), String> {
        if self.child.as_ref().is_some_and(|child| child.id() == pid) {
            self.kill();
            return Ok(());
        }
        let id = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let process = id
            .ok_or(Errno::SRCH)
            .and_then(|id| pidfd_open(id, PidfdFlags::empty()))
            .map_err(|error| format!("process {pid} cannot be reached: {error}"))?;
        // The check follows the opening: while the pidfd is open, the kernel does not reuse the
        // process id.
        if !self.started_by_us(pid) {
            return Err(format!("process {pid} was not started by lvsd"));
        }
        pidfd_send_signal(&process, Signal::KILL)
            .map_err(|error| format!("process {pid} cannot be killed: {error}"))?;
        let limit = Timespec {
            tv_sec: END_LIMIT.as_secs().cast_signed(),
            tv_nsec: 0,
        };
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)) {
            Ok(1) => Ok(()),
            _ => Err(format!(
                "process {pid} has not exited within {END_LIMIT:?} after SIGKILL: if its state in `ps` is D, it waits for the kernel, whose log may name the cause (`dmesg`)"
            )),
        }
    }

    fn alive(&mut self, pid: u32) -> bool {
        // An exited child remains in /proc until lvsd waits for it.
        if let Some(child) = self.child.as_mut().filter(|c| c.id() == pid) {
            return matches!(child.try_wait(), Ok(None));
        }
        Path::new("/proc").join(pid.to_string()).exists()
    }

    fn started_by_us(&self, pid: u32) -> bool {
        if self.child.as_ref().is_some_and(|c| c.id() == pid) {
            return true;
        }
        let mark = format!("{}={}", MARK.0, MARK.1);
        std::fs::read(format!("/proc/{pid}/environ"))
            .is_ok_and(|all| all.split(|b| *b == 0).any(|one| one == mark.as_bytes()))
    }

    fn identity(&self, pid: u32) -> String {
        // Field 22 of `/proc/PID/stat`; the fields after the name begin with the third.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let birth = name_and_fields(&stat)
            .and_then(|(_, mut fields)| fields.nth(19))
            .unwrap_or("0");
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        format!("{pid} {birth} {}", boot.trim())
    }

    fn remember(&mut self, given: &Given) {
        let Some(path) = self.memory() else { return };
        let text = serde_json::to_vec(given).unwrap_or_default();
        if let Err(error) = replace(&path, &text, 0o666) {
            tracing::warn!(
                "cannot store in {} the settings that lvsd has made in the dataplane: {error}; settings that are removed from the file while no lvsd is running will stay",
                path.display()
            );
        }
    }

    fn recall(&self) -> Given {
        let text = self.memory().and_then(|path| std::fs::read(path).ok());
        text.and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default()
    }

    fn addresses(&self) -> Addresses {
        Addresses::read()
    }
}

impl Machine {
    /// Path of the file, next to the dataplane's socket, in which lvsd stores the settings that it
    /// has made in the dataplane; `None` if the socket has no path.
    fn memory(&self) -> Option<PathBuf> {
        self.address.state_file(GIVEN)
    }
}

/// Command that runs the dataplane with the options of the file.
fn command(address: &Address, options: &Dataplane) -> Command {
    let program = match &options.program {
        Some(path) => PathBuf::from(path),
        None => beside_us("lvs-dataplane").unwrap_or_else(|| PathBuf::from("lvs-dataplane")),
    };
    let mut command = Command::new(program);
    command.args(options.arguments()).env(MARK.0, MARK.1);
    if let Some(format) = log::format() {
        command.env(log::Format::VARIABLE, format.to_string());
    }
    match address {
        Address::Usual(_) => command.env_remove(SOCKET_VARIABLE),
        named => command.arg("--socket").arg(named.to_string()),
    };
    command
}

fn cannot_start(command: &Command, error: &std::io::Error) -> String {
    let program = command.get_program();
    let shown = program.display();
    match error.kind() {
        ErrorKind::NotFound if !Path::new(program).exists() => format!(
            "{shown} does not exist: install it in the directory of lvsd or in PATH, or set `program` in [dataplane]"
        ),
        ErrorKind::NotFound => format!(
            "cannot start {shown}: this host lacks the interpreter or loader that the file names; install the lvs-dataplane that is built for this host"
        ),
        ErrorKind::PermissionDenied => format!(
            "cannot start {shown}: {error}; make it executable (`chmod +x`), on a file system that is not mounted with noexec"
        ),
        _ => format!(
            "cannot start {shown}: {error}; install the lvs-dataplane that is built for this host"
        ),
    }
}

/// Replaces this process by the dataplane, so that a systemd unit can run it. Returns only after a
/// failure, with the reason.
pub fn become_dataplane(address: &Address, options: &Dataplane) -> String {
    let mut command = command(address, options);
    let error = command.exec();
    cannot_start(&command, &error)
}

/// Sends a signal to process `pid`.
///
/// # Errors
/// The signal cannot be sent; the text is the reason.
pub fn send(pid: u32, signal: Signal) -> Result<(), String> {
    signalled(pid, signal).map(drop)
}

/// Sends a signal to process `pid`, and waits until it has exited.
///
/// # Errors
/// The signal cannot be sent, or the process has not exited within `limit`; the text is the reason.
pub fn end_politely(pid: u32, signal: Signal, limit: Duration) -> Result<(), String> {
    let process = signalled(pid, signal)?;
    let limit = Timespec {
        tv_sec: limit.as_secs().cast_signed(),
        tv_nsec: 0,
    };
    match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)) {
        Ok(1) => Ok(()),
        _ => Err(format!(
            "lvsd (pid {pid}) has not exited yet; its log names the cause"
        )),
    }
}

fn signalled(pid: u32, signal: Signal) -> Result<OwnedFd, String> {
    let id = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let process = id
        .ok_or(Errno::SRCH)
        .and_then(|id| pidfd_open(id, PidfdFlags::empty()))
        .map_err(|error| format!("process {pid} cannot be reached: {error}"))?;
    pidfd_send_signal(&process, signal)
        .map_err(|error| format!("process {pid} cannot be signalled: {error}"))?;
    Ok(process)
}

/// Path of another program of this project, next to this executable; `None` if it is not there.
pub(crate) fn beside_us(program: &str) -> Option<PathBuf> {
    let here = std::env::current_exe().ok()?;
    let there = here.parent()?.join(program);
    there.is_file().then_some(there)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_lock_of_a_dataplane_socket_is_refused_until_first_lock_ends() {
        let name = Address::new(format!("@lvsd-test-{}", std::process::id()));
        let first = lock(&name).unwrap();
        let second = lock(&name).unwrap_err();
        assert!(
            second.contains("another lvsd"),
            "no `another lvsd` in {second}"
        );
        drop(first);
        lock(&name).unwrap();
    }

    #[test]
    fn dataplane_program_that_cannot_start_is_reported_with_path_cause_or_fix() {
        let there = std::env::current_exe().unwrap();
        let there = there.as_path();
        let missing = Path::new("/nonexistent/lvs-dataplane");
        for (program, kind, expected) in [
            (missing, ErrorKind::NotFound, "/nonexistent/"),
            (there, ErrorKind::NotFound, "lacks the interpreter"),
            (there, ErrorKind::PermissionDenied, "chmod +x"),
            (there, ErrorKind::Other, "built for this host"),
        ] {
            let text = cannot_start(&Command::new(program), &kind.into());
            assert!(text.contains(expected), "no {expected:?} in {text}");
        }
    }
}

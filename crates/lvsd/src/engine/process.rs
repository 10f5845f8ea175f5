//! The real host: the engine's socket, its process, and the lock that keeps a second daemon away.

use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lvs_dataplane::control::{Address, LockError, SOCKET_VARIABLE, Steering, steer};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::config::Dataplane;
use crate::engine::control::EngineControl;
use crate::engine::socket;
use crate::engine::{ConnectError, Host};
use crate::host_addresses::Addresses;

/// Tells an engine of ours from others: it stands in the environment of those that a daemon has
/// started.
const MARK: (&str, &str) = ("LVS_STARTED_BY", "lvsd");

/// How long a process that was killed may take to be gone.
const END_LIMIT: Duration = Duration::from_secs(5);

/// This machine, with the engine at a socket.
#[derive(Debug)]
pub struct Machine {
    address: Address,
    child: Option<Child>,
}

impl Machine {
    /// With the engine at `address`.
    pub fn new(address: &Address) -> Self {
        Self {
            address: address.clone(),
            child: None,
        }
    }
}

/// Makes this daemon the only one for the engine at `address` in this network namespace, until what
/// it gives is dropped.
///
/// # Errors
/// There is another one, in words.
pub fn lock(address: &Address) -> Result<Steering, String> {
    steer(address).map_err(|error| match error {
        LockError::Held(pid) => {
            let pid = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            format!(
                "another lvsd{pid} steers the engine at {address} in this network namespace; \
                 send that one a SIGHUP to reload, or stop it first"
            )
        }
        LockError::Io(error) => {
            format!("cannot be sure to be the only lvsd for {address}: {error}")
        }
    })
}

impl Host for Machine {
    fn connect(&mut self, patience: Duration) -> Result<Box<dyn EngineControl>, ConnectError> {
        let child = self.child.as_ref().map(Child::id);
        socket::connect(&self.address, patience).map_err(|error| match error {
            ConnectError::Silent { why, pid } => ConnectError::Silent {
                why,
                pid: pid.or(child),
            },
            other => other,
        })
    }

    fn start(&mut self, options: &Dataplane) -> Result<(), String> {
        let program = match &options.program {
            Some(path) => PathBuf::from(path),
            None => beside_us().unwrap_or_else(|| PathBuf::from("lvs-dataplane")),
        };
        let mut command = Command::new(&program);
        command
            .args(options.arguments())
            .env(MARK.0, MARK.1)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::null())
            // Its own process group: what a terminal sends to us does not reach it, and it outlives
            // us.
            .process_group(0);
        match &self.address {
            Address::Usual(_) => command.env_remove(SOCKET_VARIABLE),
            named => command.arg("--socket").arg(named.to_string()),
        };
        match command.spawn() {
            Ok(child) => {
                tracing::info!(pid = child.id(), "starting {}", program.display());
                self.child = Some(child);
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Err(format!(
                "there is no {}: put it beside lvsd or into PATH, or name it with `program` in [dataplane]",
                program.display()
            )),
            Err(error) => Err(format!("cannot start {}: {error}", program.display())),
        }
    }

    fn ended(&mut self) -> Option<String> {
        let child = self.child.as_mut()?;
        let how = match child.try_wait() {
            Ok(None) => return None,
            Ok(Some(status)) => format!("it ended with {status}"),
            Err(error) => format!("it cannot be waited for: {error}"),
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
        // Only now: while the descriptor is open, the id is this process's or nobody's.
        if !self.started_by_us(pid) {
            return Err(format!("process {pid} is none that an lvsd has started"));
        }
        pidfd_send_signal(&process, Signal::KILL)
            .map_err(|error| format!("process {pid} cannot be ended: {error}"))?;
        let limit = Timespec {
            tv_sec: END_LIMIT.as_secs().cast_signed(),
            tv_nsec: 0,
        };
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)) {
            Ok(1) => Ok(()),
            _ => Err(format!("process {pid} does not end (state D in `ps`?)")),
        }
    }

    fn alive(&mut self, pid: u32) -> bool {
        // A child that has ended stays in /proc until it is waited for.
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

    fn addresses(&self) -> Addresses {
        Addresses::read()
    }
}

/// The engine beside our own executable.
fn beside_us() -> Option<PathBuf> {
    let here = std::env::current_exe().ok()?;
    let there = here.parent().map(Path::to_owned)?.join("lvs-dataplane");
    there.is_file().then_some(there)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_lock_a_socket() {
        let name = Address::new(format!("@lvsd-test-{}", std::process::id()));
        let first = lock(&name).unwrap();
        let second = lock(&name).unwrap_err();
        assert!(second.contains("another lvsd"), "{second}");
        drop(first);
        lock(&name).unwrap();
    }
}

//! The real host: the engine's socket, its process, and the lock that keeps a second daemon away.

use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use lvs_core::api::DEFAULT_SOCKET;

use crate::config::Dataplane;
use crate::engine::control::EngineControl;
use crate::engine::socket;
use crate::engine::{ConnectError, Host};
use crate::host_addresses::Addresses;

/// Tells an engine of ours from others: it stands in the environment of those that a daemon has
/// started.
const MARK: (&str, &str) = ("LVS_STARTED_BY", "lvsd");

/// This machine, with the engine at a socket.
#[derive(Debug)]
pub struct Machine {
    socket: String,
    child: Option<Child>,
}

impl Machine {
    /// With the engine at `socket`: `@name` or a path.
    pub fn new(socket: &str) -> Self {
        Self {
            socket: socket.to_owned(),
            child: None,
        }
    }
}

/// The socket that is used when nothing else is said.
pub fn default_socket() -> String {
    format!("@{DEFAULT_SOCKET}")
}

/// Held while this daemon is the one that steers an engine.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "its life is what matters")] UnixListener);

/// Makes this daemon the only one for the engine at `socket`. The lock is an abstract socket, so
/// each network namespace has its own, and it is gone with the process however that ends.
///
/// # Errors
/// There is another one, in words.
pub fn lock(socket: &str) -> Result<Lock, String> {
    let name = if socket == default_socket() {
        "lvsd".to_owned()
    } else {
        format!("lvsd:{socket}")
    };
    let bound = SocketAddr::from_abstract_name(name.as_bytes())
        .and_then(|address| UnixListener::bind_addr(&address));
    match bound {
        Ok(listener) => Ok(Lock(listener)),
        Err(error) if error.kind() == ErrorKind::AddrInUse => Err(format!(
            "another lvsd steers the engine at {socket} in this network namespace (it holds the socket @{name}; `ss -xlp | grep @{name}` shows it); \
             send that one a SIGHUP to reload, or stop it first"
        )),
        Err(error) => Err(format!("cannot take the lock @{name}: {error}")),
    }
}

impl Host for Machine {
    fn connect(&mut self) -> Result<Box<dyn EngineControl>, ConnectError> {
        socket::connect(&self.socket)
    }

    fn start(&mut self, options: &Dataplane) -> Result<(), String> {
        let program = match &options.program {
            Some(path) => PathBuf::from(path),
            None => beside_us().unwrap_or_else(|| PathBuf::from("lvs-dataplane")),
        };
        let mut command = Command::new(&program);
        command
            .args(options.arguments())
            .arg("--socket")
            .arg(&self.socket)
            .env(MARK.0, MARK.1)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::null())
            // Its own process group: what a terminal sends to us does not reach it, and it outlives
            // us.
            .process_group(0);
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
        let name = format!("@lvsd-test-{}", std::process::id());
        let first = lock(&name).unwrap();
        let second = lock(&name).unwrap_err();
        assert!(second.contains("another lvsd"), "{second}");
        drop(first);
        lock(&name).unwrap();
    }
}

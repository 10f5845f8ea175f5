//! The synchronisation daemons of IPVS: they send connections to other directors, and receive
//! connections from them, as UDP datagrams of a multicast group on one interface.
//! [`lvs_core::sync`] decides which connections are sent and when, and how received ones are used;
//! this module has the sockets and threads.
//!
//! ```text
//! lvs-worker-N ─ full messages ─▶ Outbox, bounded ─▶ lvs-sync-master ─▶ sockets to port, port + 1 ...
//! sockets at port, port + 1 ... ─▶ lvs-sync-backup ─ portions, few at a time ─▶ mailbox of lvs-worker-N
//! ```
//!
//! A packet worker never waits: if the outbox is full, a message is dropped and counted. The backup
//! passes on a portion when the workers have handled an earlier one; until then, datagrams wait in
//! the sockets' buffers.

mod backup;
mod counts;
mod master;
mod outbox;
mod sockets;

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lvs_core::api::{Failure, FailureCode};
use lvs_core::sync::wire::Entry;
use lvs_core::sync::{Message, SyncDaemon, SyncRole};
use tracing::info;

pub(crate) use self::backup::Ticket;
pub(crate) use self::counts::Counts;
pub(crate) use self::outbox::Outbox;
use self::sockets::Sockets;
use lvs_sys::EventFd;
use lvs_sys::lock;

/// The functions of the dataplane that the daemons' threads call.
pub(crate) trait Director: Send + Sync {
    /// Returns the due messages of the control half.
    fn messages(&self) -> Vec<Message>;

    /// Passes connections to the packet workers that own them. The workers drop `ticket` when they
    /// have taken the connections over.
    fn take_over(&self, entries: Vec<Entry>, ticket: Ticket);
}

#[derive(Debug)]
pub(crate) struct Daemons {
    running: Mutex<Vec<Running>>,
    director: OnceLock<Weak<dyn Director>>,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) counts: Arc<Counts>,
}

#[derive(Debug)]
struct Running {
    daemon: SyncDaemon,
    stop: Arc<Stop>,
    thread: JoinHandle<()>,
}

/// Stops a daemon's thread: a flag, and the descriptor that wakes the thread.
#[derive(Debug)]
struct Stop {
    asked: AtomicBool,
    wake: EventFd,
}

impl Stop {
    fn ask(&self) {
        self.asked.store(true, Ordering::Release);
        self.wake.notify();
    }

    fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }
}

/// A daemon with open sockets, whose thread waits for the start. If this value is dropped, the
/// thread ends without sending a message.
#[derive(Debug)]
pub(crate) struct Prepared {
    running: Running,
    go: Sender<()>,
}

impl Daemons {
    /// Creates the set of synchronisation daemons, none of which is running.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            running: Mutex::default(),
            director: OnceLock::new(),
            outbox: Arc::new(Outbox::new()?),
            counts: Arc::default(),
        })
    }

    /// Sets the dataplane that the daemons serve.
    pub(crate) fn serve(&self, director: Weak<dyn Director>) {
        let _ = self.director.set(director);
    }

    /// Opens the sockets of a daemon, and creates its thread, which waits. `ports` is the value of
    /// `sync_ports` at the start of the first daemon, and `sock_size` that of `sync_sock_size`.
    ///
    /// # Errors
    /// IPVS would refuse to start the daemon, no descriptor or thread is available, or the
    /// dataplane is not running.
    pub(crate) fn prepare(
        &self,
        daemon: &SyncDaemon,
        ports: u16,
        sock_size: i32,
    ) -> Result<Prepared, Failure> {
        let director = self.director.get().and_then(Weak::upgrade);
        let director = director.ok_or_else(|| {
            Failure::new(
                FailureCode::Internal,
                "the dataplane is not running yet, or is stopping",
            )
        })?;
        let sockets = Sockets::open(daemon, ports, sock_size)?;
        let failed = |what: &str, error: io::Error| {
            let role = role(daemon.role);
            let text =
                format!("cannot start the synchronisation {role}: no {what} is available: {error}");
            Failure::new(FailureCode::Internal, text)
        };
        let wake = EventFd::new().map_err(|error| failed("descriptor", error))?;
        let stop = Arc::new(Stop {
            asked: AtomicBool::new(false),
            wake,
        });
        let (go, gone) = channel();
        let (outbox, counts) = (self.outbox.clone(), self.counts.clone());
        let (asked, started) = (stop.clone(), daemon.clone());
        let run = move || {
            if gone.recv().is_err() {
                return;
            }
            info!(
                interface = started.interface,
                syncid = started.syncid,
                ports,
                "the synchronisation {} runs",
                role(started.role)
            );
            match started.role {
                SyncRole::Master => master::run(sockets, &*director, &outbox, &counts, &asked),
                SyncRole::Backup => backup::run(sockets, &*director, &counts, &asked),
            }
            info!("the synchronisation {} has stopped", role(started.role));
        };
        let thread = thread::Builder::new()
            .name(format!("lvs-sync-{}", role(daemon.role)))
            .spawn(run)
            .map_err(|error| failed("thread", error))?;
        Ok(Prepared {
            running: Running {
                daemon: daemon.clone(),
                stop,
                thread,
            },
            go,
        })
    }

    /// Starts the prepared daemons that are in `wanted`, in place of running daemons with the same
    /// role. If several of one role are prepared, the last one is started. Stops the running
    /// daemons that are not in `wanted`. Returns after the threads of stopped daemons have exited.
    pub(crate) fn follow(&self, wanted: &[SyncDaemon], prepared: Vec<Prepared>) {
        let mut running = lock(&self.running);
        // A daemon that is stopped and started again may have other ports and buffers.
        let anew = |role| {
            let mut new = prepared.iter().map(|prepared| &prepared.running.daemon);
            new.any(|daemon| daemon.role == role)
        };
        let (keep, stop): (Vec<_>, Vec<_>) = running
            .drain(..)
            .partition(|running| wanted.contains(&running.daemon) && !anew(running.daemon.role));
        *running = keep;
        end(stop);
        // The last start of a role counts.
        for Prepared { running: new, go } in prepared.into_iter().rev() {
            let runs = |running: &Running| running.daemon.role == new.daemon.role;
            if wanted.contains(&new.daemon) && !running.iter().any(runs) && go.send(()).is_ok() {
                running.push(new);
            }
        }
    }

    pub(crate) fn end(&self) {
        let all = std::mem::take(&mut *lock(&self.running));
        end(all);
    }
}

fn end(all: Vec<Running>) {
    for running in &all {
        running.stop.ask();
    }
    for running in all {
        if running.thread.join().is_err() {
            tracing::error!(
                "the thread lvs-sync-{} has panicked",
                role(running.daemon.role)
            );
        }
    }
}

const fn role(role: SyncRole) -> &'static str {
    match role {
        SyncRole::Master => "master",
        SyncRole::Backup => "backup",
    }
}

fn group(daemon: &SyncDaemon) -> IpAddr {
    daemon.group.unwrap_or_else(|| lvs_core::sync::GROUP.into())
}

/// A connection from the client port `port`, for tests.
#[cfg(test)]
pub(crate) fn entry(port: u16) -> Entry {
    Entry {
        protocol: lvs_core::Protocol::TCP,
        client: ([192, 0, 2, 1], port).into(),
        virt: ([198, 51, 100, 1], 80).into(),
        server: ([10, 0, 0, 1], 80).into(),
        flags: 0,
        state: 1,
        mark: 0,
        timeout: 60,
        sequences: None,
        engine: None,
        data: None,
    }
}

fn add_stop(poller: &mut lvs_sys::Poller, stop: &Stop) {
    poller.add(stop.wake.as_fd());
}

/// Whether waiting for a daemon's descriptors has succeeded. If it fails, sleeps for 100 ms, so
/// that the daemon keeps running and tries its sockets; logs this unless the previous wait has
/// `failed`, too.
fn has_waited(wait: io::Result<usize>, failed: &mut bool, of: SyncRole) -> bool {
    let Err(error) = wait else {
        *failed = false;
        return true;
    };
    if !std::mem::replace(failed, true) {
        tracing::error!(
            "the synchronisation {} cannot wait for its sockets, and tries them ten times a second: {error}",
            role(of)
        );
    }
    thread::sleep(Duration::from_millis(100));
    false
}

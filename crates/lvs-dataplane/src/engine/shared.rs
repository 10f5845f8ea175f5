//! What the threads of an engine share: the director's control half, a clock, and a way to the packet worker.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant as SystemInstant};

use lvs_core::api::{Failure, Info, ReasonCount};
use lvs_core::mark::MarkRule;
use lvs_core::{Connection, Control, Instant};

use crate::sys::EventFd;

/// What the packet worker does for other threads, between two batches.
#[derive(Debug)]
pub(super) enum Command {
    /// Services or servers have changed: bring the shard, the shield and the neighbours up to date.
    Follow(mpsc::SyncSender<Result<(), Failure>>),
    /// Own these virtual addresses, and no others.
    OwnVips(Vec<IpAddr>, mpsc::SyncSender<Result<(), Failure>>),
    /// Copy out some connections.
    Connections {
        /// The first slot.
        start: usize,
        /// At most so many.
        max: usize,
        /// Where to.
        reply: mpsc::SyncSender<Vec<Connection>>,
    },
    /// Whether an address is the broadcast address of one of this host's networks.
    IsBroadcast(IpAddr, mpsc::SyncSender<bool>),
    /// Packets that each rule for marks has taken.
    Marked(mpsc::SyncSender<Vec<u64>>),
    /// State of the worker.
    Info(mpsc::SyncSender<Info>),
    /// Counted reasons.
    Reasons(mpsc::SyncSender<Vec<ReasonCount>>),
}

/// Shared by the control server's threads and the packet worker.
#[derive(Debug)]
pub struct Shared {
    control: Mutex<Control>,
    marks: Mutex<Arc<[MarkRule]>>,
    started: SystemInstant,
    commands: Mutex<mpsc::Sender<Command>>,
    wake: EventFd,
    stop: AtomicBool,
}

impl Shared {
    pub(super) fn new(control: Control, wake: EventFd) -> (Self, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel();
        let shared = Self {
            control: Mutex::new(control),
            marks: Mutex::new(Arc::from([])),
            started: SystemInstant::now(),
            commands: Mutex::new(commands),
            wake,
            stop: AtomicBool::new(false),
        };
        (shared, receiver)
    }

    /// The director's control half. The lock is held for one operation at a time, never while waiting for anything.
    pub(super) fn control(&self) -> MutexGuard<'_, Control> {
        // A panic aborts the released engine; in a test that catches one, the data are still whole.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rules that give packets marks.
    pub(super) fn marks(&self) -> MutexGuard<'_, Arc<[MarkRule]>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since the engine started, as the core counts it.
    pub(super) fn now(&self) -> Instant {
        Instant::ZERO + self.started.elapsed()
    }

    pub(super) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn send(&self, command: Command) {
        // A worker that is gone drops the command, and the asker's channel tells it so.
        let commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = commands.send(command);
        self.wake.notify();
    }

    /// Asks the worker to end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake.notify();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(super) const fn wake(&self) -> &EventFd {
        &self.wake
    }
}

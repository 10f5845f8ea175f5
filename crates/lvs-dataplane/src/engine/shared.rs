//! What the threads of an engine share: the director's control half, a clock, and a way to the packet worker.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant as SystemInstant};

use lvs_core::api::{
    Call, CaptureFilter, CapturedPacket, Done, Info, LocalInfo, ReasonCount, Refused,
};
use lvs_core::mark::MarkRule;
use lvs_core::{Connection, Control, Explanation, Instant, Tuple};

use super::bench::{Test, Tested};

use crate::sys::EventFd;

/// What the packet worker does for other threads, between two batches.
#[derive(Debug)]
pub(super) enum Command {
    /// Make these changes, or none, and follow them.
    Apply(Vec<Call>, mpsc::SyncSender<Result<Done, Refused>>),
    /// The addresses that stand for clients.
    LocalInfo(mpsc::SyncSender<LocalInfo>),
    /// Copy out the connections in some slots, and tell how many slots there are.
    Connections(Range<usize>, mpsc::SyncSender<(Vec<Connection>, usize)>),
    /// Packets that each rule for marks has taken.
    Marked(mpsc::SyncSender<Vec<u64>>),
    /// What only an engine for tests does.
    Test(Test, mpsc::SyncSender<Tested>),
    /// What would become of a packet.
    Explain(Question, mpsc::SyncSender<Explanation>),
    /// Show packets until the receiver is gone.
    Capture(CaptureFilter, mpsc::SyncSender<CapturedPacket>),
    /// State of the worker.
    Info(mpsc::SyncSender<Info>),
    /// Counted reasons.
    Reasons(mpsc::SyncSender<Vec<ReasonCount>>),
}

/// A packet that is asked about.
#[derive(Clone, Debug)]
pub(super) struct Question {
    pub(super) tuple: Tuple,
    /// Its mark; the rules decide without it.
    pub(super) mark: Option<u32>,
    /// Where it comes in.
    pub(super) interface: Option<String>,
}

/// Shared by the control server's threads and the packet worker.
#[derive(Debug)]
pub struct Shared {
    control: Mutex<Control>,
    started: SystemInstant,
    /// The time in nanoseconds, where only a caller moves it.
    virtual_time: Option<AtomicU64>,
    /// Interfaces of the described network that take frames, by port.
    bench_ports: Mutex<Vec<String>>,
    commands: Mutex<mpsc::Sender<Command>>,
    wake: EventFd,
    stop: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        control: Control,
        wake: EventFd,
        virtual_time: bool,
    ) -> (Self, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel();
        let shared = Self {
            control: Mutex::new(control),
            started: SystemInstant::now(),
            virtual_time: virtual_time.then(AtomicU64::default),
            bench_ports: Mutex::default(),
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
    pub(super) fn marks(&self) -> Arc<[MarkRule]> {
        self.control().marks().clone()
    }

    /// Time since the engine started, as the core counts it.
    pub(super) fn now(&self) -> Instant {
        match &self.virtual_time {
            Some(nanos) => Instant::ZERO + Duration::from_nanos(nanos.load(Ordering::Acquire)),
            None => Instant::ZERO + self.started.elapsed(),
        }
    }

    pub(super) const fn has_virtual_time(&self) -> bool {
        self.virtual_time.is_some()
    }

    /// Moves the virtual clock.
    pub(super) fn set_now(&self, now: Instant) {
        if let Some(nanos) = &self.virtual_time {
            nanos.store(now.as_nanos(), Ordering::Release);
        }
    }

    pub(super) fn bench_ports(&self) -> MutexGuard<'_, Vec<String>> {
        self.bench_ports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
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

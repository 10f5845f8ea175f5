//! The state that all threads of a dataplane share: the director's control half and its lock, the
//! clock, the stop flag, the latest snapshot and the kernel fast path.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant as SystemInstant};

use lvs_core::api::FastPathInfo;
use lvs_core::{Control, Instant};

use crate::fast_path::FastPath;
use crate::host::view::{Published, View};
use lvs_sys::lock;

/// Number of times that a thread yields to waiting packet workers before it locks the control half
/// itself.
const PATIENCE: usize = 1000;

/// The kernel fast path, or why the dataplane does not use it.
pub(super) type KernelPath = Result<Arc<FastPath>, FastPathInfo>;

#[derive(Debug)]
pub(super) struct Context {
    control: Mutex<Control>,
    /// Number of packet workers that wait for the lock of the control half.
    wanted: AtomicUsize,
    /// Locked during a change of the configuration, so that the host is configured in the order of
    /// the changes.
    changing: Mutex<()>,
    started: SystemInstant,
    stop: AtomicBool,
    published: Published,
    /// [`View::ways`] of the latest snapshot.
    ways: AtomicU64,
    kernel: KernelPath,
}

impl Context {
    pub(super) fn new(control: Control, kernel: KernelPath) -> Self {
        Self {
            control: Mutex::new(control),
            wanted: AtomicUsize::new(0),
            changing: Mutex::default(),
            started: SystemInstant::now(),
            stop: AtomicBool::new(false),
            published: Published::default(),
            ways: AtomicU64::new(0),
            kernel,
        }
    }

    /// Creates the context of a dataplane without the kernel fast path.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn without_kernel(control: Control) -> Arc<Self> {
        Arc::new(Self::new(control, Err(FastPathInfo::default())))
    }

    /// Locks the control half, for one short operation and never during a wait. While packet
    /// workers wait for the lock, this thread yields to them, up to [`PATIENCE`] times.
    pub(super) fn control(&self) -> MutexGuard<'_, Control> {
        let mut patience = PATIENCE;
        while patience > 0 && self.wanted.load(Ordering::Acquire) > 0 {
            patience -= 1;
            thread::yield_now();
        }
        lock(&self.control)
    }

    /// Locks the control half for a packet worker. Threads in [`control`](Self::control) yield to
    /// it.
    pub(super) fn control_for_packet(&self) -> MutexGuard<'_, Control> {
        match self.control.try_lock() {
            Ok(control) => control,
            Err(_) => {
                self.wanted.fetch_add(1, Ordering::AcqRel);
                let control = lock(&self.control);
                self.wanted.fetch_sub(1, Ordering::AcqRel);
                control
            }
        }
    }

    /// Blocks other changes of the configuration until the guard is dropped.
    pub(super) fn changing(&self) -> MutexGuard<'_, ()> {
        lock(&self.changing)
    }

    /// Time since the dataplane started.
    pub(super) fn now(&self) -> Instant {
        Instant::ZERO + self.started.elapsed()
    }

    pub(super) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Sets the stop flag, but wakes no thread.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Publishes a snapshot, but wakes no thread. If its [`View::ways`] has changed, begins a new
    /// epoch of the kernel fast path.
    pub(super) fn publish(&self, view: Arc<View>) {
        let ways = view.ways;
        self.published.publish(view);
        if let Some(fast_path) = self.fast_path()
            && self.ways.swap(ways, Ordering::AcqRel) != ways
        {
            fast_path.changed();
        }
    }

    /// The number of the latest snapshot.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.published.generation()
    }

    pub(super) fn view(&self) -> Arc<View> {
        self.published.latest()
    }

    pub(super) fn fast_path(&self) -> Option<&Arc<FastPath>> {
        self.kernel.as_ref().ok()
    }

    /// The state of the kernel fast path, for `info` on the control socket.
    pub(super) fn fast_path_info(&self) -> FastPathInfo {
        match &self.kernel {
            Ok(fast_path) => fast_path.info(),
            Err(why_not) => why_not.clone(),
        }
    }

    /// Adds the counters of the kernel fast path to those of the control half.
    pub(super) fn fold(&self) {
        if let Some(fast_path) = self.fast_path() {
            fast_path.fold(|| self.control());
        }
    }
}

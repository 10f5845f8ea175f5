//! Epochs of the kernel fast path: a change of the configuration begins a new epoch, and the kernel
//! fast path ignores the connections that were offloaded in an earlier one.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::FastPath;
use super::layout::conf;
use lvs_sys::lock;

#[derive(Debug)]
pub(super) struct Epochs {
    pub(super) number: u16,
    /// Number of [`Held`] values. While it is not 0, the kernel fast path is suspended.
    pub(super) held: u32,
    /// Whether all epoch numbers are used. The numbers start again when all connections are evicted
    /// from the kernel fast path.
    pub(super) used_up: bool,
    /// For each worker, whether it has evicted its connections since the numbers were used up.
    withdrawn: Vec<bool>,
}

impl Epochs {
    /// Begins the first epoch, for this number of workers.
    pub(super) fn new(workers: NonZeroUsize) -> Self {
        Self {
            number: 1,
            held: 0,
            used_up: false,
            withdrawn: vec![false; workers.get()],
        }
    }
}

impl FastPath {
    /// Returns the present epoch; 0 while the kernel fast path is suspended or all epoch numbers
    /// are used. A worker that offloads a connection reads the epoch before the configuration, so
    /// that a change in between invalidates the offload.
    #[inline]
    pub fn epoch(&self) -> u16 {
        u16::try_from(self.arrays.conf.words()[conf::EPOCH].load(Acquire)).unwrap_or(0)
    }

    fn begin(&self, epochs: &mut Epochs) {
        match epochs.number.checked_add(1) {
            Some(next) => epochs.number = next,
            None => epochs.used_up = true,
        }
        self.enforce(epochs);
    }

    fn enforce(&self, epochs: &Epochs) {
        if epochs.held == 0 && self.taking_over.load(Relaxed) {
            return;
        }
        let none = epochs.held > 0 || epochs.used_up;
        let number = if none { 0 } else { epochs.number };
        self.set(conf::NUMBER, epochs.number.into());
        self.set(conf::EPOCH, number.into());
    }

    /// Begins a new epoch after a change, so that all earlier offloads become invalid.
    pub fn changed(&self) {
        self.begin(&mut lock(&self.epochs));
    }

    /// Suspends the kernel fast path until the returned value and all others are dropped.
    #[must_use]
    pub fn hold(self: &Arc<Self>) -> Held {
        let mut epochs = lock(&self.epochs);
        epochs.held += 1;
        self.enforce(&epochs);
        Held(self.clone())
    }

    /// Whether a worker must evict all its connections from the kernel fast path before another
    /// epoch can begin. The worker reports this by [`has_withdrawn`](Self::has_withdrawn).
    pub(crate) fn must_withdraw(&self, worker: usize) -> bool {
        let epochs = lock(&self.epochs);
        epochs.used_up && !epochs.withdrawn[worker]
    }

    /// Records that a worker has evicted all its connections from the kernel fast path. After the
    /// last worker, the epoch numbers start again at 1.
    pub(crate) fn has_withdrawn(&self, worker: usize) {
        let mut epochs = lock(&self.epochs);
        epochs.withdrawn[worker] = true;
        if epochs.withdrawn.contains(&false) {
            return;
        }
        epochs.withdrawn.fill(false);
        epochs.used_up = false;
        epochs.number = 1;
        self.enforce(&epochs);
    }
}

/// While this value exists, the kernel fast path is suspended.
#[derive(Debug)]
pub struct Held(Arc<FastPath>);

impl Drop for Held {
    fn drop(&mut self) {
        let mut epochs = lock(&self.0.epochs);
        epochs.held -= 1;
        self.0.begin(&mut epochs);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{open, open_for};

    #[test]
    fn fast_path_epoch_differs_after_each_change_and_is_0_while_fast_path_is_suspended() {
        let fast_path = open();
        let first = fast_path.epoch();
        assert_ne!(first, 0);
        fast_path.changed();
        let second = fast_path.epoch();
        assert!(second != 0 && second != first);
        let (one, other) = (fast_path.hold(), fast_path.hold());
        assert_eq!(fast_path.epoch(), 0);
        fast_path.changed();
        drop(one);
        assert_eq!(fast_path.epoch(), 0);
        drop(other);
        assert!(![0, first, second].contains(&fast_path.epoch()));
    }

    #[test]
    fn epoch_numbers_are_reused_after_all_workers_evict_connections() {
        let fast_path = open_for(2);
        for _ in 0..u16::MAX - 1 {
            fast_path.changed();
        }
        assert!(fast_path.epoch() == u16::MAX && !fast_path.must_withdraw(0));
        fast_path.changed();
        assert!(fast_path.epoch() == 0);
        for worker in [1, 0] {
            assert!(fast_path.epoch() == 0 && fast_path.must_withdraw(worker));
            fast_path.has_withdrawn(worker);
            assert!(!fast_path.must_withdraw(worker));
        }
        assert_eq!(fast_path.epoch(), 1);
    }
}

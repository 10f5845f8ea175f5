//! Which connections are in force: what was published before a change is not, after it.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::InKernel;
use super::layout::conf;
use crate::lock::lock;

/// Which connections are in force.
#[derive(Debug)]
pub(super) struct Epochs {
    pub(super) number: u16,
    /// Those who make changes.
    pub(super) held: u32,
    /// All numbers are used up: whatever was published in one of them is to be withdrawn first.
    pub(super) used_up: bool,
}

impl InKernel {
    /// The epoch that is in force; 0 for none. Whoever publishes asks before he looks at what he
    /// publishes by.
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

    /// Something has changed: what was published before is not in force any more.
    pub fn changed(&self) {
        self.begin(&mut lock(&self.epochs));
    }

    /// Nothing is in force until what this gives is dropped.
    #[must_use]
    pub fn hold(self: &Arc<Self>) -> Held {
        let mut epochs = lock(&self.epochs);
        epochs.held += 1;
        self.enforce(&epochs);
        Held(self.clone())
    }

    /// Whether everything has to be withdrawn before another epoch can begin
    /// ([`renew`](Self::renew)).
    pub(crate) fn is_used_up(&self) -> bool {
        lock(&self.epochs).used_up
    }

    /// Everything is withdrawn: begins with the first epoch again.
    pub(crate) fn renew(&self) {
        let mut epochs = lock(&self.epochs);
        epochs.used_up = false;
        epochs.number = 1;
        self.enforce(&epochs);
    }
}

/// As long as this is there, nothing that was published is in force.
#[derive(Debug)]
pub struct Held(Arc<InKernel>);

impl Drop for Held {
    fn drop(&mut self) {
        let mut epochs = lock(&self.0.epochs);
        epochs.held -= 1;
        self.0.begin(&mut epochs);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::open;

    #[test]
    fn what_was_published_before_a_change_is_not_in_force_after_it() {
        let Some(in_kernel) = open() else { return };
        let first = in_kernel.epoch();
        assert_ne!(first, 0);
        in_kernel.changed();
        let second = in_kernel.epoch();
        assert!(second != 0 && second != first);
        let (one, other) = (in_kernel.hold(), in_kernel.hold());
        assert_eq!(in_kernel.epoch(), 0);
        in_kernel.changed();
        drop(one);
        assert_eq!(in_kernel.epoch(), 0);
        drop(other);
        assert!(![0, first, second].contains(&in_kernel.epoch()));
    }

    #[test]
    fn no_epoch_comes_again_before_everything_is_withdrawn() {
        let Some(in_kernel) = open() else { return };
        for _ in 0..u16::MAX - 1 {
            in_kernel.changed();
        }
        assert!(in_kernel.epoch() == u16::MAX && !in_kernel.is_used_up());
        in_kernel.changed();
        assert!(in_kernel.epoch() == 0 && in_kernel.is_used_up());
        in_kernel.renew();
        assert!(in_kernel.epoch() == 1 && !in_kernel.is_used_up());
    }
}

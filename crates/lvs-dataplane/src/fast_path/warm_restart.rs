//! Warm restart of the kernel fast path: offloaded connections continue for a while after the
//! dataplane is killed. A successor takes them over with their counters, the services and the
//! settings.

use std::fs;
use std::io;
use std::ops::{Deref, Range};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use lvs_core::{Control, Instant};
use tracing::debug;

use super::FastPath;
use super::layout::{COUNT_WORDS, SERVERS, conf};
use crate::warm_restart::{Area, KEPT_WORDS, Record, text_words};
use lvs_sys::SharedArray;
use lvs_sys::lock;

/// Longest time for which a program still uses data of an earlier epoch.
const SETTLED: Duration = Duration::from_millis(2);

impl FastPath {
    /// Whether this dataplane continues with the maps of a predecessor.
    pub(crate) const fn is_successor(&self) -> bool {
        self.found
    }

    /// Returns by how much the clock of the deadlines is ahead of a clock that shows `now`.
    pub(crate) fn clock_ahead(&self, now: Instant) -> Duration {
        let base = self.arrays.conf.words()[conf::BASE].load(Relaxed);
        let then = lvs_sys::monotonic().wrapping_sub(base);
        Duration::from_nanos(then.saturating_sub(now.as_nanos()))
    }

    /// Waits until the programs no longer use data of an earlier epoch.
    pub(crate) fn settle(&self) {
        std::thread::sleep(SETTLED);
    }

    /// Ends a take-over, after the shield is set: detaches the programs from unused interfaces.
    pub(crate) fn has_taken_over(&self) {
        self.set(conf::TAKING_OVER, 0);
        self.taking_over.store(false, Relaxed);
        let attached = lock(&self.attached);
        if let Some(pins) = &self.pins {
            for ifindex in pins.links() {
                if !attached.contains(&ifindex) {
                    let _ = fs::remove_file(pins.link(ifindex));
                }
            }
            for ifindex in pins.xdp_links() {
                if !self.has_xdp(ifindex) {
                    let _ = fs::remove_file(pins.xdp_link(ifindex));
                }
            }
            drop(attached);
            self.sweep_filters();
        }
    }

    /// The stored services and settings; `None` if none are stored.
    pub(crate) fn saved(&self) -> Option<Vec<u8>> {
        text(&self.arrays.saved.get()).saved()
    }

    /// Stores services and settings for a successor.
    ///
    /// # Errors
    /// The kernel has no memory for them, or the map cannot be replaced. A successor then finds
    /// none.
    pub(crate) fn save(&self, saved: &[u8]) -> io::Result<()> {
        let words = text_words(saved.len());
        let fill = |_: &[AtomicU64], new: &[AtomicU64]| {
            let new = Area {
                counts: &[],
                text: new,
            };
            new.save(saved);
        };
        let (array, room) = match self.arrays.saved.with_room(words, fill) {
            Ok(array) => (array, Ok(())),
            // The earlier state is now incomplete: a successor must not find it.
            Err(error) => (self.arrays.saved.get(), Err(error)),
        };
        match text(&array).save(saved) {
            true => Ok(()),
            false => room.and(Err(io::ErrorKind::OutOfMemory.into())),
        }
    }

    /// Adds the counters of the predecessor's servers to those of this dataplane.
    pub(crate) fn take_counts(&self, control: &mut Control, records: &[Record]) {
        let mut taken = lock(&self.taken);
        let mut sums = vec![[0_u64; COUNT_WORDS]; SERVERS as usize];
        self.sum(&mut sums);
        counts(&self.arrays.kept.get()).take_counts(control, records, &sums);
        *taken = sums;
    }

    /// Stores the counters of these servers for a successor, or logs a failure. Returns the next
    /// index, if there are more. Locks the counters before the control half, as
    /// [`fold`](Self::fold) does.
    pub(crate) fn keep_counts<C: Deref<Target = Control>>(
        &self,
        places: Range<usize>,
        control: impl FnOnce() -> C,
    ) -> Option<usize> {
        let copy = |old: &[AtomicU64], new: &[AtomicU64]| {
            for (to, from) in new.iter().zip(old) {
                to.store(from.load(Relaxed), Relaxed);
            }
        };
        let taken = lock(&self.taken);
        let control = control();
        let all = control.endpoint_places();
        let end = places.end.min(all);
        let places = places.start.min(end)..end;
        match self.arrays.kept.with_room(end * KEPT_WORDS, copy) {
            Ok(array) => counts(&array).keep_counts(&control, places, &taken),
            Err(error) => debug!("lvs_kept: {error}"),
        }
        (end < all).then_some(end)
    }

    /// Removes all state at an orderly exit.
    pub(crate) fn leave_nothing(&self) {
        if let Some(pins) = &self.pins {
            self.sweep_filters();
            pins.remove();
        }
    }
}

fn text(array: &SharedArray) -> Area<'_> {
    Area {
        counts: &[],
        text: array.words(),
    }
}

fn counts(array: &SharedArray) -> Area<'_> {
    Area {
        counts: array.words(),
        text: &[],
    }
}

//! Observations and mismatches of a replayed case.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::kernel_path::Forwarded;

/// The path that processes a case's frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Through {
    /// The packet path in userspace only.
    #[default]
    Userspace,
    /// The programs of the kernel fast path process each frame first, and forward the packets that
    /// they can. The case is also replayed in userspace only. Both replays must send the same
    /// frames and list the same connections.
    FastPath,
}

/// Observations during a replay.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Whether `trace` is recorded.
    pub(super) traced: bool,
    /// The sent frames after each frame and each wait, with the listing. If there are many
    /// connections, most items have no listing.
    pub(super) trace: Vec<Vec<String>>,
    /// Numbers of packets that the BPF programs have forwarded.
    pub(super) forwarded: Forwarded,
}

/// [`Seen`], shared by the test bed and the log of a case.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedSeen(Arc<Mutex<Seen>>);

impl SharedSeen {
    pub(super) fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A difference from the recording, or from the same replay without the kernel fast path.
#[derive(Clone, Debug)]
pub(super) struct Mismatch {
    /// Number of the step, from 0, and its name in the recording.
    pub(super) step: String,
    pub(super) what: String,
    pub(super) expected: String,
    pub(super) got: String,
}

#[derive(Debug, Default)]
pub(super) struct Log {
    pub(super) through: Through,
    pub(super) seen: SharedSeen,
    step: String,
    pub(super) mismatches: Vec<Mismatch>,
}

impl Log {
    /// Creates the log of a case on this path. `traced` records the trace for a comparison.
    pub(super) fn new(through: Through, traced: bool) -> Self {
        let log = Self {
            through,
            ..Self::default()
        };
        log.seen.lock().traced = traced;
        log
    }

    pub(super) fn at(&mut self, number: usize, note: Option<&str>) {
        self.step = match note {
            Some(note) => format!("{number} ({note})"),
            None => number.to_string(),
        };
    }

    pub(super) fn mismatch(&mut self, what: &str, expected: &str, got: &str) {
        self.mismatches.push(Mismatch {
            step: self.step.clone(),
            what: what.to_owned(),
            expected: expected.to_owned(),
            got: got.to_owned(),
        });
    }

    pub(super) fn compare<T: PartialEq + Debug>(&mut self, what: &str, expected: &T, got: &T) {
        if expected != got {
            self.mismatch(what, &format!("{expected:?}"), &format!("{got:?}"));
        }
    }
}

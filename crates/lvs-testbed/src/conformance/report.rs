//! What is found wrong in a case.

use std::fmt::Debug;

/// Something that the kernel did otherwise.
#[derive(Clone, Debug)]
pub(super) struct Mismatch {
    /// Number of the step, from 0, and what the recording calls it.
    pub(super) step: String,
    pub(super) what: String,
    pub(super) expected: String,
    pub(super) got: String,
}

/// Collects mismatches of one case.
#[derive(Debug, Default)]
pub(super) struct Log {
    step: String,
    pub(super) mismatches: Vec<Mismatch>,
}

impl Log {
    /// The step that is replayed now.
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

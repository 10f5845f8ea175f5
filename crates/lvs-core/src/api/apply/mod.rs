//! Applies changes: a list of calls is checked as a whole, and then applied as a whole. All changes
//! of the configuration use this module.

mod check;
mod host;
mod step;

use alloc::collections::{BTreeSet, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use self::check::check_call;
pub use self::host::{Host, Need, Permissive};
use self::step::Step;
use super::call::Call;
use super::plan::{Noted, Plan};
use super::types::{Failure, FailureCode};
use crate::mark::MarkRule;
use crate::service::ServiceKeyOrd;
use crate::{Control, Instant, ServiceKey};

/// Maximum number of changes of one [`Call::Apply`].
pub const CHANGES_MAX: usize = 1 << 16;

/// Answer to a call that changed the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// Parts of the change that the dataplane does not apply yet, each with its fix. Absent if
    /// there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// The refusal of a list of changes. None of the changes has been made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Index of the first change that cannot be made, from 0.
    pub change: usize,
    /// The reason why this change cannot be made.
    pub failure: Failure,
}

/// The changed parts of the configuration of which the dataplane has copies. The dataplane must
/// update these copies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    services: BTreeSet<ServiceKeyOrd>,
    /// Whether a flush deleted all services that existed before it.
    pub flushed: bool,
    /// Whether the rules that set firewall marks have changed ([`Control::marks`]).
    pub marks: bool,
    /// Whether the virtual addresses for which the dataplane answers ARP have changed
    /// ([`Control::own_vips`]).
    pub vips: bool,
    /// Whether the local addresses of full NAT have changed ([`Control::local_pool`]).
    pub local: bool,
    /// Whether timeouts, sysctls or synchronisation daemons have changed.
    pub settings: bool,
}

impl Applied {
    /// Services that were added, edited or deleted, and services of which a server was added,
    /// edited or deleted. Services that only a flush deleted are not included
    /// ([`flushed`](Self::flushed)).
    pub fn services(&self) -> impl ExactSizeIterator<Item = ServiceKey> + '_ {
        self.services.iter().map(|&key| key.into())
    }

    /// Whether the dataplane has nothing to update.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Control {
    /// Applies all of these changes, in the order of the list, or none. All are checked before the
    /// first is applied, each against the state after its predecessors. The result shows which
    /// parts of the dataplane must be updated, once for the whole list.
    ///
    /// Each change is checked like a single operation, in the kernel's order of checks.
    ///
    /// # Errors
    /// The first change that cannot be made, or the first above the maximum number of changes.
    /// Nothing has changed then. A call that does not change the configuration, such as
    /// [`Call::Apply`], is not permitted in a list.
    pub fn apply(
        &mut self,
        calls: &[Call],
        host: &dyn Host,
        now: Instant,
    ) -> Result<Applied, Refused> {
        let mut changes = Changes::new(calls)?;
        changes.check(self, host, usize::MAX)?;
        let applied = changes.make(self, now, usize::MAX);
        Ok(applied.unwrap_or_default())
    }
}

/// The application of a list of changes to a [`Control`] in several steps; [`Control::apply`] does
/// the same in one step. A caller that protects the `Control` with a lock can release the lock
/// between two steps, so that a long list does not delay packets.
///
/// All changes are checked before the first is applied. Between two steps, packets may be handled
/// and the clock may advance, but no other change may be made.
pub struct Changes<'a> {
    calls: &'a [Call],
    checked: usize,
    noted: Option<Noted>,
    steps: VecDeque<Step<'a>>,
    marks: Option<Vec<MarkRule>>,
    applied: Applied,
}

impl fmt::Debug for Changes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes")
            .field("calls", &self.calls.len())
            .field("checked", &self.checked)
            .field("unmade", &self.steps.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Changes<'a> {
    /// A list whose changes have not been checked yet.
    ///
    /// # Errors
    /// If the list has more than [`CHANGES_MAX`] changes.
    pub fn new(calls: &'a [Call]) -> Result<Self, Refused> {
        if calls.len() > CHANGES_MAX {
            return Err(Refused {
                change: CHANGES_MAX,
                failure: Failure::new(
                    FailureCode::Full,
                    format!(
                        "the list has {} changes: the maximum is {CHANGES_MAX}",
                        calls.len()
                    ),
                ),
            });
        }
        Ok(Self {
            calls,
            checked: 0,
            noted: None,
            steps: VecDeque::with_capacity(calls.len()),
            marks: None,
            applied: Applied::default(),
        })
    }

    /// Checks up to `count` more changes, each against the state after its predecessors. Returns
    /// `false` when all are checked.
    ///
    /// # Errors
    /// The first change that cannot be made. Nothing has changed, and the caller must not apply the
    /// list.
    pub fn check(
        &mut self,
        control: &Control,
        host: &dyn Host,
        count: usize,
    ) -> Result<bool, Refused> {
        let refused = |change, failure| Refused { change, failure };
        if let [call] = self.calls {
            let step = check_call(control, control, call, host);
            self.steps
                .push_back(step.map_err(|failure| refused(0, failure))?);
            self.checked = 1;
            return Ok(false);
        }
        let noted = self.noted.take().unwrap_or_else(|| Noted::new(control));
        let mut plan = Plan::resume(control, noted);
        let end = self.checked.saturating_add(count).min(self.calls.len());
        for (change, call) in self.calls.iter().enumerate().take(end).skip(self.checked) {
            let step = check_call(&plan, control, call, host);
            let step = step.map_err(|failure| refused(change, failure))?;
            step.note(&mut plan);
            self.steps.push_back(step);
        }
        self.checked = end;
        self.noted = Some(plan.into_noted());
        Ok(self.checked < self.calls.len())
    }

    /// Applies up to `count` more of the checked changes. The deletion of a service counts as one
    /// for itself and one for each server; a flush counts as the deletion of each service. After
    /// the last change, returns the parts of the state that the dataplane must update; until then,
    /// returns `None`.
    ///
    /// For packets, a list of at most `count` calls without a flush takes effect at once: only the
    /// removal of the servers of deleted services may need further calls. In such a list, servers
    /// that must be removed before a later change do not count.
    pub fn make(&mut self, control: &mut Control, now: Instant, count: usize) -> Option<Applied> {
        if self.marks.is_none() && self.steps.iter().any(Step::is_about_marks) {
            self.marks = Some(control.marks().to_vec());
        }
        let marks = self.marks.get_or_insert_default();
        let flushes = self
            .steps
            .iter()
            .take(count)
            .any(|step| matches!(step, Step::Flush));
        let at_once = self.calls.len() <= count && !flushes;
        let mut left = count;
        while left > 0 {
            let deletes_on = matches!(
                self.steps.front(),
                Some(Step::DeleteService(_) | Step::Flush)
            );
            if control.has_leaving() && !deletes_on {
                if at_once && !self.steps.is_empty() {
                    control.retire_some(usize::MAX, now);
                } else {
                    left -= control.retire_some(left, now);
                }
                continue;
            }
            let Some(step) = self.steps.pop_front() else {
                break;
            };
            left -= 1;
            if matches!(step, Step::Flush) && control.take_one() {
                self.steps.push_front(step);
                continue;
            }
            let made = control.make(step, marks, &mut self.applied, now);
            debug_assert!(
                made.is_ok(),
                "changes that passed the check must succeed: {made:?}"
            );
        }
        if !self.steps.is_empty() || control.has_leaving() {
            return None;
        }
        let applied = core::mem::take(&mut self.applied);
        if applied.marks {
            control.set_marks(Arc::from(core::mem::take(marks)));
        }
        Some(applied)
    }
}

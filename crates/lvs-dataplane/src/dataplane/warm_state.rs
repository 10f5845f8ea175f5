//! The state that remains after a dataplane is killed: the connection table, services, servers,
//! settings and counters, in the [kernel](crate::fast_path) or with a [state
//! keeper](crate::warm_restart).

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lvs_core::{Control, Instant};
use tracing::warn;

use super::context::Context;
use crate::fast_path::{FastPath, Held, HeldServices, LocalsLeft};
use crate::host::keeper::Keeper;
use crate::host::setup::Outliving;
use crate::warm_restart::{Record, WarmRestart};

/// Number of servers whose counters are stored while the control half is locked once.
const PORTION: usize = 4096;

/// Where a dataplane stores the state for its successor.
pub(super) trait WarmState: Debug + Send + Sync {
    /// Whether a predecessor has left its state.
    fn is_found(&self) -> bool;

    /// Stores the encoded services and settings for a successor.
    fn save(&self, text: &[u8]) -> io::Result<()>;

    /// The services and settings that were stored; `None` if they are missing or incomplete.
    fn saved(&self) -> Option<Vec<u8>>;

    /// Stores the services for the BPF programs, which use them while no dataplane is running.
    fn set_services(&self, _services: &HeldServices) {}

    /// Permits a successor to take over for some minutes from `now` on.
    fn is_alive(&self, _now: Instant) {}

    /// Stores the counters of the servers in these slots. Returns the next slot, if there are more.
    fn keep_portion(&self, places: Range<usize>, context: &Context) -> Option<usize>;

    /// Stores all counters, and calls [`is_alive`](Self::is_alive). Locks the control half for one
    /// portion of the servers at a time, because packets wait for it.
    fn keep_counts(&self, context: &Context) {
        self.is_alive(context.now());
        let mut next = Some(0);
        while let Some(from) = next {
            next = self.keep_portion(from..from + PORTION, context);
        }
    }

    /// Adds the counters of a predecessor to those of `control`.
    fn take_counts(&self, control: &mut Control, records: &[Record]);

    /// Returns by how much the clock of the stored deadlines is ahead of a clock that shows `now`.
    fn clock_ahead(&self, now: Instant) -> Duration;

    /// Sets the clock of the stored deadlines to `now`.
    fn set_clock(&self, now: Instant);

    /// Suspends the kernel fast path until the guard is dropped; `None` without the kernel fast
    /// path.
    fn hold(self: Arc<Self>) -> Option<Held> {
        None
    }

    /// The local addresses and ports of full NAT that a predecessor used; `None` if it stored none,
    /// or they cannot be read.
    fn locals_left(&self) -> Option<LocalsLeft<'_>> {
        None
    }

    /// Marks the take-over as complete. The caller has made sure that this dataplane's shield is in
    /// force.
    fn has_taken_over(&self);

    /// Returns the TUN device of a predecessor, and whether the TUN device of this dataplane stays
    /// for a successor.
    fn outliving(&self) -> Outliving {
        Outliving::default()
    }

    /// Stores the sockets that keep the shield or the TUN device alive until a successor starts, so
    /// that the host does not receive packets of services.
    fn keep_shield(&self, _keeper: &Keeper) {}

    /// Removes all state at an orderly exit.
    fn end(&self);
}

/// BPF maps. The BPF programs continue to forward packets after the dataplane is killed.
impl WarmState for FastPath {
    fn is_found(&self) -> bool {
        self.is_successor()
    }

    fn save(&self, text: &[u8]) -> io::Result<()> {
        self.save(text)
    }

    fn saved(&self) -> Option<Vec<u8>> {
        self.saved()
    }

    fn set_services(&self, services: &HeldServices) {
        self.set_services(services);
    }

    fn keep_portion(&self, places: Range<usize>, context: &Context) -> Option<usize> {
        self.keep_counts(places, || context.control())
    }

    fn take_counts(&self, control: &mut Control, records: &[Record]) {
        self.take_counts(control, records);
    }

    fn clock_ahead(&self, now: Instant) -> Duration {
        self.clock_ahead(now)
    }

    fn set_clock(&self, now: Instant) {
        self.set_clock(now);
    }

    fn hold(self: Arc<Self>) -> Option<Held> {
        let held = Self::hold(&self);
        self.settle();
        Some(held)
    }

    fn locals_left(&self) -> Option<LocalsLeft<'_>> {
        self.locals_left()
    }

    fn has_taken_over(&self) {
        self.has_taken_over();
    }

    fn end(&self) {
        self.leave_nothing();
    }
}

/// Shared memory whose descriptor a state keeper keeps open.
impl WarmState for WarmRestart {
    fn is_found(&self) -> bool {
        self.is_successor()
    }

    fn save(&self, text: &[u8]) -> io::Result<()> {
        self.save(text)
    }

    fn saved(&self) -> Option<Vec<u8>> {
        self.area().saved()
    }

    fn is_alive(&self, now: Instant) {
        self.is_alive(now);
    }

    fn keep_portion(&self, places: Range<usize>, context: &Context) -> Option<usize> {
        self.keep_counts(&context.control(), places)
    }

    fn take_counts(&self, control: &mut Control, records: &[Record]) {
        self.area().take_counts(control, records, &[]);
    }

    fn clock_ahead(&self, now: Instant) -> Duration {
        self.clock_ahead(now)
    }

    fn set_clock(&self, now: Instant) {
        self.set_clock(now);
    }

    fn has_taken_over(&self) {
        if let Err(error) = self.has_taken_over() {
            warn!(
                "a warm restart is not possible ({error}): if this dataplane is killed, its connections end"
            );
        }
    }

    fn outliving(&self) -> Outliving {
        Outliving {
            wanted: true,
            goes_on: self.is_successor(),
            device: self.state_keeper().device(),
        }
    }

    fn keep_shield(&self, keeper: &Keeper) {
        let state_keeper = self.state_keeper();
        let held = match (keeper.shield(), keeper.routed_device()) {
            (Some(shield), _) => state_keeper
                .hold_shield(shield)
                .and_then(|()| state_keeper.keep_last_shield()),
            (None, Some(device)) => state_keeper.hold_device(device),
            (None, None) => Ok(()),
        };
        if let Err(error) = held {
            warn!(
                "if this dataplane is killed, the host resets its connections: the state keeper cannot keep the nf_tables table or the TUN device that keeps packets of services from the host: {error}"
            );
        }
    }

    fn end(&self) {
        self.end();
    }
}

//! The service manager's watchdog. lvsd resets it as long as all of its loops make progress.
//!
//! ```text
//! event loop ── beats ───────────┐
//! main loop ─── its iterations ──┼──▶ thread lvsd-watchdog ── WATCHDOG=1 ──▶ the service manager
//! checks ────── beats ───────────┘
//! ```
//!
//! An iteration of the main loop includes requests to the dataplane, for whose answers it waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

pub use lvs_process::notify::watchdog_interval as interval;

use crate::notify::Notify;

/// Time limit for an iteration of the main loop, which may send a long list of changes to the
/// dataplane.
pub(crate) const TURN_LIMIT: Duration = Duration::from_secs(120);

/// Heartbeat of a loop.
#[derive(Clone, Debug)]
pub struct Pulse {
    start: Instant,
    /// Time of the last heartbeat, in milliseconds since `start`.
    last: Arc<AtomicU64>,
}

impl Default for Pulse {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            last: Arc::default(),
        }
    }
}

impl Pulse {
    /// Records that the loop makes progress.
    pub fn beat(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Relaxed);
    }

    /// Time since the last heartbeat.
    pub fn age(&self) -> Duration {
        let last = Duration::from_millis(self.last.load(Relaxed));
        self.start.elapsed().saturating_sub(last)
    }

    /// Beats at intervals of `pause` as long as the current runtime runs tasks.
    pub async fn keep(self, pause: Duration) {
        loop {
            self.beat();
            tokio::time::sleep(pause).await;
        }
    }
}

/// Heartbeats of all loops that must not hang.
#[derive(Clone, Debug, Default)]
pub struct Pulses {
    /// Renewed while the runtime of the event loop runs tasks.
    pub event_loop: Pulse,
    /// Renewed when the main loop begins an iteration.
    pub turns: Pulse,
    /// Renewed while the runtime of the checks runs tasks.
    pub checks: Pulse,
}

impl Pulses {
    /// Name of the first loop whose last heartbeat is older than `limit`, if any; for the main
    /// loop, the limit is at least two minutes.
    pub fn stopped(&self, limit: Duration) -> Option<&'static str> {
        let ages = [&self.event_loop, &self.checks, &self.turns].map(Pulse::age);
        first_stopped(ages, limit)
    }
}

/// Name of the first loop whose heartbeat is older than its limit, if any. The arguments are the
/// ages of the heartbeats, and the limit.
fn first_stopped(
    [event_loop, checks, turns]: [Duration; 3],
    limit: Duration,
) -> Option<&'static str> {
    let all = [
        ("the event loop", event_loop, limit),
        ("the health checks", checks, limit),
        ("the daemon's loop", turns, TURN_LIMIT.max(limit)),
    ];
    let mut stopped = all.iter().filter(|(_, age, limit)| age > limit);
    stopped.next().map(|(name, ..)| *name)
}

/// Starts a thread that resets the watchdog four times in each `interval`, as long as every loop
/// has had a heartbeat within half of it. For the main loop, this limit is at least two minutes.
///
/// # Errors
/// The thread cannot be started.
pub fn feed(notify: Notify, pulses: Pulses, interval: Duration) -> std::io::Result<()> {
    let work = move || {
        let mut reported = None;
        loop {
            // Suspension of the process or machine does not count: after it, loops beat before this
            // thread checks again.
            std::thread::sleep(interval / 4);
            let stopped = pulses.stopped(interval / 2);
            match stopped {
                None => notify.send("WATCHDOG=1"),
                Some(what) if reported != stopped => {
                    tracing::error!("{what} has stopped; the service manager will restart lvsd");
                }
                Some(_) => {}
            }
            reported = stopped;
        }
    };
    let thread = std::thread::Builder::new().name("lvsd-watchdog".to_owned());
    thread.spawn(work).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(1);
    const LATE: Duration = Duration::from_millis(1001);

    #[test]
    fn heartbeats_within_limit_are_not_reported() {
        assert_eq!(first_stopped([LIMIT, LIMIT, TURN_LIMIT], LIMIT), None);
    }

    #[test]
    fn delayed_heartbeat_of_health_checks_is_reported() {
        let stopped = first_stopped([LIMIT, LATE, LIMIT], LIMIT);
        assert_eq!(stopped, Some("the health checks"));
    }

    #[test]
    fn delayed_event_loop_is_reported_before_delayed_checks() {
        let stopped = first_stopped([LATE, LATE, LATE], LIMIT);
        assert_eq!(stopped, Some("the event loop"));
    }

    #[test]
    fn delayed_main_loop_iteration_is_reported() {
        let turn = TURN_LIMIT + Duration::from_millis(1);
        let stopped = first_stopped([LIMIT, LIMIT, turn], LIMIT);
        assert_eq!(stopped, Some("the daemon's loop"));
    }

    #[tokio::test(start_paused = true)]
    async fn running_loop_updates_its_heartbeat() {
        let pulse = Pulse::default();
        pulse.last.store(u64::MAX, Relaxed);
        let kept = tokio::spawn(pulse.clone().keep(Duration::from_millis(10)));
        tokio::task::yield_now().await;
        assert_ne!(pulse.last.load(Relaxed), u64::MAX);
        kept.abort();
    }
}

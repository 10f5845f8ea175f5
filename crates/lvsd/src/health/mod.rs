//! Health checks: one task a checked server, one channel for what they find.
//!
//! ```text
//! task (server A) ── probe, count (state.rs) ──┐
//! task (server B) ── probe, count ─────────────┼── Report, only when a state changes ──▶ the daemon's loop
//! ...                                          ┘
//! ```

pub mod probe;
mod state;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lvs_core::api::ServiceId;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior};

use crate::config::{Check, Config};
use crate::reconcile::Health;

pub use probe::{Network, Probe, ProbeError, Prober};
pub use state::State;

/// Probes in flight at once; the rest wait their turn.
const IN_FLIGHT: usize = 256;

/// A server in a service.
pub type Key = (ServiceId, SocketAddr);

/// A server has changed its state.
#[derive(Clone, Debug)]
pub struct Report {
    key: Key,
    /// Which task says so; one that was replaced in the meantime is not listened to.
    task: u64,
    up: bool,
    /// Why, in words; empty for a good check.
    reason: String,
}

/// A change of state, for the log.
#[derive(Clone, Debug)]
pub struct Change {
    /// Which server.
    pub key: Key,
    /// Its new state.
    pub up: bool,
    /// Why it is down.
    pub reason: String,
    /// How long the old state lasted; `None` for the first result.
    pub lasted: Option<Duration>,
}

/// All running checks.
#[derive(Debug)]
pub struct Checks<P> {
    prober: Arc<P>,
    tasks: HashMap<Key, Task>,
    next: u64,
    limit: Arc<Semaphore>,
    sender: mpsc::UnboundedSender<Report>,
}

#[derive(Debug)]
struct Task {
    id: u64,
    check: Check,
    up: Option<bool>,
    since: Instant,
    abort: AbortHandle,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl<P: Prober> Checks<P> {
    /// No checks yet; what they find comes out of the receiver.
    pub fn new(prober: P) -> (Self, mpsc::UnboundedReceiver<Report>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let checks = Self {
            prober: Arc::new(prober),
            tasks: HashMap::new(),
            next: 0,
            limit: Arc::new(Semaphore::new(IN_FLIGHT)),
            sender,
        };
        (checks, receiver)
    }

    /// Checks the servers of `config`, and no others. A check that has not changed goes on
    /// undisturbed; one that asks the same in another rhythm keeps what it knows.
    pub fn set(&mut self, config: &Config) {
        let mut old = std::mem::take(&mut self.tasks);
        for service in &config.services {
            for server in &service.servers {
                let key = (service.id, server.address);
                let Some(check) = &server.check else {
                    continue;
                };
                let before = old.remove(&key);
                let task = match before {
                    Some(task) if task.check == *check => task,
                    Some(task) if task.check.asks_the_same(check) => {
                        let since = task.since;
                        let mut new = self.spawn(key, check.clone(), task.up);
                        new.since = since;
                        new
                    }
                    _ => self.spawn(key, check.clone(), None),
                };
                self.tasks.insert(key, task);
            }
        }
    }

    fn spawn(&mut self, key: Key, check: Check, up: Option<bool>) -> Task {
        self.next += 1;
        let id = self.next;
        let prober = Arc::clone(&self.prober);
        let limit = Arc::clone(&self.limit);
        let sender = self.sender.clone();
        let state = State::new(check.rise, check.fall, up);
        let work = run(prober, limit, sender, key, id, check.clone(), state);
        Task {
            id,
            check,
            up,
            since: Instant::now(),
            abort: tokio::spawn(work).abort_handle(),
        }
    }

    /// Takes a report; `None` if it comes from a check that no longer exists.
    pub fn take(&mut self, report: Report) -> Option<Change> {
        let task = self.tasks.get_mut(&report.key)?;
        if task.id != report.task {
            return None;
        }
        let lasted = task.up.map(|_| task.since.elapsed());
        task.up = Some(report.up);
        task.since = Instant::now();
        Some(Change {
            key: report.key,
            up: report.up,
            reason: report.reason,
            lasted,
        })
    }

    /// What is known about a server.
    pub fn health(&self, key: &Key) -> Health {
        match self.tasks.get(key).map(|t| t.up) {
            None | Some(Some(true)) => Health::Up,
            Some(Some(false)) => Health::Down,
            Some(None) => Health::Unknown,
        }
    }

    /// Whether a first result is still out.
    pub fn pending(&self) -> bool {
        self.tasks.values().any(|t| t.up.is_none())
    }
}

/// One server's checks, for ever.
async fn run<P: Prober>(
    prober: Arc<P>,
    limit: Arc<Semaphore>,
    sender: mpsc::UnboundedSender<Report>,
    key: Key,
    task: u64,
    check: Check,
    mut state: State,
) {
    let mut complained = false;
    let mut timer = None;
    loop {
        let result = {
            let Ok(_permit) = limit.acquire().await else {
                return;
            };
            prober.probe(&check).await
        };
        let reason = match result {
            Ok(()) => Some(String::new()),
            Err(ProbeError::Server(reason)) => Some(reason),
            Err(ProbeError::Local(reason)) => {
                if !complained {
                    tracing::warn!(
                        server = %check.server,
                        "cannot check the server, its state stays as it is: {reason}"
                    );
                    complained = true;
                }
                None
            }
        };
        if let Some(reason) = reason {
            complained = false;
            let good = reason.is_empty();
            tracing::debug!(server = %check.server, good, reason, "checked");
            if let Some(up) = state.observe(good) {
                let report = Report {
                    key,
                    task,
                    up,
                    reason,
                };
                if sender.send(report).is_err() {
                    return;
                }
            }
        }
        // The first check is made at once, because the service waits for it. The second comes after
        // a random part of the interval, so that the checks of many servers spread out.
        let timer = timer.get_or_insert_with(|| {
            let start = Instant::now() + check.interval.mul_f64(fraction());
            let mut timer = tokio::time::interval_at(start, check.interval);
            timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
            timer
        });
        timer.tick().await;
    }
}

/// A number from 0 to 1, different each time; nothing depends on how random it is.
fn fraction() -> f64 {
    let bits = RandomState::new().hash_one(0u8) >> 11;
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    let n = bits as f64;
    n / 9_007_199_254_740_992.0
}

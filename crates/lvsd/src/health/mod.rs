//! Health checks: one task a checked server, one channel for what they find.
//!
//! ```text
//! task (server A) ── probe, count (state.rs) ──┐
//! task (server B) ── probe, count ─────────────┼── Report, only when a state changes ──▶ the daemon's loop
//! ...                                          ┘
//! ```

mod permits;
pub mod probe;
mod state;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lvs_core::api::ServiceId;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior};

use crate::config::{Check, Config};
use crate::reconcile::Health;
use crate::tally::{Outcome, Tally};

pub use permits::raise_limits;
use permits::{Permits, Standing};
pub use probe::{Network, Probe, ProbeError, Prober};
pub use state::State;

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
    permits: Arc<Permits>,
    sender: mpsc::UnboundedSender<Report>,
}

#[derive(Debug)]
struct Task {
    id: u64,
    check: Check,
    up: Option<bool>,
    /// Why it is down.
    reason: String,
    since: Instant,
    abort: AbortHandle,
}

/// What is known of a checked server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Whether it is up; `None` if nobody knows yet.
    pub up: Option<bool>,
    /// Why it is down.
    pub reason: String,
    /// For how long it has been so.
    pub lasted: Duration,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl<P: Prober> Checks<P> {
    /// No checks yet; what they find comes out of the receiver.
    pub fn new(prober: P) -> (Self, mpsc::UnboundedReceiver<Report>) {
        Self::counted_in(prober, Arc::default())
    }

    /// The same; what they take is counted in `tally`.
    pub fn counted_in(prober: P, tally: Arc<Tally>) -> (Self, mpsc::UnboundedReceiver<Report>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let checks = Self {
            prober: Arc::new(prober),
            tasks: HashMap::new(),
            next: 0,
            permits: Arc::new(Permits::new(tally)),
            sender,
        };
        (checks, receiver)
    }

    /// Checks the servers of `config`, and no others. A check that has not changed goes on
    /// undisturbed; one that asks the same in another rhythm keeps what it knows.
    pub fn set(&mut self, config: &Config) {
        let mut old = std::mem::take(&mut self.tasks);
        // What is known of a server holds for whichever service asks the same.
        let known: HashMap<(Probe, SocketAddr), (bool, Instant)> = old
            .values()
            .filter_map(|task| Some((task.check.identity(), (task.up?, task.since))))
            .collect();
        for service in &config.services {
            for server in &service.servers {
                let key = (service.id, server.address);
                let Some(check) = &server.check else {
                    continue;
                };
                let task = match old.remove(&key) {
                    Some(task) if task.check == *check => task,
                    _ => {
                        let known = known.get(&check.identity());
                        let mut task = self.spawn(key, check.clone(), known.map(|(up, _)| *up));
                        task.since = known.map_or(task.since, |(_, since)| *since);
                        task
                    }
                };
                self.tasks.insert(key, task);
            }
        }
    }

    fn spawn(&mut self, key: Key, check: Check, up: Option<bool>) -> Task {
        self.next += 1;
        let id = self.next;
        let prober = Arc::clone(&self.prober);
        let permits = Arc::clone(&self.permits);
        let sender = self.sender.clone();
        let state = State::new(check.rise, check.fall, up);
        let work = run(prober, permits, sender, key, id, check.clone(), state);
        Task {
            id,
            check,
            up,
            reason: String::new(),
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
        task.reason.clone_from(&report.reason);
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

    /// What is known of a server, and since when; `None` of one that nobody checks.
    pub fn known(&self, key: &Key) -> Option<Known> {
        let task = self.tasks.get(key)?;
        Some(Known {
            up: task.up,
            reason: task.reason.clone(),
            lasted: task.since.elapsed(),
        })
    }

    /// How long probes have waited for their turn at most since this was last asked.
    pub fn lag(&self) -> Duration {
        self.permits.take_lag()
    }

    /// The same, without an end to it.
    pub fn peek_lag(&self) -> Duration {
        self.permits.lag()
    }
}

/// One server's checks, for ever.
async fn run<P: Prober>(
    prober: Arc<P>,
    permits: Arc<Permits>,
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
            let standing = match state.up() {
                Some(true) => Standing::Good,
                Some(false) | None => Standing::Doubtful,
            };
            let _permit = permits.get(check.server.ip(), standing).await;
            let began = Instant::now();
            let result = prober.probe(&check).await;
            let outcome = match &result {
                Ok(()) => Outcome::Good,
                Err(ProbeError::Server(_)) => Outcome::Failed,
                Err(ProbeError::Local(_)) => Outcome::NotMade,
            };
            let kind = check.probe.name();
            permits.tally.check(kind, began.elapsed(), outcome);
            result
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Always up.
    struct Well;

    impl Prober for Well {
        async fn probe(&self, _: &Check) -> Result<(), ProbeError> {
            Ok(())
        }
    }

    fn config(services: &[(u8, &str)]) -> Config {
        let mut text = String::new();
        for (n, check) in services {
            text.push_str(&format!(
                "[[service]]\naddress = \"192.0.2.{n}:80\"\nforward = \"nat\"\ncheck = {{ {check} }}\n\
                 [[service.server]]\naddress = \"10.0.0.1:80\"\n"
            ));
        }
        let (config, _) = Config::from_toml("test.toml", &text).expect("a configuration");
        config
    }

    fn health(checks: &Checks<Well>, config: &Config) -> Vec<Health> {
        let services = config.services.iter();
        services
            .map(|service| checks.health(&(service.id, service.servers[0].address)))
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_known_goes_with_the_whole_identity_of_a_check() {
        use Health::{Unknown, Up};
        let (mut checks, mut reports) = Checks::new(Well);
        let tcp = "type = \"tcp\"";
        let first = config(&[(1, tcp)]);
        checks.set(&first);
        assert_eq!(health(&checks, &first), [Unknown]);
        let report = reports.recv().await.expect("a report");
        checks.take(report);
        assert_eq!(health(&checks, &first), [Up]);

        // Another rhythm, and another service; another port is another question.
        let second = config(&[
            (1, "type = \"tcp\", interval = \"9s\""),
            (2, tcp),
            (3, "type = \"tcp\", port = 81"),
        ]);
        checks.set(&second);
        assert_eq!(health(&checks, &second), [Up, Up, Unknown]);

        // The same server and port, asked in another way.
        let third = config(&[(1, "type = \"banner\", expect = \"220\"")]);
        checks.set(&third);
        assert_eq!(health(&checks, &third), [Unknown]);
    }
}

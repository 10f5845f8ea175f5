//! Health checks: one task for each distinct check, which any number of services can share, and one
//! channel for the results.
//!
//! ```text
//! services ──▶ check (kind, server, interval) ──▶ task ── probe, count (state.rs) ──┐
//!          ──▶ check ───────────────────────────▶ task ── probe, count ─────────────┼── Report, when something changes ──▶ the daemon's loop
//!                                                     ▲                             ┘
//!          attempts of clients, from the dataplane ───┘
//! ```

mod advice;
mod check;
mod network;
mod next_hop;
mod permits;
pub mod pins;
pub mod probe;
mod reason;
mod record;
mod reverse_path;
mod state;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lvs_api::daemon::CheckStatus;
use lvs_core::api::ServiceId;
use lvs_sys::lock;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::counters::{CheckOutcome, Counters, Times};

pub use advice::{Advice, Weight};
pub use check::{Check, Passive};
pub use network::{Network, Prober};
pub use permits::raise_limits;
use permits::{Permits, TargetHealth};
pub use pins::Pins;
pub use probe::{Probe, ProbeError, Via};
use reason::short;
pub use reason::{Code, Reason};
use record::Record;
pub use state::{Health, State};

/// A server in a service.
pub type Key = (ServiceId, SocketAddr);

/// The state of the dataplane that checks depend on.
#[derive(Clone, Debug, Default)]
pub struct Serving {
    /// Servers to which the dataplane sends connections.
    pub servers: HashSet<SocketAddr>,
    /// Virtual addresses for which the dataplane answers; `None` for all.
    pub vips: Option<BTreeSet<IpAddr>>,
    /// The reason why the dataplane may be unable to forward checks, which then use the servers'
    /// own addresses unless the file sets `via`; `None` without such a reason.
    pub obstacle: Option<String>,
}

/// Longest time that the first failed check of a server waits for the state of the dataplane.
const DATAPLANE_LIMIT: Duration = Duration::from_secs(1);

/// The state of a server, which its check reports when the state, its reason or the advice has
/// changed, or when the check can no longer be made, or can be made again.
#[derive(Clone, Debug)]
pub struct Report {
    check: Arc<Check>,
    /// Number of the reporting task; reports of a replaced task are ignored.
    task: u64,
    /// Whether the server is up; `None` until its state is decided.
    up: Option<bool>,
    /// The reason why the server is down; empty while it is up.
    reason: Reason,
    /// Whether `reason` is a fault: the last check failed, or clients got no answer.
    failed: bool,
    /// Whether the server is down because clients got no answer (`passive = true`).
    is_out: bool,
    advice: Advice,
    /// The reason why this host cannot make the check, and since when; `None` unless this is so for
    /// at least three consecutive checks.
    not_made: Option<NotMade>,
}

/// A check that this host cannot perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotMade {
    /// Time of the first of the consecutive checks that could not be made.
    pub since: Instant,
    /// The reason why the last check could not be made.
    pub reason: String,
}

/// The changes that a report of a check contains.
#[derive(Clone, Debug, Default)]
pub struct News {
    /// Changes of state, one for each service that uses the check.
    pub changes: Vec<Change>,
    /// Servers that are still down, each with a reason that was not logged since it went down. The
    /// number of reasons is limited.
    pub reasons: Vec<(Key, Reason)>,
    /// Whether the server's advice has changed.
    pub advice: bool,
}

/// A change of a server's state, for a service that uses the check.
#[derive(Clone, Debug)]
pub struct Change {
    /// The service, and its server.
    pub key: Key,
    /// Whether the server is up now.
    pub up: bool,
    /// The reason why the server is down; empty if it is up.
    pub reason: Reason,
    /// Duration of the old state; `None` if this is the first state.
    pub lasted: Option<Duration>,
}

/// Counts of checks by kind and result, with their durations and delays.
#[derive(Debug, Default)]
struct Timing {
    counters: Arc<Counters>,
    /// The longest delay from the due time of a check to its start since the last call of
    /// [`Checks::lag`], in microseconds.
    longest_lag_us: AtomicU64,
}

/// All running checks.
#[derive(Debug)]
pub struct Checks<P> {
    prober: Arc<P>,
    tasks: HashMap<Arc<Check>, Task>,
    /// The check of each server.
    questions: HashMap<Key, Arc<Check>>,
    next: u64,
    permits: Arc<Permits>,
    timing: Arc<Timing>,
    serving: watch::Sender<Option<Arc<Serving>>>,
    sender: mpsc::UnboundedSender<Report>,
    /// The runtime of the tasks.
    runtime: Handle,
}

/// A request to the task of a check, because clients got no answer.
#[derive(Debug)]
enum Prompt {
    /// Starts a check at once, because this number of connection attempts was not answered.
    Ask(u32),
    /// Marks the server as down, for this reason.
    TakeOut(Reason),
}

/// The state of a server from an earlier check: whether it is up, since when, the reason why it is
/// down, its advice and its record.
type Before = (bool, Instant, Reason, Advice, Arc<Mutex<Record>>);

#[derive(Debug)]
struct Task {
    id: u64,
    keys: Vec<Key>,
    up: Option<bool>,
    /// The reason why the server is down; empty while it is up.
    reason: Reason,
    /// The reasons that were logged since the server went down, up to [`REASONS_MAX`].
    logged: Vec<Reason>,
    advice: Advice,
    since: Instant,
    not_made: Option<NotMade>,
    /// Whether the server is down because clients got no answer (`passive = true`).
    is_out: bool,
    record: Arc<Mutex<Record>>,
    /// For each service, the number of unanswered connection attempts that no longer count: they
    /// have led to a check, or occurred while the server was down.
    unanswered: HashMap<Key, u32>,
    /// Sends requests to the task, because clients got no answer.
    prompts: mpsc::Sender<Prompt>,
    abort: AbortHandle,
}

/// The state of a checked server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Whether the server is up; `None` until its state is decided.
    pub up: Option<bool>,
    /// The reason why the server is down now; empty if it is not down.
    pub reason: Reason,
    /// Time for which the server has been in this state.
    pub lasted: Duration,
    /// The reason why this host cannot make the check, and since when; `None` unless this is so for
    /// at least three consecutive checks.
    pub not_made: Option<NotMade>,
    /// The statistics of the check and its server; `None` before the first result.
    pub record: Option<CheckStatus>,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl<P: Prober> Checks<P> {
    /// Makes an empty set of checks, and the receiver of their reports. The checks run on
    /// `runtime`; `None` is the current runtime.
    pub fn new(prober: P, runtime: Option<Handle>) -> (Self, mpsc::UnboundedReceiver<Report>) {
        Self::counted_in(prober, runtime, Arc::default())
    }

    /// Makes an empty set of checks as [`new`](Self::new). Results and durations are counted in
    /// `counters`.
    pub fn counted_in(
        prober: P,
        runtime: Option<Handle>,
        counters: Arc<Counters>,
    ) -> (Self, mpsc::UnboundedReceiver<Report>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let checks = Self {
            prober: Arc::new(prober),
            tasks: HashMap::new(),
            questions: HashMap::new(),
            next: 0,
            permits: Arc::new(Permits::new()),
            timing: Arc::new(Timing {
                counters,
                ..Timing::default()
            }),
            serving: watch::Sender::new(None),
            sender,
            runtime: runtime.unwrap_or_else(Handle::current),
        };
        (checks, receiver)
    }

    /// Sets the checks, each for a server of a service. An unchanged check continues. A changed
    /// check keeps the server's state if its probe, server and path are unchanged. Checks that are
    /// not in `wanted` end.
    #[expect(
        clippy::mutable_key_type,
        reason = "the settings of a check do not change"
    )]
    pub fn set<'a>(&mut self, wanted: impl IntoIterator<Item = (Key, &'a Check)>) {
        let mut old = std::mem::take(&mut self.tasks);
        self.questions.clear();
        for task in old.values_mut() {
            task.keys.clear();
        }
        // The state of a server applies to every service with the same check.
        type Identity = (Probe, SocketAddr, Option<Via>);
        let known: HashMap<Identity, Before> = old
            .iter()
            .filter_map(|(check, task)| {
                let record = Arc::clone(&task.record);
                let stated = (
                    task.up?,
                    task.since,
                    task.reason.clone(),
                    task.advice,
                    record,
                );
                Some((check.identity(), stated))
            })
            .collect();
        for (key, check) in wanted {
            let question = match self.tasks.get_key_value(check) {
                Some((question, _)) => Arc::clone(question),
                None => {
                    let (question, task) = match old.remove_entry(check) {
                        Some(entry) => entry,
                        None => {
                            let question = Arc::new(check.clone());
                            let known = known.get(&check.identity()).cloned();
                            let task = self.spawn(&question, known);
                            (question, task)
                        }
                    };
                    self.tasks.insert(Arc::clone(&question), task);
                    question
                }
            };
            if let Some(task) = self.tasks.get_mut(&question) {
                task.keys.push(key);
            }
            self.questions.insert(key, question);
        }
    }

    fn spawn(&mut self, check: &Arc<Check>, known: Option<Before>) -> Task {
        self.next += 1;
        let (prompts, prompted) = mpsc::channel(1);
        let now = Instant::now();
        let (up, since, reason, advice, record) = match known {
            Some((up, since, reason, advice, record)) => (Some(up), since, reason, advice, record),
            None => {
                let record = Arc::new(Mutex::new(Record::new(now)));
                (None, now, Reason::default(), Advice::NONE, record)
            }
        };
        let runner = Runner {
            prober: Arc::clone(&self.prober),
            permits: Arc::clone(&self.permits),
            timing: Arc::clone(&self.timing),
            serving: self.serving.subscribe(),
            sender: self.sender.clone(),
            prompts: prompted,
            out_until: None,
            own_address: None,
            client_failures: 0,
            record: Arc::clone(&record),
            task: self.next,
            state: State::new(check.rise, check.fall, up),
            advice,
            reason: reason.clone(),
            unmade: Unmade::default(),
            check: Arc::clone(check),
        };
        Task {
            id: self.next,
            keys: Vec::new(),
            up,
            logged: vec![reason.clone()],
            reason,
            advice,
            since,
            not_made: None,
            is_out: false,
            record,
            unanswered: HashMap::new(),
            prompts,
            abort: self.runtime.spawn(runner.run()).abort_handle(),
        }
    }

    /// Processes a report, and returns the changes in it. The report of a check that no longer
    /// exists changes nothing.
    pub fn take(&mut self, report: Report) -> News {
        let Some(task) = self.tasks.get_mut(&report.check) else {
            return News::default();
        };
        if task.id != report.task {
            return News::default();
        }
        let mut news = News {
            advice: task.advice != report.advice,
            ..News::default()
        };
        task.advice = report.advice;
        task.reason.clone_from(&report.reason);
        task.not_made = report.not_made;
        task.is_out = report.is_out;
        let Some(up) = report.up else {
            return news;
        };
        if task.up == Some(up) {
            let new = report.failed && !task.logged.contains(&report.reason);
            if new && task.logged.len() < REASONS_MAX {
                task.logged.push(report.reason.clone());
                let keys = task.keys.iter();
                news.reasons = keys.map(|key| (*key, report.reason.clone())).collect();
            }
            return news;
        }
        let lasted = task.up.map(|_| task.since.elapsed());
        let now = Instant::now();
        let fall = (task.up == Some(true)).then_some(report.reason.text.as_str());
        lock(&task.record).transition(up, fall, now);
        task.up = Some(up);
        task.since = now;
        task.logged = vec![report.reason.clone()];
        let change = |key: &Key| Change {
            key: *key,
            up,
            reason: report.reason.clone(),
            lasted,
        };
        news.changes = task.keys.iter().map(change).collect();
        news
    }

    /// Sets the state of the dataplane. A server that already receives connections is marked as
    /// down only after `fall` failed checks, even if it has no earlier result. While the dataplane
    /// does not answer for a virtual address, failed checks through this address do not count.
    pub fn take_serving(&self, serving: Serving) {
        self.serving.send_replace(Some(Arc::new(serving)));
    }

    /// Processes the number of consecutive unanswered connection attempts of clients that the
    /// dataplane has counted, for each server. At the limit of the check (`passive`), a server that
    /// is up is checked at once, but at most once per `fast_interval`. One failed check then marks
    /// it as down. The attempts alone do not, because any client can cause unanswered attempts.
    pub fn take_unanswered(&mut self, counts: impl Iterator<Item = (Key, u32)>) {
        for (key, count) in counts {
            let Some(question) = self.questions.get(&key) else {
                continue;
            };
            let (Some(Passive::Asks(limit)), Some(task)) =
                (question.passive, self.tasks.get_mut(question))
            else {
                continue;
            };
            let since = task.unanswered.entry(key).or_default();
            // An answer has arrived in the meantime; or the server is down, and attempts during
            // that time do not count after its return.
            if count < *since || task.up != Some(true) {
                *since = if task.up == Some(true) { 0 } else { count };
            }
            if count - *since >= limit {
                // One queued request is sufficient; a task that has ended runs no more checks.
                let _ = task.prompts.try_send(Prompt::Ask(count - *since));
                *since = count;
            }
        }
    }

    /// Whether the check marks its server as down when the server is suspicious (`passive = true`).
    pub fn goes_by_clients(&self, key: &Key) -> bool {
        let question = self.questions.get(key);
        question.is_some_and(|question| question.passive == Some(Passive::TakesOut))
    }

    /// Marks a server that is up as down, as if its check had failed: its clients get no answer,
    /// for this `cause`. Successful checks mark it as up again, but not before a minute has passed,
    /// and not while checks on the path of clients fail.
    pub fn take_out(&self, key: &Key, cause: Reason) {
        if let Some(task) = self.task(key)
            && task.up == Some(true)
        {
            // One queued request is sufficient.
            let _ = task.prompts.try_send(Prompt::TakeOut(cause));
        }
    }

    /// Whether [`take_out`](Self::take_out) is the reason why the server is down.
    pub fn is_out(&self, key: &Key) -> bool {
        self.task(key).is_some_and(|task| task.is_out)
    }

    /// Maximum number of descriptors that all checks need at a time.
    pub fn descriptors(&self) -> usize {
        let each = self.tasks.keys().map(|check| check.descriptors());
        let all = each.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        all.fold(0, usize::saturating_add).min(self.permits.size())
    }

    fn task(&self, key: &Key) -> Option<&Task> {
        self.tasks.get(self.questions.get(key)?)
    }

    /// The health of a server; [`Health::Up`] without a check.
    pub fn health(&self, key: &Key) -> Health {
        match self.task(key).map(|task| task.up) {
            None | Some(Some(true)) => Health::Up,
            Some(Some(false)) => Health::Down,
            Some(None) => Health::Unknown,
        }
    }

    /// The server's advice; no advice without a check.
    pub fn advice(&self, key: &Key) -> Advice {
        self.task(key).map_or(Advice::NONE, |task| task.advice)
    }

    /// The state of a server; `None` without a check.
    pub fn known(&self, key: &Key) -> Option<Known> {
        let task = self.task(key)?;
        Some(Known {
            up: task.up,
            reason: task.reason.clone(),
            lasted: task.since.elapsed(),
            not_made: task.not_made.clone(),
            record: lock(&task.record).status(Instant::now()),
        })
    }

    /// The reason why checks on the path of clients fail, although the server's own address
    /// answers; `None` if no such fault is known.
    pub fn client_path(&self, key: &Key) -> Option<Reason> {
        lock(&self.task(key)?.record).client_path()
    }

    /// The durations of the checks of each server; empty if more than `most` servers are checked.
    pub fn times(&self, most: usize) -> HashMap<Key, Times> {
        if self.questions.len() > most {
            return HashMap::new();
        }
        let times = |key: &Key| Some((*key, lock(&self.task(key)?.record).times()));
        self.questions.keys().filter_map(times).collect()
    }

    /// Number of checks that could not be made in at least their last three attempts.
    pub fn not_made(&self) -> usize {
        let tasks = self.tasks.values();
        tasks.filter(|task| task.not_made.is_some()).count()
    }

    /// Number of distinct checks, which services can share.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether there are no checks.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Returns the longest delay from the due time of a check to its start since the last call, and
    /// begins a new measurement.
    pub fn lag(&self) -> Duration {
        Duration::from_micros(self.timing.longest_lag_us.swap(0, Relaxed))
    }

    /// The longest delay since the last call of [`lag`](Self::lag); the measurement continues.
    pub fn peek_lag(&self) -> Duration {
        Duration::from_micros(self.timing.longest_lag_us.load(Relaxed))
    }
}

/// The task of one check, which runs until the check is removed.
struct Runner<P> {
    prober: Arc<P>,
    permits: Arc<Permits>,
    timing: Arc<Timing>,
    serving: watch::Receiver<Option<Arc<Serving>>>,
    sender: mpsc::UnboundedSender<Report>,
    prompts: mpsc::Receiver<Prompt>,
    /// Earliest time at which successful checks can mark the server as up again; `None` unless it
    /// was marked as down because clients got no answer.
    out_until: Option<Instant>,
    /// The reason why the check uses the server's own address for some time, and the end of this
    /// time.
    own_address: Option<(String, Instant)>,
    /// Number of consecutive failed checks on the path of clients, while the server's own address
    /// answered.
    client_failures: u32,
    record: Arc<Mutex<Record>>,
    task: u64,
    check: Arc<Check>,
    state: State,
    advice: Advice,
    /// The reason that was last reported.
    reason: Reason,
    unmade: Unmade,
}

/// Consecutive checks that could not be made.
#[derive(Debug, Default)]
struct Unmade {
    count: u32,
    /// The time of the first of these checks, and the reason why the last one could not be made.
    row: Option<NotMade>,
}

impl Unmade {
    /// Counts another attempt that could not be made.
    fn note(&mut self, reason: String) {
        self.count = self.count.saturating_add(1);
        let since = self.row.take().map_or_else(Instant::now, |row| row.since);
        self.row = Some(NotMade { since, reason });
    }

    /// The checks that could not be made, if there are enough of them to be reported.
    fn long(&self) -> Option<NotMade> {
        self.row.clone().filter(|_| self.count >= NOT_MADE_MIN)
    }
}

impl<P: Prober> Runner<P> {
    async fn run(mut self) {
        // The first check is made at once, because the service waits for it. The second runs after
        // a random part of the interval, so that the checks of many servers spread out.
        let mut first = true;
        let mut due = Instant::now();
        let mut prompt = None;
        loop {
            if self.check.needs_vip() && self.serving.wait_for(Option::is_some).await.is_err() {
                return;
            }
            let begun = Instant::now();
            let goes_on = match prompt {
                Some(attempts) => self.prompted(attempts, due).await,
                None => {
                    let result = self.probe(due).await;
                    self.take(result).await
                }
            };
            if !goes_on {
                return;
            }
            let pause = match prompt.take() {
                // After its clients got no answer, a server that is down is checked again soon.
                Some(_) if self.state.up() == Some(false) => self.check.fast_interval.as_secs_f64(),
                _ if first => self.pause() * fraction(),
                _ => self.pause(),
            };
            first = false;
            // A check that takes longer than the pause does not count as a delay of the next check.
            due = (due + Duration::from_secs_f64(pause)).max(Instant::now());
            loop {
                tokio::select! {
                    asked = self.prompts.recv() => match asked {
                        None => return,
                        Some(Prompt::TakeOut(cause)) => {
                            if !self.take_out(cause) {
                                return;
                            }
                        }
                        Some(Prompt::Ask(attempts)) => {
                            prompt = Some(attempts);
                            // However often clients fail, the server is checked at most once per
                            // `fast_interval`.
                            due = due.min((begun + self.check.fast_interval).max(Instant::now()));
                            tokio::time::sleep_until(due).await;
                            break;
                        }
                    },
                    () = tokio::time::sleep_until(due) => break,
                }
            }
        }
    }

    /// Marks the server as down for at least the time [`OUT`], because clients got no answer; false
    /// if the receiver was dropped.
    fn take_out(&mut self, mut cause: Reason) -> bool {
        self.out_until = Some(Instant::now() + OUT);
        cause.text.push_str(PASSIVE);
        self.state.condemn().is_none() || self.report(cause, true)
    }

    /// Whether the server is down because clients got no answer: true for the time [`OUT`], and
    /// then while checks on the path of clients fail.
    fn is_out(&self) -> bool {
        let begun = self.out_until.filter(|_| self.state.up() == Some(false));
        begun.is_some_and(|until| Instant::now() < until || self.client_failures > 0)
    }

    /// The reason why a server is down although its own address answers: the fault that the checks
    /// on the path of clients find, or otherwise the reason that was last reported.
    fn out_reason(&self) -> Reason {
        let found = lock(&self.record).client_path();
        found.map_or_else(
            || self.reason.clone(),
            |mut found| {
                found.text.push_str(PASSIVE);
                found
            },
        )
    }

    /// Checks the server at once, because clients got no answer, and marks it as down if this check
    /// fails; false if the receiver was dropped.
    async fn prompted(&mut self, attempts: u32, due: Instant) -> bool {
        self.timing.counters.prompted();
        let result = self.probe(due).await;
        match result {
            Err(ProbeError::Server(reason)) if self.has_way() => {
                let mut reason = reason.short();
                let words = format!(
                    "; the last {attempts} connection attempts of clients were not answered, either (passive)"
                );
                reason.text.push_str(&words);
                self.unmade = Unmade::default();
                self.state.condemn().is_none() || self.report(reason, true)
            }
            result => self.take(result).await,
        }
    }

    async fn probe(&mut self, due: Instant) -> Result<Advice, ProbeError> {
        let standing = match self.state.up() {
            Some(true) => TargetHealth::Good,
            Some(false) | None => TargetHealth::Doubtful,
        };
        let descriptors = self.check.descriptors();
        let target = self.check.server.ip();
        let permits = Arc::clone(&self.permits);
        let _permit = permits.get(target, standing, descriptors).await;
        let waited = due.elapsed();
        let waited_us = u64::try_from(waited.as_micros()).unwrap_or(u64::MAX);
        self.timing.longest_lag_us.fetch_max(waited_us, Relaxed);
        self.timing.counters.waited(waited);
        let begun = Instant::now();
        let result = self.probe_path().await;
        let took = begun.elapsed();
        let outcome = match &result {
            Ok(_) => CheckOutcome::Good,
            Err(ProbeError::Server(_)) => CheckOutcome::Failed,
            Err(ProbeError::Local(_)) => CheckOutcome::NotMade,
        };
        let kind = self.check.probe.name();
        self.timing.counters.check(kind, took, outcome);
        if outcome != CheckOutcome::NotMade {
            lock(&self.record).count_check(took, Instant::now());
        }
        result
    }

    /// Makes the check on the path that `via` sets in the file. Without `via`, makes the check
    /// through the service if that is possible.
    ///
    /// If a check without `via` fails or cannot be made through the service, the server still
    /// counts as up if a check of its own address succeeds; the prober may have made this second
    /// check already. A server that is up, but fails repeatedly on the path of clients, becomes
    /// suspicious.
    async fn probe_path(&mut self) -> Result<Advice, ProbeError> {
        if !self.has_choice() {
            return self.prober.probe(&self.check).await;
        }
        let reason = self.reason_for_own_address();
        let begun = Instant::now();
        let result = match reason {
            Some(reason) => Err(ProbeError::Local(reason)),
            None => match self.prober.probe(&self.check).await {
                // Replies to clients bypass this host, so that its rp_filter does not affect
                // clients.
                Err(ProbeError::Server(fault)) if fault.code == Code::ReversePath => {
                    Err(ProbeError::Local(fault.text))
                }
                result => result,
            },
        };
        // The fault of the server on the path of clients, or the reason why this path is not used.
        let failed = match result {
            Ok(advice) => {
                self.note_path("", None);
                return Ok(advice);
            }
            Err(ProbeError::Local(why)) => {
                // The next checks do not wait for the timeout of a path that fails.
                if begun.elapsed() >= self.check.timeout / 2 {
                    self.own_address = Some((why.clone(), Instant::now() + OWN_ADDRESS));
                }
                Err(why)
            }
            // The VIP may have left this host during the check.
            Err(ProbeError::Server(fault)) => match self.reason_for_own_address() {
                Some(reason) => Err(reason),
                // The prober has checked the server's own address, too, without success.
                None if matches!(fault.code, Code::Silent | Code::NextHop | Code::Stalled) => {
                    self.note_path("", None);
                    return Err(ProbeError::Server(fault));
                }
                None => Ok(fault),
            },
        };
        let own = self.prober.probe(&self.check.of_own_address()).await;
        match (failed, own) {
            (Err(reason), own) => {
                self.note_path(&short(reason), None);
                own
            }
            (Ok(fault), Ok(advice)) => {
                self.note_path("", Some(fault.short()));
                Ok(advice)
            }
            (Ok(fault), Err(ProbeError::Server(_))) => {
                self.note_path("", None);
                Err(ProbeError::Server(fault))
            }
            (Ok(_), Err(local)) => Err(local),
        }
    }

    /// Records the reason why the check uses the server's own address, and the server's fault on
    /// the path of clients, if it has occurred [`CLIENT_FAILURES`] times in a row. A fault remains
    /// while this director has the VIP, and cannot check this path.
    fn note_path(&mut self, own_address: &str, fault: Option<Reason>) {
        let is_unchanged = !own_address.is_empty() && self.has_vip();
        let mut record = lock(&self.record);
        if !is_unchanged {
            self.client_failures = match fault {
                Some(_) => self.client_failures.saturating_add(1),
                None => 0,
            };
            record.set_client_path(fault.filter(|_| self.client_failures >= CLIENT_FAILURES));
        }
        if record.set_own_address(own_address) && !own_address.is_empty() {
            let server = self.check.server;
            tracing::debug!(%server, "lvsd checks the server's own address: {own_address}");
        }
    }

    /// Whether lvsd chooses the path of the check: the file does not set `via`, and a check through
    /// the service is possible.
    fn has_choice(&self) -> bool {
        self.check.via.is_some_and(|via| via.by_default)
    }

    /// The reason why a check without `via` uses the server's own address; `None` if it goes
    /// through the service, or if the file sets `via`.
    fn reason_for_own_address(&self) -> Option<String> {
        let via = self.check.via.filter(|via| via.by_default)?;
        if let Some((reason, until)) = &self.own_address
            && Instant::now() < *until
        {
            return Some(reason.clone());
        }
        let vip = via.virt.ip();
        if !self.has_vip() {
            return Some(format!("this director does not have {vip}"));
        }
        let serving = self.serving.borrow();
        let Some(serving) = serving.as_ref() else {
            return Some("the state of the dataplane is unknown".to_owned());
        };
        serving.obstacle.clone()
    }

    /// Processes the result of a check, and reports the server if its state, the reason or its
    /// advice has changed; false if the receiver was dropped. A failed check that needs the VIP is
    /// ignored while the dataplane does not answer for it.
    async fn take(&mut self, result: Result<Advice, ProbeError>) -> bool {
        let server = self.check.server;
        if result.is_err() && !self.has_way() {
            return true;
        }
        let (good, reason, advice) = match result {
            Ok(advice) => (true, Reason::default(), advice),
            Err(ProbeError::Server(reason)) => (false, reason.short(), Advice::NONE),
            Err(ProbeError::Local(reason)) => return self.take_unmade(short(reason)),
        };
        let unmade = std::mem::take(&mut self.unmade);
        if let Some(NotMade { since, .. }) = unmade.long() {
            let lasted = since.elapsed();
            tracing::info!(%server, "the server is checked again, after {lasted:.0?} without a check");
        }
        tracing::debug!(%server, good, %reason, "the server was checked");
        let serves = !good && self.state.up().is_none() && self.serves().await;
        let out = good && self.is_out();
        let changed = !out && self.state.observe(good, serves).is_some();
        if self.state.up() == Some(true) {
            self.out_until = None;
        }
        let advice_changed = self.advice.take(advice);
        let reason = match self.state.up() {
            Some(false) if out => self.out_reason(),
            Some(false) if good => {
                let rise = self.check.rise;
                format!(
                    "the last check succeeded; the server is up after {rise} consecutive successful checks"
                )
                .into()
            }
            Some(false) => reason,
            Some(true) | None => Reason::default(),
        };
        let known = self.state.up().is_some();
        let news = changed || (known && (advice_changed || reason != self.reason));
        !(news || unmade.long().is_some()) || self.report(reason, !good)
    }

    /// Records that the check could not be made. Reports this at the third consecutive time, and
    /// then whenever the reason changes; false if the receiver was dropped.
    fn take_unmade(&mut self, reason: String) -> bool {
        let before = self.unmade.long();
        if self.unmade.count == 0 {
            let server = self.check.server;
            tracing::warn!(%server, code = "check_not_made", "cannot check the server, whose state is unchanged: {reason}");
        }
        self.unmade.note(reason);
        self.unmade.long() == before || self.report(self.reason.clone(), false)
    }

    /// Reports the state of the server; false if the daemon is exiting.
    fn report(&mut self, reason: Reason, failed: bool) -> bool {
        self.reason.clone_from(&reason);
        let report = Report {
            check: Arc::clone(&self.check),
            task: self.task,
            up: self.state.up(),
            reason,
            failed,
            is_out: self.is_out(),
            advice: self.advice,
            not_made: self.unmade.long(),
        };
        self.sender.send(report).is_ok()
    }

    /// Waits until the state of the dataplane is known. Returns whether the dataplane sends
    /// connections to the server; false if its state stays unknown for [`DATAPLANE_LIMIT`].
    async fn serves(&mut self) -> bool {
        let asked = self.serving.wait_for(Option::is_some);
        match tokio::time::timeout(DATAPLANE_LIMIT, asked).await {
            Ok(Ok(serving)) => serving
                .as_ref()
                .is_some_and(|serving| serving.servers.contains(&self.check.server)),
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Whether a failed check counts: a check that the file sends through a service needs the VIP.
    fn has_way(&self) -> bool {
        !self.check.needs_vip() || self.has_vip()
    }

    /// Whether the dataplane answers for the virtual address of a through-VIP check; true for other
    /// checks, and if this is not known.
    fn has_vip(&self) -> bool {
        let serving = self.serving.borrow();
        let vips = serving.as_ref().and_then(|serving| serving.vips.as_ref());
        match (self.check.via, vips) {
            (Some(via), Some(vips)) => vips.contains(&via.virt.ip()),
            _ => true,
        }
    }

    /// Whether the last checks on the path of clients failed, and the next one decides whether the
    /// server is suspicious.
    fn is_client_path_uncertain(&self) -> bool {
        (1..CLIENT_FAILURES).contains(&self.client_failures)
            && self.reason_for_own_address().is_none()
    }

    /// Returns the seconds until the next check: the interval, or `fast_interval` while the state
    /// or the path of clients is uncertain, varied at random by `jitter`.
    fn pause(&self) -> f64 {
        let is_uncertain = self.state.is_uncertain() || self.is_client_path_uncertain();
        let pause = match is_uncertain {
            true => self.check.fast_interval,
            false => self.check.interval,
        };
        let spread = f64::from(self.check.jitter) / 100.0;
        pause.as_secs_f64() * (1.0 + spread * (2.0 * fraction() - 1.0))
    }
}

/// The end of the reason of a server that `passive = true` has taken out.
const PASSIVE: &str = " (passive)";

/// Time for which successful checks have no effect after clients got no answer: a check may succeed
/// although clients get no answer. The time equals the period in which unanswered clients are
/// counted.
const OUT: Duration = Duration::from_secs(60);

/// Number of consecutive failed checks on the path of clients after which a server is suspicious: a
/// single one may have met a dataplane that was stopped for a moment.
const CLIENT_FAILURES: u32 = 2;

/// Time for which a check uses the server's own address after an attempt through the service took
/// half of the timeout or longer, and could not be made.
const OWN_ADDRESS: Duration = Duration::from_secs(30);

/// lvsd reports a check as not made after this number of consecutive attempts. A shorter time
/// without checks is harmless.
const NOT_MADE_MIN: u32 = 3;

/// Maximum number of different reasons that are logged for a server that is down: a program may
/// print a new reason each time.
const REASONS_MAX: usize = 8;

/// Returns a pseudo-random number, at least 0 and less than 1.
fn fraction() -> f64 {
    let bits = RandomState::new().hash_one(0u8) >> 11;
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    let n = bits as f64;
    n / 9_007_199_254_740_992.0
}

#[cfg(test)]
mod tests;

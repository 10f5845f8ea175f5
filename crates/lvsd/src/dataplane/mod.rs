//! The connection to a dataplane: attaches to a running dataplane or starts one, applies the
//! desired state (the [`Goal`]), and replaces a lost dataplane.
//!
//! ```text
//! no dataplane ── connect ──▶ attached ── sync ──▶ in sync ──▶ sync again: a change, or every few seconds
//!     │  ▲                       ▲                    │
//!   start └── backoff ◀──────────┼──── lost ──────────┘
//!     └── wait until it answers
//! ```
//!
//! Functions may block for a short time, so the daemon calls them outside of its event loop.
//! Callers pass the present time.

pub mod control;
mod describe;
#[cfg(test)]
pub(crate) mod fake;
mod links;
mod memory;
pub mod process;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lvs_api::guidance::for_lvsd;
use lvs_core::api::{Info, ReasonCount, ServerInfo, ServiceId, ServiceInfo};
use lvs_core::attempts::RecentAttempts;
use tokio::time::Instant;

use crate::config::Dataplane;
use crate::dataplane::control::{CarryOut, ControlError, DataplaneControl, LOGGED_MAX, LastAnswer};
pub use crate::dataplane::describe::Planned;
use crate::dataplane::describe::{Names, planned_changes, without_dataplane};
pub use crate::dataplane::links::{Links, Proxied};
pub use crate::dataplane::memory::Given;
use crate::dataplane::memory::{Base, DrainChange, Memory};
use crate::facts::Addresses;
use crate::reconcile::{Actual, Desired, DesiredServer, Health, Plan, diff};

/// Time limit for the first answer of a started dataplane, unless `hang_limit` is longer.
const START_LIMIT: Duration = Duration::from_secs(15);
/// Interval of connection attempts to a starting dataplane.
const START_POLL: Duration = Duration::from_millis(20);
/// Interval at which lvsd compares a dataplane in sync with the desired state, because the
/// dataplane may have exited, or an operator may have changed it.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// Interval of checks whether the dataplane's process exists.
const POLL: Duration = Duration::from_millis(200);
/// Shortest and longest pause between starts of a dataplane that exits repeatedly.
const BACKOFF: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(200)..=Duration::from_secs(30);
/// Delay before lvsd replaces a dataplane that another program had started.
const FOREIGN_GRACE: Duration = Duration::from_secs(3);
/// Maximum time after a reload in which its changes are not logged one by one, but in one line.
const SETTLES: Duration = Duration::from_secs(60);
/// Lifetime after which an exited dataplane is restarted without a pause.
const STABLE: Duration = Duration::from_secs(60);

/// Default of `hang_limit`, the time without an answer after which a dataplane counts as hung.
const HANG_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for the answer to a stop request.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

/// The reason why no connection could be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No process listens on the control socket.
    #[error("{0}")]
    Absent(String),
    /// The connection is refused or fails for another reason, such as missing permission or another
    /// version.
    #[error("{0}")]
    Refused(String),
    /// A process listens, but does not answer.
    #[error("{why}")]
    Silent {
        /// The reason why there is no answer.
        why: String,
        /// The process id of the dataplane, if known.
        pid: Option<u32>,
    },
}

/// The host on which the daemon runs.
pub trait Host: Send + 'static {
    /// Connects to the dataplane. It is considered hung after `patience` without an answer.
    ///
    /// # Errors
    /// See [`ConnectError`].
    fn connect(&mut self, patience: Duration) -> Result<Box<dyn DataplaneControl>, ConnectError>;

    /// Starts a dataplane that continues to run after this process exits.
    ///
    /// # Errors
    /// The dataplane cannot be started; the text contains the reason and a fix.
    fn start(&mut self, options: &Dataplane) -> Result<(), String>;

    /// Text about the exit of the dataplane that [`start`](Self::start) started, which is returned
    /// once. `None` while it runs, and without such a dataplane.
    fn ended(&mut self) -> Option<String>;

    /// Kills a started dataplane that has never answered.
    fn kill(&mut self);

    /// Kills the hung dataplane `pid`, which an lvsd started, and waits until it has exited.
    ///
    /// # Errors
    /// No lvsd started the dataplane, or it does not exit; the text is the reason.
    fn end(&mut self, pid: u32) -> Result<(), String>;

    /// Whether the process `pid` still exists.
    fn alive(&mut self, pid: u32) -> bool;

    /// Whether an lvsd started the dataplane `pid`; that lvsd may have exited.
    fn started_by_us(&self, pid: u32) -> bool;

    /// Unique identity of the dataplane `pid`, because process ids are reused.
    fn identity(&self, pid: u32) -> String;

    /// Stores, for the next daemon, the settings that this daemon has made in the dataplane.
    fn remember(&mut self, given: &Given);

    /// The settings that an earlier daemon has made in the dataplane, as it stored them.
    fn recall(&self) -> Given;

    /// Reads the host's present addresses.
    fn addresses(&self) -> Addresses;

    /// Whether this is the proxy of this process, which is never started, lost or shared.
    fn is_proxy(&self) -> bool {
        false
    }
}

/// The desired state of the dataplane and of the proxy.
#[derive(Clone, Debug, Default)]
pub struct Goal {
    /// Desired state of the dataplane: services, servers and settings.
    pub desired: Desired,
    /// VIPs that the dataplane may take over. VIPs whose services are in an unknown state are
    /// missing, and stay if the dataplane already owns them.
    pub announced: BTreeSet<IpAddr>,
    /// Options for starting a dataplane.
    pub dataplane: Dataplane,
    /// Servers that an operator has set ready: a manual drain in the dataplane does not apply to
    /// them.
    pub readied: HashSet<(ServiceId, SocketAddr)>,
    /// Desired state of the proxy; `None` if no service is proxied.
    pub proxied: Option<Box<Proxied>>,
}

impl Goal {
    /// Whether the desired state requires a dataplane.
    fn needs_dataplane(&self) -> bool {
        let wanted = &self.desired;
        self.proxied.is_none()
            || !wanted.services.is_empty()
            || !wanted.vips.is_empty()
            || !wanted.sysctls.is_empty()
            || !wanted.port_marks.is_empty()
            || wanted.marks.is_some()
            || wanted.local.is_some()
            || wanted.sync.is_some()
    }
}

/// Result of a step of a link.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// The dataplane is in sync, apart from refused changes.
    InStep {
        /// State of the dataplane, and its differences from the desired state.
        found: Arc<Found>,
        /// Time until the next step.
        again: Duration,
    },
    /// New input arrived before all changes were made.
    Interrupted,
    /// No dataplane answers at present. The next step is due after this time.
    Waiting(Duration),
    /// The daemon must exit, for this reason: no dataplane has answered since the start, and none
    /// can be started or used, or the proxy cannot be started.
    Fatal(String),
}

/// State of a dataplane, and its differences from the desired state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Refusals as text: of the dataplane, and of lvsd to change services of other programs.
    pub refused: Vec<String>,
    /// Services whose address another program's service uses.
    pub conflicts: HashSet<ServiceId>,
    /// Servers whose weight another program has set to 0.
    pub drained: HashSet<(ServiceId, SocketAddr)>,
    /// Manual changes that lvsd keeps, as text.
    pub drift: Vec<String>,
    /// Number of lvsd's services that neither the file nor a source contains. They stay until etcd
    /// and Kubernetes have answered.
    pub unnamed: usize,
    /// The VIPs that the dataplane owns for lvsd.
    pub vips: BTreeSet<IpAddr>,
    /// Servers of lvsd's services.
    pub servers: HashMap<(ServiceId, SocketAddr), ObservedServer>,
    /// Report of the dataplane before the changes of this step.
    pub seen: Arc<DataplaneView>,
    /// Report of the proxy, if both dataplane and proxy have services.
    pub proxied: Arc<DataplaneView>,
}

/// Report of a dataplane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataplaneView {
    /// The state of the dataplane.
    pub info: Info,
    /// All services of the dataplane, of every owner, with their servers and counters.
    pub services: Vec<ServiceInfo>,
    /// Numbers of packets that were dropped or passed to the host, by reason.
    pub reasons: Vec<ReasonCount>,
    /// Version of the dataplane; empty before its first answer.
    pub version: String,
}

/// A server in a dataplane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObservedServer {
    /// The weight after the changes of this step.
    pub weight: i32,
    /// Number of active connections, before the changes of this step.
    pub active: u32,
    /// Number of inactive connections, before the changes of this step.
    pub inactive: u32,
    /// Number of consecutive unanswered connection attempts, if counted.
    pub unanswered: Option<u32>,
    /// Recent connection attempts of clients, and how many were unanswered.
    pub attempts: RecentAttempts,
    /// Time in microseconds until the server answers a new connection; `None` without a
    /// measurement.
    pub latency_us: Option<u64>,
}

/// Result of stopping the dataplane.
#[derive(Debug, PartialEq, Eq)]
pub enum Stopped {
    /// The dataplane accepted the request to stop, was killed during its start, or is not needed.
    /// From a dataplane that no lvsd started, lvsd's services and VIPs were removed instead.
    Asked,
    /// The dataplane had already exited; contains its exit status, if known.
    Already(String),
    /// The dataplane did not answer and was killed; contains the reason.
    Killed(String),
    /// The dataplane may still run or have lvsd's services; contains the reason.
    Not(String),
}

/// Connection to a dataplane, and the stored state about it.
pub struct Link {
    host: Box<dyn Host>,
    control: Option<Box<dyn DataplaneControl>>,
    /// The process id of the dataplane, if known.
    pid: Option<u32>,
    /// Whether an lvsd started the dataplane.
    ours: bool,
    /// VIPs that lvsd last set in this dataplane; `None` if it has not set any.
    stated: Option<BTreeSet<IpAddr>>,
    /// The time of the last answer of the dataplane.
    answered: LastAnswer,
    /// Time at which this dataplane was last compared with the desired state; `None` before the
    /// first comparison.
    compared: Option<Instant>,
    /// Result of the last comparison.
    found: Arc<Found>,
    memory: Memory,
    starts: Starts,
    /// The caller sets this flag for new input. A running step then ends early.
    news: Arc<AtomicBool>,
    /// Logged errors that still apply.
    complaints: HashSet<String>,
    /// The number of the last configuration, and the time until which its changes are not logged
    /// one by one: the log has one line about the start, the reload or the answers of sources.
    /// `None` when all changes have been made.
    settles: (u64, Option<Instant>),
}

/// Starts of dataplanes, and the pauses between them.
struct Starts {
    /// Whether lvsd never starts a dataplane.
    attach: bool,
    /// Whether a dataplane has ever answered. Afterwards, no fault of a dataplane stops lvsd.
    ever: bool,
    /// The time at which lvsd last connected to a dataplane.
    connected: Instant,
    /// Start time of a dataplane that has not answered yet; `None` if none is starting.
    starting: Option<Instant>,
    /// Earliest time of the next start.
    not_before: Instant,
    /// Pause after the next start.
    backoff: Duration,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("connected", &self.control.is_some())
            .field("ours", &self.ours)
            .finish_non_exhaustive()
    }
}

impl Link {
    /// Creates a link without a connection. With `attach`, it waits for a running dataplane, and
    /// starts none.
    pub fn new(host: Box<dyn Host>, attach: bool, now: Instant) -> Self {
        Self {
            host,
            control: None,
            pid: None,
            ours: false,
            stated: None,
            answered: LastAnswer::default(),
            compared: None,
            found: Arc::default(),
            memory: Memory::default(),
            starts: Starts {
                attach,
                ever: false,
                connected: now,
                starting: None,
                not_before: now,
                backoff: *BACKOFF.start(),
            },
            news: Arc::default(),
            complaints: HashSet::new(),
            settles: (0, None),
        }
    }

    /// Reads the host's present addresses.
    pub fn addresses(&self) -> Addresses {
        self.host.addresses()
    }

    /// The flag by which a caller ends a running step early, because new input has arrived.
    pub fn news(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.news)
    }

    /// Whether a dataplane answers. With `look`, connects to a running dataplane if necessary, but
    /// starts none.
    fn is_there(&mut self, look: bool, now: Instant) -> bool {
        if self.control.is_none()
            && look
            && let Ok(control) = self.host.connect(HANG_LIMIT)
        {
            self.control = Some(control);
            self.starts.connected = now;
            self.greet(false);
            self.starts.ever = true;
        }
        self.control.is_some()
    }

    /// Makes one step towards `goal`. `changed`: the goal differs from that of the last step.
    pub fn step(&mut self, goal: &Goal, changed: bool, now: Instant) -> Step {
        if let Some(pid) = self.pid
            && !self.host.alive(pid)
        {
            self.lost("its process has exited", now);
        } else if let Some(then) = self.compared
            && !changed
            && now.duration_since(then) < LOOK_AGAIN
        {
            return self.in_step();
        }
        if self.control.is_none()
            && let Err(step) = self.connect(goal, now)
        {
            return step;
        }
        self.news.store(false, Ordering::Release);
        match self.sync(goal, now) {
            Ok(None) => Step::Interrupted,
            Ok(Some(_)) => {
                self.compared = Some(now);
                self.in_step()
            }
            Err(ControlError::Silent(why)) => self.hangs(why, self.pid, now),
            Err(lost) => {
                self.lost(&lost.why(), now);
                Step::Waiting(Duration::ZERO)
            }
        }
    }

    fn in_step(&self) -> Step {
        Step::InStep {
            found: Arc::clone(&self.found),
            again: POLL,
        }
    }

    /// Returns the manual changes since the last call, as text.
    pub fn take_manual_changes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.memory.manual_changes)
    }

    /// Process id of the dataplane, if known, and whether it answers.
    pub fn contact(&self) -> (Option<u32>, bool) {
        (self.pid, self.control.is_some())
    }

    /// Time of the dataplane's last answer, which is also updated during a step.
    pub fn last_answer(&self) -> LastAnswer {
        self.answered.clone()
    }

    /// Handles a hung dataplane: kills it if an lvsd started it. Only an operator may stop any
    /// other dataplane.
    fn hangs(&mut self, why: String, pid: Option<u32>, now: Instant) -> Step {
        let ours = pid.filter(|pid| self.host.started_by_us(*pid));
        if let Some(pid) = ours {
            tracing::error!("{why}; lvsd ends the dataplane (pid {pid}), and starts another one");
            match self.host.end(pid) {
                Ok(()) => {
                    self.lost("it did not answer and was killed", now);
                    self.starts.starting = None;
                    self.starts.not_before = now;
                    return Step::Waiting(Duration::ZERO);
                }
                Err(error) => self.complain(format!("the dataplane hangs, and {error}")),
            }
        } else {
            let pid = pid.map_or_else(|| "PID".to_owned(), |pid| pid.to_string());
            self.complain(format!(
                "{why}. Another program started it, so lvsd does not kill it. While it hangs, packets of services are lost: the host's network stack does not receive them. Kill it with `kill -9 {pid}`, and let its unit supervise it (WatchdogSec=)"
            ));
        }
        self.control = None;
        self.stated = None;
        self.compared = None;
        self.give_up_or_wait(why, now)
    }

    fn lost(&mut self, why: &str, now: Instant) {
        let how = self.host.ended();
        tracing::error!(
            event = "dataplane_lost",
            "the dataplane is lost: {}; {}",
            how.as_deref().unwrap_or(why),
            without_dataplane(how.as_deref(), &self.found.seen)
        );
        self.control = None;
        self.stated = None;
        self.pid = None;
        self.compared = None;
        if now.duration_since(self.starts.connected) >= STABLE {
            self.starts.backoff = *BACKOFF.start();
            self.starts.not_before = now;
        }
        if !self.ours {
            // The service manager that started the dataplane restarts it; two dataplanes must not
            // compete for the socket.
            self.starts.not_before = self.starts.not_before.max(now + FOREIGN_GRACE);
        }
    }

    /// Connects to the dataplane. If none is running, starts one, unless only a running dataplane
    /// may be used. Without a connection, returns the step to report.
    fn connect(&mut self, goal: &Goal, now: Instant) -> Result<(), Step> {
        let patience = goal.dataplane.hang_limit.unwrap_or(HANG_LIMIT);
        let absent = match self.host.connect(patience) {
            Ok(control) => {
                self.control = Some(control);
                self.starts.connected = now;
                let started = self.starts.starting.take().is_some();
                self.greet(started);
                self.starts.ever = true;
                return Ok(());
            }
            Err(ConnectError::Refused(why)) => return Err(self.give_up_or_wait(why, now)),
            // A starting dataplane may take the whole time limit of a start.
            Err(ConnectError::Silent { why, .. }) if self.starts.starting.is_some() => why,
            Err(ConnectError::Silent { why, pid }) => return Err(self.hangs(why, pid, now)),
            Err(ConnectError::Absent(why)) => why,
        };
        let ended = self.host.ended();
        if let Some(since) = self.starts.starting {
            if let Some(how) = ended {
                self.starts.starting = None;
                let why = format!("the dataplane did not start: {how}; see its own message above");
                return Err(self.give_up_or_wait(why, now));
            }
            let limit = START_LIMIT.max(patience);
            if now.duration_since(since) < limit {
                return Err(Step::Waiting(START_POLL));
            }
            self.starts.starting = None;
            self.host.kill();
            let why =
                format!("the dataplane was started and does not answer after {limit:?}: {absent}");
            return Err(self.give_up_or_wait(why, now));
        }
        if self.starts.attach {
            self.complain(format!(
                "no dataplane is running, and lvsd does not start one because of --attach: {absent}; start it with `systemctl start lvs-dataplane`"
            ));
            return Err(Step::Waiting(POLL));
        }
        if now < self.starts.not_before {
            // Another program may start a dataplane meanwhile.
            return Err(Step::Waiting((self.starts.not_before - now).min(POLL)));
        }
        self.starts.not_before = now + self.starts.backoff;
        self.starts.backoff = (self.starts.backoff * 2).min(*BACKOFF.end());
        match self.host.start(&goal.dataplane) {
            Ok(()) => {
                self.starts.starting = Some(now);
                Err(Step::Waiting(START_POLL))
            }
            Err(why) => Err(self.give_up_or_wait(why, now)),
        }
    }

    fn give_up_or_wait(&mut self, why: String, now: Instant) -> Step {
        if !self.starts.ever {
            return Step::Fatal(why);
        }
        self.complain(why);
        Step::Waiting((self.starts.not_before.max(now) - now).max(Duration::from_millis(500)))
    }

    /// Identifies and logs the dataplane to which lvsd has just connected, and loads the stored
    /// settings that lvsd has made in it. `started` is true if lvsd has started it.
    fn greet(&mut self, started: bool) {
        let info = self.control.as_mut().map(|control| control.info());
        if let Some(result) = &info {
            self.answered.note(result);
        }
        let Some(Ok(info)) = info else {
            return;
        };
        self.pid = (info.pid != 0).then_some(info.pid);
        self.ours = started || self.host.started_by_us(info.pid);
        // The log has the numbers of the changes in another dataplane, also during a reload.
        self.settles.1 = None;
        let identity = self.host.identity(info.pid);
        self.memory.begin(Given::of(identity, self.host.recall()));
        if self.host.is_proxy() {
            return;
        }
        let mut interfaces = String::new();
        for i in &info.interfaces {
            let separator = if interfaces.is_empty() { "" } else { ", " };
            let _ = write!(interfaces, "{separator}{} ({})", i.name, i.backend);
        }
        let how = if started { "started" } else { "attached to" };
        tracing::info!(
            event = "dataplane_found",
            pid = info.pid,
            interfaces,
            connections = info.connections,
            "{how} the dataplane"
        );
        if !started && !self.ours {
            tracing::info!(
                "this dataplane was not started by lvsd: [dataplane] does not apply to it, and `lvsd stop --all` does not stop it"
            );
        }
    }

    /// Applies the differences from `goal`. Returns the number of refused changes; `None` if
    /// interrupted.
    fn sync(&mut self, goal: &Goal, now: Instant) -> Result<Option<usize>, ControlError> {
        let mut refusals = Vec::new();
        let Some((mut desired, mut actual, mut seen)) = self.look(goal, &mut refusals)? else {
            // Without the list of services, lvsd changes nothing.
            return Ok(Some(self.remember(refusals)));
        };
        seen.reasons = self.reasons(&mut refusals)?;
        let base = Base::of(&actual);
        let memory = &mut self.memory;
        let (drained, changed) = memory.respect(&mut desired, &actual, &base, &goal.readied);
        if changed {
            self.host.remember(&memory.given);
        }
        let overdue = self
            .memory
            .leaving
            .iter()
            .filter(|(_, until)| now >= **until);
        actual.overdue = overdue.map(|(key, _)| *key).collect();
        let plan = diff(&desired, &actual);
        let until = |key, limit| {
            (
                key,
                self.memory
                    .leaving
                    .get(&key)
                    .copied()
                    .unwrap_or(now + limit),
            )
        };
        let leaving = plan.draining.iter();
        self.memory.leaving = leaving
            .map(|&(service, server, limit)| until((service, server), limit))
            .collect();
        let names = Names::new(&desired);
        log_drained(&names, &drained);
        for id in &plan.conflicts {
            refusals.push(format!(
                "{} exists and was not made by lvsd, so it is unchanged; delete it (lvsadm -D) or set manage_all_services = true in [lvsd]",
                names.service_with_place(id)
            ));
        }
        self.settles = self.settles_after(&desired, &plan, now);
        let control = connected(&mut self.control)?;
        let mut work = CarryOut::new(control, &self.answered, &names, base);
        // At the start, few changes have a line each, as those that no reload has caused.
        let is_start = desired.generation == 1 && plan.changes.len() <= LOGGED_MAX;
        work.is_quiet = self.settles.1.is_some_and(|end| now < end) && !is_start;
        let carried = work.run(&plan.changes, &self.news);
        refusals.append(&mut work.refusals);
        let CarryOut { own_vips, base, .. } = work;
        let mut found = self.found(&desired, &actual, &plan, &base);
        self.memory.base = Some(base);
        found.refused = refusals.clone();
        seen.services = std::mem::take(&mut actual.services);
        found.seen = Arc::new(seen);
        self.found = Arc::new(found);
        if let Some(vips) = own_vips {
            self.stated = Some(vips);
        }
        let complete = carried?;
        let refused = self.remember(refusals);
        Ok(complete.then_some(refused))
    }

    /// The new value of `settles` in a step that makes the changes of `plan`.
    fn settles_after(
        &self,
        desired: &Desired,
        plan: &Plan,
        now: Instant,
    ) -> (u64, Option<Instant>) {
        let (before, end) = self.settles;
        let is_checked = |server: &DesiredServer| server.health != Health::Unknown;
        let mut services = desired.services.iter();
        let is_complete = plan.changes.is_empty()
            && services.all(|service| service.servers.iter().all(is_checked));
        // A change that the dataplane refuses, or a check that cannot be made, stays.
        let end = match before == desired.generation {
            true => end,
            false => Some(now + SETTLES),
        };
        (desired.generation, end.filter(|_| !is_complete))
    }

    /// Returns the findings of a step; `base` is the state of the dataplane after its changes.
    fn found(&self, desired: &Desired, actual: &Actual, plan: &Plan, base: &Base) -> Found {
        let services = actual.services.iter();
        let seen = services.flat_map(|service| {
            let servers = service.servers.iter();
            servers.map(|server| ((service.service, server.server), server))
        });
        let seen: HashMap<(ServiceId, SocketAddr), &ServerInfo> = seen.collect();
        let servers = base.servers().map(|(key, config)| {
            let seen = seen.get(&key).map(|server| ObservedServer {
                weight: config.weight,
                active: server.active,
                inactive: server.inactive,
                unanswered: server.unanswered,
                attempts: server.attempts,
                latency_us: server.latency_us,
            });
            let new = || ObservedServer {
                weight: config.weight,
                ..ObservedServer::default()
            };
            (key, seen.unwrap_or_else(new))
        });
        Found {
            conflicts: plan.conflicts.iter().copied().collect(),
            drained: self.memory.given.drained().iter().copied().collect(),
            drift: self.memory.drift.in_words(desired),
            unnamed: plan.unnamed.len(),
            vips: base.vips.clone(),
            servers: servers.collect(),
            ..Found::default()
        }
    }

    /// Connects, and lists the servers in the dataplane.
    ///
    /// # Errors
    /// The connection or the request fails; the text is the reason.
    pub fn servers(
        &mut self,
        patience: Option<Duration>,
    ) -> Result<HashSet<(ServiceId, SocketAddr)>, String> {
        let control = self.host.connect(patience.unwrap_or(HANG_LIMIT));
        let control = self.control.insert(control.map_err(|e| e.to_string())?);
        let services = control.services().map_err(|e| e.to_string())?;
        Ok(services
            .iter()
            .flat_map(|s| s.servers.iter().map(|server| (s.service, server.server)))
            .collect())
    }

    /// Returns texts about the changes of a step towards `goal`, and about their effects on
    /// connections.
    ///
    /// # Errors
    /// No dataplane is connected, or it does not answer, or refuses to list its services.
    pub fn plan(
        &mut self,
        goal: &Goal,
        gone: &HashMap<ServiceId, String>,
    ) -> Result<Planned, String> {
        let info = self.control.as_mut().map(|control| control.info());
        let pid = info.and_then(Result::ok).map_or(0, |info| info.pid);
        self.memory.given = Given::of(self.host.identity(pid), self.host.recall());
        let mut refusals = Vec::new();
        let looked = self.look(goal, &mut refusals);
        let looked = looked.map_err(ControlError::why)?;
        let Some((mut desired, actual, _)) = looked else {
            return Err(refusals.join("; "));
        };
        let base = Base::of(&actual);
        let memory = &mut self.memory;
        memory.respect(&mut desired, &actual, &base, &goal.readied);
        Ok(planned_changes(&desired, &actual, gone))
    }

    /// Reads the dataplane's state, and returns it with the desired state, whose VIPs are limited
    /// to those that lvsd may set now. Adds refusals of the dataplane to `refusals`. Returns `None`
    /// if it refuses to list services.
    ///
    /// # Errors
    /// The dataplane is not connected or does not answer.
    fn look(
        &mut self,
        goal: &Goal,
        refusals: &mut Vec<String>,
    ) -> Result<Option<(Desired, Actual, DataplaneView)>, ControlError> {
        let control = connected(&mut self.control)?;
        let Some(services) = lost_only(control.services(), &self.answered, refusals)? else {
            return Ok(None);
        };
        let mut actual = Actual {
            services,
            ..Actual::default()
        };
        // Packet path and keeper must answer this request, so that it detects a hang.
        let info = lost_only(control.info(), &self.answered, refusals)?.unwrap_or_default();
        let mut desired = goal.desired.clone();
        if goal.dataplane.own_vips {
            desired.vips.clear();
        } else {
            let owned: BTreeSet<IpAddr> = info.own_vips.iter().copied().collect();
            actual.vips = match &self.stated {
                // Other programs may also let the dataplane own VIPs; these are not lvsd's.
                Some(stated) => stated.intersection(&owned).copied().collect(),
                None => owned,
            };
            let may = |vip: &IpAddr| goal.announced.contains(vip) || actual.vips.contains(vip);
            desired.vips.retain(may);
        }
        actual.marks = lost_only(control.marks(), &self.answered, refusals)?.unwrap_or_default();
        actual.filters =
            lost_only(control.filters(), &self.answered, refusals)?.unwrap_or_default();
        if goal.desired.local.is_some() {
            actual.local =
                lost_only(control.local(), &self.answered, refusals)?.unwrap_or_default();
        }
        if goal.desired.sync.is_some() || self.memory.given.has_daemons() {
            actual.daemons =
                lost_only(control.daemons(), &self.answered, refusals)?.unwrap_or_default();
        }
        if !goal.desired.sysctls.is_empty() || self.memory.given.has_sysctls() {
            let all = lost_only(control.sysctls(), &self.answered, refusals)?.unwrap_or_default();
            actual.sysctls = all.into_iter().map(|s| (s.name, s.value)).collect();
        }
        let seen = DataplaneView {
            info,
            version: control.version(),
            ..DataplaneView::default()
        };
        Ok(Some((desired, actual, seen)))
    }

    /// Reads the packet counters by reason.
    fn reasons(&mut self, refusals: &mut Vec<String>) -> Result<Vec<ReasonCount>, ControlError> {
        let control = connected(&mut self.control)?;
        let mut reasons = lost_only(control.drops(), &self.answered, refusals)?.unwrap_or_default();
        for_lvsd(&mut reasons);
        Ok(reasons)
    }

    fn complain(&mut self, complaint: String) {
        if !self.complaints.contains(&complaint) {
            tracing::error!("{complaint}");
            self.complaints.insert(complaint);
        }
    }

    /// Stores refusals, and logs new ones. Returns their number.
    fn remember(&mut self, refusals: Vec<String>) -> usize {
        let count = refusals.len();
        for refusal in &refusals {
            if !self.complaints.contains(refusal) {
                tracing::error!("{refusal}");
            }
        }
        self.complaints = refusals.into_iter().collect();
        count
    }

    /// Stops the dataplane if an lvsd started it. From any other dataplane, removes only lvsd's
    /// services and VIPs. Connects first if necessary.
    pub fn stop(&mut self, now: Instant) -> Stopped {
        if self.control.is_none() {
            if self.starts.starting.is_some() {
                self.host.kill();
                return Stopped::Asked;
            }
            if let Some(done) = self.find() {
                return done;
            }
        }
        let Some(control) = self.control.as_mut() else {
            return Stopped::Asked;
        };
        if self.ours {
            control.set_patience(STOP_PATIENCE);
            let asked = control.stop();
            self.control = None;
            return match asked {
                Ok(()) => Stopped::Asked,
                Err(ControlError::Silent(why)) => match self.pid.map(|pid| self.host.end(pid)) {
                    Some(Ok(())) => Stopped::Killed(why),
                    Some(Err(error)) => Stopped::Not(format!("the dataplane hangs, and {error}")),
                    None => Stopped::Not(why),
                },
                Err(error) => self.gone().map_or_else(
                    || Stopped::Not(format!("the dataplane does not stop: {error}")),
                    Stopped::Already,
                ),
            };
        }
        // An empty goal that adopts nothing deletes only lvsd's services.
        match self.sync(&Goal::default(), now) {
            Ok(_) => Stopped::Asked,
            Err(lost) => self.gone().map_or_else(
                || {
                    Stopped::Not(format!(
                        "the services of lvsd may still be in the dataplane: {}",
                        lost.why()
                    ))
                },
                Stopped::Already,
            ),
        }
    }

    /// Connects in order to stop the dataplane, and returns `None`. Returns a result if no
    /// dataplane runs, or a connection is impossible; a hung dataplane that an lvsd started is
    /// killed.
    fn find(&mut self) -> Option<Stopped> {
        match self.host.connect(STOP_PATIENCE) {
            Ok(control) => {
                self.control = Some(control);
                self.greet(false);
                None
            }
            Err(ConnectError::Absent(why)) => {
                Some(Stopped::Already(self.host.ended().unwrap_or(why)))
            }
            Err(ConnectError::Refused(why)) => Some(Stopped::Not(why)),
            Err(ConnectError::Silent { why, pid }) => {
                let ours = pid.filter(|pid| self.host.started_by_us(*pid));
                Some(match ours.map(|pid| self.host.end(pid)) {
                    Some(Ok(())) => Stopped::Killed(why),
                    Some(Err(error)) => Stopped::Not(format!("{why}, and {error}")),
                    None => Stopped::Not(why),
                })
            }
        }
    }

    /// Text about the exit of a dataplane that no longer answers; `None` if it may still run.
    fn gone(&mut self) -> Option<String> {
        if let Some(how) = self.host.ended() {
            return Some(how);
        }
        let left = self.pid.is_some_and(|pid| !self.host.alive(pid));
        // An exiting process closes its socket before it exits.
        (left || self.absent()).then(|| "its process has exited".to_owned())
    }

    /// Whether no process listens on the socket.
    fn absent(&mut self) -> bool {
        matches!(
            self.host.connect(STOP_PATIENCE),
            Err(ConnectError::Absent(_))
        )
    }

    /// Whether a dataplane that an lvsd started still runs.
    pub fn still_running(&mut self) -> bool {
        self.ours && self.host.ended().is_none() && !self.absent()
    }

    /// Kills the dataplane if an lvsd started it.
    ///
    /// # Errors
    /// Its process is unknown, no lvsd started it, or it does not exit; the text is the reason.
    pub fn end(&mut self) -> Result<(), String> {
        match self.pid {
            Some(pid) if self.ours => self.host.end(pid),
            _ => Err("its process is unknown, or was not started by lvsd".to_owned()),
        }
    }

    /// Text that names the dataplane in messages, with its process id if known.
    pub fn in_words(&self) -> String {
        match self.pid {
            Some(pid) => format!("the dataplane (pid {pid})"),
            None => "the dataplane".to_owned(),
        }
    }
}

/// Logs which servers another program has drained or undrained.
fn log_drained(names: &Names<'_>, changes: &[DrainChange]) {
    for ((service, server), is) in changes {
        let service = names.service_in_words(service);
        if *is {
            tracing::warn!(
                "{server} of {service} was set to weight 0 by hand; the weight stays 0 until an operator changes it (`lvsadm undrain SERVICE SERVER`), or the server is removed from the file"
            );
        } else {
            tracing::info!("{server} of {service} is no longer drained by hand");
        }
    }
}

fn connected(
    control: &mut Option<Box<dyn DataplaneControl>>,
) -> Result<&mut dyn DataplaneControl, ControlError> {
    match control {
        Some(control) => Ok(control.as_mut()),
        None => Err(ControlError::Lost("lvsd is not connected to it".to_owned())),
    }
}

/// Returns the value of an answer, or `None` for a refusal, which is added to `refusals`. Any other
/// error ends the step.
fn lost_only<T>(
    result: Result<T, ControlError>,
    answered: &LastAnswer,
    refusals: &mut Vec<String>,
) -> Result<Option<T>, ControlError> {
    answered.note(&result);
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ControlError::Refused(failure)) => {
            refusals.push(failure.message);
            Ok(None)
        }
        Err(lost) => Err(lost),
    }
}

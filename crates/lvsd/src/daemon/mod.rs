//! The daemon's loop: it computes the [`Goal`] from configuration, discovered servers, health and
//! overrides, and brings the dataplane to it step by step.
//!
//! ```text
//! file, sources ────▶ Reloader ──┐
//! checks ────────────────────────┤
//! operators, keepalived ─────────┼──▶ Inputs ──▶ Policy ──▶ desired() ──▶ Goal ──▶ Links::step
//! dataplane ─────────────────────┘                 │                                  │
//!                                                  └──────────▶ Reporter ◀────────────┘
//! ```

mod inputs;
mod policy;
mod reloader;
mod reporter;
mod requests;
mod status;
mod suspicion;
#[cfg(test)]
pub(crate) mod tests;
mod waiting;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lvs_api::daemon::LoadStatus;
use lvs_api::words::counted;
use lvs_core::api::Confinement;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::admin::Admin;
use crate::channels::{Events, Request};
use crate::cluster::{self, Cluster};
use crate::config::{self, Config, Service};
use crate::counters::Counters;
use crate::dataplane::{Goal, Host, Links, Proxied, Step};
use crate::desired::{Overrides, desired};
use crate::expand::{Expanded, expand};
use crate::health::{self, Checks, Prober};
use crate::last_good;
use crate::notify::Notify;
use crate::sources::Sources;
use crate::watchdog::Pulse;
use inputs::{Inputs, Observed};
use policy::Policy;
use reloader::{Done, Reloader};
pub use reloader::{loaded_at_start, plan, refused, too_much_away};
use reporter::{Reporter, log_reason};
use waiting::Signals;

/// Time limit for the dataplane to remove services when lvsd exits.
const OMEGA_LIMIT: Duration = Duration::from_secs(10);

/// A signal that the daemon receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Reload the file (SIGHUP).
    Reload,
    /// Reload the file, even if that removes many servers (SIGUSR1).
    ForcedReload,
    /// Exit, and let the dataplane keep its configuration, except services with `remove_on_exit`
    /// (SIGTERM).
    Stop,
    /// Stop the dataplane and lvsd (SIGINT).
    StopAll,
}

/// The options and connections with which the daemon starts.
#[derive(Debug)]
pub struct Options {
    /// The path of the configuration, for reloads.
    pub path: PathBuf,
    /// Wait for a running dataplane instead of starting one.
    pub attach: bool,
    /// The result of reading the configuration file at start.
    pub loaded: LoadStatus,
    /// The path of the last good configuration; `None` if it is not stored.
    pub last_good: Option<PathBuf>,
    /// The connection to the service manager.
    pub notify: Notify,
    /// The path of the file with the administrative states of servers; `None` if they are not
    /// stored.
    pub admin: Option<PathBuf>,
    /// The requests of clients over the control socket and over HTTP; `None` without such clients.
    pub requests: Option<mpsc::Receiver<Request>>,
    /// The stream of events.
    pub events: Events,
    /// The daemon's counters.
    pub counters: Arc<Counters>,
    /// The channel that sends `[api]` settings to the HTTP server; `None` without an HTTP server.
    pub api: Option<watch::Sender<config::Api>>,
    /// The runtime of the health checks: a separate thread, so that the main loop does not delay
    /// them. `None` runs the checks in the main loop's thread.
    pub checks: Option<Handle>,
    /// The paths and connections for VRRP, announcements and maintenance. `None` disables VRRP and
    /// announcements, and the maintenance is not stored.
    pub cluster: Option<cluster::ClusterPaths>,
    /// The path of the stored answers of DNS, etcd and Kubernetes; `None` if they are not stored.
    pub sources: Option<PathBuf>,
    /// The heartbeat of the main loop, renewed in each iteration.
    pub turns: Pulse,
    /// The sandbox of the process.
    pub confinement: Confinement,
}

impl Options {
    /// Options that contain only the path of the configuration.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            attach: false,
            loaded: loaded_at_start(),
            last_good: None,
            notify: Notify::default(),
            admin: None,
            requests: None,
            events: Events::default(),
            counters: Arc::default(),
            api: None,
            checks: None,
            cluster: None,
            sources: None,
            turns: Pulse::default(),
            confinement: Confinement::default(),
        }
    }
}

struct Daemon<P> {
    inputs: Inputs<P>,
    policy: Policy,
    reporter: Reporter,
    reloader: Reloader,
    /// The desired state that was last passed to the dataplane, or will be passed next.
    goal: Arc<Goal>,
    /// Whether the desired state has not been passed to the dataplane yet, or its inputs have
    /// changed.
    changed: bool,
    /// For each override that the dataplane has not applied yet, the sender that reports the
    /// application. A sender that is dropped without a report means that no dataplane answers.
    unapplied: Vec<oneshot::Sender<()>>,
    /// The time of the next step.
    next: Instant,
    /// The results of health checks.
    reports: mpsc::UnboundedReceiver<health::Report>,
    requests: Option<mpsc::Receiver<Request>>,
    api: Option<watch::Sender<config::Api>>,
    turns: Pulse,
    confinement: Confinement,
}

/// An event of the daemon's loop.
enum Event {
    /// The daemon must exit.
    Stop {
        /// Whether the dataplane must exit as well.
        all: bool,
    },
    /// The file must be read again.
    Reload {
        /// Whether the reload may remove any number of servers.
        forced: bool,
    },
    /// The file or the sources have been read.
    Read(Box<Done>),
    /// DNS, etcd or Kubernetes has a new answer.
    Sources,
    /// An input has changed.
    Input(Input),
    /// The next step towards the desired state is due.
    Step,
}

/// An event that the loop also handles while the dataplane executes a step.
enum Input {
    /// keepalived has reported a change, or the dataplane's readiness or announcements have
    /// changed.
    Cluster,
    /// A health check has reported a change.
    Check(health::Report),
    /// A client has sent a request.
    Request(Request),
}

/// Runs until a signal stops the daemon.
///
/// # Errors
/// No dataplane has answered since the start and none can be started, the proxy cannot be started,
/// or the dataplane does not answer or exit while the daemon stops; the text is the reason.
pub async fn run<P: Prober>(
    options: Options,
    config: Config,
    host: impl Host,
    prober: P,
    signals: mpsc::Receiver<Signal>,
) -> Result<(), String> {
    let signals = Signals::new(signals);
    let link = Links::new(Box::new(host), options.attach, Instant::now());
    let mut daemon = Daemon::new(options, prober);
    let settled = daemon.inputs.admin.settled();
    let gathered = daemon.inputs.sources.gathered();
    let expanded = expand(&config, &gathered);
    daemon.reloader.gathered = gathered;
    daemon.load(Arc::new(config), expanded, &link);
    let result = turn(daemon, Box::new(link), signals).await;
    settled.await;
    result
}

/// Handles events until a signal ends the loop.
async fn turn<P: Prober>(
    mut daemon: Daemon<P>,
    mut link: Box<Links>,
    mut signals: Signals,
) -> Result<(), String> {
    let all = loop {
        daemon.turns.beat();
        match daemon.next_event(&mut signals).await {
            Event::Stop { all } => break all,
            Event::Reload { forced } => daemon.reload(forced),
            Event::Read(done) => daemon.take_done(*done, &link),
            Event::Sources => daemon.take_sources(),
            Event::Input(input) => daemon.take(input),
            Event::Step => match daemon.step(link, &mut signals).await? {
                Some(back) => link = back,
                None => {
                    daemon.farewell(false, 0);
                    return Ok(());
                }
            },
        }
    };
    daemon.farewell(all, link.proxied_connections());
    let Some(link) = daemon.omega(all, link, &mut signals).await? else {
        return Ok(());
    };
    if all {
        waiting::stop(link).await
    } else {
        Ok(())
    }
}

/// Waits for the next input. Reports of checks precede requests, because there may be many
/// requests.
async fn next_input(
    cluster: &mut Cluster,
    reports: &mut mpsc::UnboundedReceiver<health::Report>,
    requests: &mut Option<mpsc::Receiver<Request>>,
) -> Input {
    tokio::select! {
        biased;
        () = cluster.changed() => Input::Cluster,
        Some(report) = reports.recv() => Input::Check(report),
        Some(request) = requests::next(requests) => Input::Request(request),
    }
}

/// Stops the dataplane while no daemon runs. If another program has started the dataplane, only the
/// services and VIPs of lvsd are removed from it.
///
/// # Errors
/// The dataplane does not exit; the text is the reason.
pub async fn stop_dataplane(host: impl Host) -> Result<(), String> {
    let link = Links::new(Box::new(host), true, Instant::now());
    waiting::stop(Box::new(link)).await
}

impl<P: Prober> Daemon<P> {
    fn new(options: Options, prober: P) -> Self {
        let now = Instant::now();
        let counters = Arc::clone(&options.counters);
        let (checks, reports) = Checks::counted_in(prober, options.checks, counters);
        Self {
            inputs: Inputs {
                config: Arc::default(),
                expanded: Expanded::default(),
                vips: BTreeSet::new(),
                generation: 0,
                loaded: now,
                checks,
                admin: Admin::recall(options.admin),
                readied: HashSet::new(),
                cluster: Cluster::recall(options.cluster),
                sources: Sources::recall(options.sources),
                dataplane: Observed::default(),
                suspects: HashMap::new(),
            },
            policy: Policy::default(),
            reporter: Reporter::new(options.events, options.counters, options.notify),
            reloader: Reloader::new(options.path, options.last_good, options.loaded),
            goal: Arc::default(),
            changed: true,
            unapplied: Vec::new(),
            next: now,
            reports,
            requests: options.requests,
            api: options.api,
            turns: options.turns,
            confinement: options.confinement,
        }
    }

    async fn next_event(&mut self, signals: &mut Signals) -> Event {
        let inputs = &mut self.inputs;
        tokio::select! {
            biased;
            signal = signals.next() => match signal {
                Signal::Reload => Event::Reload { forced: false },
                Signal::ForcedReload => Event::Reload { forced: true },
                Signal::Stop => Event::Stop { all: false },
                Signal::StopAll => Event::Stop { all: true },
            },
            Some(done) = self.reloader.done() => Event::Read(done),
            () = inputs.sources.changed() => Event::Sources,
            input = next_input(&mut inputs.cluster, &mut self.reports, &mut self.requests) => {
                Event::Input(input)
            }
            () = tokio::time::sleep_until(self.next) => Event::Step,
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Cluster => self.take_cluster(),
            Input::Check(report) => self.take_reports(report),
            Input::Request(request) => self.take_request(request),
        }
    }

    /// Handles changes that keepalived reports, and changes of the dataplane's readiness and
    /// announcements.
    fn take_cluster(&mut self) {
        let before = self.goal.desired.vips.is_empty();
        for news in self.inputs.cluster.take() {
            self.reporter.cluster(news);
            self.goal_changed();
        }
        // The director may have become ready, or may no longer be ready.
        if before == self.inputs.cluster.may_own() {
            self.goal_changed();
        }
    }

    /// Processes a report of a check, and all reports that have arrived since, in one pass.
    fn take_reports(&mut self, report: health::Report) {
        let mut report = Some(report);
        let mut changed = false;
        while let Some(one) = report {
            let news = self.inputs.checks.take(one);
            for change in &news.changes {
                self.reporter.change(&self.inputs, change);
            }
            for (key, reason) in &news.reasons {
                if let Some(service) = self.inputs.service(&key.0) {
                    log_reason(service, key, reason);
                }
            }
            changed |= news.advice || !news.changes.is_empty();
            report = self.reports.try_recv().ok();
        }
        if changed {
            self.goal_changed();
        }
    }

    /// Makes a step due at once, because the desired state must be computed again.
    fn goal_changed(&mut self) {
        self.changed = true;
        self.next = Instant::now();
    }

    /// Makes one step towards the desired state, and handles inputs in the meantime. Returns `None`
    /// if the daemon must exit while the dataplane processes a request.
    async fn step(
        &mut self,
        link: Box<Links>,
        signals: &mut Signals,
    ) -> Result<Option<Box<Links>>, String> {
        self.expire();
        if self.policy.settle(&self.inputs, self.changed) || self.changed {
            self.decide();
            self.goal = Arc::new(self.goal());
            self.changed = true;
        }
        let (goal, changed) = (Arc::clone(&self.goal), self.changed);
        let (dataplane, news) = (link.dataplane.in_words(), link.dataplane.news());
        self.inputs.dataplane.last_answer = link.dataplane.last_answer();
        let mut work = pin!(waiting::blocking(link, move |link, now| {
            link.step(&goal, changed, now)
        }));
        let mut services = self.inputs.expanded.services.iter();
        let mut hurries = pin!(signals.hurries(&dataplane, services.any(|service| service.omega)));
        self.changed = false;
        let overrides = std::mem::take(&mut self.unapplied);
        let (mut link, step) = loop {
            let (cluster, reports) = (&mut self.inputs.cluster, &mut self.reports);
            tokio::select! {
                biased;
                done = &mut work => break done?,
                // The thread that waits for the dataplane cannot be interrupted. The next daemon
                // repeats its changes.
                hang = &mut hurries => return hang.map(|()| None),
                input = next_input(cluster, reports, &mut self.requests) => {
                    self.take(input);
                    if self.changed {
                        news.store(true, Ordering::Release);
                    }
                }
            }
        };
        let now = Instant::now();
        match step {
            // Inputs that have arrived in the meantime belong to the next step.
            Step::InStep { found, again } => {
                for applied in overrides {
                    // The client may have closed its connection.
                    let _ = applied.send(());
                }
                let news = !Arc::ptr_eq(&self.inputs.dataplane.found, &found);
                if self.inputs.observe(&found) {
                    self.goal_changed();
                }
                if news {
                    self.judge(now);
                }
                if !self.changed {
                    self.next = now + again;
                    self.report_state();
                    self.inputs.readied.clear();
                }
            }
            Step::Interrupted => {
                self.unapplied.extend(overrides);
                self.changed = true;
                self.next = now;
            }
            Step::Waiting(time) => {
                self.changed |= changed;
                self.next = now + time;
            }
            Step::Fatal(why) => return Err(why),
        }
        for change in link.dataplane.take_manual_changes() {
            self.reporter.counters.drift();
            self.reporter.event("drift", change);
        }
        let contact = link.dataplane.contact();
        if self.inputs.dataplane.contact.1 != contact.1 {
            self.reporter.contact(contact);
        }
        self.inputs.dataplane.contact = contact;
        self.inputs.dataplane.proxy = link.proxied();
        let peers = self.inputs.config.dataplane.peers.as_ref();
        let info = &self.inputs.dataplane.found.seen.info;
        if peers.is_none() || info.pid != 0 {
            let lacking = status::lacking_peers(info, peers).collect();
            self.inputs.cluster.take_lacking(lacking);
        }
        self.publish_director();
        Ok(Some(link))
    }

    /// Reports the state to the service manager, and the result of a reload to its clients.
    fn report_state(&mut self) {
        let reads = self.reloader.reads_file();
        let now = self.inputs.summary();
        self.reporter.state(now, self.policy.settled, reads);
        if !reads {
            self.reloader.answer_clients();
        }
    }

    /// Decides about all services, and passes the decisions to keepalived, to the announcements of
    /// addresses and to operators.
    fn decide(&mut self) {
        let transitions = self.policy.decide(&self.inputs);
        let announcements = self.policy.announcements(&self.inputs);
        let cluster = &mut self.inputs.cluster;
        cluster.take_quorum(self.policy.has_quorum());
        cluster.announce(announcements, self.inputs.config.announce);
        for transition in &transitions {
            self.reporter.decision(transition);
        }
    }

    fn goal(&self) -> Goal {
        let inputs = &self.inputs;
        let overrides = Overrides {
            admin: &inputs.admin,
            decisions: &self.policy.decisions,
            vips: inputs.cluster.may_own().then_some(&inputs.vips),
            generation: inputs.generation,
        };
        let health = |key: &health::Key| (inputs.health(key), inputs.checks.advice(key));
        let mut desired = desired(&inputs.config, &inputs.expanded, health, &overrides);
        let checks = inputs.checks.descriptors();
        let proxied = Proxied::part(&mut desired, inputs.expanded.proxied(), checks);
        Goal {
            proxied,
            desired,
            announced: self.policy.announced.clone(),
            dataplane: inputs.config.dataplane.clone(),
            readied: inputs.readied.clone(),
        }
    }

    /// Reports that the daemon exits, and logs the consequences for the dataplane and for proxied
    /// connections. With `all`, also marks this director as unfit in the track file, and removes
    /// the last good configuration.
    fn farewell(&self, all: bool, proxied: usize) {
        self.reporter.stopping();
        if all {
            self.inputs.cluster.leave();
            if let Some(kept) = &self.reloader.last_good {
                last_good::remove(kept);
            }
        }
        if proxied > 0 {
            let connections = counted(proxied, "proxied connection");
            tracing::warn!("lvsd is stopping; this closes {connections}");
        }
        if !all && self.inputs.expanded.needs_dataplane() {
            tracing::info!(
                "lvsd is stopping; the dataplane keeps forwarding (`lvsd stop --all` ends the dataplane)"
            );
        }
    }

    /// Removes the services that are configured with `remove_on_exit`, and reports the removal.
    /// With `all`, only reports it, because the dataplane exits afterwards; also if no dataplane
    /// answers. Returns `None` if the dataplane has not removed the services in time, or is hung.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    async fn omega(
        mut self,
        all: bool,
        mut link: Box<Links>,
        signals: &mut Signals,
    ) -> Result<Option<Box<Links>>, String> {
        let inputs = &mut self.inputs;
        let services = std::mem::take(&mut inputs.expanded.services);
        let (end, stay): (Vec<Service>, _) = services.into_iter().partition(|one| one.omega);
        let vips: BTreeSet<IpAddr> = stay.iter().filter_map(Service::virtual_ip).collect();
        inputs.expanded.services = stay;
        if end.is_empty() {
            return Ok(Some(link));
        }
        inputs.vips.retain(|ip| vips.contains(ip));
        self.goal_changed();
        // A dataplane that does not accept the changes must not prevent the exit of the daemon.
        let deadline = Instant::now() + OMEGA_LIMIT;
        while !all && self.changed && link.dataplane.contact().1 {
            let step = async {
                // The previous step may have set a pause.
                tokio::time::sleep_until(self.next).await;
                self.step(link, signals).await
            };
            match tokio::time::timeout_at(deadline, step).await {
                Ok(Ok(Some(back))) => link = back,
                Ok(other) => return other,
                Err(_) => {
                    tracing::error!(
                        "the dataplane did not remove {} within {OMEGA_LIMIT:?}; remove them with `lvsadm -D`",
                        counted(end.len(), "service")
                    );
                    return Ok(None);
                }
            }
        }
        for service in &end {
            let decision = self.policy.decision(&service.id);
            self.reporter.end(service, decision);
        }
        self.reporter.finish_commands().await;
        Ok(Some(link))
    }
}

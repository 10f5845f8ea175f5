//! The daemon's loop: what file, DNS and etcd say and what the checks find become a [`Goal`]; the
//! [`Link`] carries it out.
//!
//! ```text
//! file ──(start, SIGHUP)──┐
//! DNS, etcd ──(news)──────┼──▶ Goal ──▶ Link::step ──▶ engine
//! checks ──(up, down)─────┘               ▲
//! timer ──(look again, backoff)───────────┘
//! ```

mod changes;
mod gathering;
mod requests;
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

use lvs_api::daemon::{AdminState, LoadStatus};
use lvs_core::api::{Confinement, ServiceId};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::admin::Admin;
use crate::clock::unix_time;
use crate::cluster::{self, Cluster};
use crate::config::{Config, LoadError, Peers, Report, Server, Service, Severity, checks_of};
use crate::decide::Decision;
use crate::engine::{Found, Goal, Host, Link, Links, Proxied, Step};
use crate::events::{About, Events};
use crate::expand::{Expanded, expand};
use crate::health::{self, Advice, Checks, Prober};
use crate::last_good;
use crate::notify::Notify;
use crate::notify_command::{self, Notice};
use crate::reconcile::{Desired, DesiredServer, DesiredService, Health, Unnamed};
use crate::requests::{Answer, Request};
use crate::sources::{Gathered, Sources};
use crate::tally::Tally;
use crate::watchdog::Pulse;
use crate::words::counted;
use gathering::{Done, Read, Reading};
use lvs_proxy as proxy;
use waiting::Signals;

/// Services whose first checks take longer do not hold back that the daemon is ready.
const READY_LIMIT: Duration = Duration::from_secs(3);

/// How long the engine may take to let go of services that end with the daemon.
const OMEGA_LIMIT: Duration = Duration::from_secs(10);

/// What the daemon is told from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Read the file again (SIGHUP).
    Reload,
    /// The same, whatever that takes away (SIGUSR1).
    ForcedReload,
    /// End, and leave the engine as it is (SIGTERM).
    Stop,
    /// End, and the engine too (SIGINT).
    StopAll,
}

/// What it was started with.
#[derive(Debug)]
pub struct Options {
    /// Where the configuration comes from at a reload.
    pub path: PathBuf,
    /// Wait for an engine, and start none.
    pub attach: bool,
    /// The result of reading the file at the start.
    pub loaded: LoadStatus,
    /// Where the last good configuration is kept.
    pub last_good: Option<PathBuf>,
    /// The way to the service manager.
    pub notify: Notify,
    /// Where is kept what people want of servers.
    pub admin: Option<PathBuf>,
    /// What people ask over the control socket.
    pub requests: Option<mpsc::Receiver<Request>>,
    /// Where it is told what happens.
    pub events: Events,
    /// Where it is counted.
    pub tally: Arc<Tally>,
    /// Who is told what the file says about metrics and the API.
    pub api: Option<watch::Sender<crate::config::Api>>,
    /// Where the health checks run: a thread of their own, so that nothing delays them. Without
    /// one, the loop's.
    pub checks: Option<Handle>,
    /// What it needs to be one director of several.
    pub cluster: Option<cluster::Places>,
    /// Where is kept what DNS said.
    pub sources: Option<PathBuf>,
    /// Beats with each turn of the loop.
    pub turns: Pulse,
    /// How far the process has confined itself.
    pub confinement: Confinement,
}

impl Options {
    /// With a file, and nothing else.
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
            tally: Arc::default(),
            api: None,
            checks: None,
            cluster: None,
            sources: None,
            turns: Pulse::default(),
            confinement: Confinement::default(),
        }
    }
}

/// The status of a file that was read at the start and is in force.
pub fn loaded_at_start() -> LoadStatus {
    LoadStatus {
        time: unix_time(),
        ok: true,
        message: String::new(),
    }
}

/// Why the file at `path` is not in force, in words.
pub fn refused(path: &str, error: &LoadError) -> String {
    match error {
        LoadError::Refused(report) => format!(
            "{path} is not valid, the old configuration stays: {}",
            summary(report)
        ),
        error => format!("{error}; the old configuration stays"),
    }
}

struct Daemon<P> {
    options: Options,
    /// The file that is in force.
    config: Arc<Config>,
    /// Its services, with what DNS and etcd add.
    expanded: Expanded,
    /// What DNS and etcd had said when they were last read.
    gathered: Gathered,
    /// The VIPs that the engine should own, decided when the file was loaded.
    vips: BTreeSet<IpAddr>,
    /// How many servers each service had when that was last known.
    standing: HashMap<ServiceId, usize>,
    checks: Checks<P>,
    reports: mpsc::UnboundedReceiver<health::Report>,
    started: Instant,
    /// When the file was loaded that is in force.
    loaded: Instant,
    /// VIPs that may be owned: the first checks of their services are done, or have had their
    /// time.
    announced: BTreeSet<IpAddr>,
    /// All services are so far.
    settled: bool,
    /// Services of which not all servers have had their first check.
    unknown: usize,
    /// What the engine was last given, or is about to be.
    goal: Arc<Goal>,
    /// The goal is another one than the engine was last given.
    changed: bool,
    /// When the next step is due.
    next: Instant,
    /// The service manager has been told that we are ready.
    ready: bool,
    /// What is being read, away from the loop.
    reading: Option<Reading>,
    /// What has to be read after that.
    again: Option<Reading>,
    done: (mpsc::Sender<Done>, mpsc::Receiver<Done>),
    /// What the file takes away is meant.
    forced: bool,
    /// The service manager has been told of a reload, and not that it is over.
    reloading: bool,
    /// What it was last told about our state.
    status: String,
    events: Events,
    admin: Admin,
    /// The director among others.
    cluster: Cluster,
    /// Where servers come from besides the file.
    sources: Sources,
    /// What they said and was refused as a whole, and why.
    held_back: Option<String>,
    requests: Option<mpsc::Receiver<Request>>,
    /// Those who wait for a reload to be done.
    reloads: Vec<oneshot::Sender<Answer>>,
    /// Servers that are to have connections again, though they were drained by hand.
    readied: HashSet<health::Key>,
    /// What has been decided about each service.
    decisions: HashMap<ServiceId, Decision>,
    /// Counts the files that were loaded.
    generation: u64,
    /// What came of the last reading of the file.
    load_status: LoadStatus,
    /// What was questionable about it.
    load_warnings: Vec<String>,
    /// What was last found in the engine, and when.
    found: (Arc<Found>, Option<Instant>),
    /// The engine's process, and whether it answers.
    contact: (Option<u32>, bool),
    /// What the proxy has taken and refused.
    proxy: Option<proxy::Counts>,
    notice: watch::Sender<Notice>,
    /// The task that tells the notify program: how to have it end, and its end.
    telling: (oneshot::Sender<()>, tokio::task::JoinHandle<()>),
}

/// Runs until it is told to stop.
///
/// # Errors
/// At start-up only: there is no engine and none can be started.
pub async fn run<P: Prober>(
    options: Options,
    config: Config,
    host: impl Host,
    prober: P,
    signals: mpsc::Receiver<Signal>,
) -> Result<(), String> {
    let tally = Arc::clone(&options.tally);
    let (checks, reports) = Checks::counted_in(prober, options.checks.clone(), tally);
    let signals = Signals::new(signals);
    let link = Box::new(Links::new(Box::new(host), options.attach, Instant::now()));
    let mut daemon = Daemon::new(options, checks, reports);
    let settled = daemon.admin.settled();
    daemon.gathered = daemon.sources.gathered();
    let expanded = expand(&config, &daemon.gathered);
    daemon.load(Arc::new(config), expanded, &link);
    let result = turn(daemon, link, signals).await;
    settled.await;
    result
}

/// Turns until it is told to stop.
async fn turn<P: Prober>(
    mut daemon: Daemon<P>,
    mut link: Box<Links>,
    mut signals: Signals,
) -> Result<(), String> {
    let turns = daemon.options.turns.clone();
    let all = loop {
        turns.beat();
        tokio::select! {
            biased;
            signal = signals.next() => match signal {
                Signal::Reload => daemon.reload(false),
                Signal::ForcedReload => daemon.reload(true),
                Signal::Stop => break false,
                Signal::StopAll => break true,
            },
            Some(done) = daemon.done.1.recv() => daemon.take_done(done, &link),
            () = daemon.cluster.changed() => daemon.take_cluster(),
            () = daemon.sources.changed() => daemon.take_sources(),
            // Before what people ask, of whom there may be many.
            Some(report) = daemon.reports.recv() => daemon.take_all(report),
            Some(request) = requests::next(&mut daemon.requests) => daemon.take_request(request),
            () = tokio::time::sleep_until(daemon.next) => {
                match daemon.step(link, &mut signals).await? {
                    Some(back) => link = back,
                    None => {
                        daemon.farewell(false, 0);
                        return Ok(());
                    }
                }
            }
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

/// Ends the engine where no daemon runs: one of ours stops, one of somebody else loses our
/// services and VIPs.
///
/// # Errors
/// It does not end, in words.
pub async fn stop_engine(host: impl Host) -> Result<(), String> {
    let link = Links::new(Box::new(host), true, Instant::now());
    waiting::stop(Box::new(link)).await
}

impl<P: Prober> Daemon<P> {
    fn new(
        mut options: Options,
        checks: Checks<P>,
        reports: mpsc::UnboundedReceiver<health::Report>,
    ) -> Self {
        let now = Instant::now();
        let events = options.events.clone();
        let (notice, watched) = watch::channel(Notice::default());
        let (end, ending) = oneshot::channel();
        let telling = notify_command::serve(events.listen(), watched, ending);
        let telling = (end, tokio::spawn(telling));
        Self {
            events,
            admin: Admin::recall(options.admin.take()),
            cluster: Cluster::recall(options.cluster.take()),
            sources: Sources::recall(options.sources.take()),
            held_back: None,
            requests: options.requests.take(),
            reloads: Vec::new(),
            readied: HashSet::new(),
            decisions: HashMap::new(),
            generation: 0,
            load_status: options.loaded.clone(),
            load_warnings: Vec::new(),
            found: (Arc::default(), None),
            contact: (None, false),
            proxy: None,
            notice,
            telling,
            options,
            config: Arc::default(),
            expanded: Expanded::default(),
            gathered: Gathered::default(),
            vips: BTreeSet::new(),
            standing: HashMap::new(),
            checks,
            reports,
            started: now,
            loaded: now,
            announced: BTreeSet::new(),
            settled: false,
            unknown: 0,
            goal: Arc::default(),
            changed: true,
            next: now,
            ready: false,
            reading: None,
            again: None,
            done: mpsc::channel(1),
            forced: false,
            reloading: false,
            status: String::new(),
        }
    }

    /// Says that the daemon ends, and what becomes of the engine, and of connections that are
    /// proxied.
    fn farewell(&self, all: bool, proxied: usize) {
        self.options.notify.send("STOPPING=1");
        if all {
            self.cluster.leave();
        }
        if let (true, Some(kept)) = (all, &self.options.last_good) {
            last_good::remove(kept);
        }
        if proxied > 0 {
            let connections = counted(proxied, "proxied connection");
            tracing::warn!("{connections} end with lvsd");
        }
        if !all && self.expanded.needs_engine() {
            tracing::info!("stopping; the engine keeps forwarding (`lvsd stop --all` ends it)");
        }
    }

    /// Ends the services that end with the daemon, and says so. With `all` the engine, which ends,
    /// does the former.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    async fn omega(
        mut self,
        all: bool,
        mut link: Box<Links>,
        signals: &mut Signals,
    ) -> Result<Option<Box<Links>>, String> {
        let services = std::mem::take(&mut self.expanded.services);
        let (end, stay): (Vec<Service>, _) = services.into_iter().partition(|one| one.omega);
        self.expanded.services = stay;
        if end.is_empty() {
            return Ok(Some(link));
        }
        let stays = |ip: &IpAddr| {
            let mut stay = self.expanded.services.iter();
            stay.any(|service| service.virtual_ip() == Some(*ip))
        };
        self.vips.retain(stays);
        self.goal_changed();
        // An engine that does not take it must not keep the daemon from ending.
        let deadline = Instant::now() + OMEGA_LIMIT;
        while !all && self.changed && link.contact().1 {
            let step = async {
                // The step before may have asked for a pause.
                tokio::time::sleep_until(self.next).await;
                self.step(link, signals).await
            };
            match tokio::time::timeout_at(deadline, step).await {
                Ok(Ok(Some(back))) => link = back,
                Ok(other) => return other,
                Err(_) => {
                    tracing::error!(
                        "the engine did not let go of {} within {OMEGA_LIMIT:?}; `lvsadm -D` does",
                        counted(end.len(), "service")
                    );
                    return Ok(None);
                }
            }
        }
        for service in &end {
            self.tell_end(service);
        }
        let limit = self.notice.borrow().limit;
        let (end, told) = self.telling;
        // Whatever it answers, it knows.
        let _ = end.send(());
        if tokio::time::timeout(limit, told).await.is_err() {
            tracing::warn!("the notify command was not told of everything within {limit:?}");
        }
        Ok(Some(link))
    }

    /// The engine is to be given another goal, at once.
    fn goal_changed(&mut self) {
        self.changed = true;
        self.next = Instant::now();
    }

    /// What arrives at one moment goes into one step.
    fn take_all(&mut self, report: health::Report) {
        let mut report = Some(report);
        let mut changed = false;
        while let Some(one) = report {
            changed |= self.take(one);
            report = self.reports.try_recv().ok();
        }
        if changed {
            self.goal_changed();
        }
    }

    /// Brings the engine one step nearer to the goal. Nothing comes back if the daemon is told to
    /// end, and the engine is at a request.
    async fn step(
        &mut self,
        link: Box<Links>,
        signals: &mut Signals,
    ) -> Result<Option<Box<Links>>, String> {
        self.expire();
        if self.settle() || self.changed {
            self.goal = Arc::new(self.goal());
            self.changed = true;
        }
        let (goal, changed) = (Arc::clone(&self.goal), self.changed);
        let (engine, news) = (link.engine(), link.news());
        let mut work = pin!(waiting::blocking(link, move |link, now| {
            link.step(&goal, changed, now)
        }));
        let lets_go = self.expanded.services.iter().any(|service| service.omega);
        let mut hurries = pin!(signals.hurries(&engine, lets_go));
        self.changed = false;
        let (mut link, step) = loop {
            tokio::select! {
                biased;
                done = &mut work => break done?,
                // The thread that waits for it cannot be called back; whoever starts us again
                // begins afresh.
                hang = &mut hurries => return hang.map(|()| None),
                Some(report) = self.reports.recv() => {
                    self.take_all(report);
                    if self.changed {
                        news.store(true, Ordering::Release);
                    }
                }
                () = self.cluster.changed() => {
                    self.take_cluster();
                    if self.changed {
                        news.store(true, Ordering::Release);
                    }
                }
                Some(request) = requests::next(&mut self.requests) => {
                    self.take_request(request);
                    if self.changed {
                        news.store(true, Ordering::Release);
                    }
                }
            }
        };
        let now = Instant::now();
        match step {
            // What has arrived in the meantime is the next step's.
            Step::InStep { found, again } => {
                self.take_found(&found, now);
                if !self.changed {
                    self.next = now + again;
                    self.tell(&found);
                    self.readied.clear();
                }
            }
            Step::Interrupted => {
                self.changed = true;
                self.next = now;
            }
            Step::Waiting(time) => {
                self.changed |= changed;
                self.next = now + time;
            }
            Step::Fatal(why) => return Err(why),
        }
        for deed in link.take_deeds() {
            self.options.tally.drift();
            self.events.tell("drift", About::default(), deed);
        }
        self.take_contact(link.contact());
        self.proxy = link.proxied();
        self.tell_directors();
        Ok(Some(link))
    }

    /// Tells the service manager what is new: that we are ready, and how we are.
    fn tell(&mut self, found: &Found) {
        let now = self.summary(found);
        let ready = self.settled || self.started.elapsed() >= READY_LIMIT;
        if ready && !self.ready {
            self.ready = true;
            self.options.notify.send("READY=1");
            tracing::info!("ready: {now}");
        } else if self.ready && self.reloading && !self.reads_file() {
            self.options.notify.send("READY=1");
        }
        if !self.reads_file() {
            self.answer_reloads();
        }
        self.reloading &= !self.ready || self.reads_file();
        if now != self.status {
            self.options.notify.send(&format!("STATUS={now}"));
            self.status = now;
        }
    }

    fn load(&mut self, config: Arc<Config>, expanded: Expanded, link: &Links) {
        let addresses = link.addresses();
        self.vips = expanded
            .own_vips(|ip| addresses.has(ip))
            .into_iter()
            .collect();
        self.checks.set(checks_of(&expanded.services));
        self.loaded = Instant::now();
        self.settled = false;
        self.generation += 1;
        let wanted: HashSet<ServiceId> = expanded.services.iter().map(|s| s.id).collect();
        self.decisions.retain(|id, _| wanted.contains(id));
        self.notice.send_replace(Notice {
            words: config.daemon.notify.clone(),
            limit: config
                .daemon
                .notify_timeout
                .unwrap_or(crate::config::Daemon::NOTIFY_TIMEOUT),
            user: config.daemon.notify_user,
        });
        if let Some(api) = &self.options.api {
            api.send_replace(config.api.clone());
        }
        // What waits to be known stands as it did, unless it is meant to go.
        let forced = self.forced;
        self.standing
            .retain(|id, _| !forced && expanded.awaits(*id));
        for service in &expanded.services {
            let standing = self.standing.entry(service.id).or_default();
            *standing = service.servers.len().max(*standing);
        }
        self.cluster.set(config.vrrp.as_ref());
        self.sources.set(
            &config.lookups,
            config.cluster.as_ref(),
            &expanded.dns_names(),
            &expanded.in_force,
        );
        self.config = config;
        self.expanded = expanded;
    }

    /// Sees which services have had their first checks; true if that changes what the engine may
    /// own.
    fn settle(&mut self) -> bool {
        if self.settled && self.unknown == 0 && !self.changed {
            return false;
        }
        let mut unsettled = BTreeSet::new();
        self.settled = true;
        let before = std::mem::take(&mut self.unknown);
        for service in &self.expanded.services {
            self.unknown += usize::from(!self.is_known(service));
            if !self.is_settled(service) {
                self.settled = false;
                if self.is_veiled(service) {
                    unsettled.extend(service.virtual_ip());
                }
            }
        }
        let announced = self.vips.difference(&unsettled).copied().collect();
        let changed = announced != self.announced || self.unknown < before;
        self.announced = announced;
        changed
    }

    /// Whether a service can be told from one that nobody has looked at: a server is up, or all are
    /// known, or they have had their time.
    fn is_settled(&self, service: &Service) -> bool {
        let is_up = |server: &Server| self.health(&(service.id, server.address)) == Health::Up;
        !self.serves_unheard(service)
            && (service.servers.iter().any(is_up) || self.is_known(service))
    }

    /// Whether the first checks of all servers of a service are done, or have had their time.
    fn is_known(&self, service: &Service) -> bool {
        if self.serves_unheard(service) {
            return false;
        }
        let mut unknown = false;
        let mut longest = Duration::ZERO;
        for server in &service.servers {
            unknown |= self.health(&(service.id, server.address)) == Health::Unknown;
            let timeout = server.check.as_ref().map(|check| check.timeout);
            longest = longest.max(timeout.unwrap_or_default());
        }
        !unknown || self.loaded.elapsed() >= longest + Duration::from_secs(1)
    }

    /// Whether a service has servers in the engine, or may have, of which it is not known whether
    /// they are those of its source.
    pub(super) fn serves_unheard(&self, service: &Service) -> bool {
        service.unheard
            && match &self.found {
                (_, None) => true,
                (found, Some(_)) => {
                    let mut servers = found.servers.iter();
                    servers.any(|((id, _), seen)| *id == service.id && seen.weight > 0)
                }
            }
    }

    /// Whether nothing can be said yet of a service that is not settled, so that its VIP has to
    /// wait.
    pub(super) fn is_veiled(&self, service: &Service) -> bool {
        let unseen = service.unheard && self.found.1.is_none();
        unseen || !self.waits_for_its_vip(service)
    }

    /// Whether all that is not known of a service comes by way of its own VIP.
    fn waits_for_its_vip(&self, service: &Service) -> bool {
        service.servers.iter().all(|server| {
            let by_vip = server.check.as_ref().is_some_and(|c| c.via.is_some());
            by_vip || self.health(&(service.id, server.address)) != Health::Unknown
        })
    }

    /// Has the file read again, away from the loop, and tells the service manager.
    fn reload(&mut self, forced: bool) {
        self.forced |= forced;
        let notify = &self.options.notify;
        notify.send(&format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_us()));
        self.reloading = true;
        self.read(Reading::File);
    }

    /// Takes a file that was read; false if it is refused.
    fn take_file(&mut self, file: Result<Read, LoadError>, link: &Links) -> bool {
        let message = self.reload_file(file, link);
        let ok = message.is_ok();
        self.options.tally.reload(ok);
        let message = message.unwrap_or_else(|message| message);
        let event = if ok { "reloaded" } else { "reload_refused" };
        self.events.tell(event, About::default(), message.clone());
        self.load_status = LoadStatus {
            time: unix_time(),
            ok,
            message,
        };
        self.forced = false;
        self.goal_changed();
        ok
    }

    /// What came of it, in words.
    fn reload_file(
        &mut self,
        file: Result<Read, LoadError>,
        link: &Links,
    ) -> Result<String, String> {
        let path = self.options.path.display().to_string();
        let Read {
            config,
            expanded,
            report,
        } = match file {
            Ok(read) => read,
            Err(error) => {
                if let LoadError::Refused(report) = &error {
                    report.print();
                }
                let why = refused(&path, &error);
                tracing::error!(event = "reload_refused", "{why}");
                return Err(why);
            }
        };
        let refusal = self.refusal(&config, &expanded, &path);
        if let Some(why) = refusal {
            tracing::error!(event = "reload_refused", "{why}");
            return Err(why);
        }
        if let Some(report) = report {
            report.print();
            self.load_warnings = report.lines(false);
            if let Some(kept) = &self.options.last_good {
                last_good::keep(kept, &report.text);
            }
        }
        let same = config == self.config && expanded.is_same(&self.expanded);
        let mut message = match same {
            true => format!("reloaded {path}: nothing has changed"),
            false => format!("reloaded {path}"),
        };
        let peers = config.dataplane.peers.as_ref();
        if let Some(why) = peers.and_then(Peers::unusable_key) {
            tracing::warn!("[sync.peers]: {why}; the engine will not start with it");
            message.push_str(&format!("; the engine will not start with it: {why}"));
        }
        tracing::info!(event = "reloaded", "{message}");
        for table in config.dataplane.changed_tables(&self.config.dataplane) {
            tracing::warn!("{table} has changed; it takes effect when the engine is restarted");
        }
        if config.daemon.log != self.config.daemon.log {
            tracing::warn!("`log` has changed; it takes effect when lvsd is restarted");
        }
        self.load(config, expanded, link);
        self.held_back = None;
        Ok(message)
    }

    /// Why a configuration is not taken, if it takes too much away.
    fn refusal(&self, config: &Config, expanded: &Expanded, what: &str) -> Option<String> {
        let before = self.standing.iter().map(|(id, servers)| (*id, *servers));
        let (why, remedy) = too_much_away(before, (config, expanded), self.forced)?;
        Some(format!("{what} has {why}: nothing was changed; {remedy}"))
    }

    fn goal(&mut self) -> Goal {
        self.decide();
        let nothing = BTreeSet::new();
        let vips = match self.cluster.may_own() {
            true => &self.vips,
            false => &nothing,
        };
        let mut desired = desired(
            (&self.config, &self.expanded),
            vips,
            (&self.admin, self.generation == 1),
            |key| self.health(key),
            |key| self.checks.advice(key),
            |id| self.decisions.get(id).copied(),
        );
        if let Some(unnamed) = &mut desired.unnamed
            && !self.cluster.may_own()
        {
            unnamed.beside = None;
        }
        desired.generation = self.generation;
        let checks = self.checks.descriptors();
        let proxied = Proxied::part(&mut desired, self.expanded.proxied(), checks);
        Goal {
            proxied,
            desired,
            announced: self.announced.clone(),
            dataplane: self.config.dataplane.clone(),
            readied: self.readied.clone(),
        }
    }
}

/// What the file and people ask for, with servers of such health. `first`: the file is the first
/// one that the daemon has.
fn desired(
    (config, expanded): (&Config, &Expanded),
    vips: &BTreeSet<IpAddr>,
    (admin, first): (&Admin, bool),
    health: impl Fn(&health::Key) -> Health,
    advice: impl Fn(&health::Key) -> Advice,
    decided: impl Fn(&ServiceId) -> Option<Decision>,
) -> Desired {
    let mut vips = vips.clone();
    let mut services = Vec::with_capacity(expanded.services.len());
    for service in &expanded.services {
        let decided = decided(&service.id);
        let decision = decided.unwrap_or_default();
        if decision.withdrawn
            && let Some(ip) = service.virtual_ip()
        {
            vips.remove(&ip);
        }
        let server = |server: &Server| {
            let state = admin.state(service.id, server.address);
            let mut config = server.config;
            config.weight = advice(&(service.id, server.address)).apply(config.weight);
            if state == AdminState::Drain {
                config.weight = 0;
            }
            let stays = server
                .check
                .as_ref()
                .is_some_and(|check| check.via.is_some());
            // The sorry server replaces the others: no new connections for them. If weight 0 does
            // not do that, they go as if they had left the file.
            let replaced = decision.sorry && config.weight != 0;
            let goes = replaced && !service.quiesces_at_zero && !stays;
            if replaced {
                config.weight = 0;
            }
            let health = match health(&(service.id, server.address)) {
                Health::Down if decision.panic => Health::Up,
                // Nothing is taken over from whoever was here before.
                Health::Unknown if service.alpha && first => Health::Down,
                health => health,
            };
            DesiredServer {
                address: server.address,
                line: server.line,
                config,
                stays,
                health,
                leaves: goes || state == AdminState::Maintenance,
            }
        };
        let mut servers: Vec<DesiredServer> = service.servers.iter().map(server).collect();
        if let Some(sorry) = service.sorry.as_ref().filter(|_| decision.sorry) {
            servers.push(DesiredServer {
                address: sorry.address,
                line: sorry.line,
                config: sorry.config,
                stays: false,
                health: Health::Up,
                leaves: false,
            });
        }
        let sorry = service.sorry.as_ref().map(|sorry| sorry.address);
        services.push(DesiredService {
            id: service.id,
            name: service.name.clone(),
            line: service.line,
            filter: service.filter.clone(),
            config: service.config.clone(),
            on_check_failure: service.on_check_failure,
            drain: service.drain,
            servers,
            incomplete: service.incomplete,
            undecided: sorry.filter(|_| decided.is_none()),
            removed_at_once: sorry
                .filter(|_| decided.is_some() && !decision.sorry && !service.quiesces_at_zero),
        });
    }
    Desired {
        file: expanded.files.clone(),
        services,
        vips,
        sysctls: config.sysctls.clone(),
        sync: config.sync.clone(),
        // A file without any leaves to others what they have set.
        marks: (!config.marks.is_empty()).then(|| config.marks.clone()),
        port_marks: expanded.port_marks.clone(),
        filter: config.filter.clone(),
        local: config.dataplane.local.clone(),
        unnamed: expanded.awaits_etcd.then(|| {
            let named = expanded.services.iter();
            let named = named.filter_map(Service::virtual_ip);
            Unnamed {
                beside: Some(named.collect()),
            }
        }),
        adopt: config.daemon.adopt,
        on_drift: config.daemon.on_drift,
        generation: 0,
    }
}

/// What is left of services with so many servers if a file takes more away than a reload may, in
/// words, and what to do if that is meant. What waits until a source is known is not taken away.
/// `forced`: as many servers may go as people want.
pub fn too_much_away(
    before: impl Iterator<Item = (ServiceId, usize)>,
    (config, expanded): (&Config, &Expanded),
    forced: bool,
) -> Option<(String, &'static str)> {
    let before = before.filter(|(id, _)| !expanded.awaits(*id));
    let (services, servers) = before.fold((0, 0), |(services, all), (_, servers)| {
        (services + 1, all + servers)
    });
    if expanded.services.is_empty() && services > 0 {
        // As likely half of a write as a wish, and an outage.
        return Some((
            "no [[service]]".to_owned(),
            "to take all services down, stop lvsd",
        ));
    }
    let left = expanded.services.iter();
    let left = left.filter(|service| !service.unheard);
    let left = left.map(|service| service.servers.len()).sum();
    let allowed = forced || config.daemon.may_shrink(servers, left);
    (!allowed).then(|| {
        (
            format!(
                "{left} of {servers} servers left, which is less than `max_removed_percent` allows"
            ),
            "if that is meant, use `lvsd reload --force`",
        )
    })
}

/// What a reload of a file would change in the engine, in words. Nobody has checked new servers:
/// they are taken to serve.
///
/// # Errors
/// There is no engine, or it does not tell.
pub fn plan(
    host: impl Host,
    (config, expanded): (&Config, &Expanded),
    admin: &Admin,
) -> Result<String, String> {
    let mut link = Link::new(Box::new(host), true, Instant::now());
    let addresses = link.addresses();
    let vips: BTreeSet<IpAddr> = expanded
        .own_vips(|ip| addresses.has(ip))
        .into_iter()
        .collect();
    let there = link.servers(config.dataplane.hang_limit)?;
    let health = |key: &health::Key| match there.contains(key) {
        // As it is.
        true => Health::Unknown,
        false => Health::Up,
    };
    let mut desired = desired(
        (config, expanded),
        &vips,
        (admin, false),
        health,
        |_| Advice::NONE,
        |_| None,
    );
    // The daemon that runs has them, and nobody else.
    let proxied = Proxied::part(&mut desired, expanded.proxied(), 0);
    let goal = Goal {
        proxied: None,
        desired,
        announced: vips,
        dataplane: config.dataplane.clone(),
        readied: HashSet::new(),
    };
    let mut text = link.plan(&goal)?;
    if let Some(proxied) = proxied {
        let services = counted(proxied.desired.services.len(), "proxied service");
        text.push_str(&format!(
            "{services} not compared: `lvsd status` shows what is there\n"
        ));
    }
    Ok(text)
}

fn summary(report: &Report) -> String {
    let first = report
        .findings
        .iter()
        .find(|d| d.severity == Severity::Error);
    match first {
        Some(d) if report.errors() > 1 => {
            format!("{} (and {} more)", d.title, report.errors() - 1)
        }
        Some(d) => d.title.clone(),
        None => "no reason".to_owned(),
    }
}

/// Microseconds of `CLOCK_MONOTONIC`, which systemd wants with `RELOADING=1`.
fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let time = Duration::try_from(now).unwrap_or_default();
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

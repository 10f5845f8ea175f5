//! Reloads: the file and the answers of DNS, etcd and Kubernetes are read and checked outside of
//! the loop, one at a time, and then loaded or refused. [`plan`] describes the changes of a reload
//! in advance.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use lvs_api::daemon::{LoadStatus, Reloaded};
use lvs_api::words::counted;
use lvs_core::api::ServiceId;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::Daemon;
use crate::admin::Admin;
use crate::channels::{Answer, answer};
use crate::clock::{Now, unix_time};
use crate::config::{Config, LoadError, Peers, Report, Service, Severity, checks_of};
use crate::dataplane::control::Numbers;
use crate::dataplane::{Goal, Host, Link, Links, Planned, Proxied};
use crate::desired::{Overrides, desired};
use crate::expand::{Expanded, expand};
use crate::health::{Advice, Key, Prober};
use crate::last_good;
use crate::reconcile::Health;
use crate::sources::{Gathered, Wanted};

/// The part of the configuration that is read again: only the answers of DNS, etcd and Kubernetes,
/// or also the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reading {
    /// The answers of the sources, with the file in force.
    Sources,
    /// The file, with the answers of the sources.
    File,
}

/// The result of reading the file or the sources.
pub(super) struct Done {
    gathered: Gathered,
    read: Result<Read, LoadError>,
}

/// A file, and its services with the answers of the sources.
pub(super) struct Read {
    config: Arc<Config>,
    expanded: Expanded,
    /// The warnings about the file; `None` if the file was not read again.
    report: Option<Report>,
}

/// The number of servers of a loaded service, and whether the service is from Kubernetes.
#[derive(Clone, Copy, Default)]
struct Standing {
    servers: usize,
    of_kubernetes: bool,
}

/// Reads the configuration again on request, and stores the last result.
pub(super) struct Reloader {
    /// The path of the configuration.
    pub(super) path: PathBuf,
    /// The path of the copy of the last good configuration; `None` if it is not stored.
    pub(super) last_good: Option<PathBuf>,
    /// The read that is in progress, if any.
    reading: Option<Reading>,
    /// The read that starts when the present one is done, if any.
    again: Option<Reading>,
    done: (mpsc::Sender<Box<Done>>, mpsc::Receiver<Box<Done>>),
    /// Whether the next file may remove any number of servers.
    forced: bool,
    /// The clients that wait for the reload.
    clients: Vec<oneshot::Sender<Answer>>,
    /// The name of the first of these clients: a local user or a token.
    who: Option<String>,
    /// The answers of DNS, etcd and Kubernetes that are in force.
    pub(super) gathered: Gathered,
    /// The number of servers of each service at the last load. While the source of a service has
    /// not answered, its earlier number stays.
    standing: HashMap<ServiceId, Standing>,
    /// The reason why the answers of the sources were refused as a whole; `None` if they are in
    /// force.
    pub(super) held_back: Option<String>,
    /// The result of the last read of the file.
    status: LoadStatus,
    /// The time of the last read of the file, in seconds since boot.
    read: u64,
    /// The warnings about the file in use.
    warnings: Vec<String>,
}

impl Reloader {
    pub(super) fn new(path: PathBuf, last_good: Option<PathBuf>, status: LoadStatus) -> Self {
        Self {
            path,
            last_good,
            reading: None,
            again: None,
            done: mpsc::channel(1),
            forced: false,
            clients: Vec::new(),
            who: None,
            gathered: Gathered::default(),
            standing: HashMap::new(),
            held_back: None,
            status,
            read: Now::read().boot,
            warnings: Vec::new(),
        }
    }

    /// The result of the last read of the file, with its time by the present wall clock.
    pub(super) fn status(&self, now: Now) -> LoadStatus {
        let mut status = self.status.clone();
        if status.time > 0 {
            status.time = now.unix_of(self.read);
        }
        status
    }

    /// Waits for the result of the read that is in progress.
    pub(super) async fn done(&mut self) -> Option<Box<Done>> {
        self.done.1.recv().await
    }

    /// Whether the file is being read, or will be read after the present read.
    pub(super) fn reads_file(&self) -> bool {
        self.reading.max(self.again) == Some(Reading::File)
    }

    /// Starts to read `what`. If another read is in progress, the new read starts after it.
    fn read(&mut self, what: Reading, config: &Arc<Config>, gathered: Gathered) {
        if self.reading.is_some() {
            self.again = self.again.max(Some(what));
            return;
        }
        self.reading = Some(what);
        let sender = self.done.0.clone();
        let (path, config) = (self.path.clone(), Arc::clone(config));
        tokio::task::spawn_blocking(move || {
            let read = match what {
                Reading::Sources => Ok((config, None)),
                Reading::File => {
                    let loaded = Config::load(&path);
                    loaded.map(|(config, report)| (Arc::new(config), Some(report)))
                }
            };
            let read = read.map(|(config, report)| Read {
                expanded: expand(&config, &gathered),
                config,
                report,
            });
            // The daemon may be stopping.
            let _ = sender.blocking_send(Box::new(Done { gathered, read }));
        });
    }

    /// Adds a client that waits for the reload. `who`: its local user or token.
    pub(super) fn wait(&mut self, client: oneshot::Sender<Answer>, who: String) {
        self.clients.push(client);
        self.who.get_or_insert(who);
    }

    /// Answers the clients that wait for the reload.
    pub(super) fn answer_clients(&mut self) {
        for client in std::mem::take(&mut self.clients) {
            let message = self.status.message.clone();
            let warnings = self.warnings.clone();
            let _ = client.send(match self.status.ok {
                true => answer(&Reloaded { message, warnings }),
                false => Err(message),
            });
        }
    }

    /// The reason for the refusal of a configuration that removes too many servers; `None` if it is
    /// accepted.
    fn refusal(&self, config: &Config, expanded: &Expanded, what: &str) -> Option<String> {
        let followed = config.kubernetes.is_some();
        let before = self.standing.iter();
        let before = before.filter(|(_, standing)| !(standing.of_kubernetes && followed));
        let before = before.map(|(id, standing)| (*id, standing.servers));
        let (why, fix) = too_much_away(before, (config, expanded), self.forced)?;
        Some(format!("{what} has {why}: nothing was changed; {fix}"))
    }

    /// Counts the servers of a configuration that is loaded.
    fn count(&mut self, expanded: &Expanded) {
        // The count of a service whose source has not answered stays, unless its removal is forced.
        let forced = self.forced;
        self.standing
            .retain(|id, _| !forced && expanded.awaits(*id));
        let (others, of_kubernetes) = expanded.by_origin();
        let others = others.iter().map(|service| (service, false));
        for (service, of_kubernetes) in others.chain(of_kubernetes.iter().map(|one| (one, true))) {
            let standing = self.standing.entry(service.id).or_default();
            standing.servers = service.servers.len().max(standing.servers);
            standing.of_kubernetes = of_kubernetes;
        }
    }
}

impl<P: Prober> Daemon<P> {
    /// Starts a reload of the file, after a read that is in progress.
    pub(super) fn reload(&mut self, forced: bool) {
        self.reloader.forced |= forced;
        self.reporter.reloading();
        self.read(Reading::File);
    }

    /// Starts to read the answers of the sources if they have changed. If a read is in progress,
    /// requests another one after it.
    pub(super) fn take_sources(&mut self) {
        let reloader = &self.reloader;
        if reloader.reading.is_some() || self.inputs.sources.gathered() != reloader.gathered {
            self.read(Reading::Sources);
        }
    }

    fn read(&mut self, what: Reading) {
        let gathered = self.inputs.sources.gathered();
        self.reloader.read(what, &self.inputs.config, gathered);
    }

    /// Uses or refuses the result of a read. Discards it if the file has to be read again.
    pub(super) fn take_done(&mut self, done: Done, link: &Links) {
        let reading = self.reloader.reading.take();
        let again = self.reloader.again.take();
        if again == Some(Reading::File) {
            self.read(Reading::File);
            return;
        }
        let taken = match (reading, done.read) {
            (Some(Reading::Sources), Ok(read)) => {
                self.take_expanded(read, link);
                true
            }
            (_, read) => self.take_file(read, link),
        };
        if taken {
            self.reloader.gathered = done.gathered;
        }
        // If the file was refused, the answers that were read with it do not apply either.
        if again.is_some() || !taken {
            self.take_sources();
        }
    }

    /// Loads the answers of the sources with the file in force, or refuses them if they remove too
    /// many servers.
    fn take_expanded(&mut self, read: Read, link: &Links) {
        let expanded = read.expanded;
        let in_force = &mut self.inputs.expanded;
        if expanded.is_same(in_force) {
            in_force.revision = expanded.revision;
            self.reloader.held_back = None;
            return;
        }
        let what = "the configuration with the new answers of sources";
        let refusal = self.reloader.refusal(&read.config, &expanded, what);
        if let Some(refusal) = refusal {
            if self.reloader.held_back.as_ref() != Some(&refusal) {
                tracing::error!(event = "sources_refused", "{refusal}");
                self.reporter.event("sources_refused", refusal.clone());
            }
            self.reloader.held_back = Some(refusal);
            return;
        }
        let (before, after) = (in_force.servers(), expanded.servers());
        let message = format!(
            "the answers of sources have changed: {} (previously {before})",
            counted(after, "server")
        );
        tracing::info!(event = "sources", "{message}");
        self.reporter.event("sources", message);
        let lines = expanded.left_out.iter();
        for line in lines.filter(|line| !in_force.left_out.contains(line)) {
            tracing::warn!(event = "left_out", "left out: {line}");
        }
        self.load(read.config, expanded, link);
        self.goal_changed();
    }

    /// Loads or refuses a file that was read, and reports the result as an event, in the counters
    /// and in the status. Returns whether the file was loaded.
    fn take_file(&mut self, file: Result<Read, LoadError>, link: &Links) -> bool {
        let message = self.load_file(file, link);
        let ok = message.is_ok();
        self.reporter.counters.reload(ok);
        let message = message.unwrap_or_else(|message| message);
        let event = if ok { "reloaded" } else { "reload_refused" };
        self.reporter.event(event, message.clone());
        let now = Now::read();
        self.reloader.read = now.boot;
        self.reloader.status = LoadStatus {
            time: now.unix,
            ok,
            message,
        };
        self.reloader.forced = false;
        self.goal_changed();
        ok
    }

    /// Loads a file that was read, and stores it as the last good configuration. Returns the result
    /// as text; an error if the file is refused.
    fn load_file(&mut self, file: Result<Read, LoadError>, link: &Links) -> Result<String, String> {
        let path = self.reloader.path.display().to_string();
        let who = self.reloader.who.take();
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
                tracing::error!(event = "reload_refused", who, "{why}");
                return Err(why);
            }
        };
        if let Some(why) = self.reloader.refusal(&config, &expanded, &path) {
            tracing::error!(event = "reload_refused", who, "{why}");
            return Err(why);
        }
        if let Some(report) = report {
            report.print();
            self.reloader.warnings = report.lines();
            if let Some(kept) = &self.reloader.last_good {
                last_good::keep(kept, &report.text);
            }
        }
        let before = &self.inputs.config;
        let same = config == *before && expanded.is_same(&self.inputs.expanded);
        let numbers = changed(&self.inputs.expanded.services, &expanded.services);
        let mut message = match numbers.words() {
            _ if same => format!("reloaded {path}: no change"),
            words if words.is_empty() => format!("reloaded {path}: services and servers unchanged"),
            words => format!("reloaded {path}: {words}"),
        };
        let peers = config.dataplane.peers.as_ref();
        if let Some(why) = peers.and_then(Peers::unusable_key) {
            tracing::warn!("[sync.peers]: {why}; no dataplane can start until this is corrected");
            message.push_str(&format!(
                "; no dataplane can start until this is corrected: {why}"
            ));
        }
        tracing::info!(event = "reloaded", who, "{message}");
        for table in config.dataplane.changed_tables(&before.dataplane) {
            tracing::warn!("{table} has changed; it takes effect when the dataplane is restarted");
        }
        if peers.is_some() && peers != before.dataplane.peers.as_ref() {
            tracing::warn!(
                "if [sync.peers] has a new peer, this director is not ready until the dataplane is restarted, and other directors are preferred for its addresses"
            );
        }
        if config.daemon.log != before.daemon.log {
            tracing::warn!("`log` has changed; it takes effect when lvsd is restarted");
        }
        self.load(config, expanded, link);
        Ok(message)
    }

    /// Starts to use a configuration. The host's addresses are read only here, because a director
    /// may have many.
    pub(super) fn load(&mut self, config: Arc<Config>, expanded: Expanded, link: &Links) {
        self.reloader.count(&expanded);
        self.reloader.held_back = None;
        self.policy.load(&expanded.services);
        let notice = &self.reporter.notice;
        notice.send_replace(config.daemon.notify.clone());
        if let Some(api) = &self.api {
            api.send_replace(config.api.clone());
        }
        let inputs = &mut self.inputs;
        let addresses = link.dataplane.addresses();
        let vips = expanded.own_vips(|ip| addresses.has(ip));
        inputs.vips = vips.into_iter().collect();
        inputs.checks.set(checks_of(&expanded.services));
        inputs.loaded = Instant::now();
        inputs.generation += 1;
        inputs.cluster.set(config.vrrp.as_ref());
        let wanted = Wanted {
            lookups: &config.lookups,
            cluster: config.cluster.as_ref(),
            kubernetes: config.kubernetes.as_ref(),
            names: &expanded.dns_names(),
        };
        inputs
            .sources
            .set(&wanted, &expanded.in_force, &expanded.kubernetes);
        inputs.config = config;
        inputs.expanded = expanded;
    }
}

/// Numbers of services and servers that a reload adds, changes and removes. Their positions in the
/// file do not count.
fn changed(before: &[Service], after: &[Service]) -> Numbers {
    let settings = |service: &Service| Service {
        line: 0,
        servers: Vec::new(),
        ..service.clone()
    };
    let mut numbers = Numbers::default();
    let mut old: HashMap<ServiceId, &Service> = before.iter().map(|one| (one.id, one)).collect();
    for service in after {
        let Some(old) = old.remove(&service.id) else {
            numbers.services[0] += 1;
            numbers.servers[0] += service.servers.len();
            continue;
        };
        numbers.services[1] += usize::from(settings(old) != settings(service));
        let servers = old.servers.iter().map(|server| (server.address, server));
        let mut servers: HashMap<_, _> = servers.collect();
        for server in &service.servers {
            match servers.remove(&server.address) {
                None => numbers.servers[0] += 1,
                Some(old) => {
                    let same = (&old.config, &old.check) == (&server.config, &server.check);
                    numbers.servers[1] += usize::from(!same);
                }
            }
        }
        numbers.servers[2] += servers.len();
    }
    numbers.services[2] = old.len();
    numbers.servers[2] += old.values().map(|one| one.servers.len()).sum::<usize>();
    numbers
}

/// The changes in the dataplane that a reload of a file would make, as text. New servers have not
/// been checked and count as up. `names` are the names of the running daemon's services.
///
/// # Errors
/// No dataplane runs, or it does not answer, or refuses to list its services.
pub fn plan(
    host: impl Host,
    (config, expanded): (&Config, &Expanded),
    admin: &Admin,
    names: &HashMap<ServiceId, String>,
) -> Result<Planned, String> {
    let mut link = Link::new(Box::new(host), true, Instant::now());
    let addresses = link.addresses();
    let vips = expanded.own_vips(|ip| addresses.has(ip));
    let vips: BTreeSet<IpAddr> = vips.into_iter().collect();
    let there = link.servers(config.dataplane.hang_limit)?;
    let health = |key: &Key| {
        let health = match there.contains(key) {
            // The server keeps its present state.
            true => Health::Unknown,
            false => Health::Up,
        };
        (health, Advice::NONE)
    };
    let overrides = Overrides {
        admin,
        decisions: &HashMap::new(),
        vips: Some(&vips),
        generation: 0,
    };
    let mut desired = desired(config, expanded, health, &overrides);
    // The proxy is a part of the running daemon, so its services cannot be compared here.
    let proxied = Proxied::part(&mut desired, expanded.proxied(), 0);
    let goal = Goal {
        proxied: None,
        desired,
        announced: vips,
        dataplane: config.dataplane.clone(),
        readied: HashSet::new(),
    };
    let mut planned = link.plan(&goal, names)?;
    if let Some(proxied) = proxied {
        let services = counted(proxied.desired.services.len(), "proxied service");
        planned.not_compared = Some(format!(
            "{services} not compared: `lvsd status` shows the present state of proxied services"
        ));
    }
    Ok(planned)
}

/// The status of a file that was read at the start and is in force.
pub fn loaded_at_start() -> LoadStatus {
    LoadStatus {
        time: unix_time(),
        ok: true,
        message: String::new(),
    }
}

/// The reason why the file at `path` is not in force, as text.
pub fn refused(path: &str, error: &LoadError) -> String {
    match error {
        LoadError::Refused(report) => format!(
            "{path} is not valid, the old configuration stays: {}",
            summary(report)
        ),
        error => format!("{error}; the old configuration stays"),
    }
}

/// The first error of a report with its position and fix, and the number of others.
fn summary(report: &Report) -> String {
    let mut errors = report.findings.iter();
    let Some(first) = errors.find(|d| d.severity == Severity::Error) else {
        return "the reason is unknown".to_owned();
    };
    let position = report.files.position(&report.text, first.primary.0.start);
    let mut text = format!("{position}: {}", first.title);
    if let Some(help) = &first.help {
        text.push_str(&format!("; {help}"));
    }
    if report.errors() > 1 {
        text.push_str(&format!(" (and {} more)", report.errors() - 1));
    }
    text
}

/// Returns the reason why a configuration is refused because it removes too many servers, and the
/// fix; `None` if it is accepted. `before` has the number of servers of each service. Services
/// whose source has not answered do not count. While `[kubernetes]` is in the file, Services of
/// Kubernetes do not count either, and `before` must not contain them: controllers remove servers
/// on purpose, without an operator who could use `--force`. `forced`: a reload may remove any
/// number of servers, but not all services, unless `[kubernetes]` is in the file.
pub fn too_much_away(
    before: impl Iterator<Item = (ServiceId, usize)>,
    (config, expanded): (&Config, &Expanded),
    forced: bool,
) -> Option<(String, &'static str)> {
    let before = before.filter(|(id, _)| !expanded.awaits(*id));
    let (services, servers) = before.fold((0, 0), |(services, all), (_, servers)| {
        (services + 1, all + servers)
    });
    if expanded.services.is_empty() && services > 0 && config.kubernetes.is_none() {
        // An empty file may be a write in progress, and would cause an outage.
        return Some((
            "no [[service]]".to_owned(),
            "to remove all services, stop lvsd",
        ));
    }
    let (counted, _) = expanded.by_origin();
    let left = counted.iter().filter(|service| !service.unheard);
    let left = left.map(|service| service.servers.len()).sum();
    let allowed = forced || config.daemon.may_shrink(servers, left);
    (!allowed).then(|| {
        (
            format!("{left} of {servers} servers left, fewer than `max_removed_percent` allows"),
            "if this is intended, use `lvsd reload --force`",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::etcd::Text;
    use crate::sources::kubernetes::Kubernetes;

    const KUBERNETES: &str = "[kubernetes]\nserver = \"http://192.0.2.5:6443\"\ndirector = \"d1\"\n\
         [[kubernetes.pool]]\nname = \"public\"\naddresses = \"192.0.2.0/24\"\n";

    /// A service with `servers` servers.
    fn service(address: &str, servers: u8) -> String {
        let servers = (1..=servers).map(|n| format!("{{ address = \"10.0.0.{n}:80\" }}"));
        let servers: Vec<String> = servers.collect();
        format!(
            "[[service]]\naddress = \"{address}\"\nforward = \"nat\"\nservers = [{}]\n",
            servers.join(", ")
        )
    }

    /// A file, and the configuration from Kubernetes.
    fn read(file: &str, of_kubernetes: &str) -> (Config, Expanded) {
        let (config, _) = Config::from_toml("f", file).unwrap();
        let text = Text {
            text: of_kubernetes.to_owned(),
            good: None,
        };
        let services = [("shop/web/tcp/80".to_owned(), text)].into();
        let gathered = Gathered {
            kubernetes: Some(Kubernetes {
                name: "http://192.0.2.5:6443".to_owned(),
                services,
            }),
            ..Gathered::default()
        };
        let expanded = expand(&config, &gathered);
        assert!(expanded.left_out.is_empty(), "{:?}", expanded.left_out);
        (config, expanded)
    }

    #[test]
    fn loss_of_most_servers_is_accepted_from_kubernetes_and_refused_from_file() {
        let file = |own| format!("{KUBERNETES}{}", service("192.0.2.1:80", own));
        let (_, before) = read(&file(30), &service("192.0.2.2:80", 100));
        let mut reloader = Reloader::new(PathBuf::new(), None, loaded_at_start());
        reloader.count(&before);
        let refusal = |file: &str, of_kubernetes| {
            let (config, expanded) = read(file, &service("192.0.2.2:80", of_kubernetes));
            reloader.refusal(&config, &expanded, "x")
        };
        assert_eq!(refusal(&file(30), 1), None);
        assert_eq!(refusal(&file(30), 0), None);
        let why = refusal(&file(14), 100).expect("a file without most of the servers is refused");
        assert!(
            why.starts_with("x has 14 of 30 servers left"),
            "does not begin with `x has 14 of 30 servers left`: {why}"
        );
        // A file that has lost its table is refused.
        let why = refusal(&service("192.0.2.1:80", 30), 100)
            .expect("a file without [kubernetes] is refused");
        assert!(
            why.starts_with("x has 30 of 130 servers left"),
            "does not begin with `x has 30 of 130 servers left`: {why}"
        );
    }
}

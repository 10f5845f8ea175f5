//! Sources of the desired state in addition to the file: DNS, etcd and Kubernetes.
//!
//! ```text
//! name servers ◀──▶ dns/ ──┐
//! etcd ◀─────────▶ etcd/ ──┼──▶ Shared ──▶ Gathered ──▶ the daemon merges it with the file
//! Kubernetes ◀▶ kubernetes/┤       └─────▶ state directory
//! state directory ─────────┘
//! ```
//!
//! Sources run on a separate thread. Sources and daemon do not wait for each other: the daemon uses
//! the latest answers. An answer applies until the next one; it is stored in the state directory,
//! and therefore also applies after a restart of the daemon.

mod base64;
pub(crate) mod dns;
pub mod etcd;
mod http;
mod kept;
pub mod kubernetes;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lvs_api::daemon::SourceStatus;
use lvs_sys::lock;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::clock::Now;
pub use etcd::Cluster;
pub(crate) use http::Endpoint;

use etcd::{Director, Etcd};
use kubernetes::Kubernetes;

#[doc(hidden)]
pub use dns::fuzz as fuzz_dns;

/// Maximum pause between two attempts after failures, unless the minimum pause is longer.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Settings in `[dns]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookups {
    /// Name servers; empty to use the name servers in `/etc/resolv.conf`.
    pub name_servers: Vec<SocketAddr>,
    /// Time limit for an answer of a name server. It starts again if a query is repeated over TCP.
    pub timeout: Duration,
    /// Minimum pause after a successful look-up of a name, and maximum pause after the first
    /// failure.
    pub min: Duration,
    /// Maximum pause after a successful look-up of a name.
    pub max: Duration,
}

impl Default for Lookups {
    fn default() -> Self {
        Self {
            name_servers: Vec::new(),
            timeout: Duration::from_secs(2),
            min: Duration::from_secs(5),
            max: Duration::from_secs(300),
        }
    }
}

/// Source of further servers of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A DNS name in lower case without a final dot.
    Dns(String),
    /// A pool of servers that registered themselves in etcd.
    Etcd(String),
}

/// The latest answers of the sources.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gathered {
    /// Servers of each configured DNS name that has been resolved at least once.
    pub dns: BTreeMap<String, Vec<Record>>,
    /// Services and servers in etcd; `None` without etcd, or before its first answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd: Option<Etcd>,
    /// Services in Kubernetes; `None` without Kubernetes, or before its first answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubernetes: Option<Kubernetes>,
}

/// A server from a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Record {
    /// Address of the server.
    pub ip: IpAddr,
    /// Port, if the source sets one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Weight, if the source sets one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
}

impl Gathered {
    /// Reads the answers that the daemon with the file `config` has stored; none if they cannot be
    /// read.
    pub fn recall(directory: &Path, config: &Path) -> Self {
        kept::read(&kept::path(directory, config))
    }
}

/// Returns a random pause after `failures` consecutive failures. Its upper limit is `least` after
/// the first failure, and doubles with each further one, up to [`RETRY_MAX`] (or `least`, if that
/// is longer) and at most 32 times `least`. Its lower limit is half of the upper one.
pub(crate) fn retry(failures: u32, least: Duration) -> Duration {
    let doubled = least.saturating_mul(1 << failures.saturating_sub(1).min(5));
    let whole = doubled.min(RETRY_MAX.max(least));
    whole / 2 + whole.mul_f64(random() / 2.0)
}

/// Waits until `at`; forever if it is `None`.
async fn timer(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// A random number in [0, 1).
fn random() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    let number = RandomState::new().hash_one(0);
    f64::from(u32::try_from(number >> 32).unwrap_or(0)) / 4_294_967_296.0
}

/// The state of a source.
#[derive(Clone, Debug, Default)]
struct SourceState {
    /// Time of the last answer in seconds since boot; `None` before the first answer to this lvsd.
    answered: Option<u64>,
    /// The error, if the last attempt failed.
    trouble: Option<String>,
    answers: u64,
    failures: u64,
}

impl SourceState {
    /// Records an answer, or the reason why there is none, and logs when this changes. `known`: an
    /// earlier answer is in use.
    fn take<T>(&mut self, what: &str, known: bool, result: &Result<T, String>) {
        match result {
            Ok(_) => {
                self.answered = Some(Now::read().boot);
                self.answers += 1;
                if self.trouble.take().is_some() {
                    tracing::info!(event = "source_back", "{what} answers again");
                }
            }
            Err(why) => {
                self.failures += 1;
                if self.trouble.as_ref() != Some(why) {
                    let holds = match known {
                        true => "its last answer is still used",
                        false => {
                            "no answer from this source is known yet: the dataplane's services are unchanged"
                        }
                    };
                    tracing::warn!(event = "source_lost", "{what}: {why}; {holds}");
                }
                self.trouble = Some(why.clone());
            }
        }
    }
}

/// State that sources and daemon share.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notifies the daemon of changed answers.
    news: Notify,
    /// Notifies the task that stores answers.
    keep: Notify,
    /// Notifies the task that writes this director's record to etcd.
    announce: Notify,
}

#[derive(Debug, Default)]
struct State {
    gathered: Gathered,
    dns: BTreeMap<String, SourceState>,
    etcd: SourceState,
    view: etcd::View,
    announced: Option<Director>,
    kubernetes: SourceState,
    kubernetes_view: kubernetes::View,
    /// Services in Kubernetes that the daemon refuses, with reasons.
    refused_by_daemon: BTreeMap<String, String>,
}

impl State {
    fn view_kubernetes(&mut self, view: kubernetes::View) {
        let known = &self.kubernetes_view.left_out;
        for line in view.left_out.iter().filter(|line| !known.contains(line)) {
            tracing::warn!(event = "left_out", "left out: {line}");
        }
        self.kubernetes_view = view;
    }
}

/// Whether the key of a service, such as `default/web/tcp/80`, belongs to the Kubernetes Service
/// `service`, such as `default/web`.
fn is_of(key: &str, service: &str) -> bool {
    let rest = key.strip_prefix(service);
    rest.is_some_and(|rest| rest.starts_with('/'))
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn take_dns(&self, name: &str, found: Result<Vec<Record>, String>) {
        let mut state = self.lock();
        let known = state.gathered.dns.contains_key(name);
        let Some(standing) = state.dns.get_mut(name) else {
            // The source is no longer used.
            return;
        };
        standing.take(&format!("DNS, {name}"), known, &found);
        if let Ok(records) = found
            && state.gathered.dns.get(name) != Some(&records)
        {
            state.gathered.dns.insert(name.to_owned(), records);
            self.keep.notify_one();
            self.news.notify_one();
        }
    }

    /// Returns the last known content of etcd below `prefix`; it is empty if none is known.
    fn etcd(&self, prefix: &str) -> Etcd {
        let state = self.lock();
        let known = state.gathered.etcd.clone();
        known
            .filter(|etcd| etcd.prefix == prefix)
            .unwrap_or_else(|| Etcd {
                prefix: prefix.to_owned(),
                ..Etcd::default()
            })
    }

    fn take_etcd(&self, model: &etcd::Model) {
        let mut state = self.lock();
        let state = &mut *state;
        let prefix = &model.etcd.prefix;
        state.etcd.take(&format!("etcd, {prefix}"), true, &Ok(()));
        let before = state.gathered.etcd.take().unwrap_or_default();
        let (etcd, emptied) = model.hold(&before);
        let refused = model.refused.iter();
        let refused = refused.map(|(key, why)| format!("etcd key {prefix}{key}: {why}"));
        let emptied = emptied.iter().map(|pool| {
            format!(
                "etcd pool {prefix}servers/{pool}/: it is empty; its last servers are still used"
            )
        });
        let mut left_out: Vec<String> = refused.chain(emptied).collect();
        left_out.sort_unstable();
        for line in left_out
            .iter()
            .filter(|line| !state.view.left_out.contains(line))
        {
            tracing::warn!(event = "left_out", "left out: {line}");
        }
        let news = before != etcd;
        if news {
            self.keep.notify_one();
        }
        state.gathered.etcd = Some(etcd);
        state.view = etcd::View {
            left_out,
            directors: model.directors.clone(),
            unannounced: state.view.unannounced.take(),
        };
        if news {
            self.news.notify_one();
        }
    }

    fn hear_etcd(&self) {
        self.lock().etcd.answered = Some(Now::read().boot);
    }

    fn fail_etcd(&self, prefix: &str, why: String) {
        let result: Result<(), String> = Err(why);
        let mut state = self.lock();
        let known = state.gathered.etcd.is_some();
        state.etcd.take(&format!("etcd, {prefix}"), known, &result);
    }

    /// Sets the services of Kubernetes. A service that is missing in `now` stays unchanged if it
    /// belongs to a Kubernetes Service in `held`.
    fn take_kubernetes(&self, mut now: Kubernetes, held: &[String], view: kubernetes::View) {
        let mut state = self.lock();
        let state = &mut *state;
        let name = &now.name;
        state
            .kubernetes
            .take(&format!("Kubernetes, {name}"), true, &Ok(()));
        let before = state.gathered.kubernetes.take().unwrap_or_default();
        for (key, text) in &before.services {
            if let Some(known) = now.services.get_mut(key) {
                // Only the daemon sets `good`.
                known.good.clone_from(&text.good);
                continue;
            }
            let mut held = held.iter();
            if held.any(|service| is_of(key, service)) {
                now.services.insert(key.clone(), text.clone());
            }
        }
        if before != now {
            self.keep.notify_one();
            self.news.notify_one();
        }
        state.gathered.kubernetes = Some(now);
        state.view_kubernetes(view);
    }

    fn view_kubernetes(&self, view: kubernetes::View) {
        self.lock().view_kubernetes(view);
    }

    fn hear_kubernetes(&self) {
        self.lock().kubernetes.answered = Some(Now::read().boot);
    }

    fn fail_kubernetes(&self, name: &str, why: String) {
        let result: Result<(), String> = Err(why);
        let mut state = self.lock();
        let known = state.gathered.kubernetes.is_some();
        let what = format!("Kubernetes, {name}");
        state.kubernetes.take(&what, known, &result);
    }

    /// Services in Kubernetes that the daemon refuses, with reasons.
    fn refused_by_daemon(&self) -> BTreeMap<String, String> {
        self.lock().refused_by_daemon.clone()
    }

    /// Removes all directors, because their state is unknown.
    fn forget_directors(&self) {
        self.lock().view.directors.clear();
    }

    fn unannounced(&self, why: Option<String>) {
        let mut state = self.lock();
        if let Some(why) = &why
            && state.view.unannounced.as_ref() != Some(why)
        {
            tracing::warn!(event = "unannounced", "{why}");
        }
        state.view.unannounced = why;
    }

    fn announced(&self) -> Option<Director> {
        self.lock().announced.clone()
    }
}

/// All sources of a configuration.
#[derive(Debug)]
pub(crate) struct Sources {
    shared: Arc<Shared>,
    /// File of the stored answers; `None` if they are not stored.
    path: Option<PathBuf>,
    /// Runtime of the sources' thread, which starts with the first source.
    runtime: Option<Handle>,
    keeper: Option<JoinHandle<()>>,
    lookups: Lookups,
    names: HashMap<String, JoinHandle<()>>,
    etcd: Option<(Cluster, JoinHandle<()>)>,
    kubernetes: Option<(kubernetes::Settings, JoinHandle<()>)>,
}

/// The sources that the configuration uses.
pub(crate) struct Wanted<'a> {
    pub(crate) lookups: &'a Lookups,
    pub(crate) cluster: Option<&'a Cluster>,
    pub(crate) kubernetes: Option<&'a kubernetes::Settings>,
    /// DNS names to resolve.
    pub(crate) names: &'a BTreeSet<&'a String>,
}

/// The services of a source that the daemon uses, and the texts that it refuses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Made {
    /// Keys and texts of valid services.
    pub in_force: Vec<(String, String)>,
    /// Keys whose text is not used, with reasons.
    pub refused: BTreeMap<String, String>,
}

impl Drop for Sources {
    fn drop(&mut self) {
        let etcd = self.etcd.iter().map(|(_, task)| task);
        let kubernetes = self.kubernetes.iter().map(|(_, task)| task);
        let tasks = self.names.values().chain(&self.keeper);
        let tasks = tasks.chain(etcd).chain(kubernetes);
        tasks.for_each(JoinHandle::abort);
    }
}

impl Sources {
    /// Reads the answers stored at `path`, which apply until new ones arrive.
    pub(crate) fn recall(path: Option<PathBuf>) -> Self {
        let shared = Arc::new(Shared::default());
        if let Some(path) = &path {
            shared.lock().gathered = kept::read(path);
        }
        Self {
            shared,
            path,
            runtime: None,
            keeper: None,
            lookups: Lookups::default(),
            names: HashMap::new(),
            etcd: None,
            kubernetes: None,
        }
    }

    /// Sets the sources to follow. `in_force` contains the valid texts of etcd's services. `made`
    /// contains the services of Kubernetes that the daemon uses, and the keys of refused texts.
    pub(crate) fn set(&mut self, wanted: &Wanted<'_>, in_force: &[(String, String)], made: &Made) {
        let &Wanted {
            lookups,
            cluster,
            kubernetes,
            names,
        } = wanted;
        let none = names.is_empty() && cluster.is_none() && kubernetes.is_none();
        if none && self.runtime.is_none() {
            return;
        }
        let Some(runtime) = self.runtime() else {
            return;
        };
        let _inside = runtime.enter();
        self.set_etcd(cluster, in_force);
        self.set_kubernetes(kubernetes, made);
        if self.lookups != *lookups {
            self.lookups = lookups.clone();
            self.names.drain().for_each(|(_, task)| task.abort());
        }
        self.names.retain(|name, task| {
            let stays = names.contains(name);
            if !stays {
                task.abort();
            }
            stays
        });
        let mut state = self.shared.lock();
        state.dns.retain(|name, _| names.contains(name));
        let before = state.gathered.dns.len();
        state.gathered.dns.retain(|name, _| names.contains(name));
        if state.gathered.dns.len() != before {
            self.shared.keep.notify_one();
        }
        for &name in names.iter().take(dns::NAMES_MAX) {
            state.dns.entry(name.clone()).or_default();
            self.names.entry(name.clone()).or_insert_with(|| {
                dns::follow(name.clone(), self.lookups.clone(), Arc::clone(&self.shared))
            });
        }
    }

    /// Follows `cluster` instead of another etcd cluster; `None` for no cluster. Records the valid
    /// texts of its services.
    fn set_etcd(&mut self, cluster: Option<&Cluster>, in_force: &[(String, String)]) {
        let stays = self.etcd.as_ref().map(|(now, _)| now) == cluster;
        if !stays && let Some((_, task)) = self.etcd.take() {
            task.abort();
        }
        let mut state = self.shared.lock();
        let state = &mut *state;
        let prefix = cluster.map(|cluster| &cluster.prefix);
        if !stays {
            state.etcd = SourceState::default();
            state.view = etcd::View::default();
            if let Some(etcd) = &state.gathered.etcd
                && Some(&etcd.prefix) != prefix
            {
                state.gathered.etcd = None;
                self.shared.keep.notify_one();
            }
        }
        if let Some(etcd) = &mut state.gathered.etcd {
            self.accept(&mut etcd.services, in_force);
        }
        if let (Some(cluster), None) = (cluster, &self.etcd) {
            let task = etcd::follow(cluster.clone(), Arc::clone(&self.shared));
            self.etcd = Some((cluster.clone(), task));
        }
    }

    /// Follows this Kubernetes cluster instead of another one; `None` for no cluster. Records which
    /// of its services the daemon uses or refuses.
    fn set_kubernetes(&mut self, settings: Option<&kubernetes::Settings>, made: &Made) {
        let stays = self.kubernetes.as_ref().map(|(now, _)| now) == settings;
        if !stays && let Some((_, task)) = self.kubernetes.take() {
            task.abort();
        }
        let mut state = self.shared.lock();
        let state = &mut *state;
        if !stays {
            state.kubernetes = SourceState::default();
            state.kubernetes_view = kubernetes::View::default();
            let name = settings.map(kubernetes::Settings::name);
            if let Some(known) = &state.gathered.kubernetes
                && Some(&known.name) != name.as_ref()
            {
                state.gathered.kubernetes = None;
                self.shared.keep.notify_one();
            }
        }
        if let Some(known) = &mut state.gathered.kubernetes {
            self.accept(&mut known.services, &made.in_force);
        }
        state.refused_by_daemon = kubernetes::by_service(&made.refused);
        if let (Some(settings), None) = (settings, &self.kubernetes) {
            let task = kubernetes::follow(settings.clone(), Arc::clone(&self.shared));
            self.kubernetes = Some((settings.clone(), task));
        }
    }

    /// Records the texts in `in_force` as the last valid ones of their services.
    fn accept(&self, services: &mut BTreeMap<String, etcd::Text>, in_force: &[(String, String)]) {
        for (key, text) in in_force {
            if let Some(known) = services.get_mut(key)
                && known.good.as_deref() != Some(text)
            {
                known.good = Some(text.clone());
                self.shared.keep.notify_one();
            }
        }
    }

    /// Sets the record of this director, which is written to etcd. Has no effect without etcd.
    pub(crate) fn announce(&self, announced: Director) {
        if self.etcd.is_none() {
            return;
        }
        let mut state = self.shared.lock();
        if state.announced.as_ref() != Some(&announced) {
            state.announced = Some(announced);
            self.shared.announce.notify_one();
        }
    }

    /// Returns the runtime of the sources' thread, and starts it if necessary; `None` if that
    /// fails.
    fn runtime(&mut self) -> Option<Handle> {
        if self.runtime.is_none() {
            let started = start();
            match started {
                Ok(runtime) => {
                    let keeper = kept::keep(self.path.clone(), Arc::clone(&self.shared));
                    self.keeper = Some(runtime.spawn(keeper));
                    self.runtime = Some(runtime);
                }
                Err(why) => {
                    tracing::error!(
                        "DNS, etcd and Kubernetes are not queried: {why}; restart lvsd"
                    );
                }
            }
        }
        self.runtime.clone()
    }

    /// Waits until answers have changed.
    pub(crate) async fn changed(&self) {
        self.shared.news.notified().await;
    }

    pub(crate) fn gathered(&self) -> Gathered {
        self.shared.lock().gathered.clone()
    }

    /// Returns the status of the sources. Times since boot are converted to Unix time with `now`.
    pub(crate) fn status(&self, now: Now) -> Vec<SourceStatus> {
        let state = self.shared.lock();
        let gathered = &state.gathered;
        let status =
            |kind: &str, name: String, standing: &SourceState, items: Option<usize>| SourceStatus {
                kind: kind.to_owned(),
                name,
                answered: standing.answered.map(|at| now.unix_of(at)),
                known: items.is_some(),
                items: items.unwrap_or(0),
                answers: standing.answers,
                failures: standing.failures,
                trouble: standing.trouble.clone(),
                ..SourceStatus::default()
            };
        let dns = state.dns.iter().map(|(name, standing)| {
            let items = gathered.dns.get(name).map(Vec::len);
            status("dns", name.clone(), standing, items)
        });
        let mut all: Vec<SourceStatus> = dns.collect();
        if let Some((cluster, _)) = &self.etcd {
            let known = gathered.etcd.as_ref();
            let items = known.map(|etcd| {
                let servers = etcd.pools.values().map(BTreeMap::len);
                etcd.services.len() + servers.sum::<usize>()
            });
            let revision = known.and_then(|etcd| u64::try_from(etcd.revision).ok());
            all.push(SourceStatus {
                revision,
                ..status("etcd", cluster.prefix.clone(), &state.etcd, items)
            });
        }
        if let Some((settings, _)) = &self.kubernetes {
            let items = gathered.kubernetes.as_ref();
            let items = items.map(|known| known.services.len());
            all.push(SourceStatus {
                refused: state.kubernetes_view.refused + state.refused_by_daemon.len(),
                leader: state.kubernetes_view.leader.clone(),
                ..status("kubernetes", settings.name(), &state.kubernetes, items)
            });
        }
        all
    }

    /// The directors that have a record in etcd, by name.
    pub(crate) fn directors(&self) -> BTreeMap<String, Director> {
        self.shared.lock().view.directors.clone()
    }

    /// Messages about invalid keys of etcd, refused objects of Kubernetes, and other problems.
    pub(crate) fn left_out(&self) -> Vec<String> {
        let state = self.shared.lock();
        let lines = state.view.left_out.iter().chain(&state.view.unannounced);
        let lines = lines.chain(&state.kubernetes_view.left_out);
        lines.cloned().collect()
    }
}

/// Starts the sources' thread with its runtime.
fn start() -> Result<Handle, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start an event loop: {error}"))?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("lvsd-sources".to_owned())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))
        .map_err(|error| format!("cannot start the thread lvsd-sources: {error}"))?;
    Ok(handle)
}

/// Path of the stored answers of the daemon with the file `config`.
pub(crate) fn path(directory: &Path, config: &Path) -> PathBuf {
    kept::path(directory, config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_pause_of_source_doubles_up_to_30_seconds_and_varies_randomly() {
        let second = Duration::from_secs(1);
        for (failures, longest) in [(1, 1), (2, 2), (3, 4), (6, 30), (1000, 30)] {
            for _ in 0..50 {
                let pause = retry(failures, second);
                let longest = second * longest;
                assert!(
                    pause >= longest / 2 && pause <= longest,
                    "{failures}: {pause:?}"
                );
            }
        }
        assert_ne!(retry(9, second), retry(9, second));
    }

    #[test]
    fn refused_kubernetes_service_keeps_its_texts_and_texts_of_missing_services_are_removed() {
        let shared = Shared::default();
        let now = |texts: &[(&str, &str)]| Kubernetes {
            name: "k".to_owned(),
            services: texts
                .iter()
                .map(|(key, text)| {
                    let text = etcd::Text {
                        text: (*text).to_owned(),
                        good: None,
                    };
                    ((*key).to_owned(), text)
                })
                .collect(),
        };
        let view = kubernetes::View::default;
        let first = now(&[
            ("a/b/tcp/80", "1"),
            ("a/bc/tcp/80", "2"),
            ("a/d/tcp/80", "3"),
        ]);
        shared.take_kubernetes(first, &[], view());
        let second = now(&[("a/d/tcp/80", "4")]);
        shared.take_kubernetes(second, &["a/b".to_owned()], view());
        let known = shared.lock().gathered.kubernetes.clone();
        let wanted = now(&[("a/b/tcp/80", "1"), ("a/d/tcp/80", "4")]);
        assert_eq!(known, Some(wanted));
        shared.fail_kubernetes("k", "connection refused".to_owned());
        let state = shared.lock();
        assert_eq!(state.gathered.kubernetes, known);
        assert_eq!(
            (state.kubernetes.answers, state.kubernetes.failures),
            (2, 1)
        );
    }

    #[test]
    fn last_answer_of_a_source_applies_after_failure_and_restart() {
        let record = |n: u8| Record {
            ip: [10, 0, 0, n].into(),
            port: None,
            weight: Some(n.into()),
        };
        let shared = Shared::default();
        shared
            .lock()
            .dns
            .insert("a".to_owned(), SourceState::default());
        shared.take_dns("a", Ok(vec![record(1)]));
        shared.take_dns("a", Err("SERVFAIL".to_owned()));
        shared.take_dns("nobody asks", Ok(vec![record(2)]));
        let state = shared.lock();
        assert_eq!(
            state.gathered.dns,
            [("a".to_owned(), vec![record(1)])].into()
        );
        assert_eq!(state.dns["a"].trouble.as_deref(), Some("SERVFAIL"));
        assert_eq!((state.dns["a"].answers, state.dns["a"].failures), (1, 1));
        let directory = tempfile::tempdir().unwrap();
        let path = path(directory.path(), Path::new("/etc/lvsd/lvsd.toml"));
        kept::write(&path, &state.gathered).unwrap();
        assert_eq!(kept::read(&path), state.gathered);
        let again = Sources::recall(Some(path));
        assert_eq!(again.gathered(), state.gathered);
    }
}

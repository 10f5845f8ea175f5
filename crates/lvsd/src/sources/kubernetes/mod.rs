//! Services of type `LoadBalancer` in Kubernetes. lvsd lists Services, EndpointSlices and Nodes
//! once, and then watches them. After a failure, or if a watch cannot continue, it lists them
//! again; until then, the previous objects apply.
//!
//! ```text
//! list ──▶ Model ◀── watch
//!            │
//!            ├──▶ addresses (pure) ──▶ status of Services, by the director that holds the Lease
//!            └──▶ desired (pure) ────▶ the text of a [[service]] for each port ──▶ Shared
//! ```
//!
//! All directors read addresses only from the status of Services, so that they agree.

mod access;
mod addresses;
mod client;
mod desired;
mod lease;
mod model;
mod objects;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

pub use self::access::Token;
pub(crate) use self::access::{Access, POD, Wrong};
use self::addresses::{Assigned, assign};
pub use self::addresses::{Pool, Range};
use self::client::{Change, Client, Error, WRITERS, Writers, quoted};
use self::desired::desired;
use self::lease::{Claim, PERIOD, Step};
pub(crate) use self::model::is_name;
use self::model::{Kind, Model};
use self::objects::{Lease, List, Named, Service, Status, WatchEvent};
use super::etcd::Text;
use super::http::{self, Endpoint, Lines, plain};
use super::{Shared, retry, timer};
use crate::health::probe::Tls;

/// Maximum number of objects on one page of a list.
const PAGE: usize = 500;
/// Maximum number of objects of a list.
const LISTED_MAX: usize = 100_000;
/// Maximum number of pages of a list.
const PAGES_MAX: usize = 2000;
/// Time limit for reading a complete list.
const LIST_TIME: Duration = Duration::from_secs(300);
/// Duration of a watch in seconds, after which the API server ends it, and lvsd starts a new one.
const WATCH: u64 = 300;
/// Age at which a watch is considered dead, because the API server should have ended it.
const WATCH_MAX: Duration = Duration::from_secs(WATCH + 30);
/// Changes within this time are passed to the daemon together.
const GATHER: Duration = Duration::from_millis(200);
/// Minimum interval between two watches of the same kind.
const WATCH_MIN: Duration = Duration::from_secs(1);
/// A session that lasts this long resets the pause between attempts.
const WELL: Duration = Duration::from_secs(10);
/// Maximum number of statuses and of Events about refused Services to write before watches are read
/// again.
const WRITES: usize = 32;
/// Maximum length of an Event's message in characters; Kubernetes permits 1,024.
const MESSAGE_MAX: usize = 900;

/// Settings in `[kubernetes]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Address of the API server.
    pub server: Endpoint,
    /// CA of the API server, and lvsd's own certificate; `None` without TLS.
    pub(crate) tls: Option<Tls>,
    /// Token that lvsd sends to the API server; `None` for no token.
    pub token: Option<Token>,
    /// The namespace of the Services; `None` for all.
    pub namespace: Option<String>,
    /// The class of the Services that lvsd serves.
    pub class: String,
    /// Whether Services without a class are served, too.
    pub default_class: bool,
    /// Namespace and name of the Lease.
    pub lease: (String, String),
    /// The name of this director.
    pub director: String,
    /// Time limit for a request.
    pub timeout: Duration,
    /// The pools from which Services get addresses.
    pub pools: Vec<Pool>,
}

impl Settings {
    /// The default class of Services.
    pub const CLASS: &'static str = "lvsd";
    /// Default namespace and name of the Lease.
    pub const LEASE: &'static str = "lvsd/lvsd";
    /// Default time limit of a request.
    pub const TIMEOUT: Duration = Duration::from_secs(5);

    /// Name of the cluster in `lvsd status` and in the state directory.
    pub fn name(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{} {namespace}", self.server),
            None => self.server.to_string(),
        }
    }

    /// Whether a Service has the configured class or, if `default_class` is true, no class.
    fn has_class(&self, service: &Service) -> bool {
        let class = service.spec.load_balancer_class.as_deref();
        class.map_or(self.default_class, |class| class == self.class)
    }

    /// Whether lvsd serves a Service: its class fits, and it is not being deleted.
    fn is_ours(&self, service: &Service) -> bool {
        self.has_class(service) && service.metadata.deletion_timestamp.is_none()
    }
}

/// The services from Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Kubernetes {
    /// Name of the cluster.
    pub name: String,
    /// TOML of each service, by keys such as `default/web/tcp/80`.
    pub services: BTreeMap<String, Text>,
}

/// State of Kubernetes apart from the services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    /// Messages about refused objects and other problems.
    pub(super) left_out: Vec<String>,
    /// Number of refused objects.
    pub(super) refused: usize,
    /// The director that holds the Lease, and therefore writes addresses; `None` if it is unknown.
    pub(super) leader: Option<String>,
}

/// Groups reasons by Service: the first reason of each.
pub(super) fn by_service(refused: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut services = BTreeMap::new();
    for (key, why) in refused {
        let end = key
            .match_indices('/')
            .nth(1)
            .map_or(key.len(), |(at, _)| at);
        let service = services.entry(key[..end].to_owned());
        service.or_insert_with(|| why.clone());
    }
    services
}

/// Follows an API server until the task is aborted.
pub(super) fn follow(settings: Settings, shared: Arc<Shared>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let settings = Arc::new(settings);
        let name = settings.name();
        let mut session = Session::new(Arc::clone(&settings), &shared);
        let mut failures = 0_u32;
        loop {
            let began = Instant::now();
            let Err(error) = session.run().await;
            if began.elapsed() >= WELL {
                failures = 0;
            }
            failures += 1;
            shared.fail_kubernetes(&name, error.to_string());
            sleep(retry(failures, Duration::from_secs(1))).await;
        }
    })
}

fn unix() -> Duration {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default()
}

/// A watch of one kind of object.
struct Watch {
    kind: Kind,
    lines: Lines,
    /// Version up to which the model contains all changes.
    version: String,
    began: Instant,
    /// When the watch is considered dead.
    dead: Instant,
}

/// Type of a line of a watch.
enum Brought {
    /// An object was added, changed or deleted.
    Change,
    /// A bookmark, which only contains a version.
    Bookmark,
    /// The API server ended the watch, which is not an error.
    End,
    /// The requested version has expired: all objects must be listed again.
    Expired(String),
}

/// A session with one API server.
struct Session<'a> {
    settings: Arc<Settings>,
    shared: &'a Shared,
    client: Client,
    writers: Writers,
    model: Model,
    claim: Claim,
    /// Addresses of all Services, as of the last change.
    assigned: Assigned,
    /// The refused Services about which Events were written, with the reasons in these Events.
    reported: BTreeMap<String, String>,
    /// The reason why the API server refused a request for the Lease; `None` after successful
    /// requests.
    no_lease: Option<String>,
    /// The reason why this director could not write a status or an Event. Cleared when it writes a
    /// status.
    unwritten: Option<String>,
}

impl<'a> Session<'a> {
    fn new(settings: Arc<Settings>, shared: &'a Shared) -> Self {
        Self {
            client: Client::new(Arc::clone(&settings)),
            writers: Writers::new(&settings),
            settings,
            shared,
            model: Model::default(),
            claim: Claim::default(),
            assigned: Assigned::default(),
            reported: BTreeMap::new(),
            no_lease: None,
            unwritten: None,
        }
    }

    /// Lists and watches the objects, and writes addresses, until an error occurs.
    async fn run(&mut self) -> Result<Infallible, Error> {
        let mut early = 0;
        loop {
            let mut watches = Vec::new();
            for kind in Kind::ALL {
                let version = self.list(kind).await?;
                watches.push((kind, version));
            }
            self.hand_over()?;
            let began = Instant::now();
            let mut open = Vec::new();
            for (kind, version) in watches {
                open.push(self.watch(kind, version).await?);
            }
            if let Ok([services, slices, nodes]) = <[Watch; 3]>::try_from(open) {
                self.follow(services, slices, nodes).await?;
            }
            early = if began.elapsed() < WELL { early + 1 } else { 0 };
            if early > 0 {
                // If the API server discards its history quickly, lvsd pauses before it lists
                // again.
                sleep(retry(early, WATCH_MIN)).await;
            }
        }
    }

    /// Lists all objects of a kind at one version, and returns that version.
    async fn list(&mut self, kind: Kind) -> Result<String, Error> {
        let path = kind.path(self.settings.namespace.as_deref());
        let mut listed = Model::default();
        let mut count = 0;
        let mut limit = PAGE;
        let mut more: Option<String> = None;
        let end = Instant::now() + LIST_TIME;
        for _ in 0..PAGES_MAX {
            if Instant::now() > end {
                let why =
                    format!("the API server takes more than {LIST_TIME:?} for the list at {path}");
                return Err(Error::failed(why));
            }
            let after = more
                .as_deref()
                .map(|more| format!("&continue={}", quoted(more)));
            let page = format!("{path}?limit={limit}{}", after.unwrap_or_default());
            let page: List = match self.client.get(&page).await {
                // If objects are large, lvsd requests fewer at a time.
                Err(Error::Http(http::Error::TooLong)) if limit > 1 => {
                    limit /= 2;
                    continue;
                }
                other => other?,
            };
            if page.metadata.resource_version.is_empty() {
                let why = "the API server answers without a resourceVersion".to_owned();
                return Err(Error::failed(why));
            }
            count += page.items.len();
            if count > LISTED_MAX {
                let why = format!("the API server has more than {LISTED_MAX} objects at {path}");
                return Err(Error::failed(why));
            }
            for object in page.items {
                let put = listed.put_listed(kind, object.get(), &self.model);
                put.map_err(Error::failed)?;
            }
            more = page.metadata.more.filter(|more| !more.is_empty());
            if more.is_none() {
                self.model.replace(kind, listed);
                return Ok(page.metadata.resource_version);
            }
        }
        let why =
            format!("the API server answers with more than {PAGES_MAX} parts of a list at {path}");
        Err(Error::failed(why))
    }

    /// Starts a watch of a kind at `version`.
    async fn watch(&self, kind: Kind, version: String) -> Result<Watch, Error> {
        let path = kind.path(self.settings.namespace.as_deref());
        let path = format!(
            "{path}?watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH}&resourceVersion={}",
            quoted(&version)
        );
        Ok(Watch {
            kind,
            lines: self.client.watch(&path).await?,
            version,
            began: Instant::now(),
            dead: Instant::now() + WATCH_MAX,
        })
    }

    /// Applies changes, writes addresses and renews the Lease, until all objects must be listed
    /// again.
    async fn follow(
        &mut self,
        mut services: Watch,
        mut slices: Watch,
        mut nodes: Watch,
    ) -> Result<(), Error> {
        let mut hand_over_at = None;
        let mut keep_at = Instant::now();
        let mut write_at = None;
        loop {
            let (watch, line) = tokio::select! {
                line = services.next() => (&mut services, line?),
                line = slices.next() => (&mut slices, line?),
                line = nodes.next() => (&mut nodes, line?),
                () = timer(hand_over_at) => {
                    hand_over_at = None;
                    self.hand_over()?;
                    write_at = Some(Instant::now());
                    continue;
                }
                () = timer(write_at) => {
                    write_at = None;
                    if self.write().await? {
                        // More writes are due. The results of the previous ones are handed over,
                        // too.
                        write_at = Some(Instant::now());
                        hand_over_at.get_or_insert(Instant::now() + GATHER);
                    }
                    continue;
                }
                () = sleep_until(keep_at) => {
                    keep_at = Instant::now() + PERIOD;
                    self.keep().await?;
                    write_at = Some(Instant::now());
                    continue;
                }
            };
            match self.take(watch, line)? {
                Brought::Change => {
                    hand_over_at.get_or_insert(Instant::now() + GATHER);
                }
                Brought::Bookmark => {}
                Brought::End => {
                    sleep_until(watch.began + WATCH_MIN).await;
                    let again = self.watch(watch.kind, watch.version.clone()).await;
                    match again {
                        Err(error) if error.is_expired() => {
                            self.read_anew(&error.to_string());
                            return Ok(());
                        }
                        again => *watch = again?,
                    }
                }
                Brought::Expired(why) => {
                    self.read_anew(&why);
                    return Ok(());
                }
            }
        }
    }

    /// Logs why all objects are listed again.
    fn read_anew(&self, why: &str) {
        tracing::warn!(
            event = "read_anew",
            "Kubernetes, {}: a watch cannot continue ({why}); all objects are read again",
            self.settings.name()
        );
    }

    /// Handles a line of a watch; `None` is its end.
    fn take(&mut self, watch: &mut Watch, line: Option<Vec<u8>>) -> Result<Brought, Error> {
        let Some(line) = line else {
            return Ok(Brought::End);
        };
        let event: WatchEvent = serde_json::from_slice(&line).map_err(|error| {
            Error::failed(format!("the API server sent an invalid event: {error}"))
        })?;
        self.shared.hear_kubernetes();
        let object = event.object.get();
        if event.kind == "ERROR" {
            let status: Status = serde_json::from_str(object).unwrap_or_default();
            let why = match status.message.is_empty() {
                true => "without a reason".to_owned(),
                false => plain(&status.message),
            };
            return match status.code {
                410 => Ok(Brought::Expired(why)),
                code => Err(Error::Refused(code, why)),
            };
        }
        let version = Named::of(object).resource_version;
        if !version.is_empty() {
            watch.version = version;
        }
        match event.kind.as_str() {
            "BOOKMARK" => return Ok(Brought::Bookmark),
            "DELETED" => self.model.delete(watch.kind, object),
            _ => self.model.put(watch.kind, object).map_err(Error::failed)?,
        }
        Ok(Brought::Change)
    }

    /// Assigns addresses, translates the present objects to services, and passes these to the
    /// daemon.
    fn hand_over(&mut self) -> Result<(), Error> {
        self.assigned = assign(&self.model, &self.settings);
        let desired = desired(&self.model, &self.assigned, &self.settings);
        let desired = desired.map_err(Error::failed)?;
        let refused = self.assigned.refused.iter().chain(&desired.refused);
        // Any user of the cluster may have written the quoted texts.
        let refused = refused.map(|(key, why)| (key.clone(), plain(why)));
        let refused = refused.collect();
        let kubernetes = Kubernetes {
            name: self.settings.name(),
            services: desired
                .texts
                .into_iter()
                .map(|(key, text)| (key, Text { text, good: None }))
                .collect(),
        };
        let held = desired
            .refused
            .into_keys()
            .chain(self.assigned.held.iter().cloned());
        let held: Vec<String> = held.collect();
        self.assigned.refused = refused;
        self.shared.take_kubernetes(kubernetes, &held, self.view());
        Ok(())
    }

    fn view(&self) -> View {
        let services = self.assigned.refused.iter();
        let services = services.map(|(key, why)| format!("Kubernetes Service {key}: {why}"));
        let objects = self.model.refused.iter();
        let objects = objects
            .map(|(object, why)| format!("Kubernetes {object}: {why}; its previous state stays"));
        let twin = self.claim.twin.then(|| {
            format!(
                "another director is called {}, too: both write addresses in Kubernetes; give each a unique name (`director` in [kubernetes])",
                self.settings.director
            )
        });
        let lines = objects
            .chain(services)
            .chain(twin)
            .chain(self.no_lease.clone())
            .chain(self.unwritten.clone());
        View {
            left_out: crate::text::bounded(lines.collect()),
            refused: self.assigned.refused.len() + self.model.refused.len(),
            leader: self.claim.holder.as_deref().map(plain),
        }
    }

    /// Reads the Lease, and renews it or takes it over if this director may.
    async fn keep(&mut self) -> Result<(), Error> {
        let settings = Arc::clone(&self.settings);
        let (namespace, name) = (&settings.lease.0, &settings.lease.1);
        let all = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases");
        let one = format!("{all}/{name}");
        let lease: Option<Lease> = match self.client.get(&one).await {
            Ok(lease) => Some(lease),
            Err(error) if error.is_missing() => None,
            Err(error) => return self.not_kept(error),
        };
        self.shared.hear_kubernetes();
        let sent = Instant::now();
        let place = (namespace.as_str(), name.as_str());
        let step = self
            .claim
            .step(lease.as_ref(), place, &settings.director, (sent, unix()));
        if let Step::Write(body) = step {
            let written = match lease {
                Some(_) => self.client.put(&one, &body).await,
                None => self.client.post(&all, &body).await,
            };
            match written {
                Ok(lease) => {
                    let version = lease["metadata"]["resourceVersion"].as_str();
                    let was = self.claim.may_write(sent);
                    self.claim
                        .won(version.unwrap_or_default(), &settings.director, sent);
                    if !was {
                        tracing::info!(
                            event = "lease_held",
                            "this director ({}) writes the addresses of Services in Kubernetes",
                            settings.director
                        );
                    }
                }
                Err(error) if error.is_conflict() => self.claim.lost(),
                Err(error) => {
                    self.claim.lost();
                    return self.not_kept(error);
                }
            }
        }
        self.no_lease = None;
        self.shared.view_kubernetes(self.view());
        Ok(())
    }

    /// Handles a failed request for the Lease. If the API server refused it, this director serves
    /// without writing addresses. Other errors end the session.
    fn not_kept(&mut self, error: Error) -> Result<(), Error> {
        if !error.is_refused() {
            return Err(error);
        }
        let (namespace, name) = &self.settings.lease;
        let why = format!(
            "this director writes no addresses of Services, because the request for the Lease {namespace}/{name} failed: {error}"
        );
        log_new(self.no_lease.as_ref(), &why);
        self.no_lease = Some(why);
        self.shared.view_kubernetes(self.view());
        Ok(())
    }

    /// Stores why a write failed, and logs the reason unless it equals the previous one.
    fn cannot(&mut self, why: String) {
        log_new(self.unwritten.as_ref(), &why);
        self.unwritten = Some(why);
    }

    /// Writes due statuses and Events if this director holds the Lease. Returns whether to continue
    /// with further ones at once.
    async fn write(&mut self) -> Result<bool, Error> {
        let mut left = WRITES;
        while !self.assigned.wanted.is_empty() {
            if left == 0 || !self.claim.may_write(Instant::now()) {
                return Ok(left == 0);
            }
            left = left.saturating_sub(WRITERS);
            if !self.write_some().await? {
                return Ok(false);
            }
            if self.assigned.wanted.is_empty() {
                return Ok(true);
            }
        }
        self.complain(left).await
    }

    /// Writes the statuses of a few Services concurrently, then Events about new addresses. Returns
    /// false if a repetition of a failed write may succeed.
    async fn write_some(&mut self) -> Result<bool, Error> {
        let mut due = Vec::new();
        while due.len() < WRITERS
            && let Some((key, addresses)) = self.assigned.wanted.pop_first()
        {
            if let Some(service) = self.model.services.get(&key) {
                let change = Change::patch(status_path(&key), status(service, &addresses));
                let known = Model::ingress(service).eq(addresses.iter().copied());
                due.push((change, (key, addresses, known)));
            }
        }
        let (changes, due): (Vec<_>, Vec<_>) = due.into_iter().unzip();
        let answers = self.writers.send(changes).await;
        let (mut events, mut passing, mut fault) = (Vec::new(), false, None);
        for ((key, addresses, known), answer) in due.into_iter().zip(answers) {
            match answer {
                Ok(service) => {
                    self.unwritten = None;
                    self.model
                        .put(Kind::Service, &service.to_string())
                        .map_err(Error::failed)?;
                    if known {
                        continue;
                    }
                    let addresses: Vec<String> =
                        addresses.iter().map(ToString::to_string).collect();
                    let message = format!("assigned {}", addresses.join(", "));
                    tracing::info!(
                        event = "address_assigned",
                        "Kubernetes Service {key}: {message}"
                    );
                    events.extend(self.event(&key, "Normal", "AddressAssigned", &message));
                }
                // The watch will report the present state.
                Err(error) if error.is_conflict() || error.is_missing() => {}
                Err(error) if error.is_refused() => {
                    self.cannot(format!("cannot write the status of Service {key}: {error}"));
                    if error.is_passing() {
                        // The write is repeated after the next check of the Lease.
                        self.assigned.wanted.insert(key, addresses);
                        passing = true;
                    }
                }
                Err(error) => fault = Some(error),
            }
        }
        // An Event about an address is written at most once.
        self.write_events(events).await?;
        fault.map_or(Ok(!passing), Err)
    }

    /// Writes an Event for each Service that is refused for a new reason. Returns whether to
    /// continue with further ones at once.
    async fn complain(&mut self, mut left: usize) -> Result<bool, Error> {
        let mut refused = self.shared.refused_by_daemon();
        refused.retain(|key, _| self.model.services.contains_key(key));
        refused.extend(self.assigned.refused.clone());
        self.reported.retain(|key, _| refused.contains_key(key));
        refused.retain(|key, why| self.reported.get(key) != Some(why));
        while !refused.is_empty() {
            if left == 0 || !self.claim.may_write(Instant::now()) {
                return Ok(left == 0);
            }
            left = left.saturating_sub(WRITERS);
            let mut due = Vec::new();
            while due.len() < WRITERS
                && let Some((key, why)) = refused.pop_first()
            {
                if let Some(event) = self.event(&key, "Warning", "Refused", &why) {
                    due.push((event, (key, why)));
                }
            }
            let (events, due): (Vec<_>, Vec<_>) = due.into_iter().unzip();
            let reported = self.write_events(events).await?;
            let written = due
                .into_iter()
                .zip(&reported)
                .filter(|(_, reported)| **reported);
            self.reported.extend(written.map(|(due, _)| due));
            if reported.contains(&false) {
                return Ok(false);
            }
        }
        Ok(false)
    }

    fn event(
        &self,
        key: &str,
        kind: &str,
        reason: &str,
        message: &str,
    ) -> Option<(Change, String)> {
        let meta = &self.model.services.get(key)?.metadata;
        let now = lease::time(unix());
        let message: String = message.chars().take(MESSAGE_MAX).collect();
        let body = json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": { "generateName": "lvsd-", "namespace": meta.namespace },
            "involvedObject": {
                "apiVersion": "v1", "kind": "Service",
                "namespace": meta.namespace, "name": meta.name, "uid": meta.uid,
                "resourceVersion": meta.resource_version,
            },
            "type": kind, "reason": reason, "message": message,
            "source": { "component": "lvsd", "host": self.settings.director },
            "firstTimestamp": now, "lastTimestamp": now, "count": 1,
        });
        let path = format!("/api/v1/namespaces/{}/events", meta.namespace);
        Some((Change::post(path, body), key.to_owned()))
    }

    /// Writes Events. Returns one value for each: `false` if the write has failed and a repetition
    /// may succeed.
    async fn write_events(&mut self, events: Vec<(Change, String)>) -> Result<Vec<bool>, Error> {
        let (changes, keys): (Vec<_>, Vec<_>) = events.into_iter().unzip();
        let answers = self.writers.send(changes).await;
        let mut reported = Vec::with_capacity(keys.len());
        for (key, answer) in keys.into_iter().zip(answers) {
            match answer {
                Ok(_) => reported.push(true),
                Err(error) if error.is_refused() => {
                    self.cannot(format!(
                        "cannot write an Event about Service {key}: {error}"
                    ));
                    reported.push(!error.is_passing());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(reported)
    }
}

/// Merge patch that sets the addresses in the status of a Service.
fn status(service: &Service, addresses: &[IpAddr]) -> Value {
    let ports = service.spec.ports.iter().map(|port| {
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        json!({ "port": port.port, "protocol": protocol })
    });
    let ports: Vec<Value> = ports.collect();
    let ingress = addresses
        .iter()
        .map(|ip| json!({ "ip": ip, "ipMode": "VIP", "ports": ports }));
    let ingress: Vec<Value> = ingress.collect();
    json!({
        "metadata": { "resourceVersion": service.metadata.resource_version },
        "status": { "loadBalancer": { "ingress": ingress } },
    })
}

/// Logs a failed write, unless it is already `known`.
fn log_new(known: Option<&String>, why: &str) {
    if known.map(String::as_str) != Some(why) {
        tracing::warn!(event = "unwritten", "{why}");
    }
}

/// API path of the status of a Service.
fn status_path(key: &str) -> String {
    let (namespace, name) = key.split_once('/').unwrap_or_default();
    format!("/api/v1/namespaces/{namespace}/services/{name}/status")
}

impl Watch {
    /// Waits for the next line; `None` at the end of the watch. Dropping the future loses no data.
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let limit = self.dead.saturating_duration_since(Instant::now());
        match timeout(limit, self.lines.next()).await {
            Ok(line) => Ok(line?),
            Err(_) => Err(Error::failed(format!(
                "the API server has not ended a watch after {WATCH_MAX:?}"
            ))),
        }
    }
}

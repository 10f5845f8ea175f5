//! Services and servers in etcd, by its JSON gateway: all keys under a prefix are listed once, and
//! then watched at the same member. Where that fails in any way, the next member is listed anew;
//! what was known holds until then.
//!
//! ```text
//! list ──▶ Model ◀── watch       every few seconds: a read that a majority has to agree to, which
//!            │                    a member that is cut off cannot answer, nor one whose watch has
//!            ▼                    got stuck pass
//!          Shared                 under a lease: what this director tells of itself
//! ```

mod client;
mod keys;
mod message;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

pub(crate) use client::{Access, Client, Endpoint, Password};
pub(crate) use keys::{DOWN_MAX, Director, Registration, Verdict};
pub use keys::{Etcd, Text};

use self::client::{Error, Watching};
use self::keys::KEYS_MAX;
pub(super) use self::keys::Model;
use self::message::{Bytes, Number, Range, end_of};
use super::{Shared, retry};
use crate::config::Cluster;

/// Keys that are asked for at once.
const PAGE: i64 = 500;
/// Between two looks whether the member still has a majority behind it.
const PROBE: Duration = Duration::from_secs(5);
/// What arrives within this goes to the daemon together; and so does what it tells.
const GATHER: Duration = Duration::from_millis(200);
/// A session of this length counts as one that went well.
const WELL: Duration = Duration::from_secs(10);
/// Between two attempts at what is not permitted.
const FORBIDDEN: Duration = Duration::from_secs(60);

/// What is known of etcd besides services and servers.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    /// Keys that are not understood, and pools without anybody, in words.
    pub(super) left_out: Vec<String>,
    /// The directors that live.
    pub(super) directors: BTreeMap<String, Director>,
    /// What they say of servers.
    pub(super) verdicts: BTreeMap<String, Verdict>,
    /// Why this director is not among them.
    pub(super) untold: Option<String>,
}

/// What this director tells of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) director: Director,
    /// The servers that it finds down, where that is shared.
    pub(crate) verdict: Option<Verdict>,
}

/// Follows what etcd says until it is aborted.
pub(super) fn follow(settings: Cluster, shared: Arc<Shared>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let access = Arc::new(settings.access.clone());
        let members = access.endpoints.len().max(1);
        let (mut next, mut failures) = (0, 0_u32);
        let mut heard = Instant::now();
        loop {
            let Some(endpoint) = access.endpoints.get(next % members) else {
                return;
            };
            let began = Instant::now();
            let mut session = Session {
                settings: &settings,
                shared: &shared,
                client: Client::new(Arc::clone(&access), endpoint.clone()),
                model: Model::new(&settings.prefix),
                seen: 0,
                heard,
                lease: None,
                written: Told::default(),
                keep_at: Instant::now(),
                twin: false,
            };
            let Err(error) = session.run().await;
            heard = session.heard;
            if began.elapsed() >= WELL {
                failures = 0;
            }
            failures += 1;
            next += 1;
            shared.fail_etcd(&settings.prefix, format!("{endpoint} {error}"));
            // Everybody is asked once before there is a pause.
            let rounds = failures / u32::try_from(members).unwrap_or(1);
            let whole = failures.is_multiple_of(u32::try_from(members).unwrap_or(1));
            let mut pause = match whole {
                true => retry(rounds, Duration::from_secs(1)),
                false => GATHER,
            };
            let left = settings.lease.saturating_sub(heard.elapsed());
            if left.is_zero() {
                shared.forget_directors();
            } else {
                pause = pause.min(left);
            }
            sleep(pause).await;
        }
    })
}

/// At that time, if there is one.
async fn timer(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// With one member.
struct Session<'a> {
    settings: &'a Cluster,
    shared: &'a Shared,
    client: Client,
    model: Model,
    /// The revision up to which everything is known.
    seen: i64,
    /// When a majority was last heard.
    heard: Instant,
    lease: Option<i64>,
    /// What was last written under it.
    written: Told,
    /// When the lease is to be kept, or asked for.
    keep_at: Instant,
    /// Somebody else has written what this director tells of itself.
    twin: bool,
}

impl Session<'_> {
    /// Until something goes wrong.
    async fn run(&mut self) -> Result<Infallible, Error> {
        loop {
            self.list().await?;
            let mut watching = self
                .client
                .watch(&self.settings.prefix, self.seen + 1)
                .await?;
            self.follow(&mut watching).await?;
        }
    }

    /// Reads all keys, as they are at one moment.
    async fn list(&mut self) -> Result<(), Error> {
        let prefix = self.settings.prefix.as_bytes();
        let mut range = Range {
            key: Bytes(prefix.to_vec()),
            range_end: Some(Bytes(end_of(prefix))),
            limit: Number(PAGE),
            ..Range::default()
        };
        let mut all = Vec::new();
        let mut cluster = 0;
        loop {
            let page = self.client.range(range.clone()).await?;
            self.heard = Instant::now();
            if range.revision.is_none() {
                cluster = page.header.cluster_id.0;
                self.seen = page.header.revision.0;
                range.revision = Some(page.header.revision);
            }
            let most = i64::try_from(KEYS_MAX).unwrap_or(i64::MAX);
            if page.count.0 > most || all.len() > KEYS_MAX {
                let why = format!("has more than {KEYS_MAX} keys under the prefix");
                return Err(Error::Failed(why));
            }
            let last = page.kvs.last().map(|kv| kv.key.0.clone());
            all.extend(page.kvs);
            match last {
                Some(mut last) if page.more => {
                    last.push(0);
                    range.key = Bytes(last);
                }
                _ => break,
            }
        }
        let before = self.shared.etcd(&self.settings.prefix);
        let model = Model::listed(&before, cluster, self.seen, all).map_err(Error::Failed)?;
        let lost = before.cluster == cluster && self.seen < before.revision;
        if (lost || before.cluster != cluster && before.cluster != 0)
            && model.etcd.services.len() < before.services.len()
        {
            return Err(Error::Failed(format!(
                "is another cluster than before, or an older copy of it, and lacks {} of {} services: it is not believed until they are written again",
                before.services.len() - model.etcd.services.len(),
                before.services.len()
            )));
        }
        self.model = model;
        self.hand_over();
        Ok(())
    }

    /// Gives what is known to the daemon.
    fn hand_over(&self) {
        self.shared.take_etcd(&self.model);
    }

    /// Follows what happens, until it has to be listed anew.
    async fn follow(&mut self, watching: &mut Watching) -> Result<(), Error> {
        let mut probe_at = Instant::now() + PROBE;
        let mut hand_over_at = None;
        let mut tell_at = None;
        let shared = self.shared;
        // The revision that was there at the last probe; and whether keys were missing.
        let mut owed = self.seen;
        let mut missing = false;
        loop {
            tokio::select! {
                watched = watching.next() => {
                    let watched = watched?;
                    if watched.canceled {
                        if watched.compact_revision.0 > 0 {
                            self.read_anew(&format!(
                                "its history up to revision {} was compacted before this director heard of it",
                                watched.compact_revision.0
                            ));
                            return Ok(());
                        }
                        let why = format!("has ended the watch: {}", watched.cancel_reason);
                        return Err(Error::Failed(why));
                    }
                    missing = false;
                    self.seen = self.seen.max(watched.header.revision.0);
                    for event in &watched.events {
                        if self.of_twin(event) {
                            tell_at.get_or_insert(Instant::now() + GATHER);
                        }
                        let concerns = self.model.take(event).map_err(Error::Failed)?;
                        if concerns.config || concerns.directors {
                            hand_over_at.get_or_insert(Instant::now() + GATHER);
                        }
                    }
                }
                () = timer(hand_over_at) => {
                    hand_over_at = None;
                    self.hand_over();
                }
                () = sleep_until(probe_at) => {
                    if self.seen < owed {
                        return Err(Error::Failed("has stopped telling what changes".to_owned()));
                    }
                    let (latest, count) = self.probe().await?;
                    let lacks = count != self.model.keys.len();
                    if lacks && missing {
                        self.read_anew("it has another number of keys than it told of");
                        return Ok(());
                    }
                    missing = lacks;
                    owed = latest;
                    probe_at = Instant::now() + PROBE;
                }
                () = sleep_until(self.keep_at) => {
                    self.keep().await?;
                }
                () = shared.tell.notified() => {
                    tell_at.get_or_insert(Instant::now() + GATHER);
                }
                () = timer(tell_at) => {
                    tell_at = None;
                    if self.lease.is_some() {
                        self.tell().await?;
                    }
                }
            }
        }
    }

    /// What was watched is not all that happened: it is told why everything is read again.
    fn read_anew(&self, why: &str) {
        tracing::warn!(
            event = "read_anew",
            "etcd, {}: {why}; known up to revision {}, all keys are read anew",
            self.settings.prefix,
            self.seen
        );
    }

    /// Asks for what was changed last, which takes a majority: its revision, and how many keys
    /// there are.
    async fn probe(&mut self) -> Result<(i64, usize), Error> {
        let prefix = self.settings.prefix.as_bytes();
        let range = Range {
            key: Bytes(prefix.to_vec()),
            range_end: Some(Bytes(end_of(prefix))),
            limit: Number(1),
            keys_only: true,
            sort_order: Some("DESCEND"),
            sort_target: Some("MOD"),
            ..Range::default()
        };
        let page = self.client.range(range).await?;
        self.heard = Instant::now();
        self.shared.hear_etcd();
        let latest = page.kvs.first().map_or(0, |kv| kv.mod_revision.0);
        Ok((latest, usize::try_from(page.count.0).unwrap_or(0)))
    }

    /// Keeps the lease, or asks for one.
    async fn keep(&mut self) -> Result<(), Error> {
        self.keep_at = Instant::now() + self.settings.lease / 3;
        if let Some(id) = self.lease {
            if !self.client.keep(id).await? {
                self.lose_lease();
            }
            return Ok(());
        }
        match self.client.grant(self.settings.lease).await {
            Ok(id) => self.lease = Some(id),
            Err(error) if error.is_forbidden() => {
                self.untold(&error);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        self.tell().await
    }

    /// etcd knows nothing of the lease any more, nor of what was written under it.
    fn lose_lease(&mut self) {
        tracing::warn!(
            event = "lease_lost",
            "etcd took this director for gone; it registers itself again"
        );
        self.lease = None;
        self.written = Told::default();
        self.keep_at = Instant::now() + GATHER;
    }

    /// Looks whether an event is about what this director tells of itself, and not by itself; then
    /// it is to tell that again, once, so that the other one notices too.
    fn of_twin(&mut self, event: &message::Event) -> bool {
        let (prefix, name) = (&self.settings.prefix, &self.settings.director);
        let own = format!("{prefix}directors/{name}");
        let (Some(lease), true) = (self.lease, event.kv.key.0 == own.as_bytes()) else {
            return false;
        };
        let (before, gone) = (self.twin, event.kind == "DELETE");
        self.twin = !gone && (before || event.kv.lease.0 != lease);
        let noticed = self.twin && !before;
        if noticed {
            self.shared.untold(Some(format!(
                "another director is called {name}, too: directors count it and this one as one; give each a name of its own (`director` in [cluster])"
            )));
        }
        if gone || noticed {
            self.written = Told::default();
        }
        gone || noticed
    }

    /// Other directors are not told of this one.
    fn untold(&mut self, error: &Error) {
        self.keep_at = Instant::now() + FORBIDDEN;
        self.lease = None;
        let name = &self.settings.director;
        self.shared.untold(Some(format!(
            "other directors do not see this one ({name}): etcd {error}; give the user the right to write under {}directors/ and {0}verdicts/",
            self.settings.prefix
        )));
    }

    /// Writes what this director tells of itself, as far as that is new.
    async fn tell(&mut self) -> Result<(), Error> {
        let (Some(lease), told) = (self.lease, self.shared.told()) else {
            return Ok(());
        };
        let Some(told) = told.filter(|told| *told != self.written) else {
            return Ok(());
        };
        let (prefix, name) = (&self.settings.prefix, &self.settings.director);
        let mut all = Vec::new();
        if told.director != self.written.director {
            let value = serde_json::to_string(&told.director);
            all.push((format!("{prefix}directors/{name}"), value));
        }
        if told.verdict != self.written.verdict
            && let Some(verdict) = &told.verdict
        {
            let value = serde_json::to_string(verdict);
            all.push((format!("{prefix}verdicts/{name}"), value));
        }
        for (key, value) in all {
            let value = value.map_err(|error| Error::Failed(error.to_string()))?;
            match self.client.put(&key, &value, lease).await {
                Ok(()) => {}
                Err(error) if error.is_gone() => {
                    self.lose_lease();
                    return Ok(());
                }
                Err(error) if error.is_forbidden() => {
                    self.untold(&error);
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        if !self.twin {
            self.shared.untold(None);
        }
        self.written = told;
        Ok(())
    }
}

//! Services and servers in etcd, over its JSON gateway. lvsd lists all keys below a prefix once,
//! and then watches them at the same member. After a failure, it lists them at the next member;
//! until then, the previous keys apply.
//!
//! ```text
//! list ──▶ Model ◀── watch
//!            │
//!            ▼
//!          Shared
//! ```
//!
//! Every few seconds, lvsd probes the member with a linearizable read, which fails if the member is
//! disconnected from the majority, and shows changes that the watch has missed. If it has missed
//! some, lvsd lists all keys again. lvsd also writes a record of this director, which etcd deletes
//! when the director's lease ends.

mod client;
mod keys;
mod message;

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

pub(crate) use client::{Access, Client, Password};

/// Default port of etcd.
pub(crate) const PORT: u16 = 2379;
pub(crate) use keys::{Director, Registration};
pub use keys::{Etcd, Text};

use self::client::{Error, Watching};
pub(super) use self::keys::Model;
use self::keys::{KEYS_MAX, hash};
use self::message::{Bytes, Number, Range, Ranged, end_of};
use super::{Shared, retry, timer};

/// Maximum number of keys in one request of a listing.
const PAGE: i64 = 500;
/// Interval at which lvsd probes the member of etcd that it uses.
const PROBE: Duration = Duration::from_secs(5);
/// After this number of consecutive probes that find another number of keys than the watch has
/// reported, all keys are listed again.
const DIFFER_MAX: u32 = 3;
/// Changes within this time are passed to the daemon together. Also other short pauses, such as
/// before lvsd tries the next member.
const GATHER: Duration = Duration::from_millis(200);
/// A session that lasts this long resets the pause between attempts.
const WELL: Duration = Duration::from_secs(10);
/// Pause after etcd has refused, for lack of permission, to store the record of this director.
const FORBIDDEN: Duration = Duration::from_secs(60);

/// Settings in `[cluster]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Members of etcd, and credentials.
    pub access: Access,
    /// Prefix of all keys.
    pub prefix: String,
    /// Name of this director.
    pub director: String,
    /// Time without a renewal after which a director counts as absent.
    pub lease: Duration,
}

impl Cluster {
    /// Default prefix of keys.
    pub const PREFIX: &'static str = "/lvs/";
    /// Default of [`Cluster::lease`].
    pub const LEASE: Duration = Duration::from_secs(10);
    /// Default time limit of a request.
    pub const TIMEOUT: Duration = Duration::from_secs(3);
    /// Permitted durations of a lease.
    pub const LEASES: RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(3600);
    /// Maximum length of a prefix or a name in bytes.
    pub(crate) const NAME_MAX: usize = 128;

    /// Whether `name` can be one part of an etcd key: it has 1 to 128 bytes, and no control
    /// characters, whitespace and slashes.
    pub fn is_name(name: &str) -> bool {
        let right = |c: char| !c.is_control() && !c.is_whitespace() && c != '/';
        (1..=Self::NAME_MAX).contains(&name.len()) && name.chars().all(right)
    }
}

/// State of etcd apart from services and servers.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    /// Messages about invalid keys and empty pools.
    pub(super) left_out: Vec<String>,
    /// Directors with a valid lease.
    pub(super) directors: BTreeMap<String, Director>,
    /// The fault of this director's record in etcd, as text: it cannot be written, or another
    /// director has the same name. `None` without a fault.
    pub(super) unannounced: Option<String>,
}

/// Follows etcd until the task is aborted.
pub(super) fn follow(settings: Cluster, shared: Arc<Shared>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let access = Arc::new(settings.access.clone());
        let members = access.endpoints.len().max(1);
        let (mut next, mut failures) = (0, 0_u32);
        let mut last_answer = Instant::now();
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
                last_answer,
                lease: None,
                written: None,
                keep_at: Instant::now(),
                twin: None,
            };
            let Err(error) = session.run().await;
            last_answer = session.last_answer;
            if began.elapsed() >= WELL {
                failures = 0;
            }
            failures += 1;
            next += 1;
            shared.fail_etcd(&settings.prefix, format!("{endpoint}: {error}"));
            // Each member is tried once before a longer pause.
            let rounds = failures / u32::try_from(members).unwrap_or(1);
            let whole = failures.is_multiple_of(u32::try_from(members).unwrap_or(1));
            let mut pause = match whole {
                true => retry(rounds, Duration::from_secs(1)),
                false => GATHER,
            };
            let left = settings.lease.saturating_sub(last_answer.elapsed());
            if left.is_zero() {
                shared.forget_directors();
            } else {
                pause = pause.min(left);
            }
            sleep(pause).await;
        }
    })
}

/// Compares probes with the watch, to find changes that the watch has not reported. etcd before
/// 3.4.31 and 3.5.13 may omit changes, or the notice of a compacted history, from a watch that
/// continues with later changes.
#[derive(Debug)]
struct Owed {
    /// Revision up to which the watch has reported all changes except deletions.
    announced: i64,
    /// Latest revision of a key that a probe has found.
    latest: i64,
    /// Hashes of keys that had a later revision in the last probe than in the watch, with that
    /// revision.
    behind: HashMap<u64, i64>,
    /// Number of consecutive probes that found another number of keys than the watch has reported.
    differ: u32,
}

impl Owed {
    /// The state after a listing at `revision`, which contains all changes up to it.
    fn of(revision: i64) -> Self {
        Self {
            announced: revision,
            latest: revision,
            behind: HashMap::new(),
            differ: 0,
        }
    }

    /// Handles the result of a probe; `known` contains the revisions of keys in the model. Returns
    /// a reason if all keys must be listed again.
    fn look(&mut self, page: Ranged, known: &HashMap<u64, i64>) -> Option<&'static str> {
        let lacks = |key: u64, revision: i64| known.get(&key).is_none_or(|known| *known < revision);
        let found = page.kvs.iter().map(|kv| (hash(kv), kv.mod_revision.0));
        let behind: HashMap<_, _> = found.filter(|&(key, at)| lacks(key, at)).collect();
        let still = |(key, at): (&u64, &i64)| behind.contains_key(key) && lacks(*key, *at);
        if self.behind.iter().any(still) {
            return Some("the watch did not deliver the present values of some keys");
        }
        let latest = page.kvs.iter().map(|kv| kv.mod_revision.0).max();
        self.latest = latest.unwrap_or(self.latest).max(self.latest);
        if behind.is_empty() && !page.more {
            self.announced = page.header.revision.0;
        }
        self.behind = behind;
        // The watch may not have reported a deletion yet.
        let differs = usize::try_from(page.count.0) != Ok(known.len());
        self.differ = if differs { self.differ + 1 } else { 0 };
        (self.differ >= DIFFER_MAX).then_some(
            "the number of keys in etcd differs from the number of keys that the watch delivered",
        )
    }
}

/// A session with one member.
struct Session<'a> {
    settings: &'a Cluster,
    shared: &'a Shared,
    client: Client,
    model: Model,
    /// Revision up to which all changes have been received.
    seen: i64,
    /// Time of the last answer that a majority has confirmed.
    last_answer: Instant,
    lease: Option<i64>,
    /// The record of this director that was written last; `None` if it must be written again.
    written: Option<Director>,
    /// When to renew the lease, or to request one.
    keep_at: Instant,
    /// Last time at which another process wrote this director's record.
    twin: Option<Instant>,
}

impl Session<'_> {
    /// Lists and watches the keys, and keeps this director's record up to date, until an error
    /// occurs.
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

    /// Lists all keys at one revision, and passes them to the daemon. Fails without effect if etcd is
    /// another cluster than before, or an older copy of it, and has fewer services.
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
            self.last_answer = Instant::now();
            if range.revision.is_none() {
                cluster = page.header.cluster_id.0;
                self.seen = page.header.revision.0;
                range.revision = Some(page.header.revision);
            }
            let most = i64::try_from(KEYS_MAX).unwrap_or(i64::MAX);
            if page.count.0 > most || all.len() > KEYS_MAX {
                let why = format!(
                    "etcd has more than {KEYS_MAX} keys under the prefix: remove keys from etcd, or divide them among several prefixes"
                );
                return Err(Error::failed(why));
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
        let model = Model::listed(&before, cluster, self.seen, all).map_err(Error::failed)?;
        let lost = before.cluster == cluster && self.seen < before.revision;
        if (lost || before.cluster != cluster && before.cluster != 0)
            && model.etcd.services.len() < before.services.len()
        {
            return Err(Error::failed(format!(
                "etcd is another cluster than before, or an older copy of it, and lacks {} of {} services: lvsd ignores the services in etcd until the missing ones are written again",
                before.services.len() - model.etcd.services.len(),
                before.services.len()
            )));
        }
        self.model = model;
        self.hand_over();
        Ok(())
    }

    /// Passes the present keys to the daemon.
    fn hand_over(&self) {
        self.shared.take_etcd(&self.model);
    }

    /// Applies events of the watch, probes the member and renews the lease, until all keys must be
    /// listed again.
    async fn follow(&mut self, watching: &mut Watching) -> Result<(), Error> {
        let mut probe_at = Instant::now() + PROBE;
        let mut hand_over_at = None;
        let mut report_at = None;
        let shared = self.shared;
        let mut owed = Owed::of(self.seen);
        loop {
            tokio::select! {
                watched = watching.next() => {
                    let watched = watched?;
                    if watched.canceled {
                        if watched.compact_revision.0 > 0 {
                            self.read_anew(&format!(
                                "the history up to revision {} was compacted before this director had read it",
                                watched.compact_revision.0
                            ));
                            return Ok(());
                        }
                        let why = match watched.cancel_reason.as_str() {
                            "" => "etcd has ended the watch without a reason".to_owned(),
                            why => format!("etcd has ended the watch: {why}"),
                        };
                        return Err(Error::failed(why));
                    }
                    for event in &watched.events {
                        // Events of later messages may have the revision in the header of this
                        // message.
                        self.seen = self.seen.max(event.kv.mod_revision.0);
                        if self.of_twin(event) {
                            report_at.get_or_insert(Instant::now() + GATHER);
                        }
                        let concerns = self.model.take(event).map_err(Error::failed)?;
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
                    if self.seen < owed.latest {
                        return Err(Error::failed("etcd has stopped sending changes".to_owned()));
                    }
                    let page = self.probe(owed.announced).await?;
                    if let Some(why) = owed.look(page, &self.model.keys) {
                        self.read_anew(why);
                        return Ok(());
                    }
                    probe_at = Instant::now() + PROBE;
                }
                () = sleep_until(self.keep_at) => {
                    self.keep().await?;
                }
                () = shared.announce.notified() => {
                    report_at.get_or_insert(Instant::now() + GATHER);
                }
                () = timer(report_at) => {
                    report_at = None;
                    if self.lease.is_some() {
                        self.announce().await?;
                    }
                }
            }
        }
    }

    /// Logs why all keys are listed again.
    fn read_anew(&self, why: &str) {
        tracing::warn!(
            event = "read_anew",
            "etcd, {}: {why}; lvsd has the changes up to revision {}, and reads all keys again",
            self.settings.prefix,
            self.seen
        );
    }

    /// Lists keys that changed after revision `after`, with a linearizable read.
    async fn probe(&mut self, after: i64) -> Result<Ranged, Error> {
        let prefix = self.settings.prefix.as_bytes();
        let range = Range {
            key: Bytes(prefix.to_vec()),
            range_end: Some(Bytes(end_of(prefix))),
            limit: Number(i64::try_from(KEYS_MAX).unwrap_or(i64::MAX)),
            min_mod_revision: Some(Number(after + 1)),
            keys_only: true,
            ..Range::default()
        };
        let page = self.client.range(range).await?;
        self.last_answer = Instant::now();
        self.shared.hear_etcd();
        Ok(page)
    }

    async fn keep(&mut self) -> Result<(), Error> {
        self.keep_at = Instant::now() + self.settings.lease / 3;
        if let Some(id) = self.lease {
            if !self.client.keep(id).await? {
                self.lose_lease();
                return Ok(());
            }
            let Some(seen) = self.twin else {
                return Ok(());
            };
            // While another process has the same name, both write the record at this interval.
            if seen.elapsed() > self.settings.lease {
                self.twin = None;
            }
            self.written = None;
            return self.announce().await;
        }
        match self.client.grant(self.settings.lease).await {
            Ok(id) => self.lease = Some(id),
            Err(error) if error.is_forbidden() => {
                self.unannounced(&error);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        self.announce().await
    }

    /// Discards the lease, which has ended, and requests another one soon.
    fn lose_lease(&mut self) {
        tracing::warn!(
            event = "lease_lost",
            "etcd has removed the record of this director, which is written again"
        );
        self.lease = None;
        self.written = None;
        self.keep_at = Instant::now() + GATHER;
    }

    /// Whether this director must write its record again, because it was deleted or another process
    /// has begun to write it. Writing the record informs that process of the duplicate name.
    fn of_twin(&mut self, event: &message::Event) -> bool {
        let (prefix, name) = (&self.settings.prefix, &self.settings.director);
        let own = format!("{prefix}directors/{name}");
        let (Some(lease), true) = (self.lease, event.kv.key.0 == own.as_bytes()) else {
            return false;
        };
        let gone = event.kind == "DELETE";
        let foreign = !gone && event.kv.lease.0 != lease;
        let noticed = foreign && self.twin.is_none();
        if gone {
            self.twin = None;
        } else if foreign {
            self.twin = Some(Instant::now());
        }
        if noticed {
            self.shared.unannounced(Some(format!(
                "another director is called {name}, too: both appear as one director; give each a unique name (`director` in [cluster])"
            )));
        }
        if gone || noticed {
            self.written = None;
        }
        gone || noticed
    }

    /// Records that etcd does not permit this director to write its record.
    fn unannounced(&mut self, error: &Error) {
        self.keep_at = Instant::now() + FORBIDDEN;
        self.lease = None;
        let name = &self.settings.director;
        self.shared.unannounced(Some(format!(
            "other directors do not see this one ({name}): {error}; give the user the right to write under {}directors/",
            self.settings.prefix
        )));
    }

    /// Writes the record of this director if it has changed.
    async fn announce(&mut self) -> Result<(), Error> {
        let (Some(lease), Some(announced)) = (self.lease, self.shared.announced()) else {
            return Ok(());
        };
        if self.written.as_ref() == Some(&announced) {
            return Ok(());
        }
        let (prefix, name) = (&self.settings.prefix, &self.settings.director);
        let value =
            serde_json::to_string(&announced).map_err(|error| Error::failed(error.to_string()))?;
        let key = format!("{prefix}directors/{name}");
        match self.client.put(&key, &value, lease).await {
            Ok(()) => {}
            Err(error) if error.is_gone() => {
                self.lose_lease();
                return Ok(());
            }
            Err(error) if error.is_forbidden() => {
                self.unannounced(&error);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        if self.twin.is_none() {
            self.shared.unannounced(None);
        }
        self.written = Some(announced);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::message::{Header, KeyValue};
    use super::*;

    fn kv(key: &str, revision: i64) -> KeyValue {
        KeyValue {
            key: Bytes(key.as_bytes().to_vec()),
            mod_revision: Number(revision),
            ..KeyValue::default()
        }
    }

    /// Result of a probe with the keys that changed after `owed.announced`.
    fn page(owed: &Owed, revision: i64, all: &[(&str, i64)]) -> Ranged {
        let after = all.iter().filter(|(_, at)| *at > owed.announced);
        Ranged {
            header: Header {
                revision: Number(revision),
                ..Header::default()
            },
            kvs: after.map(|(key, at)| kv(key, *at)).collect(),
            count: Number(i64::try_from(all.len()).unwrap()),
            ..Ranged::default()
        }
    }

    fn known(all: &[(&str, i64)]) -> HashMap<u64, i64> {
        let all = all.iter().map(|(key, at)| (hash(&kv(key, *at)), *at));
        all.collect()
    }

    #[test]
    fn stalled_etcd_watch_is_detected_and_slow_etcd_watch_is_not() {
        let mut owed = Owed::of(10);
        let mut look = |revision, there: &[(&str, i64)], announced: &[(&str, i64)]| {
            let page = page(&owed, revision, there);
            (
                owed.look(page, &known(announced)),
                owed.announced,
                owed.latest,
            )
        };
        let before = [("a", 3), ("b", 10)];
        assert_eq!(look(11, &before, &before), (None, 11, 10));
        // The watch reports the change only after the first of these probes.
        let after = [("a", 12), ("b", 10)];
        assert_eq!(look(13, &after, &before), (None, 11, 12));
        assert_eq!(look(13, &after, &after), (None, 13, 12));
        // The key changes before each probe, and the watch reports each change.
        assert_eq!(look(15, &[("a", 14), ("b", 10)], &after).0, None);
        let announced = [("a", 14), ("b", 10)];
        assert_eq!(look(17, &[("a", 16), ("b", 10)], &announced).0, None);
        // The key was deleted meanwhile, so that its change is not overdue.
        assert_eq!(
            look(18, &[("b", 10), ("c", 18)], &[("b", 10), ("d", 2)]).0,
            None
        );
        // The watch reported a later change, but not this one.
        let announced = [("b", 19), ("d", 2)];
        let why = look(19, &[("b", 19), ("c", 18)], &announced).0;
        assert_eq!(
            why,
            Some("the watch did not deliver the present values of some keys")
        );
    }

    #[test]
    fn missed_etcd_deletion_is_detected_by_number_of_keys_at_third_probe_in_a_row() {
        let (there, announced) = ([("a", 3)], [("a", 3), ("b", 4)]);
        let mut owed = Owed::of(10);
        let mut look = |announced: &[(&str, i64)]| {
            let page = page(&owed, 10, &there);
            owed.look(page, &known(announced)).is_some()
        };
        assert!(!look(&announced) && !look(&announced) && !look(&there));
        assert!(!look(&announced) && !look(&announced) && look(&announced));
    }
}

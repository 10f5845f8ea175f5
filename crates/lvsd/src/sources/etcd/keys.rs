//! Parses the keys of etcd below the configured prefix (pure functions).
//!
//! ```text
//! services/NAME     a service, in the syntax of a file of conf.d
//! servers/POOL/ID   a server that has registered itself
//! directors/NAME    a director whose lease is valid
//! ```

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::message::{Event, KeyValue};
use crate::sources::Record;

/// Maximum number of keys below the prefix.
pub(super) const KEYS_MAX: usize = 20_000;
/// Maximum number of services in etcd.
const SERVICES_MAX: usize = 1024;
/// Maximum size of a service in bytes.
const SERVICE_MAX: usize = 64 << 10;
/// Maximum size of all services in bytes.
const SERVICES_BYTES_MAX: usize = 8 << 20;
/// Maximum number of servers of all pools.
const SERVERS_MAX: usize = 16_384;
/// Maximum number of directors in etcd.
const DIRECTORS_MAX: usize = 64;
/// Maximum size of a server's or director's record in bytes.
const RECORD_MAX: usize = 4 << 10;
/// Maximum length of a name in bytes.
const NAME_MAX: usize = 128;
/// Maximum length of the reason for refusing a key, in characters.
const WHY_MAX: usize = 200;
/// Maximum number of refused keys that are reported.
const REFUSED_MAX: usize = 64;

/// The services and servers in etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Etcd {
    /// Prefix of the keys.
    pub prefix: String,
    /// Cluster id of etcd.
    pub cluster: i64,
    /// Revision of the last change of services and servers; an upper bound if a listing showed that
    /// a key was deleted.
    pub revision: i64,
    /// Services by the last part of their keys.
    pub services: BTreeMap<String, Text>,
    /// Registered servers by pool and id.
    pub pools: BTreeMap<String, BTreeMap<String, Record>>,
}

/// The text of a service in etcd or from Kubernetes, and the last valid text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Text {
    /// The present text of the key.
    pub text: String,
    /// The last text of the key that the daemon has accepted; `None` if it has not accepted any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub good: Option<String>,
}

impl Etcd {
    /// Digest of the content, regardless of the revision; equal contents have equal digests.
    pub fn digest(&self) -> u32 {
        let services = self.services.iter().map(|(name, text)| (name, &text.text));
        let encoded = serde_json::to_vec(&(services.collect::<Vec<_>>(), &self.pools));
        // FNV-1a, 64 bits, folded.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in encoded.unwrap_or_default() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        u32::try_from((hash ^ hash >> 32) & 0xffff_ffff).unwrap_or(0)
    }
}

/// The value of a server's key.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Registration {
    /// Address with or without port: `10.0.0.11:80`.
    pub(crate) address: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) weight: Option<u16>,
}

impl Registration {
    /// Parses address, port and weight.
    ///
    /// # Errors
    /// The address is invalid.
    pub(crate) fn record(&self) -> Result<Record, String> {
        let text = &self.address;
        let with_port = text.parse::<SocketAddr>().ok();
        let bare = text.trim_start_matches('[').trim_end_matches(']');
        let (ip, port) = match (with_port, bare.parse::<IpAddr>()) {
            (Some(address), _) if address.port() != 0 => (address.ip(), Some(address.port())),
            (None, Ok(ip)) => (ip, None),
            _ => return Err(format!("`{text}` is not an address")),
        };
        Ok(Record {
            ip,
            port,
            weight: self.weight,
        })
    }
}

/// The value of a director's key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Director {
    pub(crate) version: String,
    /// Revision of the last change that the director uses.
    pub(crate) revision: i64,
    pub(crate) digest: u32,
    /// Number of the director's services, including the services in its file.
    pub(crate) services: usize,
    pub(crate) servers: usize,
    pub(crate) ready: bool,
    pub(crate) maintenance: bool,
    /// Whether the director does not apply some parts of the answers from its sources.
    pub(crate) left_out: bool,
}

/// All keys below the prefix.
#[derive(Clone, Debug, Default)]
pub(in crate::sources) struct Model {
    pub(in crate::sources) etcd: Etcd,
    pub(in crate::sources) directors: BTreeMap<String, Director>,
    /// Refused keys with reasons, up to [`REFUSED_MAX`].
    pub(in crate::sources) refused: BTreeMap<String, String>,
    /// Last revision of each key, by the hash of its name.
    pub(in crate::sources) keys: HashMap<u64, i64>,
}

/// The parts of the state that a change of a key concerns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Concerns {
    /// Whether services or servers have changed.
    pub(super) config: bool,
    pub(super) directors: bool,
}

impl Model {
    /// Creates an empty model for the keys with the prefix `prefix`.
    pub(super) fn new(prefix: &str) -> Self {
        Self {
            etcd: Etcd {
                prefix: prefix.to_owned(),
                ..Etcd::default()
            },
            ..Self::default()
        }
    }

    /// Returns the state after a listing; `before` is the previous state.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub(super) fn listed(
        before: &Etcd,
        cluster: i64,
        revision: i64,
        all: Vec<KeyValue>,
    ) -> Result<Self, String> {
        let mut model = Self::new(&before.prefix);
        model.etcd.cluster = cluster;
        // Keys with an invalid value keep their last valid one.
        let prefix = before.prefix.clone();
        for kv in all {
            let name = String::from_utf8_lossy(&kv.key.0).into_owned();
            let rest = name.strip_prefix(&prefix).unwrap_or_default();
            match rest.split_once('/') {
                Some(("services", name)) => {
                    if let Some(text) = before.services.get(name) {
                        model.etcd.services.insert(name.to_owned(), text.clone());
                    }
                }
                Some(("servers", rest)) => {
                    let known = rest
                        .split_once('/')
                        .and_then(|(pool, id)| Some((pool, id, before.pools.get(pool)?.get(id)?)));
                    if let Some((pool, id, record)) = known {
                        let pool = model.etcd.pools.entry(pool.to_owned()).or_default();
                        pool.insert(id.to_owned(), *record);
                    }
                }
                _ => {}
            }
            model.put(&kv)?;
        }
        if cluster == before.cluster {
            let gone = before
                .services
                .keys()
                .any(|name| !model.etcd.services.contains_key(name))
                || before.pools.iter().any(|(pool, servers)| {
                    let now = model.etcd.pools.get(pool);
                    servers
                        .keys()
                        .any(|id| now.is_none_or(|now| !now.contains_key(id)))
                });
            // The revision of a deletion is unknown; the present one is its upper bound.
            let known = if gone { revision } else { before.revision };
            model.etcd.revision = model.etcd.revision.max(known);
        }
        Ok(model)
    }

    /// Applies an event of the watch.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub(super) fn take(&mut self, event: &Event) -> Result<Concerns, String> {
        match event.kind.as_str() {
            "DELETE" => Ok(self.delete(&event.kv)),
            _ => self.put(&event.kv),
        }
    }

    fn put(&mut self, kv: &KeyValue) -> Result<Concerns, String> {
        self.keys.insert(hash(kv), kv.mod_revision.0);
        if self.keys.len() > KEYS_MAX {
            return Err(format!(
                "etcd has more than {KEYS_MAX} keys under the prefix: remove keys from etcd, or divide them among several prefixes"
            ));
        }
        let Some(rest) = self.rest(kv) else {
            return Ok(Concerns::default());
        };
        self.refused.remove(&rest);
        let concerns = concerns(&rest);
        if concerns.config {
            self.etcd.revision = self.etcd.revision.max(kv.mod_revision.0);
        }
        match self.understand(&rest, &kv.value.0)? {
            Ok(()) => {}
            Err(why) => {
                let plain = why.chars().filter(|c| !c.is_control());
                if self.refused.len() < REFUSED_MAX {
                    self.refused.insert(rest, plain.take(WHY_MAX).collect());
                }
            }
        }
        Ok(concerns)
    }

    /// Returns a key without the prefix; `None` if it is no key of a service, server or director.
    fn rest(&self, kv: &KeyValue) -> Option<String> {
        let key = std::str::from_utf8(&kv.key.0).ok()?;
        let rest = key.strip_prefix(&self.etcd.prefix)?;
        let plain = |name: &str| {
            let right = |c: char| !c.is_control() && !c.is_whitespace();
            (1..=NAME_MAX).contains(&name.len()) && name.chars().all(right)
        };
        let mut parts = rest.split('/');
        let known = match parts.next()? {
            "services" | "directors" => parts.next().is_some_and(plain),
            "servers" => parts.next().is_some_and(plain) && parts.next().is_some_and(plain),
            _ => false,
        };
        (known && parts.next().is_none()).then(|| rest.to_owned())
    }

    /// Stores a value. If it is invalid, the previous one stays, and the inner `Err` is the reason.
    ///
    /// # Errors
    /// A limit is exceeded.
    fn understand(&mut self, rest: &str, value: &[u8]) -> Result<Result<(), String>, String> {
        let (kind, name) = rest.split_once('/').unwrap_or_default();
        let longest = match kind {
            "services" => SERVICE_MAX,
            _ => RECORD_MAX,
        };
        if value.len() > longest {
            return Ok(Err(format!(
                "the value has {} bytes, and the maximum is {longest}",
                value.len()
            )));
        }
        let json = |error: serde_json::Error| error.to_string();
        match kind {
            "services" => {
                let Ok(text) = std::str::from_utf8(value) else {
                    return Ok(Err("the value is not UTF-8, as TOML must be".to_owned()));
                };
                self.etcd.services.entry(name.to_owned()).or_default().text = text.to_owned();
                let all = &self.etcd.services;
                let bytes: usize = all.values().map(|one| one.text.len()).sum();
                if all.len() > SERVICES_MAX || bytes > SERVICES_BYTES_MAX {
                    return Err(format!(
                        "etcd has more than {SERVICES_MAX} services under the prefix, or more than {} MiB of them: remove services from etcd, or divide them among several prefixes",
                        SERVICES_BYTES_MAX >> 20
                    ));
                }
            }
            "servers" => {
                let registered: Result<Registration, _> = serde_json::from_slice(value);
                let record = match registered.map_err(json).and_then(|one| one.record()) {
                    Ok(record) => record,
                    Err(why) => return Ok(Err(why)),
                };
                let (pool, id) = name.split_once('/').unwrap_or_default();
                let servers = self.etcd.pools.entry(pool.to_owned()).or_default();
                servers.insert(id.to_owned(), record);
                let all: usize = self.etcd.pools.values().map(BTreeMap::len).sum();
                if all > SERVERS_MAX {
                    return Err(format!(
                        "etcd has more than {SERVERS_MAX} servers under the prefix: remove servers from etcd, or divide them among several prefixes"
                    ));
                }
            }
            _ => {
                let director = match serde_json::from_slice::<Director>(value) {
                    Ok(director) => director,
                    Err(error) => return Ok(Err(json(error))),
                };
                if self.directors.len() < DIRECTORS_MAX || self.directors.contains_key(name) {
                    self.directors.insert(name.to_owned(), director);
                } else {
                    return Ok(Err(format!(
                        "lvsd ignores this director, because the maximum of {DIRECTORS_MAX} directors is reached"
                    )));
                }
            }
        }
        Ok(Ok(()))
    }

    fn delete(&mut self, kv: &KeyValue) -> Concerns {
        self.keys.remove(&hash(kv));
        let Some(rest) = self.rest(kv) else {
            return Concerns::default();
        };
        self.refused.remove(&rest);
        let concerns = concerns(&rest);
        if concerns.config {
            self.etcd.revision = self.etcd.revision.max(kv.mod_revision.0);
        }
        match rest.split_once('/') {
            Some(("services", name)) => {
                self.etcd.services.remove(name);
            }
            Some(("servers", name)) => {
                let (pool, id) = name.split_once('/').unwrap_or_default();
                if let Some(servers) = self.etcd.pools.get_mut(pool) {
                    servers.remove(id);
                    if servers.is_empty() {
                        self.etcd.pools.remove(pool);
                    }
                }
            }
            Some((_, name)) => {
                self.directors.remove(name);
            }
            None => {}
        }
        concerns
    }

    /// Returns the content of etcd, and the names of pools that have become empty. In the content,
    /// these pools have the servers of `before`, and services have the last valid texts of `before`.
    pub(in crate::sources) fn hold(&self, before: &Etcd) -> (Etcd, Vec<String>) {
        let mut etcd = self.etcd.clone();
        let mut emptied = Vec::new();
        for (pool, servers) in &before.pools {
            if !etcd.pools.contains_key(pool) && !servers.is_empty() {
                etcd.pools.insert(pool.clone(), servers.clone());
                emptied.push(pool.clone());
            }
        }
        for (name, text) in &mut etcd.services {
            // Only the daemon can check services.
            let before = before.services.get(name);
            text.good = before.and_then(|text| text.good.clone());
        }
        (etcd, emptied)
    }
}

pub(super) fn hash(kv: &KeyValue) -> u64 {
    let mut hasher = DefaultHasher::new();
    kv.key.0.hash(&mut hasher);
    hasher.finish()
}

fn concerns(rest: &str) -> Concerns {
    let config = rest.starts_with("services/") || rest.starts_with("servers/");
    Concerns {
        config,
        directors: !config,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::message::{Bytes, Number};
    use super::*;

    fn kv(key: &str, value: &str, revision: i64) -> KeyValue {
        KeyValue {
            key: Bytes(key.into()),
            value: Bytes(value.into()),
            mod_revision: Number(revision),
            lease: Number::default(),
        }
    }

    fn gone(key: &str, revision: i64) -> Event {
        Event {
            kind: "DELETE".to_owned(),
            kv: kv(key, "", revision),
        }
    }

    const SERVER: &str = r#"{"address":"10.0.0.1:80","weight":3}"#;

    #[test]
    fn etcd_keys_are_interpreted_and_only_configuration_changes_increase_revision() {
        let mut model = Model::new("/lvs/");
        for (key, value) in [
            ("/lvs/services/web", "[[service]]"),
            ("/lvs/servers/web/a", SERVER),
            ("/lvs/servers/web/b", r#"{"address":"2001:db8::1"}"#),
            ("/lvs/directors/d1", r#"{"revision":3,"new":true}"#),
            ("/lvs/verdicts/d1", "{}"),
            ("/lvs/something/else", "x"),
            ("/lvs/servers/deep/er/x", SERVER),
        ] {
            model.put(&kv(key, value, 5)).unwrap();
        }
        assert_eq!(model.etcd.services["web"].text, "[[service]]");
        assert_eq!(model.etcd.pools["web"].len(), 2);
        assert_eq!(model.etcd.pools["web"]["a"].weight, Some(3));
        assert_eq!(model.etcd.pools["web"]["b"].port, None);
        assert_eq!(model.directors["d1"].revision, 3);
        assert_eq!((model.keys.len(), model.refused.len()), (7, 0));
        // Records of directors do not change the revision of services.
        model.put(&kv("/lvs/directors/d1", "{}", 9)).unwrap();
        assert_eq!(model.etcd.revision, 5);
        let digest = model.etcd.digest();
        let concerns = model.take(&gone("/lvs/servers/web/b", 11)).unwrap();
        assert!(concerns.config && !concerns.directors);
        assert_eq!(
            (model.etcd.revision, model.etcd.pools["web"].len()),
            (11, 1)
        );
        assert_ne!(digest, model.etcd.digest());
    }

    #[test]
    fn invalid_etcd_value_keeps_the_earlier_value() {
        let mut model = Model::new("/lvs/");
        model.put(&kv("/lvs/servers/web/a", SERVER, 2)).unwrap();
        for wrong in [
            "",
            "10.0.0.1",
            r#"{"address":"10.0.0.1:0"}"#,
            r#"{"address":"web.example.org"}"#,
            r#"{"address":"10.0.0.1","wieght":1}"#,
            r#"{"address":"10.0.0.1","weight":70000}"#,
        ] {
            model.put(&kv("/lvs/servers/web/a", wrong, 3)).unwrap();
            assert_eq!(model.refused.len(), 1, "{wrong}");
            assert_eq!(model.etcd.pools["web"]["a"].weight, Some(3), "{wrong}");
        }
        model.put(&kv("/lvs/services/web", "good", 4)).unwrap();
        let mut long = kv("/lvs/services/web", &"x".repeat(SERVICE_MAX + 1), 5);
        model.put(&long).unwrap();
        long.value = Bytes(vec![0xff]);
        model.put(&long).unwrap();
        assert_eq!(model.etcd.services["web"].text, "good");
        assert!(model.refused["services/web"].contains("UTF-8"));
        model.put(&kv("/lvs/servers/web/a", SERVER, 6)).unwrap();
        assert_eq!(model.refused.len(), 1);
    }

    #[test]
    fn etcd_servers_services_or_directors_above_their_limits_are_refused() {
        let mut model = Model::new("/");
        let server = |n: usize| kv(&format!("/servers/p/{n}"), SERVER, 1);
        for n in 0..SERVERS_MAX {
            model.put(&server(n)).unwrap();
        }
        assert!(
            model
                .put(&server(SERVERS_MAX))
                .unwrap_err()
                .contains("servers")
        );
        let mut model = Model::new("/");
        let service = |n: usize, text: &str| kv(&format!("/services/{n}"), text, 1);
        for n in 0..SERVICES_MAX {
            model.put(&service(n, "x")).unwrap();
        }
        assert!(model.put(&service(SERVICES_MAX, "x")).is_err());
        let mut model = Model::new("/");
        let long = "x".repeat(SERVICE_MAX);
        let most = SERVICES_BYTES_MAX / SERVICE_MAX;
        for n in 0..most {
            model.put(&service(n, &long)).unwrap();
        }
        assert!(model.put(&service(most, "x")).is_err());
        let mut model = Model::new("/");
        for n in 0..=DIRECTORS_MAX {
            model.put(&kv(&format!("/directors/{n}"), "{}", 1)).unwrap();
        }
        assert_eq!(model.directors.len(), 64);
        assert!(model.refused["directors/64"].contains("64 directors"));
    }

    #[test]
    fn empty_etcd_pool_keeps_previous_servers_until_a_server_is_added() {
        let mut model = Model::new("/lvs/");
        for id in ["a", "b"] {
            let key = format!("/lvs/servers/web/{id}");
            model.put(&kv(&key, SERVER, 2)).unwrap();
        }
        let (before, _) = model.hold(&Etcd::default());
        for (id, revision) in [("a", 3), ("b", 4)] {
            let key = format!("/lvs/servers/web/{id}");
            model.take(&gone(&key, revision)).unwrap();
        }
        let (held, emptied) = model.hold(&before);
        assert_eq!(held.pools["web"].len(), 2);
        assert_eq!(emptied, ["web"]);
        model.put(&kv("/lvs/servers/web/c", SERVER, 5)).unwrap();
        let (held, emptied) = model.hold(&held);
        assert_eq!((held.pools["web"].len(), emptied.len()), (1, 0));
    }

    #[test]
    fn etcd_listing_keeps_last_valid_value_and_removal_increases_revision() {
        let mut before = Etcd {
            prefix: "/lvs/".to_owned(),
            cluster: 7,
            revision: 10,
            ..Etcd::default()
        };
        before.services.insert("gone".to_owned(), Text::default());
        let record = Record {
            ip: [10, 0, 0, 9].into(),
            port: None,
            weight: None,
        };
        let pool = before.pools.entry("web".to_owned()).or_default();
        pool.insert("a".to_owned(), record);
        let listed = vec![kv("/lvs/servers/web/a", "garbage", 4)];
        let model = Model::listed(&before, 7, 20, listed.clone()).unwrap();
        assert_eq!(model.etcd.pools["web"]["a"], record);
        assert_eq!(model.etcd.revision, 20);
        before.services.clear();
        let model = Model::listed(&before, 7, 20, listed.clone()).unwrap();
        assert_eq!(
            model.etcd.revision, 10,
            "a listing without changes changes the revision"
        );
        // Revisions of another cluster begin again.
        let model = Model::listed(&before, 8, 20, listed).unwrap();
        assert_eq!(model.etcd.revision, 4);
    }

    proptest! {
        #[test]
        fn etcd_parser_does_not_panic_on_any_keys(key in "/lvs/(services|servers|directors|x)/[a-z/]{0,12}", value: Vec<u8>) {
            let mut model = Model::new("/lvs/");
            let mut one = kv(&key, "", 2);
            one.value = Bytes(value);
            model.put(&one).unwrap();
            model.delete(&one);
            prop_assert_eq!(model.keys.len(), 0);
        }
    }
}

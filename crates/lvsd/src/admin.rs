//! What people want of servers, whatever the file and the checks say: kept in the state directory,
//! so that it outlives a reload, a restart and a reboot.

use std::collections::{BTreeMap, HashMap};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use lvs_core::api::ServiceId;
use lvs_dataplane::control::daemon::{AdminEntry, AdminSpec, AdminState, Target, WORDS_MAX};

/// Wishes at a time.
const ENTRIES_MAX: usize = 65_536;

/// All wishes.
#[derive(Debug, Default)]
pub struct Admin {
    entries: BTreeMap<Target, AdminEntry>,
    /// The targets of each host, so that a look-up does not go through all.
    by_host: HashMap<IpAddr, Vec<Target>>,
    /// Where they are kept; nowhere in tests.
    path: Option<PathBuf>,
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Where the wishes of the daemon with this file are in a state directory: each file has its own.
pub fn path(directory: &Path, config: &Path) -> PathBuf {
    let config = std::fs::canonicalize(config).unwrap_or_else(|_| config.to_owned());
    let name = config.to_string_lossy();
    let name = name.trim_start_matches('/').replace('/', "-");
    directory.join(format!("{name}.admin.json"))
}

impl Admin {
    /// Those that are kept at `path`. A file that cannot be read is put aside, and said to be.
    pub fn recall(path: Option<PathBuf>) -> Self {
        let mut admin = Self {
            path,
            ..Self::default()
        };
        let Some(path) = &admin.path else {
            return admin;
        };
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return admin,
            Err(error) => {
                tracing::error!(
                    "cannot read {}: {error}; servers that were drained or in maintenance may get connections",
                    path.display()
                );
                return admin;
            }
        };
        match serde_json::from_slice::<Vec<AdminEntry>>(&text) {
            Ok(entries) => {
                for entry in entries.into_iter().take(ENTRIES_MAX) {
                    admin.insert(entry);
                }
            }
            Err(error) => {
                let aside = path.with_extension("json.broken");
                let moved = std::fs::rename(path, &aside);
                let where_to = moved.map_or(path.display(), |()| aside.display());
                tracing::error!(
                    "{where_to} is broken ({error}); servers that were drained or in maintenance get connections again"
                );
            }
        }
        admin
    }

    fn insert(&mut self, entry: AdminEntry) {
        let target = entry.spec.target;
        if self.entries.insert(target, entry).is_none() {
            self.by_host.entry(target.host).or_default().push(target);
        }
    }

    fn remove(&mut self, target: &Target) -> Option<AdminEntry> {
        let entry = self.entries.remove(target)?;
        if let Some(targets) = self.by_host.get_mut(&target.host) {
            targets.retain(|other| other != target);
            if targets.is_empty() {
                self.by_host.remove(&target.host);
            }
        }
        Some(entry)
    }

    /// What is wanted of a server: the strongest wish that is about it.
    pub fn of(&self, service: ServiceId, server: SocketAddr) -> Option<&AdminEntry> {
        let targets = self.by_host.get(&server.ip())?.iter();
        targets
            .filter(|target| target.has(service, server))
            .filter_map(|target| self.entries.get(target))
            .max_by_key(|entry| entry.spec.state)
    }

    /// The state of a server.
    pub fn state(&self, service: ServiceId, server: SocketAddr) -> AdminState {
        let entry = self.of(service, server);
        entry.map_or(AdminState::Ready, |entry| entry.spec.state)
    }

    /// All wishes, in an order that stays.
    pub fn entries(&self) -> impl Iterator<Item = &AdminEntry> {
        self.entries.values()
    }

    /// Takes a wish.
    ///
    /// # Errors
    /// It makes no sense, in words; nothing has changed.
    pub fn set(&mut self, spec: AdminSpec, now: u64) -> Result<(), String> {
        for (what, words) in [("who", &spec.who), ("why", &spec.why)] {
            if let Some(words) = words
                && (words.chars().count() > WORDS_MAX || words.chars().any(char::is_control))
            {
                return Err(format!(
                    "`{what}` is longer than {WORDS_MAX} characters, or has control characters in it"
                ));
            }
        }
        if let Some(until) = spec.until
            && until <= now
        {
            return Err("the time until which this is to hold has passed".to_owned());
        }
        if spec.state == AdminState::Ready {
            self.remove(&spec.target);
            return Ok(());
        }
        if self.entries.len() >= ENTRIES_MAX && !self.entries.contains_key(&spec.target) {
            return Err(format!("there are {ENTRIES_MAX} such wishes already"));
        }
        self.insert(AdminEntry { spec, since: now });
        Ok(())
    }

    /// The wishes whose time is over; they are gone then.
    pub fn expire(&mut self, now: u64) -> Vec<AdminEntry> {
        let over = |entry: &&AdminEntry| entry.spec.until.is_some_and(|until| until <= now);
        let targets: Vec<Target> = self
            .entries()
            .filter(over)
            .map(|entry| entry.spec.target)
            .collect();
        targets
            .iter()
            .filter_map(|target| self.remove(target))
            .collect()
    }

    /// Writes all wishes, as a whole or not at all.
    ///
    /// # Errors
    /// In words, with what that means.
    pub fn keep(&self) -> Result<(), String> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        let write = || -> io::Result<()> {
            if let Some(directory) = path.parent() {
                std::fs::create_dir_all(directory)?;
            }
            let new = path.with_extension("json.new");
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(&new)?;
            let entries: Vec<&AdminEntry> = self.entries().collect();
            file.write_all(&serde_json::to_vec(&entries)?)?;
            file.sync_all()?;
            std::fs::rename(&new, path)
        };
        write().map_err(|error| {
            format!(
                "cannot keep this in {}: {error}; it holds until lvsd is restarted, and no longer",
                path.display()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use lvs_dataplane::control::daemon::ServiceKey;

    use super::*;

    fn service(n: u8) -> ServiceId {
        ServiceId::Tcp {
            address: ([192, 0, 2, n], 80).into(),
        }
    }

    fn spec(n: Option<u8>, port: Option<u16>, state: AdminState) -> AdminSpec {
        AdminSpec {
            target: Target {
                service: n.map(|n| ServiceKey(service(n))),
                host: [10, 0, 0, 1].into(),
                port,
            },
            state,
            who: Some("ann".to_owned()),
            why: None,
            until: None,
        }
    }

    #[test]
    fn the_strongest_wish_counts_and_all_outlive_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let path = path(directory.path(), Path::new("/etc/lvsd/lvsd.toml"));
        assert!(path.ends_with("etc-lvsd-lvsd.toml.admin.json"));
        let mut admin = Admin::recall(Some(path.clone()));
        let server = SocketAddr::from(([10, 0, 0, 1], 80));
        assert_eq!(admin.state(service(1), server), AdminState::Ready);
        admin
            .set(spec(Some(1), Some(80), AdminState::Maintenance), 5)
            .unwrap();
        admin.set(spec(None, None, AdminState::Drain), 6).unwrap();
        admin.keep().unwrap();
        let mut admin = Admin::recall(Some(path.clone()));
        assert_eq!(admin.state(service(1), server), AdminState::Maintenance);
        assert_eq!(admin.state(service(2), server), AdminState::Drain);
        assert_eq!(
            admin.state(service(2), ([10, 0, 0, 2], 80).into()),
            AdminState::Ready
        );
        admin
            .set(spec(Some(1), Some(80), AdminState::Ready), 7)
            .unwrap();
        assert_eq!(admin.state(service(1), server), AdminState::Drain);
        let entry = admin.of(service(1), server).unwrap();
        assert_eq!((entry.since, entry.spec.who.as_deref()), (6, Some("ann")));

        std::fs::write(&path, "{").unwrap();
        assert_eq!(Admin::recall(Some(path.clone())).entries().count(), 0);
        assert!(!path.exists() && path.with_extension("json.broken").exists());
    }

    #[test]
    fn wishes_end_and_nonsense_is_refused() {
        let mut admin = Admin::default();
        let mut short = spec(None, None, AdminState::Drain);
        short.until = Some(100);
        assert!(admin.set(short.clone(), 100).is_err());
        admin.set(short, 99).unwrap();
        assert_eq!(admin.expire(99), []);
        assert_eq!(admin.expire(100).len(), 1);
        assert_eq!(admin.entries().count(), 0);
        let mut forged = spec(None, None, AdminState::Drain);
        forged.why = Some("x\ny".to_owned());
        assert!(admin.set(forged.clone(), 1).is_err());
        forged.why = Some("x".repeat(WORDS_MAX + 1));
        assert!(admin.set(forged, 1).is_err());
    }
}

//! Overrides: the administrative states of servers that operators set. They take precedence over
//! the configuration file and the checks, and the state directory keeps them across reloads,
//! restarts and reboots.

mod keeper;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lvs_api::daemon::{AdminEntry, AdminSpec, AdminState, Target, WORDS_MAX};
use lvs_core::api::ServiceId;
use serde::{Deserialize, Serialize};

pub use self::keeper::Kept;
use self::keeper::{Keeper, put_aside};
use crate::clock::{Moment, Now};

const ENTRIES_MAX: usize = 65_536;

/// Maximum time that lvsd waits at its exit until the overrides are stored.
const SETTLE: Duration = Duration::from_secs(5);
/// Interval at which lvsd checks, at its exit, whether all overrides are stored.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// All overrides of administrative states, and the writer that stores them on disk.
#[derive(Debug, Default)]
pub struct Admin {
    entries: BTreeMap<Target, StoredOverride>,
    /// The overridden targets of each host, for look-ups by server address.
    by_host: HashMap<IpAddr, Vec<Target>>,
    /// Writes the overrides to disk; `None` if they are not stored.
    keeper: Option<Arc<Keeper>>,
}

/// An override, as stored in the state directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StoredOverride {
    #[serde(flatten)]
    entry: AdminEntry,
    /// Deadline of the override on the boot-time clock, which changes of the wall clock do not
    /// affect; `None` if it has no deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ends: Option<Moment>,
    /// Start of the override on the boot-time clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    began: Option<Moment>,
}

impl StoredOverride {
    fn new(spec: AdminSpec, now: Now) -> Self {
        let ends = spec.until.map(|until| {
            let left = until.saturating_sub(now.unix);
            Moment::new(now.boot.saturating_add(left))
        });
        let entry = AdminEntry {
            spec,
            since: now.unix,
        };
        let began = Some(Moment::new(now.boot));
        Self { entry, ends, began }
    }

    /// Restores an override from the state directory. After a reboot, only the wall clock gives the
    /// remaining time. It may be wrong at boot, so the remaining time is limited to the original
    /// duration.
    fn recalled(mut self, now: Now) -> Self {
        self.ends = self.entry.spec.until.map(|until| {
            let known = self.ends.as_ref().and_then(Moment::of_this_boot);
            Moment::new(known.unwrap_or_else(|| {
                let whole = until.saturating_sub(self.entry.since);
                let left = until.saturating_sub(now.unix).min(whole);
                now.boot.saturating_add(left)
            }))
        });
        self
    }

    /// Seconds until the override expires; `None` if it has no deadline.
    fn left(&self, now: Now) -> Option<u64> {
        // `new` or `recalled` has computed this deadline for the present boot.
        Some(self.ends.as_ref()?.seconds().saturating_sub(now.boot))
    }
}

/// Returns the path of the file in the state directory `directory` that stores the overrides for
/// the configuration file `config`.
pub fn path(directory: &Path, config: &Path) -> PathBuf {
    let config = whole(config).unwrap_or_else(|_| config.to_owned());
    let name = config.to_string_lossy();
    let name = name.trim_start_matches('/').replace('/', "-");
    directory.join(format!("{name}.admin.json"))
}

/// Returns the canonical path of a file, which need not exist; its directory must.
fn whole(path: &Path) -> io::Result<PathBuf> {
    std::fs::canonicalize(path).or_else(|error| {
        let name = path.file_name().ok_or(error)?;
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        Ok(std::fs::canonicalize(directory)?.join(name))
    })
}

/// Checks that the operator's name and reason have at most [`WORDS_MAX`] characters each, and no
/// control characters.
///
/// # Errors
/// The violated rule, as text.
pub fn check_words(spec: &AdminSpec) -> Result<(), String> {
    for (what, words) in [("who", &spec.who), ("why", &spec.why)] {
        if let Some(words) = words
            && (words.chars().count() > WORDS_MAX || words.chars().any(char::is_control))
        {
            return Err(format!(
                "`{what}` is longer than {WORDS_MAX} characters, or has control characters in it"
            ));
        }
    }
    Ok(())
}

impl Admin {
    /// Reads the overrides at `path`, which later writes replace. Without a path, overrides are not
    /// stored. A file that is not a JSON list is renamed, and this is logged. A file that cannot be
    /// read, or that has invalid entries, is renamed before the next write.
    pub fn recall(path: Option<PathBuf>) -> Self {
        Self::read(path, true, Now::read())
    }

    /// Reads the overrides at `path` like [`recall`](Self::recall), but never changes the file.
    pub fn look(path: PathBuf) -> Self {
        Self::read(Some(path), false, Now::read())
    }

    fn read(path: Option<PathBuf>, owner: bool, now: Now) -> Self {
        let mut admin = Self::default();
        let Some(path) = path else {
            return admin;
        };
        let unread = admin.read_from(&path, owner, now);
        admin.keeper = Some(Arc::new(Keeper::new(path, unread)));
        admin
    }

    /// Reads the overrides of a file. If it is not a JSON list, renames it if `owner` is set.
    /// Returns whether the file, or a part of it, could not be read, and the file must be renamed
    /// before the next write.
    fn read_from(&mut self, path: &Path, owner: bool, now: Now) -> bool {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return false,
            Err(error) => {
                tracing::error!(
                    "cannot read {}: {error}; servers that were drained or in maintenance may receive connections until the file can be read and lvsd is restarted",
                    path.display()
                );
                return true;
            }
        };
        match serde_json::from_slice::<Vec<serde_json::Value>>(&text) {
            Ok(values) => {
                let all = values.len();
                let mut strange = match all > ENTRIES_MAX {
                    true => format!(" (the maximum is {ENTRIES_MAX})"),
                    false => String::new(),
                };
                let mut entries = Vec::new();
                for value in values.into_iter().take(ENTRIES_MAX) {
                    match serde_json::from_value::<StoredOverride>(value) {
                        Ok(stored) => entries.push(stored.recalled(now)),
                        Err(error) => strange = format!(" ({error})"),
                    }
                }
                let lost = all - entries.len();
                if lost > 0 {
                    tracing::error!(
                        "{}: {lost} of {all} overrides cannot be used{strange}; servers that they kept out of service receive connections again; `lvsd status` shows the valid ones",
                        path.display()
                    );
                }
                for stored in entries {
                    self.insert(stored);
                }
                lost > 0
            }
            Err(error) => {
                let moved = if owner { put_aside(path).ok() } else { None };
                let stays = moved.is_none();
                let aside = moved.unwrap_or_else(|| path.to_owned());
                tracing::error!(
                    "{} is invalid ({error}); servers that were drained or in maintenance receive connections again",
                    aside.display()
                );
                stays
            }
        }
    }

    fn insert(&mut self, stored: StoredOverride) {
        let target = stored.entry.spec.target;
        if self.entries.insert(target, stored).is_none() {
            self.by_host.entry(target.host).or_default().push(target);
        }
    }

    fn remove(&mut self, target: &Target) -> Option<AdminEntry> {
        let stored = self.entries.remove(target)?;
        if let Some(targets) = self.by_host.get_mut(&target.host) {
            targets.retain(|other| other != target);
            if targets.is_empty() {
                self.by_host.remove(&target.host);
            }
        }
        Some(stored.entry)
    }

    /// Returns the override that applies to a server, if any. If several apply, maintenance takes
    /// precedence over drain.
    pub fn of(&self, service: ServiceId, server: SocketAddr) -> Option<&AdminEntry> {
        let targets = self.by_host.get(&server.ip())?.iter();
        targets
            .filter(|target| target.has(service, server))
            .filter_map(|target| Some(&self.entries.get(target)?.entry))
            .max_by_key(|entry| entry.spec.state)
    }

    /// Returns the administrative state of a server: `Ready` without an override.
    pub fn state(&self, service: ServiceId, server: SocketAddr) -> AdminState {
        let entry = self.of(service, server);
        entry.map_or(AdminState::Ready, |entry| entry.spec.state)
    }

    /// All overrides, in a stable order.
    pub fn entries(&self) -> impl Iterator<Item = &AdminEntry> {
        self.entries.values().map(|stored| &stored.entry)
    }

    /// All overrides, with start times and deadlines converted to the present wall clock.
    pub fn shown(&self, now: Now) -> Vec<AdminEntry> {
        let shown = self.entries.values().map(|stored| {
            let mut entry = stored.entry.clone();
            entry.spec.until = stored.left(now).map(|left| now.unix.saturating_add(left));
            if let Some(began) = stored.began.as_ref().and_then(Moment::of_this_boot) {
                entry.since = now.unix_of(began);
            }
            entry
        });
        shown.collect()
    }

    /// Sets an override. The state `ready` removes the overrides of the target, and those that
    /// concern only a part of it.
    ///
    /// # Errors
    /// The override is invalid, or the maximum number of overrides is reached. The text is the
    /// reason; nothing has changed.
    pub fn set(&mut self, spec: AdminSpec, now: Now) -> Result<(), String> {
        check_words(&spec)?;
        if let Some(until) = spec.until
            && until <= now.unix
        {
            return Err("the end time of the override has passed: set a later one".to_owned());
        }
        if spec.state == AdminState::Ready {
            let narrower: Vec<Target> = self
                .by_host
                .get(&spec.target.host)
                .into_iter()
                .flatten()
                .filter(|target| spec.target.covers(target))
                .copied()
                .collect();
            for target in narrower {
                self.remove(&target);
            }
            return Ok(());
        }
        if self.entries.len() >= ENTRIES_MAX && !self.entries.contains_key(&spec.target) {
            return Err(format!(
                "the maximum of {ENTRIES_MAX} overrides is reached: end others with `lvsadm undrain`"
            ));
        }
        let spec = AdminSpec {
            force: false,
            ..spec
        };
        self.insert(StoredOverride::new(spec, now));
        Ok(())
    }

    /// Removes and returns the expired overrides.
    pub fn expire(&mut self, now: Now) -> Vec<AdminEntry> {
        let targets: Vec<Target> = self
            .entries
            .values()
            .filter(|stored| stored.left(now) == Some(0))
            .map(|stored| stored.entry.spec.target)
            .collect();
        targets
            .iter()
            .filter_map(|target| self.remove(target))
            .collect()
    }

    /// Starts an atomic write of the present overrides, on a thread of the current runtime. A write
    /// that waits for an earlier one is replaced. Without a path, does nothing.
    pub fn keep(&self) -> Kept {
        match &self.keeper {
            Some(keeper) => keeper.keep(self.entries.values().cloned().collect()),
            None => Kept::nowhere(),
        }
    }

    /// Waits until all requested writes are complete, but at most five seconds; a warning in the
    /// log reports that they are not.
    pub fn settled(&self) -> impl Future<Output = ()> + use<> {
        let keeper = self.keeper.clone();
        async move {
            let Some(keeper) = keeper else { return };
            let written = async {
                while keeper.is_writing() {
                    tokio::time::sleep(CHECK_INTERVAL).await;
                }
            };
            if tokio::time::timeout(SETTLE, written).await.is_err() {
                tracing::warn!(
                    "the disk has not stored the overrides within {SETTLE:?}: the last ones may be lost at a restart"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use lvs_api::daemon::ServiceKey;

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
            force: false,
        }
    }

    #[tokio::test]
    async fn strongest_override_applies_overrides_survive_restart_and_damaged_file_is_renamed() {
        let directory = tempfile::tempdir().unwrap();
        let path = path(directory.path(), Path::new("/etc/lvsd/lvsd.toml"));
        assert!(path.ends_with("etc-lvsd-lvsd.toml.admin.json"));
        let mut admin = Admin::recall(Some(path.clone()));
        let server = SocketAddr::from(([10, 0, 0, 1], 80));
        assert_eq!(admin.state(service(1), server), AdminState::Ready);
        admin
            .set(spec(Some(1), Some(80), AdminState::Maintenance), Now::at(5))
            .unwrap();
        admin
            .set(spec(None, None, AdminState::Drain), Now::at(6))
            .unwrap();
        admin.keep().done().await.unwrap();
        let mut admin = Admin::recall(Some(path.clone()));
        assert_eq!(admin.state(service(1), server), AdminState::Maintenance);
        assert_eq!(admin.state(service(2), server), AdminState::Drain);
        assert_eq!(
            admin.state(service(2), ([10, 0, 0, 2], 80).into()),
            AdminState::Ready
        );
        admin
            .set(spec(Some(1), Some(80), AdminState::Ready), Now::at(7))
            .unwrap();
        assert_eq!(admin.state(service(1), server), AdminState::Drain);
        let entry = admin.of(service(1), server).unwrap();
        assert_eq!((entry.since, entry.spec.who.as_deref()), (6, Some("ann")));

        admin
            .set(spec(Some(1), Some(80), AdminState::Maintenance), Now::at(8))
            .unwrap();
        admin
            .set(spec(None, None, AdminState::Ready), Now::at(9))
            .unwrap();
        assert_eq!(
            admin.entries().count(),
            0,
            "the override of one service was not removed"
        );

        std::fs::write(&path, "{").unwrap();
        assert_eq!(Admin::look(path.clone()).entries().count(), 0);
        assert!(path.exists(), "a reader has renamed the file");
        assert_eq!(Admin::recall(Some(path.clone())).entries().count(), 0);
        assert!(!path.exists() && path.with_extension("json.broken").exists());
    }

    #[tokio::test]
    async fn unreadable_override_file_and_earlier_renamed_files_are_not_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.admin.json");
        let broken = |n: &str| path.with_extension(format!("json.broken{n}"));
        // Root can read every file, but no user can read a directory as a file.
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("inside"), "").unwrap();
        std::fs::write(broken(""), "earlier").unwrap();
        let mut admin = Admin::recall(Some(path.clone()));
        assert!(
            path.is_dir(),
            "the damaged file was renamed before the next write"
        );
        admin
            .set(spec(None, None, AdminState::Drain), Now::at(6))
            .unwrap();
        admin.keep().done().await.unwrap();
        assert!(broken(".1").join("inside").exists());
        assert_eq!(std::fs::read(broken("")).unwrap(), b"earlier");
        assert_eq!(Admin::recall(Some(path.clone())).entries().count(), 1);
        std::fs::write(&path, "{").unwrap();
        let _ = Admin::recall(Some(path.clone()));
        assert_eq!(std::fs::read(broken("")).unwrap(), b"earlier");
        assert_eq!(std::fs::read(broken(".2")).unwrap(), b"{");
    }

    #[test]
    fn configuration_file_reached_by_several_paths_has_one_state_file() {
        let directory = tempfile::tempdir().unwrap();
        let real = directory.path().canonicalize().unwrap().join("etc");
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, directory.path().join("link")).unwrap();
        let state = |config: &Path| path(Path::new("/state"), config);
        let paths = [
            real.join("lvsd.toml"),
            real.join("../etc/./lvsd.toml"),
            directory.path().join("link/lvsd.toml"),
        ];
        let wanted = state(&paths[0]);
        // The path does not depend on whether the file exists.
        assert!(paths.iter().all(|path| state(path) == wanted));
        std::fs::write(&paths[0], "").unwrap();
        assert!(paths.iter().all(|path| state(path) == wanted));
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        let missing = "nobody-has-this.toml";
        assert_eq!(state(Path::new(missing)), state(&here.join(missing)));
    }

    #[test]
    fn new_override_above_maximum_number_is_refused() {
        let mut admin = Admin::default();
        let stored = |n: usize| {
            let port = u16::try_from(n % 60_000).unwrap();
            let mut stored = spec(None, Some(port), AdminState::Drain);
            stored.target.host = [10, 0, 0, u8::try_from(n / 60_000).unwrap()].into();
            stored
        };
        for n in 0..ENTRIES_MAX {
            admin.set(stored(n), Now::at(1)).unwrap();
        }
        let refused = admin.set(stored(ENTRIES_MAX), Now::at(1)).unwrap_err();
        assert!(refused.contains("65536"), "no `65536` in {refused}");
        assert_eq!(admin.entries().count(), ENTRIES_MAX);
        admin
            .set(stored(7), Now::at(2))
            .expect("an existing override can be changed");
        let mut ready = stored(7);
        ready.state = AdminState::Ready;
        admin.set(ready, Now::at(3)).unwrap();
        admin
            .set(stored(ENTRIES_MAX), Now::at(4))
            .expect("another override fits after a removal");
    }

    #[tokio::test]
    async fn override_file_with_unknown_entry_is_renamed_and_its_other_overrides_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.admin.json");
        let mut admin = Admin::recall(Some(path.clone()));
        admin
            .set(spec(None, None, AdminState::Drain), Now::at(6))
            .unwrap();
        admin.keep().done().await.unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let newer = text.replacen('[', "[{\"state\":\"of a later version\"},", 1);
        std::fs::write(&path, &newer).unwrap();
        let admin = Admin::recall(Some(path.clone()));
        assert_eq!(admin.entries().count(), 1);
        assert!(path.exists());
        admin.keep().done().await.unwrap();
        let aside = path.with_extension("json.broken");
        assert_eq!(std::fs::read_to_string(aside).unwrap(), newer);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn override_expires_at_its_end_and_expired_or_invalid_override_is_refused() {
        let mut admin = Admin::default();
        let mut short = spec(None, None, AdminState::Drain);
        short.until = Some(100);
        assert!(admin.set(short.clone(), Now::at(100)).is_err());
        admin.set(short, Now::at(99)).unwrap();
        assert_eq!(admin.expire(Now::at(99)), []);
        assert_eq!(admin.expire(Now::at(100)).len(), 1);
        assert_eq!(admin.entries().count(), 0);
        let mut forged = spec(None, None, AdminState::Drain);
        forged.why = Some("x\ny".to_owned());
        assert!(admin.set(forged.clone(), Now::at(1)).is_err());
        forged.why = Some("x".repeat(WORDS_MAX + 1));
        assert!(admin.set(forged, Now::at(1)).is_err());
    }

    fn drain_until(until: u64) -> AdminSpec {
        let mut spec = spec(None, None, AdminState::Drain);
        spec.until = Some(until);
        spec
    }

    #[test]
    fn clock_step_does_not_end_an_override() {
        let mut admin = Admin::default();
        let start = Now {
            unix: 1_000_000,
            boot: 100,
        };
        admin.set(drain_until(1_000_600), start).unwrap();
        // The clock is set two hours ahead, and then a day back.
        for unix in [1_007_200, 913_600] {
            let stepped = Now { unix, boot: 160 };
            assert_eq!(admin.expire(stepped), []);
            let shown = admin.shown(stepped);
            assert_eq!(shown[0].spec.until, Some(unix + 540));
            assert_eq!(shown[0].since, unix - 60);
        }
        let last = Now {
            unix: 913_600,
            boot: 699,
        };
        assert_eq!(admin.expire(last), []);
        let over = Now { boot: 700, ..last };
        assert_eq!(admin.expire(over).len(), 1);
    }

    #[tokio::test]
    async fn clock_step_while_lvsd_is_down_does_not_end_an_override() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.admin.json");
        let start = Now {
            unix: 1_000_000,
            boot: 100,
        };
        let mut admin = Admin::read(Some(path.clone()), true, start);
        admin.set(drain_until(1_000_600), start).unwrap();
        admin.keep().done().await.unwrap();
        let stepped = Now {
            unix: 1_007_200,
            boot: 160,
        };
        let mut admin = Admin::read(Some(path), true, stepped);
        assert_eq!(admin.expire(stepped), []);
        assert_eq!(admin.shown(stepped)[0].since, 1_007_140);
        let over = Now {
            boot: 700,
            ..stepped
        };
        assert_eq!(admin.expire(over).len(), 1);
    }

    #[test]
    fn override_of_earlier_boot_ends_by_wall_clock_or_after_requested_duration() {
        let stored = |now: Now| {
            let before = Now {
                unix: 1_000_000,
                boot: 9_000,
            };
            let mut stored = StoredOverride::new(drain_until(1_000_600), before);
            stored.ends = Some(Moment::of_another_boot(9_600));
            stored.recalled(now).left(now)
        };
        let at = |unix| Now { unix, boot: 5 };
        assert_eq!(stored(at(1_000_400)), Some(200));
        assert_eq!(stored(at(1_000_600)), Some(0));
        // On a host without a battery-backed clock, the override lasts at most as long as
        // requested.
        assert_eq!(stored(at(0)), Some(600));
    }

    #[test]
    fn override_stored_by_an_older_version_ends_by_the_wall_clock() {
        let now = Now {
            unix: 1_000_000,
            boot: 50,
        };
        let entry = AdminEntry {
            spec: drain_until(1_000_600),
            since: 999_000,
        };
        let text = serde_json::to_string(&entry).unwrap();
        let stored: StoredOverride = serde_json::from_str(&text).unwrap();
        assert_eq!(stored.recalled(now).left(now), Some(600));
    }
}

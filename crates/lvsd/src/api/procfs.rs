//! A directory tree that imitates the files of the kernel's IPVS in `/proc`, for node_exporter and
//! scripts that read those files.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lvs_api::{Address, Client, Error};
use lvs_core::api::{Call, ConnInfo, Info, Sysctl};
use lvs_core::proc;
use lvs_core::settings::Sysctls;
use rustix::fs::OFlags;
use tokio::sync::watch;

use super::Api;
use crate::config;
use crate::snapshot::Snapshot;

/// Interval at which the files are written.
const EVERY: Duration = Duration::from_secs(2);
/// The time between the starts of two writes of the connections is at least this many times the
/// duration of the first one.
const SHARE: u32 = 20;
/// Longest time to wait for a dataplane's answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest time of listing connections.
const LISTING: Duration = Duration::from_secs(10);

/// The files with the daemon's own state, written in each round.
const FILES: [&str; 4] = [
    "net/ip_vs",
    "net/ip_vs_stats",
    "net/ip_vs_stats_percpu",
    "net/ip_vs_app",
];
/// The files with the dataplane's connections.
const CONNECTIONS: [&str; 2] = ["net/ip_vs_conn", "net/ip_vs_conn_sync"];
/// Directory of the sysctls.
const SYSCTLS: &str = "sys/net/ipv4/vs";

/// Updates the configured tree until `stopped`, and then removes it.
pub(super) async fn keep(api: Arc<Api>, dataplane: Address, mut stopped: watch::Receiver<bool>) {
    let mut settings = api.settings.subscribe();
    let mut written: Option<PathBuf> = None;
    let mut reported: Vec<String> = Vec::new();
    // The time at which connections are written again.
    let mut due = Instant::now();
    let mut tick = tokio::time::interval(EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = stopped.changed() => break,
            _ = settings.changed() => {}
            _ = tick.tick() => {}
        }
        let config = settings.borrow_and_update().clone();
        if let Some(old) = written.take_if(|old| Some(&*old) != config.procfs.as_ref()) {
            remove(&old);
        }
        let Some(path) = config.procfs else { continue };
        written = Some(path.clone());
        let Ok(snapshot) = api.snapshot().await else {
            continue;
        };
        let round = Round {
            tree: Tree(path),
            snapshot,
            dataplane: dataplane.clone(),
            most: config
                .procfs_connections
                .unwrap_or(config::Api::PROCFS_CONNECTIONS),
            with_connections: due <= Instant::now(),
            stopped: stopped.clone(),
        };
        // Other tasks run while this one waits.
        let begun = Instant::now();
        let with_connections = round.with_connections;
        let all = tokio::task::spawn_blocking(move || round.write()).await;
        if with_connections {
            due = begun + begun.elapsed() * SHARE;
        }
        let all = all.unwrap_or_default();
        for why in all.iter().filter(|why| !reported.contains(why)) {
            tracing::warn!("{why}");
        }
        // A round without connections does not report problems with them.
        match with_connections {
            true => reported = all,
            false => reported.extend(
                all.into_iter()
                    .filter(|why| !reported.contains(why))
                    .collect::<Vec<_>>(),
            ),
        }
    }
    if let Some(path) = written {
        remove(&path);
    }
}

/// One update of all files.
struct Round {
    tree: Tree,
    snapshot: Arc<Snapshot>,
    dataplane: Address,
    most: usize,
    with_connections: bool,
    stopped: watch::Receiver<bool>,
}

impl Round {
    /// Writes the files again, or removes them while no dataplane answers. Returns the errors as
    /// text.
    fn write(self) -> Vec<String> {
        if !self.snapshot.status.dataplane.connected {
            remove(&self.tree.0);
            return Vec::new();
        }
        let mut why = Vec::new();
        let mut note = |done: io::Result<()>| {
            if let Err(error) = done {
                let path = self.tree.0.display();
                why.push(format!(
                    "cannot write the files of `procfs` in [api] to {path}: {error}; name a directory that lvsd may write to"
                ));
            }
            why.is_empty()
        };
        // If one file cannot be written, the others are not tried.
        if !note(self.tree.known(&self.snapshot)) {
            return why;
        }
        match Client::connect_patiently(&self.dataplane, PATIENCE) {
            Ok(mut dataplane) => {
                let done = self.sysctls(&mut dataplane);
                if note(done) && self.with_connections {
                    match self.connections(&mut dataplane) {
                        Ok(()) => {}
                        Err(Refused::Io(error)) => {
                            note(Err(error));
                        }
                        Err(Refused::TooMany) => why.push(format!(
                            "the connection table has more than {} entries, so {} are not written; raise `procfs_connections` in [api]",
                            self.most,
                            CONNECTIONS.join(" and ")
                        )),
                    }
                }
            }
            // The dataplane does not answer; the next round asks again.
            Err(_) => self.tree.without(&CONNECTIONS),
        }
        why
    }

    fn sysctls(&self, dataplane: &mut Client) -> io::Result<()> {
        let all: Result<Vec<Sysctl>, Error> = dataplane.collect(&Call::SysctlGet { name: None });
        // Without an answer there are no sysctls. Only known names become paths.
        let known = |sysctl: &Sysctl| Sysctls::NAMES.contains(&&*sysctl.name);
        for sysctl in all.unwrap_or_default().into_iter().filter(known) {
            // The kernel writes tabs between numbers.
            let text = format!("{}\n", sysctl.value.replace(' ', "\t"));
            self.tree
                .put(&format!("{SYSCTLS}/{}", sysctl.name), &text)?;
        }
        Ok(())
    }

    /// Writes connections and templates, unless there are too many.
    fn connections(&self, dataplane: &mut Client) -> Result<(), Refused> {
        let info: &Info = &self.snapshot.found.seen.info;
        let (mut conn, mut sync) = (
            proc::CONN_HEADER.to_owned(),
            proc::CONN_SYNC_HEADER.to_owned(),
        );
        let begun = Instant::now();
        let mut lines = 0;
        let too_many = info.connections > self.most as u64;
        let end = if too_many {
            Err(Error::Stopped)
        } else {
            dataplane.list_while(&Call::ConnList {}, |info: ConnInfo| {
                lines += 1;
                // Writing to a string cannot fail.
                let _ = proc::connection(&mut conn, &mut sync, &info);
                lines <= self.most && begun.elapsed() < LISTING && !*self.stopped.borrow()
            })
        };
        match end {
            Ok(_) => {
                for (name, text) in CONNECTIONS.iter().zip([conn, sync]) {
                    self.tree.put(name, &text).map_err(Refused::Io)?;
                }
                Ok(())
            }
            Err(_) => {
                // An incomplete list would be wrong, so the file is removed.
                self.tree.without(&CONNECTIONS);
                match too_many || lines > self.most {
                    true => Err(Refused::TooMany),
                    false => Ok(()),
                }
            }
        }
    }
}

/// The reason why connections are not written.
enum Refused {
    Io(io::Error),
    TooMany,
}

/// The directory whose files imitate `/proc`.
struct Tree(PathBuf);

impl Tree {
    /// Writes the files of the daemon's state.
    fn known(&self, snapshot: &Snapshot) -> io::Result<()> {
        let seen = &snapshot.found.seen;
        for path in FILES {
            let mut text = String::new();
            // Writing to a string cannot fail.
            let _ = match path.trim_start_matches("net/") {
                "ip_vs" => proc::services(&mut text, &seen.services, seen.table_size),
                name => proc::of_info(&mut text, name, &seen.info),
            };
            self.put(path, &text)?;
        }
        Ok(())
    }

    /// Replaces a file in one step.
    fn put(&self, name: &str, text: &str) -> io::Result<()> {
        let file = self.0.join(name);
        let (Some(directory), Some(base)) = (file.parent(), file.file_name()) else {
            return Ok(());
        };
        self.directory(directory)?;
        let new = directory.join(format!(".{}.new", base.display()));
        let mut options = fs::OpenOptions::new();
        // A file of another user at this path is not opened: it may be a pipe.
        let _ = fs::remove_file(&new);
        options.write(true).create_new(true).mode(0o444);
        options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        let mut made = options.open(&new)?;
        // All users may read the file, whatever the umask of the service manager is; writing to it
        // changes no setting.
        made.set_permissions(fs::Permissions::from_mode(0o444))?;
        made.write_all(text.as_bytes())?;
        fs::rename(&new, &file)
    }

    /// Creates a directory of the tree, and its parents.
    fn directory(&self, directory: &Path) -> io::Result<()> {
        // An existing directory keeps its mode.
        if directory.exists() {
            return Ok(());
        }
        match directory.parent() {
            Some(above) if directory != self.0 => self.directory(above)?,
            Some(above) => fs::create_dir_all(above)?,
            None => {}
        }
        fs::create_dir(directory)?;
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755))
    }

    fn without(&self, names: &[&str]) {
        for name in names {
            let _ = fs::remove_file(self.0.join(name));
        }
    }
}

/// Removes only the files, and directories that are empty afterwards.
fn remove(path: &Path) {
    let tree = Tree(path.to_owned());
    tree.without(&FILES);
    tree.without(&CONNECTIONS);
    for name in Sysctls::NAMES {
        tree.without(&[&format!("{SYSCTLS}/{name}")]);
    }
    for directory in [SYSCTLS, "sys/net/ipv4", "sys/net", "sys"] {
        let _ = fs::remove_dir(path.join(directory));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::overview::tests::snapshot;

    #[test]
    fn proc_files_are_world_readable_and_are_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("proc");
        let tree = Tree(path.clone());
        tree.known(&snapshot("web")).expect("written");
        tree.put("sys/net/ipv4/vs/drop_entry", "0\n")
            .expect("written");
        let mode = |name: &str| {
            let meta = fs::metadata(path.join(name)).expect("the tree has the file");
            meta.permissions().mode() & 0o777
        };
        assert_eq!(
            (mode(""), mode("sys/net"), mode("net"), mode("net/ip_vs")),
            (0o755, 0o755, 0o755, 0o444)
        );
        let text = fs::read_to_string(path.join("net/ip_vs")).expect("text");
        assert!(text.contains("TCP  C000020A:0050 wlc"), "{text}");
        fs::write(path.join("net/mine"), "").expect("written");
        remove(&path);
        let left: Vec<_> = ["net/ip_vs", "net/ip_vs_app", "sys", "net/mine"]
            .into_iter()
            .filter(|name| path.join(name).exists())
            .collect();
        assert_eq!(left, ["net/mine"]);
    }
}

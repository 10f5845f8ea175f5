//! State files next to a control socket, and the removal of files of removed network namespaces.
//!
//! The name of the default socket contains the inode of the network namespace, and the kernel
//! reuses inodes. The names of state files therefore also contain the namespace's cookie, which is
//! not reused until the host restarts: a process in a new namespace does not read the files of a
//! removed one.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::Address;
use super::address;
use super::place::{self, LOCK, Lock, STEERED};
use lvs_sys::netns;

/// Maximum number of files in a directory that are examined.
const FILES_MOST: usize = 4096;
/// Maximum number of processes whose network namespace is read.
const PROCESSES_MOST: usize = 1 << 16;
/// If some processes are not visible (without `CAP_SYS_PTRACE`, or in a PID namespace), the files
/// of another namespace are removed only if all of them are older than this, and no visible process
/// is in the namespace.
const UNUSED: Duration = Duration::from_secs(24 * 60 * 60);

impl Address {
    /// Returns the file with this suffix for the state of a daemon, next to its dataplane's socket;
    /// `None` if the socket has no path. Other network namespaces do not use this file, unless the
    /// operator has named the socket, or the kernel is older than 5.14.
    pub fn state_file(&self, suffix: &str) -> Option<PathBuf> {
        let mut name = self.path()?.as_os_str().to_owned();
        if let (Self::Usual(_), Some(cookie)) = (self, netns::cookie()) {
            name.push(format!(".{cookie}"));
        }
        name.push(suffix);
        Some(PathBuf::from(name))
    }
}

/// Removes the files in `/run/lvs` of network namespaces that are no longer in use: no process runs
/// in them, and they are not mounted (`ip netns`). The files of a namespace stay if a dataplane or
/// an lvsd has locked one of them. If some processes are not visible, the files of a namespace also
/// stay until all of them are older than a day.
///
/// State files with the inode of this namespace and with another cookie belong to an earlier
/// namespace. They are removed without these conditions, if the cookie of this namespace is known.
pub fn sweep() {
    if let Some(own) = address::usual() {
        sweep_in(Path::new(place::DIRECTORY), &own, netns::cookie(), live);
    }
}

/// Removes this project's files next to the socket at `address` after its dataplane and its lvsd
/// were stopped, except those whose names end in `but`. If one of the two still has a lock, all
/// files stay.
pub fn tidy(address: &Address, but: &str) {
    let Some(path) = address.path() else { return };
    let Some(directory) = path.parent() else {
        return;
    };
    let names = names(directory).into_iter();
    // Only files of this project have such names.
    let own = names.filter(|name| {
        let rest = name.to_str().and_then(|name| {
            let socket = path.file_name()?.to_str()?;
            name.strip_prefix(socket)
        });
        rest.is_some_and(|rest| is_state(rest) && !rest.ends_with(but))
    });
    let files: Vec<PathBuf> = own.map(|name| directory.join(name)).collect();
    remove(path, &files);
}

/// Whether this project uses files whose names continue the socket's name with `rest`.
fn is_state(rest: &str) -> bool {
    let numbered = rest.strip_prefix('.').and_then(|rest| {
        let (number, _) = rest.split_once('.')?;
        number.parse::<u64>().ok()?;
        rest.strip_prefix(number)
    });
    let rest = numbered.unwrap_or(rest);
    let daemon = rest.strip_prefix(".lvsd");
    rest == LOCK || daemon.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The names in a directory, up to a limit.
fn names(directory: &Path) -> Vec<OsString> {
    let all = fs::read_dir(directory).into_iter().flatten().flatten();
    let names = all.map(|entry| entry.file_name());
    names.take(FILES_MOST).collect()
}

/// Removes `files`, which are next to `socket`, unless a dataplane or an lvsd has locked `socket`.
/// Removes lock files last.
fn remove(socket: &Path, files: &[PathBuf]) {
    let locks = [LOCK, STEERED].map(|suffix| Lock::existing(socket, suffix));
    let [Ok(_dataplane), Ok(_daemon)] = &locks else {
        return;
    };
    let is_lock = |path: &PathBuf| {
        [LOCK, STEERED]
            .map(|suffix| place::lock_path(socket, suffix))
            .contains(path)
    };
    let (last, first): (Vec<_>, Vec<_>) = files.iter().partition(|path| is_lock(path));
    for file in first.into_iter().chain(last) {
        // The file may be removed already, or belong to another user.
        let _ = fs::remove_file(file);
    }
}

/// As [`sweep`], for any directory. `own`: the default socket of this network namespace. `cookie`:
/// the cookie of this namespace. `live`: as [`live`].
fn sweep_in(
    directory: &Path,
    own: &Path,
    cookie: Option<u64>,
    live: impl FnOnce() -> (HashSet<u64>, bool),
) {
    let own = own.file_name().and_then(|name| inode(name.to_str()?));
    let own = own.map(|(inode, _)| inode);
    let mut others: BTreeMap<u64, Vec<PathBuf>> = BTreeMap::new();
    for name in names(directory) {
        let Some((inode, rest)) = name.to_str().and_then(inode) else {
            continue;
        };
        let path = directory.join(&name);
        if Some(inode) == own {
            // The file belongs to an earlier namespace with this inode.
            if cookie.is_some() && cookie_of(rest).is_some() && cookie_of(rest) != cookie {
                let _ = fs::remove_file(path);
            }
            continue;
        }
        others.entry(inode).or_default().push(path);
    }
    if others.is_empty() {
        return;
    }
    let (live, sees_all) = live();
    let now = SystemTime::now();
    for (inode, files) in others {
        let is_old = |path: &PathBuf| {
            let changed = fs::symlink_metadata(path).and_then(|meta| meta.modified());
            changed.is_ok_and(|then| now.duration_since(then).is_ok_and(|age| age > UNUSED))
        };
        if !live.contains(&inode) && (sees_all || files.iter().all(is_old)) {
            remove(&directory.join(format!("netns-{inode}.sock")), &files);
        }
    }
}

/// Splits the name of a file next to a default socket into the namespace's inode and the rest;
/// `None` for names of other files.
fn inode(name: &str) -> Option<(u64, &str)> {
    let (inode, rest) = name.strip_prefix("netns-")?.split_once(".sock")?;
    let inode = inode.parse().ok()?;
    (rest.is_empty() || is_state(rest)).then_some((inode, rest))
}

/// The cookie in the rest of a file name, after the socket's name; `None` if the name contains no
/// cookie.
fn cookie_of(rest: &str) -> Option<u64> {
    let (cookie, _) = rest.strip_prefix('.')?.split_once('.')?;
    cookie.parse().ok()
}

/// The inodes of network namespaces with processes or mounts, and whether all processes of this
/// host were visible.
fn live() -> (HashSet<u64>, bool) {
    let mut mounted = HashSet::new();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // The root of a mount of nsfs is the namespace.
    let roots = mounts.lines().filter_map(|line| line.split(' ').nth(3));
    mounted.extend(roots.filter_map(of_link));
    let mut inodes = HashSet::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let ids: Vec<u32> = ids.take(PROCESSES_MOST).collect();
    // Each namespace has its own inode of this file, which every process can read.
    let file = |id: u32| fs::metadata(format!("/proc/{id}/net/dev")).map(|meta| meta.ino());
    let (mut files, mut others) = (HashSet::new(), HashSet::new());
    let mut sees_all = is_first_of_processes() && ids.len() < PROCESSES_MOST;
    for id in ids {
        match fs::read_link(format!("/proc/{id}/ns/net")) {
            Ok(link) => {
                let inode = link.to_str().and_then(of_link);
                if inode.is_some_and(|inode| inodes.insert(inode)) {
                    files.extend(file(id).ok());
                }
            }
            // The process has exited.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => match file(id) {
                Ok(file) => {
                    others.insert(file);
                }
                Err(_) => sees_all &= !Path::new(&format!("/proc/{id}")).exists(),
            },
        }
    }
    // Some processes are invisible if the administrator hides them (`hidepid`), or if `/proc` is
    // not mounted.
    sees_all &= Path::new("/proc/1").exists() && others.is_subset(&files);
    inodes.extend(mounted);
    (inodes, sees_all)
}

/// The inode in a text such as `net:[4026531840]`; `None` for other texts.
fn of_link(text: &str) -> Option<u64> {
    text.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()
}

/// Whether this process is in the initial PID namespace, which contains all processes.
fn is_first_of_processes() -> bool {
    /// The link of the initial PID namespace (`PROC_PID_INIT_INO`).
    const FIRST: &str = "pid:[4026531836]";
    fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link == Path::new(FIRST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::life::Limits;

    fn files(directory: &Path, names: &[&str]) {
        for name in names {
            fs::write(directory.join(name), "x").expect("the file can be written");
        }
    }

    fn left(directory: &Path) -> Vec<String> {
        let names = names(directory).into_iter();
        let mut names: Vec<_> = names.filter_map(|name| name.into_string().ok()).collect();
        names.sort();
        names
    }

    const OWN: &str = "netns-1.sock";

    #[test]
    fn sweep_removes_only_files_of_removed_namespace() {
        let root = tempfile::tempdir().expect("the temporary directory can be created");
        let mine = [
            "netns-1.sock.7.lvsd.toml",
            "netns-1.sock.lock",
            "other",
            "vrrp.track",
        ];
        let live_ones = ["netns-2.sock.8.lvsd.json", "netns-2.sock.lvsd.lock"];
        let gone = [
            "netns-3.sock",
            "netns-3.sock.lock",
            "netns-3.sock.lvsd",
            "netns-3.sock.lvsd.lock",
            "netns-3.sock.9.lvsd.json",
            "netns-3.sock.9.lvsd.toml.new",
        ];
        let foreign = ["netns-3.sock.notes", "netns-x.sock.lock", "netns-4.socket"];
        for names in [&mine[..], &live_ones, &gone, &foreign] {
            files(root.path(), names);
        }
        let own = root.path().join(OWN);
        sweep_in(root.path(), &own, Some(7), || (HashSet::from([2]), true));
        let mut expected = [&mine[..], &live_ones, &foreign].concat();
        expected.sort_unstable();
        assert_eq!(left(root.path()), expected);
    }

    #[test]
    fn sweep_removes_state_with_other_cookie_only_if_own_cookie_is_known() {
        let root = tempfile::tempdir().expect("the temporary directory can be created");
        let of = [
            "netns-1.sock.6.lvsd.toml",
            "netns-1.sock.7.lvsd.toml",
            "netns-1.sock.lvsd.lock",
        ];
        files(root.path(), &of);
        let own = root.path().join(OWN);
        sweep_in(root.path(), &own, Some(7), || {
            panic!("processes were searched, although no other files exist")
        });
        assert_eq!(left(root.path()), of[1..]);
        // Without a cookie, other namespaces cannot be identified.
        files(root.path(), &of);
        sweep_in(root.path(), &own, None, || {
            panic!("processes were searched, although no other files exist")
        });
        assert_eq!(left(root.path()), of);
    }

    #[test]
    fn sweep_keeps_files_of_other_namespace_while_lock_is_held() {
        let root = tempfile::tempdir().expect("the temporary directory can be created");
        files(root.path(), &["netns-3.sock.9.lvsd.json"]);
        let own = root.path().join(OWN);
        let none = || (HashSet::new(), true);
        for suffix in [LOCK, STEERED] {
            let lock = Lock::beside(&root.path().join("netns-3.sock"), suffix, Limits::LOOK)
                .expect("the lock is free");
            sweep_in(root.path(), &own, Some(7), none);
            assert!(
                left(root.path()).contains(&"netns-3.sock.9.lvsd.json".to_owned()),
                "the file was removed while {suffix} was locked"
            );
            drop(lock);
        }
        sweep_in(root.path(), &own, Some(7), none);
        assert_eq!(left(root.path()), [""; 0]);
    }

    #[test]
    fn sweep_removes_only_old_files_if_some_processes_are_invisible() {
        let root = tempfile::tempdir().expect("the temporary directory can be created");
        files(root.path(), &["netns-3.sock.lock", "netns-4.sock.lock"]);
        let old = fs::File::options()
            .write(true)
            .open(root.path().join("netns-3.sock.lock"));
        let then = SystemTime::now() - UNUSED - Duration::from_secs(60);
        old.and_then(|file| file.set_modified(then))
            .expect("the time of the file can be set");
        let own = root.path().join(OWN);
        sweep_in(root.path(), &own, Some(7), || (HashSet::new(), false));
        assert_eq!(left(root.path()), ["netns-4.sock.lock"]);
    }

    #[test]
    fn network_namespace_of_running_process_is_live() {
        let own = fs::read_link("/proc/self/ns/net").expect("this process has a network namespace");
        let own = own
            .to_str()
            .and_then(of_link)
            .expect("the name of the namespace has a number");
        assert!(live().0.contains(&own));
    }

    #[test]
    fn tidy_removes_files_of_stopped_dataplane_except_named_and_foreign_files() {
        let root = tempfile::tempdir().expect("the temporary directory can be created");
        let names = [
            "dataplane.sock.conf",
            "dataplane.sock.lock",
            "dataplane.sock.lvsd",
            "dataplane.sock.lvsd.json",
            "dataplane.sock.lvsd.lock",
            "dataplane.sock.lvsd.toml",
            "dataplane.socket",
        ];
        files(root.path(), &names);
        let socket = root.path().join("dataplane.sock");
        let address = Address::Path(socket.clone());
        let lock = Lock::beside(&socket, LOCK, Limits::LOOK).expect("the lock is free");
        tidy(&address, ".lvsd.json");
        assert_eq!(
            left(root.path()),
            names,
            "files of a running dataplane were removed"
        );
        drop(lock);
        tidy(&address, ".lvsd.json");
        let kept = [
            "dataplane.sock.conf",
            "dataplane.sock.lvsd.json",
            "dataplane.socket",
        ];
        assert_eq!(left(root.path()), kept);
    }

    #[test]
    fn state_file_has_cookie_only_at_default_socket_and_is_none_at_abstract_socket() {
        let usual = Address::Usual(PathBuf::from("/run/lvs/netns-1.sock"));
        let named = Address::Path(PathBuf::from("/run/lvs/x.sock"));
        let cookie = netns::cookie().map(|cookie| format!(".{cookie}"));
        let expected = format!(
            "/run/lvs/netns-1.sock{}.lvsd.toml",
            cookie.unwrap_or_default()
        );
        assert_eq!(
            usual.state_file(".lvsd.toml"),
            Some(PathBuf::from(expected))
        );
        let expected = PathBuf::from("/run/lvs/x.sock.lvsd.toml");
        assert_eq!(named.state_file(".lvsd.toml"), Some(expected));
        assert_eq!(
            Address::Abstract(b"x".to_vec()).state_file(".lvsd.toml"),
            None
        );
    }
}

//! The default directory of control sockets, in which only its owner can create files, and the
//! locks next to the sockets.
//!
//! ```text
//! /run/lvs/                          root's, 0755
//!   netns-4026531840.sock            the control socket of the dataplane in that network namespace
//!   netns-4026531840.sock.lock       locked while it runs
//!   netns-4026531840.sock.lvsd.lock  locked while an lvsd manages it
//! ```
//!
//! Network namespaces share `/run`, so the name contains the inode of `/proc/self/ns/net`, which
//! every process may read. Another namespace may have this inode later. A lock shows whether a
//! dataplane is running there; state that outlives processes has the namespace's cookie in its name
//! ([`Address::state_file`]).

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use lvs_core::api::DEFAULT_SOCKET;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};

use super::Address;
pub use super::address::DIRECTORY;
use super::address::impostor;
use super::life::{Limits, Owner, Patience};

/// Suffix to the name of the socket, for the lock of programs that configure the dataplane.
pub const STEERED: &str = ".lvsd.lock";
/// Suffix to the name of the socket, for the lock of a dataplane.
pub const LOCK: &str = ".lock";
/// Maximum number of attempts to lock a file that other processes may remove.
const ATTEMPTS: usize = 100;

/// Creates `directory`, with the permissions 0755, if it does not exist.
///
/// # Errors
///
/// The directory cannot be created or opened, or users other than root and this one may write to
/// it.
pub fn prepare(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o755).create(directory) {
        // Restore the permissions that the umask has removed.
        Ok(()) => fs::set_permissions(directory, Permissions::from_mode(0o755))?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let meta = File::from(openat(CWD, directory, flags, Mode::empty())?).metadata()?;
    let own = rustix::process::geteuid().as_raw();
    if meta.uid() != 0 && meta.uid() != own {
        let uid = meta.uid();
        return Err(io::Error::other(format!(
            "the owner of the directory is user {uid}, neither root nor this user"
        )));
    }
    if meta.mode() & 0o022 != 0 {
        return Err(io::Error::other(
            "users other than the owner may write to the directory",
        ));
    }
    Ok(())
}

/// Locks the dataplane at `address` until the returned value is dropped, so that no other lvsd or
/// `lvs-run` of this network namespace configures it.
///
/// # Errors
/// [`LockError::Held`]: another process has the lock. Any user can bind the abstract socket name of
/// the lock; a process that cannot be an `lvsd` is therefore ignored. [`LockError::Io`]: neither
/// the lock file nor the abstract name can be used, although no other process has the name.
pub fn steer(address: &Address) -> Result<Steering, LockError> {
    let file = match address {
        Address::Usual(path) => path
            .parent()
            .map_or(Ok(()), prepare)
            .map_err(LockError::Io)
            .and_then(|()| Lock::beside(path, STEERED, Limits::LOOK)),
        Address::Path(path) => Lock::beside(path, STEERED, Limits::LOOK),
        Address::Abstract(_) => Err(LockError::Io(io::ErrorKind::Unsupported.into())),
    };
    let file = match file {
        Err(held @ LockError::Held(_)) => return Err(held),
        other => other,
    };
    // Earlier versions of lvsd lock only an abstract name.
    let name = match address {
        Address::Usual(_) => "lvsd".to_owned(),
        Address::Abstract(name) if name == DEFAULT_SOCKET.as_bytes() => "lvsd".to_owned(),
        other => format!("lvsd:{other}"),
    };
    let name = Address::Abstract(name.into_bytes());
    let patience = Patience::new(Limits::LOOK);
    let name = loop {
        let bound = name
            .socket_addr()
            .and_then(|address| UnixListener::bind_addr(&address));
        match bound {
            Ok(listener) => break Some(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => match name.connect() {
                Ok(stream) if impostor(&stream).is_none() => {
                    let peer = rustix::net::sockopt::socket_peercred(&stream).ok();
                    let pid = peer.and_then(|peer| u32::try_from(peer.pid.as_raw_pid()).ok());
                    let pid = pid.filter(|pid| *pid != 0);
                    if !patience.waits_for(pid) {
                        return Err(LockError::Held(pid));
                    }
                }
                // The name belongs to a process that cannot be an `lvsd`, or is free again.
                _ => break None,
            },
            Err(error) => {
                return file
                    .map(|lock| Steering(Some(lock), None))
                    .map_err(|_| error.into());
            }
        }
    };
    Ok(Steering(file.ok(), name))
}

/// The locks of a process that configures a dataplane: a locked file, if one can be created, and an
/// abstract name, unless an untrusted process uses this name.
#[derive(Debug)]
pub struct Steering(
    #[expect(dead_code, reason = "the value is stored only to keep its lock")] Option<Lock>,
    #[expect(dead_code, reason = "the value is stored only to keep its lock")] Option<UnixListener>,
);

/// A file that is locked while this value exists. The kernel releases the lock when the process
/// ends.
#[derive(Debug)]
pub struct Lock(File);

/// The reasons why this process does not get a lock.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has the lock; contains its process id, if known.
    #[error("it is locked{}", .0.map(|pid| format!(" by process {pid}")).unwrap_or_default())]
    Held(Option<u32>),
    /// The operating system refused the operation.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Lock {
    /// Locks the file with the name of `socket` and `suffix`. If another process has the lock,
    /// waits for it within `limits`.
    ///
    /// # Errors
    ///
    /// See [`LockError`].
    pub fn beside(socket: &Path, suffix: &str, limits: Limits) -> Result<Self, LockError> {
        let mut file = Self::locked(&lock_path(socket, suffix), OFlags::CREATE, limits)?;
        // The content is for processes that find the file locked.
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())?;
        Ok(Self(file))
    }

    /// Marks the lock: this process is stopping, and will soon release it.
    pub fn leave(&self) {
        let text = format!("{} {LEAVES}\n", std::process::id());
        let _ = self.0.write_all_at(text.as_bytes(), 0);
    }

    /// Like [`beside`](Self::beside), but neither creates nor changes the file, and waits only for
    /// an owner that is ending or has marked its lock. `None` if the file does not exist.
    ///
    /// # Errors
    /// See [`LockError`].
    pub fn existing(socket: &Path, suffix: &str) -> Result<Option<Self>, LockError> {
        match Self::locked(&lock_path(socket, suffix), OFlags::empty(), Limits::NONE) {
            Ok(file) => Ok(Some(Self(file))),
            Err(LockError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Locks the file at this path. A removed file does not count as locked: another process could
    /// create a new file at the path and lock it.
    fn locked(path: &Path, create: OFlags, limits: Limits) -> Result<File, LockError> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | create;
        let patience = Patience::new(limits);
        for _ in 0..ATTEMPTS {
            let file = openat(CWD, path, flags, Mode::RUSR | Mode::WUSR)
                .map(File::from)
                .map_err(io::Error::from)?;
            loop {
                match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                    Ok(()) => break,
                    Err(rustix::io::Errno::WOULDBLOCK) => {
                        let owner = owner_in(&file);
                        if !patience.waits_for(owner) {
                            return Err(LockError::Held(owner.pid));
                        }
                    }
                    Err(error) => return Err(io::Error::from(error).into()),
                }
            }
            let same = |meta: fs::Metadata| {
                let own = file.metadata();
                own.is_ok_and(|own| (own.dev(), own.ino()) == (meta.dev(), meta.ino()))
            };
            if fs::symlink_metadata(path).is_ok_and(same) {
                return Ok(file);
            }
        }
        Err(LockError::Held(None))
    }
}

/// The word after the process id in the lock file of a process that is stopping.
const LEAVES: &str = "ending";

/// The process that has locked `file`, or locked it last.
fn owner_in(file: &File) -> Owner {
    let mut text = [0; 32];
    let len = file.read_at(&mut text, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&text[..len]);
    let mut words = text.split_ascii_whitespace();
    Owner {
        pid: words.next().and_then(|word| word.parse().ok()),
        leaves: words.next() == Some(LEAVES),
    }
}

/// The process that last owned the lock with the name of `socket` and `suffix`, and whether the
/// lock is in use now; `None` if the file of the lock cannot be opened.
pub fn owner_beside(socket: &Path, suffix: &str) -> Option<(Owner, bool)> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(CWD, lock_path(socket, suffix), flags, Mode::empty()).ok()?;
    let file = File::from(file);
    let held = flock(&file, FlockOperation::NonBlockingLockShared).is_err();
    Some((owner_in(&file), held))
}

/// The path of the lock with the name of `socket` and `suffix`.
pub fn lock_path(socket: &Path, suffix: &str) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("lvs-place-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn socket_directory_is_created_unless_insecure_linked_or_without_parent() {
        let path = directory("made");
        prepare(&path).expect("the directory is created");
        prepare(&path).expect("the existing directory is accepted");
        assert_eq!(
            fs::metadata(&path)
                .expect("the directory has metadata")
                .mode()
                & 0o777,
            0o755
        );
        fs::set_permissions(&path, Permissions::from_mode(0o1777))
            .expect("the permissions can be set");
        let open =
            prepare(&path).expect_err("a directory to which every user can write was accepted");
        assert!(
            open.to_string().contains("users other than the owner"),
            "no `users other than the owner` in {open}"
        );

        let link = directory("link");
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(&path, &link).expect("the link can be created");
        prepare(&link).expect_err("a link was accepted as the directory");
        fs::remove_file(&link).expect("the file can be removed");
        fs::remove_dir_all(&path).expect("the directory can be removed");
        prepare(&path.join("below")).expect_err("a path in a missing directory was accepted");
    }

    #[test]
    fn lock_file_has_one_owner_per_socket_and_suffix_and_link_is_refused() {
        let path = directory("lock");
        prepare(&path).expect("the directory is created");
        let socket = path.join("socket");
        let first = Lock::beside(&socket, ".lock", Limits::LOOK).expect("the lock is free");
        match Lock::beside(&socket, ".lock", Limits::LOOK) {
            Err(LockError::Held(pid)) => assert_eq!(pid, Some(std::process::id())),
            other => panic!("{other:?}"),
        }
        {
            let own = Some(std::process::id());
            let there = |leaves| Some((Owner { pid: own, leaves }, true));
            assert_eq!(owner_beside(&socket, ".lock"), there(false));
            first.leave();
            assert_eq!(owner_beside(&socket, ".lock"), there(true));
        }
        let _other = Lock::beside(&socket, ".lvsd.lock", Limits::LOOK).expect("the lock is free");
        // A process that removes the file releases only its own lock.
        fs::remove_file(path.join("socket.lock")).expect("the file can be removed");
        let second = Lock::beside(&socket, ".lock", Limits::LOOK).expect("the new file is free");
        Lock::beside(&socket, ".lock", Limits::LOOK).expect_err("the lock was taken twice");
        drop(second);
        drop(first);
        Lock::beside(&socket, ".lock", Limits::LOOK).expect("the lock is free again");
        std::os::unix::fs::symlink("/nonexistent", path.join("link.lock"))
            .expect("the link can be created");
        Lock::beside(&path.join("link"), ".lock", Limits::LOOK)
            .expect_err("the lock followed a link");
        fs::remove_dir_all(&path).expect("the directory can be removed");
    }
}

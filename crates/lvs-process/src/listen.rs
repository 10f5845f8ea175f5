//! Binds the control socket of a dataplane, at which only one dataplane can listen at a time.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, openat};

use lvs_api::Address;
use lvs_api::impostor;
use lvs_api::life::{Life, Limits, Patience};
use lvs_api::place::{self, LOCK, Lock, LockError, owner_beside};
use lvs_sys::peercred;

/// Reasons why the control socket cannot be bound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another dataplane already listens at the address.
    #[error("another dataplane is running at {address}{}: stop it first, or start this one with another --socket", of_pid(.pid))]
    Running {
        /// The address of the control socket.
        address: Address,
        /// The process id of the other dataplane, if it is in this PID namespace.
        pid: Option<u32>,
    },
    /// Another process, which is not a dataplane, uses the abstract name.
    #[error(
        "user {uid}{} uses the name {address} and is not a dataplane: stop that process, use a path for this dataplane (--socket /run/...), or permit this dataplane to use {directory}",
        of_pid(.pid),
        directory = place::DIRECTORY
    )]
    Taken {
        /// The abstract name of the control socket.
        address: Address,
        /// The user id of the process that uses the name.
        uid: u32,
        /// The id of this process, if it is in this PID namespace.
        pid: Option<u32>,
    },
    /// There is a file at the path that is not a socket.
    #[error("{path} is not a socket: remove it, or use another --socket", path = .0.display())]
    NotASocket(PathBuf),
    /// The operating system has returned an error.
    #[error("cannot listen at {address}: {source}; {}", fix(source))]
    Io {
        /// The address of the control socket.
        address: Address,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// The fix for an error of the operating system, for the message.
fn fix(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "create the directory of the socket",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "use a path (--socket) in a directory that this user may write"
        }
        io::ErrorKind::InvalidInput => "use a shorter path (--socket)",
        _ => "use another address (--socket)",
    }
}

fn of_pid(pid: &Option<u32>) -> String {
    pid.map(|pid| format!(", pid {pid}")).unwrap_or_default()
}

/// If the previous dataplane at `address` is exiting, waits until the kernel has closed all of its
/// files. Call it before the new dataplane requests any exclusive resource.
///
/// # Errors
/// The previous dataplane has not exited within the time limit. No error is returned for an
/// abstract name.
pub fn await_predecessor(address: &Address) -> Result<(), BindError> {
    let owner = || match address.path() {
        Some(path) => owner_beside(path, LOCK),
        None => {
            let peer = address.connect().and_then(|end| peercred::peer_cred(&end));
            let pid = peer.ok().map(|peer| peer.pid).filter(|&pid| pid != 0);
            pid.map(|pid| (Some(pid).into(), true))
        }
    };
    let patience = Patience::new(Limits::START);
    while let Some((owner, held)) = owner() {
        let is_worth_waiting = match owner.pid.map(Life::of) {
            Some(Life::Ending) => true,
            // The process may just have been requested to stop.
            Some(Life::Running) => held,
            Some(Life::Gone) | None => false,
        };
        if !is_worth_waiting {
            return Ok(());
        }
        if !patience.waits_for(owner) {
            // Only a bind shows which process uses an abstract name.
            return match address.path() {
                Some(_) => Err(BindError::Running {
                    address: address.clone(),
                    pid: owner.pid,
                }),
                None => Ok(()),
            };
        }
    }
    Ok(())
}

#[derive(Debug)]
pub(super) struct Listener {
    pub(super) socket: UnixListener,
    pub(super) address: Address,
    /// The socket's file, which is removed at the end, with its device and inode; `None` for an
    /// abstract name.
    file: Option<(PathBuf, (u64, u64))>,
    /// The lock of the socket, which is released after the file is removed; `None` for an abstract
    /// name.
    pub(super) lock: Option<Arc<Lock>>,
}

impl Listener {
    /// Listens at `address`. A socket file at which no process listens is replaced.
    pub(super) fn bind(address: &Address) -> Result<Self, BindError> {
        match address {
            Address::Usual(path) => Self::bind_usual(path),
            Address::Path(path) => Self::bind_path(address, path),
            Address::Abstract(_) => Self::bind_name(address),
        }
    }

    /// Binds the default path; if the operating system returns an error, the abstract name.
    fn bind_usual(path: &Path) -> Result<Self, BindError> {
        let address = Address::Usual(path.to_owned());
        let name = Address::by_name();
        // A dataplane of an earlier version has only the name.
        let patience = Patience::new(Limits::START);
        while let Ok(stream) = name.connect()
            && impostor(&stream).is_none()
        {
            let pid = peercred::peer_cred(&stream).ok().map(|peer| peer.pid);
            if !patience.waits_for(pid.filter(|&pid| pid != 0)) {
                return Err(running(&name));
            }
        }
        let bound = path
            .parent()
            .map_or(Ok(()), place::prepare)
            .map_err(|source| BindError::Io {
                address: address.clone(),
                source,
            })
            .and_then(|()| Self::bind_path(&address, path));
        match bound {
            Err(BindError::Io { source, .. }) => {
                let directory = place::DIRECTORY;
                // This is normal for users without privileges: they have their own network
                // namespace, and therefore their own abstract names.
                if peercred::own_uid() == 0 {
                    tracing::warn!(
                        "cannot listen in {directory} ({source}): listening at {name}, an abstract name that any local user can bind; create that directory with the owner root and the mode 0755 (RuntimeDirectory=lvs in a systemd unit)"
                    );
                }
                Self::bind_name(&name)
            }
            other => other,
        }
    }

    fn bind_path(address: &Address, path: &Path) -> Result<Self, BindError> {
        let failed = |source| BindError::Io {
            address: address.clone(),
            source,
        };
        // Check this first: a path that is not a socket is refused before a lock file is created.
        let there = is_socket(path).map_err(failed)?;
        if there == Some(false) {
            return Err(BindError::NotASocket(path.to_path_buf()));
        }
        // A dataplane that hangs does not accept a connection, but owns the lock.
        let lock = Lock::beside(path, LOCK, Limits::START).map_err(|error| match error {
            LockError::Held(pid) => BindError::Running {
                address: address.clone(),
                pid,
            },
            LockError::Io(source) => failed(source),
        })?;
        if is_socket(path).map_err(failed)? == Some(true) {
            match address.connect() {
                // A dataplane of an earlier version has no lock; it may hang.
                Ok(_) => return Err(running(address)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(running(address));
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path).map_err(failed)?;
                }
                Err(error) => return Err(failed(error)),
            }
        }
        let socket = address
            .socket_addr()
            .and_then(|addr| UnixListener::bind_addr(&addr))
            .map_err(failed)?;
        let identity = open_to_all(path).map_err(failed)?;
        Ok(Self {
            socket,
            address: address.clone(),
            file: Some((path.to_path_buf(), identity)),
            lock: Some(Arc::new(lock)),
        })
    }

    fn bind_name(address: &Address) -> Result<Self, BindError> {
        let patience = Patience::new(Limits::START);
        let socket = loop {
            let bound = address
                .socket_addr()
                .and_then(|addr| UnixListener::bind_addr(&addr));
            match bound {
                Ok(socket) => break socket,
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    let error = running(address);
                    let ends = match &error {
                        BindError::Running { pid, .. } => patience.waits_for(*pid),
                        _ => false,
                    };
                    if !ends {
                        return Err(error);
                    }
                }
                Err(source) => {
                    return Err(BindError::Io {
                        address: address.clone(),
                        source,
                    });
                }
            }
        };
        Ok(Self {
            socket,
            address: address.clone(),
            file: None,
            lock: None,
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, identity)) = &self.file {
            // Another process may have replaced the path since.
            let same =
                fs::symlink_metadata(path).is_ok_and(|meta| (meta.dev(), meta.ino()) == *identity);
            if same {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// Whether the file at `path` is a socket; `None` if no file exists. A symbolic link does not count
/// as a socket.
fn is_socket(path: &Path) -> io::Result<Option<bool>> {
    match fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some(meta.file_type().is_socket())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Lets all local users connect to the socket at `path`; the credentials of a client decide about
/// its rights. Returns device and inode.
fn open_to_all(path: &Path) -> io::Result<(u64, u64)> {
    // Not by name: if other users may write to the directory, the name may refer to another file by
    // now.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(openat(CWD, path, flags, Mode::empty())?);
    let meta = file.metadata()?;
    if !meta.file_type().is_socket() {
        return Err(io::Error::other(
            "another process has replaced the socket file",
        ));
    }
    let by_descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::set_permissions(by_descriptor, Permissions::from_mode(0o666))?;
    Ok((meta.dev(), meta.ino()))
}

/// The error about the process that listens at `address`: a dataplane, or a process that uses its
/// name.
fn running(address: &Address) -> BindError {
    let stream = address.connect().ok();
    let peer = stream
        .as_ref()
        .and_then(|stream| peercred::peer_cred(stream).ok());
    let pid = peer.map(|peer| peer.pid).filter(|&pid| pid != 0);
    let impostor = stream
        .filter(|_| address.path().is_none())
        .and_then(|stream| impostor(&stream));
    match impostor {
        Some((uid, _)) => BindError::Taken {
            address: address.clone(),
            uid,
            pid,
        },
        None => BindError::Running {
            address: address.clone(),
            pid,
        },
    }
}

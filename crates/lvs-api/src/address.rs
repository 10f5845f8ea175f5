//! The addresses on which a dataplane listens.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::peer::{self, Own, Refusal};

/// The environment variable with the address of a socket other than the default.
pub const SOCKET_VARIABLE: &str = "LVS_SOCKET";

/// The directory of the default sockets.
pub const DIRECTORY: &str = "/run/lvs";

/// Longest wait of a connection attempt for a listener that does not accept connections.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pause before the next connection attempt.
const PAUSE: Duration = Duration::from_millis(10);

/// The address on which a dataplane listens, or to which a client connects.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// The default for a dataplane of this network namespace: this path in `/run/lvs`. A dataplane
    /// that cannot listen there, or whose version is before 0.2, uses the abstract name
    /// `@lvs-dataplane`; clients also try this name.
    Usual(PathBuf),
    /// A name in the abstract namespace, without the leading NUL. Each network namespace has its
    /// own names, and any user can bind an unused one.
    Abstract(Vec<u8>),
    /// A path that was set instead of the default.
    Path(PathBuf),
}

impl Address {
    /// Parses an address: `@name` is an abstract name; all other texts are paths.
    pub fn new(text: impl AsRef<OsStr>) -> Self {
        let text = text.as_ref();
        match text.as_bytes().strip_prefix(b"@") {
            Some(name) => Self::Abstract(name.to_vec()),
            None => Self::Path(PathBuf::from(text)),
        }
    }

    /// The address in `LVS_SOCKET`; the default if the variable is unset or empty.
    pub fn from_env() -> Self {
        match std::env::var_os(SOCKET_VARIABLE) {
            Some(text) if !text.is_empty() => Self::new(text),
            _ => Self::default(),
        }
    }

    /// The path; `None` for an abstract name.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Abstract(_) => None,
            Self::Usual(path) | Self::Path(path) => Some(path),
        }
    }

    /// The abstract name `@lvs-dataplane`. A dataplane listens there if it cannot create its socket
    /// in `/run/lvs`.
    pub fn by_name() -> Self {
        Self::Abstract(lvs_core::api::DEFAULT_SOCKET.as_bytes().to_vec())
    }

    /// Converts the address for system calls.
    ///
    /// # Errors
    ///
    /// The name or the path is too long for a socket address.
    pub fn socket_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Abstract(name) => SocketAddr::from_abstract_name(name),
            Self::Usual(path) | Self::Path(path) => SocketAddr::from_pathname(path),
        }
    }

    /// Connects to exactly this address. Returns `WouldBlock` if a process listens there, but does
    /// not accept the connection within a second.
    pub fn connect(&self) -> io::Result<UnixStream> {
        let address = match self {
            Self::Abstract(name) => SocketAddrUnix::new_abstract_name(name)?,
            Self::Usual(path) | Self::Path(path) => SocketAddrUnix::new(path.as_path())?,
        };
        // A blocking connect could wait forever: any local user may listen on an abstract name, and
        // accept no connection.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match rustix::net::connect(&socket, &address) {
                Ok(()) => break,
                Err(Errno::AGAIN) if Instant::now() < deadline => thread::sleep(PAUSE),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false)?;
        Ok(stream)
    }
}

/// The default control socket of this thread's network namespace; `None` if `/proc` does not show
/// the namespace.
pub(super) fn usual() -> Option<PathBuf> {
    let inode = fs::metadata("/proc/thread-self/ns/net").ok()?.ino();
    Some(Path::new(DIRECTORY).join(format!("netns-{inode}.sock")))
}

impl Default for Address {
    /// The default of this thread's network namespace; `@lvs-dataplane` if `/proc` does not show
    /// the namespace.
    fn default() -> Self {
        usual().map_or_else(Self::by_name, Self::Usual)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abstract(name) => write!(f, "@{}", name.escape_ascii()),
            Self::Usual(path) | Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// If the process that listens on `stream` is not trusted, returns its user and the reason. `None`
/// if the process is trusted, or if the kernel does not report its identity.
///
/// A listener of root whose capabilities are not visible is trusted: a request to it is less
/// dangerous than a request from it.
pub fn impostor(stream: &UnixStream) -> Option<(u32, Refusal)> {
    let peer = rustix::net::sockopt::socket_peercred(stream).ok()?;
    let uid = peer.uid.as_raw();
    let pid = u32::try_from(peer.pid.as_raw_pid()).unwrap_or(0);
    match Own::look().trusts(uid, || peer::root(pid, || true)) {
        Ok(()) | Err(Refusal::Unseen) => None,
        Err(refusal) => Some((uid, refusal)),
    }
}

//! Where an engine listens.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};

/// The environment variable that names another socket than the default one.
pub const SOCKET_VARIABLE: &str = "LVS_SOCKET";

/// A Unix socket by abstract name (`@lvs-dataplane`) or by path.
///
/// Every network namespace has its own abstract names, as it has its own IPVS.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// An abstract name, without the NUL in front.
    Abstract(Vec<u8>),
    /// A path.
    Path(PathBuf),
}

impl Address {
    /// `@name` is an abstract name, everything else a path.
    pub fn new(text: impl AsRef<OsStr>) -> Self {
        let text = text.as_ref();
        match text.as_bytes().strip_prefix(b"@") {
            Some(name) => Self::Abstract(name.to_vec()),
            None => Self::Path(PathBuf::from(text)),
        }
    }

    /// The address in `LVS_SOCKET`, or the default one if that is not set or empty.
    pub fn from_env() -> Self {
        match std::env::var_os(SOCKET_VARIABLE) {
            Some(text) if !text.is_empty() => Self::new(text),
            _ => Self::default(),
        }
    }

    /// The path, if it has one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Abstract(_) => None,
            Self::Path(path) => Some(path),
        }
    }

    pub(super) fn socket_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Abstract(name) => SocketAddr::from_abstract_name(name),
            Self::Path(path) => SocketAddr::from_pathname(path),
        }
    }

    pub(super) fn connect(&self) -> io::Result<UnixStream> {
        UnixStream::connect_addr(&self.socket_addr()?)
    }
}

impl Default for Address {
    /// `@lvs-dataplane`.
    fn default() -> Self {
        Self::Abstract(lvs_core::api::DEFAULT_SOCKET.as_bytes().to_vec())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abstract(name) => write!(f, "@{}", name.escape_ascii()),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

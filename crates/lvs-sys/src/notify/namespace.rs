//! Identifies the network namespace of a socket, and the user namespaces that own a namespace.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// The identity of a namespace; it is unique while the namespace exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId {
    device: u64,
    inode: u64,
}

impl NamespaceId {
    /// The identity of an open namespace, or of a file in `/proc/PID/ns`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn of(file: &File) -> io::Result<Self> {
        file.metadata().map(|meta| Self::from_metadata(&meta))
    }

    /// The identity of a file in `/proc/PID/ns`.
    pub fn from_metadata(meta: &std::fs::Metadata) -> Self {
        Self::new(meta.dev(), meta.ino())
    }

    /// The identity of the namespace whose file in `/proc/PID/ns` has this device and inode.
    pub const fn new(device: u64, inode: u64) -> Self {
        Self { device, inode }
    }
}

/// `SIOCGSKNS` (linux/sockios.h), which libc does not have.
const SIOCGSKNS: u32 = 0x894c;

fn related(fd: &impl AsFd, request: u64) -> io::Result<File> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: these requests take no argument, and return a descriptor.
    let found = super::super::check(unsafe { libc::ioctl(fd, request as _) })?;
    // SAFETY: the call has just made this descriptor, which nothing else owns.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(found) }))
}

/// Returns the network namespace in which a socket was created.
///
/// # Errors
/// If the descriptor is not a socket, or this process has no CAP_NET_ADMIN in that namespace.
pub fn of_socket(socket: &impl AsFd) -> io::Result<File> {
    related(socket, SIOCGSKNS.into())
}

/// The user namespaces whose capabilities apply to a namespace: its owner, and all visible
/// ancestors of the owner. The capabilities of a thread in one of them apply to the namespace.
///
/// # Errors
/// The owner is not visible from the user namespace of this process.
pub fn owners(namespace: &File) -> io::Result<Vec<NamespaceId>> {
    /// Maximum depth of nested user namespaces (`user_namespaces(7)`).
    const DEPTH: usize = 33;
    let mut found = Vec::new();
    let mut user = related(namespace, libc::NS_GET_USERNS as _)?;
    while found.len() < DEPTH {
        found.push(NamespaceId::of(&user)?);
        match related(&user, libc::NS_GET_PARENT as _) {
            Ok(parent) => user = parent,
            Err(_) => break,
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_own_network_namespace_are_found() {
        let own = File::open("/proc/self/ns/net").expect("the file is readable");
        let Ok(owners) = owners(&own) else {
            // The namespace belongs to an ancestor of this user namespace.
            return;
        };
        assert!(!owners.is_empty());
        let user = std::fs::metadata("/proc/self/ns/user").expect("the file is readable");
        if rustix::process::geteuid().is_root() {
            assert!(owners.contains(&NamespaceId::from_metadata(&user)));
        }
    }
}

//! Decides whether a process that is connected to a control socket is trusted.
//!
//! The kernel lets a process configure IPVS if it has `CAP_NET_ADMIN` in the user namespace of its
//! network; the user id 0 is not sufficient. Root of a container on the host's network has user id
//! 0 without the capability (CVE-2020-15257: a daemon did not check it). So user 0 must have the
//! capability by `/proc`, unless this process is itself root without it. Other users must be this
//! process's own; callers also permit the members of a group (`--group`).

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

/// `CAP_NET_ADMIN` of capability.h, as a bit.
const NET_ADMIN: u64 = 1 << 12;
/// Inode of the initial user namespace (`USER_NS_INIT_INO` of nsfs.h).
const INITIAL_USER_NAMESPACE: u64 = 0xEFFF_FFFD;

/// A process of user 0, as `/proc` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Root {
    /// The process is in this process's user namespace.
    Here {
        /// Whether the process has `CAP_NET_ADMIN` in its effective set.
        net_admin: bool,
    },
    /// The process is in another user namespace.
    Elsewhere,
    /// The process is in another PID namespace, has exited, or is hidden.
    Unseen,
}

/// The user and the rights of this process.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    /// Effective user id.
    pub uid: u32,
    /// Whether this process has `CAP_NET_ADMIN` in its effective set. Without this capability, a
    /// client of this process gains nothing that the user of this process could not do directly.
    pub net_admin: bool,
    /// Whether this process is in the initial user namespace, in which user 0 is the host's root.
    pub initial: bool,
}

/// Reasons why a process may not make changes. The text continues a sentence that begins with the
/// name of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The client is neither root nor the dataplane's own user.
    #[error(
        "only root with CAP_NET_ADMIN, the dataplane's own user and the group of --group may do this"
    )]
    User,
    /// The client is root without the capability.
    #[error(
        "this process runs as root, but does not have CAP_NET_ADMIN: give it the capability (docker run --cap-add NET_ADMIN), or add its user to the group of the dataplane's --group"
    )]
    NoCapability,
    /// The client is root of another user namespace.
    #[error(
        "this process is root in a user namespace that is not the dataplane's: run it in the dataplane's user namespace, or add its user to the group of the dataplane's --group"
    )]
    UserNamespace,
    /// The client is root, and its capabilities are unknown.
    #[error(
        "the dataplane does not see this process in /proc and cannot check whether it has CAP_NET_ADMIN: run it in the dataplane's PID namespace, or add its user to the group of the dataplane's --group"
    )]
    Unseen,
}

impl Own {
    /// Reads the identity of this process.
    pub fn look() -> Self {
        Self {
            uid: rustix::process::geteuid().as_raw(),
            net_admin: fs::read_to_string("/proc/self/status")
                .is_ok_and(|status| effective(&status).is_some_and(|all| all & NET_ADMIN != 0)),
            initial: fs::metadata("/proc/self/ns/user")
                .is_ok_and(|meta| meta.ino() == INITIAL_USER_NAMESPACE),
        }
    }

    /// Checks that a process of user `uid` has the rights of this process. For user 0, `root` reads
    /// the rights of that process.
    pub fn trusts(&self, uid: u32, root: impl FnOnce() -> Root) -> Result<(), Refusal> {
        if uid != 0 {
            return if uid == self.uid {
                Ok(())
            } else {
                Err(Refusal::User)
            };
        }
        if self.uid == 0 && !self.net_admin {
            return Ok(());
        }
        match root() {
            Root::Here { net_admin: true } => Ok(()),
            Root::Here { net_admin: false } => Err(Refusal::NoCapability),
            // The process belongs to the user who created this process's user namespace, and is
            // therefore user 0 in it.
            Root::Elsewhere if self.uid == 0 && !self.initial => Ok(()),
            Root::Elsewhere => Err(Refusal::UserNamespace),
            Root::Unseen => Err(Refusal::Unseen),
        }
    }
}

/// Returns the rights of process `pid` by `/proc`; [`Root::Unseen`] unless `still_there` confirms
/// afterwards that the process exists, so that no other process had its id.
pub fn root(pid: u32, still_there: impl FnOnce() -> bool) -> Root {
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else {
        return Root::Unseen;
    };
    let same = same_user_namespace(pid);
    match (effective(&status), same) {
        _ if pid == 0 || !still_there() => Root::Unseen,
        (Some(all), Ok(true)) => Root::Here {
            net_admin: all & NET_ADMIN != 0,
        },
        (Some(_), Ok(false)) => Root::Elsewhere,
        (None, _) | (_, Err(_)) => Root::Unseen,
    }
}

/// The effective capabilities in the text of `/proc/PID/status`; `None` if the text contains no
/// valid value.
fn effective(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Whether process `pid` is in the user namespace of this process. If `pid` has more capabilities,
/// the namespace of `pid` is not readable. The user and group id maps of both processes are then
/// compared, which every process may read. Two namespaces have equal maps only if a user with
/// rights over all ids wrote them.
fn same_user_namespace(pid: u32) -> io::Result<bool> {
    let name = |of: &str| fs::metadata(format!("/proc/{of}/ns/user")).map(|m| (m.dev(), m.ino()));
    match name(&pid.to_string()) {
        Ok(theirs) => Ok(theirs == name("self")?),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            for map in ["uid_map", "gid_map"] {
                if fs::read(format!("/proc/{pid}/{map}"))? != fs::read(format!("/proc/self/{map}"))?
                {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Root = Root::Here { net_admin: true };
    const BARE: Root = Root::Here { net_admin: false };

    #[test]
    fn rights_of_socket_peer_depend_on_user_capability_and_user_namespace() {
        let own = |uid, net_admin, initial| Own {
            uid,
            net_admin,
            initial,
        };
        let dataplane = own(0, true, true);
        let user = own(1000, false, true);
        let rootless = own(0, true, false);
        let bare = own(0, false, true);
        for (own, uid, root, expected) in [
            (dataplane, 0, HERE, Ok(())),
            (dataplane, 0, BARE, Err(Refusal::NoCapability)),
            (dataplane, 0, Root::Elsewhere, Err(Refusal::UserNamespace)),
            (dataplane, 0, Root::Unseen, Err(Refusal::Unseen)),
            (dataplane, 1000, HERE, Err(Refusal::User)),
            (user, 1000, BARE, Ok(())),
            (user, 1001, HERE, Err(Refusal::User)),
            (user, 0, HERE, Ok(())),
            (user, 0, BARE, Err(Refusal::NoCapability)),
            (rootless, 0, HERE, Ok(())),
            (rootless, 0, BARE, Err(Refusal::NoCapability)),
            (rootless, 0, Root::Elsewhere, Ok(())),
            (rootless, 0, Root::Unseen, Err(Refusal::Unseen)),
            (rootless, 1000, HERE, Err(Refusal::User)),
            (bare, 0, BARE, Ok(())),
            (bare, 0, Root::Unseen, Ok(())),
            (bare, 1000, HERE, Err(Refusal::User)),
        ] {
            assert_eq!(own.trusts(uid, || root), expected, "{own:?} {uid} {root:?}");
        }
    }

    #[test]
    fn rights_of_process_are_known_only_while_process_exists() {
        let own = Own::look();
        let pid = std::process::id();
        let seen = Root::Here {
            net_admin: own.net_admin,
        };
        assert_eq!(root(pid, || true), seen);
        assert_eq!(
            root(pid, || false),
            Root::Unseen,
            "a process that may have exited was trusted"
        );
        assert_eq!(root(0, || true), Root::Unseen);
        assert_eq!(root(u32::MAX, || true), Root::Unseen);
    }

    #[test]
    fn effective_capabilities_are_parsed_and_none_if_invalid_or_missing() {
        let text = "Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t0000000000001000\n";
        assert_eq!(effective(text), Some(NET_ADMIN));
        assert_eq!(effective("CapEff:\tx\n"), None);
        assert_eq!(effective(""), None);
    }
}

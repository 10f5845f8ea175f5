//! The program's own view of `/proc`, with IPVS's files.
//!
//! `/proc/sys/net` and `/proc/net` become directories of the supervisor's file system, with IPVS's
//! files, and with links to all other files. The links point into a second mount of the real
//! `/proc`, inside this file system. Other mounts of the program stay shared with those of its
//! host.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
    mount_change, move_mount, open_tree,
};

/// The directory at which the supervisor's file system is mounted.
const PLACE: &str = "/proc/sys/net";

/// The mounts for the program, which are made when the supervisor is ready.
#[derive(Debug)]
pub(super) struct Mounts {
    files: OwnedFd,
    proc: OwnedFd,
}

/// Moves this process into a new mount namespace. Returns the mounts for the program, and the
/// supervisor's descriptor of the FUSE file system.
///
/// # Errors
///
/// The kernel has no FUSE, `/proc` is not a mount point, or this process does not have
/// CAP_SYS_ADMIN.
pub(super) fn prepare() -> io::Result<(Mounts, OwnedFd)> {
    let requests = File::options().read(true).write(true).open("/dev/fuse")?;
    unshare(CloneFlags::CLONE_NEWNS)?;
    // Later mounts below /proc stay in this mount namespace.
    mount_change(
        "/proc",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    let proc = open_tree(CWD, "/proc", flags)?;
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let number = requests.as_raw_fd().to_string();
    for (key, value) in [
        ("source", super::NAME),
        ("fd", &number),
        ("rootmode", "40000"),
        ("user_id", "0"),
        ("group_id", "0"),
    ] {
        fsconfig_set_string(context.as_fd(), key, value)?;
    }
    // All users may access the file system, and the kernel checks the modes of its files.
    for key in ["allow_other", "default_permissions"] {
        fsconfig_set_flag(context.as_fd(), key)?;
    }
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let files = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    Ok((Mounts { files, proc }, requests.into()))
}

impl Mounts {
    /// Mounts all file systems or none.
    ///
    /// # Errors
    /// The supervisor has exited, or a mount is refused.
    pub(super) fn mount(self) -> io::Result<()> {
        mount_at(&self.files, PLACE)?;
        self.mount_inside().inspect_err(|_| {
            let _ = umount2(PLACE, MntFlags::MNT_DETACH);
        })
    }

    fn mount_inside(&self) -> io::Result<()> {
        use super::files::{INSIDE, LINK, PROC};
        mount_at(&self.proc, &format!("{PLACE}/{INSIDE}/{PROC}"))?;
        // /proc/net is a link, so a link is mounted there.
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
        let link = open_tree(CWD, format!("{PLACE}/{INSIDE}/{LINK}"), flags)?;
        mount_at(&link, "/proc/net")
    }
}

fn mount_at(tree: &OwnedFd, place: &str) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(tree.as_fd(), "", CWD, place, flags)?)
}

//! What outlives the engine: maps and links under names in a BPF file system, a directory for each
//! network namespace.
//!
//! An engine that is killed leaves them, and with them its connections, which go on. Its successor
//! finds them. One that ends in an orderly way takes them with it.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::layout::ABOUT_WORDS;
use crate::sys;

/// Where the BPF file system is.
const FILE_SYSTEM: &str = "/sys/fs/bpf";
/// What links are called, with the interface's index behind.
const LINK: &str = "link-";
/// Those of programs before there is a socket buffer.
const XDP_LINK: &str = "xdp-";

/// The directory of a network namespace.
#[derive(Clone, Debug)]
pub(super) struct Pins {
    directory: PathBuf,
}

impl Pins {
    /// Those of this thread's network namespace, whether they are there or not.
    ///
    /// # Errors
    /// If there is no BPF file system, and none can be mounted.
    pub(super) fn here() -> io::Result<Self> {
        let inode = fs::metadata("/proc/thread-self/ns/net")?.ino();
        sys::mount_bpf(Path::new(FILE_SYSTEM))?;
        let directory = Path::new(FILE_SYSTEM).join("lvs").join(inode.to_string());
        Ok(Self { directory })
    }

    /// Makes the directory, and keeps others from it for as long as what this gives is there: one
    /// engine at a time forwards in the kernel. Whoever can write there could leave connections
    /// of his own, so that nobody else may: any user can make directories in a BPF file system
    /// that was mounted as usual.
    ///
    /// # Errors
    /// If there is another engine, or the directory is not this user's alone.
    pub(super) fn claim(&self) -> io::Result<File> {
        let both = [self.directory.parent(), Some(&*self.directory)];
        let own = rustix::process::geteuid().as_raw();
        for directory in both.into_iter().flatten() {
            match DirBuilder::new().mode(0o700).create(directory) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            let meta = fs::symlink_metadata(directory)?;
            if !meta.is_dir() || meta.uid() != own || meta.mode() & 0o022 != 0 {
                let directory = directory.display();
                return Err(io::Error::other(format!(
                    "{directory} is not a directory of this user's alone: remove it"
                )));
            }
        }
        let directory = File::open(&self.directory)?;
        flock(&directory, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            io::Error::new(
                io::ErrorKind::AddrInUse,
                "another engine of this network namespace forwards in the kernel",
            )
        })?;
        Ok(directory)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(super) fn link(&self, ifindex: u32) -> PathBuf {
        self.path(&format!("{LINK}{ifindex}"))
    }

    pub(super) fn xdp_link(&self, ifindex: u32) -> PathBuf {
        self.path(&format!("{XDP_LINK}{ifindex}"))
    }

    /// Interfaces whose ingress has a link.
    pub(super) fn links(&self) -> Vec<u32> {
        self.numbers(LINK)
    }

    /// Interfaces that have a link before there is a socket buffer.
    pub(super) fn xdp_links(&self) -> Vec<u32> {
        self.numbers(XDP_LINK)
    }

    fn numbers(&self, of: &str) -> Vec<u32> {
        let names = self.names();
        let numbers = names.iter().filter_map(|name| name.strip_prefix(of));
        numbers.filter_map(|number| number.parse().ok()).collect()
    }

    fn names(&self) -> Vec<String> {
        let all = fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten();
        all.map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect()
    }

    /// Whether somebody has left something.
    pub(super) fn are_there(&self) -> bool {
        !self.names().is_empty()
    }

    /// Takes everything away, links first; gives how much there was.
    pub(super) fn remove(&self) -> usize {
        let had = self.empty();
        let _ = fs::remove_dir(&self.directory);
        had
    }

    /// The same, but for the directory.
    pub(super) fn empty(&self) -> usize {
        let mut names = self.names();
        names.sort_by_key(|name| !(name.starts_with(LINK) || name.starts_with(XDP_LINK)));
        for name in &names {
            let _ = fs::remove_file(self.path(name));
        }
        names.len()
    }
}

/// What all words of a description mean depends on this: it changes with any map's shape or
/// meaning.
const VERSION: u64 = 3;
/// "LVSKERNL".
const MAGIC: u64 = u64::from_le_bytes(*b"LVSKERNL");

/// The first words of `lvs_about`, before the table's own description.
pub(super) const fn about(processors: u32) -> [u64; ABOUT_WORDS] {
    let mut words = [0; ABOUT_WORDS];
    words[0] = MAGIC;
    words[1] = VERSION;
    words[2] = processors as u64;
    words
}

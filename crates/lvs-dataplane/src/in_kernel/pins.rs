//! What outlives the engine: maps and links under names in a BPF file system, a directory for each network namespace.
//!
//! An engine that is killed leaves them, and with them its connections, which go on. Its successor finds them. One that ends in
//! an orderly way takes them with it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::layout::ABOUT_WORDS;
use crate::sys;

/// Where the BPF file system is.
const FILE_SYSTEM: &str = "/sys/fs/bpf";
/// What links are called, with the interface's index behind.
const LINK: &str = "link-";

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

    /// Makes the directory.
    pub(super) fn make(&self) -> io::Result<()> {
        fs::create_dir_all(&self.directory)
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(super) fn link(&self, ifindex: u32) -> PathBuf {
        self.path(&format!("{LINK}{ifindex}"))
    }

    /// Interfaces whose ingress has a link.
    pub(super) fn links(&self) -> Vec<u32> {
        self.names()
            .iter()
            .filter_map(|name| name.strip_prefix(LINK)?.parse().ok())
            .collect()
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
        let mut names = self.names();
        names.sort_by_key(|name| !name.starts_with(LINK));
        for name in &names {
            let _ = fs::remove_file(self.path(name));
        }
        let _ = fs::remove_dir(&self.directory);
        names.len()
    }
}

/// What all words of a description mean depends on this: it changes with any map's shape or meaning.
const VERSION: u64 = 1;
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

//! The maps and links that remain after a dataplane is killed, pinned in a BPF file system: a
//! directory for each network namespace.
//!
//! The namespace's inode, which the kernel may reuse, names the directory. The maps therefore
//! contain the cookie of the namespace, which is never reused.
//!
//! After a kill, connections continue with the pinned maps and links, and the successor opens them.
//! A dataplane that exits in an orderly way removes them.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use tracing::warn;

use super::layout::{HOST_WORDS, conf};
use crate::warm_restart::Area;
use lvs_sys::{Program, ProgramLink, SharedArray, netns};

/// Whether a dataplane creates its maps or opens those of a predecessor.
#[derive(Clone, Copy, Debug)]
pub(super) enum Maps<'a> {
    /// New maps, which are removed when the dataplane exits.
    New,
    /// New maps, which stay for a successor if the dataplane is killed.
    Pinned(&'a Pins),
    /// The maps of a predecessor.
    Found(&'a Pins),
}

/// The mount point of the BPF file system.
const FILE_SYSTEM: &str = "/sys/fs/bpf";
/// Prefix of the name of a link that is not of an XDP program; the index of the interface follows.
const LINK: &str = "link-";
/// Prefix of the name of a link of an XDP program.
const XDP_LINK: &str = "xdp-";

/// The error if another dataplane has locked the directory.
pub(super) const ANOTHER: &str =
    "another dataplane of this network namespace uses the kernel fast path";
/// Longest wait for other dataplanes that lock or sweep directories.
const TURN: Duration = Duration::from_secs(1);
/// Pause between two attempts to lock the directory.
const PAUSE: Duration = Duration::from_millis(1);
/// Maximum number of attempts to lock a directory that other dataplanes may remove.
const ATTEMPTS: usize = 100;

#[derive(Clone, Debug)]
pub(super) struct Pins {
    directory: PathBuf,
}

impl Pins {
    /// Returns the directory of this thread's network namespace, whether it exists or not.
    ///
    /// # Errors
    /// There is no BPF file system, and none can be mounted; or the network namespace cannot be
    /// determined.
    pub(super) fn here() -> io::Result<Self> {
        lvs_sys::mount_bpf(Path::new(FILE_SYSTEM))?;
        Self::if_mounted()
    }

    /// As [`here`](Self::here), but does not mount a BPF file system.
    ///
    /// # Errors
    /// The network namespace cannot be determined.
    pub(super) fn if_mounted() -> io::Result<Self> {
        let inode = fs::metadata("/proc/thread-self/ns/net")?.ino();
        let directory = Path::new(FILE_SYSTEM).join("lvs").join(inode.to_string());
        Ok(Self { directory })
    }

    #[cfg(test)]
    pub(super) fn at(directory: PathBuf) -> io::Result<Self> {
        lvs_sys::mount_bpf(Path::new(FILE_SYSTEM))?;
        make(&directory)?;
        Ok(Self { directory })
    }

    /// Creates the directory and locks it until the returned file is closed, so that only one
    /// dataplane uses it. The directory must belong to this user, and no other user may write to
    /// it: otherwise another user could leave forged connections. (With the usual mount options of
    /// a BPF file system, any user can create directories.)
    ///
    /// # Errors
    /// Another dataplane uses the directory, another user owns it or may write to it, or it cannot
    /// be created.
    pub(super) fn claim(&self) -> io::Result<File> {
        if let Some(all) = self.directory.parent() {
            make(all)?;
        }
        let _turn = self.turn();
        for _ in 0..ATTEMPTS {
            make(&self.directory)?;
            if let Some(claim) = self.lock()? {
                return Ok(claim);
            }
        }
        Err(another())
    }

    /// Removes the pins of other network namespaces whose dataplane was killed so long ago that no
    /// successor would use them.
    pub(super) fn sweep(&self) {
        let Some(_turn) = self.turn() else { return };
        let all = self.directory.parent().map(fs::read_dir);
        for entry in all.into_iter().flatten().flatten().flatten() {
            let directory = entry.path();
            let other = Self { directory };
            if other.directory == self.directory {
                continue;
            }
            if let Ok(Some(_claim)) = other.lock()
                && other
                    .words("lvs_conf", conf::WORDS)
                    .is_ok_and(|conf| is_over(&conf))
            {
                other.remove();
            }
        }
    }

    /// Waits for the lock that excludes claims and sweeps of other dataplanes. A sweep locks each
    /// directory for a moment, and a claim must not mistake this for a running dataplane. `None` if
    /// the lock is not free within [`TURN`], or does not exist.
    fn turn(&self) -> Option<File> {
        let all = File::open(self.directory.parent()?).ok()?;
        let until = Instant::now() + TURN;
        while flock(&all, FlockOperation::NonBlockingLockExclusive).is_err() {
            if Instant::now() >= until {
                return None;
            }
            thread::sleep(PAUSE);
        }
        Some(all)
    }

    /// Locks the directory; `None` if it does not exist, or another process removes it in the
    /// meantime.
    ///
    /// # Errors
    /// Another dataplane uses the directory, or another user owns it or may write to it.
    fn lock(&self) -> io::Result<Option<File>> {
        let there = |meta: io::Result<Metadata>| match meta {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            meta => meta.map(Some),
        };
        let Some(meta) = there(fs::symlink_metadata(&self.directory))? else {
            return Ok(None);
        };
        is_own(&self.directory, &meta)?;
        let directory = match File::open(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            directory => directory?,
        };
        flock(&directory, FlockOperation::NonBlockingLockExclusive).map_err(|_| another())?;
        // The previous dataplane may have removed the directory before it released the lock.
        let now = there(fs::symlink_metadata(&self.directory))?;
        let locked = directory.metadata()?;
        let same = now.is_some_and(|now| (now.dev(), now.ino()) == (locked.dev(), locked.ino()));
        Ok(same.then_some(directory))
    }

    /// Reads the first `words` words of a pinned array.
    pub(super) fn words(&self, name: &str, words: usize) -> io::Result<Vec<u64>> {
        let array = SharedArray::pinned(&self.path(name), words)?;
        let words = array.words().iter().map(|word| word.load(Relaxed));
        Ok(words.collect())
    }

    /// The stored services and settings, if they are complete.
    pub(super) fn saved(&self) -> io::Result<Option<Vec<u8>>> {
        let array = SharedArray::pinned_whole(&self.path("lvs_saved"))?;
        let area = Area {
            counts: &[],
            text: array.words(),
        };
        Ok(area.saved())
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

    /// Indices of the interfaces with a pinned link of a program other than XDP.
    pub(super) fn links(&self) -> Vec<u32> {
        self.numbers(LINK)
    }

    /// Indices of the interfaces with a pinned link of the XDP program.
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

    /// Whether the directory contains pins.
    pub(super) fn are_there(&self) -> bool {
        !self.names().is_empty()
    }

    /// Removes all pins, links first, and the directory. Returns the number of pins.
    pub(super) fn remove(&self) -> usize {
        let had = self.empty();
        let _ = fs::remove_dir(&self.directory);
        had
    }

    /// Removes all pins, but keeps the directory. Returns their number.
    pub(super) fn empty(&self) -> usize {
        let mut names = self.names();
        names.sort_by_key(|name| !(name.starts_with(LINK) || name.starts_with(XDP_LINK)));
        for name in &names {
            let _ = fs::remove_file(self.path(name));
        }
        names.len()
    }
}

/// Creates a directory if it does not exist, and checks that this user owns it and no other user
/// can write to it.
fn make(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    match fs::symlink_metadata(directory) {
        // Another dataplane has removed the directory.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        meta => is_own(directory, &meta?),
    }
}

fn is_own(directory: &Path, meta: &Metadata) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    if !meta.is_dir() || meta.uid() != own || meta.mode() & 0o022 != 0 {
        let directory = directory.display();
        return Err(io::Error::other(format!(
            "{directory} must be a directory that this user owns and no other user can write: remove it"
        )));
    }
    Ok(())
}

fn another() -> io::Error {
    io::Error::new(io::ErrorKind::AddrInUse, ANOTHER)
}

/// Whether the dataplane with these words of `lvs_conf` was killed so long ago that its connections
/// have ended.
pub(super) fn is_over(conf: &[u64]) -> bool {
    lvs_sys::monotonic().wrapping_sub(conf[conf::BASE]) > conf[conf::ALIVE]
}

/// Version of the layout of all maps: it changes with the shape or meaning of any of them.
const VERSION: u64 = 7;
/// The first word of the map `lvs_about` ("LVSKERNL"), by which a successor recognises the map.
const MAGIC: u64 = u64::from_le_bytes(*b"LVSKERNL");

/// Index of the word of `lvs_about` with the cookie of the network namespace; the word is 0 if the
/// kernel has no cookies.
pub(super) const COOKIE: usize = 3;

/// The first words of `lvs_about`, which describe the host.
pub(super) fn about(processors: u32) -> [u64; HOST_WORDS] {
    let mut words = [0; HOST_WORDS];
    words[0] = MAGIC;
    words[1] = VERSION;
    words[2] = processors.into();
    words[COOKIE] = netns::cookie().unwrap_or(0);
    words
}

/// Attaches a program to an interface. With `pin`, the link is pinned there and stays when the
/// dataplane is killed, or a failure to pin it is logged. A predecessor's link at `pin` gets the
/// program instead.
pub(super) fn attach(
    program: &Program,
    ifindex: u32,
    pin: Option<&Path>,
) -> io::Result<ProgramLink> {
    let Some(path) = pin else {
        return program.attach(ifindex);
    };
    if let Ok(link) = ProgramLink::pinned(path) {
        match link.update(program) {
            Ok(()) => return Ok(link),
            // A pin of a removed interface; another interface has its index now.
            Err(_) => fs::remove_file(path)?,
        }
    }
    let link = program.attach(ifindex)?;
    if let Err(error) = link.pin(path) {
        warn!(
            "a warm restart is not possible ({}: {error}): if this dataplane is killed, its connections end",
            path.display()
        );
    }
    Ok(link)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn pins(root: &Path, name: &str) -> Pins {
        Pins {
            directory: root.join(name),
        }
    }

    #[test]
    fn pin_directory_is_claimed_by_one_dataplane_at_a_time() {
        let root = tempfile::tempdir().expect("the directory can be created");
        let pins = pins(root.path(), "1");
        let claim = pins.claim().expect("the directory is not locked");
        let error = pins.claim().expect_err("a locked directory was claimed");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(claim);
        pins.claim().expect("the directory is not locked");
    }

    /// A sweep locks the directories of all other namespaces for a moment, while one of them may be
    /// claimed.
    #[test]
    fn sweep_of_pins_does_not_block_a_claim() {
        let root = tempfile::tempdir().expect("the directory can be created");
        let (one, other) = (pins(root.path(), "1"), pins(root.path(), "2"));
        let _claim = one.claim().expect("the directory is not locked");
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    one.sweep();
                }
            });
            let failed = (0..500).find_map(|_| other.claim().err());
            done.store(true, Relaxed);
            assert!(failed.is_none(), "{failed:?}");
        });
    }

    /// A claim locks the directory that exists, even if another dataplane removes it at the same
    /// time.
    #[test]
    fn claim_of_pins_locks_existing_directory_during_concurrent_removal() {
        let root = tempfile::tempdir().expect("the directory can be created");
        let pins = pins(root.path(), "1");
        let claim = || {
            for _ in 0..500 {
                let Ok(claim) = pins.claim() else { continue };
                let there = fs::metadata(&pins.directory).expect("the directory of pins exists");
                assert_eq!(
                    there.ino(),
                    claim.metadata().expect("the claimed file is open").ino()
                );
                pins.remove();
            }
        };
        thread::scope(|scope| {
            scope.spawn(claim);
            scope.spawn(claim);
        });
    }

    #[test]
    fn lock_of_missing_pin_directory_returns_none_and_creates_no_directory() {
        let root = tempfile::tempdir().expect("the directory can be created");
        let pins = pins(root.path(), "1");
        assert!(pins.lock().expect("the lock causes no error").is_none());
        assert!(!pins.directory.exists());
    }
}

//! The thread that made a reported system call: its capabilities, its descriptors and its request.

use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use lvs_sys::notify::{Call, Kind, Listener, NamespaceId};
use nix::libc;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use rustix::fs::{self, AtFlags, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use rustix::thread::{CapabilitySet, capabilities};

use super::wire::{u32_at, u64_at};

/// Maximum length in bytes of a request that the supervisor reads. The longest request for IPVS has
/// some 300 bytes.
const REQUEST_MAX: usize = 64 << 10;
/// Maximum number of parts in a request (`UIO_MAXIOV`).
const PARTS_MAX: usize = 1024;
/// Length of `struct msghdr` in bytes.
const MESSAGE: usize = 56;
/// Offset of the address of the parts in `struct msghdr`.
const MESSAGE_PARTS: usize = 16;
/// Offset of the address of the ancillary data in `struct msghdr`.
const MESSAGE_CONTROL: usize = 32;
/// Length of `struct iovec` in bytes.
const PART: usize = 16;

/// The thread that makes a system call. The descriptors of its directory in `/proc` and of its
/// pidfd still refer to this thread if its number is reused.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) thread: u32,
    directory: OwnedFd,
    /// A pidfd of the thread, which may have other descriptors than its process; before Linux 6.9,
    /// of the process.
    pidfd: OwnedFd,
    /// Keeps the inode of the thread's user namespace in memory. Without it, the kernel creates the
    /// inode again at each look-up.
    _pin: Option<OwnedFd>,
    user: NamespaceId,
    has_net_admin: bool,
}

impl Caller {
    /// Returns the thread with its present capabilities; `None` if `/proc` does not show the
    /// thread, or this process may not read them. `last`, the previous caller, is reused if it is
    /// this thread. The result is valid only if the thread still waits for its call afterwards.
    pub(super) fn of(thread: u32, last: Option<Self>) -> Option<Self> {
        if let Some(last) = last.filter(|last| last.thread == thread)
            && let Some((user, has_net_admin)) = rights(&last.directory, thread)
        {
            return Some(Self {
                user,
                has_net_admin,
                ..last
            });
        }
        Self::open(thread)
    }

    fn open(thread: u32) -> Option<Self> {
        /// `PIDFD_THREAD` (Linux 6.9).
        const THREAD: PidfdFlags = PidfdFlags::from_bits_retain(libc::O_EXCL.cast_unsigned());
        let pid = |id: u32| Pid::from_raw(i32::try_from(id).ok()?);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = fs::open(format!("/proc/{thread}"), flags, Mode::empty()).ok()?;
        let pidfd = match pidfd_open(pid(thread)?, THREAD) {
            Ok(pidfd) => pidfd,
            Err(_) => pidfd_open(pid(process(&directory)?)?, PidfdFlags::empty()).ok()?,
        };
        let (user, has_net_admin) = rights(&directory, thread)?;
        let pin = fs::openat(
            &directory,
            USER,
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
        );
        Some(Self {
            thread,
            directory,
            pidfd,
            _pin: pin.ok(),
            user,
            has_net_admin,
        })
    }

    /// Whether the thread has CAP_NET_ADMIN in a namespace with these owners: capabilities apply in
    /// the thread's own user namespace and its descendants.
    pub(super) fn may_administer(&self, owners: &[NamespaceId]) -> bool {
        self.has_net_admin && owners.contains(&self.user)
    }

    pub(super) fn process(&self) -> Option<u32> {
        process(&self.directory)
    }

    pub(super) fn network(&self) -> Option<NamespaceId> {
        namespace(&self.directory, NETWORK)
    }

    pub(super) fn open_network(&self) -> Option<File> {
        self.file(NETWORK, OFlags::RDONLY).ok()
    }

    pub(super) fn descriptor(&self, number: u64) -> Option<OwnedFd> {
        // The kernel, too, reads only the lower 32 bits.
        let number = (number & 0xffff_ffff) as u32;
        pidfd_getfd(&self.pidfd, number.cast_signed(), PidfdGetfdFlags::empty()).ok()
    }

    /// Returns device and inode of the caller's program; `None` if they cannot be read, for example
    /// after the caller has exited.
    pub(super) fn program(&self) -> Option<(u64, u64)> {
        let found = fs::statat(&self.directory, "exe", AtFlags::empty()).ok()?;
        Some((found.st_dev, found.st_ino))
    }

    /// Returns `/proc/PID/maps` of the caller; empty if it cannot be read.
    pub(super) fn maps(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Ok(mut file) = self.file("maps", OFlags::RDONLY) {
            let _ = file.read_to_end(&mut bytes);
        }
        bytes
    }

    /// Gives read access to the caller's memory without opening it, unlike
    /// [`memory`](Self::memory). The bytes are valid only if the call is still valid after they
    /// were read.
    pub(super) const fn look(&self) -> Look {
        Look(self.thread)
    }

    /// Opens the caller's memory; `None` if it cannot be opened, or if the thread no longer waits
    /// for `call`.
    pub(super) fn memory(&self, call: &Call, listener: &Listener) -> Option<Memory> {
        let memory = Memory(self.file("mem", OFlags::RDWR).ok()?);
        // If the caller still waits for this call, the file is its memory, and not that of a later
        // thread with the same number.
        listener.is_valid(call.id).then_some(memory)
    }

    fn file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let opened = fs::openat(
            &self.directory,
            name,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
        );
        Ok(File::from(opened?))
    }
}

/// Returns a thread's user namespace, and whether the thread has CAP_NET_ADMIN in it; `None` if
/// they cannot be read, for example after the thread has exited.
fn rights(directory: &OwnedFd, thread: u32) -> Option<(NamespaceId, bool)> {
    let user = namespace(directory, USER)?;
    // Without a number, the call would read the capabilities of this thread.
    let thread = Pid::from_raw(i32::try_from(thread).ok()?)?;
    let rights = capabilities(Some(thread)).ok()?;
    Some((user, rights.effective.contains(CapabilitySet::NET_ADMIN)))
}

/// Path of a thread's user namespace, relative to the thread's directory in `/proc`.
const USER: &str = "ns/user";
/// Path of a thread's network namespace, relative to the thread's directory in `/proc`.
const NETWORK: &str = "ns/net";

/// Returns the namespace `name` of the thread whose directory in `/proc` is `directory`; `None` if
/// it cannot be read, for example after the thread has exited.
fn namespace(directory: &OwnedFd, name: &str) -> Option<NamespaceId> {
    let found = fs::statat(directory, name, AtFlags::empty()).ok()?;
    Some(NamespaceId::new(found.st_dev, found.st_ino))
}

/// Returns the process of the thread whose directory in `/proc` is `directory`; `None` if it cannot
/// be read, for example after the thread has exited.
fn process(directory: &OwnedFd) -> Option<u32> {
    let status = fs::openat(
        directory,
        "status",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let text = io::read_to_string(File::from(status.ok()?)).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Tgid:"));
    line?.trim().parse().ok()
}

/// The memory of a process. It refers to this process, even if its number is reused.
#[derive(Debug)]
pub(super) struct Memory(File);

impl Memory {
    /// Opens the memory of a process or thread.
    ///
    /// # Errors
    ///
    /// The thread or process has ended, or this process does not have CAP_SYS_PTRACE.
    pub(super) fn open(thread: u32) -> io::Result<Self> {
        let path = format!("/proc/{thread}/mem");
        File::options().read(true).write(true).open(path).map(Self)
    }

    /// Writes `bytes` to address `at`.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }
}

impl Source for Memory {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(bytes, at)
    }
}

/// The memory of the thread that has this number at the time of a read.
#[derive(Debug)]
pub(super) struct Look(u32);

impl Source for Look {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let out_of_range = |_| io::ErrorKind::InvalidInput;
        let thread = nix::unistd::Pid::from_raw(i32::try_from(self.0).map_err(out_of_range)?);
        let base = usize::try_from(at).map_err(out_of_range)?;
        let len = bytes.len();
        let remote = [RemoteIoVec { base, len }];
        let read = process_vm_readv(thread, &mut [IoSliceMut::new(bytes)], &remote)?;
        match read == len {
            true => Ok(()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Memory from which bytes can be read.
pub(super) trait Source {
    /// Fills `bytes` from address `at`.
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// Address ranges (`struct iovec`) in a program's memory: address and length of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Parts(Vec<(u64, usize)>);

impl Parts {
    /// Reads `count` parts (`struct iovec`) from address `at`; `None` if there are too many, or
    /// they cannot be read.
    fn read(memory: &impl Source, at: u64, count: u64) -> Option<Self> {
        let count = usize::try_from(count).ok().filter(|n| *n <= PARTS_MAX)?;
        let mut bytes = vec![0; count * PART];
        memory.read(at, &mut bytes).ok()?;
        Self::of(&bytes)
    }

    fn of(bytes: &[u8]) -> Option<Self> {
        let parts = bytes.chunks_exact(PART).map(|part| {
            let length = usize::try_from(u64_at(part, 8)?).ok()?;
            Some((u64_at(part, 0)?, length))
        });
        parts.collect::<Option<_>>().map(Self)
    }

    fn one(at: u64, length: u64) -> Option<Self> {
        Some(Self(vec![(at, usize::try_from(length).ok()?)]))
    }

    /// Returns the total length of the ranges in bytes, at most `limit`.
    fn room(&self, limit: usize) -> usize {
        let sum = |sum: usize, (_, length): &(u64, usize)| sum.saturating_add(*length);
        self.0.iter().fold(0, sum).min(limit)
    }

    /// Copies the bytes of all ranges; `None` if there are more than [`REQUEST_MAX`], or they
    /// cannot be read.
    fn copy(&self, memory: &impl Source) -> Option<Vec<u8>> {
        let length = self.room(REQUEST_MAX + 1);
        if length > REQUEST_MAX {
            return None;
        }
        let mut all = vec![0; length];
        let mut rest = &mut all[..];
        for (at, length) in &self.0 {
            let (part, behind) = rest.split_at_mut_checked(*length)?;
            memory.read(*at, part).ok()?;
            rest = behind;
        }
        Some(all)
    }

    /// Writes as many of `bytes` as fit to the ranges, in order; `None` if the memory cannot be
    /// written.
    fn fill(&self, memory: &Memory, mut bytes: &[u8]) -> Option<()> {
        for (at, length) in &self.0 {
            let (part, rest) = bytes.split_at(bytes.len().min(*length));
            memory.write(*at, part).ok()?;
            bytes = rest;
        }
        Some(())
    }
}

/// Copies the bytes that a call sends to the kernel. `None` if the kernel must handle the call
/// itself, for example because the bytes are for another receiver, are too many, or cannot be read.
pub(super) fn sent(call: &Call, memory: &impl Source) -> Option<Vec<u8>> {
    let [_, a, b, _, name, name_length] = call.arguments;
    let (parts, name, name_length) = match call.kind {
        Kind::Sendto => (Parts::one(a, b)?, name, name_length),
        Kind::Write => (Parts::one(a, b)?, 0, 0),
        Kind::Writev => (Parts::read(memory, a, b)?, 0, 0),
        Kind::Sendmsg => {
            let mut header = [0; MESSAGE];
            memory.read(a, &mut header).ok()?;
            let at = u64_at(&header, MESSAGE_PARTS)?;
            let parts = Parts::read(memory, at, u64_at(&header, MESSAGE_PARTS + 8)?)?;
            (parts, u64_at(&header, 0)?, u32_at(&header, 8)?.into())
        }
        _ => return None,
    };
    if name != 0 {
        let mut address = [0; size_of::<libc::sockaddr_nl>()];
        if name_length < address.len() as u64 {
            return None;
        }
        memory.read(name, &mut address).ok()?;
        // The kernel has port 0 and groups 0.
        if address[4..] != [0; 8] {
            return None;
        }
    }
    parts.copy(memory)
}

/// The buffers of a system call that receives a message.
#[derive(Debug)]
pub(super) struct Buffers {
    memory: Memory,
    parts: Parts,
    /// Flags of the system call.
    pub(super) flags: i32,
    /// Number of bytes for ancillary data.
    pub(super) control: usize,
    place: Place,
}

/// Where the sender's address and the lengths are written in the program's memory.
#[derive(Debug)]
enum Place {
    /// `recvfrom`: the memory addresses for the sender's address and for its length.
    Arguments(u64, u64),
    /// `recvmsg`: the address of the header, and its bytes.
    Header(u64, [u8; MESSAGE]),
}

impl Buffers {
    /// Maximum length of received datagrams in bytes. Those of the netlink family have at most some
    /// kilobytes.
    const LENGTH_MAX: usize = 1 << 20;
    /// Maximum length of received control messages in bytes.
    const CONTROL_MAX: usize = 4096;

    pub(super) fn of(call: &Call, memory: Memory) -> Option<Self> {
        let [_, a, b, c, name, name_length] = call.arguments;
        let int = |value: u64| ((value & 0xffff_ffff) as u32).cast_signed();
        if call.kind == Kind::Recvfrom {
            return Some(Self {
                parts: Parts::one(a, b)?,
                memory,
                flags: int(c),
                control: 0,
                place: Place::Arguments(name, name_length),
            });
        }
        let mut header = [0; MESSAGE];
        memory.read(a, &mut header).ok()?;
        let at = u64_at(&header, MESSAGE_PARTS)?;
        let parts = Parts::read(&memory, at, u64_at(&header, MESSAGE_PARTS + 8)?)?;
        let control = usize::try_from(u64_at(&header, MESSAGE_CONTROL + 8)?).ok()?;
        Some(Self {
            memory,
            parts,
            flags: int(b),
            control: control.min(Self::CONTROL_MAX),
            place: Place::Header(a, header),
        })
    }

    /// Number of bytes that fit into the buffers, at most [`LENGTH_MAX`](Self::LENGTH_MAX).
    pub(super) fn room(&self) -> usize {
        self.parts.room(Self::LENGTH_MAX)
    }

    /// Writes a datagram, its sender and its ancillary data to the program's memory; `None` if the
    /// memory cannot be written.
    pub(super) fn fill(
        &self,
        bytes: &[u8],
        sender: &[u8],
        control: &[u8],
        flags: i32,
    ) -> Option<()> {
        let memory = &self.memory;
        self.parts.fill(memory, bytes)?;
        let length = u32::try_from(sender.len()).ok()?.to_ne_bytes();
        let cut = |room: u32| &sender[..sender.len().min(room as usize)];
        match self.place {
            Place::Arguments(0, _) => Some(()),
            Place::Arguments(at, at_length) => {
                let mut room = [0; 4];
                memory.read(at_length, &mut room).ok()?;
                memory.write(at, cut(u32::from_ne_bytes(room))).ok()?;
                memory.write(at_length, &length).ok()
            }
            Place::Header(at, ref header) => {
                match u64_at(header, 0)? {
                    0 => {}
                    name => {
                        memory.write(name, cut(u32_at(header, 8)?)).ok()?;
                        memory.write(at + 8, &length).ok()?;
                    }
                }
                memory
                    .write(u64_at(header, MESSAGE_CONTROL)?, control)
                    .ok()?;
                let length = (control.len() as u64).to_ne_bytes();
                let behind = [&length[..], &flags.to_ne_bytes()].concat();
                memory.write(at + MESSAGE_CONTROL as u64 + 8, &behind).ok()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(all: &[(u64, u64)]) -> Option<Parts> {
        let bytes: Vec<u8> = all
            .iter()
            .flat_map(|(at, length)| [at.to_ne_bytes(), length.to_ne_bytes()].concat())
            .collect();
        Parts::of(&bytes)
    }

    #[test]
    fn read_or_write_of_unmapped_caller_memory_is_refused() {
        let memory = Memory::open(std::process::id()).expect("the memory can be read");
        assert!(
            memory.read(8, &mut [0; 4]).is_err(),
            "an address without memory was read"
        );
        assert!(memory.write(u64::MAX - 2, &[0; 4]).is_err());
        assert!(memory.read(8, &mut []).is_ok());
        assert!(Memory::open(0).is_err());
    }

    #[test]
    fn caller_memory_is_read_and_unmapped_address_or_missing_process_refused() {
        let bytes = *b"a request";
        let (at, own) = (bytes.as_ptr().addr() as u64, Look(std::process::id()));
        let mut copy = [0; 9];
        own.read(at, &mut copy).expect("the memory can be read");
        assert_eq!(copy, bytes);
        assert!(
            own.read(8, &mut [0; 4]).is_err(),
            "an address without memory was read"
        );
        assert!(own.read(u64::MAX - 2, &mut [0; 4]).is_err());
        assert!(own.read(8, &mut []).is_ok());
        assert!(Look(u32::MAX).read(at, &mut copy).is_err());
    }

    #[test]
    fn request_above_limit_of_bytes_or_parts_is_not_copied() {
        let memory = &Memory::open(std::process::id()).expect("the memory can be read");
        let long = parts(&[(8, u64::MAX), (8, u64::MAX)]).expect("the parts can be read");
        assert_eq!(long.room(100), 100);
        assert_eq!(long.copy(memory), None);
        let limit = REQUEST_MAX as u64;
        let sum = parts(&[(8, limit), (8, 1)]).expect("the parts can be read");
        assert_eq!(sum.copy(memory), None);
        assert_eq!(Parts::read(memory, 8, PARTS_MAX as u64 + 1), None);
        assert_eq!(
            parts(&[]).expect("the parts can be read").copy(memory),
            Some(Vec::new())
        );
    }

    #[test]
    fn caller_without_capability_in_owner_namespace_may_not_administer() {
        let owner = std::fs::metadata("/proc/thread-self/ns/user").expect("/proc is mounted");
        let owners = [NamespaceId::from_metadata(&owner)];
        let thread = rustix::thread::gettid().as_raw_pid();
        let thread = u32::try_from(thread).expect("the number fits into 32 bits");
        let mut caller = Caller::of(thread, None).expect("this thread is in /proc");
        assert_eq!(caller.process(), Some(std::process::id()));
        caller.has_net_admin = true;
        assert!(caller.may_administer(&owners));
        assert!(
            !caller.may_administer(&[]),
            "a thread may administer a namespace of another owner"
        );
        caller.has_net_admin = false;
        assert!(!caller.may_administer(&owners));
    }

    #[test]
    fn last_caller_is_not_reused_after_its_thread_exits() {
        let own = || {
            u32::try_from(rustix::thread::gettid().as_raw_pid())
                .expect("the number fits into 32 bits")
        };
        let ended =
            std::thread::spawn(move || Caller::of(own(), None).expect("this thread is in /proc"));
        let ended = ended.join().expect("the thread ends without a panic");
        // Another thread has the number of the last thread now.
        let last = Caller {
            thread: own(),
            ..ended
        };
        let now = Caller::of(own(), Some(last)).expect("the caller's process runs");
        assert_eq!(now.process(), Some(std::process::id()));
        let kept = Caller::of(own(), Some(now)).expect("the caller's process runs");
        assert_eq!(
            kept.network(),
            Caller::of(own(), None)
                .expect("the caller's process runs")
                .network()
        );
    }
}

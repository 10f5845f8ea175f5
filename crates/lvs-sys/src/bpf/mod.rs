//! BPF through its system call: maps (which this process also maps into its memory), programs,
//! links and pins.
//!
//! A loader crate would make the same calls. Its other features (relocation against the kernel's
//! types, maps described in BTF) have no use here, because the programs read only packets and the
//! dataplane's own maps.

mod maps;
mod programs;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::time::ClockId;

pub use maps::{
    Map, PerCpuArray, ReferenceMap, Referents, SharedArray, SharedMap, seal, shared_table,
};
pub use programs::{Jump, Program, ProgramKind, ProgramLink};

use crate::attached::{call, descriptor};

/// `bpf_insn` of `linux/bpf.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// The operation code.
    pub code: u8,
    /// Destination register in the lower half, source register in the upper half.
    pub registers: u8,
    /// Offset of a jump or of a memory access.
    pub offset: i16,
    /// The constant that the operation uses.
    pub immediate: i32,
}

#[repr(C)]
struct Object {
    path: u64,
    fd: u32,
    flags: u32,
}

const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;

/// Mounts a BPF file system at a directory, unless there is one already.
///
/// # Errors
/// If there is none, and this process may not mount one (`CAP_SYS_ADMIN`).
pub fn mount_bpf(directory: &Path) -> io::Result<()> {
    const MAGIC: u32 = 0xcafe_4a11;
    let at = rustix::fs::statfs(directory)?;
    if u32::try_from(at.f_type) == Ok(MAGIC) {
        return Ok(());
    }
    let path = c_path(directory)?;
    // SAFETY: the strings end with a NUL and live until after the call.
    let done = unsafe {
        libc::mount(
            c"bpf".as_ptr(),
            path.as_ptr(),
            c"bpf".as_ptr(),
            libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
            c"mode=0700".as_ptr().cast(),
        )
    };
    super::check(done).map(drop)
}

/// Whether this process runs in the initial user namespace and has the capabilities that BPF
/// requires. If the kernel refuses BPF although this is true, tests fail; otherwise, they are not
/// run.
pub fn is_root_of_all() -> bool {
    // bpf(2) needs capabilities in the initial user namespace, which has this map of users.
    let all = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let fields: Vec<&str> = all.split_ascii_whitespace().collect();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    // CAP_NET_ADMIN, CAP_PERFMON and CAP_BPF.
    let needed = 1 << 12 | 1 << 38 | 1 << 39;
    fields == ["0", "0", "4294967295"] && effective.is_some_and(|all| all & needed == needed)
}

/// `CLOCK_MONOTONIC` in nanoseconds, as programs in the kernel read it.
pub fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Monotonic);
    let now = Duration::try_from(now).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// The first bytes of a name, as long as the kernel permits for names of maps and programs.
fn short_name(name: &str) -> [u8; 16] {
    let mut short = [0; 16];
    for (to, from) in short.iter_mut().take(15).zip(name.bytes()) {
        *to = from;
    }
    short
}

fn number(fd: &OwnedFd) -> u32 {
    u32::try_from(fd.as_raw_fd()).expect("descriptors are not negative")
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn pinned(path: &Path) -> io::Result<OwnedFd> {
    let name = c_path(path)?;
    let mut request = Object {
        path: name.as_ptr().expose_provenance() as u64,
        fd: 0,
        flags: 0,
    };
    // SAFETY: the path lives here and ends with a zero.
    unsafe { descriptor(BPF_OBJ_GET, &mut request) }
}

fn pin(fd: &OwnedFd, path: &Path) -> io::Result<()> {
    let name = c_path(path)?;
    let mut request = Object {
        path: name.as_ptr().expose_provenance() as u64,
        fd: number(fd),
        flags: 0,
    };
    // SAFETY: the path lives here and ends with a zero.
    unsafe { call(BPF_OBJ_PIN, &mut request) }.map(drop)
}

//! All code that needs `unsafe`: thin, typed wrappers of system calls.
//!
//! The wrappers make no decisions. Each wrapper owns its descriptors and buffers, so that its
//! callers are safe code. The callers implement the protocols (virtio headers, VLAN tags, netlink
//! messages).

mod arena;
pub mod attached;
mod bpf;
pub mod classic;
mod device;
pub mod icmp_errors;
mod lock;
mod multicast;
pub mod netns;
pub mod notify;
mod packet;
pub mod peer_groups;
pub mod peercred;
mod poll;
mod random;
mod ring;
pub mod seccomp;
pub mod signals;
mod slice;
mod table;
pub mod testing;
mod tun;
mod turn;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{self, NonNull};

pub use arena::{Arena, Lent, prefetch};
pub use bpf::{
    Instruction, Jump, Map, PerCpuArray, Program, ProgramKind, ProgramLink, ReferenceMap,
    Referents, SharedArray, SharedMap, is_root_of_all, monotonic, mount_bpf, seal, shared_table,
};
pub use device::{primary_address, set_mtu, set_up};
pub use lock::lock;
pub use multicast::{datagrams_lost, multicast_receiver, multicast_sender};
pub use packet::{Auxdata, MessageBatch, PacketSocket, VNET_HDR_LEN};
pub use peercred::group_id;
pub use poll::{EventFd, Poller, wait_writable};
pub use random::random;
pub use ring::{PacketRing, RingFrame};
pub use slice::{permitted_cpus, run_in_real_time, run_in_slices, run_on, thread_time};
pub use table::{TablePages, table_memory};
pub use tun::TunDevice;
pub use turn::{TurnBack, TurnedBack, turned};

/// Returns the index of a network interface of this thread's network namespace.
///
/// # Errors
/// `NotFound` if no interface has this name.
pub fn if_index(name: &str) -> io::Result<u32> {
    let c_name = CString::new(name).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: the pointer is to a NUL-terminated string that lives during the call.
    let index = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
    if index == 0 {
        let err = io::Error::last_os_error();
        return Err(match err.raw_os_error() {
            Some(libc::ENODEV | libc::ENXIO) => io::Error::new(io::ErrorKind::NotFound, err),
            _ => err,
        });
    }
    Ok(index)
}

/// Moves the calling thread (and no other) into a new, empty network namespace.
///
/// # Errors
/// Without `CAP_SYS_ADMIN`.
pub fn unshare_network() -> io::Result<()> {
    // SAFETY: takes a number; CLONE_NEWNET concerns the calling thread only.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
    Ok(())
}

/// Sets the size of a socket's receive buffer to `bytes`: above the system's limit if this process
/// has CAP_NET_ADMIN, otherwise at most the limit. Returns the new size as the kernel reports it,
/// including the kernel's overhead (about twice the request).
///
/// # Errors
/// If the descriptor is not a socket.
pub fn set_receive_buffer(fd: &impl AsFd, bytes: i32) -> io::Result<i32> {
    set_buffer(fd, bytes, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF)
}

/// As [`set_receive_buffer`], for the send buffer.
///
/// # Errors
/// If the descriptor is not a socket.
pub fn set_send_buffer(fd: &impl AsFd, bytes: i32) -> io::Result<i32> {
    set_buffer(fd, bytes, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)
}

fn set_buffer(
    fd: &impl AsFd,
    bytes: i32,
    force: libc::c_int,
    plain: libc::c_int,
) -> io::Result<i32> {
    let fd = fd.as_fd().as_raw_fd();
    if set_option(fd, libc::SOL_SOCKET, force, &bytes).is_err() {
        set_option(fd, libc::SOL_SOCKET, plain, &bytes)?;
    }
    get_option(fd, libc::SOL_SOCKET, plain, 0_i32)
}

fn map_memory(
    len: Option<usize>,
    flags: libc::c_int,
    fd: libc::c_int,
    offset: libc::off_t,
) -> io::Result<NonNull<u8>> {
    let len = len
        .filter(|&len| len > 0 && isize::try_from(len).is_ok())
        .ok_or(io::ErrorKind::InvalidInput)?;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
    let memory = unsafe { libc::mmap(ptr::null_mut(), len, rights, flags, fd, offset) };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?)
}

fn page_size() -> usize {
    // SAFETY: takes a number.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Converts the result -1 of a failed call to the error in `errno`.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn check_len(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn socklen<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).expect("socket options and addresses are small")
}

fn set_option<T: Copy>(
    fd: libc::c_int,
    level: libc::c_int,
    option: libc::c_int,
    value: &T,
) -> io::Result<()> {
    // SAFETY: the pointer and the length describe `value`, which the kernel only reads.
    check(unsafe {
        libc::setsockopt(
            fd,
            level,
            option,
            ptr::from_ref(value).cast(),
            socklen::<T>(),
        )
    })?;
    Ok(())
}

/// Reads a socket option. Any bytes are a valid value of the type of `value` ([`Plain`]).
fn get_option<T: Plain>(
    fd: libc::c_int,
    level: libc::c_int,
    option: libc::c_int,
    mut value: T,
) -> io::Result<T> {
    let mut len = socklen::<T>();
    // SAFETY: pointer and length describe `value`; any bytes are a valid `T` (the contract of
    // `Plain`).
    check(unsafe {
        libc::getsockopt(
            fd,
            level,
            option,
            ptr::from_mut(&mut value).cast(),
            &raw mut len,
        )
    })?;
    Ok(value)
}

/// A type for which any bytes are a valid value.
///
/// # Safety
/// Implement it only for integers and for `repr(C)` structs of integers.
unsafe trait Plain: Copy {}
// SAFETY: an integer.
unsafe impl Plain for i32 {}
// SAFETY: an integer.
unsafe impl Plain for u64 {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::PathBuf;

    /// Functions of libc that the wrappers call, and whose system calls are in systemd's set
    /// `@system-service` (`systemd-analyze syscall-filter`).
    const OF_ANY_SERVICE: &[&str] = &[
        "bind",
        "getgrnam_r",
        "getsockname",
        "getsockopt",
        "gettid",
        "if_nametoindex",
        "ioctl",
        "madvise",
        "mmap",
        "munmap",
        "ppoll",
        "recvmmsg",
        "sched_setattr",
        "sendmmsg",
        "sendto",
        "setsockopt",
        "signal",
        "socket",
        "sysconf",
        "tgkill",
        "unshare",
    ];

    /// The names of libc functions and of system call numbers (`SYS_*`) that `source` calls.
    fn calls(source: &str) -> impl Iterator<Item = &str> {
        source.split("libc::").skip(1).filter_map(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
            let (name, rest) = rest.split_at(end);
            match name.strip_prefix("SYS_") {
                Some(call) => Some(call),
                // The others are macros (`CMSG_DATA`).
                None => (rest.starts_with('(')
                    && name.starts_with(|c: char| c.is_ascii_lowercase())
                    && name != "syscall")
                    .then_some(name),
            }
        })
    }

    #[test]
    fn dataplane_unit_permits_each_system_call_of_lvs_sys() {
        let mut called = BTreeSet::new();
        let mut left = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
        while let Some(path) = left.pop() {
            // `lvs-run` has no unit; the programs that it starts have their own units.
            if path.ends_with("src/notify") {
                continue;
            }
            if path.is_dir() {
                let inside = fs::read_dir(path).unwrap();
                left.extend(inside.map(|entry| entry.unwrap().path()));
                continue;
            }
            let source = fs::read_to_string(path).unwrap();
            called.extend(calls(&source).map(str::to_owned));
        }
        for call in OF_ANY_SERVICE {
            assert!(
                called.remove(*call),
                "{call} is in the list of calls of any service, but this crate does not call it"
            );
        }
        // systemd has already mounted this file system.
        assert!(called.remove("mount"));

        let unit = include_str!("../../../contrib/lvs-dataplane.service");
        let permitted: BTreeSet<&str> = unit
            .lines()
            .filter_map(|line| line.strip_prefix("SystemCallFilter="))
            .filter(|list| !list.starts_with('~'))
            .flat_map(str::split_whitespace)
            .collect();
        assert!(permitted.contains("@system-service"));
        for call in &called {
            assert!(
                permitted.contains(&**call),
                "lvs-dataplane.service does not permit the system call {call}"
            );
        }
        assert!(called.contains("bpf") && called.contains("mincore"));
    }
}

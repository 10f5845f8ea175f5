//! The remote process of a Unix socket (`SO_PEERCRED`, unix(7)).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Plain, get_option};

/// The remote process and its user, at the time when it connected or began to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCred {
    /// Process id; 0 if the process is in another PID namespace.
    pub pid: u32,
    /// Effective user id of the process.
    pub uid: u32,
    /// Effective group id of the process.
    pub gid: u32,
}

// SAFETY: a `repr(C)` struct of integers.
unsafe impl Plain for libc::ucred {}

/// The remote process of `socket`, and its user.
pub fn peer_cred(socket: &impl AsFd) -> io::Result<PeerCred> {
    let none = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let fd = socket.as_fd().as_raw_fd();
    let cred = get_option(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, none)?;
    Ok(PeerCred {
        pid: u32::try_from(cred.pid).unwrap_or(0),
        uid: cred.uid,
        gid: cred.gid,
    })
}

/// The remote process of a socket, identified by a descriptor, so that a reused process id causes
/// no confusion.
#[derive(Debug)]
pub struct Process(Option<OwnedFd>);

/// `SO_PEERPIDFD` of socket.h, since Linux 6.5.
#[cfg(not(any(target_arch = "sparc64", target_arch = "sparc")))]
const SO_PEERPIDFD: libc::c_int = 77;
/// `SO_PEERPIDFD` on sparc.
#[cfg(any(target_arch = "sparc64", target_arch = "sparc"))]
const SO_PEERPIDFD: libc::c_int = 0x0056;

impl Process {
    /// Returns the remote process of `socket`. Before Linux 6.5, it is the process that has the id
    /// `pid` now; before 5.3, or if no process has this id, it is unknown.
    pub fn of_peer(socket: &impl AsFd, pid: u32) -> Self {
        let fd = socket.as_fd().as_raw_fd();
        match get_option(fd, libc::SOL_SOCKET, SO_PEERPIDFD, -1_i32) {
            // SAFETY: the kernel has just opened this descriptor for this process, and no other
            // code uses it.
            Ok(fd) if fd >= 0 => Self(Some(unsafe { OwnedFd::from_raw_fd(fd) })),
            _ => Self::of_pid(pid),
        }
    }

    fn of_pid(pid: u32) -> Self {
        let pid = i32::try_from(pid).ok();
        let flags = rustix::process::PidfdFlags::empty();
        Self(
            pid.and_then(rustix::process::Pid::from_raw)
                .and_then(|pid| rustix::process::pidfd_open(pid, flags).ok()),
        )
    }

    /// Whether the process is still running, so that its id cannot belong to another process.
    /// `true` if the process is unknown.
    pub fn is_there(&self) -> bool {
        let Some(fd) = &self.0 else { return true };
        let mut ended = [PollFd::new(fd, PollFlags::IN)];
        // A process descriptor becomes readable when the process exits (pidfd_open(2)).
        poll(&mut ended, Some(&Timespec::default())) == Ok(0)
    }
}

/// The group id of the group `name` in the system's databases (getgrnam_r(3)); `None` if there is
/// no such group.
///
/// # Errors
/// If the databases cannot be read.
pub fn group_id(name: &str) -> io::Result<Option<u32>> {
    let name = CString::new(name).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut buffer = vec![0 as libc::c_char; 1 << 10];
    loop {
        let mut group = std::mem::MaybeUninit::<libc::group>::uninit();
        let mut found = std::ptr::null_mut();
        // SAFETY: the name ends with a NUL, the length is that of the buffer, and all pointers are
        // valid during the call.
        let rc = unsafe {
            libc::getgrnam_r(
                name.as_ptr(),
                group.as_mut_ptr(),
                buffer.as_mut_ptr(),
                buffer.len(),
                &raw mut found,
            )
        };
        match rc {
            0 if found.is_null() => return Ok(None),
            // SAFETY: the call has filled in `group`, which `found` points to.
            0 => return Ok(Some(unsafe { (*found).gr_gid })),
            // The group has too many members for the buffer.
            libc::ERANGE if buffer.len() < 1 << 24 => buffer.resize(buffer.len() * 4, 0),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Returns the effective user of this process.
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn peer_credentials_of_socket_pair_identify_this_process() -> io::Result<()> {
        let (a, _b) = UnixStream::pair()?;
        let cred = peer_cred(&a)?;
        assert_eq!(cred.pid, std::process::id());
        assert_eq!(cred.uid, own_uid());
        assert!(!crate::peer_groups::peer_in_group(&a, u32::MAX - 7)?);
        assert!(Process::of_peer(&a, cred.pid).is_there());
        Ok(())
    }

    #[test]
    fn group_name_resolves_to_number_and_unknown_name_to_none() -> io::Result<()> {
        assert_eq!(group_id("root")?, Some(0));
        assert_eq!(group_id("no such group")?, None);
        assert!(group_id("a\0b").is_err());
        Ok(())
    }

    #[test]
    fn exited_process_is_not_reported_as_running() -> io::Result<()> {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()?;
        let process = Process::of_pid(child.id());
        assert!(process.0.is_some() && process.is_there());
        drop(child.stdin.take());
        child.wait()?;
        assert!(!process.is_there());
        Ok(())
    }
}

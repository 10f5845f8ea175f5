//! Seccomp user notification, for `lvs-run`: a supervisor answers system calls of another program.
//!
//! The program installs a filter ([`install`]) and sends its [`Listener`] to the supervisor. The
//! kernel then stops each thread that makes a selected call, and reports the call to the
//! supervisor.

mod datagram;
mod detach;
mod filter;
mod namespace;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

pub use datagram::{Received, receive};
pub use detach::{Side, detach};
pub use filter::{IPVS_OPTIONS, Places};
pub use namespace::{NamespaceId, of_socket, owners};

pub use super::netns::cookie_of_socket;

/// The supervisor's descriptor of a filter: it receives the calls of all processes that have this
/// filter.
#[derive(Debug)]
pub struct Listener(OwnedFd);

/// A system call that the kernel reported to the supervisor.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The number of the notification, which the answer must repeat.
    pub id: u64,
    /// The calling thread's id in this process's PID namespace; 0 if this namespace does not
    /// contain the thread.
    pub thread: u32,
    /// The system call that the thread has made.
    pub kind: Kind,
    /// Arguments of the system call.
    pub arguments: [u64; 6],
}

/// The system calls that the filter reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "the variants have the names of the system calls"
)]
pub enum Kind {
    Socket,
    Sendto,
    Sendmsg,
    Write,
    Writev,
    Recvfrom,
    Recvmsg,
    Getsockopt,
    Setsockopt,
}

impl Kind {
    const ALL: [(Self, libc::c_long); 9] = [
        (Self::Socket, libc::SYS_socket),
        (Self::Sendto, libc::SYS_sendto),
        (Self::Sendmsg, libc::SYS_sendmsg),
        (Self::Write, libc::SYS_write),
        (Self::Writev, libc::SYS_writev),
        (Self::Recvfrom, libc::SYS_recvfrom),
        (Self::Recvmsg, libc::SYS_recvmsg),
        (Self::Getsockopt, libc::SYS_getsockopt),
        (Self::Setsockopt, libc::SYS_setsockopt),
    ];
}

/// Result of a reported call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The kernel executes the call.
    Continue,
    /// The call returns this value.
    Value(i64),
    /// The call fails with this error number.
    Errno(i32),
    /// The supervisor has answered the call already, or the caller has exited.
    Sent,
}

/// Installs the filter in this thread, and in all threads and processes that it starts from now on.
/// With CAP_SYS_ADMIN, this does not require `no_new_privs`, so that set-user-ID programs that they
/// start keep working.
///
/// # Errors
/// `EBUSY` ([`io::ErrorKind::ResourceBusy`]) if a filter with a listener is installed already;
/// `EACCES` without CAP_SYS_ADMIN; `EINVAL` before Linux 5.19; `Unsupported` on another
/// architecture than x86-64 and aarch64.
pub fn install(places: &Places) -> io::Result<Listener> {
    let mut code = filter::program(places).ok_or(io::ErrorKind::Unsupported)?;
    let program = libc::sock_fprog {
        len: u16::try_from(code.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: code.as_mut_ptr(),
    };
    // With the second flag, only a fatal signal interrupts a call after the supervisor has received
    // it. Otherwise, the program would repeat a change that was already made.
    let flags =
        libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    // SAFETY: the program and its instructions live until after the call, which copies them.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        )
    };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0);
    let fd = fd.ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the call has just made this descriptor, which nothing else owns.
    Ok(Listener(unsafe { OwnedFd::from_raw_fd(fd) }))
}

impl Listener {
    /// Waits for the next call; several threads may wait at the same time. Returns `None` after a
    /// call that is not in [`Kind`], which the kernel then executes.
    ///
    /// # Errors
    /// `ENOENT` if the calling thread or all threads have exited; `EINTR`.
    pub fn receive(&self) -> io::Result<Option<Call>> {
        let mut notification = libc::seccomp_notif {
            id: 0,
            pid: 0,
            flags: 0,
            data: libc::seccomp_data {
                nr: 0,
                arch: 0,
                instruction_pointer: 0,
                args: [0; 6],
            },
        };
        // SAFETY: the pointer is to a zeroed structure of the type that this request writes.
        super::check(unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_RECV,
                &raw mut notification,
            )
        })?;
        let number = libc::c_long::from(notification.data.nr);
        let kind = Kind::ALL.iter().find(|(_, of)| *of == number);
        let Some((kind, _)) = kind else {
            self.respond(notification.id, Answer::Continue);
            return Ok(None);
        };
        Ok(Some(Call {
            id: notification.id,
            thread: notification.pid,
            kind: *kind,
            arguments: notification.data.args,
        }))
    }

    /// Answers a call. A caller that has exited needs no answer.
    pub fn respond(&self, id: u64, answer: Answer) {
        let (val, error, flags) = match answer {
            Answer::Sent => return,
            Answer::Continue => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE),
            Answer::Value(value) => (value, 0, 0),
            Answer::Errno(number) => (0, -number, 0),
        };
        let flags = u32::try_from(flags).unwrap_or(0);
        let mut response = libc::seccomp_notif_resp {
            id,
            val,
            error,
            flags,
        };
        // SAFETY: the pointer is to a structure of the type that this request reads.
        unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_SEND,
                &raw mut response,
            );
        }
    }

    /// Whether the caller still waits for the answer to this call. While this is true, its thread
    /// id is not reused.
    pub fn is_valid(&self, id: u64) -> bool {
        // SAFETY: the pointer is to an integer of the type that this request reads.
        0 == unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_ID_VALID,
                &raw const id,
            )
        }
    }

    /// Adds `fd` to the caller's descriptors, with the number `place`, and answers the call with
    /// this number.
    ///
    /// # Errors
    /// The caller has exited, or its limit of descriptors is too low for this number.
    pub fn add(&self, id: u64, fd: &impl AsFd, place: u32, close_on_exec: bool) -> io::Result<()> {
        let source = fd.as_fd().as_raw_fd();
        let flags = libc::SECCOMP_ADDFD_FLAG_SETFD | libc::SECCOMP_ADDFD_FLAG_SEND;
        let mut add = libc::seccomp_notif_addfd {
            id,
            flags: u32::try_from(flags).map_err(|_| io::ErrorKind::InvalidInput)?,
            srcfd: u32::try_from(source).map_err(|_| io::ErrorKind::InvalidInput)?,
            newfd: place,
            newfd_flags: if close_on_exec {
                libc::O_CLOEXEC.cast_unsigned()
            } else {
                0
            },
        };
        // SAFETY: the pointer is to a structure of the type that this request reads; `fd` is open
        // during the call.
        super::check(unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_ADDFD,
                &raw mut add,
            )
        })?;
        Ok(())
    }

    /// Makes the kernel wake the supervisor on the caller's processor, and the caller on the
    /// supervisor's processor, because the two never run at the same time. Before Linux 6.6 this
    /// has no effect.
    pub fn wake_on_this_processor(&self) {
        /// `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP` (linux/seccomp.h).
        const SYNC_WAKE_UP: libc::c_ulong = 1;
        // SAFETY: this request takes a number.
        unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS,
                SYNC_WAKE_UP,
            );
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Listener {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

#[cfg(test)]
mod tests {

    #[test]
    fn seccomp_structures_have_the_sizes_of_the_kernel() {
        let mut sizes = libc::seccomp_notif_sizes {
            seccomp_notif: 0,
            seccomp_notif_resp: 0,
            seccomp_data: 0,
        };
        // SAFETY: the pointer is to a structure of the type that this operation writes.
        let done = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_GET_NOTIF_SIZES,
                0,
                &raw mut sizes,
            )
        };
        if done != 0 {
            // A kernel without seccomp.
            return;
        }
        assert_eq!(
            usize::from(sizes.seccomp_notif),
            size_of::<libc::seccomp_notif>()
        );
        assert_eq!(
            usize::from(sizes.seccomp_notif_resp),
            size_of::<libc::seccomp_notif_resp>()
        );
    }
}

//! Starts a second process of this program, which is not a child of the first one.

use std::os::fd::{AsFd, AsRawFd};
use std::{fs, io};

/// The process in which the call of [`detach`] has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The process that called [`detach`].
    Caller,
    /// The new process, in a separate session, so that no terminal can interrupt it.
    Detached,
}

/// Signals that the detached process ignores: those for whole process groups or services, and
/// SIGPIPE. The process exits when its work is done.
const IGNORED: [libc::c_int; 5] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGPIPE,
];

/// Starts a process that is not a child of this process, and returns in both processes. In the new
/// process, only the descriptors 0 to 2 and `keep` are open, so that it keeps no pipe of the caller
/// open. The new process must not use any object that owns another descriptor.
///
/// # Errors
/// This process has several threads, or the new process cannot be started.
pub fn detach(keep: &impl AsFd) -> io::Result<Side> {
    let keep = keep.as_fd().as_raw_fd().cast_unsigned();
    if fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("this process has several threads"));
    }
    // SAFETY: this process has one thread, so no lock of its memory is held elsewhere.
    let between = super::super::check(unsafe { libc::fork() })?;
    if between == 0 {
        // SAFETY: as above, in the new process.
        let second = unsafe { libc::fork() };
        if second != 0 {
            // SAFETY: takes a number; ends the intermediate process without flushing buffers.
            unsafe { libc::_exit(i32::from(second < 0)) }
        }
        for signal in IGNORED {
            // SAFETY: takes numbers; an ignored signal runs no handler.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        for (first, last) in [(3, keep.wrapping_sub(1)), (keep + 1, u32::MAX)] {
            if first <= last {
                // SAFETY: takes numbers. The descriptors are copies of those of the caller, and by the
                // contract of this function no object of this process uses one of them.
                unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
            }
        }
        // SAFETY: takes no arguments. The process does not lead a process group, so the call
        // succeeds.
        unsafe { libc::setsid() };
        return Ok(Side::Detached);
    }
    let mut status = 0;
    loop {
        // SAFETY: the pointer is to an integer; the process is a child of this one.
        match super::super::check(unsafe { libc::waitpid(between, &raw mut status, 0) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(_) if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0 => {
                return Ok(Side::Caller);
            }
            Ok(_) => {
                return Err(io::Error::other(
                    "the second fork failed (limit of processes or memory)",
                ));
            }
        }
    }
}

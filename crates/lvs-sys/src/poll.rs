//! Waits until descriptors have input, or are writable.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::check;

/// A kernel counter that a thread increments to wake another thread that polls it.
#[derive(Debug)]
pub struct EventFd {
    fd: OwnedFd,
}

impl EventFd {
    /// A counter with the value 0.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd })
    }

    /// Wakes the thread that polls the counter. At its maximum, the counter stays unchanged, and
    /// the thread is woken already.
    pub fn notify(&self) {
        let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
    }

    /// Resets the counter to 0, and returns whether it was above 0.
    pub fn take(&self) -> bool {
        rustix::io::read(&self.fd, &mut [0_u8; 8]).is_ok()
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Waits until one of several descriptors has input.
///
/// For each wait, the caller fills the set again, which allocates memory only the first time: it
/// calls `clear`, `add` for each descriptor, `wait`, and then `is_ready` with the results of `add`.
#[derive(Debug, Default)]
pub struct Poller {
    fds: Vec<libc::pollfd>,
}

impl Poller {
    /// A set without descriptors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Removes all descriptors from the set.
    pub fn clear(&mut self) {
        self.fds.clear();
    }

    /// Adds a descriptor to be watched for input, and returns its index for
    /// [`is_ready`](Self::is_ready).
    pub fn add(&mut self, fd: BorrowedFd<'_>) -> usize {
        self.fds.push(libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        });
        self.fds.len() - 1
    }

    /// Waits for input, an error or the end of `timeout` (`None`: forever), and returns the number
    /// of ready descriptors. A signal ends the wait with 0.
    ///
    /// # Errors
    /// Only if the kernel has no memory.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<usize> {
        let timeout = timeout.map(timespec);
        let timeout = timeout
            .as_ref()
            .map_or(std::ptr::null(), std::ptr::from_ref);
        let count = libc::nfds_t::try_from(self.fds.len()).expect("a length fits nfds_t");
        // SAFETY: pointer and count describe the vector; the timeout is null or a timespec that
        // lives during the call; a null signal mask leaves the mask alone. A descriptor that was
        // closed in the meantime is answered by POLLNVAL.
        let ready = unsafe { libc::ppoll(self.fds.as_mut_ptr(), count, timeout, std::ptr::null()) };
        match check(ready) {
            Ok(n) => Ok(usize::try_from(n).unwrap_or(0)),
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {
                for fd in &mut self.fds {
                    fd.revents = 0;
                }
                Ok(0)
            }
            Err(err) => Err(err),
        }
    }

    /// Whether the last wait found input, an error or a hang-up on the descriptor with this index.
    pub fn is_ready(&self, place: usize) -> bool {
        self.fds.get(place).is_some_and(|fd| fd.revents != 0)
    }
}

/// Waits at most `timeout` until a descriptor is writable; `false` if it is not, or if a signal or
/// an error ends the wait.
pub fn wait_writable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    let timeout = Timespec::try_from(timeout).ok();
    poll(&mut fds, timeout.as_ref()).is_ok() && fds[0].revents().contains(PollFlags::OUT)
}

fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: libc::c_long::from(
            i32::try_from(duration.subsec_nanos())
                .expect("a second has a thousand million nanoseconds"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incremented_counter_wakes_poller_once() {
        let event = EventFd::new().expect("descriptors are available");
        let mut poller = Poller::new();
        let place = poller.add(event.as_fd());
        assert_eq!(poller.wait(Some(Duration::ZERO)).unwrap(), 0);
        assert!(!poller.is_ready(place));
        event.notify();
        event.notify();
        assert_eq!(poller.wait(None).unwrap(), 1);
        assert!(poller.is_ready(place));
        assert!(event.take());
        assert!(!event.take());
        poller.clear();
        let place = poller.add(event.as_fd());
        assert_eq!(poller.wait(Some(Duration::from_micros(1))).unwrap(), 0);
        assert!(!poller.is_ready(place));
        assert!(!poller.is_ready(place + 1));
    }
}

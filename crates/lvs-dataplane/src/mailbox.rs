//! A queue of jobs for the thread that owns a value.

use std::fmt;
use std::io;
use std::mem;
use std::sync::Mutex;

use lvs_sys::EventFd;
use lvs_sys::lock;

/// A closure that the owning thread of a `T` runs on it.
pub(crate) type Job<T> = Box<dyn FnOnce(&mut T) + Send>;

/// Jobs for one thread, in the order in which they were posted. The thread polls
/// [`wake`](Self::wake) with its other descriptors.
pub(crate) struct Mailbox<T> {
    /// The queued jobs; `None` after the thread has ended.
    jobs: Mutex<Option<Vec<Job<T>>>>,
    wake: EventFd,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            jobs: Mutex::new(Some(Vec::new())),
            wake: EventFd::new()?,
        })
    }

    /// Queues `job` and wakes the thread. After the thread has ended, drops the job, and with it
    /// any channel that the job owns.
    pub(crate) fn post(&self, job: impl FnOnce(&mut T) + Send + 'static) {
        let first = match &mut *lock(&self.jobs) {
            Some(jobs) => {
                jobs.push(Box::new(job));
                jobs.len() == 1
            }
            None => return,
        };
        if first {
            self.wake.notify();
        }
    }

    /// Removes and returns all queued jobs.
    pub(crate) fn take(&self) -> Vec<Job<T>> {
        lock(&self.jobs).as_mut().map(mem::take).unwrap_or_default()
    }

    /// The event descriptor that the thread polls. Reset it before [`take`](Self::take).
    pub(crate) const fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// Drops the queued jobs and all later ones, because the thread is ending.
    pub(crate) fn close(&self) {
        let jobs = lock(&self.jobs).take();
        // A job may own a sender of this mailbox: drop the jobs after unlocking.
        drop(jobs);
    }
}

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").finish_non_exhaustive()
    }
}

/// Closes the mailbox when its thread exits for any reason.
#[derive(Debug)]
pub(crate) struct Closing<'a, T>(pub(crate) &'a Mailbox<T>);

impl<T> Drop for Closing<'_, T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn mailbox_returns_jobs_in_order_and_drops_jobs_after_close() {
        let mailbox = Mailbox::<Vec<u8>>::new().expect("a descriptor is available");
        assert!(!mailbox.wake().take());
        mailbox.post(|all| all.push(1));
        mailbox.post(|all| all.push(2));
        assert!(mailbox.wake().take());
        let mut all = Vec::new();
        for job in mailbox.take() {
            job(&mut all);
        }
        assert_eq!(all, [1, 2]);
        let (reply, answer) = mpsc::channel::<()>();
        mailbox.close();
        mailbox.post(move |_| reply.send(()).expect("the receiver exists"));
        assert!(answer.recv().is_err());
        assert!(mailbox.take().is_empty());
    }
}

//! The links between the threads of a dataplane: mailboxes, queues, and the set of workers that
//! run.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lvs_core::api::{Failure, FailureCode};

use super::hub::Hub;
use super::inbox::Inbox;
use crate::host::keeper::{Keeper, REQUESTS_MAX};
use crate::io::port::Ports;
use crate::mailbox::{Closing, Mailbox};
use crate::sync::Daemons;
use lvs_packet::pipeline::Request;
use lvs_sys::lock;

/// Time limit for an answer of a packet worker.
const WORKER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for an answer of the keeper, which may wait for a large change of nf_tables.
const KEEPER_TIMEOUT: Duration = Duration::from_secs(10);

/// The threads of a dataplane, and the queues between them. `W` is the packet worker.
pub(super) struct Threads<W> {
    keeper: Mailbox<Keeper>,
    workers: Vec<WorkerLink<W>>,
    pub(super) daemons: Daemons,
    pub(super) hub: Arc<Hub>,
    /// Number of packet workers that have not ended.
    working: AtomicUsize,
    /// Whether a packet worker runs or has run.
    has_worked: AtomicBool,
    /// The ports of packet workers that have ended. The keeper's thread closes them last.
    ports: Mutex<Vec<Ports>>,
}

/// The part of a packet worker that other threads use. They never write to a cache line that the
/// worker reads for each packet.
#[repr(align(128))]
pub(super) struct WorkerLink<W> {
    pub(super) mailbox: Mailbox<W>,
    pub(super) inbox: Inbox,
    /// The generation of the snapshot that the worker uses.
    pub(super) taken: AtomicU64,
}

impl<W> fmt::Debug for Threads<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").finish_non_exhaustive()
    }
}

impl<W> WorkerLink<W> {
    /// Creates the link to one of `workers` packet workers.
    fn new(workers: usize) -> io::Result<Self> {
        Ok(Self {
            mailbox: Mailbox::new()?,
            inbox: Inbox::new(workers),
            taken: AtomicU64::new(0),
        })
    }
}

impl<W> Threads<W> {
    /// Creates the links to `workers` packet workers and a keeper.
    ///
    /// # Errors
    /// The process has no more file descriptors.
    pub(super) fn new(workers: usize) -> io::Result<Self> {
        let links = (0..workers).map(|_| WorkerLink::new(workers));
        Ok(Self {
            keeper: Mailbox::new()?,
            workers: links.collect::<Result<_, _>>()?,
            daemons: Daemons::new()?,
            hub: Arc::default(),
            working: AtomicUsize::new(workers),
            has_worked: AtomicBool::new(false),
            ports: Mutex::default(),
        })
    }

    // --- the packet workers ----------------------------------------------------------------------

    /// Returns the link of a packet worker.
    ///
    /// # Panics
    /// If no worker has this number.
    pub(super) fn worker(&self, number: usize) -> &WorkerLink<W> {
        &self.workers[number]
    }

    pub(super) fn workers(&self) -> &[WorkerLink<W>] {
        &self.workers
    }

    pub(super) fn wake_workers(&self) {
        for worker in &self.workers {
            worker.mailbox.wake().notify();
        }
    }

    /// The generation of the oldest snapshot that a packet worker uses.
    pub(super) fn taken(&self) -> u64 {
        let workers = self.workers.iter();
        let taken = workers.map(|worker| worker.taken.load(Ordering::Acquire));
        taken.min().unwrap_or(u64::MAX)
    }

    /// Marks a packet worker as running until the returned guard is dropped.
    pub(super) fn worker_runs(&self, number: usize) -> impl Drop + '_ {
        self.has_worked.store(true, Ordering::Release);
        WorkerRuns {
            threads: self,
            _closing: Closing(&self.worker(number).mailbox),
        }
    }

    /// Whether a packet worker has been started.
    pub(super) fn have_worked(&self) -> bool {
        self.has_worked.load(Ordering::Acquire)
    }

    pub(super) fn workers_have_ended(&self) -> bool {
        self.working.load(Ordering::Acquire) == 0
    }

    /// Stores the ports of an ending packet worker: the keeper closes packet sockets only after
    /// everything that depends on them.
    pub(super) fn keep_ports(&self, ports: Ports) {
        lock(&self.ports).push(ports);
    }

    pub(super) fn drop_ports(&self) {
        for ports in lock(&self.ports).drain(..) {
            ports.close();
        }
    }

    /// Sends a request to every packet worker, and waits for the answers.
    ///
    /// # Errors
    /// A worker does not answer.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        question: impl Fn(&mut W) -> T + Clone + Send + 'static,
    ) -> Result<Vec<T>, Failure> {
        let (reply, answers) = mpsc::channel();
        for worker in &self.workers {
            let (reply, question) = (reply.clone(), question.clone());
            worker
                .mailbox
                .post(move |worker| drop(reply.send(question(worker))));
        }
        drop(reply);
        let mut all = Vec::with_capacity(self.workers.len());
        while all.len() < self.workers.len() {
            match answers.recv_timeout(WORKER_TIMEOUT) {
                Ok(answer) => all.push(answer),
                Err(_) => return Err(does_not_answer("packet worker")),
            }
        }
        Ok(all)
    }

    /// Waits until every packet worker uses a snapshot of this generation or a later one.
    ///
    /// # Errors
    /// A worker does not answer.
    pub(super) fn wait_for(&self, generation: u64) -> Result<(), Failure> {
        if self.taken() >= generation {
            return Ok(());
        }
        // A worker applies the latest snapshot before it answers.
        self.ask(|_| ()).map(drop)
    }

    // --- the keeper ------------------------------------------------------------------------------

    pub(super) const fn keeper(&self) -> &Mailbox<Keeper> {
        &self.keeper
    }

    pub(super) fn post_keeper(&self, job: impl FnOnce(&mut Keeper) + Send + 'static) {
        self.keeper.post(job);
    }

    pub(super) fn wake_keeper(&self) {
        self.keeper.wake().notify();
    }

    /// Posts a job to the keeper, and returns the value that the job sends.
    ///
    /// # Errors
    /// The keeper does not answer.
    pub(super) fn ask_keeper<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Keeper, mpsc::Sender<T>) + Send + 'static,
    ) -> Result<T, Failure> {
        let (reply, answer) = mpsc::channel();
        self.post_keeper(move |keeper| job(keeper, reply));
        answer
            .recv_timeout(KEEPER_TIMEOUT)
            .map_err(|_| does_not_answer("keeper of the host"))
    }
}

struct WorkerRuns<'a, W> {
    threads: &'a Threads<W>,
    _closing: Closing<'a, W>,
}

impl<W> Drop for WorkerRuns<'_, W> {
    fn drop(&mut self) {
        self.threads.working.fetch_sub(1, Ordering::AcqRel);
        self.threads.wake_keeper();
    }
}

fn does_not_answer(who: &str) -> Failure {
    Failure::new(
        FailureCode::Internal,
        format!("the {who} does not answer; see the dataplane's log for the reason"),
    )
}

/// The bounded queue of one packet worker's requests to the keeper. If it is full, requests are
/// dropped and counted: packets never wait.
pub(super) struct Requests {
    queue: SyncSender<Request>,
    /// Number of requests that were refused because the queue, or the worker's list of local
    /// clients, was full.
    pub(super) refused: u64,
}

impl Requests {
    pub(super) fn new() -> (Self, Receiver<Request>) {
        let (queue, receiver) = sync_channel(REQUESTS_MAX);
        (Self { queue, refused: 0 }, receiver)
    }

    /// Queues `requests`, and counts those that are dropped. The caller wakes the keeper.
    pub(super) fn send(&mut self, requests: impl Iterator<Item = Request>) {
        for request in requests {
            self.refused += u64::from(self.queue.try_send(request).is_err());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use lvs_packet::net::PortId;

    #[test]
    fn full_request_queue_counts_dropped_requests() {
        let (mut requests, queue) = Requests::new();
        let request = Request::Resolve(PortId(2), IpAddr::from([10, 0, 0, 1]));
        let requested = std::iter::repeat_n(request, REQUESTS_MAX + 3);
        requests.send(requested);
        assert_eq!(requests.refused, 3);
        assert_eq!(queue.try_iter().count(), REQUESTS_MAX);
        let request = Request::Confirm(PortId(2), IpAddr::from([10, 0, 0, 1]));
        requests.send(std::iter::once(request));
        assert_eq!((requests.refused, queue.try_iter().count()), (3, 1));
    }
}

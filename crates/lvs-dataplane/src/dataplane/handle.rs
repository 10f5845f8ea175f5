//! A handle to the running dataplane for its control socket, its keeper and an embedding program.
//! It combines the [context](super::context), the [threads](super::threads), and other shared
//! state.

use std::iter;
use std::net::IpAddr;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use lvs_core::api::Confinement;
use lvs_core::sync::Message;
use lvs_core::sync::wire::Entry;
use lvs_core::{Control, Instant};

use super::capture::Readers;
use super::context::Context;
use super::peers::Peers;
use super::recent::Recent;
use super::successor::Keeping;
use super::threads::Threads;
use super::worker::Worker;
use crate::host::DataplaneSide;
use crate::host::view::View;
use crate::io::port::Port;
use crate::sync::{Director, Ticket};
use lvs_packet::net::PortId;
use lvs_process::server::Leaving;

/// A handle to a running dataplane, for any thread.
#[derive(Debug)]
pub struct Handle {
    pub(super) context: Arc<Context>,
    pub(super) threads: Arc<Threads<Worker>>,
    pub(super) keeping: Keeping,
    pub(super) captures: Readers,
    /// The peers, once replication has started.
    peers: OnceLock<Arc<Peers>>,
    /// The lock of the control socket, once the socket is open. A stopping dataplane marks the
    /// lock, so that a starting dataplane waits for its end.
    lock: OnceLock<Leaving>,
    /// The sandbox of the program, once the program has entered it.
    confinement: OnceLock<Confinement>,
    pub(super) recent: Mutex<Recent>,
    /// Dropping the sender stops the thread that samples the counters. Empty before the thread is
    /// started.
    sampler: OnceLock<Sender<()>>,
}

impl Handle {
    pub(super) fn new(
        context: Arc<Context>,
        threads: Arc<Threads<Worker>>,
        keeping: Keeping,
    ) -> Arc<Self> {
        let this = Arc::new(Self {
            context,
            threads,
            keeping,
            captures: Readers::default(),
            peers: OnceLock::new(),
            lock: OnceLock::new(),
            confinement: OnceLock::new(),
            recent: Mutex::default(),
            sampler: OnceLock::new(),
        });
        let director: Weak<Self> = Arc::downgrade(&this);
        this.threads.daemons.serve(director);
        this
    }

    /// Creates the handle of a dataplane without a keeper and without running workers.
    #[cfg(test)]
    pub(super) fn without_host(control: Control) -> Arc<Self> {
        let threads = Threads::new(1).expect("descriptors are available");
        let context = Context::without_kernel(control);
        Self::new(context, Arc::new(threads), Keeping::new(None))
    }

    /// Requests all threads to stop, and marks the lock of the control socket, so that a starting
    /// dataplane waits for the end of this one.
    pub fn stop(&self) {
        if let Some(lock) = self.lock.get() {
            lock.mark();
        }
        self.context.stop();
        self.threads.wake_workers();
        self.threads.wake_keeper();
    }

    /// Whether the dataplane is stopping.
    pub fn is_stopping(&self) -> bool {
        self.context.is_stopping()
    }

    /// Stores the lock that is marked when this dataplane stops.
    pub(super) fn use_lock(&self, lock: Leaving) {
        let _ = self.lock.set(lock);
    }

    /// Stores the sender whose drop ends the thread that samples the counters.
    pub(super) fn use_sampler(&self, sampler: Sender<()>) {
        let _ = self.sampler.set(sampler);
    }

    /// Sets the sandbox that the program has entered, for `info` of the control socket.
    pub fn set_confinement(&self, confinement: Confinement) {
        let _ = self.confinement.set(confinement);
    }

    pub(super) fn confinement(&self) -> Confinement {
        self.confinement.get().cloned().unwrap_or_default()
    }

    pub(super) fn use_peers(&self, peers: Arc<Peers>) {
        let _ = self.peers.set(peers);
    }

    pub(super) fn peers(&self) -> Option<&Arc<Peers>> {
        self.peers.get()
    }
}

/// The functions that the synchronisation daemons call.
impl Director for Handle {
    fn messages(&self) -> Vec<Message> {
        let now = self.context.now();
        let mut control = self.context.control();
        iter::from_fn(|| control.take_sync_message(now)).collect()
    }

    fn take_over(&self, entries: Vec<Entry>, ticket: Ticket) {
        // A connection belongs to the worker that receives its packets.
        let view = self.context.view();
        let workers = self.threads.workers();
        let mut shares: Vec<Vec<Entry>> = workers.iter().map(|_| Vec::new()).collect();
        for entry in entries {
            if let Some(share) = shares.get_mut(view.worker_of_client(entry.client)) {
                share.push(entry);
            }
        }
        let shares = workers.iter().zip(shares);
        for (worker, entries) in shares.filter(|(_, share)| !share.is_empty()) {
            let ticket = ticket.clone();
            worker
                .mailbox
                .post(move |worker| worker.take_over(entries, ticket));
        }
    }
}

/// The functions that the keeper calls.
impl DataplaneSide for Handle {
    fn control(&self) -> MutexGuard<'_, Control> {
        self.context.control()
    }

    fn now(&self) -> Instant {
        self.context.now()
    }

    fn has_ended(&self) -> bool {
        self.context.is_stopping() && self.threads.workers_have_ended()
    }

    fn publish(&self, view: Arc<View>) {
        self.context.publish(view);
        self.threads.wake_workers();
    }

    fn taken(&self) -> u64 {
        self.threads.taken()
    }

    fn workers(&self) -> usize {
        self.threads.workers().len()
    }

    fn attach(&self, port: PortId, ports: Vec<Port>) {
        for (worker, io) in self.threads.workers().iter().zip(ports) {
            worker.mailbox.post(move |worker| worker.attach(port, io));
        }
    }

    fn detach(&self, port: PortId) {
        for worker in self.threads.workers() {
            worker.mailbox.post(move |worker| worker.detach(port));
        }
    }

    fn report_silent(&self, neighbours: Vec<(PortId, IpAddr)>) {
        let neighbours: Arc<[(PortId, IpAddr)]> = neighbours.into();
        for worker in self.threads.workers() {
            let neighbours = neighbours.clone();
            worker
                .mailbox
                .post(move |worker| worker.give_up_neighbours(&neighbours));
        }
    }

    fn keep(&self) {
        self.keeping.keep(&self.context);
    }

    fn local_addresses(&self) -> Option<Vec<IpAddr>> {
        // Until the workers run, the keeper knows only the configured addresses.
        if !self.threads.have_worked() {
            return Some(Vec::new());
        }
        let all = self.threads.ask(|worker| {
            let addresses = worker.decider().shard.local_addresses();
            addresses.collect::<Vec<IpAddr>>()
        });
        Some(all.ok()?.concat())
    }
}

//! What the threads of an engine share: the director's control half, a clock, and ways to one
//! another.

use std::io;
use std::iter;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant as SystemInstant};

use lvs_core::api::{Confinement, Failure, FailureCode, InKernelInfo};
use lvs_core::sync::Message;
use lvs_core::sync::wire::Entry;
use lvs_core::{Control, Instant};

use super::capture::Readers;
use super::decider::Decider;
use super::door::{Door, Longest, Pauses};
use super::peers::Peers;
use super::successor::{self, Estate};
use super::worker::Worker;
use crate::host::keeper::Keeper;
use crate::host::view::{Published, View};
use crate::host::{EngineSide, NeighbourNews};
use crate::in_kernel::InKernel;
use crate::io::port::{Port, Ports};
use crate::mailbox::{Closing, Mailbox};
use crate::sync::{Daemons, Director, Ticket};
use lvs_packet::net::PortId;
use lvs_process::server::Leaving;

/// How long a packet worker may take to answer; it looks at its mailbox after every few batches.
const WORKER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the keeper may take. The kernel may need a moment for a large change of nf_tables.
const KEEPER_TIMEOUT: Duration = Duration::from_secs(10);

/// How often others give way to packets that wait for the control half, before they queue like
/// them.
const PATIENCE: usize = 1000;

/// Shared by the control server's threads, the keeper and the packet workers.
#[derive(Debug)]
pub struct Shared {
    control: Mutex<Control>,
    /// Packet workers that wait for it.
    wanted: AtomicUsize,
    /// How long they did.
    waited: Longest,
    /// Held by whoever makes changes: they are followed in the order in which they are made.
    changing: Mutex<()>,
    captures: Readers,
    started: SystemInstant,
    keeper: Mailbox<Keeper>,
    published: Published,
    /// Those of the last view.
    ways: AtomicU64,
    doors: Vec<Door>,
    daemons: Daemons,
    /// Other directors of this kind.
    peers: OnceLock<Arc<Peers>>,
    /// Packet workers that have not ended.
    working: AtomicUsize,
    /// The ports of those that have: what depends on them goes first.
    ports: Mutex<Vec<Ports>>,
    stop: AtomicBool,
    /// The lock of the control socket, which says that this process ends.
    lock: OnceLock<Leaving>,
    /// The path in the kernel.
    in_kernel: OnceLock<Arc<InKernel>>,
    /// Why there is none, though it was asked for.
    not_in_kernel: OnceLock<InKernelInfo>,
    /// What is kept for a successor.
    estate: OnceLock<Estate>,
    /// Something has changed that a successor would not find.
    unkept: AtomicBool,
    /// Held while something is stored for a successor.
    storing: Mutex<()>,
    /// When counters, and services of which there are many, are stored again.
    rests_until: Mutex<Option<SystemInstant>>,
    /// A packet worker runs, or did.
    has_worked: AtomicBool,
    /// How far the program has confined itself.
    confinement: OnceLock<Confinement>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// That of a director with so many packet workers.
    ///
    /// # Errors
    /// The process has no more file descriptors.
    pub(super) fn new(control: Control, workers: usize) -> io::Result<Self> {
        Ok(Self {
            control: Mutex::new(control),
            wanted: AtomicUsize::new(0),
            waited: Longest::default(),
            changing: Mutex::default(),
            captures: Readers::default(),
            started: SystemInstant::now(),
            keeper: Mailbox::new()?,
            published: Published::default(),
            ways: AtomicU64::new(0),
            doors: (0..workers)
                .map(|_| Door::new(workers))
                .collect::<Result<_, _>>()?,
            daemons: Daemons::new()?,
            peers: OnceLock::new(),
            working: AtomicUsize::new(workers),
            ports: Mutex::default(),
            stop: AtomicBool::new(false),
            lock: OnceLock::new(),
            in_kernel: OnceLock::new(),
            not_in_kernel: OnceLock::new(),
            estate: OnceLock::new(),
            unkept: AtomicBool::new(true),
            storing: Mutex::default(),
            rests_until: Mutex::default(),
            has_worked: AtomicBool::new(false),
            confinement: OnceLock::new(),
        })
    }

    /// The director's control half. The lock is held for one short operation at a time, never while
    /// waiting for anything. A packet that waits for it goes first.
    pub(super) fn control(&self) -> MutexGuard<'_, Control> {
        let mut patience = PATIENCE;
        while patience > 0 && self.wanted.load(Ordering::Acquire) > 0 {
            patience -= 1;
            thread::yield_now();
        }
        self.lock_control()
    }

    /// As [`control`](Self::control), for a packet.
    pub(super) fn control_for_packet(&self) -> MutexGuard<'_, Control> {
        match self.control.try_lock() {
            Ok(control) => control,
            Err(_) => {
                let started = SystemInstant::now();
                self.wanted.fetch_add(1, Ordering::AcqRel);
                let control = self.lock_control();
                self.wanted.fetch_sub(1, Ordering::AcqRel);
                self.waited.note(started.elapsed());
                control
            }
        }
    }

    fn lock_control(&self) -> MutexGuard<'_, Control> {
        // A panic aborts the released engine; in a test that catches one, the data are still whole.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets nobody else make changes.
    pub(super) fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The places of captures.
    pub(super) const fn captures(&self) -> &Readers {
        &self.captures
    }

    /// From now on, packets are forwarded in the kernel as well.
    pub(super) fn use_in_kernel(&self, in_kernel: Arc<InKernel>) {
        let _ = self.in_kernel.set(in_kernel);
    }

    /// The path in the kernel.
    pub(super) fn in_kernel(&self) -> Option<&Arc<InKernel>> {
        self.in_kernel.get()
    }

    /// From now on, a successor finds what there is.
    pub(super) fn use_estate(&self, estate: Estate) {
        let _ = self.estate.set(estate);
    }

    /// Whether this engine goes on where another one was killed.
    pub(super) fn is_successor(&self) -> bool {
        self.estate.get().is_some_and(Estate::is_found)
    }

    /// There is no path in the kernel, though it was asked for.
    pub(super) fn not_in_kernel(&self, why: InKernelInfo) {
        let _ = self.not_in_kernel.set(why);
    }

    /// What is to be said of the path in the kernel.
    pub(super) fn in_kernel_info(&self) -> InKernelInfo {
        match self.in_kernel() {
            Some(in_kernel) => in_kernel.info(),
            None => self.not_in_kernel.get().cloned().unwrap_or_default(),
        }
    }

    /// Something has changed: a successor is to find it, at once if that is little work.
    pub(super) fn has_changed(&self) {
        let Some(estate) = self.estate.get() else {
            return;
        };
        if !successor::is_small(&self.control()) {
            self.unkept.store(true, Ordering::Release);
            return;
        }
        self.store(estate);
    }

    /// Stores what a successor is to find. Snapshots are stored in the order in which they were
    /// taken.
    fn store(&self, estate: &Estate) {
        let _turn = lock(&self.storing);
        self.unkept.store(false, Ordering::Release);
        let snapshot = successor::snapshot(&self.control());
        snapshot.store(estate);
    }

    /// Takes over what the path in the kernel has counted.
    pub(super) fn fold(&self) {
        if let Some(in_kernel) = self.in_kernel() {
            in_kernel.fold(|| self.control());
        }
    }

    /// Time since the engine started, as the core counts it.
    pub(super) fn now(&self) -> Instant {
        Instant::ZERO + self.started.elapsed()
    }

    pub(super) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// The lock to mark when the engine stops.
    pub(super) fn use_lock(&self, lock: Leaving) {
        let _ = self.lock.set(lock);
    }

    /// Asks all threads to end.
    pub fn stop(&self) {
        if let Some(lock) = self.lock.get() {
            lock.mark();
        }
        self.stop.store(true, Ordering::Release);
        for door in &self.doors {
            door.mailbox.wake().notify();
        }
        self.keeper.wake().notify();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    // --- the packet workers ----------------------------------------------------------------------

    /// The door of a packet worker.
    ///
    /// # Panics
    /// If there is no such worker.
    pub(super) fn door(&self, number: usize) -> &Door {
        &self.doors[number]
    }

    /// The doors of all packet workers.
    pub(super) fn doors(&self) -> &[Door] {
        &self.doors
    }

    /// Has the engine tell how far its program has confined itself.
    pub fn set_confinement(&self, confinement: Confinement) {
        let _ = self.confinement.set(confinement);
    }

    /// How far that is.
    pub(super) fn confinement(&self) -> Confinement {
        self.confinement.get().cloned().unwrap_or_default()
    }

    /// A packet worker runs until the value that this gives is dropped.
    pub(super) fn worker_runs(&self, number: usize) -> impl Drop + '_ {
        self.has_worked.store(true, Ordering::Release);
        WorkerRuns {
            shared: self,
            _closing: Closing(&self.door(number).mailbox),
        }
    }

    /// Keeps the ports of a packet worker that ends until the keeper has ended.
    pub(super) fn keep_ports(&self, ports: Ports) {
        lock(&self.ports).push(ports);
    }

    /// Lets go of the ports that were kept.
    pub(super) fn drop_ports(&self) {
        for ports in lock(&self.ports).drain(..) {
            ports.close();
        }
    }

    /// Puts a question to every packet worker and waits for the answers.
    ///
    /// # Errors
    /// If one does not answer.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        question: impl Fn(&mut Worker) -> T + Clone + Send + 'static,
    ) -> Result<Vec<T>, Failure> {
        let (reply, answers) = mpsc::channel();
        for door in &self.doors {
            let (reply, question) = (reply.clone(), question.clone());
            door.mailbox
                .post(move |worker| drop(reply.send(question(worker))));
        }
        drop(reply);
        let mut all = Vec::with_capacity(self.doors.len());
        while all.len() < self.doors.len() {
            match answers.recv_timeout(WORKER_TIMEOUT) {
                Ok(answer) => all.push(answer),
                Err(_) => return Err(does_not_answer("packet worker")),
            }
        }
        Ok(all)
    }

    /// Waits until every packet worker has taken the view of this generation.
    ///
    /// # Errors
    /// If one does not.
    pub(super) fn wait_for(&self, generation: u64) -> Result<(), Failure> {
        if self.taken() >= generation {
            return Ok(());
        }
        // A worker takes the latest view before it does what it is asked.
        self.ask(|_| ()).map(drop)
    }

    /// What packet workers were busy with at most, since this was last asked; the longest of all.
    pub fn take_pauses(&self) -> Pauses {
        let pauses = Pauses {
            wait: self.waited.take(),
            ..Pauses::default()
        };
        self.doors.iter().fold(pauses, |longest, door| {
            let (batch, gap) = door.take_pauses();
            Pauses {
                batch: longest.batch.max(batch),
                gap: longest.gap.max(gap),
                ..longest
            }
        })
    }

    /// The number of the latest view.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.published.generation()
    }

    /// The latest view.
    pub(super) fn view(&self) -> Arc<View> {
        self.published.latest()
    }

    // --- synchronisation -------------------------------------------------------------------------

    /// The synchronisation daemons.
    pub(super) const fn daemons(&self) -> &Daemons {
        &self.daemons
    }

    /// From now on, it talks to other directors.
    pub(super) fn use_peers(&self, peers: Arc<Peers>) {
        let _ = self.peers.set(peers);
    }

    /// Other directors of this kind.
    pub(super) fn peers(&self) -> Option<&Arc<Peers>> {
        self.peers.get()
    }

    /// Has the packet worker that has the connections do something, after it has told others what
    /// has changed.
    pub(super) fn post_decider(&self, job: impl FnOnce(&mut Decider) + Send + 'static) {
        // There is one worker.
        if let Some(door) = self.doors.first() {
            door.mailbox.post(move |worker| worker.with_decider(job));
        }
    }

    // --- the keeper ------------------------------------------------------------------------------

    pub(super) const fn keeper(&self) -> &Mailbox<Keeper> {
        &self.keeper
    }

    /// Has the keeper do something.
    pub(super) fn post_keeper(&self, job: impl FnOnce(&mut Keeper) + Send + 'static) {
        self.keeper.post(job);
    }

    pub(super) fn wake_keeper(&self) {
        self.keeper.wake().notify();
    }

    /// Has the keeper do something, and waits for what it gives to `reply`.
    ///
    /// # Errors
    /// If it does not answer.
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

impl Director for Shared {
    fn messages(&self) -> Vec<Message> {
        let now = self.now();
        let mut control = self.control();
        iter::from_fn(|| control.take_sync_message(now)).collect()
    }

    fn take_over(&self, entries: Vec<Entry>, ticket: Ticket) {
        // A connection goes to the worker that its packets go to.
        let steering = self.view().steering.clone();
        let home = |entry: &Entry| {
            let (client, steering) = (entry.client, steering.as_ref());
            steering.map_or(0, |steering| steering.of_client(client.ip(), client.port()))
        };
        let mut shares: Vec<Vec<Entry>> = self.doors.iter().map(|_| Vec::new()).collect();
        for entry in entries {
            let home = home(&entry);
            if let Some(share) = shares.get_mut(home) {
                share.push(entry);
            }
        }
        let shares = self.doors.iter().zip(shares);
        for (door, entries) in shares.filter(|(_, share)| !share.is_empty()) {
            let ticket = ticket.clone();
            door.mailbox
                .post(move |worker| worker.take_over(entries, ticket));
        }
    }
}

struct WorkerRuns<'a> {
    shared: &'a Shared,
    _closing: Closing<'a, Worker>,
}

impl Drop for WorkerRuns<'_> {
    fn drop(&mut self) {
        self.shared.working.fetch_sub(1, Ordering::AcqRel);
        self.shared.wake_keeper();
    }
}

fn does_not_answer(who: &str) -> Failure {
    Failure::new(
        FailureCode::Internal,
        format!("the {who} does not answer; the engine's log tells why"),
    )
}

impl EngineSide for Shared {
    fn control(&self) -> MutexGuard<'_, Control> {
        self.control()
    }

    fn now(&self) -> Instant {
        self.now()
    }

    fn has_ended(&self) -> bool {
        self.is_stopping() && self.working.load(Ordering::Acquire) == 0
    }

    fn publish(&self, view: Arc<View>) {
        let ways = view.ways;
        self.published.publish(view);
        if let Some(in_kernel) = self.in_kernel()
            && self.ways.swap(ways, Ordering::AcqRel) != ways
        {
            in_kernel.changed();
        }
        for door in &self.doors {
            door.mailbox.wake().notify();
        }
    }

    fn taken(&self) -> u64 {
        let doors = self.doors.iter();
        let taken = doors.map(|door| door.taken.load(Ordering::Acquire));
        taken.min().unwrap_or(u64::MAX)
    }

    fn workers(&self) -> usize {
        self.doors.len()
    }

    fn attach(&self, port: PortId, ports: Vec<Port>) {
        for (door, io) in self.doors.iter().zip(ports) {
            door.mailbox.post(move |worker| worker.attach(port, io));
        }
    }

    fn detach(&self, port: PortId) {
        for door in &self.doors {
            door.mailbox.post(move |worker| worker.detach(port));
        }
    }

    fn tell_neighbours(&self, neighbours: Vec<NeighbourNews>) {
        let neighbours: Arc<[NeighbourNews]> = neighbours.into();
        for door in &self.doors {
            let neighbours = neighbours.clone();
            door.mailbox
                .post(move |worker| worker.hear_of_neighbours(&neighbours));
        }
    }

    fn keep(&self) {
        let Some(estate) = self.estate.get() else {
            return;
        };
        let began = SystemInstant::now();
        let mut rests = lock(&self.rests_until);
        if rests.is_some_and(|until| began < until) {
            return;
        }
        estate.keep_counts(self);
        if self.unkept.load(Ordering::Acquire) {
            self.store(estate);
        }
        // A fifth of the caller's time at most, however many servers there are.
        *rests = Some(SystemInstant::now() + began.elapsed() * 4);
    }

    fn local_addresses(&self) -> Option<Vec<IpAddr>> {
        // What was taken over has none, and nobody is there yet to be asked.
        if !self.has_worked.load(Ordering::Acquire) {
            return Some(Vec::new());
        }
        let all = self.ask(|worker| {
            let addresses = worker.decider().shard.local_addresses();
            addresses.collect::<Vec<IpAddr>>()
        });
        Some(all.ok()?.concat())
    }
}

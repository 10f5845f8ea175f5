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

use super::Packets;
use super::capture::Readers;
use super::decider::Decider;
use super::door::{Door, Longest, Pauses};
use super::peers::Peers;
use super::successor::{self, Estate};
use super::virtual_::Offline;
use crate::host::keeper::Keeper;
use crate::host::view::{Published, View};
use crate::host::{EngineSide, NeighbourNews};
use crate::in_kernel::InKernel;
use crate::io::port::{Port, Ports};
use crate::mailbox::{Closing, Mailbox};
use crate::packet::net::PortId;
use crate::sync::{Daemons, Director, Ticket};

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
    /// The time in nanoseconds, where only a caller moves it.
    virtual_time: Option<AtomicU64>,
    side: Side,
    stop: AtomicBool,
    /// The path in the kernel.
    in_kernel: OnceLock<Arc<InKernel>>,
    /// Why there is none, though it was asked for.
    not_in_kernel: OnceLock<InKernelInfo>,
    /// What is kept for a successor.
    estate: OnceLock<Estate>,
    /// Something has changed that a successor would not find.
    unkept: AtomicBool,
    /// A packet worker runs, or did.
    has_worked: AtomicBool,
    /// How far the program has confined itself.
    confinement: OnceLock<Confinement>,
}

/// Where packets come from.
#[derive(Debug)]
pub(super) enum Side {
    /// From the host's interfaces.
    Host(HostSide),
    /// From nowhere, or from tests.
    Virtual {
        offline: Mailbox<Offline>,
        /// Interfaces of the described network that take frames, by port.
        interfaces: Mutex<Vec<String>>,
    },
}

/// The threads of an engine with interfaces.
#[derive(Debug)]
pub(super) struct HostSide {
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
}

impl HostSide {
    pub(super) fn new(workers: usize) -> io::Result<Self> {
        Ok(Self {
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
        })
    }
}

impl Shared {
    pub(super) fn new(control: Control, side: Side, virtual_time: bool) -> Self {
        Self {
            control: Mutex::new(control),
            wanted: AtomicUsize::new(0),
            waited: Longest::default(),
            changing: Mutex::default(),
            captures: Readers::default(),
            started: SystemInstant::now(),
            virtual_time: virtual_time.then(AtomicU64::default),
            side,
            stop: AtomicBool::new(false),
            in_kernel: OnceLock::new(),
            not_in_kernel: OnceLock::new(),
            estate: OnceLock::new(),
            unkept: AtomicBool::new(true),
            has_worked: AtomicBool::new(false),
            confinement: OnceLock::new(),
        }
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
        let control = self.control();
        let small = successor::is_small(&control);
        if small {
            successor::keep(&control, estate);
        }
        self.unkept.store(!small, Ordering::Release);
    }

    /// Takes over what the path in the kernel has counted.
    pub(super) fn fold(&self) {
        if let Some(in_kernel) = self.in_kernel() {
            in_kernel.fold(|| self.control());
        }
    }

    /// Time since the engine started, as the core counts it.
    pub(super) fn now(&self) -> Instant {
        match &self.virtual_time {
            Some(nanos) => Instant::ZERO + Duration::from_nanos(nanos.load(Ordering::Acquire)),
            None => Instant::ZERO + self.started.elapsed(),
        }
    }

    pub(super) const fn has_virtual_time(&self) -> bool {
        self.virtual_time.is_some()
    }

    /// Moves the virtual clock.
    pub(super) fn set_now(&self, now: Instant) {
        if let Some(nanos) = &self.virtual_time {
            nanos.store(now.as_nanos(), Ordering::Release);
        }
    }

    pub(super) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) const fn side(&self) -> &Side {
        &self.side
    }

    const fn host(&self) -> Option<&HostSide> {
        match &self.side {
            Side::Host(host) => Some(host),
            Side::Virtual { .. } => None,
        }
    }

    /// Asks all threads to end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        match &self.side {
            Side::Host(host) => {
                for door in &host.doors {
                    door.mailbox.wake().notify();
                }
                host.keeper.wake().notify();
            }
            Side::Virtual { offline, .. } => offline.wake().notify(),
        }
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
        &self.host().expect("it has packet workers").doors[number]
    }

    /// The doors of all packet workers.
    pub(super) fn doors(&self) -> &[Door] {
        self.host().map_or(&[][..], |host| &host.doors)
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
        if let Some(host) = self.host() {
            let kept = host.ports.lock();
            kept.unwrap_or_else(PoisonError::into_inner).push(ports);
        }
    }

    /// Lets go of the ports that were kept.
    pub(super) fn drop_ports(&self) {
        if let Some(host) = self.host() {
            let mut kept = host.ports.lock().unwrap_or_else(PoisonError::into_inner);
            for ports in kept.drain(..) {
                ports.close();
            }
        }
    }

    /// Puts a question to every packet worker and waits for the answers.
    ///
    /// # Errors
    /// If one does not answer.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        question: impl Fn(&mut dyn Packets) -> T + Clone + Send + 'static,
    ) -> Result<Vec<T>, Failure> {
        let (reply, answers) = mpsc::channel();
        let mut asked = 0;
        match &self.side {
            Side::Host(host) => {
                for door in &host.doors {
                    let (reply, question) = (reply.clone(), question.clone());
                    door.mailbox
                        .post(move |worker| drop(reply.send(question(worker))));
                    asked += 1;
                }
            }
            Side::Virtual { offline, .. } => {
                let (reply, question) = (reply.clone(), question.clone());
                offline.post(move |offline| drop(reply.send(question(offline))));
                asked += 1;
            }
        }
        drop(reply);
        let mut all = Vec::with_capacity(asked);
        while all.len() < asked {
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
        let doors = self.host().map_or(&[][..], |host| &host.doors);
        let pauses = Pauses {
            wait: self.waited.take(),
            ..Pauses::default()
        };
        doors.iter().fold(pauses, |longest, door| {
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
        self.host().map_or(0, |host| host.published.generation())
    }

    /// The latest view.
    pub(super) fn view(&self) -> Arc<View> {
        self.host()
            .map(|host| host.published.latest())
            .unwrap_or_default()
    }

    // --- synchronisation -------------------------------------------------------------------------

    /// The synchronisation daemons; an engine without interfaces has none.
    pub(super) fn daemons(&self) -> Option<&Daemons> {
        Some(&self.host()?.daemons)
    }

    /// From now on, it talks to other directors.
    pub(super) fn use_peers(&self, peers: Arc<Peers>) {
        if let Some(host) = self.host() {
            let _ = host.peers.set(peers);
        }
    }

    /// Other directors of this kind.
    pub(super) fn peers(&self) -> Option<&Arc<Peers>> {
        self.host()?.peers.get()
    }

    /// Has the packet worker that has the connections do something, after it has told others what
    /// has changed.
    pub(super) fn post_decider(&self, job: impl FnOnce(&mut Decider) + Send + 'static) {
        // There is one worker.
        if let Some(door) = self.host().and_then(|host| host.doors.first()) {
            door.mailbox.post(move |worker| worker.with_decider(job));
        }
    }

    // --- the keeper ------------------------------------------------------------------------------

    pub(super) fn keeper(&self) -> Option<&Mailbox<Keeper>> {
        Some(&self.host()?.keeper)
    }

    /// Has the keeper do something. Without one, nothing concerns the host.
    pub(super) fn post_keeper(&self, job: impl FnOnce(&mut Keeper) + Send + 'static) {
        if let Some(keeper) = self.keeper() {
            keeper.post(job);
        }
    }

    pub(super) fn wake_keeper(&self) {
        if let Some(keeper) = self.keeper() {
            keeper.wake().notify();
        }
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
        let Some(host) = self.host() else {
            return;
        };
        // A connection goes to the worker that its packets go to.
        let steering = self.view().steering.clone();
        let home = |entry: &Entry| {
            let (client, steering) = (entry.client, steering.as_ref());
            steering.map_or(0, |steering| steering.of_client(client.ip(), client.port()))
        };
        let mut shares: Vec<Vec<Entry>> = host.doors.iter().map(|_| Vec::new()).collect();
        for entry in entries {
            let home = home(&entry);
            if let Some(share) = shares.get_mut(home) {
                share.push(entry);
            }
        }
        let shares = host.doors.iter().zip(shares);
        for (door, entries) in shares.filter(|(_, share)| !share.is_empty()) {
            let ticket = ticket.clone();
            door.mailbox
                .post(move |worker| worker.take_over(entries, ticket));
        }
    }
}

struct WorkerRuns<'a> {
    shared: &'a Shared,
    _closing: Closing<'a, super::worker::Worker>,
}

impl Drop for WorkerRuns<'_> {
    fn drop(&mut self) {
        if let Some(host) = self.shared.host() {
            host.working.fetch_sub(1, Ordering::AcqRel);
        }
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
        let working = self.host().map(|host| host.working.load(Ordering::Acquire));
        self.is_stopping() && working.is_none_or(|working| working == 0)
    }

    fn publish(&self, view: Arc<View>) {
        if let Some(host) = self.host() {
            let ways = view.ways;
            host.published.publish(view);
            if let Some(in_kernel) = self.in_kernel()
                && host.ways.swap(ways, Ordering::AcqRel) != ways
            {
                in_kernel.changed();
            }
            for door in &host.doors {
                door.mailbox.wake().notify();
            }
        }
    }

    fn taken(&self) -> u64 {
        let doors = self.host().map_or(&[][..], |host| &host.doors);
        let taken = doors.iter().map(|door| door.taken.load(Ordering::Acquire));
        taken.min().unwrap_or(u64::MAX)
    }

    fn workers(&self) -> usize {
        self.host().map_or(1, |host| host.doors.len())
    }

    fn attach(&self, port: PortId, ports: Vec<Port>) {
        let doors = self.host().map_or(&[][..], |host| &host.doors);
        for (door, io) in doors.iter().zip(ports) {
            door.mailbox.post(move |worker| worker.attach(port, io));
        }
    }

    fn detach(&self, port: PortId) {
        for door in self.host().map_or(&[][..], |host| &host.doors) {
            door.mailbox.post(move |worker| worker.detach(port));
        }
    }

    fn tell_neighbours(&self, neighbours: Vec<NeighbourNews>) {
        let neighbours: Arc<[NeighbourNews]> = neighbours.into();
        for door in self.host().map_or(&[][..], |host| &host.doors) {
            let neighbours = neighbours.clone();
            door.mailbox
                .post(move |worker| worker.hear_of_neighbours(&neighbours));
        }
    }

    fn keep(&self) {
        if let Some(estate) = self.estate.get() {
            estate.keep_counts(self);
            if self.unkept.swap(false, Ordering::AcqRel) {
                successor::keep(&self.control(), estate);
            }
        }
    }

    fn local_addresses(&self) -> Option<Vec<IpAddr>> {
        // What was taken over has none, and nobody is there yet to be asked.
        if !self.has_worked.load(Ordering::Acquire) {
            return Some(Vec::new());
        }
        let all = self.ask(|packets| {
            let addresses = packets.decider().shard.local_addresses();
            addresses.collect::<Vec<IpAddr>>()
        });
        Some(all.ok()?.concat())
    }
}

//! A packet worker: one thread with a shard of the connections and its own sockets. Everything that
//! concerns the host is the [keeper](crate::host::keeper)'s; what it knows comes here as views.
//!
//! ```text
//! wait ─▶ each port: take the latest view, receive a batch ─▶ pipeline ─▶ requests, send ─▶ jobs ─▶ timers ─▶ wait
//! ```

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant as SystemInstant};

use lvs_core::sync::wire::Entry;
use lvs_core::{ConnId, Explanation, Instant, Offer, Ripeness, Shard};
use tracing::{error, info, warn};

use super::calls::Question;
use super::capture::{self, Capture, Shown};
use super::decider::Decider;
use super::door::{Door, Requests};
use super::inbox::Parcel;
use super::kernel_path::WithEngine;
use super::local_clients::LocalClients;
use super::network::TakenView;
use super::priority::Priority;
use super::report::Report;
use super::shared::Shared;
use super::{PacketHook, Packets, pages};
use crate::host::NeighbourNews;
use crate::in_kernel::{Held, InKernel, LocalsAre, WayOut};
use crate::io::BATCH;
use crate::io::port::{Batch, Port, Ports};
use crate::packet::common::Common;
use crate::packet::drop::FrameDrop;
use crate::packet::frame::Frame;
use crate::packet::net::{Net, PortId};
use crate::packet::pipeline::{Env, Output, Pipeline, Request, Share};
use crate::packet::ways::{Way, Ways};
use crate::sync::Ticket;
use crate::sys::{self, Poller, TablePages};

/// Batches of one port before the others have their turn.
const BATCHES_PER_TURN: usize = 4;
/// Connections whose end is looked at between two batches.
const EXPIRY_BUDGET: usize = 1024;
/// Connections that are looked at between two batches after a server went down; a sixteenth of them
/// may be reset.
const DOWN_BUDGET: usize = 4096;
/// How long packets have their turn between two such rounds.
const DOWN_PERIOD: Duration = Duration::from_millis(1);
/// What other directors are to be told is passed on once in such a time, or when it is so much.
const TELL_PERIOD: Duration = Duration::from_millis(1);
const TELL_BYTES: usize = 16 << 10;
/// How long packets that have come in may always be waiting before connections are published all
/// the same.
const BUSY: Duration = Duration::from_millis(50);
/// Local ports that wait to be told to the programs at most.
const LOCALS_WAITING: usize = 1 << 16;
/// So many are told at a time: each takes two calls.
const LOCALS_AT_ONCE: usize = 512;
/// How long SYNs may wait to be looked at in a flood of them.
const FLOOD_PERIOD: Duration = Duration::from_millis(1);
/// Slots whose connections are withdrawn in one round of housekeeping, when all are to be.
const WITHDRAW_BUDGET: usize = 1 << 20;

/// By when every message is due, full or not.
const SYNC_AT_LAST: Duration = Duration::from_secs(2);

/// Between two rounds of housekeeping.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// What a packet worker owns.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    /// Its number.
    number: usize,
    decider: Decider,
    pipeline: Pipeline,
    output: Output,
    batch: Batch,
    ports: Ports,
    network: TakenView,
    requests: Requests,
    clients: LocalClients,
    captures: Vec<Capture>,
    /// What the keeper is told of.
    tally: Tally,
    next_housekeeping: Instant,
    /// When other directors were told of changes last.
    told: Instant,
    kernel: KernelSide,
    /// The connection table's, until they become large ones.
    pages: Option<TablePages>,
    others: Others,
    /// That of its thread, once it has one.
    priority: Option<Priority>,
}

/// What a packet worker works with: megabytes, which take their time to make.
pub(crate) struct Equipment {
    pipeline: Pipeline,
    output: Output,
    batch: Batch,
}

impl Equipment {
    pub(crate) fn new(common: Arc<Common>) -> Self {
        Self {
            pipeline: Pipeline::new(common),
            output: Output::new(),
            batch: Batch::new(),
        }
    }
}

/// What concerns the other workers.
#[derive(Default)]
struct Others {
    /// The processor that this one runs on, while they run on others.
    cpu: Option<usize>,
    /// For each of them, what is to be handed over.
    outboxes: Vec<Vec<Parcel>>,
    /// Room for what they hand over.
    taken: Vec<Parcel>,
}

/// What a worker counts for the keeper.
#[derive(Default)]
struct Tally {
    /// Resets sent since the first of the servers went down whose connections are being ended.
    resets: usize,
    /// Packets refused for a full table when the keeper was last told.
    full: u64,
}

/// What concerns the path in the kernel.
#[derive(Default)]
struct KernelSide {
    /// The path, if there is one.
    path: Option<Arc<InKernel>>,
    /// When everything that had come in was on its way, as far as it was looked at.
    quiet: Instant,
    /// As long as there are captures, nothing passes them by in the kernel.
    shown: Option<Held>,
    /// Where withdrawing all connections goes on.
    withdrawn: Option<usize>,
    /// How often something was learned of ways through tunnels, so far.
    lessons: u64,
}

impl Worker {
    /// A worker without ports; the keeper gives it some.
    pub(super) fn new(
        shared: Arc<Shared>,
        number: usize,
        shard: Shard,
        equipment: Equipment,
        requests: Requests,
        hook: Option<Box<dyn PacketHook>>,
    ) -> Self {
        let Equipment {
            pipeline,
            output,
            batch,
        } = equipment;
        Self {
            decider: Decider::new(shared.clone(), shard, hook),
            shared,
            number,
            pipeline,
            output,
            batch,
            ports: Ports::default(),
            network: TakenView::default(),
            requests,
            clients: LocalClients::default(),
            captures: Vec::new(),
            tally: Tally::default(),
            next_housekeeping: Instant::ZERO,
            told: Instant::ZERO,
            kernel: KernelSide::default(),
            pages: None,
            others: Others::default(),
            priority: None,
        }
    }

    /// Runs on this processor and no other from the start.
    pub(super) const fn run_on(&mut self, cpu: usize) {
        self.others.cpu = Some(cpu);
    }

    /// Publishes connections from now on, each after so many packets.
    pub(super) fn use_in_kernel(&mut self, in_kernel: Arc<InKernel>, after: u32) {
        self.kernel.path = Some(in_kernel);
        self.decider.shard.follow_local_ends();
        self.decider.ripe_after = after;
    }

    /// The connection table's pages, to become large ones.
    pub(super) fn use_pages(&mut self, pages: TablePages) {
        self.pages = Some(pages);
    }

    /// Makes large pages of them at once.
    #[cfg(feature = "testing")]
    pub(super) fn enlarge_pages(&mut self) {
        if let Some(pages) = self.pages.take() {
            // Without them everything is slower, no more.
            let _ = pages.enlarge(|| ());
        }
    }

    /// Processes packets until the engine is told to stop, in real time where that is asked for and
    /// permitted. Its ports are the keeper's after that: they go after what depends on them.
    pub(super) fn run(mut self, real_time: bool) {
        let shared = self.shared.clone();
        let _ended = shared.worker_runs(self.number);
        if let Some(cpu) = self.others.cpu
            && let Err(error) = sys::run_on(cpu)
        {
            warn!(
                "packet worker {} runs on any processor (sched_setaffinity to {cpu}: {error})",
                self.number
            );
            self.others.cpu = None;
        }
        self.priority = Some(Priority::new(real_time));
        let mut poller = Poller::new();
        let mut ports = Vec::new();
        let mut more = false;
        while !shared.is_stopping() {
            poller.clear();
            let wake = poller.add(self.door().mailbox.wake().as_fd());
            ports.clear();
            // In a flood of SYNs, it costs less to look for them by and by than to be woken for
            // each.
            let flood = self.pipeline.gate.sorts();
            for (port, io) in self.ports.iter() {
                let other = io.other_fd().filter(|_| !flood);
                let places = [io.fd(), other].map(|fd| fd.map(|fd| poller.add(fd)));
                ports.push((places, flood && io.other_fd().is_some(), port));
            }
            let ripe = !self.decider.ripe.is_empty();
            let until = match (ripe || more, flood) {
                (true, _) => Duration::ZERO,
                (false, true) => self.until_next_timer().min(FLOOD_PERIOD),
                (false, false) => self.until_next_timer(),
            };
            if let Err(error) = poller.wait(Some(until)) {
                error!("cannot wait for packets: {error}");
                break;
            }
            let is_ready = |places: [Option<usize>; 2]| {
                let mut places = places.into_iter().flatten();
                places.any(|place| poller.is_ready(place))
            };
            if ripe {
                let mut all = ports.iter();
                let quiet = all.all(|&(places, unseen, _)| !is_ready(places) && !unseen);
                self.publish_ripe(quiet);
            }
            more = false;
            for &(places, unseen, port) in &ports {
                if is_ready(places) || unseen {
                    more |= self.receive(port) && flood;
                }
            }
            more |= self.do_for_others(poller.is_ready(wake));
        }
        self.send_last_sync();
        self.tell_peers();
        self.say_farewell();
        shared.keep_ports(self.ports);
    }

    fn door(&self) -> &Door {
        self.shared.door(self.number)
    }

    /// Processes what other workers have handed over, does what others have posted if it was woken,
    /// and what is due; true if there may be more packets, or there is more to be told.
    fn do_for_others(&mut self, woken: bool) -> bool {
        if woken {
            // First: whatever comes while the rest is done wakes again.
            self.door().mailbox.wake().take();
        }
        let mut more = self.take_parcels();
        let started = SystemInstant::now();
        if woken {
            self.do_jobs();
        }
        self.timers();
        more |= self.tell_locals();
        self.send_sync();
        self.tell_peers_if_due();
        let took = started.elapsed();
        self.door().note_gap(took);
        self.look_at_priority(started + took);
        more
    }

    /// Takes the latest view, and does what others have posted.
    pub(super) fn do_jobs(&mut self) {
        self.take_view();
        for job in self.door().mailbox.take() {
            job(self);
            self.look_at_priority(SystemInstant::now());
        }
    }

    /// Gives up real time, if that is due, or has it again.
    fn look_at_priority(&mut self, now: SystemInstant) {
        if let Some(priority) = &mut self.priority {
            priority.look(now);
        }
    }

    fn until_next_timer(&self) -> Duration {
        let now = self.shared.now();
        if self.decider.shard.has_down() || self.decider.shard.has_review() {
            return DOWN_PERIOD;
        }
        if self.decider.shard.has_changes() {
            return TELL_PERIOD;
        }
        let next = self.decider.shard.next_wakeup();
        let next = next.map_or(self.next_housekeeping, |at| at.min(self.next_housekeeping));
        let sync = self.decider.shard.next_sync_message();
        let next = sync.map_or(next, |at| at.min(next));
        // Rounded up: a wake-up a moment too early would find nothing due.
        next.saturating_since(now) + Duration::from_millis(1)
    }

    /// Takes the latest view if there is a newer one than ours.
    fn take_view(&mut self) {
        if self.shared.generation() == self.network.view().generation {
            return;
        }
        let view = self.shared.view();
        let generation = view.generation;
        let config = view.config != self.network.view().config;
        if let Some(marks) = &view.marks {
            self.decider.take_marks(marks);
        }
        self.decider.take_intercept(&view.intercept);
        if let Some(steering) = &view.steering {
            self.pipeline.share = Some(Share {
                number: self.number,
                steering: steering.clone(),
            });
        }
        self.network.take(view);
        if config {
            self.decider.sweep();
            // A master that is to stop waits until this view was taken, and sends what it then has.
            self.send_sync();
        }
        if self.pipeline.held.has_local_clients() {
            let env = env(&self.network);
            let now = self.shared.now();
            self.pipeline
                .local_clients_intercepted(&env, now, &mut self.output);
            self.flush();
        }
        self.door().taken.store(generation, Ordering::Release);
    }

    // --- packets ---------------------------------------------------------------------------------

    /// Processes what waits on a port, but for a few batches at most; whether there may be more.
    pub(super) fn receive(&mut self, port: PortId) -> bool {
        for _ in 0..BATCHES_PER_TURN {
            // The epoch first: what is learned after it is of this one or a later one.
            self.decider.epoch = self.kernel.path.as_ref().map_or(0, |kernel| kernel.epoch());
            self.take_view();
            let started = SystemInstant::now();
            // Whether the interface is down or gone is told by the kernel's events.
            let Ok(count) = self.ports.recv(port, &mut self.batch) else {
                return false;
            };
            if count == 0 {
                return false;
            }
            let now = self.shared.now();
            self.hand_over(port, count);
            self.process_batch(port, now, started);
            if count < BATCH {
                return false;
            }
        }
        true
    }

    /// Processes what has come in on a port, or was handed over by who has received it there.
    fn process_batch(&mut self, port: PortId, now: Instant, started: SystemInstant) {
        self.comes_from(port);
        let count = self.batch.frames().len();
        if self.captures.is_empty() {
            let mut done = 0;
            while done < count {
                done += self.pipeline.process_some(
                    port,
                    &mut self.batch.frames()[done..],
                    &env(&self.network),
                    &mut self.decider,
                    now,
                    &mut self.output,
                );
                self.flush();
            }
        } else {
            self.process_shown(port, now);
        }
        let _ = self.tell_locals();
        self.batch.clear();
        let took = started.elapsed();
        self.pipeline.gate.spent(count, took, now + took);
        self.door().note_batch(took);
        self.look_at_priority(started + took);
    }

    /// As [`receive`](Self::receive), of frames that are handed in; those that would leave are
    /// counted and gone.
    #[cfg(feature = "testing")]
    pub(super) fn process(&mut self, port: PortId, frames: &mut [Frame]) -> usize {
        self.take_view();
        let started = SystemInstant::now();
        let now = self.shared.now();
        let (mut done, mut sent) = (0, 0);
        while done < frames.len() {
            done += self.pipeline.process_some(
                port,
                &mut frames[done..],
                &env(&self.network),
                &mut self.decider,
                now,
                &mut self.output,
            );
            sent += self
                .output
                .queues()
                .map(|(_, frames)| frames.len())
                .sum::<usize>();
            self.output.recycle();
        }
        self.door().note_batch(started.elapsed());
        sent
    }

    /// Processes a batch frame by frame, and shows each to those who want to see it.
    fn process_shown(&mut self, port: PortId, now: Instant) {
        let mut captures = std::mem::take(&mut self.captures);
        self.decider.tells = true;
        for at in 0..self.batch.frames().len() {
            let frame = &mut self.batch.frames()[at..=at];
            let bytes = frame[0].bytes().to_vec();
            let dropped = self.pipeline.counters.dropped;
            self.pipeline.process(
                port,
                frame,
                &env(&self.network),
                &mut self.decider,
                now,
                &mut self.output,
            );
            self.flush();
            let told = self.decider.take_told();
            let lost = FrameDrop::ALL
                .iter()
                .find(|drop| self.pipeline.counters.dropped_for(**drop) != dropped[drop.index()]);
            let (verdict, dropped) = match (&told, lost) {
                (Some((_, verdict)), None | Some(FrameDrop::Verdict | FrameDrop::Rejected)) => {
                    capture::describe(verdict)
                }
                (_, Some(drop)) => (
                    format!("dropped ({}): {}", drop.name(), drop.describe().trim()),
                    true,
                ),
                (None, None) => ("not for the director".to_owned(), false),
            };
            let shown = Shown {
                interface: self.network.view().tables.name(port),
                ethernet: self.network.port(port).is_some_and(|port| port.ethernet),
                frame: &bytes,
                verdict: &verdict,
                dropped,
            };
            let tuple = told.map(|(tuple, _)| tuple);
            captures.retain_mut(|capture| capture.show(tuple, &shown));
        }
        self.decider.tells = !captures.is_empty();
        if captures.is_empty() {
            self.kernel.shown = None;
        }
        self.captures = captures;
    }

    /// Asks for what the packet path has asked for, and sends what it has made.
    fn flush(&mut self) {
        self.heed_lessons();
        if !self.output.requests.is_empty() {
            let (clients, mut refused) = (&mut self.clients, 0);
            self.output.requests.retain(|request| {
                let fits = match request {
                    Request::InterceptLocalClient(client) => clients.add(*client),
                    _ => true,
                };
                refused += u64::from(!fits);
                fits
            });
            self.requests.refused += refused;
            self.requests.send(self.output.requests.drain(..));
        }
        for (port, frames) in self.output.queues() {
            self.ports.send(port, frames);
        }
        for (port, frames) in self.output.returned() {
            self.ports.give_back(port, frames);
        }
        for (home, port, whole) in self.output.elsewhere.drain(..) {
            let workers = self.shared.doors().len();
            self.others.outboxes.resize_with(workers, Vec::new);
            if let Some(outbox) = self.others.outboxes.get_mut(home) {
                outbox.push(Parcel::Whole(port, Box::new(whole)));
            }
        }
        self.output.recycle();
        self.post_parcels();
    }

    /// What comes next has come in on this port.
    fn comes_from(&mut self, port: PortId) {
        let view = self.network.view();
        if let Some(known) = view.tables.port(port) {
            self.decider.interface.clone_from(&known.name);
            self.decider.ignores = view.ignore_tunneled && known.decapsulates;
        }
    }

    // --- several workers -------------------------------------------------------------------------

    /// Hands over what is others' of the `count` frames that have come in, and leaves the rest in
    /// the batch.
    fn hand_over(&mut self, port: PortId, count: usize) {
        if self.pipeline.share.is_none() {
            return;
        }
        let env = env(&self.network);
        let Some(info) = env.net.port(port) else {
            return;
        };
        self.others
            .outboxes
            .resize_with(self.shared.doors().len(), Vec::new);
        let frames = self.batch.frames();
        let mut kept = 0;
        for at in 0..count {
            let Some(home) = self.pipeline.home_of(&info, &frames[at], &env) else {
                frames.swap(kept, at);
                kept += 1;
                continue;
            };
            // A copy: what a backend lends is its own again as soon as may be.
            let mut copy = Frame::from_bytes(frames[at].bytes());
            copy.offload = frames[at].offload;
            self.others.outboxes[home].push(Parcel::Frame(port, copy));
        }
        self.batch.truncate(kept);
        self.post_parcels();
    }

    /// Gives others what is theirs.
    fn post_parcels(&mut self) {
        for (door, parcels) in self.shared.doors().iter().zip(&mut self.others.outboxes) {
            if parcels.is_empty() {
                continue;
            }
            let frames = parcels
                .iter()
                .filter(|parcel| matches!(parcel, Parcel::Frame(..)))
                .count();
            let all = parcels.len();
            let (taken, wake) = door.inbox.put(self.number, parcels);
            if wake {
                door.mailbox.wake().notify();
            }
            self.pipeline.count_handed_over(frames, all - taken);
        }
    }

    /// Processes what other workers have handed over, as much at a time as one port has its turn;
    /// true if there may be more.
    pub(super) fn take_parcels(&mut self) -> bool {
        let mut parcels = std::mem::take(&mut self.others.taken);
        let more = self
            .door()
            .inbox
            .take(&mut parcels, BATCHES_PER_TURN * BATCH);
        if parcels.is_empty() {
            self.others.taken = parcels;
            return more;
        }
        self.take_view();
        let mut parcels_left = parcels.drain(..).peekable();
        let mut frames = Vec::with_capacity(BATCH);
        while let Some(parcel) = parcels_left.next() {
            let now = self.shared.now();
            match parcel {
                Parcel::Whole(port, whole) => {
                    self.comes_from(port);
                    let env = env(&self.network);
                    let (decide, out) = (&mut self.decider, &mut self.output);
                    self.pipeline.process_whole(*whole, &env, decide, now, out);
                    self.flush();
                    self.look_at_priority(SystemInstant::now());
                }
                Parcel::Frame(port, frame) => {
                    frames.push(frame);
                    while frames.len() < BATCH
                        && let Some(Parcel::Frame(_, frame)) = parcels_left.next_if(
                            |next| matches!(next, Parcel::Frame(known, _) if *known == port),
                        )
                    {
                        frames.push(frame);
                    }
                    self.process_taken(port, &mut frames, now);
                    frames.clear();
                }
            }
        }
        drop(parcels_left);
        self.others.taken = parcels;
        more
    }

    fn process_taken(&mut self, port: PortId, frames: &mut Vec<Frame>, now: Instant) {
        let started = SystemInstant::now();
        self.decider.epoch = 0;
        let count = self.batch.lend(frames.drain(..));
        self.process_batch(port, now, started);
        self.pipeline.count_taken(count);
    }

    // --- synchronisation -------------------------------------------------------------------------

    /// Gives the master what there is to send.
    fn send_sync(&mut self) {
        if let Some(at) = self.decider.shard.next_sync_message() {
            let now = self.shared.now();
            if at <= now {
                self.send_sync_until(now);
            }
        }
    }

    /// Gives the master everything, whether it is time for it or not: this worker ends.
    fn send_last_sync(&mut self) {
        self.send_sync_until(self.shared.now() + SYNC_AT_LAST);
    }

    fn send_sync_until(&mut self, now: Instant) {
        let Some(daemons) = self.shared.daemons() else {
            return;
        };
        let shard = &mut self.decider.shard;
        let max = shard.sync_messages_max();
        while let Some(message) = shard.take_sync_message(now) {
            if !daemons.outbox.push(message, max) {
                daemons.counts.queue_full.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Tells other directors what has changed.
    fn tell_peers(&mut self) {
        let shard = &mut self.decider.shard;
        if shard.has_changes()
            && let Some(peers) = self.shared.peers()
        {
            let (items, lost) = shard.take_changes();
            peers.hub.tell(&items.into(), lost);
        }
    }

    /// As [`tell_peers`](Self::tell_peers), but not after every few packets.
    fn tell_peers_if_due(&mut self) {
        let waiting = self.decider.shard.changes_len();
        if waiting == 0 {
            return;
        }
        let now = self.shared.now();
        if waiting >= TELL_BYTES || now.saturating_since(self.told) >= TELL_PERIOD {
            self.told = now;
            self.tell_peers();
        }
    }

    /// Does something with the director, after what has changed before was told.
    pub(super) fn with_decider(&mut self, job: impl FnOnce(&mut Decider)) {
        self.tell_peers();
        job(&mut self.decider);
    }

    /// Takes over connections that the backup has received.
    pub(super) fn take_over(&mut self, entries: Vec<Entry>, ticket: Ticket) {
        ticket.done(self.decider.take_over(entries, self.shared.now()));
    }

    // --- the path in the kernel ------------------------------------------------------------------

    /// Publishes the connections that are ripe for it, if what has come in before is on its way
    /// (`quiet`), so that nothing overtakes it. An engine that does not get there for long
    /// cannot keep up and loses packets: then it does not wait.
    fn publish_ripe(&mut self, quiet: bool) {
        let now = self.shared.now();
        if quiet {
            self.kernel.quiet = now;
        } else if now.saturating_since(self.kernel.quiet) < BUSY {
            return;
        }
        let ripe = std::mem::take(&mut self.decider.ripe);
        if let Some(kernel) = self.kernel.path.clone() {
            let _ = self.tell_locals();
            // The epoch first: what is learned after it is of this one or a later one.
            let epoch = kernel.epoch();
            self.take_view();
            if self.decider.shard.is_behind() {
                self.decider.sweep();
            }
            if self.publishes_none(epoch).is_none() {
                for &conn in &ripe {
                    if self
                        .decider
                        .shard
                        .is_ripe(conn, self.decider.ripe_after, epoch)
                        && self.publish(conn, epoch, &kernel, now).is_none()
                    {
                        // One that was published before the last change is not to be asked about
                        // with every packet.
                        self.decider.shard.withdraw(conn);
                    }
                }
            }
        }
        self.decider.ripe = ripe;
        self.decider.ripe.clear();
    }

    /// What a router has said of a way through a tunnel holds for packets in the kernel, too.
    fn heed_lessons(&mut self) {
        if let Some(kernel) = &self.kernel.path {
            let lessons = self.pipeline.common().tunnels().lessons();
            if lessons != self.kernel.lessons {
                self.kernel.lessons = lessons;
                kernel.changed();
            }
        }
    }

    /// Why no connection at all is published in this epoch.
    fn publishes_none(&self, epoch: u16) -> Option<WithEngine> {
        if epoch == 0 {
            return Some(match self.kernel.shown {
                Some(_) => WithEngine::Captures,
                None => WithEngine::Change,
            });
        }
        // Some of what comes out of tunnels is none of the director's business.
        let judges = self.network.view().ignore_tunneled;
        judges.then_some(WithEngine::IgnoreTunneled)
    }

    /// What a connection can be published by, if nothing but counting is to be done about its
    /// packets; else why not.
    fn what_to_publish(
        &self,
        conn: ConnId,
        kernel: &InKernel,
        now: Instant,
    ) -> Result<(Offer, Ways), WithEngine> {
        let offer = self.decider.shard.offer(conn)?;
        if self.decider.may_be_marked(&offer) {
            return Err(WithEngine::Marks);
        }
        if !kernel.has_room_for(offer.record) {
            return Err(WithEngine::Number);
        }
        if offer.local.is_some() && !kernel.has_locals() {
            return Err(WithEngine::Locals);
        }
        let tunnels = self.pipeline.common().tunnels();
        let pmtu_disc = self.network.view().pmtu_disc;
        let ways = Ways::of(&offer, &self.network, tunnels, pmtu_disc, now)?;
        Ok((offer, ways))
    }

    /// Whether packets of a connection are forwarded in the kernel, or of one that opens now
    /// (`None`); else why not.
    fn in_kernel(&self, conn: Option<ConnId>) -> Result<(), WithEngine> {
        let kernel = self.kernel.path.as_ref().ok_or(WithEngine::NotUsed)?;
        let epoch = kernel.epoch();
        if let Some(why) = self.publishes_none(epoch) {
            return Err(why);
        }
        let (decider, of) = (&self.decider, self.decider.ripe_after);
        let Some(conn) = conn else {
            return Err(WithEngine::New { of });
        };
        // Of one that is published, too: it may be closing, which begins no epoch.
        self.what_to_publish(conn, kernel, self.shared.now())?;
        Err(match decider.shard.ripeness(conn, of, epoch) {
            Ripeness::Published => return Ok(()),
            Ripeness::Stale => WithEngine::Stale,
            Ripeness::Early => WithEngine::Early {
                sent: decider.shard.packets_of(conn),
                of,
            },
            _ => WithEngine::Later { of },
        })
    }

    /// Publishes a connection, if nothing but counting is to be done about its packets.
    fn publish(
        &mut self,
        conn: ConnId,
        epoch: u16,
        kernel: &Arc<InKernel>,
        now: Instant,
    ) -> Option<()> {
        let (offer, ways) = self.what_to_publish(conn, kernel, now).ok()?;
        let view = self.network.view();
        let tables = &view.tables;
        let hop = |way: Way| {
            let out = WayOut {
                ifindex: tables.port(way.port)?.ifindex,
                mtu: way.mtu,
                to: way.to,
                from: way.from,
            };
            kernel.hop(out, now)
        };
        let to_server = hop(ways.server)?;
        let to_client = match ways.client {
            Some(way) => Some(hop(way)?),
            None => None,
        };
        let is_set = match &ways.outer {
            Some(outer) => kernel.set_tunnel(offer.record, to_server, epoch, outer),
            None => kernel.set_server(offer.record, to_server, epoch),
        };
        if !is_set {
            return None;
        }
        if let Some(local) = &offer.local
            && !kernel.set_local(local)
        {
            return None;
        }
        let published = self.decider.shard.publish(conn, epoch, to_client);
        published.then_some(())
    }

    /// Tells the programs, and whoever takes over from this engine, which local ports connections
    /// have; true if there are more to tell.
    fn tell_locals(&mut self) -> bool {
        let shard = &mut self.decider.shard;
        let waiting = shard.local_changes_len();
        if waiting == 0 {
            return false;
        }
        let Some(kernel) = &self.kernel.path else {
            return false;
        };
        match kernel.locals() {
            LocalsAre::Ready => {
                kernel.follow_locals(shard.local_changes().take(LOCALS_AT_ONCE));
                return waiting > LOCALS_AT_ONCE;
            }
            LocalsAre::Wanted => {
                // The kernel takes its time: that is for the keeper.
                let kernel = kernel.clone();
                self.shared.post_keeper(move |_| kernel.make_locals());
            }
            LocalsAre::Coming if waiting < LOCALS_WAITING => {}
            LocalsAre::Coming => {
                let forgotten = shard.local_changes().count();
                warn!(
                    "{forgotten} connections of full NAT have opened and ended before there was memory for their local ports: they do not outlive this engine"
                );
            }
            LocalsAre::Impossible => _ = shard.local_changes().count(),
        }
        false
    }

    /// Follows the clock and the epochs of the path in the kernel.
    fn keep_kernel(&mut self, now: Instant) {
        let Some(kernel) = &self.kernel.path else {
            return;
        };
        kernel.is_alive(now);
        kernel.try_homes(self.decider.shard.tries_homes());
        if kernel.is_used_up() || self.kernel.withdrawn.is_some() {
            let from = self.kernel.withdrawn.unwrap_or(0);
            self.kernel.withdrawn = self.decider.shard.withdraw_piece(from, WITHDRAW_BUDGET);
            if self.kernel.withdrawn.is_none() {
                kernel.renew();
            }
        }
    }

    // --- what the keeper says --------------------------------------------------------------------

    pub(super) fn attach(&mut self, port: PortId, io: Port) {
        self.ports.attach(port, io);
    }

    /// Closing a packet socket waits for the kernel: that is for the keeper.
    pub(super) fn detach(&mut self, port: PortId) {
        if let Some(io) = self.ports.detach(port) {
            self.shared.post_keeper(move |_| drop(io));
        }
    }

    /// Sends what waits for neighbours, or gives it up.
    pub(super) fn hear_of_neighbours(&mut self, neighbours: &[NeighbourNews]) {
        if self.pipeline.held.is_empty() {
            return;
        }
        let env = env(&self.network);
        for &NeighbourNews { port, addr, failed } in neighbours {
            let out = &mut self.output;
            if failed {
                let now = self.shared.now();
                let decider = &mut self.decider;
                self.pipeline
                    .neighbour_failed(port, addr, &env, decider, now, out);
            } else if let Some(mac) = env.net.neighbour(port, addr) {
                self.pipeline.neighbour_resolved(port, addr, mac, &env, out);
            }
        }
        self.flush();
    }

    // --- timers ----------------------------------------------------------------------------------

    pub(super) fn timers(&mut self) {
        let now = self.shared.now();
        self.decider.shard.advance(now, EXPIRY_BUDGET);
        if self.decider.shard.has_down() {
            self.end_down(now);
        }
        if self.decider.shard.has_review() {
            self.decider.review(now);
        }
        if now < self.next_housekeeping {
            return;
        }
        self.next_housekeeping = now + HOUSEKEEPING;
        self.keep_kernel(now);
        self.ports.iter_mut().for_each(|(_, io)| io.keep());
        let shard = &self.decider.shard;
        if let Some(pages) = self.pages.take_if(|_| pages::is_time(shard)) {
            self.shared.post_keeper(|_| pages::enlarge(pages));
        }
        self.decider.sweep();
        self.pipeline.expire(now);
        let ended = self.clients.take_ended(&self.decider.shard);
        if !ended.is_empty() {
            self.shared
                .post_keeper(|keeper| keeper.local_clients_ended(ended));
        }
        let full = self.decider.refused_for_room();
        if full > self.tally.full {
            let packets = full - std::mem::replace(&mut self.tally.full, full);
            let capacity = self.decider.shard.capacity();
            self.shared
                .post_keeper(move |keeper| keeper.table_was_full(packets, capacity));
        }
    }

    /// Goes on ending the connections of servers that went down.
    fn end_down(&mut self, now: Instant) {
        let resets = self.decider.shard.end_down(now, DOWN_BUDGET);
        let env = env(&self.network);
        for reset in &resets {
            self.pipeline.send_reset(reset, &env, now, &mut self.output);
        }
        self.flush();
        self.tally.resets += resets.len();
        if !self.decider.shard.has_down() {
            let sent = std::mem::take(&mut self.tally.resets);
            self.shared
                .post_keeper(move |keeper| keeper.down_has_ended(sent));
        }
    }

    fn say_farewell(&self) {
        let counters = &self.pipeline.counters;
        info!(
            received = counters.received,
            reassembled = counters.reassembled,
            sent = counters.sent,
            held = counters.held,
            left = counters.left,
            given_back = counters.given_back,
            answered = counters.answered,
            fragments = counters.fragments,
            dropped = counters.dropped_total(),
            "what became of the packets"
        );
    }
}

impl Packets for Worker {
    fn decider(&self) -> &Decider {
        &self.decider
    }

    fn explain(&mut self, question: &Question) -> Explanation {
        // As whoever publishes does.
        if self.decider.shard.is_behind() {
            self.decider.sweep();
        }
        self.decider.explain(question, |conn| self.in_kernel(conn))
    }

    fn report(&mut self) -> Report {
        let mut report = Report::of(&self.decider, &self.pipeline);
        report.unsent = self.ports.refused;
        let demoted = self.priority.as_ref().map_or(0, Priority::demoted);
        report.workers[0].demoted = demoted;
        report.workers[0].cpu = self.others.cpu.and_then(|cpu| u32::try_from(cpu).ok());
        report.unasked = self.requests.refused;
        report.unsynced = self.decider.shard.lost_sync_messages();
        for (port, io) in self.ports.iter_mut() {
            let backend = io.capabilities().name;
            let drops = io.drops();
            report.workers[0].lost += drops;
            report.ports.push((port, backend, drops));
        }
        report
    }

    fn capture(&mut self, capture: Capture) {
        // All packets are to be shown.
        let hold = || self.kernel.path.as_ref().map(InKernel::hold);
        self.kernel.shown = self.kernel.shown.take().or_else(hold);
        self.captures.push(capture);
    }
}

/// What the packet path looks at.
fn env(network: &TakenView) -> Env<'_, TakenView> {
    let view = network.view();
    Env {
        net: network,
        intercept: &view.intercept,
        pmtu_disc: view.pmtu_disc,
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use lvs_core::{Control, Family, Forwarding, Options, ServerConfig, ServiceConfig, ServiceKey};

    use super::*;
    use crate::engine::shared::{HostSide, Side};
    use crate::host::EngineSide;
    use crate::host::view::{KnownPort, Tables, View};
    use crate::io::memory::MemoryIo;
    use crate::netlink::NetState;
    use crate::packet::frame::{Arena, Offload};
    use crate::packet::intercept::Intercept;
    use crate::packet::net::PortInfo;
    use crate::packet::pipeline::Settings;
    use crate::packet::steer::Steering;
    use crate::packet::wire::Mac;

    const WORKERS: usize = 2;
    const PORT: PortId = PortId(1);
    const MAC: Mac = Mac([2; 6]);
    const SERVER_MAC: Mac = Mac([4; 6]);
    const VIRT: ([u8; 4], u16) = ([198, 51, 100, 1], 80);
    const SERVER: ([u8; 4], u16) = ([10, 0, 0, 2], 8080);

    /// A SYN from a port of a client, in a slot of a backend's own memory.
    fn syn(arena: &Arc<Arena>, slot: usize, port: u16) -> Frame {
        let builder = etherparse::PacketBuilder::ethernet2([6; 6], MAC.0)
            .ipv4([192, 0, 2, 7], VIRT.0, 64)
            .tcp(port, VIRT.1, 1, 1000)
            .syn();
        let mut bytes = Vec::with_capacity(builder.size(0));
        builder.write(&mut bytes, &[]).expect("memory has room");
        let mut lent = arena.lend(slot).expect("it is free");
        lent[64..64 + bytes.len()].copy_from_slice(&bytes);
        Frame::lent(lent, 64..64 + bytes.len(), Offload::default())
    }

    /// Two workers of one director with a service, which divide packets like this.
    struct Bed {
        shared: Arc<Shared>,
        workers: Vec<Worker>,
        queues: Vec<std::sync::mpsc::Receiver<Request>>,
        key: ServiceKey,
    }

    fn bed(steering: Option<Arc<Steering>>) -> Bed {
        let mut control = Control::new(Options {
            shards: WORKERS,
            max_connections: 256,
            ..Options::default()
        });
        let key = ServiceKey::tcp(VIRT.into());
        let config = ServiceConfig::new(Family::V4, "rr");
        control.add_service(key, config, None).expect("new");
        let server = ServerConfig::new(1, Forwarding::Nat);
        control
            .add_server(&key, SERVER.into(), &server, Instant::ZERO)
            .expect("new");
        let shards: Vec<Shard> = (0..WORKERS).map_while(|n| control.shard(n)).collect();
        let side = Side::Host(HostSide::new(WORKERS).expect("descriptors"));
        let shared = Arc::new(Shared::new(control, side, false));
        let workers = NonZeroUsize::new(WORKERS).expect("two");
        let common = Arc::new(Common::new(Settings::UNLIMITED).with_workers(workers));
        let mut queues = Vec::new();
        let workers: Vec<Worker> = (0..)
            .zip(shards)
            .map(|(number, shard)| {
                let (requests, queue) = Requests::new(shared.clone());
                queues.push(queue);
                Worker::new(
                    shared.clone(),
                    number,
                    shard,
                    Equipment::new(common.clone()),
                    requests,
                    None,
                )
            })
            .collect();

        let network = ([10, 0, 0, 0].into(), 24);
        let neighbour = (SERVER.0.into(), SERVER_MAC.0);
        let mut tables = Tables::new(NetState::of_link(7, network, neighbour));
        let port = KnownPort {
            ifindex: 7,
            name: Arc::from("test"),
            info: PortInfo {
                mac: MAC,
                mtu: 1500,
                ethernet: true,
                offload: true,
                gives_back: false,
            },
            running: true,
            decapsulates: false,
        };
        tables.set_port(PORT, port);
        tables.add_vip(VIRT.0.into());
        let intercept = Intercept::of(&shared.control(), &Intercept::default());
        shared.publish(Arc::new(View {
            generation: 1,
            tables: Arc::new(tables),
            intercept: Arc::new(intercept),
            config: 1,
            steering,
            ..View::default()
        }));
        Bed {
            shared,
            workers,
            queues,
            key,
        }
    }

    /// What has left by a worker's port: link-layer destination, destination and its port.
    fn sent(worker: &mut Worker) -> Vec<(Vec<u8>, Vec<u8>, u16)> {
        let Some((_, Port::Memory(io))) = worker.ports.iter_mut().next() else {
            panic!("it has its port")
        };
        let sent = io.take();
        let seen = sent.iter().map(|frame| {
            let bytes = frame.bytes();
            let port = u16::from_be_bytes([bytes[36], bytes[37]]);
            (bytes[..6].to_vec(), bytes[30..34].to_vec(), port)
        });
        seen.collect()
    }

    fn to_server() -> (Vec<u8>, Vec<u8>, u16) {
        (SERVER_MAC.0.to_vec(), SERVER.0.to_vec(), SERVER.1)
    }

    #[test]
    fn who_asks_is_told_why_packets_stay_with_the_engine() {
        let mut bed = bed(None);
        let worker = &mut bed.workers[0];
        worker.do_jobs();
        let mut question = Question {
            tuple: lvs_core::Tuple {
                protocol: lvs_core::Protocol::TCP,
                src: ([192, 0, 2, 7], 1000).into(),
                dst: VIRT.into(),
            },
            mark: None,
            interface: None,
        };
        let told = worker.explain(&question);
        assert_eq!(told.in_kernel, Some(false), "{told:?}");
        assert_eq!(told.in_kernel_why, WithEngine::NotUsed.to_string());
        question.tuple.dst.set_port(VIRT.1 + 1);
        let told = worker.explain(&question);
        assert_eq!(told.in_kernel, None, "nothing opens: {told:?}");
    }

    #[test]
    fn two_workers_on_one_control() {
        let Bed {
            shared,
            mut workers,
            queues,
            key,
        } = bed(None);
        assert_eq!(shared.taken(), 0);

        let arena = Arena::new(2 * WORKERS, 2048).expect("a mapping");
        for (number, worker) in workers.iter_mut().enumerate() {
            let mut io = MemoryIo::new();
            for place in 0..2 {
                let port = u16::try_from(4000 + 10 * number + place).expect("small");
                io.input.push_back(syn(&arena, 2 * number + place, port));
            }
            worker.attach(PORT, Port::Memory(io));
        }
        std::thread::scope(|scope| {
            for worker in &mut workers {
                scope.spawn(|| worker.receive(PORT));
            }
        });
        assert_eq!(shared.taken(), 1, "both have taken the view");
        assert_eq!(arena.lent(), 0, "lent frames are the backend's again");
        let reports = workers.iter_mut().map(Packets::report);
        let all = reports.reduce(Report::add).expect("two of them");
        assert_eq!((all.connections, all.capacity), (4, 512));
        let templates = all.decisions(3);
        let templates = templates.filter(|of| of.reason == "evicted_template");
        assert_eq!(templates.map(|of| of.count).collect::<Vec<_>>(), [3]);
        let control = shared.control();
        let server = control.service(&key).expect("it is there").servers()[0].clone();
        assert_eq!(server.inactive() + server.active(), 4, "counted together");
        drop(control);
        for worker in &mut workers {
            assert_eq!(sent(worker), [to_server(), to_server()]);
        }
        assert!(queues.iter().all(|queue| queue.try_recv().is_err()));
    }
    /// Whatever comes to whichever worker is decided on by its own, in order, and once.
    #[test]
    fn what_comes_to_another_worker_is_handed_over() {
        let count = NonZeroUsize::new(WORKERS).expect("two");
        let steering = Arc::new(Steering::new(count, 7, false));
        let Bed {
            shared,
            mut workers,
            key,
            ..
        } = bed(Some(steering.clone()));
        let ports = 4000..4040_u16;
        let arena = Arena::new(ports.len(), 2048).expect("a mapping");
        let mut io = MemoryIo::new();
        for (slot, port) in ports.clone().enumerate() {
            io.input.push_back(syn(&arena, slot, port));
        }
        workers[0].attach(PORT, Port::Memory(io));
        workers[1].attach(PORT, Port::Memory(MemoryIo::new()));
        workers[0].receive(PORT);
        assert_eq!(arena.lent(), 0, "what is handed over is a copy");
        let homes = |home: usize| {
            let client = std::net::IpAddr::from([192, 0, 2, 7]);
            let ports = ports.clone();
            ports
                .filter(|&port| steering.of_client(client, port) == home)
                .count()
        };
        assert!(homes(0) > 5 && homes(1) > 5);
        let of = |worker: &mut Worker| worker.report().workers[0];
        let first = of(&mut workers[0]);
        assert_eq!(first.connections, homes(0) as u64);
        assert_eq!(first.handed_over, homes(1) as u64);
        assert_eq!(of(&mut workers[1]).connections, 0, "it has not looked yet");
        workers[1].take_parcels();
        let second = of(&mut workers[1]);
        let theirs = homes(1) as u64;
        assert_eq!((second.connections, second.taken), (theirs, theirs));
        assert_eq!((second.packets, second.handed_over), (0, 0));
        for (home, worker) in workers.iter_mut().enumerate() {
            assert_eq!(sent(worker), vec![to_server(); homes(home)]);
            let counters = &worker.pipeline.counters;
            let came = counters.received + counters.reassembled + counters.taken;
            assert_eq!(came, counters.accounted(), "{counters:?}");
        }
        let control = shared.control();
        let server = control.service(&key).expect("it is there").servers()[0].clone();
        assert_eq!(server.inactive() + server.active(), 40);
    }

    /// A SYN with FIN or ACK opens a connection, as in the kernel, so it is one.
    #[test]
    fn whatever_opens_a_connection_is_a_syn_in_a_flood() {
        const ALONE: u8 = 0;
        const FIN: u8 = 1;
        const ACK: u8 = 2;
        let Bed { mut workers, .. } = bed(None);
        let worker = &mut workers[0];
        worker.attach(PORT, Port::Memory(MemoryIo::new()));
        let segment = |source: [u8; 4], port: u16, flags: u8| {
            let mut tcp = etherparse::TcpHeader::new(port, VIRT.1, 1, 1000);
            (tcp.syn, tcp.fin, tcp.ack) = (true, flags & FIN != 0, flags & ACK != 0);
            let builder = etherparse::PacketBuilder::ethernet2([6; 6], MAC.0)
                .ipv4(source, VIRT.0, 64)
                .tcp_header(tcp);
            let mut bytes = Vec::with_capacity(builder.size(0));
            builder.write(&mut bytes, &[]).expect("memory has room");
            Frame::from_bytes(&bytes)
        };
        let receive = |worker: &mut Worker, frames: Vec<Frame>| {
            let Some((_, Port::Memory(io))) = worker.ports.iter_mut().next() else {
                panic!("it has its port")
            };
            io.input.extend(frames);
            while worker.receive(PORT) {}
        };
        let client = [192, 0, 2, 7];
        let refused =
            |worker: &Worker| worker.pipeline.counters.dropped[FrameDrop::SynFlood.index()];
        receive(worker, vec![segment(client, 4000, ALONE)]);
        assert_eq!((sent(worker).len(), refused(worker)), (1, 0));
        for (nth, flags) in [ALONE, FIN, ACK].into_iter().enumerate() {
            worker.pipeline.gate.is_flooded(worker.shared.now());
            let source = |n: u16| {
                [
                    198,
                    18,
                    u8::try_from(nth).expect("small"),
                    n.to_be_bytes()[1],
                ]
            };
            let flood = (0..200).map(|n| segment(source(n), 5000 + n, flags));
            let before = refused(worker);
            receive(worker, flood.collect());
            let passed = sent(worker).len();
            assert!(passed < 100, "SYN and {flags}: {passed}");
            let counted = refused(worker);
            assert_eq!(counted - before, 200 - passed as u64, "SYN and {flags}");
            // What belongs to a connection opens none.
            receive(worker, vec![segment(client, 4000, ACK)]);
            assert_eq!(sent(worker).len(), 1, "SYN and {flags}");
            assert_eq!(refused(worker), counted, "SYN and {flags}");
        }
    }

    /// What is handed over while others' is processed is not left for the next timer.
    #[test]
    fn what_is_handed_over_meanwhile_wakes_again() {
        struct Late(Arc<Shared>, Option<Frame>);
        impl PacketHook for Late {
            fn packet(&mut self, _: &lvs_core::PacketMeta<'_>) -> super::super::HookAction {
                if let Some(frame) = self.1.take() {
                    let mut late = vec![Parcel::Frame(PORT, frame)];
                    let (taken, wake) = self.0.door(0).inbox.put(1, &mut late);
                    assert_eq!(taken, 1);
                    if wake {
                        self.0.door(0).mailbox.wake().notify();
                    }
                }
                super::super::HookAction::Continue
            }
        }
        let Bed {
            shared,
            mut workers,
            ..
        } = bed(None);
        let arena = Arena::new(2, 2048).expect("a mapping");
        let late = Frame::from_bytes(syn(&arena, 1, 4001).bytes());
        let worker = &mut workers[0];
        worker.decider.hook = Some(Box::new(Late(shared.clone(), Some(late))));
        worker.attach(PORT, Port::Memory(MemoryIo::new()));
        let first = Frame::from_bytes(syn(&arena, 0, 4000).bytes());
        let (_, wake) = shared
            .door(0)
            .inbox
            .put(1, &mut vec![Parcel::Frame(PORT, first)]);
        assert!(wake);
        shared.door(0).mailbox.wake().notify();
        let more = worker.do_for_others(true);
        assert_eq!(sent(worker).len(), 1);
        let woken = shared.door(0).mailbox.wake().take();
        assert!(more || woken, "it sleeps with packets in its inbox");
        worker.do_for_others(true);
        assert_eq!(sent(worker).len(), 1);
    }

    /// A round is as long as all that waits takes; real time ends within it.
    #[test]
    fn a_long_round_leaves_real_time_between_any_two_pieces() {
        use super::super::priority::Pretended;

        let Bed { mut workers, .. } = bed(None);
        let [worker, ..] = &mut *workers else {
            panic!("there are two")
        };
        let mut io = MemoryIo::new();
        let arena = Arena::new(3 * BATCH, 2048).expect("a mapping");
        for slot in 0..3 * BATCH {
            io.input.push_back(syn(&arena, slot, 4000));
        }
        worker.attach(PORT, Port::Memory(io));
        let busy = |worker: &mut Worker| {
            let thread = Pretended::default();
            let hour = Duration::from_secs(3600);
            let past = SystemInstant::now() - hour;
            worker.priority = Some(Priority::of(Box::new(thread.clone()), true, past));
            assert!(thread.is_real_time());
            thread.compute(hour);
            thread
        };

        let thread = busy(worker);
        worker.receive(PORT);
        assert!(!thread.is_real_time(), "batches of a port");

        let thread = busy(worker);
        let frame = Frame::from_bytes(syn(&arena, 0, 4000).bytes());
        let mut parcels = vec![Parcel::Frame(PORT, frame)];
        worker.door().inbox.put(1, &mut parcels);
        worker.take_parcels();
        assert!(!thread.is_real_time(), "what is handed over");

        let thread = busy(worker);
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        for _ in 0..2 {
            let (seen, thread) = (seen.clone(), thread.clone());
            worker.door().mailbox.post(move |_| {
                let mut seen = seen.lock().expect("one thread");
                seen.push(thread.is_real_time());
            });
        }
        worker.do_jobs();
        assert_eq!(*seen.lock().expect("one thread"), [true, false], "jobs");

        let thread = busy(worker);
        worker.do_for_others(false);
        assert!(!thread.is_real_time(), "timers");
        assert_eq!(worker.report().workers[0].demoted, 1);
    }

    /// A flood for one worker takes no room from what others have for it, and holds nobody up.
    #[test]
    fn a_worker_that_does_not_look_costs_its_own_packets_only() {
        let count = NonZeroUsize::new(WORKERS).expect("two");
        let steering = Arc::new(Steering::new(count, 7, false));
        let Bed { mut workers, .. } = bed(Some(steering.clone()));
        let client = std::net::IpAddr::from([192, 0, 2, 7]);
        let of = |home: usize| {
            let port = (1024..).find(|&port| steering.of_client(client, port) == home);
            port.expect("half of them are")
        };
        let (own, others) = (of(0), of(1));
        workers[0].attach(PORT, Port::Memory(MemoryIo::new()));
        let rounds = super::super::inbox::PARCELS_MAX / 32 + 4;
        for _ in 0..rounds {
            let arena = Arena::new(33, 2048).expect("a mapping");
            let Some((_, Port::Memory(io))) = workers[0].ports.iter_mut().next() else {
                panic!("it has its port")
            };
            for slot in 0..32 {
                io.input.push_back(syn(&arena, slot, others));
            }
            io.input.push_back(syn(&arena, 32, own));
            while workers[0].receive(PORT) {}
        }
        let seen = workers[0].report().workers[0];
        assert_eq!(seen.handed_over, super::super::inbox::PARCELS_MAX as u64);
        assert_eq!(seen.busy, (rounds * 32) as u64 - seen.handed_over);
        assert_eq!(sent(&mut workers[0]).len(), rounds, "its own all left");
        let counters = &workers[0].pipeline.counters;
        assert_eq!(counters.received, counters.accounted(), "{counters:?}");
    }
}

//! A packet worker: a thread with its own shard of the connections and its own sockets. The
//! [keeper](crate::host::keeper) makes all changes of the host, and publishes snapshots for the
//! workers.
//!
//! ```text
//! wait ─▶ each port: take the latest snapshot, receive a batch ─▶ pipeline ─▶ requests, send ─▶ jobs ─▶ timers ─▶ wait
//! ```

mod kernel;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant as SystemInstant};

use lvs_core::api::Forwarder;
use lvs_core::explain::Explanation;
use lvs_core::sync::wire::Entry;
use lvs_core::{Instant, Reset, Shard};
use tracing::{error, info, warn};

use self::kernel::KernelSide;
use super::capture::{self, Capture, Shown};
use super::context::Context;
use super::decider::{Decider, Question};
use super::hook::PacketHook;
use super::inbox::Parcel;
use super::local_clients::LocalClients;
use super::network::TakenView;
use super::pages;
use super::priority::Priority;
use super::report::Report;
use super::threads::{Requests, Threads, WorkerLink};
use crate::io::BATCH;
use crate::io::port::{Batch, Port, Ports};
use crate::sync::Ticket;
use lvs_packet::common::Common;
use lvs_packet::drop::FrameDrop;
use lvs_packet::frame::Frame;
use lvs_packet::net::{Net, PortId};
use lvs_packet::pipeline::{Env, Output, Pipeline, Request, Share};
use lvs_sys::{Poller, TablePages};

/// Number of batches that are read from one port before the next port is read.
const BATCHES_PER_TURN: usize = 4;
/// Number of connections that are checked for expiry between two batches.
const EXPIRY_BUDGET: usize = 1024;
/// Number of slots that are examined between two batches after a server went down. At most a
/// sixteenth of as many connections are closed.
const DOWN_BUDGET: usize = 4096;
/// Interval between two checks of connections after a server went down.
const DOWN_PERIOD: Duration = Duration::from_millis(1);
/// Longest time that changed connections wait before they are queued for peers.
const QUEUE_PERIOD: Duration = Duration::from_millis(1);
const QUEUE_BYTES: usize = 16 << 10;
/// Longest time that SYNs wait during a SYN flood.
const FLOOD_PERIOD: Duration = Duration::from_millis(1);

/// All synchronisation messages of a worker are due within this time: a stopping worker sends them
/// at once.
const SYNC_AT_LAST: Duration = Duration::from_secs(2);

/// Interval between two rounds of housekeeping.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

pub(crate) struct Worker {
    context: Arc<Context>,
    threads: Arc<Threads<Self>>,
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
    logged: Logged,
    next_housekeeping: Instant,
    /// Time at which [`queue_changes_if_due`](Self::queue_changes_if_due) last queued changes.
    reported: Instant,
    kernel: KernelSide,
    pages: Option<TablePages>,
    others: Others,
    /// Controls the scheduling of the thread, once it is running.
    priority: Option<Priority>,
}

/// The pipeline and the buffers of a packet worker. They take megabytes of memory, so creating them
/// takes time.
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

/// A worker's part of the exchange of packets with other workers.
#[derive(Default)]
struct Others {
    /// The processor to which this worker is bound; `None` if it may run on any processor.
    cpu: Option<usize>,
    /// For each other worker, the packets for it.
    outboxes: Vec<Vec<Parcel>>,
    /// Packets from other workers.
    taken: Vec<Parcel>,
}

/// Counters of a worker that the keeper logs.
#[derive(Default)]
struct Logged {
    /// Number of TCP resets sent since a server went down.
    resets: usize,
    /// Number of packets refused because the table was full, at the last report to the keeper.
    full: u64,
}

impl Worker {
    /// Creates a worker without ports, which the keeper adds later.
    pub(super) fn new(
        context: Arc<Context>,
        threads: Arc<Threads<Self>>,
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
            decider: Decider::new(context.clone(), shard, hook),
            context,
            threads,
            number,
            pipeline,
            output,
            batch,
            ports: Ports::default(),
            network: TakenView::default(),
            requests,
            clients: LocalClients::default(),
            captures: Vec::new(),
            logged: Logged::default(),
            next_housekeeping: Instant::ZERO,
            reported: Instant::ZERO,
            kernel: KernelSide::default(),
            pages: None,
            others: Others::default(),
            priority: None,
        }
    }

    /// Selects the processor to which the worker pins itself.
    pub(super) const fn run_on(&mut self, cpu: usize) {
        self.others.cpu = Some(cpu);
    }

    /// Stores the pages of the connection table, to replace them by large pages later.
    pub(super) fn use_pages(&mut self, pages: TablePages) {
        self.pages = Some(pages);
    }

    /// Converts the pages of the connection table to large pages.
    #[cfg(feature = "testing")]
    pub(super) fn enlarge_pages(&mut self) {
        if let Some(pages) = self.pages.take() {
            // Without large pages, look-ups are slower, but work.
            let _ = pages.enlarge(|| ());
        }
    }

    /// Processes packets until the dataplane stops, or until the worker cannot wait for packets;
    /// with real-time scheduling if requested and permitted. Then queues the remaining messages for
    /// the synchronisation master and the peers, and passes its ports to the keeper, which closes
    /// them after everything that depends on them.
    pub(super) fn run(mut self, real_time: bool) {
        let (context, threads) = (self.context.clone(), self.threads.clone());
        let _ended = threads.worker_runs(self.number);
        if let Some(cpu) = self.others.cpu
            && let Err(error) = lvs_sys::run_on(cpu)
        {
            warn!(
                "packet worker {} is not bound to processor {cpu} (sched_setaffinity: {error}): it runs on any processor",
                self.number
            );
            self.others.cpu = None;
        }
        self.priority = Some(Priority::new(real_time));
        let mut poller = Poller::new();
        let mut ports = Vec::new();
        let mut more = false;
        while !context.is_stopping() {
            poller.clear();
            let wake = poller.add(self.link().mailbox.wake().as_fd());
            ports.clear();
            // During a flood, polling for SYNs costs less than a wake-up for each SYN.
            let flood = self.pipeline.syn_limiter.sorts();
            for (port, io) in self.ports.iter() {
                let other = io.other_fd().filter(|_| !flood);
                let places = [io.fd(), other].map(|fd| fd.map(|fd| poller.add(fd)));
                ports.push((places, flood && io.other_fd().is_some(), port));
            }
            let due = !self.decider.due.is_empty();
            let until = match (due || more, flood) {
                (true, _) => Duration::ZERO,
                (false, true) => self.until_next_timer().min(FLOOD_PERIOD),
                (false, false) => self.until_next_timer(),
            };
            if let Err(error) = poller.wait(Some(until)) {
                error!("packet worker stops: it cannot wait for packets: {error}");
                break;
            }
            let is_ready = |places: [Option<usize>; 2]| {
                let mut places = places.into_iter().flatten();
                places.any(|place| poller.is_ready(place))
            };
            if due {
                let mut all = ports.iter();
                let quiet = all.all(|&(places, unseen, _)| !is_ready(places) && !unseen);
                self.offload_due(quiet);
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
        self.queue_changes();
        self.say_farewell();
        threads.keep_ports(self.ports);
    }

    fn link(&self) -> &WorkerLink<Self> {
        self.threads.worker(self.number)
    }

    /// Processes packets from other workers, jobs if `woken`, and due timers. Returns true if more
    /// packets or local ports may be waiting.
    fn do_for_others(&mut self, woken: bool) -> bool {
        if woken {
            // Reset first: a later request wakes the worker again.
            self.link().mailbox.wake().take();
        }
        let mut more = self.take_parcels();
        let started = SystemInstant::now();
        if woken {
            self.do_jobs();
        }
        self.timers();
        more |= self.write_local_ports();
        self.send_sync();
        self.queue_changes_if_due();
        let took = started.elapsed();
        self.look_at_priority(started + took);
        more
    }

    /// Switches to the latest snapshot, and runs the posted jobs.
    pub(super) fn do_jobs(&mut self) {
        self.take_view();
        for job in self.link().mailbox.take() {
            job(self);
            self.look_at_priority(SystemInstant::now());
        }
    }

    /// Enters or leaves real-time scheduling, if a decision is due.
    fn look_at_priority(&mut self, now: SystemInstant) {
        if let Some(priority) = &mut self.priority {
            priority.look(now);
        }
    }

    fn until_next_timer(&self) -> Duration {
        let now = self.context.now();
        if self.decider.shard.has_down() {
            return DOWN_PERIOD;
        }
        if self.decider.shard.has_changes() {
            return QUEUE_PERIOD;
        }
        let next = self.decider.shard.next_wakeup();
        let next = next.map_or(self.next_housekeeping, |at| at.min(self.next_housekeeping));
        let next = self.kernel.synced.map_or(next, |(_, at)| at.min(next));
        let sync = self.decider.shard.next_sync_message();
        let next = sync.map_or(next, |at| at.min(next));
        // Rounded up: after an early wake-up, no timer would be due.
        next.saturating_since(now) + Duration::from_millis(1)
    }

    /// Switches to the latest snapshot, if it is newer, and sends the packets that have waited for
    /// it.
    fn take_view(&mut self) {
        if self.context.generation() == self.network.view().generation {
            return;
        }
        let view = self.context.view();
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
            // A stopping sync master waits until all workers use this snapshot, and then sends
            // their messages.
            self.send_sync();
        }
        if !self.pipeline.held.is_empty() {
            // The waiting packets leave before a packet that arrives later.
            let env = env(&self.network);
            let now = self.context.now();
            let out = &mut self.output;
            self.pipeline.local_clients_intercepted(&env, now, out);
            self.pipeline.neighbours_resolved(&env, out);
            self.flush();
        }
        self.link().taken.store(generation, Ordering::Release);
    }

    // --- packets ---------------------------------------------------------------------------------

    /// Processes a few batches of received frames of a port. Returns true if more may be waiting.
    pub(super) fn receive(&mut self, port: PortId) -> bool {
        for _ in 0..BATCHES_PER_TURN {
            // Read the epoch first: a change after this invalidates offloads by older routes.
            self.decider.epoch = self.kernel.path.as_ref().map_or(0, |kernel| kernel.epoch());
            self.take_view();
            let started = SystemInstant::now();
            // The error is ignored: netlink reports that the interface is down or removed.
            let Ok(count) = self.ports.recv(port, &mut self.batch) else {
                return false;
            };
            if count == 0 {
                return false;
            }
            let now = self.context.now();
            self.hand_over(port, count);
            self.process_batch(port, now, started);
            if count < BATCH {
                return false;
            }
        }
        true
    }

    /// Processes frames that this worker or another one has received on a port.
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
        let _ = self.write_local_ports();
        self.batch.clear();
        let took = started.elapsed();
        self.pipeline.syn_limiter.spent(count, took, now + took);
        self.look_at_priority(started + took);
    }

    /// Processes frames as if they had been received on `port`. Returns the number of frames that
    /// would be sent; these are dropped.
    #[cfg(feature = "testing")]
    pub(super) fn process(&mut self, port: PortId, frames: &mut [Frame]) -> usize {
        self.take_view();
        let now = self.context.now();
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
        sent
    }

    /// Processes a batch one frame at a time, and passes each frame to the captures.
    fn process_shown(&mut self, port: PortId, now: Instant) {
        let mut captures = std::mem::take(&mut self.captures);
        self.decider.keeps_decisions = true;
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
            let decision = self.decider.take_decision();
            let lost = FrameDrop::ALL
                .iter()
                .find(|drop| self.pipeline.counters.dropped_for(**drop) != dropped[drop.index()]);
            let (verdict, dropped) = match (&decision, lost) {
                (Some((_, verdict)), None | Some(FrameDrop::Verdict | FrameDrop::Rejected)) => {
                    capture::describe(verdict)
                }
                (_, Some(drop)) => (
                    format!("dropped ({}): {}", drop.name(), drop.describe()),
                    true,
                ),
                (None, None) => ("without a decision of the director, such as ARP or a fragment of an incomplete datagram".to_owned(), false),
            };
            let shown = Shown {
                interface: self.network.view().tables.name(port),
                ethernet: self.network.port(port).is_some_and(|port| port.ethernet),
                frame: &bytes,
                verdict: &verdict,
                dropped,
            };
            let tuple = decision.map(|(tuple, _)| tuple);
            captures.retain_mut(|capture| capture.show(tuple, &shown));
        }
        self.decider.keeps_decisions = !captures.is_empty();
        self.captures = captures;
    }

    /// Passes requests to the keeper, sends frames or returns them to the host, and passes packets
    /// to the workers that own their connections. A request for a local client is dropped and
    /// counted if the list of local clients is full.
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
            self.threads.wake_keeper();
        }
        for (port, frames) in self.output.queues() {
            self.ports.send(port, frames);
        }
        for (port, frames) in self.output.returned() {
            self.ports.give_back(port, frames);
        }
        for (home, port, whole) in self.output.elsewhere.drain(..) {
            let workers = self.threads.workers().len();
            self.others.outboxes.resize_with(workers, Vec::new);
            if let Some(outbox) = self.others.outboxes.get_mut(home) {
                outbox.push(Parcel::Whole(port, Box::new(whole)));
            }
        }
        self.output.recycle();
        self.post_parcels();
    }

    /// Sets the interface on which the next frames arrived, and whether the decider ignores packets
    /// from it.
    fn comes_from(&mut self, port: PortId) {
        let view = self.network.view();
        if let Some(known) = view.tables.port(port) {
            self.decider.interface.clone_from(&known.name);
            self.decider.ignores = view.ignore_tunneled && known.decapsulates;
        }
    }

    // --- several workers -------------------------------------------------------------------------

    /// Passes copies of the frames that belong to other workers to these workers. The remaining
    /// frames stay in the batch. `count` is the number of received frames.
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
            .resize_with(self.threads.workers().len(), Vec::new);
        let frames = self.batch.frames();
        let mut kept = 0;
        for at in 0..count {
            let Some(home) = self.pipeline.home_of(&info, &frames[at], &env) else {
                frames.swap(kept, at);
                kept += 1;
                continue;
            };
            // Copied, so that the slot returns to the backend soon.
            let mut copy = Frame::from_bytes(frames[at].bytes());
            copy.offload = frames[at].offload;
            self.others.outboxes[home].push(Parcel::Frame(port, copy));
        }
        self.batch.truncate(kept);
        self.post_parcels();
    }

    /// Passes the queued packets to the other workers. Packets for which a worker's inbox has no
    /// room are dropped. Counts the passed and the dropped packets.
    fn post_parcels(&mut self) {
        let links = self.threads.workers().iter();
        for (link, parcels) in links.zip(&mut self.others.outboxes) {
            if parcels.is_empty() {
                continue;
            }
            let frames = parcels
                .iter()
                .filter(|parcel| matches!(parcel, Parcel::Frame(..)))
                .count();
            let all = parcels.len();
            let (taken, wake) = link.inbox.put(self.number, parcels);
            if wake {
                link.mailbox.wake().notify();
            }
            self.pipeline.count_handed_over(frames, all - taken);
        }
    }

    /// Processes packets from other workers, about as many as [`BATCHES_PER_TURN`] batches. Returns
    /// true if more may be waiting.
    pub(super) fn take_parcels(&mut self) -> bool {
        let mut parcels = std::mem::take(&mut self.others.taken);
        let more = self
            .link()
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
            let now = self.context.now();
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

    /// Passes due messages to the synchronisation master. Messages for which the master's queue has
    /// no room are dropped and counted.
    fn send_sync(&mut self) {
        if let Some(at) = self.decider.shard.next_sync_message() {
            let now = self.context.now();
            if at <= now {
                self.send_sync_until(now);
            }
        }
    }

    /// Passes all messages to the synchronisation master at once, because this worker stops.
    fn send_last_sync(&mut self) {
        self.send_sync_until(self.context.now() + SYNC_AT_LAST);
    }

    fn send_sync_until(&mut self, now: Instant) {
        let daemons = &self.threads.daemons;
        let shard = &mut self.decider.shard;
        let max = shard.sync_messages_max();
        while let Some(message) = shard.take_sync_message(now) {
            if !daemons.outbox.push(message, max) {
                daemons.counts.queue_full.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Queues changed connections for the peers.
    fn queue_changes(&mut self) {
        let shard = &mut self.decider.shard;
        if shard.has_changes() {
            let (items, lost) = shard.take_changes();
            self.threads.hub.tell(self.number, &items.into(), lost);
        }
    }

    /// As [`queue_changes`](Self::queue_changes), but only if [`QUEUE_PERIOD`] has passed since the
    /// last call that queued changes, or [`QUEUE_BYTES`] are waiting.
    fn queue_changes_if_due(&mut self) {
        let waiting = self.decider.shard.changes_len();
        if waiting == 0 {
            return;
        }
        let now = self.context.now();
        if waiting >= QUEUE_BYTES || now.saturating_since(self.reported) >= QUEUE_PERIOD {
            self.reported = now;
            self.queue_changes();
        }
    }

    /// Runs a job on the decider, after the earlier changes are queued for the peers.
    pub(super) fn with_decider<T>(&mut self, job: impl FnOnce(&mut Decider) -> T) -> T {
        self.queue_changes();
        job(&mut self.decider)
    }

    /// Takes over connections that the synchronisation backup has received.
    pub(super) fn take_over(&mut self, entries: Vec<Entry>, ticket: Ticket) {
        ticket.done(self.decider.take_over(entries, self.context.now()));
    }

    // --- reports of the keeper -------------------------------------------------------------------

    pub(super) fn attach(&mut self, port: PortId, io: Port) {
        self.ports.attach(port, io);
    }

    /// Removes a port, and passes it to the keeper, because closing a packet socket waits for the
    /// kernel.
    pub(super) fn detach(&mut self, port: PortId) {
        if let Some(io) = self.ports.detach(port) {
            self.threads.post_keeper(move |_| drop(io));
        }
    }

    /// Drops the packets that wait for these neighbours, which do not answer, and sends ICMP errors
    /// to the senders.
    pub(super) fn give_up_neighbours(&mut self, neighbours: &[(PortId, IpAddr)]) {
        if self.pipeline.held.is_empty() {
            return;
        }
        let env = env(&self.network);
        let now = self.context.now();
        for &(port, addr) in neighbours {
            let (decider, out) = (&mut self.decider, &mut self.output);
            self.pipeline
                .neighbour_failed(port, addr, &env, decider, now, out);
        }
        self.flush();
    }

    // --- timers ----------------------------------------------------------------------------------

    pub(super) fn timers(&mut self) {
        let now = self.context.now();
        self.decider.shard.advance(now, EXPIRY_BUDGET);
        if self.decider.shard.has_down() {
            self.end_down(now);
        }
        let late = self.decider.shard.take_late_resets();
        self.send_resets(&late, now);
        self.sync_offloaded(now);
        if now < self.next_housekeeping {
            return;
        }
        self.next_housekeeping = now + HOUSEKEEPING;
        self.keep_kernel(now);
        self.ports.iter_mut().for_each(|(_, io)| io.keep());
        let shard = &self.decider.shard;
        if let Some(pages) = self.pages.take_if(|_| pages::is_time(shard)) {
            self.threads.post_keeper(|_| pages::enlarge(pages));
        }
        self.decider.sweep();
        self.pipeline.expire(now);
        self.count_drops(now);
        let ended = self.clients.take_ended(&self.decider.shard);
        if !ended.is_empty() {
            self.threads
                .post_keeper(|keeper| keeper.local_clients_ended(ended));
        }
        let full = self.decider.refused_for_room();
        if full > self.logged.full {
            let packets = full - std::mem::replace(&mut self.logged.full, full);
            let capacity = self.decider.shard.capacity();
            self.threads
                .post_keeper(move |keeper| keeper.table_was_full(packets, capacity));
        }
    }

    /// Adds the dropped packets of connections to the counters of their services.
    fn count_drops(&mut self, now: Instant) {
        for drops in [
            &mut self.decider.shard.drops,
            &mut self.pipeline.drops,
            &mut self.pipeline.held.drops,
        ] {
            while !drops.is_empty() {
                self.context.control_for_packet().count_drops(drops, now);
            }
        }
    }

    /// Continues to remove the connections of servers that went down, sends their TCP resets, and
    /// reports the end to the keeper.
    fn end_down(&mut self, now: Instant) {
        let resets = self.decider.shard.end_down(now, DOWN_BUDGET);
        self.send_resets(&resets, now);
        self.logged.resets += resets.len();
        if !self.decider.shard.has_down() {
            let sent = std::mem::take(&mut self.logged.resets);
            self.threads
                .post_keeper(move |keeper| keeper.down_has_ended(sent));
        }
    }

    fn send_resets(&mut self, resets: &[Reset], now: Instant) {
        if resets.is_empty() {
            return;
        }
        let env = env(&self.network);
        for reset in resets {
            self.pipeline.send_reset(reset, &env, now, &mut self.output);
        }
        self.flush();
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
            "counts of packets by fate"
        );
    }

    // --- requests of the control socket ----------------------------------------------------------

    pub(super) const fn decider(&self) -> &Decider {
        &self.decider
    }

    /// Explains the fate of a packet, without side effects.
    pub(super) fn explain(&mut self, question: &Question) -> Explanation {
        // `offload_due` also updates the shard first.
        if self.decider.shard.is_behind() {
            self.decider.sweep();
        }
        let mut explanation = self.decider.explain(question, |conn| self.fast_path(conn));
        // The decision may be to forward a packet that cannot be sent.
        let ends = explanation.server.map(|server| ("server", server.ip()));
        let ends = ends.map(|server| [server, ("client", question.tuple.src.ip())]);
        let tables = &self.network.view().tables;
        for (end, addr) in ends.into_iter().flatten() {
            if !tables.state.is_local(addr) && tables.route(addr).is_none() {
                let why = tables.why_no_route(addr);
                explanation.verdict.push_str(&format!(
                    "; but packets to the {end} {addr} are dropped ({}): {why}",
                    why.reason()
                ));
            }
        }
        let (src, dst) = (question.tuple.src.ip(), question.tuple.dst.ip());
        let is_own = |addr| tables.state.is_local(addr);
        if explanation.service.is_some()
            && is_own(src)
            && is_own(dst)
            && tables.port(PortId::LOCAL).is_none()
        {
            explanation.verdict.push_str(&format!(
                "; but packets from this host to {dst} reach the host's own ports: the dataplane receives them only with Linux 6.6 or newer, CAP_BPF and packet sockets (not --backend tun)"
            ));
        }
        explanation
    }

    /// The host that forwarded the latest indirect reply of `server` to a through-VIP health check,
    /// even if later replies arrived directly. `None` if no indirect reply of the server is stored,
    /// or the interface of that reply was removed.
    pub(super) fn forwarder_of(&self, server: IpAddr) -> Option<Forwarder> {
        let last = self.pipeline.common().return_paths.find(server)?;
        let tables = &self.network.view().tables;
        let neighbours = &tables.state;
        let ifindex = tables.ifindex(last.port)?;
        let address = neighbours.address_of(ifindex, last.sender.0, |host| *host == server);
        let age = self.context.now().saturating_since(last.at);
        Some(Forwarder {
            mac: last.sender.to_string(),
            address,
            interface: tables.name(last.port).to_owned(),
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        })
    }

    pub(super) fn report(&mut self) -> Report {
        let mut report = Report::of(&self.decider, &self.pipeline);
        report.unsent = self.ports.refused;
        let demoted = self.priority.as_ref().map_or(0, Priority::demoted);
        report.workers[0].demoted = demoted;
        report.workers[0].cpu = self.others.cpu.and_then(|cpu| u32::try_from(cpu).ok());
        report.unasked = self.requests.refused;
        report.unsynced = self.decider.shard.lost_sync_messages();
        for (port, io) in self.ports.iter_mut() {
            let backend = io.backend();
            let drops = io.drops();
            report.workers[0].lost += drops;
            report.ports.push((port, backend, drops));
        }
        report
    }

    /// Copies the packets that match the filter of `capture` to its reader from now on.
    pub(super) fn capture(&mut self, capture: Capture) {
        self.captures.push(capture);
        // The new epoch evicts all connections; those without captured packets are offloaded again.
        if let Some(fast_path) = &self.kernel.path {
            fast_path.changed();
        }
    }
}

/// The network and the intercepted traffic of a snapshot, as the pipeline needs them.
fn env(network: &TakenView) -> Env<'_, TakenView> {
    let view = network.view();
    Env {
        net: network,
        intercept: &view.intercept,
        pmtu_disc: view.pmtu_disc,
    }
}

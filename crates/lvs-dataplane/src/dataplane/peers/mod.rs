//! Replication between peers over TCP. Each director sends its connections to its peers: first all
//! of them (full sync), then the changes (updates). A restarted director can therefore get the
//! connections of its peers before it receives packets. [`lvs_core::sync::bulk`] selects the
//! connections to send; this module has keys, sessions and threads. In a session, the *sender*
//! sends connections, and the *receiver* stores them.
//!
//! ```text
//! lvs-worker-N ─ changes, pieces of a walk, digests ─▶ Outgoing, bounded ─▶ lvs-peer-sends ─▶ peer
//! peer ─▶ lvs-peer-gets ─ portions, few at a time ─▶ mailbox of lvs-worker-N
//! ```
//!
//! One session replicates the connections of all packet workers. A walk visits one worker's table
//! after the other. A digest is the sum over all workers, and describes exactly the items that
//! [`hub`](super::hub) has queued before it. The receiver passes each connection to the worker that
//! receives its packets.
//!
//! Each direction has its own TCP connection: a director connects to each of its peers in order to
//! receive from it.

mod accept;
mod frame;
mod receiver;
mod sender;
mod tables;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lvs_api::directors;
use lvs_core::api::{PeerInfo, PeerStanding, SyncState, TablesInfo, Waiting};
use lvs_core::replication::ItemResults;
use lvs_core::sync::bulk::{Digest, PEERS_MAX};
use lvs_core::sync::services::ServiceDigests;
use tracing::{info, warn};

use self::frame::{FrameError, Key};
use super::config::PeersConfig;
use super::context::Context;
use super::decider::Decider;
use super::hub::Hub;
use super::threads::Threads;
use super::worker::Worker;
use lvs_sys::EventFd;
use lvs_sys::lock;
use lvs_sys::random;

/// Time limit for an answer of a packet worker.
const WORKER_TIMEOUT: Duration = Duration::from_secs(10);

/// A peer is silent if it has sent no digest for this time. It sends one every 2 seconds.
const SILENT: Duration = Duration::from_secs(4);
/// Time that a stopping director waits for its peers to read its last messages.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Longest time until a thread notices that its connection was closed.
const SHORT: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(in crate::dataplane) struct Peers {
    context: Weak<Context>,
    workers: Weak<Threads<Worker>>,
    key: Key,
    /// A random number that identifies this run of the dataplane.
    identity: [u8; 16],
    /// The keys of the hash function of this director's digests.
    keys: [u64; 2],
    listen: SocketAddr,
    /// Whether the socket accepts peers; false while the host lacks the listening address.
    listens: AtomicBool,
    wait: Duration,
    alarm: Duration,
    tables: Mutex<tables::Own>,
    started: Instant,
    peers: Vec<Arc<Peer>>,
    hub: Arc<Hub>,
    counts: Counts,
    ready: AtomicBool,
    stop: AtomicBool,
    wake: EventFd,
    sleeping: (Mutex<()>, Condvar),
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Counts {
    items_sent: AtomicU64,
    bytes_sent: AtomicU64,
    items_received: AtomicU64,
    taken: AtomicU64,
    ended: AtomicU64,
    kept: AtomicU64,
    nonsense: AtomicU64,
    no_room: AtomicU64,
    repairs: AtomicU64,
    full_syncs: AtomicU64,
    refused_address: AtomicU64,
    refused_places: AtomicU64,
    refused_key: AtomicU64,
    forged: AtomicU64,
    malformed: AtomicU64,
}

/// The position of a walk over the connection tables of all packet workers: a worker, and a slot of
/// its table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    worker: usize,
    from: usize,
}

#[derive(Debug)]
struct Peer {
    number: usize,
    address: SocketAddr,
    state: Mutex<State>,
    tables: Mutex<tables::Comparison>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    step: Step,
    /// Identifies the run of the peer from which this director may have borrowed connections;
    /// `None` if it has borrowed none.
    identity: Option<[u8; 16]>,
    stream: Option<TcpStream>,
    /// Whether this director may have borrowed connections of this peer.
    lends: bool,
    trouble: Option<(Trouble, String)>,
    /// Number of connections received so far in the full sync.
    received: u64,
    bulk: Option<(u64, Duration, Instant)>,
    /// Whether, in this session, the borrowed connections were compared with a digest of the peer.
    compared: bool,
    /// Whether the borrowed connections still differ from the peer's digest after several repairs.
    given_up: bool,
    replicated: u64,
    missing: u64,
    last_message: Option<Instant>,
    /// The last time at which the peer was in sync; `None` if it never was.
    in_step: Option<Instant>,
    /// Whether a warning was logged that the peer is not in sync.
    warned: bool,
    /// The stream of the session that sends to the peer; `sending_streams` counts these sessions.
    sending: Option<TcpStream>,
    sending_streams: u64,
    /// Time of the last log line about a connection from the peer's address without the correct
    /// key.
    complained: Option<Instant>,
    greeting: usize,
    sent: Option<(u64, Instant)>,
    lag: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Step {
    /// The peer is not connected.
    #[default]
    Away,
    /// The peer sends the full sync.
    Bulk,
    /// The peer has sent the full sync, and sends updates.
    Follows,
}

/// Why no connections arrive from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// The peer cannot be reached, or has closed the connection.
    Away,
    /// The peer answers, but the handshake or the protocol fails.
    Refused,
}

impl Peers {
    /// Starts the sessions with the peers.
    ///
    /// # Errors
    /// The reason, as text.
    pub(super) fn start(
        config: &PeersConfig,
        context: &Arc<Context>,
        threads: &Arc<Threads<Worker>>,
    ) -> Result<Arc<Self>, String> {
        let mut addresses = Vec::new();
        for &peer in &config.peers {
            let peer = directors::with_port(peer);
            if addresses
                .iter()
                .any(|other: &SocketAddr| other.ip() == peer.ip())
            {
                return Err(format!("the peer {} is named twice", peer.ip()));
            }
            addresses.push(peer);
        }
        if addresses.len() > PEERS_MAX {
            let count = addresses.len();
            return Err(format!(
                "{count} peers are configured: the maximum is {PEERS_MAX}"
            ));
        }
        let key = Key::read(&config.key_file)?;
        let any = |v6: bool| match v6 {
            true => IpAddr::from([0_u16; 8]),
            false => IpAddr::from([0; 4]),
        };
        let v6 = addresses.iter().any(SocketAddr::is_ipv6);
        let listen = config.listen.unwrap_or_else(|| (any(v6), 0).into());
        let listen = directors::with_port(listen);
        let failed = |error: io::Error| format!("cannot start the replication with peers: {error}");
        let socket = match bind(listen) {
            Ok(socket) => Some(socket),
            Err(error) if is_missing(&error) => None,
            Err(error) => {
                return Err(format!(
                    "cannot listen at {listen}: {error}: is another program using the port?"
                ));
            }
        };
        let keys = frame::keys(random().map_err(failed)?);
        let peers = addresses.into_iter().enumerate().map(|(number, address)| {
            Arc::new(Peer {
                number,
                address,
                state: Mutex::default(),
                tables: Mutex::default(),
                changed: Condvar::new(),
            })
        });
        let this = Arc::new(Self {
            context: Arc::downgrade(context),
            workers: Arc::downgrade(threads),
            key,
            identity: random().map_err(failed)?,
            keys,
            listen,
            listens: AtomicBool::new(socket.is_some()),
            wait: config.wait,
            alarm: config.alarm,
            tables: Mutex::default(),
            started: Instant::now(),
            peers: peers.collect(),
            hub: threads.hub.clone(),
            counts: Counts::default(),
            ready: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            wake: EventFd::new().map_err(failed)?,
            sleeping: Default::default(),
            threads: Mutex::default(),
        });
        this.on_workers(move |decider| decider.shard.keep_replicas(keys));
        for peer in &this.peers {
            let (peers, peer) = (this.clone(), peer.clone());
            this.spawn("lvs-peer-gets", move || receiver::run(&peers, &peer))
                .map_err(failed)?;
        }
        let peers = this.clone();
        this.spawn("lvs-peers", move || accept::run(&peers, socket))
            .map_err(failed)?;
        Ok(this)
    }

    fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let thread = thread::Builder::new().name(name.to_owned()).spawn(run)?;
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Ends all sessions and waits for their threads. Peers have a second to read the queued
    /// messages and the end of the stream. Threads that wait for an unreachable peer or for the
    /// proof of a client end later, at their own time limits.
    pub(super) fn end(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake.notify();
        self.sleeping.1.notify_all();
        self.hub.close();
        let begun = Instant::now();
        let last = begun + LAST_WORDS;
        let until = || match self.peers.iter().any(|peer| peer.talks()) {
            true => last + SHORT,
            false => begun + SHORT,
        };
        loop {
            let thread = lock(&self.threads).pop();
            let Some(thread) = thread else { return };
            // The thread may have opened a connection in the meantime.
            while !thread.is_finished() && Instant::now() < until() {
                for peer in &self.peers {
                    peer.hang_up(Instant::now() >= last);
                }
                thread::sleep(Duration::from_millis(5));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Sleeps for `time`, or until the dataplane ends.
    fn pause(&self, time: Duration) {
        let guard = lock(&self.sleeping.0);
        let until = |_: &mut ()| !self.is_stopping();
        let _ = self.sleeping.1.wait_timeout_while(guard, time, until);
    }

    fn now(&self) -> lvs_core::Instant {
        let context = self.context.upgrade();
        context.map_or(lvs_core::Instant::ZERO, |context| context.now())
    }

    /// Number of packet workers; 0 if the dataplane has ended.
    fn workers(&self) -> usize {
        let threads = self.workers.upgrade();
        threads.map_or(0, |threads| threads.workers().len())
    }

    /// Posts a job to a packet worker, which first queues its changed connections for the peers.
    fn on_worker(&self, number: usize, job: impl FnOnce(&mut Decider) + Send + 'static) {
        let threads = self.workers.upgrade();
        let workers = threads.as_ref().map(|threads| threads.workers());
        if let Some(worker) = workers.and_then(|workers| workers.get(number)) {
            let job = move |worker: &mut Worker| worker.with_decider(job);
            worker.mailbox.post(job);
        }
    }

    /// Posts a job to every packet worker, as [`on_worker`](Self::on_worker).
    fn on_workers(&self, job: impl Fn(&mut Decider) + Clone + Send + 'static) {
        for number in 0..self.workers() {
            self.on_worker(number, job.clone());
        }
    }

    /// Runs a job at a packet worker, as [`on_worker`](Self::on_worker), and returns the worker's
    /// answer; `None` if the worker does not answer.
    fn ask_worker<T: Send + 'static>(
        &self,
        number: usize,
        job: impl FnOnce(&mut Decider, lvs_core::Instant) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = mpsc::channel();
        let now = self.now();
        self.on_worker(number, move |decider| {
            drop(reply.send(job(decider, now)));
        });
        answer.recv_timeout(WORKER_TIMEOUT).ok()
    }

    /// Returns the sum of the digests of all packet workers; `None` if a worker does not answer.
    fn digest_of_workers(
        &self,
        part: impl Fn(&mut Decider) -> Digest + Clone + Send + 'static,
    ) -> Option<Digest> {
        let threads = self.workers.upgrade()?;
        let parts = threads.ask(move |worker| worker.with_decider(&part)).ok()?;
        let mut sum = Digest::default();
        for part in &parts {
            sum.merge(part);
        }
        Some(sum)
    }

    /// Returns the digest of the connections that this director has borrowed from a peer; `None` if
    /// a packet worker does not answer.
    fn borrowed(&self, peer: usize) -> Option<Digest> {
        self.digest_of_workers(move |decider| decider.shard.borrowed(peer))
    }

    /// Runs `job` on the piece of a packet worker's table at `place`. The job returns the slot of
    /// the next piece. `walk` returns the next place, which may be in the next worker's table, or
    /// `None` at the end of the last table.
    fn walk(
        &self,
        place: Place,
        job: impl FnOnce(&mut Decider, usize, lvs_core::Instant) -> Option<usize> + Send + 'static,
    ) -> Option<Place> {
        let Place { worker, from } = place;
        let next = self.ask_worker(worker, move |decider, now| job(decider, from, now));
        match next.flatten() {
            Some(from) => Some(Place { worker, from }),
            // A worker that does not answer is exiting.
            None => {
                let worker = worker + 1;
                (worker < self.workers()).then_some(Place { worker, from: 0 })
            }
        }
    }

    fn set_has_receiver(&self, has_receiver: bool) {
        self.on_workers(move |decider| decider.shard.set_has_receiver(has_receiver));
    }

    fn templates(
        &self,
        from: usize,
        budget: usize,
        since: Option<lvs_core::Instant>,
    ) -> (Vec<u8>, Option<usize>) {
        let Some(context) = self.context.upgrade() else {
            return (Vec::new(), None);
        };
        let now = context.now();
        let control = context.control();
        control.replicated_templates_piece(from, budget, since, now)
    }

    fn services(&self) -> Arc<ServiceDigests> {
        let mut own = lock(&self.tables);
        if let Some(context) = self.context.upgrade() {
            own.follow(&context);
        }
        own.digests()
    }

    pub(super) fn waiting(&self) -> Option<Waiting> {
        let listen = self.listen;
        (!self.listens.load(Ordering::Acquire)).then(|| Waiting {
            code: Waiting::LISTEN_MISSING.to_owned(),
            what: format!(
                "other directors cannot connect to this one: waiting for the address {}, which this host does not have",
                listen.ip()
            ),
            fix: format!(
                "`ip addr add {}/LENGTH dev NAME`, or correct the address (--sync-listen; listen in [sync.peers] of lvsd's file) \
                 and restart the dataplane",
                listen.ip()
            ),
            since: None,
        })
    }

    pub(super) fn standings(&self) -> Vec<PeerStanding> {
        let peers = self.peers.iter();
        peers.map(|peer| peer.standing(self.started)).collect()
    }

    /// Logs once that a peer has been out of sync for too long, and once that it is in sync again.
    fn look_after(&self, peer: &Peer) {
        let standing = peer.standing(self.started);
        let warned = &mut peer.state().warned;
        if standing.is_alarming() && !*warned {
            *warned = true;
            warn!(
                code = "peer_behind",
                "peer {} has not been in step for {} s ({}): connections that it has opened since then break when this director takes over; see lvsadm sync",
                peer.address,
                standing.seconds,
                standing.state
            );
        } else if standing.is_in_step() && *warned {
            *warned = false;
            info!("peer {} is in step again", peer.address);
        }
    }

    /// Reports how each peer's services differ from those of this director.
    pub(super) fn tables_info(&self) -> Vec<TablesInfo> {
        let peers = self.peers.iter();
        peers.map(|peer| peer.tables_info()).collect()
    }

    fn add(&self, counter: impl FnOnce(&Counts) -> &AtomicU64, more: u64) {
        counter(&self.counts).fetch_add(more, Ordering::Relaxed);
    }

    fn count(&self, counter: impl FnOnce(&Counts) -> &AtomicU64) {
        self.add(counter, 1);
    }

    /// Counts a session that ended because of an invalid frame.
    fn count_ended(&self, error: &FrameError) {
        match error {
            FrameError::Forged | FrameError::TooLong => self.count(|counts| &counts.forged),
            FrameError::Malformed => self.count(|counts| &counts.malformed),
            FrameError::Io(_) => {}
        }
    }

    fn count_results(&self, results: ItemResults) {
        self.add(|counts| &counts.taken, results.taken.taken);
        self.add(|counts| &counts.nonsense, results.taken.nonsense);
        self.add(|counts| &counts.no_room, results.taken.no_room);
        self.add(|counts| &counts.ended, results.ended);
        self.add(|counts| &counts.kept, results.kept);
    }

    /// Returns the reason why this director is not ready: the first peer from which it still awaits
    /// connections or their first comparison. `None` if this director is ready; it then stays
    /// ready.
    ///
    /// `wait` runs from the start of this director: after it, disconnected peers do not count,
    /// except a peer that refuses the handshake, which counts until the operator has corrected the
    /// cause. A peer whose connections still differ after several repairs does not count either. If
    /// `wait` is zero, no peer counts.
    fn look_whether_ready(&self) -> Option<String> {
        if self.ready.load(Ordering::Acquire) {
            return None;
        }
        let patient = self.started.elapsed() < self.wait;
        let waits = self.peers.iter().find_map(|peer| {
            let state = peer.state();
            let text = match state.step {
                _ if self.wait.is_zero() => return None,
                Step::Follows if state.is_in_step() || state.given_up => return None,
                Step::Follows if !state.compared => {
                    "the connections have not been compared yet".to_owned()
                }
                Step::Follows => format!("{} connections of this peer are missing", state.missing),
                Step::Bulk => format!("the peer has sent {} connections so far", state.received),
                // A peer that refuses the handshake delays readiness without limit: the operator
                // has to correct the cause.
                Step::Away => match &state.trouble {
                    Some((Trouble::Refused, text)) => text.clone(),
                    Some((Trouble::Away, text)) if patient => text.clone(),
                    None if patient => "the peer has not been reached yet".to_owned(),
                    _ => return None,
                },
            };
            Some(format!("{}: {text}", peer.address))
        });
        if waits.is_none() && !self.ready.swap(true, Ordering::AcqRel) {
            info!("ready: this director waits for no more connections of its peers");
        }
        waits
    }

    pub(super) fn report(&self) -> SyncState {
        let waits = self.look_whether_ready();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = &self.counts;
        let replicated = self.digest_of_workers(|decider| decider.shard.replicated());
        SyncState {
            ready: waits.is_none(),
            waits_for: waits.unwrap_or_default(),
            listen: Some(self.listen),
            replicated: replicated.map_or(0, |digest| digest.count()),
            peers: self.peers.iter().map(|peer| self.report_on(peer)).collect(),
            items_sent: read(&counts.items_sent),
            bytes_sent: read(&counts.bytes_sent),
            items_received: read(&counts.items_received),
            taken: read(&counts.taken),
            ended: read(&counts.ended),
            kept: read(&counts.kept),
            nonsense: read(&counts.nonsense),
            no_room: read(&counts.no_room),
            repairs: read(&counts.repairs),
            full_syncs: read(&counts.full_syncs),
            refused_address: read(&counts.refused_address),
            refused_places: read(&counts.refused_places),
            refused_key: read(&counts.refused_key),
            forged: read(&counts.forged),
            malformed: read(&counts.malformed),
            tables: self.tables_info(),
            tables_beyond: lock(&self.tables).beyond(),
        }
    }

    fn report_on(&self, peer: &Peer) -> PeerInfo {
        let borrowed = self.borrowed(peer.number);
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let state = peer.state();
        PeerInfo {
            address: peer.address,
            state: state.name().to_owned(),
            trouble: state.trouble_text(),
            replicated: state.replicated,
            borrowed: borrowed.map_or(0, |digest| digest.count()),
            missing: state.missing,
            heard_ms: state.last_message.map(|at| millis(at.elapsed())),
            bulk_connections: state.bulk.map(|(count, ..)| count),
            bulk_ms: state.bulk.map(|(_, took, _)| millis(took)),
            bulk_ago: state.bulk.map(|(_, _, at)| at.elapsed().as_secs()),
            listens: state.sending.is_some(),
            lag_ms: state.lag.filter(|_| state.sending.is_some()).map(millis),
            tables: peer.tables().differences(Instant::now()),
        }
    }
}

/// Opens the socket that accepts peers.
fn bind(listen: SocketAddr) -> io::Result<TcpListener> {
    let socket = TcpListener::bind(listen)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Whether the error means that the host lacks the address, or the interface of its scope. Both may
/// appear later.
fn is_missing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(libc::ENODEV)
}

impl State {
    /// The name of the state in [`PeerInfo::state`].
    fn name(&self) -> &'static str {
        match (self.step, &self.trouble) {
            (Step::Bulk, _) => "bulk",
            (Step::Follows, _) if self.is_silent() => "silent",
            (Step::Follows, _) if self.is_in_step() => "in step",
            (Step::Follows, _) if self.compared => "behind",
            (Step::Follows, _) => "bulk",
            (Step::Away, Some((Trouble::Refused, _))) => "refused",
            (Step::Away, _) => "away",
        }
    }

    fn trouble_text(&self) -> String {
        let text = self.trouble.as_ref().map(|(_, text)| text.clone());
        text.unwrap_or_default()
    }

    /// Whether the peer has sent a digest in this session, but none for [`SILENT`]: its state is
    /// unknown.
    fn is_silent(&self) -> bool {
        self.compared && self.last_message.is_some_and(|at| at.elapsed() >= SILENT)
    }

    fn is_in_step(&self) -> bool {
        self.step == Step::Follows && self.compared && self.missing == 0
    }
}

impl Peer {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn tables(&self) -> MutexGuard<'_, tables::Comparison> {
        lock(&self.tables)
    }

    /// The state of the replication from this peer, in a dataplane that started at `started`. A
    /// peer that was never in sync counts as out of sync since then.
    fn standing(&self, started: Instant) -> PeerStanding {
        let state = self.state();
        let mut standing = PeerStanding {
            peer: self.address,
            state: state.name().to_owned(),
            seconds: 0,
            missing: state.missing,
            trouble: state.trouble_text(),
        };
        if !standing.is_in_step() {
            standing.seconds = state.in_step.unwrap_or(started).elapsed().as_secs();
        }
        standing
    }

    fn tables_info(&self) -> TablesInfo {
        self.tables().info(self.address, Instant::now())
    }

    // --- receiving from the peer -----------------------------------------------------------------

    fn linked(&self, identity: [u8; 16], stream: TcpStream) {
        let mut state = self.state();
        state.identity = Some(identity);
        state.stream = Some(stream);
        state.lends = true;
        state.trouble = None;
        state.received = 0;
        state.compared = false;
        state.given_up = false;
    }

    fn step(&self, step: Step) {
        self.state().step = step;
    }

    fn received(&self, count: u64) {
        self.state().received = count;
    }

    fn has_sent_everything(&self, count: u64, took: Duration) {
        let mut state = self.state();
        state.step = Step::Follows;
        state.bulk = Some((count, took, Instant::now()));
    }

    fn compared(&self, replicated: u64, missing: u64, given_up: bool) {
        let mut state = self.state();
        state.compared = true;
        (state.replicated, state.missing) = (replicated, missing);
        state.given_up = given_up;
        state.last_message = Some(Instant::now());
        if state.is_in_step() {
            state.in_step = state.last_message;
        }
    }

    fn lost(&self, trouble: Trouble, text: &str) {
        let mut state = self.state();
        state.step = Step::Away;
        state.stream = None;
        state.trouble = Some((trouble, text.to_owned()));
        (state.replicated, state.missing) = (0, 0);
    }

    /// Records that this director has no borrowed connection of the peer.
    fn is_free(&self) {
        let mut state = self.state();
        state.lends = false;
        state.identity = None;
        self.changed.notify_all();
    }

    /// Ends the session with an earlier run of the peer, if one is open. Waits, for `patience` at
    /// most, until this director owns the connections that it borrowed from the earlier run.
    /// `identity` identifies the present run.
    fn settle(&self, identity: [u8; 16], patience: Duration) {
        let state = self.state();
        let old = |state: &mut State| {
            state.lends && state.identity.is_some_and(|other| other != identity)
        };
        if let Some(stream) = &state.stream
            && state.identity.is_some_and(|other| other != identity)
        {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(self.changed.wait_timeout_while(state, patience, old));
    }

    /// Whether a connection to or from the peer is open.
    fn talks(&self) -> bool {
        let state = self.state();
        state.stream.is_some() || state.sending.is_some()
    }

    /// Closes the receiving connection, and with `both` also the sending one.
    fn hang_up(&self, both: bool) {
        let state = self.state();
        let sending = state.sending.as_ref().filter(|_| both);
        for stream in state.stream.iter().chain(sending) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    // --- sending to the peer ---------------------------------------------------------------------

    fn sent(&self, serial: u64) {
        self.state().sent = Some((serial, Instant::now()));
    }

    fn seen(&self, serial: u64) {
        let mut state = self.state();
        if let Some((sent, at)) = state.sent
            && sent == serial
        {
            state.lag = Some(at.elapsed());
        }
    }
}

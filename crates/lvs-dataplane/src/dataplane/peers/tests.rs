//! Sessions with peers over the loopback interface, with valid and invalid frames, and the states
//! of peers.

use std::io::{Read, Write};
use std::num::NonZeroUsize;

use super::frame::{
    Handshake, INTRODUCTION_LEN, Introduction, Kind, PAYLOAD_MAX, PROOF_LEN, Sequence,
};
use lvs_core::api::TablesState;
use lvs_core::sync::bulk::DIGEST_LEN;
use lvs_core::sync::services::SERVICES_MAX;
use lvs_core::{
    Control, Family, Forwarding, Hook, Options, PacketMeta, ServerConfig, ServiceConfig,
    ServiceKey, Tuple, Verdict,
};

use super::*;
use crate::dataplane::config::PEERS_ALARM as ALARM;
use crate::dataplane::threads::Requests;
use crate::dataplane::worker::{Equipment, Worker};
use lvs_packet::common::Common;
use lvs_packet::pipeline::Decide;
use lvs_packet::settings::Settings;
use lvs_packet::steer::Steering;

use crate::host::view::View;

const KEY: &[u8] = b"0123456789abcdef0123456789abcdef";
const ITEMS: usize = 1 << 20;

fn introduction(identity: u8) -> Introduction {
    Introduction {
        identity: [identity; 16],
        nonce: [identity; 32],
    }
}

pub(super) type Parts = (Arc<Context>, Arc<Threads<Worker>>);

/// Creates the parts of a director whose connections are divided among `workers` packet workers.
pub(super) fn parts(control: Control, workers: usize) -> Parts {
    let threads = Threads::new(workers).expect("descriptors are available");
    let context = Context::without_kernel(control);
    let workers = NonZeroUsize::new(workers).expect("at least one worker exists");
    context.publish(Arc::new(View {
        generation: 1,
        steering: Some(Arc::new(Steering::new(workers, 7, false))),
        ..View::default()
    }));
    (context, Arc::new(threads))
}

/// A dataplane with one peer. The packet worker of the dataplane has exited.
fn peers(address: SocketAddr) -> Arc<Peers> {
    peers_of(None, address)
}

/// A dataplane with the peer `address`.
pub(super) fn peers_of(parts: Option<&Parts>, address: SocketAddr) -> Arc<Peers> {
    let peer = Peer {
        number: 0,
        address,
        state: Mutex::default(),
        tables: Mutex::default(),
        changed: Condvar::new(),
    };
    Arc::new(Peers {
        context: parts.map_or_else(Weak::new, |(context, _)| Arc::downgrade(context)),
        workers: parts.map_or_else(Weak::new, |(_, threads)| Arc::downgrade(threads)),
        key: Key::of(KEY),
        identity: [1; 16],
        keys: [1, 2],
        listen: address,
        listens: AtomicBool::new(true),
        wait: Duration::ZERO,
        alarm: ALARM,
        tables: Mutex::default(),
        started: Instant::now(),
        peers: vec![Arc::new(peer)],
        hub: Arc::default(),
        counts: Counts::default(),
        ready: AtomicBool::new(false),
        stop: AtomicBool::new(false),
        wake: EventFd::new().expect("a descriptor is available"),
        sleeping: Default::default(),
        threads: Mutex::default(),
    })
}

/// The packet workers, which run their jobs when the test calls [`run_jobs`].
pub(super) fn workers_of((context, threads): &Parts) -> Vec<Worker> {
    let count = NonZeroUsize::new(threads.workers().len()).expect("at least one worker exists");
    let common = Arc::new(Common::new(Settings::UNLIMITED).with_workers(count));
    let worker = |number| {
        let shard = context.control().shard(number).expect("the shard is free");
        let (requests, _) = Requests::new();
        let equipment = Equipment::new(common.clone());
        let (context, threads) = (context.clone(), threads.clone());
        Worker::new(context, threads, number, shard, equipment, requests, None)
    };
    (0..count.get()).map(worker).collect()
}

/// Runs the jobs that wait for the packet workers.
pub(super) fn run_jobs((_, threads): &Parts, workers: &mut [Worker]) {
    for (number, worker) in workers.iter_mut().enumerate() {
        for job in threads.worker(number).mailbox.take() {
            job(worker);
        }
    }
}

fn counted(peers: &Peers) -> (u64, u64) {
    let report = peers.report();
    (report.forged, report.malformed)
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("the listener can be opened");
    let address = listener.local_addr().expect("the listener has an address");
    (listener, address)
}

/// A receiving peer's side of a session, and the dataplane that sends to it.
struct Listens {
    peers: Arc<Peers>,
    stream: TcpStream,
    replicated: Sequence,
    asked: Sequence,
    sender: JoinHandle<()>,
}

/// Connects a receiving peer of an older version to a dataplane whose packet worker has exited.
fn listens() -> Listens {
    listens_to(None, introduction(2))
}

fn listens_to(parts: Option<&Parts>, introduced: Introduction) -> Listens {
    let (listener, address) = listener();
    let stream = TcpStream::connect(address).expect("the peer listens");
    let (theirs, _) = listener.accept().expect("the peer has connected");
    let peers = peers_of(parts, address);
    let ours = Introduction::new([1; 16], [1; 24]);
    let handshake = Handshake::new(&Key::of(KEY), introduced, ours);
    let (replicated, asked) = (handshake.replicated(), handshake.asked());
    let all = peers.clone();
    let sender = thread::spawn(move || sender::run(&all, &all.peers[0], &theirs, &handshake));
    Listens {
        peers,
        stream,
        replicated,
        asked,
        sender,
    }
}

impl Listens {
    /// Reads the full sync, and returns the number of bytes of its items.
    fn read_whole(&mut self) -> usize {
        let mut bytes = 0;
        loop {
            match self
                .replicated
                .read(&mut self.stream)
                .expect("the peer sends a frame")
            {
                (Kind::Whole, _) => return bytes,
                (Kind::Items, items) => bytes += items.len(),
                _ => {}
            }
        }
    }
}

#[test]
fn receiver_that_does_not_read_gets_one_full_sync() {
    let mut it = listens();
    assert_eq!(it.read_whole(), 0);
    assert_eq!(it.peers.report().full_syncs, 0);
    // More than the socket buffers and the queue can store; all items share one allocation.
    let items: Arc<[u8]> = vec![0; ITEMS].into();
    for _ in 0..256 {
        it.peers.hub.tell(0, &items, false);
    }
    let read = it.read_whole();
    assert!(read < 256 * ITEMS, "{read}");
    let report = it.peers.report();
    assert_eq!(report.full_syncs, 1);
    drop(it.stream);
    it.sender.join().expect("the sender ends without a panic");
    assert_eq!(counted(&it.peers), (0, 0));
}

fn sealed(by: &mut Sequence, kind: Kind, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    by.seal(kind, payload, &mut bytes);
    bytes
}

/// A frame that an attacker has changed.
fn changed(mut frame: Vec<u8>) -> Vec<u8> {
    frame[5] ^= 1;
    frame
}

/// A frame whose kind an attacker has replaced by an unknown one.
fn unknown(mut frame: Vec<u8>) -> Vec<u8> {
    frame[4] = 255;
    frame
}

/// A frame that an attacker sends twice.
fn repeated(frame: &[u8]) -> Vec<u8> {
    frame.repeat(2)
}

/// An earlier session between the same two directors, recorded by an attacker.
fn recorded() -> Handshake {
    let of = |identity| Introduction::new([identity; 16], [9; 24]);
    Handshake::new(&Key::of(KEY), of(2), of(1))
}

#[test]
fn invalid_frame_of_receiver_closes_session_and_is_counted() {
    type Make = fn(&mut Sequence) -> Vec<u8>;
    let cases: [(Make, (u64, u64)); 8] = [
        // A frame of the maximum length.
        (|asked| sealed(asked, Kind::Want, &[0; PAYLOAD_MAX]), (0, 0)),
        (|_| too_long(), (1, 0)),
        (|asked| changed(sealed(asked, Kind::Want, &[0; 2])), (1, 0)),
        (|asked| sealed(asked, Kind::Seen, &[0; 7]), (0, 1)),
        // A frame that only senders send, and frames whose kind an attacker has changed.
        (|asked| sealed(asked, Kind::Items, &[]), (0, 1)),
        (|asked| unknown(sealed(asked, Kind::Seen, &[0; 8])), (1, 0)),
        // A repeated frame, and a frame of another session.
        (
            |asked| repeated(&sealed(asked, Kind::Seen, &[0; 8])),
            (1, 0),
        ),
        (
            |_| sealed(&mut recorded().asked(), Kind::Seen, &[0; 8]),
            (1, 0),
        ),
    ];
    for (case, (make, expected)) in cases.into_iter().enumerate() {
        let mut it = listens();
        let bytes = make(&mut it.asked);
        it.stream.write_all(&bytes).expect("the bytes are sent");
        if expected == (0, 0) {
            // The session is still open.
            it.stream
                .shutdown(Shutdown::Write)
                .expect("the session is open");
        }
        let mut rest = Vec::new();
        let _ = it.stream.read_to_end(&mut rest);
        it.sender.join().expect("the sender ends without a panic");
        assert_eq!(counted(&it.peers), expected, "case {case}");
    }
}

/// The header of a frame that is one byte longer than the maximum.
fn too_long() -> Vec<u8> {
    let len = u32::try_from(PAYLOAD_MAX + 1).expect("the length fits in 32 bits");
    let mut bytes = len.to_be_bytes().to_vec();
    bytes.push(Kind::Keys as u8);
    bytes
}

#[test]
fn invalid_frame_of_sender_closes_session_and_is_counted() {
    type Make<'a> = &'a dyn Fn(&mut Sequence) -> Vec<u8>;
    let keys = |replicated: &mut Sequence| sealed(replicated, Kind::Keys, &[0; 16]);
    // Digests of no service, of one service, and of a part of a service.
    let digest = |services: usize| vec![0; 8 + DIGEST_LEN + services];
    let cases: [(Make<'_>, (u64, u64)); 10] = [
        (
            &|replicated| {
                [
                    keys(replicated),
                    sealed(replicated, Kind::Digest, &digest(0)[1..]),
                ]
                .concat()
            },
            (0, 1),
        ),
        (
            &|replicated| {
                [
                    keys(replicated),
                    sealed(replicated, Kind::Digest, &digest(35)),
                ]
                .concat()
            },
            (0, 1),
        ),
        // A service with an unknown protocol.
        (
            &|replicated| {
                [
                    keys(replicated),
                    sealed(replicated, Kind::Digest, &digest(36)),
                ]
                .concat()
            },
            (0, 1),
        ),
        (&|_| too_long(), (1, 0)),
        (
            &|replicated| changed(sealed(replicated, Kind::Keys, &[0; 16])),
            (1, 0),
        ),
        (
            &|replicated| sealed(replicated, Kind::Keys, &[0; PAYLOAD_MAX]),
            (0, 1),
        ),
        // Empty items, a frame that only receivers send, and frames whose kind an attacker has
        // changed.
        (
            &|replicated| [keys(replicated), sealed(replicated, Kind::Items, &[0; 99])].concat(),
            (0, 1),
        ),
        (
            &|replicated| [keys(replicated), sealed(replicated, Kind::Want, &[0; 2])].concat(),
            (0, 1),
        ),
        (
            &|replicated| {
                [
                    keys(replicated),
                    unknown(sealed(replicated, Kind::Whole, &[])),
                ]
                .concat()
            },
            (1, 0),
        ),
        // A repeated frame.
        (&|replicated| repeated(&keys(replicated)), (1, 0)),
    ];
    for (case, (make, expected)) in cases.into_iter().enumerate() {
        let (socket, address) = listener();
        let peers = peers(address);
        let all = peers.clone();
        let receiving = thread::spawn(move || receiver::run(&all, &all.peers[0]));
        let (mut stream, _) = socket.accept().expect("the receiver connects");
        let mut theirs = [0; INTRODUCTION_LEN];
        stream
            .read_exact(&mut theirs)
            .expect("the handshake has arrived");
        let theirs = Introduction::parse(&theirs).expect("the bytes are an introduction");
        let ours = Introduction::new([2; 16], [2; 24]);
        let handshake = Handshake::new(&Key::of(KEY), theirs, ours);
        let mut bytes = ours.to_bytes().to_vec();
        bytes.extend(handshake.sender_proof());
        stream.write_all(&bytes).expect("the bytes are sent");
        let mut proof = [0; PROOF_LEN];
        stream
            .read_exact(&mut proof)
            .expect("the proof has arrived");
        assert!(handshake.is_receiver(&proof));
        let bytes = make(&mut handshake.replicated());
        stream.write_all(&bytes).expect("the bytes are sent");
        if expected == (0, 0) {
            // The session is still open.
            stream
                .shutdown(Shutdown::Write)
                .expect("the session is open");
        }
        // The director has closed the connection.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        drop(socket);
        peers.end();
        receiving.join().expect("the receiver ends without a panic");
        assert_eq!(counted(&peers), expected, "case {case}");
    }
}

/// The first digest that a director sends to a receiver.
fn first_digest(parts: &Parts, workers: &mut [Worker], introduced: Introduction) -> Vec<u8> {
    let mut it = listens_to(Some(parts), introduced);
    let digest = thread::scope(|scope| {
        let (stream, replicated) = (&mut it.stream, &mut it.replicated);
        let reads = scope.spawn(move || {
            loop {
                let (kind, payload) = replicated.read(stream).expect("the peer sends a frame");
                if kind == Kind::Digest {
                    return payload;
                }
            }
        });
        while !reads.is_finished() {
            run_jobs(parts, workers);
            thread::yield_now();
        }
        reads.join().expect("the thread does not panic")
    });
    drop(it.stream);
    while !it.sender.is_finished() {
        run_jobs(parts, workers);
        thread::yield_now();
    }
    it.sender.join().expect("the sender ends without a panic");
    assert_eq!(it.peers.counts.malformed.load(Ordering::Relaxed), 0);
    digest
}

/// The digests omit a service above the maximum number, and a log line names only a few of the
/// services that differ. An older peer gets no digests of services, because they would end its
/// session.
#[test]
fn service_digests_are_bounded_and_sent_only_to_peers_that_support_them() {
    let mut control = Control::new(Options::default());
    let family = Family::V4;
    let count = u32::try_from(SERVICES_MAX).expect("the count fits in 32 bits") + 1;
    for mark in 1..=count {
        let config = ServiceConfig::new(family, "rr");
        let added = control.add_service(ServiceKey::Mark { family, mark }, config, None);
        added.expect("the service is new");
    }
    let parts = parts(control, 1);
    let mut own = tables::Own::default();
    let begun = Instant::now();
    own.follow(&parts.0);
    println!("{SERVICES_MAX} digests: made in {:.1?}", begun.elapsed());
    assert_eq!(own.beyond(), 1);
    let ours = own.digests();
    assert_eq!(ours.len(), SERVICES_MAX);

    let mut workers = workers_of(&parts);
    workers[0].with_decider(|decider| decider.shard.keep_replicas([1, 2]));
    let older = first_digest(&parts, &mut workers, introduction(2));
    assert_eq!(older.len(), 8 + DIGEST_LEN);
    let understands = Introduction::new([2; 16], [2; 24]);
    let begun = Instant::now();
    let sent = first_digest(&parts, &mut workers, understands);
    println!("sent in {:.1?}: {} bytes", begun.elapsed(), sent.len());
    assert_eq!(sent.len(), PAYLOAD_MAX);

    let mut theirs = tables::Comparison::default();
    theirs.begin([1; 16], true);
    let now = Instant::now();
    let address = ([192, 0, 2, 2], 8848).into();
    let heard = ServiceDigests::parse(&sent[8 + DIGEST_LEN..]).expect("the items are in order");
    assert_eq!(theirs.compare(&ours, &heard, ALARM, now), None);
    assert_eq!(theirs.info(address, now).state, TablesState::Alike);

    let none = ServiceDigests::default();
    let begun = Instant::now();
    assert_eq!(theirs.compare(&none, &heard, ALARM, now), None);
    println!("compared in {:.1?}", begun.elapsed());
    let info = theirs.info(address, now + ALARM);
    assert_eq!(info.differ, SERVICES_MAX as u64);
    assert_eq!(theirs.differences(now + ALARM).len(), 16);
    let output = theirs.compare(&none, &heard, ALARM, now + ALARM);
    let Some(tables::LogLine::Differ(text)) = output else {
        panic!("{output:?}");
    };
    assert!(text.len() < 500, "{text}");
}

/// A peer is in sync after a comparison that finds no missing connections. Otherwise its state
/// contains the seconds since it was in sync, or since the start.
#[test]
fn peer_state_reports_seconds_out_of_sync_missing_connections_and_alarm() {
    let peers = peers(([192, 0, 2, 2], 8848).into());
    let peer = &peers.peers[0];
    let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds));
    let begun = ago(12).expect("the host has been running for 12 seconds");
    let stands = || {
        let standing = peer.standing(begun);
        let alarming = standing.is_alarming();
        (standing.state, standing.seconds, standing.missing, alarming)
    };
    assert_eq!(stands(), ("away".to_owned(), 12, 0, true));
    peer.lost(Trouble::Refused, "another key");
    assert_eq!(stands(), ("refused".to_owned(), 12, 0, true));
    assert_eq!(peer.standing(begun).trouble, "another key");
    peer.step(Step::Follows);
    peer.compared(5, 2, false);
    assert_eq!(stands(), ("behind".to_owned(), 12, 2, true));
    peer.compared(5, 0, false);
    assert_eq!(stands(), ("in step".to_owned(), 0, 0, false));
    peer.lost(Trouble::Away, "gone");
    assert_eq!(stands(), ("away".to_owned(), 0, 0, false));
    peer.state().in_step = ago(10);
    assert_eq!(stands(), ("away".to_owned(), 10, 0, true));
    peers.look_after(peer);
    assert!(peer.state().warned);
    peer.step(Step::Follows);
    peer.compared(5, 0, false);
    peers.look_after(peer);
    assert!(!peer.state().warned);
}

#[test]
fn more_than_8_peers_are_refused() {
    let control = Control::new(Options::default());
    let parts = parts(control, 1);
    for (count, words) in [
        (8, "cannot read the key"),
        (9, "9 peers are configured: the maximum is 8"),
    ] {
        let config = PeersConfig {
            peers: (1..=count)
                .map(|n| SocketAddr::from(([192, 0, 2, n], 0)))
                .collect(),
            key_file: "/nowhere".into(),
            ..PeersConfig::default()
        };
        let output = Peers::start(&config, &parts.0, &parts.1)
            .expect_err("replication started without a key");
        assert!(
            output.contains(words),
            "{count} peers: no {words:?} in {output}"
        );
    }
}

/// A director with one peer in this process. Its workers run when the test calls [`run_until`].
struct Director {
    parts: Parts,
    workers: Vec<Worker>,
    peers: Arc<Peers>,
}

impl Director {
    /// Creates a director with a service. Its only peer is at `peer`.
    fn new(identity: u8, workers: usize, listener: TcpListener, peer: SocketAddr) -> Self {
        let mut control = Control::new(Options {
            shards: workers,
            ..Options::default()
        });
        let key = ServiceKey::tcp(tuple(0).dst);
        let config = ServiceConfig::new(Family::V4, "rr");
        control
            .add_service(key, config, None)
            .expect("the service is new");
        let server = ([10, 0, 0, 1], 80).into();
        let config = ServerConfig::new(1, Forwarding::Nat);
        let added = control.add_server(&key, server, &config, lvs_core::Instant::ZERO);
        added.expect("the server is new");
        let parts = parts(control, workers);
        let mut workers = workers_of(&parts);
        let mut peers = peers_of(Some(&parts), peer);
        let made = Arc::get_mut(&mut peers).expect("there is no other reference");
        (made.identity, made.keys) = ([identity; 16], [identity.into(), 7]);
        made.hub = parts.1.hub.clone();
        for worker in &mut workers {
            worker.with_decider(|decider| decider.shard.keep_replicas(peers.keys));
        }
        listener
            .set_nonblocking(true)
            .expect("the socket can be non-blocking");
        let (all, peer) = (peers.clone(), peers.peers[0].clone());
        let spawned = peers.spawn("lvs-peer-gets", move || receiver::run(&all, &peer));
        spawned.expect("the thread can be started");
        let all = peers.clone();
        let spawned = peers.spawn("lvs-peers", move || accept::run(&all, Some(listener)));
        spawned.expect("the thread can be started");
        Self {
            parts,
            workers,
            peers,
        }
    }

    /// Passes a packet from each of these client ports to the worker of the connection.
    fn packets(&mut self, ports: std::ops::Range<u16>, flags: u8) {
        let (view, now) = (self.parts.0.view(), self.parts.0.now());
        for port in ports {
            let Tuple { src, dst, .. } = tuple(port);
            let meta = PacketMeta::tcp(Hook::Local, src, dst, flags);
            let home = &mut self.workers[view.worker_of_client(src)];
            let verdict = home.with_decider(|decider| decider.packet(&meta, now));
            assert!(
                matches!(verdict, Verdict::Forward(_)),
                "a packet from port {port} was not forwarded: {verdict:?}"
            );
        }
    }

    fn open(&mut self, ports: std::ops::Range<u16>) {
        self.packets(ports.clone(), 0x02);
        self.packets(ports, 0x10);
    }

    /// Numbers of connections that the workers own, and that they have borrowed.
    fn counts(&mut self) -> (u64, u64) {
        let mut counts = (0, 0);
        for worker in &mut self.workers {
            worker.with_decider(|decider| {
                counts.0 += decider.shard.replicated().count();
                counts.1 += decider.shard.borrowed(0).count();
            });
        }
        counts
    }

    /// The state of the replication from the peer, and the number of the peer's connections.
    fn sync_state(&self) -> (&'static str, u64) {
        let state = self.peers.peers[0].state();
        (state.name(), state.replicated)
    }

    fn work(&mut self) {
        run_jobs(&self.parts, &mut self.workers);
        for worker in &mut self.workers {
            // The worker queues its changes for the peer.
            worker.with_decider(|_| ());
        }
    }
}

fn tuple(port: u16) -> Tuple {
    let virt = ([198, 51, 100, 1], 80).into();
    Tuple::tcp(([192, 0, 2, 1], port).into(), virt)
}

/// Runs the workers of all directors until `done` returns true.
fn run_until(
    what: &str,
    directors: &mut [Director; 2],
    mut done: impl FnMut(&mut [Director; 2]) -> bool,
) {
    let begun = Instant::now();
    while !done(directors) {
        assert!(
            begun.elapsed() < Duration::from_secs(120),
            "timed out waiting for {what}"
        );
        directors.iter_mut().for_each(Director::work);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Directors with different numbers of packet workers replicate to each other: a full sync,
/// updates, a take-over of some connections, and of all connections when a director stops.
#[test]
fn connections_are_replicated_between_directors_with_any_numbers_of_workers() {
    for counts in [[1, 1], [1, 2], [2, 1], [3, 2]] {
        println!("numbers of workers: {counts:?}");
        replicate(counts);
    }
}

fn replicate(workers: [usize; 2]) {
    let ((first, at), (second, there)) = (listener(), listener());
    let one = Director::new(1, workers[0], first, there);
    let two = Director::new(2, workers[1], second, at);
    let mut both = [one, two];
    both[0].open(1000..1400);
    run_until("a full sync", &mut both, |[one, two]| {
        two.sync_state() == ("in step", 400) && one.sync_state() == ("in step", 0)
    });
    assert_eq!((both[0].counts(), both[1].counts()), ((400, 0), (0, 400)));
    assert!(
        both.iter()
            .all(|it| it.peers.look_whether_ready().is_none())
    );

    // Connections change while digests are on their way.
    let mut next = 1400;
    run_until("updates", &mut both, |[one, two]| {
        if next < 2400 {
            one.open(next..next + 2);
            next += 2;
        }
        two.sync_state() == ("in step", 1400)
    });
    assert_eq!((both[0].counts(), both[1].counts()), ((1400, 0), (0, 1400)));

    both[1].packets(1100..1300, 0x10);
    run_until(
        "moved clients to move their connections",
        &mut both,
        |[one, two]| one.sync_state() == ("in step", 200) && two.sync_state() == ("in step", 1200),
    );
    assert_eq!(
        (both[0].counts(), both[1].counts()),
        ((1200, 200), (200, 1200))
    );
    for it in &both {
        let counts = &it.peers.counts;
        for counter in [&counts.repairs, &counts.full_syncs, &counts.nonsense] {
            assert_eq!(
                counter.load(Ordering::Relaxed),
                0,
                "{workers:?}: {counts:?}"
            );
        }
    }

    let peers = both[0].peers.clone();
    let ends = thread::spawn(move || peers.end());
    run_until(
        "the other director to own all connections",
        &mut both,
        |[_, two]| two.counts() == (1400, 0),
    );
    both[1].packets(1000..2400, 0x10);
    let peers = both[1].peers.clone();
    let both_end = thread::spawn(move || peers.end());
    run_until("the threads to end", &mut both, |_| {
        ends.is_finished() && both_end.is_finished()
    });
}

//! Receives connections from a peer, and compares them with the peer's digests.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use lvs_core::replication::ItemResults;
use lvs_core::sync::bulk::{self, DIGEST_LEN, Digest, Item, Ranges};
use lvs_core::sync::services::ServiceDigests;
use tracing::{info, warn};

use super::accept::read_until;
use super::frame::{FrameError, Handshake, INTRODUCTION_LEN, Introduction, Kind, PROOF_LEN};
use super::tables::LogLine;
use super::{Peer, Peers, Place, Step, Trouble, frame};
use lvs_sys::random;

/// Time limit for a peer to accept a connection, and then to send its proof.
const CONNECT: Duration = Duration::from_secs(2);
/// A session ends after this time without a frame. A peer sends a digest every 2 seconds.
const SILENCE: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_millis(500);
/// Interval between two attempts to connect to a peer that refuses the handshake.
const AGAIN_REFUSED: Duration = Duration::from_secs(5);
/// Number of connections in a portion: a packet worker takes them over in less than 100
/// microseconds.
const PORTION: usize = 64;
/// Maximum number of queued portions for one packet worker.
const PORTIONS_MAX: usize = 2;
/// Number of slots that a packet worker examines in one job.
const PIECE: usize = 8192;
/// This director requests repairs after each of the first `REPAIRS_IN_A_ROW` consecutive digests
/// that differ from its borrowed connections.
const REPAIRS_IN_A_ROW: u32 = 3;
/// After [`REPAIRS_IN_A_ROW`] consecutive differing digests, this director requests repairs only at
/// every `REPAIRS_LATER`-th.
const REPAIRS_LATER: u32 = 15;

/// Receives connections from a peer until the dataplane ends. After each failure, this director
/// becomes the owner of the connections that it has borrowed from the peer, and connects again
/// after a pause.
pub(super) fn run(peers: &Arc<Peers>, peer: &Arc<Peer>) {
    let mut last_text = String::new();
    while !peers.is_stopping() {
        let mut borrowed = false;
        let ended = listen(peers, peer, &mut borrowed);
        peer.state().stream = None;
        let (trouble, text) = match ended {
            Ok(()) => break,
            Err((trouble, text)) => (trouble, text),
        };
        if peers.is_stopping() {
            break;
        }
        peer.lost(trouble, &text);
        if borrowed {
            // Until the peer returns, this director owns the borrowed connections.
            adopt(peers, peer, None);
        }
        peer.is_free();
        // Log each reason once.
        if last_text != text {
            let line = format!(
                "peer {} replicates nothing to this director: {text}",
                peer.address
            );
            match trouble {
                Trouble::Away => info!("{line}"),
                Trouble::Refused => warn!("{line}"),
            }
        }
        last_text = if borrowed { String::new() } else { text };
        peers.look_after(peer);
        peers.look_whether_ready();
        peers.pause(match trouble {
            Trouble::Away => AGAIN,
            Trouble::Refused => AGAIN_REFUSED,
        });
    }
}

type Ended = (Trouble, String);

fn away(error: impl std::fmt::Display) -> Ended {
    (Trouble::Away, error.to_string())
}

fn refused(text: impl Into<String>) -> Ended {
    (Trouble::Refused, text.into())
}

/// Connects to a peer, and receives until the session fails or the dataplane ends. Sets `borrowed`
/// as soon as this director may borrow connections.
fn listen(peers: &Arc<Peers>, peer: &Arc<Peer>, borrowed: &mut bool) -> Result<(), Ended> {
    let mut stream = TcpStream::connect_timeout(&peer.address, CONNECT).map_err(away)?;
    let (identity, handshake) = introduce(peers, &mut stream).inspect_err(|ended| {
        if ended.0 == Trouble::Refused {
            peers.count(|counts| &counts.refused_key);
        }
    })?;
    stream.set_read_timeout(Some(SILENCE)).map_err(away)?;
    stream.set_write_timeout(Some(SILENCE)).map_err(away)?;
    stream.set_nodelay(true).map_err(away)?;
    let hangs_up = stream.try_clone().map_err(away)?;
    peer.linked(identity, hangs_up);
    let line = peer.tables().begin(identity, handshake.compares_services());
    log(peer, line);
    *borrowed = true;
    let ended = receive_frames(peers, peer, identity, &mut stream, &handshake);
    peer.tables().end();
    match ended {
        Ok(()) => Ok(()),
        Err(error) => {
            peers.count_ended(&error);
            let trouble = match error {
                FrameError::Io(_) => Trouble::Away,
                _ => Trouble::Refused,
            };
            Err((trouble, error.to_string()))
        }
    }
}

/// Performs the handshake, in which each side proves that it has the key. Also returns the number
/// that identifies the peer's run.
fn introduce(peers: &Peers, stream: &mut TcpStream) -> Result<([u8; 16], Handshake), Ended> {
    let until = Instant::now() + CONNECT;
    stream.set_write_timeout(Some(CONNECT)).map_err(away)?;
    let ours = Introduction::new(peers.identity, random().map_err(away)?);
    stream.write_all(&ours.to_bytes()).map_err(away)?;
    let mut theirs = [0; INTRODUCTION_LEN];
    let closed = "the peer closes the connection: is the address of this director among the peer's --sync-peer addresses? See the peer's log";
    let read = |stream: &mut TcpStream, bytes: &mut [u8]| match read_until(stream, bytes, until) {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Err(refused(closed)),
        Err(error) => Err(away(error)),
        Ok(()) => Ok(()),
    };
    read(stream, &mut theirs)?;
    let theirs = Introduction::parse(&theirs)
        .ok_or_else(|| refused("the program that answers there is not a peer of this version"))?;
    if theirs.identity == peers.identity {
        return Err(refused("the address is that of this director itself"));
    }
    let handshake = Handshake::new(&peers.key, ours, theirs);
    let mut proof = [0; PROOF_LEN];
    read(stream, &mut proof)?;
    if !handshake.is_sender(&proof) {
        return Err(refused(
            "the peer has another key: compare `sha256sum` of the key files",
        ));
    }
    stream
        .write_all(&handshake.receiver_proof())
        .map_err(away)?;
    Ok((theirs.identity, handshake))
}

/// Received connections on their way to the packet workers.
struct Portions<'a> {
    peers: &'a Peers,
    number: usize,
    keeps_ties: bool,
    reply: Sender<(usize, ItemResults)>,
    answers: Receiver<(usize, ItemResults)>,
    under_way: Vec<usize>,
}

impl<'a> Portions<'a> {
    fn new(peers: &'a Peers, number: usize, keeps_ties: bool) -> Self {
        let (reply, answers) = channel();
        Self {
            peers,
            number,
            keeps_ties,
            reply,
            answers,
            under_way: vec![0; peers.workers()],
        }
    }

    /// Passes each item to the packet worker that receives the packets of the connection. Waits if
    /// a worker has too many portions. Returns false if the dataplane has ended, or the workers
    /// answer nothing for [`SILENCE`].
    fn deliver(&mut self, items: Vec<Item>) -> bool {
        let Some(context) = self.peers.context.upgrade() else {
            return false;
        };
        let view = context.view();
        let mut shares: Vec<Vec<Item>> = self.under_way.iter().map(|_| Vec::new()).collect();
        for item in items {
            if let Some(share) = shares.get_mut(view.worker_of_client(item.entry.client)) {
                share.push(item);
            }
        }
        let mut shares: Vec<_> = shares.into_iter().map(Vec::into_iter).collect();
        loop {
            // The workers take turns, so that all of them are busy.
            let mut more = false;
            for (worker, share) in shares.iter_mut().enumerate() {
                let portion: Vec<Item> = share.take(PORTION).collect();
                more |= !portion.is_empty();
                if !portion.is_empty() && !self.post(worker, portion) {
                    return false;
                }
            }
            if !more {
                return true;
            }
        }
    }

    /// Sends a portion to a packet worker, as soon as fewer than [`PORTIONS_MAX`] are queued.
    /// Returns false if the workers answer nothing for [`SILENCE`].
    fn post(&mut self, worker: usize, portion: Vec<Item>) -> bool {
        while self.under_way[worker] >= PORTIONS_MAX {
            if !self.wait() {
                return false;
            }
        }
        self.under_way[worker] += 1;
        let (reply, number, ties) = (self.reply.clone(), self.number, self.keeps_ties);
        self.peers.on_worker(worker, move |decider| {
            let _ = reply.send((worker, decider.apply_items(number, ties, portion)));
        });
        true
    }

    fn wait(&mut self) -> bool {
        let Ok((worker, results)) = self.answers.recv_timeout(SILENCE) else {
            return false;
        };
        self.under_way[worker] -= 1;
        self.peers.count_results(results);
        true
    }

    /// Waits until the packet workers have handled all portions. Returns false if they answer
    /// nothing for [`SILENCE`].
    fn wait_for_all(&mut self) -> bool {
        while self.under_way.iter().any(|&count| count > 0) {
            if !self.wait() {
                return false;
            }
        }
        true
    }
}

fn receive_frames(
    peers: &Arc<Peers>,
    peer: &Arc<Peer>,
    identity: [u8; 16],
    stream: &mut TcpStream,
    handshake: &Handshake,
) -> Result<(), FrameError> {
    let (mut replicated, mut asked) = (handshake.replicated(), handshake.asked());
    let (Kind::Keys, keys) = replicated.read(stream)? else {
        return Err(FrameError::Malformed);
    };
    let keys = keys.try_into().map_err(|_| FrameError::Malformed)?;
    let (keys, number) = (frame::keys(keys), peer.number);
    peers.on_workers(move |decider| decider.shard.listen_to(number, keys));
    peer.step(Step::Bulk);
    info!(
        "peer {} replicates its connections to this director",
        peer.address
    );
    let mut portions = Portions::new(peers, number, peers.identity > identity);
    let (begun, mut received) = (Instant::now(), 0);
    let mut whole = false;
    let mut repairs = 0_u32;
    let gone = || {
        FrameError::Io(std::io::Error::new(
            std::io::ErrorKind::TimedOut,
            "the packet workers of this director do not answer",
        ))
    };
    let mut out = Vec::new();
    while !peers.is_stopping() {
        let (kind, payload) = replicated.read(stream)?;
        match kind {
            Kind::Items => {
                let items = bulk::parse(&payload).map_err(|_| FrameError::Malformed)?;
                received += items.len() as u64;
                peers.add(|counts| &counts.items_received, items.len() as u64);
                if !portions.deliver(items) {
                    return Err(gone());
                }
                if !whole {
                    peer.received(received);
                }
            }
            Kind::Whole => {
                if !portions.wait_for_all() {
                    return Err(gone());
                }
                if !whole {
                    let took = begun.elapsed();
                    info!(
                        connections = received,
                        "the full sync from peer {} is complete, after {took:.1?}", peer.address
                    );
                    peer.has_sent_everything(received, took);
                    whole = true;
                }
            }
            Kind::Digest => {
                let (serial, rest) = payload.split_at_checked(8).ok_or(FrameError::Malformed)?;
                let (digest, services) = rest
                    .split_at_checked(DIGEST_LEN)
                    .ok_or(FrameError::Malformed)?;
                let digest = Digest::parse(digest).map_err(|_| FrameError::Malformed)?;
                let services =
                    ServiceDigests::parse(services).map_err(|_| FrameError::Malformed)?;
                // A worker answers after it has handled the items before the digest.
                let differ = peers.borrowed(number).ok_or_else(gone)?.compare(&digest);
                out.clear();
                repairs = match differ.ranges.is_empty() {
                    true => 0,
                    false => repairs + 1,
                };
                let asks = repairs % REPAIRS_LATER;
                if repairs > 0 && (repairs <= REPAIRS_IN_A_ROW || asks == 0) {
                    if repairs >= REPAIRS_IN_A_ROW {
                        // This director takes over borrowed connections that the peer has stopped
                        // sending.
                        let ranges = Ranges::new(differ.ranges.iter().copied());
                        adopt(peers, peer, Some(&ranges));
                    }
                    let ranges = differ.ranges.iter();
                    let ranges: Vec<u8> = ranges.flat_map(|range| range.to_be_bytes()).collect();
                    asked.seal(Kind::Want, &ranges, &mut out);
                }
                asked.seal(Kind::Seen, serial, &mut out);
                stream.write_all(&out)?;
                if handshake.compares_services() {
                    compare_services(peers, peer, &services);
                }
                peer.compared(
                    differ.replicated,
                    differ.missing,
                    repairs >= REPAIRS_IN_A_ROW,
                );
                peers.look_after(peer);
                peers.look_whether_ready();
            }
            _ => return Err(FrameError::Malformed),
        }
    }
    Ok(())
}

/// Compares a peer's services with those of this director, and logs when they have differed for too
/// long, or are equal again.
fn compare_services(peers: &Peers, peer: &Peer, theirs: &ServiceDigests) {
    let ours = peers.services();
    let now = Instant::now();
    let line = peer.tables().compare(&ours, theirs, peers.alarm, now);
    log(peer, line);
}

/// Makes this director the owner of connections that it borrowed from a peer, so that it replicates
/// them itself. `ranges`: only connections in these ranges.
fn adopt(peers: &Peers, peer: &Peer, ranges: Option<&Ranges>) {
    let mut next = Some(Place::default());
    while let Some(place) = next {
        let (number, ranges) = (peer.number, ranges.cloned());
        next = peers.walk(place, move |decider, from, now| {
            let shard = &mut decider.shard;
            shard.adopt_borrowed(number, ranges.as_ref(), from, PIECE, now)
        });
    }
}

fn log(peer: &Peer, line: Option<LogLine>) {
    match line {
        Some(LogLine::Differ(text)) => warn!(code = "peer_differs", "peer {} {text}", peer.address),
        Some(LogLine::Alike(text)) => info!("peer {} {text}", peer.address),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use lvs_core::sync::bulk::Kind as Told;
    use lvs_core::{Control, Options};

    use super::super::tests::{parts, peers_of, run_jobs, workers_of};
    use super::*;
    use crate::dataplane::worker::Worker;
    use crate::sync::entry;

    fn item(port: u16) -> Item {
        Item {
            kind: Told::Lives,
            left: Duration::from_secs(60),
            entry: entry(port),
        }
    }

    /// At most two portions are queued for a busy worker, however many items a peer sends. The
    /// worker that receives the packets of a connection gets its items.
    #[test]
    fn receiver_queues_at_most_two_portions_for_a_worker() {
        for workers in 1..=2 {
            items_wait_for(workers);
        }
    }

    fn items_wait_for(count: usize) {
        const ALL: u16 = 1000;
        let control = Control::new(Options {
            shards: count,
            ..Options::default()
        });
        let parts = parts(control, count);
        let mut workers = workers_of(&parts);
        for worker in &mut workers {
            worker.with_decider(|decider| {
                decider.shard.keep_replicas([3, 4]);
                decider.shard.listen_to(0, [1, 2]);
            });
        }
        let peers = peers_of(Some(&parts), ([192, 0, 2, 2], 1).into());
        let mut portions = Portions::new(&peers, 0, true);
        thread::scope(|scope| {
            let all = (0..ALL).map(item).collect();
            let delivery = scope.spawn(move || portions.deliver(all));
            let mut rounds = 0;
            while !delivery.is_finished() {
                for (number, worker) in workers.iter_mut().enumerate() {
                    let jobs = parts.1.worker(number).mailbox.take();
                    assert!(
                        jobs.len() <= PORTIONS_MAX,
                        "too many portions wait: {}",
                        jobs.len()
                    );
                    rounds += usize::from(!jobs.is_empty());
                    for job in jobs {
                        let before = connections(worker);
                        job(worker);
                        assert!(connections(worker) - before <= PORTION);
                    }
                }
                thread::yield_now();
            }
            assert!(
                delivery.join().expect("the thread does not panic"),
                "a packet worker has exited before all connections were delivered"
            );
            // The last portions of each worker are still queued when the delivery ends.
            let portions = usize::from(ALL).div_ceil(PORTION);
            assert!(rounds >= portions / PORTIONS_MAX - count, "{rounds}");
        });
        run_jobs(&parts, &mut workers);
        let view = parts.0.view();
        for (number, worker) in workers.iter_mut().enumerate() {
            let homes = (0..ALL).map(|port| view.worker_of_client(entry(port).client));
            let theirs = homes.filter(|&home| home == number).count();
            assert!(theirs > 0 && connections(worker) == theirs, "{number}");
        }
    }

    fn connections(worker: &mut Worker) -> usize {
        worker.with_decider(|decider| decider.shard.len())
    }
}

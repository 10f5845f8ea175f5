//! Receiving from a peer: the dataplane takes over its connections, and compares them with its
//! digests.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use lvs_core::replication::Heard;
use lvs_core::sync::bulk::{self, DIGEST_LEN, Digest, Item, Ranges};
use lvs_core::sync::services::ServiceDigests;
use tracing::{info, warn};

use super::accept::read_until;
use super::frame::{FrameError, Handshake, INTRODUCTION_LEN, Introduction, Kind, PROOF_LEN};
use super::tables::Said;
use super::{Peer, Peers, Step, Trouble, frame};
use crate::random::random;

/// The longest time until a peer accepts a connection, and until it has sent its proof.
const CONNECT: Duration = Duration::from_secs(2);
/// The longest time without a frame: a peer sends a digest every two seconds.
const SILENCE: Duration = Duration::from_secs(10);
/// The time between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(500);
/// The time between two attempts while the peer refuses the handshake.
const AGAIN_REFUSED: Duration = Duration::from_secs(5);
/// Connections that a packet worker takes over at once: less than 100 microseconds.
const PORTION: usize = 64;
/// Portions that wait for the packet worker.
const PORTIONS_MAX: usize = 2;
/// Slots that the packet worker examines at once.
const PIECE: usize = 8192;
/// Consecutive digests that may each request repairs. After these, only one in this many does.
const REPAIRS_IN_A_ROW: u32 = 3;
const REPAIRS_LATER: u32 = 15;

/// Receives from a peer until the dataplane ends.
pub(super) fn run(peers: &Arc<Peers>, peer: &Arc<Peer>) {
    let mut said = String::new();
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
            // Until the peer returns, this director owns its connections.
            adopt(peers, peer, None);
        }
        peer.is_free();
        // Log each reason once.
        if said != text {
            match trouble {
                Trouble::Away => info!("{} tells nothing: {text}", peer.address),
                Trouble::Refused => warn!("{} tells nothing: {text}", peer.address),
            }
        }
        said = if borrowed { String::new() } else { text };
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

/// Connects and receives until the session fails or the dataplane ends.
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
    let said = peer.tables().begin(identity, handshake.compares_services());
    say(peer, said);
    *borrowed = true;
    let ended = hear(peers, peer, identity, &mut stream, &handshake);
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

/// The handshake, in which both sides prove that they have the key.
fn introduce(peers: &Peers, stream: &mut TcpStream) -> Result<([u8; 16], Handshake), Ended> {
    let until = Instant::now() + CONNECT;
    stream.set_write_timeout(Some(CONNECT)).map_err(away)?;
    let ours = Introduction::new(peers.identity, random().map_err(away)?);
    stream.write_all(&ours.to_bytes()).map_err(away)?;
    let mut theirs = [0; INTRODUCTION_LEN];
    let closed = "it closes the connection: is this director among its peers, under the address that it sees? See its log";
    let read = |stream: &mut TcpStream, bytes: &mut [u8]| match read_until(stream, bytes, until) {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Err(refused(closed)),
        Err(error) => Err(away(error)),
        Ok(()) => Ok(()),
    };
    read(stream, &mut theirs)?;
    let theirs = Introduction::parse(&theirs)
        .ok_or_else(|| refused("what answers there is not a director of this kind"))?;
    if theirs.identity == peers.identity {
        return Err(refused("that is this director itself"));
    }
    let handshake = Handshake::new(&peers.key, ours, theirs);
    let mut proof = [0; PROOF_LEN];
    read(stream, &mut proof)?;
    if !handshake.is_sender(&proof) {
        return Err(refused(
            "it has another key: compare `sha256sum` of the key files",
        ));
    }
    stream
        .write_all(&handshake.receiver_proof())
        .map_err(away)?;
    Ok((theirs.identity, handshake))
}

/// Portions on their way to the packet worker.
struct Portions<'a> {
    peers: &'a Peers,
    number: usize,
    keeps_ties: bool,
    reply: Sender<Heard>,
    answers: Receiver<Heard>,
    under_way: usize,
}

impl Portions<'_> {
    /// Passes items to the packet worker; each portion waits for a free place. `false` if the
    /// worker has ended.
    fn deliver(&mut self, items: Vec<Item>) -> bool {
        let mut items = items.into_iter();
        loop {
            let portion: Vec<Item> = items.by_ref().take(PORTION).collect();
            if portion.is_empty() {
                return true;
            }
            if self.under_way >= PORTIONS_MAX && !self.wait() {
                return false;
            }
            let (reply, number, ties) = (self.reply.clone(), self.number, self.keeps_ties);
            self.under_way += 1;
            self.peers.on_worker(move |decider| {
                let _ = reply.send(decider.hear(number, ties, portion));
            });
        }
    }

    /// Waits until the packet worker has handled a portion.
    fn wait(&mut self) -> bool {
        let Ok(heard) = self.answers.recv_timeout(SILENCE) else {
            return false;
        };
        self.under_way -= 1;
        self.peers.heard(heard);
        true
    }
}

fn hear(
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
    peers.on_worker(move |decider| decider.shard.listen_to(number, keys));
    peer.step(Step::Bulk);
    info!("{} replicates its connections", peer.address);
    let (reply, answers) = channel();
    let mut portions = Portions {
        peers,
        number,
        keeps_ties: peers.identity > identity,
        reply,
        answers,
        under_way: 0,
    };
    let (begun, mut received) = (Instant::now(), 0);
    let mut whole = false;
    let mut repairs = 0_u32;
    let gone = || FrameError::Io(std::io::ErrorKind::TimedOut.into());
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
                while portions.under_way > 0 {
                    if !portions.wait() {
                        return Err(gone());
                    }
                }
                if !whole {
                    let took = begun.elapsed();
                    info!(
                        connections = received,
                        "the full sync from {} is complete, in {took:.1?}", peer.address
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
                let differ = peers
                    .ask_worker(move |decider, _| decider.shard.compare_borrowed(number, &digest))
                    .ok_or_else(gone)?;
                out.clear();
                repairs = match differ.ranges.is_empty() {
                    true => 0,
                    false => repairs + 1,
                };
                let asks = repairs % REPAIRS_LATER;
                if repairs > 0 && (repairs <= REPAIRS_IN_A_ROW || asks == 0) {
                    if repairs >= REPAIRS_IN_A_ROW {
                        // This director takes over the borrowed connections that the peer does not
                        // send again.
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

/// Compares a peer's services with those of this director.
fn compare_services(peers: &Peers, peer: &Peer, theirs: &ServiceDigests) {
    let ours = peers.services();
    let now = Instant::now();
    let said = peer.tables().compare(&ours, theirs, peers.alarm, now);
    say(peer, said);
}

/// Makes this director the owner of connections that it borrowed from a peer; it replicates them
/// from now on.
fn adopt(peers: &Peers, peer: &Peer, ranges: Option<&Ranges>) {
    let mut next = Some(0);
    while let Some(from) = next {
        let (number, ranges) = (peer.number, ranges.cloned());
        next = peers
            .ask_worker(move |decider, now| {
                let shard = &mut decider.shard;
                shard.adopt_borrowed(number, ranges.as_ref(), from, PIECE, now)
            })
            .flatten();
    }
}

/// Logs the result of a comparison.
fn say(peer: &Peer, said: Option<Said>) {
    match said {
        Some(Said::Differ(text)) => warn!("{} {text}", peer.address),
        Some(Said::Alike(text)) => info!("{} {text}", peer.address),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use lvs_core::sync::bulk::Kind as Told;
    use lvs_core::{Control, Options};

    use super::super::tests::{parts, peers_of, worker_of};
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

    /// After any number of items from a peer, at most two portions wait for a busy worker.
    #[test]
    fn items_of_peer_wait_for_packet_worker_in_two_portions() {
        const ALL: u16 = 1000;
        let control = Control::new(Options::default());
        let parts = parts(control);
        let mut worker = worker_of(&parts);
        worker.with_decider(|decider| {
            decider.shard.keep_replicas([3, 4]);
            decider.shard.listen_to(0, [1, 2]);
        });
        let peers = peers_of(Some(&parts), ([192, 0, 2, 2], 1).into());
        let (reply, answers) = channel();
        let mut portions = Portions {
            peers: &peers,
            number: 0,
            keeps_ties: true,
            reply,
            answers,
            under_way: 0,
        };
        thread::scope(|scope| {
            let all = (0..ALL).map(item).collect();
            let delivery = scope.spawn(move || portions.deliver(all));
            let mut rounds = 0;
            while !delivery.is_finished() {
                let jobs = parts.1.worker(0).mailbox.take();
                assert!(jobs.len() <= PORTIONS_MAX, "{} wait", jobs.len());
                rounds += usize::from(!jobs.is_empty());
                for job in jobs {
                    let before = connections(&mut worker);
                    job(&mut worker);
                    assert!(connections(&mut worker) - before <= PORTION);
                }
                thread::yield_now();
            }
            assert!(delivery.join().expect("no panic"), "it has delivered all");
            assert!(rounds >= usize::from(ALL) / PORTION / PORTIONS_MAX);
        });
        parts
            .1
            .worker(0)
            .mailbox
            .take()
            .into_iter()
            .for_each(|job| job(&mut worker));
        assert_eq!(connections(&mut worker), usize::from(ALL));
    }

    fn connections(worker: &mut Worker) -> usize {
        let mut count = 0;
        worker.with_decider(|decider| count = decider.shard.len());
        count
    }
}

//! Sends to a peer: first all connections, then changed connections, connections that had packets,
//! ranges that the peer requests again, and digests.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lvs_core::sync::bulk::{Pass, Ranges, count, portions};
use tracing::{info, warn};

use super::frame::{FrameError, Handshake, Kind, Sequence};
use super::{Peer, Peers, Place};
use crate::dataplane::hub::{Message, Outgoing, Work};
use lvs_process::deadline::write_within;

/// Number of slots that a packet worker examines in one job. Up to 512 connections in these slots
/// are sent.
const PIECE: usize = 8192;
/// Number of queued bytes above which the walk over the tables pauses.
const AHEAD: usize = 256 << 10;
/// Maximum number of bytes of items in a frame.
const ITEMS_MAX: usize = 64 << 10;
/// Queued items are split into portions of up to this many bytes, so that frames become nearly
/// full.
const PORTION: usize = ITEMS_MAX / 4;
/// Interval between two digests.
const DIGEST_PERIOD: Duration = Duration::from_secs(2);
/// Interval between two walks over the tables. Each walk sends the connections that had packets
/// since the previous walk.
const REFRESH_PERIOD: Duration = Duration::from_secs(30);
/// Time that the sender waits for more changes, in order to send them together.
const LINGER: Duration = Duration::from_millis(10);
/// Longest time that a peer may take to read a portion of its queue (some 256 KiB).
const PATIENCE: Duration = Duration::from_secs(10);

/// A walk over the tables of all packet workers.
struct Walk {
    pass: Pass,
    /// The next slot of the walk; `None` if only the templates remain.
    next: Option<Place>,
    templates: Option<usize>,
    begun: lvs_core::Instant,
}

impl Walk {
    fn new(peers: &Peers, pass: Pass) -> Self {
        let repairs = matches!(pass, Pass::Ranges(_));
        Self {
            pass,
            next: Some(Place::default()),
            templates: (!repairs).then_some(0),
            begun: peers.now(),
        }
    }
}

/// Sends the connections, their changes and digests to one peer until the session ends.
pub(super) fn run(peers: &Arc<Peers>, peer: &Arc<Peer>, stream: &TcpStream, handshake: &Handshake) {
    let outgoing = Arc::new(Outgoing::default());
    let ended = thread::scope(|scope| {
        let reader = thread::Builder::new().name("lvs-peer-asks".to_owned());
        let reads = {
            let outgoing = outgoing.clone();
            let mut asked = handshake.asked();
            move || {
                let ended = read(&mut asked, stream, &outgoing, peer);
                outgoing.close();
                ended
            }
        };
        let Ok(reader) = reader.spawn_scoped(scope, reads) else {
            return None;
        };
        if peers.hub.add(outgoing.clone()) {
            peers.set_has_receiver(true);
        }
        let mut session = Session {
            peers,
            peer,
            stream,
            handshake,
            outgoing: &outgoing,
            frames: handshake.replicated(),
            serial: 0,
        };
        let sent = session.tell();
        if peers.hub.remove(&outgoing) {
            peers.set_has_receiver(false);
        }
        let _ = stream.shutdown(std::net::Shutdown::Both);
        let asked = reader.join().ok()?;
        sent.err().map(FrameError::Io).or(asked.err())
    });
    if peers.is_stopping() {
        return;
    }
    match ended {
        Some(error @ FrameError::Io(_)) => {
            info!("replication to peer {} has ended: {error}", peer.address);
        }
        Some(error) => {
            peers.count_ended(&error);
            warn!("replication to peer {} has ended: {error}", peer.address);
        }
        None => info!(
            "replication to peer {} has ended: the thread that reads from the peer could not be started, or has panicked",
            peer.address
        ),
    }
}

/// Reads the receiving peer's requests and its answers to digests, until the session fails.
fn read(
    asked: &mut Sequence,
    mut stream: &TcpStream,
    outgoing: &Outgoing,
    peer: &Peer,
) -> Result<(), FrameError> {
    // The peer answers each digest.
    stream.set_read_timeout(Some(PATIENCE + DIGEST_PERIOD))?;
    loop {
        match asked.read(&mut stream)? {
            (Kind::Want, ranges) => {
                let ranges = ranges.chunks_exact(2);
                outgoing.want(ranges.map(|range| u16::from_be_bytes([range[0], range[1]])));
            }
            (Kind::Seen, serial) => {
                let serial = serial.try_into().map_err(|_| FrameError::Malformed)?;
                peer.seen(u64::from_be_bytes(serial));
            }
            _ => return Err(FrameError::Malformed),
        }
    }
}

struct Session<'a> {
    peers: &'a Arc<Peers>,
    peer: &'a Peer,
    stream: &'a TcpStream,
    handshake: &'a Handshake,
    outgoing: &'a Arc<Outgoing>,
    frames: Sequence,
    /// The serial number of the last digest.
    serial: u64,
}

impl Session<'_> {
    /// Sends connections, digests and changes until the session is closed or fails, or the
    /// dataplane stops.
    fn tell(&mut self) -> io::Result<()> {
        let (peers, outgoing) = (self.peers, self.outgoing);
        let mut bytes = Vec::new();
        let keys = peers.keys.map(u64::to_be_bytes).concat();
        self.frames.seal(Kind::Keys, &keys, &mut bytes);
        write_within(self.stream, &bytes, PATIENCE)?;
        let mut walk = Some(Walk::new(peers, Pass::All));
        let mut visited = peers.now();
        let (mut refresh, mut digest) = (Instant::now() + REFRESH_PERIOD, Instant::now());
        while !peers.is_stopping() {
            let mut until = Instant::now();
            match &mut walk {
                Some(going) => {
                    if outgoing.waiting() >= AHEAD {
                        // Messages behind an incomplete digest cannot be written yet.
                        until += LINGER;
                    } else if !step(peers, going, outgoing) {
                        let done = walk.take();
                        match done.map(|done| (done.pass, done.begun)) {
                            Some((Pass::All, begun)) => {
                                visited = begun;
                                outgoing.push(Message::Whole);
                            }
                            Some((Pass::Since(_), begun)) => visited = begun,
                            _ => {}
                        }
                        digest = Instant::now();
                    }
                }
                None if Instant::now() >= refresh => {
                    refresh = Instant::now() + REFRESH_PERIOD;
                    walk = Some(Walk::new(peers, Pass::Since(visited)));
                }
                None => until = refresh.min(digest),
            }
            // Digests are useless before the full sync is complete.
            let whole = matches!(&walk, Some(going) if matches!(going.pass, Pass::All));
            if !whole && Instant::now() >= digest {
                digest = Instant::now() + DIGEST_PERIOD;
                if outgoing.begin_digest(peers.workers()) {
                    let to = outgoing.clone();
                    peers.on_workers(move |decider| {
                        let shard = &decider.shard;
                        to.add_to_digest(shard.number(), &shard.replicated());
                    });
                }
            }
            let Work {
                messages,
                lost,
                closed,
                wanted,
            } = outgoing.take(until);
            if lost {
                walk = Some(full_sync(peers, walk));
            } else if !wanted.is_empty() {
                peers.count(|counts| &counts.repairs);
                // Do not replace a walk that covers more connections.
                if walk.is_none() {
                    walk = Some(Walk::new(peers, Pass::Ranges(Ranges::new(wanted))));
                }
            }
            if messages.is_empty() && !closed {
                continue;
            }
            self.write(messages)?;
            if closed {
                break;
            }
            if walk.is_none() && outgoing.waiting() == 0 {
                outgoing.linger(LINGER);
            }
        }
        // The last messages of a stopping dataplane, including those behind an incomplete digest.
        outgoing.close();
        loop {
            let messages = outgoing.take(Instant::now()).messages;
            if messages.is_empty() {
                return Ok(());
            }
            self.write(messages)?;
        }
    }

    fn write(&mut self, all: VecDeque<Message>) -> io::Result<()> {
        let mut bytes = Vec::new();
        let mut items: Vec<u8> = Vec::new();
        let frames = &mut self.frames;
        let seal_items = |frames: &mut Sequence, items: &mut Vec<u8>, bytes: &mut Vec<u8>| {
            if !items.is_empty() {
                frames.seal(Kind::Items, items, bytes);
                items.clear();
            }
        };
        for message in all {
            match message {
                Message::Items(more) => {
                    for more in portions(&more, PORTION) {
                        if items.len() + more.len() > ITEMS_MAX {
                            seal_items(frames, &mut items, &mut bytes);
                        }
                        items.extend(more);
                        self.peers.add(|counts| &counts.items_sent, count(more));
                    }
                }
                Message::Digest(digest) => {
                    seal_items(frames, &mut items, &mut bytes);
                    self.serial += 1;
                    let mut payload = self.serial.to_be_bytes().to_vec();
                    digest.write(&mut payload);
                    if self.handshake.compares_services() {
                        self.peers.services().write(&mut payload);
                    }
                    self.peer.sent(self.serial);
                    frames.seal(Kind::Digest, &payload, &mut bytes);
                }
                Message::Whole => {
                    seal_items(frames, &mut items, &mut bytes);
                    frames.seal(Kind::Whole, &[], &mut bytes);
                }
            }
        }
        seal_items(frames, &mut items, &mut bytes);
        write_within(self.stream, &bytes, PATIENCE)?;
        self.peers
            .add(|counts| &counts.bytes_sent, bytes.len() as u64);
        Ok(())
    }
}

/// Returns the walk of a full sync, after messages were lost. A full sync that has sent no
/// connection yet is continued and not counted again: while a digest is incomplete, a full queue
/// loses messages repeatedly.
fn full_sync(peers: &Peers, going: Option<Walk>) -> Walk {
    let unbegun =
        |walk: &Walk| matches!(walk.pass, Pass::All) && walk.next == Some(Place::default());
    going.filter(unbegun).unwrap_or_else(|| {
        peers.count(|counts| &counts.full_syncs);
        Walk::new(peers, Pass::All)
    })
}

/// Queues the connections or templates of the next piece of a walk; `false` at its end.
fn step(peers: &Peers, walk: &mut Walk, outgoing: &Arc<Outgoing>) -> bool {
    if let Some(place) = walk.next {
        let (to, pass) = (outgoing.clone(), walk.pass.clone());
        walk.next = peers.walk(place, move |decider, from, now| {
            let shard = &mut decider.shard;
            let (items, next) = shard.replicated_piece(from, PIECE, &pass, now);
            // Earlier changes are sent first.
            if !items.is_empty() {
                to.push_items(shard.number(), items.into());
            }
            next
        });
        return true;
    }
    let Some(from) = walk.templates else {
        return false;
    };
    let since = match &walk.pass {
        Pass::Since(since) => Some(*since),
        _ => None,
    };
    let (items, next) = peers.templates(from, PIECE, since);
    if !items.is_empty() {
        outgoing.push(Message::Items(items.into()));
    }
    walk.templates = next;
    next.is_some()
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::super::tests::peers_of;
    use super::*;

    #[test]
    fn lost_message_begins_full_sync_unless_unstarted_full_sync_is_pending() {
        let peers = peers_of(None, ([127, 0, 0, 1], 1).into());
        let full_syncs = || peers.report().full_syncs;
        let walk = full_sync(&peers, None);
        assert_eq!(full_syncs(), 1);
        let mut walk = full_sync(&peers, Some(walk));
        assert_eq!(full_syncs(), 1);
        walk.next = None;
        let walk = full_sync(&peers, Some(walk));
        assert_eq!((full_syncs(), walk.next), (2, Some(Place::default())));
        full_sync(&peers, Some(Walk::new(&peers, Pass::Since(peers.now()))));
        assert_eq!(full_syncs(), 3);
    }

    #[test]
    fn write_to_receiver_that_reads_too_slowly_times_out() -> io::Result<()> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        let (mut slow, _) = listener.accept()?;
        thread::spawn(move || {
            let mut byte = [0];
            while slow.read(&mut byte).is_ok_and(|read| read == 1) {
                thread::sleep(Duration::from_millis(10));
            }
        });
        // More than all socket buffers can store.
        let bytes = vec![0; 64 << 20];
        let given_up = write_within(&stream, &bytes, Duration::from_millis(200));
        let kind = given_up
            .expect_err("all bytes were written within the time limit")
            .kind();
        let known = [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock];
        assert!(known.contains(&kind), "{kind:?}");
        Ok(())
    }
}

//! The outgoing queue of each peer that receives connections from this director. Each peer reads at
//! its own speed.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lvs_core::sync::bulk::{DIGEST_LEN, Digest};

use lvs_sys::lock;

/// Maximum number of queued bytes for one peer. A peer whose queue is full gets a full sync.
const WAITING_MAX: usize = 16 << 20;
/// Number of bytes after which a session sends before it reads more of its queue. The last message
/// may exceed it.
const PORTION: usize = 256 << 10;
/// Maximum number of ranges of connections that a peer can request again.
const WANTED_MAX: usize = lvs_core::sync::bulk::RANGES;

#[derive(Debug, Default)]
pub(super) struct Hub(Mutex<Vec<Arc<Outgoing>>>);

impl Hub {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<Outgoing>>> {
        lock(&self.0)
    }

    /// Adds the queue of a peer. Returns true if it is the first queue.
    pub(super) fn add(&self, outgoing: Arc<Outgoing>) -> bool {
        let mut all = self.all();
        all.push(outgoing);
        all.len() == 1
    }

    /// Removes the queue of a peer. Returns true if it was the last queue.
    pub(super) fn remove(&self, outgoing: &Arc<Outgoing>) -> bool {
        let mut all = self.all();
        all.retain(|other| !Arc::ptr_eq(other, outgoing));
        all.is_empty()
    }

    pub(super) fn close(&self) {
        for outgoing in self.all().iter() {
            outgoing.close();
        }
    }

    /// Queues changed connections of a packet worker for all peers. If changes are lost, each peer
    /// gets a full sync.
    pub(super) fn tell(&self, worker: usize, items: &Arc<[u8]>, lost: bool) {
        for outgoing in self.all().iter() {
            outgoing.push_items(worker, items.clone());
            if lost {
                outgoing.lose();
            }
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Message {
    Items(Arc<[u8]>),
    Digest(Arc<Digest>),
    Whole,
}

impl Message {
    fn len(&self) -> usize {
        match self {
            Self::Items(items) => items.len(),
            Self::Digest(_) => DIGEST_LEN,
            Self::Whole => 1,
        }
    }
}

/// A digest that still lacks the connections of some packet workers. A digest must describe exactly
/// the items that are queued before it, and no worker waits for another. New items of workers whose
/// connections are already in the digest therefore wait in `behind`.
#[derive(Debug)]
struct Gathering {
    digest: Digest,
    /// For each packet worker, whether its connections are in the digest.
    added: Vec<bool>,
    behind: Vec<Message>,
}

#[derive(Debug, Default)]
pub(super) struct Outgoing {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<Message>,
    gathering: Option<Gathering>,
    /// Number of bytes of all messages, including those in `gathering`.
    bytes: usize,
    lost: bool,
    closed: bool,
    wanted: Vec<u16>,
}

impl Queue {
    /// Adds the length of a message to `bytes`. If the queue has no room for the message, records
    /// that it is lost, and returns `false`.
    fn has_room(&mut self, message: &Message) -> bool {
        let bytes = self.bytes + message.len();
        if bytes > WAITING_MAX {
            self.lost = true;
            return false;
        }
        self.bytes = bytes;
        true
    }
}

#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) messages: VecDeque<Message>,
    /// Whether a message was lost because the queue was full.
    pub(super) lost: bool,
    pub(super) closed: bool,
    pub(super) wanted: Vec<u16>,
}

impl Outgoing {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    pub(super) fn push(&self, message: Message) {
        self.push_to(self.queue(), message);
    }

    fn push_to(&self, mut queue: MutexGuard<'_, Queue>, message: Message) {
        if !queue.has_room(&message) {
            return;
        }
        queue.messages.push_back(message);
        let first = queue.messages.len() == 1;
        drop(queue);
        if first {
            self.changed.notify_one();
        }
    }

    pub(super) fn push_items(&self, worker: usize, items: Arc<[u8]>) {
        let (message, mut queue) = (Message::Items(items), self.queue());
        let has_added = |going: &Gathering| going.added.get(worker).is_some_and(|&added| added);
        if !queue.gathering.as_ref().is_some_and(has_added) {
            self.push_to(queue, message);
        } else if queue.has_room(&message)
            && let Some(gathering) = &mut queue.gathering
        {
            gathering.behind.push(message);
        }
    }

    /// Begins a digest of the connections of `workers` packet workers. Each worker adds its part by
    /// [`add_to_digest`](Self::add_to_digest). Returns `false` if an earlier digest is incomplete
    /// or the queue is closed.
    pub(super) fn begin_digest(&self, workers: usize) -> bool {
        let mut queue = self.queue();
        if queue.closed || queue.gathering.is_some() {
            return false;
        }
        queue.gathering = Some(Gathering {
            digest: Digest::default(),
            added: vec![false; workers],
            behind: Vec::new(),
        });
        true
    }

    /// Adds the connections of a packet worker to the present digest. The caller has already queued
    /// all earlier items of the worker. After the last worker, the digest is queued, or omitted if
    /// the queue has no room, and the items that have waited for it are queued.
    pub(super) fn add_to_digest(&self, worker: usize, digest: &Digest) {
        let mut queue = self.queue();
        let Some(gathering) = &mut queue.gathering else {
            return;
        };
        if let Some(added) = gathering.added.get_mut(worker).filter(|added| !**added) {
            *added = true;
            gathering.digest.merge(digest);
        }
        if gathering.added.contains(&false) {
            return;
        }
        if let Some(Gathering { digest, behind, .. }) = queue.gathering.take() {
            let message = Message::Digest(Arc::new(digest));
            if queue.has_room(&message) {
                queue.messages.push_back(message);
            }
            queue.messages.extend(behind);
        }
        drop(queue);
        self.changed.notify_one();
    }

    /// Records that messages were lost, so that the peer gets a full sync.
    fn lose(&self) {
        self.queue().lost = true;
        self.changed.notify_one();
    }

    /// Records that the peer requests these ranges of connections again.
    pub(super) fn want(&self, ranges: impl IntoIterator<Item = u16>) {
        let mut queue = self.queue();
        for range in ranges {
            if queue.wanted.len() < WANTED_MAX && !queue.wanted.contains(&range) {
                queue.wanted.push(range);
            }
        }
        self.changed.notify_one();
    }

    /// Ends the session without sending an incomplete digest.
    pub(super) fn close(&self) {
        let mut queue = self.queue();
        queue.closed = true;
        if let Some(gathering) = queue.gathering.take() {
            queue.messages.extend(gathering.behind);
        }
        drop(queue);
        self.changed.notify_one();
    }

    pub(super) fn waiting(&self) -> usize {
        self.queue().bytes
    }

    /// Waits until `until`, or until there is a message, a request or a loss, or the session has
    /// ended. Returns all requests, and a portion of the messages.
    pub(super) fn take(&self, until: Instant) -> Work {
        let mut queue = self.queue();
        loop {
            let idle = queue.messages.is_empty() && queue.wanted.is_empty();
            let left = until.saturating_duration_since(Instant::now());
            if !idle || queue.lost || queue.closed || left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let mut messages = VecDeque::new();
        let mut bytes = 0;
        while bytes < PORTION
            && let Some(next) = queue.messages.pop_front()
        {
            bytes += next.len();
            messages.push_back(next);
        }
        queue.bytes -= bytes;
        Work {
            messages,
            lost: std::mem::take(&mut queue.lost),
            closed: queue.closed,
            wanted: std::mem::take(&mut queue.wanted),
        }
    }

    /// Waits for `time`, so that messages that arrive in the meantime are sent together; returns at
    /// once if the session has ended.
    pub(super) fn linger(&self, time: Duration) {
        let queue = self.queue();
        if !queue.closed {
            // A wait on `changed` would end at the first new message.
            drop(queue);
            std::thread::sleep(time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_of_slow_receiver_is_bounded_and_requests_full_sync() {
        let (hub, slow) = (Hub::default(), Arc::new(Outgoing::default()));
        assert!(hub.add(slow.clone()));
        let items: Arc<[u8]> = vec![0; 1 << 20].into();
        for _ in 0..100 {
            hub.tell(0, &items, false);
        }
        assert_eq!(slow.waiting(), WAITING_MAX);
        let work = slow.take(Instant::now());
        assert!(work.lost && work.messages.len() == 1);
        assert_eq!(slow.waiting(), WAITING_MAX - items.len());
        for _ in 1..16 {
            let work = slow.take(Instant::now());
            assert!(!work.lost && work.messages.len() == 1);
        }
        assert!(slow.take(Instant::now()).messages.is_empty());
        assert_eq!(slow.waiting(), 0);
        hub.tell(0, &items, true);
        assert!(slow.take(Instant::now()).lost);
        slow.want((0..2000).chain(0..2000));
        assert_eq!(slow.take(Instant::now()).wanted.len(), WANTED_MAX);
        assert!(hub.remove(&slow));
    }

    /// A digest with one connection for each number. The hash of the connection is the number.
    fn digest_of(numbers: &[u8]) -> Digest {
        let mut bytes = vec![0; DIGEST_LEN];
        let sum = numbers.iter().fold(0, |sum, number| sum ^ number);
        let count = u32::try_from(numbers.len()).expect("the number is small");
        bytes[7] = sum;
        bytes[8..12].copy_from_slice(&count.to_be_bytes());
        Digest::parse(&bytes).expect("the digest is valid")
    }

    /// The digest describes the items that are queued before it, in whatever order the three
    /// workers add their connections.
    #[test]
    fn digest_of_several_workers_describes_items_before_it() {
        const ORDERS: [[usize; 3]; 6] = [
            [0, 1, 2],
            [0, 2, 1],
            [1, 0, 2],
            [1, 2, 0],
            [2, 0, 1],
            [2, 1, 0],
        ];
        for order in ORDERS {
            let outgoing = Outgoing::default();
            let (mut owned, mut number) = ([const { Vec::new() }; 3], 0);
            let mut all_open = |owned: &mut [Vec<u8>; 3]| {
                for (worker, owned) in owned.iter_mut().enumerate() {
                    number += 1;
                    owned.push(number);
                    outgoing.push_items(worker, vec![number].into());
                }
            };
            for _ in 0..2 {
                all_open(&mut owned);
                assert!(outgoing.begin_digest(3));
                assert!(
                    !outgoing.begin_digest(3),
                    "a second digest has begun while one is incomplete"
                );
                for worker in order {
                    all_open(&mut owned);
                    outgoing.add_to_digest(worker, &digest_of(&owned[worker]));
                }
                all_open(&mut owned);
            }
            let (mut seen, mut digests) = (Vec::new(), 0);
            for message in outgoing.take(Instant::now()).messages {
                match message {
                    Message::Items(items) => seen.extend(items.iter()),
                    Message::Digest(digest) => {
                        assert_eq!(*digest, digest_of(&seen), "{order:?}");
                        digests += 1;
                    }
                    Message::Whole => panic!("the end of a full sync was queued"),
                }
            }
            let in_order = |owned: &[u8]| {
                let theirs = seen.iter().filter(|number| owned.contains(number));
                theirs.eq(owned)
            };
            assert!(
                digests == 2 && owned.iter().all(|owned| in_order(owned)),
                "{order:?}: {digests} digests"
            );
            assert_eq!(outgoing.waiting(), 0);
        }
    }

    #[test]
    fn items_after_incomplete_digest_are_bounded_and_sent_after_close() {
        let outgoing = Outgoing::default();
        assert!(outgoing.begin_digest(2));
        outgoing.add_to_digest(1, &Digest::default());
        let items: Arc<[u8]> = vec![0; 1 << 20].into();
        for _ in 0..100 {
            outgoing.push_items(1, items.clone());
        }
        assert_eq!(outgoing.waiting(), WAITING_MAX);
        let work = outgoing.take(Instant::now());
        assert!(work.lost && work.messages.is_empty());
        outgoing.close();
        assert!(!outgoing.begin_digest(2));
        outgoing.add_to_digest(0, &Digest::default());
        for _ in 0..16 {
            assert_eq!(outgoing.take(Instant::now()).messages.len(), 1);
        }
        assert_eq!(outgoing.waiting(), 0);
    }

    #[test]
    fn peer_queue_is_taken_in_portions_and_in_order() {
        let outgoing = Outgoing::default();
        for n in 0..100_u8 {
            outgoing.push(Message::Items(vec![n; 50 << 10].into()));
        }
        outgoing.push(Message::Whole);
        let mut next = 0;
        while outgoing.waiting() > 0 {
            let work = outgoing.take(Instant::now());
            assert!(work.messages.iter().map(Message::len).sum::<usize>() < PORTION + (50 << 10));
            for message in work.messages {
                match message {
                    Message::Items(items) => assert_eq!(items[0], next),
                    Message::Whole | Message::Digest(_) => assert_eq!(next, 100),
                }
                next += 1;
            }
        }
        assert_eq!(next, 101);
    }
}

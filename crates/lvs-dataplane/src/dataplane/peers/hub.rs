//! The outgoing queue of each peer that receives connections from this director. Each peer reads at
//! its own speed.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lvs_core::sync::bulk::{DIGEST_LEN, Digest};

use crate::lock::lock;

/// Bytes that may wait for one peer. If they exceed it, the peer receives a full sync.
const WAITING_MAX: usize = 16 << 20;
/// A session stops taking messages from its queue when it has this many bytes; the last message may
/// exceed it.
const PORTION: usize = 256 << 10;
/// The most ranges that a peer may request again.
const WANTED_MAX: usize = lvs_core::sync::bulk::RANGES;

/// The queues of all connected peers.
#[derive(Debug, Default)]
pub(in crate::dataplane) struct Hub(Mutex<Vec<Arc<Outgoing>>>);

impl Hub {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<Outgoing>>> {
        lock(&self.0)
    }

    /// Adds the queue of a peer; `true` if it is the first.
    pub(super) fn add(&self, outgoing: Arc<Outgoing>) -> bool {
        let mut all = self.all();
        all.push(outgoing);
        all.len() == 1
    }

    /// Removes the queue of a peer; `true` if it was the last.
    pub(super) fn remove(&self, outgoing: &Arc<Outgoing>) -> bool {
        let mut all = self.all();
        all.retain(|other| !Arc::ptr_eq(other, outgoing));
        all.is_empty()
    }

    /// Ends all sessions.
    pub(super) fn close(&self) {
        for outgoing in self.all().iter() {
            outgoing.close();
        }
    }

    /// Queues changed connections for all peers. If some changes are lost, each peer receives a
    /// full sync.
    pub(in crate::dataplane) fn tell(&self, items: &Arc<[u8]>, lost: bool) {
        for outgoing in self.all().iter() {
            outgoing.push(Said::Items(items.clone()));
            if lost {
                outgoing.lose();
            }
        }
    }
}

/// A message for a peer.
#[derive(Clone, Debug)]
pub(super) enum Said {
    Items(Arc<[u8]>),
    Digest(Arc<Digest>),
    Whole,
}

impl Said {
    fn len(&self) -> usize {
        match self {
            Self::Items(items) => items.len(),
            Self::Digest(_) => DIGEST_LEN,
            Self::Whole => 1,
        }
    }
}

/// The outgoing queue of one peer, and the ranges that this peer has requested again.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    said: VecDeque<Said>,
    bytes: usize,
    lost: bool,
    closed: bool,
    wanted: Vec<u16>,
}

/// The next messages and requests for a session to handle.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) said: VecDeque<Said>,
    /// A message was lost because the queue was full.
    pub(super) lost: bool,
    pub(super) closed: bool,
    pub(super) wanted: Vec<u16>,
}

impl Outgoing {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    pub(super) fn push(&self, said: Said) {
        let first = {
            let mut queue = self.queue();
            let bytes = queue.bytes + said.len();
            if bytes > WAITING_MAX {
                queue.lost = true;
                return;
            }
            queue.bytes = bytes;
            queue.said.push_back(said);
            queue.said.len() == 1
        };
        if first {
            self.changed.notify_one();
        }
    }

    /// Records that messages are lost, so that the peer receives a full sync.
    fn lose(&self) {
        self.queue().lost = true;
        self.changed.notify_one();
    }

    /// Records that the peer requests these ranges again.
    pub(super) fn want(&self, ranges: impl IntoIterator<Item = u16>) {
        let mut queue = self.queue();
        for range in ranges {
            if queue.wanted.len() < WANTED_MAX && !queue.wanted.contains(&range) {
                queue.wanted.push(range);
            }
        }
        self.changed.notify_one();
    }

    /// Ends the session.
    pub(super) fn close(&self) {
        self.queue().closed = true;
        self.changed.notify_one();
    }

    /// Bytes in the queue.
    pub(super) fn waiting(&self) -> usize {
        self.queue().bytes
    }

    /// Takes the requests and a portion of the queued messages; waits for the first of them until
    /// `until`.
    pub(super) fn take(&self, until: Instant) -> Work {
        let mut queue = self.queue();
        loop {
            let idle = queue.said.is_empty() && queue.wanted.is_empty();
            let left = until.saturating_duration_since(Instant::now());
            if !idle || queue.lost || queue.closed || left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let mut said = VecDeque::new();
        let mut bytes = 0;
        while bytes < PORTION
            && let Some(next) = queue.said.pop_front()
        {
            bytes += next.len();
            said.push_back(next);
        }
        queue.bytes -= bytes;
        Work {
            said,
            lost: std::mem::take(&mut queue.lost),
            closed: queue.closed,
            wanted: std::mem::take(&mut queue.wanted),
        }
    }

    /// Waits for more messages, so that the session sends them together.
    pub(super) fn linger(&self, time: Duration) {
        let queue = self.queue();
        if !queue.closed {
            // A notification means that there is work, and the queue contains some already.
            drop(queue);
            std::thread::sleep(time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_of_slow_receiver_requests_full_sync() {
        let (hub, slow) = (Hub::default(), Arc::new(Outgoing::default()));
        assert!(hub.add(slow.clone()));
        let items: Arc<[u8]> = vec![0; 1 << 20].into();
        for _ in 0..100 {
            hub.tell(&items, false);
        }
        assert_eq!(slow.waiting(), WAITING_MAX);
        let work = slow.take(Instant::now());
        assert!(work.lost && work.said.len() == 1);
        assert_eq!(slow.waiting(), WAITING_MAX - items.len());
        for _ in 1..16 {
            let work = slow.take(Instant::now());
            assert!(!work.lost && work.said.len() == 1);
        }
        assert!(slow.take(Instant::now()).said.is_empty());
        assert_eq!(slow.waiting(), 0);
        hub.tell(&items, true);
        assert!(slow.take(Instant::now()).lost);
        slow.want((0..2000).chain(0..2000));
        assert_eq!(slow.take(Instant::now()).wanted.len(), WANTED_MAX);
        assert!(hub.remove(&slow));
    }

    #[test]
    fn queue_is_taken_in_portions_and_in_order() {
        let outgoing = Outgoing::default();
        for n in 0..100_u8 {
            outgoing.push(Said::Items(vec![n; 50 << 10].into()));
        }
        outgoing.push(Said::Whole);
        let mut next = 0;
        while outgoing.waiting() > 0 {
            let work = outgoing.take(Instant::now());
            assert!(work.said.iter().map(Said::len).sum::<usize>() < PORTION + (50 << 10));
            for said in work.said {
                match said {
                    Said::Items(items) => assert_eq!(items[0], next),
                    Said::Whole | Said::Digest(_) => assert_eq!(next, 100),
                }
                next += 1;
            }
        }
        assert_eq!(next, 101);
    }
}

//! The queues of packets that one packet worker passes to another, which owns the connection:
//! frames as received, and datagrams that were reassembled from fragments.
//!
//! Each worker has a bounded queue for every other worker, so a flood from one worker does not
//! displace the packets of others. A sender never waits: if the queue is full, it drops and counts
//! the packet. A queue keeps the order of arrival.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use lvs_packet::frame::Frame;
use lvs_packet::net::PortId;
use lvs_packet::pipeline::Whole;
use lvs_sys::lock;

/// Maximum number of queued packets for one worker, from all other workers together.
pub(crate) const PARCELS_MAX: usize = 4096;
/// Maximum number of queued bytes for one worker, from all other workers together.
pub(crate) const BYTES_MAX: usize = 16 << 20;

/// A packet for another worker, and the port that received it.
#[derive(Debug)]
pub(super) enum Parcel {
    Frame(PortId, Frame),
    /// A datagram that was reassembled from fragments.
    Whole(PortId, Box<Whole>),
}

impl Parcel {
    fn size(&self) -> usize {
        match self {
            Self::Frame(_, frame) => frame.len(),
            Self::Whole(_, whole) => whole.size(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Inbox {
    /// One queue for each sending worker, by its number. The worker's own queue stays empty.
    from: Vec<Queue>,
    /// True if a queue may contain a packet.
    waits: AtomicBool,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Queue(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    parcels: VecDeque<Parcel>,
    bytes: usize,
}

impl Inbox {
    /// Creates the empty queues of one worker, one for each of `workers` senders.
    pub(super) fn new(workers: usize) -> Self {
        Self {
            from: (0..workers).map(|_| Queue::default()).collect(),
            waits: AtomicBool::new(false),
        }
    }

    /// Queues parcels in order, as far as the queue has room, and drops the others: `parcels` is
    /// empty afterwards. Returns the number of queued parcels, and whether the caller must wake the
    /// worker.
    pub(super) fn put(&self, from: usize, parcels: &mut Vec<Parcel>) -> (usize, bool) {
        let others = self.from.len().saturating_sub(1).max(1);
        let Some(queue) = self.from.get(from) else {
            parcels.clear();
            return (0, false);
        };
        let mut waiting = lock(&queue.0);
        let mut taken = 0;
        for parcel in parcels.drain(..) {
            let bytes = waiting.bytes + parcel.size();
            if waiting.parcels.len() < PARCELS_MAX / others && bytes <= BYTES_MAX / others {
                waiting.parcels.push_back(parcel);
                waiting.bytes = bytes;
                taken += 1;
            }
        }
        drop(waiting);
        (taken, taken > 0 && !self.waits.swap(true, Ordering::AcqRel))
    }

    /// Moves up to about `most` queued parcels into the empty `parcels`, at most the same number
    /// from each worker. Returns true if more are queued.
    pub(super) fn take(&self, parcels: &mut Vec<Parcel>, most: usize) -> bool {
        if !self.waits.load(Ordering::Relaxed) || !self.waits.swap(false, Ordering::AcqRel) {
            return false;
        }
        let part = (most / self.from.len().saturating_sub(1).max(1)).max(1);
        let mut more = false;
        for queue in &self.from {
            let mut waiting = lock(&queue.0);
            let count = waiting.parcels.len().min(part);
            let size = |parcel: &Parcel| parcel.size();
            let bytes: usize = waiting.parcels.iter().take(count).map(size).sum();
            waiting.bytes -= bytes;
            parcels.extend(waiting.parcels.drain(..count));
            more |= !waiting.parcels.is_empty();
        }
        if more {
            self.waits.store(true, Ordering::Release);
        }
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parcels(count: usize, len: usize) -> Vec<Parcel> {
        let parcel = |_| Parcel::Frame(PortId(1), Frame::from_bytes(&vec![0; len]));
        (0..count).map(parcel).collect()
    }

    #[test]
    fn inbox_bounds_packets_and_bytes_of_each_worker() {
        let inbox = Inbox::new(3);
        let share = PARCELS_MAX / 2;
        let mut many = parcels(share + 5, 60);
        assert_eq!(inbox.put(1, &mut many), (share, true));
        assert!(many.is_empty());
        assert_eq!(
            inbox.put(1, &mut parcels(1, 60)),
            (0, false),
            "a full queue accepted a packet"
        );
        assert_eq!(
            inbox.put(2, &mut parcels(7, 60)),
            (7, false),
            "a full queue has reduced the room for another worker's packets"
        );
        let mut taken = Vec::new();
        assert!(!inbox.take(&mut taken, usize::MAX));
        assert_eq!(taken.len(), share + 7);
        assert_eq!(inbox.put(1, &mut parcels(1, 60)), (1, true));

        let long = BYTES_MAX / 2 / 65_536;
        let inbox = Inbox::new(3);
        assert_eq!(
            inbox.put(2, &mut parcels(long + 3, 65_536)),
            (long, true),
            "the queue accepted more bytes than its limit"
        );
    }

    #[test]
    fn inbox_is_emptied_in_portions_that_include_every_worker() {
        let inbox = Inbox::new(3);
        inbox.put(1, &mut parcels(300, 60));
        inbox.put(2, &mut parcels(5, 60));
        let mut rounds = Vec::new();
        loop {
            let mut taken = Vec::new();
            let more = inbox.take(&mut taken, 200);
            rounds.push(taken.len());
            if !more {
                break;
            }
        }
        assert_eq!(
            rounds,
            [105, 100, 100],
            "a flood from one worker has delayed the packets of others"
        );
        assert_eq!(
            inbox.put(1, &mut parcels(1, 60)),
            (1, true),
            "the worker was not woken again"
        );
        inbox.take(&mut Vec::new(), 200);
        let share = BYTES_MAX / 2 / 65_536;
        assert_eq!(inbox.put(1, &mut parcels(share + 1, 65_536)).0, share);
    }
}

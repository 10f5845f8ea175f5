//! What packet workers hand over to one another: frames that have come to another worker than the
//! one whose connection they belong to, and datagrams that were put together elsewhere.
//!
//! Each worker has one bounded queue for every other one, so that a worker which is handed a flood
//! by one of them still takes what the others have. Nobody waits: what finds its queue full is
//! dropped and counted where it came in. Frames are in the order in which they came.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::lock::lock;
use lvs_packet::frame::Frame;
use lvs_packet::net::PortId;
use lvs_packet::pipeline::Whole;

/// Frames that may wait for one worker, of all others together.
pub(crate) const PARCELS_MAX: usize = 4096;
/// Bytes of them.
pub(crate) const BYTES_MAX: usize = 16 << 20;

/// What is handed over, with the port that it came in by.
#[derive(Debug)]
pub(super) enum Parcel {
    /// A frame as it was received.
    Frame(PortId, Frame),
    /// A datagram that had come in fragments.
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

/// The queues of one worker.
#[derive(Debug)]
pub(super) struct Inbox {
    /// One for each worker; its own is never used.
    from: Vec<Queue>,
    /// Something may be there.
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
    /// For one of so many workers.
    pub(super) fn new(workers: usize) -> Self {
        Self {
            from: (0..workers).map(|_| Queue::default()).collect(),
            waits: AtomicBool::new(false),
        }
    }

    /// Takes over what there is room for, in order, and leaves `parcels` empty. Says how many were
    /// taken, and whether the worker has to be woken.
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

    /// Takes out what waits, into `parcels`, which is empty: about `most`, in equal parts of all
    /// other workers. True if something is left.
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
    fn what_is_handed_over_is_bounded_for_each_worker() {
        let inbox = Inbox::new(3);
        let share = PARCELS_MAX / 2;
        let mut many = parcels(share + 5, 60);
        assert_eq!(inbox.put(1, &mut many), (share, true));
        assert!(many.is_empty());
        assert_eq!(inbox.put(1, &mut parcels(1, 60)), (0, false), "full");
        assert_eq!(
            inbox.put(2, &mut parcels(7, 60)),
            (7, false),
            "another worker's share is its own"
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
            "bytes are bounded too"
        );
    }

    #[test]
    fn a_worker_takes_what_waits_by_and_by() {
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
        assert_eq!(rounds, [105, 100, 100], "nobody waits for another's flood");
        assert_eq!(inbox.put(1, &mut parcels(1, 60)), (1, true), "woken again");
        inbox.take(&mut Vec::new(), 200);
        let share = BYTES_MAX / 2 / 65_536;
        assert_eq!(inbox.put(1, &mut parcels(share + 1, 65_536)).0, share);
    }
}

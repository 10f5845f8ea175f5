//! How others come to a packet worker, and it to the keeper.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use super::inbox::Inbox;
use super::shared::Shared;
use super::worker::Worker;
use crate::host::keeper::REQUESTS_MAX;
use crate::mailbox::Mailbox;
use lvs_packet::pipeline::Request;

/// What others share with a packet worker. What one of them writes is in no line of the cache that
/// another one reads for each packet.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Door {
    pub(super) mailbox: Mailbox<Worker>,
    /// What other workers hand over.
    pub(super) inbox: Inbox,
    /// The generation of the view that the worker has taken.
    pub(super) taken: AtomicU64,
    batch: Longest,
    gap: Longest,
}

/// What a packet worker was busy with for how long at most, since this was last asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pauses {
    /// One batch of frames: received, decided on, sent.
    pub batch: Duration,
    /// Anything else between two batches, except waiting for packets: jobs of other threads,
    /// views, timers.
    pub gap: Duration,
    /// Within one of them: until the shared half was free.
    pub wait: Duration,
}

/// The longest of some times, since it was last taken.
#[derive(Debug, Default)]
pub(super) struct Longest(AtomicU64);

impl Longest {
    pub(super) fn note(&self, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        // Looked at first: it is seldom raised, and a packet worker notes many.
        if took > self.0.load(Ordering::Relaxed) {
            self.0.fetch_max(took, Ordering::Relaxed);
        }
    }

    pub(super) fn take(&self) -> Duration {
        Duration::from_nanos(self.0.swap(0, Ordering::Relaxed))
    }
}

impl Door {
    /// That of one of so many workers.
    pub(super) fn new(workers: usize) -> io::Result<Self> {
        Ok(Self {
            mailbox: Mailbox::new()?,
            inbox: Inbox::new(workers),
            taken: AtomicU64::new(0),
            batch: Longest::default(),
            gap: Longest::default(),
        })
    }

    pub(super) fn note_batch(&self, took: Duration) {
        self.batch.note(took);
    }

    pub(super) fn note_gap(&self, took: Duration) {
        self.gap.note(took);
    }

    /// The longest batch and the longest gap since this was last asked.
    pub(super) fn take_pauses(&self) -> (Duration, Duration) {
        (self.batch.take(), self.gap.take())
    }
}

/// What one packet worker asks of the keeper: a queue of bounded length. What does not fit is
/// dropped and counted, and no packet waits for room.
pub(super) struct Requests {
    queue: SyncSender<Request>,
    shared: Arc<Shared>,
    /// Requests that found the queue full.
    pub(super) refused: u64,
}

impl Requests {
    /// A queue, and its end for the keeper.
    pub(super) fn new(shared: Arc<Shared>) -> (Self, Receiver<Request>) {
        let (queue, receiver) = sync_channel(REQUESTS_MAX);
        let this = Self {
            queue,
            shared,
            refused: 0,
        };
        (this, receiver)
    }

    /// Asks for all of `requests`.
    pub(super) fn send(&mut self, requests: impl Iterator<Item = Request>) {
        for request in requests {
            self.refused += u64::from(self.queue.try_send(request).is_err());
        }
        self.shared.wake_keeper();
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use lvs_core::{Control, Options};

    use super::*;
    use lvs_packet::net::PortId;

    #[test]
    fn what_does_not_fit_the_queue_is_counted_and_holds_nobody_up() {
        let control = Control::new(Options::default());
        let shared = Arc::new(Shared::new(control, 1).expect("descriptors"));
        let (mut requests, queue) = Requests::new(shared);
        let request = Request::Resolve(PortId(2), IpAddr::from([10, 0, 0, 1]));
        let requested = std::iter::repeat_n(request, REQUESTS_MAX + 3);
        requests.send(requested);
        assert_eq!(requests.refused, 3);
        assert_eq!(queue.try_iter().count(), REQUESTS_MAX);
        let request = Request::Confirm(PortId(2), IpAddr::from([10, 0, 0, 1]));
        requests.send(std::iter::once(request));
        assert_eq!((requests.refused, queue.try_iter().count()), (3, 1));
    }
}

//! How others come to a packet worker, and it to the keeper.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use super::shared::Shared;
use super::worker::Worker;
use crate::host::keeper::REQUESTS_MAX;
use crate::mailbox::Mailbox;
use crate::packet::pipeline::Request;

/// What others share with a packet worker.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) mailbox: Mailbox<Worker>,
    /// The generation of the view that the worker has taken.
    pub(super) taken: AtomicU64,
    batch: AtomicU64,
    gap: AtomicU64,
}

/// What a packet worker was busy with for how long at most, since this was last asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pauses {
    /// One batch of frames: received, decided on, sent.
    pub batch: Duration,
    /// Anything else between two batches, except waiting for packets: jobs of other threads, views, timers.
    pub gap: Duration,
}

impl Door {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            mailbox: Mailbox::new()?,
            taken: AtomicU64::new(0),
            batch: AtomicU64::new(0),
            gap: AtomicU64::new(0),
        })
    }

    pub(super) fn note_batch(&self, took: Duration) {
        note(&self.batch, took);
    }

    pub(super) fn note_gap(&self, took: Duration) {
        note(&self.gap, took);
    }

    /// What was noted since this was last asked.
    pub(super) fn take_pauses(&self) -> Pauses {
        let take = |longest: &AtomicU64| Duration::from_nanos(longest.swap(0, Ordering::Relaxed));
        Pauses {
            batch: take(&self.batch),
            gap: take(&self.gap),
        }
    }
}

fn note(longest: &AtomicU64, took: Duration) {
    let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    // Only the worker raises it; what is lost against a reader that takes it is one pause.
    if took > longest.load(Ordering::Relaxed) {
        longest.store(took, Ordering::Relaxed);
    }
}

/// What one packet worker asks of the keeper: a queue of bounded length. What does not fit is dropped and counted, and no
/// packet waits for room.
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

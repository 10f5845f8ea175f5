//! The counters of the synchronisation daemons.

use std::sync::atomic::{AtomicU64, Ordering};

use lvs_core::api::SyncCounts;
use lvs_core::replication::TakenOver;

/// Counters of all synchronisation daemons that are running or have run.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(super) sent: AtomicU64,
    pub(super) sent_bytes: AtomicU64,
    /// Number of messages dropped because their queue was full.
    pub(crate) queue_full: AtomicU64,
    /// Number of messages that could not be sent, for example because the interface refused them.
    pub(super) not_sent: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) received_bytes: AtomicU64,
    pub(super) taken: AtomicU64,
    /// Number of datagrams lost because a socket buffer was full.
    pub(super) lost: AtomicU64,
    pub(super) too_long: AtomicU64,
    pub(super) malformed: AtomicU64,
    pub(super) other_id: AtomicU64,
    pub(super) nonsense: AtomicU64,
    pub(super) no_room: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

impl Counts {
    pub(super) fn took_over(&self, done: TakenOver) {
        count(&self.taken, done.taken);
        count(&self.nonsense, done.nonsense);
        count(&self.no_room, done.no_room);
    }

    pub(crate) fn read(&self) -> SyncCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SyncCounts {
            sent: read(&self.sent),
            sent_bytes: read(&self.sent_bytes),
            queue_full: read(&self.queue_full),
            not_sent: read(&self.not_sent),
            received: read(&self.received),
            received_bytes: read(&self.received_bytes),
            taken: read(&self.taken),
            lost: read(&self.lost),
            too_long: read(&self.too_long),
            malformed: read(&self.malformed),
            other_id: read(&self.other_id),
            nonsense: read(&self.nonsense),
            no_room: read(&self.no_room),
        }
    }
}

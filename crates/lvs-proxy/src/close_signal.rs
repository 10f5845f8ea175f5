//! A signal by which one task makes other tasks close their sockets.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// A signal that is set at most once, for all tasks that wait for it.
#[derive(Debug, Default)]
pub(super) struct CloseSignal {
    closed: AtomicBool,
    notify: Notify,
}

impl CloseSignal {
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.notify.notify_waiters();
    }

    pub(super) async fn closed(&self) {
        let notified = self.notify.notified();
        if !self.closed.load(Ordering::Acquire) {
            notified.await;
        }
    }
}

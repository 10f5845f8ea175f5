//! A cache of long pages: a page is written once for all clients that request it at the same time.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tokio::sync::Mutex;

use crate::channels::Snapshot;

/// Maximum number of old versions of one page that are stored because slow clients still receive
/// them. At this number, no new version is written, and clients receive the last one.
const HELD_MAX: usize = 3;

/// Maximum, in bytes, of all answers for single clients that wait to be sent.
pub(super) const OWN_MAX: usize = 32 << 20;

/// Limits the memory of answers for single clients.
#[derive(Clone, Debug, Default)]
pub struct Own(Arc<AtomicUsize>);

/// An answer for a single client. It counts towards the limit until its last byte is sent or its
/// client has disconnected.
struct Held {
    bytes: Vec<u8>,
    all: Own,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.bytes.len(), Ordering::Relaxed);
    }
}

impl Own {
    /// Stores an answer; `None` if it would make all stored answers together exceed the limit. If
    /// no other answer is stored, an answer of any length is accepted.
    pub(super) fn hold(&self, bytes: Vec<u8>) -> Option<Bytes> {
        let room = |held: usize| {
            let all = held.checked_add(bytes.len())?;
            (held == 0 || all <= OWN_MAX).then_some(all)
        };
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, room);
        taken.ok()?;
        Some(Bytes::from_owner(Held {
            bytes,
            all: self.clone(),
        }))
    }
}

/// The cached pages.
#[derive(Debug, Default)]
pub struct Pages {
    pub(super) metrics: Page,
    pub(super) plain_metrics: Page,
    status: Page,
    pub(super) overview: Page,
}

impl Pages {
    /// Returns the status as one line of JSON.
    pub(super) async fn status(&self, snapshot: &Arc<Snapshot>) -> Bytes {
        let write = |snapshot: Arc<Snapshot>| {
            let mut line = serde_json::to_vec(&snapshot.status).unwrap_or_default();
            line.push(b'\n');
            line
        };
        self.status.of(snapshot, write).await
    }
}

/// A cached page.
#[derive(Debug, Default)]
pub struct Page(Mutex<Versions>);

#[derive(Default)]
struct Versions {
    /// The snapshot from which the last page was written; `None` before the first page.
    of: Option<Arc<Snapshot>>,
    last: Bytes,
    /// Older versions that are still being sent to a client.
    held: Vec<Bytes>,
}

impl fmt::Debug for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Versions")
            .field("held", &self.held.len())
            .finish_non_exhaustive()
    }
}

impl Page {
    /// Returns the page of `snapshot`. The first request for it calls `write` outside of the event
    /// loop. While slow clients still receive `HELD_MAX` old versions, the last version is
    /// returned instead.
    pub async fn of(
        &self,
        snapshot: &Arc<Snapshot>,
        write: impl FnOnce(Arc<Snapshot>) -> Vec<u8> + Send + 'static,
    ) -> Bytes {
        let mut all = self.0.lock().await;
        let is_last = all.of.as_ref().is_some_and(|of| Arc::ptr_eq(of, snapshot));
        all.held.retain(|held| !held.is_unique());
        if is_last || all.held.len() >= HELD_MAX {
            return all.last.clone();
        }
        let of = Arc::clone(snapshot);
        let written = tokio::task::spawn_blocking(move || write(of)).await;
        let bytes = Bytes::from(written.unwrap_or_default());
        let old = std::mem::replace(&mut all.last, bytes.clone());
        // Nothing was written before the first version.
        if !old.is_empty() && !old.is_unique() {
            all.held.push(old);
        }
        all.of = Some(Arc::clone(snapshot));
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_for_single_clients_share_a_memory_limit() {
        let own = Own::default();
        let part = || vec![0; OWN_MAX / 8];
        let mut held: Vec<Bytes> = (0..8)
            .map(|_| own.hold(part()).expect("the answers fit into the limit"))
            .collect();
        assert!(own.hold(vec![0]).is_none());
        // While a part of the page is being read, the whole page stays in memory.
        let rest = held[0].slice(7..9);
        held.remove(0);
        assert!(own.hold(vec![0]).is_none());
        drop(rest);
        held.push(own.hold(part()).expect("the answers fit into the limit"));
        held.clear();
        let long = own
            .hold(vec![0; 2 * OWN_MAX])
            .expect("no other client exists");
        assert!(own.hold(vec![0]).is_none());
        drop(long);
        assert_eq!(own.0.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn slow_clients_keep_a_bounded_number_of_page_versions() {
        let page = Page::default();
        let text = |n: u8| move |_: Arc<Snapshot>| vec![n];
        let snapshot = Arc::new(Snapshot::default());
        let first = page.of(&snapshot, text(1)).await;
        // The same version is not written twice.
        assert_eq!(page.of(&snapshot, text(2)).await, first);
        let mut readers = vec![first];
        for n in 2..10 {
            readers.push(page.of(&Arc::new(Snapshot::default()), text(n)).await);
        }
        let last = readers.last().expect("there is a reader")[0];
        assert_eq!(usize::from(last), HELD_MAX + 1);
        drop(readers);
        let now = page.of(&Arc::new(Snapshot::default()), text(77)).await;
        assert_eq!(now[0], 77);
    }
}

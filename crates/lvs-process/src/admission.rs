//! Limits for clients of a Unix socket: read-only clients cannot lock out writers, one read-only
//! user cannot lock out the others, and read-only clients cannot cause unbounded work.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lvs_sys::lock;

pub(super) const CONNECTIONS_MAX: usize = 64;
pub(super) const READERS_MAX: usize = 32;
pub(super) const USER_MAX: usize = 8;
/// Maximum number of lists that are sent to read-only clients at the same time. Each read-only user
/// receives at most one list at a time.
const LISTS_MAX: usize = 4;
/// Longest time that a read-only user waits to receive a list, until its previous list is complete
/// and fewer than [`LISTS_MAX`] lists are being sent.
const LIST_PATIENCE: Duration = Duration::from_secs(10);

/// The limited slots for connections, which all connections of a socket share.
#[derive(Debug, Default)]
pub struct Places {
    state: Mutex<State>,
    list_ended: Condvar,
    answered: Condvar,
}

#[derive(Debug, Default)]
struct State {
    all: usize,
    readers: usize,
    answers: usize,
    /// Number of connections of each read-only user.
    by_user: HashMap<u32, usize>,
    /// Read-only users that are receiving a list.
    listing: Vec<u32>,
}

impl Places {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Reserves a slot for a connection; `reader` is the user of a read-only connection. `None` if
    /// the maximum number of connections is reached: in total, of all read-only users, or of this
    /// user.
    pub fn take(self: &Arc<Self>, reader: Option<u32>) -> Option<Place> {
        let mut state = self.state();
        if state.all >= CONNECTIONS_MAX {
            return None;
        }
        if let Some(uid) = reader {
            let own = state.by_user.get(&uid).copied().unwrap_or(0);
            if state.readers >= READERS_MAX || own >= USER_MAX {
                return None;
            }
            state.by_user.insert(uid, own + 1);
            state.readers += 1;
        }
        state.all += 1;
        Some(Place {
            places: Arc::clone(self),
            reader,
        })
    }

    /// Waits until all answers are written, but at most for `patience`.
    pub(super) fn wait_for_answers(&self, patience: Duration) {
        let busy = |state: &mut State| state.answers > 0;
        drop(
            self.answered
                .wait_timeout_while(self.state(), patience, busy),
        );
    }
}

/// A slot for one connection; dropping it frees the slot.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    reader: Option<u32>,
}

impl Place {
    pub(super) const fn is_reader(&self) -> bool {
        self.reader.is_some()
    }

    pub(super) fn answer(&self) -> Answer<'_> {
        self.places.state().answers += 1;
        Answer(self)
    }

    /// Waits until this user may receive a list; `None` after the maximum time. Writers do not
    /// wait.
    pub(super) fn list(&self) -> Option<List<'_>> {
        if let Some(uid) = self.reader {
            let busy = |state: &mut State| {
                state.listing.len() >= LISTS_MAX || state.listing.contains(&uid)
            };
            let waited =
                self.places
                    .list_ended
                    .wait_timeout_while(self.places.state(), LIST_PATIENCE, busy);
            let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                return None;
            }
            state.listing.push(uid);
        }
        Some(List(self))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.places.state();
        state.all -= 1;
        if let Some(uid) = self.reader {
            state.readers -= 1;
            if let Some(own) = state.by_user.get_mut(&uid) {
                *own -= 1;
                if *own == 0 {
                    state.by_user.remove(&uid);
                }
            }
        }
    }
}

/// The right to send a list, until it is dropped.
#[derive(Debug)]
pub(super) struct List<'a>(&'a Place);

impl Drop for List<'_> {
    fn drop(&mut self) {
        if let Some(uid) = self.0.reader {
            self.0.places.state().listing.retain(|other| *other != uid);
            self.0.places.list_ended.notify_all();
        }
    }
}

/// Counts one request that is being answered, until it is dropped.
#[derive(Debug)]
pub(super) struct Answer<'a>(&'a Place);

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        self.0.places.state().answers -= 1;
        self.0.places.answered.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_slots_are_limited_per_read_only_user_for_all_readers_and_in_total() {
        let places = Arc::<Places>::default();
        let take = |uid| std::iter::from_fn(|| places.take(uid)).collect::<Vec<_>>();
        let one = take(Some(1));
        assert_eq!(one.len(), USER_MAX);
        let others: Vec<_> = (2..100).flat_map(|uid| take(Some(uid))).collect();
        assert_eq!(one.len() + others.len(), READERS_MAX);
        assert_eq!(take(None).len(), CONNECTIONS_MAX - READERS_MAX);
        drop(one);
        assert_eq!(take(Some(500)).len(), USER_MAX);
        drop(others);
        let state = places.state();
        assert_eq!((state.all, state.readers), (0, 0));
        assert!(state.by_user.is_empty());
    }

    #[test]
    fn read_only_user_gets_one_list_all_such_users_four_and_writer_any_number() {
        let places = Arc::<Places>::default();
        let (first, second) = (places.take(Some(1)), places.take(Some(1)));
        let (first, second) = (
            first.expect("a slot is free"),
            second.expect("a slot is free"),
        );
        let writer = places.take(None).expect("a slot is free");
        let all: Vec<_> = (0..10).map(|_| writer.list()).collect();
        assert!(all.iter().all(Option::is_some));
        let list = first.list().expect("the user gets its first list");
        let waits = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| second.list().is_some());
            std::thread::sleep(Duration::from_millis(20));
            let waits = !waiting.is_finished();
            drop(list);
            assert!(
                waiting.join().expect("the thread ends without a panic"),
                "the waiting list did not start"
            );
            waits
        });
        assert!(waits);
        // All read-only users together may have four lists.
        let users: Vec<_> = (2..7).filter_map(|uid| places.take(Some(uid))).collect();
        let mut lists: Vec<_> = users[..LISTS_MAX].iter().map(Place::list).collect();
        assert!(lists.iter().all(Option::is_some));
        assert!(writer.list().is_some());
        let waits = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| users[LISTS_MAX].list().is_some());
            std::thread::sleep(Duration::from_millis(20));
            let waits = !waiting.is_finished();
            lists.pop();
            assert!(
                waiting.join().expect("the thread ends without a panic"),
                "the waiting list did not start"
            );
            waits
        });
        assert!(waits);
    }

    #[test]
    fn shutdown_waits_for_unfinished_answers_until_time_limit() {
        let places = Arc::<Places>::default();
        let place = places.take(None).expect("a slot is free");
        let answer = place.answer();
        places.wait_for_answers(Duration::from_millis(20));
        assert_eq!(places.state().answers, 1);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| places.wait_for_answers(Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished());
            drop(answer);
        });
        assert_eq!(places.state().answers, 0);
    }
}

//! Eviction of a connection from a full table, to make room for a new one (`when_full = "evict"`).
//!
//! A flood fills the table with expendable connections: half-open ones, single datagrams, and
//! connections that have ended or were never used. These are evicted first, the oldest of a few
//! candidates; then connections that have been idle for a minute or longer. All others stay: if
//! nothing can be evicted, the new connection is refused.
//!
//! A clock hand moves over the table. If the table is full, each new connection moves the hand by
//! one window of slots and evicts the entry of the window that is idle for the longest time, among
//! those of the most expendable kind. If no entry of the window is half-open, the search covers up
//! to three more windows, which are far apart, because entries of the same age are near each other.

use super::Shard;
use crate::conn::{Entry, State, flag};
use crate::conn::{scattered, windows};
use crate::stats::Evictions;
use crate::{Instant, Protocol};
use core::cmp::Reverse;
use core::time::Duration;

/// Maximum number of windows of slots that are searched for a connection to evict.
const WINDOWS: usize = 4;

/// Number of packets that a client sends in a handshake. A client that has sent no more has not
/// used its connection.
const HANDSHAKE: u32 = 2;

/// Time without a packet after which a connection counts as unused, if its client has sent no more
/// packets than in a handshake.
const UNUSED_AFTER: Duration = Duration::from_secs(3);

const IDLE_AFTER: Duration = Duration::from_secs(60);

/// The value of a connection; the least valuable is evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    HalfOpen,
    Ended,
    Unused,
    Idle,
}

/// The clock hand: the state of the search for connections to evict, and the numbers of evictions.
#[derive(Debug, Default)]
pub(crate) struct Hand {
    /// Number of the window of slots at which the search continues.
    at: usize,
    /// The slot from which a connection was evicted last.
    pub(crate) last: Option<u32>,
    pub(crate) taken: Evictions,
}

impl Shard {
    /// Numbers of connections that were evicted to make room for new ones, by kind.
    pub const fn evictions(&self) -> Evictions {
        self.hand.taken
    }

    /// Evicts a connection if the table is full, eviction is enabled, and a connection can be
    /// evicted.
    pub(crate) fn make_room(&mut self, now: Instant) {
        if !self.settings.evicts || self.table.len() < self.table.capacity() {
            return;
        }
        let found = self.evictable(now);
        self.hand.at = (self.hand.at + 1) % windows(self.table.populated_len());
        let Some((worth, index)) = found else {
            return;
        };
        self.hand.last = Some(index);
        let taken = &mut self.hand.taken;
        *match worth {
            Worth::HalfOpen => &mut taken.half_open,
            Worth::Ended => &mut taken.ended,
            Worth::Unused => &mut taken.unused,
            Worth::Idle => &mut taken.idle,
        } += 1;
        // The template of the evicted connection stays until its own timer fires.
        let _ = self.destroy(index);
    }

    /// Whether a slot is free for a new connection. With `evicts`, also if a connection can be
    /// evicted.
    pub(crate) fn has_room(&self, evicts: bool, now: Instant) -> bool {
        self.table.len() < self.table.capacity() || evicts && self.evictable(now).is_some()
    }

    fn evictable(&self, now: Instant) -> Option<(Worth, u32)> {
        let mut found: Option<(Worth, Reverse<Duration>, u32)> = None;
        for window in scattered(self.hand.at, self.table.populated_len(), WINDOWS) {
            for index in self.table.populated_in(window) {
                // A connection that a helper inspects is not evicted, because the helper may be
                // using it.
                let slot = self.table.get(index);
                if self.table.controlled(index) > 0 || slot.has(flag::HELPED) {
                    continue;
                }
                if let Some(worth) = worth(slot, now) {
                    let candidate = (worth, Reverse(slot.idle(now)), index);
                    found = Some(found.map_or(candidate, |best| best.min(candidate)));
                }
            }
            if found.is_some_and(|(worth, ..)| worth == Worth::HalfOpen) {
                break;
            }
        }
        found.map(|(worth, _, index)| (worth, index))
    }
}

/// The value of a connection; `None` if it must not be evicted now.
fn worth(slot: Entry<'_>, now: Instant) -> Option<Worth> {
    let idle = slot.idle(now);
    let unused = slot.in_packets() <= HANDSHAKE && idle >= UNUSED_AFTER;
    match (slot.protocol(), slot.state()) {
        (Protocol::TCP, State::TCP_SYN_SENT | State::TCP_SYN_RECV | State::TCP_SYNACK)
        | (Protocol::SCTP, State::SCTP_INIT1 | State::SCTP_INIT) => Some(Worth::HalfOpen),
        (Protocol::TCP, State::TCP_TIME_WAIT | State::TCP_CLOSE)
        | (Protocol::SCTP, State::SCTP_CLOSED) => Some(Worth::Ended),
        (Protocol::TCP | Protocol::SCTP, _) if unused => Some(Worth::Unused),
        // A single datagram does not establish a connection.
        (Protocol::UDP, _) if slot.in_packets() <= 1 => Some(Worth::HalfOpen),
        (Protocol::UDP, _) if unused => Some(Worth::Unused),
        _ if idle >= IDLE_AFTER => Some(Worth::Idle),
        _ => None,
    }
}

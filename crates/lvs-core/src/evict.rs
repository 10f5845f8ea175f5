//! Room in a full table: which connection gives way to a new one (`when_full = "evict"`).
//!
//! A flood fills the table with connections that nobody misses: half-open ones, single datagrams, connections that were
//! opened and never used. They give way, the oldest of a few first; then connections that have been idle for long. One
//! that moves data never does: where there is no other, the newcomer is refused.
//!
//! A hand goes round the table. Each new connection moves it over one window of slots and takes the oldest there of the
//! kind that is missed least, so that within a window the first that came is the first to go. Only where nobody there is
//! half-open, three more windows are looked at, far apart: those that came together lie together.

use core::cmp::Reverse;
use core::ops::{AddAssign, Range};
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

use crate::conn::table::flag;
use crate::conn::{Slot, State};
use crate::shard::Shard;
use crate::{Control, Instant, Protocol};

/// Slots of a window.
const WINDOW: usize = 32;
/// Windows that are looked at for one connection, at most.
const WINDOWS: usize = 4;
/// The same for a persistence template, of which no more may be free to go than an eighth.
const TEMPLATE_WINDOWS: usize = 16;
/// Packets that a connection has had from its client at most while it counts as unused: a handshake's.
const HANDSHAKE: u32 = 2;
/// How long a connection that was opened may wait for its first use.
const UNUSED_AFTER: Duration = Duration::from_secs(3);
/// How long a connection is without a packet before it counts as idle.
const IDLE_AFTER: Duration = Duration::from_secs(60);

/// What a full table does with a new connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Refuses it.
    #[default]
    Drop,
    /// Ends another one for it, half-open or ended ones first, then idle ones; never one that moves data.
    Evict,
}

/// Connections that were ended to make room for new ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evictions {
    /// Half-open ones, and single datagrams.
    pub half_open: u64,
    /// Ended ones, kept for stray packets (TIME_WAIT, CLOSE).
    pub ended: u64,
    /// Ones that were opened and not used within three seconds.
    pub unused: u64,
    /// Ones without a packet for a minute.
    pub idle: u64,
}

impl AddAssign for Evictions {
    fn add_assign(&mut self, other: Self) {
        self.half_open += other.half_open;
        self.ended += other.ended;
        self.unused += other.unused;
        self.idle += other.idle;
    }
}

/// How much a connection is missed; the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    HalfOpen,
    Ended,
    Unused,
    Idle,
}

/// The hand that goes round, and what it has taken.
#[derive(Debug, Default)]
pub(crate) struct Hand {
    /// Window to look at next.
    at: usize,
    /// The slot that was made free last.
    pub(crate) last: Option<u32>,
    pub(crate) taken: Evictions,
}

impl Shard {
    /// Connections that were ended to make room for new ones.
    pub const fn evictions(&self) -> Evictions {
        self.hand.taken
    }

    /// Makes room for a connection, if the table is full, may be made room in, and has any that can go.
    pub(crate) fn make_room(&mut self, now: Instant) {
        if !self.settings.evicts || self.table.len() < self.table.capacity() {
            return;
        }
        let mut found: Option<(Worth, Reverse<Duration>, u32)> = None;
        let here = self.hand.at;
        self.hand.at = (here + 1) % windows(self.table.slots_len());
        for window in scattered(here, self.table.slots_len(), WINDOWS) {
            for index in self.table.indices(window) {
                let slot = self.table.get(index);
                if let Some(worth) = worth(slot, now) {
                    let candidate = (worth, Reverse(idle(slot, now)), index);
                    found = Some(found.map_or(candidate, |best| best.min(candidate)));
                }
            }
            if found.is_some_and(|(worth, ..)| worth == Worth::HalfOpen) {
                break;
            }
        }
        let Some((worth, _, index)) = found else {
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
        // The template of a connection that nobody used stays until its own time.
        let _ = self.destroy(index);
    }
}

impl Control {
    /// Makes room for a persistence template as for a connection: those without a connection go, of a few the one that
    /// would end first, and those of clients that never established one before the others.
    pub(crate) fn make_template_room(&mut self) {
        let table = &self.templates.table;
        if !self.settings.evicts || table.len() < table.capacity() {
            return;
        }
        let here = self.templates.hand;
        let first = scattered(here, table.slots_len(), TEMPLATE_WINDOWS).find_map(|window| {
            let slots = table.indices(window).filter_map(|index| {
                let template = self.templates.get(index);
                let assured = template.assured.load(Relaxed);
                let free = template.controlled.load(Relaxed) == 0;
                free.then(|| (assured, table.get(index).expires, index))
            });
            slots.min()
        });
        self.templates.hand = (here + 1) % windows(table.slots_len());
        if let Some((.., index)) = first {
            self.remove_template(index);
            self.evicted_templates += 1;
        }
    }

    /// Persistence templates that were ended to make room for new ones.
    pub const fn evicted_templates(&self) -> u64 {
        self.evicted_templates
    }
}

/// How many windows so many slots have.
fn windows(slots: usize) -> usize {
    slots.div_ceil(WINDOW).max(1)
}

/// At most so many windows: `here`, and others far from it and from each other.
fn scattered(here: usize, slots: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let windows = windows(slots);
    // The golden section keeps them apart.
    let step = (windows * 618 / 1000).max(1);
    (0..most.min(windows)).map(move |n| {
        let from = (here + n * step) % windows * WINDOW;
        from..from + WINDOW
    })
}

/// How much a connection would be missed; `None` if it stays whatever comes.
fn worth(slot: &Slot, now: Instant) -> Option<Worth> {
    // Those that a helper looks at may be at work just now.
    if slot.controlled > 0 || slot.has(flag::HELPED) {
        return None;
    }
    let idle = idle(slot, now);
    let unused = slot.in_packets <= HANDSHAKE && idle >= UNUSED_AFTER;
    match (slot.protocol(), slot.state) {
        (Protocol::TCP, State::TCP_SYN_SENT | State::TCP_SYN_RECV | State::TCP_SYNACK)
        | (Protocol::SCTP, State::SCTP_INIT1 | State::SCTP_INIT) => Some(Worth::HalfOpen),
        (Protocol::TCP, State::TCP_TIME_WAIT | State::TCP_CLOSE)
        | (Protocol::SCTP, State::SCTP_CLOSED) => Some(Worth::Ended),
        (Protocol::TCP | Protocol::SCTP, _) if unused => Some(Worth::Unused),
        // Of datagrams, one alone opens nothing.
        (Protocol::UDP, _) if slot.in_packets <= 1 => Some(Worth::HalfOpen),
        (Protocol::UDP, _) if unused => Some(Worth::Unused),
        _ if idle >= IDLE_AFTER => Some(Worth::Idle),
        _ => None,
    }
}

/// Time since a connection's last packet.
fn idle(slot: &Slot, now: Instant) -> Duration {
    let left = slot.expires.saturating_since(now);
    Duration::from_secs(slot.timeout.into()).saturating_sub(left)
}

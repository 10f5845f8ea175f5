//! Warm restart without a BPF file system. When the dataplane is killed, a small process, the state
//! keeper, keeps open the memory with the connection table, services, settings and counters, and
//! the socket of the shield or the TUN device, until the next dataplane starts.
//!
//! ```text
//!  dataplane ─── maps ───▶ memory ◀── keeps ─── state keeper (lvs-dataplane --hold)
//!     └────────── shield's socket ───────────▶ hides the frames of services from the host meanwhile
//! ```
//!
//! Between the two dataplanes no packet is forwarded: clients and servers retransmit.
//!
//! Each packet worker has a connection table. A dataplane with one worker that finds a single table
//! of its own size continues with this table. In all other cases it copies the connections into new
//! memory, and then passes the new memory to the state keeper.

mod area;
mod state_keeper;

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lvs_core::api::WORKERS_MAX;
use lvs_core::memory::{Layout, Memory};
use lvs_core::{Control, Instant};
use tracing::warn;

pub(crate) use self::area::{Area, KEPT_WORDS, Record, text_words};
pub use self::state_keeper::{StateKeeper, hold};
use lvs_sys::SharedArray;
use lvs_sys::lock;

/// Time for which connections are kept while no dataplane is running.
pub(crate) const WITHOUT_DATAPLANE: Duration = Duration::from_secs(300);
/// Maximum number of servers whose counters are stored. Only written pages use memory.
const RECORDS: usize = 1 << 20;
/// Number of bytes for each of the two copies of services and settings: enough for more than a
/// million servers.
const TEXT: usize = 1 << 29;
/// The reason for a successor without connections: the services and servers are incomplete.
pub(crate) const INCOMPLETE: &str = "the services and servers of the previous dataplane could not be stored for a warm restart: see its log";
/// The first word of the memory ("LVSOUTLV"), by which a successor recognises it.
const MAGIC: u64 = u64::from_le_bytes(*b"LVSOUTLV");
/// Version of the memory's format, except the connection table. It changes with the meaning of any
/// word.
const VERSION: u64 = 2;

/// Indices of the words at the beginning of the memory.
mod head {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 1;
    /// The time of `CLOCK_MONOTONIC`, in nanoseconds, at the zero of the dataplane's clock.
    pub(super) const BASE: usize = 2;
    /// The time of the dataplane's clock, in nanoseconds, until which a successor may take over.
    pub(super) const ALIVE: usize = 3;
    /// Number of connection tables; 0 means one.
    pub(super) const TABLES: usize = 4;
    /// Number of servers whose counters are stored.
    pub(super) const RECORDS: usize = 5;
    /// First word of the description of the connection tables.
    pub(super) const TABLE: usize = 8;
    pub(super) const WORDS: usize = TABLE + super::Layout::HEADER_WORDS;
}

/// Returns the offset in bytes (page-aligned) and the length in words of each part of the memory,
/// with `tables` connection tables; and the length of the memory.
fn parts(layout: &Layout, tables: usize) -> (Vec<(u64, usize)>, u64) {
    const PAGE: u64 = 4096;
    let table = layout.region_words();
    let first = [head::WORDS, RECORDS * KEPT_WORDS, text_words(TEXT)];
    let mut at = 0;
    let all = first.into_iter().chain([table; WORKERS_MAX].concat());
    let parts = all.take(first.len() + table.len() * tables).map(|words| {
        let part = (at, words.max(1));
        at += (part.1 as u64 * 8).next_multiple_of(PAGE);
        part
    });
    (parts.collect(), at)
}

#[derive(Debug)]
struct Mapped {
    head: SharedArray,
    counts: SharedArray,
    text: SharedArray,
    tables: Vec<[Arc<SharedArray>; 5]>,
    layout: Layout,
}

impl Mapped {
    fn map(file: &File, layout: Layout, tables: usize) -> io::Result<Self> {
        let (parts, _) = parts(&layout, tables);
        let part = |n: usize| SharedArray::of_file(file, parts[n].0, parts[n].1);
        let shared = |n: usize| part(n).map(Arc::new);
        let table = |n: usize| {
            let first = 3 + n * 5;
            Ok([
                shared(first)?,
                shared(first + 1)?,
                shared(first + 2)?,
                shared(first + 3)?,
                shared(first + 4)?,
            ])
        };
        Ok(Self {
            head: part(0)?,
            counts: part(1)?,
            text: part(2)?,
            tables: (0..tables).map(table).collect::<io::Result<_>>()?,
            layout,
        })
    }

    fn word(&self, word: usize) -> u64 {
        self.head.words()[word].load(Acquire)
    }

    fn set(&self, word: usize, value: u64) {
        self.head.words()[word].store(value, Release);
    }

    fn area(&self) -> Area<'_> {
        Area {
            counts: self.counts.words(),
            text: self.text.words(),
        }
    }

    fn memories(&self) -> io::Result<Vec<Memory>> {
        let tables = self.tables.iter();
        tables
            .map(|table| lvs_sys::shared_table(self.layout, table.clone(), 0, NonZeroUsize::MIN))
            .collect()
    }

    /// Copies the clock, services, settings and counters of a predecessor, but not its connection
    /// tables.
    fn copy_from(&self, left: &Self) {
        for word in [head::BASE, head::ALIVE] {
            self.set(word, left.word(word));
        }
        if let Some(text) = left.area().saved() {
            self.area().save(&text);
        }
        // Reading an unused page would allocate it.
        let records = left.word(head::RECORDS);
        self.set(head::RECORDS, records);
        let words = usize::try_from(records).unwrap_or(usize::MAX);
        let words = words.saturating_mul(KEPT_WORDS);
        let counts = self.counts.words().iter().zip(left.counts.words());
        for (word, was) in counts.take(words) {
            word.store(was.load(Relaxed), Relaxed);
        }
    }
}

/// The shared memory of a dataplane, and the state keeper that keeps it.
#[derive(Debug)]
pub struct WarmRestart {
    mapped: Mapped,
    found: bool,
    /// The memory of a predecessor whose connections must be copied. Its lock excludes other
    /// dataplanes.
    left: Mutex<Option<(Mapped, File)>>,
    state_keeper: StateKeeper,
}

impl WarmRestart {
    /// Takes over the state of a predecessor. Starts without state if there is none, or, with a
    /// warning that contains the reason, if it is not usable or too old. `tables` is the number of
    /// connection tables with this layout.
    ///
    /// # Errors
    /// The memory cannot be allocated or mapped, or the state keeper does not accept it.
    pub fn open(layout: Layout, tables: usize, mut state_keeper: StateKeeper) -> io::Result<Self> {
        let tables = tables.clamp(1, WORKERS_MAX);
        let mut left = None;
        if state_keeper.is_used() {
            match found(&state_keeper) {
                Ok(mapped) => left = Some(mapped),
                Err(why) => warn!("connections of the previous dataplane have ended: {why}"),
            }
        }
        // Keep unreadable memory locked until the state keeper has the new memory.
        let mut unread = None;
        let is_alike = |left: &Mapped| {
            let keys = left.layout.keys;
            (tables, left.tables.len()) == (1, 1) && left.layout == Layout { keys, ..layout }
        };
        let left = match left {
            Some(mapped) if is_alike(&mapped) => {
                return Ok(Self {
                    mapped,
                    found: true,
                    left: Mutex::default(),
                    state_keeper,
                });
            }
            Some(left) => Some((left, state_keeper.take_other_memory()?)),
            None => {
                // The new memory must contain only zeros, and may have another length.
                unread = match state_keeper.is_used() {
                    true => Some(state_keeper.take_other_memory()?),
                    false => None,
                };
                None
            }
        };
        let (_, len) = parts(&layout, tables);
        state_keeper.resize(len)?;
        let mapped = Mapped::map(state_keeper.memory(), layout, tables)?;
        match &left {
            Some((left, _)) => mapped.copy_from(left),
            None => set_clock(&mapped, Instant::ZERO),
        }
        mapped.set(head::TABLES, tables as u64);
        for (n, word) in layout.to_words().into_iter().enumerate() {
            mapped.set(head::TABLE + n, word);
        }
        mapped.set(head::VERSION, VERSION);
        mapped.set(head::MAGIC, MAGIC);
        if unread.is_some() {
            state_keeper.hold_memory()?;
        }
        Ok(Self {
            mapped,
            found: left.is_some(),
            left: Mutex::new(left),
            state_keeper,
        })
    }

    /// Whether this dataplane takes over the connections of a predecessor.
    pub(crate) const fn is_successor(&self) -> bool {
        self.found
    }

    /// Memory for the connection tables.
    ///
    /// # Errors
    /// No error is known.
    pub fn memories(&self) -> io::Result<Vec<Memory>> {
        self.mapped.memories()
    }

    /// The predecessor's connection tables, to be copied into [`memories`](Self::memories); `None`
    /// if there is nothing to copy, because there is no predecessor, `memories` are its tables, or
    /// the connections are copied already.
    ///
    /// # Errors
    /// No error is known.
    pub(crate) fn memories_left(&self) -> io::Result<Option<Vec<Memory>>> {
        let left = lock(&self.left);
        left.as_ref().map(|(left, _)| left.memories()).transpose()
    }

    /// Passes the new memory to the state keeper after all connections are copied. Has no effect if
    /// there was nothing to copy.
    ///
    /// # Errors
    /// The state keeper does not accept the memory, for example because it has exited.
    pub(crate) fn has_taken_over(&self) -> io::Result<()> {
        let mut left = lock(&self.left);
        match left.take() {
            Some(_) => self.state_keeper.hold_memory(),
            None => Ok(()),
        }
    }

    /// The memory for services, settings and counters.
    pub(crate) fn area(&self) -> Area<'_> {
        self.mapped.area()
    }

    /// Stores services and settings.
    ///
    /// # Errors
    /// They are too long.
    pub(crate) fn save(&self, text: &[u8]) -> io::Result<()> {
        match self.area().save(text) {
            true => Ok(()),
            false => Err(io::Error::other(format!(
                "services and servers need {} MiB, and the limit is {} MiB",
                text.len() >> 20,
                TEXT >> 20
            ))),
        }
    }

    /// Stores the counters of the servers at these indices. Returns the next index, if there are
    /// more servers.
    pub(crate) fn keep_counts(&self, control: &Control, places: Range<usize>) -> Option<usize> {
        let all = control.endpoint_places();
        let end = places.end.min(all);
        let places = places.start.min(end)..end;
        let records = end.min(RECORDS) as u64;
        if records > self.mapped.word(head::RECORDS) {
            self.mapped.set(head::RECORDS, records);
        }
        self.area().keep_counts(control, places, &[]);
        (end < all).then_some(end)
    }

    /// Sets the clock of the connections' deadlines to `now`, and calls
    /// [`is_alive`](Self::is_alive).
    pub(crate) fn set_clock(&self, now: Instant) {
        set_clock(&self.mapped, now);
    }

    /// Permits a successor to take over until [`WITHOUT_DATAPLANE`] after `now`.
    pub(crate) fn is_alive(&self, now: Instant) {
        is_alive(&self.mapped, now);
    }

    /// Returns by how much the clock of the deadlines is ahead of a clock that shows `now`.
    pub(crate) fn clock_ahead(&self, now: Instant) -> Duration {
        let then = lvs_sys::monotonic().wrapping_sub(self.mapped.word(head::BASE));
        Duration::from_nanos(then.saturating_sub(now.as_nanos()))
    }

    /// Stops the state keeper at an orderly exit, so that the next dataplane starts without state.
    pub(crate) fn end(&self) {
        self.mapped.set(head::ALIVE, 0);
        self.state_keeper.end();
    }

    #[cfg(test)]
    fn set(&self, word: usize, value: u64) {
        self.mapped.set(word, value);
    }

    pub(crate) const fn state_keeper(&self) -> &StateKeeper {
        &self.state_keeper
    }
}

fn set_clock(mapped: &Mapped, now: Instant) {
    let base = lvs_sys::monotonic().wrapping_sub(now.as_nanos());
    mapped.set(head::BASE, base);
    is_alive(mapped, now);
}

fn is_alive(mapped: &Mapped, now: Instant) {
    mapped.set(head::ALIVE, (now + WITHOUT_DATAPLANE).as_nanos());
}

/// Whether a successor may still take over. `alive` is the end of the permitted time, by the
/// dataplane's clock, and `base` the time of `CLOCK_MONOTONIC` at that clock's zero.
fn is_worth_waiting(base: u64, alive: u64) -> bool {
    lvs_sys::monotonic().wrapping_sub(base) < alive
}

/// Maps the state of a predecessor, or returns the reason why this dataplane cannot use it.
fn found(state_keeper: &StateKeeper) -> Result<Mapped, String> {
    let head = SharedArray::of_file(state_keeper.memory(), 0, head::WORDS);
    let head = head.map_err(|error| error.to_string())?;
    let word = |n: usize| head.words()[n].load(Acquire);
    if (word(head::MAGIC), word(head::VERSION)) != (MAGIC, VERSION) {
        return Err(
            "the version of the previous dataplane stored its state in another format".to_owned(),
        );
    }
    let description = std::array::from_fn(|n| word(head::TABLE + n));
    let layout = Layout::from_words(&description).map_err(|error| error.to_string())?;
    let tables = usize::try_from(word(head::TABLES)).unwrap_or(usize::MAX);
    let tables = tables.max(1);
    if tables > WORKERS_MAX || state_keeper.len() != Some(parts(&layout, tables).1) {
        return Err("the memory of the previous dataplane has an unexpected size".to_owned());
    }
    if !is_worth_waiting(word(head::BASE), word(head::ALIVE)) {
        let seconds = WITHOUT_DATAPLANE.as_secs();
        return Err(format!(
            "the previous dataplane was killed more than {seconds} s ago"
        ));
    }
    let mapped =
        Mapped::map(state_keeper.memory(), layout, tables).map_err(|error| error.to_string())?;
    // Without the services, the dataplane would reset all connections one by one.
    match mapped.area().saved() {
        Some(_) => Ok(mapped),
        None => Err(INCOMPLETE.to_owned()),
    }
}

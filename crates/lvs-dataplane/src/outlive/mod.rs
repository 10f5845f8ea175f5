//! What outlives an engine that is killed where no BPF file system keeps it: the connection table
//! lies in memory that a small process holds, with services, settings, counters and the shield's
//! socket, until the next engine comes.
//!
//! ```text
//!  engine ─── maps ───▶ memory ◀── holds ─── holder (lvs-dataplane --hold)
//!    └──────── shield's socket ────────────▶ keeps the host from what nobody handles meanwhile
//! ```
//!
//! No packet is forwarded between two engines: senders repeat what they have sent.
//!
//! Each packet worker has a table. One that finds a single table of its own size goes on with it;
//! else connections move into memory of the new engine's, which the holder gets in place of the old
//! when all are there.

mod area;
mod holder;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lvs_core::api::WORKERS_MAX;
use lvs_core::memory::{Layout, Memory};
use lvs_core::{Control, Instant};
use tracing::warn;

pub(crate) use self::area::{Area, KEPT_WORDS, Record, text_words};
pub use self::holder::{Holder, hold};
use crate::lock::lock;
use lvs_sys::SharedArray;

/// How long connections wait for another engine.
pub(crate) const WITHOUT_ENGINE: Duration = Duration::from_secs(300);
/// Records of servers whose counters are kept. As with the text, memory is taken where something is
/// written, not for all of them.
const RECORDS: usize = 1 << 20;
/// Bytes for services and settings, twice: more than a million servers need.
const TEXT: usize = 1 << 29;
/// Why connections are not taken over without services and servers.
pub(crate) const INCOMPLETE: &str =
    "its services and servers could not be kept for a warm restart, as its log says";
/// "LVSOUTLV".
const MAGIC: u64 = u64::from_le_bytes(*b"LVSOUTLV");
/// It changes with the meaning of any word, except those of the connection table.
const VERSION: u64 = 2;

/// Words at the beginning.
mod head {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 1;
    /// `CLOCK_MONOTONIC` when the engine's clock said zero.
    pub(super) const BASE: usize = 2;
    /// Until when by the engine's clock it is worth while to wait for another one.
    pub(super) const ALIVE: usize = 3;
    /// How many tables there are; 0 for one.
    pub(super) const TABLES: usize = 4;
    /// How many records of servers were kept.
    pub(super) const RECORDS: usize = 5;
    /// The description of each table.
    pub(super) const TABLE: usize = 8;
    pub(super) const WORDS: usize = TABLE + super::Layout::HEADER_WORDS;
}

/// Where the parts lie in memory with so many tables: offsets in bytes, each at a page, and words.
fn parts(layout: &Layout, tables: usize) -> (Vec<(u64, usize)>, u64) {
    const PAGE: u64 = 4096;
    let table = [
        layout.narrow_words(),
        layout.narrow_buckets as usize,
        layout.wide_words(),
        layout.wide_buckets as usize,
        layout.overflow_words(),
    ];
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

/// The memory, mapped.
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
            .map(|table| lvs_sys::shared_table(self.layout, table.clone()))
            .collect()
    }

    /// What is the same wherever the tables lie.
    fn copy_from(&self, left: &Self) {
        for word in [head::BASE, head::ALIVE] {
            self.set(word, left.word(word));
        }
        if let Some(text) = left.area().saved() {
            self.area().save(&text);
        }
        // Memory is taken where something is read, too.
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

/// The memory, and whoever holds it.
#[derive(Debug)]
pub struct Outlive {
    mapped: Mapped,
    found: bool,
    /// What another engine has left in other memory, which its lock keeps others from.
    left: Mutex<Option<(Mapped, File)>>,
    holder: Holder,
}

impl Outlive {
    /// Takes up what another engine has left, if this one can read it and it was killed not
    /// too long ago; else it begins anew, and says why. With so many tables of this layout.
    ///
    /// # Errors
    /// If the memory cannot be had.
    pub fn open(layout: Layout, tables: usize, mut holder: Holder) -> io::Result<Self> {
        let tables = tables.clamp(1, WORKERS_MAX);
        let mut left = None;
        if holder.is_used() {
            match found(&holder) {
                Ok(mapped) => left = Some(mapped),
                Err(why) => warn!("connections of the engine before this one have ended: {why}"),
            }
        }
        // What cannot be read is locked until the holder has the other memory.
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
                    holder,
                });
            }
            Some(left) => Some((left, holder.take_other_memory()?)),
            None => {
                // All zeros, and of a length of its own.
                unread = match holder.is_used() {
                    true => Some(holder.take_other_memory()?),
                    false => None,
                };
                None
            }
        };
        let (_, len) = parts(&layout, tables);
        holder.resize(len)?;
        let mapped = Mapped::map(holder.memory(), layout, tables)?;
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
            holder.hold_memory()?;
        }
        Ok(Self {
            mapped,
            found: left.is_some(),
            left: Mutex::new(left),
            holder,
        })
    }

    /// Another engine has left its connections.
    pub(crate) const fn is_successor(&self) -> bool {
        self.found
    }

    /// Memory for the connection tables.
    ///
    /// # Errors
    /// None that is known.
    pub fn memories(&self) -> io::Result<Vec<Memory>> {
        self.mapped.memories()
    }

    /// Tables whose connections are to move into those of [`memories`](Self::memories); `None` if
    /// they lie there.
    ///
    /// # Errors
    /// None that is known.
    pub(crate) fn memories_left(&self) -> io::Result<Option<Vec<Memory>>> {
        let left = lock(&self.left);
        left.as_ref().map(|(left, _)| left.memories()).transpose()
    }

    /// All connections are where they belong.
    ///
    /// # Errors
    /// If the holder is gone.
    pub(crate) fn has_taken_over(&self) -> io::Result<()> {
        let mut left = lock(&self.left);
        match left.take() {
            Some(_) => self.holder.hold_memory(),
            None => Ok(()),
        }
    }

    /// Where the rest is kept.
    pub(crate) fn area(&self) -> Area<'_> {
        self.mapped.area()
    }

    /// Saves services and settings.
    ///
    /// # Errors
    /// They are too long.
    pub(crate) fn save(&self, text: &[u8]) -> io::Result<()> {
        match self.area().save(text) {
            true => Ok(()),
            false => Err(io::Error::other(format!(
                "they take {} MiB, and there is room for {}",
                text.len() >> 20,
                TEXT >> 20
            ))),
        }
    }

    /// Keeps the counters of servers in these places; gives the first place behind them, if there
    /// are more.
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

    /// Deadlines are by a clock that says `now`.
    pub(crate) fn set_clock(&self, now: Instant) {
        set_clock(&self.mapped, now);
    }

    /// Says that there is an engine.
    pub(crate) fn is_alive(&self, now: Instant) {
        is_alive(&self.mapped, now);
    }

    /// How far the clock by which deadlines are is ahead of one that says `now`.
    pub(crate) fn clock_ahead(&self, now: Instant) -> Duration {
        let then = lvs_sys::monotonic().wrapping_sub(self.mapped.word(head::BASE));
        Duration::from_nanos(then.saturating_sub(now.as_nanos()))
    }

    /// An orderly end: nobody is to find anything.
    pub(crate) fn end(&self) {
        self.mapped.set(head::ALIVE, 0);
        self.holder.end();
    }

    #[cfg(test)]
    fn set(&self, word: usize, value: u64) {
        self.mapped.set(word, value);
    }

    /// Whoever holds all this.
    pub(crate) const fn holder(&self) -> &Holder {
        &self.holder
    }
}

fn set_clock(mapped: &Mapped, now: Instant) {
    let base = lvs_sys::monotonic().wrapping_sub(now.as_nanos());
    mapped.set(head::BASE, base);
    is_alive(mapped, now);
}

fn is_alive(mapped: &Mapped, now: Instant) {
    mapped.set(head::ALIVE, (now + WITHOUT_ENGINE).as_nanos());
}

/// Whether an engine with these words may still have a successor.
fn is_worth_waiting(base: u64, alive: u64) -> bool {
    lvs_sys::monotonic().wrapping_sub(base) < alive
}

/// What another engine has left, if this one can read it; else why not.
fn found(holder: &Holder) -> Result<Mapped, String> {
    let head = SharedArray::of_file(holder.memory(), 0, head::WORDS);
    let head = head.map_err(|error| error.to_string())?;
    let word = |n: usize| head.words()[n].load(Acquire);
    if (word(head::MAGIC), word(head::VERSION)) != (MAGIC, VERSION) {
        return Err("it was another version".to_owned());
    }
    let description = std::array::from_fn(|n| word(head::TABLE + n));
    let layout = Layout::from_words(&description).map_err(|error| error.to_string())?;
    let tables = usize::try_from(word(head::TABLES)).unwrap_or(usize::MAX);
    let tables = tables.max(1);
    if tables > WORKERS_MAX || holder.len() != Some(parts(&layout, tables).1) {
        return Err("its memory has another length".to_owned());
    }
    if !is_worth_waiting(word(head::BASE), word(head::ALIVE)) {
        let seconds = WITHOUT_ENGINE.as_secs();
        return Err(format!("it was killed more than {seconds} s ago"));
    }
    let mapped = Mapped::map(holder.memory(), layout, tables).map_err(|error| error.to_string())?;
    // Without services, their connections would be reset one by one.
    match mapped.area().saved() {
        Some(_) => Ok(mapped),
        None => Err(INCOMPLETE.to_owned()),
    }
}

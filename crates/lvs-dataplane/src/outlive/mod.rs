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

mod area;
mod holder;

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use lvs_core::Instant;
use lvs_core::memory::{Layout, Memory};
use tracing::warn;

pub(crate) use self::area::{Area, KEPT_WORDS, Record};
pub use self::holder::{Holder, hold};
use crate::sys::{self, SharedArray};

/// How long connections wait for another engine.
pub(crate) const WITHOUT_ENGINE: Duration = Duration::from_secs(300);
/// Records of servers whose counters are kept.
const RECORDS: usize = 1 << 16;
/// 64-bit words for services and settings: twice 4 MiB.
const TEXT_WORDS: usize = 1 + (1 << 20);
/// "LVSOUTLV".
const MAGIC: u64 = u64::from_le_bytes(*b"LVSOUTLV");
/// It changes with the meaning of any word, except those of the connection table.
const VERSION: u64 = 1;

/// Words at the beginning.
mod head {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 1;
    /// `CLOCK_MONOTONIC` when the engine's clock said zero.
    pub(super) const BASE: usize = 2;
    /// Until when by the engine's clock it is worth while to wait for another one.
    pub(super) const ALIVE: usize = 3;
    /// The connection table's own description.
    pub(super) const TABLE: usize = 8;
    pub(super) const WORDS: usize = TABLE + super::Layout::HEADER_WORDS;
}

/// Where the parts lie in the memory: offsets in bytes, each at a page, and words.
fn parts(layout: &Layout) -> ([(u64, usize); 8], u64) {
    const PAGE: u64 = 4096;
    let words = [
        head::WORDS,
        RECORDS * KEPT_WORDS,
        TEXT_WORDS,
        layout.narrow_words(),
        layout.narrow_buckets as usize,
        layout.wide_words(),
        layout.wide_buckets as usize,
        layout.overflow_words(),
    ];
    let mut at = 0;
    let parts = words.map(|words| {
        let part = (at, words);
        at += (words.max(1) as u64 * 8).next_multiple_of(PAGE);
        part
    });
    (parts, at)
}

/// The memory, and whoever holds it.
#[derive(Debug)]
pub struct Outlive {
    head: SharedArray,
    counts: SharedArray,
    text: SharedArray,
    table: [Arc<SharedArray>; 5],
    layout: Layout,
    found: bool,
    holder: Holder,
}

impl Outlive {
    /// Takes up what another engine has left, if it had a table of this layout and was killed not
    /// too long ago; else it begins anew, and says why.
    ///
    /// # Errors
    /// If the memory cannot be had.
    pub fn open(layout: Layout, holder: Holder) -> std::io::Result<Self> {
        if holder.is_used() {
            match found(&holder, &layout) {
                Ok(left) => return Self::map(left, holder, true),
                Err(why) => warn!("connections of the engine before this one have ended: {why}"),
            }
        }
        let (_, len) = parts(&layout);
        // All zeros, then.
        holder.resize(0)?;
        holder.resize(len)?;
        let this = Self::map(layout, holder, false)?;
        this.set_clock(Instant::ZERO);
        for (n, word) in layout.to_words().into_iter().enumerate() {
            this.head.words()[head::TABLE + n].store(word, Relaxed);
        }
        this.head.words()[head::VERSION].store(VERSION, Relaxed);
        this.head.words()[head::MAGIC].store(MAGIC, Release);
        Ok(this)
    }

    fn map(layout: Layout, holder: Holder, found: bool) -> std::io::Result<Self> {
        let (parts, _) = parts(&layout);
        let part = |n: usize| {
            let (at, words) = parts[n];
            SharedArray::of_file(holder.memory(), at, words.max(1))
        };
        let table = |n| part(n).map(Arc::new);
        Ok(Self {
            head: part(0)?,
            counts: part(1)?,
            text: part(2)?,
            table: [table(3)?, table(4)?, table(5)?, table(6)?, table(7)?],
            layout,
            found,
            holder,
        })
    }

    /// Another engine has left its connections.
    pub(crate) const fn is_successor(&self) -> bool {
        self.found
    }

    /// Memory for the connection table.
    ///
    /// # Errors
    /// None that is known.
    pub fn memory(&self) -> std::io::Result<Memory> {
        sys::shared_table(self.layout, self.table.clone())
    }

    /// Where the rest is kept.
    pub(crate) fn area(&self) -> Area<'_> {
        Area {
            counts: self.counts.words(),
            text: self.text.words(),
        }
    }

    fn set(&self, word: usize, value: u64) {
        self.head.words()[word].store(value, Release);
    }

    /// Deadlines are by a clock that says `now`.
    pub(crate) fn set_clock(&self, now: Instant) {
        self.set(head::BASE, sys::monotonic().wrapping_sub(now.as_nanos()));
        self.is_alive(now);
    }

    /// Says that there is an engine.
    pub(crate) fn is_alive(&self, now: Instant) {
        self.set(head::ALIVE, (now + WITHOUT_ENGINE).as_nanos());
    }

    /// How far the clock by which deadlines are is ahead of one that says `now`.
    pub(crate) fn clock_ahead(&self, now: Instant) -> Duration {
        let base = self.head.words()[head::BASE].load(Relaxed);
        let then = sys::monotonic().wrapping_sub(base);
        Duration::from_nanos(then.saturating_sub(now.as_nanos()))
    }

    /// An orderly end: nobody is to find anything.
    pub(crate) fn end(&self) {
        self.set(head::ALIVE, 0);
        self.holder.end();
    }

    /// Whoever holds all this.
    pub(crate) const fn holder(&self) -> &Holder {
        &self.holder
    }
}

/// Whether an engine with these words may still have a successor.
fn is_worth_waiting(base: u64, alive: u64) -> bool {
    sys::monotonic().wrapping_sub(base) < alive
}

/// What another engine has left, if this one can go on with it: the layout of its connection table.
/// Else why not.
fn found(holder: &Holder, layout: &Layout) -> Result<Layout, String> {
    let head = SharedArray::of_file(holder.memory(), 0, head::WORDS);
    let head = head.map_err(|error| error.to_string())?;
    let word = |n: usize| head.words()[n].load(Acquire);
    if (word(head::MAGIC), word(head::VERSION)) != (MAGIC, VERSION) {
        return Err("it was another version".to_owned());
    }
    let description = std::array::from_fn(|n| word(head::TABLE + n));
    let left = Layout::from_words(&description).map_err(|error| error.to_string())?;
    let keys = left.keys;
    if left != (Layout { keys, ..*layout }) {
        return Err("it had another --max-connections".to_owned());
    }
    if holder.len() != Some(parts(&left).1) {
        return Err("its memory has another length".to_owned());
    }
    if !is_worth_waiting(word(head::BASE), word(head::ALIVE)) {
        let seconds = WITHOUT_ENGINE.as_secs();
        return Err(format!("it was killed more than {seconds} s ago"));
    }
    Ok(left)
}

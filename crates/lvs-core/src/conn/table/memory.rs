//! The memory that contains a connection table, and its layout.
//!
//! By default, the memory is on the heap. The creator of a table may instead supply a memory file
//! that outlives the process, or BPF maps that the kernel fast path also reads. The structure is
//! the same. It consists of five regions of 64-bit words, all zero at first:
//!
//! | region | words |
//! |---|---|
//! | narrow slots: IPv4 | 8 a slot, in buckets of [`WAYS`](Layout::WAYS) |
//! | narrow tags | 1 a bucket |
//! | wide slots: IPv6, and servers of another family than their clients | 16 a slot |
//! | wide tags | 1 a bucket |
//! | overflow: entries without a free slot in their buckets | 16 a slot |
//!
//! [`Layout`] contains their sizes and hash keys.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::any::Any;
use core::fmt;
use core::sync::atomic::AtomicU64;
use core::time::Duration;

const LINE: usize = 64;

/// Layout of a table's memory: plain numbers, stored next to the memory for the process that takes
/// over after a warm restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of buckets with narrow slots.
    pub narrow_buckets: u32,
    /// Number of buckets with wide slots.
    pub wide_buckets: u32,
    /// Number of overflow slots.
    pub overflow_slots: u32,
    /// Keys of the hash function.
    pub keys: [u64; 2],
}

/// No memory of this size is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Size of the requested table in bytes.
    pub bytes: usize,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "not enough memory for a connection table of {} MiB",
            self.bytes >> 20
        )
    }
}

impl core::error::Error for OutOfMemory {}

/// Reasons to refuse the memory that a previous process has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutError {
    /// The words are not the encoded layout of a connection table.
    Foreign,
    /// The layout has this version, which another version of this crate uses.
    Version(u64),
    /// The encoded layout has invalid numbers, or the memory is too short for it.
    Damaged,
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str("the memory does not contain a connection table"),
            Self::Version(version) => write!(
                f,
                "the connection table has layout {version}, and this program reads layout {}",
                Layout::VERSION
            ),
            Self::Damaged => f.write_str(
                "the layout of the connection table is damaged, or its memory is too short",
            ),
        }
    }
}

impl core::error::Error for LayoutError {}

impl Layout {
    /// The version of the format of slots, of tags and of the encoded layout.
    pub const VERSION: u64 = 1;
    /// Number of slots in a bucket.
    pub const WAYS: usize = 8;
    /// Number of words in a narrow slot.
    pub const NARROW_WORDS: usize = 8;
    /// Number of words in a wide slot.
    pub const WIDE_WORDS: usize = 16;
    /// Number of words in an encoded layout ([`to_words`](Self::to_words)).
    pub const HEADER_WORDS: usize = 16;
    const MAGIC: u64 = u64::from_le_bytes(*b"LVSCONNS");
    /// A table has fewer slots than this: handles are 31 bits wide.
    const SLOTS_MAX: u64 = 1 << 31;
    /// Minimum number of overflow slots; a table for fewer connections has one for each connection.
    const OVERFLOW_MIN: usize = 1 << 18;

    /// A layout for at most `connections` (limited to 1 to 2^29), which may all be IPv4 or all
    /// IPv6: 85 of 100 slots of a width are used when the table is full. `seed` keys the hash
    /// function.
    pub fn new(connections: usize, seed: u64) -> Self {
        // The handles of the three regions together fit into 31 bits.
        let connections = connections.clamp(1, 1 << 29);
        let buckets = (connections * 100).div_ceil(85 * Self::WAYS);
        let overflow = (connections / 16).max(connections.min(Self::OVERFLOW_MIN));
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Self {
            narrow_buckets: narrow(buckets),
            wide_buckets: narrow(buckets),
            overflow_slots: narrow(overflow),
            keys: [seed, seed.rotate_left(32) ^ 0x9e37_79b9_7f4a_7c15],
        }
    }

    /// Limits the wide slots to this number of connections, for memory that is allocated at once,
    /// whether used or not. More connections that need wide slots are stored in the overflow, until
    /// it is full.
    #[must_use]
    pub fn with_wide(self, connections: usize) -> Self {
        let wide = Self::new(connections, 0).wide_buckets;
        Self {
            wide_buckets: wide.min(self.narrow_buckets),
            ..self
        }
    }

    /// Number of bytes of all regions.
    pub const fn bytes(&self) -> usize {
        let tags = self.narrow_buckets as usize + self.wide_buckets as usize;
        let words = self.narrow_words() + self.wide_words() + self.overflow_words() + tags;
        words * size_of::<AtomicU64>()
    }

    /// Number of words in the region of narrow slots.
    pub const fn narrow_words(&self) -> usize {
        self.narrow_buckets as usize * Self::WAYS * Self::NARROW_WORDS
    }

    /// Number of words in the region of wide slots.
    pub const fn wide_words(&self) -> usize {
        self.wide_buckets as usize * Self::WAYS * Self::WIDE_WORDS
    }

    /// Number of words in the overflow.
    pub const fn overflow_words(&self) -> usize {
        self.overflow_slots as usize * Self::WIDE_WORDS
    }

    /// Number of words in each region: narrow slots, their tags, wide slots, their tags, overflow.
    pub const fn region_words(&self) -> [usize; 5] {
        let tags = [self.narrow_buckets as usize, self.wide_buckets as usize];
        let (narrow, wide) = (self.narrow_words(), self.wide_words());
        [narrow, tags[0], wide, tags[1], self.overflow_words()]
    }

    /// Encodes the layout, to be stored next to the memory.
    pub const fn to_words(&self) -> [u64; Self::HEADER_WORDS] {
        let mut words = [0; Self::HEADER_WORDS];
        words[0] = Self::MAGIC;
        words[1] = Self::VERSION;
        words[2] = Self::WAYS as u64;
        words[3] = Self::NARROW_WORDS as u64;
        words[4] = Self::WIDE_WORDS as u64;
        words[5] = self.narrow_buckets as u64;
        words[6] = self.wide_buckets as u64;
        words[7] = self.overflow_slots as u64;
        words[8] = self.keys[0];
        words[9] = self.keys[1];
        words
    }

    /// Decodes the layout that was stored next to existing memory.
    ///
    /// # Errors
    /// If the words are not an encoded layout, have another version, or contain invalid numbers.
    pub fn from_words(words: &[u64; Self::HEADER_WORDS]) -> Result<Self, LayoutError> {
        let &[magic, version, ways, narrow, wide, rest @ ..] = words;
        if magic != Self::MAGIC {
            return Err(LayoutError::Foreign);
        }
        if version != Self::VERSION {
            return Err(LayoutError::Version(version));
        }
        let [
            narrow_buckets,
            wide_buckets,
            overflow_slots,
            k0,
            k1,
            unused @ ..,
        ] = rest;
        let shape = [
            Self::WAYS as u64,
            Self::NARROW_WORDS as u64,
            Self::WIDE_WORDS as u64,
        ];
        let slots = [narrow_buckets, wide_buckets]
            .map(|buckets| buckets.saturating_mul(Self::WAYS as u64))
            .into_iter()
            .fold(overflow_slots, u64::saturating_add);
        if [ways, narrow, wide] != shape || slots >= Self::SLOTS_MAX || unused != [0; 6] {
            return Err(LayoutError::Damaged);
        }
        let number = |n| u32::try_from(n).map_err(|_| LayoutError::Damaged);
        Ok(Self {
            narrow_buckets: number(narrow_buckets)?,
            wide_buckets: number(wide_buckets)?,
            overflow_slots: number(overflow_slots)?,
            keys: [k0, k1],
        })
    }
}

/// A region of 64-bit words in the memory of a table.
pub struct Region {
    words: Store,
    /// Index of the first word that begins a cache line.
    first: usize,
}

enum Store {
    Heap(Box<[AtomicU64]>),
    /// Shared memory, and the owner that keeps it mapped.
    Shared(
        &'static [AtomicU64],
        #[expect(
            dead_code,
            reason = "the value is stored only to keep the memory mapped"
        )]
        Arc<dyn Any + Send + Sync>,
    ),
}

impl Region {
    /// Zeros on the heap, allocated by the system on first use; `None` if there is too little
    /// memory.
    pub fn heap(words: usize) -> Option<Self> {
        // A region begins at a cache line. It is not of an aligned type, for which the allocator
        // would write the whole memory at once; memory from the kernel is zero already.
        let words = words.checked_add(LINE / size_of::<AtomicU64>())?;
        let words: Box<[AtomicU64]> = bytemuck::try_zeroed_slice_box(words).ok()?;
        let first = words.as_ptr().align_offset(LINE);
        Some(Self {
            first: first.min(LINE / size_of::<AtomicU64>()),
            words: Store::Heap(words),
        })
    }

    /// A region of words that exist as long as `owner`, such as a mapping. The region keeps
    /// `owner`, so that the words exist as long as the region.
    ///
    /// The words are a slice, because a call of `owner` at each access would be an indirect call
    /// for each line of the table.
    pub fn shared(words: &'static [AtomicU64], owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            words: Store::Shared(words, owner),
            first: 0,
        }
    }

    #[inline]
    fn all(&self) -> &[AtomicU64] {
        match &self.words {
            Store::Heap(words) => words,
            Store::Shared(words, _) => words,
        }
    }

    fn len(&self) -> usize {
        self.all().len() - self.first
    }

    #[inline]
    pub(crate) fn line(&self, n: usize) -> &[AtomicU64; 8] {
        let from = self.first + n * 8;
        let line = self.all().get(from..from + 8);
        line.and_then(|line| line.try_into().ok())
            .expect("handles lead to slots")
    }

    #[inline]
    pub(crate) fn word(&self, n: usize) -> &AtomicU64 {
        &self.all()[self.first + n]
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.words {
            Store::Heap(_) => "on the heap",
            Store::Shared(..) => "shared",
        })
    }
}

/// The memory of a table.
pub struct Memory {
    pub(crate) layout: Layout,
    pub(crate) narrow: Region,
    pub(crate) narrow_tags: Region,
    pub(crate) wide: Region,
    pub(crate) wide_tags: Region,
    pub(crate) overflow: Region,
    pub(crate) quarantine: Duration,
}

impl Memory {
    /// Allocates the memory on the heap.
    ///
    /// # Panics
    /// If there is too little memory: see [`try_heap`](Self::try_heap).
    pub fn heap(layout: Layout) -> Self {
        Self::try_heap(layout).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Allocates the memory on the heap.
    ///
    /// # Errors
    /// [`OutOfMemory`]
    pub fn try_heap(layout: Layout) -> Result<Self, OutOfMemory> {
        let bytes = layout.bytes();
        let [narrow, narrow_tags, wide, wide_tags, overflow] = layout.region_words();
        let region = |words| Region::heap(words).ok_or(OutOfMemory { bytes });
        Ok(Self {
            layout,
            narrow: region(narrow)?,
            narrow_tags: region(narrow_tags)?,
            wide: region(wide)?,
            wide_tags: region(wide_tags)?,
            overflow: region(overflow)?,
            quarantine: Duration::ZERO,
        })
    }

    /// Memory in the given regions: narrow slots, their tags, wide slots, their tags, overflow.
    /// Look-ups are faster if each region begins at a cache line.
    ///
    /// # Errors
    /// [`LayoutError::Damaged`] if a region is too short, or the layout has no narrow buckets.
    pub fn new(layout: Layout, regions: [Region; 5]) -> Result<Self, LayoutError> {
        let mut both = regions.iter().zip(layout.region_words());
        if both.any(|(region, words)| region.len() < words) || layout.narrow_buckets == 0 {
            return Err(LayoutError::Damaged);
        }
        let [narrow, narrow_tags, wide, wide_tags, overflow] = regions;
        Ok(Self {
            layout,
            narrow,
            narrow_tags,
            wide,
            wide_tags,
            overflow,
            quarantine: Duration::ZERO,
        })
    }

    /// Sets the time for which a freed slot of an offloaded connection is not reused: BPF programs
    /// may still read it.
    #[must_use]
    pub const fn quarantined(mut self, time: Duration) -> Self {
        self.quarantine = time;
        self
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("layout", &self.layout)
            .field("slots", &self.narrow)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;
    use core::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn layout_round_trips_or_is_refused_with_reason() {
        let layout = Layout::new(1_000_000, 7);
        let words = layout.to_words();
        assert_eq!(Layout::from_words(&words), Ok(layout));
        let changed = |n: usize, to| {
            let mut words = words;
            words[n] = to;
            Layout::from_words(&words)
        };
        assert_eq!(changed(0, 1), Err(LayoutError::Foreign));
        assert_eq!(changed(1, 9), Err(LayoutError::Version(9)));
        assert_eq!(changed(2, 4), Err(LayoutError::Damaged));
        assert_eq!(changed(5, 1 << 40), Err(LayoutError::Damaged));
        assert_eq!(changed(12, 1), Err(LayoutError::Damaged));
    }

    #[test]
    fn layout_has_100_slots_for_85_connections() {
        for connections in [1, 2, 100, 1_000_000, 10_000_000] {
            let layout = Layout::new(connections, 1);
            let slots = layout.narrow_buckets as usize * Layout::WAYS;
            assert!(slots * 85 >= connections * 100);
            assert!(slots * 85 < connections * 100 + 85 * Layout::WAYS);
        }
    }

    #[test]
    fn layout_with_fewer_wide_slots_needs_less_memory() {
        let all = Layout::new(10_000_000, 1);
        let few = all.with_wide(2_500_000);
        assert!(all.bytes() > 2_300_000_000);
        assert!(few.bytes() < 1_300_000_000, "{}", few.bytes());
        assert_eq!(few.narrow_buckets, all.narrow_buckets);
        assert_eq!(Layout::from_words(&few.to_words()), Ok(few));
        let more = Layout::new(100, 1).with_wide(usize::MAX);
        assert_eq!(more, Layout::new(100, 1));
    }

    #[test]
    fn table_memory_lines_are_aligned_and_initially_zero() {
        let region = Region::heap(8 * 100).unwrap();
        for n in 0..100 {
            let line = region.line(n);
            assert_eq!(line.as_ptr().align_offset(LINE), 0);
            assert!(line.iter().all(|word| word.load(Relaxed) == 0));
        }
    }

    #[test]
    fn dropped_table_drops_owners_of_its_shared_regions() {
        let layout = Layout::new(1, 1);
        let sizes = layout.region_words();
        let owners = sizes.map(|_| Arc::new(()));
        let regions: Vec<Region> = sizes
            .into_iter()
            .zip(&owners)
            .map(|(size, owner)| {
                let words: &'static [AtomicU64] = Box::leak(bytemuck::zeroed_slice_box(size));
                Region::shared(words, owner.clone())
            })
            .collect();
        let regions = <[Region; 5]>::try_from(regions).expect("there are five regions");
        let memory = Memory::new(layout, regions).expect("the regions are long enough");
        let table = crate::conn::ConnTable::with_memory(1, memory);
        let uses = || owners.each_ref().map(Arc::strong_count);
        assert_eq!(uses(), [2; 5]);
        drop(table);
        assert_eq!(uses(), [1; 5]);
    }

    #[test]
    fn region_larger_than_available_memory_returns_none() {
        for words in [usize::MAX / 32, usize::MAX / 8, usize::MAX] {
            assert!(Region::heap(words).is_none());
        }
    }

    #[test]
    fn memory_regions_that_are_too_short_are_refused() {
        let layout = Layout::new(100, 1);
        let regions = |short: usize| {
            let sizes = layout.region_words();
            let mut n = 0;
            sizes.map(|size| {
                n += 1;
                let words: Box<[AtomicU64]> =
                    bytemuck::zeroed_slice_box(size - usize::from(n == short));
                Region::shared(Box::leak(words), Arc::new(()))
            })
        };
        assert!(Memory::new(layout, regions(0)).is_ok());
        for short in 1..=5 {
            let refused = Memory::new(layout, regions(short)).unwrap_err();
            assert_eq!(refused, LayoutError::Damaged);
        }
    }
}

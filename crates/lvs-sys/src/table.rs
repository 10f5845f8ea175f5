//! Memory for a connection table, in large pages if they are available.

use std::io;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use lvs_core::memory::{Layout, Memory, Region};

use super::{check, map_memory, page_size};

/// Size of a large page in bytes.
const LARGE: usize = 2 << 20;

/// An anonymous mapping, all zeros at first.
#[derive(Debug)]
struct Mapping {
    memory: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value until it is dropped, and is not bound to a thread.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference gives no access to the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps memory for `words` words; the first word is at the boundary of a large page.
    fn new(words: usize) -> io::Result<Self> {
        let len = words.checked_mul(size_of::<AtomicU64>());
        let len = len.and_then(|len| len.checked_add(LARGE));
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let memory = map_memory(len, flags, -1, 0)?;
        let len = len.unwrap_or(0);
        Ok(Self { memory, len })
    }

    fn start(&self) -> NonNull<u8> {
        let offset = self.memory.as_ptr().align_offset(LARGE);
        // SAFETY: the mapping is a large page longer than its words, so the first boundary lies
        // within.
        unsafe { self.memory.add(offset.min(LARGE)) }
    }

    /// Requests large pages. Without them, look-ups are only slower.
    fn advise(&self) {
        // The kernel refuses this if it has no large pages.
        let _ = self.madvise(0, self.len - LARGE, libc::MADV_HUGEPAGE);
    }

    fn madvise(&self, offset: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
        debug_assert!(offset + len <= self.len - LARGE, "within the words");
        // SAFETY: the range lies within the mapping, and the advice does not change its content.
        let done = unsafe {
            let start = self.start().add(offset);
            libc::madvise(start.as_ptr().cast(), len, advice)
        };
        check(done).map(drop)
    }

    /// Number of small pages in use, of the 2 MiB from `offset` on.
    fn used(&self, offset: usize) -> io::Result<usize> {
        debug_assert!(offset + LARGE <= self.len - LARGE, "within the words");
        let mut pages = vec![0_u8; LARGE.div_ceil(page_size())];
        // SAFETY: the range lies within the mapping, and there is a byte for each of its pages.
        let done = unsafe {
            let start = self.start().add(offset);
            libc::mincore(start.as_ptr().cast(), LARGE, pages.as_mut_ptr())
        };
        check(done)?;
        Ok(pages.iter().filter(|&page| page & 1 != 0).count())
    }
}

/// The memory of a connection table, whose pages can be replaced by large pages.
#[derive(Debug)]
pub struct TablePages {
    mappings: Vec<Arc<Mapping>>,
}

impl TablePages {
    /// Replaces the small pages of each 2 MiB of memory by a large page, if at least half of the
    /// small pages are used, and contiguous memory is available. Returns the number of large pages,
    /// including those that existed before. Look-ups then cause fewer TLB misses, for little more
    /// memory. Look-ups wait while the kernel copies 2 MiB; `pause` is called after each attempt.
    ///
    /// # Errors
    /// If the kernel has no large pages, or cannot convert pages on request (before Linux 6.1).
    pub fn enlarge(&self, mut pause: impl FnMut()) -> io::Result<usize> {
        /// `MADV_COLLAPSE`, which not every libc defines.
        const COLLAPSE: libc::c_int = 25;
        let mut made = 0;
        for mapping in &self.mappings {
            let len = mapping.len - LARGE;
            for offset in (0..len / LARGE).map(|n| n * LARGE) {
                if mapping.used(offset)? < LARGE / page_size() / 2 {
                    continue;
                }
                match mapping.madvise(offset, LARGE, COLLAPSE) {
                    Ok(()) => made += 1,
                    // At present, no contiguous memory of this size is available.
                    Err(error)
                        if matches!(
                            error.raw_os_error(),
                            Some(libc::EAGAIN | libc::ENOMEM | libc::EBUSY)
                        ) => {}
                    Err(error) => return Err(error),
                }
                pause();
            }
        }
        Ok(made)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own. References to its words exist in regions that
        // own this value, so no such reference exists now.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.len) };
    }
}

/// Allocates memory for a connection table with the layout `layout`; also returns its pages.
/// `large` requests large pages at once for the narrow slots and their tags: the first connections
/// then use 2 MiB each instead of 4 KiB.
///
/// # Errors
/// Errors of `mmap`.
pub fn table_memory(layout: Layout, large: bool) -> io::Result<(Memory, TablePages)> {
    let sizes = [
        (layout.narrow_words(), true),
        (layout.narrow_buckets as usize, true),
        (layout.wide_words(), false),
        (layout.wide_buckets as usize, false),
        (layout.overflow_words(), false),
    ];
    let mut mappings = Vec::with_capacity(sizes.len());
    let mut regions = Vec::with_capacity(sizes.len());
    for (words, slots_of_most) in sizes {
        let mapping = Mapping::new(words)?;
        if large && slots_of_most {
            mapping.advise();
        }
        let mapping = Arc::new(mapping);
        // SAFETY: the words lie within the mapping, are aligned, and are zero, which is a valid
        // value of an atomic. Only the region uses the reference, and the region owns the mapping
        // as long as it exists.
        let words =
            unsafe { slice::from_raw_parts(mapping.start().as_ptr().cast::<AtomicU64>(), words) };
        regions.push(Region::shared(words, mapping.clone()));
        mappings.push(mapping);
    }
    let regions = <[Region; 5]>::try_from(regions).map_err(|_| io::ErrorKind::InvalidInput)?;
    let memory = Memory::new(layout, regions).map_err(io::Error::other)?;
    Ok((memory, TablePages { mappings }))
}

#[cfg(test)]
mod tests {
    use lvs_core::{Control, Options};

    use super::*;

    #[test]
    fn table_memory_has_full_capacity_with_small_and_large_pages() {
        for large in [false, true] {
            let control = Control::new(Options {
                max_connections: 1000,
                ..Options::default()
            });
            let (memory, _) = table_memory(control.layout(), large).unwrap();
            let shard = control.shard_in(0, memory).unwrap();
            assert_eq!((shard.len(), shard.capacity()), (0, 1000));
        }
    }

    /// The test writes to each small page of the narrow slots, so that these pages can be made
    /// large.
    #[test]
    fn used_table_pages_keep_content_when_enlarged_and_unused_pages_stay_small() {
        use core::sync::atomic::Ordering::Relaxed;

        let layout = Layout::new(50_000, 1);
        let (memory, pages) = table_memory(layout, false).unwrap();
        assert_eq!(
            pages.enlarge(|| ()).unwrap_or(0),
            0,
            "pages of unused memory were made large"
        );
        let slots = &pages.mappings[0];
        let len = layout.narrow_words();
        // SAFETY: as in `table_memory`, except that `pages` owns the mapping, until after the last
        // use.
        let words =
            unsafe { slice::from_raw_parts(slots.start().as_ptr().cast::<AtomicU64>(), len) };
        for word in words.iter().step_by(page_size() / size_of::<AtomicU64>()) {
            word.store(7, Relaxed);
        }
        let mut paused = 0;
        match pages.enlarge(|| paused += 1) {
            Ok(made) => {
                assert!(made <= len * 8 / LARGE, "{made}");
                assert_eq!(paused, len * 8 / LARGE);
            }
            // The kernel has no large pages.
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}"),
        }
        let kept = words.iter().step_by(page_size() / size_of::<AtomicU64>());
        assert!(kept.map(|word| word.load(Relaxed)).all(|word| word == 7));
        drop(memory);
    }
}

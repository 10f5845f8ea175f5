//! Memory for a connection table, in large pages where they can be had.

use std::io;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use lvs_core::memory::{Layout, Memory, Region};

/// A large page.
const LARGE: usize = 2 << 20;

/// An anonymous mapping, all zeros at first.
struct Mapping {
    memory: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value until it is dropped, and nothing in it to a thread.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference gives no access to the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Room for so many words that begin at a large page.
    fn new(words: usize) -> io::Result<Self> {
        let len = words
            .checked_mul(size_of::<AtomicU64>())
            .and_then(|len| len.checked_add(LARGE))
            .filter(|&len| isize::try_from(len).is_ok())
            .ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new anonymous mapping touches no memory that exists.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { memory, len })
    }

    /// Where the words begin.
    fn start(&self) -> NonNull<u8> {
        let offset = self.memory.as_ptr().align_offset(LARGE);
        // SAFETY: the mapping is a large page longer than its words, so the first boundary lies
        // within.
        unsafe { self.memory.add(offset.min(LARGE)) }
    }

    /// Asks for large pages. Without them the same memory is slower, no more.
    fn advise(&self) {
        let start = self.start();
        let len = self.len - LARGE;
        // SAFETY: the range lies within the mapping, and the advice changes nothing that is in it.
        unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and whoever had words of it holds this value
        // ([`Memory::hold`]).
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.len) };
    }
}

/// Memory for a connection table that looks like `layout`. `large` asks for large pages where the
/// slots lie: look-ups in a table of a million connections then miss the TLB less, and the first
/// connections take 2 MiB each instead of 4 KiB.
///
/// # Errors
/// What `mmap` says.
pub fn table_memory(layout: Layout, large: bool) -> io::Result<Memory> {
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
        // SAFETY: the words lie within the mapping, are aligned, and are zero, which is a value of
        // an atomic. They are used through shared references only, by the table, which
        // holds the mapping for as long as it exists.
        let words =
            unsafe { slice::from_raw_parts(mapping.start().as_ptr().cast::<AtomicU64>(), words) };
        regions.push(Region::lent(words));
        mappings.push(mapping);
    }
    let regions = <[Region; 5]>::try_from(regions).map_err(|_| io::ErrorKind::InvalidInput)?;
    let memory = Memory::new(layout, regions).map_err(io::Error::other)?;
    Ok(memory.hold(Arc::new(mappings)))
}

#[cfg(test)]
mod tests {
    use lvs_core::{Control, Options};

    use super::*;

    #[test]
    fn a_table_lies_in_it_and_outlives_nothing() {
        for large in [false, true] {
            let control = Control::new(Options {
                max_connections: 1000,
                ..Options::default()
            });
            let memory = table_memory(control.layout(), large).unwrap();
            let shard = control.shard_in(0, memory).unwrap();
            assert_eq!((shard.len(), shard.capacity()), (0, 1000));
        }
    }
}

//! Buffers of a packet backend, in one memory mapping: frames borrow them, and return them when
//! they are dropped.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::map_memory;

/// A mapping that is divided into slots of one size. A slot has at most one borrower, and is
/// returned when any thread drops the [`Lent`]; the backend then lends it again, or passes it to
/// the kernel. This needs no queue: each slot begins with a word that is 0 if the slot is not lent,
/// and the owner of a ring checks the slots in order.
///
/// In a ring that is shared with the kernel ([`PacketRing`](super::PacketRing)), a slot whose word
/// is 0 belongs to the kernel.
pub struct Arena {
    memory: NonNull<u8>,
    slots: usize,
    slot_len: usize,
    /// Number of bytes at the beginning of each slot that are never lent.
    head: usize,
    /// Whether the kernel fills the slots.
    is_ring: bool,
}

/// Number of bytes at the beginning of a slot that are never lent, outside of a ring: a cache line.
const HEAD: usize = 64;
/// The value of a slot's word while the slot is lent, outside of a ring.
const LENT: u32 = 1;

// SAFETY: the pointer is to a mapping that this value owns until it is dropped; the mapping is not
// bound to a thread.
unsafe impl Send for Arena {}
// SAFETY: a shared reference permits access to the memory only through `lend`, which lends each
// slot to one owner at a time.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps memory for `slots` slots of `slot_len` bytes, rounded up to a multiple of 4, all zero.
    ///
    /// # Errors
    /// Errors of `mmap`; `InvalidInput` for no slots, or more slots than fit into the address space.
    pub fn new(slots: usize, slot_len: usize) -> io::Result<Arc<Self>> {
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let slot_len = HEAD + slot_len.next_multiple_of(4);
        Self::map(slots, slot_len, HEAD, anonymous, -1)
    }

    /// Maps the ring of a packet socket. The first `head` bytes of each slot are never lent; they
    /// begin with the word that shows whether the kernel owns the slot.
    ///
    /// # Errors
    /// Errors of `mmap`.
    pub(super) fn of_ring(
        ring: BorrowedFd<'_>,
        slots: usize,
        slot_len: usize,
        head: usize,
    ) -> io::Result<Arc<Self>> {
        Self::map(slots, slot_len, head, libc::MAP_SHARED, ring.as_raw_fd())
    }

    fn map(
        slots: usize,
        slot_len: usize,
        head: usize,
        flags: libc::c_int,
        fd: libc::c_int,
    ) -> io::Result<Arc<Self>> {
        assert!(size_of::<u32>() <= head && head <= slot_len && slot_len.is_multiple_of(4));
        let memory = map_memory(slots.checked_mul(slot_len), flags, fd, 0)?;
        Ok(Arc::new(Self {
            memory,
            slots,
            slot_len,
            head,
            is_ring: fd >= 0,
        }))
    }

    /// Lends a slot; `None` if the slot is already lent, does not exist, or is in a ring.
    pub fn lend(self: &Arc<Self>, slot: usize) -> Option<Lent> {
        if self.is_ring || slot >= self.slots {
            return None;
        }
        // Acquire: the writes of the last owner are visible, and no later access moves before this
        // one.
        if self.word(slot).swap(LENT, Ordering::Acquire) != 0 {
            return None;
        }
        // SAFETY: the slot was not lent, and its word is not 0 now. No kernel fills this arena.
        Some(unsafe { self.lend_owned(slot) })
    }

    /// Lends a slot of a ring that the kernel has passed to this process. The caller must have
    /// changed the slot's word, so that the slot is not lent twice.
    ///
    /// # Safety
    /// The slot neither belongs to the kernel nor is lent already, and its word is not 0.
    pub(super) unsafe fn lend_owned(self: &Arc<Self>, slot: usize) -> Lent {
        // SAFETY: a slot is not shorter than its head.
        let bytes = unsafe { self.start(slot).add(self.head) };
        Lent {
            bytes,
            len: self.slot_len - self.head,
            slot,
            arena: Arc::clone(self),
        }
    }

    /// The first byte of a slot.
    ///
    /// # Panics
    /// If no slot has this number.
    pub(super) fn start(&self, slot: usize) -> NonNull<u8> {
        assert!(slot < self.slots, "a slot is within its arena");
        // SAFETY: `slot` is below the number of slots, so the offset lies within the mapping, whose
        // length fits an isize.
        unsafe { self.memory.add(slot * self.slot_len) }
    }

    /// Prefetches the cache line at `offset` of a slot for writing. The processor may ignore the
    /// request.
    #[inline]
    pub(super) fn prefetch(&self, slot: usize, offset: usize) {
        if slot < self.slots && offset < self.slot_len {
            // SAFETY: the offset lies within a slot of the mapping.
            let line = unsafe { self.memory.add(slot * self.slot_len + offset) };
            ask_for(line);
        }
    }

    /// Number of slots in the arena.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Number of lent slots; for a ring, of slots that the kernel does not own.
    pub fn lent(&self) -> usize {
        let is_lent = |slot: &usize| self.word(*slot).load(Ordering::Relaxed) != 0;
        (0..self.slots).filter(is_lent).count()
    }

    /// The first word of a slot. Its value shows whether the slot is lent.
    pub(super) fn word(&self, slot: usize) -> &AtomicU32 {
        // SAFETY: the slots lie in the mapping, which lives as long as `self`, begin at multiples
        // of four bytes in it, and are longer than the word. A borrower of a slot has no reference
        // to the word, and the kernel accesses it atomically, too.
        unsafe { AtomicU32::from_ptr(self.start(slot).as_ptr().cast()) }
    }
}

/// Prefetches, for writing, the cache line that contains the first byte of a value. The processor
/// may ignore the request.
#[inline]
pub fn prefetch<T>(value: &T) {
    ask_for(NonNull::from(value).cast());
}

#[inline]
fn ask_for(line: NonNull<u8>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction, which faults at no address and
        // changes nothing.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.as_ptr().cast()) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction faults at no address and changes nothing.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{0}]", in(reg) line.as_ptr(), options(nostack, preserves_flags, readonly));
    };
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `map_memory` made, of that length. Every `Lent` keeps
        // the arena alive, so no slot is lent now.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.slots * self.slot_len) };
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("slots", &self.slots())
            .field("slot_len", &self.slot_len)
            .field("lent", &self.lent())
            .finish_non_exhaustive()
    }
}

/// A lent slot of an [`Arena`], with the right to read and write it. Dropping it returns the slot.
pub struct Lent {
    bytes: NonNull<u8>,
    len: usize,
    slot: usize,
    arena: Arc<Arena>,
}

// SAFETY: this value is the only access to its slot, and the arena that it keeps alive is not bound
// to a thread.
unsafe impl Send for Lent {}
// SAFETY: a shared reference permits only reads of the bytes.
unsafe impl Sync for Lent {}

impl Lent {
    /// Whether the slot is in `arena`, so that a sender can pass it to the kernel without a copy.
    pub fn is_of(&self, arena: &Arc<Arena>) -> bool {
        Arc::ptr_eq(&self.arena, arena)
    }
}

impl Deref for Lent {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the slot lies within the mapping, which the arena keeps; it is initialized, and
        // its word marks it as lent, so this value is its only owner. `&self` excludes
        // writes through this value.
        unsafe { slice::from_raw_parts(self.bytes.as_ptr(), self.len) }
    }
}

impl DerefMut for Lent {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the reference to its only owner is exclusive.
        unsafe { slice::from_raw_parts_mut(self.bytes.as_ptr(), self.len) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Release: the next borrower sees the written bytes.
        self.arena.word(self.slot).store(0, Ordering::Release);
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent")
            .field("slot", &self.slot)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lent_arena_slot_has_one_owner_and_stays_valid_after_arena_is_dropped() {
        let arena = Arena::new(4, 64).expect("the memory can be mapped");
        let mut first = arena.lend(1).expect("the slot is free");
        assert!(arena.lend(1).is_none());
        assert!(arena.lend(4).is_none());
        first.fill(7);
        let second = arena.lend(2).expect("the slot is free");
        assert_eq!(second[..], [0; 64]);
        assert_eq!((arena.lent(), second.is_of(&arena)), (2, true));
        std::thread::spawn(move || drop(first))
            .join()
            .expect("the thread does not panic");
        assert_eq!(arena.lend(1).expect("the slot was returned")[..], [7; 64]);
        assert!(Arena::new(0, 64).is_err());
        assert!(Arena::new(usize::MAX, 64).is_err());
        drop(arena);
        assert_eq!(
            second[..],
            [0; 64],
            "the lent slot has changed after the arena was dropped"
        );
    }
}

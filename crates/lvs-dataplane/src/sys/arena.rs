//! Memory of a backend's that is lent to the packet path in slots.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A mapping that is cut into slots of one size. A slot is lent once at a time and comes back by itself, when the [`Lent`] is
/// dropped, by whichever thread; the backend then lends it again, or hands it to the kernel. Nothing is queued for that: each
/// slot has a flag, and a ring's owner asks for its slots in order.
///
/// What a ring of the kernel's needs beside this is its own mapping instead of an anonymous one, and the knowledge which
/// slots the kernel has (`TP_STATUS_USER` of a packet ring, the fill ring of a umem): a slot that is not lent may be its.
pub struct Arena {
    memory: NonNull<u8>,
    slot_len: usize,
    /// Whether each slot is lent.
    lent: Box<[AtomicBool]>,
}

// SAFETY: the pointer is to a mapping that this value owns until it is dropped; nothing in it belongs to a thread.
unsafe impl Send for Arena {}
// SAFETY: a shared reference gives no access to the memory except by `lend`, which gives each slot to one owner at a time.
unsafe impl Sync for Arena {}

impl Arena {
    /// `slots` slots of `slot_len` bytes, all zero.
    ///
    /// # Errors
    /// What `mmap` says; `InvalidInput` for no slots, empty ones, or more than there is address space for.
    pub fn new(slots: usize, slot_len: usize) -> io::Result<Arc<Self>> {
        let len = slots
            .checked_mul(slot_len)
            .filter(|&len| len > 0 && isize::try_from(len).is_ok())
            .ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new anonymous mapping touches no memory that exists.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(Self {
            memory,
            slot_len,
            lent: (0..slots).map(|_| AtomicBool::new(false)).collect(),
        }))
    }

    /// Lends a slot; `None` if it is lent already, or there is none of that number.
    pub fn lend(self: &Arc<Self>, slot: usize) -> Option<Lent> {
        let lent = self.lent.get(slot)?;
        // Acquire: what its last owner wrote is seen, and nothing of ours comes before.
        if lent.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: `slot` is below the number of slots, so the offset lies within the mapping, whose length fits an isize.
        let bytes = unsafe { self.memory.add(slot * self.slot_len) };
        Some(Lent {
            bytes,
            slot,
            arena: Arc::clone(self),
        })
    }

    /// The number of slots.
    pub fn slots(&self) -> usize {
        self.lent.len()
    }

    /// Slots that are lent now.
    pub fn lent(&self) -> usize {
        let is_lent = |lent: &&AtomicBool| lent.load(Ordering::Relaxed);
        self.lent.iter().filter(is_lent).count()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` made, of that length; every `Lent` keeps the arena alive, so there is none.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.lent.len() * self.slot_len) };
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

/// A slot of an [`Arena`] and the right to read and write it. Dropped, it is the arena's again.
pub struct Lent {
    bytes: NonNull<u8>,
    slot: usize,
    arena: Arc<Arena>,
}

// SAFETY: it is the only access to its slot, and the arena that it keeps alive belongs to no thread.
unsafe impl Send for Lent {}
// SAFETY: a shared reference gives shared access to the bytes alone.
unsafe impl Sync for Lent {}

impl Lent {
    /// Its number in the arena.
    pub const fn slot(&self) -> usize {
        self.slot
    }

    /// Whether it is a slot of `arena`: whoever sends may hand it to the kernel as it is.
    pub fn is_of(&self, arena: &Arc<Arena>) -> bool {
        Arc::ptr_eq(&self.arena, arena)
    }
}

impl Deref for Lent {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the slot lies within the mapping, which the arena keeps; it is initialized, and its flag says that it is
        // lent, so this value is its only owner, of which there is a shared reference.
        unsafe { slice::from_raw_parts(self.bytes.as_ptr(), self.arena.slot_len) }
    }
}

impl DerefMut for Lent {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the reference to its only owner is exclusive.
        unsafe { slice::from_raw_parts_mut(self.bytes.as_ptr(), self.arena.slot_len) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(lent) = self.arena.lent.get(self.slot) {
            // Release: what was written is seen by whoever lends it next.
            lent.store(false, Ordering::Release);
        }
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
    fn a_slot_has_one_owner_at_a_time() {
        let arena = Arena::new(4, 64).expect("a mapping");
        let mut first = arena.lend(1).expect("free");
        assert!(arena.lend(1).is_none());
        assert!(arena.lend(4).is_none());
        first.fill(7);
        let second = arena.lend(2).expect("free");
        assert_eq!(second[..], [0; 64]);
        assert_eq!(
            (arena.lent(), first.slot(), second.is_of(&arena)),
            (2, 1, true)
        );
        std::thread::spawn(move || drop(first))
            .join()
            .expect("no panic");
        assert_eq!(arena.lend(1).expect("it came back")[..], [7; 64]);
        assert!(Arena::new(0, 64).is_err());
        assert!(Arena::new(usize::MAX, 64).is_err());
        drop(arena);
        assert_eq!(
            second[..],
            [0; 64],
            "the memory outlives its arena's other owners"
        );
    }
}

//! Arrays that grow, so that the state for a successor uses memory in proportion to the number of
//! services and servers.
//!
//! The kernel cannot enlarge an array. So the dataplane creates and fills a larger one, and
//! replaces the old one under its name in one step: a successor finds the old array or the new one,
//! and never an incomplete one.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use super::pins::Maps;
use lvs_sys::SharedArray;
use lvs_sys::lock;

#[derive(Debug)]
pub(super) struct Growing {
    name: &'static str,
    entry: usize,
    array: Mutex<Arc<SharedArray>>,
    /// The array's name in the BPF file system, for a successor; `None` if the array need not
    /// survive a kill.
    pin: Option<PathBuf>,
}

impl Growing {
    /// Creates an array with this number of entries, or opens the predecessor's array.
    pub(super) fn new(
        name: &'static str,
        entry: usize,
        entries: u32,
        maps: Maps<'_>,
    ) -> io::Result<Self> {
        let new = || SharedArray::new(name, entry, entries);
        let (array, pin) = match maps {
            Maps::New => (new()?, None),
            Maps::Pinned(pins) => {
                let (array, path) = (new()?, pins.path(name));
                array.pin(&path)?;
                (array, Some(path))
            }
            Maps::Found(pins) => {
                let path = pins.path(name);
                (SharedArray::pinned_whole(&path)?, Some(path))
            }
        };
        Ok(Self {
            name,
            entry,
            array: Mutex::new(Arc::new(array)),
            pin,
        })
    }

    pub(super) fn get(&self) -> Arc<SharedArray> {
        lock(&self.array).clone()
    }

    /// Returns the array, after replacing it by a larger one if it has fewer than `words` words.
    /// Before the replacement, `fill` writes the larger one (its second argument), perhaps from the
    /// words of the old array (its first argument).
    ///
    /// # Errors
    /// The kernel has no memory for the new array, or the name cannot be replaced. The old array
    /// stays.
    pub(super) fn with_room(
        &self,
        words: usize,
        fill: impl FnOnce(&[AtomicU64], &[AtomicU64]),
    ) -> io::Result<Arc<SharedArray>> {
        let mut array = lock(&self.array);
        if array.words().len() >= words {
            return Ok(array.clone());
        }
        // An eighth more than required, so that the array is seldom replaced.
        let entries = (words + words / 8).div_ceil(self.entry);
        let entries = u32::try_from(entries).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let new = SharedArray::new(self.name, self.entry, entries)?;
        fill(array.words(), new.words());
        if let Some(path) = &self.pin {
            // The kernel reserves names with a dot.
            let beside = path.with_file_name(format!("{}-new", self.name));
            // A killed dataplane may have left the file.
            let _ = fs::remove_file(&beside);
            new.pin(&beside)?;
            fs::rename(&beside, path)?;
        }
        *array = Arc::new(new);
        Ok(array.clone())
    }

    /// Sets all words to zero, without a change of the size. Returns `None` if the array is in use.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn zero(&mut self) -> Option<()> {
        let array = self.array.get_mut();
        let array = array.unwrap_or_else(std::sync::PoisonError::into_inner);
        Arc::get_mut(array)?.zero();
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn growing_array_keeps_its_words_when_it_grows() {
        // Without permission for BPF, the test ends.
        // Ends the test as not run without BPF.
        let _ = super::super::tests::open();
        let growing = Growing::new("lvs_test", 1, 4, Maps::New).expect("memory is available");
        growing.get().words()[3].store(7, Relaxed);
        let copy = |old: &[AtomicU64], new: &[AtomicU64]| {
            for (to, from) in new.iter().zip(old) {
                to.store(from.load(Relaxed), Relaxed);
            }
        };
        let same = growing.with_room(4, copy).expect("the space suffices");
        assert!(Arc::ptr_eq(&same, &growing.get()));
        let more = growing.with_room(5000, copy).expect("memory is available");
        assert!(more.words().len() >= 5000);
        assert!(Arc::ptr_eq(&more, &growing.get()));
        assert_eq!(more.words()[3].load(Relaxed), 7);
        assert_eq!(more.words()[4].load(Relaxed), 0);
    }
}

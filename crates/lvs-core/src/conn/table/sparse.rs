//! A table of values for connection handles, of which only few have a value.

use alloc::boxed::Box;
use alloc::vec::Vec;

const PART: usize = 64;

/// Values by handle, in parts that are allocated at their first use.
#[derive(Debug)]
pub(crate) struct Sparse<T>(Vec<Option<Box<[T; PART]>>>);

impl<T> Default for Sparse<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Default> Sparse<T> {
    /// Whether no value was ever stored.
    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn get(&self, handle: u32) -> Option<&T> {
        let part = self.0.get(handle as usize / PART)?.as_ref()?;
        part.get(handle as usize % PART)
    }

    pub(crate) fn get_mut(&mut self, handle: u32) -> Option<&mut T> {
        let part = self.0.get_mut(handle as usize / PART)?.as_mut()?;
        part.get_mut(handle as usize % PART)
    }

    /// The value of a handle; a default value is stored if there was none.
    pub(crate) fn entry(&mut self, handle: u32) -> &mut T {
        let (part, place) = (handle as usize / PART, handle as usize % PART);
        if self.0.len() <= part {
            self.0.resize_with(part + 1, || None);
        }
        let part = self.0[part].get_or_insert_with(|| Box::new([(); PART].map(|()| T::default())));
        &mut part[place]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_table_returns_inserted_values_and_default_or_none_otherwise() {
        let mut values = Sparse::<u32>::default();
        assert_eq!(values.get(5), None);
        *values.entry(1_000_000) = 7;
        *values.entry(5) += 1;
        assert_eq!((values.get(1_000_000), values.get(5)), (Some(&7), Some(&1)));
        assert_eq!((values.get(6), values.get(70)), (Some(&0), None));
        *values.get_mut(5).unwrap() = 0;
        assert_eq!(values.get(5), Some(&0));
    }
}

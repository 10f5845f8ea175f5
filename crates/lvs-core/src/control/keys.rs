//! Look-up of services by key, in a number of steps that does not depend on the number of services.

use core::hash::{BuildHasherDefault, Hasher};

use hashbrown::HashMap;

use crate::service::ServiceKeyOrd;

pub(super) type Keys = HashMap<ServiceKeyOrd, u32, BuildHasherDefault<Fold>>;

/// A fast hash function without a key. A sender of packets cannot choose the hashed service keys,
/// because they come from the configuration.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fold(u64);

impl Fold {
    const fn fold(&mut self, word: u64) {
        // As in SplitMix64, each bit of the word affects every bit of the state.
        let mut z = (self.0 ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.0 = z ^ (z >> 31);
    }
}

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.fold(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, word: u8) {
        self.fold(word.into());
    }

    fn write_u16(&mut self, word: u16) {
        self.fold(word.into());
    }

    fn write_u32(&mut self, word: u32) {
        self.fold(word.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.fold(word);
    }

    fn write_isize(&mut self, word: isize) {
        self.fold(word.cast_unsigned() as u64);
    }

    fn write_usize(&mut self, word: usize) {
        self.fold(word as u64);
    }
}

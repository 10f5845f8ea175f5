//! The source of random choices.

/// Random choices, either from a seed without an end, or from the bytes of a fuzzer. After the last
/// byte, all choices are 0.
#[derive(Clone, Debug)]
pub struct Entropy<'a> {
    source: Source<'a>,
}

#[derive(Clone, Debug)]
enum Source<'a> {
    Seed(u64),
    Bytes(&'a [u8]),
}

impl<'a> Entropy<'a> {
    /// Endless choices that `seed` determines.
    pub const fn seeded(seed: u64) -> Self {
        Self {
            source: Source::Seed(seed),
        }
    }

    /// Choices that are read from `bytes`.
    pub const fn from_bytes(bytes: &'a [u8]) -> Self {
        Self {
            source: Source::Bytes(bytes),
        }
    }

    /// Whether the bytes are used up; always false for a seed.
    pub fn is_empty(&self) -> bool {
        matches!(self.source, Source::Bytes([]))
    }

    /// Fills `out` with random choices.
    pub fn fill(&mut self, out: &mut [u8]) {
        match &mut self.source {
            Source::Seed(state) => {
                for chunk in out.chunks_mut(8) {
                    let word = split_mix(state).to_le_bytes();
                    chunk.copy_from_slice(&word[..chunk.len()]);
                }
            }
            Source::Bytes(bytes) => {
                let (now, later) = bytes.split_at(out.len().min(bytes.len()));
                out[..now.len()].copy_from_slice(now);
                out[now.len()..].fill(0);
                *bytes = later;
            }
        }
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        self.fill(&mut out);
        out
    }

    /// Returns a random `u8`.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Returns a random `u16`.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Returns a random `u32`.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Returns a random `u64`.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// Returns a number below `limit`; 0 if `limit` is 0. Small limits consume one byte, so that a
    /// fuzzer's inputs stay short.
    pub fn below(&mut self, limit: usize) -> usize {
        match limit {
            0 | 1 => 0,
            2..=256 => usize::from(self.u8()) % limit,
            257..=65_536 => usize::from(self.u16()) % limit,
            _ => usize::try_from(self.u32()).unwrap_or(0) % limit,
        }
    }

    /// Returns `true` in one of `times` calls on average.
    pub fn one_in(&mut self, times: usize) -> bool {
        // A fuzzer's zeros select the usual case.
        self.below(times) == times - 1
    }

    /// Chooses one of `items`.
    ///
    /// # Panics
    /// If `items` is empty.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// Returns `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.fill(&mut out);
        out
    }

    /// Returns a payload of `len` bytes that count up, with wrapping, from a random start in random
    /// steps of equal size. This uses only two random bytes.
    pub fn payload(&mut self, len: usize) -> Vec<u8> {
        let start = self.u8();
        let step = self.u8() | 1;
        std::iter::successors(Some(start), |byte| Some(byte.wrapping_add(step)))
            .take(len)
            .collect()
    }
}

/// `SplitMix64` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_of_bytes_is_finite_and_of_seed_infinite() {
        let mut bytes = Entropy::from_bytes(&[1, 2, 3]);
        assert_eq!((bytes.u16(), bytes.is_empty()), (0x0201, false));
        assert_eq!((bytes.u16(), bytes.is_empty()), (3, true));
        assert_eq!((bytes.below(7), bytes.one_in(2)), (0, false));
        let mut seed = Entropy::seeded(1);
        let first = seed.u64();
        assert_ne!(first, seed.u64());
        assert_eq!(first, Entropy::seeded(1).u64());
        assert!(!seed.is_empty());
    }
}

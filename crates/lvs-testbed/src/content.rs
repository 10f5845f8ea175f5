//! The bytes that servers send and clients expect.
//!
//! All files are beginnings of one endless stream without repetition. A client that knows only the
//! length therefore finds every lost, doubled or swapped segment.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Sizes of the requests of a load run: 1 byte to 10 MiB, evenly spaced on a logarithmic scale,
/// with sizes around important ones (a segment on Ethernet or in a tunnel, 64 KiB).
pub const SIZES: &[u64] = &[
    1, 2, 3, 7, 20, 63, 64, 100, 256, 511, 700, 1000, 1427, 1428, 1429, 1447, 1448, 1449, 1460,
    1461, 1999, 2896, 2897, 4096, 5000, 8191, 10_000, 14_480, 20_011, 32_768, 50_000, 65_160,
    65_483, 65_535, 65_536, 65_537, 100_003, 131_072, 200_000, 300_007, 500_000, 777_777,
    1_000_000, 1_500_001, 2_097_152, 4_000_037, 10_485_760,
];

/// The size in bytes of the bulk file in `make test`: 24 MiB.
pub const BULK: u64 = 24 << 20;

/// The size in bytes of the bulk file in `make test-rest`: 512 MiB.
pub const FULL_BULK: u64 = 512 << 20;

/// Fills the buffer with bytes of the stream, starting at `offset`.
pub fn fill(offset: u64, buffer: &mut [u8]) {
    let mut index = offset / 8;
    let skip = usize::try_from(offset % 8).expect("a remainder of 8 is small");
    let (head, rest) = buffer.split_at_mut(if skip == 0 {
        0
    } else {
        (8 - skip).min(buffer.len())
    });
    if !head.is_empty() {
        head.copy_from_slice(&word(index)[skip..skip + head.len()]);
        index += 1;
    }
    let (words, tail) = rest.as_chunks_mut();
    for chunk in words {
        *chunk = word(index);
        index += 1;
    }
    let length = tail.len();
    tail.copy_from_slice(&word(index)[..length]);
}

/// Writes a file with the first `size` bytes of the stream.
///
/// # Errors
///
/// When the file cannot be written.
pub fn write_file(path: &Path, size: u64) -> std::io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut block = vec![0; 1 << 20];
    let mut offset = 0;
    while offset < size {
        let length = usize::try_from(size - offset)
            .unwrap_or(usize::MAX)
            .min(block.len());
        fill(offset, &mut block[..length]);
        file.write_all(&block[..length])?;
        offset += length as u64;
    }
    file.flush()
}

/// The finaliser of SplitMix64: a bijection, so that no two words are equal.
#[inline]
fn word(index: u64) -> [u8; 8] {
    let mut z = index
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn piece_of_generated_content_equals_the_same_part_of_the_whole() {
        let mut whole = [0; 100];
        fill(0, &mut whole);
        for start in 0..40 {
            for length in 0..40 {
                let mut piece = vec![0xa5; length];
                fill(start as u64, &mut piece);
                assert_eq!(piece, whole[start..start + length], "{start}+{length}");
            }
        }
    }

    #[test]
    fn file_sizes_range_from_one_byte_to_ten_mebibytes() {
        assert!(SIZES.is_sorted());
        assert_eq!((SIZES[0], SIZES[SIZES.len() - 1]), (1, 10 << 20));
    }
}

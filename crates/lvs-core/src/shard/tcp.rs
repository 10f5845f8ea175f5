//! Fields of a TCP header (RFC 9293 section 3.1), for those parts of a shard that look at more than
//! flags and ports.

use core::ops::Range;

/// Sequence number.
pub(super) const SEQUENCE: Range<usize> = 4..8;
/// Acknowledgement number.
pub(super) const ACKNOWLEDGEMENT: Range<usize> = 8..12;
/// Length of the header in words of 32 bits, in the upper half.
const DATA_OFFSET: usize = 12;
/// Flags.
pub(super) const FLAGS: usize = 13;
/// Length of a header without options.
pub(super) const HEADER_LEN: usize = 20;

/// A field of 32 bits; `None` if it is cut short.
pub(super) fn number(tcp: &[u8], field: Range<usize>) -> Option<u32> {
    Some(u32::from_be_bytes(tcp.get(field)?.try_into().ok()?))
}

/// The length that the header says that it has, in bytes; `None` if that is cut short.
pub(super) fn data_offset(tcp: &[u8]) -> Option<usize> {
    Some(usize::from(tcp.get(DATA_OFFSET)? >> 4) * 4)
}

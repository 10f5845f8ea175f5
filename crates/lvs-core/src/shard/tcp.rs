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
/// Receive window, not scaled.
pub(super) const WINDOW: Range<usize> = 14..16;
/// Length of a header without options.
pub(super) const HEADER_LEN: usize = 20;

/// A field of 32 bits; `None` if it is cut short.
pub(super) fn number(tcp: &[u8], field: Range<usize>) -> Option<u32> {
    Some(u32::from_be_bytes(tcp.get(field)?.try_into().ok()?))
}

/// The header's length field, in bytes; `None` if the header is truncated.
pub(super) fn data_offset(tcp: &[u8]) -> Option<usize> {
    Some(usize::from(tcp.get(DATA_OFFSET)? >> 4) * 4)
}

/// The shift count of the window scale option among the options of a SYN (RFC 7323 section 2.2).
pub(super) fn window_scale(mut options: &[u8]) -> Option<u8> {
    const END: u8 = 0;
    const NOTHING: u8 = 1;
    const WINDOW_SCALE: u8 = 3;
    loop {
        let (&kind, rest) = options.split_first()?;
        options = match kind {
            END => return None,
            NOTHING => rest,
            kind => {
                let len = usize::from(*rest.first()?);
                if (kind, len) == (WINDOW_SCALE, 3) {
                    return rest.get(1).copied();
                }
                // A length that leaves out its own octets would go round for ever.
                options.get(len.max(2)..)?
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_scale_reads_option_and_survives_damage() {
        assert_eq!(window_scale(&[2, 4, 5, 180, 1, 3, 3, 7]), Some(7));
        assert_eq!(window_scale(&[3, 3, 9]), Some(9));
        for damaged in [
            &[][..],
            &[1, 1],
            &[0, 3, 3, 7],
            &[3, 3],
            &[3],
            &[2, 0, 2, 0],
            &[8, 200],
        ] {
            assert_eq!(window_scale(damaged), None, "{damaged:?}");
        }
    }
}

//! Fields of a TCP header (RFC 9293 section 3.1).

use core::ops::Range;

pub(super) const SEQUENCE: Range<usize> = 4..8;
pub(super) const ACKNOWLEDGEMENT: Range<usize> = 8..12;
/// Offset of the byte whose upper half is the length of the header, in words of 32 bits.
const DATA_OFFSET: usize = 12;
pub(super) const FLAGS: usize = 13;
/// Bytes of the receive window; the value is not scaled.
pub(super) const WINDOW: Range<usize> = 14..16;
/// Length of a header without options, in bytes.
pub(super) const HEADER_LEN: usize = 20;

/// Reads a field of 32 bits; `None` if it is truncated.
pub(super) fn number(tcp: &[u8], field: Range<usize>) -> Option<u32> {
    Some(u32::from_be_bytes(tcp.get(field)?.try_into().ok()?))
}

/// Length of the header in bytes, from its length field; `None` if the segment ends before this
/// field.
pub(super) fn data_offset(tcp: &[u8]) -> Option<usize> {
    Some(usize::from(tcp.get(DATA_OFFSET)? >> 4) * 4)
}

/// The options of a TCP header, each with its kind and data, up to the end of the list or to the
/// first damaged option. Padding is omitted.
pub(super) fn options(mut options: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    const END: u8 = 0;
    const NOTHING: u8 = 1;
    core::iter::from_fn(move || {
        loop {
            match *options.first()? {
                END => return None,
                NOTHING => options = &options[1..],
                kind => {
                    let len = usize::from(*options.get(1)?);
                    let data = options.get(2..len)?;
                    options = &options[len..];
                    return Some((kind, data));
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn tcp_options_are_parsed_up_to_end_or_first_damaged_option() {
        let read = |bytes| options(bytes).collect::<Vec<_>>();
        assert_eq!(
            read(&[2, 4, 5, 180, 1, 3, 3, 7]),
            [(2, &[5, 180][..]), (3, &[7])]
        );
        assert_eq!(read(&[4, 2, 3, 3, 9]), [(4, &[][..]), (3, &[9])]);
        for damaged in [
            &[][..],
            &[1, 1],
            &[0, 3, 3, 7],
            &[3, 3],
            &[3],
            &[2, 0, 2, 0],
            &[2, 1, 2, 0],
            &[8, 200],
        ] {
            assert!(read(damaged).is_empty(), "{damaged:?}");
        }
    }
}

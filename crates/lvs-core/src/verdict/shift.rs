//! Adjustment of the sequence numbers of a stream, after text in it was replaced by text of another
//! length (`nf_conntrack_seqadj`).

/// The number of bytes by which the director shifts the sequence numbers of one direction: `before`
/// up to the last replacement, `after` beyond it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shift {
    /// The sender's sequence number of the segment in which text was replaced last.
    place: u32,
    before: i32,
    after: i32,
}

impl Shift {
    /// Records that the segment with the sequence number `sequence` grew by `growth` bytes.
    pub(crate) fn replaced(&mut self, sequence: u32, growth: i32) {
        // The segment repeats text that was already replaced.
        let again = self.before != self.after && !is_after(sequence, self.place);
        if growth == 0 || again {
            return;
        }
        self.place = sequence;
        self.before = self.after;
        self.after = self.after.wrapping_add(growth);
    }

    pub(crate) const fn is_none(self) -> bool {
        self.before == 0 && self.after == 0
    }

    /// Converts a sequence number of the sender to the receiver's numbering.
    pub const fn sequence(self, sent: u32) -> u32 {
        sent.wrapping_add_signed(self.offset(sent))
    }

    /// Converts an acknowledgement number of the receiver to the sender's numbering.
    pub const fn acknowledgement(self, seen: u32) -> u32 {
        let sent = seen.wrapping_sub(self.before.cast_unsigned());
        seen.wrapping_sub(self.offset(sent).cast_unsigned())
    }

    /// Number of bytes by which this sequence number of the sender is shifted.
    pub(crate) const fn offset(self, sequence: u32) -> i32 {
        if is_after(sequence, self.place) {
            self.after
        } else {
            self.before
        }
    }
}

/// Whether sequence number `a` is after `b`, modulo 2^32.
pub(crate) const fn is_after(a: u32, b: u32) -> bool {
    b.wrapping_sub(a).cast_signed() < 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    proptest! {
        /// Some segments of a stream are replaced: the receiver gets the bytes without gap or
        /// overlap, and its acknowledgements mean the same bytes for the sender.
        #[test]
        fn streams_with_shifted_sequence_numbers_stay_complete(first: u32, segments in proptest::collection::vec((1u32..100, any::<bool>(), 1u32..100), 1..50)) {
            let mut shift = Shift::default();
            let (mut sent, mut seen) = (first, first);
            let mut edges = Vec::new();
            for (len, replaced, new_len) in segments {
                let new_len = if replaced { new_len } else { len };
                let before = shift;
                shift.replaced(sent, new_len.cast_signed() - len.cast_signed());
                prop_assert_eq!(shift.sequence(sent), seen);
                edges.push((sent, seen, before));
                sent = sent.wrapping_add(len);
                seen = seen.wrapping_add(new_len);
                prop_assert_eq!(shift.sequence(sent), seen);
                prop_assert_eq!(shift.acknowledgement(seen), sent);
                // A repetition changes nothing.
                let mut again = shift;
                again.replaced(edges[edges.len() - 1].0, new_len.cast_signed() - len.cast_signed());
                if shift.before != shift.after {
                    prop_assert_eq!(again, shift);
                }
            }
        }
    }

    #[test]
    fn shifted_sequence_numbers_wrap_at_32_bits() {
        let mut shift = Shift::default();
        shift.replaced(u32::MAX - 5, -3);
        assert_eq!(shift.sequence(u32::MAX - 5), u32::MAX - 5);
        assert_eq!(shift.sequence(4), 1);
        assert_eq!(shift.acknowledgement(1), 4);
        assert!(is_after(3, u32::MAX) && !is_after(u32::MAX, 3) && !is_after(3, 3));
    }
}

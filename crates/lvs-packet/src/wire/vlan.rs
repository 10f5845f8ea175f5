//! VLAN tags in Ethernet frames (IEEE 802.1Q section 9), service tags of provider bridges (802.1ad)
//! included.
//!
//! ```text
//!  0           6           12     14     16
//!  │ receiver  │ sender    │ 8100 │ tag  │ EtherType │ ...      tag: priority (3 bits), drop eligible, VLAN (12 bits)
//! ```

use super::{be16, put16};
use crate::frame::Frame;

/// EtherType of a tag.
pub const TAG: u16 = 0x8100;
/// EtherType of a service tag.
pub const SERVICE_TAG: u16 = 0x88a8;
/// Length in bytes of a tag.
pub const TAG_LEN: usize = 4;
/// The bits of a tag that contain the VLAN number.
const VLAN: u16 = 0x0fff;
/// Length in bytes of the two addresses in front of a tag.
const ADDRESSES_LEN: usize = 12;

/// The VLAN number in the outermost tag of an Ethernet frame; 0 in a priority tag. `None` if the
/// frame has no tag.
#[inline]
pub fn outermost(frame: &[u8]) -> Option<u16> {
    match frame.get(12..16).map(|tag| be16(tag, 0))? {
        TAG | SERVICE_TAG => Some(be16(frame, 14) & VLAN),
        _ => None,
    }
}

/// Inserts a tag with these 16 bits behind the addresses of the frame. Returns `false`, without a
/// change, if the frame is too short. A frame with too little headroom is replaced by a copy.
#[must_use]
pub fn insert(frame: &mut Frame, ethertype: u16, bits: u16) -> bool {
    if frame.len() < ADDRESSES_LEN {
        return false;
    }
    if frame.headroom() < TAG_LEN {
        *frame = frame.clone();
    }
    if frame.push_front(TAG_LEN).is_none() {
        return false;
    }
    if let Some(segments) = &mut frame.offload.segments
        && segments.header_len != 0
    {
        segments.header_len = segments.header_len.saturating_add(4);
    }
    let bytes = frame.bytes_mut();
    bytes.copy_within(TAG_LEN..TAG_LEN + ADDRESSES_LEN, 0);
    put16(bytes, ADDRESSES_LEN, ethertype);
    put16(bytes, ADDRESSES_LEN + 2, bits);
    true
}

/// Removes the outermost tag. The caller must have checked that there is one.
pub fn remove(frame: &mut Frame) {
    frame.bytes_mut().copy_within(..ADDRESSES_LEN, TAG_LEN);
    if frame.pull_front(TAG_LEN)
        && let Some(segments) = &mut frame.offload.segments
    {
        segments.header_len = segments.header_len.saturating_sub(4);
    }
}

/// Result of [`take_priority_tag`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// No tag.
    None,
    /// There was a priority tag (VLAN 0), and it was removed.
    Taken,
    /// The frame belongs to a VLAN, with or without an outer priority tag.
    Vlan,
    /// There is a priority tag inside another one. The kernel removes any number of them, but no
    /// sender needs this. The shield (`host/shield` of the dataplane) drops such frames, because it
    /// can read only one tag.
    Nested,
}

/// Removes a priority tag (VLAN 0) from the frame, as a host without VLANs does.
#[inline]
pub fn take_priority_tag(frame: &mut Frame) -> Priority {
    match outermost(frame.bytes()) {
        None => Priority::None,
        Some(0) => {
            remove(frame);
            match outermost(frame.bytes()) {
                None => Priority::Taken,
                Some(0) => Priority::Nested,
                Some(_) => Priority::Vlan,
            }
        }
        Some(_) => Priority::Vlan,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Offload, PartialChecksum, SegmentKind, Segments};

    fn frame() -> Frame {
        let mut frame = Frame::from_bytes(b"DDDDDDSSSSSS\x08\x00payload");
        frame.offload = Offload {
            checksum: Some(PartialChecksum {
                start: 34,
                offset: 16,
            }),
            segments: Some(Segments {
                kind: SegmentKind::Tcp4,
                size: 1448,
                header_len: 66,
                ecn: false,
            }),
            verified: false,
        };
        frame
    }

    #[test]
    fn vlan_tag_insertion_and_removal_move_offsets() {
        let mut tagged = frame();
        assert!(insert(&mut tagged, SERVICE_TAG, 0x2064));
        assert_eq!(
            tagged.bytes(),
            b"DDDDDDSSSSSS\x88\xa8\x20\x64\x08\x00payload"
        );
        assert_eq!(outermost(tagged.bytes()), Some(100));
        assert_eq!(tagged.offload.checksum.map(|c| c.start), Some(38));
        assert_eq!(tagged.offload.segments.map(|s| s.header_len), Some(70));
        remove(&mut tagged);
        assert_eq!(
            (tagged.bytes(), tagged.offload),
            (frame().bytes(), frame().offload)
        );
    }

    #[test]
    fn priority_tag_is_not_a_vlan() {
        let mut priority = frame();
        assert!(insert(&mut priority, TAG, 0xa000));
        assert_eq!(take_priority_tag(&mut priority), Priority::Taken);
        assert_eq!(priority.bytes(), frame().bytes());
        let mut vlan = frame();
        assert!(insert(&mut vlan, TAG, 0xa001));
        assert_eq!(take_priority_tag(&mut vlan), Priority::Vlan);
        // A VLAN tag inside a priority tag is also a VLAN tag.
        assert!(insert(&mut vlan, TAG, 0));
        assert_eq!(take_priority_tag(&mut vlan), Priority::Vlan);
        for (outer, inner) in [(TAG, TAG), (TAG, SERVICE_TAG), (SERVICE_TAG, TAG)] {
            let mut nested = frame();
            assert!(insert(&mut nested, inner, 0) && insert(&mut nested, outer, 0xe000));
            assert_eq!(
                take_priority_tag(&mut nested),
                Priority::Nested,
                "{outer:#x} {inner:#x}"
            );
        }
        assert_eq!(take_priority_tag(&mut frame()), Priority::None);
    }

    #[test]
    fn truncated_frame_gets_no_vlan_tag() {
        let mut runt = Frame::from_bytes(b"short");
        assert!(!insert(&mut runt, TAG, 1));
        assert_eq!(runt.bytes(), b"short");
        assert_eq!(outermost(b"DDDDDDSSSSSS\x81\x00\x20"), None);
    }
}

//! A frame in a buffer with headroom, its partial checksum, and its segments if it is a
//! super-packet.

use std::fmt;
use std::mem;
use std::ops::{Deref, DerefMut, Range};

pub use lvs_sys::{Arena, Lent};

/// Number of bytes that are reserved before a received frame: enough for an outer IPv6, UDP and GUE
/// header, or a VLAN tag.
pub const HEADROOM: usize = 128;

/// Maximum length of a frame in bytes: 64 KiB of IP and an Ethernet header with two VLAN tags.
pub const MAX_FRAME: usize = 65_535 + 14 + 8;

/// Work that a device, or the sender on a virtual link, has left to the receiver (the fields of
/// `virtio_net_hdr`, offsets relative to the first byte of the frame).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// The transport checksum field contains only the sum of the pseudo-header (not complemented);
    /// the sum from `start` to the end of the frame is to be stored at `start + offset`
    /// (`VIRTIO_NET_HDR_F_NEEDS_CSUM`).
    pub checksum: Option<PartialChecksum>,
    /// The frame is a super-packet that must be cut into segments before a link sends it.
    pub segments: Option<Segments>,
    /// Whether the device has verified the checksum (`VIRTIO_NET_HDR_F_DATA_VALID`).
    pub verified: bool,
}

impl Offload {
    /// The transport checksum needs no check: it was verified, or will be finished later.
    pub const fn is_checked(&self) -> bool {
        self.checksum.is_some() || self.verified
    }
}

/// Position of a partial checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialChecksum {
    /// Offset in the frame of the first byte that the checksum covers.
    pub start: u16,
    /// Offset of the checksum field from `start`.
    pub offset: u16,
}

/// The division of a GSO/GRO super-packet into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    /// TCP over IPv4 or IPv6, or UDP.
    pub kind: SegmentKind,
    /// Number of payload bytes of each segment but the last.
    pub size: u16,
    /// Length of all headers in bytes, according to the sender; 0 if unknown.
    pub header_len: u16,
    /// Whether only the first segment carries CWR (`VIRTIO_NET_HDR_GSO_ECN`).
    pub ecn: bool,
}

/// The kind of a super-packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentKind {
    /// A TCP super-packet over IPv4.
    Tcp4,
    /// A TCP super-packet over IPv6.
    Tcp6,
    /// UDP datagrams of equal size (UDP GSO).
    Udp,
    /// A UDP datagram that the receiver must fragment (UFO).
    UdpFragments,
}

enum Storage {
    /// Memory on the heap.
    Owned(Box<[u8]>),
    /// In a buffer of a backend, which the backend gets back when the frame is dropped or sent.
    Lent(Lent),
}

impl Deref for Storage {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Lent(bytes) => bytes,
        }
    }
}

impl DerefMut for Storage {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Lent(bytes) => bytes,
        }
    }
}

/// A frame: Ethernet on an interface, an IP packet on a TUN device. Its bytes are in its own buffer
/// or in a buffer of a backend, and are changed in place.
///
/// ```text
///  0          start                    end        capacity
///  ├─ headroom ─┼───────── frame ────────┼─ tailroom ─┤
/// ```
pub struct Frame {
    buf: Storage,
    start: usize,
    end: usize,
    /// The frame's partial checksum and its segments.
    pub offload: Offload,
}

impl Frame {
    /// An empty frame with room for the longest frame.
    pub fn new() -> Self {
        Self::with_capacity(MAX_FRAME)
    }

    /// An empty frame with room for `len` bytes after the headroom.
    pub fn with_capacity(len: usize) -> Self {
        Self {
            buf: Storage::Owned(vec![0; HEADROOM + len].into_boxed_slice()),
            start: HEADROOM,
            end: HEADROOM,
            offload: Offload::default(),
        }
    }

    /// A frame without a buffer, which takes the place of a frame that was moved out.
    pub fn vacant() -> Self {
        Self {
            buf: Storage::Owned(Box::default()),
            start: 0,
            end: 0,
            offload: Offload::default(),
        }
    }

    /// A frame with a copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut frame = Self::with_capacity(bytes.len());
        frame.buf[HEADROOM..].copy_from_slice(bytes);
        frame.end = frame.buf.len();
        frame
    }

    /// The frame at `place` in a buffer of a backend.
    ///
    /// # Panics
    /// If `place` is not within the buffer `slot`.
    pub fn lent(slot: Lent, place: Range<usize>, offload: Offload) -> Self {
        assert!(
            place.start <= place.end && place.end <= slot.len(),
            "a frame is within its slot"
        );
        Self {
            buf: Storage::Lent(slot),
            start: place.start,
            end: place.end,
            offload,
        }
    }

    /// The backend's buffer that contains the frame; `None` if the frame has its own memory.
    /// [`Self::place`] is the frame's position in this buffer.
    #[inline]
    pub const fn slot(&self) -> Option<&Lent> {
        match &self.buf {
            Storage::Lent(slot) => Some(slot),
            Storage::Owned(_) => None,
        }
    }

    /// Position of the frame in its buffer.
    pub const fn place(&self) -> Range<usize> {
        self.start..self.end
    }

    /// Returns the frame, and leaves a [vacant](Self::vacant) one in its place.
    #[inline]
    #[must_use]
    pub fn take(&mut self) -> Self {
        mem::replace(self, Self::vacant())
    }

    /// Number of bytes that fit after the standard headroom, once the frame is cleared; 0 if the
    /// frame uses a backend's buffer.
    #[inline]
    pub fn capacity(&self) -> usize {
        match &self.buf {
            Storage::Owned(bytes) => bytes.len().saturating_sub(HEADROOM),
            Storage::Lent(_) => 0,
        }
    }

    /// The bytes of the frame, without headroom.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    /// Returns the frame's bytes, for changes in place.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buf[self.start..self.end]
    }

    /// Length of the frame in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether the frame has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Number of bytes by which the frame can grow at its front ([`Self::push_front`]).
    #[inline]
    pub fn headroom(&self) -> usize {
        self.start
    }

    /// Number of bytes by which the frame can grow at its end.
    #[inline]
    pub fn tailroom(&self) -> usize {
        self.buf.len() - self.end
    }

    /// Adds `n` bytes with undefined content at the front, and returns them. Returns `None`,
    /// without a change, if there is too little headroom. Offsets in `offload` are adjusted.
    #[inline]
    #[must_use]
    pub fn push_front(&mut self, n: usize) -> Option<&mut [u8]> {
        self.start = self.start.checked_sub(n)?;
        if let Some(csum) = &mut self.offload.checksum {
            csum.start = csum
                .start
                .saturating_add(u16::try_from(n).unwrap_or(u16::MAX));
        }
        Some(&mut self.buf[self.start..self.start + n])
    }

    /// Copies `header` into the headroom, and returns the header and the frame together. The frame
    /// itself is unchanged; the bytes in front of it have no meaning afterwards. `None` if there is
    /// too little headroom.
    #[inline]
    pub fn behind(&mut self, header: &[u8]) -> Option<&[u8]> {
        let start = self.start.checked_sub(header.len())?;
        self.buf[start..self.start].copy_from_slice(header);
        Some(&self.buf[start..self.end])
    }

    /// Removes `n` bytes from the front. Returns `false`, without a change, if the frame is
    /// shorter.
    #[inline]
    #[must_use]
    pub fn pull_front(&mut self, n: usize) -> bool {
        if n > self.len() {
            return false;
        }
        self.start += n;
        if let Some(csum) = &mut self.offload.checksum {
            csum.start = csum
                .start
                .saturating_sub(u16::try_from(n).unwrap_or(u16::MAX));
        }
        true
    }

    /// Shortens the frame to `len` bytes; a shorter frame is unchanged.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.end = self.end.min(self.start + len);
    }

    /// Appends `bytes`; `false`, without a change, if there is no room.
    #[must_use]
    pub fn extend(&mut self, bytes: &[u8]) -> bool {
        if bytes.len() > self.tailroom() {
            return false;
        }
        self.buf[self.end..self.end + bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len();
        true
    }

    /// Replaces the bytes at `place` by `text`; `false`, without a change, if `place` is not within
    /// the frame or there is too little headroom. The bytes before `place` keep their offsets, and
    /// the offsets in `offload` stay unchanged.
    #[must_use]
    pub fn replace(&mut self, place: Range<usize>, text: &[u8]) -> bool {
        let start = self.start;
        if place.start > place.end || place.end > self.len() || start + place.len() < text.len() {
            return false;
        }
        // The part in front of the change is shorter than the part behind it, so the front is
        // moved.
        self.start = start + place.len() - text.len();
        self.buf.copy_within(start..start + place.start, self.start);
        let at = self.start + place.start;
        self.buf[at..at + text.len()].copy_from_slice(text);
        true
    }

    /// Clears the content: the frame is empty and has the standard headroom, if there is room for
    /// it.
    #[inline]
    pub fn clear(&mut self) {
        self.start = HEADROOM.min(self.buf.len());
        self.end = self.start;
        self.offload = Offload::default();
    }

    /// A buffer into which the caller receives a packet before it calls [`Self::filled`]. If the
    /// frame is too small for the longest packet, it gets a larger buffer.
    pub fn receive_buffer(&mut self) -> &mut [u8] {
        if self.capacity() < MAX_FRAME {
            *self = Self::new();
        }
        self.clear();
        &mut self.buf[HEADROOM..]
    }

    /// Sets the frame to the first `len` bytes of [`Self::receive_buffer`].
    ///
    /// # Panics
    /// If `len` is longer than that buffer.
    pub fn filled(&mut self, len: usize, offload: Offload) {
        assert!(
            HEADROOM + len <= self.buf.len(),
            "a receive call cannot fill more than its buffer"
        );
        self.start = HEADROOM;
        self.end = HEADROOM + len;
        self.offload = offload;
    }
}

impl Default for Frame {
    /// As [`Frame::new`].
    fn default() -> Self {
        Self::new()
    }
}

impl Clone for Frame {
    /// The copy has its own memory, with standard headroom, and room for the bytes of the original.
    fn clone(&self) -> Self {
        let mut copy = Self::from_bytes(self.bytes());
        copy.offload = self.offload;
        copy
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("len", &self.len())
            .field("offload", &self.offload)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borrowed_frame_is_changed_in_place_and_returns_its_slot() {
        let arena = Arena::new(1, 256).expect("the memory can be mapped");
        let mut slot = arena.lend(0).expect("the slot is free");
        slot[64..68].copy_from_slice(b"data");
        let mut frame = Frame::lent(slot, 64..68, Offload::default());
        frame
            .push_front(4)
            .expect("the frame has headroom")
            .copy_from_slice(b"link");
        assert!(frame.extend(b"tail"));
        assert!(frame.push_front(61).is_none());
        assert_eq!(
            (frame.bytes(), frame.place()),
            (&b"linkdatatail"[..], 60..72)
        );
        assert_eq!((frame.headroom(), frame.tailroom()), (60, 184));
        assert_eq!(frame.behind(b"head"), Some(&b"headlinkdatatail"[..]));
        assert_eq!(frame.behind(&[0; 61]), None);
        assert_eq!(frame.place(), 60..72);
        let copy = frame.clone();
        assert!(copy.slot().is_none() && frame.slot().is_some_and(|slot| slot.is_of(&arena)));
        drop(frame.take());
        assert_eq!((frame.len(), arena.lent()), (0, 0));
        assert_eq!(
            &arena.lend(0).expect("the slot was returned")[60..72],
            copy.bytes()
        );
    }

    #[test]
    fn frame_without_buffer_gets_a_buffer_before_receiving() {
        let mut frame = Frame::vacant();
        assert!(frame.push_front(1).is_none() && !frame.extend(b"x"));
        assert_eq!(frame.receive_buffer().len(), MAX_FRAME);
        frame.filled(3, Offload::default());
        assert_eq!(frame.len(), 3);
    }
}

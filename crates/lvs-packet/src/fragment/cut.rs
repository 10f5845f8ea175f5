//! Cuts a datagram into fragments, one at a time.

use crate::drop::FrameDrop;
use crate::frame::{Frame, Offload};
use crate::wire::{be16, ipv4, ipv6, put16, put32};

/// The fragments of a datagram, in order. Each is built when the caller requests it.
#[derive(Clone, Debug)]
pub struct Cutter<'a> {
    headers: &'a [u8],
    data: &'a [u8],
    /// Payload sizes of the fragments in bytes; `None` if each fragment is as long as possible.
    sizes: Option<std::slice::Iter<'a, usize>>,
    room: usize,
    at: usize,
    /// Whether all fragments were returned. An IPv6 datagram without payload still has one
    /// fragment.
    done: bool,
    version: Version,
}

#[derive(Clone, Copy, Debug)]
enum Version {
    V4 {
        /// Offset of the datagram's payload in bytes, if the datagram is itself a fragment.
        first: usize,
        /// Whether the datagram is itself a fragment, and not the last one.
        more: bool,
        df: bool,
    },
    V6 {
        id: u32,
        /// Position of the field that names the header after the unfragmentable headers.
        named_at: usize,
        /// The protocol number in this field.
        next: u8,
    },
}

/// A fragment, whose bytes [`write`](Self::write) produces.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    headers: &'a [u8],
    data: &'a [u8],
    /// Offset of `data` in the payload of the datagram that is cut.
    at: usize,
    more: bool,
    version: Version,
}

impl<'a> Cutter<'a> {
    /// Cuts the IPv4 packet `ip` into fragments of at most `mtu` bytes. If fragments with the
    /// payload sizes `sizes` fit, they get these sizes; otherwise each but the last is as long as
    /// possible. The fragments get the flag "don't fragment" if `df` is set. The packet's checksums
    /// must be complete. A packet without payload has no fragments.
    ///
    /// # Errors
    /// [`FrameDrop::MtuTooSmall`] if `mtu` leaves less than 8 bytes for the payload of a fragment,
    /// or the packet is shorter than its header.
    pub fn v4(
        ip: &'a [u8],
        mtu: usize,
        sizes: Option<&'a [usize]>,
        df: bool,
    ) -> Result<Self, FrameDrop> {
        let room = mtu.saturating_sub(ipv4::header_len(ip));
        let (headers, data) = split(ip, ipv4::header_len(ip), room)?;
        let flags = be16(ip, ipv4::field::FLAGS);
        Ok(Self {
            headers,
            data,
            sizes: kept(sizes, data.len(), room),
            room,
            at: 0,
            done: data.is_empty(),
            version: Version::V4 {
                first: usize::from(flags & ipv4::OFFSET) * 8,
                more: flags & ipv4::MF != 0,
                df,
            },
        })
    }

    /// Cuts the IPv6 packet `ip` into fragments of at most `mtu` bytes, all with the identification
    /// `id`. If fragments with the payload sizes `sizes` fit, they get these sizes; otherwise each
    /// but the last is as long as possible. The payload begins after the unfragmentable headers.
    /// The packet's checksums must be complete.
    ///
    /// # Errors
    /// [`FrameDrop::MtuTooSmall`] if `mtu` leaves less than 8 bytes for the payload of a fragment,
    /// or the packet is shorter than its headers; [`FrameDrop::BadFragment`] if the payload is
    /// longer than 64 KiB.
    pub fn v6(
        ip: &'a [u8],
        mtu: usize,
        sizes: Option<&'a [usize]>,
        id: u32,
    ) -> Result<Self, FrameDrop> {
        let (header_len, named_at) = ipv6::unfragmentable(ip);
        let room = mtu.saturating_sub(header_len + ipv6::FRAGMENT_LEN);
        let (headers, data) = split(ip, header_len, room)?;
        if data.len() > usize::from(u16::MAX) {
            return Err(FrameDrop::BadFragment);
        }
        Ok(Self {
            headers,
            data,
            sizes: kept(sizes, data.len(), room)
                .filter(|sizes| sizes.as_slice().iter().all(|&size| size > 0)),
            room,
            at: 0,
            done: false,
            version: Version::V6 {
                id,
                named_at,
                next: ip.get(named_at).copied().unwrap_or(0),
            },
        })
    }

    /// All fragments, each in a frame of the fragment's size.
    pub fn frames(self) -> impl Iterator<Item = Frame> + use<'a> {
        self.map(|piece| {
            let mut frame = Frame::with_capacity(piece.len());
            let fits = piece.write(&mut frame);
            debug_assert!(fits, "the frame has room for the fragment");
            frame
        })
    }
}

/// Divides a packet into headers and payload. Fails if `room`, the longest payload of a fragment,
/// is less than 8 bytes, or if the packet is shorter than its headers.
fn split(ip: &[u8], headers: usize, room: usize) -> Result<(&[u8], &[u8]), FrameDrop> {
    if room < 8 {
        return Err(FrameDrop::MtuTooSmall);
    }
    ip.split_at_checked(headers).ok_or(FrameDrop::MtuTooSmall)
}

/// Returns `sizes`, if fragments of these sizes fit into `room` bytes, together contain exactly
/// `len` bytes, and all but the last have a multiple of 8 bytes.
fn kept(sizes: Option<&[usize]>, len: usize, room: usize) -> Option<std::slice::Iter<'_, usize>> {
    let sizes = sizes?;
    let fit = sizes.iter().sum::<usize>() == len
        && sizes.iter().all(|&size| size <= room)
        && sizes.iter().rev().skip(1).all(|size| size % 8 == 0);
    fit.then(|| sizes.iter())
}

impl<'a> Iterator for Cutter<'a> {
    type Item = Piece<'a>;

    fn next(&mut self) -> Option<Piece<'a>> {
        if self.done {
            return None;
        }
        let left = self.data.len() - self.at;
        let size = match &mut self.sizes {
            Some(sizes) => sizes.find(|&&size| size > 0).map_or(left, |size| *size),
            // A remainder that fits is one fragment, even if its length is not a multiple of 8.
            None if left <= self.room => left,
            None => self.room & !7,
        };
        let end = self.at + size.min(left);
        let piece = Piece {
            headers: self.headers,
            data: &self.data[self.at..end],
            at: self.at,
            more: end < self.data.len(),
            version: self.version,
        };
        self.at = end;
        self.done = !piece.more;
        Some(piece)
    }
}

impl Piece<'_> {
    /// Length of the fragment in bytes, headers included.
    pub const fn len(&self) -> usize {
        let extra = match self.version {
            Version::V4 { .. } => 0,
            Version::V6 { .. } => ipv6::FRAGMENT_LEN,
        };
        self.headers.len() + extra + self.data.len()
    }

    /// Whether the fragment has no payload.
    pub const fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Replaces the content of `out` by the fragment with its complete headers; `false` if there is
    /// no room.
    #[must_use]
    pub fn write(&self, out: &mut Frame) -> bool {
        out.clear();
        let fits = match self.version {
            Version::V4 { first, more, df } => self.write4(out, first, more, df),
            Version::V6 { id, named_at, next } => self.write6(out, id, named_at, next),
        };
        out.offload = Offload::default();
        fits
    }

    fn write4(&self, out: &mut Frame, first: usize, more: bool, df: bool) -> bool {
        if !out.extend(self.headers) || !out.extend(self.data) {
            return false;
        }
        let len = u16::try_from(self.len()).unwrap_or(u16::MAX);
        let offset = u16::try_from((first + self.at) / 8).unwrap_or(ipv4::OFFSET) & ipv4::OFFSET;
        let flags = if self.more || more { ipv4::MF } else { 0 } | if df { ipv4::DF } else { 0 };
        let ip = out.bytes_mut();
        ipv4::set_total_len(ip, len);
        put16(ip, ipv4::field::FLAGS, offset | flags);
        if self.at > 0 {
            blank_options(&mut ip[ipv4::HEADER_LEN..self.headers.len()]);
        }
        ipv4::finish_header(ip);
        true
    }

    fn write6(&self, out: &mut Frame, id: u32, named_at: usize, next: u8) -> bool {
        let offset = u16::try_from(self.at).unwrap_or(u16::MAX) & ipv6::OFFSET;
        let mut header = [0; ipv6::FRAGMENT_LEN];
        header[ipv6::fragment_field::NEXT_HEADER] = next;
        put16(
            &mut header,
            ipv6::fragment_field::OFFSET,
            offset | u16::from(self.more),
        );
        put32(&mut header, ipv6::fragment_field::ID, id);
        if !out.extend(self.headers) || !out.extend(&header) || !out.extend(self.data) {
            return false;
        }
        let ip = out.bytes_mut();
        ip[named_at] = ipv6::FRAGMENT;
        ipv6::finish_len(ip);
        true
    }
}

/// Replaces all options by padding, except those whose "copied" bit is set, as in all fragments
/// after the first (`ip_options_fragment`).
fn blank_options(options: &mut [u8]) {
    const END: u8 = 0;
    const NOP: u8 = 1;
    let mut at = 0;
    while at < options.len() {
        match options[at] {
            END => return,
            NOP => at += 1,
            kind => {
                let len = usize::from(options.get(at + 1).copied().unwrap_or(0));
                if len < 2 || at + len > options.len() {
                    return;
                }
                if kind & 0x80 == 0 {
                    options[at..at + len].fill(NOP);
                }
                at += len;
            }
        }
    }
}

//! Changes that a helper makes to a TCP segment: its sequence numbers and its text.

use core::ops::Range;

use super::Shift;

/// Changes to a segment from a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Edit {
    /// The change of the sequence numbers.
    pub shift: Shift,
    /// The replacement of a part of the segment's text; `None` if the text stays unchanged.
    pub replacement: Option<Replacement>,
}

/// A part of a TCP segment's text, and the text that replaces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replacement {
    start: u16,
    end: u16,
    len: u8,
    text: [u8; TEXT_MAX],
}

/// Length in bytes of the longest text: `255,255,255,255,255,255`.
const TEXT_MAX: usize = 23;

impl Replacement {
    /// A replacement that removes these bytes; `None` if they are beyond the maximum length of a
    /// segment. [`push`](Self::push) adds text.
    pub(crate) fn of(place: &Range<usize>) -> Option<Self> {
        Some(Self {
            start: u16::try_from(place.start).ok()?,
            end: u16::try_from(place.end).ok()?,
            len: 0,
            text: [0; TEXT_MAX],
        })
    }

    /// The replaced bytes of the payload.
    pub fn place(&self) -> Range<usize> {
        self.start.into()..self.end.into()
    }

    /// The text that replaces the part.
    pub fn text(&self) -> &[u8] {
        &self.text[..usize::from(self.len)]
    }

    /// Number of bytes by which the payload grows; negative if it shrinks.
    pub fn growth(&self) -> i32 {
        i32::from(self.len) + i32::from(self.start) - i32::from(self.end)
    }

    /// The same replacement, moved by this number of bytes; `None` if it is then beyond the maximum
    /// length of a segment.
    pub(crate) fn moved(mut self, by: usize) -> Option<Self> {
        let by = u16::try_from(by).ok()?;
        self.start = self.start.checked_add(by)?;
        self.end = self.end.checked_add(by)?;
        Some(self)
    }

    pub(crate) fn push(&mut self, byte: u8) {
        self.text[usize::from(self.len)] = byte;
        self.len += 1;
    }

    pub(crate) fn push_number(&mut self, number: u16) {
        let mut unit = 10_000;
        while unit > 0 {
            if number >= unit || unit == 1 {
                let digit = number / unit % 10;
                self.push(b'0' + u8::try_from(digit).unwrap_or(0));
            }
            unit /= 10;
        }
    }
}

//! What comes in at a time, whoever owns the memory.

use std::io;

use super::{BATCH, PacketIo};
use lvs_packet::frame::Frame;

/// What one call of [`Port::recv`](super::port::Port::recv) has received, and room for what the next one will.
///
/// Some backends copy into frames that they are given; others own the memory that frames arrive in
/// (a ring, a umem), and lend it: such a frame goes back to its backend when it is dropped. The
/// packet path changes either where it is.
#[derive(Debug)]
pub struct Batch {
    /// Frames of full size, to receive into.
    room: Vec<Frame>,
    /// Frames of the backend's own.
    lent: Vec<Frame>,
    /// How much of `room` was received into.
    filled: usize,
}

impl Batch {
    /// Nothing received, and room for [`BATCH`] frames of each of two queues.
    pub fn new() -> Self {
        Self {
            room: (0..2 * BATCH).map(|_| Frame::new()).collect(),
            lent: Vec::with_capacity(BATCH),
            filled: 0,
        }
    }

    /// What was received, in order.
    pub fn frames(&mut self) -> &mut [Frame] {
        if self.lent.is_empty() {
            &mut self.room[..self.filled]
        } else {
            &mut self.lent
        }
    }

    /// Keeps the first of them.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.lent.truncate(len);
        self.filled = self.filled.min(len);
    }

    /// Takes frames of a backend's own, or of another worker's.
    pub(crate) fn lend(&mut self, frames: impl IntoIterator<Item = Frame>) -> usize {
        self.clear();
        self.lent.extend(frames.into_iter().take(BATCH));
        self.lent.len()
    }

    /// Has a backend receive into the room that there is.
    pub(super) fn fill(&mut self, io: &mut impl PacketIo) -> io::Result<usize> {
        self.clear();
        self.filled = io.recv(&mut self.room)?;
        Ok(self.filled)
    }

    /// Gives lent frames back. What the packet path has taken on comes back when it is sent.
    pub fn clear(&mut self) {
        self.lent.clear();
        self.filled = 0;
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

//! A batch of received frames, independent of the owner of their memory.

use std::io;

use super::{BATCH, PacketIo};
use lvs_packet::frame::Frame;

/// The frames that one call of [`Port::recv`](super::port::Port::recv) has received, and the
/// buffers for the next call.
///
/// Some backends copy into the caller's frames. Other backends own the memory in which frames
/// arrive (a ring, a umem) and lend it: dropping such a frame returns it to its backend. The packet
/// path modifies both kinds in place.
#[derive(Debug)]
pub struct Batch {
    /// Buffers of full size that backends copy into.
    room: Vec<Frame>,
    /// Frames in the memory of a backend.
    lent: Vec<Frame>,
    /// The number of frames in `room` that contain received data.
    filled: usize,
}

impl Batch {
    /// Creates an empty batch with room for [`BATCH`] frames of each of two queues.
    pub fn new() -> Self {
        Self {
            room: (0..2 * BATCH).map(|_| Frame::new()).collect(),
            lent: Vec::with_capacity(BATCH),
            filled: 0,
        }
    }

    /// The received frames, in order.
    pub fn frames(&mut self) -> &mut [Frame] {
        if self.lent.is_empty() {
            &mut self.room[..self.filled]
        } else {
            &mut self.lent
        }
    }

    /// Keeps the first `len` frames, and removes the others.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.lent.truncate(len);
        self.filled = self.filled.min(len);
    }

    /// Replaces the content by up to [`BATCH`] frames in the memory of a backend, or from another
    /// worker. Returns their number.
    pub(crate) fn lend(&mut self, frames: impl IntoIterator<Item = Frame>) -> usize {
        self.clear();
        self.lent.extend(frames.into_iter().take(BATCH));
        self.lent.len()
    }

    /// Receives from a backend into the buffers. Returns the number of received frames.
    pub(super) fn fill(&mut self, io: &mut impl PacketIo) -> io::Result<usize> {
        self.clear();
        self.filled = io.recv(&mut self.room)?;
        Ok(self.filled)
    }

    /// Empties the batch. Frames in the memory of a backend are returned to it, those of a packet
    /// socket's ring at its next receive call. A frame that the packet path has stored is returned
    /// when it is sent or dropped.
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

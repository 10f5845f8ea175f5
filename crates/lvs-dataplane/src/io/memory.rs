//! Frames in memory: for tests, replay and fuzzing.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use super::batch::Batch;
use super::{BATCH, PacketIo};
use lvs_packet::frame::Frame;

/// A port whose received and sent frames are in queues.
#[derive(Debug, Default)]
pub struct MemoryIo {
    /// The frames that [`PacketIo::recv`] returns.
    pub input: VecDeque<Frame>,
    /// The frames that [`PacketIo::send`] accepted.
    pub output: Vec<Frame>,
    /// The frames that were reinjected into the host.
    pub returned: Vec<Frame>,
    /// Maximum number of frames in `output`; `None` for no limit.
    pub room: Option<usize>,
}

impl MemoryIo {
    /// An Ethernet port without limits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves up to [`BATCH`] frames from `input` to the batch without copying them. Returns their
    /// number.
    pub fn lend(&mut self, batch: &mut Batch) -> usize {
        let count = self.input.len().min(BATCH);
        batch.lend(self.input.drain(..count))
    }

    /// Records frames that are reinjected unchanged. Returns 0, because it refuses none.
    pub fn give_back(&mut self, frames: &[Frame]) -> usize {
        self.returned.extend_from_slice(frames);
        0
    }

    /// Removes and returns the sent frames.
    pub fn take(&mut self) -> Vec<Frame> {
        std::mem::take(&mut self.output)
    }
}

impl PacketIo for MemoryIo {
    fn recv(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        let mut count = 0;
        for slot in frames {
            let Some(frame) = self.input.pop_front() else {
                break;
            };
            slot.clear();
            // Tests can make a slot too small. The whole frame is then lost, as with a short
            // buffer.
            if slot.extend(frame.bytes()) {
                slot.offload = frame.offload;
                count += 1;
            }
        }
        Ok(count)
    }

    fn send(&mut self, frames: &mut [Frame]) -> usize {
        let room = self
            .room
            .map_or(frames.len(), |room| room.saturating_sub(self.output.len()));
        self.output.extend(frames.iter().take(room).cloned());
        frames.len().saturating_sub(room)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_port_keeps_offload_state_and_sends_only_as_many_frames_as_have_room() {
        let mut io = MemoryIo::new();
        let mut frame = Frame::from_bytes(b"abc");
        frame.offload.verified = true;
        io.input.extend([frame.clone(), frame]);
        let mut batch = [Frame::new(), Frame::new(), Frame::new()];
        assert_eq!(io.recv(&mut batch).expect("memory is available"), 2);
        assert_eq!(batch[1].bytes(), b"abc");
        assert!(batch[1].offload.verified);
        io.room = Some(1);
        assert_eq!(io.send(&mut batch[..2]), 1);
        assert_eq!(io.take().len(), 1);
        assert_eq!(io.recv(&mut batch).expect("memory is available"), 0);
    }
}

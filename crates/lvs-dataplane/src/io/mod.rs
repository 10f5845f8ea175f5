//! Backends: how frames come in and go out.

pub mod af_packet;
mod batch;
pub mod hop;
pub mod memory;
pub mod port;
pub mod tun;
mod vnet;

use std::io;
use std::os::fd::BorrowedFd;

use lvs_packet::frame::Frame;

/// Frames that a backend receives in one call at most.
pub const BATCH: usize = 64;

/// One attachment to a network: an interface, a TUN device, a buffer in memory.
///
/// Implementations never block in [`recv`](Self::recv) and [`send`](Self::send); the caller waits
/// on [`fd`](Self::fd).
pub trait PacketIo: Send {
    /// Receives frames into the front of `frames` and returns how many came; 0 if none is waiting.
    /// What a backend with memory of its own has lent earlier and is still in `frames` goes
    /// back to it; whoever keeps frames keeps them elsewhere, and not for long: a ring waits
    /// for each of its slots.
    ///
    /// # Errors
    /// Only what concerns the attachment as a whole: `NetworkDown` or `NotFound` when the interface
    /// is down or gone.
    fn recv(&mut self, frames: &mut [Frame]) -> io::Result<usize>;

    /// Sends `frames` in order and returns how many were refused (full queue, too long, interface
    /// down). A refused frame is lost, and the backend has counted it.
    fn send(&mut self, frames: &mut [Frame]) -> usize;

    /// What to poll for input.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// Another one to poll, where what begins TCP connections comes by a queue of its own.
    fn other_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// What it can do.
    fn capabilities(&self) -> Capabilities;
}

/// What a backend can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The backend's name: `af_packet`.
    pub name: &'static str,
    /// Frames begin with an Ethernet header.
    pub ethernet: bool,
    /// Unfinished checksums and aggregates may be sent as they are.
    pub offload: bool,
}

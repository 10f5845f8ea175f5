//! Backends, which receive and send frames.

pub mod af_packet;
mod batch;
pub mod memory;
pub mod port;
pub mod tun;
mod vnet;

use std::io;
use std::os::fd::BorrowedFd;

use lvs_packet::frame::Frame;

/// Maximum number of frames that a backend receives from one queue in one call; a TUN device may
/// receive up to twice as many.
pub const BATCH: usize = 64;

/// One attachment to a network: an interface, a TUN device, or a buffer in memory.
///
/// Implementations never block in [`recv`](Self::recv) and [`send`](Self::send); the caller waits
/// on [`fd`](Self::fd).
pub trait PacketIo: Send {
    /// Receives frames into the first items of `frames`. Returns the number of received frames; 0
    /// if none is waiting.
    ///
    /// A backend with its own memory, such as a ring, returns frames that stay in slots of this
    /// memory. The next call replaces frames that are still in `frames`, which frees their slots. A
    /// caller that keeps a frame moves it out of `frames`, and drops it soon: a ring stops at a
    /// slot that is in use.
    ///
    /// # Errors
    /// Only errors of the whole attachment: `NetworkDown` if the interface is down, `NotFound` if
    /// it was removed.
    fn recv(&mut self, frames: &mut [Frame]) -> io::Result<usize>;

    /// Sends `frames` in order. Returns the number of refused frames, for example because a queue
    /// was full. Refused frames are lost.
    fn send(&mut self, frames: &mut [Frame]) -> usize;

    /// The descriptor to poll for input; `None` for a port that receives nothing from the kernel.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// The second descriptor to poll, if SYNs have their own queue.
    fn other_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

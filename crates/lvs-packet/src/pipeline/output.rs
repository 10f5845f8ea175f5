//! The output of the pipeline: frames to send, and requests to the caller.

use std::net::IpAddr;

use super::datagram::Arrival;
use crate::fragment::History;
use crate::frame::{Frame, MAX_FRAME};
use crate::intercept::LocalClient;
use crate::mld;
use crate::net::PortId;
use crate::wire::Mac;

/// A request that the caller handles before it sends the frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Let the kernel resolve a neighbour's link-layer address, and then call
    /// [`Pipeline::neighbours_resolved`](super::Pipeline::neighbours_resolved).
    Resolve(PortId, IpAddr),
    /// Let the kernel confirm that a neighbour still answers, because a client repeats its SYN to a
    /// server behind this neighbour.
    Confirm(PortId, IpAddr),
    /// A router has sent a multicast listener query on a port.
    ListenerQuery(PortId, mld::Query),
    /// A client on this host opens a connection to a service: intercept the server's replies.
    InterceptLocalClient(LocalClient),
    /// Another host claims an address of this host, of the dataplane or of a service.
    AddressConflict {
        /// The port on which the claim arrived.
        port: PortId,
        /// The address that the other host claims.
        addr: IpAddr,
        /// The link-layer address of the other host.
        mac: Mac,
    },
}

/// A reassembled datagram for another worker.
#[derive(Debug)]
pub struct Whole {
    pub(super) frame: Frame,
    pub(super) history: History,
    pub(super) from_host: bool,
    pub(super) arrival: Option<Arrival>,
}

impl Whole {
    /// Memory of the datagram in bytes.
    pub fn size(&self) -> usize {
        self.frame.capacity()
    }
}

/// The frames to send, by port, and the requests. Execute the requests first.
#[derive(Debug, Default)]
pub struct Output {
    ports: Vec<Vec<Frame>>,
    /// Frames to reinject into the host, by the port on which they arrived.
    back: Vec<Vec<Frame>>,
    /// Requests, which the caller must execute before it sends the frames.
    pub requests: Vec<Request>,
    /// Datagrams for other workers, with the number of the worker and the port of arrival.
    pub elsewhere: Vec<(usize, PortId, Whole)>,
    large: Vec<Frame>,
    small: Vec<Frame>,
}

impl Output {
    /// An output without frames and requests.
    pub fn new() -> Self {
        Self::default()
    }

    /// Frames for `port`, in order.
    pub fn frames(&mut self, port: PortId) -> &mut [Frame] {
        self.ports
            .get_mut(port.index())
            .map_or(&mut [], Vec::as_mut_slice)
    }

    /// Ports with frames to send, and the frames.
    pub fn queues(&mut self) -> impl Iterator<Item = (PortId, &mut [Frame])> {
        (0..=u16::MAX)
            .map(PortId)
            .zip(self.ports.iter_mut())
            .filter(|(_, frames)| !frames.is_empty())
            .map(|(port, frames)| (port, frames.as_mut_slice()))
    }

    /// The frames to reinject into the host, by the port on which they arrived.
    pub fn returned(&mut self) -> impl Iterator<Item = (PortId, &mut [Frame])> {
        (0..=u16::MAX)
            .map(PortId)
            .zip(self.back.iter_mut())
            .filter(|(_, frames)| !frames.is_empty())
            .map(|(port, frames)| (port, frames.as_mut_slice()))
    }

    /// Number of frames to send or to reinject.
    #[inline]
    pub(super) fn queued(&self) -> usize {
        let both = self.ports.iter().chain(&self.back);
        both.map(Vec::len).sum()
    }

    /// Removes the frames and the requests, and keeps the buffers for reuse.
    pub fn recycle(&mut self) {
        self.requests.clear();
        self.elsewhere.clear();
        let Self {
            ports,
            back,
            large,
            small,
            ..
        } = self;
        let both = ports.iter_mut().chain(back);
        for frame in both.flat_map(|frames| frames.drain(..)) {
            keep(large, small, frame);
        }
    }

    /// Adds a request, unless this batch has it already.
    pub(super) fn request(&mut self, request: Request) {
        if !self.requests.contains(&request) {
            self.requests.push(request);
        }
    }

    /// An empty frame with room for `len` bytes, for a packet that the dataplane creates.
    pub(super) fn spare(&mut self, len: usize) -> Frame {
        if len > SMALL {
            self.large
                .pop()
                .unwrap_or_else(|| Frame::with_capacity(len))
        } else if let Some(frame) = self.small.pop() {
            frame
        } else if len > SMALL / 2 {
            Frame::with_capacity(SMALL)
        } else {
            // Many tiny frames (fragments) must not use more memory than their size.
            Frame::with_capacity(len)
        }
    }

    /// An empty frame with room for any received packet.
    #[inline]
    pub(super) fn receiver(&mut self) -> Frame {
        self.large.pop().unwrap_or_default()
    }

    #[inline]
    pub(super) fn queue(&mut self, port: PortId) -> &mut Vec<Frame> {
        queue_of(&mut self.ports, port)
    }

    /// Queues a frame that must be reinjected on `port`.
    pub(super) fn push_back(&mut self, port: PortId, frame: Frame) {
        queue_of(&mut self.back, port).push(frame);
    }

    /// Keeps the buffer of a finished frame for reuse. A buffer of a backend returns to the
    /// backend.
    pub(super) fn keep(&mut self, frame: Frame) {
        keep(&mut self.large, &mut self.small, frame);
    }

    /// Queues a frame that must be sent on `port`.
    #[inline]
    pub(super) fn push(&mut self, port: PortId, frame: Frame) {
        self.queue(port).push(frame);
    }
}

#[inline]
fn queue_of(queues: &mut Vec<Vec<Frame>>, port: PortId) -> &mut Vec<Frame> {
    let index = port.index();
    if queues.len() <= index {
        queues.resize_with(index + 1, Vec::new);
    }
    &mut queues[index]
}

/// Maximum number of empty frames of each size that are kept for reuse.
const POOL_MAX: usize = 512;
/// Usual length in bytes of a frame that the pipeline builds: a packet of 1500 bytes in a tunnel.
const SMALL: usize = 1920;

fn keep(large: &mut Vec<Frame>, small: &mut Vec<Frame>, mut frame: Frame) {
    let pool = match frame.capacity() {
        MAX_FRAME.. => large,
        SMALL.. => small,
        _ => return,
    };
    if pool.len() < POOL_MAX {
        frame.clear();
        pool.push(frame);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_frame_uses_memory_of_its_size_and_is_reused() {
        let mut out = Output::new();
        assert_eq!(out.spare(8).capacity(), 8);
        assert_eq!(out.spare(1514).capacity(), SMALL);
        assert_eq!(out.spare(9000).capacity(), 9000);
        assert_eq!(out.receiver().capacity(), MAX_FRAME);
        for capacity in [8, SMALL, 9000, MAX_FRAME] {
            out.push(PortId(3), Frame::with_capacity(capacity));
        }
        out.recycle();
        assert_eq!((out.small.len(), out.large.len()), (2, 1));
        assert!(out.spare(8).capacity() >= SMALL);
        (0..2 * POOL_MAX).for_each(|_| out.keep(Frame::with_capacity(SMALL)));
        assert_eq!(out.small.len(), POOL_MAX);
    }
}

//! What the packet path hands back: frames to send, and requests.

use std::mem;
use std::net::IpAddr;

use crate::packet::frame::{Frame, MAX_FRAME};
use crate::packet::intercept::LocalClient;
use crate::packet::mld;
use crate::packet::net::PortId;
use crate::packet::wire::Mac;

/// What the caller is to do beside sending, and before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Ask the kernel for a neighbour's link-layer address, and report it by [`Pipeline::neighbour_resolved`](super::Pipeline::neighbour_resolved).
    Resolve(PortId, IpAddr),
    /// A client has to repeat itself to whoever is behind this neighbour: have the kernel ask whether it is still there.
    Confirm(PortId, IpAddr),
    /// A router asks on a port who listens to which groups.
    ListenerQuery(PortId, mld::Query),
    /// A client on the director itself opens a connection: intercept the server's replies.
    InterceptLocalClient(LocalClient),
    /// Another host claims an address of a service.
    AddressConflict {
        /// Where it was heard.
        port: PortId,
        /// The address.
        addr: IpAddr,
        /// Who claims it.
        mac: Mac,
    },
}

/// Frames to send, by port, and requests. Apply the requests first.
#[derive(Debug, Default)]
pub struct Output {
    ports: Vec<Vec<Frame>>,
    /// To be applied before the frames are sent.
    pub requests: Vec<Request>,
    pool: Vec<Frame>,
}

impl Output {
    /// Nothing to send.
    pub fn new() -> Self {
        Self::default()
    }

    /// Frames for `port`, in order.
    pub fn frames(&mut self, port: PortId) -> &mut [Frame] {
        self.ports
            .get_mut(port.index())
            .map_or(&mut [], Vec::as_mut_slice)
    }

    /// Ports with frames to send, and these.
    pub fn queues(&mut self) -> impl Iterator<Item = (PortId, &mut [Frame])> {
        (0..=u16::MAX)
            .map(PortId)
            .zip(self.ports.iter_mut())
            .filter(|(_, frames)| !frames.is_empty())
            .map(|(port, frames)| (port, frames.as_mut_slice()))
    }

    /// Forgets what was sent and applied; the buffers are used again.
    pub fn recycle(&mut self) {
        self.requests.clear();
        let Self { ports, pool, .. } = self;
        for frame in ports.iter_mut().flat_map(|frames| frames.drain(..)) {
            keep(pool, frame);
        }
    }

    /// An empty frame of full size.
    pub(super) fn spare(&mut self) -> Frame {
        self.pool.pop().unwrap_or_default()
    }

    pub(super) fn queue(&mut self, port: PortId) -> &mut Vec<Frame> {
        let index = port.index();
        if self.ports.len() <= index {
            self.ports.resize_with(index + 1, Vec::new);
        }
        &mut self.ports[index]
    }

    /// Takes back the buffer of a frame that is done with.
    pub(super) fn keep(&mut self, frame: Frame) {
        keep(&mut self.pool, frame);
    }

    /// Takes the frame out of `slot`, which gets an empty one.
    pub(super) fn push(&mut self, port: PortId, slot: &mut Frame) {
        let spare = self.spare();
        let frame = mem::replace(slot, spare);
        self.queue(port).push(frame);
    }
}

/// Frames kept for reuse at most.
const POOL_MAX: usize = 512;

/// Only frames of full size may receive again.
fn keep(pool: &mut Vec<Frame>, mut frame: Frame) {
    frame.clear();
    if pool.len() < POOL_MAX && frame.tailroom() >= MAX_FRAME {
        pool.push(frame);
    }
}

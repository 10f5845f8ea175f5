//! The ports of one packet worker.

use std::io;

use crate::host::view::{HOP_PORT, HOST_PORT};
use crate::io::port::{Batch, Port};
use crate::packet::frame::Frame;
use crate::packet::net::PortId;

/// Ports by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    all: Vec<Option<Port>>,
    /// Frames that could not be sent.
    pub(super) refused: u64,
}

impl Ports {
    pub(super) fn attach(&mut self, port: PortId, io: Port) {
        if self.all.len() <= port.index() {
            self.all.resize_with(port.index() + 1, || None);
        }
        self.all[port.index()] = Some(io);
    }

    pub(super) fn detach(&mut self, port: PortId) -> Option<Port> {
        self.all.get_mut(port.index())?.take()
    }

    /// The ports and their numbers.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (PortId, &mut Port)> {
        let all = (0..).map(PortId).zip(&mut self.all);
        all.filter_map(|(port, io)| Some((port, io.as_mut()?)))
    }

    /// The ports and their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PortId, &Port)> {
        let all = (0..).map(PortId).zip(&self.all);
        all.filter_map(|(port, io)| Some((port, io.as_ref()?)))
    }

    fn get(&mut self, port: PortId) -> Option<&mut Port> {
        self.all.get_mut(port.index())?.as_mut()
    }

    /// Receives on a port; 0 on one that is gone.
    pub(super) fn recv(&mut self, port: PortId, batch: &mut Batch) -> io::Result<usize> {
        self.get(port).map_or(Ok(0), |io| io.recv(batch))
    }

    /// Gives frames back to the host on the port that they came in by.
    pub(super) fn give_back(&mut self, port: PortId, frames: &mut [Frame]) {
        let all = frames.len();
        let refused = self.get(port).map_or(all, |io| io.give_back(frames));
        self.refused += refused as u64;
    }

    /// Sends on a port. What goes to the host where it routes everything is given back through the device that it comes
    /// from.
    pub(super) fn send(&mut self, port: PortId, frames: &mut [Frame]) {
        let refused = if let Some(io) = self.get(port) {
            io.send(frames)
        } else if port == HOST_PORT
            && let Some(io) = self.get(HOP_PORT)
        {
            io.give_back(frames)
        } else {
            frames.len()
        };
        self.refused += refused as u64;
    }
}

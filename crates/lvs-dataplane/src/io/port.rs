//! A port with any backend, and the ports of one packet worker.

use std::io;
use std::os::fd::BorrowedFd;
use std::thread;

use super::af_packet::AfPacket;
pub use super::batch::Batch;
use super::hop::{HopDevice, HopSender};
use super::memory::MemoryIo;
use super::tun::{HostDevice, HostSender, TunError};
use super::{Capabilities, PacketIo};
use lvs_packet::frame::Frame;
use lvs_packet::net::PortId;

/// One attachment to a network. The packet path uses all backends through this type: one match for
/// each batch, and no indirect call for each frame.
#[derive(Debug)]
pub enum Port {
    /// A packet socket on an Ethernet interface.
    AfPacket(Box<AfPacket>),
    /// The device that reinjects packets into the host.
    Host(HostDevice),
    /// The device into which the host routes packets (TUN backend).
    Hop(HopDevice),
    /// Sends through the [`HostDevice`] of another worker.
    HostSender(HostSender),
    /// Sends through the [`HopDevice`] of another worker.
    HopSender(HopSender),
    /// Memory, for tests and replay.
    Memory(MemoryIo),
}

impl Port {
    /// Receives up to [`BATCH`](super::BATCH) frames of each queue and returns the number of
    /// received frames; 0 if none is waiting.
    ///
    /// # Errors
    /// As [`PacketIo::recv`].
    pub fn recv(&mut self, batch: &mut Batch) -> io::Result<usize> {
        match self {
            Self::AfPacket(io) => batch.fill(io.as_mut()),
            Self::Host(io) => batch.fill(io),
            Self::Hop(io) => batch.fill(io),
            Self::HostSender(io) => batch.fill(io),
            Self::HopSender(io) => batch.fill(io),
            Self::Memory(io) => Ok(io.lend(batch)),
        }
    }

    /// Sends `frames` in order and returns how many were refused, as [`PacketIo::send`].
    pub fn send(&mut self, frames: &mut [Frame]) -> usize {
        match self {
            Self::AfPacket(io) => io.send(frames),
            Self::Host(io) => io.send(frames),
            Self::Hop(io) => io.send(frames),
            Self::HostSender(io) => io.send(frames),
            Self::HopSender(io) => io.send(frames),
            Self::Memory(io) => io.send(frames),
        }
    }

    /// Reinjects packets unchanged; returns the number of refused ones. An Ethernet interface
    /// reinjects frames as it receives them
    /// ([`PortInfo::gives_back`](lvs_packet::net::PortInfo::gives_back)), a TUN device reinjects
    /// packets.
    pub fn give_back(&mut self, frames: &mut [Frame]) -> usize {
        match self {
            Self::AfPacket(io) => io.give_back(frames),
            Self::Hop(io) => io.give_back(frames),
            Self::HopSender(io) => io.give_back(frames),
            Self::Memory(io) => io.give_back(frames),
            Self::Host(io) => io.send(frames),
            Self::HostSender(io) => io.send(frames),
        }
    }

    /// Returns a sender for the same device, for another worker; `None` if the port is not a TUN
    /// device.
    ///
    /// # Errors
    /// If the process has no free file descriptor.
    pub fn sender(&self) -> Option<Result<Self, TunError>> {
        match self {
            Self::Host(io) => Some(io.sender().map(Self::HostSender)),
            Self::Hop(io) => Some(io.sender().map(Self::HopSender)),
            _ => None,
        }
    }

    /// The descriptor to poll for input; `None` for frames in memory.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::AfPacket(io) => io.fd(),
            Self::Host(io) => io.fd(),
            Self::Hop(io) => io.fd(),
            Self::HostSender(io) => io.fd(),
            Self::HopSender(io) => io.fd(),
            Self::Memory(io) => io.fd(),
        }
    }

    /// The second descriptor to poll for input, if the backend has two queues.
    pub fn other_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::AfPacket(io) => io.other_fd(),
            _ => None,
        }
    }

    /// The features of the backend.
    pub fn capabilities(&self) -> Capabilities {
        match self {
            Self::AfPacket(io) => io.capabilities(),
            Self::Host(io) => io.capabilities(),
            Self::Hop(io) => io.capabilities(),
            Self::HostSender(io) => io.capabilities(),
            Self::HopSender(io) => io.capabilities(),
            Self::Memory(io) => io.capabilities(),
        }
    }

    /// Maintains the backend. Call it periodically, while none of its frames is in use.
    pub fn keep(&mut self) {
        if let Self::AfPacket(io) = self {
            io.keep();
        }
    }

    /// Number of frames that were lost since the port was opened, because they arrived faster than
    /// the worker received them. This function may read the kernel's counter.
    pub fn drops(&mut self) -> u64 {
        match self {
            Self::AfPacket(io) => io.drops(),
            Self::Hop(io) => io.drops(),
            Self::Host(io) => io.drops(),
            Self::HostSender(_) | Self::HopSender(_) | Self::Memory(_) => 0,
        }
    }

    /// The interface's index; `None` for frames in memory.
    pub fn ifindex(&self) -> Option<u32> {
        match self {
            Self::AfPacket(io) => Some(io.ifindex()),
            Self::Host(io) => Some(io.ifindex()),
            Self::Hop(io) => Some(io.ifindex()),
            Self::HostSender(io) => Some(io.0.ifindex()),
            Self::HopSender(io) => Some(io.ifindex()),
            Self::Memory(_) => None,
        }
    }

    /// The device's or interface's name when it was opened.
    pub fn name(&self) -> &str {
        match self {
            Self::AfPacket(io) => io.interface(),
            Self::Host(io) => io.name(),
            Self::Hop(io) => io.name(),
            Self::HostSender(io) => io.0.name(),
            Self::HopSender(io) => io.name(),
            Self::Memory(_) => "memory",
        }
    }
}

/// The ports of one packet worker by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    all: Vec<Option<Port>>,
    /// Number of frames that could not be sent.
    pub(crate) refused: u64,
}

impl Ports {
    pub(crate) fn attach(&mut self, port: PortId, io: Port) {
        if self.all.len() <= port.index() {
            self.all.resize_with(port.index() + 1, || None);
        }
        self.all[port.index()] = Some(io);
    }

    /// Closes all ports at the same time: for each packet socket, the kernel waits several times
    /// until no processor uses it, which takes long on a busy host.
    pub(crate) fn close(self) {
        thread::scope(|scope| {
            for port in self.all.into_iter().flatten() {
                // If no thread can be started, the current thread closes the port.
                let _ = thread::Builder::new().spawn_scoped(scope, move || drop(port));
            }
        });
    }

    pub(crate) fn detach(&mut self, port: PortId) -> Option<Port> {
        self.all.get_mut(port.index())?.take()
    }

    /// The ports and their numbers.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (PortId, &mut Port)> {
        let all = (0..).map(PortId).zip(&mut self.all);
        all.filter_map(|(port, io)| Some((port, io.as_mut()?)))
    }

    /// The ports and their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PortId, &Port)> {
        let all = (0..).map(PortId).zip(&self.all);
        all.filter_map(|(port, io)| Some((port, io.as_ref()?)))
    }

    fn get(&mut self, port: PortId) -> Option<&mut Port> {
        self.all.get_mut(port.index())?.as_mut()
    }

    /// Receives on a port; 0 if the port was removed.
    pub(crate) fn recv(&mut self, port: PortId, batch: &mut Batch) -> io::Result<usize> {
        self.get(port).map_or(Ok(0), |io| io.recv(batch))
    }

    /// Reinjects frames into the host on the port that received them.
    pub(crate) fn give_back(&mut self, port: PortId, frames: &mut [Frame]) {
        let all = frames.len();
        let refused = self.get(port).map_or(all, |io| io.give_back(frames));
        self.refused += refused as u64;
    }

    /// Sends on a port. With the TUN backend, frames for the host are reinjected through the device
    /// that received them.
    pub(crate) fn send(&mut self, port: PortId, frames: &mut [Frame]) {
        let refused = if let Some(io) = self.get(port) {
            io.send(frames)
        } else if port == PortId::HOST
            && let Some(io) = self.get(PortId::HOP)
        {
            io.give_back(frames)
        } else {
            frames.len()
        };
        self.refused += refused as u64;
    }
}

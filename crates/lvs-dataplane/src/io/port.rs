//! A port with any backend, and the ports of one packet worker.

use std::io;
use std::os::fd::BorrowedFd;
use std::thread;

use super::PacketIo;
use super::af_packet::AfPacket;
pub use super::batch::Batch;
use super::memory::MemoryIo;
use super::tun::{HostDevice, TunError};
use lvs_packet::frame::Frame;
use lvs_packet::net::PortId;

/// One attachment to a network. A match selects the backend for each batch, so that no indirect
/// call is needed for each frame.
#[derive(Debug)]
pub enum Port {
    /// A packet socket on an Ethernet interface.
    AfPacket(Box<AfPacket>),
    /// A TUN device, which reinjects packets into the host or into which the host routes packets;
    /// or a sender for another worker's device.
    Tun(HostDevice),
    /// Memory, for tests and replay.
    Memory(MemoryIo),
}

impl Port {
    /// Receives waiting frames, as many as fit into the batch: of a packet socket, from its main
    /// queue and its queue for SYNs. Returns the number of received frames; 0 if none is waiting.
    ///
    /// # Errors
    /// As [`PacketIo::recv`].
    pub fn recv(&mut self, batch: &mut Batch) -> io::Result<usize> {
        match self {
            Self::AfPacket(io) => batch.fill(io.as_mut()),
            Self::Tun(io) => batch.fill(io),
            Self::Memory(io) => Ok(io.lend(batch)),
        }
    }

    /// Sends `frames` in order. Returns the number of refused frames, as [`PacketIo::send`].
    pub fn send(&mut self, frames: &mut [Frame]) -> usize {
        match self {
            Self::AfPacket(io) => io.send(frames),
            Self::Tun(io) => io.send(frames),
            Self::Memory(io) => io.send(frames),
        }
    }

    /// Reinjects frames unchanged into the host. Returns the number of refused ones. An Ethernet
    /// interface can do this only with
    /// [`PortInfo::gives_back`](lvs_packet::net::PortInfo::gives_back); a TUN device reinjects the
    /// packets in the frames.
    pub fn give_back(&mut self, frames: &mut [Frame]) -> usize {
        match self {
            Self::AfPacket(io) => io.give_back(frames),
            Self::Tun(io) => io.give_back(frames),
            Self::Memory(io) => io.give_back(frames),
        }
    }

    /// Returns a sender for the same device, for another worker; `None` if the port is not a TUN
    /// device.
    ///
    /// # Errors
    /// If the process has no free file descriptor.
    pub fn sender(&self) -> Option<Result<Self, TunError>> {
        match self {
            Self::Tun(io) => Some(io.sender().map(Self::Tun)),
            _ => None,
        }
    }

    /// The descriptor to poll for input; `None` for frames in memory, and for a TUN device to which
    /// this worker only sends.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::AfPacket(io) => io.fd(),
            Self::Tun(io) => io.fd(),
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

    /// The name of the backend.
    pub const fn backend(&self) -> &'static str {
        match self {
            Self::AfPacket(_) => "af_packet",
            Self::Tun(_) => "tun",
            Self::Memory(_) => "memory",
        }
    }

    /// Maintains the backend. Call it periodically, while none of its frames is in use.
    pub fn keep(&mut self) {
        if let Self::AfPacket(io) = self {
            io.keep();
        }
    }

    /// Number of frames that were lost since the port was opened, usually because they arrived
    /// faster than the worker received them. May read the kernel's counter.
    pub fn drops(&mut self) -> u64 {
        match self {
            Self::AfPacket(io) => io.drops(),
            Self::Tun(io) => io.drops(),
            Self::Memory(_) => 0,
        }
    }

    /// The interface's index; `None` for frames in memory.
    pub fn ifindex(&self) -> Option<u32> {
        match self {
            Self::AfPacket(io) => Some(io.ifindex()),
            Self::Tun(io) => Some(io.ifindex()),
            Self::Memory(_) => None,
        }
    }

    /// The device's or interface's name when it was opened.
    pub fn name(&self) -> &str {
        match self {
            Self::AfPacket(io) => io.interface(),
            Self::Tun(io) => io.name(),
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
                // Without a thread, the calling thread closes the port.
                let _ = thread::Builder::new().spawn_scoped(scope, move || drop(port));
            }
        });
    }

    pub(crate) fn detach(&mut self, port: PortId) -> Option<Port> {
        self.all.get_mut(port.index())?.take()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (PortId, &mut Port)> {
        let all = (0..).map(PortId).zip(&mut self.all);
        all.filter_map(|(port, io)| Some((port, io.as_mut()?)))
    }

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

    /// Sends on a port. With the TUN backend, frames for the host are reinjected through the TUN
    /// device.
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

//! The TUN backend: the host routes packets into a TUN device, and the dataplane sends them back
//! through it.
//!
//! ```text
//!  interface ─▶ routing ─▶ device ─▶ director ─▶ device ─▶ routing ─▶ interface
//!               TTL - 1      TTL + 1   TTL - 1     TTL + 1   TTL - 1
//! ```
//!
//! With this backend, the host forwards each packet twice, before and after the dataplane, and each
//! time decrements the TTL. The dataplane therefore increments the TTL of a packet that it receives
//! from the device, so that it decides about the packet as it arrived from the network, and
//! increments it again when it sends the packet. It does not increment the TTL of a reinjected
//! packet: if a rule of the host led that packet into the device again, it would loop forever.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use super::tun::{HostDevice, HostSender, QUEUE, Tun, TunError, failed, write_setting};
use super::{Capabilities, PacketIo};
use crate::netlink::Requests;
use lvs_packet::frame::Frame;
use lvs_packet::wire::{decrement_ttl, increment_ttl};
use lvs_sys::TunOptions;

/// The device through which all packets of a director pass. It is a [`HostDevice`] with forwarding
/// enabled. It accepts packets whose source is an address of the host, as in the outer headers of
/// tunnels, and may have several queues.
#[derive(Debug)]
pub struct HopDevice {
    host: HostDevice,
}

impl HopDevice {
    /// The default name of the device.
    pub const NAME: &'static str = "lvs-tun0";

    /// Creates the device, or reuses the device that another dataplane has `left`, and brings it
    /// up.
    ///
    /// # Errors
    /// See [`TunError`].
    pub fn open(name: &str, left: Option<OwnedFd>) -> Result<Self, TunError> {
        let options = TunOptions {
            multi_queue: true,
            ..TunOptions::default()
        };
        // The device may have been deleted since.
        let left = left.and_then(|left| Tun::of(name, left).ok());
        let tun = match left {
            Some(tun) => tun,
            None => Tun::create(name, options)?,
        };
        let host = HostDevice::of(tun, |name| {
            let conf = Path::new("/proc/sys/net/ipv4/conf").join(name);
            // The host has already checked the source of each packet on the interface on which it
            // arrived.
            write_setting(&conf.join("accept_local"), 1)
                .map_err(failed(name, "permit the host's own addresses as sources"))?;
            write_setting(&conf.join("forwarding"), 1).map_err(failed(name, "switch on forwarding"))
        })?;
        Requests::open()
            .and_then(|mut requests| requests.set_queue_length(host.ifindex(), QUEUE))
            .map_err(failed(name, "set the queue's length"))?;
        Ok(Self { host })
    }

    /// The device's index.
    pub fn ifindex(&self) -> u32 {
        self.host.ifindex()
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        self.host.name()
    }

    /// Reinjects packets unchanged; returns the number of refused packets.
    pub fn give_back(&mut self, frames: &mut [Frame]) -> usize {
        given_back(&mut self.host, frames)
    }

    /// Returns a sender for the device, for another worker.
    ///
    /// # Errors
    /// If the process has no free file descriptor.
    pub fn sender(&self) -> Result<HopSender, TunError> {
        Ok(HopSender(self.host.sender()?))
    }

    /// As [`HostDevice::drops`].
    pub fn drops(&self) -> u64 {
        self.host.drops()
    }

    /// Opens another queue for another worker. The kernel spreads connections over the queues.
    ///
    /// # Errors
    /// See [`TunError`].
    pub fn another_queue(&mut self) -> Result<HopQueue, TunError> {
        Ok(HopQueue(self.host.tun().another_queue()?))
    }
}

impl PacketIo for HopDevice {
    fn recv(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        received(&mut self.host, frames)
    }

    fn send(&mut self, frames: &mut [Frame]) -> usize {
        sent(&mut self.host, frames)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.host.fd()
    }

    fn capabilities(&self) -> Capabilities {
        self.host.capabilities()
    }
}

/// Sends through a [`HopDevice`]. The owner of the device receives the packets of the host.
#[derive(Debug)]
pub struct HopSender(HostSender);

impl HopSender {
    /// As [`HopDevice::give_back`].
    pub fn give_back(&mut self, frames: &mut [Frame]) -> usize {
        given_back(&mut self.0, frames)
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        self.0.0.name()
    }

    /// The device's index.
    pub fn ifindex(&self) -> u32 {
        self.0.0.ifindex()
    }
}

impl PacketIo for HopSender {
    fn recv(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        self.0.recv(frames)
    }

    fn send(&mut self, frames: &mut [Frame]) -> usize {
        sent(&mut self.0, frames)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
}

/// A further queue of a [`HopDevice`].
#[derive(Debug)]
pub struct HopQueue(Tun);

impl PacketIo for HopQueue {
    fn recv(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        received(&mut self.0, frames)
    }

    fn send(&mut self, frames: &mut [Frame]) -> usize {
        sent(&mut self.0, frames)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.fd()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
}

fn received(io: &mut impl PacketIo, frames: &mut [Frame]) -> io::Result<usize> {
    let count = io.recv(frames)?;
    for frame in &mut frames[..count] {
        increment_ttl(frame.bytes_mut());
    }
    Ok(count)
}

fn given_back(io: &mut impl PacketIo, frames: &mut [Frame]) -> usize {
    for frame in &mut *frames {
        decrement_ttl(frame.bytes_mut());
    }
    io.send(frames)
}

fn sent(io: &mut impl PacketIo, frames: &mut [Frame]) -> usize {
    for frame in &mut *frames {
        increment_ttl(frame.bytes_mut());
    }
    io.send(frames)
}

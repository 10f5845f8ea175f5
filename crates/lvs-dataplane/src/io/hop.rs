//! The director as a hop of its host's own routing: packets are routed into a TUN device and come
//! back out of it.
//!
//! ```text
//!  interface ─▶ routing ─▶ device ─▶ director ─▶ device ─▶ routing ─▶ interface
//!               TTL - 1      TTL + 1   TTL - 1     TTL + 1   TTL - 1
//! ```
//!
//! The host forwards each packet twice where a director of its own would forward it once. So what
//! comes out of the device gets back the hop that it has lost, and is decided on as it came from
//! the network; and what the director has forwarded gets it back once more before the host takes
//! it. What the director gives back as it is gets nothing: if some rule of the host led it into the
//! device again, it would go round for ever.

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use super::tun::{HostDevice, HostSender, Tun, TunError, failed, write_setting};
use super::{Capabilities, PacketIo};
use crate::netlink::Requests;
use lvs_packet::frame::Frame;
use lvs_packet::wire::{decrement_ttl, increment_ttl};
use lvs_sys::TunOptions;

/// Packets that may wait for the director; the kernel's 500 are few for a burst of small ones.
const QUEUE: u32 = 8192;

/// The device through which all packets of a director pass. It is a [`HostDevice`] that forwards,
/// takes packets from the host's own addresses (the outer headers of tunnels have them), and may
/// have several queues.
#[derive(Debug)]
pub struct HopDevice {
    host: HostDevice,
}

impl HopDevice {
    /// The usual name.
    pub const NAME: &'static str = "lvs-tun0";

    /// Creates the device, or goes on with one that another engine has `left`, and brings it up.
    ///
    /// # Errors
    /// See [`TunError`].
    pub fn open(name: &str, left: Option<OwnedFd>) -> Result<Self, TunError> {
        let options = TunOptions {
            multi_queue: true,
            ..TunOptions::default()
        };
        // Somebody may have deleted it since.
        let left = left.and_then(|left| Tun::of(name, left).ok());
        let tun = match left {
            Some(tun) => tun,
            None => Tun::create(name, options)?,
        };
        let host = HostDevice::of(tun, |name| {
            let conf = Path::new("/proc/sys/net/ipv4/conf").join(name);
            // All that came from outside has passed the host's own look at its source before.
            write_setting(&conf.join("accept_local"), 1)
                .map_err(failed(name, "accept the host's own addresses"))?;
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

    /// Gives packets back to the host as they came; returns how many were refused.
    pub fn give_back(&mut self, frames: &mut [Frame]) -> usize {
        given_back(&mut self.host, frames)
    }

    /// A way to send through the device, for another worker.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn sender(&self) -> Result<HopSender, TunError> {
        Ok(HopSender(self.host.sender()?))
    }

    /// Packets for which there was no room in the device's queues since it was created.
    pub fn drops(&self) -> u64 {
        let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
        transmit_drops(&text, self.name()).unwrap_or(0)
    }

    /// One more queue, for another worker. The kernel spreads connections over the queues.
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

/// A way to send through a [`HopDevice`]. What the host sends is received by the device's owner.
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

/// Another queue of a [`HopDevice`].
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

/// What `/proc/net/dev` says of packets that a device did not take. What the host transmits is what
/// we receive.
fn transmit_drops(text: &str, device: &str) -> Option<u64> {
    const TRANSMIT_DROP: usize = 11;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, numbers) = lines.find(|(name, _)| name.trim() == device)?;
    let number = numbers.split_ascii_whitespace().nth(TRANSMIT_DROP)?;
    number.parse().ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_of_devices() {
        let text = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
            lo:     1       2    3    4    5     6          7         8      9      10    11   12    13     14      15         16\n\
            lvs-tun0:100  2    3    4    5     6          7         8      9      10    11   1200    13     14      15         16\n";
        assert_eq!(transmit_drops(text, "lvs-tun0"), Some(1200));
        assert_eq!(transmit_drops(text, "lvs-tun1"), None);
    }
}

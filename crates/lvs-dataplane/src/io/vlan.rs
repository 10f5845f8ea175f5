//! One VLAN of a trunk as a network device of the host's own, where the kernel has no 802.1Q: what
//! the host and the engine send there leaves the trunk with a tag, and what comes in with this tag
//! arrives there without it.
//!
//! ```text
//!            ┌ eth0 (trunk), packet socket: tagged frames ─┐
//!   network ─┤                                             ├─ tag in, tag out ─ TAP eth0.100 ─ host: addresses, routes,
//!            └ untagged frames: the host's, or a port's    ┘                                   neighbours, packet socket
//! ```
//!
//! To the host and to the rest of the engine the device is an interface as any other: addresses,
//! routes, neighbour discovery, the [shield](crate::host::shield), health checks. It costs each
//! frame a second way through the kernel, which a device of the kernel's own (`ip link add link
//! eth0 name eth0.100 type vlan id 100`) does not; where there is one of the name, that is used.

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use super::PacketIo;
use super::af_packet::{AfPacket, OpenError};
use super::tun::{Tun, TunError};
use crate::netlink::Link;
use crate::packet::frame::Frame;
use crate::packet::wire::vlan::{self, Tag};
use crate::sys::{self, TunOptions};

/// VLAN numbers that a tag can name; 0 is none, 4095 is reserved.
const NUMBERS: std::ops::RangeInclusive<u16> = 1..=4094;

/// An interface as it is asked for: `eth0`, `eth0.100`, or `eth0.100=10.0.100.1/24,fd00:100::1/64`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedInterface {
    /// Its name.
    pub name: String,
    /// The trunk and the VLAN, if the name is that of one.
    pub vlan: Option<(String, u16)>,
    /// Addresses and prefix lengths that it gets if it has to be made.
    pub addresses: Vec<(IpAddr, u8)>,
}

impl std::str::FromStr for WantedInterface {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = match text.split_once('=') {
            Some((name, rest)) => (name, Some(rest)),
            None => (text, None),
        };
        let vlan = name.rsplit_once('.').and_then(|(trunk, number)| {
            let number = number.parse().ok().filter(|n| NUMBERS.contains(n))?;
            (!trunk.is_empty()).then(|| (trunk.to_owned(), number))
        });
        if name.is_empty() || name.len() > 15 {
            return Err(format!(
                "{text:?}: the name of an interface has 1 to 15 characters"
            ));
        }
        if rest.is_some() && vlan.is_none() {
            return Err(format!(
                "{text:?}: addresses are for interfaces that the engine makes, which are called TRUNK.VLAN (eth0.100, VLAN 1 \
                 to 4094); give {name} its addresses by `ip address`"
            ));
        }
        let addresses = rest.into_iter().flat_map(|rest| rest.split(','));
        let addresses = addresses.map(|address| {
            let (ip, len) = address.split_once('/').unwrap_or((address, ""));
            let ip: IpAddr = ip.parse().map_err(|_| ())?;
            let len: u8 = len.parse().map_err(|_| ())?;
            let fits = len <= if ip.is_ipv4() { 32 } else { 128 };
            fits.then_some((ip, len)).ok_or(())
        });
        let addresses = addresses.collect::<Result<_, ()>>().map_err(|()| {
            format!("{text:?}: behind the = come addresses with prefix lengths, as 10.0.100.1/24")
        })?;
        Ok(Self {
            name: name.to_owned(),
            vlan,
            addresses,
        })
    }
}

/// A device of the host for one VLAN. It goes with this value.
#[derive(Debug)]
pub struct VlanDevice {
    tap: Tun,
    vlan: u16,
}

impl VlanDevice {
    /// Makes the device `name`, up, with the trunk's link-layer address and MTU.
    ///
    /// # Errors
    /// See [`TunError`].
    pub fn create(name: &str, vlan: u16, trunk: &Link) -> Result<Self, TunError> {
        let options = TunOptions {
            tap: true,
            ..TunOptions::default()
        };
        let tap = Tun::create(name, options)?;
        let device = Self { tap, vlan };
        device.follow(trunk)?;
        sys::set_up(name).map_err(|source| device.error("set the link up", source))?;
        Ok(device)
    }

    /// Takes over the trunk's link-layer address and MTU.
    ///
    /// # Errors
    /// If the device cannot have them.
    pub fn follow(&self, trunk: &Link) -> Result<(), TunError> {
        let mtu = u16::try_from(trunk.mtu).unwrap_or(u16::MAX);
        if let Some(mac) = trunk.mac {
            sys::set_mac(self.name(), mac)
                .map_err(|source| self.error("set the link-layer address", source))?;
        }
        sys::set_mtu(self.name(), mtu).map_err(|source| self.error("set the MTU", source))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.tap.name()
    }

    /// Its index.
    pub fn ifindex(&self) -> u32 {
        self.tap.ifindex()
    }

    fn error(&self, step: &'static str, source: io::Error) -> TunError {
        TunError::Os {
            name: self.name().to_owned(),
            step,
            source,
        }
    }
}

/// An interface whose tagged frames belong to devices here.
#[derive(Debug)]
pub struct Trunk {
    /// Its name.
    pub name: String,
    io: Option<AfPacket>,
    devices: Vec<VlanDevice>,
    /// Tagged frames of VLANs without a device here.
    pub strangers: u64,
    /// Frames that a queue had no room for.
    pub refused: u64,
}

impl Trunk {
    /// Opens a trunk with no VLANs yet.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(link: &Link) -> Result<Self, OpenError> {
        let mut trunk = Self {
            name: link.name.clone(),
            io: None,
            devices: Vec::new(),
            strangers: 0,
            refused: 0,
        };
        trunk.attach(link)?;
        Ok(trunk)
    }

    fn attach(&mut self, link: &Link) -> Result<(), OpenError> {
        self.io = Some(AfPacket::open_tagged(link.index, &link.name)?);
        Ok(())
    }

    /// Adds a VLAN.
    pub fn add(&mut self, device: VlanDevice) {
        self.devices.push(device);
    }

    /// The devices of its VLANs.
    pub fn devices(&self) -> &[VlanDevice] {
        &self.devices
    }

    /// Goes after the interface, which may be gone, have come back under its name, or have changed.
    ///
    /// # Errors
    /// In words, for the log; what could be done is done.
    pub fn follow(&mut self, link: Option<&Link>) -> Result<(), String> {
        let Some(link) = link else {
            self.io = None;
            return Ok(());
        };
        if self.io.as_ref().is_none_or(|io| io.ifindex() != link.index) {
            self.attach(link).map_err(|error| error.to_string())?;
        }
        for device in &self.devices {
            device.follow(link).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// What to poll for input: the trunk, if it is there, and each device.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let trunk = self.io.iter().filter_map(PacketIo::fd);
        trunk.chain(self.devices.iter().filter_map(|device| device.tap.fd()))
    }

    /// Passes on what waits, at most a batch from each side. `frames` are room for it.
    pub fn relay(&mut self, frames: &mut [Frame]) {
        let Some(io) = &mut self.io else {
            // Nobody is there to take it: it must not wait for ever.
            for device in &mut self.devices {
                let lost = device.tap.recv(frames).unwrap_or(0);
                self.refused += lost as u64;
            }
            return;
        };
        // The trunk's errors are told by the kernel's events.
        let count = io.recv(frames).unwrap_or(0);
        for frame in &mut frames[..count] {
            let Some(Tag {
                service: false,
                vlan,
            }) = vlan::outermost(frame.bytes())
            else {
                self.strangers += 1;
                continue;
            };
            if vlan == 0 {
                continue;
            }
            match self.devices.iter_mut().find(|device| device.vlan == vlan) {
                Some(device) => {
                    vlan::remove(frame);
                    self.refused += device.tap.send(std::slice::from_mut(frame)) as u64;
                }
                None => self.strangers += 1,
            }
        }
        for device in &mut self.devices {
            let count = device.tap.recv(frames).unwrap_or(0);
            let mut kept = 0;
            for at in 0..count {
                if vlan::insert(&mut frames[at], vlan::TAG, device.vlan) {
                    frames.swap(kept, at);
                    kept += 1;
                }
            }
            self.refused += (count - kept) as u64;
            self.refused += io.send(&mut frames[..kept]) as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_read() {
        let read = |text: &str| text.parse::<WantedInterface>();
        let plain = read("eth0").expect("a name");
        assert_eq!((plain.name.as_str(), plain.vlan), ("eth0", None));
        let vlan = read("eth0.100=10.0.100.1/24,fd00:100::1/64").expect("a VLAN");
        assert_eq!(vlan.name, "eth0.100");
        assert_eq!(vlan.vlan, Some(("eth0".to_owned(), 100)));
        assert_eq!(vlan.addresses.len(), 2);
        // What looks like one and is none may be an interface's name all the same.
        for name in ["eth0.0", "eth0.4095", "wan.x", ".7"] {
            assert_eq!(read(name).expect("a name").vlan, None, "{name}");
        }
        for wrong in [
            "",
            "=10.0.0.1/24",
            "eth0=10.0.0.1/24",
            "eth0.100=",
            "eth0.100=10.0.0.1",
            "eth0.100=10.0.0.1/33",
            "a-name-that-is-too-long",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}

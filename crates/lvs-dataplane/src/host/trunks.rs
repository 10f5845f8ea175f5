//! The VLANs that the engine makes devices for.

use std::os::fd::BorrowedFd;

use tracing::{info, warn};

use super::HostError;
use crate::io::vlan::{Trunk, VlanDevice, WantedInterface};
use crate::netlink::{NetState, Netlink};
use crate::packet::frame::Frame;

/// Trunks with their VLANs.
#[derive(Debug, Default)]
pub(super) struct Trunks(Vec<Trunk>);

impl Trunks {
    /// Makes devices for the VLANs among `wanted` that the host has none for, and takes them into
    /// `state`.
    pub(super) fn make(
        wanted: &[WantedInterface],
        netlink: &mut Netlink,
        state: &mut NetState,
    ) -> Result<Self, HostError> {
        let mut this = Self::default();
        for WantedInterface {
            name,
            vlan,
            addresses,
        } in wanted
        {
            if state.link_by_name(name).is_some() {
                if !addresses.is_empty() {
                    warn!("{name} is there already: it keeps the addresses that it has");
                }
                continue;
            }
            let Some((trunk, vlan)) = vlan else { continue };
            let link = match state.link_by_name(trunk) {
                None => return Err(HostError::NoInterface(name.clone())),
                Some(link) if !link.is_arp_capable() => {
                    return Err(HostError::NotEthernet(trunk.clone()));
                }
                Some(link) => link,
            };
            let device = VlanDevice::create(name, *vlan, link)?;
            info!("made {name}: VLAN {vlan} of {trunk}");
            for &(ip, len) in addresses {
                netlink.add_address(device.ifindex(), ip, len)?;
            }
            let place = this.0.iter().position(|known| known.name == *trunk);
            let place = match place {
                Some(place) => place,
                None => {
                    this.0.push(Trunk::open(link)?);
                    this.0.len() - 1
                }
            };
            this.0[place].add(device);
        }
        if !this.0.is_empty() {
            netlink.poll_events(state)?;
        }
        Ok(this)
    }

    /// Goes after the trunks' interfaces.
    pub(super) fn follow(&mut self, state: &NetState) {
        for trunk in &mut self.0 {
            if let Err(error) = trunk.follow(state.link_by_name(&trunk.name)) {
                warn!("VLANs of {}: {error}", trunk.name);
            }
        }
    }

    /// What to poll for input.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().flat_map(Trunk::fds)
    }

    /// Passes on what waits.
    pub(super) fn relay(&mut self, frames: &mut [Frame]) {
        for trunk in &mut self.0 {
            trunk.relay(frames);
        }
    }

    /// Tagged frames of VLANs without a device.
    pub(super) fn strangers(&self) -> u64 {
        self.0.iter().map(|trunk| trunk.strangers).sum()
    }

    /// Frames that a trunk or a device had no room for.
    pub(super) fn refused(&self) -> u64 {
        self.0.iter().map(|trunk| trunk.refused).sum()
    }
}

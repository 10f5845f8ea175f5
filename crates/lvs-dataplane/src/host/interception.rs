//! Makes the dataplane receive the packets of services instead of the host, and reinjects packets
//! into the host.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tracing::{info, warn};

use super::setup::Outliving;
use super::shield::{Shield, ShieldError};
use super::steering::{Steering, SteeringError};
use super::{Backend, HostError};
use crate::io::PacketIo;
use crate::io::port::Port;
use crate::io::tun::HostDevice;
use crate::netlink::NetState;
use lvs_packet::intercept::{Intercept, LocalClient};
use lvs_sys::random;
use lvs_sys::{PacketSocket, TurnBack};

/// The mechanism by which the dataplane receives packets.
#[derive(Debug)]
pub(super) enum Interception {
    /// The packet sockets of the interfaces receive copies of frames; the shield hides the original
    /// frames of services from the host.
    Copies {
        shield: Shield,
        /// The program that reinjects frames into the host on the interface of their arrival.
        turn: Option<TurnBack>,
    },
    /// The host routes the packets through a TUN device, in both directions.
    Routed {
        steering: Steering,
        /// Addresses of services that the host itself has. Packets to them are not routed through
        /// the device.
        kept: BTreeSet<IpAddr>,
        /// The device, if a state keeper is to keep its descriptor.
        device: Option<OwnedFd>,
    },
}

impl Interception {
    /// Opens the mechanism, which intercepts no packets yet. Also returns the device through which
    /// packets reach the host.
    pub(super) fn open(
        backend: Backend,
        warm_restart: Outliving,
    ) -> Result<(Self, Port), HostError> {
        let copies = match backend {
            Backend::AfPacket => true,
            Backend::Tun => false,
            Backend::Auto => match PacketSocket::new() {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    warn!(
                        "packet sockets are not permitted (CAP_NET_RAW), so packets are routed through a TUN device: \
                         direct routing is not possible"
                    );
                    false
                }
                // Other errors are reported when the sockets are opened.
                _ => true,
            },
        };
        if copies {
            let host = HostDevice::create()?;
            if let Err(error) = Steering::clear_leftovers() {
                warn!("{error}");
            }
            let turn = open_way_back();
            let shield = Shield::open(turn.as_ref().map(TurnBack::mark))?;
            return Ok((Self::Copies { shield, turn }, Port::Tun(host)));
        }
        let Outliving {
            wanted,
            goes_on,
            device,
        } = warm_restart;
        let goes_on = goes_on && device.is_some();
        let hop = HostDevice::create_hop(device)?;
        info!("packets are routed through {}", hop.name());
        let steering = Steering::open(hop.name(), hop.ifindex(), goes_on)?;
        let device = hop.fd().filter(|_| wanted);
        let routed = Self::Routed {
            steering,
            kept: BTreeSet::new(),
            device: device.and_then(|fd| fd.try_clone_to_owned().ok()),
        };
        Ok((routed, Port::Tun(hop)))
    }

    pub(super) fn shield(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Copies { shield, .. } => Some(shield.socket()),
            Self::Routed { .. } => None,
        }
    }

    pub(super) fn device(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Copies { .. } => None,
            Self::Routed { device, .. } => device.as_ref().map(AsFd::as_fd),
        }
    }

    /// Whether the host routes packets through a TUN device.
    pub(super) const fn is_routed(&self) -> bool {
        matches!(self, Self::Routed { .. })
    }

    /// The program that reinjects frames on the interface of their arrival. Without it, frames are
    /// reinjected through the TUN device.
    pub(super) const fn turn_back(&self) -> Option<&TurnBack> {
        match self {
            Self::Copies { turn, .. } => turn.as_ref(),
            Self::Routed { .. } => None,
        }
    }

    /// Whether frames can be reinjected on the interface of their arrival. False, for example, if
    /// another program has detached the reinjecting program or is attached before it.
    pub(super) fn gives_back(&self, ifindex: u32) -> bool {
        // If the kernel does not answer, assume that the program is attached.
        self.turn_back()
            .is_some_and(|turn| turn.is_first_at(ifindex).unwrap_or(true))
    }

    /// Intercepts exactly the packets that `spec` describes.
    pub(super) fn update(&mut self, spec: &Intercept) -> Result<(), String> {
        match self {
            Self::Copies { shield, .. } => {
                let done = shield.update(spec).map(drop);
                done.map_err(|error| shield_failure(&error))
            }
            Self::Routed { steering, .. } => {
                let done = steering.update(spec);
                done.map_err(|error| steering_failure(&error))
            }
        }
    }

    /// With the TUN backend, records that a rule, route or address may have been deleted, so that
    /// the next update restores it.
    pub(super) const fn distrust(&mut self) {
        if let Self::Routed { steering, .. } = self {
            steering.distrust();
        }
    }

    /// With the TUN backend, warns once about each address of a service that the host itself has:
    /// the host does not route packets to such an address into the device.
    pub(super) fn complain_of(&mut self, vips: impl Iterator<Item = IpAddr>, state: &NetState) {
        let Self::Routed { kept, .. } = self else {
            return;
        };
        let now: BTreeSet<IpAddr> = vips.filter(|&addr| state.is_local(addr)).collect();
        for addr in now.difference(kept) {
            warn!(
                "{addr} is an address of this host now: packets to it no longer reach the director. Remove it from the host (ip addr del)"
            );
        }
        *kept = now;
    }

    /// As [`complain_of`](Self::complain_of), for additional addresses.
    pub(super) fn complain_also_of(&mut self, vips: &[IpAddr], state: &NetState) {
        if let Self::Routed { kept, .. } = self {
            let all: Vec<IpAddr> = kept.iter().chain(vips).copied().collect();
            self.complain_of(all.into_iter(), state);
        }
    }

    /// Additionally intercepts the packets that `more` describes.
    pub(super) fn extend(&mut self, more: &Intercept) -> Result<(), String> {
        match self {
            Self::Copies { shield, .. } => {
                let done = shield.extend(more).map(drop);
                done.map_err(|error| shield_failure(&error))
            }
            Self::Routed { steering, .. } => {
                let done = steering.extend(more);
                done.map_err(|error| steering_failure(&error))
            }
        }
    }

    /// Hides frames of services on another interface from the host. Does nothing with the TUN
    /// backend.
    pub(super) fn add_interface(&mut self, name: &str) -> Result<(), ShieldError> {
        match self {
            Self::Copies { shield, .. } => shield.add_interface(name),
            Self::Routed { .. } => Ok(()),
        }
    }

    pub(super) fn remove_interface(&mut self, name: &str) -> Result<(), ShieldError> {
        match self {
            Self::Copies { shield, .. } => shield.remove_interface(name),
            Self::Routed { .. } => Ok(()),
        }
    }

    pub(super) fn add_local_clients(&mut self, clients: &[LocalClient]) -> Result<(), ShieldError> {
        match self {
            Self::Copies { shield, .. } => shield.add_local_clients(clients),
            Self::Routed { .. } => Ok(()),
        }
    }

    pub(super) fn remove_local_clients(
        &mut self,
        clients: &[LocalClient],
    ) -> Result<(), ShieldError> {
        match self {
            Self::Copies { shield, .. } => shield.remove_local_clients(clients),
            Self::Routed { .. } => Ok(()),
        }
    }

    /// With the TUN backend, sets the interfaces on which the host answers ARP and neighbour
    /// discovery for the dataplane's own addresses.
    pub(super) fn set_interfaces(
        &mut self,
        interfaces: BTreeMap<u32, String>,
    ) -> Result<(), SteeringError> {
        match self {
            Self::Copies { .. } => Ok(()),
            Self::Routed { steering, .. } => steering.set_interfaces(interfaces),
        }
    }

    /// With the TUN backend, checks that the host forwards packets.
    pub(super) fn check_host(&self) -> Result<(), SteeringError> {
        match self {
            Self::Copies { .. } => Ok(()),
            Self::Routed { steering, .. } => steering.check_forwarding(),
        }
    }
}

fn shield_failure(error: &ShieldError) -> String {
    format!("the host's network stack still receives packets of services; trying again: {error}")
}

fn steering_failure(error: &SteeringError) -> String {
    format!("some packets of services are not routed to the dataplane yet; trying again: {error}")
}

/// Loads the program that reinjects frames, with a random mark; logs a failure.
fn open_way_back() -> Option<TurnBack> {
    let turn = mark().and_then(TurnBack::load);
    turn.map_err(|error| {
        warn!(
            "fragments and errors that are reinjected into the host arrive on the device {}, not on their interface ({error}): add this device to the host's rules that match an interface. Reinjection on the same interface requires Linux 6.6 with CONFIG_NET_XGRESS, and CAP_BPF in the initial user namespace",
            HostDevice::NAME
        );
    })
    .ok()
}

/// A random mark other than 0, which other programs do not use by chance.
fn mark() -> io::Result<u32> {
    Ok(u32::from_ne_bytes(random()?) | 1)
}

//! How the engine comes to packets, and the host to those that the engine leaves to it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use lvs_core::api::{Failure, FailureCode, Need};
use lvs_core::{Forwarding, ServiceKey};
use tracing::{info, warn};

use super::{Backend, StartError};
use crate::host::shield::{Shield, ShieldError};
use crate::host::steering::{Steering, SteeringError};
use crate::io::PacketIo;
use crate::io::hop::HopDevice;
use crate::io::tun::HostDevice;
use crate::netlink::NetState;
use crate::packet::frame::Frame;
use crate::packet::intercept::{Intercept, LocalClient};
use crate::packet::net::PortId;
use crate::sys::PacketSocket;

/// The port that leads to the host.
pub(super) const HOST_PORT: PortId = PortId(0);
/// The port of the device that everything is routed through. It is the same device as the host's, but what is sent here is
/// forwarded, and what is sent there given back.
pub(super) const HOP_PORT: PortId = PortId(1);

/// How the engine comes to packets.
#[derive(Debug)]
pub(super) enum Access {
    /// As copies, from the packet sockets of its interfaces; the shield keeps the host from the originals.
    Copies {
        /// Leads to the host.
        host: HostDevice,
        shield: Shield,
    },
    /// The host routes them through a device, and both ways.
    Routed {
        steering: Steering,
        hop: HopDevice,
        /// Addresses of services that are the host's own: their packets never get here.
        kept: BTreeSet<IpAddr>,
    },
}

impl Access {
    /// Comes to no packet yet.
    pub(super) fn open(backend: Backend) -> Result<Self, StartError> {
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
                // Whatever else is wrong is told where they are opened.
                _ => true,
            },
        };
        if copies {
            let host = HostDevice::create(HostDevice::NAME)?;
            if let Err(error) = Steering::clear_leftovers() {
                warn!("{error}");
            }
            let shield = Shield::open()?;
            return Ok(Self::Copies { host, shield });
        }
        let hop = HopDevice::create(HopDevice::NAME)?;
        let steering = Steering::open(hop.name(), hop.ifindex())?;
        Ok(Self::Routed {
            steering,
            hop,
            kept: BTreeSet::new(),
        })
    }

    /// What to poll for packets of the device.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Copies { host, .. } => host.fd(),
            Self::Routed { hop, .. } => hop.fd(),
        }
    }

    pub(super) fn ifindex(&self) -> u32 {
        match self {
            Self::Copies { host, .. } => host.ifindex(),
            Self::Routed { hop, .. } => hop.ifindex(),
        }
    }

    pub(super) fn name(&self) -> &str {
        match self {
            Self::Copies { host, .. } => host.name(),
            Self::Routed { hop, .. } => hop.name(),
        }
    }

    /// Whether the host routes everything.
    pub(super) const fn is_routed(&self) -> bool {
        matches!(self, Self::Routed { .. })
    }

    /// Receives from the device, and says on which port that is.
    pub(super) fn recv(&mut self, frames: &mut [Frame]) -> (PortId, io::Result<usize>) {
        match self {
            Self::Copies { host, .. } => (HOST_PORT, host.recv(frames)),
            Self::Routed { hop, .. } => (HOP_PORT, hop.recv(frames)),
        }
    }

    /// Sends on a port that is no interface's; returns how many were refused.
    pub(super) fn send(&mut self, port: PortId, frames: &mut [Frame]) -> usize {
        match self {
            Self::Copies { host, .. } if port == HOST_PORT => host.send(frames),
            Self::Routed { hop, .. } if port == HOST_PORT => hop.give_back(frames),
            Self::Routed { hop, .. } if port == HOP_PORT => hop.send(frames),
            _ => frames.len(),
        }
    }

    /// Packets that the device had no room for.
    pub(super) fn drops(&self) -> u64 {
        match self {
            Self::Copies { .. } => 0,
            Self::Routed { hop, .. } => hop.drops(),
        }
    }

    /// Takes what `spec` says from the host.
    pub(super) fn update(&mut self, spec: &Intercept) -> Result<(), Failure> {
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

    /// Something that leads packets here may have been deleted.
    pub(super) const fn distrust(&mut self) {
        if let Self::Routed { steering, .. } = self {
            steering.distrust();
        }
    }

    /// Says which of the services' addresses the host keeps to itself.
    pub(super) fn complain_of(&mut self, vips: impl Iterator<Item = IpAddr>, state: &NetState) {
        let Self::Routed { kept, .. } = self else {
            return;
        };
        let now: BTreeSet<IpAddr> = vips.filter(|&addr| state.is_local(addr)).collect();
        for addr in now.difference(kept) {
            warn!(
                "{addr} is an address of this host now: what is sent to it no longer gets to the director. Take it from the \
                 host (ip addr del)"
            );
        }
        *kept = now;
    }

    /// Takes what `more` says as well.
    pub(super) fn extend(&mut self, more: &Intercept) -> Result<(), Failure> {
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

    /// Keeps the host from handled frames of another interface.
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

    /// Tells the interfaces on which own addresses are answered for, where the host does that.
    pub(super) fn set_interfaces(
        &mut self,
        interfaces: BTreeMap<u32, String>,
    ) -> Result<(), SteeringError> {
        match self {
            Self::Copies { .. } => Ok(()),
            Self::Routed { steering, .. } => steering.set_interfaces(interfaces),
        }
    }

    /// Whether the host's settings let any packet through, before the engine says that it is ready.
    pub(super) fn check_host(&self) -> Result<(), SteeringError> {
        match self {
            Self::Copies { .. } => Ok(()),
            Self::Routed { steering, hop, .. } => {
                info!("packets are routed through {}", hop.name());
                steering.check_forwarding()
            }
        }
    }

    /// Whether what somebody wants is possible at all.
    pub(super) fn permits(&self, need: &Need<'_>, state: &NetState) -> Result<(), Failure> {
        if !self.is_routed() {
            return Ok(());
        }
        let refused = match need {
            Need::Server(Forwarding::Route | Forwarding::Local) => {
                "direct routing puts another link-layer address on a frame, and this engine has no frames but the packets that \
                 its host routes through a TUN device (--backend tun): use NAT (-m) or a tunnel (-i), or give the engine \
                 CAP_NET_RAW and --backend af_packet"
                    .to_owned()
            }
            Need::Service(ServiceKey::Address { addr, .. }) if state.is_local(addr.ip()) => {
                let addr = addr.ip();
                let owner = state
                    .links()
                    .find(|link| state.addresses(link.index).any(|a| a.ip == addr));
                let name = owner.map_or("this host", |link| link.name.as_str());
                format!(
                    "{addr} is an address of {name}, and what is addressed to the host itself is not routed through a TUN \
                     device (--backend tun): `ip addr del {addr} dev {name}`, and start the engine with --own-vips, or have \
                     the address routed here"
                )
            }
            Need::Local(addr) if state.is_local(*addr) => format!(
                "{addr} is an address of this host, and what is addressed to the host itself is not routed through a TUN device \
                 (--backend tun): give one that the host does not have, which the engine then answers for"
            ),
            Need::Mark(rule) if rule.interface.is_some() => {
                "a packet that is routed through a TUN device (--backend tun) does not tell the interface that it came in \
                 on: leave --interface out"
                    .to_owned()
            }
            _ => return Ok(()),
        };
        Err(Failure::new(FailureCode::Unsupported, refused))
    }
}

fn shield_failure(error: &ShieldError) -> Failure {
    Failure::new(
        FailureCode::Internal,
        format!("the host's own stack is not kept from it yet, which is tried again: {error}"),
    )
}

fn steering_failure(error: &SteeringError) -> Failure {
    Failure::new(
        FailureCode::Internal,
        format!(
            "not all of its packets are led to the director yet, which is tried again: {error}"
        ),
    )
}

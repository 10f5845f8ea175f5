//! The checks of a configuration change that depend on the host.

use core::net::IpAddr;

use super::super::types::Failure;
use crate::full_nat::LocalAddress;
use crate::mark::MarkRule;
use crate::sync::SyncDaemon;
use crate::{Forwarding, ServiceKey};

/// The checks of a configuration change that depend on the host.
///
/// Implementations answer from memory: the caller holds the lock of [`Control`](crate::Control).
pub trait Host {
    /// Checks whether the host's packet interception permits `need`. For services and servers, this
    /// is the first check of a change.
    ///
    /// # Errors
    /// The reason for the refusal, and the fix.
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        let _ = need;
        Ok(())
    }

    /// Whether `addr` is the broadcast address of one of the host's networks.
    fn is_broadcast(&self, addr: IpAddr) -> bool {
        let _ = addr;
        false
    }

    /// The MTU of the network interface with this name, in bytes; `None` if the host has no such
    /// interface.
    fn mtu(&self, interface: &str) -> Option<u32> {
        let _ = interface;
        Some(1500)
    }

    /// The ports of a local address that full NAT may use: the ports outside the range from which
    /// the host's kernel chooses ports. By default, all unprivileged ports.
    fn local_ports(&self, addr: IpAddr) -> LocalAddress {
        LocalAddress::new(addr)
    }
}

/// A host that permits every change and has every interface: for tests, and for checks of changes
/// without a dataplane.
#[derive(Clone, Copy, Debug, Default)]
pub struct Permissive;

impl Host for Permissive {}

/// The part of a change that the host's packet interception must support.
#[derive(Clone, Copy, Debug)]
pub enum Need<'a> {
    /// A service to be added.
    Service(ServiceKey),
    /// A server with this method, to be added or edited.
    Server(Forwarding),
    /// A rule to be added, which sets firewall marks.
    Mark(&'a MarkRule),
    /// A local address that full NAT will use.
    Local(IpAddr),
    /// A virtual address for which the dataplane will answer ARP.
    Own(IpAddr),
    /// A synchronisation daemon to be started. All other checks of the daemon have succeeded.
    Daemon(&'a SyncDaemon),
}

//! Properties of the host on which changes depend.

use core::net::IpAddr;

use super::super::types::Failure;
use crate::full_nat::LocalAddress;
use crate::mark::MarkRule;
use crate::sync::SyncDaemon;
use crate::{Forwarding, ServiceKey};

/// Facts about the host that changes depend on.
///
/// Implementations answer from memory: the caller holds the lock of [`Control`](crate::Control).
pub trait Host {
    /// Checks whether the host's packet interception permits `need`. It is the first check of a
    /// change.
    ///
    /// # Errors
    /// The reason for the refusal, and the fix.
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        let _ = need;
        Ok(())
    }

    /// Whether this is the broadcast address of one of the host's networks.
    fn is_broadcast(&self, addr: IpAddr) -> bool {
        let _ = addr;
        false
    }

    /// The MTU of a network interface in bytes; `None` if no interface has this name.
    fn mtu(&self, interface: &str) -> Option<u32> {
        let _ = interface;
        Some(1500)
    }

    /// The ports of a local address that full NAT may use: those outside the host's own range.
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
    /// A rule that sets firewall marks, to be added.
    Mark(&'a MarkRule),
    /// A local address for full NAT, to be added.
    Local(IpAddr),
    /// A virtual address for which the dataplane is to answer ARP.
    Own(IpAddr),
    /// A synchronisation daemon to be started, which passed all other checks.
    Daemon(&'a SyncDaemon),
}

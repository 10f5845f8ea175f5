//! Settings that are copied into each shard.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::AtomicU32;

use crate::conn::{Timeouts, flag};
use crate::settings::Sysctls;
use crate::{Forwarding, Protocol};

/// State that control and shards share in addition to the servers' records.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Raised when a shard's copies of the settings or of the list of servers are out of date.
    pub(crate) generation: AtomicU32,
}

/// Settings that are copied into each shard.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// Whether an IPv4 service exists. Without one, the kernel ignores all IPv4 packets, even those
    /// of connections.
    pub(crate) ipv4: bool,
    /// Whether an IPv6 service exists.
    pub(crate) ipv6: bool,
    pub(crate) timeouts: Timeouts,
    pub(crate) sysctls: Sysctls,
    /// Whether the TCP state tables that trust only the server are in force.
    pub(crate) secure: bool,
    /// Whether a backup daemon runs and `backup_only` is set: nothing is forwarded.
    pub(crate) backup_only: bool,
    /// The synchronisation master that runs.
    pub(crate) master: Option<crate::sync::Master>,
    /// Whether a full table evicts connections for new ones.
    pub(crate) evicts: bool,
    /// Whether a service has a persistence engine, which opens connections for datagrams from its
    /// servers.
    pub(crate) outbound: bool,
    /// Virtual ports whose connections the FTP helper inspects.
    pub(crate) ftp_ports: Vec<u16>,
}

impl Settings {
    /// Whether a packet that comes from a server behind NAT and belongs to no connection has an
    /// effect.
    pub(crate) const fn heeds_servers(&self) -> bool {
        self.outbound || self.sysctls.nat_icmp_send
    }

    pub(super) fn serves(&self, addr: IpAddr) -> bool {
        match addr {
            IpAddr::V4(_) => self.ipv4,
            IpAddr::V6(_) => self.ipv6,
        }
    }

    /// The flags of a connection that the helper inspects (`ip_vs_bind_app`,
    /// `ip_vs_ftp_init_conn`).
    pub(crate) fn helper_flags(&self, protocol: Protocol, virt: SocketAddr, flags: u32) -> u32 {
        let nat = flags & flag::METHOD == Forwarding::Nat as u32;
        if nat && protocol == Protocol::TCP && self.ftp_ports.contains(&virt.port()) {
            flag::NFCT | flag::HELPED
        } else {
            0
        }
    }
}

//! Settings of which each shard has a copy.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::AtomicU32;

use crate::conn::{Timeouts, flag};
use crate::settings::Sysctls;
use crate::{Forwarding, Protocol};

/// State of the control half that the shards read as well.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Changes whenever the shards' copies of the configuration become out of date.
    pub(crate) generation: AtomicU32,
}

/// Settings of which each shard has a copy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// Whether an IPv4 service exists. Without one, the kernel ignores all IPv4 packets, even those
    /// of connections.
    pub(crate) ipv4: bool,
    pub(crate) ipv6: bool,
    pub(crate) timeouts: Timeouts,
    pub(crate) sysctls: Sysctls,
    /// Whether `secure_tcp` is active, so that TCP connections use stricter tables of states.
    pub(crate) secure: bool,
    /// Whether a backup daemon is running and `backup_only` is set, so that nothing is forwarded.
    pub(crate) backup_only: bool,
    /// The running synchronisation master.
    pub(crate) master: Option<crate::sync::Master>,
    /// Whether a connection is evicted if the table is full.
    pub(crate) evicts: bool,
    /// Whether a service has a persistence engine, which opens connections for datagrams from its
    /// servers.
    pub(crate) outbound: bool,
    /// Virtual ports whose connections the FTP helper inspects.
    pub(crate) ftp_ports: Vec<u16>,
}

impl Settings {
    /// Whether a packet of a server with NAT that belongs to no connection may open one, or be
    /// answered with an ICMP error.
    pub(crate) const fn heeds_servers(&self) -> bool {
        self.outbound || self.sysctls.nat_icmp_send
    }

    pub(super) fn serves(&self, addr: IpAddr) -> bool {
        match addr {
            IpAddr::V4(_) => self.ipv4,
            IpAddr::V6(_) => self.ipv6,
        }
    }

    /// The flags that a new connection with these `flags` also needs for the FTP helper; 0 if the
    /// helper does not inspect it (`ip_vs_bind_app`, `ip_vs_ftp_init_conn`).
    pub(crate) fn helper_flags(&self, protocol: Protocol, virt: SocketAddr, flags: u32) -> u32 {
        let nat = flags & flag::METHOD == Forwarding::Nat as u32;
        if nat && protocol == Protocol::TCP && self.ftp_ports.contains(&virt.port()) {
            flag::NFCT | flag::HELPED
        } else {
            0
        }
    }
}

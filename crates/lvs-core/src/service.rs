//! Services and real servers: identity and settings.

use alloc::string::String;
use core::fmt;
use core::net::{IpAddr, SocketAddr};

use crate::Protocol;
use crate::settings::Extras;
use crate::tunnel::Tunnel;

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(rename_all = "lowercase"))]
pub enum Family {
    /// The family of IPv4 addresses.
    V4,
    /// The family of IPv6 addresses.
    V6,
}

impl Family {
    /// The family to which `addr` belongs.
    pub const fn of(addr: &IpAddr) -> Self {
        match addr {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// Length of the family's addresses in bits.
    pub const fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }
}

/// Identity of a service, like the hash keys of `ip_vs_service`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServiceKey {
    /// Protocol (TCP, UDP or SCTP), virtual address and port.
    Address {
        /// The protocol of the service's packets: TCP, UDP or SCTP.
        protocol: Protocol,
        /// Virtual address and port; port 0 stands for every port without a separate service.
        addr: SocketAddr,
    },
    /// A firewall mark, for packets of every protocol, address and port that have this mark.
    Mark {
        /// Family of the marked packets.
        family: Family,
        /// The firewall mark of the packets, not 0.
        mark: u32,
    },
}

impl ServiceKey {
    /// Returns the key of a TCP service.
    pub const fn tcp(addr: SocketAddr) -> Self {
        Self::Address {
            protocol: Protocol::TCP,
            addr,
        }
    }

    /// Returns the key of a UDP service.
    pub const fn udp(addr: SocketAddr) -> Self {
        Self::Address {
            protocol: Protocol::UDP,
            addr,
        }
    }

    /// Family of the packets to the service.
    pub const fn family(&self) -> Family {
        match self {
            Self::Address {
                addr: SocketAddr::V4(_),
                ..
            } => Family::V4,
            Self::Address {
                addr: SocketAddr::V6(_),
                ..
            } => Family::V6,
            Self::Mark { family, .. } => *family,
        }
    }

    /// The protocol; `None` for a mark, which accepts every protocol.
    pub const fn protocol(&self) -> Option<Protocol> {
        match self {
            Self::Address { protocol, .. } => Some(*protocol),
            Self::Mark { .. } => None,
        }
    }

    /// The service's port; 0 for a mark.
    pub const fn port(&self) -> u16 {
        match self {
            Self::Address { addr, .. } => addr.port(),
            Self::Mark { .. } => 0,
        }
    }
}

/// A service's key with a total order: marks first, then by protocol, address family, address and
/// port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum ServiceKeyOrd {
    Mark(Family, u32),
    Address(Protocol, SocketAddr),
}

impl From<&ServiceKey> for ServiceKeyOrd {
    fn from(key: &ServiceKey) -> Self {
        match *key {
            ServiceKey::Mark { family, mark } => Self::Mark(family, mark),
            ServiceKey::Address { protocol, addr } => {
                // The flow label and the scope are not part of the identity.
                Self::Address(protocol, SocketAddr::new(addr.ip(), addr.port()))
            }
        }
    }
}

impl From<ServiceKeyOrd> for ServiceKey {
    fn from(key: ServiceKeyOrd) -> Self {
        match key {
            ServiceKeyOrd::Mark(family, mark) => Self::Mark { family, mark },
            ServiceKeyOrd::Address(protocol, addr) => Self::Address { protocol, addr },
        }
    }
}

impl fmt::Display for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { protocol, addr } => write!(f, "{protocol} {addr}"),
            Self::Mark {
                family: Family::V4,
                mark,
            } => write!(f, "FWM {mark}"),
            Self::Mark {
                family: Family::V6,
                mark,
            } => write!(f, "FWM {mark} IPv6"),
        }
    }
}

/// Flags of a service, with the kernel's values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(transparent))]
pub struct ServiceFlags(pub u32);

impl ServiceFlags {
    /// Persistence: new connections of a client network are sent to the same real server as its
    /// earlier connections, until a timeout.
    pub const PERSISTENT: u32 = 0x1;
    /// Each UDP datagram is scheduled separately.
    pub const ONE_PACKET: u32 = 0x4;
    /// First scheduler flag: `sh-fallback`, `mh-fallback`, `flag-1`.
    pub const SCHED1: u32 = 0x8;
    /// Second scheduler flag: `sh-port`, `mh-port`, `flag-2`.
    pub const SCHED2: u32 = 0x10;
    /// Third scheduler flag: `flag-3`.
    pub const SCHED3: u32 = 0x20;
    /// All flags that a caller may set.
    pub const ALL: u32 = 0x3d;

    /// Whether all bits of `mask` are set.
    pub const fn has(self, mask: u32) -> bool {
        self.0 & mask == mask
    }
}

/// Settings of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(deny_unknown_fields))]
pub struct ServiceConfig {
    /// Scheduler, by ipvsadm's name; `none` accepts no connections.
    pub scheduler: String,
    /// Flags: persistence, one-packet scheduling, and flags of the scheduler.
    #[cfg_attr(feature = "api", serde(default))]
    pub flags: ServiceFlags,
    /// Persistence timeout in seconds.
    #[cfg_attr(feature = "api", serde(default))]
    pub timeout: u32,
    /// The part of the client's address that persistence uses. IPv4: the netmask as a number in
    /// host order, not validated, as in the kernel. IPv6: the prefix length, 1 to 128.
    pub netmask: u32,
    /// Persistence engine (`sip`).
    #[cfg_attr(
        feature = "api",
        serde(default, skip_serializing_if = "Option::is_none")
    )]
    pub engine: Option<String>,
    /// Settings that the kernel's IPVS does not have.
    #[cfg_attr(
        feature = "api",
        serde(default, skip_serializing_if = "Extras::is_off")
    )]
    pub extras: Extras,
}

impl ServiceConfig {
    /// Settings of a service with this scheduler: no persistence, and the full netmask of `family`.
    pub fn new(family: Family, scheduler: &str) -> Self {
        Self {
            scheduler: scheduler.into(),
            flags: ServiceFlags::default(),
            timeout: 0,
            netmask: match family {
                Family::V4 => u32::MAX,
                Family::V6 => 128,
            },
            engine: None,
            extras: Extras::default(),
        }
    }
}

/// Forwarding method of a real server. The numbers are the kernel's (`IP_VS_CONN_F_FWD_MASK`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(rename_all = "lowercase"))]
#[repr(u8)]
pub enum Forwarding {
    /// Network address translation: `-m`, `Masq`.
    Nat = 0,
    /// The packets are passed to the director's own network stack: `Local`.
    Local = 1,
    /// Encapsulation: `-i`, `Tunnel`.
    Tunnel = 2,
    /// Direct routing, that is, a new destination MAC address: `-g`, `Route`.
    #[default]
    Route = 3,
    /// The packet is forwarded to its original destination (`cache_bypass`).
    Bypass = 4,
    /// NAT that also translates the client's address (`FullNat`), so that replies return to the
    /// director. IPVS has no such method.
    FullNat = 5,
}

impl Forwarding {
    /// Whether the director translates addresses of packets: NAT and full NAT.
    #[inline]
    pub const fn translates(self) -> bool {
        matches!(self, Self::Nat | Self::FullNat)
    }

    #[inline]
    pub(crate) const fn from_bits(bits: u32) -> Self {
        match bits {
            0 => Self::Nat,
            1 => Self::Local,
            2 => Self::Tunnel,
            4 => Self::Bypass,
            5 => Self::FullNat,
            _ => Self::Route,
        }
    }
}

/// Settings of a real server in a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(deny_unknown_fields))]
pub struct ServerConfig {
    /// Share of connections in relation to the other servers; a server with 0 gets no new
    /// connections (quiesced).
    pub weight: i32,
    /// The method by which packets reach the server.
    #[cfg_attr(feature = "api", serde(default))]
    pub forwarding: Forwarding,
    /// Encapsulation, if the method is [`Forwarding::Tunnel`].
    #[cfg_attr(feature = "api", serde(default))]
    pub tunnel: Tunnel,
    /// Number of connections at which the server gets no new ones; 0 means no limit.
    #[cfg_attr(feature = "api", serde(default))]
    pub upper: u32,
    /// Number of connections below which the server gets new ones again; 0 is three quarters of
    /// `upper`.
    #[cfg_attr(feature = "api", serde(default))]
    pub lower: u32,
}

impl ServerConfig {
    /// Settings with this weight and forwarding method, and without thresholds.
    pub fn new(weight: i32, forwarding: Forwarding) -> Self {
        Self {
            weight,
            forwarding,
            tunnel: Tunnel::Ipip,
            upper: 0,
            lower: 0,
        }
    }
}

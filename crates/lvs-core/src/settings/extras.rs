//! Settings of a service that the kernel's IPVS does not have. They are off by default.

use crate::settings::Limits;

/// Action on the connections of a server that is removed, alone or with its service. A weight of 0
/// drains a server instead, and its connections continue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(rename_all = "lowercase"))]
#[repr(u8)]
pub enum OnServerDown {
    /// The kernel's behaviour: packets of clients are dropped until the server is added again or
    /// the connection expires; with the sysctl `expire_nodest_conn`, connections are removed.
    #[default]
    Kernel = 0,
    /// The director sends TCP resets to client and server, without waiting for a packet
    /// ([`Shard::end_down`](crate::Shard::end_down)); if it does not know the sequence numbers, at
    /// the next packet. For other protocols, the next packet is refused (ICMP port unreachable),
    /// and the packet after it opens a new connection.
    Reset = 1,
    /// The next packet opens a connection to another server. A TCP connection cannot move to
    /// another server: it is reset as with `Reset`, and its client connects again.
    Reschedule = 2,
    /// Connections end without a message: their packets are dropped for two minutes at most.
    Drop = 3,
}

impl OnServerDown {
    pub(crate) const fn from_bits(bits: u8) -> Self {
        match bits {
            1 => Self::Reset,
            2 => Self::Reschedule,
            3 => Self::Drop,
            _ => Self::Kernel,
        }
    }

    /// Whether the director resets the TCP connections of a removed server.
    pub const fn resets(self) -> bool {
        matches!(self, Self::Reset | Self::Reschedule)
    }
}

/// Settings of a service that the kernel's IPVS does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default, deny_unknown_fields))]
pub struct Extras {
    /// Action on the connections of a server that is removed.
    pub on_server_down: OnServerDown,
    /// Seconds in which a server that begins to accept connections reaches its full share, if
    /// another server of the service has accepted connections for at least this time; 0 means at
    /// once.
    pub slow_start: u32,
    /// List, for each server, the number of refusals and unanswered SYNs since it last answered a
    /// new connection ([`Server::unanswered`](crate::Server::unanswered), which also counts without
    /// this setting).
    #[cfg_attr(feature = "api", serde(skip_serializing_if = "core::ops::Not::not"))]
    pub count_unanswered: bool,
    /// Limits of the service's connections.
    #[cfg_attr(feature = "api", serde(skip_serializing_if = "Limits::is_off"))]
    pub limits: Limits,
}

impl Extras {
    /// Whether all of these settings are off, so that the service behaves like the kernel's.
    pub fn is_off(&self) -> bool {
        *self == Self::default()
    }
}

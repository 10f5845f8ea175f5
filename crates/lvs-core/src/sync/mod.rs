//! Connection synchronisation, without sockets: the messages of a master, the times at which they
//! are sent, and their effect on a backup.
//!
//! The caller starts a master with [`Control::start_master`](crate::Control::start_master), and
//! reads its messages from each shard
//! ([`Shard::take_sync_message`](crate::Shard::take_sync_message)) and from `Control`
//! ([`Control::take_sync_message`](crate::Control::take_sync_message)). The caller starts a backup
//! with [`Control::start_backup`](crate::Control::start_backup), and passes the payload of each
//! datagram to it ([`Control::handle_sync`](crate::Control::handle_sync)).
//!
//! [`bulk`] and [`services`] are not about these daemons, but about the replication between peers.

pub mod bulk;
mod queue;
pub mod services;
pub mod wire;

pub(crate) use self::queue::{
    HZ, Queue, Subject, latest_due, needed, sync_counted_template, sync_template,
};
use alloc::string::String;
use alloc::vec::Vec;

/// The default UDP port of a daemon; further threads use the next ports.
pub const PORT: u16 = 8848;
/// The default multicast group.
pub const GROUP: core::net::Ipv4Addr = core::net::Ipv4Addr::new(224, 0, 0, 81);

/// Maximum number of ports that a daemon uses (`IP_VS_SYNC_PORTS_MAX`).
pub const PORTS_MAX: u16 = 64;

/// A message of a master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Offset from the daemon's port. All messages about a connection have the same offset.
    pub port: u16,
    /// The payload of the datagram.
    pub bytes: Vec<u8>,
}

/// A master's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Master {
    /// The master's sync ID, in each message. A backup ignores messages with another sync ID,
    /// unless its own is 0.
    pub syncid: u8,
    /// Maximum length of a message: bytes of UDP payload.
    pub maxlen: u16,
    /// Number of ports to which connections are distributed, a power of two.
    /// [`Control::start_master`](crate::Control::start_master) sets it to the number of ports of a
    /// running backup, or else from `sync_ports`.
    pub ports: u16,
    /// Maximum number of entries in a message.
    pub count_max: u32,
}

impl Master {
    /// The settings that the kernel would use: `maxlen` is limited to the longest datagram. Its
    /// default is the payload of an Ethernet frame to an IPv4 or IPv6 group.
    pub fn new(syncid: u8, maxlen: Option<u16>, ipv6: bool) -> Self {
        let headers: u16 = if ipv6 { 48 } else { 28 };
        Self {
            syncid,
            maxlen: maxlen.map_or(1500 - headers, |len| len.clamp(1, u16::MAX - headers)),
            ports: 1,
            count_max: u32::MAX,
        }
    }

    /// Returns these settings with a limit of 255 entries in each message, because the count field
    /// has 8 bits. The kernel has no such limit and counts modulo 256, so that its backups lose 256
    /// entries of each longer message.
    pub fn counted(self) -> Self {
        Self {
            count_max: u8::MAX.into(),
            ..self
        }
    }
}

/// A backup's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backup {
    /// 0 accepts every message; another number accepts only messages with the same number.
    pub syncid: u8,
    /// Maximum length of a message in bytes; a longer message is truncated, and then ignored.
    pub maxlen: u16,
}

impl Backup {
    /// The settings that the kernel would use: `maxlen` is limited to between 1024 and the longest
    /// datagram. Its default is the payload of a packet of `mtu` bytes, or of 1500 if `mtu` is
    /// lower.
    pub fn new(syncid: u8, maxlen: Option<u16>, mtu: u32, ipv6: bool) -> Self {
        let headers: u16 = if ipv6 { 48 } else { 28 };
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX).max(1500);
        Self {
            syncid,
            maxlen: maxlen.map_or(mtu - headers, |len| len.clamp(1024, u16::MAX - headers)),
        }
    }
}

/// Number of ports that a daemon uses if it is started with this value of `sync_ports`, and no
/// other daemon is running.
pub fn ports(sysctl: u32) -> u16 {
    u16::try_from(sysctl)
        .unwrap_or(u16::MAX)
        .clamp(1, PORTS_MAX)
}

/// Role of a synchronisation daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(rename_all = "lowercase"))]
pub enum SyncRole {
    /// The daemon sends messages about connections.
    Master,
    /// The daemon receives messages about connections.
    Backup,
}

/// A synchronisation daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(deny_unknown_fields))]
pub struct SyncDaemon {
    /// The role of the daemon: master or backup.
    pub role: SyncRole,
    /// Interface of the multicast group.
    pub interface: String,
    /// Identifier of the synchronisation group, 0 to 255.
    #[cfg_attr(feature = "api", serde(default))]
    pub syncid: u8,
    /// Longest message in bytes; absent for the default.
    #[cfg_attr(
        feature = "api",
        serde(default, skip_serializing_if = "Option::is_none")
    )]
    pub maxlen: Option<u16>,
    /// Multicast group; absent for 224.0.0.81.
    #[cfg_attr(
        feature = "api",
        serde(default, skip_serializing_if = "Option::is_none")
    )]
    pub group: Option<core::net::IpAddr>,
    /// UDP port of the multicast group; absent for 8848.
    #[cfg_attr(
        feature = "api",
        serde(default, skip_serializing_if = "Option::is_none")
    )]
    pub port: Option<u16>,
    /// Time to live of the messages; absent for 1.
    #[cfg_attr(
        feature = "api",
        serde(default, skip_serializing_if = "Option::is_none")
    )]
    pub ttl: Option<u8>,
}

impl SyncDaemon {
    /// These settings, with the kernel's defaults in place of missing values, for an interface with
    /// this MTU. A port or a time to live of 0 counts as missing, and `maxlen` is limited as in
    /// [`Master::new`] or [`Backup::new`].
    #[must_use]
    pub fn completed(&self, mtu: u32) -> Self {
        let ipv6 = self.group.is_some_and(|group| group.is_ipv6());
        let maxlen = match self.role {
            SyncRole::Master => Master::new(self.syncid, self.maxlen, ipv6).maxlen,
            SyncRole::Backup => Backup::new(self.syncid, self.maxlen, mtu, ipv6).maxlen,
        };
        let given = |number: Option<u16>| number.filter(|&number| number != 0);
        Self {
            maxlen: Some(maxlen),
            group: Some(self.group.unwrap_or_else(|| GROUP.into())),
            port: Some(given(self.port).unwrap_or(PORT)),
            ttl: Some(self.ttl.filter(|&ttl| ttl != 0).unwrap_or(1)),
            ..self.clone()
        }
    }
}

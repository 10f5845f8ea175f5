//! Decisions about packets.

use core::net::SocketAddr;

mod edit;
mod shift;

pub use self::edit::{Edit, Replacement};
pub use self::shift::Shift;
pub(crate) use self::shift::is_after;
use crate::Forwarding;
use crate::tunnel::Tunnel;

/// Identifies a connection in one shard, until the connection is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub(crate) u32);

impl ConnId {
    /// The identifier of the connection in this slot, for tests.
    pub const fn from_index(index: u32) -> Self {
        Self(index)
    }
}

/// Identifies the record of a real server (one server in one service): an index that stays the same
/// as long as the record exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId(pub(crate) u32);

impl ServerId {
    /// The record's index, for tables with the same index, such as next hops.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The decision about a packet. Each packet gets exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the packet is lost unless the caller acts on the verdict"]
pub enum Verdict {
    /// A packet from the client to the server: transmit it by the connection's forwarding method.
    Forward(Forward),
    /// A packet from the server to the client: translate it if required, then route it like any
    /// packet in transit.
    Reply(Reply),
    /// The director does not handle the packet: pass it to the host's network stack (delivery or
    /// ordinary forwarding).
    Accept(AcceptReason),
    /// Answer with ICMP destination unreachable (port unreachable), whose source is the packet's
    /// destination address. Then drop the packet.
    Unreachable(DropReason),
    /// Answer the TCP segment with a reset whose source is the segment's destination (RFC 9293
    /// section 3.10.7.1), then drop the segment.
    Reset(DropReason),
    /// Discard the packet, and count the reason.
    Drop(DropReason),
}

/// Transmission of a packet towards a real server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The connection; `None` for a one-packet connection that has already ended.
    pub conn: Option<ConnId>,
    /// The real server; `None` if the connection has no server (bypass, or received by
    /// synchronisation for a server that is not configured).
    pub server: Option<ServerId>,
    /// NAT, full NAT, direct routing, tunnel, local or bypass.
    pub method: Forwarding,
    /// Address and port of the real server; with [`Forwarding::Bypass`], the packet's own
    /// destination.
    pub target: SocketAddr,
    /// Local address and port towards the server, if `method` is [`Forwarding::FullNat`].
    pub source: Option<SocketAddr>,
    /// The virtual address and port of the connection.
    pub virt: SocketAddr,
    /// Encapsulation, if `method` is [`Forwarding::Tunnel`].
    pub tunnel: Tunnel,
    /// Whether the packet opened the connection.
    pub new: bool,
    /// Translates acknowledgement numbers, including the edges of SACK blocks (RFC 2018), to the
    /// server's numbers: [`Shift::acknowledgement`]. `None` if they are the same.
    pub shift: Option<Shift>,
}

/// Transmission of a packet from a real server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The connection to which the packet belongs.
    pub conn: ConnId,
    /// The real server; `None` if the connection has no server.
    pub server: Option<ServerId>,
    /// The virtual address and port: the new source of the packet and, in an ICMP error, the new
    /// destination of the embedded packet. `None` leaves the packet unchanged, because the
    /// connection is not translated.
    pub source: Option<SocketAddr>,
    /// The client: the new destination of the packet and, in an ICMP error, the new source of the
    /// embedded packet. Set only for full NAT, where the server sends to a local address.
    pub destination: Option<SocketAddr>,
    /// Changes of the TCP segment by a helper.
    pub edit: Option<Edit>,
    /// Whether a through-VIP check opened the connection ([`Control::pin`](crate::Control::pin)).
    /// The check accepts replies only if they use the path of the replies to clients.
    pub probe: bool,
}

/// Declares an enumeration of reasons, each with a name and a description; the crates of this
/// project use it.
#[doc(hidden)]
#[macro_export]
macro_rules! reasons {
    ($(#[$meta:meta])* $name:ident { $($(#[doc = $doc:literal])+ $variant:ident => $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[doc = $doc])+ $variant,)+ }

        impl $name {
            /// Every reason, in the order of their indices.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// Returns the index of the reason in [`Self::ALL`], for arrays of counters.
            #[inline]
            pub const fn index(self) -> usize {
                self as usize
            }

            /// A stable name: the label in metrics and in listings.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }

            /// Meaning of the reason, in a sentence or two.
            pub const fn describe(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc),+).trim_ascii(),)+ }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

reasons! {
    /// Reason for discarding a packet.
    #[non_exhaustive]
    DropReason {
        /// The packet belongs to a connection whose real server was removed.
        ServerRemoved => "server_removed",
        /// The packet belongs to a connection whose server was removed, and the service's
        /// `on_server_down` requires that the packet is dropped, or refused by a reset or an ICMP
        /// error.
        ServerDown => "server_down",
        /// No real server of the service accepts a new connection.
        NoServer => "no_server",
        /// The table of connections or of persistence templates is full.
        TableFull => "table_full",
        /// The service has reached its limit of connections.
        ServiceFull => "service_full",
        /// The service has reached its limit of new connections per second.
        ServiceRate => "service_rate",
        /// The source has reached the limit of new connections a second for one source.
        SourceRate => "source_rate",
        /// The service's filter, or the director's, denies the source.
        Filtered => "filtered",
        /// The caller has passed a shard of another director.
        ForeignShard => "foreign_shard",
        /// The transport header is truncated.
        ShortHeader => "short_header",
        /// The packet is an ICMP error with a wrong checksum.
        IcmpChecksum => "icmp_checksum",
        /// The defence `drop_packet` selected the packet.
        DropPacket => "drop_packet",
        /// The persistence engine found no key in the packet.
        PersistenceEngine => "persistence_engine",
        /// The packet is from a real server and belongs to no connection; the server receives an
        /// ICMP error (`nat_icmp_send`).
        StrayReply => "stray_reply",
        /// The connection was received by synchronisation, and its tunnel matches no configured
        /// server.
        Unbound => "unbound",
        /// Full NAT has no free local port towards the server. Each additional local address has
        /// 64,512 ports. A connection that was received by synchronisation has no local port,
        /// either.
        NoLocalPort => "no_local_port",
        /// A rule that sets firewall marks drops the packet.
        MarkRule => "mark_rule",
        /// The packet belongs to an FTP control connection, and its TCP checksum is wrong.
        HelperChecksum => "helper_checksum",
        /// The packet belongs to an FTP control connection, and its sequence numbers do not match
        /// those of the connection.
        HelperSequence => "helper_sequence",
        /// The embedding program's own hook dropped the packet.
        Hook => "hook",
    }
}

impl DropReason {
    /// The reasons for which a packet that would open a connection of a service is dropped or
    /// refused.
    pub const REFUSALS: [Self; 9] = [
        Self::NoServer,
        Self::TableFull,
        Self::ServiceFull,
        Self::ServiceRate,
        Self::SourceRate,
        Self::Filtered,
        Self::DropPacket,
        Self::PersistenceEngine,
        Self::NoLocalPort,
    ];
}

reasons! {
    /// Reason for passing a packet to the host.
    #[non_exhaustive]
    AcceptReason {
        /// No service has this address, port or mark.
        NoService => "no_service",
        /// The packet belongs to no connection and may not open one: it is a TCP segment without
        /// SYN or with RST, or an SCTP packet without INIT.
        NotNew => "not_new",
        /// The director does not balance packets of this protocol.
        Protocol => "protocol",
        /// The source port is 20, which is never scheduled.
        SourcePort20 => "source_port_20",
        /// The packet is to a data port of an FTP service, and the service is not persistent or has
        /// no server for it.
        FtpData => "ftp_data",
        /// The packet is an ICMP error that belongs to no connection.
        UnrelatedIcmp => "unrelated_icmp",
        /// The packet belongs to no connection, and is an IPsec packet or only passes through the
        /// host. The host handles it.
        NoConnection => "no_connection",
        /// A backup daemon is running and `backup_only` is set.
        BackupOnly => "backup_only",
        /// The packet is the reply of a real server on this host to a client on this host.
        LocalReply => "local_reply",
        /// The host has decapsulated the packet, and `ignore_tunneled` is set.
        Tunneled => "tunneled",
        /// A rule that sets firewall marks passes the packet to the host.
        MarkRule => "mark_rule",
        /// The hook of the embedding program passed the packet to the host.
        Hook => "hook",
    }
}

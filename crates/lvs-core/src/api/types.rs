//! Parameters and answers of the control protocol's calls.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::attempts::RecentAttempts;
use crate::filter::{FilterLists, SourceFilter};
use crate::recent::RecentCount;
use crate::stats::{Counts, Stats};
use crate::{Error, Family, Protocol, ServerConfig, ServiceConfig, ServiceKey};

/// Version of the protocol; client and dataplane must use the same version.
pub const VERSION: u32 = 1;

/// The abstract Unix socket (without its leading NUL) of a dataplane that may not listen in
/// `/run/lvs`, or whose version is before 0.2. Each network namespace has its own abstract sockets.
pub const DEFAULT_SOCKET: &str = "lvs-dataplane";

/// Maximum number of packet workers.
pub const WORKERS_MAX: usize = 64;

/// The identification of a service in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "protocol", deny_unknown_fields)]
pub enum ServiceId {
    /// A TCP service.
    Tcp {
        /// Virtual address and port of the service.
        address: SocketAddr,
    },
    /// A UDP service.
    Udp {
        /// Virtual address and port of the service.
        address: SocketAddr,
    },
    /// An SCTP service.
    Sctp {
        /// Virtual address and port of the service.
        address: SocketAddr,
    },
    /// The service of a firewall mark.
    Fwmark {
        /// The firewall mark of the service's packets, not 0.
        mark: u32,
        /// Address family of the packets with the mark.
        family: Family,
    },
}

impl ServiceId {
    /// Protocol, virtual address and port; `None` for a mark.
    pub const fn endpoint(&self) -> Option<(Protocol, SocketAddr)> {
        match *self {
            Self::Tcp { address } => Some((Protocol::TCP, address)),
            Self::Udp { address } => Some((Protocol::UDP, address)),
            Self::Sctp { address } => Some((Protocol::SCTP, address)),
            Self::Fwmark { .. } => None,
        }
    }

    /// Virtual address and port; `None` for a mark.
    pub fn address(&self) -> Option<SocketAddr> {
        self.endpoint().map(|(_, address)| address)
    }
}

impl From<ServiceId> for ServiceKey {
    fn from(id: ServiceId) -> Self {
        match id {
            ServiceId::Tcp { address: addr } => Self::Address {
                protocol: Protocol::TCP,
                addr,
            },
            ServiceId::Udp { address: addr } => Self::Address {
                protocol: Protocol::UDP,
                addr,
            },
            ServiceId::Sctp { address: addr } => Self::Address {
                protocol: Protocol::SCTP,
                addr,
            },
            ServiceId::Fwmark { mark, family } => Self::Mark { family, mark },
        }
    }
}

impl From<ServiceKey> for ServiceId {
    /// Converts a key of a TCP, UDP or SCTP service or of a firewall mark. A director has no other
    /// keys; another protocol would become TCP.
    fn from(key: ServiceKey) -> Self {
        match key {
            ServiceKey::Address {
                protocol: Protocol::UDP,
                addr: address,
            } => Self::Udp { address },
            ServiceKey::Address {
                protocol: Protocol::SCTP,
                addr: address,
            } => Self::Sctp { address },
            ServiceKey::Address { addr: address, .. } => Self::Tcp { address },
            ServiceKey::Mark { family, mark } => Self::Fwmark { mark, family },
        }
    }
}

/// Identity and settings of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceSpec {
    /// Identity of the service.
    pub service: ServiceId,
    /// Settings of the service.
    pub config: ServiceConfig,
    /// Owner of the service, such as `lvsd` for a service from the configuration file of `lvsd`;
    /// absent for a manually added service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

/// Identity and settings of a real server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerSpec {
    /// The service to which the server belongs.
    pub service: ServiceId,
    /// Address and port of the server.
    pub server: SocketAddr,
    /// Settings of the server.
    pub config: ServerConfig,
}

/// The local addresses of full NAT.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalPool {
    /// Local addresses. The dataplane answers ARP and neighbour discovery for those that the host
    /// does not have.
    pub addresses: Vec<core::net::IpAddr>,
    /// Whether NAT also translates the client's address if replies would otherwise bypass the
    /// director.
    #[serde(default)]
    pub hairpin: bool,
}

/// Answer to [`Call::LocalGet`](super::Call::LocalGet).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LocalInfo {
    /// The addresses, in the order of the list that set them.
    pub addresses: Vec<LocalAddressInfo>,
    /// Whether NAT also translates the client's address if replies would otherwise bypass the
    /// director.
    pub hairpin: bool,
}

/// A local address of full NAT.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalAddressInfo {
    /// The local address.
    pub address: core::net::IpAddr,
    /// The first port that full NAT may use.
    pub first: u16,
    /// The last port that full NAT may use.
    pub last: u16,
    /// Number of connections that use the address.
    pub connections: u64,
}

/// Answer to [`Call::ServerUnpin`](super::Call::ServerUnpin).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpinned {
    /// Whether the pin was neither used nor expired: no packet of the pinned connection arrived, or
    /// each was dropped.
    pub unopened: bool,
}

/// Answer to [`Call::ServerReturnPath`](super::Call::ServerReturnPath).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReturnPath {
    /// The host that forwarded the latest indirect reply, even if later replies arrived directly.
    /// Absent if no reply was forwarded, if the interface of the reply was removed, or if the
    /// dataplane already stores the replies of 4,096 other servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forwarder: Option<Forwarder>,
}

/// A host that forwarded a server's reply to the director. The server should have sent the reply
/// directly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forwarder {
    /// MAC address of the forwarder.
    pub mac: String,
    /// The forwarder's IP address, if the host's neighbour table contains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<core::net::IpAddr>,
    /// The interface on which the reply arrived.
    pub interface: String,
    /// Time since the reply, in milliseconds.
    pub age_ms: u64,
}

/// Answer to [`Call::Hello`](super::Call::Hello).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The [`VERSION`] of the protocol that the dataplane uses.
    pub version: u32,
    /// Name and version of the dataplane, such as `lvs-dataplane 0.1.0`.
    pub dataplane: String,
    /// Size of the connection table, as ipvsadm prints it (`size=4096`).
    pub table_size: u32,
    /// Whether the client has write access.
    pub writable: bool,
}

/// Answer to [`Call::Info`](super::Call::Info).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Info {
    /// Process id of the dataplane.
    pub pid: u32,
    /// Seconds since the dataplane started.
    pub uptime: u64,
    /// Number of connections in the table.
    pub connections: u64,
    /// Maximum number of connections in the table.
    pub capacity: u64,
    /// The network interfaces that the dataplane uses.
    pub interfaces: Vec<InterfaceInfo>,
    /// Configured interfaces and addresses that do not exist on this host yet, or cannot be used.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<Waiting>,
    /// The reason why programs on this host cannot reach services at the host's own addresses;
    /// absent if they can, if there is no such service, or with the backend `tun`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_clients: Option<Waiting>,
    /// Virtual addresses that the dataplane owns.
    pub own_vips: Vec<core::net::IpAddr>,
    /// Virtual addresses that are announced by routes, or that will be
    /// ([`Call::VipsAnnounce`](super::Call::VipsAnnounce)).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub announced: Vec<AnnouncedVip>,
    /// Seconds since a client last set the announced addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub announced_ago: Option<u64>,
    /// The state of the replication from each peer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerStanding>,
    /// Comparison of each peer's services and servers with those of this director.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TablesInfo>,
    /// Addresses of services and of this host for which another host also answers ARP or neighbour
    /// discovery.
    pub conflicts: Vec<Conflict>,
    /// Next hops that do not answer ARP or neighbour discovery, at most 64.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub silent_hops: Vec<SilentHop>,
    /// Paths to servers whose MTU was too small for some requests, for a limited number of servers.
    pub too_big: Vec<TooBig>,
    /// Virtual ports that the FTP helper inspects; empty without the helper.
    pub ftp_ports: Vec<u16>,
    /// Counters of the director, removed services included.
    pub total: Stats,
    /// The dataplane's packet workers.
    pub workers: Vec<WorkerInfo>,
    /// The kernel fast path (`lvs-dataplane --fast-path`).
    pub fast_path: FastPathInfo,
    /// Counters of the synchronisation daemons.
    pub sync: SyncCounts,
    /// The restrictions that the dataplane has applied to itself.
    pub confinement: Confinement,
}

/// The restrictions that a process has applied to itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Confinement {
    /// The restrictions that are active: `seccomp`, `landlock`.
    pub by: Vec<String>,
    /// Restrictions that could not be applied, with the reason.
    pub not_by: Vec<String>,
}

impl core::fmt::Display for Confinement {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match (self.by.is_empty(), self.not_by.is_empty()) {
            (true, true) => f.write_str("not confined"),
            (false, true) => write!(f, "confined by {}", self.by.join(" and ")),
            (true, false) => write!(f, "not confined by {}", self.not_by.join(", ")),
            (false, false) => write!(
                f,
                "confined by {}, not by {}",
                self.by.join(" and "),
                self.not_by.join(", ")
            ),
        }
    }
}

/// A packet worker: a thread with a separate part of the connection table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerInfo {
    /// The worker's number, from 0.
    pub number: u32,
    /// The processor to which the worker is bound; absent if it is not bound.
    pub cpu: Option<u32>,
    /// Number of connections in this worker's part of the table.
    pub connections: u64,
    /// Maximum number of connections in its part of the table.
    pub capacity: u64,
    /// Number of frames that the worker has received.
    pub packets: u64,
    /// Number of frames that were lost because they arrived faster than the worker read them.
    pub lost: u64,
    /// Number of frames that the worker received and passed to the worker that has their
    /// connection.
    pub handed_over: u64,
    /// Number of frames that the worker received from other workers.
    pub taken: u64,
    /// Number of frames that were dropped because the queue of the worker that has their connection
    /// was full.
    pub busy: u64,
    /// Number of times that the worker was demoted from real-time scheduling, because it used more
    /// than half of a processor.
    pub demoted: u64,
    /// Connections, packets and bytes of the worker.
    pub counts: Counts,
}

/// Counters of all synchronisation daemons since the dataplane started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SyncCounts {
    /// Number of messages that a master has sent.
    pub sent: u64,
    /// Number of bytes of the sent messages.
    pub sent_bytes: u64,
    /// Number of messages that were not sent because the queue had its maximum length
    /// (`sync_qlen_max`).
    pub queue_full: u64,
    /// Number of messages that could not be sent on the interface.
    pub not_sent: u64,
    /// Number of datagrams that a backup has received.
    pub received: u64,
    /// Number of bytes of the received messages.
    pub received_bytes: u64,
    /// Number of received connections and templates that were added to the table or updated in it.
    pub taken: u64,
    /// Number of datagrams that were dropped because the buffer of a socket was full.
    pub lost: u64,
    /// Number of datagrams that were longer than the longest message.
    pub too_long: u64,
    /// Number of messages that were damaged as a whole or in part.
    pub malformed: u64,
    /// Number of messages whose sync ID differs from the sync ID of the backup.
    pub other_id: u64,
    /// Number of received connections and templates that were ignored because their content is
    /// invalid or contradictory.
    pub nonsense: u64,
    /// Number of received connections and templates that were dropped because the table was full.
    pub no_room: u64,
}

impl SyncCounts {
    /// The counters of lost and refused messages and connections, each with its name in the answer
    /// to [`Call::Drops`](super::Call::Drops).
    pub const fn losses(&self) -> [(&'static str, u64); 8] {
        [
            ("sync_queue_full", self.queue_full),
            ("sync_not_sent", self.not_sent),
            ("sync_lost", self.lost),
            ("sync_too_long", self.too_long),
            ("sync_malformed", self.malformed),
            ("sync_other_id", self.other_id),
            ("sync_nonsense", self.nonsense),
            ("sync_no_room", self.no_room),
        ]
    }
}

/// Answer to [`Call::SyncGet`](super::Call::SyncGet): peers (`lvs-dataplane --sync-peer`), and
/// counters since the dataplane started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SyncState {
    /// Whether this director no longer waits for connections of its peers: it has received them,
    /// except from peers that were unreachable for too long or never sent some of them, or it is
    /// configured not to wait. Always true without peers. Once it is true, it stays true.
    pub ready: bool,
    /// The first peer for which the director waits, and the step that remains; empty if the
    /// director is ready.
    pub waits_for: String,
    /// Address that peers connect to; absent without peers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// The configured peer directors.
    pub peers: Vec<PeerInfo>,
    /// Number of connections that this director owns and replicates, because their packets arrive
    /// at this director.
    pub replicated: u64,
    /// Number of items sent to peers: connections, templates, and removals of connections.
    pub items_sent: u64,
    /// Number of bytes of the items and digests that were sent to peers.
    pub bytes_sent: u64,
    /// Number of items received from peers.
    pub items_received: u64,
    /// Received items that were added to the table or updated in it.
    pub taken: u64,
    /// Number of connections that were removed because they ended at a peer.
    pub ended: u64,
    /// Number of received items that were ignored because this director owns the connection (its
    /// latest packet arrived here), or has another connection of this client in its place.
    pub kept: u64,
    /// Number of received items that were ignored because their content is invalid or
    /// contradictory.
    pub nonsense: u64,
    /// Number of received connections and templates that were dropped because the table was full.
    pub no_room: u64,
    /// Number of requests of peers to resend missing items.
    pub repairs: u64,
    /// Number of full syncs caused by an overflow of the outgoing queue of a peer.
    pub full_syncs: u64,
    /// Number of TCP connections that were refused because their source address does not belong to
    /// a peer.
    pub refused_address: u64,
    /// Number of TCP connections from a peer's address that were refused because two other
    /// connections from this address had not authenticated yet.
    pub refused_places: u64,
    /// Number of TCP connections from and to peers that ended in the handshake, for example because
    /// one side did not prove that it has the key.
    pub refused_key: u64,
    /// Number of TCP connections with peers that were closed because a frame was changed, repeated
    /// or too long.
    pub forged: u64,
    /// Number of TCP connections with peers that were closed because of an invalid frame.
    pub malformed: u64,
    /// Comparison of each peer's services and servers with those of this director.
    pub tables: Vec<TablesInfo>,
    /// Number of services that are not compared, because there are more than the maximum number.
    pub tables_beyond: u64,
}

/// Comparison of a peer's services and servers with those of this director.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TablesInfo {
    /// The peer whose services and servers are compared.
    pub peer: SocketAddr,
    /// The result of the last comparison.
    pub state: TablesState,
    /// Number of services that differ.
    #[serde(default)]
    pub differ: u64,
    /// Seconds since the oldest present difference appeared; 0 if no service differs.
    #[serde(default)]
    pub seconds: u64,
}

/// Result of a comparison of the services and servers of two directors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TablesState {
    /// Unknown: the peer is disconnected, or has not sent all of its digests yet.
    #[default]
    Unknown,
    /// The peer sends no digests of its services, because it runs an older version.
    Older,
    /// The compared services and servers are equal.
    Alike,
    /// Services or servers differ, as they do for a moment after each change at one director.
    Differ,
    /// Services or servers have differed for longer than `lvs-dataplane --sync-alarm`.
    Alarm,
}

/// A service whose settings or servers differ at a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableDifference {
    /// The service that differs.
    pub service: ServiceId,
    /// Seconds for which the service has differed.
    pub seconds: u64,
    /// Whether this director has the service.
    pub here: bool,
    /// Whether the peer has the service.
    pub there: bool,
}

/// Preference of the route by which this director announces a virtual address. Routers should use
/// the route of the director with the greatest preference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    /// The address is not announced by a route.
    #[default]
    Withdrawn,
    /// A route with the protocol [`Standing::LEAVING`]: routers should prefer the route of another
    /// director.
    Leaving,
    /// A route with the protocol [`Standing::ANNOUNCED`]: routers may use this director.
    Announced,
}

impl Standing {
    /// The protocol (`proto` of `ip route`) of routes to announced addresses. The kernel, BIRD,
    /// FRR, systemd and keepalived use other values.
    pub const ANNOUNCED: u8 = 77;
    /// The protocol of routes to addresses whose traffic another director should receive.
    pub const LEAVING: u8 = 78;

    /// The preference as one word, as in the protocol.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Withdrawn => "withdrawn",
            Self::Leaving => "leaving",
            Self::Announced => "announced",
        }
    }

    /// The protocol number of the route; `None` without a route.
    pub const fn protocol(self) -> Option<u8> {
        match self {
            Self::Withdrawn => None,
            Self::Leaving => Some(Self::LEAVING),
            Self::Announced => Some(Self::ANNOUNCED),
        }
    }
}

/// Parameters of [`Call::VipsAnnounce`](super::Call::VipsAnnounce).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnnounceSpec {
    /// All addresses that routes must announce, at most [`ANNOUNCED_MAX`].
    pub addresses: Vec<AnnounceVip>,
    /// Seconds after which the announcement expires unless the client repeats the call. After ten
    /// seconds without a repetition, the preference is at most [`Standing::Leaving`].
    pub hold: u32,
}

/// Maximum number of addresses that a dataplane announces by routes.
pub const ANNOUNCED_MAX: usize = 4096;

/// One address of [`AnnounceSpec::addresses`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnnounceVip {
    /// The virtual address to announce.
    pub address: core::net::IpAddr,
    /// Preference of the route. If absent, the preference is unchanged; for a new address, it is
    /// [`Standing::Withdrawn`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standing: Option<Standing>,
}

/// Answer to [`Call::VipsAnnounce`](super::Call::VipsAnnounce).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcements {
    /// The virtual addresses that routes announce now or will announce.
    pub announced: Vec<AnnouncedVip>,
}

/// A virtual address, and the preference of its route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnnouncedVip {
    /// The virtual address to announce.
    pub address: core::net::IpAddr,
    /// Preference of the present route.
    pub standing: Standing,
    /// The reason why the route differs from the request; empty if it does not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub trouble: String,
}

/// State of a peer, and of the replication between it and this director.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerInfo {
    /// Address at which the peer accepts connections.
    pub address: SocketAddr,
    /// `away` (the peer cannot be reached, or has closed the connection), `refused` (the handshake
    /// or the protocol failed), `bulk` (full sync, or the first comparison after it), `behind`
    /// (updates are missing), `silent` (no comparison of the connections for four seconds) or `in
    /// step` (no update is missing).
    pub state: String,
    /// The reason why the peer is disconnected or refused; empty otherwise.
    #[serde(default)]
    pub trouble: String,
    /// Number of connections that the peer owns, according to its last digest; 0 while it is
    /// disconnected.
    #[serde(default)]
    pub replicated: u64,
    /// Number of the peer's connections that this director stores as replicas.
    #[serde(default)]
    pub borrowed: u64,
    /// Lower bound for the number of the peer's connections that this director does not have; 0
    /// while the peer is disconnected.
    #[serde(default)]
    pub missing: u64,
    /// Milliseconds since the peer's replicated connections were last compared with those of this
    /// director.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_ms: Option<u64>,
    /// Number of connections and templates that the peer sent in its last full sync.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bulk_connections: Option<u64>,
    /// Duration of the last full sync, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bulk_ms: Option<u64>,
    /// Seconds since the last full sync.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bulk_ago: Option<u64>,
    /// Whether the peer has subscribed to the connections of this director.
    #[serde(default)]
    pub listens: bool,
    /// Milliseconds that the peer took to confirm the last update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_ms: Option<u64>,
    /// The first services that differ at the peer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TableDifference>,
}

/// State of the replication from one peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerStanding {
    /// Address of the peer, as [`PeerInfo::address`].
    pub peer: SocketAddr,
    /// State of the replication, as [`PeerInfo::state`], or [`ABSENT`](Self::ABSENT).
    pub state: String,
    /// Seconds for which the peer has been out of sync, at most since this dataplane started; 0
    /// while it is in sync.
    #[serde(default)]
    pub seconds: u64,
    /// Number of missing connections, as [`PeerInfo::missing`].
    #[serde(default)]
    pub missing: u64,
    /// The reason why the peer is disconnected, as [`PeerInfo::trouble`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub trouble: String,
}

impl PeerStanding {
    /// State of a peer that `lvsd` configures, and that the running dataplane does not have.
    pub const ABSENT: &str = "absent";

    /// Number of seconds after which a peer that is still not in sync needs an operator's
    /// attention. A peer that has just started is usually in sync earlier.
    pub const ALARM: u64 = 10;

    /// Whether this director has all connections of the peer, according to the latest comparison.
    pub fn is_in_step(&self) -> bool {
        self.state == "in step"
    }

    /// Whether the peer has been out of sync for so long that an operator should examine it.
    pub fn is_alarming(&self) -> bool {
        !self.is_in_step() && self.seconds >= Self::ALARM
    }
}

/// State of the kernel fast path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FastPathInfo {
    /// Whether the kernel fast path is configured.
    pub wanted: bool,
    /// Whether connections are forwarded by the kernel fast path.
    pub active: bool,
    /// Attachment method of the tc programs of the kernel fast path, if the fast path was opened:
    /// `tcx` or `clsact`.
    pub attached_by: String,
    /// The reason why the kernel fast path forwards no packets although it is configured; empty
    /// otherwise.
    pub reason: String,
    /// A command or setting that resolves the problem in `reason`; empty without a reason.
    #[serde(alias = "remedy")]
    pub fix: String,
}

/// Requests that were too long for the path to a server and must not be fragmented. For each of
/// them, the director sends an ICMP error to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TooBig {
    /// IP address of the server.
    pub server: core::net::IpAddr,
    /// Whether the path leads through a tunnel.
    pub tunnel: bool,
    /// Length in bytes of the longest IP packet that fits the path.
    pub room: u32,
    /// Length in bytes of the longest received packet.
    pub longest: u32,
    /// Number of requests that were too long.
    pub packets: u64,
}

/// Another host that answers ARP or neighbour discovery for an address of this director.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conflict {
    /// `vip_conflict` for a virtual address, `address_conflict` for another address of this host.
    #[serde(default = "vip_conflict")]
    pub code: String,
    /// The address for which the other host answers.
    pub address: core::net::IpAddr,
    /// Link-layer address of the other host.
    pub mac: String,
    /// The interface on which the other host answers.
    #[serde(default)]
    pub interface: String,
    /// Link-layer address of this director's interface.
    #[serde(default)]
    pub own_mac: String,
    /// An IP address of the other host besides `address`, if one is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<core::net::IpAddr>,
    /// Number and times of the other host's answers and announcements.
    #[serde(flatten)]
    pub answers: RecentCount,
}

/// Default of [`Conflict::code`]: older dataplanes send no code, and report only conflicts of
/// virtual addresses.
fn vip_conflict() -> String {
    Conflict::VIP.to_owned()
}

impl Conflict {
    /// The code of a conflict about a virtual address.
    pub const VIP: &str = "vip_conflict";
    /// The code of a conflict about another address of this host.
    pub const ADDRESS: &str = "address_conflict";
    /// All codes of conflicts.
    pub const CODES: [&str; 2] = [Self::VIP, Self::ADDRESS];

    /// Whether the address is a virtual one.
    pub fn is_vip(&self) -> bool {
        self.code == Self::VIP
    }
}

/// A next hop towards servers or clients that does not answer ARP or neighbour discovery.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SilentHop {
    /// Address of the next hop.
    pub address: core::net::IpAddr,
    /// The interface on which the kernel requests the link-layer address of the next hop.
    pub interface: String,
    /// Seconds since the kernel reported that the next hop does not answer.
    #[serde(default)]
    pub since: u64,
}

/// An interface of the dataplane that is down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DownInterface {
    /// Name of the interface that is down.
    pub interface: String,
    /// Seconds since it went down, as [`InterfaceInfo::down_since`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
}

/// An interface that the dataplane uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceInfo {
    /// Name of the interface.
    pub name: String,
    /// The backend of the interface: `af_packet` or `tun`.
    pub backend: String,
    /// The interface's MTU in bytes.
    pub mtu: u32,
    /// Whether the interface is up.
    pub up: bool,
    /// Seconds since the interface went down, or since the dataplane first saw it down; `None`
    /// while it is up, and for a TUN device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_since: Option<u64>,
    /// Frames that were lost because they arrived faster than the dataplane read them.
    #[serde(default)]
    pub lost: u64,
    /// The hook at which the kernel fast path first processes the frames of this interface: `xdp`
    /// or `tc`; `None` if the kernel fast path is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fast_path: Option<String>,
    /// The reason why the dataplane has not chosen XDP with `--xdp auto`; `None` otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_xdp: Option<NoXdp>,
}

/// The reason why the dataplane does not use XDP at an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NoXdp {
    /// Stable code of the reason: one of [`NoXdp::CODES`].
    pub code: String,
    /// The reason as a text for operators.
    pub reason: String,
    /// A command or setting that permits XDP, and its cost.
    pub fix: String,
}

impl NoXdp {
    /// XDP is not used because the kernel does not report the features of the interface.
    pub const UNREPORTED: &str = "xdp_unreported";
    /// The driver has no native XDP.
    pub const UNSUPPORTED: &str = "xdp_unsupported";
    /// The interface has an XDP program of another owner.
    pub const PROGRAM: &str = "xdp_program";
    /// The interface is a port of a bridge or bond.
    pub const PORT: &str = "xdp_port";
    /// The interface is a bond.
    pub const BOND: &str = "xdp_bond";
    /// The interface merges received packets.
    pub const AGGREGATION: &str = "xdp_aggregation";
    /// The interface removes VLAN tags.
    pub const VLAN: &str = "xdp_vlan";
    /// The driver refuses the program.
    pub const REFUSED: &str = "xdp_refused";
    /// The interface cannot send frames without socket buffers.
    pub const NO_TRANSMIT: &str = "xdp_no_transmit";
    /// All codes of reasons.
    pub const CODES: [&str; 9] = [
        Self::UNREPORTED,
        Self::UNSUPPORTED,
        Self::PROGRAM,
        Self::PORT,
        Self::BOND,
        Self::AGGREGATION,
        Self::VLAN,
        Self::REFUSED,
        Self::NO_TRANSMIT,
    ];
}

/// A configured interface or address that does not exist or cannot be used yet: the dataplane uses
/// it as soon as it can. In [`Info::local_clients`], a reason why programs on this host cannot
/// reach services.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Waiting {
    /// Stable code of the condition: one of [`Waiting::CODES`].
    pub code: String,
    /// The condition as a text for operators.
    pub what: String,
    /// A command or setting that resolves the condition.
    pub fix: String,
    /// Seconds since the dataplane found the condition; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
}

impl Waiting {
    /// The host does not have a configured interface.
    pub const MISSING: &str = "interface_missing";
    /// A configured interface is down, and the backend is tun.
    pub const DOWN: &str = "interface_down";
    /// A configured interface is not an Ethernet interface.
    pub const NOT_ETHERNET: &str = "interface_not_ethernet";
    /// A configured interface exists, but the dataplane does not use it yet.
    pub const UNUSED: &str = "interface_unused";
    /// The dataplane cannot use an interface: the text contains the error.
    pub const UNUSABLE: &str = "interface_unusable";
    /// The host does not have the address at which peers connect.
    pub const LISTEN_MISSING: &str = "sync_listen_missing";
    /// Programs on this host cannot reach services at the host's own addresses.
    pub const LOCAL_CLIENTS_OFF: &str = "local_clients_off";
    /// All codes of conditions.
    pub const CODES: [&str; 7] = [
        Self::MISSING,
        Self::DOWN,
        Self::NOT_ETHERNET,
        Self::UNUSED,
        Self::UNUSABLE,
        Self::LISTEN_MISSING,
        Self::LOCAL_CLIENTS_OFF,
    ];
}

/// A service in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceInfo {
    /// Identity of the service.
    pub service: ServiceId,
    /// Settings of the service.
    pub config: ServiceConfig,
    /// Owner of the service, as in [`ServiceSpec::owner`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Counters of the service.
    pub stats: Stats,
    /// Number of packets that would have opened a connection, and that were dropped or refused
    /// instead (no server, a limit, a filter), since the service was added.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub refused: u64,
    /// The packets counted in `refused`, by reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refusals: Vec<Refusals>,
    /// Packets of the service's connections that were dropped or refused since the service was
    /// added, by reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drops: Vec<Refusals>,
    /// The real servers in the kernel's list order: the most recently added one is first.
    pub servers: Vec<ServerInfo>,
}

/// Packets of a service that were dropped or refused for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusals {
    /// Name of the reason, as in [`ReasonCount`].
    pub reason: String,
    /// Number and times of the packets.
    #[serde(flatten)]
    pub packets: RecentCount,
}

const fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A real server in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerInfo {
    /// Address and port of the server.
    pub server: SocketAddr,
    /// Settings of the server.
    pub config: ServerConfig,
    /// Number of connections in active states.
    pub active: u32,
    /// Number of connections in inactive states.
    pub inactive: u32,
    /// Number of persistence templates of the server.
    pub persistent: u32,
    /// Whether the server has reached its upper threshold, and has not fallen below the lower
    /// threshold since.
    pub overloaded: bool,
    /// The server's weight before it became 0; absent if the weight is not 0, or the scheduler does
    /// not use this value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_weight: Option<i32>,
    /// Percentage of the weight that applies during a slow start; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_start: Option<u8>,
    /// Microseconds until the server answers a new connection, as a moving average; absent without
    /// a measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<u64>,
    /// Number of refused new connections, and of repeated SYNs without an answer, since the server
    /// last answered a new connection; absent if the service's `count_unanswered` is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unanswered: Option<u32>,
    /// Connections that clients opened to the server; absent if there were none.
    #[serde(default, skip_serializing_if = "RecentAttempts::is_empty")]
    pub attempts: RecentAttempts,
    /// Counters of the server.
    pub stats: Stats,
}

impl ServerInfo {
    /// A listing entry of a server without connections, measurements and counts.
    pub fn new(server: SocketAddr, config: ServerConfig) -> Self {
        Self {
            server,
            config,
            active: 0,
            inactive: 0,
            persistent: 0,
            overloaded: false,
            last_weight: None,
            slow_start: None,
            latency_us: None,
            unanswered: None,
            attempts: RecentAttempts::default(),
            stats: Stats::default(),
        }
    }
}

/// A connection or a persistence template in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnInfo {
    /// IP protocol number; 0 for a template of a firewall mark.
    pub protocol: u8,
    /// Address and port of the client; port 0 for a template.
    pub client: SocketAddr,
    /// Virtual address and port of the connection or template.
    #[serde(rename = "virtual")]
    pub virt: SocketAddr,
    /// Real server's address and port.
    pub server: SocketAddr,
    /// State with the kernel's name, such as `ESTABLISHED`.
    pub state: String,
    /// Milliseconds until the entry expires.
    pub expires_ms: u64,
    /// Forwarding method of the connection or template.
    pub forwarding: crate::Forwarding,
    /// Whether the entry is a persistence template.
    #[serde(default)]
    pub template: bool,
    /// Whether the entry was received from another director: in a synchronisation message or an
    /// update of a peer.
    #[serde(default)]
    pub synced: bool,
    /// Name of the persistence engine and its data (bytes, for SIP the Call-ID).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<(String, Vec<u8>)>,
}

/// The result with which a listing ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListEnd {
    /// Number of items in the listing.
    pub count: u64,
}

/// The timeouts of `ipvsadm --set`, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timeouts {
    /// Timeout of the state TCP ESTABLISHED.
    pub tcp: u32,
    /// Timeout of the state TCP FIN_WAIT.
    pub tcp_fin: u32,
    /// Timeout of UDP connections.
    pub udp: u32,
}

/// A sysctl under the kernel's own name, with its value as the kernel writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sysctl {
    /// The kernel's name of the sysctl, such as `conn_reuse_mode`.
    pub name: String,
    /// The value, such as `1`, or `3 50` for `sync_threshold`.
    pub value: String,
}

/// Parameters of [`Call::FilterSet`](super::Call::FilterSet): a filter of new connections by source
/// prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterSpec {
    /// The service whose filter is replaced; if absent, the director's filter, which applies to all
    /// services.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceId>,
    /// The prefixes; empty for a filter that is off.
    #[serde(flatten)]
    pub filter: SourceFilter,
}

/// A listing entry of a filter; a long filter has several entries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterItem {
    /// The service to which the filter belongs; absent for the director's filter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceId>,
    /// The prefixes that the filter allows and denies, or a part of them.
    #[serde(flatten)]
    pub lists: FilterLists,
}

/// A rule that sets a firewall mark, in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkText {
    /// Position of the rule in the list, from 1.
    pub position: usize,
    /// The rule as text, as [`MarkRule::parse`](crate::mark::MarkRule::parse) reads it.
    pub rule: String,
    /// Number of packets to which the rule was applied.
    pub packets: u64,
}

/// A counter in the answer to [`Call::Drops`](super::Call::Drops): packets, connections or
/// synchronisation messages to which the same happened for the same reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReasonCount {
    /// `drop` or `host` (passed to the host, or reinjected into it). With the kernel fast path also
    /// `kernel` (forwarded by it) or `up` (passed by it to the dataplane).
    pub action: String,
    /// Name of the reason, as in `lvsadm drops`.
    pub reason: String,
    /// Number and times of the packets, with a precision of ten seconds.
    #[serde(flatten)]
    pub packets: RecentCount,
    /// Meaning of the reason, as a text for operators.
    pub help: String,
    /// Action that removes the cause.
    #[serde(default, alias = "remedy")]
    pub fix: String,
}

/// A filter of captured packets: a packet must match all given fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CaptureFilter {
    /// IP protocol number of the packets; absent for all protocols.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u8>,
    /// Addresses, each of which must be the source or the destination of the packet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<core::net::IpAddr>,
    /// Ports, each of which must be the source or the destination port of the packet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    /// Whether to show only packets that are dropped or refused.
    pub dropped: bool,
}

/// A packet in a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CapturedPacket {
    /// Time of arrival in microseconds since 1970.
    pub time_us: u64,
    /// The interface on which the packet arrived.
    pub interface: String,
    /// Whether the frame begins with an Ethernet header; otherwise it begins with an IP header.
    pub ethernet: bool,
    /// The frame as it arrived, in hexadecimal. An item with an empty frame only shows that the
    /// dataplane is running.
    pub frame: String,
    /// The dataplane's decision about the packet.
    pub verdict: String,
    /// Number of packets that this capture has lost so far, because its client reads too slowly.
    pub lost: u64,
}

/// The refusal of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Code of the failure, for programs.
    pub code: FailureCode,
    /// Message for operators: what is refused and why, and a fix if there is one.
    pub message: String,
    /// Number of the change that was refused, from 0, in a refused
    /// [`Call::Apply`](super::Call::Apply).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<usize>,
}

impl Failure {
    /// Creates a refusal without the number of a change.
    pub fn new(code: FailureCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            change: None,
        }
    }
}

impl From<Error> for Failure {
    /// Converts an error to a failure: with the code for this error, and with its text as the
    /// message.
    fn from(error: Error) -> Self {
        let code = match error {
            Error::ServiceExists | Error::ServerExists => FailureCode::Exists,
            Error::NoService => FailureCode::NoService,
            Error::NoServer | Error::UnknownSysctl => FailureCode::NoServer,
            Error::NoDevice => FailureCode::NoDevice,
            Error::DaemonRunning => FailureCode::Running,
            Error::DaemonNotRunning => FailureCode::NotRunning,
            Error::UnknownScheduler | Error::UnknownEngine | Error::UnknownHelper => {
                FailureCode::NoScheduler
            }
            Error::WeightRange | Error::ThresholdRange => FailureCode::Range,
            Error::TooManyPins => FailureCode::Full,
            Error::LocalAddressNeeded => FailureCode::NoLocalAddress,
            Error::Unsupported(_) | Error::FullNatOnePacket => FailureCode::Unsupported,
            _ => FailureCode::Invalid,
        };
        Self::new(code, alloc::string::ToString::to_string(&error))
    }
}

/// Kinds of refusals. The kinds up to [`Running`](Self::Running) correspond to the error numbers
/// that the kernel would return to `ipvsadm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    /// The service or server already exists (EEXIST).
    Exists,
    /// The service does not exist (ESRCH).
    NoService,
    /// The real server or the sysctl does not exist (ENOENT).
    NoServer,
    /// The scheduler, persistence engine or helper does not exist (ENOENT).
    NoScheduler,
    /// A value that is not allowed (EINVAL).
    Invalid,
    /// A number out of range (ERANGE).
    Range,
    /// Not enough memory, or a limit is exceeded (ENOMEM).
    Full,
    /// The caller may not do this (EPERM).
    Permission,
    /// The network interface does not exist (ENODEV).
    NoDevice,
    /// The interface of a synchronisation daemon is down (ENETUNREACH).
    Unreachable,
    /// No daemon of that role is running (ESRCH).
    NotRunning,
    /// A daemon of that role is running (EEXIST).
    Running,
    /// Full NAT requires a local address of the service's family, and none is configured.
    NoLocalAddress,
    /// This dataplane does not support the call or this combination of settings.
    Unsupported,
    /// The line is not a request.
    Malformed,
    /// The client uses another version of the protocol.
    Version,
    /// An internal error of the dataplane.
    Internal,
}

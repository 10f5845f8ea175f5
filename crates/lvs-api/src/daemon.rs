//! The control socket of `lvsd`, the daemon that configures a dataplane from a file.
//!
//! The socket has the name of the dataplane's socket with `.lvsd` appended, and its protocol is
//! HTTP. Among other requests, `GET /v1/status` is answered by [`Status`], `POST /v1/admin`,
//! `/v1/maintenance` and `/v1/reload` make changes, and `GET /v1/events` returns or streams
//! [`Event`]s. A refusal is `{"error": {"message": "..."}}`.

mod client;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use lvs_core::api::{
    AnnouncedVip, Confinement, Conflict, DownInterface, PeerStanding, ReasonCount, Refusals,
    ServiceId, SilentHop, SyncCounts, TablesInfo, Waiting,
};
use lvs_core::attempts::RecentAttempts;
use serde::{Deserialize, Serialize};

use super::Address;
use super::peer::{self, Own};

pub use client::Client;

/// Maximum length of a reason and of an operator's name, in characters.
pub const WORDS_MAX: usize = 200;

/// The address of lvsd's control socket, for the dataplane at `dataplane`.
pub fn socket(dataplane: &Address) -> Address {
    match dataplane {
        Address::Abstract(name) => Address::Abstract([name, &b".lvsd"[..]].concat()),
        Address::Usual(path) | Address::Path(path) => {
            let mut name = path.as_os_str().to_owned();
            name.push(".lvsd");
            Address::Path(name.into())
        }
    }
}

/// Checks that the client of `socket` may make changes. Members of `group` may, and so may all
/// processes that [`Own::trusts`] accepts, as for a dataplane. `uid` and `gid` are the client's
/// user and primary group; `pid` is its process id in the PID namespace of this process.
///
/// # Errors
///
/// The reason for the refusal.
pub fn may_change(
    socket: &impl AsFd,
    (uid, gid): (u32, u32),
    pid: u32,
    group: Option<u32>,
) -> Result<(), String> {
    if group.is_some_and(|group| is_member(socket, gid, group)) {
        return Ok(());
    }
    let trusted = Own::look().trusts(uid, || peer::root(pid, || true));
    trusted.map_err(|refusal| refusal.to_string())
}

/// Whether the client of `socket`, with the primary group `gid`, is a member of `group`; false if
/// the kernel does not report the client's groups.
pub fn is_member(socket: &impl AsFd, gid: u32, group: u32) -> bool {
    gid == group || lvs_sys::peer_groups::peer_in_group(socket, group).unwrap_or(false)
}

/// A request to start or end the maintenance of the director.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaintenanceSpec {
    /// True to start the maintenance, false to end it.
    pub on: bool,
    /// The operator who requests the change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// The operator's reason for the change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The maintenance of a director, from its start to its end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maintenance {
    /// Start of the maintenance, in seconds since 1970.
    pub since: u64,
    /// The operator who started the maintenance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// The operator's reason for the maintenance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The state of a director in a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DirectorStatus {
    /// The maintenance of this director; `None` if it is not in maintenance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<Maintenance>,
    /// The state of VRRP; `None` without `[vrrp]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vrrp: Option<VrrpStatus>,
    /// The virtual addresses that routes announce; `None` if the configuration announces none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub announce: Option<AnnounceStatus>,
    /// Peers in the configuration file with which the running dataplane does not replicate, because
    /// it was started without them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing_peers: Vec<SocketAddr>,
    /// Warnings about this director, as text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl DirectorStatus {
    /// Whether all values are defaults, as for a single director without maintenance and without
    /// warnings.
    pub fn is_alone(&self) -> bool {
        *self == Self::default()
    }
}

/// The VRRP state of a director.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VrrpStatus {
    /// The last state from keepalived: `unknown`, `backup`, `master`, `fault` or `stopped`.
    pub state: String,
    /// Whether this director may own the virtual addresses: the state is `master`, and the
    /// dataplane is ready or has not answered yet.
    pub active: bool,
    /// Whether the dataplane answers, has all peers of the configuration file, and no longer waits
    /// for their connections.
    pub ready: bool,
    /// The condition that must be met before `ready` is true; empty if it is.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub waits_for: String,
    /// The number that keepalived adds to the VRRP priority of this director; -254 or less is a
    /// fault for keepalived.
    pub track: i16,
    /// Errors with the track file and the FIFO of keepalived.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub trouble: Vec<String>,
    /// The number of changes of state from keepalived.
    pub changes: u64,
    /// The number of lines from keepalived that were ignored, because they were invalid or too
    /// long.
    pub ignored: u64,
}

/// The routes that a director announces through the routing daemon on the same host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AnnounceStatus {
    /// Whether the dataplane answers, has all peers of the configuration file, and no longer waits
    /// for their connections.
    pub ready: bool,
    /// The condition that must be met before `ready` is true; empty if it is.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub waits_for: String,
    /// The virtual addresses to announce, and their routes.
    pub addresses: Vec<AnnouncedVip>,
    /// The reason why lvsd cannot send the addresses to the dataplane; empty if it can.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub trouble: String,
}

/// The administrative state of a server, which takes precedence over the configuration file and the
/// server's health.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AdminState {
    /// No override.
    #[default]
    Ready,
    /// The server gets no new connections; its present connections continue.
    Drain,
    /// The server gets no new connections. After the time `drain` of the service, the server is
    /// removed from the service.
    Maintenance,
}

impl AdminState {
    /// The name of the state.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Drain => "drain",
            Self::Maintenance => "maintenance",
        }
    }
}

/// The servers to which an override applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// The service of the servers; `None` for all services.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceKey>,
    /// The address of the servers.
    pub host: IpAddr,
    /// The port of the servers; `None` for all ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
}

/// A [`ServiceId`] that can be compared and sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ServiceKey(pub ServiceId);

impl ServiceKey {
    fn order(&self) -> (u8, Option<SocketAddr>, u32) {
        match self.0 {
            ServiceId::Tcp { address } => (0, Some(address), 0),
            ServiceId::Udp { address } => (1, Some(address), 0),
            ServiceId::Sctp { address } => (2, Some(address), 0),
            ServiceId::Fwmark { mark, family } => {
                (3 + u8::from(family == lvs_core::Family::V6), None, mark)
            }
        }
    }
}

impl PartialOrd for ServiceKey {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ServiceKey {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

impl Target {
    /// Whether the override applies to `server` of `service`.
    pub fn has(&self, service: ServiceId, server: SocketAddr) -> bool {
        self.service.is_none_or(|ServiceKey(own)| own == service)
            && self.host == server.ip()
            && self.port.is_none_or(|port| port == server.port())
    }

    /// Whether this target contains all servers of `other`.
    pub fn covers(&self, other: &Self) -> bool {
        self.host == other.host
            && (self.service.is_none() || self.service == other.service)
            && (self.port.is_none() || self.port == other.port)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}", SocketAddr::new(self.host, port))?,
            None => write!(f, "{}", self.host)?,
        }
        match &self.service {
            Some(ServiceKey(service)) => {
                write!(f, " of {}", lvs_core::ServiceKey::from(*service))
            }
            None => f.write_str(" of all services"),
        }
    }
}

/// An operator's override of the administrative state of servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdminSpec {
    /// The servers to which the override applies.
    pub target: Target,
    /// The state of the servers.
    pub state: AdminState,
    /// The operator who sets the override.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// The operator's reason for the override.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// End of the override in seconds since 1970; `None`: it has no end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u64>,
    /// Permits an override that leaves a service without a usable server.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// An override that is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminEntry {
    /// The override.
    #[serde(flatten)]
    pub spec: AdminSpec,
    /// Time at which the override was set, in seconds since 1970.
    pub since: u64,
}

/// The result of an override.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminDone {
    /// The configured servers to which the override applies.
    pub servers: Vec<(ServiceId, SocketAddr)>,
    /// Warnings about the override, as text.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// The result of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// The result of the reload, as text.
    pub message: String,
    /// Warnings about the configuration file, as in the output of `lvsd check`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// The state of the daemon, its dataplane and its services.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Process id of the daemon.
    pub pid: u32,
    /// Version of the daemon.
    pub version: String,
    /// Path of the daemon's configuration file.
    pub config: String,
    /// lvsd's uptime in seconds.
    pub uptime: u64,
    /// The result of the last read of the configuration file.
    pub loaded: LoadStatus,
    /// The state of the dataplane.
    pub dataplane: DataplaneStatus,
    /// The configured services, including those that etcd and Kubernetes add.
    pub services: Vec<ServiceStatus>,
    /// The overrides of operators.
    pub admin: Vec<AdminEntry>,
    /// The manual changes in the dataplane, as text.
    pub drift: Vec<String>,
    /// The changes that the dataplane has refused, as text.
    pub refused: Vec<String>,
    /// The longest delay of a health check since lvsd last reported delays, in milliseconds.
    pub check_lag_ms: u64,
    /// The state of the proxy; `None` if no service is proxied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy: Option<ProxyStatus>,
    /// The sandbox of the daemon.
    #[serde(default)]
    pub confinement: Confinement,
    /// The state of this director in its cluster; absent for a single director without maintenance.
    #[serde(default, skip_serializing_if = "DirectorStatus::is_alone")]
    pub director: DirectorStatus,
    /// The sources of servers and services other than the configuration file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceStatus>,
    /// The parts of answers from sources that lvsd does not apply, and the reasons, as text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// All directors in etcd, including this one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub directors: Vec<DirectorSeen>,
}

/// A director's entry in etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DirectorSeen {
    /// Name of the director.
    pub name: String,
    /// Whether the entry is for this director.
    pub own: bool,
    /// The version of the director's `lvsd`.
    pub version: String,
    /// The etcd revision of the last change that the director has loaded.
    pub revision: u64,
    /// Digest of the services and servers that the director has loaded from etcd, in hexadecimal.
    pub digest: String,
    /// The number of the director's services, from its configuration file and from etcd.
    pub services: usize,
    /// The number of servers of these services.
    pub servers: usize,
    /// Whether the director can forward packets: lvsd is ready, its dataplane answers, and the
    /// dataplane has all configured peers.
    pub ready: bool,
    /// Whether the director is in maintenance.
    pub maintenance: bool,
    /// Whether the director does not apply its sources' answers, or parts of them.
    pub left_out: bool,
}

/// A source of servers or services other than the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SourceStatus {
    /// `dns`, `etcd` or `kubernetes`.
    pub kind: String,
    /// The name in DNS; the prefix in etcd; the API server of Kubernetes.
    pub name: String,
    /// Time of the last answer in seconds since 1970; `None` if the source has not answered since
    /// lvsd started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answered: Option<u64>,
    /// Whether lvsd has an answer of the source, which it received since its start or has stored
    /// before.
    pub known: bool,
    /// The number of items of the source: servers for DNS, keys for etcd, services for Kubernetes.
    pub items: usize,
    /// The number of answers from the source.
    pub answers: u64,
    /// The number of failures to get an answer from the source.
    pub failures: u64,
    /// The reason why the source does not answer; absent while it answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// The etcd revision of the content that lvsd uses; absent for other sources.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<u64>,
    /// The number of the dataplane's services that stay until etcd or Kubernetes answers.
    pub held: usize,
    /// The number of objects in Kubernetes that lvsd refuses.
    #[serde(default)]
    pub refused: usize,
    /// The director that writes the addresses of Services in Kubernetes; absent if it is unknown,
    /// and for other sources.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
}

/// The state of the proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyStatus {
    /// The number of TCP connections and of clients that send datagrams.
    pub connections: u64,
    /// The maximum number of connections and clients.
    pub most: u64,
    /// The number of connections, and of datagrams of new clients, refused because no slot was free
    /// for them.
    pub full: u64,
    /// The number of clients evicted to make room for other clients.
    pub evicted: u64,
    /// The number of connections, and of datagrams of new clients, refused because no server was
    /// available, or because of a limit or a filter.
    pub refused: u64,
}

/// The result of reading the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadStatus {
    /// The time at which the file was read, in seconds since 1970.
    pub time: u64,
    /// Whether the configuration file was loaded.
    pub ok: bool,
    /// The result of the reading, as text.
    pub message: String,
}

/// The state of a dataplane.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataplaneStatus {
    /// Whether the dataplane answers.
    pub connected: bool,
    /// Whether the dataplane is not needed because all services are proxied.
    #[serde(default)]
    pub idle: bool,
    /// Process id of the dataplane.
    pub pid: Option<u32>,
    /// The dataplane's version; `None` before its first answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Milliseconds since the dataplane's last answer; `None` before the first one.
    pub seen_ms: Option<u64>,
    /// Number of connections in the dataplane's table.
    #[serde(default)]
    pub connections: u64,
    /// Maximum number of connections in the table; 0 before the first answer.
    #[serde(default)]
    pub capacity: u64,
    /// The VIPs that the dataplane owns.
    pub vips: Vec<IpAddr>,
    /// The counters of the dataplane's synchronisation daemons; `None` if no daemon is configured
    /// and all counters are 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sync: Option<SyncCounts>,
    /// The states of the dataplane's peers, and of configured peers that it was started without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerStanding>,
    /// The comparison of each peer's services and servers with this director's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TablesInfo>,
    /// Configured interfaces and addresses that the dataplane waits for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<Waiting>,
    /// The dataplane's interfaces that are down.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub down: Vec<DownInterface>,
    /// Addresses of services and of this host for which another host also answers ARP or neighbour
    /// discovery.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<Conflict>,
    /// Next hops of the dataplane that do not answer. A hop is omitted if it is a server that is
    /// down, or if its interface is down.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent_hops: Vec<SilentHop>,
    /// The reasons why packets were dropped in the last five minutes; most packets first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drops: Vec<ReasonCount>,
    /// The dataplane's sandbox; `None` before its first answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confinement: Option<Confinement>,
}

impl DataplaneStatus {
    /// Whether the dataplane's version is known and differs from `version`.
    pub fn is_other_version(&self, version: &str) -> bool {
        self.version.as_deref().is_some_and(|own| own != version)
    }
}

/// The state of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceStatus {
    /// The service's name in the configuration.
    pub name: String,
    /// Identity of the service.
    pub service: ServiceId,
    /// Whether lvsd proxies the service itself.
    #[serde(default)]
    pub proxied: bool,
    /// Number of servers to which lvsd sends new connections: they are up or unchecked, and not
    /// drained. Unless lvsd proxies the service, the dataplane must also answer, and must have the
    /// server with a weight above 0.
    pub usable: usize,
    /// Whether the service has its quorum.
    pub quorum: bool,
    /// Whether the service is in panic mode: too few servers are up, and all are used.
    #[serde(default)]
    pub panic: bool,
    /// The sorry server, if it receives the new connections.
    #[serde(default)]
    pub sorry: Option<SocketAddr>,
    /// The configured sorry server, even if it is not in use or is drained.
    #[serde(default)]
    pub sorry_server: Option<SocketAddr>,
    /// Whether the service's VIP is released until enough servers are up.
    #[serde(default)]
    pub withdrawn: bool,
    /// Whether the dataplane has a service with this identity that lvsd does not own.
    #[serde(default)]
    pub conflict: bool,
    /// Whether the source of the service's servers has not answered yet, so that the servers in the
    /// dataplane stay unchanged.
    #[serde(default)]
    pub unheard: bool,
    /// For each reason, the number of packets of new connections that the dataplane has refused
    /// since it has the service.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refusals: Vec<Refusals>,
    /// For each reason, the number of packets of the service's connections that the dataplane has
    /// dropped or refused since it has the service.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drops: Vec<Refusals>,
    /// The servers of the service, in the order of the configuration, and then servers that will be
    /// removed.
    pub servers: Vec<ServerStatus>,
}

/// The state of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Address and port of the server.
    pub server: SocketAddr,
    /// The configured weight; `None` if the server is not in the configuration.
    pub configured: Option<i32>,
    /// The server's administrative state; `drain` also if another program has set the server's
    /// weight in the dataplane to 0.
    pub admin: AdminState,
    /// The server's health: `up`, `down`, `unknown` before its first result, or `unchecked` without
    /// a check. A server that is up or unchecked becomes `suspicious` if clients cannot use it: too
    /// many of their connections are unanswered, or the checks on their path fail.
    pub health: String,
    /// Time in seconds for which the server's health has been in this state; absent for a server
    /// without a check that is not suspicious.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
    /// The code of the server's fault; absent without a fault. A server that is up can be
    /// `flapping` or `slow`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub code: String,
    /// The reason why the server is down or suspicious.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The fix of the server's fault; absent without a fault, and if none is known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fix: String,
    /// Numbers of all and of unanswered recent connections of clients to the server; absent if
    /// there were no connections.
    #[serde(default, skip_serializing_if = "RecentAttempts::is_empty")]
    pub attempts: RecentAttempts,
    /// Microseconds from the SYN of a client to the server's SYN-ACK, as a moving average of the
    /// dataplane; absent without a measurement, and with direct routing and tunnels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<u64>,
    /// Set while lvsd's host could not perform the last three or more checks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check_not_made: Option<CheckNotMade>,
    /// The statistics of the server's checks; absent before the first check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checks: Option<CheckStatus>,
    /// The server's weight in the dataplane; `None` if the dataplane does not have the server.
    pub weight: Option<i32>,
    /// Number of active connections.
    pub active: u32,
    /// Number of inactive connections.
    pub inactive: u32,
}

/// The statistics of a server's checks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckStatus {
    /// The reason why lvsd checks the server's own address instead of the path of clients; absent
    /// if the check uses the configured path, or the path of clients.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub own_address: String,
    /// Duration of the last check in microseconds.
    pub last_us: u64,
    /// Median duration in the last 4 to 5 minutes in microseconds, rounded up by at most a quarter;
    /// 0 without a check in this time.
    pub p50_us: u64,
    /// 99th percentile of the duration in the same time in microseconds, rounded in the same way; 0
    /// without a check in this time.
    pub p99_us: u64,
    /// Number of the most recent checks that each took half a second or longer; 0 if the last check
    /// was faster.
    #[serde(default)]
    pub slow_in_a_row: u64,
    /// Number of times that the server went down in the last 23 to 24 hours.
    pub falls_in_day: u64,
    /// Seconds of downtime in the last 23 to 24 hours.
    pub down_seconds_in_day: u64,
    /// Seconds since the server last went down; absent if it never did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_fall: Option<u64>,
    /// The reason why the server last went down; absent if it never did.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fall_reason: String,
    /// Number of times that the server went down since lvsd began to check it.
    pub falls: u64,
    /// Seconds of downtime since lvsd began to check the server.
    pub down_seconds: u64,
}

/// Checks of a server that lvsd's host cannot perform: the server's state is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckNotMade {
    /// Time in seconds for which no check could be performed.
    pub seconds: u64,
    /// The reason why the host cannot perform the checks.
    pub reason: String,
}

/// An event that the daemon reports, for example that a server went down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Number of the event since the daemon started, from 1.
    pub seq: u64,
    /// The time, in milliseconds since 1970.
    pub time_ms: u64,
    /// The kind: `server_down`, `server_up`, `quorum_lost`, `quorum_gained`, ...
    pub event: String,
    /// The code of the fault, as in [`ServerStatus`] or in the output of `lvsadm doctor`; absent
    /// without a fault, or if the kind names it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub code: String,
    /// The name of the service; absent if the event is not about a service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// Address or mark of the service; absent if the event is not about a service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<ServiceId>,
    /// The affected server; absent if the event is not about a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<SocketAddr>,
    /// The details as text.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admin_request_round_trips_and_selects_server_and_maintenance_requires_on() {
        let text = r#"{"target":{"service":{"protocol":"tcp","address":"192.0.2.1:80"},"host":"10.0.0.1","port":80},"state":"drain","who":"ann","why":"disk"}"#;
        let spec: AdminSpec = serde_json::from_str(text).expect("the JSON is valid");
        let service = ServiceId::Tcp {
            address: ([192, 0, 2, 1], 80).into(),
        };
        let has = |host: u8, port| spec.target.has(service, ([10, 0, 0, host], port).into());
        assert!(has(1, 80) && !has(1, 81) && !has(2, 80));
        assert_eq!(
            serde_json::to_string(&spec).expect("the value can be written as JSON"),
            text
        );
        serde_json::from_str::<MaintenanceSpec>(r#"{"why":"disk"}"#)
            .expect_err("a request without the field `on` was accepted");
    }

    #[test]
    fn lvsd_socket_has_address_of_dataplane_socket_with_suffix() {
        let path = socket(&Address::new("/run/lvs/netns-1.sock"));
        assert_eq!(path, Address::new("/run/lvs/netns-1.sock.lvsd"));
        assert_eq!(socket(&Address::new("@x")), Address::new("@x.lvsd"));
    }
}

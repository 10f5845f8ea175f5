//! The control socket of `lvsd`: what people ask the daemon that keeps an engine in step with a
//! file.
//!
//! It is beside the engine's, with `.lvsd` behind its name, and speaks HTTP: `GET /v1/status` is
//! answered by [`Status`], `POST /v1/admin`, `/v1/maintenance` and `/v1/reload` change things, and
//! `GET /v1/events` streams [`Event`]s. A refusal is
//! `{"error": {"message": "..."}}`.

mod client;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use lvs_core::api::{
    AnnouncedVip, Confinement, PeerStanding, ServiceId, SyncCounts, TablesInfo, Waiting,
};
use serde::{Deserialize, Serialize};

use super::Address;
use super::peer::{self, Own};

pub use client::Client;

/// Characters of a reason, and of who gives it.
pub const WORDS_MAX: usize = 200;

/// Where the daemon of the engine at `engine` listens.
pub fn socket(engine: &Address) -> Address {
    match engine {
        Address::Abstract(name) => Address::Abstract([name, &b".lvsd"[..]].concat()),
        Address::Usual(path) | Address::Path(path) => {
            let mut name = path.as_os_str().to_owned();
            name.push(".lvsd");
            Address::Path(name.into())
        }
    }
}

/// Whether whoever is at the other end of `socket`, a process of this user and with this id in the
/// process id namespace of this one, may change what the daemon does: whom an engine obeys, the
/// daemon does.
///
/// # Errors
/// Why not.
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

/// Whether whoever is at the other end of `socket`, with the primary group `gid`, is in `group`.
pub fn is_member(socket: &impl AsFd, gid: u32, group: u32) -> bool {
    gid == group || lvs_sys::peer_groups::peer_in_group(socket, group).unwrap_or(false)
}

/// A wish for the director itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaintenanceSpec {
    /// Whether it is in maintenance.
    pub on: bool,
    /// Who wants it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// For what reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A maintenance of the director that lasts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maintenance {
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// Who wanted it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// For what reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// One director among several.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DirectorStatus {
    /// It is in maintenance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<Maintenance>,
    /// How it stands with keepalived; `None` without `[vrrp]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vrrp: Option<VrrpStatus>,
    /// Virtual addresses that are announced by routes; `None` without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub announce: Option<AnnounceStatus>,
    /// What is worth knowing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl DirectorStatus {
    /// There is nothing to say of it.
    pub fn is_alone(&self) -> bool {
        *self == Self::default()
    }
}

/// How a director stands with keepalived.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VrrpStatus {
    /// What keepalived said last: `unknown`, `backup`, `master`, `fault` or `stopped`.
    pub state: String,
    /// The engine has the virtual addresses, or is to have them.
    pub active: bool,
    /// The engine knows the connections of the other directors.
    pub ready: bool,
    /// What it waits for until then.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub waits_for: String,
    /// What keepalived adds to the priority.
    pub track: i16,
    /// Why the track file cannot be written, or keepalived not be heard.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub trouble: Vec<String>,
    /// Changes of state that keepalived told.
    pub changes: u64,
    /// Lines that were not understood, or too long.
    pub ignored: u64,
}

/// How a director stands with the routing daemon beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AnnounceStatus {
    /// The engine knows the connections of the other directors.
    pub ready: bool,
    /// What it waits for until then.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub waits_for: String,
    /// The addresses, and the routes that there are.
    pub addresses: Vec<AnnouncedVip>,
    /// Why the engine does not say.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub trouble: String,
}

/// What people want of a server, whatever the file and its health say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AdminState {
    /// Nothing.
    #[default]
    Ready,
    /// No new connections; those that it has go on.
    Drain,
    /// Drained, for as long as the service's `drain` says, and then out of the service.
    Maintenance,
}

impl AdminState {
    /// In a word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Drain => "drain",
            Self::Maintenance => "maintenance",
        }
    }
}

/// Which servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Of this service; `None` for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceKey>,
    /// Their address.
    pub host: IpAddr,
    /// Their port; `None` for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
}

/// A service as [`ServiceId`] names it, in an order.
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
    /// Whether `server` of `service` is one of them.
    pub fn has(&self, service: ServiceId, server: SocketAddr) -> bool {
        self.service.is_none_or(|ServiceKey(own)| own == service)
            && self.host == server.ip()
            && self.port.is_none_or(|port| port == server.port())
    }

    /// Whether all servers of `other` are among them.
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

/// A wish for servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdminSpec {
    /// Which.
    pub target: Target,
    /// What.
    pub state: AdminState,
    /// Who wants it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// For what reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Until when, in seconds since 1970; `None` until somebody says something else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u64>,
}

/// A wish that holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminEntry {
    /// The wish.
    #[serde(flatten)]
    pub spec: AdminSpec,
    /// Since when, in seconds since 1970.
    pub since: u64,
}

/// What came of a wish.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminDone {
    /// The servers of the file that it is about.
    pub servers: Vec<(ServiceId, SocketAddr)>,
    /// What is worth knowing.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// What came of reading the file again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// In words.
    pub message: String,
    /// Warnings about the file, as `lvsd check` prints them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// How the daemon, and what it looks after, is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Its process.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Its file.
    pub config: String,
    /// For how many seconds it has run.
    pub uptime: u64,
    /// The last reading of the file.
    pub loaded: LoadStatus,
    /// What is known of the engine.
    pub engine: EngineStatus,
    /// The services of the file.
    pub services: Vec<ServiceStatus>,
    /// What people want of servers.
    pub admin: Vec<AdminEntry>,
    /// What others have changed by hand, in words.
    pub drift: Vec<String>,
    /// What the engine has refused, in words.
    pub refused: Vec<String>,
    /// Milliseconds that probes have waited for their turn at most, lately.
    pub check_lag_ms: u64,
    /// What the daemon relays itself; `None` if nothing is proxied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy: Option<ProxyStatus>,
    /// How far the daemon has confined itself.
    #[serde(default)]
    pub confinement: Confinement,
    /// The director among others, if it is one of several or in maintenance.
    #[serde(default, skip_serializing_if = "DirectorStatus::is_alone")]
    pub director: DirectorStatus,
    /// Where servers and services come from besides the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceStatus>,
    /// What sources say and is not in force, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// The directors that etcd knows, this one among them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub directors: Vec<DirectorSeen>,
}

/// A director, as it tells of itself in etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DirectorSeen {
    /// Its name.
    pub name: String,
    /// It is this one.
    pub own: bool,
    /// The version of its `lvsd`.
    pub version: String,
    /// The revision of the last change in etcd that it has taken.
    pub revision: u64,
    /// The same number on all that have taken the same.
    pub digest: String,
    /// Services that it has, from its file and from etcd.
    pub services: usize,
    /// Servers of those.
    pub servers: usize,
    /// It is ready.
    pub ready: bool,
    /// It is in maintenance.
    pub maintenance: bool,
    /// Something that sources say is not in force there.
    pub left_out: bool,
}

/// Where servers or services come from besides the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SourceStatus {
    /// `dns` or `etcd`.
    pub kind: String,
    /// The name in DNS; the prefix in etcd.
    pub name: String,
    /// When it last answered, in seconds since 1970; `None` if it has not since the daemon began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answered: Option<u64>,
    /// It has answered once, now or to a daemon before this one: that holds.
    pub known: bool,
    /// Servers that it names; keys, of etcd.
    pub items: usize,
    /// How often it has answered.
    pub answers: u64,
    /// How often it has not.
    pub failures: u64,
    /// Why it does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// The revision that is in force, of etcd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<u64>,
    /// Services of the engine that are left as they are until it is known whether etcd has them.
    pub held: usize,
}

/// What the daemon relays itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyStatus {
    /// TCP connections, and clients that send datagrams.
    pub connections: u64,
    /// So many are served at a time.
    pub most: u64,
    /// Those that were refused because there were that many.
    pub full: u64,
    /// Clients that send datagrams and had to give way to others.
    pub evicted: u64,
    /// Those for which there was no server.
    pub refused: u64,
}

/// A reading of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadStatus {
    /// When, in seconds since 1970.
    pub time: u64,
    /// The file is in force.
    pub ok: bool,
    /// What was said about it.
    pub message: String,
}

/// What is known of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// It answers.
    pub connected: bool,
    /// It has nothing to do: all services are proxied.
    #[serde(default)]
    pub idle: bool,
    /// Its process.
    pub pid: Option<u32>,
    /// For how many milliseconds nobody has looked at it; `None` if nobody has yet.
    pub seen_ms: Option<u64>,
    /// VIPs that it owns, or is to own.
    pub vips: Vec<IpAddr>,
    /// What its synchronisation daemons have counted; `None` if it has had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sync: Option<SyncCounts>,
    /// How far other directors' connections are known to the engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerStanding>,
    /// How other directors' services and servers compare with those here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TablesInfo>,
    /// Configured interfaces and addresses that it waits for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<Waiting>,
    /// How far it has confined itself; `None` if it has not told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confinement: Option<Confinement>,
}

/// A service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceStatus {
    /// Its name in the file.
    pub name: String,
    /// Which one.
    pub service: ServiceId,
    /// The daemon serves it itself.
    #[serde(default)]
    pub proxied: bool,
    /// Servers that take new connections.
    pub usable: usize,
    /// It has enough of them.
    pub quorum: bool,
    /// All servers are taken to be up, because too few are.
    #[serde(default)]
    pub panic: bool,
    /// The sorry server has the new connections.
    #[serde(default)]
    pub sorry: Option<SocketAddr>,
    /// The configured sorry server, also while it does not serve or is drained.
    #[serde(default)]
    pub sorry_server: Option<SocketAddr>,
    /// Its VIP is given up until it has enough servers.
    #[serde(default)]
    pub withdrawn: bool,
    /// Somebody else's service stands in its place.
    #[serde(default)]
    pub conflict: bool,
    /// Nothing is known of the source of its servers yet: those of the engine stay.
    #[serde(default)]
    pub unheard: bool,
    /// Its servers, in the order of the file; behind them those that are about to go.
    pub servers: Vec<ServerStatus>,
}

/// A server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Address and port.
    pub server: SocketAddr,
    /// The weight that the file gives it; `None` if it is not in the file.
    pub configured: Option<i32>,
    /// What people want of it.
    pub admin: AdminState,
    /// What its checks say: `up`, `down`, `unknown`, or `unchecked`.
    pub health: String,
    /// For how many seconds they have said it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
    /// Why it is down now.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Set while lvsd's host cannot make its checks, after three in a row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check_not_made: Option<CheckNotMade>,
    /// The weight that the engine gives it; `None` if it does not have the server.
    pub weight: Option<i32>,
    /// Active connections.
    pub active: u32,
    /// Inactive connections.
    pub inactive: u32,
}

/// Checks of a server that lvsd's host cannot make: the server's state stays as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckNotMade {
    /// For how many seconds.
    pub seconds: u64,
    /// Why.
    pub reason: String,
}

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Counts up from 1 while the daemon runs.
    pub seq: u64,
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// What: `server_down`, `server_up`, `quorum_lost`, `quorum_gained`, ...
    pub event: String,
    /// The name of the service that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// That service's address or mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<ServiceId>,
    /// The server that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<SocketAddr>,
    /// The rest, in words.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_are_what_the_documentation_says() {
        let text = r#"{"target":{"service":{"protocol":"tcp","address":"192.0.2.1:80"},"host":"10.0.0.1","port":80},"state":"drain","who":"ann","why":"disk"}"#;
        let spec: AdminSpec = serde_json::from_str(text).expect("a wish");
        let service = ServiceId::Tcp {
            address: ([192, 0, 2, 1], 80).into(),
        };
        let has = |host: u8, port| spec.target.has(service, ([10, 0, 0, host], port).into());
        assert!(has(1, 80) && !has(1, 81) && !has(2, 80));
        assert_eq!(serde_json::to_string(&spec).expect("JSON"), text);
        serde_json::from_str::<MaintenanceSpec>(r#"{"why":"disk"}"#).expect_err("on or off");
    }

    #[test]
    fn the_socket_is_beside_the_engines() {
        let path = socket(&Address::new("/run/lvs/netns-1.sock"));
        assert_eq!(path, Address::new("/run/lvs/netns-1.sock.lvsd"));
        assert_eq!(socket(&Address::new("@x")), Address::new("@x.lvsd"));
    }
}

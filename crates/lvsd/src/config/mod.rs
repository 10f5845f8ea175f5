//! The configuration: reads TOML, and returns a checked [`Config`], or a [`Report`] of the errors.
//!
//! ```text
//! text ── syntax ──▶ tree ── shape (raw.rs) ──▶ RawConfig ── meaning (check/) ────▶ Config
//!           │                   │                               │
//!           └───────────────────┴── findings with their place ──┘
//! ```
//!
//! Each step reports its findings up to a limit, and not only the first one. A single error
//! prevents a [`Config`]. Later, [`expand`](crate::expand) adds the servers and services of DNS,
//! etcd and Kubernetes.

mod check;
pub(crate) mod clash;
mod files;
mod ports;
mod raw;
mod shape;
mod syntax;
#[cfg(test)]
mod tests;

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use lvs_core::api::{LocalPool, ServiceId};
use lvs_core::filter::SourceFilter;
use lvs_core::sync::SyncDaemon;
use lvs_core::{ServerConfig, ServiceConfig};
use rustix::io::Errno;

pub(crate) use check::check_filter;
pub(crate) use clash::label;
pub use ports::ManyPorts;
pub(crate) use ports::{generated_mark, is_generated};
pub(crate) use raw::DEFAULTS;
pub(crate) use shape::SERVICES_MAX;
use shape::shape;

pub(crate) use crate::text::bounded;
pub use crate::text::{Diagnostic, Files, Report, Severity};

use crate::facts::Facts;
use crate::health::Check;
use crate::notify_command::Notice;
use crate::sources::{Cluster, Lookups, Source, kubernetes};
use crate::token::Named;
use lvs_proxy as proxy;

/// The checked configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Path of the main file.
    pub path: String,
    /// The files from which the configuration was read.
    pub files: Files,
    /// Settings of the daemon itself.
    pub daemon: Daemon,
    /// Settings of the metrics, the API and the dashboard.
    pub api: Api,
    /// Options of a dataplane that the daemon starts.
    pub dataplane: Dataplane,
    /// The synchronisation daemons of the dataplane; `None` leaves them unchanged.
    pub sync: Option<Vec<SyncDaemon>>,
    /// Settings for keepalived. If set, the dataplane owns VIPs only while this director is active.
    pub vrrp: Option<Vrrp>,
    /// Settings of DNS look-ups of servers.
    pub lookups: Lookups,
    /// Settings of the etcd that directors share; `None` without `[cluster]`.
    pub cluster: Option<Cluster>,
    /// The connection to Kubernetes; `None` without `[kubernetes]`.
    pub kubernetes: Option<kubernetes::Settings>,
    /// Settings of the announcement of addresses by routes.
    pub announce: Announce,
    /// Names and values of sysctls.
    pub sysctls: Vec<(String, String)>,
    /// Mark rules in the dataplane's syntax.
    pub marks: Vec<String>,
    /// Filter of new connections to all services; `None` keeps the dataplane's filter.
    pub filter: Option<SourceFilter>,
    /// The services, in the order of the file.
    pub services: Vec<Service>,
    /// The table `[defaults]` as text, for services of etcd and Kubernetes.
    defaults: String,
}

/// `discover` of a service: a source of further servers, and their settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovery {
    /// The source of the servers.
    pub source: Source,
    /// Number of the line of `discover` in the joined text of all files, from 1.
    pub line: usize,
    /// Port of discovered servers whose source gives none.
    pub port: u16,
    /// Settings of discovered servers in the dataplane, including the default weight.
    pub config: ServerConfig,
    /// Health check of discovered servers.
    pub check: Option<Check>,
}

/// Settings in `[lvsd]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Daemon {
    /// Whether lvsd also manages services that other programs added.
    pub adopt: bool,
    /// Filter directives of the log; `None` for the default.
    pub log: Option<String>,
    /// Maximum percentage of all servers that a reload without `force` may remove; `None` for
    /// [`Self::MAX_REMOVE`].
    pub max_remove: Option<u8>,
    /// Whether lvsd is sandboxed: `off` or `auto`; `None` for the default.
    pub confine: Option<String>,
    /// The reaction to manual changes.
    pub on_drift: OnDrift,
    /// The notification program.
    pub notify: Notice,
}

/// Settings in `[api]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Api {
    /// Addresses and ports at which lvsd serves HTTP.
    pub listen: Vec<SocketAddr>,
    /// Permitted values of `Host` in addition to addresses, `localhost` and the name of this host.
    pub allowed_hosts: Vec<String>,
    /// Tokens of clients over TCP, with their roles.
    pub tokens: Vec<Named>,

    /// Whether the API serves the dashboard.
    pub dashboard: bool,
}

/// Reaction to manual changes of lvsd's services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDrift {
    /// lvsd reports and reverts manual changes.
    #[default]
    Repair,
    /// lvsd reports manual changes, and keeps them until it loads the file again.
    Report,
}

impl Daemon {
    /// Default of `max_removed_percent`.
    pub const MAX_REMOVE: u8 = 50;
    /// Number of servers that every reload may remove.
    const FEW: usize = 10;

    /// Whether a reload without `force` may reduce the number of servers from `before` to `after`.
    pub fn may_shrink(&self, before: usize, after: usize) -> bool {
        let removed = before.saturating_sub(after);
        let most = usize::from(self.max_remove.unwrap_or(Self::MAX_REMOVE));
        removed <= Self::FEW || removed * 100 <= before * most
    }
}

/// Settings in `[dataplane]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dataplane {
    /// Command-line options of the dataplane, without `--socket` and the options in
    /// [`Self::peers`].
    pub options: Vec<String>,
    /// Whether the backend is `tun`, so that the host routes packets to the dataplane.
    pub is_routed: bool,
    /// Path or abstract name of the dataplane's control socket; `None` for the default.
    pub socket: Option<String>,
    /// Group whose members have write access to the control sockets; `None` for no group.
    pub group: Option<String>,
    /// Group whose members have read access to the control sockets; `None` for all users.
    pub readers: Option<String>,
    /// The time without an answer after which the dataplane is killed and replaced; `None` for the
    /// default.
    pub hang_limit: Option<Duration>,
    /// Whether the dataplane owns every VIP.
    pub own_vips: bool,
    /// Local addresses of full NAT and hairpin NAT; `None` keeps the dataplane's local addresses.
    pub local: Option<LocalPool>,
    /// Peers with which the dataplane replicates connections; `None` without `[sync.peers]`.
    pub peers: Option<Peers>,
    /// Path of the dataplane's program; `None` to search for it.
    pub program: Option<String>,
}

/// The settings for keepalived, and the files shared with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vrrp {
    /// Interface for VRRP advertisements.
    pub interface: String,
    /// Virtual router ID, equal on all directors of a cluster.
    pub router_id: u8,
    /// Priority of this director. keepalived adds the number in the track file to it.
    pub priority: u8,
    /// Interval of advertisements.
    pub advert: Duration,
    /// Addresses of the other directors for VRRP without multicast.
    pub peers: Vec<IpAddr>,
    /// Addresses that keepalived adds to this host while this director is active.
    pub addresses: Vec<HostAddress>,
    /// Path of the track file, from which keepalived reads the readiness of this director.
    pub track_file: PathBuf,
    /// Path of the FIFO to which keepalived writes its state.
    pub fifo: PathBuf,
}

impl Vrrp {
    /// The default path of the track file.
    pub const TRACK_FILE: &'static str = "/run/lvs/vrrp.track";
    /// The default path of the FIFO for keepalived's messages.
    pub const FIFO: &'static str = "/run/lvs/vrrp.fifo";
    /// The default time between advertisements.
    pub const ADVERT: Duration = Duration::from_millis(300);
    /// The default priority.
    pub const PRIORITY: u8 = 200;
    /// Added to the priority during maintenance, and while the dataplane lacks configured peers, so
    /// that another director takes over.
    pub const MAINTENANCE: i16 = -100;
    /// Added to the priority below a quorum, so that a director with all of its quorums takes over.
    pub const BELOW_QUORUM: i16 = -50;
    /// Lowest priority that is at least 1, keepalived's minimum, after [`Self::MAINTENANCE`] and
    /// [`Self::BELOW_QUORUM`] are added.
    pub(crate) const PRIORITY_ENOUGH: i64 = 1 - (Self::MAINTENANCE + Self::BELOW_QUORUM) as i64;
}

/// Settings for announcing addresses by routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announce {
    /// Time in maintenance during which routers prefer other directors, before the address is
    /// withdrawn.
    pub drain: Duration,
    /// Time for which the dataplane continues to announce addresses without lvsd.
    pub hold: Duration,
}

impl Default for Announce {
    fn default() -> Self {
        Self {
            drain: Duration::from_secs(5),
            hold: Duration::from_secs(600),
        }
    }
}

/// An address of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAddress {
    /// The address, without its network.
    pub ip: IpAddr,
    /// Prefix length.
    pub len: u8,
    /// Interface of the address; `None` for the interface of the advertisements.
    pub device: Option<String>,
}

/// The peers that replicate connections with this director.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peers {
    /// Addresses and ports of the peers.
    pub addresses: Vec<SocketAddr>,
    /// Command-line options of the dataplane about peers.
    pub options: Vec<String>,
    /// File with the common key of all peers.
    pub key_file: String,
}

impl Peers {
    /// Returns the reason why the dataplane would refuse the key, if it would.
    pub fn unusable_key(&self) -> Option<String> {
        lvs_api::directors::read_key(Path::new(&self.key_file)).err()
    }
}

impl Dataplane {
    /// Tables of the file whose options for the dataplane differ from those of `before`.
    pub fn changed_tables(&self, before: &Self) -> Vec<&'static str> {
        let own = |all: &Self| Self {
            peers: None,
            ..all.clone()
        };
        let mut changed = Vec::new();
        if own(self) != own(before) {
            changed.push("[dataplane]");
        }
        if self.peers != before.peers {
            changed.push("[sync.peers]");
        }
        changed
    }

    /// Command-line options of the dataplane, without `--socket`.
    pub fn arguments(&self) -> impl Iterator<Item = &str> {
        let peers = self.peers.iter().flat_map(|peers| &peers.options);
        self.options.iter().chain(peers).map(String::as_str)
    }
}

/// The owner of a VIP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VipMode {
    /// The dataplane, unless the host has the VIP when the file is loaded, or another service has
    /// the VIP with [`Host`](Self::Host) or [`Announce`](Self::Announce).
    #[default]
    Auto,
    /// The dataplane, which answers ARP and neighbour discovery for the VIP, and announces it.
    Own,
    /// The host has the VIP, or a router routes it to the host. The dataplane does not answer ARP
    /// or neighbour discovery for it.
    Host,
    /// Several dataplanes, each of which announces a route to the VIP. None answers ARP or
    /// neighbour discovery for it.
    Announce,
}

/// Action if the check of a server fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnCheckFailure {
    /// Weight 0: existing connections continue, and the server gets no new ones, except from
    /// clients with persistence unless the sysctl `expire_quiescent_template` is set.
    #[default]
    Quiesce,
    /// The server is deleted. By default, its connections stall until it is added again;
    /// `on_server_down` can change this.
    Remove,
}

/// A service of `[[service]]`, etcd or Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Number of the line in the joined text of all files, from 1; see [`Config::files`].
    pub line: usize,
    /// Name of the service in logs, metrics and the status.
    pub name: String,
    /// Identity of the service in the dataplane.
    pub id: ServiceId,
    /// Settings of the service in the dataplane.
    pub config: ServiceConfig,
    /// Ports of a service with several ports, which its mark represents; `None` for other services.
    pub ports: Option<ManyPorts>,
    /// The owner of the VIP.
    pub vip: VipMode,
    /// The filter of the service's new connections.
    pub filter: SourceFilter,
    /// Settings of the proxy; `None` if the dataplane forwards the service.
    pub proxy: Option<proxy::Options>,
    /// Action if the check of a server fails.
    pub on_check_failure: OnCheckFailure,
    /// Whether new connections avoid servers with weight 0. False if persistence sends its clients
    /// to such a server, or if the scheduler refuses clients of such a server.
    pub quiesces_at_zero: bool,
    /// Maximum time for which connections of a removed server continue.
    pub drain: Duration,
    /// Number of usable servers that the service requires.
    pub quorum: Quorum,
    /// Action on the VIP below the quorum.
    pub below_quorum: BelowQuorum,
    /// Whether servers are down until a check succeeds, even if they are in use when lvsd starts.
    pub alpha: bool,
    /// Whether lvsd removes the service when it exits.
    pub omega: bool,
    /// Percentage of servers that must be up; if fewer are up, all count as up (panic mode). 0
    /// disables this.
    pub min_share: u8,
    /// Sorry server, which replaces the other servers below the quorum; `None` if none is
    /// configured.
    pub sorry: Option<Server>,
    /// Source of further servers; `None` if none is configured.
    pub discovery: Option<Discovery>,
    /// Whether the dataplane may have further servers of the service, because DNS or etcd has not
    /// answered, or the pool does not exist in etcd. `false` until [`expand`](crate::expand) has
    /// added the servers from DNS and etcd.
    pub incomplete: bool,
    /// Whether the source in `discovery` has not answered yet.
    pub unheard: bool,
    /// Real servers: first the servers of the file in order, then the servers from DNS and etcd.
    pub servers: Vec<Server>,
}

/// Numbers of usable servers at which a service gains and loses its quorum (hysteresis).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quorum {
    /// The service gains its quorum at this number.
    pub up: u32,
    /// The service loses its quorum below this number; at most `up`.
    pub down: u32,
}

impl Default for Quorum {
    fn default() -> Self {
        Self { up: 1, down: 1 }
    }
}

/// Action on the VIP of a service below its quorum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BelowQuorum {
    /// The dataplane continues to own the VIP.
    #[default]
    Keep,
    /// The dataplane releases the VIP, so that another director can take it over.
    GiveUp,
}

impl Service {
    /// The virtual address and port; `None` for a service with a mark or with several ports.
    pub fn address(&self) -> Option<SocketAddr> {
        self.id.address()
    }

    /// Adds `by` to the line numbers of the service, of its servers and of `discover`.
    pub(crate) fn move_lines(&mut self, by: usize) {
        self.line += by;
        if let Some(discovery) = &mut self.discovery {
            discovery.line += by;
        }
        let servers = self.servers.iter_mut().chain(&mut self.sorry);
        servers.for_each(|server| server.line += by);
    }

    /// The virtual address without its port or ports; `None` for a service with a mark.
    pub fn virtual_ip(&self) -> Option<IpAddr> {
        let many = self.ports.as_ref().map(|many| many.ip);
        many.or_else(|| Some(self.address()?.ip()))
    }
}

/// A real server of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Number of the line in the joined text of all files, from 1; see [`Config::files`].
    pub line: usize,
    /// Address and port of the server.
    pub address: SocketAddr,
    /// Settings of the server in the dataplane while it is up.
    pub config: ServerConfig,
    /// Health check; without one, the server is always up.
    pub check: Option<Check>,
}

/// Iterates over the checks of all servers.
pub fn checks_of(services: &[Service]) -> impl Iterator<Item = ((ServiceId, SocketAddr), &Check)> {
    services.iter().flat_map(|service| {
        let servers = service.servers.iter();
        servers.filter_map(|server| Some(((service.id, server.address), server.check.as_ref()?)))
    })
}

impl Config {
    /// Reads and checks a file. The report of a valid configuration contains only warnings.
    ///
    /// # Errors
    /// The file cannot be read ([`LoadError::Read`]) or is not text ([`LoadError::NotText`]), or is
    /// invalid ([`LoadError::Refused`]).
    pub fn load(path: &Path) -> Result<(Self, Report), LoadError> {
        Self::load_on(path, None)
    }

    /// As [`load`](Self::load). With `facts`, settings that cannot work on that host are reported,
    /// too, such as an unknown group.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_on(path: &Path, facts: Option<&Facts>) -> Result<(Self, Report), LoadError> {
        let whole = files::read(path)?;
        let name = path.display().to_string();
        if !whole.findings.is_empty() {
            return Err(LoadError::Refused(Box::new(Report {
                path: name,
                text: whole.text,
                files: whole.files,
                more: whole.findings.more(),
                findings: whole.findings.into_kept(),
            })));
        }
        Self::read(&name, &whole.text, whole.files, facts)
            .map_err(|report| LoadError::Refused(Box::new(report)))
    }

    /// Parses the services in the text of an etcd key or of a Kubernetes Service, with the defaults
    /// of `[defaults]`.
    ///
    /// # Errors
    /// The first error, as text.
    pub(crate) fn remote_services(&self, text: &str) -> Result<Vec<Service>, String> {
        check::remote(self, text)
    }

    /// Whether the configuration at `path` may set `socket`: its text contains this word or an
    /// escape, or cannot be read. The text is not parsed.
    pub fn may_name_socket(path: &Path) -> bool {
        // TOML keys may contain escapes.
        let names = |text: &str| text.contains("socket") || text.contains('\\');
        files::read(path).map_or(true, |whole| names(&whole.text))
    }

    /// Parses and checks `text`, the content of the file `path`.
    ///
    /// # Errors
    /// The text has errors; the report contains them, up to a limit.
    pub fn from_toml(path: &str, text: &str) -> Result<(Self, Report), Report> {
        Self::read(path, text, Files::from(path), None)
    }

    fn read(
        path: &str,
        text: &str,
        files: Files,
        facts: Option<&Facts>,
    ) -> Result<(Self, Report), Report> {
        let (raw, mut findings) = shape(text, "");
        let mut config = None;
        if let Some(raw) = raw {
            let complete = findings.is_empty();
            config = Some(Self {
                path: path.to_owned(),
                files: files.clone().of(text),
                ..check::check(&raw, text, facts, complete, &mut findings)
            });
            if complete
                && raw.service.is_empty()
                && raw.cluster.is_none()
                && raw.kubernetes.is_none()
            {
                findings.push(
                    Diagnostic::warning(0..0, "there is no [[service]]: nothing is balanced")
                        .help("add [[service]] tables; a running lvsd refuses to reload a file without any"),
                );
            }
        }
        let report = Report {
            path: path.to_owned(),
            text: text.to_owned(),
            files,
            more: findings.more(),
            findings: findings.into_kept(),
        };
        match config {
            Some(config) if report.errors() == 0 => Ok((config, report)),
            _ => Err(report),
        }
    }
}

/// The reason why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}; {}", fix(source))]
    Read {
        /// Path of the file.
        path: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The file is not UTF-8, which TOML requires.
    #[error(
        "{path}, line {line}: byte {offset} of the file (0x{byte:02x}) is not UTF-8, as TOML must be; convert it (`iconv -f ISO-8859-1 -t UTF-8`), or restore the intended file if this is not text"
    )]
    NotText {
        /// Path of the file.
        path: String,
        /// Line of the first invalid byte, from 1.
        line: usize,
        /// Offset of this byte in the file, from 0.
        offset: usize,
        /// Value of the invalid byte.
        byte: u8,
    },
    /// The configuration is invalid.
    #[error("{0}")]
    Refused(Box<Report>),
}

/// Fix for a file that cannot be read.
fn fix(error: &std::io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::NotFound => "put the configuration there, or name its file with --config",
        ErrorKind::PermissionDenied => {
            "permit the user of lvsd to read the file and its directories (`namei -l` shows their permissions)"
        }
        ErrorKind::IsADirectory => "name a file in this directory with --config",
        _ if matches!(
            Errno::from_io_error(error),
            Some(Errno::MFILE | Errno::NFILE)
        ) =>
        {
            "raise the limit of open files (LimitNOFILE= in lvsd's unit, `ulimit -n` in a shell)"
        }
        ErrorKind::FileTooLarge => {
            "is it the right file? Divide a configuration of that size into files in conf.d"
        }
        ErrorKind::NotADirectory => "make it a directory, or remove it",
        _ => "check that the disk works and that `cat` can read the file",
    }
}

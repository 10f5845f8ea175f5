//! The configuration: reads TOML, and returns a checked [`Config`] or a [`Report`] of all errors.
//!
//! ```text
//! text ── syntax ──▶ tree ── shape (raw.rs) ──▶ RawConfig ── meaning (check.rs) ──▶ Config
//!           │                   │                               │
//!           └───────────────────┴── findings with their place ──┘
//! ```
//!
//! Each step reports all of its findings. A file with one error results in no [`Config`].
//! [`expand`](crate::expand) adds the servers and services of DNS, etcd and Kubernetes later.

mod check;
pub(crate) mod clash;
mod facts;
mod files;
pub(crate) mod fit;
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
pub use facts::Facts;
pub use ports::ManyPorts;
pub(crate) use ports::{generated_mark, is_generated};
pub(crate) use raw::DEFAULTS;
pub(crate) use shape::SERVICES_MAX;
use shape::shape;

pub(crate) use crate::text::bounded;
pub use crate::text::{Diagnostic, Files, Report, Severity};

use crate::health::Check;
use crate::sources::{Cluster, Lookups, Source, kubernetes};
use crate::token::Named;
use lvs_proxy as proxy;

/// A checked file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Path of the main file.
    pub path: String,
    /// The files from which the configuration was read.
    pub files: Files,
    /// Settings of the daemon itself.
    pub daemon: Daemon,
    /// Metrics, the API and the dashboard.
    pub api: Api,
    /// Options of a dataplane that the daemon starts.
    pub dataplane: Dataplane,
    /// The synchronisation daemons of the dataplane; `None` leaves them unchanged.
    pub sync: Option<Vec<SyncDaemon>>,
    /// If set, the dataplane owns the virtual addresses only while keepalived is active.
    pub vrrp: Option<Vrrp>,
    /// Settings of the resolution of server names.
    pub lookups: Lookups,
    /// The settings of etcd, which several directors share.
    pub cluster: Option<Cluster>,
    /// The connection to Kubernetes.
    pub kubernetes: Option<kubernetes::Settings>,
    /// Settings of the announcement of addresses by routes.
    pub announce: Announce,
    /// Sysctls to set, name and value.
    pub sysctls: Vec<(String, String)>,
    /// Rules that set firewall marks on packets, in the syntax of the dataplane.
    pub marks: Vec<String>,
    /// The global filter of new connections; `None` keeps the dataplane's filter.
    pub filter: Option<SourceFilter>,
    /// The services, in the order of the file.
    pub services: Vec<Service>,
    /// The table `[defaults]` as text, for services of etcd and Kubernetes.
    defaults: String,
}

/// `discover` of a service: the source of further servers, and their settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovery {
    /// The source of the servers.
    pub source: Source,
    /// Line of `discover` in the file.
    pub line: usize,
    /// The port of discovered servers for which the source has no port.
    pub port: u16,
    /// The dataplane's settings of discovered servers, with the weight of servers for which the
    /// source has none.
    pub config: ServerConfig,
    /// The health check.
    pub check: Option<Check>,
}

/// `[lvsd]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Daemon {
    /// Whether the daemon also manages services without an owner.
    pub adopt: bool,
    /// Filter of the log.
    pub log: Option<String>,
    /// Maximum percentage of all servers that a reload may remove unless it is forced; `None` for
    /// [`Self::MAX_REMOVE`].
    pub max_remove: Option<u8>,
    /// Whether lvsd drops the privileges that it does not need: `off` or `auto`.
    pub confine: Option<String>,
    /// The reaction to manual changes.
    pub on_drift: OnDrift,
    /// The notification program with its arguments; empty if there is none.
    pub notify: Vec<String>,
    /// The user and the group of the notify command.
    pub notify_user: Option<(u32, u32)>,
    /// Time after which the notification program is killed; `None` for [`Self::NOTIFY_TIMEOUT`].
    pub notify_timeout: Option<Duration>,
}

/// `[api]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Api {
    /// Addresses on which HTTP is served.
    pub listen: Vec<SocketAddr>,
    /// Permitted values of `Host`, besides the names of this host.
    pub allowed_hosts: Vec<String>,
    /// Tokens of clients over TCP.
    pub tokens: Vec<Named>,
    /// Whether the API serves the dashboard.
    pub dashboard: bool,
}

/// The reaction to manual changes of services of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDrift {
    /// Manual changes are reported and reverted.
    #[default]
    Repair,
    /// Manual changes are reported, and kept until the file is loaded again.
    Report,
}

impl Daemon {
    /// The default of `max_removed_percent`.
    pub const MAX_REMOVE: u8 = 50;
    /// The default time limit of the notification program.
    pub const NOTIFY_TIMEOUT: Duration = Duration::from_secs(10);
    /// Number of servers that a reload may always remove.
    const FEW: usize = 10;

    /// Whether a reload may reduce the number of servers from `before` to `after`.
    pub fn may_shrink(&self, before: usize, after: usize) -> bool {
        let removed = before.saturating_sub(after);
        let most = usize::from(self.max_remove.unwrap_or(Self::MAX_REMOVE));
        removed <= Self::FEW || removed * 100 <= before * most
    }
}

/// `[dataplane]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dataplane {
    /// The dataplane's command line, apart from `--socket` and the options of [`Self::peers`].
    pub options: Vec<String>,
    /// Whether the backend is `tun`: the host routes packets to the dataplane.
    pub is_routed: bool,
    /// Control socket.
    pub socket: Option<String>,
    /// Group whose members have write access.
    pub group: Option<String>,
    /// Group whose members have read access.
    pub readers: Option<String>,
    /// The time without an answer after which the dataplane is killed and replaced.
    pub hang_limit: Option<Duration>,
    /// Whether the dataplane owns every VIP.
    pub own_vips: bool,
    /// Local addresses of full NAT, and hairpin; `None` leaves the dataplane's local addresses
    /// unchanged.
    pub local: Option<LocalPool>,
    /// Peers, with which the dataplane replicates connections.
    pub peers: Option<Peers>,
    /// Path of the dataplane.
    pub program: Option<String>,
}

/// The settings for keepalived, and the files shared with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vrrp {
    /// The interface for VRRP advertisements.
    pub interface: String,
    /// The virtual router number, which is the same on all directors of a cluster.
    pub router_id: u8,
    /// The priority before the values of this director's state are added.
    pub priority: u8,
    /// The time between two advertisements.
    pub advert: Duration,
    /// The addresses of the other directors, if VRRP does not use multicast.
    pub peers: Vec<IpAddr>,
    /// The addresses that this host has while this director is active.
    pub addresses: Vec<HostAddress>,
    /// Path of the track file, from which keepalived reads the readiness of this director.
    pub track_file: PathBuf,
    /// Path of the FIFO into which keepalived writes its state.
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
    /// The value that is added to the priority during maintenance, so that a director that is not
    /// in maintenance takes over.
    pub const MAINTENANCE: i16 = -100;
    /// The value that is added to the priority below a quorum, so that a director with all its
    /// services takes over.
    pub const BELOW_QUORUM: i16 = -50;
    /// The lowest priority to which both values can be added: keepalived uses at least 1.
    pub(crate) const PRIORITY_ENOUGH: i64 = 1 - (Self::MAINTENANCE + Self::BELOW_QUORUM) as i64;
}

/// Settings of the announcement of addresses by routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announce {
    /// Time in maintenance for which routers prefer other directors before an address is withdrawn.
    pub drain: Duration,
    /// Time that the dataplane continues to announce without messages from lvsd.
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
    /// The address.
    pub ip: IpAddr,
    /// Prefix length of the address's network.
    pub len: u8,
    /// The interface of the address; keepalived's default is the interface of the advertisements.
    pub device: Option<String>,
}

/// The peers that replicate connections with this director.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peers {
    /// Addresses and ports of the peers.
    pub addresses: Vec<SocketAddr>,
    /// The options about peers on the dataplane's command line.
    pub options: Vec<String>,
    /// File with the key that all peers use.
    pub key_file: String,
}

impl Peers {
    /// The reason why a dataplane would refuse the key.
    pub fn unusable_key(&self) -> Option<String> {
        lvs_api::directors::read_key(Path::new(&self.key_file)).err()
    }
}

impl Dataplane {
    /// The tables of the file whose dataplane options differ from those of `before`.
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

    /// The dataplane's command line, apart from `--socket`.
    pub fn arguments(&self) -> impl Iterator<Item = &str> {
        let peers = self.peers.iter().flat_map(|peers| &peers.options);
        self.options.iter().chain(peers).map(String::as_str)
    }
}

/// The owner of a VIP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VipMode {
    /// The dataplane owns the VIP, unless the host has the address when the file is loaded.
    #[default]
    Auto,
    /// The dataplane owns the VIP: it answers ARP for the address and announces it.
    Own,
    /// The host has the VIP, or a router routes it to this host; the dataplane does not answer ARP
    /// for it.
    Host,
    /// Several dataplanes have the VIP at the same time: each announces a route to it, and none
    /// answers ARP or neighbour discovery for it.
    Announce,
}

/// The action if the check of a server fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnCheckFailure {
    /// Weight 0: the server gets no new connections, and existing ones continue.
    #[default]
    Quiesce,
    /// The server is deleted: no packet is forwarded to it, and its connections stall until it is
    /// added again.
    Remove,
}

/// `[[service]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Number of the line in the file, from 1.
    pub line: usize,
    /// Name in logs.
    pub name: String,
    /// The service's identity in the dataplane.
    pub id: ServiceId,
    /// The service's settings in the dataplane.
    pub config: ServiceConfig,
    /// The ports that the service's mark represents, if the service has several ports.
    pub ports: Option<ManyPorts>,
    /// The owner of the VIP.
    pub vip: VipMode,
    /// The filter of the service's new connections.
    pub filter: SourceFilter,
    /// Proxy settings if lvsd proxies the service; `None` if the dataplane forwards it.
    pub proxy: Option<proxy::Options>,
    /// The action if the check of a server fails.
    pub on_check_failure: OnCheckFailure,
    /// Whether new connections for a server with weight 0 go to the other servers.
    pub quiesces_at_zero: bool,
    /// Time for which the connections of a server that was removed from the file continue.
    pub drain: Duration,
    /// Number of servers that the service requires.
    pub quorum: Quorum,
    /// The action on the service's VIP below the quorum.
    pub below_quorum: BelowQuorum,
    /// Whether servers count as down until a check has succeeded, even if they serve when lvsd
    /// starts.
    pub alpha: bool,
    /// Whether the service is removed when the daemon exits.
    pub omega: bool,
    /// Minimum percentage of servers that are up. If fewer are up, all servers count as up. 0
    /// disables this.
    pub min_share: u8,
    /// The server that replaces the other servers below the quorum.
    pub sorry: Option<Server>,
    /// Source of further servers.
    pub discovery: Option<Discovery>,
    /// Whether the list of servers is incomplete: the dataplane may have further servers of the
    /// service. Always false for the file alone.
    pub incomplete: bool,
    /// Whether the source of the service's servers has not answered yet. Never set for a service
    /// whose servers are in the file.
    pub unheard: bool,
    /// Real servers: first those of the file in its order, then those of DNS and etcd.
    pub servers: Vec<Server>,
}

/// Numbers of usable servers: at `up` a service gains its quorum, and below `down` it loses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quorum {
    /// Number of servers from which on the service has its quorum.
    pub up: u32,
    /// The service loses its quorum below this number of servers; at most `up`.
    pub down: u32,
}

impl Default for Quorum {
    fn default() -> Self {
        Self { up: 1, down: 1 }
    }
}

/// The action on the VIP of a service below its quorum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BelowQuorum {
    /// The dataplane continues to own the VIP.
    #[default]
    Keep,
    /// The dataplane releases the VIP, so that another director can take it over.
    GiveUp,
}

impl Service {
    /// The virtual address; `None` for a service with a mark.
    pub fn address(&self) -> Option<SocketAddr> {
        self.id.address()
    }

    /// Adds `by` to the line numbers of the service and of its servers.
    pub(crate) fn move_lines(&mut self, by: usize) {
        self.line += by;
        if let Some(discovery) = &mut self.discovery {
            discovery.line += by;
        }
        let servers = self.servers.iter_mut().chain(&mut self.sorry);
        servers.for_each(|server| server.line += by);
    }

    /// The virtual address without its port or ports.
    pub fn virtual_ip(&self) -> Option<IpAddr> {
        let many = self.ports.as_ref().map(|many| many.ip);
        many.or_else(|| Some(self.address()?.ip()))
    }
}

/// `[[service.server]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Number of the line in the file, from 1.
    pub line: usize,
    /// Address and port.
    pub address: SocketAddr,
    /// The dataplane's settings of the server while it is healthy.
    pub config: ServerConfig,
    /// The health check; without it, the server counts as healthy.
    pub check: Option<Check>,
}

/// The checks of all servers of these services.
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

    /// As [`load`](Self::load), for a host that `facts` describe: settings with which the dataplane
    /// would not start on this host are errors too.
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

    /// The services in the `text` of an etcd key or of a Service in Kubernetes, checked separately.
    /// `[defaults]` applies to them.
    ///
    /// # Errors
    /// The first error, as text.
    pub(crate) fn remote_services(&self, text: &str) -> Result<Vec<Service>, String> {
        check::remote(self, text)
    }

    /// Whether the files at `path` may name the dataplane's socket. It searches the text without
    /// parsing TOML; `false` means that they certainly do not.
    pub fn may_name_socket(path: &Path) -> bool {
        // A key can be written with escapes.
        let names = |text: &str| text.contains("socket") || text.contains('\\');
        files::read(path).map_or(true, |whole| names(&whole.text))
    }

    /// Checks `text`, the content of the file `path`.
    ///
    /// # Errors
    /// All errors in the text.
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

/// The reason why a file has no configuration.
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
        /// Offset of this byte, from 0.
        offset: usize,
        /// Value of the invalid byte.
        byte: u8,
    },
    /// The configuration is invalid.
    #[error("{0}")]
    Refused(Box<Report>),
}

/// The fix for a file that cannot be read.
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

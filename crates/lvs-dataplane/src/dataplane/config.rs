//! The configuration of a dataplane, and the errors that prevent its start.

use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use lvs_core::Registry;
use lvs_core::api::WORKERS_MAX;
use lvs_core::mark::MarkRule;
use lvs_core::memory::OutOfMemory;
use lvs_core::settings::{Profile, WhenFull};

use super::hook::PacketHook;
use crate::fast_path::FastPathError;
use crate::host::{Backend, HostError, is_interface_name};
use crate::warm_restart::StateKeeper;
use lvs_api::Address;
use lvs_packet::settings::Settings;
use lvs_process::server::BindError;

/// Default of [`PeersConfig::wait`].
pub const PEERS_WAIT: Duration = Duration::from_secs(10);
/// Default of [`PeersConfig::alarm`].
pub const PEERS_ALARM: Duration = Duration::from_secs(30);

/// The peers that this director replicates connections with.
#[derive(Clone, Debug, Default)]
pub struct PeersConfig {
    /// The address that peers connect to; port 0 means 8848. `None` for port 8848 of all addresses,
    /// or of all IPv4 addresses if no peer has an IPv6 address.
    pub listen: Option<SocketAddr>,
    /// The addresses of the peers; port 0 means 8848.
    pub peers: Vec<SocketAddr>,
    /// The file with the key that all peers share.
    pub key_file: PathBuf,
    /// Time after the start for which this director waits for unreachable peers before it is ready.
    /// With zero, it waits for no peer at all.
    pub wait: Duration,
    /// Longest time for which a peer's services may differ from this director's services without an
    /// alarm.
    pub alarm: Duration,
}

/// The configuration of a dataplane.
#[derive(Debug, Default)]
pub struct Config {
    /// How packets are received and sent: packet sockets or a TUN device.
    pub backend: Backend,
    /// Whether the kernel fast path is used.
    pub fast_path: UseKernel,
    /// Interfaces to which the XDP program of the kernel fast path is attached.
    pub xdp: Vec<String>,
    /// With the kernel fast path: whether the XDP program is also attached to each other interface
    /// whose driver has native XDP, unless the interface would lose an offload.
    pub xdp_auto: bool,
    /// Number of packets from the client after which a connection is offloaded; `None` for
    /// [16](crate::fast_path::OFFLOAD_AFTER).
    pub fast_path_after: Option<NonZeroU32>,
    /// The state keeper, which keeps connections for a warm restart without the kernel fast path.
    pub warm_restart: Option<StateKeeper>,
    /// Number of packet workers, [`WORKERS_MAX`] at most; `None` for one. Several workers are
    /// pinned to one processor each, unless the process may use fewer processors than workers.
    pub workers: Option<NonZeroUsize>,
    /// Whether packet workers run with real-time scheduling while they use less than half of a
    /// processor, if the host permits it.
    pub real_time: bool,
    /// The interfaces to use; empty for every Ethernet interface that is up and has no master.
    pub interfaces: Vec<String>,
    /// The address of the control socket; `None` for the default.
    pub address: Option<Address>,
    /// Group whose members have write access, in addition to root and the dataplane's own user.
    pub group: Option<u32>,
    /// Group whose members have read access, in addition to users with write access; `None` for all
    /// users.
    pub readers: Option<u32>,
    /// Whether the dataplane owns every virtual address that the host does not have: the dataplane
    /// then answers ARP or neighbour discovery for the address, and announces it.
    pub own_vips: bool,
    /// Source addresses of full NAT towards servers. The dataplane answers ARP or neighbour
    /// discovery for an address that the host does not have.
    pub local_addresses: Vec<IpAddr>,
    /// Whether NAT also translates the source address of a client whose replies would otherwise
    /// bypass the director.
    pub hairpin: bool,
    /// Settings of the packet pipeline that IPVS does not have.
    pub settings: Settings,
    /// The maximum number of connections; `None` for 2^20.
    pub max_connections: Option<usize>,
    /// Maximum number of connections whose client or server has an IPv6 address. Only the [kernel
    /// fast path](Self::fast_path) uses it, to allocate memory at the start. With `None`, it is the
    /// maximum number of connections up to 2^20, and above that a quarter of this maximum, but at
    /// least 2^20.
    pub max_ipv6: Option<usize>,
    /// Policy for a new connection if the table is full.
    pub when_full: WhenFull,
    /// Sysctls that are set at the start, as name and value.
    pub sysctls: Vec<(String, String)>,
    /// Rules in the form of `ipvsadm-save`, to be applied at the start: the text, and its name for
    /// errors.
    pub rules: Option<(String, String)>,
    /// Rules for marks, which set marks on packets, drop packets or pass them to the host.
    pub marks: Vec<MarkRule>,
    /// Ports of control connections that the FTP helper reads; empty for no helper.
    pub ftp_ports: Vec<u16>,
    /// The timeouts of connections at the start.
    pub profile: Profile,
    /// The peers that connections are replicated with.
    pub peers: Option<PeersConfig>,
    /// The schedulers that services can use.
    pub schedulers: Registry,
    /// A hook that receives packets before the director decides. It requires one packet worker.
    pub hook: Option<Box<dyn PacketHook>>,
}

impl Config {
    /// Returns the number of packet workers, or an error if the configuration does not permit it.
    pub(super) fn workers(&self) -> Result<NonZeroUsize, StartError> {
        let workers = self.workers.unwrap_or(NonZeroUsize::MIN);
        if workers.get() > WORKERS_MAX {
            return Err(StartError::Workers(workers));
        }
        if workers.get() > 1 && self.hook.is_some() {
            return Err(StartError::Hook(workers));
        }
        Ok(workers)
    }
}

/// Whether a dataplane uses the kernel fast path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum UseKernel {
    /// No
    #[default]
    Off,
    /// As `Auto`, but a warm restart has priority: the kernel fast path is not used if it cannot
    /// store the connections, or if a state keeper has them. If the kernel fast path is not used,
    /// `lvsadm doctor` reports no problem.
    #[value(skip)]
    Try,
    /// Yes, if the kernel permits it and a quarter of the free memory is enough; otherwise the log
    /// reports the reason
    Auto,
    /// Yes; the dataplane does not start without it
    On,
}

/// The reason why a dataplane did not start. The configuration of the host is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The control socket cannot be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The keeper cannot configure the host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A sysctl is refused.
    #[error("--sysctl {name}={value}: {error}")]
    Sysctl {
        /// Name of the sysctl.
        name: String,
        /// Value of the sysctl.
        value: String,
        /// The reason why the sysctl is refused.
        error: lvs_core::Error,
    },
    /// The ports of the FTP helper are refused.
    #[error("--helper: {0}")]
    Helper(#[source] lvs_core::Error),
    /// The rules for marks are refused.
    #[error("{0}")]
    Marks(String),
    /// The local addresses are refused.
    #[error("--local-address: {0}")]
    LocalAddresses(String),
    /// A line of the file of rules is refused.
    #[error(transparent)]
    Rules(#[from] RulesError),
    /// The name is not valid for an interface.
    #[error("--interface {0}")]
    Interface(String),
    /// The kernel fast path is not available.
    #[error("--fast-path on: {0}")]
    FastPath(#[source] FastPathError),
    /// XDP is configured without the kernel fast path.
    #[error("--xdp is a part of the kernel fast path: remove --xdp or --fast-path off")]
    XdpAlone,
    /// Replication with peers cannot start.
    #[error("{0}")]
    Peers(String),
    /// Not enough memory for the connection table, or for the table of persistence templates.
    #[error(
        "{0}: reduce --max-connections, or permit the dataplane more memory (ulimit -v, vm.overcommit_memory)"
    )]
    Memory(OutOfMemory),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
    /// More packet workers are configured than [`WORKERS_MAX`].
    #[error("--workers {0}: the maximum is {WORKERS_MAX} packet workers")]
    Workers(NonZeroUsize),
    /// A hook is configured with several packet workers.
    #[error("an embedding program that inspects each packet requires one packet worker, not {0}")]
    Hook(NonZeroUsize),
    /// The random key of the connection table cannot be read.
    #[error("the kernel provides no random numbers: {0}")]
    Random(#[source] std::io::Error),
}

// The message already contains the cause, so `source` does not return it again.
impl From<OutOfMemory> for StartError {
    fn from(error: OutOfMemory) -> Self {
        Self::Memory(error)
    }
}

/// A line of a file of rules that cannot be applied.
#[derive(Debug, thiserror::Error)]
#[error("{file}, line {line}: {message}")]
pub struct RulesError {
    /// Name of the file of rules.
    pub file: String,
    /// The number of the line, from 1.
    pub line: usize,
    /// The reason why the line cannot be applied.
    pub message: String,
}

/// Refuses names that cannot be names of interfaces, such as names with a slash.
pub(super) fn check_interface_names(names: &[String]) -> Result<(), StartError> {
    for name in names {
        let error = if let Some((vlan, _)) = name.split_once('=') {
            format!(
                "{name:?}: the dataplane does not create {vlan}: create the VLAN interface with `ip link add link TRUNK name {vlan} type vlan id VLAN` and its addresses with `ip addr add`, and use --interface {vlan}"
            )
        } else if is_interface_name(name) {
            continue;
        } else {
            format!(
                "{name:?}: no interface can have that name: a name has 1 to 15 bytes, without /, :, whitespace and control characters, and is neither . nor .."
            )
        };
        return Err(StartError::Interface(error));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_name_that_kernel_refuses_is_refused() {
        let check = |name: &str| check_interface_names(&[name.to_owned()]);
        for good in ["eth0", "eth0.100", "eth0.4095", "wan.x", ".7"] {
            assert!(check(good).is_ok(), "{good}");
        }
        for wrong in [
            "",
            ".",
            "..",
            "a-name-that-is-too-long",
            "eth0/1",
            "eth0:1",
            "eth 0",
        ] {
            assert!(check(wrong).is_err(), "{wrong}");
        }
        let error = check("eth0.100=10.0.0.1/24")
            .expect_err("an interface name with an address was accepted");
        assert!(error.to_string().contains("ip link add"), "{error}");
    }
}

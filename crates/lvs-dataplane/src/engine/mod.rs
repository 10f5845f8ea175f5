//! The engine: a director between the packets of this host's interfaces and a control socket.

mod access;
pub mod bench;
mod calls;
mod capture;
mod decider;
mod local;
mod network;
mod offline;
mod remedies;
mod rules;
mod shared;
mod trunks;
mod worker;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use lvs_core::api::{Call, Failure, LocalPool};
use lvs_core::mark::MarkRule;
use lvs_core::{Control, Options, PacketMeta, Profile, Registry};
use serde_json::Value;
use tracing::info;

use self::offline::Offline;
pub use self::rules::RulesError;
pub use self::shared::Shared;
use self::worker::{Setup, Worker};
use crate::control::Address;
use crate::control::server::{self, BindError, Handle, Permissions, Server, Sink};
use crate::host::shield::ShieldError;
use crate::host::steering::SteeringError;
use crate::io::af_packet::OpenError;
use crate::io::tun::TunError;
use crate::netlink::NetlinkError;
use crate::packet::pipeline::Settings;
use crate::sys::EventFd;

/// How an engine is to run.
#[derive(Debug, Default)]
pub struct Config {
    /// How packets come and go.
    pub backend: Backend,
    /// The interfaces to use; empty for every Ethernet interface that is up and has no master. Where the host has no
    /// `eth0.100`, the engine makes one for VLAN 100 of `eth0`, with the addresses behind it: `eth0.100=10.0.100.1/24`.
    pub interfaces: Vec<String>,
    /// Where the control socket is; `None` for the default.
    pub address: Option<Address>,
    /// Group whose members may change things, besides root and the engine's own user.
    pub group: Option<u32>,
    /// Group whose members, and nobody else without the right to change things, may look; `None` for everybody.
    pub readers: Option<u32>,
    /// Own every virtual address that the host does not have: answer ARP or neighbour discovery for it and announce it.
    pub own_vips: bool,
    /// Addresses that stand for clients towards servers of full NAT. Those that the host does not have are answered for.
    pub local_addresses: Vec<IpAddr>,
    /// NAT translates both ends where replies would not come back to the director.
    pub hairpin: bool,
    /// How the packet path behaves where IPVS has no say.
    pub settings: Settings,
    /// Connections at most; `None` for 2^20.
    pub max_connections: Option<usize>,
    /// Sysctls to set before anything else, as name and value.
    pub sysctls: Vec<(String, String)>,
    /// Rules in the form of `ipvsadm-save`, to be applied at the start: the text, and what to call it in errors.
    pub rules: Option<(String, String)>,
    /// Rules that give packets marks.
    pub marks: Vec<MarkRule>,
    /// Ports of control connections that the helper for FTP looks at; empty for no helper.
    pub ftp_ports: Vec<u16>,
    /// Use no interface at all: services and servers can be set up and listed, and no packet comes. Needs no privileges.
    pub no_interfaces: bool,
    /// With `no_interfaces`: time stands still until a caller moves it, and the methods `test.*` hand in frames.
    pub virtual_time: bool,
    /// The kernel whose set of schedulers to have; `None` for the newest.
    pub compat: Option<Compat>,
    /// The timeouts to begin with.
    pub profile: Profile,
    /// The schedulers that services can ask for.
    pub schedulers: Registry,
    /// Sees each packet before the director.
    pub hook: Option<Box<dyn PacketHook>>,
}

/// How packets come and go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// By packet sockets, or through a TUN device where those are not permitted.
    #[default]
    Auto,
    /// By packet sockets.
    AfPacket,
    /// Through a TUN device that the host routes them into.
    Tun,
}

/// A kernel version to be like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compat {
    /// As Debian 12 builds it: without the scheduler `twos`.
    Linux6_1,
}

/// What an embedding program does with a packet before the director sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookAction {
    /// Let the director decide.
    Continue,
    /// Leave it to the host.
    Host,
    /// Discard it.
    Drop,
}

/// A look at each packet before the director decides. It runs on the packet path: it should be quick and not block.
pub trait PacketHook: Send {
    /// Decides on a packet.
    fn packet(&mut self, meta: &PacketMeta<'_>) -> HookAction;
}

impl fmt::Debug for dyn PacketHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PacketHook")
    }
}

/// Why an engine did not start. The host is as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The control socket.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A packet socket.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The device that leads to the host.
    #[error(transparent)]
    Tun(#[from] TunError),
    /// The kernel's tables.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The shield.
    #[error(transparent)]
    Shield(#[from] ShieldError),
    /// The host's rules and routes.
    #[error(transparent)]
    Steering(#[from] SteeringError),
    /// A sysctl.
    #[error("--sysctl {name}={value}: {error}")]
    Sysctl {
        /// Its name.
        name: String,
        /// The value.
        value: String,
        /// What is wrong.
        error: lvs_core::Error,
    },
    /// Ports for the helper.
    #[error("--helper: {0}")]
    Helper(#[source] lvs_core::Error),
    /// The rules for marks.
    #[error("{0}")]
    Marks(String),
    /// A socket for requests to the kernel's tables.
    #[error("cannot open a socket for rules and routes: {0}")]
    Requests(#[source] std::io::Error),
    /// The local addresses.
    #[error("--local-address: {0}")]
    LocalAddresses(String),
    /// The file of rules.
    #[error(transparent)]
    Rules(#[from] RulesError),
    /// An interface that was asked for is not there.
    #[error(
        "there is no interface {0}: `ip link` lists them (and one called eth0.100 is made where there is an eth0)"
    )]
    NoInterface(String),
    /// An interface that cannot be understood.
    #[error("--interface {0}")]
    Interface(String),
    /// An interface that was asked for is not Ethernet.
    #[error(
        "{0} is not an Ethernet interface: leave it out, packets of such interfaces reach the host only"
    )]
    NotEthernet(String),
    /// A thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
    /// Virtual time and real interfaces.
    #[error("--virtual-time is for engines without interfaces: add --no-interfaces")]
    VirtualTime,
    /// The random numbers that key the connection table.
    #[error("cannot read random numbers from /dev/urandom: {0}")]
    Random(#[source] std::io::Error),
}

/// A running engine. Dropping it stops it.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
    server: Option<Handle>,
}

impl Engine {
    /// Starts an engine in this thread's network namespace. When it returns, the control socket answers and packets are
    /// handled.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: Config) -> Result<Self, StartError> {
        if config.virtual_time && !config.no_interfaces {
            return Err(StartError::VirtualTime);
        }
        let interfaces = config.interfaces.iter().map(|text| text.parse());
        let interfaces = interfaces
            .collect::<Result<_, String>>()
            .map_err(StartError::Interface)?;
        let address = config.address.unwrap_or_default();
        // First of all: a second engine must not touch anything.
        let server = Server::bind(
            &address,
            Permissions {
                writers: config.group,
                readers: config.readers,
            },
        )?;
        let address = server.address().clone();
        let mut options = Options {
            seed: random_seed()?,
            profile: config.profile,
            schedulers: config.schedulers,
            ..Options::default()
        };
        if let Some(max) = config.max_connections {
            options.max_connections = max;
        }
        if config.compat == Some(Compat::Linux6_1) {
            options.schedulers.remove("twos");
        }
        let mut control = Control::new(options.clone());
        for (name, value) in config.sysctls {
            control
                .set_sysctl(&name, &value)
                .map_err(|error| StartError::Sysctl { name, value, error })?;
        }
        control
            .set_ftp_ports(config.ftp_ports)
            .map_err(StartError::Helper)?;
        let shard = control.shard(0).expect("there is at least one");
        let wake = EventFd::new().map_err(StartError::Thread)?;
        let (shared, commands) = Shared::new(control, wake, config.virtual_time);
        let shared = Arc::new(shared);
        let setup = Setup {
            backend: config.backend,
            interfaces,
            own_all_vips: config.own_vips,
            settings: config.settings,
            hook: config.hook,
        };
        let spawn = |run: Box<dyn FnOnce() + Send>| {
            let builder = thread::Builder::new().name("lvs-worker".into());
            builder.spawn(run).map_err(StartError::Thread)
        };
        let worker = if config.no_interfaces {
            let worker = Offline::new(shared.clone(), commands, shard, options);
            spawn(Box::new(move || worker.run()))?
        } else {
            let worker = Worker::new(shared.clone(), commands, shard, setup)?;
            spawn(Box::new(move || worker.run()))?
        };
        let mut engine = Self {
            shared,
            worker: Some(worker),
            server: None,
        };
        if !config.local_addresses.is_empty() || config.hairpin {
            engine
                .call(Call::LocalSet(LocalPool {
                    addresses: config.local_addresses,
                    hairpin: config.hairpin,
                }))
                .map_err(|failure| StartError::LocalAddresses(failure.message))?;
        }
        if !config.marks.is_empty() {
            let rules = config.marks.iter().map(ToString::to_string).collect();
            engine
                .call(Call::MarkSet { rules })
                .map_err(|failure| StartError::Marks(failure.message))?;
        }
        if let Some((text, name)) = config.rules {
            rules::apply(&engine.shared, &text, &name)?;
        }
        let handle = server.serve(engine.shared()).map_err(StartError::Thread)?;
        engine.server = Some(handle);
        info!("ready at {address}");
        Ok(engine)
    }

    /// Does what a client of the control socket could ask for. Items of a list are not kept.
    ///
    /// # Errors
    /// The refusal that the client would get; then nothing has changed.
    pub fn call(&self, call: Call) -> Result<Value, Failure> {
        let mut nowhere = std::io::sink();
        server::Handler::call(&*self.shared, call, &mut Sink::new(0, &mut nowhere))
    }

    /// Where its control socket is.
    pub fn address(&self) -> Option<&Address> {
        self.server.as_ref().map(Handle::address)
    }

    /// A handle to stop the engine from another thread.
    pub fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Waits until the engine has stopped.
    pub fn join(mut self) {
        self.wait();
    }

    fn wait(&mut self) {
        if let Some(worker) = self.worker.take()
            && worker.join().is_err()
        {
            tracing::error!("the packet worker has failed");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.stop();
        self.wait();
    }
}

fn random_seed() -> Result<u64, StartError> {
    use std::io::Read;
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(StartError::Random)?;
    Ok(u64::from_ne_bytes(bytes))
}

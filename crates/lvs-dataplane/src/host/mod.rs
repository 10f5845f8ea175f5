//! All changes of the host, made by a separate thread: the keeper.

mod announce;
mod interception;
pub(crate) mod keeper;
mod links;
mod listener;
pub(crate) mod local_nodes;
mod loopback;
mod neighbours;
mod permits;
mod regions;
pub(crate) mod setup;
pub mod shield;
pub mod steering;
pub(crate) mod update;
pub(crate) mod view;
mod vips;
mod waiting;
mod xdp;

use std::net::IpAddr;
use std::sync::{Arc, MutexGuard};

use lvs_core::{Control, Instant};

use self::shield::ShieldError;
use self::steering::SteeringError;
use self::view::View;
use crate::io::af_packet::OpenError;
use crate::io::port::Port;
use crate::io::tun::TunError;
use crate::netlink::NetlinkError;
use lvs_packet::net::PortId;

/// The mechanism by which packets are received and sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Backend {
    /// Packet sockets, or a TUN device if packet sockets are not permitted
    #[default]
    Auto,
    /// Packet sockets
    #[value(name = "af_packet")]
    AfPacket,
    /// A TUN device through which the host routes packets; no direct routing
    Tun,
}

/// Reasons why the keeper cannot configure the host. The host is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// A packet socket cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The TUN device through which packets reach the host cannot be used.
    #[error(transparent)]
    Tun(#[from] TunError),
    /// The kernel's tables cannot be read.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The shield cannot be set.
    #[error(transparent)]
    Shield(#[from] ShieldError),
    /// The host's policy rules or routes cannot be changed.
    #[error(transparent)]
    Steering(#[from] SteeringError),
    /// A socket for rules and routes, or for announcements of addresses, cannot be opened.
    #[error("cannot open a socket for rules and routes, or for announcements of addresses: {0}")]
    Requests(#[source] std::io::Error),
    /// A configured interface is not Ethernet.
    #[error(
        "{0} is not an Ethernet interface: leave it out; only the host receives packets of such interfaces"
    )]
    NotEthernet(String),
    /// `--xdp` names an interface that the dataplane does not use.
    #[error(
        "--xdp {0}: the dataplane does not use this interface: add --interface {0}, or remove --xdp {0}"
    )]
    NoXdpInterface(String),
    /// The kernel does not report which interfaces can send frames that XDP forwards.
    #[error(
        "cannot use --xdp: the kernel does not report which interfaces support XDP (this requires Linux 6.3): {0}"
    )]
    Xdp(#[source] std::io::Error),
}

/// Whether the kernel permits an interface of this name.
pub(crate) fn is_interface_name(name: &str) -> bool {
    // IFNAMSIZ is 16 with the NUL.
    let is_wrong = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
    (1..=15).contains(&name.len()) && name != "." && name != ".." && !name.contains(is_wrong)
}

/// The functions of the dataplane that the keeper calls. They may block for a short time.
pub(crate) trait DataplaneSide: Send + Sync {
    /// Locks the director's control half, for one short operation.
    fn control(&self) -> MutexGuard<'_, Control>;

    fn now(&self) -> Instant;

    /// Whether the dataplane is to end and all packet workers have ended.
    fn has_ended(&self) -> bool;

    /// Publishes a snapshot for the packet workers.
    fn publish(&self, view: Arc<View>);

    /// The generation of the oldest snapshot that a packet worker uses.
    fn taken(&self) -> u64;

    fn workers(&self) -> usize;

    /// Adds a port, or a sending queue of it, to each packet worker.
    fn attach(&self, port: PortId, ports: Vec<Port>);

    /// Removes a port from the packet workers.
    fn detach(&self, port: PortId);

    /// Reports to the packet workers the neighbours that do not answer.
    fn report_silent(&self, neighbours: Vec<(PortId, IpAddr)>);

    /// Stores the present state for a successor.
    fn keep(&self) {}

    /// The local addresses of full NAT that connections use; `None` if a packet worker does not
    /// answer.
    fn local_addresses(&self) -> Option<Vec<IpAddr>>;
}

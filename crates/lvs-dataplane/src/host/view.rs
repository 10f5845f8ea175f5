//! The snapshot of the host that the keeper publishes for the packet workers. It is immutable and
//! has a number.
//!
//! A worker switches to the latest snapshot between two batches: it compares one atomic number, and
//! only if the number has increased, locks and copies a pointer. Snapshots share their unchanged
//! parts ([`SharedMap`](lvs_packet::shared_map::SharedMap)).

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use lvs_core::Instant;
use lvs_core::api::{Failure, Host, Need};
use lvs_core::full_nat::LocalAddress;
use lvs_core::mark::MarkRule;

use super::local_nodes;
use super::permits::permits_routed;
use super::regions::Regions;
use crate::netlink::{NetState, RouteKind};
use lvs_packet::drop::FrameDrop;
use lvs_packet::intercept::Intercept;
use lvs_packet::net::{NextHop, PortId, PortInfo};
use lvs_packet::shared_map::SharedSet;
use lvs_packet::steer::Steering;
use lvs_packet::wire::Mac;

/// The state of the host, and the settings that the packet path uses.
#[derive(Debug, Default)]
pub(crate) struct View {
    /// Number of the snapshot. A later snapshot has a higher number.
    pub(crate) generation: u64,
    /// Number that increases if packets may use other routes than in the previous snapshot.
    pub(crate) ways: u64,
    /// Ports, routes, neighbours and virtual addresses; shared with earlier snapshots until they
    /// change.
    pub(crate) tables: Arc<Tables>,
    /// The traffic that is hidden from the host.
    pub(crate) intercept: Arc<Intercept>,
    pub(crate) marks: Option<Arc<[MarkRule]>>,
    /// Value of the sysctl `pmtu_disc`.
    pub(crate) pmtu_disc: bool,
    /// Value of the sysctl `ignore_tunneled`.
    pub(crate) ignore_tunneled: bool,
    /// Number that increases when the control half has changed, so that each worker applies the
    /// changes to its shard.
    pub(crate) config: u64,
    /// The rule that divides packets among several workers; `None` for one worker.
    pub(crate) steering: Option<Arc<Steering>>,
    /// The host's ephemeral ports, read at the first use.
    pub(crate) ephemeral: OnceLock<(u16, u16)>,
}

impl View {
    /// The packet worker that receives the packets of a client's connections.
    pub(crate) fn worker_of_client(&self, client: SocketAddr) -> usize {
        let steering = self.steering.as_ref();
        steering.map_or(0, |steering| steering.of_client(client.ip(), client.port()))
    }
}

/// The present state of a port.
#[derive(Clone, Debug)]
pub(crate) struct KnownPort {
    pub(crate) ifindex: u32,
    pub(crate) name: Arc<str>,
    pub(crate) info: PortInfo,
    /// Time since which the port is down; `None` while it is up.
    pub(crate) down: Option<Instant>,
    /// Whether the host has decapsulated the packets of this interface, and IPVS does not balance
    /// the outer packets.
    pub(crate) decapsulates: bool,
}

#[derive(Clone, Debug, Default)]
struct PortTable {
    all: Vec<Option<KnownPort>>,
    by_ifindex: HashMap<u32, PortId>,
}

/// A bit set of the last bytes of addresses, which excludes most other addresses without a look-up.
#[derive(Clone, Copy, Debug, Default)]
struct LastBytes([u64; 4]);

impl LastBytes {
    #[inline]
    fn place(addr: IpAddr) -> (usize, u64) {
        let last = match addr {
            IpAddr::V4(addr) => addr.octets()[3],
            IpAddr::V6(addr) => addr.octets()[15],
        };
        (usize::from(last >> 6), 1 << (last & 63))
    }

    fn add(&mut self, addr: IpAddr) {
        let (word, bit) = Self::place(addr);
        self.0[word] |= bit;
    }

    #[inline]
    fn may_have(&self, addr: IpAddr) -> bool {
        let (word, bit) = Self::place(addr);
        self.0[word] & bit != 0
    }
}

impl FromIterator<IpAddr> for LastBytes {
    fn from_iter<T: IntoIterator<Item = IpAddr>>(addresses: T) -> Self {
        let mut all = Self::default();
        addresses.into_iter().for_each(|addr| all.add(addr));
        all
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Tables {
    pub(crate) state: NetState,
    ports: Arc<PortTable>,
    /// With the TUN backend: the port of the TUN device, through which all packets leave, whatever
    /// interface their route has. `None` with other backends.
    hop: Option<PortId>,
    regions: Arc<Regions>,
    /// Virtual addresses of services and of rules for marks.
    pub(crate) vips: SharedSet<IpAddr>,
    /// The last bytes of the addresses in `vips`, and perhaps of removed addresses.
    virtual_addresses: LastBytes,
    /// The dataplane's own addresses, which the host does not have: the dataplane answers packets
    /// to their unused ports. With the TUN backend, also all other virtual addresses.
    pub(crate) own: SharedSet<IpAddr>,
    /// Own addresses that are announced by routes: the dataplane does not answer ARP and neighbour
    /// discovery for them.
    pub(crate) quiet: SharedSet<IpAddr>,
    /// The last bytes of the host's own addresses.
    own_addresses: LastBytes,
    /// The last bytes of the addresses in `own`.
    answered: LastBytes,
}

impl Tables {
    pub(crate) fn new(state: NetState) -> Self {
        let mut this = Self {
            state,
            ..Self::default()
        };
        this.follow_addresses();
        this.follow_routes();
        this
    }

    /// Updates the data that are derived from the host's addresses.
    pub(crate) fn follow_addresses(&mut self) {
        let links = self.state.links();
        let addresses = links.flat_map(|link| self.state.addresses(link.index));
        self.own_addresses = addresses.map(|address| address.ip).collect();
    }

    /// Updates the data that are derived from the kernel's addresses and routes.
    pub(crate) fn follow_routes(&mut self) {
        self.regions = Arc::new(Regions::of(&self.state));
    }

    /// Updates the data that are derived from [`vips`](Self::vips).
    pub(crate) fn follow_vips(&mut self) {
        self.virtual_addresses = self.vips.iter().copied().collect();
    }

    /// Adds an address to [`vips`](Self::vips).
    pub(crate) fn add_vip(&mut self, addr: IpAddr) {
        self.vips.insert(addr);
        self.virtual_addresses.add(addr);
    }

    /// Updates the data that are derived from [`own`](Self::own).
    pub(crate) fn follow_own(&mut self) {
        self.answered = self.own.iter().copied().collect();
    }

    pub(crate) fn set_port(&mut self, port: PortId, properties: KnownPort) {
        let ports = Arc::make_mut(&mut self.ports);
        if ports.all.len() <= port.index() {
            ports.all.resize(port.index() + 1, None);
        }
        ports.by_ifindex.insert(properties.ifindex, port);
        ports.all[port.index()] = Some(properties);
    }

    pub(crate) fn remove_port(&mut self, port: PortId) -> Option<KnownPort> {
        let ports = Arc::make_mut(&mut self.ports);
        let gone = ports.all.get_mut(port.index()).and_then(Option::take)?;
        ports.by_ifindex.remove(&gone.ifindex);
        Some(gone)
    }

    /// Makes `port` the port of all routes, because the host routes the packets that it receives
    /// there. MTU and source address of a route still apply.
    pub(crate) const fn route_over(&mut self, port: PortId) {
        self.hop = Some(port);
    }

    /// Whether the host routes packets through a TUN device.
    pub(crate) const fn is_routed(&self) -> bool {
        self.hop.is_some()
    }

    #[inline]
    pub(crate) fn port(&self, port: PortId) -> Option<&KnownPort> {
        self.ports.all.get(port.index())?.as_ref()
    }

    /// The interfaces in use, with their ports. Excludes the devices to the host.
    pub(crate) fn interfaces(&self) -> impl Iterator<Item = (PortId, &KnownPort)> {
        let ports = (0..).map(PortId).zip(&self.ports.all);
        let ports = ports.filter_map(|(port, known)| Some((port, known.as_ref()?)));
        let devices = [Some(PortId::HOST), Some(PortId::LOCAL), self.hop];
        ports.filter(move |(port, _)| !devices.contains(&Some(*port)))
    }

    /// The lowest number that no port has.
    pub(crate) fn free_port(&self) -> PortId {
        let (all, first) = (&self.ports.all, PortId::FIRST.index());
        let free = (first..all.len()).find(|&place| all[place].is_none());
        let free = free.unwrap_or(all.len().max(first));
        PortId(u16::try_from(free).unwrap_or(u16::MAX))
    }

    pub(crate) fn port_of(&self, ifindex: u32) -> Option<PortId> {
        self.ports.by_ifindex.get(&ifindex).copied()
    }

    pub(crate) fn ifindex(&self, port: PortId) -> Option<u32> {
        Some(self.port(port)?.ifindex)
    }

    pub(crate) fn name(&self, port: PortId) -> &str {
        self.port(port)
            .map_or("a port that was removed", |port| &port.name)
    }

    pub(crate) fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Whether `addr` is a virtual address of a service or of a rule for marks.
    pub(crate) fn is_vip(&self, addr: IpAddr) -> bool {
        self.virtual_addresses.may_have(addr) && self.vips.contains(&addr)
    }

    /// Whether the address is in [`own`](Self::own). The dataplane answers ARP and neighbour
    /// discovery for such an address, except with the TUN backend and for the addresses in
    /// [`quiet`](Self::quiet).
    pub(crate) fn is_own(&self, addr: IpAddr) -> bool {
        self.answered.may_have(addr) && self.own.contains(&addr)
    }

    /// Whether `src` may be an address of this director, which a packet from another host must not
    /// have as its source. Compares only the last byte: the caller must look up the address. Always
    /// false with the TUN backend, where the host checks sources, and its own packets arrive on the
    /// same device.
    #[inline]
    pub(crate) fn may_be_forged(&self, src: IpAddr) -> bool {
        self.hop.is_none() && (self.own_addresses.may_have(src) || self.answered.may_have(src))
    }

    pub(crate) fn neighbour(&self, port: PortId, addr: IpAddr) -> Option<Mac> {
        let neighbour = self.state.neighbour(self.ifindex(port)?, addr)?;
        neighbour.usable().map(Mac)
    }

    pub(crate) fn route(&self, dst: IpAddr) -> Option<NextHop> {
        Some(self.route_of_region(dst)?.0)
    }

    /// Returns the route to `dst`, and whether its next hop is a gateway, which may be `dst`
    /// itself. The route applies to the whole [region](Self::regions); without a gateway, each
    /// address is its own next hop.
    pub(crate) fn route_of_region(&self, dst: IpAddr) -> Option<(NextHop, bool)> {
        let hit = self.state.lookup(dst)?;
        if hit.kind != RouteKind::Unicast {
            return None;
        }
        let port = match self.hop {
            // A route into the dataplane's own device cannot be used.
            Some(hop) if self.port_of(hit.oif).is_none() => hop,
            Some(_) => return None,
            None => self.port_of(hit.oif)?,
        };
        let link = self.state.link(hit.oif)?;
        let hop = NextHop {
            port,
            addr: hit.gateway.unwrap_or(dst),
            mtu: hit.mtu.map_or(link.mtu, |mtu| mtu.min(link.mtu)),
            source: self.state.source_address(dst),
        };
        Some((hop, hit.gateway.is_some()))
    }
}

impl Tables {
    /// Returns why the dataplane cannot send packets to `dst`.
    pub(crate) fn why_no_route(&self, dst: IpAddr) -> NoRoute {
        let Some(hit) = self.state.lookup(dst) else {
            return NoRoute::Missing;
        };
        match self.state.link(hit.oif) {
            _ if hit.kind != RouteKind::Unicast => NoRoute::Refuses,
            Some(link) if self.hop.is_none() && !link.is_arp_capable() => {
                NoRoute::NoLinkLayer(link.name.clone())
            }
            Some(link) if self.hop.is_none() => NoRoute::Unused(link.name.clone()),
            _ => NoRoute::Missing,
        }
    }

    /// The names of the devices that the host's routes use and the dataplane does not: with
    /// `link_layer`, devices with a link layer, otherwise devices without one.
    pub(crate) fn unused_devices(&self, link_layer: bool) -> Vec<&str> {
        let links = self.state.routed_links();
        let links = links.filter_map(|ifindex| self.state.link(ifindex));
        let unused = links.filter(|link| {
            link.hardware != libc::ARPHRD_LOOPBACK
                && link.is_arp_capable() == link_layer
                && self.port_of(link.index).is_none()
        });
        let mut names: Vec<&str> = unused.map(|link| link.name.as_str()).collect();
        names.sort_unstable();
        names
    }
}

/// Why the dataplane cannot send packets to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoRoute {
    /// The host has no route to the address, or only a route that cannot be used, such as one into
    /// the dataplane's own device.
    Missing,
    /// The route refuses packets (`unreachable`, `prohibit`, `blackhole`).
    Refuses,
    /// The route uses this device, which has no link layer.
    NoLinkLayer(String),
    /// The route uses this interface, but the dataplane does not.
    Unused(String),
}

impl NoRoute {
    pub(crate) const fn reason(&self) -> FrameDrop {
        match self {
            Self::Missing => FrameDrop::NoRoute,
            Self::Refuses => FrameDrop::RouteRefuses,
            Self::NoLinkLayer(_) => FrameDrop::NoLinkLayer,
            Self::Unused(_) => FrameDrop::UnusedInterface,
        }
    }
}

impl fmt::Display for NoRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("this host has no route to it: add one"),
            Self::Refuses => {
                f.write_str("its route is a blackhole, unreachable or prohibit route: delete it")
            }
            Self::NoLinkLayer(device) => write!(
                f,
                "its route uses {device}, which has no link layer: use --backend tun"
            ),
            Self::Unused(device) => write!(
                f,
                "its route uses {device}, which the dataplane does not use: add --interface {device}"
            ),
        }
    }
}

/// Changes are checked against the latest snapshot, so that no thread waits for the keeper while
/// this thread has the control half locked.
impl Host for View {
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        if self.tables.is_routed() {
            permits_routed(need, &self.tables.state)?;
        }
        Ok(())
    }

    fn is_broadcast(&self, addr: IpAddr) -> bool {
        let route = self.tables.state.lookup(addr);
        route.is_some_and(|hit| hit.kind == RouteKind::Broadcast)
    }

    fn mtu(&self, interface: &str) -> Option<u32> {
        Some(self.tables.state.link_by_name(interface)?.mtu)
    }

    fn local_ports(&self, addr: IpAddr) -> LocalAddress {
        if !self.tables.state.is_local(addr) {
            return LocalAddress::new(addr);
        }
        local_nodes::ports(
            addr,
            *self.ephemeral.get_or_init(local_nodes::ephemeral_ports),
        )
    }
}

/// The latest [`View`], which the keeper publishes to the packet workers.
#[derive(Debug, Default)]
pub(crate) struct Published {
    generation: AtomicU64,
    latest: Mutex<Arc<View>>,
}

impl Published {
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn latest(&self) -> Arc<View> {
        let latest = self.latest.lock();
        Arc::clone(&latest.unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn publish(&self, view: Arc<View>) {
        let generation = view.generation;
        let old = {
            let latest = self.latest.lock();
            std::mem::replace(&mut *latest.unwrap_or_else(PoisonError::into_inner), view)
        };
        self.generation.store(generation, Ordering::Release);
        drop(old);
    }
}

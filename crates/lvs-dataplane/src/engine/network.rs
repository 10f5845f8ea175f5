//! The network as the packet path sees it: ports on top of the kernel's links, routes and neighbours.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use crate::net::{Net, NextHop, PortId, PortInfo};
use crate::netlink::{Link, NetState, RouteKind};
use crate::wire::Mac;

/// Destinations whose way is remembered; when there are more, all are looked up anew.
const CACHE_MAX: usize = 1 << 16;

/// Where packets to an address go.
#[derive(Clone, Copy, Debug)]
struct Way {
    local: bool,
    hop: Option<NextHop>,
}

/// What is known of a port.
#[derive(Clone, Debug)]
struct Port {
    ifindex: u32,
    info: PortInfo,
}

/// Ports, routes, neighbours and virtual addresses.
#[derive(Debug, Default)]
pub(super) struct Network {
    pub(super) state: NetState,
    ports: Vec<Option<Port>>,
    by_ifindex: HashMap<u32, PortId>,
    host: Option<PortId>,
    vips: HashSet<IpAddr>,
    own: HashSet<IpAddr>,
    ways: RefCell<HashMap<IpAddr, Way>>,
}

impl Network {
    pub(super) fn new(state: NetState) -> Self {
        Self {
            state,
            ..Self::default()
        }
    }

    /// Gives a port its properties. `host`: it leads to the host's own stack.
    pub(super) fn set_port(&mut self, port: PortId, ifindex: u32, info: PortInfo, host: bool) {
        if self.ports.len() <= port.index() {
            self.ports.resize(port.index() + 1, None);
        }
        self.ports[port.index()] = Some(Port { ifindex, info });
        self.by_ifindex.insert(ifindex, port);
        if host {
            self.host = Some(port);
        }
        self.forget_ways();
    }

    pub(super) fn remove_port(&mut self, port: PortId) {
        if let Some(gone) = self.ports.get_mut(port.index()).and_then(Option::take) {
            self.by_ifindex.remove(&gone.ifindex);
        }
        self.forget_ways();
    }

    /// Virtual addresses of services, and those of them that the engine owns.
    pub(super) fn set_vips(&mut self, vips: HashSet<IpAddr>, own: HashSet<IpAddr>) {
        self.vips = vips;
        self.own = own;
    }

    pub(super) const fn own_vips(&self) -> &HashSet<IpAddr> {
        &self.own
    }

    pub(super) fn ifindex(&self, port: PortId) -> Option<u32> {
        Some(self.ports.get(port.index())?.as_ref()?.ifindex)
    }

    pub(super) fn port_of(&self, ifindex: u32) -> Option<PortId> {
        self.by_ifindex.get(&ifindex).copied()
    }

    /// To be called when links, addresses or routes have changed.
    pub(super) fn forget_ways(&self) {
        self.ways.borrow_mut().clear();
    }

    fn way(&self, dst: IpAddr) -> Way {
        if let Some(way) = self.ways.borrow().get(&dst) {
            return *way;
        }
        let way = Way {
            local: self.state.is_local(dst),
            hop: self.find_route(dst),
        };
        let mut ways = self.ways.borrow_mut();
        if ways.len() >= CACHE_MAX {
            ways.clear();
        }
        ways.insert(dst, way);
        way
    }

    fn find_route(&self, dst: IpAddr) -> Option<NextHop> {
        let hit = self.state.lookup(dst)?;
        if hit.kind != RouteKind::Unicast {
            return None;
        }
        let port = self.port_of(hit.oif)?;
        let link = self.state.link(hit.oif)?;
        Some(NextHop {
            port,
            addr: hit.gateway.unwrap_or(dst),
            mtu: hit.mtu.map_or(link.mtu, |mtu| mtu.min(link.mtu)),
            source: self.state.source_address(dst),
        })
    }
}

impl Net for Network {
    fn port(&self, port: PortId) -> Option<PortInfo> {
        Some(self.ports.get(port.index())?.as_ref()?.info)
    }

    fn host_port(&self) -> Option<PortId> {
        self.host
    }

    fn is_local(&self, addr: IpAddr) -> bool {
        self.way(addr).local
    }

    fn is_vip(&self, addr: IpAddr) -> bool {
        self.vips.contains(&addr)
    }

    fn is_own_vip(&self, addr: IpAddr) -> bool {
        self.own.contains(&addr)
    }

    fn route(&self, dst: IpAddr) -> Option<NextHop> {
        self.way(dst).hop
    }

    fn neighbour(&self, port: PortId, addr: IpAddr) -> Option<Mac> {
        self.state
            .neighbour(self.ifindex(port)?, addr)?
            .usable()
            .map(Mac)
    }
}

/// Whether the engine uses this interface when it is not told which ones: Ethernet, up, no port of a bridge or bond.
pub(super) fn is_usable(link: &Link) -> bool {
    link.is_arp_capable() && link.up && link.master.is_none()
}

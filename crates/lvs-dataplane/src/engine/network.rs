//! The network as the packet path sees it: ports on top of the kernel's links, routes and neighbours.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;

use crate::netlink::{Link, NetState, RouteKind};
use crate::packet::net::{Net, NextHop, PortId, PortInfo};
use crate::packet::wire::Mac;

/// All that the packet path asks about one address.
#[derive(Clone, Copy, Debug)]
struct Way {
    local: bool,
    vip: bool,
    own: bool,
    hop: Option<NextHop>,
    /// Of the next hop.
    mac: Option<Mac>,
}

/// An answer, whom it is about, and when it was given.
#[derive(Clone, Copy)]
struct Remembered {
    generation: u32,
    addr: IpAddr,
    way: Way,
}

/// Answers about addresses, one place for all addresses with the same hash: a stranger may displace what is remembered
/// by choosing addresses, and then costs a look into the tables, as without it.
struct Memo {
    places: Box<[Cell<Option<Remembered>>]>,
    /// What was written in an earlier generation is forgotten.
    generation: u32,
}

impl Memo {
    const BITS: u32 = 11;

    fn place(&self, addr: IpAddr) -> &Cell<Option<Remembered>> {
        let bits = match addr {
            IpAddr::V4(addr) => addr.to_bits(),
            IpAddr::V6(addr) => {
                let octets = addr.octets();
                octets.chunks_exact(4).fold(0, |sum, word| {
                    sum ^ u32::from_be_bytes([word[0], word[1], word[2], word[3]])
                })
            }
        };
        &self.places[(bits.wrapping_mul(0x9e37_79b1) >> (32 - Self::BITS)) as usize]
    }

    fn get(&self, addr: IpAddr) -> Option<Way> {
        let found = self.place(addr).get()?;
        (found.generation == self.generation && found.addr == addr).then_some(found.way)
    }

    fn put(&self, addr: IpAddr, way: Way) {
        let generation = self.generation;
        self.place(addr).set(Some(Remembered {
            generation,
            addr,
            way,
        }));
    }
}

impl Default for Memo {
    fn default() -> Self {
        let places = (0..1 << Self::BITS).map(|_| Cell::new(None)).collect();
        Self {
            places,
            generation: 0,
        }
    }
}

impl fmt::Debug for Memo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memo").finish_non_exhaustive()
    }
}

/// The last bytes of some addresses, as bits: tells most other addresses from them at no cost.
#[derive(Clone, Copy, Debug, Default)]
struct LastBytes([u64; 4]);

impl LastBytes {
    fn place(addr: IpAddr) -> (usize, u64) {
        let last = match addr {
            IpAddr::V4(addr) => addr.octets()[3],
            IpAddr::V6(addr) => addr.octets()[15],
        };
        (usize::from(last >> 6), 1 << (last & 63))
    }

    fn may_have(self, addr: IpAddr) -> bool {
        let (word, bit) = Self::place(addr);
        self.0[word] & bit != 0
    }
}

impl FromIterator<IpAddr> for LastBytes {
    fn from_iter<T: IntoIterator<Item = IpAddr>>(addresses: T) -> Self {
        let mut all = Self::default();
        for (word, bit) in addresses.into_iter().map(Self::place) {
            all.0[word] |= bit;
        }
        all
    }
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
    /// The port that every way leads through, if the host routes what the engine sends.
    hop: Option<PortId>,
    vips: HashSet<IpAddr>,
    own: HashSet<IpAddr>,
    ways: Memo,
    own_addresses: LastBytes,
}

impl Network {
    pub(super) fn new(state: NetState) -> Self {
        let mut this = Self {
            state,
            ..Self::default()
        };
        this.follow_addresses();
        this
    }

    /// To be called when addresses have changed.
    pub(super) fn follow_addresses(&mut self) {
        let links = self.state.links();
        let addresses = links.flat_map(|link| self.state.addresses(link.index));
        self.own_addresses = addresses.map(|address| address.ip).collect();
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
        self.forget();
    }

    /// Every way leads through `port` from now on: the host routes what it is sent there. What is known of a way beyond that
    /// still counts: its MTU, and the source address.
    pub(super) fn route_over(&mut self, port: PortId) {
        self.hop = Some(port);
        self.forget();
    }

    pub(super) fn remove_port(&mut self, port: PortId) {
        if let Some(gone) = self.ports.get_mut(port.index()).and_then(Option::take) {
            self.by_ifindex.remove(&gone.ifindex);
        }
        self.forget();
    }

    /// Virtual addresses of services, and those that the engine is the host of.
    pub(super) fn set_vips(&mut self, vips: HashSet<IpAddr>, own: HashSet<IpAddr>) {
        self.vips = vips;
        self.own = own;
        self.forget();
    }

    pub(super) fn ifindex(&self, port: PortId) -> Option<u32> {
        Some(self.ports.get(port.index())?.as_ref()?.ifindex)
    }

    pub(super) fn port_of(&self, ifindex: u32) -> Option<PortId> {
        self.by_ifindex.get(&ifindex).copied()
    }

    /// To be called when links, addresses, routes or neighbours have changed.
    pub(super) const fn forget(&mut self) {
        self.ways.generation = self.ways.generation.wrapping_add(1);
    }

    fn way(&self, addr: IpAddr) -> Way {
        if let Some(way) = self.ways.get(addr) {
            return way;
        }
        let hop = self.find_route(addr);
        let way = Way {
            local: self.state.is_local(addr),
            vip: self.vips.contains(&addr),
            own: self.own.contains(&addr),
            hop,
            mac: hop.and_then(|hop| self.find_neighbour(hop.port, hop.addr)),
        };
        self.ways.put(addr, way);
        way
    }

    fn find_neighbour(&self, port: PortId, addr: IpAddr) -> Option<Mac> {
        let neighbour = self.state.neighbour(self.ifindex(port)?, addr)?;
        neighbour.usable().map(Mac)
    }

    fn find_route(&self, dst: IpAddr) -> Option<NextHop> {
        let hit = self.state.lookup(dst)?;
        if hit.kind != RouteKind::Unicast {
            return None;
        }
        let port = match self.hop {
            // A route into the engine's own device leads nowhere.
            Some(hop) if self.port_of(hit.oif).is_none() => hop,
            Some(_) => return None,
            None => self.port_of(hit.oif)?,
        };
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

    fn is_forged(&self, src: IpAddr) -> bool {
        // Where the host routes the packets, it has looked already, and its own come the same way.
        self.hop.is_none() && self.own_addresses.may_have(src) && self.is_local(src)
    }

    fn is_local(&self, addr: IpAddr) -> bool {
        self.way(addr).local
    }

    fn is_vip(&self, addr: IpAddr) -> bool {
        self.way(addr).vip
    }

    fn is_own_vip(&self, addr: IpAddr) -> bool {
        self.way(addr).own
    }

    fn route(&self, dst: IpAddr) -> Option<NextHop> {
        self.way(dst).hop
    }

    fn neighbour(&self, port: PortId, addr: IpAddr) -> Option<Mac> {
        let way = self.way(addr);
        match way.hop {
            // The usual case: the neighbour is its own next hop.
            Some(hop) if hop.port == port && hop.addr == addr => way.mac,
            _ => self.find_neighbour(port, addr),
        }
    }
}

/// Whether the engine uses this interface when it is not told which ones: Ethernet, up, no port of a bridge or bond.
pub(super) fn is_usable(link: &Link) -> bool {
    link.is_arp_capable() && link.up && link.master.is_none()
}

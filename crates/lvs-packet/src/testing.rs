//! A network that consists of tables, for programs that run the packet pipeline in memory: tests,
//! fuzzing, replay of recordings. It requires the feature `testing`, which installed programs do
//! not have.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use lvs_core::{IcmpError, Instant, PacketMeta, Verdict};

use crate::net::{Net, NextHop, PortId, PortInfo};
use crate::pipeline::Decide;
use crate::wire::Mac;

/// An address and the length of its prefix.
pub type Prefix = (IpAddr, u8);

/// Whether `addr` is in the prefix.
pub fn contains((net, bits): Prefix, addr: IpAddr) -> bool {
    lvs_core::Prefix::new(net, bits).is_some_and(|prefix| prefix.contains(addr))
}

/// The route to a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The prefix.
    pub to: Prefix,
    /// The port, the gateway if there is one, and the host's address on the port; `None` if the
    /// destination is unreachable.
    pub way: Option<(PortId, Option<IpAddr>, Option<IpAddr>)>,
}

impl Route {
    /// Creates a route through `port`, with or without a gateway.
    ///
    /// # Panics
    /// If `to` is not a prefix, or `gateway` or `source` is not an address.
    pub fn new(to: &str, port: PortId, gateway: Option<&str>, source: &str) -> Self {
        let addr = |text: &str| text.parse::<IpAddr>().expect("the address is valid");
        Self {
            to: parse_prefix(to),
            way: Some((port, gateway.map(addr), Some(addr(source)))),
        }
    }

    /// A route to a prefix whose destinations are unreachable.
    pub fn unreachable(to: &str) -> Self {
        Self {
            to: parse_prefix(to),
            way: None,
        }
    }
}

fn parse_prefix(text: &str) -> Prefix {
    let (addr, bits) = text
        .split_once('/')
        .expect("the text has an address and a length");
    let addr = addr.parse().expect("the address is valid");
    (addr, bits.parse().expect("the prefix length is a number"))
}

/// A network that consists of tables.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Ports by [`PortId::index`].
    pub ports: Vec<PortInfo>,
    /// The port through which packets reach the host.
    pub host_port: Option<PortId>,
    /// See [`Net::local_port`].
    pub local_port: Option<PortId>,
    /// Addresses of the host.
    pub local: HashSet<IpAddr>,
    /// Prefixes of which all addresses belong to the host.
    pub local_prefixes: Vec<Prefix>,
    /// Addresses of services.
    pub vips: HashSet<IpAddr>,
    /// Addresses that the dataplane owns.
    pub own: HashSet<IpAddr>,
    /// Routes; the first one that matches is used.
    pub routes: Vec<Route>,
    /// Resolved neighbours.
    pub neighbours: HashMap<(PortId, IpAddr), Mac>,
    /// A port on which all neighbours are resolved, with the link-layer addresses of
    /// [`made_up_mac`].
    pub all_neighbours: Option<PortId>,
    /// Whether the host's own addresses are valid sources (`net.ipv4.conf.all.accept_local`).
    pub accept_local: bool,
    /// See [`Net::forges_vips`].
    pub forges_vips: bool,
}

impl Table {
    /// Returns the port with this number.
    ///
    /// # Panics
    /// If there is no such port.
    pub fn port_mut(&mut self, port: PortId) -> &mut PortInfo {
        &mut self.ports[port.index()]
    }

    /// The host's addresses, as prefixes.
    pub fn local_addresses(&self) -> Vec<Prefix> {
        let bits = |addr: &IpAddr| if addr.is_ipv6() { 128 } else { 32 };
        let single = self.local.iter().map(|addr| (*addr, bits(addr)));
        single.chain(self.local_prefixes.iter().copied()).collect()
    }
}

/// A link-layer address that consists of 02:52 and the last four bytes of an IP address.
pub fn made_up_mac(addr: IpAddr) -> Mac {
    let [a, b, c, d] = match addr {
        IpAddr::V4(addr) => addr.octets(),
        IpAddr::V6(addr) => {
            let [.., a, b, c, d] = addr.octets();
            [a, b, c, d]
        }
    };
    Mac([2, 0x52, a, b, c, d])
}

impl Net for Table {
    fn port(&self, port: PortId) -> Option<PortInfo> {
        self.ports.get(port.index()).copied()
    }

    fn host_port(&self) -> Option<PortId> {
        self.host_port
    }

    fn local_port(&self) -> Option<PortId> {
        self.local_port
    }

    fn is_local(&self, addr: IpAddr) -> bool {
        let of_host = |&prefix: &Prefix| contains(prefix, addr);
        self.local.contains(&addr) || self.local_prefixes.iter().any(of_host)
    }

    fn is_forged(&self, src: IpAddr) -> bool {
        !self.accept_local && (self.is_local(src) || self.is_own_vip(src))
    }

    fn forges_vips(&self) -> bool {
        self.forges_vips
    }

    fn is_vip(&self, addr: IpAddr) -> bool {
        self.vips.contains(&addr)
    }

    fn is_own_vip(&self, addr: IpAddr) -> bool {
        self.own.contains(&addr)
    }

    fn route(&self, dst: IpAddr) -> Option<NextHop> {
        let route = self.routes.iter().find(|route| contains(route.to, dst))?;
        let (port, gateway, source) = route.way?;
        Some(NextHop {
            port,
            addr: gateway.unwrap_or(dst),
            mtu: self.port(port)?.mtu,
            source: source.filter(|source| source.is_ipv4() == dst.is_ipv4()),
        })
    }

    fn neighbour(&self, port: PortId, addr: IpAddr) -> Option<Mac> {
        let known = self.neighbours.get(&(port, addr)).copied();
        known.or_else(|| (self.all_neighbours == Some(port)).then(|| made_up_mac(addr)))
    }
}

/// Changes packets by `edit`, and then lets another decider decide; for tests of marks and of IPVS
/// hooks.
#[derive(Debug)]
pub struct Edited<'a, D, F> {
    /// The decider for the changed packets.
    pub decide: &'a mut D,
    /// Changes a packet before the decision.
    pub edit: F,
}

impl<D: Decide, F: FnMut(&mut PacketMeta<'_>)> Decide for Edited<'_, D, F> {
    fn packet(&mut self, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        let mut meta = *meta;
        (self.edit)(&mut meta);
        self.decide.packet(&meta, now)
    }

    fn icmp_error(&mut self, error: &IcmpError, now: Instant) -> Verdict {
        self.decide.icmp_error(error, now)
    }
}

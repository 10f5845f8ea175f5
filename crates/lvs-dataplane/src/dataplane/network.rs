//! A packet worker's view of the network: the keeper's snapshot, and a cache of routes from it.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use crate::host::view::View;
use lvs_packet::drop::FrameDrop;
use lvs_packet::net::{About, Net, NextHop, PortId, PortInfo, Way};
use lvs_packet::wire::Mac;

struct Place {
    /// Value of [`Memo::generation`] when the entry was written.
    generation: Cell<u32>,
    /// A combination of [`LOCAL`], [`VIP`] and [`OWN`].
    is: Cell<u8>,
    addr: Cell<IpAddr>,
    hop: Cell<Option<NextHop>>,
    /// MAC address of the next hop; `None` if it is not resolved.
    mac: Cell<Option<Mac>>,
    way: Cell<Option<Way>>,
}

const LOCAL: u8 = 1;
const VIP: u8 = 2;
const OWN: u8 = 4;

impl Default for Place {
    fn default() -> Self {
        Self {
            generation: Cell::new(0),
            is: Cell::new(0),
            addr: Cell::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            hop: Cell::new(None),
            mac: Cell::new(None),
            way: Cell::new(None),
        }
    }
}

/// The cache entry of a region: adjacent addresses with the same route.
#[derive(Clone, Copy)]
struct Region {
    generation: u32,
    local: bool,
    hop: Option<NextHop>,
    /// Whether the route has no gateway, so that each destination address is its own next hop.
    on_link: bool,
    /// MAC address of the gateway; `None` if it is not resolved.
    mac: Option<Mac>,
    way: Option<Way>,
}

/// A cache of routes, with one entry for all addresses of equal hash. An attacker can displace
/// entries by choosing addresses; each such packet then costs a search for its region, or without
/// regions a search in the routing tables.
struct Memo {
    places: Box<[Place]>,
    regions: RefCell<Vec<Option<Region>>>,
    /// Number of look-ups, modulo 256, whose cache entry belonged to another address.
    passed: Cell<u8>,
    /// The present generation; older entries are ignored.
    generation: u32,
}

impl Memo {
    const BITS: u32 = 11;

    #[inline]
    fn place(&self, addr: IpAddr) -> &Place {
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

    #[inline]
    fn has(&self, place: &Place, addr: IpAddr) -> bool {
        place.generation.get() == self.generation && place.addr.get() == addr
    }
}

impl Default for Memo {
    fn default() -> Self {
        Self {
            places: (0..1 << Self::BITS).map(|_| Place::default()).collect(),
            regions: RefCell::default(),
            passed: Cell::new(0),
            generation: 1,
        }
    }
}

impl fmt::Debug for Memo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memo").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub(super) struct TakenView {
    view: Arc<View>,
    ways: Memo,
}

impl TakenView {
    /// Replaces the snapshot, and empties the cache if the new snapshot has other tables.
    pub(super) fn take(&mut self, view: Arc<View>) {
        if !Arc::ptr_eq(&self.view.tables, &view.tables) {
            // Generation 0 means "never".
            self.ways.generation = self.ways.generation.checked_add(1).unwrap_or_else(|| {
                self.ways = Memo::default();
                1
            });
        }
        self.view = view;
    }

    pub(super) fn view(&self) -> &View {
        &self.view
    }

    /// The cache entry of an address, filled if necessary.
    #[inline]
    fn way(&self, addr: IpAddr) -> &Place {
        let place = self.ways.place(addr);
        if !self.ways.has(place, addr) {
            self.find(addr, place);
        }
        place
    }

    /// Looks up the route of an address, and fills its cache entry.
    fn find(&self, addr: IpAddr, place: &Place) {
        let tables = &self.view.tables;
        let region = self.region(addr);
        let hop = region.hop.map(|hop| match region.on_link {
            true => NextHop { addr, ..hop },
            false => hop,
        });
        let mac = match hop {
            Some(hop) if region.on_link => tables.neighbour(hop.port, addr),
            _ => region.mac,
        };
        let bit = |is: bool, bit: u8| if is { bit } else { 0 };
        let is = bit(region.local, LOCAL)
            | bit(tables.is_vip(addr), VIP)
            | bit(tables.is_own(addr), OWN);
        let way = match region.on_link {
            true => self.way_by(hop, mac),
            false => region.way,
        };
        place.generation.set(self.ways.generation);
        place.is.set(is);
        place.addr.set(addr);
        place.hop.set(hop);
        place.mac.set(mac);
        place.way.set(way);
    }

    fn way_by(&self, hop: Option<NextHop>, mac: Option<Mac>) -> Option<Way> {
        let (hop, to) = hop.zip(mac)?;
        let port = self.view.tables.port(hop.port)?;
        port.info.ethernet.then_some(Way {
            port: hop.port,
            mtu: hop.mtu,
            to,
            from: port.info.mac,
        })
    }

    /// Looks up an address that is reached through a gateway, if the cache entry belongs to another
    /// address. `None`: the caller fills the cache entry. With many clients, a write for each
    /// look-up costs more than another look-up, so only one look-up in 64 replaces the entry. Few
    /// clients soon have their own entries.
    #[inline]
    fn pass(&self, addr: IpAddr) -> Option<About> {
        const ONE_IN: u8 = 64;
        let passed = self.ways.passed.get().wrapping_add(1);
        self.ways.passed.set(passed);
        if passed.is_multiple_of(ONE_IN) {
            return None;
        }
        let tables = &self.view.tables;
        let regions = self.ways.regions.borrow();
        let region = regions.get(tables.regions().find(addr)?)?.as_ref()?;
        let is_known = region.generation == self.ways.generation && !region.on_link;
        is_known.then(|| About {
            local: region.local,
            vip: tables.is_vip(addr),
            own: tables.is_own(addr),
            way: region.way,
        })
    }

    /// The cache entry for the region of an address, filled if necessary.
    fn region(&self, addr: IpAddr) -> Region {
        let tables = &self.view.tables;
        let generation = self.ways.generation;
        let number = tables.regions().find(addr);
        let mut regions = self.ways.regions.borrow_mut();
        if let Some(number) = number
            && let Some(Some(known)) = regions.get(number)
            && known.generation == generation
        {
            return *known;
        }
        let found = tables.route_of_region(addr);
        let gateway = found.and_then(|(hop, by_gateway)| by_gateway.then_some(hop));
        let mac = gateway.and_then(|hop| tables.neighbour(hop.port, hop.addr));
        let region = Region {
            generation,
            local: tables.state.is_local(addr),
            hop: found.map(|(hop, _)| hop),
            on_link: gateway.is_none(),
            mac,
            way: self.way_by(gateway, mac),
        };
        if let Some(number) = number {
            if regions.len() <= number {
                regions.resize(tables.regions().len(), None);
            }
            regions[number] = Some(region);
        }
        region
    }
}

impl Net for TakenView {
    #[inline]
    fn port(&self, port: PortId) -> Option<PortInfo> {
        Some(self.view.tables.port(port)?.info)
    }

    #[inline]
    fn host_port(&self) -> Option<PortId> {
        Some(PortId::HOST)
    }

    #[inline]
    fn local_port(&self) -> Option<PortId> {
        self.view.tables.port(PortId::LOCAL).map(|_| PortId::LOCAL)
    }

    #[inline]
    fn is_forged(&self, src: IpAddr) -> bool {
        self.view.tables.may_be_forged(src) && (self.is_local(src) || self.is_own_vip(src))
    }

    #[inline]
    fn is_local(&self, addr: IpAddr) -> bool {
        self.way(addr).is.get() & LOCAL != 0
    }

    #[inline]
    fn is_vip(&self, addr: IpAddr) -> bool {
        self.way(addr).is.get() & VIP != 0
    }

    #[inline]
    fn is_own_vip(&self, addr: IpAddr) -> bool {
        self.way(addr).is.get() & OWN != 0
    }

    #[inline]
    fn about(&self, addr: IpAddr) -> About {
        let place = self.ways.place(addr);
        if !self.ways.has(place, addr) {
            if let Some(passed) = self.pass(addr) {
                return passed;
            }
            self.find(addr, place);
        }
        let is = place.is.get();
        About {
            local: is & LOCAL != 0,
            vip: is & VIP != 0,
            own: is & OWN != 0,
            way: place.way.get(),
        }
    }

    #[inline]
    fn answers_arp(&self, _: PortId, addr: IpAddr) -> bool {
        self.is_own_vip(addr) && !self.view.tables.quiet.contains(&addr)
    }

    #[inline]
    fn route(&self, dst: IpAddr) -> Option<NextHop> {
        self.way(dst).hop.get()
    }

    fn why_no_route(&self, dst: IpAddr) -> FrameDrop {
        self.view.tables.why_no_route(dst).reason()
    }

    #[inline]
    fn neighbour(&self, port: PortId, addr: IpAddr) -> Option<Mac> {
        let way = self.way(addr);
        match way.hop.get() {
            // The common case: the neighbour is its own next hop.
            Some(hop) if hop.port == port && hop.addr == addr => way.mac.get(),
            _ => self.view.tables.neighbour(port, addr),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::view::{KnownPort, Tables};
    use crate::netlink::NetState;

    #[test]
    fn route_cache_returns_same_results_as_tables() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let on_link = (ip("10.71.0.0"), 24);
        let state = NetState::of_link(7, on_link, (ip("10.71.0.9"), [9; 6]))
            .with_gateway(7, (ip("10.128.0.0"), 9), (ip("10.71.0.2"), [2; 6]))
            .with_gateway(7, (ip("10.129.7.0"), 25), (ip("10.71.0.3"), [3; 6]))
            // The gateway is inside the prefix that is routed through it.
            .with_gateway(7, (ip("192.0.2.0"), 24), (ip("192.0.2.1"), [4; 6]))
            .with_gateway(7, (ip("2001:db8::"), 32), (ip("fe80::1"), [5; 6]));
        let mut tables = Tables::new(state);
        let info = PortInfo {
            mac: Mac([2; 6]),
            mtu: 1500,
            ethernet: true,
            offload: true,
            gives_back: false,
        };
        let port = PortId(3);
        tables.set_port(
            port,
            KnownPort {
                ifindex: 7,
                name: Arc::from("eth0"),
                info,
                down: None,
                decapsulates: false,
            },
        );
        tables.add_vip(ip("10.129.7.9"));
        let view = View {
            tables: Arc::new(tables),
            ..View::default()
        };
        let mut network = TakenView::default();
        network.take(Arc::new(view));
        let tables = &network.view().tables;
        let first = ["192.0.2.1", "10.71.0.2", "10.71.0.9", "10.128.0.1"];
        let edges = [
            "10.127.255.255",
            "10.128.0.0",
            "10.129.6.255",
            "10.129.7.0",
            "10.129.7.9",
            "10.129.7.127",
            "10.129.7.128",
            "10.255.255.255",
            "11.0.0.0",
            "192.0.1.255",
            "192.0.2.0",
            "192.0.2.255",
            "192.0.3.0",
            "0.0.0.0",
            "255.255.255.255",
            "2001:db8::1",
            "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff",
            "2001:db9::",
            "::",
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        ];
        let edges = first.into_iter().chain(edges);
        let edges = edges.map(ip);
        // More addresses than the cache has entries.
        let many = (0..40_000_u32).map(|n| IpAddr::from((0x0a7f_ff00 + n * 211).to_be_bytes()));
        let mut ways = 0;
        for addr in edges.chain(many) {
            // The first result may come from the region or the cache entry, the second only from
            // the cache entry.
            let about = network.about(addr);
            assert_eq!(
                about.way.is_some(),
                network.way(addr).way.get().is_some(),
                "{addr}"
            );
            assert_eq!(about, network.about(addr), "{addr}");
            assert_eq!(network.route(addr), tables.route(addr), "{addr}");
            assert_eq!(
                network.is_local(addr),
                tables.state.is_local(addr),
                "{addr}"
            );
            assert_eq!(network.is_vip(addr), tables.vips.contains(&addr), "{addr}");
            if let Some(hop) = tables.route(addr) {
                ways += 1;
                let known = tables.neighbour(port, hop.addr);
                assert_eq!(network.neighbour(port, hop.addr), known, "{addr}");
            }
        }
        assert!(ways > 30_000, "{ways}");
    }
}

//! A snapshot of the kernel's links, addresses, routes and neighbours, for look-ups without system
//! calls.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use lvs_core::Prefix;

pub use self::facts::{Address, Changes, Link, LinkAddress, Neighbour, RouteHit, RouteKind};
use self::routes::{Route, Table, Tables};
use super::message::{Message, attributes, text, u16_at, u32_at};
use lvs_packet::shared_map::SharedMap;

mod facts;
mod routes;

/// Why the kernel sends a message about a link (`linux/if_link.h`).
const IFLA_EVENT: u16 = 44;
const IFLA_EVENT_NOTIFY_PEERS: u32 = 4;

/// The snapshot. A copy shares the unchanged parts with the original.
#[derive(Clone, Default)]
pub struct NetState {
    links: Arc<HashMap<u32, Link>>,
    addresses: Arc<Vec<Address>>,
    v4: Tables,
    v6: Tables,
    neighbours: SharedMap<(u32, IpAddr), Neighbour>,
}

impl NetState {
    /// The link with this index.
    pub fn link(&self, ifindex: u32) -> Option<&Link> {
        self.links.get(&ifindex)
    }

    /// The link of this name.
    pub fn link_by_name(&self, name: &str) -> Option<&Link> {
        self.links.values().find(|link| link.name == name)
    }

    /// All links, in arbitrary order.
    pub fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.values()
    }

    /// Indices of the links that are up and have a carrier.
    pub(super) fn running_links(&self) -> impl Iterator<Item = u32> {
        let running = self.links.values().filter(|link| link.running);
        running.map(|link| link.index)
    }

    /// The addresses of an interface, in the kernel's order.
    pub fn addresses(&self, ifindex: u32) -> impl Iterator<Item = &Address> {
        self.addresses.iter().filter(move |a| a.ifindex == ifindex)
    }

    /// Whether packets to `ip` are for this host (the kernel's table `local`).
    pub fn is_local(&self, ip: IpAddr) -> bool {
        let hit = self.family(ip).local.lookup(ip, |_| true);
        hit.is_some_and(|hit| matches!(hit.kind, RouteKind::Local | RouteKind::Anycast))
    }

    /// The route to `dst` by the tables `local`, `main` and `default`, in this order. Ignores
    /// policy rules, types of service and routes over links that are down.
    pub fn lookup(&self, dst: IpAddr) -> Option<RouteHit> {
        let family = self.family(dst);
        let alive =
            |hit: &RouteHit| hit.oif == 0 || self.links.get(&hit.oif).is_none_or(|link| link.up);
        [&family.local, &family.main, &family.default]
            .into_iter()
            .filter_map(|table| table.lookup(dst, alive))
            .find(|hit| hit.kind != RouteKind::Throw)
            .copied()
    }

    /// Returns the prefixes of a family: of its routes, and of the host's own networks.
    pub(crate) fn prefixes(&self, ipv4: bool) -> impl Iterator<Item = Prefix> {
        let family = if ipv4 { &self.v4 } else { &self.v6 };
        let tables = [&family.local, &family.main, &family.default];
        let routes = tables.into_iter().flat_map(Table::prefixes);
        let own = self
            .addresses
            .iter()
            .filter(move |a| a.ip.is_ipv4() == ipv4);
        routes.chain(own.filter_map(|a| Prefix::new(a.ip, a.prefix_len)))
    }

    /// The gateways of routes and their interfaces: of IPv4 routes, then of IPv6 routes. In each
    /// table, the gateways of default routes are first. A gateway occurs once for each route
    /// through it.
    pub(crate) fn gateways(&self) -> impl Iterator<Item = (u32, IpAddr)> {
        let tables = [&self.v4, &self.v6].into_iter();
        let tables = tables.flat_map(|family| [&family.main, &family.default]);
        let hits = tables.flat_map(Table::routes).map(|route| route.hit);
        hits.filter_map(|hit| Some((hit.oif, hit.gateway?)))
    }

    /// Indices of the interfaces of unicast routes in the tables `main` and `default`, without
    /// duplicates.
    pub(crate) fn routed_links(&self) -> impl Iterator<Item = u32> {
        let tables = [&self.v4, &self.v6].into_iter();
        let tables = tables.flat_map(|family| [&family.main, &family.default]);
        let hits = tables.flat_map(Table::routes).map(|route| route.hit);
        let unicast = hits.filter(|hit| hit.kind == RouteKind::Unicast);
        let links: BTreeSet<u32> = unicast.map(|hit| hit.oif).collect();
        links.into_iter()
    }

    /// The neighbour entry of an address.
    pub fn neighbour(&self, ifindex: u32, ip: IpAddr) -> Option<Neighbour> {
        self.neighbours.get(&(ifindex, ip)).copied()
    }

    /// The lowest address of the neighbour with this MAC address on an interface, except the
    /// addresses that `is_excluded` accepts.
    pub fn address_of(
        &self,
        ifindex: u32,
        mac: [u8; 6],
        is_excluded: impl Fn(&IpAddr) -> bool,
    ) -> Option<IpAddr> {
        let on_interface = self.neighbours.iter().filter(|((on, _), _)| *on == ifindex);
        on_interface
            .filter(|(_, neighbour)| neighbour.usable() == Some(mac))
            .map(|((_, address), _)| *address)
            .filter(|address| !is_excluded(address))
            .min()
    }

    /// The source address that the host would use towards `dst` (inet_select_addr()): the route's,
    /// or `dst` itself if it is local; else an address of the interface (the first in the next
    /// hop's network, else the first global one, else the first); else a global address of another
    /// interface. `None` without a route or such an address.
    pub fn source_address(&self, dst: IpAddr) -> Option<IpAddr> {
        let hit = self.lookup(dst)?;
        if hit.kind == RouteKind::Local {
            return Some(hit.prefsrc.unwrap_or(dst));
        }
        if hit.prefsrc.is_some() {
            return hit.prefsrc;
        }
        let next = hit.gateway.unwrap_or(dst);
        let fit = |a: &&Address| {
            a.is_preferred() && a.ip.is_ipv4() == dst.is_ipv4() && a.scope < libc::RT_SCOPE_HOST
        };
        let near = |a: &&Address| {
            Prefix::new(a.ip, a.prefix_len).is_some_and(|network| network.contains(next))
        };
        let own = || self.addresses(hit.oif).filter(fit);
        own()
            .find(near)
            .or_else(|| own().find(|a| a.scope == libc::RT_SCOPE_UNIVERSE))
            .or_else(|| own().next())
            .or_else(|| {
                let wide = |a: &&Address| a.scope == libc::RT_SCOPE_UNIVERSE;
                self.addresses.iter().filter(fit).find(wide)
            })
            .map(|a| a.ip)
    }

    fn family(&self, ip: IpAddr) -> &Tables {
        match ip {
            IpAddr::V4(_) => &self.v4,
            IpAddr::V6(_) => &self.v6,
        }
    }

    pub(super) fn clear_routes(&mut self) {
        self.v4 = Tables::default();
        self.v6 = Tables::default();
    }

    /// The neighbours that differ between this state and `other`, or that only one of them has.
    pub(super) fn differing_neighbours(&self, other: &Self) -> Vec<(u32, IpAddr)> {
        let changed = self
            .neighbours
            .iter()
            .filter(|(key, value)| other.neighbours.get(key) != Some(value));
        let gone = other
            .neighbours
            .iter()
            .filter(|(key, _)| !self.neighbours.contains_key(key));
        changed.chain(gone).map(|(key, _)| *key).collect()
    }

    /// Applies one message of the kernel, from a dump or an event. Returns true if routes must be
    /// read again: the kernel sends no event about IPv4 routes that it removes with a link or an
    /// address (fib_sync_down_dev()).
    pub(super) fn apply(&mut self, message: &Message<'_>, changes: &mut Changes) -> bool {
        match message.kind {
            libc::RTM_NEWLINK => self.new_link(message.payload, changes).unwrap_or(false),
            libc::RTM_DELLINK => self.del_link(message.payload, changes).unwrap_or(false),
            libc::RTM_NEWADDR | libc::RTM_DELADDR => {
                let new = message.kind == libc::RTM_NEWADDR;
                self.address(message.payload, new, changes).unwrap_or(false)
            }
            libc::RTM_NEWROUTE | libc::RTM_DELROUTE => {
                self.route(message, changes);
                false
            }
            libc::RTM_NEWNEIGH | libc::RTM_DELNEIGH => {
                let new = message.kind == libc::RTM_NEWNEIGH;
                self.one_neighbour(message.payload, new, changes);
                false
            }
            _ => false,
        }
    }

    fn new_link(&mut self, payload: &[u8], changes: &mut Changes) -> Option<bool> {
        // The kernel reports each link with AF_UNSPEC. A bridge also reports its ports with its own
        // family.
        if i32::from(*payload.first()?) != libc::AF_UNSPEC {
            return None;
        }
        let flags = u32_at(payload, 8)?;
        let has = |flag: i32| flags & flag.cast_unsigned() != 0;
        let mut link = Link {
            index: u32_at(payload, 4)?,
            name: String::new(),
            kind: None,
            hardware: u16_at(payload, 2)?,
            mac: None,
            mtu: 0,
            up: has(libc::IFF_UP),
            running: has(libc::IFF_UP) && has(libc::IFF_RUNNING),
            no_arp: has(libc::IFF_NOARP),
            master: None,
            parent: None,
        };
        let mut parent_elsewhere = false;
        let mut notify_peers = false;
        for (kind, value) in attributes(payload.get(16..)?) {
            match kind {
                libc::IFLA_IFNAME => link.name = text(value),
                libc::IFLA_ADDRESS => link.mac = value.try_into().ok(),
                libc::IFLA_MTU => link.mtu = u32_at(value, 0)?,
                libc::IFLA_MASTER => link.master = u32_at(value, 0),
                libc::IFLA_LINK => link.parent = u32_at(value, 0).filter(|i| *i != 0),
                libc::IFLA_LINK_NETNSID => parent_elsewhere = true,
                IFLA_EVENT => notify_peers = u32_at(value, 0) == Some(IFLA_EVENT_NOTIFY_PEERS),
                libc::IFLA_LINKINFO => {
                    link.kind = attributes(value)
                        .find(|(kind, _)| *kind == libc::IFLA_INFO_KIND)
                        .map(|(_, value)| text(value));
                }
                _ => {}
            }
        }
        if parent_elsewhere {
            link.parent = None;
        }
        let old = self.links.get(&link.index);
        let as_before =
            |old: &Link| old.running && old.mac == link.mac && old.master == link.master;
        if link.running && (notify_peers || !old.is_some_and(as_before)) {
            changes.appeared.push(link.index);
        }
        if old == Some(&link) {
            return Some(false);
        }
        changes.links = true;
        let went_down = old.is_some_and(|old| old.up && !link.up || old.running && !link.running);
        Arc::make_mut(&mut self.links).insert(link.index, link);
        Some(went_down)
    }

    fn del_link(&mut self, payload: &[u8], changes: &mut Changes) -> Option<bool> {
        if i32::from(*payload.first()?) != libc::AF_UNSPEC {
            return None;
        }
        let index = u32_at(payload, 4)?;
        let known = self.links.contains_key(&index);
        if known {
            Arc::make_mut(&mut self.links).remove(&index);
        }
        changes.links |= known;
        if self.addresses(index).next().is_some() {
            Arc::make_mut(&mut self.addresses).retain(|a| a.ifindex != index);
            changes.addresses = true;
        }
        self.neighbours.retain(|key, _| {
            let gone = key.0 == index;
            if gone {
                changes.moved = true;
                changes.neighbours.push(*key);
            }
            !gone
        });
        Some(known)
    }

    fn address(&mut self, payload: &[u8], new: bool, changes: &mut Changes) -> Option<bool> {
        let family = *payload.first()?;
        let mut local = None;
        let mut peer = None;
        let mut flags = u32::from(*payload.get(2)?);
        for (kind, value) in attributes(payload.get(8..)?) {
            match kind {
                libc::IFA_LOCAL => local = ip_of(family, value),
                libc::IFA_ADDRESS => peer = ip_of(family, value),
                libc::IFA_FLAGS => flags = u32_at(value, 0)?,
                _ => {}
            }
        }
        let address = Address {
            ifindex: u32_at(payload, 4)?,
            ip: local.or(peer)?,
            prefix_len: *payload.get(1)?,
            scope: *payload.get(3)?,
            flags,
        };
        let same = |a: &Address| {
            a.ifindex == address.ifindex && a.ip == address.ip && a.prefix_len == address.prefix_len
        };
        let at = self.addresses.iter().position(same);
        match (at, new) {
            (Some(at), true) if self.addresses[at] == address => return Some(false),
            (None, false) => return Some(false),
            (Some(at), true) => Arc::make_mut(&mut self.addresses)[at] = address,
            (None, true) => Arc::make_mut(&mut self.addresses).push(address),
            (Some(at), false) => {
                Arc::make_mut(&mut self.addresses).remove(at);
            }
        }
        changes.addresses = true;
        Some(!new)
    }

    fn route(&mut self, message: &Message<'_>, changes: &mut Changes) -> Option<()> {
        let payload = message.payload;
        let header: [u8; 12] = *payload.first_chunk()?;
        let [family, dst_len, src_len, tos, table, _, _, kind, ..] = header;
        let rtm_flags = u32_at(payload, 8)?;
        let mut table = u32::from(table);
        let mut dst = None;
        let mut metric = 0;
        let mut hop_flags = rtm_flags;
        let mut hit = RouteHit {
            kind: RouteKind::from_kernel(kind)?,
            oif: 0,
            gateway: None,
            prefsrc: None,
            mtu: None,
        };
        for (kind, value) in attributes(payload.get(12..)?) {
            match kind {
                libc::RTA_DST => dst = ip_of(family, value),
                libc::RTA_OIF => hit.oif = u32_at(value, 0)?,
                libc::RTA_GATEWAY => hit.gateway = ip_of(family, value),
                RTA_VIA => hit.gateway = via_of(value),
                libc::RTA_PRIORITY => metric = u32_at(value, 0)?,
                libc::RTA_PREFSRC => hit.prefsrc = ip_of(family, value),
                libc::RTA_TABLE => table = u32_at(value, 0)?,
                libc::RTA_METRICS => {
                    hit.mtu = attributes(value)
                        .find(|(kind, _)| *kind == RTAX_MTU)
                        .and_then(|(_, value)| u32_at(value, 0));
                }
                libc::RTA_MULTIPATH => hop_flags |= first_hop(family, value, &mut hit)?,
                _ => {}
            }
        }
        // Cached exceptions are not routes. Routes by source or type of service are not supported.
        if rtm_flags & libc::RTM_F_CLONED != 0 || src_len != 0 {
            return None;
        }
        let new = message.kind == libc::RTM_NEWROUTE;
        if new && hop_flags & RTNH_F_DEAD != 0 {
            return None;
        }
        let any: IpAddr = match i32::from(family) {
            libc::AF_INET => Ipv4Addr::UNSPECIFIED.into(),
            libc::AF_INET6 => Ipv6Addr::UNSPECIFIED.into(),
            _ => return None,
        };
        let prefix = Prefix::new(dst.unwrap_or(any), dst_len)?;
        if tos != 0 {
            return None;
        }
        let family = match any {
            IpAddr::V4(_) => &mut self.v4,
            IpAddr::V6(_) => &mut self.v6,
        };
        let table = match u8::try_from(table).ok()? {
            libc::RT_TABLE_LOCAL => &mut family.local,
            libc::RT_TABLE_MAIN => &mut family.main,
            libc::RT_TABLE_DEFAULT => &mut family.default,
            _ => return None,
        };
        let route = Route { hit, tos, metric };
        changes.routes |= if new {
            let replace = i32::from(message.flags) & libc::NLM_F_REPLACE != 0;
            table.insert(prefix, route, replace)
        } else {
            table.remove(prefix, &route)
        };
        Some(())
    }

    fn one_neighbour(&mut self, payload: &[u8], new: bool, changes: &mut Changes) -> Option<()> {
        let family = *payload.first()?;
        let ifindex = u32_at(payload, 4)?;
        let flags = *payload.get(10)?;
        let mut ip = None;
        let mut mac = None;
        for (kind, value) in attributes(payload.get(12..)?) {
            match kind {
                libc::NDA_DST => ip = ip_of(family, value),
                libc::NDA_LLADDR => mac = value.try_into().ok(),
                _ => {}
            }
        }
        // A proxy entry is not a neighbour, and forwarding entries of a bridge have no IP address.
        if flags & libc::NTF_PROXY != 0 {
            return None;
        }
        let key = (ifindex, ip?);
        let neighbour = Neighbour {
            mac,
            state: u16_at(payload, 8)?,
        };
        let neighbour = new.then_some(neighbour);
        let before = self.neighbours.get(&key).copied();
        if before != neighbour {
            let usable = |known: Option<Neighbour>| known.and_then(|known| known.usable());
            changes.moved |= usable(before) != usable(neighbour);
            match neighbour {
                Some(neighbour) => self.neighbours.insert(key, neighbour),
                None => self.neighbours.remove(&key),
            };
            changes.neighbours.push(key);
        }
        Some(())
    }
}

#[cfg(any(test, feature = "testing"))]
impl NetState {
    /// A snapshot with one Ethernet link, a network on that link, and a neighbour in that network.
    pub fn of_link(index: u32, network: (IpAddr, u8), neighbour: (IpAddr, LinkAddress)) -> Self {
        let mut state = Self::default();
        let link = Link {
            index,
            name: "test".to_owned(),
            kind: None,
            hardware: libc::ARPHRD_ETHER,
            mac: Some([2; 6]),
            mtu: 1500,
            up: true,
            running: true,
            no_arp: false,
            master: None,
            parent: None,
        };
        Arc::make_mut(&mut state.links).insert(index, link);
        state.add_route(index, network, None);
        state.add_neighbour(index, neighbour);
        state
    }

    /// Adds a network behind a gateway, and the gateway as a neighbour.
    #[must_use]
    pub fn with_gateway(
        mut self,
        index: u32,
        network: (IpAddr, u8),
        gateway: (IpAddr, LinkAddress),
    ) -> Self {
        self.add_route(index, network, Some(gateway.0));
        self.add_neighbour(index, gateway);
        self
    }

    fn add_route(&mut self, oif: u32, (net, len): (IpAddr, u8), gateway: Option<IpAddr>) {
        let hit = RouteHit {
            kind: RouteKind::Unicast,
            oif,
            gateway,
            prefsrc: None,
            mtu: None,
        };
        let route = Route {
            hit,
            tos: 0,
            metric: 0,
        };
        let prefix = Prefix::new(net, len).expect("the prefix is not longer than the address");
        let family = if net.is_ipv4() {
            &mut self.v4
        } else {
            &mut self.v6
        };
        family.main.insert(prefix, route, false);
    }

    fn add_neighbour(&mut self, index: u32, (addr, mac): (IpAddr, LinkAddress)) {
        let known = Neighbour {
            mac: Some(mac),
            state: libc::NUD_REACHABLE,
        };
        self.neighbours.insert((index, addr), known);
    }
}

impl fmt::Debug for NetState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetState")
            .field("links", &self.links.len())
            .field("addresses", &self.addresses.len())
            .field("neighbours", &self.neighbours.len())
            .finish_non_exhaustive()
    }
}

/// Constants of `linux/rtnetlink.h`.
const RTA_VIA: u16 = 18;
const RTAX_MTU: u16 = 2;
const RTNH_F_DEAD: u32 = 1;

/// Reads an address; `None` if its length or the family is wrong.
pub(super) fn ip_of(family: u8, value: &[u8]) -> Option<IpAddr> {
    match i32::from(family) {
        libc::AF_INET => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
        libc::AF_INET6 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
        _ => None,
    }
}

/// Reads the address of a router whose family may differ from the route's (`struct rtvia`).
fn via_of(value: &[u8]) -> Option<IpAddr> {
    let family = u8::try_from(u16_at(value, 0)?).ok()?;
    ip_of(family, value.get(2..)?)
}

/// Reads the first live next hop of a multipath route into `hit`. Returns its flags, or flags with
/// `RTNH_F_DEAD` if no next hop is alive.
fn first_hop(family: u8, mut value: &[u8], hit: &mut RouteHit) -> Option<u32> {
    let mut last = RTNH_F_DEAD;
    while let Some(len) = u16_at(value, 0) {
        let len = usize::from(len);
        let hop = value.get(..len)?;
        last = u32::from(*hop.get(2)?);
        if last & RTNH_F_DEAD == 0 {
            hit.oif = u32_at(hop, 4)?;
            for (kind, value) in attributes(hop.get(8..)?) {
                match kind {
                    libc::RTA_GATEWAY => hit.gateway = ip_of(family, value),
                    RTA_VIA => hit.gateway = via_of(value),
                    _ => {}
                }
            }
            return Some(last);
        }
        value = value.get(len.next_multiple_of(4)..)?;
    }
    Some(last)
}

#[cfg(test)]
mod tests;

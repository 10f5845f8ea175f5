//! What the kernel has told of links, addresses, routes and neighbours: a snapshot that is asked
//! without system calls.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use crate::packet::shared_map::SharedMap;

use super::message::{Message, attributes, text, u16_at, u32_at};

/// An Ethernet address.
pub type LinkAddress = [u8; 6];

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// The driver's kind for virtual devices: `veth`, `vlan`, `bridge`, `macvlan`, `tun`.
    pub kind: Option<String>,
    /// The hardware type (`ARPHRD_*`): 1 is Ethernet, 772 the loopback.
    pub hardware: u16,
    /// Its Ethernet address.
    pub mac: Option<LinkAddress>,
    /// Its MTU.
    pub mtu: u32,
    /// It is set up (`IFF_UP`).
    pub up: bool,
    /// It is set up and has a carrier (`IFF_RUNNING`).
    pub running: bool,
    /// Neighbours are not resolved on it (`IFF_NOARP`).
    pub no_arp: bool,
    /// The bridge or bond that it is a port of.
    pub master: Option<u32>,
    /// The device below a VLAN or macvlan; the other end of a veth in the same namespace.
    pub parent: Option<u32>,
}

impl Link {
    /// Whether it is Ethernet on which neighbours have to be resolved.
    pub fn is_arp_capable(&self) -> bool {
        self.hardware == libc::ARPHRD_ETHER && !self.no_arp && self.mac.is_some()
    }
}

/// An address of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The interface.
    pub ifindex: u32,
    /// The address.
    pub ip: IpAddr,
    /// Length of its network's prefix.
    pub prefix_len: u8,
    /// How far it is valid (`RT_SCOPE_*`): 0 everywhere, 253 on the link, 254 on this host.
    pub scope: u8,
    /// `IFA_F_*`.
    pub flags: u32,
}

impl Address {
    /// Whether it can be the source of new connections: not secondary, deprecated, tentative or
    /// refused by duplicate address detection.
    pub fn is_preferred(&self) -> bool {
        const UNFIT: u32 = libc::IFA_F_SECONDARY
            | libc::IFA_F_DEPRECATED
            | libc::IFA_F_TENTATIVE
            | libc::IFA_F_DADFAILED;
        self.flags & UNFIT == 0
    }
}

/// What a route does with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouteKind {
    /// Sends them on.
    Unicast,
    /// They are for this host.
    Local,
    /// They are for all hosts of a link.
    Broadcast,
    /// As `Local`, for an address that several hosts have.
    Anycast,
    /// They are for a group.
    Multicast,
    /// Drops them silently.
    Blackhole,
    /// Refuses them: host unreachable.
    Unreachable,
    /// Refuses them: administratively prohibited.
    Prohibit,
    /// The table has no answer; the next one is asked.
    Throw,
}

impl RouteKind {
    fn from_kernel(kind: u8) -> Option<Self> {
        Some(match kind {
            libc::RTN_UNICAST => Self::Unicast,
            libc::RTN_LOCAL => Self::Local,
            libc::RTN_BROADCAST => Self::Broadcast,
            libc::RTN_ANYCAST => Self::Anycast,
            libc::RTN_MULTICAST => Self::Multicast,
            libc::RTN_BLACKHOLE => Self::Blackhole,
            libc::RTN_UNREACHABLE => Self::Unreachable,
            libc::RTN_PROHIBIT => Self::Prohibit,
            libc::RTN_THROW => Self::Throw,
            _ => return None,
        })
    }
}

/// Where packets to a destination go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteHit {
    /// What becomes of them.
    pub kind: RouteKind,
    /// The interface (0 where there is none: blackhole and the like).
    pub oif: u32,
    /// The router; without one the destination is a neighbour.
    pub gateway: Option<IpAddr>,
    /// The source address that the route prefers.
    pub prefsrc: Option<IpAddr>,
    /// The MTU that the route sets.
    pub mtu: Option<u32>,
}

/// A neighbour's address on the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Its Ethernet address, if it is known.
    pub mac: Option<LinkAddress>,
    /// `NUD_*`.
    pub state: u16,
}

impl Neighbour {
    /// The address, if frames may be sent to it.
    pub fn usable(&self) -> Option<LinkAddress> {
        const VALID: u16 = libc::NUD_PERMANENT
            | libc::NUD_NOARP
            | libc::NUD_REACHABLE
            | libc::NUD_PROBE
            | libc::NUD_STALE
            | libc::NUD_DELAY;
        self.mac.filter(|_| self.state & VALID != 0)
    }

    /// Whether the kernel has asked in vain.
    pub fn is_failed(&self) -> bool {
        self.state & libc::NUD_FAILED != 0
    }

    /// Whether somebody has set it by hand.
    pub fn is_static(&self) -> bool {
        self.state & (libc::NUD_PERMANENT | libc::NUD_NOARP) != 0
    }
}

/// What a round of events has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Links.
    pub links: bool,
    /// Addresses.
    pub addresses: bool,
    /// Routes.
    pub routes: bool,
    /// These neighbours (interface and address).
    pub neighbours: Vec<(u32, IpAddr)>,
    /// One of them has another link-layer address, or has none any more.
    pub moved: bool,
    /// Something of what leads packets to a TUN device was deleted, by whomever.
    pub steering: bool,
    /// Events were lost, and everything was read anew.
    pub resynchronised: bool,
}

impl Changes {
    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// One route of one table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Route {
    hit: RouteHit,
    tos: u8,
    metric: u32,
}

/// A routing table of one family: longest prefix first, then the least metric.
#[derive(Clone, Debug, Default)]
struct Table {
    /// How many prefixes there are of each length, longest first.
    lengths: Vec<(u8, usize)>,
    routes: SharedMap<(u8, u128), Vec<Route>>,
}

impl Table {
    fn insert(&mut self, prefix: (u8, u128), route: Route, replace: bool) -> bool {
        let routes = self.routes.entry(prefix, Vec::new);
        if routes.is_empty() {
            match self.lengths.binary_search_by(|(len, _)| prefix.0.cmp(len)) {
                Ok(at) => self.lengths[at].1 += 1,
                Err(at) => self.lengths.insert(at, (prefix.0, 1)),
            }
        }
        if routes.contains(&route) {
            return false;
        }
        if replace {
            // `ip route replace` replaces the first of the same metric and TOS, and no deletion is
            // told.
            let same = |r: &Route| r.metric == route.metric && r.tos == route.tos;
            if let Some(old) = routes.iter_mut().find(|r| same(r)) {
                *old = route;
                return true;
            }
        }
        let at = routes.partition_point(|r| r.metric <= route.metric);
        routes.insert(at, route);
        true
    }

    fn remove(&mut self, prefix: (u8, u128), route: &Route) -> bool {
        let Some(routes) = self.routes.get_mut(&prefix) else {
            return false;
        };
        let Some(at) = routes.iter().position(|r| r == route) else {
            return false;
        };
        routes.remove(at);
        if routes.is_empty() {
            self.routes.remove(&prefix);
            if let Ok(at) = self.lengths.binary_search_by(|(len, _)| prefix.0.cmp(len)) {
                self.lengths[at].1 -= 1;
                if self.lengths[at].1 == 0 {
                    self.lengths.remove(at);
                }
            }
        }
        true
    }

    /// The best route to `dst` that `alive` accepts.
    fn lookup(&self, dst: Bits, alive: impl Fn(&RouteHit) -> bool) -> Option<&RouteHit> {
        self.lengths.iter().find_map(|&(len, _)| {
            self.routes
                .get(&(len, dst.prefix(len)))?
                .iter()
                .map(|route| &route.hit)
                .find(|hit| alive(hit))
        })
    }
}

/// An address as a number, and its width.
#[derive(Clone, Copy)]
struct Bits {
    value: u128,
    width: u8,
}

impl Bits {
    fn new(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => Self {
                value: u128::from(u32::from(ip)),
                width: 32,
            },
            IpAddr::V6(ip) => Self {
                value: u128::from(ip),
                width: 128,
            },
        }
    }

    /// The first `len` bits, the others 0.
    fn prefix(self, len: u8) -> u128 {
        let cut = u32::from(self.width.saturating_sub(len));
        self.value
            .checked_shr(cut)
            .and_then(|v| v.checked_shl(cut))
            .unwrap_or(0)
    }
}

/// The tables of one family that the default policy rules name, in their order.
#[derive(Clone, Debug, Default)]
struct Family {
    local: Table,
    main: Table,
    default: Table,
}

/// The snapshot. A copy shares what does not change after it.
#[derive(Clone, Default)]
pub struct NetState {
    links: Arc<HashMap<u32, Link>>,
    addresses: Arc<Vec<Address>>,
    v4: Family,
    v6: Family,
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

    /// All links, in no order.
    pub fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.values()
    }

    /// The addresses of an interface, in the kernel's order.
    pub fn addresses(&self, ifindex: u32) -> impl Iterator<Item = &Address> {
        self.addresses.iter().filter(move |a| a.ifindex == ifindex)
    }

    /// Whether packets to `ip` are for this host (the kernel's table `local`).
    pub fn is_local(&self, ip: IpAddr) -> bool {
        let hit = self.family(ip).local.lookup(Bits::new(ip), |_| true);
        hit.is_some_and(|hit| matches!(hit.kind, RouteKind::Local | RouteKind::Anycast))
    }

    /// Where packets to `dst` go by the tables `local`, `main` and `default`, in this order. Policy
    /// rules and types of service are not followed. Routes over links that are down do not
    /// count.
    pub fn lookup(&self, dst: IpAddr) -> Option<RouteHit> {
        let family = self.family(dst);
        let dst = Bits::new(dst);
        let alive =
            |hit: &RouteHit| hit.oif == 0 || self.links.get(&hit.oif).is_none_or(|link| link.up);
        [&family.local, &family.main, &family.default]
            .into_iter()
            .filter_map(|table| table.lookup(dst, alive))
            .find(|hit| hit.kind != RouteKind::Throw)
            .copied()
    }

    /// All prefixes of a family that decide on anything: of routes, and of the host's own networks.
    /// Value and length.
    pub(crate) fn prefixes(&self, ipv4: bool) -> impl Iterator<Item = (u128, u8)> {
        let family = if ipv4 { &self.v4 } else { &self.v6 };
        let tables = [&family.local, &family.main, &family.default];
        let routes = tables.into_iter().flat_map(|table| table.routes.keys());
        let own = self
            .addresses
            .iter()
            .filter(move |a| a.ip.is_ipv4() == ipv4);
        let own = own.map(|a| (Bits::new(a.ip).prefix(a.prefix_len), a.prefix_len));
        routes.map(|&(len, value)| (value, len)).chain(own)
    }

    /// What is known of a neighbour.
    pub fn neighbour(&self, ifindex: u32, ip: IpAddr) -> Option<Neighbour> {
        self.neighbours.get(&(ifindex, ip)).copied()
    }

    /// The source address that the host would use towards `dst`: the route's, else the interface's
    /// address in the next hop's network, else its first, else any other one of this host
    /// (inet_select_addr()).
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
            let len = a.prefix_len;
            next.is_ipv4() == a.ip.is_ipv4()
                && Bits::new(next).prefix(len) == Bits::new(a.ip).prefix(len)
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

    fn family(&self, ip: IpAddr) -> &Family {
        match ip {
            IpAddr::V4(_) => &self.v4,
            IpAddr::V6(_) => &self.v6,
        }
    }

    pub(super) fn clear_routes(&mut self) {
        self.v4 = Family::default();
        self.v6 = Family::default();
    }

    /// The neighbours that differ from those of `other`.
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

    /// Applies one message of the kernel, from a dump or an event. Says whether routes must be read
    /// anew: the kernel tells nothing of IPv4 routes that went with a link or an address
    /// (fib_sync_down_dev()).
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
        // A bridge tells of its ports under its own family; the link itself is told as AF_UNSPEC
        // too.
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
        for (kind, value) in attributes(payload.get(16..)?) {
            match kind {
                libc::IFLA_IFNAME => link.name = text(value),
                libc::IFLA_ADDRESS => link.mac = value.try_into().ok(),
                libc::IFLA_MTU => link.mtu = u32_at(value, 0)?,
                libc::IFLA_MASTER => link.master = u32_at(value, 0),
                libc::IFLA_LINK => link.parent = u32_at(value, 0).filter(|i| *i != 0),
                libc::IFLA_LINK_NETNSID => parent_elsewhere = true,
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
        // Exceptions of the kernel's cache are no routes; a source or a type of service is not
        // followed.
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
        let dst = Bits::new(dst.unwrap_or(any));
        if dst_len > dst.width || tos != 0 {
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
        let prefix = (dst_len, dst.prefix(dst_len));
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
        // A proxy entry is not a neighbour; a bridge's forwarding entries have no address of ours.
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
    /// One Ethernet link with a network that is on it, and a neighbour there.
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
        let prefix = (len, Bits::new(net).prefix(len));
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

/// `linux/rtnetlink.h`.
const RTA_VIA: u16 = 18;
const RTAX_MTU: u16 = 2;
const RTNH_F_DEAD: u32 = 1;

/// An address of a family.
pub(super) fn ip_of(family: u8, value: &[u8]) -> Option<IpAddr> {
    match i32::from(family) {
        libc::AF_INET => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
        libc::AF_INET6 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
        _ => None,
    }
}

/// A router of another family (`struct rtvia`).
fn via_of(value: &[u8]) -> Option<IpAddr> {
    let family = u8::try_from(u16_at(value, 0)?).ok()?;
    ip_of(family, value.get(2..)?)
}

/// Takes the first next hop of several that is alive; returns its flags.
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
mod tests {
    use super::*;
    use crate::netlink::message::{Builder, messages};

    fn route_message(
        builder: &mut Builder,
        new: bool,
        flags: u16,
        dst: ([u8; 4], u8),
        kind: u8,
        (table, metric, oif): (u8, u32, u32),
    ) {
        let af = u8::try_from(libc::AF_INET).unwrap();
        let op = if new {
            libc::RTM_NEWROUTE
        } else {
            libc::RTM_DELROUTE
        };
        builder.begin(op, flags, &[af, dst.1, 0, 0, table, 4, 0, kind, 0, 0, 0, 0]);
        builder.attr(libc::RTA_DST, &dst.0);
        builder.attr(libc::RTA_PRIORITY, &metric.to_ne_bytes());
        if oif != 0 {
            builder.attr(libc::RTA_OIF, &oif.to_ne_bytes());
        }
        builder.end();
    }

    fn apply(state: &mut NetState, builder: &Builder) -> Changes {
        let mut changes = Changes::default();
        for message in messages(builder.bytes()) {
            state.apply(&message, &mut changes);
        }
        changes
    }

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    const MAIN: u8 = libc::RT_TABLE_MAIN;
    const LOCAL: u8 = libc::RT_TABLE_LOCAL;
    const REPLACE: u16 = 0x100;

    #[test]
    fn the_longest_prefix_then_the_least_metric_wins() {
        let mut state = NetState::default();
        let mut b = Builder::new(1);
        route_message(
            &mut b,
            true,
            0,
            ([0; 4], 0),
            libc::RTN_UNICAST,
            (MAIN, 0, 9),
        );
        route_message(
            &mut b,
            true,
            0,
            ([10, 0, 0, 0], 8),
            libc::RTN_UNICAST,
            (MAIN, 200, 2),
        );
        route_message(
            &mut b,
            true,
            0,
            ([10, 0, 0, 0], 8),
            libc::RTN_UNICAST,
            (MAIN, 100, 1),
        );
        route_message(
            &mut b,
            true,
            0,
            ([10, 1, 0, 0], 16),
            libc::RTN_BLACKHOLE,
            (MAIN, 0, 0),
        );
        route_message(
            &mut b,
            true,
            0,
            ([10, 0, 0, 1], 32),
            libc::RTN_LOCAL,
            (LOCAL, 0, 1),
        );
        assert!(apply(&mut state, &b).routes);
        assert_eq!(state.lookup(ip("10.0.0.2")).map(|h| h.oif), Some(1));
        assert_eq!(state.lookup(ip("11.0.0.2")).map(|h| h.oif), Some(9));
        assert_eq!(
            state.lookup(ip("10.1.2.3")).map(|h| h.kind),
            Some(RouteKind::Blackhole)
        );
        assert!(state.is_local(ip("10.0.0.1")));
        assert!(!state.is_local(ip("10.0.0.2")));
        assert_eq!(state.lookup(ip("2001:db8::1")), None);

        let mut b = Builder::new(1);
        route_message(
            &mut b,
            false,
            0,
            ([10, 0, 0, 0], 8),
            libc::RTN_UNICAST,
            (MAIN, 100, 1),
        );
        assert!(apply(&mut state, &b).routes);
        assert_eq!(state.lookup(ip("10.0.0.2")).map(|h| h.oif), Some(2));

        let mut b = Builder::new(1);
        route_message(
            &mut b,
            true,
            REPLACE,
            ([10, 0, 0, 0], 8),
            libc::RTN_UNICAST,
            (MAIN, 200, 7),
        );
        apply(&mut state, &b);
        assert_eq!(state.lookup(ip("10.0.0.2")).map(|h| h.oif), Some(7));
        let mut b = Builder::new(1);
        route_message(
            &mut b,
            false,
            0,
            ([10, 0, 0, 0], 8),
            libc::RTN_UNICAST,
            (MAIN, 200, 7),
        );
        apply(&mut state, &b);
        assert_eq!(state.lookup(ip("10.0.0.2")).map(|h| h.oif), Some(9));
    }

    #[test]
    fn an_unchanged_route_is_no_change() {
        let mut state = NetState::default();
        let mut b = Builder::new(1);
        route_message(
            &mut b,
            true,
            0,
            ([10, 0, 0, 0], 8),
            libc::RTN_UNICAST,
            (MAIN, 0, 1),
        );
        assert!(apply(&mut state, &b).routes);
        assert!(apply(&mut state, &b).is_empty());
    }

    #[test]
    fn prefixes_of_all_lengths() {
        let bits = Bits::new(ip("255.255.255.255"));
        assert_eq!(bits.prefix(0), 0);
        assert_eq!(bits.prefix(1), 0x8000_0000);
        assert_eq!(bits.prefix(32), 0xffff_ffff);
        let bits = Bits::new(ip("ffff::1"));
        assert_eq!(bits.prefix(0), 0);
        assert_eq!(bits.prefix(16), 0xffff << 112);
        assert_eq!(bits.prefix(128), (0xffff << 112) + 1);
    }

    proptest::proptest! {
        #[test]
        fn any_message_is_applied_without_panic(kind in 16_u16..40, payload: Vec<u8>) {
            let message = Message { kind, flags: 0, seq: 0, payload: &payload };
            NetState::default().apply(&message, &mut Changes::default());
        }
    }
}

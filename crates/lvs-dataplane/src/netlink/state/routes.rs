//! Routing tables, and the look-up of the route to an address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use lvs_core::Prefix;

use super::RouteHit;
use lvs_packet::shared_map::SharedMap;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) hit: RouteHit,
    pub(super) tos: u8,
    pub(super) metric: u32,
}

/// A routing table of one family.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    /// Number of prefixes of each length, longest first.
    lengths: Vec<(u8, usize)>,
    routes: SharedMap<Prefix, Vec<Route>>,
}

impl Table {
    /// Adds a route; with `replace`, in place of the first one with the same metric and TOS, if
    /// any. Returns true if the table has changed.
    pub(super) fn insert(&mut self, prefix: Prefix, route: Route, replace: bool) -> bool {
        let routes = self.routes.entry(prefix, Vec::new);
        if routes.is_empty() {
            match self
                .lengths
                .binary_search_by(|(len, _)| prefix.bits().cmp(len))
            {
                Ok(at) => self.lengths[at].1 += 1,
                Err(at) => self.lengths.insert(at, (prefix.bits(), 1)),
            }
        }
        if routes.contains(&route) {
            return false;
        }
        if replace {
            // `ip route replace` replaces the first route of the same metric and TOS, and the
            // kernel reports no deletion.
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

    /// Removes a route. Returns true if it existed.
    pub(super) fn remove(&mut self, prefix: Prefix, route: &Route) -> bool {
        let Some(routes) = self.routes.get_mut(&prefix) else {
            return false;
        };
        let Some(at) = routes.iter().position(|r| r == route) else {
            return false;
        };
        routes.remove(at);
        if routes.is_empty() {
            self.routes.remove(&prefix);
            if let Ok(at) = self
                .lengths
                .binary_search_by(|(len, _)| prefix.bits().cmp(len))
            {
                self.lengths[at].1 -= 1;
                if self.lengths[at].1 == 0 {
                    self.lengths.remove(at);
                }
            }
        }
        true
    }

    pub(super) fn prefixes(&self) -> impl Iterator<Item = Prefix> {
        self.routes.keys().copied()
    }

    /// All routes, the default routes first, and otherwise in arbitrary order.
    pub(super) fn routes(&self) -> impl Iterator<Item = &Route> {
        let anywhere = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        let default = anywhere.into_iter().filter_map(|to| Prefix::new(to, 0));
        let default = default.filter_map(|prefix| self.routes.get(&prefix));
        let others = self.routes.iter().filter(|(prefix, _)| prefix.bits() > 0);
        default.chain(others.map(|(_, routes)| routes)).flatten()
    }

    /// The best route to `dst` that `alive` accepts.
    pub(super) fn lookup(
        &self,
        dst: IpAddr,
        alive: impl Fn(&RouteHit) -> bool,
    ) -> Option<&RouteHit> {
        self.lengths.iter().find_map(|&(len, _)| {
            self.routes
                .get(&Prefix::new(dst, len)?)?
                .iter()
                .map(|route| &route.hit)
                .find(|hit| alive(hit))
        })
    }
}

/// The routing tables of one family to which the default policy rules refer, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Tables {
    pub(super) local: Table,
    pub(super) main: Table,
    pub(super) default: Table,
}

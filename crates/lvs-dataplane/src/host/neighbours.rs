//! Neighbours: resolved and confirmed by the kernel, which never sees the director's frames and
//! would let what it knows grow stale.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use lvs_core::Instant;
use tracing::debug;

use super::view::Tables;
use crate::netlink::Netlink;
use lvs_packet::net::PortId;

/// Between two questions after the link-layer address of a server's next hop.
const REFRESH_PERIOD: Duration = Duration::from_secs(20);
/// Between two doubts about one neighbour.
const CONFIRM_PERIOD: Duration = Duration::from_secs(1);
/// Gateways that are kept fresh, and the routes that are looked through for them.
const GATEWAYS_MAX: usize = 64;
const ROUTES_MAX: usize = 4096;

/// Interface and address.
type Key = (u32, IpAddr);

/// What is asked of the kernel, and when.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    /// The servers' next hops, and the gateways towards clients, whose link-layer addresses are kept
    /// fresh: a director that stands by has forwarded nothing yet when it takes over.
    next_hops: HashSet<Key>,
    next_refresh: Instant,
    /// When the kernel was last told to ask neighbours whether they are still there.
    confirmed: HashMap<Key, Instant>,
    /// Those that it has given up and was asked after once more.
    given_up: HashSet<Key>,
}

impl Neighbours {
    /// The next hops on the way to some servers. None where the host routes the packets: it keeps
    /// its neighbours fresh itself.
    fn next_hops_of(
        servers: impl IntoIterator<Item = IpAddr>,
        tables: &Tables,
    ) -> impl Iterator<Item = Key> {
        let servers = servers.into_iter().filter(|_| !tables.is_routed());
        servers.filter_map(|server| {
            let hop = tables.route(server)?;
            Some((tables.ifindex(hop.port)?, hop.addr))
        })
    }

    /// The gateways of this host's routes over the engine's interfaces.
    fn gateways(tables: &Tables) -> HashSet<Key> {
        let mut found = HashSet::new();
        if tables.is_routed() {
            return found;
        }
        for (ifindex, addr) in tables.state.gateways().take(ROUTES_MAX) {
            if tables.port_of(ifindex).is_some() && found.len() < GATEWAYS_MAX {
                found.insert((ifindex, addr));
            }
        }
        found
    }

    /// These are all servers from now on.
    pub(super) fn set_servers(
        &mut self,
        servers: impl IntoIterator<Item = IpAddr>,
        tables: &Tables,
        netlink: &mut Netlink,
    ) {
        let mut all = Self::gateways(tables);
        all.extend(Self::next_hops_of(servers, tables));
        for &new in all.difference(&self.next_hops) {
            resolve(new, tables, netlink);
        }
        self.next_hops = all;
    }

    /// These are servers, too.
    pub(super) fn add_servers(
        &mut self,
        servers: impl IntoIterator<Item = IpAddr>,
        tables: &Tables,
        netlink: &mut Netlink,
    ) {
        for hop in Self::next_hops_of(servers, tables) {
            if self.next_hops.insert(hop) {
                resolve(hop, tables, netlink);
            }
        }
    }

    /// Asks after all next hops, if it is time.
    pub(super) fn refresh(&mut self, tables: &Tables, netlink: &mut Netlink, now: Instant) {
        if self.next_refresh <= now {
            self.next_refresh = now + REFRESH_PERIOD;
            for &hop in &self.next_hops {
                resolve(hop, tables, netlink);
            }
        }
    }

    /// A packet waits for a neighbour. `false`: the kernel does not ask.
    pub(super) fn resolve(
        port: PortId,
        addr: IpAddr,
        tables: &Tables,
        netlink: &mut Netlink,
    ) -> bool {
        match tables.ifindex(port) {
            Some(ifindex) => resolve((ifindex, addr), tables, netlink),
            None => false,
        }
    }

    /// Has the kernel ask a neighbour whether it is still there, at most once in
    /// [`CONFIRM_PERIOD`].
    pub(super) fn confirm(
        &mut self,
        port: PortId,
        addr: IpAddr,
        tables: &Tables,
        netlink: &mut Netlink,
        now: Instant,
    ) {
        let Some(ifindex) = tables.ifindex(port) else {
            return;
        };
        self.confirmed
            .retain(|_, then| now < *then + CONFIRM_PERIOD);
        if tables.is_routed() || self.confirmed.contains_key(&(ifindex, addr)) {
            return;
        }
        self.confirmed.insert((ifindex, addr), now);
        if let Err(error) = netlink.confirm(&tables.state, ifindex, addr) {
            debug!("{error}");
        }
    }

    /// The kernel knows a neighbour's link-layer address.
    pub(super) fn is_known(&mut self, key: Key) {
        self.given_up.remove(&key);
    }

    /// The kernel has given a neighbour up. A server that has got another link-layer address
    /// answers when everybody is asked.
    pub(super) fn has_failed(&mut self, key: Key, tables: &Tables, netlink: &mut Netlink) {
        if self.next_hops.contains(&key) && self.given_up.insert(key) {
            resolve(key, tables, netlink);
        }
    }
}

fn resolve((ifindex, addr): Key, tables: &Tables, netlink: &mut Netlink) -> bool {
    match netlink.resolve(&tables.state, ifindex, addr) {
        Ok(()) => true,
        Err(error) => {
            debug!(%addr, "{error}");
            false
        }
    }
}

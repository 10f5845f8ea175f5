//! Resolution of neighbours. The kernel does not see that the dataplane sends frames to a
//! neighbour, and would let the neighbour entry become stale. The dataplane therefore asks the
//! kernel to resolve and confirm entries.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use lvs_core::Instant;
use lvs_core::api::SilentHop;
use tracing::debug;

use super::view::Tables;
use crate::netlink::Netlink;
use lvs_packet::net::PortId;

/// Interval between two requests to resolve the kept next hops.
const REFRESH_PERIOD: Duration = Duration::from_secs(20);
/// Shortest interval between two confirmations of one neighbour.
const CONFIRM_PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of gateways whose neighbour entries are kept up to date.
const GATEWAYS_MAX: usize = 64;
/// Maximum number of routes that are searched for gateways.
const ROUTES_MAX: usize = 4096;
/// Maximum number of reported next hops that do not answer.
const SILENT_MAX: usize = 64;

/// Index of the interface, and address of the neighbour.
type Key = (u32, IpAddr);

/// The neighbours that the kernel resolves for the dataplane.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    /// The servers' next hops, and the gateways towards clients. A standby director, which forwards
    /// nothing, keeps them resolved for its take-over.
    next_hops: HashSet<Key>,
    next_refresh: Instant,
    /// Time of the last confirmation of each neighbour.
    confirmed: HashMap<Key, Instant>,
    /// Neighbours that the kernel has failed to resolve, and the time of the failure. The kernel
    /// was asked once more.
    given_up: HashMap<Key, Instant>,
}

impl Neighbours {
    /// The next hops on the routes to `servers`. Empty with the TUN backend: the host resolves its
    /// own neighbours.
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

    /// Up to [`GATEWAYS_MAX`] gateways of this host's routes over the dataplane's interfaces. Empty
    /// with the TUN backend.
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

    /// Replaces the servers whose next hops are kept resolved, and reads the gateways again.
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
        self.given_up.retain(|hop, _| all.contains(hop));
        self.next_hops = all;
    }

    /// Adds servers whose next hops are kept resolved.
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

    /// Requests the resolution of all next hops again, after [`REFRESH_PERIOD`].
    pub(super) fn refresh(&mut self, tables: &Tables, netlink: &mut Netlink, now: Instant) {
        if self.next_refresh <= now {
            self.next_refresh = now + REFRESH_PERIOD;
            for &hop in &self.next_hops {
                resolve(hop, tables, netlink);
            }
        }
    }

    /// Asks the kernel to resolve a neighbour for which a packet waits. Returns false if the kernel
    /// refuses, or the port was removed.
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

    /// Asks the kernel to confirm a neighbour, at most once in [`CONFIRM_PERIOD`]. Has no effect
    /// with the TUN backend.
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

    /// Up to [`SILENT_MAX`] next hops that do not answer, and their interfaces.
    pub(super) fn silent(&self, tables: &Tables, now: Instant) -> Vec<SilentHop> {
        let silent = self.given_up.iter();
        let silent = silent.filter(|(hop, _)| self.next_hops.contains(*hop));
        let silent = silent.filter_map(|(&(ifindex, address), &failed)| {
            let interface = tables.name(tables.port_of(ifindex)?).to_owned();
            Some(SilentHop {
                address,
                interface,
                since: (now - failed).as_secs(),
            })
        });
        let mut silent: Vec<SilentHop> = silent.collect();
        silent.sort_unstable_by(|a, b| (a.address, &a.interface).cmp(&(b.address, &b.interface)));
        silent.truncate(SILENT_MAX);
        silent
    }

    /// Records that the kernel has a neighbour's MAC address.
    pub(super) fn is_known(&mut self, key: Key) {
        self.given_up.remove(&key);
    }

    /// Records that the kernel has failed to resolve a neighbour, if it is one of the kept next
    /// hops. At the first failure, requests one more resolution, because a server with a new MAC
    /// address answers a broadcast.
    pub(super) fn has_failed(
        &mut self,
        key: Key,
        tables: &Tables,
        netlink: &mut Netlink,
        now: Instant,
    ) {
        if self.next_hops.contains(&key) && !self.given_up.contains_key(&key) {
            self.given_up.insert(key, now);
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::view::KnownPort;
    use super::*;
    use lvs_packet::net::PortInfo;
    use lvs_packet::wire::Mac;

    /// Interfaces with these names, numbered from 1.
    fn tables(names: &[&str]) -> Tables {
        let mut tables = Tables::default();
        for (number, name) in (1..).zip(names) {
            let port = KnownPort {
                ifindex: number.into(),
                name: Arc::from(*name),
                info: PortInfo {
                    mac: Mac([2; 6]),
                    mtu: 1500,
                    ethernet: true,
                    offload: true,
                    gives_back: false,
                },
                down: None,
                decapsulates: false,
            };
            tables.set_port(PortId(number), port);
        }
        tables
    }

    #[test]
    fn silent_next_hops_are_sorted_by_address_and_interface() {
        let tables = tables(&["eth3", "eth1", "eth2"]);
        let address = |text: &str| -> IpAddr { text.parse().expect("the address is valid") };
        let hops = [(1, "fe80::1"), (2, "fe80::1"), (3, "fe80::1"), (1, "::1")];
        let hops = hops.map(|(ifindex, text)| (ifindex, address(text)));
        let mut neighbours = Neighbours::default();
        neighbours.next_hops.extend(hops);
        let failed = Instant::from_secs(10);
        neighbours.given_up.extend(hops.map(|hop| (hop, failed)));
        let silent = neighbours.silent(&tables, Instant::from_secs(14));
        assert!(silent.iter().all(|hop| hop.since == 4), "{silent:?}");
        let silent = silent.into_iter();
        let silent: Vec<_> = silent.map(|hop| (hop.address, hop.interface)).collect();
        let last = address("fe80::1");
        let sorted = [
            (address("::1"), "eth3"),
            (last, "eth1"),
            (last, "eth2"),
            (last, "eth3"),
        ];
        assert_eq!(
            silent,
            sorted.map(|(address, name)| (address, name.to_owned()))
        );
    }

    #[test]
    fn removed_server_is_not_silent_when_it_returns() {
        let (mut netlink, _) = Netlink::open().expect("any user may read the tables");
        let hop = (1, [10, 0, 0, 1].into());
        let mut neighbours = Neighbours::default();
        neighbours.next_hops.insert(hop);
        neighbours.given_up.insert(hop, Instant::ZERO);
        neighbours.set_servers([], &Tables::default(), &mut netlink);
        neighbours.next_hops.insert(hop);
        assert_eq!(neighbours.silent(&tables(&["eth0"]), Instant::ZERO), []);
    }
}

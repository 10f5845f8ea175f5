//! What is the director's own in front of its servers: local addresses for full NAT, and servers on the host itself.
//!
//! A server on the host answers by the host's own routes, which know nothing of the virtual address that its clients
//! asked. So its answers are led into the engine: a policy rule sends what comes from its port to a routing table of the
//! engine's own, whose only route is `lvs-host0`. The route goes with that device; a rule that a killed engine leaves
//! behind looks into an empty table, which changes nothing, and the next engine deletes it.

use std::collections::HashSet;
use std::fs;
use std::net::IpAddr;

use lvs_core::api::{Failure, FailureCode, LocalAddressInfo, LocalInfo};
use lvs_core::{Control, LocalAddress, Shard};
use tracing::{info, warn};

use crate::netlink::{LEAD_TABLE, Netlink, NetlinkError};
use crate::shield_spec::Endpoint;

/// Local addresses at most: each connection may have to try all of them.
const LOCAL_ADDRESSES_MAX: usize = 256;
/// Where the host's own programs get their ports from.
const EPHEMERAL: &str = "/proc/sys/net/ipv4/ip_local_port_range";

/// The ports of local addresses that stand for clients. Of an address that the host has as well (`is_local`), those
/// that its own programs are not given.
pub(super) fn pool(addresses: &[IpAddr], is_local: impl Fn(IpAddr) -> bool) -> Vec<LocalAddress> {
    let ephemeral = fs::read_to_string(EPHEMERAL).unwrap_or_default();
    let mut bounds = ephemeral.split_whitespace().map(str::parse::<u16>);
    let (low, high) = match (bounds.next(), bounds.next()) {
        (Some(Ok(low)), Some(Ok(high))) => (low, high),
        _ => (32_768, 60_999),
    };
    let shared = |addr| free_ports(LocalAddress::new(addr), low, high);
    let ports = |&addr: &IpAddr| {
        if is_local(addr) {
            shared(addr)
        } else {
            LocalAddress::new(addr)
        }
    };
    addresses.iter().map(ports).collect()
}

/// The longer part of a range that is outside of `low` to `high`; all of it if there is none.
fn free_ports(all: LocalAddress, low: u16, high: u16) -> LocalAddress {
    let below = low.saturating_sub(all.first);
    let above = all.last.saturating_sub(high);
    match (below, above) {
        (0, 0) => all,
        _ if below >= above => LocalAddress {
            last: low - 1,
            ..all
        },
        _ => LocalAddress {
            first: high + 1,
            ..all
        },
    }
}

/// What there is to tell of them.
pub(super) fn info(control: &Control, shard: &Shard) -> LocalInfo {
    let (pool, hairpin) = control.local_pool();
    LocalInfo {
        addresses: pool
            .iter()
            .map(|local| LocalAddressInfo {
                address: local.addr,
                first: local.first,
                last: local.last,
                connections: shard.local_connections(local.addr),
            })
            .collect(),
        hairpin,
    }
}

/// Whether these addresses can stand for clients.
///
/// # Errors
/// Which one cannot, and why.
pub(super) fn check(addresses: &[IpAddr]) -> Result<(), Failure> {
    let invalid = |message| Failure {
        code: FailureCode::Invalid,
        message,
    };
    if addresses.len() > LOCAL_ADDRESSES_MAX {
        let count = addresses.len();
        return Err(invalid(format!(
            "{count} local addresses: {LOCAL_ADDRESSES_MAX} at most are taken"
        )));
    }
    let mut seen = HashSet::new();
    for addr in addresses {
        let unusable = match addr {
            IpAddr::V4(addr) => addr.is_broadcast() || addr.is_link_local(),
            IpAddr::V6(addr) => addr.is_unicast_link_local() || addr.to_ipv4_mapped().is_some(),
        };
        if unusable || addr.is_unspecified() || addr.is_multicast() || addr.is_loopback() {
            return Err(invalid(format!(
                "{addr} cannot be a local address: servers have to reach it as one host's"
            )));
        }
        if !seen.insert(addr) {
            return Err(invalid(format!("{addr} is named twice")));
        }
    }
    Ok(())
}

/// The rules that lead the answers of servers on this host into the engine.
#[derive(Debug, Default)]
pub(super) struct LocalNodes {
    led: HashSet<Endpoint>,
    /// Which families have the route.
    routed: (bool, bool),
}

impl LocalNodes {
    /// Takes away what an engine that was killed has left.
    pub(super) fn clean(netlink: &mut Netlink) {
        match netlink.delete_lead_rules() {
            Ok(0) => {}
            Ok(count) => info!(
                "deleted {count} policy rules to table {LEAD_TABLE} of an engine that was killed"
            ),
            Err(error) => warn!("{error}"),
        }
    }

    /// Leads the answers of exactly these servers into the device `ifindex`.
    pub(super) fn follow(
        &mut self,
        wanted: &HashSet<Endpoint>,
        netlink: &mut Netlink,
        ifindex: u32,
    ) {
        for endpoint in wanted.difference(&self.led.clone()) {
            match self.lead(endpoint, netlink, ifindex) {
                Ok(()) => {
                    info!(
                        "leading the answers of {}:{} on this host to clients",
                        endpoint.address, endpoint.port
                    );
                    self.led.insert(*endpoint);
                }
                Err(error) => warn!(
                    "clients get no answers of {} on this host: {error}",
                    endpoint.address
                ),
            }
        }
        for endpoint in self.led.difference(wanted).copied().collect::<Vec<_>>() {
            if let Err(error) = netlink.delete_lead_rule(&endpoint) {
                warn!("{error}");
            }
            self.led.remove(&endpoint);
        }
    }

    fn lead(
        &mut self,
        endpoint: &Endpoint,
        netlink: &mut Netlink,
        ifindex: u32,
    ) -> Result<(), NetlinkError> {
        let routed = match endpoint.address {
            IpAddr::V4(_) => &mut self.routed.0,
            IpAddr::V6(_) => &mut self.routed.1,
        };
        if !*routed {
            netlink.add_lead_route(endpoint.address, ifindex)?;
            *routed = true;
        }
        netlink.add_lead_rule(endpoint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_the_hosts_own_programs_are_left_to_them() {
        let all = LocalAddress::new([10, 0, 0, 1].into());
        for (low, high, first, last) in [
            (32_768, 60_999, 1024, 32_767),
            (1024, 60_999, 61_000, 65_535),
            (15_000, 20_000, 20_001, 65_535),
            (1024, 65_535, 1024, 65_535),
            (100, 65_535, 1024, 65_535),
        ] {
            let ports = free_ports(all, low, high);
            assert_eq!((ports.first, ports.last), (first, last), "{low}-{high}");
        }
    }

    #[test]
    fn what_cannot_stand_for_a_client_is_refused() {
        for addr in [
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "fe80::1",
            "ff02::1",
            "::1",
        ] {
            let failure = check(&[addr.parse().unwrap()]).unwrap_err();
            assert!(failure.message.contains(addr), "{}", failure.message);
        }
        let addr: IpAddr = "10.0.0.1".parse().unwrap();
        assert!(check(&[addr]).is_ok() && check(&[]).is_ok());
        assert!(check(&[addr, addr]).unwrap_err().message.contains("twice"));
        assert!(check(&[addr; 257]).unwrap_err().message.contains("257"));
    }
}

//! Local addresses for full NAT, and real servers on the director's host.
//!
//! A server on the host sends its answers by the host's own routes, past the dataplane, which must
//! translate the answers. So a policy rule and a routing table route the answers into the
//! dataplane, as the TUN backend does for every server ([`steering`]): `from RIP ipproto tcp sport
//! 8080 lookup 7677`. The only route of this table leads into the device `lvs-host0`, and the
//! kernel deletes the route with the device. A rule of a killed dataplane then refers to an empty
//! table, which has no effect, and the next dataplane deletes the rule.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::{fs, io};

use lvs_core::full_nat::LocalAddress;
use tracing::warn;

use super::steering;
use crate::netlink::Requests;
use crate::netlink::policy::{Action, Entry, PolicyRoute, PolicyRule};
use lvs_packet::intercept::{Endpoint, Endpoints};

/// The kernel's range of ephemeral ports.
const EPHEMERAL: &str = "/proc/sys/net/ipv4/ip_local_port_range";

/// The source ports of full NAT for a local address that the host also uses: the ports below or
/// above the host's ephemeral ports `own`, whichever are more; all ports if none are below or
/// above.
pub(crate) fn ports(addr: IpAddr, own: (u16, u16)) -> LocalAddress {
    free_ports(LocalAddress::new(addr), own.0, own.1)
}

/// The first and the last ephemeral port of the host; the kernel's defaults if the setting cannot
/// be read.
pub(crate) fn ephemeral_ports() -> (u16, u16) {
    let text = fs::read_to_string(EPHEMERAL).unwrap_or_default();
    let mut bounds = text.split_whitespace().map(str::parse::<u16>);
    match (bounds.next(), bounds.next()) {
        (Some(Ok(low)), Some(Ok(high))) => (low, high),
        _ => (32_768, 60_999),
    }
}

/// Returns the ports of a range below `low` or above `high`, whichever are more; the whole range if
/// it has no such ports.
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

/// The policy rules and routes for the answers of servers on this host. Dropping this value removes
/// them.
#[derive(Debug)]
pub(super) struct LocalNodes {
    requests: Requests,
    present: BTreeSet<Entry>,
}

impl LocalNodes {
    /// Opens the netlink socket, and adds no rule yet.
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self {
            requests: Requests::open()?,
            present: BTreeSet::new(),
        })
    }

    /// Routes the answers of exactly these servers into the device `ifindex`.
    pub(super) fn follow(&mut self, nodes: &Endpoints, ifindex: u32) {
        let wanted: BTreeSet<Entry> = nodes
            .iter()
            .flat_map(|node| [way(node.address, ifindex), rule(node)])
            .collect();
        for entry in wanted.difference(&self.present.clone()) {
            match self.requests.add(entry) {
                Ok(()) => {
                    self.present.insert(entry.clone());
                }
                Err(error) => {
                    warn!(
                        "replies from servers on this host do not reach clients: cannot add {entry}: {error}"
                    );
                }
            }
        }
        let surplus: Vec<Entry> = self.present.difference(&wanted).cloned().collect();
        for entry in surplus.into_iter().rev() {
            if let Err(error) = self.requests.delete(&entry) {
                warn!("cannot delete {entry}: {error}");
            }
            self.present.remove(&entry);
        }
    }
}

impl Drop for LocalNodes {
    fn drop(&mut self) {
        self.follow(&Endpoints::default(), 0);
    }
}

/// The only route of the table for answers, in the address family of `like`.
fn way(like: IpAddr, ifindex: u32) -> Entry {
    let to = match like {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    Entry::Route(PolicyRoute {
        table: steering::DEVICE,
        to,
        prefix_len: 0,
        ifindex,
    })
}

/// The rule that selects the table for a server's answers. `iif lo` limits the rule to packets that
/// the host sends: otherwise the reverse path check (`rp_filter`) of packets to the server would
/// follow it, too.
fn rule(node: &Endpoint) -> Entry {
    let (first, last) = steering::RULE_PORTS;
    let port = node.port;
    Entry::Rule(PolicyRule {
        ipv6: node.address.is_ipv6(),
        priority: steering::FROM_SERVERS,
        interface: Some("lo".to_owned()),
        from: Some(node.address),
        protocol: Some(node.protocol.0),
        ports: (first..=last).contains(&port).then_some((port, port)),
        action: Action::Lookup(steering::DEVICE),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_nat_range_excludes_ephemeral_ports_of_host_unless_they_are_all_ports() {
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
}

//! Steering: the policy rules and routes by which the host routes packets into the TUN device of
//! the dataplane.
//!
//! The other backends receive copies of all frames, and a [shield](crate::host::shield) hides the
//! frames of services from the host. With the TUN backend, the host routes only the packets of
//! services to the dataplane, according to the same specification ([`Intercept`]):
//!
//! ```text
//! ip rule     60: iif lvs-tun0 goto 65                        dataplane output: ordinary routes
//!             61: lookup 7676                                 VIPs: 192.0.2.10 dev lvs-tun0
//!             62: from RIP ipproto tcp sport 80 lookup 7677   NAT replies: default dev lvs-tun0
//!             63: from RIP ipproto tcp sport 1-65534 goto 65  other server ports: ordinary routes
//!             64: from RIP ipproto tcp lookup 7677            fragments without ports: as 62
//!             65: nop
//! ip neigh    proxy 192.0.2.10 dev eth0                       ARP and NDP for own VIPs
//! ```
//!
//! All rules, routes and proxy neighbours have the protocol number 76. The dataplane removes them
//! when they are no longer needed and when it stops; after a kill, the next dataplane removes them
//! at its start, or keeps using them (warm restart). The kernel deletes the routes together with
//! the device, and rules without routes have no effect. If another program deletes an entry, as
//! systemd-networkd does with foreign rules when it starts, the dataplane restores it within
//! seconds.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use tracing::{info, warn};

use crate::io::tun::{read_setting, write_setting};
use crate::netlink::Requests;
use crate::netlink::policy::{Action, Entry, PROTOCOL, PolicyRoute, PolicyRule, Proxy, host_bits};
use lvs_packet::intercept::Intercept;

/// The routing table of virtual addresses.
const VIPS: u32 = 7676;
/// The routing table whose only route leads into a device of the dataplane.
pub(crate) const DEVICE: u32 = 7677;

// Priorities of the rules: after the host's own addresses (0), and before the usual rules of
// operators.
const FROM_DIRECTOR: u32 = 60;
const TO_VIPS: u32 = 61;
pub(crate) const FROM_SERVERS: u32 = 62;
const OTHER_PORTS: u32 = 63;
const FRAGMENTS: u32 = 64;
const PASSED: u32 = 65;

/// The ports that a rule can name (`fib_rule_port_range_valid`).
pub(crate) const RULE_PORTS: (u16, u16) = (1, u16::MAX - 1);

/// Maximum number of addresses of a family that each have a route. Above it, adjacent addresses
/// share routes.
const SINGLE_ROUTES: usize = 1024;

/// An error when rules or routes are set.
#[derive(Debug, thiserror::Error)]
pub enum SteeringError {
    /// The process has no permission to change rules and routes.
    #[error(
        "no permission to change this host's rules and routes: run as root, or give the program CAP_NET_ADMIN"
    )]
    Permission,
    /// The kernel has no policy routing.
    #[error(
        "the kernel has no policy routing ({source}), which routes the replies of real servers to the director: use a kernel with CONFIG_IP_MULTIPLE_TABLES, for IPv6 CONFIG_IPV6_MULTIPLE_TABLES"
    )]
    Unsupported {
        /// The error of the kernel.
        source: io::Error,
    },
    /// The host forwards no packets.
    #[error(
        "this host forwards no packets, and the TUN backend receives only forwarded packets: `sysctl -w net.ipv4.ip_forward=1`, for IPv6 `sysctl -w net.ipv6.conf.all.forwarding=1`"
    )]
    NotForwarding,
    /// Another error of a system call.
    #[error("cannot {what}: {source}")]
    Os {
        /// The action that failed, as a verb with its object.
        what: String,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl SteeringError {
    fn new(what: &str, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::Permission,
            Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT) => Self::Unsupported { source },
            _ => Self::Os {
                what: what.to_owned(),
                source,
            },
        }
    }
}

/// The rules, routes and proxy neighbours. Dropping this value removes them.
#[derive(Debug)]
pub struct Steering {
    requests: Requests,
    device: String,
    ifindex: u32,
    /// Interfaces by index, on which the host answers ARP and neighbour discovery for own VIPs.
    interfaces: BTreeMap<u32, String>,
    /// The entries in the kernel: as last read, and with the changes since then.
    present: BTreeSet<Entry>,
    /// Proxy neighbours that the dataplane has not added.
    foreign: BTreeSet<Proxy>,
    /// Sysctls that the dataplane has set from 0 to 1.
    switched_on: BTreeSet<PathBuf>,
    /// Whether `present` may be wrong: another program may have deleted entries, or the kernel has
    /// deleted them together with an interface.
    stale: bool,
    /// The last logged warning about the host's forwarding settings, which is not repeated.
    complaint: String,
}

impl Steering {
    /// Removes the entries that a killed dataplane has left, and adds none yet. If this dataplane
    /// `goes_on` with the same device, these entries stay in force until the first
    /// [`Self::update`].
    ///
    /// # Errors
    /// The kernel's tables cannot be read or changed.
    pub fn open(device: &str, ifindex: u32, goes_on: bool) -> Result<Self, SteeringError> {
        let requests = Requests::open()
            .map_err(|source| SteeringError::new("open a socket for rules and routes", source))?;
        let mut this = Self {
            requests,
            device: device.to_owned(),
            ifindex,
            interfaces: BTreeMap::new(),
            present: BTreeSet::new(),
            foreign: BTreeSet::new(),
            switched_on: BTreeSet::new(),
            stale: false,
            complaint: String::new(),
        };
        this.read()?;
        if !this.present.is_empty() && !goes_on {
            info!(
                "{} rules, routes and proxy neighbours of a killed dataplane are removed",
                this.present.len()
            );
            this.apply(&BTreeSet::new())?;
        }
        Ok(this)
    }

    /// Removes the entries of a killed dataplane with this backend, for a dataplane with another
    /// backend.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn clear_leftovers() -> Result<(), SteeringError> {
        Self::open("", 0, false).map(drop)
    }

    /// Sets the interfaces, by index, on which the host answers for own VIPs. The next
    /// [`Self::update`] applies them and restores entries that were deleted with an interface.
    ///
    /// # Errors
    /// The kernel's tables cannot be read.
    pub fn set_interfaces(
        &mut self,
        interfaces: BTreeMap<u32, String>,
    ) -> Result<(), SteeringError> {
        self.interfaces = interfaces;
        self.read()
    }

    /// Refuses a host that forwards IPv4 packets on none of the interfaces in use, and no IPv6
    /// packets. Without interfaces in use, there is no error.
    ///
    /// # Errors
    /// [`SteeringError::NotForwarding`].
    pub fn check_forwarding(&self) -> Result<(), SteeringError> {
        let forwarding = self.interfaces.is_empty()
            || self.interfaces.values().any(|name| forwards(name, false))
            || forwards("all", true);
        if forwarding {
            Ok(())
        } else {
            Err(SteeringError::NotForwarding)
        }
    }

    /// Steers the packets that `spec` describes, and no others.
    ///
    /// # Errors
    /// The kernel refuses an entry; the entries that it accepted stay in force.
    pub fn update(&mut self, spec: &Intercept) -> Result<(), SteeringError> {
        if self.stale {
            self.read()?;
        }
        let wanted = self.wanted(spec);
        self.answer_discovery(&wanted);
        self.complain(&wanted);
        self.apply(&wanted)
    }

    /// Also steers the packets that `more` describes.
    ///
    /// # Errors
    /// As [`Self::update`].
    pub fn extend(&mut self, more: &Intercept) -> Result<(), SteeringError> {
        let wanted = self.wanted(more);
        let added = self.add(&wanted);
        failed(added)
    }

    /// Records that an entry may have been deleted: the next [`Self::update`] reads the entries
    /// again.
    pub const fn distrust(&mut self) {
        self.stale = true;
    }

    /// Reads the entries from the kernel.
    fn read(&mut self) -> Result<(), SteeringError> {
        let (ours, others) = self
            .requests
            .entries(&[VIPS, DEVICE])
            .map_err(|source| SteeringError::new("read this host's rules and routes", source))?;
        self.stale = false;
        self.present = ours.into_iter().collect();
        self.foreign = others.into_iter().collect();
        Ok(())
    }

    /// Replaces the entries by `wanted`. Adds entries before it deletes others, so that every
    /// packet has a route in between.
    fn apply(&mut self, wanted: &BTreeSet<Entry>) -> Result<(), SteeringError> {
        let added = self.add(wanted);
        failed(added.or(self.delete_others(wanted)))
    }

    /// Adds the missing entries of `wanted`. Returns the first failure.
    fn add(&mut self, wanted: &BTreeSet<Entry>) -> Option<SteeringError> {
        let mut failure = None;
        let missing: Vec<Entry> = wanted.difference(&self.present).cloned().collect();
        for entry in missing {
            match self.requests.add(&entry) {
                Ok(()) => {
                    self.present.insert(entry);
                }
                Err(source) => {
                    failure.get_or_insert(SteeringError::new(&format!("add {entry}"), source));
                }
            }
        }
        failure
    }

    /// Deletes the entries that are not in `wanted`. Returns the first failure.
    fn delete_others(&mut self, wanted: &BTreeSet<Entry>) -> Option<SteeringError> {
        let mut failure = None;
        let surplus: Vec<Entry> = self.present.difference(wanted).cloned().collect();
        for entry in surplus.into_iter().rev() {
            match self.requests.delete(&entry) {
                Ok(()) => {
                    self.present.remove(&entry);
                }
                Err(source) => {
                    failure.get_or_insert(SteeringError::new(&format!("delete {entry}"), source));
                }
            }
        }
        failure
    }

    fn wanted(&self, spec: &Intercept) -> BTreeSet<Entry> {
        let mut vips: BTreeSet<IpAddr> = spec.vips().into_iter().collect();
        vips.extend(&spec.own_vips);
        let mut wanted = BTreeSet::new();
        for ipv6 in [false, true] {
            let of_family = |addr: &&IpAddr| addr.is_ipv6() == ipv6;
            let addresses: BTreeSet<IpAddr> = vips.iter().filter(of_family).copied().collect();
            let servers = spec.nat_servers.iter();
            let servers: Vec<_> = servers
                .filter(|server| server.address.is_ipv6() == ipv6)
                .collect();
            if addresses.is_empty() && servers.is_empty() {
                continue;
            }
            let rule = |priority, action| PolicyRule {
                ipv6,
                priority,
                interface: None,
                from: None,
                protocol: None,
                ports: None,
                action,
            };
            wanted.extend([
                Entry::Rule(PolicyRule {
                    interface: Some(self.device.clone()),
                    ..rule(FROM_DIRECTOR, Action::Goto(PASSED))
                }),
                Entry::Rule(rule(TO_VIPS, Action::Lookup(VIPS))),
                Entry::Rule(rule(PASSED, Action::Nothing)),
            ]);
            for (to, prefix_len) in prefixes(&addresses) {
                wanted.insert(self.route(VIPS, to, prefix_len));
            }
            if servers.is_empty() {
                continue;
            }
            wanted.insert(self.route(DEVICE, unspecified(ipv6), 0));
            let whole: HashSet<_> = servers
                .iter()
                .filter(|server| server.port == 0)
                .map(|server| (server.address, server.protocol))
                .collect();
            for server in servers {
                let from = |priority, ports, action| {
                    Entry::Rule(PolicyRule {
                        from: Some(server.address),
                        protocol: Some(server.protocol.0),
                        ports,
                        ..rule(priority, action)
                    })
                };
                if whole.contains(&(server.address, server.protocol)) {
                    wanted.insert(from(FROM_SERVERS, None, Action::Lookup(DEVICE)));
                    continue;
                }
                if (RULE_PORTS.0..=RULE_PORTS.1).contains(&server.port) {
                    let ports = Some((server.port, server.port));
                    wanted.insert(from(FROM_SERVERS, ports, Action::Lookup(DEVICE)));
                }
                let others = Some(RULE_PORTS);
                wanted.insert(from(OTHER_PORTS, others, Action::Goto(PASSED)));
                wanted.insert(from(FRAGMENTS, None, Action::Lookup(DEVICE)));
            }
        }
        let proxies = spec
            .own_vips
            .difference(&spec.quiet_vips)
            .flat_map(|&addr| {
                let interfaces = self.interfaces.keys();
                interfaces.map(move |&ifindex| Proxy { ifindex, addr })
            })
            // Entries of the operator are kept.
            .filter(|proxy| !self.foreign.contains(proxy));
        wanted.extend(proxies.map(Entry::Proxy));
        wanted
    }

    fn route(&self, table: u32, to: IpAddr, prefix_len: u8) -> Entry {
        Entry::Route(PolicyRoute {
            table,
            to,
            prefix_len,
            ifindex: self.ifindex,
        })
    }

    /// Enables proxy neighbour discovery (IPv6), which is off by default.
    fn answer_discovery(&mut self, wanted: &BTreeSet<Entry>) {
        for entry in wanted {
            let Entry::Proxy(Proxy {
                ifindex,
                addr: IpAddr::V6(_),
            }) = entry
            else {
                continue;
            };
            let Some(name) = self.interfaces.get(ifindex) else {
                continue;
            };
            let path = Path::new("/proc/sys/net/ipv6/conf")
                .join(name)
                .join("proxy_ndp");
            if read_setting(&path).is_ok_and(|on| on != 0) {
                continue;
            }
            match write_setting(&path, 1) {
                Ok(()) => {
                    self.switched_on.insert(path);
                }
                Err(error) => warn!(
                    "other hosts cannot resolve IPv6 addresses of services on {name}: {error}"
                ),
            }
        }
    }

    /// Logs the interfaces and address families for which the host does not forward packets, unless
    /// the last warning was the same.
    fn complain(&mut self, wanted: &BTreeSet<Entry>) {
        let uses = |ipv6: bool| {
            let mut entries = wanted.iter();
            entries.any(|entry| matches!(entry, Entry::Route(route) if route.to.is_ipv6() == ipv6))
        };
        let mut complaint = String::new();
        if uses(false) {
            let deaf: Vec<&str> = self
                .interfaces
                .values()
                .map(String::as_str)
                .filter(|name| !forwards(name, false))
                .collect();
            if !deaf.is_empty() {
                let _ = write!(
                    complaint,
                    "IPv4 packets that arrive on {} are not forwarded to the director: `sysctl -w net.ipv4.ip_forward=1`",
                    deaf.join(", ")
                );
            }
        }
        if uses(true) && !forwards("all", true) {
            let separator = if complaint.is_empty() { "" } else { "; " };
            let _ = write!(
                complaint,
                "{separator}IPv6 packets are not forwarded to the director: `sysctl -w net.ipv6.conf.all.forwarding=1`"
            );
        }
        if complaint != self.complaint {
            if !complaint.is_empty() {
                warn!("{complaint}");
            }
            self.complaint = complaint;
        }
    }
}

impl Drop for Steering {
    fn drop(&mut self) {
        if let Err(error) = self.apply(&BTreeSet::new()) {
            warn!("{error}");
        }
        for path in &self.switched_on {
            // The interface may have been removed together with its settings.
            if path.exists()
                && let Err(error) = write_setting(path, 0)
            {
                warn!("{error}");
            }
        }
    }
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Route(route) => write!(
                f,
                "the route to {}/{} in table {}",
                route.to, route.prefix_len, route.table
            ),
            Self::Rule(rule) => {
                write!(f, "the policy rule {} (proto {PROTOCOL})", rule.priority)?;
                rule.from.map_or(Ok(()), |from| write!(f, " from {from}"))
            }
            Self::Proxy(proxy) => write!(
                f,
                "the proxy neighbour {} on interface {}",
                proxy.addr, proxy.ifindex
            ),
        }
    }
}

fn failed(failure: Option<SteeringError>) -> Result<(), SteeringError> {
    failure.map_or(Ok(()), Err)
}

/// Whether the host forwards packets that arrive on an interface.
fn forwards(interface: &str, ipv6: bool) -> bool {
    let family = if ipv6 { "ipv6" } else { "ipv4" };
    let path = format!("/proc/sys/net/{family}/conf/{interface}/forwarding");
    read_setting(Path::new(&path)).is_ok_and(|on| on != 0)
}

fn unspecified(ipv6: bool) -> IpAddr {
    if ipv6 {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    }
}

/// Returns prefixes that cover exactly `addresses`, all of one family: one for each address, or,
/// above [`SINGLE_ROUTES`], as few as possible.
fn prefixes(addresses: &BTreeSet<IpAddr>) -> Vec<(IpAddr, u8)> {
    let each = addresses.iter().map(|&addr| (addr, host_bits(addr)));
    if addresses.len() <= SINGLE_ROUTES {
        return each.collect();
    }
    // In ascending order, the last prefix grows while it can be joined with its sibling.
    let mut all: Vec<(IpAddr, u8)> = Vec::new();
    for mut last in each {
        while let Some(&before) = all.last()
            && before.1 == last.1
            && last.1 > 0
            && is_sibling(before.0, last.0, last.1)
        {
            all.pop();
            last = (before.0, last.1 - 1);
        }
        all.push(last);
    }
    all
}

/// Whether `low/len` and `high/len` are the halves of a prefix.
fn is_sibling(low: IpAddr, high: IpAddr, len: u8) -> bool {
    let (low, high, bits) = match (low, high) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
        _ => return false,
    };
    let bit = 1_u128 << (bits - len);
    low & bit == 0 && low | bit == high
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_adjacent_addresses_share_routes_and_few_have_one_route_each() {
        let all: BTreeSet<IpAddr> = (0..2048_u32)
            .map(|n| IpAddr::V4(Ipv4Addr::from_bits(0xc000_0200 + n)))
            .collect();
        let of = |all: &BTreeSet<IpAddr>| {
            let mut text: Vec<String> = prefixes(all)
                .iter()
                .map(|(addr, len)| format!("{addr}/{len}"))
                .collect();
            text.sort();
            text
        };
        // 192.0.2.0 to 192.0.9.255.
        assert_eq!(of(&all), ["192.0.2.0/23", "192.0.4.0/22", "192.0.8.0/23"]);
        let mut gap = all.clone();
        gap.remove(&IpAddr::from([192, 0, 2, 2]));
        assert!(of(&gap).contains(&"192.0.2.3/32".to_owned()));
        assert!(!of(&gap).contains(&"192.0.2.2/32".to_owned()));
        assert_eq!(of(&gap).len(), 2 + 1 + 1 + 7);
        let few: BTreeSet<IpAddr> = all.iter().take(2).copied().collect();
        assert_eq!(of(&few), ["192.0.2.0/32", "192.0.2.1/32"]);
        let v6: BTreeSet<IpAddr> = (0..2048_u128)
            .map(|n| IpAddr::V6(Ipv6Addr::from_bits(n)))
            .collect();
        assert_eq!(of(&v6), ["::/117"]);
    }
}

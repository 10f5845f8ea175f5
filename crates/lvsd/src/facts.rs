//! Interfaces, groups and addresses of this host.

#[cfg(test)]
use std::collections::BTreeSet;
use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use lvs_core::Prefix;
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketType, socket};

/// Interfaces, groups and addresses of this host, against which a file is checked.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Groups with their ids; `None` if they cannot be read.
    groups: Option<BTreeMap<String, u32>>,
    pub(crate) addresses: Addresses,
    /// Names of interfaces; if `None`, the kernel is queried.
    #[cfg(test)]
    interfaces: Option<BTreeSet<String>>,
}

impl Facts {
    /// Reads the groups and addresses of the host.
    pub fn read() -> Self {
        let file = std::fs::read_to_string("/etc/group").ok();
        Self {
            groups: file.map(|text| groups(&text)),
            addresses: Addresses::read(),
            #[cfg(test)]
            interfaces: None,
        }
    }

    #[cfg(test)]
    pub(crate) fn with(groups_file: &str, interfaces: &[&str]) -> Self {
        Self {
            groups: Some(groups(groups_file)),
            addresses: Addresses::default(),
            interfaces: Some(interfaces.iter().map(ToString::to_string).collect()),
        }
    }

    #[cfg(test)]
    pub(crate) fn with_address(ip: IpAddr) -> Self {
        Self {
            addresses: Addresses::with(ip),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn with_broadcast(ip: IpAddr) -> Self {
        Self {
            addresses: Addresses::with_broadcast(ip),
            ..Self::default()
        }
    }

    /// Whether a group exists. A number is always valid, as for chown(1), and so is every name if
    /// the groups cannot be read.
    pub(crate) fn has_group(&self, name: &str) -> bool {
        self.groups.is_none() || self.gid(name).is_some()
    }

    /// Returns the id of a group, given by name or by number. `None` for a name that is unknown, or
    /// if the groups cannot be read; a number is always returned.
    pub fn gid(&self, name: &str) -> Option<u32> {
        let number = name.parse::<u32>().ok();
        number.or_else(|| self.groups.as_ref()?.get(name).copied())
    }

    /// Names of groups, for a suggestion.
    pub(crate) fn group_names(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flatten().map(|(name, _)| name.as_str())
    }

    pub(crate) fn has_interface(&self, name: &str) -> bool {
        #[cfg(test)]
        if let Some(all) = &self.interfaces {
            return all.contains(name);
        }
        // If the kernel cannot be queried, no interface is reported as missing.
        socket(AddressFamily::UNIX, SocketType::DGRAM, None)
            .is_ok_and(|socket| name_to_index(&socket, name) != Err(rustix::io::Errno::NODEV))
    }
}

/// Parses `/etc/group`.
fn groups(text: &str) -> BTreeMap<String, u32> {
    let group = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        Some((name.to_owned(), fields.nth(1)?.parse().ok()?))
    };
    text.lines().filter_map(group).collect()
}

/// The host's addresses, and its local IPv4 networks (`ip route add local`).
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    own: HashSet<Prefix>,
    /// The broadcast addresses of the host's networks.
    broadcast: HashSet<IpAddr>,
}

impl Addresses {
    /// The present addresses of this network namespace.
    pub fn read() -> Self {
        let text = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self::parse(&text("/proc/net/fib_trie"), &text("/proc/net/if_inet6"))
    }

    /// Addresses of a host with only `ip`.
    #[cfg(test)]
    pub(crate) fn with(ip: IpAddr) -> Self {
        let len = if ip.is_ipv4() { 32 } else { 128 };
        Self {
            own: Prefix::new(ip, len).into_iter().collect(),
            ..Self::default()
        }
    }

    /// Addresses of a host with only this broadcast address.
    #[cfg(test)]
    pub(crate) fn with_broadcast(ip: IpAddr) -> Self {
        Self {
            broadcast: HashSet::from([ip]),
            ..Self::default()
        }
    }

    fn parse(fib_trie: &str, if_inet6: &str) -> Self {
        let mut all = parse_fib_trie(fib_trie);
        all.own.extend(parse_if_inet6(if_inet6));
        all
    }

    /// Whether `ip` is an address of the host, or belongs to one of its local IPv4 networks.
    pub fn has(&self, ip: IpAddr) -> bool {
        self.own.iter().any(|prefix| prefix.contains(ip))
    }

    /// Whether `ip` is the broadcast address of one of the host's networks.
    pub fn is_broadcast(&self, ip: IpAddr) -> bool {
        self.broadcast.contains(&ip)
    }
}

/// Parses the addresses of every `LOCAL` and every `BROADCAST` route:
///
/// ```text
///        |-- 192.0.2.10
///           /32 host LOCAL
/// ```
fn parse_fib_trie(text: &str) -> Addresses {
    let mut all = Addresses::default();
    let mut last = None;
    for line in text.lines() {
        let line = line.trim_start();
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.trim().parse::<Ipv4Addr>().ok();
        } else if line.starts_with("/32 ") && line.ends_with(" BROADCAST") {
            all.broadcast.extend(last.map(IpAddr::from));
        } else if line.ends_with(" LOCAL")
            && let Some(len) = line
                .strip_prefix('/')
                .and_then(|line| line.split(' ').next()?.parse().ok())
            && let Some(prefix) = last.and_then(|address| Prefix::new(address.into(), len))
        {
            all.own.insert(prefix);
        }
    }
    all
}

/// Parses lines such as `fe800000000000000000000000000001 02 40 20 80 eth0`.
fn parse_if_inet6(text: &str) -> impl Iterator<Item = Prefix> + '_ {
    text.lines().filter_map(|line| {
        let address = u128::from_str_radix(line.split(' ').next()?, 16).ok()?;
        Prefix::new(Ipv6Addr::from(address).into(), 128)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_contain_only_existing_interfaces_addresses_group_names_and_any_group_number() {
        let facts = Facts::read();
        assert!(facts.has_interface("lo"));
        assert!(!facts.has_interface("no-such"));
        assert!(facts.has_group("root") && facts.has_group("12345"));
        assert!(!facts.has_group("no-such-group"));
        assert!(facts.addresses.has([127, 0, 0, 1].into()));
        assert!(!facts.addresses.has([192, 0, 2, 1].into()));
    }

    #[test]
    fn fib_trie_and_if_inet6_yield_local_and_broadcast_addresses() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     |-- 192.0.2.10\n        /32 host LOCAL\n     |-- 192.0.2.255\n        /32 link BROADCAST\n     |-- 203.0.113.0\n        /24 host LOCAL\nLocal:\n";
        let inet6 = "20010db8000000000000000000000001 02 40 00 80     eth0\ngarbage\n";
        let addresses = Addresses::parse(trie, inet6);
        for (ip, has) in [
            ("192.0.2.10", true),
            ("192.0.2.11", false),
            ("192.0.2.255", false),
            ("203.0.113.77", true),
            ("203.0.114.1", false),
            ("2001:db8::1", true),
            ("2001:db8::2", false),
        ] {
            assert_eq!(addresses.has(ip.parse().unwrap()), has, "{ip}");
        }
        for (ip, is) in [
            ("192.0.2.255", true),
            ("192.0.2.0", false),
            ("192.0.2.10", false),
        ] {
            assert_eq!(addresses.is_broadcast(ip.parse().unwrap()), is, "{ip}");
        }
    }

    #[test]
    fn loopback_addresses_belong_to_the_host() {
        assert!(Addresses::read().has(IpAddr::from([127, 0, 0, 1])));
    }
}

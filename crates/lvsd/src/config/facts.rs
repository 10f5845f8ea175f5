//! Interfaces, groups and addresses of this host, against which a file is checked.

use std::collections::BTreeMap;
#[cfg(test)]
use std::collections::BTreeSet;
use std::net::IpAddr;

use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketType, socket};

use crate::host_addresses::Addresses;

/// Interfaces, groups and addresses of this host.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Groups with their ids; `None` if they cannot be read.
    groups: Option<BTreeMap<String, u32>>,
    addresses: Addresses,
    /// Names of interfaces; if `None`, the kernel is queried.
    #[cfg(test)]
    interfaces: Option<BTreeSet<String>>,
}

impl Facts {
    /// The present facts of the host.
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
    pub(super) fn with(groups_file: &str, interfaces: &[&str]) -> Self {
        Self {
            groups: Some(groups(groups_file)),
            addresses: Addresses::default(),
            interfaces: Some(interfaces.iter().map(ToString::to_string).collect()),
        }
    }

    #[cfg(test)]
    pub(super) fn with_address(ip: IpAddr) -> Self {
        Self {
            addresses: Addresses::with(ip),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(super) fn with_broadcast(ip: IpAddr) -> Self {
        Self {
            addresses: Addresses::with_broadcast(ip),
            ..Self::default()
        }
    }

    /// Whether a group exists. A number is always valid, as for chown(1), and so is every name if
    /// the groups cannot be read.
    pub(super) fn has_group(&self, name: &str) -> bool {
        self.groups.is_none() || self.gid(name).is_some()
    }

    /// Returns the id of a group.
    pub fn gid(&self, name: &str) -> Option<u32> {
        let number = name.parse::<u32>().ok();
        number.or_else(|| self.groups.as_ref()?.get(name).copied())
    }

    pub(super) fn has_address(&self, ip: IpAddr) -> bool {
        self.addresses.has(ip)
    }

    /// Whether an address is the broadcast address of one of the host's networks.
    pub(super) fn is_broadcast(&self, ip: IpAddr) -> bool {
        self.addresses.is_broadcast(ip)
    }

    /// Names of groups, for a suggestion.
    pub(super) fn group_names(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flatten().map(|(name, _)| name.as_str())
    }

    pub(super) fn has_interface(&self, name: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_a_loopback_interface_and_a_root_group() {
        let facts = Facts::read();
        assert!(facts.has_interface("lo"));
        assert!(!facts.has_interface("no-such"));
        assert!(facts.has_group("root") && facts.has_group("12345"));
        assert!(!facts.has_group("no-such-group"));
        assert!(facts.has_address([127, 0, 0, 1].into()));
        assert!(!facts.has_address([192, 0, 2, 1].into()));
    }
}

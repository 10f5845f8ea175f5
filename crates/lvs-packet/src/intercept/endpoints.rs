//! Sets of intercepted addresses, protocols and ports.

use std::net::{IpAddr, SocketAddr};

use lvs_core::Protocol;

use crate::shared_map::SharedSet;

/// An address, a protocol and a port; port 0 is every port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// The address of the endpoint.
    pub address: IpAddr,
    /// The IP protocol of the endpoint's packets.
    pub protocol: Protocol,
    /// The port, 0 for all.
    pub port: u16,
}

impl Endpoint {
    /// The endpoint with this protocol, and with the address and port of `addr`.
    pub const fn new(protocol: Protocol, addr: SocketAddr) -> Self {
        Self {
            address: addr.ip(),
            protocol,
            port: addr.port(),
        }
    }
}

/// A set of endpoints. Clones share their memory, so cloning is cheap.
#[derive(Clone, Debug, Default)]
pub struct Endpoints {
    all: SharedSet<Endpoint>,
    addresses: SharedSet<IpAddr>,
    /// Whether there are IPv4 endpoints, and IPv6 endpoints.
    families: [bool; 2],
}

impl Endpoints {
    /// Adds an endpoint; returns whether it is new.
    pub fn insert(&mut self, endpoint: Endpoint) -> bool {
        let new = self.all.insert(endpoint);
        if new {
            self.addresses.insert(endpoint.address);
            self.families[usize::from(endpoint.address.is_ipv6())] = true;
        }
        new
    }

    /// Whether the set contains this endpoint.
    #[inline]
    pub fn contains(&self, endpoint: &Endpoint) -> bool {
        self.all.contains(endpoint)
    }

    /// Whether an endpoint has this address.
    #[inline]
    pub fn has_address(&self, addr: IpAddr) -> bool {
        self.addresses.contains(&addr)
    }

    /// Whether the set contains an endpoint of the same IP version as this address.
    pub fn has_family(&self, of: IpAddr) -> bool {
        self.families[usize::from(of.is_ipv6())]
    }

    /// Whether the set is empty.
    pub const fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// All endpoints, in arbitrary order.
    pub fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.all.iter()
    }

    /// Returns the addresses of the endpoints, each once, in arbitrary order.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.addresses.iter().copied()
    }
}

impl PartialEq for Endpoints {
    /// Compares only the endpoints, from which the other fields follow.
    fn eq(&self, other: &Self) -> bool {
        self.all == other.all
    }
}

impl Eq for Endpoints {}

impl Extend<Endpoint> for Endpoints {
    fn extend<T: IntoIterator<Item = Endpoint>>(&mut self, endpoints: T) {
        for endpoint in endpoints {
            self.insert(endpoint);
        }
    }
}

impl FromIterator<Endpoint> for Endpoints {
    fn from_iter<T: IntoIterator<Item = Endpoint>>(endpoints: T) -> Self {
        let mut all = Self::default();
        all.extend(endpoints);
        all
    }
}

impl<const N: usize> From<[Endpoint; N]> for Endpoints {
    fn from(endpoints: [Endpoint; N]) -> Self {
        endpoints.into_iter().collect()
    }
}

impl IntoIterator for Endpoints {
    type Item = Endpoint;
    type IntoIter = std::vec::IntoIter<Endpoint>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter().copied().collect::<Vec<_>>().into_iter()
    }
}

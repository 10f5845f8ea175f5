//! The nf_tables sets of hidden traffic: their names, keys and elements.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::nft::{TYPE_IP4, TYPE_IP6, TYPE_PORT, TYPE_PROTOCOL};
use lvs_packet::intercept::{Intercept, LocalClient};
use lvs_packet::wire::ipv6;

/// Names of sets and chains, before the suffix `4` or `6`.
pub(super) const OWN_VIPS: &str = "own_vips";
pub(super) const SERVICES: &str = "services";
pub(super) const SERVICE_HOSTS: &str = "service_hosts";
pub(super) const VIPS: &str = "vips";
pub(super) const SERVERS: &str = "servers";
pub(super) const SERVER_HOSTS: &str = "server_hosts";
pub(super) const SERVER_ADDRESSES: &str = "server_addresses";
pub(super) const LOCAL_ADDRESSES: &str = "local_addresses";
pub(super) const LOCAL_CLIENTS: &str = "local_clients";
/// The set with the protocol numbers of fragments that may be ICMP, if ICMP fragments in transit
/// are hidden.
pub(super) const ICMP_FRAGMENTS: &str = "icmp_fragments";
/// The set with the protocol number of ICMP, if all ICMP in transit is hidden.
pub(super) const ICMP_IN_TRANSIT: &str = "icmp_in_transit";
pub(super) const HIDE: &str = "hide";
pub(super) const SHORT: &str = "short";
/// The set with the ICMP errors that IPVS relates to connections: destination unreachable, source
/// quench and time exceeded.
pub(super) const ICMP_ERRORS: &str = "icmp_errors4";

/// The differences between the rules for IPv4 and IPv6.
#[derive(Clone, Copy)]
pub(super) struct IpVersion {
    pub(super) suffix: char,
    pub(super) ether_type: [u8; 2],
    pub(super) address_type: u32,
    pub(super) address_len: u32,
    pub(super) source: u32,
    pub(super) destination: u32,
    pub(super) icmp: u8,
}

pub(super) const V4: IpVersion = IpVersion {
    suffix: '4',
    ether_type: [0x08, 0x00],
    address_type: TYPE_IP4,
    address_len: 4,
    source: 12,
    destination: 16,
    icmp: 1,
};

pub(super) const V6: IpVersion = IpVersion {
    suffix: '6',
    ether_type: [0x86, 0xdd],
    address_type: TYPE_IP6,
    address_len: 16,
    source: 8,
    destination: 24,
    icmp: 58,
};

pub(super) struct SetKey {
    pub(super) name: &'static str,
    pub(super) key_types: Vec<u32>,
    pub(super) key_len: u32,
}

impl IpVersion {
    pub(super) fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => V4,
            IpAddr::V6(_) => V6,
        }
    }

    pub(super) fn name(self, base: &str) -> String {
        format!("{base}{}", self.suffix)
    }

    pub(super) fn sets(self) -> Vec<SetKey> {
        let ip = self.address_type;
        let len = self.address_len;
        let set = |name, key_types: &[u32], key_len| SetKey {
            name,
            key_types: key_types.to_vec(),
            key_len,
        };
        vec![
            set(OWN_VIPS, &[ip], len),
            set(SERVICES, &[ip, TYPE_PROTOCOL, TYPE_PORT], len + 8),
            set(SERVICE_HOSTS, &[ip, TYPE_PROTOCOL], len + 4),
            set(VIPS, &[ip], len),
            set(SERVERS, &[ip, TYPE_PROTOCOL, TYPE_PORT], len + 8),
            set(SERVER_HOSTS, &[ip, TYPE_PROTOCOL], len + 4),
            set(SERVER_ADDRESSES, &[ip], len),
            set(LOCAL_ADDRESSES, &[ip], len),
            set(ICMP_FRAGMENTS, &[TYPE_PROTOCOL], 1),
            set(ICMP_IN_TRANSIT, &[TYPE_PROTOCOL], 1),
            set(
                LOCAL_CLIENTS,
                &[ip, TYPE_PROTOCOL, TYPE_PORT, ip, TYPE_PORT],
                2 * len + 12,
            ),
        ]
    }
}

/// The elements of each set, by its name.
pub(super) fn elements(spec: &Intercept) -> BTreeMap<String, BTreeSet<Vec<u8>>> {
    let mut sets: BTreeMap<String, BTreeSet<Vec<u8>>> = BTreeMap::new();
    let mut put = |ip: IpAddr, set: &str, key: Vec<u8>| {
        sets.entry(IpVersion::of(ip).name(set))
            .or_default()
            .insert(key);
    };
    for ip in &spec.own_vips {
        put(*ip, OWN_VIPS, address_key(*ip));
    }
    for ip in &spec.local_addresses {
        put(*ip, LOCAL_ADDRESSES, address_key(*ip));
    }
    let any = [
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    ];
    for ip in any {
        if spec.takes_icmp_fragments(ip) {
            put(ip, ICMP_FRAGMENTS, vec![IpVersion::of(ip).icmp]);
            // The transport header may follow extension headers.
            for extension in ipv6::EXTENSIONS.into_iter().filter(|_| ip.is_ipv6()) {
                put(ip, ICMP_FRAGMENTS, vec![extension]);
            }
        }
        if spec.every_icmp {
            put(ip, ICMP_IN_TRANSIT, vec![IpVersion::of(ip).icmp]);
        }
    }
    for (endpoints, one_port, all_ports, addresses) in [
        (&spec.services, SERVICES, SERVICE_HOSTS, VIPS),
        (&spec.nat_servers, SERVERS, SERVER_HOSTS, SERVER_ADDRESSES),
    ] {
        for endpoint in endpoints.iter() {
            let ip = endpoint.address;
            put(ip, addresses, address_key(ip));
            let mut key = address_key(ip);
            key.extend([endpoint.protocol.0, 0, 0, 0]);
            if endpoint.port == 0 {
                put(ip, all_ports, key);
            } else {
                key.extend(port_key(endpoint.port));
                put(ip, one_port, key);
            }
        }
    }
    sets
}

/// Returns the name of the set for a local client, and the client's key in it.
pub(super) fn local_client(client: &LocalClient) -> (String, Vec<u8>) {
    let mut key = address_key(client.server.ip());
    key.extend([client.protocol.0, 0, 0, 0]);
    key.extend(port_key(client.server.port()));
    key.extend(address_key(client.local.ip()));
    key.extend(port_key(client.local.port()));
    (IpVersion::of(client.server.ip()).name(LOCAL_CLIENTS), key)
}

fn address_key(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// A port as a field of a key: it fills a whole 32-bit register of nf_tables.
fn port_key(port: u16) -> [u8; 4] {
    let [high, low] = port.to_be_bytes();
    [high, low, 0, 0]
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use lvs_core::Protocol;

    use super::*;
    use lvs_packet::intercept::Endpoint;

    fn endpoint(address: &str, protocol: u8, port: u16) -> Endpoint {
        Endpoint {
            address: address.parse().unwrap(),
            protocol: Protocol(protocol),
            port,
        }
    }

    #[test]
    fn shield_sets_contain_services_by_port_or_host_and_vips() {
        let spec = Intercept {
            services: [
                endpoint("192.0.2.1", 6, 80),
                endpoint("192.0.2.1", 17, 0),
                endpoint("2001:db8::1", 6, 443),
            ]
            .into(),
            ..Intercept::default()
        };
        let sets = elements(&spec);
        let keys = |set: &str| sets[set].iter().cloned().collect::<Vec<_>>();
        assert_eq!(keys("services4"), [[192, 0, 2, 1, 6, 0, 0, 0, 0, 80, 0, 0]]);
        assert_eq!(keys("service_hosts4"), [[192, 0, 2, 1, 17, 0, 0, 0]]);
        assert_eq!(keys("vips4"), [[192, 0, 2, 1]]);
        assert_eq!(keys("services6")[0].len(), 24);
        assert_eq!(sets.len(), 5);
    }

    #[test]
    fn nftables_keys_have_the_length_of_their_sets() {
        for (family, ip) in [(V4, "192.0.2.1"), (V6, "2001:db8::1")] {
            let spec = Intercept {
                services: [endpoint(ip, 6, 80), endpoint(ip, 6, 0)].into(),
                nat_servers: [endpoint(ip, 6, 80), endpoint(ip, 6, 0)].into(),
                own_vips: [ip.parse().unwrap()].into(),
                local_addresses: [ip.parse().unwrap()].into(),
                every_icmp: true,
                ..Intercept::default()
            };
            let mut sets = elements(&spec);
            // `every_icmp` adds ICMP of both IP versions, whatever the services are.
            sets.retain(|name, _| name.ends_with(family.suffix));
            let client = LocalClient {
                protocol: Protocol::TCP,
                server: SocketAddr::new(ip.parse().unwrap(), 80),
                local: SocketAddr::new(ip.parse().unwrap(), 40_000),
            };
            let (set, key) = local_client(&client);
            sets.entry(set).or_default().insert(key);
            let declared = family.sets();
            assert_eq!(sets.len(), declared.len(), "{ip}");
            for set in declared {
                for key in &sets[&family.name(set.name)] {
                    assert_eq!(
                        key.len(),
                        usize::try_from(set.key_len).unwrap(),
                        "{}",
                        family.name(set.name)
                    );
                }
            }
        }
    }
}

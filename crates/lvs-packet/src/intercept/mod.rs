//! The interception: the packets that the dataplane processes in place of the host's network stack.
//!
//! A packet socket receives a *copy*: the host handles the original unless the shield drops it. If
//! the dataplane passes a packet to the host, it must therefore know whether the host has received
//! the packet already. [`Intercept`] is the specification for both: the shield's rules are built
//! from it, and the pipeline uses it to decide whether a packet must be reinjected. With the TUN
//! backend, the host's routing passes packets to the dataplane by the same specification
//! (`host/steering.rs` of the dataplane).

mod endpoints;

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use lvs_core::mark::MarkRule;
use lvs_core::{Control, Protocol, Server, Service, ServiceFlags, ServiceKey, Tuple};

use crate::parse::Packet;
use crate::shared_map::SharedSet;
use crate::wire::ipv6;

pub use self::endpoints::{Endpoint, Endpoints};

const FTP: u16 = 21;

/// The protocols and source ports of a server's replies; port 0 is any. `helped` are the ports of
/// the FTP helper.
fn reply_ports<'a>(
    key: &'a ServiceKey,
    server: SocketAddr,
    helped: &[u16],
) -> (&'a [Protocol], u16) {
    match key {
        // If the service accepts all ports, a server replies from the port that the client used;
        // FTP data connections have other ports, too.
        ServiceKey::Address { protocol, addr }
            if matches!(addr.port(), 0 | FTP) || helped.contains(&addr.port()) =>
        {
            (std::slice::from_ref(protocol), 0)
        }
        ServiceKey::Address { protocol, .. } => (std::slice::from_ref(protocol), server.port()),
        ServiceKey::Mark { .. } => (&MARKED_PROTOCOLS[..], 0),
    }
}

/// The endpoints from which a server replies, one for each protocol; port 0 if any port is
/// possible.
fn answers(
    key: ServiceKey,
    server: SocketAddr,
    helped: &[u16],
) -> impl Iterator<Item = Endpoint> + use<> {
    let (protocols, port) = reply_ports(&key, server, helped);
    let endpoints: Vec<Endpoint> = protocols
        .iter()
        .map(|&protocol| Endpoint::new(protocol, SocketAddr::new(server.ip(), port)))
        .collect();
    endpoints.into_iter()
}

/// The endpoint of a service; `None` for a service with a mark.
fn service_endpoint(key: ServiceKey) -> Option<Endpoint> {
    match key {
        ServiceKey::Address { protocol, addr } => Some(Endpoint::new(protocol, addr)),
        ServiceKey::Mark { .. } => None,
    }
}

/// Returns all ports of the address of an FTP service, because data connections have other ports
/// than the service; `None` for other services. If an FTP service is persistent, it receives
/// packets to all ports without a separate service. The FTP helper for the ports `helped` expects
/// data connections to any port.
fn any_port(key: ServiceKey, helped: &[u16]) -> Option<Endpoint> {
    match key {
        ServiceKey::Address {
            protocol: Protocol::TCP,
            addr,
        } if addr.port() == FTP || helped.contains(&addr.port()) => {
            Some(Endpoint::new(Protocol::TCP, SocketAddr::new(addr.ip(), 0)))
        }
        _ => None,
    }
}

/// A connection from this host to a service, identified by the source and the destination of the
/// real server's replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocalClient {
    /// The IP protocol of the connection.
    pub protocol: Protocol,
    /// The real server, the source of the replies.
    pub server: SocketAddr,
    /// The client's address and port on this host.
    pub local: SocketAddr,
}

/// IPsec, which follows ISAKMP connections and has no ports of its own.
const IPSEC: [Protocol; 2] = [Protocol::AH, Protocol::ESP];
const ISAKMP: u16 = 500;

/// The endpoint, and for UDP with the port of ISAKMP or any port also the endpoints of IPsec with
/// the same address.
fn with_followers(endpoint: Endpoint) -> impl Iterator<Item = Endpoint> {
    let isakmp = endpoint.protocol == Protocol::UDP && matches!(endpoint.port, 0 | ISAKMP);
    let followers = IPSEC.map(|protocol| Endpoint {
        protocol,
        port: 0,
        ..endpoint
    });
    let followers = followers.into_iter().filter(move |_| isakmp);
    std::iter::once(endpoint).chain(followers)
}

/// Maximum number of endpoints for the rules that set firewall marks. Rules beyond this number
/// intercept all ports of their destinations.
const MARKED_MAX: usize = 1 << 16;

/// Protocols that are intercepted for a firewall-mark service or a mark rule without a protocol.
const MARKED_PROTOCOLS: [Protocol; 3] = [Protocol::TCP, Protocol::UDP, Protocol::SCTP];

/// Whether a fragment may be part of an ICMP message. An IPv6 fragment names only the next header,
/// which may be an extension header.
fn may_be_icmp(packet: &Packet) -> bool {
    packet.is_icmp() || packet.is_ipv6() && ipv6::EXTENSIONS.contains(&packet.protocol.0)
}

/// The packets that the dataplane receives, and that are hidden from the host's own network stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Intercept {
    /// Endpoints of the services. The interception also includes fragments and ICMP errors to their
    /// addresses, ICMP errors about packets to them, and packets to them whose TCP, UDP or SCTP
    /// header is truncated or follows AH. It also includes packets that servers with direct routing
    /// or tunnels send from these endpoints to other hosts: if the host has the VIP, its network
    /// stack would drop them as forged.
    pub services: Endpoints,
    /// Virtual addresses that the dataplane owns: all packets to them are intercepted.
    pub own_vips: HashSet<IpAddr>,
    /// The addresses among `own_vips` for which the dataplane does not answer ARP and NDP: routers
    /// have a route to them.
    pub quiet_vips: HashSet<IpAddr>,
    /// Real servers whose replies the dataplane translates: packets from these addresses and ports
    /// are intercepted, except those to the host itself. Their fragments are intercepted, too, and
    /// ICMP errors of any sender about packets to the servers. If there is such a server, every
    /// forwarded ICMP fragment of its IP version is intercepted, because only the reassembled error
    /// shows to which packet it refers.
    pub nat_servers: Endpoints,
    /// Addresses of the host that replace the addresses of clients towards servers (full NAT).
    /// Packets from the servers in `nat_servers` to these addresses are intercepted, although they
    /// are addressed to the host.
    pub local_addresses: HashSet<IpAddr>,
    /// Servers on this host: the host routes their replies into the dataplane. Packets that these
    /// servers send are therefore not intercepted on interfaces.
    pub local_nodes: Endpoints,
    /// Connections from clients on this host to services. The servers' replies are intercepted
    /// although they are addressed to the host. Each connection is added and removed separately.
    pub local_clients: SharedSet<LocalClient>,
    /// Whether all transit ICMP is intercepted: an error about any packet may open a connection
    /// (`schedule_icmp`).
    pub every_icmp: bool,
    /// Whether the host has no copy of any packet, because it routes all of them to the dataplane.
    pub everything: bool,
}

impl Intercept {
    /// The interception that the services and servers of `control` require. The caller must add the
    /// parts that `control` does not contain, for example own addresses and clients on this host.
    /// `before` is the previous interception.
    pub fn of(control: &Control, before: &Self) -> Self {
        let mut spec = Self {
            every_icmp: control.sysctls().schedule_icmp,
            ..Self::default()
        };
        for service in control.services() {
            spec.add_service(service, control.ftp_ports());
        }
        if control.backup().is_some() {
            spec.add_every_port();
        }
        // Without services, the director forwards no packets, not even those of existing
        // connections (the kernel removes its hooks then).
        let any = control.services().next().is_some();
        for (key, server) in control.endpoints().filter(|_| any) {
            spec.add_endpoint(key, server, control.ftp_ports(), before);
        }
        spec
    }

    /// Intercepts packets to a service; `helped` are the ports of the FTP helper.
    pub fn add_service(&mut self, service: &Service, helped: &[u16]) {
        let persistent = service.config().flags.has(ServiceFlags::PERSISTENT);
        self.add_key(service.key(), helped, persistent);
    }

    /// Intercepts all ports of the services' addresses, because connections that a synchronisation
    /// master sends may use any port.
    pub fn add_every_port(&mut self) {
        for addr in self.vips() {
            for protocol in MARKED_PROTOCOLS {
                let any = Endpoint::new(protocol, SocketAddr::new(addr, 0));
                self.services.extend(with_followers(any));
            }
        }
    }

    /// Intercepts packets for a server that is in a service or still has connections: packets to the
    /// service with this key and, if the server uses NAT or full NAT, the server's replies.
    pub fn add_endpoint(
        &mut self,
        key: ServiceKey,
        server: &Server,
        helped: &[u16],
        before: &Self,
    ) {
        self.add_key(key, helped, false);
        // Existing connections of an FTP service that is no longer persistent continue on ports
        // that the service no longer accepts.
        self.services.extend(any_port(key, helped).filter(|any| {
            let kept = before.services.contains(any);
            kept && server.total() > 0
        }));
        for endpoint in answers(key, server.addr(), helped) {
            // A server whose method was NAT before still has translated connections.
            let nat = server.forwarding().translates()
                || (server.total() > 0 && before.nat_servers.contains(&endpoint));
            if nat {
                self.nat_servers.extend(with_followers(endpoint));
            }
        }
    }

    /// Intercepts the replies of a server with NAT or full NAT.
    pub fn add_server(&mut self, key: ServiceKey, server: SocketAddr, helped: &[u16]) {
        let endpoints = answers(key, server, helped);
        self.nat_servers.extend(endpoints.flat_map(with_followers));
    }

    /// Adds a server on this host, whose replies the host must route into the dataplane.
    pub fn add_local_node(&mut self, key: ServiceKey, server: SocketAddr, helped: &[u16]) {
        self.local_nodes.extend(answers(key, server, helped));
    }

    /// Intercepts packets to a service with this key. For a persistent service on the FTP port, and
    /// for a service with a port of the FTP helper (`helped`), data connections are included.
    pub fn add_key(&mut self, key: ServiceKey, helped: &[u16], persistent: bool) {
        let endpoint = service_endpoint(key);
        self.services
            .extend(endpoint.into_iter().flat_map(with_followers));
        let data = persistent || helped.contains(&key.port());
        self.services.extend(any_port(key, helped).filter(|_| data));
    }

    /// Intercepts the packets of mark rules. A rule with ports intercepts these ports. A rule
    /// without ports intercepts every port, and so does a rule that would exceed the limit of
    /// `MARKED_MAX` endpoints. A TCP rule with a port of the FTP helper (`helped`) intercepts
    /// every TCP port, because the helper expects data connections to any port. Packets to the
    /// other ports are reinjected.
    pub fn add_marked<'a>(
        &mut self,
        rules: impl IntoIterator<Item = &'a MarkRule>,
        helped: &[u16],
    ) {
        let mut room = MARKED_MAX;
        for rule in rules {
            let protocols = match &rule.protocol {
                Some(protocol) => std::slice::from_ref(protocol),
                None => &MARKED_PROTOCOLS[..],
            };
            let ranges = rule.ports.iter().map(|range| range.0..=range.1);
            let of_helper = protocols.contains(&Protocol::TCP)
                && ranges
                    .clone()
                    .any(|range| helped.iter().any(|port| range.contains(port)));
            let named: usize = ranges.clone().map(|range| range.len()).sum();
            let needed = named
                .saturating_mul(rule.addresses().count())
                .saturating_mul(protocols.len());
            let ports: Vec<u16> = match room.checked_sub(needed) {
                Some(left) if named > 0 => {
                    room = left;
                    ranges.flatten().collect()
                }
                _ => vec![0],
            };
            for address in rule.addresses() {
                if of_helper {
                    let any = SocketAddr::new(address, 0);
                    self.services.insert(Endpoint::new(Protocol::TCP, any));
                }
                for &protocol in protocols {
                    let endpoint = |&port: &u16| Endpoint {
                        address,
                        protocol,
                        port,
                    };
                    let endpoints = ports.iter().map(endpoint);
                    self.services.extend(endpoints.flat_map(with_followers));
                }
            }
        }
    }

    /// Whether packets with this destination are intercepted because of a service.
    pub fn is_to_service(&self, tuple: &Tuple) -> bool {
        let (address, protocol) = (tuple.dst.ip(), tuple.protocol);
        [tuple.dst.port(), 0].iter().any(|&port| {
            self.services.contains(&Endpoint {
                address,
                protocol,
                port,
            })
        })
    }

    /// Whether this host itself has sent the packet, from a real server on it.
    pub fn is_of_local_node(&self, packet: &Packet) -> bool {
        let from = |port| Endpoint {
            address: packet.src,
            protocol: packet.protocol,
            port,
        };
        let (sport, _) = packet.ports.unwrap_or_default();
        self.local_nodes.has_address(packet.src)
            // Instead of a rule for port 65535, the host has a rule for all ports of the address.
            && [sport, 0, u16::MAX]
                .iter()
                .any(|&port| self.local_nodes.contains(&from(port)))
    }

    /// The addresses of the services.
    pub fn vips(&self) -> HashSet<IpAddr> {
        self.services.addresses().collect()
    }

    /// Whether any service has this address.
    pub fn is_vip(&self, addr: IpAddr) -> bool {
        self.services.has_address(addr)
    }

    /// Whether all fragments of forwarded ICMP messages with the IP version of `of` are
    /// intercepted.
    pub fn takes_icmp_fragments(&self, of: IpAddr) -> bool {
        self.every_icmp || self.nat_servers.has_family(of)
    }

    fn is_nat_server(&self, addr: IpAddr) -> bool {
        self.nat_servers.has_address(addr)
    }

    /// Whether `packet`, received on an interface, is intercepted. `inner` is the destination of
    /// the packet that an ICMP error quotes; `to_host` means that `packet` is addressed to the host
    /// itself.
    pub fn covers(
        &self,
        packet: &Packet,
        inner: Option<(Protocol, SocketAddr)>,
        to_host: bool,
    ) -> bool {
        let (src, dst) = (packet.src, packet.dst);
        if self.everything || self.own_vips.contains(&dst) {
            return true;
        }
        if self.every_icmp && !to_host && packet.is_icmp() {
            return true;
        }
        if let Some((_, about)) = inner {
            let about = about.ip();
            if self.is_vip(dst) {
                return true;
            }
            return if to_host {
                self.local_addresses.contains(&dst) && self.is_nat_server(about)
            } else {
                self.is_nat_server(about) || self.is_vip(about)
            };
        }
        // Fragments have no ports, and nf_tables does not read the ports after AH.
        if packet.fragment.is_some() || packet.authenticated {
            let covered = self.is_vip(dst)
                || (!to_host && self.is_vip(src))
                || ((!to_host || self.local_addresses.contains(&dst)) && self.is_nat_server(src));
            let icmp = !to_host && may_be_icmp(packet) && self.takes_icmp_fragments(dst);
            if covered || packet.fragment.is_some() {
                return covered || icmp;
            }
        }
        let (sport, dport) = packet.ports.unwrap_or_default();
        let protocol = packet.protocol;
        if packet.is_short() && self.is_vip(dst) {
            return true;
        }
        let one_of = |set: &Endpoints, address, port| {
            [port, 0].iter().any(|&port| {
                set.contains(&Endpoint {
                    address,
                    protocol,
                    port,
                })
            })
        };
        if one_of(&self.services, dst, dport) {
            return true;
        }
        if !to_host {
            return one_of(&self.nat_servers, src, sport) || one_of(&self.services, src, sport);
        }
        if self.local_addresses.contains(&dst) && one_of(&self.nat_servers, src, sport) {
            return true;
        }
        !self.local_clients.is_empty()
            && self.local_clients.contains(&LocalClient {
                protocol,
                server: SocketAddr::new(src, sport),
                local: SocketAddr::new(dst, dport),
            })
    }
}

#[cfg(test)]
mod tests {
    use lvs_core::{
        Director, Family, Forwarding, Hook, Instant, Options, PacketMeta, ServerConfig,
        ServiceConfig, TcpFlags, Verdict,
    };

    use super::*;

    /// On the other ports, the host itself must answer, even while the shield of a killed dataplane
    /// remains.
    #[test]
    fn mark_rule_intercepts_only_its_ports_unless_it_has_none_too_many_or_an_ftp_port() {
        let rule = |words: &[&str]| MarkRule::parse(words).expect("the rule is valid");
        let to = |spec: &Intercept, protocol, port| {
            spec.is_to_service(&Tuple::new(
                protocol,
                ([203, 0, 113, 1], 40_000).into(),
                ([192, 0, 2, 10], port).into(),
            ))
        };
        let first = |ports| {
            let words = "--destination 192.0.2.10 --protocol tcp --mark 1 --ports";
            let mut words: Vec<&str> = words.split(' ').collect();
            words.push(ports);
            rule(&words)
        };
        let mut spec = Intercept::default();
        spec.add_marked(&[first("80,9000-9999")], &[21]);
        for port in [80, 9000, 9999] {
            assert!(to(&spec, Protocol::TCP, port), "{port}");
        }
        for port in [22, 8999, 10_000] {
            assert!(!to(&spec, Protocol::TCP, port), "{port}");
        }
        assert!(!to(&spec, Protocol::UDP, 9000));
        // A rule that does not fit into the limit intercepts all ports; a later rule that fits
        // intercepts only its own ports.
        let wide = rule(&[
            "--destination",
            "192.0.2.10",
            "--ports",
            "1-30000",
            "--mark",
            "2",
        ]);
        spec = Intercept::default();
        spec.add_marked(&[wide], &[]);
        assert!(to(&spec, Protocol::TCP, 40_000));
        let mut spec = Intercept::default();
        spec.add_marked(&[first("1-40000"), first("50000-60000")], &[]);
        assert!(!to(&spec, Protocol::TCP, 45_000));
        assert_eq!(spec.services.iter().count(), 50_001);
        let mut spec = Intercept::default();
        spec.add_marked(&[first("2-40000"), first("39999-65535")], &[]);
        assert!(!to(&spec, Protocol::TCP, 1));
        let mut spec = Intercept::default();
        spec.add_marked(&[first("2-40000"), first("39998-65535")], &[]);
        assert!(to(&spec, Protocol::TCP, 1));
        // FTP data connections may use any port.
        let mut spec = Intercept::default();
        spec.add_marked(&[first("20-30")], &[21]);
        assert!(to(&spec, Protocol::TCP, 40_000));
        // A rule without ports intercepts all ports.
        let any = rule(&["--destination", "192.0.2.10", "--mark", "3"]);
        let mut spec = Intercept::default();
        spec.add_marked(&[any], &[]);
        assert!(to(&spec, Protocol::SCTP, 22));
    }

    /// If an FTP service is no longer persistent, the kernel still forwards its connections, on any
    /// port.
    #[test]
    fn ports_of_ftp_service_stay_intercepted_until_persistent_connections_end() {
        let now = Instant::ZERO;
        let virt = SocketAddr::from(([10, 0, 237, 228], FTP));
        let server = SocketAddr::from(([10, 1, 42, 209], FTP));
        let key = ServiceKey::tcp(virt);
        let mut config = ServiceConfig::new(Family::V4, "rr");
        config.flags = ServiceFlags(ServiceFlags::PERSISTENT);
        let mut director = Director::new(Options::default());
        director.advance(now);
        let control = &mut director.control;
        control
            .add_service(key, config.clone(), None)
            .expect("the service is new");
        let direct = ServerConfig::new(1, Forwarding::Route);
        control
            .add_server(&key, server, &direct, now)
            .expect("the server is new");
        let persistent = Intercept::of(control, &Intercept::default());
        let any = any_port(key, &[]).expect("the service is for FTP");
        assert!(persistent.services.contains(&any));

        let verdict = director.handle_packet(
            &PacketMeta::tcp(
                Hook::Local,
                SocketAddr::from(([192, 0, 2, 7], 59667)),
                SocketAddr::new(virt.ip(), 5000),
                TcpFlags::SYN,
            ),
            now,
        );
        assert!(matches!(verdict, Verdict::Forward(_)), "{verdict:?}");
        config.flags = ServiceFlags::default();
        let control = &mut director.control;
        control
            .edit_service(&key, config, None)
            .expect("the service exists");
        let plain = Intercept::of(control, &persistent);
        assert!(
            plain.services.contains(&any),
            "ports of an existing connection are not intercepted"
        );

        director.advance(now + std::time::Duration::from_secs(100));
        let after = Intercept::of(&director.control, &plain);
        assert!(
            !after.services.contains(&any),
            "all ports of a service without connections are still intercepted"
        );
    }
}

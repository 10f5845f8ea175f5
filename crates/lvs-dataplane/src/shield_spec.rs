//! What the shield hides from the host's own stack.
//!
//! A packet socket gets a *copy*: the host handles the original, unless the shield drops it there. So whoever leaves a
//! packet to the host has to know whether the host has seen it. This is the specification that both sides use: the
//! shield's rules are built from it, and the pipeline asks it whether to give a packet back.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use lvs_core::mark::MarkRule;
use lvs_core::{Control, Forwarding, Protocol, Server, Service, ServiceFlags, ServiceKey};

use crate::parse::Packet;

/// Port of FTP's control connections.
const FTP: u16 = 21;

/// An address, a protocol and a port; port 0 is every port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// The address.
    pub address: IpAddr,
    /// The IP protocol.
    pub protocol: Protocol,
    /// The port, 0 for all.
    pub port: u16,
}

impl Endpoint {
    /// The endpoint at `addr`.
    pub const fn new(protocol: Protocol, addr: SocketAddr) -> Self {
        Self {
            address: addr.ip(),
            protocol,
            port: addr.port(),
        }
    }
}

/// The protocols and the port that a server's answers come from; port 0 is any.
fn reply_ports<'a>(key: &'a ServiceKey, server: &Server) -> (&'a [Protocol], u16) {
    match key {
        // Services of many ports may keep the port that the client asked for.
        ServiceKey::Address { protocol, addr } if matches!(addr.port(), 0 | FTP) => {
            (std::slice::from_ref(protocol), 0)
        }
        ServiceKey::Address { protocol, .. } => {
            (std::slice::from_ref(protocol), server.addr().port())
        }
        ServiceKey::Mark { .. } => (&MARKED_PROTOCOLS[..], 0),
    }
}

/// What a service takes, if it is one of an address.
fn service_endpoint(key: ServiceKey) -> Option<Endpoint> {
    match key {
        ServiceKey::Address { protocol, addr } => Some(Endpoint::new(protocol, addr)),
        ServiceKey::Mark { .. } => None,
    }
}

/// Every port of an FTP service's address: while it is persistent, it takes data connections to ports that have no
/// service of their own.
fn any_port(key: ServiceKey) -> Option<Endpoint> {
    match key {
        ServiceKey::Address {
            protocol: Protocol::TCP,
            addr,
        } if addr.port() == FTP => {
            Some(Endpoint::new(Protocol::TCP, SocketAddr::new(addr.ip(), 0)))
        }
        _ => None,
    }
}

/// A connection that the director's own host has made to a service, as its real server's answers look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocalClient {
    /// The IP protocol.
    pub protocol: Protocol,
    /// The real server: where replies come from.
    pub server: SocketAddr,
    /// The client's address and port on the director.
    pub local: SocketAddr,
}

/// Ports of a rule for marks that are hidden one by one.
const PORTS_MAX: usize = 16;

/// What a firewall mark stands for where no protocol is named.
const MARKED_PROTOCOLS: [Protocol; 3] = [Protocol::TCP, Protocol::UDP, Protocol::SCTP];

/// What the shield hides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShieldSpec {
    /// What the services take. Fragments and ICMP errors to their addresses are hidden with them, and ICMP errors about
    /// packets to them.
    pub services: HashSet<Endpoint>,
    /// Virtual addresses that the engine answers for itself: everything to them is hidden.
    pub own_vips: HashSet<IpAddr>,
    /// Real servers whose answers the director translates: what they send from these ports, except to the host itself.
    /// Their fragments are hidden with them, and ICMP errors about packets to them, whoever sends those.
    pub nat_servers: HashSet<Endpoint>,
    /// Connections of the host's own: their servers' answers are hidden although they are addressed to the host. They
    /// come and go one by one, not with the rest.
    pub local_clients: HashSet<LocalClient>,
}

impl ShieldSpec {
    /// What is to be hidden for the services and servers of `control`, without own addresses and local clients. `before`
    /// is what was hidden until now.
    pub fn of(control: &Control, before: &Self) -> Self {
        let mut hidden = Self::default();
        for service in control.services() {
            hidden.hide_service(service);
        }
        // Connections that come from a master may be for any port of a virtual address.
        if control.backup().is_some() {
            for addr in hidden.vips() {
                for protocol in [Protocol::TCP, Protocol::UDP, Protocol::SCTP] {
                    let any = SocketAddr::new(addr, 0);
                    hidden.services.insert(Endpoint::new(protocol, any));
                }
            }
        }
        // Without services nothing is balanced, old connections included (the kernel takes its hooks away).
        let any = control.services().next().is_some();
        for (key, server) in control.endpoints().filter(|_| any) {
            hidden.services.extend(service_endpoint(key));
            // The connections of an FTP service that is persistent no longer, on ports that it takes no more, go on.
            hidden.services.extend(any_port(key).filter(|any| {
                let kept = before.services.contains(any);
                kept && server.total() > 0
            }));
            let (protocols, port) = reply_ports(&key, server);
            for &protocol in protocols {
                let addr = SocketAddr::new(server.addr().ip(), port);
                let endpoint = Endpoint::new(protocol, addr);
                // A server that was taken from NAT to another method still has connections that are translated.
                let nat = server.forwarding() == Forwarding::Nat
                    || (server.total() > 0 && before.nat_servers.contains(&endpoint));
                if nat {
                    hidden.nat_servers.insert(endpoint);
                }
            }
        }
        hidden
    }

    /// What is to be hidden for one service and its servers, without what comes from others.
    pub fn of_service(service: &Service) -> Self {
        let mut hidden = Self::default();
        hidden.hide_service(service);
        for server in service.servers() {
            if server.forwarding() == Forwarding::Nat {
                let key = service.key();
                let (protocols, port) = reply_ports(&key, server);
                let addr = SocketAddr::new(server.addr().ip(), port);
                let endpoints = protocols
                    .iter()
                    .map(|&protocol| Endpoint::new(protocol, addr));
                hidden.nat_servers.extend(endpoints);
            }
        }
        hidden
    }

    fn hide_service(&mut self, service: &Service) {
        self.services.extend(service_endpoint(service.key()));
        if service.config().flags.has(ServiceFlags::PERSISTENT) {
            self.services.extend(any_port(service.key()));
        }
    }

    /// Hides what a rule for marks takes. Where it names many ports, all of them are hidden, and those that it does not
    /// name are given back.
    pub fn hide_marked(&mut self, rule: &MarkRule) {
        let named: Vec<u16> = rule
            .ports
            .iter()
            .flat_map(|range| range.0..=range.1)
            .take(PORTS_MAX + 1)
            .collect();
        let ports = if named.is_empty() || named.len() > PORTS_MAX {
            vec![0]
        } else {
            named
        };
        let protocols = match &rule.protocol {
            Some(protocol) => std::slice::from_ref(protocol),
            None => &MARKED_PROTOCOLS[..],
        };
        for address in rule.destination.addresses().into_iter().flatten() {
            for &protocol in protocols {
                let endpoint = |&port: &u16| Endpoint {
                    address,
                    protocol,
                    port,
                };
                self.services.extend(ports.iter().map(endpoint));
            }
        }
    }

    /// The addresses of the services.
    pub fn vips(&self) -> HashSet<IpAddr> {
        self.services
            .iter()
            .map(|service| service.address)
            .collect()
    }

    /// Whether some service has this address.
    pub fn is_vip(&self, addr: IpAddr) -> bool {
        self.services.iter().any(|service| service.address == addr)
    }

    fn is_nat_server(&self, addr: IpAddr) -> bool {
        self.nat_servers.iter().any(|server| server.address == addr)
    }

    /// Whether the shield hides `packet`, received on an interface. `inner` is the destination of the packet inside an
    /// ICMP error, `to_host` whether it is addressed to the host itself.
    pub fn hides(
        &self,
        packet: &Packet,
        inner: Option<(Protocol, SocketAddr)>,
        to_host: bool,
    ) -> bool {
        let (src, dst) = (packet.src, packet.dst);
        if self.own_vips.contains(&dst) {
            return true;
        }
        if let Some((_, about)) = inner {
            let about = about.ip();
            let concerns = self.is_nat_server(about) || self.is_vip(about);
            return self.is_vip(dst) || (!to_host && concerns);
        }
        if packet.fragment.is_some() {
            return self.is_vip(dst) || (!to_host && self.is_nat_server(src));
        }
        let (sport, dport) = packet.ports.unwrap_or_default();
        let protocol = packet.protocol;
        let one_of = |set: &HashSet<Endpoint>, address, port| {
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
            return one_of(&self.nat_servers, src, sport);
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
        Director, Family, Hook, Instant, Options, PacketMeta, ServerConfig, ServiceConfig,
        TcpFlags, Transport, Tuple, Verdict,
    };

    use super::*;

    /// The kernel goes on with the connections of an FTP service that has lost its persistence, on any port.
    #[test]
    fn connections_outlive_the_persistence_of_their_ftp_service() {
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
            .expect("a new service");
        let direct = ServerConfig::new(1, Forwarding::Route);
        control
            .add_server(&key, server, &direct, now)
            .expect("a new server");
        let persistent = ShieldSpec::of(control, &ShieldSpec::default());
        let any = any_port(key).expect("an FTP service");
        assert!(persistent.services.contains(&any));

        let verdict = director.handle_packet(
            &PacketMeta {
                hook: Hook::Local,
                tuple: Tuple {
                    protocol: Protocol::TCP,
                    src: SocketAddr::from(([192, 0, 2, 7], 59667)),
                    dst: SocketAddr::new(virt.ip(), 5000),
                },
                transport: Transport::Tcp(TcpFlags(TcpFlags::SYN)),
                mark: 0,
                len: 40,
            },
            now,
        );
        assert!(matches!(verdict, Verdict::Forward(_)), "{verdict:?}");
        config.flags = ServiceFlags::default();
        let control = &mut director.control;
        control
            .edit_service(&key, config, None)
            .expect("a known service");
        let plain = ShieldSpec::of(control, &persistent);
        assert!(plain.services.contains(&any), "with its connection");

        director.advance(now + std::time::Duration::from_secs(100));
        let after = ShieldSpec::of(&director.control, &plain);
        assert!(!after.services.contains(&any), "without connections");
    }
}

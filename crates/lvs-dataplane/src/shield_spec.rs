//! What the shield hides from the host's own stack.
//!
//! A packet socket gets a *copy*: the host handles the original, unless the shield drops it there. So whoever leaves a
//! packet to the host has to know whether the host has seen it. This is the specification that both sides use: the
//! shield's rules are built from it, and the pipeline asks it whether to give a packet back.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use lvs_core::{Control, Forwarding, Protocol, ServiceKey};

use crate::parse::Packet;

/// A connection of a client on the director itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocalClient {
    /// The IP protocol.
    pub protocol: Protocol,
    /// The real server: where replies come from.
    pub server: SocketAddr,
    /// The client's address and port on the director.
    pub local: SocketAddr,
}

/// What the shield hides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShieldSpec {
    /// Destinations of virtual services.
    pub services: HashSet<(IpAddr, Protocol, u16)>,
    /// Destinations of virtual services on all ports.
    pub services_all_ports: HashSet<(IpAddr, Protocol)>,
    /// Addresses of virtual services: fragments and ICMP errors to them are hidden.
    pub vips: HashSet<IpAddr>,
    /// Addresses that the engine owns: everything to them is hidden, because the engine is the host for them.
    pub own_vips: HashSet<IpAddr>,
    /// Sources of replies to translate: real servers behind NAT. Not hidden when addressed to the host itself.
    pub nat_servers: HashSet<(IpAddr, Protocol, u16)>,
    /// Addresses of [`Self::nat_servers`]: fragments from them are hidden, whatever their ports.
    pub nat_server_addrs: HashSet<IpAddr>,
    /// ICMP errors about packets to [`Self::nat_servers`] are hidden too (the shield can look into them).
    pub server_icmp: bool,
    /// Replies to clients on the director itself.
    pub local_clients: HashSet<LocalClient>,
}

impl ShieldSpec {
    /// What is to be hidden for the services and servers of `control`, without own addresses and local clients.
    pub fn of(control: &Control) -> Self {
        let mut hidden = Self::default();
        for service in control.services() {
            hidden.hide_service(service.key());
        }
        // Without services nothing is balanced, old connections included (the kernel takes its hooks away).
        let any = control.services().next().is_some();
        for (key, server) in control.endpoints().filter(|_| any) {
            hidden.hide_service(key);
            if server.forwarding() == Forwarding::Nat
                && let ServiceKey::Address { protocol, .. } = key
            {
                let addr = server.addr();
                hidden
                    .nat_servers
                    .insert((addr.ip(), protocol, addr.port()));
                hidden.nat_server_addrs.insert(addr.ip());
            }
        }
        hidden
    }

    fn hide_service(&mut self, key: ServiceKey) {
        let ServiceKey::Address { protocol, addr } = key else {
            return;
        };
        self.vips.insert(addr.ip());
        if addr.port() == 0 {
            self.services_all_ports.insert((addr.ip(), protocol));
        } else {
            self.services.insert((addr.ip(), protocol, addr.port()));
        }
    }

    /// Whether the shield hides `packet`, received on an interface. `inner` is the destination of the packet inside an
    /// ICMP error, `to_host` whether it is addressed to the host itself.
    pub fn hides(
        &self,
        packet: &Packet,
        inner: Option<(Protocol, SocketAddr)>,
        to_host: bool,
    ) -> bool {
        let (src, dst) = (IpAddr::V4(packet.src), IpAddr::V4(packet.dst));
        if self.own_vips.contains(&dst) {
            return true;
        }
        let to_vip = self.vips.contains(&dst);
        if let Some((protocol, server)) = inner {
            return to_vip
                || (self.server_icmp
                    && !to_host
                    && self
                        .nat_servers
                        .contains(&(server.ip(), protocol, server.port())));
        }
        if packet.fragment.is_some() {
            return to_vip || (!to_host && self.nat_server_addrs.contains(&src));
        }
        let (sport, dport) = packet.ports.unwrap_or_default();
        let protocol = packet.protocol;
        if to_vip
            && (self.services.contains(&(dst, protocol, dport))
                || self.services_all_ports.contains(&(dst, protocol)))
        {
            return true;
        }
        if !to_host {
            return self.nat_servers.contains(&(src, protocol, sport));
        }
        !self.local_clients.is_empty()
            && self.local_clients.contains(&LocalClient {
                protocol,
                server: SocketAddr::new(src, sport),
                local: SocketAddr::new(dst, dport),
            })
    }
}

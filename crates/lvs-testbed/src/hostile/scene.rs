//! The network around the director, and its forwarding method.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use lvs_core::tunnel::{Tunnel, TunnelChecksum};
use lvs_core::{
    Family, Forwarding, Protocol, ServerConfig, ServiceConfig, ServiceFlags, ServiceKey,
};

/// A forwarding method, with the IP versions of clients and of servers.
#[derive(Clone, Copy, Debug)]
pub struct Method {
    /// Name of the method.
    pub name: &'static str,
    /// NAT, full NAT, direct routing or a tunnel.
    pub forwarding: Forwarding,
    /// The tunnel, if the method uses one.
    pub tunnel: Tunnel,
    /// IP version of the clients and of the virtual addresses.
    pub family: Family,
    /// IP version of the real servers.
    pub servers: Family,
}

const FULL: TunnelChecksum = TunnelChecksum::Full;
const NONE: TunnelChecksum = TunnelChecksum::None;

impl Method {
    /// The tested combinations of forwarding method, tunnel and IP versions.
    pub const ALL: [Self; 20] = {
        use Family::{V4, V6};
        use Forwarding::{FullNat, Nat, Route};
        let gre = Tunnel::Gre { checksum: FULL };
        let gue = Tunnel::Gue {
            port: 6080,
            checksum: FULL,
        };
        let bare_gre = Tunnel::Gre { checksum: NONE };
        let bare_gue = Tunnel::Gue {
            port: 6080,
            checksum: NONE,
        };
        [
            Self::new("nat4", Nat, Tunnel::Ipip, V4, V4),
            Self::new("nat6", Nat, Tunnel::Ipip, V6, V6),
            Self::new("dr4", Route, Tunnel::Ipip, V4, V4),
            Self::new("dr6", Route, Tunnel::Ipip, V6, V6),
            Self::new("ipip-4in4", Forwarding::Tunnel, Tunnel::Ipip, V4, V4),
            Self::new("ipip-6in6", Forwarding::Tunnel, Tunnel::Ipip, V6, V6),
            Self::new("ipip-4in6", Forwarding::Tunnel, Tunnel::Ipip, V4, V6),
            Self::new("ipip-6in4", Forwarding::Tunnel, Tunnel::Ipip, V6, V4),
            Self::new("gre-4in4", Forwarding::Tunnel, gre, V4, V4),
            Self::new("gre-6in6", Forwarding::Tunnel, gre, V6, V6),
            Self::new("gue-4in4", Forwarding::Tunnel, gue, V4, V4),
            Self::new("gue-6in6", Forwarding::Tunnel, gue, V6, V6),
            Self::new("gue-4in6", Forwarding::Tunnel, gue, V4, V6),
            Self::new("gue-6in4", Forwarding::Tunnel, bare_gue, V6, V4),
            Self::new("gre-bare-4in4", Forwarding::Tunnel, bare_gre, V4, V4),
            Self::new("gre-bare-6in6", Forwarding::Tunnel, bare_gre, V6, V6),
            Self::new("gue-bare-4in4", Forwarding::Tunnel, bare_gue, V4, V4),
            Self::new("gue-bare-6in6", Forwarding::Tunnel, bare_gue, V6, V6),
            Self::new("fullnat4", FullNat, Tunnel::Ipip, V4, V4),
            Self::new("fullnat6", FullNat, Tunnel::Ipip, V6, V6),
        ]
    };

    const fn new(
        name: &'static str,
        forwarding: Forwarding,
        tunnel: Tunnel,
        family: Family,
        servers: Family,
    ) -> Self {
        Self {
            name,
            forwarding,
            tunnel,
            family,
            servers,
        }
    }

    /// Finds the method with this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        static ALL: [Method; 20] = Method::ALL;
        ALL.iter().find(|method| method.name == name)
    }
}

/// A service of the scene.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Protocol of the service.
    pub protocol: Protocol,
    /// Port of the service.
    pub port: u16,
    /// Scheduler of the service.
    pub scheduler: &'static str,
    flags: u32,
    engine: Option<&'static str>,
}

const OFFERS: [Offer; 8] = [
    offer(Protocol::TCP, 80, "rr", 0, None),
    offer(Protocol::UDP, 53, "wlc", 0, None),
    offer(Protocol::SCTP, 3868, "sed", 0, None),
    offer(
        Protocol::TCP,
        443,
        "wlc",
        ServiceFlags::PERSISTENT | ServiceFlags::SCHED1,
        None,
    ),
    offer(
        Protocol::UDP,
        5060,
        "sh",
        ServiceFlags::PERSISTENT,
        Some("sip"),
    ),
    offer(Protocol::UDP, 514, "mh", ServiceFlags::ONE_PACKET, None),
    offer(Protocol::TCP, 21, "lblcr", ServiceFlags::PERSISTENT, None),
    offer(Protocol::UDP, 500, "dh", 0, None),
];

const fn offer(
    protocol: Protocol,
    port: u16,
    scheduler: &'static str,
    flags: u32,
    engine: Option<&'static str>,
) -> Offer {
    Offer {
        protocol,
        port,
        scheduler,
        flags,
        engine,
    }
}

/// Addresses and services. Servers are on a separate link; all other addresses are behind a gateway
/// on the clients' link.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The forwarding method.
    pub method: Method,
    /// Virtual addresses: the host owns the first one, the dataplane the second one.
    pub vips: [IpAddr; 2],
    /// The director's addresses on the clients' link and on the servers' link.
    pub director: [IpAddr; 2],
    /// Addresses of the clients.
    pub clients: Vec<IpAddr>,
    /// Addresses of the real servers. If the IP versions permit it, the last one is an address of
    /// the director.
    pub servers: Vec<IpAddr>,
    /// Local addresses of full NAT: the dataplane owns the first one, the host the second one.
    pub locals: [IpAddr; 2],
    /// A router that sends ICMP errors.
    pub router: IpAddr,
    /// Services at each virtual address.
    pub offers: [Offer; 8],
    /// Difference between a server's port and its service's port. A service on port 500 has servers
    /// on port 500.
    pub shift: u16,
}

/// The address of `family` with the last part `last` in network number `net`.
pub(super) fn addr(family: Family, net: u8, last: u8) -> IpAddr {
    match family {
        Family::V4 => {
            let [a, b, c] =
                [[192, 0, 2], [198, 51, 100], [10, 255, 0], [10, 1, 0]][usize::from(net)];
            Ipv4Addr::new(a, b, c, last).into()
        }
        Family::V6 => {
            let [a, b] = [
                [0x2001, 0xdb8],
                [0x2001, 0xdb9],
                [0xfd00, 0xff],
                [0xfd00, 1],
            ][usize::from(net)];
            Ipv6Addr::new(a, b, 0, 0, 0, 0, 0, last.into()).into()
        }
    }
}

const CLIENTS: u8 = 0;
const VIPS: u8 = 1;
const FRONT: u8 = 2;
const BACK: u8 = 3;

impl Scene {
    /// Creates the scene for `method`.
    pub fn new(method: &Method) -> Self {
        let Method {
            family, servers, ..
        } = *method;
        let director = [addr(family, FRONT, 1), addr(servers, BACK, 254)];
        let mut real: Vec<IpAddr> = [11, 12, 13].map(|last| addr(servers, BACK, last)).into();
        if family == servers {
            real.push(director[1]);
        }
        Self {
            method: *method,
            vips: [1, 2].map(|last| addr(family, VIPS, last)),
            director,
            clients: (1..=8).map(|last| addr(family, CLIENTS, last)).collect(),
            servers: real,
            router: addr(servers, BACK, 99),
            // Full NAT cannot be combined with one-packet scheduling.
            offers: match method.forwarding {
                Forwarding::FullNat => OFFERS.map(|offer| Offer {
                    flags: offer.flags & !ServiceFlags::ONE_PACKET,
                    ..offer
                }),
                _ => OFFERS,
            },
            locals: [50, 254].map(|last| addr(servers, BACK, last)),
            shift: if method.forwarding.translates() {
                8000
            } else {
                0
            },
        }
    }

    /// Returns the port of the servers for a service.
    pub const fn server_port(&self, offer: &Offer) -> u16 {
        match offer.port {
            // The dataplane expects IPsec connections between the ports 500 of both ends.
            500 => 500,
            port => port.wrapping_add(self.shift),
        }
    }

    /// Iterates over the services and their settings.
    pub fn services(&self) -> impl Iterator<Item = (ServiceKey, ServiceConfig)> + '_ {
        self.vips.iter().flat_map(move |vip| {
            self.offers
                .iter()
                .map(move |offer| self.service(*vip, offer))
        })
    }

    /// Key and settings of a service at `vip`.
    pub fn service(&self, vip: IpAddr, offer: &Offer) -> (ServiceKey, ServiceConfig) {
        let key = ServiceKey::Address {
            protocol: offer.protocol,
            addr: SocketAddr::new(vip, offer.port),
        };
        let mut config = ServiceConfig::new(self.method.family, offer.scheduler);
        config.flags = ServiceFlags(offer.flags);
        config.engine = offer.engine.map(str::to_owned);
        if offer.flags & ServiceFlags::PERSISTENT != 0 {
            config.timeout = 60;
        }
        (key, config)
    }

    /// Address and settings of the server with this number.
    pub fn server(&self, number: usize, offer: &Offer) -> (SocketAddr, ServerConfig) {
        let weight = i32::try_from(number).unwrap_or(0) + 1;
        let config = ServerConfig {
            tunnel: self.method.tunnel,
            ..ServerConfig::new(weight, self.method.forwarding)
        };
        let addr = SocketAddr::new(self.servers[number], self.server_port(offer));
        (addr, config)
    }
}

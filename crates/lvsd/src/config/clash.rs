//! Rules about the addresses of services and servers, in a file and from other sources: finds
//! services that conflict with each other, servers that are services themselves, and servers that
//! do not fit their service.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use lvs_core::api::ServiceId;
use lvs_core::{Family, Forwarding, Protocol};

use super::ports::ManyPorts;
use super::{Service, VipMode};

/// The services that were checked so far, with their positions `P` in the text. Further services
/// are compared with them.
#[derive(Debug)]
pub(crate) struct Taken<P> {
    ids: HashMap<ServiceId, P>,
    owners: HashMap<IpAddr, (VipMode, P)>,
    /// Services with several ports, by protocol and address. Two of them may have common ports.
    many: HashMap<(Protocol, IpAddr), Vec<(ManyPorts, P)>>,
    marks: HashMap<u32, (ManyPorts, P)>,
}

/// A conflict between two services.
#[derive(Debug)]
pub(crate) struct Clash<P> {
    pub(crate) title: String,
    pub(crate) help: &'static str,
    /// Position of the earlier service, and the message to show there.
    pub(crate) first: (P, &'static str),
    /// Whether the conflict is about `vip`, not about the address.
    pub(crate) about_vip: bool,
}

impl<P> Default for Taken<P> {
    fn default() -> Self {
        Self {
            ids: HashMap::new(),
            owners: HashMap::new(),
            many: HashMap::new(),
            marks: HashMap::new(),
        }
    }
}

impl<P: Clone> Taken<P> {
    /// Adds a service whose `address` and `vip` are at these positions of the text.
    pub(crate) fn take(&mut self, service: &Service, address: P, vip: P) {
        self.ids.insert(service.id, address.clone());
        if let Some(many) = &service.ports {
            let here = (many.clone(), address);
            let beside = self.many.entry((many.protocol, many.ip)).or_default();
            beside.push(here.clone());
            self.marks.entry(many.mark()).or_insert(here);
        }
        if let (Some(ip), true) = (service.virtual_ip(), service.vip != VipMode::Auto) {
            self.owners.entry(ip).or_insert((service.vip, vip));
        }
    }

    pub(crate) fn clashes(&self, service: &Service) -> Vec<Clash<P>> {
        let all = [
            self.same(service),
            self.overlap(service),
            self.owner(service),
        ];
        all.into_iter().flatten().collect()
    }

    fn same(&self, service: &Service) -> Option<Clash<P>> {
        let first = self.ids.get(&service.id)?;
        Some(Clash {
            title: format!("service {} exists twice", label(&service.id)),
            help: "put all servers into one [[service]], or change address, port or protocol",
            first: (first.clone(), "the first one"),
            about_vip: false,
        })
    }

    /// Finds an earlier service with several ports that would match the same packets, or for which
    /// lvsd generates the same mark. `None` without such a service.
    fn overlap(&self, service: &Service) -> Option<Clash<P>> {
        let many = service.ports.as_ref()?;
        let beside = self.many.get(&(many.protocol, many.ip));
        // Services with equal ports are reported as duplicates.
        let mut beside = beside.into_iter().flatten().filter(|(one, _)| one != many);
        let (title, help, first) = match beside.find(|(one, _)| one.overlaps(many)) {
            Some((_, first)) => (
                "two services match the same ports",
                "assign each port of an address to one service; a service with a single port may be within another's range",
                first,
            ),
            None => {
                let same = self.marks.get(&many.mark());
                let (_, first) = same.filter(|(one, _)| one != many)?;
                (
                    "two services have the same generated mark by chance",
                    "write the ports of one of them differently, for instance in two ranges",
                    first,
                )
            }
        };
        Some(Clash {
            title: title.to_owned(),
            help,
            first: (first.clone(), "the first one"),
            about_vip: false,
        })
    }

    /// Finds an earlier service at the same address with another owner of the VIP; `None` without
    /// such a service, or if `vip` is `auto`.
    fn owner(&self, service: &Service) -> Option<Clash<P>> {
        let address = service.virtual_ip()?;
        if service.vip == VipMode::Auto {
            return None;
        }
        let (other, first) = self.owners.get(&address)?;
        if *other == service.vip {
            return None;
        }
        let title = match (other, service.vip) {
            (VipMode::Announce, _) | (_, VipMode::Announce) => {
                format!("{address} is announced for one service and not for another")
            }
            _ => {
                format!(
                    "{address} belongs to the dataplane for one service and to the host for another"
                )
            }
        };
        Some(Clash {
            title,
            help: "use the same `vip` for every service of this address",
            first: (first.clone(), "this service has another `vip`"),
            about_vip: true,
        })
    }
}

/// Whether packets to `server` would belong to the service `other`, which has the same address.
pub(crate) fn is_it(server: SocketAddr, other: &Service) -> bool {
    let port = server.port();
    let its_port = match (&other.ports, other.id.endpoint()) {
        (Some(many), _) => many.has(port),
        (None, Some((_, addr))) => addr.port() == port || addr.port() == 0 || port == 0,
        (None, None) => false,
    };
    // A real server cannot have an address that the dataplane owns.
    matches!(other.vip, VipMode::Own | VipMode::Announce) || its_port
}

/// Whether the service is proxied and listens on all addresses of this host.
pub(crate) fn listens_everywhere(service: &Service) -> bool {
    let own = service.id.endpoint().filter(|_| service.proxy.is_some());
    own.is_some_and(|(_, own)| own.ip().is_unspecified())
}

/// Whether `other`, a proxied service on all addresses of this host, listens at the address of a
/// server of the service `of`. `has` returns whether the host has an address.
pub(crate) fn listens_at(
    other: &Service,
    of: &ServiceId,
    server: SocketAddr,
    has: impl Fn(IpAddr) -> bool,
) -> bool {
    let Some((protocol, own)) = other.id.endpoint() else {
        return false;
    };
    let (ip, port) = (server.ip(), server.port());
    let same = of.endpoint().is_some_and(|(its, _)| its == protocol);
    let here = ip.is_loopback() || has(ip);
    same && port == own.port() && own.is_ipv4() == ip.is_ipv4() && here
}

/// The reason why a service cannot use a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unfit {
    pub(crate) title: String,
    /// Message at the server's address; may be empty.
    pub(crate) label: &'static str,
    pub(crate) help: String,
    /// Message at the service's virtual address, if any.
    pub(crate) vip: Option<&'static str>,
}

impl Unfit {
    fn new(title: impl Into<String>, help: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            label: "",
            help: help.into(),
            vip: None,
        }
    }
}

/// Reason and fix if packets cannot be sent to `ip`, the address of a `what` (as in
/// `ip_vs_new_dest`).
pub(crate) fn unusable(ip: IpAddr, what: &str) -> Option<(String, &'static str)> {
    let bad = match ip {
        // No host has an address in 0.0.0.0/8 or 240.0.0.0/4 (RFC 1122, 3.2.1.3; RFC 1112, 4).
        IpAddr::V4(v4) => v4.is_multicast() || matches!(v4.octets()[0], 0 | 240..),
        IpAddr::V6(v6) => {
            v6.is_unspecified()
                || v6.is_multicast()
                || v6.is_unicast_link_local()
                || v6.to_ipv4_mapped().is_some()
        }
    };
    bad.then(|| {
        (
            format!("{ip} cannot be the address of a {what}"),
            "use a unicast address that is not link-local",
        )
    })
}

/// The reason why the service `id` cannot use the server at `address` with `method`; `None` if it
/// can. `many_ports`: the service has several ports.
pub(crate) fn misfit(
    id: &ServiceId,
    many_ports: bool,
    address: SocketAddr,
    method: Forwarding,
) -> Option<Unfit> {
    let vip = id.address();
    let family = match id {
        ServiceId::Fwmark { family, .. } => Some(*family),
        _ => vip.map(|vip| Family::of(&vip.ip())),
    };
    if family.is_some_and(|family| family != Family::of(&address.ip()))
        && method != Forwarding::Tunnel
    {
        return Some(Unfit::new(
            "server and service have different address families",
            "use a server of the service's family, or set forward = \"tun\"",
        ));
    }
    let Some(vip) = vip else {
        let wrong = !method.translates() && address.port() != 0 && many_ports;
        return wrong.then(|| {
            Unfit::new(
                "only NAT can translate several ports to one port",
                format!("write \"{}\" without a port", address.ip()),
            )
        });
    };
    if address.ip() == vip.ip() && (!method.translates() || address.port() == vip.port()) {
        return Some(Unfit {
            vip: Some("the VIP"),
            ..Unfit::new(
                "the server is the virtual service itself: packets would loop",
                "use the real server's own address, not the VIP that it has on lo",
            )
        });
    }
    if !method.translates() && address.port() != vip.port() {
        let name = match method {
            Forwarding::Route => "direct routing",
            _ => "tunnelling",
        };
        return Some(Unfit {
            label: "with this method, the server receives the packet with the client's destination port",
            vip: Some("the service's port"),
            ..Unfit::new(
                format!(
                    "{name} cannot change the port {} to {}",
                    vip.port(),
                    address.port()
                ),
                format!(
                    "write \"{}\" and let the server listen on port {}, or set forward = \"nat\"",
                    SocketAddr::new(address.ip(), vip.port()),
                    vip.port()
                ),
            )
        });
    }
    (vip.port() != 0 && address.port() == 0).then(|| {
        Unfit::new(
            "port 0 is not a server's port",
            format!("omit the port to use the service's, {}", vip.port()),
        )
    })
}

/// Formats a service: `tcp 192.0.2.10:80`, `mark 7`.
pub(crate) fn label(id: &ServiceId) -> String {
    match id {
        ServiceId::Tcp { address } => format!("tcp {address}"),
        ServiceId::Udp { address } => format!("udp {address}"),
        ServiceId::Sctp { address } => format!("sctp {address}"),
        ServiceId::Fwmark { mark, family } => match family {
            Family::V4 => format!("mark {mark}"),
            Family::V6 => format!("mark {mark} ipv6"),
        },
    }
}

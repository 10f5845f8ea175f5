//! Finds services that conflict with each other, and servers that are services themselves.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use lvs_core::api::ServiceId;
use lvs_core::{Family, Protocol};

use super::ports::ManyPorts;
use super::{Service, VipMode};

/// The services so far, with their positions `P` in the text, to find conflicts with further ones.
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

    /// Finds a service with several ports that would match the same packets.
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

    /// Finds a service at the same address with another owner of the VIP.
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

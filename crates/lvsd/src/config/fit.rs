//! Checks whether a server can have its address in a service.

use std::net::{IpAddr, SocketAddr};

use lvs_core::api::ServiceId;
use lvs_core::{Family, Forwarding};

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

/// The reason why the service `id` cannot use the server at `address` with `method`. `many_ports`:
/// the service has several ports.
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
            "server and service are of different families",
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

//! Persistence templates: their keys, and the search for a usable template.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::conn::Key;
use crate::control::FTP;
use crate::{Protocol, Server, ServiceKey};

/// Whether a template of this server may be used (`ip_vs_check_template`): the server must be
/// available and, with `quiescent` (`expire_quiescent_template`), have a weight other than 0.
pub(in crate::control) fn may_lead_to(server: &Server, quiescent: bool) -> bool {
    server.is_available() && !(quiescent && server.weight() == 0)
}

/// The identity of the template for a packet, and whether the template keeps the server's port.
///
/// One template applies to the control and data connections of an FTP service, to every port of a
/// service with port 0, and to every protocol, address and port of a firewall-mark service.
pub(super) fn template_key(
    service: ServiceKey,
    netmask: u32,
    protocol: Protocol,
    client: SocketAddr,
    virt: SocketAddr,
) -> (Key, bool) {
    let client = SocketAddr::new(network(client.ip(), netmask), 0);
    if virt.port() == service.port() {
        let ftp = virt.port() == FTP;
        let port = if ftp { 0 } else { virt.port() };
        let virt = SocketAddr::new(virt.ip(), port);
        let key = Key {
            protocol,
            client,
            virt,
        };
        return (key, !ftp);
    }
    let key = match service {
        ServiceKey::Mark { mark, .. } => Key {
            protocol: Protocol(0),
            client,
            virt: mark_addr(mark, virt.is_ipv4()),
        },
        ServiceKey::Address { .. } => Key {
            protocol,
            client,
            virt: SocketAddr::new(virt.ip(), 0),
        },
    };
    (key, false)
}

/// Encodes a firewall mark as a virtual address: as an IPv4 address, or as the first 32 bits of an
/// IPv6 address.
fn mark_addr(mark: u32, v4: bool) -> SocketAddr {
    let addr = if v4 {
        IpAddr::V4(Ipv4Addr::from_bits(mark))
    } else {
        IpAddr::V6(Ipv6Addr::from_bits(u128::from(mark) << 96))
    };
    SocketAddr::new(addr, 0)
}

/// The network of a client. `netmask` is a mask for IPv4, and the length of a prefix for IPv6.
pub(super) fn network(addr: IpAddr, netmask: u32) -> IpAddr {
    match addr {
        IpAddr::V4(addr) => Ipv4Addr::from_bits(addr.to_bits() & netmask).into(),
        IpAddr::V6(addr) => {
            let host = 128u32.saturating_sub(netmask);
            let mask = u128::MAX.checked_shl(host).unwrap_or(0);
            Ipv6Addr::from_bits(addr.to_bits() & mask).into()
        }
    }
}

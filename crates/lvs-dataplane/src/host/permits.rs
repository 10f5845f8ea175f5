//! The changes that a TUN device does not permit (`--backend tun`).

use lvs_core::api::{Failure, FailureCode, Need};
use lvs_core::{Forwarding, ServiceKey};

use crate::netlink::NetState;

/// Refuses a change that is not possible with a TUN device, and gives the reason.
pub(super) fn permits_routed(need: &Need<'_>, state: &NetState) -> Result<(), Failure> {
    let refused = match need {
        Need::Server(Forwarding::Route | Forwarding::Local) => {
            "direct routing changes the link-layer address of a frame, and this dataplane has only the packets that its host routes through a TUN device (--backend tun): use NAT (-m) or a tunnel (-i), or give the dataplane CAP_NET_RAW and --backend af_packet"
                .to_owned()
        }
        Need::Service(ServiceKey::Address { addr, .. }) if state.is_local(addr.ip()) => {
            let addr = addr.ip();
            let owner = state
                .links()
                .find(|link| state.addresses(link.index).any(|a| a.ip == addr));
            let (name, fix) = match owner {
                Some(link) => (
                    link.name.as_str(),
                    format!("`ip addr del {addr} dev {}`", link.name),
                ),
                None => ("this host", "remove it from this host".to_owned()),
            };
            format!(
                "{addr} is an address of {name}, and packets to the host itself are not routed through a TUN device (--backend tun): {fix}, and start the dataplane with --own-vips, or route the address to this host"
            )
        }
        Need::Local(addr) if state.is_local(*addr) => format!(
            "{addr} is an address of this host, and packets to the host itself are not routed through a TUN device (--backend tun): use an address that the host does not have; the dataplane then answers ARP for it"
        ),
        Need::Mark(rule) if rule.interface.is_some() => {
            "packets that are routed through a TUN device (--backend tun) have no incoming interface: remove --interface"
                .to_owned()
        }
        _ => return Ok(()),
    };
    Err(Failure::new(FailureCode::Unsupported, refused))
}

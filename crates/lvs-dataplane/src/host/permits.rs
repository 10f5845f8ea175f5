//! The changes that a TUN device does not permit (`--backend tun`).

use lvs_core::api::{Failure, FailureCode, Need};
use lvs_core::{Forwarding, ServiceKey};

use crate::netlink::NetState;

/// Permits or refuses a change.
pub(super) fn permits_routed(need: &Need<'_>, state: &NetState) -> Result<(), Failure> {
    let refused = match need {
        Need::Server(Forwarding::Route | Forwarding::Local) => {
            "direct routing puts another link-layer address on a frame, and this dataplane has no frames but the packets that \
             its host routes through a TUN device (--backend tun): use NAT (-m) or a tunnel (-i), or give the dataplane \
             CAP_NET_RAW and --backend af_packet"
                .to_owned()
        }
        Need::Service(ServiceKey::Address { addr, .. }) if state.is_local(addr.ip()) => {
            let addr = addr.ip();
            let owner = state
                .links()
                .find(|link| state.addresses(link.index).any(|a| a.ip == addr));
            let name = owner.map_or("this host", |link| link.name.as_str());
            format!(
                "{addr} is an address of {name}, and what is addressed to the host itself is not routed through a TUN \
                 device (--backend tun): `ip addr del {addr} dev {name}`, and start the dataplane with --own-vips, or have \
                 the address routed here"
            )
        }
        Need::Local(addr) if state.is_local(*addr) => format!(
            "{addr} is an address of this host, and what is addressed to the host itself is not routed through a TUN device \
             (--backend tun): give one that the host does not have, which the dataplane then answers for"
        ),
        Need::Mark(rule) if rule.interface.is_some() => {
            "a packet that is routed through a TUN device (--backend tun) has lost the name of its interface: leave --interface out"
                .to_owned()
        }
        _ => return Ok(()),
    };
    Err(Failure::new(FailureCode::Unsupported, refused))
}

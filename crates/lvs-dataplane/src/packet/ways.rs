//! The ways of a connection's packets, both of them, where nothing about a packet itself could
//! change them: what the packet path would do with each, told beforehand for whoever forwards them
//! in its place.

use lvs_core::{Forwarding, Offer};

use super::net::{Net, NextHop, PortId};
use super::pipeline::is_martian;
use super::wire::Mac;

/// Where packets leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// The port.
    pub port: PortId,
    /// The longest packet.
    pub mtu: u32,
    /// The neighbour that takes them on.
    pub to: Mac,
    /// The port's own address.
    pub from: Mac,
}

/// Where requests and replies leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ways {
    /// To the server.
    pub server: Way,
    /// To the client; `None` where replies do not come by here.
    pub client: Option<Way>,
}

impl Ways {
    /// Those of a connection; `None` if the packet path would do anything else with its packets
    /// than send them there: they are this host's own, cannot be believed, have no route, or
    /// their neighbour is not known.
    pub fn of<N: Net>(offer: &Offer, net: &N) -> Option<Self> {
        let (client, virt, server) = (offer.client.ip(), offer.virt.ip(), offer.server.ip());
        let is_ours = |addr| net.is_local(addr) || net.is_own_vip(addr);
        let arrives = is_ours(virt) || net.is_vip(virt);
        let alike = client.is_ipv6() == server.is_ipv6();
        if !arrives
            || !alike
            || is_martian(client, virt, true, net)
            || client.is_loopback()
            || is_ours(server)
            || is_ours(client)
            || net.is_vip(client)
        {
            return None;
        }
        let way = |hop: NextHop| {
            let port = net.port(hop.port).filter(|port| port.ethernet)?;
            Some(Way {
                port: hop.port,
                mtu: hop.mtu,
                to: net.neighbour(hop.port, hop.addr)?,
                from: port.mac,
            })
        };
        let to_server = way(net.route(server)?)?;
        let to_client = match offer.method {
            Forwarding::Nat if is_martian(server, client, false, net) => return None,
            Forwarding::Nat => Some(way(net.route(client)?)?),
            _ => None,
        };
        Some(Self {
            server: to_server,
            client: to_client,
        })
    }
}

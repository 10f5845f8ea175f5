//! The paths of a connection's packets in both directions, computed in advance for the kernel fast
//! path. This is possible only if they are the same for all packets of the connection.

use lvs_core::offload::Offer;
use lvs_core::{Forwarding, Instant};

use super::net::{Net, Way, is_martian};
use super::rewrite::tunnel::{self, Template};
use super::tunnel_path::TunnelPaths;

/// The paths of a connection's requests and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ways {
    /// The path to the server.
    pub server: Way,
    /// The outer headers of requests, if the server uses a tunnel. The MTU of `server` is then the
    /// length of the longest request without these headers.
    pub outer: Option<Template>,
    /// The path to the client; `None` if replies do not pass the director.
    pub client: Option<Way>,
}

/// The reason why the paths of a connection cannot be computed in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoWay {
    /// The virtual address belongs neither to this host nor to the dataplane.
    #[error(
        "the virtual address of the connection belongs neither to this host nor to the dataplane"
    )]
    Elsewhere,
    /// Client and server are of different families. An IPv6 client of a tunnel over IPv4 is
    /// permitted.
    #[error("the client and the server of the connection are of different address families")]
    Families,
    /// The client or the server has an address of this host or of the dataplane, or the client has
    /// an address of a service or a loopback address.
    #[error("the director itself is the client or the server of the connection")]
    Host,
    /// No other host can have sent a packet between these addresses (`is_martian`).
    #[error(
        "no other host can have sent a packet with the addresses of the connection (such as loopback, multicast, or the director's own)"
    )]
    Martian,
    /// Packets to the server cannot be sent now: there is no route through Ethernet, the next hop's
    /// link-layer address is unknown, or the tunnel cannot be used (its MTU is too small, or the
    /// route has no source address).
    #[error(
        "the server has no route through Ethernet, the neighbour on this route is not resolved, or a tunnel cannot use the route (its MTU is too small, or it has no source address)"
    )]
    ToServer,
    /// Packets to the client cannot be sent now: there is no route through Ethernet, or the next
    /// hop's link-layer address is unknown.
    #[error(
        "the client has no route through Ethernet, or the neighbour on this route is not resolved"
    )]
    ToClient,
    /// The outer headers of the tunnel are not the same for all packets.
    #[error("the tunnel to the server has a checksum (--tun-csum, --tun-remcsum)")]
    Tunnel,
}

impl Ways {
    /// Computes the paths of a connection. `pmtu_disc` is the sysctl of this name.
    ///
    /// # Errors
    /// The pipeline could not send all of the connection's packets by fixed paths; the reason is
    /// one of [`NoWay`].
    pub fn of<N: Net>(
        offer: &Offer,
        net: &N,
        tunnels: &TunnelPaths,
        pmtu_disc: bool,
        now: Instant,
    ) -> Result<Self, NoWay> {
        let (client, virt, server) = (offer.client.ip(), offer.virt.ip(), offer.server.ip());
        let is_ours = |addr| net.is_local(addr) || net.is_own_vip(addr);
        let arrives = is_ours(virt) || net.is_vip(virt);
        let tunnelled = offer.method == Forwarding::Tunnel;
        // The BPF programs of the kernel fast path do not look up IPv4 connections whose tunnel is
        // IPv6.
        let alike = client.is_ipv6() == server.is_ipv6() || tunnelled && client.is_ipv6();
        if !arrives {
            return Err(NoWay::Elsewhere);
        }
        if !alike {
            return Err(NoWay::Families);
        }
        if is_ours(server) || is_ours(client) || client.is_loopback() || net.is_vip(client) {
            return Err(NoWay::Host);
        }
        if is_martian(client, virt, true, net) {
            return Err(NoWay::Martian);
        }
        let hop = net.route(server).ok_or(NoWay::ToServer)?;
        let mut to_server = Way::by(&hop, net).ok_or(NoWay::ToServer)?;
        let mut outer = None;
        if tunnelled {
            let tunnel = offer.tunnel;
            let mtu = tunnels.known_mtu(server, tunnel, hop.mtu as usize, now);
            let inside = tunnel::inner_mtu(tunnel, server, hop.mtu as usize, mtu);
            let inside = inside.and_then(|inside| u32::try_from(inside).ok());
            to_server.mtu = inside.ok_or(NoWay::ToServer)?;
            let source = hop.source.ok_or(NoWay::ToServer)?;
            let template = Template::new(source, server, tunnel, client.is_ipv6(), pmtu_disc);
            outer = Some(template.ok_or(NoWay::Tunnel)?);
        }
        let to_client = match offer.method {
            Forwarding::Nat if is_martian(server, client, false, net) => {
                return Err(NoWay::Martian);
            }
            // Replies with full NAT arrive at an address of this host or of the dataplane.
            Forwarding::FullNat if is_martian(server, virt, true, net) => {
                return Err(NoWay::Martian);
            }
            Forwarding::Nat | Forwarding::FullNat => {
                let way = net.route(client).and_then(|hop| Way::by(&hop, net));
                Some(way.ok_or(NoWay::ToClient)?)
            }
            _ => None,
        };
        Ok(Self {
            server: to_server,
            outer,
            client: to_client,
        })
    }
}

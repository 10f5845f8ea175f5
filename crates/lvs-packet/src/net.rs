//! The network as the packet pipeline sees it: ports, routes, neighbours, and addresses.

use std::net::IpAddr;

use crate::drop::FrameDrop;
use crate::wire::Mac;

/// Number of an interface, or of a TUN device that connects the dataplane with its host. The
/// dataplane assigns small numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub u16);

impl PortId {
    /// The port through which packets reach the host.
    pub const HOST: Self = Self(0);
    /// The TUN backend's device, for packets that the host must forward. [`Self::HOST`] is the same
    /// device, for packets that the host itself must receive.
    pub const HOP: Self = Self(1);
    /// The port on which the host's own packets to its virtual addresses arrive, and on which the
    /// answers return. On this port, the host accepts packets whose source is one of its own
    /// addresses.
    pub const LOCAL: Self = Self(2);
    /// The first port that an interface can have.
    pub const FIRST: Self = Self(3);

    /// The index of the port, for tables.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The properties of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// The link-layer address of the port.
    pub mac: Mac,
    /// Length in bytes of the longest IP packet that can be sent on the port.
    pub mtu: u32,
    /// Whether frames begin with an Ethernet header; otherwise they are plain IP packets.
    pub ethernet: bool,
    /// Whether the port accepts partial checksums and super-packets.
    pub offload: bool,
    /// Whether frames can be reinjected into the host on this port.
    pub gives_back: bool,
}

/// The next hop on the path to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// The port on which packets are sent.
    pub port: PortId,
    /// The neighbour that receives the packet: a gateway, or the destination itself if the route is
    /// on-link.
    pub addr: IpAddr,
    /// Length in bytes of the longest packet that can be sent on this path.
    pub mtu: u32,
    /// The address that the host would use as source, if there is one.
    pub source: Option<IpAddr>,
}

/// The path of packets to an Ethernet neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// The port on which packets are sent.
    pub port: PortId,
    /// Length in bytes of the longest packet that can be sent on the path.
    pub mtu: u32,
    /// The link-layer address of the neighbour.
    pub to: Mac,
    /// The link-layer address of the port.
    pub from: Mac,
}

impl Way {
    /// The path by a next hop; `None` if the hop's port is not Ethernet or was removed, or the
    /// hop's link-layer address is unknown.
    pub fn by<N: Net + ?Sized>(hop: &NextHop, net: &N) -> Option<Self> {
        let port = net.port(hop.port).filter(|port| port.ethernet)?;
        Some(Self {
            port: hop.port,
            mtu: hop.mtu,
            to: net.neighbour(hop.port, hop.addr)?,
            from: port.mac,
        })
    }
}

/// All properties of an address that the pipeline needs, from one look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// Whether the host owns the address: [`Net::is_local`].
    pub local: bool,
    /// Whether a virtual service uses the address: [`Net::is_vip`].
    pub vip: bool,
    /// Whether the dataplane owns the address: [`Net::is_own_vip`].
    pub own: bool,
    /// The path to the address; `None` if there is no route, the port is not Ethernet, or the next
    /// hop's link-layer address is unknown.
    pub way: Option<Way>,
}

/// The look-ups of the packet path in the network configuration. The pipeline calls them for each
/// packet, so implementations must be cheap and must do no I/O.
pub trait Net {
    /// Returns the port's properties; `None` if the port was removed.
    fn port(&self, port: PortId) -> Option<PortInfo>;

    /// The port through which packets are reinjected into the host, if there is one.
    fn host_port(&self) -> Option<PortId>;

    /// The port of the host's own packets to its own virtual addresses, if there is one
    /// ([`PortId::LOCAL`]).
    fn local_port(&self) -> Option<PortId> {
        None
    }

    /// Whether the host has this address on an interface. VIPs on its interfaces count; VIPs that
    /// only the dataplane owns do not.
    fn is_local(&self, addr: IpAddr) -> bool;

    /// Whether a packet from another host with the source `src` is forged, because the address
    /// belongs to this host (`fib_validate_source`) or to the dataplane.
    fn is_forged(&self, src: IpAddr) -> bool {
        self.is_local(src) || self.is_own_vip(src)
    }

    /// Whether packets from other hosts are dropped as forged if their source is a VIP on an
    /// interface of this host, as the kernel does. A kernel director can therefore not be the
    /// gateway of servers with direct routing. If this is false, the dataplane forwards the replies
    /// of these servers.
    fn forges_vips(&self) -> bool {
        false
    }

    /// Whether `addr` is the address of a virtual service, on the host or owned by the dataplane.
    fn is_vip(&self, addr: IpAddr) -> bool;

    /// Whether the dataplane owns this VIP, and answers for it in place of the host.
    fn is_own_vip(&self, addr: IpAddr) -> bool;

    /// The next hop to `dst`, which must not be an address of this host; `None` if there is no
    /// route.
    fn route(&self, dst: IpAddr) -> Option<NextHop>;

    /// Returns the reason why there is no route to `dst`.
    fn why_no_route(&self, dst: IpAddr) -> FrameDrop {
        let _ = dst;
        FrameDrop::NoRoute
    }

    /// The link-layer address of a neighbour; `None` if it is unknown.
    fn neighbour(&self, port: PortId, addr: IpAddr) -> Option<Mac>;

    /// All properties of an address.
    fn about(&self, addr: IpAddr) -> About {
        About {
            local: self.is_local(addr),
            vip: self.is_vip(addr),
            own: self.is_own_vip(addr),
            way: self.route(addr).and_then(|hop| Way::by(&hop, self)),
        }
    }

    /// Whether ARP requests and neighbour solicitations for `addr` are answered on `port`.
    fn answers_arp(&self, port: PortId, addr: IpAddr) -> bool {
        let _ = port;
        self.is_own_vip(addr)
    }
}

/// Whether no other host can have sent a packet from `src` to `dst` (`ip_route_input_slow`,
/// `ip6_rcv_core`). `to_vip` means that `dst` is the address of a service. Exception: a real server
/// that has the VIP may send from it, if the director is its gateway and [`Net::forges_vips`] is
/// false. The kernel accepts an IPv6 packet from one of its own addresses. The director does not,
/// because the answer would be sent to the host or the dataplane itself.
#[inline]
pub(crate) fn is_martian<N: Net>(src: IpAddr, dst: IpAddr, to_vip: bool, net: &N) -> bool {
    let forged =
        |forges_vips: bool| net.is_forged(src) && (to_vip || forges_vips || !net.is_vip(src));
    match src {
        IpAddr::V4(src) => {
            src.is_loopback()
                || dst.is_loopback()
                || src.is_multicast()
                || src.is_broadcast()
                || src.octets()[0] == 0
                || forged(net.forges_vips())
        }
        IpAddr::V6(src) => {
            src.is_loopback()
                || dst.is_loopback()
                || src.to_ipv4_mapped().is_some()
                || forged(false)
        }
    }
}

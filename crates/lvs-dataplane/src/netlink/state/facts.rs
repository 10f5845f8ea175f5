//! The objects of the kernel's network state: links, addresses, routes and neighbours.

use std::net::IpAddr;

/// An Ethernet address.
pub type LinkAddress = [u8; 6];

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Index of the interface.
    pub index: u32,
    /// Name of the interface.
    pub name: String,
    /// The driver's kind for virtual devices, for example `veth`, `vlan`, `bridge` or `tun`.
    pub kind: Option<String>,
    /// The hardware type (`ARPHRD_*`): 1 is Ethernet, 772 the loopback.
    pub hardware: u16,
    /// The link's Ethernet address.
    pub mac: Option<LinkAddress>,
    /// MTU of the interface in bytes.
    pub mtu: u32,
    /// Whether the link is up (`IFF_UP`).
    pub up: bool,
    /// Whether the link is up and has a carrier (`IFF_RUNNING`).
    pub running: bool,
    /// Whether the link does not resolve neighbours (`IFF_NOARP`).
    pub no_arp: bool,
    /// The bridge or bond of which the link is a port.
    pub master: Option<u32>,
    /// The device below a VLAN or macvlan; the other end of a veth in the same namespace.
    pub parent: Option<u32>,
}

impl Link {
    /// Whether the link is an Ethernet link on which neighbours have to be resolved.
    pub fn is_arp_capable(&self) -> bool {
        self.hardware == libc::ARPHRD_ETHER && !self.no_arp && self.mac.is_some()
    }
}

/// An address of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Index of the interface that has the address.
    pub ifindex: u32,
    /// The address itself.
    pub ip: IpAddr,
    /// Length of the prefix of the address's network.
    pub prefix_len: u8,
    /// The scope in which the address is valid (`RT_SCOPE_*`): 0 everywhere, 253 on the link, 254
    /// on this host.
    pub scope: u8,
    /// Flags of the address (`IFA_F_*`).
    pub flags: u32,
}

impl Address {
    /// Whether the address can be the source of new connections: not secondary, deprecated,
    /// tentative or refused by duplicate address detection.
    pub fn is_preferred(&self) -> bool {
        const UNFIT: u32 = libc::IFA_F_SECONDARY
            | libc::IFA_F_DEPRECATED
            | libc::IFA_F_TENTATIVE
            | libc::IFA_F_DADFAILED;
        self.flags & UNFIT == 0
    }
}

/// The type of a route: the kernel's action for its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouteKind {
    /// Packets are forwarded to a next hop.
    Unicast,
    /// Packets to the address are for this host.
    Local,
    /// Packets to the address are for all hosts of a link.
    Broadcast,
    /// Packets are for this host, as with `Local`; several hosts have the address.
    Anycast,
    /// Packets to the address are for a group.
    Multicast,
    /// Packets are dropped without an ICMP error.
    Blackhole,
    /// Packets are refused: host unreachable.
    Unreachable,
    /// Packets are refused: administratively prohibited.
    Prohibit,
    /// The table has no route; continue with the next table.
    Throw,
}

impl RouteKind {
    pub(super) fn from_kernel(kind: u8) -> Option<Self> {
        Some(match kind {
            libc::RTN_UNICAST => Self::Unicast,
            libc::RTN_LOCAL => Self::Local,
            libc::RTN_BROADCAST => Self::Broadcast,
            libc::RTN_ANYCAST => Self::Anycast,
            libc::RTN_MULTICAST => Self::Multicast,
            libc::RTN_BLACKHOLE => Self::Blackhole,
            libc::RTN_UNREACHABLE => Self::Unreachable,
            libc::RTN_PROHIBIT => Self::Prohibit,
            libc::RTN_THROW => Self::Throw,
            _ => return None,
        })
    }
}

/// The route of packets to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteHit {
    /// The type of the route.
    pub kind: RouteKind,
    /// The interface; 0 if routes of this type have none, such as blackhole.
    pub oif: u32,
    /// The router; `None` if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The source address that the route prefers.
    pub prefsrc: Option<IpAddr>,
    /// The MTU that the route sets.
    pub mtu: Option<u32>,
}

/// The kernel's entry for a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// The neighbour's Ethernet address, if it is resolved.
    pub mac: Option<LinkAddress>,
    /// State of the neighbour entry (`NUD_*`).
    pub state: u16,
}

impl Neighbour {
    /// Returns the link-layer address, if frames may be sent to it.
    pub fn usable(&self) -> Option<LinkAddress> {
        const VALID: u16 = libc::NUD_PERMANENT
            | libc::NUD_NOARP
            | libc::NUD_REACHABLE
            | libc::NUD_PROBE
            | libc::NUD_STALE
            | libc::NUD_DELAY;
        self.mac.filter(|_| self.state & VALID != 0)
    }

    /// Whether the neighbour has not answered the kernel's requests.
    pub fn is_failed(&self) -> bool {
        self.state & libc::NUD_FAILED != 0
    }

    /// Whether the entry is permanent, or does not need to be resolved (`NUD_NOARP`).
    pub fn is_static(&self) -> bool {
        self.state & (libc::NUD_PERMANENT | libc::NUD_NOARP) != 0
    }
}

/// The changes that a series of events has caused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Whether a link was added, changed or removed.
    pub links: bool,
    /// Interfaces on which this host's addresses have to be announced again: they are new, have
    /// come up, have another MAC address or master, or the kernel requests it
    /// (`NETDEV_NOTIFY_PEERS`: a virtual machine has moved, a bond has failed over).
    pub appeared: Vec<u32>,
    /// Whether an address was added, changed or removed.
    pub addresses: bool,
    /// Whether a route was added, changed or removed.
    pub routes: bool,
    /// The changed neighbours (interface and address).
    pub neighbours: Vec<(u32, IpAddr)>,
    /// Whether a neighbour has a new link-layer address, or has lost it.
    pub moved: bool,
    /// Whether a rule, route or proxy neighbour with the dataplane's protocol number was deleted,
    /// or may have been.
    pub steering: bool,
    /// Whether events were lost, and all tables were read again.
    pub resynchronised: bool,
}

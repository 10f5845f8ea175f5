//! An entry of the connection table: a plain slot of fixed size.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use core::time::Duration;

use super::flag;
use super::link::Link;
use crate::{Family, Forwarding, Instant, Protocol, State};

/// No slot.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// In [`Slot::control`]: the other bits are the index of a template.
pub(crate) const TEMPLATE_BIT: u32 = 1 << 31;

/// The identity of a connection: protocol, client and virtual address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) protocol: Protocol,
    pub(crate) client: SocketAddr,
    pub(crate) virt: SocketAddr,
}

/// A connection or a template: 128 bytes for IPv4 and IPv6 alike. The first cache line is what a lookup reads, the
/// second what a hit changes.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct Slot {
    pub(super) client_addr: u128,
    pub(super) virt_addr: u128,
    pub(super) server_addr: u128,
    pub(super) client_port: u16,
    pub(super) virt_port: u16,
    pub(super) server_port: u16,
    pub(super) protocol: Protocol,
    pub(super) family: Family,
    /// Next in the list of free slots.
    pub(super) next: u32,
    pub(crate) flags: u32,

    /// When the timer fires.
    pub(crate) expires: Instant,
    pub(crate) link: Link,
    /// Seconds that the next packet gives the timer.
    pub(crate) timeout: u32,
    /// Index of the server's record, or [`NO_SLOT`].
    pub(crate) server: u32,
    /// The entry that controls this one, or [`NO_SLOT`]; with [`TEMPLATE_BIT`], a template of the control half.
    pub(crate) control: u32,
    /// Entries that this one controls.
    pub(crate) controlled: u32,
    /// Packets from the client.
    pub(crate) in_packets: u32,
    pub(crate) mark: u32,
    /// When the timer that was last synchronised ends, in ticks of 4 ms; the lower two bits count retries.
    pub(crate) sync_end: u32,
    pub(crate) state: State,
    /// The state that was synchronised last.
    pub(crate) old_state: State,
    pub(super) server_family: Family,
}

const _: () = assert!(size_of::<Slot>() == 128);

impl Slot {
    pub(crate) fn new(key: &Key, server: SocketAddr, flags: u32) -> Self {
        let (client_addr, family) = pack(key.client.ip());
        let (virt_addr, _) = pack(key.virt.ip());
        let (server_addr, server_family) = pack(server.ip());
        Self {
            client_addr,
            virt_addr,
            server_addr,
            client_port: key.client.port(),
            virt_port: key.virt.port(),
            server_port: server.port(),
            protocol: key.protocol,
            family,
            next: NO_SLOT,
            flags,
            expires: Instant::ZERO,
            link: Link::UNLINKED,
            // Until the state machine sets another one (`ip_vs_conn_new`).
            timeout: 3,
            server: NO_SLOT,
            control: NO_SLOT,
            controlled: 0,
            in_packets: 0,
            mark: 0,
            sync_end: 0,
            state: State::NONE,
            old_state: State::NONE,
            server_family,
        }
    }

    /// When the timer was started last: at the entry's last packet.
    pub(crate) const fn last_restart(&self) -> Instant {
        let timeout = self.timeout as u64 * 1_000_000_000;
        Instant::from_nanos(self.expires.as_nanos().saturating_sub(timeout))
    }

    /// Time since the last packet.
    pub(crate) fn idle(&self, now: Instant) -> Duration {
        let left = self.expires.saturating_since(now);
        Duration::from_secs(self.timeout.into()).saturating_sub(left)
    }

    pub(crate) const fn protocol(&self) -> Protocol {
        self.protocol
    }

    pub(crate) fn client(&self) -> SocketAddr {
        SocketAddr::new(unpack(self.client_addr, self.family), self.client_port)
    }

    pub(crate) fn virt(&self) -> SocketAddr {
        SocketAddr::new(unpack(self.virt_addr, self.family), self.virt_port)
    }

    pub(crate) fn server_addr(&self) -> SocketAddr {
        SocketAddr::new(
            unpack(self.server_addr, self.server_family),
            self.server_port,
        )
    }

    /// The template that controls the connection.
    pub(crate) const fn template(&self) -> Option<u32> {
        if self.control != NO_SLOT && self.control & TEMPLATE_BIT != 0 {
            Some(self.control & !TEMPLATE_BIT)
        } else {
            None
        }
    }

    /// The connection that controls this one.
    pub(crate) const fn controller(&self) -> Option<u32> {
        if self.control & TEMPLATE_BIT == 0 {
            Some(self.control)
        } else {
            None
        }
    }

    pub(crate) const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Bits of [`flags`](Self::flags) that a lookup tells entries apart by. A template that is hidden is not found; a
    /// connection that is about to end is, as in the kernel.
    pub(super) const fn kinds(flags: u32) -> u32 {
        let hidden = if flags & flag::TEMPLATE != 0 {
            flag::DYING
        } else {
            0
        };
        flag::TEMPLATE | flag::NO_CPORT | hidden
    }

    /// Whether the packets of that side find either entry.
    pub(super) fn is_found_like(&self, other: &Self, side: Side) -> bool {
        let same_peer = match side {
            Side::In => {
                self.virt_addr == other.virt_addr
                    && self.virt_port == other.virt_port
                    && self.flags & Self::kinds(self.flags)
                        == other.flags & Self::kinds(other.flags)
            }
            Side::Out => {
                self.server_addr == other.server_addr && self.server_port == other.server_port
            }
        };
        same_peer
            && self.client_addr == other.client_addr
            && self.client_port == other.client_port
            && self.protocol == other.protocol
            && self.family == other.family
    }

    pub(crate) const fn method(&self) -> Forwarding {
        Forwarding::from_bits(self.flags & flag::METHOD)
    }
}

/// Whose packets an entry is found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The client's: from the client to the virtual address. Where nothing is translated, replies have the same
    /// addresses and are found by them, too.
    In,
    /// Those of a server behind NAT, to the client. Replies of full NAT go to a local address, never to a client.
    Out,
}

impl Side {
    /// What the index refers to an entry's side by.
    pub(super) const fn reference(self, index: u32) -> u32 {
        index << 1 | self as u32
    }

    pub(super) const fn of(reference: u32) -> (u32, Self) {
        let side = if reference & 1 == 0 {
            Self::In
        } else {
            Self::Out
        };
        (reference >> 1, side)
    }
}

/// Flags of a free slot; no entry can have all bits.
pub(super) const FREE: u32 = u32::MAX;

#[inline]
pub(super) fn pack(addr: IpAddr) -> (u128, Family) {
    match addr {
        IpAddr::V4(addr) => (u128::from(addr.to_bits()), Family::V4),
        IpAddr::V6(addr) => (addr.to_bits(), Family::V6),
    }
}

#[inline]
pub(super) fn unpack(bits: u128, family: Family) -> IpAddr {
    match (family, u32::try_from(bits)) {
        (Family::V4, Ok(bits)) => IpAddr::V4(Ipv4Addr::from_bits(bits)),
        _ => IpAddr::V6(Ipv6Addr::from_bits(bits)),
    }
}

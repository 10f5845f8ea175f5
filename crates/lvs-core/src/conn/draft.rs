//! A connection outside of the table: before it is inserted, or a copy of its entry.

use core::net::SocketAddr;

use super::flag;
use crate::{Forwarding, Protocol, State};

/// Index that means "no entry" or "no server".
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// Set in a reference to a controlling entry if that entry is a template; the other bits are the
/// index of the entry.
pub(crate) const TEMPLATE_BIT: u32 = 1 << 31;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) protocol: Protocol,
    pub(crate) client: SocketAddr,
    pub(crate) virt: SocketAddr,
}

/// The fields of an entry, apart from its deadline and its position in the wheel, before they are
/// written to a slot, or after they were read from it.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    pub(crate) key: Key,
    pub(crate) server_addr: SocketAddr,
    pub(crate) flags: u32,
    /// Seconds from the latest packet until the connection expires.
    pub(crate) timeout: u32,
    pub(crate) server: u32,
    /// Index of the controlling entry, or [`NO_SLOT`]; with [`TEMPLATE_BIT`], index of a template
    /// in [`Control`](crate::Control).
    pub(crate) control: u32,
    pub(crate) in_packets: u32,
    pub(crate) mark: u32,
    pub(crate) state: State,
    /// The state that was synchronised last.
    pub(crate) old_state: State,
}

impl Draft {
    pub(crate) const fn new(key: &Key, server_addr: SocketAddr, flags: u32) -> Self {
        Self {
            key: *key,
            server_addr,
            flags,
            // The state machine replaces this timeout (`ip_vs_conn_new`).
            timeout: 3,
            server: NO_SLOT,
            control: NO_SLOT,
            in_packets: 0,
            mark: 0,
            state: State::NONE,
            old_state: State::NONE,
        }
    }

    pub(crate) const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    pub(crate) const fn method(&self) -> Forwarding {
        Forwarding::from_bits(self.flags & flag::METHOD)
    }

    pub(super) const fn is_narrow(&self) -> bool {
        self.key.client.is_ipv4() && self.key.virt.is_ipv4() && self.server_addr.is_ipv4()
    }

    /// Whether replies are looked up by the server's address.
    pub(super) fn has_out_side(&self) -> bool {
        self.method() == Forwarding::Nat && !self.has(flag::TEMPLATE)
    }
}

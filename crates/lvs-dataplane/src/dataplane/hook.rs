//! The hook of an embedding program on the packet path.

use std::fmt;

use lvs_core::PacketMeta;

/// The decision of a hook on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookAction {
    /// The director decides about the packet.
    Continue,
    /// Pass the packet to the host's network stack.
    Host,
    /// Drop the packet, without an answer to its sender.
    Drop,
}

/// A hook that receives packets before the director decides. Some packets do not reach it, such as
/// ICMP errors, malformed packets, and packets that `ignore_tunneled` passes to the host. It runs
/// on the packet path: it must be quick and must not block.
pub trait PacketHook: Send {
    /// Decides on a packet before the director does.
    fn packet(&mut self, meta: &PacketMeta<'_>) -> HookAction;
}

impl fmt::Debug for dyn PacketHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PacketHook")
    }
}

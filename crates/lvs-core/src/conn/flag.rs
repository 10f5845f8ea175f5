//! Bits of a slot's flags, numbered as in the synchronisation protocol.

/// Mask of the forwarding method.
pub(crate) const METHOD: u32 = 0x0007;
/// A synchronisation message or an update of a peer created the entry.
pub(crate) const SYNC: u32 = 0x0020;
/// The server's replies do not pass through the director: the forwarding method does not translate
/// addresses, and no packet from the server has arrived.
pub(crate) const NO_OUTPUT: u32 = 0x0080;
/// The connection is counted as inactive.
pub(crate) const INACTIVE: u32 = 0x0100;
/// A synchronisation message contained an adjustment of the server's sequence numbers.
pub(crate) const OUT_SEQ: u32 = 0x0200;
/// A synchronisation message contained an adjustment of the client's sequence numbers.
pub(crate) const IN_SEQ: u32 = 0x0400;
/// The client's port is unknown until its first packet arrives.
pub(crate) const NO_CPORT: u32 = 0x0800;
pub(crate) const TEMPLATE: u32 = 0x1000;
/// The service uses one-packet scheduling.
pub(crate) const ONE_PACKET: u32 = 0x2000;
/// In the kernel: netfilter tracks the connection, too. Here, only synchronisation messages use it.
pub(crate) const NFCT: u32 = 0x10000;

// Flags of this crate, which the kernel does not have:

/// A health check opened the connection through the VIP ([`Control::pin`](crate::Control::pin)).
pub(crate) const PROBE: u32 = 0x0008_0000;
/// Position of the first bit of [`PEER`], the number of the peer that owns a borrowed connection.
pub(crate) const PEER_SHIFT: u32 = 20;
pub(crate) const PEER: u32 = 0x0070_0000;
/// A peer owns the connection. No packet of the connection has arrived at this director since the
/// peer's last update.
pub(crate) const BORROWED: u32 = 0x0080_0000;
/// This director owns the connection, and replicates it to peers.
pub(crate) const REPLICATED: u32 = 0x0100_0000;
/// The entry controls other entries, or has controlled some.
pub(crate) const CONTROLS: u32 = 0x0200_0000;
/// The server's first answer is awaited, to measure the time until then, and to count the attempt
/// over TCP.
pub(crate) const TIMED: u32 = 0x0400_0000;
/// The server was removed, and the connection does not continue if the server is added again.
pub(crate) const GONE: u32 = 0x0800_0000;
/// The next sequence numbers of both directions are stored, for resets.
pub(crate) const TRACKED: u32 = 0x1000_0000;
/// A helper inspects the connection's payload.
pub(crate) const HELPED: u32 = 0x2000_0000;
/// The connection has ended. It is removed before the next packet, unless that packet is the host's
/// own reply. In a template: look-ups skip it.
pub(crate) const DYING: u32 = 0x4000_0000;
/// The server's first answer over UDP is awaited, to count the attempt. The offload of the
/// connection clears this flag.
pub(crate) const AWAITED: u32 = 0x8000_0000;
/// Flags of connections whose packets all need an additional check.
pub(crate) const WATCHED: u32 = TIMED | GONE | TRACKED | AWAITED;
/// Flags of connections whose packets must take the slow path: a packet may change other fields of
/// the connection than counters and deadline, or its content may be changed.
pub(crate) const SLOW_PATH: u32 = HELPED
    | ONE_PACKET
    | GONE
    | TRACKED
    | TIMED
    | AWAITED
    | OUT_SEQ
    | IN_SEQ
    | NO_CPORT
    | CONTROLS
    | TEMPLATE
    | PROBE
    | DYING;
const _: () = assert!(SLOW_PATH & WATCHED == WATCHED);
/// Connections with one of these flags cannot be offloaded. Connections with `AWAITED` can: their
/// offload clears this flag. Connections with `TRACKED` can, because it is sufficient that
/// userspace sees some of their sequence numbers.
pub(crate) const USERSPACE: u32 = SLOW_PATH & !(TRACKED | AWAITED);
/// Flags that have a meaning only at this director, and are not replicated.
pub(crate) const OWN: u32 = PROBE
    | PEER
    | BORROWED
    | REPLICATED
    | CONTROLS
    | TIMED
    | AWAITED
    | GONE
    | TRACKED
    | HELPED
    | DYING;

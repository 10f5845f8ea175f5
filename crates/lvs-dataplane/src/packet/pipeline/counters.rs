//! What became of frames, and how many.

use crate::packet::drop::FrameDrop;

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Sent on a port, whole, in segments or in fragments.
    Sent,
    /// Waits for the link-layer address of its next hop.
    Held,
    /// Left to the host, which has its own copy.
    Left,
    /// Given to the host through its TUN device.
    GivenBack,
    /// Answered here: ARP, NDP, echo and resets for addresses that the engine owns.
    Answered,
    /// A fragment that was put aside; its datagram gets a fate of its own.
    Fragment,
    /// Discarded.
    Dropped(FrameDrop),
}

/// What became of all frames. `received + reassembled` equals the sum of all fates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Frames that came in.
    pub received: u64,
    /// Datagrams put together from fragments.
    pub reassembled: u64,
    /// Frames with fate [`Fate::Sent`].
    pub sent: u64,
    /// Frames with fate [`Fate::Held`].
    pub held: u64,
    /// Of these, sent later.
    pub released: u64,
    /// Frames with fate [`Fate::Left`].
    pub left: u64,
    /// Frames with fate [`Fate::GivenBack`].
    pub given_back: u64,
    /// Frames with fate [`Fate::Answered`].
    pub answered: u64,
    /// Frames with fate [`Fate::Fragment`].
    pub fragments: u64,
    /// Frames with fate [`Fate::Dropped`], by [`FrameDrop::index`].
    pub dropped: [u64; FrameDrop::ALL.len()],
    /// Frames of VLANs that have no device here, among those left to the host.
    pub tagged: u64,
    /// ICMP errors made here.
    pub icmp_sent: u64,
    /// TCP resets made here.
    pub resets_sent: u64,
    /// Frames that left, segments and fragments counted one by one.
    pub emitted: u64,
}

impl Counters {
    /// Frames dropped, for whatever reason.
    pub fn dropped_total(&self) -> u64 {
        self.dropped.iter().sum()
    }

    /// Frames dropped for `reason`.
    pub const fn dropped_for(&self, reason: FrameDrop) -> u64 {
        self.dropped[reason.index()]
    }

    /// The sum of all fates; equals `received + reassembled`.
    pub fn accounted(&self) -> u64 {
        self.sent
            + self.held
            + self.left
            + self.given_back
            + self.answered
            + self.fragments
            + self.dropped_total()
    }

    pub(super) const fn count(&mut self, fate: Fate) {
        match fate {
            Fate::Sent => self.sent += 1,
            Fate::Held => self.held += 1,
            Fate::Left => self.left += 1,
            Fate::GivenBack => self.given_back += 1,
            Fate::Answered => self.answered += 1,
            Fate::Fragment => self.fragments += 1,
            Fate::Dropped(reason) => self.dropped[reason.index()] += 1,
        }
    }
}

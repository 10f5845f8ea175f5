//! The fates of frames, and the counters of fates.

use std::ops::AddAssign;

use crate::drop::FrameDrop;

/// The fate of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Sent on a port, whole, in segments or in fragments.
    Sent,
    /// Waiting until the link-layer address of the next hop is known, or until the replies to the
    /// packet are intercepted.
    Held,
    /// Left to the host, which has its own copy of the frame.
    Left,
    /// Reinjected into the host, through its TUN device or on the interface on which it arrived.
    GivenBack,
    /// Answered by the dataplane, for example ARP, or an echo request to an address that it owns.
    Answered,
    /// Stored as a fragment; the reassembled datagram gets its own fate.
    Fragment,
    /// Passed to the worker that has the packet's connection.
    HandedOver,
    /// Dropped for this reason.
    Dropped(FrameDrop),
}

/// A field of [`Counters`]: a number, or an array with a number for each reason.
trait Count {
    const ZERO: Self;

    fn add(&mut self, other: &Self);
}

impl Count for u64 {
    const ZERO: Self = 0;

    fn add(&mut self, other: &Self) {
        *self += other;
    }
}

impl<const N: usize> Count for [u64; N] {
    const ZERO: Self = [0; N];

    fn add(&mut self, other: &Self) {
        for (ours, theirs) in self.iter_mut().zip(other) {
            *ours += theirs;
        }
    }
}

/// Declares the counters once, so that a sum always includes all of them.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: $kind:ty,)+) => {
        /// Counters of the fates of all frames. `received + reassembled + taken` equals the sum of
        /// all fates. The counters of several workers can be added.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: $kind,)+
        }

        impl Default for Counters {
            fn default() -> Self {
                Self {
                    $($name: <$kind as Count>::ZERO,)+
                }
            }
        }

        impl AddAssign<&Self> for Counters {
            fn add_assign(&mut self, other: &Self) {
                $(Count::add(&mut self.$name, &other.$name);)+
            }
        }
    };
}

counters! {
    /// Number of frames that the worker has received.
    received: u64,
    /// Number of datagrams that were reassembled from fragments.
    reassembled: u64,
    /// Number of frames and datagrams that other workers passed to this one.
    taken: u64,
    /// Number of frames with fate [`Fate::Sent`].
    sent: u64,
    /// Number of frames with fate [`Fate::Held`].
    held: u64,
    /// Number of waiting frames that were sent later.
    released: u64,
    /// Number of frames with fate [`Fate::Left`].
    left: u64,
    /// Number of frames with fate [`Fate::GivenBack`].
    given_back: u64,
    /// Number of frames with fate [`Fate::Answered`].
    answered: u64,
    /// Number of frames with fate [`Fate::Fragment`].
    fragments: u64,
    /// Number of frames with fate [`Fate::HandedOver`].
    handed_over: u64,
    /// Number of frames with fate [`Fate::Dropped`], by [`FrameDrop::index`].
    dropped: [u64; FrameDrop::ALL.len()],
    /// Number of frames that were left to the host because of a VLAN tag.
    tagged: u64,
    /// Number of ICMP errors that the dataplane has sent.
    icmp_sent: u64,
    /// Number of TCP resets that the dataplane has sent.
    resets_sent: u64,
    /// Number of frames that were sent or reinjected; segments and fragments are counted
    /// individually.
    emitted: u64,
    /// Number of frames that were copied because the backend's frame had too little room in front.
    copied: u64,
}

impl Counters {
    /// Number of dropped frames, for all reasons.
    pub fn dropped_total(&self) -> u64 {
        self.dropped.iter().sum()
    }

    /// Number of frames dropped for `reason`.
    pub const fn dropped_for(&self, reason: FrameDrop) -> u64 {
        self.dropped[reason.index()]
    }

    /// The sum of all fates; equals `received + reassembled + taken`.
    pub fn accounted(&self) -> u64 {
        self.sent
            + self.held
            + self.left
            + self.given_back
            + self.answered
            + self.fragments
            + self.handed_over
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
            Fate::HandedOver => self.handed_over += 1,
            Fate::Dropped(reason) => self.dropped[reason.index()] += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_of_counters_includes_every_counter() {
        let fates = [
            Fate::Sent,
            Fate::Held,
            Fate::Left,
            Fate::GivenBack,
            Fate::Answered,
            Fate::Fragment,
            Fate::HandedOver,
        ];
        let mut one = Counters {
            received: 7 + FrameDrop::ALL.len() as u64,
            tagged: 1,
            resets_sent: 1,
            copied: 1,
            ..Counters::default()
        };
        fates.into_iter().for_each(|fate| one.count(fate));
        let drops = FrameDrop::ALL.iter().copied();
        drops.for_each(|reason| one.count(Fate::Dropped(reason)));
        assert_eq!(one.received, one.accounted());
        let mut sum = one.clone();
        sum += &one;
        let doubled = |text: &str| {
            text.split(|c: char| !c.is_ascii_digit())
                .filter(|number| !number.is_empty())
                .map(|number| number.parse::<u64>().expect("the text is a number"))
                .map(|number| 2 * number)
                .collect::<Vec<_>>()
        };
        let numbers = |counters: &Counters| format!("{counters:?}");
        let halves = doubled(&numbers(&one));
        let sums: Vec<u64> = doubled(&numbers(&sum)).iter().map(|n| n / 2).collect();
        assert_eq!(halves, sums);
    }
}

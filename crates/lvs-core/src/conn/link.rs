//! A slot's place in the timing wheel.

use super::NO_SLOT;

/// A slot's place in the wheel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) bucket: u16,
    /// The tick at which the bucket comes up at the earliest; `u64::MAX` while the slot is not linked.
    pub(super) armed: u64,
}

impl Link {
    pub(crate) const UNLINKED: Self = Self {
        prev: NO_SLOT,
        next: NO_SLOT,
        bucket: 0,
        armed: u64::MAX,
    };
}

//! Synchronisation.

use crate::Instant;
use crate::conn::{Slot, Template};
use crate::shard::Shard;

/// Time in the kernel's ticks of 4 ms, as far as 32 bits go.
#[expect(clippy::cast_possible_truncation, reason = "differences matter only")]
pub(crate) const fn ticks(now: Instant) -> u32 {
    (now.as_nanos() / 4_000_000) as u32
}

impl Shard {
    pub(crate) fn sync_once(&mut self, _: &Slot, _: Option<&Template>, _: Instant) {}
}

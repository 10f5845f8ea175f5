//! Time, as a parameter that the caller passes.

use core::ops::{Add, Sub};
use core::time::Duration;

/// A moment on a monotonic clock that the caller reads: nanoseconds since an origin of the caller's
/// choice.
///
/// The origin must stay the same for the life of a director. Only differences of times are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// The origin, from which all moments are counted.
    pub const ZERO: Self = Self(0);

    /// A moment `nanos` nanoseconds after the origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// A moment `secs` seconds after the origin.
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000_000))
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The number of the kernel's ticks of 4 ms since the origin, modulo 2^32.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "only differences of times are used"
    )]
    pub(crate) const fn ticks(self) -> u32 {
        (self.0 / 4_000_000) as u32
    }

    /// Time passed since `earlier`; zero if `earlier` is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    /// Saturates at the end of time (584 years after the origin).
    fn add(self, rhs: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, rhs: Self) -> Duration {
        self.saturating_since(rhs)
    }
}

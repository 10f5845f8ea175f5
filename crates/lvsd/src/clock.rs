//! Clocks for deadlines and ages.
//!
//! NTP or an operator may set the wall clock, so deadlines use the time since boot. A deadline on
//! disk also contains the boot id, because that time begins again with each boot.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Returns the present time in seconds since 1970.
pub fn unix_time() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// One moment on the wall clock and on the boot-time clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Wall clock in seconds since 1970.
    pub unix: u64,
    /// Seconds since boot, including time in suspension.
    pub boot: u64,
}

impl Now {
    /// Reads both clocks. `unix` is `boot` plus a constant whole number of seconds, so that both
    /// advance together; it may be up to a second too low.
    pub fn read() -> Self {
        let boot = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default();
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let ahead = unix.unwrap_or_default().saturating_sub(boot);
        Self {
            unix: boot.as_secs().saturating_add(ahead.as_secs()),
            boot: boot.as_secs(),
        }
    }

    /// Converts a time in seconds since boot to seconds since 1970 by the present wall clock. The
    /// age of an event thus remains correct after the wall clock was set.
    pub const fn unix_of(self, boot: u64) -> u64 {
        self.unix.saturating_sub(self.boot.saturating_sub(boot))
    }
}

/// A time since boot together with the boot id, for files that survive reboots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    boot: String,
    seconds: u64,
}

impl Moment {
    /// A moment of this boot: `seconds` after its start.
    pub fn new(seconds: u64) -> Self {
        Self {
            boot: boot_id().to_owned(),
            seconds,
        }
    }

    /// Seconds since boot; the boot may be an earlier one.
    pub const fn seconds(&self) -> u64 {
        self.seconds
    }

    /// Seconds since boot; `None` if the moment belongs to another boot, or the boot is unknown.
    pub fn of_this_boot(&self) -> Option<u64> {
        (!self.boot.is_empty() && self.boot == boot_id()).then_some(self.seconds)
    }
}

/// The identity of the current boot; empty if the kernel does not provide it.
fn boot_id() -> &'static str {
    static ID: OnceLock<String> = OnceLock::new();
    ID.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        id.unwrap_or_default().trim().to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Now {
        /// Both clocks at this number of seconds.
        pub(crate) const fn at(seconds: u64) -> Self {
            Self {
                unix: seconds,
                boot: seconds,
            }
        }
    }

    impl Moment {
        /// A moment of an earlier boot.
        pub(crate) fn of_another_boot(seconds: u64) -> Self {
            Self {
                boot: "another".to_owned(),
                seconds,
            }
        }
    }

    #[test]
    fn clock_step_does_not_change_the_age_of_a_moment() {
        let age = |unix| {
            let now = Now { unix, boot: 160 };
            unix - now.unix_of(100)
        };
        assert_eq!(age(1_000_060), 60);
        // The clock was set an hour ahead, or an hour back.
        assert_eq!((age(1_003_660), age(996_460)), (60, 60));
        let (one, other) = (Now::read(), Now::read());
        let ahead = |now: Now| now.unix - now.boot;
        assert!(ahead(one).abs_diff(ahead(other)) <= 1, "{one:?} {other:?}");
    }

    #[test]
    fn moment_of_another_boot_is_recognised_and_own_moment_survives_json() {
        assert_eq!(Moment::new(7).of_this_boot(), Some(7));
        assert_eq!(Moment::of_another_boot(7).of_this_boot(), None);
        let text = serde_json::to_string(&Moment::new(7)).unwrap();
        let again: Moment = serde_json::from_str(&text).unwrap();
        assert_eq!(again.of_this_boot(), Some(7));
    }
}

//! How soon a packet worker gets a processor, and how much of it.
//!
//! Packets are not to wait for what other programs compute, as they do not wait for it in the
//! kernel. So a worker runs in real time, where that is permitted, but only while it takes less
//! than half of a processor: one that is flooded is no reason for anything else on the host to
//! stand still. Then, and where real time is not permitted, it has a larger share than others, in
//! shorter slices.

use std::time::{Duration, Instant as SystemInstant};

use tracing::debug;

use crate::sys::{run_in_real_time, run_in_slices, thread_time};

/// How much more of a processor packet workers get than other programs, where those want it too
/// (sched_setattr(2)).
pub(super) const NICE: i32 = -10;
/// How long a packet worker runs before others that want to have their turn. Others have longer
/// ones: it need not wait for their end when it wakes up.
const SLICE: Duration = Duration::from_micros(100);
/// How often it is decided anew.
const PERIOD: Duration = Duration::from_millis(100);
/// One in so many parts of a processor: what takes more is no longer run in real time.
const MOST: u32 = 2;
/// What takes less is, again.
const CALM: u32 = 4;

/// The priority of the thread that made it.
#[derive(Debug)]
pub(super) struct Priority {
    /// Whether it may run in real time.
    permitted: bool,
    real_time: bool,
    /// When that was last decided, and what the thread had computed until then.
    since: SystemInstant,
    computed: Duration,
}

impl Priority {
    /// That of the calling thread, from now on; `real_time` if it is wanted.
    pub(super) fn new(real_time: bool) -> Self {
        let mut priority = Self {
            permitted: real_time,
            real_time: false,
            since: SystemInstant::now(),
            computed: thread_time(),
        };
        run_before_others();
        priority.set(real_time);
        priority
    }

    /// Decides anew, if it is time to.
    pub(super) fn look(&mut self, now: SystemInstant) {
        let passed = now.saturating_duration_since(self.since);
        if !self.permitted || passed < PERIOD {
            return;
        }
        let computed = thread_time();
        let took = computed.saturating_sub(self.computed);
        (self.since, self.computed) = (now, computed);
        self.set(goes_on(self.real_time, took, passed));
    }

    fn set(&mut self, real_time: bool) {
        if real_time == self.real_time {
            return;
        }
        if !real_time {
            run_before_others();
        } else if let Err(error) = run_in_real_time() {
            debug!("packet workers do not run in real time (sched_setattr: {error})");
            self.permitted = false;
            return;
        }
        self.real_time = real_time;
    }
}

/// Whether a worker that took so much of the time that has passed is to run in real time.
fn goes_on(real_time: bool, took: Duration, passed: Duration) -> bool {
    took * if real_time { MOST } else { CALM } < passed
}

/// Without the right to more than others get, as much as they, but sooner.
fn run_before_others() {
    if let Err(error) = run_in_slices(NICE, SLICE) {
        debug!("packet workers have no priority over other processes (sched_setattr: {error})");
        let nice = rustix::process::getpriority_process(None).unwrap_or(0);
        if let Err(error) = run_in_slices(nice, SLICE) {
            debug!("packet workers run like any other process (sched_setattr: {error})");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_permits_the_priority_of_packet_workers() {
        // Its bounding set has no CAP_SYS_NICE.
        let unit = include_str!("../../../../contrib/lvs-dataplane.service");
        for line in [&*format!("LimitNICE={NICE}"), "LimitRTPRIO=1"] {
            assert!(unit.lines().any(|other| other == line), "{line}");
        }
        assert!(!unit.contains("\nRestrictRealtime=yes"));
    }

    #[test]
    fn half_of_a_processor_is_the_most_that_is_had_in_real_time() {
        let (part, all) = (Duration::from_millis, Duration::from_millis(20));
        assert!(goes_on(true, part(9), all) && !goes_on(true, part(10), all));
        // Not again at once.
        assert!(!goes_on(false, part(9), all) && goes_on(false, part(4), all));
        assert!(goes_on(true, Duration::ZERO, Duration::MAX / 8));
    }

    /// What the kernel says: 1 is SCHED_FIFO.
    fn policy() -> String {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("a thread has one");
        let fields = stat.rsplit(')').next().unwrap_or_default();
        // The 41st of all, behind the two that end with the name.
        fields.split_whitespace().nth(38).unwrap_or("?").to_owned()
    }

    #[test]
    fn a_worker_that_is_flooded_leaves_real_time_and_comes_back() {
        std::thread::spawn(|| {
            let mut priority = Priority::new(true);
            if !priority.permitted {
                // Not everywhere: then it is asked for once.
                assert_eq!(policy(), "0");
                priority.look(SystemInstant::now() + PERIOD);
                assert_eq!(policy(), "0");
                return;
            }
            assert_eq!(policy(), "1");
            let computed = thread_time();
            while thread_time() < computed + PERIOD {}
            // As if nothing but that had happened, whatever else ran meanwhile.
            priority.since = SystemInstant::now();
            priority.look(SystemInstant::now() + PERIOD);
            assert_eq!(policy(), "0");
            let idle = priority.since + 50 * PERIOD;
            priority.look(idle);
            assert_eq!(policy(), "1");
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn real_time_is_only_for_those_who_want_it() {
        std::thread::spawn(|| {
            let mut priority = Priority::new(false);
            priority.look(priority.since + 50 * PERIOD);
            assert_eq!(policy(), "0");
        })
        .join()
        .expect("no panic");
    }
}

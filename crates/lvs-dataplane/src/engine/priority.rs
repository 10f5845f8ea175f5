//! How soon a packet worker gets a processor, and how much of it.
//!
//! Packets are not to wait for what other programs compute, as they do not wait for it in the
//! kernel. So a worker runs in real time, where that is permitted, but only while it takes less
//! than half of a processor: one that is flooded is no reason for anything else on the host to
//! stand still. Then, and where real time is not permitted, it has a larger share than others, in
//! shorter slices. It is looked at between any two batches and jobs, so that the length of a round,
//! which goes with the number of interfaces and with what waits, is no reason either.

use std::io;
use std::time::{Duration, Instant as SystemInstant};

use tracing::debug;

use lvs_sys::{run_in_real_time, run_in_slices, thread_time};

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
pub(super) struct Priority {
    thread: Box<dyn Thread>,
    /// Whether it may run in real time.
    permitted: bool,
    real_time: bool,
    /// When that was last decided, and what the thread had computed until then.
    since: SystemInstant,
    computed: Duration,
    /// How often it took too much and left real time.
    demoted: u64,
}

/// A thread whose priority is set.
pub(super) trait Thread: Send {
    /// How long it has had a processor.
    fn computed(&self) -> Duration;

    /// Has it run in real time, or before others.
    fn run(&mut self, real_time: bool) -> io::Result<()>;
}

/// The thread that calls.
struct Calling;

impl Thread for Calling {
    fn computed(&self) -> Duration {
        thread_time()
    }

    fn run(&mut self, real_time: bool) -> io::Result<()> {
        if real_time {
            return run_in_real_time();
        }
        run_before_others();
        Ok(())
    }
}

impl Priority {
    /// That of the calling thread, from now on; `real_time` if it is wanted.
    pub(super) fn new(real_time: bool) -> Self {
        Self::of(Box::new(Calling), real_time, SystemInstant::now())
    }

    /// That of a thread from then on.
    pub(super) fn of(mut thread: Box<dyn Thread>, real_time: bool, now: SystemInstant) -> Self {
        // Refused, it runs like any other.
        let _ = thread.run(false);
        let mut priority = Self {
            permitted: real_time,
            real_time: false,
            since: now,
            computed: thread.computed(),
            demoted: 0,
            thread,
        };
        priority.set(real_time);
        priority
    }

    /// Decides anew, if it is time to.
    pub(super) fn look(&mut self, now: SystemInstant) {
        let passed = now.saturating_duration_since(self.since);
        if !self.permitted || passed < PERIOD {
            return;
        }
        let computed = self.thread.computed();
        let took = computed.saturating_sub(self.computed);
        (self.since, self.computed) = (now, computed);
        let goes_on = goes_on(self.real_time, took, passed);
        self.demoted += u64::from(self.real_time && !goes_on);
        self.set(goes_on);
    }

    /// How often it has left real time.
    pub(super) const fn demoted(&self) -> u64 {
        self.demoted
    }

    fn set(&mut self, real_time: bool) {
        if real_time == self.real_time {
            return;
        }
        match self.thread.run(real_time) {
            Err(error) if real_time => {
                debug!("packet workers do not run in real time (sched_setattr: {error})");
                self.permitted = false;
            }
            _ => self.real_time = real_time,
        }
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

/// A thread that computes when a test says so.
#[cfg(test)]
#[derive(Clone, Debug, Default)]
pub(super) struct Pretended {
    computed: std::sync::Arc<std::sync::atomic::AtomicU64>,
    real_time: std::sync::Arc<std::sync::atomic::AtomicBool>,
}

#[cfg(test)]
impl Pretended {
    pub(super) fn compute(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).expect("not so long");
        self.computed
            .fetch_add(time, std::sync::atomic::Ordering::Relaxed);
    }

    pub(super) fn is_real_time(&self) -> bool {
        self.real_time.load(std::sync::atomic::Ordering::Relaxed)
    }
}

#[cfg(test)]
impl Thread for Pretended {
    fn computed(&self) -> Duration {
        Duration::from_nanos(self.computed.load(std::sync::atomic::Ordering::Relaxed))
    }

    fn run(&mut self, real_time: bool) -> io::Result<()> {
        self.real_time
            .store(real_time, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However the flood and the looks fall together.
    #[test]
    fn whoever_only_computes_leaves_real_time_after_a_period_and_a_half() {
        const STEP: Duration = Duration::from_millis(1);
        for calm in 0..200_u32 {
            let thread = Pretended::default();
            let mut now = SystemInstant::now();
            let mut priority = Priority::of(Box::new(thread.clone()), true, now);
            for _ in 0..calm {
                now += STEP;
                priority.look(now);
            }
            assert!(thread.is_real_time());
            let flood = now;
            while thread.is_real_time() {
                thread.compute(STEP);
                now += STEP;
                priority.look(now);
                assert!(now - flood <= PERIOD + PERIOD / MOST, "{calm}");
            }
            assert_eq!(priority.demoted(), 1);
            for _ in 0..200 {
                now += STEP;
                priority.look(now);
            }
            assert!(thread.is_real_time());
            assert_eq!(priority.demoted(), 1);
        }
    }

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

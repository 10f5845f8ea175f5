//! The scheduling of packet workers by the kernel.
//!
//! Packets must not wait for the computations of other programs. So a worker has real-time
//! scheduling, if this is configured and the host permits it, while it uses less than half of a
//! processor. A worker that uses more is demoted until it uses less than a quarter, so that a flood
//! does not stop the rest of the host. A worker without real-time scheduling has a larger share of
//! the processor than other programs, and shorter slices, as far as the host permits these. A
//! worker checks its use of the processor between any two batches and jobs: a long round does not
//! delay the check.

use std::io;
use std::time::{Duration, Instant as SystemInstant};

use tracing::debug;

use lvs_sys::{run_in_real_time, run_in_slices, thread_time};

/// The nice value of packet workers without real-time scheduling (sched_setattr(2)).
pub(super) const NICE: i32 = -10;
/// Time slice of a packet worker without real-time scheduling. It is shorter than the slices of
/// other programs, so that a worker that wakes up preempts them.
const SLICE: Duration = Duration::from_micros(100);
/// Interval between two decisions about real-time scheduling.
const PERIOD: Duration = Duration::from_millis(100);
/// A worker that uses 1/`MOST` of a processor or more is demoted from real-time scheduling.
const MOST: u32 = 2;
/// A demoted worker that uses less than 1/`CALM` of a processor gets real-time scheduling again.
const CALM: u32 = 4;

/// The scheduling of one thread.
pub(super) struct Priority {
    thread: Box<dyn Thread>,
    /// Whether the thread may use real-time scheduling.
    permitted: bool,
    real_time: bool,
    /// Time of the last decision.
    since: SystemInstant,
    /// Processor time that the thread had used at the last decision.
    computed: Duration,
    demoted: u64,
}

/// A thread whose scheduling class this module controls.
pub(super) trait Thread: Send {
    /// The processor time that the thread has used.
    fn computed(&self) -> Duration;

    /// Sets real-time scheduling, or else a larger share with shorter slices.
    fn run(&mut self, real_time: bool) -> io::Result<()>;
}

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
    /// Controls the scheduling of the calling thread; with `real_time`, requests real-time
    /// scheduling.
    pub(super) fn new(real_time: bool) -> Self {
        Self::of(Box::new(Calling), real_time, SystemInstant::now())
    }

    /// Controls the scheduling of a thread from `now` on.
    pub(super) fn of(mut thread: Box<dyn Thread>, real_time: bool, now: SystemInstant) -> Self {
        // If the kernel refuses, the thread has ordinary scheduling.
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

    /// Decides about real-time scheduling again if [`PERIOD`] has passed since the last decision.
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

/// Whether a worker may have real-time scheduling, after it used `took` of processor time during
/// `passed`.
fn goes_on(real_time: bool, took: Duration, passed: Duration) -> bool {
    took * if real_time { MOST } else { CALM } < passed
}

/// Raises the calling thread's share of processor time and shortens its slices. If the process may
/// not raise it, the share stays.
fn run_before_others() {
    if let Err(error) = run_in_slices(NICE, SLICE) {
        debug!("packet workers have no priority over other processes (sched_setattr: {error})");
        let nice = rustix::process::getpriority_process(None).unwrap_or(0);
        if let Err(error) = run_in_slices(nice, SLICE) {
            debug!("packet workers run like any other process (sched_setattr: {error})");
        }
    }
}

/// A thread whose processor time the test sets.
#[cfg(test)]
#[derive(Clone, Debug, Default)]
pub(super) struct Pretended {
    computed: std::sync::Arc<std::sync::atomic::AtomicU64>,
    real_time: std::sync::Arc<std::sync::atomic::AtomicBool>,
}

#[cfg(test)]
impl Pretended {
    pub(super) fn compute(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).expect("the duration fits in 64 bits");
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

    /// A flood may begin at any time of a period.
    #[test]
    fn cpu_hog_is_demoted_within_a_period_and_a_half() {
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
    fn systemd_unit_permits_priority_of_packet_workers() {
        // The bounding set of the unit lacks CAP_SYS_NICE, so its limits must permit the priority.
        let unit = include_str!("../../../../contrib/lvs-dataplane.service");
        for line in [&*format!("LimitNICE={NICE}"), "LimitRTPRIO=1"] {
            assert!(unit.lines().any(|other| other == line), "{line}");
        }
        assert!(!unit.contains("\nRestrictRealtime=yes"));
    }

    #[test]
    fn real_time_worker_at_half_of_a_processor_is_demoted_until_below_a_quarter() {
        let (part, all) = (Duration::from_millis, Duration::from_millis(20));
        assert!(goes_on(true, part(9), all) && !goes_on(true, part(10), all));
        // A demoted worker regains real-time scheduling only far below the limit.
        assert!(!goes_on(false, part(9), all) && goes_on(false, part(4), all));
        assert!(goes_on(true, Duration::ZERO, Duration::MAX / 8));
    }

    /// The scheduling policy of the calling thread from /proc: 1 is SCHED_FIFO.
    fn policy() -> String {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("/proc is mounted");
        let fields = stat.rsplit(')').next().unwrap_or_default();
        // Field 41 of the file; the first two fields end with the name of the program.
        fields.split_whitespace().nth(38).unwrap_or("?").to_owned()
    }

    #[test]
    fn flooded_worker_is_demoted_and_restored() {
        std::thread::spawn(|| {
            let mut priority = Priority::new(true);
            if !priority.permitted {
                // Some hosts do not permit real-time scheduling: then it is requested only once.
                assert_eq!(policy(), "0");
                priority.look(SystemInstant::now() + PERIOD);
                assert_eq!(policy(), "0");
                return;
            }
            assert_eq!(policy(), "1");
            let computed = thread_time();
            while thread_time() < computed + PERIOD {}
            // Pretend that the period contained only this computation.
            priority.since = SystemInstant::now();
            priority.look(SystemInstant::now() + PERIOD);
            assert_eq!(policy(), "0");
            let idle = priority.since + 50 * PERIOD;
            priority.look(idle);
            assert_eq!(policy(), "1");
        })
        .join()
        .expect("the thread does not panic");
    }

    #[test]
    fn worker_without_real_time_request_keeps_normal_scheduling() {
        std::thread::spawn(|| {
            let mut priority = Priority::new(false);
            priority.look(priority.since + 50 * PERIOD);
            assert_eq!(policy(), "0");
        })
        .join()
        .expect("the thread does not panic");
    }
}

//! The state of the machine: whether it is idle enough for measurements, its present speed, and the
//! CPU time of each process.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::Serialize;

/// Maximum CPU time of other programs during a measurement that counts, as a share of one core.
const FOREIGN_MAX: f64 = 0.05;
/// Maximum CPU time that the hypervisor gives to other guests during a measurement that counts, as
/// a share of one core.
const STEAL_MAX: f64 = 0.03;

/// Binds the calling thread to a core.
///
/// # Errors
///
/// When the core does not exist.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("cannot run on CPU {cpu}"))
}

/// The model of CPU 0, as the kernel names it.
#[must_use]
pub fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let name = line.and_then(|line| line.split_once(':'));
    name.map_or("unknown processor", |(_, name)| name.trim())
        .to_owned()
}

/// The present speed of the machine.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Calibration {
    /// Nanoseconds of a fixed piece of arithmetic on CPU 0, while CPU 1 has no such work.
    pub cpu0: f64,
    /// Nanoseconds of a fixed piece of arithmetic on CPU 1, while CPU 0 has no such work.
    pub cpu1: f64,
    /// Nanoseconds of the slower CPU, if both do this arithmetic at the same time. If this is much
    /// more than the other values, the two CPUs share a core, or the hypervisor uses one for other
    /// guests.
    pub both: f64,
}

impl Calibration {
    /// Measures the speed, in some 50 ms.
    ///
    /// # Errors
    ///
    /// With fewer than two CPUs.
    pub fn measure() -> Result<Self> {
        fn on(cpu: usize) -> thread::JoinHandle<Result<f64>> {
            thread::spawn(move || {
                pin(cpu)?;
                Ok((0..5).map(|_| arithmetic()).fold(f64::MAX, f64::min))
            })
        }
        let join = |thread: thread::JoinHandle<Result<f64>>| {
            thread
                .join()
                .map_err(|_| anyhow::anyhow!("a thread of the calibration panicked"))?
        };
        let (cpu0, cpu1) = (join(on(0))?, join(on(1))?);
        let (first, second) = (on(0), on(1));
        let both = join(first)?.max(join(second)?);
        Ok(Self { cpu0, cpu1, both })
    }
}

fn arithmetic() -> f64 {
    const TIMES: u32 = 500_000;
    let mut words = black_box([1_u64, 2, 3, 4, 5, 6, 7, 8]);
    let start = Instant::now();
    for _ in 0..TIMES {
        for word in &mut words {
            *word = word.wrapping_add(0x9E37_79B9_7F4A_7C15) ^ (*word >> 7);
        }
    }
    let time = start.elapsed();
    black_box(words);
    time.as_secs_f64() * 1e9 / f64::from(TIMES)
}

#[derive(Clone, Debug)]
struct Task {
    process: u32,
    parent: u32,
    name: String,
    /// CPU time in nanoseconds. Not from `/proc/stat`, whose samples at each tick are useless at
    /// partial load.
    used: u64,
}

/// The state of all threads of the machine at one time.
#[derive(Debug)]
pub struct Snapshot {
    at: Instant,
    tasks: HashMap<u32, Task>,
    /// For each process: CPU time in nanoseconds of its exited descendants, after their parents
    /// have waited for them. Exact to two ticks of 10 ms.
    reaped: HashMap<u32, u64>,
    /// CPU time that the hypervisor gave to other guests, in ticks of 10 ms, on all CPUs.
    stolen: u64,
}

impl Snapshot {
    /// Reads the CPU times of all processes and threads from `/proc`, which takes some
    /// milliseconds.
    #[must_use]
    pub fn take() -> Self {
        let mut tasks = HashMap::new();
        let mut reaped = HashMap::new();
        for process in numbers("/proc") {
            let Ok(stat) = fs::read_to_string(format!("/proc/{process}/stat")) else {
                continue;
            };
            let Some((head, tail)) = stat.rsplit_once(')') else {
                continue;
            };
            let name = head.split_once('(').map_or("", |(_, name)| name);
            let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
            let field = |place: usize| fields.get(place).and_then(|word| word.parse::<u64>().ok());
            let parent = field(1).and_then(|parent| parent.try_into().ok());
            let parent = parent.unwrap_or(0);
            // `cutime` and `cstime`, in ticks.
            let ticks = field(13).unwrap_or(0) + field(14).unwrap_or(0);
            reaped.insert(process, ticks * 10_000_000);
            for thread in numbers(&format!("/proc/{process}/task")) {
                let path = format!("/proc/{process}/task/{thread}/schedstat");
                let used = fs::read_to_string(path).unwrap_or_default();
                let used = used.split_ascii_whitespace().next();
                let task = Task {
                    process,
                    parent,
                    name: name.to_owned(),
                    used: used.and_then(|word| word.parse().ok()).unwrap_or(0),
                };
                tasks.insert(thread, task);
            }
        }
        Self {
            at: Instant::now(),
            tasks,
            reaped,
            stolen: stolen(),
        }
    }

    /// CPU times between an earlier snapshot and this one. `director`: the forwarding process,
    /// including its workers; `devices`: the director's interfaces, whose receiving kernel threads
    /// count as its work.
    #[must_use]
    pub fn since(&self, earlier: &Self, director: Option<u32>, devices: &[&str]) -> Used {
        let children = self.descendants(std::process::id());
        let mut used = Used::default();
        let seconds = self.at.duration_since(earlier.at).as_secs_f64();
        for (thread, task) in &self.tasks {
            let before = earlier.tasks.get(thread).map_or(0, |task| task.used);
            let time = Duration::from_nanos(task.used.saturating_sub(before)).as_secs_f64();
            let kernel = task.parent == 2 || task.process == 2;
            let receives = devices.iter().any(|device| {
                let name = task.name.strip_prefix("napi/");
                name.is_some_and(|name| name.rsplit_once('-').is_some_and(|(of, _)| of == *device))
            });
            if receives {
                used.softirq += time;
            } else if kernel
                && (task.name.starts_with("ksoftirqd") || task.name.starts_with("napi/"))
            {
                used.other_softirq += time;
            } else if !children.contains(&task.process) && !kernel {
                used.foreign += time;
            }
        }
        used.process = director.map_or(0.0, |director| self.used_by(earlier, &[director]));
        let own = self.used_by(earlier, &[std::process::id()]);
        used.endpoints = (own - used.process).max(0.0);
        #[expect(clippy::cast_precision_loss, reason = "a few ticks")]
        let stolen = (self.stolen.saturating_sub(earlier.stolen)) as f64 / 100.0;
        used.foreign /= seconds;
        used.stolen = stolen / seconds;
        used.seconds = seconds;
        used
    }

    /// Returns the CPU seconds since an earlier snapshot of processes and of all processes that
    /// they have started. Includes exited processes if their parents have waited for them.
    #[must_use]
    pub fn used_by(&self, earlier: &Self, roots: &[u32]) -> f64 {
        let (before, after) = (earlier.by_process(roots), self.by_process(roots));
        let of = |process: &u32| before.get(process).copied().unwrap_or(0);
        let grown: u64 = after
            .iter()
            .map(|(process, used)| used.saturating_sub(of(process)))
            .sum();
        // The time of an ended process is a part of its parent's time for waited-for children.
        let ended = before
            .iter()
            .filter(|(process, _)| !after.contains_key(process));
        let ended: u64 = ended.map(|(_, used)| used).sum();
        Duration::from_nanos(grown.saturating_sub(ended)).as_secs_f64()
    }

    /// CPU time in nanoseconds, by process id, of the root processes and of all their descendants.
    /// The time of a process includes the time of exited descendants whose parents have waited for
    /// them.
    fn by_process(&self, roots: &[u32]) -> HashMap<u32, u64> {
        let mut used = HashMap::new();
        for process in roots.iter().flat_map(|root| self.descendants(*root)) {
            used.insert(process, self.reaped.get(&process).copied().unwrap_or(0));
        }
        for task in self.tasks.values() {
            if let Some(used) = used.get_mut(&task.process) {
                *used += task.used;
            }
        }
        used
    }

    fn descendants(&self, of: u32) -> HashSet<u32> {
        let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
        for task in self.tasks.values() {
            children.entry(task.parent).or_default().push(task.process);
        }
        let mut all = HashSet::new();
        let mut rest = vec![of];
        while let Some(process) = rest.pop() {
            if all.insert(process) {
                rest.extend(children.get(&process).into_iter().flatten());
            }
        }
        all
    }
}

/// Use of the machine between two snapshots. Times are in CPU seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Used {
    /// Seconds between the two snapshots, by the wall clock.
    pub seconds: f64,
    /// CPU time of the director's process and of its descendants.
    pub process: f64,
    /// CPU time of the threads that receive on the director's interfaces. If there are none, the
    /// sender's process does this work.
    pub softirq: f64,
    /// CPU time of other soft interrupts that run in a thread.
    pub other_softirq: f64,
    /// CPU time of all other programs of the benchmark, including exited ones: generators, clients,
    /// servers.
    pub endpoints: f64,
    /// CPU time of other programs, as a share of a core.
    pub foreign: f64,
    /// CPU time that the hypervisor gave to other guests, as a share of a core.
    pub stolen: f64,
}

impl Used {
    /// The reason why a measurement during this time does not count; `None` if it counts.
    #[must_use]
    pub fn disturbed(&self) -> Option<String> {
        if self.foreign > FOREIGN_MAX {
            let percent = self.foreign * 100.0;
            return Some(format!("other programs used {percent:.0} % of a core"));
        }
        let percent = self.stolen * 100.0;
        (self.stolen > STEAL_MAX)
            .then(|| format!("the hypervisor used {percent:.0} % of a core for other guests"))
    }
}

/// Waits until neither other programs nor other guests of the hypervisor use much CPU time.
///
/// # Errors
///
/// If they still use it after `limit`. The error names the busiest program.
pub fn wait_until_quiet(limit: Duration) -> Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        let before = Snapshot::take();
        thread::sleep(Duration::from_millis(300));
        let after = Snapshot::take();
        let Some(why) = after.since(&before, None, &[]).disturbed() else {
            return Ok(());
        };
        ensure!(
            Instant::now() < deadline,
            "the machine is busy ({why}; busiest: {}), and measurements on a busy machine are unreliable: stop the other programs, or use --busy and do not rely on the figures",
            busiest(&before, &after)
        );
    }
}

fn busiest(before: &Snapshot, after: &Snapshot) -> String {
    let own = after.descendants(std::process::id());
    let used = |thread: &u32, task: &Task| {
        task.used
            - before
                .tasks
                .get(thread)
                .map_or(task.used, |old| old.used.min(task.used))
    };
    let others = after.tasks.iter();
    let others = others.filter(|(_, task)| !own.contains(&task.process));
    let most = others.max_by_key(|(thread, task)| used(thread, task));
    most.map_or_else(String::new, |(_, task)| {
        format!("{} {}", task.name, task.process)
    })
}

fn numbers(directory: &str) -> Vec<u32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

fn stolen() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat.lines().next().unwrap_or_default();
    let stolen = line.split_ascii_whitespace().nth(8);
    stolen.and_then(|word| word.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn snapshot(tasks: &[(u32, u32, u64)], reaped: &[(u32, u64)]) -> Snapshot {
        let task = |(process, parent, used): &(u32, u32, u64)| {
            let task = Task {
                process: *process,
                parent: *parent,
                name: String::new(),
                used: used * 1_000_000_000,
            };
            (*process, task)
        };
        Snapshot {
            at: Instant::now(),
            tasks: tasks.iter().map(task).collect(),
            reaped: reaped
                .iter()
                .map(|(process, used)| (*process, used * 1_000_000_000))
                .collect(),
            stolen: 0,
        }
    }

    #[test]
    fn processor_time_of_exited_process_counts_once() {
        // Process 11 has used 5 seconds, 3 of them before the measurement, and its parent has
        // waited for it; 12 started and ended during the measurement; 20 belongs to another
        // program.
        let first = snapshot(&[(10, 1, 1), (11, 10, 3), (20, 1, 50)], &[(10, 7), (20, 9)]);
        let then = snapshot(&[(10, 1, 2), (20, 1, 90)], &[(10, 7 + 5 + 4), (20, 30)]);
        assert!((then.used_by(&first, &[10]) - 7.0).abs() < 1e-9);
        assert!(then.used_by(&first, &[99]).abs() < 1e-9);
        // A thread that has ended does not reduce the time of other threads.
        let less = snapshot(&[(10, 1, 0), (11, 10, 4)], &[(10, 7)]);
        assert!((less.used_by(&first, &[10]) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn processor_usage_includes_exited_child_programs() {
        let first = Snapshot::take();
        let spin = "i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done";
        let nested = format!("sh -c '{spin}'; true");
        let status = Command::new("sh").args(["-c", &nested]).status();
        assert!(status.expect("the shell can be started").success());
        let then = Snapshot::take();
        let own = [std::process::id()];
        assert!(
            then.used_by(&first, &own) > 0.05,
            "the command in the shell used no processor time"
        );
        let all = then.since(&first, None, &[]);
        assert!((all.endpoints - then.used_by(&first, &own)).abs() < 1e-9 && all.foreign >= 0.0);
    }
}

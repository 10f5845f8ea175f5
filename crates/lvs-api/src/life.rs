//! Finds out whether a process is running, exiting or has exited. The kernel frees the memory of a
//! killed process before it closes the files of the process, and for a large process this takes
//! seconds.

use std::fs;
use std::str::SplitAsciiWhitespace;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

/// Longest wait for a process that is ending, or that has marked its lock because it is stopping.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest waits for a process that is running, and for a process that is unknown or not visible.
/// For a process that is ending or has marked its lock, every caller waits up to ten seconds.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    running: Duration,
    unseen: Duration,
}

impl Limits {
    /// Limits for a starting dataplane that waits until its predecessor has exited.
    pub const START: Self = Self {
        running: Duration::from_millis(300),
        unseen: Duration::from_secs(2),
    };
    /// Short limits, of a caller that fails soon if another process has the lock or name.
    pub const LOOK: Self = Self {
        running: PAUSE,
        unseen: Duration::from_millis(100),
    };
    /// Limits of a caller that waits only for a process that is ending or has marked its lock.
    pub const NONE: Self = Self {
        running: Duration::ZERO,
        unseen: Duration::ZERO,
    };
}

/// Pause before the caller tries again.
const PAUSE: Duration = Duration::from_millis(10);

/// The state of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// The process is running.
    Running,
    /// The process was killed or is exiting; its files, locks and sockets may still be open.
    Ending,
    /// The process has closed all files, has not existed, or is not visible in `/proc`.
    Gone,
}

/// Returns the name of a process from the text of `/proc/PID/stat` (`proc_pid_stat(5)`), and the
/// fields after it; the first of them is the state (field 3). The name is in parentheses, and may
/// contain whitespace and parentheses.
pub fn name_and_fields(stat: &str) -> Option<(&str, SplitAsciiWhitespace<'_>)> {
    let (front, fields) = stat.rsplit_once(')')?;
    let (_, name) = front.split_once('(')?;
    Some((name, fields.split_ascii_whitespace()))
}

impl Life {
    /// The state of the process `pid`, by `/proc`.
    pub fn of(pid: u32) -> Self {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}"));
        match (read("stat"), read("status")) {
            (Ok(stat), Ok(status)) => Self::read(&stat, &status),
            _ => Self::Gone,
        }
    }

    fn read(stat: &str, status: &str) -> Self {
        /// `PF_EXITING` and `PF_SIGNALED` of `linux/sched.h`.
        const ENDING: u32 = 0x4 | 0x400;
        const SIGKILL: u64 = 1 << (Signal::KILL.as_raw() - 1);
        // After the name follow the state (3rd field), the flags (9th) and the threads (20th).
        let Some((_, mut fields)) = name_and_fields(stat) else {
            return Self::Gone;
        };
        let state = fields.next().unwrap_or("X");
        let flags: u32 = fields.nth(5).and_then(|n| n.parse().ok()).unwrap_or(0);
        let threads: u32 = fields.nth(10).and_then(|n| n.parse().ok()).unwrap_or(0);
        let pending = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
                .is_some_and(|mask| mask & SIGKILL != 0)
        };
        match state {
            // The other threads still use the files.
            "Z" | "X" if threads > 1 => Self::Ending,
            "Z" | "X" => Self::Gone,
            _ if flags & ENDING != 0 || pending("SigPnd:") || pending("ShdPnd:") => Self::Ending,
            _ => Self::Running,
        }
    }
}

/// The process that owns a lock or a name, or owned it last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// The process id of the owner, if it is known.
    pub pid: Option<u32>,
    /// Whether the owner has marked its lock because it is stopping.
    pub leaves: bool,
}

impl From<Option<u32>> for Owner {
    fn from(pid: Option<u32>) -> Self {
        Self { pid, leaves: false }
    }
}

/// The wait of a caller for another process, with its time limits.
#[derive(Debug)]
pub struct Patience {
    began: Instant,
    limits: Limits,
}

impl Patience {
    /// Starts the wait.
    pub fn new(limits: Limits) -> Self {
        Self {
            began: Instant::now(),
            limits,
        }
    }

    /// Returns true after a short sleep if the caller should try again, and false at once if the
    /// wait has exceeded its limit. The limit is longest if the owner is ending, or has marked its
    /// lock.
    pub fn waits_for(&self, owner: impl Into<Owner>) -> bool {
        let Owner { pid, leaves } = owner.into();
        let limit = match pid.map_or(Life::Gone, Life::of) {
            Life::Ending => PATIENCE,
            Life::Running if leaves => PATIENCE,
            Life::Running => self.limits.running,
            Life::Gone => self.limits.unseen,
        };
        let waits = self.began.elapsed() < limit;
        if waits {
            thread::sleep(PAUSE);
        }
        waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(state: &str, flags: u32, threads: u32, pending: &str) -> Life {
        let stat =
            format!("7 (a) b) {state} 1 7 7 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 {threads} 0 9");
        let status = format!("Name:\tx\nSigPnd:\t0000000000000000\nShdPnd:\t{pending}\n");
        Life::read(&stat, &status)
    }

    #[test]
    fn life_of_process_is_ending_from_sigkill_or_exit_until_all_threads_have_exited() {
        let none = "0000000000000000";
        assert_eq!(life("S", 0x0040_0040, 9, none), Life::Running);
        assert_eq!(life("R", 0x0040_0044, 9, none), Life::Ending);
        assert_eq!(life("R", 0x0040_0440, 9, none), Life::Ending);
        assert_eq!(life("S", 0x0040_0040, 9, "0000000000000100"), Life::Ending);
        assert_eq!(life("S", 0x0040_0040, 9, "0000000000004000"), Life::Running);
        assert_eq!(life("Z", 0x0040_0044, 2, none), Life::Ending);
        assert_eq!(life("Z", 0x0040_0044, 1, none), Life::Gone);
        assert_eq!(Life::of(std::process::id()), Life::Running);
        assert_eq!(Life::of(u32::MAX), Life::Gone);
    }

    #[test]
    fn wait_for_leaving_lock_owner_continues_after_limit_for_running_owner() {
        let own = Some(std::process::id());
        let patience = Patience::new(Limits::LOOK);
        let waited = (0..1000).take_while(|_| patience.waits_for(own)).count();
        assert!(waited < 1000);
        let leaves = Owner {
            pid: own,
            leaves: true,
        };
        assert!(patience.waits_for(leaves));
    }
}

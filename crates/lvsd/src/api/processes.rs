//! Processor time and memory of processes, from /proc.

use std::fs;

use lvs_api::life::name_and_fields;

/// Clock ticks of /proc in a second: `USER_HZ`, which is 100 on all supported architectures.
const TICKS: f64 = 100.0;
/// Maximum number of threads whose times are read.
const THREADS_MAX: usize = 1024;
/// The name of a packet worker's thread, before its number.
const WORKER: &str = "lvs-worker-";

/// Processor time and memory of a process.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Usage {
    /// Processor time of the process since its start, in seconds.
    pub(super) cpu_seconds: f64,
    /// Memory in use, in bytes.
    pub(super) resident_bytes: u64,
}

/// The usage of the process `pid`; `None` if the process does not exist or has another name than
/// `name`. In another PID namespace, the id may belong to another process.
pub(super) fn usage(pid: u32, name: &str) -> Option<Usage> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (comm, cpu_seconds) = of_stat(&stat)?;
    if comm != name {
        return None;
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(Usage {
        cpu_seconds,
        resident_bytes: resident(&status)?,
    })
}

/// The processor times of the packet workers of a process, in seconds, by their numbers.
pub(super) fn workers(pid: u32) -> Vec<(u32, f64)> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let stats = threads
        .flatten()
        .take(THREADS_MAX)
        .filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok());
    let mut all: Vec<(u32, f64)> = stats
        .filter_map(|stat| {
            let (comm, seconds) = of_stat(&stat)?;
            Some((comm.strip_prefix(WORKER)?.parse().ok()?, seconds))
        })
        .collect();
    all.sort_by_key(|(number, _)| *number);
    all.dedup_by_key(|(number, _)| *number);
    all
}

/// Name and processor time of a process, from the text of its file `stat`; `None` if the text is
/// invalid.
fn of_stat(stat: &str) -> Option<(&str, f64)> {
    let (name, fields) = name_and_fields(stat)?;
    // Fields 14 and 15; the iterator begins at field 3.
    let mut times = fields.skip(11).take(2);
    let mut next = || times.next()?.parse::<u32>().ok();
    let (user, system) = (next()?, next()?);
    Some((name, (f64::from(user) + f64::from(system)) / TICKS))
}

/// The memory that a process uses, in bytes, from the text of its file `status`; `None` if the text
/// does not contain it.
fn resident(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_stat_with_parentheses_in_name_is_parsed_and_malformed_stat_is_none() {
        let stat = "7 (a) (b) S 1 7 7 0 -1 4194560 9 0 0 0 150 25 0 0 20 0 3 0 12 34";
        assert_eq!(of_stat(stat), Some(("a) (b", 1.75)));
        for bad in [
            "",
            "7 (a",
            "7 (a) S 1",
            "7 (a) S 1 7 7 0 -1 4 9 0 0 0 x 25 0",
        ] {
            assert_eq!(of_stat(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn process_usage_is_read_only_if_process_has_expected_name() {
        let name = fs::read_to_string("/proc/self/comm").expect("the file can be read");
        let pid = std::process::id();
        let usage = usage(pid, name.trim_end()).expect("the usage of this process is known");
        assert!(usage.resident_bytes > 1 << 16, "{usage:?}");
        assert_eq!(super::usage(pid, "another"), None);
        assert_eq!(workers(pid), []);
    }
}

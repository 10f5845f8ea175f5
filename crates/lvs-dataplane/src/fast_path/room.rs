//! The memory that the BPF maps may use. The kernel allocates the whole map when it is created.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::FastPathError;

/// Estimated size in bytes of all maps except the connection table.
const BESIDE: u64 = 16 << 20;

/// The memory that the maps may use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Room {
    /// Free memory in bytes; `None` for no limit.
    free: Option<u64>,
}

impl Room {
    /// Allows a quarter of the free memory of this host or of this process's control groups,
    /// whichever is smaller; no limit if neither can be determined.
    pub(crate) fn of_this_host() -> Self {
        let host = fs::read_to_string("/proc/meminfo").ok();
        let host = host.and_then(|text| available(&text));
        let group = fs::read_to_string("/proc/self/cgroup").ok();
        let group = group.and_then(|text| free_in_groups(Path::new("/sys/fs/cgroup"), &text));
        Self {
            free: host.into_iter().chain(group).min(),
        }
    }

    /// Refuses a connection table of `table` bytes if all maps together would need more than a
    /// quarter of the free memory.
    pub(super) fn takes(self, table: usize) -> Result<(), FastPathError> {
        let needs = BESIDE.saturating_add(table as u64);
        match self.free {
            Some(free) if needs > free / 4 => Err(FastPathError::Memory {
                needs: needs >> 20,
                free: free >> 20,
            }),
            _ => Ok(()),
        }
    }
}

/// Returns the number of available bytes in this text of `/proc/meminfo`.
fn available(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

struct Files {
    limit: &'static str,
    used: &'static str,
    /// Fields of `memory.stat` for the file cache, which the kernel can reclaim.
    cache: [&'static str; 2],
}

const GROUP: Files = Files {
    limit: "memory.max",
    used: "memory.current",
    cache: ["active_file", "inactive_file"],
};
/// The files of cgroup version 1. Without a limit, the limit file contains a number larger than any
/// memory.
const FIRST: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_active_file", "total_inactive_file"],
};

/// Returns the number of bytes that the control groups in this text of `/proc/self/cgroup`, and
/// their parents, may still allocate; `None` if no group has a limit.
fn free_in_groups(root: &Path, text: &str) -> Option<u64> {
    let free = text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.strip_prefix('/')?);
        if controllers.is_empty() {
            return free_in_group(root, path, &GROUP);
        }
        let memory = controllers.split(',').any(|name| name == "memory");
        memory.then(|| free_in_group(&root.join("memory"), path, &FIRST))?
    });
    free.min()
}

fn free_in_group(root: &Path, path: &str, files: &Files) -> Option<u64> {
    let read = |group: &Path, file: &str| fs::read_to_string(group.join(file)).ok();
    let number =
        |group: &Path, file: &str| -> Option<u64> { read(group, file)?.trim().parse().ok() };
    let mut group: PathBuf = root.join(path);
    let mut least = None;
    while group.starts_with(root) {
        if let Some(max) = number(&group, files.limit) {
            let used = number(&group, files.used).unwrap_or(0);
            let stat = read(&group, "memory.stat").unwrap_or_default();
            let used = used.saturating_sub(sum_of(&stat, &files.cache));
            let free = max.saturating_sub(used);
            least = Some(least.map_or(free, |least: u64| least.min(free)));
        }
        if !group.pop() {
            break;
        }
    }
    least
}

/// The sum of these fields of a text with a name and a number in each line.
fn sum_of(text: &str, fields: &[&str]) -> u64 {
    let numbers = text.lines().filter_map(|line| {
        let (name, number) = line.split_once(' ')?;
        fields.contains(&name).then(|| number.trim().parse().ok())?
    });
    numbers.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_meminfo() {
        let text =
            "MemTotal:       24689304 kB\nMemFree:          123 kB\nMemAvailable:   2000 kB\n";
        assert_eq!(available(text), Some(2_048_000));
        assert_eq!(available("MemTotal: 5 kB\n"), None);
    }

    #[test]
    fn free_memory_is_bounded_by_smallest_cgroup_v2_limit() {
        let root = tempfile::tempdir().expect("the directory can be created");
        let inner = root.path().join("a/b");
        fs::create_dir_all(&inner).expect("the directory can be created");
        let text = "1:name=x:/other\n0::/a/b\n";
        let free = || free_in_groups(root.path(), text);
        assert_eq!(free(), None);
        fs::write(inner.join("memory.max"), "max\n").expect("the file can be written");
        assert_eq!(free(), None);
        let outer = root.path().join("a");
        fs::write(outer.join("memory.max"), "1000\n").expect("the file can be written");
        fs::write(outer.join("memory.current"), "400\n").expect("the file can be written");
        assert_eq!(free(), Some(600));
        // File cache counts as free.
        let stat = "anon 90\nfile 310\ninactive_file 200\nactive_file 100\nshmem 10\n";
        fs::write(outer.join("memory.stat"), stat).expect("the file can be written");
        assert_eq!(free(), Some(900));
        fs::write(inner.join("memory.max"), "100\n").expect("the file can be written");
        assert_eq!(free(), Some(100));
    }

    #[test]
    fn free_memory_is_bounded_by_cgroup_v1_limit() {
        let root = tempfile::tempdir().expect("the directory can be created");
        let all = root.path().join("memory");
        let group = all.join("a/b");
        fs::create_dir_all(&group).expect("the directory can be created");
        let write = |at: &Path, file: &str, text: &str| {
            fs::write(at.join(file), text).expect("the file can be written");
        };
        write(&all, "memory.limit_in_bytes", "9223372036854771712\n");
        write(&all, "memory.usage_in_bytes", "5000\n");
        write(&group, "memory.limit_in_bytes", "1000\n");
        write(&group, "memory.usage_in_bytes", "700\n");
        let stat = "active_file 1\ntotal_active_file 150\ntotal_inactive_file 50\n";
        write(&group, "memory.stat", stat);
        let free = |text| free_in_groups(root.path(), text);
        assert_eq!(free("4:memory:/a/b\n3:cpu,cpuacct:/\n0::/\n"), Some(500));
        assert_eq!(free("4:hugetlb,memory:/a/b\n"), Some(500));
        assert_eq!(free("3:cpu,cpuacct:/a/b\n0::/a/b\n"), None);
        // A container's own group is at the top of the hierarchy that it sees, but has the host's
        // name in /proc.
        write(&all, "memory.limit_in_bytes", "6000\n");
        assert_eq!(free("4:memory:/docker/1\n"), Some(1000));
    }

    #[test]
    fn maps_above_a_quarter_of_free_memory_are_refused() {
        let room = Room {
            free: Some(1 << 30),
        };
        assert!(room.takes(200 << 20).is_ok());
        let error = room
            .takes(250 << 20)
            .expect_err("a table above a quarter of the free memory was accepted")
            .to_string();
        assert!(
            error.contains("266 MiB") && error.contains("1024"),
            "{error}"
        );
        assert!(Room::default().takes(usize::MAX).is_ok());
    }
}

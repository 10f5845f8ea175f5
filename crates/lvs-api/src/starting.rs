//! Finds programs that were just started and do not answer yet, so that the command line
//! `lvs-dataplane & lvsadm -A ...` works.
//!
//! A client without a socket to connect to waits only while such a process exists. Otherwise it
//! fails at once, so that scripts on a host without a dataplane are not delayed.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::client::{Client, Error};
use super::life::name_and_fields;
use super::{Address, daemon};

/// Longest time from the start of a program to its first answer.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Longest time of a shell from `fork` to `exec`.
const EXEC_LIMIT: Duration = Duration::from_secs(1);

/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);

/// The programs that become or start a dataplane. (`lvsd` starts one.)
const DATAPLANE: [&str; 2] = ["lvs-dataplane", "lvsd"];

/// Connects to the dataplane at `address`, and waits for one that is starting.
///
/// # Errors
/// As [`Client::connect`]: at once if no dataplane is starting, otherwise when its start has failed
/// or has taken ten seconds.
pub fn connect(address: &Address) -> Result<Client, Error> {
    let own_namespace = !matches!(address, Address::Path(_));
    retry(
        || Client::connect(address),
        |result| matches!(result, Err(Error::Absent { .. } | Error::Stale { .. })),
        |waited| Processes::system().is_starting(&DATAPLANE, own_namespace, waited),
    )
}

/// Connects to the `lvsd` of the dataplane at `dataplane`, and waits for one that is starting;
/// `None` if none is running or starting.
///
/// # Errors
/// As [`daemon::Client::connect`].
pub fn connect_daemon(dataplane: &Address) -> Result<Option<daemon::Client>, String> {
    let own_namespace = !matches!(dataplane, Address::Path(_));
    retry(
        || daemon::Client::connect(dataplane),
        |result| matches!(result, Ok(None)),
        |waited| Processes::system().is_starting(&DATAPLANE[1..], own_namespace, waited),
    )
}

/// Repeats `attempt` while `failed` is true for the result and `promised` returns that a program is
/// starting, but not longer than [`START_LIMIT`]. If all attempts failed, makes one more.
fn retry<T>(
    mut attempt: impl FnMut() -> T,
    failed: impl Fn(&T) -> bool,
    mut promised: impl FnMut(Duration) -> bool,
) -> T {
    let begin = Instant::now();
    loop {
        // Read the time before the attempt: a slow attempt must not end the wait.
        let waited = begin.elapsed();
        let result = attempt();
        if !failed(&result) {
            return result;
        }
        if waited > START_LIMIT || !promised(waited) {
            // The start may have been completed between the attempt and the check.
            return attempt();
        }
        thread::sleep(PAUSE);
    }
}

/// The processes in a `/proc` directory.
struct Processes<'a> {
    root: &'a Path,
    own: u32,
    /// Number of clock ticks in a second, the unit of times in `/proc/PID/stat`.
    ticks_per_second: u64,
}

struct Process {
    parent: u32,
    /// Start time of the process, in ticks after boot.
    start: u64,
    command_line: Vec<u8>,
}

impl Processes<'static> {
    fn system() -> Self {
        Self {
            root: Path::new("/proc"),
            own: std::process::id(),
            ticks_per_second: rustix::param::clock_ticks_per_second(),
        }
    }
}

impl Processes<'_> {
    /// Whether one of `programs` was started at most [`START_LIMIT`] before this process, or a
    /// sibling process is about to execute one. With `own_namespace`, a process in another network
    /// namespace does not count, unless its namespace cannot be read or may still change. `waited`:
    /// how long this process has waited.
    ///
    /// Processes that started after this one do not count, so that two clients (`lvsd status`) do
    /// not wait for each other.
    fn is_starting(&self, programs: &[&str], own_namespace: bool, waited: Duration) -> bool {
        let Some(own) = self.process(self.own) else {
            return false;
        };
        let namespace = own_namespace.then(|| self.namespace(self.own)).flatten();
        let parent = self.process(own.parent);
        let Ok(entries) = fs::read_dir(self.root) else {
            return false;
        };
        entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(|pid: &u32| *pid != self.own)
            .any(|pid| {
                let Some(process) = self.process(pid) else {
                    return false;
                };
                if (own.start, self.own) < (process.start, pid) {
                    return false;
                }
                let age = self.seconds(own.start - process.start);
                // Before its exec, a shell's child has the command line of the shell, and during
                // the exec none.
                let before_exec = waited <= EXEC_LIMIT
                    && age <= EXEC_LIMIT
                    && process.parent == own.parent
                    && parent.as_ref().is_some_and(|parent| {
                        process.command_line.is_empty()
                            || process.command_line == parent.command_line
                    });
                // `nsenter` and `ip netns exec` enter the namespace before they become the program,
                // and a shell's child may become one of them.
                let enters = before_exec
                    || age <= EXEC_LIMIT
                        && process.names(programs)
                        && !process.is_program(programs);
                age <= START_LIMIT
                    && (process.names(programs) || before_exec)
                    && match (&namespace, self.namespace(pid)) {
                        _ if enters => true,
                        (Some(own), Some(its)) => *own == its,
                        _ => true,
                    }
            })
    }

    fn seconds(&self, ticks: u64) -> Duration {
        Duration::from_millis(ticks.saturating_mul(1000) / self.ticks_per_second.max(1))
    }

    fn process(&self, pid: u32) -> Option<Process> {
        let directory = self.root.join(pid.to_string());
        let stat = fs::read_to_string(directory.join("stat")).ok()?;
        let (_, mut fields) = name_and_fields(&stat)?;
        // A zombie process does not start a dataplane.
        fields.next().filter(|state| !matches!(*state, "Z" | "X"))?;
        Some(Process {
            parent: fields.next()?.parse().ok()?,
            start: fields.nth(17)?.parse().ok()?,
            command_line: fs::read(directory.join("cmdline")).unwrap_or_default(),
        })
    }

    fn namespace(&self, pid: u32) -> Option<PathBuf> {
        fs::read_link(self.root.join(pid.to_string()).join("ns/net")).ok()
    }
}

impl Process {
    /// Whether the process runs one of `programs`, and not a program that starts one.
    fn is_program(&self, programs: &[&str]) -> bool {
        let word = self.command_line.split(|byte| *byte == 0).next();
        let name = word.and_then(|word| Path::new(std::ffi::OsStr::from_bytes(word)).file_name());
        programs
            .iter()
            .any(|program| name.is_some_and(|name| name == *program))
    }

    /// Whether any word of the command line is one of `programs`, as in `sudo lvs-dataplane`.
    fn names(&self, programs: &[&str]) -> bool {
        self.command_line
            .split(|byte| *byte == 0)
            .filter_map(|word| Path::new(std::ffi::OsStr::from_bytes(word)).file_name())
            .any(|name| programs.iter().any(|program| name == *program))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fake `/proc` with this process (20), which started 1,000 seconds after boot, and its shell
    /// (5), which started 10 seconds after boot.
    struct Proc(tempfile::TempDir);

    impl Proc {
        fn new() -> Self {
            let proc = Self(tempfile::tempdir().expect("the temporary directory can be created"));
            proc.add(5, 1, 1000, "bash\0setup.sh\0", Some(7));
            proc.add(20, 5, 100_000, "lvsadm\0-Ln\0", Some(7));
            proc
        }

        fn add(&self, pid: u32, parent: u32, start: u64, command_line: &str, net: Option<u32>) {
            let directory = self.0.path().join(pid.to_string());
            fs::create_dir_all(directory.join("ns")).expect("the directory can be created");
            // The values of fields 5 to 21 are not used.
            let between = "0 ".repeat(17);
            let stat = format!("{pid} (a) b) S {parent} {between}{start} 0 0\n");
            fs::write(directory.join("stat"), stat).expect("the file can be written");
            fs::write(directory.join("cmdline"), command_line).expect("the file can be written");
            if let Some(net) = net {
                let link = directory.join("ns/net");
                std::os::unix::fs::symlink(format!("net:[{net}]"), link)
                    .expect("the link can be created");
            }
        }

        fn is_starting(&self, own_namespace: bool, waited: Duration) -> bool {
            let processes = Processes {
                root: self.0.path(),
                own: 20,
                ticks_per_second: 100,
            };
            processes.is_starting(&DATAPLANE, own_namespace, waited)
        }
    }

    /// Whether a client waits for a process with these properties.
    fn waits_for(parent: u32, start: u64, command_line: &str, net: Option<u32>) -> bool {
        let proc = Proc::new();
        proc.add(11, parent, start, command_line, net);
        proc.is_starting(true, Duration::ZERO)
    }

    #[test]
    fn client_without_dataplane_process_does_not_wait() {
        assert!(!Proc::new().is_starting(true, Duration::ZERO));
        assert!(!waits_for(5, 100_000, "nginx\0", Some(7)));
        assert!(!waits_for(
            5,
            100_000,
            "vi\0lvs-dataplane.service\0",
            Some(7)
        ));
    }

    #[test]
    fn client_waits_for_recently_started_dataplane_or_lvsd() {
        for command_line in [
            "lvs-dataplane\0--own-vips\0",
            "/usr/sbin/lvs-dataplane\0",
            "sudo\0-E\0/usr/sbin/lvs-dataplane\0--own-vips\0",
            "lvsd\0--config\0web.toml\0",
        ] {
            assert!(
                waits_for(1, 99_999, command_line, Some(7)),
                "{command_line}"
            );
        }
    }

    #[test]
    fn client_does_not_wait_for_lvsd_started_after_client() {
        assert!(!waits_for(1, 100_001, "lvsd\0status\0", Some(7)));
        // Started in the same tick: the process number decides.
        let proc = Proc::new();
        proc.add(21, 1, 100_000, "lvsd\0status\0", Some(7));
        assert!(!proc.is_starting(true, Duration::ZERO));
    }

    #[test]
    fn client_waits_for_dataplane_until_ten_seconds_after_its_start() {
        assert!(waits_for(1, 99_000, "lvs-dataplane\0", Some(7)));
        assert!(!waits_for(1, 98_990, "lvs-dataplane\0", Some(7)));
    }

    #[test]
    fn client_ignores_dataplane_of_another_namespace_unless_socket_path_is_set() {
        let proc = Proc::new();
        proc.add(11, 1, 100_000, "lvs-dataplane\0", Some(8));
        assert!(!proc.is_starting(true, Duration::ZERO));
        assert!(proc.is_starting(false, Duration::ZERO));
        // The namespace of another user's process cannot be read.
        assert!(waits_for(1, 100_000, "lvs-dataplane\0", None));
    }

    #[test]
    fn client_waits_one_second_for_dataplane_that_has_not_entered_its_namespace() {
        let command_line = "nsenter\0--net=/run/netns/lb\0lvs-dataplane\0";
        assert!(waits_for(5, 100_000, command_line, Some(8)));
        assert!(
            !waits_for(5, 99_800, command_line, Some(8)),
            "the client waits for an old process"
        );
    }

    #[test]
    fn client_waits_one_second_for_sibling_before_exec() {
        for command_line in ["bash\0setup.sh\0", ""] {
            assert!(
                waits_for(5, 100_000, command_line, Some(7)),
                "{command_line:?}"
            );
            // The process will become `ip netns exec`.
            assert!(
                waits_for(5, 100_000, command_line, Some(8)),
                "{command_line:?}"
            );
            assert!(
                !waits_for(4, 100_000, command_line, Some(7)),
                "the client waits for a process that is no sibling: {command_line:?}"
            );
            assert!(
                !waits_for(5, 99_800, command_line, Some(7)),
                "the client waits for an old process: {command_line:?}"
            );
        }
        let proc = Proc::new();
        proc.add(11, 5, 100_000, "bash\0setup.sh\0", Some(7));
        assert!(!proc.is_starting(true, Duration::from_secs(2)));
    }

    #[test]
    fn client_does_not_wait_for_exited_process() {
        let proc = Proc::new();
        proc.add(11, 5, 100_000, "", Some(7));
        let stat = proc.0.path().join("11/stat");
        let text = fs::read_to_string(&stat).expect("the stat file of this process is readable");
        fs::write(stat, text.replace(") S ", ") Z ")).expect("the file can be written");
        assert!(!proc.is_starting(true, Duration::ZERO));
    }

    #[test]
    fn retry_ends_at_success_or_one_attempt_after_starting_process_exited() {
        let mut attempts = 0;
        let mut promises = 3;
        let result = retry(
            || {
                attempts += 1;
                attempts
            },
            |_| true,
            |_| {
                promises -= 1;
                promises > 0
            },
        );
        // Three attempts failed, and one more was made after the last check.
        assert_eq!(result, 4);
        let result = retry(
            || 1,
            |_| false,
            |_| panic!("a check was made after a successful attempt"),
        );
        assert_eq!(result, 1);
    }

    #[test]
    fn own_process_has_start_command_line_and_parent_from_proc() {
        let own = Processes::system().process(std::process::id());
        let own = own.expect("the process is in /proc");
        assert!(own.start > 0 && !own.command_line.is_empty());
        assert_eq!(own.parent, std::os::unix::process::parent_id());
    }
}

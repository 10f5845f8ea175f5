//! Runs keepalived on a file to get a dump of its configuration, without any effect on the host.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use landlock::{
    ABI, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
    RulesetStatus,
};
use rustix::process::{Pid, Signal, kill_process};

/// Time limit for keepalived's output.
const PATIENCE: Duration = Duration::from_secs(20);
/// Interval at which lvsd checks keepalived's output, and whether keepalived has exited.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum size of keepalived's output in bytes.
const PRINTED_MAX: u64 = 64 << 20;

/// Finds a program in `PATH` or in the system directories; `None` if it is in none of them.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

/// Runs keepalived on a file, and returns its output: the dump of its configuration, or errors.
///
/// # Errors
/// keepalived could not be run; the text is the reason.
pub fn keepalived(file: &Path, config_id: Option<&str>) -> Result<String, String> {
    let Some(program) = find("keepalived") else {
        return Err("keepalived is not installed on this host".to_owned());
    };
    let Some(unshare) = find("unshare") else {
        return Err("`unshare` of util-linux is not installed on this host".to_owned());
    };
    let directory = std::env::temp_dir().join(format!("lvsd-convert-{}", std::process::id()));
    std::fs::create_dir(&directory)
        .map_err(|error| format!("cannot create {}: {error}", directory.display()))?;
    let at = |name: &str| directory.join(name);
    let mut command = Command::new(&unshare);
    command
        .args(["--net", "--"])
        .arg(&program)
        .args([
            "--dont-fork",
            "--log-console",
            "--no-syslog",
            "--dump-conf",
            "--check",
        ])
        .arg("--pid")
        .arg(at("parent.pid"))
        .arg("--checkers_pid")
        .arg(at("checkers.pid"))
        .arg("--vrrp_pid")
        .arg(at("vrrp.pid"))
        .arg("--use-file")
        .arg(file);
    if let Some(id) = config_id {
        command.arg("--config-id").arg(id);
    }
    let output = at("output");
    let asked = std::fs::File::create(&output)
        .and_then(|file| Ok((file.try_clone()?, file)))
        .map_err(|error| format!("cannot create {}: {error}", output.display()))
        .and_then(|(out, errors)| {
            command.stdin(Stdio::null()).stdout(out).stderr(errors);
            let programs = [unshare.clone(), program.clone()];
            let writable = directory.clone();
            // Landlock applies to this thread and the processes that it starts.
            let run = std::thread::spawn(move || {
                confine(&programs, &writable)?;
                run(&mut command, &writable.join("output"))
            });
            run.join().unwrap_or_else(|_| {
                Err("internal error of lvsd: the thread that runs keepalived panicked".to_owned())
            })
        });
    let _ = std::fs::remove_dir_all(&directory);
    asked
}

/// Limits this thread and its child processes: they can execute only these programs and the dynamic
/// loaders, and write only to this directory and `/dev/null`. keepalived thus runs no script and
/// opens no FIFO that its file names.
fn confine(programs: &[PathBuf], directory: &Path) -> Result<(), String> {
    let writes = AccessFs::from_write(ABI::V1);
    // Programs need the loader as well.
    let loaders = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"].map(Path::new);
    let loaders = loaders
        .iter()
        .flat_map(|place| {
            super::files::glob(place, "ld-*")
                .into_iter()
                .chain(super::files::glob(place, "*/ld-*"))
        })
        .flatten();
    let made = || -> Result<_, RulesetError> {
        let mut rules = Ruleset::default()
            .handle_access(writes | AccessFs::Execute)?
            .create()?;
        for path in programs.iter().cloned().chain(loaders) {
            if let Ok(place) = PathFd::new(&path) {
                rules = rules.add_rule(PathBeneath::new(place, AccessFs::Execute))?;
            }
        }
        for (path, access) in [
            (directory, writes),
            (Path::new("/dev/null"), AccessFs::WriteFile.into()),
        ] {
            if let Ok(place) = PathFd::new(path) {
                rules = rules.add_rule(PathBeneath::new(place, access))?;
            }
        }
        rules.restrict_self()
    };
    match made() {
        Ok(status) if status.ruleset == RulesetStatus::FullyEnforced => Ok(()),
        Ok(_) => Err(
            "this kernel has no Landlock: keepalived would run the scripts of the file".to_owned(),
        ),
        Err(error) => Err(format!("cannot restrict keepalived with Landlock: {error}")),
    }
}

/// Runs keepalived until it exits, at most for [`PATIENCE`], and returns its output. Sends SIGTERM
/// after keepalived has printed its configuration.
fn run(command: &mut Command, output: &Path) -> Result<String, String> {
    let mut child = command
        .spawn()
        .map_err(|error| format!("cannot start keepalived: {error}"))?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let end = |signal: Signal| pid.map(|pid| kill_process(pid, signal));
    let begin = Instant::now();
    let mut asked_to_end = false;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => break,
            Ok(None) if begin.elapsed() > PATIENCE => {
                end(Signal::KILL);
                let _ = child.wait();
                break;
            }
            Ok(None) => {}
            Err(error) => return Err(format!("cannot wait for keepalived: {error}")),
        }
        // keepalived handles a signal only after it has printed everything.
        if !asked_to_end && read(output).contains("< LVS Topology >") {
            asked_to_end = true;
            end(Signal::TERM);
        }
        std::thread::sleep(CHECK_INTERVAL);
    }
    let printed = read(output);
    if printed.contains("unshare failed") {
        return Err("keepalived needs a separate network namespace, which only root can create: run `lvsd convert --check` as root".to_owned());
    }
    Ok(printed)
}

fn read(path: &Path) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.take(PRINTED_MAX).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

//! Connects to a dataplane, and starts one if none answers and the user has set `LVS_AUTOSTART=1`.

use std::env;
use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use lvs_api::{Address, Client, Error, starting};

/// The environment variable that requests an automatic start, with the value `1`.
pub const VARIABLE: &str = "LVS_AUTOSTART";

const DATAPLANE: &str = "lvs-dataplane";
const LOG: &str = "/run/lvs-dataplane.log";
/// Longest wait for a started dataplane to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connects to the dataplane at `address`, and waits for one that is starting. With
/// `LVS_AUTOSTART=1`, starts a dataplane if none answers.
///
/// # Errors
///
/// One line with the error and a fix.
pub fn connect(address: &Address) -> Result<Client, String> {
    match starting::connect(address) {
        Err(Error::Absent { .. } | Error::Stale { .. })
            if env::var_os(VARIABLE).is_some_and(|value| value == "1") =>
        {
            start(address)
        }
        other => other.map_err(|error| error.to_string()),
    }
}

fn start(address: &Address) -> Result<Client, String> {
    let program = program();
    let log = OpenOptions::new().create(true).append(true).open(LOG);
    let mut command = Command::new(&program);
    if *address != Address::default() {
        command.arg("--socket").arg(address.to_string());
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log.map_or_else(|_| Stdio::null(), Stdio::from))
        // Ctrl-C in this terminal must not stop the dataplane.
        .process_group(0);
    let mut child = command.spawn().map_err(|error| {
        format!(
            "cannot start {}: {error}; install the lvs-dataplane of this host next to lvsadm or in PATH, as an executable file",
            program.display()
        )
    })?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        // Check first whether the process has exited: another dataplane may have started earlier,
        // and answer.
        let ended = child.try_wait().ok().flatten();
        let error = match Client::connect(address) {
            Ok(client) => return Ok(client),
            Err(error) => error,
        };
        if let Some(status) = ended {
            return Err(format!(
                "{} has exited ({status}) without an answer; see {LOG}",
                program.display()
            ));
        }
        if Instant::now() > deadline {
            return Err(format!(
                "{} was started, but does not answer: {error}; see {LOG}",
                program.display()
            ));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the path of `lvs-dataplane` in the directory of this program, or else its name for a
/// search in `PATH`.
fn program() -> PathBuf {
    env::current_exe()
        .ok()
        .map(|own| own.with_file_name(DATAPLANE))
        .filter(|path| path.exists())
        .unwrap_or_else(|| DATAPLANE.into())
}

//! `type = "exec"`: a program's exit code is the result, as with keepalived's `MISC_CHECK`.

use std::io;
use std::net::SocketAddr;
use std::process::{ExitStatus, Stdio};

use tokio::io::AsyncReadExt;
use tokio::process::{Child, ChildStdout, Command};

use super::{Advice, Asked, Misfit, ProbeError, ProbeKind, quoted};
use crate::health::Weight;
use crate::notify_command;
use crate::text::{Diagnostic, Keys};

/// Maximum number of bytes of a program's output that lvsd keeps, for the reason of a failure.
const OUTPUT_MAX: usize = 1024;

/// A check that runs a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Exec {
    /// The command and its arguments.
    command: Vec<String>,
    /// Whether an exit code of 2 or more sets the weight to the code minus 2.
    dynamic: bool,
    /// The user and the group that run the program; without effect unless lvsd runs as root.
    user: Option<(u32, u32)>,
}

impl ProbeKind for Exec {
    const NAME: &'static str = "exec";
    const KEYS: &'static [&'static str] = &["command", "dynamic", "user"];
    // The output (both ends during the start), and the process.
    const DESCRIPTORS: u32 = 4;

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let command = keys.strings("command")?.unwrap_or_default();
        if !command
            .first()
            .is_some_and(|program| program.starts_with('/'))
        {
            let at = keys.place("command");
            keys.report(
                Diagnostic::error(at, "`command` of the check is not the complete path of a program")
                    .help("write command = [\"/usr/local/bin/check\", \"{address}\"]; {address} and {port} are those of the server"),
            );
            return None;
        }
        let name = keys.string("user")?.unwrap_or_else(|| "nobody".to_owned());
        let user = notify_command::user(&name);
        if user.is_none() {
            let at = keys.place("user");
            keys.report(
                Diagnostic::error(at, format!("there is no user {name:?}"))
                    .help("use a user of /etc/passwd, by name or number"),
            );
            return None;
        }
        Some(Self {
            command,
            dynamic: keys.boolean("dynamic")?.unwrap_or(false),
            user,
        })
    }

    fn bind(&self, server: SocketAddr) -> Result<Self, Misfit> {
        let (address, port) = (server.ip().to_string(), server.port().to_string());
        let filled = |word: &String| word.replace("{address}", &address).replace("{port}", &port);
        Ok(Self {
            command: self.command.iter().map(filled).collect(),
            ..self.clone()
        })
    }

    fn target(&self, server: SocketAddr) -> String {
        let program = self.command.first().map_or("", String::as_str);
        format!("{program} for {server}")
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        let Some((program, arguments)) = self.command.split_first() else {
            return Err(ProbeError::Local("the command is empty".to_owned()));
        };
        let here = |why: String| ProbeError::Local(format!("{program}: {why}"));
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("LVSD_SERVER", asked.server.to_string())
            .env("LVSD_ADDRESS", asked.server.ip().to_string())
            .env("LVSD_PORT", asked.server.port().to_string())
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .kill_on_drop(true);
        // The program does not need the privileges of lvsd.
        if let Some((uid, gid)) = self.user
            && rustix::process::geteuid().is_root()
        {
            command.uid(uid).gid(gid);
        }
        let child = command.spawn().map_err(|error| here(error.to_string()))?;
        let mut group = Group(child);
        let output = group.0.stdout.take();
        let (status, message) = finished(&mut group.0, output)
            .await
            .map_err(|error| here(error.to_string()))?;
        match status.code() {
            Some(0) => Ok(Advice::NONE),
            Some(code @ 2..) if self.dynamic => Ok(Advice::weight(Weight::Exactly(code - 2))),
            _ => {
                let why = match message.is_empty() {
                    true => String::new(),
                    false => format!(": {}", quoted(&message)),
                };
                Err(ProbeError::server(format!("{program}: {status}{why}")))
            }
        }
    }
}

/// Waits until a program has exited; returns its status and the beginning of its output. It does
/// not wait for child processes that still have the output open.
async fn finished(
    child: &mut Child,
    output: Option<ChildStdout>,
) -> io::Result<(ExitStatus, Vec<u8>)> {
    let mut message = Vec::new();
    let Some(mut output) = output else {
        return Ok((child.wait().await?, message));
    };
    let mut piece = [0; 4096];
    let status = loop {
        tokio::select! {
            biased;
            status = child.wait() => break status?,
            // All output is read, so that a program with long output does not block forever.
            read = output.read(&mut piece) => match read {
                Ok(read @ 1..) => keep(&mut message, &piece[..read]),
                Ok(0) | Err(_) => break child.wait().await?,
            },
        }
    };
    // Only output that is already in the pipe: such a read does not block.
    while message.len() < OUTPUT_MAX
        && let Ok(read @ 1..) = rustix::io::read(&output, &mut piece)
    {
        keep(&mut message, &piece[..read]);
    }
    Ok((status, message))
}

/// Appends the bytes that were read to `message`, up to [`OUTPUT_MAX`].
fn keep(message: &mut Vec<u8>, read: &[u8]) {
    let room = OUTPUT_MAX - message.len();
    message.extend_from_slice(&read[..read.len().min(room)]);
}

/// A program, which is killed with its process group if this is dropped before the program exits.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        // The id is `None` after the process has been waited for.
        notify_command::end_group(self.0.id());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::health::Network;
    use crate::health::Prober;
    use crate::health::probe::hostile::{PATIENCE, check, probe};

    fn shell(script: &str, more: &str) -> String {
        format!("{{ type = \"exec\", command = [\"/bin/sh\", \"-c\", '{script}']{more} }}")
    }

    #[tokio::test]
    async fn exec_probe_maps_exit_codes_like_keepalived_and_missing_program_to_local_error() {
        let server: SocketAddr = "127.0.0.1:81".parse().unwrap();
        let weight = |n| Ok(Advice::weight(Weight::Exactly(n)));
        for (code, dynamic) in [(2, weight(0)), (3, weight(1)), (255, weight(253))] {
            let script = format!("exit {code}");
            let plain = probe(&shell(&script, ""), server).await;
            assert!(matches!(plain, Err(ProbeError::Server(_))), "{plain:?}");
            let message = probe(&shell(&script, ", dynamic = true"), server).await;
            assert_eq!(message, dynamic, "{code}");
        }
        let dynamic = ", dynamic = true";
        assert_eq!(
            probe(&shell("exit 0", dynamic), server).await,
            Ok(Advice::NONE)
        );
        let message = probe(
            &shell("echo no {address} {port} $LVSD_SERVER; exit 1", dynamic),
            server,
        )
        .await;
        let Err(ProbeError::Server(why)) = message else {
            panic!("{message:?}");
        };
        assert!(
            why.text.contains("\"no 127.0.0.1 81 127.0.0.1:81\""),
            "{why}"
        );
        let killed = probe(&shell("kill -9 $$", ""), server).await;
        assert!(matches!(killed, Err(ProbeError::Server(_))), "{killed:?}");
        let missing = probe("{ type = \"exec\", command = \"/no/such\" }", server).await;
        assert!(matches!(missing, Err(ProbeError::Local(_))), "{missing:?}");
        let endless = probe(&shell("yes | head -c 3000000; exit 1", ""), server).await;
        assert!(matches!(endless, Err(ProbeError::Server(_))), "{endless:?}");
    }

    #[tokio::test]
    async fn exec_probe_ignores_child_that_keeps_output_open() {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let file = directory.path().join("child");
        let child = format!("sleep 600 & echo $! > {}", file.display());
        let server: SocketAddr = "127.0.0.1:81".parse().unwrap();
        let user = format!(", user = \"{}\"", rustix::process::getuid().as_raw());
        for (script, wanted) in [
            (format!("{child}; exit 0"), None),
            (
                format!("{child}; echo disk full; exit 1"),
                Some("disk full"),
            ),
            (format!("yes | head -c 3000000; {child}; exit 0"), None),
            // The program itself continues.
            (format!("{child}; wait"), Some("did not answer")),
        ] {
            let mut check = check(&shell(&script, &user), server);
            check.timeout = match wanted {
                Some("did not answer") => Duration::from_millis(300),
                _ => PATIENCE,
            };
            let result = Network::default().probe(&check).await;
            match (wanted, &result) {
                (None, Ok(advice)) => assert_eq!(*advice, Advice::NONE),
                (Some(why), Err(ProbeError::Server(reason))) => {
                    assert!(reason.text.contains(why), "{script}: {reason}");
                }
                _ => panic!("{script}: {result:?}"),
            }
            if wanted == Some("did not answer") {
                // Its child was killed with it.
                continue;
            }
            let pid = std::fs::read_to_string(&file).expect("the file can be read");
            let pid =
                rustix::process::Pid::from_raw(pid.trim().parse().expect("the text is a number"));
            let pid = pid.expect("the number is a process id");
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)
                .expect("the process is killed");
        }
    }

    /// A child that writes endlessly does not fill the memory or delay the end of the check.
    #[tokio::test]
    async fn exec_probe_ignores_child_that_writes_endlessly() {
        let server: SocketAddr = "127.0.0.1:81".parse().unwrap();
        let user = format!(", user = \"{}\"", rustix::process::getuid().as_raw());
        let check = shell("yes & exit 0", &user);
        assert_eq!(probe(&check, server).await, Ok(Advice::NONE));
    }

    #[tokio::test]
    async fn exec_probe_kills_child_processes_at_its_timeout() {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let mark = directory.path().join("mark");
        std::fs::write(&mark, "").expect("the file can be written");
        let script = format!("(sleep 2; rm {}) & sleep 100", mark.display());
        let user = format!(", user = \"{}\"", rustix::process::getuid().as_raw());
        let mut check = check(&shell(&script, &user), "127.0.0.1:81".parse().unwrap());
        check.timeout = Duration::from_millis(200);
        let result = Network::default().probe(&check).await;
        assert!(matches!(result, Err(ProbeError::Server(_))), "{result:?}");
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert!(mark.exists());
    }
}

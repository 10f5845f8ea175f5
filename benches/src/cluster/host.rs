//! Starts a shell on a host with clients, and lets it run httperf on request.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// Maximum number of bytes that a host prints for one step. The histogram of httperf has up to
/// 100,000 lines.
const MOST_PRINTED: usize = 4 << 20;
/// Maximum length of a line, in bytes.
const MOST_LINE: usize = 4096;
/// Further error messages of a host are discarded when this number of bytes is stored.
const MOST_COMPLAINT: usize = 2048;
/// Prefix of the lines that the script on a host prints.
const MARK: &str = "lvs-bench: ";
/// Interval at which a wait for a line of a host checks for an interruption.
const LOOK: Duration = Duration::from_millis(200);

/// The script on each host: on request, it prints the host's time, or waits until a time of the
/// host's clock and then runs httperf.
const SCRIPT: &str = r#"
httperf=$1
for program in "$httperf" timeout date sleep; do
    command -v "$program" >/dev/null || { echo "lvs-bench: failed $program is not installed there"; exit 1; }
done
echo "lvs-bench: ready"
while read -r word start limit words; do
    case $word in
    clock) echo "lvs-bench: clock $(date +%s%N)" ;;
    run)
        eval "set -- $words"
        left=$((start - $(date +%s%N)))
        [ $left -le 0 ] || sleep "$((left / 1000000000)).$(printf %09d $((left % 1000000000)))"
        echo "lvs-bench: began $(date +%s%N)"
        status=0
        timeout --foreground -k 1 "$limit" "$httperf" "$@" 2>&1 </dev/null || status=$?
        echo "lvs-bench: ended $status"
        ;;
    esac
done
"#;

/// The location of a host, as given on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The machine on which this process runs.
    Local,
    /// A network namespace that `ip netns` created.
    Namespace(String),
    /// Another machine, which is reached with OpenSSH's client.
    Ssh {
        /// `host` or `user@host`.
        to: String,
        /// The port, if it is not the default of ssh.
        port: Option<u16>,
    },
}

impl std::str::FromStr for Place {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "local" {
            return Ok(Self::Local);
        }
        let Some((kind, rest)) = text.split_once(':') else {
            bail!("{text} is not a host: expected local, netns:NAME or ssh:[USER@]HOST[:PORT]");
        };
        let is_name = |name: &str| {
            let good = |c: char| c.is_ascii_alphanumeric() || "._-@%:+".contains(c);
            !name.is_empty() && !name.starts_with('-') && name.chars().all(good)
        };
        match kind {
            "netns" => {
                ensure!(
                    is_name(rest),
                    "{text}: {rest:?} is not the name of a network namespace"
                );
                Ok(Self::Namespace(rest.to_owned()))
            }
            "ssh" => {
                // An IPv6 address before a port is in brackets.
                let (user, host) = match rest.rsplit_once('@') {
                    Some((user, host)) => (Some(user), host),
                    None => (None, rest),
                };
                let (host, port) = match host.strip_prefix('[').and_then(|v6| v6.split_once(']')) {
                    Some((v6, "")) => (v6, None),
                    Some((v6, port)) => {
                        let port = port.strip_prefix(':');
                        (
                            v6,
                            Some(port.with_context(|| {
                                format!("{text}: the text after ] is not :PORT")
                            })?),
                        )
                    }
                    None => match host.split_once(':') {
                        Some((host, port)) if !port.contains(':') => (host, Some(port)),
                        _ => (host, None),
                    },
                };
                let port = port.map(|port| {
                    let number = port.parse::<u16>().ok().filter(|port| *port > 0);
                    number.with_context(|| format!("{text}: {port:?} is not a port"))
                });
                let to = match user {
                    Some(user) => format!("{user}@{host}"),
                    None => host.to_owned(),
                };
                ensure!(
                    is_name(&to) && !host.is_empty() && !host.starts_with('-'),
                    "{text}: ssh cannot reach {to:?}; write ssh:[USER@]HOST[:PORT]"
                );
                let port = port.transpose()?;
                Ok(Self::Ssh { to, port })
            }
            _ => bail!(
                "{text}: the kind of host {kind} is unknown; use local, netns:NAME or ssh:[USER@]HOST[:PORT]"
            ),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("local"),
            Self::Namespace(name) => write!(f, "netns:{name}"),
            Self::Ssh { to, port: None } => write!(f, "ssh:{to}"),
            Self::Ssh {
                to,
                port: Some(port),
            } => write!(f, "ssh:{to} port {port}"),
        }
    }
}

impl Place {
    /// Returns a command that runs the words of [`shell`] on this host. `options`: the arguments of
    /// ssh's `-o`.
    #[must_use]
    pub fn command(&self, options: &[String], httperf: &str) -> Command {
        let words = shell(httperf);
        match self {
            Self::Local => {
                let mut command = Command::new(words[0]);
                command.args(&words[1..]);
                command
            }
            Self::Namespace(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name]).args(words);
                command
            }
            Self::Ssh { to, port } => {
                let mut command = Command::new("ssh");
                command.args(["-T", "-oBatchMode=yes"]);
                for option in options {
                    command.arg(format!("-o{option}"));
                }
                // ssh uses the first value of an option, so the user's options are first.
                command.args(["-oConnectTimeout=10", "-oServerAliveInterval=5"]);
                if let Some(port) = port {
                    command.args(["-p", &port.to_string()]);
                }
                let words = words.map(quote).join(" ");
                command.args(["--", to, &words]);
                command
            }
        }
    }
}

/// Returns the words of a command that runs this program's script on a host. The script starts
/// `httperf`, a program's name or path, on request.
#[must_use]
pub fn shell(httperf: &str) -> [&str; 5] {
    ["sh", "-c", SCRIPT, "lvs-bench", httperf]
}

/// Quotes a text as one word for a shell.
pub(super) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A line from a host; an error instead of each piece of a line that is too long.
type Line = Result<String>;

/// A host that runs httperf, and the shell on it; it is usable after [`Host::wait_ready`].
#[derive(Debug)]
pub(super) struct Host {
    pub(super) name: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<Line>,
    complaint: Arc<Mutex<String>>,
    stop: Arc<AtomicBool>,
    /// Nanoseconds by which the host's clock is ahead of the local clock.
    ahead: i128,
    /// Maximum error of `ahead`.
    pub(super) unsure: Duration,
}

impl Host {
    /// Starts the host's shell. [`Host::wait_ready`] waits for it, so that many shells can start at
    /// the same time.
    pub(super) fn start(name: &str, mut command: Command, stop: Arc<AtomicBool>) -> Result<Self> {
        let mut child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let input = child.stdin.take();
        let (Some(output), Some(errors)) = (child.stdout.take(), child.stderr.take()) else {
            bail!("the shell of the host has no pipes");
        };
        let (sender, lines) = sync_channel(1024);
        thread::spawn(move || read_lines(output, &sender));
        let complaint = Arc::new(Mutex::new(String::new()));
        let kept = complaint.clone();
        thread::spawn(move || keep_first(errors, &kept));
        Ok(Self {
            name: name.to_owned(),
            child,
            input,
            lines,
            complaint,
            stop,
            ahead: 0,
            unsure: Duration::ZERO,
        })
    }

    /// Waits until the host can run httperf, and compares the clocks.
    pub(super) fn wait_ready(&mut self, deadline: Instant) -> Result<()> {
        while self.own_line(deadline)? != "ready" {}
        let mut best: Option<(Duration, i128)> = None;
        for _ in 0..5 {
            let (asked, at) = (Instant::now(), now());
            self.command("clock")?;
            let line = self.own_line(deadline)?;
            let round_trip = asked.elapsed();
            let word = line.strip_prefix("clock ").unwrap_or_default();
            let clock: i128 = word.parse().map_err(|_| {
                anyhow!("the output of its `date +%s%N`, {word:?}, is not a time in nanoseconds")
            })?;
            let middle = at + i128::try_from(round_trip.as_nanos() / 2)?;
            if best.is_none_or(|(least, _)| round_trip < least) {
                best = Some((round_trip, clock - middle));
            }
        }
        let (round_trip, ahead) = best.context("the host has not reported its time")?;
        (self.ahead, self.unsure) = (ahead, round_trip / 2);
        Ok(())
    }

    /// Starts httperf on the host at the time `start` of the local clock, for `limit` at most.
    pub(super) fn run(&mut self, start: i128, limit: Duration, words: &[String]) -> Result<()> {
        let words: Vec<_> = words.iter().map(|word| quote(word)).collect();
        let (start, limit) = (start + self.ahead, limit.as_secs_f64().ceil());
        self.command(&format!("run {start} {limit} {}", words.join(" ")))
    }

    /// Waits until httperf has exited. Returns its output, and the seconds from `start` until it
    /// started.
    pub(super) fn ended(&mut self, start: i128, deadline: Instant) -> Result<(String, f64)> {
        let mut printed = String::new();
        let mut late = 0.0;
        loop {
            let line = self.line(deadline)?;
            let Some(own) = line.strip_prefix(MARK) else {
                ensure!(
                    printed.len() + line.len() < MOST_PRINTED,
                    "the output of the host is too long for an output of httperf"
                );
                printed.push_str(&line);
                printed.push('\n');
                continue;
            };
            if let Some(began) = own.strip_prefix("began ") {
                let began: i128 = began
                    .parse()
                    .context("the start time of httperf in its output is not a number")?;
                #[expect(clippy::cast_precision_loss, reason = "a difference of seconds")]
                let seconds = (began - self.ahead - start) as f64 / 1e9;
                late = seconds;
            }
            match own.strip_prefix("ended ") {
                Some("0") => return Ok((printed, late)),
                // Exit statuses of timeout(1).
                Some("124" | "137") => bail!("httperf exceeded its time limit, and was killed"),
                Some(status) => {
                    let last = printed.lines().last().unwrap_or("it printed nothing");
                    bail!("httperf exited with status {status}: {last}")
                }
                None => {}
            }
        }
    }

    fn command(&mut self, words: &str) -> Result<()> {
        let reported = match &mut self.input {
            Some(input) => writeln!(input, "{words}").and_then(|()| input.flush()),
            None => Ok(()),
        };
        reported.map_err(|_| self.gone())
    }

    /// Returns the next line of the script. Skips other lines, such as those of a login script.
    fn own_line(&mut self, deadline: Instant) -> Result<String> {
        loop {
            let line = self.line(deadline)?;
            if let Some(own) = line.strip_prefix(MARK) {
                match own.strip_prefix("failed ") {
                    Some(why) => bail!("{why}"),
                    None => return Ok(own.to_owned()),
                }
            }
        }
    }

    fn line(&mut self, deadline: Instant) -> Result<String> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left.min(LOOK)) {
                Ok(line) => return line,
                Err(RecvTimeoutError::Disconnected) => return Err(self.gone()),
                Err(RecvTimeoutError::Timeout) => {
                    ensure!(!self.stop.load(Ordering::Relaxed), "interrupted");
                    ensure!(
                        !left.is_zero(),
                        "the host did not answer within its time limit"
                    );
                }
            }
        }
    }

    /// Returns the reason why the connection to the host has ended, if it is known.
    fn gone(&mut self) -> anyhow::Error {
        // Another thread reads the error output.
        let deadline = Instant::now() + Duration::from_secs(1);
        let mut status = self.child.try_wait();
        while matches!(status, Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
            status = self.child.try_wait();
        }
        thread::sleep(Duration::from_millis(20));
        let complaint = self.complaint.lock().map(|text| text.trim().to_owned());
        let complaint = complaint.unwrap_or_default();
        match status {
            Ok(Some(status)) if complaint.is_empty() => {
                anyhow!("the shell of the host exited ({status})")
            }
            Ok(Some(_)) => anyhow!("{complaint}"),
            _ if complaint.is_empty() => anyhow!("the shell of the host does not answer any more"),
            _ => anyhow!("the shell of the host does not answer any more: {complaint}"),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.input.take());
        if let Ok(group) = i32::try_from(self.child.id()) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGTERM);
        }
        // ssh and sh exit at once. Other processes are killed after half a second.
        for _ in 0..50 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        if let Ok(group) = i32::try_from(self.child.id()) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

/// Returns the time of the local clock, in nanoseconds since 1970.
pub(super) fn now() -> i128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| i128::try_from(since.as_nanos()).unwrap_or(0))
}

fn read_lines(output: impl Read, lines: &SyncSender<Line>) {
    let mut output = BufReader::new(output);
    loop {
        let mut line = Vec::new();
        let read = (&mut output)
            .take(MOST_LINE as u64)
            .read_until(b'\n', &mut line);
        let line = match read {
            Ok(0) | Err(_) => return,
            Ok(_) if line.ends_with(b"\n") || line.len() < MOST_LINE => {
                Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
            }
            Ok(_) => Err(anyhow!(
                "the output of the host has a line of more than {MOST_LINE} bytes"
            )),
        };
        if lines.send(line).is_err() {
            return;
        }
    }
}

/// Reads `errors` to the end, and stores its beginning in `kept`.
fn keep_first(mut errors: impl Read, kept: &Mutex<String>) {
    let mut buffer = [0; 1024];
    while let Ok(read @ 1..) = errors.read(&mut buffer) {
        if let Ok(mut kept) = kept.lock()
            && kept.len() < MOST_COMPLAINT
        {
            kept.push_str(&String::from_utf8_lossy(&buffer[..read]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str) -> Result<Place> {
        text.parse()
    }

    #[test]
    fn cluster_host_location_is_parsed_and_invalid_location_refused() {
        assert_eq!(place("local").expect("the place is valid"), Place::Local);
        assert_eq!(
            place("netns:c-1").expect("the place is valid"),
            Place::Namespace("c-1".into())
        );
        for (text, to, port) in [
            ("ssh:a", "a", None),
            ("ssh:u@a:22", "u@a", Some(22)),
            ("ssh:u@[fd00::1]:22", "u@fd00::1", Some(22)),
            ("ssh:[fd00::1]", "fd00::1", None),
            ("ssh:fd00::1", "fd00::1", None),
        ] {
            let to = to.to_owned();
            assert_eq!(place(text).expect(text), Place::Ssh { to, port });
        }
        for wrong in [
            "",
            "here",
            "netns:",
            "netns:-x",
            "netns:a b",
            "ssh:",
            "ssh:-oProxyCommand=x",
            "ssh:u@",
            "ssh:a:0",
            "ssh:a:x",
            "ssh:u@-x",
            "ssh:[fd00::1]x",
            "tcp:a",
            "ssh:a;b",
        ] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn shell_word_with_special_characters_is_quoted() {
        assert_eq!(quote("/a?b=$(c)&d='e'"), r"'/a?b=$(c)&d='\''e'\'''");
    }

    #[test]
    fn long_line_of_host_is_an_error_and_later_lines_are_read() {
        let (sender, lines) = sync_channel(4);
        let long = "x".repeat(2 * MOST_LINE) + "\nend";
        thread::spawn(move || read_lines(long.as_bytes(), &sender));
        let all: Vec<Line> = lines.iter().collect();
        assert!(all[0].is_err() && all[1].is_err());
        assert_eq!(
            all.last().map(|line| line.as_deref().ok()),
            Some(Some("end"))
        );
    }
}

//! The player of one session: a process in namespaces of its own, with an engine of its own.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use lvs_core::api::{Call, Sysctl};
use lvs_dataplane::control::{Address, Client};
use lvs_dataplane::engine::bench::{
    Advance, BenchFrame, Inject, Interface, Mark, Neighbour, Network, Route,
};
use nix::sched::{CloneFlags, unshare};
use serde::de::IgnoredAny;
use serde_json::Value;

use super::compare::{Ran, same};
use super::{Session, Step, TranscriptReport, etc};
use crate::programs;

/// What the player says when it waits for its users and its session.
pub(super) const READY: &str = "ready\n";
/// How long an engine may take to start.
const START: Duration = Duration::from_secs(20);
/// `lvs-testbed play-transcript`: reads a session from stdin once its parent has given it users,
/// and writes a report to stdout.
///
/// # Errors
/// There can be no namespaces, or the engine does not start.
pub fn main() -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET)
        .context("making namespaces: are user namespaces forbidden here?")?;
    print!("{READY}");
    std::io::stdout().flush()?;
    // Its end also tells that there are users.
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let session: Session = serde_json::from_str(&text).context("reading the session")?;
    let report = play(&session).unwrap_or_else(|error| TranscriptReport::broken(&session, &error));
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// The programs and files of a session.
struct Stage {
    lvsadm: PathBuf,
    engine: Engine,
    client: Client,
    /// Removed with everything in it; last.
    _dir: tempfile::TempDir,
}

/// Ended with the session.
struct Engine(Child);

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Stage {
    fn set(session: &Session) -> anyhow::Result<Self> {
        etc::private_mounts()?;
        let dir = tempfile::tempdir()?;
        etc::open_to_all(dir.path(), 0o755)?;
        // The program may lie where the recorded user may not go.
        let lvsadm = dir.path().join("lvsadm");
        fs::write(&lvsadm, "")?;
        etc::bind(&programs::find("lvsadm")?, &lvsadm)?;
        let program = programs::find("lvs-dataplane")?;
        etc::replace(dir.path(), &session.hosts, &session.unknown_services)?;
        let mut command = Command::new(program);
        command.args(["--no-interfaces", "--virtual-time"]);
        if session.kernel.starts_with("6.1.") {
            command.args(["--compat", "6.1"]);
        }
        let engine = Engine(
            command
                .env_remove("LVS_SOCKET")
                .env("LVS_LOG", "warn")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .context("starting the engine")?,
        );
        let client = connect()?;
        Ok(Self {
            lvsadm,
            engine,
            client,
            _dir: dir,
        })
    }

    /// Runs a command and waits for its end.
    fn run(&self, argv: &[String], stdin: &str, uid: Option<u32>) -> anyhow::Result<Ran> {
        let (argv0, arguments) = argv.split_first().context("an empty command")?;
        let mut command = Command::new(&self.lvsadm);
        command
            .arg0(argv0)
            .args(arguments)
            .current_dir("/")
            .env_clear()
            .env("LANG", "C")
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        let mut child = command.spawn().with_context(|| match uid {
            Some(uid) => format!("running lvsadm as user {uid}: this takes root"),
            None => "running lvsadm".to_owned(),
        })?;
        let mut input = child.stdin.take().context("no input")?;
        let output = std::thread::scope(|scope| {
            // It need not read what it gets.
            scope.spawn(move || input.write_all(stdin.as_bytes()));
            child.wait_with_output()
        })?;
        let signal = output.status.signal().unwrap_or(0);
        Ok(Ran {
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            exit: output.status.code().unwrap_or(-signal),
        })
    }
}

fn connect() -> anyhow::Result<Client> {
    let started = Instant::now();
    loop {
        match Client::connect(&Address::default()) {
            Ok(client) => return Ok(client),
            Err(error) if started.elapsed() > START => bail!("the engine does not start: {error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// The machine on which the recordings were made.
fn network(session: &Session) -> anyhow::Result<Network> {
    let interface = |name: &str, mac: Option<&str>, mtu, addresses: [&str; 2]| Interface {
        name: name.to_owned(),
        mac: mac.map(str::to_owned),
        mtu,
        addresses: addresses.map(str::to_owned).to_vec(),
    };
    let gateways = [("0.0.0.0/0", "10.255.0.2"), ("::/0", "fd00:ff::2")];
    let mut neighbours = Vec::new();
    let mut routes = Vec::new();
    for (to, via) in gateways {
        let via = via.parse().context("a gateway")?;
        routes.push(Route {
            to: to.to_owned(),
            via,
            dev: "cl".to_owned(),
        });
        neighbours.push(Neighbour {
            address: via,
            mac: "02:00:00:00:00:c2".to_owned(),
        });
    }
    for &server in &session.servers {
        let octets = match server {
            std::net::IpAddr::V4(addr) => addr.octets().to_vec(),
            std::net::IpAddr::V6(addr) => addr.octets()[12..].to_vec(),
        };
        let tail: Vec<String> = octets.iter().map(|byte| format!("{byte:02x}")).collect();
        neighbours.push(Neighbour {
            address: server,
            mac: format!("02:52:{}", tail.join(":")),
        });
    }
    let marks = session.marks.iter().map(|mark| {
        let number = mark.get("mark").and_then(Value::as_u64);
        Ok(Mark {
            to: mark
                .get("dst")
                .and_then(Value::as_str)
                .context("a mark without destination")?
                .to_owned(),
            protocol: match mark.get("proto").and_then(Value::as_str) {
                None => None,
                Some("tcp") => Some(6),
                Some("udp") => Some(17),
                Some("sctp") => Some(132),
                Some(other) => bail!("a mark for {other:?}"),
            },
            ports: Vec::new(),
            mark: u32::try_from(number.context("a rule without mark")?)?,
        })
    });
    Ok(Network {
        interfaces: vec![
            interface("lo", None, 65_536, ["127.0.0.1/8", "::1/128"]),
            interface(
                "cl",
                Some("02:00:00:00:00:c1"),
                1500,
                ["10.255.0.1/24", "fd00:ff::1/64"],
            ),
            interface(
                "sv",
                Some("02:00:00:00:00:51"),
                1500,
                ["10.1.255.254/16", "fd00:1::ffff/64"],
            ),
        ],
        local: session.vips.iter().chain(&session.local).cloned().collect(),
        routes,
        neighbours,
        marks: marks.collect::<anyhow::Result<_>>()?,
    })
}

fn play(session: &Session) -> anyhow::Result<TranscriptReport> {
    let mut stage = Stage::set(session)?;
    stage
        .client
        .other::<IgnoredAny, IgnoredAny>("test.reset", &network(session)?, |_| true)?;
    let mut report = TranscriptReport::default();
    for (number, step) in session.steps.iter().enumerate() {
        if let Some(t) = step.t {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a recorded time is neither negative nor long"
            )]
            let to = Advance::ToMs((t * 1000.0).round() as u64);
            stage
                .client
                .other::<IgnoredAny, IgnoredAny>("test.advance", &to, |_| true)?;
        }
        for line in &step.reset {
            let words = line.split_whitespace().map(str::to_owned);
            let argv: Vec<String> = ["ipvsadm".to_owned()].into_iter().chain(words).collect();
            stage.run(&argv, "", None)?;
        }
        if let Some(name) = &step.sysctl {
            let value = step.value.clone().unwrap_or_default();
            let value = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            let name = name.rsplit(['.', '/']).next().unwrap_or(name).to_owned();
            stage
                .client
                .call::<IgnoredAny>(&Call::SysctlSet(Sysctl { name, value }))?;
        }
        if !step.packets.is_empty() {
            let frames = step.packets.iter().map(|packet| BenchFrame {
                dev: packet.dev.clone(),
                frame: packet.frame.clone(),
            });
            let inject = Inject {
                frames: frames.collect(),
                repeat: step.repeat,
            };
            stage
                .client
                .other::<IgnoredAny, IgnoredAny>("test.inject", &inject, |_| true)?;
        }
        let Some(argv) = &step.argv else { continue };
        let ran = stage.run(argv, &step.stdin, step.uid)?;
        if same(step, &ran, took(&session.steps, number)) {
            report.passed += 1;
        } else {
            report.failed += 1;
            report.differences.push(format!(
                "{} step {number}: {argv:?}{}\n  expected {} {:?} {:?}\n  got      {} {:?} {:?}",
                session.name,
                if step.stdin.is_empty() {
                    String::new()
                } else {
                    format!(" stdin {:?}", step.stdin)
                },
                step.exit,
                step.stdout,
                step.stderr,
                ran.exit,
                ran.stdout,
                ran.stderr
            ));
        }
    }
    if let Some(status) = stage.engine.0.try_wait()? {
        bail!("the engine has ended before the session: {status}");
    }
    Ok(report)
}

/// How long the recorded command may have taken: until the next step, less what was waited in
/// between.
fn took(steps: &[Step], number: usize) -> f64 {
    let Some(start) = steps[number].t else {
        return 0.0;
    };
    let mut waited = 0.0;
    for step in &steps[number + 1..] {
        match step.t {
            Some(next) => return next - start - waited,
            None => waited += step.wait.unwrap_or(0.0),
        }
    }
    0.0
}

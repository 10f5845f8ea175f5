//! `lvs-bench cluster`: runs httperf on many hosts at the same time, and merges the results.

mod host;
mod httperf;

use std::process::Command;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use self::host::Host;
pub use self::host::{Place, shell};
pub use self::httperf::{Errors, Figures, Lifetime};

/// The version of the output of `--json`; see docs/report.md.
const SCHEMA: u32 = 1;
/// Maximum number of steps in one run.
const MOST_STEPS: usize = 1000;
/// Maximum request rate, in requests per second.
const MOST_RATE: u32 = 1_000_000;
/// Maximum number of hosts in one run.
const MOST_HOSTS: usize = 256;
/// Longest wait until all hosts are ready.
const READY: Duration = Duration::from_secs(20);
/// Interval from sending the commands to the hosts until all of them start httperf. Four times the
/// largest error of a clock is added.
const AHEAD: Duration = Duration::from_millis(100);
/// Longest wait for a host's report after the time limit of its httperf.
const ON_THE_WAY: Duration = Duration::from_secs(3);

/// Servers, requests and hosts of a measurement.
#[derive(Debug, Args)]
pub struct Options {
    /// Hosts that send requests: local, netns:NAME (a namespace of `ip netns`),
    /// `ssh:[USER@]HOST[:PORT]`
    #[arg(required = true, value_name = "HOST")]
    hosts: Vec<Place>,
    /// Servers; if there are several (A,B), the hosts use them in turn
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', required = true)]
    server: Vec<String>,
    #[arg(long, default_value_t = 80, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Path of the requested page
    #[arg(long, default_value = "/")]
    uri: String,
    /// Requests a second of all hosts together, one on each connection: FROM..TO/STEP, or a list
    /// (500,1000)
    #[arg(long)]
    rates: Rates,
    /// Duration of each rate in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Seconds after which a request has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
    timeout: u32,
    /// Pause in seconds between two rates
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=3600))]
    pause: u32,
    /// Stop after the first rate with at least this percentage of errors
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    stop_at_errors: Option<f64>,
    /// Additional seconds that httperf may take; a host that takes longer has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3600))]
    grace: u32,
    /// An option for ssh, in the form of its -o (IdentityFile=key); can be repeated
    #[arg(long = "ssh-option", value_name = "OPTION")]
    ssh_options: Vec<String>,
    /// Command or path of httperf on the hosts
    #[arg(long, value_name = "PROGRAM", default_value = "httperf")]
    httperf: String,
    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,
}

/// Request rates, in the order in which they are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rates(Vec<u32>);

impl FromStr for Rates {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let rate = |word: &str| {
            let number = word.parse::<u32>().ok();
            let number = number.filter(|rate| (1..=MOST_RATE).contains(rate));
            number.with_context(|| {
                format!("{word:?} is not a rate: expected 1 to {MOST_RATE} requests per second")
            })
        };
        let Some((from, rest)) = text.split_once("..") else {
            let rates: Result<Vec<u32>> = text.split(',').map(rate).collect();
            let rates = rates?;
            ensure!(
                rates.len() <= MOST_STEPS,
                "the list has more than {MOST_STEPS} rates"
            );
            return Ok(Self(rates));
        };
        let (to, step) = rest
            .split_once('/')
            .with_context(|| format!("{text:?} lacks its step; write FROM..TO/STEP"))?;
        let (from, to, step) = (rate(from)?, rate(to)?, rate(step)?);
        ensure!(from <= to, "{text:?} decreases; write FROM..TO/STEP");
        let rates: Vec<u32> = (from..=to)
            .step_by(usize::try_from(step)?)
            .take(MOST_STEPS + 1)
            .collect();
        ensure!(
            rates.len() <= MOST_STEPS,
            "{text:?} contains more than {MOST_STEPS} rates"
        );
        Ok(Self(rates))
    }
}

fn percent(text: &str) -> Result<f64> {
    let number = text.parse().ok();
    let number = number.filter(|percent: &f64| *percent > 0.0 && *percent <= 100.0);
    number.with_context(|| format!("{text:?} is not a percentage: expected more than 0, up to 100"))
}

/// Servers and requests of a load.
#[derive(Clone, Debug)]
pub struct Load {
    /// The servers; if there are several, the hosts use them in turn.
    pub servers: Vec<String>,
    /// TCP port of the servers.
    pub port: u16,
    /// Path of the requested page.
    pub uri: String,
    /// Seconds after which a request has failed.
    pub timeout: u32,
    /// Additional seconds that httperf may take beyond its planned time.
    pub grace: u32,
}

/// A request rate, and its results.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// Requested rate of all hosts, in requests a second.
    pub offered: f64,
    /// Whether hosts are missing, so that the offered rate is below the requested rate.
    pub incomplete: bool,
    /// The merged results of all hosts that answered.
    #[serde(flatten)]
    pub all: Figures,
    /// Results of each host.
    pub hosts: Vec<OfHost>,
}

/// Result of a step for one host.
#[derive(Clone, Debug, Serialize)]
pub struct OfHost {
    /// Name of the host.
    pub host: String,
    /// Milliseconds by which httperf started after the common start time.
    pub late_ms: f64,
    /// The results of this host.
    #[serde(flatten)]
    pub figures: Figures,
}

/// A host that is excluded from further steps.
#[derive(Clone, Debug, Serialize)]
pub struct Failed {
    /// Name of the host.
    pub host: String,
    /// The rate at which the host failed; `None` if it was never ready.
    pub offered: Option<f64>,
    /// The reason for the failure.
    pub why: String,
}

/// The hosts that are ready.
#[derive(Debug)]
pub struct Cluster {
    /// The hosts that are ready, with their positions among all hosts.
    hosts: Vec<(usize, Host)>,
    all: usize,
    failed: Vec<Failed>,
}

impl Cluster {
    /// Starts a shell on each host. `commands`: for each host, its name and a command that runs the
    /// words of [`shell`] there. `stop` is set when the user interrupts the program.
    ///
    /// # Errors
    ///
    /// No host is ready. If some are, the others are in [`Cluster::failed`].
    pub fn start(commands: Vec<(String, Command)>, stop: &Arc<AtomicBool>) -> Result<Self> {
        let all = commands.len();
        let mut failed = Vec::new();
        let mut hosts = Vec::new();
        let mut fail = |host: String, why: anyhow::Error| {
            failed.push(Failed {
                host,
                offered: None,
                why: format!("{why:#}"),
            });
        };
        for (place, (name, command)) in commands.into_iter().enumerate() {
            match Host::start(&name, command, stop.clone()) {
                Ok(host) => hosts.push((place, host)),
                Err(why) => fail(name, why),
            }
        }
        let deadline = Instant::now() + READY;
        hosts.retain_mut(|(_, host)| match host.wait_ready(deadline) {
            Ok(()) => true,
            Err(why) => {
                fail(host.name.clone(), why);
                false
            }
        });
        let cluster = Self { hosts, all, failed };
        cluster.check_any()?;
        Ok(cluster)
    }

    /// The excluded hosts.
    #[must_use]
    pub fn failed(&self) -> &[Failed] {
        &self.failed
    }

    /// Makes all hosts send requests at the same time. A host that fails is excluded from later
    /// steps; the shares of the others stay the same.
    ///
    /// # Errors
    ///
    /// No host is left, or `load` names no server.
    pub fn step(&mut self, load: &Load, rate: f64, seconds: f64) -> Result<Step> {
        #[expect(clippy::cast_precision_loss, reason = "at most 256")]
        let all = self.all as f64;
        let limit =
            Duration::from_secs_f64(seconds + f64::from(load.timeout) + f64::from(load.grace));
        let unsure = self.hosts.iter().map(|(_, host)| host.unsure).max();
        let ahead = AHEAD + 4 * unsure.unwrap_or_default();
        let start = host::now() + i128::try_from(ahead.as_nanos())?;
        let deadline = Instant::now() + ahead + limit + ON_THE_WAY;
        let mut reported = Vec::new();
        for (place, host) in &mut self.hosts {
            let server = load.servers.get(*place % load.servers.len().max(1));
            let server = server.context("the load names no server")?;
            let words = words(load, server, rate / all, (rate * seconds / all).round());
            reported.push(host.run(start, limit, &words));
        }
        let mut answers = Vec::new();
        let mut reported = reported.into_iter();
        let failed = &mut self.failed;
        self.hosts.retain_mut(|(_, host)| {
            let answer = reported.next().unwrap_or(Ok(())).and_then(|()| {
                let (printed, late) = host.ended(start, deadline)?;
                Ok(OfHost {
                    host: host.name.clone(),
                    late_ms: late * 1e3,
                    figures: Figures::parse(&printed, seconds, load.timeout.into())?,
                })
            });
            match answer {
                Ok(answer) => answers.push(answer),
                Err(why) => {
                    failed.push(Failed {
                        host: host.name.clone(),
                        offered: Some(rate),
                        why: format!("{why:#}"),
                    });
                    return false;
                }
            }
            true
        });
        self.check_any()?;
        Ok(Step {
            offered: rate,
            incomplete: answers.len() < self.all,
            all: Figures::merge(answers.iter().map(|one| &one.figures)),
            hosts: answers,
        })
    }

    fn check_any(&self) -> Result<()> {
        let why = || {
            let each = self
                .failed
                .iter()
                .map(|one| format!("{}: {}", one.host, one.why));
            each.collect::<Vec<_>>().join("\n")
        };
        ensure!(!self.hosts.is_empty(), "all hosts have failed:\n{}", why());
        Ok(())
    }
}

fn words(load: &Load, server: &str, rate: f64, connections: f64) -> Vec<String> {
    let mut words: Vec<String> = ["--hog", "-v", "-v"].map(Into::into).to_vec();
    for (option, value) in [
        ("--server", server.to_owned()),
        ("--port", load.port.to_string()),
        ("--uri", load.uri.clone()),
        ("--timeout", load.timeout.to_string()),
        ("--rate", format!("{rate:.3}")),
        ("--num-conns", format!("{:.0}", connections.max(1.0))),
    ] {
        words.push(format!("{option}={value}"));
    }
    words
}

/// Output of `--json`.
#[derive(Debug, Serialize)]
struct Printed<'a> {
    schema: u32,
    servers: &'a [String],
    port: u16,
    uri: &'a str,
    seconds: u32,
    timeout: u32,
    /// Whether no host has failed, and nothing was interrupted. `--stop-at-errors` may have omitted
    /// steps.
    complete: bool,
    steps: Vec<Step>,
    failed: &'a [Failed],
}

impl Options {
    /// Runs a step at each rate until the limit of `--stop-at-errors` is reached, and prints the
    /// results.
    ///
    /// # Errors
    ///
    /// If an option is invalid, if hosts fail (the results of the others are printed nevertheless),
    /// or if the user interrupts the program.
    pub fn run(&self) -> Result<()> {
        self.check()?;
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, stop.clone())?;
        }
        let commands = self.hosts.iter().map(|place| {
            (
                place.to_string(),
                place.command(&self.ssh_options, &self.httperf),
            )
        });
        let mut cluster = Cluster::start(commands.collect(), &stop)?;
        let load = Load {
            servers: self.server.clone(),
            port: self.port,
            uri: self.uri.clone(),
            timeout: self.timeout,
            grace: self.grace,
        };
        let mut steps = Vec::new();
        let mut result = Ok(());
        if !self.json {
            println!("{HEAD}");
        }
        for (place, rate) in self.rates.0.iter().enumerate() {
            if place > 0 {
                pause(self.pause, &stop);
            }
            let step = cluster.step(&load, f64::from(*rate), f64::from(self.seconds));
            if stop.load(Ordering::Relaxed) {
                result = Err(anyhow::anyhow!("interrupted"));
                break;
            }
            let step = match step {
                Ok(step) => step,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            };
            if !self.json {
                println!("{}", line(&step));
            }
            let enough = self
                .stop_at_errors
                .is_some_and(|most| step.all.error_percent >= most);
            steps.push(step);
            if enough {
                break;
            }
        }
        if self.json {
            let printed = Printed {
                schema: SCHEMA,
                servers: &self.server,
                port: self.port,
                uri: &self.uri,
                seconds: self.seconds,
                timeout: self.timeout,
                complete: result.is_ok() && cluster.failed.is_empty(),
                steps,
                failed: &cluster.failed,
            };
            println!("{}", serde_json::to_string_pretty(&printed)?);
        }
        result?;
        if let Some(first) = cluster.failed.first() {
            let more = match cluster.failed.len() {
                1 => String::new(),
                all => format!("; number of other failed hosts: {}", all - 1),
            };
            bail!(
                "incomplete: host {} failed: {}{more}",
                first.host,
                first.why
            );
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        ensure!(
            self.hosts.len() <= MOST_HOSTS,
            "there are more than {MOST_HOSTS} hosts"
        );
        for server in &self.server {
            let good = |c: char| c.is_ascii_alphanumeric() || "._-:%".contains(c);
            ensure!(
                !server.is_empty() && !server.starts_with('-') && server.chars().all(good),
                "--server {server:?}: give an address or a host's name"
            );
        }
        ensure!(
            self.uri.starts_with('/') && self.uri.chars().all(|c| c.is_ascii_graphic()),
            "--uri {:?}: give a path that begins with / and has neither whitespace nor non-ASCII characters",
            self.uri
        );
        ensure!(
            !self.httperf.is_empty() && !self.httperf.chars().any(char::is_control),
            "--httperf {:?}: give the program's name or path",
            self.httperf
        );
        for option in &self.ssh_options {
            ensure!(
                option.contains('=') && !option.chars().any(char::is_control),
                "--ssh-option {option:?}: give it as NAME=VALUE"
            );
        }
        Ok(())
    }
}

fn pause(seconds: u32, stop: &AtomicBool) {
    let deadline = Instant::now() + Duration::from_secs(seconds.into());
    while Instant::now() < deadline && !stop.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(50));
    }
}

const HEAD: &str =
    "offered/s replies/s errors %  response  connect   p50   p90   p99 hosts    late";

/// Formats a step as a line of the table; times are in milliseconds.
fn line(step: &Step) -> String {
    let all = &step.all;
    let time = |time: Option<f64>| time.map_or_else(|| "-".to_owned(), |time| format!("{time:.1}"));
    let whole = |of: fn(&Lifetime) -> u32| {
        all.lifetime
            .as_ref()
            .map_or_else(|| "-".to_owned(), |times| format!("<{}", of(times)))
    };
    let late = step.hosts.iter().map(|one| one.late_ms).fold(0.0, f64::max);
    let mut line = format!(
        "{:9.0} {:9.1} {:8.2} {:>9} {:>8} {:>5} {:>5} {:>5} {:5} {late:7.1}",
        step.offered,
        all.rate,
        all.error_percent,
        time(all.response_ms),
        time(all.connect_ms),
        whole(|times| times.p50_ms),
        whole(|times| times.p90_ms),
        whole(|times| times.p99_ms),
        step.hosts.len(),
    );
    let status = [(3, "4xx"), (4, "5xx")].map(|(class, name)| (name, all.status[class]));
    let wrong = all.errors.kinds().into_iter().chain(status);
    let wrong: Vec<_> = wrong
        .filter(|(_, count)| *count > 0)
        .map(|(kind, count)| format!("{kind} {count}"))
        .collect();
    if !wrong.is_empty() {
        line += &format!("  {}", wrong.join(", "));
    }
    if step.incomplete {
        line += "  INCOMPLETE";
    }
    if all.errors.of_client() > 0 {
        line += "  (the clients are at their limits: more hosts are needed)";
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_rates_are_parsed_and_invalid_rates_refused() {
        let rates = |text: &str| text.parse::<Rates>().map(|rates| rates.0);
        assert_eq!(
            rates("100..300/100").expect("the rates are valid"),
            [100, 200, 300]
        );
        assert_eq!(
            rates("100..250/100").expect("the rates are valid"),
            [100, 200]
        );
        assert_eq!(rates("5").expect("the rates are valid"), [5]);
        assert_eq!(rates("5,3").expect("the rates are valid"), [5, 3]);
        for wrong in [
            "",
            "0",
            "1,",
            "1..2",
            "2..1/1",
            "1..2/0",
            "1..1000000/1",
            "x..y/z",
            "-1",
            "1e3",
            "1000001",
        ] {
            assert!(rates(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn percentage_above_0_is_parsed_and_0_or_above_100_refused() {
        assert_eq!(percent("5").ok(), Some(5.0));
        for wrong in ["0", "101", "NaN", "", "-1"] {
            assert!(percent(wrong).is_err(), "{wrong}");
        }
    }
}

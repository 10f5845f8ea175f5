//! The daemon's loop: what the file says and what the checks find become a [`Goal`]; the [`Link`]
//! carries it out.
//!
//! ```text
//! file ──(start, SIGHUP)──┐
//!                         ├──▶ Goal ──▶ Link::step ──▶ engine
//! checks ──(up, down)─────┘               ▲
//! timer ──(look again, backoff)───────────┘
//! ```

mod changes;
#[cfg(test)]
mod tests;
mod waiting;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::config::{Config, LoadError, Report, Severity};
use crate::engine::{Goal, Host, Link, Step};
use crate::health::{Checks, Prober};
use crate::notify::Notify;
use crate::reconcile::{Desired, DesiredServer, DesiredService};
use waiting::Signals;

/// What the daemon is told from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Read the file again (SIGHUP).
    Reload,
    /// End (SIGTERM, SIGINT).
    Stop,
}

/// What it was started with.
#[derive(Debug)]
pub struct Options {
    /// Where the configuration comes from at a reload.
    pub path: PathBuf,
    /// The engine stays as it is when the daemon ends.
    pub leave: bool,
    /// The way to the service manager.
    pub notify: Notify,
}

struct Daemon<P> {
    options: Options,
    config: Config,
    /// The VIPs that the engine should own, decided when the file was loaded.
    vips: Vec<IpAddr>,
    /// This file, or one before it, had rules for marks.
    had_marks: bool,
    checks: Checks<P>,
    /// When VIPs are owned even if a first check is still out.
    announce_at: Instant,
    /// VIPs were to be owned at the last step.
    announced: bool,
    /// The goal is another one than the engine was last given.
    changed: bool,
    /// When the next step is due.
    next: Instant,
    /// The service manager has been told that we are ready.
    ready: bool,
    /// What it was last told about our state.
    status: String,
}

/// Runs until it is told to stop.
///
/// # Errors
/// At start-up only: there is no engine and none can be started.
pub async fn run<P: Prober>(
    options: Options,
    config: Config,
    host: impl Host,
    prober: P,
    signals: mpsc::Receiver<Signal>,
) -> Result<(), String> {
    let (checks, mut reports) = Checks::new(prober);
    let mut signals = Signals::new(signals);
    let mut link = Box::new(Link::new(Box::new(host), Instant::now()));
    let mut daemon = Daemon::new(options, checks);
    daemon.load(config, &link);
    loop {
        tokio::select! {
            biased;
            signal = signals.next() => match signal {
                Signal::Reload => daemon.reload(&link),
                Signal::Stop => break,
            },
            Some(report) = reports.recv() => {
                // What arrives at one moment goes into one step.
                let mut report = Some(report);
                while let Some(one) = report {
                    daemon.take(one);
                    report = reports.try_recv().ok();
                }
                daemon.goal_changed();
            }
            () = tokio::time::sleep_until(daemon.next) => {
                link = daemon.step(link, &mut signals).await?;
            }
        }
    }
    daemon.options.notify.send("STOPPING=1");
    if daemon.options.leave {
        tracing::info!("stopping; the engine keeps forwarding");
        return Ok(());
    }
    waiting::stop(link).await
}

impl<P: Prober> Daemon<P> {
    fn new(options: Options, checks: Checks<P>) -> Self {
        let now = Instant::now();
        Self {
            options,
            config: Config::default(),
            vips: Vec::new(),
            had_marks: false,
            checks,
            announce_at: now,
            announced: false,
            changed: true,
            next: now,
            ready: false,
            status: String::new(),
        }
    }

    /// The engine is to be given another goal, at once.
    fn goal_changed(&mut self) {
        self.changed = true;
        self.next = Instant::now();
    }

    /// Brings the engine one step nearer to the goal.
    async fn step(&mut self, link: Box<Link>, signals: &mut Signals) -> Result<Box<Link>, String> {
        let announce = self.announce();
        let changed = self.changed || announce != self.announced;
        self.announced = announce;
        let goal = self.goal(announce);
        let engine = link.engine();
        let work = waiting::blocking(link, move |link, now| link.step(&goal, changed, now));
        let (link, step) = tokio::select! {
            biased;
            done = work => done?,
            // The thread that waits for it cannot be called back; whoever starts us again begins afresh.
            hang = signals.hurries(&engine) => return Err(hang),
        };
        match step {
            Step::InStep { refused, again } => {
                self.changed = false;
                self.next = Instant::now() + again;
                if !announce {
                    self.next = self.next.min(self.announce_at);
                }
                self.tell(announce, refused);
            }
            Step::Waiting(time) => {
                self.changed = changed;
                self.next = Instant::now() + time;
            }
            Step::Fatal(why) => return Err(why),
        }
        Ok(link)
    }

    /// Tells the service manager what is new: that we are ready, and how we are.
    fn tell(&mut self, announce: bool, refused: usize) {
        let notify = &self.options.notify;
        let now = self.summary(refused);
        if announce && !self.ready {
            self.ready = true;
            notify.send("READY=1");
            tracing::info!("ready: {now}");
        }
        if now != self.status {
            notify.send(&format!("STATUS={now}"));
            self.status = now;
        }
    }

    fn load(&mut self, config: Config, link: &Link) {
        let addresses = link.addresses();
        self.had_marks |= !config.marks.is_empty();
        self.vips = config.own_vips(|ip| addresses.has(ip));
        self.checks.set(&config);
        let longest = config
            .services
            .iter()
            .flat_map(|s| &s.servers)
            .filter_map(|s| Some(s.check.as_ref()?.timeout))
            .max();
        self.announce_at =
            Instant::now() + longest.map_or(Duration::ZERO, |t| t + Duration::from_secs(1));
        self.config = config;
    }

    /// Reads the file again, and tells the service manager.
    fn reload(&mut self, link: &Link) {
        let notify = &self.options.notify;
        notify.send(&format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_us()));
        self.reload_file(link);
        if self.ready {
            self.options.notify.send("READY=1");
        }
        self.goal_changed();
    }

    fn reload_file(&mut self, link: &Link) {
        let path = &self.options.path;
        match Config::load(path) {
            // As likely half of a write as a wish, and an outage.
            Ok((config, _)) if config.services.is_empty() && !self.config.services.is_empty() => {
                tracing::error!(
                    "{} has no [[service]]: nothing was changed; to take all services down, stop lvsd",
                    path.display()
                );
            }
            Ok((config, warnings)) => {
                warnings.print();
                if config == self.config {
                    tracing::info!("reloaded {}: nothing has changed", path.display());
                } else {
                    tracing::info!("reloaded {}", path.display());
                }
                if config.dataplane != self.config.dataplane {
                    tracing::warn!(
                        "[dataplane] has changed; it takes effect when the engine is restarted"
                    );
                }
                if config.daemon.log != self.config.daemon.log {
                    tracing::warn!("`log` has changed; it takes effect when lvsd is restarted");
                }
                self.load(config, link);
            }
            Err(LoadError::Refused(report)) => {
                report.print();
                tracing::error!(
                    "{} is not valid, the old configuration stays: {}",
                    path.display(),
                    summary(&report)
                );
            }
            Err(error) => tracing::error!("{error}; the old configuration stays"),
        }
    }

    /// The first checks are done, or have had their time.
    fn announce(&self) -> bool {
        !self.checks.pending() || Instant::now() >= self.announce_at
    }

    fn goal(&self, announce: bool) -> Goal {
        let services = self
            .config
            .services
            .iter()
            .map(|service| DesiredService {
                id: service.id,
                name: service.name.clone(),
                line: service.line,
                filter: service.filter.clone(),
                config: service.config.clone(),
                on_check_failure: service.on_check_failure,
                servers: service
                    .servers
                    .iter()
                    .map(|server| DesiredServer {
                        address: server.address,
                        line: server.line,
                        config: server.config,
                        health: self.health(&(service.id, server.address)),
                    })
                    .collect(),
            })
            .collect();
        Goal {
            desired: Desired {
                file: self.config.path.clone(),
                services,
                vips: self.vips.iter().copied().collect(),
                sysctls: self.config.sysctls.clone(),
                // A file that never had any leaves to others what they have set.
                marks: self.had_marks.then(|| self.config.marks.clone()),
                port_marks: self.config.port_marks.clone(),
                filter: self.config.filter.clone(),
                local: self.config.dataplane.local.clone(),
                adopt: self.config.daemon.adopt,
            },
            announce,
            dataplane: self.config.dataplane.clone(),
        }
    }
}

fn summary(report: &Report) -> String {
    let first = report
        .findings
        .iter()
        .find(|d| d.severity == Severity::Error);
    match first {
        Some(d) if report.errors() > 1 => {
            format!("{} (and {} more)", d.title, report.errors() - 1)
        }
        Some(d) => d.title.clone(),
        None => "no reason".to_owned(),
    }
}

/// Microseconds of `CLOCK_MONOTONIC`, which systemd wants with `RELOADING=1`; the time since boot
/// is near enough where the machine was never suspended, and systemd only compares it with its own.
fn monotonic_us() -> u64 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let seconds: f64 = text
        .split(' ')
        .next()
        .and_then(|s| s.parse().ok())
        .unwrap_or(0.0);
    Duration::try_from_secs_f64(seconds)
        .map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
}

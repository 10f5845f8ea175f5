//! The daemon's loop: what the file says and what the checks find become a [`Goal`]; the [`Link`] carries it out.
//!
//! ```text
//! file ──(start, SIGHUP)──┐
//!                         ├──▶ Goal ──▶ Link::step ──▶ engine
//! checks ──(up, down)─────┘               ▲
//! timer ──(look again, backoff)───────────┘
//! ```

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use lvs_core::OnServerDown;

use crate::config::{Config, LoadError, OnCheckFailure, Report};
use crate::engine::{Goal, Host, Link, Step, Stopped};
use crate::health::{Change, Checks, Key, Prober};
use crate::notify::Notify;
use crate::reconcile::{Desired, DesiredServer, DesiredService, Health};
use crate::words::counted;

/// How long a stopping engine is waited for.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// An engine that has taken a request answers within this time, or it hangs.
const HANG_LIMIT: Duration = Duration::from_secs(30);

/// What to do about an engine that does not answer.
const UNSTICK: &str = "if it was stopped (state T in `ps`), continue it with `kill -CONT`; if it hangs, end it with `kill -9`";

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
    config: Config,
    /// The VIPs that the engine shall own, decided when the file was loaded.
    vips: Vec<std::net::IpAddr>,
    /// This file, or one before it, had rules for marks.
    had_marks: bool,
    checks: Checks<P>,
    /// When VIPs are owned even if a first check is still out.
    announce_at: Instant,
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
    mut signals: mpsc::Receiver<Signal>,
) -> Result<(), String> {
    let (checks, mut reports) = Checks::new(prober);
    let mut link = Box::new(Link::new(Box::new(host), Instant::now()));
    let mut daemon = Daemon {
        config: Config::default(),
        vips: Vec::new(),
        had_marks: false,
        checks,
        announce_at: Instant::now(),
    };
    daemon.load(config, &link);
    let notify = &options.notify;
    let mut ready = false;
    let mut status = String::new();
    // Whether the goal is another one than the engine was last given.
    let mut changed = true;
    let mut announced = false;
    let mut next = Instant::now();
    // A signal that came while the engine was at a request.
    let mut early = None;
    loop {
        tokio::select! {
            biased;
            signal = next_signal(&mut signals, &mut early) => match signal {
                Some(Signal::Reload) => {
                    notify.send(&format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_us()));
                    daemon.reload(&options.path, &link);
                    if ready {
                        notify.send("READY=1");
                    }
                    changed = true;
                    next = Instant::now();
                }
                Some(Signal::Stop) | None => break,
            },
            Some(report) = reports.recv() => {
                // What one moment brings goes into one round.
                let mut report = Some(report);
                while let Some(one) = report {
                    daemon.take(one);
                    report = reports.try_recv().ok();
                }
                changed = true;
                next = Instant::now();
            }
            () = tokio::time::sleep_until(next) => {
                let announce = daemon.announce();
                changed |= announce != announced;
                announced = announce;
                let goal = daemon.goal(announce);
                let engine = link.engine();
                let step = blocking(link, move |link, now| link.step(&goal, changed, now));
                let (back, step) = tokio::select! {
                    biased;
                    done = step => done?,
                    // The thread that waits for it cannot be called back; whoever starts us again begins afresh.
                    hang = hangs(&engine, &mut signals, &mut early) => return Err(hang),
                };
                link = back;
                match step {
                    Step::InStep { refused, again } => {
                        changed = false;
                        next = Instant::now() + again;
                        if !announce {
                            next = next.min(daemon.announce_at);
                        }
                        if announce && !ready {
                            ready = true;
                            notify.send("READY=1");
                            tracing::info!("ready: {}", daemon.status(refused));
                        }
                        let now = daemon.status(refused);
                        if now != status {
                            notify.send(&format!("STATUS={now}"));
                            status = now;
                        }
                    }
                    Step::Waiting(time) => next = Instant::now() + time,
                    Step::Fatal(why) => return Err(why),
                }
            }
        }
    }
    notify.send("STOPPING=1");
    if options.leave {
        tracing::info!("stopping; the engine goes on forwarding");
        return Ok(());
    }
    let engine = link.engine();
    tracing::info!("stopping; waiting up to {STOP_LIMIT:?} for {engine}");
    match tokio::time::timeout(STOP_LIMIT, stop(link)).await {
        Ok(done) => done,
        Err(_) => Err(format!(
            "{engine} still runs after {STOP_LIMIT:?}; {UNSTICK}"
        )),
    }
}

/// Stops the engine and waits until it is gone.
async fn stop(link: Box<Link>) -> Result<(), String> {
    let (mut link, stopped) = blocking(link, |link, _| link.stop()).await?;
    match stopped {
        Stopped::Asked => {}
        Stopped::Already(how) => tracing::info!("the engine had ended already: {how}"),
        Stopped::Not(why) => tracing::warn!("{why}"),
    }
    loop {
        let (back, running) = blocking(link, |link, _| link.still_running()).await?;
        link = back;
        if !running {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The next signal, one that came early first.
async fn next_signal(
    signals: &mut mpsc::Receiver<Signal>,
    early: &mut Option<Signal>,
) -> Option<Signal> {
    match early.take() {
        Some(signal) => Some(signal),
        None => signals.recv().await,
    }
}

/// Ends, with what to say, when `engine` has had its time for a request. Told to stop, it says at once what is waited for,
/// and waits no longer than a stop may take; the signal is kept in `early`.
async fn hangs(
    engine: &str,
    signals: &mut mpsc::Receiver<Signal>,
    early: &mut Option<Signal>,
) -> String {
    let mut limit = Instant::now() + HANG_LIMIT;
    while *early != Some(Signal::Stop) {
        tokio::select! {
            signal = signals.recv() => *early = Some(signal.unwrap_or(Signal::Stop)),
            () = tokio::time::sleep_until(limit) => {
                return format!("{engine} took a request and does not answer it within {HANG_LIMIT:?}; {UNSTICK}, and start lvsd again");
            }
        }
    }
    let now = Instant::now();
    limit = limit.min(now + STOP_LIMIT);
    let left = Duration::from_secs(limit.duration_since(now).as_secs());
    tracing::info!("told to stop; waiting up to {left:?} for {engine}, which is at a request");
    tokio::time::sleep_until(limit).await;
    format!("told to stop, and {engine} does not answer; it still runs: {UNSTICK}")
}

/// Does something that blocks, away from the loop.
async fn blocking<T: Send + 'static>(
    mut link: Box<Link>,
    work: impl FnOnce(&mut Link, Instant) -> T + Send + 'static,
) -> Result<(Box<Link>, T), String> {
    let now = Instant::now();
    tokio::task::spawn_blocking(move || {
        let result = work(&mut link, now);
        (link, result)
    })
    .await
    .map_err(|e| format!("a fault of lvsd itself: {e}"))
}

impl<P: Prober> Daemon<P> {
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

    fn reload(&mut self, path: &std::path::Path, link: &Link) {
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
                        "[dataplane] has changed; it takes effect when the engine is started again"
                    );
                }
                if config.daemon.log != self.config.daemon.log {
                    tracing::warn!("`log` has changed; it takes effect when lvsd is started again");
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
                config: service.config.clone(),
                on_check_failure: service.on_check_failure,
                servers: service
                    .servers
                    .iter()
                    .map(|server| DesiredServer {
                        address: server.address,
                        config: server.config,
                        health: self.checks.health(&(service.id, server.address)),
                    })
                    .collect(),
            })
            .collect();
        Goal {
            desired: Desired {
                services,
                vips: self.vips.iter().copied().collect(),
                sysctls: self.config.sysctls.clone(),
                // A file that never had any leaves to others what they have set.
                marks: self.had_marks.then(|| self.config.marks.clone()),
                port_marks: self.config.port_marks.clone(),
                local: self.config.dataplane.local.clone(),
                adopt: self.config.daemon.adopt,
            },
            announce,
            dataplane: self.config.dataplane.clone(),
        }
    }

    /// Takes a report and logs it: once for a change, with the reason and how long it had lasted.
    fn take(&mut self, report: crate::health::Report) {
        let Some(Change {
            key,
            up,
            reason,
            lasted,
        }) = self.checks.take(report)
        else {
            return;
        };
        let Some(service) = self.config.services.iter().find(|s| s.id == key.0) else {
            return;
        };
        let (name, server) = (&service.name, key.1);
        // Seconds are enough where there are any.
        let lasted = lasted.map(|d| match d.as_secs() {
            0 => Duration::from_millis(u64::try_from(d.as_millis()).unwrap_or(0)),
            whole => Duration::from_secs(whole),
        });
        match (up, lasted) {
            (true, Some(time)) => {
                tracing::info!(service = %name, %server, "server is up again, after {time:?} down");
            }
            (true, None) => tracing::info!(service = %name, %server, "server is up"),
            (false, lasted) => {
                let before = match lasted {
                    Some(time) => format!("after {time:?} up"),
                    None => "at its first check".to_owned(),
                };
                let what = match (
                    service.on_check_failure,
                    service.config.extras.on_server_down,
                ) {
                    (OnCheckFailure::Quiesce, _) => "it gets no new connections (weight 0)",
                    (OnCheckFailure::Remove, OnServerDown::Kernel) => "it is taken out",
                    (OnCheckFailure::Remove, OnServerDown::Reset) => {
                        "it is taken out, and its connections are reset"
                    }
                    (OnCheckFailure::Remove, OnServerDown::Reschedule) => {
                        "it is taken out, and its connections move or are reset"
                    }
                    (OnCheckFailure::Remove, OnServerDown::Drop) => {
                        "it is taken out, and its connections end"
                    }
                };
                tracing::warn!(service = %name, %server, "server is down, {before}: {reason}; {what}");
            }
        }
        let states: Vec<Health> = service
            .servers
            .iter()
            .map(|s| self.health(&(service.id, s.address)))
            .collect();
        let good = states.iter().filter(|s| **s == Health::Up).count();
        if !up && states.iter().all(|s| *s == Health::Down) {
            let all = match states.len() {
                1 => "the only server is".to_owned(),
                n => format!("ALL {n} servers are"),
            };
            tracing::error!(service = %name, "{all} down: the service refuses new connections");
        } else if up && good == 1 && lasted.is_some() {
            tracing::warn!(service = %name, "the service has a server again, 1 of {}", states.len());
        }
    }

    fn health(&self, key: &Key) -> Health {
        self.checks.health(key)
    }

    /// One line about everything.
    fn status(&self, refused: usize) -> String {
        let mut up = 0;
        let mut all = 0;
        for service in &self.config.services {
            for server in &service.servers {
                all += 1;
                up += usize::from(self.health(&(service.id, server.address)) == Health::Up);
            }
        }
        let services = counted(self.config.services.len(), "service");
        let mut line = format!("{services}, {up} of {} up", counted(all, "server"));
        if refused > 0 {
            let changes = counted(refused, "change");
            line.push_str(&format!(", {changes} refused by the engine"));
        }
        line
    }
}

fn summary(report: &Report) -> String {
    let first = report
        .findings
        .iter()
        .find(|d| d.severity == crate::config::Severity::Error);
    match first {
        Some(d) if report.errors() > 1 => {
            format!("{} (and {} more)", d.title, report.errors() - 1)
        }
        Some(d) => d.title.clone(),
        None => "no reason".to_owned(),
    }
}

/// Microseconds of `CLOCK_MONOTONIC`, which systemd wants with `RELOADING=1`; the time since boot is near enough where
/// the machine was never suspended, and systemd only compares it with its own.
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

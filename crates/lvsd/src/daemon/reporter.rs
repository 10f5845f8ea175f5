//! Reports of the daemon: events, log, service manager and counters.

use std::sync::Arc;
use std::time::Duration;

use lvs_api::words::counted;
use lvs_core::settings::OnServerDown;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::inputs::Inputs;
use super::policy::Transition;
use crate::channels::{About, Events};
use crate::cluster::News;
use crate::config::{BelowQuorum, OnCheckFailure, Service};
use crate::counters::Counters;
use crate::desired::Decision;
use crate::health::{Change, Key, Prober, Reason};
use crate::notify::Notify;
use crate::notify_command::{self, Notice};
use crate::reconcile::Health;

/// The daemon reports that it is ready after this time even if first checks are still running.
const READY_LIMIT: Duration = Duration::from_secs(3);

/// Writes the daemon's events, log lines, counters, and messages to the service manager.
pub(super) struct Reporter {
    pub(super) events: Events,
    pub(super) counters: Arc<Counters>,
    notify: Notify,
    /// The settings of the notify command.
    pub(super) notice: watch::Sender<Notice>,
    /// The task of the notify command: the sender of its stop signal, and the handle to wait for
    /// its exit.
    commands: (oneshot::Sender<()>, JoinHandle<()>),
    pub(super) started: Instant,
    /// Whether `READY=1` was sent.
    pub(super) ready: bool,
    /// Whether `RELOADING=1` was sent, and `READY=1` is pending.
    reloading: bool,
    /// The last text that was sent as `STATUS=`.
    status: String,
    /// The process id of the last dataplane that answered.
    dataplane: Option<u32>,
}

impl Reporter {
    pub(super) fn new(events: Events, counters: Arc<Counters>, notify: Notify) -> Self {
        let (notice, watched) = watch::channel(Notice::default());
        let (end, ending) = oneshot::channel();
        let serving = notify_command::serve(events.listen(), watched, ending);
        Self {
            commands: (end, tokio::spawn(serving)),
            events,
            counters,
            notify,
            notice,
            started: Instant::now(),
            ready: false,
            reloading: false,
            status: String::new(),
            dataplane: None,
        }
    }

    /// Sends an event that is not about a single service.
    pub(super) fn event(&mut self, event: &str, words: impl Into<String>) {
        self.events.send(event, About::default(), words);
    }

    /// Waits until the notify command has processed all events, up to a time limit.
    pub(super) async fn finish_commands(self) {
        let limit = self.notice.borrow().limit;
        let (end, ended) = self.commands;
        // A task that has ended does not receive the signal.
        let _ = end.send(());
        if tokio::time::timeout(limit, ended).await.is_err() {
            tracing::warn!(
                "lvsd exits before the notify command has received all events: {limit:?} have passed"
            );
        }
    }

    /// Sends `RELOADING=1` to the service manager.
    pub(super) fn reloading(&mut self) {
        let time = monotonic_us();
        self.notify
            .send(&format!("RELOADING=1\nMONOTONIC_USEC={time}"));
        self.reloading = true;
    }

    /// Sends `STOPPING=1` to the service manager.
    pub(super) fn stopping(&self) {
        self.notify.send("STOPPING=1");
    }

    /// Sends the state to the service manager if it has changed. `now`: the state as one line of
    /// text. `settled`: the states of all services are known, so that lvsd is ready before
    /// [`READY_LIMIT`]. `reads`: a reload is in progress.
    pub(super) fn state(&mut self, now: String, settled: bool, reads: bool) {
        let ready = settled || self.started.elapsed() >= READY_LIMIT;
        if ready && !self.ready {
            self.ready = true;
            self.notify.send("READY=1");
            tracing::info!("lvsd is ready: {now}");
        } else if self.ready && self.reloading && !reads {
            self.notify.send("READY=1");
        }
        self.reloading &= !self.ready || reads;
        if now != self.status {
            self.notify.send(&format!("STATUS={now}"));
            self.status = now;
        }
    }

    /// Counts and logs that a server went up or down, and sends an event about it.
    pub(super) fn change<P: Prober>(&mut self, inputs: &Inputs<P>, change: &Change) {
        let Some(service) = inputs.service(&change.key.0) else {
            return;
        };
        self.counters.change(change.up);
        log_server(service, change);
        log_service(service, change, |key| inputs.health(key));
        let (event, code, words) = match change.up {
            true => ("server_up", "", "the server is up".to_owned()),
            false => (
                "server_down",
                change.reason.code.name(),
                change.reason.to_string(),
            ),
        };
        let about = About {
            service: Some((&service.name, service.id)),
            server: Some(change.key.1),
            code,
        };
        self.events.send(event, about, words);
    }

    /// Reports that clients cannot use a server, with the reason and a fix, or that they can use it
    /// again.
    pub(super) fn suspicion<P: Prober>(
        &mut self,
        inputs: &Inputs<P>,
        key: &Key,
        suspicion: Option<&Reason>,
    ) {
        let Some(service) = inputs.service(&key.0) else {
            return;
        };
        let (name, server) = (&service.name, key.1);
        let (event, code, words) = match suspicion {
            Some(reason) => ("server_suspicious", reason.code.name(), reason.to_string()),
            None => (
                "server_answers",
                "",
                "clients can use the server again".to_owned(),
            ),
        };
        if suspicion.is_some() {
            tracing::warn!(event, service = %name, %server, code, "server is suspicious: {words}");
        } else {
            tracing::info!(event, service = %name, %server, "{words}");
        }
        let about = About {
            service: Some((name, service.id)),
            server: Some(server),
            code,
        };
        self.events.send(event, about, words);
    }

    /// Reports news of keepalived or of the announcements.
    pub(super) fn cluster(&mut self, news: News) {
        let News { event, code, words } = news;
        let logged = (!code.is_empty()).then_some(code);
        tracing::warn!(event, code = logged, "{words}");
        let about = About {
            code,
            ..About::default()
        };
        self.events.send(event, about, words);
    }

    /// Reports that the dataplane answers again or no longer.
    pub(super) fn contact(&mut self, (pid, answers): (Option<u32>, bool)) {
        if answers {
            let before = std::mem::replace(&mut self.dataplane, pid);
            if before.is_some() && before != pid {
                self.counters.dataplane_restart();
            }
        }
        let pid = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
        let (event, words) = match answers {
            true => ("dataplane_found", format!("the dataplane{pid} answers")),
            false => (
                "dataplane_lost",
                "the dataplane no longer answers; the log of lvsd names the reason".to_owned(),
            ),
        };
        self.event(event, words);
    }

    /// Logs that a service is removed because lvsd exits. Sends events about the loss of its quorum
    /// and its VIP, unless the service had lost them before, or the file does not release the VIP
    /// below the quorum.
    pub(super) fn end(&mut self, service: &Service, before: Decision) {
        let words = "the service is removed, because lvsd exits (remove_on_exit)";
        tracing::warn!(event = "quorum_lost", service = %service.name, "{words}");
        let about = About {
            service: Some((&service.name, service.id)),
            ..About::default()
        };
        if before.quorum {
            self.events.send("quorum_lost", about, words);
        }
        if !before.withdrawn && service.below_quorum == BelowQuorum::GiveUp {
            self.events.send("vip_withdrawn", about, words);
        }
    }

    /// Logs the changed parts of a decision about a service, and sends an event about each of them.
    pub(super) fn decision(&mut self, transition: &Transition) {
        let Transition {
            id,
            name,
            before,
            now,
            usable,
        } = transition;
        let servers = counted(*usable, "usable server");
        let mut report = |event: &str, words: String| {
            tracing::warn!(event, service = %name, "{words}");
            let about = About {
                service: Some((name, *id)),
                ..About::default()
            };
            self.events.send(event, about, words);
        };
        match (before.quorum, now.quorum) {
            (true, false) => report(
                "quorum_lost",
                format!("{servers}: the service is below its quorum"),
            ),
            (false, true) => report(
                "quorum_gained",
                format!("{servers}: the service has its quorum"),
            ),
            _ => {}
        }
        match (before.panic, now.panic) {
            (false, true) => report(
                "panic_on",
                format!("{servers}, fewer than `panic_below` requires: lvsd uses all servers"),
            ),
            (true, false) => report(
                "panic_off",
                format!(
                    "{servers}, as many as `panic_below` requires: servers that are down no longer receive connections"
                ),
            ),
            _ => {}
        }
        match (before.sorry, now.sorry) {
            (false, true) => report("sorry_on", "the sorry server serves".to_owned()),
            (true, false) => report(
                "sorry_off",
                "the sorry server no longer receives connections".to_owned(),
            ),
            _ => {}
        }
        match (before.withdrawn, now.withdrawn) {
            (false, true) => report("vip_withdrawn", "the VIP is released".to_owned()),
            (true, false) => report("vip_owned", "the VIP is owned again".to_owned()),
            _ => {}
        }
    }
}

/// Logs a further reason why a server stays down.
pub(super) fn log_reason(service: &Service, key: &Key, reason: &Reason) {
    let (name, server, code) = (&service.name, key.1, reason.code.name());
    tracing::warn!(event = "server_reason", service = %name, %server, code, "server is still down, now for another reason: {reason}");
}

/// Logs that a service has lost its last server that was up, or has one again.
fn log_service(service: &Service, change: &Change, health: impl Fn(&Key) -> Health) {
    let name = &service.name;
    let servers = service.servers.iter();
    let states: Vec<Health> = servers
        .map(|server| health(&(service.id, server.address)))
        .collect();
    let good = states.iter().filter(|state| **state == Health::Up).count();
    if !change.up && states.iter().all(|state| *state == Health::Down) {
        let all = match states.len() {
            1 => "the only server is".to_owned(),
            n => format!("ALL {n} servers are"),
        };
        tracing::error!(service = %name, code = "service_unusable", "{all} down: unless the file has a sorry server or `panic_below`, the service refuses new connections");
    } else if change.up && good == 1 && change.lasted.is_some() {
        tracing::warn!(service = %name, "1 of {} servers is up again", states.len());
    }
}

fn log_server(service: &Service, change: &Change) {
    let (name, server) = (&service.name, change.key.1);
    // Seconds are precise enough for a time above one second.
    let lasted = change.lasted.map(|lasted| match lasted.as_secs() {
        0 => Duration::from_millis(u64::try_from(lasted.as_millis()).unwrap_or(0)),
        whole => Duration::from_secs(whole),
    });
    if change.up {
        match lasted {
            Some(time) => {
                tracing::info!(event = "server_up", service = %name, %server, "server is up again, after {time:?} down");
            }
            // A start has one line with the numbers of all servers.
            None => tracing::debug!(event = "server_up", service = %name, %server, "server is up"),
        }
        return;
    }
    let before = match lasted {
        Some(time) => format!("after {time:?} up"),
        None => "at its first check".to_owned(),
    };
    let (reason, what) = (&change.reason, consequence(service));
    let code = reason.code.name();
    tracing::warn!(event = "server_down", service = %name, %server, code, "server is down, {before}: {reason}; {what}");
}

/// The consequence of a failed check for a server of `service`.
const fn consequence(service: &Service) -> &'static str {
    match (
        service.on_check_failure,
        service.config.extras.on_server_down,
    ) {
        (OnCheckFailure::Quiesce, _) => "it receives no new connections (weight 0)",
        (OnCheckFailure::Remove, OnServerDown::Kernel) => "it is removed",
        (OnCheckFailure::Remove, OnServerDown::Reset) => {
            "it is removed, and its connections are reset"
        }
        (OnCheckFailure::Remove, OnServerDown::Reschedule) => {
            "it is removed, and its connections are rescheduled or reset"
        }
        (OnCheckFailure::Remove, OnServerDown::Drop) => "it is removed, and its connections end",
    }
}

/// Microseconds of `CLOCK_MONOTONIC`, which systemd requires with `RELOADING=1`.
fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let time = Duration::try_from(now).unwrap_or_default();
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

//! What the log and the service manager are told about the servers' health.

use std::time::Duration;

use lvs_core::OnServerDown;

use super::Daemon;
use crate::config::{OnCheckFailure, Service};
use crate::engine::Found;
use crate::events::About;
use crate::health::{Change, Key, Prober, Report};
use crate::reconcile::Health;
use crate::words::counted;

impl<P: Prober> Daemon<P> {
    /// Takes a report and logs it: once for a change, with the reason and how long it had lasted,
    /// and once for each further reason of a server that stays down. True if it concerns the engine.
    pub(super) fn take(&mut self, report: Report) -> bool {
        let news = self.checks.take(report);
        for change in &news.changes {
            self.tell_change(change);
        }
        for (key, reason) in &news.reasons {
            let mut services = self.expanded.services.iter();
            if let Some(service) = services.find(|service| service.id == key.0) {
                let (name, server) = (&service.name, key.1);
                tracing::warn!(event = "server_reason", service = %name, %server, "server is still down, now for another reason: {reason}");
            }
        }
        news.advice || !news.changes.is_empty()
    }

    fn tell_change(&mut self, change: &Change) {
        let mut services = self.expanded.services.iter();
        let Some(service) = services.find(|service| service.id == change.key.0) else {
            return;
        };
        self.options.tally.change(change.up);
        log_server(service, change);
        self.log_service(service, change);
        let about = About {
            service: Some((&service.name, service.id)),
            server: Some(change.key.1),
        };
        let (event, words) = match change.up {
            true => ("server_up", "the server is up".to_owned()),
            false => ("server_down", change.reason.clone()),
        };
        self.events.tell(event, about, words);
    }

    /// What the change of a server means for its service.
    fn log_service(&self, service: &Service, change: &Change) {
        let name = &service.name;
        let states: Vec<Health> = service
            .servers
            .iter()
            .map(|server| self.health(&(service.id, server.address)))
            .collect();
        let good = states.iter().filter(|state| **state == Health::Up).count();
        if !change.up && states.iter().all(|state| *state == Health::Down) {
            let all = match states.len() {
                1 => "the only server is".to_owned(),
                n => format!("ALL {n} servers are"),
            };
            tracing::error!(service = %name, "{all} down: the service refuses new connections");
        } else if change.up && good == 1 && change.lasted.is_some() {
            tracing::warn!(service = %name, "the service has a server again, 1 of {}", states.len());
        }
    }

    /// The health of a server, as its checks say.
    pub(super) fn health(&self, key: &Key) -> Health {
        self.checks.health(key)
    }

    /// One line about everything.
    pub(super) fn summary(&self, found: &Found) -> String {
        let refused = found.refused.len();
        let drained = self.out_of_service();
        let mut up = 0;
        let mut all = 0;
        for service in &self.expanded.services {
            for server in &service.servers {
                all += 1;
                up += usize::from(self.is_up(service, server));
            }
        }
        let services = counted(self.expanded.services.len(), "service");
        let mut line = format!("{services}, {up} of {} up", counted(all, "server"));
        if drained > 0 {
            line.push_str(&format!(", {drained} out of service by hand"));
        }
        let lag = self.checks.lag();
        if lag >= Duration::from_secs(1) {
            line.push_str(&format!(", checks start up to {lag:.1?} late"));
        }
        let not_made = self.checks.not_made();
        if not_made > 0 {
            line.push_str(&format!(
                ", {} that lvsd cannot make",
                counted(not_made, "check")
            ));
        }
        if found.unnamed > 0 {
            let left = counted(found.unnamed, "service");
            line.push_str(&format!(", {left} left as they are until etcd is known"));
        }
        if refused > 0 {
            let changes = counted(refused, "change");
            line.push_str(&format!(", {changes} refused by the engine"));
        }
        line
    }
}

fn log_server(service: &Service, change: &Change) {
    let (name, server) = (&service.name, change.key.1);
    // Seconds are enough where there are any.
    let lasted = change.lasted.map(|lasted| match lasted.as_secs() {
        0 => Duration::from_millis(u64::try_from(lasted.as_millis()).unwrap_or(0)),
        whole => Duration::from_secs(whole),
    });
    if change.up {
        match lasted {
            Some(time) => {
                tracing::info!(event = "server_up", service = %name, %server, "server is up again, after {time:?} down");
            }
            None => tracing::info!(event = "server_up", service = %name, %server, "server is up"),
        }
        return;
    }
    let before = match lasted {
        Some(time) => format!("after {time:?} up"),
        None => "at its first check".to_owned(),
    };
    let (reason, what) = (&change.reason, consequence(service));
    tracing::warn!(event = "server_down", service = %name, %server, "server is down, {before}: {reason}; {what}");
}

/// What becomes of a server of `service` whose check has failed.
const fn consequence(service: &Service) -> &'static str {
    match (
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
        (OnCheckFailure::Remove, OnServerDown::Drop) => "it is taken out, and its connections end",
    }
}

//! Requests of clients over the control socket and over HTTP.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lvs_api::daemon::{
    AdminDone, AdminEntry, AdminSpec, AdminState, DirectorStatus, MaintenanceSpec,
};
use lvs_core::api::ServiceId;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::Daemon;
use crate::admin::Kept;
use crate::channels::{About, ChangeRequest, Request, Snapshot, answer};
use crate::clock::Now;
use crate::health::Prober;

/// Maximum number of checked servers up to which the check of each server has a histogram of 16
/// lines in the metrics. With more servers, no check has one.
const CHECK_TIMES_MAX: usize = 500;
/// Longest time that lvsd waits until the dataplane has applied a change, before it answers the
/// client. It is less than the 30 seconds after which clients stop waiting.
const APPLY_LIMIT: Duration = Duration::from_secs(20);
/// The warning of a change that the dataplane has not applied.
const UNAPPLIED: &str = "the dataplane has not applied the change yet, and lvsd repeats it: `lvsd status` shows the state";

/// Waits for the next request. Without a channel, it never returns.
pub(super) async fn next(requests: &mut Option<mpsc::Receiver<Request>>) -> Option<Request> {
    match requests {
        Some(requests) => requests.recv().await,
        None => std::future::pending().await,
    }
}

impl<P: Prober> Daemon<P> {
    /// Answers a request, at once or when the requested change is done.
    pub(super) fn take_request(&mut self, request: Request) {
        let (change, who, reply) = match request {
            Request::Change { change, who, reply } => (change, who, reply),
            Request::Snapshot(reply) => {
                // The client may have closed its connection.
                let _ = reply.send(Snapshot {
                    status: self.status(),
                    found: Arc::clone(&self.inputs.dataplane.found),
                    check_times: self.inputs.checks.times(CHECK_TIMES_MAX),
                });
                return;
            }
        };
        let result = match change {
            ChangeRequest::Admin(spec) => match self.set_admin(spec, who) {
                Ok((mut done, kept)) => {
                    let (applied, confirmed) = oneshot::channel();
                    self.unapplied.push(applied);
                    // The client is answered when the override is on disk and the dataplane has
                    // applied it.
                    tokio::spawn(async move {
                        let confirmed = timeout(APPLY_LIMIT, confirmed);
                        let (kept, confirmed) = tokio::join!(warn(kept), confirmed);
                        if !matches!(confirmed, Ok(Ok(()))) {
                            done.warnings.insert(0, UNAPPLIED.to_owned());
                        }
                        if let Some(why) = kept {
                            done.warnings.insert(0, why);
                        }
                        let _ = reply.send(answer(&done));
                    });
                    return;
                }
                Err(why) => Err(why),
            },
            ChangeRequest::Maintenance(spec) => match self.set_maintenance(spec, who) {
                Ok(mut status) => {
                    if let Some(unapplied) = self.inputs.cluster.unapplied() {
                        tokio::spawn(async move {
                            let (applied, announce) = unapplied.wait(APPLY_LIMIT).await;
                            status.announce = Some(announce);
                            if !applied {
                                status.warnings.insert(0, UNAPPLIED.to_owned());
                            }
                            let _ = reply.send(answer(&status));
                        });
                        return;
                    }
                    answer(&status)
                }
                Err(why) => Err(why),
            },
            ChangeRequest::Reload { force } => {
                tracing::debug!("{who} has requested a reload");
                self.reloader.wait(reply, who);
                self.reload(force);
                return;
            }
        };
        // The client may have closed its connection.
        let _ = reply.send(result);
    }

    fn set_maintenance(
        &mut self,
        mut spec: MaintenanceSpec,
        who: String,
    ) -> Result<DirectorStatus, String> {
        let who = spec.who.get_or_insert(who).clone();
        let why = spec.why.as_ref().map(|why| format!(": {why}"));
        let on = spec.on;
        if self.inputs.cluster.wish(spec, Now::read())? {
            let words = match on {
                true => format!(
                    "{who} has put this director into maintenance{}",
                    why.unwrap_or_default()
                ),
                false => format!("{who} has ended the maintenance of this director"),
            };
            tracing::warn!(event = "maintenance", "{words}");
            self.reporter.event("maintenance", words);
        }
        Ok(self.inputs.cluster.status(Now::read()))
    }

    fn set_admin(&mut self, mut spec: AdminSpec, who: String) -> Result<(AdminDone, Kept), String> {
        let (target, state) = (spec.target, spec.state);
        let mut servers: Vec<(ServiceId, SocketAddr)> = Vec::new();
        for service in &self.inputs.expanded.services {
            let all = service.servers.iter().map(|server| server.address);
            let matching = all.filter(|server| target.has(service.id, *server));
            servers.extend(matching.map(|server| (service.id, server)));
        }
        if servers.is_empty() && state != AdminState::Ready {
            return Err(format!(
                "{} has no server {target}; `lvsd status` lists the servers",
                self.inputs.config.path
            ));
        }
        if state != AdminState::Ready && !spec.force {
            self.spare_last(&servers)?;
        }
        spec.who = spec.who.or(Some(who));
        let why = spec.why.clone();
        let who = spec.who.clone().unwrap_or_default();
        let admin = &mut self.inputs.admin;
        admin.set(spec, Now::read())?;
        let kept = admin.keep();
        let mut warnings: Vec<String> = Vec::new();
        if state == AdminState::Ready {
            // An override for several servers may still apply.
            let others: HashSet<String> = servers
                .iter()
                .filter_map(|(service, server)| admin.of(*service, *server))
                .map(|entry| {
                    let state = entry.spec.state.name();
                    format!(
                        "{state} still applies to {}: {}",
                        entry.spec.target,
                        described(entry)
                    )
                })
                .collect();
            warnings.extend(others);
            servers.retain(|(service, server)| admin.of(*service, *server).is_none());
            self.inputs.readied.extend(servers.iter().copied());
        }
        let reason = why.map(|why| format!(": {why}")).unwrap_or_default();
        let words = match state {
            AdminState::Ready => format!("{who} has returned {target} to service"),
            AdminState::Drain => format!("{target} is drained by {who}{reason}"),
            AdminState::Maintenance => format!("{target} is in maintenance by {who}{reason}"),
        };
        tracing::warn!(event = "admin", "{words}");
        for warning in &warnings {
            tracing::warn!("{warning}");
        }
        let about = match servers.as_slice() {
            [(id, server)] => {
                let service = self.inputs.service(id);
                About {
                    service: service.map(|service| (service.name.as_str(), *id)),
                    server: Some(*server),
                    code: "",
                }
            }
            _ => About::default(),
        };
        self.reporter.events.send("admin", about, words);
        self.goal_changed();
        Ok((AdminDone { servers, warnings }, kept))
    }

    /// Refuses to take these servers out of service if a service would have no usable server left.
    fn spare_last(&self, servers: &[(ServiceId, SocketAddr)]) -> Result<(), String> {
        let taken: HashSet<_> = servers.iter().collect();
        let mut left_alone = Vec::new();
        for service in &self.inputs.expanded.services {
            let views = self.inputs.views(service);
            let servers = service.servers.iter().zip(&views);
            let mut usable = servers.filter(|(_, view)| view.is_usable());
            let mut any = false;
            let all_taken = usable.all(|(server, _)| {
                any = true;
                taken.contains(&(service.id, server.address))
            });
            if any && all_taken {
                left_alone.push(service.name.as_str());
            }
        }
        let names = match left_alone.as_slice() {
            [] => return Ok(()),
            [all @ .., last] if !all.is_empty() => format!("{} and {last}", all.join(", ")),
            [one, ..] => (*one).to_owned(),
        };
        Err(format!(
            "{names} would have no usable server left, and new clients no answer: return another server to service first, or repeat with --force (API: \"force\": true)"
        ))
    }

    /// Removes the expired overrides, reports each in the log and as an event, and starts to store
    /// the others.
    pub(super) fn expire(&mut self) {
        let over = self.inputs.admin.expire(Now::read());
        if over.is_empty() {
            return;
        }
        for entry in &over {
            let words = format!(
                "the {} of {} has expired ({})",
                entry.spec.state.name(),
                entry.spec.target,
                described(entry)
            );
            tracing::warn!(event = "admin", "{words}");
            self.reporter.event("admin", words);
        }
        tokio::spawn(warn(self.inputs.admin.keep()));
        self.goal_changed();
    }
}

/// Waits until overrides are on disk. If they cannot be written, logs and returns the reason.
async fn warn(kept: Kept) -> Option<String> {
    let why = kept.done().await.err()?;
    tracing::warn!("{why}");
    Some(why)
}

/// The operator who set an override, and the reason.
fn described(entry: &AdminEntry) -> String {
    let who = entry.spec.who.clone();
    let who = who.unwrap_or_else(|| "an unknown operator".to_owned());
    match &entry.spec.why {
        Some(why) => format!("{who}: {why}"),
        None => who,
    }
}

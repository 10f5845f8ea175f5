//! Formats changes with the names and positions in the file: single changes, and all changes of a
//! reload before they are made.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;

use lvs_api::words::counted;
use lvs_core::Forwarding;
use lvs_core::api::{Call, ServiceId};
use lvs_core::sync::SyncRole;
use lvs_core::tunnel::Tunnel;
use serde::Serialize;

use super::DataplaneView;
use crate::config::{Files, label};
use crate::reconcile::{Actual, Desired, DesiredService, Plan, diff};

/// Grammatical form of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tense {
    /// A change to make: `add server ...`, with its position in the file.
    Wish,
    /// A completed change: `added server ...`.
    Done,
}

/// Names of services and their positions in the file.
pub(super) struct Names<'a> {
    file: &'a Files,
    services: HashMap<ServiceId, &'a DesiredService>,
    /// Names of services that are no longer in the file.
    gone: Option<&'a HashMap<ServiceId, String>>,
}

impl<'a> Names<'a> {
    pub(super) fn new(desired: &'a Desired) -> Self {
        let services = desired.services.iter();
        Self {
            file: &desired.file,
            services: services.map(|service| (service.id, service)).collect(),
            gone: None,
        }
    }

    /// Adds the names of services that are no longer in the file.
    pub(super) const fn with_names(mut self, gone: &'a HashMap<ServiceId, String>) -> Self {
        self.gone = Some(gone);
        self
    }

    /// Formats `service web (tcp 192.0.2.10:80)` with its position in the file.
    pub(super) fn service_with_place(&self, id: &ServiceId) -> String {
        format!("{}{}", self.service(id, ""), self.place(id, None))
    }

    /// Formats `service web (tcp 192.0.2.10:80)`.
    pub(super) fn service_in_words(&self, id: &ServiceId) -> String {
        self.service(id, "")
    }

    pub(super) fn describe(&self, change: &Call, tense: Tense) -> String {
        let verb = |wish: &'static str, done: &'static str| match tense {
            Tense::Wish => wish,
            Tense::Done => done,
        };
        let place = |id: &ServiceId, server: Option<SocketAddr>| match tense {
            Tense::Wish => self.place(id, server),
            Tense::Done => String::new(),
        };
        match change {
            Call::SysctlSet(sysctl) => format!("set sysctl {} = {}", sysctl.name, sysctl.value),
            Call::MarkSet { rules } => format!("set {} for marks", counted(rules.len(), "rule")),
            Call::FilterSet(spec) => {
                let (allow, deny) = spec.filter.counts();
                let whose = match &spec.service {
                    Some(id) => self.service(id, ""),
                    None => "all services".to_owned(),
                };
                format!(
                    "set the filter of {whose}: {allow} allowed, {deny} denied{}",
                    spec.service
                        .as_ref()
                        .map_or_else(String::new, |id| place(id, None))
                )
            }
            Call::DaemonStart(daemon) => format!(
                "{} the synchronisation {} on {}",
                verb("start", "started"),
                role(daemon.role),
                daemon.interface
            ),
            Call::DaemonStop { role: of, .. } => format!(
                "{} the synchronisation {}",
                verb("stop", "stopped"),
                role(*of)
            ),
            Call::LocalSet(pool) => format!(
                "set {}{}",
                counted(pool.addresses.len(), "local address"),
                if pool.hairpin { ", with hairpin" } else { "" }
            ),
            Call::VipsOwn { addresses } => {
                let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
                let list = match list.is_empty() {
                    true => "none".to_owned(),
                    false => list.join(", "),
                };
                format!("{} VIPs: {list}", verb("own the", "the dataplane owns the"))
            }
            Call::ServiceAdd(spec) | Call::ServiceEdit(spec) => {
                let verb = match change {
                    Call::ServiceAdd(_) => verb("add", "added"),
                    _ => verb("change", "changed"),
                };
                let scheduler = format!("scheduler {}", spec.config.scheduler);
                let service = self.service(&spec.service, &scheduler);
                format!("{verb} {service}{}", place(&spec.service, None))
            }
            Call::ServiceDelete { service } => {
                format!(
                    "{} {}",
                    verb("delete", "deleted"),
                    self.service(service, "")
                )
            }
            Call::ServerAdd(spec) | Call::ServerEdit(spec) => {
                let (verb, of) = match change {
                    Call::ServerAdd(_) => (verb("add", "added"), "to"),
                    _ => (verb("change", "changed"), "of"),
                };
                // IPIP, the default, is not mentioned.
                let tunnel = match (spec.config.forwarding, spec.config.tunnel) {
                    (Forwarding::Tunnel, tunnel) if tunnel != Tunnel::Ipip => {
                        format!(", {}", tunnel.about().title)
                    }
                    _ => String::new(),
                };
                format!(
                    "{verb} server {} (weight {}{tunnel}) {of} {}{}",
                    spec.server,
                    spec.config.weight,
                    self.service(&spec.service, ""),
                    place(&spec.service, Some(spec.server))
                )
            }
            Call::ServerDelete { service, server } => format!(
                "{} server {server} from {}",
                verb("delete", "deleted"),
                self.service(service, "")
            ),
            Call::ServerArrange { service, .. } => format!(
                "{} the servers of {} in the order of the file, which its scheduler uses",
                verb("put", "put"),
                self.service(service, "")
            ),
            // The daemon makes no other changes.
            other => format!("{} {other:?}", verb("make", "made")),
        }
    }

    /// Formats `service web (tcp 192.0.2.10:80, MORE)`.
    fn service(&self, id: &ServiceId, more: &str) -> String {
        let label = label(id);
        let name = self.services.get(id).map(|service| service.name.as_str());
        let gone = || self.gone.and_then(|gone| gone.get(id));
        let name = name.or_else(|| gone().map(String::as_str));
        match (name.filter(|name| *name != label), more) {
            (None, "") => format!("service {label}"),
            (None, more) => format!("service {label} ({more})"),
            (Some(name), "") => format!("service {name} ({label})"),
            (Some(name), more) => format!("service {name} ({label}, {more})"),
        }
    }

    /// Formats the position of a service or server in the file: ` at lvsd.toml:14`.
    fn place(&self, id: &ServiceId, server: Option<SocketAddr>) -> String {
        let Some(service) = self.services.get(id) else {
            return String::new();
        };
        let mut servers = service.servers.iter();
        let line = match server.and_then(|at| servers.find(|s| s.address == at)) {
            Some(server) => server.line,
            None => service.line,
        };
        format!(" at {}", self.file.place(line))
    }
}

const fn role(role: SyncRole) -> &'static str {
    match role {
        SyncRole::Master => "master",
        SyncRole::Backup => "backup",
    }
}

/// Texts about the changes that a reload would make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Planned {
    /// The changes, in their order.
    pub changes: Vec<String>,
    /// Notes about services and servers that are not changed, or not yet.
    pub left: Vec<String>,
    /// Text with the numbers of affected servers and connections, or that there is nothing to
    /// change.
    pub summary: String,
    /// Text about services that are not compared; `None` if all are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_compared: Option<String>,
}

impl fmt::Display for Planned {
    /// Writes one line for each change and each note, then a line with the numbers, and a line
    /// about services that are not compared.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.changes.iter().chain(&self.left);
        for line in lines.chain([&self.summary]).chain(&self.not_compared) {
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}

/// Formats a plan. `gone` contains the names of services that the file no longer contains.
pub(super) fn planned_changes(
    desired: &Desired,
    actual: &Actual,
    gone: &HashMap<ServiceId, String>,
) -> Planned {
    let plan = diff(desired, actual);
    let names = Names::new(desired).with_names(gone);
    let changes = plan.changes.iter();
    let changes = changes.map(|change| names.describe(change, Tense::Wish));
    let changes = changes.collect();
    let mut left = Vec::new();
    for (id, server) in &plan.held {
        let service = names.service_in_words(id);
        left.push(match is_incomplete(desired, id) {
            true => format!(
                "leave server {server} of {service} unchanged: its source has no servers yet"
            ),
            false => format!(
                "delete server {server} from {service}, when its replacement serves or all replacements have failed"
            ),
        });
    }
    for id in &plan.unnamed {
        let service = names.service_in_words(id);
        left.push(format!(
            "leave {service} unchanged: it may be in Kubernetes or etcd, which have not answered yet"
        ));
    }
    for id in &plan.conflicts {
        let service = names.service_with_place(id);
        left.push(format!(
            "leave {service} unchanged: another program added it"
        ));
    }
    Planned {
        changes,
        left,
        summary: summary(desired, &plan, actual),
        not_compared: None,
    }
}

/// Whether lvsd does not know all servers of a service yet.
fn is_incomplete(desired: &Desired, id: &ServiceId) -> bool {
    let mut services = desired.services.iter();
    services.any(|service| service.id == *id && service.incomplete)
}

fn summary(desired: &Desired, plan: &Plan, actual: &Actual) -> String {
    let connections: HashMap<(ServiceId, SocketAddr), u64> = actual
        .services
        .iter()
        .flat_map(|service| {
            let servers = service.servers.iter();
            servers.map(|server| {
                let all = u64::from(server.active) + u64::from(server.inactive);
                ((service.service, server.server), all)
            })
        })
        .collect();
    let of = |key: &(ServiceId, SocketAddr)| connections.get(key).copied().unwrap_or(0);
    let (mut added, mut changed, mut deleted, mut cut) = (0, 0, 0, 0);
    let drained = plan.draining.len();
    let draining: u64 = plan.draining.iter().map(|&(s, a, _)| of(&(s, a))).sum();
    for change in &plan.changes {
        match change {
            Call::ServerAdd(_) => added += 1,
            Call::ServerEdit(_) => changed += 1,
            Call::ServerDelete { service, server } => {
                deleted += 1;
                cut += of(&(*service, *server));
            }
            Call::ServiceDelete { service } => {
                let servers = connections.iter().filter(|((of, _), _)| of == service);
                for (_, connections) in servers {
                    deleted += 1;
                    cut += connections;
                }
            }
            _ => {}
        }
    }
    let mut held = plan.held.iter();
    if plan.changes.is_empty() && held.all(|(id, _)| is_incomplete(desired, id)) {
        return "nothing to change".to_owned();
    }
    format!(
        "{} added, {changed} changed, {drained} drained ({draining} connections), {deleted} deleted ({cut} connections)",
        counted(added, "server")
    )
}

/// Text about packets while no dataplane runs. `how`: how its process ended, if known; `seen`: its
/// last report.
pub(super) fn without_dataplane(how: Option<&str>, seen: &DataplaneView) -> &'static str {
    // A dataplane that was stopped in order has removed its programs from the kernel.
    let stopped = how.is_some_and(|how| how.ends_with("exit status: 0"));
    if seen.info.fast_path.active && !stopped {
        return match how {
            Some(_) => {
                "established connections continue in the kernel, and packets of new ones wait for the next dataplane"
            }
            None => {
                "unless it was stopped, established connections continue in the kernel, and packets of new ones wait for the next dataplane"
            }
        };
    }
    let vips = seen
        .services
        .iter()
        .filter_map(|info| info.service.address());
    let vips = vips.map(|address| address.ip());
    let mut vips = vips.peekable();
    let all_own = vips.peek().is_some() && vips.all(|vip| seen.info.own_vips.contains(&vip));
    match all_own {
        true => "no dataplane answers for the VIPs until another one starts",
        false => {
            "the host's network stack receives packets to VIPs that are on the host or routed to it, until another dataplane starts"
        }
    }
}

#[cfg(test)]
mod tests {
    use lvs_core::api::ServiceInfo;
    use lvs_core::stats::Stats;
    use lvs_core::{Family, ServiceConfig};

    use super::*;

    fn view(fast_path: bool, own: bool) -> DataplaneView {
        let vip = [192, 0, 2, 10];
        let mut view = DataplaneView::default();
        view.info.fast_path.active = fast_path;
        if own {
            view.info.own_vips.push(vip.into());
        }
        view.services.push(ServiceInfo {
            service: ServiceId::Tcp {
                address: (vip, 80).into(),
            },
            config: ServiceConfig::new(Family::V4, "wlc"),
            owner: None,
            stats: Stats::default(),
            refused: 0,
            refusals: Vec::new(),
            drops: Vec::new(),
            servers: Vec::new(),
        });
        view
    }

    #[test]
    fn dataplane_loss_message_names_host_stack_only_if_host_stack_receives_packets() {
        let killed = Some("it ended with signal: 9 (SIGKILL)");
        let stopped = Some("it ended with exit status: 0");
        for (how, fast_path, own, words) in [
            (killed, true, false, "established connections continue"),
            (None, true, false, "unless it was stopped, established"),
            (stopped, true, false, "the host's network stack receives"),
            (stopped, true, true, "no dataplane answers"),
            (killed, false, false, "the host's network stack receives"),
            (None, false, true, "no dataplane answers"),
        ] {
            let reported = without_dataplane(how, &view(fast_path, own));
            assert!(
                reported.starts_with(words),
                "{how:?} {fast_path} {own}: {reported}"
            );
        }
    }
}

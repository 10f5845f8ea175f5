//! Formats the changes of a reload before they are made.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;

use lvs_api::words::counted;
use lvs_core::api::{Call, ServiceId};
use serde::Serialize;

use super::describe::{Names, Tense};
use crate::reconcile::{Actual, Desired, Plan, diff};

/// Texts about the changes that a reload would make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Planned {
    /// The changes, in their order.
    pub changes: Vec<String>,
    /// Notes about services and servers that are not changed, or not yet.
    pub left: Vec<String>,
    /// Text with the numbers of changes.
    pub summary: String,
    /// Services that are not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_compared: Option<String>,
}

impl fmt::Display for Planned {
    /// Writes one line for each change, and a line with the numbers.
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

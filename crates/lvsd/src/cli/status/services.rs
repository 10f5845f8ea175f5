//! The lines of `lvsd status` about services and their servers.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::net::IpAddr;

use lvs_api::daemon::{AdminEntry, AdminState, ServerStatus, ServiceStatus, Status};
use lvs_api::words::{counted, in_brackets, lasted, shell_word, times};
use lvs_core::Family;
use lvs_core::api::ServiceId;
use lvs_core::attempts::Attempts;
use lvs_core::recent::RecentCount;

use super::Look;
use super::director::times_of;
use crate::config::label;
use crate::verdict::{self, ServiceState};

/// The overrides of operators, by the host of their servers.
#[derive(Debug, Default)]
pub(super) struct Overrides<'a> {
    now: u64,
    by_host: HashMap<IpAddr, Vec<&'a AdminEntry>>,
}

impl<'a> Overrides<'a> {
    pub(super) fn new(status: &'a Status, now: u64) -> Self {
        let mut by_host: HashMap<_, Vec<_>> = HashMap::new();
        for entry in &status.admin {
            let host = entry.spec.target.host;
            by_host.entry(host).or_default().push(entry);
        }
        Self { now, by_host }
    }

    /// The reason why a server is drained or in maintenance, and the command that ends it.
    pub(super) fn note(&self, service: &ServiceStatus, server: &ServerStatus) -> String {
        let state = server.admin.name();
        let entries = self.by_host.get(&server.server.ip());
        let mut entries = entries.into_iter().flatten().filter(|entry| {
            let is_same = entry.spec.state == server.admin;
            is_same && entry.spec.target.has(service.service, server.server)
        });
        let entry = entries.next();
        let why = match entry {
            Some(entry) => format!(" {}", times_of(entry, self.now)),
            None => ", weight 0 was set by hand".to_owned(),
        };
        let is_of_all = entry.is_some_and(|entry| entry.spec.target.service.is_none());
        let label = label(&service.service);
        let of = match service.service {
            _ if is_of_all => "all".to_owned(),
            _ if service.name != label => shell_word(&service.name),
            ServiceId::Fwmark { mark, family } => match family {
                Family::V4 => format!("fwmark:{mark}"),
                Family::V6 => format!("fwmark6:{mark}"),
            },
            _ => label.replacen(' ', ":", 1),
        };
        let server = server.server;
        format!("{state}{why} (ends with: lvsadm undrain {of} {server})")
    }
}

/// Recent packets of a drop reason with their rate and times.
pub(super) fn packets_text(reason: &str, packets: &RecentCount) -> String {
    let seen = times(Some(packets.last_minute), packets.since, packets.ago);
    format!("{} {reason}{}", packets.recent, in_brackets(&seen))
}

/// Appends a line about the packets to a service that were refused and opened no connection, and a
/// line about the dropped packets of its connections. Reasons without a packet in the last minute
/// are omitted.
fn losses_lines(text: &mut String, service: &ServiceStatus) {
    for (fate, reasons) in [("refused", &service.refusals), ("dropped", &service.drops)] {
        let recent = reasons.iter().filter(|one| one.packets.last_minute > 0);
        let parts: Vec<String> = recent
            .map(|one| packets_text(&one.reason, &one.packets))
            .collect();
        if !parts.is_empty() {
            let _ = writeln!(text, "  {fate} in five minutes: {}", parts.join(", "));
        }
    }
}

/// Appends the services: first broken ones, then degraded and suspicious ones, then those with slow
/// or flapping servers, then all others.
pub(super) fn of_services(
    text: &mut String,
    status: &Status,
    overrides: Option<&Overrides<'_>>,
    look: Look,
) {
    let mut services: Vec<&ServiceStatus> = status.services.iter().collect();
    services.sort_by_key(|service| (ServiceState::of(service), verdict::is_well(service)));
    for service in services {
        of_service(text, service, overrides, look);
    }
}

fn of_service(
    text: &mut String,
    service: &ServiceStatus,
    overrides: Option<&Overrides<'_>>,
    look: Look,
) {
    let id: ServiceId = service.service;
    let label = label(&id);
    let name = match service.name == label {
        true => label,
        false => format!("{} ({label})", service.name),
    };
    let servers = counted(verdict::in_file(service).count(), "server");
    let _ = write!(text, "\n{name}: {} of {servers} usable", service.usable);
    for (is, words) in [
        (service.proxied, "proxied"),
        (
            service.conflict,
            "NOT OURS: a service of another program uses its address (delete it with lvsadm -D, or set manage_all_services = true in [lvsd])",
        ),
        (
            service.unheard,
            "its servers are NOT KNOWN YET, and the servers in the dataplane are unchanged",
        ),
        (!service.quorum, "BELOW ITS QUORUM"),
        (
            service.panic,
            "all servers are used, because too few are up",
        ),
        (service.withdrawn, "its VIP is released"),
    ] {
        if is {
            let _ = write!(text, "; {words}");
        }
    }
    if let Some(sorry) = service.sorry {
        let _ = write!(text, "; the sorry server {sorry} serves");
    }
    text.push('\n');
    losses_lines(text, service);
    let mut servers: Vec<&ServerStatus> = service.servers.iter().collect();
    servers.sort_by_key(|server| match server.health.as_str() {
        "down" => 0,
        "suspicious" => 1,
        "unknown" => 2,
        _ if verdict::is_flapping(server) || verdict::is_slow(server) => 3,
        _ => 4,
    });
    for server in servers {
        of_server(text, service, server, overrides, look);
    }
}

/// Appends the columns of a server and its notes. With a maximum width, the notes begin on a
/// separate line.
fn of_server(
    text: &mut String,
    service: &ServiceStatus,
    server: &ServerStatus,
    overrides: Option<&Overrides<'_>>,
    look: Look,
) {
    let since = server.since.map(|since| format!(" {}", lasted(since)));
    let state = format!("{}{}", server.health, since.unwrap_or_default());
    let weight = match server.weight {
        Some(weight) => format!("weight {weight}"),
        None => "absent".to_owned(),
    };
    let address = server.server.to_string();
    let _ = write!(text, "  {address:<21}");
    if look.width.is_some() && address.len() > 21 {
        let _ = write!(text, "\n{:23}", "");
    }
    let _ = write!(
        text,
        " {} {weight:<10} active {:<5} inactive {}",
        look.paint(&server.health, format!("{state:<17}")),
        short(server.active),
        short(server.inactive)
    );
    let notes = notes(service, server, overrides, look);
    if !notes.is_empty() {
        text.push_str(if look.width.is_some() { "\n    " } else { "  " });
        text.push_str(&notes.join("; "));
    }
    text.push('\n');
    if !server.fix.is_empty() {
        let _ = writeln!(text, "    fix: {}", server.fix);
    }
}

/// Formats a number with at most five characters.
fn short(number: u32) -> String {
    match number {
        0..100_000 => number.to_string(),
        100_000..10_000_000 => format!("{}k", number / 1000),
        _ => format!("{}M", number / 1_000_000),
    }
}

fn notes(
    service: &ServiceStatus,
    server: &ServerStatus,
    overrides: Option<&Overrides<'_>>,
    look: Look,
) -> Vec<String> {
    let mut notes = Vec::new();
    if server.admin != AdminState::Ready {
        notes.push(match overrides {
            Some(overrides) => overrides.note(service, server),
            None => server.admin.name().to_owned(),
        });
    }
    match (server.configured, server.weight) {
        (None, _) if service.sorry_server == Some(server.server) => {
            notes.push("sorry server".to_owned());
        }
        (None, _) => notes.push("not in the file".to_owned()),
        (Some(file), Some(now))
            if file != now && server.admin == AdminState::Ready && server.health != "down" =>
        {
            notes.push(match service.sorry {
                Some(_) if now == 0 => "the sorry server serves instead".to_owned(),
                _ => format!("weight {file} in the file"),
            });
        }
        _ => {}
    }
    if !server.reason.is_empty() {
        notes.push(verdict::reason(server).to_owned());
    }
    if let Some(not_made) = &server.check_not_made {
        let time = lasted(not_made.seconds);
        notes.push(format!("NOT CHECKED for {time}: {}", not_made.reason));
    }
    if let Some(checks) = &server.checks {
        let falls = checks.falls_in_day;
        if verdict::is_flapping(server) || look.details && falls > 0 {
            let times = counted(usize::try_from(falls).unwrap_or(usize::MAX), "time");
            let time = lasted(checks.down_seconds_in_day);
            let last = checks
                .since_fall
                .map(|ago| format!(", last {} ago", lasted(ago)));
            notes.push(format!(
                "went down {times} in 24 h{}, for {time} in total",
                last.unwrap_or_default()
            ));
            if server.health == "up" && !checks.fall_reason.is_empty() {
                notes.push(format!("the last reason: {}", checks.fall_reason));
            }
        }
        if verdict::is_slow(server) || look.details {
            notes.push(format!(
                "checks take {} (5 minutes: p50 {}, p99 {})",
                millis(checks.last_us),
                millis(checks.p50_us),
                millis(checks.p99_us)
            ));
        }
    }
    let checks = server.checks.as_ref().filter(|_| look.details);
    if let Some(checks) = checks.filter(|checks| !checks.own_address.is_empty()) {
        notes.push(format!(
            "lvsd checks the server's own address, not the path of clients: {}",
            checks.own_address
        ));
    }
    if look.details && !server.attempts.is_empty() {
        let Attempts { opened, unanswered } = server.attempts.last_5_minutes;
        notes.push(format!(
            "clients opened {opened} connections in 5 minutes, {unanswered} without an answer"
        ));
    }
    if let Some(latency) = server.latency_us.filter(|_| look.details) {
        notes.push(format!(
            "the server answers new connections in {}",
            millis(latency)
        ));
    }
    notes
}

fn millis(us: u64) -> String {
    match us {
        0..10_000 => format!("{}.{} ms", us / 1000, us / 100 % 10),
        us => format!("{} ms", us / 1000),
    }
}

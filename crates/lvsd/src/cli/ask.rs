//! Requests to the running daemon: its state, its events, a reload.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::Duration;

use lvs_api::daemon::{
    AdminState, Client, DirectorSeen, DirectorStatus, Event, MaintenanceSpec, Reloaded,
    ServerStatus, ServiceStatus, SourceStatus, Status,
};
use lvs_api::{Address, starting};
use lvs_core::api::{PeerStanding, ServiceId, TablesInfo, TablesState, Waiting};

use crate::clock::unix_time;
use crate::config::label;
use crate::words::counted;

fn connect(dataplane: &Address) -> Result<Client, String> {
    starting::connect_daemon(dataplane)?.ok_or_else(|| {
        format!(
            "no lvsd runs for the dataplane at {dataplane}; start it with `systemctl start lvsd`"
        )
    })
}

/// Has the daemon read its file again; nothing if it cannot be asked.
pub(super) fn reload(dataplane: &Address, force: bool) -> Result<Option<Reloaded>, String> {
    let Some(mut client) = starting::connect_daemon(dataplane)? else {
        return Ok(None);
    };
    client.reload(force).map(Some)
}

/// The status of the running daemon; `None` if none answers.
pub(super) fn running(dataplane: &Address) -> Option<Status> {
    Client::connect(dataplane).ok().flatten()?.status().ok()
}

pub(super) fn status(dataplane: &Address, json: bool) -> Result<(), String> {
    let status = connect(dataplane)?.status()?;
    let text = match json {
        true => serde_json::to_string_pretty(&status).map_err(|error| error.to_string())? + "\n",
        false => tell(&status, unix_time()),
    };
    super::write(text.as_bytes())
}

/// Puts the director into maintenance, or takes it out, and shows how it stands.
pub(super) fn maintenance(
    dataplane: &Address,
    on: Option<bool>,
    why: Option<String>,
    json: bool,
) -> Result<(), String> {
    let mut client = connect(dataplane)?;
    let status = match on {
        Some(on) => client.maintenance(&MaintenanceSpec { on, who: None, why })?,
        None => client.status()?.director,
    };
    let text = match json {
        true => serde_json::to_string_pretty(&status).map_err(|error| error.to_string())? + "\n",
        false => director(&status, unix_time()),
    };
    super::write(text.as_bytes())
}

/// How a director stands among others.
fn director(status: &DirectorStatus, now: u64) -> String {
    let mut text = String::new();
    match &status.maintenance {
        Some(wish) => {
            let ago = lasted(now.saturating_sub(wish.since));
            let who = wish.who.as_deref().unwrap_or("?");
            let _ = write!(text, "IN MAINTENANCE for {ago} by {who}");
            let _ = match &wish.why {
                Some(why) => writeln!(text, ": {why}"),
                None => writeln!(text),
            };
        }
        None => text.push_str("not in maintenance\n"),
    }
    if let Some(vrrp) = &status.vrrp {
        let _ = write!(
            text,
            "keepalived: {}, {}; track file: {}",
            vrrp.state,
            match vrrp.active {
                true => "active",
                false => "not active",
            },
            vrrp.track
        );
        if !vrrp.ready {
            let _ = write!(text, "; NOT READY, waits for {}", vrrp.waits_for);
        }
        if vrrp.ignored > 0 {
            let _ = write!(text, "; {} lines not understood", vrrp.ignored);
        }
        text.push('\n');
        for trouble in &vrrp.trouble {
            let _ = writeln!(text, "keepalived: {trouble}");
        }
    }
    if let Some(announce) = &status.announce {
        if !announce.ready {
            let _ = writeln!(
                text,
                "announces nothing: NOT READY, waits for {}",
                announce.waits_for
            );
        }
        if !announce.trouble.is_empty() {
            let _ = writeln!(text, "what is announced is not known: {}", announce.trouble);
        }
        for vip in &announce.addresses {
            let _ = write!(text, "{}: {}", vip.address, vip.standing.name());
            let _ = match vip.trouble.as_str() {
                "" => writeln!(text),
                trouble => writeln!(text, "; {trouble}"),
            };
        }
    }
    for warning in &status.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}

pub(super) fn events(dataplane: &Address, json: bool) -> Result<(), String> {
    let mut output = io::stdout().lock();
    connect(dataplane)?.events(|event| {
        let line = match json {
            true => serde_json::to_string(&event).unwrap_or_default(),
            false => event_line(&event),
        };
        writeln!(output, "{line}")
            .and_then(|()| output.flush())
            .is_ok()
    })
}

fn event_line(event: &Event) -> String {
    let mut line = format!("{} {}", clock(event.time_ms / 1000), event.event);
    if let Some(service) = &event.service {
        let _ = write!(line, " {service}");
    }
    if let Some(server) = &event.server {
        let _ = write!(line, " {server}");
    }
    let _ = write!(line, ": {}", event.message);
    line
}

/// Time of day, UTC.
fn clock(unix: u64) -> String {
    let (hours, minutes, seconds) = (unix / 3600 % 24, unix / 60 % 60, unix % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}Z")
}

/// A time in its two largest units.
fn lasted(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m{:02}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h{minutes:02}m"),
        (days, hours, _) => format!("{days}d{hours:02}h"),
    }
}

/// The whole status as text, problems first.
fn tell(status: &Status, now: u64) -> String {
    let mut text = format!(
        "lvsd {} (pid {}), up {}; {}\n",
        status.version,
        status.pid,
        lasted(status.uptime),
        dataplane(status)
    );
    let loaded = &status.loaded;
    // Without words it is the file of the start.
    if !loaded.message.is_empty() {
        let ago = lasted(now.saturating_sub(loaded.time));
        let _ = writeln!(text, "{} ago: {}", ago, loaded.message);
    } else {
        let _ = writeln!(text, "configuration: {}", status.config);
    }
    let _ = write!(text, "lvsd is {}", status.confinement);
    let _ = match &status.dataplane.confinement {
        Some(confinement) => writeln!(text, "; the dataplane is {confinement}"),
        None => writeln!(text),
    };
    if !status.director.is_alone() {
        text.push_str(&director(&status.director, now));
    }
    for source in &status.sources {
        tell_source(&mut text, source, now);
    }
    for director in &status.directors {
        tell_director(&mut text, director, &status.directors);
    }
    for (title, lines) in [
        ("left out", &status.left_out),
        ("refused by the dataplane", &status.refused),
        ("changed by hand", &status.drift),
    ] {
        for line in lines {
            let _ = writeln!(text, "{title}: {line}");
        }
    }
    for entry in &status.admin {
        let spec = &entry.spec;
        let _ = write!(
            text,
            "{}: {}, for {} by {}",
            spec.state.name(),
            spec.target,
            lasted(now.saturating_sub(entry.since)),
            spec.who.as_deref().unwrap_or("?")
        );
        if let Some(until) = spec.until {
            let _ = write!(text, ", {} more", lasted(until.saturating_sub(now)));
        }
        let _ = match &spec.why {
            Some(why) => writeln!(text, ": {why}"),
            None => writeln!(text),
        };
    }
    if let Some(sync) = &status.dataplane.sync {
        let lost = [sync.queue_full, sync.not_sent, sync.lost, sync.too_long]
            .iter()
            .sum::<u64>();
        let refused = sync.malformed + sync.other_id + sync.nonsense + sync.no_room;
        let _ = writeln!(
            text,
            "synchronisation: {} messages sent, {} received, {} connections taken over; {lost} lost, {refused} refused",
            sync.sent, sync.received, sync.taken
        );
    }
    // The state of a disconnected dataplane is unknown.
    if status.dataplane.connected {
        for Waiting { what, fix, .. } in &status.dataplane.waiting {
            let _ = writeln!(text, "WAITING: {what}. To do: {fix}");
        }
        for peer in &status.dataplane.peers {
            let mut tables = status.dataplane.tables.iter();
            tell_peer(&mut text, peer, tables.find(|one| one.peer == peer.peer));
        }
    }
    if status.check_lag_ms >= 1000 {
        let lag = Duration::from_millis(status.check_lag_ms);
        let _ = writeln!(text, "checks start up to {lag:.1?} late");
    }
    if let Some(proxy) = &status.proxy {
        let _ = writeln!(
            text,
            "proxied: {} of {} at a time; {} refused for want of room, {} evicted, {} without a server",
            proxy.connections, proxy.most, proxy.full, proxy.evicted, proxy.refused
        );
    }
    for service in &status.services {
        tell_service(&mut text, service);
    }
    text
}

fn tell_source(text: &mut String, source: &SourceStatus, now: u64) {
    let _ = write!(text, "{} {}: ", source.kind, source.name);
    let _ = match (source.known, source.answered) {
        (false, _) => write!(text, "NOT KNOWN YET"),
        (true, at) => {
            let items = match source.revision {
                // Services and servers, of which each is a key.
                Some(revision) => {
                    format!("{}, revision {revision}", counted(source.items, "key"))
                }
                None if source.kind == "kubernetes" => counted(source.items, "service"),
                None => counted(source.items, "server"),
            };
            match at {
                Some(at) => write!(text, "{items}, {} ago", lasted(now.saturating_sub(at))),
                None => write!(text, "{items}, kept from before lvsd began"),
            }
        }
    };
    if source.refused > 0 {
        let refused = counted(source.refused, "object");
        let _ = write!(text, "; {refused} REFUSED");
    }
    if let Some(leader) = &source.leader {
        let _ = write!(text, "; {leader} writes addresses");
    }
    if source.held > 0 {
        let held = counted(source.held, "service");
        let _ = write!(text, "; {held} of the dataplane left as they are");
    }
    let _ = match &source.trouble {
        Some(why) => writeln!(text, "; DOES NOT ANSWER: {why}"),
        None => writeln!(text),
    };
}

/// The replication state of a peer, and whether its services equal those of this director.
fn tell_peer(text: &mut String, peer: &PeerStanding, tables: Option<&TablesInfo>) {
    let _ = write!(text, "peer {}: ", peer.peer.ip());
    let _ = match peer.state.as_str() {
        "in step" => write!(text, "in step"),
        state => {
            let missing = match peer.missing {
                0 => String::new(),
                count => format!(", {count} connections missing"),
            };
            let why = match peer.trouble.as_str() {
                "" => String::new(),
                why => format!(" ({why})"),
            };
            let state = state.to_uppercase();
            write!(text, "{state} for {}{missing}{why}", lasted(peer.seconds))
        }
    };
    match tables {
        Some(tables) => tell_tables(text, tables),
        None => text.push('\n'),
    }
}

fn tell_tables(text: &mut String, tables: &TablesInfo) {
    let services = || {
        let services = counted(
            usize::try_from(tables.differ).unwrap_or(usize::MAX),
            "service",
        );
        format!("{services} not as here, for {}", lasted(tables.seconds))
    };
    let said = match tables.state {
        TablesState::Unknown => "services and servers not known".to_owned(),
        TablesState::Older => "an older version, services and servers not compared".to_owned(),
        TablesState::Alike => "the same services and servers as here".to_owned(),
        TablesState::Differ => services(),
        TablesState::Alarm => format!("ALARM: {}; lvsadm sync shows them", services()),
    };
    let _ = writeln!(text, "; {said}");
}

/// A director, and how it differs from this one.
fn tell_director(text: &mut String, director: &DirectorSeen, all: &[DirectorSeen]) {
    let _ = write!(
        text,
        "director {}: revision {}, {} with {}",
        director.name,
        director.revision,
        counted(director.services, "service"),
        counted(director.servers, "server")
    );
    let own = all.iter().find(|one| one.own);
    for (is, words) in [
        (director.own, "this one"),
        (!director.ready, "NOT READY"),
        (director.maintenance, "in maintenance"),
        (director.left_out, "has left something out"),
        (
            own.is_some_and(|own| own.digest != director.digest),
            "RUNS SOMETHING ELSE",
        ),
    ] {
        if is {
            let _ = write!(text, "; {words}");
        }
    }
    text.push('\n');
}

fn dataplane(status: &Status) -> String {
    let dataplane = &status.dataplane;
    match (dataplane.connected, dataplane.pid) {
        (true, Some(pid)) => format!("dataplane: pid {pid}"),
        (true, None) => "dataplane: it answers".to_owned(),
        (false, _) if dataplane.idle => "no dataplane is needed".to_owned(),
        (false, _) => "NO DATAPLANE answers; the log of lvsd says why".to_owned(),
    }
}

fn tell_service(text: &mut String, service: &ServiceStatus) {
    let id: ServiceId = service.service;
    let label = label(&id);
    let name = match service.name == label {
        true => label,
        false => format!("{} ({label})", service.name),
    };
    let in_file = service
        .servers
        .iter()
        .filter(|s| s.configured.is_some())
        .count();
    let _ = write!(
        text,
        "\n{name}: {} of {} usable",
        service.usable,
        counted(in_file, "server")
    );
    for (is, words) in [
        (service.proxied, "proxied"),
        (
            service.conflict,
            "NOT OURS: somebody else's service is in its place",
        ),
        (
            service.unheard,
            "its servers are NOT KNOWN YET, those of the dataplane stay",
        ),
        (!service.quorum, "BELOW ITS QUORUM"),
        (
            service.panic,
            "all servers are used, because too few are up",
        ),
        (service.withdrawn, "its VIP is given up"),
    ] {
        if is {
            let _ = write!(text, "; {words}");
        }
    }
    if let Some(sorry) = service.sorry {
        let _ = write!(text, "; the sorry server {sorry} serves");
    }
    text.push('\n');
    for server in &service.servers {
        tell_server(text, service, server);
    }
}

fn tell_server(text: &mut String, service: &ServiceStatus, server: &ServerStatus) {
    let since = server
        .since
        .map(|s| format!(" {}", lasted(s)))
        .unwrap_or_default();
    let weight = match server.weight {
        Some(weight) => format!("weight {weight}"),
        None => "not there".to_owned(),
    };
    let _ = write!(
        text,
        "  {:<24} {:<14} {:<12} active {:<6} inactive {:<6}",
        server.server.to_string(),
        format!("{}{since}", server.health),
        weight,
        server.active,
        server.inactive
    );
    let mut notes = Vec::new();
    if server.admin != AdminState::Ready {
        notes.push(server.admin.name().to_owned());
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
        notes.push(server.reason.clone());
    }
    if let Some(not_made) = &server.check_not_made {
        let time = lasted(not_made.seconds);
        notes.push(format!("NOT CHECKED for {time}: {}", not_made.reason));
    }
    let _ = write!(text, " {}", notes.join("; "));
    let end = text.trim_end().len();
    text.truncate(end);
    text.push('\n');
    if !server.fix.is_empty() {
        let _ = writeln!(text, "    fix: {}", server.fix);
    }
}

#[cfg(test)]
mod tests {
    use lvs_api::daemon::{CheckNotMade, DataplaneStatus, ProxyStatus};
    use lvs_core::api::Confinement;

    use super::*;

    #[test]
    fn status_exit_code_reports_problems() {
        let service = ServiceId::Tcp {
            address: ([192, 0, 2, 10], 80).into(),
        };
        let server = |n: u8, health: &str, reason: &str| ServerStatus {
            server: ([10, 0, 0, n], 80).into(),
            configured: Some(1),
            admin: if n == 1 {
                AdminState::Drain
            } else {
                AdminState::Ready
            },
            health: health.to_owned(),
            since: Some(3723),
            reason: reason.to_owned(),
            fix: String::new(),
            attempts: Default::default(),
            check_not_made: (n == 1).then(|| CheckNotMade {
                seconds: 62,
                reason: "too many open files".to_owned(),
            }),
            weight: Some(0),
            active: 7,
            inactive: 0,
        };
        let suspicious = ServerStatus {
            fix: "on 10.0.0.3: look".to_owned(),
            ..server(3, "suspicious", "15 of 20 connections got no answer")
        };
        let unnamed = |n| ServerStatus {
            configured: None,
            since: None,
            ..server(n, "unchecked", "")
        };
        let status = Status {
            pid: 7,
            version: "1".to_owned(),
            uptime: 59,
            services: vec![ServiceStatus {
                name: "web".to_owned(),
                service,
                proxied: false,
                usable: 0,
                quorum: false,
                panic: false,
                sorry: None,
                sorry_server: Some(([10, 0, 0, 9], 80).into()),
                withdrawn: false,
                conflict: false,
                unheard: false,
                servers: vec![
                    server(1, "up", ""),
                    server(2, "down", "connection refused"),
                    suspicious,
                    unnamed(8),
                    unnamed(9),
                ],
            }],
            proxy: Some(ProxyStatus {
                connections: 1,
                most: 2,
                full: 3,
                evicted: 4,
                refused: 5,
            }),
            dataplane: DataplaneStatus {
                confinement: Some(Confinement {
                    by: vec!["landlock".to_owned()],
                    not_by: vec!["seccomp (why)".to_owned()],
                }),
                ..DataplaneStatus::default()
            },
            ..Status::default()
        };
        let text = tell(&status, 1000);
        for words in [
            "lvsd 1 (pid 7), up 59s; NO DATAPLANE answers",
            "\nlvsd is not confined; the dataplane is confined by landlock, not by seccomp (why)\n",
            "\nproxied: 1 of 2 at a time; 3 refused for want of room, 4 evicted, 5 without a server\n",
            "web (tcp 192.0.2.10:80): 0 of 3 servers usable; BELOW ITS QUORUM",
            "10.0.0.1:80              up 1h02m       weight 0     active 7      inactive 0      drain; NOT CHECKED for 1m02s: too many open files\n",
            "down 1h02m     weight 0     active 7      inactive 0      connection refused\n",
            "15 of 20 connections got no answer\n    fix: on 10.0.0.3: look\n",
            "10.0.0.8:80              unchecked      weight 0     active 7      inactive 0      not in the file\n",
            "10.0.0.9:80              unchecked      weight 0     active 7      inactive 0      sorry server\n",
        ] {
            assert!(text.contains(words), "{words}\n{text}");
        }
    }

    #[test]
    fn how_other_directors_stand() {
        let peer = |n: u8, state: &str, seconds: u64, missing: u64, trouble: &str| PeerStanding {
            peer: ([192, 0, 2, n], 8848).into(),
            state: state.to_owned(),
            seconds,
            missing,
            trouble: trouble.to_owned(),
        };
        let mut status = Status::default();
        status.dataplane.connected = true;
        status.dataplane.peers = vec![
            peer(2, "in step", 0, 0, ""),
            peer(3, "away", 13, 0, "no route to host"),
            peer(4, "behind", 5, 7, ""),
        ];
        status.dataplane.tables = vec![TablesInfo {
            peer: ([192, 0, 2, 2], 8848).into(),
            state: TablesState::Alike,
            differ: 0,
            seconds: 0,
        }];
        let text = tell(&status, 1000);
        for line in [
            "peer 192.0.2.2: in step; the same services and servers as here\n",
            "peer 192.0.2.3: AWAY for 13s (no route to host)\n",
            "peer 192.0.2.4: BEHIND for 5s, 7 connections missing\n",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        status.dataplane.waiting = vec![Waiting {
            code: "interface_missing".to_owned(),
            what: "eth7 is missing".to_owned(),
            fix: "make it".to_owned(),
        }];
        let text = tell(&status, 1000);
        assert!(
            text.contains("WAITING: eth7 is missing. To do: make it\n"),
            "{text}"
        );
        status.dataplane.connected = false;
        assert!(!tell(&status, 1000).contains("peer "));
    }
}

//! Verdicts about each service and the whole director: a state and a line of text (pure functions).

use std::net::IpAddr;
use std::time::Duration;

use lvs_api::daemon::{
    AdminState, DataplaneStatus, ServerStatus, ServiceStatus, SourceStatus, Status,
};
use lvs_api::guidance::{
    NEARLY_FULL, for_conflict, for_interface_down, for_peer, for_silent_hop, is_nearly_full,
    test_of_source,
};
use lvs_api::words::{counted, in_brackets, lasted, shell_word, times};
use lvs_core::api::{Conflict, DownInterface, PeerStanding, SilentHop, Waiting};

use crate::config::Service;
use crate::health::Code;

/// Maximum number of broken services that a verdict names.
const NAMED_MAX: usize = 3;
/// Number of times that a server must go down in 24 hours to be flapping.
const FLAPS: u64 = 3;
/// Time in seconds for which a server counts as flapping after it last went down.
const FLAPPING: u64 = 600;
/// Number of consecutive slow checks after which a server counts as slow.
const SLOW: u64 = 3;
/// Age in milliseconds from which the dataplane's state is old; lvsd reads it every two seconds.
const OLD_MS: u64 = 5_000;

/// Delay in milliseconds from which the start of checks is late.
const LATE_MS: u64 = 1_000;
/// The fix for checks that start late.
const LATE_CHECKS: &str = "provide more CPU for lvsd (top), or raise `interval` of the checks";

/// State of a service; the worst state is the smallest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServiceState {
    /// Clients are not served as configured, for example because no server is usable, the quorum is
    /// not reached or a sorry server serves; [`trouble`] returns the reasons.
    Broken,
    /// Some servers are down, but the service works.
    Degraded,
    /// Some servers are suspicious, and none is down.
    Suspicious,
    /// The service works, and no server is down or suspicious.
    Ok,
}

impl ServiceState {
    /// Determines the state of a service from its status.
    pub fn of(service: &ServiceStatus) -> Self {
        if !trouble(service).is_empty() {
            return Self::Broken;
        }
        match (count(service, "down"), count(service, "suspicious")) {
            (0, 0) => Self::Ok,
            (0, _) => Self::Suspicious,
            _ => Self::Degraded,
        }
    }

    /// The name of the state in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Broken => "broken",
            Self::Degraded => "degraded",
            Self::Suspicious => "suspicious",
            Self::Ok => "ok",
        }
    }
}

/// The servers of a service, without its sorry server and without servers that only the dataplane
/// has.
pub fn in_file(service: &ServiceStatus) -> impl Iterator<Item = &ServerStatus> {
    let servers = service.servers.iter();
    servers.filter(|server| server.configured.is_some())
}

/// Number of the servers of [`in_file`] that have this health.
pub fn count(service: &ServiceStatus, health: &str) -> usize {
    in_file(service)
        .filter(|server| server.health == health)
        .count()
}

/// Whether a server went down at least three times in 24 hours, the last time less than ten minutes
/// ago.
pub fn is_flapping(server: &ServerStatus) -> bool {
    server.checks.as_ref().is_some_and(|checks| {
        checks.falls_in_day >= FLAPS && checks.since_fall.is_some_and(|ago| ago < FLAPPING)
    })
}

/// Whether a server is up, and its last three checks took half a second or more each.
pub fn is_slow(server: &ServerStatus) -> bool {
    let checks = server.checks.as_ref().filter(|_| server.health == "up");
    checks.is_some_and(|checks| checks.slow_in_a_row >= SLOW)
}

/// Code of a server that is flapping or slow; `None` if it is neither. A server that is both has
/// the code for flapping.
pub fn code(server: &ServerStatus) -> Option<Code> {
    match () {
        () if is_flapping(server) => Some(Code::Flapping),
        () if is_slow(server) => Some(Code::Slow),
        () => None,
    }
}

/// The fix for a server that is up but slow or flapping; `None` for other codes.
pub fn fix(code: Code, service: &Service, server: IpAddr) -> Option<String> {
    let name = shell_word(&service.name);
    match code {
        Code::Slow => Some(format!(
            "compare its p99 with those of the other servers (lvsd status {name}): if only this server is slow, on {server}: uptime, top; if all are, look at the load of this director and the network"
        )),
        Code::Flapping => Some(format!(
            "lvsd events -n 50 shows each fall with its reason; if checks only take too long at times, raise `timeout` or `fall` of the check of {name}"
        )),
        _ => None,
    }
}

/// Seconds since the last answer of the dataplane. `None` if it has answered in the last five
/// seconds or never, is not connected, or is not needed.
pub fn late_seconds(dataplane: &DataplaneStatus) -> Option<u64> {
    let late = dataplane.seen_ms.filter(|age| *age >= OLD_MS);
    let is_asked = dataplane.connected && !dataplane.idle;
    late.filter(|_| is_asked).map(|age| age / 1000)
}

/// Lines about the faults of a director apart from its services, each with its fix. Faults that
/// the dataplane reports are omitted while it is disconnected, because its last report is out of
/// date.
pub fn faults(status: &Status) -> Vec<String> {
    let mut faults = match status.dataplane.connected {
        true => of_dataplane(&status.dataplane),
        false => Vec::new(),
    };
    for source in &status.sources {
        let SourceStatus {
            kind,
            name,
            trouble,
            ..
        } = source;
        if let Some(why) = trouble {
            let test = test_of_source(kind, name);
            faults.push(format!(
                "NO USABLE ANSWER: {kind} {name}: {why}. To test it: {test}"
            ));
        }
    }
    if status.check_lag_ms >= LATE_MS {
        let lag = Duration::from_millis(status.check_lag_ms);
        faults.push(format!(
            "CHECKS LATE: they start up to {lag:.1?} late. To do: {LATE_CHECKS}"
        ));
    }
    faults
}

/// Interfaces that are down, addresses that other hosts have, silent next hops, configured
/// interfaces and addresses that are not in use, peers that are not in step, and a connection table
/// that is nearly full.
fn of_dataplane(dataplane: &DataplaneStatus) -> Vec<String> {
    let lasts = |since: Option<u64>| {
        let lasts = since.map(|since| format!("for {}", lasted(since)));
        in_brackets(&lasts.unwrap_or_default())
    };
    let mut faults = Vec::new();
    for DownInterface { interface, since } in &dataplane.down {
        let fix = for_interface_down(interface);
        faults.push(format!(
            "INTERFACE DOWN: {interface}{}. To do: {fix}",
            lasts(*since)
        ));
    }
    for conflict in &dataplane.conflicts {
        let (address, mac, answers) = (conflict.address, &conflict.mac, &conflict.answers);
        let host = conflict.host;
        let host = host.map_or_else(|| mac.clone(), |host| format!("{host}, {mac}"));
        let seen = in_brackets(&times(None, answers.since, answers.ago));
        let fix = for_conflict(conflict);
        faults.push(format!(
            "CONFLICT: another host ({host}) answers for {address}{seen}. To do: {fix}"
        ));
    }
    for hop in &dataplane.silent_hops {
        let SilentHop {
            address,
            interface,
            since,
        } = hop;
        let (since, fix) = (lasted(*since), for_silent_hop(*address));
        faults.push(format!(
            "NEXT HOP SILENT: {address} on {interface} does not answer ARP or neighbour discovery, for {since}, and packets to it are dropped. To do: {fix}"
        ));
    }
    for Waiting {
        what, fix, since, ..
    } in &dataplane.waiting
    {
        faults.push(format!("NOT IN USE: {what}{}. To do: {fix}", lasts(*since)));
    }
    for peer in dataplane.peers.iter().filter(|peer| peer.is_alarming()) {
        let (ip, time) = (peer.peer.ip(), lasted(peer.seconds));
        let state = match peer.state.as_str() {
            // Its time is that of the dataplane.
            PeerStanding::ABSENT => PeerStanding::ABSENT.to_owned(),
            "bulk" => format!("in a full sync for {time}"),
            state => format!("{state} for {time}"),
        };
        let why = match peer.trouble.as_str() {
            "" => String::new(),
            why => format!(": {why}"),
        };
        let fix = for_peer(peer);
        faults.push(format!(
            "PEER NOT IN STEP: {ip} ({state}){why}; its connections break if this director takes over. To do: {fix}"
        ));
    }
    let (connections, capacity) = (dataplane.connections, dataplane.capacity);
    if is_nearly_full(connections, capacity) {
        faults.push(format!(
            "TABLE NEARLY FULL: {connections} of {capacity} connections. To do: {NEARLY_FULL}"
        ));
    }
    faults
}

/// Whether a service works, and none of its servers is down, suspicious, slow or flapping.
pub fn is_well(service: &ServiceStatus) -> bool {
    ServiceState::of(service) == ServiceState::Ok
        && !in_file(service).any(|server| is_flapping(server) || is_slow(server))
}

/// The reason why a server is down or suspicious, without the server's address at its beginning.
pub fn reason(server: &ServerStatus) -> &str {
    let reason = server.reason.as_str();
    let rest = reason.strip_prefix(&server.server.to_string());
    let rest = rest.and_then(|rest| rest.strip_prefix(": ").or_else(|| rest.strip_prefix(' ')));
    rest.unwrap_or(reason)
}

/// The reason why all servers of a service are down, if it is the same for all of them.
fn common_reason(service: &ServiceStatus) -> Option<&str> {
    let mut reasons = in_file(service).map(reason);
    let first = reasons.next().filter(|reason| !reason.is_empty())?;
    let is_common = count(service, "down") == in_file(service).count();
    (is_common && reasons.all(|reason| reason == first)).then_some(first)
}

/// The reasons why a service is broken; empty if it is not.
pub fn trouble(service: &ServiceStatus) -> Vec<String> {
    let mut trouble = Vec::new();
    for (is, words) in [
        (
            service.conflict,
            "a service of another program uses its address",
        ),
        (
            service.usable == 0 && service.sorry.is_none(),
            "no server receives new connections",
        ),
        (
            !service.quorum && service.usable > 0,
            "the service is below its quorum",
        ),
        (service.withdrawn, "its VIP is released"),
        (
            service.panic,
            "all servers are used, because too few are up",
        ),
    ] {
        if is {
            trouble.push(words.to_owned());
        }
    }
    if let Some(sorry) = service.sorry {
        trouble.push(format!("the sorry server {sorry} serves"));
    }
    trouble
}

/// Severity in the scale of monitoring plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing requires an operator.
    Ok,
    /// Clients are served, but an operator should act.
    Warning,
    /// Clients of a service are not served as configured, or may not be.
    Critical,
}

impl Level {
    /// Returns the name of the level in the output of monitoring plugins.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warning => "WARNING",
            Self::Critical => "CRITICAL",
        }
    }
}

/// The verdict about a director.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Severity of the verdict.
    pub level: Level,
    /// The faults or, without faults, the numbers of services and servers; also the number of slow
    /// servers. All in one line.
    pub words: String,
    /// Performance data for monitoring plugins: names and values.
    pub numbers: Vec<(&'static str, usize)>,
}

impl Verdict {
    /// Computes the verdict about a director from its status.
    pub fn of(status: &Status) -> Self {
        let services = &status.services;
        let in_state = |state| {
            let services = services.iter();
            services.filter(move |service| ServiceState::of(service) == state)
        };
        let sum = |count: &dyn Fn(&ServiceStatus) -> usize| services.iter().map(count).sum();
        let servers: usize = sum(&|service| in_file(service).count());
        let usable: usize = sum(&|service| service.usable);
        let down: usize = sum(&|service| count(service, "down"));
        let suspicious: usize = sum(&|service| count(service, "suspicious"));
        let servers_with = |is: fn(&ServerStatus) -> bool| -> usize {
            sum(&|service| in_file(service).filter(|server| is(server)).count())
        };
        let out = servers_with(|server| server.admin != AdminState::Ready);
        let flapping = servers_with(is_flapping);
        let slow = servers_with(is_slow);
        let not_checked = servers_with(|server| server.check_not_made.is_some());
        let broken = in_state(ServiceState::Broken).count();

        let mut critical = Vec::new();
        if !status.dataplane.connected && !status.dataplane.idle {
            critical.push("no dataplane answers".to_owned());
        }
        if let Some(seconds) = late_seconds(&status.dataplane) {
            critical.push(format!("the dataplane has not answered for {seconds} s"));
        }
        if broken > 0 {
            let named: Vec<_> = in_state(ServiceState::Broken)
                .take(NAMED_MAX)
                .map(|service| {
                    let reason = common_reason(service).map(|reason| format!(": {reason}"));
                    let trouble = trouble(service).join(", ");
                    format!("{} ({trouble}{})", service.name, reason.unwrap_or_default())
                })
                .collect();
            let more = match broken - named.len() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            critical.push(format!(
                "{broken} of {} broken: {}{more}",
                counted(services.len(), "service"),
                named.join(", ")
            ));
        }
        // While the dataplane is disconnected, its last report is out of date.
        let unknown = DataplaneStatus::default();
        let dataplane = match status.dataplane.connected {
            true => &status.dataplane,
            false => &unknown,
        };
        let conflicts = dataplane.conflicts.iter();
        let (vips, others): (Vec<_>, Vec<_>) = conflicts.partition(|conflict| conflict.is_vip());
        let conflicts = vips.len();
        if conflicts > 0 {
            let addresses = counted(conflicts, "virtual address");
            let first = vips.first().map(|one| named_conflict(one));
            let first = in_brackets(&first.unwrap_or_default());
            critical.push(format!("{addresses} also used by another host{first}"));
        }

        let mut warnings = Vec::new();
        let peers = dataplane.peers.iter().filter(|peer| peer.is_alarming());
        let peers: Vec<_> = peers.collect();
        let sources = status.sources.iter().filter(|one| one.trouble.is_some());
        let sources: Vec<_> = sources.collect();
        for (number, thing, is, first) in [
            (down, "server", "down", None),
            (suspicious, "server", "suspicious", None),
            (flapping, "server", "flapping", None),
            (not_checked, "server", "not checked", None),
            (
                dataplane.down.len(),
                "interface",
                "down",
                dataplane.down.first().map(|one| one.interface.clone()),
            ),
            (
                dataplane.silent_hops.len(),
                "next hop",
                "silent",
                dataplane
                    .silent_hops
                    .first()
                    .map(|hop| hop.address.to_string()),
            ),
            (
                others.len(),
                "address",
                "of this host also used by another host",
                others.first().map(|one| named_conflict(one)),
            ),
            (
                dataplane.waiting.len(),
                "configured interface or address",
                "not in use",
                None,
            ),
            (
                peers.len(),
                "peer",
                "not in step",
                peers.first().map(|peer| peer.peer.ip().to_string()),
            ),
            (
                sources.len(),
                "source",
                "without a usable answer",
                sources
                    .first()
                    .map(|source| format!("{} {}", source.kind, source.name)),
            ),
            (status.left_out.len(), "source answer", "not in use", None),
            (
                status.refused.len(),
                "change",
                "refused by the dataplane",
                None,
            ),
            (status.drift.len(), "change", "made by hand", None),
        ] {
            if number > 0 {
                let first = in_brackets(&first.unwrap_or_default());
                warnings.push(format!("{} {is}{first}", counted(number, thing)));
            }
        }
        let vrrp = status.director.vrrp.as_ref();
        let announce = status.director.announce.as_ref();
        for (is, words) in [
            (
                status.director.maintenance.is_some(),
                "the director is in maintenance",
            ),
            (
                vrrp.is_some_and(|vrrp| !vrrp.ready),
                "the director is not ready for VRRP",
            ),
            (
                announce.is_some_and(|announce| !announce.ready),
                "the director is not ready to announce addresses",
            ),
            (
                !status.loaded.ok && status.loaded.time > 0,
                "the file was refused",
            ),
            (
                is_nearly_full(dataplane.connections, dataplane.capacity),
                "the connection table is nearly full",
            ),
            (status.check_lag_ms >= LATE_MS, "checks start late"),
        ] {
            if is {
                warnings.push(words.to_owned());
            }
        }

        let level = match (critical.is_empty(), warnings.is_empty()) {
            (false, _) => Level::Critical,
            (true, false) => Level::Warning,
            (true, true) => Level::Ok,
        };
        let mut words = critical;
        words.append(&mut warnings);
        if words.is_empty() {
            words.push(format!(
                "{}, {usable} of {} usable",
                counted(services.len(), "service"),
                counted(servers, "server")
            ));
        }
        // Slow servers do not change the level: they alone require no operator.
        if slow > 0 {
            words.push(format!("{} slow", counted(slow, "server")));
        }
        Self {
            level,
            words: words.join("; "),
            numbers: vec![
                ("services", services.len()),
                ("broken", broken),
                ("degraded", in_state(ServiceState::Degraded).count()),
                ("servers", servers),
                ("usable", usable),
                ("down", down),
                ("suspicious", suspicious),
                ("flapping", flapping),
                ("slow", slow),
                ("out_of_service", out),
            ],
        }
    }
}

/// The address of a conflict, and the other host.
fn named_conflict(conflict: &Conflict) -> String {
    let Conflict { address, mac, .. } = conflict;
    match conflict.host {
        Some(host) => format!("{address}: {host}, {mac}"),
        None => format!("{address}: {mac}"),
    }
}

#[cfg(test)]
mod tests {
    use lvs_api::daemon::CheckStatus;

    use super::*;

    /// A director with one service for each item: the name of the service, and the health of its
    /// servers.
    fn director(services: &[(&str, &[&str])]) -> Status {
        let services = services.iter().map(|(name, servers)| {
            let snapshot = crate::api::overview::tests::snapshot(name);
            let mut service = snapshot.status.services[0].clone();
            let one = service.servers[0].clone();
            let server = |health: &&str| ServerStatus {
                health: (*health).to_owned(),
                ..one.clone()
            };
            service.servers = servers.iter().map(server).collect();
            service.usable = service.servers.len() - count(&service, "down");
            service
        });
        Status {
            dataplane: DataplaneStatus {
                connected: true,
                ..DataplaneStatus::default()
            },
            services: services.collect(),
            ..Status::default()
        }
    }

    #[test]
    fn verdict_names_missing_dataplane_and_broken_services_before_servers() {
        let mut status = director(&[
            ("web", &["up", "suspicious"]),
            ("mail", &["down", "down"]),
            ("api", &["down", "up"]),
        ]);
        let verdict = Verdict::of(&status);
        assert_eq!(verdict.level, Level::Critical);
        assert_eq!(
            verdict.words,
            "1 of 3 services broken: mail (no server receives new connections); 3 servers down; 1 server suspicious"
        );
        let states: Vec<_> = status.services.iter().map(ServiceState::of).collect();
        assert_eq!(
            states,
            [
                ServiceState::Suspicious,
                ServiceState::Broken,
                ServiceState::Degraded
            ]
        );
        status.dataplane.connected = false;
        assert!(
            Verdict::of(&status)
                .words
                .starts_with("no dataplane answers; ")
        );
    }

    #[test]
    fn verdict_is_ok_with_usable_and_warning_with_suspicious_servers() {
        let mut status = director(&[("web", &["up", "unchecked"])]);
        let verdict = Verdict::of(&status);
        assert_eq!(verdict.level, Level::Ok);
        assert_eq!(verdict.words, "1 service, 2 of 2 servers usable");
        status.services[0].servers[0].health = "suspicious".to_owned();
        let verdict = Verdict::of(&status);
        assert_eq!(verdict.level, Level::Warning);
        assert_eq!(verdict.words, "1 server suspicious");
    }

    #[test]
    fn server_with_three_falls_in_a_day_is_a_warning_for_ten_minutes_after_the_last_fall() {
        let mut status = director(&[("web", &["up", "up"])]);
        let mut verdict = |falls_in_day, since_fall| {
            status.services[0].servers[0].checks = Some(CheckStatus {
                falls_in_day,
                since_fall: Some(since_fall),
                ..CheckStatus::default()
            });
            Verdict::of(&status).level
        };
        assert_eq!(verdict(3, 599), Level::Warning);
        assert_eq!(verdict(2, 599), Level::Ok);
        assert_eq!(verdict(3, 600), Level::Ok);
    }

    #[test]
    fn faults_of_network_are_named_with_fixes_while_dataplane_is_connected() {
        let mut status = director(&[("web", &["up"])]);
        let dataplane = &mut status.dataplane;
        dataplane.down = vec![DownInterface {
            interface: "eth1".to_owned(),
            since: Some(130),
        }];
        dataplane.silent_hops = vec![SilentHop {
            address: [192, 0, 2, 254].into(),
            interface: "eth0".to_owned(),
            since: 9,
        }];
        let conflict = serde_json::json!({
            "code": "vip_conflict", "address": "192.0.2.10", "mac": "02:00:00:00:00:09", "count": 1,
        });
        dataplane.conflicts = vec![serde_json::from_value(conflict).expect("the JSON is valid")];
        let verdict = Verdict::of(&status);
        assert_eq!(
            verdict.words,
            "1 virtual address also used by another host (192.0.2.10: 02:00:00:00:00:09); 1 interface down (eth1); 1 next hop silent (192.0.2.254)"
        );
        let faults = faults(&status);
        for (fault, fix) in faults.iter().zip([
            "INTERFACE DOWN: eth1 (for 2m10s). To do: ip link set eth1 up",
            "CONFLICT: another host (02:00:00:00:00:09) answers for 192.0.2.10. To do: on the other host (02:00:00:00:00:09): remove 192.0.2.10",
            "NEXT HOP SILENT: 192.0.2.254 on eth0 does not answer ARP or neighbour discovery, for 9s, and packets to it are dropped. To do: check that the next hop is up",
        ]) {
            assert!(fault.starts_with(fix), "no {fix} in {fault}");
        }
        assert_eq!(faults.len(), 3);
        status.dataplane.connected = false;
        assert_eq!(super::faults(&status), [""; 0]);
    }

    #[test]
    fn faults_of_peer_table_source_and_checks_have_a_next_step_and_are_in_the_verdict() {
        let mut status = director(&[("web", &["up"])]);
        (status.dataplane.connections, status.dataplane.capacity) = (91, 100);
        let peer = serde_json::json!({
            "peer": "192.0.2.2:8848", "state": "absent", "seconds": 60,
            "trouble": "the dataplane was started without this peer",
        });
        status.dataplane.peers = vec![serde_json::from_value(peer).expect("the JSON is valid")];
        status.check_lag_ms = 1_500;
        status.sources = vec![SourceStatus {
            kind: "dns".to_owned(),
            name: "_http._tcp.web.example".to_owned(),
            trouble: Some("SERVFAIL".to_owned()),
            ..SourceStatus::default()
        }];
        let beginnings = [
            "PEER NOT IN STEP: 192.0.2.2 (absent): the dataplane was started without this peer; its connections break if this director takes over. To do: restart the dataplane: ",
            "TABLE NEARLY FULL: 91 of 100 connections. To do: raise `max_connections`",
            "NO USABLE ANSWER: dns _http._tcp.web.example: SERVFAIL. To test it: dig SRV _http._tcp.web.example @SERVER",
            "CHECKS LATE: they start up to 1.5s late. To do: provide more CPU",
        ];
        let found = faults(&status);
        assert_eq!(found.len(), 4, "{found:#?}");
        for (fault, beginning) in found.iter().zip(beginnings) {
            assert!(fault.starts_with(beginning), "no {beginning} in {fault}");
        }
        assert_eq!(
            Verdict::of(&status).words,
            "1 peer not in step (192.0.2.2); 1 source without a usable answer (dns _http._tcp.web.example); the connection table is nearly full; checks start late"
        );
        // The last report of the dataplane is out of date.
        status.dataplane.connected = false;
        assert_eq!(faults(&status).len(), 2);
        assert_eq!(
            Verdict::of(&status).words,
            "no dataplane answers; 1 source without a usable answer (dns _http._tcp.web.example); checks start late"
        );
    }

    #[test]
    fn verdict_is_critical_if_dataplane_has_not_answered_unless_dataplane_is_idle() {
        let mut status = director(&[("web", &["up"])]);
        status.dataplane.seen_ms = Some(OLD_MS - 1);
        assert_eq!(Verdict::of(&status).level, Level::Ok);
        status.dataplane.seen_ms = Some(7_300);
        let verdict = Verdict::of(&status);
        assert_eq!(verdict.level, Level::Critical);
        assert_eq!(verdict.words, "the dataplane has not answered for 7 s");
        status.dataplane.idle = true;
        assert_eq!(Verdict::of(&status).level, Level::Ok);
    }

    #[test]
    fn verdict_mentions_slow_server_without_a_warning() {
        let mut status = director(&[("web", &["up", "up"])]);
        assert!(is_well(&status.services[0]));
        status.services[0].servers[0].checks = Some(CheckStatus {
            slow_in_a_row: SLOW,
            ..CheckStatus::default()
        });
        assert!(!is_well(&status.services[0]));
        let verdict = Verdict::of(&status);
        assert_eq!(verdict.level, Level::Ok);
        assert_eq!(
            verdict.words,
            "1 service, 2 of 2 servers usable; 1 server slow"
        );
        // Failed checks last until their timeout.
        status.services[0].servers[0].health = "suspicious".to_owned();
        assert_eq!(Verdict::of(&status).words, "1 server suspicious");
    }

    #[test]
    fn verdict_names_reason_of_broken_service_only_if_common_to_all_servers() {
        let mut status = director(&[("mail", &["down", "down"])]);
        let servers = &mut status.services[0].servers;
        servers[1].server = ([10, 0, 0, 9], 25).into();
        for server in servers.iter_mut() {
            server.reason = format!("{}: connection refused", server.server);
        }
        let words = Verdict::of(&status).words;
        assert!(
            words.contains("mail (no server receives new connections: connection refused)"),
            "no `mail (no server receives new connections: connection refused)` in {words}"
        );
        status.services[0].servers[0].reason = "timeout".to_owned();
        let words = Verdict::of(&status).words;
        assert!(
            words.contains("mail (no server receives new connections)"),
            "no `mail (no server receives new connections)` in {words}"
        );
    }

    #[test]
    fn verdict_of_500_broken_services_is_short() {
        let services = [("web", &["down"][..]); 500];
        let verdict = Verdict::of(&director(&services));
        assert!(verdict.words.len() < 400, "{}", verdict.words);
        assert!(
            verdict.words.contains("and 497 more"),
            "no `and 497 more` in {}",
            verdict.words
        );
    }
}

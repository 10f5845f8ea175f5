//! Findings about the dataplane, from the state and the counters that it reports.

use lvs_api::guidance;
use lvs_api::words::{in_brackets, lasted, times};
use lvs_core::api::{FastPathInfo, Info, NoXdp, ReasonCount, ServiceInfo, TablesState};

use super::code::Code;
use super::{Findings, Kind, Scope, Since, When};
use crate::operator::service_text;

/// Maximum number of services that a finding about dropped packets names.
const NAMED_MAX: usize = 3;

pub(super) fn look(
    info: &Info,
    services: &[ServiceInfo],
    reasons: &[ReasonCount],
    since: Since,
    findings: &mut Findings,
) {
    state(info, findings);
    counters(services, reasons, since, findings);
}

fn state(info: &Info, findings: &mut Findings) {
    for waiting in info.waiting.iter().chain(&info.local_clients) {
        let when = waiting.since.map(When::since).unwrap_or_default();
        let seen = waiting
            .since
            .map(|since| format!("for {}", lasted(since)))
            .unwrap_or_default();
        findings.add(
            Kind::reported(&waiting.code, Scope::default(), when),
            format!("{}{}", waiting.what, in_brackets(&seen)),
            waiting.fix.clone(),
        );
    }
    if info.interfaces.is_empty() && info.waiting.is_empty() {
        findings.add(
            Code::NoInterface,
            "the dataplane uses no interface: no packet reaches it",
            "bring an Ethernet interface up, or name one with lvs-dataplane --interface",
        );
    }
    for interface in info.interfaces.iter().filter(|interface| !interface.up) {
        let when = interface.down_since.map(When::since).unwrap_or_default();
        let seen = interface
            .down_since
            .map(|since| format!("for {}", lasted(since)));
        let seen = in_brackets(&seen.unwrap_or_default());
        findings.add(
            (Code::InterfaceDown, Scope::interface(&interface.name), when),
            format!("the interface {} is down{seen}", interface.name),
            guidance::for_interface_down(&interface.name),
        );
    }
    if guidance::is_nearly_full(info.connections, info.capacity) {
        findings.add(
            Code::TableNearlyFull,
            format!(
                "the connection table is nearly full: {} of {} entries are in use",
                info.connections, info.capacity
            ),
            "start lvs-dataplane with a larger --max-connections; when the table is full, new connections are dropped",
        );
    }
    let fast_path = &info.fast_path;
    if fast_path.wanted && !fast_path.active {
        findings.add(
            Code::FastPathOff,
            format!(
                "established connections are not forwarded by the kernel fast path: {}",
                fast_path.reason
            ),
            fast_path.fix.clone(),
        );
    }
    for peer in info.peers.iter().filter(|peer| peer.is_alarming()) {
        let scope = Scope::host(peer.peer.ip());
        findings.add(
            (Code::PeerBehind, scope, When::since(peer.seconds)),
            format!(
                "the connections of the director {} are not replicated to this director, for {} s ({}{}{}): they break when this director takes over",
                peer.peer.ip(),
                peer.seconds,
                peer.state,
                if peer.trouble.is_empty() { "" } else { ": " },
                peer.trouble
            ),
            guidance::for_peer(peer),
        );
    }
    for tables in &info.tables {
        if tables.state == TablesState::Alarm {
            let peer = Scope::host(tables.peer.ip());
            findings.add(
                (Code::PeerDiffers, peer, When::since(tables.seconds)),
                format!(
                    "the director {} has other services or servers than this director ({} differ, for {} s): the two choose different servers for a client",
                    tables.peer.ip(),
                    tables.differ,
                    tables.seconds
                ),
                "lvsadm sync names the services, lvsadm diff shows the differences; use the same configuration file on both and reload lvsd, or revert the manual changes",
            );
        }
    }
    for hop in &info.silent_hops {
        let scope = Scope {
            interface: Some(hop.interface.clone()),
            ..Scope::host(hop.address)
        };
        findings.add(
            (Code::NextHop, scope, When::since(hop.since)),
            format!(
                "the next hop {} on {} does not answer ARP or neighbour discovery, for {}: packets to it are dropped",
                hop.address,
                hop.interface,
                lasted(hop.since)
            ),
            guidance::for_silent_hop(hop.address),
        );
    }
    for conflict in &info.conflicts {
        let host = conflict
            .host
            .map(|host| format!("; the other host is {host}"));
        let answers = &conflict.answers;
        let answers = in_brackets(&times(None, answers.since, answers.ago));
        let own = match conflict.own_mac.as_str() {
            "" => String::new(),
            mac => format!(
                " on {}, where the MAC address of this host is {mac}",
                conflict.interface
            ),
        };
        let what = match conflict.is_vip() {
            true => "a virtual address",
            false => "an address of this host",
        };
        findings.add(
            Kind::reported(
                &conflict.code,
                Scope {
                    interface: Some(conflict.interface.clone()).filter(|name| !name.is_empty()),
                    ..Scope::host(conflict.address)
                },
                When::of_packets(&conflict.answers),
            ),
            format!(
                "{} answers ARP or neighbour discovery for {}, {what}{own}{}{answers}",
                conflict.mac,
                conflict.address,
                host.unwrap_or_default()
            ),
            guidance::for_conflict(conflict),
        );
    }
}

/// How established connections are forwarded; `None` if a finding reports this, or if the dataplane
/// reports no reason for an inactive fast path.
pub(super) fn fast_path(info: &FastPathInfo) -> Option<String> {
    if info.active {
        let by = &info.attached_by;
        return Some(format!(
            "established connections are forwarded by the kernel fast path ({by})"
        ));
    }
    (!info.wanted && !info.reason.is_empty())
        .then(|| format!("the dataplane itself forwards all packets: {}", info.reason))
}

/// One line for each interface that uses XDP, and for each for which `--xdp auto` has chosen tc,
/// with the reason and the fix. Sorted by interface name; empty unless XDP is configured.
pub(super) fn xdp(info: &Info) -> Vec<String> {
    let lines = info.interfaces.iter().filter_map(|interface| {
        let name = &interface.name;
        match &interface.no_xdp {
            Some(NoXdp { reason, fix, .. }) => Some(format!(
                "{name}: tc instead of XDP, because {reason}; {fix}"
            )),
            None => (interface.fast_path.as_deref() == Some("xdp")).then(|| format!("{name}: XDP")),
        }
    });
    let mut lines: Vec<String> = lines.collect();
    lines.sort_unstable();
    lines
}

fn counters(
    services: &[ServiceInfo],
    reasons: &[ReasonCount],
    since: Since,
    findings: &mut Findings,
) {
    for reason in reasons {
        // Other findings report packets that exceed the MTU by server, and lost frames by
        // interface.
        let reported = ["too_big", "not_received"].contains(&reason.reason.as_str());
        let packets = &reason.packets;
        let count = since.count(packets);
        if reason.action == "drop" && count > 0 && !reported {
            let number = match count {
                1 => "1 packet was".to_owned(),
                n => format!("{n} packets were"),
            };
            let window = match since {
                Since::Minutes => "in five minutes, ",
                Since::Start => "",
            };
            let seen = match times(Some(packets.last_minute), packets.since, packets.ago) {
                seen if seen.is_empty() => seen,
                seen => format!("{window}{seen}"),
            };
            let of = of_services(services, &reason.reason, since);
            // Packets of removed services belong to no service.
            let scope = match &of[..] {
                [(service, packets)] if *packets >= count => Scope::service(service),
                _ => Scope::default(),
            };
            findings.add(
                Kind::reported(&reason.reason, scope, When::of_packets(packets)),
                format!(
                    "{number} dropped{}: {}: {}{}",
                    in_brackets(&named(&of)),
                    reason.reason,
                    reason.help,
                    in_brackets(&seen)
                ),
                reason.fix.clone(),
            );
        }
    }
}

/// The services whose packets were refused or dropped for a reason, with the numbers of packets,
/// most packets first.
pub(in crate::operator) fn of_services<'a>(
    services: &'a [ServiceInfo],
    reason: &str,
    since: Since,
) -> Vec<(&'a ServiceInfo, u64)> {
    let counts = services.iter().filter_map(|service| {
        let counts = service.refusals.iter().chain(&service.drops);
        let counts = counts.filter(|one| one.reason == reason);
        let count = counts.map(|one| since.count(&one.packets)).sum();
        (count > 0).then_some((service, count))
    });
    let mut counts: Vec<_> = counts.collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts
}

/// Names the first services, with their numbers of packets, and counts the others.
pub(in crate::operator) fn named(services: &[(&ServiceInfo, u64)]) -> String {
    let mut first: Vec<String> = services
        .iter()
        .take(NAMED_MAX)
        .map(|(service, count)| format!("{count} of {}", service_text(service.service)))
        .collect();
    match services.len().saturating_sub(NAMED_MAX) {
        0 => {}
        1 => first.push("more of another service".to_owned()),
        more => first.push(format!("more of {more} other services")),
    }
    first.join(", ")
}

#[cfg(test)]
mod tests {
    use lvs_core::api::ServiceId;
    use lvs_core::recent::RecentCount;

    use super::super::tests::services;
    use super::*;

    /// Seven packets that were dropped because no server was available.
    fn no_server(recent: u64) -> ReasonCount {
        ReasonCount {
            action: "drop".to_owned(),
            reason: "no_server".to_owned(),
            packets: RecentCount {
                count: 7,
                recent,
                last_minute: 2,
                since: Some(90),
                ago: Some(4),
            },
            help: "no server".to_owned(),
            fix: "add one".to_owned(),
        }
    }

    #[test]
    fn doctor_dropped_packets_name_their_services() {
        let mut all = Vec::new();
        for (port, recent) in [(80, 1), (81, 3), (82, 0), (83, 2), (84, 1)] {
            let [mut service] =
                <[_; 1]>::try_from(services("nat", 0)).expect("there is exactly one item");
            service.service = ServiceId::Tcp {
                address: ([192, 0, 2, 1], port).into(),
            };
            let refusals = format!(
                r#"[{{"reason": "no_server", "count": 9, "recent": {recent}, "last_minute": 0}}]"#
            );
            service.refusals = serde_json::from_str(&refusals).expect("the JSON is valid");
            all.push(service);
        }
        let found = |services: &[ServiceInfo]| {
            let mut findings = Findings::default();
            counters(services, &[no_server(7)], Since::Minutes, &mut findings);
            findings.0.pop().expect("there is exactly one item")
        };
        let finding = found(&all);
        assert!(
            finding.what.starts_with(
                "7 packets were dropped (3 of TCP 192.0.2.1:81, 2 of TCP 192.0.2.1:83, 1 of TCP 192.0.2.1:80, more of another service): no_server"
            ),
            "{finding:?}"
        );
        assert_eq!(finding.kind.scope.service, None);
        let finding = found(&all[1..3]);
        assert!(
            finding
                .what
                .starts_with("7 packets were dropped (3 of TCP 192.0.2.1:81): "),
            "{finding:?}"
        );
        assert_eq!(
            finding.kind.scope.service, None,
            "the finding names a service, although four packets belong to none"
        );
        // Four of connections, and three that opened none.
        all[1].drops = all[1].refusals.clone();
        all[1].drops[0].packets.recent = 4;
        let finding = found(&all[1..2]);
        assert_eq!(finding.kind.scope.service, Some(all[1].service));
        let json = serde_json::to_value(&finding).expect("the value can be written as JSON");
        for (name, value) in [("since", 90), ("ago", 4), ("recent", 7), ("last_minute", 2)] {
            assert_eq!(json[name], value, "{name}");
        }
    }

    #[test]
    fn doctor_reports_address_conflicts_with_hosts_and_times() {
        let info: Info = serde_json::from_str(
            r#"{"interfaces": [{"name": "eth0", "backend": "af_packet", "mtu": 1500, "up": true}],
                "conflicts": [
                    {"address": "192.0.2.1", "mac": "02:00:00:00:00:09", "host": "192.0.2.7",
                     "count": 30, "recent": 20, "last_minute": 4, "since": 400, "ago": 3},
                    {"code": "address_conflict", "address": "10.0.0.5", "mac": "02:00:00:00:00:09",
                     "interface": "eth1", "own_mac": "02:00:00:00:00:01"}]}"#,
        )
        .expect("the JSON is valid");
        let mut findings = Findings::default();
        state(&info, &mut findings);
        let own = findings.0.pop().expect("there is another finding");
        assert_eq!(
            own.what,
            "02:00:00:00:00:09 answers ARP or neighbour discovery for 10.0.0.5, an address of this host on eth1, where the MAC address of this host is 02:00:00:00:00:01"
        );
        assert_eq!(own.kind.code, "address_conflict");
        let finding = findings.0.pop().expect("there is exactly one item");
        assert!(
            finding
                .what
                .ends_with("; the other host is 192.0.2.7 (first 6m40s ago, last 3s ago)"),
            "{finding:?}"
        );
        let json = serde_json::to_value(&finding).expect("the value can be written as JSON");
        assert_eq!(json["code"], "vip_conflict");
        for (name, value) in [
            ("since", 400),
            ("ago", 3),
            ("recent", 20),
            ("last_minute", 4),
        ] {
            assert_eq!(json[name], value, "{name}");
        }
    }

    #[test]
    fn doctor_reports_packets_dropped_in_last_five_minutes_or_since_start() {
        let found = |recent, since| {
            let mut findings = Findings::default();
            counters(&[], &[no_server(recent)], since, &mut findings);
            findings.0.pop().map(|finding| finding.what)
        };
        let text = |packets: u64, time: &str| {
            Some(format!(
                "{packets} packets were dropped: no_server: no server ({time}2 in the last minute, first 1m30s ago, last 4s ago)"
            ))
        };
        assert_eq!(found(0, Since::Minutes), None);
        assert_eq!(found(3, Since::Minutes), text(3, "in five minutes, "));
        assert_eq!(found(0, Since::Start), text(7, ""));
    }

    #[test]
    fn doctor_shows_why_interface_has_no_xdp() {
        let info: Info = serde_json::from_str(
            r#"{"interfaces": [
                {"name": "eth1", "backend": "af_packet", "mtu": 1500, "up": true, "fast_path": "tc",
                 "no_xdp": {"code": "xdp_bond", "reason": "it is a bond", "fix": "check its ports"}},
                {"name": "eth0", "backend": "af_packet", "mtu": 1500, "up": true, "fast_path": "xdp"},
                {"name": "eth2", "backend": "af_packet", "mtu": 1500, "up": true, "fast_path": "tc"}]}"#,
        )
        .expect("the JSON is valid");
        assert_eq!(
            xdp(&info),
            [
                "eth0: XDP",
                "eth1: tc instead of XDP, because it is a bond; check its ports"
            ]
        );
        let mut findings = Findings::default();
        state(&info, &mut findings);
        assert!(findings.0.is_empty(), "{findings:?}");
    }

    #[test]
    fn doctor_configured_but_inactive_fast_path_is_a_finding() {
        let found = |active: bool| {
            let mut info = Info::default();
            info.interfaces.clear();
            info.fast_path.wanted = true;
            info.fast_path.active = active;
            info.fast_path.reason = "another is first".to_owned();
            info.fast_path.fix = "remove the program".to_owned();
            let mut findings = Findings::default();
            state(&info, &mut findings);
            let mut found = findings.0.into_iter();
            found.find(|finding| finding.what.contains("kernel fast path"))
        };
        assert!(found(true).is_none());
        let finding = found(false).expect("there is a finding");
        assert!(finding.what.ends_with(": another is first"), "{finding:?}");
        assert_eq!(finding.fix, "remove the program");
    }

    #[test]
    fn doctor_peer_out_of_sync_for_10_s_is_a_finding() {
        let found = |state: &str, seconds: u64| {
            let text = format!(
                r#"{{"peers": [{{"peer": "192.0.2.2:8848", "state": "{state}", "seconds": {seconds}, "trouble": "no route"}}]}}"#
            );
            let info: Info = serde_json::from_str(&text).expect("the JSON is valid");
            let mut findings = Findings::default();
            super::state(&info, &mut findings);
            let mut found = findings.0.into_iter();
            found.find(|finding| finding.what.contains("192.0.2.2"))
        };
        // The director is returning after a restart.
        assert!(found("in step", 0).is_none() && found("away", 9).is_none());
        for state in ["away", "refused", "silent", "behind"] {
            let finding = found(state, 10).expect("there is a finding");
            let words = format!("not replicated to this director, for 10 s ({state}: no route)");
            assert!(finding.what.contains(&words), "no {words:?} in {finding:?}");
        }
    }

    #[test]
    fn doctor_lasting_difference_of_services_with_peer_is_a_finding() {
        let found = |state: &str| {
            let text = format!(
                r#"{{"tables": [{{"peer": "192.0.2.2:8848", "state": "{state}", "differ": 2, "seconds": 40}}]}}"#
            );
            let info: Info = serde_json::from_str(&text).expect("the JSON is valid");
            let mut findings = Findings::default();
            super::state(&info, &mut findings);
            let mut found = findings.0.into_iter();
            found.find(|finding| finding.what.contains("192.0.2.2"))
        };
        // Services differ for a short time after each change.
        assert!(found("differ").is_none() && found("alike").is_none());
        let finding = found("alarm").expect("there is a finding");
        assert!(finding.what.contains("2 differ, for 40 s"), "{finding:?}");
        assert!(finding.fix.starts_with("lvsadm sync"), "{finding:?}");
    }

    #[test]
    fn doctor_missing_interface_and_unredirected_local_clients_are_findings() {
        let info: Info = serde_json::from_str(
            r#"{"waiting": [{"code": "interface_missing", "what": "waiting for eth7", "fix": "make it", "since": 130}],
                "local_clients": {"code": "local_clients_off", "what": "clients on this host", "fix": "Linux 6.6"}}"#,
        )
        .expect("the JSON is valid");
        let mut findings = Findings::default();
        state(&info, &mut findings);
        assert_eq!(findings.0.len(), 2, "{findings:?}");
        assert_eq!(findings.0[0].what, "waiting for eth7 (for 2m10s)");
        assert_eq!(findings.0[0].fix, "make it");
        let json = serde_json::to_value(&findings.0).expect("the value can be written as JSON");
        assert_eq!(json[0]["since"], 130);
        assert_eq!(json[1]["code"], "local_clients_off");
        assert_eq!(json[1]["since"], serde_json::Value::Null);
    }

    #[test]
    fn doctor_interface_down_is_a_finding() {
        let info: Info = serde_json::from_str(
            r#"{"interfaces": [{"name": "eth0", "backend": "af_packet", "mtu": 1500, "up": false, "down_since": 130}]}"#,
        )
        .expect("the JSON is valid");
        let mut findings = Findings::default();
        state(&info, &mut findings);
        assert_eq!(findings.0.len(), 1, "{findings:?}");
        assert_eq!(findings.0[0].what, "the interface eth0 is down (for 2m10s)");
        let json = serde_json::to_value(&findings.0[0]).expect("the value can be written as JSON");
        assert_eq!(json["since"], 130);
        assert!(findings.0[0].fix.starts_with("ip link set eth0 up"));
    }
}

//! `lvsadm doctor`: faults of the dataplane, of this host and of the real servers, with their
//! fixes.

mod code;
pub(super) mod dataplane;
mod devices;
mod director;
mod filters;
mod host;
mod services;

use std::net::{IpAddr, SocketAddr};

use lvs_api::guidance::{for_lvsd, manages_any, with_keys};
use lvs_core::api::{Call, Info, ReasonCount, ServiceId, ServiceInfo};
use lvs_core::recent::RecentCount;
use serde::Serialize;

use self::code::Code;
use super::simple::wrap;
use super::{Outcome, Trouble, Words, connect};
use crate::invocation::Invocation;
use crate::session::json_list;

#[derive(Debug, Serialize)]
struct Finding {
    #[serde(flatten)]
    kind: Kind,
    what: String,
    fix: String,
}

#[derive(Debug, Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, kind: impl Into<Kind>, what: impl Into<String>, fix: impl Into<String>) {
        self.0.push(Finding {
            kind: kind.into(),
            what: what.into(),
            fix: fix.into(),
        });
    }
}

/// Code, subject and times of a finding, for programs.
#[derive(Debug, Serialize)]
struct Kind {
    code: String,
    #[serde(flatten)]
    scope: Scope,
    #[serde(flatten)]
    when: When,
}

impl Kind {
    /// Returns the kind of a finding for a code from the dataplane.
    fn reported(code: &str, scope: Scope, when: When) -> Self {
        let code = code.to_owned();
        Self { code, scope, when }
    }
}

impl From<Code> for Kind {
    fn from(code: Code) -> Self {
        (code, Scope::default()).into()
    }
}

impl From<(Code, Scope)> for Kind {
    fn from((code, scope): (Code, Scope)) -> Self {
        (code, scope, When::default()).into()
    }
}

impl From<(Code, Scope, When)> for Kind {
    fn from((code, scope, when): (Code, Scope, When)) -> Self {
        Self::reported(code.name(), scope, when)
    }
}

/// The subject of a finding; empty for this host or all of its services.
#[derive(Debug, Default, Serialize)]
struct Scope {
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<ServiceId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<SocketAddr>,
    /// A server, a peer, a next hop, or an address for which another host also answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    interface: Option<String>,
}

impl Scope {
    fn service(service: &ServiceInfo) -> Self {
        Self {
            service: Some(service.service),
            ..Self::default()
        }
    }

    fn server(service: &ServiceInfo, server: SocketAddr) -> Self {
        Self {
            server: Some(server),
            ..Self::service(service)
        }
    }

    fn host(host: IpAddr) -> Self {
        Self {
            host: Some(host),
            ..Self::default()
        }
    }

    fn interface(name: &str) -> Self {
        Self {
            interface: Some(name.to_owned()),
            ..Self::default()
        }
    }
}

/// The times of a finding.
#[derive(Debug, Default, Serialize)]
struct When {
    /// Seconds since the fault began.
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<u64>,
    /// Seconds since the last packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    ago: Option<u64>,
    /// Number of packets in the last five minutes.
    #[serde(skip_serializing_if = "Option::is_none")]
    recent: Option<u64>,
    /// Number of packets in the last minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_minute: Option<u64>,
}

impl When {
    fn since(seconds: u64) -> Self {
        Self {
            since: Some(seconds),
            ..Self::default()
        }
    }

    /// Returns the times of the drops with the reason `name`; empty if `reasons` does not contain
    /// it.
    fn of_name(reasons: &[ReasonCount], name: &str) -> Self {
        let mut reasons = reasons.iter();
        let reason = reasons.find(|one| one.action == "drop" && one.reason == name);
        reason
            .map(|reason| Self::of_packets(&reason.packets))
            .unwrap_or_default()
    }

    const fn of_packets(packets: &RecentCount) -> Self {
        Self {
            since: packets.since,
            ago: packets.ago,
            recent: Some(packets.recent),
            last_minute: Some(packets.last_minute),
        }
    }
}

/// The period whose dropped packets cause findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Since {
    /// The last five minutes.
    Minutes,
    /// The time since the start of the dataplane.
    Start,
}

impl Since {
    /// Returns the number of packets in this period.
    const fn count(self, packets: &RecentCount) -> u64 {
        match self {
            Self::Minutes => packets.recent,
            Self::Start => packets.count,
        }
    }

    fn of(word: Option<&str>) -> Result<Self, Trouble> {
        match word {
            None => Ok(Self::Minutes),
            Some("start") => Ok(Self::Start),
            Some(word) => Err(Trouble::Usage(format!(
                "--since: {word:?} is not `start`, the start of the dataplane"
            ))),
        }
    }
}

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    words.no_arguments()?;
    let since = Since::of(words.value("--since"))?;
    let mut client = connect(run)?;
    let mut info: Info = client.call(&Call::Info {})?;
    let services: Vec<ServiceInfo> = client.collect(&Call::ServiceList { service: None })?;
    let mut reasons: Vec<ReasonCount> = client.collect(&Call::Drops {})?;
    forget_old(&mut info, &reasons, since);
    let managed = manages_any(&services);
    if managed {
        for_lvsd(&mut reasons);
    }
    let mut findings = Findings::default();
    dataplane::look(&info, &services, &reasons, since, &mut findings);
    let director = director::Director::ask(run);
    director.look(&mut findings);
    services::look(&services, &info, &reasons, &director, &mut findings);
    host::look(&services, &info, &reasons, since, &mut findings);
    if !is_routed(&info) {
        filters::look(&services, &info, &mut findings);
    }
    let Findings(mut findings) = findings;
    if managed {
        for finding in &mut findings {
            finding.fix = with_keys(&finding.fix);
        }
    }
    if !run.json {
        writeln!(run.output, "the dataplane is {}", info.confinement)?;
        if let Some(words) = dataplane::fast_path(&info.fast_path) {
            writeln!(run.output, "{words}")?;
        }
        for words in dataplane::xdp(&info) {
            writeln!(run.output, "{words}")?;
        }
        if let Some(words) = director.stands_by() {
            writeln!(run.output, "{words}")?;
        }
    }
    print(run, &findings)?;
    Ok(u8::from(!findings.is_empty()))
}

/// Removes the packets that exceeded the MTU from `info` if `reasons` shows that none of them is in
/// the period `since`; the same for lost frames.
fn forget_old(info: &mut Info, reasons: &[ReasonCount], since: Since) {
    let is_old = |name: &str| {
        let mut reasons = reasons.iter();
        let reason = reasons.find(|one| one.action == "drop" && one.reason == name);
        reason.is_some_and(|reason| since.count(&reason.packets) == 0)
    };
    if is_old("too_big") {
        info.too_big.clear();
    }
    if is_old("not_received") {
        for interface in &mut info.interfaces {
            interface.lost = 0;
        }
    }
}

fn print(run: &mut Invocation<'_>, findings: &[Finding]) -> std::io::Result<()> {
    if run.json {
        return json_list(run, findings);
    }
    for finding in findings {
        for (n, line) in wrap(&finding.what, 90).iter().enumerate() {
            writeln!(run.output, "{} {line}", if n == 0 { "*" } else { " " })?;
        }
        for (n, line) in wrap(&finding.fix, 84).iter().enumerate() {
            let arrow = if n == 0 { "->" } else { "  " };
            writeln!(run.output, "    {arrow} {line}")?;
        }
    }
    match findings.len() {
        0 => writeln!(run.output, "doctor has found no problems"),
        1 => writeln!(run.output, "1 finding"),
        n => writeln!(run.output, "{n} findings"),
    }
}

/// Whether the host routes packets to the dataplane, so that its firewall filters them.
fn is_routed(info: &Info) -> bool {
    info.interfaces.iter().any(|port| port.backend == "tun")
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn services(forwarding: &str, weight: i32) -> Vec<ServiceInfo> {
        let text = format!(
            r#"[{{"service": {{"protocol": "tcp", "address": "192.0.2.1:80"}},
                "config": {{"scheduler": "rr", "flags": 0, "timeout": 0, "netmask": 4294967295}},
                "stats": {{}},
                "servers": [{{"server": "10.0.0.1:80", "config": {{"weight": {weight}, "forwarding": "{forwarding}"}},
                    "active": 3, "inactive": 1, "persistent": 0, "overloaded": false, "stats": {{}}}}]}}]"#
        );
        serde_json::from_str(&text).expect("the JSON is valid")
    }

    #[test]
    fn doctor_finding_in_json_has_code_scope_and_times() {
        let mut findings = Findings::default();
        findings.add(Code::Lro, "a", "b");
        let scope = Scope::server(&services("nat", 1)[0], ([10, 0, 0, 1], 80).into());
        findings.add((Code::ClientsUnanswered, scope, When::since(7)), "c", "d");
        let json = serde_json::to_value(&findings.0).expect("the value can be written as JSON");
        assert_eq!(
            json,
            serde_json::json!([
                {"code": "lro", "what": "a", "fix": "b"},
                {"code": "clients_unanswered", "service": {"protocol": "tcp", "address": "192.0.2.1:80"},
                 "server": "10.0.0.1:80", "since": 7, "what": "c", "fix": "d"},
            ])
        );
    }

    #[test]
    fn doctor_since_option_accepts_only_start() {
        assert_eq!(Since::of(None).ok(), Some(Since::Minutes));
        assert_eq!(Since::of(Some("start")).ok(), Some(Since::Start));
        assert!(Since::of(Some("1h")).is_err());
    }

    #[test]
    fn doctor_losses_older_than_five_minutes_are_reported_only_with_since_start() {
        let left = |recent, since| {
            let text = r#"{"interfaces": [{"name": "eth0", "backend": "af_packet", "mtu": 1500, "up": true, "lost": 7}],
                "too_big": [{"server": "10.0.0.1", "tunnel": true, "room": 1480, "longest": 1500, "packets": 3}]}"#;
            let mut info: Info = serde_json::from_str(text).expect("the JSON is valid");
            let reasons = ["too_big", "not_received"].map(|name| ReasonCount {
                action: "drop".to_owned(),
                reason: name.to_owned(),
                packets: RecentCount {
                    count: 7,
                    recent,
                    ..RecentCount::default()
                },
                help: String::new(),
                fix: String::new(),
            });
            forget_old(&mut info, &reasons, since);
            (info.too_big.len(), info.interfaces[0].lost)
        };
        assert_eq!(left(0, Since::Minutes), (0, 0));
        assert_eq!(left(1, Since::Minutes), (1, 7));
        assert_eq!(left(0, Since::Start), (1, 7));
    }

    #[test]
    fn doctor_host_with_tun_backend_counts_as_routed() {
        let info = |backend: &str| -> Info {
            let text = format!(
                r#"{{"interfaces": [{{"name": "x", "backend": "{backend}", "mtu": 1500, "up": true}}]}}"#
            );
            serde_json::from_str(&text).expect("the JSON is valid")
        };
        assert!(is_routed(&info("tun")) && !is_routed(&info("af_packet")));
    }
}

//! Groups servers with the same fault: a failed host with servers of hundreds of services is one
//! line of the overview.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use lvs_api::daemon::{ServerStatus, ServiceStatus};
use serde::Serialize;

use crate::verdict;

/// Maximum number of causes in the list.
const CAUSES_MAX: usize = 50;
/// Maximum number of services or servers that a cause names.
const NAMED_MAX: usize = 3;

/// Servers with the same fault: either servers on one host that belong to several services, or
/// servers of one service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(serde::Deserialize))]
#[cfg_attr(test, serde(deny_unknown_fields))]
pub struct Cause {
    /// `down`, `suspicious`, `flapping` or `slow`.
    pub health: String,
    /// The kind of the fault, for programs.
    pub code: String,
    /// The reason, without a server's address at the start.
    pub reason: String,
    /// The fix; empty if none is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[cfg_attr(test, serde(default))]
    pub fix: String,
    /// The common host, if the host's servers have the fault in several services.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, serde(default))]
    pub host: Option<IpAddr>,
    /// The number of servers with this fault. A server of several services counts in each of them.
    pub servers: usize,
    /// The number of services with this fault.
    pub services: usize,
    /// If `host` is set, the names of the first services with the fault; otherwise the addresses of
    /// the first servers.
    pub named: Vec<String>,
    /// The name of the service; `None` if the fault affects a host.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, serde(default))]
    pub service: Option<String>,
    /// Seconds since the first of the servers had the fault; `None` for flapping and slow servers.
    pub since: Option<u64>,
}

/// A server with a fault.
struct Fault<'a> {
    service: &'a str,
    server: SocketAddr,
    health: &'static str,
    code: &'a str,
    reason: String,
    fix: &'a str,
    since: Option<u64>,
}

/// The first causes in the order of [`order`], and the total number of causes.
pub(super) fn causes(services: &[ServiceStatus]) -> (Vec<Cause>, usize) {
    let faults: Vec<Fault<'_>> = services
        .iter()
        .flat_map(|service| verdict::in_file(service).map(move |server| (service, server)))
        .filter_map(|(service, server)| fault(service, server))
        .collect();
    let mut of_hosts: HashMap<_, HashSet<&str>> = HashMap::new();
    for fault in &faults {
        let of = of_hosts.entry(host_key(fault)).or_default();
        of.insert(fault.service);
    }
    let mut groups: HashMap<_, Vec<&Fault<'_>>> = HashMap::new();
    for fault in &faults {
        let is_host = of_hosts
            .get(&host_key(fault))
            .is_some_and(|services| services.len() > 1);
        let place = match is_host {
            true => (Some(fault.server.ip()), None),
            false => (None, Some(fault.service)),
        };
        let key = (fault.health, fault.code, fault.detail(), place);
        groups.entry(key).or_default().push(fault);
    }
    let mut all: Vec<Cause> = groups
        .into_iter()
        .map(|((health, code, _, (host, service)), faults)| {
            let mut names: Vec<String> = Vec::new();
            let mut of: HashSet<&str> = HashSet::new();
            for fault in &faults {
                let is_new = of.insert(fault.service);
                match host {
                    Some(_) if is_new => names.push(fault.service.to_owned()),
                    Some(_) => {}
                    None => names.push(fault.server.to_string()),
                }
            }
            names.truncate(NAMED_MAX);
            let first = faults.first();
            let reason = first.map_or("", |fault| fault.reason.as_str());
            let reason = match of.len() {
                1 => reason,
                _ => without_vip(reason),
            };
            Cause {
                health: health.to_owned(),
                code: code.to_owned(),
                reason: reason.to_owned(),
                fix: first.map_or("", |fault| fault.fix).to_owned(),
                host,
                servers: faults.len(),
                services: of.len(),
                named: names,
                service: service.map(str::to_owned),
                since: faults.iter().filter_map(|fault| fault.since).max(),
            }
        })
        .collect();
    all.sort_by(|one, other| order(one).cmp(&order(other)));
    let number = all.len();
    all.truncate(CAUSES_MAX);
    (all, number)
}

fn host_key<'a>(fault: &'a Fault<'_>) -> (&'static str, &'a str, &'a str, IpAddr) {
    (fault.health, fault.code, fault.detail(), fault.server.ip())
}

impl Fault<'_> {
    /// The part of the reason by which faults with the same code differ. It is empty for codes
    /// whose reasons differ only in addresses and numbers.
    fn detail(&self) -> &str {
        match self.code {
            "" | "check_failed" | "certificate" => &self.reason,
            "next_hop" | "unreachable" | "filtered" | "other_gateway" => without_vip(&self.reason),
            _ => "",
        }
    }
}

/// A reason without the virtual address of one service.
fn without_vip(reason: &str) -> &str {
    let rest = reason.strip_prefix("through ");
    let rest = rest.and_then(|rest| rest.split_once(' '));
    rest.map_or(reason, |(_, rest)| rest)
}

/// The order of causes: servers that are down come first, then suspicious, flapping and slow ones.
/// Among causes of the same health, the cause with most servers comes first.
fn order(cause: &Cause) -> (u8, usize, Option<IpAddr>, Option<&str>, &str) {
    let health = match cause.health.as_str() {
        "down" => 0,
        "suspicious" => 1,
        "flapping" => 2,
        _ => 3,
    };
    let (host, service) = (cause.host, cause.service.as_deref());
    (
        health,
        usize::MAX - cause.servers,
        host,
        service,
        &cause.reason,
    )
}

/// The fault of a server; `None` if it works as configured.
fn fault<'a>(service: &'a ServiceStatus, server: &'a ServerStatus) -> Option<Fault<'a>> {
    let checks = server.checks.as_ref();
    let falls = checks.map_or(0, |checks| checks.falls_in_day);
    let last = checks.map_or("", |checks| checks.fall_reason.as_str());
    let (health, reason, since) = match server.health.as_str() {
        "down" => ("down", verdict::reason(server).to_owned(), server.since),
        "suspicious" => (
            "suspicious",
            verdict::reason(server).to_owned(),
            server.since,
        ),
        _ if verdict::is_flapping(server) => (
            "flapping",
            format!("the server went down {falls} times in 24 hours; the last time: {last}"),
            None,
        ),
        _ if verdict::is_slow(server) => (
            "slow",
            "the last checks of the server took half a second or more each".to_owned(),
            None,
        ),
        _ => return None,
    };
    Some(Fault {
        service: &service.name,
        server: server.server,
        health,
        code: &server.code,
        reason,
        fix: &server.fix,
        since,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::overview::tests::snapshot;

    /// A service. `servers`: the last byte of each server's address, and the reason why this server
    /// is down; a server with an empty reason is up.
    fn service(name: &str, servers: &[(u8, &str)]) -> ServiceStatus {
        let mut service = snapshot(name).status.services[0].clone();
        let one = service.servers[0].clone();
        service.servers = servers
            .iter()
            .map(|(host, reason)| ServerStatus {
                server: ([10, 0, 0, *host], 80).into(),
                health: if reason.is_empty() { "up" } else { "down" }.to_owned(),
                reason: (*reason).to_owned(),
                ..one.clone()
            })
            .collect();
        service
    }

    #[test]
    fn failures_of_one_host_or_one_service_are_grouped_into_one_cause() {
        let mut services: Vec<_> = (0..500)
            .map(|n| service(&format!("s{n}"), &[(1, ""), (2, "no answer"), (3, "")]))
            .collect();
        services.push(service("mail", &[(4, "refused"), (5, "refused")]));
        let (causes, number) = causes(&services);
        assert_eq!(number, 2);
        let [host, mail] = &causes[..] else {
            panic!("{causes:?}");
        };
        assert_eq!(host.host, Some([10, 0, 0, 2].into()));
        assert_eq!((host.servers, host.services), (500, 500));
        assert_eq!(host.named, ["s0", "s1", "s2"]);
        assert_eq!(mail.service.as_deref(), Some("mail"));
        assert_eq!((mail.servers, mail.services), (2, 1));
        assert_eq!(mail.named, ["10.0.0.4:80", "10.0.0.5:80"]);
    }

    /// The reasons of through-VIP checks contain the virtual address.
    #[test]
    fn host_not_reached_by_checks_through_several_vips_is_one_cause() {
        let services = (1..=500).map(|port| {
            let reason = format!("10.0.0.2:80 through 192.0.2.1:{port} did not answer within 1s");
            let mut service = service(&format!("s{port}"), &[(1, ""), (2, &reason)]);
            service.servers[1].code = "silent".to_owned();
            service
        });
        let services: Vec<_> = services.collect();
        let (all, number) = causes(&services);
        assert_eq!((number, all[0].servers), (1, 500));
        assert_eq!(all[0].reason, "did not answer within 1s");
        let (one, _) = causes(&services[..1]);
        assert_eq!(
            one[0].reason,
            "through 192.0.2.1:1 did not answer within 1s"
        );
    }

    #[test]
    fn causes_beyond_the_maximum_are_omitted_but_counted() {
        let services: Vec<_> = (0..CAUSES_MAX + 7)
            .map(|n| service(&format!("s{n}"), &[(1, &format!("reason {n}"))]))
            .collect();
        let (causes, number) = causes(&services);
        assert_eq!((causes.len(), number), (CAUSES_MAX, CAUSES_MAX + 7));
    }
}

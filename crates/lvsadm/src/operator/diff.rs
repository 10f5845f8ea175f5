//! `lvsadm diff`: the differences between the services and servers of two directors.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use lvs_api::Address;
use lvs_core::api::{Call, ServerInfo, ServiceId, ServiceInfo};
use lvs_core::sched::About;
use lvs_core::{Forwarding, ServerConfig, ServiceConfig, ServiceFlags};
use serde::Serialize;

use super::{Outcome, Trouble, Words, service_text};
use crate::invocation::Invocation;
use crate::session::json_list;

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let [other] = &words.free[..] else {
        return Err(Trouble::Usage(
            "expected the control socket of the other director".to_owned(),
        ));
    };
    let own = run.address().clone();
    let here = services(run, &own)?;
    let there = services(run, &Address::new(other))?;
    let differ = differences(&here, &there);
    if run.json {
        json_list(run, &differ)?;
    } else {
        run.output.write_all(text(&differ).as_bytes())?;
    }
    Ok(u8::from(!differ.is_empty()))
}

fn services(run: &mut Invocation<'_>, at: &Address) -> Result<Vec<ServiceInfo>, Trouble> {
    let mut client = run.client_at(at).map_err(Trouble::Absent)?;
    Ok(client.collect(&Call::ServiceList { service: None })?)
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Difference {
    service: ServiceId,
    what: Vec<String>,
}

fn text(differ: &[Difference]) -> String {
    if differ.is_empty() {
        return "both directors have the same services and servers\n".to_owned();
    }
    let mut text = String::new();
    for one in differ {
        text.push_str(&format!("{}\n", service_text(one.service)));
        for what in &one.what {
            text.push_str(&format!("    {what}\n"));
        }
    }
    text
}

/// Returns the services that only one of the two directors has, and services that differ in their
/// servers, in the paths to the servers, or in a setting that affects the choice of a server.
fn differences(here: &[ServiceInfo], there: &[ServiceInfo]) -> Vec<Difference> {
    let by_name = |all: &'_ [ServiceInfo]| -> BTreeMap<String, usize> {
        let names = all.iter().map(|one| service_text(one.service));
        names.zip(0..).collect()
    };
    let (ours, mut theirs) = (by_name(here), by_name(there));
    let mut differ = Vec::new();
    for (name, place) in ours {
        let one = &here[place];
        let what = match theirs.remove(&name) {
            Some(other) => service(one, &there[other]),
            None => vec!["only this director has the service".to_owned()],
        };
        if !what.is_empty() {
            let service = one.service;
            differ.push(Difference { service, what });
        }
    }
    differ.extend(theirs.into_values().map(|place| Difference {
        service: there[place].service,
        what: vec!["only the other director has the service".to_owned()],
    }));
    differ
}

/// Settings of a service on which the choice of a server depends.
fn settings(config: &ServiceConfig) -> [(&'static str, String); 5] {
    let engine = config.engine.as_deref().unwrap_or("none");
    let flags = config.flags.0 & ServiceFlags::ALL;
    [
        ("scheduler", config.scheduler.clone()),
        ("flags", format!("{flags:#x}")),
        ("persistence timeout", config.timeout.to_string()),
        ("persistence netmask", format!("{:#x}", config.netmask)),
        ("persistence engine", engine.to_owned()),
    ]
}

/// The differences of a service, one on each line.
fn service(here: &ServiceInfo, there: &ServiceInfo) -> Vec<String> {
    let mut all = Vec::new();
    let pairs = settings(&here.config)
        .into_iter()
        .zip(settings(&there.config));
    for ((what, ours), (_, theirs)) in pairs {
        compare(&mut all, what, &ours, &theirs);
    }
    let by_address = |service: &'_ ServiceInfo| -> BTreeMap<SocketAddr, usize> {
        let addresses = service.servers.iter().map(|server| server.server);
        addresses.zip(0..).collect()
    };
    let mut others = by_address(there);
    let mut same = true;
    for (address, place) in by_address(here) {
        match others.remove(&address) {
            Some(other) => server(&mut all, &here.servers[place], &there.servers[other]),
            None => {
                same = false;
                all.push(format!("server {address}: only on this director"));
            }
        }
    }
    for address in others.into_keys() {
        same = false;
        all.push(format!("server {address}: only on the other director"));
    }
    let ordered = About::of(&here.config.scheduler).is_some_and(|about| about.goes_by_order);
    if same && ordered {
        let pairs = here.servers.iter().zip(&there.servers);
        let other = (1..)
            .zip(pairs)
            .find(|(_, (ours, theirs))| ours.server != theirs.server);
        if let Some((place, (ours, theirs))) = other {
            let (ours, theirs) = (ours.server, theirs.server);
            all.push(format!(
                "order of the servers: number {place} is {ours} here, {theirs} there"
            ));
        }
    }
    all
}

/// Adds the differences of a server to `all`.
fn server(all: &mut Vec<String>, here: &ServerInfo, there: &ServerInfo) {
    let (ours, theirs) = (&here.config, &there.config);
    let mut of = |what: &str, ours: &dyn ToString, theirs: &dyn ToString| {
        let what = format!("{}: {what}", here.server);
        compare(all, &what, &ours.to_string(), &theirs.to_string());
    };
    of("weight", &ours.weight, &theirs.weight);
    if let (Some(ours), Some(theirs)) = (here.last_weight, there.last_weight) {
        of("weight before it became 0", &ours, &theirs);
    }
    of("upper threshold", &ours.upper, &theirs.upper);
    of("lower threshold", &ours.lower, &theirs.lower);
    // A server that runs on one of the directors is local only there.
    if ![ours.forwarding, theirs.forwarding].contains(&Forwarding::Local) {
        of("forwarding", &way(ours), &way(theirs));
    }
}

fn compare(all: &mut Vec<String>, what: &str, ours: &str, theirs: &str) {
    if ours != theirs {
        all.push(format!("{what}: {ours} here, {theirs} there"));
    }
}

/// How packets reach the server: forwarding method, and tunnel.
fn way(config: &ServerConfig) -> String {
    match config.forwarding {
        Forwarding::Nat => "NAT".to_owned(),
        Forwarding::Local => "local".to_owned(),
        Forwarding::Tunnel => {
            let (tunnel, checksum) = (config.tunnel, config.tunnel.checksum().name());
            match tunnel.port() {
                0 => format!("tunnel {} {checksum}", tunnel.about().name),
                port => format!("tunnel {} {port} {checksum}", tunnel.about().name),
            }
        }
        Forwarding::Route => "direct routing".to_owned(),
        Forwarding::Bypass => "bypass".to_owned(),
        Forwarding::FullNat => "full NAT".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use lvs_core::stats::Stats;

    use super::*;

    fn server(n: u8, weight: i32) -> ServerInfo {
        let server = SocketAddr::from(([10, 0, 0, n], 80));
        ServerInfo::new(server, ServerConfig::new(weight, Forwarding::Nat))
    }

    fn service(port: u16, scheduler: &str) -> ServiceInfo {
        let mut config = ServiceConfig::new(lvs_core::Family::V4, scheduler);
        config.engine = Some("sip".to_owned());
        ServiceInfo {
            service: ServiceId::Tcp {
                address: SocketAddr::from(([198, 51, 100, 1], port)),
            },
            config,
            owner: None,
            stats: Stats::default(),
            refused: 0,
            refusals: Vec::new(),
            drops: Vec::new(),
            servers: vec![server(1, 1), server(2, 1), server(3, 1)],
        }
    }

    #[test]
    fn diff_names_each_differing_setting_of_service() {
        let ours = service(80, "mh");
        let of = |change: &dyn Fn(&mut ServiceInfo)| {
            let mut theirs = ours.clone();
            change(&mut theirs);
            let differ = differences(std::slice::from_ref(&ours), &[theirs]);
            differ
                .into_iter()
                .flat_map(|one| one.what)
                .collect::<Vec<_>>()
                .join("; ")
        };
        assert_eq!(of(&|_| {}), "");
        // Counters do not count as a difference.
        assert_eq!(of(&|s| s.servers[0].active = 5), "");
        type Change<'a> = &'a dyn Fn(&mut ServiceInfo);
        let cases: [(Change<'_>, &str); 12] = [
            (
                &|s| s.config.scheduler = "wrr".to_owned(),
                "scheduler: mh here, wrr there",
            ),
            (&|s| s.config.flags.0 = 1, "flags: 0x0 here, 0x1 there"),
            (
                &|s| s.config.timeout = 60,
                "persistence timeout: 0 here, 60 there",
            ),
            (
                &|s| s.config.netmask = 0xffff_ff00,
                "persistence netmask: 0xffffffff here, 0xffffff00 there",
            ),
            (
                &|s| s.config.engine = None,
                "persistence engine: sip here, none there",
            ),
            (
                &|s| s.servers[1].config.weight = 4,
                "10.0.0.2:80: weight: 1 here, 4 there",
            ),
            (
                &|s| (s.servers[1].config.upper, s.servers[1].config.lower) = (9, 3),
                "10.0.0.2:80: upper threshold: 0 here, 9 there; 10.0.0.2:80: lower threshold: 0 here, 3 there",
            ),
            (
                &|s| s.servers[1].config.forwarding = Forwarding::Route,
                "10.0.0.2:80: forwarding: NAT here, direct routing there",
            ),
            // The server runs on one of the directors.
            (&|s| s.servers[1].config.forwarding = Forwarding::Local, ""),
            (
                &|s| s.servers.truncate(2),
                "server 10.0.0.3:80: only on this director",
            ),
            (
                &|s| s.servers.push(server(4, 1)),
                "server 10.0.0.4:80: only on the other director",
            ),
            (
                &|s| s.servers.swap(0, 2),
                "order of the servers: number 1 is 10.0.0.1:80 here, 10.0.0.3:80 there",
            ),
        ];
        for (change, message) in cases {
            assert_eq!(of(change), message);
        }
    }

    #[test]
    fn diff_ignores_order_of_servers_for_wlc() {
        let ours = service(80, "wlc");
        let mut theirs = ours.clone();
        theirs.servers.reverse();
        assert!(differences(&[ours], &[theirs]).is_empty());
    }

    #[test]
    fn diff_compares_earlier_weight_of_server_for_mh() {
        let [mut ours, mut theirs] = [service(80, "mh"), service(80, "mh")];
        for (service, last) in [(&mut ours, 1), (&mut theirs, 7)] {
            service.servers[0].config.weight = 0;
            service.servers[0].last_weight = Some(last);
        }
        let differ = differences(&[ours], &[theirs]);
        assert_eq!(
            differ[0].what,
            ["10.0.0.1:80: weight before it became 0: 1 here, 7 there"]
        );
    }

    #[test]
    fn diff_names_services_that_only_one_director_has() {
        let [a, b, c] = [80, 81, 82].map(|port| service(port, "wlc"));
        let differ = differences(&[a.clone(), b.clone()], &[b, c]);
        assert_eq!(
            text(&differ),
            "TCP 198.51.100.1:80\n    only this director has the service\nTCP 198.51.100.1:82\n    only the other director has the service\n"
        );
        assert_eq!(
            text(&differences(
                std::slice::from_ref(&a),
                std::slice::from_ref(&a)
            )),
            "both directors have the same services and servers\n"
        );
    }
}

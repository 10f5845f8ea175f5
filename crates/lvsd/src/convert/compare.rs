//! `lvsd convert --check`: compares a converted file with the services that keepalived reads.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use lvs_core::api::ServiceId;
use lvs_core::tunnel::{Tunnel, TunnelChecksum};
use lvs_core::{Family, Forwarding};

use super::dump::{self, TheirService};
use super::service::servers_of_quorum;
use crate::config::{self, Config};

/// Result of comparing a converted file with keepalived's output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Number of compared services.
    pub services: usize,
    /// Number of compared servers.
    pub servers: usize,
    /// Whether keepalived printed its complete configuration, not only the names of services and
    /// servers.
    pub whole: bool,
    /// One message for each difference.
    pub differences: Vec<String>,
}

/// Compares a converted file with the output of keepalived.
///
/// # Errors
/// The file is not valid, or keepalived has printed neither services nor its complete
/// configuration.
pub fn compare(toml: &str, printed: &str) -> Result<Compared, String> {
    let (config, _) = Config::from_toml("", toml).map_err(|report| report.to_string())?;
    let dump = dump::read(printed);
    if dump.services.is_empty() && !dump.whole {
        return Err(match printed.lines().next_back() {
            Some(last) => {
                format!("keepalived has printed no virtual server; its last line is: {last}")
            }
            None => "keepalived has printed nothing".to_owned(),
        });
    }
    let mut compared = Compared {
        whole: dump.whole,
        ..Compared::default()
    };
    // keepalived's messages omit the address family of marks, so that services of both families
    // share a list of servers.
    let mut marks: HashMap<u32, Vec<&config::Service>> = HashMap::new();
    for service in &config.services {
        if let ServiceId::Fwmark { mark, .. } = service.id {
            marks.entry(mark).or_default().push(service);
        }
    }
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for service in &config.services {
        let name = name(&service.id);
        let theirs = dump.services.get_key_value(&name).or_else(|| {
            let (mark, _) = name.rsplit_once(' ')?;
            dump.services.get_key_value(mark).filter(|_| !dump.whole)
        });
        match theirs {
            Some((name, theirs)) => {
                // A message about a mark concerns both families, but is compared once.
                let first = seen.insert(name);
                compared.services += 1;
                compared.servers += service.servers.len();
                let own = [service];
                let ours = match service.id {
                    ServiceId::Fwmark { mark, .. } if !dump.whole => marks[&mark].as_slice(),
                    _ => own.as_slice(),
                };
                let differences = &mut compared.differences;
                let ours = first.then_some(ours);
                of_service(name, service, ours, theirs, dump.whole, differences);
            }
            // Messages do not contain the members of groups.
            None if !dump.whole => {}
            None => compared.differences.push(format!(
                "{name}: keepalived does not have this virtual server"
            )),
        }
    }
    for name in dump
        .services
        .keys()
        .filter(|name| !seen.contains(name.as_str()))
    {
        compared.differences.push(format!(
            "{name}: only keepalived has this virtual server, not the result"
        ));
    }
    Ok(compared)
}

fn name(id: &ServiceId) -> String {
    match id {
        ServiceId::Tcp { address } => format!("{address} tcp"),
        ServiceId::Udp { address } => format!("{address} udp"),
        ServiceId::Sctp { address } => format!("{address} sctp"),
        ServiceId::Fwmark { mark, family } => match family {
            Family::V4 => format!("mark {mark} ipv4"),
            Family::V6 => format!("mark {mark} ipv6"),
        },
    }
}

fn method(server: &config::Server) -> String {
    let checksum = |checksum: TunnelChecksum| match checksum {
        TunnelChecksum::None => String::new(),
        other => format!(" {}", other.name()),
    };
    match (server.config.forwarding, server.config.tunnel) {
        (Forwarding::Nat, _) => "nat".to_owned(),
        (Forwarding::Route, _) => "dr".to_owned(),
        (Forwarding::Tunnel, Tunnel::Ipip) => "tun ipip".to_owned(),
        (Forwarding::Tunnel, Tunnel::Gre { checksum: sum }) => format!("tun gre{}", checksum(sum)),
        (
            Forwarding::Tunnel,
            Tunnel::Gue {
                port,
                checksum: sum,
            },
        ) => {
            format!("tun gue {port}{}", checksum(sum))
        }
        (other, _) => format!("{other:?}").to_lowercase(),
    }
}

/// Compares a service, and adds the differences. `ours` are the converted services that keepalived
/// prints as `name`; `None` if an earlier call has compared them.
fn of_service(
    name: &str,
    service: &config::Service,
    ours: Option<&[&config::Service]>,
    theirs: &TheirService,
    whole: bool,
    differences: &mut Vec<String>,
) {
    let mut differ = |what: &str, ours: &str, theirs: &str| {
        if ours != theirs {
            differences.push(format!(
                "{name}: {what}: {ours} in the result, {theirs} in keepalived"
            ));
        }
    };
    let mark = matches!(service.id, ServiceId::Fwmark { .. });
    // Only NAT and full NAT translate ports.
    let key = |ip: IpAddr, port: u16, method: &str| match method {
        "nat" | "fullnat" if !mark => format!("{ip} port {port}"),
        _ => ip.to_string(),
    };
    let mut first = BTreeSet::new();
    let unique: Vec<&dump::Server> = theirs
        .servers
        .iter()
        .filter(|server| first.insert((server.ip, server.port)))
        .collect();
    let service_port = service.address().map_or(0, |address| address.port());
    for server in &service.servers {
        let method = method(server);
        let key = key(server.address.ip(), server.address.port(), &method);
        let found = unique.iter().find(|theirs| {
            let port = if theirs.port == 0 {
                service_port
            } else {
                theirs.port
            };
            let translates = matches!(method.as_str(), "nat" | "fullnat") && !mark;
            let same_port = !translates || port == server.address.port();
            theirs.ip == Some(server.address.ip()) && same_port
        });
        let Some(found) = found else {
            differ(&format!("server {key}"), "present", "missing");
            continue;
        };
        if !whole {
            continue;
        }
        let what = |of: &str| format!("server {key}, {of}");
        differ(
            &what("weight"),
            &server.config.weight.to_string(),
            &found.weight.to_string(),
        );
        differ(&what("method"), &method, &found.method);
        let kinds: Vec<&str> = found
            .checks
            .iter()
            .map(|check| check.kind.as_str())
            .collect();
        let kinds = match kinds.is_empty() {
            true => "none".to_owned(),
            false => kinds.join(", "),
        };
        let Some(check) = &server.check else {
            differ(&what("check"), "none", &kinds);
            continue;
        };
        let kind = check.probe.name();
        let Some(theirs) = found.checks.iter().find(|other| other.kind == kind) else {
            // keepalived omits checks whose program does not exist on this host.
            if kind != "exec" {
                differ(&what("check"), kind, &kinds);
            }
            continue;
        };
        let milliseconds = check.interval.as_millis().to_string();
        differ(
            &what("interval in ms"),
            &milliseconds,
            &theirs.interval_ms.to_string(),
        );
        differ(
            &what("failures"),
            &check.fall.to_string(),
            &theirs.fall.to_string(),
        );
    }
    for (found, ours) in unique
        .iter()
        .flat_map(|found| ours.map(|ours| (found, ours)))
    {
        let there = ours
            .iter()
            .flat_map(|service| &service.servers)
            .any(|server| Some(server.address.ip()) == found.ip);
        if let Some(ip) = found.ip
            && !there
        {
            differ(&format!("server {ip}"), "missing", "present");
        }
    }
    if !whole {
        return;
    }
    let scheduler = theirs.scheduler.as_deref().unwrap_or("wlc");
    differ(
        "scheduler",
        &service.config.scheduler.to_string(),
        scheduler,
    );
    differ(
        "persistence in seconds",
        &service.config.timeout.to_string(),
        &theirs.persistence.to_string(),
    );
    let sorry = |ip: Option<IpAddr>| ip.map_or("none".to_owned(), |ip| ip.to_string());
    differ(
        "sorry server",
        &sorry(service.sorry.as_ref().map(|server| server.address.ip())),
        &sorry(theirs.sorry),
    );
    let weights: Vec<u64> = theirs.servers.iter().map(|server| server.weight).collect();
    let needed = servers_of_quorum(&weights, theirs.quorum.0, theirs.quorum.1);
    differ(
        "servers of the quorum",
        &format!("{} up, {} down", service.quorum.up, service.quorum.down),
        &format!("{} up, {} down", needed.up, needed.down),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::cases;

    const TOML: &str = r#"
[[service]]
address = "192.0.2.1:80"
forward = "dr"
scheduler = "rr"
quorum = 2
[[service.server]]
address = "10.0.0.1"
weight = 7
check = { type = "tcp", interval = "6s", fall = 2 }
[[service.server]]
address = "10.0.0.2"
weight = 7
"#;

    const PRINTED: &str = "------< LVS Topology >------
 ------< Virtual server >------
 VS VIP = 192.0.2.1, VPORT = 80
   lvs_sched = rr
   protocol = TCP
   quorum = 14, hysteresis = 0
   ------< Real server >------
   RIP = 10.0.0.1, RPORT = 80, WEIGHT = 7 EFF WEIGHT = 7
   forwarding method = DR
   ------< Real server >------
   RIP = 10.0.0.2, RPORT = 80, WEIGHT = 7 EFF WEIGHT = 7
   forwarding method = DR
------< Health checkers >------
 [192.0.2.1]:tcp:80 -> [10.0.0.1]:tcp:80
   Delay loop = 6000000 us
   Retries = 1
   Keepalive method = TCP_CHECK
";

    #[test]
    fn keepalived_dump_equal_to_converted_file_has_no_difference() {
        let compared = compare(TOML, PRINTED).unwrap();
        assert_eq!(compared.differences, [""; 0]);
        assert_eq!((compared.services, compared.servers), (1, 2));
        assert!(compared.whole);
    }

    /// Without IPVS in the kernel, keepalived prints marks without their address family.
    #[test]
    fn keepalived_messages_about_mark_match_services_of_both_families() {
        let service = |family: &str, server: &str| {
            format!(
                "[[service]]\nfwmark = 7\nfamily = \"{family}\"\nforward = \"dr\"\n[[service.server]]\naddress = \"{server}\"\n"
            )
        };
        let toml = service("ipv4", "10.0.0.1") + &service("ipv6", "2001:db8::1");
        let message = |server: &str| format!("Shutting down service {server} from VS FWM 7\n");
        let same = message("[10.0.0.1]:tcp:80") + &message("[2001:db8::1]:tcp:80");
        let compared = compare(&toml, &same).unwrap();
        assert_eq!(compared.differences, [""; 0]);
        assert_eq!((compared.services, compared.whole), (2, false));
        let other = same + &message("[10.0.0.2]:tcp:80");
        let compared = compare(&toml, &other).unwrap();
        assert_eq!(
            compared.differences,
            ["mark 7: server 10.0.0.2: missing in the result, present in keepalived"]
        );
    }

    #[test]
    fn each_difference_from_keepalived_and_failed_start_of_keepalived_are_reported() {
        for [ours, theirs, expected] in cases(
            r#"
                WEIGHT = 7 E | WEIGHT = 8 E | server 10.0.0.1, weight: 7 in the result, 8
                method = DR | method = TUN, type = GRE | method: dr in the result, tun gre
                lvs_sched = rr | lvs_sched = wlc | scheduler: rr in the result, wlc
                quorum = 14 | quorum = 7 | quorum: 2 up, 2 down in the result, 1 up, 1 down
                10.0.0.2, R | 10.0.0.3, R | server 10.0.0.2: present in the result, missing
                10.0.0.2, R | 10.0.0.3, R | server 10.0.0.3: missing in the result, present
                TCP_CHECK | HTTP_GET, http protocol 1.0 | check: tcp in the result, http
                6000000 us | 7000000 us | interval in ms: 6000 in the result, 7000
                Retries = 1 | Retries = 3 | failures: 2 in the result, 4
                VPORT = 80 | VPORT = 81 | 192.0.2.1:80 tcp: keepalived does not have this virtual server
                VPORT = 80 | VPORT = 81 | 192.0.2.1:81 tcp: only keepalived has this virtual server
                quorum | persistence timeout = 50 ; quorum | persistence in seconds: 0 in the result, 50
                quorum | sorry server = [10.0.0.9]:tcp:80 ; quorum | sorry server: none in the result, 10.0.0.9
            "#,
        ) {
            let compared = compare(TOML, &PRINTED.replacen(ours, theirs, 1)).unwrap();
            assert!(
                compared
                    .differences
                    .iter()
                    .any(|line| line.contains(expected)),
                "{expected}: {:?}",
                compared.differences
            );
        }
        let error = compare(TOML, "Started\nexec failed: Permission denied\n").unwrap_err();
        assert!(
            error.ends_with("exec failed: Permission denied"),
            "does not end with `exec failed: Permission denied`: {error}"
        );
    }
}

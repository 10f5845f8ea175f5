//! Parses the output of `keepalived --dump-conf`.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};

use super::keepalived::{following, range};

/// Maximum number of addresses of a range; a longer range is ignored.
const ROOM: usize = super::ADDRESSES_MAX;

/// Services by name: `192.0.2.1:80 tcp` or `mark 7 ipv4`; `mark 7` if the output is not complete.
pub(super) type Services = BTreeMap<String, TheirService>;

/// A service in keepalived's output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TheirService {
    /// `None` for a service of which keepalived printed only the name.
    pub(super) scheduler: Option<String>,
    pub(super) persistence: u64,
    /// Quorum and hysteresis, as sums of weights.
    pub(super) quorum: (u64, u64),
    pub(super) sorry: Option<IpAddr>,
    pub(super) servers: Vec<Server>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Server {
    pub(super) ip: Option<IpAddr>,
    pub(super) port: u16,
    pub(super) weight: u64,
    /// The forwarding method, such as `nat`, `dr`, `tun ipip` or `tun gue 6080 full`.
    pub(super) method: String,
    pub(super) checks: Vec<Check>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Check {
    /// lvsd's name of the kind of check; `none` if lvsd has no equivalent.
    pub(super) kind: String,
    pub(super) interval_ms: u64,
    pub(super) fall: u64,
}

#[derive(Debug, Default)]
pub(super) struct Dump {
    pub(super) services: Services,
    /// Whether the output is complete, and not only the names of services and servers.
    pub(super) whole: bool,
}

/// Removes the timestamp of a line.
fn message(line: &str) -> &str {
    let dated = |at: &usize| {
        let year = line.get(..*at).and_then(|before| before.rsplit(' ').next());
        year.is_some_and(|year| year.len() == 4 && year.bytes().all(|b| b.is_ascii_digit()))
    };
    match line.find(": ").filter(dated) {
        Some(at) => &line[at + 2..],
        None => line,
    }
}

/// Finds the value of `name` in `A = x, B = y`; `None` if the line does not contain it.
fn value<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    line.split(", ").find_map(|part| {
        let (key, value) = part.trim().split_once(" = ")?;
        (key == name).then(|| value.trim())
    })
}

fn number(text: &str) -> u64 {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    text[..end].parse().unwrap_or(0)
}

/// Members of a group: addresses with ports, and marks with address families.
#[derive(Clone, Debug, Default)]
struct Group {
    addresses: Vec<(IpAddr, u16)>,
    marks: Vec<(u64, Option<&'static str>)>,
}

/// Address, mark or group of a virtual server.
#[derive(Clone, Debug, Default)]
enum Target {
    #[default]
    None,
    Address(IpAddr, u16),
    Mark(u64),
    Group(String),
}

#[derive(Debug, Default)]
struct Virtual {
    target: Target,
    family: String,
    protocol: String,
    seen: TheirService,
}

pub(super) fn read(text: &str) -> Dump {
    let mut dump = Dump::default();
    let mut groups: HashMap<String, Group> = HashMap::new();
    let mut all: Vec<Virtual> = Vec::new();
    // Checks, by service and server.
    let mut checks: Vec<((String, String), Check)> = Vec::new();
    let mut named: Vec<(String, String)> = Vec::new();
    let (mut section, mut group) = ("", String::new());
    for line in text.lines().map(message) {
        let line = line.trim();
        if let Some(title) = line
            .strip_prefix("------< ")
            .and_then(|rest| rest.strip_suffix(" >------"))
        {
            section = match title {
                "LVS Topology" => {
                    dump.whole = true;
                    "topology"
                }
                "Virtual server group" => "group",
                "Virtual server" => {
                    all.push(Virtual::default());
                    "service"
                }
                "Real server" => {
                    if let Some(last) = all.last_mut() {
                        last.seen.servers.push(Server::default());
                    }
                    "server"
                }
                "Health checkers" => "checks",
                _ => "",
            };
            continue;
        }
        let shut_down = line.strip_prefix("Shutting down ");
        let shut_down = shut_down.map(|rest| rest.strip_prefix("(inhibited) ").unwrap_or(rest));
        if let Some(rest) = shut_down.and_then(|rest| rest.strip_prefix("service ")) {
            named.extend(
                rest.split_once(" from VS ")
                    .map(|(server, service)| (service.to_owned(), server.to_owned())),
            );
            continue;
        }
        match section {
            "group" => {
                if let Some(name) = value(line, "Virtual Server Group") {
                    // keepalived uses the first group of a name.
                    match groups.contains_key(name) {
                        true => group.clear(),
                        false => name.clone_into(&mut group),
                    }
                }
                let members = groups.entry(group.clone()).or_default();
                let port = value(line, "VPORT")
                    .map(number)
                    .and_then(|n| u16::try_from(n).ok());
                let ips = value(line, "VIP").or(value(line, "VIP Range"));
                if let (Some(ips), Some(port)) = (ips, port)
                    && let Some((first, count)) = range(ips).filter(|(_, count)| *count <= ROOM)
                {
                    members
                        .addresses
                        .extend(following(first, count).map(|ip| (ip, port)));
                }
                if let Some(mark) = value(line, "FWMARK") {
                    let family = match mark {
                        text if text.ends_with("IPv4") => Some("ipv4"),
                        text if text.ends_with("IPv6") => Some("ipv6"),
                        _ => None,
                    };
                    members.marks.push((number(mark), family));
                }
            }
            "service" => {
                if let Some(last) = all.last_mut() {
                    service(line, last);
                }
            }
            "server" => {
                let server = all.last_mut().and_then(|last| last.seen.servers.last_mut());
                if let Some(server) = server {
                    if let Some(ip) = value(line, "RIP") {
                        server.ip = ip.parse().ok();
                        server.weight = value(line, "WEIGHT").map_or(0, number);
                        server.port = value(line, "RPORT")
                            .and_then(|port| port.parse().ok())
                            .unwrap_or(0);
                    } else if let Some(method) = line.strip_prefix("forwarding method = ") {
                        server.method = self::method(method);
                    }
                }
            }
            "checks" => {
                if let Some((service, server)) = line.split_once(" -> ") {
                    let key = (service.to_owned(), server.to_owned());
                    checks.push((key, Check::default()));
                } else if let Some((_, check)) = checks.last_mut() {
                    if let Some(delay) = value(line, "Delay loop") {
                        check.interval_ms = number(delay) / 1000;
                    } else if let Some(retries) = value(line, "Retries") {
                        check.fall = number(retries) + 1;
                    } else if let Some(kind) = value(line, "Keepalive method") {
                        check.kind = self::kind(kind).to_owned();
                    }
                }
            }
            _ => {}
        }
    }
    for mut one in all {
        let service = match &one.target {
            Target::Address(ip, port) => named_service(*ip, *port, &one.protocol),
            Target::Mark(mark) => format!("FWM {mark}"),
            Target::Group(name) => name.clone(),
            Target::None => continue,
        };
        for server in &mut one.seen.servers {
            let Some(ip) = server.ip else {
                continue;
            };
            let of_server = named_service(ip, server.port, &one.protocol);
            let its = checks.iter().filter(|((of, at), _)| {
                let same_server = *at == of_server || at.starts_with(&format!("[{ip}]:"));
                *of == service && same_server
            });
            server.checks = its.map(|(_, check)| check.clone()).collect();
        }
        add(&mut dump.services, &groups, &one);
    }
    if !dump.whole {
        for (service, server) in named {
            add_named(&mut dump.services, &service, &server);
        }
    }
    dump
}

/// Formats a service or server like keepalived's messages.
fn named_service(ip: IpAddr, port: u16, protocol: &str) -> String {
    format!("[{ip}]:{}:{port}", protocol.to_ascii_lowercase())
}

/// Stores the setting in a line about a virtual server in `one`. Other lines are ignored.
fn service(line: &str, one: &mut Virtual) {
    if let Some(ip) = value(line, "VS VIP") {
        let port = value(line, "VPORT").and_then(|port| port.parse().ok());
        if let (Ok(ip), Some(port)) = (ip.parse(), port) {
            one.target = Target::Address(ip, port);
        }
    } else if let Some(mark) = value(line, "VS FWMARK") {
        one.target = Target::Mark(number(mark));
    } else if let Some(group) = value(line, "VS GROUP") {
        // The value is `[NAME]:0`.
        one.target = Target::Group(group.to_owned());
    } else if let Some(family) = value(line, "Address family") {
        family.clone_into(&mut one.family);
    } else if let Some(scheduler) = value(line, "lvs_sched") {
        one.seen.scheduler = Some(scheduler.to_owned());
    } else if let Some(seconds) = value(line, "persistence timeout") {
        one.seen.persistence = number(seconds);
    } else if let Some(protocol) = value(line, "protocol") {
        one.protocol = protocol.to_ascii_lowercase();
    } else if let Some(quorum) = value(line, "quorum") {
        let hysteresis = value(line, "hysteresis").map_or(0, number);
        one.seen.quorum = (number(quorum), hysteresis);
    } else if let Some(sorry) = value(line, "sorry server") {
        let end = sorry.find(']').unwrap_or(0);
        one.seen.sorry = sorry.get(1..end).and_then(|ip| ip.parse().ok());
    }
}

/// Converts keepalived's text about a forwarding method, such as `TUN, type = GUE, port = 6080,
/// checksum`, for comparison.
fn method(text: &str) -> String {
    let mut parts = text.split(", ");
    let mut words = vec![parts.next().unwrap_or_default().to_ascii_lowercase()];
    for part in parts {
        match part.split_once(" = ") {
            Some((_, value)) => words.push(value.to_ascii_lowercase()),
            None if part == "checksum" => words.push("full".to_owned()),
            None if part == "remote checksum" => words.push("remote".to_owned()),
            None => {}
        }
    }
    words.join(" ")
}

fn kind(text: &str) -> &'static str {
    let name = text.split(',').next().unwrap_or_default();
    super::checks::kind(name).unwrap_or("none")
}

/// Adds a virtual server under each of its addresses and marks.
fn add(services: &mut Services, groups: &HashMap<String, Group>, one: &Virtual) {
    let mark_name = |mark: u64, family_name: Option<&str>| {
        let family = match (family_name, one.family.as_str()) {
            (Some(family_name), _) => family_name,
            (None, "inet6") => "ipv6",
            (None, _) => "ipv4",
        };
        format!("mark {mark} {family}")
    };
    let address_name =
        |ip: IpAddr, port: u16| format!("{} {}", SocketAddr::new(ip, port), one.protocol);
    let names: Vec<String> = match &one.target {
        Target::None => Vec::new(),
        Target::Address(ip, port) => vec![address_name(*ip, *port)],
        Target::Mark(mark) => vec![mark_name(*mark, None)],
        Target::Group(text) => {
            let name = text
                .strip_prefix('[')
                .and_then(|text| text.rsplit_once("]:"));
            let members = name.and_then(|(name, _)| groups.get(name));
            let members = members.cloned().unwrap_or_default();
            let addresses = members
                .addresses
                .iter()
                .map(|(ip, port)| address_name(*ip, *port));
            let marks = members
                .marks
                .iter()
                .map(|(mark, family)| mark_name(*mark, *family));
            addresses.chain(marks).collect()
        }
    };
    for name in names {
        // In the kernel, virtual servers of one name are one service with the servers of all.
        match services.get_mut(&name) {
            Some(first) => first.servers.extend(one.seen.servers.iter().cloned()),
            None => {
                services.insert(name, one.seen.clone());
            }
        }
    }
}

/// Adds a server from a message: `[10.0.0.1]:tcp:80` of `[192.0.2.1]:tcp:80` or `FWM 7`.
fn add_named(services: &mut Services, service: &str, server: &str) {
    let parts = |text: &str| -> Option<(IpAddr, String, u16)> {
        let (ip, rest) = text.strip_prefix('[')?.split_once("]:")?;
        let (protocol, port) = rest.split_once(':')?;
        Some((ip.parse().ok()?, protocol.to_owned(), port.parse().ok()?))
    };
    let name = match (parts(service), service.strip_prefix("FWM ")) {
        (Some((ip, protocol, port)), _) => format!("{} {protocol}", SocketAddr::new(ip, port)),
        (None, Some(mark)) => format!("mark {mark}"),
        // Messages do not list the members of a group.
        (None, None) => return,
    };
    if let Some((ip, _, port)) = parts(server) {
        services.entry(name).or_default().servers.push(Server {
            ip: Some(ip),
            port,
            ..Server::default()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keepalived_dump_yields_services_servers_and_checks() {
        let dump = read(
            "Fri Nov 27 08:55:06 2026: ------< LVS Topology >------\n\
             Fri Nov 27 08:55:06 2026:  ------< Virtual server group >------\n\
             Fri Nov 27 08:55:06 2026:  Virtual Server Group = g, IPv4 = yes, IPv6 = no\n\
             Fri Nov 27 08:55:06 2026:    VIP Range = 192.0.2.51-192.0.2.52, VPORT = 81\n\
             Fri Nov 27 08:55:06 2026:    FWMARK = 5 IPv4\n\
             \x20------< Virtual server >------\n VS GROUP = [g]:0\n   Address family = inet\n   lvs_sched = wlc\n   \
             protocol = TCP\n   quorum = 2, hysteresis = 1\n   sorry server = [10.0.0.99]:tcp:80\n   \
             forwarding method = NAT\n   ------< Real server >------\n   \
             RIP = 10.0.0.1, RPORT = 80, WEIGHT = 7 EFF WEIGHT = 7\n   \
             forwarding method = TUN, type = GUE, port = 6080, checksum\n\
             ------< Health checkers >------\n [g]:0 -> [10.0.0.1]:tcp:80\n   Delay loop = 6000000 us\n   \
             Retries = 3\n   Keepalive method = HTTP_GET, http protocol 1.0\n",
        );
        assert!(dump.whole);
        let names: Vec<&String> = dump.services.keys().collect();
        assert_eq!(
            names,
            ["192.0.2.51:81 tcp", "192.0.2.52:81 tcp", "mark 5 ipv4"]
        );
        let seen = &dump.services["192.0.2.52:81 tcp"];
        assert_eq!(seen.quorum, (2, 1));
        assert_eq!(seen.sorry, "10.0.0.99".parse().ok());
        let server = &seen.servers[0];
        assert_eq!((server.port, server.weight), (80, 7));
        assert_eq!(server.method, "tun gue 6080 full");
        let expected = Check {
            kind: "http".to_owned(),
            interval_ms: 6000,
            fall: 4,
        };
        assert_eq!(server.checks, [expected]);
    }

    #[test]
    fn keepalived_dump_without_configuration_lists_services_named_in_messages() {
        let dump = read(
            "Fri Nov 27 08:55:06 2026: IPVS: Can't initialize ipvs: No such file or directory\n\
             Fri Nov 27 08:55:06 2026: Shutting down service [10.0.0.1]:tcp:80 from VS [192.0.2.1]:tcp:80\n\
             Fri Nov 27 08:55:06 2026: Shutting down (inhibited) service [10.0.0.2]:none:0 from VS FWM 7\n\
             Fri Nov 27 08:55:06 2026: Shutting down service [10.0.0.3]:tcp:80 from VS [g1]:0\n",
        );
        assert!(!dump.whole);
        let names: Vec<&String> = dump.services.keys().collect();
        assert_eq!(names, ["192.0.2.1:80 tcp", "mark 7"]);
    }
}

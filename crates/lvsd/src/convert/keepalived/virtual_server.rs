//! Converts a virtual server and its real servers.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::group::{Group, family, group};
use super::outside::Outside;
use crate::convert::checks::{self, Check, Context};
use crate::convert::item::{Item, is_on};
use crate::convert::service::{Keys, Server, Service, Sorry};
use crate::convert::service::{bare, endpoint, is_mask, port, quote, scheduler};

/// Statements of which keepalived uses only one value.
const ONE_VALUE: [&str; 14] = [
    "lb_algo",
    "lvs_sched",
    "protocol",
    "persistence_timeout",
    "persistence_granularity",
    "quorum",
    "hysteresis",
    "weight",
    "uthreshold",
    "lthreshold",
    "delay_loop",
    "connect_timeout",
    "retry",
    "delay_before_retry",
];

/// keepalived's maximum persistence timeout in seconds.
const PERSISTENCE_MAX: u64 = 31 * 86_400;

/// Message about the words of a statement that keepalived ignores; `None` if it uses all of them.
fn passed_over(item: &Item) -> Option<String> {
    (ONE_VALUE.contains(&item.name()) && item.len() > 2).then(|| {
        let why = format!("keepalived ignores `{}`", item.rest(2));
        item.lost(&why)
    })
}

pub(super) fn convert(
    item: &Item,
    groups: &HashMap<&str, &Item>,
    vrrp: &HashSet<IpAddr>,
    outside: &Outside,
    room: &mut usize,
) -> Result<Vec<Service>, String> {
    let group = target(item, groups, room)?;
    let Group {
        addresses, marks, ..
    } = &group;
    if addresses.is_empty() && marks.is_empty() {
        let why = group.lost.join("; ");
        return Err(match why.is_empty() {
            true => "its group is empty".to_owned(),
            false => format!("its group is empty: {why}"),
        });
    }
    let mut service = Service {
        at: item.at().to_string(),
        lost: group
            .lost
            .iter()
            .map(|what| format!("its group: {what}"))
            .collect(),
        ..Service::default()
    };
    let mut parts = Parts::default();
    settings(item, outside, &mut service, &mut parts);
    if item.find("protocol").is_none() && !addresses.is_empty() {
        service.lose(format!(
            "{}: no `protocol`: the service uses UDP, as with keepalived; write protocol = \"tcp\" if that is meant",
            item.at()
        ));
    }
    let mut services = Vec::new();
    // The addresses of one family form one service, with the servers of that family.
    for six in [false, true] {
        let of_family: Vec<(IpAddr, u16)> = addresses
            .iter()
            .filter(|(ip, _)| ip.is_ipv6() == six)
            .copied()
            .collect();
        if of_family.is_empty() {
            continue;
        }
        let mut one = service.clone();
        if of_family.iter().any(|(ip, _)| vrrp.contains(ip)) {
            one.string("vip", "host");
        }
        if item.find("protocol").is_none() {
            one.string("protocol", "udp");
        }
        // All ports: keepalived makes such a service persistent.
        if of_family.iter().any(|(_, port)| *port == 0) {
            parts.timeout = parts.timeout.filter(|seconds| *seconds > 0).or(Some(360));
        }
        one.addresses = of_family
            .iter()
            .map(|(ip, port)| endpoint(*ip, *port))
            .collect();
        parts.finish(&mut one, six);
        services.push(one);
    }
    for (mark, origin) in marks {
        let mut one = service.clone();
        let six = origin
            .or(parts.family)
            .unwrap_or_else(|| parts.guessed(&service));
        one.fwmark = Some((*mark, six));
        for key in ["protocol", "vip"] {
            one.keys.remove(key);
        }
        // With a mark, keepalived ignores the servers' ports.
        for server in &mut one.servers {
            server.take_port();
        }
        parts.finish(&mut one, six);
        services.push(one);
    }
    Ok(services)
}

/// Reads the addresses or the mark of a virtual server, or the members of its group; an error if
/// they are invalid.
fn target(item: &Item, groups: &HashMap<&str, &Item>, room: &mut usize) -> Result<Group, String> {
    match item.word(1) {
        "group" => {
            let name = item.word(2);
            let found = groups
                .get(name)
                .ok_or_else(|| format!("there is no group {name}"))?;
            let servers = item.items().iter();
            let servers = servers.filter(|item| item.name() == "real_server").count();
            Ok(group(found, servers, room))
        }
        "fwmark" => {
            let mark = item.word(2).parse().ok().filter(|mark| *mark > 0);
            let mark = mark.ok_or_else(|| format!("{} is not a mark", item.word(2)))?;
            Ok(Group {
                marks: vec![(mark, None)],
                ..Group::default()
            })
        }
        address => {
            let ip = address
                .parse()
                .map_err(|_| format!("{address} is not an address"))?;
            let port = match item.word(2) {
                "" => 0,
                word => port(word).ok_or_else(|| format!("{word} is not a port"))?,
            };
            Ok(Group {
                addresses: vec![(ip, port)],
                ..Group::default()
            })
        }
    }
}

/// Scheduler to which a flag applies.
fn scheduler_of(flag: &str) -> &'static str {
    match flag.starts_with("mh-") {
        true => "mh",
        false => "sh",
    }
}

struct Method {
    forward: &'static str,
    /// The tunnel; `None` for the tunnel of the enclosing block, or if the method is not a tunnel.
    tunnel: Option<String>,
}

/// Converts a tunnel, whose words begin at index `at`.
///
/// # Errors
/// keepalived refuses the words; the text is the reason.
fn tunnel(item: &Item, mut at: usize) -> Result<String, String> {
    let (mut kind, mut port, mut checksum) = ("ipip", None, None);
    while at < item.len() {
        match (item.word(at), item.word(at + 1)) {
            ("type", name @ ("ipip" | "gre" | "gue")) => {
                kind = name;
                at += 1;
            }
            ("port", number) if number.parse::<u16>().is_ok_and(|number| number > 0) => {
                port = Some(number);
                at += 1;
            }
            ("nocsum", _) => checksum = None,
            ("csum", _) => checksum = Some("full"),
            ("remcsum", _) => checksum = Some("remote"),
            (word @ ("type" | "port"), value) => {
                return Err(format!("keepalived has no {word} `{value}` of a tunnel"));
            }
            (word, _) => return Err(format!("keepalived has no keyword `{word}` of a tunnel")),
        }
        at += 1;
    }
    match (kind, port, checksum) {
        ("gue", None, _) => return Err("a GUE tunnel needs a port".to_owned()),
        ("ipip" | "gre", Some(_), _) => return Err("only a GUE tunnel has a port".to_owned()),
        ("ipip", _, Some(_)) | ("gre", _, Some("remote")) => {
            return Err("this tunnel has no such checksum".to_owned());
        }
        _ => {}
    }
    let checksum = checksum.map(|word| format!(", checksum = \"{word}\""));
    let checksum = checksum.unwrap_or_default();
    Ok(match (kind, port) {
        ("gue", Some(port)) => format!("{{ type = \"gue\", port = {port}{checksum} }}"),
        ("gre", _) if checksum.is_empty() => quote("gre"),
        ("gre", _) => format!("{{ type = \"gre\"{checksum} }}"),
        _ => quote("ipip"),
    })
}

impl Method {
    /// Parses the words after the keyword, such as `NAT` or `TUN type gue port 6080 csum`. Adds
    /// messages about unconverted words to `lost`. `None` if the first word is not a method.
    fn parse(item: &Item, lost: &mut Vec<String>) -> Option<Self> {
        let forward = match item.word(1) {
            "NAT" => "nat",
            "DR" => "dr",
            "TUN" => "tun",
            "FNAT" => "fullnat",
            _ => return None,
        };
        if forward != "tun" {
            for at in 2..item.len() {
                let why = format!("keepalived ignores `{}`", item.word(at));
                lost.push(item.lost(&why));
            }
            return Some(Self {
                forward,
                tunnel: None,
            });
        }
        let tunnel = tunnel(item, 2);
        if let Err(why) = &tunnel {
            lost.push(item.lost(&format!(
                "{why}: the tunnel of the enclosing block applies, or IPIP, as with keepalived"
            )));
        }
        Some(Self {
            forward,
            tunnel: tunnel.ok(),
        })
    }

    /// Sets the keys of the method. `tunnel` is omitted if it equals the enclosing block's.
    fn set(self, keys: &mut Keys, around: Option<&Keys>) {
        keys.insert("forward", quote(self.forward));
        let Some(tunnel) = self.tunnel else {
            keys.remove("tunnel");
            return;
        };
        let ipip = quote("ipip");
        let default = around.and_then(|keys| keys.get("tunnel")).unwrap_or(&ipip);
        match tunnel == *default {
            true => keys.remove("tunnel"),
            false => keys.insert("tunnel", tunnel),
        };
    }
}

/// Settings of a virtual server that depend on other settings.
#[derive(Clone, Debug, Default)]
struct Parts {
    family: Option<bool>,
    /// Persistence timeout in seconds: 0 for no persistence, `None` if the virtual server does not
    /// set it.
    timeout: Option<u64>,
    /// Netmask of persistence, and its statement.
    granularity: Option<(String, Item)>,
    engine: Option<String>,
    one_packet: Option<Item>,
}

impl Parts {
    /// Guesses the address family of a mark service; true for IPv6.
    fn guessed(&self, service: &Service) -> bool {
        let tunnelled = |keys: &Keys| {
            let own = keys.get("forward").or(service.keys.get("forward"));
            own.is_some_and(|word| word == "\"tun\"")
        };
        let sorry = service
            .sorry
            .iter()
            .map(|sorry| (sorry.ip.is_ipv6(), tunnelled(&sorry.keys)));
        let servers = service
            .servers
            .iter()
            .filter_map(|server| Some((server.place().0?.is_ipv6(), tunnelled(&server.keys))));
        let all: Vec<(bool, bool)> = servers.chain(sorry).collect();
        if let Some((six, _)) = all.iter().find(|(_, tunnel)| !tunnel) {
            return *six;
        }
        !all.is_empty() && all.iter().all(|(six, _)| *six)
    }

    /// Completes a service of this address family. Omits servers of the other family unless they
    /// use tunnels.
    fn finish(&self, service: &mut Service, six: bool) {
        if let Some(item) = &self.one_packet {
            let udp = service
                .keys
                .get("protocol")
                .is_some_and(|word| word == "\"udp\"");
            match udp || service.fwmark.is_some() {
                true => {
                    service.keys.insert("one_packet", "true".to_owned());
                }
                false => service.lose(item.lost("it applies to UDP services only")),
            }
        }
        let mut netmask = None;
        if let Some((mask, item)) = &self.granularity {
            match is_mask(mask, six) {
                true => netmask = Some(mask.clone()),
                false => service.lose(item.lost(match mask.as_str() {
                    "0.0.0.0" => {
                        "lvsd cannot count all clients as one: each address counts separately"
                    }
                    _ => "lvsd accepts only a prefix: each address counts separately",
                })),
            }
        }
        let persistent = self.timeout.is_some_and(|seconds| seconds > 0)
            || (self.timeout.is_none() && self.granularity.is_some());
        if persistent {
            let timeout = self
                .timeout
                .map(|seconds| format!("timeout = \"{seconds}s\""));
            let netmask = netmask.map(|mask| format!("netmask = {}", quote(&mask)));
            let engine = self
                .engine
                .as_ref()
                .map(|name| format!("engine = {}", quote(name)));
            let keys: Vec<String> = [timeout, netmask, engine].into_iter().flatten().collect();
            let keys = match keys.is_empty() {
                true => "timeout = \"360s\"".to_owned(),
                false => keys.join(", "),
            };
            service.keys.insert("persistence", format!("{{ {keys} }}"));
        }
        let around = service.keys.clone();
        let fits = |ip: IpAddr, keys: &Keys| {
            let own = keys.get("forward").or(around.get("forward"));
            ip.is_ipv6() == six || own.is_some_and(|word| word == "\"tun\"")
        };
        let why = "its address family is not the service's; lvsd refuses it, as keepalived does";
        let lost = &mut service.lost;
        service.servers.retain(|server| {
            let is_one = server.place().0.is_none_or(|ip| fits(ip, &server.keys));
            if !is_one {
                lost.push(server.lost_whole(why));
            }
            is_one
        });
        if let Some(sorry) = service.sorry.take_if(|sorry| !fits(sorry.ip, &sorry.keys)) {
            lost.push(format!("{}: {why}", sorry.origin));
        }
    }
}

fn settings(item: &Item, outside: &Outside, service: &mut Service, parts: &mut Parts) {
    service.string("forward", "nat");
    let outer = item;
    let inhibit = item.find("inhibit_on_failure").is_some_and(is_on);
    let mut flags: Vec<&str> = Vec::new();
    let mut scheduler_so_far = "";
    let mut sorry_method = None;
    for item in item.items() {
        let value = item.word(1);
        service.lost.extend(passed_over(item));
        service.lost.extend(checks::bad_timing(item, false));
        match item.name() {
            // These settings are read when checks and servers are converted.
            "delay_loop" | "inhibit_on_failure" | "retry" | "delay_before_retry"
            | "connect_timeout" | "virtualhost" => {}
            "warmup" => service.lose(item.lost(checks::WARMUP)),
            "lb_algo" | "lvs_sched" => match scheduler(value) {
                Ok(name) => {
                    scheduler_so_far = name;
                    service.string("scheduler", name);
                    flags.retain(|flag| flag.starts_with("flag") || flag.starts_with(name));
                }
                Err(why) => service.lose(format!("{}: {why}", item.at())),
            },
            "lb_kind" | "lvs_method" => match Method::parse(item, &mut service.lost) {
                Some(method) => method.set(&mut service.keys, None),
                None => service.lose(item.lost("NAT is used, as by keepalived")),
            },
            "laddr_group_name" => service.local_group = Some(value.to_owned()),
            "ip_family" => {
                match family(value) {
                    Some(six) => match parts.family {
                        Some(first) if first != six => {
                            service.lose(item.lost("keepalived ignores it: persistence_granularity is of the other family"));
                        }
                        _ => parts.family = Some(six),
                    },
                    None => service.lose(item.lost("the value is not an address family")),
                }
            }
            "protocol" => match value {
                "TCP" | "tcp" => {}
                "UDP" | "udp" => service.string("protocol", "udp"),
                "SCTP" | "sctp" => service.string("protocol", "sctp"),
                _ => service.lose(item.lost("the value is not a protocol")),
            },
            "persistence_timeout" if value.is_empty() => parts.timeout = Some(360),
            "persistence_timeout" => match value.parse() {
                Ok(seconds @ 1..=PERSISTENCE_MAX) => parts.timeout = Some(seconds),
                _ => service.lose(item.lost(&format!(
                    "keepalived ignores it: it is not a number from 1 to {PERSISTENCE_MAX}"
                ))),
            },
            "persistence_granularity" => {
                // With a mark, a prefix is IPv6 and a mask is IPv4.
                parts.family.get_or_insert(!value.contains('.'));
                parts.granularity = Some((value.to_owned(), item.clone()));
            }
            "persistence_engine" if value == "sip" => parts.engine = Some(value.to_owned()),
            "persistence_engine" => service.lose(item.lost("lvsd has only the engine sip")),
            "ops" => parts.one_packet = Some(item.clone()),
            name @ ("hashed" | "sh-port" | "sh-fallback" | "mh-port" | "mh-fallback")
                if scheduler_so_far != scheduler_of(name) =>
            {
                let only = scheduler_of(name);
                service.lose(item.lost(&format!(
                    "keepalived ignores it: it applies only after a line that sets the scheduler {only}"
                )));
            }
            "hashed" => flags.push("flag-1"),
            name @ ("flag-1" | "flag-2" | "flag-3" | "sh-port" | "sh-fallback" | "mh-port"
            | "mh-fallback") => flags.push(name),
            "quorum" => match value.parse::<u64>() {
                Ok(number) if number > 0 => service.quorum_of(item).quorum = number,
                _ => service.lose(item.lost("the quorum is 1, as with keepalived")),
            },
            "hysteresis" => match value.parse() {
                Ok(number) => service.quorum_of(item).hysteresis = number,
                Err(_) => service.lose(item.lost("the value is not a number")),
            },
            "sorry_server" => {
                let port = match item.word(2) {
                    "" => Some(0),
                    word => port(word),
                };
                match (value.parse::<IpAddr>(), port) {
                    (Ok(ip), Some(port)) => {
                        service.sorry = Some(Sorry {
                            origin: format!("{}: {}", item.at(), item.text()),
                            ip,
                            port: Some(port).filter(|port| *port != 0),
                            keys: Keys::new(),
                        });
                    }
                    _ => service.lose(item.lost("the value is not an address and a port")),
                }
            }
            "sorry_server_lvs_method" => {
                sorry_method = Method::parse(item, &mut service.lost);
                if sorry_method.is_none() {
                    service.lose(item.lost("the service's method is used"));
                }
            }
            "sorry_server_inhibit" => {
                service
                    .lose(item.lost("the sorry server leaves the table when the quorum is back"));
            }
            "real_server" => {}
            "alpha" | "omega" if !is_on(item) => {}
            "alpha" => {
                service.keys.insert("start_down", "true".to_owned());
            }
            "omega" => {
                service.keys.insert("remove_on_exit", "true".to_owned());
            }
            "quorum_up" | "quorum_down" => {
                service.lose(item.lost("lvsd runs only the program of `notify` in [lvsd], for all events of all services"));
            }
            "ha_suspend" => service
                .lose(item.lost("lvsd checks servers even if this host does not have the address")),
            "smtp_alert" if !is_on(item) => {}
            "smtp_alert" => service.lose(item.lost("lvsd sends no e-mail: use `notify` in [lvsd]")),
            "snmp_name" => {
                service.lose(item.lost("lvsd does not support SNMP; set `name` of the service"));
            }
            "" => {}
            "nb_get_retry" | "nat_mask" => {
                service.lose(item.lost("lvsd ignores it, as keepalived does here"));
            }
            _ => service.lose(item.lost("lvsd has no equivalent")),
        }
    }
    full_nat(outer, outside, service);
    if let (Some(method), Some(sorry)) = (sorry_method, &mut service.sorry) {
        method.set(&mut sorry.keys, Some(&service.keys));
    }
    let servers = outer.items().iter();
    for item in servers.filter(|item| item.name() == "real_server") {
        match real_server(item, outer, outside, service, inhibit) {
            Ok(server) => service.servers.push(server),
            Err(why) => service.lose(item.lost(why)),
        }
    }
    if !flags.is_empty() {
        let all: Vec<String> = flags.iter().map(|flag| quote(flag)).collect();
        service
            .keys
            .insert("scheduler_flags", format!("[{}]", all.join(", ")));
    }
    on_check_failure(service, inhibit);
}

/// Checks that a service with full NAT has local addresses. Without them, the service gets NAT.
fn full_nat(item: &Item, outside: &Outside, service: &mut Service) {
    let full = quote("fullnat");
    if service.keys.get("forward") != Some(&full) {
        if service.local_group.take().is_some() {
            service.lose(format!(
                "{}: laddr_group_name: it is for full NAT only",
                item.at()
            ));
        }
        return;
    }
    let name = service.local_group.clone().unwrap_or_default();
    if outside.local_group(&name).is_none() {
        service.local_group = None;
        service.string("forward", "nat");
        service.lose(format!(
            "{}: FNAT: no local_address_group of the name {name:?} has addresses; NAT is written: set \
             forward = \"fullnat\", and local_addresses in [dataplane]",
            item.at()
        ));
    }
}

/// Sets `on_check_failure` of a service: `quiesce` if the service (`inhibit`) or each of its servers
/// has `inhibit_on_failure`, otherwise `remove`; the settings of single servers are then reported as
/// lost.
fn on_check_failure(service: &mut Service, inhibit: bool) {
    let all_inhibit = inhibit
        || (!service.servers.is_empty() && service.servers.iter().all(|s| s.inhibit.is_some()));
    for server in &mut service.servers {
        if let Some(origin) = server.inhibit.take()
            && !all_inhibit
        {
            server.lose(format!(
                "{origin}: set on_check_failure = \"quiesce\" for the service"
            ));
        }
    }
    service.string(
        "on_check_failure",
        if all_inhibit { "quiesce" } else { "remove" },
    );
}

/// The number at the start of a word; 0 without digits, and `None` if the number is too large.
fn leading(word: &str) -> Option<i32> {
    let word = word.trim_start();
    let end = word
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(word.len());
    match end {
        0 => Some(0),
        _ => word[..end].parse().ok(),
    }
}

fn real_server(
    item: &Item,
    outer: &Item,
    outside: &Outside,
    service: &Service,
    inhibit: bool,
) -> Result<Server, &'static str> {
    let bad = "the value is not an address and a port";
    let ip: IpAddr = item.word(1).parse().map_err(|_| bad)?;
    let port = match item.word(2) {
        "" => 0,
        word => port(word).ok_or(bad)?,
    };
    let mut server = Server {
        at: item.at().to_string(),
        address: match port {
            0 => bare(ip),
            port => endpoint(ip, port),
        },
        inhibit: inhibit.then(String::new),
        ..Server::default()
    };
    let own = item;
    for item in item.items() {
        let value = item.word(1);
        server.lost.extend(passed_over(item));
        server.lost.extend(checks::bad_timing(item, false));
        match item.name() {
            "weight" => match value.parse::<i32>() {
                Ok(weight) if weight >= 0 => {
                    server.keys.insert("weight", weight.to_string());
                }
                _ if value.starts_with('-') => {
                    server.lose(item.lost("the value is not a weight: the result is 1"));
                }
                _ => {
                    let weight = leading(value).unwrap_or(1);
                    server.keys.insert("weight", weight.to_string());
                    let why = format!(
                        "the value is not a weight: the result is {weight}, as with keepalived"
                    );
                    server.lose(item.lost(&why));
                }
            },
            "inhibit_on_failure" if is_on(item) => {
                server.inhibit = Some(format!("{}: inhibit_on_failure", item.at()));
            }
            "inhibit_on_failure" => {
                if server.inhibit.take().is_some() {
                    server.lose(item.lost("the service's on_check_failure applies to all servers"));
                }
            }
            "uthreshold" | "lthreshold" => match value.parse::<u32>() {
                Ok(number) => {
                    let key = match item.name() {
                        "uthreshold" => "max_connections",
                        _ => "resume_below",
                    };
                    server.keys.insert(key, number.to_string());
                }
                Err(_) => server.lose(item.lost("the value is not a number")),
            },
            "lb_kind" | "lvs_method" => match Method::parse(item, &mut server.lost) {
                Some(method) if method.forward == "fullnat" && service.local_group.is_none() => {
                    server.lose(item.lost("full NAT needs local_addresses in [dataplane]"));
                }
                Some(method) => method.set(&mut server.keys, Some(&service.keys)),
                None => server.lose(item.lost("the service's method is used")),
            },
            name if checks::is_known(name) => {
                let context = Context {
                    around: [own, outer],
                    port,
                    script_user: outside.script_user.as_deref(),
                };
                let check = checks::keepalived(item, &context, &mut server.lost);
                add_check(&mut server, check, item);
            }
            "delay_loop" | "retry" | "delay_before_retry" | "connect_timeout" | "virtualhost" => {}
            "warmup" => server.lose(item.lost(checks::WARMUP)),
            "alpha" if !is_on(item) || outer.find("alpha").is_some_and(is_on) => {}
            "alpha" => server.lose(item.lost("set `start_down` of the service")),
            "notify_up" | "notify_down" => {
                server.lose(item.lost("lvsd runs only the program of `notify` in [lvsd], for all events of all services"));
            }
            "smtp_alert" if !is_on(item) => {}
            "smtp_alert" => {
                server.lose(item.lost("lvsd sends no e-mail: use `notify` in [lvsd]"));
            }
            name if name.ends_with("_CHECK") => {
                let other = own.items().iter().any(|item| checks::is_known(item.name()));
                server.lose(item.lost(match other {
                    false => "the server is not checked",
                    true => "the server is checked without it",
                }));
                if server.check.is_empty() {
                    server.check = checks::none();
                }
            }
            "" => {}
            "nb_get_retry" => server.lose(item.lost("lvsd ignores it, as keepalived does here")),
            _ => server.lose(item.lost("lvsd has no equivalent")),
        }
    }
    let number = |key| {
        server
            .keys
            .get(key)
            .and_then(|number: &String| number.parse().ok())
    };
    let (lower, upper) = (number("resume_below"), number("max_connections"));
    if lower.unwrap_or(0_u32) > upper.unwrap_or(0) {
        server.keys.remove("resume_below");
        let at = own.at();
        server.lose(format!(
            "{at}: lthreshold: it is above uthreshold, which is 0 if missing"
        ));
    }
    Ok(server)
}

/// Sets the check of a server. keepalived requires all checks of a server to succeed; lvsd has one
/// check for each server, so that the deepest check is converted.
fn add_check(server: &mut Server, check: Check, item: &Item) {
    let other = if server.check.is_empty() || checks::depth(&check) > checks::depth(&server.check) {
        std::mem::replace(&mut server.check, check)
    } else {
        check
    };
    if let Some(kind) = other.get("type") {
        server.lose(format!(
            "{}: a second check, {}: lvsd has one check for each server",
            item.at(),
            kind.trim_matches('"')
        ));
    }
}

//! ldirectord's file: global lines, and below each `virtual=` the indented lines of a service.

use std::net::{IpAddr, Ipv4Addr};

use super::checks::{Check, Negotiation};
use super::{ADDRESSES_MAX, Server, Service, bare, duration, endpoint, port, quote, scheduler};

/// What services inherit.
#[derive(Clone, Debug)]
struct Defaults {
    interval: f64,
    timeout: Option<f64>,
    failures: u32,
    quiescent: bool,
    fallback: Option<String>,
}

pub(super) fn read(text: &str) -> (Vec<Service>, Vec<String>, String) {
    let mut lost = Vec::new();
    let mut defaults = Defaults {
        interval: 10.0,
        timeout: None,
        failures: 1,
        quiescent: false,
        fallback: None,
    };
    let mut services: Vec<Building> = Vec::new();
    let mut within = false;
    // Addresses that ranges may still stand for, in the whole file.
    let mut room = ADDRESSES_MAX;
    for line in text.lines() {
        let indented = line.starts_with([' ', '\t']);
        let bare = without_comment(line).trim();
        if bare.is_empty() || bare.starts_with('#') {
            continue;
        }
        let (key, value) = match bare.split_once('=') {
            Some((key, value)) => (key.trim(), value.trim()),
            None => (bare, ""),
        };
        if !indented {
            within = false;
            if key == "virtual" || key == "virtual6" {
                services.push(Building::new(value, defaults.clone(), &mut lost));
                within = true;
            } else {
                global(key, value, &mut defaults, &mut lost);
            }
        } else if let (true, Some(service)) = (within, services.last_mut()) {
            service.line(key, value, &mut room);
        } else {
            lost.push(bare.to_owned());
        }
    }
    let done = services
        .into_iter()
        .filter_map(|service| service.finish(&mut lost))
        .collect();
    (done, lost, String::new())
}

/// A line without the comment that stands behind a value.
fn without_comment(line: &str) -> &str {
    let (mut quoted, mut blank) = (false, true);
    for (at, c) in line.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '#' if blank && !quoted => return &line[..at],
            _ => {}
        }
        blank = c.is_whitespace();
    }
    line
}

fn yes(value: &str) -> bool {
    value.eq_ignore_ascii_case("yes") || value.eq_ignore_ascii_case("on")
}

fn unquoted(value: &str) -> &str {
    value.trim_matches('"')
}

fn global(key: &str, value: &str, defaults: &mut Defaults, lost: &mut Vec<String>) {
    let number = value
        .parse::<f64>()
        .ok()
        .filter(|n| n.is_finite() && *n > 0.0);
    match (key, number) {
        ("checkinterval", Some(n)) => defaults.interval = n,
        ("checktimeout" | "negotiatetimeout", Some(n)) => defaults.timeout = Some(n),
        ("failurecount", Some(n)) => defaults.failures = count(n),
        ("quiescent", _) => defaults.quiescent = yes(value),
        ("fallback" | "fallback6", _) => defaults.fallback = Some(value.to_owned()),
        // The file is loaded when somebody says so; the log is lvsd's.
        ("autoreload" | "logfile" | "supervised" | "fork" | "maintenancedir" | "cleanstop", _) => {}
        _ => lost.push(format!("{key}={value}")),
    }
}

fn count(n: f64) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped"
    )]
    let count = n.clamp(1.0, 1000.0) as u32;
    count
}

struct Building {
    service: Service,
    defaults: Defaults,
    port: u16,
    six: bool,
    check: String,
    check_port: Option<u16>,
    protocol: Option<String>,
    negotiation: Negotiation,
    bad: Option<String>,
}

impl Building {
    fn new(value: &str, defaults: Defaults, _: &mut [String]) -> Self {
        let mut new = Self {
            service: Service::default(),
            defaults,
            port: 0,
            six: value.starts_with('['),
            check: "negotiate".to_owned(),
            check_port: None,
            protocol: None,
            negotiation: Negotiation::default(),
            bad: None,
        };
        if let Ok(mark) = value.parse::<u32>() {
            new.service.fwmark = Some((mark, false));
            new.check = "connect".to_owned();
        } else if let Some((ip, number)) = address(value)
            && let Some(number) = number
        {
            new.port = number;
            new.service.addresses = vec![endpoint(ip, number)];
        } else {
            new.bad = Some(format!(
                "virtual={value}: names are not resolved; write address and port"
            ));
        }
        new
    }

    fn line(&mut self, key: &str, value: &str, room: &mut usize) {
        let number = value
            .parse::<f64>()
            .ok()
            .filter(|n| n.is_finite() && *n > 0.0);
        match key {
            "real" | "real6" => self.real(value, room),
            "scheduler" => match scheduler(value) {
                Ok(name) => self.service.string("scheduler", name),
                Err(why) => self.service.lose(why),
            },
            "persistent" => {
                let seconds = value.parse::<u64>().unwrap_or(600).clamp(1, 31 * 86_400);
                let mask = self.service.keys.remove("netmask");
                let mask = mask
                    .map(|mask| format!(", netmask = {mask}"))
                    .unwrap_or_default();
                self.service.keys.insert(
                    "persistence",
                    format!("{{ timeout = \"{seconds}s\"{mask} }}"),
                );
            }
            "netmask" => match self.service.keys.get_mut("persistence") {
                Some(persistence) => {
                    let inner = persistence.trim_matches(['{', '}', ' ']).to_owned();
                    *persistence = format!("{{ {inner}, netmask = {} }}", quote(value));
                }
                None => {
                    self.service.keys.insert("netmask", quote(value));
                }
            },
            "protocol" => self.protocol = Some(value.to_owned()),
            "checktype" => self.check = value.to_owned(),
            "checkport" => self.check_port = value.parse().ok(),
            "checkinterval" => self.defaults.interval = number.unwrap_or(self.defaults.interval),
            "checktimeout" | "negotiatetimeout" => self.defaults.timeout = number,
            "failurecount" | "checkcount" => self.defaults.failures = number.map_or(1, count),
            "quiescent" => self.defaults.quiescent = yes(value),
            "fallback" | "fallback6" => self.defaults.fallback = Some(value.to_owned()),
            "ops" => {
                if yes(value) {
                    self.service.keys.insert("one_packet", "true".to_owned());
                }
            }
            "name" => self.service.string("name", unquoted(value)),
            // What other negotiations need; that there is none is said once.
            "login" | "passwd" | "database" | "secret" | "load" | "ignorecase" => {}
            _ if self.negotiation.take(key, value) => {}
            _ => self.service.lose(format!("{key}={value}")),
        }
    }

    fn real(&mut self, value: &str, room: &mut usize) {
        let mut words = value.split_whitespace();
        let (Some(target), method) = (words.next(), words.next().unwrap_or("masq")) else {
            self.service.lose(format!("real={value}"));
            return;
        };
        let rest: Vec<&str> = words.collect();
        let forward = match method {
            "gate" => "dr",
            "masq" => "nat",
            "ipip" => "tun",
            other => {
                self.service
                    .lose(format!("real={value}: {other} is not a forwarding method"));
                return;
            }
        };
        let (ips, number) = match range(target, room) {
            Ok(range) => range,
            Err(why) => {
                self.service.lose(format!("real={value}: {why}"));
                return;
            }
        };
        let weight = rest.first().and_then(|word| word.parse::<u32>().ok());
        let more = &rest[usize::from(weight.is_some())..];
        for ip in ips {
            let mut server = Server {
                address: match number {
                    Some(0) | None => bare(ip),
                    Some(port) => endpoint(ip, port),
                },
                ..Server::default()
            };
            server.keys.insert("forward", quote(forward));
            if let Some(weight) = weight {
                server.keys.insert("weight", weight.to_string());
            }
            if !more.is_empty() {
                server
                    .lost
                    .push(format!("request and reply {}", more.join(" ")));
            }
            self.six |= ip.is_ipv6();
            self.service.servers.push(server);
        }
    }

    fn finish(mut self, lost: &mut Vec<String>) -> Option<Service> {
        if let Some(bad) = self.bad {
            lost.push(bad);
            return None;
        }
        self.service.keys.remove("netmask");
        // Its default, which is not lvsd's.
        if !self.service.keys.contains_key("scheduler") {
            self.service.string("scheduler", "wrr");
        }
        if self.protocol.is_none() && self.port == 53 {
            self.protocol = Some("udp".to_owned());
        }
        if let Some((_, six)) = &mut self.service.fwmark {
            *six = self.six;
        }
        match self.protocol.as_deref() {
            Some("udp") if self.service.fwmark.is_none() => self.service.string("protocol", "udp"),
            Some("tcp" | "fwm" | "udp") | None => {}
            Some(other) => self.service.lose(format!("protocol={other}")),
        }
        self.checks();
        let quiesce = if self.defaults.quiescent {
            "quiesce"
        } else {
            "remove"
        };
        self.service.string("on_check_failure", quiesce);
        if let Some(fallback) = self.defaults.fallback.take() {
            self.fallback(&fallback);
        }
        Some(self.service)
    }

    fn checks(&mut self) {
        let interval = self.defaults.interval.clamp(0.01, 86_400.0);
        if let Some(timeout) = self.defaults.timeout.filter(|timeout| *timeout > interval) {
            self.service
                .lose(super::checks::too_long("checktimeout", timeout, interval));
        }
        // Unless it says something else, a negotiation has 30 seconds.
        let default = match self.check.as_str() {
            "connect" | "ping" | "external" => 5.0,
            _ => 30.0,
        };
        let timeout = self.defaults.timeout.unwrap_or(default).clamp(0.01, 600.0);
        let mut check = Check::new();
        if let Some(port) = self.check_port {
            check.insert("port", port.to_string());
        }
        check.insert("interval", duration(interval));
        check.insert("timeout", duration(timeout.min(interval)));
        check.insert("rise", "1".to_owned());
        check.insert("fall", self.defaults.failures.to_string());
        let with_type = |mut check: Check, kind: &str| {
            check.insert("type", quote(kind));
            check
        };
        let datagrams = self.protocol.as_deref() == Some("udp");
        let number = self.check.parse::<f64>().is_ok();
        let kind = match self.check.as_str() {
            _ if number => "negotiate",
            kind => kind,
        };
        // Without a port nothing can be connected to.
        let portless = self.check_port.is_none()
            && self.port == 0
            && self
                .service
                .servers
                .iter()
                .any(|s| s.address.parse::<std::net::SocketAddr>().is_err());
        if portless && matches!(kind, "connect" | "negotiate") {
            self.service
                .lose("checks: without `checkport` nothing can be checked");
            return;
        }
        let check = match kind {
            "on" => return,
            "off" => {
                self.service.lose(
                    "checktype=off: ldirectord uses none of the servers; here they are used, without a check",
                );
                return;
            }
            "connect" => with_type(check, "tcp"),
            "ping" => {
                check.remove("port");
                with_type(check, "ping")
            }
            "external" => {
                let first = self.service.addresses.first();
                let address = first.and_then(|text| address(text));
                let (address, port) = match (address, self.service.fwmark) {
                    (Some((ip, port)), _) => (ip.to_string(), port.unwrap_or(0).to_string()),
                    (None, mark) => (mark.unwrap_or_default().0.to_string(), "-".to_owned()),
                };
                match self.negotiation.external(check, &address, &port) {
                    Some(check) => check,
                    None => {
                        self.service.lose(
                            "checktype=external: `checkcommand` is no whole path: the servers are not checked",
                        );
                        return;
                    }
                }
            }
            "negotiate" => {
                if number {
                    self.service
                        .lose(format!("checktype={}: each check negotiates", self.check));
                }
                let port = self.check_port.unwrap_or(self.port);
                match self.negotiation.negotiate(check.clone(), port, datagrams) {
                    Ok(check) => check,
                    Err(what) if datagrams => {
                        self.service.lose(format!(
                            "checktype={}, {what}: the servers are not checked",
                            self.check
                        ));
                        return;
                    }
                    Err(what) => {
                        self.service.lose(format!(
                            "checktype={}, {what}: a TCP connection is tried in its place",
                            self.check
                        ));
                        with_type(check, "tcp")
                    }
                }
            }
            other => {
                self.service
                    .lose(format!("checktype={other}: the servers are not checked"));
                return;
            }
        };
        self.service.check = check;
    }

    fn fallback(&mut self, value: &str) {
        let mut words = value.split_whitespace();
        let target = words.next().unwrap_or_default();
        let forward = match words.next() {
            Some("masq") => "nat",
            Some("ipip") => "tun",
            _ => "dr",
        };
        match address(target) {
            // The director itself: the engine serves no local node of loopback.
            Some((ip, _)) if ip.is_loopback() => self.service.lose(format!(
                "fallback={value}: give the address of another host as `sorry`, or one of this host's own"
            )),
            Some((ip, number)) => {
                let port = number.filter(|port| *port != 0).unwrap_or(self.port);
                self.service.keys.insert(
                    "sorry",
                    format!("{{ address = {}, forward = \"{forward}\" }}", quote(&endpoint(ip, port))),
                );
            }
            None => self.service.lose(format!("fallback={value}")),
        }
    }
}

/// `192.0.2.1:80`, `[2001:db8::1]:http`, `192.0.2.1`.
fn address(text: &str) -> Option<(IpAddr, Option<u16>)> {
    if let Ok(ip) = text.trim_matches(['[', ']']).parse() {
        return Some((ip, None));
    }
    let (ip, word) = text.rsplit_once(':')?;
    let ip = ip.trim_matches(['[', ']']).parse().ok()?;
    Some((ip, Some(port(word)?)))
}

/// `10.0.0.1->10.0.0.9:80`; takes what it stands for from `room`.
fn range(text: &str, room: &mut usize) -> Result<(Vec<IpAddr>, Option<u16>), String> {
    let names = || "names are not resolved; write addresses".to_owned();
    let Some((first, last)) = text.split_once("->") else {
        let (ip, port) = address(text).ok_or_else(names)?;
        return Ok((vec![ip], port));
    };
    let first: Ipv4Addr = first.parse().map_err(|_| names())?;
    let (IpAddr::V4(last), port) = address(last).ok_or_else(names)? else {
        return Err("a range is of IPv4 addresses".to_owned());
    };
    let (first, last) = (u32::from(first), u32::from(last));
    if first > last {
        return Err("the last address is before the first".to_owned());
    }
    let left = usize::try_from(last - first)
        .ok()
        .and_then(|before| room.checked_sub(before)?.checked_sub(1));
    *room = left.ok_or_else(|| {
        format!("the ranges of a file stand for at most {ADDRESSES_MAX} addresses; write the servers that there are")
    })?;
    let ips = (first..=last).map(|ip| Ipv4Addr::from(ip).into()).collect();
    Ok((ips, port))
}

//! Converts ldirectord's file: global lines and, below each `virtual=`, the indented lines of a
//! service.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr};

use super::checks::{self, Check};
use super::negotiation::{Negotiated, Negotiation, first, quoted, word};
use super::service::{
    Keys, Server, Service, Sorry, asks_a_port, bare, duration, endpoint, fix_port, is_mask, port,
    quote, scheduler,
};
use super::{ADDRESSES_MAX, Read};

#[derive(Clone, Debug, Default)]
struct Directive {
    line: usize,
    text: String,
}

impl Directive {
    fn lost(&self, why: &str) -> String {
        format!("line {}: {}: {why}", self.line, self.text)
    }
}

/// Global settings of ldirectord's file, or settings of one service.
#[derive(Clone, Debug, Default)]
struct Settings {
    interval: Option<f64>,
    /// Timeout in seconds of checks other than negotiate checks, and of negotiate checks without a
    /// timeout of their own.
    check_timeout: Option<f64>,
    /// Timeout in seconds of negotiate checks, and of other checks without a timeout of their own.
    negotiate_timeout: Option<f64>,
    failures: Option<u32>,
    /// Number of pings of a check.
    attempts: Option<u32>,
    quiescent: Option<bool>,
    clean_stop: Option<bool>,
    fallback: Option<(Directive, String)>,
    fallback6: Option<(Directive, String)>,
    fork: bool,
}

impl Settings {
    /// Reads a line; returns `false` if its key is not one of these settings.
    fn take(
        &mut self,
        key: &str,
        value: &str,
        directive: &Directive,
        lost: &mut Vec<String>,
    ) -> bool {
        let number = digits(value).parse::<f64>().ok();
        let number = number.filter(|n| *n > 0.0 && n.is_finite());
        let numbers = [
            "checkinterval",
            "checktimeout",
            "negotiatetimeout",
            "failurecount",
            "checkcount",
        ];
        if numbers.contains(&key) && number.is_none() {
            lost.push(directive.lost("the value is not a number above 0"));
            return true;
        }
        let switch = ["quiescent", "cleanstop"].contains(&key);
        if switch && !yes(value) && !no(value) {
            lost.push(
                directive.lost("the value is neither yes nor no, and ldirectord refuses the file"),
            );
            return true;
        }
        match key {
            "checkinterval" => self.interval = number,
            "checktimeout" => self.check_timeout = number,
            "negotiatetimeout" => self.negotiate_timeout = number,
            "failurecount" => self.failures = number.map(count),
            "checkcount" => self.attempts = number.map(count),
            "quiescent" => self.quiescent = Some(yes(value)),
            "cleanstop" => self.clean_stop = Some(yes(value)),
            "fallback" => self.fallback = Some((directive.clone(), value.to_owned())),
            "fallback6" => self.fallback6 = Some((directive.clone(), value.to_owned())),
            _ => return false,
        }
        true
    }
}

pub(super) fn read(text: &str) -> Read {
    let mut lost = Vec::new();
    let mut globals = Settings::default();
    let mut services: Vec<Building> = Vec::new();
    let mut within = false;
    // Number of addresses that ranges may still contain, in the whole file.
    let mut room = ADDRESSES_MAX;
    for (number, line) in (1..).zip(text.lines()) {
        let indented = line.starts_with([' ', '\t']);
        let line = match indented && within {
            true => below_virtual(line),
            false => Cow::Borrowed(without_comment(line)),
        };
        let bare = line.trim();
        if bare.is_empty() || bare.starts_with('#') {
            continue;
        }
        let (key, value) = match bare.split_once('=') {
            Some((key, value)) => (key.trim(), value.trim()),
            None => (bare, ""),
        };
        // Messages do not contain passwords.
        let shown = match key {
            "passwd" | "secret" => key,
            _ => bare,
        };
        let directive = Directive {
            line: number,
            text: shown.chars().take(160).collect(),
        };
        let is_virtual = key == "virtual" || key == "virtual6";
        match (indented, within, services.last_mut()) {
            (true, _, _) if is_virtual => {
                within = false;
                lost.push(
                    directive.lost("it must not be indented; ldirectord refuses the file, too"),
                );
            }
            (true, true, Some(service)) => service.line(key, value, &directive, &mut room),
            (true, _, _) => {
                lost.push(directive.lost("no `virtual` in the first column precedes this line"));
            }
            (false, _, _) if is_virtual => {
                services.push(Building::new(value, directive));
                within = true;
            }
            (false, _, _) => {
                within = false;
                global(key, value, &directive, &mut globals, &mut lost);
            }
        }
    }
    let services = services
        .into_iter()
        .filter_map(|service| service.finish(&globals, &mut lost))
        .collect();
    Read {
        services,
        lost,
        ..Read::default()
    }
}

/// Cleans a line below `virtual` as ldirectord does: `#` begins a comment even within quotes, and a
/// tab is four spaces.
fn below_virtual(line: &str) -> Cow<'_, str> {
    let end = line.find('#').unwrap_or(line.len());
    match line[..end].contains('\t') {
        true => Cow::Owned(line[..end].replace('\t', "    ")),
        false => Cow::Borrowed(&line[..end]),
    }
}

/// Removes the comment of a global line: `#` at its start or after whitespace, outside of quotes.
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

fn no(value: &str) -> bool {
    value.eq_ignore_ascii_case("no") || value.eq_ignore_ascii_case("off")
}

/// The first sequence of digits in a value.
fn digits(value: &str) -> &str {
    first(value, |c| c.is_ascii_digit())
}

/// The reason why e-mail settings are not converted.
const MAIL: &str = "lvsd sends no e-mail: use `notify` in [lvsd]";

fn global(
    key: &str,
    value: &str,
    directive: &Directive,
    globals: &mut Settings,
    lost: &mut Vec<String>,
) {
    if globals.take(key, value, directive, lost) {
        return;
    }
    let why = match key {
        "fork" => {
            globals.fork = yes(value);
            return;
        }
        "supervised" if !yes(value) && !value.is_empty() => return,
        "supervised" => "lvsd runs in the foreground",
        "logfile" => "lvsd logs to standard error, which systemd keeps in the journal",
        "autoreload" if !yes(value) => return,
        "autoreload" => "the file is read again with `lvsd reload`",
        "readdquiescent" => "lvsd restores servers that another program removed",
        "maintenancedir" => {
            "lvsd ignores the files of that directory, and uses the servers that they disable: use `lvsadm maintenance`"
        }
        "callback" | "execute" => "lvsd runs the program of `notify` in [lvsd] instead",
        "fallbackcommand" => {
            "lvsd runs only the program of `notify` in [lvsd], for all events of all services"
        }
        "emailalert" | "emailalertfrom" | "emailalertfreq" | "emailalertstatus" | "smtp" => MAIL,
        "real" | "real6" | "service" | "scheduler" | "protocol" | "checktype" | "request"
        | "receive" | "virtualhost" | "persistent" | "netmask" | "checkport" => {
            "it must be indented, below its `virtual`"
        }
        _ => "ldirectord has no such keyword",
    };
    lost.push(directive.lost(why));
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
    own: Settings,
    directive: Directive,
    port: u16,
    six: bool,
    check: String,
    check_port: Option<u16>,
    protocol: Option<String>,
    negotiation: Negotiation,
    /// Request and expected response of each server, in the order of servers; `None` for a server
    /// that uses the service's request and response.
    of_servers: Vec<Option<(String, String)>>,
    persistent: Option<u64>,
    netmask: Option<(Directive, String)>,
    one_packet: Option<Directive>,
    flags: Vec<String>,
    flags_directive: Directive,
    bad: Option<&'static str>,
}

impl Building {
    fn new(value: &str, directive: Directive) -> Self {
        let mut new = Self {
            service: Service {
                at: format!("line {}", directive.line),
                ..Service::default()
            },
            own: Settings::default(),
            six: directive.text.starts_with("virtual6") || value.starts_with('['),
            directive,
            port: 0,
            check: "negotiate".to_owned(),
            check_port: None,
            protocol: None,
            negotiation: Negotiation::default(),
            of_servers: Vec::new(),
            persistent: None,
            netmask: None,
            one_packet: None,
            flags: Vec::new(),
            flags_directive: Directive::default(),
            bad: None,
        };
        if let Some(mark) = value.parse::<u32>().ok().filter(|mark| *mark > 0) {
            new.service.fwmark = Some((mark, false));
            new.negotiation.service = Some("none".to_owned());
        } else if let Some((ip, number)) = address(value)
            && let Some(number) = number
        {
            new.port = number;
            new.service.addresses = vec![endpoint(ip, number)];
        } else {
            new.bad = Some("the value is not an address and a port (names are not resolved)");
        }
        new
    }

    fn line(&mut self, key: &str, value: &str, directive: &Directive, room: &mut usize) {
        if self.own.take(key, value, directive, &mut self.service.lost) {
            return;
        }
        let why = match key {
            "real" | "real6" => return self.real(value, directive, room),
            "scheduler" => {
                match scheduler(first(value, |c| c.is_ascii_lowercase())) {
                    Ok(name) => self.service.string("scheduler", name),
                    Err(why) => self.service.lose(format!("line {}: {why}", directive.line)),
                }
                return;
            }
            "schedflags" => {
                let known = [
                    "sh-fallback",
                    "sh-port",
                    "mh-fallback",
                    "mh-port",
                    "flag-1",
                    "flag-2",
                    "flag-3",
                ];
                let (value, more) = value.split_once(char::is_whitespace).unwrap_or((value, ""));
                if !more.is_empty() {
                    let why = format!("ldirectord ignores `{more}`");
                    self.service.lose(directive.lost(&why));
                }
                let flags: Vec<&str> = value.split(',').filter(|flag| !flag.is_empty()).collect();
                if flags.iter().all(|flag| known.contains(flag)) {
                    self.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
                    self.flags_directive = directive.clone();
                    return;
                }
                "the value is not a list of scheduler flags"
            }
            "persistent" => match digits(value).parse::<u64>() {
                Ok(seconds) => {
                    self.persistent = Some(seconds);
                    return;
                }
                Err(_) => "the value is not a number of seconds",
            },
            "netmask" => {
                self.netmask = Some((directive.clone(), value.to_owned()));
                return;
            }
            "protocol" => {
                self.protocol = Some(word(value).to_owned());
                return;
            }
            "checktype" => {
                self.check = match digits(value) {
                    "" => first(value, |c| {
                        c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
                    }),
                    number => number,
                }
                .to_owned();
                return;
            }
            "checkport" => match digits(value).parse::<u16>() {
                Ok(port) if port > 0 => {
                    self.check_port = Some(port);
                    return;
                }
                _ => "the value is not a port",
            },
            "ops" if yes(value) || no(value) => {
                self.one_packet = yes(value).then(|| directive.clone());
                return;
            }
            "ops" => "the value is neither yes nor no, and ldirectord refuses the file",
            "servicename" => {
                self.service.string("name", quoted(value).unwrap_or(value));
                return;
            }
            "login" | "passwd" | "database" | "secret" => {
                "lvsd has no check that logs in to a server"
            }
            "load" | "ignorecase" => "lvsd has no equivalent",
            "fallbackcommand" => {
                "lvsd runs only the program of `notify` in [lvsd], for all events of all services"
            }
            "emailalert" | "emailalertfreq" | "emailalertstatus" | "smtp" => MAIL,
            "comment" => "it is for e-mail, which lvsd does not send",
            "monitorfile" => "`lvsd events` shows the changes of servers",
            _ => match self.negotiation.take(key, value) {
                Some(Ok(())) => return,
                Some(Err(why)) => why,
                None => "ldirectord has no such keyword",
            },
        };
        self.service.lose(directive.lost(why));
    }

    fn real(&mut self, value: &str, directive: &Directive, room: &mut usize) {
        let (target, rest) = value.split_once(char::is_whitespace).unwrap_or((value, ""));
        let (method, flags) = match rest.trim_start().split_once(char::is_whitespace) {
            Some((method, flags)) => (method, flags.trim_start()),
            None => (rest.trim(), ""),
        };
        let forward = match method {
            "gate" => "dr",
            "masq" | "" => "nat",
            "ipip" => "tun",
            _ => {
                let why = format!("{method} is not a forwarding method");
                self.service.lose(directive.lost(&why));
                return;
            }
        };
        let (ips, number) = match range(target, room) {
            Ok(range) => range,
            Err(why) => {
                self.service.lose(directive.lost(&why));
                return;
            }
        };
        let mut keys = Keys::from([("forward", quote(forward))]);
        let (asked, unread) = flags_of_server(flags, &mut keys);
        for ip in ips {
            let mut server = Server {
                at: format!("line {}", directive.line),
                address: match number {
                    Some(0) | None => bare(ip),
                    Some(port) => endpoint(ip, port),
                },
                keys: keys.clone(),
                ..Server::default()
            };
            if let Some(unread) = &unread {
                server.lose(directive.lost(unread));
            }
            self.six |= ip.is_ipv6();
            self.service.servers.push(server);
            self.of_servers.push(asked.clone());
        }
    }

    fn finish(mut self, globals: &Settings, lost: &mut Vec<String>) -> Option<Service> {
        if let Some(bad) = self.bad {
            lost.push(self.directive.lost(bad));
            lost.extend(self.service.lost);
            return None;
        }
        // ldirectord's default differs from lvsd's.
        if !self.service.keys.contains_key("scheduler") {
            self.service.string("scheduler", "wrr");
        }
        self.scheduler_flags();
        if self.protocol.is_none() && self.port == 53 {
            self.protocol = Some("udp".to_owned());
        }
        if let Some((_, six)) = &mut self.service.fwmark {
            *six = self.six;
        }
        let udp = match self.protocol.as_deref() {
            Some("udp") if self.service.fwmark.is_none() => true,
            Some("tcp" | "fwm" | "udp") | None => false,
            Some(other) => {
                let why = format!("protocol={other}: tcp is used");
                self.service.lose(self.directive.lost(&why));
                false
            }
        };
        if udp {
            self.service.string("protocol", "udp");
        }
        if let Some(directive) = self.one_packet.take() {
            match udp {
                true => {
                    self.service.keys.insert("one_packet", "true".to_owned());
                }
                false => {
                    let why = "it applies to UDP services only, as with ldirectord";
                    self.service.lose(directive.lost(why));
                }
            }
        }
        self.persistence();
        self.checks(globals, udp);
        let quiescent = self.own.quiescent.or(globals.quiescent).unwrap_or(false);
        let quiesce = if quiescent { "quiesce" } else { "remove" };
        self.service.string("on_check_failure", quiesce);
        // With ldirectord's default, yes, every restart of lvsd would interrupt services.
        if self.own.clean_stop.or(globals.clean_stop).unwrap_or(false) {
            self.service
                .keys
                .insert("remove_on_exit", "true".to_owned());
        }
        let fallback = match self.six {
            true => self.own.fallback6.take().or(globals.fallback6.clone()),
            false => self.own.fallback.take().or(globals.fallback.clone()),
        };
        let other = match self.six {
            true => self.own.fallback.take(),
            false => self.own.fallback6.take(),
        };
        if let Some((directive, _)) = other {
            self.service
                .lose(directive.lost("its address family is not the service's"));
        }
        if let Some((directive, value)) = fallback {
            self.fallback(&directive, &value);
        }
        Some(self.service)
    }

    fn scheduler_flags(&mut self) {
        let scheduler = self
            .service
            .keys
            .get("scheduler")
            .cloned()
            .unwrap_or_default();
        let (known, other): (Vec<String>, Vec<String>) = std::mem::take(&mut self.flags)
            .into_iter()
            .partition(|flag| {
                let owner = flag.split('-').next().unwrap_or_default();
                owner == "flag" || scheduler == quote(owner)
            });
        if !other.is_empty() {
            let why = format!("the scheduler {scheduler} has no flag {}", other.join(", "));
            self.service.lose(self.flags_directive.lost(&why));
        }
        if !known.is_empty() {
            let known: Vec<String> = known.iter().map(|flag| quote(flag)).collect();
            let known = format!("[{}]", known.join(", "));
            self.service.keys.insert("scheduler_flags", known);
        }
    }

    fn persistence(&mut self) {
        match (self.persistent, self.netmask.take()) {
            (None, None) => {}
            (None, Some((directive, _))) => self
                .service
                .lose(directive.lost("without `persistent` there is no mask, as with ldirectord")),
            (Some(seconds), mask) => {
                let seconds = seconds.clamp(1, 31 * 86_400);
                let mask = mask.filter(|(directive, mask)| {
                    let valid = is_mask(mask, self.six);
                    if !valid {
                        self.service.lose(
                            directive.lost("it is not a netmask: each address counts on its own"),
                        );
                    }
                    valid
                });
                let mask = mask.map(|(_, mask)| format!(", netmask = {}", quote(&mask)));
                let keys = format!("{{ timeout = \"{seconds}s\"{} }}", mask.unwrap_or_default());
                self.service.keys.insert("persistence", keys);
            }
        }
    }

    /// Port, intervals, timeout, `rise` and `fall` of a check of this kind, as lvsd's keys.
    fn rhythm(&mut self, globals: &Settings, kind: &str) -> Check {
        let (own, all) = (&self.own, globals);
        let mut interval = all.interval.unwrap_or(10.0);
        if let Some(of_service) = own.interval {
            match globals.fork {
                true => interval = of_service,
                false => self.service.lost.push(format!(
                    "{}: checkinterval={of_service}: ldirectord ignores it without fork=yes and uses {interval} s",
                    self.service.at
                )),
            }
        }
        let timeout = match kind {
            "negotiate" => own
                .negotiate_timeout
                .or(own.check_timeout)
                .or(all.negotiate_timeout)
                .or(all.check_timeout)
                .unwrap_or(30.0),
            _ => own
                .check_timeout
                .or(own.negotiate_timeout)
                .or(all.check_timeout)
                .or(all.negotiate_timeout)
                .unwrap_or(5.0),
        };
        let attempts = match kind {
            "ping" => own.attempts.or(all.attempts).unwrap_or(1),
            _ => 1,
        };
        let failures = own.failures.or(all.failures).unwrap_or(1);
        let mut check = Check::new();
        if let Some(port) = self.check_port {
            check.insert("port", port.to_string());
        }
        check.insert("interval", duration(interval.clamp(0.01, 86_400.0)));
        check.insert("timeout", duration(timeout.clamp(0.01, 600.0)));
        check.insert("rise", "1".to_owned());
        let fall = failures.saturating_mul(attempts).min(1000);
        check.insert("fall", fall.to_string());
        if fall > 1 && failures > 1 {
            check.insert("fast_interval", duration(interval.clamp(0.01, 86_400.0)));
        }
        check
    }

    fn checks(&mut self, globals: &Settings, udp: bool) {
        let number = self.check.parse::<u32>().is_ok();
        let protocol = self.negotiation.protocol(self.port).to_owned();
        let none = protocol == "none";
        let kind = match self.check.as_str() {
            // Without negotiation, every check is a connection.
            _ if number && none && udp => "ping",
            _ if number && none => "connect",
            _ if number => "negotiate",
            "connect" if udp => "ping",
            kind => kind,
        }
        .to_owned();
        let check = self.rhythm(globals, &kind);
        let at = self.directive.line;
        let lose = |service: &mut Service, why: &str| {
            service.lost.push(format!("line {at}: {why}"));
        };
        let with_type = |mut check: Check, kind: &str| {
            check.insert("type", quote(kind));
            check
        };
        self.service.check = match kind.as_str() {
            "on" => return,
            "off" => {
                let why = "checktype=off: ldirectord uses none of the servers; lvsd uses them without a check";
                lose(&mut self.service, why);
                return;
            }
            "connect" => with_type(check, "tcp"),
            "ping" => {
                let mut check = check;
                check.remove("port");
                with_type(check, "ping")
            }
            "external" => {
                let first = self.service.addresses.first();
                let address = first.and_then(|text| address(text));
                let (address, port) = match (address, self.service.fwmark) {
                    (Some((ip, port)), _) => (ip.to_string(), port.unwrap_or(0).to_string()),
                    (None, mark) => (mark.unwrap_or_default().0.to_string(), "0".to_owned()),
                };
                match self.negotiation.external(check, &address, &port) {
                    Ok(check) => {
                        let why =
                            "checkcommand runs as nobody, not as root; set `user` of the check";
                        lose(&mut self.service, why);
                        let command = self.negotiation.command.as_deref().unwrap_or_default();
                        if command.contains(char::is_whitespace) {
                            let why = format!(
                                "checkcommand={command}: ldirectord uses the whole line as the name of a program, so that no server passes its check; lvsd runs the program with its arguments"
                            );
                            lose(&mut self.service, &why);
                        }
                        check
                    }
                    Err(why) => {
                        let why = format!("checktype=external, {why}: the servers are not checked");
                        lose(&mut self.service, &why);
                        return;
                    }
                }
            }
            "negotiate" if none => {
                let why = format!(
                    "service=none{}: ldirectord does not check the servers, and neither does lvsd; set `check`",
                    match (self.port, &self.negotiation.service) {
                        (0, _) => ", which a mark without `service` has".to_owned(),
                        (_, Some(_)) => String::new(),
                        (port, None) => format!(", which port {port} has"),
                    }
                );
                lose(&mut self.service, &why);
                return;
            }
            "negotiate" => {
                if number {
                    let why = format!("checktype={}: each check negotiates", self.check);
                    lose(&mut self.service, &why);
                }
                match self.negotiation.negotiate(check.clone(), &protocol, udp) {
                    Ok(Negotiated { check: made, lost }) => {
                        for why in lost {
                            lose(&mut self.service, &why);
                        }
                        self.check_servers(&check, &protocol, udp);
                        made
                    }
                    Err(what) if udp => {
                        let why = format!("{what}: the servers are not checked");
                        lose(&mut self.service, &why);
                        return;
                    }
                    Err(what) => {
                        let why = format!("{what}: a TCP connection is checked instead");
                        lose(&mut self.service, &why);
                        with_type(check, "tcp")
                    }
                }
            }
            other => {
                let why = format!("checktype={other}: the servers are not checked");
                lose(&mut self.service, &why);
                return;
            }
        };
        self.servers_without_port();
    }

    /// Completes the checks of servers without a port: ldirectord uses the default port of the
    /// check's protocol, not the port of the virtual service. If the protocol has no default port,
    /// reports the servers; they are then checked at the port of the virtual service, if it has one.
    fn servers_without_port(&mut self) {
        let known = self.negotiation.port(self.port);
        let own = self.port;
        let service = &mut self.service;
        let bare = |server: &&mut Server| server.endpoint().is_none();
        let mut without = Vec::new();
        for server in service.servers.iter_mut().filter(bare) {
            let mut check = match server.check.is_empty() {
                true => service.check.clone(),
                false => server.check.clone(),
            };
            if check.get("type").is_some_and(|kind| kind == "\"exec\"") {
                fix_port(&mut check, 0);
                server.check = check;
                continue;
            }
            if !asks_a_port(&check) || check.contains_key("port") || known == Some(own) {
                continue;
            }
            match known {
                Some(port) => {
                    check.insert("port", port.to_string());
                    server.check = check;
                }
                None if own == 0 => server.check = checks::none(),
                None => {}
            }
            if known.is_none() {
                without.push(server.address.clone());
            }
        }
        if without.is_empty() {
            return;
        }
        let (at, servers) = (&service.at, without.join(", "));
        service.lost.push(match own {
            0 => format!("{at}: checks: without `checkport`, no check is possible: {servers}"),
            _ => format!(
                "{at}: checks: ldirectord has no port for servers without one, and uses none of them; lvsd checks port {own}: {servers}"
            ),
        });
    }

    /// Adds a check to each server with its own request and response.
    fn check_servers(&mut self, check: &Check, protocol: &str, udp: bool) {
        for (server, asked) in self.service.servers.iter_mut().zip(&self.of_servers) {
            let Some((request, receive)) = asked else {
                continue;
            };
            let own = Negotiation {
                request: Some(request.clone()),
                receive: Some(receive.clone()).filter(|text| !text.is_empty()),
                ..self.negotiation.clone()
            };
            let at = &server.at;
            match own.negotiate(check.clone(), protocol, udp) {
                Ok(Negotiated { check, lost }) => {
                    server.check = check;
                    let lost = lost.iter().map(|why| format!("{at}: {why}"));
                    server.lost.extend(lost);
                }
                Err(why) => {
                    let why =
                        format!("{at}: request {request:?}: {why}: the service's check is used");
                    server.lose(why);
                }
            }
        }
    }

    fn fallback(&mut self, directive: &Directive, value: &str) {
        let mut words = value.split_whitespace();
        let target = words.next().unwrap_or_default();
        let forward = match words.next() {
            Some("masq") => "nat",
            Some("ipip") => "tun",
            _ => "dr",
        };
        match address(target) {
            Some((ip, _)) if ip.is_ipv6() != self.six => {
                self.service
                    .lose(directive.lost("its address family is not the service's"));
            }
            Some((ip, number)) => {
                self.service.sorry = Some(Sorry {
                    origin: format!("line {}: {}", directive.line, directive.text),
                    ip,
                    port: number.filter(|port| *port != 0),
                    keys: Keys::from([("forward", quote(forward))]),
                });
            }
            None => self.service.lose(
                directive.lost("the address or its port is not valid (names are not resolved)"),
            ),
        }
    }
}

/// Request and expected response of a server.
type Own = Option<(String, String)>;

/// Parses the words after a server's method: `5 "request", "receive" l:10 u:20`. Also returns a
/// message about the words that it does not use.
fn flags_of_server(text: &str, keys: &mut Keys) -> (Own, Option<String>) {
    let mut rest = text.trim();
    let word = rest.split_whitespace().next().unwrap_or_default();
    if let Ok(weight) = word.parse::<u32>() {
        keys.insert("weight", weight.to_string());
        rest = rest[word.len()..].trim_start();
    }
    let (asked, rest) = match pair(rest) {
        Some((asked, after)) => (Some(asked), after),
        None => (None, rest),
    };
    let mut left = Vec::new();
    let (mut lower, mut upper) = (None, None);
    for word in rest.split_whitespace() {
        let number = |letter: &str| word.strip_prefix(letter)?.parse::<u32>().ok();
        match (number("l:"), number("u:")) {
            (Some(number), _) => lower = Some(number),
            (_, Some(number)) => upper = Some(number),
            _ => left.push(word),
        }
    }
    if let Some(upper) = upper {
        keys.insert("max_connections", upper.to_string());
    }
    let mut unread = (!left.is_empty()).then(|| format!("`{}` cannot be read", left.join(" ")));
    if let Some(lower) = lower {
        if lower <= upper.unwrap_or(0) {
            keys.insert("resume_below", lower.to_string());
        } else {
            unread
                .get_or_insert_with(|| format!("`l:{lower}` is above `u:`, which is 0 if missing"));
        }
    }
    (asked, unread)
}

/// Splits `"request", "receive"` from the following text. Each part may contain quotes, and is as
/// long as possible. `None` if the text does not begin with such a pair.
fn pair(text: &str) -> Option<((String, String), &str)> {
    let inner = text.strip_prefix('"')?;
    let ends = inner.rmatch_indices('"').map(|(end, _)| end);
    ends.filter_map(|end| {
        let between = inner[end + 1..].trim_start_matches([' ', '\t']);
        let between = between.strip_prefix(',').unwrap_or(between);
        let receive = between.trim_start().strip_prefix('"')?;
        let last = receive.rfind('"')?;
        let asked = (inner[..end].to_owned(), receive[..last].to_owned());
        Some((asked, &receive[last + 1..]))
    })
    .next()
}

/// Parses an address with or without a port: `192.0.2.1:80`, `[2001:db8::1]:http`, `192.0.2.1`.
/// `None` for a name, or if the port is unknown.
fn address(text: &str) -> Option<(IpAddr, Option<u16>)> {
    if let Ok(ip) = text.trim_matches(['[', ']']).parse() {
        return Some((ip, None));
    }
    let (ip, word) = text.rsplit_once(':')?;
    let ip = ip.trim_matches(['[', ']']).parse().ok()?;
    Some((ip, Some(port(word)?)))
}

/// Expands a range, `10.0.0.1->10.0.0.9:80`, and subtracts the number of its addresses from `room`.
/// A single address is returned as it is, and not subtracted.
///
/// # Errors
/// The text is not valid, or the range has more than `room` addresses; the text is the reason.
fn range(text: &str, room: &mut usize) -> Result<(Vec<IpAddr>, Option<u16>), String> {
    let names = || "the address or its port is not valid (names are not resolved)".to_owned();
    let Some((first, last)) = text.split_once("->") else {
        let (ip, port) = address(text).ok_or_else(names)?;
        return Ok((vec![ip], port));
    };
    if first.starts_with('[') {
        return Err("a range must have IPv4 addresses; write the servers one by one".to_owned());
    }
    let first: Ipv4Addr = first.parse().map_err(|_| names())?;
    let (IpAddr::V4(last), port) = address(last).ok_or_else(names)? else {
        return Err("a range must have IPv4 addresses".to_owned());
    };
    let (first, last) = (u32::from(first), u32::from(last));
    if first > last {
        return Err("the last address is before the first".to_owned());
    }
    let left = usize::try_from(last - first)
        .ok()
        .and_then(|before| room.checked_sub(before)?.checked_sub(1));
    *room = left.ok_or_else(|| {
        format!("the ranges of a file contain at most {ADDRESSES_MAX} addresses; write only existing servers")
    })?;
    let ips = (first..=last).map(|ip| Ipv4Addr::from(ip).into()).collect();
    Ok((ips, port))
}

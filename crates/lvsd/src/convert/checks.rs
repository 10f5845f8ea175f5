//! Other programs' health checks as lvsd's.
//!
//! What comes out is read as `lvsd` reads it before it is used: a check that it would refuse
//! becomes a TCP check, or none.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::keepalived::Item;
use super::{duration, port, quote, table};
use crate::config::Config;

/// A check's keys and their values, in TOML.
pub(super) type Check = BTreeMap<&'static str, String>;

/// A kind of keepalived's: its name, ours, and the words that are read of it, beside [`RHYTHM`].
type Known = (&'static str, &'static str, &'static [&'static str]);

const KNOWN: &[Known] = &[
    ("TCP_CHECK", "tcp", &["connect_port"]),
    ("HTTP_GET", "http", &["connect_port", "url", "virtualhost"]),
    (
        "SSL_GET",
        "https",
        // It is always sent where there is a name.
        &["connect_port", "url", "virtualhost", "enable_sni"],
    ),
    ("SMTP_CHECK", "smtp", &["connect_port", "helo_name", "host"]),
    ("DNS_CHECK", "dns", &["connect_port", "name", "type"]),
    (
        "UDP_CHECK",
        "udp",
        &["connect_port", "payload", "require_reply"],
    ),
    ("PING_CHECK", "ping", &[]),
    (
        "MISC_CHECK",
        "exec",
        &["misc_path", "misc_timeout", "misc_dynamic"],
    ),
];

/// Words of every kind: how often, and for how long.
const RHYTHM: &[&str] = &[
    "delay_loop",
    "retry",
    "nb_get_retry",
    "connect_timeout",
    "delay_before_retry",
    "alpha",
    "warmup",
    "log_all_failures",
    "",
];

/// Whether a statement is a check that has a counterpart.
pub(super) fn is_known(name: &str) -> bool {
    KNOWN.iter().any(|(known, ..)| *known == name)
}

/// How much a check tells of a server: that it is there, that it listens, that it serves.
pub(super) fn depth(check: &Check) -> u8 {
    match check.get("type").map(String::as_str) {
        None => 0,
        Some("\"ping\"") => 1,
        Some("\"tcp\"") => 2,
        Some(_) => 3,
    }
}

/// No check.
pub(super) fn none() -> Check {
    Check::from([("none", String::new())])
}

/// Whether `lvsd` takes it.
fn is_valid(check: &Check) -> bool {
    let text = format!(
        "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\ncheck = {}\n\
         [[service.server]]\naddress = \"192.0.2.2:80\"\n",
        table(check)
    );
    Config::from_toml("check", &text).is_ok()
}

/// What a check says under one of these names, or else the first of the blocks around it that does.
fn setting<'a>(item: &'a Item, around: &[&'a Item], names: &[&str]) -> Option<&'a Item> {
    let said = |block: &&'a Item| names.iter().find_map(|name| block.find(name));
    said(&item).or_else(|| around.iter().find_map(said))
}

/// A check of keepalived's, of a server with this port. `around` are the blocks whose settings are
/// its defaults, the innermost first.
pub(super) fn keepalived(
    item: &Item,
    around: &[&Item],
    server_port: u16,
    lost: &mut Vec<String>,
) -> Check {
    let name = item.name();
    let Some((_, kind, words)) = KNOWN.iter().find(|(known, ..)| *known == name) else {
        return none();
    };
    let mut check = Check::from([("type", quote(kind))]);
    for item in item.items() {
        let known = words.contains(&item.name()) || RHYTHM.contains(&item.name());
        if !known {
            lost.push(format!("{name}: {}", item.text()));
        }
    }
    let host = item.find("host");
    let own = item.find("connect_port");
    let own = own.or_else(|| host?.find("connect_port"));
    let own = own.and_then(|item| port(item.word(1)));
    match *kind {
        "ping" | "exec" => {}
        _ if own.is_none() && server_port == 0 => {
            lost.push(format!("{name}: without a port nothing can be checked"));
            return none();
        }
        _ => {
            if let Some(port) = own.filter(|port| *port != 0) {
                check.insert("port", port.to_string());
            }
        }
    }
    rhythm(item, around, &mut check, lost);
    match *kind {
        "http" | "https" => pages(item, around, &mut check, lost),
        "smtp" => {
            let helo = item.find("helo_name").map(|item| item.word(1));
            if let Some(helo) = helo.filter(|helo| !helo.is_empty()) {
                check.insert("helo", quote(helo));
            }
            let within = host.map_or(&[][..], Item::items);
            for item in within.iter().filter(|item| item.name() != "connect_port") {
                lost.push(format!("{name}: {}", item.text()));
            }
        }
        "dns" => {
            if let Some(item) = item.find("name") {
                check.insert("name", quote(item.word(1)));
            }
            if let Some(item) = item.find("type") {
                check.insert("record", quote(&item.word(1).to_ascii_uppercase()));
            }
        }
        "udp" => datagram(item, &mut check, lost),
        "exec" => program(item, &mut check),
        _ => {}
    }
    if is_valid(&check) {
        return check;
    }
    instead(name, kind, check, lost)
}

/// What a check becomes that `lvsd` would refuse.
fn instead(name: &str, kind: &str, mut check: Check, lost: &mut Vec<String>) -> Check {
    let stream = matches!(kind, "http" | "https" | "smtp" | "tcp");
    let common = [
        "port",
        "interval",
        "fast_interval",
        "timeout",
        "rise",
        "fall",
    ];
    check.retain(|key, _| common.contains(key));
    check.insert("type", quote("tcp"));
    if stream && is_valid(&check) {
        lost.push(format!("{name}: a TCP connection is tried in its place"));
        return check;
    }
    lost.push(format!("{name}: the server is not checked"));
    none()
}

/// How often, and for how long.
fn rhythm(item: &Item, around: &[&Item], check: &mut Check, lost: &mut Vec<String>) {
    let number = |names: &[&str]| {
        setting(item, around, names)?
            .word(1)
            .parse::<f64>()
            .ok()
            .filter(|n| n.is_finite())
    };
    let interval = number(&["delay_loop"]).unwrap_or(60.0);
    let interval = interval.clamp(0.01, 86_400.0);
    let program = item.name() == "MISC_CHECK";
    let timeout = match program {
        // keepalived gives a program as long as the interval.
        true => item.number("misc_timeout").filter(|n| n.is_finite()),
        false => number(&["connect_timeout"]),
    };
    if let Some(timeout) = timeout.filter(|timeout| *timeout > interval) {
        lost.push(too_long(item.name(), timeout, interval));
    }
    let default = if program { interval } else { 5.0 };
    let timeout = timeout.unwrap_or(default).clamp(0.01, 600.0);
    let retry = number(&["retry", "nb_get_retry"]).unwrap_or(match item.name() {
        "MISC_CHECK" => 0.0,
        "DNS_CHECK" => 3.0,
        _ => 1.0,
    });
    let fall = (retry + 1.0).clamp(1.0, 1000.0);
    check.insert("interval", duration(interval));
    check.insert("timeout", duration(timeout.min(interval)));
    check.insert("rise", "1".to_owned());
    check.insert("fall", format!("{fall:.0}"));
    // It is waited only before another attempt.
    if let Some(pause) = number(&["delay_before_retry"]).filter(|_| fall > 1.0) {
        check.insert("fast_interval", duration(pause.clamp(0.01, interval)));
    }
}

/// What to say of a timeout that is cut: the next check does not begin before it.
pub(super) fn too_long(what: &str, timeout: f64, interval: f64) -> String {
    format!(
        "{what}: a timeout of {timeout} s, longer than the {interval} s from check to check: \
         after those it has failed"
    )
}

/// Pages of a web server.
fn pages(item: &Item, around: &[&Item], check: &mut Check, lost: &mut Vec<String>) {
    let name = item.name();
    let host = setting(item, around, &["virtualhost"]);
    let mut host = host.map(|item| item.word(1).to_owned());
    let mut pages = Vec::new();
    for url in item.items().iter().filter(|item| item.name() == "url") {
        let mut page = Check::new();
        for item in url.items() {
            match item.name() {
                "path" => {
                    page.insert("path", quote(item.word(1)));
                }
                "status_code" => {
                    let ranges = item.words.get(1..).unwrap_or_default().join(",");
                    page.insert("status", quote(&ranges));
                }
                "regex" if !item.word(1).is_empty() => {
                    page.insert("regex", quote(item.word(1)));
                }
                "virtualhost" => {
                    let own = item.word(1);
                    match &host {
                        None => host = Some(own.to_owned()),
                        Some(first) if first == own => {}
                        Some(_) => lost.push(format!("{name}: {}: one for all pages", item.text())),
                    }
                }
                "digest" => lost.push(format!(
                    "{name}: {}: pages are not compared by their digest",
                    item.text()
                )),
                "" => {}
                _ => lost.push(format!("{name}: {}", item.text())),
            }
        }
        pages.push(page);
    }
    if let Some(host) = host.filter(|host| !host.is_empty()) {
        check.insert("host", quote(&host));
    }
    match pages.as_mut_slice() {
        [] => {}
        [one] => check.append(one),
        many => {
            let many: Vec<String> = many.iter().map(table).collect();
            check.insert("urls", format!("[{}]", many.join(", ")));
        }
    }
}

/// A datagram.
fn datagram(item: &Item, check: &mut Check, lost: &mut Vec<String>) {
    if let Some(payload) = item.find("payload") {
        check.insert("payload_hex", quote(&payload.words[1..].join(" ")));
    }
    match item.find("require_reply") {
        None => {
            check.insert("silence", quote("up"));
        }
        Some(reply) if reply.word(1).is_empty() => {}
        Some(reply) => lost.push(format!("UDP_CHECK: {}: any reply is good", reply.text())),
    }
}

/// A program.
fn program(item: &Item, check: &mut Check) {
    let line = item
        .find("misc_path")
        .map(|item| item.words[1..].join(" "))
        .unwrap_or_default();
    check.insert("command", list(&words(&line)));
    let dynamic = item.find("misc_dynamic");
    if dynamic.is_some_and(|item| !matches!(item.word(1), "no" | "off" | "false")) {
        check.insert("dynamic", "true".to_owned());
    }
}

fn list(words: &[String]) -> String {
    let words: Vec<String> = words.iter().map(|word| quote(word)).collect();
    format!("[{}]", words.join(", "))
}

/// The words of a command line, as a shell parts them. What else a shell does is not done.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = None::<String>;
    let mut quote = None;
    let mut all = line.chars();
    while let Some(c) = all.next() {
        match (quote, c) {
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (Some(open), c) if c == open => quote = None,
            (None | Some('"'), '\\') => word.get_or_insert_default().extend(all.next()),
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// What ldirectord says of a service's checks.
#[derive(Clone, Debug, Default)]
pub(super) struct Negotiation {
    pub(super) service: Option<String>,
    pub(super) request: Option<String>,
    pub(super) receive: Option<String>,
    pub(super) host: Option<String>,
    pub(super) method: Option<String>,
    pub(super) command: Option<String>,
}

impl Negotiation {
    /// Takes a line; false if it is none of these.
    pub(super) fn take(&mut self, key: &str, value: &str) -> bool {
        let place = match key {
            "service" => &mut self.service,
            "request" => &mut self.request,
            "receive" => &mut self.receive,
            "virtualhost" => &mut self.host,
            "httpmethod" => &mut self.method,
            "checkcommand" => &mut self.command,
            _ => return false,
        };
        *place = Some(value.trim_matches('"').to_owned()).filter(|value| !value.is_empty());
        true
    }

    /// What ldirectord takes a service for that does not say it.
    fn protocol(&self, port: u16, datagrams: bool) -> &str {
        match (&self.service, port) {
            (Some(name), _) => name,
            (None, 80) => "http",
            (None, 443) => "https",
            (None, 25) => "smtp",
            (None, 53) if datagrams => "dns",
            _ => "",
        }
    }

    /// Adds what is asked to `check`, which has a rhythm; what it becomes, or why there is no
    /// counterpart.
    pub(super) fn negotiate(
        &self,
        mut check: Check,
        port: u16,
        datagrams: bool,
    ) -> Result<Check, String> {
        let protocol = self.protocol(port, datagrams);
        let kind = match protocol {
            "http" | "https" | "smtp" | "dns" => protocol,
            other => return Err(format!("service={other}")),
        };
        check.insert("type", quote(kind));
        match kind {
            "http" | "https" => {
                let request = self.request.as_deref().unwrap_or("/");
                let slash = if request.starts_with('/') { "" } else { "/" };
                check.insert("path", quote(&format!("{slash}{request}")));
                if let Some(receive) = &self.receive {
                    check.insert("regex", quote(receive));
                }
                if let Some(host) = &self.host {
                    check.insert("host", quote(host));
                }
                if let Some(method) = &self.method {
                    check.insert("method", quote(method));
                }
            }
            "dns" => {
                if let Some(name) = &self.request {
                    check.insert("name", quote(name));
                }
                let answer = self.receive.as_ref();
                if let Some(answer) = answer.filter(|answer| answer.parse::<IpAddr>().is_ok()) {
                    check.insert("answer", quote(answer));
                } else {
                    check.insert("record", quote("A"));
                }
            }
            _ => {}
        }
        match is_valid(&check) {
            true => Ok(check),
            false => Err(format!("service={protocol}")),
        }
    }

    /// The check by a program, which gets the virtual and the real address and port.
    pub(super) fn external(&self, mut check: Check, address: &str, port: &str) -> Option<Check> {
        let mut command = words(self.command.as_deref()?);
        let more = [address, port, "{address}", "{port}"];
        command.extend(more.map(str::to_owned));
        check.remove("port");
        check.insert("type", quote("exec"));
        check.insert("command", list(&command));
        is_valid(&check).then_some(check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_are_parted_as_by_a_shell() {
        for (line, expected) in [
            ("/bin/x  a\tb", &["/bin/x", "a", "b"][..]),
            (
                "/bin/x 'a b' \"c \\\" d\" ''",
                &["/bin/x", "a b", "c \" d", ""][..],
            ),
            ("/bin/x a\\ b\"c\"'d'", &["/bin/x", "a bcd"][..]),
            ("'open", &["open"][..]),
            ("", &[][..]),
        ] {
            assert_eq!(words(line), expected, "{line}");
        }
    }
}

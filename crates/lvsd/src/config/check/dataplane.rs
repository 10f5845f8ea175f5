//! Checks `[dataplane]`, the rules for marks in `[[mark]]`, and the sysctls.

use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

use lvs_api::words::meant;
use lvs_core::api::{LocalPool, WORKERS_MAX};
use lvs_core::ftp::helper_ports;
use lvs_core::mark::MarkRule;
use lvs_core::settings::Sysctls;
use serde_json::Value as Json;
use toml::Spanned;

use super::Checker;
use crate::config::Dataplane;
use crate::config::ports::{self, is_generated};
use crate::config::raw::{RawConfig, RawDataplane, RawMark};
use crate::text::Diagnostic;

/// The maximum value of `--max-connections` and `--max-ipv6`.
const CONNECTIONS_MAX: i64 = 1 << 28;
/// The fix for a text that cannot be the name of an interface.
const INTERFACE_NAME: &str =
    "an interface's name has 1 to 15 bytes; `ip -br link` lists the interfaces";

impl Checker<'_> {
    pub(super) fn dataplane(&mut self, raw: &RawDataplane) -> Dataplane {
        let is_routed = is(raw.backend.as_ref(), "tun");
        if is_routed {
            self.routed = raw.backend.as_ref().map(Spanned::span);
        }
        for word in [&raw.socket, &raw.group, &raw.readers, &raw.program]
            .into_iter()
            .flatten()
        {
            self.printable(word, "the value");
        }
        self.fast_path(raw);
        self.xdp(raw);
        self.groups(raw);
        self.socket(raw);
        self.hang_limit(raw);
        self.options(raw);
        let local = self.local_pool(raw);
        Dataplane {
            options: CommandLine::of(raw).0,
            is_routed,
            socket: text(raw.socket.as_ref()),
            group: text(raw.group.as_ref()),
            readers: text(raw.readers.as_ref()),
            hang_limit: raw.hang_limit.as_ref().map(|time| time.get_ref().0),
            own_vips: raw.own_vips.unwrap_or(false),
            local,
            peers: None,
            program: text(raw.program.as_ref()),
        }
    }

    /// Checks the values that the dataplane's command line contains.
    fn options(&mut self, raw: &RawDataplane) {
        const CONNECTIONS: &str = "number of connections";
        const ERRORS: &str = "number of ICMP errors per second";
        self.interfaces(raw);
        self.workers(raw);
        self.helpers(raw);
        self.echo(raw);
        self.clamp_mss(raw);
        for (value, words) in [
            (&raw.backend, &["auto", "af_packet", "tun"][..]),
            (&raw.profile, &["kernel", "modern"]),
            (&raw.reverse_path, &["off", "loose", "strict"]),
            (&raw.fast_path, &["off", "auto", "on"]),
            (&raw.warm_restart, &["off", "auto", "on"]),
            (&raw.confine, &["off", "auto"]),
            (&raw.when_full, &["drop", "evict"]),
        ] {
            self.one_of(value.as_ref(), words);
        }
        for (number, what, range) in [
            (&raw.max_connections, CONNECTIONS, 1..=CONNECTIONS_MAX),
            (&raw.max_ipv6, CONNECTIONS, 1..=CONNECTIONS_MAX),
            (&raw.icmp_limit, ERRORS, 0..=i64::from(u32::MAX)),
        ] {
            self.number(number.as_ref(), what, range);
        }
    }

    /// Returns a value that is one of `words` unchanged. `None` without a value, and for any other
    /// value, which is reported.
    pub(super) fn one_of(
        &mut self,
        value: Option<&Spanned<String>>,
        words: &[&str],
    ) -> Option<String> {
        let known: Vec<(&str, &str)> = words.iter().map(|word| (*word, *word)).collect();
        self.word(value, &known).map(str::to_owned)
    }

    fn helpers(&mut self, raw: &RawDataplane) {
        let Some(helpers) = &raw.helper else {
            return;
        };
        for helper in &helpers.get_ref().0 {
            if let Err(error) = helper_ports(helper) {
                self.report(
                    Diagnostic::error(helpers.span(), format!("helper `{helper}`: {error}"))
                        .help("write \"ftp\", or \"ftp=21,2121\" to name its ports"),
                );
            }
        }
    }

    fn interfaces(&mut self, raw: &RawDataplane) {
        let Some(interfaces) = &raw.interface else {
            return;
        };
        for interface in &interfaces.get_ref().0 {
            if let Some((name, _)) = interface.split_once('=') {
                self.report(
                    Diagnostic::error(
                        interfaces.span(),
                        format!("the dataplane does not create `{name}`"),
                    )
                    .help(
                        "create the VLAN interface with `ip link add link TRUNK name NAME type vlan id VLAN` and its addresses with \
                         `ip addr add`, and write its name only",
                    ),
                );
                continue;
            }
            let name = interface.as_str();
            if !is_interface(name) {
                self.report(
                    Diagnostic::error(
                        interfaces.span(),
                        format!("`{name}` cannot be the name of an interface"),
                    )
                    .help(INTERFACE_NAME),
                );
            } else if self.facts.is_some_and(|facts| !facts.has_interface(name)) {
                self.report(
                    Diagnostic::warning(
                        interfaces.span(),
                        format!("this host has no interface `{name}`"),
                    )
                    .label("the dataplane waits for it")
                    .help("`ip -br link` lists the interfaces of this host and network namespace"),
                );
            }
        }
    }

    /// Checks that the groups exist, if the file is for this host: the dataplane does not start with
    /// an unknown group.
    fn groups(&mut self, raw: &RawDataplane) {
        let Some(facts) = self.facts else {
            return;
        };
        for group in [&raw.group, &raw.readers].into_iter().flatten() {
            let name = group.get_ref();
            if facts.has_group(name) {
                continue;
            }
            let finding =
                Diagnostic::error(group.span(), format!("this host has no group `{name}`"));
            self.report(match meant(name, facts.group_names()) {
                Some(word) => finding.help(format!("did you mean \"{word}\"?")),
                None => finding.help(format!(
                    "`getent group` lists the groups; `groupadd --system {name}` creates this one"
                )),
            });
        }
    }

    fn hang_limit(&mut self, raw: &RawDataplane) {
        let sensible = Duration::from_secs(2)..=Duration::from_secs(3600);
        if let Some(limit) = &raw.hang_limit
            && !sensible.contains(&limit.get_ref().0)
        {
            self.report(
                Diagnostic::error(
                    limit.span(),
                    "this time is too short or too long to detect a hang",
                )
                .help("use 2s to 1h; on a busy host, a dataplane may not answer for a second"),
            );
        }
    }

    fn echo(&mut self, raw: &RawDataplane) {
        let Some(value) = &raw.echo else { return };
        let text = value.get_ref().0.as_str();
        if !matches!(text, "answer" | "drop") && text.parse::<u32>().is_err() {
            let title = format!("`{text}` is not a valid value of `echo`");
            self.report(
                Diagnostic::error(value.span(), title)
                    .help("write \"answer\", \"drop\", or the number of answers per second"),
            );
        }
    }

    fn clamp_mss(&mut self, raw: &RawDataplane) {
        // Every IPv4 host accepts this size.
        const LEAST: u16 = 536;
        let Some(size) = &raw.clamp_mss else { return };
        let text = size.get_ref().0.as_str();
        let number = text.parse::<u16>().ok().filter(|&n| n >= LEAST);
        if text != "auto" && number.is_none() {
            self.report(
                Diagnostic::error(size.span(), format!("`{text}` is not a segment size")).help(
                    format!("write \"auto\", or a number from {LEAST} to {}", u16::MAX),
                ),
            );
        }
    }

    fn workers(&mut self, raw: &RawDataplane) {
        let Some(value) = &raw.workers else { return };
        let text = value.get_ref().0.as_str();
        let number = text.parse::<usize>().ok();
        if text != "auto" && number.is_none_or(|n| n == 0 || n > WORKERS_MAX) {
            let title = format!("number of workers {} is out of range", self.written(value));
            self.report(Diagnostic::error(value.span(), title).help(format!(
                "write workers = 1, a number up to {WORKERS_MAX}, or \"auto\""
            )));
        }
    }

    /// Checks the combinations with which a dataplane refuses to start if `fast_path = "on"`.
    fn fast_path(&mut self, raw: &RawDataplane) {
        if !is(raw.fast_path.as_ref(), "on") {
            return;
        }
        if let Some(backend) = &raw.backend
            && backend.get_ref() == "tun"
        {
            let title = "the kernel fast path excludes the backend `tun`";
            self.report(
                Diagnostic::error(backend.span(), title)
                    .help("leave out backend, or write fast_path = \"off\""),
            );
        }
        if let Some(reverse_path) = &raw.reverse_path
            && matches!(&**reverse_path.get_ref(), "loose" | "strict")
        {
            let title = "the kernel fast path excludes checks of the reverse path";
            self.report(
                Diagnostic::error(reverse_path.span(), title)
                    .help("leave out reverse_path, or write fast_path = \"off\""),
            );
        }
    }

    fn xdp(&mut self, raw: &RawDataplane) {
        let Some(xdp) = &raw.xdp else {
            return;
        };
        for name in xdp.get_ref().0.iter().filter(|name| *name != "auto") {
            let used = raw.interface.as_ref().map(|names| &names.get_ref().0);
            if !is_interface(name) {
                self.report(
                    Diagnostic::error(xdp.span(), format!("`{name}` cannot be the name of an interface"))
                        .help("write the name of an interface (`ip -br link` lists the interfaces), or auto"),
                );
            } else if used.is_some_and(|names| !names.contains(name)) {
                self.report(
                    Diagnostic::error(xdp.span(), format!("the dataplane does not use `{name}`"))
                        .help("add the name to `interface`, or remove it from `xdp`"),
                );
            }
        }
        let named = xdp.get_ref().0.iter().any(|name| name != "auto");
        if named && is(raw.fast_path.as_ref(), "off") {
            let title = "xdp is a part of the kernel fast path, which is off".to_owned();
            let help = "leave out fast_path, or xdp";
            self.report(Diagnostic::error(xdp.span(), title).help(help));
        }
    }

    fn socket(&mut self, raw: &RawDataplane) {
        let Some(socket) = &raw.socket else {
            return;
        };
        let path = socket.get_ref();
        // sun_path has 108 bytes.
        if path.is_empty() || path == "@" || path.len() > 107 {
            self.report(
                Diagnostic::error(socket.span(), "`socket` is not the name of a socket")
                    .help("use `@name` for an abstract socket, or a path of at most 107 bytes"),
            );
        }
    }

    /// Returns the local addresses of full NAT, and reports unusable ones. `None` if the table sets
    /// neither `local_addresses` nor `hairpin`.
    fn local_pool(&mut self, raw: &RawDataplane) -> Option<LocalPool> {
        let mut addresses = Vec::new();
        if let Some(list) = &raw.local_addresses {
            for word in &list.get_ref().0 {
                match word.parse::<IpAddr>() {
                    Ok(addr) if addresses.contains(&addr) => self.report(
                        Diagnostic::error(list.span(), format!("{addr} is named twice"))
                            .help("name each local address once"),
                    ),
                    Ok(addr) => {
                        if self.usable(list.span(), addr, "local address").is_some() {
                            addresses.push(addr);
                        }
                    }
                    Err(_) => self.report(
                        Diagnostic::error(list.span(), format!("`{word}` is not an address")).help(
                            "write addresses without ports: local_addresses = [\"10.0.0.2\"]",
                        ),
                    ),
                }
            }
        }
        let hairpin = raw.hairpin.as_ref().is_some_and(|on| *on.get_ref());
        if let Some(on) = &raw.hairpin
            && hairpin
            && addresses.is_empty()
        {
            self.report(
                Diagnostic::error(on.span(), "`hairpin` needs a local address")
                    .help("add local_addresses = [\"...\"]: addresses of this host, or free ones for which the dataplane will answer"),
            );
        }
        let given = raw.local_addresses.is_some() || raw.hairpin.is_some();
        given.then_some(LocalPool { addresses, hairpin })
    }

    pub(super) fn marks(&mut self, raw: &RawConfig) -> Vec<String> {
        let mut all = Vec::new();
        for spanned in &raw.mark {
            let rule = spanned.get_ref();
            let mark = rule.mark.as_ref();
            if mark.is_some() && self.number(mark, "mark", 1..=i64::from(u32::MAX)).is_none() {
                continue;
            }
            if let Some(name) = &rule.interface
                && !is_interface(name.get_ref())
            {
                self.report(
                    Diagnostic::error(
                        name.span(),
                        "`interface` of the rule is not the name of an interface",
                    )
                    .help(INTERFACE_NAME),
                );
                continue;
            }
            let words = mark_words(rule);
            let flat: Vec<&String> = words.iter().flat_map(|(_, words)| words).collect();
            match MarkRule::parse(&flat) {
                Ok(parsed) => {
                    let text = parsed.to_string();
                    if is_generated(&text) {
                        let place = mark.map(Spanned::span);
                        let whole = self.first_line(&spanned.span());
                        self.reserved_mark(place.unwrap_or(whole));
                    }
                    all.push(text);
                }
                Err(reason) => {
                    let whole = self.first_line(&spanned.span());
                    let finding = wrong_rule(&words, &reason, whole);
                    self.report(finding);
                }
            }
        }
        all
    }

    pub(super) fn reserved_mark(&mut self, span: Range<usize>) {
        let (first, last) = (ports::MARKS.start(), ports::MARKS.end());
        self.report(
            Diagnostic::error(span, "this mark is reserved for services of several ports")
                .help(format!("use a mark below {first} or above {last}")),
        );
    }

    pub(super) fn sysctls(&mut self, raw: &RawConfig) -> Vec<(String, String)> {
        let mut all = Vec::new();
        for (name, value) in &raw.sysctl {
            let key = name.get_ref().as_str();
            if !Sysctls::NAMES.contains(&key) {
                let finding = Diagnostic::error(name.span(), format!("unknown sysctl `{key}`"));
                self.report(match meant(key, Sysctls::NAMES.iter().copied()) {
                    Some(word) => finding.help(format!("did you mean `{word}`?")),
                    None => finding.help("the names are those in /proc/sys/net/ipv4/vs/"),
                });
                continue;
            }
            let text = value.get_ref().0.trim();
            if Sysctls::default().set(key, text).is_err() {
                let values = Sysctls::values(key).unwrap_or_default();
                self.report(
                    Diagnostic::error(value.span(), format!("`{text}` is not a value of {key}"))
                        .help(format!("use {values}")),
                );
                continue;
            }
            all.push((key.to_owned(), text.to_owned()));
        }
        all
    }
}

/// The position of a value in a rule for marks, and its key and value as words of the dataplane's
/// grammar.
type RuleWords = (Range<usize>, Vec<String>);

/// Converts a rule for marks to the dataplane's grammar, in which the keys of the table begin with
/// two dashes.
fn mark_words(rule: &RawMark) -> Vec<RuleWords> {
    let mut words = Vec::new();
    for (name, value) in [
        ("--interface", &rule.interface),
        ("--source", &rule.source),
        ("--destination", &rule.destination),
        ("--protocol", &rule.protocol),
    ] {
        if let Some(value) = value {
            words.push((value.span(), vec![name.to_owned(), value.get_ref().clone()]));
        }
    }
    if let Some(ports) = &rule.ports {
        let text = ports.get_ref().0.clone();
        words.push((ports.span(), vec!["--ports".to_owned(), text]));
    }
    if let Some(mark) = &rule.mark {
        let number = mark.get_ref().0.to_string();
        words.push((mark.span(), vec!["--mark".to_owned(), number]));
    }
    for (name, set) in [("--drop", &rule.drop), ("--host", &rule.host)] {
        if let Some(set) = set
            && *set.get_ref()
        {
            words.push((set.span(), vec![name.to_owned()]));
        }
    }
    words
}

/// Returns the error for a rule that the dataplane would refuse for `reason`. Its position is the
/// value that alone causes the error, or otherwise `whole`.
fn wrong_rule(words: &[RuleWords], reason: &str, whole: Range<usize>) -> Diagnostic {
    let alone = |key: &[String]| -> Vec<String> {
        let mut rule = key.to_vec();
        // A rule needs a destination of the same address family as the source.
        let six = key.last().is_some_and(|value| value.contains(':'));
        if key[0] != "--destination" {
            let other = if six { "2001:db8::1" } else { "192.0.2.1" };
            rule.extend(["--destination".to_owned(), other.to_owned()]);
        }
        if !matches!(key[0].as_str(), "--mark" | "--drop" | "--host") {
            rule.extend(["--mark".to_owned(), "1".to_owned()]);
        }
        rule
    };
    let culprit = words.iter().find_map(|(place, key)| {
        let reason = MarkRule::parse(&alone(key)).err()?;
        Some((place.clone(), key[0].trim_start_matches('-'), reason))
    });
    match culprit {
        Some((place, key, reason)) => {
            let reason = reason.replace("--", "");
            Diagnostic::error(place, format!("`{key}` of a rule for marks: {reason}"))
        }
        None => Diagnostic::error(
            whole,
            format!("invalid rule for marks: {}", reason.replace("--", "")),
        )
        .help(
            "a rule has `destination`, and one of `mark = N`, `drop = true` or `host = true`; with the latter two, `source` can replace `destination`",
        ),
    }
}

/// A command line: options and their values.
#[derive(Default)]
pub(super) struct CommandLine(pub(super) Vec<String>);

impl CommandLine {
    /// Adds an option with each of its values.
    pub(super) fn add(&mut self, name: &str, values: impl IntoIterator<Item = String>) {
        for value in values {
            self.0.extend([name.to_owned(), value]);
        }
    }

    /// The options of the table: each of its serialized keys is an option, unless the value is
    /// `false`.
    fn of(raw: &RawDataplane) -> Self {
        let mut all = Self::default();
        let table = serde_json::to_value(raw).expect("every key of the table has a value in JSON");
        for (key, value) in table.as_object().into_iter().flatten() {
            let option = format!("--{}", key.replace('_', "-"));
            match value {
                Json::Null | Json::Bool(false) => {}
                Json::Bool(true) => all.0.push(option),
                Json::String(text) => all.add(&option, [text.clone()]),
                Json::Array(list) => {
                    let words = list.iter().filter_map(Json::as_str);
                    all.add(&option, words.map(ToOwned::to_owned));
                }
                other => all.add(&option, [other.to_string()]),
            }
        }
        all
    }
}

fn text(value: Option<&Spanned<String>>) -> Option<String> {
    value.map(|value| value.get_ref().clone())
}

/// Whether a key is present with this value.
pub(super) fn is(value: Option<&Spanned<String>>, word: &str) -> bool {
    value.is_some_and(|value| value.get_ref() == word)
}

/// Whether the kernel accepts a text as the name of an interface (`dev_valid_name`).
pub(super) fn is_interface(name: &str) -> bool {
    // IFNAMSIZ is 16 with the NUL.
    !name.is_empty()
        && name.len() <= 15
        && name != "."
        && name != ".."
        && !name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control())
}

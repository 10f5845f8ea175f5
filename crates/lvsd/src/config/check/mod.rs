//! What a file means, and whether that makes sense: addresses, names, ranges, and what fits
//! together.

mod announce;
mod api;
mod cluster;
mod daemon;
mod decisions;
mod engine;
mod filter;
mod forward;
mod found;
mod health;
mod proxy;
mod scheduling;
mod sense;
mod server;
mod service;
mod sync;
mod vrrp;

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use lvs_core::api::ServiceId;
use lvs_core::{Family, Protocol};
use toml::Spanned;

pub(crate) use self::daemon::check_filter;
use self::sense::ServerPlace;
use lvs_dataplane::words::meant;

use crate::config::diagnostic::Diagnostic;
use crate::config::facts::Facts;
use crate::config::raw::{RawConfig, Whole};
use crate::config::{Base, Config, Files, Line, Revision, Service};
use crate::sources::Gathered;

/// The longest slow start: a day.
const SLOW_START_MAX: u64 = 86_400;

/// The kernel's bound of a weight, and ipvsadm's.
const WEIGHT_MAX: i64 = i32::MAX as i64;

/// Checks everything. `complete` is false if parts of the file were left out because they could not
/// be read; what is missing is then not complained about.
pub(in crate::config) fn check(
    raw: &RawConfig,
    text: &str,
    facts: Option<&Facts>,
    gathered: &Gathered,
    complete: bool,
    findings: &mut Vec<Diagnostic>,
) -> Config {
    let mut checker = Checker {
        text,
        facts,
        gathered,
        line_ends: text.match_indices('\n').map(|(at, _)| at).collect(),
        complete,
        findings,
        servers: Vec::new(),
        once: HashSet::new(),
        routed: None,
        local: None,
        left_out: Vec::new(),
    };
    let mut dataplane = checker.dataplane(&raw.dataplane);
    checker.local = dataplane
        .local
        .as_ref()
        .map(|local| local.addresses.clone());
    let sync = raw.sync.as_ref().and_then(|sync| checker.sync(sync));
    dataplane.peers = raw.sync.as_ref().and_then(|sync| checker.peers(sync));
    checker.workers_beside_peers(raw);
    let sysctls = checker.sysctls(raw);
    let filter = raw.filter.as_ref().map(|filter| checker.filter(filter));
    let marks = checker.marks(raw);
    let reuse_templates = sysctls
        .iter()
        .any(|(n, v)| n == "expire_quiescent_template" && v != "0");
    let mut services = checker.services(&raw.service, !reuse_templates);
    checker.found_loops(&mut services);
    checker.few_names(raw);
    let port_marks = port_marks(&services);
    if let Some(table) = raw.sync.as_ref().filter(|_| sync.is_some()) {
        checker.families_beside_sync(table, &services);
    }
    let vrrp = raw.vrrp.as_ref();
    let vrrp = vrrp.and_then(|vrrp| checker.vrrp(vrrp, raw, &services));
    let announce = checker.announce(raw, &services);
    checker.sense(raw, &services, &marks);
    let lookups = checker.lookups(raw.dns.as_ref());
    let cluster = raw.cluster.as_ref();
    let cluster = cluster.and_then(|cluster| checker.cluster(cluster));
    checker.pools_without_etcd(raw);
    let daemon = checker.daemon(&raw.lvsd);
    let api = checker.api(&raw.api);
    Config {
        path: String::new(),
        files: Files::default(),
        daemon,
        api,
        dataplane,
        sync,
        vrrp,
        lookups,
        cluster,
        announce,
        sysctls,
        filter,
        marks,
        port_marks,
        services,
        left_out: checker.left_out,
        in_force: Vec::new(),
        revision: Revision::default(),
        awaits_etcd: false,
        base: Base::default(),
    }
}

/// The rules for services of many ports.
fn port_marks(services: &[Service]) -> Vec<String> {
    let mut single: HashMap<(Protocol, IpAddr), Vec<u16>> = HashMap::new();
    for (protocol, addr) in services.iter().filter_map(|service| endpoint(&service.id)) {
        let ports = single.entry((protocol, addr.ip())).or_default();
        ports.push(addr.port());
    }
    let many = services.iter().filter_map(|service| service.ports.as_ref());
    many.filter_map(|many| {
        let apart = single.get(&(many.protocol, many.ip));
        many.rule(apart.map_or(&[][..], Vec::as_slice))
    })
    .map(|rule| rule.to_string())
    .collect()
}

/// Protocol, virtual address and port of a service that has them.
const fn endpoint(id: &ServiceId) -> Option<(Protocol, SocketAddr)> {
    match *id {
        ServiceId::Tcp { address } => Some((Protocol::TCP, address)),
        ServiceId::Udp { address } => Some((Protocol::UDP, address)),
        ServiceId::Sctp { address } => Some((Protocol::SCTP, address)),
        ServiceId::Fwmark { .. } => None,
    }
}

struct Checker<'a> {
    text: &'a str,
    /// What there is on this host, where that matters.
    facts: Option<&'a Facts>,
    /// What sources say.
    gathered: &'a Gathered,
    line_ends: Vec<usize>,
    complete: bool,
    findings: &'a mut Vec<Diagnostic>,
    /// All servers so far.
    servers: Vec<ServerPlace>,
    /// Place and title of what was reported once for all servers of a service.
    once: HashSet<(usize, String)>,
    /// Where the file says that the host routes packets to the engine.
    routed: Option<Range<usize>>,
    /// Addresses for full NAT, where the file names them.
    local: Option<Vec<IpAddr>>,
    /// Servers that sources name and that cannot serve, in words.
    left_out: Vec<String>,
}

impl Checker<'_> {
    fn report(&mut self, finding: Diagnostic) {
        self.findings.push(finding);
    }

    /// The line that something begins in.
    fn line(&self, span: &Range<usize>) -> Line {
        Line(1 + self.line_ends.partition_point(|end| *end < span.start))
    }

    /// The first line of a table, which is where something missing is shown.
    fn first_line(&self, span: &Range<usize>) -> Range<usize> {
        let length = self
            .text
            .get(span.clone())
            .and_then(|t| t.find('\n'))
            .unwrap_or(span.len());
        span.start..span.start + length
    }

    fn missing(&mut self, span: &Range<usize>, what: &str, help: &str) {
        if self.complete {
            let span = self.first_line(span);
            self.report(Diagnostic::error(span, format!("{what} is missing")).help(help));
        }
    }

    /// One of a few words.
    fn word<T: Copy>(&mut self, value: Option<&Spanned<String>>, known: &[(&str, T)]) -> Option<T> {
        let value = value?;
        let word = value.get_ref().as_str();
        if let Some((_, t)) = known.iter().find(|(k, _)| *k == word) {
            return Some(*t);
        }
        let names: Vec<&str> = known.iter().map(|(k, _)| *k).collect();
        let lower = word.to_ascii_lowercase();
        let finding = Diagnostic::error(value.span(), format!("unknown word `{word}`"));
        self.report(match meant(&lower, names.iter().copied()) {
            Some(k) => finding.help(format!("did you mean \"{k}\"?")),
            None => finding.help(format!("one of: {}", names.join(", "))),
        });
        None
    }

    /// A value in the words of the file.
    fn written<T>(&self, value: &Spanned<T>) -> String {
        let words = self.text.get(value.span()).unwrap_or_default();
        words.to_owned()
    }

    /// Words that end up in logs, file names or command lines: not empty, without control
    /// characters.
    fn printable(&mut self, value: &Spanned<String>, what: &str) {
        let text = value.get_ref();
        let strange = text.chars().find(|c| c.is_control() || is_direction(*c));
        let (title, help) = match strange {
            None if text.trim().is_empty() => (
                format!("{what} is empty"),
                "write a word, or remove the key".to_owned(),
            ),
            None => return,
            Some(c) => (
                format!("{what} contains the character U+{:04X}", u32::from(c)),
                "remove it: it could make one line of a log look like two".to_owned(),
            ),
        };
        self.report(Diagnostic::error(value.span(), title).help(help));
    }

    /// A whole number within a range.
    fn number(
        &mut self,
        value: Option<&Spanned<Whole>>,
        what: &str,
        range: std::ops::RangeInclusive<i64>,
    ) -> Option<i64> {
        let value = value?;
        let n = value.get_ref().0;
        if range.contains(&n) {
            return Some(n);
        }
        let n = self.written(value);
        self.report(
            Diagnostic::error(value.span(), format!("{what} {n} is out of range")).help(format!(
                "give a number from {} to {}",
                range.start(),
                range.end()
            )),
        );
        None
    }

    /// Reports a finding about the service, which every server would repeat.
    fn once(&mut self, finding: Diagnostic) {
        let first = (finding.primary.0.start, finding.title.clone());
        if self.once.insert(first) {
            self.report(finding);
        }
    }
}

/// Whether a character turns the direction of text around it.
const fn is_direction(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn virtual_address(id: &ServiceId) -> Option<SocketAddr> {
    match *id {
        ServiceId::Tcp { address } | ServiceId::Udp { address } | ServiceId::Sctp { address } => {
            Some(address)
        }
        ServiceId::Fwmark { .. } => None,
    }
}

fn port(id: &ServiceId) -> u16 {
    virtual_address(id).map_or(0, |a| a.port())
}

/// A service in words: `tcp 192.0.2.10:80`, `mark 7`.
pub(crate) fn label(id: &ServiceId) -> String {
    match id {
        ServiceId::Tcp { address } => format!("tcp {address}"),
        ServiceId::Udp { address } => format!("udp {address}"),
        ServiceId::Sctp { address } => format!("sctp {address}"),
        ServiceId::Fwmark { mark, family } => match family {
            Family::V4 => format!("mark {mark}"),
            Family::V6 => format!("mark {mark} ipv6"),
        },
    }
}

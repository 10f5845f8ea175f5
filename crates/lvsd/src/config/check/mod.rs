//! Checks the meaning of a configuration: addresses, names, ranges, and combinations.

mod announce;
mod api;
mod cluster;
mod daemon;
mod dataplane;
mod discovery;
mod forward;
mod health;
mod kubernetes;
mod proxy;
mod scheduling;
mod sense;
mod server;
mod service;
mod sync;
mod vrrp;

use std::collections::HashSet;
use std::net::IpAddr;
use std::ops::Range;

use lvs_core::api::ServiceId;
use toml::Spanned;

pub(crate) use self::daemon::check_filter;
use self::sense::ServerPlace;
use lvs_api::words::meant;

use crate::config::raw::{RawConfig, Whole};
use crate::config::shape::{self, NOWHERE};
use crate::config::{Config, Files, Service};
use crate::facts::Facts;
use crate::text::{Diagnostic, Findings, Severity};

/// Maximum duration of a slow start in seconds: one day.
const SLOW_START_MAX: u64 = 86_400;

/// The maximum weight in the kernel and in ipvsadm.
const WEIGHT_MAX: i64 = i32::MAX as i64;

/// Checks the whole configuration. `complete` is false if parts of the file could not be read;
/// missing keys are then not reported.
pub(in crate::config) fn check(
    raw: &RawConfig,
    text: &str,
    facts: Option<&Facts>,
    complete: bool,
    findings: &mut Findings,
) -> Config {
    let mut checker = Checker::new(text, facts, complete, findings);
    let mut dataplane = checker.dataplane(&raw.dataplane);
    checker.local = dataplane
        .local
        .as_ref()
        .map(|local| local.addresses.clone());
    let ipvs = raw.sync.ipvs.as_ref();
    let sync = ipvs.map(|ipvs| checker.sync(ipvs));
    let peers = raw.sync.peers.as_ref();
    dataplane.peers = peers.and_then(|peers| checker.peers(peers));
    let sysctls = checker.sysctls(raw);
    let filter = raw.filter.as_ref().map(|filter| checker.filter(filter));
    let marks = checker.marks(raw);
    let services = checker.services(&raw.service, templates_stay(&sysctls));
    checker.few_names(raw);
    if let Some(table) = ipvs {
        checker.families_beside_sync(&table.span(), &services);
    }
    let vrrp = raw.vrrp.as_ref();
    let vrrp = vrrp.and_then(|vrrp| checker.vrrp(vrrp, raw, &services));
    let announce = checker.announce(raw, &services);
    checker.sense(raw, &services, &marks);
    let lookups = checker.lookups(raw.dns.as_ref());
    let cluster = raw.cluster.as_ref();
    let cluster = cluster.and_then(|cluster| checker.cluster(cluster));
    checker.pools_without_etcd(raw);
    let kubernetes = raw.kubernetes.as_ref();
    let kubernetes = kubernetes.and_then(|table| checker.kubernetes(table));
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
        kubernetes,
        announce,
        sysctls,
        filter,
        marks,
        services,
        defaults: raw.defaults_text.clone(),
    }
}

/// Checks `text`, a service from etcd or Kubernetes, against the valid configuration `config`.
/// Returns one service for each address of the service.
///
/// # Errors
/// The first error, as text.
pub(in crate::config) fn remote(config: &Config, text: &str) -> Result<Vec<Service>, String> {
    shape::remote(text)?;
    let (raw, mut findings) = shape::shape(text, &config.defaults);
    let mut services = Vec::new();
    if let Some(raw) = raw {
        let complete = findings.is_empty();
        let mut checker = Checker::new(text, None, complete, &mut findings);
        let dataplane = &config.dataplane;
        checker.routed = dataplane.is_routed.then_some(NOWHERE);
        checker.local = dataplane
            .local
            .as_ref()
            .map(|local| local.addresses.clone());
        services = checker.services(&raw.service, templates_stay(&config.sysctls));
        if config.sync.is_some() {
            checker.families_beside_sync(&NOWHERE, &services);
        }
        checker.servers_that_are_services(&services);
    }
    let mut all = findings.into_kept().into_iter();
    match all.find(|finding| finding.severity == Severity::Error) {
        None => Ok(services),
        Some(wrong) => Err(match text.get(..wrong.primary.0.start) {
            Some(before) => {
                let line = 1 + before.matches('\n').count();
                format!("line {line}: {}", wrong.title)
            }
            None => format!("the [defaults] of the file cause an error: {}", wrong.title),
        }),
    }
}

/// Whether a persistence template still sends its client to a server with weight 0 with these
/// sysctls.
fn templates_stay(sysctls: &[(String, String)]) -> bool {
    let mut sysctls = sysctls.iter();
    !sysctls.any(|(name, value)| name == "expire_quiescent_template" && value != "0")
}

struct Checker<'a> {
    text: &'a str,
    /// Properties of this host; `None` if the file is for another host.
    facts: Option<&'a Facts>,
    line_ends: Vec<usize>,
    complete: bool,
    findings: &'a mut Findings,
    /// All servers that were read so far.
    servers: Vec<ServerPlace>,
    /// Position and title of findings that are reported once for all servers of a service.
    once: HashSet<(usize, String)>,
    /// The position of the setting by which the host routes packets to the dataplane (TUN backend).
    routed: Option<Range<usize>>,
    /// Addresses for full NAT; `None` if the file sets neither `local_addresses` nor `hairpin`.
    local: Option<Vec<IpAddr>>,
}

impl<'a> Checker<'a> {
    fn new(
        text: &'a str,
        facts: Option<&'a Facts>,
        complete: bool,
        findings: &'a mut Findings,
    ) -> Self {
        Self {
            text,
            facts,
            line_ends: text.match_indices('\n').map(|(at, _)| at).collect(),
            complete,
            findings,
            servers: Vec::new(),
            once: HashSet::new(),
            routed: None,
            local: None,
        }
    }
}

impl Checker<'_> {
    fn report(&mut self, finding: Diagnostic) {
        self.findings.push(finding);
    }

    /// The number of the line in which `span` begins.
    fn line(&self, span: &Range<usize>) -> usize {
        1 + self.line_ends.partition_point(|end| *end < span.start)
    }

    /// The first line of a table, at which missing keys are reported.
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
            None => finding.help(format!("use one of: {}", names.join(", "))),
        });
        None
    }

    /// A value as written in the file.
    fn written<T>(&self, value: &Spanned<T>) -> String {
        let words = self.text.get(value.span()).unwrap_or_default();
        words.to_owned()
    }

    /// Checks words that end up in logs, file names or command lines: they must not be empty, and
    /// must not contain control characters or characters that change the direction of the text.
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
                "remove this character: it could divide a line of the log".to_owned(),
            ),
        };
        self.report(Diagnostic::error(value.span(), title).help(help));
    }

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
        let n = match self.text.get(value.span()) {
            Some(written) => written.to_owned(),
            None => n.to_string(),
        };
        self.report(
            Diagnostic::error(value.span(), format!("{what} {n} is out of range")).help(format!(
                "write a number from {} to {}",
                range.start(),
                range.end()
            )),
        );
        None
    }

    /// Reports a finding about the service once, although it occurs at each of its servers.
    fn once(&mut self, finding: Diagnostic) {
        let first = (finding.primary.0.start, finding.title.clone());
        if self.once.insert(first) {
            self.report(finding);
        }
    }
}

/// Whether a character changes the direction of the text around it.
const fn is_direction(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn port(id: &ServiceId) -> u16 {
    id.address().map_or(0, |address| address.port())
}

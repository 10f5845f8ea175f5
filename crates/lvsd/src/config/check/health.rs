//! Checks of real servers.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use lvs_core::api::ServiceId;
use lvs_dataplane::words::meant;
use toml::Spanned;

use super::Checker;
use crate::config::diagnostic::Diagnostic;
use crate::config::raw::{RawCheck, RawCheckTable, RawDuration, Whole};
use crate::config::{Check, Keys, Severity, unknown_key};
use crate::health::Probe;

const DEFAULT_INTERVAL: Duration = Duration::from_secs(5);
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(2);
const DEFAULT_RISE: u32 = 2;
const DEFAULT_FALL: u32 = 3;

/// More often than that, a check is a load of its own.
const TIME_MIN: Duration = Duration::from_millis(10);
/// A server that is looked at less than once a day is not checked.
const INTERVAL_MAX: Duration = Duration::from_secs(86_400);
const TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// A check as the file has it, for whichever server.
pub(super) struct CheckPlan {
    probe: Probe,
    interval: Duration,
    timeout: Duration,
    rise: u32,
    fall: u32,
}

impl Checker<'_> {
    /// What `check` says; `None` if there is no check or it is wrong.
    pub(super) fn check_plan(
        &mut self,
        raw: &Spanned<RawCheck>,
        service: Option<&ServiceId>,
    ) -> Option<CheckPlan> {
        let table = match raw.get_ref() {
            RawCheck::Word(word) if word == "none" => return None,
            RawCheck::Word(word) => {
                self.report(
                    Diagnostic::error(raw.span(), format!("unknown check `{word}`")).help(
                        "write \"none\", or a table: check = { type = \"tcp\", interval = \"5s\" }",
                    ),
                );
                return None;
            }
            RawCheck::Table(table) => table,
        };
        let before = self.findings.len();
        let probe = self.probe(table, raw.span(), service);
        self.check_rhythm(table, raw.span());
        let wrong = |finding: &Diagnostic| finding.severity == Severity::Error;
        if self.findings[before..].iter().any(wrong) {
            return None;
        }
        Some(CheckPlan {
            probe: probe?,
            interval: duration_or(table.interval.as_ref(), DEFAULT_INTERVAL),
            timeout: duration_or(table.timeout.as_ref(), DEFAULT_TIMEOUT),
            rise: count_or(table.rise.as_ref(), DEFAULT_RISE),
            fall: count_or(table.fall.as_ref(), DEFAULT_FALL),
        })
    }

    /// The check of one server; `at` is where it is said that the check does not fit it.
    pub(super) fn check(
        &mut self,
        plan: &CheckPlan,
        server: SocketAddr,
        at: &Range<usize>,
    ) -> Option<Check> {
        match plan.probe.bind(server) {
            Ok(probe) => Some(Check {
                probe,
                server,
                interval: plan.interval,
                timeout: plan.timeout,
                rise: plan.rise,
                fall: plan.fall,
            }),
            Err(misfit) => {
                self.report(Diagnostic::error(at.clone(), misfit.title).help(misfit.help));
                None
            }
        }
    }

    /// The kind of a check, and what its own keys say.
    fn probe(
        &mut self,
        table: &RawCheckTable,
        span: Range<usize>,
        service: Option<&ServiceId>,
    ) -> Option<Probe> {
        let names = || Probe::KINDS.iter().map(|kind| kind.name);
        let kind = table
            .kind
            .as_ref()
            .and_then(|name| Probe::kind(name.get_ref()));
        if kind.is_none() {
            match &table.kind {
                Some(name) => {
                    let word = name.get_ref();
                    let finding =
                        Diagnostic::error(name.span(), format!("unknown type of check `{word}`"));
                    self.report(match meant(word, names()) {
                        Some(known) => finding.help(format!("did you mean \"{known}\"?")),
                        None => {
                            let known: Vec<&str> = names().collect();
                            finding.help(format!("this version knows: {}", known.join(", ")))
                        }
                    });
                }
                None if self.complete => self.report(
                    Diagnostic::error(span.clone(), "`type` of the check is missing")
                        .help("add type = \"tcp\""),
                ),
                None => {}
            }
        }
        // Of a check of no known type only such keys can be wrong that no type has.
        let kinds = kind.map_or(Probe::KINDS, std::slice::from_ref);
        let mut known: Vec<&str> = RawCheckTable::KEYS.to_vec();
        known.extend(kinds.iter().flat_map(|kind| kind.keys));
        known.sort_unstable();
        for (key, _) in &table.own {
            if !known.contains(&key.get_ref().as_str()) {
                self.report(unknown_key(key.span(), key.get_ref(), &known));
            }
        }
        let mut keys = Keys {
            table: span,
            entries: &table.own,
            text: self.text,
            service,
            findings: Vec::new(),
        };
        let probe = (kind?.parse)(&mut keys);
        self.findings.append(&mut keys.findings);
        probe
    }

    fn check_rhythm(&mut self, table: &RawCheckTable, span: Range<usize>) {
        for (what, value, most) in [
            ("interval", &table.interval, INTERVAL_MAX),
            ("timeout", &table.timeout, TIMEOUT_MAX),
        ] {
            if let Some(value) = value
                && !(TIME_MIN..=most).contains(&value.get_ref().0)
            {
                let title = match value.get_ref().0.is_zero() {
                    true => format!("`{what}` of a check cannot be 0"),
                    false => format!("`{what}` of a check is out of range"),
                };
                self.report(
                    Diagnostic::error(value.span(), title)
                        .help(format!("give {TIME_MIN:?} to {most:?}, such as \"2s\"")),
                );
            }
        }
        for (what, value) in [("rise", &table.rise), ("fall", &table.fall)] {
            if let Some(value) = value
                && !(1..=1000).contains(&value.get_ref().0)
            {
                self.report(
                    Diagnostic::error(value.span(), format!("`{what}` is out of range"))
                        .help("give a number of checks, 1 to 1000"),
                );
            }
        }
        let interval = duration_or(table.interval.as_ref(), DEFAULT_INTERVAL);
        let timeout = duration_or(table.timeout.as_ref(), DEFAULT_TIMEOUT);
        if interval < timeout && !interval.is_zero() {
            let at = table.timeout.as_ref().or(table.interval.as_ref());
            self.report(
                Diagnostic::warning(
                    at.map_or(span, Spanned::span),
                    "a check may take longer than the interval between two",
                )
                .help("the next one then waits; make `timeout` at most `interval`"),
            );
        }
    }
}

fn duration_or(value: Option<&Spanned<RawDuration>>, default: Duration) -> Duration {
    value.map_or(default, |duration| duration.get_ref().0)
}

fn count_or(value: Option<&Spanned<Whole>>, default: u32) -> u32 {
    let number = value.and_then(|number| u32::try_from(number.get_ref().0).ok());
    number.unwrap_or(default)
}

//! Reads the health checks of servers, and reports errors in them.

use std::ops::Range;
use std::time::Duration;

use lvs_api::words::meant;
use lvs_core::Forwarding;
use lvs_core::api::ServiceId;
use toml::Spanned;

use super::Checker;
use super::dataplane::is;
use crate::config::raw::{RawCheck, RawCheckTable, RawDuration, RawPassive, RawService, Whole};
use crate::health::probe::KindInfo;
use crate::health::{Check, Passive, Probe, Via};
use crate::text::{Diagnostic, Findings, Keys, unknown_key};

const DEFAULT_INTERVAL: Duration = Duration::from_secs(5);
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(2);
/// The default of `fast_interval` is `interval` divided by this number, but at least [`FAST_MIN`]
/// and at most `interval`.
const FAST_PART: u32 = 5;
const FAST_MIN: Duration = Duration::from_millis(100);
const DEFAULT_JITTER: u8 = 5;

/// The shortest interval and the shortest timeout of checks: shorter ones would cause considerable
/// load.
const TIME_MIN: Duration = Duration::from_millis(10);
/// The longest interval: one check a day.
const INTERVAL_MAX: Duration = Duration::from_secs(86_400);
const TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// A check as configured, before it is applied to a service and a server.
pub(super) struct CheckPlan {
    probe: Probe,
    interval: Duration,
    fast_interval: Duration,
    jitter: u8,
    timeout: Duration,
    rise: u32,
    fall: u32,
    via: PlannedVia,
    /// Whether the check has a port of its own.
    has_port: bool,
    passive: Option<(Passive, Range<usize>)>,
}

/// The configured path of a check.
enum PlannedVia {
    /// The server's own address.
    Server,
    /// Through the service; the position of `via`.
    Service(Range<usize>),
    /// Without `via`: through the service, unless this is impossible or other settings of the
    /// service exclude it.
    Default,
}

impl Checker<'_> {
    /// Reads `check`; `None` if it is "none", or invalid, which is reported.
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
        let before = self.findings.reported();
        let kind = self.kind(table, raw.span());
        let probe = self.probe(kind, table, raw.span(), service);
        self.check_rhythm(table, raw.span());
        let jitter = self.number(table.jitter.as_ref(), "`jitter`", 0..=50);
        let passive = self.passive(table.passive.as_ref());
        let words = [("server", false), ("service", true)];
        let via = self.word(table.via.as_ref(), &words);
        if self.findings.reported() > before {
            return None;
        }
        let (probe, kind) = (probe?, kind?);
        let interval = duration_or(table.interval.as_ref(), DEFAULT_INTERVAL);
        let fast = (interval / FAST_PART).max(FAST_MIN).min(interval);
        Some(CheckPlan {
            probe,
            interval,
            fast_interval: duration_or(table.fast_interval.as_ref(), fast),
            jitter: jitter.map_or(DEFAULT_JITTER, |percent| u8::try_from(percent).unwrap_or(0)),
            timeout: duration_or(table.timeout.as_ref(), DEFAULT_TIMEOUT),
            rise: count_or(table.rise.as_ref(), kind.rise),
            fall: count_or(table.fall.as_ref(), kind.fall),
            via: match (via, &table.via) {
                (Some(true), Some(at)) => PlannedVia::Service(at.span()),
                (None, _) => PlannedVia::Default,
                _ => PlannedVia::Server,
            },
            has_port: table.own.iter().any(|(key, _)| key.get_ref() == "port"),
            passive: passive.zip(table.passive.as_ref().map(Spanned::span)),
        })
    }

    /// Applies a configured check to a service; [`Check::of`] then adds the address of a server.
    /// `None` if the check does not fit the service, which is reported.
    pub(super) fn check(
        &mut self,
        plan: &CheckPlan,
        service: &ServiceId,
        method: Forwarding,
        raw: &RawService,
    ) -> Option<Check> {
        // With these two settings, the dataplane does not always have the server and the VIP, and a
        // through-VIP check would fail.
        let is_kept = !is(raw.on_check_failure.as_ref(), "remove")
            && !is(raw.below_quorum.as_ref(), "give-up");
        let via = match (&plan.via, self.via(plan, service, method, raw)) {
            (PlannedVia::Server, _) | (PlannedVia::Default, Err(_)) => None,
            (PlannedVia::Default, Ok(_)) if !is_kept => None,
            (PlannedVia::Default, Ok(via)) => Some(Via {
                by_default: true,
                ..via
            }),
            (PlannedVia::Service(_), Ok(via)) => Some(via),
            (PlannedVia::Service(at), Err((title, help))) => {
                self.once(Diagnostic::error(at.clone(), title).help(help));
                return None;
            }
        };
        if let Some((passive, at)) = &plan.passive {
            self.fits_passive(*passive, service, method, at)?;
        }
        Some(Check {
            probe: plan.probe.clone(),
            server: Check::NO_SERVER,
            via,
            interval: plan.interval,
            fast_interval: plan.fast_interval,
            jitter: plan.jitter,
            timeout: plan.timeout,
            rise: plan.rise,
            fall: plan.fall,
            passive: plan.passive.as_ref().map(|(passive, _)| *passive),
        })
    }

    /// The path of a check through this service, or the reason why a check cannot use it, and the
    /// fix.
    fn via(
        &self,
        plan: &CheckPlan,
        service: &ServiceId,
        method: Forwarding,
        raw: &RawService,
    ) -> Result<Via, (&'static str, &'static str)> {
        match (service.endpoint(), plan.probe.via()) {
            (_, None) => Err((
                "a check of this type cannot be a through-VIP check",
                "remove `via`, which is for tcp, http, https, smtp, dns and udp",
            )),
            (None, _) => Err((
                "a service with a mark or several ports has no single address and port for a check",
                "remove `via`, or use one port for the service",
            )),
            (Some((protocol, _)), Some(wanted)) if protocol != wanted => Err((
                "a check of this type does not use the service's protocol",
                "remove `via`, or use another type of check",
            )),
            (Some((_, virt)), _) if virt.port() == 0 => Err((
                "a service of all ports has no port for a check",
                "remove `via`, or use one port for the service",
            )),
            _ if plan.has_port => Err((
                "a through-VIP check uses the port of the service",
                "remove `port`, or write via = \"server\"",
            )),
            _ if is(raw.forward.as_ref(), "proxy") => Err((
                "lvsd forwards the connections of this service, and checks its servers itself",
                "remove `via`",
            )),
            _ if self.routed.is_some() => Err((
                "packets of this host do not reach a dataplane with the backend `tun`",
                "remove `via`, or the backend",
            )),
            _ if is(raw.vip.as_ref(), "host") => Err((
                "the host connects to its own address without the dataplane",
                "remove `via`; or remove `vip = \"host\"`, and the address from the host, so that the dataplane owns the address",
            )),
            (Some((_, virt)), _) => Ok(Via {
                service: *service,
                virt,
                method,
                by_default: false,
            }),
        }
    }

    /// Reads `passive` of a health check. Returns `None` without a value, for `false`, and for a
    /// number out of range, which is reported.
    fn passive(&mut self, value: Option<&Spanned<RawPassive>>) -> Option<Passive> {
        let value = value?;
        match value.get_ref() {
            RawPassive::TakesOut(takes_out) => takes_out.then_some(Passive::TakesOut),
            RawPassive::Number(number) => {
                let number = Spanned::new(value.span(), *number);
                let number = self.number(Some(&number), "`passive`", 1..=1_000_000)?;
                u32::try_from(number).ok().map(Passive::Asks)
            }
        }
    }

    /// Checks that the dataplane can observe unanswered connections to the servers of this service.
    /// Otherwise reports this once, and returns `None`.
    fn fits_passive(
        &mut self,
        passive: Passive,
        service: &ServiceId,
        method: Forwarding,
        at: &Range<usize>,
    ) -> Option<()> {
        let tcp = match service {
            ServiceId::Tcp { .. } | ServiceId::Fwmark { .. } => true,
            ServiceId::Udp { .. } | ServiceId::Sctp { .. } => false,
        };
        let nat = method.translates();
        let (title, help) = match passive {
            Passive::TakesOut if tcp => return Some(()),
            Passive::Asks(_) if tcp && nat => return Some(()),
            Passive::TakesOut => (
                "`passive` is for TCP services",
                "remove `passive`: a missing answer to a datagram may be normal",
            ),
            Passive::Asks(_) if !tcp => (
                "`passive` with a number is for TCP services",
                "remove `passive`: a missing answer to a datagram is not a failure",
            ),
            Passive::Asks(_) => (
                "`passive` with a number needs servers that are reached by NAT",
                "write passive = true, or set forward = \"nat\": with other methods, replies do not pass through the director",
            ),
        };
        self.once(Diagnostic::error(at.clone(), title).help(help));
        None
    }

    /// Returns the kind of a check, or reports a missing or unknown kind and returns `None`.
    fn kind(&mut self, table: &RawCheckTable, span: Range<usize>) -> Option<&'static KindInfo> {
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
                            finding.help(format!("the known types are: {}", known.join(", ")))
                        }
                    });
                }
                None if self.complete => self.report(
                    Diagnostic::error(span, "`type` of the check is missing")
                        .help("add type = \"tcp\""),
                ),
                None => {}
            }
        }
        kind
    }

    /// Reads the keys of the check's type, and reports unknown and invalid ones. `None` if the type
    /// is unknown or a key is invalid.
    fn probe(
        &mut self,
        kind: Option<&'static KindInfo>,
        table: &RawCheckTable,
        span: Range<usize>,
        service: Option<&ServiceId>,
    ) -> Option<Probe> {
        // In a check of an unknown type, report only keys that no type has.
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
            findings: Findings::default(),
        };
        let probe = (kind?.parse)(&mut keys);
        self.findings.append(keys.findings);
        probe
    }

    fn check_rhythm(&mut self, table: &RawCheckTable, span: Range<usize>) {
        for (what, value, most) in [
            ("interval", &table.interval, INTERVAL_MAX),
            ("fast_interval", &table.fast_interval, INTERVAL_MAX),
            ("timeout", &table.timeout, TIMEOUT_MAX),
        ] {
            if let Some(value) = value
                && !(TIME_MIN..=most).contains(&value.get_ref().0)
            {
                let title = match value.get_ref().0.is_zero() {
                    true => format!("`{what}` of a check cannot be 0"),
                    false => format!("`{what}` of a check is out of range"),
                };
                self.report(Diagnostic::error(value.span(), title).help(format!(
                    "write a time from {TIME_MIN:?} to {most:?}, such as \"2s\""
                )));
            }
        }
        for (what, value) in [("rise", &table.rise), ("fall", &table.fall)] {
            if let Some(value) = value
                && !(1..=1000).contains(&value.get_ref().0)
            {
                self.report(
                    Diagnostic::error(value.span(), format!("`{what}` is out of range"))
                        .help("use a number of checks from 1 to 1000"),
                );
            }
        }
        let interval = duration_or(table.interval.as_ref(), DEFAULT_INTERVAL);
        let timeout = duration_or(table.timeout.as_ref(), DEFAULT_TIMEOUT);
        if let Some(fast) = &table.fast_interval
            && fast.get_ref().0 > interval
        {
            self.report(
                Diagnostic::warning(fast.span(), "`fast_interval` is longer than `interval`").help(
                    "`fast_interval` is the interval while results contradict the present state: make it shorter than `interval`",
                ),
            );
        }
        if interval < timeout && !interval.is_zero() {
            let at = table.timeout.as_ref().or(table.interval.as_ref());
            self.report(
                Diagnostic::warning(
                    at.map_or(span, Spanned::span),
                    "a check may take longer than the interval between two checks",
                )
                .help("the next check is then delayed; set `timeout` to at most `interval`"),
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

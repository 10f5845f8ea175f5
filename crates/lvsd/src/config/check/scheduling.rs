//! Checks the scheduling of a service: scheduler, flags, persistence, and settings beyond the
//! kernel's IPVS.

use std::net::Ipv4Addr;
use std::ops::Range;
use std::time::Duration;

use lvs_api::words::meant;
use lvs_core::api::ServiceId;
use lvs_core::sched::{self, BUILT_IN};
use lvs_core::settings::{Limits, OnServerDown};
use lvs_core::{Family, ServiceConfig, ServiceFlags};
use toml::Spanned;

use super::{Checker, SLOW_START_MAX, port};
use crate::config::OnCheckFailure;
use crate::config::raw::{RawLimits, RawPersistence, RawService, Whole};
use crate::text::Diagnostic;

/// Default of `drain`: the time for which the connections of a server continue after the server was
/// removed from the configuration.
const DRAIN: Duration = Duration::from_secs(30);
const DRAIN_MAX: Duration = Duration::from_secs(86_400);

impl Checker<'_> {
    /// Returns a service's settings in the dataplane, and reports errors in them.
    pub(super) fn service_config(
        &mut self,
        raw: &RawService,
        span: &Range<usize>,
        identity: Option<(ServiceId, Family)>,
    ) -> ServiceConfig {
        let family = identity.map_or(Family::V4, |(_, family)| family);
        let id = identity.map(|(id, _)| id);
        let mut config = ServiceConfig::new(family, sched::DEFAULT);
        self.scheduler(raw, &mut config);
        self.scheduler_flags(raw, &mut config);
        self.one_packet(raw, id, &mut config);
        if let Some(persistence) = &raw.persistence {
            self.persistence(persistence.get_ref(), family, &mut config);
        }
        self.port_zero(raw, span, id, &config);
        self.extras(raw, &mut config);
        config
    }

    fn scheduler(&mut self, raw: &RawService, config: &mut ServiceConfig) {
        let Some(scheduler) = &raw.scheduler else {
            return;
        };
        let word = scheduler.get_ref().as_str();
        if BUILT_IN.iter().any(|about| about.name == word) {
            config.scheduler = word.to_owned();
            return;
        }
        let mut names: Vec<&str> = BUILT_IN.iter().map(|about| about.name).collect();
        names.sort_unstable();
        let finding = Diagnostic::error(scheduler.span(), format!("unknown scheduler `{word}`"));
        let list = format!("the schedulers are: {}", names.join(", "));
        self.report(match meant(&word.to_ascii_lowercase(), names) {
            Some(known) => finding.help(format!("did you mean \"{known}\"? {list}")),
            None => finding.help(list),
        });
    }

    fn scheduler_flags(&mut self, raw: &RawService, config: &mut ServiceConfig) {
        let scheduler = config.scheduler.clone();
        let own = BUILT_IN.iter().flat_map(|about| about.flags);
        let flags: Vec<(&str, u32)> = own.chain(sched::ANY_FLAGS).copied().collect();
        for flag in raw.scheduler_flags.iter().flatten() {
            let bit = self.word(Some(flag), &flags);
            config.flags.0 |= bit.unwrap_or(0);
            if let Some((_, Some(owner))) = sched::flag(flag.get_ref())
                && owner.name != scheduler
            {
                self.report(
                    Diagnostic::error(
                        flag.span(),
                        format!("the scheduler {scheduler} has no such flag"),
                    )
                    .help(format!(
                        "remove the flag, or set scheduler = \"{}\" (flag `{}`)",
                        owner.name,
                        flag.get_ref()
                            .trim_start_matches(owner.name)
                            .trim_start_matches('-')
                    )),
                );
            }
        }
    }

    fn one_packet(&mut self, raw: &RawService, id: Option<ServiceId>, config: &mut ServiceConfig) {
        let Some(one_packet) = raw.one_packet.as_ref().filter(|on| *on.get_ref()) else {
            return;
        };
        config.flags.0 |= ServiceFlags::ONE_PACKET;
        if matches!(id, Some(ServiceId::Tcp { .. } | ServiceId::Sctp { .. })) {
            self.report(
                Diagnostic::error(
                    one_packet.span(),
                    "one-packet scheduling is for UDP services only",
                )
                .help("remove `one_packet`, or set protocol = \"udp\""),
            );
        }
    }

    fn persistence(&mut self, raw: &RawPersistence, family: Family, config: &mut ServiceConfig) {
        config.flags.0 |= ServiceFlags::PERSISTENT;
        config.timeout = 360;
        if let Some(timeout) = &raw.timeout {
            let duration = timeout.get_ref().0;
            // ipvsadm's bounds: 1 second to 31 days.
            let seconds = duration.as_secs();
            if duration.subsec_millis() != 0 || !(1..=31 * 86_400).contains(&seconds) {
                self.report(
                    Diagnostic::error(
                        timeout.span(),
                        "`timeout` of the persistence is not a valid time",
                    )
                    .help("write whole seconds, from \"1s\" to \"31d\""),
                );
            }
            config.timeout = u32::try_from(seconds).unwrap_or(u32::MAX);
        }
        if let Some(netmask) = &raw.netmask {
            match parse_netmask(&netmask.get_ref().0, family) {
                Some(mask) => config.netmask = mask,
                None => self.report(
                    Diagnostic::error(
                        netmask.span(),
                        "`netmask` is not valid for this address family",
                    )
                    .help(match family {
                        Family::V4 => "write \"255.255.255.0\" or a prefix length, 1 to 32",
                        Family::V6 => "write a prefix length, 1 to 128",
                    }),
                ),
            }
        }
        if let Some(engine) = &raw.engine {
            config.engine = self
                .word(Some(engine), &[("sip", "sip")])
                .map(str::to_owned);
        }
    }

    /// Checks that a service with an address and port 0 has persistence.
    fn port_zero(
        &mut self,
        raw: &RawService,
        span: &Range<usize>,
        id: Option<ServiceId>,
        config: &ServiceConfig,
    ) {
        let zero = id.is_some_and(|id| !matches!(id, ServiceId::Fwmark { .. }) && port(&id) == 0);
        if !zero || config.flags.has(ServiceFlags::PERSISTENT) || !self.complete {
            return;
        }
        let at = raw.address.as_ref().map_or(span.clone(), Spanned::span);
        self.report(
            Diagnostic::error(
                at,
                "port 0 accepts every port, and needs persistence for that",
            )
            .help(
                "write \"ADDRESS:*\" for every port without persistence, add persistence = { timeout = \"6m\" }, or name the port",
            ),
        );
    }

    /// Reads the settings that the kernel's IPVS does not have into `config`, and reports errors in
    /// them.
    fn extras(&mut self, raw: &RawService, config: &mut ServiceConfig) {
        config.extras.on_server_down = self
            .word(
                raw.on_server_down.as_ref(),
                &[
                    ("kernel", OnServerDown::Kernel),
                    ("reset", OnServerDown::Reset),
                    ("reschedule", OnServerDown::Reschedule),
                    ("drop", OnServerDown::Drop),
                ],
            )
            .unwrap_or_default();
        if let Some(slow_start) = &raw.slow_start {
            let duration = slow_start.get_ref().0;
            if duration.subsec_millis() != 0 || duration.as_secs() > SLOW_START_MAX {
                self.report(
                    Diagnostic::error(slow_start.span(), "`slow_start` is not a valid time")
                        .help("write whole seconds, up to \"1d\"; \"0s\" is none"),
                );
            }
            config.extras.slow_start = u32::try_from(duration.as_secs()).unwrap_or(u32::MAX);
        }
        if let Some(limits) = &raw.limits {
            config.extras.limits = self.limits(limits);
        }
    }

    fn limits(&mut self, raw: &RawLimits) -> Limits {
        let mut number = |value: &Option<Spanned<Whole>>, what: &str, most: i64| {
            let n = self.number(value.as_ref(), what, 1..=most);
            n.and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
        };
        let mut count = |value, what| number(value, what, u32::MAX.into());
        let (connections, rate) = (
            count(&raw.connections, "connections"),
            count(&raw.rate, "rate"),
        );
        let source_rate = count(&raw.source_rate, "source_rate");
        let mut bits = |value, what, most| u8::try_from(number(value, what, most)).unwrap_or(0);
        Limits {
            connections,
            rate,
            source_rate,
            source_bits_v4: bits(&raw.source_bits_v4, "source_bits_v4", 32),
            source_bits_v6: bits(&raw.source_bits_v6, "source_bits_v6", 128),
        }
    }

    /// Reads `drain`: the time for which the connections of a server continue after the server was
    /// removed from the configuration. Without `drain`, warns if the scheduler refuses clients of a
    /// server that drains.
    pub(super) fn drain(&mut self, raw: &RawService, config: &ServiceConfig) -> Duration {
        let Some(drain) = &raw.drain else {
            if let (Some(at), Some(fallback)) = (&raw.scheduler, refuses_at_weight_0(config)) {
                self.once(
                    Diagnostic::warning(
                        at.span(),
                        "clients of a server that drains are refused for up to 30 s",
                    )
                    .label("the scheduler chooses no other server for these clients")
                    .help(fix(
                        fallback,
                        "drain = \"0s\" to delete servers at once, or \"30s\" to accept this",
                    )),
                );
            }
            return DRAIN;
        };
        if drain.get_ref().0 > DRAIN_MAX {
            self.report(
                Diagnostic::error(drain.span(), "`drain` is out of range")
                    .help("use at most \"1d\"; \"0s\" deletes a server at once"),
            );
        }
        drain.get_ref().0
    }

    /// Reads `on_check_failure`, the action if the check of a server fails, and reports
    /// combinations that harm clients.
    pub(super) fn on_check_failure(
        &mut self,
        raw: &RawService,
        config: &ServiceConfig,
        templates_stay: bool,
        checked: bool,
    ) -> OnCheckFailure {
        let given = raw.on_check_failure.as_ref();
        let words = [
            ("quiesce", OnCheckFailure::Quiesce),
            ("remove", OnCheckFailure::Remove),
        ];
        let chosen = self.word(given, &words).unwrap_or_default();
        if chosen == OnCheckFailure::Remove || !(checked || given.is_some()) {
            return chosen;
        }
        let moot =
            "a server whose check fails stays in the service: `on_server_down` then has no effect";
        let (at, title, help) = if config.extras.on_server_down != OnServerDown::Kernel {
            let at = given.or(raw.on_server_down.as_ref());
            let help = "set on_check_failure = \"remove\"; keep `on_server_down` if only servers that are removed from the file count as down";
            (at.map(Spanned::span), moot, help.to_owned())
        } else if given.is_some() {
            return chosen;
        } else if let Some(fallback) = refuses_at_weight_0(config) {
            let at = raw.scheduler.as_ref().map(Spanned::span);
            let title = "clients of a server whose check fails are refused";
            let help = fix(
                fallback,
                "on_check_failure = \"remove\", or \"quiesce\" to accept this",
            );
            (at, title, help)
        } else if !quiesces_at_zero(config, templates_stay) {
            let at = raw.persistence.as_ref().map(Spanned::span);
            let title = "clients stay on a server whose check fails";
            let help = "set on_check_failure = \"remove\", or the sysctl expire_quiescent_template = 1; or set on_check_failure = \"quiesce\" to accept this";
            (at, title, help.to_owned())
        } else {
            return chosen;
        };
        if let Some(at) = at {
            self.once(
                Diagnostic::warning(at, title)
                    .label("by default, a failed check sets the weight to 0")
                    .help(help),
            );
        }
        chosen
    }
}

/// The fix for a scheduler that refuses clients: the setting `key`, or the flag `fallback` of the
/// scheduler, if it has one.
fn fix(fallback: Option<&str>, key: &str) -> String {
    match fallback {
        Some(flag) => format!("set {key}; or set scheduler_flags = [\"{flag}\"]"),
        None => format!("set {key}"),
    }
}

/// Checks whether the scheduler refuses a client whose server has weight 0
/// ([`lvs_core::sched::AtZero`]). If so, returns `Some` with the flag that prevents this, if one
/// exists.
fn refuses_at_weight_0(config: &ServiceConfig) -> Option<Option<&'static str>> {
    let about = BUILT_IN
        .iter()
        .find(|about| about.name == config.scheduler)?;
    let flags = about.flags.iter().map(|(name, _)| *name);
    let mut fallback = flags.filter(|name| name.ends_with("-fallback"));
    about.refuses_at_zero(config.flags).then(|| fallback.next())
}

/// Whether new connections for a server with weight 0 go to the other servers. There are two
/// exceptions: a persistence template sends its client to a server with weight 0 (unless the sysctl
/// `expire_quiescent_template` is set), and some schedulers ([`lvs_core::sched::AtZero`]) refuse
/// clients of such a server.
pub(super) fn quiesces_at_zero(config: &ServiceConfig, templates_stay: bool) -> bool {
    let templates = templates_stay && config.flags.has(ServiceFlags::PERSISTENT);
    !templates && refuses_at_weight_0(config).is_none()
}

fn parse_netmask(text: &str, family: Family) -> Option<u32> {
    let text = text.trim_start_matches('/');
    match family {
        Family::V4 => {
            if let Ok(prefix @ 1..=32) = text.parse::<u32>() {
                return Some(u32::MAX << (32 - prefix));
            }
            text.parse::<Ipv4Addr>()
                .ok()
                .map(u32::from)
                // A mask consists of ones followed by zeros.
                .filter(|mask| *mask != 0 && mask.leading_ones() == mask.count_ones())
        }
        Family::V6 => text.parse().ok().filter(|p| (1..=128).contains(p)),
    }
}

//! How a service chooses: scheduler, flags, persistence, and what goes beyond the kernel's IPVS.

use std::net::Ipv4Addr;
use std::ops::Range;
use std::time::Duration;

use lvs_core::api::ServiceId;
use lvs_core::sched::{self, BUILT_IN};
use lvs_core::{Family, Limits, OnServerDown, ServiceConfig, ServiceFlags};
use lvs_dataplane::words::meant;
use toml::Spanned;

use super::{Checker, SLOW_START_MAX, port};
use crate::config::OnCheckFailure;
use crate::config::diagnostic::Diagnostic;
use crate::config::raw::{RawLimits, RawPersistence, RawService, Whole};

/// How long a server that has left the file may keep its connections, where nothing else is said.
const DRAIN: Duration = Duration::from_secs(30);
const DRAIN_MAX: Duration = Duration::from_secs(86_400);

impl Checker<'_> {
    /// A service's settings in the engine.
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
                        format!("the scheduler {scheduler} does not know this flag"),
                    )
                    .help(format!(
                        "remove it, or set scheduler = \"{}\" (flag `{}`)",
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
                    Diagnostic::error(timeout.span(), "not a timeout for persistence")
                        .help("give whole seconds, from \"1s\" to \"31d\""),
                );
            }
            config.timeout = u32::try_from(seconds).unwrap_or(u32::MAX);
        }
        if let Some(netmask) = &raw.netmask {
            match parse_netmask(&netmask.get_ref().0, family) {
                Some(mask) => config.netmask = mask,
                None => self.report(
                    Diagnostic::error(netmask.span(), "not a mask for this family of addresses")
                        .help(match family {
                            Family::V4 => "give \"255.255.255.0\" or a prefix length, 1 to 32",
                            Family::V6 => "give a prefix length, 1 to 128",
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

    /// Port 0 of a service with an address needs persistence.
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
                "port 0 takes every port, and needs persistence for that",
            )
            .help(
                "write \"ADDRESS:*\" for every port without persistence, add persistence = { timeout = \"6m\" }, or give the port",
            ),
        );
    }

    /// What goes beyond the kernel's IPVS.
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
                    Diagnostic::error(slow_start.span(), "not a time for a slow start")
                        .help("give whole seconds, up to \"1d\"; \"0s\" is none"),
                );
            }
            config.extras.slow_start = u32::try_from(duration.as_secs()).unwrap_or(u32::MAX);
        }
        if let Some(limits) = &raw.limits {
            config.extras.limits = self.limits(limits);
        }
    }

    /// What a service takes at most.
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

    /// How long a server that has left the file may keep its connections.
    pub(super) fn drain(&mut self, raw: &RawService, config: &ServiceConfig) -> Duration {
        let Some(drain) = &raw.drain else {
            return default_drain(config);
        };
        if drain.get_ref().0 > DRAIN_MAX {
            self.report(
                Diagnostic::error(drain.span(), "`drain` is out of range")
                    .help("give at most \"1d\"; \"0s\" deletes a server at once"),
            );
        }
        drain.get_ref().0
    }

    /// What a failed check does to a server.
    pub(super) fn on_check_failure(
        &mut self,
        raw: &RawService,
        config: &ServiceConfig,
        templates_stay: bool,
    ) -> OnCheckFailure {
        if let Some(old) = &raw.on_down {
            let finding = match &raw.on_check_failure {
                Some(new) => Diagnostic::error(old.span(), "`on_down` is the old name of `on_check_failure`, and both are given")
                    .context(new.span(), "the new name")
                    .help("remove `on_down`"),
                None => Diagnostic::warning(old.span(), "`on_down` is now called `on_check_failure`")
                    .help("rename it; `on_server_down` is another setting: what becomes of the connections of a server that goes"),
            };
            self.report(finding);
        }
        let given = raw.on_check_failure.as_ref().or(raw.on_down.as_ref());
        let words = [
            ("quiesce", OnCheckFailure::Quiesce),
            ("remove", OnCheckFailure::Remove),
        ];
        let chosen = self
            .word(given, &words)
            .unwrap_or_else(|| default_on_check_failure(config, templates_stay));
        if let Some(at) = given
            && chosen == OnCheckFailure::Quiesce
            && config.extras.on_server_down != OnServerDown::Kernel
        {
            self.report(
                Diagnostic::warning(
                    at.span(),
                    "a server whose check fails stays in the service: `on_server_down` does nothing then",
                )
                .label("weight 0: its connections go on")
                .help(
                    "remove this line, or say \"remove\"; keep it if only servers that are removed from the file should count as down",
                ),
            );
        }
        chosen
    }
}

/// How long a server that has left the file may keep its connections, where the file does not say
/// it: not at all where it says what becomes of them, or where weight 0 turns clients away.
fn default_drain(config: &ServiceConfig) -> Duration {
    if config.extras.on_server_down != OnServerDown::Kernel || refuses_at_weight_0(config) {
        Duration::ZERO
    } else {
        DRAIN
    }
}

/// Whether the scheduler refuses a client whose server has weight 0
/// ([`lvs_core::sched::AtZero`]).
fn refuses_at_weight_0(config: &ServiceConfig) -> bool {
    let about = BUILT_IN.iter().find(|about| about.name == config.scheduler);
    about.is_some_and(|about| about.refuses_at_zero(config.flags))
}

/// What a failed check does where the file does not say it.
///
/// Who says what becomes of the connections of a server that is down means one whose check has
/// failed: it goes. Weight 0 is gentler: a false alarm then costs no established connection, and a
/// listing still shows the server. But it keeps *new* connections coming where the choice does not
/// depend on the weight: a persistence template leads its client to a server of weight 0 (unless
/// the sysctl `expire_quiescent_template` is set), and some schedulers
/// ([`lvs_core::sched::AtZero`]) refuse a client whose server it is. There the server must go.
fn default_on_check_failure(config: &ServiceConfig, templates_stay: bool) -> OnCheckFailure {
    if config.extras.on_server_down != OnServerDown::Kernel
        || refuses_at_weight_0(config)
        || (templates_stay && config.flags.has(ServiceFlags::PERSISTENT))
    {
        OnCheckFailure::Remove
    } else {
        OnCheckFailure::Quiesce
    }
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
                // Ones, and behind them zeros.
                .filter(|mask| *mask != 0 && mask.leading_ones() == mask.count_ones())
        }
        Family::V6 => text.parse().ok().filter(|p| (1..=128).contains(p)),
    }
}

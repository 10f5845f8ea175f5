//! A service: what it is, what it takes, how it chooses.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;

use lvs_core::api::ServiceId;
use lvs_core::{Family, Forwarding, Limits, OnServerDown, Protocol, ServiceConfig, ServiceFlags};
use toml::Spanned;

use super::{Checker, SCHEDULERS, SLOW_START_MAX, WEIGHT_MAX, label, port};
use crate::config::diagnostic::{Diagnostic, did_you_mean};
use crate::config::ports::{self, ManyPorts};
use crate::config::raw::{RawLimits, RawPersistence, RawService, Whole};
use crate::config::{OnDown, Server, Service, VipMode};

impl Checker<'_> {
    pub(super) fn services(
        &mut self,
        raw: &[Spanned<RawService>],
        templates_stay: bool,
    ) -> Vec<Service> {
        let mut seen: HashMap<ServiceId, Range<usize>> = HashMap::new();
        let mut names: HashMap<String, Range<usize>> = HashMap::new();
        let mut owners: HashMap<IpAddr, (VipMode, Range<usize>)> = HashMap::new();
        let mut many: Vec<(ManyPorts, Range<usize>)> = Vec::new();
        let mut all = Vec::new();
        for service in raw {
            let span = service.span();
            let service = service.get_ref();
            let place = service
                .address
                .as_ref()
                .map(Spanned::span)
                .or_else(|| service.fwmark.as_ref().map(Spanned::span));
            if let Some(name) = &service.name {
                let twice = names.insert(name.get_ref().clone(), name.span());
                if let Some(first) = twice {
                    let title = format!("two services are called `{}`", name.get_ref());
                    self.report(
                        Diagnostic::error(name.span(), title)
                            .context(first, "the first one")
                            .help("give each its own name; it is what the log says"),
                    );
                }
            }
            let Some(checked) = self.service(service, &span, templates_stay) else {
                continue;
            };
            let place = place.unwrap_or(span);
            let place_of_overlap = place.clone();
            if let Some(first) = seen.insert(checked.id, place.clone()) {
                self.report(
                    Diagnostic::error(place, format!("service {} exists twice", label(&checked.id)))
                        .context(first, "the first one")
                        .help("put all its servers into one [[service]], or change address, port or protocol"),
                );
            }
            // One address cannot be the engine's and the host's at once.
            self.overlaps(&checked, &place_of_overlap, &mut many);
            if let (Some(mode), Some(address)) = (&service.vip, checked.virtual_ip())
                && checked.vip != VipMode::Auto
            {
                match owners.get(&address) {
                    Some((other, first)) if *other != checked.vip => self.report(
                        Diagnostic::error(
                            mode.span(),
                            format!(
                                "{address} is the engine's own for one service and the host's for another"
                            ),
                        )
                        .context(first.clone(), "here it is otherwise")
                        .help("give every service of this address the same `vip`"),
                    ),
                    Some(_) => {}
                    None => {
                        owners.insert(address, (checked.vip, mode.span()));
                    }
                }
            }
            all.push(checked);
        }
        all
    }

    /// Two services of many ports must not take the same packets.
    fn overlaps(
        &mut self,
        service: &Service,
        place: &Range<usize>,
        earlier: &mut Vec<(ManyPorts, Range<usize>)>,
    ) {
        let Some(many) = &service.ports else {
            return;
        };
        // What is written twice has been said already.
        let other = earlier.iter().find(|(other, _)| {
            other != many && (other.overlaps(many) || other.mark() == many.mark())
        });
        if let Some((other, first)) = other {
            let (title, help) = if other.overlaps(many) {
                (
                    "two services take the same ports",
                    "give each port of an address to one service; one with a single port may be inside of another's",
                )
            } else {
                (
                    "two services come to the same mark by chance",
                    "write the ports of one of them otherwise: in two ranges, say",
                )
            };
            self.report(
                Diagnostic::error(place.clone(), title)
                    .context(first.clone(), "the first one")
                    .help(help),
            );
        }
        earlier.push((many.clone(), place.clone()));
    }

    /// The identity of a service.
    fn identity(&mut self, raw: &RawService, span: &Range<usize>) -> Option<(ServiceId, Family)> {
        let protocol = self.word(
            raw.protocol.as_ref(),
            &[("tcp", 0u8), ("udp", 1), ("sctp", 2)],
        );
        let family = self.word(
            raw.family.as_ref(),
            &[("ipv4", Family::V4), ("ipv6", Family::V6)],
        );
        match (&raw.address, &raw.fwmark) {
            (Some(address), Some(mark)) => {
                self.report(
                    Diagnostic::error(mark.span(), "a service has an address or a mark, not both")
                        .context(address.span(), "the address")
                        .help("remove one of them"),
                );
                None
            }
            (None, None) => {
                self.missing(
                    span,
                    "`address` of the service",
                    "add its virtual address and port: address = \"192.0.2.10:80\"",
                );
                None
            }
            (None, Some(_)) => {
                let mark = self.number(raw.fwmark.as_ref(), "mark", 1..=i64::from(u32::MAX))?;
                if let Some(protocol) = &raw.protocol {
                    self.report(
                        Diagnostic::error(protocol.span(), "a mark takes every protocol")
                            .help("remove `protocol`"),
                    );
                }
                let family = family.unwrap_or(Family::V4);
                let mark = u32::try_from(mark).ok()?;
                if ports::MARKS.contains(&mark)
                    && let Some(place) = &raw.fwmark
                {
                    self.reserved_mark(place.span());
                }
                Some((ServiceId::Fwmark { mark, family }, family))
            }
            (Some(text), None) => {
                if let Some(family) = &raw.family {
                    self.report(
                        Diagnostic::error(
                            family.span(),
                            "`family` is for a service with a mark only",
                        )
                        .help("remove it; the address says which family it is"),
                    );
                }
                if raw.protocol.is_some() && protocol.is_none() {
                    return None;
                }
                if let Some(many) = many_ports(raw) {
                    return self.many_ports(text, many);
                }
                let address = self.socket_address(text, None)?;
                self.usable(text.span(), address.ip(), "VIP")?;
                let id = match protocol.unwrap_or(0) {
                    0 => ServiceId::Tcp { address },
                    1 => ServiceId::Udp { address },
                    _ => ServiceId::Sctp { address },
                };
                Some((id, Family::of(&address.ip())))
            }
        }
    }

    pub(super) fn many_ports(
        &mut self,
        text: &Spanned<String>,
        many: Result<ManyPorts, String>,
    ) -> Option<(ServiceId, Family)> {
        let many = match many {
            Ok(many) => many,
            Err(reason) => {
                self.report(
                    Diagnostic::error(text.span(), format!("not the ports of a service: {reason}"))
                        .help("write \"192.0.2.10:80\", \"192.0.2.10:80,8000-8999\" or \"192.0.2.10:*\""),
                );
                return None;
            }
        };
        self.usable(text.span(), many.ip, "VIP")?;
        let (mark, family) = (many.mark(), many.family());
        Some((ServiceId::Fwmark { mark, family }, family))
    }

    fn service(
        &mut self,
        raw: &RawService,
        span: &Range<usize>,
        templates_stay: bool,
    ) -> Option<Service> {
        let identity = self.identity(raw, span);
        let family = identity.map_or(Family::V4, |(_, f)| f);
        let mut config = ServiceConfig::new(family, "wlc");
        if let Some(scheduler) = &raw.scheduler {
            let word = scheduler.get_ref().as_str();
            if SCHEDULERS.contains(&word) {
                config.scheduler = word.to_owned();
            } else {
                let finding =
                    Diagnostic::error(scheduler.span(), format!("unknown scheduler `{word}`"));
                let list = format!("the schedulers are: {}", SCHEDULERS.join(", "));
                self.report(match did_you_mean(&word.to_ascii_lowercase(), SCHEDULERS) {
                    Some(k) => finding.help(format!("did you mean \"{k}\"? {list}")),
                    None => finding.help(list),
                });
            }
        }
        self.scheduler_flags(raw, &mut config);
        if let Some(one_packet) = &raw.one_packet
            && *one_packet.get_ref()
        {
            config.flags.0 |= ServiceFlags::ONE_PACKET;
            if matches!(
                identity,
                Some((ServiceId::Tcp { .. } | ServiceId::Sctp { .. }, _))
            ) {
                self.report(
                    Diagnostic::error(
                        one_packet.span(),
                        "one-packet scheduling is for UDP services only",
                    )
                    .help("remove `one_packet`, or set protocol = \"udp\""),
                );
            }
        }
        if let Some(persistence) = &raw.persistence {
            self.persistence(persistence.get_ref(), family, &mut config);
        }
        let persistent = config.flags.has(ServiceFlags::PERSISTENT);
        if let Some((id, _)) = identity
            && !matches!(id, ServiceId::Fwmark { .. })
            && port(&id) == 0
            && !persistent
            && self.complete
        {
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
        let vip = self
            .word(
                raw.vip.as_ref(),
                &[
                    ("auto", VipMode::Auto),
                    ("own", VipMode::Own),
                    ("host", VipMode::Host),
                ],
            )
            .unwrap_or_default();
        if let (VipMode::Host, Some(mode), Some(backend)) = (vip, &raw.vip, &self.routed) {
            let finding = Diagnostic::error(
                mode.span(),
                "what is addressed to the host itself is not routed to an engine with the backend `tun`",
            )
            .context(backend.clone(), "the backend")
            .help("take the address from the host and remove `vip`: the engine owns it then");
            self.report(finding);
        }
        let ports = many_ports(raw).and_then(Result::ok);
        if let (Some(vip), Some((ServiceId::Fwmark { .. }, _)), None) = (&raw.vip, identity, &ports)
        {
            self.report(
                Diagnostic::error(vip.span(), "a service with a mark has no VIP")
                    .help("remove `vip`; put the addresses on the host, or route them here"),
            );
        }
        self.extras(raw, &mut config);
        let on_down = self
            .word(
                raw.on_down.as_ref(),
                &[("quiesce", OnDown::Quiesce), ("remove", OnDown::Remove)],
            )
            .unwrap_or_else(|| default_on_down(&config, templates_stay));
        if let (Some(at), OnDown::Quiesce, true) = (
            &raw.on_down,
            on_down,
            config.extras.on_server_down != OnServerDown::Kernel,
        ) {
            self.report(
                Diagnostic::warning(
                    at.span(),
                    "a server whose check fails stays in the service: `on_server_down` does nothing then",
                )
                .label("weight 0: its connections go on")
                .help(
                    "remove `on_down`, or set it to \"remove\"; leave it if only servers that leave the file shall go down",
                ),
            );
        }
        let forward = self.forward(raw.forward.as_ref());
        let check = raw.check.as_ref();

        let mut servers: Vec<Server> = Vec::new();
        let mut seen: HashMap<SocketAddr, Range<usize>> = HashMap::new();
        for server in &raw.server {
            let Some((id, _)) = identity else {
                // Without the service's address nothing more can be said of its servers than their numbers.
                self.number(server.get_ref().weight.as_ref(), "weight", 0..=WEIGHT_MAX);
                continue;
            };
            let place = server.get_ref().address.as_ref().map(Spanned::span);
            let Some(checked) = self.server(server, raw, &id, forward, check) else {
                continue;
            };
            if let Some(place) = place
                && let Some(first) = seen.insert(checked.address, place.clone())
            {
                self.report(
                    Diagnostic::error(place, format!("server {} exists twice", checked.address))
                        .context(first, "the first one")
                        .help("remove one of them; to send it more connections, raise its weight"),
                );
            }
            servers.push(checked);
        }
        if raw.server.is_empty() && self.complete {
            let span = self.first_line(span);
            self.report(
                Diagnostic::warning(
                    span,
                    "the service has no server and refuses every connection",
                )
                .help("add a [[service.server]] with its address below"),
            );
        }
        let (id, _) = identity?;
        Some(Service {
            name: raw
                .name
                .as_ref()
                .map(|n| n.get_ref().clone())
                .or_else(|| ports.as_ref().map(ToString::to_string))
                .unwrap_or_else(|| label(&id)),
            id,
            config,
            ports,
            vip,
            on_down,
            servers,
        })
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
        const MOST: i64 = u32::MAX as i64;
        let mut count = |value: &Option<Spanned<Whole>>, what: &str| {
            let n = self.number(value.as_ref(), what, 1..=MOST);
            n.and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
        };
        let connections = count(&raw.connections, "connections");
        let rate = count(&raw.rate, "rate");
        let source_rate = count(&raw.source_rate, "source_rate");
        let mut bits = |value: &Option<Spanned<Whole>>, what: &str, most: i64| {
            let n = self.number(value.as_ref(), what, 1..=most);
            n.and_then(|n| u8::try_from(n).ok()).unwrap_or(0)
        };
        Limits {
            connections,
            rate,
            source_rate,
            source_bits_v4: bits(&raw.source_bits_v4, "source_bits_v4", 32),
            source_bits_v6: bits(&raw.source_bits_v6, "source_bits_v6", 128),
        }
    }

    /// The scheduler `ewma` measures answers that only NAT leads through the director.
    pub(super) fn sees_answers(
        &mut self,
        service: &RawService,
        method: Forwarding,
        at: &Range<usize>,
    ) -> Option<()> {
        let scheduler = service.scheduler.as_ref();
        let Some(scheduler) = scheduler.filter(|word| word.get_ref() == "ewma") else {
            return Some(());
        };
        if method.translates() {
            return Some(());
        }
        self.once(
            Diagnostic::error(
                at.clone(),
                "the scheduler ewma needs servers that are reached by NAT",
            )
            .label(
                "their answers do not pass through the director, which measures how soon they come",
            )
            .context(scheduler.span(), "the scheduler")
            .help("set forward = \"nat\", or another scheduler, such as \"wlc\""),
        );
        None
    }

    fn scheduler_flags(&mut self, raw: &RawService, config: &mut ServiceConfig) {
        let scheduler = config.scheduler.clone();
        for flag in raw.scheduler_flags.iter().flatten() {
            let bit = self.word(
                Some(flag),
                &[
                    ("sh-fallback", ServiceFlags::SCHED1),
                    ("sh-port", ServiceFlags::SCHED2),
                    ("mh-fallback", ServiceFlags::SCHED1),
                    ("mh-port", ServiceFlags::SCHED2),
                    ("flag-1", ServiceFlags::SCHED1),
                    ("flag-2", ServiceFlags::SCHED2),
                    ("flag-3", ServiceFlags::SCHED3),
                ],
            );
            config.flags.0 |= bit.unwrap_or(0);
            if let Some((owner @ ("sh" | "mh"), rest)) = flag.get_ref().split_once('-')
                && owner != scheduler
            {
                self.report(
                    Diagnostic::error(
                        flag.span(),
                        format!("the scheduler {scheduler} does not know this flag"),
                    )
                    .help(format!(
                        "remove it, or set scheduler = \"{owner}\" (flag `{rest}`)"
                    )),
                );
            }
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

    pub(super) fn forward(&mut self, raw: Option<&Spanned<String>>) -> Option<Forwarding> {
        // The words of ipvsadm's and keepalived's users are known, so that the remedy is exact.
        if let Some(value) = raw {
            let known = match value.get_ref().to_ascii_lowercase().as_str() {
                "masq" | "masquerading" | "-m" => Some("nat"),
                "route" | "gate" | "gatewaying" | "direct" | "-g" => Some("dr"),
                "tunnel" | "ipip" | "-i" => Some("tun"),
                "full-nat" | "full_nat" | "fnat" | "--fullnat" => Some("fullnat"),
                _ => None,
            };
            if let Some(word) = known {
                self.report(
                    Diagnostic::error(
                        value.span(),
                        format!("unknown forwarding method `{}`", value.get_ref()),
                    )
                    .help(format!("here it is called \"{word}\"")),
                );
                return None;
            }
        }
        let method = self.word(
            raw,
            &[
                ("nat", Forwarding::Nat),
                ("dr", Forwarding::Route),
                ("tun", Forwarding::Tunnel),
                ("fullnat", Forwarding::FullNat),
            ],
        );
        if let (Some(Forwarding::Route), Some(value), Some(backend)) = (method, raw, &self.routed) {
            let finding = Diagnostic::error(
                value.span(),
                "direct routing needs frames, and the backend `tun` has packets only",
            )
            .context(backend.clone(), "the backend")
            .help("set forward = \"nat\" or \"tun\", or remove `backend`");
            self.report(finding);
        }
        method
    }
}

/// The ports of a service that has many, or what is wrong with them.
pub(super) fn many_ports(raw: &RawService) -> Option<Result<ManyPorts, String>> {
    let protocol = match raw.protocol.as_ref().map(|word| word.get_ref().as_str()) {
        Some("udp") => Protocol::UDP,
        Some("sctp") => Protocol::SCTP,
        _ => Protocol::TCP,
    };
    ManyPorts::parse(raw.address.as_ref()?.get_ref(), protocol)
}

/// What a failed check does where the file does not say it.
///
/// Who says what becomes of the connections of a server that is down means one whose check has failed: it goes.
/// Weight 0 is gentler: a false alarm then costs no established connection, and a listing still shows the server. But
/// it keeps *new* connections coming where the choice does not depend on the weight: a persistence template leads its
/// client to a server of weight 0 (unless the sysctl `expire_quiescent_template` is set), and `dh`, `sh` and `mh` without
/// their fallback refuse a client whose slot is such a server. There the server must go.
fn default_on_down(config: &ServiceConfig, templates_stay: bool) -> OnDown {
    let hashed = match config.scheduler.as_str() {
        "dh" => true,
        "sh" | "mh" => !config.flags.has(ServiceFlags::SCHED1),
        _ => false,
    };
    if config.extras.on_server_down != OnServerDown::Kernel
        || hashed
        || (templates_stay && config.flags.has(ServiceFlags::PERSISTENT))
    {
        OnDown::Remove
    } else {
        OnDown::Quiesce
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
                .filter(|m| *m != 0)
        }
        Family::V6 => text.parse().ok().filter(|p| (1..=128).contains(p)),
    }
}

//! What a file means, and whether that makes sense: addresses, names, ranges, and what fits together.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use lvs_core::api::{LocalPool, ServiceId};
use lvs_core::mark::MarkRule;
use lvs_core::{
    Family, Forwarding, OnServerDown, Protocol, ServerConfig, ServiceConfig, ServiceFlags, Sysctls,
    helper_ports,
};
use toml::Spanned;

use super::diagnostic::{Diagnostic, did_you_mean};
use super::ports::{self, ManyPorts, is_generated};
use super::raw::{
    RawCheck, RawCheckTable, RawConfig, RawDataplane, RawPersistence, RawServer, RawService, Whole,
};
use super::{Check, CheckKind, Config, Daemon, Dataplane, OnDown, Server, Service, VipMode};

/// Schedulers of IPVS, by ipvsadm's names, and one of the engine's own. An engine may know fewer; it then says so.
const SCHEDULERS: [&str; 16] = [
    "rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "fo", "ovf", "twos",
    "ewma", "none",
];

/// The longest slow start: a day.
const SLOW_START_MAX: u64 = 86_400;

/// The kernel's bound of a weight, and ipvsadm's.
const WEIGHT_MAX: i64 = i32::MAX as i64;

/// Checks everything. `complete` is false if parts of the file were left out because they could not be read; what is
/// missing is then not complained about.
pub(super) fn check(
    raw: &RawConfig,
    text: &str,
    complete: bool,
    findings: &mut Vec<Diagnostic>,
) -> Config {
    let mut checker = Checker {
        text,
        complete,
        findings,
        routed: None,
        local: None,
    };
    let dataplane = checker.dataplane(&raw.dataplane);
    checker.local = dataplane
        .local
        .as_ref()
        .map(|local| local.addresses.clone());
    let sysctls = checker.sysctls(raw);
    let marks = checker.marks(raw);
    let reuse_templates = sysctls
        .iter()
        .any(|(n, v)| n == "expire_quiescent_template" && v != "0");
    let services = checker.services(&raw.service, !reuse_templates);
    let port_marks = port_marks(&services);
    Config {
        daemon: Daemon {
            adopt: raw.lvsd.adopt.unwrap_or(false),
            log: raw.lvsd.log.as_ref().map(|l| l.get_ref().clone()),
        },
        dataplane,
        sysctls,
        marks,
        port_marks,
        services,
    }
}

/// The rules for services of many ports.
fn port_marks(services: &[Service]) -> Vec<String> {
    let apart = |many: &ManyPorts| -> Vec<u16> {
        services
            .iter()
            .filter_map(|service| endpoint(&service.id))
            .filter(|(protocol, addr)| *protocol == many.protocol && addr.ip() == many.ip)
            .map(|(_, addr)| addr.port())
            .collect()
    };
    let many = services.iter().filter_map(|service| service.ports.as_ref());
    many.filter_map(|many| many.rule(&apart(many)))
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
    complete: bool,
    findings: &'a mut Vec<Diagnostic>,
    /// Where the file says that the host routes packets to the engine.
    routed: Option<Range<usize>>,
    /// Addresses for full NAT, where the file names them.
    local: Option<Vec<IpAddr>>,
}

impl Checker<'_> {
    fn report(&mut self, finding: Diagnostic) {
        self.findings.push(finding);
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
        self.report(match did_you_mean(&lower, names.iter().copied()) {
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

    /// Refuses a word that the engine knows and cannot do.
    fn not_built(&mut self, value: Option<&Spanned<String>>, key: &str, word: &str, instead: &str) {
        if let Some(value) = value.filter(|value| value.get_ref() == word) {
            self.report(
                Diagnostic::error(value.span(), format!("{key} = \"{word}\" is not built yet"))
                    .help(format!("write {key} = \"{instead}\", or leave it out")),
            );
        }
    }

    fn dataplane(&mut self, raw: &RawDataplane) -> Dataplane {
        let same = |words: &[&'static str]| -> Vec<(&'static str, &'static str)> {
            words.iter().map(|w| (*w, *w)).collect()
        };
        let mut owned = |value: Option<&Spanned<String>>, words: &[&'static str]| {
            self.word(value, &same(words)).map(str::to_owned)
        };
        let backend = owned(
            raw.backend.as_ref(),
            &["auto", "af_packet", "af_xdp", "tun"],
        );
        let profile = owned(raw.profile.as_ref(), &["kernel", "modern"]);
        let when_full = owned(raw.when_full.as_ref(), &["drop", "evict"]);
        self.not_built(raw.backend.as_ref(), "backend", "af_xdp", "af_packet");
        self.not_built(raw.when_full.as_ref(), "when_full", "evict", "drop");
        if backend.as_deref() == Some("tun") {
            self.routed = raw.backend.as_ref().map(Spanned::span);
        }
        if let Some(helpers) = &raw.helper {
            for helper in &helpers.get_ref().0 {
                if let Err(error) = helper_ports(helper) {
                    self.report(
                        Diagnostic::error(helpers.span(), format!("helper `{helper}`: {error}"))
                            .help("write \"ftp\", or \"ftp=21,2121\" with ports of its own"),
                    );
                }
            }
        }
        if let Some(interfaces) = &raw.interface {
            for interface in &interfaces.get_ref().0 {
                let (name, addresses) = match interface.split_once('=') {
                    Some((name, addresses)) => (name, Some(addresses)),
                    None => (interface.as_str(), None),
                };
                if addresses.is_some_and(|all| !are_vlan_addresses(name, all)) {
                    self.report(
                        Diagnostic::error(
                            interfaces.span(),
                            format!("`{interface}` is no VLAN with addresses"),
                        )
                        .help("as \"eth0.100=10.0.100.1/24,fd00:100::1/64\", VLANs 1 to 4094"),
                    );
                }
                // IFNAMSIZ is 16 with the NUL.
                if name.is_empty() || name.len() > 15 || name.contains(['/', ' ']) {
                    self.report(
                        Diagnostic::error(
                            interfaces.span(),
                            format!("`{name}` cannot be an interface"),
                        )
                        .help("an interface's name has 1 to 15 bytes; `ip -br link` lists them"),
                    );
                }
            }
            if raw.no_interfaces.as_ref().is_some_and(|n| *n.get_ref()) {
                self.report(
                    Diagnostic::error(
                        interfaces.span(),
                        "`interface` and `no_interfaces` contradict each other",
                    )
                    .help("remove one of them"),
                );
            }
        }
        let echo = self.word(raw.echo.as_ref(), &[("answer", "answer"), ("drop", "drop")]);
        let mut count = |value: Option<&Spanned<Whole>>, what: &str, least: i64| {
            let number = self.number(value, what, least..=i64::from(u32::MAX));
            number.and_then(|n| u32::try_from(n).ok())
        };
        let echo_limit = count(raw.echo_limit.as_ref(), "number of echo requests", 0);
        let icmp_msgs_per_sec = count(
            raw.icmp_msgs_per_sec.as_ref(),
            "number of ICMP errors in a second",
            0,
        );
        let icmp_msgs_burst = count(
            raw.icmp_msgs_burst.as_ref(),
            "number of ICMP errors at once",
            1,
        );
        if let Some(size) = &raw.clamp_mss {
            // What every IPv4 host takes.
            const LEAST: u16 = 536;
            let text = size.get_ref().0.as_str();
            let number = text.parse::<u16>().ok().filter(|&n| n >= LEAST);
            if text != "auto" && number.is_none() {
                self.report(
                    Diagnostic::error(size.span(), format!("`{text}` is no segment size")).help(
                        format!("give \"auto\", or a number from {LEAST} to {}", u16::MAX),
                    ),
                );
            }
        }
        let workers = raw.workers.as_ref().filter(|n| n.get_ref().0 != 1);
        if let Some(value) = workers {
            let title = match value.get_ref().0 {
                ..1 => format!("number of workers {} is out of range", self.written(value)),
                _ => "more than one worker is not built yet".to_owned(),
            };
            self.report(
                Diagnostic::error(value.span(), title).help("write workers = 1, or leave it out"),
            );
        }
        let max_connections = self.number(
            raw.max_connections.as_ref(),
            "number of connections",
            1..=i64::from(u32::MAX),
        );
        if let Some(socket) = &raw.socket {
            let path = socket.get_ref();
            // sun_path has 108 bytes.
            if path.is_empty() || path == "@" || path.len() > 107 {
                self.report(
                    Diagnostic::error(socket.span(), "not the name of a socket").help(
                        "give `@name` for an abstract socket, or a path of at most 107 bytes",
                    ),
                );
            }
        }
        let local = self.local_pool(raw);
        let list =
            |v: &Option<Spanned<super::raw::OneOrMore>>| v.as_ref().map(|v| v.get_ref().0.clone());
        Dataplane {
            interfaces: list(&raw.interface).unwrap_or_default(),
            no_interfaces: raw.no_interfaces.as_ref().is_some_and(|n| *n.get_ref()),
            backend,
            workers: raw.workers.is_some().then_some(1),
            socket: raw.socket.as_ref().map(|s| s.get_ref().clone()),
            profile,
            own_vips: raw.own_vips.unwrap_or(false),
            local,
            helpers: list(&raw.helper).unwrap_or_default(),
            echo: echo.map(str::to_owned),
            echo_limit,
            clamp_mss: raw.clamp_mss.as_ref().map(|size| size.get_ref().0.clone()),
            icmp_ratelimit: raw.icmp_ratelimit.as_ref().map(|time| time.get_ref().0),
            icmp_msgs_per_sec,
            icmp_msgs_burst,
            max_connections: max_connections.and_then(|n| u32::try_from(n).ok()),
            when_full,
            program: raw.program.as_ref().map(|p| p.get_ref().clone()),
        }
    }

    /// The addresses that stand for clients with full NAT.
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
                Diagnostic::error(on.span(), "`hairpin` needs an address that stands for clients")
                    .help("add local_addresses = [\"...\"]: addresses of this host, or free ones that the engine will answer for"),
            );
        }
        let given = raw.local_addresses.is_some() || raw.hairpin.is_some();
        given.then_some(LocalPool { addresses, hairpin })
    }

    fn marks(&mut self, raw: &RawConfig) -> Vec<String> {
        let mut all = Vec::new();
        for spanned in &raw.mark {
            let rule = spanned.get_ref();
            let mark = rule.mark.as_ref();
            if mark.is_some() && self.number(mark, "mark", 1..=i64::from(u32::MAX)).is_none() {
                continue;
            }
            let mut words = Vec::new();
            let mut option = |name: &str, value: Option<String>| {
                if let Some(value) = value {
                    words.extend([name.to_owned(), value]);
                }
            };
            option("--interface", rule.interface.clone());
            option("--source", rule.source.clone());
            option("--destination", rule.destination.clone());
            option("--protocol", rule.protocol.clone());
            option("--ports", rule.ports.as_ref().map(|ports| ports.0.clone()));
            option("--mark", mark.map(|mark| mark.get_ref().0.to_string()));
            for (name, set) in [("--drop", rule.drop), ("--host", rule.host)] {
                if set == Some(true) {
                    words.push(name.to_owned());
                }
            }
            match MarkRule::parse(&words) {
                Ok(rule) => {
                    let rule = rule.to_string();
                    if is_generated(&rule) {
                        self.reserved_mark(self.first_line(&spanned.span()));
                    }
                    all.push(rule);
                }
                // The rule's words are the keys of the table with dashes in front.
                Err(reason) => self.report(
                    Diagnostic::error(
                        self.first_line(&spanned.span()),
                        format!("this rule for marks does not work: {}", reason.replace("--", "")),
                    )
                    .help("a rule has `destination`, and one of `mark = N`, `drop = true` or `host = true`"),
                ),
            }
        }
        all
    }

    fn reserved_mark(&mut self, span: Range<usize>) {
        let (first, last) = (ports::MARKS.start(), ports::MARKS.end());
        self.report(
            Diagnostic::error(span, "this mark is kept for services of many ports")
                .help(format!("give one below {first} or above {last}")),
        );
    }

    fn sysctls(&mut self, raw: &RawConfig) -> Vec<(String, String)> {
        let mut all = Vec::new();
        for (name, value) in &raw.sysctl {
            let key = name.get_ref().as_str();
            if !Sysctls::NAMES.contains(&key) {
                let finding = Diagnostic::error(name.span(), format!("unknown sysctl `{key}`"));
                self.report(match did_you_mean(key, Sysctls::NAMES.iter().copied()) {
                    Some(word) => finding.help(format!("did you mean `{word}`?")),
                    None => finding.help("the names are those in /proc/sys/net/ipv4/vs/"),
                });
                continue;
            }
            let text = value.get_ref().0.trim();
            let numbers = text
                .split_ascii_whitespace()
                .all(|w| w.parse::<i32>().is_ok());
            if key != "est_cpulist" && (text.is_empty() || !numbers) {
                self.report(
                    Diagnostic::error(value.span(), format!("`{text}` is not a value of {key}"))
                        .help(
                            "sysctls of IPVS are whole numbers; sync_threshold takes two: \"3 50\"",
                        ),
                );
                continue;
            }
            all.push((key.to_owned(), text.to_owned()));
        }
        all
    }

    fn services(&mut self, raw: &[Spanned<RawService>], templates_stay: bool) -> Vec<Service> {
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

    fn many_ports(
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
    }

    /// The scheduler `ewma` measures answers that only NAT leads through the director.
    fn sees_answers(
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

    fn forward(&mut self, raw: Option<&Spanned<String>>) -> Option<Forwarding> {
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

    fn server(
        &mut self,
        server: &Spanned<RawServer>,
        service: &RawService,
        id: &ServiceId,
        forward: Option<Forwarding>,
        check: Option<&Spanned<RawCheck>>,
    ) -> Option<Server> {
        let span = server.span();
        let raw = server.get_ref();
        let weight = self.number(raw.weight.as_ref(), "weight", 0..=WEIGHT_MAX);
        let bound = 0..=i64::from(i32::MAX);
        let upper = self.number(raw.upper.as_ref(), "upper threshold", bound.clone());
        let lower = self.number(raw.lower.as_ref(), "lower threshold", bound);
        if let (Some(at), Some(lower)) = (&raw.lower, lower)
            && lower > upper.unwrap_or(0)
        {
            let finding = Diagnostic::error(
                at.span(),
                format!(
                    "`lower` ({lower}) is above `upper` ({})",
                    upper.unwrap_or(0)
                ),
            );
            self.report(match &raw.upper {
                Some(upper) => finding.context(upper.span(), "the upper threshold").help(
                    "a server takes connections again below `lower`, which is at most `upper`",
                ),
                None => {
                    finding.help("set `upper` too: the number of connections at which it stops")
                }
            });
        }
        let method = match &raw.forward {
            Some(own) => self.forward(Some(own)),
            None => forward,
        };
        if method.is_none() && raw.forward.is_none() && service.forward.is_none() {
            self.missing(
                &span,
                "`forward` of the server and of its service",
                "add forward = \"nat\", \"dr\", \"tun\" or \"fullnat\" to the service",
            );
        }
        let Some(text) = &raw.address else {
            self.missing(
                &span,
                "`address` of the server",
                "add its address and port: address = \"10.0.0.11:80\"",
            );
            return None;
        };
        let address = self.socket_address(text, Some(port(id)))?;
        self.usable(text.span(), address.ip(), "server")?;
        let method = method?;
        let forward = raw.forward.as_ref().or(service.forward.as_ref());
        let place = forward.map_or_else(|| text.span(), Spanned::span);
        self.sees_answers(service, method, &place)?;
        self.fits(text, address, service, id, method)?;
        self.fits_full_nat(text, address, service, method)?;
        let check = match &raw.check {
            Some(own) => self.check(own, id, address, &own.span()),
            None => check.and_then(|c| self.check(c, id, address, &text.span())),
        };
        let mut config = ServerConfig::new(1, method);
        config.weight = i32::try_from(weight.unwrap_or(1)).unwrap_or(1);
        config.upper = u32::try_from(upper.unwrap_or(0)).unwrap_or(0);
        config.lower = u32::try_from(lower.unwrap_or(0)).unwrap_or(0);
        Some(Server {
            address,
            config,
            check,
        })
    }

    /// Whether a server of full NAT can have what that needs.
    fn fits_full_nat(
        &mut self,
        text: &Spanned<String>,
        address: SocketAddr,
        service: &RawService,
        method: Forwarding,
    ) -> Option<()> {
        if method != Forwarding::FullNat {
            return Some(());
        }
        let family = Family::of(&address.ip());
        let local = self.local.as_ref();
        if local.is_some_and(|local| !local.iter().any(|addr| Family::of(addr) == family))
            || local.is_none()
        {
            let kind = if family == Family::V4 { "IPv4" } else { "IPv6" };
            self.report(
                Diagnostic::error(text.span(), format!("full NAT needs an {kind} address that stands for clients")).help(
                    "add local_addresses = [\"...\"] to [dataplane]: addresses of this host, or free ones that the engine will answer for",
                ),
            );
            return None;
        }
        if let Some(one) = service.one_packet.as_ref().filter(|one| *one.get_ref()) {
            self.report(
                Diagnostic::error(
                    one.span(),
                    "full NAT keeps connections, which one-packet scheduling does not",
                )
                .context(text.span(), "a server with full NAT")
                .help("remove `one_packet`, or set forward = \"nat\""),
            );
            return None;
        }
        Some(())
    }

    /// Whether a server can serve its service at all.
    fn fits(
        &mut self,
        text: &Spanned<String>,
        address: SocketAddr,
        service: &RawService,
        id: &ServiceId,
        method: Forwarding,
    ) -> Option<()> {
        let vip = virtual_address(id);
        let vip_span = service.address.as_ref().map(Spanned::span);
        let family = match id {
            ServiceId::Fwmark { family, .. } => Some(*family),
            _ => vip.map(|v| Family::of(&v.ip())),
        };
        if family.is_some_and(|f| f != Family::of(&address.ip())) && method != Forwarding::Tunnel {
            self.report(
                Diagnostic::error(text.span(), "server and service are of different families")
                    .help("give a server of the service's family, or set forward = \"tun\""),
            );
            return None;
        }
        let Some(vip) = vip else {
            if !method.translates() && address.port() != 0 && many_ports(service).is_some() {
                self.report(
                    Diagnostic::error(
                        text.span(),
                        "only NAT can send the packets of many ports to one port",
                    )
                    .help(format!("write \"{}\" without a port", address.ip())),
                );
                return None;
            }
            return Some(());
        };
        if address.ip() == vip.ip() && (!method.translates() || address.port() == vip.port()) {
            let mut finding = Diagnostic::error(
                text.span(),
                "the server is the virtual service itself: a loop",
            )
            .help("give the real server's own address, not the VIP that it has on lo");
            if let Some(span) = vip_span {
                finding = finding.context(span, "the VIP");
            }
            self.report(finding);
            return None;
        }
        if !method.translates() && address.port() != vip.port() {
            let name = if method == Forwarding::Route {
                "direct routing"
            } else {
                "tunnelling"
            };
            let mut finding = Diagnostic::error(
                text.span(),
                format!(
                    "{name} cannot change the port {} to {}",
                    vip.port(),
                    address.port()
                ),
            )
            .label("the server gets the packet as the client sent it")
            .help(format!(
                "write \"{}\" and let the server listen on port {}, or set forward = \"nat\"",
                SocketAddr::new(address.ip(), vip.port()),
                vip.port()
            ));
            if let Some(span) = vip_span {
                finding = finding.context(span, "the service's port");
            }
            self.report(finding);
            return None;
        }
        if vip.port() != 0 && address.port() == 0 {
            self.report(
                Diagnostic::error(text.span(), "port 0 is not a server's port").help(format!(
                    "leave the port out to take the service's, {}",
                    vip.port()
                )),
            );
            return None;
        }
        Some(())
    }

    /// The check of one server; `None` if there is none or it is wrong. `at` is where a missing port is shown.
    fn check(
        &mut self,
        raw: &Spanned<RawCheck>,
        id: &ServiceId,
        server: SocketAddr,
        at: &Range<usize>,
    ) -> Option<Check> {
        let before = self.findings.len();
        let table = match raw.get_ref() {
            RawCheck::Word(word) if word == "none" => return None,
            RawCheck::Word(word) => {
                self.once(
                    Diagnostic::error(raw.span(), format!("unknown check `{word}`")).help(
                        "write \"none\", or a table: check = { type = \"tcp\", interval = \"5s\" }",
                    ),
                );
                return None;
            }
            RawCheck::Table(table) => table,
        };
        self.check_table(table, raw, id);
        let port_given = table
            .port
            .as_ref()
            .and_then(|p| u16::try_from(p.get_ref().0).ok());
        let target = SocketAddr::new(server.ip(), port_given.unwrap_or(server.port()));
        if target.port() == 0 {
            self.once(
                Diagnostic::error(at.clone(), "the check has no port to connect to")
                    .help("the server has no port of its own; add `port` to the check"),
            );
        }
        if self.findings[before..]
            .iter()
            .any(|d| d.severity == super::Severity::Error)
        {
            return None;
        }
        let or = |v: &Option<Spanned<super::raw::RawDuration>>, default: u64| {
            v.as_ref()
                .map_or(Duration::from_secs(default), |d| d.get_ref().0)
        };
        let count = |v: &Option<Spanned<Whole>>, default: u32| {
            v.as_ref()
                .and_then(|n| u32::try_from(n.get_ref().0).ok())
                .unwrap_or(default)
        };
        Some(Check {
            kind: CheckKind::Tcp,
            target,
            interval: or(&table.interval, 5),
            timeout: or(&table.timeout, 2),
            rise: count(&table.rise, 2),
            fall: count(&table.fall, 3),
        })
    }

    fn check_table(&mut self, table: &RawCheckTable, raw: &Spanned<RawCheck>, id: &ServiceId) {
        match &table.kind {
            Some(kind) if kind.get_ref() == "tcp" => {}
            Some(kind) => self.once(
                Diagnostic::error(
                    kind.span(),
                    format!("unknown type of check `{}`", kind.get_ref()),
                )
                .help("this version knows: tcp"),
            ),
            None if self.complete => self.once(
                Diagnostic::error(raw.span(), "`type` of the check is missing")
                    .help("add type = \"tcp\""),
            ),
            None => {}
        }
        for (what, value) in [("interval", &table.interval), ("timeout", &table.timeout)] {
            if let Some(value) = value
                && value.get_ref().0.is_zero()
            {
                self.once(
                    Diagnostic::error(value.span(), format!("`{what}` of a check cannot be 0"))
                        .help("give some time, such as \"2s\""),
                );
            }
        }
        for (what, value) in [("rise", &table.rise), ("fall", &table.fall)] {
            if let Some(value) = value
                && !(1..=1000).contains(&value.get_ref().0)
            {
                self.once(
                    Diagnostic::error(value.span(), format!("`{what}` is out of range"))
                        .help("give a number of checks, 1 to 1000"),
                );
            }
        }
        if let Some(port) = &table.port {
            if !(1..=65_535).contains(&port.get_ref().0) {
                self.once(
                    Diagnostic::error(port.span(), "the port is out of range")
                        .help("give a port, 1 to 65535"),
                );
            }
        } else if matches!(id, ServiceId::Udp { .. } | ServiceId::Sctp { .. }) {
            self.once(
                Diagnostic::warning(raw.span(), "a TCP check of a service that is not TCP")
                    .help("give the check a `port` on which the servers take TCP connections, if it is meant"),
            );
        }
        let interval = table
            .interval
            .as_ref()
            .map_or(Duration::from_secs(5), |d| d.get_ref().0);
        let timeout = table
            .timeout
            .as_ref()
            .map_or(Duration::from_secs(2), |d| d.get_ref().0);
        if interval < timeout && !interval.is_zero() {
            let at = table
                .timeout
                .as_ref()
                .or(table.interval.as_ref())
                .map_or(raw.span(), Spanned::span);
            self.once(
                Diagnostic::warning(at, "a check may take longer than the interval between two")
                    .help("the next one then waits; make `timeout` at most `interval`"),
            );
        }
    }

    /// Reports a finding about a check of the service, which every server would repeat.
    fn once(&mut self, finding: Diagnostic) {
        let known = self
            .findings
            .iter()
            .any(|d| d.primary.0 == finding.primary.0 && d.title == finding.title);
        if !known {
            self.report(finding);
        }
    }

    /// An address with its port, or with `default_port` if it has none.
    fn socket_address(
        &mut self,
        text: &Spanned<String>,
        default_port: Option<u16>,
    ) -> Option<SocketAddr> {
        let word = text.get_ref().trim();
        if let Ok(address) = word.parse::<SocketAddr>() {
            return Some(address);
        }
        let bare = word.trim_start_matches('[').trim_end_matches(']');
        if let Ok(ip) = bare.parse::<IpAddr>() {
            if let Some(port) = default_port {
                return Some(SocketAddr::new(ip, port));
            }
            self.report(
                Diagnostic::error(text.span(), format!("`{word}` has no port")).help(format!(
                    "write it as \"{}\" (port 0 takes every port and needs persistence)",
                    SocketAddr::new(ip, 80)
                )),
            );
            return None;
        }
        let help = if word
            .split(':')
            .next()
            .is_some_and(|host| host.chars().any(char::is_alphabetic) && !word.contains("::"))
        {
            "names are not resolved, so that a reload means the same at any time; write the numbers: \"192.0.2.10:80\""
        } else {
            "write \"192.0.2.10:80\" or \"[2001:db8::1]:443\""
        };
        self.report(
            Diagnostic::error(
                text.span(),
                format!("`{word}` is not an address and a port"),
            )
            .help(help),
        );
        None
    }

    /// Whether packets can be sent to such an address at all (`ip_vs_new_dest`).
    fn usable(&mut self, span: Range<usize>, ip: IpAddr, what: &str) -> Option<()> {
        let bad = match ip {
            IpAddr::V4(v4) => v4.is_unspecified() || v4.is_multicast() || v4.is_broadcast(),
            IpAddr::V6(v6) => {
                v6.is_unspecified()
                    || v6.is_multicast()
                    || v6.is_unicast_link_local()
                    || v6.to_ipv4_mapped().is_some()
            }
        };
        if bad {
            self.report(
                Diagnostic::error(span, format!("{ip} cannot be the address of a {what}"))
                    .help("give a unicast address that is not link-local"),
            );
            return None;
        }
        Some(())
    }
}

/// The ports of a service that has many, or what is wrong with them.
fn many_ports(raw: &RawService) -> Option<Result<ManyPorts, String>> {
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

/// Whether `name` is that of a VLAN of a trunk, and `all` addresses with prefix lengths.
fn are_vlan_addresses(name: &str, all: &str) -> bool {
    let vlan = name.rsplit_once('.').is_some_and(|(trunk, number)| {
        let number = number.parse::<u16>();
        !trunk.is_empty() && number.is_ok_and(|number| (1..=4094).contains(&number))
    });
    vlan && all.split(',').all(|address| {
        address.split_once('/').is_some_and(|(ip, len)| {
            let width = ip
                .parse::<IpAddr>()
                .map(|ip| if ip.is_ipv4() { 32 } else { 128 });
            matches!((width, len.parse::<u8>()), (Ok(width), Ok(len)) if len <= width)
        })
    })
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

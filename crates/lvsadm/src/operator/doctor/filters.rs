//! Findings about filters of the host: filters that name services but do not receive their packets,
//! and filters that may drop packets of services.

use lvs_core::api::{Info, ServiceInfo};
use lvs_sys::attached::{self, Place};

use super::Findings;
use super::code::Code;
use super::devices::{self, Device};
use super::host::output;
use super::services::virt;
use crate::operator::service_text;

pub(super) fn look(services: &[ServiceInfo], info: &Info, findings: &mut Findings) {
    if services.is_empty() {
        return;
    }
    let ports = info.interfaces.iter();
    let ports: Vec<&str> = ports.map(|interface| &*interface.name).collect();
    let devices = devices::all(&ports, &output("ip", &["-j", "-d", "link", "show"]));
    rules(services, &devices, &ruleset(), findings);
    for (at, device) in devices.iter().enumerate() {
        let name = &*device.name;
        // Report a rule at one device once, even if several other devices are above it.
        let again = devices[..at].iter().any(|other| other.name == name);
        if !again {
            express_data_path(device, findings);
        }
        for side in [Side::Ingress, Side::Egress] {
            if side == Side::Egress && again {
                continue;
            }
            let filters = output("tc", &["filter", "show", "dev", name, side.word()]);
            traffic_control(device, side, &filters, findings);
        }
        for place in Place::ALL {
            if place != Place::Ingress && again {
                continue;
            }
            // Usually, only root may list programs and nf_tables rules. For other users, there are
            // no findings about them.
            let names = attached::names(name, place).unwrap_or_default();
            programs(device, place, &names, findings);
        }
    }
}

/// The host's firewall rules, both of nftables and of the legacy iptables.
pub(super) fn ruleset() -> String {
    let old = |program| output(program, &[]);
    [
        output("nft", &["list", "ruleset"]),
        old("iptables-legacy-save"),
        old("ip6tables-legacy-save"),
    ]
    .concat()
}

/// The fix for rules that do not receive packets of services: filters that do.
const FILTER: &str = "filter sources with `lvsadm filter add SERVICE --deny PREFIX` (SERVICE all: every service), ports and addresses with `lvsadm mark add --destination VIP --drop`; or filter on the servers, before the director, or in an XDP program (see docs/security.md)";

/// The fix for a filter that may be intended.
const MEANT: &str = "unless this filter is meant for packets of services, change it to accept them; to see the filter";

/// Prefix of the names of the dataplane's own tables.
const OWN_TABLE: &str = "lvs-";

/// Prefix of the names of the dataplane's own BPF programs.
const OWN_PROGRAM: &str = "lvs_";

/// A side of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// Received packets. The dataplane receives its copy before any filter except XDP.
    Ingress,
    /// Sent packets, including those of the dataplane.
    Egress,
}

impl Side {
    const fn word(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Chain<'a> {
    table: &'a str,
    name: &'a str,
    /// The side of interfaces where the chain is attached, and their names; `None` for chains in
    /// the host's stack.
    at: Option<(Side, &'a str)>,
}

impl<'a> Chain<'a> {
    /// Reads the hook of the chain from `line`; ignores other lines.
    fn stands(&mut self, line: &'a str) {
        for side in [Side::Ingress, Side::Egress] {
            let hook = line.split_once(" hook ");
            if let Some((_, hook)) = hook
                && let Some(devices) = hook.strip_prefix(side.word())
            {
                let devices = devices.split(" priority ").next().unwrap_or_default();
                self.at = Some((side, devices.trim()));
            }
        }
    }

    /// Whether the chain is attached to this device.
    fn is_at(&self, device: &Device) -> bool {
        self.at.is_some_and(|(_, devices)| {
            let mut devices = devices.split(|c: char| c.is_whitespace() || "\",{}=".contains(c));
            devices.any(|name| name == device.name)
        })
    }

    /// Whether the chain is attached to other devices only.
    fn is_elsewhere(&self, devices: &[Device]) -> bool {
        self.at.is_some() && !devices.iter().any(|device| self.is_at(device))
    }

    /// The interface whose packets pass the chain before the dataplane receives them, if any.
    fn before<'d>(&self, devices: &'d [Device]) -> Option<&'d str> {
        let mut here = devices.iter().filter(|device| self.is_at(device));
        here.find_map(|device| device.above.as_deref())
    }
}

/// Reports three kinds of rules of the host's firewall: rules that drop packets of services before
/// the dataplane receives them, rules that are meant for packets of services and do not receive
/// them, and rules that may drop packets that the dataplane sends.
fn rules(services: &[ServiceInfo], devices: &[Device], ruleset: &str, findings: &mut Findings) {
    let mut chain = Chain::default();
    let mut by_source = Vec::new();
    for line in ruleset.lines() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix("table ") {
            chain.table = name.trim_end_matches([' ', '{']);
        } else if let Some(name) = line.strip_prefix("chain ") {
            chain.name = name.trim_end_matches([' ', '{']);
            chain.at = None;
        } else if let Some(name) = line.strip_prefix('*') {
            // The format of iptables-save.
            (chain.table, chain.at) = (name, None);
        } else if let Some(rule) = line.strip_prefix("-A ") {
            chain.name = rule.split(' ').next().unwrap_or_default();
        }
        chain.stands(line);
        // The dataplane's own chains, and chains of other interfaces.
        let own = |word: &str| word.starts_with(OWN_TABLE);
        if chain.table.split(' ').any(own) || chain.is_elsewhere(devices) {
            continue;
        }
        let service = services.iter().find(|service| names(line, service));
        match chain.at {
            Some((Side::Egress, devices)) => at_egress(&chain, devices, line, services, findings),
            Some((Side::Ingress, at)) if drops(line) => {
                if let Some(above) = chain.before(devices) {
                    // Rules that filter by source are assumed to be intended.
                    if let Some(service) = service {
                        findings.add(
                            Code::FilterBeforeDataplane,
                            format!(
                                "a rule of table {}, chain {} at the ingress of {at}, drops packets of {} on their way to {above}, before the dataplane receives them: {line}",
                                chain.table,
                                chain.name,
                                service_text(service.service)
                            ),
                            format!("{MEANT}: nft -a list chain {} {}", chain.table, chain.name),
                        );
                    }
                } else if let Some(service) = service {
                    findings.add(
                        Code::FilterBypassed,
                        format!(
                            "a rule of table {}, chain {} at the ingress of {at}, does not keep packets of {} from the \
                             dataplane: {line}",
                            chain.table,
                            chain.name,
                            service_text(service.service)
                        ),
                        format!("the dataplane receives a copy of each packet before this chain; {FILTER}"),
                    );
                } else if drops_by_source(line) {
                    by_source.push((chain, line));
                }
            }
            Some(_) => {}
            None => {
                if let Some(service) = service.filter(|_| acts(line)) {
                    findings.add(
                        Code::FilterBypassed,
                        format!(
                            "a rule of table {}, chain {}, no longer receives packets of {}: {line}",
                            chain.table,
                            chain.name,
                            service_text(service.service)
                        ),
                        format!("the dataplane receives packets of services before the host's firewall; {FILTER}"),
                    );
                } else if drops_by_source(line) {
                    by_source.push((chain, line));
                }
            }
        }
    }
    if let (Some((chain, line)), false) = (by_source.first(), services.is_empty()) {
        let others = match by_source.len() - 1 {
            0 => String::new(),
            others => format!(" (and {others} more)"),
        };
        findings.add(
            Code::FilterBypassed,
            format!(
                "a rule of table {}, chain {}, drops by source, but packets of services bypass it: \
                 {line}{others}",
                chain.table, chain.name
            ),
            format!(
                "the dataplane receives packets of services before the host's firewall; {FILTER}"
            ),
        );
    }
}

/// Reports a rule that may drop packets that the dataplane sends.
fn at_egress(
    chain: &Chain<'_>,
    devices: &str,
    line: &str,
    services: &[ServiceInfo],
    findings: &mut Findings,
) {
    let Chain { table, name, .. } = chain;
    let place = format!("table {table}, chain {name} at the egress of {devices}");
    let fix = format!(
        "unless this rule is meant for packets of services, exempt them (ip saddr VIP for replies, ip daddr SERVER for requests): nft -a list chain {table} {name}"
    );
    if line.contains(" hook ") {
        if line.contains("policy drop") {
            findings.add(
                Code::FilterOfOutput,
                format!(
                    "{place}, also drops packets that the dataplane sends, unless a rule accepts them"
                ),
                fix,
            );
        }
        return;
    }
    let sent = |service: &&ServiceInfo| {
        let port = virt(service)
            .is_some_and(|virt| line.contains("sport") && has_word(line, &virt.port().to_string()));
        let mut servers = service.servers.iter();
        port || names(line, service)
            || servers.any(|server| has_word(line, &server.server.ip().to_string()))
    };
    if !drops(line) {
        return;
    }
    if let Some(service) = services.iter().find(sent) {
        findings.add(
            Code::FilterOfOutput,
            format!(
                "a rule of {place}, also drops packets that the dataplane sends for {}: {line}",
                service_text(service.service)
            ),
            fix,
        );
    } else if drops_by_source(line) {
        findings.add(
            Code::FilterOfOutput,
            format!(
                "a rule of {place}, drops packets by source, and may thus drop requests that the dataplane sends to real servers: {line}"
            ),
            fix,
        );
    }
}

/// Reports tc filters that may drop packets, from the output of `tc filter show` for one side of an
/// interface.
fn traffic_control(device: &Device, side: Side, filters: &str, findings: &mut Findings) {
    // A filter has one line, and its actions have further lines; a program has no actions.
    let lines = filters.lines();
    let others: Vec<&str> = lines.filter(|line| !is_own(line)).collect();
    let has = |words: &[&str]| {
        let mut lines = others.iter();
        lines.any(|line| words.iter().any(|word| line.contains(word)))
    };
    if !has(&["direct-action", "action drop", "action shot", "police "]) {
        return;
    }
    let count = others.iter().filter(|line| {
        line.starts_with("filter ") && (line.contains(" handle ") || line.contains(" fh "))
    });
    let filters = match count.count() {
        0 | 1 => "a filter".to_owned(),
        count => format!("{count} filters"),
    };
    let name = &device.name;
    let shown = format!("tc filter show dev {name} {}", side.word());
    match side {
        Side::Ingress => at_ingress(
            format!("{filters} of tc at the ingress of {name}"),
            device,
            "tc",
            &shown,
            findings,
        ),
        Side::Egress => findings.add(
            Code::FilterOfOutput,
            format!("{filters} of tc at the egress of {name} may drop requests and replies of services that the dataplane sends"),
            format!("{MEANT}: {shown}"),
        ),
    }
}

/// Whether a line describes a filter with the dataplane's own program (clsact).
fn is_own(line: &str) -> bool {
    let named = line.contains(" bpf ") && line.contains(" direct-action ");
    named && line.split(' ').any(|word| word.starts_with(OWN_PROGRAM))
}

/// Reports `what`, which may drop packets at the ingress of `device`. If the packet socket is on a
/// device above, the dataplane does not receive the dropped packets. If it is on `device` itself,
/// the dataplane receives a copy of each packet before it is dropped.
fn at_ingress(what: String, device: &Device, kind: &str, shown: &str, findings: &mut Findings) {
    match &device.above {
        Some(above) => findings.add(
            Code::FilterBeforeDataplane,
            format!("{what} may drop packets for {above} before the dataplane receives them"),
            format!("{MEANT}: {shown}"),
        ),
        None => findings.add(
            Code::FilterBypassed,
            format!("{what} may drop packets, but has no effect on packets of services"),
            format!(
                "the dataplane receives a copy of each packet before {kind} (to see the filter: {shown}); {FILTER}"
            ),
        ),
    }
}

/// Number and names of BPF programs, for messages; `None` without programs.
fn described(names: &[&String]) -> Option<(String, String)> {
    let named = |name: &&String| match name.as_str() {
        "" => "a program without a name".to_owned(),
        name => name.to_owned(),
    };
    let names: Vec<String> = names.iter().map(named).collect();
    match names.len() {
        0 => None,
        1 => Some(("a BPF program".to_owned(), names.concat())),
        count => Some((format!("{count} BPF programs"), names.join(", "))),
    }
}

/// Reports XDP programs of other software, which receive each frame first and may drop it.
fn express_data_path(device: &Device, findings: &mut Findings) {
    let others = device.xdp.iter();
    let others = others.filter(|name| !name.starts_with(OWN_PROGRAM));
    let names: Vec<&String> = others.collect();
    let name = &device.name;
    if let Some((programs, all)) = described(&names) {
        findings.add(
            Code::FilterBeforeDataplane,
            format!(
                "{programs} at the driver of {name} (XDP: {all}) may drop or redirect packets of services before the dataplane receives them"
            ),
            format!("{MEANT}: ip -d link show dev {name}"),
        );
    }
}

/// Reports BPF programs at a hook of an interface that `tc` does not show. Their effect is unknown.
fn programs(device: &Device, place: Place, names: &[String], findings: &mut Findings) {
    let others = names.iter().filter(|name| !name.starts_with(OWN_PROGRAM));
    let others: Vec<&String> = others.collect();
    let Some((programs, all)) = described(&others) else {
        return;
    };
    let interface = &device.name;
    let shown = format!("bpftool net show dev {interface}");
    match place {
        Place::Ingress => at_ingress(
            format!("{programs} at the ingress of {interface} (tcx: {all})"),
            device,
            "tcx",
            &shown,
            findings,
        ),
        Place::Egress | Place::NetkitPrimary => {
            let kind = if place == Place::Egress { "tcx" } else { "netkit" };
            findings.add(
                Code::FilterOfOutput,
                format!(
                    "{programs} at the egress of {interface} ({kind}: {all}) may drop requests and replies of services that the dataplane sends"
                ),
                format!("{MEANT}: {shown}"),
            );
        }
        Place::NetkitPeer => findings.add(
            Code::FilterBeforeDataplane,
            format!(
                "{programs} at the peer of {interface} (netkit: {all}) may drop packets of services before the dataplane receives them"
            ),
            format!("{MEANT}: {shown}"),
        ),
    }
}

/// Whether a rule has any effect on packets.
fn acts(line: &str) -> bool {
    let verbs = [
        "drop", "reject", "accept", "dnat", "redirect", "counter", "mark", " -j ",
    ];
    verbs.iter().any(|verb| line.contains(verb))
}

/// Whether a rule drops packets.
fn drops(line: &str) -> bool {
    let verbs = ["drop", "reject", "DROP", "REJECT"];
    line.split(' ').any(|word| verbs.contains(&word))
}

fn has_word(line: &str, word: &str) -> bool {
    line.split([' ', ',', '{', '}', '/'])
        .any(|part| part == word)
}

/// Whether a rule names the address of a service, or its port as a destination port.
fn names(line: &str, service: &ServiceInfo) -> bool {
    virt(service).is_some_and(|addr| {
        has_word(line, &addr.ip().to_string())
            || (line.contains("dport") && has_word(line, &addr.port().to_string()))
    })
}

/// Whether a rule drops by source, for any destination.
fn drops_by_source(line: &str) -> bool {
    let has = |words: &[&str]| line.split(' ').any(|word| words.contains(&word));
    has(&["saddr", "-s", "--match-set"])
        && drops(line)
        && !has(&[
            "daddr", "dport", "-d", "--dport", "--dports", "-o", "oifname",
        ])
}

#[cfg(test)]
mod tests {
    use super::super::tests::services;
    use super::*;

    fn device(name: &str, above: Option<&str>) -> Device {
        Device {
            name: name.to_owned(),
            above: above.map(str::to_owned),
            xdp: Vec::new(),
        }
    }

    /// Findings for these rules, on a director with one service and three interfaces. One of the
    /// interfaces is a VLAN of an unused device.
    fn found(ruleset: &str) -> Vec<String> {
        let devices = [
            device("eth0", None),
            device("eth1", None),
            device("eth2.5", None),
            device("eth2", Some("eth2.5")),
        ];
        let mut findings = Findings::default();
        rules(&services("nat", 1), &devices, ruleset, &mut findings);
        findings.0.into_iter().map(|finding| finding.what).collect()
    }

    /// A chain of the netdev family with one rule.
    fn chain(at: &str, rule: &str) -> String {
        format!(
            "table netdev t {{\n\tchain c {{\n\t\ttype filter hook {at}; policy accept;\n\t\t{rule}\n\t}}\n}}\n"
        )
    }

    #[test]
    fn doctor_dropping_ingress_chain_is_a_finding() {
        for device in ["device \"eth0\"", "devices = { eth0, eth9 }"] {
            let at = format!("ingress {device} priority -500");
            let answer = found(&chain(&at, "tcp dport 80 counter packets 0 bytes 0 drop"));
            assert_eq!(answer.len(), 1, "{device}: {answer:?}");
            assert!(
                answer[0].contains("at the ingress of device"),
                "{device}: {answer:?}"
            );
            let answer = found(&chain(&at, "ip saddr 203.0.113.0/24 drop"));
            assert!(
                answer[0].contains("drops by source"),
                "{device}: {answer:?}"
            );
            // The rule only counts packets.
            assert!(found(&chain(&at, "tcp dport 80 counter")).is_empty());
        }
        // Packets for a VLAN pass the rules of its trunk first.
        let below = "ingress device \"eth2\" priority -500";
        let answer = found(&chain(below, "tcp dport 80 drop"));
        assert_eq!(answer.len(), 1, "{answer:?}");
        assert!(
            answer[0].contains("on their way to eth2.5, before the dataplane receives them"),
            "{answer:?}"
        );
        assert!(found(&chain(below, "ip saddr 203.0.113.0/24 drop")).is_empty());
        let elsewhere = "ingress device \"eth9\" priority -500";
        assert!(found(&chain(elsewhere, "tcp dport 80 drop")).is_empty());
    }

    #[test]
    fn doctor_egress_chain_that_drops_is_a_finding() {
        let at = "egress device \"eth1\" priority filter";
        for rule in [
            "tcp sport 80 drop",
            "ip daddr 10.0.0.1 drop",
            "ip saddr 192.0.2.1 reject",
            "ip saddr 203.0.113.0/24 drop",
        ] {
            let answer = found(&chain(at, rule));
            assert_eq!(answer.len(), 1, "{rule}: {answer:?}");
            assert!(
                answer[0].contains("the dataplane sends"),
                "{rule}: {answer:?}"
            );
        }
        for rule in ["tcp dport 22 drop", "tcp sport 80 accept", "counter"] {
            assert!(found(&chain(at, rule)).is_empty(), "{rule}");
        }
        let closed = chain(at, "accept").replace("policy accept", "policy drop");
        let answer = found(&closed);
        assert!(
            answer[0].contains("unless a rule accepts them"),
            "{answer:?}"
        );
        // The rules in the listing after this chain belong to the host's stack again.
        let both =
            format!("{closed}table ip f {{\n\tchain INPUT {{\n\t\ttcp dport 80 drop\n\t}}\n}}\n");
        assert!(found(&both)[1].contains("no longer receives"));
    }

    #[test]
    fn doctor_foreign_tc_filters_that_may_drop_are_findings() {
        let findings_of = |device, side, text: &str| {
            let mut findings = Findings::default();
            traffic_control(&device, side, text, &mut findings);
            let all = findings.0.into_iter();
            all.map(|f| f.what).collect::<Vec<_>>().join("; ")
        };
        let answer = |side, text: &str| findings_of(device("eth0", None), side, text);
        let program = "filter protocol ip pref 1 bpf chain 0 \n\
            filter protocol ip pref 1 bpf chain 0 handle 0x1 direct-action not_in_hw bytecode '1,6 0 0 2'\n";
        let flower = "filter protocol ip pref 2 flower chain 0 \nfilter protocol ip pref 2 flower chain 0 handle 0x1 \n  \
            eth_type ipv4\n  src_ip 203.0.113.0/24\n  not_in_hw\n\taction order 1: gact action drop\n\t random type none pass val 0\n";
        let own = "filter protocol all pref 1 bpf chain 0 \nfilter protocol all pref 1 bpf chain 0 handle 0x4c5653 \
            lvs_ingress+clsact direct-action skip_hw not_in_hw id 7 name lvs_ingress tag f0e34533cdc40aa8 jited \n";
        assert_eq!(answer(Side::Ingress, own), "");
        let message = answer(Side::Ingress, &format!("{own}{program}"));
        assert!(
            message.starts_with("a filter of tc at the ingress of eth0"),
            "does not begin with `a filter of tc at the ingress of eth0`: {message}"
        );
        let message = answer(Side::Egress, &format!("{program}{flower}"));
        assert!(
            message.starts_with("2 filters of tc at the egress of eth0"),
            "does not begin with `2 filters of tc at the egress of eth0`: {message}"
        );
        let message = findings_of(
            device("eth0", Some("eth0.100")),
            Side::Ingress,
            &format!("{program}{flower}"),
        );
        assert_eq!(
            message,
            "2 filters of tc at the ingress of eth0 may drop packets for eth0.100 before the dataplane receives them"
        );
        let mirror = "filter protocol all pref 1 matchall chain 0 handle 0x1 \n\taction order 1: mirred (Egress Mirror to device br0) pipe\n";
        for nothing in ["", mirror] {
            assert_eq!(answer(Side::Ingress, nothing), "");
        }
    }

    #[test]
    fn doctor_foreign_bpf_programs_are_findings() {
        let answer = |place, names: &[&str]| {
            let mut findings = Findings::default();
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            programs(&device("eth0", None), place, &names, &mut findings);
            let all = findings.0.into_iter();
            all.map(|f| f.what).collect::<Vec<_>>().join("; ")
        };
        for place in Place::ALL {
            assert_eq!(answer(place, &[]), "");
            assert_eq!(answer(place, &["lvs_back", "lvs_ingress"]), "");
        }
        let message = answer(Place::Ingress, &["lvs_ingress", "cil_from_netdev"]);
        assert_eq!(
            message,
            "a BPF program at the ingress of eth0 (tcx: cil_from_netdev) may drop packets, but has no effect on packets of services"
        );
        let message = answer(Place::Egress, &["lvs_back", "", "cil_to_netdev"]);
        assert!(
            message.starts_with(
                "2 BPF programs at the egress of eth0 (tcx: a program without a name, cil_to_netdev) may drop requests and replies of services"
            ),
            "does not begin with `2 BPF programs at the egress of eth0 (tcx: a program without a name, cil_to_netdev) may drop requests and replies of services`: {message}"
        );
        let message = answer(Place::NetkitPrimary, &["x"]);
        assert!(
            message.contains("egress of eth0 (netkit: x)"),
            "no `egress of eth0 (netkit: x)` in {message}"
        );
        let message = answer(Place::NetkitPeer, &["x"]);
        assert!(
            message.contains("before the dataplane receives them"),
            "no `before the dataplane receives them` in {message}"
        );
    }

    #[test]
    fn doctor_foreign_xdp_programs_are_findings() {
        let answer = |names: &[&str]| {
            let mut findings = Findings::default();
            let names = names.iter().map(|&name| name.to_owned());
            let eth0 = Device {
                xdp: names.collect(),
                ..device("eth0", None)
            };
            express_data_path(&eth0, &mut findings);
            let all = findings.0.into_iter();
            all.map(|f| f.what).collect::<Vec<_>>().join("; ")
        };
        assert_eq!(answer(&[]), "");
        assert_eq!(answer(&["lvs_xdp"]), "");
        assert_eq!(
            answer(&["number 12"]),
            "a BPF program at the driver of eth0 (XDP: number 12) may drop or redirect packets of services before the dataplane receives them"
        );
        assert!(
            answer(&["a", ""])
                .starts_with("2 BPF programs at the driver of eth0 (XDP: a, a program")
        );
    }

    #[test]
    fn doctor_host_rule_for_service_is_a_finding() {
        let ruleset = "table ip filter {\n\tchain INPUT {\n\t\ttype filter hook input priority filter; policy accept;\n\
            \t\ttcp dport 80 counter packets 0 bytes 0 drop\n\t\ttcp dport 8080 drop\n\t}\n}\n\
            table netdev lvs-12 {\n\tchain x {\n\t\tip daddr 192.0.2.1 tcp dport 80 drop\n\t}\n}\n";
        let mut findings = Findings::default();
        rules(&services("nat", 1), &[], ruleset, &mut findings);
        assert_eq!(findings.0.len(), 1, "{findings:?}");
        assert!(findings.0[0].what.contains("chain INPUT"));
        assert!(
            findings.0[0].fix.contains("lvsadm mark add")
                && findings.0[0].fix.contains("lvsadm filter add"),
            "{findings:?}"
        );
    }

    #[test]
    fn doctor_reports_all_host_rules_by_source_in_one_finding() {
        let ruleset = "table inet filter {\n\tchain block {\n\t\tip saddr 203.0.113.0/24 drop\n\t\tip saddr @bad counter packets 0 \
            bytes 0 drop\n\t\tip saddr 10.0.0.0/8 accept\n\t\tip saddr 10.0.0.0/8 tcp dport 22 drop\n\t}\n}\n\
            *filter\n-A INPUT -s 198.51.100.0/24 -j DROP\n-A INPUT -s 198.51.100.0/24 -d 10.9.9.9/32 -j DROP\n";
        let mut findings = Findings::default();
        rules(&services("nat", 1), &[], ruleset, &mut findings);
        assert_eq!(findings.0.len(), 1, "{findings:?}");
        let what = &findings.0[0].what;
        assert!(
            what.contains("203.0.113.0/24 drop (and 2 more)"),
            "no `203.0.113.0/24 drop (and 2 more)` in {what}"
        );
        let mut findings = Findings::default();
        rules(&[], &[], ruleset, &mut findings);
        assert!(findings.0.is_empty(), "{findings:?}");
    }

    #[test]
    fn doctor_iptables_rule_for_service_is_a_finding() {
        let saved = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p tcp -m tcp --dport 80 -j DROP\n-A INPUT -p udp --dport 53 -j DROP\nCOMMIT\n";
        let mut findings = Findings::default();
        rules(&services("nat", 1), &[], saved, &mut findings);
        assert_eq!(findings.0.len(), 1, "{findings:?}");
        assert!(findings.0[0].what.contains("table filter, chain INPUT"));
    }
}

//! What on this host disturbs a director: kernel settings, network cards, firewall rules.

use std::fs;
use std::process::{Command, Stdio};

use lvs_core::api::{Info, InterfaceInfo, ServiceInfo};

use super::services::virt;
use super::{Findings, is_routed};
use crate::operator::service_text;

pub(super) fn look(services: &[ServiceInfo], info: &Info, findings: &mut Findings) {
    kernel(findings);
    for interface in &info.interfaces {
        lost(interface, findings);
        settings(&interface.name, findings);
    }
    if is_routed(info) {
        let chains = output("nft", &["list", "chains"]);
        forwarding(services, &read, &chains, findings);
    } else {
        rules(services, &ruleset(), findings);
    }
}

fn kernel(findings: &mut Findings) {
    if read("/proc/net/ip_vs").lines().count() > 3 {
        findings.add(
            "the kernel's own IPVS has services in this network namespace, too",
            "ipvsadm -C with the kernel's ipvsadm, or modprobe -r ip_vs; two directors for one address interfere with \
             each other",
        );
    }
}

/// Frames lost before the engine saw them.
fn lost(interface: &InterfaceInfo, findings: &mut Findings) {
    let name = &interface.name;
    if interface.lost > 0 {
        findings.add(
            format!(
                "{} frames of {name} were lost: they came faster than the engine read them",
                interface.lost
            ),
            "more CPU for lvs-dataplane (nothing else on its core), and room for bursts: \
             sysctl -w net.core.rmem_max=67108864 before it starts",
        );
    }
    let lost = ring_drops(&output(
        "ip",
        &["-j", "-s", "-s", "link", "show", "dev", name],
    ));
    if lost > 0 {
        findings.add(
            format!("the network card of {name} has lost {lost} frames: its ring was full"),
            format!("ethtool -g {name} shows its limits; ethtool -G {name} rx MAXIMUM"),
        );
    }
}

fn settings(name: &str, findings: &mut Findings) {
    let strict = |of: &str| read(&format!("/proc/sys/net/ipv4/conf/{of}/rp_filter")).trim() == "1";
    if strict(name) || strict("all") {
        findings.add(
            format!(
                "rp_filter of {name} is strict: this host discards packets that arrive on another interface than \
                 replies to them would leave by"
            ),
            format!("sysctl -w net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.{name}.rp_filter=2"),
        );
    }
    let features = output("ethtool", &["-k", name]);
    let lro = |line: &str| line.trim() == "large-receive-offload: on";
    if features.lines().any(lro) {
        findings.add(
            format!(
                "{name} merges received segments in hardware (LRO), and they cannot be split again as they were"
            ),
            format!("ethtool -K {name} lro off"),
        );
    }
}

/// Frames for which a network card had no room, from the output of `ip -j -s -s link`.
fn ring_drops(text: &str) -> u64 {
    let links: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
    let rx = &links[0]["stats64"]["rx"];
    ["missed_errors", "fifo_errors", "over_errors"]
        .iter()
        .filter_map(|name| rx[name].as_u64())
        .max()
        .unwrap_or(0)
}

/// The text of a file; empty if it cannot be read.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// What a program prints; empty if it is missing or fails to start.
fn output(program: &str, arguments: &[&str]) -> String {
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default()
}

/// The host's firewall rules, those of nftables and those of the legacy iptables.
fn ruleset() -> String {
    let old = |program| output(program, &[]);
    [
        output("nft", &["list", "ruleset"]),
        old("iptables-legacy-save"),
        old("ip6tables-legacy-save"),
    ]
    .concat()
}

/// Firewall rules that name a service, or drop by source alone: they do not see packets of services.
fn rules(services: &[ServiceInfo], ruleset: &str, findings: &mut Findings) {
    let mut table = "";
    let mut chain = "";
    let mut by_source = Vec::new();
    for line in ruleset.lines() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix("table ") {
            table = name.trim_end_matches([' ', '{']);
        } else if let Some(name) = line.strip_prefix("chain ") {
            chain = name.trim_end_matches([' ', '{']);
        } else if let Some(name) = line.strip_prefix('*') {
            // As iptables-save writes it.
            table = name;
        } else if let Some(rule) = line.strip_prefix("-A ") {
            chain = rule.split(' ').next().unwrap_or_default();
        }
        // The engine's own.
        if table.split(' ').any(|word| word.starts_with(OWN_TABLE)) {
            continue;
        }
        let acts = [
            "drop", "reject", "accept", "dnat", "redirect", "counter", "mark", " -j ",
        ]
        .iter()
        .any(|verb| line.contains(verb));
        if acts && let Some(service) = services.iter().find(|service| names(line, service)) {
            findings.add(
                format!(
                    "a rule of table {table}, chain {chain}, no longer sees packets of {}: {line}",
                    service_text(service.service)
                ),
                format!("the engine takes them before the host's firewall; {FILTER}"),
            );
        } else if drops_by_source(line) {
            by_source.push((table, chain, line));
        }
    }
    if let (Some((table, chain, line)), false) = (by_source.first(), services.is_empty()) {
        let others = match by_source.len() - 1 {
            0 => String::new(),
            others => format!(" (and {others} more)"),
        };
        findings.add(
            format!(
                "a rule of table {table}, chain {chain}, drops by source, and packets of services pass it all the same: \
                 {line}{others}"
            ),
            format!("the engine takes them before the host's firewall; {FILTER}"),
        );
    }
}

/// Where packets of services can be filtered.
const FILTER: &str = "filter sources with `lvsadm filter add SERVICE --deny PREFIX` (SERVICE all: every service), ports and addresses with \
                      `lvsadm mark add --destination VIP --drop`; or filter on the servers, in front of the director, or in an XDP \
                      program (see docs/security.md)";

/// Whether a rule names the address or the port of a service.
fn names(line: &str, service: &ServiceInfo) -> bool {
    virt(service).is_some_and(|addr| {
        let word = |text: &str| {
            line.split([' ', ',', '{', '}', '/'])
                .any(|part| part == text)
        };
        word(&addr.ip().to_string()) || (line.contains("dport") && word(&addr.port().to_string()))
    })
}

/// Whether a rule drops by source, whatever the destination.
fn drops_by_source(line: &str) -> bool {
    let has = |words: &[&str]| line.split(' ').any(|word| words.contains(&word));
    has(&["saddr", "-s", "--match-set"])
        && has(&["drop", "reject", "DROP", "REJECT"])
        && !has(&[
            "daddr", "dport", "-d", "--dport", "--dports", "-o", "oifname",
        ])
}

/// How the names of the engine's own tables begin.
const OWN_TABLE: &str = "lvs-";

/// What keeps the host from routing packets to the engine.
fn forwarding(
    services: &[ServiceInfo],
    read: &dyn Fn(&str) -> String,
    chains: &str,
    findings: &mut Findings,
) {
    let vips = || services.iter().filter_map(virt);
    for (ipv6, file, sysctl) in [
        (
            false,
            "/proc/sys/net/ipv4/ip_forward",
            "net.ipv4.ip_forward",
        ),
        (
            true,
            "/proc/sys/net/ipv6/conf/all/forwarding",
            "net.ipv6.conf.all.forwarding",
        ),
    ] {
        if vips().any(|vip| vip.is_ipv6() == ipv6) && read(file).trim() == "0" {
            let family = if ipv6 { "IPv6" } else { "IPv4" };
            findings.add(
                format!(
                    "this host forwards no {family} packets, and the engine (--backend tun) sees only what is \
                     forwarded to its device"
                ),
                format!("sysctl -w {sysctl}=1"),
            );
        }
    }
    let dropping = |policy: &str| policy.contains("hook forward") && policy.contains("policy drop");
    if chains.lines().any(dropping) {
        findings.add(
            "a chain of this host's firewall drops forwarded packets that no rule accepts, and packets of services are \
             forwarded",
            "accept packets to and from the engine's device in it: iifname lvs-tun0 accept, oifname lvs-tun0 accept",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::services;
    use super::*;

    #[test]
    fn rules_that_see_nothing() {
        let ruleset = "table ip filter {\n\tchain INPUT {\n\t\ttype filter hook input priority filter; policy accept;\n\
            \t\ttcp dport 80 counter packets 0 bytes 0 drop\n\t\ttcp dport 8080 drop\n\t}\n}\n\
            table netdev lvs-12 {\n\tchain x {\n\t\tip daddr 192.0.2.1 tcp dport 80 drop\n\t}\n}\n";
        let mut findings = Findings::default();
        rules(&services("nat", 1), ruleset, &mut findings);
        assert_eq!(findings.0.len(), 1, "{findings:?}");
        assert!(findings.0[0].what.contains("chain INPUT"));
        assert!(
            findings.0[0].cure.contains("lvsadm mark add")
                && findings.0[0].cure.contains("lvsadm filter add"),
            "{findings:?}"
        );
    }

    #[test]
    fn rules_that_go_by_source_alone() {
        let ruleset = "table inet filter {\n\tchain block {\n\t\tip saddr 203.0.113.0/24 drop\n\t\tip saddr @bad counter packets 0 \
            bytes 0 drop\n\t\tip saddr 10.0.0.0/8 accept\n\t\tip saddr 10.0.0.0/8 tcp dport 22 drop\n\t}\n}\n\
            *filter\n-A INPUT -s 198.51.100.0/24 -j DROP\n-A INPUT -s 198.51.100.0/24 -d 10.9.9.9/32 -j DROP\n";
        let mut findings = Findings::default();
        rules(&services("nat", 1), ruleset, &mut findings);
        assert_eq!(findings.0.len(), 1, "{findings:?}");
        let what = &findings.0[0].what;
        assert!(what.contains("203.0.113.0/24 drop (and 2 more)"), "{what}");
        let mut findings = Findings::default();
        rules(&[], ruleset, &mut findings);
        assert!(findings.0.is_empty(), "{findings:?}");
    }

    #[test]
    fn rules_of_the_old_kind() {
        let saved = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p tcp -m tcp --dport 80 -j DROP\n-A INPUT -p udp --dport 53 -j DROP\nCOMMIT\n";
        let mut findings = Findings::default();
        rules(&services("nat", 1), saved, &mut findings);
        assert_eq!(findings.0.len(), 1, "{findings:?}");
        assert!(findings.0[0].what.contains("table filter, chain INPUT"));
    }

    #[test]
    fn a_card_without_room() {
        let text = r#"[{"ifname":"eth0","stats64":{"rx":{"packets":9,"dropped":3,"over_errors":0,"fifo_errors":0,"missed_errors":12}}}]"#;
        assert_eq!(ring_drops(text), 12);
        assert_eq!(ring_drops(""), 0);
        assert_eq!(ring_drops("[{}]"), 0);
    }

    #[test]
    fn a_host_that_forwards_nothing() {
        for (setting, found) in [("0\n", true), ("1\n", false), ("", false)] {
            let mut findings = Findings::default();
            let read = |_: &str| setting.to_owned();
            forwarding(&services("nat", 1), &read, "", &mut findings);
            let told = findings.0.iter().any(|f| f.cure.contains("ip_forward=1"));
            assert_eq!(told, found, "{findings:?}");
        }
        let chains = "table ip filter {\n\tchain FORWARD {\n\t\ttype filter hook forward priority filter; policy drop;\n\t}\n}\n";
        let mut findings = Findings::default();
        forwarding(
            &services("nat", 1),
            &|_| String::new(),
            chains,
            &mut findings,
        );
        assert!(findings.0[0].cure.contains("lvs-tun0"), "{findings:?}");
    }
}

//! What of this host disturbs a director: settings of the kernel, network cards, rules of the packet filter.

use std::fs;
use std::process::{Command, Stdio};

use lvs_core::api::{Info, ServiceInfo};

use super::doctor::{Findings, virt};
use super::service_text;

pub(super) fn kernel(findings: &mut Findings) {
    if read("/proc/net/ip_vs").lines().count() > 3 {
        findings.add(
            "the kernel's own IPVS has services in this network namespace, too",
            "ipvsadm -C with the kernel's ipvsadm, or modprobe -r ip_vs; two directors for one address confuse each other",
        );
    }
}

/// What the network cards and their settings do to packets.
pub(super) fn cards(info: &Info, findings: &mut Findings) {
    for interface in &info.interfaces {
        if interface.lost > 0 {
            findings.add(
                format!("{} frames of {} came faster than the engine read them, and are lost", interface.lost, interface.name),
                "more CPU for lvs-dataplane (nothing else on its core), and room for bursts: sysctl -w net.core.rmem_max=67108864 before it starts",
            );
        }
        let lost = ring_drops(&output(
            "ip",
            &["-j", "-s", "-s", "link", "show", "dev", &interface.name],
        ));
        if lost > 0 {
            findings.add(
                format!(
                    "the card of {} has lost {lost} frames: its ring was full",
                    interface.name
                ),
                format!(
                    "ethtool -g {0} shows its limits; ethtool -G {0} rx MAXIMUM",
                    interface.name
                ),
            );
        }
        let path = format!("/proc/sys/net/ipv4/conf/{}/rp_filter", interface.name);
        let strict = |path: &str| read(path).trim() == "1";
        if strict(&path) || strict("/proc/sys/net/ipv4/conf/all/rp_filter") {
            findings.add(
                format!("rp_filter of {} is strict: this host discards what comes by another way than its answer would take", interface.name),
                format!("sysctl -w net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.{}.rp_filter=2", interface.name),
            );
        }
        let features = output("ethtool", &["-k", &interface.name]);
        if features
            .lines()
            .any(|line| line.trim() == "large-receive-offload: on")
        {
            findings.add(
                format!("{} glues received segments together in hardware (LRO), which cannot be taken apart exactly", interface.name),
                format!("ethtool -K {} lro off", interface.name),
            );
        }
    }
}

/// Frames for which a network card had no room, by what `ip -j -s -s link` prints.
fn ring_drops(text: &str) -> u64 {
    let links: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
    let rx = &links[0]["stats64"]["rx"];
    ["missed_errors", "fifo_errors", "over_errors"]
        .iter()
        .filter_map(|name| rx[name].as_u64())
        .max()
        .unwrap_or(0)
}

/// The text of a file; nothing if it cannot be read.
pub(super) fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// What a program prints; nothing if it is not there or may not.
pub(super) fn output(program: &str, arguments: &[&str]) -> String {
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default()
}

/// The host's rules, of both kinds.
pub(super) fn ruleset() -> String {
    let old = |program| output(program, &[]);
    [
        output("nft", &["list", "ruleset"]),
        old("iptables-legacy-save"),
        old("ip6tables-legacy-save"),
    ]
    .concat()
}

/// Rules of the host's filters that name a service: they do not see its packets any more.
pub(super) fn rules(services: &[ServiceInfo], ruleset: &str, findings: &mut Findings) {
    let mut table = "";
    let mut chain = "";
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
        let names = |service: &&ServiceInfo| {
            virt(service).is_some_and(|addr| {
                let word = |text: &str| {
                    line.split([' ', ',', '{', '}', '/'])
                        .any(|part| part == text)
                };
                word(&addr.ip().to_string())
                    || (line.contains("dport") && word(&addr.port().to_string()))
            })
        };
        let acts = [
            "drop", "reject", "accept", "dnat", "redirect", "counter", "mark", " -j ",
        ]
        .iter()
        .any(|verb| line.contains(verb));
        if acts && let Some(service) = services.iter().find(names) {
            findings.add(
                format!(
                    "a rule of table {table}, chain {chain}, no longer sees packets of {}: {line}",
                    service_text(service.service)
                ),
                "the engine takes them before the host's filter; filter on the servers or before the director, or in a netdev ingress chain of a lower priority",
            );
        }
    }
}

/// How the names of the engine's tables of rules begin.
const OWN_TABLE: &str = "lvs-";

#[cfg(test)]
mod tests {
    use super::super::doctor::tests::services;
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
}

//! Findings about this host: its kernel, its network cards and its firewall.

use std::fs;
use std::process::{Command, Stdio};

use lvs_api::reverse_path;
use lvs_core::api::{Info, InterfaceInfo, ReasonCount, ServiceInfo};

use super::code::Code;
use super::filters;
use super::services::virt;
use super::{Findings, Scope, Since, When, is_routed};

pub(super) fn look(
    services: &[ServiceInfo],
    info: &Info,
    reasons: &[ReasonCount],
    since: Since,
    findings: &mut Findings,
) {
    kernel(findings);
    for interface in &info.interfaces {
        lost(interface, When::of_name(reasons, "not_received"), findings);
        if since == Since::Start {
            lost_by_card(&interface.name, findings);
        }
        settings(&interface.name, findings);
    }
    if is_routed(info) {
        let rules = filters::ruleset();
        forwarding(services, &read, &rules, findings);
        conntrack(&read, findings);
    }
}

fn kernel(findings: &mut Findings) {
    if read("/proc/net/ip_vs").lines().count() > 3 {
        findings.add(
            Code::KernelIpvs,
            "the kernel's own IPVS has services in this network namespace, too",
            "remove them with the kernel's ipvsadm (ipvsadm -C), or unload IPVS (modprobe -r ip_vs): two directors for one \
             address interfere with each other",
        );
    }
}

/// Reports frames that were lost before the dataplane received them.
fn lost(interface: &InterfaceInfo, when: When, findings: &mut Findings) {
    let name = &interface.name;
    if interface.lost > 0 {
        findings.add(
            (Code::FramesLost, Scope::interface(name), when),
            format!(
                "{} frames of {name} were lost: they arrived faster than the dataplane read them",
                interface.lost
            ),
            "provide more CPU for lvs-dataplane (no other program on its core), and longer queues: sysctl -w net.core.rmem_max=67108864 before lvs-dataplane starts",
        );
    }
}

/// Reports frames that a network card has lost since its driver was loaded. The card does not
/// record when.
fn lost_by_card(name: &str, findings: &mut Findings) {
    let lost = ring_drops(&output(
        "ip",
        &["-j", "-s", "-s", "link", "show", "dev", name],
    ));
    if lost > 0 {
        findings.add(
            (Code::FramesLostByCard, Scope::interface(name)),
            format!("the network card of {name} has lost {lost} frames: its receive ring was full"),
            format!(
                "ethtool -G {name} rx NUMBER enlarges the ring; ethtool -g {name} shows the maximum"
            ),
        );
    }
}

fn settings(name: &str, findings: &mut Findings) {
    if reverse_path::is_strict(name) {
        findings.add(
            (Code::ReversePath, Scope::interface(name)),
            format!(
                "rp_filter of {name} is strict: this host drops packets that arrive on another interface than the one on which it would send replies"
            ),
            format!("sysctl -w net.ipv4.conf.{name}.rp_filter=2"),
        );
    }
    let features = output("ethtool", &["-k", name]);
    let lro = |line: &str| line.trim() == "large-receive-offload: on";
    if features.lines().any(lro) {
        findings.add(
            (Code::Lro, Scope::interface(name)),
            format!(
                "{name} merges received segments in hardware (LRO), and they cannot be split again into the original ones"
            ),
            format!("ethtool -K {name} lro off"),
        );
    }
}

/// Returns the number of frames for which a network card had no buffer, from the output of `ip -j
/// -s -s link`.
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

/// Output of a program; empty if it is missing or fails to start.
pub(super) fn output(program: &str, arguments: &[&str]) -> String {
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default()
}

/// Reports settings and firewall rules that keep the host from routing packets to the dataplane.
fn forwarding(
    services: &[ServiceInfo],
    read: &dyn Fn(&str) -> String,
    rules: &str,
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
                Code::ForwardingOff,
                format!(
                    "this host forwards no {family} packets, and the dataplane (--backend tun) receives only forwarded packets"
                ),
                format!("sysctl -w {sysctl}=1"),
            );
        }
    }
    let dropping = |policy: &str| policy.contains("hook forward") && policy.contains("policy drop");
    if rules.lines().any(dropping) {
        findings.add(
            Code::ForwardPolicy,
            "a chain of this host's firewall drops forwarded packets that no rule accepts, and packets of services are \
             forwarded",
            "accept packets to and from the dataplane's device in this chain: iifname lvs-tun0 accept, oifname lvs-tun0 accept",
        );
    }
}

/// Reports that the connection tracking table of the host's firewall is nearly full: with a full
/// table, the kernel drops packets that the dataplane would forward.
fn conntrack(read: &dyn Fn(&str) -> String, findings: &mut Findings) {
    let number = |name: &str| -> Option<u64> {
        let text = read(&format!("/proc/sys/net/netfilter/nf_conntrack_{name}"));
        text.trim().parse().ok()
    };
    if let (Some(count), Some(max)) = (number("count"), number("max"))
        // A maximum of 0 means no limit.
        && max > 0
        && count >= max - max / 20
    {
        findings.add(
            Code::ConntrackFull,
            format!(
                "connection tracking of this host's firewall has {count} of {max} entries in use; when the table is full, packets of further connections are dropped"
            ),
            "sysctl -w net.netfilter.nf_conntrack_max=NUMBER; or do not track packets of services",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::services;
    use super::*;

    #[test]
    fn ring_drops_of_interface_are_parsed_and_default_to_0() {
        let text = r#"[{"ifname":"eth0","stats64":{"rx":{"packets":9,"dropped":3,"over_errors":0,"fifo_errors":0,"missed_errors":12}}}]"#;
        assert_eq!(ring_drops(text), 12);
        assert_eq!(ring_drops(""), 0);
        assert_eq!(ring_drops("[{}]"), 0);
    }

    #[test]
    fn doctor_disabled_forwarding_and_dropping_forward_chain_are_findings() {
        for (setting, found) in [("0\n", true), ("1\n", false), ("", false)] {
            let mut findings = Findings::default();
            let read = |_: &str| setting.to_owned();
            forwarding(&services("nat", 1), &read, "", &mut findings);
            let answer = findings.0.iter().any(|f| f.fix.contains("ip_forward=1"));
            assert_eq!(answer, found, "{setting:?}: {findings:?}");
        }
        let chains = "table ip filter {\n\tchain FORWARD {\n\t\ttype filter hook forward priority filter; policy drop;\n\t}\n}\n";
        let mut findings = Findings::default();
        forwarding(
            &services("nat", 1),
            &|_| String::new(),
            chains,
            &mut findings,
        );
        assert!(findings.0[0].fix.contains("lvs-tun0"), "{findings:?}");
    }

    #[test]
    fn doctor_nearly_full_connection_tracking_is_a_finding() {
        for (count, max, found) in [
            ("949\n", "1000\n", false),
            ("950\n", "1000\n", true),
            ("0\n", "0\n", false),
            ("", "1000\n", false),
        ] {
            let mut findings = Findings::default();
            let read = |path: &str| match path.ends_with("_max") {
                true => max.to_owned(),
                false => count.to_owned(),
            };
            conntrack(&read, &mut findings);
            let codes: Vec<_> = findings
                .0
                .iter()
                .map(|one| one.kind.code.as_str())
                .collect();
            assert_eq!(
                codes == ["conntrack_full"],
                found,
                "{count:?} of {max:?}: {findings:?}"
            );
        }
    }
}

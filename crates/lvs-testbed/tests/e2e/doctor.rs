//! `lvsadm doctor`: tests that provoke its findings.

use crate::common;

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::site::Vip;
use lvs_testbed::{Forward, Site, SiteOptions, programs, soon, wait_until};
use nix::sys::signal::Signal;
use serde_json::Value;

fn findings_as_json(site: &Site) -> Result<Vec<Value>> {
    let text = site.director.sh(&format!(
        "{} doctor --json || [ $? = 1 ]",
        programs::find("lvsadm")?.display()
    ))?;
    Ok(serde_json::from_str(&text)?)
}

fn findings(site: &Site) -> Result<Vec<(String, String)>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = findings_as_json(site)?;
    Ok(all
        .iter()
        .map(|finding| (text(&finding["what"]), text(&finding["fix"])))
        .collect())
}

pub(super) fn findings_with_code(site: &Site, code: &str) -> Result<Vec<Value>> {
    let mut all = findings_as_json(site)?;
    all.retain(|finding| finding["code"] == code);
    Ok(all)
}

/// The fix of the finding whose text contains `what`.
fn fix(site: &Site, what: &str) -> Result<String> {
    let all = findings(site)?;
    let found = all.iter().find(|(found, _)| found.contains(what));
    Ok(found
        .with_context(|| format!("no finding with {what:?} in {all:?}"))?
        .1
        .clone())
}

fn site(label: &str, forward: Forward) -> Result<Site> {
    let site = common::site(SiteOptions::with_servers(label, forward, 2))?;
    site.add_service(80, "rr")?;
    Ok(site)
}

#[test]
fn doctor_reports_rp_filter_lro_lost_frames_iptables_rule_and_interface_down() -> Result<()> {
    let site = site("docthost", Forward::Nat)?;
    let all = findings(&site)?;
    ensure!(all.is_empty(), "doctor reports findings: {all:?}");

    site.director.sysctl("ipv4/conf/eth0/rp_filter", "1")?;
    let output = fix(&site, "rp_filter of eth0 is strict")?;
    ensure!(
        output.contains("net.ipv4.conf.eth0.rp_filter=2"),
        "no `net.ipv4.conf.eth0.rp_filter=2` in {output}"
    );
    site.director.sysctl("ipv4/conf/eth0/rp_filter", "0")?;

    // veth lacks these settings and counters: scripts replace the tools.
    let tools = [
        ("ethtool", "echo large-receive-offload: on"),
        (
            "ip",
            r#"echo '[{"ifname":"eth0","stats64":{"rx":{"missed_errors":12,"fifo_errors":0}}}]'"#,
        ),
        (
            "iptables-legacy-save",
            r"printf '*filter\n-A INPUT -p tcp -m tcp --dport 80 -j DROP\nCOMMIT\n'",
        ),
    ];
    let dir = site.testbed.dir().join("tools");
    fs::create_dir_all(&dir)?;
    for (name, script) in tools {
        fs::write(dir.join(name), format!("#!/bin/sh\n{script}\n"))?;
    }
    let text = site.director.sh(&format!(
        "chmod 755 {0}/*; PATH={0}:$PATH {1} doctor --since start || [ $? = 1 ]",
        dir.display(),
        programs::find("lvsadm")?.display()
    ))?;
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "in hardware (LRO)",
        "ethtool -K eth0 lro off",
        "has lost 12 frames",
        "ethtool -G eth0 rx",
        "table filter, chain INPUT, no longer receives packets of TCP",
    ] {
        ensure!(
            flat.contains(part),
            "a part of the finding is missing: {part}: {text}"
        );
    }

    // The kernel reports the change to the dataplane later.
    site.director.sh("ip link set eth1 down")?;
    soon("doctor to report that eth1 is down", || {
        fix(&site, "eth1 is down").is_ok_and(|fix| fix.contains("ip link set eth1 up"))
    })
    .with_context(|| format!("{:?}", findings(&site)))?;
    let down = findings_with_code(&site, "interface_down")?;
    ensure!(
        down.len() == 1 && down[0]["since"].is_u64(),
        "the interface is not reported as down exactly once: {down:?}"
    );
    site.director.sh("ip link set eth1 up")?;
    soon("doctor to report eth1 no more", || {
        findings_with_code(&site, "interface_down").is_ok_and(|found| found.is_empty())
    })
}

/// doctor reports filters that run after the dataplane has received its copy of a packet, and
/// filters that drop packets of the dataplane.
#[test]
fn doctor_reports_tc_filters_and_chains_at_interfaces() -> Result<()> {
    let site = site("doctfilt", Forward::Nat)?;
    for (side, device, what, advice) in [
        (
            "ingress",
            "eth0",
            "may drop packets, but has no effect on packets of services",
            "lvsadm filter add",
        ),
        (
            "egress",
            "eth1",
            "may drop requests and replies of services",
            "tc filter show dev eth1 egress",
        ),
    ] {
        site.director.sh(&format!(
            "tc qdisc add dev {device} clsact; tc filter add dev {device} {side} protocol ip pref 1 bpf da bytecode '1,6 0 0 0'"
        ))?;
        let output = fix(&site, what)?;
        ensure!(output.contains(advice), "no {advice:?} in {output}");
        site.director
            .sh(&format!("tc qdisc del dev {device} clsact"))?;
    }
    let chain = |hook: &str, device: &str, rule: &str| {
        site.director.sh(&format!(
            "nft 'add table netdev t; flush table netdev t; delete table netdev t; add table netdev t; \
             add chain netdev t c {{ type filter hook {hook} device {device} priority -500; }}; add rule netdev t c {rule}'"
        ))
    };
    chain("ingress", "eth0", "tcp dport 80 drop")?;
    let output = fix(&site, "does not keep packets of TCP")?;
    ensure!(
        output.contains("lvsadm filter add"),
        "no `lvsadm filter add` in {output}"
    );
    chain("egress", "eth0", "tcp sport 80 counter drop")?;
    let output = fix(&site, "also drops packets that the dataplane sends for TCP")?;
    ensure!(
        output.contains("nft -a list chain netdev t c"),
        "no `nft -a list chain netdev t c` in {output}"
    );
    site.director.sh("nft delete table netdev t")?;
    let all = findings(&site)?;
    ensure!(all.is_empty(), "doctor reports findings: {all:?}");
    Ok(())
}

#[test]
fn doctor_reports_frames_dropped_by_full_ring() -> Result<()> {
    let site = site("doctlost", Forward::Nat)?;
    let dataplane = site
        .dataplane
        .as_ref()
        .context("no dataplane was started")?;
    // The dataplane is suspended, so that the flood fills its ring.
    dataplane.signal(Signal::SIGSTOP)?;
    let flood = site.client.sh(&format!(
        r#"perl -MSocket -e 'socket(S, PF_INET, SOCK_DGRAM, 17); my $to = sockaddr_in(9, inet_aton("{}"));
        send(S, "x" x 1400, 0, $to) for 1 .. 60000'"#,
        site.vip
    ));
    dataplane.signal(Signal::SIGCONT)?;
    flood?;
    soon("doctor to report the lost frames", || {
        fix(&site, "arrived faster than the dataplane read them")
            .is_ok_and(|fix| fix.contains("net.core.rmem_max"))
    })
}

#[test]
fn doctor_reports_packets_too_long_for_tunnel() -> Result<()> {
    let site = site("docttun", Forward::Tun)?;
    // doctor reports the problem before any long packet arrives.
    let output = fix(&site, "full packets of clients do not fit")?;
    ensure!(output.contains("advmss"), "no `advmss` in {output}");
    let upload = site.serve("up", 100_000)?;
    // The client receives an ICMP error, and then sends shorter packets.
    for _ in 0..2 {
        site.client.sh(&format!(
            "ip route flush cache; curl --fail -sS --max-time 120 -T {} http://{}/up/x",
            upload.display(),
            site.service(80)
        ))?;
    }
    let mut all = Vec::new();
    let is_found = |what: &str| what.contains("did not fit the tunnel to");
    let found = soon(
        "doctor to report packets that do not fit the tunnel",
        || {
            all = findings(&site).unwrap_or_default();
            all.iter().any(|(what, _)| is_found(what))
        },
    );
    found.with_context(|| format!("{all:?}"))?;
    let found = all.iter().find(|(what, _)| is_found(what));
    let (what, fix) = found.context("doctor does not report the finding")?;
    ensure!(
        what.contains("they had up to 1500 bytes, and 1480 fit"),
        "no `they had up to 1500 bytes, and 1480 fit` in {what}"
    );
    ensure!(
        fix.contains("by 20,") && fix.ends_with("advmss 1440"),
        "the fix does not name 20 bytes and end with `advmss 1440`: {fix}"
    );
    Ok(())
}

/// Only the director's interface has no room for the tunnel header. Full packets still arrive when
/// its MTU is raised.
#[test]
#[ignore = "long"]
fn doctor_reports_small_mtu_of_tunnel_until_it_is_raised() -> Result<()> {
    let mut options = SiteOptions::with_servers("docmtu", Forward::Tun, 1);
    options.mtu = 1520;
    let site = common::site(options)?;
    site.add_service(80, "rr")?;
    for host in [&site.client, &site.director] {
        host.sh("ip link set eth0 mtu 1500")?;
    }
    let upload = site.serve("up", 100_000)?;
    let send = || {
        site.client.sh(&format!(
            "ip route flush cache; curl --fail -sS --max-time 120 -T {} http://{}/up/x",
            upload.display(),
            site.service(80)
        ))
    };
    let reported = |code: &str| findings_with_code(&site, code).map(|found| found.len());
    // Without a long packet, doctor reports the MTU.
    soon("doctor to report the MTU", || {
        reported("tunnel_mtu").is_ok_and(|number| number == 1)
    })?;
    send()?;
    soon("doctor to report packets that were too long", || {
        reported("too_big").is_ok_and(|number| number == 1)
    })?;
    site.director.sh("ip link set eth0 mtu 1520")?;
    soon("doctor to report the MTU no longer", || {
        reported("tunnel_mtu").is_ok_and(|number| number == 0)
    })?;
    // doctor reports drops of the last five minutes, and names how many are of the last one.
    wait_until("a minute without drops", Duration::from_secs(90), || {
        let dropped = send().and_then(|_| findings_with_code(&site, "too_big"));
        dropped.is_ok_and(|found| found.iter().all(|one| one["last_minute"] == 0))
    })
    .with_context(|| format!("{:?}", findings(&site)))
}

#[test]
fn doctor_reports_foreign_owner_of_vip() -> Result<()> {
    let mut options = SiteOptions::with_servers("doctarp", Forward::Dr, 1);
    options.vip = Vip::Dataplane;
    let mut site = Site::new(options)?;
    let router = site
        .router
        .clone()
        .context("the one-arm site has a router")?;
    router.sh(&format!("ip addr add {}/32 dev eth1", site.vip))?;
    site.start_dataplane(&[])?;
    // `add_service` may fail because of the foreign VIP.
    let _ = site.add_service(80, "rr");
    let mac = router.sh("cat /sys/class/net/eth1/address")?;
    let expected = format!(
        "{} answers ARP or neighbour discovery for {}",
        mac.trim(),
        site.vip
    );
    soon(&format!("doctor to report: {expected}"), || {
        fix(&site, &expected).is_ok_and(|fix| fix.contains("arp_ignore=1"))
    })
}

#[test]
fn doctor_reports_foreign_owner_of_director_address() -> Result<()> {
    let site = site("doctown", Forward::Nat)?;
    let director = site.director.sh("cat /sys/class/net/eth1/address")?;
    let server = &site.servers[0];
    let other = server.sh("cat /sys/class/net/eth0/address")?;
    server.sh("ip addr add 10.0.0.1/32 dev eth0")?;
    // The ARP request of this host has the director's address as its source.
    let ask = "ping -q -c 1 -W 1 -I 10.0.0.1 10.0.0.77 || true";
    let condition = "doctor to report that a server has the director's address";
    soon(condition, || {
        let _ = server.sh(ask);
        let reported = findings_with_code(&site, "address_conflict");
        reported.is_ok_and(|reported| {
            reported.iter().any(|finding| {
                let what = finding["what"].as_str().unwrap_or_default();
                finding["host"] == "10.0.0.1"
                    && finding["interface"] == "eth1"
                    && what.contains(director.trim())
                    && what.contains(other.trim())
            })
        })
    })
}

#[test]
fn doctor_names_service_of_refused_connections() -> Result<()> {
    let site = site("doctref", Forward::Nat)?;
    site.lvsadm(&format!("-A -t {}:81 -s rr", site.vip))?;
    let connect = format!("curl -s -m 1 http://{}:81/ || true", site.vip);
    let mut reported = Vec::new();
    let found = soon("doctor to report the refusal", || {
        let _ = site.client.sh(&connect);
        reported = findings_with_code(&site, "no_server").unwrap_or_default();
        !reported.is_empty()
    });
    found.with_context(|| format!("{reported:?}"))?;
    let finding = &reported[0];
    ensure!(
        finding["service"]["address"] == format!("{}:81", site.vip),
        "the finding does not name the service at port 81: {finding}"
    );
    for key in ["since", "ago", "recent", "last_minute"] {
        ensure!(
            finding[key].is_u64(),
            "the finding lacks a number: {key}: {finding}"
        );
    }
    Ok(())
}

/// The director has a blackhole route to the server.
#[test]
fn doctor_names_service_of_dropped_packets() -> Result<()> {
    let site = site("doctdrop", Forward::Nat)?;
    site.lvsadm(&format!("-A -t {}:81 -s rr", site.vip))?;
    site.lvsadm(&format!("-a -t {}:81 -r 203.0.113.99:80 -m", site.vip))?;
    site.director.sh("ip route add blackhole 203.0.113.99")?;
    let connect = format!("curl -s -m 1 http://{}:81/ || true", site.vip);
    let of_service = |finding: &Value| finding["service"]["address"] == format!("{}:81", site.vip);
    let mut reported = Vec::new();
    let found = soon("doctor to report the drops", || {
        let _ = site.client.sh(&connect);
        reported = findings_with_code(&site, "route_refuses").unwrap_or_default();
        reported.first().is_some_and(of_service)
    });
    found.with_context(|| format!("{reported:?}"))?;
    let listed = site.lvsadm("drops")?;
    let service = format!("of TCP {}:81\n", site.vip);
    ensure!(
        listed
            .lines()
            .any(|line| line.trim().starts_with("services: "))
            && listed.contains(&service),
        "lvsadm drops does not name the service: {listed}"
    );
    Ok(())
}

#[test]
fn doctor_reports_vip_without_owner_and_service_without_server() -> Result<()> {
    let site = site("doctvip", Forward::Nat)?;
    site.lvsadm("-A -t 203.0.113.77:80 -s rr")?;
    let output = fix(
        &site,
        "this host does not answer ARP or neighbour discovery for 203.0.113.77",
    )?;
    ensure!(
        output.contains("ip addr add 203.0.113.77/32 dev lo"),
        "no `ip addr add 203.0.113.77/32 dev lo` in {output}"
    );
    let output = fix(&site, "TCP 203.0.113.77:80 has no server")?;
    ensure!(output.contains("lvsadm -a"), "no `lvsadm -a` in {output}");
    Ok(())
}

/// A host with IPv6 sends multicast listener reports on each device, including the dataplane's; a
/// router sends more of them.
#[test]
fn doctor_ignores_multicast_of_ipv6_router() -> Result<()> {
    let site = site("doctmld", Forward::Nat)?;
    site.director
        .sh("sysctl -qw net.ipv6.conf.all.forwarding=1")?;
    let sent = site
        .director
        .sh("ping -6 -q -c 3 -i 0.2 -W 1 -I lvs-host0 ff02::16 || true")?;
    ensure!(
        sent.contains("3 packets transmitted"),
        "no `3 packets transmitted` in {sent}"
    );
    let drops = site.lvsadm("drops --all --json")?;
    let drops: Value = serde_json::from_str(&drops)?;
    let drops = drops.as_array().context("the JSON value is not a list")?;
    let stray = drops.iter().find(|drop| drop["reason"] == "host_stray");
    ensure!(
        stray.context("the drop counters have no host_stray")?["count"] == 0,
        "multicast packets count as host_stray: {stray:?}"
    );
    for (what, _) in findings(&site)? {
        ensure!(!what.contains("dropped"), "unexpected `dropped` in {what}");
    }
    Ok(())
}

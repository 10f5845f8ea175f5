//! Filters: the host's own rules for packets that are passed to the host, and the director's own
//! filters.

use crate::common::{self, IN_TIME, SOON};

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Host, Site, SiteOptions, soon, wait_until};

/// An unused UDP port. The host counts the datagrams to it (`UdpNoPorts`).
const PORT: u16 = 9999;

fn site(label: &str) -> Result<Site> {
    common::site(SiteOptions::with_servers(label, Forward::Nat, 1))
}

fn seen(host: &Host) -> Result<u64> {
    let six = std::fs::read_to_string(format!("/proc/{}/net/snmp6", host.pid()))?;
    let six = six
        .lines()
        .find_map(|line| line.strip_prefix("Udp6NoPorts"));
    let six: u64 = six.and_then(|count| count.trim().parse().ok()).unwrap_or(0);
    Ok(host.counter("Udp", "NoPorts")? + six)
}

fn send(site: &Site, to: IpAddr, bytes: usize) -> Result<()> {
    let script = format!("head -c {bytes} /dev/zero > /dev/udp/{to}/{PORT}");
    site.client.run("bash", &["-c", &script]).map(drop)
}

/// Sends datagrams of `bytes` bytes until the host's UDP stack receives one. The first ones may
/// arrive before the dataplane has all the state that it needs.
fn comes(site: &Site, to: IpAddr, bytes: usize) -> Result<()> {
    let before = seen(&site.director)?;
    let came = || seen(&site.director).is_ok_and(|now| now > before);
    let what = format!("the host's UDP stack to count a datagram of {bytes} bytes to {to}");
    common::send_until(&what, SOON, || send(site, to, bytes), came).map(drop)
}

/// Sends datagrams of `bytes` bytes until a rule of the host counts one. Checks that the host's UDP
/// stack has received none.
fn is_dropped(site: &Site, to: IpAddr, bytes: usize) -> Result<()> {
    let dropped = || -> Result<u64> {
        let rules = site.director.sh("nft list table inet fw")?;
        let counts = rules.split("counter packets ").skip(1);
        counts
            .map(|rest| Ok(rest.split(' ').next().unwrap_or_default().parse::<u64>()?))
            .sum()
    };
    let (before, already) = (seen(&site.director)?, dropped()?);
    let more = || dropped().is_ok_and(|now| now > already);
    let what = format!("the rule to count a datagram of {bytes} bytes to {to}");
    common::send_until(&what, SOON, || send(site, to, bytes), more)?;
    let now = seen(&site.director)?;
    ensure!(now == before, "{} packets passed the rules", now - before);
    Ok(())
}

fn firewall(site: &Site, rule: &str) -> Result<()> {
    site.director.sh(
        "nft 'add table inet fw; flush table inet fw; add chain inet fw input { type filter hook input priority 0; }'",
    )?;
    if !rule.is_empty() {
        site.director
            .sh(&format!("nft 'add rule inet fw input {rule}'"))?;
    }
    Ok(())
}

/// The host's rules match reinjected packets as they match packets that the dataplane has not
/// received: large and small fragments, and whole datagrams, to a port of a VIP of the host.
#[test]
fn fragments_to_port_of_host_are_filtered_by_its_rules() -> Result<()> {
    let mut site = site("fragments")?;
    site.start_dataplane(&[])?;
    site.add_service(80, "rr")?;
    site.lvsadm(&format!("-A -t [{}]:80 -s rr", site.vip6))?;
    let (four, six): (IpAddr, IpAddr) = (site.vip.into(), site.vip6.into());
    let client = common::client_address(&site)?;
    let sizes = [(four, 3000), (six, 3000), (four, 100), (six, 100)];
    let all = |site: &Site, want: bool, rule: &str| -> Result<()> {
        firewall(site, rule)?;
        for (to, bytes) in sizes {
            if want {
                comes(site, to, bytes).with_context(|| format!("{rule:?}"))?;
            } else {
                is_dropped(site, to, bytes).with_context(|| format!("{rule:?}"))?;
            }
        }
        Ok(())
    };
    all(&site, true, "")?;
    all(
        &site,
        false,
        &format!("iifname eth0 udp dport {PORT} counter drop"),
    )?;
    all(&site, false, "iifname eth0 meta l4proto udp counter drop")?;
    all(
        &site,
        false,
        "iif eth0 ether saddr != 00:00:00:00:00:00 meta l4proto udp counter drop",
    )?;
    // No packet arrives on lvs-host0, and none has a mark.
    all(&site, true, "iifname lvs-host0 counter drop")?;
    all(&site, true, "meta mark != 0 counter drop")?;
    firewall(&site, &format!("ip saddr {client} counter drop"))?;
    is_dropped(&site, four, 3000)?;
    comes(&site, six, 3000)?;
    firewall(&site, "ip6 saddr fd00::/8 meta l4proto udp counter drop")?;
    comes(&site, four, 3000)?;
    is_dropped(&site, six, 3000)?;
    // The packet is sent in fragments of 48 bytes.
    site.client
        .sh(&format!("ip route add {four} dev eth0 mtu lock 68"))?;
    firewall(&site, "")?;
    comes(&site, four, 2000).context("without rules, small fragments do not arrive")?;
    firewall(
        &site,
        &format!("iifname eth0 udp dport {PORT} counter drop"),
    )?;
    is_dropped(&site, four, 2000).context("small fragments pass the rules")?;
    // With rp_filter, packets also arrive on the interface of the client's route.
    site.director.sysctl("ipv4/conf/eth0/rp_filter", "1")?;
    firewall(&site, "")?;
    comes(&site, four, 2000).context("with rp_filter, reinjected packets do not arrive")
}

/// Without the right to use BPF, reinjected packets arrive through the dataplane's device, and the
/// log shows that.
#[test]
fn fragments_without_bpf_arrive_on_the_dataplanes_device() -> Result<()> {
    let mut site = site("nobpf")?;
    let launcher = ["setpriv", "--bounding-set=-bpf,-sys_admin", "--"];
    site.start_dataplane_by(&launcher, &[])?;
    site.add_service(80, "rr")?;
    common::says(&site, "arrive on the device lvs-host0")?;
    let vip: IpAddr = site.vip.into();
    firewall(&site, "")?;
    comes(&site, vip, 3000)?;
    firewall(&site, "iifname eth0 meta l4proto udp counter drop")?;
    comes(&site, vip, 3000).context("the packet does not arrive on lvs-host0")?;
    firewall(
        &site,
        "iifname { eth0, lvs-host0 } meta l4proto udp counter drop",
    )?;
    is_dropped(&site, vip, 3000)
}

/// Program that detaches all BPF links at the egress of an interface, as `bpftool link detach`
/// does.
const DETACH: &str = r#"
my ($interface) = @ARGV;
my $bpf = `uname -m` =~ /aarch64/ ? 280 : 321;
open my $file, '<', "/sys/class/net/$interface/ifindex" or die;
my $ifindex = <$file> + 0;
my ($ids, $links) = (pack('L64'), pack('L64'));
# BPF_PROG_QUERY of BPF_TCX_EGRESS
my $query = pack('LLLLQLLQQQQ', $ifindex, 47, 0, 0, unpack('Q', pack('P', $ids)), 64, 0, 0, unpack('Q', pack('P', $links)), 0, 0);
syscall($bpf, 16, $query, length $query) == 0 or die "query: $!";
my $ended = 0;
for my $id (grep { $_ } unpack('L64', $links)) {
    my $by_id = pack('L3', $id, 0, 0);
    my $fd = syscall($bpf, 30, $by_id, length $by_id);   # BPF_LINK_GET_FD_BY_ID
    $fd >= 0 or die "link $id: $!";
    my $detach = pack('L', $fd);
    syscall($bpf, 34, $detach, length $detach) == 0 or die "detach: $!";   # BPF_LINK_DETACH
    $ended++;
}
print $ended;
"#;

/// The dataplane's log line when its reinjection program is removed.
const GONE: &str = "lvs_back is not attached to the egress of eth0 any more";

fn received(site: &Site) -> Result<u64> {
    let workers: serde_json::Value = serde_json::from_str(&site.lvsadm("workers --json")?)?;
    workers[0]["packets"]
        .as_u64()
        .context("the worker has no count of packets")
}

/// An operator removes the program that reinjects frames. No frame leaves the director with the
/// client's address as its source, and the dataplane soon reinjects frames through its device
/// instead.
#[test]
fn removed_reinjection_program_leaks_no_packet() -> Result<()> {
    let mut site = site("detached")?;
    site.start_dataplane(&[])?;
    site.add_service(80, "rr")?;
    let vip: IpAddr = site.vip.into();
    firewall(&site, "iifname lvs-host0 counter drop")?;
    comes(&site, vip, 3000)
        .context("the packet arrives on lvs-host0 although the program is attached")?;
    firewall(&site, "")?;
    let sender = site.client.sh("cat /sys/class/net/eth0/address")?;
    let sender = sender.trim();
    let there = site.testbed.port_of(sender)?;
    let ended = site.director.run("perl", &["-e", DETACH, "eth0"])?;
    ensure!(
        ended == "1",
        "{ended:?} programs were detached instead of 1"
    );
    // No program reinjects this packet any more. If its frames left the director, the switch would
    // learn the client's address at the director's port.
    let (leaked, received) = (seen(&site.director)?, received(&site)?);
    let handled = || self::received(&site).is_ok_and(|now| now >= received + 3);
    let what = "the dataplane to handle the fragments";
    common::send_until(what, SOON, || send(&site, vip, 3000), handled)?;
    let dataplane = site
        .dataplane
        .as_ref()
        .context("no dataplane was started")?;
    let noticed = || dataplane.log().contains(GONE);
    ensure!(
        seen(&site.director)? == leaked
            || wait_until(
                "the dataplane to log the detached program",
                IN_TIME,
                noticed
            )
            .is_ok(),
        "the packet was reinjected into the host, although the program was detached"
    );
    ensure!(site.testbed.port_of(sender)? == there);
    soon("the dataplane to log the detached program", noticed).with_context(|| dataplane.log())?;
    comes(&site, vip, 3000).context("the packet does not arrive through lvs-host0")?;
    // The host receives the packet through lvs-host0.
    firewall(&site, "iifname lvs-host0 counter drop")?;
    is_dropped(&site, vip, 3000)
}

/// `-S` prints the same bytes as ipvsadm, and warns about settings that it does not save. `filter
/// save` prints these settings, and `filter restore` restores them completely or not at all.
#[test]
fn source_filters_are_saved_and_restored_completely_or_not_at_all() -> Result<()> {
    let mut site = site("save")?;
    site.start_dataplane(&[])?;
    site.add_service(80, "rr")?;
    site.lvsadm("-A -f 7 -6 -s rr")?;
    let dir = site.director.dir().display().to_string();
    let (program, vip) = (lvs_testbed::programs::find("lvsadm")?, site.vip);
    let lvsadm = program.display();
    let saved = |after: &str| {
        site.director.sh(&format!(
            "cd {dir}; {lvsadm} -S -n > rules 2> said; cat said; {after}"
        ))
    };
    ensure!(saved("")?.is_empty());
    site.lvsadm(&format!(
        "filter add {vip}:80 --deny 203.0.113.0/24,2001:db8:bad::/48 --allow 203.0.113.9"
    ))?;
    site.lvsadm("filter add fwmark6:7 --deny ::/0")?;
    site.lvsadm(&format!("-A -t [{}]:80 -s rr", site.vip6))?;
    site.lvsadm(&format!(
        "filter add [{}]:80 --deny 2001:db8::/32",
        site.vip6
    ))?;
    site.lvsadm("filter add all --deny 198.51.100.0/24")?;
    site.lvsadm("mark add --source 198.18.0.0/15 --drop")?;
    let message = saved("")?;
    let plain = site.director.sh(&format!("{lvsadm} -S -n 2>/dev/null"))?;
    ensure!(
        message.contains("-S does not save 4 filter(s) by source: `lvsadm filter save` saves them")
            && message.contains("1 rule(s) for marks"),
        "no \"-S does not save 4 filter(s) by source: `lvsadm filter save` saves them\" or no `1 rule(s) for marks` in {message}"
    );
    ensure!(saved("cat rules")? == format!("{message}{plain}"));
    // Under the name ipvsadm, the output is that of ipvsadm.
    let quiet = format!("ln -sf {lvsadm} {dir}/ipvsadm; {dir}/ipvsadm -S -n 2>&1 >/dev/null");
    ensure!(site.director.sh(&quiet)?.is_empty());

    let filters = site.lvsadm("filter save")?;
    for line in [
        format!("tcp:{vip}:80 allow 203.0.113.9"),
        format!("tcp:{vip}:80 deny 2001:db8:bad::/48"),
        "fwmark6:7 deny ::/0".to_owned(),
        "all deny 198.51.100.0/24".to_owned(),
    ] {
        ensure!(filters.contains(&line), "no {line:?} in {filters}");
    }
    let restore = |text: &str| {
        site.director.sh(&format!(
            "{lvsadm} filter restore <<'END'\n{text}# end of filters\nEND\n"
        ))
    };
    let listed = || site.lvsadm("filter list");
    let before = listed()?;
    // The filters are replaced by another one, and then restored.
    restore("all allow 10.0.0.0/8\n")?;
    ensure!(
        listed()?.lines().count() == 2,
        "the list of filters does not have exactly 2 lines: {}",
        listed()?
    );
    restore(&filters)?;
    ensure!(
        listed()? == before,
        "the filters were not restored: {}",
        listed()?
    );
    for (bad, why) in [
        (
            "all deny 10.0.0.0/8\nudp:192.0.2.77:53 deny 10.0.0.0/8\n",
            "line 2: ",
        ),
        ("all deny 10.0.0.0/8\nall deny ten\n", "line 2: "),
        (
            "all deny 10.0.0.0/8\nall allow 10.0.0.0/8\n",
            "both allowed and denied",
        ),
        (
            "\nall keep 10.0.0.0/8\n",
            "line 2: expected SERVICE|all allow|deny PREFIX",
        ),
    ] {
        let refused = restore(bad)
            .err()
            .context("the invalid filter was applied")?;
        let refused = format!("{refused:#}");
        ensure!(
            refused.contains(why) && refused.contains("nothing was changed"),
            "the refusal is not reported: {bad}: {refused}"
        );
        ensure!(
            listed()? == before,
            "an invalid file changed filters: {bad}: {}",
            listed()?
        );
    }
    // A truncated file changes nothing; a file without filters removes all filters.
    for early in ["", "all deny 10.0.0.0/8\n"] {
        let refused = site
            .director
            .sh(&format!("printf '{early}' | {lvsadm} filter restore"));
        ensure!(
            refused.is_err() && listed()? == before,
            "a truncated file was accepted or changed filters: {early:?}: {}",
            listed()?
        );
    }
    restore("# none\n")?;
    ensure!(
        listed()? == "no filters\n",
        "an empty file did not remove all filters: {}",
        listed()?
    );
    Ok(())
}

/// Program that drops every frame at an interface with XDP until it exits.
pub(super) const XDP_DROP: &str = r#"
my ($interface) = @ARGV;
my $bpf = `uname -m` =~ /aarch64/ ? 280 : 321;
open my $file, '<', "/sys/class/net/$interface/ifindex" or die;
my $ifindex = <$file> + 0;
my ($program, $license) = (pack('CCslCCsl', 0xb7, 0, 0, 1, 0x95, 0, 0, 0), "MIT\0");
my $at = sub { unpack('Q', pack('P', $_[0])) };
# XDP: return XDP_DROP
my $load = pack('LLQQLLQLLa16', 6, 2, $at->($program), $at->($license), 0, 0, 0, 0, 0, 'early') . "\0" x 80;
my $fd = syscall($bpf, 5, $load, length $load);
$fd >= 0 or die "load: $!";
my $attach = pack('LLLL', $fd, $ifindex, 37, 0) . "\0" x 32;   # BPF_LINK_CREATE of BPF_XDP
syscall($bpf, 28, $attach, length $attach) >= 0 or die "attach: $!";
$| = 1;
print "attached\n";
sleep 600;
"#;

/// Program that drops every frame in one direction of an interface with tcx until it exits.
pub(crate) const TCX_DROP: &str = r#"
my ($interface, $side) = @ARGV;
my $bpf = `uname -m` =~ /aarch64/ ? 280 : 321;
open my $file, '<', "/sys/class/net/$interface/ifindex" or die;
my $ifindex = <$file> + 0;
my $type = $side eq 'ingress' ? 46 : 47;
my ($program, $license) = (pack('CCslCCsl', 0xb7, 0, 0, 2, 0x95, 0, 0, 0), "MIT\0");
my $at = sub { unpack('Q', pack('P', $_[0])) };
# SCHED_CLS: return TCX_DROP
my $load = pack('LLQQLLQLLa16LL', 3, 2, $at->($program), $at->($license), 0, 0, 0, 0, 0, 'somebodys', 0, $type) . "\0" x 72;
my $fd = syscall($bpf, 5, $load, length $load);
$fd >= 0 or die "load: $!";
my $attach = pack('LLLL', $fd, $ifindex, $type, 0) . "\0" x 48;   # BPF_LINK_CREATE
syscall($bpf, 28, $attach, length $attach) >= 0 or die "attach: $!";
$| = 1;
print "attached\n";
sleep 600;
"#;

/// BPF programs that are attached by links, which `tc` does not show: `doctor` reports the programs
/// that withhold packets from services, but not the dataplane's own.
#[test]
fn foreign_bpf_programs_at_interfaces_are_reported_by_doctor() -> Result<()> {
    let site = site("tcx")?;
    site.add_service(80, "rr")?;
    serves(&site, "at first")?;
    let program = lvs_testbed::programs::find("lvsadm")?;
    let doctor = || {
        let message = format!("{} --json doctor || true", program.display());
        site.director.sh(&message)
    };
    let finds = |words: &str, present: bool| {
        soon(&format!("doctor to contain {words:?}: {present}"), || {
            doctor().is_ok_and(|message| message.contains(words) == present)
        })
        .with_context(|| format!("{:?}", doctor()))
    };
    finds("BPF program", false)?;
    for (device, side, passes) in [("eth0", "ingress", true), ("eth1", "egress", false)] {
        let mut tcx = site
            .director
            .spawn("perl", &["-e", TCX_DROP, device, side])?;
        soon("the BPF program to be attached", || {
            tcx.log().contains("attached") || tcx.log().contains(':')
        })?;
        ensure!(
            tcx.log().contains("attached"),
            "no `attached` in {}",
            tcx.log()
        );
        if passes {
            serves(&site, side)?;
        } else {
            ensure!(
                !served(&site)?,
                "the service is reached although its packets are dropped at {side}"
            );
        }
        let found = format!("a BPF program at the {side} of {device} (tcx: somebodys)");
        finds(&found, true)?;
        tcx.kill();
        serves(&site, "after the program was detached")?;
        finds("BPF program", false)?;
    }
    let mut xdp = site.director.spawn("perl", &["-e", XDP_DROP, "eth1"])?;
    soon("the XDP program to be attached", || {
        xdp.log().contains("attached") || xdp.log().contains(':')
    })?;
    ensure!(
        xdp.log().contains("attached"),
        "no `attached` in {}",
        xdp.log()
    );
    ensure!(
        !served(&site)?,
        "the service is reached although its packets are dropped by XDP"
    );
    let found =
        "a BPF program at the driver of eth1 (XDP: early) may drop or redirect packets of services";
    finds(found, true)?;
    xdp.kill();
    serves(&site, "after the program was detached")?;
    finds("BPF program", false)
}

/// Whether the service answers a request of the client within a second.
fn served(site: &Site) -> Result<bool> {
    let fetch = format!(
        "curl -s -m 1 -o /dev/null http://{}/ && echo yes || echo no",
        site.vip
    );
    Ok(site.client.sh(&fetch)?.trim() == "yes")
}

/// Waits until the service answers a request, which may take longer on a busy machine.
fn serves(site: &Site, what: &str) -> Result<()> {
    soon(&format!("a request to be answered: {what}"), || {
        served(site).unwrap_or(false)
    })
}

/// Checks the table in docs/security.md: which filters of the host match the traffic of services.
#[test]
fn host_filters_see_documented_part_of_service_traffic() -> Result<()> {
    let site = site("table")?;
    site.add_service(80, "rr")?;
    serves(&site, "at first")?;
    let client = common::client_address(&site)?;
    let director = |script: &str| site.director.sh(script);

    // nftables at the hooks of the host's network stack, and connection tracking, have no effect.
    for hook in ["prerouting", "input", "forward", "output", "postrouting"] {
        director(&format!(
            "nft 'add table inet whole; flush table inet whole; \
             add chain inet whole c {{ type filter hook {hook} priority -400; }}; \
             add rule inet whole c tcp dport 80 counter drop; add rule inet whole c tcp sport 80 counter drop'"
        ))?;
        serves(&site, hook)?;
        let seen = director("nft list table inet whole")?;
        ensure!(
            seen.matches("packets 0 bytes 0").count() == 2,
            "the rules counted packets: {hook}: {seen}"
        );
        director("nft delete table inet whole")?;
    }
    // iptables has no effect either, if the host has it.
    if director("command -v iptables-legacy >/dev/null && iptables-legacy -L -n >/dev/null 2>&1 && echo yes || true")?
        .contains("yes")
    {
        director("for chain in INPUT FORWARD OUTPUT; do iptables-legacy -A $chain -p tcp -j DROP; done")?;
        serves(&site, "iptables")?;
        director("iptables-legacy -F")?;
    }
    // nftables `netdev` at ingress sees and drops packets, but the dataplane forwards its own
    // copies.
    for priority in [-500, 0] {
        director(&format!(
            "nft 'add table netdev early; add chain netdev early c {{ type filter hook ingress device eth0 priority {priority}; }}; \
             add rule netdev early c tcp dport 80 counter drop'"
        ))?;
        serves(&site, &format!("ingress {priority}"))?;
        let seen = director("nft list table netdev early")?;
        // The shield has removed all packets before chains with a higher priority number.
        let dropped = !seen.contains("packets 0 bytes 0");
        ensure!(
            dropped == (priority < -300),
            "the rule at the priority {priority} counts other packets than expected: {seen}"
        );
        director("nft delete table netdev early")?;
    }
    // rp_filter and routing rules have no effect.
    director(
        "sysctl -qw net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.eth0.rp_filter=1 net.ipv4.conf.eth1.rp_filter=1",
    )?;
    director(&format!(
        "ip rule add from {client} blackhole; ip rule add to {client} iif eth1 blackhole"
    ))?;
    serves(&site, "rp_filter, ip rule")?;
    director(&format!(
        "ip rule del from {client}; ip rule del to {client} iif eth1"
    ))?;
    // nftables `netdev` at egress drops requests and replies.
    for (device, port) in [("eth1", "dport"), ("eth0", "sport")] {
        director(&format!(
            "nft 'add table netdev late; add chain netdev late c {{ type filter hook egress device {device} priority 0; }}; \
             add rule netdev late c tcp {port} 80 counter drop'"
        ))?;
        ensure!(
            !served(&site)?,
            "packets bypass the egress filter of {device}"
        );
        director("nft delete table netdev late")?;
        serves(&site, "without the egress filter")?;
    }
    // tc filters that drop all IPv4 packets have the same effects as nftables `netdev`.
    let tc = |side: &str| {
        let device = if side == "ingress" { "eth0" } else { "eth1" };
        director(&format!(
            "tc qdisc add dev {device} clsact; \
             tc filter add dev {device} {side} protocol ip pref 1 bpf da bytecode '1,6 0 0 2'"
        ))?;
        // With these filters, the host itself receives nothing.
        let reached = || {
            let ping = "ping -n -c 1 -W 1 192.0.2.1 >/dev/null && echo yes || true";
            site.client
                .sh(ping)
                .is_ok_and(|message| message.contains("yes"))
        };
        if side == "ingress" {
            serves(&site, "the dataplane receives a copy of each packet")?;
            ensure!(
                !reached(),
                "the host receives packets that a filter at {side} drops"
            );
        } else {
            ensure!(!served(&site)?, "packets bypass the tc filter at egress");
            soon("the host to answer the client's ping", reached)?;
        }
        director(&format!("tc qdisc del dev {device} clsact")).map(drop)
    };
    tc("ingress")?;
    tc("egress")?;
    // XDP runs before the dataplane receives a packet.
    let mut xdp = site.director.spawn("perl", &["-e", XDP_DROP, "eth0"])?;
    soon("the XDP program to be attached", || {
        xdp.log().contains("attached") || xdp.log().contains(':')
    })?;
    ensure!(
        xdp.log().contains("attached"),
        "no `attached` in {}",
        xdp.log()
    );
    ensure!(!served(&site)?, "packets bypass the XDP program");
    xdp.kill();
    serves(&site, "after the program was detached")?;
    // The real servers' own filters have an effect.
    site.servers[0].sh("nft 'add table inet fw; add chain inet fw c { type filter hook input priority 0; }; add rule inet fw c tcp dport 80 drop'")?;
    ensure!(!served(&site)?);
    Ok(())
}

/// With the TUN backend, the host's firewall receives all packets, at FORWARD.
#[test]
fn tun_backend_traffic_is_dropped_by_forward_rules_of_host() -> Result<()> {
    let mut options = SiteOptions::with_servers("tunfw", Forward::Nat, 1);
    options.vip = lvs_testbed::Vip::Dataplane;
    options.ip_forward = true;
    let mut site = Site::new(options)?;
    site.start_dataplane(&["--backend", "tun"])?;
    site.add_service(80, "rr")?;
    serves(&site, "without a rule")?;
    for (way, port) in [
        ("oifname", "dport"),
        ("iifname", "dport"),
        ("iifname", "sport"),
    ] {
        site.director.sh(&format!(
            "nft 'add table inet fw; flush table inet fw; add chain inet fw c {{ type filter hook forward priority 0; }}; \
             add rule inet fw c {way} lvs-tun0 tcp {port} 80 counter drop'"
        ))?;
        ensure!(
            !served(&site)?,
            "the rule with {way} and {port} does not drop packets"
        );
        site.director.sh("nft delete table inet fw")?;
        serves(&site, "without the rule")?;
    }
    Ok(())
}

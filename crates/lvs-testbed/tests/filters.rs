//! Filters: what the host's own rules see of packets that are left to it, and what the director refuses by itself.

mod common;

use std::net::IpAddr;

use anyhow::{Result, ensure};
use lvs_testbed::{Forward, Host, Site, SiteOptions};

/// Datagrams to a port that nobody has, which the host counts if they reach it.
const PORT: u16 = 9999;

fn site(label: &str) -> Result<Site> {
    let mut options = SiteOptions::new(label, Forward::Nat);
    options.servers = 1;
    common::site(options)
}

/// Datagrams that the host's UDP has seen, of either family.
fn seen(host: &Host) -> Result<u64> {
    let six = std::fs::read_to_string(format!("/proc/{}/net/snmp6", host.pid()))?;
    let six = six
        .lines()
        .find_map(|line| line.strip_prefix("Udp6NoPorts"));
    let six: u64 = six.and_then(|count| count.trim().parse().ok()).unwrap_or(0);
    Ok(host.counter("Udp", "NoPorts")? + six)
}

/// Whether the host gets a datagram of so many bytes.
fn arrives(site: &Site, to: IpAddr, bytes: usize) -> Result<bool> {
    let before = seen(&site.director)?;
    site.client.sh(&format!(
        "bash -c 'head -c {bytes} /dev/zero > /dev/udp/{to}/{PORT}'; sleep 0.15"
    ))?;
    Ok(seen(&site.director)? > before)
}

/// Replaces the host's rules for what comes in.
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

/// What passes by the engine's hands on its way to the host meets the host's rules as it came: fragments large and small, and
/// datagrams whole, on a port of a VIP of the host's.
#[test]
fn fragments_to_the_hosts_own_port_meet_its_rules() -> Result<()> {
    let mut site = site("fragments")?;
    site.start_engine(&[])?;
    site.add_service(80, "rr")?;
    site.lvsadm(&format!("-A -t [{}]:80 -s rr", site.vip6))?;
    let (four, six): (IpAddr, IpAddr) = (site.vip.into(), site.vip6.into());
    let client = common::client_address(&site)?;
    let sizes = [(four, 3000), (six, 3000), (four, 100), (six, 100)];
    let all = |site: &Site, want: bool, rule: &str| -> Result<()> {
        firewall(site, rule)?;
        for (to, bytes) in sizes {
            let there = arrives(site, to, bytes)?;
            ensure!(there == want, "{rule:?}: {bytes} bytes to {to}: {there}");
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
    // Nothing comes in by another interface, and nothing has a mark of somebody's.
    all(&site, true, "iifname lvs-host0 counter drop")?;
    all(&site, true, "meta mark != 0 counter drop")?;
    firewall(&site, &format!("ip saddr {client} counter drop"))?;
    ensure!(!arrives(&site, four, 3000)? && arrives(&site, six, 3000)?);
    firewall(&site, "ip6 saddr fd00::/8 meta l4proto udp counter drop")?;
    ensure!(arrives(&site, four, 3000)? && !arrives(&site, six, 3000)?);
    // In pieces of 48 bytes.
    site.client
        .sh(&format!("ip route add {four} dev eth0 mtu lock 68"))?;
    firewall(&site, "")?;
    ensure!(arrives(&site, four, 2000)?, "small fragments do not arrive");
    firewall(
        &site,
        &format!("iifname eth0 udp dport {PORT} counter drop"),
    )?;
    ensure!(
        !arrives(&site, four, 2000)?,
        "small fragments pass the host's rules"
    );
    // A filter by routes has the right interface, too.
    site.director.sysctl("ipv4/conf/eth0/rp_filter", "1")?;
    firewall(&site, "")?;
    ensure!(
        arrives(&site, four, 2000)?,
        "rp_filter drops what is given back"
    );
    Ok(())
}

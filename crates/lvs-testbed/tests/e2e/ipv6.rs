//! IPv6 with real clients and servers, every forwarding method and every kind of tunnel, also with
//! different IP versions inside and outside.

use crate::common;

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, LoadOptions, Site, SiteOptions, Vip, content, programs};

/// Adds a service at an address with all servers; `options` follow each server.
fn add(site: &Site, virt: SocketAddr, servers6: bool, options: &str) -> Result<()> {
    site.lvsadm(&format!("-A -t {virt} -s rr"))?;
    for index in 0..site.servers.len() {
        let addr: IpAddr = if servers6 {
            site.real_address6(index).into()
        } else {
            site.real_address(index).into()
        };
        let server = SocketAddr::new(addr, virt.port());
        site.lvsadm(&format!("-a -t {virt} -r {server} {options}"))?;
    }
    Ok(())
}

/// Sends requests that must be balanced evenly, and an upload.
fn traffic(site: &Site, virt: SocketAddr, what: &str) -> Result<()> {
    let mut load = LoadOptions::new(virt);
    load.requests = 200;
    let report = site.client.load(&load).with_context(|| what.to_owned())?;
    report.all_ok(200).with_context(|| what.to_owned())?;
    let share = 200 / site.servers.len() as u64;
    common::spread(&report, &vec![share; site.servers.len()]).with_context(|| what.to_owned())?;
    upload(site, virt).with_context(|| what.to_owned())
}

/// Uploads 8 MiB to one of the servers, which must receive every byte.
fn upload(site: &Site, virt: SocketAddr) -> Result<()> {
    const SIZE: u64 = 8 << 20;
    let file = site.testbed.dir().join("upload");
    content::write_file(&file, SIZE)?;
    let name = format!("http://{virt}/up/file");
    let path = file.display().to_string();
    let arguments = [
        "-sS", "-g", "-f", "-m", "120", "-D", "-", "-T", &path, &name,
    ];
    let head = site.client.run("curl", &arguments)?;
    let server = head
        .lines()
        .find_map(|line| line.strip_prefix("X-Server: "))
        .with_context(|| head.clone())?
        .trim();
    let there = site.testbed.dir().join(format!("{server}-up/up/file"));
    ensure!(
        std::fs::read(&there)? == std::fs::read(&file)?,
        "{} differs from what was sent",
        there.display()
    );
    std::fs::remove_file(there)?;
    Ok(())
}

fn site(label: &str, forward: Forward, vip: Vip) -> Result<Site> {
    let mut options = SiteOptions::with_servers(label, forward, 2);
    options.vip = vip;
    common::site(options)
}

fn virt6(site: &Site) -> SocketAddr {
    (site.vip6, 80).into()
}

#[test]
fn ipv6_requests_are_served_through_nat() -> Result<()> {
    for vip in [Vip::Host, Vip::Dataplane] {
        let site = site("v6-nat", Forward::Nat, vip)?;
        add(&site, virt6(&site), true, "-m")?;
        traffic(&site, virt6(&site), &format!("VIP: {vip:?}"))?;
        let listing = site.lvsadm("-L -n -c")?;
        ensure!(
            listing.contains(&format!("[{}]:80", site.vip6)),
            "{vip:?}: the listing lacks the IPv6 service: {listing}"
        );
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn ipv6_requests_are_served_by_direct_routing() -> Result<()> {
    for vip in [Vip::Host, Vip::Dataplane, Vip::Routed] {
        let site = site("v6-dr", Forward::Dr, vip)?;
        add(&site, virt6(&site), true, "-g")?;
        traffic(&site, virt6(&site), &format!("VIP: {vip:?}"))?;
    }
    Ok(())
}

/// Options of `lvsadm -a` for each kind of tunnel.
const TUNNELS: [&str; 8] = [
    "-i",
    "-i --tun-type gre",
    "-i --tun-type gre --tun-nocsum",
    "-i --tun-type gre --tun-csum",
    "-i --tun-type gue --tun-port 6080",
    "-i --tun-type gue --tun-port 6080 --tun-nocsum",
    "-i --tun-type gue --tun-port 6080 --tun-csum",
    "-i --tun-type gue --tun-port 6080 --tun-remcsum",
];

/// Checks all kinds of tunnels with inner packets of IPv6 if `inner6`, to servers with IPv6 if
/// `outer6`.
fn tunnels(label: &str, inner6: bool, outer6: bool) -> Result<()> {
    let site = site(label, Forward::Tun, Vip::Host)?;
    let virt = if inner6 {
        virt6(&site)
    } else {
        site.service(80)
    };
    for options in TUNNELS {
        add(&site, virt, outer6, options)?;
        traffic(&site, virt, options)?;
        site.lvsadm("-C")?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn ipv4_requests_are_served_through_ipv4_tunnels() -> Result<()> {
    tunnels("t44", false, false)
}

#[test]
fn ipv6_requests_are_served_through_ipv6_tunnels() -> Result<()> {
    tunnels("t66", true, true)
}

#[test]
#[ignore = "long"]
fn ipv6_requests_are_served_through_ipv4_tunnels() -> Result<()> {
    tunnels("t64", true, false)
}

#[test]
#[ignore = "long"]
fn ipv4_requests_are_served_through_ipv6_tunnels() -> Result<()> {
    tunnels("t46", false, true)
}

#[test]
fn dataplane_answers_pings_and_closed_ports_of_its_ipv6_vip() -> Result<()> {
    let site = site("v6-own", Forward::Nat, Vip::Dataplane)?;
    add(&site, virt6(&site), true, "-m")?;
    let vip = site.vip6.to_string();
    // A network card receives only multicast groups with a listener.
    let groups = site.director.run("ip", &["maddr", "show", "dev", "eth0"])?;
    ensure!(
        groups.contains("33:33:ff:00:00:10"),
        "no `33:33:ff:00:00:10` in {groups}"
    );
    let own = programs::own()?;
    site.client.run(&own, &["ping", &vip])?;
    // Long packets are fragmented in both directions.
    site.client.run(&own, &["ping", "--size", "5000", &vip])?;
    let refused = site.client.run(
        "curl",
        &["-sS", "-g", "-m", "60", &format!("http://[{vip}]:81/")],
    );
    let text = format!(
        "{:#}",
        refused
            .err()
            .context("a connection to a port without a program succeeded")?
    );
    ensure!(
        text.contains("refused") || text.contains("Couldn't connect"),
        "the connection was not refused: {text}"
    );
    let neighbours = site.client.run("ip", &["-6", "neigh", "show", &vip])?;
    ensure!(neighbours.contains("lladdr"), "no `lladdr` in {neighbours}");
    Ok(())
}

#[test]
fn ipv6_upload_over_link_with_smaller_mtu_behind_director_is_complete() -> Result<()> {
    // The servers' links have a smaller MTU than the clients' links.
    for (forward, options) in [(Forward::Nat, "-m"), (Forward::Tun, "-i")] {
        let site = site("v6-pmtu", forward, Vip::Host)?;
        let narrow = if forward == Forward::Nat {
            "eth1"
        } else {
            "eth0"
        };
        // The MTU is set on the director or the router, so that the hosts do not announce an MSS
        // that fits the small MTU.
        let (host, device) = if forward == Forward::Nat {
            (&site.director, narrow)
        } else {
            (
                site.router.as_ref().context("the site has no router")?,
                "eth2",
            )
        };
        host.sh(&format!("ip link set {device} mtu 1400"))?;
        add(&site, virt6(&site), true, options)?;
        upload(&site, virt6(&site)).with_context(|| format!("{forward:?}"))?;
    }
    Ok(())
}

//! The director is a real server of its own services.

use crate::common;

use anyhow::{Context, Result, ensure};
use lvs_testbed::servers::{NginxOptions, nginx};
use lvs_testbed::{Forward, LoadOptions, Proc, Site, SiteOptions, Vip, soon};

fn web_server(site: &Site, port: u16) -> Result<Proc> {
    let options = NginxOptions {
        ports: vec![port],
        ..NginxOptions::default()
    };
    nginx(&site.director, &options)
}

/// Sends requests, and checks how many the director and each server answered.
fn served(site: &Site, load: &LoadOptions, expected: &[(&str, u64)]) -> Result<()> {
    let report = common::ok(site.client.load(load)?, load.requests)?;
    let wanted = expected
        .iter()
        .map(|&(name, count)| (name.to_owned(), count));
    ensure!(
        report.servers == wanted.collect(),
        "the servers answered other numbers of requests than {expected:?}: {:?}",
        report.servers
    );
    Ok(())
}

/// Waits until a policy rule with these words exists, or, if `present` is false, until none exists.
fn has_rule(site: &Site, words: &str, present: bool) -> Result<()> {
    let rules = || site.director.sh("ip rule; ip -6 rule");
    let wanted = if present { "a" } else { "no" };
    soon(
        &format!("{wanted} policy rule to contain {words:?}"),
        || rules().is_ok_and(|rules| rules.contains(words) == present),
    )
    .with_context(|| format!("{:?}", rules()))
}

/// The VIP is on the host or on the dataplane. The local server sees the clients' addresses, and
/// replies through the dataplane.
#[test]
fn nat_server_on_director_serves_clients() -> Result<()> {
    for vip in [Vip::Host, Vip::Dataplane] {
        let mut options = SiteOptions::with_servers("local-nat", Forward::Nat, 1);
        options.vip = vip;
        let mut site = Site::new(options)?;
        let before = common::host_state(&site)?;
        site.start_dataplane(&[])?;
        let own = web_server(&site, 8080)?;
        let service = site.service(80);
        site.add_service(80, "rr")?;
        // The server listens at the director's address in the servers' network, or at the VIP if
        // the host owns it.
        let own_address = if vip == Vip::Host {
            site.vip.to_string()
        } else {
            "10.0.0.1".to_owned()
        };
        site.lvsadm(&format!("-a -t {service} -r {own_address}:8080 -m"))?;
        let load = common::mixed_load(&site);
        served(&site, &load, &[("director", 20), ("rs1", 20)])?;
        site.lvsadm(&format!(
            "-e -t {service} -r {}:80 -m -w 0",
            site.real_address(0)
        ))?;
        let seen = site
            .client
            .sh(&format!("curl -sS -f -m 60 http://{}/addr", site.vip))?;
        ensure!(
            seen == "192.0.2.100\n",
            "{vip:?}: the local server received a request from {seen} instead of 192.0.2.100"
        );
        common::upload(&site)?;

        // A client that connects to the server directly is also answered, although its packets take
        // the same path.
        let direct = site
            .client
            .sh(&format!("curl -sS -f -m 60 http://{own_address}:8080/id"))?;
        ensure!(direct == "director\n");

        // A killed dataplane leaves a rule for an empty table, which has no effect. The next
        // dataplane removes it.
        has_rule(&site, "sport 8080", true)?;
        if let Some(dataplane) = &mut site.dataplane {
            dataplane.kill();
        }
        let direct = site
            .client
            .sh("curl -sS -f -m 60 http://10.0.0.1:8080/id")?;
        ensure!(direct == "director\n");
        site.start_dataplane(&["--fast-path", "off"])?;
        has_rule(&site, "sport 8080", false)?;

        // When a server is removed, its rule is removed as well.
        site.add_service(80, "rr")?;
        site.lvsadm(&format!("-a -t {service} -r 10.0.0.1:8080 -m"))?;
        has_rule(&site, "10.0.0.1", true)?;
        site.lvsadm(&format!("-d -t {service} -r 10.0.0.1:8080"))?;
        has_rule(&site, "10.0.0.1", false)?;
        drop(own);
        site.dataplane = None;
        common::wait_for_host_state(&site, &before)?;
    }
    Ok(())
}

/// The host accepts packets of direct routing and of a tunnel unchanged.
#[test]
#[ignore = "long"]
fn direct_routing_server_on_director_serves_clients() -> Result<()> {
    for (forward, flag) in [(Forward::Dr, "-g"), (Forward::Tun, "-i")] {
        let site = common::site(SiteOptions::with_servers("local-dr", forward, 1))?;
        let _own = web_server(&site, 80)?;
        site.add_service(80, "rr")?;
        site.lvsadm(&format!(
            "-a -t {} -r 192.0.2.1:80 {flag}",
            site.service(80)
        ))?;
        let load = common::mixed_load(&site);
        served(&site, &load, &[("director", 20), ("rs1", 20)])?;
    }
    Ok(())
}

#[test]
fn full_nat_server_on_director_serves_clients() -> Result<()> {
    let site = common::site(SiteOptions::with_servers(
        "local-fullnat",
        Forward::FullNat,
        1,
    ))?;
    let _own = web_server(&site, 8080)?;
    site.add_service(80, "rr")?;
    site.lvsadm(&format!(
        "-a -t {} -r 192.0.2.1:8080 --fullnat",
        site.service(80)
    ))?;
    let load = site.load_of(40);
    served(&site, &load, &[("director", 20), ("rs1", 20)])
}

/// The local server listens on port 8080 or 65535; the other port of the host is 8022.
#[test]
fn other_ports_of_host_with_rp_filter_and_local_server_are_reachable() -> Result<()> {
    let mut options = SiteOptions::with_servers("local-strict", Forward::Nat, 1);
    options.vip = Vip::Host;
    let site = Site::new(options)?;
    site.director.sh(
        "sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.eth0.rp_filter=1 net.ipv4.conf.eth1.rp_filter=1",
    )?;
    let mut site = site;
    site.start_dataplane(&[])?;
    let _other = web_server(&site, 8022)?;
    for port in [8080, u16::MAX] {
        let _own = web_server(&site, port)?;
        site.add_service(80, "rr")?;
        site.lvsadm(&format!("-a -t {} -r 10.0.0.1:{port} -m", site.service(80)))?;
        let load = site.load_of(20);
        served(&site, &load, &[("director", 10), ("rs1", 10)])?;
        for direct in [8022, port] {
            let seen = site
                .client
                .sh(&format!("curl -sS -f -m 60 http://10.0.0.1:{direct}/id"))?;
            ensure!(
                seen == "director\n",
                "port {direct} was answered by another host than the director: {seen}"
            );
        }
        site.lvsadm("-C")?;
    }
    Ok(())
}

//! Full NAT: the director's local addresses replace those of clients, so that servers may use any
//! gateway.

use crate::common;

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use lvs_testbed::listing::{Row, rows};
use lvs_testbed::{Forward, LoadOptions, Site, SiteOptions, Topology, Vip, programs};

fn options(label: &str) -> SiteOptions {
    SiteOptions::with_servers(label, Forward::FullNat, 2)
}

/// Returns the source address of a client's request, as the server sees it.
fn seen_as(site: &Site, virt: SocketAddr) -> Result<String> {
    let printed = site.client.run(
        "curl",
        &[
            "-sS",
            "-g",
            "-f",
            "-m",
            "60",
            &format!("http://{virt}/addr"),
        ],
    )?;
    Ok(printed.trim().to_owned())
}

fn forty(site: &Site) -> Result<()> {
    let load = site.load_of(40);
    common::spread(&common::ok(site.client.load(&load)?, 40)?, &[20, 20])
}

/// The host owns the local address, and also connects to the same servers itself.
#[test]
fn full_nat_uses_local_address_of_host() -> Result<()> {
    let mut options = options("fullnat-host");
    options.forward = Forward::Nat;
    options.topology = Topology::Routed;
    let mut site = Site::new(options)?;
    let before = common::host_state(&site)?;
    site.start_dataplane(&["--local-address", "192.0.2.1"])?;
    site.lvsadm(&format!("-A -t {} -s rr", site.service(80)))?;
    for index in 0..2 {
        let server = site.real_address(index);
        site.lvsadm(&format!(
            "-a -t {} -r {server}:80 --fullnat",
            site.service(80)
        ))?;
    }
    let mut load = common::mixed_load(&site);
    load.pause_ms = 2;
    let steady = site.client.steady_load(&load)?;
    let direct = common::direct(&site, &load);
    let report = common::ok(site.director.load(&direct)?, 40)?;
    common::spread(&report, &[40, 0])?;
    steady.wait_for_more(3)?;
    let report = steady.finish_ok()?;
    ensure!(
        report.ok > 2 && report.servers.len() == 2,
        "not both servers answered: {report:?}"
    );
    ensure!(seen_as(&site, site.service(80))? == "192.0.2.1");
    // The dataplane uses only ports that the host's own programs do not use.
    let listing = site.lvsadm("local")?;
    ensure!(
        listing.starts_with("192.0.2.1  ports 1024-32767  "),
        "the output of `lvsadm local` does not begin with `192.0.2.1 ports 1024-32767 `: {listing}"
    );
    site.dataplane = None;
    common::wait_for_host_state(&site, &before)
}

/// Only the dataplane owns the local address and the VIP. Another local IPv4 address replaces the
/// first one during traffic.
#[test]
fn full_nat_uses_local_address_of_dataplane() -> Result<()> {
    let mut options = options("fullnat-own");
    options.vip = Vip::Dataplane;
    let site = common::site(options)?;
    site.add_service(80, "rr")?;
    let virt6 = SocketAddr::from((site.vip6, 80));
    site.lvsadm(&format!("-A -t {virt6} -s rr"))?;
    for index in 0..2 {
        let server = site.real_address6(index);
        site.lvsadm(&format!("-a -t {virt6} -r [{server}]:80 --fullnat"))?;
    }
    ensure!(seen_as(&site, site.service(80))? == "192.0.2.50");
    ensure!(seen_as(&site, virt6)? == "fd00:192::50");
    site.lvsadm("-Z")?;
    forty(&site)?;
    let mut load = LoadOptions::new(virt6);
    load.requests = 40;
    common::spread(&common::ok(site.client.load(&load)?, 40)?, &[20, 20])?;

    // The dataplane answers echo requests to its local address.
    site.servers[0].sh("ping -c 1 -w 60 192.0.2.50")?;

    // Connections keep their local address, even if it is removed from the pool.
    let mut open = site.load();
    open.keepalive = true;
    open.concurrency = 4;
    open.pause_ms = 5;
    let steady = site.client.steady_load(&open)?;
    lvs_testbed::soon("each server to have two connections", || {
        site.lvsadm("-L -n").is_ok_and(|text| {
            let of_four = |row: &Row| row.is_server() && row.number(2).is_ok_and(|n| n == 2);
            rows(&text).iter().filter(|row| of_four(row)).count() == 2
        })
    })?;
    site.lvsadm("local add 192.0.2.51")?;
    site.lvsadm("local del 192.0.2.50")?;
    ensure!(seen_as(&site, site.service(80))? == "192.0.2.51");
    forty(&site)?;
    steady.wait_for_more(5)?;
    let report = steady.finish_ok()?;
    ensure!(
        report.ok > 4 && report.servers.len() == 2,
        "not both servers answered: {report:?}"
    );

    // The last address of a family cannot be removed while servers need it.
    let refused = site.director.sh(&format!(
        "{} local del 192.0.2.51 2>&1 || echo $?",
        programs::find("lvsadm")?.display()
    ))?;
    ensure!(
        refused.contains("full NAT needs a local address") && refused.ends_with("1\n"),
        "the deletion of the last local address was not refused: {refused}"
    );
    Ok(())
}

/// Under the name ipvsadm, lvsadm refuses `--fullnat`, and its help does not contain it.
#[test]
fn full_nat_servers_are_listed_saved_and_restored() -> Result<()> {
    let site = common::site(options("fullnat-rules"))?;
    site.add_service(80, "rr")?;
    let listing = site.lvsadm("-L -n")?;
    ensure!(
        listing.contains("  -> 10.0.0.12:80                 FullNat 1      0          0"),
        "no ` -> 10.0.0.12:80 FullNat 1 0 0` in {listing}"
    );
    let rules = site.lvsadm("-S -n")?;
    ensure!(
        rules
            .lines()
            .filter(|line| line.contains("--fullnat -w 1"))
            .count()
            == 2,
        "the number of saved servers with full NAT is not 2: {rules}"
    );
    site.lvsadm("-C")?;
    site.lvsadm_restore(&rules)?;
    ensure!(site.lvsadm("-S -n")? == rules);
    forty(&site)?;

    site.director
        .install(&programs::find("lvsadm")?, &["ipvsadm"])?;
    let refused = site.director.sh(&format!(
        "ipvsadm -a -t {} -r 10.0.0.13:80 --fullnat 2>&1 || echo $?",
        site.service(80)
    ))?;
    ensure!(
        refused == "--fullnat: unknown option\n255\n",
        "ipvsadm did not answer `--fullnat: unknown option / 255`: {refused}"
    );
    ensure!(!site.director.sh("ipvsadm -h")?.contains("fullnat"));
    Ok(())
}

/// Servers and clients receive ICMP errors for a small path MTU, and a client receives a server's
/// ICMP error for a closed UDP port.
#[test]
fn full_nat_translates_icmp_errors() -> Result<()> {
    let site = common::site(options("fullnat-icmp"))?;
    site.add_service(80, "rr")?;
    let router = site.router.as_ref().expect("the routed site has a router");
    router.sh(
        "ip route replace 198.51.100.0/24 dev eth0 mtu lock 1400; ip route replace 10.0.0.0/24 dev eth2 mtu lock 1300",
    )?;
    forty(&site)?;
    common::upload(&site)?;
    // UDP to an unused port: the client receives the ICMP error with the VIP as its source.
    site.add_service_weighted("-u", 9, "rr", &[1])?;
    let printed = site.client.sh(&format!(
        "perl -MSocket -e 'socket(S, PF_INET, SOCK_DGRAM, 17); connect(S, sockaddr_in(9, inet_aton(\"{}\"))); \
         vec(my $ready = \"\", fileno(S), 1) = 1; \
         for (1 .. 60) {{ send(S, \"x\", 0); select(my $is_ready = $ready, undef, undef, 1) or next; recv(S, my $b, 9, 0); print $!; exit }} \
         print \"silence\"'",
        site.vip
    ))?;
    ensure!(
        printed == "Connection refused",
        "the error of the client's socket is not `Connection refused`: {printed}"
    );
    Ok(())
}

/// Without a local address, a server with full NAT is refused, and the message contains the fix.
#[test]
fn full_nat_without_local_address_is_refused() -> Result<()> {
    let mut options = options("fullnat-none");
    options.forward = Forward::Nat;
    let site = common::site(options)?;
    site.lvsadm(&format!("-A -t {}", site.service(80)))?;
    let output = site.lvsadm(&format!(
        "-a -t {} -r 10.0.0.11:80 --fullnat",
        site.service(80)
    ));
    let output = format!(
        "{:#}",
        output.expect_err("full NAT was accepted without a local address")
    );
    ensure!(
        output.contains("lvsadm local add"),
        "no `lvsadm local add` in {output}"
    );
    Ok(())
}

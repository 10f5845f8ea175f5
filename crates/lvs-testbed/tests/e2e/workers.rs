//! Several packet workers: traffic is the same as with one worker, and each connection belongs to
//! one worker.

use crate::{common, fast_path};

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::listing::connections;
use lvs_testbed::{Forward, LoadOptions, Site, SiteOptions, Vip, servers, wait_until};
use serde_json::Value;

/// Options for four workers without the kernel fast path, so that the workers handle all packets.
const WORKERS: [&str; 4] = ["--workers", "4", "--fast-path", "off"];

fn site(options: SiteOptions) -> Result<Site> {
    let mut site = Site::new(options)?;
    site.start_dataplane(&WORKERS)?;
    Ok(site)
}

fn options(label: &str, forward: Forward) -> SiteOptions {
    SiteOptions::new(&format!("workers-{label}"), forward)
}

/// Returns the report of each worker, and checks that there are exactly four.
fn workers(site: &Site) -> Result<Vec<Value>> {
    let listed: Vec<Value> = serde_json::from_str(&site.lvsadm("workers --json")?)?;
    ensure!(
        listed.len() == 4,
        "the number of listed workers is not 4: {listed:?}"
    );
    let numbers: Vec<u64> = listed.iter().filter_map(|w| w["number"].as_u64()).collect();
    ensure!(
        numbers == [0, 1, 2, 3],
        "the workers do not have the numbers 0 to 3: {listed:?}"
    );
    Ok(listed)
}

fn sum(workers: &[Value], name: &str) -> u64 {
    workers
        .iter()
        .filter_map(|worker| worker[name].as_u64())
        .sum()
}

/// Checks that each worker receives at least 1/`least` of all packets, and that the workers hand
/// over at most 5 % of them to other workers and drop none because of a full queue.
fn shared(site: &Site, least: u64) -> Result<()> {
    let workers = workers(site)?;
    let all = sum(&workers, "packets");
    for worker in &workers {
        let packets = worker["packets"]
            .as_u64()
            .context("the worker has no count of packets")?;
        ensure!(
            packets * least >= all,
            "a worker received too few packets: {workers:?}"
        );
    }
    ensure!(
        sum(&workers, "handed_over") * 20 <= all,
        "too many packets were handed over: {workers:?}"
    );
    ensure!(
        sum(&workers, "busy") == 0,
        "frames were dropped because the queue of their worker was full: {workers:?}"
    );
    Ok(())
}

#[test]
fn workers_forward_every_byte_through_nat() -> Result<()> {
    let site = site(options("nat", Forward::Nat))?;
    // If two workers served one connection, it would be listed twice.
    let before = common::resets(&site)?;
    common::requests_and_listings(&site)?;
    shared(&site, 20)?;
    let workers = workers(&site)?;
    let total = common::requests_of_listings();
    let (connections, resets) = (
        sum(&workers, "connections"),
        common::resets(&site)? - before,
    );
    ensure!(
        connections <= total && connections + resets >= total,
        "the workers do not have {total} connections, of which {resets} were reset: {workers:?}"
    );
    ensure!(
        sum(&workers, "capacity") >= 1 << 16,
        "the tables are too small: {workers:?}"
    );
    let names = site
        .director
        .sh("cat /proc/[0-9]*/task/*/comm | grep ^lvs-worker- | sort -u")?;
    for number in 0..4 {
        ensure!(
            names.contains(&format!("lvs-worker-{number}")),
            "a worker thread is missing: {names}"
        );
    }
    site.lvsadm("-C")?;
    common::schedulers(&site)
}

#[test]
fn workers_forward_bulk_and_datagrams() -> Result<()> {
    let mut options = options("bulk", Forward::Nat);
    options.servers = 2;
    let site = site(options)?;
    site.add_service(80, "rr")?;
    common::bulk(&site)?;
    common::iperf_and_dns(&site)
}

#[test]
#[ignore = "long"]
fn workers_forward_every_byte_by_direct_routing() -> Result<()> {
    let site = site(options("dr", Forward::Dr))?;
    common::requests_and_listings(&site)?;
    shared(&site, 20)
}

#[test]
#[ignore = "long"]
fn workers_forward_every_byte_through_tunnels() -> Result<()> {
    let site = site(options("tun", Forward::Tun))?;
    common::requests_and_listings(&site)?;
    shared(&site, 20)
}

#[test]
#[ignore = "long"]
fn workers_forward_every_byte_through_full_nat() -> Result<()> {
    let site = site(options("fullnat", Forward::FullNat))?;
    common::requests_and_listings(&site)?;
    shared(&site, 20)
}

#[test]
#[ignore = "long"]
fn workers_forward_every_byte_over_ipv6() -> Result<()> {
    let mut options = options("v6", Forward::Nat);
    options.servers = 2;
    let site = site(options)?;
    let virt = SocketAddr::from((site.vip6, 80));
    site.lvsadm(&format!("-A -t {virt} -s rr"))?;
    for index in 0..2 {
        let server = SocketAddr::from((site.real_address6(index), 80));
        site.lvsadm(&format!("-a -t {virt} -r {server} -m"))?;
    }
    let mut load = LoadOptions::new(virt);
    load.requests = 400;
    common::spread(&common::ok(site.client.load(&load)?, 400)?, &[200, 200])?;
    shared(&site, 20)
}

/// With the FTP helper, a data connection belongs to the worker of its control connection.
#[test]
#[ignore = "long"]
fn workers_transfer_whole_ftp_files_in_all_modes() -> Result<()> {
    let mut site = Site::new(options("ftp", Forward::Nat))?;
    site.start_dataplane(&["--workers", "4", "--helper", "ftp"])?;
    let _servers = site
        .servers
        .iter()
        .map(|server| servers::vsftpd(server, None))
        .collect::<Result<Vec<_>>>()?;
    site.serve("file", 1 << 20)?;
    let virt = site.service(21);
    site.lvsadm(&format!("-A -t {virt} -s rr"))?;
    for index in 0..site.servers.len() {
        let server = SocketAddr::from((site.real_address(index), 21));
        site.lvsadm(&format!("-a -t {virt} -r {server} -m"))?;
    }
    for options in ["", "--disable-epsv", "-P -", "-P - --disable-eprt"] {
        for _ in 0..3 {
            let size = site.client.sh(&format!(
                "curl -sS -g -m 240 {options} ftp://{virt}/www/file | wc -c"
            ))?;
            ensure!(
                size.trim() == "1048576",
                "the downloaded file does not have 1048576 bytes: {options}: {size}"
            );
        }
    }
    Ok(())
}

/// Servers and services are changed during traffic. Then a client on the director connects, whose
/// packets arrive on one queue.
#[test]
#[ignore = "long"]
fn workers_apply_changes_while_traffic_runs() -> Result<()> {
    let mut options = options("changes", Forward::Nat);
    options.servers = 3;
    options.vip = Vip::Dataplane;
    let site = site(options)?;
    common::administration(&site)?;
    site.add_service(80, "rr")?;
    let mut load = common::mixed_load(&site);
    load.pause_ms = 20;
    let steady = site.client.steady_load(&load)?;
    for port in 8000..8040 {
        site.add_service(port, "rr")?;
    }
    let own = site.load();
    let report = site.director.load(&LoadOptions {
        requests: 60,
        ..own
    })?;
    report.all_ok(60)?;
    steady.wait_for_more(4)?;
    let report = steady.finish_ok()?;
    ensure!(
        report.servers.len() == 3,
        "not all 3 servers answered: {report:?}"
    );
    let workers = workers(&site)?;
    ensure!(
        sum(&workers, "handed_over") > 0,
        "no packet was handed over: {workers:?}"
    );
    ensure!(
        sum(&workers, "handed_over") >= sum(&workers, "taken"),
        "more packets were taken than handed over: {workers:?}"
    );
    Ok(())
}

/// Runs downloads with two workers. Checks that both workers have connections, and that all
/// connections are offloaded.
fn offloaded(label: &str, forward: Forward) -> Result<()> {
    const DOWNLOADS: u64 = 16;
    const RATE: u64 = 60_000;
    fast_path::require_permission()?;
    let mut options = options(label, forward);
    options.servers = 2;
    options.paced = Some(RATE);
    let mut site = Site::new(options)?;
    site.start_dataplane(&["--workers", "2", "--fast-path", "on"])?;
    site.add_service(80, "rr")?;
    let mut load = LoadOptions::new(site.service(80));
    load.requests = DOWNLOADS;
    load.concurrency = DOWNLOADS;
    load.sizes = vec![RATE * 30];
    load.timeout_ms = 120_000;
    let client = site.client.clone();
    let running = thread::spawn(move || client.load(&load));
    let all_are = || -> Result<bool> {
        let owners: Vec<Value> = serde_json::from_str(&site.lvsadm("workers --json")?)?;
        let has_some = |worker: &Value| worker["connections"].as_u64() > Some(0);
        let known = connections(&site.lvsadm("-L -n -c")?)?;
        for connection in &known {
            let question = format!("explain tcp {} {}", connection.source, site.service(80));
            if !site.lvsadm(&question)?.contains("fast path   yes\n") {
                return Ok(false);
            }
        }
        Ok(known.len() as u64 == DOWNLOADS && owners.len() == 2 && owners.iter().all(has_some))
    };
    let offloaded = wait_until(
        "all connections to be offloaded",
        Duration::from_secs(60),
        || running.is_finished() || all_are().unwrap_or(false),
    );
    let before_the_end = !running.is_finished();
    let report = running
        .join()
        .map_err(|_| anyhow::anyhow!("the thread panicked"))??;
    report.all_ok(DOWNLOADS)?;
    offloaded?;
    ensure!(
        before_the_end,
        "connections ended before all were offloaded"
    );
    Ok(())
}

#[test]
fn fast_path_forwards_nat_connections_of_each_worker() -> Result<()> {
    offloaded("ink-nat", Forward::Nat)
}

#[test]
#[ignore = "long"]
fn fast_path_forwards_dr_tunnel_and_full_nat_connections_of_each_worker() -> Result<()> {
    offloaded("ink-dr", Forward::Dr)?;
    offloaded("ink-tun", Forward::Tun)?;
    offloaded("ink-fullnat", Forward::FullNat)
}

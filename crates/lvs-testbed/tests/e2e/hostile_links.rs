//! Hostile frames through real backends: packet sockets on veth links, and the TUN device. The
//! dataplane must survive, continue to balance, and count the fate of every frame.

use crate::common;

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Host, Site, SiteOptions, Vip, programs};
use nix::sys::signal::Signal;

/// Number of frames from each host.
const FRAMES: usize = 20_000;

/// Sends frames from `host`; returns the number of frames that its interface accepted.
fn shoot(site: &Site, host: &Host, interface: &str, more: &[&str], seed: u64) -> Result<usize> {
    let servers: Vec<String> = (0..site.servers.len())
        .map(|index| site.real_address(index).to_string())
        .collect();
    // No host has these addresses of clients, so that no frame has the address of a real host.
    let client = common::client_address(site)?;
    let network = client
        .rsplit_once('.')
        .context("the client's address is not IPv4")?
        .0;
    let clients: Vec<String> = (200..208).map(|last| format!("{network}.{last}")).collect();
    let director = site
        .director
        .sh("ip -4 -o addr show scope global | sed 's/.*inet \\([0-9.]*\\).*/\\1/'")?;
    let mut own = director.lines();
    let (vip, seed, frames) = (site.vip.to_string(), seed.to_string(), FRAMES.to_string());
    let mut words = vec![
        "shoot",
        "--interface",
        interface,
        "--vip",
        &vip,
        "--seed",
        &seed,
    ];
    words.extend(["--frames", &frames, "--director"]);
    words.extend([
        own.next().context("the director has no IPv4 address")?,
        own.next()
            .context("the director has only one IPv4 address")?,
    ]);
    words.extend(clients.iter().flat_map(|client| ["--client", client]));
    words.extend(servers.iter().flat_map(|server| ["--server", server]));
    words.extend(more);
    let printed = host.run(programs::own()?, &words)?;
    println!("{} {interface}: {printed}", host.name());
    let taken = printed
        .split(' ')
        .next()
        .context("the output of `shoot` does not begin with a number")?;
    Ok(taken.parse()?)
}

/// Adds a service with all servers for each protocol and port of the frames. Only TCP port 80 has
/// programs that listen on the servers.
fn services(site: &Site) -> Result<()> {
    site.add_service(80, "rr")?;
    for (flag, port, rest) in [
        ("-u", 53, "-s wlc"),
        ("--sctp-service", 3868, "-s sed"),
        ("-t", 443, "-s wlc -p 60"),
        ("-u", 5060, "-s sh -p 60 --pe sip"),
        ("-u", 514, "-s mh -o"),
        ("-t", 21, "-s lblcr -p 60"),
        ("-u", 500, "-s dh"),
    ] {
        let service = SocketAddr::from((site.vip, port));
        site.lvsadm(&format!("-A {flag} {service} {rest}"))?;
        for index in 0..site.servers.len() {
            let server = SocketAddr::from((site.real_address(index), port));
            let method = site.options.forward.flag();
            site.lvsadm(&format!("-a {flag} {service} -r {server} {method}"))?;
        }
    }
    Ok(())
}

/// Checks that both servers answer the same number of requests. The check is repeated, because
/// hostile frames between two requests may advance the round robin.
fn balances(site: &Site) -> Result<()> {
    let load = site.load_of(94);
    common::measured(|| {
        let report = common::ok(site.client.load(&load)?, 94)?;
        let uneven = common::spread(&report, &[47, 47]).err();
        Ok(uneven.map(|error| error.to_string()))
    })
}

/// Number of frames that the dataplane's sockets and devices have dropped because their buffers
/// were full.
fn missed(site: &Site) -> Result<u64> {
    let workers: Vec<serde_json::Value> = serde_json::from_str(&site.lvsadm("workers --json")?)?;
    let sockets = workers
        .iter()
        .map(|worker| {
            worker["lost"]
                .as_u64()
                .context("the worker has no count of lost frames")
        })
        .sum::<Result<u64>>()?;
    let devices = site
        .director
        .sh("cat /sys/class/net/lvs-*/statistics/tx_dropped")?;
    let devices = devices.lines().map(|line| Ok(line.parse::<u64>()?));
    Ok(sockets + devices.sum::<Result<u64>>()?)
}

/// Checks that more than five drop reasons were counted, and stops the dataplane. Checks that the
/// fates in its log add up to the received frames, and that at least `least` frames were received or
/// missed.
fn accounts_for(site: &mut Site, least: usize) -> Result<()> {
    let drops: serde_json::Value = serde_json::from_str(&site.lvsadm("drops --json")?)?;
    println!("{drops}");
    let missed = missed(site)?;
    let reasons = drops
        .as_array()
        .context("the JSON value is not a list")?
        .len();
    ensure!(reasons > 5, "at most 5 drop reasons were counted: {drops}");
    let mut dataplane = site.dataplane.take().context("no dataplane was started")?;
    ensure!(
        dataplane.is_running(),
        "the dataplane exited: {}",
        dataplane.log()
    );
    let status = dataplane.stop(Signal::SIGTERM)?;
    let log = dataplane.log();
    ensure!(
        status.success() && !log.contains("panicked"),
        "the dataplane failed or panicked: {status}: {log}"
    );
    let line = log
        .lines()
        .find(|line| line.contains("counts of packets by fate"))
        .with_context(|| log.clone())?;
    let count = |name: &str| -> Result<u64> {
        let mut words = line.split(' ').filter_map(|word| word.split_once('='));
        let (_, value) = words
            .find(|(key, _)| *key == name)
            .with_context(|| line.to_owned())?;
        Ok(value.parse()?)
    };
    let fates = [
        "sent",
        "held",
        "left",
        "given_back",
        "answered",
        "fragments",
        "dropped",
    ];
    let sum: u64 = fates.iter().map(|name| count(name)).sum::<Result<u64>>()?;
    println!("{line}");
    let received = count("received")?;
    ensure!(
        received + count("reassembled")? == sum,
        "the fates do not add up to the received frames: {line}"
    );
    ensure!(
        received + missed >= least as u64,
        "fewer than {least} frames were received or missed ({missed} missed): {line}"
    );
    Ok(())
}

#[test]
fn hostile_frames_through_packet_sockets_are_all_counted() -> Result<()> {
    let mut options = SiteOptions::with_servers("hostile-veth", Forward::Nat, 2);
    options.vip = Vip::Dataplane;
    let mut site = common::site(options)?;
    services(&site)?;
    balances(&site)?;
    let mac = |interface: &str| {
        site.director
            .sh(&format!("cat /sys/class/net/{interface}/address"))
    };
    let (front, back) = (mac("eth0")?, mac("eth1")?);
    let mut taken = shoot(&site, &site.client, "eth0", &["--to", &front], 1)?;
    balances(&site)?;
    let as_server = ["--to", &back, "--as-server"];
    taken += shoot(&site, &site.servers[0], "eth0", &as_server, 2)?;
    balances(&site)?;
    taken += shoot(&site, &site.director, "lvs-host0", &[], 3)?;
    balances(&site)?;
    // On a busy machine, the sockets may lose some frames; the sockets count these.
    accounts_for(&mut site, taken / 2)
}

#[test]
#[ignore = "long"]
fn hostile_frames_through_tun_backend_are_all_counted() -> Result<()> {
    let mut options = SiteOptions::with_servers("hostile-tun", Forward::Nat, 2);
    options.vip = Vip::Dataplane;
    options.ip_forward = true;
    let mut site = Site::new(options)?;
    site.director.sysctl("ipv6/conf/all/forwarding", "1")?;
    site.start_dataplane(&["--backend", "tun"])?;
    services(&site)?;
    balances(&site)?;
    let front = site.director.sh("cat /sys/class/net/eth0/address")?;
    // Some frames reach the device through the host's routing, others arrive at the device
    // directly.
    shoot(&site, &site.client, "eth0", &["--to", &front], 4)?;
    balances(&site)?;
    let taken = shoot(&site, &site.director, "lvs-tun0", &[], 5)?;
    balances(&site)?;
    accounts_for(&mut site, taken / 2)
}

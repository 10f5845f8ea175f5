//! All SIP messages of a call reach one server, regardless of their source ports.

use crate::common;

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, bail, ensure};
use lvs_testbed::netns::Proc;
use lvs_testbed::{Forward, Site, SiteOptions, servers};

const CALLS: usize = 20;

/// Creates a site with two SIP servers behind a service with the SIP persistence engine.
fn site(label: &str, options: &str) -> Result<(Site, Vec<Proc>)> {
    let mut wanted = SiteOptions::new(label, Forward::Nat);
    wanted.servers = 2;
    let site = common::site(wanted)?;
    let service = site.service(5060);
    site.lvsadm(&format!("-A -u {service} -s rr -p 300 --pe sip {options}"))?;
    let mut programs = Vec::new();
    for (index, server) in site.servers.iter().enumerate() {
        programs.push(servers::sipp(server, site.real_address(index))?);
        site.lvsadm(&format!(
            "-a -u {service} -r {}:5060 -m",
            site.real_address(index)
        ))?;
    }
    Ok((site, programs))
}

/// Makes the calls `1@label` to `20@label` from the client; all calls must be answered and ended.
fn call(site: &Site, label: &str, options: &str) -> Result<()> {
    let log = site.testbed.dir().join("calls");
    site.client
        .sh(&format!(
            "cd {dir}; sipp -sn uac {service} -i {client} {options} -m {CALLS} -r {CALLS} -d 100 -cid_str %u@{label} -nostdin \
             -timeout 240s -timeout_error -trace_err -error_file {log} >{log}-screen 2>&1 || {{ tail -n 50 {log} {log}-screen; exit 1; }}",
            dir = site.testbed.dir().display(),
            service = site.service(5060),
            client = common::client_address(site)?,
            log = log.display(),
        ))
        .map(drop)
}

/// The calls of each server, according to the messages that it received.
fn calls(site: &Site) -> Result<Vec<BTreeSet<String>>> {
    (1..=site.servers.len())
        .map(|number| {
            let path = site.testbed.dir().join(format!("rs{number}-sip"));
            let text =
                fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            Ok(text
                .lines()
                .filter_map(|line| line.strip_prefix("Call-ID: "))
                .map(|id| id.trim().to_owned())
                .collect())
        })
        .collect()
}

/// Checks that all packets of each call were sent to one server, and that both servers received the
/// same number of calls.
fn check(site: &Site, total: usize) -> Result<()> {
    let calls = calls(site)?;
    ensure!(
        calls[0].is_disjoint(&calls[1]) && calls[0].len() + calls[1].len() == total,
        "a call reached both servers, or none: {calls:?}"
    );
    // Calls are distributed over the servers in turn.
    ensure!(
        calls[0].len() == calls[1].len(),
        "the servers received different numbers of calls: {calls:?}"
    );
    Ok(())
}

/// With one-packet scheduling, only the Call-ID keeps a call on one server.
#[test]
#[ignore = "needs SIPp"]
fn sip_datagrams_of_a_call_share_a_server() -> Result<()> {
    let (site, _programs) = site("sip-ops", "-o")?;
    call(&site, "a", "-p 6001")?;
    check(&site, CALLS)?;
    // The same calls come from another port.
    call(&site, "a", "-p 6002")?;
    check(&site, CALLS)?;
    // Other calls come from the same port.
    call(&site, "b", "-p 6002")?;
    check(&site, 2 * CALLS)?;

    let listing = site.lvsadm("-L -n -c --persistent-conn")?;
    let templates = listing.lines().filter(|line| line.contains("sip"));
    ensure!(
        templates.count() == 2 * CALLS,
        "not each call has a template: {listing}"
    );
    ensure!(listing.contains("20@b"), "no `20@b` in {listing}");
    Ok(())
}

/// Number of connections of the client, each from another port.
fn connections(site: &Site) -> Result<usize> {
    let listing = site.lvsadm("-L -n -c")?;
    let sources = listing
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().nth(3));
    Ok(sources
        .filter(|from| from.contains(':') && !from.ends_with(":0"))
        .count())
}

/// Each call uses several ports, and thus connections, of the client.
#[test]
#[ignore = "needs SIPp"]
fn sip_connections_of_a_call_share_a_server() -> Result<()> {
    // A reused port belongs to an existing connection, so that its server receives all calls from
    // this port. Such a run is repeated.
    'anew: for label in ["sip-conn", "sip-conn2", "sip-conn3", "sip-conn4"] {
        let (site, _programs) = site(label, "")?;
        for ports in [CALLS, 2 * CALLS] {
            // Each call has its own socket.
            call(&site, "a", "-t un -max_socket 100")?;
            if connections(&site)? != ports {
                continue 'anew;
            }
            check(&site, CALLS)?;
        }
        return Ok(());
    }
    bail!("a port was used again in each attempt")
}

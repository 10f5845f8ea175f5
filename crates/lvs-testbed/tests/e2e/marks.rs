//! Firewall-mark services: the dataplane sets the marks by its own rules.

use crate::common;

use std::fs;

use anyhow::{Context, Result};
use lvs_testbed::{Forward, LoadOptions, Site, SiteOptions, soon};

#[test]
fn mark_rules_join_ports_to_a_service_or_drop_or_pass_packets_to_host() -> Result<()> {
    let mut site = Site::new(SiteOptions::with_servers("marks", Forward::Nat, 2))?;
    let rules = site.director.dir().join("marks");
    let vip = site.vip;
    fs::write(
        &rules,
        format!(
            "# the first that fits decides\n\
             --destination {vip} --protocol tcp --ports 82 --host\n\
             -d {vip} -p tcp --ports 83 --drop\n\
             -A -f 7 -s rr\n\
             --destination {vip} --protocol tcp --ports 80-84 --mark 7\n"
        ),
    )?;
    site.start_dataplane(&["--rules", &rules.display().to_string()])?;
    for index in 0..2 {
        site.lvsadm(&format!("-a -f 7 -r {}:80 -m", site.real_address(index)))?;
    }

    // Connections to both ports of the mark are distributed in turn over the same servers.
    for port in [80, 81] {
        let mut load = LoadOptions {
            target: site.service(port),
            ..site.load()
        };
        load.requests = 40;
        let report = common::ok(site.client.load(&load)?, 40)?;
        common::spread(&report, &[20, 20])?;
    }
    let curl = |port: u16| fetched(&site, port);
    // A rule that is added by lvsadm has precedence, and counts the packets that it matches.
    site.lvsadm(&format!(
        "mark add --destination {vip} --protocol tcp --ports 81 --drop --position 1"
    ))?;
    assert_eq!(curl(81)?, "28", "curl did not time out (status 28)");
    soon("the rule to count the packets", || {
        let listing = site.lvsadm("mark list").unwrap_or_default();
        let first = listing.lines().next().unwrap_or_default();
        first.contains("--ports 81 --drop") && !first.contains(" 0 packets")
    })
    .with_context(|| format!("{:?}", site.lvsadm("mark list")))?;
    site.lvsadm("mark del 1")?;
    ends_with(&site, 81, "0")?;
    assert_eq!(site.lvsadm("mark list")?.lines().count(), 3);

    // No program listens on port 82, so the host refuses; a dropped request gets no answer.
    ends_with(&site, 82, REFUSED)?;
    assert_eq!(curl(83)?, "28", "curl did not time out (status 28)");
    Ok(())
}

/// Exit status of curl if the connection is refused.
const REFUSED: &str = "7";

/// Requests a page, and returns the exit status of curl. The time limit is one second.
fn fetched(site: &Site, port: u16) -> Result<String> {
    let vip = site.vip;
    let status = site.client.sh(&format!(
        "status=0; curl -s -m 1 -o /dev/null http://{vip}:{port}/ || status=$?; echo $status"
    ))?;
    Ok(status.trim().to_owned())
}

/// Waits until curl exits with this status; a busy machine may take longer.
fn ends_with(site: &Site, port: u16, wanted: &str) -> Result<()> {
    let mut last = String::new();
    soon(&format!("curl to exit with {wanted}"), || {
        last = fetched(site, port).unwrap_or_default();
        last == wanted
    })
    .with_context(|| format!("port {port}: {last}"))
}

/// The rule has only a source. It drops packets to services, but not packets to the host's own
/// ports.
#[test]
fn mark_rule_drops_source_at_services_and_not_at_host() -> Result<()> {
    let mut site = Site::new(SiteOptions::with_servers("source", Forward::Nat, 1))?;
    site.start_dataplane(&[])?;
    site.add_service(80, "rr")?;
    site.add_service(443, "rr")?;
    let vip = site.vip;
    let client = common::client_address(&site)?;
    // The host's counter of datagrams to closed UDP ports shows packets that reach the host.
    let reaches_the_host = || {
        let before = site.director.counter("Udp", "NoPorts")?;
        let send = format!("bash -c 'echo x > /dev/udp/{vip}/9999'; sleep 0.2");
        site.client.sh(&send)?;
        anyhow::Ok(site.director.counter("Udp", "NoPorts")? > before)
    };
    ends_with(&site, 80, "0")?;
    site.lvsadm(&format!("mark add --source {client} --drop"))?;
    assert_ne!(
        fetched(&site, 80)?,
        "0",
        "the rule did not drop the request"
    );
    soon("the packet to reach the host", || {
        reaches_the_host().unwrap_or(false)
    })?;
    soon("the rule to count the dropped packets", || {
        let listing = site.lvsadm("mark list").unwrap_or_default();
        let drops = site.lvsadm("drops").unwrap_or_default();
        listing.contains(&format!("--source {client} --drop"))
            && !listing.contains(" 0 packets")
            && drops.contains("mark_rule")
    })
    .with_context(|| format!("{:?} {:?}", site.lvsadm("mark list"), site.lvsadm("drops")))?;
    let output = site.lvsadm(&format!("explain tcp {client}:4000 {vip}:80"))?;
    assert!(output.contains("rule 1"), "no `rule 1` in {output}");
    site.lvsadm("mark del 1")?;
    ends_with(&site, 80, "0")?;
    // With `--host`, the packets reach the host, which refuses the connection.
    site.lvsadm(&format!("mark add --source {client} --host"))?;
    ends_with(&site, 80, REFUSED)
}

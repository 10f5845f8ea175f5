//! Firewall-mark services: the engine gives the marks by its own rules.

mod common;

use std::fs;

use anyhow::Result;
use lvs_testbed::{Forward, LoadOptions, Site, SiteOptions};

#[test]
fn a_mark_groups_ports_and_spares_or_drops_others() -> Result<()> {
    let mut options = SiteOptions::new("marks", Forward::Nat);
    options.servers = 2;
    let mut site = Site::new(options)?;
    let rules = site.director.dir().join("marks");
    let vip = site.vip;
    fs::write(
        &rules,
        format!(
            "# the first that fits decides\n\
             --destination {vip} --protocol tcp --ports 82 --host\n\
             --destination {vip} --protocol tcp --ports 83 --drop\n\
             --destination {vip} --protocol tcp --ports 80-84 --mark 7\n"
        ),
    )?;
    site.start_engine(&["--marks", &rules.display().to_string()])?;
    site.lvsadm("-A -f 7 -s rr")?;
    for index in 0..2 {
        site.lvsadm(&format!("-a -f 7 -r {}:80 -m", site.real_address(index)))?;
    }

    // Both ports of the mark take turns over the same servers.
    for port in [80, 81] {
        let mut load = LoadOptions {
            target: site.service(port),
            ..site.load()
        };
        load.requests = 40;
        let report = common::ok(site.client.load(&load)?, 40)?;
        common::spread(&report, &[20, 20])?;
    }
    let curl = |port: u16| {
        site.client.sh(&format!(
            "status=0; curl -s -m 1 -o /dev/null http://{vip}:{port}/ || status=$?; echo $status"
        ))
    };
    // The same from the command line: the new rule comes first, and counts what it takes.
    site.lvsadm(&format!(
        "mark add --destination {vip} --protocol tcp --ports 81 --drop --position 1"
    ))?;
    assert_eq!(curl(81)?.trim(), "28", "curl's status for a timeout");
    let listing = site.lvsadm("mark list")?;
    let first = listing.lines().next().unwrap_or_default();
    assert!(
        first.contains("--ports 81 --drop") && !first.contains(" 0 packets"),
        "{listing}"
    );
    site.lvsadm("mark del 1")?;
    assert_eq!(curl(81)?.trim(), "0");
    assert_eq!(site.lvsadm("mark list")?.lines().count(), 3);

    // The host has nothing there and says so; what is dropped is not answered at all.
    assert_eq!(
        curl(82)?.trim(),
        "7",
        "curl's status for a refused connection"
    );
    assert_eq!(curl(83)?.trim(), "28", "curl's status for a timeout");
    Ok(())
}

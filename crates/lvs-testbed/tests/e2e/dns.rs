//! Host names without a working name server: no program waits long for an answer, and programs with
//! `-n` send no requests.

use crate::common;

use std::fs;

use anyhow::{Result, ensure};
use lvs_testbed::{Forward, Site, SiteOptions, programs};

/// Creates a site whose name servers do not answer.
fn deaf(label: &str) -> Result<Site> {
    let site = common::site(SiteOptions::with_servers(label, Forward::Nat, 2))?;
    let dir = site.testbed.dir();
    fs::write(
        dir.join("resolv"),
        "nameserver 198.18.53.53\nnameserver 198.18.53.54\n",
    )?;
    fs::write(dir.join("nsswitch"), "hosts: files dns\nservices: files\n")?;
    site.director.sh(&format!(
        "ip link add dead0 arp off type veth peer name dead1; echo 1 >/proc/sys/net/ipv6/conf/dead0/disable_ipv6; ip addr add 198.18.53.1/24 dev dead0; \
         ip link set dead0 up; ip link set dead1 up; \
         mount --bind {0}/resolv /etc/resolv.conf; mount --bind {0}/nsswitch /etc/nsswitch.conf",
        dir.display()
    ))?;
    site.director
        .etc_hosts(&[(site.real_address(0).into(), "first.test")])?;
    site.director
        .install(&programs::find("lvsadm")?, &["ipvsadm"])?;
    Ok(site)
}

/// Returns the number of packets to the name servers so far.
fn questions(site: &Site) -> Result<u64> {
    let text = site
        .director
        .sh("ip -s link show dev dead0 | tail -n 1 | awk '{print $2}'")?;
    Ok(text.trim().parse()?)
}

#[test]
#[ignore = "long"]
fn dead_name_servers_do_not_delay_commands() -> Result<()> {
    let site = deaf("dns")?;
    site.add_service(80, "rr")?;
    for last in 1..=20 {
        site.lvsadm(&format!("-A -t 203.0.113.{last}:443 -s rr"))?;
    }
    let before = questions(&site)?;
    let numbers = site.director.sh("timeout 60 ipvsadm -Ln")?;
    ensure!(
        questions(&site)? == before,
        "lvsadm -n queried a name server"
    );
    // Addresses in the hosts file are shown with their names, and all others as numbers; successive
    // look-ups of the C library would take minutes.
    let named = site.director.sh("timeout 60 ipvsadm -L")?;
    ensure!(
        questions(&site)? > before,
        "lvsadm without -n queried no name server"
    );
    ensure!(
        named.contains("-> first.test:http "),
        "no `-> first.test:http ` in {named}"
    );
    for last in 1..=20 {
        let line = format!("TCP  203.0.113.{last}:https rr\n");
        ensure!(named.contains(&line), "no {line:?} in {named}");
    }
    ensure!(
        named.lines().count() == numbers.lines().count(),
        "the listings with and without -n have different lengths: {named} {numbers}"
    );
    let saved = site.director.sh("timeout 60 ipvsadm -S")?;
    ensure!(
        saved.contains("-r first.test:http -m"),
        "no `-r first.test:http -m` in {saved}"
    );
    let listed = site.director.sh("timeout 60 ipvsadm -Lc")?;
    ensure!(
        listed.starts_with("IPVS connection entries\n"),
        "the list of connections does not begin with `IPVS connection entries`: {listed}"
    );

    // A name that only a name server knows is refused with ipvsadm's message.
    let refused = site
        .director
        .sh("timeout 60 ipvsadm -A -t www.example.test:80 2>&1 || echo status $?")?;
    ensure!(
        refused == "illegal virtual server address[:port] specified\nstatus 2\n",
        "the answer is not `illegal virtual server address[:port] specified / status 2`: {refused}"
    );
    // A name in the hosts file needs no query.
    let before = questions(&site)?;
    site.director
        .sh("timeout 60 ipvsadm -A -t first.test:8080 -s rr")?;
    ensure!(questions(&site)? == before);
    Ok(())
}

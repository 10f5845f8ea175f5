//! Debian's ldirectord and init script call `/sbin/ipvsadm`, which is `lvsadm` on the director.

use std::fs;

use crate::common;
use anyhow::{Context, Result, ensure};
use lvs_testbed::listing::rows;
use lvs_testbed::servers::{NginxOptions, nginx};
use lvs_testbed::{Forward, Proc, Site, SiteOptions, programs, soon};
use nix::sys::signal::Signal;

const NAMES: [&str; 3] = ["ipvsadm", "ipvsadm-save", "ipvsadm-restore"];

/// Creates a site with three servers; the last one is the fallback.
fn site(label: &str, forward: Forward) -> Result<Site> {
    let mut site = Site::new(SiteOptions::with_servers(label, forward, 3))?;
    site.serve("alive", 100)?;
    site.start_dataplane(&[])?;
    site.director.install(&programs::find("lvsadm")?, &NAMES)?;
    Ok(site)
}

fn ldirectord(site: &Site, quiescent: bool) -> Result<Proc> {
    let method = match site.options.forward {
        Forward::Nat => "masq",
        Forward::Dr => "gate",
        Forward::Tun => "ipip",
        // ldirectord does not support this method.
        Forward::FullNat => unreachable!(),
    };
    let port = 80;
    let text = format!(
        "supervised=yes\nchecktimeout=20\nnegotiatetimeout=20\ncheckinterval=1\nautoreload=no\nlogfile=\"{log}\"\nquiescent={quiescent}\n\n\
         virtual={vip}:{port}\n\treal={first}:{port} {method} 2\n\treal={second}:{port} {method} 1\n\
         \tfallback={fallback}:{port} {method}\n\tservice=http\n\tscheduler=wrr\n\tprotocol=tcp\n\
         \tchecktype=negotiate\n\trequest=\"id\"\n\treceive=\"rs\"\n",
        log = site.testbed.dir().join("ldirectord.log").display(),
        quiescent = if quiescent { "yes" } else { "no" },
        vip = site.vip,
        first = site.real_address(0),
        second = site.real_address(1),
        fallback = site.real_address(2),
    );
    let file = site.testbed.dir().join("ldirectord.cf");
    fs::write(&file, text)?;
    // ldirectord writes its pid file to /run, which all tests on the machine share. It must also
    // find the dataplane's socket there.
    let sockets = site.testbed.dir().join("sockets");
    fs::create_dir(&sockets)?;
    site.director.sh(&format!(
        "mount --bind /run/lvs {sockets} && mount -t tmpfs tmpfs /run && mkdir /run/lvs && mount --bind {sockets} /run/lvs",
        sockets = sockets.display()
    ))?;
    site.director
        .spawn("ldirectord", &[file.as_os_str(), "start".as_ref()])
        .context("cannot start ldirectord: install the package ldirectord")
}

/// Waits until `ipvsadm` lists exactly the servers in `expected`: the number of each server, counted
/// from 0, and its weight.
fn wait_listed(site: &Site, program: &Proc, expected: &[(usize, u64)]) -> Result<()> {
    let listing = || site.director.sh("/sbin/ipvsadm -Ln");
    common::wait_listed(site, listing, expected).with_context(|| {
        let log = fs::read_to_string(site.testbed.dir().join("ldirectord.log"));
        format!("{}\n{log:?}", program.log())
    })
}

fn managed(forward: Forward, label: &str, quiescent: bool) -> Result<()> {
    let mut site = site(label, forward)?;
    let mut program = ldirectord(&site, quiescent)?;
    wait_listed(&site, &program, &[(0, 2), (1, 1)])?;
    let listing = site.director.sh("/sbin/ipvsadm -Ln")?;
    ensure!(listing.contains(" wrr"), "no ` wrr` in {listing}");
    ensure!(common::answering(&site)? == ["rs1", "rs2"]);

    // One server fails: with quiescent=yes its weight becomes 0, otherwise it is removed.
    site.programs.remove(0).kill();
    let dead = |server| if quiescent { vec![(server, 0)] } else { vec![] };
    wait_listed(&site, &program, &[dead(0), vec![(1, 1)]].concat())?;
    ensure!(common::answering(&site)? == ["rs2"]);
    // Both servers have failed: the fallback server takes over.
    site.programs.remove(0).kill();
    wait_listed(&site, &program, &[dead(0), dead(1), vec![(2, 1)]].concat())?;
    ensure!(common::answering(&site)? == ["rs3"]);
    // Both servers are back: the fallback server is removed.
    for server in 0..2 {
        let revived = nginx(&site.servers[server], &NginxOptions::default())?;
        site.programs.push(revived);
    }
    wait_listed(&site, &program, &[(0, 2), (1, 1)])?;
    ensure!(common::answering(&site)? == ["rs1", "rs2"]);

    let status = program.stop(Signal::SIGTERM)?;
    soon("ldirectord to remove its services", || {
        site.director
            .sh("/sbin/ipvsadm -Ln")
            .is_ok_and(|text| rows(&text).is_empty())
    })
    .with_context(|| format!("{status}: {}", program.log()))
}

#[test]
#[ignore = "needs ldirectord"]
fn ldirectord_nat_quiescent_sets_weight_of_failed_server_to_0() -> Result<()> {
    managed(Forward::Nat, "ldnatq", true)
}

#[test]
#[ignore = "needs ldirectord"]
fn ldirectord_nat_not_quiescent_removes_failed_server() -> Result<()> {
    managed(Forward::Nat, "ldnat", false)
}

#[test]
#[ignore = "needs ldirectord"]
fn ldirectord_dr_quiescent_sets_weight_of_failed_server_to_0() -> Result<()> {
    managed(Forward::Dr, "lddrq", true)
}

#[test]
#[ignore = "needs ldirectord"]
fn ldirectord_dr_not_quiescent_removes_failed_server() -> Result<()> {
    managed(Forward::Dr, "lddr", false)
}

/// The init script of Debian's package ipvsadm saves the rules when it stops, and restores them
/// when it starts.
#[test]
#[ignore = "needs ipvsadm"]
fn rules_are_saved_and_restored_by_debian_scripts() -> Result<()> {
    let mut site = site("debian", Forward::Nat)?;
    let etc = site.testbed.dir().join("etc");
    site.director.sh(&format!(
        "cp -a /etc {0} 2>/dev/null || true; mount --bind {0} /etc; : > /etc/ipvsadm.rules; \
         printf 'AUTO=\"true\"\nDAEMON=\"none\"\nIFACE=\"eth0\"\n' > /etc/default/ipvsadm",
        etc.display()
    ))?;
    let run = |site: &Site, word: &str| site.director.sh(&format!("sh /etc/init.d/ipvsadm {word}"));
    let service = site.service(80);
    site.director.sh(&format!(
        "ipvsadm -A -t {service} -s wrr -p 300 && ipvsadm -a -t {service} -r {}:80 -m -w 3 && \
         ipvsadm -A -f 7 -s mh -b mh-fallback,mh-port && ipvsadm -a -f 7 -r {} -m && \
         ipvsadm -A -u {}:53 -s rr -o",
        site.real_address(0),
        site.real_address(1),
        site.vip
    ))?;
    let before = site.director.sh("ipvsadm-save -n")?;
    ensure!(
        before.lines().count() == 5,
        "the number of saved rules is not 5: {before}"
    );
    run(&site, "save")?;
    let saved = site.director.sh("cat /etc/ipvsadm.rules")?;
    ensure!(
        saved == format!("# ipvsadm.rules\n{before}"),
        "the script saved other rules than ipvsadm-save prints: {saved}"
    );
    let status = run(&site, "status")?;
    ensure!(
        status.starts_with("IP Virtual Server version 1.2.1 (size=4096)\n"),
        "the status of the init script does not begin with `IP Virtual Server version 1.2.1 (size=4096)`: {status}"
    );
    ensure!(run(&site, "rate")?.contains(" CPS "));
    run(&site, "stop")?;
    ensure!(site.director.sh("ipvsadm-save -n")?.is_empty());
    // A new dataplane has no services, as after a reboot.
    site.start_dataplane(&[])?;
    ensure!(site.director.sh("ipvsadm-save -n")?.is_empty());
    run(&site, "start")?;
    ensure!(site.director.sh("ipvsadm-save -n")? == before);
    run(&site, "reload")?;
    ensure!(site.director.sh("ipvsadm-save -n")? == before);
    ensure!(common::answering(&site)? == ["rs1"]);
    // The script also restores rules with names.
    site.director.sh(
        "ipvsadm-save > /etc/named.rules && ipvsadm -C && ipvsadm-restore < /etc/named.rules",
    )?;
    ensure!(site.director.sh("ipvsadm-save -n")? == before);
    Ok(())
}

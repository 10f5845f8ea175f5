//! The kernel fast path with XDP at veth interfaces. The other ends of the veth pairs complete
//! partial checksums unless a test disables that.

use crate::common;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Site, SiteOptions, Topology, programs, soon};
use nix::sys::signal::Signal;

/// Creates a site whose veth interfaces suit XDP.
fn site(label: &str, forward: Forward) -> Result<Site> {
    let site = site_as_it_is(label, forward, false)?;
    site.testbed.finish_checksums()?;
    Ok(site)
}

fn site_as_it_is(label: &str, forward: Forward, offloads: bool) -> Result<Site> {
    super::fast_path::require_permission()?;
    let mut options = SiteOptions::with_servers(label, forward, 4);
    if forward == Forward::FullNat {
        options.topology = Topology::TwoArm;
    }
    options.offloads = offloads;
    let site = Site::new(options)?;
    site.testbed.take_frames()?;
    Ok(site)
}

/// The dataplane's arguments for XDP at the director's interfaces.
fn xdp(site: &Site) -> Result<Vec<String>> {
    let mut words = vec!["--fast-path".to_owned(), "on".to_owned()];
    for name in site.director.sh("ls /sys/class/net")?.split_whitespace() {
        if name.starts_with("eth") {
            words.extend(["--xdp".to_owned(), name.to_owned()]);
        }
    }
    Ok(words)
}

fn diagnosis(site: &Site) -> Result<String> {
    let lvsadm = programs::find("lvsadm")?.display().to_string();
    site.director.sh(&format!("{lvsadm} doctor || [ $? = 1 ]"))
}

fn start(site: &mut Site) -> Result<()> {
    let words = xdp(site)?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    site.start_dataplane(&words)
}

/// Number of packets that the kernel fast path has forwarded: in XDP, and with a socket buffer.
fn shares(site: &Site) -> Result<(u64, u64)> {
    let reasons = ["kernel_xdp", "kernel_requests", "kernel_replies"];
    let [xdp, requests, replies] = common::drops(site, reasons)?;
    Ok((xdp, requests + replies))
}

/// Lists XDP programs and their links in the director's namespace.
fn programs_of(site: &Site) -> Result<String> {
    site.director
        .sh("ip -d link | grep -o 'prog/xdp.*' || true")
}

/// Like [`common::bulk`], but accepts 10 % of retransmitted segments: without super-packets, frames
/// are lost if the softirq reads the veth ring too late.
fn bulk(site: &Site) -> Result<()> {
    common::bulk_with(site, 10)
}

fn forwards(label: &str, forward: Forward) -> Result<()> {
    let mut site = site(label, forward)?;
    start(&mut site)?;
    common::requests_and_listings(&site)?;
    site.lvsadm("-C")?;
    site.add_service(80, "rr")?;
    bulk(&site)?;
    let (xdp, behind) = shares(&site)?;
    ensure!(
        xdp > 1000 && xdp > 9 * behind,
        "only {xdp} frames were forwarded by XDP, and {behind} with a socket buffer"
    );
    ensure!(programs_of(&site)?.contains("lvs_xdp"));
    let doctor = diagnosis(&site)?;
    // doctor does not report the dataplane's own program as foreign.
    let mut lines = doctor.lines().filter(|line| line.contains("XDP"));
    ensure!(
        doctor.contains("eth0: XDP\n") && lines.all(|line| line.ends_with(": XDP")),
        "not all interfaces use XDP: {doctor}"
    );
    common::iperf_and_dns(&site)?;
    site.end_dataplane(Signal::SIGTERM)?;
    soon("no program to remain attached", || {
        programs_of(&site).is_ok_and(|left| left.is_empty())
    })
}

#[test]
fn xdp_forwards_nine_of_ten_nat_frames_and_transfers_are_intact() -> Result<()> {
    forwards("xdp-nat", Forward::Nat)
}

#[test]
#[ignore = "long"]
fn xdp_forwards_nine_of_ten_full_nat_frames_and_transfers_are_intact() -> Result<()> {
    forwards("xdp-fnat", Forward::FullNat)
}

#[test]
#[ignore = "long"]
fn xdp_forwards_nine_of_ten_direct_routing_frames_and_transfers_are_intact() -> Result<()> {
    forwards("xdp-dr", Forward::Dr)
}

/// Frames with partial checksums are forwarded with a socket buffer.
#[test]
#[ignore = "long"]
fn xdp_packets_with_partial_checksums_arrive_complete() -> Result<()> {
    let mut site = site_as_it_is("xdp-veth", Forward::Nat, true)?;
    start(&mut site)?;
    common::requests_and_listings(&site)?;
    site.lvsadm("-C")?;
    site.add_service(80, "rr")?;
    bulk(&site)?;
    let (_, behind) = shares(&site)?;
    ensure!(
        behind > 1000,
        "only {behind} frames were forwarded with a socket buffer"
    );
    common::iperf_and_dns(&site)
}

/// A download whose packets XDP forwards.
fn download(site: &Site) -> Result<common::Download> {
    site.add_service(80, "rr")?;
    let download = common::Download::start(site)?;
    let flows = || shares(site).is_ok_and(|(xdp, _)| xdp > 50);
    soon("XDP to forward packets", flows)?;
    Ok(download)
}

/// While the other end of the outgoing veth pair does not accept frames of XDP, the tc program
/// forwards the packets. As soon as it accepts them, XDP forwards the packets again.
#[test]
#[ignore = "long"]
fn xdp_without_target_support_uses_socket_buffers() -> Result<()> {
    let mut site = site("xdp-takers", Forward::Nat)?;
    start(&mut site)?;
    let download = download(&site)?;
    site.testbed.take_no_frames()?;
    let pace = Duration::from_millis(500);
    // The change loses frames in transit, which are sent again.
    let stands = || {
        let before = shares(&site).unwrap_or_default();
        std::thread::sleep(pace);
        shares(&site).is_ok_and(|after| after.0 == before.0 && after.1 > before.1)
    };
    soon("packets to be forwarded with a socket buffer", stands)?;
    let (before, _) = shares(&site)?;
    site.testbed.take_frames()?;
    let flows = || shares(&site).is_ok_and(|(xdp, _)| xdp > before + 50);
    soon("XDP to forward packets again", flows)?;
    download.finish()
}

/// A killed dataplane leaves the XDP program, and connections continue. The successor adopts the
/// program, or removes it if XDP is not configured.
#[test]
#[ignore = "long"]
fn download_survives_killed_xdp_dataplane_and_successor_without_xdp_detaches_programs() -> Result<()>
{
    let mut site = site("xdp-kill", Forward::Nat)?;
    start(&mut site)?;
    let download = download(&site)?;
    site.end_dataplane(Signal::SIGKILL)?;
    std::thread::sleep(Duration::from_secs(1));
    start(&mut site)?;
    let (before, _) = shares(&site)?;
    let flows = || shares(&site).is_ok_and(|(xdp, _)| xdp > before + 50);
    soon("XDP to forward packets again", flows)?;
    site.end_dataplane(Signal::SIGKILL)?;
    site.start_dataplane(&["--fast-path", "on"])?;
    let gone = || programs_of(&site).is_ok_and(|text| text.is_empty());
    soon("the XDP programs to be detached", gone)?;
    download.finish()
}

const AUTO: [&str; 4] = ["--fast-path", "on", "--xdp", "auto"];

/// With `--xdp auto`, the dataplane uses XDP at an interface without GRO, and tc at an interface
/// with GRO. A successor checks each interface again.
#[test]
#[ignore = "long"]
fn xdp_auto_uses_tc_on_interface_with_gro() -> Result<()> {
    let mut site = site("xdp-auto", Forward::Nat)?;
    site.director.sh("ethtool -K eth1 gro on")?;
    site.start_dataplane(&AUTO)?;
    let at_eth0_only = |site: &Site| -> Result<()> {
        common::says(site, "eth0 uses XDP")?;
        common::says(site, "xdp_aggregation")?;
        let programs = programs_of(site)?;
        ensure!(
            programs.matches("lvs_xdp").count() == 1,
            "the number of interfaces with XDP is not 1: {programs}"
        );
        let doctor = diagnosis(site)?;
        let reason =
            "\neth0: XDP\neth1: tc instead of XDP, because it merges received packets (gro)";
        ensure!(doctor.contains(reason), "no {reason:?} in {doctor}");
        ensure!(
            doctor.contains("`ethtool -K eth1 gro off`"),
            "no \"`ethtool -K eth1 gro off`\" in {doctor}"
        );
        Ok(())
    };
    at_eth0_only(&site)?;
    site.add_service(80, "rr")?;
    bulk(&site)?;
    let (xdp, behind) = shares(&site)?;
    ensure!(
        xdp > 500 && behind > 500,
        "only {xdp} requests were forwarded by XDP, or only {behind} replies with a socket buffer"
    );
    site.lvsadm("-C")?;
    let download = download(&site)?;
    site.end_dataplane(Signal::SIGKILL)?;
    site.start_dataplane(&AUTO)?;
    at_eth0_only(&site)?;
    let (before, _) = shares(&site)?;
    let flows = || shares(&site).is_ok_and(|(xdp, _)| xdp > before + 50);
    soon("XDP to forward packets again", flows)?;
    site.end_dataplane(Signal::SIGKILL)?;
    site.director.sh("ethtool -K eth0 gro on")?;
    site.start_dataplane(&AUTO)?;
    let gone = || programs_of(&site).is_ok_and(|text| text.is_empty());
    soon("the XDP program to be detached", gone)?;
    download.finish()
}

/// The dataplane starts, and uses tc at each interface without XDP support. Unit tests cover bonds
/// and VLANs, which not every kernel has.
#[test]
fn xdp_auto_reports_reason_for_each_interface() -> Result<()> {
    let mut site = site("xdp-why", Forward::Nat)?;
    site.director.sh("ip link add br0 type bridge
         for i in alone port taken; do
             ip link add $i type veth peer name $i-
             ip link set $i up
             ip link set $i- up
         done
         ethtool -K taken- gro on
         ip link set port master br0
         ip link set br0 up")?;
    let mut taken = site
        .director
        .spawn("perl", &["-e", super::filters::XDP_DROP, "taken"])?;
    soon("the foreign program to be attached", || {
        taken.log().contains("attached")
    })
    .with_context(|| taken.log())?;
    let names = ["br0", "alone", "port", "taken"];
    let interfaces = names.iter().flat_map(|name| ["--interface", name]);
    let words: Vec<&str> = AUTO.into_iter().chain(interfaces).collect();
    site.start_dataplane(&words)?;
    let doctor = diagnosis(&site)?;
    for (code, reason) in [
        (
            "xdp_unsupported",
            "br0: tc instead of XDP, because its driver",
        ),
        (
            "xdp_no_transmit",
            "alone: tc instead of XDP, because it cannot send",
        ),
        (
            "xdp_port",
            "port: tc instead of XDP, because it is a port of br0",
        ),
        (
            "xdp_program",
            "taken: tc instead of XDP, because another XDP program",
        ),
    ] {
        common::says(&site, code)?;
        ensure!(
            doctor.contains(reason),
            "the reason is missing: {reason}: {doctor}"
        );
    }
    ensure!(
        doctor.contains("eth0: XDP\neth1: XDP\n"),
        "no `eth0: XDP / eth1: XDP` in {doctor}"
    );
    taken.kill();
    site.dataplane.take();
    site.start_dataplane(&["--fast-path", "off", "--xdp", "auto"])?;
    let doctor = diagnosis(&site)?;
    let reason = "--xdp auto has no effect with --fast-path off";
    ensure!(
        doctor.contains(reason) && !doctor.contains(": XDP"),
        "no {reason:?} or unexpected `: XDP` in {doctor}"
    );
    Ok(())
}

#[test]
fn impossible_xdp_options_are_refused() -> Result<()> {
    let site = site("xdp-refused", Forward::Nat)?;
    site.director
        .sh("ip link add d0 type bridge; ip link set d0 up")?;
    let program = programs::find("lvs-dataplane")?.display().to_string();
    for (words, output) in [
        (
            "--fast-path off --xdp eth0",
            "remove --xdp or --fast-path off",
        ),
        (
            "--fast-path on --interface eth0 --xdp eth1",
            "does not use this interface",
        ),
        ("--fast-path on --xdp d0", "no native XDP"),
    ] {
        let refused = site
            .director
            .sh(&format!("timeout 120 {program} {words} 2>&1 || true"))?;
        ensure!(
            refused.contains(output),
            "the refusal is not reported: {words}: {refused}"
        );
    }
    ensure!(
        programs_of(&site)?.is_empty(),
        "an XDP program is still attached"
    );
    Ok(())
}

/// The dataplane tries each second to use an interface whose XDP program is refused. The attempts do
/// not change its nf_tables rules.
#[test]
fn refused_xdp_program_changes_no_nftables_rules() -> Result<()> {
    let mut site = site("xdp-late", Forward::Nat)?;
    let words = "--fast-path on --interface eth0 --interface late0 --xdp late0";
    site.start_dataplane(&words.split(' ').collect::<Vec<_>>())?;
    let monitor = site.director.spawn("nft", &["monitor"])?;
    let mark = |name: &str| {
        soon("nft monitor to report a table", || {
            let change = format!("nft add table inet {name}; nft delete table inet {name}");
            site.director.sh(&change).is_ok() && monitor.log().contains(name)
        })
    };
    mark("before")?;
    site.director
        .sh("ip link add late0 type bridge; ip link set late0 up")?;
    soon("doctor to show the reason", || {
        diagnosis(&site).is_ok_and(|text| text.contains("no native XDP"))
    })?;
    mark("after")?;
    ensure!(
        !monitor.log().contains("late0"),
        "rules for late0 were changed: {}",
        monitor.log()
    );
    Ok(())
}

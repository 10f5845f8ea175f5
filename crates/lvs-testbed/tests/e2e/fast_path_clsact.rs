//! The kernel fast path with clsact filters, as on kernels without tcx.

use anyhow::{Result, ensure};
use lvs_testbed::{Forward, Host, Site, SiteOptions, programs, soon};
use nix::sys::signal::Signal;

use super::common;
use super::fast_path::{require_permission, shares};

/// Part of the output of [`shown`] if the dataplane created the clsact qdisc.
const OWN: &str = "lvs_ingress+clsact";
/// Part of the output of [`shown`] if another program created the clsact qdisc.
const SHARED: &str = "lvs_ingress direct-action";

fn site(label: &str, servers: usize) -> Result<Site> {
    require_permission()?;
    let mut site = Site::new(SiteOptions::with_servers(label, Forward::Nat, servers))?;
    start(&mut site)?;
    site.add_service(80, "rr")?;
    Ok(site)
}

/// Starts a dataplane as on a kernel without tcx.
fn start(site: &mut Site) -> Result<()> {
    let testbed = programs::own()?.display().to_string();
    site.start_dataplane_by(&[&testbed, "without-tcx"], &["--fast-path", "on"])
}

/// Returns the qdisc and the ingress filters of an interface, from `tc`.
fn shown(host: &Host, interface: &str) -> Result<String> {
    host.sh(&format!(
        "tc qdisc show dev {interface} ingress; tc filter show dev {interface} ingress"
    ))
}

/// Number of filters of dataplanes in a network namespace.
fn filters(host: &Host) -> Result<usize> {
    let all = host.sh(
        "for path in /sys/class/net/*; do tc filter show dev ${path##*/} ingress; done 2>/dev/null || true",
    )?;
    Ok(all.matches("lvs_ingress").count())
}

fn end(site: &mut Site, signal: Signal) -> Result<()> {
    site.end_dataplane(signal)
}

fn download(site: &Site) -> Result<common::Download> {
    let download = common::Download::start(site)?;
    let flows = || shares(site).is_ok_and(|(requests, replies)| requests > 50 && replies > 50);
    soon("the kernel fast path to forward packets", flows)?;
    Ok(download)
}

/// The log and `lvsadm doctor` report clsact as the attachment method.
#[test]
fn fast_path_with_clsact_forwards_every_byte_and_removes_its_programs() -> Result<()> {
    let mut site = site("inkc-http", 4)?;
    common::says(&site, "kernel fast path (clsact)")?;
    let doctor = site.director.sh(&format!(
        "{} doctor || [ $? = 1 ]",
        programs::find("lvsadm")?.display()
    ))?;
    ensure!(
        doctor.contains("kernel fast path (clsact)"),
        "no `kernel fast path (clsact)` in {doctor}"
    );
    ensure!(
        !doctor.contains("of tc at the ingress"),
        "unexpected `of tc at the ingress` in {doctor}"
    );
    let there = shown(&site.director, "eth0")?;
    ensure!(
        there.contains("qdisc clsact") && there.contains(OWN),
        "no `qdisc clsact` or no {OWN:?} in {there}"
    );
    site.lvsadm("-C")?;
    common::requests_and_listings(&site)?;
    let (requests, replies) = shares(&site)?;
    ensure!(
        requests > 0 && replies > 0,
        "the kernel forwarded no requests or no replies: {requests}, {replies}"
    );
    end(&mut site, Signal::SIGTERM)?;
    let left = shown(&site.director, "eth0")?;
    ensure!(
        !left.contains("clsact") && filters(&site.director)? == 0,
        "the qdisc or a filter is left: {left}"
    );
    let left = site
        .director
        .sh("ls /sys/fs/bpf/lvs/* 2>/dev/null || true")?;
    ensure!(
        left.trim().is_empty(),
        "files are left in /sys/fs/bpf/lvs: {left}"
    );
    Ok(())
}

/// Filters of other programs remain, and run after the dataplane's filter.
#[test]
#[ignore = "long"]
fn clsact_filters_of_other_programs_stay() -> Result<()> {
    let mut site = site("inkc-other", 2)?;
    // First another program's filter exists before the dataplane starts, then one is added later.
    end(&mut site, Signal::SIGTERM)?;
    let other = "tc filter add dev eth0 ingress pref 1 protocol all handle 7 bpf direct-action bytecode \
                 '1,6 0 0 4294967295'";
    site.director.sh("tc qdisc add dev eth0 clsact")?;
    site.director.sh(other)?;
    start(&mut site)?;
    site.add_service(80, "rr")?;
    let there = shown(&site.director, "eth0")?;
    let (ours, theirs) = (there.find(SHARED), there.find("handle 0x7"));
    ensure!(
        ours.is_some() && ours < theirs,
        "the dataplane's filter does not precede the other one: {there}"
    );
    download(&site)?.finish()?;
    end(&mut site, Signal::SIGTERM)?;
    let left = shown(&site.director, "eth0")?;
    ensure!(
        left.contains("qdisc clsact") && left.contains("handle 0x7"),
        "no `qdisc clsact` or no `handle 0x7` in {left}"
    );
    ensure!(
        filters(&site.director)? == 0,
        "a filter of the dataplane is left: {left}"
    );
    // The qdisc of the dataplane remains, because another program now uses it, too.
    site.director.sh("tc qdisc del dev eth0 clsact")?;
    start(&mut site)?;
    site.director.sh(&other.replace("pref 1", "pref 50"))?;
    end(&mut site, Signal::SIGTERM)?;
    let left = shown(&site.director, "eth0")?;
    ensure!(
        left.contains("qdisc clsact") && left.contains("handle 0x7"),
        "no `qdisc clsact` or no `handle 0x7` in {left}"
    );
    Ok(())
}

/// `lvsadm doctor` reports a filter that runs before the dataplane's. After the filter is removed,
/// the kernel fast path forwards packets again.
#[test]
#[ignore = "long"]
fn clsact_filter_before_fast_path_is_reported_and_breaks_no_connection() -> Result<()> {
    let site = site("inkc-front", 2)?;
    let mut running = download(&site)?;
    let doctor = || {
        let program = programs::find("lvsadm")?.display().to_string();
        let answer = site.director.sh(&format!("{program} doctor || [ $? = 1 ]"));
        anyhow::Ok(answer?.replace("\n  ", " "))
    };
    // Of two filters with equal preference, the newer one runs first. It returns TC_ACT_OK, so the
    // dataplane's program does not run.
    let other = "dev eth0 ingress pref 1 protocol all handle 7 bpf";
    site.director.sh(&format!(
        "tc filter add {other} direct-action bytecode '1,6 0 0 0'"
    ))?;
    let answer = || doctor().is_ok_and(|text| text.contains("is not the first"));
    soon("doctor to report that lvs_ingress is not the first", answer)?;
    running.goes_on()?;
    let before = shares(&site)?;
    site.director.sh(&format!("tc filter del {other}"))?;
    let flows = || shares(&site).is_ok_and(|(requests, _)| requests > before.0 + 50);
    soon("the kernel fast path to forward packets again", flows)?;
    running.finish()
}

/// A killed dataplane leaves its filters, which its successor replaces.
#[test]
#[ignore = "long"]
fn connections_survive_killed_dataplane_with_clsact() -> Result<()> {
    let mut site = site("inkc-kill", 2)?;
    let mut running = download(&site)?;
    let before = filters(&site.director)?;
    end(&mut site, Signal::SIGKILL)?;
    ensure!(
        before > 0 && filters(&site.director)? == before,
        "the filters were removed with the dataplane: {before}"
    );
    // The download continues while no dataplane runs.
    let received = || site.client.counter("Tcp", "InSegs").unwrap_or_default();
    let already = received();
    soon("the download to continue", || received() > already + 500)?;
    running.goes_on()?;
    start(&mut site)?;
    common::says(&site, "took over")?;
    running.finish()?;
    ensure!(
        filters(&site.director)? == before,
        "the number of filters changed"
    );
    ensure!(site.lvsadm("-L -n")?.contains(":80"));
    // If the kernel has tcx, the next dataplane uses tcx, and removes the filters.
    end(&mut site, Signal::SIGKILL)?;
    site.start_dataplane(&["--fast-path", "on"])?;
    let log = common::says(&site, common::READY)?;
    ensure!(log.contains("took over"), "no `took over` in {log}");
    if log.contains("(tcx)") {
        let gone = || filters(&site.director).is_ok_and(|left| left == 0);
        soon("the interface to have no filters", gone)?;
    }
    let running = download(&site)?;
    end(&mut site, Signal::SIGKILL)?;
    start(&mut site)?;
    running.finish()?;
    end(&mut site, Signal::SIGTERM)?;
    let left = shown(&site.director, "eth0")?;
    ensure!(
        !left.contains("clsact") && filters(&site.director)? == 0,
        "the qdisc or a filter is left: {left}"
    );
    Ok(())
}

#[test]
fn cleanup_or_successor_without_fast_path_removes_filters_of_killed_dataplane() -> Result<()> {
    let mut site = site("inkc-clean", 2)?;
    let program = programs::find("lvs-dataplane")?.display().to_string();
    for cleanup in [true, false] {
        end(&mut site, Signal::SIGKILL)?;
        ensure!(
            filters(&site.director)? > 0,
            "the filters were removed with the killed dataplane"
        );
        if cleanup {
            let answer = site.director.sh(&format!("{program} --cleanup"))?;
            ensure!(
                answer.starts_with("removed "),
                "the output of --cleanup does not begin with `removed `: {answer}"
            );
            let answer = site.director.sh(&format!("{program} --cleanup"))?;
            ensure!(
                answer.starts_with("found no state"),
                "the output of --cleanup does not begin with `found no state`: {answer}"
            );
            let left = shown(&site.director, "eth0")?;
            ensure!(
                !left.contains("clsact") && filters(&site.director)? == 0,
                "the qdisc or a filter is left: {left}"
            );
            start(&mut site)?;
            ensure!(
                !site.lvsadm("-L -n")?.contains(":80"),
                "the successor lists services of the killed dataplane"
            );
            continue;
        }
        // A dataplane with `--fast-path off` removes the filters, too.
        site.start_dataplane(&["--fast-path", "off"])?;
        ensure!(
            filters(&site.director)? == 0,
            "a filter of the killed dataplane still exists"
        );
    }
    Ok(())
}

//! Without an option for the kernel fast path, the dataplane offloads connections if the kernel
//! permits it.

use anyhow::{Result, ensure};
use lvs_testbed::{Forward, LoadOptions, Site, SiteOptions, programs};
use nix::sys::signal::Signal;

use super::common::{READY, says};
use super::fast_path::{is_permitted, require_permission, shares};

/// Log message of a dataplane that uses the kernel fast path.
const FAST_PATH: &str = "established connections are forwarded by the kernel fast path";
/// Log message of a dataplane that does not use the kernel fast path.
const BY_ITSELF: &str = "the dataplane itself forwards all packets";

fn kill(site: &mut Site) -> Result<()> {
    site.end_dataplane(Signal::SIGKILL)
}

/// Starts a dataplane with these options, without the environment variable that tests use.
fn start(site: &mut Site, words: &[&str]) -> Result<()> {
    site.start_dataplane_without_environment(words)
}

/// Returns the output of doctor, also if it has findings, such as frames that were lost on a busy
/// machine.
fn doctor_output(site: &Site) -> String {
    site.lvsadm("doctor")
        .unwrap_or_else(|error| format!("{error:#}"))
}

/// Makes some connections that last long enough to be offloaded.
fn download(site: &Site) -> Result<()> {
    let mut load = LoadOptions::new(format!("{}:80", site.vip).parse()?);
    load.requests = 4;
    load.sizes = vec![10_485_760];
    site.client.load(&load)?.all_ok(4)
}

#[test]
fn fast_path_without_option_is_used_only_if_permitted_and_supported() -> Result<()> {
    let mut site = Site::new(SiteOptions::new("inkd", Forward::Nat))?;
    let permitted = is_permitted()?;
    start(&mut site, &[])?;
    site.add_service(80, "rr")?;
    download(&site)?;
    let doctor = doctor_output(&site);
    if permitted {
        says(&site, FAST_PATH)?;
        ensure!(doctor.contains(FAST_PATH), "no {FAST_PATH:?} in {doctor}");
        ensure!(
            shares(&site)?.0 > 0,
            "no downloads of 10 MiB were offloaded"
        );
    } else {
        says(&site, BY_ITSELF)?;
        ensure!(doctor.contains(BY_ITSELF), "no {BY_ITSELF:?} in {doctor}");
        ensure!(
            !doctor.contains("* established"),
            "unexpected `* established` in {doctor}"
        );
    }
    start(&mut site, &["--reverse-path", "loose"])?;
    site.add_service(80, "rr")?;
    download(&site)?;
    let doctor = doctor_output(&site);
    says(&site, BY_ITSELF)?;
    ensure!(doctor.contains(BY_ITSELF), "no {BY_ITSELF:?} in {doctor}");
    ensure!(
        !doctor.contains("* established"),
        "unexpected `* established` in {doctor}"
    );
    let output = site.lvsadm(&format!("explain tcp 192.0.2.77:1000 {}", site.service(80)))?;
    let expected =
        "fast path   no: the dataplane does not use the kernel fast path: --reverse-path needs";
    ensure!(output.contains(expected), "no {expected:?} in {output}");
    Ok(())
}

/// The second set contains the capabilities of the systemd unit. The log must not contain output of
/// the kernel's BPF verifier.
#[test]
fn fast_path_without_cap_perfmon_logs_missing_capability() -> Result<()> {
    require_permission()?;
    let mut site = Site::new(SiteOptions::new("inkd-caps", Forward::Nat))?;
    for (more, expected) in [
        ("", "CAP_PERFMON is missing"),
        (
            ",+perfmon",
            "established connections are forwarded by the kernel fast path",
        ),
    ] {
        let set = format!("-all,+net_admin,+net_raw,+bpf{more}");
        let launcher = ["setpriv", "--bounding-set", &set];
        site.start_dataplane_by(&launcher, &["--fast-path", "auto"])?;
        says(&site, expected)?;
        let log = says(&site, READY)?;
        ensure!(!log.contains("R0="), "{set}: unexpected `R0=` in {log}");
    }
    Ok(())
}

#[test]
fn dataplane_without_fast_path_removes_inherited_programs() -> Result<()> {
    require_permission()?;
    let mut site = Site::new(SiteOptions::new("inkd-off", Forward::Nat))?;
    start(&mut site, &[])?;
    site.add_service(80, "rr")?;
    kill(&mut site)?;
    start(&mut site, &["--fast-path", "off"])?;
    says(&site, "have ended")?;
    let left = site
        .director
        .sh("ls /sys/fs/bpf/lvs/* 2>/dev/null || true")?;
    ensure!(
        left.trim().is_empty(),
        "files are left in /sys/fs/bpf/lvs: {left}"
    );
    site.add_service(80, "rr")?;
    download(&site)
}

/// After five crashes of successors, the next dataplane starts without the inherited state, which
/// may be the cause of the crashes.
#[test]
fn state_of_repeatedly_crashing_dataplanes_is_discarded() -> Result<()> {
    require_permission()?;
    let mut site = Site::new(SiteOptions::new("inkd-tries", Forward::Nat))?;
    start(&mut site, &[])?;
    site.add_service(80, "rr")?;
    for number in 1..=6 {
        kill(&mut site)?;
        start(&mut site, &[])?;
        let (log, listed) = (says(&site, READY)?, site.lvsadm("-L -n")?);
        ensure!(
            log.contains("exited soon after they had taken over") == (number == 6),
            "the state was not discarded after the sixth crash, or was discarded earlier: {number}: {log}"
        );
        ensure!(
            listed.contains(":80") == (number < 6),
            "the service is listed after the sixth crash, or was lost earlier: {number}: {listed}"
        );
    }
    Ok(())
}

/// Without an option for the fast path, a successor forwards as its predecessor did. After
/// `--cleanup`, the next dataplane uses the fast path if it is permitted.
#[test]
fn successor_of_dataplane_without_fast_path_forwards_in_userspace() -> Result<()> {
    let mut site = Site::new(SiteOptions::new("inkd-hold", Forward::Nat))?;
    start(&mut site, &["--warm-restart", "on", "--fast-path", "off"])?;
    site.add_service(80, "rr")?;
    kill(&mut site)?;
    start(&mut site, &["--warm-restart", "on"])?;
    says(&site, BY_ITSELF)?;
    ensure!(
        site.lvsadm("-L -n")?.contains(":80"),
        "the successor did not take over the state"
    );
    download(&site)?;
    let program = programs::find("lvs-dataplane")?.display().to_string();
    site.dataplane = None;
    site.director.sh(&format!("{program} --cleanup"))?;
    start(&mut site, &["--warm-restart", "on"])?;
    let expected = if is_permitted()? {
        FAST_PATH
    } else {
        BY_ITSELF
    };
    says(&site, expected)?;
    Ok(())
}

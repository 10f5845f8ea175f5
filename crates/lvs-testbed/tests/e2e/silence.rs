//! `lvsadm` with a suspended dataplane: it prints one line with the fix, and exits with ipvsadm's
//! status.

use crate::common;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, SiteOptions, programs};
use nix::sys::signal::Signal;

#[test]
#[ignore = "long"]
fn suspended_dataplane_is_reported_and_continues_when_resumed() -> Result<()> {
    let site = common::site(SiteOptions::with_servers("silence", Forward::Nat, 1))?;
    site.add_service(80, "rr")?;
    let lvsadm = programs::find("lvsadm")?;
    site.director.install(&lvsadm, &["ipvsadm"])?;
    let dataplane = site
        .dataplane
        .as_ref()
        .context("no dataplane was started")?;
    dataplane.signal(Signal::SIGSTOP)?;
    let own = site.director.sh(&format!(
        "timeout 60 {} -Ln 2>&1 || echo status $?",
        lvsadm.display()
    ));
    let as_ipvsadm = site
        .director
        .sh("timeout 60 ipvsadm -Ln 2>&1 || echo status $?");
    dataplane.signal(Signal::SIGCONT)?;
    let (own, as_ipvsadm) = (own?, as_ipvsadm?);
    let reason = format!("does not answer (pid {})", dataplane.pid());
    ensure!(
        own.contains(&reason) && own.contains("kill -CONT") && own.lines().count() == 2,
        "the message is not one line with the reason and the fix: {own}"
    );
    ensure!(
        own.ends_with("status 2\n"),
        "the output of lvsadm does not end with `status 2`: {own}"
    );
    ensure!(
        as_ipvsadm.starts_with("Can't initialize ipvs: ") && as_ipvsadm.contains(&reason),
        "the message of ipvsadm does not begin with its prefix, or lacks the reason: {as_ipvsadm}"
    );
    ensure!(
        as_ipvsadm.ends_with("module?\nstatus 2\n"),
        "the output of ipvsadm does not end with `module? / status 2`: {as_ipvsadm}"
    );
    let listing = site.lvsadm("-L -n")?;
    ensure!(
        listing.contains(&site.vip.to_string()),
        "the resumed dataplane lost the service: {listing}"
    );
    Ok(())
}

//! Deliberate differences between the dataplane and the kernel's IPVS: see docs/decisions.md.

use crate::common;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Site, SiteOptions, soon};

/// The kernel routes packets of the director to its own addresses through `lo`; only a BPF program
/// can redirect them.
#[test]
fn client_on_director_without_bpf_reaches_own_port_of_host() -> Result<()> {
    super::fast_path::require_permission()?;
    let mut site = Site::new(SiteOptions::with_servers("own-client", Forward::Nat, 1))?;
    let set = "-all,+net_admin,+net_raw";
    site.start_dataplane_by(&["setpriv", "--bounding-set", set], &[])?;
    site.add_service(80, "rr")?;
    common::says(&site, "local_clients_off")?;
    let found = super::doctor::findings_with_code(&site, "local_clients_off")?;
    ensure!(
        found.len() == 1 && found[0]["since"].is_u64(),
        "doctor does not report exactly one local_clients_off, with its time: {found:?}"
    );
    let of = |key: &str| found[0][key].as_str().unwrap_or_default().to_owned();
    ensure!(
        of("what").contains("reach the host's own ports: "),
        "the finding does not name the host's ports: {found:?}"
    );
    ensure!(
        of("fix").contains("CAP_BPF"),
        "the fix does not name CAP_BPF: {found:?}"
    );
    let load = site.load_of(4);
    common::ok(site.client.load(&load)?, 4)?;
    let url = format!("http://{}/", site.service(80));
    let status = site
        .director
        .sh(&format!("curl -s -m 60 -o /dev/null {url} || echo $?"))?;
    ensure!(
        status.trim() == "7",
        "curl did not exit with status 7 (connection refused): {status}"
    );
    let explained = site.lvsadm(&format!("explain tcp {}:4000 {}:80", site.vip, site.vip))?;
    ensure!(
        explained.contains("the host's own ports"),
        "no `the host's own ports` in {explained}"
    );
    let links = site.director.sh("ip -o link")?;
    ensure!(
        !links.contains("lvs-local0"),
        "unexpected `lvs-local0` in {links}"
    );
    Ok(())
}

#[test]
fn policy_rules_are_ignored_with_one_warning() -> Result<()> {
    let site = common::site(SiteOptions::with_servers("rules", Forward::Nat, 1))?;
    site.add_service(80, "rr")?;
    site.director.sh(
        "ip route add unreachable default table 100; \
         ip rule add to 10.0.0.0/24 table 100 priority 100; ip rule add from 10.9.0.0/16 table 100 priority 101",
    )?;
    let dataplane = site
        .dataplane
        .as_ref()
        .context("no dataplane was started")?;
    let logged = || dataplane.log().matches("policy rules").count();
    soon("the dataplane to log the policy rules", || logged() > 0)?;
    let load = site.load_of(4);
    common::ok(site.client.load(&load)?, 4)
        .context("requests fail although only the table main should decide")?;
    ensure!(
        logged() == 1,
        "the warning was not logged exactly once: {}",
        dataplane.log()
    );
    Ok(())
}

//! Measures the full sync from a director with very many connections to an empty one: its duration,
//! and the effect on clients.
//!
//! One datagram opens each connection, through a running director. Round trips are of one byte in
//! each direction over TCP, through the same director.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Site, SiteOptions};

use super::large::{self, notice};

/// Number of full syncs.
const ROUNDS: usize = 3;

/// Measures the full sync of a table with `count` connections several times. Prints its duration,
/// and the round-trip times of clients meanwhile.
pub(super) fn run(count: u32) -> Result<()> {
    let mut options = SiteOptions::new("bulk", Forward::Nat);
    options.servers = 1;
    options.standby = true;
    let mut site = Site::new(options)?;
    let _server = large::prepare(&site)?;
    let key = site.testbed.dir().join("key");
    fs::write(&key, "0123456789abcdef0123456789abcdef")?;
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
    let (key, room) = (key.display().to_string(), (count + 1000).to_string());
    let first = site.director.clone();
    let extra = |peer| {
        [
            "--fast-path",
            "off",
            "--max-connections",
            &room,
            "--sync-peer",
            peer,
            "--sync-key",
            &key,
        ]
    };
    // A connection is replicated after its first datagram.
    let with_sysctl = ["--sysctl", "sync_threshold=1 50"];
    let arguments = [&extra("192.0.2.2")[..], &with_sysctl].concat();
    site.dataplane = Some(site.start_dataplane_on(&first, &[], &arguments)?);
    large::open(&site, count)?;
    large::quiet(&site)?;
    for _ in 0..ROUNDS {
        let (output, noticed) = notice(&site, || {
            let _second = site.start_dataplane_on(site.standby()?, &[], &extra("192.0.2.1"))?;
            site.lvsadm_on(site.standby()?, "sync --wait 60s")?;
            site.lvsadm_on(site.standby()?, "--json sync")
        })?;
        let state: serde_json::Value = serde_json::from_str(&output)?;
        let peer = &state["peers"][0];
        let number = |name: &str| peer[name].as_u64().with_context(|| output.clone());
        let (replicated, took) = (number("bulk_connections")?, number("bulk_ms")?);
        ensure!(
            number("missing")? == 0,
            "connections are missing after the full sync: {output}"
        );
        println!(
            "  {replicated} replicated in {took} ms, {} of them borrowed",
            number("borrowed")?
        );
        println!("  meanwhile:   {noticed}");
    }
    Ok(())
}

//! The `embed-dataplane` example with a real client and real servers. Needs privileges, or user
//! namespaces.

use std::path::Path;

use anyhow::Result;
use lvs_testbed::{Forward, Site, SiteOptions, Vip};

#[test]
fn embedded_dataplane_balances_and_its_hook_drops_packets() -> Result<()> {
    let mut options = SiteOptions::new("embed", Forward::Nat);
    options.vip = Vip::Dataplane;
    options.servers = 2;
    let site = Site::new(options)?;
    let program = Path::new(env!("CARGO_BIN_EXE_embed-dataplane"));
    let vip = site.service(80).to_string();
    let servers: Vec<String> = (0..2)
        .map(|index| format!("{}:80", site.real_address(index)))
        .collect();

    let start = |extra: &[&str]| -> Result<_> {
        let mut args = vec![vip.as_str()];
        args.extend(extra);
        args.extend(servers.iter().map(String::as_str));
        let running = site.director.spawn(program, &args)?;
        lvs_testbed::wait_until(
            "the example to print that it balances",
            std::time::Duration::from_secs(10),
            || running.log().contains("balancing"),
        )?;
        Ok(running)
    };
    let running = start(&[])?;
    let mut load = site.load();
    load.requests = 100;
    site.client.load(&load)?.all_ok(100)?;
    drop(running);

    let client = site
        .client
        .sh("ip -4 -o addr show dev eth0 | sed 's/.*inet \\([0-9.]*\\).*/\\1/'")?;
    let _running = start(&["--block", client.trim()])?;
    let curl = format!("curl -s -m 1 -o /dev/null http://{vip}/ || echo $?");
    let status = site.client.sh(&curl)?;
    assert_eq!(
        status.trim(),
        "28",
        "curl did not report a timeout (exit status 28)"
    );
    Ok(())
}

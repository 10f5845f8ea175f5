//! A boot: configured interfaces and addresses that appear later, and a dataplane that starts while
//! its predecessor is still being removed.

use crate::common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Proc, Site, SiteOptions, Vip, programs, wait_until};
use nix::sys::signal::Signal;
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(30);

fn site(label: &str) -> Result<Site> {
    let mut options = SiteOptions::with_servers(label, Forward::Nat, 1);
    options.vip = Vip::Dataplane;
    Site::new(options)
}

/// Waits until `lvsadm doctor` reports a finding with `words`; if `present` is false, until it
/// reports none.
fn wait_for_finding(site: &Site, words: &str, present: bool) -> Result<()> {
    let found = || findings(site).unwrap_or_default();
    wait_until(
        &format!(
            "doctor to report {} {words:?}",
            if present {
                "a finding with"
            } else {
                "no finding with"
            }
        ),
        PATIENCE,
        || findings(site).is_ok_and(|found| found.contains(words) == present),
    )
    .with_context(found)
}

fn findings(site: &Site) -> Result<String> {
    let program = programs::find("lvsadm")?.display().to_string();
    site.director
        .sh(&format!("{program} --json doctor || true"))
}

/// Creates the director's interface `eth1` again, in the servers' network.
fn bring_back_arm(site: &Site) -> Result<()> {
    site.testbed.plug("back", &site.director, "eth1")?;
    site.director
        .sh("ip addr add 10.0.0.1/24 dev eth1; ip link set eth1 up")
        .map(drop)
}

fn clients_are_served(site: &Site) -> Result<()> {
    let url = format!("http://{}/id", site.vip);
    wait_until("clients to be served", PATIENCE, || {
        let arguments = ["-sS", "-f", "-m", "10", &url];
        site.client.run("curl", &arguments).is_ok()
    })
}

#[test]
fn dataplane_uses_missing_interface_when_created() -> Result<()> {
    let mut site = site("bootif")?;
    site.director.sh("ip link delete eth1")?;
    site.start_dataplane(&[])?;
    let waiting = "this host does not have the configured interface eth1";
    common::says(&site, waiting)?;
    common::says(&site, "interface_missing")?;
    wait_for_finding(&site, waiting, true)?;
    site.add_service(80, "rr")?;
    bring_back_arm(&site)?;
    clients_are_served(&site)?;
    wait_for_finding(&site, "waiting for", false)?;
    // An interface that is removed while the dataplane runs is used again, too.
    site.director.sh("ip link delete eth1")?;
    wait_for_finding(&site, waiting, true)?;
    bring_back_arm(&site)?;
    clients_are_served(&site)
}

#[test]
fn dataplane_attaches_xdp_when_missing_interface_is_created() -> Result<()> {
    if !super::fast_path::is_permitted()? {
        return Ok(());
    }
    let mut site = site("bootxdp")?;
    site.start_dataplane(&[
        "--fast-path",
        "on",
        "--interface",
        "late0",
        "--xdp",
        "late0",
    ])?;
    common::says(
        &site,
        "this host does not have the configured interface late0",
    )?;
    site.director.sh(
        "ip link add late0 type veth peer name late1; ip link set late0 up; ip link set late1 up",
    )?;
    common::says(&site, "the dataplane uses late0")?;
    wait_until("the XDP program to be attached", PATIENCE, || {
        let shown = site.director.sh("ip link show dev late0");
        shown.is_ok_and(|shown| shown.contains("xdp"))
    })
}

#[test]
fn tun_backend_uses_missing_interface_when_created() -> Result<()> {
    let mut site = site("boottun")?;
    site.director
        .sh("echo 1 > /proc/sys/net/ipv4/ip_forward; ip link delete eth1")?;
    site.start_dataplane(&["--backend", "tun"])?;
    common::says(
        &site,
        "this host does not have the configured interface eth1",
    )?;
    site.add_service(80, "rr")?;
    bring_back_arm(&site)?;
    clients_are_served(&site)?;
    wait_for_finding(&site, "waiting for", false)
}

#[test]
fn dataplane_listens_at_missing_address_when_added() -> Result<()> {
    let mut site = site("bootlisten")?;
    let key = site.testbed.dir().join("key");
    fs::write(&key, "0123456789abcdef0123456789abcdef\n")?;
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
    let key = key.display().to_string();
    for address in ["10.77.0.1", "fd77::1"] {
        let peer = if address.contains(':') {
            "fd77::2"
        } else {
            "10.77.0.2"
        };
        site.start_dataplane(&[
            "--sync-peer",
            peer,
            "--sync-key",
            &key,
            "--sync-listen",
            address,
            "--sync-wait",
            "0",
        ])?;
        common::says(&site, "sync_listen_missing")?;
        wait_for_finding(&site, &format!("waiting for the address {address}"), true)?;
        site.director.sh(&format!("ip addr add {address} dev lo"))?;
        wait_until("the director to listen on TCP port 8848", PATIENCE, || {
            site.director.listens("tcp", 8848)
        })?;
        wait_for_finding(&site, "waiting for", false)?;
    }
    Ok(())
}

/// `lvsd` starts the dataplane with the configured interfaces, and starts the synchronisation
/// daemon when its interface is created.
#[test]
fn lvsd_uses_missing_interfaces_when_created() -> Result<()> {
    let site = site("bootlvsd")?;
    site.director.sh("ip link delete eth1")?;
    let path = site.testbed.dir().join("lvsd.toml");
    let text = format!(
        "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n\n[sync.ipvs]\nrole = \"master\"\ninterface = \"sync0\"\n\n\
         [[service]]\nname = \"web\"\naddress = \"{}:80\"\nforward = \"nat\"\n\n\
         [[service.server]]\naddress = \"{}:80\"\n",
        site.vip,
        site.real_address(0)
    );
    fs::write(&path, text)?;
    let path = path.display().to_string();
    let program = programs::find("lvsd")?;
    let checked = site.director.run(&program, &["check", &path])?;
    ensure!(checked.contains("valid"), "no `valid` in {checked}");
    let lvsd = site.director.spawn(&program, &["--config", &path])?;
    let status = || site.director.run(&program, &["status", "--config", &path]);
    wait_until(
        "the status to contain the missing interface",
        PATIENCE,
        || {
            status().is_ok_and(|output| {
                output.contains("NOT IN USE: this host does not have the configured interface eth1")
            })
        },
    )
    .with_context(|| format!("{:?}\n{}", status(), lvsd.log()))?;
    bring_back_arm(&site)?;
    clients_are_served(&site)?;
    site.director
        .sh("ip link add sync0 type veth peer name sync1; ip link set sync0 up; ip link set sync1 up; ip addr add 10.78.0.1/24 dev sync0")?;
    wait_until(
        "the synchronisation daemon to run on sync0",
        PATIENCE,
        || {
            site.lvsadm("-L --daemon")
                .is_ok_and(|output| output.contains("master") && output.contains("sync0"))
        },
    )
    .with_context(|| lvsd.log())?;
    site.director
        .run(&program, &["stop", "--all", "--config", &path])?;
    Ok(())
}

fn start(site: &Site, words: &[&str]) -> Result<Proc> {
    let mut all = site.dataplane_arguments();
    all.extend_from_slice(words);
    site.director.spawn(programs::find("lvs-dataplane")?, &all)
}

fn pid_that_answers(site: &Site) -> Option<u64> {
    let program = programs::find("lvsadm").ok()?;
    let output = site.director.run(program, &["--json", "workers"]).ok()?;
    let _: Value = serde_json::from_str(&output).ok()?;
    let pids = site
        .director
        .sh("ss -xlpH | grep -o 'lvs-dataplane\",pid=[0-9]*' | cut -d= -f2 | sort -u")
        .ok()?;
    pids.trim().parse().ok()
}

#[test]
#[ignore = "long"]
fn dataplane_started_while_signalled_dataplane_exits_waits_and_starts() -> Result<()> {
    let site = site("bootkill")?;
    for words in [&[][..], &["--fast-path", "off", "--warm-restart", "on"]] {
        let mut before = start(&site, words)?;
        wait_until("the started dataplane to answer", PATIENCE, || {
            pid_that_answers(&site) == Some(before.pid().into())
        })
        .with_context(|| before.log())?;
        for signal in [Signal::SIGKILL; 5].into_iter().chain([Signal::SIGTERM; 2]) {
            // The next dataplane starts while this one still exits.
            before.signal(signal)?;
            let mut next = start(&site, words)?;
            let mut ended = false;
            wait_until("the next dataplane to answer", PATIENCE, || {
                ended = !next.is_running();
                ended || pid_that_answers(&site) == Some(next.pid().into())
            })
            .with_context(|| next.log())?;
            ensure!(
                !ended,
                "{words:?}, {signal}: the next dataplane exited: {}",
                next.log()
            );
            ensure!(
                !next.log().contains("a warm restart is not possible"),
                "{words:?}, {signal}: unexpected `a warm restart is not possible` in {}",
                next.log()
            );
            before = next;
        }
        // A second dataplane does not wait for a running one.
        let mut second = start(&site, words)?;
        let status = second.wait(PATIENCE)?;
        let output = second.log();
        ensure!(
            !status.success(),
            "{words:?}: the second dataplane started: {output}"
        );
        ensure!(
            output.contains(&format!("pid {}", before.pid())),
            "the output does not contain the pid of the running dataplane: {output}"
        );
        before.signal(Signal::SIGKILL)?;
        let program = programs::find("lvs-dataplane")?;
        let output = site.director.run(program, &["--cleanup"])?;
        ensure!(
            output.starts_with("removed "),
            "the output of --cleanup does not begin with `removed `: {output}"
        );
    }
    Ok(())
}

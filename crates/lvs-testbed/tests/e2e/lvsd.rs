//! lvsd with a real dataplane, real servers and real checks.

use crate::common;

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::listing::rows;
use lvs_testbed::servers::{NginxOptions, nginx};
use lvs_testbed::{Forward, Proc, Site, SiteOptions, programs, soon, wait_until};
use nix::sys::signal::Signal;

/// Writes a configuration file with the first `servers` servers of the site.
fn configure(site: &Site, servers: usize) -> Result<PathBuf> {
    let mut text = format!(
        "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n\n\
         [[service]]\nname = \"web\"\naddress = \"{}\"\nscheduler = \"rr\"\nforward = \"nat\"\n\
         check = {{ type = \"tcp\", interval = \"200ms\", timeout = \"5s\" }}\n",
        site.service(80)
    );
    for index in 0..servers {
        write!(
            text,
            "\n[[service.server]]\naddress = \"{}:80\"\n",
            site.real_address(index)
        )?;
    }
    let path = site.testbed.dir().join("lvsd.toml");
    fs::write(&path, text)?;
    Ok(path)
}

fn start(site: &Site, arguments: &[&str]) -> Result<Proc> {
    let path = site.testbed.dir().join("lvsd.toml").display().to_string();
    let mut words = vec!["--config", path.as_str()];
    words.extend_from_slice(arguments);
    site.director.spawn(programs::find("lvsd")?, &words)
}

fn usable(site: &Site) -> usize {
    let listing = site.lvsadm("-L -n").unwrap_or_default();
    rows(&listing)
        .iter()
        .filter(|row| row.is_server() && row.number(1).is_ok_and(|weight| weight > 0))
        .count()
}

fn wait_usable(site: &Site, servers: usize, lvsd: &Proc) -> Result<()> {
    soon(
        &format!("the director to have {servers} usable servers"),
        || usable(site) == servers,
    )
    .with_context(|| format!("{:?}\nlvsd printed:\n{}", site.lvsadm("-L -n"), lvsd.log()))
}

fn site(label: &str) -> Result<Site> {
    Site::new(SiteOptions::with_servers(label, Forward::Nat, 3))
}

#[test]
fn lvsd_applies_checks_and_reloads_and_restores_host_at_exit() -> Result<()> {
    let mut site = site("lvsd")?;
    let before = common::host_state(&site)?;
    let path = configure(&site, 2)?;
    let checked = site
        .director
        .run(programs::find("lvsd")?, &["check".into(), path.clone()])?;
    ensure!(checked.contains("valid"), "no `valid` in {checked}");
    let mut lvsd = start(&site, &[])?;
    wait_usable(&site, 2, &lvsd)?;
    let mut load = site.load();
    load.sizes = vec![1000];
    load.requests = 40;
    common::spread(&common::ok(site.client.load(&load)?, 40)?, &[20, 20])?;

    // A reload adds a server; connected clients are not affected.
    let mut open = load.clone();
    open.keepalive = true;
    open.pause_ms = 5;
    let steady = site.client.steady_load(&open)?;
    configure(&site, 3)?;
    lvsd.signal(Signal::SIGHUP)?;
    wait_usable(&site, 3, &lvsd)?;
    load.requests = 60;
    common::ok(site.client.load(&load)?, 60)?;
    fs::write(&path, "[[service]]\nnane = \"web\"\n")?;
    lvsd.signal(Signal::SIGHUP)?;
    soon("lvsd to log the error in the file", || {
        lvsd.log().contains("nane")
    })?;
    ensure!(
        lvsd.is_running() && usable(&site) == 3,
        "lvsd exited, or not all 3 servers are usable: {}",
        lvsd.log()
    );
    configure(&site, 3)?;
    steady.finish_ok()?;

    // A failed server gets no new connections until it is back.
    site.programs.remove(0).kill();
    wait_usable(&site, 2, &lvsd)?;
    load.requests = 40;
    let report = common::ok(site.client.load(&load)?, 40)?;
    ensure!(
        !report.servers.contains_key("rs1"),
        "the failed server answered: {report:?}"
    );
    site.programs
        .push(nginx(&site.servers[0], &NginxOptions::default())?);
    wait_usable(&site, 3, &lvsd)?;

    lvsd.stop_ok(Signal::SIGINT)?;
    common::wait_for_host_state(&site, &before)
}

#[test]
fn killed_and_restarted_lvsd_loses_no_request() -> Result<()> {
    let site = site("killed")?;
    configure(&site, 3)?;
    let mut lvsd = start(&site, &[])?;
    wait_usable(&site, 3, &lvsd)?;

    let mut load = site.load();
    load.sizes = vec![1, 1448, 20_011];
    load.pause_ms = 2;
    let steady = site.client.steady_load(&load)?;
    for _ in 0..2 {
        steady.wait_for_more(50)?;
        lvsd.signal(Signal::SIGKILL)?;
        lvsd.wait(common::SOON)?;
        steady.wait_for_more(50)?;
        ensure!(
            usable(&site) == 3,
            "not all 3 servers are usable without lvsd"
        );
        lvsd = start(&site, &[])?;
        soon("lvsd to be ready", || lvsd.log().contains("ready:")).with_context(|| lvsd.log())?;
    }
    steady.wait_for_more(1000)?;
    let report = steady.finish_ok()?;
    ensure!(
        report.ok > 1000 && report.servers.len() == 3,
        "not all 3 servers answered more than 1000 requests: {report:?}"
    );

    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

#[test]
fn dataplane_survives_stop_of_lvsd_and_is_restarted_by_lvsd_after_death() -> Result<()> {
    let site = site("leave")?;
    configure(&site, 3)?;
    let mut lvsd = start(&site, &[])?;
    wait_usable(&site, 3, &lvsd)?;

    let dataplane = site
        .director
        .sh("ss -Hlxp | sed -n 's/.*\\(@lvs-dataplane\\|netns-[0-9]*.sock\\) .*pid=\\([0-9]*\\).*/\\2/p'")?;
    site.director.sh(&format!("kill -9 {dataplane}"))?;
    soon("lvsd to start a new dataplane", || {
        let now = site
            .director
            .sh("ss -Hlxp | sed -n 's/.*\\(@lvs-dataplane\\|netns-[0-9]*.sock\\) .*pid=\\([0-9]*\\).*/\\2/p'")
            .unwrap_or_default();
        now != dataplane && usable(&site) == 3
    })
    .with_context(|| lvsd.log())?;

    lvsd.stop_ok(Signal::SIGTERM)?;
    let mut load = site.load();
    load.sizes = vec![1000];
    load.requests = 30;
    common::spread(&common::ok(site.client.load(&load)?, 30)?, &[10, 10, 10])
}

/// Tunnels of two servers: their settings in the file, and their lines in a listing.
const TUNNELS: [[(&str, &str); 2]; 4] = [
    [("", "ipip"), ("", "ipip")],
    [
        ("tunnel = \"gre\"", "gre:-c"),
        ("tunnel = { type = \"gue\", port = 6080 }", "gue:6080:-c"),
    ],
    [
        ("tunnel = { type = \"gre\", checksum = \"full\" }", "gre:+c"),
        (
            "tunnel = { type = \"gue\", port = 6080, checksum = \"full\" }",
            "gue:6080:+c",
        ),
    ],
    [
        (
            "tunnel = { type = \"gue\", port = 6080, checksum = \"remote\" }",
            "gue:6080:r+c",
        ),
        ("tunnel = \"ipip\"", "ipip"),
    ],
];

#[test]
fn reload_changes_tunnels_of_servers_and_keeps_connections() -> Result<()> {
    let site = Site::new(SiteOptions::with_servers("lvsd-tun", Forward::Tun, 2))?;
    let path = site.testbed.dir().join("lvsd.toml");
    let write = |tunnels: &[(&str, &str); 2]| -> Result<()> {
        let mut text = format!(
            "[lvsd]\nlog = \"debug\"\n[dataplane]\ninterface = \"eth0\"\n\n\
             [[service]]\naddress = \"{}\"\nscheduler = \"rr\"\nforward = \"tun\"\n\
             tunnel = {{ type = \"gue\", port = 1 }}\n",
            site.service(80)
        );
        for (index, (words, _)) in tunnels.iter().enumerate() {
            let address = site.real_address(index);
            let words = if words.is_empty() {
                "tunnel = \"ipip\""
            } else {
                words
            };
            write!(
                text,
                "\n[[service.server]]\naddress = \"{address}\"\n{words}\n"
            )?;
        }
        Ok(fs::write(&path, text)?)
    };
    write(&TUNNELS[0])?;
    let mut lvsd = start(&site, &[])?;
    wait_usable(&site, 2, &lvsd)?;

    let mut open = site.load();
    open.sizes = vec![1000];
    open.keepalive = true;
    open.pause_ms = 5;
    let steady = site.client.steady_load(&open)?;
    let load = site.load_of(40);
    for tunnels in &TUNNELS {
        write(tunnels)?;
        lvsd.signal(Signal::SIGHUP)?;
        let listed = || site.lvsadm("-L -n --tun-info").unwrap_or_default();
        soon("lvsadm to list the tunnels", || {
            let listing = listed();
            let all = listing.split_whitespace();
            tunnels
                .iter()
                .all(|(_, word)| all.clone().any(|w| w == *word))
        })
        .with_context(|| format!("{tunnels:?}\n{}\n{}", listed(), lvsd.log()))?;
        let report = common::ok(site.client.load(&load)?, 40)
            .with_context(|| format!("{tunnels:?}\n{}", listed()))?;
        ensure!(
            report.servers.len() == 2,
            "not both servers answered: {tunnels:?}: {report:?}"
        );
    }
    steady.finish_ok()?;

    // A restarted lvsd changes nothing.
    lvsd.signal(Signal::SIGKILL)?;
    lvsd.wait(common::SOON)?;
    let mut lvsd = start(&site, &[])?;
    soon("the new lvsd to answer", || lvsd.log().contains("ready:"))?;
    ensure!(
        !lvsd.log().contains("changed server"),
        "unexpected `changed server` in {}",
        lvsd.log()
    );
    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

fn dataplane_pid(site: &Site) -> Result<String> {
    site.director
        .sh("ss -Hlxp | sed -n 's/.*netns-[0-9]*.sock .*pid=\\([0-9]*\\).*/\\1/p'")
}

/// Downloads continue while lvsd is restarted, as in an upgrade. `lvsd stop --all` then leaves no
/// state.
#[test]
fn twenty_restarts_of_lvsd_break_no_download_and_stop_all_removes_all_state() -> Result<()> {
    let site = site("restarts")?;
    let before = common::host_state(&site)?;
    configure(&site, 3)?;
    let mut lvsd = start(&site, &[])?;
    wait_usable(&site, 3, &lvsd)?;
    let dataplane = dataplane_pid(&site)?;
    let mut load = site.load();
    load.sizes = vec![1000, 200_000];
    load.keepalive = true;
    load.pause_ms = 5;
    let steady = site.client.steady_load(&load)?;
    for round in 0..20 {
        let status = lvsd.stop(Signal::SIGTERM)?;
        ensure!(
            status.success(),
            "round {round}: lvsd failed at its exit: {status}: {}",
            lvsd.log()
        );
        ensure!(
            usable(&site) == 3,
            "round {round}: not all 3 servers are usable"
        );
        lvsd = start(&site, &[])?;
        soon("lvsd to be ready", || lvsd.log().contains("ready:")).with_context(|| lvsd.log())?;
    }
    steady.finish_ok()?;
    ensure!(
        dataplane_pid(&site)? == dataplane,
        "the dataplane was replaced"
    );

    let path = site.testbed.dir().join("lvsd.toml").display().to_string();
    let program = programs::find("lvsd")?;
    site.director
        .run(&program, &["stop", "--all", "--config", &path])?;
    ensure!(
        lvsd.wait(common::SOON)?.success(),
        "lvsd failed at its exit: {}",
        lvsd.log()
    );
    common::wait_for_host_state(&site, &before)?;

    // `lvsd stop` leaves the dataplane; `stop --all` also ends a dataplane without lvsd.
    let mut lvsd = start(&site, &[])?;
    wait_usable(&site, 3, &lvsd)?;
    site.director.run(&program, &["stop", "--config", &path])?;
    ensure!(
        lvsd.wait(common::SOON)?.success(),
        "lvsd failed at its exit: {}",
        lvsd.log()
    );
    ensure!(usable(&site) == 3, "not all 3 servers are usable any more");
    site.director
        .run(&program, &["stop", "--all", "--config", &path])?;
    common::wait_for_host_state(&site, &before)
}

/// A new server, whose first answer takes half a second, replaces the only server.
#[test]
fn reload_that_replaces_the_only_server_loses_no_request() -> Result<()> {
    let site = site("replace")?;
    let path = configure(&site, 1)?;
    let text = fs::read_to_string(&path)?.replace("\"5s\"", "\"10s\"");
    let second = text.replace(
        &site.real_address(0).to_string(),
        &site.real_address(1).to_string(),
    );
    fs::write(&path, &text)?;
    let mut lvsd = start(&site, &[])?;
    wait_usable(&site, 1, &lvsd)?;
    let steady = site.client.steady_load(&site.load())?;
    steady.wait_for_more(1)?;
    site.servers[1].sh(
        "nft 'add table inet slow; add chain inet slow in { type filter hook input priority 0; }; \
         add rule inet slow in tcp dport 80 drop'",
    )?;
    fs::write(&path, &second)?;
    lvsd.signal(Signal::SIGHUP)?;
    std::thread::sleep(Duration::from_millis(500));
    ensure!(
        site.lvsadm("-L -n")?
            .contains(&site.real_address(0).to_string()),
        "the old server was removed before the new one served"
    );
    site.servers[1].sh("nft delete table inet slow")?;
    soon("only the new server to be listed", || {
        let listing = site.lvsadm("-L -n").unwrap_or_default();
        listing.contains(&site.real_address(1).to_string())
            && !listing.contains(&site.real_address(0).to_string())
    })
    .with_context(|| format!("{:?}\n{}", site.lvsadm("-L -n"), lvsd.log()))?;
    // Waits for more requests than were in progress at the old server.
    steady.wait_for_more(1 + site.load().concurrency)?;
    let report = steady.finish_ok()?;
    ensure!(
        report.servers.len() == 2,
        "not both servers answered: {report:?}"
    );
    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// The standard error of lvsd, its dataplane and `lvsadm` is first `/dev/full`, then a full pipe
/// that no process reads, then a pipe without a reader. 500 downloads run meanwhile.
#[test]
#[ignore = "long"]
fn unread_output_does_not_block_lvsd() -> Result<()> {
    let site = site("unread")?;
    // With these times, lvsd logs a warning before any other line.
    let path = configure(&site, 3)?.display().to_string();
    let fifo = site.testbed.dir().join("log").display().to_string();
    let stuffed = format!(
        "mkfifo {fifo}; exec 3<>{fifo}; dd if=/dev/zero of={fifo} bs=4096 count=64 oflag=nonblock 2>&-; exec \"$@\" 2>{fifo}"
    );
    let closed = format!(
        "mkfifo {fifo}-closed; exec 3<>{fifo}-closed 4>{fifo}-closed 3>&-; exec \"$@\" 2>&4 4>&-"
    );
    let program = programs::find("lvsd")?.display().to_string();
    for script in ["exec \"$@\" 2>/dev/full", &stuffed, &closed] {
        let words = [
            "LVSD_LOG=debug",
            "LVS_LOG=debug",
            "sh",
            "-c",
            script,
            "sh",
            &program,
            "--config",
            &path,
        ];
        let mut lvsd = site.director.spawn("env", &words)?;
        wait_usable(&site, 3, &lvsd)?;
        let mut load = site.load();
        load.concurrency = 500;
        load.sizes = vec![200_000];
        load.pause_ms = 200;
        load.keepalive = true;
        load.timeout_ms = 120_000;
        let steady = site.client.steady_load(&load)?;
        for servers in [2, 3, 2, 3] {
            configure(&site, servers)?;
            lvsd.signal(Signal::SIGHUP)?;
            let lvsadm = programs::find("lvsadm")?.display().to_string();
            let words = ["-c", script, "sh", &lvsadm, "-L", "-n", "--nonsense"];
            // lvsadm cannot write its message: only its exit code shows the failure.
            ensure!(site.director.run("sh", &words).is_err());
            soon("the file to be loaded", || usable(&site) == servers)?;
        }
        steady.wait_for_more(500)?;
        let report = steady.finish_ok()?;
        ensure!(
            report.ok > 500,
            "{script}: at most 500 requests were answered: {report:?}"
        );
        ensure!(
            lvsd.is_running(),
            "{script}: lvsd has exited: {}",
            lvsd.log()
        );
        ensure!(lvsd.stop(Signal::SIGINT)?.success());
        site.director.sh(&format!("rm -f {fifo} {fifo}-closed"))?;
    }
    Ok(())
}

/// A probe whose connection is closed leaves no state in the director or the server.
#[test]
fn probes_leave_no_connection_in_time_wait() -> Result<()> {
    let site = site("probes")?;
    configure(&site, 3)?;
    let mut lvsd = start(&site, &[])?;
    wait_usable(&site, 3, &lvsd)?;
    std::thread::sleep(Duration::from_secs(2));
    for host in [&site.director, &site.servers[0]] {
        let left = host.sh("ss -Htan state time-wait")?;
        ensure!(left.is_empty(), "connections are left in TIME-WAIT: {left}");
    }
    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

fn lvsd(site: &Site, words: &str) -> Result<String> {
    let path = site.testbed.dir().join("lvsd.toml").display().to_string();
    let program = programs::find("lvsd")?;
    site.director.sh(&format!(
        "{} --config {path} {words} 2>&1",
        program.display()
    ))
}

/// `lvsd stop --all` removes the files of its network namespace, whether lvsd runs or not.
#[test]
fn lvsd_stop_all_removes_files_of_its_network_namespace() -> Result<()> {
    let site = site("sweep")?;
    configure(&site, 3)?;
    let files = || {
        site.director
            .sh("ls /run/lvs | grep ^netns-$(stat -Lc %i /proc/self/ns/net) || true")
    };
    for ends_before in [false, true] {
        let mut lvsd = start(&site, &[])?;
        wait_usable(&site, 3, &lvsd)?;
        let there = files()?;
        for name in [".sock.lock", ".sock.lvsd.lock", ".lvsd.toml"] {
            ensure!(there.contains(name), "no {name:?} in {there}");
        }
        if ends_before {
            lvsd.stop(Signal::SIGTERM)?;
            ensure!(
                files()?.contains(".lvsd.toml"),
                "the files of lvsd are missing: {}",
                files()?
            );
        }
        self::lvsd(&site, "stop --all")?;
        soon("the files of the namespace to be removed", || {
            files().is_ok_and(|left| left.trim().is_empty())
        })
        .with_context(|| format!("{ends_before}: {:?}", files()))?;
        lvsd.wait(common::SOON)?;
    }
    Ok(())
}

/// Until a typo in the configuration file is corrected, every program reports the position of the
/// typo and the fix. The services are unchanged.
#[test]
fn typo_in_configuration_file_is_reported_until_corrected() -> Result<()> {
    let site = site("typo")?;
    let path = configure(&site, 2)?;
    let mut daemon = start(&site, &[])?;
    wait_usable(&site, 2, &daemon)?;
    let doctor = || super::doctor::findings_with_code(&site, "configuration_refused");
    let health = || lvsd(&site, "check-health 2>&1 || echo exit $?");
    let good = health()?;
    ensure!(good.contains("LVS OK"), "no `LVS OK` in {good}");
    ensure!(doctor()?.is_empty(), "doctor has findings: {:?}", doctor()?);

    // The server that the new file also omits must stay.
    configure(&site, 1)?;
    let text = fs::read_to_string(&path)?;
    fs::write(&path, text.replace("scheduler", "shceduler"))?;
    let reload = lvsd(&site, "reload 2>&1 || echo exit $?")?;
    let position = format!("{}:7:1", path.display());
    for part in [
        "exit 3",
        &position,
        "shceduler",
        "did you mean `scheduler`?",
    ] {
        ensure!(
            reload.contains(part),
            "the report lacks a part: {part}: {reload}"
        );
    }
    let status = lvsd(&site, "status")?;
    let first = status.lines().next().unwrap_or_default();
    ensure!(
        first.contains("WARNING: the file was refused"),
        "the refused file is not reported: {status}"
    );
    let loaded: serde_json::Value = serde_json::from_str(&lvsd(&site, "status --json")?)?;
    let loaded = &loaded["loaded"];
    let found = doctor()?;
    ensure!(
        loaded["ok"] == false && found.len() == 1,
        "the refused file is not reported exactly once: {loaded} {found:?}"
    );
    let what = found[0]["what"].as_str().unwrap_or_default();
    for message in [
        what,
        loaded["message"].as_str().unwrap_or_default(),
        &status,
    ] {
        for part in [
            &position,
            "the old configuration stays",
            "did you mean `scheduler`?",
        ] {
            ensure!(
                message.contains(part),
                "the finding lacks a part: {part}: {message}"
            );
        }
    }
    let fix = found[0]["fix"].as_str().unwrap_or_default();
    ensure!(fix.contains("lvsd reload"), "no `lvsd reload` in {fix}");
    let output = health()?;
    for part in ["LVS WARNING", "the file was refused", "exit 1"] {
        ensure!(
            output.contains(part),
            "the output lacks a part: {part}: {output}"
        );
    }
    let mut load = site.load();
    load.requests = 20;
    load.sizes = vec![1000];
    common::spread(&common::ok(site.client.load(&load)?, 20)?, &[10, 10])?;

    configure(&site, 2)?;
    lvsd(&site, "reload")?;
    let healed = health()?;
    ensure!(healed.contains("LVS OK"), "no `LVS OK` in {healed}");
    ensure!(doctor()?.is_empty(), "doctor has findings: {:?}", doctor()?);
    daemon.stop_ok(Signal::SIGINT)
}

/// lvsd continues a drain after a reload, a refused reload, and a restart of lvsd. A user without
/// write access cannot end it.
#[test]
fn lvsd_keeps_drain_over_reloads_and_restarts() -> Result<()> {
    let site = site("admin")?;
    let path = configure(&site, 3)?;
    let state = site.testbed.dir().join("state").display().to_string();
    let mut daemon = start(&site, &["--state", &state])?;
    wait_usable(&site, 3, &daemon)?;
    let (service, server) = (site.service(80), format!("{}:80", site.real_address(0)));
    let mut load = site.load();
    load.sizes = vec![1000];
    load.pause_ms = 2;
    let steady = site.client.steady_load(&load)?;
    let message = site.lvsadm(&format!(
        "drain {service} {server} --deadline 300s --active --why disk"
    ))?;
    ensure!(message.contains("drained"), "no `drained` in {message}");
    wait_usable(&site, 2, &daemon)?;
    let output = || lvsd(&site, "status").unwrap_or_default();
    let is_shown = || {
        let parts = ["drain: ", ": disk", "2 of 3 servers usable"];
        let output = output();
        parts.iter().all(|part| output.contains(part))
    };
    soon("lvsd status to show the drain", is_shown).with_context(output)?;

    let text = fs::read_to_string(&path)?;
    fs::write(&path, format!("{text}weight = 2\n"))?;
    let output = lvsd(&site, "reload")?;
    ensure!(output.contains("reloaded"), "no `reloaded` in {output}");
    wait_usable(&site, 2, &daemon)?;
    fs::write(&path, "[[service]]\nnane = 1\n")?;
    let output = lvsd(&site, "reload || echo status $?")?;
    ensure!(output.contains("status 3"), "no `status 3` in {output}");
    fs::write(&path, &text)?;

    daemon.stop_ok(Signal::SIGTERM)?;
    daemon = start(&site, &["--state", &state])?;
    soon("lvsd status to report 2 usable servers", || {
        lvsd(&site, "status").is_ok_and(|output| output.contains("2 of 3 servers usable"))
    })?;
    wait_usable(&site, 2, &daemon)?;
    // A user without write access cannot end the drain.
    let denied = site
        .director
        .sh(&format!(
            "setpriv --reuid 65534 --regid 65534 --clear-groups {} undrain {service} {server} 2>&1 || echo status $?",
            programs::find("lvsadm")?.display()
        ))?;
    ensure!(denied.contains("status"), "no `status` in {denied}");
    wait_usable(&site, 2, &daemon)?;
    let lvsd = programs::find("lvsd")?;
    let file = path.display().to_string();
    let put_back = ["--config", &file, "undrain", &service.to_string(), &server];
    site.director.run(&lvsd, &put_back)?;
    wait_usable(&site, 3, &daemon)?;

    // A server in maintenance leaves the service.
    let host = site.real_address(0);
    site.lvsadm(&format!("maintenance all {host} --for 1h"))?;
    wait_until("the server to be removed", Duration::from_secs(40), || {
        site.lvsadm("-L -n")
            .is_ok_and(|text| !text.contains(&server))
    })?;
    site.lvsadm(&format!("undrain all {host}"))?;
    wait_usable(&site, 3, &daemon)?;
    steady.finish_ok()?;
    daemon.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// The sorry server gets new connections only below the quorum. lvsd runs a program at both
/// changes.
#[test]
fn sorry_server_answers_only_below_quorum_and_notify_program_gets_events() -> Result<()> {
    let mut site = site("sorry")?;
    let path = configure(&site, 2)?;
    let output = site.testbed.dir().join("reported").display().to_string();
    let script = site.testbed.dir().join("notify").display().to_string();
    fs::write(&script, format!("#!/bin/sh\ncat >> {output}\n"))?;
    site.director.sh(&format!(
        "chmod 755 {script}; touch {output}; chmod 666 {output}"
    ))?;
    let text = fs::read_to_string(&path)?.replace(
        "scheduler = \"rr\"\n",
        &format!(
            "scheduler = \"rr\"\nquorum = 2\nsorry = \"{}:80\"\n",
            site.real_address(2)
        ),
    );
    // The sorry server has weight 1.
    let text = text.replace(":80\"\n\n[[", ":80\"\nweight = 100\n\n[[") + "weight = 100\n";
    fs::write(
        &path,
        format!("[lvsd]\nnotify = \"{script}\"\nnotify_user = \"root\"\n{text}"),
    )?;
    let mut daemon = start(
        &site,
        &["--state", &site.testbed.dir().display().to_string()],
    )?;
    wait_usable(&site, 2, &daemon)?;
    let mut load = site.load();
    load.sizes = vec![1000];
    load.requests = 20;
    let report = common::ok(site.client.load(&load)?, 20)?;
    ensure!(
        !report.servers.contains_key("rs3"),
        "the sorry server answered above the quorum: {report:?}"
    );
    // lvsd changes one weight after another.
    let only = |site: &Site, servers: &[usize]| {
        soon(&format!("only the servers {servers:?} to be used"), || {
            common::usable(site) == servers
        })
        .with_context(|| format!("{:?}\n{}", site.lvsadm("-L -n"), daemon.log()))
    };
    let sorry_serves = |site: &Site| {
        soon("lvsd to use the sorry server", || {
            lvsd(site, "status")
                .is_ok_and(|output| output.contains("BELOW ITS QUORUM; the sorry server"))
        })?;
        only(site, &[2])?;
        let report = common::ok(site.client.load(&load)?, 20)?;
        ensure!(
            report.servers.keys().eq(["rs3"]),
            "other servers than the sorry server answered: {report:?}"
        );
        anyhow::Ok(())
    };
    let quorum = |site: &Site| {
        soon("the service to reach its quorum", || {
            lvsd(site, "status").is_ok_and(|output| {
                output.contains("2 of 2 servers usable") && !output.contains("BELOW")
            })
        })?;
        only(site, &[0, 1])?;
        let report = common::ok(site.client.load(&load)?, 20)?;
        ensure!(
            !report.servers.contains_key("rs3"),
            "the sorry server answered above the quorum: {report:?}"
        );
        anyhow::Ok(())
    };
    // One of two servers refuses the checks: the service is below its quorum.
    let mut open = load.clone();
    open.keepalive = true;
    open.pause_ms = 5;
    let steady = site.client.steady_load(&open)?;
    site.servers[0].sh(
        "nft 'table ip f { chain i { type filter hook input priority 0; ip saddr 10.0.0.1 reject; }; }'",
    )?;
    sorry_serves(&site)?;
    let report = steady.finish_ok()?;
    ensure!(
        !report.servers.contains_key("rs3"),
        "the sorry server answered above the quorum: {report:?}"
    );
    site.servers[0].sh("nft delete table ip f")?;
    quorum(&site)?;
    site.programs.remove(0).kill();
    sorry_serves(&site)?;
    site.programs
        .push(nginx(&site.servers[0], &NginxOptions::default())?);
    quorum(&site)?;
    for event in ["quorum_lost", "sorry_on", "server_down", "quorum_gained"] {
        let word = format!("\"event\":\"{event}\"");
        soon(&format!("the notify script to receive {event}"), || {
            fs::read_to_string(&output).is_ok_and(|events| events.contains(&word))
        })?;
    }
    daemon.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// Whether the client receives a reply to its ARP request for the VIP.
fn is_answered_for(site: &Site) -> bool {
    // A neighbour entry in the cache does not prove that a host answers.
    let asked = format!(
        "ip neigh flush to {0}; ping -n -c 1 -W 3 {0} >/dev/null; ip neigh show {0}",
        site.vip
    );
    let message = site.client.sh(&format!("{{ {asked}; }} 2>&1 || true"));
    message.is_ok_and(|message| message.contains("lladdr"))
}

/// Below the quorum, no host answers ARP for the VIP; lvsd announces it when the quorum is reached.
/// With `remove_on_exit`, lvsd also releases it when it exits.
#[test]
fn released_vip_is_unanswered_on_the_wire() -> Result<()> {
    let mut options = SiteOptions::with_servers("giveup", Forward::Nat, 2);
    options.vip = lvs_testbed::Vip::Dataplane;
    let mut site = Site::new(options)?;
    let path = configure(&site, 2)?;
    let text = fs::read_to_string(&path)?.replace(
        "scheduler = \"rr\"\n",
        "scheduler = \"rr\"\nquorum = 2\nbelow_quorum = \"give-up\"\nremove_on_exit = true\n",
    );
    fs::write(&path, text)?;
    // A director announces an address that it takes over; the client accepts the unsolicited
    // announcement.
    site.client
        .sh("sysctl -qw net.ipv4.conf.all.arp_accept=1 net.ipv4.conf.eth0.arp_accept=1")?;
    let state = site.testbed.dir().display().to_string();
    let mut daemon = start(&site, &["--state", &state])?;
    wait_usable(&site, 2, &daemon)?;
    let owned = |site: &Site| -> Result<bool> {
        let status: serde_json::Value = serde_json::from_str(&lvsd(site, "status --json")?)?;
        let vips = status["dataplane"]["vips"]
            .as_array()
            .context("the status contains no list of VIPs")?;
        Ok(vips.iter().any(|vip| vip == &site.vip.to_string()))
    };
    let becomes = |site: &Site, wanted: bool| {
        soon(&format!("the dataplane to own the VIP: {wanted}"), || {
            owned(site).is_ok_and(|owned| owned == wanted)
        })
    };
    becomes(&site, true)?;
    let answered = |site: &Site, wanted: bool| {
        soon(&format!("a host to answer for the VIP: {wanted}"), || {
            is_answered_for(site) == wanted
        })
    };
    answered(&site, true).with_context(|| daemon.log())?;

    site.programs.remove(0).kill();
    becomes(&site, false).with_context(|| daemon.log())?;
    answered(&site, false).context("a host answers for a released VIP")?;

    site.client
        .sh(&format!("ip neigh flush to {}; ip neigh show", site.vip))?;
    site.programs
        .push(nginx(&site.servers[0], &NginxOptions::default())?);
    becomes(&site, true)?;
    soon("the client to learn the VIP's link-layer address", || {
        let known = site.client.sh(&format!("ip neigh show {}", site.vip));
        known.is_ok_and(|known| known.contains("lladdr"))
    })?;
    let mut load = site.load_of(20);
    load.sizes = vec![1000];
    common::ok(site.client.load(&load)?, 20)?;

    // With `remove_on_exit`, lvsd removes the service and releases the VIP when it exits; the
    // dataplane continues.
    let dataplane = dataplane_pid(&site)?;
    daemon.stop_ok(Signal::SIGTERM)?;
    answered(&site, false).with_context(|| daemon.log())?;
    ensure!(
        rows(&site.lvsadm("-L -n")?)
            .iter()
            .all(|row| !row.is_server())
    );
    ensure!(dataplane_pid(&site)? == dataplane);
    let mut again = start(&site, &["--state", &state])?;
    wait_usable(&site, 2, &again)?;
    becomes(&site, true)?;
    again.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// Loads as many services and servers as the largest known installations have. `--nocapture` shows
/// the times.
#[test]
#[ignore = "long"]
fn file_with_2277_services_and_37205_servers_is_loaded_and_one_change_applied() -> Result<()> {
    const SERVICES: usize = 2_277;
    const SERVERS: usize = 37_205;
    let site = site("large")?;
    let path = configure(&site, 0)?;
    let mut text = fs::read_to_string(&path)?;
    text = text[..text
        .find("[[service]]")
        .context("the file has no service")?]
        .to_owned();
    for n in 0..SERVICES {
        write!(
            text,
            "[[service]]\naddress = \"198.51.{}.{}:{}\"\nforward = \"nat\"\nvip = \"host\"\n",
            n % 100,
            n / 100 + 1,
            80
        )?;
        for server in (n..SERVERS).step_by(SERVICES) {
            writeln!(
                text,
                "[[service.server]]\naddress = \"10.{}.{}.{}:80\"\nweight = 2",
                // These addresses are outside of the site's networks: 10.0.0.255 is a broadcast
                // address there, which the dataplane refuses, like the kernel.
                64 + (server >> 16),
                server >> 8 & 255,
                server & 255
            )?;
        }
    }
    fs::write(&path, &text)?;
    let begun = std::time::Instant::now();
    let state = site.testbed.dir().display().to_string();
    let mut daemon = start(&site, &["--state", &state])?;
    wait_until(
        "lvsd to report all 2277 services ready",
        Duration::from_secs(100),
        || {
            daemon
                .log()
                .contains("ready: 2277 services, 37205 of 37205 servers up")
        },
    )
    .with_context(|| daemon.log().chars().take(4000).collect::<String>())?;
    let filled = begun.elapsed();
    let changed = text.replacen("weight = 2", "weight = 3", 1);
    fs::write(&path, &changed)?;
    let begun = std::time::Instant::now();
    let output = lvsd(&site, "reload")?;
    let reloaded = begun.elapsed();
    ensure!(output.contains("reloaded"), "no `reloaded` in {output}");
    println!(
        "cold fill, from the start of lvsd: {filled:.2?}; reload of one change: {reloaded:.2?}"
    );
    let listing = site.lvsadm("-L -n")?;
    let servers: Vec<_> = rows(&listing)
        .into_iter()
        .filter(lvs_testbed::listing::Row::is_server)
        .collect();
    let status =
        || lvsd(&site, "status").map(|output| output.chars().take(2000).collect::<String>());
    ensure!(
        servers.len() == SERVERS,
        "not all servers are listed: {}: {:?}",
        servers.len(),
        status()
    );
    let heavy = servers
        .iter()
        .filter(|row| row.number(1).is_ok_and(|weight| weight == 3));
    ensure!(heavy.count() == 1);
    daemon.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// Reloads a thousand random edits of one service while clients use another one. The final state
/// equals that of a start with the last file.
#[test]
#[ignore = "long"]
fn thousand_reloads_break_no_connection_and_result_equals_cold_start() -> Result<()> {
    let site = site("reloads")?;
    let path = configure(&site, 3)?;
    let base = fs::read_to_string(&path)?;
    let mut daemon = start(
        &site,
        &["--state", &site.testbed.dir().display().to_string()],
    )?;
    wait_usable(&site, 3, &daemon)?;
    let mut load = site.load();
    load.sizes = vec![1000, 20_011];
    load.concurrency = 20;
    load.keepalive = true;
    load.pause_ms = 5;
    let steady = site.client.steady_load(&load)?;
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % bound
    };
    let other = site.service(81);
    for _ in 0..1000 {
        let scheduler = ["rr", "wlc", "sh", "mh"][usize::try_from(next(4))?];
        let mut text = format!(
            "{base}\n[[service]]\naddress = \"{other}\"\nscheduler = \"{scheduler}\"\nforward = \"nat\"\ndrain = \"0s\"\n"
        );
        for host in 0..next(20) {
            write!(
                text,
                "[[service.server]]\naddress = \"10.9.{}.{host}:80\"\n",
                next(2)
            )?;
            if scheduler == "wlc" {
                writeln!(text, "weight = {}", next(5))?;
            }
        }
        fs::write(&path, text)?;
        daemon.signal(Signal::SIGHUP)?;
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = lvsd(&site, "reload --force")?;
    ensure!(
        output.contains("reloaded"),
        "the reload failed: {output}\n{}",
        daemon.log()
    );
    steady.wait_for_more(1000)?;
    let report = steady.finish_ok()?;
    ensure!(
        report.ok > 1000,
        "at most 1000 requests were answered: {report:?}"
    );
    let rules = |site: &Site| -> Result<Vec<String>> {
        let mut rules: Vec<String> = site.lvsadm("-S -n")?.lines().map(str::to_owned).collect();
        rules.sort();
        Ok(rules)
    };
    let after = rules(&site)?;
    daemon.stop_ok(Signal::SIGINT)?;
    let mut cold = start(
        &site,
        &["--state", &site.testbed.dir().display().to_string()],
    )?;
    soon("the state to equal that of a cold start", || {
        rules(&site).is_ok_and(|now| now == after)
    })
    .with_context(|| format!("{after:#?}\n{:#?}", rules(&site)))?;
    cold.stop_ok(Signal::SIGINT)?;
    Ok(())
}

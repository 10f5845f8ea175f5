//! The commands of `lvsadm` that ipvsadm lacks, with real servers, and with the programs that read
//! their output.

use crate::common;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::listing::rows;
use lvs_testbed::{Forward, Proc, SiteOptions, programs, soon};
use serde_json::Value;

/// Time limit of each step.
const SOON: Duration = Duration::from_secs(20);

fn options(label: &str) -> SiteOptions {
    SiteOptions::with_servers(label, Forward::Nat, 2)
}

#[test]
fn lvsadm_drain_waits_for_last_connection_or_deadline() -> Result<()> {
    let site = common::site(options("drain"))?;
    site.add_service(80, "rr")?;
    let (service, server) = (site.service(80), format!("{}:80", site.real_address(0)));
    let mut open = site.load();
    open.sizes = vec![1000];
    open.keepalive = true;
    open.concurrency = 2;
    open.pause_ms = 20;
    let steady = site.client.steady_load(&open)?;
    soon("the director to list two connections", || {
        site.lvsadm("-L -n -c")
            .is_ok_and(|text| text.matches("ESTABLISHED").count() == 2)
    })?;
    // The drain ends at its deadline, because a connection continues.
    let late = site.director.sh(&format!(
        "{} drain {service} {server} --deadline 1s --undo || echo status $?",
        programs::find("lvsadm")?.display()
    ))?;
    ensure!(
        late.contains("1 active") && late.contains("the server has weight 1 again"),
        "no `1 active` or no `the server has weight 1 again` in {late}"
    );
    ensure!(
        late.ends_with("status 1\n"),
        "the output of lvsadm drain does not end with `status 1`: {late}"
    );

    // An interrupted drain does not restore the weight. Processes in the background of a script
    // ignore SIGINT, so env restores its default action.
    let lvsadm = programs::find("lvsadm")?.display().to_string();
    let service_text = service.to_string();
    let arguments = [
        "--default-signal=INT",
        &lvsadm,
        "drain",
        &service_text,
        &server,
    ];
    let mut drain = site.director.spawn("env", &arguments)?;
    let drained = || {
        site.lvsadm("--json -L")
            .is_ok_and(|text| text.contains("\"weight\":0"))
    };
    soon("the weight to be 0", drained)?;
    drain.stop(nix::sys::signal::Signal::SIGINT)?;
    ensure!(
        drained(),
        "the interrupted drain restored the weight: {}",
        drain.log()
    );
    site.lvsadm(&format!("-e -t {service} -r {server} -m"))?;

    let lvsadm = programs::find("lvsadm")?;
    let arguments = [
        "drain",
        &service.to_string(),
        &server,
        "--deadline",
        "300s",
        "--active",
        "--delete",
    ];
    let mut drain = site.director.spawn(lvsadm, &arguments)?;
    soon("the weight to be 0", || {
        site.lvsadm("--json -L")
            .is_ok_and(|text| text.contains("\"weight\":0"))
    })?;
    ensure!(drain.is_running(), "the drain ended early: {}", drain.log());
    steady.finish_ok()?;
    let status = drain.wait(SOON)?;
    ensure!(
        status.success() && drain.log().contains("drained and deleted"),
        "the drain failed or did not delete the server: {}",
        drain.log()
    );
    let services: Value = serde_json::from_str(&site.lvsadm("--json -L")?)?;
    let servers = services[0]["servers"]
        .as_array()
        .context("the service has no list of servers")?;
    ensure!(
        servers.len() == 1,
        "the drained server is still listed: {services}"
    );
    Ok(())
}

#[test]
fn lvsadm_explain_agrees_with_later_decision_and_changes_no_counters() -> Result<()> {
    let site = common::site(options("explain"))?;
    site.add_service(80, "rr")?;
    let service = site.service(80);
    let client = common::client_address(&site)?;
    for _ in 0..4 {
        let reported = site.lvsadm(&format!("explain tcp {client}:1000 {service} --json"))?;
        let reported: Value = serde_json::from_str(&reported)?;
        let server = reported["server"]
            .as_str()
            .context("the report names no server")?;
        let id = site.client.sh(&format!("curl -sS http://{service}/id"))?;
        let number: usize = id.trim().trim_start_matches("rs").parse()?;
        ensure!(
            server == format!("{}:80", site.real_address(number - 1)),
            "the packet went to another server than explain reported: {reported} {id}"
        );
    }
    let listed = site.lvsadm("-L -n -c")?;
    let connection = &lvs_testbed::listing::connections(&listed)?[0];
    let reported = site.lvsadm(&format!("explain tcp {} {service}", connection.source))?;
    ensure!(
        reported.contains("belongs to a connection"),
        "no `belongs to a connection` in {reported}"
    );
    let reported = site.lvsadm(&format!("explain udp {client}:1000 {service}"))?;
    ensure!(
        reported.contains("none: no service for"),
        "no `none: no service for` in {reported}"
    );

    // A rule sets mark 7 on the packet, and the service of mark 7 receives it. The scheduler of this
    // service has a table.
    let vip = site.vip;
    let to = format!("--destination {vip} --protocol tcp --ports 8000-8010");
    site.lvsadm("-A -f 7 -s sh")?;
    site.lvsadm(&format!("-a -f 7 -r {}:80 -m", site.real_address(1)))?;
    site.lvsadm(&format!("mark add {to} --interface eth1 --mark 9"))?;
    site.lvsadm(&format!("mark add {to} --mark 7"))?;
    let before = site.lvsadm("mark list")?;
    let question = format!("explain tcp 192.0.2.1:1000 {vip}:8001");
    let reported = site.lvsadm(&question)?;
    for line in [
        "mark        7: rule 2 (",
        "rule 1 if the packet arrives on eth1",
        "the packet has the mark 7",
        // The upper eight bits of 0xc0000201 * 0x61c88647, as the kernel has it.
        "slot        50 of 256",
        &format!("goes to {}:80: sh chooses it", site.real_address(1)),
    ] {
        ensure!(
            reported.contains(line),
            "a line is missing: {line}: {reported}"
        );
    }
    let reported = site.lvsadm(&format!("{question} --interface eth1"))?;
    ensure!(
        reported.contains("mark        9: rule 1 ("),
        "no `mark 9: rule 1 (` in {reported}"
    );
    let reported = site.lvsadm(&format!("{question} --mark 0"))?;
    ensure!(
        !reported.contains("mark ") && reported.contains("none: no service for"),
        "unexpected `mark ` or no `none: no service for` in {reported}"
    );
    ensure!(
        site.lvsadm("mark list")? == before,
        "`lvsadm explain` changed the counters of the mark rules"
    );
    Ok(())
}

#[test]
#[ignore = "needs tshark"]
fn captures_are_read_by_tshark() -> Result<()> {
    let site = common::site(options("capture"))?;
    site.add_service(80, "rr")?;
    let file = site.testbed.dir().join("capture.pcapng");
    let path = file.display().to_string();
    let arguments = [
        "capture",
        "tcp",
        "port",
        "80",
        "-w",
        path.as_str(),
        "-c",
        "8",
    ];
    let mut capture = site.director.spawn(programs::find("lvsadm")?, &arguments)?;
    let service = site.service(80);
    // The capture begins a moment after the program does.
    soon("the capture to end after eight packets", || {
        let _ = site.client.sh(&format!("curl -sS http://{service}/id"));
        !capture.is_running()
    })?;
    ensure!(
        capture.log().contains("8 packets"),
        "no `8 packets` in {}",
        capture.log()
    );
    let read = site.director.sh(&format!(
        "tshark -r {path} -T fields -e frame.comment -e frame.interface_name -e tcp.port 2>/dev/null"
    ))?;
    ensure!(
        read.lines().count() == 8,
        "the number of captured packets is not 8: {read}"
    );
    ensure!(
        read.lines().any(|line| line.starts_with("forwarded to ")
            && line.contains("by NAT")
            && line.contains("eth0")),
        "the captured request is not explained: {read}"
    );
    ensure!(
        read.lines().any(
            |line| line.starts_with("answer, sent to the client from") && line.contains("eth1")
        ),
        "the captured reply is not explained: {read}"
    );
    // After the capture has ended, the dataplane still forwards packets.
    let load = site.load();
    let report = site.client.load(&lvs_testbed::LoadOptions {
        requests: 20,
        ..load
    })?;
    report.all_ok(20)
}

#[test]
fn doctor_reports_foreign_filter_missing_server_and_bypassing_replies() -> Result<()> {
    let site = common::site(options("doctor"))?;
    let lvsadm = programs::find("lvsadm")?.display().to_string();
    let doctor = |site: &lvs_testbed::Site| {
        site.director
            .sh(&format!("{lvsadm} doctor || echo status $?"))
    };
    site.add_service(80, "rr")?;
    let service = site.service(80);
    site.client.sh(&format!("curl -sS http://{service}/id"))?;
    // With the kernel's IPVS, this rule would drop the packets of the service.
    site.director.sh(
        "nft 'add table ip filter; add chain ip filter input { type filter hook input priority 0; }; add rule ip filter input tcp dport 80 drop'",
    )?;
    // The replies of one server bypass the director, and one service has no servers.
    site.servers[0].sh("ip route del default")?;
    site.lvsadm(&format!("-A -t {}:81 -s rr", site.vip))?;
    site.lvsadm(&format!("-d -t {service} -r {}:80", site.real_address(1)))?;
    site.client.sh(&format!(
        "for i in 1 2 3 4; do curl -sS --max-time 5 http://{service}/id & done; wait; curl -sS http://{}:81/ || true",
        site.vip
    ))?;
    // The dataplane reads the counters of attempts every two seconds.
    let expected = [
        "chain input",
        "has no server",
        "of TCP 192.0.2.10:81): no_server: No real",
        "got no answer in the last minute",
        "is this director its default",
        "status 1",
    ];
    let mut missing = Vec::new();
    let found = soon("doctor to report all expected findings", || {
        let found = doctor(&site).unwrap_or_default();
        let found = found.split_whitespace().collect::<Vec<_>>().join(" ");
        missing = expected.to_vec();
        missing.retain(|words| !found.contains(words));
        missing.is_empty()
    });
    found.with_context(|| format!("{missing:?} are missing in {:?}", doctor(&site)))?;
    let drops = site.lvsadm("drops")?;
    ensure!(drops.contains("no_server"), "no `no_server` in {drops}");
    let drops: Value = serde_json::from_str(&site.lvsadm("drops --all --json")?)?;
    let all = drops.as_array().context("the JSON value is not a list")?;
    let reported = |reason: &Value, text: &str| reason[text].as_str().is_some_and(|t| t.len() > 10);
    ensure!(
        all.len() > 20
            && all
                .iter()
                .all(|reason| reported(reason, "help") && reported(reason, "fix")),
        "a drop reason lacks its help text or its fix: {drops}"
    );
    let value = site.lvsadm("sysctl net.ipv4.vs.conn_reuse_mode=0 conn_reuse_mode")?;
    ensure!(
        value == "conn_reuse_mode = 0\n",
        "lvsadm sysctl did not print `conn_reuse_mode = 0`: {value}"
    );
    Ok(())
}

/// Waits until a screen shows `what`.
fn shows(screen: &Proc, what: &str) -> Result<()> {
    soon(&format!("the screen to show {what:?}"), || {
        screen.log().contains(what)
    })
    .with_context(|| format!("{:?}", screen.log()))
}

#[test]
fn lvsadm_watch_shows_rates_and_restores_terminal() -> Result<()> {
    let site = common::site(options("watch"))?;
    site.add_service(80, "rr")?;
    let mut load = site.load();
    load.sizes = vec![1000];
    load.pause_ms = 5;
    let steady = site.client.steady_load(&load)?;
    soon("the director to have connections", || {
        let listing = site.lvsadm("-L -n --stats --exact").unwrap_or_default();
        let all = rows(&listing);
        all.first()
            .is_some_and(|row| row.number(0).is_ok_and(|count| count > 0))
    })?;
    let rate = || -> Result<f64> {
        let plain = site.lvsadm("watch --count 2 --interval 1")?;
        let last = plain
            .split("\n\n")
            .nth(1)
            .context("the screen has no second table")?;
        let service = last
            .lines()
            .find(|line| line.starts_with("TCP "))
            .context("the second table does not list the service")?;
        let rate = service
            .split_whitespace()
            .nth(5)
            .context("the row of the service has no rate")?;
        Ok(rate.trim_end_matches('K').parse()?)
    };
    soon("lvsadm watch to show a rate above 1", || {
        rate().is_ok_and(|rate| rate > 1.0)
    })
    .with_context(|| format!("{:?}", rate()))?;
    // A terminal shows colours and uses the alternate screen; q restores the previous screen.
    let lvsadm = programs::find("lvsadm")?.display().to_string();
    let words = format!("exec script -qec '{lvsadm} watch --interval 0.5' /dev/null");
    let mut screen = site
        .director
        .spawn("env", &["TERM=xterm", "sh", "-c", &words])?;
    shows(&screen, "by rate")?;
    screen.send("s")?;
    shows(&screen, "by bytes")?;
    screen.send("q")?;
    screen.wait(SOON)?;
    let shown = screen.log();
    steady.finish_ok()?;
    ensure!(
        shown.contains("\x1b[1mTCP"),
        "the service is not in bold: {shown:?}"
    );
    ensure!(
        shown.trim_end().ends_with("\x1b[?25h\x1b[?1049l"),
        "the terminal was not restored: {shown:?}"
    );
    // Lines are as wide as the window, which may change.
    let wider = site.director.dir().join("wider");
    let words = format!(
        "exec script -qec 'stty cols 50 rows 20; \
         (until [ -e {} ]; do sleep 0.1; done; stty cols 60 < /dev/tty) & {lvsadm} watch --interval 0.3' /dev/null",
        wider.display()
    );
    let plain = ["TERM=xterm", "NO_COLOR=1", "sh", "-c", &words];
    let mut screen = site.director.spawn("env", &plain)?;
    let is_wide = |screen: &Proc, width: usize| {
        let widths = || -> Vec<usize> {
            let shown = screen.log();
            let lines = shown.split("\r\n").filter(|line| line.starts_with("TCP "));
            lines
                .map(|line| line.find('\x1b').unwrap_or(line.len()))
                .collect()
        };
        soon(&format!("the terminal to have a width of {width}"), || {
            widths().contains(&width)
        })
        .with_context(|| format!("{:?} {:?}", widths(), screen.log()))
    };
    is_wide(&screen, 50)?;
    std::fs::write(&wider, "")?;
    is_wide(&screen, 60)?;
    screen.send("q")?;
    screen.wait(SOON)?;
    let shown = screen.log();
    ensure!(
        !shown.contains("\x1b[1m"),
        "text is in bold despite NO_COLOR: {shown:?}"
    );
    // A terminal without cursor control gets one table after the other.
    let dumb = site.director.sh(&format!(
        "TERM=dumb timeout 120 script -qec '{lvsadm} watch --interval 0.2 --count 2' /dev/null < /dev/null"
    ))?;
    ensure!(
        dumb.matches("by rate").count() == 2 && !dumb.contains('\x1b'),
        "the terminal without cursor control got control characters, or not two tables: {dumb:?}"
    );
    Ok(())
}

#[test]
fn atomic_restore_applies_all_rules_or_none() -> Result<()> {
    let site = common::site(options("atomic"))?;
    site.add_service(80, "rr")?;
    let before = site.lvsadm("-S -n")?;
    let lvsadm = programs::find("lvsadm")?.display().to_string();
    let restore = |rules: &str| {
        site.director.sh(&format!(
            "printf -- '{rules}' | {lvsadm} -R --atomic 2>&1 && echo status 0 || echo status $?"
        ))
    };
    for bad in [
        "-C\\n-A -t 192.0.2.1:80 -s rr\\n-A -t 192.0.2.1:80 -s rr\\n",
        "-C\\n-A -t 192.0.2.1:80 -s nosuch\\n",
        "-C\\n-A -t 192.0.2.1:80 --wrong\\n",
        "-C\\n-L\\n",
    ] {
        let reported = restore(bad)?;
        ensure!(
            reported.contains("line ") && reported.contains("nothing was changed"),
            "{bad}: no `line ` or no `nothing was changed` in {reported}"
        );
        ensure!(
            reported.ends_with("status 255\n"),
            "{bad}: the output of lvsadm -R does not end with `status 255`: {reported}"
        );
        ensure!(
            site.lvsadm("-S -n")? == before,
            "the rules changed after an invalid line: {bad}"
        );
    }
    let reported = restore(
        "# comment\\n-C\\n-A -t 192.0.2.1:80 -s rr\\n-a -t 192.0.2.1:80 -r 192.0.2.9:80 -m\\n",
    )?;
    ensure!(
        reported == "status 0\n",
        "lvsadm -R refused valid rules: {reported}"
    );
    let after = site.lvsadm("-S -n")?;
    ensure!(
        after.starts_with("-A -t 192.0.2.1:80 -s rr\n") && after.lines().count() == 2,
        "the rules were not replaced: {after}"
    );
    Ok(())
}

#[test]
#[ignore = "needs man"]
fn completions_and_manual_page_are_accepted_by_bash_and_man() -> Result<()> {
    let lvsadm = programs::find("lvsadm")?;
    let print = |words: &[&str]| -> Result<String> {
        let output = std::process::Command::new(&lvsadm).args(words).output()?;
        ensure!(
            output.status.success(),
            "lvsadm failed: {words:?}: {output:?}"
        );
        Ok(String::from_utf8(output.stdout)?)
    };
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("completion");
    std::fs::write(&file, print(&["completions", "bash"])?)?;
    let script = format!(
        ". {}; COMP_WORDS=(lvsadm dr); COMP_CWORD=1; _lvsadm; echo ${{COMPREPLY[@]}}; \
         COMP_WORDS=(lvsadm drain --d); COMP_CWORD=2; _lvsadm; echo ${{COMPREPLY[@]}}; \
         COMP_WORDS=(lvsadm -A -t x -s wr); COMP_CWORD=5; _lvsadm; echo ${{COMPREPLY[@]}}",
        file.display()
    );
    let output = std::process::Command::new("bash")
        .args(["-c", &script])
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        text == "drain drops\n--deadline --delete\nwrr\n",
        "the completions differ: {text} {output:?}"
    );
    let page = print(&["man"])?;
    std::fs::write(dir.path().join("lvsadm.8"), &page)?;
    let output = std::process::Command::new("man")
        .arg("--warnings=w")
        .arg(dir.path().join("lvsadm.8"))
        .env("MANWIDTH", "80")
        .output()
        .context("cannot start man: install the package man-db")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.stderr.is_empty() && text.contains("lvsadm"),
        "man reports errors or prints no page: {output:?}"
    );
    Ok(())
}

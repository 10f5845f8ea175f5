//! Signals that operators and terminals send, and that must stop neither the dataplane nor `lvsd`.

use crate::common;

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Proc, Site, SiteOptions, Vip, programs, wait_until};
use nix::sys::signal::Signal;

const PATIENCE: Duration = Duration::from_secs(30);
/// HUP, USR1, USR2, PIPE, ALRM, XFSZ, VTALRM, PROF, IO, PWR, and real-time signals.
const SIGNALS: &str = "1 10 12 13 14 25 26 27 29 30 35 40 64";

fn site(label: &str) -> Result<Site> {
    let mut options = SiteOptions::with_servers(label, Forward::Nat, 1);
    options.vip = Vip::Dataplane;
    Site::new(options)
}

/// Sends all [`SIGNALS`] to a process, one after another.
fn shower(site: &Site, pid: u32) -> Result<()> {
    site.director
        .sh(&format!(
            "for s in {SIGNALS}; do kill -$s {pid} || exit 1; done"
        ))
        .map(drop)
}

/// Whether the process handles or ignores SIGHUP, according to the lines `masks` of
/// `/proc/PID/status`. `nsenter`, before it executes the program, does neither.
fn minds_hangup(pid: u32, masks: &[&str]) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let minds = |name: &&str| {
        let mask = status.lines().find_map(|line| line.strip_prefix(*name));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .is_some_and(|mask| mask & 1 != 0)
    };
    masks.iter().any(minds)
}

#[test]
#[ignore = "long"]
fn dataplane_and_state_keeper_continue_after_unused_signals() -> Result<()> {
    for (label, words) in [
        ("sigkernel", &[][..]),
        ("sigkeeper", &["--fast-path", "off", "--warm-restart", "on"]),
    ] {
        let mut site = site(label)?;
        site.start_dataplane(words)?;
        site.add_service(80, "rr")?;
        let mut download = common::Download::start(&site)?;
        let pid = site
            .dataplane
            .as_ref()
            .context("no dataplane was started")?
            .pid();
        shower(&site, pid)?;
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        for keeper in children.split_whitespace() {
            shower(&site, keeper.parse()?)?;
        }
        common::says(&site, "SIGHUP is ignored")?;
        site.lvsadm("-L -n")?;
        download.goes_on()?;
        let after = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        ensure!(
            after == children,
            "{label}: the child processes changed: {children:?} {after:?}"
        );
        ensure!(!words.contains(&"--warm-restart") || !children.is_empty());
        download.finish()?;
        // SIGQUIT has the same effect as SIGTERM.
        let mut dataplane = site.dataplane.take().context("no dataplane was started")?;
        dataplane.stop_ok(Signal::SIGQUIT)?;
        let program = programs::find("lvs-dataplane")?;
        let left = site.director.run(program, &["--cleanup"])?;
        ensure!(
            left.contains("found no state of a killed dataplane"),
            "{label}: no `found no state of a killed dataplane` in {left}"
        );
    }
    Ok(())
}

/// When a terminal closes, the kernel sends SIGHUP to the shell, and the shell to its background
/// jobs.
#[test]
fn dataplane_survives_closed_terminal() -> Result<()> {
    let site = site("sigterminal")?;
    let program = programs::find("lvs-dataplane")?.display().to_string();
    let number = site.testbed.dir().join("number").display().to_string();
    // The shell runs at a pseudo-terminal, which is closed when `script` is killed. The shell reads
    // its commands from the terminal: with a command as an argument, it would not forward SIGHUP to
    // its jobs.
    let words = ["-q", "-c", "bash --norc -i", "/dev/null"];
    let mut terminal = site.director.spawn("script", &words)?;
    terminal.send(&format!(
        "{program} --own-vips --interface eth0 & echo $! $$ > {number}\n"
    ))?;
    wait_until(
        "the dataplane to answer on its control socket",
        PATIENCE,
        || site.director.has_dataplane(),
    )
    .with_context(|| terminal.log())?;
    wait_until("the shell to write the process ids", PATIENCE, || {
        fs::read_to_string(&number).is_ok_and(|text| text.ends_with('\n'))
    })?;
    let text = fs::read_to_string(&number)?;
    let (pid, shell) = text
        .trim()
        .split_once(' ')
        .context("the shell did not write two process ids")?;
    terminal.signal(Signal::SIGKILL)?;
    terminal.wait(PATIENCE)?;
    // The shell receives SIGHUP from its terminal, and forwards it to its children.
    wait_until("the shell to exit", PATIENCE, || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.split(' ').nth(3) != Some(shell)
    })?;
    let answer = site.lvsadm("-L -n");
    site.director.sh(&format!("kill {pid} || true"))?;
    answer.map(drop)
}

/// The signals arrive while lvsd waits for the content of its configuration file, which is a named
/// pipe.
#[test]
fn sighup_during_start_of_lvsd_causes_reload() -> Result<()> {
    let site = site("siglvsd")?;
    let file = site.testbed.dir().join("lvsd.toml");
    let path = file.display().to_string();
    site.director.run("mkfifo", &[&path])?;
    let program = programs::find("lvsd")?;
    let mut lvsd: Proc = site.director.spawn(&program, &["--config", &path])?;
    // lvsd ignores SIGHUP before it parses its arguments.
    wait_until("lvsd to ignore SIGHUP", PATIENCE, || {
        minds_hangup(lvsd.pid(), &["SigIgn:", "SigCgt:"])
    })?;
    shower(&site, lvsd.pid())?;
    wait_until("lvsd to handle SIGHUP", PATIENCE, || {
        minds_hangup(lvsd.pid(), &["SigCgt:"])
    })?;
    shower(&site, lvsd.pid())?;
    let text = |port: u16| {
        format!(
            "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n\n[[service]]\nname = \"web\"\naddress = \"{}:{port}\"\n\
             forward = \"nat\"\n\n[[service.server]]\naddress = \"{}:80\"\n",
            site.vip,
            site.real_address(0)
        )
    };
    // The read in progress ends; every later read opens another file.
    let mut pipe = fs::File::options();
    pipe.write(true).custom_flags(nix::libc::O_NONBLOCK);
    let mut opened = None;
    wait_until("lvsd to have opened its file", PATIENCE, || {
        opened = pipe.open(&file).ok();
        opened.is_some()
    })
    .with_context(|| lvsd.log())?;
    let mut reads = opened.context("the pipe was not opened")?;
    let next = file.with_extension("next");
    fs::write(&next, text(81))?;
    fs::rename(&next, &file)?;
    reads.write_all(text(80).as_bytes())?;
    drop(reads);
    let service = format!("{}:81 ", site.vip);
    let mut ended = false;
    wait_until("the file to be read again", PATIENCE, || {
        ended = !lvsd.is_running();
        let listed = site.lvsadm("-L -n");
        ended || listed.is_ok_and(|output| output.contains(&service))
    })
    .with_context(|| lvsd.log())?;
    ensure!(!ended, "lvsd exited: {}", lvsd.log());
    lvsd.stop(Signal::SIGINT)?;
    Ok(())
}

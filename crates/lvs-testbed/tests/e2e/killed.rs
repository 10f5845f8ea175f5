//! Steady downloads, each byte compared, while their dataplane is killed and replaced by another
//! one. No download fails. Downloads on the kernel fast path continue while no dataplane runs; all
//! other downloads pause.
//!
//! `LVS_OTHER_BIN_DIR` names a directory with the dataplane of another version. This dataplane
//! replaces the killed one, and is killed, too.

use crate::common;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lvs_testbed::paced::SLICE;
use lvs_testbed::{Forward, LoadOptions, Site, SiteOptions, Vip, soon};
use nix::sys::signal::Signal;

/// Bytes a second for each download.
const RATE: u64 = 60_000;
/// Number of simultaneous downloads of a test; measurements use more.
const FEW: u64 = 60;
/// Time between a kill and the start of the next dataplane.
const DEAD: Duration = Duration::from_secs(5);
/// Time between the takeover by a dataplane of another version and its kill.
const ALIVE: Duration = Duration::from_secs(5);

/// The means by which connections survive while no dataplane runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The kernel fast path.
    Kernel,
    /// A separate process that keeps the connection table.
    StateKeeper,
    /// A process that keeps a table for each of several packet workers.
    Workers,
    /// A process that keeps the connection table and the device through which the host routes
    /// packets.
    Device,
}

impl By {
    const fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Kernel => &["--fast-path", "on"],
            Self::StateKeeper => &["--fast-path", "off", "--warm-restart", "on"],
            Self::Workers => &[
                "--fast-path",
                "off",
                "--warm-restart",
                "on",
                "--workers",
                "3",
            ],
            Self::Device => &["--warm-restart", "on", "--backend", "tun"],
        }
    }
}

/// The event during the downloads.
#[derive(Clone, Copy, Debug)]
enum End<'a> {
    /// The dataplane is not killed.
    None,
    /// The dataplane is killed, and replaced by one of the same version.
    Killed,
    /// The dataplane is killed and replaced by the version in this directory, which is then killed
    /// and replaced by the first version.
    Replaced(&'a str),
}

/// Runs `number` simultaneous downloads, none of which may fail. Returns the longest pause after all
/// downloads have started, minus the server's sending interval.
fn downloads(
    label: &str,
    (forward, by): (Forward, By),
    number: u64,
    end: End<'_>,
) -> Result<Duration> {
    if by == By::Kernel {
        super::fast_path::require_permission()?;
    }
    let mut options = SiteOptions::with_servers(label, forward, 2);
    options.paced = Some(RATE);
    // Clients and servers use another processor than the measured dataplane.
    let real_time = number > FEW;
    options.real_time = real_time;
    if by == By::Device {
        options.ip_forward = true;
        options.vip = Vip::Dataplane;
    }
    let mut site = Site::new(options)?;
    start(&mut site, by, None)?;
    site.add_service(80, "rr")?;
    let mut load = LoadOptions::new(format!("{}:80", site.vip).parse()?);
    load.requests = number;
    load.concurrency = number;
    let seconds = match end {
        End::Replaced(_) => 30,
        _ => 20,
    };
    load.sizes = vec![RATE * seconds];
    load.timeout_ms = 60_000;
    load.real_time = real_time;
    let client = site.client.clone();
    let begun = Instant::now();
    let running = thread::spawn(move || client.load(&load));
    let all = || {
        let all = match by {
            By::Kernel => requests(&site).is_ok_and(|requests| requests > 20 * number),
            By::StateKeeper | By::Workers | By::Device => {
                established(&site).is_ok_and(|connections| connections == number)
            }
        };
        all || running.is_finished()
    };
    soon("all downloads to run", all)?;
    let opening = begun.elapsed();
    match end {
        End::None => {}
        End::Killed => replace(&mut site, by, None)?,
        End::Replaced(other) => {
            replace(&mut site, by, Some(other))?;
            thread::sleep(ALIVE);
            replace(&mut site, by, None)?;
        }
    }
    let report = running
        .join()
        .map_err(|_| anyhow::anyhow!("the thread panicked"))??;
    report.all_ok(number)?;
    // The opening of connections itself causes pauses in the first second.
    let by_second = &report.stalls_by_second;
    let open = usize::try_from(opening.as_secs() + 1)?.min(by_second.len());
    let pause = by_second[open..].iter().max().copied().unwrap_or(0);
    let pause = Duration::from_millis(pause).saturating_sub(SLICE);
    println!(
        "{label}: {} downloads, opened in {opening:.1?}; longest pause after that, minus the server's sending interval of {SLICE:?}: {pause:?}; longest pause in each second, in ms: {by_second:?}",
        report.ok,
    );
    Ok(pause)
}

/// Number of packets to servers that the kernel fast path has forwarded.
fn requests(site: &Site) -> Result<u64> {
    let [requests] = common::drops(site, ["kernel_requests"])?;
    Ok(requests)
}

pub(super) fn established(site: &Site) -> Result<u64> {
    let listing = site.lvsadm("-L -n -c")?;
    Ok(listing.matches("ESTABLISHED").count() as u64)
}

/// Starts a dataplane, from `directory` if it is set.
fn start(site: &mut Site, by: By, directory: Option<&str>) -> Result<()> {
    let words = by.arguments();
    let mut launcher = Vec::new();
    if site.options.real_time {
        launcher.extend(["taskset", "--cpu-list", "1-63"]);
    }
    let exec = directory.map(|directory| {
        let program = Path::new(directory).join("lvs-dataplane");
        format!("exec {} \"$@\"", program.display())
    });
    if let Some(exec) = &exec {
        launcher.extend(["sh", "-c", exec]);
    }
    site.start_dataplane_by(&launcher, words)
}

/// Kills the dataplane, and replaces it by another one after a pause.
fn replace(site: &mut Site, by: By, directory: Option<&str>) -> Result<()> {
    site.end_dataplane(Signal::SIGKILL)?;
    thread::sleep(DEAD);
    let started = Instant::now();
    start(site, by, directory)?;
    let answered = started.elapsed();
    let log = common::says(site, "took over")?;
    let output = log.lines().find(|line| line.contains("took over"));
    println!(
        "{} ({answered:?} after its start)",
        output.context("the log does not report a takeover")?
    );
    Ok(())
}

/// Prints the longest pause of downloads with a killed dataplane, and without.
fn compared(label: &str, how: (Forward, By)) -> Result<()> {
    const MANY: u64 = 500;
    let quiet = downloads(&format!("{label}q"), how, MANY, End::None)?;
    let killed = downloads(&format!("{label}k"), how, MANY, End::Killed)?;
    println!(
        "{how:?}: longest pause, minus the server's sending interval: {killed:?} with a killed dataplane, {quiet:?} without",
    );
    Ok(())
}

#[test]
fn downloads_on_fast_path_survive_killed_dataplane() -> Result<()> {
    for (label, forward) in [("inkf", Forward::Nat), ("inkff", Forward::FullNat)] {
        downloads(label, (forward, By::Kernel), FEW, End::Killed)?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn downloads_with_state_keeper_survive_killed_dataplane() -> Result<()> {
    for (label, forward) in [("holdn", Forward::Nat), ("holdd", Forward::Dr)] {
        downloads(label, (forward, By::StateKeeper), FEW, End::Killed)?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn downloads_of_several_workers_survive_killed_dataplane() -> Result<()> {
    for (label, forward) in [("holdw", Forward::Nat), ("holdv", Forward::Dr)] {
        downloads(label, (forward, By::Workers), FEW, End::Killed)?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn downloads_over_tun_device_survive_killed_dataplane() -> Result<()> {
    for (label, forward) in [("holdp", Forward::Nat), ("holdq", Forward::Tun)] {
        downloads(label, (forward, By::Device), FEW, End::Killed)?;
    }
    Ok(())
}

/// Connections move to a dataplane with other numbers and sizes of tables, and back.
#[test]
#[ignore = "long"]
fn downloads_survive_killed_dataplane_with_changed_tables() -> Result<()> {
    let mut options = SiteOptions::with_servers("holdo", Forward::Nat, 2);
    options.paced = Some(RATE);
    let mut site = Site::new(options)?;
    start(&mut site, By::StateKeeper, None)?;
    site.add_service(80, "rr")?;
    let number = FEW;
    let mut load = LoadOptions::new(format!("{}:80", site.vip).parse()?);
    load.requests = number;
    load.concurrency = number;
    load.sizes = vec![RATE * 60];
    load.timeout_ms = 60_000;
    let client = site.client.clone();
    let running = thread::spawn(move || client.load(&load));
    let all = || established(&site).is_ok_and(|connections| connections == number);
    soon("all downloads to be established", all)?;
    for words in [
        &["--max-connections", "5000"][..],
        &["--workers", "3"],
        &["--workers", "2", "--max-connections", "5000"],
        &[],
    ] {
        site.end_dataplane(Signal::SIGKILL)?;
        site.start_dataplane(&[&["--warm-restart", "on"], words].concat())?;
        common::says(&site, &format!("connections={number}"))
            .with_context(|| format!("{words:?}"))?;
        thread::sleep(Duration::from_secs(2));
    }
    let report = running
        .join()
        .map_err(|_| anyhow::anyhow!("the thread panicked"))??;
    report.all_ok(number)
}

/// The state keeper survives killed dataplanes, also if the next one has a table of another size. It
/// exits after `--cleanup` and after an orderly stop.
#[test]
fn state_keeper_survives_killed_dataplanes_and_ends_with_stop_or_cleanup() -> Result<()> {
    let mut site = Site::new(SiteOptions::new("holde", Forward::Nat))?;
    let director = site.director.clone();
    let keepers = || director.sh("ss -xlH | grep -c lvs-state || true");
    let gone = || keepers().is_ok_and(|keepers| keepers.trim() == "0");
    let by = By::StateKeeper;
    start(&mut site, by, None)?;
    site.add_service(80, "rr")?;
    ensure!(
        keepers()?.trim() == "1",
        "the number of state keepers is not 1: {}",
        keepers()?
    );
    let program = lvs_testbed::programs::find("lvs-dataplane")?;
    let program = program.display().to_string();
    let refused = director.sh(&format!("{program} --warm-restart on 2>&1 || true"))?;
    ensure!(
        refused.contains("another dataplane"),
        "no `another dataplane` in {refused}"
    );
    let kill = |site: &mut Site, signal| -> Result<()> { site.end_dataplane(signal) };
    kill(&mut site, Signal::SIGKILL)?;
    ensure!(
        keepers()?.trim() == "1",
        "the number of state keepers is not 1: {}",
        keepers()?
    );
    // While no dataplane runs, the rules keep the packets from the host.
    let rules = director.sh("nft list tables")?;
    ensure!(rules.contains("lvs-"), "no `lvs-` in {rules}");
    site.start_dataplane(&["--warm-restart", "on", "--max-connections", "5000"])?;
    common::says(&site, "took over")?;
    ensure!(
        site.lvsadm("-L -n")?.contains(":80"),
        "the service is not listed any more"
    );
    kill(&mut site, Signal::SIGKILL)?;
    let output = director.sh(&format!("{program} --cleanup"))?;
    ensure!(
        output.starts_with("removed the connections"),
        "the output of --cleanup does not begin with `removed the connections`: {output}"
    );
    soon("the state keeper to end", gone)?;
    start(&mut site, by, None)?;
    ensure!(
        !site.lvsadm("-L -n")?.contains(":80"),
        "the successor lists services of the killed dataplane"
    );
    kill(&mut site, Signal::SIGTERM)?;
    soon("the state keeper to exit", gone)?;
    soon("the dataplane's nf_tables rules to be removed", || {
        director
            .sh("nft list tables")
            .is_ok_and(|rules| !rules.contains("lvs-"))
    })
}

const ALL: [(&str, Forward); 3] = [("n", Forward::Nat), ("d", Forward::Dr), ("t", Forward::Tun)];

#[test]
#[ignore = "by hand: takes two minutes and measures pauses"]
fn five_hundred_downloads_on_fast_path_survive_killed_dataplane() -> Result<()> {
    for (label, forward) in ALL.into_iter().chain([("f", Forward::FullNat)]) {
        compared(&format!("inkm{label}"), (forward, By::Kernel))?;
    }
    Ok(())
}

#[test]
#[ignore = "by hand: takes two minutes and measures pauses"]
fn five_hundred_downloads_of_workers_and_tun_device_survive_killed_dataplane() -> Result<()> {
    for (label, forward) in ALL {
        compared(&format!("holdw{label}"), (forward, By::Workers))?;
    }
    compared("holdpn", (Forward::Nat, By::Device))
}

#[test]
#[ignore = "by hand: takes two minutes and measures pauses"]
fn five_hundred_downloads_with_state_keeper_survive_killed_dataplane() -> Result<()> {
    for (label, forward) in ALL {
        compared(&format!("holdm{label}"), (forward, By::StateKeeper))?;
    }
    Ok(())
}

/// Each version continues with the state of the other version.
fn with_another_version(by: By) -> Result<()> {
    let other = std::env::var("LVS_OTHER_BIN_DIR").context(
        "LVS_OTHER_BIN_DIR is not set; set it to a directory with programs of another version",
    )?;
    let full_nat = (by == By::Kernel).then_some(("f", Forward::FullNat));
    for (label, forward) in ALL.into_iter().chain(full_nat) {
        let label = format!("other{label}");
        downloads(&label, (forward, by), 500, End::Replaced(&other))?;
    }
    Ok(())
}

#[test]
#[ignore = "by hand: needs the programs of another version in LVS_OTHER_BIN_DIR"]
fn connections_on_fast_path_survive_change_of_version() -> Result<()> {
    with_another_version(By::Kernel)
}

#[test]
#[ignore = "by hand: needs the programs of another version in LVS_OTHER_BIN_DIR"]
fn connections_with_state_keeper_survive_change_of_version() -> Result<()> {
    with_another_version(By::StateKeeper)
}

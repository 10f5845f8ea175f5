//! testlvs: the cost of SYNs from source addresses that no host has, and the effect of each
//! defence.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Proc, programs, wait_until};
use nix::sys::signal::Signal;
use serde::Deserialize;

use super::data::{Document, Value};
use super::farm;
use super::peers::Peer;
use super::thesis::{number, spread};
use super::{Axis, Experiment, Measured, Plot, SET_UP, Turn, axis, log_axis, peers, plot};
use crate::compare::bed::{self, Bed, CLIENT_MAC, FRONT_MAC, VIP};
use crate::compare::contender::Contender;
use crate::files::{Asked, BIN};
use crate::machine::Snapshot;
use crate::stats::Spread;

/// The experiment with a flood of SYNs, at a set rate and at the maximum rate.
#[derive(Debug)]
pub(super) struct Testlvs;

const PEERS: [Peer; 12] = peers::named([
    "routing",
    "lvs-nat",
    "lvs-nat drop",
    "lvs-nat evict",
    "lvs-nat drop_entry",
    "lvs-nat drop_packet",
    "lvs-nat secure_tcp",
    "lvs-nat limit",
    "lvs-nat source-limit",
    "nftables",
    "haproxy",
    "ip_vs nat",
]);
const NAMES: [&str; PEERS.len()] = peers::names(&PEERS);

const TABLE: &str = "table";
const ENTRIES: &str = "entries";
const MEMORY: &str = "memory";
const SHARE: &str = "share";
const WAIT: &str = "wait";
const PASSED: &str = "passed";
const REFUSED: &str = "refused";
const LOST: &str = "lost";

/// SYNs per second of the paced flood.
const RATE: &str = "40000";
/// First source address of the SYNs.
const SOURCES: &str = "10.129.0.0";
/// Number of pairs of source address and port.
const FLOWS: &str = "1048576";
/// Connection limit with which the table has an entry for each of the [`FLOWS`].
const LARGE: &str = "1048576";
/// Connection limit of a table that is too small.
const SMALL: &str = "65536";
/// As [`SMALL`], with `--quick`.
const SMALL_QUICK: &str = "16384";
/// Seconds before the start of the flood.
const BEFORE: f64 = 1.0;
/// Seconds between two samples of the table.
const LOOK: f64 = 0.25;
/// With fewer entries, their memory cannot be distinguished from other growth.
const FEW: f64 = 50_000.0;

impl Experiment for Testlvs {
    fn name(&self) -> &'static str {
        "testlvs"
    }

    fn title(&self) -> &'static str {
        "A flood of SYNs from spoofed sources (testlvs)"
    }

    fn what(&self) -> &'static str {
        "A generator sends 40,000 SYNs per second to one service of four servers, from 65,536 \
         addresses in 256 networks without hosts, each SYN from a different address and port; the \
         servers answer them. At the same time, an honest client with eight parallel connections \
         requests 1,000 bytes about 200 times per second, and gives up after a second. Then the \
         generator sends the same flood as fast as possible. lvs-nat has a table for 1,048,576 \
         connections; drop and evict have one for 65,536 (16,384 with --quick) and the --when-full \
         of that name; drop_entry, drop_packet (with am_droprate 10) and secure_tcp are the \
         sysctls with the value 3; limit is lvsadm limit --rate 1000, source-limit --source-rate \
         20 (for each /24). The dataplane always limits the time for SYNs. routing has no table. \
         nftables and ip_vs have one in the kernel, whose memory belongs to no process; HAProxy's \
         connections belong to the kernel, which answers with SYN cookies: their tables and memory \
         cannot be measured. Memory is the growth of the dataplane's resident memory per entry, \
         for a full table (drop, evict; not with --quick): a few entries in a large table touch \
         more pages than they fill. It includes the 4 MB of the SYN limiter. Each round uses new \
         hosts, because the kernel's tables are full afterwards. The generator, the honest client \
         and the servers share CPU 0."
    }

    fn plots(&self) -> &'static [Plot] {
        const PEER: Axis = axis("peer", "name");
        const fn bars(name: &'static str, title: &'static str, y: Axis) -> Plot {
            plot(name, title, PEER, y)
        }
        const {
            &[
                plot(
                    TABLE,
                    "Growth of the connection table, from the first SYN on",
                    axis("time", "s"),
                    axis("connections", "count"),
                ),
                bars(
                    ENTRIES,
                    "Largest growth of the connection table",
                    axis("connections", "count"),
                ),
                bars(
                    MEMORY,
                    "Growth of memory for each connection",
                    axis("memory", "bytes/connection"),
                ),
                bars(
                    SHARE,
                    "Honest requests that were served, during 40,000 SYNs a second",
                    axis("served", "% of requests"),
                ),
                bars(
                    WAIT,
                    "Mean time of an honest request that was served",
                    log_axis("time", "ms"),
                ),
                bars(
                    PASSED,
                    "Packets of an unlimited flood that reach the servers' host",
                    axis("packets", "1/s"),
                ),
                bars(
                    REFUSED,
                    "SYNs of an unlimited flood that the dataplane's limits drop",
                    axis("SYNs", "1/s"),
                ),
                bars(
                    LOST,
                    "Packets of an unlimited flood that are lost in full rings",
                    axis("packets", "1/s"),
                ),
            ]
        }
    }

    fn bars(&self, plot: &Plot) -> &'static [&'static str] {
        if plot.name == TABLE { &[] } else { &NAMES }
    }

    fn peers(&self) -> &'static [Peer] {
        &PEERS
    }

    fn is_quick(&self, peer: &Peer) -> bool {
        ["lvs-nat", "lvs-nat evict", "nftables", "ip_vs nat"].contains(&peer.name)
    }

    fn seconds(&self, quick: bool) -> f64 {
        let (flood, most) = times(quick);
        BEFORE + flood + most + 0.8 + SET_UP
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let (flood, most) = times(turn.quick);
        if turn.round > 1 {
            // The kernel's tables of connections and SYNs still contain entries of the previous
            // round.
            *bed = self.bed(turn.peer, turn.yardsticks)?;
        }
        if bed.who.is_ours() {
            defend(bed, turn)?;
        }
        let mut servers = serve(bed)?;
        let bar = NAMES.iter().position(|name| *name == turn.peer.name);
        let bar = number(bar.context("the plot has no bar for this peer")?);
        let mut values = Vec::new();
        let mut add = |plot: &str, x: f64, y: f64| values.push(Value::new(plot, x, y));
        let first = Snapshot::take();
        let seconds = BEFORE + flood;
        let honest = honest(bed, turn.round, seconds)?;
        bed::settle(Duration::from_secs_f64(BEFORE));
        let (before, memory) = (entries(bed)?, resident(bed)?);
        let mut paced = generator(bed, turn, flood, &["-m", "send", "-r", RATE])?;
        let start = Instant::now();
        let mut highest = before.map(|_| 0.0);
        let mut next = 0.0;
        while next < flood {
            thread::sleep(Duration::from_secs_f64(next).saturating_sub(start.elapsed()));
            if let Some(count) = entries(bed)?.zip(before).map(|(now, then)| now - then) {
                add(TABLE, next, count);
                highest = highest.map(|most: f64| most.max(count));
            }
            next += LOOK;
        }
        paced.wait(Duration::from_secs_f64(flood + 5.0))?;
        let after = entries(bed)?;
        let grown = resident(bed)?.zip(memory).map(|(now, then)| now - then);
        let asked = farm::asked(honest, seconds)?;
        let asked = asked
            .first()
            .context("the honest client printed no report")?;
        if let Some(highest) = highest {
            add(ENTRIES, bar, highest);
        }
        if let (Some(before), Some(after), Some(grown)) = (before, after, grown)
            && after - before > FEW
            && ["lvs-nat drop", "lvs-nat evict"].contains(&turn.peer.name)
        {
            add(MEMORY, bar, grown / (after - before));
        }
        let (share, wait) = fares(asked);
        add(SHARE, bar, share);
        if let Some(wait) = wait {
            add(WAIT, bar, wait);
        }
        let flood = unlimited(bed, turn, most)?;
        add(PASSED, bar, flood.passed);
        if let Some((refused, lost)) = flood.dataplane {
            add(REFUSED, bar, refused);
            add(LOST, bar, lost);
        }
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        servers.kill();
        Ok((values, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let at = |plot: &str, name: &str| {
            let all = document.series(self.name(), plot, &[name]);
            Some(all.first()?.points.first()?.1)
        };
        let mut sentences = Vec::new();
        if let Some(bytes) = at(MEMORY, "lvs-nat drop").or(at(MEMORY, "lvs-nat evict")) {
            sentences.push(format!(
                "A connection of which only a SYN has arrived uses {:.0} bytes of the dataplane's memory ({:.0}-{:.0}, {}), so a million use {:.0} MB.",
                bytes.median, bytes.min, bytes.max, bytes.rounds, bytes.median
            ));
        }
        if let (Some(passed), Some(refused), Some(lost)) = (
            at(PASSED, "lvs-nat"),
            at(REFUSED, "lvs-nat"),
            at(LOST, "lvs-nat"),
        ) {
            let rate = |of: &Spread| format!("{:.0} ({:.0}-{:.0})", of.median, of.min, of.max);
            sentences.push(format!(
                "Without a limit, lvs-nat passes few SYNs of a flood by design: for unknown clients, it uses a sixteenth of the time of a packet worker. \
                 Of a flood without a limit, {} a second passed, {} a second were dropped for this reason, and {} a second were lost in full rings ({}).",
                rate(&passed), rate(&refused), rate(&lost), passed.rounds
            ));
        }
        let plain = (at(ENTRIES, "lvs-nat"), at(SHARE, "lvs-nat"));
        for name in NAMES {
            let (Some(share), Some(passed)) = (at(SHARE, name), at(PASSED, name)) else {
                continue;
            };
            let table = match (at(ENTRIES, name), plain.0) {
                (Some(own), Some(plain)) if name.starts_with("lvs-nat ") => {
                    let beside = if own.max < plain.min {
                        let saved = 100.0 * (1.0 - own.median / plain.median);
                        format!("{saved:.0} % fewer than without this defence")
                    } else {
                        "no fewer than without this defence".to_owned()
                    };
                    format!("{}, {beside}", connections(&own))
                }
                (Some(own), _) => connections(&own),
                (None, _) => "a table that cannot be measured".to_owned(),
            };
            let wait = at(WAIT, name).map_or_else(
                || "an unknown time".to_owned(),
                |wait| format!("{} ms", spread(&wait)),
            );
            sentences.push(format!(
                "{name}: {table}; {} % of honest requests served in {wait}; of a flood without a limit, {:.0} packets a second reach the servers ({:.0}-{:.0}, {}).",
                spread(&share), passed.median, passed.min, passed.max, passed.rounds
            ));
        }
        sentences
    }
}

fn connections(of: &Spread) -> String {
    format!(
        "at most {:.0} additional connections ({:.0}-{:.0})",
        of.median, of.min, of.max
    )
}

/// Seconds of the paced flood, and of the unlimited flood.
fn times(quick: bool) -> (f64, f64) {
    if quick { (1.0, 0.5) } else { (3.0, 1.0) }
}

/// Restarts the dataplane with the defence that the peer's name contains.
fn defend(bed: &mut Bed, turn: &Turn<'_>) -> Result<()> {
    let dataplane = programs::find("lvs-dataplane")?.display().to_string();
    let lvsadm = programs::find("lvsadm")?;
    let defence = turn.peer.name.strip_prefix("lvs-nat ");
    let defence = defence.unwrap_or_default();
    let connections = match defence {
        "drop" | "evict" if turn.quick => SMALL_QUICK,
        "drop" | "evict" => SMALL,
        _ => LARGE,
    };
    let sysctls: &[&str] = match defence {
        "drop_entry" => &["--sysctl", "drop_entry=3"],
        "drop_packet" => &["--sysctl", "drop_packet=3", "--sysctl", "am_droprate=10"],
        "secure_tcp" => &["--sysctl", "secure_tcp=3"],
        "evict" => &["--when-full", "evict"],
        _ => &[],
    };
    let [_, front, back, _] = bed.devices.clone();
    bed.run_instead(|host, cpu| {
        let words = [
            "-c",
            cpu,
            &dataplane,
            "--backend",
            "af_packet",
            "--fast-path",
            "off",
            "--interface",
            &front,
        ];
        let more = ["--interface", &back, "--max-connections", connections];
        host.spawn("taskset", &[&words[..], &more, sysctls].concat())
    })?;
    let director = &bed.director;
    wait_until(
        "the dataplane to answer on its control socket",
        Duration::from_secs(10),
        || director.run(&lvsadm, &["-Ln"]).is_ok(),
    )?;
    let mut rules = format!("-A -t {VIP}:80 -s rr\n");
    for server in 0..4 {
        rules += &format!("-a -t {VIP}:80 -r {}:80 -m -w 1\n", farm::address(server));
    }
    lvs_testbed::netns::run_with_input(director.command(&lvsadm).arg("-R"), &rules)?;
    let limit: &[&str] = match defence {
        "limit" => &["--rate", "1000"],
        "source-limit" => &["--source-rate", "20", "--source-bits-v4", "24"],
        _ => return Ok(()),
    };
    let service = format!("{VIP}:80");
    let words = [&["limit", service.as_str()], limit].concat();
    director.run(&lvsadm, &words).map(drop)
}

fn serve(bed: &Bed) -> Result<Proc> {
    let own = std::env::current_exe()?.display().to_string();
    let mut words: Vec<String> = ["-c", "0", &own, "endpoint", "files"]
        .map(Into::into)
        .to_vec();
    words.extend((0..4).map(|server| format!("{}:80=100000000", farm::address(server))));
    bed::ready(bed.server.spawn("taskset", &words)?)
}

fn honest(bed: &Bed, seed: usize, seconds: f64) -> Result<Proc> {
    let own = std::env::current_exe()?.display().to_string();
    let target = format!("{}:80", bed.target(false));
    let mut words: Vec<String> = ["-c", "0", &own, "endpoint", "ask", &target]
        .map(Into::into)
        .to_vec();
    words.extend(
        [
            "--clients=8",
            "--pause=40",
            "--least=1000",
            "--most=1000",
            "--timeout=1000",
        ]
        .map(Into::into),
    );
    words.push(format!("--seed={seed}"));
    words.push(format!("--for={:.0}", seconds * 1e3));
    bed.client.spawn("taskset", &words)
}

fn generator(bed: &Bed, turn: &Turn<'_>, seconds: f64, extra: &[&str]) -> Result<Proc> {
    let seconds = format!("{:.0}", seconds.ceil());
    let device = &bed.devices[0];
    let target = bed.target(false);
    let mut words = vec![
        "-S", "-i", device, "-d", FRONT_MAC, "-e", CLIENT_MAC, "-a", SOURCES,
    ];
    words.extend([
        "-v", target, "-t", &seconds, "-f", FLOWS, "-b", "16", "-c", "0",
    ]);
    words.extend(extra);
    bed::ready(bed.client.spawn(turn.yardsticks.path("gen"), &words)?)
        .context("the generator did not start")
}

/// Result of an unlimited flood, in packets per second.
#[derive(Debug)]
struct Unlimited {
    /// Packets per second that arrived at the servers' host.
    passed: f64,
    /// Per second: SYNs that this project's dataplane dropped for the reason `syn_flood`, and
    /// packets that were lost because its rings were full. `None` for other peers.
    dataplane: Option<(f64, f64)>,
}

fn unlimited(bed: &Bed, turn: &Turn<'_>, seconds: f64) -> Result<Unlimited> {
    let look = || -> Result<(u64, Option<(u64, u64)>)> {
        let arrived = Bed::received(&bed.server, &bed.devices[3])?;
        Ok((arrived, dropped(bed)?))
    };
    let mut flood = generator(bed, turn, seconds + 3.0, &[])?;
    bed::settle(Duration::from_millis(200));
    let (start, before) = (Instant::now(), look()?);
    bed::settle(Duration::from_secs_f64(seconds));
    let (after, time) = (look()?, start.elapsed().as_secs_f64());
    flood.stop(Signal::SIGTERM)?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let rate = |before: u64, after: u64| after.saturating_sub(before) as f64 / time;
    let dataplane = before.1.zip(after.1);
    Ok(Unlimited {
        passed: rate(before.0, after.0),
        dataplane: dataplane.map(|(old, new)| (rate(old.0, new.0), rate(old.1, new.1))),
    })
}

/// Number of SYNs that this project's dataplane has dropped for the reason `syn_flood`, and of
/// packets that were lost because its rings were full; `None` for other peers.
fn dropped(bed: &Bed) -> Result<Option<(u64, u64)>> {
    #[derive(Deserialize)]
    struct Reason {
        reason: String,
        count: u64,
    }
    #[derive(Deserialize)]
    struct Worker {
        lost: u64,
    }
    if !bed.who.is_ours() {
        return Ok(None);
    }
    let lvsadm = programs::find("lvsadm")?;
    let text = bed.director.run(&lvsadm, &["drops", "--json", "--all"])?;
    let reasons: Vec<Reason> = serde_json::from_str(&text)?;
    let refused = reasons.iter().filter(|one| one.reason == "syn_flood");
    let text = bed.director.run(&lvsadm, &["workers", "--json"])?;
    let workers: Vec<Worker> = serde_json::from_str(&text)?;
    Ok(Some((
        refused.map(|one| one.count).sum(),
        workers.iter().map(|worker| worker.lost).sum(),
    )))
}

/// Number of connections in the director's table; `None` if it cannot be read.
fn entries(bed: &Bed) -> Result<Option<f64>> {
    #[derive(Deserialize)]
    struct Worker {
        connections: u32,
    }
    match bed.who {
        who if who.is_ours() => {
            let lvsadm = programs::find("lvsadm")?;
            let text = bed.director.run(lvsadm, &["workers", "--json"])?;
            let workers: Vec<Worker> = serde_json::from_str(&text)?;
            let sum = workers
                .iter()
                .map(|worker| f64::from(worker.connections))
                .sum();
            Ok(Some(sum))
        }
        Contender::Nftables => {
            let text = bed
                .director
                .sh("cat /proc/sys/net/netfilter/nf_conntrack_count")?;
            Ok(Some(text.trim().parse()?))
        }
        Contender::Ipvs(_) => {
            let listing = bed.director.run(bed.ipvsadm()?, &["-Ln"])?;
            Ok(Some(listed(&listing)))
        }
        _ => Ok(None),
    }
}

/// Number of connections, active and inactive, in the output of `ipvsadm -Ln`.
fn listed(listing: &str) -> f64 {
    let servers = listing.lines().map(str::split_ascii_whitespace);
    let servers = servers.filter_map(|mut words| (words.next()? == "->").then_some(words));
    let counts =
        servers.flat_map(|words| words.skip(3).filter_map(|word| word.parse::<f64>().ok()));
    counts.sum()
}

/// Bytes of resident memory of this project's dataplane; `None` for other peers.
fn resident(bed: &Bed) -> Result<Option<f64>> {
    let Some(pid) = bed.pid().filter(|_| bed.who.is_ours()) else {
        return Ok(None);
    };
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<f64>().ok());
    let bytes = kib.map(|kib| kib * 1024.0);
    ensure!(bytes.is_some(), "process {pid} has no VmRSS");
    Ok(bytes)
}

/// Percentage of the honest requests after the start of the flood that were served; and the mean
/// time in milliseconds of all served requests, or `None` if none was served.
fn fares(asked: &Asked) -> (f64, Option<f64>) {
    let during = |bins: &[u64]| -> f64 {
        let bins = bins.iter().zip(0_u32..);
        let late = bins.filter(|(_, bin)| f64::from(*bin) * BIN >= BEFORE);
        late.map(|(count, _)| number(usize::try_from(*count).unwrap_or(0)))
            .sum()
    };
    let (served, failed) = (during(&asked.served), during(&asked.failed));
    let share = 100.0 * served / (served + failed).max(1.0);
    let mean = asked.took.iter().sum::<f64>() / number(asked.took.len().max(1));
    (share, (!asked.took.is_empty()).then_some(mean))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_a_listing_are_counted() {
        let listing = "IP Virtual Server version 1.2.1 (size=4096)\n\
            Prot LocalAddress:Port Scheduler Flags\n  \
            -> RemoteAddress:Port           Forward Weight ActiveConn InActConn\n\
            TCP  10.73.0.1:80 rr\n  \
            -> 10.72.0.11:80                Masq    1      3          1000\n  \
            -> 10.72.0.12:80                Masq    1      0          24\n";
        assert!((listed(listing) - 1027.0).abs() < 1e-9);
    }

    #[test]
    fn honest_requests_before_flood_do_not_count_in_their_percentage() {
        let asked = Asked {
            served: vec![9, 9, 9, 9, 30, 0],
            failed: vec![9, 9, 9, 9, 0, 10],
            took: vec![1.0, 3.0],
            ..Asked::default()
        };
        let (share, wait) = fares(&asked);
        assert!((share - 75.0).abs() < 1e-9);
        assert_eq!(wait, Some(2.0));
        let (share, wait) = fares(&Asked::default());
        assert!(share.abs() < 1e-9 && wait.is_none());
    }
}

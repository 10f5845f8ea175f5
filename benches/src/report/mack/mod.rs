//! Mack, "Building a LVS", 2000: NetPIPE through each forwarding method, and further experiments,
//! such as files by HTTP.

mod files;
mod links;
mod servers;
mod services;
mod wiring;

use std::fs;

use anyhow::{Context, Result, ensure};
use lvs_testbed::soon;

use super::data::{Document, Series, Value};
use super::peers::Peer;
use super::{Axis, Experiment, Measured, Plot, Turn, axis, log_axis, peers, plot, usual_bed};
use crate::compare::bed::{Bed, VIP};
use crate::compare::programs::BULK_PORT;
use crate::machine::Snapshot;
use crate::stats::Spread;
use crate::yardsticks::Yardsticks;

pub(super) use self::files::Files;
pub(super) use self::links::Links;
pub(super) use self::servers::Servers;
pub(super) use self::services::Services;

/// The experiment that measures round trips of messages of increasing size.
#[derive(Debug)]
pub(super) struct Mack;

const LATENCY: &str = "latency";
const ADDED: &str = "added";
const THROUGHPUT: &str = "throughput";

const DIRECT: &str = "direct";
/// Direct routing, with the director as the servers' gateway.
const GATEWAY: &str = "lvs-dr gateway";
/// NAT, with a virtual address that no interface has.
const ROUTED: &str = "lvs-nat routed";
const PEERS: [Peer; 14] = peers::named([
    DIRECT,
    "routing",
    "lvs-nat",
    ROUTED,
    "lvs-dr",
    GATEWAY,
    "lvs-tunnel",
    "lvs-nat-fast-path",
    "nftables",
    "haproxy",
    "nginx",
    "ip_vs nat",
    "ip_vs dr",
    "ip_vs tunnel",
]);
const NAMES: [&str; PEERS.len()] = peers::names(&PEERS);
/// The names of all peers except the first, which has no director.
const BARS: &[&str] = NAMES.split_at(1).1;

impl Experiment for Mack {
    fn name(&self) -> &'static str {
        "mack"
    }

    fn title(&self) -> &'static str {
        "NetPIPE through each forwarding method (Mack, 2000)"
    }

    fn what(&self) -> &'static str {
        "NPtcp sends a message and waits until it returns, for sizes of 1 byte to 8 MiB (1 MiB \
         with --quick), over one TCP connection. Both ends are on CPU 0; a director that is a \
         process has CPU 1. With direct routing and tunnels, the server answers over a separate \
         link to the client; with lvs-dr gateway, it answers through the director, which is its \
         gateway. The virtual address of lvs-nat routed is on no interface and only routed to the \
         director; otherwise it is on the director's lo. The added time of a peer is the time of \
         its smallest message, minus that of direct in the same round."
    }

    fn plots(&self) -> &'static [Plot] {
        const SIZE: Axis = log_axis("message size", "bytes");
        const {
            &[
                plot(
                    LATENCY,
                    "Time of a message, one way",
                    SIZE,
                    log_axis("time", "µs"),
                ),
                plot(
                    ADDED,
                    "Time that each peer adds to a message of one byte, one way",
                    axis("peer", "name"),
                    axis("added time", "µs"),
                ),
                plot(
                    THROUGHPUT,
                    "Throughput",
                    SIZE,
                    log_axis("throughput", "Mbit/s"),
                ),
            ]
        }
    }

    fn seconds(&self, quick: bool) -> f64 {
        if quick { 0.4 } else { 4.0 }
    }

    fn programs(&self) -> &'static [&'static str] {
        &["NPtcp"]
    }

    fn is_quick(&self, peer: &Peer) -> bool {
        !["lvs-nat-fast-path", "nginx"].contains(&peer.name)
    }

    fn peers(&self) -> &'static [Peer] {
        &PEERS
    }

    fn bars(&self, plot: &Plot) -> &'static [&'static str] {
        if plot.name == ADDED { BARS } else { &[] }
    }

    fn series(&self, document: &Document, plot: &Plot) -> Vec<Series> {
        if plot.name != ADDED {
            return document.series(self.name(), plot.name, &peers::of(self));
        }
        let bars = (0_u8..).zip(BARS);
        let bar = |(bar, peer): (u8, &&str)| {
            Some(Series {
                peer: (*peer).to_owned(),
                points: vec![(f64::from(bar), added(document, peer)?)],
            })
        };
        bars.filter_map(bar).collect()
    }

    fn bed(&self, peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
        let bed = usual_bed(peer, yardsticks)?;
        if peer.name == GATEWAY {
            // The remaining route leads to the director.
            bed.server.sh("ip route del 10.71.0.0/24")?;
        }
        if peer.name == ROUTED {
            bed.director.sh(&format!("ip addr del {VIP}/32 dev lo"))?;
        }
        Ok(bed)
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let first = Snapshot::take();
        let figures = if turn.quick {
            netpipe(bed, 1, 1 << 20, 10)?
        } else {
            netpipe(bed, 1, 8 << 20, 50)?
        };
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        let value = |(size, rate, time)| {
            let of = |plot: &str, y| Value::new(plot, size, y);
            [of(LATENCY, time), of(THROUGHPUT, rate)]
        };
        let values = figures.into_iter().flat_map(value).collect();
        Ok((values, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let peers = peers::of(self);
        let mut sentences = Vec::new();
        let latency = document.series(self.name(), LATENCY, &peers);
        let direct = latency.iter().find(|series| series.peer == DIRECT);
        if let Some((size, time)) = direct.and_then(|direct| direct.points.first()) {
            sentences.push(format!(
                "direct: a message of {size:.0} byte takes {:.1} µs one way ({:.1}-{:.1}, {}).",
                time.median, time.min, time.max, time.rounds
            ));
        }
        let mut all: Vec<(&str, Spread)> = BARS
            .iter()
            .filter_map(|peer| Some((*peer, added(document, peer)?)))
            .collect();
        all.sort_by(|a, b| a.1.median.total_cmp(&b.1.median));
        for (place, (peer, time)) in all.iter().enumerate() {
            let before = place.checked_sub(1).and_then(|before| all.get(before));
            let beside = match before {
                Some((other, less)) if less.max >= time.min => {
                    format!("; the spread does not distinguish it from {other}")
                }
                _ => String::new(),
            };
            sentences.push(format!(
                "{peer} adds {:.1} µs to the time of direct ({:.1}-{:.1}, {}){beside}.",
                time.median, time.min, time.max, time.rounds
            ));
        }
        let throughput = document.series(self.name(), THROUGHPUT, &peers);
        let best = |series: &Series| {
            let points = series.points.iter().copied();
            points.max_by(|a, b| a.1.median.total_cmp(&b.1.median))
        };
        let mut order: Vec<_> = throughput
            .iter()
            .filter_map(|series| Some((&series.peer, best(series)?)))
            .collect();
        order.sort_by(|a, b| b.1.1.median.total_cmp(&a.1.1.median));
        for (peer, (size, rate)) in order {
            sentences.push(format!(
                "{peer}: {:.0} Mbit/s at most ({:.0}-{:.0}, {}), with messages of {size:.0} bytes.",
                rate.median, rate.min, rate.max, rate.rounds
            ));
        }
        sentences
    }
}

/// Microseconds that a peer adds to the time of the smallest message, compared with `direct` in the
/// same rounds.
fn added(document: &Document, peer: &str) -> Option<Spread> {
    let direct = times(document, DIRECT);
    let added = times(document, peer)
        .into_iter()
        .filter_map(|(round, size, time)| {
            let mut direct = direct.iter();
            let (_, _, direct) =
                direct.find(|one| one.0 == round && one.1.total_cmp(&size).is_eq())?;
            Some(time - direct)
        });
    Spread::of(added)
}

/// For each round: its number, and the size and time of the smallest message.
fn times(document: &Document, peer: &str) -> Vec<(usize, f64, f64)> {
    let counted = document.counted(Mack.name(), peer).into_iter();
    let smallest = counted.filter_map(|run| {
        let times = run.values.iter().filter(|value| value.plot == LATENCY);
        let least = times.min_by(|a, b| a.x.total_cmp(&b.x))?;
        Some((run.round, least.x, least.y))
    });
    smallest.collect()
}

/// Runs NetPIPE from the client to the server, for messages of `least` to `most` bytes, each
/// `times` times. Returns for each size: bytes, Mbit/s, and microseconds in one direction.
fn netpipe(bed: &Bed, least: u32, most: u32, times: u32) -> Result<Vec<(f64, f64, f64)>> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("np.out");
    let file = file.to_str().context("the path is not UTF-8")?;
    let numbers = [BULK_PORT.into(), times, least, most].map(|number| number.to_string());
    let [port, times, least, most] = numbers.each_ref().map(String::as_str);
    let both = [
        "60", "taskset", "-c", "0", "NPtcp", "-P", port, "-p", "0", "-n", times, "-l", least, "-u",
        most,
    ];
    let mut server = bed.server.spawn("timeout", &both)?;
    bed.server.wait_for_port("tcp", BULK_PORT)?;
    let client = [&both[..], &["-h", bed.target(false), "-o", file]].concat();
    let printed = bed.client.run("timeout", &client);
    server.kill();
    // `kill` waits for `timeout` only: the next run must not mistake this NPtcp for its own.
    soon("NPtcp to stop listening", || {
        !bed.server.listens("tcp", BULK_PORT)
    })?;
    printed?;
    parse(&fs::read_to_string(file)?)
}

/// Parses the output of NPtcp: lines of bytes, Mbit/s and seconds. The result has microseconds.
/// Omits lines with a 0, for which the clock did not advance.
fn parse(text: &str) -> Result<Vec<(f64, f64, f64)>> {
    let mut figures = Vec::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace().map(str::parse::<f64>);
        let (Some(Ok(size)), Some(Ok(rate)), Some(Ok(time))) =
            (words.next(), words.next(), words.next())
        else {
            anyhow::bail!("NPtcp printed a line that is not `bytes Mbit/s seconds`: {line:?}");
        };
        if size > 0.0 && rate > 0.0 && time > 0.0 {
            figures.push((size, rate, time * 1e6));
        }
    }
    ensure!(!figures.is_empty(), "NPtcp wrote no figures");
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::super::data::Run;
    use super::*;

    #[test]
    fn netpipe_figures_are_parsed() {
        let figures = parse("       1 0.5   0.00001500\n   16384 28339.891892   0.00000441\n")
            .expect("the output is parsed");
        assert_eq!(figures.len(), 2);
        assert!((figures[0].2 - 15.0).abs() < 1e-9);
        assert!((figures[1].0 - 16384.0).abs() < 1e-9 && figures[1].1 > 28_339.0);
        assert!(parse("").is_err());
        assert!(parse("bad 1 2\n").is_err());
    }

    /// The machine is slower in the second round, for both peers.
    #[test]
    fn added_time_is_compared_within_a_round() {
        let run = |peer: &str, round: usize, time: f64| Run {
            experiment: "mack".into(),
            peer: peer.into(),
            round,
            values: [(64.0, time + 1.0), (1.0, time)]
                .map(|(x, y)| Value::new(LATENCY, x, y))
                .into(),
            cpu: Default::default(),
            disturbed: None,
            notes: Vec::new(),
        };
        let document = Document {
            runs: vec![
                run("direct", 1, 10.0),
                run("direct", 2, 20.0),
                run("lvs-nat", 1, 15.0),
                run("lvs-nat", 2, 26.0),
                run("lvs-nat", 3, 99.0),
                run("lvs-dr gateway", 1, 12.0),
                run("lvs-dr gateway", 2, 25.5),
            ],
            ..Document::default()
        };
        let time = added(&document, "lvs-nat").expect("two rounds have both");
        assert_eq!((time.min, time.max, time.rounds.0), (5.0, 6.0, 2));
        assert!(added(&document, "nginx").is_none());
        let sentences = Mack.conclusions(&document);
        assert!(
            sentences[1].starts_with("lvs-dr gateway adds 3.8 µs"),
            "{sentences:?}"
        );
        assert!(
            sentences[2].contains("does not distinguish it from lvs-dr gateway"),
            "{sentences:?}"
        );
    }
}

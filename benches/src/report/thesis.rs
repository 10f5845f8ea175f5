//! Repeats the experiment of a master's thesis on scheduling over NAT: round robin, weighted round
//! robin and least connections with two to eight servers, and three sets of files.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lvs_testbed::{Host, programs};

use super::data::{Document, Value};
use super::farm::{self, Clients, Farm, LARGE, MIXED, SMALL, Service, Set};
use super::peers::Peer;
use super::{Axis, Experiment, Measured, Plot, Turn, axis, peers, plot};
use crate::compare::bed::Bed;
use crate::files::{Asked, BIN};
use crate::machine::Snapshot;
use crate::stats::Spread;
use crate::yardsticks::Yardsticks;

/// The experiment that measures rates by the number of servers, and over time.
#[derive(Debug)]
pub(super) struct Thesis;

const PEERS: [Peer; 6] = peers::named([
    "lvs-nat rr",
    "lvs-nat wrr",
    "lvs-nat lc",
    "nftables",
    "haproxy",
    "nginx",
]);

/// Numbers of servers of the services in each set.
const SERVERS: [usize; 4] = [2, 4, 6, 8];
/// Number of servers in the curves over time.
const SHOWN: usize = 4;
/// The sets of files, and the maximum rate of one server in bytes per second.
///
/// Three peers at the same time can reach these rates on one core that all endpoints share.
const SETS: [(Set, u64); 3] = [(SMALL, 1_000_000), (MIXED, 1_500_000), (LARGE, 3_000_000)];
/// Seconds between two samples, as in the kernel's estimator.
const PERIOD: f64 = 2.0;
/// Seconds at the start that do not count, because all connections are new.
const WARM: f64 = 1.0;
/// Fraction of a run after which the estimator is close to the present rate.
const SETTLED: f64 = 0.6;

const COUNT: Axis = axis("servers", "count");
const TIME: Axis = axis("time", "s");

const SERVED: Axis = axis("received by clients", "MB/s");
const CONNS: Axis = axis("connections", "1/s");
const PACKETS: Axis = axis("packets, both ways", "1/s");
const BYTES: Axis = axis("bytes, both ways", "MB/s");

/// Sampled values: the suffix of the plot's name, and the columns whose sum is plotted.
const SAMPLED: [(&str, &[usize]); 3] = [("conns", &[0]), ("packets", &[1, 2]), ("bytes", &[3, 4])];

impl Experiment for Thesis {
    fn name(&self) -> &'static str {
        "schedulers"
    }

    fn title(&self) -> &'static str {
        "Schedulers over NAT, by the number of servers (master's thesis)"
    }

    fn what(&self) -> &'static str {
        "Four clients of each service request one file after another, each over a new connection. \
         A set has 16 files, whose sizes grow by a constant factor; a client chooses one at \
         random. Small files have 76 kB to 1.8 MB, mixed ones 100 kB to 10 MB, large ones 41 kB to \
         50 MB. The seed depends on the round only, so all peers and all numbers of servers get \
         the same requests in the same order. All weights are 1. A server sends 1 MB/s (mixed: \
         1.5, large: 3), which its connections share. The servers are the limit for every peer, so \
         three peers, and all sets and numbers of servers, are measured at the same time. Clients \
         never have more than four requests, so more than four servers help only if some are \
         unused. nftables chooses in turn, HAProxy and nginx by connections. Rates were read with \
         ipvsadm -Ln --rate every two seconds, as printed. The estimator moves its averages by a \
         quarter of the difference every two seconds, as in the kernel, so they rise slowly. The \
         rates by the number of servers are means of the printed rates of the last two fifths of \
         the time. The director's CPU is that of all twelve services."
    }

    fn plots(&self) -> &'static [Plot] {
        const {
            &[
                plot(
                    "small-served",
                    "Small files: throughput of clients",
                    COUNT,
                    SERVED,
                ),
                plot(
                    "mixed-served",
                    "Mixed files: throughput of clients",
                    COUNT,
                    SERVED,
                ),
                plot(
                    "large-served",
                    "Large files: throughput of clients",
                    COUNT,
                    SERVED,
                ),
                plot(
                    "small-conns",
                    "Small files: connections, as printed",
                    COUNT,
                    CONNS,
                ),
                plot(
                    "small-packets",
                    "Small files: packets, as printed",
                    COUNT,
                    PACKETS,
                ),
                plot(
                    "small-bytes",
                    "Small files: bytes, as printed",
                    COUNT,
                    BYTES,
                ),
                plot(
                    "mixed-conns",
                    "Mixed files: connections, as printed",
                    COUNT,
                    CONNS,
                ),
                plot(
                    "mixed-packets",
                    "Mixed files: packets, as printed",
                    COUNT,
                    PACKETS,
                ),
                plot(
                    "mixed-bytes",
                    "Mixed files: bytes, as printed",
                    COUNT,
                    BYTES,
                ),
                plot(
                    "large-conns",
                    "Large files: connections, as printed",
                    COUNT,
                    CONNS,
                ),
                plot(
                    "large-packets",
                    "Large files: packets, as printed",
                    COUNT,
                    PACKETS,
                ),
                plot(
                    "large-bytes",
                    "Large files: bytes, as printed",
                    COUNT,
                    BYTES,
                ),
                plot(
                    "small-conns-time",
                    "Small files, four servers: connections",
                    TIME,
                    CONNS,
                ),
                plot(
                    "small-packets-time",
                    "Small files, four servers: packets",
                    TIME,
                    PACKETS,
                ),
                plot(
                    "small-bytes-time",
                    "Small files, four servers: bytes",
                    TIME,
                    BYTES,
                ),
                plot(
                    "mixed-conns-time",
                    "Mixed files, four servers: connections",
                    TIME,
                    CONNS,
                ),
                plot(
                    "mixed-packets-time",
                    "Mixed files, four servers: packets",
                    TIME,
                    PACKETS,
                ),
                plot(
                    "mixed-bytes-time",
                    "Mixed files, four servers: bytes",
                    TIME,
                    BYTES,
                ),
                plot(
                    "large-conns-time",
                    "Large files, four servers: connections",
                    TIME,
                    CONNS,
                ),
                plot(
                    "large-packets-time",
                    "Large files, four servers: packets",
                    TIME,
                    PACKETS,
                ),
                plot(
                    "large-bytes-time",
                    "Large files, four servers: bytes",
                    TIME,
                    BYTES,
                ),
            ]
        }
    }

    fn peers(&self) -> &'static [Peer] {
        &PEERS
    }

    fn is_quick(&self, peer: &Peer) -> bool {
        ["lvs-nat rr", "lvs-nat lc", "nftables"].contains(&peer.name)
    }

    fn at_once(&self) -> usize {
        3
    }

    fn seconds(&self, quick: bool) -> f64 {
        time(quick) + 1.5
    }

    fn bed(&self, peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
        farm::bed(peer, yardsticks)
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let scheduler = match turn.peer.name {
            "lvs-nat wrr" => "wrr",
            "lvs-nat lc" | "haproxy" | "nginx" => "lc",
            _ => "rr",
        };
        let services: Vec<Vec<Service>> = (0..)
            .zip(SETS)
            .map(|(set, of)| services_of(set, of.1, scheduler))
            .collect();
        let all: Vec<Service> = (0..)
            .zip(SETS)
            .flat_map(|(set, of)| services_of(set, of.1, scheduler))
            .collect();
        let farm = Farm::start(bed, &all, false)?;
        let time = time(turn.quick);
        let first = Snapshot::take();
        let mut clients = Vec::new();
        for ((set, _), services) in SETS.iter().zip(&services) {
            let asking = Clients {
                set: *set,
                count: 4,
                seed: turn.round,
                seconds: time,
                timeout: 60_000,
                sources: 0,
            };
            clients.push(farm.ask(bed, services, &asking)?);
        }
        let samples = match bed.who.is_ours() {
            true => sample(&bed.director, time)?,
            false => {
                thread::sleep(Duration::from_secs_f64(time));
                Vec::new()
            }
        };
        let mut values = Vec::new();
        for ((set, _), asking) in SETS.iter().zip(clients) {
            for (servers, asked) in SERVERS.iter().zip(farm::asked(asking, time)?) {
                values.push(Value {
                    plot: format!("{}-served", set.name),
                    x: number(*servers),
                    y: received(&asked, time)?,
                });
            }
        }
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        values.extend(curves(&samples, time));
        farm.end(bed)?;
        Ok((values, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let mut sentences = Vec::new();
        for (set, bytes) in SETS {
            let plot = format!("{}-served", set.name);
            let names = peers::of(self);
            let all = document.series(self.name(), &plot, &names);
            for servers in SERVERS {
                let at = |name: &str| -> Option<Spread> {
                    let one = all.iter().find(|one| one.peer == name)?;
                    let mut points = one.points.iter();
                    points
                        .find(|(x, _)| x.total_cmp(&number(servers)).is_eq())
                        .map(|(_, y)| *y)
                };
                let (Some(rr), Some(lc)) = (at("lvs-nat rr"), at("lvs-nat lc")) else {
                    continue;
                };
                // With `--quick`, this peer is not measured.
                let wrr = at("lvs-nat wrr").map(|wrr| format!("wrr {}, ", spread(&wrr)));
                let Some(times) = self.beside(document, &plot, servers) else {
                    continue;
                };
                let better = match (times.min > 1.0, times.max < 1.0) {
                    (true, _) => "lc delivers more than rr",
                    (_, true) => "lc delivers less than rr",
                    _ => "the spread does not distinguish rr and lc",
                };
                #[expect(clippy::cast_precision_loss, reason = "a few millions")]
                let most = bytes as f64 * number(servers.min(4)) / 1e6;
                sentences.push(format!(
                    "{} files, {servers} servers: {better}, {} times as much in the same round: rr {}, {}lc {} MB/s ({}), of {most:.0} MB/s that {} busy servers can send.",
                    set.name, spread(&times), spread(&rr), wrr.unwrap_or_default(), spread(&lc), lc.rounds, servers.min(4)
                ));
            }
        }
        sentences
    }
}

impl Thesis {
    /// Throughput of lc relative to rr in the same round, with the same files.
    fn beside(&self, document: &Document, plot: &str, servers: usize) -> Option<Spread> {
        let at = |peer: &'static str| {
            document.of(self.name(), peer).filter_map(move |run| {
                let mut values = run.values.iter();
                let value = values.find(|value| {
                    value.plot == plot && value.x.total_cmp(&number(servers)).is_eq()
                })?;
                Some((run.round, value.y))
            })
        };
        Spread::of(at("lvs-nat lc").filter_map(|(round, lc)| {
            let (_, rr) = at("lvs-nat rr").find(|(other, _)| *other == round)?;
            Some(lc / rr)
        }))
    }
}

/// Formats a median and its range as `1.2 (1.1-1.3)`.
pub(super) fn spread(of: &Spread) -> String {
    format!("{:.2} ({:.2}-{:.2})", of.median, of.min, of.max)
}

fn time(quick: bool) -> f64 {
    if quick { 4.25 } else { 28.0 }
}

pub(super) fn number(count: usize) -> f64 {
    u32::try_from(count).map_or(0.0, f64::from)
}

fn port(set: u16, servers: usize) -> u16 {
    8000 + set * 10 + u16::try_from(servers).unwrap_or(0)
}

fn services_of(set: u16, bytes: u64, scheduler: &'static str) -> Vec<Service> {
    let service = |servers: usize| Service {
        port: port(set, servers),
        scheduler,
        servers: vec![(1, bytes); servers],
    };
    SERVERS.into_iter().map(service).collect()
}

/// Megabytes per second that the clients received after the first [`WARM`] seconds.
pub(super) fn received(asked: &Asked, time: f64) -> Result<f64> {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let counts = |bin: &u64| *bin as f64;
    let bins = asked.bytes.iter().zip(0_u32..);
    let counted = bins.filter(|(_, bin)| f64::from(*bin) * BIN >= WARM);
    let bytes: f64 = counted.map(|(bytes, _)| counts(bytes)).sum();
    anyhow::ensure!(
        bytes > 0.0,
        "the clients received nothing: {:?}",
        asked.error
    );
    Ok(bytes / (time - WARM) / 1e6)
}

/// The printed rates, and the time at which they were printed.
type Sample = (f64, Vec<(u16, [f64; 5])>);

/// Reads rates by `ipvsadm -L --rate` for `time` seconds, as an operator would.
fn sample(director: &Host, time: f64) -> Result<Vec<Sample>> {
    let directory = tempfile::tempdir()?;
    let ipvsadm = directory.path().join("ipvsadm");
    std::os::unix::fs::symlink(programs::find("lvsadm")?, &ipvsadm)
        .context("cannot make a link with the name ipvsadm")?;
    let start = Instant::now();
    let mut samples = Vec::new();
    let mut next = PERIOD;
    while next <= time {
        thread::sleep(Duration::from_secs_f64(next).saturating_sub(start.elapsed()));
        let listing = director.run(&ipvsadm, &["-L", "-n", "--rate"])?;
        samples.push((next, farm::printed_rates(&listing)));
        next += PERIOD;
    }
    thread::sleep(Duration::from_secs_f64(time).saturating_sub(start.elapsed()));
    Ok(samples)
}

/// The values of the plots of sampled rates: means by the number of servers, and the points over
/// time for [`SHOWN`] servers.
fn curves(samples: &[Sample], time: f64) -> Vec<Value> {
    let mut values = Vec::new();
    for (number_of_set, (set, _)) in (0..).zip(SETS) {
        for (what, columns) in SAMPLED {
            let scale = if what == "bytes" { 1e6 } else { 1.0 };
            for servers in SERVERS {
                let of = port(number_of_set, servers);
                let at = |(when, rates): &Sample| {
                    let (_, rates) = rates.iter().find(|(port, _)| *port == of)?;
                    let sum: f64 = columns.iter().map(|column| rates[*column]).sum();
                    Some((*when, sum / scale))
                };
                let points: Vec<(f64, f64)> = samples.iter().filter_map(at).collect();
                let late = points.iter().filter(|(when, _)| *when >= time * SETTLED);
                let late: Vec<f64> = late.map(|(_, rate)| *rate).collect();
                if !late.is_empty() {
                    values.push(Value {
                        plot: format!("{}-{what}", set.name),
                        x: number(servers),
                        y: late.iter().sum::<f64>() / number(late.len()),
                    });
                }
                if servers == SHOWN {
                    values.extend(points.into_iter().map(|(x, y)| Value {
                        plot: format!("{}-{what}-time", set.name),
                        x,
                        y,
                    }));
                }
            }
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds differ in their requests; within each round, lc is always better here.
    #[test]
    fn schedulers_are_compared_within_a_round() {
        let run = |peer: &str, round: usize, y: f64| super::super::data::Run {
            experiment: Thesis.name().to_owned(),
            peer: peer.to_owned(),
            round,
            values: vec![Value::new("small-served", 4.0, y)],
            cpu: Default::default(),
            disturbed: None,
            notes: Vec::new(),
        };
        let document = Document {
            runs: vec![
                run("lvs-nat rr", 1, 1.0),
                run("lvs-nat rr", 2, 2.0),
                run("lvs-nat rr", 3, 4.0),
                run("lvs-nat wrr", 1, 1.0),
                run("lvs-nat lc", 1, 1.5),
                run("lvs-nat lc", 2, 2.5),
            ],
            ..Document::default()
        };
        let times = Thesis.beside(&document, "small-served", 4);
        let times = times.expect("two rounds have both");
        assert_eq!((times.min, times.max, times.rounds.0), (1.25, 1.5, 2));
        assert!(Thesis.beside(&document, "small-served", 2).is_none());
        let sentences = Thesis.conclusions(&document);
        assert_eq!(sentences.len(), 1, "{sentences:?}");
        assert!(
            sentences[0].contains("lc delivers more than rr"),
            "{sentences:?}"
        );
        assert!(
            sentences[0].contains("wrr 1.00 (1.00-1.00), lc"),
            "{sentences:?}"
        );
        let mut quick = document;
        quick.runs.retain(|run| run.peer != "lvs-nat wrr");
        let sentences = Thesis.conclusions(&quick);
        assert_eq!(sentences.len(), 1, "{sentences:?}");
        assert!(!sentences[0].contains("wrr"), "{sentences:?}");
    }

    #[test]
    fn thesis_samples_become_curves_and_means() {
        let of = |rate: f64| vec![(port(0, 4), [rate, 10.0, 20.0, 1e6, 2e6])];
        let samples = [(2.0, of(1.0)), (4.0, of(3.0)), (6.0, of(5.0))];
        let values = curves(&samples, 6.0);
        let named = |name: &str| -> Vec<(f64, f64)> {
            let found = values.iter().filter(|value| value.plot == name);
            found.map(|value| (value.x, value.y)).collect()
        };
        assert_eq!(
            named("small-conns-time"),
            [(2.0, 1.0), (4.0, 3.0), (6.0, 5.0)]
        );
        assert_eq!(named("small-conns"), [(4.0, 4.0)]);
        assert_eq!(named("small-packets"), [(4.0, 30.0)]);
        assert_eq!(named("small-bytes"), [(4.0, 3.0)]);
        assert!(named("mixed-conns").is_empty());
    }

    #[test]
    fn bytes_received_during_warm_up_do_not_count() {
        let asked = Asked {
            bytes: vec![
                9_000_000, 0, 0, 0, 1_000_000, 1_000_000, 1_000_000, 1_000_000,
            ],
            ..Asked::default()
        };
        let rate = received(&asked, 2.0).expect("the clients received bytes");
        assert!((rate - 4.0).abs() < 1e-9, "{rate}");
        assert!(received(&Asked::default(), 2.0).is_err());
    }
}

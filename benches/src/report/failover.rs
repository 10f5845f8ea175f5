//! An experiment of this project: a server that fails and returns.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::data::{Document, Value};
use super::farm::{self, Clients, Farm, Service, Set};
use super::peers::Peer;
use super::thesis::{number, spread};
use super::{Axis, Experiment, Measured, Plot, Turn, axis, peers, plot};
use crate::compare::bed::Bed;
use crate::files::{Asked, BIN};
use crate::machine::Snapshot;
use crate::yardsticks::Yardsticks;

/// The experiment in which one of four servers does not answer for a third of the time.
#[derive(Debug)]
pub(super) struct Failover;

const PEERS: [Peer; 4] = peers::named(["lvs-nat", "nftables", "haproxy", "nginx"]);
const NAMES: [&str; PEERS.len()] = peers::names(&PEERS);

const SERVED: &str = "served";
const FAILED: &str = "failed";
const LOST: &str = "lost";
const OUTAGE: &str = "outage";

const PAGE: Set = Set {
    name: "page",
    least: 20_000,
    most: 20_000,
};
/// Maximum rate of a server, in bytes per second.
const CAPACITY: u64 = 2_000_000;
/// Index of the server that fails.
const SILENT: usize = 3;
/// Seconds for each point of a plot.
const STEP: f64 = 2.0 * BIN;

impl Experiment for Failover {
    fn name(&self) -> &'static str {
        "failover"
    }

    fn title(&self) -> &'static str {
        "A server that fails and returns"
    }

    fn what(&self) -> &'static str {
        "Eight clients request pages of 20 kB, one after another, from four servers of 100 pages \
         per second each, and give up after half a second. After a third of the time, the address \
         of one server is removed without a report; it returns for the last third. lvs-nat is the \
         dataplane with lvsd, which requests a page from each server every 0.25 s with a timeout \
         of 0.25 s, and changes the state of a server after two equal results. HAProxy has the \
         same times for its checks, and redirects a client whose server does not accept the \
         connection within 0.25 s. nginx has no active checks: it does not use a server for 2 s \
         after a connection has failed for 0.25 s. nftables has no checks. All peers are measured \
         at the same time, with the same seed; the director's CPU does not include that of lvsd."
    }

    fn plots(&self) -> &'static [Plot] {
        const TIME: Axis = axis("time", "s");
        const PEER: Axis = axis("peer", "name");
        const {
            &[
                plot(SERVED, "Pages served", TIME, axis("pages", "1/s")),
                plot(
                    FAILED,
                    "Requests that failed",
                    TIME,
                    axis("failures", "1/s"),
                ),
                plot(
                    LOST,
                    "Requests that failed, in total",
                    PEER,
                    axis("failures", "count"),
                ),
                plot(
                    OUTAGE,
                    "Time from the failure to the last request that failed",
                    PEER,
                    axis("time", "s"),
                ),
            ]
        }
    }

    fn bars(&self, plot: &Plot) -> &'static [&'static str] {
        if [LOST, OUTAGE].contains(&plot.name) {
            &NAMES
        } else {
            &[]
        }
    }

    fn peers(&self) -> &'static [Peer] {
        &PEERS
    }

    fn at_once(&self) -> usize {
        PEERS.len()
    }

    fn seconds(&self, quick: bool) -> f64 {
        time(quick) + 2.5
    }

    fn bed(&self, peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
        farm::bed(peer, yardsticks)
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let services = [Service {
            port: 8001,
            scheduler: "rr",
            servers: vec![(1, CAPACITY); 4],
        }];
        let seconds = time(turn.quick);
        let asking = Clients {
            set: PAGE,
            count: 8,
            seed: turn.round,
            seconds,
            timeout: 500,
            sources: 0,
        };
        let farm = Farm::start(bed, &services, true)?;
        if bed.who.is_ours() {
            // Waits until lvsd's checks have found all servers up.
            let lvsadm = lvs_testbed::programs::find("lvsadm")?;
            lvs_testbed::wait_until(
                "four servers to have weight 1",
                Duration::from_secs(10),
                || {
                    let listing = bed.director.run(&lvsadm, &["-Ln"]).unwrap_or_default();
                    listing
                        .lines()
                        .filter(|line| line.contains("Masq    1"))
                        .count()
                        == 4
                },
            )?;
        }
        let first = Snapshot::take();
        let start = Instant::now();
        let clients = farm.ask(bed, &services, &asking)?;
        let until = |part: f64| {
            let when = Duration::from_secs_f64(seconds * part);
            thread::sleep(when.saturating_sub(start.elapsed()));
        };
        let change = |word: &str| {
            let address = farm::address(SILENT);
            bed.server.sh(&format!(
                "ip addr {word} {address}/24 dev {}",
                bed.devices[3]
            ))
        };
        until(1.0 / 3.0);
        change("del")?;
        until(2.0 / 3.0);
        change("add")?;
        until(1.0);
        let asked = farm::asked(clients, seconds)?;
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        farm.end(bed)?;
        let asked = asked.first().context("the clients printed no report")?;
        let bar = NAMES.iter().position(|name| *name == turn.peer.name);
        let bar = bar.context("the plot has no bar for this peer")?;
        Ok((points(asked, number(bar), seconds / 3.0), cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let mut sentences = Vec::new();
        for name in NAMES {
            let one = |plot: &str| {
                let all = document.series(self.name(), plot, &[name]);
                Some(all.first()?.points.first()?.1)
            };
            let (Some(lost), Some(outage)) = (one(LOST), one(OUTAGE)) else {
                continue;
            };
            sentences.push(format!(
                "{name}: {:.0} requests failed ({:.0}-{:.0}, {}), the last of them {} s after the server had failed.",
                lost.median, lost.min, lost.max, lost.rounds, spread(&outage)
            ));
        }
        sentences
    }
}

fn time(quick: bool) -> f64 {
    if quick { 4.5 } else { 13.5 }
}

fn points(asked: &Asked, bar: f64, failure: f64) -> Vec<Value> {
    #[expect(clippy::cast_precision_loss, reason = "a few thousands")]
    let sum = |bins: &[u64]| bins.iter().sum::<u64>() as f64;
    let mut values = Vec::new();
    let mut add = |plot: &str, x: f64, y: f64| values.push(Value::new(plot, x, y));
    for (plot, bins) in [(SERVED, &asked.served), (FAILED, &asked.failed)] {
        for (step, bins) in bins.chunks_exact(2).enumerate() {
            add(plot, (number(step) + 0.5) * STEP, sum(bins) / STEP);
        }
    }
    add(LOST, bar, sum(&asked.failed));
    let last = asked.failed.iter().rposition(|failed| *failed > 0);
    let last = last.map_or(0.0, |bin| (number(bin) + 1.0) * BIN - failure);
    add(OUTAGE, bar, last.max(0.0));
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failover_outage_ends_with_the_last_failure() {
        let asked = Asked {
            served: vec![50, 50, 10, 10, 50, 50],
            failed: vec![0, 0, 3, 2, 0, 0],
            ..Asked::default()
        };
        let values = points(&asked, 1.0, 0.5);
        let named = |name: &str| -> Vec<(f64, f64)> {
            let found = values.iter().filter(|value| value.plot == name);
            found.map(|value| (value.x, value.y)).collect()
        };
        assert_eq!(named(SERVED), [(0.25, 200.0), (0.75, 40.0), (1.25, 200.0)]);
        assert_eq!(named(FAILED), [(0.25, 0.0), (0.75, 10.0), (1.25, 0.0)]);
        assert_eq!(named(LOST), [(1.0, 5.0)]);
        assert_eq!(named(OUTAGE), [(1.0, 0.5)]);
    }
}

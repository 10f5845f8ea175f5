//! An experiment of this project: servers of unequal capacity, and all schedulers.

use std::thread;
use std::time::Duration;

use anyhow::Result;

use super::data::{Document, Value};
use super::farm::{self, Clients, Farm, PEERS, SMALL, Service};
use super::peers::Peer;
use super::thesis::{number, spread};
use super::{Axis, Experiment, Measured, Plot, Turn, axis, peers, plot};
use crate::compare::bed::Bed;
use crate::compare::contender::Contender;
use crate::files::{Asked, BIN};
use crate::machine::Snapshot;
use crate::yardsticks::Yardsticks;

/// The experiment that compares all schedulers on four unequal servers.
#[derive(Debug)]
pub(super) struct Unequal;

/// Labels of the bars: this project's schedulers, followed by those of the other peers.
const BARS: [&str; 20] = [
    "rr",
    "wrr",
    "lc",
    "wlc",
    "sed",
    "nq",
    "twos",
    "ewma",
    "sh",
    "mh",
    "dh",
    "lblc",
    "lblcr",
    "fo",
    "ovf",
    "random",
    "roundrobin",
    "leastconn",
    "round robin",
    "least_conn",
];
const OURS: usize = 15;
/// Bytes per second for each unit of weight.
const UNIT: u64 = 1_000_000;
const WEIGHTS: [u32; 4] = [1, 2, 3, 4];
const CLIENTS: u32 = 12;
const WARM: f64 = 1.0;

const SERVED: &str = "served";
const WAIT: &str = "wait";

impl Experiment for Unequal {
    fn name(&self) -> &'static str {
        "unequal"
    }

    fn title(&self) -> &'static str {
        "All schedulers before servers of unequal capacity"
    }

    fn what(&self) -> &'static str {
        "Four servers send 1, 2, 3 and 4 MB/s and have the weights 1, 2, 3 and 4. Twelve clients \
         of each service request small files (76 kB to 1.8 MB) one after another, from 64 random \
         addresses; all services get the same requests in the same order. Each scheduler has its \
         own service, and all are measured at the same time: the servers are the limit. Of rr, lc \
         and twos, only twos uses weights. dh, lblc and lblcr choose by the destination address, \
         of which there is only one here; fo uses one server while it is available. ip_vs, if the \
         kernel has it, has all schedulers except ewma; nftables chooses at random by weight; \
         HAProxy and nginx use weights with both of their schedulers. The CPU of lvs-nat, and of \
         ip_vs, is that of all of its services."
    }

    fn plots(&self) -> &'static [Plot] {
        const SCHEDULER: Axis = axis("scheduler", "name");
        const {
            &[
                plot(
                    SERVED,
                    "Throughput of clients, in percent of the capacity of the servers",
                    SCHEDULER,
                    axis("received", "% of capacity"),
                ),
                plot(
                    WAIT,
                    "95th percentile of the time of a request",
                    SCHEDULER,
                    axis("time", "s"),
                ),
            ]
        }
    }

    fn bars(&self, _: &Plot) -> &'static [&'static str] {
        &BARS
    }

    fn peers(&self) -> &'static [Peer] {
        &PEERS
    }

    fn at_once(&self) -> usize {
        // The core that both endpoints share would limit two peers with all schedulers at the same
        // time.
        PEERS.len() - 1
    }

    fn seconds(&self, quick: bool) -> f64 {
        time(quick) + 1.5
    }

    fn bed(&self, peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
        farm::bed(peer, yardsticks)
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let kernels = BARS_OF_OURS.into_iter().filter(|(_, name)| *name != "ewma");
        let kernels: Vec<_> = kernels.collect();
        let all: &[(usize, &'static str)] = match bed.who {
            Contender::Nftables => &[(15, "wrr")],
            Contender::Haproxy => &[(16, "wrr"), (17, "wlc")],
            Contender::Nginx => &[(18, "wrr"), (19, "wlc")],
            Contender::Ipvs(_) => &kernels,
            _ => &BARS_OF_OURS,
        };
        let mut services = Vec::new();
        for (port, (_, scheduler)) in (8001..).zip(all) {
            services.push(Service {
                port,
                scheduler,
                servers: WEIGHTS
                    .map(|weight| (weight, u64::from(weight) * UNIT))
                    .to_vec(),
            });
        }
        let farm = Farm::start(bed, &services, false)?;
        let seconds = time(turn.quick);
        let asking = Clients {
            set: SMALL,
            count: CLIENTS,
            seed: turn.round,
            seconds,
            timeout: 60_000,
            sources: 64,
        };
        let first = Snapshot::take();
        let clients = farm.ask(bed, &services, &asking)?;
        thread::sleep(Duration::from_secs_f64(seconds));
        let asked = farm::asked(clients, seconds)?;
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        farm.end(bed)?;
        let mut values = Vec::new();
        for ((bar, _), asked) in all.iter().zip(&asked) {
            let mut add = |plot: &str, y: f64| values.push(Value::new(plot, number(*bar), y));
            add(SERVED, share(asked, seconds));
            if let Some(wait) = percentile(&asked.took, 95) {
                add(WAIT, wait / 1e3);
            }
        }
        Ok((values, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let at = |plot: &str, name: &str| {
            let bar = BARS.iter().position(|bar| *bar == name)?;
            let all = document.series(self.name(), plot, &["lvs-nat"]);
            let points = all.first()?.points.iter();
            let mut points = points.filter(|(x, _)| x.total_cmp(&number(bar)).is_eq());
            points.next().map(|(_, y)| *y)
        };
        let mut sentences = Vec::new();
        for (plain, weighted) in [("rr", "wrr"), ("lc", "wlc")] {
            let (Some(a), Some(b)) = (at(SERVED, plain), at(SERVED, weighted)) else {
                continue;
            };
            let (Some(wait_a), Some(wait_b)) = (at(WAIT, plain), at(WAIT, weighted)) else {
                continue;
            };
            let served = match (b.min > a.max, a.min > b.max) {
                (true, _) => format!(
                    "with weights, the throughput is {:.2} times as high",
                    b.median / a.median
                ),
                (_, true) => format!(
                    "with weights, the throughput is only {:.2} times as high",
                    b.median / a.median
                ),
                _ => "weights make no difference beyond the spread".to_owned(),
            };
            sentences.push(format!(
                "{plain} and {weighted}: {served}: {} and {} % of what the servers can send ({}); 95 of 100 requests take less than {} and {} s.",
                spread(&a), spread(&b), a.rounds, spread(&wait_a), spread(&wait_b)
            ));
        }
        let waits = BARS[..OURS]
            .iter()
            .filter_map(|name| Some((*name, at(SERVED, name)?, at(WAIT, name)?)));
        let most = waits
            .clone()
            .map(|(_, served, _)| served.median)
            .fold(0.0, f64::max);
        // Only schedulers within 5 % of the highest throughput are compared.
        let best = waits.filter(|(_, served, _)| served.max >= 0.95 * most);
        let mut best: Vec<_> = best.collect();
        best.sort_by(|a, b| a.2.median.total_cmp(&b.2.median));
        if let (Some(first), Some(last)) = (best.first(), best.last()) {
            let names: Vec<_> = best.iter().map(|(name, ..)| *name).collect();
            sentences.push(format!(
                "Of all fifteen schedulers, {} are within 5 % of the highest throughput ({most:.0} %). Of these, {} has the shortest 95th percentile of request times, {} s, and {} the longest, {} s.",
                names.join(", "), first.0, spread(&first.2), last.0, spread(&last.2)
            ));
        }
        sentences
    }
}

const BARS_OF_OURS: [(usize, &str); OURS] = {
    let mut all = [(0, ""); OURS];
    let mut bar = 0;
    while bar < OURS {
        all[bar] = (bar, BARS[bar]);
        bar += 1;
    }
    all
};

fn time(quick: bool) -> f64 {
    if quick { 2.5 } else { 14.0 }
}

/// Percentage of the servers' capacity that clients received after the first [`WARM`] seconds.
fn share(asked: &Asked, seconds: f64) -> f64 {
    let bins = asked.bytes.iter().zip(0_u32..);
    let counted = bins.filter(|(_, bin)| f64::from(*bin) * BIN >= WARM);
    let bytes: u64 = counted.map(|(bytes, _)| bytes).sum();
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let (bytes, capacity) = (
        bytes as f64,
        (u64::from(WEIGHTS.iter().sum::<u32>()) * UNIT) as f64,
    );
    bytes / (seconds - WARM) / capacity * 100.0
}

/// The given percentile of the values; `None` without values.
pub(super) fn percentile(values: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (sorted.len() * percent).div_ceil(100).checked_sub(1)?;
    sorted.get(place).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_the_value_of_its_rank() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&values, 95), Some(95.0));
        assert_eq!(percentile(&[3.0], 95), Some(3.0));
        assert_eq!(percentile(&[], 95), None);
    }

    #[test]
    fn unequal_servers_plot_has_bar_for_each_scheduler_except_none() {
        let registry = lvs_core::sched::BUILT_IN.iter().map(|about| about.name);
        let mut known: Vec<_> = registry.filter(|name| *name != "none").collect();
        let mut shown = BARS[..OURS].to_vec();
        known.sort_unstable();
        shown.sort_unstable();
        assert_eq!(shown, known);
    }
}

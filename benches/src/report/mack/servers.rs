//! One or two servers, with a serial client and with parallel clients.

use std::thread;
use std::time::Duration;

use anyhow::Result;

use super::super::data::{Document, Value};
use super::super::farm::{self, Clients, Farm, PEERS, SMALL, Service};
use super::super::peers::Peer;
use super::super::thesis::{number, received, spread};
use super::super::{Axis, Experiment, Measured, Plot, Turn, axis, peers, plot};
use crate::compare::bed::Bed;
use crate::compare::contender::Contender;
use crate::machine::Snapshot;
use crate::yardsticks::Yardsticks;

/// The experiment that measures the benefit of a second server.
#[derive(Debug)]
pub(in super::super) struct Servers;

/// Maximum rate of a server, in bytes per second.
const CAPACITY: u64 = 3_000_000;
/// For each plot: its name, its number of clients, and its description.
const PLOTS: [(&str, u32, &str); 2] = [
    ("serial", 1, "a client that waits for each file"),
    ("parallel", 8, "eight clients at once"),
];

const COUNT: Axis = axis("servers", "count");
const SERVED: Axis = axis("received by clients", "MB/s");

impl Experiment for Servers {
    fn name(&self) -> &'static str {
        "mack-servers"
    }

    fn title(&self) -> &'static str {
        "One server and two, for a serial client and for parallel ones (Mack, 2000)"
    }

    fn what(&self) -> &'static str {
        "A server sends 3 MB/s. A client requests small files (76 kB to 1.8 MB) one after another, \
         or eight clients do at the same time, from a service with one server and from a service \
         with two servers in turn (HAProxy and nginx: the server with fewer connections). A serial \
         client never uses more than one server at a time. Servers are the limit, so all is \
         measured at the same time."
    }

    fn plots(&self) -> &'static [Plot] {
        const {
            &[
                plot(PLOTS[0].0, "A serial client", COUNT, SERVED),
                plot(PLOTS[1].0, "Eight parallel clients", COUNT, SERVED),
            ]
        }
    }

    fn peers(&self) -> &'static [Peer] {
        &PEERS
    }

    fn at_once(&self) -> usize {
        PEERS.len()
    }

    fn seconds(&self, quick: bool) -> f64 {
        time(quick) + 1.5
    }

    fn bed(&self, peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
        farm::bed(peer, yardsticks)
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let scheduler = match bed.who {
            Contender::Haproxy | Contender::Nginx => "lc",
            _ => "rr",
        };
        let service = |port: u16, servers: usize| Service {
            port,
            scheduler,
            servers: vec![(1, CAPACITY); servers],
        };
        let of = |port: u16| vec![service(port, 1), service(port + 1, 2)];
        let (services, all) = (
            [of(8001), of(8003)],
            [of(8001), of(8003)]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>(),
        );
        let farm = Farm::start(bed, &all, false)?;
        let time = time(turn.quick);
        let first = Snapshot::take();
        let mut clients = Vec::new();
        for (services, (_, count, _)) in services.iter().zip(PLOTS) {
            let asking = Clients {
                set: SMALL,
                count,
                seed: turn.round,
                seconds: time,
                timeout: 60_000,
                sources: 0,
            };
            clients.push(farm.ask(bed, services, &asking)?);
        }
        thread::sleep(Duration::from_secs_f64(time));
        let mut values = Vec::new();
        for ((plot, ..), asking) in PLOTS.into_iter().zip(clients) {
            for (servers, asked) in (1..).zip(farm::asked(asking, time)?) {
                values.push(Value {
                    plot: plot.to_owned(),
                    x: number(servers),
                    y: received(&asked, time)?,
                });
            }
        }
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        farm.end(bed)?;
        Ok((values, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let mut sentences = Vec::new();
        for (plot, _, who) in PLOTS {
            for series in document.series(self.name(), plot, &peers::of(self)) {
                let [(_, one), (_, two)] = series.points[..] else {
                    continue;
                };
                let gain = if two.min > one.max * 1.1 {
                    format!(
                        "a second server brings {:.2} times the throughput",
                        two.median / one.median
                    )
                } else {
                    "a second server does not raise the throughput".to_owned()
                };
                sentences.push(format!(
                    "{}, {who}: {gain}: {} and {} MB/s ({}).",
                    series.peer,
                    spread(&one),
                    spread(&two),
                    one.rounds.min(two.rounds)
                ));
            }
        }
        sentences
    }
}

fn time(quick: bool) -> f64 {
    if quick { 3.0 } else { 10.0 }
}

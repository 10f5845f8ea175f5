//! Mack, "Building a LVS", 2000: NetPIPE through each way of forwarding.

use std::fs;

use anyhow::{Context, Result, ensure};

use super::data::{CpuSeconds, Document, Value};
use super::{Axis, Experiment, Plot, Turn, peers};
use crate::compare::bed::Bed;
use crate::compare::programs::BULK_PORT;
use crate::machine::Snapshot;

/// Round trips of messages of growing size.
#[derive(Debug)]
pub(super) struct Mack;

const LATENCY: &str = "latency";
const THROUGHPUT: &str = "throughput";

impl Experiment for Mack {
    fn name(&self) -> &'static str {
        "mack"
    }

    fn title(&self) -> &'static str {
        "NetPIPE through each way of forwarding (Mack, 2000)"
    }

    fn what(&self) -> &'static str {
        "NPtcp sends a message and waits for it to come back, for sizes of 1 byte to 8 MiB (1 MiB with --quick), over one TCP \
         connection. Both ends are on CPU 0; a director that is a process has CPU 1. With direct routing and tunnels the server \
         answers by a line of its own to the client."
    }

    fn plots(&self) -> &'static [Plot] {
        const SIZE: Axis = Axis {
            name: "message size",
            unit: "bytes",
            log: true,
        };
        &[
            Plot {
                name: LATENCY,
                title: "Time of a message, one way",
                x: SIZE,
                y: Axis {
                    name: "time",
                    unit: "µs",
                    log: true,
                },
            },
            Plot {
                name: THROUGHPUT,
                title: "Throughput",
                x: SIZE,
                y: Axis {
                    name: "throughput",
                    unit: "Mbit/s",
                    log: true,
                },
            },
        ]
    }

    fn seconds(&self, quick: bool) -> f64 {
        if quick { 2.0 } else { 12.0 }
    }

    fn programs(&self) -> &'static [&'static str] {
        &["NPtcp"]
    }

    fn measure(
        &self,
        turn: &Turn<'_>,
        bed: &mut Bed,
    ) -> Result<(Vec<Value>, CpuSeconds, Option<String>)> {
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("np.out");
        let file = file.to_str().context("a path that is no UTF-8")?;
        let port = BULK_PORT.to_string();
        let (most, times) = if turn.quick {
            ("1048576", "10")
        } else {
            ("8388608", "50")
        };
        let common = [
            "20", "taskset", "-c", "0", "NPtcp", "-P", &port, "-p", "0", "-n", times, "-u", most,
        ];
        let limited = |seconds: &'static str| [&[seconds], &common[1..]].concat();
        let _server = bed.server.spawn("timeout", &limited("60"))?;
        bed.server.wait_for_port("tcp", BULK_PORT)?;
        let target = bed.target(false);
        let client = [&limited("60")[..], &["-h", target, "-o", file]].concat();
        let first = Snapshot::take();
        bed.client.run("timeout", &client)?;
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        let values = parse(&fs::read_to_string(file)?)?;
        Ok((values, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let peers = peers::names();
        let mut said = Vec::new();
        let latency = document.series(self.name(), LATENCY, &peers);
        let direct = latency
            .iter()
            .find(|series| series.peer == "direct")
            .and_then(|series| series.points.first());
        for series in &latency {
            let Some((size, own)) = series.points.first() else {
                continue;
            };
            let added = match direct {
                Some((_, direct)) if series.peer != "direct" => {
                    format!(
                        ", {:.1} µs more than direct ({:.1}, {:.1}-{:.1})",
                        own.median - direct.median,
                        direct.median,
                        direct.min,
                        direct.max
                    )
                }
                _ => String::new(),
            };
            said.push(format!(
                "{}: a message of {size:.0} byte takes {:.1} µs one way ({:.1}-{:.1}, {} rounds){added}.",
                series.peer, own.median, own.min, own.max, own.rounds
            ));
        }
        let throughput = document.series(self.name(), THROUGHPUT, &peers);
        let best = |series: &super::data::Series| {
            let points = series.points.iter().copied();
            points.max_by(|a, b| a.1.median.total_cmp(&b.1.median))
        };
        let mut order: Vec<_> = throughput
            .iter()
            .filter_map(|series| Some((&series.peer, best(series)?)))
            .collect();
        order.sort_by(|a, b| b.1.1.median.total_cmp(&a.1.1.median));
        for (peer, (size, rate)) in order {
            said.push(format!(
                "{peer}: {:.0} Mbit/s at most ({:.0}-{:.0}, {} rounds), with messages of {size:.0} bytes.",
                rate.median, rate.min, rate.max, rate.rounds
            ));
        }
        said
    }
}

/// Lines of `bytes Mbit/s seconds`.
fn parse(text: &str) -> Result<Vec<Value>> {
    let mut values = Vec::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace().map(str::parse::<f64>);
        let (Some(Ok(x)), Some(Ok(rate)), Some(Ok(time))) =
            (words.next(), words.next(), words.next())
        else {
            anyhow::bail!("NPtcp wrote a line that is not `bytes Mbit/s seconds`: {line:?}");
        };
        // A clock that did not move.
        if x <= 0.0 || rate <= 0.0 || time <= 0.0 {
            continue;
        }
        values.push(Value {
            plot: LATENCY.into(),
            x,
            y: time * 1e6,
        });
        values.push(Value {
            plot: THROUGHPUT.into(),
            x,
            y: rate,
        });
    }
    ensure!(!values.is_empty(), "NPtcp wrote no figures");
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_netpipe() {
        let values = parse("       1 0.5   0.00001500\n   16384 28339.891892   0.00000441\n")
            .expect("figures");
        assert_eq!(values.len(), 4);
        assert!((values[0].y - 15.0).abs() < 1e-9);
        assert!((values[3].x - 16384.0).abs() < 1e-9 && values[3].plot == THROUGHPUT);
        assert!(parse("").is_err());
        assert!(parse("bad 1 2\n").is_err());
    }
}

//! Haddad and Pourzandi, "Linux on Carrier Grade Web Servers", 2001: requests and connections per
//! second by the number of clients, and the response time of a single client.

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use super::data::{Document, Value};
use super::peers::Peer;
use super::{Axis, Experiment, Measured, Plot, Turn, axis, log_axis, peers, plot, web};
use crate::compare::bed::Bed;
use crate::compare::tcp::requests;
use crate::machine::Snapshot;

/// The experiment that measures the maximum rate of the clients' requests.
#[derive(Debug)]
pub(super) struct Haddad;

const REQUESTS: &str = "requests";
const CONNECTIONS: &str = "connections";
const WAIT: &str = "wait";

impl Experiment for Haddad {
    fn name(&self) -> &'static str {
        "haddad"
    }

    fn title(&self) -> &'static str {
        "Requests and connections a second by clients (Haddad and Pourzandi, 2001)"
    }

    fn what(&self) -> &'static str {
        "wrk requests a page of 628 bytes as fast as possible, over the given number of parallel \
         connections, which are persistent (requests) or end after each reply (connections). The \
         first point is a single client; the last plot shows its mean wait. Clients and servers \
         are on CPU 0 and limit the rates; a director that is a process is on CPU 1."
    }

    fn plots(&self) -> &'static [Plot] {
        const CLIENTS: Axis = log_axis("clients at once", "count");
        const {
            &[
                plot(
                    REQUESTS,
                    "Requests over persistent connections",
                    CLIENTS,
                    axis("requests", "1/s"),
                ),
                plot(
                    CONNECTIONS,
                    "Connections, one request each",
                    CLIENTS,
                    axis("connections", "1/s"),
                ),
                plot(
                    WAIT,
                    "Mean wait for a reply over a persistent connection",
                    CLIENTS,
                    log_axis("wait", "µs"),
                ),
            ]
        }
    }

    fn seconds(&self, quick: bool) -> f64 {
        if quick { 3.3 } else { 10.4 }
    }

    fn is_quick(&self, peer: &Peer) -> bool {
        ["direct", "lvs-nat", "nftables", "haproxy"].contains(&peer.name)
    }

    fn programs(&self) -> &'static [&'static str] {
        &["wrk", "nginx"]
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let directory = tempfile::tempdir()?;
        let mut server = web::serve(&bed.server, directory.path(), None)?;
        let (clients, seconds): (&[u32], &str) = if turn.quick {
            (&[1, 64], "-d1s")
        } else {
            (&[1, 8, 64], "-d2s")
        };
        let url = format!("http://{}/page", bed.target(false));
        let first = Snapshot::take();
        let mut values = Vec::new();
        for count in clients {
            let connections = format!("-c{count}");
            let words = [
                "20",
                "taskset",
                "-c",
                "0",
                "wrk",
                "-t1",
                &connections,
                seconds,
                &url,
            ];
            let mut add = |plot: &str, y: f64| values.push(Value::new(plot, f64::from(*count), y));
            let (rate, wait) = parse(&bed.client.run("timeout", &words)?)?;
            add(REQUESTS, rate);
            add(WAIT, wait);
            if *count > 1 {
                let words = [&words[..], &["-H", "Connection: close"]].concat();
                add(CONNECTIONS, parse(&bed.client.run("timeout", &words)?)?.0);
            }
        }
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        server.stop(Signal::SIGTERM)?;
        Ok((values, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let peers = peers::of(self);
        let mut sentences = Vec::new();
        for (plot, what) in [(REQUESTS, "requests/s"), (CONNECTIONS, "connections/s")] {
            let mut last: Vec<_> = document
                .series(self.name(), plot, &peers)
                .into_iter()
                .filter_map(|series| Some((series.points.last().copied()?, series.peer)))
                .collect();
            last.sort_by(|a, b| b.0.1.median.total_cmp(&a.0.1.median));
            for ((clients, rate), peer) in last {
                sentences.push(format!(
                    "{peer}: {:.0} {what} ({:.0}-{:.0}, {}) for {clients:.0} clients.",
                    rate.median, rate.min, rate.max, rate.rounds
                ));
            }
        }
        for series in document.series(self.name(), WAIT, &peers) {
            if let Some((clients, wait)) = series.points.first() {
                sentences.push(format!(
                    "{}: {clients:.0} client waits {:.0} µs for a reply ({:.0}-{:.0}, {}).",
                    series.peer, wait.median, wait.min, wait.max, wait.rounds
                ));
            }
        }
        sentences
    }
}

/// Parses the output of wrk. Returns the requests per second, and the mean wait in microseconds.
fn parse(printed: &str) -> Result<(f64, f64)> {
    let rate = requests(printed)?;
    let mut lines = printed.lines();
    let wait = lines.find_map(|line| line.trim().strip_prefix("Latency"));
    let wait = wait.and_then(|rest| rest.split_ascii_whitespace().next());
    let wait = wait.and_then(|wait| {
        let unit = wait.find(|c: char| c.is_ascii_alphabetic())?;
        let number: f64 = wait[..unit].parse().ok()?;
        let in_us = match &wait[unit..] {
            "us" => 1.0,
            "ms" => 1e3,
            "s" => 1e6,
            _ => return None,
        };
        Some(number * in_us)
    });
    let wait = wait.with_context(|| format!("wrk reports no latency:\n{printed}"))?;
    Ok((rate, wait))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrk_figures_are_parsed_and_socket_errors_refused() {
        let printed = "  Thread Stats   Avg      Stdev     Max   +/- Stdev\n    Latency     1.25ms    1.00us  12.00us   90.00%\n    Req/Sec    50.00k     1.00k   52.00k    70.00%\nRequests/sec:  51234.50\n";
        let (rate, wait) = parse(printed).expect("the output is parsed");
        assert!((rate - 51234.5).abs() < 1e-9 && (wait - 1250.0).abs() < 1e-9);
        let wrong = format!("{printed}  Socket errors: connect 1, read 0\n");
        assert!(parse(&wrong).is_err() && parse("").is_err());
    }
}

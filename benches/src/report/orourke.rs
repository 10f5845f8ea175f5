//! O'Rourke and Keefe, "Performance Evaluation of Linux Virtual Server", LISA 2001: one request a
//! connection, offered at rates that grow.

use anyhow::{Context, Result, ensure};
use lvs_testbed::programs;
use nix::sys::signal::Signal;

use super::data::{CpuSeconds, Document, Value};
use super::{Axis, Experiment, Plot, Turn, peers, web};
use crate::compare::bed::{Bed, VIP};
use crate::compare::contender::{Contender, Method};
use crate::machine::Snapshot;

/// Reply rate over offered rate.
#[derive(Debug)]
pub(super) struct Orourke;

const REPLIES: &str = "replies";
const ERRORS: &str = "errors";
const RESPONSE: &str = "response";
const SCALING: &str = "scaling";

/// Requests a second that one server answers.
const CAPACITY: u32 = 500;
/// Servers, as the directors have them.
const SERVERS: [u32; 3] = [1, 2, 4];
/// An axis that is logarithmic has no zero.
const LEAST_PERCENT: f64 = 0.01;

impl Experiment for Orourke {
    fn name(&self) -> &'static str {
        "orourke"
    }

    fn title(&self) -> &'static str {
        "Reply rate over offered rate (O'Rourke and Keefe, 2001)"
    }

    fn what(&self) -> &'static str {
        "httperf asks for a page of 628 bytes, one request a connection, at rates that grow, and gives up after a second. Each \
         of four servers answers 500 requests a second, holds back a tenth of that, and refuses what is beyond with 503, which \
         counts as an error. Directly, by routing, direct routing and tunnels, one server stands for the four, and answers as much. The \
         response time is that of all replies, refusals too. The client and the servers are on CPU 0, a director that is a \
         process on CPU 1. The last plot has the replies at an offered rate of 1.3 times what the servers can do together, \
         by their number."
    }

    fn plots(&self) -> &'static [Plot] {
        const OFFERED: Axis = Axis {
            name: "offered rate",
            unit: "requests/s",
            log: false,
        };
        const REPLY_RATE: Axis = Axis {
            name: "reply rate",
            unit: "replies/s",
            log: false,
        };
        &[
            Plot {
                name: REPLIES,
                title: "Replies",
                x: OFFERED,
                y: REPLY_RATE,
            },
            Plot {
                name: ERRORS,
                title: "Errors, 0.01 % where there were fewer",
                x: OFFERED,
                y: Axis {
                    name: "errors",
                    unit: "% of requests",
                    log: true,
                },
            },
            Plot {
                name: RESPONSE,
                title: "Mean time to the first byte of a reply, refusals too",
                x: OFFERED,
                y: Axis {
                    name: "response time",
                    unit: "ms",
                    log: true,
                },
            },
            Plot {
                name: SCALING,
                title: "Replies by the number of servers, at 1.3 times what they can do",
                x: Axis {
                    name: "servers",
                    unit: "count",
                    log: false,
                },
                y: REPLY_RATE,
            },
        ]
    }

    fn seconds(&self, quick: bool) -> f64 {
        if quick { 4.0 } else { 24.0 }
    }

    fn programs(&self) -> &'static [&'static str] {
        &["httperf", "nginx"]
    }

    fn measure(
        &self,
        turn: &Turn<'_>,
        bed: &mut Bed,
    ) -> Result<(Vec<Value>, CpuSeconds, Option<String>)> {
        let directory = tempfile::tempdir()?;
        let mut server = web::serve(bed, directory.path(), Some(CAPACITY * stands_for(bed.who)))?;
        let (rates, seconds): (&[u32], u32) = if turn.quick {
            (&[1500, 2500], 1)
        } else {
            (&[250, 500, 1000, 1500, 2000, 2500, 3000], 2)
        };
        let first = Snapshot::take();
        let mut values = Vec::new();
        for rate in rates {
            let offered = offer(bed, *rate, seconds)?;
            let mut add = |plot: &str, y: f64| {
                values.push(Value {
                    plot: plot.into(),
                    x: f64::from(*rate),
                    y,
                });
            };
            add(ERRORS, offered.errors.max(LEAST_PERCENT));
            if offered.rate > 0.0 {
                add(REPLIES, offered.rate);
                add(RESPONSE, offered.response);
            }
        }
        let servers: &[u32] = match bed.who {
            who if who.is_ours() && stands_for(who) == 1 && turn.quick => &[1, 4],
            who if who.is_ours() && stands_for(who) == 1 => &SERVERS,
            _ => &[4],
        };
        for count in servers {
            take_away(bed, *count)?;
            let offered = offer(bed, CAPACITY * count * 13 / 10, seconds);
            give_back(bed, *count)?;
            values.push(Value {
                plot: SCALING.into(),
                x: f64::from(*count),
                y: offered?.rate,
            });
        }
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        server.stop(Signal::SIGTERM)?;
        Ok((values, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let peers = peers::names();
        let mut said = Vec::new();
        let errors = document.series(self.name(), ERRORS, &peers);
        for series in document.series(self.name(), REPLIES, &peers) {
            let of_peer = errors.iter().find(|errors| errors.peer == series.peer);
            // Up to the first rate with errors.
            let good = series.points.iter().take_while(|(rate, _)| {
                let at = of_peer.and_then(|errors| errors.points.iter().find(|(x, _)| x == rate));
                at.is_some_and(|(_, errors)| errors.max <= LEAST_PERCENT)
            });
            let good = good.last();
            let best = series.points.iter().map(|(_, replies)| *replies);
            let best = best.max_by(|a, b| a.median.total_cmp(&b.median));
            let Some(best) = best else {
                continue;
            };
            let good = match good {
                Some((rate, _)) => format!("without errors up to {rate:.0} requests/s"),
                None => "errors at the lowest rate already".to_owned(),
            };
            said.push(format!(
                "{}: {good}; {:.0} replies/s at most ({:.0}-{:.0}, {} rounds).",
                series.peer, best.median, best.min, best.max, best.rounds
            ));
        }
        for series in document.series(self.name(), SCALING, &peers) {
            let (Some((least, one)), Some((most, all))) =
                (series.points.first(), series.points.last())
            else {
                continue;
            };
            if least < most {
                let (grown, asked) = (all.median / one.median, most / least);
                let limited = match grown > 0.9 * asked {
                    true => "the servers are what limits them",
                    false => "something else than the servers limits them",
                };
                said.push(format!(
                    "{}: {most:.0} servers answer {grown:.2} times as much as {least:.0} ({:.0} and {:.0} replies/s): {limited}.",
                    series.peer, all.median, one.median
                ));
            }
        }
        said
    }
}

/// Without translation all four servers have one address, by which the host tells them apart; and
/// who asks for one of them reaches no other.
fn stands_for(who: Contender) -> u32 {
    match who {
        Contender::AfPacket(Method::Dr | Method::Tunnel) | Contender::Direct | Contender::Route => {
            4
        }
        _ => 1,
    }
}

/// What came of an offered rate.
#[derive(Debug, PartialEq)]
struct Offered {
    /// Good replies a second.
    rate: f64,
    /// Percent of requests.
    errors: f64,
    /// Milliseconds.
    response: f64,
}

fn offer(bed: &Bed, rate: u32, seconds: u32) -> Result<Offered> {
    let (count, rate) = ((rate * seconds).to_string(), rate.to_string());
    let words = [
        "20",
        "taskset",
        "-c",
        "0",
        "httperf",
        "--hog",
        "--server",
        bed.target(false),
        "--port",
        "80",
        "--uri",
        "/page",
        "--num-conns",
        &count,
        "--rate",
        &rate,
        "--timeout",
        "1",
    ];
    parse(&bed.client.run("timeout", &words)?)
}

fn parse(printed: &str) -> Result<Offered> {
    let after = |line: &str, word: &str| -> Result<f64> {
        let found = printed.lines().find(|found| found.starts_with(line));
        let rest = found.and_then(|found| found.split_once(word));
        let number = rest.and_then(|(_, rest)| {
            let end = |c: char| !(c.is_ascii_digit() || c == '.');
            rest.trim_start().split(end).next()?.parse().ok()
        });
        number.with_context(|| format!("httperf says nothing of {line} {word}:\n{printed}"))
    };
    let tried = after("Total:", "connections ")?;
    let took = after("Total:", "test-duration ")?;
    ensure!(tried > 0.0 && took > 0.0, "httperf did nothing:\n{printed}");
    let wrong = after("Errors: total", "total ")? + after("Reply status:", "5xx=")?;
    Ok(Offered {
        rate: after("Reply status:", "2xx=")? / took,
        errors: wrong / tried * 100.0,
        response: after("Reply time [ms]:", "response ")?,
    })
}

/// Leaves a director of ours so many of its servers.
fn take_away(bed: &Bed, count: u32) -> Result<()> {
    change(bed, count, |server| {
        format!("-d -t {VIP}:80 -r {server}:80")
    })
}

fn give_back(bed: &Bed, count: u32) -> Result<()> {
    let flag = match bed.who {
        Contender::AfPacket(method) | Contender::InKernel(method) => method.flag(),
        Contender::Xdp => Method::Nat.flag(),
        _ => "-m",
    };
    change(bed, count, |server| {
        format!("-a -t {VIP}:80 -r {server}:80 {flag} -w 1")
    })
}

fn change(bed: &Bed, count: u32, words: impl Fn(&str) -> String) -> Result<()> {
    if !bed.who.is_ours() {
        return Ok(());
    }
    let lvsadm = programs::find("lvsadm")?;
    for host in 11 + count..15 {
        let words = words(&format!("10.72.0.{host}"));
        let words: Vec<&str> = words.split(' ').collect();
        bed.director.run(lvsadm.clone(), &words)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "Total: connections 200 requests 200 replies 190 test-duration 2.000 s\n\n\
         Reply time [ms]: response 4.5 transfer 0.0\n\
         Reply status: 1xx=0 2xx=180 3xx=0 4xx=0 5xx=10\n\n\
         Errors: total 10 client-timo 10 socket-timo 0 connrefused 0 connreset 0\n\
         Errors: fd-unavail 0 addrunavail 0 ftab-full 0 other 0\n";

    #[test]
    fn figures_of_httperf() {
        let offered = parse(PRINTED).expect("figures");
        let expected = Offered {
            rate: 90.0,
            errors: 10.0,
            response: 4.5,
        };
        assert_eq!(offered, expected);
        assert!(parse("").is_err());
        assert!(parse("Total: connections x").is_err());
    }
}

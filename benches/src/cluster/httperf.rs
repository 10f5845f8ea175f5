//! Parses the output of httperf, and merges several outputs.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

/// Results of one httperf, or of several.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Number of connections that were started.
    pub connections: u64,
    /// Number of replies, of any status.
    pub replies: u64,
    /// Replies a second with a status of 2xx.
    pub rate: f64,
    /// Errors and replies of 4xx and 5xx, in percent of the started connections; at most 100. The
    /// errors include connections that could not be started.
    pub error_percent: f64,
    /// Mean time in milliseconds from a request to the first byte of its reply; `None` without
    /// replies.
    pub response_ms: Option<f64>,
    /// Mean time in milliseconds until a connection was established; `None` without replies.
    pub connect_ms: Option<f64>,
    /// Numbers of replies by the first digit of their status: 1xx to 5xx.
    pub status: [u64; 5],
    /// Numbers of errors, by the kinds that httperf distinguishes.
    pub errors: Errors,
    /// Duration of connections with a reply, as httperf counts it; `None` without such connections,
    /// or if the duration of some of them is unknown.
    pub lifetime: Option<Lifetime>,
    #[serde(skip)]
    histogram: BTreeMap<u32, u64>,
}

/// Numbers of errors by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Errors {
    /// Requests without a reply in time.
    pub timeout: u64,
    /// TCP connections that timed out.
    pub socket_timeout: u64,
    /// TCP connections that the server refused.
    pub refused: u64,
    /// TCP connections that were reset.
    pub reset: u64,
    /// Connections for which the client had no free descriptor.
    pub no_descriptor: u64,
    /// Connections for which the client had no free port.
    pub no_port: u64,
    /// Connections for which the client's system had no free entry in its table of open files.
    pub no_file: u64,
    /// Other errors.
    pub other: u64,
}

impl Errors {
    /// The number of errors of each kind.
    #[must_use]
    pub fn kinds(&self) -> [(&'static str, u64); 8] {
        [
            ("timeout", self.timeout),
            ("socket timeout", self.socket_timeout),
            ("refused", self.refused),
            ("reset", self.reset),
            ("no descriptor", self.no_descriptor),
            ("no port", self.no_port),
            ("no file", self.no_file),
            ("other", self.other),
        ]
    }

    fn total(&self) -> u64 {
        self.kinds().iter().map(|(_, count)| count).sum()
    }

    /// Errors of the client's host, which are independent of the server.
    #[must_use]
    pub fn of_client(&self) -> u64 {
        self.no_descriptor + self.no_port + self.no_file
    }
}

/// Percentiles of connection times, rounded up to milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Lifetime {
    /// The median.
    pub p50_ms: u32,
    /// The 90th percentile.
    pub p90_ms: u32,
    /// The 99th percentile.
    pub p99_ms: u32,
}

impl Figures {
    /// Parses the output of `httperf -v -v`. `seconds`: planned duration of the requests;
    /// `timeout`: time limit of a request in seconds.
    ///
    /// # Errors
    ///
    /// If a number is missing, or no request was sent.
    pub fn parse(printed: &str, seconds: f64, timeout: f64) -> Result<Self> {
        let after = |line: &str, word: &str| -> Result<f64> {
            let found = printed
                .lines()
                .find(|found| found.starts_with(line) && found.contains(word));
            let rest = found.and_then(|found| found.split_once(word));
            let number = rest.and_then(|(_, rest)| {
                let end = |c: char| !(c.is_ascii_digit() || c == '.');
                rest.trim_start().split(end).next()?.parse().ok()
            });
            number.with_context(|| format!("the output of httperf lacks `{line} {word}`"))
        };
        let count = |line: &str, word: &str| -> Result<u64> {
            let number = after(line, word)?;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "httperf prints a whole number without a sign"
            )]
            let number = number as u64;
            Ok(number)
        };
        let errors = |word: &str| count("Errors:", word);
        let errors = Errors {
            timeout: errors("client-timo ")?,
            socket_timeout: errors("socket-timo ")?,
            refused: errors("connrefused ")?,
            reset: errors("connreset ")?,
            no_descriptor: errors("fd-unavail ")?,
            no_port: errors("addrunavail ")?,
            no_file: errors("ftab-full ")?,
            other: errors("other ")?,
        };
        let mut status = [0; 5];
        for (number, word) in status
            .iter_mut()
            .zip(["1xx=", "2xx=", "3xx=", "4xx=", "5xx="])
        {
            *number = count("Reply status:", word)?;
        }
        let replies = count("Total:", "replies ")?;
        let mut took = after("Total:", "test-duration ")?;
        // The last requests may have waited for `timeout` seconds, in which httperf sent no others.
        // This wait does not count, unless the planned duration includes it.
        if errors.timeout > 0 {
            took = (took - timeout).max(took.min(seconds));
        }
        ensure!(took > 0.0, "httperf sent no request");
        let some = |value: f64| (replies > 0).then_some(value);
        let mut figures = Self {
            connections: count("Total:", "connections ")?,
            replies,
            rate: number(status[1]) / took,
            response_ms: some(after("Reply time [ms]:", "response ")?),
            connect_ms: some(after("Connection time [ms]: connect", "connect ")?),
            status,
            errors,
            histogram: histogram(printed),
            ..Self::default()
        };
        figures.finish();
        Ok(figures)
    }

    /// Merges several results: adds rates and numbers, weights mean times by the number of replies,
    /// and computes the percentiles of all connections together.
    #[must_use]
    pub fn merge<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut sum = Self::default();
        let (mut response, mut connect) = (0.0, 0.0);
        for one in all {
            sum.connections += one.connections;
            sum.replies += one.replies;
            sum.rate += one.rate;
            let replies = number(one.replies);
            response += one.response_ms.unwrap_or(0.0) * replies;
            connect += one.connect_ms.unwrap_or(0.0) * replies;
            for (sum, one) in sum.status.iter_mut().zip(one.status) {
                *sum += one;
            }
            let (errors, of) = (&mut sum.errors, one.errors);
            errors.timeout += of.timeout;
            errors.socket_timeout += of.socket_timeout;
            errors.refused += of.refused;
            errors.reset += of.reset;
            errors.no_descriptor += of.no_descriptor;
            errors.no_port += of.no_port;
            errors.no_file += of.no_file;
            errors.other += of.other;
            for (time, count) in &one.histogram {
                *sum.histogram.entry(*time).or_default() += count;
            }
        }
        if sum.replies > 0 {
            sum.response_ms = Some(response / number(sum.replies));
            sum.connect_ms = Some(connect / number(sum.replies));
        }
        sum.finish();
        sum
    }

    fn finish(&mut self) {
        let wrong = self.errors.total() + self.status[3] + self.status[4];
        // A connection that could not be started is an error, but not one of the `connections`.
        let tried = self.connections.max(wrong).max(1);
        self.error_percent = number(wrong) / number(tried) * 100.0;
        self.lifetime = self.percentiles();
    }

    /// Computes the percentiles of the connection times. `None` if the histogram is empty, or does
    /// not contain all replies.
    fn percentiles(&self) -> Option<Lifetime> {
        let all: u64 = self.histogram.values().sum();
        if all == 0 || all < self.replies {
            return None;
        }
        let below = |percent: u64| {
            let mut left = (all * percent).div_ceil(100);
            let mut times = self.histogram.iter();
            times.find_map(|(time, count)| {
                left = left.saturating_sub(*count);
                (left == 0).then_some(*time)
            })
        };
        Some(Lifetime {
            p50_ms: below(50)?,
            p90_ms: below(90)?,
            p99_ms: below(99)?,
        })
    }
}

/// Number of connections by duration, rounded up to milliseconds. A line of httperf's histogram
/// has the middle of an interval of one millisecond, and the number of connections in it.
fn histogram(printed: &str) -> BTreeMap<u32, u64> {
    let lines = printed.lines();
    let lines = lines.skip_while(|line| !line.starts_with("Connection lifetime histogram"));
    let mut bins = BTreeMap::new();
    for line in lines.skip(1).take_while(|line| !line.trim().is_empty()) {
        let mut words = line.split_ascii_whitespace();
        let bin = || -> Option<(u32, u64)> {
            let whole = words.next()?.split_once('.')?.0.parse::<u32>().ok()?;
            Some((whole.checked_add(1)?, words.next()?.parse().ok()?))
        };
        let mut bin = bin;
        // A line with `:` stands for intervals without connections.
        if let Some((time, count)) = bin() {
            bins.insert(time, count);
        }
    }
    bins
}

fn number(count: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let number = count as f64;
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = include_str!("httperf.txt");

    #[test]
    fn httperf_figures_are_parsed() {
        let figures = Figures::parse(PRINTED, 2.0, 1.0).expect("the output is parsed");
        assert_eq!(figures.connections, 500);
        assert_eq!(figures.replies, 490);
        assert_eq!(figures.status, [0, 480, 0, 4, 6]);
        assert_eq!(figures.errors.timeout, 7);
        assert_eq!(figures.errors.no_descriptor, 3);
        assert_eq!(figures.errors.total(), 10);
        assert!((figures.error_percent - 4.0).abs() < 1e-9);
        // 480 replies arrived in the two seconds before the last second of waiting.
        assert!((figures.rate - 240.0).abs() < 1e-9);
        assert_eq!(
            (figures.response_ms, figures.connect_ms),
            (Some(4.5), Some(0.2))
        );
        let lifetime = figures.lifetime.expect("the percentiles are known");
        assert_eq!(
            (lifetime.p50_ms, lifetime.p90_ms, lifetime.p99_ms),
            (1, 2, 6)
        );
    }

    #[test]
    fn httperf_rate_excludes_wait_for_timed_out_requests() {
        for (seconds, rate) in [
            (2.0, 240.0),
            (1.0, 240.0),
            (2.5, 192.0),
            (3.0, 160.0),
            (9.0, 160.0),
        ] {
            let figures = Figures::parse(PRINTED, seconds, 1.0).expect("the output is parsed");
            assert!(
                (figures.rate - rate).abs() < 1e-9,
                "{seconds}: {}",
                figures.rate
            );
        }
        let all_in_time = PRINTED.replace("client-timo 7", "client-timo 0");
        let figures = Figures::parse(&all_in_time, 2.0, 1.0).expect("the output is parsed");
        assert!((figures.rate - 160.0).abs() < 1e-9);
    }

    #[test]
    fn results_of_several_hosts_are_merged() {
        let one = Figures::parse(PRINTED, 2.0, 1.0).expect("the output is parsed");
        let mut other = one.clone();
        other.replies = 980;
        other.response_ms = Some(9.0);
        let sum = Figures::merge([&one, &other]);
        assert!((sum.rate - 480.0).abs() < 1e-9);
        assert_eq!((sum.connections, sum.errors.timeout), (1000, 14));
        assert!((sum.response_ms.expect("the response time is known") - 7.5).abs() < 1e-9);
        // Some connections are missing in the histograms.
        assert_eq!(sum.lifetime, None);
        assert_eq!(Figures::merge([&one, &one]).lifetime, one.lifetime);
        assert_eq!(
            Figures::merge([]).error_percent.to_bits(),
            0.0_f64.to_bits()
        );
    }

    #[test]
    fn output_without_all_lines_of_httperf_is_refused() {
        assert!(Figures::parse("", 2.0, 1.0).is_err());
        assert!(Figures::parse("Total: connections x", 2.0, 1.0).is_err());
        for line in 0..PRINTED.lines().count() {
            let kept: Vec<_> = PRINTED.lines().take(line).collect();
            let whole = kept
                .iter()
                .any(|line| line.starts_with("Errors: fd-unavail"));
            assert_eq!(
                Figures::parse(&kept.join("\n"), 2.0, 1.0).is_ok(),
                whole,
                "{line}"
            );
        }
    }
}

//! O'Rourke and Keefe, "Performance Evaluation of Linux Virtual Server", LISA 2001: one request for
//! each connection, offered at increasing rates.

mod ask;

use anyhow::Result;

use self::ask::{Asked, CAPACITY, CLIENTS, SERVERS, Seen, give_back, has_fewer, take_away};
use super::data::{Document, Series, Value};
use super::peers::{PEERS, Peer};
use super::{Axis, Experiment, Measured, Plot, Turn, axis, log_axis, peers, plot};
use crate::compare::bed::Bed;
use crate::compare::contender::Contender;
use crate::stats::Spread;
use crate::yardsticks::Yardsticks;

/// The experiment that measures the reply rate at increasing offered rates.
#[derive(Debug)]
pub(super) struct Orourke;

const REPLIES: &str = "replies";
const ERRORS: &str = "errors";
const RESPONSE: &str = "response";
const DIRECTOR: &str = "director-cpu";
const SERVERS_CPU: &str = "servers-cpu";
const SCALING: &str = "scaling";
const FREE: &str = "free";
const FREE_WAIT: &str = "free-wait";
const FREE_CPU: &str = "free-cpu";
const COST: &str = "cost";
const SHARING: &str = "sharing";
const SHARING_WAIT: &str = "sharing-wait";

/// Number of servers, suffix of their plots' names, the rates, and the rates of `--quick`. The last
/// rate is 1.3 times the servers' capacity.
const RATES: [(usize, &str, &[u32], &[u32]); 3] = [
    (4, "", &[500, 1000, 1500, 2000, 2200, 2600], &[1500, 2600]),
    (2, "-2", &[900, 1300], &[]),
    (1, "-1", &[450, 650], &[650]),
];
/// Rates for servers of unlimited capacity; the experiment searches for the highest one that
/// succeeds.
const FREE_RATES: &[u32] = &[
    1000, 2000, 4000, 6000, 8000, 10_000, 12_000, 14_000, 16_000, 18_000, 20_000, 22_000, 24_000,
    28_000, 32_000,
];
/// As [`FREE_RATES`], with `--quick`.
const FREE_RATES_QUICK: &[u32] = &[4000, 8000, 16_000];
/// The rate at which the CPU time of a request is measured.
const COST_RATE: u32 = 1000;
/// The smallest plotted percentage: a logarithmic axis has no zero.
const LEAST_PERCENT: f64 = 0.01;
/// Minimum share of the requested rate that the servers must answer with 2xx for a result that
/// counts.
const REACHED: f64 = 0.97;

/// The labels of bars, one for each peer.
const NAMES: [&str; PEERS.len()] = peers::names(&PEERS);
/// Labels of bars: the dataplane shares its core with the receiving kernel thread (`shared`), or
/// does not (`apart`).
const PLACES: [&str; 6] = [
    "lvs-nat shared",
    "lvs-nat apart",
    "lvs-dr shared",
    "lvs-dr apart",
    "lvs-tunnel shared",
    "lvs-tunnel apart",
];

const OFFERED: Axis = axis("offered rate", "requests/s");
const REPLY_RATE: Axis = axis("reply rate", "replies/s");
const ERROR_RATE: Axis = log_axis("errors", "% of requests");
const PEER: Axis = axis("peer", "name");

impl Experiment for Orourke {
    fn name(&self) -> &'static str {
        "orourke"
    }

    fn title(&self) -> &'static str {
        "Reply rate over offered rate (O'Rourke and Keefe, 2001)"
    }

    fn what(&self) -> &'static str {
        "Four clients, each a host with its own httperf, together request a page of 628 bytes, one \
         request per connection, at increasing rates. Each rate lasts a second (0.4 s with \
         --quick), and a client gives up after a second. Each of four servers, which are hosts \
         too, answers 500 requests per second, delays a tenth of them, and refuses all others with \
         503, which counts as an error. With direct and routing, each client has its own server, \
         if there are as many; otherwise the director chooses. The response time includes \
         refusals. The same page is then measured without that limit, up to the highest rate at \
         which at most one request in 10,000 fails and 97 % of the requests are answered. Clients \
         and servers run on CPU 0; the director's process and its receiving thread run on CPU 1, \
         where the receiving thread has precedence, like interrupts. Each httperf polls \
         continuously, so the four run alternately for some milliseconds and send requests in \
         bursts: response times of that size are caused by httperf. The director's CPU is that of \
         its process and of the threads that receive on its interfaces; the CPU of the servers is \
         that of nginx and of the thread that receives for them. Last, the director's receiving \
         thread is moved from the core of the director's process (shared) to CPU 0, with the \
         clients and servers (apart). The published figures are not available and not drawn."
    }

    fn plots(&self) -> &'static [Plot] {
        const CORE: &str = "% of a core";
        const {
            &[
                plot(REPLIES, "Replies, four servers", OFFERED, REPLY_RATE),
                plot(
                    ERRORS,
                    "Errors, four servers; 0.01 % where there were fewer",
                    OFFERED,
                    ERROR_RATE,
                ),
                plot(
                    RESPONSE,
                    "Mean time to the first byte of a reply, four servers, refusals too",
                    OFFERED,
                    log_axis("response time", "ms"),
                ),
                plot(
                    DIRECTOR,
                    "CPU of the director, four servers",
                    OFFERED,
                    axis("CPU", CORE),
                ),
                plot(
                    SERVERS_CPU,
                    "CPU of the four servers together",
                    OFFERED,
                    axis("CPU", CORE),
                ),
                plot("replies-2", "Replies, two servers", OFFERED, REPLY_RATE),
                plot("errors-2", "Errors, two servers", OFFERED, ERROR_RATE),
                plot("replies-1", "Replies, one server", OFFERED, REPLY_RATE),
                plot("errors-1", "Errors, one server", OFFERED, ERROR_RATE),
                plot(
                    SCALING,
                    "Replies by the number of servers, at 1.3 times their capacity",
                    axis("servers", "count"),
                    REPLY_RATE,
                ),
                plot(
                    FREE,
                    "The highest rate with errors of 0.01 % at most, servers without limit",
                    PEER,
                    axis("rate", "requests/s"),
                ),
                plot(
                    FREE_WAIT,
                    "Mean time to the first byte at that rate",
                    PEER,
                    axis("response time", "ms"),
                ),
                plot(
                    FREE_CPU,
                    "CPU of the director at that rate",
                    PEER,
                    axis("CPU", CORE),
                ),
                plot(
                    COST,
                    "CPU of the director for a request and its connection, at 1,000 a second",
                    PEER,
                    axis("CPU", "µs/request"),
                ),
                plot(
                    SHARING,
                    "CPU of a request: core shared with the receiving thread, and not",
                    PEER,
                    axis("CPU", "µs/request"),
                ),
                plot(
                    SHARING_WAIT,
                    "Time to the first byte: core shared with the receiving thread, and not",
                    PEER,
                    axis("response time", "ms"),
                ),
            ]
        }
    }

    fn bars(&self, plot: &Plot) -> &'static [&'static str] {
        match plot.name {
            FREE | FREE_WAIT | FREE_CPU | COST => &NAMES,
            SHARING | SHARING_WAIT => &PLACES,
            _ => &[],
        }
    }

    fn is_quick(&self, peer: &Peer) -> bool {
        ["direct", "lvs-nat", "lvs-dr", "haproxy", "ip_vs nat"].contains(&peer.name)
    }

    fn peers(&self) -> &'static [Peer] {
        &PEERS
    }

    fn seconds(&self, quick: bool) -> f64 {
        if quick { 3.7 } else { 18.0 }
    }

    fn programs(&self) -> &'static [&'static str] {
        &["httperf", "nginx"]
    }

    fn bed(&self, peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
        let mut bed = super::usual_bed(peer, yardsticks)?;
        bed.spread(CLIENTS, SERVERS)?;
        Ok(bed)
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let mut asked = Asked::new(turn, bed)?;
        let mut values = Values::default();
        for (servers, plots, rates, quick) in RATES {
            if servers < SERVERS && !has_fewer(asked.bed.who) {
                continue;
            }
            take_away(asked.bed, servers)?;
            let rates = if turn.quick { quick } else { rates };
            for rate in rates {
                let seen = asked.ask("/page", servers, *rate)?;
                let at_limit = seen.figures.errors.of_client();
                if at_limit > 0 {
                    let mut notes = turn.notes.borrow_mut();
                    notes.push(format!(
                        "{servers} servers, {rate} requests/s: the clients had no resources to send {at_limit} of the requests"
                    ));
                }
                values.offered(servers, plots, *rate, &seen);
            }
            give_back(asked.bed, servers)?;
        }
        let bar = bar(&NAMES, turn.peer.name);
        let rates = if turn.quick {
            FREE_RATES_QUICK
        } else {
            FREE_RATES
        };
        let best = highest(rates, |rate| {
            let seen = asked.ask("/free/page", SERVERS, rate)?;
            let reached = seen.figures.rate >= REACHED * f64::from(rate);
            let good = reached && seen.figures.error_percent <= LEAST_PERCENT;
            Ok(good.then_some(seen))
        })?;
        values.add(
            FREE,
            bar,
            best.as_ref().map_or(0.0, |(rate, _)| f64::from(*rate)),
        );
        let has_director = asked.bed.who != Contender::Direct;
        if let Some((_, seen)) = best {
            if let Some(wait) = seen.figures.response_ms {
                values.add(FREE_WAIT, bar, wait);
            }
            if has_director {
                values.add(FREE_CPU, bar, seen.director * 100.0);
            }
        }
        let seen = asked.ask("/free/page", SERVERS, COST_RATE)?;
        if has_director {
            values.add(COST, bar, seen.cost);
        }
        let is_placed = PLACES
            .iter()
            .any(|place| place.split(' ').next() == Some(turn.peer.name));
        if is_placed && !turn.quick {
            values.shared(turn.peer.name, "shared", &seen);
            asked.bed.receive_on(0)?;
            let seen = asked.ask("/free/page", SERVERS, COST_RATE);
            asked.bed.receive_on(1)?;
            values.shared(turn.peer.name, "apart", &seen?);
        }
        let (cpu, disturbed) = asked.end()?;
        Ok((values.all, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let mut sentences = Vec::new();
        self.say_best(document, &mut sentences);
        self.say_scaling(document, &mut sentences);
        self.say_free(document, &mut sentences);
        self.say_cost(document, &mut sentences);
        self.say_sharing(document, &mut sentences);
        sentences
    }
}

#[derive(Debug, Default)]
struct Values {
    all: Vec<Value>,
}

impl Values {
    fn add(&mut self, plot: &str, x: f64, y: f64) {
        self.all.push(Value::new(plot, x, y));
    }

    fn offered(&mut self, servers: usize, plots: &str, rate: u32, seen: &Seen) {
        let (x, figures) = (f64::from(rate), &seen.figures);
        let errors = figures.error_percent.max(LEAST_PERCENT);
        self.add(&format!("{REPLIES}{plots}"), x, figures.rate);
        self.add(&format!("{ERRORS}{plots}"), x, errors);
        let capacity = CAPACITY * u32::try_from(servers).unwrap_or(0);
        if rate * 10 == capacity * 13 {
            self.add(SCALING, super::thesis::number(servers), figures.rate);
        }
        if servers == SERVERS {
            self.add(DIRECTOR, x, seen.director * 100.0);
            self.add(SERVERS_CPU, x, seen.servers * 100.0);
            if let Some(response) = figures.response_ms {
                self.add(RESPONSE, x, response.max(0.05));
            }
        }
    }

    fn shared(&mut self, peer: &str, place: &str, seen: &Seen) {
        let bar = bar(&PLACES, &format!("{peer} {place}"));
        self.add(SHARING, bar, seen.cost);
        if let Some(response) = seen.figures.response_ms {
            self.add(SHARING_WAIT, bar, response);
        }
    }
}

/// Returns the highest of `rates` for which `offer` returns a result, and that result; `None` if
/// there is none. Assumes that all rates above a failed one fail, too.
fn highest<T>(
    rates: &[u32],
    mut offer: impl FnMut(u32) -> Result<Option<T>>,
) -> Result<Option<(u32, T)>> {
    let (mut low, mut high, mut best) = (0, rates.len(), None);
    while low < high {
        let middle = usize::midpoint(low, high);
        match offer(rates[middle])? {
            Some(good) => {
                best = Some((rates[middle], good));
                low = middle + 1;
            }
            None => high = middle,
        }
    }
    Ok(best)
}

fn bar(names: &[&str], name: &str) -> f64 {
    let place = names.iter().position(|own| *own == name);
    super::thesis::number(place.unwrap_or(0))
}

/// Formats a median and its range as `12.3 (11.8-12.9)`.
fn spread(of: &Spread) -> String {
    format!("{:.1} ({:.1}-{:.1})", of.median, of.min, of.max)
}

fn at(series: &Series, x: f64) -> Option<Spread> {
    let mut points = series.points.iter();
    points
        .find(|(own, _)| own.total_cmp(&x).is_eq())
        .map(|(_, y)| *y)
}

impl Orourke {
    fn all(&self, document: &Document, plot: &str) -> Vec<Series> {
        document.series(self.name(), plot, &NAMES)
    }

    fn of(&self, document: &Document, plot: &str, peer: &str, x: f64) -> Option<Spread> {
        at(document.series(self.name(), plot, &[peer]).first()?, x)
    }

    fn say_best(&self, document: &Document, sentences: &mut Vec<String>) {
        let errors = self.all(document, ERRORS);
        for series in self.all(document, REPLIES) {
            let of_peer = errors.iter().find(|errors| errors.peer == series.peer);
            // The rates below the first one with errors.
            let good = series.points.iter().take_while(|(rate, _)| {
                let errors = of_peer.and_then(|errors| at(errors, *rate));
                errors.is_some_and(|errors| errors.max <= LEAST_PERCENT)
            });
            let good = match good.last() {
                Some((rate, _)) => format!("errors of 0.01 % at most up to {rate:.0} requests/s"),
                None => "more than 0.01 % of errors even at the lowest rate".to_owned(),
            };
            let best = series.points.iter().copied();
            let Some((rate, best)) = best.max_by(|a, b| a.1.median.total_cmp(&b.1.median)) else {
                continue;
            };
            let cpu = |plot| self.of(document, plot, &series.peer, rate);
            let busy = match (cpu(DIRECTOR), cpu(SERVERS_CPU)) {
                (Some(director), Some(servers)) => format!(
                    "; then the director uses {} % of a core and the servers {} %",
                    spread(&director),
                    spread(&servers)
                ),
                _ => String::new(),
            };
            sentences.push(format!(
                "{}, four servers: {good}; {:.0} replies/s at most ({:.0}-{:.0}, {}), of {rate:.0} offered{busy}.",
                series.peer, best.median, best.min, best.max, best.rounds
            ));
        }
    }

    fn say_scaling(&self, document: &Document, sentences: &mut Vec<String>) {
        for series in self.all(document, SCALING) {
            let (Some((least, one)), Some((most, all))) =
                (series.points.first(), series.points.last())
            else {
                continue;
            };
            if least < most {
                let (grown, asked) = (all.median / one.median, most / least);
                let limited = match grown > 0.9 * asked {
                    true => "the servers are the limit",
                    false => "neither the director nor the servers are the limit",
                };
                sentences.push(format!(
                    "{}: {most:.0} servers answer {grown:.2} times as much as {least:.0}, {} and {} replies/s ({}): {limited}.",
                    series.peer,
                    spread(all),
                    spread(one),
                    all.rounds
                ));
            }
        }
    }

    fn say_free(&self, document: &Document, sentences: &mut Vec<String>) {
        for peer in &NAMES {
            let of = |plot| self.of(document, plot, peer, bar(&NAMES, peer));
            let (Some(rate), Some(wait)) = (of(FREE), of(FREE_WAIT)) else {
                continue;
            };
            let ends = "clients and servers, which share a core, are the limit";
            let limit = match of(FREE_CPU) {
                Some(cpu) => {
                    let limit = if cpu.median >= 90.0 {
                        "the director is the limit"
                    } else {
                        ends
                    };
                    format!("the director uses {} % of a core: {limit}", spread(&cpu))
                }
                None => ends.to_owned(),
            };
            sentences.push(format!(
                "{peer}, servers without a set capacity: {:.0} requests/s ({:.0}-{:.0}, {}) with errors of 0.01 % at most, after {} ms; {limit}.",
                rate.median, rate.min, rate.max, rate.rounds, spread(&wait)
            ));
        }
    }

    /// Adds a sentence for each peer with the number of servers that one core of the director can
    /// serve.
    fn say_cost(&self, document: &Document, sentences: &mut Vec<String>) {
        for peer in &NAMES {
            let Some(cost) = self.of(document, COST, peer, bar(&NAMES, peer)) else {
                continue;
            };
            if cost.min <= 0.0 {
                continue;
            }
            let servers = |cost: f64| 1e6 / cost / f64::from(CAPACITY);
            sentences.push(format!(
                "{peer}: a request costs the director {} µs of CPU ({}); at this cost, one core is full with {:.0} servers ({:.0}-{:.0}) of {CAPACITY} requests/s each.",
                spread(&cost),
                cost.rounds,
                servers(cost.median),
                servers(cost.max),
                servers(cost.min)
            ));
        }
    }

    fn say_sharing(&self, document: &Document, sentences: &mut Vec<String>) {
        for pair in PLACES.chunks(2) {
            let peer = pair[0].split(' ').next().unwrap_or_default();
            let of = |plot, place: usize| self.of(document, plot, peer, bar(&PLACES, pair[place]));
            let (Some(shared), Some(apart)) = (of(SHARING, 0), of(SHARING, 1)) else {
                continue;
            };
            let differ = match (shared.min > apart.max, apart.min > shared.max) {
                (true, _) => format!("sharing costs {:.1} µs more", shared.median - apart.median),
                (_, true) => format!("sharing saves {:.1} µs", apart.median - shared.median),
                _ => "their spread does not distinguish the two".to_owned(),
            };
            sentences.push(format!(
                "{peer}: a request costs {} µs if the process shares its core with the receiving thread, and {} µs if that thread is on another core ({}): {differ}.",
                spread(&shared),
                spread(&apart),
                shared.rounds
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_list_of_offered_rates_contains_1_3_times_capacity_of_servers_once() {
        for (servers, _, rates, quick) in RATES {
            let mut values = Values::default();
            let seen = Seen {
                figures: crate::cluster::Figures::default(),
                director: 0.5,
                servers: 0.25,
                cost: 20.0,
            };
            for rate in rates.iter().chain(quick) {
                values.offered(servers, "", *rate, &seen);
            }
            let scaling = values.all.iter().filter(|value| value.plot == SCALING);
            let xs: Vec<f64> = scaling.map(|value| value.x).collect();
            let once = if quick.is_empty() { 1 } else { 2 };
            assert_eq!(
                xs,
                vec![super::super::thesis::number(servers); once],
                "{rates:?}"
            );
        }
    }

    #[test]
    fn highest_good_rate_of_five_is_found_in_at_most_three_measurements() {
        let rates = [10, 20, 30, 40, 50];
        for limit in 0..60 {
            let mut asked = 0;
            let found = highest(&rates, |rate| {
                asked += 1;
                Ok((rate <= limit).then_some(rate))
            });
            let found = found
                .expect("nothing fails")
                .map(|(rate, same)| (rate, rate == same));
            let expected = rates.into_iter().filter(|rate| *rate <= limit).max();
            assert_eq!(found, expected.map(|rate| (rate, true)), "{limit}");
            assert!(asked <= 3, "{limit}");
        }
        assert!(highest(&rates, |_| -> Result<Option<()>> { anyhow::bail!("no") }).is_err());
    }

    #[test]
    fn haproxy_bar_is_at_its_index_and_sharing_labels_begin_with_own_peers() {
        assert!((bar(&NAMES, "haproxy") - 7.0).abs() < f64::EPSILON);
        for place in PLACES {
            let peer = place.split(' ').next().expect("the label has a name");
            let known = PEERS.iter().find(|known| known.name == peer);
            assert!(known.is_some_and(|known| known.who.is_ours()), "{place}");
        }
    }
}

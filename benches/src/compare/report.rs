//! Prints the results: a table for readers, JSON for programs.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::{Value, json};

use super::rows::{Against, Bound, Group, Row};
use super::run::Outcome;
use crate::stats::Spread;

/// Version of the JSON. It increases when a field changes its meaning or is removed.
const SCHEMA: u32 = 1;

#[derive(Clone, Debug, Serialize)]
pub(super) struct Line {
    name: String,
    what: String,
    subject: String,
    /// The measurement with which `subject` is compared, the best one if there are several; or the
    /// source of a published figure.
    against: String,
    placement: [String; 2],
    unit: &'static str,
    value: Option<Spread>,
    against_value: Option<Spread>,
    ratio: Option<Spread>,
    at_least: Option<f64>,
    at_most: Option<f64>,
    met: Option<bool>,
    but: Option<&'static str>,
    error: Option<String>,
}

impl Line {
    pub(super) fn of(row: &Row, outcomes: &[Outcome]) -> Self {
        let find = |name: &str| outcomes.iter().find(|outcome| outcome.job.name == name);
        let subject = find(&row.subject);
        let (against, cable) = match &row.against {
            Against::Best(jobs) => {
                let jobs = jobs.iter().filter_map(|job| find(job));
                let median =
                    |outcome: &&Outcome| spread(outcome).map_or(0.0, |spread| spread.median);
                (jobs.max_by(|a, b| median(a).total_cmp(&median(b))), None)
            }
            Against::One(job) => (find(job), None),
            Against::Added(job, cable) => (find(job), find(cable).and_then(spread)),
            Against::Absolute(..) => (None, None),
        };
        let errors = [subject, against].into_iter().flatten();
        let error = errors.filter_map(|outcome| {
            let error = outcome.error.as_ref()?;
            Some(format!("{}: {error}", outcome.job.name))
        });
        let value = subject.and_then(spread);
        let ratio = match &row.against {
            Against::Absolute(figure, _) => {
                Spread::of(values(subject).flatten().map(|value| value / figure))
            }
            _ => {
                let less = cable.map_or(0.0, |cable| cable.median);
                let pairs = values(subject).zip(values(against));
                let pairs = pairs.filter_map(|(own, other)| Some((own? - less, other? - less)));
                Spread::of(pairs.map(|(own, other)| own / other))
            }
        };
        let met = ratio.filter(|_| row.but.is_none());
        let met = met.and_then(|ratio| row.bound.is_met(ratio.median));
        let place = |outcome: Option<&Outcome>| {
            outcome.map_or(String::new(), |outcome| outcome.job.work.place().to_owned())
        };
        Self {
            name: row.name.clone(),
            what: row.what.clone(),
            subject: row.subject.clone(),
            against: match &row.against {
                Against::Absolute(_, name) => (*name).to_owned(),
                _ => against.map_or(String::new(), |outcome| outcome.job.name.clone()),
            },
            placement: [place(subject), place(against)],
            unit: subject.map_or("", |outcome| outcome.job.work.unit()),
            value,
            against_value: match &row.against {
                Against::Absolute(figure, _) => Spread::of([*figure]),
                _ => against.and_then(spread),
            },
            ratio,
            at_least: match row.bound {
                Bound::AtLeast(bound) => Some(bound),
                _ => None,
            },
            at_most: match row.bound {
                Bound::AtMost(bound) => Some(bound),
                _ => None,
            },
            met,
            but: row.but,
            error: error.reduce(|a, b| format!("{a}; {b}")),
        }
    }

    fn bound(&self) -> String {
        match (self.at_least, self.at_most) {
            (Some(bound), _) => format!(">= {bound:.2}"),
            (_, Some(bound)) => format!("<= {bound:.2}"),
            _ => "-".to_owned(),
        }
    }

    fn verdict(&self) -> &'static str {
        match (self.ratio, self.but, self.met) {
            (None, ..) => "not measured",
            (_, Some(_), _) => "not comparable",
            (_, _, Some(true)) => "met",
            (_, _, Some(false)) => "NOT MET",
            (_, _, None) => "",
        }
    }
}

fn values(outcome: Option<&Outcome>) -> impl Iterator<Item = Option<f64>> {
    let samples = outcome.into_iter().flat_map(|outcome| &outcome.samples);
    samples.map(|sample| sample.as_ref().map(|sample| sample.value))
}

fn spread(outcome: &Outcome) -> Option<Spread> {
    Spread::of(values(Some(outcome)).flatten())
}

/// Formats a value with its unit for the table.
fn figure(value: f64, unit: &str) -> String {
    match unit {
        "packets/s" | "connections/s" if value >= 1e6 => format!("{:.2} M/s", value / 1e6),
        "packets/s" | "requests/s" | "connections/s" => format!("{:.0} k/s", value / 1e3),
        "cores" => format!("{:.2} %", value * 100.0),
        unit => format!("{value:.1} {unit}"),
    }
}

/// Formats the results as a table of text.
pub(super) fn table(lines: &[Line], outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:<24} {:>10} {:>10} {:>18} {:>8}  {:<14} against",
        "row", "ours", "against", "ratio", "bound", ""
    );
    for line in lines {
        let shown = |spread: Option<Spread>| {
            spread.map_or("-".to_owned(), |spread| figure(spread.median, line.unit))
        };
        let ratio = line.ratio.map_or("-".to_owned(), |ratio| {
            format!("{:.2} ({:.2}-{:.2})", ratio.median, ratio.min, ratio.max)
        });
        let [own, other] = &line.placement;
        let place = if own == other || other.is_empty() {
            own.clone()
        } else {
            format!("{own} / {other}")
        };
        let _ = writeln!(
            text,
            "{:<24} {:>10} {:>10} {:>18} {:>8}  {:<14} {} [{place}]",
            line.name,
            shown(line.value),
            shown(line.against_value),
            ratio,
            line.bound(),
            line.verdict(),
            line.against,
        );
        for remark in line
            .but
            .iter()
            .map(ToString::to_string)
            .chain(line.error.clone())
        {
            let _ = writeln!(text, "    {}", remark.trim().replace('\n', "\n    "));
        }
    }
    let _ = writeln!(
        text,
        "\n{:<36} {:>20} {:>30} {:>9} {:>9} {:>9}  where, rejected",
        "measured", "place", "median (least-greatest)", "process", "softirq", "ends"
    );
    for outcome in outcomes {
        let Some(spread) = spread(outcome) else {
            continue;
        };
        let unit = outcome.job.work.unit();
        let range = format!(
            "{} ({}-{})",
            figure(spread.median, unit),
            figure(spread.min, unit),
            figure(spread.max, unit)
        );
        let cpu = cpu(outcome);
        let shown =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.0} ns"));
        let _ = writeln!(
            text,
            "{:<36} {:>20} {range:>30} {:>9} {:>9} {:>9}  {}",
            outcome.job.name,
            outcome.job.work.place(),
            shown(cpu.map(|cpu| cpu[0])),
            shown(cpu.map(|cpu| cpu[1])),
            shown(cpu.map(|cpu| cpu[2])),
            if outcome.rejected > 0 {
                format!("{} rejected", outcome.rejected)
            } else {
                String::new()
            }
        );
    }
    text
}

/// Median CPU time of one packet, request or KiB in nanoseconds: of the director's process, of soft
/// interrupts and their threads, and of the endpoints. `None` if it was not measured.
fn cpu(outcome: &Outcome) -> Option<[f64; 3]> {
    let all: Vec<_> = outcome
        .samples
        .iter()
        .flatten()
        .filter_map(|sample| sample.cpu)
        .collect();
    Some([
        Spread::of(all.iter().map(|cpu| cpu.process))?.median,
        Spread::of(all.iter().map(|cpu| cpu.softirq + cpu.other_softirq))?.median,
        Spread::of(all.iter().map(|cpu| cpu.endpoints))?.median,
    ])
}

/// The complete results as JSON.
pub(super) fn json(machine: Value, lines: &[Line], outcomes: &[Outcome]) -> Value {
    let jobs = outcomes.iter().map(|outcome| {
        let values: Vec<Option<f64>> = values(Some(outcome)).collect();
        let cpu = cpu(outcome).map(|[process, softirq, endpoints]| {
            json!({ "process": process, "softirq": softirq, "endpoints": endpoints })
        });
        json!({
            "name": outcome.job.name,
            "contender": outcome.job.work.contender().map(super::contender::Contender::name),
            "placement": outcome.job.work.place(),
            "unit": outcome.job.work.unit(),
            "value": spread(outcome),
            "rounds": values,
            "cpu_ns": cpu,
            "rejected": outcome.rejected,
            "error": outcome.error,
        })
    });
    json!({
        "schema": SCHEMA,
        "machine": machine,
        "rows": lines,
        "jobs": jobs.collect::<Vec<_>>(),
    })
}

/// Lists the rows that a user can request, with their bounds.
pub(super) fn list(groups: &[Group]) -> String {
    let mut text = String::new();
    for row in groups.iter().flat_map(|group| &group.rows) {
        let bound = match row.bound {
            Bound::AtLeast(bound) => format!(">= {bound:.2}"),
            Bound::AtMost(bound) => format!("<= {bound:.2}"),
            Bound::Shown => "-".to_owned(),
        };
        let _ = writeln!(text, "{:<26} {bound:>8}  {}", row.name, row.what);
    }
    text
}

//! Compares the measurements of two reports.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Args;

use super::data::{Document, Series};
use super::{EXPERIMENTS, Experiment};
use crate::stats::Spread;

/// Two reports, and the limits within which they agree.
#[derive(Debug, Args)]
pub(super) struct Compare {
    /// Path of a report.json, or of its directory
    first: PathBuf,
    /// Path of another report
    second: PathBuf,
    /// Percentage by which each range is extended at both ends
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0)]
    margin: f64,
    /// Percentage of points that must agree
    #[arg(long, value_name = "PERCENT", default_value_t = 95.0)]
    share: f64,
}

/// The comparison of one plot in both reports.
#[derive(Debug, Default)]
struct Beside {
    /// For each common point, the distance of the medians: the greater divided by the smaller,
    /// minus 1.
    apart: Vec<f64>,
    /// A text for each common point that does not agree.
    disagree: Vec<String>,
    /// Number of points that only one report has.
    alone: usize,
}

impl Compare {
    /// Prints a line for each plot, and the differences. Fails if fewer points agree than required,
    /// or if the reports cannot be compared.
    pub(super) fn run(&self) -> Result<()> {
        let (first, second) = (load(&self.first)?, load(&self.second)?);
        ensure!(
            first.quick == second.quick,
            "one of the reports was made with --quick, which measures less: they cannot be compared"
        );
        let plots = compare(&first, &second, self.margin / 100.0);
        let all: usize = plots.values().map(|plot| plot.apart.len()).sum();
        let apart: usize = plots.values().map(|plot| plot.disagree.len()).sum();
        let alone: usize = plots.values().map(|plot| plot.alone).sum();
        ensure!(all > 0, "the reports have no point in common");
        println!("plot                        points  agree  medians differ by  at most");
        for (name, plot) in &plots {
            if let Some(spread) = Spread::of(plot.apart.iter().copied()) {
                println!(
                    "{name:<28}{:>6} {:>6} {:>15.1} % {:>6.1} %",
                    plot.apart.len(),
                    plot.apart.len() - plot.disagree.len(),
                    spread.median * 100.0,
                    spread.max * 100.0
                );
            }
        }
        for line in plots.values().flat_map(|plot| &plot.disagree) {
            println!("{line}");
        }
        if alone > 0 {
            println!("{alone} points are in only one of the reports");
        }
        let share = percent(all - apart, all);
        let sentences = format!(
            "{} of {all} points agree ({share:.1} %; {:.1} % are required)",
            all - apart,
            self.share
        );
        ensure!(share >= self.share, "the reports do not agree: {sentences}");
        println!("the reports agree: {sentences}");
        Ok(())
    }
}

fn load(path: &Path) -> Result<Document> {
    if path.is_dir() {
        Document::load(&path.join("report.json"))
    } else {
        Document::load(path)
    }
}

/// Compares the plots of two reports. Omits plots that have measurements in neither report. The
/// keys are `EXPERIMENT-PLOT`, as on the page.
fn compare(first: &Document, second: &Document, margin: f64) -> BTreeMap<String, Beside> {
    let mut plots = BTreeMap::new();
    for experiment in EXPERIMENTS {
        for plot in experiment.plots() {
            let name = format!("{}-{}", experiment.name(), plot.name);
            let measured = |document| measured(experiment, document, plot.name);
            let (a, b) = (measured(first), measured(second));
            if !(a.is_empty() && b.is_empty()) {
                let beside = beside(&name, &a, &b, margin);
                plots.insert(name, beside);
            }
        }
    }
    plots
}

/// The measured series of a plot, without derived ones.
fn measured(experiment: &dyn Experiment, document: &Document, plot: &str) -> Vec<Series> {
    let name = experiment.name();
    document.series(name, plot, &super::peers::of(experiment))
}

fn beside(plot: &str, first: &[Series], second: &[Series], margin: f64) -> Beside {
    let points = |series: &[Series]| -> BTreeMap<(String, u64), (f64, Spread)> {
        let of = |one: &Series| {
            let points = one.points.clone().into_iter();
            let peer = one.peer.clone();
            points.map(move |(x, y)| ((peer.clone(), x.to_bits()), (x, y)))
        };
        series.iter().flat_map(of).collect()
    };
    let (a, b) = (points(first), points(second));
    let mut result = Beside {
        alone: b.keys().filter(|key| !a.contains_key(*key)).count(),
        ..Beside::default()
    };
    for (key, (x, one)) in &a {
        let Some((_, other)) = b.get(key) else {
            result.alone += 1;
            continue;
        };
        let (low, high) = (one.median.min(other.median), one.median.max(other.median));
        // No difference if both are 0; a complete one if only one is 0.
        let apart = if high <= 0.0 {
            0.0
        } else {
            high / low.max(high * 1e-3) - 1.0
        };
        result.apart.push(apart);
        if !overlap(one, other, margin) {
            let words = |of: &Spread| format!("{:.4} ({:.4}-{:.4})", of.median, of.min, of.max);
            result.disagree.push(format!(
                "{plot}, {}, {x}: {} and {}",
                key.0,
                words(one),
                words(other)
            ));
        }
    }
    result
}

/// Whether two ranges overlap after each was extended by `margin`.
fn overlap(one: &Spread, other: &Spread, margin: f64) -> bool {
    let low = |of: &Spread| of.min * (1.0 - margin);
    let high = |of: &Spread| of.max * (1.0 + margin);
    low(one) <= high(other) && low(other) <= high(one)
}

fn percent(part: usize, of: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let share = part as f64 / of as f64 * 100.0;
    share
}

#[cfg(test)]
mod tests {
    use super::super::data::{CpuSeconds, Run, SCHEMA, Value};
    use super::*;

    /// A report with NetPIPE's times at 1 byte and at 64 bytes, for each round.
    fn report(rounds: &[[f64; 2]]) -> Document {
        let mut document = Document {
            schema: SCHEMA,
            ..Document::default()
        };
        for (round, times) in (1..).zip(rounds) {
            let value = |(x, y): (f64, &f64)| Value::new("latency", x, *y);
            document.runs.push(Run {
                experiment: "mack".into(),
                peer: "lvs-nat".into(),
                round,
                values: [1.0, 64.0].into_iter().zip(times).map(value).collect(),
                cpu: CpuSeconds::default(),
                disturbed: None,
                notes: Vec::new(),
            });
        }
        document
    }

    fn run(first: &Document, second: &Document, words: &[&str]) -> Result<()> {
        #[derive(Debug, clap::Parser)]
        struct Cli {
            #[command(flatten)]
            compare: Compare,
        }
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let mut all = vec!["compare".to_owned()];
        for (name, document) in [("a", first), ("b", second)] {
            let place = directory.path().join(name);
            std::fs::create_dir(&place).expect("the directory can be created");
            document.save(&place).expect("the report can be saved");
            all.push(place.display().to_string());
        }
        all.extend(words.iter().map(|word| (*word).to_owned()));
        let cli = <Cli as clap::Parser>::try_parse_from(all).expect("the arguments are valid");
        cli.compare.run()
    }

    #[test]
    fn reports_with_overlapping_ranges_agree() {
        let first = report(&[[10.0, 20.0], [12.0, 21.0], [11.0, 22.0]]);
        let second = report(&[[12.0, 19.0], [13.0, 20.0], [14.0, 21.0]]);
        run(&first, &second, &["--margin", "0"]).expect("the ranges overlap");
        run(&first, &first, &["--margin", "0", "--share", "100"])
            .expect("a report agrees with itself");
    }

    #[test]
    fn reports_with_distant_ranges_disagree() {
        let first = report(&[[10.0, 20.0], [12.0, 21.0]]);
        let second = report(&[[15.0, 20.0], [16.0, 21.0]]);
        let error =
            run(&first, &second, &[]).expect_err("reports with one of two points different agree");
        let error = error.to_string();
        assert!(error.contains("1 of 2 points agree (50.0 %"), "{error}");
        run(&first, &second, &["--share", "50"]).expect("half of the points suffice");
        run(&first, &second, &["--margin", "20"]).expect("the extended ranges overlap");
    }

    #[test]
    fn points_missing_in_one_report_are_counted() {
        let first = report(&[[10.0, 20.0]]);
        let mut second = first.clone();
        second.runs[0].values.truncate(1);
        second.runs[0]
            .values
            .push(Value::new("latency", 256.0, 30.0));
        let plots = compare(&first, &second, 0.0);
        let plot = &plots["mack-latency"];
        assert_eq!((plot.apart.len(), plot.alone), (1, 2));
    }

    #[test]
    fn comparison_with_empty_or_quick_report_is_refused() {
        let first = report(&[[10.0, 20.0]]);
        assert!(
            run(
                &first,
                &Document {
                    schema: SCHEMA,
                    ..Document::default()
                },
                &[]
            )
            .is_err()
        );
        let mut quick = first.clone();
        quick.quick = true;
        assert!(run(&first, &quick, &[]).is_err());
    }
}

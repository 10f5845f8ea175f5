//! The data of a report, which is written as JSON after each run, and read again by `--resume`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::stats::Spread;

/// The version of the schema; see docs/report.md.
pub(super) const SCHEMA: u32 = 1;

/// All measurements, and a description of the machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Document {
    pub(super) schema: u32,
    /// Whether every requested measurement was tried; `missing` has those without a result.
    pub(super) complete: bool,
    pub(super) quick: bool,
    pub(super) rounds: usize,
    /// Names and values: kernel, processor, versions.
    pub(super) machine: Vec<(String, String)>,
    /// Whether the machine was busy during the measurements (`--busy`).
    pub(super) busy: bool,
    pub(super) runs: Vec<Run>,
    pub(super) missing: Vec<Missing>,
}

/// One measurement of a compared program ([`Peer`](super::peers::Peer)).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) experiment: String,
    pub(super) peer: String,
    pub(super) round: usize,
    pub(super) values: Vec<Value>,
    pub(super) cpu: CpuSeconds,
    /// Why the measurement is unreliable; `None` if it is reliable.
    pub(super) disturbed: Option<String>,
    /// Further notes, such as the reason for a failure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Value {
    pub(super) plot: String,
    pub(super) x: f64,
    pub(super) y: f64,
}

impl Value {
    pub(super) fn new(plot: &str, x: f64, y: f64) -> Self {
        Self {
            plot: plot.to_owned(),
            x,
            y,
        }
    }
}

/// CPU seconds of a run, by node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct CpuSeconds {
    /// Duration of the run, by the clock.
    pub(super) elapsed: f64,
    /// CPU time of the director's process.
    pub(super) process: f64,
    /// CPU time of the threads that receive on the director's interfaces.
    pub(super) softirq: f64,
    /// CPU time of other soft interrupts that run in a thread.
    pub(super) other_softirq: f64,
    /// CPU time of clients and servers.
    pub(super) endpoints: f64,
}

/// A measurement that was not possible, or has failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Missing {
    pub(super) experiment: String,
    pub(super) peer: String,
    pub(super) why: String,
}

impl Missing {
    pub(super) fn new(experiment: &str, peer: &str, why: String) -> Self {
        Self {
            experiment: experiment.to_owned(),
            peer: peer.to_owned(),
            why,
        }
    }
}

/// The line or the bars of a peer in a plot: for each x, the spread of y.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) peer: String,
    pub(super) points: Vec<(f64, Spread)>,
}

impl Document {
    pub(super) fn load(file: &Path) -> Result<Self> {
        let text = fs::read_to_string(file)
            .with_context(|| format!("cannot read the report {}", file.display()))?;
        let document: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} is not a report of this program", file.display()))?;
        ensure!(
            document.schema == SCHEMA,
            "{} has schema {}, and this program reads {SCHEMA}: make a new report, without --resume",
            file.display(),
            document.schema
        );
        Ok(document)
    }

    /// Writes JSON and CSV, each file completely or not at all.
    pub(super) fn save(&self, directory: &Path) -> Result<()> {
        write(
            &directory.join("report.json"),
            &serde_json::to_string_pretty(self)?,
        )?;
        write(&directory.join("report.csv"), &self.csv())
    }

    pub(super) fn has(&self, experiment: &str, peer: &str, round: usize) -> bool {
        let mut runs = self.runs.iter();
        runs.any(|run| run.experiment == experiment && run.peer == peer && run.round == round)
    }

    pub(super) fn of<'a>(
        &'a self,
        experiment: &'a str,
        peer: &'a str,
    ) -> impl Iterator<Item = &'a Run> {
        let runs = self.runs.iter();
        runs.filter(move |run| run.experiment == experiment && run.peer == peer)
    }

    /// The runs that count: the undisturbed ones, if there are at least two, because a single run
    /// has no spread; otherwise all runs.
    pub(super) fn counted(&self, experiment: &str, peer: &str) -> Vec<&Run> {
        let mut runs: Vec<&Run> = self
            .runs
            .iter()
            .filter(|run| run.experiment == experiment && run.peer == peer)
            .collect();
        let quiet = runs.iter().filter(|run| run.disturbed.is_none());
        if quiet.count() >= 2 {
            runs.retain(|run| run.disturbed.is_none());
        }
        runs
    }

    /// The spreads of a plot's values over the runs that count, for each peer with values.
    pub(super) fn series(&self, experiment: &str, plot: &str, peers: &[&str]) -> Vec<Series> {
        let of_peer = |peer: &&str| {
            let runs = self.counted(experiment, peer);
            let values = || {
                runs.iter()
                    .flat_map(|run| &run.values)
                    .filter(|value| value.plot == plot)
            };
            let mut all: Vec<f64> = values().map(|value| value.x).collect();
            all.sort_by(f64::total_cmp);
            all.dedup();
            let at = |x: f64| {
                let same = values().filter(|value| value.x.total_cmp(&x).is_eq());
                Some((x, Spread::of(same.map(|value| value.y))?))
            };
            let points: Vec<_> = all.into_iter().filter_map(at).collect();
            (!points.is_empty()).then(|| Series {
                peer: (*peer).to_owned(),
                points,
            })
        };
        peers.iter().filter_map(of_peer).collect()
    }

    fn csv(&self) -> String {
        let mut csv = String::from("experiment,peer,round,plot,x,y,disturbed\n");
        for run in &self.runs {
            for value in &run.values {
                let _ = writeln!(
                    csv,
                    "{},{},{},{},{},{},{}",
                    run.experiment,
                    run.peer,
                    run.round,
                    value.plot,
                    value.x,
                    value.y,
                    run.disturbed.is_some()
                );
            }
        }
        csv
    }
}

/// Writes a file completely or not at all.
pub(super) fn write(file: &Path, text: &str) -> Result<()> {
    let new = file.with_extension("new");
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, file))
        .with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(round: usize, y: f64, disturbed: Option<&str>) -> Run {
        Run {
            experiment: "e".into(),
            peer: "p".into(),
            round,
            values: vec![Value::new("rate", 2.0, y)],
            cpu: CpuSeconds::default(),
            disturbed: disturbed.map(Into::into),
            notes: Vec::new(),
        }
    }

    #[test]
    fn disturbed_round_counts_only_if_fewer_than_two_rounds_are_undisturbed() {
        let mut document = Document {
            runs: vec![
                run(1, 1.0, None),
                run(2, 3.0, None),
                run(3, 99.0, Some("busy")),
            ],
            ..Document::default()
        };
        let series = document.series("e", "rate", &["p", "absent"]);
        assert_eq!(series.len(), 1);
        let (x, spread) = series[0].points[0];
        assert_eq!(
            (x, spread.median, spread.max, spread.rounds.0),
            (2.0, 2.0, 3.0, 2)
        );
        // One run alone has no spread.
        document.runs.remove(0);
        let rounds = |document: &Document| {
            let series = document.series("e", "rate", &["p"]);
            series[0].points[0].1.rounds.0
        };
        assert_eq!(rounds(&document), 2);
        document.runs.remove(0);
        assert_eq!(rounds(&document), 1);
    }

    #[test]
    fn report_is_saved_as_json_and_csv_and_loaded_again() {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let document = Document {
            schema: SCHEMA,
            runs: vec![run(1, 0.5, None)],
            ..Document::default()
        };
        document
            .save(directory.path())
            .expect("the report can be saved");
        let file = directory.path().join("report.json");
        let loaded = Document::load(&file).expect("the report can be loaded");
        assert_eq!(loaded.runs, document.runs);
        assert!(loaded.has("e", "p", 1) && !loaded.has("e", "p", 2));
        let csv =
            fs::read_to_string(directory.path().join("report.csv")).expect("the file can be read");
        assert_eq!(csv.lines().nth(1), Some("e,p,1,rate,2,0.5,false"));
        fs::write(&file, "{}").expect("the file can be written");
        assert!(Document::load(&file).is_err());
    }
}

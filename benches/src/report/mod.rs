//! `lvs-bench report`: repeats published experiments, and writes JSON, CSV and an HTML page.

mod agree;
mod data;
mod failover;
mod farm;
mod haddad;
mod html;
mod mack;
mod orourke;
#[cfg(test)]
mod page_tests;
mod peers;
mod testlvs;
mod thesis;
mod unequal;
mod web;

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, Subcommand};

use self::data::{CpuSeconds, Document, Missing, Run, SCHEMA, Series, Value};
use self::peers::Peer;
use self::thesis::number;
use crate::compare::bed::{self, Bed, FAST_PATH, Purpose, has_program};
use crate::compare::contender::Place;
use crate::compare::progress::Progress;
use crate::machine;
use crate::yardsticks::Yardsticks;

/// Options of the report.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Options {
    #[command(subcommand)]
    instead: Option<Instead>,
    /// Names of the experiments; all if none is named
    names: Vec<String>,
    /// Measure fewer and smaller rounds
    #[arg(long)]
    quick: bool,
    /// Continue the run that was interrupted in DIR
    #[arg(long)]
    resume: bool,
    /// Directory for report.html, report.json and report.csv
    #[arg(long, value_name = "DIR", default_value = "target/report")]
    out: PathBuf,
    /// Rounds; each measures every peer once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: Option<u16>,
    /// Measure only these peers
    #[arg(long, value_name = "PEER", value_delimiter = ',')]
    peers: Vec<String>,
    /// Measure on a busy machine, too; the results are then unreliable
    #[arg(long)]
    busy: bool,
}

/// Operations on existing reports.
#[derive(Debug, Subcommand)]
enum Instead {
    /// Draw report.html again from DIR/report.json
    Draw {
        /// Directory of the report
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Compare two reports; if they differ by more than their spread, the exit status is 1
    Compare(agree::Compare),
}

/// One run of a peer.
#[derive(Debug)]
struct Turn<'a> {
    peer: &'a Peer,
    /// Number of the round, from 1.
    round: usize,
    quick: bool,
    yardsticks: &'a Yardsticks,
    /// Set when the user interrupts the run.
    stop: &'a Arc<AtomicBool>,
    notes: RefCell<Vec<String>>,
}

impl Turn<'_> {
    /// Adds a note to the run, unless the run already has it.
    fn note(&self, what: String) {
        let mut notes = self.notes.borrow_mut();
        if !notes.contains(&what) {
            notes.push(what);
        }
    }
}

/// Measured values, CPU time, and why they are unreliable; `None` if they are reliable.
type Measured = (Vec<Value>, CpuSeconds, Option<String>);

trait Experiment: Sync {
    fn name(&self) -> &'static str;
    fn title(&self) -> &'static str;
    /// A description of the method.
    fn what(&self) -> &'static str;
    /// Programs that the experiment needs in addition to those of this project and of the peers. If
    /// one of them is missing, nothing is measured.
    fn programs(&self) -> &'static [&'static str] {
        &[]
    }
    fn plots(&self) -> &'static [Plot];
    /// Approximate duration of one run of a peer in seconds.
    fn seconds(&self, quick: bool) -> f64;
    fn peers(&self) -> &'static [Peer] {
        peers::USUAL
    }
    /// Whether a peer is also measured with `--quick`.
    fn is_quick(&self, peer: &Peer) -> bool {
        let _ = peer;
        true
    }
    /// Number of peers that are measured at the same time. More than one only if the capacity of
    /// the servers limits all of them, and the machine does not.
    fn at_once(&self) -> usize {
        1
    }
    /// Creates the hosts for a peer.
    fn bed(&self, peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
        usual_bed(peer, yardsticks)
    }
    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured>;
    /// The lines or bars of a plot: the medians of the rounds, or values derived from other plots.
    fn series(&self, document: &Document, plot: &Plot) -> Vec<Series> {
        document.series(self.name(), plot.name, &peers::of(self))
    }
    /// Labels of x = 0, 1, ... in a plot of bars; empty for other plots.
    fn bars(&self, plot: &Plot) -> &'static [&'static str] {
        let _ = plot;
        &[]
    }
    /// Conclusions from the measurements.
    fn conclusions(&self, document: &Document) -> Vec<String>;
}

fn usual_bed(peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
    Bed::new(
        peer.who,
        Place::Usual,
        Purpose::Transfer,
        FAST_PATH,
        yardsticks,
    )
}

/// All experiments, in the order of the page.
const EXPERIMENTS: [&dyn Experiment; 11] = [
    &orourke::Orourke,
    &mack::Mack,
    &mack::Links,
    &mack::Files,
    &mack::Servers,
    &mack::Services,
    &haddad::Haddad,
    &thesis::Thesis,
    &unequal::Unequal,
    &failover::Failover,
    &testlvs::Testlvs,
];

#[derive(Debug)]
struct Plot {
    name: &'static str,
    title: &'static str,
    x: Axis,
    y: Axis,
}

#[derive(Debug)]
struct Axis {
    name: &'static str,
    unit: &'static str,
    /// Whether the axis is logarithmic, for positive values over several powers of ten. Otherwise
    /// it begins at 0.
    log: bool,
}

const fn plot(name: &'static str, title: &'static str, x: Axis, y: Axis) -> Plot {
    Plot { name, title, x, y }
}

const fn axis(name: &'static str, unit: &'static str) -> Axis {
    Axis {
        name,
        unit,
        log: false,
    }
}

const fn log_axis(name: &'static str, unit: &'static str) -> Axis {
    Axis {
        name,
        unit,
        log: true,
    }
}

const ROUNDS: usize = 5;
const QUICK_ROUNDS: usize = 3;
/// Approximate seconds until the hosts of a peer are ready.
const SET_UP: f64 = 0.8;

impl Options {
    /// Makes the missing measurements, and writes the report; or draws or compares existing
    /// reports.
    ///
    /// # Errors
    ///
    /// If an experiment or peer is unknown, a program is missing, the machine is busy, this process
    /// does not run as root, or the user interrupts the program. For existing reports: if they
    /// cannot be read, or do not agree.
    pub fn run(&self) -> Result<()> {
        match &self.instead {
            Some(Instead::Draw { directory }) => {
                let document = Document::load(&directory.join("report.json"))?;
                return draw(&document, directory);
            }
            Some(Instead::Compare(compare)) => return compare.run(),
            None => {}
        }
        let experiments = self.select()?;
        ensure!(
            nix::unistd::geteuid().is_root(),
            "report needs root: its hosts are network namespaces"
        );
        for experiment in &experiments {
            for program in experiment.programs() {
                ensure!(
                    has_program(program),
                    "{program} is not installed (`tools/setup bench` installs it)"
                );
            }
        }
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, stop.clone())?;
        }
        fs::create_dir_all(&self.out)
            .with_context(|| format!("cannot make {}", self.out.display()))?;
        let mut document = self.begin()?;
        let yardsticks = Yardsticks::build()?;
        let left = experiments.iter();
        let left = left.map(|experiment| self.left(*experiment, &document));
        let mut progress = Progress::new(left.sum());
        let mut result = Ok(());
        for experiment in &experiments {
            result = self.repeat(
                *experiment,
                &mut document,
                &yardsticks,
                &stop,
                &mut progress,
            );
            if result.is_err() {
                break;
            }
        }
        progress.end();
        document.complete = result.is_ok();
        document.save(&self.out)?;
        draw(&document, &self.out)?;
        result
    }

    fn select(&self) -> Result<Vec<&'static dyn Experiment>> {
        let all = || EXPERIMENTS.into_iter();
        if let Some(name) = self
            .names
            .iter()
            .find(|name| all().all(|known| known.name() != **name))
        {
            let known: Vec<_> = all().map(Experiment::name).collect();
            bail!(
                "there is no experiment {name}; there are: {}",
                known.join(", ")
            );
        }
        let asked: Vec<_> = all()
            .filter(|known| {
                self.names.is_empty() || self.names.iter().any(|name| name == known.name())
            })
            .collect();
        let mut known: Vec<&str> = Vec::new();
        for name in all().flat_map(peers::of) {
            if !known.contains(&name) {
                known.push(name);
            }
        }
        for peer in &self.peers {
            ensure!(
                known.contains(&peer.as_str()),
                "no experiment has a peer {peer}; there are: {}",
                known.join(", ")
            );
        }
        Ok(asked)
    }

    /// Returns an empty report, or the report that is continued.
    fn begin(&self) -> Result<Document> {
        let rounds = if self.quick { QUICK_ROUNDS } else { ROUNDS };
        let rounds = self.rounds.map_or(rounds, usize::from);
        if self.resume {
            let mut document = Document::load(&self.out.join("report.json"))?;
            ensure!(
                document.quick == self.quick,
                "the interrupted run used {} --quick; continue it in the same way",
                if document.quick { "with" } else { "without" }
            );
            document.rounds = rounds;
            document.busy |= self.busy;
            // Failed measurements are repeated.
            document.missing.clear();
            return Ok(document);
        }
        Ok(Document {
            schema: SCHEMA,
            quick: self.quick,
            rounds,
            busy: self.busy,
            machine: machine_facts(),
            ..Document::default()
        })
    }

    /// The requested peers that lack the results of some round.
    fn peers_left(&self, experiment: &dyn Experiment, document: &Document) -> Vec<&'static Peer> {
        let is_asked = |peer: &&Peer| {
            let named = self.peers.iter().any(|name| name == peer.name);
            named || (self.peers.is_empty() && (!self.quick || experiment.is_quick(peer)))
        };
        let has = |peer: &Peer, round| document.has(experiment.name(), peer.name, round);
        let is_left = |peer: &&Peer| !(1..=document.rounds).all(|round| has(peer, round));
        let peers = experiment.peers().iter();
        peers.filter(is_asked).filter(is_left).collect()
    }

    /// Approximate seconds of an experiment's missing measurements.
    fn left(&self, experiment: &dyn Experiment, document: &Document) -> f64 {
        let mut peers = self.peers_left(experiment, document);
        peers.retain(|peer| bed::lacks(peer.who).is_none());
        let peers = peers.len();
        let turns = document.rounds * peers.div_ceil(experiment.at_once());
        number(turns) * experiment.seconds(self.quick) + number(peers) * SET_UP
    }

    fn repeat(
        &self,
        experiment: &dyn Experiment,
        document: &mut Document,
        yardsticks: &Yardsticks,
        stop: &Arc<AtomicBool>,
        progress: &mut Progress,
    ) -> Result<()> {
        let name = experiment.name();
        let rounds = document.rounds;
        let mut peers = self.peers_left(experiment, document);
        peers.retain(|peer| match bed::lacks(peer.who) {
            None => true,
            Some(why) => {
                document.missing.push(Missing::new(name, peer.name, why));
                false
            }
        });
        if peers.is_empty() {
            return Ok(());
        }
        progress.begin(name);
        let mut beds = Vec::new();
        for peer in &peers {
            interrupted(stop)?;
            progress.show(&format!("{name}: creating the hosts of {}", peer.name));
            let bed = experiment.bed(peer, yardsticks);
            progress.add(SET_UP);
            match bed {
                Ok(bed) => beds.push((*peer, bed)),
                Err(error) => {
                    let why = format!("{error:#}");
                    document.missing.push(Missing::new(name, peer.name, why));
                }
            }
        }
        if !self.busy && !beds.is_empty() {
            machine::wait_until_quiet(Duration::from_secs(60))?;
        }
        let one = experiment.seconds(self.quick);
        let groups = |peers: usize| number(peers.div_ceil(experiment.at_once()));
        for round in 1..=rounds {
            // A peer that has failed needs no time.
            progress.add(one * (groups(peers.len()) - groups(beds.len())));
            let mut failed = Vec::new();
            for group in beds.chunks_mut(experiment.at_once()) {
                let left = group.iter_mut();
                let mut left: Vec<_> = left
                    .filter(|(peer, _)| !document.has(name, peer.name, round))
                    .collect();
                if left.is_empty() {
                    progress.add(one);
                    continue;
                }
                interrupted(stop)?;
                let names: Vec<_> = left.iter().map(|(peer, _)| peer.name).collect();
                let names = names.join(", ");
                progress.show(&format!("{name}/{names}: round {round} of {rounds}"));
                let measured = thread::scope(|scope| {
                    let begin = |(peer, bed): &mut &mut (&'static Peer, Bed)| {
                        let turn = Turn {
                            peer,
                            round,
                            quick: self.quick,
                            yardsticks,
                            stop,
                            notes: RefCell::default(),
                        };
                        let measured = experiment.measure(&turn, bed);
                        measured.map(|figures| (figures, turn.notes.into_inner()))
                    };
                    let threads: Vec<_> = left
                        .iter_mut()
                        .map(|one| (one.0, scope.spawn(move || begin(one))))
                        .collect();
                    let join =
                        |(peer, thread): (&'static Peer, thread::ScopedJoinHandle<'_, _>)| {
                            let panicked = |_| Err(anyhow!("the measuring thread panicked"));
                            (peer, thread.join().unwrap_or_else(panicked))
                        };
                    threads.into_iter().map(join).collect::<Vec<_>>()
                });
                for (peer, result) in measured {
                    match result {
                        Ok(((values, cpu, disturbed), notes)) => document.runs.push(Run {
                            experiment: name.to_owned(),
                            peer: peer.name.to_owned(),
                            round,
                            values,
                            cpu,
                            disturbed,
                            notes,
                        }),
                        // Ctrl-C also ends the measuring programs.
                        Err(_) if stop.load(Ordering::Relaxed) => interrupted(stop)?,
                        Err(error) => {
                            let why = format!("round {round}: {error:#}");
                            document.missing.push(Missing::new(name, peer.name, why));
                            failed.push(peer.name);
                        }
                    }
                }
                document.save(&self.out)?;
                progress.add(one);
            }
            beds.retain(|(peer, _)| !failed.contains(&peer.name));
        }
        Ok(())
    }
}

/// Writes the page with the experiments that have figures.
fn draw(document: &Document, directory: &Path) -> Result<()> {
    let is_shown = |experiment: &&dyn Experiment| {
        let mut runs = document.runs.iter();
        runs.any(|run| run.experiment == experiment.name())
    };
    let shown: Vec<&dyn Experiment> = EXPERIMENTS.into_iter().filter(is_shown).collect();
    let page = directory.join("report.html");
    data::write(&page, &html::page(document, &shown)?)?;
    eprintln!("{}", page.display());
    Ok(())
}

fn interrupted(stop: &AtomicBool) -> Result<()> {
    ensure!(
        !stop.load(Ordering::Relaxed),
        "interrupted; the measurements are stored, and `--resume` continues"
    );
    Ok(())
}

/// Names and values of facts about the machine: kernel, processor, offloads and versions.
fn machine_facts() -> Vec<(String, String)> {
    let read = |file: &str| {
        fs::read_to_string(file)
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let mut facts = vec![
        ("kernel".to_owned(), read("/proc/sys/kernel/osrelease")),
        ("processor".to_owned(), machine::processor()),
        (
            "CPUs".to_owned(),
            thread::available_parallelism()
                .map_or_else(|_| "unknown".to_owned(), |cpus| cpus.to_string()),
        ),
        (
            "links".to_owned(),
            "veth, MTU 1500, checksum and segmentation offloads as the kernel sets them, GRO on"
                .to_owned(),
        ),
        (
            "LVS in userspace".to_owned(),
            env!("CARGO_PKG_VERSION").to_owned(),
        ),
    ];
    for (program, argument) in [
        ("haproxy", "-v"),
        ("nginx", "-v"),
        ("nft", "--version"),
        ("httperf", "--version"),
        ("wrk", "-v"),
    ] {
        let output = Command::new(program).arg(argument).output();
        let first = output.ok().and_then(|output| {
            // nginx prints its version to standard error.
            let text = if output.stdout.is_empty() {
                output.stderr
            } else {
                output.stdout
            };
            String::from_utf8_lossy(&text)
                .lines()
                .next()
                .map(str::to_owned)
        });
        facts.push((
            program.to_owned(),
            first.unwrap_or_else(|| "not installed".to_owned()),
        ));
    }
    let ipvs = bed::ipvs().unwrap_or_else(|why| why);
    facts.push(("kernel IPVS".to_owned(), ipvs));
    facts
}

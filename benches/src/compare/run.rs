//! Runs the comparison in rounds, each of which measures every row of a group once.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use super::bed::{self, Bed, Purpose};
use super::contender::{Contender, Method, Place};
use super::flood::Flood;
use super::progress::Progress;
use super::rows::{Group, Job, Memory, Work};
use super::sample::Sample;
use super::tcp;
use crate::machine::{self, Snapshot};
use crate::memory::{self, Churn, Clients, Pair, Pipeline, Setup};
use crate::publishing::Publishing;
use crate::yardsticks::{LineTable, Yardsticks};

/// Maximum number of attempts of a measurement in a round.
const TRIES: usize = 3;
/// Number of parts into which the round trips of a round are divided. The contenders take turns
/// after each part, so that disturbances of the machine affect all of them.
const TURNS: usize = 6;
/// Number of connections of each of two workers.
const WORKER_CONNECTIONS: u32 = 500_000;
/// The CPU for measurements in memory.
const MEMORY_CPU: usize = 1;

/// Number of rounds, duration and conditions of a measurement.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    pub(super) rounds: usize,
    pub(super) window: Duration,
    /// Whether to measure even if the machine is busy.
    pub(super) busy: bool,
    /// Set by SIGINT (Ctrl-C) and SIGTERM.
    pub(super) stop: Arc<AtomicBool>,
}

/// The measurements of one job.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    pub(super) job: Job,
    /// The sample of each round; `None` if all attempts were disturbed, or the measurement has
    /// failed.
    pub(super) samples: Vec<Option<Sample>>,
    /// Number of measurements that did not count, because they were disturbed.
    pub(super) rejected: usize,
    pub(super) error: Option<String>,
}

type Key = (Contender, Place, Purpose);
type Pinged = (Contender, bool);
type Trips = (Vec<f64>, Option<String>);

/// The prepared resources of a group.
pub(super) struct Runner<'a> {
    yardsticks: &'a Yardsticks,
    manner: &'a Manner,
    beds: HashMap<Key, Bed>,
    prepared: HashSet<(Key, Flood)>,
    /// Rate of the flood during round trips, in packets per second; `None` if it is not measured
    /// yet.
    half: Option<f64>,
    /// Contenders whose round trips are measured: with `true` during a flood, with `false` without
    /// other load.
    pinged: Vec<Pinged>,
    /// Round trips of this round in microseconds, or the reason why they failed.
    trips: HashMap<Pinged, Result<Trips, String>>,
    memory: Instances,
}

#[derive(Debug, Default)]
struct Instances {
    pipelines: Vec<((u32, u32), Pipeline)>,
    tables: Vec<((u32, u32), LineTable)>,
    churn: Option<Churn>,
    pair: Option<Pair>,
    publishing: Option<Publishing>,
    /// Resident memory of the dataplane in bytes before it had connections.
    empty: f64,
}

impl<'a> Runner<'a> {
    pub(super) fn new(yardsticks: &'a Yardsticks, manner: &'a Manner) -> Self {
        Self {
            yardsticks,
            manner,
            beds: HashMap::new(),
            prepared: HashSet::new(),
            half: None,
            pinged: Vec::new(),
            trips: HashMap::new(),
            memory: Instances::default(),
        }
    }

    /// Measures a group, and then stops all programs that it has started.
    pub(super) fn run(&mut self, group: &Group, progress: &mut Progress) -> Result<Vec<Outcome>> {
        progress.begin(group.name);
        let mut outcomes: Vec<Outcome> = group.jobs.iter().map(|job| self.outcome(job)).collect();
        for outcome in &mut outcomes {
            self.interrupted()?;
            progress.show(&format!("{}: getting ready", outcome.job.name));
            if let Err(error) = self.prepare(outcome.job.work) {
                outcome.error = Some(format!("{error:#}"));
            }
            progress.add(outcome.job.work.set_up());
        }
        if !self.manner.busy {
            machine::wait_until_quiet(Duration::from_secs(60))?;
        }
        for round in 1..=self.manner.rounds {
            self.trips.clear();
            for outcome in &mut outcomes {
                self.interrupted()?;
                let rounds = self.manner.rounds;
                progress.show(&format!("{}: round {round} of {rounds}", outcome.job.name));
                self.round(outcome);
                progress.add(outcome.job.work.seconds(self.manner.window.as_secs_f64()));
            }
        }
        self.beds.clear();
        self.prepared.clear();
        self.pinged.clear();
        self.memory = Instances::default();
        self.half = None;
        Ok(outcomes)
    }

    fn outcome(&self, job: &Job) -> Outcome {
        Outcome {
            job: job.clone(),
            samples: Vec::with_capacity(self.manner.rounds),
            rejected: 0,
            error: None,
        }
    }

    fn interrupted(&self) -> Result<()> {
        if self.manner.stop.load(Ordering::Relaxed) {
            bail!("interrupted; all programs are stopped and all namespaces are removed")
        }
        Ok(())
    }

    fn round(&mut self, outcome: &mut Outcome) {
        let mut measured = None;
        for _ in 0..TRIES {
            if outcome.error.is_some() {
                break;
            }
            match self.measure(outcome.job.work) {
                Ok(sample) if sample.disturbed.is_some() && !self.manner.busy => {
                    outcome.rejected += 1;
                    // Disturbed parts of the round trips have already been repeated.
                    if matches!(outcome.job.work, Work::Ping(..)) {
                        break;
                    }
                }
                Ok(sample) => {
                    measured = Some(sample);
                    break;
                }
                Err(error) => outcome.error = Some(format!("{error:#}")),
            }
        }
        outcome.samples.push(measured);
    }

    // --- prepared resources ----------------------------------------------------------------------

    fn bed(&mut self, key: Key) -> Result<&mut Bed> {
        self.bed_for(key, bed::FAST_PATH)
    }

    /// Returns the bed for `key`. Creates it if it does not exist; a director that allocates its
    /// table at the start then has a table for `connections`.
    fn bed_for(&mut self, key: Key, connections: u32) -> Result<&mut Bed> {
        if !self.beds.contains_key(&key) {
            let (who, place, purpose) = key;
            let mut bed = Bed::new(who, place, purpose, connections, self.yardsticks)?;
            match purpose {
                Purpose::Tcp => tcp::check(&mut bed)?,
                Purpose::Ping => {
                    bed.serve_pings()?;
                    tcp::check(&mut bed)?;
                }
                Purpose::Flood | Purpose::Transfer => {}
            }
            self.beds.insert(key, bed);
        }
        self.beds
            .get_mut(&key)
            .context("the hosts were not created")
    }

    fn flooded(&mut self, who: Contender, place: Place, flood: Flood) -> Result<&mut Bed> {
        let key = (who, place, Purpose::Flood);
        let yardsticks = self.yardsticks;
        let is_new = self.prepared.insert((key, flood));
        let bed = self.bed_for(key, flood.flows)?;
        if is_new {
            flood.prepare(bed, yardsticks)?;
        }
        Ok(bed)
    }

    fn prepare(&mut self, work: Work) -> Result<()> {
        match work {
            Work::Flood(who, place, flood) => self.flooded(who, place, flood).map(drop),
            Work::Tcp(who, _) | Work::Cost(who, _) => {
                self.bed((who, Place::Usual, Purpose::Tcp)).map(drop)
            }
            Work::Ping(who, loaded, _) => {
                self.bed((who, Place::Usual, Purpose::Ping))?;
                if !self.pinged.contains(&(who, loaded)) {
                    self.pinged.push((who, loaded));
                }
                if loaded && self.half.is_none() {
                    self.half = Some(self.half_load()?);
                }
                Ok(())
            }
            Work::Memory(memory) => self.prepare_memory(memory),
        }
    }

    /// Measures the highest rate of a flood that the dataplane forwards. Returns half of it, the
    /// rate of the flood during round trips.
    fn half_load(&mut self) -> Result<f64> {
        let flood = Flood {
            flows: 1000,
            client_bits: 10,
            replies: false,
            v6: false,
        };
        let (yardsticks, window) = (self.yardsticks, self.manner.window);
        let ours = Contender::AfPacket(Method::Nat);
        let bed = self.flooded(ours, Place::Usual, flood)?;
        Ok(flood.measure(bed, yardsticks, window)?.value / 2.0)
    }

    fn prepare_memory(&mut self, memory: Memory) -> Result<()> {
        let instances = &mut self.memory;
        match memory {
            Memory::Pipeline(connections, bits, _) => {
                let key = (connections, bits);
                if instances.pipelines.iter().all(|(known, _)| *known != key) {
                    let pipeline = on_core(|| Pipeline::new(connections, Clients { bits }))??;
                    instances.pipelines.push((key, pipeline));
                }
            }
            Memory::LineTable(flows, bits) => {
                let key = (flows, bits);
                if instances.tables.iter().all(|(known, _)| *known != key) {
                    let table = LineTable::new(self.yardsticks, flows, bits, MEMORY_CPU)?;
                    instances.tables.push((key, table));
                }
            }
            Memory::Churn => instances.churn = Some(on_core(Churn::new)?),
            Memory::Workers(_) if instances.pair.is_none() => {
                instances.pair = Some(Pair::new(WORKER_CONNECTIONS, Clients { bits: 10 })?);
            }
            Memory::Footprint(connections) | Memory::IdleCpu(connections) => {
                let key = (
                    Contender::AfPacket(Method::Nat),
                    Place::Usual,
                    Purpose::Flood,
                );
                if !self.beds.contains_key(&key) {
                    let bed = self.bed(key)?;
                    let pid = bed.pid().context("the contender has no process")?;
                    self.memory.empty = resident(pid)?;
                }
                self.flooded(key.0, key.1, many(connections))?;
            }
            Memory::Publish | Memory::MapUpdate if instances.publishing.is_none() => {
                instances.publishing = Some(on_core(Publishing::new)??);
            }
            Memory::Workers(_)
            | Memory::NewConnection(..)
            | Memory::Maglev(_)
            | Memory::Publish
            | Memory::MapUpdate => {}
        }
        Ok(())
    }

    // --- measurements ----------------------------------------------------------------------------

    fn measure(&mut self, work: Work) -> Result<Sample> {
        let (yardsticks, window) = (self.yardsticks, self.manner.window);
        match work {
            Work::Flood(who, place, flood) => {
                flood.measure(self.flooded(who, place, flood)?, yardsticks, window)
            }
            Work::Cost(who, kind) => {
                let sample = self.measure(Work::Tcp(who, kind))?;
                let cpu = sample
                    .cpu
                    .context("the CPU time of the contender was not measured")?;
                Ok(Sample {
                    value: cpu.process + cpu.softirq,
                    ..sample
                })
            }
            Work::Tcp(who, kind) => {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a few seconds"
                )]
                let seconds = window.as_secs_f64().ceil() as u32;
                kind.measure(self.bed((who, Place::Usual, Purpose::Tcp))?, seconds)
            }
            Work::Ping(who, loaded, percentile) => {
                if !self.trips.contains_key(&(who, loaded)) {
                    self.measure_trips(loaded);
                }
                let trips = self.trips.get_mut(&(who, loaded));
                let trips = trips.context("the measurement was not prepared")?.as_mut();
                let (trips, disturbed) = trips.map_err(|error| anyhow!("{error}"))?;
                Ok(Sample {
                    value: percentile.of(trips),
                    cpu: None,
                    disturbed: disturbed.clone(),
                })
            }
            Work::Memory(memory) => self.measure_memory(memory),
        }
    }

    /// Measures the round trips of all contenders in turns: during a flood if `loaded`, otherwise
    /// without other load.
    fn measure_trips(&mut self, loaded: bool) {
        let pinged = self.pinged.clone();
        for _ in 0..TURNS {
            for &one in pinged.iter().filter(|(_, beside)| *beside == loaded) {
                // A contender that has failed is not measured again.
                let all = self.trips.remove(&one);
                let all = all.unwrap_or_else(|| Ok(Trips::default()));
                let all = all.and_then(|(mut trips, disturbed)| {
                    let part = self.part_of_trips(one);
                    let (part, by) = part.map_err(|error| format!("{error:#}"))?;
                    trips.extend(part);
                    Ok((trips, disturbed.or(by)))
                });
                self.trips.insert(one, all);
            }
        }
    }

    /// Measures one part of the round trips, with up to [`TRIES`] attempts until one is not
    /// disturbed.
    fn part_of_trips(&mut self, (who, loaded): Pinged) -> Result<Trips> {
        let (yardsticks, rate) = (self.yardsticks, self.half.filter(|_| loaded));
        let bed = self.bed((who, Place::Usual, Purpose::Ping))?;
        let mut part = tcp::round_trips(bed, yardsticks, rate)?;
        for _ in 1..TRIES {
            if part.1.is_none() {
                break;
            }
            part = tcp::round_trips(bed, yardsticks, rate)?;
        }
        Ok(part)
    }

    fn measure_memory(&mut self, memory: Memory) -> Result<Sample> {
        let first = Snapshot::take();
        let instances = &mut self.memory;
        let value = match memory {
            Memory::Pipeline(connections, bits, replies) => {
                let key = (connections, bits);
                let found = instances
                    .pipelines
                    .iter_mut()
                    .find(|(known, _)| *known == key);
                let (_, pipeline) = found.context("the measurement was not prepared")?;
                pipeline.replies = replies;
                on_core(|| pipeline.measure())??
            }
            Memory::LineTable(flows, bits) => {
                let key = (flows, bits);
                let found = instances.tables.iter_mut().find(|(known, _)| *known == key);
                found
                    .context("the measurement was not prepared")?
                    .1
                    .measure()?
            }
            Memory::Churn => {
                let churn = instances
                    .churn
                    .as_mut()
                    .context("the measurement was not prepared")?;
                on_core(|| churn.measure())??
            }
            Memory::Workers(count) => {
                let pair = instances
                    .pair
                    .as_mut()
                    .context("the measurement was not prepared")?;
                pair.measure(count)?
            }
            Memory::NewConnection(scheduler, services, servers) => {
                let setup = Setup {
                    scheduler,
                    services,
                    servers,
                    ..Setup::default()
                };
                on_core(|| memory::new_connection(&setup, memory::vip()))?
            }
            Memory::Maglev(servers) => on_core(|| memory::maglev(servers))?,
            Memory::Publish | Memory::MapUpdate => {
                let publishing = instances
                    .publishing
                    .as_mut()
                    .context("the measurement was not prepared")?;
                on_core(|| match memory {
                    Memory::Publish => Ok(publishing.publish()),
                    _ => publishing.update(),
                })??
            }
            Memory::Footprint(connections) => {
                let bytes = resident(self.large_dataplane()?)? - self.memory.empty;
                bytes / f64::from(connections)
            }
            Memory::IdleCpu(_) => {
                let pid = self.large_dataplane()?;
                let first = Snapshot::take();
                thread::sleep(Duration::from_millis(1500));
                let used = Snapshot::take().since(&first, Some(pid), &[]);
                used.process / used.seconds
            }
        };
        Ok(Sample::of(
            value,
            &Snapshot::take().since(&first, None, &[]),
        ))
    }

    fn large_dataplane(&self) -> Result<u32> {
        let key = (
            Contender::AfPacket(Method::Nat),
            Place::Usual,
            Purpose::Flood,
        );
        let bed = self
            .beds
            .get(&key)
            .context("the measurement was not prepared")?;
        bed.pid().context("the contender has no process")
    }
}

/// A flood that opens this number of connections.
fn many(connections: u32) -> Flood {
    Flood {
        flows: connections,
        client_bits: 10,
        replies: false,
        v6: false,
    }
}

/// Runs `work` on the CPU for measurements in memory. Programs that are started later do not
/// inherit this CPU.
fn on_core<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| machine::pin(MEMORY_CPU).map(|()| work()));
        thread
            .join()
            .map_err(|_| anyhow!("a measurement panicked"))?
    })
}

/// Returns the resident memory of a process in bytes.
fn resident(pid: u32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<f64>().ok());
    kib.map(|kib| kib * 1024.0)
        .context("the status of the process has no VmRSS")
}

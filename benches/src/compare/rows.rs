//! The compared pairs, and the bounds of their ratios.

use super::contender::{Contender, Place};
use super::flood::Flood;
use super::tcp::{Percentile, Tcp};

/// A measurement that is made once a round.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) work: Work,
}

/// The kind of a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Work {
    Flood(Contender, Place, Flood),
    Tcp(Contender, Tcp),
    /// CPU time of the director for one unit of this TCP work.
    Cost(Contender, Tcp),
    /// A percentile of round trips: with `true` during a flood, with `false` without other load.
    Ping(Contender, bool, Percentile),
    Memory(Memory),
}

/// A measurement in memory, without network devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Memory {
    /// Nanoseconds per packet with this number of connections, and this binary logarithm of the
    /// number of client addresses. The packets are replies if the third value is `true`, and
    /// requests otherwise.
    Pipeline(u32, u32, bool),
    LineTable(u32, u32),
    /// New connections per second.
    Churn,
    /// Packets per second with this number of workers.
    Workers(usize),
    /// Nanoseconds to open a connection with this scheduler and these numbers of services and
    /// servers.
    NewConnection(&'static str, u32, u32),
    /// Milliseconds in which Maglev hashing recomputes its table for this number of servers.
    Maglev(u32),
    /// Memory of a dataplane with this number of connections, in bytes per connection.
    Footprint(u32),
    /// Nanoseconds to offload a connection to the kernel fast path.
    Publish,
    /// Mean nanoseconds of a `bpf_map_update_elem` call.
    MapUpdate,
    /// CPU time of an idle dataplane with this number of connections, as a share of a core.
    IdleCpu(u32),
}

impl Work {
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Flood(..) => "packets/s",
            Self::Tcp(_, Tcp::Bulk) => "Gbit/s",
            Self::Tcp(_, Tcp::Requests) => "requests/s",
            Self::Tcp(_, Tcp::Connections) => "connections/s",
            Self::Cost(_, Tcp::Bulk) => "ns/KiB",
            Self::Cost(..) => "ns",
            Self::Ping(..) => "us",
            Self::Memory(memory) => match memory {
                Memory::Pipeline(..)
                | Memory::LineTable(..)
                | Memory::NewConnection(..)
                | Memory::Publish
                | Memory::MapUpdate => "ns",
                Memory::Churn => "connections/s",
                Memory::Workers(_) => "packets/s",
                Memory::Maglev(_) => "ms",
                Memory::Footprint(_) => "bytes",
                Memory::IdleCpu(_) => "cores",
            },
        }
    }

    pub(super) fn contender(self) -> Option<Contender> {
        match self {
            Self::Flood(who, ..) | Self::Tcp(who, _) | Self::Cost(who, _) | Self::Ping(who, ..) => {
                Some(who)
            }
            Self::Memory(_) => None,
        }
    }

    /// The CPUs of the work, as in tables and JSON.
    pub(super) fn place(self) -> &'static str {
        match self {
            Self::Flood(who, place, _) => place.name(who),
            Self::Tcp(..) | Self::Cost(..) | Self::Ping(..) => "ends 0, director 1",
            Self::Memory(_) => "memory",
        }
    }

    /// Approximate seconds of one measurement.
    pub(super) fn seconds(self, window: f64) -> f64 {
        match self {
            Self::Flood(..) => window + 0.45,
            Self::Tcp(..) | Self::Cost(..) => window.ceil() + 0.8,
            // Only for the first percentile; others need no further time.
            Self::Ping(..) => 1.2,
            Self::Memory(Memory::Churn | Memory::Workers(_)) => 0.8,
            Self::Memory(Memory::IdleCpu(_)) => 2.0,
            Self::Memory(_) => 0.4,
        }
    }

    /// Approximate seconds for the preparation.
    pub(super) fn set_up(self) -> f64 {
        let opening = |connections: u32| f64::from(connections) / 140_000.0;
        match self {
            Self::Flood(who, _, flood) if who.has_connections() => 2.5 + opening(flood.flows),
            Self::Flood(..) | Self::Ping(..) => 1.5,
            Self::Tcp(..) | Self::Cost(..) => 1.0,
            Self::Memory(Memory::Pipeline(connections, ..)) => f64::from(connections) / 400_000.0,
            Self::Memory(Memory::Footprint(connections)) => 2.0 + opening(connections),
            Self::Memory(Memory::Churn | Memory::Workers(_) | Memory::LineTable(..)) => 2.0,
            Self::Memory(_) => 0.0,
        }
    }
}

/// Limits of a ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Bound {
    AtLeast(f64),
    AtMost(f64),
    /// No bound: the value is only shown.
    Shown,
}

impl Bound {
    pub(super) fn is_met(self, ratio: f64) -> Option<bool> {
        match self {
            Self::AtLeast(least) => Some(ratio >= least),
            Self::AtMost(most) => Some(ratio <= most),
            Self::Shown => None,
        }
    }
}

/// The reference of a comparison.
#[derive(Clone, Debug)]
pub(super) enum Against {
    /// The best of these measurements, by median.
    Best(Vec<String>),
    One(String),
    /// The first measurement. The value of the second measurement, with the link alone, is
    /// subtracted from both compared values.
    Added(String, String),
    /// A published or chosen figure, and its description in the table.
    Absolute(f64, &'static str),
}

impl From<String> for Against {
    fn from(job: String) -> Self {
        Self::One(job)
    }
}

impl Against {
    pub(super) fn jobs(&self) -> Vec<&str> {
        match self {
            Self::Best(jobs) => jobs.iter().map(String::as_str).collect(),
            Self::One(job) => vec![job],
            Self::Added(job, cable) => vec![job, cable],
            Self::Absolute(..) => Vec::new(),
        }
    }
}

/// A line of the result.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) what: String,
    pub(super) subject: String,
    pub(super) against: Against,
    pub(super) bound: Bound,
    /// Why the ratio cannot be compared with its bound.
    pub(super) but: Option<&'static str>,
}

/// Rows that are measured in the same rounds.
#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    pub(super) name: &'static str,
    pub(super) jobs: Vec<Job>,
    pub(super) rows: Vec<Row>,
}

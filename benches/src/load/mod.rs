//! Load tests of a whole director that are not in `compare`: large tables, replication, health
//! checks.

mod bulk;
mod checks;
pub mod large;
mod listing;
mod steady;

use anyhow::Result;
use clap::Subcommand;

/// The kind of a load test.
#[derive(Debug, Subcommand)]
pub enum Load {
    /// Full sync of very many connections to an empty director: duration, and round trips of
    /// clients during the full sync
    Bulk {
        /// Number of connections
        #[arg(default_value_t = 1_000_000)]
        connections: u32,
    },
    /// `lvsadm -Lnc` with very many connections: duration, memory, and round trips of clients in
    /// the meantime
    Listing {
        /// Numbers of connections; one table for each number
        #[arg(default_values_t = [100_000, 1_000_000])]
        connections: Vec<u32>,
    },
    /// Forwarded packets with and without replication of 10,000 new connections a second
    Steady {
        /// Number of rounds
        #[arg(default_value_t = 5)]
        rounds: usize,
    },
    /// Delay of health checks, while other servers are unreachable
    Checks(checks::Options),
}

impl Load {
    /// Measures the load, and prints the results.
    ///
    /// # Errors
    ///
    /// A host cannot be made (this needs root, or user namespaces), a program of the release build
    /// is missing, or a measurement fails.
    pub fn run(self) -> Result<()> {
        match self {
            Self::Bulk { connections } => bulk::run(connections),
            Self::Listing { connections } => listing::run(&connections),
            Self::Steady { rounds } => steady::run(rounds),
            Self::Checks(options) => checks::run(options),
        }
    }
}

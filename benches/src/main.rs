//! `lvs-bench`: compares the director with other programs on this machine.

use anyhow::Result;
use clap::{Parser, Subcommand};
use lvs_bench::{cluster, compare, endpoint, load, report};

/// Measures the director and other programs in the same run
#[derive(Debug, Parser)]
#[command(name = "lvs-bench")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Forward packets and TCP by our director, a null forwarder, the kernel and other programs,
    /// and print ratios
    Compare(compare::Options),
    /// Repeat published experiments, and write a report with plots: HTML, JSON, CSV
    Report(report::Options),
    /// Measure a director under a load that `compare` does not have
    Load {
        #[command(subcommand)]
        load: load::Load,
    },
    /// Send requests with httperf from many hosts at the same time, at increasing rates, and merge
    /// the results
    Cluster(cluster::Options),
    /// One endpoint of a connection, as `compare` starts it on its hosts
    #[command(hide = true)]
    Endpoint {
        #[command(subcommand)]
        end: endpoint::Endpoint,
    },
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Compare(options) => options.run(),
        Command::Report(options) => options.run(),
        Command::Cluster(options) => options.run(),
        Command::Load { load } => load.run(),
        Command::Endpoint { end } => end.run(),
    }
}

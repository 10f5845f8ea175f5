//! The helper program of the tests, the benches and the demo.

use clap::{Parser, Subcommand};

use lvs_testbed::{
    LoadOptions, attack, cluster, conformance, decap, demo, differential, hostile, load, paced,
    ping, suite, transcripts, waiters, without_tcx,
};

#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show a director at work: client, director and four web servers; NAT, direct routing and
    /// tunnelling
    Demo(demo::DemoOptions),
    /// Two directors with keepalived, or three behind a router with BIRD, under load, while one
    /// dies, restarts or is put into maintenance; prints a line of JSON for each scenario
    Cluster(cluster::ClusterOptions),
    /// Request files over HTTP, check every byte, print a report as JSON (runs on a client host)
    Load(LoadOptions),
    /// Serve files over HTTP, each download at an even rate (runs on a real server)
    Paced(paced::PacedOptions),
    /// Open connections, and print the time at which each is closed (runs on a client host)
    Wait(waiters::WaitOptions),
    /// Receive tunnelled packets if the kernel cannot: IPIP, GRE, GUE on port 6080 (runs on a real
    /// server)
    Decap,
    /// Send an echo request and wait for the answer
    Ping(ping::PingOptions),
    /// Send damaged and malicious frames (runs on any host of a site, or on a director into its TUN
    /// device)
    Shoot(hostile::ShootOptions),
    /// Attack a director and measure the effect on honest clients
    Attack(attack::AttackOptions),
    /// Send an attack's frames (for `attack`, on the attacker's host)
    #[command(hide = true)]
    Strike(attack::StrikeOptions),
    /// Run an honest client (for `attack`, on the client's host)
    #[command(hide = true)]
    Honest(attack::HonestOptions),
    /// Send requests to the control socket as unprivileged users (for `attack`, on the director)
    #[command(hide = true)]
    HostileUser(attack::UserOptions),
    /// Measure the round-trip time of single packets (for `attack`, on the client's host)
    #[command(hide = true)]
    Probe(attack::ProbeOptions),
    /// Send every datagram back (for `attack`, on a real server)
    #[command(hide = true)]
    Echo {
        /// UDP port
        port: u16,
    },
    /// Replay recordings of the kernel through the packet path, and compare
    Conformance(conformance::ConformanceOptions),
    /// Play recorded sessions of ipvsadm with the real programs, and compare
    Transcripts(transcripts::TranscriptOptions),
    /// Compare with a kernel with IPVS and with the real ipvsadm, by generated packets and command
    /// lines
    Differential(differential::DifferentialOptions),
    /// Record cases on this machine's kernel (for `differential`, on a machine with IPVS)
    #[command(hide = true)]
    Record(differential::RecordOptions),
    /// Run the tests of all crates (for `make test` and `make test-all`)
    Tests(suite::TestsOptions),
    /// Run a dataplane in memory, without packets and with a stopped clock (for tests of control
    /// sockets)
    #[command(hide = true)]
    Dataplane {
        /// Control socket of the dataplane: a path, or @NAME
        socket: String,
    },
    /// Run a program as on a kernel without tcx (for tests, on a director)
    #[command(hide = true)]
    WithoutTcx(without_tcx::WithoutTcxOptions),
    /// Run one session, in a separate process for `transcripts`
    #[command(hide = true)]
    PlayTranscript,
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Tests(options) => suite::main(&options),
        Command::Demo(options) => demo::main(&options),
        Command::Cluster(options) => cluster::main(&options),
        Command::Load(options) => load::main(options),
        Command::Paced(options) => paced::main(&options),
        Command::Wait(options) => waiters::main(&options),
        Command::Decap => decap::run(),
        Command::Ping(options) => ping::run(&options),
        Command::Shoot(options) => hostile::shoot(&options),
        Command::Attack(options) => attack::main(&options),
        Command::Strike(options) => attack::strike(&options),
        Command::Honest(options) => attack::honest(&options),
        Command::HostileUser(options) => attack::user(&options),
        Command::Probe(options) => attack::probe(&options),
        Command::Echo { port } => attack::echo(port),
        Command::Conformance(options) => conformance::run(&options),
        Command::Transcripts(options) => transcripts::run(&options),
        Command::Differential(options) => differential::run(&options),
        Command::Record(options) => differential::record(&options),
        Command::Dataplane { socket } => conformance::serve(&socket),
        Command::WithoutTcx(options) => match without_tcx::run(&options)? {},
        Command::PlayTranscript => transcripts::play(),
    }
}

//! `lvs-dataplane`: the packet engine as a program. It stays in the foreground and logs to stderr.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use lvs_core::mark::parse_rules;
use lvs_dataplane::control::Address;
use lvs_dataplane::engine::{self, Config, Engine};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;

/// Packet engine of a Linux Virtual Server in userspace.
///
/// It forwards the connections of virtual services to real servers by NAT, direct routing or IP tunnelling. `lvsadm` and
/// `lvsd` tell it what to do over its control socket, which answers when the engine is ready.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Use this network interface; may be given several times. Default: every Ethernet interface that is up and has no
    /// master.
    #[arg(long, value_name = "NAME")]
    interface: Vec<String>,

    /// How packets are received and sent.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    backend: Backend,

    /// Packet workers.
    #[arg(long, default_value_t = 1, value_name = "N")]
    workers: usize,

    /// The control socket: a path, or a name in the abstract namespace with a leading @. Default: @lvs-dataplane, of
    /// which every network namespace has its own.
    #[arg(long, env = "LVS_SOCKET", value_name = "PATH")]
    socket: Option<String>,

    /// Apply these rules at the start, one ipvsadm command line a line, as `ipvsadm-save -n` writes them.
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,

    /// Set an IPVS sysctl by the kernel's name; may be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = name_and_value)]
    sysctl: Vec<(String, String)>,

    /// Whose timeouts to begin with.
    #[arg(long, value_enum, default_value_t = Profile::Kernel)]
    profile: Profile,

    /// Answer ARP and neighbour discovery for the virtual addresses that the host does not have, and announce them.
    #[arg(long)]
    own_vips: bool,

    /// Connections at most.
    #[arg(long, default_value_t = 1 << 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    max_connections: u32,

    /// Give packets firewall marks by these rules, one a line: `--destination 192.0.2.10 --protocol tcp --ports 80,443
    /// --mark 1`; also --source, --interface, and --drop or --host in place of --mark. The first that fits decides.
    #[arg(long, value_name = "FILE")]
    marks: Option<PathBuf>,

    /// Helper for a protocol that names addresses in its payload: ftp (not built yet).
    #[arg(long, value_name = "NAME")]
    helper: Vec<String>,

    /// Use no interface: services can be set up and listed, and no packet comes. Needs no privileges.
    #[arg(long, conflicts_with = "interface")]
    no_interfaces: bool,

    /// Have the schedulers of this kernel; twos is newer than 6.1 as Debian builds it.
    #[arg(long, value_enum, default_value_t = Compat::Newest, value_name = "KERNEL")]
    compat: Compat,

    /// With --no-interfaces: time stands still until the control method test.advance moves it, test.inject hands in
    /// frames, and test.reset forgets everything. For tests.
    #[arg(long, requires = "no_interfaces")]
    virtual_time: bool,

    /// What to do with a new connection when the table is full.
    #[arg(long, value_enum, default_value_t = WhenFull::Drop)]
    when_full: WhenFull,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Backend {
    /// The fastest that works.
    Auto,
    /// Packet sockets.
    #[value(name = "af_packet")]
    AfPacket,
    /// AF_XDP sockets (not built yet).
    #[value(name = "af_xdp")]
    AfXdp,
    /// A TUN device (not built yet).
    Tun,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Compat {
    /// Linux 6.1 of Debian 12.
    #[value(name = "6.1")]
    Linux6_1,
    /// All schedulers there are.
    Newest,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Profile {
    /// The kernel's.
    Kernel,
    /// Timeouts as the RFCs on address translation ask for: TCP 2 h 4 min, half-open and half-closed 4 min.
    Modern,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum WhenFull {
    /// Drop its packets.
    Drop,
    /// Let it take the place of an old one (not built yet).
    Evict,
}

fn name_and_value(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn main() -> ExitCode {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_env_filter(
            EnvFilter::builder()
                .with_env_var("LVS_LOG")
                .with_default_directive(tracing::Level::INFO.into())
                .from_env_lossy(),
        )
        .with_target(false)
        .init();
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lvs-dataplane: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What the command line may name and this version does not have.
fn refuse_what_is_missing(args: &Args) -> anyhow::Result<()> {
    let missing = match args {
        Args {
            backend: Backend::AfXdp,
            ..
        } => "--backend af_xdp",
        Args {
            backend: Backend::Tun,
            ..
        } => "--backend tun",
        Args {
            when_full: WhenFull::Evict,
            ..
        } => "--when-full evict",
        Args { helper, .. } if !helper.is_empty() => "--helper",
        Args { workers, .. } if *workers != 1 => "--workers above 1",
        _ => return Ok(()),
    };
    anyhow::bail!("{missing} is not supported yet: leave it out");
}

fn run(args: Args) -> anyhow::Result<()> {
    refuse_what_is_missing(&args)?;
    let rules = match &args.rules {
        Some(path) => {
            let name = path.display().to_string();
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
            Some((text, name))
        }
        None => None,
    };
    let marks = match &args.marks {
        Some(path) => {
            let name = path.display();
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
            parse_rules(&text)
                .map_err(|(line, error)| anyhow::anyhow!("{name}, line {line}: {error}"))?
        }
        None => Vec::new(),
    };
    // Before the engine's threads exist, so that a signal during the start is not lost.
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot handle signals")?;
    let engine = Engine::start(Config {
        interfaces: args.interface,
        address: args.socket.as_ref().map(Address::new),
        own_vips: args.own_vips,
        no_interfaces: args.no_interfaces,
        virtual_time: args.virtual_time,
        compat: match args.compat {
            Compat::Linux6_1 => Some(engine::Compat::Linux6_1),
            Compat::Newest => None,
        },
        max_connections: Some(args.max_connections as usize),
        sysctls: args.sysctl,
        rules,
        marks,
        profile: match args.profile {
            Profile::Kernel => lvs_core::Profile::Kernel,
            Profile::Modern => lvs_core::Profile::Modern,
        },
        ..Config::default()
    })?;
    let shared = engine.shared();
    let handle = signals.handle();
    let waiter = std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            shared.stop();
        }
    });
    engine.join();
    handle.close();
    let _ = waiter.join();
    Ok(())
}

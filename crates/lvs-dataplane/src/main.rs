//! `lvs-dataplane`: the packet engine as a program. It stays in the foreground and logs to stderr.

use std::env;
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use lvs_core::mark::parse_rules;
use lvs_dataplane::control::Address;
use lvs_dataplane::engine::{self, Config, Engine};
use lvs_dataplane::log;
use lvs_dataplane::packet::icmp_limit::Limits;
use lvs_dataplane::packet::pipeline::{ClampMss, Echo, Settings};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::Level;
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

    /// Let this address stand for clients towards servers of full NAT; may be given several times. One that the host does
    /// not have is answered for.
    #[arg(long, value_name = "ADDRESS")]
    local_address: Vec<IpAddr>,

    /// Let NAT translate both ends where replies would not come back here: for clients on a server's network, and for
    /// servers that are clients of their own service. Needs --local-address.
    #[arg(long, requires = "local_address")]
    hairpin: bool,
    /// Echo requests to addresses that the engine owns: answer them, or drop them. Those to the host's are the host's.
    #[arg(long, default_value = "answer", value_name = "answer|drop")]
    echo: Echo,

    /// Echo requests that are answered in a second; 0 for no limit.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    echo_limit: u32,

    /// Lower the segment size that TCP connections are opened with: to what the way carries, tunnels included, or to N
    /// bytes. Default: leave it alone.
    #[arg(long, value_name = "auto|N")]
    clamp_mss: Option<ClampMss>,

    /// Time between two ICMP errors to one receiver, after six at once, in milliseconds; 0 for no limits at all.
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    icmp_ratelimit: u32,

    /// ICMP errors in a second to all receivers; 0 for no limit.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    icmp_msgs_per_sec: u32,

    /// ICMP errors at once to all receivers.
    #[arg(long, default_value_t = 50, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    icmp_msgs_burst: u32,

    /// Connections at most.
    #[arg(long, default_value_t = 1 << 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    max_connections: u32,

    /// Give packets firewall marks by these rules, one a line: `--destination 192.0.2.10 --protocol tcp --ports 80,443
    /// --mark 1`; also --source, --interface, and --drop or --host in place of --mark. The first that fits decides.
    #[arg(long, value_name = "FILE")]
    marks: Option<PathBuf>,

    /// Let data connections of FTP through NAT follow their control connections, which are those to virtual port 21, or to
    /// up to 8 other ports.
    #[arg(long, value_name = "ftp[=PORT,...]", value_parser = Helper::from_str)]
    helper: Vec<Helper>,

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
    /// Packet sockets, or a TUN device where those are not permitted.
    Auto,
    /// Packet sockets.
    #[value(name = "af_packet")]
    AfPacket,
    /// AF_XDP sockets (not built yet).
    #[value(name = "af_xdp")]
    AfXdp,
    /// A TUN device that the host routes packets through; no direct routing.
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

/// The ports of a helper.
#[derive(Clone, Debug)]
struct Helper(Vec<u16>);

impl FromStr for Helper {
    type Err = lvs_core::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        lvs_core::helper_ports(text).map(Self)
    }
}

fn name_and_value(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = EnvFilter::builder()
        .with_env_var("LVS_LOG")
        .with_default_directive(Level::INFO.into())
        .from_env_lossy();
    // Both write to the same standard error then.
    let mark = env::var_os("LVS_STARTED_BY").map(|_| "engine");
    // Without a log it forwards all the same.
    let _log = log::start(filter, mark).inspect_err(|error| {
        log::say(Level::ERROR, format_args!("lvs-dataplane: no log: {error}"));
    });
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::say(Level::ERROR, format_args!("lvs-dataplane: {error:#}"));
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
            when_full: WhenFull::Evict,
            ..
        } => "--when-full evict",
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
        backend: match args.backend {
            Backend::Auto => engine::Backend::Auto,
            Backend::Tun => engine::Backend::Tun,
            // The others are refused above.
            Backend::AfPacket | Backend::AfXdp => engine::Backend::AfPacket,
        },
        interfaces: args.interface,
        address: args.socket.as_ref().map(Address::new),
        own_vips: args.own_vips,
        local_addresses: args.local_address,
        hairpin: args.hairpin,
        settings: Settings {
            limits: Limits {
                per_receiver: Duration::from_millis(args.icmp_ratelimit.into()),
                per_second: args.icmp_msgs_per_sec,
                burst: args.icmp_msgs_burst,
            },
            echo: args.echo,
            echo_per_second: args.echo_limit,
            clamp_mss: args.clamp_mss,
        },
        no_interfaces: args.no_interfaces,
        virtual_time: args.virtual_time,
        compat: match args.compat {
            Compat::Linux6_1 => Some(engine::Compat::Linux6_1),
            Compat::Newest => None,
        },
        max_connections: Some(args.max_connections as usize),
        ftp_ports: args
            .helper
            .into_iter()
            .flat_map(|helper| helper.0)
            .collect(),
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

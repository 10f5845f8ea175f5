//! `lvs-dataplane`: the dataplane as a program. It stays in the foreground and logs to stderr.

use std::env;
use std::ffi::c_int;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use lvs_api::directors;
use lvs_api::{Address, Client, sweep};
use lvs_core::api::Confinement;
use lvs_core::mark::parse_rules;
use lvs_dataplane::dataplane::{self, Backend, Config, Dataplane, PeersConfig, UseKernel};
use lvs_dataplane::fast_path::FastPath as KernelFastPath;
use lvs_dataplane::warm_restart::{self, StateKeeper};
use lvs_packet::icmp_limit::Limits;
use lvs_packet::settings::{ClampMss, Echo, ReversePath, Settings};
use lvs_process::await_predecessor;
use lvs_process::confine;
use lvs_process::log;
use lvs_process::notify::Notify;
use lvs_process::watchdog::{self, Feeder};
use lvs_sys::signals::ignore_signals;
use lvs_sys::{group_id, mount_bpf};
use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use tracing::{Level, info, warn};
use tracing_subscriber::EnvFilter;

/// The dataplane of a Linux Virtual Server in userspace.
///
/// Forwards the connections of virtual services to real servers by NAT, full NAT, direct routing or
/// tunnelling. `lvsadm` and `lvsd` configure it through its control socket, which answers as soon
/// as the dataplane is ready. Runs in the foreground and logs to standard error; LVS_LOG sets the
/// level (info by default), and LVS_LOG_FORMAT=json makes each line a JSON object. SIGTERM, SIGINT
/// and SIGQUIT stop it in an orderly way; SIGHUP, SIGUSR1, SIGUSR2 and SIGALRM are ignored, so that
/// it continues when its terminal is closed.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    links: Links,
    #[command(flatten)]
    connections: Connections,
    #[command(flatten)]
    kernel_path: KernelPath,
    #[command(flatten)]
    services: Services,
    #[command(flatten)]
    replication: Replication,
    #[command(flatten)]
    restart: Restart,
    #[command(flatten)]
    access: Access,
    #[command(flatten)]
    _former: Former,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Interfaces and packets")]
struct Links {
    /// Network interface to use; can be repeated. Default: every Ethernet interface that is up and
    /// has no master.
    #[arg(long, value_name = "NAME")]
    interface: Vec<String>,

    /// How packets are received and sent.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    backend: Backend,

    /// Packet workers: threads that each have a part of the connections (up to 64); auto: one for
    /// each processor, 8 at most.
    #[arg(long, default_value = "1", value_name = "N|auto")]
    workers: Workers,

    /// Own the virtual addresses that the host does not have: answer ARP and neighbour discovery
    /// for them, and announce them.
    #[arg(long)]
    own_vips: bool,

    /// Whether to answer or drop echo requests to addresses that the dataplane owns, or the number
    /// of answers per second: answer means 1000. The host answers for its own addresses.
    #[arg(long, default_value = "answer", value_name = "answer|drop|N")]
    echo: Echo,

    /// Drop requests whose source has no route (loose), or whose source is not routed through the
    /// interface on which they arrive (strict).
    #[arg(long, default_value = "off", value_name = "off|loose|strict")]
    reverse_path: ReversePath,

    /// Lower the maximum segment size in TCP SYNs to the MTU of the path, tunnels included, or to N
    /// bytes. Default: no change.
    #[arg(long, value_name = "auto|N")]
    clamp_mss: Option<ClampMss>,

    /// Maximum number of ICMP errors per second to all receivers, at most a twentieth of them at
    /// once; each receiver gets a burst of six, and then one per second. 0 disables all three
    /// limits.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    icmp_limit: u32,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Connections")]
struct Connections {
    /// Maximum number of connections.
    #[arg(long, default_value_t = 1 << 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    max_connections: u32,

    /// Maximum number of the connections whose client or server has an IPv6 address, if the kernel
    /// fast path allocates the memory for all connections at the start. Default: all of up to
    /// 1,048,576 connections; of more connections a quarter, but at least 1,048,576.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    max_ipv6: Option<u32>,

    /// The action for new connections when the table is full.
    #[arg(long, value_enum, default_value_t = WhenFull::Drop)]
    when_full: WhenFull,

    /// Initial timeouts of connections.
    #[arg(long, value_enum, default_value_t = Profile::Kernel)]
    profile: Profile,

    /// Protocol helper: ftp lets FTP data connections through NAT follow their control
    /// connections. The ports are those of the virtual services, up to 8 (default: 21).
    #[arg(long, value_name = "ftp[=PORT,...]", value_parser = Helper::from_str)]
    helper: Vec<Helper>,

    /// Local address for full NAT: real servers see it instead of the client's address; can be
    /// repeated. The dataplane answers ARP and neighbour discovery for an address that the host
    /// does not have.
    #[arg(long, value_name = "ADDRESS")]
    local_address: Vec<IpAddr>,

    /// With NAT, also translate the source of clients whose replies would bypass the director:
    /// those on a server's own network, and servers of the same service. Needs
    /// --local-address.
    #[arg(long, requires = "local_address")]
    hairpin: bool,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Kernel fast path")]
struct KernelPath {
    /// Whether the kernel fast path forwards established connections: BPF programs at the
    /// interfaces, which read the dataplane's connection table (Linux 6.1, root). Default: as auto,
    /// but if it is not possible, `lvsadm doctor` shows the reason and reports no problem.
    #[arg(long, value_enum)]
    fast_path: Option<UseKernel>,

    /// Interface on which the kernel fast path runs before the kernel allocates a socket buffer
    /// (XDP), for floods; can be repeated. Its driver must have native XDP, and no frames with VLAN
    /// tags may arrive there. auto: each interface whose driver has native XDP, and on which XDP
    /// prevents neither merged packets (GRO, LRO) nor VLAN tags; `lvsadm doctor` shows the reason
    /// for each other interface.
    #[arg(long, value_name = "NAME|auto")]
    xdp: Vec<String>,

    /// Number of packets from the client after which the kernel fast path forwards a connection;
    /// for measurements.
    #[arg(long, hide = true, default_value_t = lvs_dataplane::fast_path::OFFLOAD_AFTER, value_name = "N")]
    fast_path_after: std::num::NonZeroU32,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Services at the start")]
struct Services {
    /// Services and servers to start with, in the format of `ipvsadm-save -n`; and rules that set
    /// firewall marks, one per line: `--destination 192.0.2.10 --protocol tcp --ports 80,443 --mark
    /// 1`; also --source, --interface, and --drop or --host instead of --mark. The first matching
    /// rule decides.
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,

    /// Set an IPVS sysctl, named as in the kernel; can be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = name_and_value)]
    sysctl: Vec<(String, String)>,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Replication between directors")]
struct Replication {
    /// A peer with which this director replicates connections in both directions: ADDRESS or
    /// ADDRESS:PORT; can be repeated, for up to eight peers. See --sync-key.
    #[arg(long, value_name = "ADDRESS", value_parser = directors::peer, requires = "sync_key")]
    sync_peer: Vec<SocketAddr>,

    /// File with the key that all peers have: 32 characters or more; only its owner and group may
    /// read it, and its group may not write it.
    #[arg(long, value_name = "FILE", requires = "sync_peer")]
    sync_key: Option<PathBuf>,

    /// Address to which other directors connect (TCP). Default: port 8848 of all addresses.
    #[arg(long, value_name = "ADDRESS", value_parser = directors::address, requires = "sync_peer")]
    sync_listen: Option<SocketAddr>,

    /// Seconds to wait for peers that cannot be reached, before this director is ready without
    /// them; 0 to wait for none.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, requires = "sync_peer", value_parser = clap::value_parser!(u32).range(0..=3600))]
    sync_wait: u32,

    /// Seconds for which the services and servers of a peer may differ from those of this director
    /// before the dataplane raises an alarm.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "sync_peer", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    sync_alarm: u32,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Restart")]
struct Restart {
    /// Whether a small process stores connections, services and counters until the next dataplane
    /// starts, if this dataplane is killed. With --fast-path, the kernel stores them. auto: if
    /// possible.
    #[arg(long, value_enum, default_value_t = WarmRestart::Off)]
    warm_restart: WarmRestart,

    /// Become the state keeper.
    #[arg(long, hide = true, value_name = "NAME")]
    hold: Option<String>,

    /// Remove the state that a killed dataplane has left in the kernel or in its state keeper (its
    /// connections are closed), and exit.
    #[arg(long)]
    cleanup: bool,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Control socket, rights and log")]
struct Access {
    /// Control socket: a path, or @NAME for an abstract one. Default: a socket in /run/lvs named by
    /// the network namespace, or @lvs-dataplane if that is not permitted.
    #[arg(long, env = "LVS_SOCKET", value_name = "ADDRESS")]
    socket: Option<String>,

    /// Let members of this group make changes over the control socket, in addition to root with
    /// CAP_NET_ADMIN and the dataplane's own user.
    #[arg(long, value_name = "GROUP", value_parser = group)]
    group: Option<u32>,

    /// Only members of this group, and the users who may change services, may read the services,
    /// connections and counters. Default: all users.
    #[arg(long, value_name = "GROUP", value_parser = group)]
    readers: Option<u32>,

    /// Whether the dataplane drops the rights that it does not need: most of the file system,
    /// starting programs, and system calls that administer the host (Landlock and seccomp, if the
    /// kernel supports them).
    #[arg(long, value_enum, default_value_t = Confine::Auto)]
    confine: Confine,
}

/// Options of earlier versions. The errors name the present spelling.
#[derive(Debug, clap::Args)]
struct Former {
    #[arg(long, hide = true, value_parser = |_: &str| Err::<String, _>("write the rules for marks into the file of --rules"))]
    marks: Option<String>,

    #[arg(long, hide = true, value_parser = |_: &str| Err::<String, _>("set the environment variable LVS_LOG_FORMAT to text or json"))]
    log_format: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum WarmRestart {
    /// No
    Off,
    /// If the kernel permits it; otherwise the log reports the reason
    Auto,
    /// Yes, or do not start
    On,
}

#[derive(Clone, Copy, Debug)]
enum Workers {
    Auto,
    Some(NonZeroUsize),
}

impl Workers {
    /// The number of workers. `auto`: one for each processor, but not more than eight.
    fn count(self) -> NonZeroUsize {
        const AUTO_MAX: NonZeroUsize = NonZeroUsize::new(8).expect("the number is not 0");
        match self {
            Self::Some(workers) => workers,
            Self::Auto => {
                let processors = std::thread::available_parallelism();
                processors.unwrap_or(NonZeroUsize::MIN).min(AUTO_MAX)
            }
        }
    }
}

impl FromStr for Workers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let number = text.parse().ok();
        let number = number.filter(|n: &NonZeroUsize| n.get() <= dataplane::WORKERS_MAX);
        let number = number.map(Self::Some);
        number.ok_or_else(|| format!("use auto, or a number from 1 to {}", dataplane::WORKERS_MAX))
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Confine {
    /// No
    Off,
    /// If the kernel supports it
    Auto,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Profile {
    /// The timeouts of the kernel
    Kernel,
    /// The timeouts of RFC 5382: established TCP 2 h 4 min, half-open and half-closed 4 min
    Modern,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum WhenFull {
    /// Drop the packets of new connections
    Drop,
    /// Evict another connection: a half-open or ended one, otherwise an unused or idle one; never
    /// one that transfers data
    Evict,
}

#[derive(Clone, Debug)]
struct Helper(Vec<u16>);

impl FromStr for Helper {
    type Err = lvs_core::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        lvs_core::ftp::helper_ports(text).map(Self)
    }
}

/// Whether a line of the file of rules is a rule for marks; otherwise it is a command of ipvsadm.
/// Such commands contain options that begin with `-`, too, but never the action of a rule for
/// marks.
fn is_mark_rule(line: &str) -> bool {
    let first = line.split_whitespace().next().unwrap_or_default();
    let options = [
        "--interface",
        "--source",
        "--destination",
        "--protocol",
        "--ports",
    ];
    let is_action = |word| ["--mark", "--drop", "--host"].contains(&word);
    options.contains(&first) || line.split_whitespace().any(is_action)
}

fn name_and_value(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Parses the name or number of a group.
fn group(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match group_id(text) {
        Ok(Some(number)) => Ok(number),
        Ok(None) => Err("the group does not exist: `getent group` lists the groups".to_owned()),
        Err(error) => Err(format!("the groups cannot be read: {error}")),
    }
}

/// Signals that stop the dataplane in an orderly way.
const ENDING: [c_int; 3] = [SIGINT, SIGQUIT, SIGTERM];
const IGNORED: [(c_int, &str); 4] = [
    (SIGHUP, "SIGHUP"),
    (SIGUSR1, "SIGUSR1"),
    (SIGUSR2, "SIGUSR2"),
    (SIGALRM, "SIGALRM"),
];

fn main() -> ExitCode {
    // First, because the terminal may be closed at any time. The state keeper inherits the ignored
    // signals.
    ignore_signals();
    let args = Args::parse();
    if let Some(name) = &args.restart.hold {
        // No process would read a log of the state keeper.
        return match warm_restart::hold(name) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let format = match log::Format::from_env() {
        Ok(format) => format,
        Err(error) => {
            log::say(Level::ERROR, format_args!("lvs-dataplane: {error}"));
            return ExitCode::from(2);
        }
    };
    if let (Err(error), false) = (await_predecessor(&address(&args)), args.restart.cleanup) {
        log::say(Level::ERROR, format_args!("lvs-dataplane: {error}"));
        return ExitCode::FAILURE;
    }
    // Before the sandbox, which forbids inspecting other processes.
    if !args.restart.cleanup {
        sweep();
    }
    // Before the sandbox, which forbids starting programs.
    let state_keeper = state_keeper(&args);
    // Enter the sandbox before any thread exists: Landlock restricts only threads that start later.
    let confinement = confine(&args);
    let filter = EnvFilter::builder()
        .with_env_var("LVS_LOG")
        .with_default_directive(Level::INFO.into())
        .from_env_lossy();
    // If lvsd has started this dataplane, both write to the same standard error.
    let mark = env::var_os("LVS_STARTED_BY").map(|_| "dataplane");
    // Without a log, the dataplane still forwards packets.
    let _log = log::start(filter, mark, format, "lvs-dataplane").inspect_err(|error| {
        log::say(
            Level::ERROR,
            format_args!("lvs-dataplane: cannot start the log thread: {error}"),
        );
    });
    if let (false, false) = (confinement.not_by.is_empty(), args.restart.cleanup) {
        warn!("the dataplane is {confinement}");
    }
    match run(args, confinement, state_keeper) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::say(
                Level::ERROR,
                format_args!("lvs-dataplane: {}", stated(&error)),
            );
            ExitCode::FAILURE
        }
    }
}

/// An error with its causes, except those that its text contains already.
fn stated(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn address(args: &Args) -> Address {
    let socket = args.access.socket.as_ref().filter(|text| !text.is_empty());
    socket.map_or_else(Address::default, Address::new)
}

/// Connects to the state keeper; `None` if the arguments disable warm restarts.
fn state_keeper(args: &Args) -> Option<io::Result<StateKeeper>> {
    let wanted = !matches!(args.restart.warm_restart, WarmRestart::Off) && !args.restart.cleanup;
    wanted.then(|| StateKeeper::of(&address(args).to_string()))
}

/// Drops the rights that the dataplane will not need, except with `--confine off` or `--cleanup`.
/// First mounts the BPF file system, if the kernel fast path may need it.
fn confine(args: &Args) -> Confinement {
    if args.restart.cleanup || matches!(args.access.confine, Confine::Off) {
        return Confinement::default();
    }
    if !matches!(args.kernel_path.fast_path, Some(UseKernel::Off)) {
        // The sandboxed process may not mount file systems. A failure is reported at the first use.
        let _ = mount_bpf(Path::new("/sys/fs/bpf"));
    }
    confine::dataplane(&confine::Places {
        socket: address(args).path().map(Path::to_owned),
        // Files of rules may contain host names, and DNS may use TCP.
        tcp: args.replication.sync_key.is_some() || args.services.rules.is_some(),
    })
}

/// Removes the state that a killed dataplane left, and prints what was removed.
///
/// # Errors
/// A dataplane is running, or the state cannot be searched for.
fn clean_up() -> anyhow::Result<()> {
    let address = Address::from_env();
    anyhow::ensure!(
        Client::connect(&address).is_err(),
        "a dataplane is running at {address}: stop it, which removes its state"
    );
    let look = "cannot search for the state of a killed dataplane";
    let held = StateKeeper::clean_up(&address.to_string()).context(look)?;
    if held {
        println!("removed the connections of a killed dataplane");
    }
    // Without permission for BPF, no dataplane can have left programs.
    let left = match KernelFastPath::clean_up() {
        Err(_) if held => return Ok(()),
        left => left.context(look)?,
    };
    match left {
        0 if held => {}
        0 => println!("found no state of a killed dataplane"),
        left => println!("removed {left} maps and links of a killed dataplane"),
    }
    Ok(())
}

fn run(
    args: Args,
    confinement: Confinement,
    state_keeper: Option<io::Result<StateKeeper>>,
) -> anyhow::Result<()> {
    if args.restart.cleanup {
        return clean_up();
    }
    let warm_restart = args.restart.warm_restart;
    let mut config = config(args)?;
    config.warm_restart = match (state_keeper.transpose(), warm_restart) {
        (Ok(state_keeper), _) => state_keeper,
        (Err(error), WarmRestart::On) => return Err(error).context("--warm-restart on"),
        (Err(error), _) => {
            warn!(
                "a warm restart is not possible ({error}): if this dataplane is killed, its connections end"
            );
            None
        }
    };
    // Before any thread of the dataplane, so that a signal during the start is not lost.
    let ignored = IGNORED.map(|(signal, _)| signal);
    let mut signals =
        Signals::new(ENDING.into_iter().chain(ignored)).context("cannot handle signals")?;
    let dataplane = Dataplane::start(config)?;
    dataplane.handle().set_confinement(confinement);
    let notify = Notify::from_env();
    notify.send("READY=1");
    let _fed = match (watchdog::interval(), dataplane.address()) {
        (Some(interval), Some(address)) => {
            let asked = dataplane.handle();
            let is_stopping = move || asked.is_stopping();
            let feeder = Feeder::start(address.clone(), notify, interval, is_stopping);
            Some(feeder.context("cannot start the thread that feeds the watchdog")?)
        }
        _ => None,
    };
    let running = dataplane.handle();
    let handle = signals.handle();
    let waiter = std::thread::spawn(move || {
        for signal in signals.forever() {
            let ignored = IGNORED.iter().find(|(number, _)| *number == signal);
            let Some((_, name)) = ignored else {
                return running.stop();
            };
            info!("{name} is ignored: SIGTERM stops the dataplane; lvsadm and lvsd configure it");
        }
    });
    dataplane.join();
    handle.close();
    let _ = waiter.join();
    Ok(())
}

/// Builds the configuration from the arguments, and reads the file of `--rules`.
fn config(args: Args) -> anyhow::Result<Config> {
    let (auto, xdp): (Vec<_>, _) = args
        .kernel_path
        .xdp
        .into_iter()
        .partition(|name| name == "auto");
    let workers = args.links.workers.count();
    if let Workers::Auto = args.links.workers {
        info!("--workers auto: {workers} packet workers");
    }
    let (mut rules, mut marks) = (None, Vec::new());
    if let Some(path) = &args.services.rules {
        let name = path.display().to_string();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
        // Lines of the other kind become empty, so that the line numbers in errors are right.
        let only = |of_marks| -> String {
            let lines = text
                .lines()
                .map(|line| match is_mark_rule(line) == of_marks {
                    true => line,
                    false => "",
                });
            lines.collect::<Vec<_>>().join("\n")
        };
        marks = parse_rules(&only(true))
            .map_err(|(line, error)| anyhow::anyhow!("{name}, line {line}: {error}"))?;
        rules = Some((only(false), name));
    }
    Ok(Config {
        backend: args.links.backend,
        fast_path: args.kernel_path.fast_path.unwrap_or(UseKernel::Try),
        xdp,
        xdp_auto: !auto.is_empty(),
        fast_path_after: Some(args.kernel_path.fast_path_after),
        workers: Some(workers),
        real_time: true,
        interfaces: args.links.interface,
        address: args
            .access
            .socket
            .filter(|text| !text.is_empty())
            .map(Address::new),
        group: args.access.group,
        readers: args.access.readers,
        own_vips: args.links.own_vips,
        local_addresses: args.connections.local_address,
        hairpin: args.connections.hairpin,
        settings: Settings {
            limits: Limits::new(args.links.icmp_limit),
            echo: args.links.echo,
            clamp_mss: args.links.clamp_mss,
            reverse_path: args.links.reverse_path,
        },
        max_connections: Some(args.connections.max_connections as usize),
        max_ipv6: args.connections.max_ipv6.map(|max| max as usize),
        when_full: match args.connections.when_full {
            WhenFull::Drop => lvs_core::settings::WhenFull::Drop,
            WhenFull::Evict => lvs_core::settings::WhenFull::Evict,
        },
        ftp_ports: args
            .connections
            .helper
            .into_iter()
            .flat_map(|helper| helper.0)
            .collect(),
        sysctls: args.services.sysctl,
        rules,
        marks,
        peers: args.replication.sync_key.map(|key_file| PeersConfig {
            listen: args.replication.sync_listen,
            peers: args.replication.sync_peer,
            key_file,
            wait: Duration::from_secs(args.replication.sync_wait.into()),
            alarm: Duration::from_secs(args.replication.sync_alarm.into()),
        }),
        profile: match args.connections.profile {
            Profile::Kernel => lvs_core::settings::Profile::Kernel,
            Profile::Modern => lvs_core::settings::Profile::Modern,
        },
        ..Config::default()
    })
}

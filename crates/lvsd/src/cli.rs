//! The command line and the exit codes.

mod ask;
mod convert;
mod register;
mod shell;

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::{Parser, Subcommand};
use lvs_core::api::Confinement;
use lvs_dataplane::control::daemon::Status;
use lvs_dataplane::control::{Address, LockError, steer};
use lvs_dataplane::{confine, log};
use rustix::process::Signal as Kill;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tracing::Level;

use crate::admin::{self, Admin};
use crate::api::{self, Api};
use crate::cluster;
use crate::config::{Config, Facts, LoadError, Report, check_filter};
use crate::daemon::{self, Options, Signal};
use crate::door;
use crate::engine::process::{Machine, become_engine, end_politely, lock, send};
use crate::events::Events;
use crate::health::{self, Network, Pins};
use crate::last_good;
use crate::notify::Notify;
use crate::schema;
use crate::sources::{self, Gathered};
use crate::tally::{self, Tally};
use crate::watchdog::{self, Pulses};
use crate::words::counted;

/// The file is wrong or missing.
const EXIT_CONFIG: u8 = 3;
/// Something else failed.
const EXIT_FAILURE: u8 = 1;

/// Where the configuration lies.
const DEFAULT_CONFIG: &str = "/etc/lvsd/lvsd.toml";

/// Where is kept what must outlive a reboot.
const DEFAULT_STATE: &str = "/var/lib/lvsd";

/// How often what must go on shows that it does.
const BEAT: Duration = Duration::from_millis(100);

/// How long `lvsd stop` waits for the daemon that runs.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// The daemon of a Linux Virtual Server: keeps the engine (lvs-dataplane) in step with a TOML file
/// and with the health of the real servers.
///
/// SIGHUP reads the file again and changes only what has changed. SIGTERM ends the daemon and
/// leaves the engine, its services and addresses alone; SIGINT (Ctrl-C) ends the engine too. Exit
/// codes: 0 done, 1 failure, 2 usage, 3 the configuration cannot be used.
#[derive(Debug, Parser)]
#[command(name = "lvsd", version)]
pub struct Arguments {
    /// The configuration. Default: /etc/lvsd/lvsd.toml; of `plan`, that of the daemon that runs.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Check the configuration (FILE, or that of --config), say what is wrong, and change nothing.
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    check_config: Option<Option<PathBuf>>,

    /// Control socket of the engine: @NAME (abstract) or a path; wins over the file. Default: one
    /// in /run/lvs, of which every network namespace has its own.
    #[arg(long, global = true, value_name = "PATH", env = "LVS_SOCKET")]
    socket: Option<String>,

    /// Wait for an engine that something else starts, such as lvs-dataplane.service; start none.
    #[arg(long)]
    attach: bool,

    /// Directory for what must outlive a reboot: which servers people have taken out of service,
    /// and what DNS and etcd said
    /// last.
    #[arg(long, global = true, value_name = "DIR", env = "STATE_DIRECTORY", default_value = DEFAULT_STATE)]
    state: PathBuf,

    /// Leave the engine forwarding when the daemon ends. It always does now.
    #[arg(long, hide = true)]
    leave: bool,

    #[command(subcommand)]
    command: Option<Command>,
}

impl Arguments {
    fn config(&self) -> &Path {
        self.config.as_deref().unwrap_or(Path::new(DEFAULT_CONFIG))
    }
}

/// What to do instead of running the daemon.
#[derive(Debug, Subcommand)]
enum Command {
    /// End the daemon that runs; the engine keeps forwarding.
    Stop {
        /// End the engine too: services, addresses and connections go. Of an engine that lvsd has
        /// not started, only what lvsd has set goes.
        #[arg(long)]
        all: bool,
    },
    /// Check the configuration, and have the daemon that runs read it again.
    Reload {
        /// Also if it takes away more servers than max_remove allows.
        #[arg(long)]
        force: bool,
    },
    /// Say what a reload of the configuration would change, and change nothing. The exit code is 1
    /// if the daemon would refuse it.
    Plan,
    /// Show services and servers: what the file, people and health checks say of each, and what the
    /// engine does with it.
    Status {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print what happens, a line each, until interrupted.
    Events {
        /// Print JSON, an object a line.
        #[arg(long)]
        json: bool,
    },
    /// Print another program's configuration as lvsd's. What has no counterpart becomes a comment,
    /// and the exit code is 4.
    Convert {
        /// keepalived.conf, ldirectord.cf, or lvs.conf of the LVS HOWTO's configure script.
        file: PathBuf,
        /// What kind of file it is; else its name and its text tell.
        #[arg(long, value_enum)]
        from: Option<convert::From>,
        /// Write what keepalived keeps, such as VRRP, to this file; else it is a comment at the
        /// end.
        #[arg(long, value_name = "FILE")]
        rest: Option<PathBuf>,
    },
    /// Take the whole director out of service, or back: another one takes over that is able to. It
    /// outlives restarts and reboots.
    Maintenance {
        /// on, off, or status, which changes nothing.
        #[arg(value_enum)]
        what: Switch,
        /// For what reason, shown to others.
        #[arg(long, value_name = "TEXT")]
        why: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Register a server in etcd, in a pool from which services take theirs, while this runs; at its
    /// end, it is withdrawn. Of the configuration, only [cluster] matters.
    Register(register::Register),
    /// Print a configuration for keepalived that moves the virtual addresses as [vrrp] says.
    KeepalivedConfig,
    /// Print the manual page.
    Man {
        /// That of the configuration, lvsd.toml(5).
        #[arg(long)]
        config_file: bool,
    },
    /// Print the JSON Schema of the configuration, for editors.
    Schema,
    /// Print completions for a shell.
    Completions {
        /// bash, zsh, fish, elvish or powershell.
        shell: clap_complete::Shell,
    },
    /// Become the engine with the options in [dataplane]: for a service manager that runs it by
    /// itself.
    Engine,
}

/// What becomes of a maintenance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Switch {
    /// It begins.
    On,
    /// It ends.
    Off,
    /// It is shown.
    Status,
}

/// Says what is wrong with a command line, or prints the help that it asks for.
pub fn refused(error: &clap::Error) -> ExitCode {
    let printed = told(written(
        error.print().and_then(|()| std::io::stdout().flush()),
    ));
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand)
        && Path::new(word).is_file()
    {
        let _ = writeln!(
            std::io::stderr(),
            "  tip: a configuration is named with `--config {word}`"
        );
    }
    match u8::try_from(error.exit_code()) {
        Ok(0) => printed,
        Ok(code) => ExitCode::from(code),
        Err(_) => ExitCode::from(EXIT_FAILURE),
    }
}

/// Does what the command line says.
pub fn main(mut arguments: Arguments) -> ExitCode {
    if let Some(file) = &arguments.check_config {
        let file = file
            .as_ref()
            .map_or_else(|| arguments.config(), PathBuf::as_path);
        return check(file, &Gathered::recall(&arguments.state, file));
    }
    match arguments.command {
        Some(Command::Stop { all }) => return stop(&arguments, all),
        Some(Command::Reload { force }) => return reload(&arguments, force),
        Some(Command::Status { json }) => return told(ask::status(&steered(&arguments), json)),
        Some(Command::Events { json }) => return told(ask::events(&steered(&arguments), json)),
        Some(Command::Maintenance {
            what,
            ref why,
            json,
        }) => {
            let on = match what {
                Switch::On => Some(true),
                Switch::Off => Some(false),
                Switch::Status => None,
            };
            let engine = steered(&arguments);
            return told(ask::maintenance(&engine, on, why.clone(), json));
        }
        Some(Command::Register(ref register)) => {
            let _log = match start_log(None) {
                Ok(guard) => guard,
                Err(why) => return fail(&why),
            };
            return told(register::run(arguments.config(), register));
        }
        Some(Command::Convert {
            ref file,
            from,
            ref rest,
        }) => return convert::run(file, from, rest.as_deref()),
        Some(Command::Man { config_file: false }) => return print(&shell::man()),
        Some(Command::Man { config_file: true }) => return print(schema::page().as_bytes()),
        Some(Command::Schema) => return print(format!("{:#}\n", schema::json()).as_bytes()),
        Some(Command::Completions { shell }) => return print(&shell::completions(shell)),
        _ => {}
    }
    let running = match arguments.command {
        Some(Command::Plan) => ask::running(&steered(&arguments)),
        _ => None,
    };
    if let (None, Some(daemon)) = (&arguments.config, &running) {
        arguments.config = Some(PathBuf::from(&daemon.config));
    }
    let (config, warnings) = match load(&arguments) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    match arguments.command {
        Some(Command::Engine) => {
            let why = become_engine(&address(&arguments, &config), &config.dataplane);
            return fail(&why);
        }
        Some(Command::KeepalivedConfig) => {
            return cluster::keepalived::text(&config)
                .map_or_else(|why| fail(&why), |text| print(text.as_bytes()));
        }
        Some(Command::Plan) => return plan(&arguments, &config, running.as_ref()),
        Some(_) | None => {}
    }
    let _log = match start_log(config.daemon.log.as_deref()) {
        Ok(guard) => guard,
        Err(why) => {
            warnings.print();
            log::say(Level::ERROR, format_args!("lvsd: {why}"));
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    // By the log's thread: whoever is to read them may not, and a daemon starts all the same.
    warnings.print();
    match run(arguments, config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            tracing::error!("{why}");
            ExitCode::from(EXIT_FAILURE)
        }
    }
}

/// The engine's address where a broken file must not keep anybody from asking, nor a long one have
/// him wait.
fn steered(arguments: &Arguments) -> Address {
    let named = arguments
        .socket
        .as_ref()
        .is_some_and(|name| !name.is_empty());
    let config = match named || !Config::may_name_socket(arguments.config()) {
        true => Config::default(),
        false => Config::load(arguments.config()).map_or_else(|_| Config::default(), |(c, _)| c),
    };
    address(arguments, &config)
}

fn told(result: Result<(), String>) -> ExitCode {
    result.map_or_else(|why| fail(&why), |()| ExitCode::SUCCESS)
}

fn print(text: &[u8]) -> ExitCode {
    told(write(text))
}

fn write(text: &[u8]) -> Result<(), String> {
    let mut output = std::io::stdout();
    written(output.write_all(text).and_then(|()| output.flush()))
}

/// A reader who has seen enough is no failure; a full disk is one.
fn written(result: std::io::Result<()>) -> Result<(), String> {
    match result {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(format!("write error: {error}")),
        _ => Ok(()),
    }
}

fn fail(why: &str) -> ExitCode {
    log::say(Level::ERROR, format_args!("lvsd: {why}"));
    ExitCode::from(EXIT_FAILURE)
}

/// The configuration. Where it cannot be used, and the engine runs on after a daemon that has
/// ended, the daemon takes the one that it had last.
fn load(arguments: &Arguments) -> Result<(Config, Report), ExitCode> {
    let gathered = gathered(arguments);
    let error = match Config::load_with(arguments.config(), None, &gathered) {
        Ok(loaded) => return Ok(loaded),
        Err(error) => error,
    };
    let code = refuse(&error);
    let address = address(arguments, &Config::default());
    let (kept, why) = match arguments.command {
        None => (last_good::recall(&address), "the engine runs"),
        // Nobody has stopped the engine before this one: it has crashed.
        Some(Command::Engine) => (last_good::kept(&address), "the last engine has crashed"),
        Some(_) => return Err(code),
    };
    let (kept, report) = kept.ok_or(code)?;
    let kept = kept.with(&gathered).unwrap_or((kept, report));
    log::say(
        Level::ERROR,
        format_args!(
            "lvsd: {why}, so lvsd goes on with the last good configuration; mend {} and run `lvsd reload`",
            arguments.config().display()
        ),
    );
    Ok(kept)
}

/// The engine's control socket: that of the command line or environment, of the file, or the usual.
fn address(arguments: &Arguments, config: &Config) -> Address {
    let named = arguments.socket.clone().filter(|name| !name.is_empty());
    named
        .or_else(|| config.dataplane.socket.clone())
        .map_or_else(Address::default, Address::new)
}

/// What DNS and etcd said last.
fn gathered(arguments: &Arguments) -> Gathered {
    Gathered::recall(&arguments.state, arguments.config())
}

/// Ends the daemon that runs and, with `all`, the engine.
fn stop(arguments: &Arguments, all: bool) -> ExitCode {
    let address = steered(arguments);
    let result = match steer(&address) {
        Err(LockError::Held(Some(pid))) => {
            let signal = if all { Kill::INT } else { Kill::TERM };
            end_politely(pid, signal, STOP_LIMIT)
        }
        Err(LockError::Held(None)) => Err("an lvsd runs, and cannot be told which".to_owned()),
        Err(LockError::Io(error)) => Err(format!("cannot see whether an lvsd runs: {error}")),
        Ok(_only) if all => {
            last_good::forget(&address);
            stop_engine(&address)
        }
        Ok(_only) => {
            log::say(Level::INFO, format_args!("lvsd: none runs"));
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => fail(&why),
    }
}

/// Has the daemon that runs read its file again, and shows what is wrong with it.
fn reload(arguments: &Arguments, force: bool) -> ExitCode {
    let address = &steered(arguments);
    match ask::reload(address, force) {
        Ok(Some(done)) => {
            for warning in done.warnings {
                log::say(Level::WARN, format_args!("{warning}\n"));
            }
            return print(format!("{}\n", done.message).as_bytes());
        }
        // One without a socket, or none.
        Ok(None) => match Config::load(arguments.config()) {
            Ok((_, warnings)) => warnings.print(),
            Err(error) => return refuse(&error),
        },
        // It has told its log what is wrong with its file.
        Err(why) => {
            return match Config::load(arguments.config()) {
                Err(error) => refuse(&error),
                Ok(_) => fail(&why),
            };
        }
    }
    let signal = if force { Kill::USR1 } else { Kill::HUP };
    let result = match steer(address) {
        Err(LockError::Held(Some(pid))) => send(pid, signal),
        Err(LockError::Held(None)) => Err("an lvsd runs, and cannot be told which".to_owned()),
        Err(LockError::Io(error)) => Err(format!("cannot see whether an lvsd runs: {error}")),
        Ok(_only) => Err("no lvsd runs; start it with `systemctl start lvsd`".to_owned()),
    };
    result.map_or_else(|why| fail(&why), |()| ExitCode::SUCCESS)
}

/// Says what a reload would change, and whether the daemon that runs would refuse it.
fn plan(arguments: &Arguments, config: &Config, running: Option<&Status>) -> ExitCode {
    let address = address(arguments, config);
    let admin = Admin::look(admin::path(&arguments.state, arguments.config()));
    let printed = match daemon::plan(Machine::new(&address), config, &admin) {
        Ok(text) => print(text.as_bytes()),
        Err(why) => return fail(&why),
    };
    let refused = running.and_then(|status| {
        let before = status.services.iter();
        let before = before.map(|service| (service.service, service.servers.len()));
        daemon::too_much_away(before, config, false)
    });
    match refused {
        Some((why, remedy)) => fail(&format!(
            "a reload would be refused: {} has {why}; {remedy}",
            arguments.config().display()
        )),
        None => printed,
    }
}

/// Ends the engine of a daemon that does not run.
fn stop_engine(address: &Address) -> Result<(), String> {
    let _log = start_log(None)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start the event loop: {e}"))?;
    let result = runtime.block_on(daemon::stop_engine(Machine::new(address)));
    runtime.shutdown_background();
    result
}

fn check(file: &Path, gathered: &Gathered) -> ExitCode {
    match Config::load_with(file, Some(&Facts::read()), gathered) {
        Ok((config, warnings)) => {
            warnings.print();
            let servers = config.services.iter().map(|s| s.servers.len()).sum();
            // The exit code says it where nobody reads.
            let _ = writeln!(
                std::io::stdout(),
                "{}: valid, {} with {}",
                file.display(),
                counted(config.services.len(), "service"),
                counted(servers, "server")
            );
            ExitCode::SUCCESS
        }
        Err(error) => refuse(&error),
    }
}

fn refuse(error: &LoadError) -> ExitCode {
    match error {
        LoadError::Refused(report) => {
            report.print();
            let errors = counted(report.errors(), "error");
            log::say(
                Level::ERROR,
                format_args!("lvsd: {} has {errors}", report.path),
            );
        }
        LoadError::Read { .. } | LoadError::NotText { .. } => {
            log::say(Level::ERROR, format_args!("lvsd: {error}"));
        }
    }
    ExitCode::from(EXIT_CONFIG)
}

/// Logs to standard error. `LVSD_LOG` wins over the file.
fn start_log(from_file: Option<&str>) -> Result<log::Guard, String> {
    let from_env = std::env::var("LVSD_LOG")
        .ok()
        .filter(|words| !words.is_empty());
    let (words, origin) = match (&from_env, from_file) {
        (Some(words), _) => (words.as_str(), "LVSD_LOG in the environment"),
        (None, Some(words)) => (words, "`log` in [lvsd]"),
        (None, None) => ("info", "the default"),
    };
    check_filter(words).map_err(|(title, help)| format!("{origin}: {title}; {help}"))?;
    let filter = tracing_subscriber::EnvFilter::try_new(words)
        .map_err(|error| format!("{origin}: {words} is not a filter: {error}"))?;
    log::start(filter, None).map_err(|error| format!("cannot start the log: {error}"))
}

fn run(arguments: Arguments, config: Config) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start the event loop: {e}"))?;
    // Before the lock says who we are: `lvsd reload` sends a signal to its holder, which would end
    // one that does not listen yet.
    let signals = {
        let _runtime = runtime.enter();
        signals().map_err(|e| format!("cannot listen for signals: {e}"))?
    };
    let address = address(&arguments, &config);
    let _lock = lock(&address)?;
    let last_good = last_good::path(&address);
    if let Some(path) = &last_good {
        last_good::keep(path, config.text());
    }
    let confinement = match config.daemon.confine.as_deref() {
        Some("off") => Confinement::default(),
        _ => confine::daemon(),
    };
    if !confinement.not_by.is_empty() {
        tracing::warn!("lvsd is {confinement}");
    }
    health::raise_limits();
    let counts = tally::path(&address);
    let tally = Arc::new(Tally::recall(counts.as_deref()));
    let pulses = Pulses::default();
    let checks = checks_thread(&pulses)?;
    let notify = Notify::from_env();
    if let Some(interval) = watchdog::interval() {
        watchdog::feed(notify.clone(), pulses.clone(), interval)
            .map_err(|e| format!("cannot start a thread: {e}"))?;
    }
    let result = runtime.block_on(async {
        tokio::spawn(pulses.event_loop.clone().keep(BEAT));
        let pins = Pins::start(address.clone()).map_err(|error| {
            tracing::warn!("no checks by way of services: cannot start a thread: {error}");
        });
        let network = Network { pins: pins.ok() };
        let events = Events::default();
        let (sender, asks) = door::channel();
        let api = Arc::new(Api::counted_in(sender, Arc::clone(&tally)));
        let opened = door::open(
            &address,
            &config.dataplane,
            events.source(),
            Arc::clone(&api),
        );
        if let Err(error) = opened {
            tracing::warn!(
                "no control socket: {error}; `lvsd status` and `lvsadm drain` do without lvsd; --socket @NAME gives it a place that needs no rights"
            );
        }
        let served = api::start(&api, &events, &address);
        let options = Options {
            attach: arguments.attach,
            last_good,
            notify,
            checks: Some(checks),
            turns: pulses.turns.clone(),
            cluster: Some(cluster::Places {
                engine: address.clone(),
                maintenance: cluster::maintenance_path(&admin::path(
                    &arguments.state,
                    arguments.config(),
                )),
                turns: pulses.turns,
            }),
            sources: Some(sources::path(&arguments.state, arguments.config())),
            admin: Some(admin::path(&arguments.state, arguments.config())),
            asks: Some(asks),
            events,
            tally: Arc::clone(&tally),
            api: Some(api.settings()),
            confinement,
            ..Options::new(arguments.config().to_owned())
        };
        let result = daemon::run(options, config, Machine::new(&address), network, signals).await;
        served.end();
        result
    });
    tally.keep(counts.as_deref());
    // A call to an engine that hangs must not keep the daemon from ending.
    runtime.shutdown_background();
    result
}

/// A thread for the health checks: whatever the daemon computes, they are in time.
fn checks_thread(pulses: &Pulses) -> Result<tokio::runtime::Handle, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start the event loop of the checks: {e}"))?;
    let handle = runtime.handle().clone();
    let pulse = pulses.checks.clone();
    std::thread::Builder::new()
        .name("lvsd-checks".to_owned())
        .spawn(move || runtime.block_on(pulse.keep(BEAT)))
        .map_err(|e| format!("cannot start a thread: {e}"))?;
    Ok(handle)
}

/// The signals of the process as messages.
fn signals() -> std::io::Result<mpsc::Receiver<Signal>> {
    let (sender, receiver) = mpsc::channel(8);
    for (kind, message) in [
        (SignalKind::hangup(), Signal::Reload),
        (SignalKind::user_defined1(), Signal::ForcedReload),
        (SignalKind::terminate(), Signal::Stop),
        (SignalKind::interrupt(), Signal::StopAll),
    ] {
        let mut stream = signal(kind)?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while stream.recv().await.is_some() {
                if sender.send(message).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(receiver)
}

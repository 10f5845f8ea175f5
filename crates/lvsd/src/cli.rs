//! The command line and the exit codes.

mod ask;
mod convert;
mod register;
mod shell;
mod status;

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::{Parser, Subcommand};
use lvs_api::daemon::{LoadStatus, Status};
use lvs_api::words::counted;
use lvs_api::{Address, LockError, guidance, steer, sweep, tidy};
use lvs_core::api::Confinement;
use lvs_process::{confine, log};
use lvs_sys::signals::{Ignored, harmless};
use rustix::process::Signal as Kill;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tracing::Level;

use crate::admin::{self, Admin};
use crate::api::{self, Api};
use crate::channels::{self, Events};
use crate::cluster;
use crate::config::{Config, LoadError, Report, check_filter};
use crate::control_socket;
use crate::counters::Counters;
use crate::daemon::{self, Options, Signal};
use crate::dataplane::process::{
    GIVEN, Machine, become_dataplane, beside_us, end_politely, lock, send,
};
use crate::expand::expand;
use crate::facts::Facts;
use crate::health::{self, Network, Pins};
use crate::last_good;
use crate::notify::Notify;
use crate::schema;
use crate::sources::{self, Gathered};
use crate::watchdog::{self, Pulses};

/// Exit code if the configuration file is invalid or cannot be read, or if the filter of the log is
/// invalid.
const EXIT_CONFIG: u8 = 3;
/// Exit code for failures without an exit code of their own.
const EXIT_FAILURE: u8 = 1;

const DEFAULT_CONFIG: &str = "/etc/lvsd/lvsd.toml";

/// The configuration that `lvsd init` writes.
const STARTER: &str = include_str!("cli/starter.toml");

/// Default path of the state directory, whose content survives a reboot.
const DEFAULT_STATE: &str = "/var/lib/lvsd";

/// Interval of the heartbeats of event loops, for the watchdog.
const BEAT: Duration = Duration::from_millis(100);

/// Maximum time that `lvsd stop` waits for the exit of the running daemon.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// The daemon of a Linux Virtual Server: keeps the dataplane (lvs-dataplane) in sync with a TOML
/// file and with the health of the real servers.
///
/// SIGHUP reads the file again and changes only what has changed; SIGUSR1 does the same without the
/// limit max_removed_percent. SIGTERM stops the daemon and does not change the dataplane, its
/// services and addresses; SIGINT (Ctrl-C) stops the dataplane too. SIGUSR2 and SIGALRM are
/// ignored. Exit codes: 0 done, 1 failure, 2 usage, 3 invalid configuration.
#[derive(Debug, Parser)]
#[command(name = "lvsd", version)]
pub struct Arguments {
    /// The configuration file. Default: /etc/lvsd/lvsd.toml; for `plan` and `keepalived-config`,
    /// the file of the running daemon.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Control socket of the dataplane: @NAME (abstract) or a path; overrides the file. Default: a
    /// socket in /run/lvs, named by the network namespace.
    #[arg(long, global = true, value_name = "PATH", env = "LVS_SOCKET")]
    socket: Option<String>,

    /// Wait for a dataplane that another program starts, such as lvs-dataplane.service; start none.
    #[arg(long)]
    attach: bool,

    /// Directory for data that must survive a reboot: the servers that operators have taken out of
    /// service, the maintenance of the director, and the last answers of DNS, etcd and Kubernetes.
    #[arg(long, global = true, value_name = "DIR", env = "STATE_DIRECTORY", default_value = DEFAULT_STATE)]
    state: PathBuf,

    /// Format of the log of lvsd, and of the dataplane that it starts: text, or json with an object
    /// in each line.
    #[arg(long, value_name = "FORMAT", env = log::Format::VARIABLE, default_value_t)]
    log_format: log::Format,

    #[command(subcommand)]
    command: Option<Command>,
}

impl Arguments {
    fn config(&self) -> &Path {
        self.config.as_deref().unwrap_or(Path::new(DEFAULT_CONFIG))
    }
}

/// A subcommand; without one, lvsd runs as the daemon.
#[derive(Debug, Subcommand)]
enum Command {
    /// Stop the running daemon; the dataplane continues to forward.
    Stop {
        /// Stop the dataplane, too: its services, addresses and connections end. If lvsd has not
        /// started the dataplane, only the services and settings of lvsd are removed.
        #[arg(long)]
        all: bool,
    },
    /// Make the running daemon read its configuration again, and show the errors in it.
    Reload {
        /// Reload even if this removes more servers than max_removed_percent allows.
        #[arg(long)]
        force: bool,
    },
    /// Check a configuration and report the errors in it, each with its line and a fix. Nothing is
    /// changed. Exit code 0: valid, perhaps with warnings; 3: invalid.
    Check {
        /// Configuration file. Default: the file of --config.
        file: Option<PathBuf>,
    },
    /// Write a starter configuration with comments. A file that exists is never overwritten.
    Init {
        /// The file to write. Default: standard output.
        file: Option<PathBuf>,
    },
    /// Print the changes that a reload of the configuration would make, without making them. The
    /// exit code is 1 if the daemon would refuse the reload.
    Plan {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show the director, its services and servers, broken ones first.
    ///
    /// The first line is a summary. On a terminal, lines have at most 80 columns, with colours
    /// unless NO_COLOR is set. Otherwise each server has one line of any length.
    Status {
        /// Name or address of a service, to show also the durations of its servers' checks, their
        /// failures and their clients. Default: all services.
        name: Option<String>,
        /// Show only services that are broken, or have servers that are down, suspicious, slow or
        /// flapping.
        #[arg(long)]
        broken: bool,
        /// Show the state again every two seconds until interrupted.
        #[arg(long, conflicts_with = "json")]
        watch: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print one line and performance data for a monitoring system such as Nagios or Icinga.
    ///
    /// Exit code 0: no problem; 1: clients are served, but a server is down or suspicious, or there
    /// is another warning; 2: a service is broken, another host uses a virtual address, or no
    /// dataplane answers; 3: lvsd does not answer.
    CheckHealth,
    /// Print events, one on each line: new ones until interrupted, or past ones.
    Events {
        /// Print the last N events and exit. lvsd stores 1,000.
        #[arg(short = 'n', long = "lines", value_name = "N")]
        last: Option<usize>,
        /// Print the events of the last TIME, such as 90s, 10m or 2h, and exit.
        #[arg(long, value_name = "TIME", value_parser = lvs_api::words::parse_duration)]
        since: Option<Duration>,
        /// Print JSON, one object on each line.
        #[arg(long)]
        json: bool,
    },
    /// Convert another program's configuration to a file for lvsd, and print it. Statements without
    /// a counterpart become comments; the exit code is then 4.
    Convert {
        /// keepalived.conf, ldirectord.cf, or lvs.conf of the LVS HOWTO's configure script.
        file: PathBuf,
        /// The kind of file. Default: derived from its name and text.
        #[arg(long, value_enum)]
        from: Option<convert::From>,
        /// Write the parts that keepalived continues to use, such as VRRP, to this file. Default: a
        /// comment at the end of the output.
        #[arg(long, value_name = "FILE")]
        rest: Option<PathBuf>,
        /// Read the lines of keepalived.conf that begin with @ID, as `keepalived --config-id ID`
        /// does.
        #[arg(long, value_name = "ID")]
        config_id: Option<String>,
        /// Compare the result with the configuration that keepalived itself reads from the file,
        /// instead of printing it. This needs keepalived and root on this host. Exit code 1: the
        /// two differ; 5: keepalived could not be run.
        #[arg(long, conflicts_with = "rest")]
        check: bool,
    },
    /// Take a server out of service, and wait until its connections have ended: `lvsadm drain`.
    #[command(disable_help_flag = true)]
    Drain {
        /// Service, server and options, as for lvsadm drain.
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "ARGUMENT"
        )]
        words: Vec<OsString>,
    },
    /// Return a server to service: `lvsadm undrain`.
    #[command(disable_help_flag = true)]
    Undrain {
        /// Service and server, as for lvsadm undrain.
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "ARGUMENT"
        )]
        words: Vec<OsString>,
    },
    /// Start or end the maintenance of the whole director, during which another director takes
    /// over, if one can. Maintenance survives restarts and reboots.
    Maintenance {
        /// on, off, or status, which only shows the state.
        #[arg(value_enum)]
        what: Switch,
        /// The reason of the maintenance, which `status` shows to other operators.
        #[arg(long, value_name = "TEXT")]
        why: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Register a server in etcd, in a pool that services refer to, while this command runs; its
    /// exit removes the record. Only [cluster] of the configuration is used.
    Register(register::Register),
    /// Print a configuration for keepalived that moves the virtual addresses according to [vrrp].
    KeepalivedConfig,
    /// Print the manual page.
    Man {
        /// Print the page of the configuration, lvsd.toml(5).
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
    /// Run the dataplane with the options of [dataplane], in place of this process: for a service
    /// manager that starts the dataplane separately.
    Dataplane,
}

/// The action of `lvsd maintenance`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Switch {
    /// Start maintenance.
    On,
    /// End maintenance.
    Off,
    /// Show whether this director is in maintenance.
    Status,
}

/// Prints the error in a command line, with a tip if there is one, or the help or version that it
/// requests. Returns the exit code.
pub fn refused(error: &clap::Error) -> ExitCode {
    let printed = exit_code(written(
        error.print().and_then(|()| std::io::stdout().flush()),
    ));
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand)
        && Path::new(word).is_file()
    {
        let _ = writeln!(
            std::io::stderr(),
            "  tip: to use this configuration, write `lvsd --config {word}`"
        );
    }
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand)
        && guidance::LVSADM_COMMANDS.contains(&word.as_str())
    {
        let _ = writeln!(
            std::io::stderr(),
            "  tip: `{word}` is a command of lvsadm: `lvsadm {word}`"
        );
    }
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg)
        && word.starts_with("--check-config")
    {
        let _ = writeln!(
            std::io::stderr(),
            "  tip: `lvsd check [FILE]` checks a configuration"
        );
    }
    match u8::try_from(error.exit_code()) {
        Ok(0) => printed,
        Ok(code) => ExitCode::from(code),
        Err(_) => ExitCode::from(EXIT_FAILURE),
    }
}

/// Runs the command of the command line. The daemon ignores the signals in `ignored`; most other
/// commands restore their default action.
pub fn main(mut arguments: Arguments, ignored: Ignored) -> ExitCode {
    // A signal may arrive while a long file is being read.
    let early = match arguments.command {
        None => match Early::new() {
            Ok(early) => Some(early),
            Err(why) => return fail(&why),
        },
        // The dataplane that this process becomes ignores these signals as well.
        Some(Command::Dataplane) => None,
        _ => {
            ignored.restore();
            None
        }
    };
    match arguments.command {
        Some(Command::Check { ref file }) => {
            let file = file.as_deref().unwrap_or_else(|| arguments.config());
            return check(file, &Gathered::recall(&arguments.state, file));
        }
        Some(Command::Init { file: None }) => return print(STARTER.as_bytes()),
        Some(Command::Init {
            file: Some(ref file),
        }) => return exit_code(init(file)),
        Some(Command::Stop { all }) => return stop(&arguments, all),
        Some(Command::Reload { force }) => return reload(&arguments, force),
        Some(Command::Status {
            ref name,
            broken,
            watch,
            json,
        }) => {
            let selection = status::Selection {
                name: name.clone(),
                broken,
            };
            let dataplane = steered(&arguments);
            return exit_code(match watch {
                true => status::watch(&dataplane, &selection),
                false => status::status(&dataplane, &selection, json),
            });
        }
        Some(Command::CheckHealth) => {
            let (line, code) = status::check_health(&steered(&arguments));
            return match write(line.as_bytes()) {
                Ok(()) => ExitCode::from(code),
                Err(why) => fail(&why),
            };
        }
        Some(Command::Events { last, since, json }) => {
            return exit_code(ask::events(&steered(&arguments), last, since, json));
        }
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
            let dataplane = steered(&arguments);
            return exit_code(status::maintenance(&dataplane, on, why.clone(), json));
        }
        Some(Command::Drain { ref words }) => return lvsadm(&arguments, "drain", words),
        Some(Command::Undrain { ref words }) => return lvsadm(&arguments, "undrain", words),
        Some(Command::Register(ref register)) => {
            let _log = match start_log(None, arguments.log_format) {
                Ok(guard) => guard,
                Err(why) => return fail(&why),
            };
            return exit_code(register::run(arguments.config(), register));
        }
        Some(Command::Convert {
            ref file,
            from,
            ref rest,
            ref config_id,
            check,
        }) => {
            let id = config_id.as_deref();
            return match check {
                true => convert::check(file, from, id),
                false => convert::run(file, from, rest.as_deref(), id),
            };
        }
        Some(Command::Man { config_file: false }) => return print(&shell::man()),
        Some(Command::Man { config_file: true }) => return print(schema::page().as_bytes()),
        Some(Command::Schema) => return print(format!("{:#}\n", schema::json()).as_bytes()),
        Some(Command::Completions { shell }) => return print(&shell::completions(shell)),
        _ => {}
    }
    let running = match arguments.command {
        Some(Command::Plan { .. } | Command::KeepalivedConfig) => {
            ask::running(&steered(&arguments))
        }
        _ => None,
    };
    if let (None, Some(daemon)) = (&arguments.config, &running) {
        arguments.config = Some(file_of(daemon));
    }
    let (config, warnings, loaded) = match load(&arguments) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    match arguments.command {
        Some(Command::Dataplane) => {
            let why = become_dataplane(&address(&arguments, &config), &config.dataplane);
            return fail(&why);
        }
        Some(Command::KeepalivedConfig) => {
            let expanded = expand(&config, &gathered(&arguments));
            return cluster::keepalived::text(&config, &expanded.services)
                .map_or_else(|why| fail(&why), |text| print(text.as_bytes()));
        }
        Some(Command::Plan { json }) => return plan(&arguments, &config, running.as_ref(), json),
        Some(_) | None => {}
    }
    let _log = match start_log(config.daemon.log.as_deref(), arguments.log_format) {
        Ok(guard) => guard,
        Err(why) => {
            warnings.print();
            log::say(Level::ERROR, format_args!("lvsd: {why}"));
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    // A slow reader of the log must not delay the start, so the log thread prints the warnings.
    warnings.print();
    match early
        .map_or_else(Early::new, Ok)
        .and_then(|early| run(arguments, config, &warnings.text, loaded, early))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            tracing::error!("{why}");
            ExitCode::from(EXIT_FAILURE)
        }
    }
}

/// Replaces this process by `lvsadm` with one of its commands. Returns an exit code only if this
/// fails.
fn lvsadm(arguments: &Arguments, command: &str, words: &[OsString]) -> ExitCode {
    let program = beside_us("lvsadm").unwrap_or_else(|| "lvsadm".into());
    let error = std::process::Command::new(&program)
        .arg(command)
        .args(words)
        .env("LVS_SOCKET", steered(arguments).to_string())
        .exec();
    fail(&format!(
        "{} cannot be started: {error}. It is installed with lvsd, or by `cargo install lvsadm`",
        program.display()
    ))
}

/// Address of the dataplane, as [`address`] returns it. An invalid configuration file counts as a
/// file without an address.
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

fn exit_code(result: Result<(), String>) -> ExitCode {
    result.map_or_else(|why| fail(&why), |()| ExitCode::SUCCESS)
}

fn print(text: &[u8]) -> ExitCode {
    exit_code(write(text))
}

fn write(text: &[u8]) -> Result<(), String> {
    let mut output = std::io::stdout();
    written(output.write_all(text).and_then(|()| output.flush()))
}

/// Ignores a closed output pipe. Returns other errors, such as a full disk.
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

/// Loads the configuration. If it is invalid or unreadable, the daemon loads the last valid one if
/// the dataplane is running, and `lvsd dataplane` loads it if the previous dataplane has crashed.
fn load(arguments: &Arguments) -> Result<(Config, Report, LoadStatus), ExitCode> {
    let error = match Config::load(arguments.config()) {
        Ok((config, report)) => return Ok((config, report, daemon::loaded_at_start())),
        Err(error) => error,
    };
    let code = refuse(&error);
    let address = address(arguments, &Config::default());
    let (kept, why) = match arguments.command {
        None => (last_good::recall(&address), "the dataplane is running"),
        // A stop of the dataplane removes the stored configuration, so a stored one means a crash.
        Some(Command::Dataplane) => (last_good::kept(&address), "the last dataplane has crashed"),
        Some(_) => return Err(code),
    };
    let (config, report) = kept.ok_or(code)?;
    log::say(
        Level::ERROR,
        format_args!(
            "lvsd: {why}, so lvsd continues with the last good configuration; correct {} and run `lvsd reload`",
            arguments.config().display()
        ),
    );
    let loaded = LoadStatus {
        ok: false,
        message: daemon::refused(&arguments.config().display().to_string(), &error),
        ..daemon::loaded_at_start()
    };
    Ok((config, report, loaded))
}

/// Path of a running daemon's configuration file. A path relative to the daemon's working directory
/// becomes absolute, if this directory can be determined.
fn file_of(daemon: &Status) -> PathBuf {
    let file = PathBuf::from(&daemon.config);
    if file.is_absolute() {
        return file;
    }
    let directory = std::fs::read_link(format!("/proc/{}/cwd", daemon.pid));
    directory.map_or_else(|_| file.clone(), |directory| directory.join(&file))
}

/// Address of the dataplane: from the command line or environment, from the file, or the default.
fn address(arguments: &Arguments, config: &Config) -> Address {
    let named = arguments.socket.clone().filter(|name| !name.is_empty());
    named
        .or_else(|| config.dataplane.socket.clone())
        .map_or_else(Address::default, Address::new)
}

fn gathered(arguments: &Arguments) -> Gathered {
    Gathered::recall(&arguments.state, arguments.config())
}

/// Message about an lvsd that may be running, but whose process id is unknown.
fn unknown_process(error: &LockError) -> String {
    match error {
        LockError::Held(_) => {
            "an lvsd is running, but its process id is unknown; `pgrep -x lvsd` lists the processes"
                .to_owned()
        }
        LockError::Io(error) => format!("cannot determine whether an lvsd is running: {error}"),
    }
}

/// Stops the running daemon and, with `all`, also the dataplane, whose state files are then
/// removed.
fn stop(arguments: &Arguments, all: bool) -> ExitCode {
    let address = steered(arguments);
    let result = match steer(&address) {
        Err(LockError::Held(Some(pid))) => {
            let signal = if all { Kill::INT } else { Kill::TERM };
            end_politely(pid, signal, STOP_LIMIT)
        }
        Err(error) => Err(unknown_process(&error)),
        Ok(_only) if all => {
            last_good::forget(&address);
            stop_dataplane(&address, arguments.log_format)
        }
        Ok(_only) => {
            log::say(Level::INFO, format_args!("lvsd: no lvsd is running"));
            Ok(())
        }
    };
    if all && result.is_ok() {
        // Keep the settings that lvsd has made: by them, the next lvsd recognises manual changes.
        tidy(&address, GIVEN);
        sweep();
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => fail(&why),
    }
}

/// Requests a reload from the running daemon: over its control socket, or by a signal if it has
/// none. Prints the errors of the daemon's file, unless only a signal was sent.
fn reload(arguments: &Arguments, force: bool) -> ExitCode {
    let address = &steered(arguments);
    match ask::reload(address, force) {
        Ok(Some(done)) => {
            for warning in done.warnings {
                log::say(Level::WARN, format_args!("{warning}\n"));
            }
            return print(format!("{}\n", done.message).as_bytes());
        }
        // No daemon runs, or the running one has no control socket.
        Ok(None) => {
            if let Some(Err(error)) = arguments.config.as_deref().map(Config::load) {
                return refuse(&error);
            }
        }
        // The daemon logs the errors of its file.
        Err(why) => {
            let daemon = ask::running(address);
            let file = daemon.map(|daemon| Config::load(&file_of(&daemon)));
            return match file {
                Some(Err(error @ LoadError::Refused(_))) => refuse(&error),
                Some(Err(_)) => {
                    fail(&why);
                    ExitCode::from(EXIT_CONFIG)
                }
                _ => fail(&why),
            };
        }
    }
    let signal = if force { Kill::USR1 } else { Kill::HUP };
    let result = match steer(address) {
        // After the signal, the daemon reads its file, and logs the errors.
        Err(LockError::Held(Some(pid))) => send(pid, signal),
        Err(error) => Err(unknown_process(&error)),
        Ok(_only) => Err("no lvsd is running; start it with `systemctl start lvsd`".to_owned()),
    };
    result.map_or_else(|why| fail(&why), |()| ExitCode::SUCCESS)
}

/// Prints the changes that a reload would make, and the reason if the running daemon would refuse
/// the reload.
fn plan(arguments: &Arguments, config: &Config, running: Option<&Status>, json: bool) -> ExitCode {
    let address = address(arguments, config);
    let admin = Admin::look(admin::path(&arguments.state, arguments.config()));
    let expanded = expand(config, &gathered(arguments));
    let both = (config, &expanded);
    let names = running.iter().flat_map(|status| &status.services);
    let names = names.map(|service| (service.service, service.name.clone()));
    let names = names.collect();
    let planned = match daemon::plan(Machine::new(&address), both, &admin, &names) {
        Ok(planned) => planned,
        Err(why) => return fail(&why),
    };
    let refused = running.and_then(|status| {
        let (_, of_kubernetes) = expanded.by_origin();
        let of_kubernetes: HashSet<_> = of_kubernetes.iter().map(|one| one.id).collect();
        let before = status.services.iter();
        let before = before.filter(|service| !of_kubernetes.contains(&service.service));
        let before = before.map(|service| (service.service, service.servers.len()));
        daemon::too_much_away(before, both, false)
    });
    let refused = refused.map(|(why, fix)| {
        format!(
            "a reload would be refused: {} has {why}; {fix}",
            arguments.config().display()
        )
    });
    let printed = match json {
        true => {
            let object = serde_json::json!({ "plan": planned, "refused": refused });
            print(format!("{object:#}\n").as_bytes())
        }
        false => print(planned.to_string().as_bytes()),
    };
    match refused {
        Some(why) => fail(&why),
        None => printed,
    }
}

/// Stops the dataplane while no daemon runs.
fn stop_dataplane(address: &Address, format: log::Format) -> Result<(), String> {
    let _log = start_log(None, format)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start the event loop: {e}"))?;
    let result = runtime.block_on(daemon::stop_dataplane(Machine::new(address)));
    runtime.shutdown_background();
    result
}

/// Writes the starter configuration. The file must not exist.
fn init(file: &Path) -> Result<(), String> {
    let created = File::create_new(file);
    let mut output = created.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => format!(
            "{} exists and is unchanged; `lvsd init` without a file prints the starter configuration",
            file.display()
        ),
        _ => format!("cannot create {}: {error}", file.display()),
    })?;
    let result = output.write_all(STARTER.as_bytes());
    result.map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    let text = format!(
        "created {}: edit its addresses, then run `lvsd check {0}`\n",
        file.display()
    );
    write(text.as_bytes())
}

fn check(file: &Path, gathered: &Gathered) -> ExitCode {
    match Config::load_on(file, Some(&Facts::read())) {
        Ok((config, warnings)) => {
            warnings.print();
            let expanded = expand(&config, gathered);
            // The exit code is correct even if the output is not read.
            let _ = writeln!(
                std::io::stdout(),
                "{}: valid, {} with {}",
                file.display(),
                counted(expanded.services.len(), "service"),
                counted(expanded.servers(), "server")
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

/// Starts logging to standard error. The environment variable `LVSD_LOG` overrides `log` in
/// `[lvsd]`.
fn start_log(from_file: Option<&str>, format: log::Format) -> Result<log::Guard, String> {
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
    log::start(filter, None, format, "lvsd")
        .map_err(|error| format!("cannot start the log: {error}"))
}

/// The event loop of a starting daemon, and the signals that it has received.
struct Early {
    runtime: tokio::runtime::Runtime,
    sender: mpsc::Sender<Signal>,
    signals: mpsc::Receiver<Signal>,
}

impl Early {
    /// Creates the event loop. From now on, reload signals are stored until the daemon runs, and
    /// signals that lvsd does not use no longer end the process.
    fn new() -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| format!("cannot start the event loop: {e}"))?;
        let (sender, signals) = mpsc::channel(8);
        let this = Self {
            runtime,
            sender,
            signals,
        };
        this.listen(&[
            (SignalKind::hangup(), Signal::Reload),
            (SignalKind::user_defined1(), Signal::ForcedReload),
        ])?;
        let entered = this.runtime.enter();
        for number in harmless() {
            // The handler remains when the stream is dropped. Unlike an ignored signal, it is not
            // inherited by programs that lvsd starts.
            let _ = signal(SignalKind::from_raw(number));
        }
        drop(entered);
        Ok(this)
    }

    /// Sends a message to the daemon for each signal in `kinds` that arrives.
    fn listen(&self, kinds: &[(SignalKind, Signal)]) -> Result<(), String> {
        let _runtime = self.runtime.enter();
        for &(kind, message) in kinds {
            let stream = signal(kind);
            let mut stream = stream.map_err(|e| format!("cannot listen for signals: {e}"))?;
            let sender = self.sender.clone();
            tokio::spawn(async move {
                while stream.recv().await.is_some() {
                    if sender.send(message).await.is_err() {
                        return;
                    }
                }
            });
        }
        Ok(())
    }
}

fn run(
    arguments: Arguments,
    config: Config,
    text: &str,
    loaded: LoadStatus,
    early: Early,
) -> Result<(), String> {
    // Handlers must exist before the lock file contains this process id: `lvsd stop` sends a signal
    // to that process.
    early.listen(&[
        (SignalKind::terminate(), Signal::Stop),
        (SignalKind::interrupt(), Signal::StopAll),
    ])?;
    let Early {
        runtime, signals, ..
    } = early;
    let address = address(&arguments, &config);
    let _lock = lock(&address)?;
    sweep();
    let last_good = last_good::path(&address);
    if let Some(path) = &last_good {
        last_good::keep(path, text);
    }
    let confinement = match config.daemon.confine.as_deref() {
        Some("off") => Confinement::default(),
        _ => confine::daemon(),
    };
    if !confinement.not_by.is_empty() {
        tracing::warn!("lvsd is {confinement}");
    }
    health::raise_limits();
    let counters = Arc::<Counters>::default();
    let pulses = Pulses::default();
    let checks = checks_thread(&pulses)?;
    let notify = Notify::from_env();
    if let Some(interval) = watchdog::interval() {
        watchdog::feed(notify.clone(), pulses.clone(), interval)
            .map_err(|e| format!("cannot start the thread lvsd-watchdog: {e}"))?;
    }
    let result = runtime.block_on(async {
        tokio::spawn(pulses.event_loop.clone().keep(BEAT));
        let pins = Pins::start(address.clone()).map_err(|error| {
            tracing::warn!("through-VIP checks disabled: cannot start their thread: {error}; restart lvsd");
        });
        let network = Network { pins: pins.ok() };
        let events = Events::default();
        let (sender, requests) = channels::channel();
        let api = Arc::new(Api::new(sender, &events, Arc::clone(&counters)));
        let opened = control_socket::open(&address, &config.dataplane, Arc::clone(&api));
        if let Err(error) = opened {
            tracing::warn!(
                "cannot open the control socket: {error}; commands such as `lvsd status` cannot reach this lvsd: permit lvsd to write to the directory of the socket, or use --socket @NAME, and restart lvsd"
            );
        }
        api::start(&api, &events);
        let options = Options {
            attach: arguments.attach,
            loaded,
            last_good,
            notify,
            checks: Some(checks),
            turns: pulses.turns.clone(),
            cluster: Some(cluster::ClusterPaths {
                dataplane: address.clone(),
                maintenance: cluster::maintenance_path(&admin::path(
                    &arguments.state,
                    arguments.config(),
                )),
                turns: pulses.turns,
            }),
            sources: Some(sources::path(&arguments.state, arguments.config())),
            admin: Some(admin::path(&arguments.state, arguments.config())),
            requests: Some(requests),
            events,
            counters,
            api: Some(api.settings()),
            confinement,
            ..Options::new(arguments.config().to_owned())
        };
        daemon::run(options, config, Machine::new(&address), network, signals).await
    });
    // A hung dataplane must not prevent the daemon's exit.
    runtime.shutdown_background();
    result
}

/// Starts the thread of the health checks, which the daemon's computations must not delay. The
/// thread also renews the heartbeat of the checks.
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
        .map_err(|e| {
            format!(
                "cannot start the thread lvsd-checks: {e}; raise the limit of threads (TasksMax= in lvsd's unit, `ulimit -u` in a shell)"
            )
        })?;
    Ok(handle)
}

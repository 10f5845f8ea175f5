//! The command line and the exit codes.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use lvs_dataplane::control::Address;
use lvs_dataplane::log;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tracing::Level;

use crate::config::{Config, LoadError, check_filter};
use crate::daemon::{self, Options, Signal};
use crate::engine::process::{Machine, lock};
use crate::health::Network;
use crate::notify::Notify;
use crate::words::counted;

/// The file is wrong or missing.
const EXIT_CONFIG: u8 = 3;
/// Something else failed.
const EXIT_FAILURE: u8 = 1;

/// Where the configuration lies.
const DEFAULT_CONFIG: &str = "/etc/lvsd/lvsd.toml";

/// The daemon of a Linux Virtual Server: keeps the engine (lvs-dataplane) in step with a TOML file
/// and with the health of the real servers.
///
/// SIGHUP reads the file again and changes only what has changed. SIGTERM and SIGINT stop the
/// daemon and the engine that it started. Exit codes: 0 done, 1 failure, 2 usage, 3 the
/// configuration cannot be used.
#[derive(Debug, Parser)]
#[command(name = "lvsd", version)]
pub struct Arguments {
    /// The configuration.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,

    /// Check the configuration (FILE, or that of --config), say what is wrong, and change nothing.
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    check_config: Option<Option<PathBuf>>,

    /// Control socket of the engine: @NAME (abstract) or a path; wins over the file. Default: one in /run/lvs, of which
    /// every network namespace has its own.
    #[arg(long, value_name = "PATH", env = "LVS_SOCKET")]
    socket: Option<String>,

    /// Leave the engine forwarding when the daemon ends.
    #[arg(long)]
    leave: bool,
}

/// Does what the command line says.
pub fn main(arguments: Arguments) -> ExitCode {
    if let Some(file) = &arguments.check_config {
        return check(file.as_ref().unwrap_or(&arguments.config));
    }
    let (config, warnings) = match Config::load(&arguments.config) {
        Ok(loaded) => loaded,
        Err(error) => return refuse(&error),
    };
    warnings.print();
    let _log = match start_log(config.daemon.log.as_deref()) {
        Ok(guard) => guard,
        Err(why) => {
            log::say(Level::ERROR, format_args!("lvsd: {why}"));
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    match run(arguments, config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            tracing::error!("{why}");
            ExitCode::from(EXIT_FAILURE)
        }
    }
}

fn check(file: &std::path::Path) -> ExitCode {
    match Config::load(file) {
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
    let address = arguments
        .socket
        .filter(|s| !s.is_empty())
        .or_else(|| config.dataplane.socket.clone())
        .map_or_else(Address::default, Address::new);
    let _lock = lock(&address)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start the event loop: {e}"))?;
    let result = runtime.block_on(async {
        let signals = signals().map_err(|e| format!("cannot listen for signals: {e}"))?;
        let options = Options {
            path: arguments.config,
            leave: arguments.leave,
            notify: Notify::from_env(),
        };
        daemon::run(options, config, Machine::new(&address), Network, signals).await
    });
    // A call to an engine that hangs must not keep the daemon from ending.
    runtime.shutdown_background();
    result
}

/// The signals of the process as messages.
fn signals() -> std::io::Result<mpsc::Receiver<Signal>> {
    let (sender, receiver) = mpsc::channel(8);
    for (kind, message) in [
        (SignalKind::hangup(), Signal::Reload),
        (SignalKind::terminate(), Signal::Stop),
        (SignalKind::interrupt(), Signal::Stop),
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

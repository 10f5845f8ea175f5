//! `lvsadm drain`: takes a server out of service without breaking connections.

use std::io;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use lvs_api::Client;
use lvs_api::daemon::{self, AdminSpec, AdminState, Client as Daemon, ServiceKey};
use lvs_api::guidance::is_managed;
use lvs_core::ServerConfig;
use lvs_core::api::{Call, ServerInfo, ServerSpec, ServiceId, ServiceInfo};

use super::{
    Outcome, Trouble, Words, change, connect, duration, maintenance, service_and_server,
    service_text,
};
use crate::invocation::Invocation;

/// Interval between two readings of the server's state.
const POLL: Duration = Duration::from_millis(500);
/// Longest time until lvsd has applied a request to the dataplane.
const GRACE: Duration = Duration::from_secs(30);
/// Longest interval between two lines of progress.
const LINE: Duration = Duration::from_secs(10);

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let [service, server] = words.free.as_slice() else {
        return Err(Trouble::Usage("expected a service and a server".into()));
    };
    if service == "all" {
        return Err(Trouble::Usage(format!(
            "drain needs one service, not `all'; `lvsadm maintenance all {server}' takes the server out of all services"
        )));
    }
    let deadline = duration(words, "--deadline")?;
    let (service, server) = service_and_server(run, service, server)?;
    let mut target = Target {
        client: connect(run)?,
        service,
        server,
        name: service_text(service),
        daemon: None,
        settled: false,
    };
    let Some(first) = target.look()? else {
        return Err(Trouble::Dataplane(format!(
            "{} has no server {server}: `lvsadm -Ln' lists its servers",
            target.name
        )));
    };
    let before = first.config;
    target.begin(run, words, before)?;
    let no_wait = words.has("--no-wait");
    if first.persistent > 0 && !no_wait {
        writeln!(
            run.output,
            "{} persistence templates still send clients to this server; lvsadm sysctl expire_quiescent_template=1 ends this",
            first.persistent
        )?;
    }
    let mut progress = Progress::new();
    loop {
        let Some(info) = target.look()? else {
            writeln!(
                run.output,
                "{server} of {} was deleted by another program",
                target.name
            )?;
            return Ok(0);
        };
        if !no_wait {
            progress.show(run, &target, &info)?;
        }
        target.settled |= info.config.weight == 0;
        // lvsd needs some time to apply the request to the dataplane.
        if info.config.weight != 0 && (target.settled || progress.started.elapsed() >= GRACE) {
            return Err(Trouble::Dataplane(format!(
                "{server} has weight {} instead of 0: another program has set it, or lvsd has not applied the drain; see `lvsd status' and the log of lvsd",
                info.config.weight
            )));
        }
        if no_wait && target.settled {
            writeln!(
                run.output,
                "{server} of {} gets no new connections",
                target.name
            )?;
            return Ok(0);
        }
        let closing = if words.has("--active") {
            0
        } else {
            info.inactive
        };
        let left = info.active + closing;
        if left == 0 && target.settled {
            return drained(run, &mut target, before, words.has("--delete"));
        }
        if deadline.is_some_and(|deadline| progress.started.elapsed() >= deadline) {
            return late(run, &mut target, before, left, words);
        }
        thread::sleep(POLL);
    }
}

/// Reports that the last connection has ended, and deletes the server if required.
fn drained(
    run: &mut Invocation<'_>,
    target: &mut Target,
    before: ServerConfig,
    delete: bool,
) -> Outcome {
    if delete {
        target.delete(run)?;
        writeln!(run.output, "the server is drained and deleted")?;
    } else {
        writeln!(
            run.output,
            "the server is drained and keeps weight 0 (previously {})",
            before.weight
        )?;
    }
    Ok(0)
}

/// Reports connections that remain after the deadline. With `--undo`, restores the weight of the
/// server.
fn late(
    run: &mut Invocation<'_>,
    target: &mut Target,
    before: ServerConfig,
    left: u32,
    words: &Words,
) -> Outcome {
    let end = if words.has("--undo") {
        target.undo(run, words, before)?;
        format!("the server has weight {} again", before.weight)
    } else {
        format!("the server keeps weight 0 (previously {})", before.weight)
    };
    writeln!(
        run.output,
        "the deadline has passed, and {left} connections remain; {end}"
    )?;
    Ok(1)
}

/// The server that is drained.
struct Target {
    client: Client,
    service: ServiceId,
    server: SocketAddr,
    /// The name of the service in messages.
    name: String,
    /// The lvsd that owns the service, if one is running.
    daemon: Option<Daemon>,
    /// Whether the dataplane has reported weight 0 for the server.
    settled: bool,
}

impl Target {
    fn spec(&self, state: AdminState, words: &Words) -> Result<AdminSpec, Trouble> {
        let target = daemon::Target {
            service: Some(ServiceKey(self.service)),
            host: self.server.ip(),
            port: Some(self.server.port()),
        };
        maintenance::spec(target, state, words)
    }

    /// Takes the server out of service. If lvsd manages the service, lvsd must do this: it would
    /// revert a change that this program makes.
    fn begin(
        &mut self,
        run: &mut Invocation<'_>,
        words: &Words,
        before: ServerConfig,
    ) -> Result<(), Trouble> {
        let services: Vec<ServiceInfo> = self.client.collect(&Call::ServiceList {
            service: Some(self.service),
        })?;
        let owned = services.iter().any(is_managed);
        if owned {
            self.daemon = maintenance::daemon(run)?;
        }
        let spec = self.spec(AdminState::Drain, words)?;
        if let Some(daemon) = &mut self.daemon {
            if words.has("--delete") {
                return Err(Trouble::Usage(
                    "--delete: lvsd would add the server again; use `lvsadm maintenance', or remove the server from lvsd's file".into(),
                ));
            }
            let done = maintenance::ask(daemon, spec)?;
            for warning in done.warnings {
                writeln!(run.errors, "warning: {warning}")?;
            }
            return Ok(());
        }
        for option in ["--why", "--for"] {
            if words.has(option) {
                return Err(Trouble::Usage(format!(
                    "{option} is for services of a running lvsd"
                )));
            }
        }
        if owned {
            writeln!(
                run.errors,
                "warning: the lvsd that owns this service does not answer; an lvsd that starts keeps the present weight 0 of the server"
            )?;
        }
        self.set(
            run,
            ServerConfig {
                weight: 0,
                ..before
            },
        )
    }

    fn undo(
        &mut self,
        run: &mut Invocation<'_>,
        words: &Words,
        before: ServerConfig,
    ) -> Result<(), Trouble> {
        let spec = self.spec(AdminState::Ready, words)?;
        match &mut self.daemon {
            Some(daemon) => maintenance::ask(
                daemon,
                AdminSpec {
                    until: None,
                    ..spec
                },
            )
            .map(drop),
            None => self.set(run, before),
        }
    }

    /// Reads the present state of the server; `None` if it was removed.
    fn look(&mut self) -> Result<Option<ServerInfo>, Trouble> {
        let services: Vec<ServiceInfo> = self.client.collect(&Call::ServiceList {
            service: Some(self.service),
        })?;
        let mut servers = services.into_iter().flat_map(|service| service.servers);
        Ok(servers.find(|info| info.server == self.server))
    }

    fn set(&mut self, run: &mut Invocation<'_>, config: ServerConfig) -> Result<(), Trouble> {
        let spec = ServerSpec {
            service: self.service,
            server: self.server,
            config,
        };
        change(run, &mut self.client, &Call::ServerEdit(spec))
    }

    fn delete(&mut self, run: &mut Invocation<'_>) -> Result<(), Trouble> {
        let (service, server) = (self.service, self.server);
        change(
            run,
            &mut self.client,
            &Call::ServerDelete { service, server },
        )
    }
}

/// The start of the drain, and the numbers and the time of the last printed line.
struct Progress {
    started: Instant,
    shown: Option<(u32, u32, Instant)>,
}

impl Progress {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            shown: None,
        }
    }

    /// Prints a line if the numbers have changed, or none was printed for [`LINE`].
    fn show(
        &mut self,
        run: &mut Invocation<'_>,
        target: &Target,
        info: &ServerInfo,
    ) -> io::Result<()> {
        let (active, inactive) = (info.active, info.inactive);
        let stale = self
            .shown
            .is_none_or(|(a, i, at)| (a, i) != (active, inactive) || at.elapsed() > LINE);
        if !stale {
            return Ok(());
        }
        self.shown = Some((active, inactive, Instant::now()));
        writeln!(
            run.output,
            "{:>6} s  {} of {}: {active} active, {inactive} inactive connections left",
            self.started.elapsed().as_secs(),
            target.server,
            target.name
        )?;
        run.output.flush()
    }
}

//! `lvsadm drain`: take a server out of service without breaking connections.

use std::io;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use lvs_core::ServerConfig;
use lvs_core::api::{Call, ServerInfo, ServerSpec, ServiceId, ServiceInfo};
use lvs_dataplane::control::Client;

use super::{Outcome, Trouble, Words, change, connect, duration, service_and_server, service_text};
use crate::program::Invocation;

/// Time between two polls.
const POLL: Duration = Duration::from_millis(500);
/// A line of progress at least this often.
const LINE: Duration = Duration::from_secs(10);

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let [service, server] = words.free.as_slice() else {
        return Err(Trouble::Usage("expected a service and a server".into()));
    };
    let deadline = words
        .value("--deadline")
        .map(|text| {
            duration(text).ok_or_else(|| {
                Trouble::Usage(format!(
                    "--deadline {text}: expected a time such as 90, 90s, 10m or 1h"
                ))
            })
        })
        .transpose()?;
    let (service, server) = service_and_server(run, service, server)?;
    let mut target = Target {
        client: connect(run)?,
        service,
        server,
        name: service_text(service),
    };
    let Some(first) = target.look()? else {
        return Err(Trouble::Engine(format!(
            "{} has no server {server}",
            target.name
        )));
    };
    let before = first.config;
    target.set(
        run,
        ServerConfig {
            weight: 0,
            ..before
        },
    )?;
    if first.persistent > 0 {
        writeln!(
            run.output,
            "{} persistence templates still send clients here; lvsadm sysctl expire_quiescent_template=1 ends that",
            first.persistent
        )?;
    }
    let mut progress = Progress::new();
    loop {
        let Some(info) = target.look()? else {
            writeln!(
                run.output,
                "{server} of {} was deleted by somebody else",
                target.name
            )?;
            return Ok(0);
        };
        progress.show(run, &target, &info)?;
        if info.config.weight != 0 {
            return Err(Trouble::Engine(format!(
                "somebody else has set the weight of {server} to {}",
                info.config.weight
            )));
        }
        let closing = if words.has("--active") {
            0
        } else {
            info.inactive
        };
        let left = info.active + closing;
        if left == 0 {
            return drained(run, &mut target, before, words.has("--delete"));
        }
        if deadline.is_some_and(|deadline| progress.started.elapsed() >= deadline) {
            return late(run, &mut target, before, left, words.has("--undo"));
        }
        thread::sleep(POLL);
    }
}

/// The last connection has ended.
fn drained(
    run: &mut Invocation<'_>,
    target: &mut Target,
    before: ServerConfig,
    delete: bool,
) -> Outcome {
    if delete {
        target.delete(run)?;
        writeln!(run.output, "drained and deleted")?;
    } else {
        writeln!(
            run.output,
            "drained; the server keeps weight 0 (it was {})",
            before.weight
        )?;
    }
    Ok(0)
}

/// The deadline has passed with connections left.
fn late(
    run: &mut Invocation<'_>,
    target: &mut Target,
    before: ServerConfig,
    left: u32,
    undo: bool,
) -> Outcome {
    let end = if undo {
        target.set(run, before)?;
        format!("its weight is {} again", before.weight)
    } else {
        format!("the server keeps weight 0 (it was {})", before.weight)
    };
    writeln!(
        run.output,
        "the deadline has passed with {left} connections left; {end}"
    )?;
    Ok(1)
}

/// The server that is drained.
struct Target {
    client: Client,
    service: ServiceId,
    server: SocketAddr,
    /// The service as messages name it.
    name: String,
}

impl Target {
    /// The server as it is now; none if it is gone.
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

/// What was shown last, and when.
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

    /// A line if the numbers have changed, or if there was none for a while.
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

//! `lvsadm drain`: take a server out of service without breaking connections.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use lvs_core::ServerConfig;
use lvs_core::api::{Call, ServerInfo, ServerSpec, ServiceId, ServiceInfo};
use lvs_dataplane::control::Client;
use serde::de::IgnoredAny;

use super::{Outcome, Trouble, Words, connect, duration, service_and_server, service_text};
use crate::program::Invocation;

/// Time between two polls.
const POLL: Duration = Duration::from_millis(500);
/// A line of progress at least this often.
const LINE: Duration = Duration::from_secs(10);

fn look(
    client: &mut Client,
    service: ServiceId,
    server: SocketAddr,
) -> Result<Option<ServerInfo>, Trouble> {
    let services: Vec<ServiceInfo> = client.collect(&Call::ServiceList {
        service: Some(service),
    })?;
    let mut servers = services.into_iter().flat_map(|service| service.servers);
    Ok(servers.find(|info| info.server == server))
}

fn edit(
    client: &mut Client,
    service: ServiceId,
    server: SocketAddr,
    config: ServerConfig,
) -> Result<(), Trouble> {
    let spec = ServerSpec {
        service,
        server,
        config,
    };
    client.call::<IgnoredAny>(&Call::ServerEdit(spec))?;
    Ok(())
}

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
    let mut client = connect(run)?;
    let gone = |name: &str| Trouble::Engine(format!("{name} has no server {server}"));
    let name = service_text(service);
    let Some(first) = look(&mut client, service, server)? else {
        return Err(gone(&name));
    };
    let before = first.config;
    edit(
        &mut client,
        service,
        server,
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
    let started = Instant::now();
    let mut shown: Option<(u32, u32, Instant)> = None;
    loop {
        let Some(info) = look(&mut client, service, server)? else {
            writeln!(
                run.output,
                "{server} of {name} was deleted by somebody else"
            )?;
            return Ok(0);
        };
        let (active, inactive) = (info.active, info.inactive);
        let stale =
            shown.is_none_or(|(a, i, at)| (a, i) != (active, inactive) || at.elapsed() > LINE);
        if stale {
            shown = Some((active, inactive, Instant::now()));
            writeln!(
                run.output,
                "{:>6} s  {server} of {name}: {active} active, {inactive} inactive connections left",
                started.elapsed().as_secs()
            )?;
            run.output.flush()?;
        }
        if info.config.weight != 0 {
            return Err(Trouble::Engine(format!(
                "somebody else has set the weight of {server} to {}",
                info.config.weight
            )));
        }
        let left = active + if words.has("--active") { 0 } else { inactive };
        if left == 0 {
            if words.has("--delete") {
                client.call::<IgnoredAny>(&Call::ServerDelete { service, server })?;
                writeln!(run.output, "drained and deleted")?;
            } else {
                writeln!(
                    run.output,
                    "drained; the server keeps weight 0 (it was {})",
                    before.weight
                )?;
            }
            return Ok(0);
        }
        if deadline.is_some_and(|deadline| started.elapsed() >= deadline) {
            let end = if words.has("--undo") {
                edit(&mut client, service, server, before)?;
                format!("its weight is {} again", before.weight)
            } else {
                format!("the server keeps weight 0 (it was {})", before.weight)
            };
            writeln!(
                run.output,
                "the deadline has passed with {left} connections left; {end}"
            )?;
            return Ok(1);
        }
        thread::sleep(POLL);
    }
}

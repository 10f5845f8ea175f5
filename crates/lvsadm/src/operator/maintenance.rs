//! `lvsadm maintenance` and `lvsadm undrain`: operator overrides of a server, stored by `lvsd`.
//! Without lvsd, `undrain` sets the weight of the server.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lvs_api::daemon::{
    AdminDone, AdminSpec, AdminState, Client as Daemon, ServiceKey, Target, WORDS_MAX,
};
use lvs_api::guidance::is_managed;
use lvs_core::ServerConfig;
use lvs_core::api::{Call, ServerSpec, ServiceId, ServiceInfo};

use super::{Outcome, Trouble, Words, change, connect, duration, service_and_server, service_text};
use crate::invocation::Invocation;

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let target = target(run, words)?;
    let mut daemon = daemon(run)?.ok_or_else(|| {
        Trouble::Dataplane(
            "maintenance needs lvsd, and no lvsd is running: start it, or use lvsadm drain"
                .to_owned(),
        )
    })?;
    let spec = spec(target, AdminState::Maintenance, words)?;
    let done = ask(&mut daemon, spec)?;
    print_done(run, &done, "in maintenance")
}

pub(super) fn undrain(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let target = target(run, words)?;
    let weight = words.number::<i32>("--weight")?;
    if let (Some(ServiceKey(service)), Some(port)) = (target.service, target.port) {
        let server = SocketAddr::new(target.host, port);
        let mut client = connect(run)?;
        let services: Vec<ServiceInfo> = client.collect(&Call::ServiceList {
            service: Some(service),
        })?;
        let info = services
            .iter()
            .find_map(|s| Some((s, s.servers.iter().find(|info| info.server == server)?)));
        // The services belong to another program, or to an old lvsd.
        let foreign = !services.iter().all(is_managed);
        let daemon = match foreign {
            true => None,
            false => daemon(run)?,
        };
        let Some(mut daemon) = daemon else {
            let Some((_, info)) = info else {
                return Err(Trouble::Dataplane(format!(
                    "{} has no server {server}: `lvsadm -Ln' lists its servers",
                    service_text(service)
                )));
            };
            let config = ServerConfig {
                weight: weight.unwrap_or(1),
                ..info.config
            };
            let spec = ServerSpec {
                service,
                server,
                config,
            };
            change(run, &mut client, &Call::ServerEdit(spec))?;
            writeln!(run.output, "{server} has weight {}", config.weight)?;
            return Ok(0);
        };
        let done = ask(&mut daemon, spec(target, AdminState::Ready, words)?)?;
        return print_done(run, &done, "ready");
    }
    let mut daemon = daemon(run)?.ok_or_else(|| {
        Trouble::Dataplane(
            "no lvsd is running; name a service, and the server with its port".to_owned(),
        )
    })?;
    let done = ask(&mut daemon, spec(target, AdminState::Ready, words)?)?;
    print_done(run, &done, "ready")
}

fn print_done(run: &mut Invocation<'_>, done: &AdminDone, state: &str) -> Outcome {
    for (service, server) in &done.servers {
        writeln!(
            run.output,
            "{server} of {}: {state}",
            service_text(*service)
        )?;
    }
    for warning in &done.warnings {
        writeln!(run.errors, "warning: {warning}")?;
    }
    Ok(0)
}

/// Connects to the lvsd that manages the dataplane, if one is running.
pub(super) fn daemon(run: &Invocation<'_>) -> Result<Option<Daemon>, Trouble> {
    Daemon::connect(run.address()).map_err(Trouble::Dataplane)
}

/// Sends an operator override to the daemon.
pub(super) fn ask(daemon: &mut Daemon, spec: AdminSpec) -> Result<AdminDone, Trouble> {
    daemon.admin(&spec).map_err(Trouble::Dataplane)
}

/// An operator override, with the values of the options.
pub(super) fn spec(target: Target, state: AdminState, words: &Words) -> Result<AdminSpec, Trouble> {
    let why = words.value("--why").map(str::to_owned);
    if why
        .as_ref()
        .is_some_and(|why| why.chars().count() > WORDS_MAX)
    {
        return Err(Trouble::Usage(format!(
            "--why: at most {WORDS_MAX} characters"
        )));
    }
    let until = match duration(words, "--for")? {
        None => None,
        Some(Duration::ZERO) => {
            return Err(Trouble::Usage(
                "--for: the duration is 0: expected more, such as 2h".to_owned(),
            ));
        }
        Some(time) => {
            let now = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default();
            Some(now.saturating_add(time).as_secs())
        }
    };
    Ok(AdminSpec {
        target,
        state,
        who: who(),
        why,
        until,
        force: words.has("--force"),
    })
}

/// The name of the local user, if known.
fn who() -> Option<String> {
    let name = std::env::var("SUDO_USER")
        .or_else(|_| std::env::var("USER"))
        .ok()?;
    let fits = !name.is_empty() && name.len() <= 64 && !name.chars().any(char::is_control);
    fits.then_some(name)
}

/// Returns the servers that the words `SERVICE|all SERVER` select.
fn target(run: &Invocation<'_>, words: &Words) -> Result<Target, Trouble> {
    let [service, server] = words.free.as_slice() else {
        return Err(Trouble::Usage(
            "expected a service (or `all') and a server".into(),
        ));
    };
    let (host, port) = host_and_port(server).ok_or_else(|| {
        Trouble::Usage(format!(
            "{server}: expected an address, such as 10.0.0.11 or 10.0.0.11:80"
        ))
    })?;
    let service: Option<ServiceId> = match service.as_str() {
        "all" => None,
        service => {
            let any = SocketAddr::new(host, port.unwrap_or(0)).to_string();
            Some(service_and_server(run, service, &any)?.0)
        }
    };
    Ok(Target {
        service: service.map(ServiceKey),
        host,
        port,
    })
}

fn host_and_port(text: &str) -> Option<(IpAddr, Option<u16>)> {
    if let Ok(both) = text.parse::<SocketAddr>() {
        return Some((both.ip(), Some(both.port())));
    }
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    Some((bare.parse().ok()?, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maintenance_accepts_addresses_with_and_without_port_and_refuses_names() {
        for (text, host, port) in [
            ("10.0.0.1", "10.0.0.1", None),
            ("10.0.0.1:80", "10.0.0.1", Some(80)),
            ("fd00::1", "fd00::1", None),
            ("[fd00::1]", "fd00::1", None),
            ("[fd00::1]:80", "fd00::1", Some(80)),
        ] {
            let expected = Some((host.parse().expect("the address is valid"), port));
            assert_eq!(host_and_port(text), expected, "{text}");
        }
        assert_eq!(host_and_port("web1"), None);
    }
}

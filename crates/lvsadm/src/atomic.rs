//! `lvsadm -R --atomic`: all lines, or none.
//!
//! The lines are tried on a copy of the engine's table first, by the code that the engine itself runs. Only if all of
//! them are in order is the first one carried out.

use std::io;

use lvs_core::api::{Call, Failure, ServiceInfo, SyncRole};
use lvs_core::ipvsadm::{failure_text, rules};
use lvs_core::{Control, Error, Instant, Options, ServiceKey, sync};
use lvs_dataplane::control::Client;
use serde::de::IgnoredAny;

use crate::program::Invocation;

/// The words without `--atomic`, if it is there and the command is `-R`.
pub(crate) fn restore_words(words: &[Vec<u8>]) -> Option<Vec<Vec<u8>>> {
    let rest: Vec<Vec<u8>> = words
        .iter()
        .filter(|word| *word != b"--atomic")
        .cloned()
        .collect();
    let restore = |word: &Vec<u8>| word == b"-R" || word == b"--restore";
    (rest.len() < words.len() && rest.first().is_some_and(restore)).then_some(rest)
}

pub(crate) fn restore(run: &mut Invocation<'_>, words: &[Vec<u8>]) -> io::Result<u8> {
    match run.parse(words) {
        Ok(_) => {}
        Err(refusal) => {
            run.errors.write_all(refusal.text())?;
            return Ok(refusal.status());
        }
    }
    let mut text = Vec::new();
    run.input.read_to_end(&mut text)?;
    let mut commands = Vec::new();
    for (number, words) in rules(&text) {
        let command = match run.parse(&words) {
            Ok(command) => command,
            Err(refusal) => {
                return refuse(run, number, &refusal.of_line(&words), NOTHING);
            }
        };
        if let Some(call) = command.call() {
            commands.push((number, command, call));
        } else {
            return refuse(
                run,
                number,
                "only commands that change something may be here",
                NOTHING,
            );
        }
    }
    let mut client = match run.client() {
        Ok(client) => client,
        Err(reason) => {
            writeln!(run.errors, "{}: {reason}", run.argv0)?;
            return Ok(2);
        }
    };
    let mut copy = match copy(&mut client) {
        Ok(copy) => copy,
        Err(reason) => {
            writeln!(run.errors, "{}: {reason}", run.argv0)?;
            return Ok(1);
        }
    };
    for (number, command, call) in &commands {
        if let Err(error) = rehearse(&mut copy, call) {
            let failure = Failure::from(error);
            return refuse(run, *number, failure_text(command, &failure), NOTHING);
        }
    }
    let count = commands.len();
    for (done, (number, command, call)) in commands.into_iter().enumerate() {
        let text = match client.call::<IgnoredAny>(&call) {
            Ok(_) => continue,
            Err(lvs_dataplane::control::Error::Refused(failure)) => {
                failure_text(&command, &failure).to_owned()
            }
            Err(error) => error.to_string(),
        };
        // Someone else has changed the table meanwhile, or the host has.
        return refuse(
            run,
            number,
            &text,
            &format!("{done} of {count} lines were carried out"),
        );
    }
    Ok(0)
}

const NOTHING: &str = "nothing was changed";

fn refuse(run: &mut Invocation<'_>, line: usize, text: &str, consequence: &str) -> io::Result<u8> {
    writeln!(
        run.errors,
        "{}: line {line}: {}; {consequence}",
        run.argv0,
        text.trim_end()
    )?;
    Ok(255)
}

/// The engine's table, without connections.
fn copy(client: &mut Client) -> Result<Control, String> {
    let services: Vec<ServiceInfo> = client
        .collect(&Call::ServiceList { service: None })
        .map_err(|error| error.to_string())?;
    let mut control = Control::new(Options {
        max_connections: 1,
        ..Options::default()
    });
    let fill = || {
        for info in services {
            let key = ServiceKey::from(info.service);
            control.add_service(key, info.config, info.owner)?;
            for server in info.servers.into_iter().rev() {
                control.add_server(&key, server.server, &server.config, Instant::ZERO)?;
            }
        }
        Ok(())
    };
    fill().map_err(|error: Error| format!("the engine's table cannot be copied: {error}"))?;
    Ok(control)
}

fn rehearse(control: &mut Control, call: &Call) -> Result<(), Error> {
    let now = Instant::ZERO;
    match call {
        Call::ServiceAdd(spec) => {
            control.add_service(spec.service.into(), spec.config.clone(), None)
        }
        Call::ServiceEdit(spec) => {
            control.edit_service(&spec.service.into(), spec.config.clone(), None)
        }
        Call::ServiceDelete { service } => control.delete_service(&(*service).into(), now),
        Call::ServiceFlush {} => {
            control.flush(now);
            Ok(())
        }
        Call::ServiceZero { service } => control.zero(service.map(ServiceKey::from).as_ref()),
        Call::ServerAdd(spec) => {
            control.add_server(&spec.service.into(), spec.server, &spec.config, now)
        }
        Call::ServerEdit(spec) => {
            control.edit_server(&spec.service.into(), spec.server, &spec.config)
        }
        Call::ServerDelete { service, server } => {
            control.delete_server(&(*service).into(), *server, now)
        }
        Call::TimeoutsSet(timeouts) => {
            control.set_timeouts(timeouts.tcp, timeouts.tcp_fin, timeouts.udp)
        }
        Call::DaemonStart(daemon) => match daemon.role {
            SyncRole::Master => control.start_master(sync::Master::new(0, None, false)),
            SyncRole::Backup => control.start_backup(sync::Backup::new(0, None, 1500, false)),
        },
        // Which daemons run is not known here; the engine tells.
        _ => Ok(()),
    }
}

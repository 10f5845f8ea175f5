//! Executes command lines on a dataplane.

use std::collections::BTreeSet;
use std::io::{self, Write};

use lvs_api::{Client, Error};
use lvs_core::ServiceKey;
use lvs_core::api::{Call, ConnInfo, Done, FilterItem, MarkText, ServiceInfo, Timeouts};
use lvs_core::ipvsadm::{
    Command, HELP_TEXT, Lines, ListOptions, Refusal, VERSION_TEXT, What, failure_text, render,
};
use lvs_core::sync::SyncDaemon;
use serde::Serialize;

use crate::invocation::Invocation;

/// A connection to a dataplane, over which command lines are executed.
pub(crate) struct Session {
    client: Client,
    /// Whether lines of `-R` are being read.
    restoring: bool,
}

struct Outcome {
    status: u8,
    /// Whether `-R` stops after this line.
    last: bool,
}

impl Outcome {
    const fn new(status: u8) -> Self {
        Self {
            status,
            last: false,
        }
    }

    const fn last(status: u8) -> Self {
        Self { status, last: true }
    }
}

impl Session {
    pub(crate) const fn new(client: Client) -> Self {
        Self {
            client,
            restoring: false,
        }
    }

    /// Executes one command line, and returns the exit status.
    pub(crate) fn line(mut self, run: &mut Invocation<'_>, words: &[Vec<u8>]) -> io::Result<u8> {
        self.words(run, words).map(|outcome| outcome.status)
    }

    fn words(&mut self, run: &mut Invocation<'_>, words: &[Vec<u8>]) -> io::Result<Outcome> {
        let command = match run.parse(words) {
            Ok(Command::Restore) if self.restoring => Err(Refusal::try_help(&run.argv0)),
            other => other,
        };
        let command = match command {
            Ok(command) => command,
            Err(refusal) => {
                error(run, refusal.text())?;
                return Ok(Outcome {
                    status: refusal.status(),
                    last: refusal.ends_restore(),
                });
            }
        };
        match &command {
            Command::List(options) => self.list(run, &command, options),
            Command::Save { numeric } => match self.services(&command, None) {
                Ok(services) => {
                    let mut text = String::new();
                    render::save(&mut text, services, *numeric, &run.names);
                    run.output.write_all(text.as_bytes())?;
                    self.warn_of_unsaved(run)?;
                    Ok(Outcome::new(0))
                }
                Err(text) => {
                    line(run, &text)?;
                    Ok(Outcome::last(1))
                }
            },
            Command::Restore => self.restore(run),
            Command::Help | Command::Version => {
                run.output.write_all(VERSION_TEXT.as_bytes())?;
                if command == Command::Help {
                    run.output.write_all(HELP_TEXT.as_bytes())?;
                }
                Ok(Outcome::last(0))
            }
            _ => self.change(run, &command),
        }
    }

    /// Warns about source filters and mark rules: `-S` does not save them, because ipvsadm's
    /// command lines cannot express them.
    fn warn_of_unsaved(&mut self, run: &mut Invocation<'_>) -> io::Result<()> {
        if run.is_ipvsadm() {
            return Ok(());
        }
        // A dataplane that does not support the call has no filters.
        let filters = self.client.collect::<FilterItem>(&Call::FilterList {});
        let filters: BTreeSet<String> = filters
            .unwrap_or_default()
            .into_iter()
            .map(|item| {
                let service = item.service.map(ServiceKey::from);
                service.map_or_else(String::new, |key| key.to_string())
            })
            .collect();
        let marks = self.client.collect::<MarkText>(&Call::MarkList {});
        let counts = [
            (
                filters.len(),
                "filter(s) by source: `lvsadm filter save` saves them",
            ),
            (
                marks.map_or(0, |marks| marks.len()),
                "rule(s) for marks: `lvsadm mark list` shows them",
            ),
        ];
        for (count, what) in counts {
            if count > 0 {
                let text = format!("{}: -S does not save {count} {what}\n", run.argv0);
                error(run, text.as_bytes())?;
            }
        }
        Ok(())
    }

    fn change(&mut self, run: &mut Invocation<'_>, command: &Command) -> io::Result<Outcome> {
        let Some(call) = command.call() else {
            return Ok(Outcome::new(0));
        };
        match self.client.call::<Done>(&call) {
            Ok(done) => {
                warn(run, &done)?;
                Ok(Outcome::new(0))
            }
            Err(problem) => {
                let lost = !matches!(problem, Error::Refused(_));
                line(run, &explain(command, &problem))?;
                Ok(Outcome {
                    status: 255,
                    last: lost,
                })
            }
        }
    }

    /// Runs `-R`: each line of standard input is a command line. Some lines end the run early, for
    /// example if the connection to the dataplane is lost. The exit status is that of the last
    /// executed line.
    fn restore(&mut self, run: &mut Invocation<'_>) -> io::Result<Outcome> {
        self.restoring = true;
        let mut lines = Lines::new();
        let mut status = 0;
        let mut buf = [0; 4096];
        loop {
            let len = match run.input.read(&mut buf) {
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // A read error ends the input.
                Err(_) => 0,
            };
            let mut ready: Vec<_> = buf[..len]
                .iter()
                .filter_map(|&byte| lines.push(byte))
                .collect();
            if len == 0 {
                ready.extend(lines.finish());
            }
            for words in ready {
                let outcome = self.words(run, &words)?;
                status = outcome.status;
                if outcome.last {
                    return Ok(Outcome::last(status));
                }
            }
            if len == 0 {
                return Ok(Outcome::new(status));
            }
        }
    }

    fn list(
        &mut self,
        run: &mut Invocation<'_>,
        command: &Command,
        options: &ListOptions,
    ) -> io::Result<Outcome> {
        let problem = match options.what {
            What::Services | What::Service(_) => {
                let only = match options.what {
                    What::Service(service) => Some(service),
                    _ => None,
                };
                match self.services(command, only) {
                    Ok(services) if run.json => {
                        json_list(run, &services)?;
                        return Ok(Outcome::new(0));
                    }
                    Ok(services) => {
                        let mut text = String::new();
                        if only.is_none() {
                            render::banner(&mut text, self.client.hello().table_size);
                        }
                        render::titles(&mut text, options.format);
                        render::services(&mut text, services, options, &run.names);
                        run.output.write_all(text.as_bytes())?;
                        return Ok(Outcome::new(0));
                    }
                    Err(text) => text,
                }
            }
            What::Connections => return self.connections(run, command, options),
            What::Timeouts => match self.client.call::<Timeouts>(&Call::TimeoutsGet {}) {
                Ok(timeouts) if run.json => {
                    json(run, &timeouts)?;
                    run.output.write_all(b"\n")?;
                    return Ok(Outcome::new(0));
                }
                Ok(timeouts) => {
                    let mut text = String::new();
                    render::timeouts(&mut text, &timeouts);
                    run.output.write_all(text.as_bytes())?;
                    return Ok(Outcome::new(0));
                }
                Err(problem) => explain(command, &problem),
            },
            What::Daemons => match self.client.collect::<SyncDaemon>(&Call::DaemonList {}) {
                Ok(daemons) if run.json => {
                    json_list(run, &daemons)?;
                    return Ok(Outcome::new(0));
                }
                Ok(daemons) => {
                    let mut text = String::new();
                    render::daemons(&mut text, &daemons);
                    run.output.write_all(text.as_bytes())?;
                    return Ok(Outcome::new(0));
                }
                Err(problem) => explain(command, &problem),
            },
        };
        // ipvsadm prints nothing when it cannot read timeouts or daemons.
        if !(run.is_ipvsadm() && matches!(options.what, What::Timeouts | What::Daemons)) {
            line(run, &problem)?;
        }
        Ok(Outcome::last(1))
    }

    /// Prints connections as they arrive, because there may be millions.
    fn connections(
        &mut self,
        run: &mut Invocation<'_>,
        command: &Command,
        options: &ListOptions,
    ) -> io::Result<Outcome> {
        let mut written: io::Result<()> = Ok(());
        let mut text = String::new();
        if !run.json {
            render::conn_titles(&mut text, options.persistent_conn);
            run.output.write_all(text.as_bytes())?;
            // Print the first part of the listing at once.
            run.output.flush()?;
        }
        let (output, names, as_json) = (&mut *run.output, &run.names, run.json);
        let mut count = 0u64;
        let end = self
            .client
            .list_while(&Call::ConnList {}, |conn: ConnInfo| {
                written = if as_json {
                    json_item(output, count, &conn)
                } else {
                    text.clear();
                    render::conn(&mut text, &conn, options, names);
                    output.write_all(text.as_bytes())
                };
                if count == 0 && written.is_ok() {
                    written = output.flush();
                }
                count += 1;
                written.is_ok()
            });
        written?;
        match end {
            Ok(_) => {
                if run.json {
                    json_end(run.output, count)?;
                }
                Ok(Outcome::new(0))
            }
            Err(problem) => {
                line(run, &explain(command, &problem))?;
                Ok(Outcome::last(1))
            }
        }
    }

    fn services(
        &mut self,
        command: &Command,
        only: Option<lvs_core::api::ServiceId>,
    ) -> Result<Vec<ServiceInfo>, String> {
        self.client
            .collect(&Call::ServiceList { service: only })
            .map_err(|problem| explain(command, &problem))
    }
}

/// Returns the line that explains why a command was not carried out.
fn explain(command: &Command, problem: &Error) -> String {
    match problem {
        Error::Refused(failure) => failure_text(command, failure).to_owned(),
        other => other.to_string(),
    }
}

fn line(run: &mut Invocation<'_>, text: &str) -> io::Result<()> {
    error(run, format!("{text}\n").as_bytes())
}

/// Prints warnings about parts of a change that are not in effect yet. Prints nothing as ipvsadm,
/// which has no such messages.
pub(crate) fn warn(run: &mut Invocation<'_>, done: &Done) -> io::Result<()> {
    if run.is_ipvsadm() {
        return Ok(());
    }
    let argv0 = run.argv0.clone();
    done.warnings
        .iter()
        .try_for_each(|warning| line(run, &format!("{argv0}: warning: {warning}")))
}

/// Prints an error after flushing standard output, because both may be the same file.
fn error(run: &mut Invocation<'_>, text: &[u8]) -> io::Result<()> {
    run.output.flush()?;
    run.errors.write_all(text)
}

pub(crate) fn json(run: &mut Invocation<'_>, value: &impl Serialize) -> io::Result<()> {
    Ok(serde_json::to_writer(&mut *run.output, value)?)
}

pub(crate) fn json_list<T: Serialize>(run: &mut Invocation<'_>, items: &[T]) -> io::Result<()> {
    let mut count = 0;
    for item in items {
        json_item(run.output, count, item)?;
        count += 1;
    }
    json_end(run.output, count)
}

fn json_item(out: &mut dyn Write, before: u64, item: &impl Serialize) -> io::Result<()> {
    out.write_all(if before == 0 { b"[\n" } else { b",\n" })?;
    Ok(serde_json::to_writer(out, item)?)
}

fn json_end(out: &mut dyn Write, count: u64) -> io::Result<()> {
    out.write_all(if count == 0 { b"[]\n" } else { b"\n]\n" })
}

//! The additional commands of `lvsadm`, for operators.
//!
//! ipvsadm's command lines begin with an option, so no existing script can use one of these
//! commands by accident.

mod capture;
mod diff;
mod doctor;
mod drain;
mod explain;
mod filter;
mod help;
mod limit;
mod local;
mod maintenance;
mod mark;
mod pcapng;
mod realserver;
mod shell;
mod simple;
mod sync;
mod table;
mod watch;
mod words;

use std::borrow::Cow;
use std::io;
use std::time::Duration;

use lvs_api::words::{meant, parse_duration};
use lvs_api::{Client, Error, guidance};
use lvs_core::api::{Call, Done, ServiceId};
use lvs_core::ipvsadm::{self, Command};
use lvs_core::{Family, Protocol, ServiceKey};

pub(crate) use self::help::help;
pub(crate) use self::table::OPERATORS;
pub(crate) use self::words::Words;
use crate::invocation::Invocation;
use crate::session::warn;

pub(crate) struct Flag {
    /// The option as typed: `--deadline`, `-w`.
    pub(crate) name: &'static str,
    /// The name of the option's argument; empty for an option without an argument.
    pub(crate) argument: &'static str,
    pub(crate) help: &'static str,
}

/// A command of `lvsadm` for operators.
pub(crate) struct Operator {
    pub(crate) name: &'static str,
    /// The command's arguments, as a synopsis.
    pub(crate) arguments: &'static str,
    pub(crate) summary: &'static str,
    /// The description in its help text and its manual page, after the summary.
    pub(crate) text: &'static str,
    pub(crate) flags: &'static [Flag],
    /// The command's arguments in examples, without its name.
    pub(crate) examples: &'static [&'static str],
    run: fn(&mut Invocation<'_>, &Words) -> Outcome,
}

#[derive(Debug)]
pub(crate) enum Trouble {
    /// The command line is invalid; the text is the fault.
    Usage(String),
    /// No connection to a dataplane can be opened; the text is the reason.
    Absent(String),
    /// The dataplane or lvsd has refused the request or does not answer, or the input of the
    /// command is unusable; the text is the reason.
    Dataplane(String),
    /// An error of input or output.
    Io(io::Error),
}

impl Trouble {
    fn text(&self) -> String {
        match self {
            Self::Usage(text) | Self::Dataplane(text) | Self::Absent(text) => text.clone(),
            Self::Io(error) => error.to_string(),
        }
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Dataplane(error.to_string())
    }
}

pub(crate) type Outcome = Result<u8, Trouble>;

/// The command of this name, if there is one.
pub(crate) fn find(word: &[u8]) -> Option<&'static Operator> {
    OPERATORS
        .iter()
        .find(|operator| operator.name.as_bytes() == word)
}

impl Operator {
    /// Runs the command with the arguments after its name.
    pub(crate) fn run(&self, run: &mut Invocation<'_>, words: &[Vec<u8>]) -> io::Result<u8> {
        let mut words = words.to_vec();
        words.retain(|word| {
            let json = word == b"--json";
            run.json |= json;
            !json
        });
        if words.iter().any(|word| word == b"--help" || word == b"-h") {
            run.output.write_all(self.help().as_bytes())?;
            return Ok(0);
        }
        let done = Words::new(self, &words)
            .map_err(Trouble::Usage)
            .and_then(|words| (self.run)(run, &words));
        let (status, text) = match done {
            Ok(status) => return Ok(status),
            Err(Trouble::Io(error)) => return Err(error),
            Err(Trouble::Usage(text)) => (
                2,
                format!(
                    "lvsadm {}: {text}\nusage: lvsadm {} {}\nTry `lvsadm {} --help' for more information.\n",
                    self.name,
                    self.name,
                    self.synopsis(),
                    self.name
                ),
            ),
            Err(Trouble::Absent(text)) => (2, format!("lvsadm {}: {text}\n", self.name)),
            Err(Trouble::Dataplane(text)) => (1, format!("lvsadm {}: {text}\n", self.name)),
        };
        run.output.flush()?;
        run.errors.write_all(text.as_bytes())?;
        Ok(status)
    }

    fn synopsis(&self) -> String {
        let mut text = self.arguments.to_owned();
        for flag in self.flags {
            let space = if flag.argument.is_empty() { "" } else { " " };
            text = format!("{text} [{}{space}{}]", flag.name, flag.argument);
        }
        text.trim_start().to_owned()
    }

    fn help(&self) -> String {
        let mut text = String::new();
        for example in self.examples {
            text.push_str(&format!("  lvsadm {} {example}\n", self.name));
        }
        if !text.is_empty() {
            text.insert_str(0, "Examples:\n");
            text.push('\n');
        }
        let usage = format!("lvsadm {} {}", self.name, self.synopsis());
        for (n, line) in simple::wrap(&usage, HELP_WIDTH).iter().enumerate() {
            let indent = if n == 0 { "" } else { "    " };
            text.push_str(&format!("{indent}{line}\n"));
        }
        let prose = format!("{}. {}", capital(self.summary), self.text);
        text.push('\n');
        for line in simple::wrap(&prose, HELP_WIDTH) {
            text.push_str(&format!("{line}\n"));
        }
        for flag in self.flags {
            let left = format!("{} {}", flag.name, flag.argument);
            for (n, line) in simple::wrap(flag.help, HELP_WIDTH - 36).iter().enumerate() {
                let left = if n == 0 { left.as_str() } else { "" };
                text.push_str(&format!("  {left:<34}{line}\n"));
            }
        }
        text
    }
}

pub(crate) fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map(|first| first.to_uppercase().collect::<String>() + letters.as_str())
        .unwrap_or_default()
}

/// Width of a help text in characters.
const HELP_WIDTH: usize = 92;

/// The column at which the summaries begin.
const OVERVIEW_COLUMN: usize = 44;

/// The part of the help that lists the commands.
pub(crate) fn overview() -> String {
    let mut text = "Additional commands (lvsadm COMMAND --help):\n".to_owned();
    for operator in OPERATORS {
        let left = format!("{} {}", operator.name, operator.arguments);
        if left.len() < OVERVIEW_COLUMN {
            text.push_str(&format!("  {left:<OVERVIEW_COLUMN$}{}\n", operator.summary));
        } else {
            text.push_str(&format!(
                "  {left}\n  {:OVERVIEW_COLUMN$}{}\n",
                "", operator.summary
            ));
        }
    }
    text
}

/// A connection to the dataplane.
pub(crate) fn connect(run: &mut Invocation<'_>) -> Result<Client, Trouble> {
    run.client().map_err(Trouble::Absent)
}

/// Requests a change from the dataplane, and prints the warnings in the answer.
pub(crate) fn change(
    run: &mut Invocation<'_>,
    client: &mut Client,
    call: &Call,
) -> Result<(), Trouble> {
    let done: Done = client.call(call)?;
    Ok(warn(run, &done)?)
}

/// Returns the service with this name in the configuration of the running lvsd, as
/// [`service_words`] writes it; the word itself if no service has this name.
fn by_name<'a>(run: &Invocation<'_>, word: &'a str) -> Result<Cow<'a, str>, Trouble> {
    // An address without a port is a service with all ports.
    if word.contains(':') || word.parse::<std::net::IpAddr>().is_ok() {
        return Ok(word.into());
    }
    let Some(mut daemon) = maintenance::daemon(run)? else {
        return Ok(word.into());
    };
    let status = daemon.status().map_err(Trouble::Dataplane)?;
    let named = status.services.iter().filter(|one| one.name == word);
    let mut all: Vec<String> = named.map(|one| service_words(one.service)).collect();
    match all.len() {
        0 => Ok(word.into()),
        1 => Ok(all.remove(0).into()),
        _ => Err(Trouble::Usage(format!(
            "{word} has several addresses; name one of them: {}",
            all.join(", ")
        ))),
    }
}

/// Parses a service (`VIP:PORT`, `udp:VIP:PORT`, `fwmark:N`, another form of the help text, or the
/// name of a service of lvsd) and a server, by the rules of ipvsadm's options.
fn service_and_server(
    run: &Invocation<'_>,
    service: &str,
    server: &str,
) -> Result<(ServiceId, std::net::SocketAddr), Trouble> {
    let service = &*by_name(run, service)?;
    let (option, service, six) = match service.split_once(':') {
        Some(("tcp", rest)) => ("-t", rest, None),
        Some(("udp", rest)) => ("-u", rest, None),
        Some(("sctp", rest)) => ("--sctp-service", rest, None),
        Some(("fwmark", rest)) => ("-f", rest, None),
        Some(("fwmark6", rest)) => ("-f", rest, Some("-6")),
        _ => ("-t", service, None),
    };
    let words = ["-d", option, service].into_iter().chain(six);
    let words: Vec<&str> = words.chain(["-r", server]).collect();
    match ipvsadm::parse("lvsadm", &words, &run.names) {
        Ok(Command::DeleteServer { service, server }) => Ok((service, server)),
        Err(refusal) => Err(Trouble::Usage(
            String::from_utf8_lossy(refusal.text())
                .trim_end()
                .to_owned(),
        )),
        Ok(_) => Err(Trouble::Usage(format!("{service}: not a service"))),
    }
}

/// Parses a service alone, as [`service_and_server`] does.
fn service_named(run: &Invocation<'_>, service: &str) -> Result<ServiceId, Trouble> {
    let service = &*by_name(run, service)?;
    let server = if service.contains('[') || service.starts_with("fwmark6:") {
        "[::1]:1"
    } else {
        "127.0.0.1"
    };
    service_and_server(run, service, server).map(|(service, _)| service)
}

/// Formats a service as [`service_named`] parses it.
fn service_words(service: ServiceId) -> String {
    match ServiceKey::from(service) {
        ServiceKey::Address { protocol, addr } => {
            format!("{}:{addr}", protocol.to_string().to_ascii_lowercase())
        }
        ServiceKey::Mark { family, mark } => {
            let six = if family == Family::V6 { "6" } else { "" };
            format!("fwmark{six}:{mark}")
        }
    }
}

fn service_text(service: ServiceId) -> String {
    ServiceKey::from(service).to_string()
}

fn protocol(name: &str) -> Option<Protocol> {
    Some(match name {
        "tcp" => Protocol::TCP,
        "udp" => Protocol::UDP,
        "sctp" => Protocol::SCTP,
        "icmp" => Protocol::ICMP,
        _ => return None,
    })
}

/// Parses the time in the option `name` as in lvsd's file; `None` without the option.
fn duration(words: &Words, name: &str) -> Result<Option<Duration>, Trouble> {
    let time = words.value(name).map(parse_duration).transpose();
    time.map_err(|why| Trouble::Usage(format!("{name}: {why}")))
}

/// Returns the error message for a first word that is not a command; `None` if the word may be an
/// option of ipvsadm.
pub(crate) fn unknown(word: &[u8]) -> Option<String> {
    let word = String::from_utf8_lossy(word);
    if word.is_empty() || word.starts_with('-') {
        return None;
    }
    if guidance::LVSD_COMMANDS.contains(&&*word) {
        return Some(format!(
            "lvsadm: {word:?} is a command of lvsd: `lvsd {word}'\n"
        ));
    }
    let names = OPERATORS
        .iter()
        .map(|operator| operator.name)
        .chain(["help"]);
    let hint = match meant(&word.to_lowercase(), names) {
        Some(name) => format!("did you mean `lvsadm {name}'?"),
        None => "`lvsadm help' lists the commands".to_owned(),
    };
    Some(format!("lvsadm: {word:?} is not a command; {hint}\n"))
}

/// Output of `lvsadm help WORD`; the error is the message for an unknown word.
pub(crate) fn help_on(word: &[u8]) -> Result<String, String> {
    if let Some(operator) = find(word) {
        return Ok(operator.help());
    }
    let word = String::from_utf8_lossy(word).into_owned();
    if word == "help" {
        return Ok(help());
    }
    if word.starts_with('-') {
        return Ok(format!(
            "{word} is an option of ipvsadm; `lvsadm --help' and lvsadm(8) describe these options\n"
        ));
    }
    let about = lvs_core::sched::BUILT_IN
        .iter()
        .find(|about| about.name == word);
    if let Some(about) = about {
        return Ok(format!(
            "{}: a scheduler (-s {0}): {}\n",
            about.name, about.summary
        ));
    }
    let names = OPERATORS.iter().map(|operator| operator.name);
    let names = names.chain(lvs_core::sched::BUILT_IN.iter().map(|about| about.name));
    let hint = match meant(&word.to_lowercase(), names) {
        Some(name) => format!("did you mean `lvsadm help {name}'?"),
        None => "`lvsadm help' lists the commands".to_owned(),
    };
    Err(format!(
        "lvsadm help: no command or scheduler has the name {word:?}; {hint}\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_split_into_words_and_options_and_invalid_options_refused() {
        let drain = find(b"drain").expect("the command exists");
        let words = |line: &str| {
            let words: Vec<Vec<u8>> = line.split(' ').map(|w| w.as_bytes().to_vec()).collect();
            Words::new(drain, &words)
        };
        let taken = words("a:1 --deadline 10m b:2 --delete").expect("the arguments are valid");
        assert_eq!(taken.free, ["a:1", "b:2"]);
        assert_eq!(taken.value("--deadline"), Some("10m"));
        assert!(taken.has("--delete") && !taken.has("--undo"));
        assert_eq!(
            words("--deadline=1h")
                .expect("the arguments are valid")
                .value("--deadline"),
            Some("1h")
        );
        assert!(words("--deadline").is_err());
        assert!(words("--delete=1").is_err());
        assert!(words("--other").is_err());
    }

    #[test]
    fn unknown_command_gets_suggestion_and_help_explains_commands_and_schedulers() {
        let message = |word: &str| unknown(word.as_bytes()).unwrap_or_default();
        assert!(message("wach").contains("did you mean `lvsadm watch'?"));
        assert!(message("Drain").contains("`lvsadm drain'"));
        assert!(help_on(b"help").is_ok() && help_on(b"-A").is_ok());
        assert!(message("xyzzy").contains("`lvsadm help' lists"));
        assert!(message("-L").is_empty() && message("").is_empty());
        assert!(message("events").contains("`lvsd events'"));
        let of_both = ["drain", "undrain", "maintenance", "completions", "man"];
        let own = OPERATORS.iter().map(|operator| operator.name);
        let own = own.filter(|name| !of_both.contains(name));
        assert!(own.eq(guidance::LVSADM_COMMANDS));
        assert!(
            help_on(b"drain")
                .expect("the command exists")
                .contains("lvsadm drain SERVICE")
        );
        assert!(
            help_on(b"wlc")
                .expect("the scheduler exists")
                .starts_with("wlc: a scheduler")
        );
        assert!(
            help_on(b"drian")
                .expect_err("an unknown command has a help text")
                .contains("`lvsadm help drain'")
        );
    }

    #[test]
    fn lvsadm_commands_have_unique_names_and_help_of_at_most_100_columns() {
        for (n, operator) in OPERATORS.iter().enumerate() {
            assert!(!operator.name.starts_with('-'));
            assert!(
                OPERATORS[..n]
                    .iter()
                    .all(|other| other.name != operator.name)
            );
            assert!(overview().contains(operator.name));
            assert!(overview().contains(&format!(" {}\n", operator.summary)));
            let unwrapped = operator
                .help()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ");
            assert!(unwrapped.contains(operator.summary.split_at(1).1));
            for line in operator.help().lines() {
                assert!(line.len() <= 100, "{}: {line}", operator.name);
            }
        }
    }
}

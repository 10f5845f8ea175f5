//! What only `lvsadm` has: commands that are words, for the people who run a director.
//!
//! ipvsadm's command lines begin with an option, so no script of its can mean one of these.

mod capture;
mod doctor;
mod drain;
mod explain;
mod host;
mod limit;
mod local;
mod mark;
mod pcapng;
mod shell;
mod simple;
mod watch;

use std::io;
use std::time::Duration;

use lvs_core::Protocol;
use lvs_core::api::ServiceId;
use lvs_core::ipvsadm::{self, Command};
use lvs_dataplane::control::{Client, Error};

use crate::program::Invocation;

/// An option of a command.
pub(crate) struct Flag {
    /// As it is typed: `--deadline`, `-w`.
    pub(crate) name: &'static str,
    /// The name of its argument; empty without one.
    pub(crate) argument: &'static str,
    pub(crate) help: &'static str,
}

const fn flag(name: &'static str, argument: &'static str, help: &'static str) -> Flag {
    Flag {
        name,
        argument,
        help,
    }
}

/// A command.
pub(crate) struct Operator {
    pub(crate) name: &'static str,
    /// Its arguments, as a synopsis.
    pub(crate) arguments: &'static str,
    pub(crate) summary: &'static str,
    /// More, for the manual page.
    pub(crate) text: &'static str,
    pub(crate) flags: &'static [Flag],
    run: fn(&mut Invocation<'_>, &Words) -> Outcome,
}

/// The one table of commands: dispatch, help, completions and manual page go by it.
pub(crate) const OPERATORS: &[Operator] = &[
    Operator {
        name: "watch",
        arguments: "",
        summary: "services and servers with rates, again and again",
        text: "Rates are per second, since the last look. In a terminal, q or Ctrl-C ends it and s changes the order.",
        flags: &[
            flag(
                "--interval",
                "SECONDS",
                "time between two looks; 1 if not given",
            ),
            flag("--count", "N", "end after so many looks"),
            flag(
                "--sort",
                "rate|bytes|active|name",
                "order; rate if not given",
            ),
            flag("--no-color", "", "no colours; also NO_COLOR"),
        ],
        run: watch::run,
    },
    Operator {
        name: "explain",
        arguments: "tcp|udp|sctp SRC:PORT VIP:PORT",
        summary: "what would become of a new packet, and why",
        text: "Tells the mark, the service, the connection or the template that decides, the slot of a hash table, the servers and why each may or may not be chosen. Nothing changes.",
        flags: &[
            flag(
                "--mark",
                "N",
                "the packet has this firewall mark; if not given, the rules decide (lvsadm mark)",
            ),
            flag(
                "--interface",
                "NAME",
                "it comes in on this interface, for rules that ask",
            ),
        ],
        run: explain::run,
    },
    Operator {
        name: "drain",
        arguments: "SERVICE SERVER",
        summary: "take a server out of service without breaking connections",
        text: "Sets the weight to 0, waits until the last connection has ended and tells how many are left. SERVICE is VIP:PORT (TCP), tcp:VIP:PORT, udp:VIP:PORT, sctp:VIP:PORT or fwmark:N. Interrupted, the server keeps weight 0. With --undo the old weight returns when the deadline has passed.",
        flags: &[
            flag(
                "--deadline",
                "TIME",
                "give up after 90, 90s, 10m or 1h; exit status 1",
            ),
            flag(
                "--active",
                "",
                "do not wait for connections that are closing (InActConn)",
            ),
            flag("--delete", "", "delete the server when it is empty"),
            flag("--undo", "", "restore the weight if the deadline passes"),
        ],
        run: drain::run,
    },
    Operator {
        name: "drops",
        arguments: "",
        summary: "packets that were dropped or left to the host, by reason",
        text: "Each reason with its count and what to do about it.",
        flags: &[flag("--all", "", "reasons that never occurred, too")],
        run: simple::drops,
    },
    Operator {
        name: "sysctl",
        arguments: "[NAME[=VALUE]]",
        summary: "read or write the settings that the kernel has as net.ipv4.vs.*",
        text: "Without a name, all of them.",
        flags: &[],
        run: simple::sysctl,
    },
    Operator {
        name: "mark",
        arguments: "list | add | del N",
        summary: "the rules that give packets firewall marks",
        text: "The first rule that fits a packet decides. A service with that mark (-f) then takes it, so that one service has several ports or addresses.",
        flags: &[
            flag("--destination", "NETWORK", "where the packets go; required"),
            flag("--source", "NETWORK", "where they come from"),
            flag("--interface", "NAME", "the interface that they come in on"),
            flag(
                "--protocol",
                "tcp|udp|sctp",
                "their protocol; all three if not given",
            ),
            flag("--ports", "LIST", "destination ports: 80,443,8000-8010"),
            flag("--mark", "N", "they get this mark"),
            flag("--drop", "", "they are dropped"),
            flag("--host", "", "they are left to the host"),
            flag(
                "--position",
                "N",
                "where in the list; at its end if not given",
            ),
        ],
        run: mark::run,
    },
    Operator {
        name: "local",
        arguments: "[list | add ADDRESS... | del ADDRESS... | hairpin on|off]",
        summary: "the local addresses that stand for clients with full NAT",
        text: "Servers added with --fullnat see one of these addresses in place of the client and answer to it, so that their gateway may be anything. An address that the host does not have is answered for by the engine. Each brings 64,512 connections for each server. With hairpin on, NAT (-m) does the same for clients whose answers would not come back here: those on a server's own network, and servers of the same service.",
        flags: &[],
        run: local::run,
    },
    Operator {
        name: "limit",
        arguments: "SERVICE",
        summary: "show or set what a service takes at most",
        text: "SERVICE as for drain. Without an option, the limits in force. What is over a limit is dropped and counted (lvsadm drops); connections that are there go on. A service of lvsd keeps them until lvsd changes it: write limits = { ... } in its file.",
        flags: &[
            flag("--connections", "N", "connections at a time; 0 is no limit"),
            flag("--rate", "N", "new connections a second, and at once"),
            flag(
                "--source-rate",
                "N",
                "new connections a second, and at once, from one source",
            ),
            flag(
                "--source-bits-v4",
                "N",
                "bits of an IPv4 address that make a source; 32 if not given",
            ),
            flag(
                "--source-bits-v6",
                "N",
                "bits of an IPv6 address that make a source; 64 if not given",
            ),
            flag("--off", "", "no limits but those that are given as well"),
        ],
        run: limit::run,
    },
    Operator {
        name: "capture",
        arguments: "[FILTER]",
        summary: "packets as they arrive, with the director's verdict, as pcapng",
        text: "FILTER is any of: tcp, udp, icmp, sctp, host ADDRESS, port N, dropped; all must hold. The verdict is each packet's comment (frame.comment in tshark and Wireshark). Ctrl-C ends it.",
        flags: &[
            flag("-w", "FILE", "where to write; - is standard output"),
            flag("-c", "N", "end after so many packets"),
        ],
        run: capture::run,
    },
    Operator {
        name: "doctor",
        arguments: "",
        summary: "look for what is wrong with this host and the real servers",
        text: "Each finding comes with its cure. The exit status is 1 if there are any.",
        flags: &[],
        run: doctor::run,
    },
    Operator {
        name: "completions",
        arguments: "bash|zsh|fish",
        summary: "print completions for a shell",
        text: "For example: lvsadm completions bash > /etc/bash_completion.d/lvsadm",
        flags: &[],
        run: shell::completions,
    },
    Operator {
        name: "man",
        arguments: "",
        summary: "print the manual page",
        text: "For example: lvsadm man > /usr/local/share/man/man8/lvsadm.8",
        flags: &[],
        run: shell::man,
    },
];

/// Why a command did not do what was asked.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// A wrong command line.
    Usage(String),
    /// No engine, or it refused.
    Engine(String),
    /// Input or output.
    Io(io::Error),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Engine(error.to_string())
    }
}

/// The exit status, or what went wrong.
pub(crate) type Outcome = Result<u8, Trouble>;

/// The words behind a command, taken apart.
#[derive(Debug, Default)]
pub(crate) struct Words {
    pub(crate) free: Vec<String>,
    options: Vec<(&'static str, String)>,
}

impl Words {
    fn new(operator: &Operator, words: &[Vec<u8>]) -> Result<Self, String> {
        let mut taken = Self::default();
        let mut words = words
            .iter()
            .map(|word| String::from_utf8_lossy(word).into_owned());
        while let Some(word) = words.next() {
            if !word.starts_with('-') || word == "-" {
                taken.free.push(word);
                continue;
            }
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word.as_str(), None),
            };
            let flag = operator
                .flags
                .iter()
                .find(|flag| flag.name == name)
                .ok_or_else(|| format!("unknown option {name}"))?;
            let value = match (flag.argument.is_empty(), value) {
                (true, None) => String::new(),
                (true, Some(_)) => return Err(format!("{name} takes no argument")),
                (false, Some(value)) => value,
                (false, None) => words
                    .next()
                    .ok_or_else(|| format!("{name}: missing argument {}", flag.argument))?,
            };
            taken.options.push((flag.name, value));
        }
        Ok(taken)
    }

    /// The value of an option; the last one counts.
    pub(crate) fn value(&self, name: &str) -> Option<&str> {
        let mut options = self.options.iter().rev();
        let found = options.find(|(option, _)| *option == name)?;
        Some(&found.1)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    /// An option's number.
    pub(crate) fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, Trouble> {
        self.value(name)
            .map(|text| {
                text.parse().map_err(|_| {
                    Trouble::Usage(format!("{name}: {text:?} is not a number it can take"))
                })
            })
            .transpose()
    }
}

/// The command that the first word names.
pub(crate) fn find(word: &[u8]) -> Option<&'static Operator> {
    OPERATORS
        .iter()
        .find(|operator| operator.name.as_bytes() == word)
}

impl Operator {
    /// Runs it with the words behind its name.
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
                    "lvsadm {}: {text}\nusage: lvsadm {} {}; lvsadm {} --help tells more\n",
                    self.name,
                    self.name,
                    self.synopsis(),
                    self.name
                ),
            ),
            Err(Trouble::Engine(text)) => (1, format!("lvsadm {}: {text}\n", self.name)),
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
        let mut text = format!(
            "lvsadm {} {}\n\n{}. {}\n",
            self.name,
            self.synopsis(),
            capital(self.summary),
            self.text
        );
        for flag in self.flags {
            let left = format!("{} {}", flag.name, flag.argument);
            text.push_str(&format!("  {left:<34}{}\n", flag.help));
        }
        text
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map(|first| first.to_uppercase().collect::<String>() + letters.as_str())
        .unwrap_or_default()
}

/// Where the summaries begin, behind the indentation.
const OVERVIEW_COLUMN: usize = 44;

/// The part of the help that lists the commands.
pub(crate) fn overview() -> String {
    let mut text = "Commands of lvsadm alone (lvsadm COMMAND --help):\n".to_owned();
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

/// A connection to the engine.
pub(crate) fn connect(run: &mut Invocation<'_>) -> Result<Client, Trouble> {
    run.client().map_err(Trouble::Engine)
}

/// Reads `VIP:PORT`, `udp:VIP:PORT`, `fwmark:N` and the like, and a server, by the rules of ipvsadm's options.
fn service_and_server(
    run: &Invocation<'_>,
    service: &str,
    server: &str,
) -> Result<(ServiceId, std::net::SocketAddr), Trouble> {
    let (option, service) = match service.split_once(':') {
        Some(("tcp", rest)) => ("-t", rest),
        Some(("udp", rest)) => ("-u", rest),
        Some(("sctp", rest)) => ("--sctp-service", rest),
        Some(("fwmark", rest)) => ("-f", rest),
        _ => ("-t", service),
    };
    let words = ["-d", option, service, "-r", server];
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

/// A service by itself, as [`service_and_server`] takes it.
fn service_named(run: &Invocation<'_>, service: &str) -> Result<ServiceId, Trouble> {
    let server = if service.contains('[') {
        "[::1]"
    } else {
        "127.0.0.1"
    };
    service_and_server(run, service, server).map(|(service, _)| service)
}

fn service_text(service: ServiceId) -> String {
    lvs_core::ServiceKey::from(service).to_string()
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

/// `90`, `90s`, `10m`, `1h`.
fn duration(text: &str) -> Option<Duration> {
    let (digits, unit) = match text.find(|c: char| !c.is_ascii_digit()) {
        Some(at) => text.split_at(at),
        None => (text, "s"),
    };
    let factor: u64 = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return None,
    };
    let number: u64 = digits.parse().ok()?;
    Some(Duration::from_secs(number.checked_mul(factor)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        assert_eq!(duration("90"), Some(Duration::from_secs(90)));
        assert_eq!(duration("10m"), Some(Duration::from_secs(600)));
        assert_eq!(duration("1h"), Some(Duration::from_secs(3600)));
        for bad in ["", "m", "1d", "-1", "99999999999999999999h", "1 m"] {
            assert_eq!(duration(bad), None, "{bad}");
        }
    }

    #[test]
    fn words_are_taken_apart() {
        let drain = find(b"drain").expect("it is in the table");
        let words = |line: &str| {
            let words: Vec<Vec<u8>> = line.split(' ').map(|w| w.as_bytes().to_vec()).collect();
            Words::new(drain, &words)
        };
        let taken = words("a:1 --deadline 10m b:2 --delete").expect("in order");
        assert_eq!(taken.free, ["a:1", "b:2"]);
        assert_eq!(taken.value("--deadline"), Some("10m"));
        assert!(taken.has("--delete") && !taken.has("--undo"));
        assert_eq!(
            words("--deadline=1h")
                .expect("in order")
                .value("--deadline"),
            Some("1h")
        );
        assert!(words("--deadline").is_err());
        assert!(words("--delete=1").is_err());
        assert!(words("--other").is_err());
    }

    #[test]
    fn no_name_is_an_option_and_none_twice() {
        for (n, operator) in OPERATORS.iter().enumerate() {
            assert!(!operator.name.starts_with('-'));
            assert!(
                OPERATORS[..n]
                    .iter()
                    .all(|other| other.name != operator.name)
            );
            assert!(overview().contains(operator.name));
            assert!(overview().contains(&format!(" {}\n", operator.summary)));
            assert!(operator.help().contains(operator.summary.split_at(1).1));
        }
    }
}

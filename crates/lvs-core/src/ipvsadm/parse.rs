//! Parses the words of a command line into a [`Command`], with ipvsadm's checks in ipvsadm's order.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::command::{Command, Format, ListOptions, What};
use super::popt::{Problem, Words};
use super::resolve::Resolve;
use super::table::{self, CommandName, Flag, Flags, Meaning, Rule};
use super::value;
use crate::api::{ServerSpec, ServiceId, ServiceSpec, Timeouts};
use crate::settings::Extras;
use crate::sync::{SyncDaemon, SyncRole};
use crate::tunnel::{Tunnel, TunnelChecksum, TunnelType};
use crate::{Family, Forwarding, Protocol, ServerConfig, ServiceConfig, ServiceFlags, sched};

/// The persistence timeout in seconds if `-p` has no value.
const DEFAULT_PERSISTENCE: u32 = 360;
/// The longest timeout that ipvsadm accepts, in seconds: 31 days.
const TIMEOUT_MAX: i64 = 86_400 * 31;
/// Maximum length of the names of schedulers, persistence engines and interfaces, in bytes; the
/// rest is ignored.
const NAME_MAX: usize = 15;
/// The default multicast interface.
const DEFAULT_INTERFACE: &str = "eth0";

/// The reason why a command line is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    text: Vec<u8>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The command line is invalid.
    Fail,
    /// The line does not begin with a command.
    Try,
    /// A word after the command is not a valid option.
    Option,
}

impl Refusal {
    /// The text for standard error, with line breaks. It consists of bytes, because it repeats
    /// words of the command line.
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// The exit status of ipvsadm for this refusal.
    pub const fn status(&self) -> u8 {
        match self.kind {
            Kind::Fail => 2,
            Kind::Try | Kind::Option => 255,
        }
    }

    /// Error message for an invalid line of a file: the words of the line, and the reason.
    pub fn of_line<W: AsRef<[u8]>>(&self, words: &[W]) -> String {
        let words: Vec<_> = words
            .iter()
            .map(|word| String::from_utf8_lossy(word.as_ref()))
            .collect();
        let line = words.join(" ");
        let reason = String::from_utf8_lossy(&self.text);
        let reason = match self.kind {
            Kind::Try => "expected a command such as -A or -a",
            Kind::Fail | Kind::Option => reason.trim_end(),
        };
        format!("{line:?}: {reason}")
    }

    /// Whether `-R` stops at a line that is refused for this reason. `-R` continues if an option
    /// after the command is unknown, lacks its argument, or has an argument although it takes none.
    pub const fn ends_restore(&self) -> bool {
        !matches!(self.kind, Kind::Option)
    }

    /// The answer to a line that does not begin with a command.
    pub fn try_help(program: &str) -> Self {
        Self {
            text: format!("Try `{program} -h' or '{program} --help' for more information.\n")
                .into_bytes(),
            kind: Kind::Try,
        }
    }
}

/// A [`Refusal`] with this text, in which `word` replaces `{}`.
fn fail_with(text: &str, word: &[u8]) -> Refusal {
    let mut bytes = Vec::new();
    match text.split_once("{}") {
        Some((before, after)) => {
            bytes.extend_from_slice(before.as_bytes());
            bytes.extend_from_slice(word);
            bytes.extend_from_slice(after.as_bytes());
        }
        None => bytes.extend_from_slice(text.as_bytes()),
    }
    bytes.push(b'\n');
    Refusal {
        text: bytes,
        kind: Kind::Fail,
    }
}

fn fail(text: &str) -> Refusal {
    fail_with(text, &[])
}

fn option_problem(problem: Problem, word: &[u8]) -> Refusal {
    let mut text = word.to_vec();
    text.extend_from_slice(b": ");
    text.extend_from_slice(problem.text().as_bytes());
    text.push(b'\n');
    Refusal {
        text,
        kind: Kind::Option,
    }
}

/// Reads the words of one command line. `program` is the program's name, for messages; `words` does
/// not contain it.
///
/// An empty line lists all services.
///
/// # Errors
/// A [`Refusal`]: the command must not be executed.
pub fn parse<W: AsRef<[u8]>>(
    program: &str,
    words: &[W],
    names: &dyn Resolve,
) -> Result<Command, Refusal> {
    parse_words(
        program,
        Words::new(words, table::long),
        words.is_empty(),
        names,
    )
}

/// Like [`parse`], with the additional options of `lvsadm` ([`table::OWN_OPTIONS`]).
///
/// # Errors
/// As [`parse`].
pub fn parse_own<W: AsRef<[u8]>>(
    program: &str,
    words: &[W],
    names: &dyn Resolve,
) -> Result<Command, Refusal> {
    parse_words(
        program,
        Words::new(words, table::own_long),
        words.is_empty(),
        names,
    )
}

fn parse_words<W: AsRef<[u8]>>(
    program: &str,
    mut words: Words<'_, W>,
    empty: bool,
    names: &dyn Resolve,
) -> Result<Command, Refusal> {
    if empty {
        return Ok(Command::List(ListOptions::default()));
    }
    let Ok(Some((first, argument))) = words.next() else {
        return Err(Refusal::try_help(program));
    };
    let Meaning::Command(command) = first.meaning else {
        return Err(Refusal::try_help(program));
    };
    let mut line = Line::new(command, names);
    match command {
        CommandName::Help => return Ok(Command::Help),
        CommandName::Version => return Ok(Command::Version),
        CommandName::StartDaemon => {
            line.role =
                role(argument).ok_or_else(|| fail("illegal start-daemon parameter specified"))?;
        }
        CommandName::StopDaemon => {
            line.role = role(argument).ok_or_else(|| fail("illegal start_daemon specified"))?;
        }
        _ => {}
    }
    loop {
        match words.next() {
            Ok(Some((spec, argument))) => {
                if let Meaning::Command(_) = spec.meaning {
                    return Err(fail_with("invalid option `{}'", words.current()));
                }
                line.option(spec.meaning, argument)?;
            }
            Ok(None) => break,
            Err(problem) => return Err(option_problem(problem, words.current())),
        }
    }
    line.finish(words.leftovers())
}

fn role(word: Option<&[u8]>) -> Option<SyncRole> {
    match word? {
        b"master" => Some(SyncRole::Master),
        b"backup" => Some(SyncRole::Backup),
        _ => None,
    }
}

/// The options of a command line, as far as they are parsed.
struct Line<'a> {
    names: &'a dyn Resolve,
    command: CommandName,
    flags: Flags,
    role: SyncRole,
    /// The protocol of the last option that names a service: `-t`, `-u` or `--sctp-service`; TCP
    /// after `-f`. `None` before the first of these options.
    protocol: Option<Protocol>,
    family: Family,
    mark: u32,
    address: IpAddr,
    port: u16,
    scheduler: &'a [u8],
    engine: &'a [u8],
    service_flags: u32,
    persistence: u32,
    netmask: u32,
    sched_flags: &'a [u8],
    server: (IpAddr, u16),
    forwarding: Forwarding,
    weight: i32,
    upper: u32,
    lower: u32,
    tunnel: &'static TunnelType,
    tunnel_port: u16,
    interface: String,
    syncid: u8,
    maxlen: Option<u16>,
    group: Option<IpAddr>,
    group_port: Option<u16>,
    ttl: Option<u8>,
}

/// The rule of a tunnel type for an option.
fn tunnel_rule(kind: &TunnelType, flag: Flag) -> Rule {
    match checksum_of(flag) {
        Some(checksum) if kind.checksums.contains(&checksum) => Rule::OneOf,
        None if flag == Flag::TunPort && kind.has_port => Rule::Needed,
        _ => Rule::Illegal,
    }
}

/// The tunnel checksum that an option selects.
const fn checksum_of(flag: Flag) -> Option<TunnelChecksum> {
    match flag {
        Flag::TunNocsum => Some(TunnelChecksum::None),
        Flag::TunCsum => Some(TunnelChecksum::Full),
        Flag::TunRemcsum => Some(TunnelChecksum::Remote),
        _ => None,
    }
}

impl<'a> Line<'a> {
    fn new(command: CommandName, names: &'a dyn Resolve) -> Self {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Self {
            names,
            command,
            flags: Flags::default(),
            role: SyncRole::Master,
            protocol: None,
            family: Family::V4,
            mark: 0,
            address: nowhere,
            port: 0,
            scheduler: &[],
            engine: &[],
            service_flags: 0,
            persistence: 0,
            netmask: u32::MAX,
            sched_flags: &[],
            server: (nowhere, 0),
            forwarding: Forwarding::Route,
            weight: 1,
            upper: 0,
            lower: 0,
            tunnel: Tunnel::Ipip.about(),
            tunnel_port: 0,
            interface: String::new(),
            syncid: 0,
            maxlen: None,
            group: None,
            group_port: None,
            ttl: None,
        }
    }

    /// Processes one option: checks whether it was already given, and reads its value.
    fn option(&mut self, meaning: Meaning, argument: Option<&'a [u8]>) -> Result<(), Refusal> {
        let word = argument.unwrap_or(&[]);
        match meaning {
            Meaning::Command(_) | Meaning::Sort => {}
            Meaning::Tcp => self.service(Protocol::TCP, word)?,
            Meaning::Udp => self.service(Protocol::UDP, word)?,
            Meaning::Sctp => self.service(Protocol::SCTP, word)?,
            Meaning::Fwmark => {
                self.add(Flag::Service)?;
                self.protocol = Some(Protocol::TCP);
                self.family = Family::V4;
                self.mark = value::number(word, 1, i64::from(u32::MAX))
                    .and_then(|mark| u32::try_from(mark).ok())
                    .ok_or_else(|| fail_with("invalid fwmark value `{}' specified", word))?;
            }
            Meaning::Ipv6 => {
                if self.mark == 0 {
                    return Err(fail("-6 used before -f\n"));
                }
                self.family = Family::V6;
                self.netmask = 128;
            }
            Meaning::Gatewaying => self.forward(Forwarding::Route)?,
            Meaning::Ipip => self.forward(Forwarding::Tunnel)?,
            Meaning::Masquerading => self.forward(Forwarding::Nat)?,
            Meaning::FullNat => self.forward(Forwarding::FullNat)?,
            Meaning::Set(flag) => {
                self.add(flag)?;
                self.value(flag, argument, word)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, flag: Flag) -> Result<(), Refusal> {
        if self.flags.add(flag) {
            Ok(())
        } else {
            Err(fail_with(
                "multiple '{}' options specified",
                flag.name().as_bytes(),
            ))
        }
    }

    fn forward(&mut self, method: Forwarding) -> Result<(), Refusal> {
        self.add(Flag::Forward)?;
        self.forwarding = method;
        Ok(())
    }

    fn service(&mut self, protocol: Protocol, word: &[u8]) -> Result<(), Refusal> {
        self.add(Flag::Service)?;
        self.protocol = Some(protocol);
        let (address, port) = value::endpoint(word, self.protocol, self.names)
            .ok_or_else(|| fail("illegal virtual server address[:port] specified"))?;
        self.address = address;
        self.port = port.unwrap_or(0);
        self.family = Family::of(&address);
        if self.family == Family::V6 {
            self.netmask = 128;
        }
        Ok(())
    }

    fn value(
        &mut self,
        flag: Flag,
        argument: Option<&'a [u8]>,
        word: &'a [u8],
    ) -> Result<(), Refusal> {
        match flag {
            Flag::Scheduler => self.scheduler = word,
            Flag::Pe => self.engine = word,
            Flag::Persistent => {
                self.service_flags |= ServiceFlags::PERSISTENT;
                self.persistence = match argument {
                    Some(word) => timeout(word, 1)?,
                    None => DEFAULT_PERSISTENCE,
                };
            }
            Flag::Netmask => {
                self.netmask = match self.family {
                    Family::V4 => value::host(word, self.names)
                        .map(u32::from)
                        .ok_or_else(|| fail("illegal virtual server persistent mask specified"))?,
                    Family::V6 => {
                        value::prefix(word).ok_or_else(|| fail("illegal ipv6 netmask specified"))?
                    }
                };
            }
            Flag::Ops => self.service_flags |= ServiceFlags::ONE_PACKET,
            Flag::SchedFlags => self.sched_flags = word,
            Flag::Server => {
                let (address, port) = value::endpoint(word, self.protocol, self.names)
                    .ok_or_else(|| fail("illegal real server address[:port] specified"))?;
                // A later service option on the line does not change the port of this server any
                // more.
                self.server = (address, port.unwrap_or(self.port));
            }
            Flag::Weight => self.weight = ranged(flag, word, 0, i64::from(i32::MAX))?,
            Flag::Upper => self.upper = ranged(flag, word, 0, i64::from(i32::MAX))?,
            Flag::Lower => self.lower = ranged(flag, word, 0, i64::from(i32::MAX))?,
            Flag::TunType => {
                let kind = core::str::from_utf8(word).ok().and_then(TunnelType::find);
                self.tunnel = kind.ok_or_else(|| fail("illegal tunnel type specified"))?;
            }
            Flag::TunPort => self.tunnel_port = ranged(flag, word, 1, 65_535)?,
            Flag::McastInterface => self.interface = name(word),
            Flag::Syncid => self.syncid = ranged(flag, word, 0, 255)?,
            Flag::SyncMaxlen => self.maxlen = Some(ranged(flag, word, 1, 65_507)?),
            Flag::McastGroup => self.group = Some(group(word)?),
            Flag::McastPort => self.group_port = Some(ranged(flag, word, 1, 65_535)?),
            Flag::McastTtl => self.ttl = Some(ranged(flag, word, 1, 255)?),
            _ => {}
        }
        Ok(())
    }

    /// Makes the checks that follow the last option, and returns the command.
    fn finish(mut self, leftovers: &[&[u8]]) -> Result<Command, Refusal> {
        let mut stray = leftovers;
        let mut timeouts = Timeouts {
            tcp: 0,
            tcp_fin: 0,
            udp: 0,
        };
        if self.command == CommandName::Set {
            let [tcp, tcp_fin, udp, rest @ ..] = leftovers else {
                return Err(fail("--set option requires 3 timeout values"));
            };
            timeouts.tcp = timeout(tcp, 0)?;
            timeouts.tcp_fin = timeout(tcp_fin, 0)?;
            timeouts.udp = timeout(udp, 0)?;
            stray = rest;
        }
        if let Some(word) = stray.first() {
            return Err(fail_with("unexpected argument {}", word));
        }
        if self.flags.has(Flag::SchedFlags) {
            self.service_flags |= sched_flags(self.scheduler, self.sched_flags)?;
        }
        self.check_matrix()?;

        Ok(match self.command {
            CommandName::AddService => Command::AddService(self.service_spec()?),
            CommandName::EditService => Command::EditService(self.service_spec()?),
            CommandName::DeleteService => Command::DeleteService(self.service_id()),
            CommandName::Clear => Command::Clear,
            CommandName::AddServer => Command::AddServer(self.server_spec()?),
            CommandName::EditServer => Command::EditServer(self.server_spec()?),
            CommandName::DeleteServer => Command::DeleteServer {
                service: self.service_id(),
                server: SocketAddr::new(self.server.0, self.server.1),
            },
            CommandName::List => Command::List(self.list_options()?),
            CommandName::Zero => {
                Command::Zero(self.flags.has(Flag::Service).then(|| self.service_id()))
            }
            CommandName::Set => Command::Set(timeouts),
            CommandName::StartDaemon => Command::StartDaemon(SyncDaemon {
                role: self.role,
                interface: if self.interface.is_empty() {
                    DEFAULT_INTERFACE.into()
                } else {
                    self.interface
                },
                syncid: self.syncid,
                maxlen: self.maxlen,
                group: self.group,
                port: self.group_port,
                ttl: self.ttl,
            }),
            CommandName::StopDaemon => Command::StopDaemon {
                role: self.role,
                syncid: self.syncid,
            },
            CommandName::Restore => Command::Restore,
            CommandName::Save => Command::Save {
                numeric: self.flags.has(Flag::Numeric),
            },
            CommandName::Help => Command::Help,
            CommandName::Version => Command::Version,
        })
    }

    fn check_matrix(&self) -> Result<(), Refusal> {
        let of = (self.command.name(), "command");
        self.chosen(&Flag::ALL, |flag| self.command.rule(flag), of)?;
        Ok(())
    }

    /// Checks `flags` against the rules of a command or a tunnel type. `of` and `kind` are the name
    /// of the command or tunnel type in messages, and the word that follows the name. Of the
    /// options that exclude each other, returns the one that was given.
    fn chosen(
        &self,
        flags: &[Flag],
        rule: impl Fn(Flag) -> Rule,
        (of, kind): (&str, &str),
    ) -> Result<Option<Flag>, Refusal> {
        let mut chosen: Option<Flag> = None;
        for &flag in flags {
            let name = flag.name();
            match (rule(flag), self.flags.has(flag), chosen) {
                (Rule::Needed, false, _) => {
                    return Err(fail(&format!(
                        "You need to supply the '{name}' option for the '{of}' {kind}"
                    )));
                }
                (Rule::Illegal, true, _) => {
                    return Err(fail(&format!(
                        "Illegal '{name}' option with the '{of}' {kind}"
                    )));
                }
                (Rule::OneOf, true, Some(earlier)) => {
                    return Err(fail(&format!(
                        "The option '{name}' conflicts with the '{}' option in the '{of}' {kind}",
                        earlier.name()
                    )));
                }
                (Rule::OneOf, true, None) => chosen = Some(flag),
                _ => {}
            }
        }
        Ok(chosen)
    }

    fn service_id(&self) -> ServiceId {
        if self.mark != 0 {
            return ServiceId::Fwmark {
                mark: self.mark,
                family: self.family,
            };
        }
        let address = SocketAddr::new(self.address, self.port);
        match self.protocol {
            Some(Protocol::UDP) => ServiceId::Udp { address },
            Some(Protocol::SCTP) => ServiceId::Sctp { address },
            _ => ServiceId::Tcp { address },
        }
    }

    fn service_spec(&self) -> Result<ServiceSpec, Refusal> {
        if self.mark == 0 {
            if self.port == 0 && self.service_flags & ServiceFlags::PERSISTENT == 0 {
                return Err(fail("Zero port specified for non-persistent service"));
            }
            if self.service_flags & ServiceFlags::ONE_PACKET != 0
                && self.protocol != Some(Protocol::UDP)
            {
                return Err(fail(
                    "One-Packet Scheduling is only for UDP virtual services",
                ));
            }
        }
        Ok(ServiceSpec {
            service: self.service_id(),
            config: ServiceConfig {
                extras: Extras::default(),
                scheduler: name(if self.scheduler.is_empty() {
                    sched::DEFAULT.as_bytes()
                } else {
                    self.scheduler
                }),
                flags: ServiceFlags(self.service_flags),
                timeout: self.persistence,
                netmask: self.netmask,
                engine: (!self.engine.is_empty()).then(|| name(self.engine)),
            },
            owner: None,
        })
    }

    fn server_spec(&self) -> Result<ServerSpec, Refusal> {
        let (address, mut port) = self.server;
        // Neither a tunnel nor direct routing can change the port, so the service's port replaces
        // the given one.
        if self.mark == 0 && !self.forwarding.translates() {
            port = self.port;
        }
        if Family::of(&address) != self.family && self.forwarding != Forwarding::Tunnel {
            return Err(fail(
                "Different address family is allowed only for tunneling servers",
            ));
        }
        let tunnel = self.tunnel()?;
        Ok(ServerSpec {
            service: self.service_id(),
            server: SocketAddr::new(address, port),
            config: ServerConfig {
                weight: self.weight,
                forwarding: self.forwarding,
                tunnel,
                upper: self.upper,
                lower: self.lower,
            },
        })
    }

    fn tunnel(&self) -> Result<Tunnel, Refusal> {
        const TUNNEL: [Flag; 5] = [
            Flag::TunType,
            Flag::TunPort,
            Flag::TunNocsum,
            Flag::TunCsum,
            Flag::TunRemcsum,
        ];
        if self.forwarding != Forwarding::Tunnel && TUNNEL.iter().any(|&flag| self.flags.has(flag))
        {
            return Err(fail("Tunnel options conflict with forward method"));
        }
        let rule = |flag| tunnel_rule(self.tunnel, flag);
        let chosen = self.chosen(&TUNNEL[1..], rule, (self.tunnel.name, "tunnel type"))?;
        let checksum = chosen.and_then(checksum_of).unwrap_or_default();
        Ok((self.tunnel.tunnel)(self.tunnel_port, checksum))
    }

    fn list_options(&self) -> Result<ListOptions, Refusal> {
        let has = |flag| self.flags.has(flag);
        let any = |flags: &[Flag]| flags.iter().any(|&flag| has(flag));
        let apart = any(&[Flag::Timeout, Flag::Daemon]);
        if (apart || has(Flag::Connection)) && any(&[Flag::Stats, Flag::Rate, Flag::Thresholds])
            || apart && has(Flag::PersistentConn)
        {
            return Err(fail("options conflicts in the list command"));
        }
        Ok(ListOptions {
            what: if has(Flag::Connection) {
                What::Connections
            } else if has(Flag::Service) {
                What::Service(self.service_id())
            } else if has(Flag::Timeout) {
                What::Timeouts
            } else if has(Flag::Daemon) {
                What::Daemons
            } else {
                What::Services
            },
            format: if has(Flag::Stats) {
                Format::Stats
            } else if has(Flag::Rate) {
                Format::Rate
            } else if has(Flag::Thresholds) {
                Format::Thresholds
            } else if has(Flag::PersistentConn) {
                Format::PersistentConn
            } else if has(Flag::TunInfo) {
                Format::TunInfo
            } else {
                Format::Plain
            },
            persistent_conn: has(Flag::PersistentConn),
            numeric: has(Flag::Numeric),
            exact: has(Flag::Exact),
            nosort: has(Flag::Nosort),
        })
    }
}

/// A name, shortened to the length that the kernel stores.
fn name(word: &[u8]) -> String {
    String::from_utf8_lossy(&word[..word.len().min(NAME_MAX)]).into_owned()
}

fn timeout(word: &[u8], min: i64) -> Result<u32, Refusal> {
    value::number(word, min, TIMEOUT_MAX)
        .and_then(|seconds| u32::try_from(seconds).ok())
        .ok_or_else(|| fail_with("invalid timeout value `{}' specified", word))
}

/// Parses a number from `min` to `max`. The error message names the option.
fn ranged<T: TryFrom<i64>>(flag: Flag, word: &[u8], min: i64, max: i64) -> Result<T, Refusal> {
    value::number(word, min, max)
        .and_then(|value| T::try_from(value).ok())
        .ok_or_else(|| {
            let what = match flag {
                Flag::Upper => "u_threshold",
                Flag::Lower => "l_threshold",
                Flag::TunPort => "tunnel port",
                other => other.name(),
            };
            fail_with("illegal {} specified", what.as_bytes())
        })
}

fn group(word: &[u8]) -> Result<IpAddr, Refusal> {
    let (group, refusal) = if word.contains(&b':') {
        (
            value::inet6(word).map(IpAddr::V6),
            "invalid IPv6 mcast-group `{}'",
        )
    } else {
        (
            value::inet4(word).map(IpAddr::V4),
            "invalid IPv4 mcast-group `{}'",
        )
    };
    group
        .filter(IpAddr::is_multicast)
        .ok_or_else(|| fail_with(refusal, word))
}

/// Parses the list of `-b`; as with `strtok`, empty items are skipped.
fn sched_flags(scheduler: &[u8], list: &[u8]) -> Result<u32, Refusal> {
    let mut flags = 0;
    let mut items = 0;
    for item in list.split(|&b| b == b',').filter(|item| !item.is_empty()) {
        items += 1;
        let known = core::str::from_utf8(item).ok().and_then(sched::flag);
        let Some((flag, only)) = known else {
            return Err(fail_with("invalid scheduler flag `{}'", item));
        };
        if only.is_some_and(|about| about.name.as_bytes() != scheduler) {
            return Err(fail_with("incompatible scheduler flag `{}'", item));
        }
        flags |= flag;
    }
    if items == 0 && !list.is_empty() {
        // The real ipvsadm crashes here.
        return Err(fail_with("invalid scheduler flag `{}'", list));
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ipvsadm::{HELP_TEXT, Numeric};

    fn text(words: &[&str]) -> String {
        let refusal = parse("ipvsadm", words, &Numeric).expect_err("an invalid line was accepted");
        String::from_utf8_lossy(refusal.text()).into_owned()
    }

    #[test]
    fn full_nat_option_is_accepted_by_lvsadm_and_refused_by_ipvsadm() {
        let words = [
            "-a",
            "-t",
            "192.0.2.1:80",
            "-r",
            "10.0.0.1:8080",
            "--fullnat",
        ];
        let refusal = parse("ipvsadm", &words, &Numeric).expect_err("ipvsadm accepted --fullnat");
        assert_eq!(refusal.text(), b"--fullnat: unknown option\n");
        let Ok(Command::AddServer(spec)) = parse_own("lvsadm", &words, &Numeric) else {
            panic!("lvsadm refused --fullnat");
        };
        assert_eq!(spec.config.forwarding, Forwarding::FullNat);
        assert_eq!(spec.server.port(), 8080);
        let twice = [&words[..], &["-m"]].concat();
        assert!(parse_own("lvsadm", &twice, &Numeric).is_err());
    }

    #[test]
    fn ipvsadm_parser_prints_expected_message_for_each_kind_of_invalid_line() {
        assert_eq!(text(&["-Lq"]), "-Lq: unknown option\n");
        assert_eq!(
            text(&["-L", "-n=5"]),
            "-n=5: option does not take an argument\n"
        );
        assert_eq!(text(&["-L", "--zero"]), "invalid option `--zero'\n");
        assert_eq!(
            text(&["-L", "--start-daemon", "master"]),
            "invalid option `master'\n"
        );
        assert_eq!(text(&["-A", "-6", "-f", "1"]), "-6 used before -f\n\n");
        assert_eq!(text(&["-L", "-b", "foo", "x"]), "unexpected argument x\n");
        assert_eq!(
            text(&["-n"]),
            "Try `ipvsadm -h' or 'ipvsadm --help' for more information.\n"
        );
    }

    #[test]
    fn lvsadm_refusal_quotes_words_of_the_line() {
        let seen = |words: &[&str]| {
            let refusal =
                parse_own("lvsadm", words, &Numeric).expect_err("an invalid line was accepted");
            refusal.of_line(words)
        };
        assert_eq!(
            seen(&["garbage", "x"]),
            "\"garbage x\": expected a command such as -A or -a"
        );
        assert_eq!(
            seen(&["-A", "--nonsense"]),
            "\"-A --nonsense\": --nonsense: unknown option"
        );
    }

    #[test]
    fn ipvsadm_server_of_direct_routing_gets_port_of_service() {
        let words = ["-a", "-t", "192.0.2.1:80", "-r", "10.0.0.1:8080"];
        let Ok(Command::AddServer(spec)) = parse("ipvsadm", &words, &Numeric) else {
            panic!("a valid line was refused");
        };
        assert_eq!(spec.server.port(), 80);
    }

    #[test]
    fn ipvsadm_help_names_every_option_except_version() {
        for option in table::OPTIONS {
            if ["version"].contains(&option.long) {
                continue;
            }
            assert!(HELP_TEXT.contains(option.long), "{}", option.long);
        }
    }

    proptest! {
        #[test]
        fn ipvsadm_parser_does_not_panic_on_any_words(words in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..12), 0..8)) {
            let _ = parse("ipvsadm", &words, &Numeric);
        }

        #[test]
        fn ipvsadm_parser_does_not_panic_on_any_options(picks in prop::collection::vec((0..table::OPTIONS.len(), any::<bool>(), "[-a-z0-9.:,\\[\\] ]{0,12}"), 0..8)) {
            let mut words: Vec<String> = Vec::new();
            for (pick, short, value) in picks {
                let option = &table::OPTIONS[pick];
                match option.short {
                    Some(letter) if short => words.push(format!("-{}{value}", char::from(letter))),
                    _ => {
                        words.push(format!("--{}", option.long));
                        words.push(value);
                    }
                }
            }
            if let Err(refusal) = parse("ipvsadm", &words, &Numeric) {
                prop_assert!(refusal.text().ends_with(b"\n"));
            }
        }
    }
}

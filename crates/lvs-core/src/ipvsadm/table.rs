//! The table of commands and options: names, kinds of arguments, and the options that each command
//! accepts.
//!
//! The parser uses this table; completions and manual pages are generated from it.

use CommandName as C;
use Flag as F;

use crate::tunnel::TunnelType;

/// The commands of ipvsadm, in the order of their numbers in ipvsadm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommandName {
    /// `-A`: add a service.
    AddService,
    /// `-E`: replace the settings of a service.
    EditService,
    /// `-D`: delete a service.
    DeleteService,
    /// `-C`: delete all services.
    Clear,
    /// `-L`, `-l`: list the services, or what an option selects.
    List,
    /// `-a`: add a server to a service.
    AddServer,
    /// `-d`: delete a server from a service.
    DeleteServer,
    /// `-e`: replace the settings of a server.
    EditServer,
    /// `--set`: set the timeouts of connections.
    Set,
    /// `--start-daemon`: start a daemon of connection synchronisation.
    StartDaemon,
    /// `--stop-daemon`: stop a daemon of connection synchronisation.
    StopDaemon,
    /// `-R`: execute the commands in standard input.
    Restore,
    /// `-S`: print the commands that create the present services and servers again.
    Save,
    /// `-Z`: set the counters of a service, or of all services, to zero.
    Zero,
    /// `-h`: print the help.
    Help,
    /// `-v`: print the version.
    Version,
}

impl CommandName {
    /// The name of the command in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AddService => "add-service",
            Self::EditService => "edit-service",
            Self::DeleteService => "delete-service",
            Self::Clear => "flush",
            Self::List => "list",
            Self::AddServer => "add-server",
            Self::DeleteServer => "delete-server",
            Self::EditServer => "edit-server",
            Self::Set => "set",
            Self::StartDaemon => "start-daemon",
            Self::StopDaemon => "stop-daemon",
            Self::Restore => "restore",
            Self::Save => "save",
            Self::Zero => "zero",
            Self::Help => "help",
            Self::Version => "version",
        }
    }

    /// The rule of a command for an option.
    pub fn rule(self, flag: Flag) -> Rule {
        let (needed, one, free): (&[F], &[F], &[F]) = match self {
            Self::AddService | Self::EditService => (
                &[F::Service],
                &[],
                &[
                    F::Scheduler,
                    F::Persistent,
                    F::Netmask,
                    F::Ops,
                    F::Pe,
                    F::SchedFlags,
                ],
            ),
            Self::DeleteService => (&[F::Service], &[], &[]),
            Self::Clear | Self::Restore | Self::Set | Self::Help | Self::Version => (&[], &[], &[]),
            Self::Save => (&[], &[], &[F::Numeric]),
            Self::List => (
                &[],
                &[F::Connection, F::Service, F::Timeout, F::Daemon],
                &[
                    F::Numeric,
                    F::Stats,
                    F::Rate,
                    F::Thresholds,
                    F::PersistentConn,
                    F::Nosort,
                    F::Syncid,
                    F::Exact,
                    F::TunInfo,
                ],
            ),
            Self::AddServer | Self::EditServer => (
                &[F::Service, F::Server],
                &[],
                &[
                    F::Forward,
                    F::Weight,
                    F::Upper,
                    F::Lower,
                    F::TunType,
                    F::TunPort,
                    F::TunNocsum,
                    F::TunCsum,
                    F::TunRemcsum,
                ],
            ),
            Self::DeleteServer => (&[F::Service, F::Server], &[], &[]),
            Self::Zero => (&[], &[], &[F::Service]),
            Self::StartDaemon => (
                &[],
                &[],
                &[
                    F::McastInterface,
                    F::Syncid,
                    F::McastGroup,
                    F::McastPort,
                    F::McastTtl,
                    F::SyncMaxlen,
                ],
            ),
            Self::StopDaemon => (&[], &[], &[F::Syncid]),
        };
        if needed.contains(&flag) {
            Rule::Needed
        } else if one.contains(&flag) {
            Rule::OneOf
        } else if free.contains(&flag) {
            Rule::Free
        } else {
            Rule::Illegal
        }
    }
}

/// Whether a command, or a tunnel type, requires, permits or refuses an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The command requires the option.
    Needed,
    /// At most one of the options with this rule is allowed.
    OneOf,
    /// The command permits the option.
    Free,
    /// The command refuses the option.
    Illegal,
}

/// Options, and values of the command line (such as the service address), in the order in which
/// ipvsadm checks whether the command accepts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each constant has the name of its option")]
pub enum Flag {
    Numeric,
    Connection,
    Service,
    Scheduler,
    Persistent,
    Netmask,
    Server,
    Forward,
    Weight,
    Upper,
    Lower,
    McastInterface,
    Timeout,
    Daemon,
    Stats,
    Rate,
    Thresholds,
    PersistentConn,
    Nosort,
    Syncid,
    Exact,
    Ops,
    Pe,
    SchedFlags,
    McastGroup,
    McastPort,
    McastTtl,
    SyncMaxlen,
    TunInfo,
    TunType,
    TunPort,
    TunNocsum,
    TunCsum,
    TunRemcsum,
}

impl Flag {
    /// All flags, in the order of ipvsadm's checks.
    pub const ALL: [Self; 34] = [
        Self::Numeric,
        Self::Connection,
        Self::Service,
        Self::Scheduler,
        Self::Persistent,
        Self::Netmask,
        Self::Server,
        Self::Forward,
        Self::Weight,
        Self::Upper,
        Self::Lower,
        Self::McastInterface,
        Self::Timeout,
        Self::Daemon,
        Self::Stats,
        Self::Rate,
        Self::Thresholds,
        Self::PersistentConn,
        Self::Nosort,
        Self::Syncid,
        Self::Exact,
        Self::Ops,
        Self::Pe,
        Self::SchedFlags,
        Self::McastGroup,
        Self::McastPort,
        Self::McastTtl,
        Self::SyncMaxlen,
        Self::TunInfo,
        Self::TunType,
        Self::TunPort,
        Self::TunNocsum,
        Self::TunCsum,
        Self::TunRemcsum,
    ];

    /// The name of the option in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Numeric => "numeric",
            Self::Connection => "connection",
            Self::Service => "service-address",
            Self::Scheduler => "scheduler",
            Self::Persistent => "persistent",
            Self::Netmask => "netmask",
            Self::Server => "real-server",
            Self::Forward => "forwarding-method",
            Self::Weight => "weight",
            Self::Upper => "u-threshold",
            Self::Lower => "l-threshold",
            Self::McastInterface => "mcast-interface",
            Self::Timeout => "timeout",
            Self::Daemon => "daemon",
            Self::Stats => "stats",
            Self::Rate => "rate",
            Self::Thresholds => "thresholds",
            Self::PersistentConn => "persistent-conn",
            Self::Nosort => "nosort",
            Self::Syncid => "syncid",
            Self::Exact => "exact",
            Self::Ops => "ops",
            Self::Pe => "pe",
            Self::SchedFlags => "sched-flags",
            Self::McastGroup => "mcast-group",
            Self::McastPort => "mcast-port",
            Self::McastTtl => "mcast-ttl",
            Self::SyncMaxlen => "sync-maxlen",
            Self::TunInfo => "tun-info",
            Self::TunType => "tun-type",
            Self::TunPort => "tun-port",
            Self::TunNocsum => "tun-nocsum",
            Self::TunCsum => "tun-csum",
            Self::TunRemcsum => "tun-remcsum",
        }
    }
}

/// A set of [`Flag`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(u64);

impl Flags {
    /// Whether the set contains `flag`.
    pub const fn has(self, flag: Flag) -> bool {
        self.0 & (1 << flag as u64) != 0
    }

    /// Adds `flag`; `false` if it is already set.
    pub const fn add(&mut self, flag: Flag) -> bool {
        let new = !self.has(flag);
        self.0 |= 1 << flag as u64;
        new
    }
}

/// Whether an option has an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// The option takes no argument.
    No,
    /// A value is required; the string is the name of the value in help texts.
    Required(&'static str),
    /// A value may follow: in the same word, or as the next word, unless that begins with `-`.
    Optional(&'static str),
}

/// Meaning of an option on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each constant has the name of its option")]
pub enum Meaning {
    Command(CommandName),
    Tcp,
    Udp,
    Sctp,
    Fwmark,
    Ipv6,
    Gatewaying,
    Ipip,
    Masquerading,
    FullNat,
    Sort,
    Set(Flag),
}

/// The description of one option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionSpec {
    /// Long name of the option, without `--`.
    pub long: &'static str,
    /// Short name of the option, if it has one.
    pub short: Option<u8>,
    /// The argument that the option takes.
    pub argument: Argument,
    /// The meaning of the option for the parser.
    pub meaning: Meaning,
    /// Help text for operators.
    pub help: &'static str,
}

const fn option(
    long: &'static str,
    short: Option<u8>,
    argument: Argument,
    meaning: Meaning,
    help: &'static str,
) -> OptionSpec {
    OptionSpec {
        long,
        short,
        argument,
        meaning,
        help,
    }
}

const NO: Argument = Argument::No;

const fn arg(name: &'static str) -> Argument {
    Argument::Required(name)
}

const fn set(flag: Flag) -> Meaning {
    Meaning::Set(flag)
}

const fn cmd(command: CommandName) -> Meaning {
    Meaning::Command(command)
}

/// Every option of ipvsadm 1.31.
#[rustfmt::skip]
pub const OPTIONS: &[OptionSpec] = &[
    option("add-service", Some(b'A'), NO, cmd(C::AddService), "add a virtual service"),
    option("edit-service", Some(b'E'), NO, cmd(C::EditService), "replace all settings of a virtual service"),
    option("delete-service", Some(b'D'), NO, cmd(C::DeleteService), "delete a virtual service"),
    option("clear", Some(b'C'), NO, cmd(C::Clear), "delete all virtual services"),
    option("list", Some(b'L'), NO, cmd(C::List), "list services, connections, timeouts or daemons"),
    option("list", Some(b'l'), NO, cmd(C::List), "list services, connections, timeouts or daemons"),
    option("zero", Some(b'Z'), NO, cmd(C::Zero), "zero the counters of a service, or all counters"),
    option("add-server", Some(b'a'), NO, cmd(C::AddServer), "add a real server to a service"),
    option("edit-server", Some(b'e'), NO, cmd(C::EditServer), "replace all settings of a real server"),
    option("delete-server", Some(b'd'), NO, cmd(C::DeleteServer), "remove a real server from a service"),
    option("set", None, NO, cmd(C::Set), "set the timeouts tcp, tcpfin, udp in seconds"),
    option("start-daemon", None, arg("master|backup"), cmd(C::StartDaemon), "start a synchronisation daemon"),
    option("stop-daemon", None, arg("master|backup"), cmd(C::StopDaemon), "stop a synchronisation daemon"),
    option("restore", Some(b'R'), NO, cmd(C::Restore), "read commands from standard input, one a line"),
    option("save", Some(b'S'), NO, cmd(C::Save), "print the commands that create the present table"),
    option("help", Some(b'h'), NO, cmd(C::Help), "print a summary"),
    option("version", Some(b'v'), NO, cmd(C::Version), "print the version"),
    option("tcp-service", Some(b't'), arg("host[:port]"), Meaning::Tcp, "TCP service"),
    option("udp-service", Some(b'u'), arg("host[:port]"), Meaning::Udp, "UDP service"),
    option("sctp-service", None, arg("host[:port]"), Meaning::Sctp, "SCTP service"),
    option("fwmark-service", Some(b'f'), arg("mark"), Meaning::Fwmark, "service of a firewall mark"),
    option("ipv6", Some(b'6'), NO, Meaning::Ipv6, "the firewall mark applies to IPv6 packets"),
    option("scheduler", Some(b's'), arg("scheduler"), set(F::Scheduler), "scheduler; wlc if not given"),
    option("pe", None, arg("engine"), set(F::Pe), "persistence engine"),
    option("persistent", Some(b'p'), Argument::Optional("seconds"), set(F::Persistent), "persistent service; 360 seconds if not given"),
    option("netmask", Some(b'M'), arg("netmask"), set(F::Netmask), "clients in one network of this size count as one client"),
    option("ops", Some(b'o'), NO, set(F::Ops), "schedule every datagram separately"),
    option("sched-flags", Some(b'b'), arg("flags"), set(F::SchedFlags), "flags of the scheduler, separated by commas"),
    option("real-server", Some(b'r'), arg("host[:port]"), set(F::Server), "real server"),
    option("masquerading", Some(b'm'), NO, Meaning::Masquerading, "network address translation"),
    option("ipip", Some(b'i'), NO, Meaning::Ipip, "tunnelling"),
    option("gatewaying", Some(b'g'), NO, Meaning::Gatewaying, "direct routing; the default"),
    option("tun-type", None, arg(TunnelType::NAMES), set(F::TunType), "encapsulation of a tunnel"),
    option("tun-port", None, arg("port"), set(F::TunPort), "UDP port of a GUE tunnel"),
    option("tun-nocsum", None, NO, set(F::TunNocsum), "tunnel without checksum"),
    option("tun-csum", None, NO, set(F::TunCsum), "tunnel with checksum"),
    option("tun-remcsum", None, NO, set(F::TunRemcsum), "tunnel with remote checksum"),
    option("weight", Some(b'w'), arg("weight"), set(F::Weight), "weight of the server; 1 if not given"),
    option("u-threshold", Some(b'x'), arg("connections"), set(F::Upper), "upper threshold of connections"),
    option("l-threshold", Some(b'y'), arg("connections"), set(F::Lower), "lower threshold of connections"),
    option("numeric", Some(b'n'), NO, set(F::Numeric), "print numbers instead of names"),
    option("connection", Some(b'c'), NO, set(F::Connection), "list connections"),
    option("timeout", None, NO, set(F::Timeout), "show the timeouts"),
    option("daemon", None, NO, set(F::Daemon), "show the synchronisation daemons"),
    option("stats", None, NO, set(F::Stats), "show counters"),
    option("rate", None, NO, set(F::Rate), "show rates"),
    option("exact", Some(b'X'), NO, set(F::Exact), "print all digits"),
    option("thresholds", None, NO, set(F::Thresholds), "show thresholds"),
    option("persistent-conn", None, NO, set(F::PersistentConn), "show the numbers of persistence templates; with -c, the persistence engines"),
    option("tun-info", None, NO, set(F::TunInfo), "show the tunnels to the servers"),
    option("nosort", None, NO, set(F::Nosort), "do not sort"),
    option("sort", None, NO, Meaning::Sort, "does nothing"),
    option("syncid", None, arg("id"), set(F::Syncid), "sync ID, 0 to 255; a backup ignores messages with another one, unless its own is 0"),
    option("sync-maxlen", None, arg("bytes"), set(F::SyncMaxlen), "maximum length of a synchronisation message"),
    option("mcast-interface", None, arg("interface"), set(F::McastInterface), "interface of the multicast group; eth0 if not given"),
    option("mcast-group", None, arg("address"), set(F::McastGroup), "multicast group"),
    option("mcast-port", None, arg("port"), set(F::McastPort), "UDP port of the multicast group"),
    option("mcast-ttl", None, arg("ttl"), set(F::McastTtl), "time to live of synchronisation messages"),
];

/// Options of `lvsadm` that ipvsadm does not have.
pub const OWN_OPTIONS: &[OptionSpec] = &[option(
    "fullnat",
    None,
    NO,
    Meaning::FullNat,
    "full NAT: servers see and answer a local address instead of the client's",
)];

/// The option of `lvsadm` with this long name.
pub fn own_long(name: &[u8]) -> Option<&'static OptionSpec> {
    let mut own = OWN_OPTIONS.iter();
    own.find(|o| o.long.as_bytes() == name)
        .or_else(|| long(name))
}

/// The option with this long name.
pub fn long(name: &[u8]) -> Option<&'static OptionSpec> {
    OPTIONS.iter().find(|o| o.long.as_bytes() == name)
}

/// The option with this short name.
pub fn short(letter: u8) -> Option<&'static OptionSpec> {
    OPTIONS.iter().find(|o| o.short == Some(letter))
}

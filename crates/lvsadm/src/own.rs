//! Features of `lvsadm` that ipvsadm does not have, except the commands: options, environment, exit
//! status.
//!
//! Help, completions and manual page are built from these tables, those of ipvsadm
//! ([`lvs_core::ipvsadm::table`]) and those of the commands ([`crate::operator::OPERATORS`]).

use lvs_core::sched::BUILT_IN;

/// Output of `lvsadm --version`.
pub(crate) const VERSION: &str = concat!(
    "lvsadm ",
    env!("CARGO_PKG_VERSION"),
    " (command line of ipvsadm 1.31)\n"
);

pub(crate) struct OwnOption {
    pub(crate) name: &'static str,
    /// The name of the option's argument; empty for an option without an argument.
    pub(crate) argument: &'static str,
    /// Position of the option on the command line.
    pub(crate) place: Place,
    pub(crate) help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The option precedes the command.
    First,
    /// The option is used with `-R`.
    Restore,
}

/// The options of `lvsadm` itself. [`lvs_core::ipvsadm::table::OWN_OPTIONS`] has the options that
/// `lvsadm` adds to ipvsadm's commands.
pub(crate) const OPTIONS: [OwnOption; 3] = [
    OwnOption {
        name: "--socket",
        argument: "ADDRESS",
        place: Place::First,
        help: "control socket of the dataplane: a path, or @NAME (abstract)",
    },
    OwnOption {
        name: "--json",
        argument: "",
        place: Place::First,
        help: "print listings as JSON",
    },
    OwnOption {
        name: "--atomic",
        argument: "",
        place: Place::Restore,
        help: "apply all lines, or none if one of them is refused",
    },
];

pub(crate) const ENVIRONMENT: [(&str, &str); 2] = [
    (
        "LVS_SOCKET",
        "the same as --socket (default: the socket of the network namespace, in /run/lvs)",
    ),
    ("LVS_AUTOSTART=1", "start lvs-dataplane if none answers"),
];

pub(crate) const EXIT_STATUS: [(&str, &str); 5] = [
    ("0", "success"),
    (
        "1",
        "a listing or an additional command was refused; of doctor and diff: there are findings or differences; of drain and sync --wait: the time has passed",
    ),
    ("2", "invalid command line, or no dataplane to connect to"),
    (
        "141",
        "the program that reads the output has closed the pipe",
    ),
    ("255", "the dataplane refused a change, as with ipvsadm"),
];

pub(crate) fn schedulers() -> impl Iterator<Item = &'static str> {
    BUILT_IN.iter().map(|about| about.name)
}

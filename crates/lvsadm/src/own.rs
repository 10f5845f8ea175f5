//! Features of `lvsadm` beyond ipvsadm, apart from its commands: options, environment, exit status.
//!
//! Help, completions and manual page are built from these tables, ipvsadm's own
//! ([`lvs_core::ipvsadm::table`]) and that of the commands ([`crate::operator::OPERATORS`]).

use lvs_core::ipvsadm::HELP_TEXT;
use lvs_core::ipvsadm::table::{Argument, OWN_OPTIONS};
use lvs_core::sched::BUILT_IN;

use crate::operator;

/// Output of `lvsadm --version`.
pub(crate) const VERSION: &str = concat!(
    "lvsadm ",
    env!("CARGO_PKG_VERSION"),
    " (command line of ipvsadm 1.31)\n"
);

/// An option of `lvsadm` itself.
pub(crate) struct OwnOption {
    pub(crate) name: &'static str,
    /// The name of its argument; empty without one.
    pub(crate) argument: &'static str,
    /// Its position on the command line.
    pub(crate) place: Place,
    pub(crate) help: &'static str,
}

/// Position of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Before the command.
    First,
    /// Used with `-R`.
    Restore,
}

/// The options of `lvsadm` itself, in addition to those of ipvsadm's commands ([`OWN_OPTIONS`]).
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

/// Environment variables.
pub(crate) const ENVIRONMENT: [(&str, &str); 2] = [
    (
        "LVS_SOCKET",
        "as --socket (default: one in /run/lvs, by network namespace)",
    ),
    ("LVS_AUTOSTART=1", "start lvs-dataplane if none answers"),
];

/// Meaning of the exit status.
pub(crate) const EXIT_STATUS: [(&str, &str); 5] = [
    ("0", "success"),
    (
        "1",
        "a listing or an additional command was refused; of doctor: there are findings; of drain: the deadline has passed",
    ),
    ("2", "wrong command line, or no dataplane to connect to"),
    ("141", "the reader of the output has ended"),
    ("255", "the dataplane refused a change, as with ipvsadm"),
];

/// The names of all schedulers.
pub(crate) fn schedulers() -> impl Iterator<Item = &'static str> {
    BUILT_IN.iter().map(|about| about.name)
}

/// Output of `lvsadm --help`.
pub(crate) fn help() -> String {
    let mut text = VERSION.to_owned();
    // ipvsadm's text names another default than ipvsadm itself has.
    let help = HELP_TEXT.replace("sync (default=255)", "sync (default=0)");
    text.push_str(&help.replace("  ipvsadm -", "  lvsadm  -"));
    text.push_str("Forwarding methods of lvsadm only:\n");
    for option in OWN_OPTIONS {
        let name = match option.argument {
            Argument::No => format!("--{}", option.long),
            Argument::Required(argument) => format!("--{} {argument}", option.long),
            Argument::Optional(argument) => format!("--{} [{argument}]", option.long),
        };
        entry(&mut text, &name, option.help);
    }
    text.push_str("Schedulers besides those above:\n");
    let known: Vec<&str> = HELP_TEXT
        .split(|c: char| !c.is_ascii_alphanumeric())
        .collect();
    for about in BUILT_IN {
        if !known.contains(&about.name) {
            entry(&mut text, about.name, about.summary);
        }
    }
    for (title, place) in [
        ("Options before the command:\n", Place::First),
        ("Options of -R:\n", Place::Restore),
    ] {
        text.push_str(title);
        for option in OPTIONS.iter().filter(|option| option.place == place) {
            entry(
                &mut text,
                format!("{} {}", option.name, option.argument).trim_end(),
                option.help,
            );
        }
    }
    text.push_str("Environment:\n");
    for (name, help) in ENVIRONMENT {
        entry(&mut text, name, help);
    }
    text.push_str(&operator::overview());
    text
}

/// A line of the help, in the columns of ipvsadm's.
fn entry(text: &mut String, name: &str, help: &str) {
    text.push_str(&format!("  {name:<36}{help}\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_manual_page_names_all_options() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/lvsadm.md");
        let page = std::fs::read_to_string(path).expect("docs/lvsadm.md");
        let has =
            |text: String| assert!(page.contains(&text), "docs/lvsadm.md does not have {text}");
        for operator in operator::OPERATORS {
            has(format!("**`lvsadm {}", operator.name));
            for flag in operator.flags {
                has(flag.name.to_owned());
            }
        }
        for name in schedulers() {
            has(format!("\n| `{name}` | "));
        }
        for option in OPTIONS {
            has(format!("\n| `{}", option.name));
        }
        for option in OWN_OPTIONS {
            has(format!("\n| `--{}", option.long));
        }
        for (status, _) in EXIT_STATUS {
            has(format!("\n| {status} | "));
        }
        for (variable, _) in ENVIRONMENT {
            has(format!("`{variable}`"));
        }
    }

    #[test]
    fn own_help_names_all_options() {
        let text = help();
        for name in schedulers() {
            assert!(text.contains(name), "{name}");
        }
        for option in OPTIONS {
            assert!(text.contains(option.name), "{}", option.name);
        }
        for option in OWN_OPTIONS {
            assert!(text.contains(option.long), "{}", option.long);
        }
        assert!(text.contains("  twos ") && !text.contains("  wlc "));
    }

    #[test]
    fn help_names_default_syncid() {
        assert!(help().contains("syncid for connection sync (default=0)\n"));
        let words = [b"--start-daemon".to_vec(), b"master".to_vec()];
        let names = lvs_api::names::Names::from_texts("", "");
        let command = lvs_core::ipvsadm::parse_own("lvsadm", &words, &names);
        let Ok(lvs_core::ipvsadm::Command::StartDaemon(daemon)) = command else {
            panic!("{command:?}");
        };
        assert_eq!(daemon.syncid, 0);
    }
}

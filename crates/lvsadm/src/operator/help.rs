//! The help of `lvsadm` without a command.

use lvs_core::ipvsadm::HELP_TEXT;
use lvs_core::ipvsadm::table::{Argument, OWN_OPTIONS};
use lvs_core::sched::BUILT_IN;

use crate::own::{ENVIRONMENT, OPTIONS, Place, VERSION};

/// Output of `lvsadm --help`.
pub(crate) fn help() -> String {
    let mut text = VERSION.to_owned();
    // ipvsadm's help text has another default than ipvsadm uses.
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
    text.push_str(&super::overview());
    text
}

/// Appends a line to the help, in the same columns as ipvsadm's help.
fn entry(text: &mut String, name: &str, help: &str) {
    text.push_str(&format!("  {name:<36}{help}\n"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::OPERATORS;
    use crate::own::{EXIT_STATUS, schedulers};

    #[test]
    fn docs_page_of_lvsadm_names_all_commands_options_schedulers_and_exit_codes() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/lvsadm.md");
        let page = std::fs::read_to_string(path).expect("the file can be read");
        let has =
            |text: String| assert!(page.contains(&text), "docs/lvsadm.md does not have {text}");
        for operator in OPERATORS {
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
    fn lvsadm_help_names_all_options_and_own_schedulers() {
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
    fn lvsadm_help_and_parser_have_default_syncid_0() {
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

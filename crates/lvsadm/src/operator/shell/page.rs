//! The manual page.

use std::fmt::Write;

use lvs_core::ipvsadm::table::{Argument, Meaning, OPTIONS, OWN_OPTIONS, OptionSpec};
use lvs_core::sched::BUILT_IN;

use crate::operator::{Operator, capital};
use crate::own::{self, Place};

/// Escapes a text for roff, so that roff reads no escapes or requests in it.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) {
        format!("\\&{text}")
    } else {
        text
    }
}

/// Appends an entry of a list: a command or an option, and its description.
fn item(text: &mut String, name: &str, help: &str) {
    let _ = writeln!(text, ".TP\n.B {}\n{}", roff(name.trim_end()), roff(help));
}

fn section(text: &mut String, title: &str) {
    let _ = writeln!(text, ".SH {title}");
}

fn operator(text: &mut String, operator: &Operator) {
    let name = format!("{} {}", operator.name, operator.arguments);
    let help = format!("{}. {}", capital(operator.summary), operator.text);
    item(text, &name, &help);
    if operator.flags.is_empty() {
        return;
    }
    text.push_str(".RS\n");
    for flag in operator.flags {
        item(text, &format!("{} {}", flag.name, flag.argument), flag.help);
    }
    text.push_str(".RE\n");
}

fn option(text: &mut String, option: &OptionSpec) {
    let argument = match option.argument {
        Argument::No => String::new(),
        Argument::Required(name) => format!(" {name}"),
        Argument::Optional(name) => format!(" [{name}]"),
    };
    let short = option
        .short
        .map_or_else(String::new, |short| format!("-{}, ", char::from(short)));
    item(
        text,
        &format!("{short}--{}{argument}", option.long),
        option.help,
    );
}

pub(super) fn page(operators: &[Operator]) -> String {
    let mut text = format!(
        ".TH LVSADM 8 \"\" \"lvsadm {}\" \"LVS in userspace\"\n",
        env!("CARGO_PKG_VERSION")
    );
    section(&mut text, "NAME");
    text.push_str("lvsadm \\- administer a Linux Virtual Server in userspace\n");
    section(&mut text, "SYNOPSIS");
    text.push_str(
        ".B lvsadm\n[\\-\\-socket ADDRESS] [\\-\\-json]\n.I command\n[option ...]\n.br\n.B lvsadm\n[\\-\\-socket ADDRESS] \
         [\\-\\-json]\n.I additional\\-command\n[argument ...]\n",
    );
    section(&mut text, "DESCRIPTION");
    text.push_str(
        "Sets up, maintains and inspects the virtual services of the dataplane\n.BR lvs\\-dataplane (8)\nwith the command \
         line of ipvsadm 1.31: same grammar, same output, same exit status. Called as ipvsadm, ipvsadm\\-save or\n\
         ipvsadm\\-restore, for example through a symbolic link, it is exactly that program and has none of the options \
         and\ncommands that are described as additional here.\n",
    );
    section(&mut text, "COMMANDS");
    let is_command = |option: &&OptionSpec| matches!(option.meaning, Meaning::Command(_));
    for spec in OPTIONS.iter().filter(is_command) {
        // `-l` is an alias of `-L`.
        if spec.short != Some(b'l') {
            option(&mut text, spec);
        }
    }
    section(&mut text, "OPTIONS");
    for own in own::OPTIONS {
        let name = format!("{} {}", own.name, own.argument);
        let help = match own.place {
            Place::First => own.help.to_owned(),
            Place::Restore => format!("with -R: {}", own.help),
        };
        item(&mut text, &name, &help);
    }
    let rest = OPTIONS.iter().filter(|option| !is_command(option));
    for spec in rest.chain(OWN_OPTIONS) {
        option(&mut text, spec);
    }
    section(&mut text, "SCHEDULERS");
    for about in BUILT_IN {
        item(&mut text, about.name, about.summary);
    }
    section(&mut text, "ADDITIONAL COMMANDS");
    for command in operators {
        operator(&mut text, command);
    }
    section(&mut text, "ENVIRONMENT");
    for (name, help) in own::ENVIRONMENT {
        item(&mut text, name, help);
    }
    section(&mut text, "EXIT STATUS");
    for (status, meaning) in own::EXIT_STATUS {
        item(&mut text, status, meaning);
    }
    section(&mut text, "SEE ALSO");
    text.push_str(".BR lvs\\-dataplane (8),\n.BR lvsd (8),\n.BR lvsd.toml (5)\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::OPERATORS;

    #[test]
    fn manual_page_contains_all_commands_and_options() {
        let text = page(OPERATORS).replace("\\-", "-");
        let has = |word: &str| assert!(text.contains(word), "{word}");
        for operator in OPERATORS {
            has(&format!("\n.B {}", operator.name));
            for flag in operator.flags {
                has(&format!("\n.B {}", flag.name));
            }
        }
        for option in OPTIONS.iter().chain(OWN_OPTIONS) {
            has(&format!("--{}", option.long));
        }
        for option in own::OPTIONS {
            has(&format!("\n.B {}", option.name));
        }
        has(&format!(
            "--tun-type {}",
            lvs_core::tunnel::TunnelType::NAMES
        ));
        for name in own::schedulers() {
            has(&format!("\n.B {name}\n"));
        }
    }
}

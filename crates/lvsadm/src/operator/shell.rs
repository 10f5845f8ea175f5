//! Completions and the manual page, built from the tables that the parser and the commands go by.

use std::fmt::Write;

use lvs_core::ipvsadm::table::{Argument, OPTIONS, OWN_OPTIONS};

use super::{OPERATORS, Outcome, Trouble, Words};
use crate::program::Invocation;

/// The names of the schedulers, with something between them.
fn schedulers(between: &str) -> String {
    let names = lvs_core::sched::BUILT_IN.iter().map(|about| about.name);
    names.collect::<Vec<_>>().join(between)
}

/// Options of `lvsadm` itself.
const OWN: [(&str, &str, &str); 2] = [
    (
        "--socket",
        "ADDRESS",
        "control socket of the engine: a path, or @NAME for an abstract one",
    ),
    ("--json", "", "listings as JSON"),
];

pub(super) fn completions(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let text = match words.free.as_slice() {
        [shell] if shell == "bash" => bash(),
        [shell] if shell == "zsh" => zsh(),
        [shell] if shell == "fish" => fish(),
        _ => {
            return Err(Trouble::Usage(
                "it takes the name of a shell: bash, zsh or fish".into(),
            ));
        }
    };
    run.output.write_all(text.as_bytes())?;
    Ok(0)
}

pub(super) fn man(run: &mut Invocation<'_>, _: &Words) -> Outcome {
    run.output.write_all(page().as_bytes())?;
    Ok(0)
}

/// Long options, short options, without repetition.
fn options() -> Vec<String> {
    let mut words: Vec<String> = OWN.iter().map(|(name, ..)| (*name).to_owned()).collect();
    for option in OPTIONS.iter().chain(OWN_OPTIONS) {
        words.push(format!("--{}", option.long));
        if let Some(short) = option.short {
            words.push(format!("-{}", char::from(short)));
        }
    }
    words.sort();
    words.dedup();
    words
}

fn bash() -> String {
    let commands: Vec<&str> = OPERATORS.iter().map(|operator| operator.name).collect();
    let mut text = "# bash completion for lvsadm\n_lvsadm() {\n    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n    case $prev in\n".to_owned();
    let _ = writeln!(
        text,
        "        -s|--scheduler) COMPREPLY=($(compgen -W '{}' -- \"$cur\")); return ;;",
        schedulers(" ")
    );
    for option in OPTIONS.iter().chain(OWN_OPTIONS) {
        if let Argument::Required(argument) = option.argument
            && argument.contains('|')
        {
            let _ = writeln!(
                text,
                "        --{}) COMPREPLY=($(compgen -W '{}' -- \"$cur\")); return ;;",
                option.long,
                argument.replace('|', " ")
            );
        }
    }
    text.push_str("        --socket|-w) COMPREPLY=($(compgen -f -- \"$cur\")); return ;;\n    esac\n    case ${COMP_WORDS[1]} in\n");
    for operator in OPERATORS {
        let mut words: Vec<&str> = operator.flags.iter().map(|flag| flag.name).collect();
        words.push("--help");
        let first = operator.arguments.split(' ').next().unwrap_or_default();
        let choices: Vec<&str> = first.split('|').filter(|_| first.contains('|')).collect();
        let _ = writeln!(
            text,
            "        {}) COMPREPLY=($(compgen -W '{}' -- \"$cur\")); return ;;",
            operator.name,
            [choices, words].concat().join(" ")
        );
    }
    let _ = writeln!(
        text,
        "    esac\n    COMPREPLY=($(compgen -W '{} {}' -- \"$cur\"))\n}}\ncomplete -F _lvsadm lvsadm",
        commands.join(" "),
        options().join(" ")
    );
    text
}

/// For single quotes.
fn quoted(text: &str) -> String {
    text.replace('\'', "'\\''")
}

fn zsh() -> String {
    let mut text =
        "#compdef lvsadm\n_lvsadm() {\n    local -a commands options\n    commands=(\n".to_owned();
    for operator in OPERATORS {
        let _ = writeln!(
            text,
            "        '{}:{}'",
            operator.name,
            quoted(operator.summary)
        );
    }
    text.push_str("    )\n    options=(\n");
    let mut seen = Vec::new();
    for option in OPTIONS.iter().chain(OWN_OPTIONS) {
        let names = [
            Some(format!("--{}", option.long)),
            option.short.map(|short| format!("-{}", char::from(short))),
        ];
        for name in names.into_iter().flatten() {
            if !seen.contains(&name) {
                let _ = writeln!(text, "        '{name}:{}'", quoted(option.help));
                seen.push(name);
            }
        }
    }
    for (name, _, help) in OWN {
        let _ = writeln!(text, "        '{name}:{}'", quoted(help));
    }
    text.push_str("    )\n    case $words[2] in\n");
    for operator in OPERATORS {
        let mut words: Vec<&str> = operator.flags.iter().map(|flag| flag.name).collect();
        words.push("--help");
        let first = operator.arguments.split(' ').next().unwrap_or_default();
        words.extend(first.split('|').filter(|_| first.contains('|')));
        let _ = writeln!(
            text,
            "        {}) (( CURRENT > 2 )) && {{ compadd -- {}; return }} ;;",
            operator.name,
            words.join(" ")
        );
    }
    text.push_str("    esac\n    (( CURRENT == 2 )) && _describe command commands\n    _describe option options\n}\n_lvsadm \"$@\"\n");
    text
}

fn fish() -> String {
    let mut text = "# fish completion for lvsadm\ncomplete -c lvsadm -f\n".to_owned();
    let mut seen = Vec::new();
    for option in OPTIONS.iter().chain(OWN_OPTIONS) {
        let mut line = format!("complete -c lvsadm -l {}", option.long);
        if let Some(short) = option.short {
            let _ = write!(line, " -s {}", char::from(short));
        }
        match option.argument {
            Argument::Required(argument) if argument.contains('|') => {
                let _ = write!(line, " -x -a '{}'", argument.replace('|', " "));
            }
            Argument::Required("scheduler") => {
                let _ = write!(line, " -x -a '{}'", schedulers(" "));
            }
            Argument::Required(_) => line.push_str(" -x"),
            Argument::No | Argument::Optional(_) => {}
        }
        let _ = write!(line, " -d '{}'", quoted(option.help));
        if !seen.contains(&line) {
            let _ = writeln!(text, "{line}");
            seen.push(line);
        }
    }
    for (name, _, help) in OWN {
        let _ = writeln!(
            text,
            "complete -c lvsadm -l {} -d '{}'",
            name.trim_start_matches('-'),
            quoted(help)
        );
    }
    for operator in OPERATORS {
        let _ = writeln!(
            text,
            "complete -c lvsadm -n __fish_use_subcommand -a {} -d '{}'",
            operator.name,
            quoted(operator.summary)
        );
        for flag in operator.flags {
            let (kind, name) = match flag.name.strip_prefix("--") {
                Some(name) => ("-l", name),
                None => ("-s", flag.name.trim_start_matches('-')),
            };
            let argument = if flag.argument.is_empty() { "" } else { " -x" };
            let _ = writeln!(
                text,
                "complete -c lvsadm -n '__fish_seen_subcommand_from {}' {kind} {name}{argument} -d '{}'",
                operator.name,
                quoted(flag.help)
            );
        }
    }
    text
}

/// For roff: no escape, no request by accident.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) {
        format!("\\&{text}")
    } else {
        text
    }
}

fn page() -> String {
    let mut text = format!(
        ".TH LVSADM 8 \"\" \"lvsadm {}\" \"LVS in userspace\"\n.SH NAME\nlvsadm \\- administers a Linux Virtual Server in userspace\n.SH SYNOPSIS\n",
        env!("CARGO_PKG_VERSION")
    );
    text.push_str(".B lvsadm\n[\\-\\-socket ADDRESS] [\\-\\-json] COMMAND\n.br\n.B lvsadm\n.I word\n[argument ...]\n.SH DESCRIPTION\nThe command line of ipvsadm 1.31, for the engine lvs\\-dataplane. Called as ipvsadm, ipvsadm\\-save or ipvsadm\\-restore it does\nexactly what these do.\n.SH COMMANDS OF LVSADM ALONE\n");
    for operator in OPERATORS {
        let _ = writeln!(
            text,
            ".TP\n.B {} {}\n{}. {}",
            roff(operator.name),
            roff(operator.arguments),
            roff(&super::capital(operator.summary)),
            roff(operator.text)
        );
        for flag in operator.flags {
            let _ = writeln!(
                text,
                ".RS\n.TP\n.B {} {}\n{}\n.RE",
                roff(flag.name),
                roff(flag.argument),
                roff(flag.help)
            );
        }
    }
    text.push_str(".SH OPTIONS\n");
    for (name, argument, help) in OWN {
        let _ = writeln!(
            text,
            ".TP\n.B {} {}\n{}",
            roff(name),
            roff(argument),
            roff(help)
        );
    }
    for option in OPTIONS.iter().chain(OWN_OPTIONS) {
        let argument = match option.argument {
            Argument::No => String::new(),
            Argument::Required(name) => format!(" {name}"),
            Argument::Optional(name) => format!(" [{name}]"),
        };
        let short = option
            .short
            .map_or_else(String::new, |short| format!("-{}, ", char::from(short)));
        let _ = writeln!(
            text,
            ".TP\n.B {}\n{}",
            roff(&format!("{short}--{}{argument}", option.long)),
            roff(option.help)
        );
    }
    text.push_str(
        ".TP\n.B \\-\\-atomic\nwith \\-R: carry out all lines, or none if one is wrong\n",
    );
    text.push_str(&format!(
        ".SH SCHEDULERS\n{}; ewma is the director's own, and none takes no new connections.\n",
        schedulers(", ")
    ));
    text.push_str(".SH ENVIRONMENT\n.TP\n.B LVS_SOCKET\nas \\-\\-socket\n.TP\n.B LVS_AUTOSTART=1\nstart lvs\\-dataplane if no engine answers\n.SH EXIT STATUS\n0; 1 if a listing or one of the words failed; 2 for a wrong command line or without an engine; 255 if the engine refuses a change,\nas ipvsadm.\n.SH SEE ALSO\n.BR lvs\\-dataplane (8),\n.BR lvsd (8),\n.BR ipvsadm (8)\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_in_each_of_them() {
        for text in [bash(), zsh(), fish(), page().replace("\\-", "-")] {
            for operator in OPERATORS {
                assert!(text.contains(operator.name), "{}", operator.name);
            }
            for option in OPTIONS.iter().chain(OWN_OPTIONS) {
                assert!(text.contains(option.long), "{}", option.long);
            }
        }
    }
}

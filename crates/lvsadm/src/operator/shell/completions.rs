//! Completions for bash, zsh and fish.

use std::fmt::Write;

use lvs_core::ipvsadm::table::{Argument, OPTIONS, OWN_OPTIONS, OptionSpec};

use crate::operator::Operator;
use crate::own;

/// All long and short options, without duplicates.
fn options() -> Vec<String> {
    let mut words: Vec<String> = own::OPTIONS
        .iter()
        .map(|option| option.name.to_owned())
        .collect();
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

/// The names of all schedulers, separated by spaces.
fn schedulers() -> String {
    own::schedulers().collect::<Vec<_>>().join(" ")
}

/// The known values of an option, separated by spaces; `None` if none are known.
fn values(option: &OptionSpec) -> Option<String> {
    match option.argument {
        Argument::Required("scheduler") => Some(schedulers()),
        Argument::Required(argument) if argument.contains('|') => Some(argument.replace('|', " ")),
        _ => None,
    }
}

/// Returns the words that can follow the name of a command: the literal words of its synopsis, and
/// its options.
fn words_of(operator: &Operator) -> Vec<&'static str> {
    let synopsis = operator.arguments.split([' ', '[', ']', '|']);
    let literal = |word: &&str| word.len() > 1 && word.bytes().all(|b| b.is_ascii_lowercase());
    let mut words: Vec<&str> = synopsis.filter(literal).collect();
    words.extend(operator.flags.iter().map(|flag| flag.name));
    words.push("--help");
    words
}

/// Options with known values: the pattern for the shell's `case`, and the values.
fn with_values() -> impl Iterator<Item = (String, String)> {
    OPTIONS.iter().chain(OWN_OPTIONS).filter_map(|option| {
        let values = values(option)?;
        let short = option.short.map(|short| format!("-{}|", char::from(short)));
        let pattern = format!("{}--{}", short.unwrap_or_default(), option.long);
        Some((pattern, values))
    })
}

pub(super) fn bash(operators: &[Operator]) -> String {
    let commands: Vec<&str> = operators.iter().map(|operator| operator.name).collect();
    let mut text = "# bash completion for lvsadm\n_lvsadm() {\n    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n    case $prev in\n".to_owned();
    for (pattern, values) in with_values() {
        let _ = writeln!(
            text,
            "        {pattern}) COMPREPLY=($(compgen -W '{values}' -- \"$cur\")); return ;;"
        );
    }
    text.push_str("        --socket|-w) COMPREPLY=($(compgen -f -- \"$cur\")); return ;;\n    esac\n    case ${COMP_WORDS[1]} in\n");
    for operator in operators {
        let _ = writeln!(
            text,
            "        {}) COMPREPLY=($(compgen -W '{}' -- \"$cur\")); return ;;",
            operator.name,
            words_of(operator).join(" ")
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

/// Escapes single quotes, for a shell word in single quotes.
fn quoted(text: &str) -> String {
    text.replace('\'', "'\\''")
}

pub(super) fn zsh(operators: &[Operator]) -> String {
    let mut text =
        "#compdef lvsadm\n_lvsadm() {\n    local -a commands options\n    commands=(\n".to_owned();
    for operator in operators {
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
    for option in own::OPTIONS {
        let _ = writeln!(text, "        '{}:{}'", option.name, quoted(option.help));
    }
    text.push_str("    )\n    case $words[CURRENT-1] in\n");
    for (pattern, values) in with_values() {
        let _ = writeln!(text, "        {pattern}) compadd -- {values}; return ;;");
    }
    text.push_str("        --socket|-w) _files; return ;;\n    esac\n    case $words[2] in\n");
    for operator in operators {
        let _ = writeln!(
            text,
            "        {}) (( CURRENT > 2 )) && {{ compadd -- {}; return }} ;;",
            operator.name,
            words_of(operator).join(" ")
        );
    }
    text.push_str("    esac\n    (( CURRENT == 2 )) && _describe command commands\n    _describe option options\n}\n_lvsadm \"$@\"\n");
    text
}

pub(super) fn fish(operators: &[Operator]) -> String {
    let mut text = "# fish completion for lvsadm\ncomplete -c lvsadm -f\n".to_owned();
    let mut seen = Vec::new();
    for option in OPTIONS.iter().chain(OWN_OPTIONS) {
        let mut line = format!("complete -c lvsadm -l {}", option.long);
        if let Some(short) = option.short {
            let _ = write!(line, " -s {}", char::from(short));
        }
        match (option.argument, values(option)) {
            (Argument::Required(_), Some(values)) => {
                let _ = write!(line, " -x -a '{values}'");
            }
            (Argument::Required(_), None) => line.push_str(" -x"),
            (Argument::No | Argument::Optional(_), _) => {}
        }
        let _ = write!(line, " -d '{}'", quoted(option.help));
        if !seen.contains(&line) {
            let _ = writeln!(text, "{line}");
            seen.push(line);
        }
    }
    for option in own::OPTIONS {
        let _ = writeln!(
            text,
            "complete -c lvsadm -l {} -d '{}'",
            option.name.trim_start_matches('-'),
            quoted(option.help)
        );
    }
    for operator in operators {
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

#[cfg(test)]
mod tests {
    use lvs_core::tunnel::TunnelType;

    use super::*;
    use crate::operator::OPERATORS;

    #[test]
    fn completions_contain_all_commands_and_options() {
        for text in [bash(OPERATORS), zsh(OPERATORS), fish(OPERATORS)] {
            let has = |word: &str| assert!(text.contains(word), "no {word:?} in {text}");
            for operator in OPERATORS {
                has(operator.name);
                for flag in operator.flags {
                    has(flag.name.trim_start_matches('-'));
                }
            }
            for option in OPTIONS.iter().chain(OWN_OPTIONS) {
                has(option.long);
            }
            for option in own::OPTIONS {
                has(option.name.trim_start_matches('-'));
            }
        }
        for text in [bash(OPERATORS), zsh(OPERATORS), fish(OPERATORS)] {
            assert!(text.contains(&schedulers()));
            assert!(text.contains(&TunnelType::NAMES.replace('|', " ")));
        }
    }

    #[test]
    fn completions_offer_words_of_synopsis() {
        let words = |name: &str| {
            let operator = crate::operator::find(name.as_bytes()).expect("the command exists");
            words_of(operator)
        };
        assert_eq!(words("explain")[..3], ["tcp", "udp", "sctp"]);
        assert_eq!(
            words("local"),
            ["list", "add", "del", "hairpin", "on", "off", "--help"]
        );
        assert_eq!(words("mark")[..3], ["list", "add", "del"]);
        assert_eq!(words("sysctl"), ["--help"]);
    }
}

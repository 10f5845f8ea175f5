//! The protocol of HAProxy's agents (`agent-check`): one line of keywords.

use super::quoted;
use crate::health::{Advice, Weight};

/// Maximum length of a line in bytes.
pub(super) const LINE_MAX: usize = 1024;
/// HAProxy's own limit of a weight in percent.
const PERCENT_MAX: u16 = 25_600;

/// The content of a line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Parsed {
    /// The reason why the server is down; `None` if it is not.
    pub(super) down: Option<String>,
    /// The server's advice, from the other words.
    pub(super) advice: Advice,
}

/// Parses a line: words separated by spaces or commas, in upper or lower case; `#` begins a
/// description. An unknown word, or none at all, is an error.
pub(super) fn parse(line: &[u8]) -> Result<Parsed, String> {
    let text = String::from_utf8_lossy(line);
    let (words, description) = match text.split_once('#') {
        Some((words, description)) => (words, description.trim()),
        None => (text.as_ref(), ""),
    };
    let mut parsed = Parsed::default();
    let mut any = false;
    let words = words.split(|c: char| c.is_ascii_whitespace() || c == ',');
    for word in words.filter(|word| !word.is_empty()) {
        any = true;
        match word.to_ascii_lowercase().as_str() {
            "up" => parsed.down = None,
            down @ ("down" | "fail" | "failed" | "stopped") => {
                parsed.down = Some(match description {
                    "" => format!("it reports {down:?}"),
                    why => format!("it reports {down:?}: {}", quoted(why.as_bytes())),
                });
            }
            "ready" => parsed.advice.drains = Some(false),
            "drain" | "maint" => parsed.advice.drains = Some(true),
            other => match other.strip_suffix('%').map(str::parse::<u16>) {
                Some(Ok(percent)) if percent <= PERCENT_MAX => {
                    parsed.advice.weight = Some(Weight::Percent(percent));
                }
                // `maxconn` is ignored: a check cannot set a limit of connections.
                None if other.starts_with("maxconn:") => {}
                _ => {
                    return Err(format!(
                        "it sent the unknown word {}",
                        quoted(word.as_bytes())
                    ));
                }
            },
        }
    }
    match any {
        true => Ok(parsed),
        false => Err("its answer is empty".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_line_is_parsed_as_advice_or_down_and_unknown_words_are_refused() {
        let drains = |drains| Advice {
            weight: None,
            drains: Some(drains),
        };
        let percent = |n| Advice::weight(Weight::Percent(n));
        for (line, advice) in [
            ("up\r", Advice::NONE),
            ("UP 75%", percent(75)),
            ("100%,maxconn:30", percent(100)),
            ("drain", drains(true)),
            ("maint # back at ten", drains(true)),
            ("ready up", drains(false)),
            ("down up", Advice::NONE),
        ] {
            let parsed = Parsed { down: None, advice };
            assert_eq!(parse(line.as_bytes()), Ok(parsed), "{line}");
        }
        for (line, why) in [
            ("down", "it reports \"down\""),
            ("up stopped", "it reports \"stopped\""),
            (
                "fail#disk\x1b[2J full",
                "it reports \"fail\": \"disk\\u{1b}[2J full\"",
            ),
        ] {
            let parsed = parse(line.as_bytes()).expect("the line is valid");
            assert_eq!(parsed.down.as_deref(), Some(why));
        }
        for line in [
            "",
            "  \t",
            "#",
            "upp",
            "75",
            "-1%",
            "25601%",
            "99999999%",
            "\u{fffd}",
        ] {
            assert!(parse(line.as_bytes()).is_err(), "{line}");
        }
    }
}

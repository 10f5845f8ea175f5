//! Compares recorded output with that of this project's programs.

use std::collections::BTreeMap;

use super::Step;

/// Output and exit status of a command.
#[derive(Clone, Debug, Default)]
pub(super) struct Ran {
    pub(super) stdout: String,
    pub(super) stderr: String,
    pub(super) exit: i32,
}

/// The first line of a listing of connections.
pub(super) const CONNECTIONS: &str = "IPVS connection entries\n";

/// Whether `ran` equals the recording, except for differences that `step` permits. `took` is the
/// maximum duration of the recorded command in seconds; the remaining times in a listing of
/// connections may differ by `took` and a second, those of templates by more.
pub(super) fn same(step: &Step, ran: &Ran, took: f64) -> bool {
    if step.exit < 0 {
        // The recorded program crashed; here, refusing the line is correct.
        return ran.exit == 2 && ran.stdout == step.stdout;
    }
    if (&step.stderr, step.exit) != (&ran.stderr, ran.exit) {
        return false;
    }
    if step.stdout == ran.stdout {
        return true;
    }
    if step.stdout.starts_with(CONNECTIONS) {
        return connections(&step.stdout, &ran.stdout, took);
    }
    if step.unordered.is_none() && step.approximate.is_none() {
        return false;
    }
    let (recorded, ours) = if step.unordered.is_some() {
        (blocks(&step.stdout), blocks(&ran.stdout))
    } else {
        let lines = |text: &str| text.lines().map(str::to_owned).collect();
        (lines(&step.stdout), lines(&ran.stdout))
    };
    recorded.len() == ours.len()
        && recorded.iter().zip(&ours).all(|(recorded, ours)| {
            recorded == ours || step.approximate.is_some() && rates(recorded, ours)
        })
}

/// A listing as a sorted list of services, each with its servers in order.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks: Vec<String> = Vec::new();
    for line in text.lines() {
        match blocks.last_mut() {
            Some(block) if line.starts_with("  ->") || line.starts_with("-a ") => {
                block.push('\n');
                block.push_str(line);
            }
            _ => blocks.push(line.to_owned()),
        }
    }
    blocks.sort();
    blocks
}

/// Compares rates. They fall by a quarter with each tick of the estimator, whose phase is not
/// recorded; so the rates may differ by one tick.
fn rates(recorded: &str, ours: &str) -> bool {
    let number = |word: &str| {
        let (digits, unit) = match word.strip_suffix(['K', 'M', 'G']) {
            Some(digits) => (digits, &word[digits.len()..]),
            None => (word, ""),
        };
        Some((digits.parse::<f64>().ok()?, unit.to_owned()))
    };
    let (recorded, ours): (Vec<_>, Vec<_>) = (
        recorded.split_whitespace().collect(),
        ours.split_whitespace().collect(),
    );
    recorded.len() == ours.len()
        && recorded.iter().zip(&ours).all(|(recorded, ours)| {
            recorded == ours
                || match (number(recorded), number(ours)) {
                    (Some((recorded, unit)), Some((ours, same_unit))) => {
                        unit == same_unit
                            && recorded <= ours * 4.0 / 3.0 + 1.0
                            && recorded >= ours * 0.75 - 1.0
                    }
                    _ => false,
                }
        })
}

/// Seconds in an `expire` column.
fn seconds(text: &str) -> Option<i64> {
    let (minutes, seconds) = text.split_once(':')?;
    Some(minutes.parse::<i64>().ok()? * 60 + seconds.parse::<i64>().ok()?)
}

/// The headings, and the remaining seconds of each entry.
type Listing = (Vec<String>, BTreeMap<String, Vec<i64>>);

/// Compares connections in any order. Remaining times may differ by `took` seconds and one more,
/// those of templates by even more.
fn connections(recorded: &str, ours: &str, took: f64) -> bool {
    let parse = |text: &str| -> Option<Listing> {
        let lines: Vec<&str> = text.lines().collect();
        let (titles, entries) = lines.split_at_checked(2)?;
        let mut left: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for entry in entries {
            // "TCP 14:59  ESTABLISHED ...": without the time, but with every space.
            let (protocol, rest) = entry.split_at(entry.find(|c: char| c.is_ascii_digit())?);
            let (time, rest) = rest.split_once(' ')?;
            left.entry(format!("{protocol}{rest}"))
                .or_default()
                .push(seconds(time)?);
        }
        left.values_mut().for_each(|times| times.sort_unstable());
        Some((titles.iter().map(ToString::to_string).collect(), left))
    };
    let (Some((titles, recorded)), Some((own_titles, ours))) = (parse(recorded), parse(ours))
    else {
        return false;
    };
    #[expect(clippy::cast_possible_truncation, reason = "a few seconds")]
    let took = took.max(0.0).ceil() as i64;
    titles == own_titles
        && recorded.keys().eq(ours.keys())
        && recorded
            .iter()
            .zip(ours.values())
            .all(|((key, recorded), ours)| {
                // A template whose timer fired late and was set again; it is late by at most an
                // eighth of the timeout.
                let late = if is_template(key) { 1 + 60 / 8 } else { 1 };
                recorded.len() == ours.len()
                    && recorded
                        .iter()
                        .zip(ours)
                        .all(|(recorded, ours)| (ours - took - 1..=ours + late).contains(recorded))
            })
}

fn is_template(entry: &str) -> bool {
    let source = entry.split_whitespace().nth(2);
    source.is_some_and(|source| source.ends_with(":0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TITLES: &str = "IPVS connection entries\npro expire state\n";

    fn step(stdout: &str) -> Step {
        Step {
            stdout: stdout.to_owned(),
            ..Step::default()
        }
    }

    fn ran(stdout: &str) -> Ran {
        Ran {
            stdout: stdout.to_owned(),
            ..Ran::default()
        }
    }

    #[test]
    fn listings_that_differ_only_in_order_and_by_one_second_are_equal() {
        let a = "TCP 14:59  ESTABLISHED 1.1.1.1:1 2.2.2.2:2 3.3.3.3:3\n";
        let b = "UDP 04:59  UDP         1.1.1.1:1 2.2.2.2:2 3.3.3.3:3\n";
        let recorded = step(&format!("{TITLES}{a}{b}"));
        let check = |text: String| same(&recorded, &ran(&text), 0.0);
        assert!(check(format!("{TITLES}{b}{a}")));
        assert!(check(format!("{TITLES}{b}{}", a.replace("14:59", "15:00"))));
        assert!(!check(format!(
            "{TITLES}{b}{}",
            a.replace("14:59", "15:01")
        )));
        assert!(same(
            &recorded,
            &ran(&format!("{TITLES}{b}{}", a.replace("14:59", "15:01"))),
            0.4
        ));
        assert!(!check(format!("{TITLES}{a}{a}{b}")));
        assert!(!check(format!("{TITLES}{a}{}", b.replace("  UDP", " UDP"))));
    }

    #[test]
    fn rates_differing_by_one_estimator_tick_are_equal() {
        let recorded = Step {
            approximate: Some(true.into()),
            ..step("TCP 10.0.0.1:80 0 136 0 8165915 0\n")
        };
        assert!(same(
            &recorded,
            &ran("TCP 10.0.0.1:80 0 160 0 9568882 0\n"),
            0.0
        ));
        assert!(!same(
            &recorded,
            &ran("TCP 10.0.0.1:80 0 160 0 99568882 0\n"),
            0.0
        ));
        assert!(!same(
            &recorded,
            &ran("TCP 10.0.0.2:80 0 136 0 8165915 0\n"),
            0.0
        ));
    }

    #[test]
    fn differing_output_is_mismatch_but_refusal_equals_recorded_crash() {
        assert!(!same(&step("a\n"), &ran("a"), 0.0));
        let crashed = Step {
            exit: -11,
            ..Step::default()
        };
        let refused = Ran {
            exit: 2,
            ..Ran::default()
        };
        assert!(same(&crashed, &refused, 0.0));
        assert!(!same(&crashed, &Ran::default(), 0.0));
    }
}

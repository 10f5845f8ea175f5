//! `lvsadm mark`: the rules that set firewall marks on packets.

use lvs_core::api::{Call, MarkText};

use super::{Outcome, Trouble, Words, change, connect};
use crate::invocation::Invocation;
use crate::session::json_list;

/// The options of a mark rule: [`lvs_core::mark::MarkRule::parse`] reads them.
const OPTIONS: [&str; 8] = [
    "--interface",
    "--source",
    "--destination",
    "--protocol",
    "--ports",
    "--mark",
    "--drop",
    "--host",
];

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let free: Vec<&str> = words.free.iter().map(String::as_str).collect();
    match free[..] {
        ["list"] | [] => list(run),
        ["add"] => {
            let mut rule = Vec::new();
            for option in OPTIONS {
                if let Some(value) = words.value(option) {
                    rule.push(option);
                    rule.extend((!value.is_empty()).then_some(value));
                }
            }
            let rule = rule.join(" ");
            let position = words.number("--position")?;
            let mut client = connect(run)?;
            change(run, &mut client, &Call::MarkAdd { rule, position })?;
            Ok(0)
        }
        ["del", number] => {
            let position = number.parse().map_err(|_| {
                Trouble::Usage(format!(
                    "{number}: expected the number of a rule; `lvsadm mark list` shows the rules"
                ))
            })?;
            let mut client = connect(run)?;
            change(run, &mut client, &Call::MarkDelete { position })?;
            Ok(0)
        }
        _ => Err(Trouble::Usage(
            "expected list, add OPTIONS, or del N".into(),
        )),
    }
}

fn list(run: &mut Invocation<'_>) -> Outcome {
    let rules: Vec<MarkText> = connect(run)?.collect(&Call::MarkList {})?;
    if run.json {
        json_list(run, &rules)?;
        return Ok(0);
    }
    if rules.is_empty() {
        writeln!(run.output, "no rules")?;
    }
    for MarkText {
        position,
        rule,
        packets,
    } in rules
    {
        writeln!(run.output, "{position:>4} {packets:>12} packets  {rule}")?;
    }
    Ok(0)
}

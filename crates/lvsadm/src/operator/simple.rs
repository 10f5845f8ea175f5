//! `lvsadm drops` and `lvsadm sysctl`.

use lvs_core::api::{Call, ReasonCount, Sysctl};
use serde::de::IgnoredAny;

use super::{Outcome, Trouble, Words, connect};
use crate::program::Invocation;
use crate::session::json_list;

pub(super) fn drops(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    if let Some(word) = words.free.first() {
        return Err(Trouble::Usage(format!("unexpected argument {word}")));
    }
    let mut client = connect(run)?;
    let mut reasons: Vec<ReasonCount> = client.collect(&Call::Drops {})?;
    if !words.has("--all") {
        reasons.retain(|reason| reason.count > 0);
    }
    reasons.sort_by(|a, b| (&b.action, a.count).cmp(&(&a.action, b.count)).reverse());
    if run.json {
        json_list(run, &reasons)?;
        return Ok(0);
    }
    if reasons.is_empty() {
        writeln!(run.output, "no packet was dropped or left to the host")?;
    }
    let mut action = "";
    for reason in &reasons {
        if reason.action != action {
            let title = match reason.action.as_str() {
                "drop" => "Dropped",
                "host" => "Left to this host",
                other => other,
            };
            writeln!(run.output, "{title}:")?;
            action = &reason.action;
        }
        writeln!(run.output, "{:>12}  {}", reason.count, reason.reason)?;
        for line in wrap(&reason.help, 88) {
            writeln!(run.output, "              {line}")?;
        }
        for (n, line) in wrap(&reason.remedy, 85).iter().enumerate() {
            let arrow = if n == 0 { "->" } else { "  " };
            writeln!(run.output, "              {arrow} {line}")?;
        }
    }
    Ok(0)
}

/// Cuts a text into lines.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && line.len() + 1 + word.len() > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    if !line.is_empty() {
        lines.push(line);
    }
    lines
}

pub(super) fn sysctl(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let mut client = connect(run)?;
    let all = [String::new()];
    let asked = if words.free.is_empty() {
        &all[..]
    } else {
        &words.free
    };
    let mut values: Vec<Sysctl> = Vec::new();
    for word in asked {
        let word = word.strip_prefix("net.ipv4.vs.").unwrap_or(word);
        if let Some((name, value)) = word.split_once('=') {
            client.call::<IgnoredAny>(&Call::SysctlSet(Sysctl {
                name: name.trim().to_owned(),
                value: value.trim().to_owned(),
            }))?;
        } else {
            let name = (!word.is_empty()).then(|| word.to_owned());
            values.extend(client.collect::<Sysctl>(&Call::SysctlGet { name })?);
        }
    }
    if run.json {
        json_list(run, &values)?;
    } else {
        for Sysctl { name, value } in values {
            writeln!(run.output, "{name} = {value}")?;
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::wrap;

    #[test]
    fn lines_are_cut_between_words() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("incomprehensible", 3), ["incomprehensible"]);
        assert!(wrap(" ", 3).is_empty());
    }
}

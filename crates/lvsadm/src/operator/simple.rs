//! `lvsadm drops` and `lvsadm sysctl`.

use lvs_core::Sysctls;
use lvs_core::api::{Call, Done, ReasonCount, Sysctl};
use lvs_dataplane::control::Error;

use super::{Outcome, Trouble, Words, connect};
use crate::program::Invocation;
use crate::session::{json_list, warn};

pub(super) fn drops(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    words.no_arguments()?;
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
                "kernel" => "Forwarded in the kernel",
                "up" => "Handed to the engine by the path in the kernel",
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

/// Breaks a text into lines.
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
            let (name, value) = (name.trim(), value.trim());
            let done: Done = client
                .call(&Call::SysctlSet(Sysctl {
                    name: name.to_owned(),
                    value: value.to_owned(),
                }))
                .map_err(|error| sysctl_trouble(name, Some(value), error))?;
            warn(run, &done)?;
        } else {
            let name = (!word.is_empty()).then(|| word.to_owned());
            let listed = client.collect::<Sysctl>(&Call::SysctlGet { name });
            values.extend(listed.map_err(|error| sysctl_trouble(word, None, error))?);
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

/// Why the engine refused a name or a value.
fn sysctl_trouble(name: &str, value: Option<&str>, error: Error) -> Trouble {
    let Error::Refused(_) = error else {
        return error.into();
    };
    if !Sysctls::NAMES.contains(&name) {
        return Trouble::Engine(format!(
            "{name:?}: no such sysctl; `lvsadm sysctl` lists them"
        ));
    }
    match value {
        Some(value) => Trouble::Engine(format!("{name}={value}: expected {}", range(name))),
        None => error.into(),
    }
}

/// The values that a sysctl takes.
fn range(name: &str) -> &'static str {
    match name {
        "drop_entry" | "drop_packet" | "secure_tcp" | "sync_retries" => "0 to 3",
        "est_cpulist" => "a list of processors such as 0-3,5, or nothing",
        "est_nice" => "-20 to 19",
        "lblc_expiration" | "lblcr_expiration" | "sync_refresh_period" => "0 to 2147483647",
        "sync_ports" => "a power of two: 1, 2, 4 ...",
        "sync_threshold" => {
            "a threshold and a period, as \"3 50\": the period 0, or above the threshold"
        }
        "sync_version" => "0 or 1",
        _ => "a whole number",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_the_settings() {
        for name in Sysctls::NAMES {
            let takes = |value: i64| Sysctls::default().set(name, &value.to_string()).is_ok();
            let (low, high) = match range(name) {
                "a whole number" => (i64::from(i32::MIN), i64::from(i32::MAX)),
                "0 or 1" => (0, 1),
                text => match text.split_once(" to ") {
                    Some((low, high)) => (low.parse().unwrap(), high.parse().unwrap()),
                    None => continue,
                },
            };
            assert!(takes(low) && takes(high), "{name}");
            assert!(!takes(low - 1) && !takes(high + 1), "{name}");
        }
    }

    #[test]
    fn lines_are_cut_between_words() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("incomprehensible", 3), ["incomprehensible"]);
        assert!(wrap(" ", 3).is_empty());
    }
}

//! `lvsadm drops`, `lvsadm workers` and `lvsadm sysctl`.

use std::cmp::Reverse;

use lvs_api::Error;
use lvs_api::guidance::{for_lvsd, manages_any};
use lvs_core::api::{Call, Done, Info, ReasonCount, ServiceInfo, Sysctl};
use lvs_core::settings::Sysctls;

use super::doctor::Since;
use super::doctor::dataplane::{named, of_services};
use super::{Outcome, Trouble, Words, connect};
use crate::invocation::Invocation;
use crate::session::{json_list, warn};

pub(super) fn drops(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    words.no_arguments()?;
    let mut client = connect(run)?;
    let mut reasons: Vec<ReasonCount> = client.collect(&Call::Drops {})?;
    let services: Vec<ServiceInfo> = client.collect(&Call::ServiceList { service: None })?;
    if manages_any(&services) {
        for_lvsd(&mut reasons);
    }
    if !words.has("--all") {
        reasons.retain(|reason| reason.packets.count > 0);
    }
    let order = |reason: &ReasonCount| (reason.action.clone(), Reverse(reason.packets.count));
    reasons.sort_by_key(order);
    if run.json {
        json_list(run, &reasons)?;
        return Ok(0);
    }
    if reasons.is_empty() {
        writeln!(run.output, "no packet was dropped or passed to the host")?;
    }
    let mut action = "";
    for reason in &reasons {
        if reason.action != action {
            let title = match reason.action.as_str() {
                "drop" => "Dropped",
                "host" => "Passed to this host",
                "kernel" => "Forwarded by the kernel fast path",
                "up" => "Passed to the dataplane by the kernel fast path",
                "sync" => "Synchronisation",
                other => other,
            };
            writeln!(run.output, "{title}:")?;
            action = &reason.action;
        }
        writeln!(
            run.output,
            "{:>12}  {}",
            reason.packets.count, reason.reason
        )?;
        for line in wrap(&reason.help, 88) {
            writeln!(run.output, "              {line}")?;
        }
        let of = of_services(&services, &reason.reason, Since::Start);
        if reason.action == "drop" && !of.is_empty() {
            writeln!(run.output, "              services: {}", named(&of))?;
        }
        for (n, line) in wrap(&reason.fix, 85).iter().enumerate() {
            let arrow = if n == 0 { "->" } else { "  " };
            writeln!(run.output, "              {arrow} {line}")?;
        }
    }
    Ok(0)
}

pub(super) fn workers(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    words.no_arguments()?;
    let info: Info = connect(run)?.call(&Call::Info {})?;
    if run.json {
        json_list(run, &info.workers)?;
        return Ok(0);
    }
    let heads = [
        "WORKER",
        "CPU",
        "CONNECTIONS",
        "PACKETS",
        "LOST",
        "HANDED OVER",
        "TAKEN",
        "NO ROOM",
        "DEMOTED",
    ];
    let [
        number,
        cpu,
        connections,
        packets,
        lost,
        handed,
        taken,
        busy,
        demoted,
    ] = heads;
    writeln!(
        run.output,
        "{number:6} {cpu:>4} {connections:>12} {packets:>14} {lost:>10} {handed:>12} {taken:>12} {busy:>10} {demoted:>8}"
    )?;
    for worker in &info.workers {
        let cpu = worker.cpu.map_or("any".to_owned(), |cpu| cpu.to_string());
        writeln!(
            run.output,
            "{:6} {cpu:>4} {:>12} {:>14} {:>10} {:>12} {:>12} {:>10} {:>8}",
            worker.number,
            worker.connections,
            worker.packets,
            worker.lost,
            worker.handed_over,
            worker.taken,
            worker.busy,
            worker.demoted
        )?;
    }
    Ok(0)
}

/// Breaks a text into lines of at most `width` characters. A longer word has a line of its own.
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

/// Why the dataplane refused the name or value of a sysctl.
fn sysctl_trouble(name: &str, value: Option<&str>, error: Error) -> Trouble {
    let Error::Refused(_) = error else {
        return error.into();
    };
    match (Sysctls::values(name), value) {
        (Err(_), _) => Trouble::Dataplane(format!(
            "{name:?}: no such sysctl; `lvsadm sysctl` lists them"
        )),
        (Ok(values), Some(value)) => {
            Trouble::Dataplane(format!("{name}={value}: expected {values}"))
        }
        (Ok(_), None) => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_wrapped_between_words() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("incomprehensible", 3), ["incomprehensible"]);
        assert!(wrap(" ", 3).is_empty());
    }
}

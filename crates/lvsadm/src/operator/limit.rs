//! `lvsadm limit`: the limits of a service.

use lvs_core::api::{Call, ServiceInfo, ServiceSpec};
use lvs_core::settings::Limits;
use serde::de::IgnoredAny;

use super::{Outcome, Trouble, Words, connect, service_named, service_text};
use crate::invocation::Invocation;

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let [service] = words.free.as_slice() else {
        return Err(Trouble::Usage("a service is required".into()));
    };
    let service = service_named(run, service)?;
    let mut client = connect(run)?;
    let known: Vec<ServiceInfo> = client.collect(&Call::ServiceList {
        service: Some(service),
    })?;
    let name = service_text(service);
    let Some(info) = known.into_iter().next() else {
        return Err(Trouble::Dataplane(format!(
            "there is no service {name}: `lvsadm -Ln' lists the services"
        )));
    };
    let wanted = wanted(info.config.extras.limits, words)?;
    if wanted != info.config.extras.limits {
        let mut config = info.config;
        config.extras.limits = wanted;
        client.call::<IgnoredAny>(&Call::ServiceEdit(ServiceSpec {
            service,
            config,
            owner: info.owner,
        }))?;
    }
    writeln!(run.output, "{name}: {}", text(&wanted))?;
    Ok(0)
}

/// The present limits, or none with `--off`, with the changes on the command line.
fn wanted(now: Limits, words: &Words) -> Result<Limits, Trouble> {
    let mut limits = if words.has("--off") {
        Limits::default()
    } else {
        now
    };
    for (flag, place) in [
        ("--connections", &mut limits.connections),
        ("--rate", &mut limits.rate),
        ("--source-rate", &mut limits.source_rate),
    ] {
        if let Some(text) = words.value(flag) {
            *place = number(flag, text, u32::MAX)?;
        }
    }
    for (flag, place, most) in [
        ("--source-bits-v4", &mut limits.source_bits_v4, 32),
        ("--source-bits-v6", &mut limits.source_bits_v6, 128),
    ] {
        if let Some(text) = words.value(flag) {
            *place = u8::try_from(number(flag, text, most)?).unwrap_or(0);
        }
    }
    Ok(limits)
}

fn number(flag: &str, text: &str, most: u32) -> Result<u32, Trouble> {
    let number = text.parse().ok().filter(|&n| n <= most);
    number
        .ok_or_else(|| Trouble::Usage(format!("{flag} {text}: expected a number from 0 to {most}")))
}

fn text(limits: &Limits) -> String {
    let mut parts = Vec::new();
    if limits.connections > 0 {
        parts.push(format!("{} connections", limits.connections));
    }
    if limits.rate > 0 {
        parts.push(format!("{} new connections a second", limits.rate));
    }
    if limits.source_rate > 0 {
        let bits = |bits: u8, default: u8| if bits == 0 { default } else { bits };
        parts.push(format!(
            "{} new connections a second from one source (IPv4 /{}, IPv6 /{})",
            limits.source_rate,
            bits(limits.source_bits_v4, 32),
            bits(limits.source_bits_v6, 64)
        ));
    }
    if parts.is_empty() {
        return "no limits".into();
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_service_are_formatted_and_invalid_numbers_refused() {
        assert_eq!(text(&Limits::default()), "no limits");
        let limits = Limits {
            connections: 5,
            source_rate: 3,
            source_bits_v4: 24,
            ..Limits::default()
        };
        assert_eq!(
            text(&limits),
            "5 connections, 3 new connections a second from one source (IPv4 /24, IPv6 /64)"
        );
        assert!(number("--rate", "-1", u32::MAX).is_err());
        assert!(number("--source-bits-v4", "33", 32).is_err());
    }
}

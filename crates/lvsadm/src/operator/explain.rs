//! `lvsadm explain`: the decision about a new packet, and its reason.

use std::io::{self, Write};

use lvs_core::Protocol;
use lvs_core::api::Call;
use lvs_core::explain::Explanation;

use super::{Outcome, Trouble, Words, connect, protocol};
use crate::invocation::Invocation;
use crate::session::json;

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let call = question(words)?;
    let answer: Explanation = connect(run)?.call(&call)?;
    if run.json {
        json(run, &answer)?;
        run.output.write_all(b"\n")?;
    } else {
        print(run.output, &answer)?;
    }
    Ok(0)
}

/// Converts the command line to the call of the control socket.
fn question(words: &Words) -> Result<Call, Trouble> {
    let [name, client, virt] = words.free.as_slice() else {
        return Err(Trouble::Usage(
            "expected a protocol and two addresses".into(),
        ));
    };
    let protocol = protocol(name)
        .filter(|&protocol| protocol != Protocol::ICMP)
        .ok_or_else(|| Trouble::Usage(format!("{name}: expected tcp, udp or sctp")))?;
    let address = |text: &String| {
        text.parse().map_err(|_| {
            Trouble::Usage(format!(
                "{text}: expected an address with a port, such as 192.0.2.1:80 or [2001:db8::1]:80"
            ))
        })
    };
    Ok(Call::Explain {
        protocol: protocol.0,
        client: address(client)?,
        virt: address(virt)?,
        mark: words.number("--mark")?,
        interface: words.value("--interface").map(str::to_owned),
    })
}

fn print(out: &mut dyn Write, answer: &Explanation) -> io::Result<()> {
    match (answer.mark, answer.mark_why.as_str()) {
        (0, "") => {}
        (0, why) => writeln!(out, "mark        none: {why}")?,
        (mark, why) => writeln!(out, "mark        {mark}: {why}")?,
    }
    match &answer.service {
        Some(service) => writeln!(out, "service     {service}: {}", answer.service_why)?,
        None => writeln!(out, "service     none: {}", answer.service_why)?,
    }
    match &answer.connection {
        Some(connection) => writeln!(out, "connection  {connection}")?,
        None => writeln!(out, "connection  none")?,
    }
    if let Some(template) = &answer.template {
        writeln!(out, "template    {template}")?;
    } else if !answer.template_why.is_empty() {
        writeln!(out, "template    none: {}", answer.template_why)?;
    }
    if answer.service.is_some() {
        writeln!(out, "scheduler   {}", answer.scheduler)?;
        if let Some(slot) = answer.slot {
            writeln!(out, "slot        {} of {}", slot.number, slot.of)?;
        }
        writeln!(out, "servers     {}", answer.candidates.len())?;
    }
    for candidate in &answer.candidates {
        let mark = if answer.server == Some(candidate.server) {
            "->"
        } else {
            "  "
        };
        writeln!(
            out,
            " {mark} {:<28} weight {:<5} active {:<6} inactive {:<6} {}",
            candidate.server, candidate.weight, candidate.active, candidate.inactive, candidate.why
        )?;
    }
    match answer.fast_path {
        Some(true) => writeln!(out, "fast path   yes")?,
        Some(false) => writeln!(out, "fast path   no: {}", answer.fast_path_why)?,
        None => {}
    }
    writeln!(out, "verdict     {}", answer.verdict)
}

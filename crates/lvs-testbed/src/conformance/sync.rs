//! Replays cases of connection synchronisation (the kind `sync`): compares the messages of a
//! master, and the connections of a backup after it has received messages.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, anyhow};
use lvs_core::sync::{Backup, Master};
use lvs_core::{Forwarding, ServerConfig, ServiceKey};
use serde_json::Value;

use super::bed::{Bed, Emitted, port_name, port_named};
use super::case::{Halt, Json, Replayed, hex, seconds, sysctl_text, unhex};
use super::frames;
use super::report::Log;
use super::steps::compare_conns;

/// Creates the backup daemon that a JSON object describes.
pub(super) fn backup(value: &Value) -> anyhow::Result<Backup> {
    let maxlen = value
        .maybe_number("maxlen")
        .or(value.maybe_number("sync-maxlen"));
    let group = value
        .maybe_text("group")
        .or(value.maybe_text("mcast-group"));
    Ok(Backup::new(
        u8::try_from(value.number("syncid")?)?,
        maxlen.map(u16::try_from).transpose()?,
        1500,
        group.is_some_and(|group| group.contains(':')),
    ))
}

fn master(value: &Value) -> anyhow::Result<Master> {
    let maxlen = value.maybe_number("sync-maxlen");
    let group = value.maybe_text("mcast-group");
    Ok(Master::new(
        u8::try_from(value.number("syncid")?)?,
        maxlen.map(u16::try_from).transpose()?,
        group.is_some_and(|group| group.contains(':')),
    ))
}

/// Passes one datagram, or a sequence of datagrams, to a backup, and compares its connections and
/// the servers' connection counts.
pub(super) fn replay_backup(case: &Value, log: &mut Log) -> Replayed<()> {
    let mut bed = Bed::new(4096, log)?;
    bed.set_up(case)?;
    let settings = backup(case.get("backup").context("the case has no `backup`")?)?;
    bed.change().0.start_backup(settings)?;
    for service in case.items("services") {
        bed.add_service(service, None)?;
    }
    let alone = std::slice::from_ref(case);
    let steps = case
        .get("steps")
        .and_then(Value::as_array)
        .map_or(alone, Vec::as_slice);
    for (number, step) in steps.iter().enumerate() {
        log.at(number, step.maybe_text("op"));
        if step.maybe_text("op") == Some("ipvsadm") {
            ipvsadm(&mut bed, step.text("args")?)?;
            continue;
        }
        let message = step.frame("payload")?;
        bed.director.handle_sync(&message, bed.now);
        bed.director.advance(bed.now);
        compare_conns(&bed, step, true, false, log)?;
        compare_destinations(&bed, step, log)?;
    }
    Ok(())
}

/// Passes frames to a director with a master, and compares its datagrams, the sent frames and the
/// connections.
pub(super) fn replay_master(case: &Value, log: &mut Log) -> Replayed<()> {
    let config = case.get("config").context("the case has no `config`")?;
    let mut bed = Bed::new(8192, log)?;
    bed.set_up(config)?;
    for daemon in config.items("daemons") {
        if daemon.maybe_text("role") == Some("backup") {
            bed.change().0.start_backup(backup(daemon)?)?;
        } else {
            bed.change().0.start_master(master(daemon)?)?;
        }
    }
    // The FTP helper was loaded when these cases were recorded.
    bed.change().0.set_ftp_ports(vec![21])?;
    if config.get("rules").is_some() {
        for mark in config.items("marks") {
            bed.route_to_host(super::case::prefix(mark.text("dst")?)?);
        }
    }
    for service in config.items("services") {
        bed.add_service(service, None)?;
    }
    let mut sent: Vec<(i64, String)> = Vec::new();
    for (number, step) in case.list("steps")?.iter().enumerate() {
        log.at(number, step.maybe_text("op"));
        match step.maybe_text("op") {
            None => {
                let port = port_named(step.text("dev")?)
                    .context("the step names a device other than `cl` and `sv`")?;
                let out = bed.inject(port, &step.frame("frame")?);
                compare_out(step, &out, log);
            }
            Some("wait") => {
                // The daemon checks once a second.
                let mut left = seconds(step)?;
                while !left.is_zero() {
                    let part = left.min(Duration::from_secs(1));
                    left -= part;
                    bed.wait(part);
                    while let Some(message) = bed.director.take_sync_message(bed.now) {
                        sent.push((i64::try_from(number).unwrap_or(-1), hex(&message.bytes)));
                    }
                }
            }
            Some("sync") => {
                let message = unhex(step.text("payload")?)?;
                bed.director.handle_sync(&message, bed.now);
            }
            Some("sysctl") => {
                let value = step.get("value").map(sysctl_text).unwrap_or_default();
                let name = step.text("name")?;
                bed.change().0.set_sysctl(name, &value)?;
            }
            Some("conns") => {
                compare_conns(&bed, step, true, false, log)?;
                compare_destinations(&bed, step, log)?;
            }
            // The command only lists the daemons.
            Some("ipvsadm") => {}
            Some(other) => return Err(Halt::Unsupported(format!("step {other:?}"))),
        }
    }
    let recorded: Vec<(i64, &str)> = case
        .list("datagrams")?
        .iter()
        .map(|datagram| Ok((datagram.number("after_step")?, datagram.text("payload")?)))
        .collect::<anyhow::Result<_>>()?;
    log.compare("number of datagrams", &recorded.len(), &sent.len());
    for (number, (recorded, sent)) in recorded.iter().zip(&sent).enumerate() {
        log.compare(
            &format!("datagram {number}"),
            recorded,
            &(sent.0, sent.1.as_str()),
        );
    }
    Ok(())
}

/// Compares the links of frames, their destination MAC addresses, and their outer IP addresses,
/// protocols and ports.
fn compare_out(step: &Value, sent: &[Emitted], log: &mut Log) {
    let expected: Vec<String> = step
        .items("out")
        .iter()
        .map(|out| {
            let ports = out.items("ports").iter().map(Value::to_string);
            format!(
                "{} {} {} {} {} {}",
                out.maybe_text("dev").unwrap_or_default(),
                out.maybe_text("mac").unwrap_or_default(),
                out.maybe_text("src").unwrap_or_default(),
                out.maybe_text("dst").unwrap_or_default(),
                out.maybe_number("proto").unwrap_or_default(),
                ports.collect::<Vec<_>>().join(",")
            )
        })
        .collect();
    let got: Vec<String> = sent
        .iter()
        .map(|emitted| {
            let Some(read) = frames::read(emitted.packet()) else {
                return "unreadable".to_owned();
            };
            let ports = if matches!(read.protocol, 6 | 17 | 132) {
                format!("{},{}", read.src.port(), read.dst.port())
            } else {
                String::new()
            };
            let mac: Vec<String> = emitted
                .frame
                .iter()
                .take(6)
                .map(|byte| format!("{byte:02x}"))
                .collect();
            format!(
                "{} {} {} {} {} {ports}",
                port_name(emitted.port),
                mac.join(":"),
                read.src.ip(),
                read.dst.ip(),
                read.protocol
            )
        })
        .collect();
    log.compare("out", &expected, &got);
}

/// Compares the servers' connection counts with those of `/proc/net/ip_vs`.
fn compare_destinations(bed: &Bed, step: &Value, log: &mut Log) -> anyhow::Result<()> {
    let Some(list) = step.get("destinations").and_then(Value::as_array) else {
        return Ok(());
    };
    let mut expected = list
        .iter()
        .map(|row| {
            Ok(format!(
                "{} {} {} {}",
                row.text("service")?,
                row.text("dest")?,
                row.number("active")?,
                row.number("inactive")?
            ))
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut got = Vec::new();
    for service in bed.director.control.services() {
        let name = match service.key() {
            ServiceKey::Address { protocol, addr } => format!("{protocol} {addr}"),
            ServiceKey::Mark { mark, .. } => format!("FWM {mark}"),
        };
        for server in service.servers() {
            let (active, inactive) = (server.active(), server.inactive());
            got.push(format!("{name} {} {active} {inactive}", server.addr()));
        }
    }
    expected.sort();
    got.sort();
    log.compare("destinations", &expected, &got);
    Ok(())
}

/// Runs one of the ipvsadm commands that occur in recordings, such as `-a -t SERVICE -r SERVER -m
/// -w WEIGHT`.
fn ipvsadm(bed: &mut Bed, arguments: &str) -> Replayed<()> {
    let mut words = arguments.split_whitespace();
    let mut command = None;
    let (mut key, mut server) = (None, None);
    let mut config = ServerConfig::new(1, Forwarding::Route);
    while let Some(word) = words.next() {
        let mut addr = || -> anyhow::Result<SocketAddr> {
            let text = words.next().context("an address is missing")?;
            text.parse()
                .context("the argument is not an address with a port")
        };
        match word {
            "-a" | "-d" | "-e" => command = Some(word),
            "-t" => key = Some(ServiceKey::tcp(addr()?)),
            "-u" => key = Some(ServiceKey::udp(addr()?)),
            "-r" => server = Some(addr()?),
            "-m" => config.forwarding = Forwarding::Nat,
            "-g" => config.forwarding = Forwarding::Route,
            "-i" => config.forwarding = Forwarding::Tunnel,
            "-w" => {
                let weight = words.next().and_then(|weight| weight.parse().ok());
                config.weight = weight.context("a weight is missing")?;
            }
            other => return Err(unknown(other).into()),
        }
    }
    let now = bed.now;
    let (control, _) = bed.change();
    match (command, key, server) {
        (Some("-a"), Some(key), Some(server)) => control.add_server(&key, server, &config, now)?,
        (Some("-e"), Some(key), Some(server)) => control.edit_server(&key, server, &config)?,
        (Some("-d"), Some(key), Some(server)) => control.delete_server(&key, server, now)?,
        _ => return Err(unknown(arguments).into()),
    }
    bed.follow();
    Ok(())
}

fn unknown(what: &str) -> anyhow::Error {
    anyhow!("the recording has an unsupported command or option of ipvsadm: {what}")
}

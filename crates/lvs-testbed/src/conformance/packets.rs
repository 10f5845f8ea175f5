//! Replays cases with recorded frames (the kinds `packets`, `ftp`, `stats` and `proc`). After each
//! received frame, compares the sent frames.

use std::collections::HashMap;
use std::net::SocketAddr;

use anyhow::{Context, anyhow};
use lvs_core::api::{Info, WorkerInfo};
use lvs_core::stats::{Counts, Stats};
use lvs_core::{Protocol, ServiceKey, proc};
use lvs_packet::parse;
use lvs_packet::wire::checksum::Sum;
use lvs_packet::wire::{ETHERNET_LEN, be16};
use serde_json::Value;

use super::bed::{Bed, Emitted, KERNEL_TABLE_SIZE, port_name, port_named};
use super::case::{Halt, Json, Replayed, hex, place, seconds, service_key, sysctl_text};
use super::frames;
use super::report::Log;
use super::steps::{compare_conns, later};

pub(super) fn replay(case: &Value, log: &mut Log) -> Replayed<()> {
    let config = case.get("config").context("the case has no `config`")?;
    let mut bed = Bed::new(4096, log)?;
    bed.set_up(config)?;
    if super::kind(case) == "ftp" {
        bed.change().0.set_ftp_ports(vec![21])?;
    }
    let mut services = Vec::new();
    for service in config.items("services") {
        services.push(bed.add_service(service, None)?);
    }
    let mut flows = HashMap::new();
    for (number, step) in case.list("steps")?.iter().enumerate() {
        log.at(number, step.maybe_text("note").or(step.maybe_text("op")));
        let Some(op) = step.maybe_text("op") else {
            let port = port_named(step.text("dev")?)
                .context("the step names a device other than `cl` and `sv`")?;
            let sent = bed.inject(port, &step.frame("frame")?);
            compare_frames(step, &sent, &mut flows, log)?;
            continue;
        };
        let named = |bed: &Bed| -> Replayed<ServiceKey> {
            Ok(match step.get("service") {
                Some(service) => {
                    let key = service_key(service, None)?;
                    if bed.director.control.service(&key).is_none() {
                        return Err(anyhow!("the director has no service {key}").into());
                    }
                    key
                }
                None => *services
                    .first()
                    .context("neither the step nor the case has a service")?,
            })
        };
        match op {
            "edit" => bed.edit_server(&named(&bed)?, step)?,
            "del" => bed.delete_server(&named(&bed)?, step)?,
            "add" => bed.add_server(&named(&bed)?, step)?,
            "wait" => bed.wait(seconds(step)?),
            "zero" => {
                let key = step.get("service").map(|_| named(&bed)).transpose()?;
                bed.change().0.zero(key.as_ref())?;
            }
            "del_service" => {
                let (key, now) = (named(&bed)?, bed.now);
                bed.change().0.delete_service(&key, now)?;
                bed.follow();
                services.retain(|&other| other != key);
            }
            "add_service" => {
                let value = step
                    .get("service")
                    .filter(|s| s.get("destinations").is_some());
                services.push(bed.add_service(value.unwrap_or(step), None)?);
            }
            "sysctl" => {
                let value = step.get("value").map(sysctl_text).unwrap_or_default();
                bed.change().0.set_sysctl(step.text("name")?, &value)?;
                bed.follow();
            }
            "stats" => compare_stats(&bed, step, "stats", |stats| stats.shown, log)?,
            "rates" => compare_stats(&bed, step, "rates", |stats| stats.rates, log)?,
            "counters" => compare_counters(&bed, step, log)?,
            "conns" => compare_conns(&bed, step, true, false, log)?,
            "proc" => compare_proc(&bed, step, log)?,
            other => return Err(Halt::Unsupported(format!("step {other:?}"))),
        }
    }
    Ok(())
}

/// A frame that the kernel sent; fields that vary between recordings are masked.
struct Expected<'a> {
    device: &'a str,
    frame: Vec<u8>,
    masks: Vec<(usize, usize, &'a str)>,
}

impl<'a> Expected<'a> {
    fn list(list: &'a [Value]) -> anyhow::Result<Vec<Self>> {
        list.iter()
            .map(|out| {
                let masks = out.items("mask").iter().map(|mask| {
                    let number = |at: usize| {
                        let number = mask.get(at)?.as_u64()?;
                        usize::try_from(number).ok()
                    };
                    Some((number(0)?, number(1)?, mask.get(2)?.as_str()?))
                });
                Ok(Expected {
                    device: out.text("dev")?,
                    frame: out.frame("frame")?,
                    masks: masks
                        .collect::<Option<_>>()
                        .context("the mask is not [offset, length, field]")?,
                })
            })
            .collect()
    }

    fn masked(&self, frame: &[u8]) -> Vec<u8> {
        let mut frame = frame.to_vec();
        for &(at, len, _) in &self.masks {
            if let Some(bytes) = frame.get_mut(at..at + len) {
                bytes.fill(0);
            }
        }
        frame
    }
}

/// Source ports of tunnel packets, by tunnel destination and inner flow.
type Flows = HashMap<(SocketAddr, Flow), u16>;
type Flow = (Protocol, SocketAddr, SocketAddr);

fn compare_frames(
    step: &Value,
    sent: &[Emitted],
    flows: &mut Flows,
    log: &mut Log,
) -> anyhow::Result<()> {
    let mut lists = vec![Expected::list(step.items("out"))?];
    for (_, list) in step.fields("alternative").into_iter().flatten() {
        let list = list.as_array().context("the alternative is not a list")?;
        lists.push(Expected::list(list)?);
    }
    let complaints: Vec<_> = lists
        .iter()
        .map(|list| differences(list, sent, flows))
        .collect();
    // All fields of an alternative must match.
    if !complaints.iter().any(Vec::is_empty) {
        for (what, expected, got) in complaints.into_iter().next().unwrap_or_default() {
            log.mismatch(&what, &expected, &got);
        }
    }
    Ok(())
}

fn differences(
    expected: &[Expected<'_>],
    sent: &[Emitted],
    flows: &mut Flows,
) -> Vec<(String, String, String)> {
    let mut found = Vec::new();
    for device in ["cl", "sv"] {
        let expected: Vec<_> = expected.iter().filter(|e| e.device == device).collect();
        let sent: Vec<_> = sent
            .iter()
            .filter(|s| port_name(s.port) == device)
            .collect();
        let mut ids = Vec::new();
        for at in 0..expected.len().max(sent.len()) {
            let what = format!("frame {at} on {device}");
            match (expected.get(at), sent.get(at)) {
                (Some(expected), Some(sent)) => {
                    if expected.masked(&expected.frame) != expected.masked(&sent.frame) {
                        found.push((what, hex(&expected.frame), hex(&sent.frame)));
                        continue;
                    }
                    for &(_, _, field) in &expected.masks {
                        if let Err(complaint) = check_masked(field, expected, sent, flows) {
                            found.push((format!("{what} {field}"), complaint, hex(&sent.frame)));
                        }
                        if field == "ip.id" {
                            ids.push((be16(&sent.frame, 18), be16(&sent.frame, 20)));
                        }
                    }
                }
                (Some(expected), None) => {
                    found.push((what, hex(&expected.frame), "nothing".to_owned()));
                }
                (None, Some(sent)) => found.push((what, "nothing".to_owned(), hex(&sent.frame))),
                (None, None) => {}
            }
        }
        // Fragments are consecutive until the last one ("more fragments" is not set).
        let mut last = None;
        for (id, flags) in ids {
            if flags & 0x1fff != 0 && last.is_some_and(|last| last != id) {
                found.push((
                    format!("fragments on {device}"),
                    "one identification".to_owned(),
                    format!("{last:?} and {id}"),
                ));
            }
            last = Some(id);
        }
    }
    found
}

/// Checks that a masked field has a possible value.
fn check_masked(
    field: &str,
    expected: &Expected<'_>,
    sent: &Emitted,
    flows: &mut Flows,
) -> Result<(), String> {
    let packet = sent.packet();
    let first = packet.first().is_none_or(|b| b >> 4 == 6) || be16(packet, 6) & 0x1fff == 0;
    match field {
        "ip.checksum" => {
            let header = usize::from(packet.first().map_or(0, |b| b & 15)) * 4;
            let right = packet
                .get(..header)
                .is_some_and(|header| Sum::ZERO.bytes(header).finish() == 0);
            right
                .then_some(())
                .ok_or_else(|| "a correct header checksum".to_owned())
        }
        "udp.checksum" if first => {
            let read = frames::read(packet).ok_or("a UDP datagram")?;
            let whole = usize::from(be16(read.l4, 4)) == read.l4.len();
            let sum = be16(read.l4, 6);
            let recorded = frames::read(expected.frame.get(ETHERNET_LEN..).unwrap_or_default())
                .map_or(0, |read| be16(read.l4, 6));
            if (sum == 0) != (recorded == 0) {
                return Err(format!("a checksum where the kernel has {recorded:#06x}"));
            }
            let right = Sum::ZERO
                .pseudo(read.src.ip(), read.dst.ip(), Protocol::UDP.0, read.l4.len())
                .bytes(read.l4)
                .finish()
                == 0;
            (sum == 0 || !whole || right)
                .then_some(())
                .ok_or_else(|| "a correct UDP checksum".to_owned())
        }
        "udp.sport" if first => {
            let read = frames::read(packet).ok_or("a UDP datagram")?;
            let port = read.src.port();
            if !(32768..=60999).contains(&port) {
                return Err(format!("a source port in 32768..=60999, not {port}"));
            }
            // The inner packet follows UDP and GUE headers. The lowest five bits of the first GUE
            // byte are the length of its options in 32-bit words.
            let options = usize::from(read.l4.get(8).map_or(0, |b| b & 31)) * 4;
            let inner = read.l4.get(12 + options..).unwrap_or_default();
            let Ok(inner) = parse::ip(inner, false) else {
                return Ok(());
            };
            let (from, to) = inner.ports.unwrap_or_default();
            let (from, to) = (
                SocketAddr::new(inner.src, from),
                SocketAddr::new(inner.dst, to),
            );
            let flow = (inner.protocol, from, to);
            let known = *flows.entry((read.dst, flow)).or_insert(port);
            (known == port)
                .then_some(())
                .ok_or_else(|| format!("the flow's source port {known}"))
        }
        _ => Ok(()),
    }
}

/// Parses counters or rates, whose names in recordings differ from those of [`Counts`].
fn counts(value: &Value, key: &str) -> anyhow::Result<Counts> {
    let fields = value
        .get(key)
        .with_context(|| format!("the step has no {key:?}"))?;
    let field = |name: &str, rate: &str| {
        let number = fields
            .maybe_number(name)
            .map_or_else(|| fields.number(rate), Ok)?;
        anyhow::Ok(u64::try_from(number)?)
    };
    Ok(Counts {
        conns: field("conns", "cps")?,
        in_packets: field("inpkts", "inpps")?,
        out_packets: field("outpkts", "outpps")?,
        in_bytes: field("inbytes", "inbps")?,
        out_bytes: field("outbytes", "outbps")?,
    })
}

fn compare_stats(
    bed: &Bed,
    step: &Value,
    key: &str,
    part: impl Fn(Stats) -> Counts,
    log: &mut Log,
) -> anyhow::Result<()> {
    let control = &bed.director.control;
    log.compare(
        "total",
        &counts(step, "total")?,
        &part(control.total_stats()),
    );
    for expected in step.list("services")? {
        let service_key = service_key(
            expected
                .get("service")
                .context("the recorded counters name no service")?,
            None,
        )?;
        let Some(service) = control.service(&service_key) else {
            log.mismatch(&format!("service {service_key}"), "there", "gone");
            continue;
        };
        log.compare(
            &format!("service {service_key}"),
            &counts(expected, key)?,
            &part(service.stats()),
        );
        let Some(destinations) = expected.get("destinations").and_then(Value::as_array) else {
            continue;
        };
        let order: Vec<SocketAddr> = destinations.iter().map(place).collect::<Result<_, _>>()?;
        let servers = service.servers();
        log.compare(
            "order of servers",
            &order,
            &servers.iter().map(|server| server.addr()).collect(),
        );
        for expected in destinations {
            let addr = place(expected)?;
            let Some(server) = servers.iter().find(|server| server.addr() == addr) else {
                continue;
            };
            let what = format!("server {addr} of {service_key}");
            if let Some(own) = control.server_stats(server.id()) {
                log.compare(&what, &counts(expected, key)?, &part(own));
            }
            for (name, own) in [("active", server.active()), ("inactive", server.inactive())] {
                if let Some(number) = expected.maybe_number(name) {
                    log.compare(&format!("{what} {name}"), &number, &i64::from(own));
                }
            }
        }
    }
    Ok(())
}

fn compare_counters(bed: &Bed, step: &Value, log: &mut Log) -> anyhow::Result<()> {
    let expected = counts(&serde_json::json!({ "": step }), "")?;
    let live = bed.director.control.shard_counts();
    let sum = live.fold(Counts::default(), |sum, counts| Counts {
        conns: sum.conns + counts.conns,
        in_packets: sum.in_packets + counts.in_packets,
        out_packets: sum.out_packets + counts.out_packets,
        in_bytes: sum.in_bytes + counts.in_bytes,
        out_bytes: sum.out_bytes + counts.out_bytes,
    });
    log.compare("counters", &expected, &sum);
    Ok(())
}

/// Compares the text of a `/proc/net` file, with services and connections in any order and
/// approximate times.
fn compare_proc(bed: &Bed, step: &Value, log: &mut Log) -> anyhow::Result<()> {
    let mut text = String::new();
    let path = step.text("path")?;
    let file = path.strip_prefix("/proc/net/").unwrap_or(path);
    let expires = match file {
        "ip_vs" => {
            proc::services(&mut text, &bed.services(None), KERNEL_TABLE_SIZE)?;
            None
        }
        "ip_vs_conn" | "ip_vs_conn_sync" => {
            let mut conn = proc::CONN_HEADER.to_owned();
            let mut conn_sync = proc::CONN_SYNC_HEADER.to_owned();
            for info in bed.connections() {
                proc::connection(&mut conn, &mut conn_sync, &info)?;
            }
            let (column, file) = match file {
                "ip_vs_conn" => (8, conn),
                _ => (9, conn_sync),
            };
            text = file;
            Some(column)
        }
        _ => {
            let control = &bed.director.control;
            let info = Info {
                total: control.total_stats(),
                workers: control.shard_counts().map(worker).collect(),
                ..Info::default()
            };
            proc::of_info(&mut text, file, &info)
                .with_context(|| format!("{path:?} is not a known file"))?;
            None
        }
    };
    let recorded = step.text("text")?;
    if path.contains("stats") {
        log.compare(path, &recorded, &text.as_str());
        return Ok(());
    }
    let (expected, got) = (blocks(recorded, expires), blocks(&text, expires));
    let texts = |blocks: &[(String, i64)]| -> Vec<String> {
        blocks.iter().map(|(text, _)| text.clone()).collect()
    };
    log.compare(path, &texts(&expected), &texts(&got));
    for ((text, expected), (_, got)) in expected.iter().zip(&got) {
        if later(*expected, *got).abs() > 1 {
            log.mismatch(text, &expected.to_string(), &got.to_string());
        }
    }
    Ok(())
}

fn worker(counts: Counts) -> WorkerInfo {
    WorkerInfo {
        counts,
        ..WorkerInfo::default()
    }
}

/// Sorted blocks of a `/proc/net` file: each line of a service or connection, with the lines of its
/// servers. In a line with a number in the column `expires`, the width of the column replaces the
/// number, and the block is returned with this number. Other blocks are returned with 0.
fn blocks(text: &str, expires: Option<usize>) -> Vec<(String, i64)> {
    let mut blocks: Vec<(String, i64)> = Vec::new();
    for line in text.lines() {
        let column = expires.and_then(|column| line.split_whitespace().nth(column));
        let number = column.and_then(|number| number.parse().ok());
        match blocks.last_mut() {
            Some((block, _)) if line.starts_with("  ->") => {
                block.push('\n');
                block.push_str(line);
            }
            _ => match (column, number) {
                (Some(column), Some(number)) => {
                    // The column is right-aligned.
                    let at = line.rfind(column).unwrap_or(line.len());
                    let end = at + column.len();
                    let front = line[..at].trim_end();
                    let width = end - front.len();
                    blocks.push((format!("{front} <{width}>{}", &line[end..]), number));
                }
                _ => blocks.push((line.to_owned(), 0)),
            },
        }
    }
    blocks.sort();
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet;

    /// A packet of the client port `client` with these extension headers, in a GUE tunnel from port
    /// `from`.
    fn tunnelled(client: u16, headers: &[u8], from: u16) -> Emitted {
        let (src, dst) = (
            SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], client)),
            "[2001:db8::53]:53".parse().unwrap(),
        );
        let mut inner = packet::udp(src, dst, b"question");
        for &kind in headers {
            packet::with_extension(&mut inner, kind, &[1, 4, 0, 0, 0, 0]);
        }
        let gue = [&[0, 41, 0, 0][..], &inner].concat();
        let director = SocketAddr::from(([0xfd00, 1, 0, 0, 0, 0, 0, 0xffff], from));
        let outer = packet::udp(director, "[fd00:1::9]:6080".parse().unwrap(), &gue);
        Emitted {
            port: port_named("sv").expect("the servers' link"),
            frame: packet::ethernet_ip([2; 6], [4; 6], &outer),
        }
    }

    #[test]
    fn gue_flow_must_keep_its_source_port_even_after_extension_headers() {
        let expected = Expected {
            device: "sv",
            frame: Vec::new(),
            masks: Vec::new(),
        };
        for headers in [&[][..], &[60], &[60, 0], &[60, 43]] {
            let mut flows = Flows::new();
            let mut check = |client, from| {
                let sent = tunnelled(client, headers, from);
                check_masked("udp.sport", &expected, &sent, &mut flows)
            };
            assert_eq!(check(4000, 40_000), Ok(()));
            assert_eq!(
                check(4001, 50_000),
                Ok(()),
                "another flow has no port of its own, {headers:?}"
            );
            assert_eq!(check(4000, 40_000), Ok(()));
            // A flow whose port changes would be spread over several paths.
            let complaint =
                check(4000, 50_000).expect_err("another port of the same flow was accepted");
            assert!(complaint.contains("40000"), "no `40000` in {complaint}");
            assert!(
                check(4002, 1000).is_err(),
                "the port is not one of a tunnel, but is accepted"
            );
        }
    }
}

//! Records the running kernel's results of cases.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, bail};
use lvs_core::Protocol;
use lvs_packet::wire::{be16, ipv4, ipv6};
use serde_json::{Value, json};

use super::kernel::{self, Emitted, Kernel};
use crate::conformance::case::{Json, hex, sysctl_text};

const IP: usize = 14;
const IPIP: Protocol = Protocol(4);
const GRE: Protocol = Protocol(47);

/// The results of one run of a case.
struct Run {
    /// The sent frames of each step.
    out: Vec<Vec<Emitted>>,
    /// The counters and the connections at the end, in this order.
    end: [Value; 2],
}

fn run(case: &Value) -> anyhow::Result<Run> {
    let config = case.get("config").context("the case has no `config`")?;
    let kernel = Kernel::new(config)?;
    let mut out: Vec<Vec<Emitted>> = Vec::new();
    for step in case.items("steps") {
        // Late packets belong to the previous step.
        let late = kernel.drain()?;
        if let Some(last) = out.last_mut() {
            last.extend(late);
        }
        out.push(match step.maybe_text("op") {
            None => {
                let mut sent = kernel.inject(step.text("dev")?, &step.frame("frame")?)?;
                sent.retain(|sent| !is_own_sctp(&sent.frame));
                sent
            }
            Some("edit" | "add" | "del") => {
                kernel.change(config, step)?;
                Vec::new()
            }
            Some("sysctl") => {
                let value = step.get("value").map(sysctl_text).unwrap_or_default();
                kernel::set_ipvs(step.text("name")?, &value)?;
                Vec::new()
            }
            Some(other) => bail!("unknown step {other:?}"),
        });
    }
    let end = [Kernel::counters()?, Kernel::connections()?];
    Ok(Run { out, end })
}

/// UDP destination ports of the servers' tunnels.
fn tunnel_ports(config: &Value) -> Vec<u16> {
    let services = config.items("services").iter();
    let servers = services.flat_map(|service| service.items("destinations"));
    servers
        .filter_map(|server| u16::try_from(server.maybe_number("tun_port")?).ok())
        .collect()
}

/// A field of a frame that may vary: offset, length, name.
type Field = (usize, usize, &'static str);

/// Whether an address is one of the director's addresses on its links.
fn is_directors(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => {
            [Ipv4Addr::new(10, 255, 0, 1), Ipv4Addr::new(10, 1, 255, 254)].contains(&addr)
        }
        IpAddr::V6(addr) => [
            Ipv6Addr::new(0xfd00, 0xff, 0, 0, 0, 0, 0, 1),
            Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 0xffff),
        ]
        .contains(&addr),
    }
}

/// The fields of `frame` that may vary between two recordings. The flag is true if the field is
/// masked even if it is equal in both. `identification` is the IP identification of the received
/// packet; if `frame` has another identification, the kernel has chosen it.
fn fields(frame: &[u8], tunnels: &[u16], identification: Option<u16>) -> Vec<(Field, bool)> {
    let ip = frame.get(IP..).unwrap_or_default();
    let mut fields = Vec::new();
    let (l4, protocol, src) = match ip.first().map(|first| first >> 4) {
        Some(4) if ip.len() >= ipv4::HEADER_LEN => {
            let id = be16(ip, ipv4::field::ID);
            // Recordings that contain equal identifications by chance must mask them, too.
            let own = id != 0 && Some(id) != identification;
            fields.push(((IP + 4, 2, "ip.id"), own));
            fields.push(((IP + 10, 2, "ip.checksum"), own));
            let header = ipv4::header_len(ip);
            for at in (IP + ipv4::HEADER_LEN..IP + header).step_by(4) {
                fields.push(((at, 4, "ip.timestamp"), false));
            }
            let first = be16(ip, 6) & ipv4::OFFSET == 0;
            (first.then_some(header), ip[9], IpAddr::from(ipv4::src(ip)))
        }
        Some(6) if ip.len() >= ipv6::HEADER_LEN => {
            fields.push(((IP + 1, 3, "ip6.flowlabel"), false));
            let src = IpAddr::from(ipv6::src(ip));
            let Some(chain) = ipv6::walk(ip) else {
                return fields;
            };
            if let Some((header, _)) = chain.fragment {
                fields.push(((IP + header.at + 4, 4, "ip6.frag.id"), false));
            }
            let later = chain.fragment.is_some_and(|(header, _)| header.offset > 0);
            ((!later).then_some(chain.l4), chain.protocol, src)
        }
        _ => return fields,
    };
    let Some(l4) = l4.filter(|_| is_directors(src)) else {
        return fields;
    };
    let inner = match Protocol(protocol) {
        Protocol::UDP if ip.len() >= l4 + 8 && tunnels.contains(&be16(ip, l4 + 2)) => {
            fields.push(((IP + l4, 2, "udp.sport"), true));
            fields.push(((IP + l4 + 6, 2, "udp.checksum"), true));
            let options = ip.get(l4 + 8).map_or(0, |first| first & 0x1f);
            l4 + 12 + usize::from(options) * 4
        }
        IPIP => l4,
        GRE if ip.get(l4).is_some_and(|flags| flags & 0x80 != 0) => {
            fields.push(((IP + l4 + 4, 2, "gre.checksum"), false));
            l4 + 8
        }
        GRE => l4 + 4,
        _ => return fields,
    };
    // The director fills in the timestamp before encapsulation.
    let packet = ip.get(inner..).unwrap_or_default();
    let header = ipv4::header_len(packet);
    if packet.len() >= header && header > ipv4::HEADER_LEN && packet[0] >> 4 == 4 {
        fields.push(((IP + inner + 10, 2, "inner.checksum"), false));
        for at in (ipv4::HEADER_LEN..header).step_by(4) {
            fields.push(((IP + inner + at, 4, "inner.timestamp"), false));
        }
    }
    fields
}

/// The fields to mask in a recorded frame: fields that differ between the two recordings of the
/// frame, or that [`fields`] marks as always masked. `None` if the lengths or other bytes differ.
fn mask(
    one: &[u8],
    other: &[u8],
    tunnels: &[u16],
    identification: Option<u16>,
) -> Option<Vec<Field>> {
    if one.len() != other.len() {
        return None;
    }
    let fields: Vec<Field> = fields(one, tunnels, identification)
        .into_iter()
        .filter(|&((at, len, _), always)| always || one[at..at + len] != other[at..at + len])
        .map(|(field, _)| field)
        .collect();
    let covered = |at: usize| {
        fields
            .iter()
            .any(|&(from, len, _)| (from..from + len).contains(&at))
    };
    let differ = |at: usize| one[at] != other[at] && !covered(at);
    (!(0..one.len()).any(differ)).then_some(fields)
}

/// Result of recording a case.
pub(super) enum Recorded {
    /// The case with the kernel's results.
    Case(Value),
    /// Two runs of the case had different results, and a recording cannot express the difference.
    /// The text names it.
    Unstable(String),
    /// The case shows this deviation from the kernel, which docs/decisions.md describes.
    Deviation(String),
}

/// Whether the frame is a reply of the host with IPv4 options. The replay's simulated host does not
/// echo options.
fn echoes_options(frame: &[u8]) -> bool {
    let ip = frame.get(IP..).unwrap_or_default();
    ip.len() >= ipv4::HEADER_LEN && (0x46..0x50).contains(&ip[0]) && ip[8] == 64
}

/// The reply without echoed IPv4 options; `None` if it would then quote more of the received
/// packet.
fn without_echoed_options(frame: Vec<u8>) -> Option<Vec<u8>> {
    const LONGEST_ERROR: u16 = 576;
    if !echoes_options(&frame) {
        return Some(frame);
    }
    let ip = &frame[IP..];
    let (header, total) = (ipv4::header_len(ip), be16(ip, 2));
    let (plain, body) = (ip.get(..ipv4::HEADER_LEN)?, ip.get(header..)?);
    let options = u16::try_from(header - ipv4::HEADER_LEN).ok()?;
    let mut plain = [&frame[..IP], plain, body].concat();
    plain[IP] = 0x45;
    ipv4::set_total_len(&mut plain[IP..], total - options);
    ipv4::finish_header(&mut plain[IP..]);
    (total < LONGEST_ERROR).then_some(plain)
}

/// Records a packet case twice, and masks the fields that may vary. Instead returns a reason if the
/// case cannot be compared: its two recordings differ in other ways, or it contains a deviation by
/// design.
pub(super) fn record(case: &Value) -> anyhow::Result<Recorded> {
    let tunnels = tunnel_ports(case.get("config").context("the case has no `config`")?);
    let (one, other) = (run(case)?, run(case)?);
    let mut recorded = case.clone();
    let steps = recorded
        .get_mut("steps")
        .and_then(Value::as_array_mut)
        .context("the case has no `steps`")?;
    for (number, ((step, one), other)) in steps.iter_mut().zip(one.out).zip(other.out).enumerate() {
        if step.get("frame").is_none() {
            continue;
        }
        let packet = step.frame("frame")?;
        let packet = packet.get(IP..).unwrap_or_default();
        let four = packet.len() >= ipv4::HEADER_LEN && packet[0] >> 4 == 4;
        let identification = four.then(|| be16(packet, ipv4::field::ID));
        let at = |what: &str| format!("step {number}: {what}");
        if one.len() != other.len() {
            return Ok(Recorded::Unstable(at("the number of sent frames")));
        }
        if one.is_empty() && super::packets::ftp::opens_control(step) {
            return Ok(Recorded::Deviation(at("a control connection used again")));
        }
        let mut list = Vec::new();
        for (one, other) in one.into_iter().zip(other) {
            let plain = [one.frame, other.frame].map(without_echoed_options);
            let [Some(frame), Some(other)] = plain else {
                return Ok(Recorded::Deviation(at("options echoed in a long error")));
            };
            let Some(mask) = mask(&frame, &other, &tunnels, identification) else {
                let what = format!("{} or {}", hex(&frame), hex(&other));
                return Ok(Recorded::Unstable(at(&what)));
            };
            let mut out = json!({"dev": one.device, "frame": hex(&frame)});
            if !mask.is_empty() {
                out["mask"] = json!(mask);
            }
            list.push(out);
        }
        step["out"] = list.into();
    }
    if one.end[0] != other.end[0] {
        let what = format!("counters {} or {}", one.end[0], other.end[0]);
        return Ok(Recorded::Unstable(what));
    }
    let [conns, others] = [&one.end[1], &other.end[1]].map(ends);
    if conns != others {
        let what = format!("connections {conns:?} or {others:?}");
        return Ok(Recorded::Unstable(what));
    }
    steps.extend(one.end);
    recorded["kernel"] = release().into();
    if has_sctp() {
        recorded["config"]["host"] = json!(["sctp"]);
    }
    Ok(Recorded::Case(recorded))
}

/// Sorted connections of a recording, without times.
fn ends(conns: &Value) -> Vec<String> {
    let mut ends: Vec<String> = conns
        .items("entries")
        .iter()
        .map(|entry| {
            let part = |key| entry.maybe_text(key).unwrap_or_default();
            ["proto", "client", "virtual", "dest", "state"]
                .map(part)
                .join(" ")
        })
        .collect();
    ends.sort_unstable();
    ends
}

fn has_sctp() -> bool {
    std::path::Path::new("/proc/sys/net/sctp").exists()
}

/// Whether the host's own SCTP stack has sent this frame: its TTL has not been decremented.
fn is_own_sctp(frame: &[u8]) -> bool {
    let ip = frame.get(IP..).unwrap_or_default();
    match ip.first().map(|first| first >> 4) {
        Some(4) => ip.len() >= ipv4::HEADER_LEN && ip[9] == Protocol::SCTP.0 && ip[8] == 64,
        Some(6) => ip.len() >= ipv6::HEADER_LEN && ip[6] == Protocol::SCTP.0 && ip[7] == 64,
        _ => false,
    }
}

pub(super) fn release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet;

    #[test]
    fn echoed_ip_options_are_removed_from_reply() {
        let (a, b) = ("10.0.9.1:80", "192.0.2.1:4000");
        let plain = packet::udp(a.parse().unwrap(), b.parse().unwrap(), b"hello");
        let mut echoed = plain.clone();
        packet::with_options(&mut echoed, &[1; 4]);
        packet::repair(&mut echoed);
        let frame = |ip: &[u8]| packet::ethernet_ip([2; 6], [4; 6], ip);
        assert!(echoes_options(&frame(&echoed)) && !echoes_options(&frame(&plain)));
        for ip in [&echoed, &plain] {
            assert_eq!(without_echoed_options(frame(ip)), Some(frame(&plain)));
        }
        let mut long = packet::udp(a.parse().unwrap(), b.parse().unwrap(), &[0; 544]);
        packet::with_options(&mut long, &[1; 4]);
        packet::repair(&mut long);
        assert_eq!(without_echoed_options(frame(&long)), None);
    }

    #[test]
    fn varying_fields_and_tunnel_source_port_are_masked() {
        let (a, b) = ("10.255.0.1:4000", "10.1.0.1:6080");
        let mut whole = packet::udp(a.parse().unwrap(), b.parse().unwrap(), b"hello");
        ipv4::set_id(&mut whole, 7);
        ipv4::finish_header(&mut whole);
        let frame = packet::ethernet_ip([2; 6], [4; 6], &whole);
        assert_eq!(mask(&frame, &frame, &[], Some(7)), Some(vec![]));
        let mut other = frame.clone();
        other[18] ^= 1;
        let field = (18, 2, "ip.id");
        assert_eq!(mask(&frame, &other, &[], Some(7)), Some(vec![field]));
        other[43] ^= 1;
        assert_eq!(mask(&frame, &other, &[], Some(7)), None);
        let tunnel = mask(&frame, &frame, &[6080], Some(7)).expect("the field may vary");
        assert_eq!(tunnel, [(34, 2, "udp.sport"), (40, 2, "udp.checksum")]);
        // A first fragment may contain only the header.
        let first = &frame[..42];
        let tunnel = mask(first, first, &[6080], Some(7)).expect("the field may vary");
        assert_eq!(tunnel, [(34, 2, "udp.sport"), (40, 2, "udp.checksum")]);
    }

    #[test]
    fn ip_identification_set_by_kernel_is_masked_even_if_frames_are_equal() {
        let (a, b) = ("10.255.0.1:4000", "10.1.0.1:53");
        let mut whole = packet::udp(a.parse().unwrap(), b.parse().unwrap(), b"hello");
        for (id, masked) in [(7, false), (0, false), (8, true)] {
            ipv4::set_id(&mut whole, id);
            ipv4::finish_header(&mut whole);
            let frame = packet::ethernet_ip([2; 6], [4; 6], &whole);
            let fields = mask(&frame, &frame, &[], Some(7)).expect("the frames are equal");
            assert_eq!(!fields.is_empty(), masked, "{id}");
        }
    }

    #[test]
    fn varying_fields_after_extension_and_tunnel_headers_are_masked() {
        let (a, b) = ("[2001:db8::1]:4000", "[2001:db8::2]:53");
        let mut six = packet::udp(a.parse().unwrap(), b.parse().unwrap(), b"hello");
        packet::with_extension(&mut six, ipv6::FRAGMENT, &[0, 1, 1, 2, 3, 4]);
        packet::with_extension(&mut six, 60, &[1, 4, 0, 0, 0, 0]);
        let frame = packet::ethernet_ip([2; 6], [4; 6], &six);
        let mut other = frame.clone();
        other[IP + 55] ^= 1;
        let field = (IP + 52, 4, "ip6.frag.id");
        assert_eq!(mask(&frame, &other, &[], None), Some(vec![field]));

        // The time stamp is in a tunnelled packet.
        let (a, b) = ("192.0.2.1:4000", "10.0.9.1:53");
        let mut inner = packet::udp(a.parse().unwrap(), b.parse().unwrap(), b"hello");
        packet::with_options(&mut inner, &[68, 8, 5, 0, 0, 0, 0, 1]);
        packet::repair(&mut inner);
        let gre = [&[0, 0, 8, 0][..], &inner].concat();
        for (protocol, body, at) in [(4, &inner, 20), (47, &gre, 24)] {
            let (from, to) = ("10.1.255.254".parse(), "10.1.0.1".parse());
            let outer = packet::ip(from.unwrap(), to.unwrap(), protocol, 64, body);
            let frame = packet::ethernet_ip([2; 6], [4; 6], &outer);
            let mut other = frame.clone();
            other[IP + at + 27] ^= 1;
            other[IP + at + 10] ^= 1;
            let id = Some(be16(&outer, 4));
            let fields = mask(&frame, &other, &[], id).expect("the fields may vary");
            let names: Vec<_> = fields.iter().map(|&(at, _, name)| (at, name)).collect();
            let wanted = [
                (IP + at + 10, "inner.checksum"),
                (IP + at + 24, "inner.timestamp"),
            ];
            assert_eq!(names, wanted);
        }
    }
}

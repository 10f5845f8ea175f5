//! The recordings' test bed with this machine's kernel: IPVS between two TAP devices in a network
//! namespace.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, bail, ensure};
use lvs_packet::wire::checksum::Sum;
use lvs_packet::wire::put16;
use lvs_sys::{TunDevice, unshare_network};
use serde_json::{Value, json};

use crate::conformance::case::{Json, sysctl_text};

/// The links of the test bed: each with its name, and the director's link-layer address on it.
const LINKS: [(&str, &str); 2] = [("cl", "02:00:00:00:00:c1"), ("sv", "02:00:00:00:00:51")];
/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`.
const NEEDS_CHECKSUM: u8 = 1;

/// Settings below `/proc/sys/net` of the namespace. If a file is missing, the kernel lacks the
/// feature.
const SETTINGS: [(&str, &str); 17] = [
    ("ipv4/ip_forward", "1"),
    ("ipv6/conf/all/forwarding", "1"),
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
    ("ipv4/icmp_ratelimit", "0"),
    ("ipv4/icmp_msgs_per_sec", "1000000"),
    ("ipv4/icmp_msgs_burst", "1000000"),
    ("ipv6/icmp/ratelimit", "0"),
    ("ipv6/auto_flowlabels", "0"),
    ("ipv6/conf/all/accept_dad", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/default/accept_ra", "0"),
    ("ipv6/conf/default/router_solicitations", "0"),
    ("ipv6/conf/default/mldv2_unsolicited_report_interval", "0"),
    ("ipv4/conf/default/arp_notify", "0"),
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Emitted {
    pub(super) device: &'static str,
    pub(super) frame: Vec<u8>,
}

/// This machine's IPVS as the director of one case.
pub(super) struct Kernel {
    taps: [TunDevice; 2],
}

fn server_mac(addr: IpAddr) -> String {
    let [a, b, c, d] = match addr {
        IpAddr::V4(addr) => addr.octets(),
        IpAddr::V6(addr) => {
            let [.., a, b, c, d] = addr.octets();
            [a, b, c, d]
        }
    };
    format!("02:52:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

fn run(program: &str, arguments: &[&str], input: &str) -> anyhow::Result<Output> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| {
            format!("cannot run {program}: install it on the machine with the kernel")
        })?;
    let mut stdin = child
        .stdin
        .take()
        .context("the program has no pipe to its standard input")?;
    stdin.write_all(input.as_bytes())?;
    drop(stdin);
    Ok(child.wait_with_output()?)
}

fn checked(program: &str, arguments: &[&str], input: &str) -> anyhow::Result<()> {
    let output = run(program, arguments, input)?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && error.trim().is_empty(),
        "{program} {} ({}): {error}\n{input}",
        arguments.join(" "),
        output.status
    );
    Ok(())
}

/// Writes a setting of this thread's network namespace; returns whether the setting exists.
fn set(name: &str, value: &str) -> anyhow::Result<bool> {
    match fs::write(format!("/proc/sys/net/{name}"), value) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot set {name} to {value}")),
    }
}

pub(super) fn set_ipvs(name: &str, value: &str) -> anyhow::Result<()> {
    ensure!(
        set(&format!("ipv4/vs/{name}"), value)?,
        "this kernel's IPVS has no sysctl {name}"
    );
    Ok(())
}

/// Moves this thread into a new network namespace, and creates the links of the test bed there.
pub(super) fn links(mtu: [i64; 2]) -> anyhow::Result<[TunDevice; 2]> {
    unshare_network().context("cannot create a network namespace: run this as root")?;
    for (name, value) in SETTINGS {
        set(name, value)?;
    }
    let tap = |name| {
        TunDevice::create_tap(name).with_context(|| format!("cannot create the TAP device {name}"))
    };
    let taps = [tap("cl")?, tap("sv")?];
    let mut script = vec!["link set lo up".to_owned()];
    for ((name, mac), mtu) in LINKS.into_iter().zip(mtu) {
        script.push(format!("link set {name} address {mac} mtu {mtu} up"));
        let (four, six) = match name {
            "cl" => ("10.255.0.1/24", "fd00:ff::1/64"),
            _ => ("10.1.255.254/16", "fd00:1::ffff/64"),
        };
        script.push(format!("addr add {four} dev {name}"));
        if mtu >= 1280 {
            script.push(format!("addr add {six} dev {name} nodad"));
        }
        if name == "cl" {
            let gateway = "lladdr 02:00:00:00:00:c2 dev cl nud permanent";
            script.push(format!("neigh add 10.255.0.2 {gateway}"));
            script.push("route add default via 10.255.0.2 dev cl".to_owned());
            if mtu >= 1280 {
                script.push(format!("neigh add fd00:ff::2 {gateway}"));
                script.push("route add ::/0 via fd00:ff::2 dev cl".to_owned());
            }
        }
    }
    checked("ip", &["-batch", "-"], &script.join("\n"))?;
    Ok(taps)
}

/// Formats a service as a line that `ipvsadm -R` reads.
fn service_line(service: &Value) -> anyhow::Result<String> {
    let mut line = format!("-A {}", service_name(service)?);
    line += &format!(" -s {}", service.maybe_text("scheduler").unwrap_or("rr"));
    for flag in service.items("flags") {
        match flag.as_str() {
            Some("persistent") => {
                line += &format!(" -p {}", service.maybe_number("timeout").unwrap_or(360));
            }
            Some("ops") => line += " -o",
            other => bail!("unknown service flag {other:?}"),
        }
    }
    Ok(line)
}

fn service_name(service: &Value) -> anyhow::Result<String> {
    let option = match service.text("proto")? {
        "tcp" => "-t",
        "udp" => "-u",
        "sctp" => "--sctp-service",
        other => bail!("unknown protocol {other:?}"),
    };
    Ok(format!("{option} {}", place(service)?))
}

fn place(value: &Value) -> anyhow::Result<SocketAddr> {
    crate::conformance::case::place(value)
}

/// Formats a server of `service` as a line that `ipvsadm -R` reads.
fn server_line(command: &str, service: &Value, server: &Value) -> anyhow::Result<String> {
    let mut line = format!("{command} {} -r {}", service_name(service)?, place(server)?);
    if command == "-d" {
        return Ok(line);
    }
    line += match server.text("forward")? {
        "masq" => " -m",
        "direct" => " -g",
        _ => " -i",
    };
    line += &format!(" -w {}", server.maybe_number("weight").unwrap_or(1));
    if let Some(kind) = server.maybe_text("tun_type") {
        line += &format!(" --tun-type {kind}");
    }
    if let Some(port) = server.maybe_number("tun_port") {
        line += &format!(" --tun-port {port}");
    }
    if let Some(checksum) = server.maybe_text("tun_csum") {
        line += &format!(" --tun-{checksum}");
    }
    Ok(line)
}

impl Kernel {
    /// Creates the director of a case with this `config`.
    pub(super) fn new(config: &Value) -> anyhow::Result<Self> {
        let mtu = |name| {
            let mtus = config.get("mtu");
            mtus.and_then(|mtus| mtus.maybe_number(name))
                .unwrap_or(1500)
        };
        let taps = links([mtu("cl"), mtu("sv")])?;
        for (name, value) in config.fields("sysctl").into_iter().flatten() {
            set_ipvs(name, &sysctl_text(value))?;
        }
        let mut script = Vec::new();
        let mut restore = Vec::new();
        let mut neighbours = Vec::new();
        for service in config.items("services") {
            let vip = place(service)?.ip();
            let bits = if vip.is_ipv4() { 32 } else { 128 };
            script.push(format!("addr replace {vip}/{bits} dev lo"));
            restore.push(service_line(service)?);
            for server in service.items("destinations") {
                restore.push(server_line("-a", service, server)?);
                neighbours.push(place(server)?.ip());
            }
        }
        for neighbour in config.items("neigh") {
            let addr = neighbour.as_str().and_then(|text| text.parse().ok());
            neighbours.push(addr.context("a neighbour is not an address")?);
        }
        for addr in neighbours {
            let device = match addr {
                IpAddr::V4(addr) if in_net4(addr) => "sv",
                IpAddr::V6(addr) if in_net6(addr) => "sv",
                _ => "cl",
            };
            let mac = server_mac(addr);
            script.push(format!(
                "neigh replace {addr} lladdr {mac} dev {device} nud permanent"
            ));
        }
        checked("ip", &["-batch", "-"], &script.join("\n"))?;
        checked("ipvsadm", &["-R"], &(restore.join("\n") + "\n"))?;
        let kernel = Self { taps };
        kernel.drain()?;
        Ok(kernel)
    }

    /// Adds, edits or deletes a server of the case's only service, as `step` demands.
    pub(super) fn change(&self, config: &Value, step: &Value) -> anyhow::Result<()> {
        let service = &config.items("services")[0];
        let known = service
            .items("destinations")
            .iter()
            .find(|server| place(server).ok() == place(step).ok());
        let mut server = known.unwrap_or(step).clone();
        if let (Some(fields), Some(weight)) = (server.as_object_mut(), step.get("weight")) {
            fields.insert("weight".to_owned(), weight.clone());
        }
        let command = match step.text("op")? {
            "edit" => "-e",
            "add" => "-a",
            _ => "-d",
        };
        let line = server_line(command, service, &server)?;
        checked("ipvsadm", &["-R"], &(line + "\n"))
    }

    /// Injects a frame on a link, and returns the sent frames.
    pub(super) fn inject(&self, device: &str, frame: &[u8]) -> anyhow::Result<Vec<Emitted>> {
        let tap = &self.taps[usize::from(device == "sv")];
        match tap.write(&[0; 10], frame) {
            // The TUN driver itself refuses frames that no device delivers.
            Err(error) if error.kind() != ErrorKind::InvalidInput => Err(error)?,
            _ => {}
        }
        self.drain()
    }

    /// Reads the frames that the kernel has sent on both links. Returns them without multicasts and
    /// broadcasts, for example neighbour solicitations.
    pub(super) fn drain(&self) -> anyhow::Result<Vec<Emitted>> {
        let mut emitted = Vec::new();
        for (tap, (device, _)) in self.taps.iter().zip(LINKS) {
            let (mut header, mut frame) = ([0; 10], vec![0; 65_600]);
            loop {
                let len = match tap.read(&mut header, &mut frame) {
                    Ok(len) => len,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => Err(error)?,
                };
                let frame = &mut frame[..len];
                if header[0] & NEEDS_CHECKSUM != 0 {
                    let word =
                        |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
                    let (start, offset) = (word(6), word(8));
                    let rest = frame
                        .get(start..)
                        .context("the checksum is outside of the frame")?;
                    let sum = Sum::ZERO.bytes(rest).finish();
                    put16(frame, start + offset, if sum == 0 { 0xffff } else { sum });
                }
                if frame.first().is_some_and(|first| first & 1 == 0) {
                    let frame = frame.to_vec();
                    emitted.push(Emitted { device, frame });
                }
            }
        }
        Ok(emitted)
    }

    pub(super) fn counters() -> anyhow::Result<Value> {
        let text = fs::read_to_string("/proc/thread-self/net/ip_vs_stats_percpu")?;
        let mut sums = [0_u64; 5];
        for line in text.lines().skip(2).take_while(|line| !line.contains('~')) {
            let numbers = line.split_whitespace().skip(1);
            for (sum, number) in sums.iter_mut().zip(numbers) {
                *sum += u64::from_str_radix(number, 16)?;
            }
        }
        let [conns, in_packets, out_packets, in_bytes, out_bytes] = sums;
        Ok(json!({
            "op": "counters", "conns": conns, "inpkts": in_packets, "outpkts": out_packets,
            "inbytes": in_bytes, "outbytes": out_bytes,
        }))
    }

    /// The connections whose remaining time is not 0, as a step of a recording.
    pub(super) fn connections() -> anyhow::Result<Value> {
        // The file is read with one call: between calls, the kernel seeks by counting entries, and
        // an expired entry would hide another one.
        let mut text = vec![0; 1 << 20];
        let len = File::open("/proc/thread-self/net/ip_vs_conn")?.read(&mut text)?;
        let text = std::str::from_utf8(&text[..len])?;
        let entries: Vec<Value> = text
            .lines()
            .skip(1)
            .map(|line| entry(line).with_context(|| format!("cannot parse the entry {line:?}")))
            // An entry with 0 s left counts as expired.
            .filter(|entry| !entry.as_ref().is_ok_and(|entry| entry["expires"] == 0))
            .collect::<anyhow::Result<_>>()?;
        Ok(json!({"op": "conns", "entries": entries}))
    }
}

fn in_net4(addr: Ipv4Addr) -> bool {
    matches!(addr.octets(), [10, 1, ..])
}

fn in_net6(addr: Ipv6Addr) -> bool {
    matches!(addr.segments(), [0xfd00, 1, 0, 0, ..])
}

/// Parses a line of `/proc/net/ip_vs_conn`.
fn entry(line: &str) -> anyhow::Result<Value> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [
        proto,
        client,
        cport,
        virt,
        vport,
        dest,
        dport,
        state,
        expires,
        ..,
    ] = words[..]
    else {
        bail!("the entry has too few columns");
    };
    let end = |addr: &str, port: &str| -> anyhow::Result<String> {
        let addr = addr.trim_matches(['[', ']']);
        let ip: IpAddr = if addr.contains(':') {
            addr.parse()?
        } else {
            Ipv4Addr::from_bits(u32::from_str_radix(addr, 16)?).into()
        };
        Ok(SocketAddr::new(ip, u16::from_str_radix(port, 16)?).to_string())
    };
    let mut entry = json!({
        "proto": proto, "client": end(client, cport)?, "virtual": end(virt, vport)?,
        "dest": end(dest, dport)?, "state": state, "expires": expires.parse::<i64>()?,
    });
    if words.len() > 9 {
        entry["pe"] = words[9..].join(" ").into();
    }
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_connection_entries_of_ipv4_and_ipv6_are_parsed() {
        let four = "TCP C0000201 0FA0 0A000909 0050 0A010909 1F90 SYN_RECV        59";
        let entry4 = entry(four).expect("the entry is parsed");
        assert_eq!(entry4["client"], "192.0.2.1:4000");
        assert_eq!(entry4["dest"], "10.1.9.9:8080");
        let six = "UDP [2001:0db8:0000:0000:0000:0000:0000:0001] 0FA0 [fd00:0000:0000:0000:0000:0000:0000:0001] 0035 \
                   [fd00:0001:0000:0000:0000:0000:0000:0002] 0035 UDP            299 sip abc";
        let entry6 = entry(six).expect("the entry is parsed");
        assert_eq!(entry6["virtual"], "[fd00::1]:53");
        assert_eq!(entry6["pe"], "sip abc");
        assert!(entry("TCP C0000201 0FA0").is_err());
    }

    #[test]
    fn services_and_servers_become_ipvsadm_lines() {
        let service = json!({"proto": "udp", "addr": "10.0.9.1", "port": 53, "scheduler": "rr", "flags": ["ops"]});
        assert_eq!(
            service_line(&service).unwrap(),
            "-A -u 10.0.9.1:53 -s rr -o"
        );
        let server = json!({"addr": "10.1.9.1", "port": 53, "forward": "tunnel", "weight": 2,
                            "tun_type": "gue", "tun_port": 6080, "tun_csum": "remcsum"});
        let line = server_line("-a", &service, &server).unwrap();
        assert_eq!(
            line,
            "-a -u 10.0.9.1:53 -r 10.1.9.1:53 -i -w 2 --tun-type gue --tun-port 6080 --tun-remcsum"
        );
        assert_eq!(
            server_line("-d", &service, &server).unwrap(),
            "-d -u 10.0.9.1:53 -r 10.1.9.1:53"
        );
    }
}

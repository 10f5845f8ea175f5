//! Replays recordings of the kernel's decisions against the director, packet by packet, without
//! frames.
//!
//! One JSON object a line: services, their servers in the order in which they are added, and steps.
//! `connect` is one SYN (followed by one ACK if `to` is ESTABLISHED) or one datagram, `expect`
//! where it went; steps with `dir` are single packets of one connection, with the state and the
//! timer that the kernel then has.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

pub mod frames;

use std::collections::BTreeMap;
use std::io::Read;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::Path;

use lvs_core::{
    Connection, Director, Error, Family, Forwarding, Hook, Instant, Options, PacketMeta, Protocol,
    SctpChunk, Segment, Server, ServerConfig, ServiceConfig, ServiceFlags, ServiceKey, TcpFlags,
    Transport, Tuple, Verdict,
};
use serde_json::Value;

/// The cases of every file of `tests/golden/<group>` whose name `wanted` takes.
pub fn cases(group: &str, wanted: impl Fn(&str) -> bool) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(group);
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("recordings are part of the crate")
        .map(|file| file.expect("a readable folder").path())
        .filter(|path| {
            wanted(
                path.file_name()
                    .and_then(|name| name.to_str())
                    .unwrap_or(""),
            )
        })
        .collect();
    files.sort();
    files.iter().flat_map(|path| lines(path)).collect()
}

/// Reads a gzipped file of recordings.
fn lines(path: &Path) -> Vec<Value> {
    let file = std::fs::File::open(path).expect("recordings are part of the crate");
    let mut text = String::new();
    flate2::read::GzDecoder::new(file)
        .read_to_string(&mut text)
        .expect("a gzipped text");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("a line is a JSON object"))
        .collect()
}

/// Replays all `cases`; every one must agree in everything.
pub fn check(cases: &[Value], expected: usize) {
    check_with(cases, expected, |case| Replay::run(case));
}

/// The same with another way of replaying.
pub fn check_with(
    cases: &[Value],
    expected: usize,
    run: impl Fn(&Value) -> Result<Vec<String>, Error> + Sync,
) {
    let replay = |case: &Value| {
        let failure = match run(case) {
            Ok(mismatches) => mismatches.into_iter().next(),
            Err(error) => Some(error.to_string()),
        };
        failure.map(|failure| format!("{}: {failure}", case["name"]))
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let failures: Vec<String> = std::thread::scope(|scope| {
        // Every so many-th case each: the long ones lie together.
        let part = |first: usize| {
            move || {
                cases
                    .iter()
                    .skip(first)
                    .step_by(threads)
                    .filter_map(replay)
                    .collect()
            }
        };
        let parts: Vec<_> = (0..threads).map(|first| scope.spawn(part(first))).collect();
        let done = parts
            .into_iter()
            .map(|part| part.join().expect("a replay panicked"));
        done.flat_map(|failures: Vec<String>| failures).collect()
    });
    let passed = cases.len() - failures.len();
    println!("{passed} recorded cases passed, {} failed", failures.len());
    let shown = failures[..failures.len().min(20)].join("\n");
    assert!(failures.is_empty(), "{} failed\n{shown}", failures.len());
    assert!(
        passed >= expected,
        "only {passed} recorded cases were found"
    );
}

pub fn addr(value: &Value) -> SocketAddr {
    value
        .as_str()
        .expect("an address")
        .parse()
        .expect("an address and a port")
}

pub fn number(value: &Value, key: &str) -> Option<i64> {
    value.get(key).and_then(Value::as_i64)
}

fn sockaddr(value: &Value) -> SocketAddr {
    let ip = value["addr"]
        .as_str()
        .expect("addr")
        .parse()
        .expect("an address");
    let port = number(value, "port").expect("port");
    SocketAddr::new(ip, u16::try_from(port).expect("a port"))
}

fn protocol(value: &Value) -> Protocol {
    match value.as_str() {
        Some("tcp") => Protocol::TCP,
        Some("udp") => Protocol::UDP,
        Some("sctp") => Protocol::SCTP,
        other => panic!("protocol {other:?}"),
    }
}

/// A service as `services` and steps name it; `proto` may stand beside it.
pub fn service_key(value: &Value, proto: &Value) -> ServiceKey {
    if let Some(mark) = number(value, "fwmark") {
        let family = match value["family"].as_str() {
            Some("ipv6") => Family::V6,
            _ => Family::V4,
        };
        return ServiceKey::Mark {
            family,
            mark: mark.try_into().expect("a mark"),
        };
    }
    ServiceKey::Address {
        protocol: protocol(value.get("proto").unwrap_or(proto)),
        addr: sockaddr(value),
    }
}

fn flags_of(names: &Value) -> ServiceFlags {
    let bit = |name: &Value| match name.as_str() {
        Some("persistent") => ServiceFlags::PERSISTENT,
        Some("ops") => ServiceFlags::ONE_PACKET,
        Some("sh-fallback" | "mh-fallback" | "flag-1") => ServiceFlags::SCHED1,
        Some("sh-port" | "mh-port" | "flag-2") => ServiceFlags::SCHED2,
        Some("flag-3") => ServiceFlags::SCHED3,
        other => panic!("flag {other:?}"),
    };
    ServiceFlags(names.as_array().map_or(0, |names| {
        names.iter().fold(0, |bits, name| bits | bit(name))
    }))
}

fn netmask(family: Family, plen: i64) -> u32 {
    let plen = u32::try_from(plen).expect("a prefix length");
    match family {
        Family::V4 => u32::MAX.checked_shl(32 - plen).unwrap_or(0),
        Family::V6 => plen,
    }
}

/// Settings of a service; `old` are those that absent keys keep.
fn service_config(key: &ServiceKey, value: &Value, old: Option<&ServiceConfig>) -> ServiceConfig {
    let mut config = match old {
        Some(old) => old.clone(),
        None => ServiceConfig::new(key.family(), value["scheduler"].as_str().unwrap_or("rr")),
    };
    if let Some(scheduler) = value["scheduler"].as_str() {
        config.scheduler = scheduler.into();
    }
    if value.get("flags").is_some() {
        config.flags = flags_of(&value["flags"]);
    }
    if let Some(timeout) = number(value, "timeout") {
        config.timeout = timeout.try_into().expect("a timeout");
    }
    if let Some(plen) = number(value, "plen") {
        config.netmask = netmask(key.family(), plen);
    }
    if let Some(engine) = value["pe"].as_str() {
        config.engine = Some(engine.into());
    }
    config
}

fn tunnel_of(value: &Value) -> lvs_core::Tunnel {
    use lvs_core::{Tunnel, TunnelChecksum};
    let checksum = match value["tun_csum"].as_str() {
        Some("csum") => TunnelChecksum::Full,
        Some("remcsum") => TunnelChecksum::Remote,
        _ => TunnelChecksum::None,
    };
    match value["tun_type"].as_str() {
        Some("gue") => Tunnel::Gue {
            port: number(value, "tun_port")
                .unwrap_or(0)
                .try_into()
                .expect("a port"),
            checksum,
        },
        Some("gre") => Tunnel::Gre { checksum },
        _ => Tunnel::Ipip,
    }
}

fn server_config(value: &Value) -> ServerConfig {
    ServerConfig {
        upper: number(value, "upper")
            .unwrap_or(0)
            .try_into()
            .expect("upper"),
        lower: number(value, "lower")
            .unwrap_or(0)
            .try_into()
            .expect("lower"),
        tunnel: tunnel_of(value),
        ..ServerConfig::new(
            number(value, "weight")
                .unwrap_or(1)
                .try_into()
                .expect("weight"),
            match value["forward"].as_str() {
                Some("direct") => Forwarding::Route,
                Some("tunnel") => Forwarding::Tunnel,
                _ => Forwarding::Nat,
            },
        )
    }
}

/// A rule that marks packets.
struct Mark {
    protocol: Protocol,
    net: IpAddr,
    bits: u32,
    ports: Vec<(u16, u16)>,
    mark: u32,
}

impl Mark {
    fn new(value: &Value) -> Self {
        let (net, bits) = prefix(&value["dst"]);
        let port = |text: &str| text.trim().parse::<u16>().expect("a port");
        let ports = value["dports"].as_str().map_or_else(
            || vec![(0, u16::MAX)],
            |text| {
                text.trim_matches(['{', '}', ' '])
                    .split(',')
                    .map(|range| match range.split_once('-') {
                        Some((first, last)) => (port(first), port(last)),
                        None => (port(range), port(range)),
                    })
                    .collect()
            },
        );
        Self {
            protocol: protocol(&value["proto"]),
            net,
            bits,
            ports,
            mark: number(value, "mark")
                .expect("mark")
                .try_into()
                .expect("a mark"),
        }
    }

    fn fits(&self, protocol: Protocol, dst: SocketAddr) -> bool {
        self.protocol == protocol
            && in_prefix(self.net, self.bits, dst.ip())
            && self
                .ports
                .iter()
                .any(|&(first, last)| (first..=last).contains(&dst.port()))
    }
}

/// A count of a server.
type Count = fn(&Server) -> u32;

/// One case in progress.
pub struct Replay<'a> {
    case: &'a Value,
    /// Addresses that are local as a whole.
    local: Vec<(IpAddr, u32)>,
    pub director: Director,
    services: Vec<ServiceKey>,
    marks: Vec<Mark>,
    unrecorded: Vec<&'a str>,
    now: Instant,
    step: usize,
    /// The server of the packet connection, now or last.
    last_server: Option<SocketAddr>,
    mismatches: Vec<String>,
}

impl<'a> Replay<'a> {
    pub fn run(case: &'a Value) -> Result<Vec<String>, Error> {
        let mut replay = Self::new(case)?;
        for (number, step) in case["steps"].as_array().expect("steps").iter().enumerate() {
            replay.step = number;
            replay.step(step)?;
        }
        Ok(replay.mismatches)
    }

    fn new(case: &'a Value) -> Result<Self, Error> {
        let mut director = Director::new(Options {
            // Bursts are of tens of thousands.
            max_connections: if case.to_string().contains("\"burst\"") {
                1 << 16
            } else {
                1 << 10
            },
            ..Options::default()
        });
        director.advance(Instant::ZERO);
        let config = case.get("config").unwrap_or(case);
        for (name, value) in config["sysctl"].as_object().into_iter().flatten() {
            director.control.set_sysctl(name, &plain(value))?;
        }
        if let Some(timeouts) = config.get("timeouts") {
            let get = |key| u32::try_from(number(timeouts, key).unwrap_or(0)).expect("seconds");
            director
                .control
                .set_timeouts(get("tcp"), get("tcpfin"), get("udp"))?;
        }
        if let Some(backup) = case.get("backup") {
            director.control.start_backup(backup_of(backup))?;
        }
        for daemon in config["daemons"].as_array().into_iter().flatten() {
            let syncid = number(daemon, "syncid").expect("syncid");
            let syncid = syncid.try_into().expect("a byte");
            if daemon["role"] == "backup" {
                director.control.start_backup(backup_of(daemon))?;
                continue;
            }
            let maxlen = number(daemon, "sync-maxlen").map(|len| len.try_into().expect("a length"));
            let group = daemon["mcast-group"].as_str().unwrap_or("");
            let master = lvs_core::sync::Master::new(syncid, maxlen, group.contains(':'));
            director.control.start_master(master)?;
        }
        if case.get("datagrams").is_some() {
            // The helper was there when these were recorded.
            director.control.set_ftp_ports(vec![21]).expect("one port");
        }
        let list = |key: &str| config[key].as_array().map_or(&[][..], Vec::as_slice);
        let mut replay = Self {
            case,
            director,
            services: Vec::new(),
            marks: list("marks").iter().map(Mark::new).collect(),
            local: list("local").iter().map(prefix).collect(),
            unrecorded: list("unrecorded")
                .iter()
                .filter_map(Value::as_str)
                .collect(),
            now: Instant::ZERO,
            step: 0,
            last_server: None,
            mismatches: Vec::new(),
        };
        if config.get("services").is_some() {
            for service in list("services") {
                let key = service_key(service, &Value::Null);
                replay.add_service(key, service)?;
            }
        } else {
            let key = service_key(&case["service"], &case["proto"]);
            replay.add_service(key, case)?;
        }
        Ok(replay)
    }

    fn add_service(&mut self, key: ServiceKey, value: &Value) -> Result<(), Error> {
        let mut config = service_config(&key, value, None);
        if let Some(plen) = number(&value["service"], "plen") {
            config.netmask = netmask(key.family(), plen);
        }
        self.director.control.add_service(key, config, None)?;
        self.services.push(key);
        for server in value["destinations"].as_array().expect("destinations") {
            let config = server_config(server);
            self.director
                .control
                .add_server(&key, sockaddr(server), &config, self.now)?;
        }
        Ok(())
    }

    /// The service that a step names, or the only one.
    fn service(&self, step: &Value) -> ServiceKey {
        match step.get("service") {
            Some(service) => service_key(service, &Value::Null),
            None => self.services[0],
        }
    }

    fn vip(&self) -> SocketAddr {
        match self.services[0] {
            ServiceKey::Address { addr, .. } => addr,
            ServiceKey::Mark { .. } => panic!("a step without dst"),
        }
    }

    fn packet(&mut self, hook: Hook, tuple: Tuple, transport: Transport<'_>, len: u32) -> Verdict {
        self.packet_with(hook, tuple, transport, Segment::NONE, len)
    }

    fn packet_with(
        &mut self,
        hook: Hook,
        tuple: Tuple,
        transport: Transport<'_>,
        segment: Segment<'_>,
        len: u32,
    ) -> Verdict {
        let mark = self
            .marks
            .iter()
            .find(|mark| mark.fits(tuple.protocol, tuple.dst))
            .map_or(0, |mark| mark.mark);
        let meta = PacketMeta {
            hook,
            tuple,
            transport,
            segment,
            mark,
            len,
        };
        self.director.handle_packet(&meta, self.now)
    }

    fn mismatch(&mut self, what: &str, expected: impl ToString, got: impl ToString) {
        let (name, step) = (&self.case["name"], self.step);
        let (expected, got) = (expected.to_string(), got.to_string());
        self.mismatches.push(format!(
            "{name} step {step} {what}: the kernel says {expected}, we say {got}"
        ));
    }

    fn compare<T: PartialEq + ToString + ?Sized>(&mut self, what: &str, expected: &T, got: &T) {
        if expected != got {
            self.mismatch(what, expected.to_string(), got.to_string());
        }
    }

    fn step(&mut self, step: &Value) -> Result<(), Error> {
        if step.get("frame").is_some() {
            self.frame(step);
            return Ok(());
        }
        let Some(op) = step["op"].as_str() else {
            self.packet_step(step);
            return Ok(());
        };
        let control = &mut self.director.control;
        match op {
            "connect" => self.connect(step),
            "burst" => self.burst(step),
            "close" => {
                let flags = match step["how"].as_str() {
                    Some("FIN") => TcpFlags::FIN | TcpFlags::ACK,
                    _ => TcpFlags::RST | TcpFlags::ACK,
                };
                let tuple = Tuple {
                    protocol: Protocol::TCP,
                    src: addr(&step["client"]),
                    dst: step.get("dst").map_or_else(|| self.vip(), addr),
                };
                let transport = Transport::Tcp(TcpFlags(flags));
                let _ = self.packet(Hook::Local, tuple, transport, 40);
            }
            "edit" => {
                let (key, at) = (self.service(step), sockaddr(step));
                let control = &mut self.director.control;
                let service = control.service(&key).ok_or(Error::NoService)?;
                let server = service.servers().iter().find(|server| server.addr() == at);
                let mut config = server.ok_or(Error::NoServer)?.config();
                if let Some(weight) = number(step, "weight") {
                    config.weight = weight.try_into().expect("a weight");
                }
                if let Some(upper) = number(step, "upper") {
                    config.upper = upper.try_into().expect("a threshold");
                }
                if let Some(lower) = number(step, "lower") {
                    config.lower = lower.try_into().expect("a threshold");
                }
                control.edit_server(&key, at, &config)?;
            }
            "add" => {
                let key = self.service(step);
                let mut config = server_config(step);
                if step.get("forward").is_none() && self.case["forward"] == "direct" {
                    config.forwarding = Forwarding::Route;
                }
                self.director
                    .control
                    .add_server(&key, sockaddr(step), &config, self.now)?;
            }
            "del" => {
                let key = self.service(step);
                self.director
                    .control
                    .delete_server(&key, sockaddr(step), self.now)?;
            }
            "set_scheduler" | "edit_service" => {
                let key = self.service(step);
                let control = &mut self.director.control;
                let old = control.service(&key).ok_or(Error::NoService)?.config();
                let config = service_config(&key, step, Some(old));
                control.edit_service(&key, config, None)?;
            }
            "sysctl" => {
                let name = step["name"].as_str().expect("a name");
                control.set_sysctl(name, &plain(&step["value"]))?;
            }
            "set" => {
                let get = |key| u32::try_from(number(step, key).unwrap_or(0)).expect("seconds");
                control.set_timeouts(get("tcp"), get("tcpfin"), get("udp"))?;
            }
            "zero" => {
                let key = step
                    .get("service")
                    .map(|service| service_key(service, &Value::Null));
                control.zero(key.as_ref())?;
            }
            "add_service" => {
                let key = service_key(step, &Value::Null);
                self.add_service(key, step)?;
            }
            "del_service" => {
                let key = self.service(step);
                self.services.retain(|other| *other != key);
                self.director.control.delete_service(&key, self.now)?;
            }
            "stats" | "rates" => self.stats(step),
            "proc" => self.proc(step),
            "sync" => {
                let message = frames::hex(&step["payload"]);
                self.director.handle_sync(&message, self.now);
                self.director.advance(self.now);
                if step.get("state").is_some() {
                    self.state_step(step, None);
                }
            }
            "ipvsadm" => {
                let done = self.ipvsadm(step);
                if let Some(exit) = step.get("exit") {
                    self.compare("success", &(*exit == 0), &done.is_ok());
                } else {
                    done?;
                }
            }
            "wait" => self.wait(step),
            "counts" => self.counts(step),
            "conns" => self.conns(step),
            other => panic!("unknown step {other}"),
        }
        Ok(())
    }

    fn wait(&mut self, step: &Value) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a few hours"
        )]
        let nanos = (step["seconds"].as_f64().expect("seconds") * 1e9).round() as u64;
        self.now = Instant::from_nanos(self.now.as_nanos() + nanos);
        self.director.advance(self.now);
        if step.get("state").is_some() {
            self.state_step(step, None);
        }
    }

    /// Where a packet goes, as recordings write it.
    fn target(&self, verdict: &Verdict, dst: SocketAddr) -> Option<SocketAddr> {
        let Verdict::Forward(forward) = verdict else {
            return None;
        };
        if forward.method == Forwarding::Nat {
            return Some(forward.target);
        }
        // Packets that keep their port are shown with the port that is configured for the server.
        let server = forward.server?;
        let mut records = self.director.control.endpoints();
        let (_, record) = records.find(|(_, record)| record.id() == server)?;
        let port = match record.addr().port() {
            0 => dst.port(),
            port => port,
        };
        Some(SocketAddr::new(record.addr().ip(), port))
    }

    fn reply_name(verdict: &Verdict, protocol: Protocol, dst: SocketAddr) -> &'static str {
        match verdict {
            Verdict::Unreachable(_) if dst.is_ipv6() => "icmp6-port-unreachable",
            Verdict::Unreachable(_) => "icmp-port-unreachable",
            Verdict::Accept(_) if protocol == Protocol::TCP => "tcp-rst",
            Verdict::Accept(_) if protocol == Protocol::SCTP => "local-stack",
            Verdict::Accept(_) if dst.is_ipv6() => "icmp6-port-unreachable",
            Verdict::Accept(_) => "icmp-port-unreachable",
            _ => "nothing",
        }
    }

    fn connect(&mut self, step: &Value) {
        let proto = step.get("proto").unwrap_or(&self.case["proto"]);
        let tuple = Tuple {
            protocol: protocol(proto),
            src: addr(&step["client"]),
            dst: step.get("dst").map_or_else(|| self.vip(), addr),
        };
        let payload = step["payload"].as_str().unwrap_or("x").as_bytes();
        let transport = match tuple.protocol {
            Protocol::TCP => Transport::Tcp(TcpFlags(TcpFlags::SYN)),
            Protocol::UDP => Transport::Udp(payload),
            _ => panic!("connect is for TCP and UDP"),
        };
        let verdict = self.packet(Hook::Local, tuple, transport, 40);
        let text = |target: Option<SocketAddr>| {
            target.map_or("nowhere".into(), |target| target.to_string())
        };
        let expected = step["expect"].as_str().map(|_| addr(&step["expect"]));
        let got = self.target(&verdict, tuple.dst);
        if self.is_random() {
            if let Verdict::Forward(forward) = verdict {
                let mut records = self.director.control.endpoints();
                let chosen = records.find(|(_, record)| Some(record.id()) == forward.server);
                let weight = chosen.map_or(0, |(_, server)| server.weight());
                drop(records);
                self.compare("weight above 0", &true, &(weight > 0));
            }
        } else {
            self.compare("server", &text(expected), &text(got));
        }
        if let Some(reply) = step["reply"].as_str()
            && !self.unrecorded.contains(&"reply")
            && !self.is_random()
        {
            let got = Self::reply_name(&verdict, tuple.protocol, tuple.dst);
            self.compare("reply", reply, got);
        }
        if step["to"] == "ESTABLISHED" && matches!(verdict, Verdict::Forward(_)) {
            let ack = Transport::Tcp(TcpFlags(TcpFlags::ACK));
            let _ = self.packet(Hook::Local, tuple, ack, 40);
        }
    }

    /// Where connections go is drawn by lot.
    fn is_random(&self) -> bool {
        let list = self.case["nondeterministic"].as_array();
        list.is_some_and(|list| list.iter().any(|what| what == "expect"))
    }

    fn burst(&mut self, step: &Value) {
        let dst = step.get("dst").map_or_else(|| self.vip(), addr);
        let client = addr(&step["client"]);
        let tcp = self.case["proto"] == "tcp";
        let mut counts: BTreeMap<String, i64> = BTreeMap::new();
        let count = number(step, "count").expect("count");
        for n in 0..u32::try_from(count).expect("a count") {
            let moved = |base: SocketAddr| {
                let ip = match base.ip() {
                    IpAddr::V4(ip) => IpAddr::V4((ip.to_bits() + n).into()),
                    IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() + u128::from(n))),
                };
                SocketAddr::new(ip, base.port())
            };
            let by_client = step["step"] == "client";
            let tuple = Tuple {
                protocol: if tcp { Protocol::TCP } else { Protocol::UDP },
                src: if by_client { moved(client) } else { client },
                dst: if by_client { dst } else { moved(dst) },
            };
            let transport = if tcp {
                Transport::Tcp(TcpFlags(TcpFlags::SYN))
            } else {
                Transport::Udp(b"x")
            };
            let verdict = self.packet(Hook::Local, tuple, transport, 40);
            let target = self.target(&verdict, tuple.dst);
            let name = target.map_or("none".into(), |target| target.to_string());
            *counts.entry(name).or_default() += 1;
        }
        let recorded: BTreeMap<String, i64> = step["expect"]
            .as_object()
            .expect("counts")
            .iter()
            .map(|(name, count)| (name.clone(), count.as_i64().expect("a count")))
            .collect();
        if self.case["scheduler"] != "twos" {
            self.compare("burst", &format!("{recorded:?}"), &format!("{counts:?}"));
            return;
        }
        // Random by design. Both are samples of one distribution: servers that got nothing get
        // nothing, and shares agree within six standard deviations.
        for name in recorded
            .keys()
            .chain(counts.keys())
            .cloned()
            .collect::<Vec<_>>()
        {
            let get = |counts: &BTreeMap<String, i64>| counts.get(&name).copied().unwrap_or(0);
            let (kernel, ours) = (get(&recorded), get(&counts));
            let spread = 36 * (kernel + ours).max(8);
            if (kernel - ours).pow(2) > spread {
                self.mismatch(&name, kernel, ours);
            }
        }
    }

    fn servers(&self, key: &ServiceKey) -> Vec<std::sync::Arc<Server>> {
        self.director
            .control
            .service(key)
            .map_or(Vec::new(), |service| service.servers().to_vec())
    }

    fn counts(&mut self, step: &Value) {
        let servers = self.servers(&self.service(step));
        let order: Vec<String> = servers
            .iter()
            .map(|server| server.addr().to_string())
            .collect();
        self.compare("order", &step["order"], &order.into());
        let columns: [(&str, Count); 3] = [
            ("active", Server::active),
            ("inactive", Server::inactive),
            ("persistent", Server::templates),
        ];
        let random = self.is_random();
        // Where the kernel's lots sent connections, ours did not: sums agree while all servers are
        // there and take all.
        let steps = &self.case["steps"].as_array().expect("steps")[..self.step];
        let limited = |value: &Value| number(value, "upper").is_some_and(|upper| upper > 0);
        let servers_now = self.case["destinations"].as_array();
        let incomparable = steps
            .iter()
            .any(|step| matches!(step["op"].as_str(), Some("del" | "close")) || limited(step))
            || servers_now.is_some_and(|servers| servers.iter().any(limited));
        for (what, count) in columns {
            let Some(expected) = step.get(what) else {
                continue;
            };
            if random && incomparable {
                continue;
            }
            if random {
                let sum = |counts: &mut dyn Iterator<Item = i64>| counts.sum::<i64>();
                let kernel = sum(&mut expected
                    .as_object()
                    .expect("counts")
                    .values()
                    .filter_map(Value::as_i64));
                let ours = sum(&mut servers.iter().map(|server| count(server).into()));
                self.compare(what, &kernel, &ours);
            } else {
                let got: serde_json::Map<_, _> = servers
                    .iter()
                    .map(|server| (server.addr().to_string(), Value::from(count(server))))
                    .collect();
                self.compare(what, expected, &got.into());
            }
        }
    }

    /// A backup's case: one message, or several with a listing after each.
    pub fn run_backup(case: &'a Value) -> Result<Vec<String>, Error> {
        let mut replay = Self::new(case)?;
        if case.get("payload").is_some() {
            replay.message(case)?;
        }
        for (number, step) in case["steps"].as_array().into_iter().flatten().enumerate() {
            replay.step = number;
            replay.message(step)?;
        }
        Ok(replay.mismatches)
    }

    fn message(&mut self, step: &Value) -> Result<(), Error> {
        if step["op"] == "ipvsadm" {
            self.ipvsadm(step)?;
        } else {
            let message = frames::hex(&step["payload"]);
            self.director.handle_sync(&message, self.now);
            self.director.advance(self.now);
        }
        if step.get("entries").is_some() {
            self.conns(step);
        }
        self.destinations(step);
        Ok(())
    }

    /// Servers with their counts.
    fn destinations(&mut self, step: &Value) {
        let Some(list) = step["destinations"].as_array() else {
            return;
        };
        let row = |service: &ServiceKey, server: &Server| {
            let name = match service {
                ServiceKey::Address { protocol, addr } => format!("{protocol} {addr}"),
                ServiceKey::Mark { mark, .. } => format!("FWM {mark}"),
            };
            let addr = server.addr();
            format!("{name} {addr} {} {}", server.active(), server.inactive())
        };
        let mut ours: Vec<String> = self
            .services
            .iter()
            .flat_map(|key| {
                self.servers(key)
                    .into_iter()
                    .map(move |server| row(key, &server))
            })
            .collect();
        let mut kernel: Vec<String> = list
            .iter()
            .map(|entry| {
                let text = |key: &str| entry[key].as_str().unwrap_or("?").to_owned();
                let counts = (&entry["active"], &entry["inactive"]);
                format!(
                    "{} {} {} {}",
                    text("service"),
                    text("dest"),
                    counts.0,
                    counts.1
                )
            })
            .collect();
        ours.sort();
        kernel.sort();
        self.compare("destinations", &kernel.join("; "), &ours.join("; "));
    }

    /// A master's case: frames, and the datagrams that they lead to.
    pub fn run_master(case: &'a Value) -> Result<Vec<String>, Error> {
        let mut replay = Self::new(case)?;
        let mut sent: Vec<(usize, String)> = Vec::new();
        for (number, step) in case["steps"].as_array().expect("steps").iter().enumerate() {
            replay.step = number;
            if step["op"] == "conns" {
                replay.conns(step);
                replay.destinations(step);
            } else {
                replay.step(step)?;
            }
            if step["op"] == "wait" {
                while let Some(message) = replay.director.take_sync_message(replay.now) {
                    let hex: String = message
                        .bytes
                        .iter()
                        .map(|byte| format!("{byte:02x}"))
                        .collect();
                    sent.push((number, hex));
                }
            }
        }
        let recorded: Vec<(usize, String)> = case["datagrams"]
            .as_array()
            .expect("datagrams")
            .iter()
            .map(|datagram| {
                let after = datagram["after_step"].as_u64().expect("a step");
                (
                    usize::try_from(after).expect("a step"),
                    datagram["payload"].as_str().expect("payload").to_owned(),
                )
            })
            .collect();
        for (n, (kernel, ours)) in recorded.iter().zip(&sent).enumerate() {
            replay.compare(
                &format!("datagram {n}"),
                &format!("{kernel:?}"),
                &format!("{ours:?}"),
            );
        }
        replay.compare("number of datagrams", &recorded.len(), &sent.len());
        Ok(replay.mismatches)
    }

    /// Connections and templates.
    fn entries(&self) -> Vec<(Connection, Option<String>)> {
        let director = &self.director;
        let connections = director
            .shard
            .connections_from(0, self.now)
            .map(|conn| (conn, None));
        let templates = director
            .control
            .templates_from(0, self.now)
            .map(|template| {
                let engine = director.control.template_engine(template.id);
                let engine =
                    engine.map(|(name, data)| format!("{name} {}", String::from_utf8_lossy(data)));
                (template, engine)
            });
        connections.chain(templates).collect()
    }

    fn conns(&mut self, step: &Value) {
        let nodest = self.director.control.sysctls().expire_nodest_conn;
        let configured: Vec<SocketAddr> = self
            .services
            .iter()
            .flat_map(|key| self.servers(key))
            .map(|server| server.addr())
            .collect();
        let shown = |dest: SocketAddr| {
            !nodest
                || configured.iter().any(|server| {
                    server.ip() == dest.ip()
                        && (server.port() == dest.port() || server.port() == 0 || dest.port() == 0)
                })
        };
        let with_origin = step["entries"]
            .as_array()
            .is_some_and(|entries| entries.iter().any(|entry| entry.get("origin").is_some()));
        let name = |protocol: Protocol| match protocol {
            Protocol(0) => "IP".to_owned(),
            Protocol(n @ (50 | 51)) => format!("IP_{n}"),
            protocol => protocol.to_string(),
        };
        let mut ours: Vec<(String, u64, bool)> = self
            .entries()
            .iter()
            .filter(|(conn, _)| shown(conn.server))
            .map(|(conn, engine)| {
                let origin = match (with_origin, conn.synced) {
                    (false, _) => "",
                    (true, true) => "SYNC",
                    (true, false) => "LOCAL",
                };
                let text = format!(
                    "{} {} {} {} {} {} {origin}",
                    name(conn.protocol),
                    conn.client,
                    conn.virt,
                    conn.server,
                    conn.state,
                    engine.as_deref().unwrap_or("")
                );
                // The kernel computes milliseconds in 32 bits.
                let millis = conn.expires.as_millis() % (1 << 32);
                (
                    text,
                    u64::try_from(millis).unwrap_or(0) / 1000,
                    conn.template,
                )
            })
            .collect();
        let mut kernel: Vec<(String, Option<u64>)> = step["entries"]
            .as_array()
            .expect("entries")
            .iter()
            .filter(|entry| shown(addr(&entry["dest"])))
            .map(|entry| {
                let text = format!(
                    "{} {} {} {} {} {} {}",
                    entry["proto"].as_str().expect("proto"),
                    addr(&entry["client"]),
                    addr(&entry["virtual"]),
                    addr(&entry["dest"]),
                    entry["state"].as_str().expect("state"),
                    entry["pe"].as_str().unwrap_or(""),
                    entry["origin"].as_str().unwrap_or("")
                );
                (text, entry["expires"].as_u64())
            })
            .collect();
        ours.sort();
        kernel.sort();
        let texts =
            |list: &mut dyn Iterator<Item = &String>| list.cloned().collect::<Vec<_>>().join("\n");
        let (kernels, oursies) = (
            texts(&mut kernel.iter().map(|entry| &entry.0)),
            texts(&mut ours.iter().map(|entry| &entry.0)),
        );
        if kernels != oursies {
            let only = |a: &str, b: &str| {
                let mut b: Vec<&str> = b.lines().collect();
                let mut only = Vec::new();
                for line in a.lines() {
                    match b.iter().position(|other| *other == line) {
                        Some(at) => drop(b.swap_remove(at)),
                        None => only.push(line.to_owned()),
                    }
                }
                format!("{only:?}")
            };
            let (a, b) = (only(&kernels, &oursies), only(&oursies, &kernels));
            self.mismatch("entries", a, b);
            return;
        }
        if self.unrecorded.contains(&"expires") {
            return;
        }
        for ((text, kernel), (_, ours, template)) in kernel.into_iter().zip(ours) {
            // The kernel's timers fire late, so a template that ran out while it controlled
            // connections was armed again
            let late = if template { 1 + (60 * 4 + 600) / 8 } else { 1 };
            if let Some(kernel) = kernel
                && !(ours.saturating_sub(1)..=ours + late).contains(&kernel)
                && !(ours == 0 && kernel == u64::from(u32::MAX) / 1000)
            {
                self.mismatch(&format!("expires of {text}"), kernel, ours);
            }
        }
    }

    /// A recorded frame.
    fn frame(&mut self, step: &Value) {
        let frame = frames::hex(&step["frame"]);
        let vips: Vec<IpAddr> = self
            .services
            .iter()
            .filter_map(|key| match key {
                ServiceKey::Address { addr, .. } => Some(addr.ip()),
                ServiceKey::Mark { .. } => None,
            })
            .collect();
        let mut local = self.local.clone();
        // Marked packets can be local wherever they go.
        if self.case["config"].get("rules").is_some() {
            local.extend(self.marks.iter().map(|mark| (mark.net, mark.bits)));
        }
        let hook = |dst: IpAddr| {
            let within = |&(net, bits): &(IpAddr, u32)| in_prefix(net, bits, dst);
            if vips.contains(&dst) || local.iter().any(within) {
                Hook::Local
            } else {
                Hook::Transit
            }
        };
        match frames::parse(&frame, hook, 0) {
            frames::Frame::Packet(tuple, header, len) => {
                // The host drops what seems to come from an address of its own.
                let martian = tuple.src.is_ipv4() && vips.contains(&tuple.src.ip());
                if martian && self.case["config"].get("hostsysctl").is_none() {
                    return;
                }
                let hook = hook(tuple.dst.ip());
                let segment = header.segment();
                let verdict = self.packet_with(hook, tuple, header.transport(), segment, len);
                self.answer(&verdict, tuple, header.transport(), hook);
                self.went(step, &verdict);
            }
            frames::Frame::Icmp(error) => {
                let verdict = self.director.handle_icmp_error(&error, self.now);
                self.went(step, &verdict);
            }
            frames::Frame::Other(_) => {}
        }
    }

    /// The host answers a segment that is left to it with a reset, which passes the director.
    fn answer(&mut self, verdict: &Verdict, tuple: Tuple, transport: Transport<'_>, hook: Hook) {
        let delivered = match verdict {
            Verdict::Accept(_) => true,
            Verdict::Forward(forward) => forward.method == Forwarding::Local,
            _ => false,
        };
        if let (true, Transport::Tcp(flags), Hook::Local) = (delivered, transport, hook)
            && !flags.has(TcpFlags::RST)
        {
            let answer = Tuple {
                src: tuple.dst,
                dst: tuple.src,
                ..tuple
            };
            let reset = Transport::Tcp(TcpFlags(TcpFlags::RST));
            let _ = self.packet(Hook::Output, answer, reset, 40);
        }
    }

    /// Whether a frame left on the side that the recording shows.
    fn went(&mut self, step: &Value, verdict: &Verdict) {
        if self.case.get("datagrams").is_some() {
            return;
        }
        let out = step["out"].as_array().expect("out");
        let expected = match out.first().and_then(|frame| frame["dev"].as_str()) {
            Some("sv") => "sv",
            Some("cl") => "cl",
            _ => "nowhere",
        };
        let got = match verdict {
            // What is sent to a server may fail on the way: time to live, size.
            Verdict::Forward(_) if expected != "nowhere" && step["dev"] == "cl" => expected,
            Verdict::Forward(_) => "sv",
            Verdict::Reply(_) | Verdict::Unreachable(_) | Verdict::Reset(_) => "cl",
            Verdict::Accept(_) => expected,
            Verdict::Drop(_) => "nowhere",
        };
        self.compare("interface", expected, got);
    }

    /// Counters or rates.
    fn stats(&mut self, step: &Value) {
        let rates = step["op"] == "rates";
        let control = &self.director.control;
        let json = |stats: lvs_core::Stats| {
            let counts = if rates { stats.rates } else { stats.shown };
            let names = if rates {
                ["cps", "inpps", "outpps", "inbps", "outbps"]
            } else {
                ["conns", "inpkts", "outpkts", "inbytes", "outbytes"]
            };
            let values = [
                counts.conns,
                counts.in_packets,
                counts.out_packets,
                counts.in_bytes,
                counts.out_bytes,
            ];
            let pairs = names
                .into_iter()
                .map(String::from)
                .zip(values.map(Value::from));
            Value::Object(pairs.collect())
        };
        let what = if rates { "rates" } else { "stats" };
        let mut pairs = Vec::new();
        if let Some(total) = step.get("total") {
            pairs.push((
                "total".to_owned(),
                total.clone(),
                json(control.total_stats()),
            ));
        }
        for recorded in step["services"].as_array().into_iter().flatten() {
            let key = service_key(&recorded["service"], &Value::Null);
            let Some(service) = control.service(&key) else {
                pairs.push((key.to_string(), recorded.clone(), Value::Null));
                continue;
            };
            pairs.push((
                key.to_string(),
                recorded[what].clone(),
                json(service.stats()),
            ));
            let Some(destinations) = recorded["destinations"].as_array() else {
                continue;
            };
            let addrs = |list: &mut dyn Iterator<Item = SocketAddr>| {
                list.map(|addr| addr.to_string()).collect::<Vec<_>>().into()
            };
            pairs.push((
                format!("servers of {key}"),
                addrs(&mut destinations.iter().map(sockaddr)),
                addrs(&mut service.servers().iter().map(|server| server.addr())),
            ));
            for (recorded, server) in destinations.iter().zip(service.servers()) {
                let stats = control.server_stats(server.id()).unwrap_or_default();
                pairs.push((
                    server.addr().to_string(),
                    recorded[what].clone(),
                    json(stats),
                ));
                for (what, count) in [("active", server.active()), ("inactive", server.inactive())]
                {
                    if let Some(expected) = recorded.get(what) {
                        let name = format!("{what} of {}", server.addr());
                        pairs.push((name, expected.clone(), count.into()));
                    }
                }
            }
        }
        for (name, kernel, ours) in pairs {
            self.compare(&name, &kernel, &ours);
        }
    }

    /// Text of a file in /proc: the order of services and connections is that of a hash table, and
    /// timers are late.
    fn proc(&mut self, step: &Value) {
        let (control, shard) = (&self.director.control, &self.director.shard);
        let mut text = String::new();
        let path = step["path"].as_str().expect("path");
        match path {
            "/proc/net/ip_vs" => lvs_core::proc::services(&mut text, control, 4096),
            "/proc/net/ip_vs_conn" => {
                lvs_core::proc::connections(&mut text, control, shard, self.now)
            }
            "/proc/net/ip_vs_conn_sync" => {
                lvs_core::proc::connections_sync(&mut text, control, shard, self.now)
            }
            "/proc/net/ip_vs_stats" => lvs_core::proc::stats(&mut text, control),
            "/proc/net/ip_vs_stats_percpu" => lvs_core::proc::stats_percpu(&mut text, control),
            other => panic!("unknown file {other}"),
        }
        .expect("a string takes everything");
        let recorded = step["text"].as_str().expect("text");
        let connections = path.contains("conn");
        let blocks = |text: &str| {
            // A service with its servers, or a connection without the number of seconds, whose
            // width still counts.
            let mut blocks: Vec<String> = Vec::new();
            for line in text.lines() {
                let mut line = line.to_owned();
                if connections && !line.starts_with("Pro ") {
                    let digits = line.trim_end_matches(|c: char| c.is_ascii_digit()).len();
                    let width = line.len();
                    line.truncate(digits);
                    line.push_str(&" ".repeat(width - digits));
                }
                match blocks.last_mut() {
                    Some(block) if path == "/proc/net/ip_vs" && line.starts_with("  -> 0") => {
                        block.push('\n');
                        block.push_str(&line);
                    }
                    _ => blocks.push(line),
                }
            }
            if connections || path == "/proc/net/ip_vs" {
                let header = if connections { 1 } else { 3 };
                blocks[header..].sort();
            }
            blocks.join("\n")
        };
        self.compare(path, &blocks(recorded), &blocks(&text));
    }

    /// Operations that the recorder made with ipvsadm.
    fn ipvsadm(&mut self, step: &Value) -> Result<(), Error> {
        let words: Vec<&str> = match &step["args"] {
            Value::String(line) => line.split_whitespace().collect(),
            list => list
                .as_array()
                .expect("arguments")
                .iter()
                .filter_map(Value::as_str)
                .collect(),
        };
        let value = |flag: &str| {
            let at = words.iter().position(|word| *word == flag)?;
            words.get(at + 1).copied()
        };
        let key = |_: ()| {
            let parse = |text: &str| text.parse::<SocketAddr>().expect("an address");
            if let Some(addr) = value("-t") {
                ServiceKey::tcp(parse(addr))
            } else if let Some(addr) = value("-u") {
                ServiceKey::udp(parse(addr))
            } else if let Some(addr) = value("--sctp-service") {
                ServiceKey::Address {
                    protocol: Protocol::SCTP,
                    addr: parse(addr),
                }
            } else {
                ServiceKey::Mark {
                    family: if words.contains(&"-6") {
                        Family::V6
                    } else {
                        Family::V4
                    },
                    mark: value("-f").expect("a service").parse().expect("a mark"),
                }
            }
        };
        let server = |_: ()| -> SocketAddr {
            let text = value("-r").expect("a server");
            text.parse()
                .unwrap_or_else(|_| SocketAddr::new(text.parse().expect("an address"), 0))
        };
        let forwarding = if words.contains(&"-m") {
            Forwarding::Nat
        } else if words.contains(&"-i") {
            Forwarding::Tunnel
        } else {
            Forwarding::Route
        };
        let weight = value("-w").map_or(1, |text| text.parse().expect("a weight"));
        let config = ServerConfig::new(weight, forwarding);
        let control = &mut self.director.control;
        match words[0] {
            "-A" | "-E" => {
                let key = key(());
                let mut config = ServiceConfig::new(key.family(), value("-s").unwrap_or("wlc"));
                if let Some(timeout) = value("-p") {
                    config.timeout = timeout.parse().expect("seconds");
                    config.flags.0 |= ServiceFlags::PERSISTENT;
                }
                if words[0] == "-A" {
                    control.add_service(key, config, None)?;
                    self.services.push(key);
                } else {
                    control.edit_service(&key, config, None)?;
                }
            }
            "-D" => {
                let key = key(());
                control.delete_service(&key, self.now)?;
                self.services.retain(|other| *other != key);
            }
            "-C" => {
                control.flush(self.now);
                self.services.clear();
            }
            "-a" => control.add_server(&key(()), server(()), &config, self.now)?,
            "-e" => control.edit_server(&key(()), server(()), &config)?,
            "-d" => control.delete_server(&key(()), server(()), self.now)?,
            "--set" => {
                let number = |at: usize| words[at].parse().expect("seconds");
                control.set_timeouts(number(1), number(2), number(3))?;
            }
            list if list.starts_with("-L") => {}
            other => panic!("ipvsadm {other}"),
        }
        Ok(())
    }

    /// One packet of a connection.
    fn packet_step(&mut self, step: &Value) {
        let client = step.get("client").unwrap_or(&self.case["client"]);
        let client = addr(client);
        let vip = self.vip();
        let protocol = protocol(&self.case["proto"]);
        let len = u32::try_from(number(step, "len").unwrap_or(0)).expect("a length");
        let transport = match protocol {
            Protocol::TCP => Transport::Tcp(tcp_flags(step["flags"].as_str().expect("flags"))),
            Protocol::UDP => Transport::Udp(b"x"),
            _ => Transport::Sctp(SctpChunk {
                first: chunk_type(step["chunk"].as_str().expect("chunk")),
                abort_follows: false,
            }),
        };
        let from_server = step["dir"] == "s2c";
        let (hook, src, dst) = if from_server {
            let server = match step.get("from") {
                Some(from) => addr(from),
                None if self.case["forward"] == "masq" => match self.last_server {
                    Some(server) => server,
                    None => sockaddr(&self.case["destinations"][0]),
                },
                None => vip,
            };
            (Hook::Transit, server, client)
        } else {
            (Hook::Local, client, vip)
        };
        let tuple = Tuple { protocol, src, dst };
        let verdict = self.packet(hook, tuple, transport, 40 + len);
        let forwarded = match verdict {
            Verdict::Forward(_) => "server",
            Verdict::Reply(_) => "client",
            Verdict::Accept(_) if from_server => "client",
            _ => "nowhere",
        };
        self.compare(
            "forwarded",
            step["forwarded"].as_str().unwrap_or("nowhere"),
            forwarded,
        );
        if let Some(source) = step.get("source").filter(|source| source.is_string()) {
            let got = match verdict {
                Verdict::Reply(reply) => reply.source.unwrap_or(src),
                _ => src,
            };
            self.compare("source", &addr(source), &got);
        }
        if let Some(reply) = step["reply"].as_str() {
            self.compare("reply", reply, Self::reply_name(&verdict, protocol, dst));
        }
        self.answer(&verdict, tuple, transport, hook);
        // What a packet replaces or expires is gone a tick later.
        self.director.advance(self.now);
        self.state_step(step, Some(client));
    }

    /// Compares the entries of the client with what is recorded.
    fn state_step(&mut self, step: &Value, client: Option<SocketAddr>) {
        let client =
            client.unwrap_or_else(|| addr(step.get("client").unwrap_or(&self.case["client"])));
        let mut entries: Vec<Connection> = self
            .director
            .shard
            .connections_from(0, self.now)
            .filter(|conn| conn.client == client && !conn.template)
            .collect();
        if let Some(entry) = entries.first() {
            self.last_server = Some(entry.server);
        }
        let waited = step["op"] == "wait";
        let mut recorded: Vec<&Value> = match step["entries"].as_array() {
            Some(list) => list.iter().collect(),
            None if step["state"].is_string() => vec![step],
            None => Vec::new(),
        };
        let key = |state: &str, dest: SocketAddr, expires: u64| (state.to_owned(), dest, expires);
        entries.sort_by_key(|conn| key(conn.state, conn.server, conn.expires.as_secs()));
        recorded.sort_by_key(|entry| {
            let dest = match entry.get("dest").filter(|dest| dest.is_string()) {
                Some(dest) => addr(dest),
                None => SocketAddr::from(([0; 4], 0)),
            };
            key(
                entry["state"].as_str().unwrap_or(""),
                dest,
                entry["expires"].as_u64().unwrap_or(0),
            )
        });
        let states = |list: &mut dyn Iterator<Item = &str>| list.collect::<Vec<_>>().join(" ");
        self.compare(
            "state",
            &states(&mut recorded.iter().filter_map(|entry| entry["state"].as_str())),
            &states(&mut entries.iter().map(|conn| conn.state)),
        );
        if recorded.len() == entries.len() {
            for (kernel, ours) in recorded.iter().zip(&entries) {
                if let Some(dest) = kernel.get("dest").filter(|dest| dest.is_string()) {
                    self.compare("dest", &addr(dest), &ours.server);
                }
                if let Some(timeout) = kernel["timeout"].as_u64()
                    && !waited
                {
                    self.compare("timeout", &timeout, &ours.expires.as_secs());
                }
                if let Some(kernel) = kernel["expires"].as_u64() {
                    let ours = ours.expires.as_secs();
                    if kernel > ours || kernel + 1 < ours {
                        self.mismatch("expires", kernel, ours);
                    }
                }
            }
        }
        let servers: Vec<_> = self
            .services
            .iter()
            .flat_map(|key| self.servers(key))
            .collect();
        let sums: [(&str, Count); 2] = [("active", Server::active), ("inactive", Server::inactive)];
        for (what, count) in sums {
            if let Some(expected) = step[what].as_u64() {
                let got: u32 = servers.iter().map(|server| count(server)).sum();
                self.compare(what, &expected, &got.into());
            }
        }
    }
}

/// A value without the quotation marks of a string.
fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

fn backup_of(value: &Value) -> lvs_core::sync::Backup {
    let syncid = number(value, "syncid").expect("syncid");
    let maxlen = number(value, "maxlen").or_else(|| number(value, "sync-maxlen"));
    let group = value.get("group").unwrap_or(&value["mcast-group"]);
    lvs_core::sync::Backup::new(
        syncid.try_into().expect("a byte"),
        maxlen.map(|len| len.try_into().expect("a length")),
        1500,
        group.as_str().is_some_and(|group| group.contains(':')),
    )
}

fn prefix(value: &Value) -> (IpAddr, u32) {
    let text = value.as_str().expect("a prefix");
    let (net, bits) = text.split_once('/').unwrap_or((text, "128"));
    let net = net.parse().expect("an address");
    (net, bits.parse().expect("a prefix length"))
}

fn in_prefix(net: IpAddr, bits: u32, addr: IpAddr) -> bool {
    let number = |addr: IpAddr| match addr {
        IpAddr::V4(addr) => u128::from(addr.to_bits()) << 96,
        IpAddr::V6(addr) => addr.to_bits(),
    };
    let mask = !u128::MAX.checked_shr(bits).unwrap_or(0);
    net.is_ipv4() == addr.is_ipv4() && (number(net) ^ number(addr)) & mask == 0
}

fn tcp_flags(letters: &str) -> TcpFlags {
    let bit = |letter| match letter {
        'F' => 0x01,
        'S' => 0x02,
        'R' => 0x04,
        'P' => 0x08,
        'A' => 0x10,
        'U' => 0x20,
        'E' => 0x40,
        'C' => 0x80,
        other => panic!("flag {other}"),
    };
    TcpFlags(letters.chars().fold(0, |bits, letter| bits | bit(letter)))
}

fn chunk_type(name: &str) -> u8 {
    match name {
        "DATA" => 0,
        "INIT" => 1,
        "INIT_ACK" | "INIT-ACK" => 2,
        "SACK" => 3,
        "HEARTBEAT" => 4,
        "HEARTBEAT_ACK" | "HEARTBEAT-ACK" => 5,
        "ABORT" => 6,
        "SHUTDOWN" => 7,
        "SHUTDOWN_ACK" | "SHUTDOWN-ACK" => 8,
        "ERROR" => 9,
        "COOKIE_ECHO" | "COOKIE-ECHO" => 10,
        "COOKIE_ACK" | "COOKIE-ACK" => 11,
        "CWR" => 13,
        "SHUTDOWN_COMPLETE" | "SHUTDOWN-COMPLETE" => 14,
        other => panic!("chunk {other}"),
    }
}

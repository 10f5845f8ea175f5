//! Replays recordings of the kernel's decisions against the director, packet by packet, without
//! frames.
//!
//! One JSON object a line: services, their servers in the order in which they are added, and steps.
//! `connect` is one SYN (followed by one ACK if `to` is ESTABLISHED) or one datagram, `expect`
//! where it went; steps with `dir` are single packets of one connection, with the state and the
//! timer that the kernel then has.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

pub mod frames;
mod listings;
mod packets;
mod sync;

use std::collections::BTreeMap;
use std::io::Read;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

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

/// The seconds that the kernel lists if so much time is left: it counts milliseconds in 32 bits.
pub fn listed_seconds(left: Duration) -> u64 {
    let millis = left.as_millis() % (1 << 32);
    u64::try_from(millis).unwrap_or(0) / 1000
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

    fn servers(&self, key: &ServiceKey) -> Vec<std::sync::Arc<Server>> {
        self.director
            .control
            .service(key)
            .map_or(Vec::new(), |service| service.servers().to_vec())
    }
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

/// A value without the quotation marks of a string.
fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
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

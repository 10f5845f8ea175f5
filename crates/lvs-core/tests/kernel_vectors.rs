//! The kernel's own choices, recorded: every case of the schedulers that are built in is replayed and compared.
//!
//! One JSON object a line: a service, its servers in the order in which they are added, and steps. `connect` is one SYN
//! (followed by one ACK if `to` is ESTABLISHED) or one datagram, `expect` where it went.

use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;

use lvs_core::{
    Director, Error, Family, Forwarding, Hook, Instant, Options, PacketMeta, Protocol, Registry,
    ServerConfig, ServiceConfig, ServiceKey, TcpFlags, Transport, Tuple, Verdict,
};
use serde_json::Value;

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

fn addr(value: &Value) -> SocketAddr {
    value
        .as_str()
        .expect("an address")
        .parse()
        .expect("an address and a port")
}

fn number(value: &Value, key: &str) -> Option<i64> {
    value.get(key).and_then(Value::as_i64)
}

struct Replay<'a> {
    case: &'a Value,
    director: Director,
    service: ServiceKey,
    now: Instant,
    mismatches: Vec<String>,
}

impl<'a> Replay<'a> {
    fn new(case: &'a Value) -> Result<Self, Error> {
        let mut director = Director::new(Options {
            max_connections: 4096,
            ..Options::default()
        });
        let service = &case["service"];
        let ip = service["addr"]
            .as_str()
            .expect("an address service")
            .parse()
            .expect("an address");
        let port = u16::try_from(number(service, "port").unwrap()).unwrap();
        let addr = SocketAddr::new(ip, port);
        let key = match case["proto"].as_str() {
            Some("tcp") => ServiceKey::tcp(addr),
            _ => ServiceKey::udp(addr),
        };
        if let Some(sysctls) = case.get("sysctl").and_then(Value::as_object) {
            for (name, value) in sysctls {
                director.control.set_sysctl(name, &value.to_string())?;
            }
        }
        let config = ServiceConfig::new(Family::V4, case["scheduler"].as_str().unwrap());
        director.control.add_service(key, config, None)?;
        let mut replay = Self {
            case,
            director,
            service: key,
            now: Instant::ZERO,
            mismatches: Vec::new(),
        };
        replay.director.advance(Instant::ZERO);
        for server in case["destinations"].as_array().unwrap() {
            replay.add(server)?;
        }
        Ok(replay)
    }

    fn server_addr(step: &Value) -> SocketAddr {
        let ip = step["addr"].as_str().unwrap().parse().unwrap();
        SocketAddr::new(ip, u16::try_from(number(step, "port").unwrap()).unwrap())
    }

    fn add(&mut self, step: &Value) -> Result<(), Error> {
        let config = ServerConfig {
            upper: number(step, "upper").unwrap_or(0).try_into().unwrap(),
            lower: number(step, "lower").unwrap_or(0).try_into().unwrap(),
            ..ServerConfig::new(
                number(step, "weight").unwrap_or(1).try_into().unwrap(),
                match step["forward"].as_str() {
                    Some("direct") => Forwarding::Route,
                    Some("tunnel") => Forwarding::Tunnel,
                    _ => Forwarding::Nat,
                },
            )
        };
        self.director
            .control
            .add_server(&self.service, Self::server_addr(step), &config, self.now)
    }

    fn packet(&mut self, client: SocketAddr, dst: SocketAddr, flags: Option<u8>) -> Verdict {
        let transport = match flags {
            Some(flags) => Transport::Tcp(TcpFlags(flags)),
            None => Transport::Udp(b"x"),
        };
        let protocol = if flags.is_some() {
            Protocol::TCP
        } else {
            Protocol::UDP
        };
        let meta = PacketMeta {
            hook: Hook::Local,
            tuple: Tuple {
                protocol,
                src: client,
                dst,
            },
            transport,
            mark: 0,
            len: 40,
        };
        self.director.handle_packet(&meta, self.now)
    }

    fn compare<T: PartialEq + std::fmt::Display + ?Sized>(
        &mut self,
        step: usize,
        what: &str,
        expected: &T,
        got: &T,
    ) {
        if expected != got {
            let name = &self.case["name"];
            self.mismatches.push(format!(
                "{name} step {step} {what}: the kernel says {expected}, we say {got}"
            ));
        }
    }

    fn step(&mut self, number_of_step: usize, step: &Value) -> Result<(), Error> {
        let tcp = self.case["proto"] == "tcp";
        let ServiceKey::Address { addr: vip, .. } = self.service else {
            unreachable!()
        };
        let dst = step.get("dst").map_or(vip, addr);
        match step["op"].as_str().unwrap() {
            "connect" => {
                let client = addr(&step["client"]);
                let verdict = self.packet(client, dst, tcp.then_some(TcpFlags::SYN));
                let went_to = match verdict {
                    Verdict::Forward(forward) => forward.target.to_string(),
                    _ => "nowhere".into(),
                };
                let expected = step["expect"].as_str().unwrap_or("nowhere");
                self.compare(number_of_step, "server", expected, &went_to);
                if let Some(reply) = step["reply"].as_str() {
                    let got = match verdict {
                        Verdict::Unreachable(_) => "icmp-port-unreachable",
                        Verdict::Accept(_) if tcp => "tcp-rst",
                        Verdict::Accept(_) => "icmp-port-unreachable",
                        _ => "nothing",
                    };
                    self.compare(number_of_step, "reply", reply, got);
                }
                if step["to"] == "ESTABLISHED" && matches!(verdict, Verdict::Forward(_)) {
                    let _ = self.packet(client, dst, Some(TcpFlags::ACK));
                }
            }
            "close" => {
                let flags = match step["how"].as_str() {
                    Some("FIN") => TcpFlags::FIN | TcpFlags::ACK,
                    _ => TcpFlags::RST | TcpFlags::ACK,
                };
                let _ = self.packet(addr(&step["client"]), dst, Some(flags));
            }
            "edit" => {
                let at = Self::server_addr(step);
                let service = self.director.control.service(&self.service).unwrap();
                let server = service.servers().iter().find(|server| server.addr() == at);
                let mut config = server.ok_or(Error::NoServer)?.config();
                if let Some(weight) = number(step, "weight") {
                    config.weight = weight.try_into().unwrap();
                }
                if let Some(upper) = number(step, "upper") {
                    config.upper = upper.try_into().unwrap();
                }
                if let Some(lower) = number(step, "lower") {
                    config.lower = lower.try_into().unwrap();
                }
                self.director
                    .control
                    .edit_server(&self.service, at, &config)?;
            }
            "add" => self.add(step)?,
            "del" => {
                let at = Self::server_addr(step);
                self.director
                    .control
                    .delete_server(&self.service, at, self.now)?;
            }
            "set_scheduler" => {
                let config = ServiceConfig::new(Family::V4, step["scheduler"].as_str().unwrap());
                self.director
                    .control
                    .edit_service(&self.service, config, None)?;
            }
            "wait" => {
                let nanos = step["seconds"].as_f64().unwrap() * 1e9;
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a few hours"
                )]
                let nanos = nanos.round() as u64;
                self.now = Instant::from_nanos(self.now.as_nanos() + nanos);
                self.director.advance(self.now);
            }
            "counts" => {
                let service = self.director.control.service(&self.service).unwrap();
                let servers = service.servers();
                let order: Vec<String> = servers
                    .iter()
                    .map(|server| server.addr().to_string())
                    .collect();
                let counts = |count: fn(&lvs_core::Server) -> u32| -> Value {
                    servers
                        .iter()
                        .map(|server| (server.addr().to_string(), Value::from(count(server))))
                        .collect::<serde_json::Map<_, _>>()
                        .into()
                };
                let now = [
                    ("order", Value::from(order)),
                    ("active", counts(lvs_core::Server::active)),
                    ("inactive", counts(lvs_core::Server::inactive)),
                ];
                for (what, got) in now {
                    self.compare(number_of_step, what, &step[what], &got);
                }
            }
            other => panic!("unknown step {other}"),
        }
        Ok(())
    }
}

/// Whether the case needs nothing but the built-in schedulers and an IPv4 address service.
fn is_covered(case: &Value, registry: &Registry) -> bool {
    let known = |value: &Value| registry.create(value.as_str().unwrap_or("")).is_some();
    case["service"]["addr"]
        .as_str()
        .is_some_and(|addr| !addr.contains(':'))
        && known(&case["scheduler"])
        && case["steps"]
            .as_array()
            .unwrap()
            .iter()
            .all(|step| step["op"] != "set_scheduler" || known(&step["scheduler"]))
}

#[test]
fn schedulers_choose_as_the_kernel_does() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/schedulers");
    let registry = Registry::new();
    let (mut passed, mut mismatches) = (0, Vec::new());
    for file in std::fs::read_dir(folder).expect("recordings are part of the crate") {
        for case in lines(&file.unwrap().path()) {
            if !is_covered(&case, &registry) {
                continue;
            }
            let mut replay = Replay::new(&case).unwrap_or_else(|e| panic!("{}: {e}", case["name"]));
            for (number, step) in case["steps"].as_array().unwrap().iter().enumerate() {
                replay
                    .step(number, step)
                    .unwrap_or_else(|e| panic!("{} step {number}: {e}", case["name"]));
            }
            if replay.mismatches.is_empty() {
                passed += 1;
            }
            mismatches.extend(replay.mismatches.into_iter().take(1));
        }
    }
    println!(
        "{passed} recorded cases passed, {} failed",
        mismatches.len()
    );
    assert!(
        mismatches.is_empty(),
        "{}",
        mismatches[..mismatches.len().min(20)].join("\n")
    );
    assert!(passed >= 293, "only {passed} recorded cases were found");
}

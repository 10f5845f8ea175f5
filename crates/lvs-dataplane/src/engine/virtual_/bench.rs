//! An engine for tests: a network that is only described, frames that are handed in, a clock that
//! only a caller moves.
//!
//! `lvs-dataplane --no-interfaces --virtual-time` has the control methods `test.reset`,
//! `test.advance` and `test.inject`; their parameters are the types of this module.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use lvs_core::api::{Failure, FailureCode};
use lvs_core::{Ahead, Family, IcmpError, Instant, PacketMeta, Passed, Plain, Protocol, Verdict};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::engine::decider::Decider;
use crate::packet::net::{Net, NextHop, PortId, PortInfo};
use crate::packet::pipeline::Decide;
use crate::packet::wire::Mac;

/// The port of the host's own stack; what goes there is counted and gone.
pub(super) const HOST_PORT: PortId = PortId(0);
/// Frames of one `test.inject` at most, repetitions included.
const FRAMES_MAX: u64 = 10_000_000;

/// Parameters of `test.reset`: forget everything, start the clock at 0, and take this for the
/// network around.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Network {
    /// The interfaces.
    pub interfaces: Vec<Interface>,
    /// More addresses of the host's own, as prefixes.
    pub local: Vec<String>,
    /// Routes besides those of the interfaces' own networks.
    pub routes: Vec<Route>,
    /// Who is there. Frames to others are held until the end.
    pub neighbours: Vec<Neighbour>,
    /// Rules that mark packets; the last that matches counts.
    pub marks: Vec<Mark>,
}

/// An interface of the described network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its link-layer address; without one no frame comes or goes here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Its MTU.
    #[serde(default = "ethernet_mtu")]
    pub mtu: u32,
    /// Its addresses, with prefix lengths.
    #[serde(default)]
    pub addresses: Vec<String>,
}

const fn ethernet_mtu() -> u32 {
    1500
}

/// A route by a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Route {
    /// The destination, as a prefix.
    pub to: String,
    /// The gateway.
    pub via: IpAddr,
    /// The interface.
    pub dev: String,
}

/// A neighbour.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Neighbour {
    /// Its address.
    pub address: IpAddr,
    /// Its link-layer address.
    pub mac: String,
}

/// A rule that marks packets by their destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// Destination, as a prefix.
    pub to: String,
    /// IP protocol number; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u8>,
    /// Destination ports, first and last; all if empty.
    #[serde(default)]
    pub ports: Vec<(u16, u16)>,
    /// The mark.
    pub mark: u32,
}

/// Parameters of `test.advance`: by how long the clock moves, or to which time since the start or
/// the reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum Advance {
    /// By so many milliseconds.
    ByMs(u64),
    /// To so many milliseconds; an earlier time than now leaves the clock alone.
    ToMs(u64),
}

/// Parameters of `test.inject`: frames that arrive, in zero time. The items of the answer are the
/// frames that leave.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inject {
    /// The frames, in order.
    pub frames: Vec<BenchFrame>,
    /// How often; once if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeat: Option<u64>,
}

/// A frame on an interface of the described network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BenchFrame {
    /// The interface.
    pub dev: String,
    /// The frame in hexadecimal, without FCS.
    pub frame: String,
}

/// What a test asks of the worker.
#[derive(Debug)]
pub(super) enum Test {
    Reset(Box<BenchNet>),
    Advance(Advance),
    Inject {
        frames: Vec<(PortId, Vec<u8>)>,
        repeat: u64,
    },
}

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Tested {
    /// Frames that left, by interface.
    pub(super) sent: Vec<(PortId, Vec<u8>)>,
    /// Frames that the host got.
    pub(super) to_host: u64,
    /// The clock.
    pub(super) now: Instant,
}

/// Reads the parameters of a method `test.*`. `ports`: the interfaces of the network as it is.
pub(super) fn read(method: &str, params: Value, ports: &[String]) -> Result<Test, Failure> {
    fn from<T: serde::de::DeserializeOwned>(params: Value) -> Result<T, String> {
        serde_json::from_value(params).map_err(|error| error.to_string())
    }
    let read = || match method {
        "test.reset" => Ok(Test::Reset(Box::new(BenchNet::new(&from(params)?)?))),
        "test.advance" => Ok(Test::Advance(from(params)?)),
        "test.inject" => {
            let inject: Inject = from(params)?;
            let repeat = inject.repeat.unwrap_or(1);
            if (inject.frames.len() as u64).saturating_mul(repeat) > FRAMES_MAX {
                return Err(format!("more than {FRAMES_MAX} frames at a time"));
            }
            let frames = inject.frames.iter().map(|frame| {
                let place = ports.iter().position(|name| *name == frame.dev);
                let port = place
                    .and_then(|place| u16::try_from(place + 1).ok())
                    .ok_or_else(|| format!("no interface {:?} takes frames", frame.dev))?;
                let bytes = unhex(&frame.frame)
                    .ok_or_else(|| format!("{:?} is not hexadecimal", frame.frame))?;
                Ok((PortId(port), bytes))
            });
            Ok(Test::Inject {
                frames: frames.collect::<Result<_, String>>()?,
                repeat,
            })
        }
        _ => Err("there are test.reset, test.advance and test.inject".to_owned()),
    };
    read().map_err(|message: String| {
        Failure::new(FailureCode::Malformed, format!("{method}: {message}"))
    })
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    if !text.len().is_multiple_of(2) {
        return None;
    }
    text.as_bytes()
        .chunks_exact(2)
        .map(|pair| u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok())
        .collect()
}

pub(in crate::engine) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn mac(text: &str) -> Result<Mac, String> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).ok())
        .collect();
    bytes
        .and_then(|bytes| <[u8; 6]>::try_from(bytes).ok())
        .map(Mac)
        .ok_or_else(|| format!("{text:?} is no link-layer address"))
}

/// Addresses whose first bits are these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Prefix {
    addr: IpAddr,
    bits: u8,
}

impl Prefix {
    fn new(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no address with a prefix length");
        let (addr, bits) = text.split_once('/').unwrap_or((text, ""));
        let addr: IpAddr = addr.parse().map_err(|_| wrong())?;
        let longest = Family::of(&addr).bits();
        let bits = match bits {
            "" => longest,
            bits => bits.parse().map_err(|_| wrong())?,
        };
        if bits > longest {
            return Err(wrong());
        }
        Ok(Self { addr, bits })
    }

    fn contains(self, addr: IpAddr) -> bool {
        let network = lvs_core::Prefix::new(self.addr, self.bits);
        network.is_some_and(|network| network.contains(addr))
    }

    /// The address that means all hosts of the network.
    fn is_broadcast(self, addr: IpAddr) -> bool {
        match addr {
            IpAddr::V4(v4) => {
                let host = u32::MAX.checked_shr(self.bits.into()).unwrap_or(0);
                self.bits < 31 && self.contains(addr) && v4.to_bits() & host == host
            }
            IpAddr::V6(_) => false,
        }
    }
}

/// A network as [`Network`] describes it. Port 0 leads to the host, the others are the interfaces
/// with a link-layer address, in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct BenchNet {
    ports: Vec<(String, PortInfo, Vec<Prefix>)>,
    /// All interfaces, with their MTU.
    interfaces: HashMap<String, u32>,
    local: Vec<Prefix>,
    networks: Vec<Prefix>,
    routes: Vec<(Prefix, IpAddr, PortId)>,
    neighbours: HashMap<IpAddr, Mac>,
    marks: Vec<(Prefix, Mark)>,
    pub(super) vips: HashSet<IpAddr>,
}

impl BenchNet {
    fn new(described: &Network) -> Result<Self, String> {
        let mut net = Self::default();
        for interface in &described.interfaces {
            let networks = interface
                .addresses
                .iter()
                .map(|text| Prefix::new(text))
                .collect::<Result<Vec<_>, _>>()?;
            net.local.extend(networks.iter().map(|network| Prefix {
                addr: network.addr,
                bits: Family::of(&network.addr).bits(),
            }));
            net.networks.extend(&networks);
            net.interfaces.insert(interface.name.clone(), interface.mtu);
            if let Some(text) = &interface.mac {
                let info = PortInfo {
                    mac: mac(text)?,
                    mtu: interface.mtu,
                    ethernet: true,
                    offload: false,
                    gives_back: false,
                };
                net.ports.push((interface.name.clone(), info, networks));
            }
        }
        for text in &described.local {
            net.local.push(Prefix::new(text)?);
        }
        for route in &described.routes {
            let place = net.ports.iter().position(|(name, ..)| *name == route.dev);
            let port = place
                .and_then(|place| u16::try_from(place + 1).ok())
                .ok_or_else(|| format!("no interface {:?} takes frames", route.dev))?;
            net.routes
                .push((Prefix::new(&route.to)?, route.via, PortId(port)));
        }
        net.routes
            .sort_by_key(|(prefix, ..)| std::cmp::Reverse(prefix.bits));
        for neighbour in &described.neighbours {
            net.neighbours
                .insert(neighbour.address, mac(&neighbour.mac)?);
        }
        for mark in &described.marks {
            net.marks.push((Prefix::new(&mark.to)?, mark.clone()));
        }
        Ok(net)
    }

    /// The names of the interfaces that take frames, in the order of their ports.
    pub(super) fn names(&self) -> Vec<String> {
        self.ports.iter().map(|(name, ..)| name.clone()).collect()
    }

    /// The host's own addresses, as prefixes.
    pub(super) fn local(&self) -> Vec<(IpAddr, u8)> {
        self.local
            .iter()
            .map(|prefix| (prefix.addr, prefix.bits))
            .collect()
    }

    /// The MTU of an interface.
    pub(super) fn mtu(&self, interface: &str) -> Option<u32> {
        self.interfaces.get(interface).copied()
    }

    pub(super) fn is_broadcast(&self, addr: IpAddr) -> bool {
        self.networks.iter().any(|net| net.is_broadcast(addr))
    }

    fn mark(&self, protocol: Protocol, dst: SocketAddr) -> u32 {
        self.marks
            .iter()
            .rev()
            .find(|(prefix, mark)| {
                let port = dst.port();
                prefix.contains(dst.ip())
                    && mark.protocol.is_none_or(|number| number == protocol.0)
                    && (mark.ports.is_empty()
                        || mark.ports.iter().any(|(a, b)| (*a..=*b).contains(&port)))
            })
            .map_or(0, |(_, mark)| mark.mark)
    }
}

impl Net for BenchNet {
    fn port(&self, port: PortId) -> Option<PortInfo> {
        match port.index().checked_sub(1) {
            Some(place) => self.ports.get(place).map(|(_, info, _)| *info),
            None => Some(PortInfo {
                mac: Mac::default(),
                mtu: 65_535,
                ethernet: false,
                offload: true,
                gives_back: false,
            }),
        }
    }

    fn host_port(&self) -> Option<PortId> {
        Some(HOST_PORT)
    }

    fn is_local(&self, addr: IpAddr) -> bool {
        self.vips.contains(&addr) || self.local.iter().any(|prefix| prefix.contains(addr))
    }

    fn is_vip(&self, addr: IpAddr) -> bool {
        self.vips.contains(&addr)
    }

    fn is_own_vip(&self, _: IpAddr) -> bool {
        false
    }

    fn route(&self, dst: IpAddr) -> Option<NextHop> {
        let of_family = |prefix: &&Prefix| Family::of(&prefix.addr) == Family::of(&dst);
        for (port, (_, info, networks)) in (1..).map(PortId).zip(&self.ports) {
            if let Some(network) = networks.iter().find(|network| network.contains(dst)) {
                return Some(NextHop {
                    port,
                    addr: dst,
                    mtu: info.mtu,
                    source: Some(network.addr),
                });
            }
        }
        let (_, via, port) = self
            .routes
            .iter()
            .find(|(prefix, ..)| prefix.contains(dst))?;
        let (_, info, networks) = self.ports.get(port.index().checked_sub(1)?)?;
        Some(NextHop {
            port: *port,
            addr: *via,
            mtu: info.mtu,
            source: networks.iter().find(of_family).map(|network| network.addr),
        })
    }

    fn neighbour(&self, _: PortId, addr: IpAddr) -> Option<Mac> {
        self.neighbours.get(&addr).copied()
    }
}

/// The director, asked about packets with the marks that the network's rules give.
pub(super) struct Marking<'a> {
    pub(super) decider: &'a mut Decider,
    pub(super) net: &'a BenchNet,
}

impl Decide for Marking<'_> {
    fn packet(&mut self, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        let mark = self.net.mark(meta.tuple.protocol, meta.tuple.dst);
        self.decider.packet(&PacketMeta { mark, ..*meta }, now)
    }

    fn ahead(&self, protocol: Protocol, src: SocketAddrV4, dst: SocketAddrV4) -> Option<Ahead> {
        self.decider.ahead(protocol, src, dst)
    }

    fn aim(&self, ahead: &mut Ahead) {
        self.decider.aim(ahead);
    }

    fn pass(&mut self, packet: &Plain, ahead: &Ahead, now: Instant) -> Option<Passed> {
        let mark = self.net.mark(packet.protocol, packet.dst.into());
        match mark {
            0 => self.decider.pass(packet, ahead, now),
            _ => None,
        }
    }

    fn icmp_error(&mut self, error: &IcmpError, now: Instant) -> Verdict {
        self.decider.icmp_error(error, now)
    }
}

impl Advance {
    /// The time that it leads to.
    pub(super) fn target(self, now: Instant) -> Instant {
        match self {
            Self::ByMs(ms) => now + Duration::from_millis(ms),
            Self::ToMs(ms) => now.max(Instant::ZERO + Duration::from_millis(ms)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> BenchNet {
        let described: Network = serde_json::from_str(
            r#"{"interfaces": [{"name": "lo", "mtu": 65536, "addresses": ["127.0.0.1/8"]},
                {"name": "cl", "mac": "02:00:00:00:00:c1", "addresses": ["10.255.0.1/24", "fd00:ff::1/64"]}],
                "local": ["172.16.0.0/12"],
                "routes": [{"to": "0.0.0.0/0", "via": "10.255.0.2", "dev": "cl"}],
                "neighbours": [{"address": "10.255.0.2", "mac": "02:00:00:00:00:c2"}],
                "marks": [{"to": "172.20.0.0/16", "protocol": 6, "ports": [[80, 81]], "mark": 7}]}"#,
        )
        .expect("a description");
        BenchNet::new(&described).expect("it makes sense")
    }

    #[test]
    fn ways_and_addresses() {
        let net = network();
        let route = |addr: &str| net.route(addr.parse().expect("an address"));
        let hop = route("192.0.2.1").expect("the gateway");
        assert_eq!(hop.addr.to_string(), "10.255.0.2");
        assert_eq!(
            hop.source.map(|a| a.to_string()).as_deref(),
            Some("10.255.0.1")
        );
        assert!(route("10.255.0.9").is_some_and(|hop| hop.on_link(hop.addr)));
        assert!(route("fd00:ff::9").is_some());
        assert!(route("fd00:fe::9").is_none());
        assert!(net.is_local("172.31.255.255".parse().expect("an address")));
        assert!(!net.is_local("172.32.0.0".parse().expect("an address")));
        assert!(net.is_broadcast("127.255.255.255".parse().expect("an address")));
        assert!(!net.is_broadcast("10.255.0.254".parse().expect("an address")));
        assert_eq!(net.mtu("lo"), Some(65_536));
        let dst = |text: &str| text.parse().expect("an address and port");
        assert_eq!(net.mark(Protocol::TCP, dst("172.20.1.1:81")), 7);
        assert_eq!(net.mark(Protocol::UDP, dst("172.20.1.1:81")), 0);
        assert_eq!(net.mark(Protocol::TCP, dst("172.20.1.1:82")), 0);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (method, params) in [
            (
                "test.reset",
                r#"{"interfaces": [{"name": "x", "mac": "02:00"}]}"#,
            ),
            ("test.reset", r#"{"local": ["10.0.0.0/33"]}"#),
            (
                "test.reset",
                r#"{"routes": [{"to": "0.0.0.0/0", "via": "10.0.0.1", "dev": "x"}]}"#,
            ),
            ("test.advance", r#"{"seconds": 1}"#),
            (
                "test.inject",
                r#"{"frames": [{"dev": "sv", "frame": "00"}]}"#,
            ),
            (
                "test.inject",
                r#"{"frames": [{"dev": "cl", "frame": "0"}]}"#,
            ),
            (
                "test.inject",
                r#"{"frames": [{"dev": "cl", "frame": "+f"}]}"#,
            ),
            (
                "test.inject",
                r#"{"frames": [{"dev": "cl", "frame": "00"}], "repeat": 99999999}"#,
            ),
            ("test.other", "{}"),
        ] {
            let params = serde_json::from_str(params).expect("JSON");
            let failure = read(method, params, &["cl".to_owned()]).expect_err(method);
            assert!(failure.message.starts_with(method), "{}", failure.message);
        }
    }
}

//! Replays cases that describe connections by addresses and ports (the kinds `schedulers` and
//! `persistence`): builds a frame for each step, and reads the chosen server from the sent frame.

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, bail};
use lvs_core::{Protocol, ServiceKey};
use lvs_packet::testing::made_up_mac;
use lvs_packet::wire::{ETHERNET_LEN, Mac};
use serde_json::Value;

use super::bed::{Bed, CLIENT_SIDE, CLIENTS, Emitted, GATEWAY, SERVERS};
use super::case::{Halt, Json, Replayed, place, protocol, seconds, service_key, sysctl_text};
use super::frames::{self, ethernet};
use super::report::Log;

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
const FIN: u8 = 0x01;
const RST: u8 = 0x04;

/// Addresses of all servers of a case. They identify the server in a frame without the server's
/// port.
#[derive(Debug, Default)]
pub(super) struct Known(HashSet<SocketAddr>);

impl Known {
    pub(super) fn learn(&mut self, servers: &[Value]) -> anyhow::Result<()> {
        for server in servers {
            self.0.insert(place(server)?);
        }
        Ok(())
    }

    /// The server (`addr:port`) to which a frame was sent, and the name of the reply to the client;
    /// `None` if no such frame was sent. If the frame does not contain the server's port (direct
    /// routing, tunnels), returns `expected` if the frame was sent to its MAC address, otherwise
    /// the first server with this MAC address.
    pub(super) fn whither(
        &self,
        sent: &[Emitted],
        dst: SocketAddr,
        expected: Option<SocketAddr>,
    ) -> (Option<String>, Option<String>) {
        let mut server = None;
        let mut reply = None;
        for emitted in sent {
            if emitted.port == SERVERS {
                server = self.server(emitted, dst, expected).or(server);
            } else {
                reply = Some(frames::reply_name(emitted.packet()));
            }
        }
        (server.map(|addr| addr.to_string()), reply)
    }

    fn server(
        &self,
        emitted: &Emitted,
        dst: SocketAddr,
        expected: Option<SocketAddr>,
    ) -> Option<SocketAddr> {
        let read = frames::read(emitted.packet())?;
        let mac: [u8; 6] = emitted.frame.get(..6)?.try_into().ok()?;
        let tunnelled = matches!(read.protocol, 4 | 41 | 47) || read.dst.port() == 6080;
        if !tunnelled && read.dst.ip() != dst.ip() {
            return Some(read.dst);
        }
        // A configured port of 0 stands for the port of the packet.
        let filled = |addr: &SocketAddr| match addr.port() {
            0 => SocketAddr::new(addr.ip(), dst.port()),
            _ => *addr,
        };
        let possible = |addr: &&SocketAddr| made_up_mac(addr.ip()) == Mac(mac);
        let mut candidates: Vec<_> = self.0.iter().filter(possible).map(filled).collect();
        candidates.sort_unstable();
        expected
            .filter(|expected| candidates.contains(expected))
            .or_else(|| candidates.first().copied())
    }
}

/// A frame from a client behind the gateway.
pub(super) fn from_client(packet: &[u8]) -> Vec<u8> {
    ethernet(CLIENT_SIDE, GATEWAY, packet)
}

/// Size of the connection table for a case: larger than the number of connections that its steps
/// open.
fn capacity(steps: &[Value]) -> usize {
    let made = |step: &Value| match step.maybe_number("count") {
        Some(count) => usize::try_from(count).unwrap_or(0),
        None => 2,
    };
    (steps.iter().map(made).sum::<usize>() + 256).next_power_of_two()
}

struct Replay<'a> {
    bed: Bed,
    known: Known,
    /// The only service of a `schedulers` case; `None` in a `persistence` case.
    service: Option<ServiceKey>,
    proto: Option<&'a str>,
    unrecorded: HashSet<&'a str>,
    random: bool,
    /// Whether the sums of the counters must equal the recorded ones, although servers are chosen
    /// at random.
    sums: bool,
    /// Whether servers have thresholds.
    limited: bool,
    /// Whether connections of removed servers end at the next tick of the kernel
    /// (`expire_nodest_conn`). A recorded listing may still contain them, so they are not compared.
    nodest: bool,
}

/// Replays a case with one service (`schedulers`) or several (`persistence`).
pub(super) fn replay(case: &Value, log: &mut Log) -> Replayed<()> {
    let steps = case.list("steps")?;
    let mut bed = Bed::new(capacity(steps), log)?;
    bed.set_up(case)?;
    let mut known = Known::default();
    let proto = case.maybe_text("proto");
    let mut service = None;
    if let Some(id) = case.get("service") {
        // The scheduler, the flags and the servers are fields of the case, not of its service.
        let mut whole = case.clone();
        let fields = whole.as_object_mut().context("the case is not an object")?;
        for (key, value) in id.as_object().into_iter().flatten() {
            fields.insert(key.clone(), value.clone());
        }
        if id.get("fwmark").is_some() {
            for prefix in ["172.16.0.0/12", "fd00:a::/32"] {
                let prefix = super::case::prefix(prefix)?;
                bed.change().1.local_prefixes.push(prefix);
            }
        }
        known.learn(case.items("destinations"))?;
        service = Some(bed.add_service(&whole, proto)?);
    }
    for value in case.items("services") {
        known.learn(value.items("destinations"))?;
        bed.add_service(value, None)?;
    }
    let limited = case
        .items("destinations")
        .iter()
        .any(|server| server.maybe_number("upper").is_some_and(|upper| upper > 0));
    let mut replay = Replay {
        bed,
        known,
        service,
        proto,
        unrecorded: case
            .items("unrecorded")
            .iter()
            .filter_map(Value::as_str)
            .collect(),
        random: case
            .items("nondeterministic")
            .iter()
            .any(|field| field == "expect"),
        sums: !limited,
        limited,
        nodest: case
            .get("sysctl")
            .and_then(|sysctl| sysctl.maybe_number("expire_nodest_conn"))
            .is_some_and(|on| on != 0),
    };
    for (number, step) in steps.iter().enumerate() {
        log.at(number, step.maybe_text("op"));
        replay.step(step, log)?;
    }
    Ok(())
}

impl Replay<'_> {
    fn key(&self, step: &Value) -> anyhow::Result<ServiceKey> {
        match (step.get("service"), self.service) {
            (Some(service), _) => service_key(service, None),
            (None, Some(service)) => Ok(service),
            (None, None) => bail!("neither the step nor the case has a service"),
        }
    }

    fn protocol(&self, step: &Value) -> anyhow::Result<Protocol> {
        protocol(
            step.maybe_text("proto")
                .or(self.proto)
                .context("neither the step nor the case has a protocol")?,
        )
    }

    fn dst(&self, step: &Value) -> anyhow::Result<SocketAddr> {
        match (step.get("dst"), self.service) {
            (Some(_), _) => step.endpoint("dst"),
            (None, Some(ServiceKey::Address { addr, .. })) => Ok(addr),
            _ => bail!("the step has no destination"),
        }
    }

    fn step(&mut self, step: &Value, log: &mut Log) -> Replayed<()> {
        match step.text("op")? {
            "connect" => self.connect(step, log)?,
            "burst" => self.burst(step, log)?,
            "close" => {
                self.sums = false;
                let (client, dst) = (step.endpoint("client")?, self.dst(step)?);
                let flags = match step.text("how")? {
                    "RST" => RST | ACK,
                    _ => FIN | ACK,
                };
                let packet = frames::tcp(client, dst, flags, 0);
                self.bed.inject(CLIENTS, &from_client(&packet));
            }
            "edit" => self.bed.edit_server(&self.key(step)?, step)?,
            "add" => {
                self.known.learn(std::slice::from_ref(step))?;
                self.bed.add_server(&self.key(step)?, step)?;
            }
            "del" => {
                self.sums = false;
                self.bed.delete_server(&self.key(step)?, step)?;
            }
            "set_scheduler" | "edit_service" => self.bed.edit_service(&self.key(step)?, step)?,
            "sysctl" => {
                let value = step.get("value").map(sysctl_text).unwrap_or_default();
                let (control, _) = self.bed.change();
                control.set_sysctl(step.text("name")?, &value)?;
            }
            "set" => self.bed.set_timeouts(step)?,
            "wait" => self.bed.wait(seconds(step)?),
            "counts" if self.random => {
                compare_random_counts(&self.bed, &self.key(step)?, step, self.sums, log)?;
            }
            "counts" => compare_counts(&self.bed, &self.key(step)?, step, log)?,
            "conns" => {
                let expires = !self.unrecorded.contains("expires");
                compare_conns(&self.bed, step, expires, self.nodest, log)?;
            }
            other => return Err(Halt::Unsupported(format!("step {other:?}"))),
        }
        Ok(())
    }

    fn first_packet(
        &self,
        protocol: Protocol,
        client: SocketAddr,
        dst: SocketAddr,
        step: &Value,
    ) -> Vec<u8> {
        if protocol == Protocol::TCP {
            frames::tcp(client, dst, SYN, 0)
        } else {
            let payload = step.maybe_text("payload").unwrap_or("x");
            frames::udp(client, dst, payload.as_bytes())
        }
    }

    fn connect(&mut self, step: &Value, log: &mut Log) -> Replayed<()> {
        let protocol = self.protocol(step)?;
        let (client, dst) = (step.endpoint("client")?, self.dst(step)?);
        let expected = step.get("expect").and_then(Value::as_str);
        let wanted = expected.map(str::parse).transpose().ok().flatten();
        let packet = self.first_packet(protocol, client, dst, step);
        let sent = self.bed.inject(CLIENTS, &from_client(&packet));
        let (server, reply) = self.known.whither(&sent, dst, wanted);
        if protocol == Protocol::TCP
            && step.maybe_text("to") == Some("ESTABLISHED")
            && server.is_some()
        {
            let packet = frames::tcp(client, dst, ACK, 0);
            self.bed.inject(CLIENTS, &from_client(&packet));
        }
        if self.random {
            // The server was chosen at random: any server is accepted, but there must be one if the
            // kernel found one. Thresholds may be reached at another time.
            if !self.limited {
                log.compare("forwarded", &expected.is_some(), &server.is_some());
            }
            return Ok(());
        }
        log.compare("server", &expected, &server.as_deref());
        if !self.unrecorded.contains("reply") {
            log.compare("reply", &step.maybe_text("reply"), &reply.as_deref());
        }
        Ok(())
    }

    fn burst(&mut self, step: &Value, log: &mut Log) -> Replayed<()> {
        let protocol = self.protocol(step)?;
        let (client, dst) = (step.endpoint("client")?, self.dst(step)?);
        let at_client = step.text("step")? == "client";
        let expected: BTreeMap<String, i64> = step
            .fields("expect")
            .context("the step has no `expect`")?
            .iter()
            .map(|(server, number)| (server.clone(), number.as_i64().unwrap_or(-1)))
            .collect();
        let servers: Vec<SocketAddr> = expected
            .keys()
            .filter_map(|server| server.parse().ok())
            .collect();
        let mut got = BTreeMap::new();
        for i in 0..u128::try_from(step.number("count")?).unwrap_or(0) {
            let (client, dst) = if at_client {
                (advance(client, i), dst)
            } else {
                (client, advance(dst, i))
            };
            let packet = self.first_packet(protocol, client, dst, step);
            let sent = self.bed.inject(CLIENTS, &from_client(&packet));
            let (mut server, _) = self.known.whither(&sent, dst, None);
            // A configured port of 0 stands for the port of the packet, as in the recording.
            if let Some(addr) = server.as_deref().and_then(|s| s.parse::<SocketAddr>().ok())
                && !servers.contains(&addr)
                && let Some(named) = servers.iter().find(|named| named.ip() == addr.ip())
            {
                server = Some(named.to_string());
            }
            *got.entry(server.unwrap_or_else(|| "none".to_owned()))
                .or_insert(0) += 1;
        }
        if self.random {
            let keys: HashSet<&String> = expected.keys().chain(got.keys()).collect();
            let of = |counts: &BTreeMap<String, i64>, key| counts.get(key).copied().unwrap_or(0);
            let pairs: Vec<_> = keys
                .into_iter()
                .map(|key| (of(&expected, key), of(&got, key)))
                .collect();
            check_shares(&pairs, log);
        } else {
            log.compare("burst", &expected, &got);
        }
        Ok(())
    }
}

fn advance(addr: SocketAddr, by: u128) -> SocketAddr {
    let ip = match addr.ip() {
        IpAddr::V4(ip) => {
            let by = u32::try_from(by).unwrap_or(0);
            IpAddr::from(ip.to_bits().wrapping_add(by).to_be_bytes())
        }
        IpAddr::V6(ip) => IpAddr::from(ip.to_bits().wrapping_add(by).to_be_bytes()),
    };
    SocketAddr::new(ip, addr.port())
}

pub(super) fn compare_counts(
    bed: &Bed,
    key: &ServiceKey,
    step: &Value,
    log: &mut Log,
) -> anyhow::Result<()> {
    let service = bed
        .director
        .control
        .service(key)
        .context("the director does not have the service of the step")?;
    let servers = service.servers();
    if let Some(order) = step.get("order").and_then(Value::as_array) {
        let expected: Vec<_> = order.iter().filter_map(Value::as_str).collect();
        let got: Vec<_> = servers.iter().map(|s| s.addr().to_string()).collect();
        if expected != got {
            log.mismatch("order", &format!("{expected:?}"), &format!("{got:?}"));
        }
    }
    for name in ["active", "inactive", "persistent"] {
        for (addr, expected) in step.fields(name).into_iter().flatten() {
            let addr: SocketAddr = addr
                .parse()
                .context("a counter names no address with a port")?;
            let got = servers.iter().find(|server| server.addr() == addr);
            let got = got.map(|server| match name {
                "active" => server.active(),
                "inactive" => server.inactive(),
                _ => server.templates(),
            });
            log.compare(
                &format!("{name} of {addr}"),
                &expected.as_i64(),
                &got.map(i64::from),
            );
        }
    }
    Ok(())
}

/// [`compare_counts`] for servers that are chosen at random. The order must be equal. With `sums`,
/// the sums must also be equal, and the shares must fit the same distribution.
fn compare_random_counts(
    bed: &Bed,
    key: &ServiceKey,
    step: &Value,
    sums: bool,
    log: &mut Log,
) -> anyhow::Result<()> {
    let order = serde_json::json!({ "order": step.get("order") });
    compare_counts(bed, key, &order, log)?;
    if !sums {
        return Ok(());
    }
    let service = bed
        .director
        .control
        .service(key)
        .context("the director does not have the service of the step")?;
    let recorded = |name: &str, addr: &str| {
        let counts = step.fields(name)?;
        counts.get(addr)?.as_i64()
    };
    let pairs: Vec<(i64, i64)> = service
        .servers()
        .iter()
        .map(|server| {
            let addr = server.addr().to_string();
            let total = |name| recorded(name, &addr).unwrap_or(0);
            let expected = total("active") + total("inactive");
            (expected, i64::from(server.active() + server.inactive()))
        })
        .collect();
    let (expected, got) = pairs
        .iter()
        .fold((0, 0), |(a, b), (expected, got)| (a + expected, b + got));
    log.compare("connections of all servers", &expected, &got);
    check_shares(&pairs, log);
    Ok(())
}

/// Compares two samples with a chi-square test, which fails for equal distributions once in a
/// million.
fn check_shares(pairs: &[(i64, i64)], log: &mut Log) {
    let tenths: i64 = pairs
        .iter()
        .filter(|(a, b)| a + b > 0)
        .map(|(a, b)| 10 * (a - b).pow(2) / (a + b))
        .sum();
    let freedom = i64::try_from(pairs.len()).unwrap_or(i64::MAX);
    if tenths > 10 * (24 + 3 * freedom) {
        log.mismatch(
            "shares of the servers",
            "approximately the recorded numbers",
            &format!("{pairs:?}"),
        );
    }
}

/// A connection without its remaining time: protocol, client, virtual address, destination, state,
/// persistence engine and its data, origin.
type Entry = [String; 7];

/// Compares connections with a recorded listing, in any order and with approximate times. Without
/// `expires`, does not compare times. With `only_configured`, omits connections whose server is not
/// configured.
pub(super) fn compare_conns(
    bed: &Bed,
    step: &Value,
    expires: bool,
    only_configured: bool,
    log: &mut Log,
) -> anyhow::Result<()> {
    let configured = |dest: &str| {
        !only_configured
            || bed.director.control.services().any(|service| {
                service
                    .servers()
                    .iter()
                    .any(|server| server.addr().to_string() == dest)
            })
    };
    let mut expected: BTreeMap<Entry, Vec<i64>> = BTreeMap::new();
    for entry in step.list("entries")? {
        let dest = entry.text("dest")?;
        if !configured(dest) {
            continue;
        }
        let key = [
            entry.text("proto")?.to_owned(),
            entry.endpoint("client")?.to_string(),
            entry.endpoint("virtual")?.to_string(),
            entry.endpoint("dest")?.to_string(),
            entry.text("state")?.to_owned(),
            entry.maybe_text("pe").unwrap_or_default().to_owned(),
            entry.maybe_text("origin").unwrap_or_default().to_owned(),
        ];
        let left = entry.maybe_number("expires").unwrap_or(0);
        expected.entry(key).or_default().push(left);
    }
    let mut got: BTreeMap<Entry, Vec<i64>> = BTreeMap::new();
    let with_origin = expected.keys().any(|key| !key[6].is_empty());
    let control = &bed.director.control;
    let connections = bed.director.shard.connections_from(0, bed.now);
    let templates = control.templates_from(0, bed.now);
    for conn in connections.chain(templates) {
        let dest = conn.server.to_string();
        if !configured(&dest) {
            continue;
        }
        let proto = match conn.protocol {
            Protocol(0) => "IP".to_owned(),
            Protocol(number @ (50 | 51)) => format!("IP_{number}"),
            protocol => protocol.to_string(),
        };
        let engine = conn.template.then(|| control.template_engine(conn.id));
        let engine = engine.flatten().map_or_else(String::new, |(name, data)| {
            format!("{name} {}", String::from_utf8_lossy(data))
        });
        let origin = match (with_origin, conn.synced) {
            (false, _) => "",
            (true, true) => "SYNC",
            (true, false) => "LOCAL",
        };
        let key = [
            proto,
            conn.client.to_string(),
            conn.virt.to_string(),
            dest,
            conn.state.to_owned(),
            engine,
            origin.to_owned(),
        ];
        let left = listed_seconds(conn.expires);
        got.entry(key).or_default().push(left);
    }
    for times in expected.values_mut().chain(got.values_mut()) {
        times.sort_unstable();
    }
    let passed = bed.now.as_nanos() / 1_000_000_000;
    let keys: std::collections::BTreeSet<_> = expected.keys().chain(got.keys()).cloned().collect();
    for key in keys {
        let none = Vec::new();
        let (want, have) = (
            expected.get(&key).unwrap_or(&none),
            got.get(&key).unwrap_or(&none),
        );
        let near = want.len() == have.len()
            && (!expires
                || want
                    .iter()
                    .zip(have)
                    .all(|(want, have)| is_near(*want, *have, &key, passed)));
        if !near {
            log.mismatch(
                &format!("entry {}", key.join(" ")),
                &format!("{want:?} s"),
                &format!("{have:?} s"),
            );
        }
    }
    Ok(())
}

/// Whether the remaining time of a connection equals the recorded one, up to one second. The
/// kernel's timers fire late by up to an eighth of their length. The timer of a template that
/// controlled connections may therefore have restarted late by an eighth of the elapsed time.
fn is_near(recorded: i64, ours: i64, key: &Entry, passed: u64) -> bool {
    let template = key[1].ends_with(":0");
    let late = if template { 1 + passed / 8 } else { 1 };
    (-1..=i64::try_from(late).unwrap_or(i64::MAX)).contains(&later(recorded, ours))
}

/// Seconds after which the times in the kernel's listings wrap around: the kernel counts
/// milliseconds in 32 bits.
const LISTED_MAX: i64 = u32::MAX as i64 / 1000;

/// Seconds that the kernel's listing shows for a remaining time.
pub(super) fn listed_seconds(left: Duration) -> i64 {
    let millis = left.as_millis() % (1 << 32);
    i64::try_from(millis / 1000).unwrap_or(i64::MAX)
}

/// Number of seconds by which `recorded` is later than `ours`, on both sides of the wrap at
/// [`LISTED_MAX`].
pub(super) const fn later(recorded: i64, ours: i64) -> i64 {
    let by = recorded - ours;
    if by > LISTED_MAX / 2 {
        by - LISTED_MAX
    } else if by < -LISTED_MAX / 2 {
        by + LISTED_MAX
    } else {
        by
    }
}

pub(super) fn from_server(server: IpAddr, packet: &[u8]) -> Vec<u8> {
    let frame = ethernet(super::bed::SERVER_SIDE, made_up_mac(server), packet);
    debug_assert!(frame.len() > ETHERNET_LEN);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_seconds_wrap_after_2_to_the_32_milliseconds() {
        let listed = |seconds| listed_seconds(Duration::from_secs(seconds));
        assert_eq!(listed(4_294_967), 4_294_967);
        assert_eq!(listed(4_294_968), 0);
        assert_eq!(listed(5_000_000), 705_032);
    }

    #[test]
    fn listed_times_are_compared_correctly_across_their_wrap() {
        assert_eq!(later(300, 299), 1);
        assert_eq!(later(4_294_967, 0), 0, "the wrap is not recognised");
        assert_eq!(later(0, 4_294_966), 1);
        assert_eq!(later(4_294_966, 0), -1);
        let key = std::array::from_fn(|_| "192.0.2.1:4000".to_owned());
        assert!(is_near(4_294_966, 0, &key, 0) && !is_near(4_294_900, 0, &key, 0));
    }
}

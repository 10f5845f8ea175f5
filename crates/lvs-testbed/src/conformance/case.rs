//! Parses recorded cases, and configures the director for them.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use lvs_core::mark::{MarkAction, MarkRule, PortRange};
use lvs_core::tunnel::{Tunnel, TunnelChecksum};
use lvs_core::{
    Family, Forwarding, Prefix, Protocol, ServerConfig, ServiceConfig, ServiceFlags, ServiceKey,
};
use serde_json::{Map, Value};

/// The reason for the early end of a replay.
#[derive(Debug)]
pub(super) enum Halt {
    /// A feature that is not implemented, by name.
    Unsupported(String),
    /// The recording is invalid, or the director refuses something that the kernel accepted.
    Broken(anyhow::Error),
}

impl From<anyhow::Error> for Halt {
    fn from(error: anyhow::Error) -> Self {
        Self::Broken(error)
    }
}

impl From<lvs_core::Error> for Halt {
    fn from(error: lvs_core::Error) -> Self {
        match error {
            lvs_core::Error::Unsupported(what) => Self::Unsupported(format!("core: {what}")),
            other => Self::Broken(anyhow!(
                "the director refuses a step that the kernel accepted: {other}"
            )),
        }
    }
}

impl From<Halt> for anyhow::Error {
    fn from(halt: Halt) -> Self {
        match halt {
            Halt::Unsupported(what) => anyhow!("{what} is not supported"),
            Halt::Broken(error) => error,
        }
    }
}

pub(super) type Replayed<T> = Result<T, Halt>;

/// Duration of a wait step.
pub(super) fn seconds(step: &Value) -> anyhow::Result<Duration> {
    let seconds = step
        .get("seconds")
        .and_then(Value::as_f64)
        .context("the wait step has no number `seconds`")?;
    Ok(Duration::try_from_secs_f64(seconds)?)
}

pub(crate) trait Json {
    fn text(&self, key: &str) -> anyhow::Result<&str>;
    fn maybe_text(&self, key: &str) -> Option<&str>;
    fn number(&self, key: &str) -> anyhow::Result<i64>;
    fn maybe_number(&self, key: &str) -> Option<i64>;
    fn list(&self, key: &str) -> anyhow::Result<&Vec<Value>>;
    fn items(&self, key: &str) -> &[Value];
    fn endpoint(&self, key: &str) -> anyhow::Result<SocketAddr>;
    fn fields(&self, key: &str) -> Option<&Map<String, Value>>;
    fn frame(&self, key: &str) -> anyhow::Result<Vec<u8>>;
}

impl Json for Value {
    fn text(&self, key: &str) -> anyhow::Result<&str> {
        self.maybe_text(key)
            .with_context(|| format!("the field {key:?} is missing or not a string"))
    }

    fn maybe_text(&self, key: &str) -> Option<&str> {
        self.get(key)?.as_str()
    }

    fn number(&self, key: &str) -> anyhow::Result<i64> {
        self.maybe_number(key)
            .with_context(|| format!("the field {key:?} is missing or not a whole number"))
    }

    fn maybe_number(&self, key: &str) -> Option<i64> {
        self.get(key)?.as_i64()
    }

    fn list(&self, key: &str) -> anyhow::Result<&Vec<Value>> {
        self.get(key)
            .and_then(Self::as_array)
            .with_context(|| format!("the field {key:?} is missing or not a list"))
    }

    fn items(&self, key: &str) -> &[Value] {
        self.get(key)
            .and_then(Self::as_array)
            .map_or(&[], Vec::as_slice)
    }

    fn endpoint(&self, key: &str) -> anyhow::Result<SocketAddr> {
        self.text(key)?
            .parse()
            .with_context(|| format!("the field {key:?} is not an address with a port"))
    }

    fn fields(&self, key: &str) -> Option<&Map<String, Value>> {
        self.get(key)?.as_object()
    }

    fn frame(&self, key: &str) -> anyhow::Result<Vec<u8>> {
        unhex(self.text(key)?).with_context(|| format!("the field {key:?} is not hexadecimal"))
    }
}

pub(crate) fn unhex(text: &str) -> anyhow::Result<Vec<u8>> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        bail!("the text does not consist of pairs of hexadecimal digits");
    }
    (0..text.len())
        .step_by(2)
        .map(|at| Ok(u8::from_str_radix(&text[at..at + 2], 16)?))
        .collect()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// The value of a sysctl as text: recordings contain strings and numbers.
pub(crate) fn sysctl_text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// Parses the address and the port of a JSON object with the fields `addr` and `port`.
pub(crate) fn place(value: &Value) -> anyhow::Result<SocketAddr> {
    let ip: IpAddr = value
        .text("addr")?
        .parse()
        .context("`addr` is not an IP address")?;
    Ok(SocketAddr::new(ip, u16::try_from(value.number("port")?)?))
}

pub(super) fn protocol(name: &str) -> anyhow::Result<Protocol> {
    Ok(match name {
        "tcp" => Protocol::TCP,
        "udp" => Protocol::UDP,
        "sctp" => Protocol::SCTP,
        other => bail!("unknown protocol {other:?}"),
    })
}

/// The key of the service that a JSON object describes; `proto` is the default protocol.
pub(super) fn service_key(value: &Value, proto: Option<&str>) -> anyhow::Result<ServiceKey> {
    if let Some(mark) = value.maybe_number("fwmark") {
        return Ok(ServiceKey::Mark {
            family: match value.maybe_text("family") {
                Some("ipv6" | "v6" | "6") => Family::V6,
                _ => Family::V4,
            },
            mark: u32::try_from(mark)?,
        });
    }
    let name = value
        .maybe_text("proto")
        .or(proto)
        .context("the service has no protocol")?;
    Ok(ServiceKey::Address {
        protocol: protocol(name)?,
        addr: place(value)?,
    })
}

fn flags(names: &[Value]) -> anyhow::Result<ServiceFlags> {
    let mut flags = ServiceFlags::default();
    for name in names {
        flags.0 |= match name.as_str() {
            Some("persistent") => ServiceFlags::PERSISTENT,
            Some("ops") => ServiceFlags::ONE_PACKET,
            Some("sh-fallback" | "mh-fallback" | "flag-1") => ServiceFlags::SCHED1,
            Some("sh-port" | "mh-port" | "flag-2") => ServiceFlags::SCHED2,
            Some("flag-3") => ServiceFlags::SCHED3,
            other => bail!("unknown service flag {other:?}"),
        };
    }
    Ok(flags)
}

/// Sets the fields of `config` that the JSON object contains.
pub(super) fn configure(
    config: &mut ServiceConfig,
    family: Family,
    value: &Value,
) -> anyhow::Result<()> {
    if let Some(name) = value.maybe_text("scheduler") {
        config.scheduler = name.to_owned();
    }
    if value.get("flags").is_some() {
        config.flags = flags(value.items("flags"))?;
    }
    if let Some(timeout) = value.maybe_number("timeout") {
        config.timeout = u32::try_from(timeout)?;
    }
    if let Some(length) = value.maybe_number("plen") {
        let length = u32::try_from(length)?;
        config.netmask = match family {
            Family::V4 => u32::MAX.checked_shl(32 - length).unwrap_or(0),
            Family::V6 => length,
        };
    }
    if let Some(engine) = value.maybe_text("pe") {
        config.engine = Some(engine.to_owned());
    }
    Ok(())
}

/// Sets the fields of `config` that the JSON object contains.
pub(super) fn configure_server(config: &mut ServerConfig, value: &Value) -> anyhow::Result<()> {
    if let Some(weight) = value.maybe_number("weight") {
        config.weight = i32::try_from(weight)?;
    }
    if let Some(upper) = value.maybe_number("upper") {
        config.upper = u32::try_from(upper)?;
    }
    if let Some(lower) = value.maybe_number("lower") {
        config.lower = u32::try_from(lower)?;
    }
    if let Some(method) = value.maybe_text("forward") {
        config.forwarding = match method {
            "masq" => Forwarding::Nat,
            "direct" => Forwarding::Route,
            "tunnel" => Forwarding::Tunnel,
            other => bail!("unknown forwarding method {other:?}"),
        };
    }
    let checksum = match value.maybe_text("tun_csum") {
        None | Some("nocsum") => TunnelChecksum::None,
        Some("csum") => TunnelChecksum::Full,
        Some("remcsum") => TunnelChecksum::Remote,
        Some(other) => bail!("unknown tunnel checksum {other:?}"),
    };
    match value.maybe_text("tun_type") {
        None => {}
        Some("ipip") => config.tunnel = Tunnel::Ipip,
        Some("gre") => config.tunnel = Tunnel::Gre { checksum },
        Some("gue") => {
            config.tunnel = Tunnel::Gue {
                port: u16::try_from(value.maybe_number("tun_port").unwrap_or(0))?,
                checksum,
            }
        }
        Some(other) => bail!("unknown tunnel type {other:?}"),
    }
    Ok(())
}

/// Converts a mark rule of the recorder to one of the dataplane.
pub(super) fn mark_rule(value: &Value) -> anyhow::Result<MarkRule> {
    let ports = match value.get("dports") {
        None => Vec::new(),
        Some(Value::Number(port)) => {
            let port = u16::try_from(port.as_u64().unwrap_or(u64::MAX))?;
            vec![PortRange(port, port)]
        }
        Some(expression) => expression
            .as_str()
            .context("`dports` is neither a number nor a string")?
            .split([',', '{', '}'])
            .map(str::trim)
            .filter(|range| !range.is_empty())
            .map(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                Ok(PortRange(first.trim().parse()?, last.trim().parse()?))
            })
            .collect::<anyhow::Result<_>>()?,
    };
    let (net, length) = prefix(value.text("dst")?)?;
    Ok(MarkRule {
        interface: None,
        source: None,
        destination: Some(
            Prefix::new(net, length).context("the prefix is longer than the address")?,
        ),
        protocol: value.maybe_text("proto").map(protocol).transpose()?,
        ports,
        action: MarkAction::Mark(u32::try_from(value.number("mark")?)?),
    })
}

/// Parses an address with a prefix length, which defaults to the whole address.
pub(super) fn prefix(text: &str) -> anyhow::Result<(IpAddr, u8)> {
    let (addr, length) = text.split_once('/').unwrap_or((text, ""));
    let addr: IpAddr = addr
        .parse()
        .context("the prefix does not begin with an IP address")?;
    let length = if length.is_empty() {
        Family::of(&addr).bits()
    } else {
        length
            .parse()
            .context("the prefix length is not a number")?
    };
    Ok((addr, length))
}

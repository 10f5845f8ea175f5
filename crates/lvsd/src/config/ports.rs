//! Services with several ports: `address = "192.0.2.10:8000-8999"`, `"192.0.2.10:80,443"`,
//! `"192.0.2.10:*"`.
//!
//! An IPVS service has one port or a mark. Therefore lvsd creates a mark service with a mark from a
//! reserved range, and mark rules set this mark on the packets. A service with one port at the same
//! address has precedence, as over port 0 in IPVS: the rules exclude its port.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use lvs_core::mark::{MarkAction, MarkRule, PortRange};
use lvs_core::{Family, Prefix, Protocol};

use super::raw::RawService;

/// Marks that lvsd generates for services with several ports.
pub(crate) const MARKS: RangeInclusive<u32> = 0x4c00_0000..=0x4cff_ffff;

/// The ports of a service with several ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManyPorts {
    /// TCP, UDP or SCTP.
    pub protocol: Protocol,
    /// The virtual address.
    pub ip: IpAddr,
    /// Sorted ports without overlaps; empty for all ports.
    pub ports: Vec<PortRange>,
}

impl ManyPorts {
    /// Returns the ports of a service with several ports; `None` for any other service.
    ///
    /// # Errors
    /// The ports are invalid; the text is the reason.
    pub(super) fn of(raw: &RawService) -> Option<Result<Self, String>> {
        let protocol = match raw.protocol.as_ref().map(|word| word.get_ref().as_str()) {
            Some("udp") => Protocol::UDP,
            Some("sctp") => Protocol::SCTP,
            _ => Protocol::TCP,
        };
        Self::parse(raw.address.as_ref()?.get_ref(), protocol)
    }

    /// Parses an address with several ports; `None` if the text has at most one port, or if its
    /// address is invalid.
    ///
    /// # Errors
    /// The ports are invalid; the text is the reason.
    pub(super) fn parse(text: &str, protocol: Protocol) -> Option<Result<Self, String>> {
        let (ip, ports) = text.trim().rsplit_once(':')?;
        let ip = match ip.strip_prefix('[') {
            Some(six) => IpAddr::V6(six.strip_suffix(']')?.parse().ok()?),
            None => IpAddr::V4(ip.parse().ok()?),
        };
        if ports.trim().parse::<u16>().is_ok() {
            return None;
        }
        Some(read(ports).map(|ports| Self {
            protocol,
            ip,
            ports,
        }))
    }

    /// The mark of the service. It depends only on protocol, address and ports, so that connections
    /// survive a reload.
    pub fn mark(&self) -> u32 {
        // FNV-1a, folded to 24 bits.
        let hash = self
            .to_string()
            .bytes()
            .fold(0x811c_9dc5_u32, |hash, byte| {
                (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
            });
        MARKS.start() | ((hash >> 24 ^ hash) & (MARKS.end() - MARKS.start()))
    }

    /// Address family of the service.
    pub const fn family(&self) -> Family {
        Family::of(&self.ip)
    }

    pub(super) fn has(&self, port: u16) -> bool {
        let mut ranges = self.ports.iter();
        self.ports.is_empty() || ranges.any(|range| (range.0..=range.1).contains(&port))
    }

    /// Whether a packet exists that belongs to both services.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let all = [PortRange(0, u16::MAX)];
        let ports = |many: &Self| {
            if many.ports.is_empty() {
                all.to_vec()
            } else {
                many.ports.clone()
            }
        };
        let theirs = ports(other);
        self.ip == other.ip
            && self.protocol == other.protocol
            && ports(self)
                .iter()
                .any(|a| theirs.iter().any(|b| a.0 <= b.1 && b.0 <= a.1))
    }

    /// Returns the mark rule, without the ports in `apart`, which have their own services; `None`
    /// if no port remains.
    pub(crate) fn rule(&self, apart: &[u16]) -> Option<MarkRule> {
        let mut ports = self.ports.clone();
        if ports.is_empty() && !apart.is_empty() {
            ports.push(PortRange(0, u16::MAX));
        }
        for &port in apart {
            ports = ports
                .into_iter()
                .flat_map(|range| without(range, port))
                .collect();
        }
        if ports.is_empty() && !apart.is_empty() {
            return None;
        }
        Some(MarkRule {
            interface: None,
            source: None,
            destination: Some(Prefix::new(self.ip, self.family().bits())?),
            protocol: Some(self.protocol),
            ports,
            action: MarkAction::Mark(self.mark()),
        })
    }
}

impl std::fmt::Display for ManyPorts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let protocol = self.protocol.to_string().to_ascii_lowercase();
        match self.ip {
            IpAddr::V4(ip) => write!(f, "{protocol} {ip}:")?,
            IpAddr::V6(ip) => write!(f, "{protocol} [{ip}]:")?,
        }
        if self.ports.is_empty() {
            return f.write_str("*");
        }
        for (at, range) in self.ports.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma}{range}")?;
        }
        Ok(())
    }
}

/// Whether a rule sets a mark of the range that is reserved for lvsd ([`MARKS`]).
pub(crate) fn is_generated(rule: &str) -> bool {
    generated_mark(rule).is_some()
}

/// The mark that a rule sets, if it is in the range that is reserved for lvsd ([`MARKS`]); `None`
/// for any other rule.
pub(crate) fn generated_mark(rule: &str) -> Option<u32> {
    let words: Vec<&str> = rule.split_whitespace().collect();
    match MarkRule::parse(&words).ok()?.action {
        MarkAction::Mark(mark) if MARKS.contains(&mark) => Some(mark),
        _ => None,
    }
}

fn read(text: &str) -> Result<Vec<PortRange>, String> {
    if text.trim() == "*" {
        return Ok(Vec::new());
    }
    let mut ports = text
        .split(',')
        .map(|range| range.trim().parse())
        .collect::<Result<Vec<PortRange>, String>>()?;
    ports.sort_by_key(|range| range.0);
    match ports.windows(2).find(|pair| pair[1].0 <= pair[0].1) {
        Some(pair) => Err(format!("{} and {} overlap", pair[0], pair[1])),
        None => Ok(ports),
    }
}

/// Returns the parts of a range that remain without `port`.
fn without(range: PortRange, port: u16) -> Vec<PortRange> {
    let PortRange(first, last) = range;
    if !(first..=last).contains(&port) {
        return vec![range];
    }
    let below = (port > first).then(|| PortRange(first, port - 1));
    let above = (port < last).then(|| PortRange(port + 1, last));
    below.into_iter().chain(above).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn many(text: &str) -> ManyPorts {
        let parsed = ManyPorts::parse(text, Protocol::TCP);
        parsed
            .expect("the text is valid")
            .expect("the text names several ports")
    }

    #[test]
    fn many_ports_parse_of_single_port_or_invalid_address_returns_none() {
        for text in [
            "192.0.2.10:80",
            "[fd00::1]:443",
            "192.0.2.10",
            "fd00::1",
            "x:80-90",
            "[192.0.2.1]:1-2",
        ] {
            assert_eq!(ManyPorts::parse(text, Protocol::TCP), None, "{text}");
        }
    }

    #[test]
    fn port_ranges_are_sorted_and_invalid_port_ranges_are_refused() {
        for (text, written) in [
            ("192.0.2.10:8000-8999", "tcp 192.0.2.10:8000-8999"),
            ("192.0.2.10:443,80", "tcp 192.0.2.10:80,443"),
            ("[fd00::1]:*", "tcp [fd00::1]:*"),
        ] {
            assert_eq!(many(text).to_string(), written);
            assert!(MARKS.contains(&many(text).mark()));
        }
        for (text, complaint) in [
            ("192.0.2.10:90-80", "is lower than its beginning"),
            ("192.0.2.10:80,70-90", "overlap"),
            ("192.0.2.10:80-x", "expected a port"),
            ("192.0.2.10:", "expected a port"),
            ("192.0.2.10:99999", "expected a port"),
        ] {
            let refused = ManyPorts::parse(text, Protocol::TCP)
                .expect("the text has several ports")
                .expect_err(text);
            assert!(
                refused.contains(complaint),
                "{text}: no {complaint:?} in {refused}"
            );
        }
    }

    #[test]
    fn generated_mark_rule_excludes_ports_of_services_with_one_port() {
        let rule = |text: &str, apart: &[u16]| many(text).rule(apart).map(|rule| rule.to_string());
        let mark = many("192.0.2.10:80-90").mark();
        let expected =
            format!("--destination 192.0.2.10 --protocol tcp --ports 81-84,86-90 --mark {mark}");
        assert_eq!(rule("192.0.2.10:80-90", &[80, 85, 22]), Some(expected));
        assert_eq!(rule("192.0.2.10:80,81", &[80, 81]), None);
        let all = rule("192.0.2.10:*", &[]).expect("a port remains");
        assert!(!all.contains("--ports") && is_generated(&all), "{all}");
        assert!(
            rule("192.0.2.10:*", &[80])
                .expect("a port remains")
                .contains("--ports 0-79,81-65535")
        );
        assert!(!is_generated("--destination 192.0.2.10 --mark 7"));
    }

    #[test]
    fn port_ranges_overlap_only_with_common_address_and_port() {
        for (a, b, overlap) in [
            ("192.0.2.10:80-90", "192.0.2.10:90-99", true),
            ("192.0.2.10:80-90", "192.0.2.10:91-99", false),
            ("192.0.2.10:80-90", "192.0.2.11:80-90", false),
            ("192.0.2.10:80-90", "192.0.2.10:*", true),
        ] {
            assert_eq!(many(a).overlaps(&many(b)), overlap, "{a} {b}");
        }
    }
}

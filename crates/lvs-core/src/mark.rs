//! Rules that give packets firewall marks, like `iptables -j MARK` for the kernel's IPVS, that drop
//! packets, or that pass packets to the host.
//!
//! A rule is written as words, in files of rules and on command lines alike:
//!
//! ```text
//! --destination 192.0.2.10 --protocol tcp --ports 80,443 --mark 1
//! --interface eth0 --source 203.0.113.0/24 --destination 192.0.2.10 --drop
//! --destination 192.0.2.10 --protocol tcp --ports 22 --host
//! --source 203.0.113.0/24 --drop
//! ```

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::net::IpAddr;
use core::str::FromStr;

use crate::{Prefix, Protocol, Tuple};

/// Maximum number of rules: a packet may be compared with all of them.
pub const RULES_MAX: usize = 1024;

/// Ports from the first to the second, inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortRange(pub u16, pub u16);

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = |text: &str| {
            text.parse::<u16>()
                .map_err(|_| alloc::format!("{text}: expected a port, 0 to 65535"))
        };
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let (first, last) = (port(first)?, port(last)?);
        if first > last {
            return Err(alloc::format!(
                "{text}: the end of the range is lower than its beginning"
            ));
        }
        Ok(Self(first, last))
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == self.1 {
            write!(f, "{}", self.0)
        } else {
            write!(f, "{}-{}", self.0, self.1)
        }
    }
}

/// Action for packets that match a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MarkAction {
    /// The packets get this mark, which is not 0.
    Mark(u32),
    /// The packets are dropped.
    Drop,
    /// The packets are passed to the host, even if they match a service.
    Host,
}

/// A rule: applies to the packets that match all its conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkRule {
    /// Name of the interface on which the packets arrive; `None` for all interfaces.
    pub interface: Option<String>,
    /// Source prefix of the packets; `None` for all sources.
    pub source: Option<Prefix>,
    /// Destination prefix of the packets. A rule that sets a mark must have one, because the
    /// dataplane must hide the packets from the host's network stack. `None` means the packets to
    /// all services, which are hidden in any case. A rule without a destination must have a source,
    /// and an action other than a mark.
    pub destination: Option<Prefix>,
    /// The protocol of the packets: TCP, UDP or SCTP; `None` for all three.
    pub protocol: Option<Protocol>,
    /// The destination ports of the packets; empty for all.
    pub ports: Vec<PortRange>,
    /// The action for matching packets.
    pub action: MarkAction,
}

impl MarkRule {
    /// Maximum number of addresses that a rule's destination may have.
    pub const ADDRESSES_MAX: usize = 1 << 12;

    /// Reads a rule from its words.
    ///
    /// # Errors
    /// A message for operators, if an option is unknown, a value is missing or invalid, there is no
    /// action or more than one, or [`check`](Self::check) refuses the rule.
    pub fn parse<W: AsRef<str>>(words: &[W]) -> Result<Self, String> {
        let mut interface = None;
        let (mut source, mut destination) = (None, None);
        let (mut protocol, mut ports, mut action) = (None, Vec::new(), None);
        let mut words = words.iter().map(AsRef::as_ref);
        while let Some(option) = words.next() {
            let mut value = || {
                words
                    .next()
                    .ok_or_else(|| alloc::format!("{option} needs a value"))
            };
            let decided = match option {
                "--interface" | "-i" => {
                    interface = Some(value()?.to_string());
                    continue;
                }
                "--source" | "-s" => {
                    source = Some(value()?.parse()?);
                    continue;
                }
                "--destination" | "-d" => {
                    destination = Some(value()?.parse::<Prefix>()?);
                    continue;
                }
                "--protocol" | "-p" => {
                    protocol = Some(match value()? {
                        "tcp" => Protocol::TCP,
                        "udp" => Protocol::UDP,
                        "sctp" => Protocol::SCTP,
                        other => return Err(alloc::format!("{other}: expected tcp, udp or sctp")),
                    });
                    continue;
                }
                "--ports" => {
                    for range in value()?.split(',') {
                        ports.push(range.parse()?);
                    }
                    continue;
                }
                "--mark" => {
                    let text = value()?;
                    let mark = text.parse::<u32>().ok().filter(|&mark| mark != 0);
                    MarkAction::Mark(mark.ok_or_else(|| {
                        alloc::format!("{text}: expected a mark, 1 to 4294967295")
                    })?)
                }
                "--drop" => MarkAction::Drop,
                "--host" => MarkAction::Host,
                other => {
                    return Err(alloc::format!(
                        "{other}: expected --interface, --source, --destination, --protocol, --ports, --mark, --drop or \
                         --host"
                    ));
                }
            };
            if action.replace(decided).is_some() {
                return Err("only one of --mark, --drop and --host is allowed".into());
            }
        }
        let rule = Self {
            interface,
            source,
            destination,
            protocol,
            ports,
            action: action.ok_or("the action is missing: --mark N, --drop or --host")?,
        };
        rule.check()?;
        Ok(rule)
    }

    /// Checks whether the rule can be applied.
    ///
    /// # Errors
    /// A message for operators, if a mark is to be set without a destination, if the rule has
    /// neither source nor destination, if their address families differ, or if the destination has
    /// more than [`ADDRESSES_MAX`](Self::ADDRESSES_MAX) addresses.
    pub fn check(&self) -> Result<(), String> {
        let Some(destination) = self.destination else {
            return match (self.action, self.source) {
                (MarkAction::Mark(_), _) => Err(
                    "--destination is missing: a rule with --mark needs it, because the dataplane hides the packets from the host by their destination"
                        .into(),
                ),
                (_, None) => Err(
                    "--destination or --source is missing: the action drop or host needs one of them"
                        .into(),
                ),
                (_, Some(_)) => Ok(()),
            };
        };
        if self
            .source
            .is_some_and(|source| source.family() != destination.family())
        {
            return Err("source and destination are of different address families".into());
        }
        let few = destination.addresses().map(Iterator::count);
        if few.is_none_or(|count| count > Self::ADDRESSES_MAX) {
            return Err(alloc::format!(
                "{destination}: a destination has at most {} addresses (a /{} or longer); use several rules",
                Self::ADDRESSES_MAX,
                destination.family().bits() - 12,
            ));
        }
        Ok(())
    }

    /// The addresses whose packets must be hidden from the host because of this rule: at most
    /// [`ADDRESSES_MAX`](Self::ADDRESSES_MAX).
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let addresses = self.destination.and_then(|network| network.addresses());
        addresses.into_iter().flatten()
    }

    /// Whether a packet from `interface` matches all conditions of the rule. `to_service` returns
    /// whether a service exists for the destination, and is called only for a rule without a
    /// destination.
    pub fn matches(
        &self,
        interface: &str,
        tuple: &Tuple,
        to_service: impl FnOnce() -> bool,
    ) -> bool {
        let port = tuple.dst.port();
        self.destination
            .is_none_or(|network| network.contains(tuple.dst.ip()))
            && match self.protocol {
                Some(protocol) => protocol == tuple.protocol,
                None => matches!(
                    tuple.protocol,
                    Protocol::TCP | Protocol::UDP | Protocol::SCTP
                ),
            }
            && (self.ports.is_empty()
                || self
                    .ports
                    .iter()
                    .any(|range| (range.0..=range.1).contains(&port)))
            && self
                .source
                .is_none_or(|source| source.contains(tuple.src.ip()))
            && self.interface.as_ref().is_none_or(|name| name == interface)
            && (self.destination.is_some() || to_service())
    }
}

impl fmt::Display for MarkRule {
    /// Writes the words that [`MarkRule::parse`] reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(interface) = &self.interface {
            write!(f, "--interface {interface} ")?;
        }
        if let Some(source) = self.source {
            write!(f, "--source {source} ")?;
        }
        if let Some(destination) = self.destination {
            write!(f, "--destination {destination} ")?;
        }
        match self.protocol {
            Some(Protocol::TCP) => f.write_str("--protocol tcp ")?,
            Some(Protocol::UDP) => f.write_str("--protocol udp ")?,
            Some(_) => f.write_str("--protocol sctp ")?,
            None => {}
        }
        for (number, range) in self.ports.iter().enumerate() {
            f.write_str(if number == 0 { "--ports " } else { "," })?;
            range.fmt(f)?;
        }
        if !self.ports.is_empty() {
            f.write_str(" ")?;
        }
        match self.action {
            MarkAction::Mark(mark) => write!(f, "--mark {mark}"),
            MarkAction::Drop => f.write_str("--drop"),
            MarkAction::Host => f.write_str("--host"),
        }
    }
}

/// Reads a file with one rule on each line; empty lines and text after a `#` are ignored.
///
/// # Errors
/// The number of the first invalid line, from 1, and the reason.
pub fn parse_rules(text: &str) -> Result<Vec<MarkRule>, (usize, String)> {
    let mut rules = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("");
        let words: Vec<&str> = line.split_whitespace().collect();
        if !words.is_empty() {
            rules.push(MarkRule::parse(&words).map_err(|error| (number + 1, error))?);
        }
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Result<MarkRule, String> {
        MarkRule::parse(&text.split_whitespace().collect::<Vec<_>>())
    }

    fn tuple(protocol: Protocol, src: &str, dst: &str) -> Tuple {
        Tuple::new(protocol, src.parse().unwrap(), dst.parse().unwrap())
    }

    #[test]
    fn mark_rule_round_trips_as_text() {
        for text in [
            "--destination 192.0.2.10 --protocol tcp --ports 80,443,8000-8010 --mark 7",
            "--interface eth0 --source 203.0.113.0/24 --destination 192.0.2.0/28 --drop",
            "--destination 2001:db8::/116 --protocol udp --host",
            "--source 203.0.113.0/24 --drop",
            "--interface eth0 --source 2001:db8:bad::/48 --protocol tcp --ports 80 --host",
        ] {
            assert_eq!(rule(text).unwrap().to_string(), text);
        }
        assert_eq!(
            rule("-d 192.0.2.77/24 -p sctp --mark 1")
                .unwrap()
                .to_string(),
            "--destination 192.0.2.0/24 --protocol sctp --mark 1"
        );
    }

    #[test]
    fn invalid_mark_rules_are_refused_with_reason() {
        for (text, reason) in [
            ("--mark 1", "--destination is missing"),
            ("-s 192.0.2.1 --mark 1", "--destination is missing"),
            ("--drop", "--destination or --source is missing"),
            ("-i eth0 --host", "--destination or --source is missing"),
            ("-d 192.0.2.1", "the action is missing"),
            ("-d 192.0.2.1 --mark 0", "expected a mark"),
            ("-d 192.0.2.1 --mark 1 --drop", "only one of"),
            ("-d 192.0.2.1/33 --mark 1", "expected an address"),
            ("-d 10.0.0.0/8 --mark 1", "at most 4096 addresses"),
            ("-d ::/0 --mark 1", "at most 4096 addresses"),
            (
                "-d 192.0.2.1 --ports 90-80 --mark 1",
                "is lower than its beginning",
            ),
            ("-d 192.0.2.1 -s ::1 --mark 1", "different address families"),
            ("-d 192.0.2.1 --mark", "needs a value"),
            ("-d 192.0.2.1 --colour red", "--colour: expected"),
        ] {
            let error = rule(text).unwrap_err();
            assert!(
                error.contains(reason),
                "no {reason:?} in the error of `{text}`: {error}"
            );
        }
        let file = "# ports\n\n-d 192.0.2.1 --mark 1 # web\n-d x --drop\n";
        assert_eq!(parse_rules(file).unwrap_err().0, 4);
    }

    #[test]
    fn mark_rule_matches_only_if_all_conditions_match() {
        let never = || unreachable!("the rule has a destination");
        let web = rule("-i eth0 -s 203.0.113.0/24 -d 192.0.2.0/30 -p tcp --ports 80,443 --mark 1")
            .unwrap();
        let good = tuple(Protocol::TCP, "203.0.113.9:4000", "192.0.2.3:443");
        assert!(web.matches("eth0", &good, never));
        assert!(!web.matches("eth1", &good, never));
        for other in [
            tuple(Protocol::UDP, "203.0.113.9:4000", "192.0.2.3:443"),
            tuple(Protocol::TCP, "203.0.112.9:4000", "192.0.2.3:443"),
            tuple(Protocol::TCP, "203.0.113.9:4000", "192.0.2.4:443"),
            tuple(Protocol::TCP, "203.0.113.9:4000", "192.0.2.3:81"),
        ] {
            assert!(!web.matches("eth0", &other, never), "{other:?}");
        }
        assert_eq!(web.addresses().count(), 4);
    }

    #[test]
    fn mark_rule_by_source_matches_packets_to_services_only() {
        let bad = rule("-s 203.0.113.0/24 --drop").unwrap();
        let from_it = tuple(Protocol::TCP, "203.0.113.9:4000", "192.0.2.3:443");
        assert!(bad.matches("eth0", &from_it, || true));
        assert!(!bad.matches("eth0", &from_it, || false));
        let other = tuple(Protocol::TCP, "203.0.112.9:4000", "192.0.2.3:443");
        assert!(!bad.matches("eth0", &other, || true));
        let other = tuple(Protocol::ICMP, "203.0.113.9:0", "192.0.2.3:0");
        assert!(!bad.matches("eth0", &other, || true));
        assert_eq!(bad.addresses().count(), 0);
    }
}

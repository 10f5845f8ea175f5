//! The map of services for the BPF programs. While no dataplane is running, the programs drop
//! packets that may open a connection to a service, because the host would reset it.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering::{Relaxed, Release};

use lvs_core::mark::{MarkAction, MarkRule, PortRange};
use lvs_core::{Control, Family, Prefix, Protocol, ServiceFlags, ServiceKey};
use tracing::warn;

use super::FastPath;
use super::layout::{RULE_WORDS, RULES, SERVICE_DATA, SERVICE_WORDS, rule};
use lvs_sys::lock;

type Key = [u64; SERVICE_WORDS];
type Rule = [u64; RULE_WORDS];

/// FTP's control port.
const FTP: u16 = 21;

/// Services and rules for marks, as the programs read them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeldServices {
    services: HashSet<Key>,
    /// The rules in order, each with one range of ports.
    rules: Vec<Rule>,
}

impl HeldServices {
    pub(crate) fn of(control: &Control) -> Self {
        let mut services = HashSet::new();
        let mut marks = HashSet::new();
        for service in control.services() {
            match service.key() {
                ServiceKey::Address { protocol, addr } => {
                    let key = service_key(protocol, addr);
                    services.insert(key);
                    let persistent = service.config().flags.has(ServiceFlags::PERSISTENT);
                    if (protocol, addr.port(), persistent) == (Protocol::TCP, FTP, true) {
                        services.insert([key[0], key[1], key[2] | SERVICE_DATA]);
                    }
                }
                ServiceKey::Mark { family, mark } => {
                    marks.insert((family, mark));
                }
            }
        }
        let has = |family, mark| marks.contains(&(family, mark));
        let link = |name: &str| lvs_sys::if_index(name).ok();
        let rules = control.marks().iter();
        let rules = rules.flat_map(|rule| rule_words(rule, has, link)).collect();
        Self { services, rules }
    }
}

impl FastPath {
    /// Replaces the services and rules in the maps. Logs how many do not fit.
    pub(crate) fn set_services(&self, new: &HeldServices) {
        let mut known = lock(&self.known_services);
        let mut missing = 0;
        for gone in known.difference(&new.services) {
            let _ = self.services.remove(gone);
        }
        let mut now: HashSet<Key> = known.intersection(&new.services).copied().collect();
        for service in new.services.difference(&known) {
            match self.services.insert(service, &[1]) {
                Ok(()) => {
                    now.insert(*service);
                }
                Err(_) => missing += 1,
            }
        }
        *known = now;
        drop(known);
        // An end marker after the last rule.
        let end = [[0; RULE_WORDS]];
        let most = RULES as usize;
        missing += new.rules.len().saturating_sub(most);
        let mut known = lock(&self.known_rules);
        if *known != new.rules {
            let rules = new.rules.iter().chain(&end).take(most);
            let places = self.arrays.rules.words().chunks_exact(RULE_WORDS);
            for (words, rule) in places.zip(rules) {
                let (action, others) = words[..=rule::WHAT]
                    .split_last()
                    .expect("the array is not empty");
                action.store(0, Release);
                for (word, value) in others.iter().zip(rule) {
                    word.store(*value, Relaxed);
                }
                action.store(rule[rule::WHAT], Release);
            }
            known.clone_from(&new.rules);
        }
        if missing > 0 {
            warn!(
                code = "held_incomplete",
                "{missing} services and rules for marks do not fit into the BPF maps: if this dataplane is killed, the host resets new connections to them"
            );
        }
    }
}

/// Converts a rule to entries for the BPF programs: one for each of its ranges of ports, or one for
/// all ports. Returns none if the rule has neither a destination nor a source, or if its interface
/// does not exist. `has` returns whether there is a service with a mark, and `link` returns the
/// index of an interface.
fn rule_words(
    spec: &MarkRule,
    has: impl Fn(Family, u32) -> bool,
    link: impl Fn(&str) -> Option<u32>,
) -> Vec<Rule> {
    let Some(family) = spec
        .destination
        .or(spec.source)
        .map(|prefix| prefix.family())
    else {
        return Vec::new();
    };
    let link = match &spec.interface {
        None => None,
        Some(name) => match link(name) {
            Some(index) => Some(index),
            // No packet can arrive on an unknown interface.
            None => return Vec::new(),
        },
    };
    let action = match spec.action {
        MarkAction::Mark(mark) if has(family, mark) => rule::HOLD,
        MarkAction::Mark(_) => rule::LOOK,
        MarkAction::Drop => rule::HOLD,
        MarkAction::Host => rule::HOST,
    };
    let mut words = [0; RULE_WORDS];
    let mut set = |at: usize, mask: usize, prefix: Option<Prefix>| {
        let Some(prefix) = prefix else { return };
        words[at..at + 2].copy_from_slice(&addr_words(prefix.addr()));
        words[mask..mask + 2].copy_from_slice(&mask_words(family, prefix.bits()));
    };
    set(rule::DST, rule::DST_MASK, spec.destination);
    set(rule::SRC, rule::SRC_MASK, spec.source);
    let six = u64::from(family == Family::V6);
    words[rule::KIND] = six;
    words[rule::KIND_MASK] = 1;
    if let Some(Protocol(protocol)) = spec.protocol {
        words[rule::KIND] |= u64::from(protocol) << 16;
        words[rule::KIND_MASK] |= 0xff << 16;
    }
    if let Some(link) = link {
        words[rule::LINK] = link.into();
        words[rule::LINK_MASK] = u32::MAX.into();
    }
    words[rule::WHAT] = action;
    if spec.destination.is_none() {
        words[rule::WHAT] |= rule::TO_SERVICE;
    }
    let all = [PortRange(0, u16::MAX)];
    let ranges = if spec.ports.is_empty() {
        &all[..]
    } else {
        &spec.ports
    };
    let rules = ranges.iter().map(|&PortRange(first, last)| {
        words[rule::FIRST] = first.into();
        words[rule::LAST] = last.into();
        words
    });
    rules.collect()
}

/// Converts an address to the words that BPF programs read.
fn addr_words(addr: IpAddr) -> [u64; 2] {
    let mut bytes = [0; 16];
    match addr {
        IpAddr::V4(addr) => bytes[..4].copy_from_slice(&addr.octets()),
        IpAddr::V6(addr) => bytes = addr.octets(),
    }
    halves(bytes)
}

/// The mask of the first `bits` bits of an address.
fn mask_words(family: Family, bits: u8) -> [u64; 2] {
    let mask = !u128::MAX.checked_shr(bits.into()).unwrap_or(0);
    let mut bytes = mask.to_be_bytes();
    if family == Family::V4 {
        bytes[4..].fill(0);
    }
    halves(bytes)
}

pub(super) fn halves(bytes: [u8; 16]) -> [u64; 2] {
    [0, 8].map(|at| {
        let mut half = [0; 8];
        half.copy_from_slice(&bytes[at..at + 8]);
        u64::from_ne_bytes(half)
    })
}

/// Returns the key by which the programs find a service; port 0 means all ports.
pub(crate) fn service_key(protocol: Protocol, at: SocketAddr) -> Key {
    let [first, second] = addr_words(at.ip());
    let port = u64::from(at.port().to_be());
    let six = u64::from(at.is_ipv6());
    [
        first,
        second,
        port | u64::from(protocol.0) << 16 | six << 24,
    ]
}

#[cfg(test)]
mod tests {
    use super::super::tests::open;
    use super::*;

    fn rules(text: &str) -> Vec<Rule> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let rule = MarkRule::parse(&words).expect("the rule is valid");
        let link = |name: &str| (name == "eth7").then_some(7);
        rule_words(
            &rule,
            |family, mark| (family, mark) == (Family::V4, 7),
            link,
        )
    }

    fn held(services: &[(Protocol, &str)], texts: &[&str]) -> HeldServices {
        let key = |&(protocol, at): &(Protocol, &str)| {
            service_key(protocol, at.parse().expect("the address is valid"))
        };
        HeldServices {
            services: services.iter().map(key).collect(),
            rules: texts.iter().flat_map(|text| rules(text)).collect(),
        }
    }

    /// A frame that opens a connection.
    fn frame(protocol: Protocol, src: &str, dst: &str) -> Vec<u8> {
        let (src, dst): (SocketAddr, SocketAddr) = (
            src.parse().expect("the address is valid"),
            dst.parse().expect("the address is valid"),
        );
        // Both MAC addresses are 0, as on `lo`.
        let mut frame = vec![0; 12];
        match (src.ip(), dst.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                frame.extend([8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol.0, 0, 0]);
                frame.extend(from.octets());
                frame.extend(to.octets());
                let sum: u32 = frame[14..]
                    .chunks(2)
                    .map(|two| u32::from(two[0]) << 8 | u32::from(two[1]))
                    .sum();
                let sum = !u16::try_from((sum & 0xffff) + (sum >> 16))
                    .expect("the sum fits into 16 bits");
                frame[24..26].copy_from_slice(&sum.to_be_bytes());
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, protocol.0, 64]);
                frame.extend(from.octets());
                frame.extend(to.octets());
            }
            _ => panic!("the addresses belong to two families"),
        }
        frame.extend(src.port().to_be_bytes());
        frame.extend(dst.port().to_be_bytes());
        frame.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0]);
        frame
    }

    /// The programs' result for a frame that they drop.
    const DROPPED: i32 = 2;
    const HOST: i32 = -1;

    #[test]
    fn program_without_dataplane_drops_packets_to_services_and_passes_other_packets_to_host() {
        let fast_path = open();
        let services = [
            (Protocol::TCP, "192.0.2.1:80"),
            (Protocol::SCTP, "192.0.2.1:36412"),
            (Protocol::UDP, "[2001:db8::1]:53"),
            (Protocol::TCP, "192.0.2.9:0"),
        ];
        let texts = [
            "--source 203.0.113.0/24 --host",
            "--destination 192.0.2.9 --protocol tcp --ports 22 --host",
            "--destination 192.0.2.50 --protocol tcp --ports 443,9000-9100 --mark 7",
            "--destination 192.0.2.64/29 --interface eth7 --mark 7",
            "--destination 192.0.2.64/29 --mark 8",
            "--destination 192.0.2.99 --drop",
            "--destination 192.0.2.1 --protocol tcp --mark 8",
        ];
        fast_path.set_services(&held(&services, &texts));
        let (tcp, udp, sctp) = (Protocol::TCP, Protocol::UDP, Protocol::SCTP);
        let client = "198.51.100.1:999";
        for (protocol, from, to, expected) in [
            (tcp, client, "192.0.2.1:80", DROPPED),
            (udp, client, "192.0.2.1:80", HOST),
            (tcp, client, "192.0.2.1:81", HOST),
            (sctp, client, "192.0.2.1:36412", DROPPED),
            (sctp, client, "192.0.2.1:36413", HOST),
            (udp, "[2001:db8::9]:7", "[2001:db8::1]:53", DROPPED),
            (tcp, "[2001:db8::9]:7", "[2001:db8::1]:53", HOST),
            (tcp, client, "192.0.2.9:1", DROPPED),
            (tcp, client, "192.0.2.9:22", HOST),
            (tcp, client, "192.0.2.50:443", DROPPED),
            (tcp, client, "192.0.2.50:9000", DROPPED),
            (tcp, client, "192.0.2.50:9100", DROPPED),
            (tcp, client, "192.0.2.50:9101", HOST),
            (tcp, client, "192.0.2.50:8999", HOST),
            (udp, client, "192.0.2.50:9005", HOST),
            // Test frames do not arrive on the interface of the rule.
            (tcp, client, "192.0.2.66:80", HOST),
            (udp, client, "192.0.2.99:5", DROPPED),
            // A rule with a source but no destination applies to packets to services.
            (tcp, "203.0.113.4:5", "192.0.2.1:80", HOST),
            (tcp, "203.0.113.4:5", "192.0.2.50:443", HOST),
            (tcp, "203.0.114.4:5", "192.0.2.50:443", DROPPED),
        ] {
            let (verdict, _) = fast_path
                .held_alone(&frame(protocol, from, to))
                .expect("the program runs on the frame");
            assert_eq!(verdict, expected, "{protocol:?} {from} {to}");
        }
        // After an update with fewer rules, the list ends earlier.
        fast_path.set_services(&held(&services, &texts[1..2]));
        let (verdict, _) = fast_path
            .held_alone(&frame(tcp, client, "192.0.2.50:443"))
            .expect("the program runs on the frame");
        assert_eq!(verdict, HOST);
    }

    #[test]
    fn program_without_dataplane_applies_mark_rules_up_to_its_limit() {
        let fast_path = open();
        let texts: Vec<String> = (0..RULES + 5)
            .map(|n| format!("--destination 10.0.{}.{} --mark 7", n / 256, n % 256))
            .collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        fast_path.set_services(&held(&[], &texts));
        for (n, expected) in [
            (0, DROPPED),
            (63, DROPPED),
            (64, DROPPED),
            (RULES - 1, DROPPED),
            (RULES, HOST),
        ] {
            let to = format!("10.0.{}.{}:80", n / 256, n % 256);
            let frame = frame(Protocol::TCP, "192.0.2.7:1", &to);
            let (verdict, _) = fast_path
                .held_alone(&frame)
                .expect("the program runs on the frame");
            assert_eq!(verdict, expected, "{n}");
        }
    }

    #[test]
    fn mark_rules_are_encoded_and_mark_rule_of_unknown_interface_is_omitted() {
        assert!(rules("--destination 192.0.2.1 --interface eth9 --mark 7").is_empty());
        let [words] = rules("--destination 192.0.2.1 --interface eth7 --mark 7")[..] else {
            panic!("one")
        };
        assert_eq!(
            words[rule::FIRST..=rule::LINK_MASK],
            [0, 0xffff, 7, 0xffff_ffff]
        );
        let six = rules("--destination 2001:db8::/116 --protocol udp --mark 7");
        assert_eq!(
            six[0][rule::KIND..=rule::WHAT],
            [17 << 16 | 1, 0xff_0001, rule::LOOK]
        );
        assert_eq!(six[0][rule::DST_MASK], u64::MAX);
    }
}

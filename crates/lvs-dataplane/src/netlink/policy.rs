//! Policy rules, routes in separate tables and proxy neighbours, which route packets to a device.
//! They have the protocol number [`PROTOCOL`], by which the next dataplane finds them if the
//! process that added them was killed.

use std::io;
use std::net::IpAddr;

use super::message::{Builder, Message, attributes, text, u16_at, u32_at};
use super::requests::Requests;
use super::state::ip_of;
use super::{family_of, octets};

/// The protocol number of the dataplane's rules, routes and proxy neighbours, as `ip rule` and `ip
/// route` show it (`proto 76`). The registered numbers are in `linux/rtnetlink.h` and iproute2's
/// `rt_protos`.
pub(crate) const PROTOCOL: u8 = 76;

/// A route, a policy rule or a proxy neighbour. Entries are added in the order of this type, and
/// deleted in the reverse order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Entry {
    Route(PolicyRoute),
    Rule(PolicyRule),
    Proxy(Proxy),
}

/// A route to a device, in a separate table.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PolicyRoute {
    pub(crate) table: u32,
    pub(crate) to: IpAddr,
    pub(crate) prefix_len: u8,
    pub(crate) ifindex: u32,
}

/// A policy rule (`ip rule`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PolicyRule {
    pub(crate) ipv6: bool,
    /// The kernel evaluates rules in ascending order of priority.
    pub(crate) priority: u32,
    /// The interface that must have received the packet; `None` for any.
    pub(crate) interface: Option<String>,
    /// The source address that the packet must have; `None` for any.
    pub(crate) from: Option<IpAddr>,
    pub(crate) protocol: Option<u8>,
    /// First and last source port that match; above 0 and below 65535. Fragments have no ports and
    /// do not match.
    pub(crate) ports: Option<(u16, u16)>,
    pub(crate) action: Action,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Action {
    /// Looks up a table, and continues with the next rule if the table has no route.
    Lookup(u32),
    /// Continues with the rule of this priority.
    Goto(u32),
    /// Continues with the next rule.
    Nothing,
}

/// An address for which the host answers ARP or neighbour discovery on an interface, because it
/// routes packets to this address into the dataplane's device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Proxy {
    pub(crate) ifindex: u32,
    pub(crate) addr: IpAddr,
}

// `linux/fib_rules.h`
const FRA_SRC: u16 = 2;
const FRA_IIFNAME: u16 = 3;
const FRA_GOTO: u16 = 4;
const FRA_PRIORITY: u16 = 6;
const FRA_TABLE: u16 = 15;
const FRA_PROTOCOL: u16 = 21;
const FRA_IP_PROTO: u16 = 22;
const FRA_SPORT_RANGE: u16 = 23;
const FR_ACT_TO_TBL: u8 = 1;
const FR_ACT_GOTO: u8 = 2;
const FR_ACT_NOP: u8 = 3;
// `linux/neighbour.h`
const NDA_PROTOCOL: u16 = 12;

impl Requests {
    /// Adds an entry, unless it exists.
    pub(crate) fn add(&mut self, entry: &Entry) -> io::Result<()> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        match self.change(entry, true, flags) {
            Err(err) if err.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            result => result,
        }
    }

    /// Deletes an entry, if it exists.
    pub(crate) fn delete(&mut self, entry: &Entry) -> io::Result<()> {
        match self.change(entry, false, 0) {
            Err(err)
                if matches!(
                    err.raw_os_error(),
                    Some(libc::ENOENT | libc::ESRCH | libc::ENODEV | libc::ENXIO)
                ) =>
            {
                Ok(())
            }
            result => result,
        }
    }

    fn change(&mut self, entry: &Entry, new: bool, flags: i32) -> io::Result<()> {
        let kind = |add: u16, delete: u16| if new { add } else { delete };
        match entry {
            Entry::Route(route) => {
                let kind = kind(libc::RTM_NEWROUTE, libc::RTM_DELROUTE);
                self.request(kind, flags, &route.header(), |b| route.write(b))
            }
            Entry::Rule(rule) => {
                let kind = kind(libc::RTM_NEWRULE, libc::RTM_DELRULE);
                self.request(kind, flags, &rule.header(), |b| rule.write(b))
            }
            Entry::Proxy(proxy) => {
                let kind = kind(libc::RTM_NEWNEIGH, libc::RTM_DELNEIGH);
                self.request(kind, flags, &proxy.header(), |b| {
                    b.attr(libc::NDA_DST, &octets(proxy.addr));
                    b.attr(NDA_PROTOCOL, &[PROTOCOL]);
                })
            }
        }
    }

    /// Returns all entries with the dataplane's protocol number (routes only of `tables`), and the
    /// proxy neighbours of other programs.
    pub(crate) fn entries(&mut self, tables: &[u32]) -> io::Result<(Vec<Entry>, Vec<Proxy>)> {
        let (mut ours, mut others) = (Vec::new(), Vec::new());
        // A kernel without policy routing refuses this, and has no rules.
        let _ = self.dump(libc::RTM_GETRULE, &[0; 12], |message| {
            ours.extend(PolicyRule::parse(message).map(Entry::Rule));
        });
        self.dump(libc::RTM_GETROUTE, &[0; 12], |message| {
            let route = PolicyRoute::parse(message).filter(|route| tables.contains(&route.table));
            ours.extend(route.map(Entry::Route));
        })?;
        let mut proxies = [0; 12];
        proxies[10] = libc::NTF_PROXY;
        self.dump(libc::RTM_GETNEIGH, &proxies, |message| {
            match Proxy::parse(message) {
                Some((proxy, true)) => ours.push(Entry::Proxy(proxy)),
                Some((proxy, false)) => others.push(proxy),
                None => {}
            }
        })?;
        Ok((ours, others))
    }
}

impl PolicyRoute {
    fn header(&self) -> [u8; 12] {
        let scope = match self.to {
            IpAddr::V4(_) => libc::RT_SCOPE_LINK,
            IpAddr::V6(_) => libc::RT_SCOPE_UNIVERSE,
        };
        let (family, len) = (family_of(self.to), self.prefix_len);
        let kind = libc::RTN_UNICAST;
        [family, len, 0, 0, 0, PROTOCOL, scope, kind, 0, 0, 0, 0]
    }

    fn write(&self, b: &mut Builder) {
        if self.prefix_len > 0 {
            b.attr(libc::RTA_DST, &octets(self.to));
        }
        b.attr(libc::RTA_OIF, &self.ifindex.to_ne_bytes());
        b.attr(libc::RTA_TABLE, &self.table.to_ne_bytes());
    }

    fn parse(message: &Message<'_>) -> Option<Self> {
        let [family, prefix_len, _, _, _, protocol, ..] = *message.payload.first_chunk::<12>()?;
        if message.kind != libc::RTM_NEWROUTE || protocol != PROTOCOL {
            return None;
        }
        let (mut to, mut table, mut ifindex) = (None, None, None);
        for (kind, value) in attributes(message.payload.get(12..)?) {
            match kind {
                libc::RTA_DST => to = ip_of(family, value),
                libc::RTA_OIF => ifindex = u32_at(value, 0),
                libc::RTA_TABLE => table = u32_at(value, 0),
                _ => {}
            }
        }
        Some(Self {
            table: table?,
            to: to.or_else(|| unspecified(family))?,
            prefix_len,
            ifindex: ifindex?,
        })
    }
}

impl PolicyRule {
    fn header(&self) -> [u8; 12] {
        let family = if self.ipv6 {
            libc::AF_INET6
        } else {
            libc::AF_INET
        };
        let mut header = [0; 12];
        header[0] = u8::try_from(family).expect("address families are small");
        header[2] = self.from.map_or(0, host_bits);
        header[7] = match self.action {
            Action::Lookup(_) => FR_ACT_TO_TBL,
            Action::Goto(_) => FR_ACT_GOTO,
            Action::Nothing => FR_ACT_NOP,
        };
        header
    }

    fn write(&self, b: &mut Builder) {
        b.attr(FRA_PRIORITY, &self.priority.to_ne_bytes());
        b.attr(FRA_PROTOCOL, &[PROTOCOL]);
        if let Some(interface) = &self.interface {
            b.attr_str(FRA_IIFNAME, interface);
        }
        if let Some(from) = self.from {
            b.attr(FRA_SRC, &octets(from));
        }
        if let Some(protocol) = self.protocol {
            b.attr(FRA_IP_PROTO, &[protocol]);
        }
        if let Some((first, last)) = self.ports {
            let [a, b_] = first.to_ne_bytes();
            let [c, d] = last.to_ne_bytes();
            b.attr(FRA_SPORT_RANGE, &[a, b_, c, d]);
        }
        match self.action {
            Action::Lookup(table) => b.attr(FRA_TABLE, &table.to_ne_bytes()),
            Action::Goto(priority) => b.attr(FRA_GOTO, &priority.to_ne_bytes()),
            Action::Nothing => {}
        }
    }

    /// Parses a rule; `None` if it does not have the dataplane's protocol number, or has an action
    /// that the dataplane never uses. Ignores attributes that the dataplane never sets, so that
    /// such a rule is deleted, too.
    fn parse(message: &Message<'_>) -> Option<Self> {
        let header = *message.payload.first_chunk::<12>()?;
        if message.kind != libc::RTM_NEWRULE {
            return None;
        }
        let (mut table, mut target, mut protocol_of_rule) = (0, 0, 0);
        let mut rule = Self {
            ipv6: i32::from(header[0]) == libc::AF_INET6,
            priority: 0,
            interface: None,
            from: None,
            protocol: None,
            ports: None,
            action: Action::Nothing,
        };
        for (kind, value) in attributes(message.payload.get(12..)?) {
            match kind {
                FRA_PRIORITY => rule.priority = u32_at(value, 0)?,
                FRA_PROTOCOL => protocol_of_rule = *value.first()?,
                FRA_IIFNAME => rule.interface = Some(text(value)),
                FRA_SRC => rule.from = ip_of(header[0], value),
                FRA_IP_PROTO => rule.protocol = value.first().copied(),
                FRA_SPORT_RANGE => rule.ports = Some((u16_at(value, 0)?, u16_at(value, 2)?)),
                FRA_TABLE => table = u32_at(value, 0)?,
                FRA_GOTO => target = u32_at(value, 0)?,
                _ => {}
            }
        }
        rule.action = match header[7] {
            FR_ACT_TO_TBL => Action::Lookup(table),
            FR_ACT_GOTO => Action::Goto(target),
            FR_ACT_NOP => Action::Nothing,
            _ => return None,
        };
        (protocol_of_rule == PROTOCOL).then_some(rule)
    }
}

impl Proxy {
    fn header(&self) -> [u8; 12] {
        let mut header = [0; 12];
        header[0] = family_of(self.addr);
        header[4..8].copy_from_slice(&self.ifindex.to_ne_bytes());
        header[8..10].copy_from_slice(&libc::NUD_PERMANENT.to_ne_bytes());
        header[10] = libc::NTF_PROXY;
        header
    }

    /// Parses a proxy neighbour. Also returns whether it has the dataplane's protocol number.
    fn parse(message: &Message<'_>) -> Option<(Self, bool)> {
        let payload = message.payload;
        if message.kind != libc::RTM_NEWNEIGH || payload.get(10)? & libc::NTF_PROXY == 0 {
            return None;
        }
        let (mut addr, mut protocol) = (None, 0);
        for (kind, value) in attributes(payload.get(12..)?) {
            match kind {
                libc::NDA_DST => addr = ip_of(payload[0], value),
                NDA_PROTOCOL => protocol = *value.first()?,
                _ => {}
            }
        }
        let ifindex = u32_at(payload, 4)?;
        let addr = addr?;
        Some((Self { ifindex, addr }, protocol == PROTOCOL))
    }
}

/// Length in bits of the prefix that matches one address.
pub(crate) const fn host_bits(addr: IpAddr) -> u8 {
    match addr {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

fn unspecified(family: u8) -> Option<IpAddr> {
    match i32::from(family) {
        libc::AF_INET => Some(std::net::Ipv4Addr::UNSPECIFIED.into()),
        libc::AF_INET6 => Some(std::net::Ipv6Addr::UNSPECIFIED.into()),
        _ => None,
    }
}

/// Whether a kernel message reports the deletion of an entry with the dataplane's protocol number.
pub(super) fn is_deletion(message: &Message<'_>) -> bool {
    let of = |kind| Message { kind, ..*message };
    match message.kind {
        libc::RTM_DELRULE => PolicyRule::parse(&of(libc::RTM_NEWRULE)).is_some(),
        libc::RTM_DELROUTE => PolicyRoute::parse(&of(libc::RTM_NEWROUTE)).is_some(),
        libc::RTM_DELNEIGH => Proxy::parse(&of(libc::RTM_NEWNEIGH)).is_some_and(|(_, ours)| ours),
        _ => false,
    }
}

/// Whether a kernel message describes an existing rule with the dataplane's protocol number.
pub(super) fn is_own_rule(message: &Message<'_>) -> bool {
    PolicyRule::parse(message).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::message::messages;

    #[test]
    fn written_policy_rules_and_routes_parse_to_their_original_values() {
        let rule = PolicyRule {
            ipv6: false,
            priority: 62,
            interface: Some("lvs-tun0".to_owned()),
            from: Some([10, 0, 0, 11].into()),
            protocol: Some(6),
            ports: Some((80, 81)),
            action: Action::Lookup(7677),
        };
        let goto = PolicyRule {
            ipv6: true,
            interface: None,
            from: None,
            protocol: None,
            ports: None,
            action: Action::Goto(65),
            ..rule.clone()
        };
        let mut builder = Builder::new(1);
        for rule in [&rule, &goto] {
            builder.begin(libc::RTM_NEWRULE, 0, &rule.header());
            rule.write(&mut builder);
            builder.end();
        }
        let read: Vec<_> = messages(builder.bytes())
            .filter_map(|message| PolicyRule::parse(&message))
            .collect();
        assert_eq!(read, [rule, goto]);

        let everything = PolicyRoute {
            table: 7677,
            to: std::net::Ipv6Addr::UNSPECIFIED.into(),
            prefix_len: 0,
            ifindex: 3,
        };
        let mut builder = Builder::new(1);
        builder.begin(libc::RTM_NEWROUTE, 0, &everything.header());
        everything.write(&mut builder);
        builder.end();
        let read = messages(builder.bytes()).find_map(|message| PolicyRoute::parse(&message));
        assert_eq!(read, Some(everything));
    }

    #[test]
    fn policy_rule_of_another_program_is_not_treated_as_own() {
        let mut builder = Builder::new(1);
        builder.begin(
            libc::RTM_NEWRULE,
            0,
            &[2, 0, 0, 0, 254, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0],
        );
        builder.attr(FRA_PRIORITY, &62_u32.to_ne_bytes());
        builder.attr(FRA_PROTOCOL, &[3]);
        builder.end();
        assert!(messages(builder.bytes()).all(|message| !is_own_rule(&message)));
    }

    proptest::proptest! {
        #[test]
        fn policy_rule_route_or_proxy_of_any_bytes_does_not_panic(kind in 16_u16..40, payload: Vec<u8>) {
            let message = Message { kind, flags: 0, seq: 0, payload: &payload };
            let _ = (PolicyRule::parse(&message), PolicyRoute::parse(&message), Proxy::parse(&message));
        }
    }
}

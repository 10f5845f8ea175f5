//! Multicast listener discovery (RFC 3810, RFC 2710) for the IPv6 addresses that the dataplane
//! owns: queries, and the dataplane's reports. Without the reports, snooping switches would not
//! forward neighbour solicitations to the dataplane.

use std::net::Ipv6Addr;

use crate::ndp::group_mac;
use crate::wire::icmpv6::{PROTOCOL, finish_checksum, sum};
use crate::wire::{
    ETHERNET_LEN, ETHERTYPE_IPV6, Field, Mac, be16, ethernet_header, icmp, ipv6, is_ipv6, put16,
};

const QUERY: u8 = 130;
const REPORT_V1: u8 = 131;
const DONE_V1: u8 = 132;
const REPORT_V2: u8 = 143;
/// Hop limit of MLD messages, which never leave their link.
const HOP_LIMIT: u8 = 1;
const HOP_BY_HOP: u8 = 0;
/// Hop-by-hop options with the router alert, so that routers and switches read the message (RFC
/// 2711).
const ROUTER_ALERT: [u8; 8] = [PROTOCOL, 0, 5, 2, 0, 0, 1, 0];
/// Position of the group in messages of version 1 and in queries of version 2.
const GROUP_FIELD: Field = icmp::HEADER_LEN..icmp::HEADER_LEN + 16;
/// The number of records in a report of version 2.
const RECORDS: Field = 6..8;
/// Length in bytes of a message of version 1.
const V1_LEN: usize = GROUP_FIELD.end;
/// Length in bytes of a query of version 2 without sources.
const QUERY_V2_LEN: usize = 28;
/// Length in bytes of a report of version 2 without records.
const REPORT_LEN: usize = 8;
const RECORD_LEN: usize = 20;
/// Maximum number of records in a report, so that the report fits into the minimum MTU of IPv6.
pub const RECORDS_MAX: usize = 60;
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
/// Destination of reports of version 2.
const ALL_MLD_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);

/// A query for multicast listeners; its sender is a router, or a switch that acts as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Query {
    /// The queried group; `None` for all groups.
    pub group: Option<Ipv6Addr>,
    /// Whether the query is of version 1, which requires other reports.
    pub v1: bool,
    /// Milliseconds within which listeners must answer; each chooses its time at random.
    pub within_ms: u32,
}

impl Query {
    /// The query with a response time of 0, so that repeated queries are equal.
    #[must_use]
    pub const fn without_time(self) -> Self {
        Self {
            within_ms: 0,
            ..self
        }
    }
}

/// The change of a listener's membership in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MembershipChange {
    /// The host is a member; the answer to a query.
    Listening,
    /// The host has joined the group.
    Joined,
    /// The host has left the group.
    Left,
}

/// Reads the query after the Ethernet header of `frame`; `None` if it is not a valid query (RFC
/// 3810 section 5.1.14).
pub fn parse(frame: &[u8]) -> Option<Query> {
    let ip = frame.get(ETHERNET_LEN..)?;
    let header = ip.get(..ipv6::HEADER_LEN)?;
    if !is_ipv6(header)
        || header[ipv6::field::NEXT_HEADER] != HOP_BY_HOP
        || header[ipv6::field::HOP_LIMIT] != HOP_LIMIT
    {
        return None;
    }
    let len = usize::from(be16(header, ipv6::field::PAYLOAD_LEN));
    let ip = ip.get(..ipv6::HEADER_LEN + len)?;
    let chain = ipv6::walk(ip)?;
    let message = ip.get(chain.l4..)?;
    let link_local = ipv6::src(ip).is_unicast_link_local();
    if chain.protocol != PROTOCOL
        || message.first() != Some(&QUERY)
        || !link_local
        || sum(ip, chain.l4) != 0
    {
        return None;
    }
    let v1 = match message.len() {
        V1_LEN => true,
        QUERY_V2_LEN.. => false,
        _ => return None,
    };
    let group = Ipv6Addr::from(<[u8; 16]>::try_from(&message[GROUP_FIELD]).ok()?);
    Some(Query {
        group: (!group.is_unspecified()).then_some(group),
        v1,
        within_ms: within_ms(be16(message, 4), v1),
    })
}

/// Builds the frames that report `change` for `groups`, in version 1 of the protocol (`v1`) or in
/// version 2.
pub fn reports(
    mac: Mac,
    src: Ipv6Addr,
    groups: &[Ipv6Addr],
    change: MembershipChange,
    v1: bool,
) -> Vec<Vec<u8>> {
    if v1 {
        let report = |&group: &Ipv6Addr| report_v1(mac, src, group, change);
        groups.iter().map(report).collect()
    } else {
        let report = |groups: &[Ipv6Addr]| report(mac, src, groups, change);
        groups.chunks(RECORDS_MAX).map(report).collect()
    }
}

/// The response time in milliseconds that a maximum response code encodes (RFC 3810 section 5.1.3,
/// RFC 2710 section 3.4).
fn within_ms(code: u16, v1: bool) -> u32 {
    if v1 || code < 0x8000 {
        return code.into();
    }
    let (exponent, mantissa) = ((code >> 12) & 7, u32::from(code & 0x0fff));
    (mantissa | 0x1000) << (exponent + 3)
}

/// Builds the frame that reports `change` for the first [`RECORDS_MAX`] of `groups`. `src` is a
/// link-local address of the host, or unspecified if the host has none yet.
pub fn report(mac: Mac, src: Ipv6Addr, groups: &[Ipv6Addr], change: MembershipChange) -> Vec<u8> {
    let kind = match change {
        MembershipChange::Listening => 2,
        MembershipChange::Left => 3,
        MembershipChange::Joined => 4,
    };
    let groups = &groups[..groups.len().min(RECORDS_MAX)];
    let mut message = vec![0; REPORT_LEN];
    message[icmp::field::TYPE] = REPORT_V2;
    put16(
        &mut message,
        RECORDS,
        u16::try_from(groups.len()).unwrap_or(0),
    );
    for group in groups {
        let mut record = [0; RECORD_LEN];
        record[0] = kind;
        record[4..].copy_from_slice(&group.octets());
        message.extend_from_slice(&record);
    }
    frame(mac, src, ALL_MLD_ROUTERS, &message)
}

/// As [`report`], for one group, in version 1 of the protocol.
pub fn report_v1(mac: Mac, src: Ipv6Addr, group: Ipv6Addr, change: MembershipChange) -> Vec<u8> {
    let (kind, to) = match change {
        MembershipChange::Listening | MembershipChange::Joined => (REPORT_V1, group),
        MembershipChange::Left => (DONE_V1, ALL_ROUTERS),
    };
    let mut message = [0; V1_LEN];
    message[icmp::field::TYPE] = kind;
    message[GROUP_FIELD].copy_from_slice(&group.octets());
    frame(mac, src, to, &message)
}

fn frame(mac: Mac, src: Ipv6Addr, dst: Ipv6Addr, message: &[u8]) -> Vec<u8> {
    let l4 = ipv6::HEADER_LEN + ROUTER_ALERT.len();
    let mut out = vec![0; ETHERNET_LEN + l4];
    out.extend_from_slice(message);
    ethernet_header(&mut out, group_mac(dst), mac, ETHERTYPE_IPV6);
    let ip = &mut out[ETHERNET_LEN..];
    let len = u16::try_from(ip.len() - ipv6::HEADER_LEN).unwrap_or(0);
    ipv6::write_header(ip, HOP_BY_HOP, HOP_LIMIT, src, dst, len);
    ip[ipv6::HEADER_LEN..l4].copy_from_slice(&ROUTER_ALERT);
    finish_checksum(ip, l4);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{SlicedPacket, TransportSlice};

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const SRC: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    const GROUP: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 0x10);

    fn check(frame: &[u8]) {
        let sliced = SlicedPacket::from_ethernet(frame).expect("the bytes are a valid packet");
        let ip = &frame[ETHERNET_LEN..];
        let Some(TransportSlice::Icmpv6(message)) = sliced.transport else {
            panic!("the packet is not ICMPv6");
        };
        assert!(message.is_checksum_valid(ipv6::src(ip).octets(), ipv6::dst(ip).octets()));
    }

    fn query(len: usize, group: Ipv6Addr) -> Vec<u8> {
        let mut message = vec![0; len];
        message[0] = QUERY;
        message[8..24].copy_from_slice(&group.octets());
        frame(
            MAC,
            SRC,
            Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
            &message,
        )
    }

    #[test]
    fn mld_queries_of_versions_1_and_2_are_parsed_and_foreign_or_truncated_refused() {
        for (len, v1) in [
            (V1_LEN, true),
            (QUERY_V2_LEN, false),
            (QUERY_V2_LEN + 16, false),
        ] {
            for group in [None, Some(GROUP)] {
                let asked = query(len, group.unwrap_or(Ipv6Addr::UNSPECIFIED));
                check(&asked);
                let wanted = Query {
                    group,
                    v1,
                    within_ms: 0,
                };
                assert_eq!(parse(&asked), Some(wanted));
                for cut in 0..asked.len() {
                    assert_eq!(parse(&asked[..cut]), None, "{cut}");
                }
            }
        }
        for (code, v1, ms) in [
            (10_000, true, 10_000),
            (u16::MAX, true, 65_535),
            (0x7fff, false, 32_767),
            (0x8000, false, 32_768),
            (u16::MAX, false, 8_387_584),
        ] {
            assert_eq!(within_ms(code, v1), ms, "{code:#x}");
        }
        let mut far = query(V1_LEN, GROUP);
        far[ETHERNET_LEN + 7] = 2;
        assert_eq!(
            parse(&far),
            None,
            "a message from beyond the link was accepted"
        );
        assert_eq!(
            parse(&query(26, GROUP)),
            None,
            "a message with the length of no version was accepted"
        );
    }

    #[test]
    fn mld_reports_contain_groups_and_change() {
        let report_frame = report(MAC, SRC, &[GROUP; 100], MembershipChange::Joined);
        check(&report_frame);
        assert!(report_frame.len() <= ETHERNET_LEN + ipv6::MTU_MIN);
        assert_eq!(report_frame[..6], [0x33, 0x33, 0, 0, 0, 0x16]);
        let message = &report_frame[ETHERNET_LEN + 48..];
        assert_eq!((message[0], be16(message, 6), message[8]), (143, 60, 4));
        assert_eq!(message[12..28], GROUP.octets());

        let report_frame = report_v1(MAC, SRC, GROUP, MembershipChange::Listening);
        check(&report_frame);
        assert_eq!(report_frame[..6], [0x33, 0x33, 0xff, 0, 0, 0x10]);
        assert_eq!(report_frame[ETHERNET_LEN + 48], 131);
        let done = report_v1(MAC, SRC, GROUP, MembershipChange::Left);
        check(&done);
        assert_eq!(done[..6], [0x33, 0x33, 0, 0, 0, 2]);
    }
}

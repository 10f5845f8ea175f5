//! Neighbour discovery for the IPv6 addresses that the dataplane owns (RFC 4861): answers,
//! announcements, and probes for other owners of an address (RFC 4862 section 5.4).

use std::net::Ipv6Addr;

use crate::wire::icmpv6::{PROTOCOL, finish_checksum, sum};
use crate::wire::{
    ETHERNET_LEN, ETHERTYPE_IPV6, Field, Mac, be16, ethernet, ethernet_header, icmp, ipv6, is_ipv6,
};

const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const SOURCE_ADDRESS: u8 = 1;
const TARGET_ADDRESS: u8 = 2;
/// Length of a message in bytes: type, code, checksum, flags and target.
const MESSAGE_LEN: usize = TARGET.end;
const FLAGS: usize = icmp::field::REST.start;
const TARGET: Field = icmp::HEADER_LEN..icmp::HEADER_LEN + 16;
/// Length in bytes of a link-layer address option for Ethernet.
const OPTION_LEN: usize = 8;
/// Hop limit of messages from the same link; messages that passed a router have a lower one.
const HOP_LIMIT: u8 = 255;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Length in bytes of an Ethernet frame with a message and its option.
pub const FRAME_LEN: usize = ETHERNET_LEN + ipv6::HEADER_LEN + MESSAGE_LEN + OPTION_LEN;

/// A neighbour solicitation or advertisement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ndp {
    /// Whether the message is a solicitation; otherwise it is an advertisement.
    pub solicitation: bool,
    /// The sender's address; unspecified in a probe.
    pub src: Ipv6Addr,
    /// The requested or announced address.
    pub target: Ipv6Addr,
    /// Link-layer address of the sender, from the message's option; without this option, the source
    /// of the frame.
    pub mac: Mac,
}

/// Reads the message after the Ethernet header of `frame`; `None` if it is not a valid solicitation
/// or advertisement (RFC 4861 section 7.1).
pub fn parse(frame: &[u8]) -> Option<Ndp> {
    let ip = frame.get(ETHERNET_LEN..)?;
    let header = ip.get(..ipv6::HEADER_LEN)?;
    if !is_ipv6(header)
        || header[ipv6::field::NEXT_HEADER] != PROTOCOL
        || header[ipv6::field::HOP_LIMIT] != HOP_LIMIT
    {
        return None;
    }
    let len = usize::from(be16(header, ipv6::field::PAYLOAD_LEN));
    let ip = ip.get(..ipv6::HEADER_LEN + len)?;
    let message = &ip[ipv6::HEADER_LEN..];
    if message.len() < MESSAGE_LEN
        || !matches!(message[icmp::field::TYPE], SOLICITATION | ADVERTISEMENT)
        || message[icmp::field::CODE] != 0
        || sum(ip, ipv6::HEADER_LEN) != 0
    {
        return None;
    }
    let solicitation = message[icmp::field::TYPE] == SOLICITATION;
    let target = <[u8; 16]>::try_from(&message[TARGET]).ok()?;
    let target = Ipv6Addr::from(target);
    if target.is_multicast() {
        return None;
    }
    let mut mac = Mac(frame[ethernet::SOURCE].try_into().ok()?);
    let wanted = if solicitation {
        SOURCE_ADDRESS
    } else {
        TARGET_ADDRESS
    };
    let mut options = &message[MESSAGE_LEN..];
    while let [kind, words, ..] = *options {
        let len = usize::from(words) * 8;
        if len == 0 || len > options.len() {
            return None;
        }
        if kind == wanted && len == OPTION_LEN {
            mac = Mac(options[2..8].try_into().ok()?);
        }
        options = &options[len..];
    }
    Some(Ndp {
        solicitation,
        src: ipv6::src(ip),
        target,
        mac,
    })
}

/// Builds the frame that answers `solicitation`: the requested address has the link-layer address
/// `mac`. If the solicitation is a probe, the answer is sent to all nodes.
pub fn advertisement(solicitation: &Ndp, mac: Mac) -> [u8; FRAME_LEN] {
    const SOLICITED: u8 = 0x40;
    if solicitation.src.is_unspecified() {
        return unsolicited(mac, solicitation.target);
    }
    claim(
        solicitation.mac,
        solicitation.src,
        mac,
        solicitation.target,
        SOLICITED,
    )
}

/// Builds the frame that announces to all nodes that `addr` has the link-layer address `mac` now
/// (RFC 4861 section 7.2.6).
pub fn unsolicited(mac: Mac, addr: Ipv6Addr) -> [u8; FRAME_LEN] {
    claim(group_mac(ALL_NODES), ALL_NODES, mac, addr, 0)
}

/// Builds a probe, the frame by which `mac` asks whether any host has `addr`. It does not claim the
/// address; the owner answers to all nodes.
pub fn probe(mac: Mac, addr: Ipv6Addr) -> [u8; FRAME_LEN - OPTION_LEN] {
    let group = solicited_node(addr);
    let mut out = [0; FRAME_LEN - OPTION_LEN];
    let head = Head {
        to: group_mac(group),
        dst: group,
        mac,
        src: Ipv6Addr::UNSPECIFIED,
    };
    write(&mut out, &head, SOLICITATION, 0, addr);
    out
}

/// The multicast group to which solicitations for `addr` are sent.
pub fn solicited_node(addr: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = addr.octets();
    Ipv6Addr::new(
        0xff02,
        0,
        0,
        0,
        0,
        1,
        0xff00 | u16::from(a),
        u16::from_be_bytes([b, c]),
    )
}

/// The link-layer address of a group (RFC 2464 section 7).
pub fn group_mac(group: Ipv6Addr) -> Mac {
    let [.., a, b, c, d] = group.octets();
    Mac([0x33, 0x33, a, b, c, d])
}

fn claim(to: Mac, dst: Ipv6Addr, mac: Mac, addr: Ipv6Addr, flags: u8) -> [u8; FRAME_LEN] {
    const OVERRIDE: u8 = 0x20;
    let mut out = [0; FRAME_LEN];
    let option = FRAME_LEN - OPTION_LEN;
    out[option..option + 2].copy_from_slice(&[TARGET_ADDRESS, 1]);
    out[option + 2..].copy_from_slice(&mac.0);
    let head = Head {
        to,
        dst,
        mac,
        src: addr,
    };
    write(&mut out, &head, ADVERTISEMENT, flags | OVERRIDE, addr);
    out
}

struct Head {
    to: Mac,
    dst: Ipv6Addr,
    mac: Mac,
    src: Ipv6Addr,
}

/// Writes all fields of a message except its option.
fn write(out: &mut [u8], head: &Head, kind: u8, flags: u8, target: Ipv6Addr) {
    ethernet_header(out, head.to, head.mac, ETHERTYPE_IPV6);
    let ip = &mut out[ETHERNET_LEN..];
    let len = u16::try_from(ip.len() - ipv6::HEADER_LEN).unwrap_or(0);
    ipv6::write_header(ip, PROTOCOL, HOP_LIMIT, head.src, head.dst, len);
    let message = &mut ip[ipv6::HEADER_LEN..];
    message[icmp::field::TYPE] = kind;
    message[FLAGS] = flags;
    message[TARGET].copy_from_slice(&target.octets());
    finish_checksum(ip, ipv6::HEADER_LEN);
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{SlicedPacket, TransportSlice};

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const PEER: Mac = Mac([2, 0, 0, 0, 0, 2]);

    fn addr(text: &str) -> Ipv6Addr {
        text.parse().expect("the address is valid")
    }

    fn check(frame: &[u8]) {
        let sliced = SlicedPacket::from_ethernet(frame).expect("the bytes are a valid packet");
        let ip = &frame[ETHERNET_LEN..];
        let Some(TransportSlice::Icmpv6(message)) = sliced.transport else {
            panic!("the packet is not ICMPv6");
        };
        assert!(message.is_checksum_valid(ipv6::src(ip).octets(), ipv6::dst(ip).octets()));
    }

    #[test]
    fn ndp_messages_have_expected_receivers_and_are_parsed_unless_truncated() {
        let vip = addr("2001:db8::12:3456");
        let asked = Ndp {
            solicitation: true,
            src: addr("2001:db8::7"),
            target: vip,
            mac: PEER,
        };
        let answer = advertisement(&asked, MAC);
        check(&answer);
        assert_eq!(answer[..6], PEER.0);
        let read = parse(&answer).expect("the frame is a neighbour advertisement");
        assert_eq!(
            (read.solicitation, read.target, read.mac),
            (false, vip, MAC)
        );
        assert_eq!(answer[ETHERNET_LEN + 44], 0x60, "solicited, override");

        let reported = unsolicited(MAC, vip);
        check(&reported);
        assert_eq!(reported[..6], [0x33, 0x33, 0, 0, 0, 1]);
        assert_eq!(reported[ETHERNET_LEN + 44], 0x20, "override");

        let probed = probe(MAC, vip);
        check(&probed);
        assert_eq!(probed[..6], [0x33, 0x33, 0xff, 0x12, 0x34, 0x56]);
        let read = parse(&probed).expect("the frame is a neighbour solicitation");
        assert!(read.solicitation && read.src.is_unspecified());
        assert_eq!(advertisement(&read, PEER)[..6], [0x33, 0x33, 0, 0, 0, 1]);
        for cut in 0..probed.len() {
            assert_eq!(parse(&probed[..cut]), None, "{cut}");
        }
    }

    #[test]
    fn ndp_message_from_another_link_is_ignored() {
        let mut frame = unsolicited(MAC, addr("2001:db8::1"));
        frame[ETHERNET_LEN + 7] = 254;
        assert_eq!(parse(&frame), None);
    }
}

//! ARP for the addresses that the dataplane owns (RFC 826): answers, and announcements and probes
//! (RFC 5227).

use std::net::Ipv4Addr;

use etherparse::{
    ArpEthIpv4Packet, ArpHardwareId, ArpOperation, ArpPacket, ArpPacketSlice, EtherType,
};

use crate::wire::{ETHERNET_LEN, ETHERTYPE_ARP, Mac, ethernet_header};

/// Length in bytes of an Ethernet frame with an ARP message for IPv4.
pub const FRAME_LEN: usize = ETHERNET_LEN + 28;

/// An ARP message for IPv4 over Ethernet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arp {
    /// Whether the message is a request; otherwise it is a reply.
    pub request: bool,
    /// Link-layer address of the sender.
    pub sender_mac: Mac,
    /// Address of the sender; unspecified in a probe.
    pub sender: Ipv4Addr,
    /// Requested address, or address of the receiver.
    pub target: Ipv4Addr,
}

/// Reads the ARP message after the Ethernet header of `frame`; `None` if it is not a request or a
/// reply for IPv4 over Ethernet.
pub fn parse(frame: &[u8]) -> Option<Arp> {
    let slice = ArpPacketSlice::from_slice(frame.get(ETHERNET_LEN..)?).ok()?;
    if slice.hw_addr_type() != ArpHardwareId::ETHERNET || slice.proto_addr_type() != EtherType::IPV4
    {
        return None;
    }
    let request = match slice.operation() {
        ArpOperation::REQUEST => true,
        ArpOperation::REPLY => false,
        _ => return None,
    };
    Some(Arp {
        request,
        sender_mac: Mac(slice.sender_hw_addr().try_into().ok()?),
        sender: Ipv4Addr::from(<[u8; 4]>::try_from(slice.sender_protocol_addr()).ok()?),
        target: Ipv4Addr::from(<[u8; 4]>::try_from(slice.target_protocol_addr()).ok()?),
    })
}

/// Builds the frame that answers `request`: the requested address has the link-layer address `mac`.
pub fn reply(request: &Arp, mac: Mac) -> [u8; FRAME_LEN] {
    frame(
        request.sender_mac,
        mac,
        ArpOperation::REPLY,
        request.target,
        request.sender_mac,
        request.sender,
    )
}

/// Builds the frame that announces to all hosts that `addr` has the link-layer address `mac` now:
/// an ARP request for the sender's own address, as Linux sends it.
pub fn gratuitous(mac: Mac, addr: Ipv4Addr) -> [u8; FRAME_LEN] {
    frame(
        Mac::BROADCAST,
        mac,
        ArpOperation::REQUEST,
        addr,
        Mac([0; 6]),
        addr,
    )
}

/// Builds a probe, the frame by which `mac` asks whether any host has `addr`. It does not claim the
/// address (RFC 5227 section 2.1.1).
pub fn probe(mac: Mac, addr: Ipv4Addr) -> [u8; FRAME_LEN] {
    let nobody = Ipv4Addr::UNSPECIFIED;
    frame(
        Mac::BROADCAST,
        mac,
        ArpOperation::REQUEST,
        nobody,
        Mac([0; 6]),
        addr,
    )
}

fn frame(
    to: Mac,
    mac: Mac,
    operation: ArpOperation,
    sender: Ipv4Addr,
    target_mac: Mac,
    target: Ipv4Addr,
) -> [u8; FRAME_LEN] {
    let mut out = [0; FRAME_LEN];
    ethernet_header(&mut out, to, mac, ETHERTYPE_ARP);
    let arp = ArpEthIpv4Packet {
        operation,
        sender_mac: mac.0,
        sender_ipv4: sender.octets(),
        target_mac: target_mac.0,
        target_ipv4: target.octets(),
    };
    out[ETHERNET_LEN..].copy_from_slice(&ArpPacket::from(arp).to_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const PEER: Mac = Mac([2, 0, 0, 0, 0, 2]);

    #[test]
    fn arp_message_of_each_kind_is_parsed_and_truncated_message_is_refused() {
        let asked = frame(
            Mac::BROADCAST,
            PEER,
            ArpOperation::REQUEST,
            [10, 0, 0, 2].into(),
            Mac([0; 6]),
            [10, 0, 0, 9].into(),
        );
        let request = parse(&asked).expect("the frame is an ARP message");
        assert!(request.request);
        let answer = reply(&request, MAC);
        assert_eq!(answer[..6], PEER.0);
        let answer = parse(&answer).expect("the frame is an ARP message");
        assert_eq!(
            answer,
            Arp {
                request: false,
                sender_mac: MAC,
                sender: [10, 0, 0, 9].into(),
                target: [10, 0, 0, 2].into()
            }
        );
        let announced =
            parse(&gratuitous(MAC, [10, 0, 0, 9].into())).expect("the frame is an ARP message");
        assert_eq!(announced.sender, announced.target);
        let probed = parse(&probe(MAC, [10, 0, 0, 9].into())).expect("the frame is an ARP message");
        assert!(probed.request && probed.sender.is_unspecified());
        for cut in 0..asked.len() {
            assert_eq!(parse(&asked[..cut]), None, "{cut}");
        }
    }
}

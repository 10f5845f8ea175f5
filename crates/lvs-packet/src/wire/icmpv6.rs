//! ICMPv6 messages that the dataplane sends (RFC 4443).

use std::net::{IpAddr, Ipv6Addr};

use super::checksum::Sum;
use super::icmp_message::{self as icmp, ErrorKind};
use super::{ipv6, put16};
use crate::frame::Frame;

/// Protocol number of ICMPv6.
pub const PROTOCOL: u8 = 58;
/// Type of an echo request.
pub const ECHO_REQUEST: u8 = 128;
const ECHO_REPLY: u8 = 129;
/// Hop limit of packets that the dataplane sends itself.
const HOP_LIMIT: u8 = 64;

/// Type, code and second word of an error about `offending`.
fn header(kind: ErrorKind, offending: &[u8]) -> (u8, u8, [u8; 4]) {
    match kind {
        ErrorKind::NetUnreachable => (1, 0, [0; 4]),
        // ICMPv6 has no "host unreachable": use "address unreachable".
        ErrorKind::HostUnreachable => (1, 3, [0; 4]),
        // ICMPv6 reports this as "unrecognized next header", with the offset of the byte that names
        // it.
        ErrorKind::ProtocolUnreachable => {
            let at = ipv6::unknown_at(offending);
            (4, 1, u32::try_from(at).unwrap_or(0).to_be_bytes())
        }
        ErrorKind::PortUnreachable => (1, 4, [0; 4]),
        ErrorKind::FragmentationNeeded(mtu) => (2, 0, u32::from(mtu).to_be_bytes()),
        ErrorKind::TtlExceeded => (3, 0, [0; 4]),
        ErrorKind::ParameterProblem(at) => (4, 0, u32::from(at).to_be_bytes()),
        ErrorKind::Relayed { kind, code, rest } => (kind, code, rest),
    }
}

/// Writes an ICMPv6 error about the packet `offending` into `frame`, from `src`. It quotes as much
/// of the packet as fits into the minimum MTU. `false` if the frame has too little room.
pub fn error(frame: &mut Frame, kind: ErrorKind, offending: &[u8], src: Ipv6Addr) -> bool {
    let quoted = &offending[..offending
        .len()
        .min(ipv6::MTU_MIN - ipv6::HEADER_LEN - icmp::HEADER_LEN)];
    let (kind, code, rest) = header(kind, offending);
    let message = [kind, code, 0, 0, rest[0], rest[1], rest[2], rest[3]];
    let to = ipv6::src(offending);
    start(
        frame,
        PROTOCOL,
        HOP_LIMIT,
        src,
        to,
        message.len() + quoted.len(),
    ) && frame.extend(&message)
        && frame.extend(quoted)
        && {
            finish_checksum(frame.bytes_mut(), ipv6::HEADER_LEN);
            true
        }
}

/// Turns the echo request in `frame` into its reply. The frame contains a whole IPv6 packet, with
/// the ICMPv6 message at `l4`.
pub fn echo_reply(frame: &mut Frame, l4: usize) {
    let ip = frame.bytes();
    let (src, dst) = (ipv6::src(ip), ipv6::dst(ip));
    let class = ipv6::traffic_class(ip);
    // The answer does not contain the extension headers of the request.
    if !frame.pull_front(l4) {
        return;
    }
    let len = u16::try_from(frame.len()).unwrap_or(u16::MAX);
    let Some(header) = frame.push_front(ipv6::HEADER_LEN) else {
        return;
    };
    ipv6::write_header(header, PROTOCOL, HOP_LIMIT, dst, src, len);
    let ip = frame.bytes_mut();
    ipv6::set_traffic_class(ip, class);
    if let Some(kind) = ip.get_mut(ipv6::HEADER_LEN) {
        *kind = ECHO_REPLY;
    }
    finish_checksum(ip, ipv6::HEADER_LEN);
}

/// Writes the checksum of the ICMPv6 message at `l4`.
pub fn finish_checksum(ip: &mut [u8], l4: usize) {
    put16(ip, l4 + icmp::field::CHECKSUM.start, 0);
    let sum = sum(ip, l4);
    put16(ip, l4 + icmp::field::CHECKSUM.start, sum);
}

/// The checksum over the ICMPv6 message at `l4`: 0 if the checksum in the message is correct.
pub fn sum(ip: &[u8], l4: usize) -> u16 {
    let message = ip.get(l4..).unwrap_or_default();
    let (src, dst) = (IpAddr::V6(ipv6::src(ip)), IpAddr::V6(ipv6::dst(ip)));
    Sum::ZERO
        .pseudo(src, dst, PROTOCOL, message.len())
        .bytes(message)
        .finish()
}

/// Empties `frame` and writes an IPv6 header for a payload of `len` bytes. Returns `false` if the
/// payload is too long, or the frame has no room.
pub(crate) fn start(
    frame: &mut Frame,
    next: u8,
    hop_limit: u8,
    src: Ipv6Addr,
    dst: Ipv6Addr,
    len: usize,
) -> bool {
    frame.clear();
    let Ok(len) = u16::try_from(len) else {
        return false;
    };
    let mut header = [0; ipv6::HEADER_LEN];
    ipv6::write_header(&mut header, next, hop_limit, src, dst, len);
    frame.extend(&header)
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{Icmpv6Type, PacketBuilder, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    fn check(ip: &[u8]) -> Icmpv6Type {
        let sliced = SlicedPacket::from_ip(ip).expect("the bytes are a valid packet");
        let Some(TransportSlice::Icmpv6(message)) = sliced.transport else {
            panic!("the packet is not ICMPv6");
        };
        assert!(message.is_checksum_valid(ipv6::src(ip).octets(), ipv6::dst(ip).octets()));
        message.icmp_type()
    }

    proptest! {
        #[test]
        fn icmpv6_errors_and_echoes_agree_with_etherparse(a: [u8; 16], b: [u8; 16], len in 0usize..3000) {
            let mut ip = Vec::new();
            PacketBuilder::ipv6(a, b, 64).udp(1, 2).write(&mut ip, &vec![7; len]).expect("writing to a vector succeeds");
            let mut frame = Frame::new();
            prop_assert!(error(&mut frame, ErrorKind::FragmentationNeeded(1400), &ip, b.into()));
            prop_assert!(frame.len() <= ipv6::MTU_MIN);
            prop_assert_eq!(check(frame.bytes()), Icmpv6Type::PacketTooBig { mtu: 1400 });

            let mut ip = Vec::new();
            PacketBuilder::ipv6(a, b, 64).icmpv6_echo_request(5, 6).write(&mut ip, &vec![7; len]).expect("writing to a vector succeeds");
            let mut frame = Frame::from_bytes(&ip);
            echo_reply(&mut frame, ipv6::HEADER_LEN);
            prop_assert_eq!((ipv6::src(frame.bytes()), ipv6::dst(frame.bytes())), (b.into(), a.into()));
            prop_assert!(matches!(check(frame.bytes()), Icmpv6Type::EchoReply(_)));
            prop_assert_eq!(&frame.bytes()[48..], &ip[48..]);
        }
    }
}

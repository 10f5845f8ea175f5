//! ICMP messages that the dataplane sends (RFC 792).

use std::net::{IpAddr, Ipv4Addr};

use etherparse::{IpNumber, Ipv4Header};

use super::checksum::Sum;
pub use super::icmp_message::{ErrorKind, HEADER_LEN, field};
use super::{icmpv6, ipv4, ipv6, is_ipv6, put16};
use crate::frame::Frame;

const ECHO_REPLY: u8 = 0;
const ECHO_REQUEST: u8 = 8;

/// Maximum length in bytes of an ICMP error, IP header included (RFC 1812 section 4.3.2.3).
const ERROR4_LEN_MAX: usize = 576;
/// Maximum length in bytes of an error of either IP version, IP header included (RFC 4443 section
/// 2.4).
pub const ERROR_LEN_MAX: usize = ipv6::MTU_MIN;

/// Writes an ICMP error about the IP packet `offending` into `frame`, from `src` to the source of
/// `offending`. `false` if the frame has too little room (a frame of [`ERROR_LEN_MAX`] bytes has
/// enough), or if `src` has another IP version.
pub fn error(frame: &mut Frame, kind: ErrorKind, offending: &[u8], src: IpAddr, id: u16) -> bool {
    match (src, is_ipv6(offending)) {
        (IpAddr::V4(src), false) => error4(frame, kind, offending, src, id),
        (IpAddr::V6(src), true) => icmpv6::error(frame, kind, offending, src),
        _ => false,
    }
}

fn error4(frame: &mut Frame, kind: ErrorKind, offending: &[u8], src: Ipv4Addr, id: u16) -> bool {
    let quoted = &offending[..offending
        .len()
        .min(ERROR4_LEN_MAX - ipv4::HEADER_LEN - HEADER_LEN)];
    let (kind, code, rest) = kind.header();
    // Precedence "internetwork control" with the TOS of the request, without ECN (RFC 1812 section
    // 4.3.2.5).
    let tos = (offending.get(ipv4::field::TOS).map_or(0, |tos| tos & 0x1e)) | 0xc0;
    let mut message = [kind, code, 0, 0, rest[0], rest[1], rest[2], rest[3]];
    let sum = Sum::ZERO.bytes(&message).bytes(quoted).finish();
    put16(&mut message, field::CHECKSUM, sum);
    header(
        frame,
        1,
        src,
        ipv4::src(offending),
        tos,
        id,
        false,
        message.len() + quoted.len(),
    ) && frame.extend(&message)
        && frame.extend(quoted)
}

/// Whether the ICMP message at `l4` of a complete packet is an echo request with a correct
/// checksum.
pub fn is_echo_request(ip: &[u8], l4: usize) -> bool {
    let message = ip.get(l4..).unwrap_or_default();
    let (request, sum) = if is_ipv6(ip) {
        (icmpv6::ECHO_REQUEST, icmpv6::sum(ip, l4))
    } else {
        (ECHO_REQUEST, Sum::ZERO.bytes(message).finish())
    };
    let header = message.get(..HEADER_LEN);
    header.is_some_and(|header| header[field::TYPE] == request && header[field::CODE] == 0)
        && sum == 0
}

/// Turns the echo request in `frame` into its reply. The frame contains a whole IP packet, with the
/// ICMP message at `l4`. `id` is the identification of the reply's IPv4 header; it is not used for
/// IPv6.
pub fn echo_reply(frame: &mut Frame, l4: usize, id: u16) {
    if is_ipv6(frame.bytes()) {
        return icmpv6::echo_reply(frame, l4);
    }
    let ip = frame.bytes_mut();
    let (src, dst) = (ipv4::src(ip), ipv4::dst(ip));
    ip[ipv4::field::SOURCE].copy_from_slice(&dst.octets());
    ip[ipv4::field::DESTINATION].copy_from_slice(&src.octets());
    ip[ipv4::field::TTL] = 64;
    put16(ip, ipv4::field::ID, id);
    put16(ip, ipv4::field::FLAGS, 0);
    ipv4::finish_header(ip);
    let message = &mut ip[l4..];
    message[field::TYPE] = ECHO_REPLY;
    put16(message, field::CHECKSUM, 0);
    let sum = Sum::ZERO.bytes(message).finish();
    put16(message, field::CHECKSUM, sum);
}

/// Empties `frame` and writes an IPv4 header without options for a payload of `len` bytes. Returns
/// `false` if the payload is too long, or the frame has no room.
#[expect(
    clippy::too_many_arguments,
    reason = "the bytes are the fields of the header"
)]
pub(crate) fn header(
    frame: &mut Frame,
    protocol: u8,
    src: Ipv4Addr,
    dst: Ipv4Addr,
    tos: u8,
    id: u16,
    df: bool,
    len: usize,
) -> bool {
    frame.clear();
    let Some(mut header) = u16::try_from(len).ok().and_then(|len| {
        Ipv4Header::new(len, 64, IpNumber(protocol), src.octets(), dst.octets()).ok()
    }) else {
        return false;
    };
    header.dscp = etherparse::IpDscp::try_new(tos >> 2).unwrap_or_default();
    header.ecn = etherparse::IpEcn::try_new(tos & 3).unwrap_or_default();
    header.identification = id;
    header.dont_fragment = df;
    header.header_checksum = header.calc_header_checksum();
    frame.extend(&header.to_bytes())
}

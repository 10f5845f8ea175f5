//! The TCP header, its checksum, and TCP resets: answers to segments without a connection (RFC 9293
//! section 3.10.7.1), and resets that the director sends on its own.

use std::net::IpAddr;

use etherparse::TcpHeader;
use lvs_core::{Reset, TcpFlags};

use super::{be16, be32, icmp, icmpv6, ip_dst, ip_src, ipv4, ipv6, is_ipv6, put16};
use crate::frame::Frame;

/// Fields of the header (RFC 9293 section 3.1).
pub mod field {
    use crate::wire::Field;

    /// Source port.
    pub const SOURCE: Field = 0..2;
    /// Destination port.
    pub const DESTINATION: Field = 2..4;
    /// Sequence number.
    pub const SEQUENCE: Field = 4..8;
    /// Acknowledgement number.
    pub const ACKNOWLEDGEMENT: Field = 8..12;
    /// Offset of the byte whose upper half is the length of the header in words of 32 bits.
    pub const DATA_OFFSET: usize = 12;
    /// Offset of the byte with the flags of [`TcpFlags`](lvs_core::TcpFlags).
    pub const FLAGS: usize = 13;
    /// Checksum of the segment and of the pseudo-header.
    pub const CHECKSUM: Field = 16..18;
    /// Urgent pointer.
    pub const URGENT: Field = 18..20;
}

/// Length in bytes of a header without options, and offset of the options.
pub const HEADER_LEN: usize = field::URGENT.end;
/// Maximum length in bytes of a reset, IP header included.
pub const RESET_LEN_MAX: usize = ipv6::HEADER_LEN + HEADER_LEN;

/// Length in bytes of the header at the start of `tcp`, options included; 0 if it is truncated.
#[inline]
pub fn header_len(tcp: &[u8]) -> usize {
    tcp.get(field::DATA_OFFSET)
        .map_or(0, |b| usize::from(b >> 4) * 4)
}

/// Writes the reset that answers the IP packet `packet`, with TCP at `l4`, into `frame`. `false` if
/// the packet has less than 20 bytes of TCP, or the frame has too little room.
pub fn reset(frame: &mut Frame, packet: &[u8], l4: usize) -> bool {
    let Some(tcp) = packet.get(l4..).filter(|tcp| tcp.len() >= HEADER_LEN) else {
        return false;
    };
    let flags = TcpFlags(tcp[field::FLAGS]);
    let mut header = TcpHeader::new(
        be16(tcp, field::DESTINATION),
        be16(tcp, field::SOURCE),
        0,
        0,
    );
    header.rst = true;
    if flags.has(TcpFlags::ACK) {
        header.sequence_number = be32(tcp, field::ACKNOWLEDGEMENT);
    } else {
        let data = tcp.len().saturating_sub(header_len(tcp));
        let len = u32::try_from(data).unwrap_or(0)
            + u32::from(flags.has(TcpFlags::SYN))
            + u32::from(flags.has(TcpFlags::FIN));
        header.ack = true;
        header.acknowledgment_number = be32(tcp, field::SEQUENCE).wrapping_add(len);
    }
    // Copy the packet's DSCP without its ECN.
    let class = if is_ipv6(packet) {
        ipv6::traffic_class(packet)
    } else {
        packet[ipv4::field::TOS]
    };
    let (src, dst) = (ip_dst(packet), ip_src(packet));
    write(frame, src, dst, class & 0xfc, &header)
}

/// Writes a reset that the director sends on its own, or a probe for the sequence numbers of a
/// reset ([`Reset::asks`]). `false` if the addresses have different IP versions, or the frame has
/// too little room.
pub fn own_reset(frame: &mut Frame, reset: &Reset) -> bool {
    let (src, dst) = (reset.tuple.src, reset.tuple.dst);
    let mut header = TcpHeader::new(src.port(), dst.port(), reset.seq, 0);
    (header.rst, header.syn) = (!reset.asks, reset.asks);
    header.ack = reset.ack.is_some();
    header.acknowledgment_number = reset.ack.unwrap_or(0);
    write(frame, src.ip(), dst.ip(), 0, &header)
}

/// Writes a packet that contains a TCP segment without payload. Returns `false` if the addresses
/// have different IP versions, or the frame has no room.
fn write(frame: &mut Frame, src: IpAddr, dst: IpAddr, class: u8, header: &TcpHeader) -> bool {
    let started = match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => icmp::header(frame, 6, src, dst, class, 0, true, 20),
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let started = icmpv6::start(frame, 6, 64, src, dst, 20);
            ipv6::set_traffic_class(frame.bytes_mut(), class);
            started
        }
        _ => false,
    };
    let at = frame.len();
    if !started || !frame.extend(&header.to_bytes()) {
        return false;
    }
    let sum = checksum(frame.bytes(), at, 6);
    put16(frame.bytes_mut(), at + field::CHECKSUM.start, sum);
    true
}

/// Whether the checksum of the TCP, UDP or similar header at `l4` is correct.
pub fn checksum_ok(packet: &[u8], l4: usize, protocol: u8) -> bool {
    l4 <= packet.len() && checksum(packet, l4, protocol) == 0
}

/// The checksum over the segment at `l4` and its pseudo-header, if the checksum field is 0; 0 if
/// the field contains the correct checksum.
fn checksum(packet: &[u8], l4: usize, protocol: u8) -> u16 {
    let segment = packet.get(l4..).unwrap_or_default();
    super::checksum::Sum::ZERO
        .pseudo(ip_src(packet), ip_dst(packet), protocol, segment.len())
        .bytes(segment)
        .finish()
}

//! The reset that a host owes to a stray segment (RFC 9293 section 3.10.7.1).

use std::net::IpAddr;

use etherparse::TcpHeader;
use lvs_core::TcpFlags;

use super::{be16, be32, icmp, ipv4};
use crate::frame::Frame;

/// Writes the reset for the stray segment `packet` (an IPv4 packet with at least 20 bytes of TCP at `l4`) into `frame`.
pub fn reset(frame: &mut Frame, packet: &[u8], l4: usize) -> bool {
    let Some(tcp) = packet.get(l4..).filter(|tcp| tcp.len() >= 20) else {
        return false;
    };
    let flags = TcpFlags(tcp[13]);
    let (src, dst) = (ipv4::dst(packet), ipv4::src(packet));
    let mut header = TcpHeader::new(be16(tcp, 2), be16(tcp, 0), 0, 0);
    header.rst = true;
    if flags.has(TcpFlags::ACK) {
        header.sequence_number = be32(tcp, 8);
    } else {
        let data = tcp.len().saturating_sub(usize::from(tcp[12] >> 4) * 4);
        let len = u32::try_from(data).unwrap_or(0)
            + u32::from(flags.has(TcpFlags::SYN))
            + u32::from(flags.has(TcpFlags::FIN));
        header.ack = true;
        header.acknowledgment_number = be32(tcp, 4).wrapping_add(len);
    }
    let Ok(sum) = header.calc_checksum_ipv4_raw(src.octets(), dst.octets(), &[]) else {
        return false;
    };
    header.checksum = sum;
    // The packet's DSCP, without its ECN.
    icmp::header(frame, 6, src, dst, packet[1] & 0xfc, 0, true, 20)
        && frame.extend(&header.to_bytes())
}

/// Whether the transport checksum of TCP, UDP or the like at `l4` is right.
pub fn checksum_ok(packet: &[u8], l4: usize, protocol: u8) -> bool {
    let Some(segment) = packet.get(l4..) else {
        return false;
    };
    super::checksum::Sum::ZERO
        .pseudo(
            IpAddr::V4(ipv4::src(packet)),
            IpAddr::V4(ipv4::dst(packet)),
            protocol,
            segment.len(),
        )
        .bytes(segment)
        .finish()
        == 0
}

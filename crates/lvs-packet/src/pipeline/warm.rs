//! Prefetch for a batch of frames: the memory that all of their look-ups will read is requested
//! before the first decision, so that the processor waits for memory once, not once for each
//! packet.

use std::net::SocketAddrV4;

use lvs_core::Protocol;
use lvs_core::fast_path::Ahead;

use super::Decide;
use crate::frame::Frame;
use crate::parse::PLAIN;
use crate::wire::{ETHERNET_LEN, ETHERTYPE_IPV4, be16, ethernet, ipv4, udp};

/// Maximum number of frames for which memory is prefetched together.
pub(super) const AHEAD: usize = 64;

/// Look-up hints for the frames of a batch.
pub(super) type Known = [Option<Ahead>; AHEAD];

/// Prefetches the memory that the look-ups of these frames will read, and stores the hints for
/// these look-ups in `known`. Other frames than ordinary IPv4 packets are skipped, which affects
/// only the speed.
#[inline]
pub(super) fn look_ahead<D: Decide>(
    frames: &[Frame],
    ethernet: bool,
    decide: &D,
    known: &mut Known,
) {
    // First, the slots of all frames are computed, because their addresses are needed; then the
    // slots are prefetched. Each step issues all of its loads together: TLB misses of 4 KiB pages
    // take as long as the loads, and run in parallel only if no other work is between them.
    for (known, frame) in known.iter_mut().zip(frames) {
        let tuple = ports_and_addresses(frame.bytes(), ethernet);
        *known = tuple.and_then(|(protocol, src, dst)| decide.ahead(protocol, src, dst));
    }
    for ahead in known[..frames.len()].iter_mut().flatten() {
        decide.aim(ahead);
    }
}

#[inline]
fn ports_and_addresses(
    bytes: &[u8],
    has_ethernet: bool,
) -> Option<(Protocol, SocketAddrV4, SocketAddrV4)> {
    let packet = bytes.get(if has_ethernet { ETHERNET_LEN } else { 0 }..)?;
    let packet: &[u8; ipv4::HEADER_LEN + udp::field::DESTINATION.end] = packet.first_chunk()?;
    let (header, ports) = packet.split_at(ipv4::HEADER_LEN);
    let of_ipv4 = !has_ethernet || be16(bytes, ethernet::ETHERTYPE) == ETHERTYPE_IPV4;
    if header[ipv4::field::VERSION] != PLAIN || !of_ipv4 {
        return None;
    }
    Some((
        Protocol(header[ipv4::field::PROTOCOL]),
        SocketAddrV4::new(ipv4::src(header), be16(ports, udp::field::SOURCE)),
        SocketAddrV4::new(ipv4::dst(header), be16(ports, udp::field::DESTINATION)),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefetch_parser_accepts_only_complete_ipv4_packets() {
        let mut frame = vec![0; 64];
        frame[12..15].copy_from_slice(&[8, 0, 0x45]);
        frame[23] = 6;
        frame[26..38].copy_from_slice(&[192, 0, 2, 1, 10, 0, 0, 1, 4, 0, 0, 80]);
        let tuple = ports_and_addresses(&frame, true).unwrap();
        assert_eq!(tuple.0, Protocol::TCP);
        assert_eq!(tuple.1, "192.0.2.1:1024".parse().unwrap());
        assert_eq!(tuple.2, "10.0.0.1:80".parse().unwrap());
        assert_eq!(ports_and_addresses(&frame[14..], false), Some(tuple));
        assert_eq!(ports_and_addresses(&frame[..37], true), None);
        frame[13] = 6;
        assert_eq!(ports_and_addresses(&frame, true), None);
        assert_eq!(ports_and_addresses(&[], true), None);
    }
}

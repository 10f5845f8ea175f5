//! Frames of attacks with correct checksums, built with `etherparse`; some become super-packets.

use std::net::{IpAddr, SocketAddr};

use etherparse::PacketBuilder;
use lvs_packet::frame::{Frame, MAX_FRAME, Offload, SegmentKind, Segments};

use super::Target;

const ETHERNET: usize = 14;

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// A TCP segment with the flags [`SYN`], [`ACK`] or both.
    Tcp(u8),
    Udp,
}

pub(super) const SYN: u8 = 2;
pub(super) const ACK: u8 = 16;

pub(super) fn packet(src: SocketAddr, dst: SocketAddr, kind: Kind, data: &[u8]) -> Vec<u8> {
    let builder = match (src.ip(), dst.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => PacketBuilder::ipv4(src.octets(), dst.octets(), 64),
        (IpAddr::V6(src), IpAddr::V6(dst)) => PacketBuilder::ipv6(src.octets(), dst.octets(), 64),
        _ => unreachable!("attacks do not mix IP versions"),
    };
    let mut ip = Vec::new();
    let written = match kind {
        Kind::Udp => builder.udp(src.port(), dst.port()).write(&mut ip, data),
        Kind::Tcp(flags) => {
            let mut builder = builder.tcp(src.port(), dst.port(), 1, 64_000);
            if flags & SYN != 0 {
                builder = builder.syn();
            }
            if flags & ACK != 0 {
                builder = builder.ack(2);
            }
            builder.write(&mut ip, data)
        }
    };
    written.expect("writing to a vector succeeds");
    ip
}

/// Puts an IP packet into an Ethernet frame to the director.
pub(super) fn ethernet(target: &Target, ip: &[u8]) -> Frame {
    let kind: [u8; 2] = if ip[0] >> 4 == 6 {
        [0x86, 0xdd]
    } else {
        [8, 0]
    };
    // A locally administered address that no host of a testbed has.
    let from = [2, 0, 0, 0xba, 0xad, 1];
    let mut frame = Frame::with_capacity((ETHERNET + ip.len()).min(MAX_FRAME));
    let fits = frame.extend(&target.mac) && frame.extend(&from);
    let fits = fits && frame.extend(&kind) && frame.extend(ip);
    assert!(fits, "the packet is longer than 64 KiB");
    frame
}

/// Makes `frame` a super-packet with `size` bytes of data in each segment.
pub(super) fn aggregate(mut frame: Frame, kind: SegmentKind, size: u16) -> Frame {
    frame.offload = Offload {
        segments: Some(Segments {
            kind,
            size,
            header_len: 0,
            ecn: false,
        }),
        ..Offload::default()
    };
    frame
}

//! `virtio_net_hdr`: the description of partial checksums and segments that precedes a frame on
//! packet sockets and TUN devices.
//!
//! ```text
//!  0      1        2         4          6           8            10
//!  | flags| gso    | hdr_len | gso_size | csum_start| csum_offset|   all in the byte order of the host
//! ```

use lvs_packet::frame::{Offload, PartialChecksum, SegmentKind, Segments};

/// Length of the header in bytes.
pub(crate) const LEN: usize = 10;

const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;

const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_UDP: u8 = 3;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// Reads a header. An unsupported GSO type yields an ordinary frame that is too long for any
/// device, so that the device refuses and counts it.
pub(crate) fn decode(header: &[u8; LEN]) -> Offload {
    let field = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    let kind = match header[1] & !GSO_ECN {
        GSO_TCPV4 => Some(SegmentKind::Tcp4),
        GSO_TCPV6 => Some(SegmentKind::Tcp6),
        GSO_UDP_L4 => Some(SegmentKind::Udp),
        GSO_UDP => Some(SegmentKind::UdpFragments),
        _ => None,
    };
    Offload {
        checksum: (header[0] & NEEDS_CSUM != 0).then(|| PartialChecksum {
            start: field(6),
            offset: field(8),
        }),
        segments: kind.map(|kind| Segments {
            kind,
            header_len: field(2),
            size: field(4),
            ecn: header[1] & GSO_ECN != 0,
        }),
        verified: header[0] & DATA_VALID != 0,
    }
}

/// Returns the header for a partial checksum or a super-packet. It never has the flag "checksum
/// verified": the receiver on a virtual link would trust it, but the dataplane may have changed the
/// frame.
pub(crate) fn encode(offload: &Offload) -> [u8; LEN] {
    let mut header = [0; LEN];
    let mut put = |at: usize, value: u16| {
        header[at..at + 2].copy_from_slice(&value.to_ne_bytes());
    };
    let mut gso = GSO_NONE;
    if let Some(segments) = &offload.segments {
        put(2, segments.header_len);
        put(4, segments.size);
        gso = match segments.kind {
            SegmentKind::Tcp4 => GSO_TCPV4,
            SegmentKind::Tcp6 => GSO_TCPV6,
            SegmentKind::Udp => GSO_UDP_L4,
            SegmentKind::UdpFragments => GSO_UDP,
        };
        if segments.ecn {
            gso |= GSO_ECN;
        }
    }
    if let Some(checksum) = &offload.checksum {
        put(6, checksum.start);
        put(8, checksum.offset);
        header[0] = NEEDS_CSUM;
    }
    header[1] = gso;
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vnet_header_keeps_partial_checksum_and_segments() {
        let kinds = [
            SegmentKind::Tcp4,
            SegmentKind::Tcp6,
            SegmentKind::Udp,
            SegmentKind::UdpFragments,
        ];
        for kind in kinds {
            for ecn in [false, true] {
                let offload = Offload {
                    checksum: Some(PartialChecksum {
                        start: 34,
                        offset: 16,
                    }),
                    segments: Some(Segments {
                        kind,
                        size: 1448,
                        header_len: 66,
                        ecn,
                    }),
                    verified: false,
                };
                assert_eq!(decode(&encode(&offload)), offload);
            }
        }
        assert_eq!(encode(&Offload::default()), [0; LEN]);
    }

    #[test]
    fn verified_checksum_is_decoded_from_vnet_header_but_not_encoded() {
        let offload = decode(&[DATA_VALID, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert!(offload.verified);
        assert_eq!(encode(&offload), [0; LEN]);
    }

    #[test]
    fn vnet_header_with_unknown_gso_type_decodes_as_ordinary_frame() {
        assert_eq!(decode(&[0, 77, 1, 1, 1, 1, 0, 0, 0, 0]).segments, None);
    }
}

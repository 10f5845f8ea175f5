//! The UDP header (RFC 768).

use super::{be16, is_ipv6, tcp};

/// Fields of the header.
pub mod field {
    use crate::wire::Field;

    /// Source port.
    pub const SOURCE: Field = 0..2;
    /// Destination port.
    pub const DESTINATION: Field = 2..4;
    /// Length of header and payload in bytes.
    pub const LENGTH: Field = 4..6;
    /// Checksum; 0 means that there is none.
    pub const CHECKSUM: Field = 6..8;
}

/// Length in bytes of the header.
pub const HEADER_LEN: usize = field::CHECKSUM.end;

/// The end of a datagram whose header is at `l4` of the IP packet `ip`, according to its length
/// field. `None` if the packet ends before it, or if the length is less than a header (`udp_rcv`).
/// Over IPv6, a length of 0 means all bytes (RFC 2675).
pub fn end(ip: &[u8], l4: usize) -> Option<usize> {
    let datagram = ip.get(l4..).filter(|bytes| bytes.len() >= HEADER_LEN)?;
    let len = match usize::from(be16(datagram, field::LENGTH)) {
        0 if is_ipv6(ip) => datagram.len(),
        len => len,
    };
    (HEADER_LEN..=datagram.len())
        .contains(&len)
        .then_some(l4 + len)
}

/// Whether the datagram at `l4` has a correct checksum or none. It must end with the IP packet
/// `ip`.
pub fn is_intact(ip: &[u8], l4: usize) -> bool {
    const UDP: u8 = 17;
    let sum = be16(ip, l4 + field::CHECKSUM.start);
    (sum == 0 && !is_ipv6(ip)) || tcp::checksum_ok(ip, l4, UDP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::put16;
    use etherparse::PacketBuilder;

    #[test]
    fn udp_datagram_ends_at_its_length_field() {
        let (mut four, mut six) = (Vec::new(), Vec::new());
        PacketBuilder::ipv4([1; 4], [2; 4], 64)
            .udp(1, 2)
            .write(&mut four, &[7; 10])
            .expect("writing to a vector succeeds");
        PacketBuilder::ipv6([1; 16], [2; 16], 64)
            .udp(1, 2)
            .write(&mut six, &[7; 10])
            .expect("writing to a vector succeeds");
        for (ip, l4, none) in [(&mut four, 20, None), (&mut six, 40, Some(58))] {
            assert_eq!(end(ip, l4), Some(l4 + 18));
            assert!(is_intact(ip, l4));
            for (len, ends) in [
                (19, None),
                (14, Some(l4 + 14)),
                (8, Some(l4 + 8)),
                (7, None),
                (0, none),
            ] {
                put16(ip, l4 + field::LENGTH.start, len);
                assert_eq!(end(ip, l4), ends, "{len}");
            }
            assert!(!is_intact(ip, l4));
            put16(ip, l4 + field::CHECKSUM.start, 0);
            assert_eq!(is_intact(ip, l4), none.is_none());
            assert_eq!(end(&ip[..l4 + 7], l4), None);
        }
    }
}

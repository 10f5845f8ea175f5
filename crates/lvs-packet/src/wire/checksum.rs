//! The Internet checksum: sums (RFC 1071), updates (RFC 1624), and the CRC32c of SCTP (RFC 9260
//! appendix A).
//!
//! Three kinds of numbers are distinguished: a [`Sum`] that is being added up, the *complemented*
//! sum that finished headers store, and the *uncomplemented* sum of the pseudo-header that an
//! unfinished (offloaded) checksum field contains.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A sum in ones' complement arithmetic that is not folded to 16 bits yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum(u64);

impl Sum {
    /// The sum of no bytes.
    pub const ZERO: Self = Self(0);

    /// Adds `bytes` to the sum; a zero byte completes an odd number of bytes.
    ///
    /// The sum is computed over words in the byte order of the processor and converted once: one's
    /// complement addition does not depend on the byte order (RFC 1071 section 2 B), and 2^16 is 1
    /// modulo 2^16-1, so words may be wider than 16 bits.
    #[inline]
    #[must_use]
    pub fn bytes(self, bytes: &[u8]) -> Self {
        let mut words = bytes.chunks_exact(4);
        let mut acc = 0u64;
        for word in &mut words {
            acc += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        }
        let rest = words.remainder();
        if !rest.is_empty() {
            let mut last = [0u8; 4];
            last[..rest.len()].copy_from_slice(rest);
            acc += u64::from(u32::from_ne_bytes(last));
        }
        Self(self.0 + u64::from(fold(acc).to_be()))
    }

    /// Adds the bytes of an address to the sum.
    #[inline]
    #[must_use]
    pub fn addr(self, addr: IpAddr) -> Self {
        match addr {
            IpAddr::V4(a) => self.bytes(&a.octets()),
            IpAddr::V6(a) => self.bytes(&a.octets()),
        }
    }

    /// Adds the pseudo-header of TCP, UDP or ICMPv6.
    #[inline]
    #[must_use]
    pub fn pseudo(self, src: IpAddr, dst: IpAddr, protocol: u8, len: usize) -> Self {
        let len = len as u64;
        let sum = self.addr(src).addr(dst);
        Self(sum.0 + u64::from(protocol) + (len >> 16) + (len & 0xffff))
    }

    /// The sum folded to 16 bits, not complemented.
    #[inline]
    pub const fn fold(self) -> u16 {
        fold(self.0)
    }

    /// The value that a header contains: the complement.
    #[inline]
    pub const fn finish(self) -> u16 {
        !self.fold()
    }
}

#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the sum has been folded into 16 bits"
)]
const fn fold(mut acc: u64) -> u16 {
    acc = (acc & 0xffff_ffff) + (acc >> 32);
    acc = (acc & 0xffff_ffff) + (acc >> 32);
    acc = (acc & 0xffff) + (acc >> 16);
    acc = (acc & 0xffff) + (acc >> 16);
    acc = (acc & 0xffff) + (acc >> 16);
    acc as u16
}

/// The effect that changed words have on a checksum over them (RFC 1624, equation 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delta(u64);

impl Delta {
    /// The effect of no change.
    pub const NONE: Self = Self(0);

    /// Records that a 16-bit word changes.
    #[inline]
    #[must_use]
    pub const fn word(self, old: u16, new: u16) -> Self {
        Self(self.0 + (!old) as u64 + new as u64)
    }

    /// Records that an IPv4 address changes.
    #[inline]
    #[must_use]
    pub fn addr(self, old: Ipv4Addr, new: Ipv4Addr) -> Self {
        let (old, new) = (old.to_bits(), new.to_bits());
        Self(self.0 + u64::from(!old) + u64::from(new))
    }

    /// Records that an IPv6 address changes.
    #[inline]
    #[must_use]
    pub fn addr6(self, old: Ipv6Addr, new: Ipv6Addr) -> Self {
        let words = old.segments().into_iter().zip(new.segments());
        words.fold(self, |delta, (old, new)| delta.word(old, new))
    }

    /// Updates the complete checksum `stored`, and returns it.
    #[inline]
    #[must_use]
    pub const fn apply(self, stored: u16) -> u16 {
        !fold(self.0 + (!stored) as u64)
    }

    /// Updates the partial checksum `stored`, which is a sum that is not complemented, and returns
    /// it.
    #[inline]
    #[must_use]
    pub const fn apply_unfinished(self, stored: u16) -> u16 {
        fold(self.0 + stored as u64)
    }
}

const CRC32C: [u32; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "an index of a table of 256"
        )]
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0x82f6_3b78
            } else {
                crc >> 1
            };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
};

/// The checksum of an SCTP packet, in the byte order of its field (little-endian); the field itself
/// counts as zero.
pub fn sctp(packet: &[u8]) -> [u8; 4] {
    let mut crc = u32::MAX;
    for (at, byte) in packet.iter().enumerate() {
        let byte = if (8..12).contains(&at) { 0 } else { *byte };
        crc = (crc >> 8) ^ CRC32C[usize::from(crc.to_le_bytes()[0] ^ byte)];
    }
    (!crc).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn checksum_of_rfc_1071_example_is_correct() {
        let sum = Sum::ZERO.bytes(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(sum.fold(), 0xddf2);
    }

    #[test]
    fn sctp_checksum_ignores_content_of_its_field() {
        let mut packet = [0u8; 12].to_vec();
        packet.extend_from_slice(b"x");
        // The checksum field itself is excluded.
        let clean = sctp(&packet);
        packet[8..12].copy_from_slice(&[1, 2, 3, 4]);
        assert_eq!(sctp(&packet), clean);
    }

    proptest! {
        #[test]
        fn checksum_equals_naive_sum(bytes in proptest::collection::vec(any::<u8>(), 1..2000)) {
            // pnet returns 0 for an empty packet. It omits the word at `skipword` from the sum; a
            // number beyond the end omits none.
            let twin = pnet_packet::util::checksum(&bytes, usize::MAX / 2);
            prop_assert_eq!(Sum::ZERO.bytes(&bytes).finish(), twin);
        }

        #[test]
        fn incremental_checksum_equals_new_sum(mut bytes in proptest::collection::vec(any::<u8>(), 20..60), new: [u8; 4], port: u16) {
            bytes[1] |= 1; // A header is never all zeros.
            let stored = Sum::ZERO.bytes(&bytes).finish();
            let old = Ipv4Addr::new(bytes[12], bytes[13], bytes[14], bytes[15]);
            let delta = Delta::NONE.addr(old, new.into()).word(u16::from_be_bytes([bytes[8], bytes[9]]), port);
            bytes[12..16].copy_from_slice(&new);
            bytes[8..10].copy_from_slice(&port.to_be_bytes());
            prop_assert_eq!(delta.apply(stored), Sum::ZERO.bytes(&bytes).finish());
            prop_assert_eq!(delta.apply_unfinished(!stored), Sum::ZERO.bytes(&bytes).fold());
        }
    }
}

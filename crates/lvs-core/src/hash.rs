//! Hash functions by which schedulers choose a server. The results are the same as the kernel's, so
//! that two directors send a client to the same server.

use core::hash::Hasher;
use core::net::IpAddr;

use siphasher::sip::SipHasher13;

pub(crate) const KEY1: (u64, u64) = (2_654_435_761, 2_654_435_761);
pub(crate) const KEY2: (u64, u64) = (2_654_446_892, 2_654_446_892);

/// An address as a number: IPv4 in host byte order, IPv6 as the exclusive or of its four words.
pub fn fold(addr: IpAddr) -> u32 {
    match addr {
        IpAddr::V4(addr) => addr.to_bits(),
        IpAddr::V6(addr) => {
            let [a, b, c, d, e, f, g, h] = addr.segments().map(u32::from);
            (a ^ c ^ e ^ g) << 16 | (b ^ d ^ f ^ h)
        }
    }
}

/// Multiplicative hashing by the golden ratio (`hash_32` of `linux/hash.h`): the upper `bits` bits
/// of the product.
///
/// Kernels before 4.18 took the lower bits of another product in the schedulers that use this
/// function.
pub const fn hash_32(value: u32, bits: u32) -> u32 {
    value.wrapping_mul(0x61c8_8647) >> (32 - bits)
}

/// The lower 32 bits of SipHash-1-3 of four bytes: `hsiphash_1u32` of a 64-bit kernel.
#[expect(
    clippy::cast_possible_truncation,
    reason = "truncated like the kernel's result"
)]
pub fn hsiphash(value: u32, key: (u64, u64)) -> u32 {
    let mut hasher = SipHasher13::new_with_keys(key.0, key.1);
    hasher.write(&value.to_le_bytes());
    hasher.finish() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Columns: client address; slots of `sh` and `dh` without a port, and with port 1024; bucket
    /// of `lblc`; hash of `mh`; offset and skip of `mh` for a server at this address and port 80.
    /// Computed with the kernel's own functions.
    const VECTORS: [(&str, u32, u32, u32, u32, u32, u32); 6] = [
        ("10.0.0.1", 39, 73, 159, 50_859_236, 3167, 700),
        ("10.0.0.2", 137, 171, 550, 1_104_141_843, 1231, 3544),
        ("192.168.1.100", 89, 123, 357, 3_244_109_048, 1277, 529),
        ("172.16.5.9", 115, 149, 460, 1_270_978_270, 1516, 934),
        ("203.0.113.7", 124, 158, 499, 2_825_792_533, 3003, 1694),
        ("198.51.100.255", 101, 135, 405, 461_387_241, 565, 3348),
    ];

    #[test]
    fn scheduler_hashes_equal_kernel_hashes() {
        for (addr, slot, slot_1024, bucket, hash, offset, skip) in VECTORS {
            let folded = fold(addr.parse().unwrap());
            assert_eq!(hash_32(folded, 8), slot, "{addr}");
            assert_eq!(hash_32(folded.wrapping_add(1024), 8), slot_1024, "{addr}");
            assert_eq!(hash_32(folded, 10), bucket, "{addr}");
            assert_eq!(hsiphash(folded, KEY1), hash, "{addr}");
            assert_eq!(hsiphash(folded + 80, KEY1) % 4093, offset, "{addr}");
            assert_eq!(hsiphash(folded + 80, KEY2) % 4092 + 1, skip, "{addr}");
        }
        assert_eq!(hsiphash(0, KEY1), 492_468_162);
        assert_eq!(hsiphash(1, KEY1), 384_591_538);
        assert_eq!(hsiphash(0, KEY2), 4_169_286_463);
        assert_eq!(hsiphash(1, KEY2), 2_182_130_385);
    }

    #[test]
    fn ipv6_address_hashes_as_xor_of_its_words() {
        let folded = fold("2001:db8::a0a0".parse().unwrap());
        assert_eq!(folded, 0x2001_ad18);
        assert_eq!(hash_32(folded, 8), 19);
        assert_eq!(hash_32(folded + 443, 8), 73);
        assert_eq!(hsiphash(folded + 443, KEY1), 1_913_056_904);
        assert_eq!(hsiphash(folded + 443, KEY2) % 4092 + 1, 4025);
    }
}

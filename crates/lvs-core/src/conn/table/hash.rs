//! SipHash-1-3 over whole words. The BPF programs of the kernel fast path compute the same hash.

/// SipHash-1-3 of `words`, each as its eight bytes in memory order.
///
/// The hash is keyed: a sender without the key cannot choose the buckets of its tuples. One round
/// for each word and three at the end are sufficient for this (Aumasson, Bernstein: SipHash; hash
/// tables of Rust and of the Linux kernel use the same).
#[inline]
pub(crate) fn sip13<const N: usize>(keys: [u64; 2], words: [u64; N]) -> u64 {
    let [k0, k1] = keys;
    let mut state = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    for word in words {
        let word = word.to_le();
        state[3] ^= word;
        round(&mut state);
        state[0] ^= word;
    }
    let length = (N as u64 * 8) << 56;
    state[3] ^= length;
    round(&mut state);
    state[0] ^= length;
    state[2] ^= 0xff;
    for _ in 0..3 {
        round(&mut state);
    }
    state[0] ^ state[1] ^ state[2] ^ state[3]
}

#[inline]
const fn round(state: &mut [u64; 4]) {
    let [mut a, mut b, mut c, mut d] = *state;
    a = a.wrapping_add(b);
    b = b.rotate_left(13) ^ a;
    a = a.rotate_left(32);
    c = c.wrapping_add(d);
    d = d.rotate_left(16) ^ c;
    a = a.wrapping_add(d);
    d = d.rotate_left(21) ^ a;
    c = c.wrapping_add(b);
    b = b.rotate_left(17) ^ c;
    c = c.rotate_left(32);
    *state = [a, b, c, d];
}

#[cfg(test)]
mod tests {
    use core::hash::Hasher;

    use siphasher::sip::SipHasher13;

    use super::*;

    #[test]
    fn hash_equals_siphash_1_3() {
        for n in 0..1000_u64 {
            let (k0, k1) = (n.wrapping_mul(0x9e37_79b9_7f4a_7c15), !n);
            let words = [n << 40 | n, n.wrapping_mul(k0), k1 << 7];
            let mut hasher = SipHasher13::new_with_keys(k0, k1);
            hasher.write(&words[0].to_ne_bytes());
            assert_eq!(sip13([k0, k1], [words[0]]), hasher.finish());
            for word in &words[1..] {
                hasher.write(&word.to_ne_bytes());
            }
            assert_eq!(sip13([k0, k1], words), hasher.finish());
        }
    }
}

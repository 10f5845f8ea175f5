//! Reassembly and fragmentation of datagrams (RFC 791, RFC 8200 section 4.5), by the kernel's
//! rules.

mod cut;
mod reassembly;

pub use self::cut::{Cutter, Piece};
pub use self::reassembly::{Assembled, MEMORY_MAX, Reassembler, TIMEOUT};

use lvs_core::Protocol;

/// The fragments in which a datagram arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    /// Number of payload bytes of each fragment, in order.
    pub sizes: Vec<usize>,
    /// Length of the longest fragment in bytes, IP header included.
    pub longest: usize,
    /// Length in bytes of the headers of each fragment; for IPv6, only of the headers before the
    /// fragment header.
    pub headers: usize,
    /// Whether the longest fragment had "don't fragment", so that the reassembled packet has it as
    /// well (`IPSKB_FRAG_PMTU`). IPv4 only.
    pub df: bool,
    /// Protocol of the payload, as the fragments named it; for IPv6, this may be an extension
    /// header.
    pub protocol: Protocol,
}

impl History {
    /// Returns the fragmentation after the first `len` bytes of the datagram were made contiguous
    /// in order to change them (`skb_ensure_writable`): bytes that are missing in the first
    /// fragment were moved into it from the next fragments.
    pub fn with_first(&self, len: usize) -> Self {
        let mut history = self.clone();
        let Some((first, rest)) = history.sizes.split_first_mut() else {
            return history;
        };
        let mut missing = len.saturating_sub(self.headers + *first);
        for size in rest {
            let taken = missing.min(*size);
            *size -= taken;
            *first += taken;
            missing -= taken;
        }
        history.sizes.retain(|&size| size > 0);
        history
    }

    /// Returns the payload sizes with which a packet is cut where the datagram was cut. The packet
    /// is the datagram with `added` new bytes in front, and each fragment repeats its first
    /// `headers` bytes. Empty if the first fragment that arrived ends before these bytes do.
    pub fn behind(&self, headers: usize, added: usize) -> Vec<usize> {
        let mut sizes = self.sizes.clone();
        if let Some(first) = sizes.first_mut() {
            match (*first + self.headers + added).checked_sub(headers) {
                Some(size) => *first = size,
                None => sizes.clear(),
            }
        }
        sizes
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use crate::drop::FrameDrop;
    use crate::frame::Frame;
    use crate::parse;
    use crate::wire::{ipv4, ipv6, put16};
    use etherparse::PacketBuilder;
    use lvs_core::Instant;
    use proptest::prelude::*;

    fn datagram(len: usize) -> Vec<u8> {
        let data: Vec<u8> = (0..len).map(|i| i as u8).collect();
        let mut ip = Vec::new();
        PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .udp(1, 2)
            .write(&mut ip, &data)
            .expect("writing to a vector succeeds");
        put16(&mut ip, 4, 77);
        put16(&mut ip, 6, 0);
        ipv4::finish_header(&mut ip);
        ip
    }

    fn cut(ip: &[u8], mtu: usize) -> Vec<Frame> {
        let cut = Cutter::v4(ip, mtu, None, false).expect("the MTU is large enough");
        cut.frames().collect()
    }

    fn push(r: &Reassembler, frame: &Frame, now: Instant) -> Result<Option<Assembled>, FrameDrop> {
        let p = parse::ip(frame.bytes(), false).expect("the packet is valid");
        r.push(
            frame.bytes(),
            &p,
            p.fragment.expect("the packet is a fragment"),
            true,
            now,
        )
    }

    /// Reassembles the datagram from pieces in a random order, and checks that the reassembler
    /// stores nothing afterwards.
    fn reassembled(pieces: &mut [Frame], seed: u64) -> Assembled {
        let n = pieces.len();
        for i in 0..n {
            pieces.swap(i, (seed.rotate_left(i as u32 % 64) % n as u64) as usize);
        }
        let r = Reassembler::default();
        let mut done = None;
        for (i, piece) in pieces.iter().enumerate() {
            done =
                push(&r, piece, Instant::ZERO).expect("the fragments do not contradict each other");
            assert_eq!(done.is_some(), i + 1 == n);
        }
        assert_eq!(r.memory(), 0);
        done.expect("the datagram is complete")
    }

    proptest! {
        #[test]
        fn ipv6_fragmentation_round_trips(len in 1300usize..9000, mtu in 100usize..1280, options: bool, atomic: bool, seed: u64) {
            let data: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let mut ip = Vec::new();
            PacketBuilder::ipv6([1; 16], [2; 16], 64)
                .udp(1, 2)
                .write(&mut ip, &data)
                .expect("writing to a vector succeeds");
            if options {
                // Hop-by-hop options with a router alert.
                ip.splice(40..40, [17, 0, 5, 2, 0, 0, 1, 0]);
                ip[6] = 0;
                ipv6::finish_len(&mut ip);
            }
            let mtu = if atomic { 20_000 } else { mtu };
            let mut pieces: Vec<Frame> = Cutter::v6(&ip, mtu, None, 99).expect("the MTU is large enough").frames().collect();
            for p in &pieces {
                prop_assert!(p.len() <= mtu);
                prop_assert!(etherparse::SlicedPacket::from_ip(p.bytes()).is_ok());
            }
            let n = pieces.len();
            let done = reassembled(&mut pieces, seed);
            prop_assert_eq!(done.frame.bytes(), &ip[..]);
            let sizes = done.history.behind(ipv6::unfragmentable(&ip).0, 0);
            let again = Cutter::v6(done.frame.bytes(), mtu, Some(&sizes), 1).expect("the packet can be fragmented");
            prop_assert_eq!(again.count(), n);
        }

        /// The kernel discards a first fragment that does not contain the complete header of its
        /// protocol (RFC 8200 section 4.5).
        #[test]
        fn ipv6_first_fragment_with_incomplete_headers_is_dropped(tcp: bool, options: bool, len in 8usize..60) {
            let len = len & !7;
            let protocol = if tcp { 6 } else { 17 };
            let mut ip = vec![0; 40];
            ipv6::write_header(&mut ip, protocol, 64, [1; 16].into(), [2; 16].into(), 0);
            ip.extend(0..64u8);
            let mut header = if tcp { 20 } else { 8 };
            if options {
                ip.splice(40..40, [protocol, 0, 1, 4, 0, 0, 0, 0]);
                // Destination options after the fragment header.
                ip[6] = 60;
                header += 8;
            }
            let next = ip[6];
            ip[6] = ipv6::FRAGMENT;
            ip.splice(40..40, [next, 0, 0, 1, 0, 0, 0, 9]);
            ip.truncate(48 + len);
            ipv6::finish_len(&mut ip);
            let got = push(&Reassembler::default(), &Frame::from_bytes(&ip), Instant::ZERO);
            prop_assert_eq!(got.is_ok(), len >= header, "{:?}", got);
        }

        #[test]
        fn ipv4_fragmentation_round_trips(len in 600usize..5000, mtu in 68usize..600, seed: u64) {
            let ip = datagram(len);
            let mut pieces = cut(&ip, mtu);
            for p in &pieces {
                prop_assert!(p.len() <= mtu);
            }
            let longest = pieces.iter().map(Frame::len).max();
            let n = pieces.len();
            let done = reassembled(&mut pieces, seed);
            prop_assert_eq!(done.frame.bytes(), &ip[..]);
            prop_assert_eq!(Some(done.history.longest), longest);
            let again = Cutter::v4(done.frame.bytes(), mtu, Some(&done.history.sizes), false).expect("the packet can be fragmented");
            prop_assert_eq!(again.count(), n);
        }
    }

    #[test]
    fn overlapping_fragment_drops_datagram_and_repeated_fragment_does_not() {
        let ip = datagram(1000);
        let pieces = cut(&ip, 420);
        let r = Reassembler::default();
        assert!(
            push(&r, &pieces[0], Instant::ZERO)
                .expect("the first fragment is accepted")
                .is_none()
        );
        assert!(matches!(
            push(&r, &pieces[0], Instant::ZERO),
            Err(FrameDrop::BadFragment)
        ));
        assert_eq!(r.waiting(), 1);
        let other = cut(&ip, 300);
        assert!(matches!(
            push(&r, &other[1], Instant::ZERO),
            Err(FrameDrop::BadFragment)
        ));
        assert_eq!((r.waiting(), r.memory()), (0, 0));
    }

    /// An IPv6 datagram with overlapping fragments is discarded, including fragments that arrive
    /// later (RFC 8200 section 4.5).
    #[test]
    fn overlapping_ipv6_fragments_are_not_reassembled() {
        let mut ip = Vec::new();
        PacketBuilder::ipv6([1; 16], [2; 16], 64)
            .udp(1, 2)
            .write(&mut ip, &[9; 3000])
            .expect("writing to a vector succeeds");
        let cut = |mtu: usize| {
            let cut = Cutter::v6(&ip, mtu, None, 7).expect("the MTU is large enough");
            cut.frames().collect::<Vec<_>>()
        };
        let (honest, other) = (cut(1280), cut(600));
        let r = Reassembler::default();
        assert!(
            push(&r, &honest[0], Instant::ZERO)
                .expect("the first fragment is accepted")
                .is_none()
        );
        // The overlap begins within the first fragment and ends after it.
        let overlap = other.iter().find(|piece| {
            let header = ipv6::walk(piece.bytes()).and_then(|chain| chain.fragment);
            let (header, _) = header.expect("the packet is a fragment");
            let end = header.offset + piece.len() - 48;
            header.offset < 1232 && end > 1232
        });
        let overlap = overlap.expect("a fragment of the other size overlaps");
        assert!(matches!(
            push(&r, overlap, Instant::ZERO),
            Err(FrameDrop::BadFragment)
        ));
        assert_eq!((r.waiting(), r.memory(), r.expired()), (0, 0, 1));
        for piece in &honest[1..] {
            let done = push(&r, piece, Instant::ZERO).expect("no stored fragment overlaps");
            assert!(done.is_none());
        }
    }

    #[test]
    fn reassembly_memory_and_time_are_bounded() {
        let ip = datagram(3000);
        let r = Reassembler::default();
        let (mut taken, mut refused) = (0u64, 0u64);
        for id in 0..20_000u16 {
            let mut piece = cut(&ip, 1500).swap_remove(0);
            ipv4::set_id(piece.bytes_mut(), id);
            match push(&r, &piece, Instant::ZERO) {
                Ok(None) => taken += 1,
                Err(FrameDrop::FragmentMemory) => refused += 1,
                other => panic!("{other:?}"),
            }
            assert!(r.memory() <= MEMORY_MAX);
        }
        assert!(
            taken > 2000 && taken + refused == 20_000,
            "{taken} fragments were accepted and {refused} refused, of 20,000"
        );
        let later = Instant::ZERO + TIMEOUT;
        r.expire(Instant::from_nanos(later.as_nanos() - 1));
        assert_eq!((r.waiting() as u64, r.expired()), (taken, 0));
        r.expire(later);
        assert_eq!((r.memory(), r.waiting()), (0, 0));
        assert_eq!(r.expired(), taken);
    }

    #[test]
    fn datagram_in_too_many_fragments_is_dropped() {
        const PIECES: usize = 1024;
        let pieces = |count: usize| cut(&datagram(8 * count - 8), 28);
        let all = pieces(PIECES);
        assert_eq!(all.len(), PIECES);
        let r = Reassembler::default();
        for (n, piece) in (1..).zip(&all) {
            let got = push(&r, piece, Instant::ZERO).expect("the space suffices");
            assert_eq!(got.is_some(), n == PIECES);
        }
        assert_eq!((r.memory(), r.expired()), (0, 0));

        let all = pieces(PIECES + 1);
        for piece in &all[..PIECES] {
            let got = push(&r, piece, Instant::ZERO).expect("the space suffices");
            assert!(got.is_none());
        }
        assert_eq!(r.waiting(), PIECES);
        let last = push(&r, &all[PIECES], Instant::ZERO);
        assert!(matches!(last, Err(FrameDrop::BadFragment)));
        assert_eq!((r.memory(), r.waiting(), r.expired()), (0, 0, 1024));
    }
}

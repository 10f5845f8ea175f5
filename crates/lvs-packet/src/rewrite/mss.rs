//! Lowers the maximum segment size in a TCP SYN (RFC 9293 section 3.7.1).

use lvs_core::Protocol;

use crate::frame::Frame;
use crate::parse::Packet;
use crate::wire::checksum::Delta;
use crate::wire::tcp::{self, field, header_len};
use crate::wire::{be16, put16};

const SYN: u8 = 2;
const ACK: u8 = 16;
const END: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;
const MSS_LEN: u8 = 4;

/// Whether `packet`, whose bytes are `ip`, is a TCP SYN, with or without ACK.
#[inline]
pub fn opens(ip: &[u8], packet: &Packet) -> bool {
    packet.protocol == Protocol::TCP
        && ip
            .get(packet.l4 + field::FLAGS)
            .is_some_and(|flags| flags & SYN != 0)
}

/// Whether `packet`, whose bytes are `ip`, is a TCP SYN without ACK.
#[inline]
pub fn asks(ip: &[u8], packet: &Packet) -> bool {
    packet.protocol == Protocol::TCP
        && ip
            .get(packet.l4 + field::FLAGS)
            .is_some_and(|flags| flags & (SYN | ACK) == SYN)
}

/// Lowers the maximum segment size in the SYN in `frame`, whose header fields are `packet`, to
/// `limit`. Returns whether it was greater. A SYN without the option has the default size, and
/// stays unchanged.
pub fn clamp(frame: &mut Frame, packet: &Packet, limit: u16) -> bool {
    let unfinished = frame
        .offload
        .checksum
        .is_some_and(|partial| usize::from(partial.start) == packet.l4);
    let Some(tcp) = frame.bytes_mut().get_mut(packet.l4..) else {
        return false;
    };
    let Some(at) = tcp.get(..header_len(tcp)).and_then(find) else {
        return false;
    };
    let asked = be16(tcp, at);
    if asked <= limit {
        return false;
    }
    put16(tcp, at, limit);
    if !unfinished {
        // At an odd offset, the two bytes belong to two words of the sum; exchanged, they have the
        // same sum (RFC 1071 section 2 B).
        let (old, new) = if at % 2 == 0 {
            (asked, limit)
        } else {
            (asked.swap_bytes(), limit.swap_bytes())
        };
        let sum = Delta::NONE.word(old, new).apply(be16(tcp, field::CHECKSUM));
        put16(tcp, field::CHECKSUM, sum);
    }
    true
}

/// Position of the maximum segment size in a TCP header.
fn find(header: &[u8]) -> Option<usize> {
    let mut at = tcp::HEADER_LEN;
    loop {
        match *header.get(at)? {
            END => return None,
            NOP => at += 1,
            kind => {
                let len = *header.get(at + 1)?;
                if kind == MSS && len == MSS_LEN && at + 4 <= header.len() {
                    return Some(at + 2);
                }
                if len < 2 {
                    return None;
                }
                at += usize::from(len);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::PartialChecksum;
    use crate::parse;
    use crate::segment::finish_checksum;
    use crate::wire::checksum::Sum;
    use crate::wire::tcp::checksum_ok;
    use crate::wire::{ip_dst, ip_src};
    use etherparse::{PacketBuilder, TcpOptionElement};
    use proptest::prelude::*;

    fn syn(six: bool, options: &[u8]) -> (Vec<u8>, usize) {
        let builder = if six {
            PacketBuilder::ipv6([1; 16], [2; 16], 64)
        } else {
            PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        };
        let mut ip = Vec::new();
        builder
            .tcp(1, 2, 3, 4)
            .syn()
            .options_raw(options)
            .expect("the options have at most 40 bytes")
            .write(&mut ip, &[])
            .expect("writing to a vector succeeds");
        (ip, if six { 40 } else { 20 })
    }

    proptest! {
        #[test]
        fn mss_clamp_lowers_only_larger_size_and_keeps_checksum_correct(six: bool, pad in 0usize..4, asked: u16, limit in 536u16.., partial: bool) {
            let mut options = vec![NOP; pad];
            options.extend([MSS, MSS_LEN]);
            options.extend(asked.to_be_bytes());
            let (ip, l4) = syn(six, &options);
            let mut frame = Frame::from_bytes(&ip);
            if partial {
                let sum = Sum::ZERO.pseudo(ip_src(&ip), ip_dst(&ip), 6, ip.len() - l4).fold();
                put16(frame.bytes_mut(), l4 + 16, sum);
                let start = u16::try_from(l4).expect("the number is small");
                frame.offload.checksum = Some(PartialChecksum { start, offset: 16 });
            }
            let packet = parse::ip(&ip, false).expect("the packet is valid");
            prop_assert!(opens(&ip, &packet));
            prop_assert_eq!(clamp(&mut frame, &packet, limit), asked > limit);
            finish_checksum(&mut frame).expect("the checksum field is inside the packet");
            prop_assert!(checksum_ok(frame.bytes(), l4, 6));
            let (headers, _) = etherparse::TcpHeader::from_slice(&frame.bytes()[l4..]).expect("the bytes are a TCP header");
            let reported = headers.options_iterator().find_map(|option| match option {
                Ok(TcpOptionElement::MaximumSegmentSize(size)) => Some(size),
                _ => None,
            });
            prop_assert_eq!(reported, Some(asked.min(limit)));
        }

        #[test]
        fn mss_parser_of_any_options_does_not_panic(options in proptest::collection::vec(any::<u8>(), 0..40), cut in 0usize..60) {
            let (mut ip, _) = syn(false, &options);
            let packet = parse::ip(&ip, false).expect("the packet is valid");
            ip.truncate(ip.len().saturating_sub(cut));
            let len = ip.len();
            let mut frame = Frame::from_bytes(&ip);
            clamp(&mut frame, &packet, 536);
            prop_assert_eq!(frame.len(), len);
        }
    }
}

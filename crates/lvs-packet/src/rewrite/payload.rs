//! Changes that a helper makes to TCP segments: text, sequence numbers, and acknowledgements
//! (`nf_nat_mangle_tcp_packet`, `nf_ct_seq_adjust`). Addresses and ports are translated before.

use lvs_core::edit::{Edit, Shift};
use lvs_core::{Protocol, TcpFlags};

use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::parse::Packet;
use crate::wire::checksum::{Delta, Sum};
use crate::wire::{be16, be32, ip_dst, ip_src, ipv4, ipv6, put16, put32, tcp};

const SEQUENCE: usize = tcp::field::SEQUENCE.start;
const ACKNOWLEDGEMENT: usize = tcp::field::ACKNOWLEDGEMENT.start;
const CHECKSUM: usize = tcp::field::CHECKSUM.start;
const OPTIONS: usize = tcp::HEADER_LEN;

/// The kind that ends the list of TCP options (RFC 9293 section 3.1).
const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_SACK: u8 = 5;

/// Makes the change `edit` to a server's segment, whose header fields are `packet`. The segment's
/// checksum must be correct.
///
/// # Errors
/// [`FrameDrop::NoRoom`], without a change, if the segment would be longer than the longest packet,
/// the frame has too little headroom, or the text to replace is not within the frame.
pub fn edit(frame: &mut Frame, packet: &Packet, edit: &Edit) -> Result<(), FrameDrop> {
    let l4 = packet.l4;
    if let Some(replacement) = &edit.replacement {
        let payload = l4 + header_len(frame.bytes(), l4);
        let place = replacement.place();
        let place = payload + place.start..payload + place.end;
        let len = frame.len() - l4;
        let longest = usize::from(u16::MAX)
            + if packet.is_ipv6() {
                ipv6::HEADER_LEN
            } else {
                0
            };
        let grown = frame.len() + replacement.text().len() - place.len().min(frame.len());
        if grown > longest || !frame.replace(place, replacement.text()) {
            return Err(FrameDrop::NoRoom);
        }
        finish(frame, packet, len);
    }
    let sent = be32(frame.bytes(), l4 + SEQUENCE);
    let mut delta = Delta::NONE;
    store(
        frame.bytes_mut(),
        l4,
        SEQUENCE,
        edit.shift.sequence(sent),
        &mut delta,
    );
    update(frame, l4, delta);
    Ok(())
}

/// Translates the acknowledgement of the TCP segment at `l4`, and its selective acknowledgements,
/// to the server's own numbers.
pub fn acknowledge(frame: &mut Frame, l4: usize, shift: Shift) {
    let end = header_len(frame.bytes(), l4);
    let ip = frame.bytes_mut();
    if ip.len() < l4 + OPTIONS || !TcpFlags(ip[l4 + tcp::field::FLAGS]).has(TcpFlags::ACK) {
        return;
    }
    let mut delta = Delta::NONE;
    let mut turn = |ip: &mut [u8], at| {
        let seen = be32(ip, l4 + at);
        store(ip, l4, at, shift.acknowledgement(seen), &mut delta);
    };
    turn(ip, ACKNOWLEDGEMENT);
    let mut at = OPTIONS;
    while at < end {
        let (kind, len) = match (ip[l4 + at], ip.get(l4 + at + 1)) {
            (OPTION_END, _) => break,
            (OPTION_NOP, _) => (OPTION_NOP, 1),
            (kind, Some(&len)) => (kind, usize::from(len)),
            (_, None) => break,
        };
        // The option is incomplete, so that no further option can be read.
        if len == 0 || (kind != OPTION_NOP && len < 2) || at + len > end {
            break;
        }
        if kind == OPTION_SACK && len % 8 == 2 {
            (at + 2..at + len)
                .step_by(4)
                .for_each(|edge| turn(ip, edge));
        }
        at += len;
    }
    update(frame, l4, delta);
}

/// Length in bytes of the TCP header at `l4`; 0 if it is truncated.
fn header_len(ip: &[u8], l4: usize) -> usize {
    let tcp = ip.get(l4..).unwrap_or_default();
    tcp::header_len(tcp).min(tcp.len())
}

/// Writes a number at offset `at` of the TCP header at `l4`, and adds the change to `delta` for the
/// checksum.
fn store(ip: &mut [u8], l4: usize, at: usize, number: u32, delta: &mut Delta) {
    let words = |number: u32| {
        let [a, b, c, d] = number.to_be_bytes();
        // Options may begin at odd offsets, where the high and low bytes of the sum are exchanged.
        if at.is_multiple_of(2) {
            [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])]
        } else {
            [u16::from_be_bytes([b, a]), u16::from_be_bytes([d, c])]
        }
    };
    let (old, new) = (words(be32(ip, l4 + at)), words(number));
    *delta = delta.word(old[0], new[0]).word(old[1], new[1]);
    put32(ip, l4 + at, number);
}

/// Whether the TCP checksum is left to a device: the field contains only the sum of the
/// pseudo-header.
fn is_unfinished(frame: &Frame, l4: usize) -> bool {
    frame.offload.checksum.is_some_and(|partial| {
        usize::from(partial.start) == l4 && usize::from(partial.offset) == CHECKSUM
    })
}

/// Updates the checksum at `l4`, unless it is left to a device.
fn update(frame: &mut Frame, l4: usize, delta: Delta) {
    if !is_unfinished(frame, l4) {
        let at = l4 + CHECKSUM;
        let ip = frame.bytes_mut();
        put16(ip, at, delta.apply(be16(ip, at)));
    }
}

/// Writes lengths and checksums after the payload has changed; `len` is the length of the segment
/// before.
fn finish(frame: &mut Frame, packet: &Packet, len: usize) {
    let l4 = packet.l4;
    let unfinished = is_unfinished(frame, l4);
    let total = frame.len();
    let ip = frame.bytes_mut();
    if packet.is_ipv6() {
        ipv6::finish_len(ip);
    } else {
        ipv4::set_total_len(ip, u16::try_from(total).unwrap_or(u16::MAX));
    }
    let at = l4 + CHECKSUM;
    if unfinished {
        // The pseudo-header contains the length.
        let word = |len: usize| u16::try_from(len).unwrap_or(u16::MAX);
        let delta = Delta::NONE.word(word(len), word(total - l4));
        put16(ip, at, delta.apply_unfinished(be16(ip, at)));
    } else {
        put16(ip, at, 0);
        let sum = Sum::ZERO
            .pseudo(ip_src(ip), ip_dst(ip), Protocol::TCP.0, total - l4)
            .bytes(&ip[l4..])
            .finish();
        put16(ip, at, sum);
    }
}

//! Fragments: putting them together and cutting anew (RFC 791, RFC 8200 section 4.5), by the kernel's rules.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use lvs_core::Instant;

use crate::packet::drop::FrameDrop;
use crate::packet::frame::{Frame, Offload};
use crate::packet::parse::{Fragment, Packet};
use crate::packet::wire::{be16, ipv4, ipv6, put16, put32};

/// How long a datagram waits for its missing fragments (`net.ipv4.ipfrag_time`).
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of unfinished datagrams at most (`net.ipv4.ipfrag_high_thresh`).
pub const MEMORY_MAX: usize = 4 << 20;
/// Fragments of one datagram at most; 64 KiB in pieces of 68 bytes are fewer.
const PIECES_MAX: usize = 1024;
/// What a stored fragment costs beside its bytes.
const PIECE_COST: usize = 64;
/// What a datagram costs before its first fragment: its place in the table, and room for pieces.
const QUEUE_COST: usize = 320;

/// A datagram that was put together.
#[derive(Debug)]
pub struct Assembled {
    /// The datagram: a bare IP packet.
    pub frame: Frame,
    /// How it had been cut.
    pub history: History,
}

/// How a datagram had been cut when it came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Payload bytes of each fragment, in order.
    pub sizes: Vec<usize>,
    /// Length of the longest fragment, IP header included.
    pub longest: usize,
    /// Length of the headers that each fragment had; of IPv6, those before the fragment header.
    pub headers: usize,
    /// The longest fragment was not to be cut, so nothing is that it becomes (`IPSKB_FRAG_PMTU`). IPv4 only.
    pub df: bool,
}

impl History {
    /// The pieces of the datagram, of any IP version, behind the first `headers` bytes of a packet that has `added` bytes
    /// in front of it. Empty if the first piece had not even the headers.
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

/// Cuts the IPv4 packet in `frame` into fragments of at most `mtu` bytes, which `emit` gets. `boundaries` are the payload
/// sizes to keep, where they fit; else the pieces are even. `df` is what the fragments carry. Checksums must be finished.
pub fn fragment(
    frame: &Frame,
    mtu: usize,
    boundaries: Option<&[usize]>,
    df: bool,
    mut spare: impl FnMut() -> Frame,
    mut emit: impl FnMut(Frame),
) -> Result<usize, FrameDrop> {
    let ip = frame.bytes();
    let header_len = ipv4::header_len(ip);
    let room = mtu.saturating_sub(header_len) & !7;
    if room < 8 || header_len > ip.len() {
        return Err(FrameDrop::MtuTooSmall);
    }
    let data = &ip[header_len..];
    let flags = be16(ip, 6);
    let first = usize::from(flags & ipv4::OFFSET) * 8;
    let keep = boundaries.filter(|sizes| {
        sizes.iter().sum::<usize>() == data.len()
            && sizes.iter().all(|size| size + header_len <= mtu)
            && sizes.iter().rev().skip(1).all(|size| size % 8 == 0)
    });
    let mut at = 0;
    let mut count = 0;
    while at < data.len() {
        let left = data.len() - at;
        let size = match keep {
            Some(sizes) => sizes[count],
            // A remainder that fits is one piece, even if it is not a multiple of 8.
            None if left + header_len <= mtu => left,
            None => room,
        }
        .min(left);
        if size == 0 {
            count += 1;
            continue;
        }
        let mut piece = spare();
        piece.clear();
        if !piece.extend(&ip[..header_len]) || !piece.extend(&data[at..at + size]) {
            return Err(FrameDrop::NoRoom);
        }
        piece.offload = Offload::default();
        let out = piece.bytes_mut();
        let more = at + size < data.len() || flags & ipv4::MF != 0;
        let offset = u16::try_from((first + at) / 8).unwrap_or(ipv4::OFFSET) & ipv4::OFFSET;
        let word = offset | if more { ipv4::MF } else { 0 } | if df { ipv4::DF } else { 0 };
        put16(out, 2, u16::try_from(header_len + size).unwrap_or(u16::MAX));
        put16(out, 6, word);
        if at > 0 {
            blank_options(&mut out[ipv4::HEADER_LEN..header_len]);
        }
        ipv4::finish_header(out);
        emit(piece);
        at += size;
        count += 1;
    }
    Ok(count)
}

/// Cuts the IPv6 packet in `frame` into fragments of at most `mtu` bytes, which `emit` gets, all with `id`. `boundaries` are
/// the sizes to keep of what follows the unfragmentable headers, if they all fit; else the pieces are even.
///
/// # Errors
/// [`FrameDrop::MtuTooSmall`], [`FrameDrop::NoRoom`].
pub fn fragment6(
    frame: &Frame,
    mtu: usize,
    boundaries: Option<&[usize]>,
    id: u32,
    mut spare: impl FnMut() -> Frame,
    mut emit: impl FnMut(Frame),
) -> Result<usize, FrameDrop> {
    let ip = frame.bytes();
    let (headers, named_at) = ipv6::unfragmentable(ip);
    let room = mtu.saturating_sub(headers + ipv6::FRAGMENT_LEN);
    if room < 8 || headers > ip.len() {
        return Err(FrameDrop::MtuTooSmall);
    }
    let data = &ip[headers..];
    let next = ip.get(named_at).copied().unwrap_or(0);
    let keep = boundaries.filter(|sizes| {
        sizes.iter().sum::<usize>() == data.len()
            && sizes.iter().all(|&size| size > 0 && size <= room)
            && sizes.iter().rev().skip(1).all(|size| size % 8 == 0)
    });
    let mut at = 0;
    let mut count = 0;
    while at < data.len() || count == 0 {
        let left = data.len() - at;
        let size = match keep {
            Some(sizes) => sizes[count],
            None if left <= room => left,
            None => room & !7,
        };
        let more = at + size < data.len();
        let offset = u16::try_from(at).map_err(|_| FrameDrop::BadFragment)? & 0xfff8;
        let mut header = [0; ipv6::FRAGMENT_LEN];
        header[0] = next;
        put16(&mut header, 2, offset | u16::from(more));
        put32(&mut header, 4, id);
        let mut piece = spare();
        piece.clear();
        if !piece.extend(&ip[..headers])
            || !piece.extend(&header)
            || !piece.extend(&data[at..at + size])
        {
            return Err(FrameDrop::NoRoom);
        }
        let out = piece.bytes_mut();
        out[named_at] = ipv6::FRAGMENT;
        ipv6::finish_len(out);
        emit(piece);
        at += size;
        count += 1;
    }
    Ok(count)
}

/// Later fragments carry only the options whose "copied" bit is set; the others become padding (`ip_options_fragment`).
fn blank_options(options: &mut [u8]) {
    const END: u8 = 0;
    const NOP: u8 = 1;
    let mut at = 0;
    while at < options.len() {
        match options[at] {
            END => return,
            NOP => at += 1,
            kind => {
                let len = usize::from(options.get(at + 1).copied().unwrap_or(0));
                if len < 2 || at + len > options.len() {
                    return;
                }
                if kind & 0x80 == 0 {
                    options[at..at + len].fill(NOP);
                }
                at += len;
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    src: IpAddr,
    dst: IpAddr,
    id: u32,
    /// IPv4 only.
    protocol: u8,
    /// IPv4 datagrams to this host and those passing through are put together apart.
    local: bool,
}

#[derive(Debug)]
struct Piece {
    offset: usize,
    data: Vec<u8>,
    /// Length of the fragment as it came.
    len: usize,
}

#[derive(Debug)]
struct Queue {
    since: Instant,
    pieces: Vec<Piece>,
    header: Option<Vec<u8>>,
    /// Where the datagram's payload ends, once the last fragment is here.
    end: Option<usize>,
    cost: usize,
    longest: usize,
    longest_df: usize,
    /// A bit for each ECN codepoint that was seen.
    ecn: u8,
}

/// Datagrams that wait for their missing fragments. Bounded in memory; the oldest ones give way.
#[derive(Debug, Default)]
pub struct Reassembler {
    queues: HashMap<Key, Queue>,
    memory: usize,
    /// Fragments that were given up: timed out, or in contradiction.
    pub expired: u64,
}

impl Reassembler {
    /// Takes in the fragment `ip`, which `packet` describes; the datagram, when this was its last missing piece.
    ///
    /// # Errors
    /// [`FrameDrop::BadFragment`]: the fragment is discarded, and the whole datagram with it if it overlaps another
    /// fragment (RFC 5722 for IPv6, which the kernel applies to IPv4 as well).
    pub fn push(
        &mut self,
        ip: &[u8],
        packet: &Packet,
        fragment: Fragment,
        local: bool,
        now: Instant,
    ) -> Result<Option<Assembled>, FrameDrop> {
        let six = packet.is_ipv6();
        let key = Key {
            src: packet.src,
            dst: packet.dst,
            id: fragment.id,
            protocol: if six { 0 } else { packet.protocol.0 },
            local: local && !six,
        };
        let Some(payload) = ip.get(packet.l4..packet.len) else {
            return Err(FrameDrop::Truncated);
        };
        if six && fragment.offset == 0 && !ipv6::has_upper_header(&ip[..packet.len]) {
            return Err(FrameDrop::TinyFragment);
        }
        // All but the last carry a multiple of 8; what exceeds that is cut off, or is an error of an IPv6 sender.
        let size = if fragment.more && six && payload.len() % 8 != 0 {
            0
        } else if fragment.more {
            payload.len() & !7
        } else {
            payload.len()
        };
        let end = fragment.offset + size;
        let headers = if six {
            packet.l4 - ipv6::FRAGMENT_LEN
        } else {
            packet.l4
        };
        let counted = if six {
            headers - ipv6::HEADER_LEN
        } else {
            headers
        };
        if size == 0 || end + counted > usize::from(u16::MAX) {
            return Err(FrameDrop::BadFragment);
        }
        // As the kernel does (`inet_frag_create`), what is new is refused when the room is taken: to look for something
        // older to give up would cost an attacker nothing and the director a lot.
        if self.memory + size + PIECE_COST + QUEUE_COST > MEMORY_MAX {
            return Err(FrameDrop::FragmentMemory);
        }
        let memory = &mut self.memory;
        let queue = self.queues.entry(key).or_insert_with(|| {
            *memory += QUEUE_COST;
            Queue {
                since: now,
                pieces: Vec::new(),
                header: None,
                end: None,
                cost: QUEUE_COST,
                longest: 0,
                longest_df: 0,
                ecn: 0,
            }
        });
        let reach = queue
            .pieces
            .iter()
            .map(|p| p.offset + p.data.len())
            .max()
            .unwrap_or(0);
        let contradicts = match queue.end {
            Some(known) => end > known || (!fragment.more && end != known),
            None => !fragment.more && end < reach,
        };
        if contradicts {
            return Err(FrameDrop::BadFragment);
        }
        // A repetition is dropped alone, an overlap kills the datagram (`inet_frag_queue_insert`).
        for piece in &queue.pieces {
            let there = piece.offset + piece.data.len();
            if fragment.offset < there && piece.offset < end {
                if !(piece.offset <= fragment.offset && end <= there) {
                    self.remove(&key);
                }
                return Err(FrameDrop::BadFragment);
            }
        }
        if queue.pieces.len() >= PIECES_MAX {
            self.remove(&key);
            return Err(FrameDrop::BadFragment);
        }
        if !fragment.more {
            queue.end = Some(end);
        }
        if fragment.offset == 0 {
            let mut header = ip[..headers].to_vec();
            if six {
                // The datagram has no fragment header.
                header[fragment.named_at] = packet.protocol.0;
            }
            queue.header = Some(header);
        }
        queue.ecn |= 1 << (packet.tos & 3);
        queue.longest = queue.longest.max(packet.len);
        if packet.df {
            queue.longest_df = queue.longest_df.max(packet.len);
        }
        let cost = size + PIECE_COST;
        queue.cost += cost;
        queue.pieces.push(Piece {
            offset: fragment.offset,
            data: payload[..size].to_vec(),
            len: packet.len,
        });
        self.memory += cost;
        let have: usize = queue.pieces.iter().map(|p| p.data.len()).sum();
        if queue.end == Some(have) && queue.header.is_some() {
            return self.assemble(&key).map(Some);
        }
        Ok(None)
    }

    fn assemble(&mut self, key: &Key) -> Result<Assembled, FrameDrop> {
        let queue = self.queues.remove(key).ok_or(FrameDrop::BadFragment)?;
        self.memory -= queue.cost;
        let Queue {
            mut pieces,
            header,
            longest,
            longest_df,
            ecn,
            ..
        } = queue;
        let header = header.ok_or(FrameDrop::BadFragment)?;
        pieces.sort_unstable_by_key(|piece| piece.offset);
        // RFC 3168 section 5.3: congestion seen by one fragment was seen by the datagram; a mix with Not-ECT is invalid.
        const NOT_ECT: u8 = 1;
        const CE: u8 = 1 << 3;
        if ecn & NOT_ECT != 0 && ecn != NOT_ECT {
            self.expired += pieces.len() as u64;
            return Err(FrameDrop::BadFragment);
        }
        let len = header.len() + pieces.iter().map(|p| p.data.len()).sum::<usize>();
        let mut frame = Frame::with_capacity(len);
        let mut fits = frame.extend(&header);
        for piece in &pieces {
            fits &= frame.extend(&piece.data);
        }
        if !fits {
            return Err(FrameDrop::BadFragment);
        }
        let ip = frame.bytes_mut();
        let df = longest_df == longest;
        if key.src.is_ipv6() {
            ipv6::finish_len(ip);
            if ecn & CE != 0 {
                ipv6::set_congestion(ip);
            }
        } else {
            put16(
                ip,
                2,
                u16::try_from(len).map_err(|_| FrameDrop::BadFragment)?,
            );
            // The datagram keeps "don't fragment" if its longest fragment had it (`ip_frag_reasm`).
            put16(ip, 6, if df { ipv4::DF } else { 0 });
            if ecn & CE != 0 {
                ip[1] |= 3;
            }
            ipv4::finish_header(ip);
        }
        let history = History {
            headers: header.len(),
            sizes: pieces.iter().map(|p| p.data.len()).collect(),
            longest,
            df,
        };
        debug_assert!(pieces.iter().all(|p| p.len <= longest));
        Ok(Assembled { frame, history })
    }

    fn remove(&mut self, key: &Key) {
        if let Some(queue) = self.queues.remove(key) {
            self.memory -= queue.cost;
            self.expired += queue.pieces.len() as u64;
        }
    }

    /// Gives up the datagrams that have waited for [`TIMEOUT`].
    pub fn expire(&mut self, now: Instant) {
        let (memory, expired) = (&mut self.memory, &mut self.expired);
        self.queues.retain(|_, queue| {
            let keep = now.saturating_since(queue.since) < TIMEOUT;
            if !keep {
                *memory -= queue.cost;
                *expired += queue.pieces.len() as u64;
            }
            keep
        });
    }

    /// Fragments that wait.
    pub fn waiting(&self) -> usize {
        self.queues.values().map(|queue| queue.pieces.len()).sum()
    }

    /// Bytes that the waiting fragments are taken to cost.
    pub const fn memory(&self) -> usize {
        self.memory
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use crate::packet::parse;
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    fn datagram(len: usize) -> Vec<u8> {
        let data: Vec<u8> = (0..len).map(|i| i as u8).collect();
        let mut ip = Vec::new();
        PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .udp(1, 2)
            .write(&mut ip, &data)
            .expect("a vector takes all");
        put16(&mut ip, 4, 77);
        put16(&mut ip, 6, 0);
        ipv4::finish_header(&mut ip);
        ip
    }

    fn cut(ip: &[u8], mtu: usize) -> Vec<Frame> {
        let mut pieces = Vec::new();
        fragment(&Frame::from_bytes(ip), mtu, None, false, Frame::new, |f| {
            pieces.push(f);
        })
        .expect("mtu is enough");
        pieces
    }

    fn push(
        r: &mut Reassembler,
        frame: &Frame,
        now: Instant,
    ) -> Result<Option<Assembled>, FrameDrop> {
        let p = parse::ip(frame.bytes(), false).expect("valid");
        r.push(
            frame.bytes(),
            &p,
            p.fragment.expect("a fragment"),
            true,
            now,
        )
    }

    proptest! {
        #[test]
        fn what_is_cut_of_ipv6_is_put_together(len in 1300usize..9000, mtu in 100usize..1280, options: bool, atomic: bool, seed: u64) {
            let data: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let mut ip = Vec::new();
            PacketBuilder::ipv6([1; 16], [2; 16], 64)
                .udp(1, 2)
                .write(&mut ip, &data)
                .expect("a vector takes all");
            if options {
                // Hop-by-hop options with a router alert.
                ip.splice(40..40, [17, 0, 5, 2, 0, 0, 1, 0]);
                ip[6] = 0;
                ipv6::finish_len(&mut ip);
            }
            let mtu = if atomic { 20_000 } else { mtu };
            let mut pieces = Vec::new();
            fragment6(&Frame::from_bytes(&ip), mtu, None, 99, Frame::new, |f| pieces.push(f)).expect("mtu is enough");
            for p in &pieces {
                prop_assert!(p.len() <= mtu);
                prop_assert!(etherparse::SlicedPacket::from_ip(p.bytes()).is_ok());
            }
            let n = pieces.len();
            for i in 0..n {
                pieces.swap(i, (seed.rotate_left(i as u32 % 64) % n as u64) as usize);
            }
            let mut r = Reassembler::default();
            let mut done = None;
            for (i, piece) in pieces.iter().enumerate() {
                let got = push(&mut r, piece, Instant::ZERO).expect("no contradiction");
                prop_assert_eq!(got.is_some(), i + 1 == n);
                done = got;
            }
            let done = done.expect("complete");
            prop_assert_eq!(done.frame.bytes(), &ip[..]);
            prop_assert_eq!(r.memory(), 0);
            // And again along the old boundaries.
            let sizes = done.history.behind(ipv6::unfragmentable(&ip).0, 0);
            let mut again = Vec::new();
            fragment6(&done.frame, mtu, Some(&sizes), 1, Frame::new, |f| again.push(f.len())).expect("fits");
            prop_assert_eq!(again.len(), n);
        }

        /// The kernel discards a first fragment that ends before the header of its protocol does (RFC 8200 section 4.5).
        #[test]
        fn a_first_fragment_of_ipv6_has_the_whole_header(tcp: bool, options: bool, len in 8usize..60) {
            let len = len & !7;
            let protocol = if tcp { 6 } else { 17 };
            let mut ip = vec![0; 40];
            ipv6::write_header(&mut ip, protocol, 64, [1; 16].into(), [2; 16].into(), 0);
            ip.extend(0..64u8);
            let mut header = if tcp { 20 } else { 8 };
            if options {
                ip.splice(40..40, [protocol, 0, 1, 4, 0, 0, 0, 0]);
                // Behind the fragment header: destination options.
                ip[6] = 60;
                header += 8;
            }
            let next = ip[6];
            ip[6] = ipv6::FRAGMENT;
            ip.splice(40..40, [next, 0, 0, 1, 0, 0, 0, 9]);
            ip.truncate(48 + len);
            ipv6::finish_len(&mut ip);
            let got = push(&mut Reassembler::default(), &Frame::from_bytes(&ip), Instant::ZERO);
            prop_assert_eq!(got.is_ok(), len >= header, "{:?}", got);
        }

        #[test]
        fn what_is_cut_is_put_together(len in 600usize..5000, mtu in 68usize..600, seed: u64) {
            let ip = datagram(len);
            let mut pieces = cut(&ip, mtu);
            for p in &pieces {
                prop_assert!(p.len() <= mtu);
            }
            let longest = pieces.iter().map(Frame::len).max();
            let n = pieces.len();
            for i in 0..n {
                pieces.swap(i, (seed.rotate_left(i as u32 % 64) % n as u64) as usize);
            }
            let mut r = Reassembler::default();
            let mut done = None;
            for (i, piece) in pieces.iter().enumerate() {
                let got = push(&mut r, piece, Instant::ZERO).expect("no contradiction");
                prop_assert_eq!(got.is_some(), i + 1 == n);
                done = got;
            }
            let done = done.expect("complete");
            prop_assert_eq!(done.frame.bytes(), &ip[..]);
            prop_assert_eq!(Some(done.history.longest), longest);
            prop_assert_eq!(r.memory(), 0);
            // And again along the old boundaries.
            let mut again = Vec::new();
            fragment(&done.frame, mtu, Some(&done.history.sizes), false, Frame::new, |f| again.push(f.len())).expect("fits");
            prop_assert_eq!(again.len(), n);
        }
    }

    #[test]
    fn an_overlap_kills_the_datagram_and_a_repetition_does_not() {
        let ip = datagram(1000);
        let pieces = cut(&ip, 420);
        let mut r = Reassembler::default();
        assert!(
            push(&mut r, &pieces[0], Instant::ZERO)
                .expect("first")
                .is_none()
        );
        assert!(matches!(
            push(&mut r, &pieces[0], Instant::ZERO),
            Err(FrameDrop::BadFragment)
        ));
        assert_eq!(r.waiting(), 1);
        let other = cut(&ip, 300);
        assert!(matches!(
            push(&mut r, &other[1], Instant::ZERO),
            Err(FrameDrop::BadFragment)
        ));
        assert_eq!((r.waiting(), r.memory()), (0, 0));
    }

    /// RFC 8200 section 4.5: nothing of a datagram with overlapping fragments is delivered, whatever else comes.
    #[test]
    fn overlapping_fragments_of_ipv6_are_never_put_together() {
        let mut ip = Vec::new();
        PacketBuilder::ipv6([1; 16], [2; 16], 64)
            .udp(1, 2)
            .write(&mut ip, &[9; 3000])
            .expect("a vector takes all");
        let cut = |mtu: usize| {
            let mut pieces = Vec::new();
            fragment6(&Frame::from_bytes(&ip), mtu, None, 7, Frame::new, |f| {
                pieces.push(f);
            })
            .expect("mtu is enough");
            pieces
        };
        let (honest, other) = (cut(1280), cut(600));
        let mut r = Reassembler::default();
        assert!(
            push(&mut r, &honest[0], Instant::ZERO)
                .expect("first")
                .is_none()
        );
        // It begins within the first one and ends behind it.
        let overlap = other.iter().find(|piece| {
            let header = ipv6::walk(piece.bytes()).and_then(|chain| chain.fragment);
            let (header, _) = header.expect("a fragment");
            let end = header.offset + piece.len() - 48;
            header.offset < 1232 && end > 1232
        });
        let overlap = overlap.expect("sizes differ");
        assert!(matches!(
            push(&mut r, overlap, Instant::ZERO),
            Err(FrameDrop::BadFragment)
        ));
        assert_eq!((r.waiting(), r.memory(), r.expired), (0, 0, 1));
        for piece in &honest[1..] {
            assert!(push(&mut r, piece, Instant::ZERO).expect("alone").is_none());
        }
    }

    #[test]
    fn memory_is_bounded_and_time_is_too() {
        let ip = datagram(3000);
        let mut r = Reassembler::default();
        let (mut taken, mut refused) = (0u64, 0u64);
        for id in 0..20_000u16 {
            let mut piece = cut(&ip, 1500).swap_remove(0);
            ipv4::set_id(piece.bytes_mut(), id);
            match push(&mut r, &piece, Instant::ZERO) {
                Ok(None) => taken += 1,
                Err(FrameDrop::FragmentMemory) => refused += 1,
                other => panic!("{other:?}"),
            }
            assert!(r.memory() <= MEMORY_MAX);
        }
        assert!(
            taken > 2000 && taken + refused == 20_000,
            "{taken} and {refused}"
        );
        let later = Instant::ZERO + TIMEOUT;
        r.expire(later);
        assert_eq!((r.memory(), r.waiting()), (0, 0));
        assert_eq!(r.expired, taken);
    }
}

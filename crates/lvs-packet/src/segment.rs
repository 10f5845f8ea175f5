//! Work that senders leave to network devices, in software: it completes checksums, and cuts
//! GSO/GRO super-packets into segments.

use std::ops::Range;

use lvs_core::Protocol;

use crate::drop::FrameDrop;
use crate::frame::{Frame, PartialChecksum, SegmentKind};
use crate::parse::Packet;
use crate::wire::checksum::{self, Sum};
use crate::wire::{be16, be32, ip_dst, ip_src, ipv4, ipv6, is_ipv6, put16, put32, tcp, udp};

/// Minimum number of bytes of options and payload in a TCP segment (Linux's `TCP_MIN_SND_MSS`). No
/// IPv4 link has an MTU below 68 bytes (RFC 791 section 3.2).
const TCP_LEAST: usize = 48;
/// Maximum number of segments of a TCP super-packet: 64 KiB of the smallest segments.
const TCP_MOST: usize = 65_535 / TCP_LEAST;
/// Maximum number of segments into which the dataplane cuts a super-packet, to limit the number of
/// frames that one received frame becomes. 64 KiB in 512 segments are segments of 128 bytes. If the
/// segments are smaller, the super-packet is dropped; the sender's TCP then repeats the segments
/// one by one, and these are forwarded.
const CUT_MOST: usize = 512;
/// Maximum number of segments of a TCP super-packet whose segments are smaller than [`TCP_LEAST`],
/// because a few of them are harmless.
const TINY_MOST: usize = 64;
/// Maximum number of datagrams of a UDP super-packet (Linux's `UDP_MAX_SEGMENTS`).
const UDP_MOST: usize = 128;
const IPV4_HEADER_MAX: usize = 60;
const FIN_PSH: u8 = 0x09;
const CWR: u8 = 0x80;

/// Completes the checksum of `frame`, if its sender has left it to a device.
///
/// # Errors
/// [`FrameDrop::BadOffload`] if the checksum is outside of the frame.
#[inline]
pub fn finish_checksum(frame: &mut Frame) -> Result<(), FrameDrop> {
    match frame.offload.checksum {
        None => Ok(()),
        Some(partial) => finish(frame, partial),
    }
}

fn finish(frame: &mut Frame, partial: PartialChecksum) -> Result<(), FrameDrop> {
    let start = usize::from(partial.start);
    let at = start + usize::from(partial.offset);
    let bytes = frame.bytes();
    let size = if partial.is_crc() { 4 } else { 2 };
    if start > bytes.len() || at + size > bytes.len() {
        return Err(FrameDrop::BadOffload);
    }
    frame.offload.checksum = None;
    let bytes = frame.bytes_mut();
    if partial.is_crc() {
        let sum = checksum::sctp(&bytes[start..]);
        bytes[at..at + size].copy_from_slice(&sum);
        return Ok(());
    }
    // The field contains the sum of the pseudo-header, so the sum over all bytes is the checksum.
    let sum = Sum::ZERO.bytes(&bytes[start..]).finish();
    // A UDP checksum of zero means "no checksum". Other protocols can store either zero.
    put16(bytes, at, if sum == 0 { 0xffff } else { sum });
    Ok(())
}

/// Checks that the checksum and the segmentation that the sender of `frame` requests are possible:
/// the checksum is within the payload of the packet, and the super-packet has the packet's own
/// protocol, or is TCP or UDP inside a tunnel over UDP. A guest on a virtual link can request
/// anything.
///
/// # Errors
/// [`FrameDrop::BadOffload`] for the checksum; [`FrameDrop::BadAggregate`] or
/// [`FrameDrop::TinySegments`] for the segmentation, as [`Cut::new`], and
/// [`FrameDrop::BadAggregate`] if the super-packet is a fragment.
#[inline]
pub fn check_offload(frame: &Frame, packet: &Packet) -> Result<(), FrameDrop> {
    if let Some(partial) = frame.offload.checksum {
        let start = usize::from(partial.start);
        if start < packet.l4 || start + usize::from(partial.offset) + 2 > packet.len {
            return Err(FrameDrop::BadOffload);
        }
    }
    match frame.offload.segments {
        Some(_) if packet.fragment.is_some() => Err(FrameDrop::BadAggregate),
        Some(_) => Cut::new(frame, packet).map(|_| ()),
        None => Ok(()),
    }
}

/// Positions of the inner IP header and transport header of a packet inside a tunnel over UDP, such
/// as VXLAN or GENEVE, in the outer packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Inside {
    ip: usize,
    l4: usize,
}

impl Inside {
    /// Finds the inner headers of a super-packet of the given kind. The partial checksum of the
    /// frame belongs to the inner packet, and begins at the inner transport header. `None` if the
    /// frame contains no such checksum and headers.
    fn find(frame: &Frame, packet: &Packet, kind: SegmentKind) -> Option<Self> {
        let (protocol, field) = match kind {
            SegmentKind::Tcp4 | SegmentKind::Tcp6 => (Protocol::TCP, tcp::field::CHECKSUM),
            SegmentKind::Udp | SegmentKind::UdpFragments => (Protocol::UDP, udp::field::CHECKSUM),
        };
        let partial = frame.offload.checksum?;
        if usize::from(partial.offset) != field.start {
            return None;
        }
        let l4 = usize::from(partial.start);
        let bytes = frame.bytes();
        let least = packet.l4 + udp::HEADER_LEN;
        let declares = |header: &[u8], field: Range<usize>, len: usize| {
            // The length field can be 0 in a super-packet of more than 64 KiB.
            let declared = usize::from(be16(header, field));
            declared == 0 || declared == len
        };
        (ipv4::HEADER_LEN..=IPV4_HEADER_MAX).find_map(|len| {
            let ip = l4.checked_sub(len).filter(|ip| *ip >= least)?;
            let header = bytes.get(ip..l4)?;
            let all = bytes.len() - ip;
            let four = header[0] >> 4 == 4
                && ipv4::header_len(header) == len
                && header[ipv4::field::PROTOCOL] == protocol.0
                && declares(header, ipv4::field::TOTAL_LEN, all);
            let six = len == ipv6::HEADER_LEN
                && is_ipv6(header)
                && header[ipv6::field::NEXT_HEADER] == protocol.0
                && declares(header, ipv6::field::PAYLOAD_LEN, all - len);
            let fits = match kind {
                SegmentKind::Tcp4 => four,
                SegmentKind::Tcp6 => six,
                SegmentKind::Udp | SegmentKind::UdpFragments => four || six,
            };
            fits.then_some(Self { ip, l4 })
        })
    }
}

/// A super-packet's division into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    kind: SegmentKind,
    /// Length in bytes of all headers, including those of an inner packet.
    headers: usize,
    size: usize,
    /// The inner headers, if the segments are inside a tunnel.
    inside: Option<Inside>,
}

impl Cut {
    /// The division of the super-packet in `frame`. `None` if the frame is no super-packet, or is a
    /// datagram that must be fragmented (UFO).
    ///
    /// # Errors
    /// [`FrameDrop::BadAggregate`] if the super-packet contradicts its headers;
    /// [`FrameDrop::TinySegments`] if it has more segments than a sender may put into one frame, or
    /// too many tiny ones.
    #[inline]
    pub fn new(frame: &Frame, packet: &Packet) -> Result<Option<Self>, FrameDrop> {
        let Some(segments) = frame.offload.segments else {
            return Ok(None);
        };
        let ip = frame.bytes();
        // The sender leaves the checksums of the segments to the device.
        let partial = frame.offload.checksum;
        let outer = partial.is_none_or(|partial| usize::from(partial.start) == packet.l4);
        let inside = match (segments.kind, packet.protocol.0) {
            (SegmentKind::Tcp4 | SegmentKind::Tcp6, 17) => true,
            (SegmentKind::Udp, 17) => !outer,
            _ => false,
        };
        let inside = match inside {
            true => {
                Some(Inside::find(frame, packet, segments.kind).ok_or(FrameDrop::BadAggregate)?)
            }
            false => None,
        };
        let l4 = inside.map_or(packet.l4, |inside| inside.l4);
        let header = match (segments.kind, packet.protocol.0, packet.is_ipv6()) {
            (SegmentKind::Tcp4 | SegmentKind::Tcp6, 17, _)
            | (SegmentKind::Tcp4, 6, false)
            | (SegmentKind::Tcp6, 6, true) => tcp_header(ip, l4),
            (SegmentKind::Udp, 17, _) => 8,
            (SegmentKind::UdpFragments, 17, _) if segments.size > 0 => return Ok(None),
            _ => return Err(FrameDrop::BadAggregate),
        };
        let headers = l4 + header;
        let udp = segments.kind == SegmentKind::Udp;
        let least = if udp { 8 } else { 20 };
        if header < least || ip.len() < headers || segments.size == 0 {
            return Err(FrameDrop::BadAggregate);
        }
        let cut = Self {
            kind: segments.kind,
            headers,
            size: usize::from(segments.size),
            inside,
        };
        let tiny = !udp && header - least + cut.size < TCP_LEAST;
        let most = if udp { UDP_MOST } else { TCP_MOST };
        if cut.count(ip.len()) > if tiny { TINY_MOST } else { most } {
            return Err(FrameDrop::TinySegments);
        }
        Ok(Some(cut))
    }

    /// Whether a device can cut the super-packet. It cannot if the segments are inside a tunnel,
    /// which the virtio header cannot describe.
    #[inline]
    pub const fn is_expressible(&self) -> bool {
        self.inside.is_none()
    }

    /// Whether `frame` is a super-packet that no device can segment.
    #[inline]
    pub fn is_for_software(frame: &Frame, packet: &Packet) -> bool {
        let cut = Self::new(frame, packet).ok().flatten();
        cut.is_some_and(|cut| !cut.is_expressible())
    }

    /// Length in bytes of the longest segment, IP header included. `len` is the length of the
    /// super-packet.
    #[inline]
    pub const fn longest(&self, len: usize) -> usize {
        let segment = self.headers + self.size;
        if segment < len { segment } else { len }
    }

    /// The number of segments of a super-packet of `len` bytes.
    #[inline]
    pub const fn count(&self, len: usize) -> usize {
        let data = len.saturating_sub(self.headers);
        if data == 0 {
            1
        } else {
            data.div_ceil(self.size)
        }
    }

    /// Returns the segments of the super-packet in `frame`, in order. Each segment is created only
    /// when the iterator returns it.
    ///
    /// # Errors
    /// [`FrameDrop::TinySegments`] if there are more segments than the dataplane creates from one
    /// frame.
    pub fn segments<'a>(
        &self,
        frame: &'a Frame,
        packet: &'a Packet,
    ) -> Result<impl Iterator<Item = Segment<'a>> + use<'a>, FrameDrop> {
        let ip = frame.bytes();
        let (headers, data) = ip.split_at(self.headers.min(ip.len()));
        let (cut, count) = (*self, self.count(ip.len()));
        if count > CUT_MOST {
            return Err(FrameDrop::TinySegments);
        }
        Ok((0..count).map(move |index| {
            let from = (index * cut.size).min(data.len());
            Segment {
                kind: cut.kind,
                inside: cut.inside,
                packet,
                headers,
                data: &data[from..(from + cut.size).min(data.len())],
                from,
                index,
                last: index + 1 == count,
            }
        }))
    }
}

/// A segment, whose bytes [`write`](Self::write) produces.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    kind: SegmentKind,
    inside: Option<Inside>,
    packet: &'a Packet,
    headers: &'a [u8],
    data: &'a [u8],
    /// Offset of `data` in the payload of the super-packet.
    from: usize,
    index: usize,
    last: bool,
}

impl Segment<'_> {
    /// Length of the segment in bytes, headers included.
    pub const fn len(&self) -> usize {
        self.headers.len() + self.data.len()
    }

    /// Whether the segment has no payload.
    pub const fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Writes the segment with correct lengths and checksums to `out`; `false` if `out` has too
    /// little room.
    #[must_use]
    pub fn write(&self, out: &mut Frame) -> bool {
        out.clear();
        if !out.extend(self.headers) || !out.extend(self.data) {
            return false;
        }
        let ip = out.bytes_mut();
        self.finish_ip(ip);
        self.finish_transport(ip);
        true
    }

    fn finish_ip(&self, ip: &mut [u8]) {
        self.finish_header(ip);
        if let Some(inside) = self.inside {
            self.finish_header(&mut ip[inside.ip..]);
        }
    }

    /// Writes length and identification into the IP header at the start of `ip`.
    fn finish_header(&self, ip: &mut [u8]) {
        if is_ipv6(ip) {
            return ipv6::finish_len(ip);
        }
        let len = u16::try_from(ip.len()).unwrap_or(u16::MAX);
        put16(ip, ipv4::field::TOTAL_LEN, len);
        // The identifications of the segments increase by one, as in a sender's own packets.
        let index = u16::try_from(self.index).unwrap_or(0);
        let id = be16(ip, ipv4::field::ID).wrapping_add(index);
        put16(ip, ipv4::field::ID, id);
        ipv4::finish_header(ip);
    }

    fn finish_transport(&self, ip: &mut [u8]) {
        let l4 = self.packet.l4;
        let Some(inside) = self.inside else {
            return match self.kind {
                SegmentKind::Udp => finish_datagram(ip, l4),
                _ => self.finish_tcp(ip, l4),
            };
        };
        let (inner, inner_l4) = (&mut ip[inside.ip..], inside.l4 - inside.ip);
        match self.kind {
            SegmentKind::Udp => finish_datagram(inner, inner_l4),
            _ => self.finish_tcp(inner, inner_l4),
        }
        // The sender has set no UDP checksum for the tunnel, so the segments have none.
        if be16(ip, l4 + udp::field::CHECKSUM.start) == 0 {
            put_len(&mut ip[l4..]);
        } else {
            finish_datagram(ip, l4);
        }
    }

    fn finish_tcp(&self, ip: &mut [u8], l4: usize) {
        let before = u32::try_from(self.from).unwrap_or(0);
        let tcp = &mut ip[l4..];
        let sequence = be32(tcp, tcp::field::SEQUENCE).wrapping_add(before);
        put32(tcp, tcp::field::SEQUENCE, sequence);
        if !self.last {
            tcp[tcp::field::FLAGS] &= !FIN_PSH;
        }
        if self.index > 0 {
            tcp[tcp::field::FLAGS] &= !CWR;
        }
        finish_sum(ip, l4, Protocol::TCP, tcp::field::CHECKSUM);
    }
}

/// Length in bytes of the TCP header at `l4`; 0 if it is truncated.
fn tcp_header(ip: &[u8], l4: usize) -> usize {
    ip.get(l4 + tcp::field::DATA_OFFSET)
        .map_or(0, |b| usize::from(b >> 4) * 4)
}

fn put_len(udp: &mut [u8]) {
    let len = u16::try_from(udp.len()).unwrap_or(u16::MAX);
    put16(udp, udp::field::LENGTH, len);
}

/// Writes length and checksum into the UDP header at `l4`.
fn finish_datagram(ip: &mut [u8], l4: usize) {
    put_len(&mut ip[l4..]);
    finish_sum(ip, l4, Protocol::UDP, udp::field::CHECKSUM);
}

fn finish_sum(ip: &mut [u8], l4: usize, protocol: Protocol, field: Range<usize>) {
    let (src, dst) = (ip_src(ip), ip_dst(ip));
    let l4 = &mut ip[l4..];
    put16(l4, field.clone(), 0);
    let sum = Sum::ZERO
        .pseudo(src, dst, protocol.0, l4.len())
        .bytes(l4)
        .finish();
    put16(l4, field, if sum == 0 { 0xffff } else { sum });
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use crate::frame::{PartialChecksum, Segments};
    use crate::parse;
    use crate::wire::tcp::checksum_ok;
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    fn aggregate(
        kind: SegmentKind,
        size: u16,
        options: usize,
        len: usize,
    ) -> Result<usize, FrameDrop> {
        let mut ip = Vec::new();
        let data = vec![0; len];
        let builder = PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        if kind == SegmentKind::Udp {
            builder
                .udp(1, 2)
                .write(&mut ip, &data)
                .expect("writing to a vector succeeds");
        } else {
            let builder = builder.tcp(1, 2, 3, 9).options_raw(&vec![1; options]);
            let builder = builder.expect("the options fit into a header");
            builder
                .write(&mut ip, &data)
                .expect("writing to a vector succeeds");
        }
        let mut frame = Frame::from_bytes(&ip);
        frame.offload.segments = Some(Segments {
            kind,
            size,
            header_len: 0,
            ecn: false,
        });
        let packet = parse::ip(frame.bytes(), true).expect("the packet is valid");
        Cut::new(&frame, &packet)
            .map(|cut| cut.expect("the packet is a super-packet").count(ip.len()))
    }

    /// The checksum of SCTP is a CRC32c; hosts leave it to a capable device (`NETIF_F_SCTP_CRC`),
    /// as they leave the checksums of TCP and UDP.
    #[test]
    fn partial_checksum_of_sctp_becomes_crc32c_and_is_refused_beyond_packet() {
        let mut ip = Vec::new();
        let mut packet = vec![0x80; 40];
        packet[8..12].copy_from_slice(&[0; 4]);
        PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .write(&mut ip, etherparse::IpNumber::SCTP, &packet)
            .expect("writing to a vector succeeds");
        let mut frame = Frame::from_bytes(&ip);
        frame.offload.checksum = Some(PartialChecksum {
            start: 20,
            offset: 8,
        });
        finish_checksum(&mut frame).expect("the checksum field is inside the packet");
        assert_eq!(frame.bytes()[28..32], checksum::sctp(&packet));
        assert_eq!(frame.bytes()[32..], packet[12..]);
        assert_eq!(frame.offload.checksum, None);
        let short = Some(PartialChecksum {
            start: 50,
            offset: 8,
        });
        frame.offload.checksum = short;
        assert_eq!(finish_checksum(&mut frame), Err(FrameDrop::BadOffload));
        assert_eq!(frame.offload.checksum, short);
    }

    #[test]
    fn super_packet_with_too_many_tiny_segments_is_refused() {
        let tiny = Err(FrameDrop::TinySegments);
        for (kind, size, options, len, expected) in [
            (SegmentKind::Tcp4, 1, 0, 60_000, tiny),
            (SegmentKind::Tcp4, 47, 0, 60_000, tiny),
            (SegmentKind::Tcp4, 48, 0, 60_000, Ok(1250)),
            // Time stamps reduce the payload of the smallest segment, and with all options, 8 bytes
            // remain.
            (SegmentKind::Tcp4, 36, 12, 36_000, Ok(1000)),
            (SegmentKind::Tcp4, 35, 12, 36_000, tiny),
            (SegmentKind::Tcp4, 8, 40, 8 * 1365, Ok(1365)),
            (SegmentKind::Tcp4, 8, 40, 8 * 1365 + 1, tiny),
            (SegmentKind::Tcp4, 1, 0, 64, Ok(64)),
            (SegmentKind::Tcp4, 1, 0, 65, tiny),
            (SegmentKind::Udp, 1, 0, 128, Ok(128)),
            (SegmentKind::Udp, 1, 0, 129, tiny),
            (SegmentKind::Udp, 500, 0, 64_000, Ok(128)),
        ] {
            let got = aggregate(kind, size, options, len);
            assert_eq!(
                got, expected,
                "{kind:?} of {size}, {options} bytes of options, {len}"
            );
        }
    }

    /// Length in bytes from the outer UDP header to the inner IP header: UDP, VXLAN, Ethernet.
    const INNER: usize = 8 + 8 + 14;

    /// A VXLAN packet that contains TCP or UDP. `six` is whether the outer and the inner packet are
    /// IPv6, `summed` whether the outer UDP header has a checksum, and `declared` whether the inner
    /// IP header has a length.
    fn tunnelled(data: &[u8], udp: bool, six: [bool; 2], summed: bool, declared: bool) -> Vec<u8> {
        let header = match six[1] {
            true => etherparse::IpHeaders::Ipv6(
                etherparse::Ipv6Header {
                    hop_limit: 64,
                    source: [3; 16],
                    destination: [4; 16],
                    ..Default::default()
                },
                etherparse::Ipv6Extensions::default(),
            ),
            false => etherparse::IpHeaders::Ipv4(
                etherparse::Ipv4Header {
                    time_to_live: 64,
                    source: [10, 8, 0, 1],
                    destination: [10, 8, 0, 2],
                    // Options, so that the inner IP header is longer than 20 bytes.
                    options: [1, 1, 1, 0].into(),
                    ..Default::default()
                },
                etherparse::Ipv4Extensions::default(),
            ),
        };
        let mut inside = vec![0; INNER - 8];
        let builder = PacketBuilder::ip(header);
        let written = match udp {
            true => builder.udp(1, 2).write(&mut inside, data),
            false => {
                let builder = builder.tcp(1, 2, u32::MAX - 10, 9).psh().ack(1);
                builder.write(&mut inside, data)
            }
        };
        written.expect("writing to a vector succeeds");
        if !declared {
            put16(&mut inside, INNER - 8 + if six[1] { 4 } else { 2 }, 0);
        }
        let mut ip = Vec::new();
        let builder = match six[0] {
            true => PacketBuilder::ipv6([1; 16], [2; 16], 64),
            false => PacketBuilder::ipv4([192, 0, 2, 1], [192, 0, 2, 2], 64),
        };
        let builder = builder.udp(40_000, 4789);
        builder
            .write(&mut ip, &inside)
            .expect("writing to a vector succeeds");
        if !summed {
            put16(&mut ip, if six[0] { 46 } else { 26 }, 0);
        }
        ip
    }

    proptest! {
        #[test]
        fn segmentation_keeps_every_byte_once_and_segment_headers_are_correct(data in proptest::collection::vec(any::<u8>(), 0..9000), size in 71u16..1500, udp: bool, six: bool) {
            let mut ip = Vec::new();
            let builder = if six {
                PacketBuilder::ipv6([1; 16], [2; 16], 64)
            } else {
                PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            };
            let l4 = if six { 40 } else { 20 };
            if udp {
                builder.udp(1, 2).write(&mut ip, &data).expect("writing to a vector succeeds");
            } else {
                builder.tcp(1, 2, u32::MAX - 10, 9).psh().fin().ack(1).cwr().write(&mut ip, &data).expect("writing to a vector succeeds");
            }
            let mut frame = Frame::from_bytes(&ip);
            let kind = match (udp, six) {
                (true, _) => SegmentKind::Udp,
                (false, false) => SegmentKind::Tcp4,
                (false, true) => SegmentKind::Tcp6,
            };
            frame.offload.segments = Some(Segments { kind, size, header_len: 0, ecn: false });
            let packet = parse::ip(frame.bytes(), true).expect("the packet is valid");
            let cut = Cut::new(&frame, &packet).expect("the offload request fits the packet").expect("the packet is a super-packet");
            let parts: Vec<Frame> = cut
                .segments(&frame, &packet)
                .expect("the number is within the limit")
                .map(|segment| {
                    let mut part = Frame::with_capacity(segment.len());
                    assert!(segment.write(&mut part));
                    part
                })
                .collect();
            prop_assert_eq!(parts.len(), cut.count(ip.len()));
            let mut joined = Vec::new();
            for (i, part) in parts.iter().enumerate() {
                let p = parse::ip(part.bytes(), false).expect("the packet is valid");
                prop_assert!(checksum_ok(part.bytes(), p.l4, p.protocol.0));
                prop_assert!(p.len <= cut.longest(ip.len()));
                if !udp {
                    let want = (u32::MAX - 10).wrapping_add(joined.len() as u32);
                    prop_assert_eq!(be32(part.bytes(), l4 + 4), want);
                    let last = i + 1 == parts.len();
                    prop_assert_eq!(part.bytes()[l4 + 13] & FIN_PSH, if last { FIN_PSH } else { 0 });
                    prop_assert_eq!(part.bytes()[l4 + 13] & CWR, if i == 0 { CWR } else { 0 });
                }
                joined.extend_from_slice(&part.bytes()[cut.headers..]);
            }
            prop_assert_eq!(joined, data);
        }

        /// A super-packet inside VXLAN, which its sender has left to a device to be cut
        /// (`SKB_GSO_UDP_TUNNEL`).
        #[test]
        fn segments_inside_tunnel_have_correct_headers(data in proptest::collection::vec(any::<u8>(), 1..9000), size in 71u16..1400, [six, inner_six, udp, summed, declared] in any::<[bool; 5]>()) {
            let ip = tunnelled(&data, udp, [six, inner_six], summed, declared);
            let l4 = if six { 40 } else { 20 };
            let inner = l4 + INNER;
            let start = inner + if inner_six { 40 } else { 24 };
            let (protocol, header, field) = if udp { (17, 8, 6) } else { (6, 20, 16) };
            let mut frame = Frame::from_bytes(&ip);
            let kind = match (udp, inner_six) {
                (true, _) => SegmentKind::Udp,
                (false, true) => SegmentKind::Tcp6,
                (false, false) => SegmentKind::Tcp4,
            };
            frame.offload.segments = Some(Segments { kind, size, header_len: 0, ecn: false });
            frame.offload.checksum = Some(PartialChecksum { start: start as u16, offset: field });
            let packet = parse::ip(frame.bytes(), true).expect("the packet is valid");
            check_offload(&frame, &packet).expect("the packet is a super-packet in a tunnel");
            let cut = Cut::new(&frame, &packet).expect("the offload request fits the packet").expect("the packet is a super-packet");
            prop_assert!(!cut.is_expressible());
            let mut joined = Vec::new();
            for segment in cut.segments(&frame, &packet).expect("the number is within the limit") {
                let mut part = Frame::with_capacity(segment.len());
                assert!(segment.write(&mut part));
                let p = parse::ip(part.bytes(), false).expect("the packet is valid");
                prop_assert!(p.len == part.len() && p.len <= cut.longest(ip.len()));
                prop_assert_eq!(udp::end(part.bytes(), l4), Some(part.len()));
                prop_assert!(!summed || udp::is_intact(part.bytes(), l4));
                prop_assert_eq!(be16(part.bytes(), l4 + 6) != 0, summed);
                let inside = parse::ip(&part.bytes()[inner..], false).expect("the packet is valid");
                prop_assert_eq!(inside.len, part.len() - inner);
                prop_assert!(checksum_ok(&part.bytes()[inner..], inside.l4, protocol));
                if udp {
                    prop_assert!(udp::is_intact(&part.bytes()[inner..], inside.l4));
                } else {
                    prop_assert_eq!(be32(part.bytes(), start + 4), (u32::MAX - 10).wrapping_add(joined.len() as u32));
                }
                joined.extend_from_slice(&part.bytes()[start + header..]);
            }
            prop_assert_eq!(joined, data);
            // A checksum field at another place than that of the header is refused.
            frame.offload.checksum = Some(PartialChecksum { start: start as u16 + 4, offset: field });
            prop_assert_eq!(Cut::new(&frame, &packet), Err(FrameDrop::BadAggregate));
        }
    }
}

//! Last steps for a packet to be sent: it is fragmented to the MTU of the link, its neighbour is
//! resolved, and the frames are queued.

use super::datagram::Job;
use super::{Cx, Fate, Output, Pipeline, Request};
use crate::drop::FrameDrop;
use crate::fragment::{Cutter, History};
use crate::frame::Frame;
use crate::net::{Net, NextHop, PortInfo};
use crate::parse::Packet;
use crate::rewrite::mac;
use crate::segment::{Cut, finish_checksum};
use crate::wire::{ETHERNET_LEN, be16, ipv4, ipv6, is_ipv6};

/// The fragmentation of an outgoing packet.
#[derive(Clone, Copy)]
pub(super) enum Pieces<'a> {
    /// If the packet does not fit and may be fragmented, it is cut into fragments of equal size.
    Whole,
    /// If the packet does not fit, it is cut into fragments of equal size in spite of "don't
    /// fragment": for the dataplane's own packets, relayed ICMP errors, and tunnel packets, whose
    /// inner packet was checked before.
    Relayed,
    /// An IPv4 request arrived in fragments. The packet, or the tunnel packet that contains it, is
    /// cut into fragments of equal size, none longer than the longest that arrived.
    Even(&'a History),
    /// An IPv6 request, a reply or a packet of this host arrived in fragments. The packet is cut at
    /// the same offsets, if these fragments fit.
    Along(&'a History),
    /// A tunnel packet that contains an IPv6 packet which arrived in fragments. If it does not fit,
    /// it is cut at the same offsets, each increased by this number of bytes.
    Around(&'a History, usize),
}

impl Job<'_> {
    /// The fragmentation of a packet to a server. `history` describes the fragments in which the
    /// packet arrived.
    pub(super) fn pieces<'a>(&self, history: Option<&'a History>) -> Pieces<'a> {
        match history {
            Some(history) if self.packet.is_ipv6() => Pieces::Along(history),
            Some(history) => Pieces::Even(history),
            None if self.inner.is_some() => Pieces::Relayed,
            None => Pieces::Whole,
        }
    }
}

#[derive(Clone, Copy)]
struct Link<'a> {
    hop: &'a NextHop,
    info: &'a PortInfo,
}

impl Pipeline {
    /// Sends a finished packet by `hop`, fragmented if necessary.
    #[inline]
    pub(super) fn leave<N: Net>(
        &mut self,
        frame: &mut Frame,
        packet: &Packet,
        hop: &NextHop,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let Some(info) = cx.env.net.port(hop.port) else {
            return Fate::Dropped(FrameDrop::NoPort);
        };
        let link = Link { hop, info: &info };
        let offload = &frame.offload;
        let finished = offload.segments.is_none() && offload.checksum.is_none();
        let cut = Cut::new(frame, packet);
        let for_software = matches!(&cut, Ok(Some(cut)) if !cut.is_expressible());
        let whole = matches!(pieces, Pieces::Whole | Pieces::Relayed) && !for_software;
        if whole && frame.len() <= hop.mtu as usize && (info.offload || finished) {
            return self.emit(frame, link, cx);
        }
        match cut {
            Ok(Some(cut)) => self.leave_aggregate(frame, packet, cut, link, cx),
            Ok(None) => self.leave_cut(frame, packet, link, pieces, cx),
            Err(reason) => Fate::Dropped(reason),
        }
    }

    /// As [`Self::leave`], for a super-packet.
    fn leave_aggregate<N: Net>(
        &mut self,
        frame: &mut Frame,
        packet: &Packet,
        cut: Cut,
        link: Link<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let mtu = link.hop.mtu as usize;
        let fits = cut.longest(frame.len()) <= mtu;
        if fits && link.info.offload && cut.is_expressible() {
            return self.emit(frame, link, cx);
        }
        let segments = match cut.segments(frame, packet) {
            Ok(segments) => segments,
            Err(reason) => return Fate::Dropped(reason),
        };
        let mut fate = Fate::Dropped(FrameDrop::BadAggregate);
        for segment in segments {
            let mut out = cx.out.spare(segment.len());
            fate = if !segment.write(&mut out) {
                Fate::Dropped(FrameDrop::NoRoom)
            } else if fits {
                self.emit(&mut out, link, cx)
            } else {
                let cutter = self.cutter(out.bytes(), mtu, None, false);
                self.fragments(cutter, link, cx)
            };
            cx.out.keep(out);
        }
        fate
    }

    /// As [`Self::leave`], for a packet that is not a super-packet, and that must be fragmented or
    /// whose checksum must be finished.
    fn leave_cut<N: Net>(
        &mut self,
        frame: &mut Frame,
        packet: &Packet,
        link: Link<'_>,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if let Err(reason) = finish_checksum(frame) {
            return Fate::Dropped(reason);
        }
        frame.offload.segments = None;
        if packet.is_ipv6() {
            return self.leave_cut6(frame, link, pieces, cx);
        }
        let mtu = link.hop.mtu as usize;
        let fits = frame.len() <= mtu;
        let df = dont_fragment(frame);
        let ip = frame.bytes();
        let behind;
        let cutter = match pieces {
            Pieces::Around(..) | Pieces::Whole | Pieces::Relayed if fits => {
                return self.emit(frame, link, cx);
            }
            Pieces::Whole if df => return Fate::Dropped(FrameDrop::TooBig),
            Pieces::Whole | Pieces::Relayed => self.cutter(ip, mtu, None, false),
            Pieces::Around(history, added) => {
                behind = history.behind(0, added);
                self.cutter(ip, mtu, Some(&behind), false)
            }
            Pieces::Even(history) => self.cutter(ip, mtu.min(history.longest), None, history.df),
            Pieces::Along(history) => {
                // A fragment that contains the whole datagram is fragmented like any other packet
                // that does not fit.
                let sizes = (history.sizes.len() > 1).then_some(history.sizes.as_slice());
                self.cutter(ip, mtu.min(history.longest), sizes, df)
            }
        };
        self.fragments(cutter, link, cx)
    }

    /// As [`Self::leave_cut`], for IPv6 (`ip6_fragment`).
    fn leave_cut6<N: Net>(
        &mut self,
        frame: &mut Frame,
        link: Link<'_>,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let mtu = link.hop.mtu as usize;
        let (headers, _) = ipv6::unfragmentable(frame.bytes());
        let whole = match pieces {
            Pieces::Along(history) => mtu.min(history.longest),
            _ => mtu,
        };
        if frame.len() <= whole {
            return self.emit(frame, link, cx);
        }
        let sizes = match pieces {
            Pieces::Along(history) => history.behind(headers, 0),
            // Only the headers of the outer packet precede the payload.
            Pieces::Around(history, added) => history.behind(0, added),
            // Only the sender may fragment such a packet.
            Pieces::Whole => return Fate::Dropped(FrameDrop::TooBig),
            Pieces::Relayed | Pieces::Even(_) => Vec::new(),
        };
        let limit = match pieces {
            Pieces::Along(_) => whole.max(ipv6::MTU_MIN),
            _ => mtu,
        };
        let cutter = self.cutter(frame.bytes(), limit, Some(&sizes), false);
        self.fragments(cutter, link, cx)
    }

    /// Cuts a packet of either IP version into fragments of at most `limit` bytes. `sizes` has the
    /// same meaning as in [`Cutter::v4`], and so has `df`, which applies to IPv4 only.
    fn cutter<'a>(
        &self,
        ip: &'a [u8],
        limit: usize,
        sizes: Option<&'a [usize]>,
        df: bool,
    ) -> Result<Cutter<'a>, FrameDrop> {
        if is_ipv6(ip) {
            Cutter::v6(ip, limit, sizes, self.common.ip_ids.next_fragments())
        } else {
            Cutter::v4(ip, limit, sizes, df)
        }
    }

    /// Sends fragments, each in a frame of its size.
    fn fragments<N: Net>(
        &mut self,
        cutter: Result<Cutter<'_>, FrameDrop>,
        link: Link<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let cutter = match cutter {
            Ok(cutter) => cutter,
            Err(reason) => return Fate::Dropped(reason),
        };
        let mut fate = Fate::Dropped(FrameDrop::MtuTooSmall);
        for piece in cutter {
            let mut out = cx.out.spare(piece.len());
            fate = if piece.write(&mut out) {
                self.emit(&mut out, link, cx)
            } else {
                Fate::Dropped(FrameDrop::NoRoom)
            };
            cx.out.keep(out);
        }
        fate
    }

    /// Adds the link header and queues the frame, or lets the frame wait until its neighbour is
    /// resolved.
    #[inline]
    fn emit<N: Net>(&mut self, frame: &mut Frame, link: Link<'_>, cx: &mut Cx<'_, N>) -> Fate {
        let Link { hop, info } = link;
        if info.ethernet {
            let Some(mac) = cx.env.net.neighbour(hop.port, hop.addr) else {
                // Store a copy of the exact size: the frame's buffer is reused, or returns to its
                // backend.
                let copy = frame.clone();
                if self.held.hold(hop.port, hop.addr, cx.server, copy, cx.now) {
                    cx.out.request(Request::Resolve(hop.port, hop.addr));
                }
                return Fate::Held;
            };
            self.make_room(frame, ETHERNET_LEN, cx.out);
            if let Err(reason) = mac::ethernet(frame, mac, info.mac) {
                return Fate::Dropped(reason);
            }
        }
        self.counters.emitted += 1;
        cx.out.push(hop.port, frame.take());
        Fate::Sent
    }

    /// Makes room for `n` bytes in front of a frame: a frame with less headroom is replaced by a
    /// copy.
    #[inline]
    pub(super) fn make_room(&mut self, frame: &mut Frame, n: usize, out: &mut Output) {
        if frame.headroom() < n {
            self.copy(frame, out);
        }
    }

    #[cold]
    fn copy(&mut self, frame: &mut Frame, out: &mut Output) {
        let mut copy = out.spare(frame.len());
        if copy.extend(frame.bytes()) {
            copy.offload = frame.offload;
            self.counters.copied += 1;
            *frame = copy;
        }
    }
}

pub(super) fn dont_fragment(frame: &Frame) -> bool {
    be16(frame.bytes(), ipv4::field::FLAGS) & ipv4::DF != 0
}

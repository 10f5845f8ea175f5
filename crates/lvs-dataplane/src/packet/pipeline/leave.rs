//! The way out: cut to what the link takes, resolve the neighbour, queue.

use super::{Cx, Fate, Job, Pipeline, Request};
use crate::packet::drop::FrameDrop;
use crate::packet::fragment::{self, History};
use crate::packet::frame::Frame;
use crate::packet::net::{Net, NextHop, PortInfo};
use crate::packet::parse::Packet;
use crate::packet::rewrite::mac;
use crate::packet::segment::{Cut, finish_checksum};
use crate::packet::wire::{be16, ipv4, ipv6, is_ipv6};

/// In how many pieces a packet leaves.
#[derive(Clone, Copy)]
pub(super) enum Pieces<'a> {
    /// In one, or cut evenly where it does not fit and says that it may be.
    Whole,
    /// In one, or cut evenly whatever it says: a relayed ICMP error.
    Relayed,
    /// It came in fragments: cut evenly, and never longer than the longest of them. Of a tunnel packet around it too.
    Even(&'a History),
    /// It came in fragments and passes through, or is IPv6: cut where it had been, if that fits.
    Along(&'a History),
    /// It is a tunnel packet around IPv6 that came in fragments: cut where that had been, behind so many bytes of the tunnel,
    /// if it does not fit.
    Around(&'a History, usize),
}

impl Job<'_> {
    /// How the packet leaves on its way to a server.
    pub(super) fn pieces(&self) -> Pieces<'_> {
        match self.history {
            Some(history) if self.packet.is_ipv6() => Pieces::Along(history),
            Some(history) => Pieces::Even(history),
            None if self.inner.is_some() => Pieces::Relayed,
            None => Pieces::Whole,
        }
    }
}

impl Pipeline {
    /// Sends a finished packet by `hop`, cut as it has to be.
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
        let offload = &frame.offload;
        let finished = offload.segments.is_none() && offload.checksum.is_none();
        let whole = matches!(pieces, Pieces::Whole | Pieces::Relayed);
        if whole && frame.len() <= hop.mtu as usize && (info.offload || finished) {
            return self.emit(frame, hop, &info, cx);
        }
        self.leave_cut(frame, packet, hop, &info, pieces, cx)
    }

    /// As [`Self::leave`], for what does not leave as it is.
    fn leave_cut<N: Net>(
        &mut self,
        frame: &mut Frame,
        packet: &Packet,
        hop: &NextHop,
        info: &PortInfo,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let mtu = hop.mtu as usize;
        let cut = match Cut::new(frame, packet) {
            Ok(cut) => cut,
            Err(reason) => return Fate::Dropped(reason),
        };
        if let Some(cut) = cut {
            let fits = cut.longest(frame.len()) <= mtu;
            if fits && info.offload {
                return self.emit(frame, hop, info, cx);
            }
            let mut segments = Vec::with_capacity(cut.count(frame.len()));
            cut.segments(
                frame,
                packet,
                || cx.out.spare(),
                |segment| segments.push(segment),
            );
            let mut fate = Fate::Dropped(FrameDrop::BadAggregate);
            for mut segment in segments {
                fate = if fits {
                    self.emit(&mut segment, hop, info, cx)
                } else {
                    self.fragments(&segment, mtu, None, false, hop, info, cx)
                };
                cx.out.keep(segment);
            }
            return fate;
        }
        if let Err(reason) = finish_checksum(frame) {
            return Fate::Dropped(reason);
        }
        frame.offload.segments = None;
        let fits = frame.len() <= mtu;
        if packet.is_ipv6() {
            return self.leave_cut6(frame, hop, info, pieces, cx);
        }
        let df = dont_fragment(frame);
        match pieces {
            Pieces::Around(..) if fits => self.emit(frame, hop, info, cx),
            Pieces::Around(history, added) => {
                let sizes = history.behind(0, added);
                self.fragments(frame, mtu, Some(&sizes), false, hop, info, cx)
            }
            Pieces::Whole | Pieces::Relayed if fits => self.emit(frame, hop, info, cx),
            Pieces::Whole if df => Fate::Dropped(FrameDrop::TooBig),
            Pieces::Whole | Pieces::Relayed => {
                self.fragments(frame, mtu, None, false, hop, info, cx)
            }
            Pieces::Even(history) => {
                let limit = mtu.min(history.longest);
                self.fragments(frame, limit, None, history.df, hop, info, cx)
            }
            Pieces::Along(history) => {
                let kept = history.sizes.iter().all(|size| size + packet.l4 <= mtu);
                let sizes = kept.then_some(history.sizes.as_slice());
                let limit = if kept { mtu } else { mtu.min(history.longest) };
                self.fragments(frame, limit, sizes, df, hop, info, cx)
            }
        }
    }

    /// As [`Self::leave_cut`], for IPv6 that is no aggregate (`ip6_fragment`).
    fn leave_cut6<N: Net>(
        &mut self,
        frame: &mut Frame,
        hop: &NextHop,
        info: &PortInfo,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let mtu = hop.mtu as usize;
        let (headers, _) = ipv6::unfragmentable(frame.bytes());
        let whole = match pieces {
            Pieces::Along(history) => mtu.min(history.longest),
            _ => mtu,
        };
        if frame.len() <= whole {
            return self.emit(frame, hop, info, cx);
        }
        let sizes = match pieces {
            Pieces::Along(history) => history.behind(headers, 0),
            // The headers of the outer packet are all that there is in front.
            Pieces::Around(history, added) => history.behind(0, added),
            // Only its sender fragments it.
            Pieces::Whole => return Fate::Dropped(FrameDrop::TooBig),
            Pieces::Relayed | Pieces::Even(_) => Vec::new(),
        };
        let limit = match pieces {
            Pieces::Along(_) => whole.max(ipv6::MTU_MIN),
            _ => mtu,
        };
        self.fragments(frame, limit, Some(&sizes), false, hop, info, cx)
    }

    #[expect(clippy::too_many_arguments, reason = "an inner step")]
    fn fragments<N: Net>(
        &mut self,
        frame: &Frame,
        limit: usize,
        sizes: Option<&[usize]>,
        df: bool,
        hop: &NextHop,
        info: &PortInfo,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let mut pieces = Vec::new();
        let cut = if is_ipv6(frame.bytes()) {
            let id = self.ip_ids.next_fragments();
            fragment::fragment6(
                frame,
                limit,
                sizes,
                id,
                || cx.out.spare(),
                |piece| pieces.push(piece),
            )
        } else {
            fragment::fragment(
                frame,
                limit,
                sizes,
                df,
                || cx.out.spare(),
                |piece| pieces.push(piece),
            )
        };
        if let Err(reason) = cut {
            return Fate::Dropped(reason);
        }
        let mut fate = Fate::Dropped(FrameDrop::MtuTooSmall);
        for mut piece in pieces {
            fate = self.emit(&mut piece, hop, info, cx);
            cx.out.keep(piece);
        }
        fate
    }

    /// Puts the link header on and queues the frame, or lets it wait for its neighbour.
    #[inline]
    fn emit<N: Net>(
        &mut self,
        frame: &mut Frame,
        hop: &NextHop,
        info: &PortInfo,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if info.ethernet {
            let Some(mac) = cx.env.net.neighbour(hop.port, hop.addr) else {
                // A copy of its own size waits; the buffer of full size goes on receiving.
                if self.held.hold(hop.port, hop.addr, frame.clone(), cx.now) {
                    cx.out.requests.push(Request::Resolve(hop.port, hop.addr));
                }
                return Fate::Held;
            };
            if let Err(reason) = mac::ethernet(frame, mac, info.mac) {
                return Fate::Dropped(reason);
            }
        }
        self.counters.emitted += 1;
        cx.out.push(hop.port, frame);
        Fate::Sent
    }
}

pub(super) fn dont_fragment(frame: &Frame) -> bool {
    be16(frame.bytes(), 6) & ipv4::DF != 0
}

//! What the director says itself: ICMP errors, and the way of what is made here.

use lvs_core::{Hook, Protocol};

use super::datagram::Job;
use super::leave::Pieces;
use super::{Cx, Fate, Pipeline};
use crate::packet::drop::FrameDrop;
use crate::packet::frame::{Frame, Offload};
use crate::packet::icmp_limit::may_be_answered;
use crate::packet::net::Net;
use crate::packet::parse::{self, Icmp};
use crate::packet::wire::icmp::{self as wire_icmp, ErrorKind};

impl Pipeline {
    /// Sends an answer made here; it counts as [`Fate::Answered`] unless it cannot leave.
    pub(super) fn send_own<N: Net>(&mut self, frame: &mut Frame, cx: &mut Cx<'_, N>) -> Fate {
        frame.offload = Offload::default();
        let packet = match parse::ip(frame.bytes(), false) {
            Ok(packet) => packet,
            Err(reason) => return Fate::Dropped(reason),
        };
        let net = cx.env.net;
        let dst = packet.dst;
        if net.is_local(dst) {
            let Some(port) = net.host_port() else {
                return Fate::Dropped(FrameDrop::NoHostPort);
            };
            self.counters.emitted += 1;
            cx.out.push(port, frame.take());
            return Fate::Answered;
        }
        let Some(hop) = net.route(dst) else {
            return Fate::Dropped(FrameDrop::NoRoute);
        };
        match self.leave(frame, &packet, &hop, Pieces::Relayed, cx) {
            Fate::Dropped(reason) => Fate::Dropped(reason),
            _ => Fate::Answered,
        }
    }

    /// Makes an ICMP error about the packet in `frame` and sends it to its source.
    pub(super) fn icmp_error<N: Net>(
        &mut self,
        kind: ErrorKind,
        frame: &Frame,
        job: &Job<'_>,
        cx: &mut Cx<'_, N>,
    ) {
        let net = cx.env.net;
        let packet = &job.packet;
        if !may_be_answered(packet, frame.bytes())
            || !self.common.rate_limit.allow(kind, packet.src, cx.now)
        {
            return;
        }
        let src = if job.to_host || net.is_own_vip(packet.dst) {
            packet.dst
        } else {
            // A router's error comes from its address on the link towards the receiver.
            match net.route(packet.src).and_then(|hop| hop.source) {
                Some(addr) => addr,
                // The host of a VIP that is only routed here: nothing is better than the address
                // that was asked.
                _ if job.hook != Hook::Transit => packet.dst,
                _ => return,
            }
        };
        let id = self
            .common
            .ip_ids
            .next(src, packet.src, Protocol::ICMP.0, 1);
        let mut error = cx.out.spare(wire_icmp::ERROR_LEN_MAX);
        if wire_icmp::error(&mut error, kind, frame.bytes(), src, id) {
            if let Ok(made) = parse::ip(error.bytes(), false)
                && let Icmp::Error(about) = made.icmp(error.bytes(), Hook::Output, 0)
            {
                self.own_error = Some(about);
            }
            let fate = self.send_own(&mut error, cx);
            self.counters.icmp_sent += u64::from(fate == Fate::Answered);
        }
        cx.out.keep(error);
    }
}

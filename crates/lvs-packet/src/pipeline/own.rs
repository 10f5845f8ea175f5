//! Packets that the dataplane itself sends, such as ICMP errors.

use lvs_core::{Hook, IcmpError, Protocol, Verdict};

use super::datagram::Job;
use super::leave::Pieces;
use super::{Cx, Decide, Fate, Pipeline, host};
use crate::drop::FrameDrop;
use crate::frame::{Frame, Offload};
use crate::icmp_limit::may_be_answered;
use crate::net::Net;
use crate::parse::{self, Icmp, Packet};
use crate::wire::icmp::{self as wire_icmp, ErrorKind};

/// The pipeline's ICMP error about the current packet. The director must decide on the error as
/// well, because the kernel's IPVS also processes the host's own packets (`LOCAL_OUT`).
#[derive(Debug)]
pub(super) enum OwnError {
    /// The error was sent. The director still counts it for the connection that it concerns.
    Sent(IcmpError),
    /// The error is addressed to a virtual address, because a server's reply could not be
    /// forwarded. The director translates the error, so that it reaches that server.
    ToVip(Frame),
}

impl Pipeline {
    /// Sends an answer of the dataplane. Its fate is [`Fate::Answered`] if it could be sent.
    pub(super) fn send_own<N: Net>(&mut self, frame: &mut Frame, cx: &mut Cx<'_, N>) -> Fate {
        frame.offload = Offload::default();
        let packet = match parse::ip(frame.bytes(), false) {
            Ok(packet) => packet,
            Err(reason) => return Fate::Dropped(reason),
        };
        let net = cx.env.net;
        let dst = packet.dst;
        if net.is_local(dst) {
            let Some(port) = host::device_to_host(frame, true, net) else {
                return Fate::Dropped(FrameDrop::NoHostPort);
            };
            self.counters.emitted += 1;
            cx.out.push(port, frame.take());
            return Fate::Answered;
        }
        if net.is_own_vip(dst) {
            return Fate::Dropped(FrameDrop::OwnAddress);
        }
        let Some(hop) = net.route(dst) else {
            return Fate::Dropped(net.why_no_route(dst));
        };
        match self.leave(frame, &packet, &hop, Pieces::Relayed, cx) {
            Fate::Dropped(reason) => Fate::Dropped(reason),
            _ => Fate::Answered,
        }
    }

    /// Builds an ICMP error about the packet in `frame`, and sends it to the packet's source,
    /// unless such a packet must not be answered or the rate limit forbids it. An error to a
    /// virtual address is not sent, but stored for [`Self::finish_own_error`].
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
        let to_vip = net.is_vip(packet.src) || net.is_own_vip(packet.src);
        let src = if to_vip {
            // An error that the host sends to one of its own addresses has that address as its
            // source.
            packet.src
        } else if job.to_host || net.is_own_vip(packet.dst) {
            packet.dst
        } else {
            // A router's error has the address of its link towards the receiver as its source.
            match net.route(packet.src).and_then(|hop| hop.source) {
                Some(addr) => addr,
                // Without a known source address of this host, the error has the address to which
                // the client sent its packet as its source.
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
            if to_vip {
                self.own_error = Some(OwnError::ToVip(error));
                return;
            }
            if let Ok(made) = parse::ip(error.bytes(), false)
                && let Icmp::Error(about) = made.icmp(error.bytes(), Hook::Output)
            {
                self.own_error = Some(OwnError::Sent(about));
            }
            let fate = self.send_own(&mut error, cx);
            self.counters.icmp_sent += u64::from(fate == Fate::Answered);
        }
        cx.out.keep(error);
    }

    /// Lets the director decide on the pipeline's ICMP error about the last packet, if there is
    /// one.
    #[inline]
    pub(super) fn finish_own_error<N: Net, D: Decide>(
        &mut self,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) {
        if self.own_error.is_some() {
            self.decide_own_error(decide, cx);
        }
    }

    fn decide_own_error<N: Net, D: Decide>(&mut self, decide: &mut D, cx: &mut Cx<'_, N>) {
        match self.own_error.take() {
            None => {}
            Some(OwnError::Sent(error)) => {
                // For a connection without translation, the error counts as a packet to the client.
                let _ = decide.icmp_error(&error, cx.now);
            }
            Some(OwnError::ToVip(mut error)) => {
                if let Ok(made) = parse::ip(error.bytes(), false) {
                    self.translate_own_error(&mut error, made, decide, cx);
                }
                cx.out.keep(error);
            }
        }
    }

    /// Translates and sends an ICMP error of the host, as the director decides.
    pub(super) fn translate_own_error<N: Net, D: Decide>(
        &mut self,
        error: &mut Frame,
        packet: Packet,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) {
        let Icmp::Error(about) = packet.icmp(error.bytes(), Hook::Output) else {
            return;
        };
        let to_host = cx.env.net.is_local(packet.dst);
        let job = Job {
            inner: Some((about.inner.protocol, about.inner.dst)),
            ..Job::new(packet, Hook::Output, true, to_host)
        };
        let ports = about.inner_ports;
        let fate = match decide.icmp_error(&about, cx.now) {
            Verdict::Forward(forward) => self.forward(error, &job, &forward, ports, cx),
            Verdict::Reply(reply) => self.reply(error, &job, &reply, ports, cx),
            Verdict::Accept(_) => self.send_own(error, cx),
            Verdict::Unreachable(_) | Verdict::Reset(_) | Verdict::Drop(_) => return,
        };
        let sent = matches!(fate, Fate::Sent | Fate::Held | Fate::Answered);
        self.counters.icmp_sent += u64::from(sent);
    }
}

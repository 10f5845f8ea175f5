//! A neighbour that does not answer: whoever sent packets to it is told.

use std::net::IpAddr;

use lvs_core::{Hook, Instant, Protocol, Verdict};

use super::datagram::Job;
use super::{Cx, Decide, Env, Fate, Output, Pipeline};
use crate::packet::frame::Frame;
use crate::packet::icmp_limit::may_be_answered;
use crate::packet::net::{Net, PortId};
use crate::packet::parse::{self, Icmp, Packet};
use crate::packet::wire::icmp::{self as wire_icmp, ErrorKind};

impl Pipeline {
    /// Drops what waited for a neighbour that does not answer, and tells the senders "host
    /// unreachable", each in terms of the packet that it sent: the host makes an error about
    /// the packet as it left, and the director translates that (`arp_error_report`,
    /// `ndisc_error_report`, then IPVS in `LOCAL_OUT`).
    pub fn neighbour_failed<N: Net, D: Decide>(
        &mut self,
        port: PortId,
        addr: IpAddr,
        env: &Env<'_, N>,
        decide: &mut D,
        now: Instant,
        out: &mut Output,
    ) {
        let mut cx = Cx {
            env,
            now,
            out,
            ahead: None,
        };
        for frame in self.held.give_up(port, addr) {
            let aggregate = frame.offload.segments.is_some();
            if let Ok(packet) = parse::ip(frame.bytes(), aggregate) {
                self.undelivered(&frame, &packet, decide, &mut cx);
            }
        }
    }

    fn undelivered<N: Net, D: Decide>(
        &mut self,
        frame: &Frame,
        packet: &Packet,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) {
        const KIND: ErrorKind = ErrorKind::HostUnreachable;
        let net = cx.env.net;
        let own = net.is_local(packet.src) || net.is_own_vip(packet.src);
        // The host's error about its own packet goes to itself.
        let src = if own {
            Some(packet.src)
        } else {
            net.route(packet.src).and_then(|hop| hop.source)
        };
        let Some(src) = src else { return };
        if !may_be_answered(packet, frame.bytes()) {
            return;
        }
        let mut error = cx.out.spare(wire_icmp::ERROR_LEN_MAX);
        let id = self
            .common
            .ip_ids
            .next(src, packet.src, Protocol::ICMP.0, 1);
        if wire_icmp::error(&mut error, KIND, frame.bytes(), src, id)
            && let Ok(made) = parse::ip(error.bytes(), false)
        {
            if own && !net.is_vip(packet.src) {
                // A tunnel's outer packet; who limits errors is the complaint.
                let message = error.bytes().get(made.l4..).unwrap_or_default();
                self.tunnel_complaint(message, made.is_ipv6(), decide, cx);
            } else if self.common.rate_limit.allow(KIND, packet.src, cx.now) {
                self.translate_own_error(&mut error, made, decide, cx);
            }
        }
        cx.out.keep(error);
    }

    /// Sends an ICMP error that the host has made, as the director wants it.
    fn translate_own_error<N: Net, D: Decide>(
        &mut self,
        error: &mut Frame,
        packet: Packet,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) {
        let Icmp::Error(about) = packet.icmp(error.bytes(), Hook::Output, 0) else {
            return;
        };
        let job = Job {
            inner: Some((about.inner.protocol, about.inner.dst)),
            ..Job::new(packet, Hook::Output, true, false)
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

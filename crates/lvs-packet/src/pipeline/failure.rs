//! ICMP errors about packets whose next hop does not answer.

use std::net::IpAddr;

use lvs_core::{Instant, Protocol};

use super::{Cx, Decide, Env, Output, Pipeline};
use crate::frame::Frame;
use crate::icmp_limit::may_be_answered;
use crate::net::{Net, PortId};
use crate::parse::{self, Packet};
use crate::wire::icmp::{self as wire_icmp, ErrorKind};

impl Pipeline {
    /// Drops the packets that waited for a neighbour that does not answer, and sends "host
    /// unreachable" to the clients or servers that sent them. As in the kernel, the host creates an
    /// error about the outgoing packet, and the director translates the error (`arp_error_report`,
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
        let mut cx = Cx::new(env, now, out);
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
        // If this host sent the packet, the source of the packet is also the source of the error.
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
                // The packet that could not be sent was a tunnel packet. The rate limit for the
                // error to the client is checked separately.
                let message = error.bytes().get(made.l4..).unwrap_or_default();
                self.tunnel_complaint(message, made.is_ipv6(), decide, cx);
            } else if self.common.rate_limit.allow(KIND, packet.src, cx.now) {
                self.translate_own_error(&mut error, made, decide, cx);
            }
        }
        cx.out.keep(error);
    }
}

//! Sends packets through tunnels to servers, and processes ICMP errors about such packets.

use std::net::IpAddr;

use lvs_core::tunnel::Tunnel;
use lvs_core::{Forward, Hook, IcmpError, Protocol, Verdict};

use super::datagram::Job;
use super::leave::Pieces;
use super::{Cx, Decide, Fate, Pipeline};
use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::net::{Net, NextHop};
use crate::parse::{self, Icmp, Packet};
use crate::rewrite::tunnel::{self, Outer};
use crate::segment::{Cut, finish_checksum};
use crate::wire::icmp as wire_icmp;
use crate::wire::{ETHERNET_LEN, ip_dst, ip_src};

impl Pipeline {
    pub(super) fn tunnel<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        forward: &Forward,
        hop: &NextHop,
        target: IpAddr,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let Some(src) = hop.source else {
            return Fate::Dropped(FrameDrop::NoSource);
        };
        let route = hop.mtu as usize;
        let tunnel = forward.tunnel;
        let learned = self
            .tunnels
            .mtu(&self.common.tunnels, target, tunnel, route, cx.now);
        let Some(mtu) = tunnel::inner_mtu(tunnel, target, route, learned) else {
            return Fate::Dropped(FrameDrop::MtuTooSmall);
        };
        // A packet without "don't fragment" is fragmented to the reported path MTU.
        let path = mtu + tunnel::overhead(tunnel, target);
        let hop = &NextHop {
            mtu: u32::try_from(path).unwrap_or(hop.mtu),
            ..*hop
        };
        if (cx.env.pmtu_disc || job.packet.is_ipv6())
            && let Some(fate) = self.too_big(frame, job, mtu, Some((target, true)), cx)
        {
            return fate;
        }
        self.clamp_mss(frame, job, mtu, cx);
        let cut = match Cut::new(frame, &job.packet) {
            Ok(cut) => cut,
            Err(reason) => return Fate::Dropped(reason),
        };
        // The virtio header cannot describe a super-packet inside a tunnel: each segment gets its
        // own outer header.
        let count = cut.map_or(1, |cut| cut.count(job.packet.len));
        let df = cx.env.pmtu_disc && job.packet.df && !job.packet.is_ipv6();
        let outer = Outer {
            src,
            dst: target,
            tunnel,
            source_port: match tunnel {
                Tunnel::Gue { .. } => tunnel::source_port(&job.packet),
                _ => 0,
            },
            id: if df {
                0
            } else {
                self.common.ip_ids.next(src, target, tunnel::IPV4, count)
            },
            df,
        };
        match cut {
            Some(cut) => self.tunnel_segments(frame, &job.packet, cut, outer, hop, cx),
            None => self.tunnel_whole(frame, job, &outer, hop, cx),
        }
    }

    fn tunnel_whole<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        outer: &Outer,
        hop: &NextHop,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if let Err(reason) = finish_checksum(frame) {
            return Fate::Dropped(reason);
        }
        frame.offload.segments = None;
        let pieces = match job.history {
            Some(history) if job.packet.is_ipv6() => {
                Pieces::Around(history, outer.tunnel.header_len())
            }
            Some(history) => Pieces::Even(history),
            None => Pieces::Relayed,
        };
        self.tunnelled(frame, outer, hop, pieces, cx)
    }

    fn tunnel_segments<N: Net>(
        &mut self,
        frame: &Frame,
        packet: &Packet,
        cut: Cut,
        mut outer: Outer,
        hop: &NextHop,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let segments = match cut.segments(frame, packet) {
            Ok(segments) => segments,
            Err(reason) => return Fate::Dropped(reason),
        };
        let mut fate = Fate::Dropped(FrameDrop::BadAggregate);
        for segment in segments {
            let mut out = cx.out.spare(segment.len());
            fate = if segment.write(&mut out) {
                self.tunnelled(&mut out, &outer, hop, Pieces::Relayed, cx)
            } else {
                Fate::Dropped(FrameDrop::NoRoom)
            };
            outer.id = outer.id.wrapping_add(1);
            cx.out.keep(out);
        }
        fate
    }

    /// Encapsulates a packet and sends it. The caller has checked that the inner packet fits the
    /// tunnel or may be fragmented.
    fn tunnelled<N: Net>(
        &mut self,
        frame: &mut Frame,
        outer: &Outer,
        hop: &NextHop,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let room = tunnel::overhead(outer.tunnel, outer.dst) + ETHERNET_LEN;
        self.make_room(frame, room, cx.out);
        if let Err(reason) = tunnel::encapsulate(frame, outer) {
            return Fate::Dropped(reason);
        }
        match parse::ip(frame.bytes(), false) {
            Ok(packet) => self.leave(frame, &packet, hop, pieces, cx),
            Err(reason) => Fate::Dropped(reason),
        }
    }

    /// Processes `message`, an ICMP error about a tunnel packet of the director, which may update
    /// the path MTU. If the error is not ICMPv6 (`six`), and the packet inside was a request of a
    /// connection, the client receives an error about this request, within the rate limit.
    pub(super) fn tunnel_complaint<N: Net, D: Decide>(
        &mut self,
        message: &[u8],
        six: bool,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) {
        let net = cx.env.net;
        let route = |server| net.route(server).map(|hop| hop.mtu as usize);
        if six {
            return self.common.tunnels.too_big(message, route, cx.now);
        }
        let Some(complaint) = self.common.tunnels.complaint(message, route, cx.now) else {
            return;
        };
        let (client, virt) = (ip_src(complaint.original), ip_dst(complaint.original));
        if !net.is_vip(virt) || !self.common.rate_limit.allow(complaint.kind, client, cx.now) {
            return;
        }
        let id = self.common.ip_ids.next(virt, client, Protocol::ICMP.0, 1);
        let mut error = cx.out.spare(wire_icmp::ERROR_LEN_MAX);
        if wire_icmp::error(&mut error, complaint.kind, complaint.original, virt, id)
            && let Ok(made) = parse::ip(error.bytes(), false)
            && let Icmp::Error(about) = made.icmp(error.bytes(), Hook::Output)
            // The director counts the error as a packet of the connection towards its client.
            && matches!(decide.icmp_error(&about, cx.now), Verdict::Reply(_))
        {
            // It also counts the ICMP error of the tunnel path, with the length of the request that
            // it quotes.
            let quoted = u32::try_from(complaint.original.len()).unwrap_or(u32::MAX);
            let quoted = IcmpError {
                len: quoted,
                ..about
            };
            let _ = decide.icmp_error(&quoted, cx.now);
            let fate = self.send_own(&mut error, cx);
            self.counters.icmp_sent += u64::from(fate == Fate::Answered);
        }
        cx.out.keep(error);
    }
}

//! Client to server and back: translate, encapsulate, or change nothing but the link header.

use std::net::{IpAddr, SocketAddr};

use lvs_core::{Edit, Forward, Forwarding, Hook, IcmpError, Protocol, Reply, Tunnel, Verdict};

use super::leave::Pieces;
use super::{Cx, Decide, Fate, Job, Pipeline, Request};
use crate::packet::drop::FrameDrop;
use crate::packet::frame::Frame;
use crate::packet::intercept::LocalClient;
use crate::packet::net::{Net, NextHop};
use crate::packet::parse::{self, Icmp};
use crate::packet::rewrite::mss;
use crate::packet::rewrite::nat::{self, End};
use crate::packet::rewrite::payload;
use crate::packet::rewrite::tunnel::{self, Outer};
use crate::packet::segment::{Cut, finish_checksum};
use crate::packet::wire::icmp::{self as wire_icmp, ErrorKind};
use crate::packet::wire::{decrement_ttl, ip_dst, ip_src, ipv6};

impl Pipeline {
    /// Client to server.
    pub(super) fn forward<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        forward: &Forward,
        ports: bool,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let net = cx.env.net;
        let bypass = forward.method == Forwarding::Bypass;
        let target = if bypass {
            job.packet.dst
        } else {
            forward.target.ip()
        };
        if target.is_ipv6() != job.packet.is_ipv6() && forward.method != Forwarding::Tunnel {
            return Fate::Dropped(FrameDrop::Unsupported);
        }
        if bypass && net.is_local(target) {
            return Fate::Dropped(FrameDrop::Loop);
        }
        let local = forward.method == Forwarding::Local || net.is_local(target);
        if local {
            return self.forward_local(frame, job, forward, ports, cx);
        }
        if net.is_own_vip(target) {
            return Fate::Dropped(FrameDrop::Loop);
        }
        let Some(hop) = net.route(target) else {
            self.icmp_error(ErrorKind::HostUnreachable, frame, job, cx);
            return Fate::Dropped(FrameDrop::NoRoute);
        };
        if job.packet.src.is_loopback() {
            return Fate::Dropped(FrameDrop::Martian);
        }
        if let Some(fate) = self.unroutable(frame, job, forward.method, &hop, cx) {
            return fate;
        }
        if job.packet.ttl <= 1 {
            self.icmp_error(ErrorKind::TtlExceeded, frame, job, cx);
            return Fate::Dropped(FrameDrop::TtlExceeded);
        }
        if !forward.new && mss::asks(frame.bytes(), &job.packet) {
            // The first SYN was not answered: the server may have got another link-layer address.
            let request = Request::Confirm(hop.port, hop.addr);
            if !cx.out.requests.contains(&request) {
                cx.out.requests.push(request);
            }
        }
        decrement_ttl(frame.bytes_mut());
        self.fill_options_of_request(frame, job, cx);
        match forward.method {
            Forwarding::Nat | Forwarding::FullNat => {
                let way = Some((target, false));
                if let Some(fate) = self.too_big(frame, job, hop.mtu as usize, way, cx) {
                    return fate;
                }
                self.clamp_mss(frame, job, hop.mtu as usize, cx);
                if let Err(reason) = rewrite_request(frame, job, forward, ports) {
                    return Fate::Dropped(reason);
                }
                if job.from_host && job.inner.is_none() && forward.source.is_none() {
                    let client = LocalClient {
                        protocol: job.packet.protocol,
                        server: forward.target,
                        local: SocketAddr::new(
                            job.packet.src,
                            job.packet.ports.unwrap_or_default().0,
                        ),
                    };
                    let request = Request::InterceptLocalClient(client);
                    if !cx.env.intercept.local_clients.contains(&client)
                        && !cx.out.requests.contains(&request)
                    {
                        cx.out.requests.push(request);
                    }
                }
                self.leave(frame, &job.packet, &hop, job.pieces(), cx)
            }
            Forwarding::Route | Forwarding::Bypass => {
                let way = Some((target, false));
                if let Some(fate) = self.too_big(frame, job, hop.mtu as usize, way, cx) {
                    return fate;
                }
                self.clamp_mss(frame, job, hop.mtu as usize, cx);
                self.leave(frame, &job.packet, &hop, job.pieces(), cx)
            }
            Forwarding::Tunnel => self.tunnel(frame, job, forward, &hop, target, cx),
            Forwarding::Local => Fate::Dropped(FrameDrop::Unsupported),
        }
    }

    /// What cannot be done where the host routes what is sent (a port without Ethernet): a frame cannot be sent to another
    /// link-layer address than the route's; and the host keeps the answer to a connection of its own, which would need to
    /// be translated.
    fn unroutable<N: Net>(
        &mut self,
        frame: &Frame,
        job: &Job<'_>,
        method: Forwarding,
        hop: &NextHop,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        let net = cx.env.net;
        if net.port(hop.port).is_none_or(|port| port.ethernet) {
            return None;
        }
        match method {
            Forwarding::Route => Some(Fate::Dropped(FrameDrop::Unsupported)),
            Forwarding::Nat if net.is_local(job.packet.src) => {
                self.icmp_error(ErrorKind::HostUnreachable, frame, job, cx);
                Some(Fate::Dropped(FrameDrop::Unsupported))
            }
            _ => None,
        }
    }

    /// The real server is the director itself: no TTL, no MTU, no encapsulation.
    fn forward_local<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        forward: &Forward,
        ports: bool,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if forward.method.translates() {
            if forward.target.ip().is_loopback() && !job.from_host {
                return Fate::Dropped(FrameDrop::Martian);
            }
            if let Err(reason) = rewrite_request(frame, job, forward, ports) {
                return Fate::Dropped(reason);
            }
            return self.give_back(frame, job, cx);
        }
        if cx.env.net.is_own_vip(job.packet.dst) && !job.to_host {
            // The host does not have the address: it would route the packet straight back.
            return Fate::Dropped(FrameDrop::Loop);
        }
        if job.from_host {
            return Fate::Dropped(FrameDrop::Loop);
        }
        if self.intercepted(job, cx) {
            self.give_back(frame, job, cx)
        } else {
            Fate::Left
        }
    }

    /// Complains about a packet that does not fit `mtu` and must not be fragmented (`ensure_mtu_is_adequate`). `way`: to
    /// which server it was, and whether by tunnel.
    pub(super) fn too_big<N: Net>(
        &mut self,
        frame: &Frame,
        job: &Job<'_>,
        mtu: usize,
        way: Option<(IpAddr, bool)>,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        let packet = &job.packet;
        // What came in fragments of IPv6 fits as it fitted before.
        let longest = match job.history {
            Some(history) if packet.is_ipv6() => history.longest,
            _ => packet.len,
        };
        // An ICMP error that is being relayed is rather fragmented; one of IPv6 is lost.
        if !packet.df || longest <= mtu || (job.inner.is_some() && !packet.is_ipv6()) {
            return None;
        }
        let longest = match Cut::new(frame, packet) {
            Ok(Some(cut)) => cut.longest(packet.len),
            Ok(None) => longest,
            Err(reason) => return Some(Fate::Dropped(reason)),
        };
        if longest <= mtu {
            return None;
        }
        if let Some((server, tunnel)) = way {
            self.oversize.note(server, tunnel, mtu, longest);
        }
        let reported = u16::try_from(mtu).unwrap_or(u16::MAX);
        self.icmp_error(ErrorKind::FragmentationNeeded(reported), frame, job, cx);
        Some(Fate::Dropped(FrameDrop::TooBig))
    }

    fn tunnel<N: Net>(
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
        let path = self
            .tunnels
            .mtu(target, forward.tunnel, hop.mtu as usize, cx.now);
        let mtu = path.saturating_sub(tunnel::overhead(forward.tunnel, target));
        // What the inner packet does not forbid is cut to what was learned.
        let hop = &NextHop {
            mtu: u32::try_from(path).unwrap_or(hop.mtu),
            ..*hop
        };
        // The least that a link of the outer version has to take.
        let least = if target.is_ipv6() { ipv6::MTU_MIN } else { 68 };
        if mtu < least {
            return Fate::Dropped(FrameDrop::MtuTooSmall);
        }
        if (cx.env.pmtu_disc || job.packet.is_ipv6())
            && let Some(fate) = self.too_big(frame, job, mtu, Some((target, true)), cx)
        {
            return fate;
        }
        self.clamp_mss(frame, job, mtu, cx);
        let df = cx.env.pmtu_disc && job.packet.df && !job.packet.is_ipv6();
        let cut = match Cut::new(frame, &job.packet) {
            Ok(cut) => cut,
            Err(reason) => return Fate::Dropped(reason),
        };
        // The virtio header cannot express an aggregate inside a tunnel: each segment gets its own outer header.
        let count = cut.map_or(1, |cut| cut.count(job.packet.len));
        let id = if df {
            0
        } else {
            self.ip_ids.next(src, target, tunnel::IPV4, count)
        };
        let mut outer = Outer {
            src,
            dst: target,
            tunnel: forward.tunnel,
            source_port: match forward.tunnel {
                Tunnel::Gue { .. } => tunnel::source_port(&job.packet),
                _ => 0,
            },
            id,
            df,
        };
        let Some(cut) = cut else {
            if let Err(reason) = finish_checksum(frame) {
                return Fate::Dropped(reason);
            }
            frame.offload.segments = None;
            let pieces = match job.history {
                Some(history) if job.packet.is_ipv6() => {
                    Pieces::Around(history, tunnel::header_len(forward.tunnel))
                }
                Some(history) => Pieces::Even(history),
                None => Pieces::Relayed,
            };
            return self.tunnelled(frame, &outer, hop, pieces, cx);
        };
        let mut segments = Vec::with_capacity(count);
        cut.segments(
            frame,
            &job.packet,
            || cx.out.spare(),
            |segment| segments.push(segment),
        );
        let mut fate = Fate::Dropped(FrameDrop::BadAggregate);
        for mut segment in segments {
            fate = self.tunnelled(&mut segment, &outer, hop, Pieces::Relayed, cx);
            outer.id = outer.id.wrapping_add(1);
            cx.out.keep(segment);
        }
        fate
    }

    /// Encapsulates a packet and sends it. Whether it may be fragmented has been decided by the inner packet.
    fn tunnelled<N: Net>(
        &mut self,
        frame: &mut Frame,
        outer: &Outer,
        hop: &NextHop,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if let Err(reason) = tunnel::encapsulate(frame, outer) {
            return Fate::Dropped(reason);
        }
        match parse::ip(frame.bytes(), false) {
            Ok(packet) => self.leave(frame, &packet, hop, pieces, cx),
            Err(reason) => Fate::Dropped(reason),
        }
    }

    /// Tells a client of `message`, an ICMP error about the tunnel packet that carried its request, if that was one of a
    /// connection.
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
            return self.tunnels.too_big(message, route, cx.now);
        }
        let Some(complaint) = self.tunnels.complaint(message, route, cx.now) else {
            return;
        };
        let (client, virt) = (ip_src(complaint.original), ip_dst(complaint.original));
        if !net.is_vip(virt) || !self.rate_limit.allow(complaint.kind, client, cx.now) {
            return;
        }
        let id = self.ip_ids.next(virt, client, Protocol::ICMP.0, 1);
        let mut error = cx.out.spare();
        if wire_icmp::error(&mut error, complaint.kind, complaint.original, virt, id)
            && let Ok(made) = parse::ip(error.bytes(), false)
            && let Icmp::Error(about) = made.icmp(error.bytes(), Hook::Output, 0)
            // Asked as what it is, a packet of the connection to its client, it is counted as one.
            && matches!(decide.icmp_error(&about, cx.now), Verdict::Reply(_))
        {
            // And the complaint itself, as far as it quotes the request.
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

    /// Server to client.
    pub(super) fn reply<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        reply: &Reply,
        ports: bool,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        // Not translated: the host forwards (or takes) its own copy, if it has one.
        if reply.source.is_none() && !self.intercepted(job, cx) {
            return Fate::Left;
        }
        // Full NAT's replies are addressed to the director, whoever the client is.
        let (dst, to_host) = match reply.destination {
            Some(client) => (client.ip(), cx.env.net.is_local(client.ip())),
            None => (job.packet.dst, job.to_host),
        };
        let hop = if to_host {
            None
        } else {
            let Some(hop) = cx.env.net.route(dst) else {
                self.icmp_error(ErrorKind::NetUnreachable, frame, job, cx);
                return Fate::Dropped(FrameDrop::NoRoute);
            };
            if job.packet.ttl <= 1 {
                self.icmp_error(ErrorKind::TtlExceeded, frame, job, cx);
                return Fate::Dropped(FrameDrop::TtlExceeded);
            }
            // The server has to be told in terms of the packet that it sent, so this comes before the translation.
            if (job.history.is_none() || job.packet.is_ipv6())
                && let Some(fate) = self.too_big(frame, job, hop.mtu as usize, None, cx)
            {
                return fate;
            }
            Some(hop)
        };
        if let Some(source) = reply.source
            && let Err(reason) = rewrite(frame, job, End::Source, source, ports)
        {
            return Fate::Dropped(reason);
        }
        if let Some(client) = reply.destination
            && let Err(reason) = rewrite(frame, job, End::Destination, client, ports)
        {
            return Fate::Dropped(reason);
        }
        let edited;
        let job = match &reply.edit {
            None => job,
            Some(edit) => {
                if let Err(reason) = payload::edit(frame, &job.packet, edit) {
                    return Fate::Dropped(reason);
                }
                edited = job.edited(frame, edit);
                &edited
            }
        };
        let Some(hop) = hop else {
            // The client is the director itself.
            return self.give_back(frame, job, cx);
        };
        // What the host has made itself starts its way here.
        if !job.from_host {
            decrement_ttl(frame.bytes_mut());
        }
        self.fill_options_of_reply(frame, job, reply, &hop, cx);
        self.clamp_mss(frame, job, hop.mtu as usize, cx);
        let pieces = job.history.map_or(Pieces::Whole, Pieces::Along);
        self.leave(frame, &job.packet, &hop, pieces, cx)
    }
}

/// Translates a client's packet.
#[inline]
fn rewrite_request(
    frame: &mut Frame,
    job: &Job<'_>,
    forward: &Forward,
    ports: bool,
) -> Result<(), FrameDrop> {
    rewrite(frame, job, End::Destination, forward.target, ports)?;
    if let Some(local) = forward.source {
        rewrite(frame, job, End::Source, local, ports)?;
    }
    if let Some(shift) = forward.shift {
        payload::acknowledge(frame, job.packet.l4, shift);
    }
    Ok(())
}

impl Job<'_> {
    /// The packet as it is after `edit`.
    fn edited(&self, frame: &Frame, edit: &Edit) -> Self {
        let mut job = *self;
        if edit.replacement.is_some() {
            job.packet.len = frame.len();
            // It is not the one any more that came in fragments.
            job.history = None;
        }
        job
    }
}

/// Translates one end of a packet, or of an ICMP error and the packet inside it.
#[inline]
fn rewrite(
    frame: &mut Frame,
    job: &Job<'_>,
    end: End,
    to: SocketAddr,
    ports: bool,
) -> Result<(), FrameDrop> {
    if job.inner.is_some() {
        nat::translate_icmp(frame.bytes_mut(), job.packet.l4, end, to, ports)
    } else {
        nat::translate(frame, &job.packet, end, to)
    }
}

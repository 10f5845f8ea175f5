//! Sends packets of clients to servers: translated, encapsulated, or with only a new link header.

use std::net::SocketAddr;

use lvs_core::{Forward, Forwarding};

use super::datagram::Job;
use super::reply::{rewrite, written_by_nat};
use super::{Cx, Fate, Pipeline, Request};
use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::intercept::LocalClient;
use crate::net::{Net, NextHop};
use crate::rewrite::mss;
use crate::rewrite::nat::End;
use crate::rewrite::payload;
use crate::wire::decrement_ttl;
use crate::wire::icmp::ErrorKind;

impl Pipeline {
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
        if forward.method == Forwarding::Local || net.is_local(target) {
            return self.forward_local(frame, job, forward, ports, cx);
        }
        if net.is_own_vip(target) {
            return Fate::Dropped(FrameDrop::Loop);
        }
        let Some(hop) = net.route(target) else {
            self.icmp_error(ErrorKind::HostUnreachable, frame, job, cx);
            return Fate::Dropped(net.why_no_route(target));
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
            // The client repeats its SYN, so the server's link-layer address may have changed.
            cx.out.request(Request::Confirm(hop.port, hop.addr));
        }
        decrement_ttl(frame.bytes_mut());
        self.fill_options_of_request(frame, job, cx);
        match forward.method {
            Forwarding::Tunnel => self.tunnel(frame, job, forward, &hop, target, cx),
            Forwarding::Local => Fate::Dropped(FrameDrop::Unsupported),
            _ => self.forward_by(&hop, frame, job, forward, ports, cx),
        }
    }

    /// Translates a request if its method requires it, and sends it to the server by the next hop.
    /// If the request is too long for this hop, its sender receives an ICMP error instead. With
    /// NAT, a request of this host is held until the replies to it are intercepted.
    fn forward_by<N: Net>(
        &mut self,
        hop: &NextHop,
        frame: &mut Frame,
        job: &Job<'_>,
        forward: &Forward,
        ports: bool,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let translates = forward.method.translates();
        let target = if forward.method == Forwarding::Bypass {
            job.packet.dst
        } else {
            forward.target.ip()
        };
        let way = Some((target, false));
        if let Some(fate) = self.too_big(frame, job, hop.mtu as usize, way, cx) {
            return fate;
        }
        self.clamp_mss(frame, job, hop.mtu as usize, cx);
        if translates {
            if let Err(reason) = rewrite_request(frame, job, forward, ports) {
                return Fate::Dropped(reason);
            }
            if job.from_host && job.inner.is_none() && forward.source.is_none() {
                let client = LocalClient {
                    protocol: job.packet.protocol,
                    server: forward.target,
                    local: SocketAddr::new(job.packet.src, job.packet.ports.unwrap_or_default().0),
                };
                if !cx.env.intercept.local_clients.contains(&client) {
                    // The host has no connection with the server's address, and would answer the
                    // reply with a RST.
                    let copy = frame.clone();
                    if self.held.hold_local_client(client, cx.server, copy, cx.now) {
                        cx.out.request(Request::InterceptLocalClient(client));
                    }
                    return Fate::Held;
                }
            }
        }
        let written = job
            .history
            .filter(|_| translates)
            .map(|history| history.with_first(written_by_nat(frame.bytes(), job, ports)));
        let pieces = job.pieces(written.as_ref().or(job.history));
        self.leave(frame, &job.packet, hop, pieces, cx)
    }

    /// On a port without Ethernet, the host routes the packets that the dataplane sends. Returns
    /// the fate of a packet that cannot be sent in this way. Direct routing needs a link-layer
    /// destination that differs from the route's. If the client is the host itself, the host would
    /// receive the server's reply directly, without the translation that NAT needs.
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

    /// Passes a request to a server on this host: TTL and MTU do not matter, and there is no
    /// encapsulation.
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
        if job.from_host && job.to_host {
            return self.give_back(frame, job, cx);
        }
        if job.from_host || cx.env.net.is_own_vip(job.packet.dst) && !job.to_host {
            // The host does not have the address: it would route the packet back to the dataplane.
            return Fate::Dropped(FrameDrop::Loop);
        }
        if self.intercepted(job, cx) {
            self.give_back_as_it_came(frame, job, cx)
        } else {
            Fate::Left
        }
    }
}

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

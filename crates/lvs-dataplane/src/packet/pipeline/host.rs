//! What the host is to have, and what is answered in its place: ARP, neighbour discovery, echo, resets, ICMP errors.

use std::net::{IpAddr, Ipv6Addr};

use lvs_core::{Hook, Protocol, TcpFlags};

use super::leave::{Pieces, dont_fragment};
use super::{Cx, Echo, Fate, Job, Output, Pipeline, Request};
use crate::packet::arp;
use crate::packet::drop::FrameDrop;
use crate::packet::fragment;
use crate::packet::frame::{Frame, Offload};
use crate::packet::icmp_limit::may_be_answered;
use crate::packet::mld::{self, Change};
use crate::packet::ndp;
use crate::packet::net::{Net, PortId, PortInfo};
use crate::packet::parse::{self, Icmp};
use crate::packet::segment::finish_checksum;
use crate::packet::wire::icmp::{self as wire_icmp, ErrorKind};
use crate::packet::wire::{ETHERNET_LEN, Mac, be16, icmpv6, ipv6, tcp};

impl Pipeline {
    /// Announces an own address on a port.
    pub fn announce<N: Net>(&mut self, port: PortId, addr: IpAddr, net: &N, out: &mut Output) {
        match addr {
            IpAddr::V4(addr) => self.broadcast(port, net, out, |mac| arp::gratuitous(mac, addr)),
            IpAddr::V6(addr) => self.broadcast(port, net, out, |mac| ndp::unsolicited(mac, addr)),
        }
    }

    /// Asks on a port who has an address. Answers come as [`Request::AddressConflict`].
    pub fn probe<N: Net>(&mut self, port: PortId, addr: IpAddr, net: &N, out: &mut Output) {
        match addr {
            IpAddr::V4(addr) => self.broadcast(port, net, out, |mac| arp::probe(mac, addr)),
            IpAddr::V6(addr) => self.broadcast(port, net, out, |mac| ndp::probe(mac, addr)),
        }
    }

    /// Says on a port which groups are listened to there. `src` is a link-local address of the port, if it has one. `v1`: to a
    /// querier of version 1 of the protocol.
    #[expect(clippy::too_many_arguments, reason = "they are what there is to say")]
    pub fn report_listening<N: Net>(
        &mut self,
        port: PortId,
        src: Ipv6Addr,
        groups: &[Ipv6Addr],
        change: Change,
        v1: bool,
        net: &N,
        out: &mut Output,
    ) {
        if v1 {
            for &group in groups {
                self.broadcast(port, net, out, |mac| {
                    mld::report_v1(mac, src, group, change)
                });
            }
        } else {
            for groups in groups.chunks(mld::RECORDS_MAX) {
                self.broadcast(port, net, out, |mac| mld::report(mac, src, groups, change));
            }
        }
    }

    fn broadcast<N: Net, M: AsRef<[u8]>>(
        &mut self,
        port: PortId,
        net: &N,
        out: &mut Output,
        message: impl FnOnce(Mac) -> M,
    ) {
        if let Some(info) = net.port(port).filter(|info| info.ethernet) {
            let mut frame = out.spare();
            if frame.extend(message(info.mac).as_ref()) {
                self.counters.emitted += 1;
                out.queue(port).push(frame);
            }
        }
    }

    pub(super) fn arp<N: Net>(
        &mut self,
        port: PortId,
        info: &PortInfo,
        frame: &Frame,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let Some(message) = arp::parse(frame.bytes()) else {
            return Fate::Left;
        };
        let net = cx.env.net;
        let claimed = IpAddr::V4(message.sender);
        if message.sender_mac != info.mac && (net.is_own_vip(claimed) || net.is_vip(claimed)) {
            cx.out.requests.push(Request::AddressConflict {
                port,
                addr: claimed,
                mac: message.sender_mac,
            });
        }
        if !message.request
            || message.sender == message.target
            || !net.answers_arp(port, IpAddr::V4(message.target))
        {
            return Fate::Left;
        }
        self.answer(port, &arp::reply(&message, info.mac), cx)
    }

    /// Neighbour solicitations for own addresses are answered, claims of others to a service's address are reported. `None`:
    /// it is something else.
    pub(super) fn neighbour_discovery<N: Net>(
        &mut self,
        port: PortId,
        info: &PortInfo,
        frame: &Frame,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        let bytes = frame.bytes();
        // Most packets are not ICMPv6. What is about groups has options in front.
        match bytes.get(ETHERNET_LEN + 6) {
            Some(&icmpv6::PROTOCOL) => {}
            Some(0) => {
                let query = mld::parse(bytes)?;
                let request = Request::ListenerQuery(port, query);
                if !cx.out.requests.contains(&request) {
                    cx.out.requests.push(request);
                }
                return Some(Fate::Left);
            }
            _ => return None,
        }
        let message = ndp::parse(bytes)?;
        let net = cx.env.net;
        let target = IpAddr::V6(message.target);
        if !message.solicitation {
            if message.mac != info.mac && (net.is_own_vip(target) || net.is_vip(target)) {
                cx.out.requests.push(Request::AddressConflict {
                    port,
                    addr: target,
                    mac: message.mac,
                });
            }
            return Some(Fate::Left);
        }
        if message.mac == info.mac || !net.answers_arp(port, target) {
            return Some(Fate::Left);
        }
        let answer = ndp::advertisement(&message, info.mac);
        Some(self.answer(port, &answer, cx))
    }

    /// Sends a whole frame made here.
    fn answer<N: Net>(&mut self, port: PortId, answer: &[u8], cx: &mut Cx<'_, N>) -> Fate {
        // Not in the frame that asked: an answer may be longer.
        let mut frame = cx.out.spare();
        if !frame.extend(answer) {
            return Fate::Dropped(FrameDrop::NoRoom);
        }
        self.counters.emitted += 1;
        cx.out.queue(port).push(frame);
        Fate::Answered
    }

    /// Not for the director.
    pub(super) fn accept<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if cx.env.net.is_own_vip(job.packet.dst) && !job.to_host {
            return self.own_host(frame, job, cx);
        }
        if job.from_host {
            return self.host_sends(frame, job, cx);
        }
        if !self.intercepted(job, cx) {
            return Fate::Left;
        }
        self.give_back(frame, job, cx)
    }

    /// What the host sends through here: nothing, but for what a server on it says to others than the clients of services.
    fn host_sends<N: Net>(&mut self, frame: &mut Frame, job: &Job<'_>, cx: &mut Cx<'_, N>) -> Fate {
        if !cx.env.intercept.is_of_local_node(&job.packet) {
            return Fate::Dropped(FrameDrop::HostStray);
        }
        let Some(hop) = cx.env.net.route(job.packet.dst) else {
            self.icmp_error(ErrorKind::HostUnreachable, frame, job, cx);
            return Fate::Dropped(FrameDrop::NoRoute);
        };
        if let Some(fate) = self.too_big(frame, job, hop.mtu as usize, None, cx) {
            return fate;
        }
        let pieces = job.history.map_or(Pieces::Whole, Pieces::Along);
        self.leave(frame, &job.packet, &hop, pieces, cx)
    }

    /// Gives a packet to the host through its TUN device.
    pub(super) fn give_back<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let Some((port, info)) = cx
            .env
            .net
            .host_port()
            .and_then(|port| Some((port, cx.env.net.port(port)?)))
        else {
            return Fate::Dropped(FrameDrop::NoHostPort);
        };
        if let Some(history) = job.history {
            // As it came: the host puts it together, or forwards it, as it would have.
            let Cx { out, .. } = cx;
            let mut pieces = Vec::new();
            let cut = if job.packet.is_ipv6() {
                let (headers, _) = ipv6::unfragmentable(frame.bytes());
                let sizes = history.behind(headers, 0);
                let limit = history.longest.max(ipv6::MTU_MIN);
                let id = self.ip_ids.next_fragments();
                fragment::fragment6(frame, limit, Some(&sizes), id, Frame::new, |piece| {
                    pieces.push(piece);
                })
            } else {
                let df = dont_fragment(frame);
                fragment::fragment(
                    frame,
                    history.longest,
                    Some(&history.sizes),
                    df,
                    Frame::new,
                    |piece| pieces.push(piece),
                )
            };
            if let Err(reason) = cut {
                return Fate::Dropped(reason);
            }
            self.counters.emitted += pieces.len() as u64;
            out.queue(port).append(&mut pieces);
            return Fate::GivenBack;
        }
        if !info.offload
            && let Err(reason) = finish_checksum(frame)
        {
            return Fate::Dropped(reason);
        }
        self.counters.emitted += 1;
        cx.out.push(port, frame);
        Fate::GivenBack
    }

    /// What the host's own stack would do, for an address that the engine owns.
    fn own_host<N: Net>(&mut self, frame: &mut Frame, job: &Job<'_>, cx: &mut Cx<'_, N>) -> Fate {
        let packet = job.packet;
        let ip = frame.bytes();
        let l4 = &ip[packet.l4.min(ip.len())..];
        let trusted = frame.offload.is_checked();
        match packet.protocol {
            _ if packet.is_icmp() => {
                if !wire_icmp::is_echo_request(ip, packet.l4) {
                    return Fate::Dropped(FrameDrop::OwnAddress);
                }
                if self.settings.echo == Echo::Drop {
                    return Fate::Dropped(FrameDrop::EchoOff);
                }
                if !self.echo.take(cx.now) {
                    return Fate::Dropped(FrameDrop::EchoLimit);
                }
                let id = self
                    .ip_ids
                    .next(packet.dst, packet.src, Protocol::ICMP.0, 1);
                wire_icmp::echo_reply(frame, packet.l4, id);
                self.send_own(frame, cx)
            }
            Protocol::TCP => {
                if l4.len() < 20 || TcpFlags(l4[13]).has(TcpFlags::RST) {
                    return Fate::Dropped(FrameDrop::OwnAddress);
                }
                self.answer_with_reset(frame, &packet, cx)
                    .unwrap_or(Fate::Dropped(FrameDrop::OwnAddress))
            }
            Protocol::UDP => {
                let right = l4.len() >= 8
                    && (trusted
                        || (be16(l4, 6) == 0 && !packet.is_ipv6())
                        || tcp::checksum_ok(ip, packet.l4, Protocol::UDP.0));
                if right {
                    self.icmp_error(ErrorKind::PortUnreachable, frame, job, cx);
                }
                Fate::Dropped(FrameDrop::OwnAddress)
            }
            _ => {
                self.icmp_error(ErrorKind::ProtocolUnreachable, frame, job, cx);
                Fate::Dropped(FrameDrop::OwnAddress)
            }
        }
    }

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
            cx.out.push(port, frame);
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
            || !self.rate_limit.allow(kind, packet.src, cx.now)
        {
            return;
        }
        let src = if job.to_host || net.is_own_vip(packet.dst) {
            packet.dst
        } else {
            // A router's error comes from its address on the link towards the receiver.
            match net.route(packet.src).and_then(|hop| hop.source) {
                Some(addr) => addr,
                // The host of a VIP that is only routed here: nothing is better than the address that was asked.
                _ if job.hook != Hook::Transit => packet.dst,
                _ => return,
            }
        };
        let id = self.ip_ids.next(src, packet.src, Protocol::ICMP.0, 1);
        let mut error = cx.out.spare();
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

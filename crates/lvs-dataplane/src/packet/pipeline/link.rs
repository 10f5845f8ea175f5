//! Neighbours and groups: ARP, neighbour discovery, multicast listeners.

use std::net::{IpAddr, Ipv6Addr};

use super::{Cx, Fate, Output, Pipeline, Request};
use crate::packet::arp;
use crate::packet::drop::FrameDrop;
use crate::packet::frame::Frame;
use crate::packet::mld::{self, Change};
use crate::packet::ndp;
use crate::packet::net::{Net, PortId, PortInfo};
use crate::packet::wire::{ETHERNET_LEN, Mac, icmpv6, ipv6};

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
            let message = message(info.mac);
            let mut frame = out.spare(message.as_ref().len());
            if frame.extend(message.as_ref()) {
                self.counters.emitted += 1;
                out.push(port, frame);
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
            cx.out.request(Request::AddressConflict {
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
        match bytes.get(ETHERNET_LEN + ipv6::field::NEXT_HEADER) {
            Some(&icmpv6::PROTOCOL) => {}
            Some(0) => {
                let query = mld::parse(bytes)?;
                cx.out.request(Request::ListenerQuery(port, query));
                return Some(Fate::Left);
            }
            _ => return None,
        }
        let message = ndp::parse(bytes)?;
        let net = cx.env.net;
        let target = IpAddr::V6(message.target);
        if !message.solicitation {
            if message.mac != info.mac && (net.is_own_vip(target) || net.is_vip(target)) {
                cx.out.request(Request::AddressConflict {
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
        let mut frame = cx.out.spare(answer.len());
        if !frame.extend(answer) {
            return Fate::Dropped(FrameDrop::NoRoom);
        }
        self.counters.emitted += 1;
        cx.out.push(port, frame);
        Fate::Answered
    }
}

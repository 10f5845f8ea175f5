//! Packets of neighbours: ARP, neighbour discovery, multicast listener queries.

use std::net::IpAddr;

use super::{Cx, Fate, Pipeline, Request};
use crate::arp;
use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::mld;
use crate::ndp;
use crate::net::{Net, PortId, PortInfo};
use crate::wire::{ETHERNET_LEN, icmpv6, ipv6};

impl Pipeline {
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
        if message.sender_mac != info.mac && is_ours(claimed, net) {
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

    /// Answers neighbour solicitations for the addresses of [`Net::answers_arp`]. Reports multicast
    /// listener queries, and advertisements of other hosts for an address of this host, of the
    /// dataplane or of a service. Returns `None` if the packet is no such query, solicitation or
    /// advertisement.
    pub(super) fn neighbour_discovery<N: Net>(
        &mut self,
        port: PortId,
        info: &PortInfo,
        frame: &Frame,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        let bytes = frame.bytes();
        // Most packets are not ICMPv6. Multicast listener messages have hop-by-hop options.
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
            if message.mac != info.mac && is_ours(target, net) {
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

    /// Sends a frame of the dataplane itself, complete with its Ethernet header.
    fn answer<N: Net>(&mut self, port: PortId, answer: &[u8], cx: &mut Cx<'_, N>) -> Fate {
        // Do not use the request's frame, because the answer may be longer.
        let mut frame = cx.out.spare(answer.len());
        if !frame.extend(answer) {
            return Fate::Dropped(FrameDrop::NoRoom);
        }
        self.counters.emitted += 1;
        cx.out.push(port, frame);
        Fate::Answered
    }
}

/// Whether the address belongs to this host, to the dataplane or to a service, so that no other
/// host may claim it.
fn is_ours<N: Net>(addr: IpAddr, net: &N) -> bool {
    net.is_own_vip(addr) || net.is_vip(addr) || net.is_local(addr)
}
